//! Chooses the faster stores for a message: ordinary ones, or those past the caches. The reader finds the bytes of the
//! former in the writer's cache, those of the latter in memory.
//!
//! Ordinary stores are three times as fast if reader and writer share a cache, and five times as slow if they do not. A
//! virtual machine moves between the two while it runs. So both kinds are timed, in trials of a few operations in a row:
//!
//! - The first operations after a change of kind do not count, because they find the staging where the other kind left it.
//! - All ranks try the same kind in the same operation, because they count operations alike.
//! - Each rank then uses the kind that was faster for it. The other ranks need not know.
//! - Trials of a kind five times as slow add 3% to the time of operations, once the first are over.
//!
//! Sizes share the staging. If sizes alternate, an operation may find the staging as another size's kind left it; it counts.

use std::time::Duration;

/// Operations from one trial to the next, of the kinds in turn.
const AGAIN: u32 = 256;

/// Operations of a trial.
const TRIAL: u32 = 4;

/// Operations after a change of kind, by this rank or perhaps by others, that do not count: one for each half of the staging.
const SETTLING: u32 = 2;

/// A kind of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Into the cache.
    Ordinary,
    /// Past it.
    Streaming,
}

/// The paces of all sizes, by the power of two and by where the data lives.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    sizes: Vec<(Size, Pace)>,
}

/// Operations that are timed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) in_pool: bool,
    pub(crate) bytes_log2: u32,
}

/// What is known of operations of one size.
#[derive(Clone, Copy, Debug)]
struct Pace {
    uses: u32,
    /// Nanoseconds of an operation with each kind, 0 before it was timed.
    ordinary: u64,
    streaming: u64,
    /// What is used between trials.
    chosen: Stores,
    /// What was used last, and operations since it changed or a trial began or ended.
    last: Stores,
    settled: u32,
}

impl Default for Pace {
    fn default() -> Self {
        let (chosen, last) = (Stores::Streaming, Stores::Streaming);
        Self { uses: 0, ordinary: 0, streaming: 0, chosen, last, settled: 0 }
    }
}

impl Paces {
    /// What to use for the next operation of this size.
    pub(crate) fn next(&mut self, size: Size) -> Stores {
        self.of(size).next()
    }

    /// Takes note of how long the operation took.
    pub(crate) fn record_time(&mut self, size: Size, stores: Stores, time: Duration) {
        let pace = self.of(size);
        if pace.settled < SETTLING {
            return;
        }
        let known = match stores {
            Stores::Ordinary => &mut pace.ordinary,
            Stores::Streaming => &mut pace.streaming,
        };
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        // Down at once and up by steps: an interruption makes one operation slow, a move to another core all.
        *known =
            if *known == 0 || time < *known { time } else { *known + (time.min(*known * 2) - *known) / 4 };
        pace.choose();
    }

    fn of(&mut self, size: Size) -> &mut Pace {
        let known = self.sizes.iter().position(|(other, _)| *other == size);
        let index = known.unwrap_or_else(|| {
            self.sizes.push((size, Pace::default()));
            self.sizes.len() - 1
        });
        &mut self.sizes[index].1
    }
}

impl Pace {
    fn next(&mut self) -> Stores {
        // The first two trials follow each other.
        let first = self.uses < 2 * TRIAL;
        let every = if first { TRIAL } else { AGAIN };
        let (trial, at) = (self.uses / every, self.uses % every);
        let stores = match trial % 2 {
            _ if at >= TRIAL => self.chosen,
            0 => Stores::Streaming,
            _ => Stores::Ordinary,
        };
        let changes = stores != self.last || at == 0 || at == TRIAL;
        self.settled = if changes { 0 } else { self.settled.saturating_add(1) };
        self.last = stores;
        self.uses = self.uses.wrapping_add(1);
        stores
    }

    /// Changes to the other kind where it is faster by a tenth: by less it would change to and fro, which costs.
    fn choose(&mut self) {
        let (chosen, other, known) = match self.chosen {
            Stores::Streaming => (self.streaming, self.ordinary, Stores::Ordinary),
            Stores::Ordinary => (self.ordinary, self.streaming, Stores::Streaming),
        };
        if other != 0 && other < chosen - chosen / 10 {
            self.chosen = known;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { in_pool: false, bytes_log2: 24 };

    /// Runs operations that take `ordinary` or `streaming` microseconds, and counts those with ordinary stores.
    fn operations(paces: &mut Paces, count: u32, ordinary: u64, streaming: u64) -> u32 {
        let mut ordinaries = 0;
        for _ in 0..count {
            let stores = paces.next(SIZE);
            let time = if stores == Stores::Ordinary { ordinary } else { streaming };
            ordinaries += u32::from(stores == Stores::Ordinary);
            paces.record_time(SIZE, stores, Duration::from_micros(time));
        }
        ordinaries
    }

    #[test]
    fn the_faster_kind_is_used_and_the_slower_tried_now_and_then() {
        let mut paces = Paces::default();
        // Streaming is tried at first and from the 512th on, ordinary stores as well and from the 256th and the 768th on.
        assert_eq!(operations(&mut paces, 1000, 1300, 1650), 1000 - 2 * TRIAL);
        assert_eq!(operations(&mut Paces::default(), 1000, 8000, 1650), 3 * TRIAL);
    }

    #[test]
    fn a_move_to_another_core_is_noticed() {
        let mut paces = Paces::default();
        operations(&mut paces, 100, 1300, 1650);
        assert!(operations(&mut paces, 100, 8000, 1650) < 10);
        assert!(operations(&mut paces, 1000, 1300, 1650) > 800);
    }

    #[test]
    fn one_slow_operation_changes_nothing() {
        let mut paces = Paces::default();
        operations(&mut paces, 100, 1300, 1650);
        paces.record_time(SIZE, Stores::Ordinary, Duration::from_millis(50));
        assert_eq!(paces.next(SIZE), Stores::Ordinary);
    }

    #[test]
    fn what_a_change_of_kind_costs_does_not_count() {
        let mut paces = Paces::default();
        let mut before = None;
        let mut in_a_row = 0;
        let mut ordinaries = 0;
        for _ in 0..1000 {
            let stores = paces.next(SIZE);
            in_a_row = if before == Some(stores) { in_a_row + 1 } else { 0 };
            before = Some(stores);
            ordinaries += u32::from(stores == Stores::Ordinary);
            let time = match stores {
                _ if in_a_row < 2 => 8000,
                Stores::Ordinary => 1300,
                Stores::Streaming => 1650,
            };
            paces.record_time(SIZE, stores, Duration::from_micros(time));
        }
        assert_eq!(ordinaries, 1000 - 2 * TRIAL);
    }

    #[test]
    fn kinds_that_are_alike_do_not_take_turns() {
        let mut paces = Paces::default();
        let (mut changes, mut before) = (0, Stores::Streaming);
        for operation in 0..10_000_u64 {
            let stores = paces.next(SIZE);
            changes += u32::from(stores != before);
            before = stores;
            // Within five hundredths of each other, as it falls.
            paces.record_time(SIZE, stores, Duration::from_nanos(1_000_000 + operation * 7919 % 50_000));
        }
        // The first trial of the other kind, and those that follow: to it and back.
        assert!(changes <= 2 + 2 * (10_000 / AGAIN / 2 + 1), "{changes}");
    }
}
