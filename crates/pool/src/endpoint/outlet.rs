//! What goes to one peer: the ring to it, and what waits for room there.

use std::collections::VecDeque;

use polder_mem::{Bell, Memory, Nanos, Offset};
use slab::Slab;

use super::inlet::{Alive, link};
use super::place::{HeldEndpoint, Map, create_ring, encode_sender, hold_endpoint, realm_of, ring_name};
use super::stock::Stock;
use super::wire::{Note, UNASKED, bytes_of, offered, piece_of};
use super::{Address, CompleteWhen, Completion, EndpointOptions, LOOK, Label, MessageBuffer, OVERHEAD, fail};
use crate::membership::Process;
use crate::object::Object;
use crate::ring::{Producer, RingShape};
use crate::{Pool, PoolError};

/// The bytes of a message.
pub(super) enum Load<B, C> {
    /// The caller's, until it is told that they are out.
    Lent(B, C),
    /// Our own.
    Copied(Vec<u8>),
}

impl<B: MessageBuffer, C> Load<B, C> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Lent(buffer, _) => buffer.bytes(),
            Self::Copied(bytes) => bytes,
        }
    }
}

/// A message that nothing was said of yet.
pub(super) struct Outgoing<B, C> {
    pub(super) label: Label,
    pub(super) load: Load<B, C>,
    /// Where in the pool its bytes lie, which are written back.
    pub(super) place: Option<Offset>,
    pub(super) until: CompleteWhen,
}

/// An answer to a peer.
pub(super) enum Control {
    /// The receive of this number takes so many bytes of a send; with 0 it has all that it takes.
    Grant { send: u64, receive: u64, room: u64 },
    /// So many bytes of eager messages were taken.
    Credit(u64),
    /// What lay in the send buffer of this number was taken.
    Taken(u32),
    /// The peer's ring for the pair is open, or cannot be opened.
    Opened(bool),
}

impl Control {
    /// The receiver has all that it takes of a send.
    pub(super) const fn all_taken(send: u64) -> Self {
        Self::Grant { send, receive: 0, room: 0 }
    }
}

/// A message that was requested: its bytes go out once it is granted.
struct Sending<B, C> {
    load: Load<B, C>,
    /// The receive that takes it, how many bytes, and how many of them are out.
    granted: Option<(u64, u64)>,
    out: u64,
    /// Whether the receiver says when it has them.
    synchronous: bool,
}

/// The ring to a peer: a small one at first.
pub(super) struct Outlet<M> {
    /// The peer's endpoint, whose news says that something has come.
    endpoint: HeldEndpoint,
    /// The number of the block with the small ring.
    block: u64,
    small: Producer<M, Alive>,
    small_shape: RingShape,
    own: Option<OwnRing<M>>,
    buffers: Buffers,
    /// Slots of rings that the pair had for itself before.
    passed: u64,
    /// Slots of the small ring from which on it is asked whether there is room for a ring of its own.
    asks_at: u64,
    /// Whether it was asked.
    has_asked: bool,
}

/// A ring that a pair has for itself.
struct OwnRing<M> {
    ring: Object,
    producer: Producer<M, Alive>,
    stage: Stage,
    /// Slots that it had published at the last look, and since when.
    seen: (u64, Nanos),
}

/// How far a pair has come with a ring of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The peer is to be told of it.
    Made,
    /// The peer has not said whether it reads there.
    Offered,
    /// It does: one more message goes on the small ring.
    Met,
    /// The pair speaks there.
    Speaks,
    /// It has said nothing for a while: one more message goes there.
    Idle,
}

/// Whether the peer reads parts of messages in this endpoint's send buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buffers {
    /// It was not told of them: there was no need.
    Untold,
    /// It does.
    Told,
    /// There are none.
    Missing,
}

impl<M> OwnRing<M> {
    const fn speaks(&self) -> bool {
        matches!(self.stage, Stage::Speaks | Stage::Idle)
    }
}

/// A peer, as one endpoint sees it.
pub(super) struct PeerTraffic<M, B, C> {
    pub(super) address: Address,
    /// Its process, and the slot of its endpoint's entry, once they were looked up.
    seen: Option<(Process, u32)>,
    outlet: Option<Outlet<M>>,
    pub(super) control: VecDeque<Control>,
    pub(super) queue: VecDeque<Outgoing<B, C>>,
    sending: Slab<Sending<B, C>>,
    /// The sends that were granted, in turn.
    granted: VecDeque<usize>,
    /// The send that goes out unasked, before any other message is begun.
    unasked: Option<usize>,
    /// Bytes of eager messages that it has not taken.
    untaken: u64,
    /// Bytes of its eager messages that we have taken and not said so.
    consumed: u64,
    /// Send buffers that it is to read.
    lent: Vec<u32>,
    pub(super) broken: Option<PoolError>,
    /// Whether it is among those that something waits for.
    pub(super) is_listed: bool,
}

impl<M: Memory, B: MessageBuffer, C> PeerTraffic<M, B, C> {
    pub(super) const fn new(address: Address) -> Self {
        Self {
            address,
            seen: None,
            outlet: None,
            control: VecDeque::new(),
            queue: VecDeque::new(),
            sending: Slab::new(),
            granted: VecDeque::new(),
            unasked: None,
            untaken: 0,
            consumed: 0,
            lent: Vec::new(),
            broken: None,
            is_listed: false,
        }
    }

    /// Whether nothing waits for room.
    pub(super) fn is_quiet(&self) -> bool {
        self.queue.is_empty()
            && self.control.is_empty()
            && self.granted.is_empty()
            && !self.outlet.as_ref().is_some_and(Outlet::is_moving)
    }

    /// Owes the peer a credit once that is worth a message.
    pub(super) fn take(&mut self, options: &EndpointOptions, bytes: u64) {
        self.consumed += bytes + OVERHEAD;
        if self.consumed >= options.window_bytes / 4 {
            self.control.push_back(Control::Credit(std::mem::take(&mut self.consumed)));
        }
    }

    /// Whether the peer would miss messages, of which the caller has been told or never will be, if this end left now.
    pub(super) fn has_undelivered(&mut self) -> bool {
        let is_copied = |(_, sending): (usize, &Sending<B, C>)| matches!(sending.load, Load::Copied(_));
        let is_met = |outlet: &mut Outlet<M>| outlet.is_met().unwrap_or(true);
        // It does not hold the send buffers open.
        let is_lent = !self.lent.is_empty();
        !self.is_quiet()
            || is_lent
            || self.sending.iter().any(is_copied)
            || !self.outlet.as_mut().is_none_or(is_met)
    }

    /// Whether the last message that waits is a copy.
    pub(super) fn ends_with_copy(&self) -> bool {
        matches!(self.queue.back(), Some(Outgoing { load: Load::Copied(_), .. }))
    }

    /// Whether something was requested that the peer has not taken.
    pub(super) fn is_sending(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Whether a message goes out as it is, unasked; one that no cell of the ring holds goes out in parts.
    #[inline]
    fn is_eager(&self, options: &EndpointOptions, bytes: &[u8]) -> bool {
        let length = bytes.len() as u64;
        length <= options.eager_bytes && self.untaken + length + OVERHEAD <= options.window_bytes
    }

    /// Pushes a short message at once, if it can.
    #[inline]
    pub(super) fn inject(&mut self, options: &EndpointOptions, label: &Label, bytes: &[u8]) -> bool {
        let can = self.queue.is_empty() && self.unasked.is_none() && self.is_eager(options, bytes);
        let (true, Some(outlet)) = (can, &mut self.outlet) else { return false };
        let length = bytes.len() as u64;
        if length > outlet.cell_bytes(options) || outlet.is_moving() || outlet.needs_own_ring(options, length)
        {
            return false;
        }
        let (kind, tag) = Note::Eager(*label).encode();
        // What fails here fails again, and is told, when it is queued.
        let pushed = outlet.producer().try_push(kind, tag, bytes).unwrap_or(false);
        if pushed {
            self.untaken += bytes.len() as u64 + OVERHEAD;
        }
        pushed
    }

    /// Brings out what there is room for.
    pub(super) fn advance(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<(), PoolError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        if self.outlet.is_none() {
            let endpoint = find(pool, self.address)?;
            self.seen = Some((endpoint.process, endpoint.object.slot()));
            self.outlet = Some(Outlet::open(pool, options, stock, self.address, endpoint)?);
        }
        loop {
            let longest = self.longest();
            let Some(outlet) = &mut self.outlet else { return Ok(()) };
            if outlet.needs_own_ring(options, longest) {
                outlet.grow(pool, options, stock, self.address)?;
            }
            let moved = outlet.move_on(pool, options, stock, longest)?
                && (self.answer()? || self.begin(options, done)? || self.stream(options, stock, done)?);
            if !moved {
                return Ok(());
            }
            stock.pushed += 1;
        }
    }

    /// Bytes of the message that waits, or of one that is granted.
    fn longest(&self) -> u64 {
        let granted = self.granted.front().and_then(|number| self.sending.get(*number)?.granted);
        let queued = self.queue.front().map_or(0, |outgoing| outgoing.load.bytes().len() as u64);
        granted.map_or(0, |(_, room)| room).max(queued)
    }

    /// Pushes an answer.
    fn answer(&mut self) -> Result<bool, PoolError> {
        let (Some(control), Some(outlet)) = (self.control.front(), &mut self.outlet) else {
            return Ok(false);
        };
        let (note, bytes) = match *control {
            Control::Grant { send, receive, room } => (Note::Grant { send }, bytes_of(receive, room)),
            Control::Credit(taken) => (Note::Credit, bytes_of(taken, 0)),
            Control::Taken(buffer) => (Note::Taken { buffer }, bytes_of(0, 0)),
            Control::Opened(could) => (Note::Opened(could), bytes_of(0, 0)),
        };
        let (kind, tag) = note.encode();
        let pushed = outlet.producer().try_push(kind, tag, &bytes)?;
        if pushed {
            self.control.pop_front();
        }
        Ok(pushed)
    }

    /// Pushes the next message, or a request for it, or says that it comes unasked.
    fn begin(
        &mut self,
        options: &EndpointOptions,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<bool, PoolError> {
        let Some(Outgoing { label, load, place, until }) = self.queue.front() else { return Ok(false) };
        let is_eager = until.may_be_eager() && self.is_eager(options, load.bytes());
        let synchronous = until.is_synchronous();
        let (bytes, number) = (load.bytes(), self.sending.vacant_key() as u64);
        let length = bytes.len() as u64;
        let Some(outlet) = self.outlet.as_mut().filter(|_| self.unasked.is_none()) else { return Ok(false) };
        let is_unasked = is_eager && length > outlet.cell_bytes(options);
        let producer = outlet.producer();
        let offer = place.and_then(|place| Some((offered(number, length)?, place)));
        let pushed = if is_unasked {
            let (kind, tag) = Note::Unasked(*label).encode();
            producer.try_push(kind, tag, &bytes_of(length, 0))?
        } else if is_eager {
            let (kind, tag) = Note::Eager(*label).encode();
            producer.try_push(kind, tag, bytes)?
        } else if let Some((offer, Offset(place))) = offer {
            let (kind, tag) = Note::Offer(*label).encode();
            producer.try_push(kind, tag, &bytes_of(offer, place))?
        } else {
            let note = if synchronous { Note::Synchronous(*label) } else { Note::Request(*label) };
            let (kind, tag) = note.encode();
            producer.try_push(kind, tag, &bytes_of(number, length))?
        };
        if pushed && let Some(Outgoing { load, .. }) = self.queue.pop_front() {
            self.untaken += if is_eager { length + OVERHEAD } else { 0 };
            if is_unasked {
                let granted = Some((UNASKED, length));
                let number = self.sending.insert(Sending { load, granted, out: 0, synchronous: false });
                self.unasked = Some(number);
                self.granted.push_back(number);
            } else if is_eager {
                finish(load, done);
            } else {
                self.sending.insert(Sending { load, granted: None, out: 0, synchronous });
            }
        }
        Ok(pushed)
    }

    /// Pushes a part of the granted send whose turn it is.
    fn stream(
        &mut self,
        options: &EndpointOptions,
        stock: &mut Stock,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<bool, PoolError> {
        let (Some(number), Some(outlet)) = (self.granted.front().copied(), &mut self.outlet) else {
            return Ok(false);
        };
        let sending = self.sending.get_mut(number);
        let Some(Sending { load, granted: Some((receive, room)), out, synchronous }) = sending else {
            self.granted.pop_front();
            return Ok(true);
        };
        let rest = &load.bytes()[*out as usize..*room as usize];
        let cell_bytes = outlet.cell_bytes(options).min(rest.len() as u64);
        let is_short = cell_bytes == rest.len() as u64;
        if !outlet.producer().has_slot()? {
            return Ok(false);
        }
        let may_lie_there = outlet.buffers == Buffers::Told && !is_short && !outlet.has_own();
        let buffer = if may_lie_there { stock.take_buffer(options) } else { None };
        let pushed = match buffer {
            Some((buffer, at)) => {
                let piece = &rest[..rest.len().min(options.ring.cell_bytes() as usize)];
                self.lent.push(buffer);
                outlet.push_piece((*receive, *out), (buffer, at), piece)?
            }
            // So no pair waits for a peer of another that takes nothing of its send buffers.
            None => {
                let (kind, tag) = Note::Part { receive: *receive, offset: *out }.encode();
                let pushed = outlet.producer().try_push(kind, tag, &rest[..cell_bytes as usize])?;
                if pushed { cell_bytes } else { 0 }
            }
        };
        if pushed > 0 {
            *out += pushed;
            let (is_over, waits) = (*out == *room, *synchronous);
            self.granted.rotate_left(1);
            if is_over {
                self.granted.pop_back();
                self.unasked = self.unasked.filter(|&unasked| unasked != number);
            }
            if is_over && !waits {
                finish(self.sending.remove(number).load, done);
            }
        }
        Ok(pushed > 0)
    }

    /// The peer takes `room` bytes of a send, or has all that it takes; the error says what of it no correct endpoint writes.
    pub(super) fn grant(
        &mut self,
        send: u64,
        receive: u64,
        room: u64,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<(), &'static str> {
        let number = send as usize;
        match self.sending.get_mut(number) {
            Some(sending) if sending.granted.is_none() && room <= sending.load.bytes().len() as u64 => {
                sending.granted = Some((receive, room));
                if room == 0 {
                    finish(self.sending.remove(number).load, done);
                } else {
                    self.granted.push_back(number);
                }
                Ok(())
            }
            // What was granted has come.
            Some(Sending { granted: Some((_, whole)), out, synchronous: true, .. })
                if out == whole && room == 0 =>
            {
                finish(self.sending.remove(number).load, done);
                Ok(())
            }
            _ => Err("message grant"),
        }
    }

    /// The peer has taken eager messages; the error says what of it no correct endpoint writes.
    pub(super) fn credit(&mut self, taken: u64) -> Result<(), &'static str> {
        self.untaken = self.untaken.checked_sub(taken).ok_or("message credit")?;
        Ok(())
    }

    /// The peer has taken what lay in a send buffer, which is free again; the error says what of it no correct endpoint writes.
    pub(super) fn taken(&mut self, buffer: u64) -> Result<u32, &'static str> {
        let found = self.lent.iter().position(|&lent| u64::from(lent) == buffer);
        found.map(|index| self.lent.swap_remove(index)).ok_or("message buffer")
    }

    /// The peer has opened the ring for the pair, or cannot: then the small ring goes on. The error says what of it no correct endpoint
    /// writes.
    pub(super) fn opened(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        could: bool,
    ) -> Result<(), &'static str> {
        let outlet = self.outlet.as_mut();
        let Some(outlet) = outlet.filter(|outlet| outlet.stage() == Some(Stage::Offered)) else {
            return Err("message that a ring was opened");
        };
        match &mut outlet.own {
            Some(own) if could => own.stage = Stage::Met,
            _ => outlet.give_back(pool, options, stock),
        }
        Ok(())
    }

    /// Lets go of the pair's own ring once nothing was said there for a while.
    pub(super) fn give_back_if_idle(&mut self, options: &EndpointOptions, is_short: bool, now: Nanos) {
        if let Some(own) = self.outlet.as_mut().and_then(|outlet| outlet.own.as_mut()) {
            let published = own.producer.published();
            if own.seen.0 != published {
                own.seen = (published, now);
            }
            let patience = if is_short { options.idle.min(LOOK) } else { options.idle };
            if own.stage == Stage::Speaks && now >= own.seen.1 + patience {
                own.stage = Stage::Idle;
            }
        }
    }

    /// Fails when the peer has left, or its process is gone. Who cannot see that now looks again.
    pub(super) fn check(&mut self, pool: &Pool<M>) -> Result<(), PoolError> {
        match self.expect_alive(pool) {
            Err(PoolError::TooManyOpen { .. } | PoolError::Corrupt { .. } | PoolError::Timeout { .. }) => {
                Ok(())
            }
            seen => seen,
        }
    }

    fn expect_alive(&mut self, pool: &Pool<M>) -> Result<(), PoolError> {
        let Address { host, generation, .. } = self.address;
        let Some((process, slot)) = self.seen else {
            let endpoint = find(pool, self.address)?;
            self.seen = Some((endpoint.process, endpoint.object.slot()));
            pool.let_go(endpoint.object);
            return pool.expect_alive(&endpoint.process, "message", 0);
        };
        // Another host destroys it only when its process is gone.
        match pool.stands(host, slot, generation)? {
            true => pool.expect_alive(&process, "message", 0),
            false => Err(self.left(pool)?),
        }
    }

    /// The error for a peer that has left.
    pub(super) fn left(&self, pool: &Pool<M>) -> Result<PoolError, PoolError> {
        left(pool, self.address, self.seen.map_or(0, |(process, _)| process.pid))
    }

    /// Whether nothing was said to the peer that waits for more, so that a ring which cannot be made now may be made later.
    pub(super) fn may_retry_later(&self, error: &PoolError) -> bool {
        let is_over = matches!(
            error,
            PoolError::PeerDead { .. } | PoolError::Corrupt { .. } | PoolError::OtherJob { .. }
        );
        self.outlet.is_none() && self.broken.is_none() && self.control.is_empty() && !is_over
    }

    /// Ends every send of which nothing was said to the peer.
    pub(super) fn refuse(&mut self, error: &PoolError, done: &mut VecDeque<Completion<B, C>>) {
        let queued = std::mem::take(&mut self.queue);
        queued.into_iter().for_each(|outgoing| give_up(outgoing.load, error, done));
    }

    /// Ends every send to the peer.
    pub(super) fn lose(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        error: &PoolError,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<(), PoolError> {
        self.broken.get_or_insert_with(|| error.clone());
        if let Some(Outlet { endpoint, block, own, .. }) = &self.outlet {
            stock.withdraw(pool, self.address, (*block, endpoint.process))?;
            if own.is_some() {
                stock.release_ring(options);
            }
        }
        self.close(pool);
        // A peer that lives may still read what was lent to it.
        let lent = std::mem::take(&mut self.lent);
        if matches!(error, PoolError::PeerDead { .. }) {
            lent.into_iter().for_each(|buffer| stock.free_buffer(buffer));
        }
        // What is taken of a send is the last that its peer waits for, and no operation of ours is left to fail.
        let ends_a_send = |control: &Control| matches!(control, Control::Grant { room: 0, .. });
        if !matches!(error, PoolError::PeerDead { .. }) && self.control.iter().any(ends_a_send) {
            done.push_back(Completion::Lost { error: error.clone() });
        }
        self.control.clear();
        self.granted.clear();
        self.refuse(error, done);
        let sending = std::mem::take(&mut self.sending);
        sending.into_iter().for_each(|(_, sending)| give_up(sending.load, error, done));
        Ok(())
    }
}

impl<M: Memory, B, C> PeerTraffic<M, B, C> {
    /// Lets go of the ring.
    pub(super) fn close(&mut self, pool: &Pool<M>) {
        if let Some(Outlet { endpoint, own, .. }) = self.outlet.take() {
            own.into_iter().for_each(|own| pool.abandon(own.ring));
            pool.let_go(endpoint.object);
        }
    }
}

impl<M: Memory> Outlet<M> {
    /// Takes a small ring to the peer of `endpoint`, which learns of it from the first message.
    fn open(
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        to: Address,
        endpoint: HeldEndpoint,
    ) -> Result<Self, PoolError> {
        let own = stock.address;
        let map = Map::new(pool.layout().geometry(), endpoint.object.at());
        let (block, place) = match stock.take_block(pool, options, to, map.credits(own.host, own.port)) {
            Ok(taken) => taken,
            Err(error) => {
                pool.let_go(endpoint.object);
                return Err(error);
            }
        };
        let (memory, word) = (pool.memory(), map.sender_word(own.host, own.port));
        memory.store(word, encode_sender(own.generation));
        // SYNC: pairs with `Inlets::search`: the block is said. The fence of the first message is this word's, too.
        memory.write_back(word, 8);
        let link = link(pool, to.host, wakes(pool, options, &endpoint));
        let small = Producer::new(memory.clone(), options.small_ring, place, link).of_new_ring();
        let small = small.with_summary(map.news_byte(own.host, own.port), 0);
        Ok(Self {
            endpoint,
            block,
            small,
            small_shape: options.small_ring,
            own: None,
            buffers: Buffers::Untold,
            passed: 0,
            asks_at: options.short_talk,
            has_asked: false,
        })
    }

    /// The end that speaks now.
    #[inline]
    fn producer(&mut self) -> &mut Producer<M, Alive> {
        match &mut self.own {
            Some(own) if own.speaks() => &mut own.producer,
            _ => &mut self.small,
        }
    }

    #[inline]
    fn has_own(&self) -> bool {
        self.own.as_ref().is_some_and(OwnRing::speaks)
    }

    fn stage(&self) -> Option<Stage> {
        self.own.as_ref().map(|own| own.stage)
    }

    /// Whether the peer is to be told something of the pair's own ring.
    #[inline]
    fn is_moving(&self) -> bool {
        self.own.as_ref().is_some_and(|own| !matches!(own.stage, Stage::Offered | Stage::Speaks))
    }

    #[inline]
    fn cell_bytes(&self, options: &EndpointOptions) -> u64 {
        if self.has_own() { options.ring.cell_bytes() } else { self.small_shape.cell_bytes() }
    }

    /// Whether it is time to ask for a ring of its own: the pair has talked for a while, or a message is too long to go out unasked.
    #[inline]
    fn needs_own_ring(&self, options: &EndpointOptions, bytes: u64) -> bool {
        self.own.is_none()
            && (self.small.published() >= self.asks_at || !self.has_asked && bytes > options.eager_bytes)
    }

    /// Makes a ring of its own for the pair, if there is room; else it asks again when it has talked twice as much.
    fn grow(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        to: Address,
    ) -> Result<(), PoolError> {
        (self.has_asked, self.asks_at) = (true, 2 * self.small.published() + options.short_talk);
        if !stock.reserve_ring(pool, options)? {
            return Ok(());
        }
        let name = ring_name(pool.member().job, stock.address, to);
        match create_ring(pool, &name, options.ring) {
            Ok((ring, place)) => {
                let link = link(pool, to.host, wakes(pool, options, &self.endpoint));
                let producer = Producer::new(pool.memory().clone(), options.ring, place, link).of_new_ring();
                let seen = (0, pool.memory().now());
                self.own = Some(OwnRing { ring, producer, stage: Stage::Made, seen });
                Ok(())
            }
            Err(error @ (PoolError::Evicted { .. } | PoolError::Memory(_))) => Err(error),
            // The small ring goes on. That bytes are free does not say that as many lie together.
            Err(error) => {
                stock.release_ring(options);
                stock.is_short = true;
                tracing::debug!(%error, peer = ?to, "no ring of its own");
                Ok(())
            }
        }
    }

    /// Tells the peer what it is to know of a ring that the pair has for itself, or of send buffers for a message of so many bytes;
    /// whether nothing is left to tell.
    fn move_on(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        longest: u64,
    ) -> Result<bool, PoolError> {
        if self.own.is_none() {
            return self.announce_buffers(pool, options, stock, longest);
        }
        let Some(own) = self.own.as_mut().filter(|own| !matches!(own.stage, Stage::Offered | Stage::Speaks))
        else {
            return Ok(true);
        };
        let note = if own.stage == Stage::Made { Note::Open } else { Note::Moved };
        let (kind, tag) = note.encode();
        let producer = if own.stage == Stage::Idle { &mut own.producer } else { &mut self.small };
        if !producer.try_push(kind, tag, &bytes_of(0, 0))? {
            return Ok(false);
        }
        let map = Map::new(pool.layout().geometry(), self.endpoint.object.at());
        let byte = map.news_byte(stock.address.host, stock.address.port);
        match own.stage {
            Stage::Idle => {
                self.passed += own.producer.published();
                self.small.count_in(byte, self.passed);
                (self.has_asked, self.asks_at) = (false, self.small.published() + options.short_talk);
                self.give_back(pool, options, stock);
            }
            Stage::Met => {
                own.producer.count_in(byte, self.passed + self.small.published());
                own.stage = Stage::Speaks;
            }
            _ => own.stage = Stage::Offered,
        }
        Ok(true)
    }

    /// Tells the peer of the send buffers, if a message is long and the pair has no ring of its own; whether nothing is left to tell.
    fn announce_buffers(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        stock: &mut Stock,
        longest: u64,
    ) -> Result<bool, PoolError> {
        if self.buffers != Buffers::Untold || longest <= self.small_shape.cell_bytes() {
            return Ok(true);
        }
        let Some((slot, generation)) = stock.make_buffers(pool, options)? else {
            self.buffers = Buffers::Missing;
            return Ok(true);
        };
        let (kind, tag) = Note::Buffers.encode();
        let pushed = self.small.try_push(kind, tag, &bytes_of(slot.into(), generation))?;
        self.buffers = if pushed { Buffers::Told } else { Buffers::Untold };
        Ok(pushed)
    }

    /// Gives the pair's own ring back to the pool; the peer may still read what was said there.
    fn give_back(&mut self, pool: &Pool<M>, options: &EndpointOptions, stock: &mut Stock) {
        if let Some(own) = self.own.take() {
            stock.release_ring(options);
            pool.abandon(own.ring);
        }
    }

    /// Whether the peer has shown itself, or has nothing to take. It has if it met the pair at a ring of its own.
    fn is_met(&mut self) -> Result<bool, PoolError> {
        if self.has_own() { Ok(true) } else { self.small.is_met() }
    }

    /// Copies a piece of a message to a send buffer and says so; returns its bytes. The small ring has a slot for it.
    fn push_piece(
        &mut self,
        (receive, offset): (u64, u64),
        (buffer, at): (u32, Offset),
        piece: &[u8],
    ) -> Result<u64, PoolError> {
        let (memory, bytes) = (self.small.memory(), piece.len() as u64);
        memory.copy_in_nt(at, piece)?;
        // SYNC: pairs with `Endpoint::take_piece`, once the receiver has seen the header.
        memory.sfence();
        let (kind, tag) = Note::Piece { receive, offset }.encode();
        let pushed = self.small.try_push(kind, tag, &bytes_of(at.0, piece_of(buffer, bytes)))?;
        assert!(pushed, "a slot was free");
        Ok(bytes)
    }
}

/// Where the peer sleeps, if it does.
fn wakes<M: Memory>(pool: &Pool<M>, options: &EndpointOptions, endpoint: &HeldEndpoint) -> Option<Bell> {
    let process = endpoint.process;
    options.rings_bells.then(|| pool.layout().bell(process.host, process.slot))
}

/// The endpoint with this address, held open.
fn find<M: Memory>(pool: &Pool<M>, address: Address) -> Result<HeldEndpoint, PoolError> {
    if address.realm != realm_of(pool) {
        return Err(PoolError::OtherJob { job: pool.member().job });
    }
    match hold_endpoint(pool, (address.host, address.port), |generation| generation == address.generation) {
        Err(PoolError::NotFound { .. }) => Err(left(pool, address, 0)?),
        held => held,
    }
}

/// The error for an endpoint that is gone, of a process that was `pid`, or is not known.
fn left<M: Memory>(pool: &Pool<M>, address: Address, pid: u32) -> Result<PoolError, PoolError> {
    let (peer, epoch) = (crate::Peer::new(address.host, pid), pool.epoch()?);
    Ok(PoolError::PeerDead { peer, what: "endpoint", epoch, sequence: address.generation })
}

fn finish<B, C>(load: Load<B, C>, done: &mut VecDeque<Completion<B, C>>) {
    if let Load::Lent(buffer, context) = load {
        done.push_back(Completion::Sent { buffer, context });
    }
}

fn give_up<B, C>(load: Load<B, C>, error: &PoolError, done: &mut VecDeque<Completion<B, C>>) {
    done.push_back(match load {
        Load::Lent(buffer, context) => fail(buffer, context, error),
        Load::Copied(_) => Completion::Lost { error: error.clone() },
    });
}
