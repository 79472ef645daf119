//! Why bytes do not reach a tier, or do not come back, and why a step over them was not done.

use std::io;
use std::path::PathBuf;

use polder_kernels::{KernelError, PIECE};
use polder_mem::RegionError;

/// Why bytes do not reach a tier, or do not come back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// No memory for a buffer.
    #[error("{bytes} bytes of memory cannot be mapped: {source}")]
    NoMemory {
        /// How many were asked for.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// No such NUMA node.
    #[error(
        "NUMA node {node}: this machine has none of this number; name one of /sys/devices/system/node/has_memory"
    )]
    NoNode {
        /// Which.
        node: usize,
    },
    /// A NUMA node that others may use.
    #[error(
        "NUMA node {node}: this process may use {allowed:?} alone; add {node} to the cpuset.mems of its cgroup"
    )]
    NotAllowed {
        /// Which.
        node: usize,
        /// Those that it may use.
        allowed: Vec<usize>,
    },
    /// A NUMA node with too little memory.
    #[error("NUMA node {node}: {bytes} bytes do not fit, {room} are free; free some, or place less there")]
    TooSmall {
        /// Which.
        node: usize,
        /// How many were to lie there.
        bytes: usize,
        /// How many it can still give.
        room: u64,
    },
    /// The kernel does not put pages on a node.
    #[error("NUMA node {node}: the kernel binds no pages to it: {source}")]
    Node {
        /// Which.
        node: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel does not say where pages lie.
    #[error("the kernel does not say where pages lie (move_pages): {0}")]
    Pages(io::Error),
    /// A piece that is not in its range, or that is mapped.
    #[error(
        "[{begin}, +{bytes}) is no piece of a range of {size} bytes; name multiples of {multiple} inside it, where nothing is mapped"
    )]
    Piece {
        /// Where it begins.
        begin: usize,
        /// How many bytes.
        bytes: usize,
        /// What both must be a multiple of.
        multiple: usize,
        /// Bytes of the range.
        size: usize,
    },
    /// Nothing that can be mapped.
    #[error(transparent)]
    Memory(RegionError),
    /// A file that lies on a disk.
    #[error("{}: this file lies on a disk, and mapped it would be page cache; name a dax device, or the folder as a tier", path.display())]
    NotInPlace {
        /// The file.
        path: PathBuf,
    },
    /// A device or file that other ranges have.
    #[error("{}: no {bytes} bytes in a row are free of its {size}; place less there, or end what else uses it", path.display())]
    NoRoom {
        /// The device or file.
        path: PathBuf,
        /// How many bytes.
        bytes: usize,
        /// Bytes of the device or file.
        size: u64,
    },
    /// Bytes that a failed transfer was to bring.
    #[error("a saved tensor was lost when a transfer of it failed; run the forward pass again")]
    Lost,
    /// A file in memory, on a file system that has no room left.
    #[error("{}: its file system has no room for {bytes} bytes, {free} are free; free some, or place less there", path.display())]
    FullMemory {
        /// The file.
        path: PathBuf,
        /// How many bytes.
        bytes: usize,
        /// How many are free.
        free: u64,
    },
    /// The kernel does not map a device or file.
    #[error("{}: {bytes} bytes cannot be mapped: {source}", path.display())]
    Unmappable {
        /// The device or file.
        path: PathBuf,
        /// How many bytes.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// A mapped device or file has lost bytes.
    #[error(
        "{}: it has {size} bytes left of {needed} that are mapped; something has unbound or truncated it, so end this program",
        path.display()
    )]
    Gone {
        /// The device or file.
        path: PathBuf,
        /// Bytes that it has.
        size: u64,
        /// Bytes that it had at least.
        needed: u64,
    },
    /// No file can be made there.
    #[error("{}: no file can be made in this folder: {source}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The folder lies in memory.
    #[error("{}: this folder lies in memory (tmpfs), so it is no tier beside DRAM; name one on a disk", path.display())]
    InMemory {
        /// The folder.
        path: PathBuf,
    },
    /// A file of the process that forked this one.
    #[error("{}: what lies here belongs to the process that forked this one; place anew in this process", path.display())]
    Forked {
        /// The folder.
        path: PathBuf,
    },
    /// The file system takes no direct I/O.
    #[error("{}: this file system takes no direct I/O ({source}); name a folder on a disk", path.display())]
    Indirect {
        /// The folder.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The disk has no room.
    #[error("{}: {bytes} bytes do not fit on this disk, {free} are free; free some, or name another folder", path.display())]
    Full {
        /// The folder.
        path: PathBuf,
        /// How many were to be written.
        bytes: u64,
        /// How many are free.
        free: u64,
    },
    /// A write ended before its last byte.
    #[error("{}: {bytes} bytes at {offset} were not written: {source}", path.display())]
    Write {
        /// The folder.
        path: PathBuf,
        /// Where in the tier.
        offset: u64,
        /// How many were left to write.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// A read ended before its last byte.
    #[error("{}: {bytes} bytes at {offset} were not read: {source}", path.display())]
    Read {
        /// The folder.
        path: PathBuf,
        /// Where in the tier.
        offset: u64,
        /// How many were left to read.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is shorter than the tier.
    #[error("{}: the file ends at {ends}, where {bytes} more bytes were written before; something has truncated it", path.display())]
    Truncated {
        /// The folder.
        path: PathBuf,
        /// Where it ends.
        ends: u64,
        /// How many bytes are missing of those that were to be read.
        bytes: usize,
    },
    /// The file has lost blocks that were reserved.
    #[error("{}: the disk has {blocks} bytes of this file of {size}; something has truncated it or punched holes into it", path.display())]
    Holes {
        /// The folder.
        path: PathBuf,
        /// Bytes that the disk has.
        blocks: u64,
        /// Bytes of the tier.
        size: u64,
    },
    /// A transfer beyond the end of the tier, or not in whole pages.
    #[error("[{offset}, +{bytes}) is no range of whole pages in the {size} bytes of the tier in {}; use a larger tier", path.display())]
    Range {
        /// The folder.
        path: PathBuf,
        /// Where it begins.
        offset: u64,
        /// How many bytes.
        bytes: usize,
        /// Bytes of the tier.
        size: u64,
    },
}

impl TierError {
    /// Whether the tier is there and has no room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(
            self,
            Self::TooSmall { .. } | Self::NoRoom { .. } | Self::Full { .. } | Self::FullMemory { .. }
        )
    }
}

/// Why a step was not done, or moments were not copied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// A tier failed.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// Arrays of a tensor do not fit each other.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Another number of moments than optimizers have.
    #[error("expected 1 or 2 moments, found {count}")]
    Moments {
        /// How many.
        count: usize,
    },
    /// States that are cut inside a page.
    #[error("states are placed in whole pages of {elements} elements")]
    Pages {
        /// Elements of a page.
        elements: usize,
    },
    /// Tensors that are not where a step expects them.
    #[error(
        "expected tensors one after another that begin at multiples of {PIECE} elements and end by {elements}"
    )]
    Tensors {
        /// Elements that have moments.
        elements: usize,
    },
    /// Moments of elements that there are not.
    #[error("expected elements up to {elements}")]
    End {
        /// Elements that have moments.
        elements: usize,
    },
    /// Arrays of a step that share memory, of which it writes one.
    #[error(
        "{what} of tensor {tensor} of the step shares memory with {other} of tensor {before}; give each memory of its own, and \
         tie parameters by using one Parameter twice"
    )]
    Shared {
        /// What the array is that begins later.
        what: &'static str,
        /// The number of its tensor.
        tensor: usize,
        /// What the other is.
        other: &'static str,
        /// The number of its tensor.
        before: usize,
    },
}
