//! How blocks are read: the slot's line, the block, and the line again.

use std::hash::Hasher;

use polder_mem::{Fault, LINE, Memory, Offset};
use twox_hash::XxHash3_64;

use super::index::Place;
use super::slabs::Slab;
use super::wire::{Entry, State};
use super::{Cache, Key};
use crate::PoolError;
use crate::deviation::Deviation;
use crate::line::{self, Words};
use crate::pieces::pieces;
use crate::pool::locked;

/// A block that is being read.
pub(super) struct Read {
    /// Which of the keys.
    pub(super) index: usize,
    pub(super) place: Place,
    pub(super) slab: Slab,
    entry: Offset,
    pub(super) block: Offset,
    /// Where its hits are counted.
    pub(super) count: u64,
    /// What the slot's line said at the first look.
    words: Words,
}

impl<M: Memory> Cache<M> {
    /// Copies the blocks of these keys to `into`; says of each whether it was there. Where it was not, what its buffer holds then
    /// says nothing.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when a buffer has not the bytes of a block; [`PoolError::Evicted`]. A block in memory that fails is a miss.
    pub fn get(&self, keys: &[Key], into: &mut [&mut [u8]]) -> Result<Vec<bool>, PoolError> {
        self.pool.expect_member()?;
        self.expect_blocks(keys.len(), into.iter().map(|buffer| buffer.len()))?;
        let mut reads = self.find(keys)?;
        self.look(&mut reads, keys)?;
        let copied: Vec<_> = reads.iter().map(|read| self.copy(read, into[read.index])).collect();
        let memory = self.pool.memory();
        // A CPU may drop a line from its caches before loads that stand before that are done, and have it again from before they were.
        // HARMLESS(fence_invalidations -> sfence -> drop) in the model, where loads are done in order.
        memory.fence_invalidations();
        self.refresh_entries(&reads);
        let mut found = vec![false; keys.len()];
        let mut replica = locked(&self.replica);
        for (read, copied) in reads.iter().zip(copied) {
            let is_same = Deviation::LooksOnce.is_on() || line::load(memory, read.entry)? == Some(read.words);
            found[read.index] = copied && is_same;
            match found[read.index] {
                true => self.touch(read.place.host, read.count),
                false => {
                    replica.counts.void += 1;
                    replica.forget(self.own(&keys[read.index]), read.place);
                }
            }
        }
        let hits = found.iter().filter(|found| **found).count() as u64;
        replica.counts.hits += hits;
        replica.counts.misses += keys.len() as u64 - hits;
        drop(replica);
        self.count(hits, keys.len() as u64 - hits);
        Ok(found)
    }

    /// Where the blocks lie, as far as is known.
    pub(super) fn find(&self, keys: &[Key]) -> Result<Vec<Read>, PoolError> {
        let mut replica = self.polled()?;
        let mut reads = vec![];
        for (index, key) in keys.iter().enumerate() {
            let Some(place) = replica.place(self.own(key)) else { continue };
            let slab = self.slab_of(&mut replica, place.host, place.slot.slab())?;
            match slab
                .filter(|slab| slab.head.block == self.identity.block && place.slot.index() < slab.head.slots)
            {
                Some(slab) => {
                    let (entry, block) = (slab.entry(place.slot.index()), slab.block(place.slot.index()));
                    let count = self.count_of(place.host, &slab, place.slot.index());
                    reads.push(Read { index, place, slab, entry, block, count, words: [0; line::WORDS] });
                }
                None => replica.forget(self.own(key), place),
            }
        }
        Ok(reads)
    }

    /// The first look: keeps what the slots' lines say is there.
    pub(super) fn look(&self, reads: &mut Vec<Read>, keys: &[Key]) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        self.refresh_entries(reads);
        let mut gone = vec![];
        let mut fault = None;
        reads.retain_mut(|read| {
            let words = match line::load(memory, read.entry) {
                Ok(words) => words,
                Err(error) => {
                    fault = Some(error);
                    None
                }
            };
            let key = self.own(&keys[read.index]);
            let entry = words.and_then(|words| Entry::decode(&words));
            let is_it = entry.is_some_and(|entry| self.is_it(&entry, key, read.place));
            if is_it {
                read.words = words.unwrap_or_default();
            } else {
                gone.push((key, read.place));
            }
            is_it
        });
        if let Some(fault) = fault {
            tracing::warn!("lines of a cache failed: {fault}");
        }
        let mut replica = locked(&self.replica);
        gone.into_iter().for_each(|(key, place)| replica.forget(key, place));
        Ok(())
    }

    fn is_it(&self, entry: &Entry, key: u128, place: Place) -> bool {
        entry.state == State::Live
            && entry.key == key
            && entry.generation as u32 == place.generation
            && (entry.host, entry.slab) == (place.host, place.slot.slab())
            && entry.bytes == self.identity.block
    }

    /// Drops the slots' lines of other hosts from the caches.
    // SYNC: pairs with `Cache::publish`, and with `Cache::take` of whoever uses the slot next.
    fn refresh_entries(&self, reads: &[Read]) {
        let memory = self.pool.memory();
        for read in reads.iter().filter(|read| self.is_others(read.place)) {
            memory.invalidate(read.entry, LINE);
        }
        memory.fence_invalidations();
    }

    pub(super) fn is_others(&self, place: Place) -> bool {
        place.host != self.pool.member().host
    }

    /// Copies a block; whether its memory could be read, and the copy matches its checksum.
    fn copy(&self, read: &Read, into: &mut [u8]) -> bool {
        let memory = self.pool.memory();
        if self.is_others(read.place) {
            memory.invalidate(read.block, into.len() as u64);
        }
        // SYNC: pairs with `Cache::publish`: the block was in memory before its line was.
        memory.fence_invalidations();
        let sum = Entry::decode(&read.words).map_or(0, |entry| entry.sum);
        let copied = match self.verify && sum != 0 {
            true => self.copy_out(read.block, into).map(|found| found == sum),
            false => memory.copy_out(read.block, into).map(|()| true),
        };
        copied.unwrap_or_else(|fault| {
            tracing::warn!("a block of the cache {} cannot be read: {fault}", self.name);
            false
        })
    }

    /// Copies a block from the pool; the checksum of the copy.
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<u64, Fault> {
        let mut hash = XxHash3_64::new();
        for piece in pieces(into.len()) {
            let begin = piece.start as u64;
            let into = &mut into[piece];
            self.pool.memory().copy_out(at + begin, into)?;
            hash.write(into);
        }
        Ok(hash.finish().max(1))
    }

    /// Refuses buffers that are no blocks.
    pub(super) fn expect_blocks(
        &self,
        keys: usize,
        sizes: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), PoolError> {
        let block = self.identity.block;
        if sizes.len() != keys {
            let value = format!("{} for {keys} keys", sizes.len());
            return Err(PoolError::Argument {
                what: "the number of blocks",
                value,
                expected: "one for each key",
            });
        }
        for size in sizes {
            if size as u64 != u64::from(block) {
                let value = format!("{size} bytes where this identity's have {block}");
                let expected = "give whole blocks; another size is another identity";
                return Err(PoolError::Argument { what: "a block", value, expected });
            }
        }
        Ok(())
    }
}
