//! The progress line: how far a rank has come, in which operation, and which rank it waits for.
//!
//! # Words of a progress line
//! | word | what |
//! |---|---|
//! | 0 | bits 0..24 step, bits 24..64 number of the operation, from 1; only grows |
//! | 1 | signature of this operation |
//! | 2 | signature of the operation before |
//! | 3 | bits 0..32 a rank; bits 32..40 0 nothing, 1 it is waited for, 2 it died, 3 it is late, 4 it called something else, 5 this rank met an error, 6 this rank left; bits 40..64 while it waits, a count of its looks. 7 and 8 are 5 and 6 of a rank that met a death in another group: bits 0..32 the process id of the dead, bits 40..56 its host |
//! | 4 | word 0 that is waited for |
//! | 5, 6 | the operation's own: where data lives in the pool, 5 is the offset of this rank's |

use std::cell::Cell;

use polder_mem::{Fault, LINE, Memory, Nanos, Offset};

use super::Signature;
use crate::Peer;
use crate::line::{self, Words};

/// Lines before the staging: one of the identity, two of which the second stays empty so that no prefetcher of line
/// pairs touches the next, and the progress line with its neighbour.
pub const LINES: u64 = 4;

const STEP_BITS: u32 = 24;

/// The steps that one operation may take.
pub(crate) const MAX_STEP: u32 = (1 << STEP_BITS) - 1;

/// Words of the line that an operation may use for itself.
pub(crate) type Own = [u64; 2];

/// Where the progress line of an extent lies.
pub(crate) fn line_at(extent: Offset) -> Offset {
    extent.lines(2)
}

/// Where the staging of an extent begins.
#[must_use]
pub fn staging_at(extent: Offset) -> Offset {
    extent.lines(LINES)
}

/// The progress of a rank that has come to `step` of operation `sequence`.
pub(crate) fn at(sequence: u64, step: u32) -> u64 {
    sequence << STEP_BITS | u64::from(step)
}

/// Drops the progress line of a rank of another host from our caches.
pub(crate) fn forget<M: Memory>(memory: &M, extent: Offset) {
    memory.invalidate(line_at(extent), LINE);
}

/// What this rank says of itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    words: Words,
}

impl Progress {
    /// Enters operation `sequence`; nothing is published yet.
    pub(crate) fn enter(&mut self, sequence: u64, signature: Signature) {
        self.words = [at(sequence, 0), signature.word(), self.words[1], 0, 0, 0, 0];
    }

    pub(crate) fn advance(&mut self, sequence: u64, step: u32) {
        debug_assert!(step <= MAX_STEP && at(sequence, step) >= self.words[0], "progress only grows");
        self.words[0] = at(sequence, step);
        (self.words[3], self.words[4]) = (0, 0);
    }

    pub(crate) fn mark(&self) -> u64 {
        self.words[0]
    }

    pub(crate) fn set_own(&mut self, own: Own) {
        [self.words[5], self.words[6]] = own;
    }

    /// Says that this rank waits, and by a count that it still looks.
    pub(crate) fn wait_for(&mut self, rank: usize, want: u64, looks: u64) {
        (self.words[3], self.words[4]) = (Mark::new(Mark::WAITS, rank).0 | looks << Mark::COUNT, want);
    }

    pub(crate) fn give_up(&mut self, mark: Mark) {
        (self.words[3], self.words[4]) = (mark.0, 0);
    }

    /// Publishes the line of the extent at `extent`; without flushes when every reader shares our caches.
    pub(crate) fn publish<M: Memory>(&self, memory: &M, extent: Offset, local: bool) {
        if local {
            line::store(memory, line_at(extent), &self.words);
        } else {
            line::publish(memory, line_at(extent), &self.words);
        }
    }
}

/// What a rank says besides its progress: a rank or a process id (32 bits), a kind (8) and a count or a host (24).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark(u64);

impl Mark {
    const WAITS: u64 = 1;
    const DEAD: u64 = 2;
    const LATE: u64 = 3;
    const MISMATCH: u64 = 4;
    const OWN: u64 = 5;
    const LEFT: u64 = 6;
    const OWN_AFTER_DEATH: u64 = 7;
    const LEFT_AFTER_DEATH: u64 = 8;
    /// Where the count begins, or the host.
    const COUNT: u32 = 40;

    fn new(kind: u64, rank: usize) -> Self {
        Self(kind << 32 | rank as u64)
    }

    pub(crate) fn dead(rank: usize) -> Self {
        Self::new(Self::DEAD, rank)
    }

    pub(crate) fn late(rank: usize) -> Self {
        Self::new(Self::LATE, rank)
    }

    pub(crate) fn mismatch(rank: usize) -> Self {
        Self::new(Self::MISMATCH, rank)
    }

    /// The rank itself met an error.
    pub(crate) fn own(rank: usize) -> Self {
        Self::new(Self::OWN, rank)
    }

    /// The rank has done all it came for. This is an error only for a rank that still expects more of it.
    pub(crate) fn left(rank: usize) -> Self {
        Self::new(Self::LEFT, rank)
    }

    /// As `own`, of a rank that has met the death of a process, which may be of another group.
    pub(crate) fn own_after_death(dead: Peer) -> Self {
        Self::of_process(Self::OWN_AFTER_DEATH, dead)
    }

    /// As `left`, of such a rank.
    pub(crate) fn left_after_death(dead: Peer) -> Self {
        Self::of_process(Self::LEFT_AFTER_DEATH, dead)
    }

    fn of_process(kind: u64, Peer { host, pid, .. }: Peer) -> Self {
        Self(u64::from(host) << Self::COUNT | kind << 32 | u64::from(pid))
    }

    pub(crate) fn is_left(self) -> bool {
        matches!(self.kind(), Self::LEFT | Self::LEFT_AFTER_DEATH)
    }

    /// The process whose death the writer met before it ended here.
    pub(crate) fn death_met_by_writer(self) -> Option<Peer> {
        let is_after = matches!(self.kind(), Self::OWN_AFTER_DEATH | Self::LEFT_AFTER_DEATH);
        is_after.then(|| Peer::new((self.0 >> Self::COUNT & 0xffff) as u16, self.rank() as u32))
    }

    fn kind(self) -> u64 {
        self.0 >> 32 & 0xff
    }

    /// The word that says it.
    pub(crate) const fn word(self) -> u64 {
        self.0
    }

    /// What a word says of the end of its writer; nothing while that goes on.
    pub(crate) fn parse(word: u64) -> Option<Self> {
        let mark = Self(word);
        (mark.kind() >= Self::DEAD).then_some(mark)
    }

    /// The rank that it names: written by a peer, so it may be none of this group.
    pub(crate) fn rank(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    pub(crate) fn is_dead(self) -> bool {
        self.kind() == Self::DEAD
    }

    pub(crate) fn is_late(self) -> bool {
        self.kind() == Self::LATE
    }

    pub(crate) fn is_mismatch(self) -> bool {
        self.kind() == Self::MISMATCH
    }
}

/// What we last saw of a peer.
#[derive(Debug, Default)]
pub(crate) struct PeerProgress {
    words: Cell<Words>,
    /// Since when looks have met a line that was not whole.
    torn: Cell<Option<Nanos>>,
    /// When its line last changed while it waited.
    looked: Cell<Nanos>,
}

impl PeerProgress {
    /// The furthest progress that was seen.
    pub(crate) fn mark(&self) -> u64 {
        self.words.get()[0]
    }

    /// The operation that it was last seen in.
    pub(crate) fn sequence(&self) -> u64 {
        self.mark() >> STEP_BITS
    }

    /// Takes over the line of the extent at `extent` when it is whole and new; says whether it was.
    pub(crate) fn refresh<M: Memory>(&self, memory: &M, extent: Offset) -> Result<bool, Fault> {
        let known = self.words.get();
        let at = line_at(extent);
        if memory.load(at)? == known[0] && memory.load(at.word(3))? == known[3] {
            return Ok(false);
        }
        let whole = line::load(memory, at)?;
        let torn = whole.is_none().then(|| self.torn.get().unwrap_or_else(|| memory.now()));
        self.torn.set(torn);
        // Progress only grows: a line that says less is older, or not a correct rank's.
        let Some(words) = whole.filter(|words| words[0] >= known[0]) else { return Ok(false) };
        self.words.set(words);
        if self.waits_for().is_some() {
            self.looked.set(memory.now());
        }
        Ok(true)
    }

    /// Since when, by our clock, its line has not been whole: its writer writes it, or was stopped when it did.
    pub(crate) fn torn(&self) -> Option<Nanos> {
        self.torn.get()
    }

    /// The peer's signature of operation `sequence`, when it is in that one or the next.
    pub(crate) fn signature_of(&self, sequence: u64) -> Option<Signature> {
        let words = self.words.get();
        match (words[0] >> STEP_BITS).checked_sub(sequence)? {
            0 => Some(Signature::parse(words[1])),
            1 => Some(Signature::parse(words[2])),
            _ => None,
        }
    }

    /// The two words that an operation publishes for itself.
    pub(crate) fn own(&self) -> Own {
        let words = self.words.get();
        [words[5], words[6]]
    }

    pub(crate) fn gave_up(&self) -> Option<Mark> {
        Mark::parse(self.words.get()[3])
    }

    /// Whom the peer waits for, and for what progress.
    pub(crate) fn waits_for(&self) -> Option<(usize, u64)> {
        let words = self.words.get();
        let mark = Mark(words[3]);
        (mark.kind() == Mark::WAITS).then_some((mark.rank(), words[4]))
    }

    /// When, by our clock, we last saw that the peer still looks at what it waits for.
    pub(crate) fn looked(&self) -> Nanos {
        self.looked.get()
    }
}

/// What a peer's heartbeat last said, and since when, by our clock.
#[derive(Debug, Default)]
pub(crate) struct Pulse(Cell<Option<(u64, Nanos)>>);

impl Pulse {
    /// Since when, by our clock, the heartbeat at `at` has stood still.
    pub(crate) fn silent_since<M: Memory>(&self, memory: &M, at: Offset) -> Result<Nanos, Fault> {
        memory.invalidate(at, LINE);
        // HARMLESS(fence_invalidations -> sfence -> drop): an older beat only makes the silence seem to begin earlier by
        // the time between two looks, which is far shorter than what is allowed.
        memory.fence_invalidations();
        let beat = memory.load(at)?;
        let since = match self.0.get() {
            Some((known, since)) if known == beat => since,
            _ => memory.now(),
        };
        self.0.set(Some((beat, since)));
        Ok(since)
    }
}
