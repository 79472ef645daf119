//! Which bytes live in which tier of memory: pure functions of what was measured and what is wanted.
#![forbid(unsafe_code)]

pub mod pages;
