//! Pages of this process alone: what tiers are staged through, bound to a NUMA node where one is asked for.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::tier::TierError;

/// The unit of direct I/O and of placement.
pub const PAGE: usize = 4096;

/// What `mbind` does with pages that lie elsewhere (linux/mempolicy.h): fails if one cannot be moved.
const MPOL_MF_STRICT: libc::c_uint = 1;
/// Moves them.
const MPOL_MF_MOVE: libc::c_uint = 2;

/// Huge pages of x86-64.
const HUGE: usize = 2 << 20;

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
                if bytes >= HUGE {
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
    /// [`TierError::Node`] when there is no such node, or this process may not use it.
    pub fn bind(&mut self, node: usize) -> Result<(), TierError> {
        const WORDS: usize = 16;
        let mut nodes = [0_u64; WORDS];
        let wrong = |source| TierError::Node { node, source };
        *nodes.get_mut(node / 64).ok_or_else(|| wrong(io::ErrorKind::InvalidInput.into()))? |=
            1 << (node % 64);
        // SAFETY: the pages are this buffer's; `nodes` is a live set of as many bits as are given.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.at.as_ptr(),
                self.bytes,
                libc::MPOL_BIND,
                nodes.as_ptr(),
                WORDS * 64,
                MPOL_MF_MOVE | MPOL_MF_STRICT,
            )
        };
        if rc == 0 { Ok(()) } else { Err(wrong(io::Error::last_os_error())) }
    }

    /// The NUMA node of each page, as the kernel says; `None` for a page that was never touched.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn nodes(&self) -> io::Result<Vec<Option<usize>>> {
        let pages: Vec<_> =
            (0..self.bytes).step_by(PAGE).map(|at| self.at.as_ptr().wrapping_add(at)).collect();
        let mut nodes = vec![0_i32; pages.len()];
        // SAFETY: both arrays are live and have `pages.len()` entries; without target nodes nothing is moved.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_ptr(),
                std::ptr::null::<i32>(),
                nodes.as_mut_ptr(),
                0,
            )
        };
        match rc {
            0 => Ok(nodes.into_iter().map(|node| usize::try_from(node).ok()).collect()),
            _ => Err(io::Error::last_os_error()),
        }
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
