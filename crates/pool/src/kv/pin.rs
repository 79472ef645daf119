//! Pins: blocks that a reader uses where they lie, for as long as it likes, because no other block comes in their place.
//!
//! A pin is announced as an open object is ([`crate::opens`]). The reader announces the slot, and then looks at its line once more. The
//! owner says in the line that the slot is taken, and then looks at the announcements. So at least one of the two sees the other. Where the owner
//! finds a pin, it says again what stood in the line. What a dead process has pinned is free once its host, or the keeper, has cleared
//! its announcements.

use std::fmt;
use std::sync::Arc;

use polder_mem::{LINE, Memory, Offset};

use super::get::Read;
use super::put::Taken;
use super::slabs::Slab;
use super::wire::{Control, Entry, Slot, State, tag_of};
use super::{Cache, Key};
use crate::deviation::Deviation;
use crate::line::Words;
use crate::object::Object;
use crate::opens::{Announced, Announcement, Opens, PinnedSlot};
use crate::pool::locked;
use crate::{Pool, PoolError, line};

/// Blocks that stay where they are until this is dropped, for readers that do not copy.
pub struct Pin<M: Memory> {
    pool: Arc<Pool<M>>,
    blocks: Vec<Option<PinnedBlock>>,
    /// The slabs that they are in, held open.
    slabs: Vec<(u16, u32, Object)>,
}

#[derive(Debug)]
struct PinnedBlock {
    at: Offset,
    /// The announcement word that pins it.
    held: u32,
}

impl<M: Memory> Pin<M> {
    /// Where the block of the key with this index lies; nothing where it was not there.
    #[must_use]
    pub fn block(&self, index: usize) -> Option<Offset> {
        self.blocks.get(index)?.as_ref().map(|block| block.at)
    }

    /// Holds the slab of a block open and reserves a word for the block's slot; whether the slab is still there.
    fn reserve(&mut self, cache: &Cache<M>, read: &Read) -> Result<bool, PoolError> {
        let (host, slot) = (read.place.host, read.place.slot);
        let is_held = self.slabs.iter().any(|(of, number, _)| (*of, *number) == (host, slot.slab()));
        if !is_held {
            let Some(object) = cache.hold_slab(host, slot.slab(), &read.slab)? else { return Ok(false) };
            self.slabs.push((host, slot.slab(), object));
        }
        let held = Opens(cache.pool.directory().site).reserve()?;
        self.blocks[read.index] = Some(PinnedBlock { at: read.block, held });
        Ok(true)
    }

    /// Whether nobody has given up a slab whose block is pinned.
    #[cfg(feature = "model")]
    pub(crate) fn is_kept(&self) -> bool {
        let is_live = |slab: &Object| self.pool.is_live(&slab.name, slab.owner, slab.generation);
        let mut slabs = self.slabs.iter().filter(|_| self.blocks.iter().any(Option::is_some));
        slabs.all(|(_, _, slab)| is_live(slab).expect("the model has no faults"))
    }

    fn release(&mut self, index: usize) {
        if let Some(block) = self.blocks[index].take() {
            Opens(self.pool.directory().site).release(block.held);
        }
    }
}

impl<M: Memory> fmt::Debug for Pin<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

impl<M: Memory> Drop for Pin<M> {
    fn drop(&mut self) {
        (0..self.blocks.len()).for_each(|index| self.release(index));
        self.slabs.drain(..).for_each(|(_, _, object)| self.pool.close(object));
    }
}

/// Blocks that are about to be pinned.
pub(crate) struct Reserved<M: Memory> {
    pin: Pin<M>,
    reads: Vec<Read>,
}

/// Slots of this host that processes have pinned.
pub(super) struct Pinned {
    cache: u16,
    host: u16,
    announced: Announced,
}

impl Pinned {
    pub(super) fn has(&self, slot: Slot) -> bool {
        let of = PinnedSlot { cache: self.cache, owner: self.host, slot: slot.word() };
        self.announced.holders(Announcement::pin(of)) != 0 && !Deviation::IgnoresPins.is_on()
    }
}

impl<M: Memory> Cache<M> {
    /// Keeps the blocks of these keys where they are, for whoever reads them there: they are not evicted while the [`Pin`] is held. Each takes
    /// one of the announcements that a process has for open objects, and so does each slab. Checksums are not looked at.
    ///
    /// # Errors
    /// [`PoolError::TooManyOpen`], [`PoolError::Evicted`], [`PoolError::Memory`]; [`PoolError::Timeout`] when another process of this
    /// host does not let go of a lock.
    pub fn pin(&self, keys: &[Key]) -> Result<Pin<M>, PoolError> {
        let reserved = self.reserve(keys)?;
        self.announce(reserved, keys)
    }

    /// Finds the blocks, and has all that is needed to pin them.
    pub(crate) fn reserve(&self, keys: &[Key]) -> Result<Reserved<M>, PoolError> {
        self.pool.expect_member()?;
        self.say_that_it_pins()?;
        let mut pin =
            Pin { pool: Arc::clone(&self.pool), blocks: keys.iter().map(|_| None).collect(), slabs: vec![] };
        let mut reads = vec![];
        for read in self.find(keys)? {
            if pin.reserve(self, &read)? {
                reads.push(read);
            }
        }
        Ok(Reserved { pin, reads })
    }

    /// Announces the slots, and keeps those whose blocks are still there.
    pub(crate) fn announce(&self, reserved: Reserved<M>, keys: &[Key]) -> Result<Pin<M>, PoolError> {
        let Reserved { mut pin, mut reads } = reserved;
        let (memory, cache) = (self.pool.memory(), tag_of(self.stamp()));
        for Read { index, place, .. } in &reads {
            let held = pin.blocks[*index].as_ref().map(|block| block.held);
            let of = PinnedSlot { cache, owner: place.host, slot: place.slot.word() };
            let announcement = Announcement::pin(of);
            held.into_iter().for_each(|held| Opens(self.pool.directory().site).announce(held, announcement));
        }
        // SYNC: pairs with `Cache::take` and `Cache::give_up_slab`: the pins are announced before the lines are looked at.
        memory.mfence();
        self.look(&mut reads, keys)?;
        for read in reads.iter().filter(|read| self.is_others(read.place)) {
            memory.invalidate(read.block, self.identity.block.into());
        }
        // SYNC: pairs with `Cache::publish`: the blocks were in memory before their lines were.
        memory.fence_invalidations();
        let mut is_there = vec![false; keys.len()];
        for read in &reads {
            is_there[read.index] = true;
            self.touch(read.place.host, read.count);
        }
        (0..keys.len()).filter(|index| !is_there[*index]).for_each(|index| pin.release(index));
        let mut replica = locked(&self.replica);
        let (hits, misses) = (reads.len() as u64, (keys.len() - reads.len()) as u64);
        replica.counts.hits += hits;
        replica.counts.misses += misses;
        drop(replica);
        self.count(hits, misses);
        Ok(pin)
    }

    /// Has the owners of slots look at the announcements of this host from now on.
    fn say_that_it_pins(&self) -> Result<(), PoolError> {
        let mut pins = locked(&self.pins);
        if !*pins {
            self.change(|control| {
                control.pins = true;
                // SYNC: pairs with `pinners`: this is in memory before anything is announced.
                self.publish_control(control);
                Ok(())
            })?;
            *pins = true;
        }
        Ok(())
    }

    /// Says in the lines of a slab's slots that they hold no block, unless one is pinned: then the lines of those that did say so again.
    /// Whether they hold none.
    pub(super) fn condemn(
        &self,
        control: &Control,
        (number, slab): (u32, &Slab),
        lines: &[Words],
        live: &[(u32, Words)],
    ) -> Result<bool, PoolError> {
        let memory = self.pool.memory();
        for (index, words) in (0..).zip(lines) {
            line::store(memory, slab.entry(index), words);
            memory.write_back(slab.entry(index), LINE);
        }
        let pinned = self.pinned(control)?;
        if !(0..slab.head.slots).any(|index| pinned.has(Slot::new(number, index))) {
            return Ok(true);
        }
        for (index, words) in live {
            line::store(memory, slab.entry(*index), words);
            memory.write_back(slab.entry(*index), LINE);
        }
        Ok(false)
    }

    /// Says again what stood in the line of a slot that is pinned: nothing was written there.
    pub(super) fn put_back(&self, control: &mut Control, taken: &Taken) {
        if taken.before.is_some() {
            control.evictions = control.evictions.wrapping_sub(1);
        }
        let free = || Entry { state: State::Free, ..taken.line }.encode();
        line::store(self.pool.memory(), taken.entry, &taken.before.unwrap_or_else(free));
        self.pool.memory().write_back(taken.entry, LINE);
    }

    /// Which slots of this host are pinned. The caller has said in their lines that they are taken.
    pub(super) fn pinned(&self, control: &Control) -> Result<Pinned, PoolError> {
        // SYNC: pairs with `Cache::announce`: of a reader that announces and looks again, and this, at least one sees the other.
        self.pool.memory().mfence();
        let host = self.pool.member().host;
        let announced = match self.pinners(control)? {
            0 => Announced::default(),
            pinners => Opens(self.pool.directory().site).collect(pinners)?,
        };
        Ok(Pinned { cache: tag_of(self.stamp()), host, announced })
    }

    /// Hosts with processes that have pinned blocks or may have, one bit each.
    fn pinners(&self, control: &Control) -> Result<u64, PoolError> {
        let (memory, hosts) = (self.pool.memory(), self.geometry.hosts);
        let me = self.pool.member().host;
        for host in (0..hosts).filter(|host| *host != me) {
            memory.invalidate(self.control_at(host), LINE);
        }
        // SYNC: pairs with `Cache::say_that_it_pins`.
        memory.fence_invalidations();
        let mut pinners = u64::from(control.pins) << me;
        for host in (0..hosts).filter(|host| *host != me) {
            let theirs = line::load(memory, self.control_at(host))?.map(|words| Control::decode(&words));
            let pins = match theirs {
                Some(Some(control)) => control.pins,
                // It has never said anything, or is writing its line.
                Some(None) => !self.is_empty(host)?,
                None => true,
            };
            pinners |= u64::from(pins) << host;
        }
        Ok(pinners)
    }
}
