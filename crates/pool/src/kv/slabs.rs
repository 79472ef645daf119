//! The slabs of a host: how they are made within the budget, and given up where another host has less than its part.

use std::ops::Range;

use polder_mem::{LINE, Memory, Offset};

use super::wire::{Control, Entry, MAX_SLABS, MAX_SLOTS, Record, SLAB_IS_GONE, SlabHead, Slot, State};
use super::{Cache, HEADER_BYTES};
use crate::object::{self, InitialContents, Object};
use crate::{PoolError, line};

/// Blocks of a slab, where that many take more than a slab of the usual size.
const FEW_BLOCKS: u64 = 64;

/// A slab, whose object need not be held for reading: whoever reads there looks twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slab {
    at: Offset,
    pub(super) head: SlabHead,
}

impl Slab {
    /// The line of a slot.
    pub(super) const fn entry(&self, index: u32) -> Offset {
        self.at.lines(1 + index as u64)
    }

    /// The bytes of a slot's block.
    pub(super) fn block(&self, index: u32) -> Offset {
        self.at.lines(1 + u64::from(self.head.slots)) + u64::from(index) * self.head.stride()
    }
}

/// What all hosts say of their parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Bytes that all have claimed.
    claimed: u64,
    /// Whether another host wants a slab that nobody can make.
    pub(super) wanted: bool,
    /// What each of the hosts that have or want slabs may keep when others want some.
    pub(super) fair: u64,
}

impl<M: Memory> Cache<M> {
    /// The numbers of so many slabs: whatever a line says, no more are there than lines.
    pub(super) fn slab_numbers(&self, slabs: u32) -> Range<u32> {
        0..u64::from(slabs).min(self.pool.memory().bytes() / LINE) as u32
    }

    /// A slab of a host; nothing when there is none, or it is being made.
    pub(super) fn slab(&self, host: u16, number: u32) -> Result<Option<Slab>, PoolError> {
        let Some(object) = self.pool.open_if_there(&self.slab_name(host, number))? else { return Ok(None) };
        let slab = self.slab_in(&object);
        self.pool.close(object);
        slab
    }

    fn slab_in(&self, object: &Object) -> Result<Option<Slab>, PoolError> {
        if object.bytes() < LINE {
            return Ok(None);
        }
        let memory = self.pool.memory();
        if object.owner() != self.pool.member().host {
            memory.invalidate(object.at(), LINE);
        }
        // SYNC: pairs with `fill_slab`.
        memory.fence_invalidations();
        let words = line::load(memory, object.at())?;
        let head = words.and_then(|words| SlabHead::decode(&words, object.generation(), self.stamp()));
        Ok(head.filter(|head| head.bytes() <= object.bytes()).map(|head| Slab { at: object.at(), head }))
    }

    /// The object of a slab, held open; nothing when it is no longer that slab's.
    pub(super) fn hold_slab(&self, host: u16, number: u32, slab: &Slab) -> Result<Option<Object>, PoolError> {
        let name = self.slab_name(host, number);
        let Some(object) = self.pool.open_if_there(&name)? else { return Ok(None) };
        match self.slab_in(&object) {
            Ok(Some(found)) if found == *slab => Ok(Some(object)),
            found => {
                self.pool.close(object);
                found.map(|_| None)
            }
        }
    }

    /// What a new slab for this cache's blocks is like.
    fn new_head(&self) -> SlabHead {
        let one = LINE + u64::from(self.identity.block).next_multiple_of(LINE);
        let usual = self.geometry.slab_bytes.saturating_sub(HEADER_BYTES + LINE) / one;
        let few = FEW_BLOCKS.min(self.geometry.budget / 8 / one);
        let slots = usual.max(few).clamp(1, MAX_SLOTS) as u32;
        SlabHead { block: self.identity.block, slots, first_count: 0 }
    }

    /// Makes a slab and puts it among this host's own, which are in the order of their numbers; its place there, unless the budget or
    /// the pool has no room. Two hosts that ask at once may both be refused, and never both be given the last room.
    pub(super) fn grow(
        &self,
        control: &mut Control,
        own: &mut Vec<(u32, Slab)>,
    ) -> Result<Option<usize>, PoolError> {
        let (mut head, host) = (self.new_head(), self.pool.member().host);
        head.first_count = self.first_count(own, &head);
        let place = own.iter().zip(0..).position(|((number, _), free)| *number != free).unwrap_or(own.len());
        let number = place as u32;
        if number == MAX_SLABS || head.bytes() > self.geometry.budget {
            return Ok(None);
        }
        self.expect_there()?;
        control.claimed = control.claimed.saturating_add(head.bytes());
        self.publish_control(control);
        let shares = self.shares(control, head.bytes())?;
        // What another host waits for is not taken by one that has its part.
        let is_first = control.claimed == head.bytes();
        let may_have = !shares.wanted || is_first || control.claimed <= shares.fair;
        if !may_have || shares.claimed > self.geometry.budget {
            self.do_without(control, &head, &shares);
            return Ok(None);
        }
        match self.pool.create_filled(&self.slab_name(host, number), head.bytes(), InitialContents::Nothing) {
            Ok(object) => {
                control.slabs = control.slabs.max(number + 1);
                control.changes = control.changes.wrapping_add(1);
                (control.wants, control.gone, control.asked) = (false, false, 0);
                let filled = self.fill_slab(control, &object, head);
                own.insert(place, (number, Slab { at: object.at(), head }));
                self.pool.close(object);
                filled.map(|()| Some(place))
            }
            Err(
                error @ (PoolError::Full { .. } | PoolError::DirectoryFull { .. } | PoolError::Quota { .. }),
            ) => {
                tracing::debug!("the cache {} gets no further slab: {error}", self.name);
                self.do_without(control, &head, &shares);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes back what was claimed for a slab, and asks others for one where this host has less than its part.
    fn do_without(&self, control: &mut Control, head: &SlabHead, shares: &Shares) {
        let would_have = control.claimed;
        control.claimed = control.claimed.saturating_sub(head.bytes());
        control.wants = control.claimed == 0 || would_have <= shares.fair;
        control.asked = head.bytes();
        self.publish_control(control);
        if control.wants {
            self.log(control, &[Record { key: 0, slot: Slot::NONE, generation: SLAB_IS_GONE }]);
        }
    }

    /// What the other hosts say, and this one in `control`; a slab of `bytes` may be on its way in a line that is half written.
    pub(super) fn shares(&self, control: &Control, bytes: u64) -> Result<Shares, PoolError> {
        let (mut claimed, mut wanted, mut hosts) = (control.claimed, false, 1);
        for host in (0..self.geometry.hosts).filter(|host| *host != self.pool.member().host) {
            let theirs = match self.control_of(host)? {
                Some(other) => {
                    wanted |= other.wants;
                    hosts += u64::from(other.claimed > 0 || other.wants);
                    other.claimed
                }
                None if self.is_empty(host)? => 0,
                // It is writing its line, or died while it did: it has claimed what it has, and one slab more at most.
                None => self.listed_bytes(host)?.saturating_add(self.geometry.slab_bytes.max(bytes)),
            };
            claimed = claimed.saturating_add(theirs);
        }
        Ok(Shares { claimed, wanted, fair: self.geometry.budget / hosts })
    }

    /// Bytes of all slabs of a host, those included that are being made.
    fn listed_bytes(&self, host: u16) -> Result<u64, PoolError> {
        let listed = self.pool.list(&self.slab_prefix(host))?;
        Ok(listed.iter().fold(0, |sum, object| sum.saturating_add(object.bytes)))
    }

    /// Whether a slab of another host has blocks, once it is there.
    #[cfg(feature = "model")]
    pub(crate) fn has_blocks(&self, object: &Object) -> Result<bool, PoolError> {
        let Some(slab) = self.slab_in(object)? else { return Ok(false) };
        let memory = self.pool.memory();
        memory.invalidate(slab.entry(0), u64::from(slab.head.slots) * LINE);
        // SYNC: pairs with `fill_slab`.
        memory.fence_invalidations();
        for index in 0..slab.head.slots {
            let entry = line::load(memory, slab.entry(index))?.and_then(|words| Entry::decode(&words));
            if entry.is_some_and(|entry| entry.state == State::Live) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As [`Cache::grow`], for the model.
    #[cfg(feature = "model")]
    pub(crate) fn make_slab(&self) -> Result<(), PoolError> {
        self.change(|control| self.grow(control, &mut vec![]).map(|_| ()))
    }

    /// Says that a slab is there, and makes it one. Whoever reads its head finds no lines of an earlier object: the fence behind the
    /// control line comes between. Nobody misses a block in it, because another fence comes before its record.
    // SYNC: pairs with `slab_in`.
    fn fill_slab(&self, control: &Control, object: &Object, head: SlabHead) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        let lines = (1 + u64::from(head.slots)) * LINE;
        object::fill(memory, object.at(), lines, InitialContents::Zeros)?;
        self.publish_control(control);
        line::store(memory, object.at(), &head.encode(object.generation(), self.stamp()));
        memory.write_back(object.at(), LINE);
        Ok(())
    }

    /// Gives up a slab with its blocks, unless a process that lives is writing there or has pinned one; whether it did. No reader takes
    /// what is written there from then on.
    pub(super) fn give_up_slab(
        &self,
        control: &mut Control,
        number: u32,
        slab: &Slab,
    ) -> Result<bool, PoolError> {
        let (memory, me) = (self.pool.memory(), &self.pool.local);
        let (mut live, mut lines) = (vec![], vec![]);
        for index in 0..slab.head.slots {
            let (words, sum) = line::load_torn(memory, slab.entry(index))?;
            let entry = (sum == line::checksum(&words)).then(|| Entry::decode(&words)).flatten();
            match entry.map(|entry| (entry.state, entry.holder)) {
                Some((State::Reserved, holder)) if !me.is_gone(memory, holder) => return Ok(false),
                Some((State::Live, _)) => live.push((index, words)),
                _ => {}
            }
            let generation = Entry::next_generation(&words);
            lines.push(Entry { generation, ..Entry::default() }.encode());
        }
        if !self.condemn(control, (number, slab), &lines, &live)? {
            return Ok(false);
        }
        control.evictions = control.evictions.wrapping_add(live.len() as u64);
        // An object's lines are in memory before its bytes are another's: the second look of `Cache::get` meets them.
        self.remove_object(&self.slab_name(self.pool.member().host, number))?;
        control.claimed = control.claimed.saturating_sub(slab.head.bytes());
        control.changes = control.changes.wrapping_add(1);
        let gone = Record { key: 0, slot: Slot::new(number, 0), generation: SLAB_IS_GONE };
        self.log(control, &[gone]);
        self.publish_control(control);
        Ok(true)
    }
}
