//! Pages of this process alone: what files are staged through.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::TierError;

/// The unit of direct I/O and of placement.
pub const PAGE: usize = 4096;

/// Huge pages of x86-64.
pub const HUGE_PAGE: usize = 2 << 20;

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
    fn a_buffer_is_whole_pages_of_zeros() {
        let mut buffer = Buffer::new(3 * PAGE + 1).expect("four pages");
        assert!(*buffer == vec![0; 4 * PAGE] && buffer.as_ptr().addr().is_multiple_of(PAGE));
        buffer[PAGE..3 * PAGE].fill(7);
        assert_eq!(buffer.iter().filter(|it| **it == 7).count(), 2 * PAGE);
    }
}
