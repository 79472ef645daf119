//! How a process comes to a pool: settings from arguments, environment and files; a job's launcher; the session.
//!
//! The memory under a pool is chosen here, at run time: [`session::AnyPool`], [`AnyWindow`] and [`AnyPrivateMemory`] hold one
//! of three, and [`each`] matches once an operation.
#![forbid(unsafe_code)]

pub mod job_pool;
mod private;
pub mod session;
pub mod settings;
mod window;

pub use private::AnyPrivateMemory;
pub use window::AnyWindow;
