//! Which blocks are used: counts of hits that readers keep in lines of their own host, and that the owner of a slot adds up before it
//! evicts. A block that was read since the owner last came by is spared once. So is a block that was put since, while older ones are
//! there: else many puts at once would lose the first of them before blocks that were read once long ago.
//!
//! It decides only which block makes room first. Counts are bytes that wrap around. Two processes of a host may lose one of two hits, and
//! slots of two owners share a count.

use polder_mem::{LINE, Memory, Offset};

use super::slabs::Slab;
use super::wire::{COUNTED_BYTES, Entry, SlabHead, Slot, Turns};
use super::{Cache, LOG_LINE, TOTALS_LINE};
use crate::PoolError;
use crate::line::WORDS;
use crate::object::Object;
use crate::pool::locked;

/// Words of a line of counts: all of it.
const COUNTS: usize = WORDS + 1;
/// The most lines of counts.
const MOST_LINES: u64 = 1 << 20;
/// So many used blocks are spared for each that is to be stored. Then the next makes room, so that no put passes over a whole cache.
const SPARED: usize = 64;
/// As above, of new blocks: each is spared once at most, so that few are passed over for each that is stored.
const SPARED_NEW: usize = 1024;

/// What an owner knows of the counts while it looks for room.
#[derive(Debug)]
pub(super) struct Uses {
    /// The objects of all hosts that are known, and whether each is another's.
    parts: Vec<(Offset, bool)>,
    /// A line of counts, and the sums of all hosts.
    line: Option<(u64, [u64; COUNTS])>,
    /// The count that was asked for last, and whether it had changed.
    last: Option<(u64, bool)>,
    /// How many blocks may be spared yet: used ones, and new ones.
    spares: [usize; 2],
    /// Blocks that the host has put.
    puts: u32,
    /// Slots for blocks of this size, and how many were passed since a new block last made room.
    slots: u64,
    passed: u64,
    /// Of the new blocks that were spared since then, the one that was put first: how many were put since, and where it is.
    oldest_new: Option<(u32, Slot, Slab)>,
}

impl Uses {
    /// From here on the block that comes next makes room.
    pub(super) const fn spare_no_more(&mut self) {
        self.spares = [0; 2];
    }

    fn spare(&mut self, is_new: bool) -> bool {
        let spares = &mut self.spares[usize::from(is_new)];
        let may_spare = *spares > 0;
        *spares = spares.saturating_sub(1);
        may_spare
    }

    /// The slot of the oldest block that was spared because it is new, where all slots were passed and none had an older block to give.
    pub(super) fn new_one_for_want_of_older(&mut self) -> Option<(Slot, Slab)> {
        self.passed += 1;
        if self.passed <= self.slots {
            return None;
        }
        self.passed = 0;
        self.oldest_new.take().map(|(_, slot, slab)| (slot, slab))
    }

    /// Whether a block was put since this host last came by, and may be spared. Where nothing is spared, a turn of all slots puts as many
    /// blocks: then the one that comes next is the oldest, and none counts as new.
    fn spares_new(&mut self, block: &Entry, turns: Turns, (slot, slab): (Slot, &Slab)) -> bool {
        let age = self.puts.wrapping_sub(block.puts);
        let is_new = age <= self.puts.wrapping_sub(turns.before) && u64::from(age) * 4 < self.slots * 3;
        let spares = is_new && self.spare(true);
        if spares && self.oldest_new.is_none_or(|(oldest, ..)| oldest < age) {
            self.oldest_new = Some((age, slot, *slab));
        }
        spares
    }
}

/// The line of a count, its word there, and its first bit.
const fn split(count: u64) -> (u64, usize, u32) {
    (count / LINE, (count % LINE / 8) as usize, (count % 8 * 8) as u32)
}

/// Adds each byte of two words.
const fn sum_of(one: u64, other: u64) -> u64 {
    let high = 0x8080_8080_8080_8080;
    ((one & !high) + (other & !high)) ^ (one ^ other) & high
}

impl<M: Memory> Cache<M> {
    fn use_lines(&self) -> u64 {
        use_lines(self.geometry.budget)
    }

    /// Where the count of a slot stands among those of a host. Slots of one owner share one only where their blocks are small.
    pub(super) fn count_of(&self, host: u16, slab: &Slab, index: u32) -> u64 {
        let counts = self.use_lines() * LINE;
        let owners = counts / u64::from(self.geometry.hosts.max(1)) * u64::from(host);
        let own = u64::from(slab.head.first_count) + u64::from(index) / slab.head.slots_a_count();
        (owners + own) % counts
    }

    /// The first count of a new slab: behind another of this host's, and before the next.
    pub(super) fn first_count(&self, own: &[(u32, Slab)], head: &SlabHead) -> u32 {
        let mut taken: Vec<_> = own.iter().map(|(_, slab)| slab.head.counts()).collect();
        taken.sort_unstable();
        let mut first = 0;
        for (begin, end) in taken {
            if first + head.counts().1 <= begin {
                break;
            }
            first = first.max(end);
        }
        // Slots that lie too far share counts with others.
        first as u32
    }

    fn counts_at(&self, part: Offset, line: u64) -> Offset {
        part.lines(LOG_LINE + self.geometry.log_lines + line)
    }

    /// Counts a hit, for the owner of the slot.
    pub(super) fn touch(&self, owner: u16, count: u64) {
        let (memory, (line, word, bit)) = (self.pool.memory(), split(count));
        let at = self.counts_at(self.part.at(), line).word(word as u64);
        if let Ok(counts) = memory.load(at) {
            memory.store(at, sum_of(counts, 1 << bit));
            if owner != self.pool.member().host {
                // HARMLESS(write_back -> drop): a hit that its owner does not see only lets the block go earlier.
                memory.write_back(at, LINE);
            }
        }
    }

    /// Counts hits and misses of this host, for people. Two processes at once may lose some.
    pub(super) fn count(&self, hits: u64, misses: u64) {
        let (memory, at) = (self.pool.memory(), self.part.at().lines(TOTALS_LINE));
        for (word, more) in (0..).zip([hits, misses]) {
            if let Ok(counted) = memory.load(at.word(word)) {
                memory.store(at.word(word), counted.wrapping_add(more));
            }
        }
        // HARMLESS(write_back -> drop): totals that no protocol goes by.
        memory.write_back(at, LINE);
    }

    /// What an owner needs to know which of its blocks are used, when it stores so many and has put and has so many.
    pub(super) fn uses(&self, wanted: usize, puts: u64, slots: u64) -> Uses {
        let replica = locked(&self.replica);
        let part = |part: &Object| (part.at(), part.at() != self.part.at());
        Uses {
            parts: replica.parts().map(part).collect(),
            line: None,
            last: None,
            spares: [SPARED, SPARED_NEW].map(|spared| spared * (1 + wanted)),
            puts: puts as u32,
            slots,
            passed: 0,
            oldest_new: None,
        }
    }

    /// Whether the block of a slot of this host is used or new, and may be spared.
    pub(super) fn is_spared(
        &self,
        uses: &mut Uses,
        block: &Entry,
        turns: Turns,
        (slot, slab): (Slot, &Slab),
    ) -> Result<bool, PoolError> {
        Ok(self.is_used(uses, slab, slot.index())? && uses.spare(false)
            || uses.spares_new(block, turns, (slot, slab)))
    }

    /// Whether the block of a slot of this host was read since this was last asked.
    fn is_used(&self, uses: &mut Uses, slab: &Slab, index: u32) -> Result<bool, PoolError> {
        let count = self.count_of(self.pool.member().host, slab, index);
        if let Some((last, was_used)) = uses.last
            && last == count
        {
            return Ok(was_used);
        }
        let (line, word, bit) = split(count);
        let sums = match uses.line {
            Some((known, sums)) if known == line => sums,
            _ => self.sum_counts(&uses.parts, line)?,
        };
        uses.line = Some((line, sums));
        let memory = self.pool.memory();
        let at = self.counts_at(self.part.at(), self.use_lines() + line).word(word as u64);
        let (seen, byte) = (memory.load(at)?, 0xff << bit);
        let was_used = (seen ^ sums[word]) & byte != 0;
        if was_used {
            memory.store(at, seen & !byte | sums[word] & byte);
        }
        uses.last = Some((count, was_used));
        Ok(was_used)
    }

    fn sum_counts(&self, parts: &[(Offset, bool)], line: u64) -> Result<[u64; COUNTS], PoolError> {
        let memory = self.pool.memory();
        for &(part, is_other) in parts {
            if is_other {
                // HARMLESS(invalidate -> write_back -> drop): with older counts a block goes earlier.
                memory.invalidate(self.counts_at(part, line), LINE);
            }
        }
        // SYNC: pairs with no fence: `touch` has none.
        // HARMLESS(fence_invalidations -> sfence -> drop): counts of any age only say which block goes first.
        memory.fence_invalidations();
        let mut sums = [0; COUNTS];
        for &(part, _) in parts {
            for (word, sum) in (0..).zip(&mut sums) {
                *sum = sum_of(*sum, memory.load(self.counts_at(part, line).word(word))?);
            }
        }
        Ok(sums)
    }
}

/// Lines of counts of a cache with this budget: a count for each `COUNTED_BYTES`, or fewer where it is large.
pub(super) const fn use_lines(budget: u64) -> u64 {
    match budget / (COUNTED_BYTES * LINE) {
        0 => 1,
        lines if lines > MOST_LINES => MOST_LINES,
        lines => lines,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_added_each_alone() {
        assert_eq!(sum_of(0xff01_7f80_00ff_80ff, 0x0102_0180_00ff_80ff), 0x0003_8000_00fe_00fe);
        assert_eq!([0, 1 << 20, 3 << 20, u64::MAX].map(use_lines), [1, 1, 3, MOST_LINES]);
    }
}
