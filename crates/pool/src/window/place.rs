//! Where the parts of a window lie.
//!
//! Rank `RANK` of the window `NAME` of job `JOB` owns the object `/window/JOB/NAME/RANK`, its segment. Only the process of
//! that rank writes the lines before the data. Any rank puts into the data. A word of it has one writer at a time, as MPI's
//! rules demand.
//!
//! # Object of a segment
//! | line | what |
//! |---|---|
//! | 0 | identity |
//! | 1 | spare, 0 |
//! | from 2 on | for each rank, two a line, the words by which this segment's process deals with it |
//! | then | the data, filled up to a whole line |
//!
//! # Own words of the identity of a segment
//! | word | what |
//! |---|---|
//! | 4 | bits 0..32 how many ranks there are, bits 32..64 the rank |
//! | 5 | bytes of data |
//! | 6 | spare, 0 |
//!
//! # Words for another rank
//! | word | what |
//! |---|---|
//! | 0 | the ticket for the window lock of that rank |
//! | 1 | the ticket for the update lock of that rank |
//! | 2 | how often this window was posted for that rank |
//! | 3 | how many accesses to the window of that rank were completed |
//!
//! A ticket is a checked word, 0 if there is none. Bit 0 is 1. Bit 1 is 1 if no other rank may hold the lock at the same
//! time. Bits 2..56 are the number, 0 while it is being chosen.

use polder_mem::{LINE, Memory, Offset};

use crate::line;
use crate::membership::Process;
use crate::object::Object;
use crate::owned::{Identity, Kind};
use crate::{Pool, PoolError};

/// Lines before the words for the ranks.
const HEAD: u64 = 2;
/// Words for a rank.
const WORDS: u64 = 4;

/// A word by which a process deals with another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    WindowLock,
    UpdateLock,
    Posts,
    Completions,
}

/// One rank's part of a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// Whose it is.
    pub(super) process: Process,
    /// Where the words for the ranks begin.
    words: Offset,
    /// Where the data begins: a multiple of 64.
    pub(super) at: Offset,
    /// Bytes of the data.
    pub(super) bytes: u64,
    /// Whether its process is known never to go on.
    pub(super) gone: bool,
}

/// The name of the segment of a rank. A window's own name may leave its first / out.
pub(super) fn segment_name(job: u64, window: &str, rank: u32) -> String {
    format!("/window/{job}/{}/{rank}", window.strip_prefix('/').unwrap_or(window))
}

/// Bytes of the object of a segment; `None` when there are not so many.
pub(super) fn object_bytes(ranks: u32, bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(LINE)?.checked_add(head_bytes(ranks))
}

/// Bytes before the data.
fn head_bytes(ranks: u32) -> u64 {
    (HEAD * LINE + u64::from(ranks) * WORDS * 8).next_multiple_of(LINE)
}

/// The own words of the identity of a segment.
pub(super) fn own_words(rank: u32, ranks: u32, bytes: u64) -> [u64; 3] {
    [u64::from(ranks) | u64::from(rank) << 32, bytes, 0]
}

impl Segment {
    /// The segment of `process` in an object that starts at `start`.
    pub(super) fn new(process: Process, start: Offset, ranks: u32, bytes: u64) -> Self {
        let (words, at) = (start.lines(HEAD), start + head_bytes(ranks));
        Self { process, words, at, bytes, gone: false }
    }

    /// The segment of `rank` in `object`.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when it is not what that rank makes.
    pub(super) fn find<M: Memory>(
        pool: &Pool<M>,
        object: &Object,
        rank: u32,
        ranks: u32,
    ) -> Result<Self, PoolError> {
        let corrupt = PoolError::Corrupt { offset: object.at(), what: "segment of a window" };
        let words = line::read(pool.memory(), object.at())?;
        let Some(Identity { process, own, .. }) =
            words.and_then(|words| Identity::decode(&words, Kind::Segment))
        else {
            return Err(corrupt);
        };
        let bytes = own[1];
        let geometry = pool.layout().geometry();
        let is_right = own == own_words(rank, ranks, bytes)
            && object_bytes(ranks, bytes) == Some(object.bytes())
            && process.host < geometry.hosts
            && process.slot.0 < geometry.processes;
        is_right.then(|| Self::new(process, object.at(), ranks, bytes)).ok_or(corrupt)
    }

    /// Where its process writes how it deals with `rank`.
    pub(super) fn word(&self, word: Word, rank: u32) -> Offset {
        self.words.word(u64::from(rank) * WORDS + word as u64)
    }
}
