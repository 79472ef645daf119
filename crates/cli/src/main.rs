//! The polder command.
#![forbid(unsafe_code)]

fn main() {}
