//! Folders on disks, as tiers below memory.

use serde::{Deserialize, Serialize};

use crate::{Bandwidth, Bytes};

/// A folder on a disk that objects can be placed in, by direct I/O.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Where.
    pub folder: String,
    /// How much of it objects may take.
    pub capacity: Bytes,
    /// Reading, several transfers at once, past the page cache.
    pub read: Bandwidth,
    /// Writing, in the same way.
    pub write: Bandwidth,
}
