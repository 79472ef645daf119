//! Memory that the processes under one kernel share coherently: a small file, mapped, and atomics on it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{Nanos, fault};

/// A shared mapping of a file of this kernel, as atomics.
#[derive(Debug)]
pub(crate) struct Shm {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread and is only ever reached as atomics.
unsafe impl Send for Shm {}
// SAFETY: as above.
unsafe impl Sync for Shm {}

impl Shm {
    /// Maps the first `bytes` bytes of `file`.
    pub(crate) fn map(file: &File, bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel picks; it replaces nothing.
        let base = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), bytes.max(1), access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapped =
            Self { base: NonNull::new(base.cast()).expect("a mapping is never at address 0"), bytes };
        fault::install();
        fault::watch(mapped.base.as_ptr().addr(), bytes)?;
        Ok(mapped)
    }

    /// The `index`-th word.
    #[inline(always)]
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.bytes / 8, "word {index} of a file of {} bytes", self.bytes);
        // SAFETY: the word lies in the mapping, which is page-aligned and lives as long as `self`; all its users, in
        // every process, treat it as an atomic.
        unsafe { &*self.base.as_ptr().cast::<AtomicU64>().add(index) }
    }

    /// The first half of the `index`-th word: a word that the kernel can sleep on.
    #[inline(always)]
    pub(crate) fn half_word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.bytes / 8, "word {index} of a file of {} bytes", self.bytes);
        // SAFETY: as in `word`; what uses this half uses no other view of the word.
        unsafe { &*self.base.as_ptr().cast::<AtomicU32>().add(index * 2) }
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        fault::unwatch(self.base.as_ptr().addr());
        // SAFETY: unmaps what `map` mapped; references into it cannot outlive `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes.max(1)) };
    }
}

/// The bit of a bell that says that somebody sleeps or is about to; the bits above it count.
const SLEEPER: u32 = 1;

/// A doorbell. One word, so that a waker takes the flag down and counts in one step: a waker that dies between two
/// steps would leave a sleeper whom no other waker sees.
pub(crate) struct BellWord<'a>(pub(crate) &'a AtomicU32);

impl BellWord<'_> {
    /// Puts the flag up, with a full fence, and returns the word.
    // SYNC: pairs with the fence before `ring`: of two who announce and then look, at least one sees the other.
    #[inline]
    pub(crate) fn announce(&self) -> u32 {
        self.0.fetch_or(SLEEPER, Ordering::SeqCst) | SLEEPER
    }

    /// Sleeps until the word is not `seen` or `until` has come.
    pub(crate) fn sleep(&self, seen: u32, until: Nanos) {
        let deadline = libc::timespec {
            tv_sec: i64::try_from(until.0 / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (until.0 % 1_000_000_000) as i64,
        };
        // SAFETY: the word and the deadline live across the call. Every outcome (woken, changed, late, interrupted)
        // means the same to the caller, who looks again.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.0.as_ptr(),
                libc::FUTEX_WAIT_BITSET,
                seen,
                &raw const deadline,
                std::ptr::null::<u32>(),
                libc::FUTEX_BITSET_MATCH_ANY,
            );
        }
    }

    /// Wakes the thread that put the flag up. The caller has fenced.
    #[inline(always)]
    pub(crate) fn ring(&self) {
        let word = self.0.load(Ordering::Relaxed);
        if word & SLEEPER != 0 {
            self.wake(word);
        }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self, mut word: u32) {
        while word & SLEEPER != 0 {
            let rung = (word & !SLEEPER).wrapping_add(2 * SLEEPER);
            match self.0.compare_exchange(word, rung, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return self.wake_all(),
                Err(now) => word = now,
            }
        }
    }

    fn wake_all(&self) {
        // SAFETY: the word lives across the call, which only takes its address as a key.
        unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}
