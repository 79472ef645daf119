//! Collectives of ranks that copy bytes, walked through as the pool runs them.

mod cores;
mod steps;

pub use cores::LOOKS;
pub(crate) use steps::Walk;
pub use steps::{MessagePlace, collective};
