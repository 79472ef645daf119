//! The protocols of the pool, each as a suite that the incoherent model explores: `cargo test` runs some thousands of
//! schedules of each and every mutant, `polder-dev verify` as many as one likes.

mod attempts;
mod barrier;
mod channel;
mod chunks;
mod collectives;
mod deaths;
mod directory;
mod endpoint;
mod group;
mod inspection;
mod join;
mod kv;
mod local;
mod membership;
mod publish;
mod ring;
mod service;
mod session;
mod stage;
mod storage;
mod window;

use polder_mem::model::Suite;

/// Every suite.
#[must_use]
pub fn suites() -> Vec<Suite> {
    let mut suites = local::suites();
    suites.extend(membership::suites());
    suites.extend(publish::suites());
    suites.extend(ring::suites());
    suites.extend(barrier::suites());
    suites.extend(deaths::suites());
    suites.extend(collectives::suites());
    suites.extend(chunks::suites());
    suites.extend(directory::suites());
    suites.extend(join::suites());
    suites.extend(endpoint::suites());
    suites.extend(window::suites());
    suites.extend(channel::suites());
    suites.extend(service::suites());
    suites.extend(session::suites());
    suites.extend(storage::suites());
    suites.extend(attempts::suites());
    suites.extend(kv::suites());
    suites.extend(inspection::suites());
    suites
}

/// Protocols that are known to be wrong: some schedule of each must fail, or the model is blind.
#[must_use]
pub fn canaries() -> Vec<Suite> {
    let mut canaries = membership::canaries();
    canaries.extend(publish::canaries());
    canaries.extend(ring::canaries());
    canaries.extend(barrier::canaries());
    canaries.extend(deaths::canaries());
    canaries.extend(collectives::canaries());
    canaries.extend(chunks::canaries());
    canaries.extend(directory::canaries());
    canaries.extend(endpoint::canaries());
    canaries.extend(window::canaries());
    canaries.extend(service::canaries());
    canaries.extend(session::canaries());
    canaries.extend(storage::canaries());
    canaries.extend(attempts::canaries());
    canaries.extend(kv::canaries());
    canaries.extend(inspection::canaries());
    canaries
}
