//! What measures this machine: memory, lines, rings, sockets and kernels, for `polder probe` and the benchmarks.
#![forbid(unsafe_code)]

#[macro_use(eprintln)]
extern crate polder_front;

pub mod machine;
pub mod pair;
mod python;
pub mod ring;
mod row;
mod scratch;

use polder_front::Failure;

pub use python::{polder, python};
pub use row::{Better, Kind, Row, Sample, short, times};
pub use scratch::{Scratch, Tied};

/// A number of bytes in plain words.
#[must_use]
pub fn size(bytes: usize) -> String {
    match bytes {
        _ if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}
