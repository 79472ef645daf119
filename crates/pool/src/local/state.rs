//! What the directory and the allocator of a host keep in the host's own words, and where.
//!
//! All of it can be rebuilt from the host's shard, and is when the host-local file is new: `READY` is 0 then. Nothing here
//! is believed by another host.
//!
//! | words | what |
//! |---|---|
//! | 6 | locks that are not striped |
//! | `stripes` | directory locks |
//! | 20 | single words, see the constants |
//! | 3 * `stripes` | what the holder of each directory lock is doing |
//! | 2 * 64 | jobs: id, bytes held |
//! | `processes` | ports of endpoints: the process that took one last |
//! | `processes` | lines of announcements that a process ever used |
//! | `processes * opens / 64` | announcements in use, one bit each |
//! | `slots / 8` | directory slots in use, one byte each: 1 + the stripe that took it, 255 what is damaged |
//! | 2 * (`slots / 64`, and that / 64) | slots that may hold a condemned entry, one bit each, and a summary; the same of tombstones |
//! | `chunks` | chunks: held, units used, a bound on the longest free run |
//! | `chunks / 64` | chunks with free units, one bit each |
//! | `chunks * units / 64` | units in use, one bit each |

use polder_mem::{LINE, LocalWord, ProcessSlot};

use crate::format::Layout;

/// Stripes of the directory lock of one host: names that fall on different stripes are changed at the same time.
pub const MAX_STRIPES: u32 = 64;
/// The tag of a slot that is not used again until the state is built anew, because what it holds is damaged.
pub(crate) const DAMAGED: u8 = u8::MAX;
/// Jobs of one host whose use of the pool is counted.
pub(crate) const JOBS: u32 = 64;

const LOCKS: u32 = 6;
const SINGLES: u32 = 20;
/// Words in which the holder of a directory lock says what it is doing.
const INTENT_WORDS: u32 = 3;
/// The most units of all chunks together: their bits take 2 GiB of memory on each host.
const MAX_UNITS: u64 = 1 << 34;
/// The most units of a chunk: two of them fit a word.
const MAX_CHUNK_UNITS: u64 = 1 << 24;

/// The order of the locks that are not striped. A process that holds one takes none before it in this list. A directory
/// lock comes before all of them but the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockName {
    /// This host's parts of caches; directory locks are taken under it.
    Caches = 0,
    /// Rebuilding the whole state.
    Recovery = 1,
    /// Announcement marks.
    Announcements = 2,
    /// This host's chunk claims.
    Chunks = 3,
    /// Units, jobs and the generation limit.
    Allocator = 4,
    /// The list of this host's tombstones.
    Burials = 5,
}

/// Entries that are found without a walk through the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marks {
    Condemned = 0,
    Tombstones = 1,
}

/// A bit for each directory slot, and a summary with a bit for each word of them. A bit that is set for nothing costs a look,
/// so that it is set before the entry is written and cleared after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotBits {
    first: u32,
    words: u32,
    pub(crate) summaries: u32,
}

impl SlotBits {
    pub(crate) const fn bits(&self, word: u32) -> LocalWord {
        LocalWord(self.first + word)
    }

    pub(crate) const fn summary(&self, word: u32) -> LocalWord {
        LocalWord(self.first + self.words + word)
    }

    const fn end(&self) -> u32 {
        self.first + self.words + self.summaries
    }

    /// All of the words.
    pub(crate) fn all(&self) -> impl Iterator<Item = LocalWord> {
        (self.first..self.end()).map(LocalWord)
    }
}

/// Which local word is what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    first: u32,
    stripes: u32,
    processes: u32,
    open_words: u32,
    slots: u32,
    chunks: u32,
    unit_bytes: u64,
    chunk_units: u64,
}

impl StateLayout {
    /// The words from `first` on of a host of this pool.
    #[must_use]
    pub fn new(layout: &Layout, first: u32) -> Self {
        let geometry = layout.geometry();
        let data = u64::from(layout.chunks()) * geometry.chunk_bytes;
        let unit_bytes =
            LINE.max((data / MAX_UNITS).next_power_of_two()).max(geometry.chunk_bytes / MAX_CHUNK_UNITS);
        Self {
            first,
            stripes: layout.slots().next_power_of_two().min(MAX_STRIPES),
            processes: geometry.processes.into(),
            open_words: geometry.opens.div_ceil(64),
            slots: layout.slots(),
            chunks: layout.chunks(),
            unit_bytes,
            chunk_units: geometry.chunk_bytes / unit_bytes,
        }
    }

    /// The first word behind these.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.unit_bits_first() + self.chunks * self.chunk_bit_words()
    }

    /// How many directory locks there are.
    #[must_use]
    pub const fn stripes(&self) -> u32 {
        self.stripes
    }

    /// The unit of allocation in bytes: a line, more only in pools of many terabytes.
    #[must_use]
    pub const fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Units in a chunk.
    #[must_use]
    pub const fn chunk_units(&self) -> u64 {
        self.chunk_units
    }

    pub(crate) const fn stripe_of(&self, hash: u128) -> u32 {
        ((hash >> 64) as u64 % self.stripes as u64) as u32
    }

    pub(crate) const fn lock(&self, name: LockName) -> LocalWord {
        LocalWord(self.first + name as u32)
    }

    pub(crate) const fn stripe_lock(&self, stripe: u32) -> LocalWord {
        LocalWord(self.first + LOCKS + stripe)
    }

    const fn single(&self, index: u32) -> LocalWord {
        LocalWord(self.first + LOCKS + self.stripes + index)
    }

    /// 1 once the state has been built from the shard.
    pub(crate) const fn ready(&self) -> LocalWord {
        self.single(0)
    }

    /// The next generation.
    pub(crate) const fn generation(&self) -> LocalWord {
        self.single(1)
    }

    /// Generations below this one may be used: the generation line says so.
    pub(crate) const fn generation_limit(&self) -> LocalWord {
        self.single(2)
    }

    /// The chunk in which the allocator looks first, and the unit in it.
    pub(crate) const fn cursor(&self) -> LocalWord {
        self.single(3)
    }

    /// 1 + the empty chunk that is kept.
    pub(crate) const fn spare_chunk(&self) -> LocalWord {
        self.single(4)
    }

    /// The hosts that were ever seen, one bit each.
    pub(crate) const fn known_hosts(&self) -> LocalWord {
        self.single(5)
    }

    /// About how many entries were condemned since the last reclaim.
    pub(crate) const fn condemned_hint(&self) -> LocalWord {
        self.single(6)
    }

    /// What the holder of the allocator lock is doing: operation and stripe, start, units, job, bytes that it holds after.
    pub(crate) const fn allocator_log(&self, word: u32) -> LocalWord {
        assert!(word < 5);
        self.single(7 + word)
    }

    /// What the holder of the chunk lock is doing: chunks, first chunk.
    pub(crate) const fn chunk_log(&self, word: u32) -> LocalWord {
        assert!(word < 2);
        self.single(12 + word)
    }

    /// What the holder of a directory lock is doing: operation and slot; 1 + the first unit of an extent; its units.
    pub(crate) const fn intent(&self, stripe: u32, word: u32) -> LocalWord {
        assert!(word < INTENT_WORDS);
        LocalWord(self.single(SINGLES).0 + stripe * INTENT_WORDS + word)
    }

    /// The id of a counted job; the bytes that it holds stand in the next word.
    pub(crate) const fn job(&self, index: u32) -> LocalWord {
        LocalWord(self.single(SINGLES).0 + self.stripes * INTENT_WORDS + 2 * index)
    }

    pub(crate) const fn job_bytes(&self, index: u32) -> LocalWord {
        LocalWord(self.job(index).0 + 1)
    }

    /// The process that took a port of endpoints last.
    pub(crate) const fn port(&self, port: u16) -> LocalWord {
        LocalWord(self.job(JOBS).0 + port as u32)
    }

    /// The lines of announcements that the process at `slot` ever used.
    pub(crate) const fn open_mark(&self, slot: ProcessSlot) -> LocalWord {
        LocalWord(self.job(JOBS).0 + self.processes + slot.0 as u32)
    }

    pub(crate) const fn open_words(&self) -> u32 {
        self.open_words
    }

    pub(crate) const fn open_bits(&self, slot: ProcessSlot, word: u32) -> LocalWord {
        LocalWord(self.job(JOBS).0 + 2 * self.processes + slot.0 as u32 * self.open_words + word)
    }

    /// The word that holds the tag of a directory slot, and where in it.
    pub(crate) const fn tag(&self, slot: u32) -> (LocalWord, u32) {
        (LocalWord(self.tags_first() + slot / 8), slot % 8 * 8)
    }

    const fn tags_first(&self) -> u32 {
        self.job(JOBS).0 + self.processes * (2 + self.open_words)
    }

    /// Slots that may hold an entry of this kind.
    pub(crate) const fn marks(&self, kind: Marks) -> SlotBits {
        let words = self.slots.div_ceil(64);
        let summaries = words.div_ceil(64);
        let first = self.tags_first() + self.slots.div_ceil(8) + kind as u32 * (words + summaries);
        SlotBits { first, words, summaries }
    }

    /// Held, units used, and a bound on the longest free run of a chunk.
    pub(crate) const fn chunk(&self, chunk: u32) -> LocalWord {
        LocalWord(self.marks(Marks::Tombstones).end() + chunk)
    }

    pub(crate) const fn room_words(&self) -> u32 {
        self.chunks.div_ceil(64)
    }

    /// Chunks with free units.
    pub(crate) const fn room_bits(&self, word: u32) -> LocalWord {
        LocalWord(self.chunk(self.chunks).0 + word)
    }

    const fn unit_bits_first(&self) -> u32 {
        self.chunk(self.chunks).0 + self.room_words()
    }

    const fn chunk_bit_words(&self) -> u32 {
        self.chunk_units.div_ceil(64) as u32
    }

    /// The word that holds the bit of `unit` of `chunk`.
    pub(crate) const fn unit_bits(&self, chunk: u32, unit: u64) -> LocalWord {
        LocalWord(self.unit_bits_first() + chunk * self.chunk_bit_words() + (unit / 64) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Geometry;

    fn words(bytes: u64) -> StateLayout {
        StateLayout::new(&Layout::new(&Geometry::for_region(bytes), bytes).unwrap(), 10)
    }

    #[test]
    fn units_are_lines_unless_the_pool_is_huge() {
        assert_eq!(words(1 << 26).unit_bytes(), 64);
        assert_eq!(words(1 << 39).unit_bytes(), 64);
        assert!(words(1 << 44).unit_bytes() > 64);
    }

    #[test]
    fn words_stay_few_and_apart() {
        for shift in 20..=44 {
            let words = words(1 << shift);
            let starts = [
                words.lock(LockName::Recovery).0,
                words.stripe_lock(0).0,
                words.ready().0,
                words.intent(0, 0).0,
                words.job(0).0,
                words.port(0).0,
                words.open_mark(ProcessSlot(0)).0,
                words.open_bits(ProcessSlot(0), 0).0,
                words.tag(0).0.0,
                words.marks(Marks::Condemned).bits(0).0,
                words.marks(Marks::Condemned).summary(0).0,
                words.marks(Marks::Tombstones).bits(0).0,
                words.chunk(0).0,
                words.room_bits(0).0,
                words.unit_bits(0, 0).0,
                words.end(),
            ];
            assert!(starts.is_sorted_by(|a, b| a < b), "2^{shift}: {starts:?}");
            assert!(u64::from(words.end()) < 1 << 30);
        }
    }
}
