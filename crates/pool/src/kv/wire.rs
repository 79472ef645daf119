//! The lines of a cache of blocks, as they stand in the pool: the root, a host's control line, entries, records and slabs.
//!
//! # Words of a root
//! | word | what |
//! |---|---|
//! | 0 | `polderk5` |
//! | 1 | bytes that a slab takes at most |
//! | 2 | lines of a host's log |
//! | 3 | budget in bytes |
//! | 4 | hosts |
//!
//! # Words of a control line
//! | word | what |
//! |---|---|
//! | 0 | sequence of the next line of its log |
//! | 1 | bits 0..32 one more than the highest number of a slab, bits 32..64 how often its slabs have changed |
//! | 2 | bytes of the slabs that it has or makes |
//! | 3 | incarnation of the host, 0 before its first process |
//! | 4 | bit 0 while a process changes its part, bit 1 while it wants a slab that others take, bit 2 once a process of it has pinned a block, bit 3 while it is gone and others may have its room; bits 8..64 bytes of the slab that there was no room for when it last asked, 0 where it got one |
//! | 5 | blocks that were put |
//! | 6 | blocks that were evicted |
//!
//! # Words of a slot's line
//! | word | what |
//! |---|---|
//! | 0, 1 | key |
//! | 2 | bits 0..56 generation, bits 56..64 state: 0 free, 1 reserved, 2 live |
//! | 3 | bits 0..32 first 4 bytes of the identity's hash, bits 32..64 low bits of the blocks that its host had put when the slot was taken |
//! | 4 | bits 0..32 bytes of the block, bits 32..40 host, bits 40..64 slab |
//! | 5 | XXH3-64 of the block, 0 where it was not asked for |
//! | 6 | reserved: the process that has reserved it; live: seconds since 1970 when its block was put, by the clock of its host |
//!
//! # Words of where a host goes on
//! | word | what |
//! |---|---|
//! | 0 | bytes of a block, 0 where no size is kept |
//! | 1 | bits 0..14 the slot that is taken next, bits 14..32 its slab |
//! | 2 | bits 0..32 low bits of the blocks that the host had put when its turn of all slots began, bits 32..64 the same of the turn before |
//!
//! # Words of a host's totals
//! No checksum is over them.
//!
//! | word | what |
//! |---|---|
//! | 0 | blocks that its processes have read |
//! | 1 | blocks that they asked for and that were not there |
//!
//! # Words of a line of a log
//! | word | what |
//! |---|---|
//! | 0 | sequence, from the number of lines on |
//! | 1, 2 | key of the first record |
//! | 3 | bits 0..14 slot, bits 14..32 slab, bits 32..64 generation, 0 where the slab was given up; all of slot and slab 1 where the host asks for one |
//! | 4..7 | the second record, or a last word of ones |
//!
//! # Words of a slab's head
//! | word | what |
//! |---|---|
//! | 0 | `polderk5` |
//! | 1 | bytes of a block |
//! | 2 | bits 0..32 slots, bits 32..64 the first of its counts of hits |
//! | 3 | generation of the object, so that what an earlier one left there counts for nothing |
//! | 4 | bits 0..56 generation of the object `/kv/NAME`, bits 56..64 its host: a cache that was removed takes no slab of the next of its name for its own |

use twox_hash::XxHash3_64;

use crate::line::Words;
use crate::object;

/// What a root and a slab begin with: `polderk` and the version of what follows.
const MAGIC: u64 = u64::from_le_bytes(*b"polderk5");
/// Bits of a slot's index in its slab.
const SLOT_BITS: u32 = 14;
/// The most slots of a slab.
pub(super) const MAX_SLOTS: u64 = 1 << SLOT_BITS;
/// The most slabs of a host: one less than fit, so that no slot's word is all ones.
pub(super) const MAX_SLABS: u32 = (1 << (32 - SLOT_BITS)) - 1;
/// Where in the flags of a control line the bytes of a slab begin that there was no room for.
const ASKED_SHIFT: u32 = 8;
const GENERATION_BITS: u32 = 56;
const GENERATIONS: u64 = (1 << GENERATION_BITS) - 1;
/// Sequence numbers of a log are below this: a host that logs a line in each nanosecond takes two years. What is above is damaged.
pub(super) const SEQUENCES: u64 = 1 << 56;
/// The most lines of a log, and bytes of a slab, of a cache that is not damaged.
const MOST_LINES: u64 = 1 << 32;
const MOST_BYTES: u64 = 1 << 56;

/// What tells a cache from others of its name, before and after it: the generation and the owner of its root.
pub(super) const fn stamp_of(generation: u64, owner: u16) -> u64 {
    generation | (owner as u64) << object::GENERATION_BITS
}

/// What names a cache in the pins of its slots: the low bits of a hash of its stamp.
pub(super) fn tag_of(stamp: u64) -> u16 {
    XxHash3_64::oneshot(&stamp.to_le_bytes()) as u16
}

/// Bytes of the budget that one count of hits is for.
pub(super) const COUNTED_BYTES: u64 = 16 << 10;

/// What all hosts know of a cache, written once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) slab_bytes: u64,
    pub(crate) log_lines: u64,
    pub(crate) budget: u64,
    pub(crate) hosts: u16,
}

impl Root {
    pub(super) fn encode(&self) -> Words {
        [MAGIC, self.slab_bytes, self.log_lines, self.budget, self.hosts.into(), 0, 0]
    }

    pub(super) fn decode(words: &Words) -> Option<Self> {
        let [magic, slab_bytes, log_lines, budget, hosts, ..] = *words;
        let hosts = u16::try_from(hosts).ok()?;
        let fits = (1..=MOST_LINES).contains(&log_lines) && slab_bytes <= MOST_BYTES;
        (magic == MAGIC && fits).then_some(Self { slab_bytes, log_lines, budget, hosts })
    }
}

/// What a host says of its part; its processes write it under the host's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Control {
    pub(super) position: u64,
    pub(super) slabs: u32,
    pub(super) changes: u32,
    pub(super) claimed: u64,
    pub(super) incarnation: u64,
    pub(super) busy: bool,
    pub(super) wants: bool,
    pub(super) pins: bool,
    /// It is gone, and others may have its room.
    pub(super) gone: bool,
    /// Bytes of the slab that there was no room for when it last asked; 0 where it got one.
    pub(super) asked: u64,
    pub(super) puts: u64,
    pub(super) evictions: u64,
}

impl Control {
    pub(super) fn encode(&self) -> Words {
        let Self { busy, wants, pins, gone, asked, .. } = *self;
        let slabs = u64::from(self.slabs) | u64::from(self.changes) << 32;
        let flags = [busy, wants, pins, gone].into_iter().rev();
        let flags = flags.fold(asked << (ASKED_SHIFT - 4), |flags, flag| flags << 1 | u64::from(flag));
        [self.position, slabs, self.claimed, self.incarnation, flags, self.puts, self.evictions]
    }

    /// What the words say; nothing before the host's first process.
    pub(super) fn decode(words: &Words) -> Option<Self> {
        let [position, slabs, claimed, incarnation, flags, puts, evictions] = *words;
        let (slabs, changes) = (slabs as u32, (slabs >> 32) as u32);
        let [busy, wants, pins, gone] = [0, 1, 2, 3].map(|flag| flags >> flag & 1 != 0);
        let control = Self {
            position,
            slabs,
            changes,
            claimed,
            incarnation,
            busy,
            wants,
            pins,
            gone,
            asked: flags >> ASKED_SHIFT,
            puts,
            evictions,
        };
        let fits = slabs <= MAX_SLABS && position <= SEQUENCES + MOST_LINES;
        (incarnation != 0 && fits).then_some(control)
    }
}

/// Where a block lies: a slab of a host, and a slot in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Slot(u32);

impl Slot {
    pub(super) const fn new(slab: u32, index: u32) -> Self {
        Self(slab << SLOT_BITS | index)
    }

    /// No slot: in a record of generation [`SLAB_IS_GONE`] its host asks others for a slab.
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn of(word: u32) -> Self {
        Self(word)
    }

    pub(super) const fn word(self) -> u32 {
        self.0
    }

    pub(super) const fn slab(self) -> u32 {
        self.0 >> SLOT_BITS
    }

    pub(super) const fn index(self) -> u32 {
        self.0 & (MAX_SLOTS as u32 - 1)
    }
}

/// How many blocks a host had put when its last two turns of its slots began: the low bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Turns {
    pub(super) this: u32,
    pub(super) before: u32,
}

impl Turns {
    pub(super) const fn of(word: u64) -> Self {
        Self { this: word as u32, before: (word >> 32) as u32 }
    }

    pub(super) const fn word(self) -> u64 {
        self.this as u64 | (self.before as u64) << 32
    }
}

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum State {
    /// Nothing.
    #[default]
    Free,
    /// A process of its host is copying a block there.
    Reserved,
    /// A block, whole in memory.
    Live,
}

/// The line of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Entry {
    pub(super) key: u128,
    pub(super) generation: u64,
    pub(super) state: State,
    pub(super) identity: u32,
    pub(super) puts: u32,
    pub(super) bytes: u32,
    pub(super) host: u16,
    pub(super) slab: u32,
    pub(super) sum: u64,
    /// Who has reserved it.
    pub(super) holder: u64,
    /// When its block was put.
    pub(super) second: u64,
}

impl Entry {
    pub(super) fn encode(&self) -> Words {
        let place = u64::from(self.bytes) | u64::from(self.host) << 32 | u64::from(self.slab) << 40;
        let stamp = self.generation | (self.state as u64) << GENERATION_BITS;
        let (low, high) = (self.key as u64, (self.key >> 64) as u64);
        let identity = u64::from(self.identity) | u64::from(self.puts) << 32;
        let last = if self.state == State::Live { self.second } else { self.holder };
        [low, high, stamp, identity, place, self.sum, last]
    }

    pub(super) fn decode(words: &Words) -> Option<Self> {
        let [low, high, stamp, identity, place, sum, last] = *words;
        let state = match stamp >> GENERATION_BITS {
            0 => State::Free,
            1 => State::Reserved,
            2 => State::Live,
            _ => return None,
        };
        Some(Self {
            key: u128::from(low) | u128::from(high) << 64,
            generation: stamp & GENERATIONS,
            state,
            identity: identity as u32,
            puts: (identity >> 32) as u32,
            bytes: place as u32,
            host: (place >> 32) as u16 & 0xff,
            slab: (place >> 40) as u32,
            sum,
            holder: if state == State::Live { 0 } else { last },
            second: if state == State::Live { last } else { 0 },
        })
    }

    /// The generation after that of a line which may be torn: the word with it is the old one or the new one.
    pub(super) const fn next_generation(words: &Words) -> u64 {
        let next = words[2].wrapping_add(1) & GENERATIONS;
        if next as u32 == SLAB_IS_GONE { next + 1 } else { next }
    }
}

/// The low bits of no slot's generation: the slab with this slot was given up, and its number may be another's from then on.
pub(super) const SLAB_IS_GONE: u32 = 0;

/// A block that a host has put: its key, its slot, and the low bits of the slot's generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) key: u128,
    pub(super) slot: Slot,
    pub(super) generation: u32,
}

/// Records of a line of a log.
pub(super) const RECORDS: usize = 2;
const NO_RECORD: u64 = u64::MAX;

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogLine {
    pub(super) sequence: u64,
    pub(super) records: Vec<Record>,
}

impl LogLine {
    pub(super) fn encode(sequence: u64, records: &[Record]) -> Words {
        let mut words = [sequence, 0, 0, NO_RECORD, 0, 0, NO_RECORD];
        for (words, record) in words[1..].chunks_exact_mut(3).zip(records) {
            let place = u64::from(record.slot.0) | u64::from(record.generation) << 32;
            words.copy_from_slice(&[record.key as u64, (record.key >> 64) as u64, place]);
        }
        words
    }

    pub(super) fn decode(words: &Words) -> Self {
        let record = |words: &[u64]| {
            let key = u128::from(words[0]) | u128::from(words[1]) << 64;
            let (slot, generation) = (Slot(words[2] as u32), (words[2] >> 32) as u32);
            (words[2] != NO_RECORD).then_some(Record { key, slot, generation })
        };
        Self { sequence: words[0], records: words[1..].chunks_exact(3).filter_map(record).collect() }
    }
}

/// The first line of a slab, published once the lines of its slots are zeros in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlabHead {
    pub(super) block: u32,
    pub(super) slots: u32,
    pub(super) first_count: u32,
}

impl SlabHead {
    /// As an object of this generation, in the cache whose root has this stamp.
    pub(super) fn encode(&self, generation: u64, cache: u64) -> Words {
        let slots = u64::from(self.slots) | u64::from(self.first_count) << 32;
        [MAGIC, self.block.into(), slots, generation, cache, 0, 0]
    }

    pub(super) fn decode(words: &Words, generation: u64, cache: u64) -> Option<Self> {
        let [magic, block, slots, of_object, of_cache, ..] = *words;
        let (block, slots, first_count) = (u32::try_from(block).ok()?, slots as u32, (slots >> 32) as u32);
        let is_whole =
            magic == MAGIC && (of_object, of_cache) == (generation, cache) && slots as u64 <= MAX_SLOTS;
        is_whole.then_some(Self { block, slots, first_count })
    }

    /// How many slots one count of hits is for.
    pub(super) fn slots_a_count(&self) -> u64 {
        (COUNTED_BYTES / self.stride().max(1)).max(1)
    }

    /// Its counts of hits: the first, and the one behind the last.
    pub(super) fn counts(&self) -> (u64, u64) {
        let first = u64::from(self.first_count);
        (first, first + u64::from(self.slots).div_ceil(self.slots_a_count()))
    }

    /// From one block to the next.
    pub(super) fn stride(&self) -> u64 {
        u64::from(self.block).next_multiple_of(polder_mem::LINE)
    }

    /// Bytes of the whole slab.
    pub(super) fn bytes(&self) -> u64 {
        (1 + u64::from(self.slots)) * polder_mem::LINE + u64::from(self.slots) * self.stride()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_as_they_were() {
        let entry = Entry {
            key: u128::MAX - 5,
            generation: GENERATIONS,
            state: State::Live,
            identity: u32::MAX,
            puts: 6,
            bytes: 1 << 31,
            host: 63,
            slab: MAX_SLABS - 1,
            sum: 9,
            holder: 0,
            second: 7,
        };
        let reserved = Entry { state: State::Reserved, holder: 7, second: 0, ..entry };
        assert_eq!(Entry::decode(&reserved.encode()), Some(reserved));
        assert_eq!(Entry::decode(&entry.encode()), Some(entry));
        assert_eq!(Entry::next_generation(&entry.encode()), 1);
        let record =
            |key| Record { key, slot: Slot::new(MAX_SLABS - 1, MAX_SLOTS as u32 - 1), generation: u32::MAX };
        for records in [vec![], vec![record(1)], vec![record(2), record(3 << 64)]] {
            let line = LogLine::decode(&LogLine::encode(5, &records));
            assert_eq!(line, LogLine { sequence: 5, records });
        }
        let turns = Turns { this: 4, before: u32::MAX };
        assert_eq!(Turns::of(turns.word()), turns);
        let (slot, root) = (Slot::new(300, 7), Root { slab_bytes: 1, log_lines: 2, budget: 3, hosts: 64 });
        assert_eq!((slot.slab(), slot.index()), (300, 7));
        assert_eq!(Root::decode(&root.encode()), Some(root));
        assert_eq!(Control::decode(&[0; 7]), None);
        let control =
            Control { incarnation: 1, slabs: MAX_SLABS, changes: 9, pins: true, ..Control::default() };
        assert_eq!(control.encode()[4], 4);
        for control in [
            control,
            Control { wants: true, gone: true, ..control },
            Control { busy: true, asked: MOST_BYTES - 1, ..control },
        ] {
            assert_eq!(Control::decode(&control.encode()), Some(control));
        }
        let head = SlabHead { block: 100, slots: 3, first_count: u32::MAX };
        assert_eq!((head.stride(), head.bytes()), (128, 4 * 64 + 3 * 128));
        assert_eq!(SlabHead::decode(&head.encode(8, 5), 8, 5), Some(head));
        assert_eq!(SlabHead::decode(&head.encode(8, 5), 9, 5), None);
        assert_eq!(SlabHead::decode(&head.encode(8, 5), 8, 6), None);
    }
}
