//! What `polder-dev` judges by: figures of single papers, and all-reduces of this machine, beside what is predicted of them.
//!
//! - `trace` draws accesses to pages;
//! - `walk` computes the time of a collective as the pool runs it;
//! - `judge` compares predictions with published and measured figures.
#![forbid(unsafe_code)]

pub mod judge;
pub mod trace;
pub mod walk;
