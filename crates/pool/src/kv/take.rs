//! Which slots the next blocks get: those that come next and are free, or whose blocks make room; and the slabs that are made or given up for it.

use polder_mem::{LINE, Memory};

use super::put::{Begun, Taken};
use super::slabs::Slab;
use super::uses::Uses;
use super::wire::{Control, Entry, Slot, State, Turns};
use super::{Cache, Key};
use crate::deviation::Deviation;
use crate::pool::locked;
use crate::{PoolError, line};

/// Where a host goes on among its slabs: at a slot of the one that has this place in the order of their numbers.
#[derive(Clone, Copy, Debug, Default)]
struct Hand {
    place: usize,
    index: u32,
    /// How often it has come to the end since the call began.
    ends: u32,
    turns: Turns,
}

impl<M: Memory> Cache<M> {
    /// Takes slots for blocks, evicting the oldest that were not read since where there is no room. Once this returns, no reader takes what is written there.
    pub(super) fn take(
        &self,
        control: &mut Control,
        keys: &[Key],
        wanted: &[usize],
        begun: &mut Begun,
    ) -> Result<(), PoolError> {
        let mut known = locked(&self.own_slabs);
        if known.changes != Some(control.changes) {
            known.slabs = self.find_own(control)?;
        }
        let own = &mut known.slabs;
        let (at, last) = self.hand()?;
        let mut hand = self.hand_in(own, last)?;
        let of_this_size = own.iter().filter(|(_, slab)| slab.head.block == self.identity.block);
        let slots = of_this_size.map(|(_, slab)| u64::from(slab.head.slots)).sum();
        let mut uses = self.uses(wanted.len(), control.puts, slots);
        let mut wanted = wanted.to_vec();
        wanted.reverse();
        loop {
            let first = begun.taken.len();
            self.take_free(control, keys, &mut wanted, begun, (own, &mut hand, &mut uses))?;
            // SYNC: pairs with the second look of `Cache::get`: the slots are taken before a byte is written there, as `pinned` fences.
            let pinned = self.pinned(control)?;
            let (back, kept): (Vec<_>, Vec<_>) =
                begun.taken.split_off(first).into_iter().partition(|taken| pinned.has(taken.slot));
            begun.taken.extend(kept);
            back.iter().for_each(|taken| self.put_back(control, taken));
            if back.is_empty() {
                break;
            }
            wanted.extend(back.iter().rev().map(|taken| taken.index));
        }
        let next = match own.get(hand.place) {
            Some((number, slab)) if hand.index < slab.head.slots => Slot::new(*number, hand.index),
            Some((number, _)) => Slot::new(number + 1, 0),
            None => Slot::new(control.slabs, 0),
        };
        known.changes = Some(control.changes);
        self.set_hand(at, next, hand.turns);
        Ok(())
    }

    /// Takes the slots that come next and are free or make room, for the last of `wanted` first.
    fn take_free(
        &self,
        control: &mut Control,
        keys: &[Key],
        wanted: &mut Vec<usize>,
        Begun { taken, held, .. }: &mut Begun,
        (own, hand, uses): (&mut Vec<(u32, Slab)>, &mut Hand, &mut Uses),
    ) -> Result<(), PoolError> {
        while let Some(&index) = wanted.last() {
            let new = uses.new_one_for_want_of_older();
            let is_due = new.is_some();
            let next = match new {
                Some(new) => Some(new),
                None => self.next_slot(control, own, hand)?,
            };
            let Some((slot, slab)) = next else { break };
            if held.last().is_none_or(|(held, _)| *held != slot.slab()) {
                let Some(object) = self.hold_slab(self.pool.member().host, slot.slab(), &slab)? else {
                    // It was removed.
                    own.retain(|(number, _)| *number != slot.slab());
                    continue;
                };
                held.push((slot.slab(), object));
            }
            if hand.ends > 1 {
                // All have been passed once.
                uses.spare_no_more();
            }
            let is_spared = |words: &Entry| match is_due {
                true => Ok(false),
                false => self.is_spared(uses, words, hand.turns, (slot, &slab)),
            };
            let block = (index, self.own(&keys[index]));
            taken.extend(self.take_slot(control, slot, &slab, block, is_spared)?);
            if taken.last().is_some_and(|taken| taken.index == index) {
                wanted.pop();
            }
        }
        Ok(())
    }

    /// Where among its slabs this host goes on.
    fn hand_in(&self, own: &[(u32, Slab)], last: Option<(Slot, Turns)>) -> Result<Hand, PoolError> {
        let Some((last, turns)) = last else { return self.behind_the_last(own) };
        let place = own.partition_point(|(number, _)| *number < last.slab());
        let is_there = own.get(place).is_some_and(|(number, _)| *number == last.slab());
        Ok(Hand { place, index: if is_there { last.index() } else { 0 }, ends: 0, turns })
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
                    None if hand.ends > 1 || own.is_empty() => return Ok(None),
                    None => {
                        let turns = Turns { this: control.puts as u32, before: hand.turns.this };
                        *hand = Hand { place: 0, index: 0, ends: hand.ends + 1, turns };
                    }
                },
            }
            self.share(control, own, hand.place)?;
        }
    }

    /// This host's slabs, in the order of their numbers.
    pub(super) fn find_own(&self, control: &Control) -> Result<Vec<(u32, Slab)>, PoolError> {
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

    /// Gives up the slab that would come next, where another host wants one and this host has more than its part.
    pub(super) fn give_to_others(&self) -> Result<(), PoolError> {
        self.change(|control| {
            let mut known = locked(&self.own_slabs);
            known.slabs = self.find_own(control)?;
            let (_, last) = self.hand()?;
            let place = self.hand_in(&known.slabs, last)?.place;
            let place = if place < known.slabs.len() { place } else { 0 };
            self.share(control, &mut known.slabs, place)?;
            known.changes = Some(control.changes);
            Ok(())
        })
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
                    behind = Hand { place, index: index + 1, ..Hand::default() };
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
        (index, key): (usize, u128),
        is_spared: impl FnOnce(&Entry) -> Result<bool, PoolError>,
    ) -> Result<Option<Taken>, PoolError> {
        let (memory, me) = (self.pool.memory(), &self.pool.local);
        let at = slab.entry(slot.index());
        let (words, sum) = line::load_torn(memory, at)?;
        let old = (sum == line::checksum(&words)).then(|| Entry::decode(&words)).flatten();
        let mut before = None;
        match old {
            Some(Entry { state: State::Reserved, holder, .. }) if !me.is_gone(memory, holder) => {
                return Ok(None);
            }
            Some(block @ Entry { state: State::Live, .. }) => {
                if is_spared(&block)? {
                    return Ok(None);
                }
                control.evictions = control.evictions.wrapping_add(1);
                before = Some(words);
            }
            _ => {}
        }
        let line = Entry {
            key,
            generation: Entry::next_generation(&words),
            state: State::Reserved,
            identity: self.identity.tag(),
            puts: control.puts as u32,
            bytes: self.identity.block,
            host: self.pool.member().host,
            slab: slot.slab(),
            sum: 0,
            holder: me.holder(),
            second: 0,
        };
        if !Deviation::TakesInSilence.is_on() {
            line::store(memory, at, &line.encode());
            memory.write_back(at, LINE);
        }
        Ok(Some(Taken { index, slot, entry: at, block: slab.block(slot.index()), line, before }))
    }
}
