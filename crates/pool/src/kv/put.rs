//! How blocks are written: slots are taken, blocks copied, lines published, records logged.

use std::hash::Hasher;
use std::time::{SystemTime, UNIX_EPOCH};

use polder_mem::{Fault, LINE, Memory, Offset};
use twox_hash::XxHash3_64;

use super::wire::{Control, Entry, Record, Slot, State};
use super::{Cache, Key};
use crate::line::Words;
use crate::object::Object;
use crate::pieces::pieces;
use crate::{PoolError, line};

/// What came of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Put {
    /// Blocks that were stored.
    pub stored: u64,
    /// Blocks that were there already, or that another process of this host is about to have put.
    pub present: u64,
    /// Blocks for which there was no room, or whose memory failed.
    pub refused: u64,
}

/// A put whose slots are taken.
#[derive(Debug)]
pub(crate) struct Begun {
    put: Put,
    /// Blocks that are not there yet.
    wanted: u64,
    pub(super) taken: Vec<Taken>,
    /// The slabs that they are in, held open.
    pub(super) held: Vec<(u32, Object)>,
}

/// A slot that was taken for a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    /// Which of the blocks.
    pub(super) index: usize,
    pub(super) slot: Slot,
    pub(super) entry: Offset,
    pub(super) block: Offset,
    /// What its line says.
    pub(super) line: Entry,
    /// What it said before, where there was a block.
    pub(super) before: Option<Words>,
}

impl<M: Memory> Cache<M> {
    /// Stores blocks that are not there yet. Once this returns, a [`Cache::lookup`] of any process finds them until they are evicted,
    /// also when this process is killed.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when a block has not the bytes of this identity's; [`PoolError::NotFound`] when the cache was removed;
    /// [`PoolError::Evicted`]; [`PoolError::Timeout`] when another process of this host does not let go of a lock.
    pub fn put(&self, keys: &[Key], blocks: &[&[u8]]) -> Result<Put, PoolError> {
        self.pool.expect_member()?;
        self.expect_blocks(keys.len(), blocks.iter().map(|block| block.len()))?;
        let begun = self.begin(keys)?;
        self.finish(begun, blocks)
    }

    /// As [`Cache::put`] of blocks that hold whatever lies in their slots: for figures of a cache that is larger than the memory.
    ///
    /// # Errors
    /// Those of [`Cache::put`].
    #[cfg(feature = "model")]
    pub fn put_holes(&self, keys: &[Key]) -> Result<Put, PoolError> {
        self.pool.expect_member()?;
        let begun = self.begin(keys)?;
        self.end(begun)
    }

    /// Takes slots for the keys that have no blocks.
    pub(crate) fn begin(&self, keys: &[Key]) -> Result<Begun, PoolError> {
        let missing = self.missing(keys)?;
        let put = Put { present: (keys.len() - missing.len()) as u64, ..Put::default() };
        let mut begun = Begun { put, wanted: missing.len() as u64, taken: vec![], held: vec![] };
        if !missing.is_empty() {
            let took = self.change(|control| self.take(control, keys, &missing, &mut begun));
            if let Err(error) = took {
                self.give_up(begun);
                return Err(error);
            }
        }
        Ok(begun)
    }

    /// Fills the slots that were taken, and says so.
    pub(crate) fn finish(&self, mut begun: Begun, blocks: &[&[u8]]) -> Result<Put, PoolError> {
        self.fill(&mut begun.taken, blocks);
        self.end(begun)
    }

    /// Says that the blocks are there.
    fn end(&self, mut begun: Begun) -> Result<Put, PoolError> {
        if !begun.taken.is_empty() {
            match self.change(|control| Ok(self.publish(control, &begun.taken))) {
                Ok(stored) => begun.put.stored = stored,
                Err(error) => {
                    self.give_up(begun);
                    return Err(error);
                }
            }
        }
        let put = Put { refused: begun.wanted - begun.put.stored, ..begun.put };
        // What this process has written to the log is in memory before it lets go of an object.
        self.let_go(begun);
        Ok(put)
    }

    fn let_go(&self, begun: Begun) {
        begun.held.into_iter().for_each(|(_, object)| self.pool.close(object));
    }

    /// Which of the keys have no block yet, each once.
    fn missing(&self, keys: &[Key]) -> Result<Vec<usize>, PoolError> {
        let replica = self.polled()?;
        let mut seen = std::collections::HashSet::new();
        let is_missing = |index: &usize| {
            let key = self.own(&keys[*index]);
            replica.place(key).is_none() && seen.insert(key)
        };
        Ok((0..keys.len()).filter(is_missing).collect())
    }

    /// Frees slots that this process took and will not fill. Nobody else writes their lines meanwhile, unless this host was evicted.
    pub(crate) fn give_up(&self, begun: Begun) {
        let memory = self.pool.memory();
        if self.pool.expect_member().is_ok() {
            for taken in &begun.taken {
                line::store(memory, taken.entry, &Entry { state: State::Free, ..taken.line }.encode());
                memory.write_back(taken.entry, LINE);
            }
        }
        self.let_go(begun);
    }

    /// Copies the blocks to the slots that were taken for them; drops those whose memory fails.
    fn fill(&self, taken: &mut Vec<Taken>, blocks: &[&[u8]]) {
        let memory = self.pool.memory();
        taken.retain_mut(|taken| {
            let copied = self.copy_in(taken.block, blocks[taken.index]);
            match copied {
                Ok(sum) => taken.line.sum = sum,
                Err(fault) => tracing::warn!("a block of the cache {} cannot be written: {fault}", self.name),
            }
            copied.is_ok()
        });
        // SYNC: pairs with `Cache::copy`: the blocks are in memory before their lines are.
        memory.sfence();
    }

    /// Copies a block to the pool; its checksum, 0 where blocks have none.
    fn copy_in(&self, at: Offset, block: &[u8]) -> Result<u64, Fault> {
        let memory = self.pool.memory();
        memory.populate(at, block.len() as u64);
        if !self.verify {
            return memory.copy_in_nt(at, block).map(|()| 0);
        }
        let mut hash = XxHash3_64::new();
        for piece in pieces(block.len()) {
            hash.write(&block[piece.clone()]);
            memory.copy_in_nt(at + piece.start as u64, &block[piece])?;
        }
        Ok(hash.finish().max(1))
    }

    /// Says that the blocks are there; how many.
    // SYNC: pairs with `Cache::look` and `Cache::rescan`.
    fn publish(&self, control: &mut Control, taken: &[Taken]) -> u64 {
        let memory = self.pool.memory();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut records = vec![];
        for taken in taken {
            let live = Entry { state: State::Live, holder: 0, second: now.as_secs(), ..taken.line };
            line::store(memory, taken.entry, &live.encode());
            memory.write_back(taken.entry, LINE);
            records.push(Record { key: live.key, slot: taken.slot, generation: live.generation as u32 });
        }
        // SYNC: pairs with `Cache::poll` and the first look: whoever reads the log finds the lines.
        memory.sfence();
        control.puts = control.puts.wrapping_add(records.len() as u64);
        self.log(control, &records);
        records.len() as u64
    }
}
