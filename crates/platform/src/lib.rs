//! See Cargo.toml.
#![forbid(unsafe_code)]
