//! Extents: how a host divides the chunks that it holds among its objects.
//!
//! Every unit of a held chunk has a bit in the host's own words. An extent is a run of units, in one chunk or through several in
//! a row. A run inside one chunk is taken next-fit. A run through several begins in the free end of a held chunk where it can, so
//! that objects of any size lie side by side.
//!
//! One lock guards all of it, and survives its holder. Before a process changes bits, it writes a log of what they are for.
//! A process that takes the lock over from a dead one clears the bits of the log. Later the intent of the directory lock
//! holds the extent, and then an entry. So at any moment every unit in use belongs to exactly one of log, intent and entry.

use std::ops::Range;

use polder_mem::{Memory, Offset};

use crate::local::LocalGuard;
use crate::site::Site;
use crate::state::{JOBS, LockName};
use crate::{PoolError, line};

const HELD: u64 = 1 << 63;
const FIELD: u64 = (1 << 31) - 1;
/// In an intent the counted job stands above the units.
const JOB_SHIFT: u32 = 40;

/// A run of units, counted from the first chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) units: u64,
}

impl Extent {
    const fn end(&self) -> u64 {
        self.start + self.units
    }
}

/// What the host knows of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Chunk {
    /// Whether this host holds it.
    pub(crate) held: bool,
    /// Units in use.
    pub(crate) used: u64,
    /// No free run is longer.
    longest: u64,
}

impl Chunk {
    const fn decode(word: u64) -> Self {
        Self { held: word & HELD != 0, used: word & FIELD, longest: word >> 31 & FIELD }
    }

    const fn encode(self) -> u64 {
        if self.held { HELD | self.used | self.longest << 31 } else { 0 }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.held && self.used == 0
    }
}

/// A job on this host and the bytes that it may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) job: u64,
    pub(crate) quota: u64,
}

/// What came of looking for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// The extent is taken, and the intent of the stripe holds it.
    Taken(Extent),
    /// No chunk that this host holds has such a run.
    None,
}

/// The chunks of this host.
pub(crate) struct Extents<'a, M>(pub(crate) Site<'a, M>);

impl<'a, M: Memory> Extents<'a, M> {
    /// Units that hold `bytes`.
    pub(crate) const fn units_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.0.words().unit_bytes())
    }

    /// Whether an extent of so many units can lie inside one chunk.
    pub(crate) const fn fits_a_chunk(&self, units: u64) -> bool {
        units <= self.0.words().chunk_units()
    }

    /// The first byte of an extent.
    pub(crate) fn offset(&self, extent: Extent) -> Offset {
        self.0.layout.chunk_area() + extent.start * self.0.words().unit_bytes()
    }

    /// Writes back what this host's caches hold of an extent.
    #[track_caller]
    pub(crate) fn write_back(&self, extent: Extent) {
        self.0.memory.write_back(self.offset(extent), extent.units * self.0.words().unit_bytes());
    }

    /// The extent of `bytes` at `at`, or `None` when no extent could lie there.
    pub(crate) fn at(&self, at: Offset, bytes: u64) -> Option<Extent> {
        let words = self.0.words();
        let below = at.0.checked_sub(self.0.layout.chunk_area().0)?;
        let extent = Extent { start: below / words.unit_bytes(), units: bytes.div_ceil(words.unit_bytes()) };
        let units = u64::from(self.0.layout.chunks()) * words.chunk_units();
        let fits = extent.units > 0 && extent.units <= units && extent.start <= units - extent.units;
        (fits && below.is_multiple_of(words.unit_bytes())).then_some(extent)
    }

    /// The chunks that an extent touches.
    pub(crate) fn chunks(&self, extent: Extent) -> Range<u32> {
        let units = self.0.words().chunk_units();
        (extent.start / units) as u32..extent.end().div_ceil(units) as u32
    }

    pub(crate) fn chunk(&self, chunk: u32) -> Chunk {
        Chunk::decode(self.0.get(self.0.words().chunk(chunk)))
    }

    /// Takes the allocator lock and puts right what a dead holder left.
    pub(crate) fn lock(&self) -> Result<LocalGuard<'a, M>, PoolError> {
        let mut guard = self.0.lock(LockName::Allocator)?;
        if guard.recovered() {
            self.repair();
            self.mend_generation_line()?;
            guard.repaired();
        }
        Ok(guard)
    }

    /// The line is written under this lock too. A limit that its dead writer had not yet made the host's was never used.
    fn mend_generation_line(&self) -> Result<(), PoolError> {
        let at = self.0.layout.generation_line(self.0.host());
        if line::load(self.0.memory, at)?.is_none() {
            let limit = self.0.get(self.0.words().generation_limit());
            line::publish_and_fence(self.0.memory, at, &[limit, 0, 0, 0, 0, 0, 0]);
        }
        Ok(())
    }

    /// Takes `units` in a chunk that this host holds, for the holder of directory lock `stripe`.
    ///
    /// # Errors
    /// [`PoolError::Quota`] when the job may not hold so much.
    pub(crate) fn allocate(&self, stripe: u32, units: u64, account: Account) -> Result<Room, PoolError> {
        let _guard = self.lock()?;
        let Some(start) = self.find(units) else { return Ok(Room::None) };
        let extent = Extent { start, units };
        self.take(stripe, extent, account)?;
        Ok(Room::Taken(extent))
    }

    /// Adds chunks that this host has claimed for `extent`, and takes it for the holder of directory lock `stripe`; nothing when
    /// another process of this host took of one that was held before.
    ///
    /// # Errors
    /// [`PoolError::Quota`] when the job may not hold so much; the chunks are held, and empty.
    pub(crate) fn adopt(&self, stripe: u32, extent: Extent, account: Account) -> Result<Room, PoolError> {
        let _guard = self.lock()?;
        self.chunks(extent).filter(|&chunk| !self.chunk(chunk).held).for_each(|chunk| self.hold(chunk));
        if !self.is_free(extent) {
            return Ok(Room::None);
        }
        self.take(stripe, extent, account)?;
        Ok(Room::Taken(extent))
    }

    /// Marks a chunk as held, and empty.
    pub(crate) fn hold(&self, chunk: u32) {
        self.set_chunk(chunk, Chunk { held: true, used: 0, longest: self.0.words().chunk_units() });
    }

    /// Gives up the chunks of this range that are empty, except one that is kept.
    pub(crate) fn release_empty_chunks(&self, chunks: Range<u32>) -> Result<(), PoolError> {
        let _guard = self.lock()?;
        let spare = self.spare();
        for chunk in chunks.filter(|chunk| Some(*chunk) != spare) {
            if self.chunk(chunk).is_empty() {
                self.set_chunk(chunk, Chunk::default());
            }
        }
        Ok(())
    }

    /// Whether this range has an empty chunk that is not the one that is kept.
    pub(crate) fn has_empty(&self, mut chunks: Range<u32>) -> bool {
        let spare = self.spare();
        chunks.any(|chunk| Some(chunk) != spare && self.chunk(chunk).is_empty())
    }

    fn spare(&self) -> Option<u32> {
        let spare = self.0.get(self.0.words().spare_chunk());
        u32::try_from(spare).ok()?.checked_sub(1).filter(|&chunk| chunk < self.0.layout.chunks())
    }

    /// Keeps one empty chunk, so that a process which creates and destroys does not claim and give back each time; in a
    /// small pool none.
    fn keep_one(&self, chunk: u32) {
        let many = self.0.layout.chunks() >= 8 * u32::from(self.0.layout.geometry().hosts);
        if many && !self.spare().is_some_and(|spare| self.chunk(spare).is_empty()) {
            self.0.set(self.0.words().spare_chunk(), u64::from(chunk) + 1);
        }
    }

    /// Keeps no empty chunk for now.
    pub(crate) fn keep_none(&self) {
        self.0.set(self.0.words().spare_chunk(), 0);
    }

    /// Frees the extent that the intent of directory lock `stripe` holds, if it holds one, and says which it was.
    pub(crate) fn free(&self, stripe: u32) -> Result<Option<Extent>, PoolError> {
        let _guard = self.lock()?;
        let Some(extent) = self.intended(stripe) else { return Ok(None) };
        let job = (self.0.get(self.0.words().intent(stripe, 2)) >> JOB_SHIFT) as u32;
        let held = if job < JOBS { self.0.get(self.0.words().job_bytes(job)) } else { 0 };
        let held = held.saturating_sub(extent.units * self.0.words().unit_bytes());
        self.log(stripe, extent, job, held);
        let emptied = self.clear(extent);
        self.settle(stripe, job, held);
        if let [chunk] = emptied[..] {
            self.keep_one(chunk);
        }
        Ok(Some(extent))
    }

    /// The extent that the intent of directory lock `stripe` holds.
    pub(crate) fn intended(&self, stripe: u32) -> Option<Extent> {
        let words = self.0.words();
        let start = self.0.get(words.intent(stripe, 1)).checked_sub(1)?;
        Some(Extent { start, units: self.0.get(words.intent(stripe, 2)) & ((1 << JOB_SHIFT) - 1) })
    }

    /// Hands an entry's extent to the intent of directory lock `stripe`, for [`Extents::free`].
    pub(crate) fn intend(&self, stripe: u32, extent: Extent, job: u64) {
        self.intend_of(stripe, extent, self.find_account(job).unwrap_or(JOBS));
    }

    fn intend_of(&self, stripe: u32, extent: Extent, job: u32) {
        let words = self.0.words();
        self.0.set(words.intent(stripe, 2), extent.units | u64::from(job) << JOB_SHIFT);
        self.0.set(words.intent(stripe, 1), extent.start + 1);
    }

    /// Says that an entry holds the extent from now on.
    pub(crate) fn release_intent(&self, stripe: u32) {
        self.0.set(self.0.words().intent(stripe, 1), 0);
    }

    /// Marks an extent that an entry holds while the state is rebuilt; `false` when a unit of it is in use already, or lies in
    /// a chunk that this host does not hold.
    pub(crate) fn mark(&self, extent: Extent, job: u64) -> bool {
        if !self.is_free(extent) {
            return false;
        }
        self.mark_bits(extent);
        if let Some(index) = self.account(job) {
            let bytes = self.0.words().job_bytes(index);
            self.0.set(bytes, self.0.get(bytes) + extent.units * self.0.words().unit_bytes());
        }
        true
    }

    /// Marks all units of the chunks that this host holds, while the state is rebuilt: where something damaged lies among them
    /// nobody knows.
    pub(crate) fn mark_all_used(&self) {
        let per_chunk = self.0.words().chunk_units();
        for chunk in (0..self.0.layout.chunks()).filter(|chunk| self.chunk(*chunk).held) {
            self.change_bits(chunk, 0, per_chunk, |bits, mask| bits | mask);
            self.set_chunk(chunk, Chunk { held: true, used: per_chunk, longest: 0 });
        }
    }

    fn is_free(&self, extent: Extent) -> bool {
        self.parts(extent).all(|(chunk, from, units)| {
            let state = self.chunk(chunk);
            let free = if units == self.0.words().chunk_units() {
                state.used == 0
            } else {
                state.used < self.0.words().chunk_units()
                    && self.find_in(chunk, units, from, from + units) == Some(from)
            };
            state.held && free
        })
    }

    /// Free bytes in the chunks that this host holds.
    pub(crate) fn free_bytes(&self) -> u64 {
        let units = |chunk| match self.chunk(chunk) {
            Chunk { held: true, used, .. } => self.0.words().chunk_units() - used,
            _ => 0,
        };
        (0..self.0.layout.chunks()).map(units).sum::<u64>() * self.0.words().unit_bytes()
    }

    /// The units of the longest free run inside a chunk that this host holds. What is found out about a chunk is remembered.
    pub(crate) fn longest_run(&self) -> Result<u64, PoolError> {
        let _guard = self.lock()?;
        let mut longest = 0;
        for chunk in self.with_room() {
            let state = self.chunk(chunk);
            if state.longest > longest {
                let mut own = 0;
                self.find_run(chunk, 0..self.0.words().chunk_units(), |run| {
                    own = own.max(run);
                    false
                });
                self.set_chunk(chunk, Chunk { longest: own, ..state });
                longest = longest.max(own);
            }
        }
        Ok(longest)
    }

    /// The free units at the beginning and at the end of a chunk that this host holds; where it is empty, both are all of it.
    pub(crate) fn free_ends(&self, chunk: u32) -> (u64, u64) {
        let (words, per_chunk) = (self.0.words(), self.0.words().chunk_units());
        match self.chunk(chunk) {
            Chunk { used: 0, .. } => return (per_chunk, per_chunk),
            Chunk { used, longest, .. } if longest == 0 || used >= per_chunk => return (0, 0),
            _ => {}
        }
        let (span, count) = (per_chunk.min(64) as u32, per_chunk.div_ceil(64));
        let bits = |index: u64| self.0.get(words.unit_bits(chunk, index * 64));
        let head = leading_run(span, (0..count).map(|index| bits(index).trailing_zeros()));
        let ends = (0..count).rev().map(|index| (bits(index) << (64 - span)).leading_zeros());
        (head, leading_run(span, ends))
    }

    // Under the lock.

    fn take(&self, stripe: u32, extent: Extent, account: Account) -> Result<(), PoolError> {
        let (words, Account { job, quota }) = (self.0.words(), account);
        let asked = extent.units * words.unit_bytes();
        let full = |held| PoolError::Quota { job, quota, held, asked };
        // A process that may hold anything goes uncounted when all accounts are taken. What is so is taken off the job's account, if it has
        // one by then, when it is freed: with more jobs on a host than are counted, quotas are about right.
        let uncounted = (quota == u64::MAX).then_some(JOBS);
        let index = self.account(job).or(uncounted).ok_or_else(|| full(0))?;
        let held = if index < JOBS { self.0.get(words.job_bytes(index)) } else { 0 };
        if held.checked_add(asked).is_none_or(|total| total > quota) {
            return Err(full(held));
        }
        self.log(stripe, extent, index, held);
        self.mark_bits(extent);
        if index < JOBS {
            self.0.set(words.job_bytes(index), held + asked);
        }
        self.intend_of(stripe, extent, index);
        self.0.set(words.allocator_log(0), 0);
        Ok(())
    }

    /// The counted job `job`, which takes the place of one that holds nothing.
    fn account(&self, job: u64) -> Option<u32> {
        let words = self.0.words();
        self.find_account(job).or_else(|| {
            let index = (0..JOBS).find(|index| self.0.get(words.job_bytes(*index)) == 0)?;
            self.0.set(words.job(index), job);
            Some(index)
        })
    }

    fn find_account(&self, job: u64) -> Option<u32> {
        (0..JOBS).find(|index| self.0.get(self.0.words().job(*index)) == job)
    }

    /// Says what the bits that change now are for. `held` is what the job holds if they are cleared.
    fn log(&self, stripe: u32, extent: Extent, job: u32, held: u64) {
        let words = self.0.words();
        self.0.set(words.allocator_log(1), extent.start);
        self.0.set(words.allocator_log(2), extent.units);
        self.0.set(words.allocator_log(3), job.into());
        self.0.set(words.allocator_log(4), held);
        self.0.set(words.allocator_log(0), u64::from(stripe) + 1);
    }

    /// The end of a free, and of an allocation that is undone.
    fn settle(&self, stripe: u32, job: u32, held: u64) {
        let words = self.0.words();
        if job < JOBS {
            self.0.set(words.job_bytes(job), held);
        }
        self.release_intent(stripe);
        self.0.set(words.allocator_log(0), 0);
    }

    /// Puts right what a dead holder of the lock was doing: what it took is free again, what it freed is free.
    fn repair(&self) {
        let words = self.0.words();
        let Some(stripe) = self.0.get(words.allocator_log(0)).checked_sub(1) else { return };
        let [start, units, job, held] = [1, 2, 3, 4].map(|word| self.0.get(words.allocator_log(word)));
        let extent = Extent { start, units };
        self.clear(extent);
        for chunk in self.chunks(extent) {
            self.recount(chunk);
        }
        self.settle(stripe as u32, job as u32, held);
    }

    /// The parts of an extent by chunk: the chunk, the first unit in it, and how many.
    fn parts(&self, extent: Extent) -> impl Iterator<Item = (u32, u64, u64)> + use<M> {
        let per_chunk = self.0.words().chunk_units();
        self.chunks(extent).map(move |chunk| {
            let base = u64::from(chunk) * per_chunk;
            let from = extent.start.max(base) - base;
            (chunk, from, (extent.end() - base).min(per_chunk) - from)
        })
    }

    /// Marks an extent's units. A chunk that it fills has no bits set: its count says all.
    fn mark_bits(&self, extent: Extent) {
        for (chunk, from, units) in self.parts(extent) {
            let state = self.chunk(chunk);
            if units == self.0.words().chunk_units() {
                self.set_chunk(chunk, Chunk { used: units, longest: 0, ..state });
            } else {
                self.change_bits(chunk, from, units, |bits, mask| bits | mask);
                self.set_chunk(chunk, Chunk { used: state.used + units, ..state });
            }
        }
    }

    /// Clears an extent's units; returns the chunks that are empty now.
    fn clear(&self, extent: Extent) -> Vec<u32> {
        let (mut emptied, per_chunk) = (vec![], self.0.words().chunk_units());
        for (chunk, from, units) in self.parts(extent) {
            let state = self.chunk(chunk);
            let used = if units == per_chunk {
                0
            } else {
                let cleared = self.change_bits(chunk, from, units, |bits, mask| bits & !mask);
                state.used.saturating_sub(cleared)
            };
            self.set_chunk(chunk, Chunk { used, longest: per_chunk - used, ..state });
            if used == 0 {
                emptied.push(chunk);
            }
        }
        emptied
    }

    /// Changes the bits of `units` from `from` on, and counts those that were set before.
    fn change_bits(&self, chunk: u32, from: u64, units: u64, change: impl Fn(u64, u64) -> u64) -> u64 {
        let (mut at, end, mut set) = (from, from + units, 0);
        while at < end {
            let word = self.0.words().unit_bits(chunk, at);
            let span = (64 - at % 64).min(end - at);
            let mask = u64::MAX >> (64 - span) << (at % 64);
            let bits = self.0.get(word);
            set += u64::from((bits & mask).count_ones());
            self.0.set(word, change(bits, mask));
            at += span;
        }
        set
    }

    /// Counts the units in use of a chunk anew.
    fn recount(&self, chunk: u32) {
        let (state, per_chunk) = (self.chunk(chunk), self.0.words().chunk_units());
        let bits = |unit| u64::from(self.0.get(self.0.words().unit_bits(chunk, unit)).count_ones());
        let used = (0..per_chunk).step_by(64).map(bits).sum();
        if state.held {
            self.set_chunk(chunk, Chunk { used, longest: per_chunk - used, ..state });
        }
    }

    fn set_chunk(&self, chunk: u32, state: Chunk) {
        let words = self.0.words();
        self.0.set(words.chunk(chunk), state.encode());
        let (room, bit) = (words.room_bits(chunk / 64), 1 << (chunk % 64));
        let bits = self.0.get(room);
        let has_room = state.held && state.used < words.chunk_units();
        let changed = if has_room { bits | bit } else { bits & !bit };
        if changed != bits {
            self.0.set(room, changed);
        }
    }

    /// The first unit of a free run: where the last one ended, then in the same chunk, then in any other.
    fn find(&self, units: u64) -> Option<u64> {
        let (words, per_chunk) = (self.0.words(), self.0.words().chunk_units());
        let cursor = self.0.get(words.cursor());
        let (chunk, from) = ((cursor >> 32) as u32, cursor & u64::from(u32::MAX));
        if chunk < self.0.layout.chunks() && self.may_hold(chunk, units) {
            let found = self.find_in(chunk, units, from.min(per_chunk), per_chunk);
            if let Some(start) = found.or_else(|| self.find_in_whole(chunk, units)) {
                return Some(self.found(chunk, start, units));
            }
        }
        self.with_room().find_map(|chunk| {
            let start = self.may_hold(chunk, units).then(|| self.find_in_whole(chunk, units))??;
            Some(self.found(chunk, start, units))
        })
    }

    fn found(&self, chunk: u32, start: u64, units: u64) -> u64 {
        self.0.set(self.0.words().cursor(), u64::from(chunk) << 32 | (start + units));
        u64::from(chunk) * self.0.words().chunk_units() + start
    }

    fn may_hold(&self, chunk: u32, units: u64) -> bool {
        let Chunk { held, used, longest } = self.chunk(chunk);
        held && longest >= units && self.0.words().chunk_units() - used >= units
    }

    /// Looks through a whole chunk, and remembers when it has no such run.
    fn find_in_whole(&self, chunk: u32, units: u64) -> Option<u64> {
        let found = self.find_in(chunk, units, 0, self.0.words().chunk_units());
        if found.is_none() {
            self.set_chunk(chunk, Chunk { longest: units - 1, ..self.chunk(chunk) });
        }
        found
    }

    fn find_in(&self, chunk: u32, units: u64, from: u64, to: u64) -> Option<u64> {
        self.find_run(chunk, from..to, |run| run >= units)
    }

    /// Where the first free run begins of which, as far as it has been seen, `wanted` takes the units.
    fn find_run(
        &self,
        chunk: u32,
        Range { start: from, end: to }: Range<u64>,
        mut wanted: impl FnMut(u64) -> bool,
    ) -> Option<u64> {
        let (mut start, mut at) = (from, from);
        while at < to {
            let bits = self.0.get(self.0.words().unit_bits(chunk, at)) >> (at % 64);
            let span = (64 - at % 64).min(to - at);
            let free = u64::from(bits.trailing_zeros()).min(span);
            if wanted(at + free - start) {
                return Some(start);
            }
            if free == span {
                at += span;
            } else {
                at += free + u64::from((bits >> free).trailing_ones());
                start = at;
            }
        }
        None
    }

    fn with_room(&self) -> impl Iterator<Item = u32> {
        let words = self.0.words();
        (0..words.room_words()).flat_map(move |index| {
            let mut bits = self.0.get(words.room_bits(index));
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(index * 64 + bit)
            })
        })
    }

    /// Forgets everything, before the state is rebuilt.
    pub(crate) fn reset(&self) {
        let words = self.0.words();
        let singles = [words.cursor(), words.spare_chunk(), words.allocator_log(0), words.chunk_log(0)];
        for word in singles {
            self.0.set(word, 0);
        }
        for index in 0..JOBS {
            self.0.set(words.job(index), 0);
            self.0.set(words.job_bytes(index), 0);
        }
        for chunk in 0..self.0.layout.chunks() {
            if self.0.get(words.chunk(chunk)) != 0 {
                // Last, so that a reset that dies in the middle is done again.
                self.clear_chunk(chunk);
                self.set_chunk(chunk, Chunk::default());
            }
        }
    }

    fn clear_chunk(&self, chunk: u32) {
        let words = self.0.words();
        for unit in (0..words.chunk_units()).step_by(64) {
            let bits = words.unit_bits(chunk, unit);
            if self.0.get(bits) != 0 {
                self.0.set(bits, 0);
            }
        }
    }
}

/// The free units in a row at the beginning of words of `span` units, each with so many zeros at its beginning.
fn leading_run(span: u32, zeros: impl Iterator<Item = u32>) -> u64 {
    let mut run = 0;
    for zeros in zeros {
        run += u64::from(zeros.min(span));
        if zeros < span {
            break;
        }
    }
    run
}
