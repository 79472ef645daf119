//! A process's own index of a cache: where the blocks of all hosts lie, as slots and logs have said so far.

use std::collections::HashMap;

use polder_mem::{LINE, Memory};

use super::Cache;
use super::slabs::Slab;
use super::wire::{Entry, LogLine, SLAB_IS_GONE, Slot, State};
use crate::object::Object;
#[cfg(feature = "model")]
use crate::pool::locked;
use crate::{PoolError, line};

/// How many lines of a log are read behind one fence once there is news.
const AHEAD: u64 = 16;
/// How often a call reads all slots of a host anew because it has fallen behind: the next call goes on.
const RESCANS: u32 = 2;

/// Where a block was when its host last said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: u16,
    pub(super) slot: Slot,
    /// The low bits of the generation.
    pub(super) generation: u32,
}

/// What is known of a host.
#[derive(Debug, Default)]
struct Peer {
    /// Its object, once it is there.
    part: Option<Object>,
    /// The sequence number of the line of its log that is read next.
    cursor: u64,
    slabs: Vec<Option<Slab>>,
    keys: HashMap<Slot, u128>,
}

/// Counts of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Copies that were made void by the second look, or by a checksum.
    pub(super) void: u64,
}

/// The index.
#[derive(Debug)]
pub(super) struct Replica {
    places: HashMap<u128, Place>,
    peers: Vec<Peer>,
    pub(super) counts: Counts,
}

impl Replica {
    pub(super) fn new(hosts: u16) -> Self {
        let peers = (0..hosts).map(|_| Peer::default()).collect();
        Self { places: HashMap::new(), peers, counts: Counts::default() }
    }

    /// Where the block of a key is.
    pub(super) fn place(&self, key: u128) -> Option<Place> {
        self.places.get(&key).copied()
    }

    /// How many blocks are known.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// How many slots of a host are known to hold a block.
    pub(super) fn blocks_of(&self, host: u16) -> u64 {
        self.peers[usize::from(host)].keys.len() as u64
    }

    /// Forgets a place where a block was not, unless the key has another by now.
    pub(super) fn forget(&mut self, key: u128, place: Place) {
        if self.places.get(&key) == Some(&place) {
            self.places.remove(&key);
        }
    }

    /// A slab was given up: its number may be another's by now.
    fn forget_slab(&mut self, host: u16, number: u32) {
        if let Some(slab) = self.peers[usize::from(host)].slabs.get_mut(number as usize) {
            *slab = None;
        }
        let keys = self.peers[usize::from(host)].keys.keys();
        let gone: Vec<_> = keys.filter(|slot| slot.slab() == number).copied().collect();
        gone.into_iter().for_each(|slot| self.set(host, slot, None));
    }

    /// Keeps where a slab of a host is.
    fn know(&mut self, host: u16, number: u32, slab: Option<Slab>) {
        let slabs = &mut self.peers[usize::from(host)].slabs;
        if slabs.len() <= number as usize {
            slabs.resize(number as usize + 1, None);
        }
        slabs[number as usize] = slab;
    }

    /// The objects that it holds open.
    pub(super) fn parts(&self) -> impl Iterator<Item = &Object> {
        self.peers.iter().filter_map(|peer| peer.part.as_ref())
    }

    /// A slot of a host holds this block from now on, or none.
    fn set(&mut self, host: u16, slot: Slot, holds: Option<(u128, u32)>) {
        let keys = &mut self.peers[usize::from(host)].keys;
        let before = match holds {
            Some((key, _)) => keys.insert(slot, key),
            None => keys.remove(&slot),
        };
        if let Some(before) = before
            && self.places.get(&before).is_some_and(|place| (place.host, place.slot) == (host, slot))
        {
            self.places.remove(&before);
        }
        if let Some((key, generation)) = holds {
            // Of two blocks of one key the one that was heard of last counts: both are right.
            self.places.insert(key, Place { host, slot, generation });
        }
    }
}

impl<M: Memory> Cache<M> {
    /// Takes up what every host has put since the last call: one line for each host where there is nothing new.
    pub(super) fn poll(&self, replica: &mut Replica) -> Result<(), PoolError> {
        let (mut rescans, mut ahead) = (0, 1);
        loop {
            self.refresh(replica, ahead);
            let mut is_news = false;
            for host in 0..self.geometry.hosts {
                if replica.peers[usize::from(host)].part.is_none() {
                    is_news |= self.meet(replica, host)?;
                } else if !self.take_up(replica, host, ahead, &mut is_news)? && rescans < RESCANS {
                    (rescans, is_news) = (rescans + 1, true);
                    self.rescan(replica, host)?;
                }
            }
            if !is_news {
                return Ok(());
            }
            ahead = AHEAD.min(self.geometry.log_lines);
        }
    }

    /// Drops from the caches what the other hosts may have written since: the next lines of their logs.
    fn refresh(&self, replica: &Replica, ahead: u64) {
        let memory = self.pool.memory();
        for (host, peer) in (0..).zip(&replica.peers) {
            if host == self.pool.member().host {
                continue;
            }
            match &peer.part {
                None => memory.invalidate(self.control_at(host), LINE),
                Some(part) => {
                    for sequence in peer.cursor..peer.cursor + ahead {
                        memory.invalidate(self.log_at(part, sequence), LINE);
                    }
                }
            }
        }
        // SYNC: pairs with `Cache::log`, and with `publish_control` of a host that is new.
        memory.fence_invalidations();
    }

    /// Forgets all that is known, as a process does that comes anew.
    #[cfg(feature = "model")]
    pub(crate) fn forget_all(&self) {
        let mut replica = locked(&self.replica);
        replica.parts().for_each(|part| self.pool.directory().close(part));
        *replica = Replica::new(self.geometry.hosts);
    }

    /// Meets a host that was not known, if it is there; whether it is.
    fn meet(&self, replica: &mut Replica, host: u16) -> Result<bool, PoolError> {
        if self.is_empty(host)? {
            return Ok(false);
        }
        let Some(part) = self.pool.open_if_there(&format!("/kv/{}/host/{host}", self.name))? else {
            return Ok(false);
        };
        if part.bytes() != self.part.bytes() {
            let offset = part.at();
            self.pool.close(part);
            return Err(PoolError::Corrupt { offset, what: "log of a cache" });
        }
        replica.peers[usize::from(host)].part = Some(part);
        self.rescan(replica, host)?;
        Ok(true)
    }

    /// Takes up the lines of a host's log that are there; whether none was missed.
    fn take_up(
        &self,
        replica: &mut Replica,
        host: u16,
        ahead: u64,
        is_news: &mut bool,
    ) -> Result<bool, PoolError> {
        for _ in 0..ahead {
            let peer = &mut replica.peers[usize::from(host)];
            let Some(part) = &peer.part else { return Ok(true) };
            let at = self.log_at(part, peer.cursor);
            let Some(words) = line::load(self.pool.memory(), at)? else {
                // It is being written, for the first time since the cursor came here, or for the second: then something was missed.
                let control = self.control_of(host)?;
                return Ok(control.is_some_and(|control| control.position <= peer.cursor));
            };
            let found = LogLine::decode(&words);
            if found.sequence != peer.cursor {
                return Ok(found.sequence < peer.cursor);
            }
            (peer.cursor, *is_news) = (peer.cursor + 1, true);
            for record in found.records {
                match record.generation {
                    SLAB_IS_GONE => replica.forget_slab(host, record.slot.slab()),
                    generation => replica.set(host, record.slot, Some((record.key, generation))),
                }
            }
        }
        Ok(true)
    }

    /// Reads the lines of all slots of a host, and goes on from where its log was before.
    fn rescan(&self, replica: &mut Replica, host: u16) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        let peer = &mut replica.peers[usize::from(host)];
        let (position, slabs) = match (self.control_of(host)?, &peer.part) {
            (Some(control), _) => (control.position, control.slabs),
            // It is being written, or its host died while it wrote.
            (None, Some(part)) => {
                let survey = self.survey(host, part)?;
                (survey.position, survey.slabs)
            }
            (None, None) => return Ok(()),
        };
        peer.cursor = position;
        for number in self.slab_numbers(slabs) {
            let slab = self.slab(host, number)?;
            replica.know(host, number, slab);
            let Some(slab) = slab else { continue };
            if host != self.pool.member().host {
                memory.invalidate(slab.entry(0), u64::from(slab.head.slots) * LINE);
            }
            // SYNC: pairs with `Cache::publish`.
            memory.fence_invalidations();
            for index in 0..slab.head.slots {
                let words = line::load(memory, slab.entry(index))?;
                let entry = words.and_then(|words| Entry::decode(&words));
                let live = entry
                    .filter(|entry| entry.state == State::Live && (entry.host, entry.slab) == (host, number));
                let holds = live.map(|entry| (entry.key, entry.generation as u32));
                replica.set(host, Slot::new(number, index), holds);
            }
        }
        Ok(())
    }

    /// A slab of a host, as it was last found.
    pub(super) fn slab_of(
        &self,
        replica: &mut Replica,
        host: u16,
        number: u32,
    ) -> Result<Option<Slab>, PoolError> {
        let known = replica.peers[usize::from(host)].slabs.get(number as usize).copied().flatten();
        if known.is_some() {
            return Ok(known);
        }
        let found = self.slab(host, number)?;
        replica.know(host, number, found);
        Ok(found)
    }
}
