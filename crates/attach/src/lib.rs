//! How a process comes to a pool: settings from arguments, environment and files; a job's launcher; the session.
//!
//! The memory under a pool is chosen here, at run time ([`session::AnyPool`]).
#![forbid(unsafe_code)]

pub mod job_pool;
pub mod session;
pub mod settings;
