//! Which stores are faster for a message: ordinary ones, whose bytes the reader finds in the writer's cache, or those past
//! the caches, whose bytes it finds in memory.
//!
//! The first are three times as fast where reader and writer share a cache and five times as slow where they do not, and a
//! virtual machine moves between the two while it runs. So both are timed. All ranks try the same kind in the same
//! operation, for they count operations alike; each then takes what was faster for it, which nobody else has to know.

use std::time::Duration;

/// How often the slower kind is tried again: once in so many operations of a size.
const AGAIN: u32 = 128;

/// Operations of a size that are spent on each kind at first.
const TRIALS: u32 = 3;

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

/// How long an operation of one size took with each kind, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    uses: u32,
    ordinary: u64,
    streaming: u64,
}

impl Paces {
    /// What to use for the next operation of this size.
    pub(crate) fn next(&mut self, size: Size) -> Stores {
        let pace = self.of(size);
        pace.uses = pace.uses.wrapping_add(1);
        pace.choose()
    }

    /// Takes note of how long the operation took.
    pub(crate) fn took(&mut self, size: Size, stores: Stores, time: Duration) {
        let pace = self.of(size);
        let known = match stores {
            Stores::Ordinary => &mut pace.ordinary,
            Stores::Streaming => &mut pace.streaming,
        };
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        // Down at once and up by steps: an interruption makes one operation slow, a move to another core all.
        *known =
            if *known == 0 || time < *known { time } else { *known + (time.min(*known * 2) - *known) / 4 };
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
    fn choose(&self) -> Stores {
        let (faster, slower) = if self.streaming <= self.ordinary {
            (Stores::Streaming, Stores::Ordinary)
        } else {
            (Stores::Ordinary, Stores::Streaming)
        };
        match self.uses {
            uses if uses <= TRIALS => Stores::Streaming,
            uses if uses <= 2 * TRIALS => Stores::Ordinary,
            uses if uses.is_multiple_of(AGAIN) => slower,
            _ => faster,
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
            paces.took(SIZE, stores, Duration::from_micros(time));
        }
        ordinaries
    }

    #[test]
    fn the_faster_kind_is_used_and_the_slower_tried_now_and_then() {
        let mut paces = Paces::default();
        assert_eq!(operations(&mut paces, 1000, 1300, 1650), 1000 - TRIALS - 7);
        assert_eq!(operations(&mut Paces::default(), 1000, 8000, 1650), TRIALS + 7);
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
        paces.took(SIZE, Stores::Ordinary, Duration::from_millis(50));
        assert_eq!(paces.next(SIZE), Stores::Ordinary);
    }
}
