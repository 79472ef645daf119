//! A process's own index of a cache, as slots and logs have said so far: how it is built and kept up.

use std::sync::MutexGuard;

use polder_mem::{LINE, Memory};

use super::Cache;
use super::index::Replica;
use super::slabs::Slab;
use super::wire::{Entry, LogLine, SLAB_IS_GONE, Slot, State};
use crate::pool::locked;
use crate::{PoolError, line};

/// How many lines of a log are read behind one fence once there is news.
const AHEAD: u64 = 16;
/// Blocks that are put into the table at once: they stay in a cache meanwhile.
const SEATED_AT_ONCE: usize = 1 << 17;
/// How often a call reads all slots of a host anew because it has fallen behind: the next call goes on.
const RESCANS: u32 = 2;

impl<M: Memory> Cache<M> {
    /// What is known now. A host that is asked for a slab, and has more than its part, gives one up before.
    pub(super) fn polled(&self) -> Result<MutexGuard<'_, Replica>, PoolError> {
        let mut replica = locked(&self.replica);
        self.poll(&mut replica)?;
        if std::mem::take(&mut replica.is_asked) {
            // Whoever holds the host's lock may want the replica.
            drop(replica);
            if let Err(error) = self.give_to_others() {
                tracing::debug!("the cache {} gives up no slab: {error}", self.name);
            }
            replica = locked(&self.replica);
        }
        Ok(replica)
    }

    /// Takes up what every host has put since the last call: one line for each host where there is nothing new.
    pub(super) fn poll(&self, replica: &mut Replica) -> Result<(), PoolError> {
        let (mut rescans, mut ahead) = (0, 1);
        loop {
            self.refresh(replica, ahead);
            let (mut is_news, mut met) = (false, vec![]);
            for host in 0..self.geometry.hosts {
                if replica.peers[usize::from(host)].part.is_none() {
                    met.extend(self.meet(replica, host)?.then_some(host));
                } else if !self.take_up(replica, host, ahead, &mut is_news)? && rescans < RESCANS {
                    (rescans, is_news) = (rescans + 1, true);
                    self.rescan(replica, &[host])?;
                }
            }
            if !met.is_empty() {
                is_news = true;
                self.rescan(replica, &met)?;
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
            let (found, cursor) = (LogLine::decode(&words), peer.cursor);
            if found.sequence != cursor {
                return Ok(found.sequence < cursor);
            }
            *is_news = true;
            for record in found.records {
                match record.generation {
                    SLAB_IS_GONE if record.slot == Slot::NONE => {
                        replica.is_asked |= host != self.pool.member().host;
                    }
                    SLAB_IS_GONE => replica.forget_slab(host, record.slot.slab()),
                    generation => {
                        self.slab_of(replica, host, record.slot.slab())?;
                        replica.set(host, record.slot, Some((record.key, generation)));
                    }
                }
            }
            replica.peers[usize::from(host)].cursor = cursor + 1;
        }
        Ok(true)
    }

    /// Reads the lines of all slots of hosts, and goes on from where their logs were before.
    fn rescan(&self, replica: &mut Replica, hosts: &[u16]) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        let mut found = vec![];
        for &host in hosts {
            let peer = &mut replica.peers[usize::from(host)];
            let (position, slabs) = match (self.control_of(host)?, &peer.part) {
                (Some(control), _) => (control.position, control.slabs),
                // It is being written, or its host died while it wrote.
                (None, Some(part)) => {
                    let survey = self.survey(host, part)?;
                    (survey.position, survey.slabs)
                }
                (None, None) => continue,
            };
            peer.cursor = position;
            for number in self.slab_numbers(slabs) {
                match self.slab(host, number)? {
                    Some(slab) => found.push((host, number, slab)),
                    None => replica.forget_slab(host, number),
                }
            }
        }
        let slots: u64 = found.iter().map(|(.., slab)| u64::from(slab.head.slots)).sum();
        let known: u64 = hosts.iter().map(|host| replica.blocks_of(*host)).sum();
        // For all at once: a table that grows by and by moves each block several times.
        replica.reserve(slots.saturating_sub(known) as usize);
        let mut unseated = vec![];
        for (host, number, slab) in found {
            replica.know(host, number, slab);
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
                replica.set_unseated(host, Slot::new(number, index), holds, &mut unseated);
            }
            if unseated.len() > SEATED_AT_ONCE {
                replica.seat_all(&mut unseated);
            }
        }
        replica.seat_all(&mut unseated);
        Ok(())
    }

    /// A slab of a host, as it was last found.
    pub(super) fn slab_of(
        &self,
        replica: &mut Replica,
        host: u16,
        number: u32,
    ) -> Result<Option<Slab>, PoolError> {
        let known = replica.slab(host, number);
        if known.is_some() {
            return Ok(known);
        }
        let found = self.slab(host, number)?;
        found.into_iter().for_each(|slab| replica.know(host, number, slab));
        Ok(found)
    }
}
