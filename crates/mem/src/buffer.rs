//! Pages of this process alone: what tiers are staged through, bound to a NUMA node where one is asked for.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::numa;
use crate::range::HUGE_PAGE;
use crate::tier::TierError;

/// The unit of direct I/O and of placement.
pub const PAGE: usize = 4096;

/// Zeroed pages, aligned for direct I/O and unmapped when dropped.
#[derive(Debug)]
pub struct Buffer {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the pages belong to the buffer alone, and are reached through it only.
unsafe impl Send for Buffer {}
// SAFETY: a shared buffer is only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// At least `bytes` bytes: whole pages, and no more than that.
    ///
    /// # Errors
    /// [`TierError::NoMemory`] when the kernel maps no more.
    pub fn new(bytes: usize) -> Result<Self, TierError> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that is there.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        match NonNull::new(at.cast::<u8>()).filter(|_| at != libc::MAP_FAILED) {
            Some(at) => {
                if bytes >= HUGE_PAGE {
                    // SAFETY: advice on the mapping that was just made; a kernel that refuses it keeps small pages.
                    unsafe { libc::madvise(at.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
                }
                Ok(Self { at, bytes })
            }
            None => Err(TierError::NoMemory { bytes, source: io::Error::last_os_error() }),
        }
    }

    /// Has pages that are touched from now on come from one NUMA node, and moves those that were touched before.
    ///
    /// # Errors
    /// [`TierError`] when there is no such node, or this process may not use it.
    pub fn bind(&mut self, node: usize) -> Result<(), TierError> {
        // SAFETY: the pages are this buffer's.
        unsafe { numa::bind(self.at, self.bytes, node) }
    }

    /// The NUMA node of each page, as the kernel says; `None` for a page that was never touched.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn nodes(&self) -> io::Result<Vec<Option<usize>>> {
        numa::nodes(self.at, self.bytes)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages are mapped, initialised by the kernel, and borrowed with the buffer.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the buffer is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is this buffer's, and nothing borrows it any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_lie_on_the_node_that_they_were_bound_to() {
        let mut buffer = Buffer::new(3 * PAGE + 1).expect("four pages");
        assert_eq!(buffer.len(), 4 * PAGE);
        buffer.bind(0).expect("every machine has node 0");
        assert_eq!(buffer.nodes().expect("asked"), [None; 4]);
        buffer[PAGE..3 * PAGE].fill(7);
        let nodes = buffer.nodes().expect("asked");
        // An untouched page may be said to lie nowhere.
        assert_eq!(nodes[1..3], [Some(0), Some(0)]);
    }

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let mut buffer = Buffer::new(PAGE).expect("a page");
        for node in [1000, usize::MAX] {
            let said = buffer.bind(node).expect_err("no such node").to_string();
            assert!(said.starts_with(&format!("NUMA node {node}: ")), "{said}");
        }
    }
}
