//! What a host of a rack and the program that booted it say to each other: JSON, an object a line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a host is told.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Start a process.
    Run {
        /// The number that its output goes by.
        id: u64,
        /// The program and its arguments.
        words: Vec<String>,
        /// What its environment has more than that of every process.
        env: BTreeMap<String, String>,
    },
    /// Kill a process as `kill -9` does.
    Kill {
        /// Its number.
        id: u64,
    },
}

/// What a host says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// It has booted, and has the device.
    Ready {
        /// Its kernel's release.
        kernel: String,
        /// Its kernel's boot id.
        boot: String,
        /// Bytes of the device.
        bytes: u64,
    },
    /// It cannot go on.
    Broken {
        /// Why.
        why: String,
    },
    /// A line that a process printed.
    Line {
        /// The number of the process.
        id: u64,
        /// The line.
        text: String,
    },
    /// A process has ended, and has printed all its lines.
    Ended {
        /// The number of the process.
        id: u64,
        /// Its exit status; none if a signal ended it.
        status: Option<i32>,
    },
}
