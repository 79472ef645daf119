//! The on-media format, version 9.
//!
//! Everything is little-endian. A region holds, from offset 0:
//!
//! | what | lines of 64 bytes | written by |
//! |---|---|---|
//! | superblock | 64 | the formatter, once |
//! | keeper blocks, incarnation `i` of the keeper has number `(i - 1) mod keepers` | `keepers * (4 + hosts)` | that incarnation of the keeper |
//! | claim lines, one a host id | `hosts` | any host: a process that claims the id, a command that asks to evict or says that a host is fenced |
//! | host lines, one a host id | `hosts` | that host; the keeper once the host is fenced |
//! | shards, one a host id | `hosts * shard` | that host; the keeper once the host is fenced |
//! | padding to a multiple of the smaller of `chunk_bytes` and 2 MiB | | nobody |
//! | chunks | `chunks * chunk_bytes / 64` | the host that claimed the chunk allocates its objects; each object's section says what others write |
//!
//! # Lines
//! A line is seven words and [`crate::line::checksum`] over them, unless its section says otherwise. A line that was
//! never written is all zeros. It is valid and empty.
//!
//! # Superblock
//! | byte | size | what |
//! |---|---|---|
//! | 0 | 8 | magic, `POLDER\0\1` |
//! | 8 | 4 | version, 9 |
//! | 12 | 4 | coherence that the pool was formatted for: 0 none, each process decides; 1 coherent, 2 software, 3 hdm-db |
//! | 16 | 16 | uuid |
//! | 32 | 8 | bytes of the region that the pool uses |
//! | 40 | 16 | spare, 0 |
//! | 56 | 8 | checksum |
//! | 64 | 2 | `hosts`, 1 to 64 |
//! | 66 | 2 | `processes` of a host, 1 to 512 |
//! | 68 | 2 | `levels` of the directory, 1 to 16 |
//! | 70 | 2 | `keepers`, places for incarnations of the keeper, 1 to 64 |
//! | 72 | 4 | `names`, the limit of the slots of a level |
//! | 76 | 4 | `opens`, announcement words of a process |
//! | 80 | 8 | `chunk_bytes`, a power of two |
//! | 88 | 8 | `chunks` |
//! | 96 | 8 | offset of the first chunk |
//! | 104 | 16 | spare, 0 |
//! | 120 | 8 | checksum |
//! | 128 | 3968 | spare: 62 empty lines |
//!
//! # Keeper block
//! | line | what |
//! |---|---|
//! | 0 and 1 | the view, written in turn, so that one of them is whole at any time |
//! | 2 | heartbeat |
//! | 3 | owner: the process that is this incarnation |
//! | 4 + host | grant: which incarnation holds the host id |
//!
//! The words of all these lines stand in [`crate::view`] and [`crate::membership`].
//!
//! # Shard
//! | part | bytes |
//! |---|---|
//! | process lines | `processes * 64` |
//! | heartbeat lines | `processes * 64` |
//! | generation line | 64 |
//! | spare | 64 |
//! | burials | checked words, filled up to a line: the number of burials, then the list of them, with room for as many as there are directory slots, but 511 at most |
//! | announcements | for each process a mark line and `opens` checked words, filled up to a line |
//! | chunk claims | `chunks / 28` checked words, rounded up, filled up to a line |
//! | directory | for each level its slots, one line a slot |
//!
//! Level `k` of the directory has as many slots as the `k`-th largest prime that is at most `names`. A name whose
//! XXH3-128 is `h` may stand in slot `(h mod 2^64) mod slots` of each level.
//!
//! A tombstone stands in a directory slot of the host that destroys the object, so that a look-up meets it without a second
//! search. A burial tells the owner: bits 0..6 are the owner of the destroyed entry, bits 6..36 the slot of the tombstone.
//!
//! `entry.rs` has the words of generation lines and entries, `opens.rs` those of announcements and marks, `chunks.rs`
//! those of chunk claims. Burials, claims, announcements and marks are [`crate::word`]s: checked and atomic.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use polder_mem::{Bell, Coherence, LINE, Memory, Offset, ProcessSlot};

use crate::line::{self, Words};
use crate::{PoolError, expect_vacant, word};

/// Bits of the second word that say the version; those behind it say the coherence.
const VERSION_BITS: u32 = 32;

/// The first word of a pool: `POLDER\0\1`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"POLDER\0\x01");
/// The format that this program reads and writes.
pub const VERSION: u32 = 9;
/// The superblock's size in bytes.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// The most hosts that a pool can have: a view holds them in one word.
pub const MAX_HOSTS: u16 = 64;
/// The most processes of a host. A rank of MPI with windows is two.
pub const MAX_PROCESSES: u16 = 512;
/// The most levels of a directory.
pub const MAX_LEVELS: u16 = 16;
/// The most incarnations of the keeper.
pub const MAX_KEEPERS: u16 = 64;
/// Bits of a chunk's state in a claim word.
pub const CHUNK_BITS: u32 = 2;
/// Chunks whose states stand in one checked word.
pub const CHUNKS_PER_WORD: u32 = word::BITS / CHUNK_BITS;

const SUPERBLOCK_LINES: u64 = SUPERBLOCK_BYTES / LINE;
/// How long a formatter may be in the middle of the first line.
const FORMATTING: Duration = Duration::from_millis(2);
const MAX_NAMES: u32 = 1 << 26;
const MAX_OPENS: u32 = 1 << 16;
const MAX_CHUNK_BYTES: u64 = 1 << 40;
const MAX_CHUNKS: u64 = 1 << 26;
const KEEPER_LINES: u64 = 4;
/// Lines that list burials.
const MAX_BURIAL_WORDS: u32 = 512;
/// The generation line and a spare one.
const SHARD_LINES: u64 = 2;
const HUGE_PAGE: u64 = 2 << 20;

const _: () = assert!(SUPERBLOCK_LINES == 64 && SUPERBLOCK_BYTES.is_multiple_of(LINE));
const _: () = assert!(size_of::<Words>() as u64 + 8 == LINE);
const _: () = assert!(CHUNKS_PER_WORD == 28 && CHUNKS_PER_WORD * CHUNK_BITS == word::BITS);
const _: () = assert!(MAX_HOSTS as u32 == u64::BITS);
// No sum in `Layout` can overflow: the largest directory of all hosts is 2^42 bytes.
const _: () = assert!(MAX_NAMES as u64 * MAX_LEVELS as u64 * MAX_HOSTS as u64 * LINE == 1 << 42);

/// Tells pools apart, also those that were formatted in the same region one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uuid(pub u128);

impl Uuid {
    /// One that no other pool has, from the randomness that the standard library seeds its maps with.
    #[must_use]
    pub fn fresh() -> Self {
        let draw = || u128::from(RandomState::new().hash_one(std::time::Instant::now()));
        Self(draw() << 64 | draw())
    }

    const fn low(self) -> u64 {
        self.0 as u64
    }

    const fn high(self) -> u64 {
        (self.0 >> 64) as u64
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// How a region is divided. Chosen when a pool is formatted, and fixed from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Host ids, 1 to 64.
    pub hosts: u16,
    /// Processes of a host, 1 to 512.
    pub processes: u16,
    /// The limit of the slots of a directory level in one host's shard; each level takes a prime below it.
    pub names: u32,
    /// Levels of the directory, 1 to 16.
    pub levels: u16,
    /// The unit in which hosts claim data space, a power of two of at least 64 bytes.
    pub chunk_bytes: u64,
    /// Objects that a process may hold open.
    pub opens: u32,
    /// Places for incarnations of the keeper, 1 to 64: one is taken again once its keeper is gone.
    pub keepers: u16,
}

impl Geometry {
    /// The paper's directory: ten levels of at most 200,000 slots in each host's shard.
    pub const PAPER_NAMES: u32 = 200_000;

    /// A geometry that suits a region of `bytes`: about a thirty-second of it for the directory, a thousand chunks.
    #[must_use]
    pub fn for_region(bytes: u64) -> Self {
        let (hosts, processes, keepers) = match bytes {
            0..0x1000_0000 => (8, 16, 16),
            0x1000_0000..0x4_0000_0000 => (16, 32, 32),
            _ => (64, 64, 64),
        };
        // A process of many groups holds an extent of every peer open in each. All announcements take a 256th of the region at most.
        let opens = bytes / 256 / (u64::from(hosts) * u64::from(processes) * 8);
        let levels = 10;
        let names = bytes / 32 / (u64::from(hosts) * u64::from(levels) * LINE);
        Self {
            hosts,
            processes,
            names: u32::try_from(names).unwrap_or(u32::MAX).clamp(31, Self::PAPER_NAMES),
            levels,
            chunk_bytes: (bytes / 1024).next_power_of_two().clamp(64 << 10, 1 << 30),
            opens: opens.clamp(256, 8192) as u32,
            keepers,
        }
    }

    fn validate(&self) -> Result<(), PoolError> {
        let within = |what, value: u64, low: u64, high: u64| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(PoolError::Geometry { what, value, low, high }),
        };
        within("the number of hosts", self.hosts.into(), 1, MAX_HOSTS.into())?;
        within("the number of processes of a host", self.processes.into(), 1, MAX_PROCESSES.into())?;
        within("the number of directory levels", self.levels.into(), 1, MAX_LEVELS.into())?;
        within("the number of keeper incarnations", self.keepers.into(), 1, MAX_KEEPERS.into())?;
        within("the number of open objects of a process", self.opens.into(), 1, MAX_OPENS.into())?;
        // The k-th prime is the least limit that leaves k levels a prime each.
        let least = primes_up().nth(usize::from(self.levels) - 1).unwrap_or(MAX_NAMES);
        within("the number of names of a level", self.names.into(), least.into(), MAX_NAMES.into())?;
        within("the size of a chunk", self.chunk_bytes, LINE, MAX_CHUNK_BYTES)?;
        match self.chunk_bytes.is_power_of_two() {
            true => Ok(()),
            false => Err(PoolError::Argument {
                what: "the size of a chunk",
                value: self.chunk_bytes.to_string(),
                expected: "a power of two is needed",
            }),
        }
    }
}

/// What the first page of a pool says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Tells this pool from others.
    pub uuid: Uuid,
    /// The bytes of the region that the pool uses.
    pub bytes: u64,
    /// How they are divided.
    pub geometry: Geometry,
    /// How all processes keep it coherent; `None` leaves that to each of them.
    pub coherence: Option<Coherence>,
}

impl Superblock {
    fn identity(&self) -> Words {
        let coherence = match self.coherence {
            None => 0,
            Some(Coherence::Coherent) => 1,
            Some(Coherence::Software) => 2,
            Some(Coherence::HdmDb) => 3,
        };
        let second = u64::from(VERSION) | coherence << VERSION_BITS;
        [MAGIC, second, self.uuid.low(), self.uuid.high(), self.bytes, 0, 0]
    }

    pub(crate) fn division(&self, layout: &Layout) -> Words {
        let Geometry { hosts, processes, names, levels, chunk_bytes, opens, keepers } = self.geometry;
        [
            u64::from(hosts)
                | u64::from(processes) << 16
                | u64::from(levels) << 32
                | u64::from(keepers) << 48,
            u64::from(names) | u64::from(opens) << 32,
            chunk_bytes,
            layout.chunks.into(),
            layout.chunk_area.0,
            0,
            0,
        ]
    }

    /// What the words say; a coherence that is none is left out.
    pub(crate) fn decode(identity: &Words, division: &Words) -> Self {
        let half = |word: u64, at: u32| (word >> at) as u16;
        Self {
            coherence: match identity[1] >> VERSION_BITS {
                1 => Some(Coherence::Coherent),
                2 => Some(Coherence::Software),
                3 => Some(Coherence::HdmDb),
                _ => None,
            },
            uuid: Uuid(u128::from(identity[2]) | u128::from(identity[3]) << 64),
            bytes: identity[4],
            geometry: Geometry {
                hosts: half(division[0], 0),
                processes: half(division[0], 16),
                levels: half(division[0], 32),
                keepers: half(division[0], 48),
                names: division[1] as u32,
                opens: (division[1] >> 32) as u32,
                chunk_bytes: division[2],
            },
        }
    }

    /// Where everything lies.
    ///
    /// # Errors
    /// [`PoolError::Geometry`] or [`PoolError::TooSmall`] when no pool can look like this.
    pub fn layout(&self) -> Result<Layout, PoolError> {
        Layout::new(&self.geometry, self.bytes)
    }
}

/// Whether `format` may destroy a pool that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// A pool that is there stays.
    Refuse,
    /// A pool that is there is lost, and so is what its processes do with it.
    Force,
    /// Nothing is there: the region is all zeros, of which a file that was just made has not even pages.
    Zeros,
}

/// Makes a pool in the whole of `memory`. The superblock is written last: a format that is killed leaves no pool.
///
/// # Errors
/// [`PoolError::PoolExists`] when a pool is there, of any version and in any state, and `overwrite` does not say to
/// lose it; [`PoolError::Occupied`] in the same way when something else is there that would be zeroed (see
/// [`expect_vacant`]); [`PoolError::Geometry`] and [`PoolError::TooSmall`] when `geometry` does not fit.
pub fn format<M: Memory>(
    memory: &M,
    geometry: &Geometry,
    uuid: Uuid,
    overwrite: Overwrite,
) -> Result<Superblock, PoolError> {
    format_as(memory, geometry, uuid, overwrite, None)
}

/// As [`format()`], a pool that all processes keep coherent in one way.
///
/// # Errors
/// Those of [`format()`].
pub fn format_as<M: Memory>(
    memory: &M,
    geometry: &Geometry,
    uuid: Uuid,
    overwrite: Overwrite,
    coherence: Option<Coherence>,
) -> Result<Superblock, PoolError> {
    let bytes = memory.bytes() & !(LINE - 1);
    let superblock = Superblock { uuid, bytes, geometry: *geometry, coherence };
    let layout = superblock.layout()?;
    if overwrite == Overwrite::Refuse {
        expect_vacant(memory, std::iter::once(0..layout.chunk_area.0))?;
    }
    // A pool that was here ends with its first line, before anything else of it does.
    line::publish_and_fence(memory, Offset(0), &[0; line::WORDS]);
    if overwrite != Overwrite::Zeros {
        zero(memory, Offset(LINE), layout.chunk_area.0 - LINE)?;
    }
    // SYNC: the fence of the second line comes between the zeros and the first line, by which `read_superblock` goes.
    line::publish_and_fence(memory, Offset(LINE), &superblock.division(&layout));
    line::publish_and_fence(memory, Offset(0), &superblock.identity());
    Ok(superblock)
}

/// Zeros bytes. They are in memory behind the caller's next fence.
fn zero<M: Memory>(memory: &M, from: Offset, bytes: u64) -> Result<(), PoolError> {
    const PIECE: u64 = 1 << 16;
    let zeros = vec![0; PIECE.min(bytes) as usize];
    for done in (0..bytes).step_by(PIECE as usize) {
        let piece = PIECE.min(bytes - done);
        memory.copy_in(from + done, &zeros[..piece as usize])?;
        memory.write_back(from + done, piece);
    }
    Ok(())
}

/// Reads and validates the superblock.
///
/// # Errors
/// [`PoolError::NotAPool`], [`PoolError::Version`], [`PoolError::Corrupt`] when any bit of the page is wrong, and
/// [`PoolError::TooSmall`] when the region is shorter than the pool in it.
pub fn read_superblock<M: Memory>(memory: &M) -> Result<Superblock, PoolError> {
    if memory.bytes() < SUPERBLOCK_BYTES {
        return Err(PoolError::TooSmall { bytes: memory.bytes(), need: SUPERBLOCK_BYTES });
    }
    let identity = read_identity(memory)?;
    let mut division = [0; line::WORDS];
    for index in 1..SUPERBLOCK_LINES {
        let words = read_settled(memory, Offset(0).lines(index), "superblock", Duration::ZERO)?;
        match index {
            1 => division = words,
            _ if words != [0; line::WORDS] => return Err(corrupt(Offset(0).lines(index))),
            _ => {}
        }
    }
    let superblock = Superblock::decode(&identity, &division);
    if memory.bytes() < superblock.bytes {
        return Err(PoolError::TooSmall { bytes: memory.bytes(), need: superblock.bytes });
    }
    let layout = superblock.layout().map_err(|_| corrupt(Offset(LINE)))?;
    match superblock.identity() == identity && superblock.division(&layout) == division {
        true => Ok(superblock),
        false => Err(corrupt(Offset(LINE))),
    }
}

fn read_identity<M: Memory>(memory: &M) -> Result<Words, PoolError> {
    let Ok(identity) = read_settled(memory, Offset(0), "superblock", FORMATTING) else {
        return Err(name_damage(memory)?);
    };
    match (identity[0], identity[1]) {
        (MAGIC, version) if version as u32 == VERSION => Ok(identity),
        (MAGIC, version) => Err(PoolError::Version { found: version as u32, supported: VERSION }),
        (found, _) => Err(PoolError::NotAPool { found }),
    }
}

/// Tells a damaged first line from one that was never a pool's: all but a few bits of one must be right.
fn name_damage<M: Memory>(memory: &M) -> Result<PoolError, PoolError> {
    let mut words: Words = [0; line::WORDS];
    for (index, word) in (0..).zip(&mut words) {
        *word = memory.load(Offset(0).word(index))?;
    }
    let sum = memory.load(Offset(0).word(7))?;
    let found = std::mem::replace(&mut words[0], MAGIC);
    match found == MAGIC || sum == line::checksum(&words) {
        true => Ok(corrupt(Offset(0))),
        false => Ok(PoolError::NotAPool { found }),
    }
}

fn corrupt(offset: Offset) -> PoolError {
    PoolError::Corrupt { offset, what: "superblock" }
}

/// How long a writer may be in the middle of a line before the line counts as damaged: as long as a busy CPU may keep
/// it from going on.
pub(crate) const SETTLE: Duration = Duration::from_millis(100);

/// Reads the line at `at`, looking again for as long as `patience` while a writer is in the middle of it.
///
/// # Errors
/// [`PoolError::Corrupt`] when it stays torn: its writer died in the middle, or it is damaged.
pub(crate) fn read_settled<M: Memory>(
    memory: &M,
    at: Offset,
    what: &'static str,
    patience: Duration,
) -> Result<Words, PoolError> {
    if let Some(words) = line::read(memory, at)? {
        return Ok(words);
    }
    let deadline = memory.now() + patience;
    loop {
        memory.yield_now();
        // Who was stopped beyond its deadline looks once more.
        let is_late = memory.now() >= deadline;
        if let Some(words) = line::read(memory, at)? {
            return Ok(words);
        }
        if is_late {
            return Err(PoolError::Corrupt { offset: at, what });
        }
    }
}

/// Where everything in a pool lies: arithmetic on a checked geometry. An index outside it is the caller's mistake
/// and panics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    geometry: Geometry,
    bytes: u64,
    chunks: u32,
    buckets: Vec<u32>,
    slots: u32,
    keeper_area: Offset,
    claim_area: Offset,
    host_area: Offset,
    shard_area: Offset,
    shard_bytes: u64,
    burials: u64,
    announcements: u64,
    chunk_words: u64,
    directory: u64,
    chunk_area: Offset,
}

impl Layout {
    /// Divides a region of `bytes`: metadata first, and as many chunks as fit behind it.
    ///
    /// # Errors
    /// [`PoolError::Geometry`] when a parameter is out of its range, [`PoolError::TooSmall`] when not even one chunk
    /// fits.
    pub fn new(geometry: &Geometry, bytes: u64) -> Result<Self, PoolError> {
        geometry.validate()?;
        let chunk_bytes = geometry.chunk_bytes;
        let least = Self::with_chunks(geometry, bytes, 1);
        let need = least.end();
        if need > bytes {
            return Err(PoolError::TooSmall { bytes, need });
        }
        let most = (bytes - least.chunk_area.0) / chunk_bytes;
        if most > MAX_CHUNKS {
            return Err(PoolError::Geometry {
                what: "the size of a chunk in a region this large",
                value: chunk_bytes,
                low: (bytes / MAX_CHUNKS).next_power_of_two(),
                high: MAX_CHUNK_BYTES,
            });
        }
        // More chunks need more claim words, which push the chunks up: the largest count that still fits.
        let fits = |chunks: u64| Self::with_chunks(geometry, bytes, chunks as u32).end() <= bytes;
        let (mut low, mut high) = (1, most);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        Ok(Self::with_chunks(geometry, bytes, low as u32))
    }

    fn with_chunks(geometry: &Geometry, bytes: u64, chunks: u32) -> Self {
        let (hosts, processes) = (u64::from(geometry.hosts), u64::from(geometry.processes));
        let buckets: Vec<u32> = primes_down(geometry.names).take(geometry.levels.into()).collect();
        let slots = buckets.iter().sum();
        let keeper_area = Offset(SUPERBLOCK_BYTES);
        let claim_area = keeper_area.lines(u64::from(geometry.keepers) * (KEEPER_LINES + hosts));
        let host_area = claim_area.lines(hosts);
        let shard_area = host_area.lines(hosts);
        let burials = (2 * processes + SHARD_LINES) * LINE;
        let announcements = burials + words_in_lines(burial_words(slots));
        let chunk_words = announcements + processes * (LINE + words_in_lines(geometry.opens));
        let directory = chunk_words + words_in_lines(chunks.div_ceil(CHUNKS_PER_WORD));
        let shard_bytes = directory + u64::from(slots) * LINE;
        let metadata = shard_area.0 + hosts * shard_bytes;
        let chunk_area = Offset(metadata.next_multiple_of(geometry.chunk_bytes.min(HUGE_PAGE)));
        Self {
            geometry: *geometry,
            bytes,
            chunks,
            buckets,
            slots,
            keeper_area,
            claim_area,
            host_area,
            shard_area,
            shard_bytes,
            burials,
            announcements,
            chunk_words,
            directory,
            chunk_area,
        }
    }

    fn end(&self) -> u64 {
        self.chunk_area.0 + u64::from(self.chunks) * self.geometry.chunk_bytes
    }

    /// The geometry that this follows from.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The bytes of the region that the pool uses.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Slots of each directory level in one shard: distinct primes.
    #[must_use]
    pub fn buckets(&self) -> &[u32] {
        &self.buckets
    }

    /// Directory slots of one shard, all levels together.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Chunks in the pool.
    #[must_use]
    pub const fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Chunk-claim words of one shard.
    #[must_use]
    pub const fn chunk_words(&self) -> u32 {
        self.chunks.div_ceil(CHUNKS_PER_WORD)
    }

    /// The line that says which process keeper incarnation `keeper` (from 1) is.
    #[must_use]
    pub fn keeper_owner_line(&self, keeper: u16) -> Offset {
        self.keeper_block(keeper).lines(3)
    }

    /// Line `half` (0 or 1) of the view that keeper incarnation `keeper` (from 1) writes.
    #[must_use]
    pub fn view_line(&self, keeper: u16, half: u16) -> Offset {
        assert!(half < 2, "a view has two lines, not {half}");
        self.keeper_block(keeper).lines(half.into())
    }

    /// The heartbeat line of keeper incarnation `keeper` (from 1).
    #[must_use]
    pub fn keeper_heartbeat_line(&self, keeper: u16) -> Offset {
        self.keeper_block(keeper).lines(2)
    }

    /// The line on which keeper incarnation `keeper` (from 1) says who holds the id `host`.
    #[must_use]
    pub fn grant_line(&self, keeper: u16, host: u16) -> Offset {
        self.keeper_block(keeper).lines(KEEPER_LINES + self.host(host))
    }

    fn keeper_block(&self, keeper: u16) -> Offset {
        assert!(keeper > 0, "keeper incarnations count from 1");
        let place = u64::from((keeper - 1) % self.geometry.keepers);
        self.keeper_area.lines(place * (KEEPER_LINES + u64::from(self.geometry.hosts)))
    }

    /// The line on which a claimant of the id `host` writes its nonce.
    #[must_use]
    pub fn claim_line(&self, host: u16) -> Offset {
        self.claim_area.lines(self.host(host))
    }

    /// The line on which `host` says which incarnation it is.
    #[must_use]
    pub fn host_line(&self, host: u16) -> Offset {
        self.host_area.lines(self.host(host))
    }

    /// The first byte of the shard of `host`, and the bytes of it.
    #[must_use]
    pub fn shard(&self, host: u16) -> (Offset, u64) {
        (self.shard_area + self.host(host) * self.shard_bytes, self.shard_bytes)
    }

    /// The line of the process at `slot` of `host`.
    #[must_use]
    pub fn process_line(&self, host: u16, slot: ProcessSlot) -> Offset {
        self.shard(host).0.lines(self.process(slot))
    }

    /// The heartbeat line of the process at `slot` of `host`.
    #[must_use]
    pub fn heartbeat_line(&self, host: u16, slot: ProcessSlot) -> Offset {
        self.shard(host).0.lines(u64::from(self.geometry.processes) + self.process(slot))
    }

    /// The heartbeat lines of all processes of `host`.
    pub(crate) fn heartbeat_lines(&self, host: u16) -> impl Iterator<Item = Offset> + Clone + use<> {
        let first = self.heartbeat_line(host, ProcessSlot(0));
        (0..u64::from(self.geometry.processes)).map(move |slot| first.lines(slot))
    }

    /// The `index`-th announcement word of the process at `slot` of `host`; the words of a process share no line with
    /// another's.
    #[must_use]
    pub fn announcement(&self, host: u16, slot: ProcessSlot, index: u32) -> Offset {
        let opens = self.geometry.opens;
        assert!(index < opens, "announcement {index} is not below {opens}");
        (self.open_mark(host, slot) + LINE).word(index.into())
    }

    /// The word that says how many lines of announcements the process at `slot` of `host` ever used.
    #[must_use]
    pub fn open_mark(&self, host: u16, slot: ProcessSlot) -> Offset {
        let block = self.process(slot) * (LINE + words_in_lines(self.geometry.opens));
        self.shard(host).0 + self.announcements + block
    }

    /// The line that says below which number all generations of `host` were.
    #[must_use]
    pub fn generation_line(&self, host: u16) -> Offset {
        self.shard(host).0.lines(2 * u64::from(self.geometry.processes))
    }

    /// How many burials a host can list.
    #[must_use]
    pub const fn burials(&self) -> u32 {
        burial_words(self.slots) - 1
    }

    /// The word that says how many burials `host` lists; they stand in the words behind it.
    #[must_use]
    pub fn burial_count(&self, host: u16) -> Offset {
        self.shard(host).0 + self.burials
    }

    /// The `index`-th chunk-claim word of `host`: the states of chunks from `index * CHUNKS_PER_WORD` on.
    #[must_use]
    pub fn chunk_word(&self, host: u16, index: u32) -> Offset {
        assert!(index < self.chunk_words(), "chunk word {index} is not below {}", self.chunk_words());
        (self.shard(host).0 + self.chunk_words).word(index.into())
    }

    /// The line of directory slot `slot` of `host`, counted over all levels.
    #[must_use]
    pub fn entry(&self, host: u16, slot: u32) -> Offset {
        assert!(slot < self.slots, "directory slot {slot} is not below {}", self.slots);
        (self.shard(host).0 + self.directory).lines(slot.into())
    }

    /// The doorbell of the process at `slot` of `host`.
    #[must_use]
    pub fn bell(&self, host: u16, slot: ProcessSlot) -> Bell {
        Bell(u32::from(host) * u32::from(self.geometry.processes) + self.process(slot) as u32)
    }

    /// The directory slots, one a level, where a name of this hash may stand; the same in every shard.
    pub fn candidates(&self, hash: u128) -> impl Iterator<Item = u32> + '_ {
        let mut first = 0;
        self.buckets.iter().map(move |&buckets| {
            let slot = first + (hash as u64 % u64::from(buckets)) as u32;
            first += buckets;
            slot
        })
    }

    /// The first byte of chunk `index`.
    #[must_use]
    pub fn chunk(&self, index: u32) -> Offset {
        assert!(index < self.chunks, "chunk {index} is not below {}", self.chunks);
        self.chunk_area + u64::from(index) * self.geometry.chunk_bytes
    }

    /// The first byte of the first chunk: everything below is metadata.
    #[must_use]
    pub const fn chunk_area(&self) -> Offset {
        self.chunk_area
    }

    fn host(&self, host: u16) -> u64 {
        assert!(host < self.geometry.hosts, "host {host} is not below {}", self.geometry.hosts);
        host.into()
    }

    fn process(&self, ProcessSlot(slot): ProcessSlot) -> u64 {
        assert!(slot < self.geometry.processes, "slot {slot} is not below {}", self.geometry.processes);
        slot.into()
    }
}

/// The words that list burials, with their count: whole lines.
const fn burial_words(slots: u32) -> u32 {
    let words = (slots + 1).next_multiple_of((LINE / 8) as u32);
    if words < MAX_BURIAL_WORDS { words } else { MAX_BURIAL_WORDS }
}

fn words_in_lines(words: u32) -> u64 {
    (u64::from(words) * 8).next_multiple_of(LINE)
}

fn primes_up() -> impl Iterator<Item = u32> {
    (2..).filter(|&number| is_prime(number))
}

fn primes_down(limit: u32) -> impl Iterator<Item = u32> {
    (2..=limit).rev().filter(|&number| is_prime(number))
}

fn is_prime(number: u32) -> bool {
    number >= 2
        && (2..)
            .take_while(|divisor| divisor * divisor <= number)
            .all(|divisor| !number.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use polder_mem::model::{Crash, Shape, World, explore};
    use polder_mem::{Heap, HeapShape};

    use super::*;

    const TINY: Geometry =
        Geometry { hosts: 2, processes: 2, names: 5, levels: 2, chunk_bytes: 256, opens: 3, keepers: 2 };

    #[test]
    fn a_directory_of_the_papers_size_has_its_number_of_slots() {
        let geometry = Geometry { names: Geometry::PAPER_NAMES, levels: 10, ..Geometry::for_region(1 << 40) };
        let layout = Layout::new(&geometry, 1 << 40).unwrap();
        assert_eq!(layout.slots(), 1_999_260);
        assert_eq!((layout.buckets()[0], layout.buckets()[9]), (199_999, 199_873));
    }

    #[test]
    fn default_geometries_leave_most_of_a_region_for_data() {
        for shift in 20..=44 {
            let bytes = 1_u64 << shift;
            let layout = Layout::new(&Geometry::for_region(bytes), bytes).unwrap();
            let data = u64::from(layout.chunks()) * layout.geometry().chunk_bytes;
            let least = if shift < 24 { bytes / 3 } else { bytes / 10 * 9 };
            assert!(data >= least, "2^{shift}: {data} bytes of data in {} chunks", layout.chunks());
            assert!(layout.end() <= bytes);
        }
    }

    #[test]
    fn one_more_chunk_would_not_fit() {
        for bytes in (6000..40_000).step_by(64) {
            let Ok(layout) = Layout::new(&TINY, bytes) else { continue };
            assert!(layout.end() <= bytes);
            assert!(Layout::with_chunks(&TINY, bytes, layout.chunks() + 1).end() > bytes, "{bytes}");
        }
    }

    #[test]
    fn lines_of_two_writers_never_overlap() {
        let layout = Layout::new(&TINY, 32 << 10).unwrap();
        let slots = [ProcessSlot(0), ProcessSlot(1)];
        let mut lines = vec![];
        for keeper in 1..=2 {
            lines.extend([0, 1].map(|half| layout.view_line(keeper, half)));
            lines.extend([layout.keeper_heartbeat_line(keeper), layout.keeper_owner_line(keeper)]);
            lines.extend([0, 1].map(|host| layout.grant_line(keeper, host)));
        }
        for host in 0..2 {
            lines.extend([layout.claim_line(host), layout.host_line(host)]);
            lines.extend(slots.map(|slot| layout.process_line(host, slot)));
            lines.extend(slots.map(|slot| layout.heartbeat_line(host, slot)));
            lines.extend([layout.generation_line(host), layout.burial_count(host)]);
            lines.extend(slots.map(|slot| layout.open_mark(host, slot)));
            lines.extend(slots.map(|slot| layout.announcement(host, slot, 0)));
            lines.push(layout.chunk_word(host, 0));
            lines.extend((0..layout.slots()).map(|slot| layout.entry(host, slot)));
        }
        lines.push(layout.chunk(0));
        let count = lines.len();
        assert!(lines.iter().all(|at| at.0.is_multiple_of(LINE) && at.0 >= SUPERBLOCK_BYTES));
        lines.sort();
        lines.dedup();
        assert_eq!(lines.len(), count);
        assert_eq!(lines.last(), Some(&layout.chunk(0)));
    }

    #[test]
    fn candidates_are_one_slot_of_each_level() {
        let layout = Layout::new(&TINY, 32 << 10).unwrap();
        assert_eq!(layout.buckets(), [5, 3]);
        assert_eq!(layout.candidates(7).collect::<Vec<_>>(), [2, 5 + 1]);
    }

    #[test]
    fn a_geometry_out_of_range_names_the_parameter() {
        let refused = |geometry: Geometry| Layout::new(&geometry, 1 << 20).unwrap_err().to_string();
        assert_eq!(refused(Geometry { hosts: 65, ..TINY }), "the number of hosts is 65, allowed are 1 to 64");
        let processes = refused(Geometry { processes: 513, ..TINY });
        assert_eq!(processes, "the number of processes of a host is 513, allowed are 1 to 512");
        assert!(refused(Geometry { names: 28, levels: 10, ..TINY }).contains("allowed are 29 to"));
        assert!(refused(Geometry { chunk_bytes: 192, ..TINY }).contains("power of two"));
        assert!(matches!(Layout::new(&TINY, 5000), Err(PoolError::TooSmall { bytes: 5000, .. })));
    }

    fn heap(bytes: u64) -> Heap {
        Heap::new(HeapShape { bytes, hosts: 1, processes: 1, local_words: 0, bells: 0 })
    }

    #[test]
    fn every_flipped_bit_of_the_superblock_is_noticed() {
        let heap = heap(32 << 10);
        let made = format(&heap, &TINY, Uuid(9), Overwrite::Refuse).unwrap();
        for bit in 0..SUPERBLOCK_BYTES * 8 {
            let at = Offset(0).word(bit / 64);
            let word = heap.load(at).unwrap();
            heap.store(at, word ^ 1 << (bit % 64));
            let found = read_superblock(&heap);
            heap.store(at, word);
            let offset = at.line();
            assert_eq!(found, Err(PoolError::Corrupt { offset, what: "superblock" }), "bit {bit}");
        }
        assert_eq!(read_superblock(&heap), Ok(made));
    }

    #[test]
    fn a_region_without_a_pool_or_with_another_versions_says_so() {
        let heap = heap(32 << 10);
        assert_eq!(read_superblock(&heap), Err(PoolError::NotAPool { found: 0 }));
        heap.store(Offset(0), 0x7f45_4c46);
        assert_eq!(read_superblock(&heap), Err(PoolError::NotAPool { found: 0x7f45_4c46 }));
        line::publish(&heap, Offset(0), &[MAGIC, 1, 0, 0, 0, 0, 0]);
        assert_eq!(read_superblock(&heap), Err(PoolError::Version { found: 1, supported: VERSION }));
        let short = self::heap(2048);
        assert_eq!(read_superblock(&short), Err(PoolError::TooSmall { bytes: 2048, need: 4096 }));
    }

    #[test]
    fn a_region_that_was_cut_short_says_how_large_it_was() {
        let (whole, cut) = (heap(32 << 10), heap(16 << 10));
        format(&whole, &TINY, Uuid(9), Overwrite::Refuse).unwrap();
        for index in 0..SUPERBLOCK_BYTES / 8 {
            cut.store(Offset(0).word(index), whole.load(Offset(0).word(index)).unwrap());
        }
        assert_eq!(read_superblock(&cut), Err(PoolError::TooSmall { bytes: 16 << 10, need: 32 << 10 }));
    }

    #[test]
    fn a_pool_that_is_there_is_lost_only_by_force() {
        let heap = heap(32 << 10);
        format(&heap, &TINY, Uuid(9), Overwrite::Refuse).unwrap();
        let refused = format(&heap, &TINY, Uuid(10), Overwrite::Refuse).unwrap_err();
        assert!(refused.to_string().contains("00009; attach to it"), "{refused}");
        heap.store(Offset(8), 0);
        let refused = format(&heap, &TINY, Uuid(10), Overwrite::Refuse).unwrap_err();
        assert!(matches!(refused, PoolError::PoolExists { .. }), "a damaged pool is a pool: {refused}");
        let layout = Layout::new(&TINY, 32 << 10).unwrap();
        heap.store(layout.entry(1, 0), 7);
        assert_eq!(format(&heap, &TINY, Uuid(10), Overwrite::Force).unwrap().uuid, Uuid(10));
        assert_eq!(heap.load(layout.entry(1, 0)), Ok(0));
    }

    #[test]
    fn what_is_no_pool_is_lost_only_by_force() {
        let heap = heap(32 << 10);
        heap.store(Offset(0), 0x0504_4b50);
        let refused = format(&heap, &TINY, Uuid(9), Overwrite::Refuse).unwrap_err();
        assert!(
            refused.to_string().ends_with("lose what is there with `polder pool format --force`"),
            "{refused}"
        );
        assert_eq!(heap.load(Offset(0)), Ok(0x0504_4b50));
        assert_eq!(format(&heap, &TINY, Uuid(9), Overwrite::Force).unwrap().uuid, Uuid(9));
    }

    #[test]
    fn a_format_that_is_killed_leaves_the_old_pool_or_none() {
        let layout = Layout::new(&TINY, 16 << 10).unwrap();
        let killed = |seed: u64| {
            let mut world = World::new(seed, Shape { hosts: 1, bytes: 16 << 10, ..Shape::default() });
            let old = world.setup(|memory| format(&memory, &TINY, Uuid(9), Overwrite::Refuse)).unwrap();
            let entry = layout.entry(0, 0);
            world.setup(|memory| memory.store(entry, 7));
            let formatter = world.spawn(0, 0, |memory| {
                format(&memory, &TINY, Uuid(10), Overwrite::Force).unwrap();
            });
            let crash = if seed.is_multiple_of(2) { Crash::Process } else { Crash::Host };
            world.crash_within(formatter, crash, 40);
            world.check(0, move |memory| match read_superblock(&memory) {
                Ok(found) if found == old => assert_eq!(memory.load(entry), Ok(7), "half of the old pool"),
                Ok(_) => assert_eq!(memory.load(entry), Ok(0), "a new pool with an old entry"),
                Err(PoolError::NotAPool { .. } | PoolError::Corrupt { .. }) => {}
                Err(error) => panic!("{error}"),
            });
            world.run()
        };
        explore("a format that is killed", 2000, 0, killed).expect_none();
    }

    #[test]
    fn the_superblock_comes_back_from_its_words() {
        for coherence in [None].into_iter().chain(Coherence::ALL.map(Some)) {
            let superblock =
                Superblock { uuid: Uuid(7 << 70 | 5), bytes: 32 << 10, geometry: TINY, coherence };
            let layout = superblock.layout().unwrap();
            assert_eq!(Superblock::decode(&superblock.identity(), &superblock.division(&layout)), superblock);
        }
    }

    #[test]
    fn the_coherence_of_a_pool_stands_in_byte_12_and_one_that_is_none_is_damage() {
        let heap = heap(32 << 10);
        let kinds = [None, Some(Coherence::Coherent), Some(Coherence::Software), Some(Coherence::HdmDb)];
        for (value, coherence) in (0..).zip(kinds) {
            format_as(&heap, &TINY, Uuid(9), Overwrite::Force, coherence).unwrap();
            let mut four = [0; 4];
            heap.copy_out(Offset(12), &mut four).unwrap();
            assert_eq!(u32::from_le_bytes(four), value);
            assert_eq!(read_superblock(&heap).unwrap().coherence, coherence);
        }
        let mut identity = read_identity(&heap).unwrap();
        identity[1] += 1 << VERSION_BITS;
        line::publish(&heap, Offset(0), &identity);
        assert!(matches!(read_superblock(&heap), Err(PoolError::Corrupt { what: "superblock", .. })));
    }
}
