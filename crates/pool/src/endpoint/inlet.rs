//! The rings on which messages come, and how an endpoint learns of them.

use std::collections::BTreeMap;

use polder_mem::{Bell, LINE, Memory, Offset};

use super::place::{endpoint_name, find_ring, news_base, news_word, realm_of, ring_name, split_news_word};
use super::{Address, EndpointOptions};
use crate::object::Object;
use crate::owned::{Identity, Kind};
use crate::ring::{Consumer, Envelope, RingLink};
use crate::wait::Patience;
use crate::{Peer, Pool, PoolError};

/// Looks in vain after which an endpoint looks for senders that are new: so many at first, and twice as many after each search
/// that found nobody, which reads a line of every host.
const LOOKS_A_SEARCH: u32 = 64;
/// With more senders an endpoint reads first which of them have news, and else looks at each.
const LOOKED_AT: usize = 2;

/// Whoever pushes or pops here asks elsewhere whether its peer lives.
pub(super) type Alive = fn() -> Result<(), PoolError>;

/// One ring to this endpoint.
struct Inlet<M> {
    sender: Address,
    /// Its number among the peers, once it has one.
    from: Option<u32>,
    /// Its object, until the conversation has ended.
    object: Option<Object>,
    place: Offset,
    consumer: Consumer<M, Alive>,
    /// The sender's word of the news, and what it last said.
    word: Offset,
    promised: u64,
    /// Its sender has left: another has its place.
    left: bool,
}

/// All rings to this endpoint.
pub(super) struct Inlets<M> {
    memory: M,
    own: Offset,
    address: Address,
    rings: Vec<Inlet<M>>,
    /// From what on the sender counts that was heard last at each place.
    met: BTreeMap<(u16, u16), u64>,
    /// The ring to look at next in this round, and how many are left.
    turn: usize,
    left: usize,
    idle: u32,
    looks_a_search: u32,
    looks_at_most: u32,
    rings_bells: bool,
}

impl<M: Memory> Inlets<M> {
    pub(super) fn new(pool: &Pool<M>, own: Offset, address: Address, options: &EndpointOptions) -> Self {
        Self {
            memory: pool.memory().clone(),
            own,
            address,
            rings: vec![],
            met: BTreeMap::new(),
            turn: 0,
            left: 0,
            idle: LOOKS_A_SEARCH,
            looks_a_search: LOOKS_A_SEARCH,
            looks_at_most: options.calls_a_search,
            rings_bells: options.rings_bells,
        }
    }

    /// Lets the next look search for new senders.
    pub(super) fn search_next(&mut self) {
        self.idle = self.looks_a_search;
    }

    /// Begins a round over the rings, and finds new ones now and then.
    pub(super) fn look(&mut self, pool: &Pool<M>) -> Result<(), PoolError> {
        self.idle += 1;
        if self.idle >= self.looks_a_search {
            self.idle = 0;
            let known = self.rings.len();
            self.search(pool)?;
            let has_new = self.rings.len() > known;
            let looks = if has_new { LOOKS_A_SEARCH } else { self.looks_a_search * 2 };
            self.looks_a_search = looks.min(self.looks_at_most);
        }
        if self.rings.len() > LOOKED_AT {
            self.read_news()?;
        }
        self.left = self.rings.len();
        Ok(())
    }

    /// Whether a round would find nothing; if so, it counts as one. With many senders it says nothing.
    #[inline(always)]
    pub(super) fn is_still(&mut self) -> Result<bool, PoolError> {
        if self.idle + 1 >= self.looks_a_search || self.rings.len() > LOOKED_AT {
            return Ok(false);
        }
        for ring in self.rings.iter_mut().filter(|ring| ring.object.is_some()) {
            if ring.left || !ring.consumer.is_still()? {
                return Ok(false);
            }
        }
        self.idle += 1;
        Ok(true)
    }

    /// The next ring of this round that may have something.
    pub(super) fn next(&mut self) -> Option<usize> {
        while self.left > 0 {
            self.left -= 1;
            self.turn = if self.turn + 1 < self.rings.len() { self.turn + 1 } else { 0 };
            let ring = &self.rings[self.turn];
            let looks = self.rings.len() <= LOOKED_AT || ring.promised >= ring.consumer.sequence();
            if ring.object.is_some() && looks {
                return Some(self.turn);
            }
        }
        None
    }

    /// The number of the sender, which `connect` gives it when it has none yet.
    pub(super) fn from(&mut self, inlet: usize, connect: impl FnOnce(Address) -> u32) -> u32 {
        let Inlet { sender, from, .. } = &mut self.rings[inlet];
        *from.get_or_insert_with(|| connect(*sender))
    }

    /// Where the ring lies, for errors.
    pub(super) fn place(&self, inlet: usize) -> Offset {
        self.rings[inlet].place
    }

    /// Copies the next message of a ring to where `room` says, if one has come, as [`Consumer::try_pop_to`] does.
    #[inline(always)]
    pub(super) fn pop<'a>(
        &mut self,
        pool: &Pool<M>,
        inlet: usize,
        room: impl FnOnce(&Envelope) -> Result<&'a mut [u8], &'static str>,
    ) -> Result<Option<u64>, PoolError> {
        let Inlet { consumer, left, .. } = &mut self.rings[inlet];
        let popped = consumer.try_pop_to(room)?;
        if popped.is_some() {
            self.idle = 0;
        } else if *left {
            self.close(pool, inlet);
        }
        Ok(popped)
    }

    /// Whether the ring of this sender is there: neither it nor a sweep has destroyed it.
    pub(super) fn is_spoken_on(&self, pool: &Pool<M>, sender: Address) -> Result<bool, PoolError> {
        let ring = self.rings.iter().find(|ring| ring.sender == sender).and_then(|ring| ring.object.as_ref());
        ring.map_or(Ok(false), |ring| pool.is_live(ring.name(), ring.owner(), ring.generation()))
    }

    /// Lets go of a ring.
    pub(super) fn close(&mut self, pool: &Pool<M>, inlet: usize) {
        if let Some(object) = self.rings[inlet].object.take() {
            pool.close(object);
        }
    }

    pub(super) fn close_all(&mut self, pool: &Pool<M>) {
        (0..self.rings.len()).for_each(|inlet| self.close(pool, inlet));
    }

    /// Reads afresh how much each sender says that it has published, with one fence for all.
    // SYNC: sees what `Out::publish` of the producers stored in their words.
    fn read_news(&mut self) -> Result<(), PoolError> {
        for ring in &self.rings {
            // HARMLESS(invalidate -> write_back -> drop), the news of a ring: the next search reads it afresh.
            self.memory.invalidate(ring.word, 8);
        }
        // HARMLESS(fence_invalidations -> sfence -> drop), one look at the news: an older word means another look.
        self.memory.fence_invalidations();
        for ring in &mut self.rings {
            let (count, base) = split_news_word(self.memory.load(ring.word)?);
            // What the sender said last is not known once another speaks in its place.
            ring.promised = if base == news_base(ring.sender.generation) { count } else { u64::MAX };
        }
        Ok(())
    }

    /// Opens the rings of senders that have begun to write since the last search.
    // SYNC: sees what `Out::publish` stored with the first message, after the ring was made.
    pub(super) fn search(&mut self, pool: &Pool<M>) -> Result<(), PoolError> {
        let geometry = *pool.layout().geometry();
        let present = pool.hosts_present()?;
        let hosts = (0..geometry.hosts).filter(|host| present >> host & 1 == 1);
        let ports = hosts.flat_map(|host| (0..geometry.processes).map(move |port| (host, port)));
        let words: Vec<_> =
            ports.map(|(host, port)| ((host, port), news_word(&geometry, self.own, host, port))).collect();
        for (_, word) in words.iter().filter(|(_, word)| word.0.is_multiple_of(LINE)) {
            self.memory.invalidate(*word, LINE);
        }
        // A process that goes to sleep after this has no other search: an older word would be a sender that it never hears.
        // SYNC: pairs with `Out::publish`, as above.
        self.memory.fence_invalidations();
        for (place, word) in words {
            let (count, base) = split_news_word(self.memory.load(word)?);
            if count == 0 || self.met.get(&place) == Some(&base) {
                continue;
            }
            match self.open(pool, place, word) {
                Ok(()) | Err(PoolError::NotFound { .. } | PoolError::Corrupt { .. }) => {
                    self.met.insert(place, base);
                }
                // It may be heard when less is open, or a lock is free.
                Err(error) => {
                    tracing::warn!(%error, host = place.0, port = place.1, "cannot hear this endpoint");
                }
            }
        }
        Ok(())
    }

    fn open(&mut self, pool: &Pool<M>, (host, port): (u16, u16), word: Offset) -> Result<(), PoolError> {
        let job = pool.member().job;
        let endpoint = pool.open(&endpoint_name(job, host, port))?;
        let sender = Address { host, port, generation: endpoint.generation(), realm: realm_of(pool) };
        // One that cannot be read rings for nobody: its sender looks for room by itself.
        let identity =
            if self.rings_bells { Identity::read(pool, &endpoint, Kind::Endpoint).ok() } else { None };
        let wakes = identity.map(|identity| pool.layout().bell(host, identity.process.slot));
        pool.close(endpoint);
        if self.rings.iter().any(|ring| ring.sender == sender) {
            // The conversation has ended, whatever it says now.
            return Ok(());
        }
        let object = pool.open(&ring_name(job, sender, self.address))?;
        let found = find_ring(pool, &object);
        let (shape, place) = match found {
            Ok(found) => found,
            Err(error) => {
                pool.close(object);
                return Err(error);
            }
        };
        let consumer = Consumer::new(self.memory.clone(), shape, place, link(pool, host, wakes));
        let consumer = consumer.with_longest(shape.cell_bytes());
        let (place, object) = (object.at(), Some(object));
        let is_there = |ring: &&mut Inlet<M>| (ring.sender.host, ring.sender.port) == (host, port);
        self.rings.iter_mut().filter(is_there).for_each(|ring| ring.left = true);
        self.rings.push(Inlet {
            sender,
            from: None,
            object,
            place,
            consumer,
            word,
            promised: 0,
            left: false,
        });
        Ok(())
    }
}

/// What a ring of an endpoint knows of its other end: where that sleeps, if it does. Nobody waits at the ring.
pub(super) fn link<M: Memory>(pool: &Pool<M>, host: u16, wakes: Option<Bell>) -> RingLink<Alive> {
    let own = pool.layout().bell(pool.member().host, pool.memory().slot());
    let alive: Alive = || Ok(());
    let patience = Patience { spins: u32::MAX, ..Patience::DEDICATED };
    let peer = Peer::new(host, 0);
    RingLink { peer, epoch: 0, bell: own, wakes, patience, alive }
}
