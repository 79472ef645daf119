//! What the processes of one host share outside the pool: robust locks and state that can be rebuilt.
//!
//! A lock is one local word: the slot and incarnation of its holder. A process that waits can see that the holder died
//! ([`Memory::liveness`], or another incarnation in its slot) and take the lock over. The taker is told so, repairs what
//! the holder was doing, and marks the lock as repaired. Until then every taker is told.

pub mod state;

use std::ops::Range;
use std::time::Duration;

use polder_mem::{Liveness, LocalWord, Memory, ProcessSlot, host_file_lost};

use crate::format::Layout;
use crate::state::StateLayout;
use crate::{Peer, PoolError};

const DIRTY: u64 = 1 << 63;
const SLOT_BITS: u32 = 16;
const INCARNATION_BITS: u32 = 47;

/// Which local word is what. All words are zero in a new host-local file, which is a valid empty state. Where all processes
/// were killed, the next finds zeros too, but in the words that are kept.
///
/// | words | what |
/// |---|---|
/// | 0 | membership lock |
/// | `processes` | for each slot the incarnation of its newest process |
/// | `processes` | for each slot the process id of its newest process |
/// | the rest | state of the directory and the allocator, see [`crate::state`] |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalLayout {
    processes: u32,
    state: StateLayout,
}

impl LocalLayout {
    /// The local words of a host of this pool.
    #[must_use]
    pub fn new(layout: &Layout) -> Self {
        let processes = layout.geometry().processes.into();
        Self { processes, state: StateLayout::new(layout, 1 + 2 * processes) }
    }

    /// Local words that a host needs.
    #[must_use]
    pub const fn words(&self) -> u32 {
        self.state.end()
    }

    /// The words that stay when no process of the host is left: without them nobody could tell the processes that were killed
    /// from those that do not share the host's file.
    #[must_use]
    pub const fn kept_words(&self) -> Range<u32> {
        1..1 + self.processes
    }

    /// Guards the host line and the process lines.
    #[must_use]
    pub const fn membership(&self) -> LocalLock {
        LocalLock(LocalWord(0))
    }

    /// The words of the directory and the allocator.
    #[must_use]
    pub const fn state(&self) -> &StateLayout {
        &self.state
    }

    /// The incarnation of the newest process at `slot`; written by that process alone.
    #[must_use]
    pub fn incarnation(&self, slot: ProcessSlot) -> LocalWord {
        LocalWord(1 + self.slot(slot))
    }

    /// The process id of the newest process at `slot`; written by that process alone.
    #[must_use]
    pub fn pid(&self, slot: ProcessSlot) -> LocalWord {
        LocalWord(1 + self.processes + self.slot(slot))
    }

    fn slot(&self, ProcessSlot(slot): ProcessSlot) -> u32 {
        assert!(u32::from(slot) < self.processes, "slot {slot} is not below {}", self.processes);
        slot.into()
    }
}

/// A process among the processes of its host, as locks name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Where the words are.
    pub layout: LocalLayout,
    /// The host.
    pub host: u16,
    /// The process's slot.
    pub slot: ProcessSlot,
    /// Which process it is of those that were ever at the slot; from 1.
    pub incarnation: u64,
}

impl Local {
    /// Enters the process that holds `memory`'s slot. Call it once a process, before it takes a lock; `older` is an
    /// incarnation that was seen elsewhere, so that a lost host-local file does not bring an old one back.
    #[must_use]
    pub fn enter<M: Memory>(memory: &M, layout: LocalLayout, host: u16, pid: u32, older: u64) -> Self {
        let slot = memory.slot();
        let last = memory.local_load(layout.incarnation(slot)).max(older);
        // What was seen elsewhere may be anything; from 1, so that no lock is held by 0.
        let incarnation = (last.wrapping_add(1) & ((1 << INCARNATION_BITS) - 1)).max(1);
        memory.local_store(layout.pid(slot), pid.into());
        // From here on locks that an earlier process left behind at this slot are seen to be dead.
        memory.local_store(layout.incarnation(slot), incarnation);
        Self { layout, host, slot, incarnation }
    }

    /// The process, as a word that others of its host can ask about.
    pub(crate) const fn holder(&self) -> u64 {
        self.incarnation << SLOT_BITS | (self.slot.0 as u64 + 1)
    }

    /// Whether the process that a word of [`Local::holder`] names is no more.
    pub(crate) fn is_gone<M: Memory>(&self, memory: &M, holder: u64) -> bool {
        let slot = slot_of(holder);
        if slot.0 >= self.layout.processes as u16 {
            return true;
        }
        memory.liveness(self.host, slot) == Liveness::Dead
            || memory.local_load(self.layout.incarnation(slot)) != (holder & !DIRTY) >> SLOT_BITS
    }

    fn peer<M: Memory>(&self, memory: &M, holder: u64) -> Peer {
        let slot = slot_of(holder);
        let known = u32::from(slot.0) < self.layout.processes;
        let pid = if known { memory.local_load(self.layout.pid(slot)) as u32 } else { 0 };
        Peer::new(self.host, pid)
    }
}

fn slot_of(holder: u64) -> ProcessSlot {
    ProcessSlot((holder as u16).wrapping_sub(1))
}

/// A lock among the processes of one host that survives the death of its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalLock(LocalWord);

impl LocalLock {
    /// The lock that is this word.
    pub(crate) const fn at(word: LocalWord) -> Self {
        Self(word)
    }

    /// Whether the process that has the lock is dead, or left it half done.
    pub(crate) fn is_abandoned<M: Memory>(self, memory: &M, me: &Local) -> bool {
        match memory.local_load(self.0) {
            0 => false,
            DIRTY => true,
            holder => me.is_gone(memory, holder),
        }
    }

    /// Takes the lock for the process `me`, within `patience`.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] with the holder when that is alive and does not let go.
    // SYNC: a compare-and-swap on the host's own coherent memory; pairs with the one in `LocalGuard::drop`.
    pub fn lock<'a, M: Memory>(
        self,
        memory: &'a M,
        me: &Local,
        patience: Duration,
    ) -> Result<LocalGuard<'a, M>, PoolError> {
        const SPINS: u32 = 100;
        let deadline = memory.now() + patience;
        let mut round = 0;
        loop {
            // Who was stopped beyond its deadline tries once more.
            let is_late = memory.now() >= deadline;
            let holder = match self.attempt(memory, me) {
                // Nobody else sees that it was taken.
                Ok(_) if host_file_lost() => return Err(PoolError::HostFileLost { host: me.host }),
                Ok(recovered) => {
                    return Ok(LocalGuard {
                        memory,
                        word: self.0,
                        mine: me.holder(),
                        dirty: recovered,
                        recovered,
                    });
                }
                Err(holder) => holder,
            };
            if is_late {
                let waited_ms = patience.as_millis().try_into().unwrap_or(u64::MAX);
                let peer = me.peer(memory, holder);
                return Err(PoolError::Timeout {
                    peer,
                    what: "a host-local lock",
                    epoch: 0,
                    sequence: 0,
                    waited_ms,
                });
            }
            if round < SPINS {
                memory.pause()
            } else {
                memory.yield_now()
            }
            round = SPINS.min(round + 1);
        }
    }

    /// Whether what it takes over must be repaired; or who has it.
    fn attempt<M: Memory>(self, memory: &M, me: &Local) -> Result<bool, u64> {
        match memory.local_cas(self.0, 0, me.holder()) {
            Ok(()) => Ok(false),
            Err(DIRTY) => memory.local_cas(self.0, DIRTY, me.holder()).map(|()| true),
            Err(holder) if me.is_gone(memory, holder) => {
                memory.local_cas(self.0, holder, me.holder()).map(|()| true)
            }
            Err(holder) => Err(holder),
        }
    }
}

/// A lock that is held; dropping it lets go.
#[must_use]
#[derive(Debug)]
pub struct LocalGuard<'a, M: Memory> {
    memory: &'a M,
    word: LocalWord,
    mine: u64,
    recovered: bool,
    dirty: bool,
}

impl<M: Memory> LocalGuard<'_, M> {
    /// Whether an earlier holder died, or failed, in the middle: repair what the lock guards and call
    /// [`LocalGuard::repaired`].
    #[must_use]
    pub const fn recovered(&self) -> bool {
        self.recovered
    }

    /// Says that what the lock guards is whole again.
    pub const fn repaired(&mut self) {
        self.dirty = false;
    }

    /// Says that what the lock guards is half done: the next to take it will repair it.
    pub const fn spoil(&mut self) {
        self.dirty = true;
    }
}

impl<M: Memory> Drop for LocalGuard<'_, M> {
    fn drop(&mut self) {
        let left = if self.dirty || std::thread::panicking() { DIRTY } else { 0 };
        // Nobody takes the lock from a holder that lives, so this fails only if the host's memory was overwritten.
        let _ = self.memory.local_cas(self.word, self.mine, left);
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::{Heap, HeapShape};

    use super::*;
    use crate::format::Geometry;
    use crate::state::LockName;

    const SOON: Duration = Duration::from_millis(5);

    fn layout() -> LocalLayout {
        let geometry =
            Geometry { hosts: 2, processes: 2, names: 5, levels: 2, chunk_bytes: 256, opens: 3, keepers: 2 };
        LocalLayout::new(&Layout::new(&geometry, 32 << 10).unwrap())
    }

    fn allocator() -> LocalLock {
        LocalLock::at(layout().state().lock(LockName::Allocator))
    }

    fn heap() -> Heap {
        Heap::new(HeapShape { bytes: 64, hosts: 2, processes: 2, local_words: layout().words(), bells: 1 })
    }

    #[test]
    fn a_lock_that_is_held_is_refused_at_the_deadline_and_free_after() {
        let first = heap();
        let second = first.process(0, ProcessSlot(1));
        let one = Local::enter(&first, layout(), 0, 11, 0);
        let two = Local::enter(&second, layout(), 0, 12, 0);
        let held = layout().membership().lock(&first, &one, SOON).unwrap();
        let refused = layout().membership().lock(&second, &two, SOON).unwrap_err();
        assert!(
            matches!(refused, PoolError::Timeout { peer: Peer { host: 0, pid: 11, .. }, .. }),
            "{refused}"
        );
        drop(held);
        assert!(!layout().membership().lock(&second, &two, SOON).unwrap().recovered());
    }

    #[test]
    fn a_dead_holder_is_taken_over_and_the_taker_repairs() {
        let first = heap();
        let second = first.process(0, ProcessSlot(1));
        let two = Local::enter(&second, layout(), 0, 12, 0);
        std::mem::forget(allocator().lock(&second, &two, SOON).unwrap());
        drop(second);
        let one = Local::enter(&first, layout(), 0, 11, 0);
        let unrepaired = allocator().lock(&first, &one, SOON).unwrap();
        assert!(unrepaired.recovered());
        drop(unrepaired);
        let mut repaired = allocator().lock(&first, &one, SOON).unwrap();
        assert!(repaired.recovered(), "the first taker did not repair");
        repaired.repaired();
        drop(repaired);
        assert!(!allocator().lock(&first, &one, SOON).unwrap().recovered());
    }

    #[test]
    fn a_holder_whose_slot_has_a_new_process_is_taken_over() {
        let first = heap();
        let second = first.process(0, ProcessSlot(1));
        let two = Local::enter(&second, layout(), 0, 12, 0);
        std::mem::forget(allocator().lock(&second, &two, SOON).unwrap());
        let again = Local::enter(&second, layout(), 0, 13, 0);
        assert_eq!((two.incarnation, again.incarnation), (1, 2));
        assert!(allocator().lock(&second, &again, SOON).unwrap().recovered());
    }

    #[test]
    fn a_lock_word_that_names_no_slot_is_taken_over() {
        let first = heap();
        let one = Local::enter(&first, layout(), 0, 11, 0);
        first.local_store(LocalWord(0), u64::MAX >> 1);
        assert!(layout().membership().lock(&first, &one, SOON).unwrap().recovered());
    }

    #[test]
    fn a_counter_under_the_lock_loses_nothing_among_threads() {
        const ROUNDS: u64 = 1000;
        let first = heap();
        let second = first.process(0, ProcessSlot(1));
        let counter = LocalWord(layout().words() - 1);
        std::thread::scope(|scope| {
            for memory in [&first, &second] {
                scope.spawn(move || {
                    let me = Local::enter(memory, layout(), 0, 1, 0);
                    for _ in 0..ROUNDS {
                        let _guard = allocator().lock(memory, &me, Duration::from_secs(30)).unwrap();
                        memory.local_store(counter, memory.local_load(counter) + 1);
                    }
                });
            }
        });
        assert_eq!(first.local_load(counter), 2 * ROUNDS);
    }
}
