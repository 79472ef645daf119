//! The protocols of the pool, each as a suite that the incoherent model explores: `cargo test` runs some thousands of
//! schedules of each and every mutant, `polder verify` as many as one likes.

mod local;

use polder_mem::model::Suite;

/// Every suite.
#[must_use]
pub fn suites() -> Vec<Suite> {
    local::suites()
}
