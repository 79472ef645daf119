//! Chunks: how hosts divide the pool's data space among themselves.
//!
//! Each host writes into its own words which chunks it claims and which it holds. To claim a chunk, it announces the claim,
//! fences, and looks at the words of all other hosts:
//!
//! - If another host holds the chunk, or a lower host claims it, this host withdraws.
//! - If a higher host claims it, this host waits until that claim is withdrawn or holds.
//!
//! A host gives a chunk back when it is empty.
//!
//! What a host holds stands in its own local words first; the words in the pool follow. If a process dies in between, the
//! process that takes over its lock writes the words of the chunks in the log again.
//!
//! # Words
//! A claim word is a checked word with 2 bits for each of 28 chunks: 0 free, 1 claimed, 2 held.

use std::ops::Range;
use std::time::Duration;

use polder_mem::Memory;

use crate::deviation::Deviation;
use crate::extents::{Account, Extent, Extents, Room};
use crate::format::{CHUNK_BITS, CHUNKS_PER_WORD};
use crate::local::LocalGuard;
use crate::site::Site;
use crate::state::LockName;
use crate::watch::Watch;
use crate::{PoolError, word};

const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const HELD: u64 = 2;
const STATE: u64 = (1 << CHUNK_BITS) - 1;

/// The chunk claims of this host.
pub(crate) struct Chunks<'a, M>(pub(crate) Site<'a, M>);

/// What a look at the other hosts' claims showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rival {
    /// Nobody else wants these chunks.
    None,
    /// Another host has this one, or a host whose claim goes first wants it.
    Ahead { chunk: u32, claims: bool },
    /// A host whose claim goes after ours wants one, and may have looked before it could see ours.
    Behind { chunk: u32 },
}

impl<'a, M: Memory> Chunks<'a, M> {
    /// Claims the chunks that a run of `units` needs beside those that this host holds, and takes the run for the holder of
    /// directory lock `stripe`. Nothing when another process was faster.
    ///
    /// # Errors
    /// [`PoolError::Full`] when there is no such run, [`PoolError::Quota`] when the job may not hold so much.
    pub(crate) fn grow(&self, stripe: u32, units: u64, account: Account) -> Result<Room, PoolError> {
        self.under_lock(|| self.claim_run(stripe, units, account))
    }

    fn claim_run(&self, stripe: u32, units: u64, account: Account) -> Result<Room, PoolError> {
        let mut others = OtherClaims::new(self);
        loop {
            let Some(extent) = others.find_run(units)? else {
                if !others.are_contended || !others.watch.wait(&self.0) {
                    // The last chunk may have become this host's while its lock was waited for.
                    let extents = Extents(self.0);
                    if extents.fits_a_chunk(units)
                        && let taken @ Room::Taken(_) = extents.allocate(stripe, units, account)?
                    {
                        return Ok(taken);
                    }
                    return Err(self.full(units, &mut others)?);
                }
                others.forget();
                continue;
            };
            match self.claim(&Extents(self.0).chunks(extent), &mut others.watch)? {
                Rival::None => return self.win(stripe, extent, account),
                Rival::Ahead { chunk, claims } => others.pass(chunk, claims),
                Rival::Behind { chunk } => others.pass(chunk, true),
            }
        }
    }

    fn full(&self, units: u64, others: &mut OtherClaims<'_, M>) -> Result<PoolError, PoolError> {
        let unit_bytes = self.0.words().unit_bytes();
        let free = Extents(self.0).free_bytes() + others.unclaimed_bytes()?;
        let mut largest = Extents(self.0).longest_run()?;
        others.find_between(0..self.0.layout.chunks(), |run| {
            largest = largest.max(run);
            false
        })?;
        Ok(PoolError::Full { asked: units.saturating_mul(unit_bytes), free, largest: largest * unit_bytes })
    }

    /// The bytes that this host could still take: what is free in its chunks, and the chunks that nobody holds.
    pub(crate) fn free_bytes(&self) -> Result<u64, PoolError> {
        Ok(Extents(self.0).free_bytes() + OtherClaims::new(self).unclaimed_bytes()?)
    }

    /// Gives back the empty chunks of this range, except one that is kept in a pool with many. Those that another process of
    /// this host was giving back have gone back then as well.
    pub(crate) fn give_back(&self, chunks: Range<u32>) -> Result<(), PoolError> {
        self.give_back_within(chunks.clone(), self.0.patience)?;
        if self.are_being_returned(&chunks)? {
            drop(self.lock()?);
        }
        Ok(())
    }

    /// Whether the claim words still say that this host holds a chunk which it has given up.
    fn are_being_returned(&self, chunks: &Range<u32>) -> Result<bool, PoolError> {
        for index in words(chunks) {
            let states = word::open(self.0.memory.load(self.0.layout.chunk_word(self.0.host(), index))?);
            let given_up = |chunk: u32| !Extents(self.0).chunk(chunk).held;
            if states.is_some_and(|states| held(states, index, chunks.end).any(given_up)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As [`Chunks::give_back`], unless another process holds the chunk lock, perhaps while it waits for another host: then
    /// they go back later.
    pub(crate) fn try_give_back(&self, chunks: Range<u32>) {
        if let Err(error) = self.give_back_within(chunks, Duration::ZERO) {
            tracing::debug!(%error, "empty chunks are kept for now");
        }
    }

    fn give_back_within(&self, chunks: Range<u32>, patience: Duration) -> Result<(), PoolError> {
        if !Extents(self.0).has_empty(chunks.clone()) {
            return Ok(());
        }
        Self(Site { patience, ..self.0 }).under_lock(|| {
            self.log(&chunks);
            Extents(self.0).release_empty_chunks(chunks.clone())?;
            self.settle(&chunks);
            Ok(())
        })
    }

    /// Whether the claim words of `owner`, which the caller has invalidated, say that it holds all these chunks.
    pub(crate) fn are_held(&self, owner: u16, chunks: Range<u32>) -> Result<bool, PoolError> {
        for index in words(&chunks) {
            let states = word::open(self.0.memory.load(self.0.layout.chunk_word(owner, index))?);
            let mine = of_word(&chunks, index);
            if !states.is_some_and(|states| mine.into_iter().all(|chunk| state(states, chunk) == HELD)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Invalidates the claim words of `owner` for these chunks; a fence of the caller follows.
    pub(crate) fn invalidate(&self, owner: u16, chunks: &Range<u32>) {
        let words = words(chunks);
        if !words.is_empty() && owner != self.0.host() {
            let first = self.0.layout.chunk_word(owner, words.start);
            self.0.memory.invalidate(first, u64::from(words.end - words.start) * 8);
        }
    }

    /// Takes up the claims that the words of this host's shard say, while the state is rebuilt. What a damaged word says is
    /// taken as held: others leave such chunks alone.
    pub(crate) fn rebuild(&self) -> Result<(), PoolError> {
        for index in 0..self.0.layout.chunk_words() {
            let states = word::open(self.0.memory.load(self.0.layout.chunk_word(self.0.host(), index))?);
            for chunk in of_word(&(0..self.0.layout.chunks()), index) {
                if states.is_none_or(|states| state(states, chunk) == HELD) {
                    Extents(self.0).hold(chunk);
                }
            }
        }
        Ok(())
    }

    /// Writes all claim words from what this host holds.
    pub(crate) fn publish_all(&self) {
        self.publish(&(0..self.0.layout.chunks()), FREE);
    }

    /// Takes the chunk lock and puts right what a dead holder left.
    pub(crate) fn lock(&self) -> Result<LocalGuard<'a, M>, PoolError> {
        let mut guard = self.0.lock(LockName::Chunks)?;
        if guard.recovered() {
            let [count, first] = [0, 1].map(|word| self.0.get(self.0.words().chunk_log(word)) as u32);
            // Whether these chunks are held is the allocator's to say, also when its lock was left behind.
            drop(Extents(self.0).lock()?);
            self.settle(&(first..first.saturating_add(count).min(self.0.layout.chunks())));
            guard.repaired();
        }
        Ok(guard)
    }

    /// Does `what` under the chunk lock. What fails half done is settled by the next to take the lock.
    fn under_lock<T>(&self, what: impl FnOnce() -> Result<T, PoolError>) -> Result<T, PoolError> {
        let mut guard = self.lock()?;
        let done = what();
        if done.is_err() && self.0.get(self.0.words().chunk_log(0)) != 0 {
            guard.spoil();
        }
        done
    }

    // Under the lock.

    fn log(&self, chunks: &Range<u32>) {
        self.0.set(self.0.words().chunk_log(1), chunks.start.into());
        self.0.set(self.0.words().chunk_log(0), (chunks.end - chunks.start).into());
    }

    /// Writes the words of these chunks from what this host holds: claims end here, lost or won.
    fn settle(&self, chunks: &Range<u32>) {
        self.publish(chunks, FREE);
        self.0.set(self.0.words().chunk_log(0), 0);
    }

    /// Announces a claim and looks at the others until it is clear who goes first.
    // SYNC: pairs with itself on another host: of two claims at least one is seen by the other's owner.
    fn claim(&self, chunks: &Range<u32>, watch: &mut Watch) -> Result<Rival, PoolError> {
        self.log(chunks);
        if !Deviation::CheckThenSet.is_on() {
            self.publish(chunks, CLAIMED);
            self.0.memory.mfence();
        }
        let outcome = self.await_settled(chunks, watch);
        if !matches!(outcome, Ok(Rival::None)) {
            self.settle(chunks);
        }
        outcome
    }

    /// Looks until nobody is in the way any more, or somebody goes first, or the deadline has come.
    fn await_settled(&self, chunks: &Range<u32>, watch: &mut Watch) -> Result<Rival, PoolError> {
        loop {
            let rival = self.look(chunks, watch)?;
            let Rival::Behind { .. } = rival else { return Ok(rival) };
            if Deviation::LowerDoesNotWait.is_on() {
                return Ok(Rival::None);
            }
            if !watch.wait(&self.0) {
                return Ok(rival);
            }
        }
    }

    fn win(&self, stripe: u32, extent: Extent, account: Account) -> Result<Room, PoolError> {
        let chunks = Extents(self.0).chunks(extent);
        // First, and for certain: other processes of this host use the chunks as soon as they are adopted.
        self.publish(&chunks, HELD);
        // SYNC: pairs with `look` of the other hosts, and with `are_held` of those that open what will lie there.
        self.0.memory.mfence();
        let room = Extents(self.0).adopt(stripe, extent, account);
        if matches!(room, Ok(Room::Taken(_))) {
            self.0.set(self.0.words().chunk_log(0), 0);
        } else {
            // What was claimed for nothing goes back at once.
            Extents(self.0).release_empty_chunks(chunks.clone())?;
            self.settle(&chunks);
        }
        room
    }

    /// Writes the claim words of these chunks: those that this host holds as held, the others as `unheld`.
    fn publish(&self, chunks: &Range<u32>, unheld: u64) {
        let all = 0..self.0.layout.chunks();
        for index in words(chunks) {
            let mut states = 0;
            for chunk in of_word(&all, index) {
                let state = match Extents(self.0).chunk(chunk).held {
                    true => HELD,
                    false if chunks.contains(&chunk) => unheld,
                    false => FREE,
                };
                states |= state << shift(chunk);
            }
            let at = self.0.layout.chunk_word(self.0.host(), index);
            self.0.memory.store(at, word::seal(states));
            if !Deviation::KeepsClaims.is_on() {
                self.0.memory.write_back(at, 8);
            }
        }
    }

    /// What the other hosts say of these chunks now.
    fn look(&self, chunks: &Range<u32>, watch: &mut Watch) -> Result<Rival, PoolError> {
        let hosts = self.0.survey(|host| self.invalidate(host, chunks))?;
        let mut behind = Rival::None;
        for host in self.0.hosts(hosts).filter(|host| *host != self.0.host()) {
            for index in words(chunks) {
                let states = word::open(self.0.memory.load(self.0.layout.chunk_word(host, index))?);
                for chunk in of_word(chunks, index).filter(|chunk| !Extents(self.0).chunk(*chunk).held) {
                    match states.map(|states| state(states, chunk)) {
                        Some(FREE) => {}
                        Some(CLAIMED) if !watch.must_wait_for(&self.0, host) => {}
                        Some(CLAIMED) if host > self.0.host() => behind = Rival::Behind { chunk },
                        other => return Ok(Rival::Ahead { chunk, claims: other == Some(CLAIMED) }),
                    }
                }
            }
        }
        Ok(behind)
    }
}

/// What this host knows of the others' claims while it looks for chunks: read once, a word at a time.
struct OtherClaims<'a, M> {
    chunks: &'a Chunks<'a, M>,
    /// For each claim word the chunks that are not to be had, one bit each, once it has been read.
    taken: Vec<Option<u64>>,
    /// Whether a chunk was passed over that may be free again soon.
    are_contended: bool,
    watch: Watch,
}

impl<'a, M: Memory> OtherClaims<'a, M> {
    fn new(chunks: &'a Chunks<'a, M>) -> Self {
        let taken = vec![None; chunks.0.layout.chunk_words() as usize];
        Self { chunks, taken, are_contended: false, watch: Watch::new(&chunks.0) }
    }

    /// Reads the words again from now on.
    fn forget(&mut self) {
        self.taken.fill(None);
        self.are_contended = false;
    }

    /// The first run of `units` that may be had. Each host begins elsewhere, so that they seldom meet.
    fn find_run(&mut self, units: u64) -> Result<Option<Extent>, PoolError> {
        let site = self.chunks.0;
        let all = site.layout.chunks();
        let begin = u64::from(all) * u64::from(site.host()) / u64::from(site.layout.geometry().hosts);
        let begin = begin as u32;
        let count = units.div_ceil(site.words().chunk_units());
        let behind = u32::try_from(count).map_or(all, |count| begin.saturating_add(count).min(all));
        let start = match self.find_between(begin..all, |run| run >= units)? {
            Some(start) => Some(start),
            None => self.find_between(0..behind, |run| run >= units)?,
        };
        Ok(start.map(|start| Extent { start, units }))
    }

    /// The first unit of the first run, through these chunks, of which `wanted` takes the units that it has up to a chunk's end.
    fn find_between(
        &mut self,
        chunks: Range<u32>,
        mut wanted: impl FnMut(u64) -> bool,
    ) -> Result<Option<u64>, PoolError> {
        let per_chunk = self.chunks.0.words().chunk_units();
        let mut start = u64::from(chunks.start) * per_chunk;
        for chunk in chunks {
            let (base, (head, tail)) = (u64::from(chunk) * per_chunk, self.free_ends(chunk)?);
            if wanted(base + head - start) {
                return Ok(Some(start));
            }
            if head < per_chunk {
                start = base + per_chunk - tail;
            }
        }
        Ok(None)
    }

    /// The units that may be had at the beginning and at the end of a chunk.
    fn free_ends(&mut self, chunk: u32) -> Result<(u64, u64), PoolError> {
        if self.is_taken(chunk)? {
            return Ok((0, 0));
        }
        let per_chunk = self.chunks.0.words().chunk_units();
        match Extents(self.chunks.0).chunk(chunk).held {
            true => Ok(Extents(self.chunks.0).free_ends(chunk)),
            false => Ok((per_chunk, per_chunk)),
        }
    }

    /// Whether a chunk is another host's, or is about to be.
    fn is_taken(&mut self, chunk: u32) -> Result<bool, PoolError> {
        let (index, bit) = (chunk / CHUNKS_PER_WORD, chunk % CHUNKS_PER_WORD);
        let taken = match self.taken[index as usize] {
            Some(taken) => taken,
            None => self.read(index)?,
        };
        Ok(taken >> bit & 1 == 1)
    }

    fn read(&mut self, index: u32) -> Result<u64, PoolError> {
        let (chunks, site) = (self.chunks, self.chunks.0);
        let first = index * CHUNKS_PER_WORD;
        let range = first..first + 1;
        let hosts = site.survey(|host| chunks.invalidate(host, &range))?;
        let mut taken = 0;
        for host in site.hosts(hosts).filter(|host| *host != site.host()) {
            let states = word::open(site.memory.load(site.layout.chunk_word(host, index))?);
            for bit in 0..CHUNKS_PER_WORD {
                let state = states.map(|states| state(states, bit));
                let claimed = state == Some(CLAIMED) && self.watch.must_wait_for(&site, host);
                taken |= u64::from(claimed || !matches!(state, Some(FREE | CLAIMED))) << bit;
                self.are_contended |= claimed;
            }
        }
        self.taken[index as usize] = Some(taken);
        Ok(taken)
    }

    /// Passes over a chunk that went to another host.
    fn pass(&mut self, chunk: u32, claimed: bool) {
        let taken = &mut self.taken[(chunk / CHUNKS_PER_WORD) as usize];
        *taken = Some(taken.unwrap_or(0) | 1 << (chunk % CHUNKS_PER_WORD));
        self.are_contended |= claimed;
    }

    /// The bytes of all chunks that nobody holds or claims.
    fn unclaimed_bytes(&mut self) -> Result<u64, PoolError> {
        let mut free = 0;
        for chunk in 0..self.chunks.0.layout.chunks() {
            free += u64::from(!self.is_taken(chunk)? && !Extents(self.chunks.0).chunk(chunk).held);
        }
        Ok(free * self.chunks.0.layout.geometry().chunk_bytes)
    }
}

fn words(chunks: &Range<u32>) -> Range<u32> {
    chunks.start / CHUNKS_PER_WORD..chunks.end.div_ceil(CHUNKS_PER_WORD)
}

/// The chunks of `chunks` in all that the open word `index` says are held.
pub(crate) fn held(states: u64, index: u32, chunks: u32) -> impl Iterator<Item = u32> {
    of_word(&(0..chunks), index).filter(move |&chunk| state(states, chunk) == HELD)
}

/// The chunks of this range whose states stand in word `index`.
fn of_word(chunks: &Range<u32>, index: u32) -> Range<u32> {
    let first = index * CHUNKS_PER_WORD;
    first.max(chunks.start)..(first + CHUNKS_PER_WORD).min(chunks.end)
}

const fn shift(chunk: u32) -> u32 {
    chunk % CHUNKS_PER_WORD * CHUNK_BITS
}

const fn state(states: u64, chunk: u32) -> u64 {
    states >> shift(chunk) & STATE
}
