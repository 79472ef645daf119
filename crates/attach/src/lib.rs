//! How a process comes to a pool, and stays in touch with it: settings from arguments, environment and files; a job's launcher; the
//! session; the threads that run a group's calls, drive an endpoint, and put and get blocks.
//!
//! The memory under a pool is chosen here, at run time ([`session::AnyPool`]).
#![forbid(unsafe_code)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "pools need x86-64: a put past the caches leaves the words beside it alone there (docs/memory-model.md, \"Another CPU\")"
);

pub mod background;
pub mod job_pool;
pub mod lane;
pub mod log;
pub mod messages;
pub mod named_blocks;
pub mod session;
pub mod settings;
pub mod tellers;
