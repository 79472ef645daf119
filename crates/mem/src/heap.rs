//! A region in ordinary memory: threads play the processes of several hosts. For tests, and for miri.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::{
    Bell, Coherence, Fault, LINE, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot, bounds, clock,
};

/// How large a heap region is, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapShape {
    /// Bytes of the region, a multiple of the line.
    pub bytes: u64,
    /// Host ids.
    pub hosts: u16,
    /// Process slots of each host.
    pub processes: u16,
    /// Local words of each host.
    pub local_words: u32,
    /// Doorbells of the one kernel.
    pub bells: u32,
}

/// What a process did to a region so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapCounts {
    /// Loads of a word or of a whole line; a copy loads words.
    pub loads: u64,
    /// Stores of a word, of a part of one, or of a whole line; a copy stores words.
    pub stores: u64,
    /// Lines that were to be written back or invalidated.
    pub flushes: u64,
    /// Fences.
    pub fences: u64,
}

impl HeapCounts {
    /// All operations.
    #[must_use]
    pub const fn all(self) -> u64 {
        self.loads + self.stores + self.flushes + self.fences
    }

    /// What was done since `before`.
    #[must_use]
    pub const fn since(self, before: Self) -> Self {
        Self {
            loads: self.loads - before.loads,
            stores: self.stores - before.stores,
            flushes: self.flushes - before.flushes,
            fences: self.fences - before.fences,
        }
    }
}

/// One process's view of a region that lives in ordinary memory and is coherent.
///
/// The slot is held until the last clone of the handle is dropped.
#[derive(Clone)]
pub struct Heap {
    shared: Arc<Shared>,
    process: Arc<Process>,
}

/// What all hosts share, and each host's own words.
struct Shared {
    shape: HeapShape,
    region: Box<[AtomicU64]>,
    local: Box<[AtomicU64]>,
    slots: Box<[SlotState]>,
    bells: Box<[HeapBell]>,
}

/// Whether a slot is, or ever was, held.
#[derive(Default)]
struct SlotState {
    held: AtomicBool,
    ever: AtomicBool,
}

/// The holder of one slot; gives it back when dropped.
struct Process {
    shared: Arc<Shared>,
    host: u16,
    slot: ProcessSlot,
    counts: Counters,
}

/// The counters of one process.
#[derive(Default)]
struct Counters {
    loads: AtomicU64,
    stores: AtomicU64,
    flushes: AtomicU64,
    fences: AtomicU64,
}

#[derive(Default)]
struct HeapBell {
    count: Mutex<u32>,
    rung: Condvar,
    sleepers: AtomicU32,
}

impl Heap {
    /// A zeroed region; the handle is the process at slot 0 of host 0.
    ///
    /// # Panics
    /// When the shape has no host, no process, or bytes that are no multiple of the line.
    #[must_use]
    pub fn new(shape: HeapShape) -> Self {
        assert!(shape.hosts > 0 && shape.processes > 0, "a heap region needs a host and a process");
        assert!(shape.bytes.is_multiple_of(LINE), "{} bytes are no multiple of {LINE}", shape.bytes);
        let hosts = usize::from(shape.hosts);
        let shared = Arc::new(Shared {
            shape,
            region: zeros(usize::try_from(shape.bytes / 8).expect("a region fits the address space")),
            local: zeros(hosts * shape.local_words as usize),
            slots: defaults(hosts * usize::from(shape.processes)),
            bells: defaults(shape.bells as usize),
        });
        Self::hold(shared, 0, ProcessSlot(0))
    }

    /// The process at `slot` of `host`, on the same region.
    ///
    /// # Panics
    /// When there is no such slot, or it is held.
    #[must_use]
    pub fn process(&self, host: u16, slot: ProcessSlot) -> Self {
        Self::hold(Arc::clone(&self.shared), host, slot)
    }

    fn hold(shared: Arc<Shared>, host: u16, slot: ProcessSlot) -> Self {
        let state = shared.slot(host, slot).expect("a slot of this heap's shape");
        assert!(!state.held.swap(true, Ordering::SeqCst), "slot {} of host {host} is held", slot.0);
        state.ever.store(true, Ordering::SeqCst);
        let counts = Counters::default();
        let process = Arc::new(Process { shared: Arc::clone(&shared), host, slot, counts });
        Self { shared, process }
    }

    /// What this process did to the region so far.
    #[must_use]
    pub fn counts(&self) -> HeapCounts {
        let Counters { loads, stores, flushes, fences } = &self.process.counts;
        let [loads, stores, flushes, fences] =
            [loads, stores, flushes, fences].map(|count| count.load(Ordering::Relaxed));
        HeapCounts { loads, stores, flushes, fences }
    }

    #[track_caller]
    fn word(&self, at: Offset) -> &AtomicU64 {
        bounds::word(self.bytes(), at);
        &self.shared.region[(at.0 / 8) as usize]
    }

    #[track_caller]
    fn local(&self, word: LocalWord) -> &AtomicU64 {
        let count = self.shared.shape.local_words as usize;
        &self.shared.local[usize::from(self.process.host) * count + bounds::local(count, word)]
    }

    fn bell(&self, bell: Bell) -> &HeapBell {
        &self.shared.bells[bell.0 as usize]
    }

    /// Stores some bytes of one word, atomically, and leaves the others alone.
    fn store_part(&self, at: Offset, part: &[u8]) {
        let skip = (at.0 % 8) as usize;
        let word = self.word(Offset(at.0 - skip as u64));
        let mixed = |old: u64| {
            let mut bytes = old.to_le_bytes();
            bytes[skip..skip + part.len()].copy_from_slice(part);
            Some(u64::from_le_bytes(bytes))
        };
        count(&self.process.counts.stores, 1);
        word.fetch_update(Ordering::Release, Ordering::Relaxed, mixed).expect("the update always applies");
    }
}

impl Memory for Heap {
    fn bytes(&self) -> u64 {
        self.shared.shape.bytes
    }

    fn coherence(&self) -> Coherence {
        Coherence::Coherent
    }

    #[track_caller]
    fn load(&self, at: Offset) -> Result<u64, Fault> {
        count(&self.process.counts.loads, 1);
        Ok(self.word(at).load(Ordering::Acquire))
    }

    #[track_caller]
    fn load_line(&self, at: Offset) -> Result<[u64; 8], Fault> {
        count(&self.process.counts.loads, 1);
        let mut words = [0; 8];
        for (index, word) in (0..).zip(&mut words) {
            *word = self.word(at.word(index)).load(Ordering::Acquire);
        }
        Ok(words)
    }

    #[track_caller]
    fn store(&self, at: Offset, value: u64) {
        count(&self.process.counts.stores, 1);
        self.word(at).store(value, Ordering::Release);
    }

    #[track_caller]
    fn store_line(&self, at: Offset, words: &[u64; 8]) {
        count(&self.process.counts.stores, 1);
        for index in (1..8).chain([0]) {
            self.word(at.word(index)).store(words[index as usize], Ordering::Release);
        }
    }

    #[track_caller]
    fn store_byte(&self, at: Offset, value: u8) {
        self.store_part(at, &[value]);
    }

    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64) {
        self.store(at, value);
    }

    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        bounds::range(self.bytes(), at, from.len() as u64);
        let (head, rest) = from.split_at(from.len().min((at.0.next_multiple_of(8) - at.0) as usize));
        if !head.is_empty() {
            self.store_part(at, head);
        }
        let start = at + head.len() as u64;
        let words = rest.chunks_exact(8);
        let tail = words.remainder();
        for (index, word) in (0..).zip(words) {
            self.store(start.word(index), u64::from_le_bytes(word.try_into().expect("8 bytes")));
        }
        if !tail.is_empty() {
            self.store_part(start + (rest.len() - tail.len()) as u64, tail);
        }
        Ok(())
    }

    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        bounds::words(self.bytes(), at, (from.len() as u64).next_multiple_of(8));
        for (index, part) in (0..).zip(from.chunks(8)) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.store(at.word(index), u64::from_le_bytes(word));
        }
        Ok(())
    }

    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
        bounds::range(self.bytes(), at, into.len() as u64);
        let mut done = 0;
        while done < into.len() {
            let from = at + done as u64;
            let skip = (from.0 % 8) as usize;
            let length = (8 - skip).min(into.len() - done);
            let word = self.load(Offset(from.0 - skip as u64))?.to_le_bytes();
            into[done..done + length].copy_from_slice(&word[skip..skip + length]);
            done += length;
        }
        Ok(())
    }

    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64) {
        bounds::range(self.bytes(), at, bytes);
        count(&self.process.counts.flushes, lines(at, bytes));
    }

    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64) {
        bounds::range(self.bytes(), at, bytes);
        count(&self.process.counts.flushes, lines(at, bytes));
    }

    fn sfence(&self) {
        count(&self.process.counts.fences, 1);
        fence(Ordering::Release);
    }

    fn mfence(&self) {
        count(&self.process.counts.fences, 1);
        fence(Ordering::SeqCst);
    }

    fn fence_invalidations(&self) {
        count(&self.process.counts.fences, 1);
        fence(Ordering::Acquire);
    }

    fn now(&self) -> Nanos {
        clock::now()
    }

    #[track_caller]
    fn local_load(&self, word: LocalWord) -> u64 {
        self.local(word).load(Ordering::SeqCst)
    }

    #[track_caller]
    fn local_store(&self, word: LocalWord, value: u64) {
        self.local(word).store(value, Ordering::SeqCst);
    }

    #[track_caller]
    fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64> {
        self.local(word).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }

    fn slot(&self) -> ProcessSlot {
        self.process.slot
    }

    fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness {
        match self.shared.slot(host, slot) {
            Some(state) if state.held.load(Ordering::SeqCst) => Liveness::Alive,
            Some(state) if state.ever.load(Ordering::SeqCst) => Liveness::Dead,
            _ => Liveness::Unknown,
        }
    }

    fn announce_sleep(&self, bell: Bell) -> u32 {
        let bell = self.bell(bell);
        bell.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = bell.read();
        // SYNC: pairs with the fence in `wake`: of two who announce and then look, at least one sees the other.
        fence(Ordering::SeqCst);
        seen
    }

    fn sleep(&self, bell: Bell, seen: u32, until: Nanos) {
        let bell = self.bell(bell);
        let wait = clock::remaining(clock::now(), until);
        let count = bell.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(bell.rung.wait_timeout_while(count, wait, |count| *count == seen));
        bell.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn cancel_sleep(&self, bell: Bell) {
        self.bell(bell).sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self, bell: Bell) {
        let bell = self.bell(bell);
        // SYNC: pairs with `announce_sleep`.
        fence(Ordering::SeqCst);
        if bell.sleepers.load(Ordering::Relaxed) != 0 {
            let mut count = bell.count.lock().unwrap_or_else(PoisonError::into_inner);
            *count = count.wrapping_add(1);
            bell.rung.notify_all();
        }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Process { host, slot, .. } = &*self.process;
        write!(f, "Heap({} bytes, host {host}, slot {})", self.shared.shape.bytes, slot.0)
    }
}

impl Shared {
    fn slot(&self, host: u16, slot: ProcessSlot) -> Option<&SlotState> {
        let inside = host < self.shape.hosts && slot.0 < self.shape.processes;
        let index = usize::from(host) * usize::from(self.shape.processes) + usize::from(slot.0);
        inside.then(|| &self.slots[index])
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(state) = self.shared.slot(self.host, self.slot) {
            state.held.store(false, Ordering::SeqCst);
        }
    }
}

impl HeapBell {
    fn read(&self) -> u32 {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count(of: &AtomicU64, more: u64) {
    of.fetch_add(more, Ordering::Relaxed);
}

/// Lines that hold a byte of `[at, at + bytes)`.
fn lines(at: Offset, bytes: u64) -> u64 {
    if bytes == 0 { 0 } else { (at.0 + bytes).div_ceil(LINE) - at.0 / LINE }
}

fn zeros(count: usize) -> Box<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

fn defaults<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heap() -> Heap {
        Heap::new(HeapShape { bytes: 4096, hosts: 2, processes: 2, local_words: 4, bells: 2 })
    }

    #[test]
    fn a_slot_is_alive_while_held_and_dead_after() {
        let heap = heap();
        assert_eq!(heap.liveness(1, ProcessSlot(1)), Liveness::Unknown);
        let other = heap.process(1, ProcessSlot(1));
        let clone = other.clone();
        drop(other);
        assert_eq!(heap.liveness(1, ProcessSlot(1)), Liveness::Alive);
        drop(clone);
        assert_eq!(heap.liveness(1, ProcessSlot(1)), Liveness::Dead);
    }

    #[test]
    fn local_words_of_two_hosts_are_apart() {
        let heap = heap();
        let other = heap.process(1, ProcessSlot(0));
        heap.local_store(LocalWord(3), 7);
        assert_eq!(other.local_load(LocalWord(3)), 0);
        assert_eq!(heap.local_cas(LocalWord(3), 0, 1), Err(7));
    }

    #[test]
    #[should_panic(expected = "range [0xff8, +0x9) ends past a region of 0x1000 bytes")]
    fn a_copy_past_the_end_panics() {
        let _ = heap().copy_in(Offset(4088), &[0; 9]);
    }
}
