//! What the lab's guests, its tests and the program that boots a rack share.
#![forbid(unsafe_code)]

pub mod check;
pub mod hosts;
pub mod wire;
