//! How blocks are written: slots are taken, blocks copied, lines published, records logged.

use polder_mem::{LINE, Memory, Offset};
use xxhash_rust::xxh3::xxh3_64;

use super::slabs::Slab;
use super::uses::Uses;
use super::wire::{Control, Entry, Record, Slot, State};
use super::{Cache, Key};
use crate::deviation::Deviation;
use crate::object::Object;
use crate::pool::locked;
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

/// Where a host goes on among its slabs: at a slot of the one that has this place in the order of their numbers.
#[derive(Clone, Copy, Debug, Default)]
struct Hand {
    place: usize,
    index: u32,
    /// How often it has come to the end since the call began.
    turns: u32,
}

/// A put whose slots are taken.
#[derive(Debug)]
pub(crate) struct Begun {
    put: Put,
    /// Blocks that are not there yet.
    wanted: u64,
    taken: Vec<Taken>,
    /// The slabs that they are in, held open.
    held: Vec<(u32, Object)>,
}

/// A slot that was taken for a block.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// Which of the blocks.
    index: usize,
    slot: Slot,
    entry: Offset,
    block: Offset,
    /// What its line says.
    line: Entry,
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
        if !begun.taken.is_empty() {
            self.fill(&mut begun.taken, blocks);
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
        let mut replica = locked(&self.replica);
        self.poll(&mut replica)?;
        let mut seen = std::collections::HashSet::new();
        let is_missing = |index: &usize| {
            let key = self.own(&keys[*index]);
            replica.place(key).is_none() && seen.insert(key)
        };
        Ok((0..keys.len()).filter(is_missing).collect())
    }

    /// Takes slots for blocks, evicting the oldest that were not read since where there is no room. Once this returns, no reader takes what is written there.
    fn take(
        &self,
        control: &mut Control,
        keys: &[Key],
        wanted: &[usize],
        Begun { taken, held, .. }: &mut Begun,
    ) -> Result<(), PoolError> {
        let mut known = locked(&self.own_slabs);
        if known.changes != Some(control.changes) {
            known.slabs = self.find_own(control)?;
        }
        let own = &mut known.slabs;
        let (at, last) = self.hand()?;
        let mut hand = self.hand_in(own, last)?;
        let mut uses = self.uses(wanted.len());
        let mut wanted = wanted.iter().copied().peekable();
        while let Some(&index) = wanted.peek() {
            let Some((slot, slab)) = self.next_slot(control, own, &mut hand)? else { break };
            if held.last().is_none_or(|(held, _)| *held != slot.slab()) {
                let Some(object) = self.hold_slab(slot.slab(), &slab)? else {
                    // It was removed.
                    own.remove(hand.place);
                    continue;
                };
                held.push((slot.slab(), object));
            }
            if hand.turns > 1 {
                // All have been passed once.
                uses.spare_no_more();
            }
            if let Some(line) = self.take_slot(control, slot, &slab, self.own(&keys[index]), &mut uses)? {
                let (entry, block) = (slab.entry(slot.index()), slab.block(slot.index()));
                taken.push(Taken { index, slot, entry, block, line });
                wanted.next();
            }
        }
        // SYNC: pairs with the second look of `Cache::get`: the slots are taken before a byte is written there.
        self.pool.memory().sfence();
        let next = match own.get(hand.place) {
            Some((number, slab)) if hand.index < slab.head.slots => Slot::new(*number, hand.index),
            Some((number, _)) => Slot::new(number + 1, 0),
            None => Slot::new(control.slabs, 0),
        };
        known.changes = Some(control.changes);
        self.set_hand(at, next);
        Ok(())
    }

    /// Where among its slabs this host goes on.
    fn hand_in(&self, own: &[(u32, Slab)], last: Option<Slot>) -> Result<Hand, PoolError> {
        let Some(last) = last else { return self.behind_the_last(own) };
        let place = own.partition_point(|(number, _)| *number < last.slab());
        let is_there = own.get(place).is_some_and(|(number, _)| *number == last.slab());
        Ok(Hand { place, index: if is_there { last.index() } else { 0 }, turns: 0 })
    }

    /// The slot that comes next, in a new slab where all have been passed and there is room; nothing after two turns.
    fn next_slot(
        &self,
        control: &mut Control,
        own: &mut Vec<(u32, Slab)>,
        hand: &mut Hand,
    ) -> Result<Option<(Slot, Slab)>, PoolError> {
        loop {
            match own.get(hand.place) {
                Some(&(number, slab))
                    if slab.head.block == self.identity.block && hand.index < slab.head.slots =>
                {
                    hand.index += 1;
                    return Ok(Some((Slot::new(number, hand.index - 1), slab)));
                }
                Some(_) => *hand = Hand { place: hand.place + 1, index: 0, ..*hand },
                None => match self.make_room(control, own)? {
                    Some(place) => {
                        *hand = Hand { place, index: 0, ..*hand };
                        continue;
                    }
                    None if hand.turns > 1 || own.is_empty() => return Ok(None),
                    None => *hand = Hand { place: 0, index: 0, turns: hand.turns + 1 },
                },
            }
            self.share(control, own, hand.place)?;
        }
    }

    /// This host's slabs, in the order of their numbers.
    fn find_own(&self, control: &Control) -> Result<Vec<(u32, Slab)>, PoolError> {
        let slab = |number| Ok(self.slab(self.pool.member().host, number)?.map(|slab| (number, slab)));
        self.slab_numbers(control.slabs).filter_map(|number| slab(number).transpose()).collect()
    }

    /// Makes a slab for blocks of this size, in the place of one for others where this host has none for these; its place.
    fn make_room(
        &self,
        control: &mut Control,
        own: &mut Vec<(u32, Slab)>,
    ) -> Result<Option<usize>, PoolError> {
        let made = self.grow(control, own)?;
        if made.is_some() || own.iter().any(|(_, slab)| slab.head.block == self.identity.block) {
            return Ok(made);
        }
        for place in 0..own.len() {
            let (number, slab) = own[place];
            if self.give_up_slab(control, number, &slab)? {
                own.remove(place);
                return self.grow(control, own);
            }
        }
        Ok(None)
    }

    /// Gives up the slab that comes now, which has the oldest blocks, where another host wants one and this host has more than its part.
    fn share(
        &self,
        control: &mut Control,
        own: &mut Vec<(u32, Slab)>,
        place: usize,
    ) -> Result<(), PoolError> {
        let Some(&(number, slab)) = own.get(place) else { return Ok(()) };
        let shares = self.shares(control, slab.head.bytes())?;
        if shares.wanted && control.claimed > shares.fair && self.give_up_slab(control, number, &slab)? {
            own.remove(place);
        }
        Ok(())
    }

    /// Where a host goes on that does not know where it was: behind the last slot that holds a block, so that none is evicted while there
    /// is room.
    fn behind_the_last(&self, slabs: &[(u32, Slab)]) -> Result<Hand, PoolError> {
        let mut behind = Hand::default();
        for (place, (_, slab)) in slabs.iter().enumerate() {
            let slots = if slab.head.block == self.identity.block { slab.head.slots } else { 0 };
            for index in 0..slots {
                let words = line::load(self.pool.memory(), slab.entry(index))?;
                let entry = words.and_then(|words| Entry::decode(&words));
                if entry.is_some_and(|entry| entry.state == State::Live) {
                    behind = Hand { place, index: index + 1, turns: 0 };
                }
            }
        }
        Ok(behind)
    }

    /// Takes a slot, unless a process that lives has it, or its block is one to spare.
    fn take_slot(
        &self,
        control: &mut Control,
        slot: Slot,
        slab: &Slab,
        key: u128,
        uses: &mut Uses,
    ) -> Result<Option<Entry>, PoolError> {
        let (memory, me) = (self.pool.memory(), &self.pool.local);
        let at = slab.entry(slot.index());
        let (words, sum) = line::load_torn(memory, at)?;
        let old = (sum == line::checksum(&words)).then(|| Entry::decode(&words)).flatten();
        match old.map(|old| old.state) {
            Some(State::Reserved) if old.is_some_and(|old| !me.is_gone(memory, old.holder)) => {
                return Ok(None);
            }
            Some(State::Live) => {
                if self.is_spared(uses, slab, slot.index())? {
                    return Ok(None);
                }
                control.evictions = control.evictions.wrapping_add(1);
            }
            _ => {}
        }
        let entry = Entry {
            key,
            generation: Entry::next_generation(&words),
            state: State::Reserved,
            identity: self.identity.tag(),
            bytes: self.identity.block,
            host: self.pool.member().host,
            slab: slot.slab(),
            sum: 0,
            holder: me.holder(),
        };
        if !Deviation::TakesInSilence.is_on() {
            line::store(memory, at, &entry.encode());
            memory.write_back(at, LINE);
        }
        Ok(Some(entry))
    }

    /// Frees slots that this process took and will not fill. Nobody else writes their lines meanwhile, unless this host was evicted.
    fn give_up(&self, begun: Begun) {
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
            let block = blocks[taken.index];
            if self.verify {
                taken.line.sum = xxh3_64(block).max(1);
            }
            let copied = memory.copy_in_nt(taken.block, block);
            if let Err(fault) = copied {
                tracing::warn!("a block of the cache {} cannot be written: {fault}", self.name);
            }
            copied.is_ok()
        });
        // SYNC: pairs with `Cache::copy`: the blocks are in memory before their lines are.
        memory.sfence();
    }

    /// Says that the blocks are there; how many.
    // SYNC: pairs with `Cache::look` and `Cache::rescan`.
    fn publish(&self, control: &mut Control, taken: &[Taken]) -> u64 {
        let memory = self.pool.memory();
        let mut records = vec![];
        for taken in taken {
            let live = Entry { state: State::Live, holder: 0, ..taken.line };
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
