//! What differs between the implementations on a mapped region: flushes, fences and bulk copies.

use crate::Coherence;
use crate::cpu::{self, Copier, Cpu, Flush, STREAM};

/// What differs between [`crate::Coherent`], [`crate::Software`] and what is either, as it is told at run time. The pointers given to it lie in a live mapping.
pub trait Lines: sealed::Lines {}

/// Lines that the hardware keeps coherent.
#[derive(Clone, Copy, Debug)]
pub struct HardwareLines {
    copier: Copier,
}

/// Lines that the program flushes.
#[derive(Clone, Copy, Debug)]
pub struct FlushedLines {
    write_back: Flush,
    invalidate: Flush,
    copier: Copier,
}

/// Lines of any kind.
#[derive(Clone, Copy, Debug)]
pub struct AnyLines {
    flushed: FlushedLines,
    coherence: Coherence,
}

impl AnyLines {
    /// Flushes nothing where the hardware keeps lines coherent.
    pub(crate) fn kept_by(mut self, coherence: Coherence) -> Self {
        self.coherence = coherence;
        self
    }

    #[inline(always)]
    const fn hardware(self) -> Option<HardwareLines> {
        match self.coherence {
            Coherence::Coherent => Some(HardwareLines { copier: self.flushed.copier }),
            Coherence::Software | Coherence::HdmDb => None,
        }
    }
}

mod sealed {
    use crate::cpu::{self, Copier, Cpu};
    use crate::{Coherence, Fold};

    /// The operations that differ. Those that return a bool say whether the memory was
    /// there, those that return a count how many bytes were left when it failed, the flushes where.
    pub trait Lines: Copy + Send + Sync + 'static {
        fn coherence(&self) -> Coherence;

        fn new(cpu: Cpu) -> Self;

        /// # Safety
        /// `at` is an aligned word of a live mapping.
        unsafe fn store_nt(self, at: *mut u64, value: u64) -> bool;

        /// # Safety
        /// `src` and `dst` are valid for `len` bytes, `dst` in a live mapping and `src` not.
        #[inline(always)]
        unsafe fn copy_in(self, dst: *mut u8, src: *const u8, len: usize) -> usize {
            // SAFETY: the caller's promise is the same.
            unsafe { self.copier().copy_in(dst, src, len) }
        }

        /// # Safety
        /// `src` and `dst` are valid for `len` bytes, `src` in a live mapping and `dst` not.
        #[inline(always)]
        unsafe fn copy_out(self, dst: *mut u8, src: *const u8, len: usize) -> usize {
            // SAFETY: the caller's promise is the same.
            unsafe { self.copier().copy_out(dst, src, len) }
        }

        /// # Safety
        /// `at` is an aligned word of a live mapping, which reaches to the next multiple of 8 behind the bytes.
        unsafe fn copy_in_nt(self, at: *mut u8, from: &[u8]) -> usize;

        fn copier(&self) -> &Copier;

        /// # Safety
        /// `into` and all sources are valid for `bytes` bytes of a live mapping; `into` is aligned to a line if it streams.
        #[inline(always)]
        unsafe fn fold<F: Fold>(
            self,
            into: *mut u8,
            sources: &[*const u8],
            bytes: usize,
            streams: bool,
            fold: F,
        ) -> usize {
            // SAFETY: the caller's promise is the same.
            let done = unsafe { self.copier().fold(into, sources, bytes, streams, fold) };
            if streams && self.coherence() == Coherence::Coherent {
                // As in its `copy_in_nt`: `sfence` makes no fence there.
                cpu::sfence();
            }
            done
        }

        /// # Safety
        /// The range lies in a live mapping.
        unsafe fn write_back(self, at: *mut u8, bytes: u64) -> Option<u64>;

        /// # Safety
        /// The range lies in a live mapping.
        unsafe fn invalidate(self, at: *mut u8, bytes: u64) -> Option<u64>;

        fn sfence(self);
        fn mfence(self);
        fn fence_invalidations(self);
    }
}

impl<L: sealed::Lines> Lines for L {}

impl sealed::Lines for HardwareLines {
    #[inline(always)]
    fn coherence(&self) -> Coherence {
        Coherence::Coherent
    }

    fn new(cpu: Cpu) -> Self {
        Self { copier: Copier::new(cpu) }
    }

    #[inline(always)]
    unsafe fn store_nt(self, at: *mut u64, value: u64) -> bool {
        // SAFETY: the caller's promise is the same.
        unsafe { cpu::store(at, value) }
    }

    #[inline(always)]
    unsafe fn copy_in_nt(self, at: *mut u8, from: &[u8]) -> usize {
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

    #[inline(always)]
    fn copier(&self) -> &Copier {
        &self.copier
    }

    #[inline(always)]
    unsafe fn write_back(self, _: *mut u8, _: u64) -> Option<u64> {
        None
    }

    #[inline(always)]
    unsafe fn invalidate(self, _: *mut u8, _: u64) -> Option<u64> {
        None
    }

    #[inline(always)]
    fn sfence(self) {
        cpu::compiler_fence();
    }

    #[inline(always)]
    fn mfence(self) {
        cpu::store_load_fence();
    }

    #[inline(always)]
    fn fence_invalidations(self) {
        cpu::compiler_fence();
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

impl sealed::Lines for FlushedLines {
    #[inline(always)]
    fn coherence(&self) -> Coherence {
        Coherence::Software
    }

    fn new(cpu: Cpu) -> Self {
        Self { write_back: cpu.write_back(), invalidate: cpu.invalidate(), copier: Copier::new(cpu) }
    }

    #[inline(always)]
    unsafe fn store_nt(self, at: *mut u64, value: u64) -> bool {
        // SAFETY: the caller's promise is the same.
        unsafe { cpu::store_nt(at, value) }
    }

    #[inline(always)]
    unsafe fn copy_in_nt(self, at: *mut u8, from: &[u8]) -> usize {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copier.copy_nt(at, from) }
    }

    #[inline(always)]
    fn copier(&self) -> &Copier {
        &self.copier
    }

    #[inline(always)]
    unsafe fn write_back(self, at: *mut u8, bytes: u64) -> Option<u64> {
        // SAFETY: the caller vouches for the range; `new` chose an instruction that the CPU has.
        unsafe { cpu::flush(self.write_back, at, bytes) }
    }

    #[inline(always)]
    unsafe fn invalidate(self, at: *mut u8, bytes: u64) -> Option<u64> {
        // SAFETY: as in `write_back`.
        unsafe { cpu::flush(self.invalidate, at, bytes) }
    }

    #[inline(always)]
    fn sfence(self) {
        cpu::sfence();
    }

    #[inline(always)]
    fn mfence(self) {
        cpu::mfence();
    }

    #[inline(always)]
    fn fence_invalidations(self) {
        cpu::mfence();
    }
}

impl sealed::Lines for AnyLines {
    #[inline(always)]
    fn coherence(&self) -> Coherence {
        self.coherence
    }

    /// Right for each kind: nothing is taken from a cache.
    fn new(cpu: Cpu) -> Self {
        Self { flushed: sealed::Lines::new(cpu), coherence: Coherence::Software }
    }

    #[inline(always)]
    unsafe fn store_nt(self, at: *mut u64, value: u64) -> bool {
        match self.hardware() {
            // SAFETY: the caller's promise is the same.
            Some(lines) => unsafe { lines.store_nt(at, value) },
            // SAFETY: the caller's promise is the same.
            None => unsafe { self.flushed.store_nt(at, value) },
        }
    }

    #[inline(always)]
    unsafe fn copy_in_nt(self, at: *mut u8, from: &[u8]) -> usize {
        match self.hardware() {
            // SAFETY: the caller's promise is the same.
            Some(lines) => unsafe { lines.copy_in_nt(at.cast(), from) },
            // SAFETY: the caller's promise is the same.
            None => unsafe { self.flushed.copy_in_nt(at.cast(), from) },
        }
    }

    #[inline(always)]
    fn copier(&self) -> &Copier {
        &self.flushed.copier
    }

    #[inline(always)]
    unsafe fn write_back(self, at: *mut u8, bytes: u64) -> Option<u64> {
        match self.coherence {
            Coherence::Coherent => None,
            // SAFETY: the caller's promise is the same.
            Coherence::Software | Coherence::HdmDb => unsafe { self.flushed.write_back(at, bytes) },
        }
    }

    #[inline(always)]
    unsafe fn invalidate(self, at: *mut u8, bytes: u64) -> Option<u64> {
        match self.coherence {
            Coherence::Coherent | Coherence::HdmDb => None,
            // SAFETY: the caller's promise is the same.
            Coherence::Software => unsafe { self.flushed.invalidate(at, bytes) },
        }
    }

    #[inline(always)]
    fn sfence(self) {
        match self.hardware() {
            Some(lines) => lines.sfence(),
            None => self.flushed.sfence(),
        }
    }

    #[inline(always)]
    fn mfence(self) {
        match self.hardware() {
            Some(lines) => lines.mfence(),
            None => self.flushed.mfence(),
        }
    }

    #[inline(always)]
    fn fence_invalidations(self) {
        match self.coherence {
            Coherence::Coherent | Coherence::HdmDb => cpu::compiler_fence(),
            Coherence::Software => self.flushed.fence_invalidations(),
        }
    }
}
