//! Windows: memory of every rank that all ranks put into and get from, as MPI's one-sided operations do.
//!
//! Each rank makes a segment ([`Window::create`]). Once all ranks have, each finds the segments of the others
//! ([`Window::join`]).
//!
//! - A put is stores past the caches. They leave the other words of their lines alone, so any number of ranks may put to
//!   different words of a line. [`Window::flush`] makes puts visible.
//! - A get invalidates and reads.
//! - An update must read what it writes, and so must a put that begins or ends inside a word. Both hold the target's update
//!   lock.
//!
//! # Which rank may write what
//! - Before a rank loads from its own segment, it [renews](Window::renew) what others may have put.
//! - After a rank stored to its own segment, it [exposes](Window::expose) that, before others get it or put to it.
//! - While others put to a line, its owner does not store to it. A dirty line is written back whole, at any time, over all
//!   that was put to it meanwhile. MPI calls this model `MPI_WIN_SEPARATE`.
//! - A rank may load from and store to another rank's segment at its address. The three rules above bind it too.
//! - If two puts overlap, or a put and an update, each byte holds what one of them wrote. A put that begins or ends inside a
//!   word writes the word whole. It may undo what a put of whole words, which takes no lock, wrote there meanwhile.
//! - A rank's own get returns what it has put. Other ranks get it for certain once it is flushed, and may get it before.
//!
//! On coherent memory, exposing costs a fence and renewing costs nothing. There is no barrier here: the caller has one.
//! Only the update lock is waited for, up to the timeout of a call. The window lock and epochs are polled: the caller asks
//! [`Window::try_lock`], [`Window::try_start`] and [`Window::try_wait`] again until they return true.

mod epoch;
#[cfg(feature = "hostile")]
pub mod hostile;
mod lock;
mod place;

use std::collections::BTreeMap;
use std::sync::Arc;

use polder_mem::{Coherence, Memory, Offset};

use self::epoch::Epoch;
pub use self::lock::{Access, LockPlace};
use self::lock::{Claim, Lock};
use self::place::{Segment, Word, object_bytes, own_words, segment_name};
use crate::deviation::Deviation;
use crate::name::Name;
use crate::object::Object;
use crate::owned::{self, Kind};
use crate::{Pool, PoolError};

/// Bytes of a word: what memory writes at once.
const WORD: u64 = 8;

/// Where a rank's data lies in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRange {
    /// Its first byte, a multiple of 64.
    pub at: Offset,
    /// How long it is.
    pub bytes: u64,
}

/// How often this rank posted for another, and completed accesses to it.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    posted: u64,
    completed: u64,
}

/// A window, as one of its ranks has it. Dropping it gives locks back and removes this rank's segment; the other ranks keep what
/// they have found until they drop theirs.
#[derive(Debug)]
pub struct Window<M: Memory> {
    pool: Arc<Pool<M>>,
    name: String,
    rank: u32,
    ranks: u32,
    own: Segment,
    /// The segment of each rank, once they are found.
    segments: Vec<Segment>,
    /// The objects that are held open: of this rank, then of the others.
    objects: Vec<Object>,
    claims: BTreeMap<u32, Claim>,
    counts: Vec<Counts>,
    exposure: Option<Epoch>,
    access: Option<Epoch>,
    /// What an update works on.
    words: Vec<u8>,
    /// Looks in vain before it is asked whether a peer lives, which takes longer than most waits.
    pub(crate) asks_after: u32,
}

impl<M: Memory> Window<M> {
    /// Makes the segment of `rank`, with `bytes` zeros of data, in the window `name` of the job. It replaces that of a process
    /// that died; a name is used again only after all ranks have dropped the window that had it.
    ///
    /// Its name is one as objects have, and may leave its first `/` out: `w` and `/w` are one window.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when `rank` is not below `ranks`, or the segment is too large; those of [`Pool::create`].
    pub fn create(
        pool: Arc<Pool<M>>,
        name: &str,
        rank: u32,
        ranks: u32,
        bytes: u64,
    ) -> Result<Self, PoolError> {
        let argument = |what, value, expected| PoolError::Argument { what, value, expected };
        if rank >= ranks {
            return Err(argument("the rank", format!("{rank} of {ranks}"), "ranks count from 0"));
        }
        let total = object_bytes(ranks, bytes)
            .ok_or_else(|| argument("the window", format!("{bytes} bytes"), "make a smaller one"))?;
        // What is wrong with the name is told of the name that was given.
        let first = if name.starts_with('/') { "" } else { "/" };
        Name::parse(&format!("{first}{name}"))?;
        let process = pool.this_process();
        let object_name = segment_name(pool.member().job, name, rank);
        let object = owned::create(&pool, &object_name, total, Kind::Segment, own_words(rank, ranks, bytes))?;
        let own = Segment::new(process, object.at(), ranks, bytes);
        let (segments, objects) = (vec![], vec![object]);
        let counts = vec![Counts::default(); ranks as usize];
        Ok(Self {
            pool,
            name: name.to_owned(),
            rank,
            ranks,
            own,
            segments,
            objects,
            claims: BTreeMap::new(),
            counts,
            exposure: None,
            access: None,
            words: vec![],
            asks_after: 64,
        })
    }

    /// Finds the segments of all ranks, each of which has been created; once it has, it does nothing.
    ///
    /// # Errors
    /// [`PoolError::NotFound`] when one has not; [`PoolError::Corrupt`] when one is not what a rank of this window makes;
    /// [`PoolError::TooManyOpen`], [`PoolError::Memory`].
    pub fn join(&mut self) -> Result<(), PoolError> {
        if !self.segments.is_empty() {
            return Ok(());
        }
        let segments: Result<Vec<_>, _> = (0..self.ranks).map(|rank| self.find(rank)).collect();
        if segments.is_err() {
            self.objects.drain(1..).for_each(|object| self.pool.close(object));
        }
        self.segments = segments?;
        Ok(())
    }

    fn find(&mut self, rank: u32) -> Result<Segment, PoolError> {
        if rank == self.rank {
            return Ok(self.own);
        }
        let object = self.pool.open(&segment_name(self.pool.member().job, &self.name, rank))?;
        let found = Segment::find(&self.pool, &object, rank, self.ranks);
        self.objects.push(object);
        found
    }

    /// This process's rank.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Where this rank's data lies, also before [`Window::join`].
    #[must_use]
    pub const fn own_data(&self) -> DataRange {
        DataRange { at: self.own.at, bytes: self.own.bytes }
    }

    /// Where the data of a rank lies.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when there is no such rank, or the window has not been joined.
    pub fn data_range(&self, rank: u32) -> Result<DataRange, PoolError> {
        self.segment(rank).map(|segment| DataRange { at: segment.at, bytes: segment.bytes })
    }

    /// Where this process has the data of a rank mapped; nothing where it has not, as in a shadow.
    ///
    /// # Errors
    /// Those of [`Window::data_range`].
    pub fn address(&self, rank: u32) -> Result<Option<*mut u8>, PoolError> {
        let DataRange { at, bytes } = self.data_range(rank)?;
        Ok(self.pool.memory().address(at, bytes))
    }

    /// Stores `from` to the bytes from `offset` on of `target`. Bytes that are no whole words take the target's update lock, unless
    /// the hardware keeps caches in step.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the segment; [`PoolError::Memory`]; where it takes a lock, those of
    /// [`Window::update`].
    #[inline]
    pub fn put(&mut self, target: u32, offset: u64, from: &[u8]) -> Result<(), PoolError> {
        let at = self.range(target, offset, from.len() as u64)?;
        if at.0.is_multiple_of(WORD) && (from.len() as u64).is_multiple_of(WORD) {
            return Ok(self.pool.memory().copy_in_nt(at, from)?);
        }
        self.put_parts(target, at, from)
    }

    /// A put that begins or ends inside a word, or of nothing.
    #[inline(never)]
    fn put_parts(&mut self, target: u32, at: Offset, from: &[u8]) -> Result<(), PoolError> {
        if from.is_empty() {
            return Ok(());
        }
        let memory = self.pool.memory();
        if stores_bytes(memory) {
            return store_bytes(memory, at, from);
        }
        let [head, words, tail] = parts(at, from);
        if !words.1.is_empty() {
            memory.copy_in_nt(words.0, words.1)?;
        }
        self.locked(target, |window| {
            for (at, part) in [head, tail].into_iter().filter(|(_, part)| !part.is_empty()) {
                window.change(at, part.len(), &mut |bytes| {
                    bytes.copy_from_slice(part);
                    true
                })?;
            }
            Ok(())
        })
    }

    /// Copies the bytes from `offset` on of `target` into `into`, afresh: all that was flushed before is seen.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the segment, [`PoolError::Memory`].
    pub fn get(&self, target: u32, offset: u64, into: &mut [u8]) -> Result<(), PoolError> {
        let at = self.range(target, offset, into.len() as u64)?;
        let memory = self.pool.memory();
        memory.invalidate(at, into.len() as u64);
        // SYNC: pairs with `flush` and `expose` of the rank that wrote.
        memory.fence_invalidations();
        Ok(memory.copy_out(at, into)?)
    }

    /// Makes all that this rank has put, to any target, visible to ranks that get or renew it from here on.
    // SYNC: an mfence, so that what is loaded next is at least as new: of two who put, flush and get, one gets what the other
    // has put.
    #[inline]
    pub fn flush(&self) {
        self.pool.memory().mfence();
    }

    /// Lets `change` change the bytes from `offset` on of `target`, and say whether it has. No other update changes any of them
    /// meanwhile, and no put that takes the update lock. It is visible when this returns. Where the hardware keeps caches in step, the
    /// bytes beside them are left alone, and may be stored by others meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the segment; [`PoolError::Timeout`] with the rank that has the lock for
    /// too long; [`PoolError::PeerDead`] when that gives no sign of life and may yet go on; [`PoolError::Evicted`],
    /// [`PoolError::Corrupt`], [`PoolError::Memory`].
    pub fn update(
        &mut self,
        target: u32,
        offset: u64,
        bytes: u64,
        change: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), PoolError> {
        let at = self.range(target, offset, bytes)?;
        self.locked(target, |window| window.change(at, bytes as usize, change))
    }

    /// Writes back what this process has stored, by its own means, to the bytes from `offset` on of `target`, so that others can
    /// get it, and put to those lines.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the segment.
    // SYNC: an mfence, as in `flush`.
    pub fn expose(&self, target: u32, offset: u64, bytes: u64) -> Result<(), PoolError> {
        let at = self.range(target, offset, bytes)?;
        let memory = self.pool.memory();
        memory.write_back(at, bytes);
        memory.mfence();
        Ok(())
    }

    /// Drops what this host has cached of the bytes from `offset` on of `target`, so that this process loads what others have
    /// put.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the range ends past the segment.
    pub fn renew(&self, target: u32, offset: u64, bytes: u64) -> Result<(), PoolError> {
        let at = self.range(target, offset, bytes)?;
        let memory = self.pool.memory();
        memory.invalidate(at, bytes);
        // SYNC: pairs with `flush` and `expose` of the ranks that wrote.
        memory.fence_invalidations();
        Ok(())
    }

    /// Does something under the update lock of `target`.
    fn locked(
        &mut self,
        target: u32,
        work: impl FnOnce(&mut Self) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        let lock = Lock { word: Word::UpdateLock, target };
        self.take(lock)?;
        let done = work(self);
        self.release(lock);
        done
    }

    /// Changes `bytes` bytes at `at`, and stores the words that hold them past the caches, or the bytes alone.
    fn change(
        &mut self,
        at: Offset,
        bytes: usize,
        change: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<(), PoolError> {
        let skip = (at.0 % WORD) as usize;
        let start = Offset(at.0 - skip as u64);
        let words = &mut self.words;
        words.clear();
        words.resize((skip + bytes).next_multiple_of(WORD as usize), 0);
        let memory = self.pool.memory();
        memory.invalidate(start, words.len() as u64);
        // SYNC: pairs with `release` of the rank that held the lock before.
        memory.fence_invalidations();
        memory.copy_out(start, words)?;
        let changed = &mut words[skip..skip + bytes];
        match change(changed) || Deviation::WholeWords.is_on() {
            false => Ok(()),
            true if stores_bytes(memory) => store_bytes(memory, at, changed),
            true => Ok(memory.copy_in_nt(start, words)?),
        }
    }

    fn segment(&self, rank: u32) -> Result<&Segment, PoolError> {
        self.segments.get(rank as usize).ok_or_else(|| self.no_such(rank))
    }

    #[cold]
    fn no_such(&self, rank: u32) -> PoolError {
        let value = format!("{rank} of {} in window {}", self.segments.len(), self.name);
        PoolError::Argument { what: "the rank", value, expected: "ranks count from 0, once all are joined" }
    }

    /// Where a range of bytes of `target` begins.
    fn range(&self, target: u32, offset: u64, bytes: u64) -> Result<Offset, PoolError> {
        let segment = self.segment(target)?;
        match offset.checked_add(bytes) {
            Some(end) if end <= segment.bytes => Ok(segment.at + offset),
            _ => Err(self.outside(target, offset, bytes, segment.bytes)),
        }
    }

    #[cold]
    fn outside(&self, target: u32, offset: u64, bytes: u64, limit: u64) -> PoolError {
        let value = format!("[{offset}, +{bytes}) of rank {target} in window {} ({limit} bytes)", self.name);
        PoolError::Argument { what: "the range", value, expected: "it must end inside the segment" }
    }
}

impl<M: Memory> Drop for Window<M> {
    fn drop(&mut self) {
        for target in std::mem::take(&mut self.claims).into_keys() {
            self.release(Lock { word: Word::WindowLock, target });
        }
        let mut objects = self.objects.drain(..);
        let own = objects.next();
        objects.for_each(|object| self.pool.close(object));
        own.into_iter().for_each(|own| self.pool.abandon(own));
    }
}

/// Whether a part of a word can be stored while others store the rest of it: where every cache has the same line.
fn stores_bytes<M: Memory>(memory: &M) -> bool {
    memory.coherence() == Coherence::Coherent && !Deviation::WholeWords.is_on()
}

/// Stores these bytes and no others.
fn store_bytes<M: Memory>(memory: &M, at: Offset, from: &[u8]) -> Result<(), PoolError> {
    let [head, (first_word, words), tail] = parts(at, from);
    if !words.is_empty() {
        memory.copy_in_nt(first_word, words)?;
    }
    for (at, part) in [head, tail].into_iter().filter(|(_, part)| !part.is_empty()) {
        memory.copy_in(at, part)?;
    }
    Ok(())
}

/// Bytes before the first whole word, whole words, and the rest, each with its place.
fn parts(at: Offset, bytes: &[u8]) -> [(Offset, &[u8]); 3] {
    let start = at.0.next_multiple_of(WORD) - at.0;
    let (head, rest) = bytes.split_at(bytes.len().min(start as usize));
    let (words, tail) = rest.split_at(rest.len() - rest.len() % WORD as usize);
    let first_word = at + head.len() as u64;
    [(at, head), (first_word, words), (first_word + words.len() as u64, tail)]
}
