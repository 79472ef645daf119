//! The implementation on a mapped region, whoever keeps its caches in step.

use std::fmt;
use std::sync::Arc;

use crate::cpu::{self, Cpu};
use crate::host::{Host, HostError, HostPlan};
use crate::instructions::Instructions;
use crate::memory::fold_in_pieces;
use crate::{
    Bell, Coherence, Fault, Fold, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot, Region, bounds,
    clock, fault,
};

/// The smallest page.
const PAGE: usize = 4096;
/// Aligned bytes of a file in memory that Linux maps by one fault that reads, by default.
const FAULT_AROUND: u64 = 64 << 10;

/// Maps the pages of a buffer that is about to be filled for the first time, in one go. Nothing but time depends on it.
pub fn populate_buffer(buffer: &mut [u8]) {
    let range = buffer.as_mut_ptr_range();
    let first = range.start.wrapping_add(range.start.align_offset(PAGE));
    let whole = range.end.addr().saturating_sub(first.addr()) & !(PAGE - 1);
    // SAFETY: whole pages of a buffer that the caller may write, and the advice changes no byte.
    unsafe { libc::madvise(first.cast(), whole, libc::MADV_POPULATE_WRITE) };
}

/// One process's access to a mapped region, and, once attached, to the memory of its host.
#[derive(Clone)]
pub struct Mapped {
    base: *mut u8,
    bytes: u64,
    instructions: Instructions,
    region: Arc<Region>,
    host: Option<Arc<Host>>,
}

// SAFETY: `base` points into the mapping that `region` keeps alive, which belongs to no thread; every access through
// it is one atomic instruction, or a copy whose words are atomic.
unsafe impl Send for Mapped {}
// SAFETY: as above; no method hands out a reference into the mapping.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Access to `region` alone, its caches kept in step by the program: local words, bells and slots need [`Mapped::attach`] first.
    #[must_use]
    pub fn new(region: Region) -> Self {
        let region = Arc::new(region);
        let instructions = Instructions::new(Cpu::detect(), Coherence::Software);
        Self { base: region.base(), bytes: region.bytes(), instructions, region, host: None }
    }

    /// The same, its caches kept in step by the hardware: no flushes, and compiler fences for most fences.
    #[must_use]
    pub fn coherent(region: Region) -> Self {
        Self::new(region).with_coherence(Coherence::Coherent)
    }

    /// The same access, its caches kept in step as `coherence` says.
    #[must_use]
    pub fn with_coherence(mut self, coherence: Coherence) -> Self {
        self.instructions = self.instructions.kept_by(coherence);
        self
    }

    /// The same access, with no other instructions than those of `cpu`.
    ///
    /// # Panics
    /// When this CPU lacks one of them.
    #[must_use]
    pub fn using(&self, cpu: Cpu) -> Self {
        assert!(cpu.within(Cpu::detect()), "this CPU lacks some of {cpu:?}");
        Self { instructions: Instructions::new(cpu, self.coherence()), ..self.clone() }
    }

    /// Joins the processes of a host: takes a free process slot, and maps the host's words and the kernel's bells.
    /// The slot is given back when the last clone of the handle is dropped, or when this process dies.
    ///
    /// # Errors
    /// [`HostError`], when no slot is free or the files cannot be had.
    pub fn attach(self, plan: &HostPlan) -> Result<Self, HostError> {
        self.attach_with(plan, 0)
    }

    /// Attaches with a shadow of `shadow_bytes` bytes, or without one.
    pub(crate) fn attach_with(mut self, plan: &HostPlan, shadow_bytes: usize) -> Result<Self, HostError> {
        self.host = Some(Arc::new(Host::attach(plan, &self.region, shadow_bytes)?));
        Ok(self)
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The host that was joined.
    #[inline(always)]
    #[track_caller]
    fn host(&self) -> &Host {
        self.host.as_deref().expect("local words, bells and slots are there once a host is attached")
    }

    #[cfg(feature = "instruments")]
    pub(crate) fn host_if_attached(&self) -> Option<&Host> {
        self.host.as_deref()
    }

    /// # Safety
    /// `at` lies in the region.
    #[inline(always)]
    unsafe fn at<T>(&self, at: Offset) -> *mut T {
        // SAFETY: the caller's promise keeps the result in the mapping.
        unsafe { self.base.add(at.0 as usize).cast() }
    }

    /// Remembers a store that was skipped, for the next load of this thread.
    #[inline(always)]
    fn note(&self, good: bool, at: Offset) {
        if !good {
            fault::skipped(self.base.addr(), at);
        }
    }

    /// What a load that failed, or that met an earlier failure of some thread, returns.
    #[cold]
    #[inline(never)]
    fn failed<T>(&self, at: Offset, value: Option<T>) -> Result<T, Fault> {
        match (fault::take_skipped(self.base.addr()), value) {
            (Some(offset), _) => Err(Fault { offset, done: 0 }),
            (None, None) => Err(Fault { offset: at, done: 0 }),
            (None, Some(value)) => Ok(value),
        }
    }
}

/// The result of a copy of `length` bytes to or from `at`, of which `left` were not moved.
#[inline(always)]
fn copied(at: Offset, length: usize, left: usize) -> Result<(), Fault> {
    match (length - left) as u64 {
        _ if left == 0 => Ok(()),
        done => Err(Fault { offset: at + done, done }),
    }
}

impl Memory for Mapped {
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    #[inline(always)]
    fn coherence(&self) -> Coherence {
        self.instructions.coherence()
    }

    fn address(&self, at: Offset, bytes: u64) -> Option<*mut u8> {
        bounds::range(self.bytes, at, bytes);
        Some(self.base.wrapping_add(at.0 as usize))
    }

    fn populate(&self, at: Offset, bytes: u64) {
        bounds::range(self.bytes, at, bytes);
        let mut next = at.0 & !7;
        // MADV_POPULATE_WRITE takes 80 ns a page that is mapped already, as long as its copy does.
        while next < at.0 + bytes {
            // Memory that fails is for the copy to tell.
            // SAFETY: `next` is an aligned word of the region, which begins and ends with a page.
            _ = unsafe { cpu::load(self.at(Offset(next))) };
            next = (next / FAULT_AROUND + 1) * FAULT_AROUND;
        }
    }

    #[inline(always)]
    #[track_caller]
    fn load(&self, at: Offset) -> Result<u64, Fault> {
        bounds::word(self.bytes, at);
        // SAFETY: `at` is an aligned word of the region.
        match unsafe { cpu::load(self.at(at)) } {
            Some(value) if !fault::any_skipped() => Ok(value),
            value => self.failed(at, value),
        }
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, at: Offset, value: u64) {
        bounds::word(self.bytes, at);
        // SAFETY: `at` is an aligned word of the region.
        let good = unsafe { cpu::store(self.at(at), value) };
        self.note(good, at);
    }

    #[inline(always)]
    #[track_caller]
    fn store_byte(&self, at: Offset, value: u8) {
        bounds::range(self.bytes, at, 1);
        // SAFETY: `at` is a byte of the region.
        let good = unsafe { cpu::store_byte(self.at(at), value) };
        self.note(good, at);
    }

    #[inline(always)]
    #[track_caller]
    fn load_line(&self, at: Offset) -> Result<[u64; 8], Fault> {
        bounds::line(self.bytes, at);
        // SAFETY: `at` is a line of the region.
        let words = unsafe { cpu::load_line(self.at(at)) };
        // Only that they are there is told to what is not in line: so they stay in registers.
        if words.is_none() || fault::any_skipped() {
            self.failed(at, words.is_some().then_some(()))?;
        }
        words.ok_or(Fault { offset: at, done: 0 })
    }

    #[inline(always)]
    #[track_caller]
    fn store_line(&self, at: Offset, words: &[u64; 8]) {
        bounds::line(self.bytes, at);
        // SAFETY: `at` is a line of the region.
        let good = unsafe { cpu::store_line(self.at(at), words) };
        self.note(good, at);
    }

    #[inline(always)]
    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64) {
        bounds::word(self.bytes, at);
        // SAFETY: `at` is an aligned word of the region.
        let good = unsafe { self.instructions.store_nt(self.at(at), value) };
        self.note(good, at);
    }

    #[inline(always)]
    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        bounds::range(self.bytes, at, from.len() as u64);
        // SAFETY: the range lies in the region, and a slice never does.
        let left = unsafe { self.instructions.copy_in(self.at(at), from.as_ptr(), from.len()) };
        copied(at, from.len(), left)
    }

    #[inline(always)]
    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        bounds::words(self.bytes, at, (from.len() as u64).next_multiple_of(8));
        // SAFETY: the range up to the next multiple of 8 lies in the region, and a slice never does.
        let left = unsafe { self.instructions.copy_in_nt(self.at(at), from) };
        copied(at, from.len(), left)
    }

    #[inline(always)]
    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
        bounds::range(self.bytes, at, into.len() as u64);
        // SAFETY: the range lies in the region, and a slice never does.
        let left = unsafe { self.instructions.copy_out(into.as_mut_ptr(), self.at(at), into.len()) };
        copied(at, into.len(), left)
    }

    #[track_caller]
    fn fold<F: Fold>(
        &self,
        into: Offset,
        sources: &[Offset],
        bytes: u64,
        past_caches: bool,
        fold: F,
    ) -> Result<(), Fault> {
        bounds::range(self.bytes, into, bytes);
        sources.iter().for_each(|source| bounds::range(self.bytes, *source, bytes));
        let mut done = 0;
        // Bytes before the first whole line would have to pass the caches as well.
        if !past_caches || into.line() == into {
            // SAFETY: the offsets lie in the region.
            let from: Vec<*const u8> =
                sources.iter().map(|source| unsafe { self.at::<u8>(*source) }.cast_const()).collect();
            // SAFETY: all ranges lie in the region, and what is streamed begins at a line.
            done = unsafe { self.instructions.fold(self.at(into), &from, bytes as usize, past_caches, fold) }
                as u64;
        }
        // Part of a line, or what failed: these copies say which byte it was.
        let rest: Vec<Offset> = sources.iter().map(|source| *source + done).collect();
        fold_in_pieces(self, into + done, &rest, bytes - done, past_caches, fold)
            .map_err(|fault| Fault { done: done + fault.done, ..fault })
    }

    #[inline(always)]
    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64) {
        bounds::range(self.bytes, at, bytes);
        // SAFETY: the range lies in the region.
        if let Some(failed) = unsafe { self.instructions.write_back(self.at(at), bytes) } {
            self.note(false, at + failed);
        }
    }

    #[inline(always)]
    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64) {
        bounds::range(self.bytes, at, bytes);
        // SAFETY: the range lies in the region.
        if let Some(failed) = unsafe { self.instructions.invalidate(self.at(at), bytes) } {
            self.note(false, at + failed);
        }
    }

    #[inline(always)]
    fn sfence(&self) {
        self.instructions.sfence();
    }

    #[inline(always)]
    fn mfence(&self) {
        self.instructions.mfence();
    }

    #[inline(always)]
    fn fence_invalidations(&self) {
        self.instructions.fence_invalidations();
    }

    fn now(&self) -> Nanos {
        clock::now()
    }

    #[inline(always)]
    #[track_caller]
    fn local_load(&self, word: LocalWord) -> u64 {
        self.host().load(word)
    }

    #[inline(always)]
    #[track_caller]
    fn local_store(&self, word: LocalWord, value: u64) {
        self.host().store(word, value);
    }

    #[inline(always)]
    #[track_caller]
    fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64> {
        self.host().cas(word, old, new)
    }

    #[track_caller]
    fn slot(&self) -> ProcessSlot {
        self.host().slot()
    }

    #[track_caller]
    fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness {
        self.host().liveness(host, slot)
    }

    fn host_is_held(&self, host: u16) -> Option<bool> {
        self.host().host_is_held(host)
    }

    #[track_caller]
    fn announce_sleep(&self, bell: Bell) -> u32 {
        self.host().bell(bell).announce()
    }

    #[track_caller]
    fn sleep(&self, bell: Bell, seen: u32, until: Nanos) {
        self.host().bell(bell).sleep(seen, until);
    }

    fn cancel_sleep(&self, _: Bell) {
        // The flag may be another sleeper's: it stays, and costs the next waker one call.
    }

    #[inline(always)]
    #[track_caller]
    fn wake(&self, bell: Bell) {
        self.instructions.mfence();
        self.host().bell(bell).ring();
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}({}, {} bytes",
            self.instructions.coherence(),
            self.region.path().display(),
            self.bytes
        )?;
        match &self.host {
            Some(host) => write!(f, ", {host:?})"),
            None => write!(f, ")"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    /// Pages that this thread had to wait for so far.
    fn faults() -> i64 {
        // SAFETY: numbers, which the call fills in.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `usage` is a live place for what is asked.
        assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
        usage.ru_minflt
    }

    #[test]
    fn one_fault_maps_many_pages_that_are_about_to_be_written() {
        let (scratch, bytes) = (Scratch::new(), vec![7; 256 * PAGE]);
        let path = scratch.path().join("region");
        let there = Mapped::new(Region::create(&path, 256 * PAGE as u64).unwrap());
        there.copy_in(Offset(0), &bytes).unwrap();
        let memory = Mapped::new(Region::open(&path).unwrap());
        let before = faults();
        memory.populate(Offset(0), 256 * PAGE as u64);
        memory.copy_in_nt(Offset(0), &bytes).unwrap();
        let faults = faults() - before;
        assert!(faults < 64, "{faults} faults for 256 pages");
    }
}
