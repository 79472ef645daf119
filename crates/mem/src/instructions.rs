//! What depends on who keeps caches in step: flushes, fences and bulk copies of a mapped region.

use crate::cpu::{self, Copier, Cpu, Flush, STREAM};
use crate::{Coherence, Fold};

/// The instructions of a region: the hardware keeps its lines coherent, or the program flushes them, or their device takes them back.
///
/// The pointers given to it lie in a live mapping. What returns a bool says whether the memory was there, what returns a count how many
/// bytes were left when it failed, the flushes where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instructions {
    write_back: Flush,
    invalidate: Flush,
    copier: Copier,
    coherence: Coherence,
}

impl Instructions {
    /// Uses no other instructions than those of `cpu`.
    pub(crate) fn new(cpu: Cpu, coherence: Coherence) -> Self {
        Self {
            write_back: cpu.write_back(),
            invalidate: cpu.invalidate(),
            copier: Copier::new(cpu),
            coherence,
        }
    }

    pub(crate) fn kept_by(self, coherence: Coherence) -> Self {
        Self { coherence, ..self }
    }

    #[inline(always)]
    pub(crate) const fn coherence(&self) -> Coherence {
        self.coherence
    }

    #[inline(always)]
    const fn is_coherent(&self) -> bool {
        matches!(self.coherence, Coherence::Coherent)
    }

    /// # Safety
    /// `at` is an aligned word of a live mapping.
    #[inline(always)]
    pub(crate) unsafe fn store_nt(self, at: *mut u64, value: u64) -> bool {
        match self.is_coherent() {
            // SAFETY: the caller's promise is the same.
            true => unsafe { cpu::store(at, value) },
            // SAFETY: the caller's promise is the same.
            false => unsafe { cpu::store_nt(at, value) },
        }
    }

    /// # Safety
    /// `src` and `dst` are valid for `len` bytes, `dst` in a live mapping and `src` not.
    #[inline(always)]
    pub(crate) unsafe fn copy_in(self, dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copier.copy_in(dst, src, len) }
    }

    /// # Safety
    /// `src` and `dst` are valid for `len` bytes, `src` in a live mapping and `dst` not.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(self, dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copier.copy_out(dst, src, len) }
    }

    /// # Safety
    /// `at` is an aligned word of a live mapping, which reaches to the next multiple of 8 behind the bytes.
    #[inline(always)]
    pub(crate) unsafe fn copy_in_nt(self, at: *mut u8, from: &[u8]) -> usize {
        if !self.is_coherent() {
            // SAFETY: the caller's promise is the same.
            return unsafe { self.copier.copy_nt(at, from) };
        }
        if from.len() >= STREAM {
            // SAFETY: the caller's promise is the same.
            let left = unsafe { self.copier.copy_nt(at, from) };
            // Here `sfence` makes no fence, so the streams must end before this returns.
            cpu::sfence();
            return left;
        }
        // SAFETY: the caller's promise covers `at` up to the next multiple of 8, and `from` is a live slice.
        let left = unsafe { self.copier.copy_in(at, from.as_ptr(), from.len()) };
        let rest = from.len() % 8;
        if left > 0 || rest == 0 {
            return left;
        }
        // SAFETY: the last word starts `rest` bytes before the end of what was just copied, and ends where the
        // caller's promise does.
        let good = unsafe { fill_up(at.add(from.len() - rest), &from[from.len() - rest..]) };
        if good { 0 } else { rest }
    }

    /// # Safety
    /// `into` and all sources are valid for `bytes` bytes of a live mapping; `into` is aligned to a line if it streams.
    #[inline(always)]
    pub(crate) unsafe fn fold<F: Fold>(
        self,
        into: *mut u8,
        sources: &[*const u8],
        bytes: usize,
        streams: bool,
        fold: F,
    ) -> usize {
        // SAFETY: the caller's promise is the same.
        let done = unsafe { self.copier.fold(into, sources, bytes, streams, fold) };
        if streams && self.is_coherent() {
            // As in `copy_in_nt`: `sfence` makes no fence there.
            cpu::sfence();
        }
        done
    }

    /// # Safety
    /// The range lies in a live mapping.
    #[inline(always)]
    pub(crate) unsafe fn write_back(self, at: *mut u8, bytes: u64) -> Option<u64> {
        match self.coherence.needs_write_back() {
            // SAFETY: the caller vouches for the range; `new` chose an instruction that the CPU has.
            true => unsafe { cpu::flush(self.write_back, at, bytes) },
            false => None,
        }
    }

    /// # Safety
    /// The range lies in a live mapping.
    #[inline(always)]
    pub(crate) unsafe fn invalidate(self, at: *mut u8, bytes: u64) -> Option<u64> {
        match self.coherence.needs_invalidation() {
            // SAFETY: as in `write_back`.
            true => unsafe { cpu::flush(self.invalidate, at, bytes) },
            false => None,
        }
    }

    #[inline(always)]
    pub(crate) fn sfence(self) {
        if self.is_coherent() { cpu::compiler_fence() } else { cpu::sfence() }
    }

    #[inline(always)]
    pub(crate) fn mfence(self) {
        if self.is_coherent() { cpu::store_load_fence() } else { cpu::mfence() }
    }

    #[inline(always)]
    pub(crate) fn fence_invalidations(self) {
        if self.coherence.needs_invalidation() { cpu::mfence() } else { cpu::compiler_fence() }
    }
}

/// Stores the bytes of a last word and zeros behind them.
///
/// # Safety
/// `at` is an aligned word of a live mapping.
unsafe fn fill_up(at: *mut u8, bytes: &[u8]) -> bool {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the caller's promise.
    unsafe { cpu::store(at.cast(), u64::from_le_bytes(word)) }
}
