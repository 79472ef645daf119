//! The rings on which messages come, and how an endpoint learns of them.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use polder_mem::{Bell, LINE, Memory, Offset};

use super::place::{
    HeldEndpoint, Map, block_of, find_ring, generation_bits, hold_block, hold_endpoint, realm_of, ring_name,
    small_generation, split_word,
};
use super::stock::can_open_more;
use super::{Address, EndpointOptions};
use crate::object::Object;
use crate::ring::{Consumer, Envelope, RingLink, RingPlace};
use crate::shared::SharedObject;
use crate::summary::SENDERS;
use crate::wait::Patience;
use crate::{Peer, Pool, PoolError};

/// Looks in vain after which an endpoint looks for senders that are new: so many at first, and twice as many after each search
/// that found nobody, which reads a line of every host.
const LOOKS_A_SEARCH: u32 = 64;
/// Looks in vain after which an endpoint reads the news of all hosts, a line or two of each, and not of those alone that it hears.
const LOOKS_A_READ: u32 = 64;
/// With more senders an endpoint reads first which of them have news, and else looks at each.
const LOOKED_AT: usize = 2;

/// Words of a line.
const WORDS: usize = (LINE / 8) as usize;

/// Whoever pushes or pops here asks elsewhere whether its peer lives.
pub(super) type Alive = fn() -> Result<(), PoolError>;

/// What an endpoint holds open to hear one sender, until the conversation has ended.
struct Hearing {
    endpoint: HeldEndpoint,
    /// With the sender's block, unless that lies in its endpoint.
    blocks: Option<SharedObject>,
    /// The slot and generation of the sender's send buffers, once it has told them.
    buffers: Option<(u32, u64)>,
    /// The ring that the pair has for itself.
    ring: Option<Object>,
}

/// One sender to this endpoint: it speaks on a small ring at first, and at times on one that the pair has for itself.
struct Inlet<M> {
    sender: Address,
    /// Its number among the peers, once it has one.
    from: Option<u32>,
    hearing: Option<Hearing>,
    place: Offset,
    /// The ring on which it speaks.
    consumer: Consumer<M, Alive>,
    /// The other one: that of the pair until the sender moves there, and then the small one.
    other: Option<Consumer<M, Alive>>,
    speaks_on_own: bool,
    /// Slots that were taken of other rings than the one on which it speaks.
    passed: u64,
    /// What the sender's byte of the news last said.
    promised: u8,
    /// It is among those that may have something.
    is_listed: bool,
    /// Its sender has left: another has its place.
    left: bool,
    wakes: Option<Bell>,
}

impl<M: Memory> Inlet<M> {
    /// Whether its sender says that it has published more than was taken. It says less while its byte is on its way.
    fn has_unread(&self) -> bool {
        self.promised != (self.passed + self.consumer.sequence() - 1) as u8
    }

    /// Whether a look may find something.
    fn may_have_news(&self, all_are_looked_at: bool) -> bool {
        self.hearing.is_some() && (all_are_looked_at || self.left || self.has_unread())
    }
}

/// A line of the news, with the bytes of the senders of one host.
struct NewsLine {
    at: Offset,
    /// Whether a sender that is or was heard has a byte of it.
    is_heard: bool,
    /// What its words said when they were last read.
    seen: [u64; WORDS],
    /// The ring of the sender that has the byte now.
    rings: [Option<usize>; SENDERS as usize],
}

/// All rings to this endpoint.
pub(super) struct Inlets<M> {
    memory: M,
    own: Map,
    address: Address,
    rings: Vec<Inlet<M>>,
    /// The ring of each sender that was ever heard.
    heard: BTreeMap<Address, usize>,
    /// The lines of the news of all hosts that were met, by where they lie.
    news: BTreeMap<Offset, usize>,
    lines: Vec<NewsLine>,
    /// The generation of the sender that was heard last at each place, as far as its word says that.
    met: BTreeMap<(u16, u16), u64>,
    /// The rings that may have something, and how many of them are left in this round.
    listed: VecDeque<usize>,
    left: usize,
    idle: u32,
    /// Whether the next look reads the news of all hosts.
    reads_news: bool,
    looks_a_search: u32,
    looks_at_most: u32,
    rings_bells: bool,
}

impl<M: Memory> Inlets<M> {
    pub(super) fn new(pool: &Pool<M>, own: Map, address: Address, options: &EndpointOptions) -> Self {
        Self {
            memory: pool.memory().clone(),
            own,
            address,
            rings: vec![],
            heard: BTreeMap::new(),
            news: BTreeMap::new(),
            lines: vec![],
            met: BTreeMap::new(),
            listed: VecDeque::new(),
            left: 0,
            idle: LOOKS_A_SEARCH,
            reads_news: false,
            looks_a_search: LOOKS_A_SEARCH,
            looks_at_most: options.calls_a_search,
            rings_bells: options.rings_bells,
        }
    }

    /// Lets the next look search for new senders.
    pub(super) fn search_next(&mut self) {
        self.idle = self.looks_a_search;
    }

    /// Lets the next look read the news of all hosts, which says of a sender that is new.
    pub(super) fn read_news_next(&mut self) {
        self.reads_news = true;
    }

    /// Begins a round over the rings, and finds new ones now and then.
    pub(super) fn look(&mut self, pool: &Pool<M>) -> Result<(), PoolError> {
        self.idle += 1;
        let reads_all = std::mem::take(&mut self.reads_news) || self.idle.is_multiple_of(LOOKS_A_READ);
        if reads_all || !self.looks_at_all() {
            self.read_news(reads_all)?;
        }
        if self.idle >= self.looks_a_search {
            self.idle = 0;
            let known = self.rings.len();
            self.search(pool)?;
            let has_new = self.rings.len() > known;
            let looks = if has_new { LOOKS_A_SEARCH } else { self.looks_a_search * 2 };
            self.looks_a_search = looks.min(self.looks_at_most);
            if has_new && !self.looks_at_all() {
                self.read_news(false)?;
            }
        }
        if self.looks_at_all() {
            (0..self.rings.len()).for_each(|inlet| self.list(inlet));
        }
        self.left = self.listed.len();
        Ok(())
    }

    /// Whether there are so few senders that it looks at each.
    fn looks_at_all(&self) -> bool {
        self.rings.len() <= LOOKED_AT
    }

    /// Whether a round would find nothing; if so, it counts as one. With many senders it says nothing.
    #[inline(always)]
    pub(super) fn is_idle(&mut self) -> Result<bool, PoolError> {
        let looks = self.idle + 1;
        let reads_news = self.reads_news || looks.is_multiple_of(LOOKS_A_READ);
        if reads_news || looks >= self.looks_a_search || !self.looks_at_all() {
            return Ok(false);
        }
        for ring in self.rings.iter_mut().filter(|ring| ring.hearing.is_some()) {
            if ring.left || !ring.consumer.is_idle()? {
                return Ok(false);
            }
        }
        self.idle += 1;
        Ok(true)
    }

    fn list(&mut self, inlet: usize) {
        let ring = &mut self.rings[inlet];
        if !std::mem::replace(&mut ring.is_listed, true) {
            self.listed.push_back(inlet);
        }
    }

    /// The next ring of this round that may have something.
    pub(super) fn next(&mut self) -> Option<usize> {
        let all_are_looked_at = self.looks_at_all();
        while self.left > 0
            && let Some(inlet) = self.listed.pop_front()
        {
            self.left -= 1;
            let ring = &mut self.rings[inlet];
            ring.is_listed = ring.may_have_news(all_are_looked_at);
            if ring.is_listed {
                // It is looked at again in the next round, unless it promises nothing then.
                self.listed.push_back(inlet);
                return Some(inlet);
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
        let Inlet { hearing, speaks_on_own, place, .. } = &self.rings[inlet];
        let own = hearing.as_ref().and_then(|hearing| hearing.ring.as_ref());
        own.filter(|_| *speaks_on_own).map_or(*place, Object::at)
    }

    /// Opens the ring that a sender has for this pair; whether it can. The inner error says what no correct endpoint writes.
    pub(super) fn open_ring(
        &mut self,
        pool: &Pool<M>,
        inlet: usize,
    ) -> Result<Result<bool, &'static str>, PoolError> {
        let ring = &self.rings[inlet];
        let (Some(Hearing { ring: None, .. }), None) = (&ring.hearing, &ring.other) else {
            return Ok(Err("message of a ring that is to be opened"));
        };
        if !can_open_more(pool) {
            return Ok(Ok(false));
        }
        match self.open_own_ring(pool, inlet) {
            Ok(()) => Ok(Ok(true)),
            // Too much is open, or its sender has left: its small ring goes on.
            Err(
                error @ (PoolError::TooManyOpen { .. }
                | PoolError::Timeout { .. }
                | PoolError::NotFound { .. }),
            ) => {
                tracing::debug!(%error, sender = ?self.rings[inlet].sender, "no ring of its own");
                Ok(Ok(false))
            }
            Err(error) => Err(error),
        }
    }

    /// Learns where the send buffers of a sender are; the error says what no correct endpoint writes.
    pub(super) fn learn_buffers(
        &mut self,
        pool: &Pool<M>,
        inlet: usize,
        [slot, generation]: [u64; 2],
    ) -> Result<(), &'static str> {
        let slot = u32::try_from(slot).ok().filter(|&slot| slot < pool.layout().slots());
        match (&mut self.rings[inlet].hearing, slot) {
            (Some(Hearing { buffers: buffers @ None, .. }), Some(slot)) => {
                *buffers = Some((slot, generation));
                Ok(())
            }
            _ => Err("message of send buffers"),
        }
    }

    /// Where the sender's send buffers lie; nothing where they are no longer its own. They are not held open: what was copied out before
    /// counts if they are there yet.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when it has told of none; [`PoolError::Memory`].
    pub(super) fn find_buffers(&self, pool: &Pool<M>, inlet: usize) -> Result<Option<Range<u64>>, PoolError> {
        let Inlet { sender, hearing, .. } = &self.rings[inlet];
        let told = hearing.as_ref().and_then(|hearing| hearing.buffers);
        let (slot, generation) =
            told.ok_or(PoolError::Corrupt { offset: self.place(inlet), what: "message piece" })?;
        pool.find_place(sender.host, slot, generation)
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

    /// Opens the ring that the pair has for itself, on which its sender goes on when it has said so.
    fn open_own_ring(&mut self, pool: &Pool<M>, inlet: usize) -> Result<(), PoolError> {
        let Inlet { sender, wakes, .. } = self.rings[inlet];
        let object = pool.open(&ring_name(pool.member().job, sender, self.address))?;
        let (shape, place) = match find_ring(pool, &object) {
            Ok(found) => found,
            Err(error) => {
                pool.close(object);
                return Err(error);
            }
        };
        let consumer = Consumer::new(self.memory.clone(), shape, place, link(pool, sender.host, wakes));
        let ring = &mut self.rings[inlet];
        ring.other = Some(consumer.with_longest(shape.cell_bytes()));
        if let Some(hearing) = &mut ring.hearing {
            hearing.ring = Some(object);
        }
        Ok(())
    }

    /// The sender has said the last on the one ring, and goes on in the other.
    pub(super) fn moved(&mut self, pool: &Pool<M>, inlet: usize) -> Result<(), &'static str> {
        let ring = &mut self.rings[inlet];
        let other = ring.other.take().ok_or("message that a pair moves")?;
        let taken = |consumer: &Consumer<M, Alive>| consumer.sequence() - 1;
        let all = ring.passed + taken(&ring.consumer);
        ring.passed = all - taken(&other);
        let before = std::mem::replace(&mut ring.consumer, other);
        ring.speaks_on_own = !ring.speaks_on_own;
        if ring.speaks_on_own {
            ring.other = Some(before);
        } else if let Some(own) = ring.hearing.as_mut().and_then(|hearing| hearing.ring.take()) {
            pool.close(own);
        }
        Ok(())
    }

    /// Whether what this sender has offered is there: neither it nor a sweep has taken it away.
    pub(super) fn is_sender_present(&self, pool: &Pool<M>, sender: Address) -> Result<bool, PoolError> {
        let hearing = self.heard.get(&sender).and_then(|&inlet| self.rings[inlet].hearing.as_ref());
        let Some(Hearing { endpoint, .. }) = hearing else { return Ok(false) };
        let said = self.read_block(pool, endpoint)?;
        let name = endpoint.object.name();
        Ok(said.is_some() && pool.is_live(name, sender.host, sender.generation)?)
    }

    /// Lets go of a ring.
    pub(super) fn close(&mut self, pool: &Pool<M>, inlet: usize) {
        if let Some(Hearing { endpoint, blocks, ring, .. }) = self.rings[inlet].hearing.take() {
            ring.into_iter().for_each(|ring| pool.close(ring));
            blocks.into_iter().for_each(|object| pool.let_go(object));
            pool.let_go(endpoint.object);
        }
    }

    /// Lets go of the ring of a sender that is gone, of which all was taken.
    pub(super) fn close_from(&mut self, pool: &Pool<M>, sender: Address) {
        if let Some(&inlet) = self.heard.get(&sender) {
            self.close(pool, inlet);
        }
    }

    pub(super) fn close_all(&mut self, pool: &Pool<M>) {
        (0..self.rings.len()).for_each(|inlet| self.close(pool, inlet));
    }

    /// Reads afresh how much each sender says that it has published, with one fence for all: those of the hosts that are heard, or of
    /// all hosts.
    // SYNC: sees what `Out::publish` of the producers stored in their bytes.
    fn read_news(&mut self, of_all: bool) -> Result<(), PoolError> {
        for line in self.lines.iter().filter(|line| of_all || line.is_heard) {
            self.memory.invalidate(line.at, LINE);
        }
        // What a sender said before it left counts: an endpoint that has seen that it is gone looks here for the last time.
        self.memory.fence_invalidations();
        for line in self.lines.iter_mut().filter(|line| of_all || line.is_heard) {
            let seen = std::mem::replace(&mut line.seen, self.memory.load_line(line.at)?);
            for (index, (before, now)) in seen.into_iter().zip(line.seen).enumerate() {
                if before == now {
                    continue;
                }
                let bytes = before.to_le_bytes().into_iter().zip(now.to_le_bytes());
                for ((before, news), inlet) in bytes.zip(&line.rings[index * 8..]) {
                    if news == before {
                        continue;
                    }
                    let Some(inlet) = *inlet else {
                        // A sender that is new.
                        self.idle = self.looks_a_search;
                        continue;
                    };
                    let ring = &mut self.rings[inlet];
                    ring.promised = news;
                    if !std::mem::replace(&mut ring.is_listed, true) {
                        self.listed.push_back(inlet);
                    }
                }
            }
        }
        Ok(())
    }

    /// Opens the rings of senders that have begun to write since the last search.
    // SYNC: sees what `Outlet::open` stored before the first message, after the ring was made.
    pub(super) fn search(&mut self, pool: &Pool<M>) -> Result<(), PoolError> {
        let geometry = *pool.layout().geometry();
        let present = pool.hosts_present()?;
        let hosts = (0..geometry.hosts).filter(|host| present >> host & 1 == 1);
        for host in hosts.clone() {
            for port in (0..geometry.processes).step_by(SENDERS as usize) {
                self.line_of(self.own.news_byte(host, port));
            }
        }
        let ports = hosts.flat_map(|host| (0..geometry.processes).map(move |port| (host, port)));
        let words: Vec<_> =
            ports.map(|(host, port)| ((host, port), self.own.sender_word(host, port))).collect();
        for (_, word) in words.iter().filter(|(_, word)| word.0.is_multiple_of(LINE)) {
            self.memory.invalidate(*word, LINE);
        }
        // A process that goes to sleep after this has no other search: an older word would be a sender that it never hears.
        // SYNC: pairs with `Outlet::open`, as above.
        self.memory.fence_invalidations();
        for (place, word) in words {
            let (said, generation) = split_word(self.memory.load(word)?);
            if said == 0 || self.met.get(&place) == Some(&generation) {
                continue;
            }
            match self.open(pool, place, generation) {
                Ok(()) | Err(PoolError::NotFound { .. } | PoolError::Corrupt { .. }) => {
                    self.met.insert(place, generation);
                }
                // It may be heard when less is open, or a lock is free.
                Err(error) => {
                    tracing::warn!(%error, host = place.0, port = place.1, "cannot hear this endpoint");
                }
            }
        }
        Ok(())
    }

    /// The block in which the small ring of a sender to this endpoint lies, if it has one.
    // SYNC: sees what `Stock::say` of the sender stored.
    fn read_block(&self, pool: &Pool<M>, endpoint: &HeldEndpoint) -> Result<Option<u64>, PoolError> {
        let map = Map::new(pool.layout().geometry(), endpoint.object.at());
        let word = map.block_word(self.address.host, self.address.port);
        self.memory.invalidate(word, 8);
        self.memory.fence_invalidations();
        Ok(block_of(self.memory.load(word)?, self.address.generation))
    }

    fn open(&mut self, pool: &Pool<M>, (host, port): (u16, u16), bits: u64) -> Result<(), PoolError> {
        let endpoint = hold_endpoint(pool, (host, port), |generation| generation_bits(generation) == bits)?;
        let generation = endpoint.object.generation();
        let sender = Address { host, port, generation, realm: realm_of(pool) };
        if self.heard.contains_key(&sender) {
            // The conversation has ended, whatever it says now.
            pool.let_go(endpoint.object);
            return Ok(());
        }
        let held = self.read_block(pool, &endpoint).and_then(|block| {
            let block = block.ok_or_else(|| PoolError::NotFound {
                name: format!("a block of {} for this endpoint", endpoint.object.name()),
            })?;
            hold_block(pool, &endpoint, sender, block)
        });
        let (lines, blocks) = match held {
            Ok(held) => held,
            Err(error) => {
                pool.let_go(endpoint.object);
                return Err(error);
            }
        };
        // Before the new ring shows itself there.
        let number = self.rings.len();
        let before = self.assign_news_byte(self.own.news_byte(host, port), number);
        if let Some(before) = before {
            let ring = &mut self.rings[before];
            ring.left = true;
            ring.other.iter_mut().chain([&mut ring.consumer]).for_each(Consumer::keep_credits);
            self.list(before);
        }
        let wakes = self.rings_bells.then(|| pool.layout().bell(host, endpoint.process.slot));
        let credits = self.own.credits(host, port);
        let place = RingPlace { lines, credits, generation: small_generation(generation) };
        let consumer =
            Consumer::new(self.memory.clone(), endpoint.blocks.small, place, link(pool, host, wakes));
        let consumer = consumer.with_longest(endpoint.blocks.small.cell_bytes());
        self.rings.push(Inlet {
            sender,
            from: None,
            hearing: Some(Hearing { endpoint, blocks, buffers: None, ring: None }),
            place: lines,
            consumer,
            other: None,
            speaks_on_own: false,
            passed: 0,
            promised: 0,
            is_listed: false,
            left: false,
            wakes,
        });
        self.heard.insert(sender, number);
        // What it has said before the news is read again counts.
        self.list(number);
        Ok(())
    }

    /// The number of this line of the news.
    fn line_of(&mut self, at: Offset) -> usize {
        let next = self.lines.len();
        let line = *self.news.entry(at).or_insert(next);
        if line == next {
            self.lines.push(NewsLine {
                at,
                is_heard: false,
                seen: [0; WORDS],
                rings: [None; SENDERS as usize],
            });
        }
        line
    }

    /// Notes that the byte of the news belongs to the sender of this ring; returns the ring of the one before.
    fn assign_news_byte(&mut self, byte: Offset, ring: usize) -> Option<usize> {
        let at = byte.line();
        let line = self.line_of(at);
        let index = (byte.0 - at.0) as usize;
        self.lines[line].is_heard = true;
        self.lines[line].seen[index / 8] = 0;
        self.lines[line].rings[index].replace(ring)
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
