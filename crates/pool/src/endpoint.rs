//! Endpoints: messages between any two processes of a job, matched by tag as MPI libraries and libfabric match them.
//!
//! Each pair of endpoints that talks has a small ring in each direction, taken when the first message is sent. It is a block of
//! memory that the sender has for all its peers ([`EndpointOptions::small_ring`]). A pair that talks much, or sends a long message, gets
//! a ring of its own as long as there is room ([`EndpointOptions::memory_bytes`]), and gives it back once it is idle
//! ([`EndpointOptions::idle`]).
//!
//! - A short message is pushed at once (eager). It lies in the receiver's memory until a receive matches it. If no cell of the ring
//!   holds it, its parts go out unasked, and no other message between them.
//! - A request announces a long message, or one whose sender waits until it is received. It is matched in the same order.
//!   When the receiver grants it, the bytes go out in parts, straight into the buffer of the receive. A pair that has only small rings
//!   sends the parts through the send buffers of the sender, which all its peers share, and through its ring when those are taken.
//!
//! So a message that no receive matches yet never blocks another. The memory for eager messages is bounded: each sender counts
//! the bytes that its receiver has not yet taken, and uses requests beyond the window.
//!
//! Only [`Endpoint::close`] waits. To wait for an operation, call [`Endpoint::progress`] until [`Endpoint::completion`]
//! returns it. A caller that wants to sleep meanwhile does so at [`Endpoint::watch`], if all ring
//! ([`EndpointOptions::rings_bells`]).

#[cfg(feature = "hostile")]
pub mod hostile;
mod inlet;
mod outlet;
mod place;
mod stock;
mod watch;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Memory, Nanos, Offset};
use slab::Slab;

use self::inlet::Inlets;
use self::outlet::{Load, Outgoing, PeerTraffic};
use self::place::Blocks;
pub(crate) use self::place::{SmallRings, create_ring, find_ring, receivers_of};
use self::stock::Stock;
pub use self::watch::Watch;
pub use self::wire::LONGEST;
use self::wire::{Note, RECEIVES, UNASKED, buffer_of, offer_of, words_of};
use crate::deviation::Deviation;
use crate::format::Geometry;
use crate::ring::{Envelope, INLINE, RingShape};
use crate::summary::MOST_SLOTS;
use crate::{Pool, PoolError};

/// An endpoint that is called seldom checks its peers after so long, and looks at the clock once in so many calls.
const LOOK: Duration = Duration::from_secs(1);
const CALLS_A_GLANCE: u32 = 64;
/// Peers of which it asks whether they live, when a second is not over.
const ASKED: usize = 64;

/// What a message that nobody received costs beside its bytes.
const OVERHEAD: u64 = 64;

/// What tells an endpoint from all that there ever were in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Its host.
    pub host: u16,
    /// Which it is of those of its host.
    pub port: u16,
    /// The generation of its object.
    pub generation: u64,
    /// A hash of its pool and its job: no other job can reach it.
    pub realm: u32,
}

impl Address {
    /// The address as bytes, little-endian: host, port, realm, generation.
    #[must_use]
    pub fn encode(self) -> [u8; 16] {
        let place = u64::from(self.host) | u64::from(self.port) << 16 | u64::from(self.realm) << 32;
        let word = u128::from(place) | u128::from(self.generation) << 64;
        word.to_le_bytes()
    }

    /// The inverse of [`Address::encode`]; `None` for bytes that it never gives.
    #[must_use]
    pub fn decode(bytes: [u8; 16]) -> Option<Self> {
        let word = u128::from_le_bytes(bytes);
        let (place, generation) = (word as u64, (word >> 64) as u64);
        let (host, port, realm) = (place as u16, (place >> 16) as u16, (place >> 32) as u32);
        (generation != 0).then_some(Self { host, port, generation, realm })
    }
}

/// What a message says beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// Which sort of message it is: a receive takes those of its own kind only.
    pub kind: u8,
    /// What a receive matches.
    pub tag: u64,
    /// A word for the receiver.
    pub data: Option<u32>,
}

/// Bytes that the caller lends until an operation is complete.
pub trait MessageBuffer {
    /// The bytes to send.
    fn bytes(&self) -> &[u8];
    /// The bytes to receive into.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Where in the pool the bytes to send lie, if they do. The receiver reads a very long message there.
    fn place(&self) -> Option<Offset> {
        None
    }
}

impl MessageBuffer for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Which messages a receive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// From whom; anybody when it is `None`.
    pub from: Option<u32>,
    /// The kind of the label.
    pub kind: u8,
    /// The tag, in all bits but those of `ignore`.
    pub tag: u64,
    /// Bits of the tag that may be anything.
    pub ignore: u64,
}

impl Filter {
    fn takes(&self, from: u32, label: &Label) -> bool {
        self.kind == label.kind
            && (self.tag ^ label.tag) & !self.ignore == 0
            && self.from.is_none_or(|wanted| wanted == from)
    }
}

/// A message that has come, or was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The peer that sent it.
    pub from: u32,
    /// What it says.
    pub label: Label,
    /// How long it is.
    pub bytes: u64,
}

/// An operation that is over, with what was lent for it.
#[derive(Debug)]
pub enum Completion<B, C> {
    /// The bytes are the caller's again.
    Sent {
        /// What was sent.
        buffer: B,
        /// The caller's word.
        context: C,
    },
    /// A message has come.
    Received {
        /// Where it begins.
        buffer: B,
        /// The caller's word.
        context: C,
        /// Whose message it is, and its whole length, of which the buffer holds as much as it can.
        arrival: Arrival,
    },
    /// The operation did not succeed.
    Failed {
        /// What was lent; some of a message may stand in it.
        buffer: B,
        /// The caller's word.
        context: C,
        /// Why.
        error: PoolError,
    },
    /// A copy that was injected did not go out, or an answer that the peer may wait for.
    Lost {
        /// Why.
        error: PoolError,
    },
}

/// When a send is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompleteWhen {
    /// Its bytes are out, and the caller's again.
    Out,
    /// A receive has matched it, and its bytes are out. It is not eager, however short.
    Matched,
    /// As [`CompleteWhen::Received`], where it is not eager.
    LongReceived,
    /// What the receiver takes of it is where it belongs, or could not be read there. It is not eager, however short.
    Received,
}

impl CompleteWhen {
    /// Whether the message may go out before a receive matches it.
    const fn may_be_eager(self) -> bool {
        matches!(self, Self::Out | Self::LongReceived)
    }

    /// Whether the receiver says when the message is where it belongs.
    const fn is_synchronous(self) -> bool {
        matches!(self, Self::LongReceived | Self::Received)
    }
}

/// How an endpoint sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointOptions {
    /// The ring that a pair has for itself.
    pub ring: RingShape,
    /// The ring with which a pair begins.
    pub small_ring: RingShape,
    /// Small rings that have room in the object of the endpoint itself; objects for more are made as they are needed.
    pub first_blocks: u32,
    /// Messages and parts on a small ring after which the pair asks for one of its own.
    pub short_talk: u64,
    /// Send buffers, each as long as a cell of `ring`, that all peers share which have no ring of their own.
    pub send_buffers: u32,
    /// Bytes of the pool that the endpoint takes at most for rings of pairs. Small rings are always made.
    pub memory_bytes: u64,
    /// A pair gives its own ring back once it has said nothing there for so long, or for a second while another waits for room.
    pub idle: Duration,
    /// Messages up to so many bytes are eager.
    pub eager_bytes: u64,
    /// Bytes of eager messages that one peer has not taken yet, at most; each counts for 64 bytes more than it has.
    pub window_bytes: u64,
    /// Messages from so many bytes on are read in place where they lie in the pool. The parts of a shorter one are read while the
    /// next are written, which is sooner over.
    pub in_place_bytes: u64,
    /// How long [`Endpoint::close`] waits for a peer to come for its messages.
    pub timeout: Duration,
    /// Calls of [`Endpoint::progress`] after which it asks who died of those that something is awaited of, 64 of them in turn. It asks of
    /// all when a second is over.
    pub calls_a_look: u32,
    /// Calls of [`Endpoint::progress`] in vain after which it looks for senders that are new, at most.
    pub calls_a_search: u32,
    /// Whether each message wakes the process of the peer, which may sleep at its [`Endpoint::watch`]. It costs a fence more.
    pub rings_bells: bool,
}

impl EndpointOptions {
    const fn blocks(&self) -> Blocks {
        Blocks { small: self.small_ring, first: self.first_blocks }
    }
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self {
            ring: RingShape::default(),
            small_ring: RingShape::SMALL,
            first_blocks: 8,
            short_talk: 32,
            send_buffers: 4,
            memory_bytes: u64::MAX,
            idle: Duration::from_secs(10),
            eager_bytes: 64 << 10,
            window_bytes: 1 << 20,
            in_place_bytes: 16 << 20,
            timeout: Duration::from_secs(10),
            calls_a_look: 1 << 14,
            calls_a_search: 1 << 12,
            rings_bells: false,
        }
    }
}

/// Chunks of the pool that a host holds for `endpoints` endpoints and `rings` rings from them to others, with the usual
/// [`EndpointOptions`], at most.
#[must_use]
pub fn chunks(geometry: &Geometry, endpoints: u64, rings: u64) -> u64 {
    place::chunks(geometry, &EndpointOptions::default(), endpoints, rings)
}

/// Chunks of the pool that a host holds for `endpoints` endpoints, from which messages go to others in `pairs` pairs, at least: each
/// pair has its small ring alone, and each endpoint its send buffers.
#[must_use]
pub fn least_chunks(geometry: &Geometry, endpoints: u64, pairs: u64) -> u64 {
    place::least_chunks(geometry, &EndpointOptions::default(), endpoints, pairs)
}

/// A receive that nothing has matched.
struct Posted<B, C> {
    filter: Filter,
    buffer: B,
    context: C,
}

/// A message that no receive has matched.
struct Unexpected {
    arrival: Arrival,
    body: Body,
}

enum Body {
    /// All of it.
    Whole(Vec<u8>),
    /// It waits for a grant; a synchronous one for the word, too, that it has come.
    Request { send: u64, synchronous: bool },
    /// It lies in the pool, and stays there until the send of this number is told that nothing more is taken of it.
    Offer(u64, Offset),
}

/// What was taken of a ring.
enum Taken<B, C> {
    Nothing,
    Message,
    /// A message with which this is over.
    Over(Completion<B, C>),
}

/// Where the bytes of a message go.
enum Destination {
    /// To the posted receive of this number.
    Posted(usize, Label),
    /// Where they are kept until something receives them.
    Kept(Label),
    /// To a receive whose message comes in parts.
    Part(usize),
    /// To a message that comes in parts, unasked.
    PartialMessage,
    /// Nowhere: they are the words of a note.
    Words(Note),
}

/// A receive whose message comes in parts.
struct Receiving<B, C> {
    arrival: Arrival,
    /// Bytes that are to come, and that have.
    room: u64,
    come: u64,
    /// The number of the send, if that is to be told when all has come.
    told: Option<u64>,
    buffer: B,
    context: C,
}

/// A message that comes in parts, unasked: when it is whole, it has arrived.
struct PartialMessage {
    label: Label,
    /// Bytes of the whole.
    bytes: u64,
    come: Vec<u8>,
}

impl PartialMessage {
    /// Where a part goes, if it is the next.
    fn room(&mut self, offset: u64, bytes: u64) -> Option<&mut [u8]> {
        let come = self.come.len() as u64;
        let is_next = come == offset && bytes > 0 && bytes <= self.bytes - come;
        is_next.then(|| {
            self.come.resize((come + bytes) as usize, 0);
            &mut self.come[come as usize..]
        })
    }
}

/// One end of all conversations of a process. `B` is what the caller lends, `C` its word for an operation.
pub struct Endpoint<M: Memory, B, C> {
    pool: Arc<Pool<M>>,
    options: EndpointOptions,
    stock: Stock,
    peers: Vec<PeerTraffic<M, B, C>>,
    known: BTreeMap<Address, u32>,
    /// The peers for which something waits, in turn.
    listed: VecDeque<u32>,
    inlets: Inlets<M>,
    posted: VecDeque<Posted<B, C>>,
    unexpected: VecDeque<Unexpected>,
    receiving: Slab<Receiving<B, C>>,
    /// By their sender.
    coming: BTreeMap<u32, PartialMessage>,
    done: VecDeque<Completion<B, C>>,
    calls: u32,
    /// How many peers there were when it was last asked for progress.
    met: usize,
    /// When it asks who died, though the calls be few.
    look_at: Nanos,
    /// The peer of which it asks next.
    asks: usize,
    sent_bytes: u64,
    taken: u64,
}

impl<M: Memory, B: MessageBuffer, C> Endpoint<M, B, C> {
    /// Makes an endpoint, which others find from here on.
    ///
    /// # Errors
    /// [`PoolError::NoSlot`] when its host has as many endpoints as processes; [`PoolError::Argument`] when its two rings have more slots
    /// than a byte of the news counts; those of [`Pool::create`].
    pub fn open(pool: Arc<Pool<M>>, options: EndpointOptions) -> Result<Self, PoolError> {
        let slots = options.ring.slots() + options.small_ring.slots();
        if slots > MOST_SLOTS {
            let (what, value) = ("the slots of both rings of a pair", slots.to_string());
            return Err(PoolError::Argument { what, value, expected: "give at most 255 together" });
        }
        let stock = Stock::open(&pool, &options)?;
        let inlets = Inlets::new(&pool, stock.map(), stock.address, &options);
        let now = pool.memory().now();
        Ok(Self {
            pool,
            options,
            stock,
            peers: vec![],
            known: BTreeMap::new(),
            listed: VecDeque::new(),
            inlets,
            posted: VecDeque::new(),
            unexpected: VecDeque::new(),
            receiving: Slab::new(),
            coming: BTreeMap::new(),
            done: VecDeque::new(),
            calls: 0,
            met: 0,
            look_at: now + LOOK,
            asks: 0,
            sent_bytes: 0,
            taken: 0,
        })
    }

    /// What others connect to.
    #[must_use]
    pub const fn address(&self) -> Address {
        self.stock.address
    }

    /// Bytes of the pool that it has: for itself, its small rings, its send buffers, and rings of pairs to which it sends.
    #[must_use]
    pub const fn pool_bytes(&self) -> u64 {
        self.stock.bytes()
    }

    /// The number of the peer with this address, from 0 in the order in which they became known.
    pub fn connect(&mut self, address: Address) -> u32 {
        let number = meet(&mut self.known, &mut self.peers, address);
        self.expect_endpoints(self.peers.len() as u64 + u64::from(!self.known.contains_key(&self.address())));
        number
    }

    /// Keeps room in the pool for the small rings between so many endpoints, this one among them, before they are known: no pair gets
    /// a ring of its own there.
    pub fn expect_endpoints(&mut self, endpoints: u64) {
        self.stock.endpoints = self.stock.endpoints.max(endpoints);
    }

    /// The address of a peer.
    #[must_use]
    pub fn address_of(&self, peer: u32) -> Option<Address> {
        self.peers.get(peer as usize).map(|peer| peer.address)
    }

    /// The bytes of all messages that it was given to send.
    #[must_use]
    pub const fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// The messages and parts of messages that it has taken in or brought out: while the number stands, polls are in vain.
    #[must_use]
    pub const fn moves(&self) -> u64 {
        self.stock.pushed + self.taken
    }

    /// How to wait for what comes to this endpoint.
    #[must_use]
    pub fn watch(&self) -> Watch<M> {
        Watch::new(&self.pool)
    }

    /// Lets the next [`Endpoint::progress`] look for senders that are new.
    pub fn search_next(&mut self) {
        self.inlets.search_next();
    }

    /// Lets the next look read the news of all hosts, which says of a peer that is new: for those that look seldom, because others
    /// want the processor.
    pub fn read_news_next(&mut self) {
        self.inlets.read_news_next();
    }

    /// Whether nothing waits for room in a ring. It needs no [`Endpoint::progress`] then, unless a peer awaits something of it.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.listed.iter().all(|&peer| self.peers[peer as usize].is_quiet())
    }

    /// Puts a peer on the list if something waits for it.
    #[inline]
    fn list(&mut self, number: u32) {
        let peer = &mut self.peers[number as usize];
        if !peer.is_listed && !peer.is_quiet() {
            peer.is_listed = true;
            self.listed.push_back(number);
        }
    }

    /// Asks whether the process of a peer lives and has not left; else every operation with it fails.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`]; those of [`Endpoint::progress`].
    pub fn check_alive(&mut self, peer: u32) -> Result<(), PoolError> {
        let Some(traffic) = self.peers.get_mut(peer as usize) else { return Ok(()) };
        let checked = match &traffic.broken {
            Some(broken) => return Err(broken.clone()),
            None => traffic.check(&self.pool),
        };
        if let Err(error) = &checked {
            self.lose(peer, error)?;
        }
        checked
    }

    /// Sends what `buffer` holds, which is complete when the bytes are out.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when there is no such peer, or the message is too long.
    pub fn send(&mut self, to: u32, label: Label, buffer: B, context: C) -> Result<(), PoolError> {
        self.send_until(CompleteWhen::Out, to, label, buffer, context)
    }

    /// Sends what `buffer` holds, which is complete when `until` says.
    ///
    /// # Errors
    /// Those of [`Endpoint::send`].
    pub fn send_until(
        &mut self,
        until: CompleteWhen,
        to: u32,
        label: Label,
        buffer: B,
        context: C,
    ) -> Result<(), PoolError> {
        self.sent_bytes += buffer.bytes().len() as u64;
        if until.may_be_eager()
            && let Some(peer) = self.peers.get_mut(to as usize)
            && peer.inject(&self.options, &label, buffer.bytes())
        {
            self.done.push_back(Completion::Sent { buffer, context });
            return Ok(());
        }
        let is_long = buffer.bytes().len() as u64 >= self.options.in_place_bytes;
        let place = if is_long { buffer.place() } else { None };
        if let Some(place) = place {
            // SYNC: for `Endpoint::read_in_place`: one fence stands between it and every header that offers it.
            let memory = self.pool.memory();
            memory.write_back(place, buffer.bytes().len() as u64);
            memory.sfence();
        }
        self.start(to, Outgoing { label, load: Load::Lent(buffer, context), place, until })
    }

    /// Sends a copy of `bytes`, and says no more of it, but when it is lost.
    ///
    /// # Errors
    /// Those of [`Endpoint::send`], and whatever keeps the message from being queued, such as [`PoolError::Full`] when the
    /// pool has no room for the ring. A peer that is gone is no error here: the message is lost.
    pub fn inject(&mut self, to: u32, label: Label, bytes: &[u8]) -> Result<(), PoolError> {
        self.sent_bytes += bytes.len() as u64;
        if let Some(peer) = self.peers.get_mut(to as usize)
            && peer.inject(&self.options, &label, bytes)
        {
            return Ok(());
        }
        let load = Load::Copied(bytes.to_vec());
        self.start(to, Outgoing { label, load, place: None, until: CompleteWhen::Out })
    }

    fn start(&mut self, to: u32, outgoing: Outgoing<B, C>) -> Result<(), PoolError> {
        let refuse = |what, value, expected| Err(PoolError::Argument { what, value, expected });
        let bytes = outgoing.load.bytes().len() as u64;
        let Some(peer) = self.peers.get_mut(to as usize) else {
            return refuse("the peer", to.to_string(), "connect to its address first");
        };
        if bytes > LONGEST {
            return refuse("the message", format!("{bytes} bytes"), "send less than 1 TiB at once");
        }
        peer.queue.push_back(outgoing);
        let moved = peer.advance(&self.pool, &self.options, &mut self.stock, &mut self.done);
        let Err(error) = moved else {
            self.list(to);
            return Ok(());
        };
        // Nothing but this call's error can tell the caller of a copy that does not go out: it has no completion.
        let is_refused = peer.ends_with_copy() && !matches!(error, PoolError::PeerDead { .. });
        if is_refused {
            peer.queue.pop_back();
        }
        match (self.lose(to, &error), is_refused) {
            (lost, true) => Err(lost.err().unwrap_or(error)),
            (Ok(()), false) => Ok(()),
            // What is refused is the caller's again; what has begun ends with a completion.
            (Err(lost), false) => self.peers[to as usize].queue.pop_back().map_or(Ok(()), |_| Err(lost)),
        }
    }

    /// Receives the first message that `filter` takes, into `buffer`.
    pub fn receive(&mut self, filter: Filter, buffer: B, context: C) {
        let position = self.unexpected.iter().position(|message| {
            let Arrival { from, label, .. } = &message.arrival;
            filter.takes(*from, label)
        });
        let posted = Posted { filter, buffer, context };
        match position.map(|index| pick(&mut self.unexpected, index)) {
            Some(message) => {
                let from = message.arrival.from;
                self.deliver(message, posted);
                self.list(from);
            }
            None => match filter.from.and_then(|from| self.peers.get(from as usize)?.broken.clone()) {
                Some(error) => self.done.push_back(fail(posted.buffer, posted.context, &error)),
                None => self.posted.push_back(posted),
            },
        }
    }

    /// As [`Endpoint::receive`], and before the receives that were posted earlier: into what is left of a buffer for many.
    pub fn receive_first(&mut self, filter: Filter, buffer: B, context: C) {
        let earlier = self.posted.len();
        self.receive(filter, buffer, context);
        if self.posted.len() > earlier {
            self.posted.rotate_right(1);
        }
    }

    /// The first message that has come, or was announced, and that `filter` takes; it stays.
    #[must_use]
    pub fn peek(&self, filter: Filter) -> Option<Arrival> {
        let mut arrivals = self.unexpected.iter().map(|message| message.arrival);
        arrivals.find(|arrival| filter.takes(arrival.from, &arrival.label))
    }

    /// Takes back a receive that nothing has matched, the oldest whose context `is` the one.
    pub fn cancel(&mut self, is: impl Fn(&C) -> bool) -> Option<(B, C)> {
        let index = self.posted.iter().position(|posted| is(&posted.context))?;
        self.posted.remove(index).map(|posted| (posted.buffer, posted.context))
    }

    /// An operation that is over.
    #[inline]
    pub fn completion(&mut self) -> Option<Completion<B, C>> {
        self.done.pop_front()
    }

    /// Takes in what has come, and sends on what waited for room.
    ///
    /// # Errors
    /// [`PoolError::Evicted`], [`PoolError::Memory`]. What fails with one peer fails the operations with it.
    pub fn progress(&mut self) -> Result<(), PoolError> {
        if let Some(over) = self.step()? {
            self.done.push_front(over);
        }
        Ok(())
    }

    /// As [`Endpoint::progress`], and then as [`Endpoint::completion`], which has what else is over.
    ///
    /// # Errors
    /// Those of [`Endpoint::progress`].
    #[inline(always)]
    pub fn step(&mut self) -> Result<Option<Completion<B, C>>, PoolError> {
        if self.is_idle()? {
            self.calls += 1;
            return Ok(self.completion());
        }
        self.make_progress()
    }

    /// Whether there is nothing to do, as most who poll find.
    #[inline(always)]
    fn is_idle(&mut self) -> Result<bool, PoolError> {
        let calls = self.calls + 1;
        let is_quiet = calls < self.options.calls_a_look
            && !calls.is_multiple_of(CALLS_A_GLANCE)
            && self.met == self.peers.len()
            && self.listed.is_empty();
        if is_quiet { self.inlets.is_idle() } else { Ok(false) }
    }

    #[inline(never)]
    fn make_progress(&mut self) -> Result<Option<Completion<B, C>>, PoolError> {
        let mut over = self.receive_pending()?;
        if !self.done.is_empty() {
            self.done.extend(over.take());
        }
        if let Err(error) = self.send_on() {
            over.into_iter().for_each(|over| self.done.push_front(over));
            return Err(error);
        }
        Ok(over.or_else(|| self.completion()))
    }

    /// Sends on what waited for room, and asks now and then who died.
    #[inline(always)]
    fn send_on(&mut self) -> Result<(), PoolError> {
        for _ in 0..self.listed.len() {
            let Some(number) = self.listed.pop_front() else { break };
            let peer = &mut self.peers[number as usize];
            peer.is_listed = false;
            if peer.is_quiet() {
                continue;
            }
            match peer.advance(&self.pool, &self.options, &mut self.stock, &mut self.done) {
                Ok(()) => self.list(number),
                Err(error) => self.lose(number, &error)?,
            }
        }
        self.calls += 1;
        let is_taken_again = self.is_place_taken_again();
        if self.calls >= self.options.calls_a_look || is_taken_again || self.is_time_to_look() {
            self.calls = 0;
            let now = self.pool.memory().now();
            self.look_for_the_idle(now);
            let asks_all = is_taken_again || now >= self.look_at;
            if now >= self.look_at {
                self.look_at = now + LOOK;
            }
            self.look_for_the_dead(if asks_all { self.peers.len() } else { ASKED })?;
        }
        Ok(())
    }

    /// Whether a peer that is new since the last call has the place of an earlier one, which has left.
    fn is_place_taken_again(&mut self) -> bool {
        let met = std::mem::replace(&mut self.met, self.peers.len());
        self.peers[met..].iter().any(|peer| {
            let first = Address { generation: 0, ..peer.address };
            self.known.range(first..peer.address).next().is_some()
        })
    }

    fn is_time_to_look(&self) -> bool {
        self.calls.is_multiple_of(CALLS_A_GLANCE) && self.pool.memory().now() >= self.look_at
    }

    /// Leaves, when the peers have what was sent to them, or nobody of them comes for it in time. What is still under way is
    /// forgotten.
    ///
    /// # Errors
    /// Those of [`Endpoint::progress`].
    pub fn close(mut self) -> Result<(), PoolError> {
        let memory = self.pool.memory().clone();
        let deadline = memory.now() + self.options.timeout;
        while self.peers.iter_mut().any(|peer| peer.has_undelivered()) && memory.now() < deadline {
            self.progress()?;
            memory.pause();
        }
        Ok(())
    }

    // What comes.

    /// Takes in the messages that have come, until an operation is over, so that a wait for it needs no further look. Returns
    /// that operation, if it is not among those that are done.
    #[inline(always)]
    fn receive_pending(&mut self) -> Result<Option<Completion<B, C>>, PoolError> {
        let done = self.done.len();
        self.inlets.look(&self.pool)?;
        while self.done.len() == done
            && let Some(inlet) = self.inlets.next()
        {
            let Self { inlets, known, peers, .. } = self;
            let from = inlets.from(inlet, |sender| meet(known, peers, sender));
            // As many messages as a pair has slots at most.
            for _ in 0..self.options.small_ring.slots() + self.options.ring.slots() {
                match self.take(inlet, from) {
                    Ok(Taken::Nothing) => break,
                    Ok(Taken::Message) => {
                        self.taken += 1;
                        self.list(from);
                        if self.done.len() > done {
                            break;
                        }
                    }
                    Ok(Taken::Over(over)) => {
                        self.taken += 1;
                        self.list(from);
                        return Ok(Some(over));
                    }
                    Err(error) => {
                        self.inlets.close(&self.pool, inlet);
                        self.lose(from, &error)?;
                        break;
                    }
                }
            }
        }
        Ok(None)
    }

    /// Takes the next message of a ring: straight to where it belongs, if that is known.
    #[inline(always)]
    fn take(&mut self, inlet: usize, from: u32) -> Result<Taken<B, C>, PoolError> {
        let (mut whole, mut words, mut goal) = (Vec::new(), [0; INLINE], None);
        let Self { inlets, posted, receiving, coming, pool, .. } = self;
        let popped = inlets.pop(pool, inlet, |envelope| {
            let parts = (receiving, coming);
            let (found, room) = destination_of(posted, parts, from, envelope, &mut whole, &mut words)?;
            goal = Some(found);
            Ok(room)
        });
        let bytes = match popped {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Ok(Taken::Nothing),
            Err(error) => return Err(self.miss(goal, error)),
        };
        match goal.expect("what was popped went somewhere") {
            Destination::Posted(index, label) => {
                let Posted { buffer, context, .. } = pick(&mut self.posted, index);
                self.peers[from as usize].take(&self.options, bytes);
                let arrival = Arrival { from, label, bytes };
                return Ok(Taken::Over(Completion::Received { buffer, context, arrival }));
            }
            Destination::Kept(label) => {
                self.arrive(Unexpected { arrival: Arrival { from, label, bytes }, body: Body::Whole(whole) });
            }
            Destination::Part(key) => {
                return Ok(self.come(from, key, bytes));
            }
            Destination::PartialMessage => self.arrive_if_whole(from),
            Destination::Words(note) => {
                if let Note::Piece { receive, offset } = note {
                    return self.take_piece(inlet, from, (receive, offset), words_of(words));
                }
                let taken = match note {
                    Note::Moved => self.inlets.moved(&self.pool, inlet),
                    Note::Open => self.inlets.open_ring(&self.pool, inlet)?.map(|could| {
                        self.peers[from as usize].control.push_back(outlet::Control::Opened(could));
                    }),
                    Note::Buffers => self.inlets.learn_buffers(&self.pool, inlet, words_of(words)),
                    note => self.handle_note(from, note, words_of(words)),
                };
                taken.map_err(|what| PoolError::Corrupt { offset: self.inlets.place(inlet), what })?;
            }
        }
        Ok(Taken::Message)
    }

    /// Counts a part of the message of a receive; that is over with the last.
    fn come(&mut self, from: u32, key: usize, bytes: u64) -> Taken<B, C> {
        let receiving = &mut self.receiving[key];
        receiving.come += bytes;
        if receiving.come < receiving.room {
            return Taken::Message;
        }
        let Receiving { arrival, buffer, context, told, .. } = self.receiving.remove(key);
        let answer = told.map(outlet::Control::all_taken);
        self.peers[from as usize].control.extend(answer);
        Taken::Over(Completion::Received { buffer, context, arrival })
    }

    /// An unasked message has arrived with its last part.
    fn arrive_if_whole(&mut self, from: u32) {
        let is_whole = |coming: &&PartialMessage| coming.come.len() as u64 == coming.bytes;
        if self.coming.get(&from).filter(is_whole).is_some()
            && let Some(PartialMessage { label, bytes, come }) = self.coming.remove(&from)
        {
            self.arrive(Unexpected { arrival: Arrival { from, label, bytes }, body: Body::Whole(come) });
        }
    }

    /// Copies out a part of a message that lies in a send buffer.
    // SYNC: sees what `Outlet::push_piece` copied there.
    fn take_piece(
        &mut self,
        inlet: usize,
        from: u32,
        part: (u64, u64),
        [place, said]: [u64; 2],
    ) -> Result<Taken<B, C>, PoolError> {
        let corrupt = PoolError::Corrupt { offset: self.inlets.place(inlet), what: "message piece" };
        let (number, bytes) = buffer_of(said);
        let (at, end) = (Offset(place), place.saturating_add(bytes));
        if end > self.pool.layout().bytes() {
            return Err(corrupt);
        }
        let parts = (&mut self.receiving, &mut self.coming);
        let Ok((goal, into)) = goal_of_part(parts, from, part, bytes) else {
            return Err(corrupt);
        };
        let memory = self.pool.memory();
        memory.invalidate(at, bytes);
        // SYNC: pairs with `Outlet::push_piece`: its header, which was seen, came after the piece.
        memory.fence_invalidations();
        if let Err(fault) = memory.copy_out(at, &mut into[..bytes as usize]) {
            return Err(self.miss(Some(goal), fault.into()));
        }
        // Its sender gives the buffer to others once this host is evicted.
        self.pool.check_membership()?;
        // It lay there all the while if the buffers are still its sender's.
        match self.inlets.find_buffers(&self.pool, inlet)? {
            Some(buffers) if buffers.start <= place && end <= buffers.end => {}
            None if Deviation::TakesUnchecked.is_on() => {}
            Some(_) => return Err(corrupt),
            None => return Err(self.peers[from as usize].left(&self.pool)?),
        }
        self.peers[from as usize].control.push_back(outlet::Control::Taken(number));
        match goal {
            Destination::Part(key) => Ok(self.come(from, key, bytes)),
            _ => {
                self.arrive_if_whole(from);
                Ok(Taken::Message)
            }
        }
    }

    /// The message could not be copied, for the memory fails; and so does what it was for.
    #[cold]
    fn miss(&mut self, goal: Option<Destination>, error: PoolError) -> PoolError {
        let lent = match goal {
            Some(Destination::Posted(index, _)) => {
                let Posted { buffer, context, .. } = pick(&mut self.posted, index);
                Some((buffer, context))
            }
            Some(Destination::Part(key)) => {
                let Receiving { buffer, context, .. } = self.receiving.remove(key);
                Some((buffer, context))
            }
            Some(Destination::Kept(_) | Destination::PartialMessage | Destination::Words(_)) | None => None,
        };
        self.done.extend(lent.map(|(buffer, context)| fail(buffer, context, &error)));
        error
    }

    /// Takes any other note with its words; the error says what of it no correct endpoint writes.
    fn handle_note(&mut self, from: u32, note: Note, [first, second]: [u64; 2]) -> Result<(), &'static str> {
        match note {
            Note::Request(label) | Note::Synchronous(label) if second <= LONGEST => {
                let arrival = Arrival { from, label, bytes: second };
                let synchronous = matches!(note, Note::Synchronous(_));
                let body = Body::Request { send: first, synchronous };
                self.arrive(Unexpected { arrival, body });
                Ok(())
            }
            Note::Request(_) | Note::Synchronous(_) => Err("message request"),
            Note::Offer(label) => {
                let (send, bytes) = offer_of(first);
                let end = second.checked_add(bytes).ok_or("message offer")?;
                if end > self.pool.layout().bytes() {
                    return Err("message offer");
                }
                let arrival = Arrival { from, label, bytes };
                self.arrive(Unexpected { arrival, body: Body::Offer(send, Offset(second)) });
                Ok(())
            }
            Note::Grant { send } => self.peers[from as usize].grant(send, first, second, &mut self.done),
            Note::Credit => self.peers[from as usize].credit(first),
            Note::Taken { buffer } => {
                self.stock.free_buffer(self.peers[from as usize].taken(buffer.into())?);
                Ok(())
            }
            Note::Opened(could) => {
                self.peers[from as usize].opened(&self.pool, &self.options, &mut self.stock, could)
            }
            Note::Unasked(label) => {
                let begun = PartialMessage { label, bytes: first, come: vec![] };
                let is_alone = first > 0 && self.coming.insert(from, begun).is_none();
                is_alone.then_some(()).ok_or("message that comes unasked")
            }
            Note::Eager(_)
            | Note::Part { .. }
            | Note::Piece { .. }
            | Note::Moved
            | Note::Open
            | Note::Buffers => Err("message part"),
        }
    }

    /// Gives a message to the receive that has waited longest for it, or keeps it.
    fn arrive(&mut self, message: Unexpected) {
        let Arrival { from, label, .. } = &message.arrival;
        let index = self.posted.iter().position(|posted| posted.filter.takes(*from, label));
        match index.map(|index| pick(&mut self.posted, index)) {
            Some(posted) => self.deliver(message, posted),
            None => self.unexpected.push_back(message),
        }
    }

    fn deliver(&mut self, message: Unexpected, posted: Posted<B, C>) {
        let Unexpected { arrival, body } = message;
        let Posted { mut buffer, context, .. } = posted;
        let peer = &mut self.peers[arrival.from as usize];
        match body {
            Body::Whole(bytes) => {
                peer.take(&self.options, arrival.bytes);
                let room = bytes.len().min(buffer.bytes().len());
                buffer.bytes_mut()[..room].copy_from_slice(&bytes[..room]);
                self.done.push_back(Completion::Received { buffer, context, arrival });
            }
            Body::Offer(send, place) => {
                let room = arrival.bytes.min(buffer.bytes().len() as u64) as usize;
                let read = self.read_in_place(arrival.from, place, &mut buffer.bytes_mut()[..room]);
                self.done.push_back(match read {
                    Ok(()) => Completion::Received { buffer, context, arrival },
                    Err(error) => fail(buffer, context, &error),
                });
                let peer = &mut self.peers[arrival.from as usize];
                if peer.broken.is_none() {
                    peer.control.push_back(outlet::Control::all_taken(send));
                }
            }
            Body::Request { send, synchronous } => {
                let room = arrival.bytes.min(buffer.bytes().len() as u64);
                if let Some(error) = peer.broken.clone() {
                    self.done.push_back(fail(buffer, context, &error));
                } else if room == 0 {
                    peer.control.push_back(outlet::Control::all_taken(send));
                    self.done.push_back(Completion::Received { buffer, context, arrival });
                } else {
                    assert!(self.receiving.len() < RECEIVES, "16 million receives are under way");
                    let told = synchronous.then_some(send);
                    let receiving = Receiving { arrival, room, come: 0, told, buffer, context };
                    let receive = self.receiving.insert(receiving) as u64;
                    peer.control.push_back(outlet::Control::Grant { send, receive, room });
                }
            }
        }
    }

    /// Copies out what a peer has offered where it lies.
    // SYNC: sees what `Endpoint::send_until` wrote back.
    fn read_in_place(&self, from: u32, place: Offset, into: &mut [u8]) -> Result<(), PoolError> {
        let peer = &self.peers[from as usize];
        if let Some(broken) = &peer.broken {
            return Err(broken.clone());
        }
        let memory = self.pool.memory();
        memory.invalidate(place, into.len() as u64);
        memory.fence_invalidations();
        memory.copy_out(place, into)?;
        // It lay there all the while if its sender still has a ring to us, which goes before what was offered on it; and if
        // nobody has given us up.
        self.pool.check_membership()?;
        match self.inlets.is_sender_present(&self.pool, peer.address)? {
            true => {
                tracing::debug!(bytes = into.len(), peer = ?peer.address, "read in place");
                Ok(())
            }
            false => Err(peer.left(&self.pool)?),
        }
    }

    // Who has nothing to say, or is gone.

    /// Lets pairs that have a ring for themselves, and say nothing there, give it back.
    fn look_for_the_idle(&mut self, now: Nanos) {
        let is_short = std::mem::take(&mut self.stock.is_short);
        for number in 0..self.peers.len() as u32 {
            self.peers[number as usize].give_back_if_idle(&self.options, is_short, now);
            self.list(number);
        }
    }

    /// Fails what a dead peer would have had to do, and lets go of one whose place another has taken: its name has room for few
    /// that are gone and held open. Asks of so many peers at most, in turn.
    fn look_for_the_dead(&mut self, most: usize) -> Result<(), PoolError> {
        self.pool.check_membership()?;
        let awaited = self.awaited();
        for _ in 0..most.min(self.peers.len()) {
            let index = self.asks % self.peers.len();
            self.asks = index + 1;
            let peer = &mut self.peers[index];
            let number = index as u32;
            if peer.broken.is_none()
                && (awaited.contains(&number)
                    || peer.has_undelivered()
                    || peer.is_sending()
                    || self.has_successor(number))
                && let Err(error) = self.peers[index].check(&self.pool)
            {
                self.lose(number, &error)?;
            }
        }
        Ok(())
    }

    /// The peers of which a receive awaits something.
    fn awaited(&self) -> BTreeSet<u32> {
        let posted = self.posted.iter().filter_map(|posted| posted.filter.from);
        let receiving = self.receiving.iter().map(|(_, receiving)| receiving.arrival.from);
        posted.chain(receiving).collect()
    }

    /// Whether a later endpoint at the place of this one is known.
    fn has_successor(&self, number: u32) -> bool {
        let address = self.peers[number as usize].address;
        let later = Address { generation: address.generation + 1, ..address }..=Address {
            generation: u64::MAX,
            ..address
        };
        self.known.range(later).next().is_some()
    }

    /// Ends the conversation with a peer, and every operation with it.
    ///
    /// # Errors
    /// When it is this process that cannot go on.
    fn lose(&mut self, number: u32, error: &PoolError) -> Result<(), PoolError> {
        if let PoolError::Evicted { .. } | PoolError::Memory(_) = error {
            return Err(error.clone());
        }
        // What it published before counts, on a ring that nobody has looked for, too.
        self.inlets.search(&self.pool)?;
        // This ends: each pass but the last, which looks at every ring, ends an operation, and none is begun meanwhile.
        loop {
            let done = self.done.len();
            let over = self.receive_pending()?;
            self.done.extend(over);
            if self.done.len() == done {
                break;
            }
        }
        let peer = &mut self.peers[number as usize];
        if peer.may_retry_later(error) {
            peer.refuse(error, &mut self.done);
            return Ok(());
        }
        tracing::debug!(%error, peer = ?peer.address, "a conversation has ended");
        peer.lose(&self.pool, &self.options, &mut self.stock, error, &mut self.done)?;
        if let PoolError::PeerDead { .. } = error {
            self.inlets.close_from(&self.pool, self.peers[number as usize].address);
        }
        let posted = std::mem::take(&mut self.posted);
        for posted in posted {
            if posted.filter.from == Some(number) {
                self.done.push_back(fail(posted.buffer, posted.context, error));
            } else {
                self.posted.push_back(posted);
            }
        }
        let lost =
            |(key, receiving): (usize, &Receiving<B, C>)| (receiving.arrival.from == number).then_some(key);
        self.coming.remove(&number);
        for key in self.receiving.iter().filter_map(lost).collect::<Vec<_>>() {
            let Receiving { buffer, context, .. } = self.receiving.remove(key);
            self.done.push_back(fail(buffer, context, error));
        }
        Ok(())
    }
}

/// The number of the peer with this address, which gets the next one when it is new.
fn meet<M: Memory, B: MessageBuffer, C>(
    known: &mut BTreeMap<Address, u32>,
    peers: &mut Vec<PeerTraffic<M, B, C>>,
    address: Address,
) -> u32 {
    let next = peers.len() as u32;
    let number = *known.entry(address).or_insert(next);
    if number == next {
        peers.push(PeerTraffic::new(address));
    }
    number
}

impl<M: Memory, B, C> Drop for Endpoint<M, B, C> {
    fn drop(&mut self) {
        self.inlets.close_all(&self.pool);
        // First what says that what was offered is there.
        self.stock.close(&self.pool);
        for peer in &mut self.peers {
            peer.close(&self.pool);
        }
    }
}

/// Receives whose messages come in parts, and messages that come unasked.
type Parts<'a, B, C> = (&'a mut Slab<Receiving<B, C>>, &'a mut BTreeMap<u32, PartialMessage>);

/// Where a message goes, and the room for it; the error says what of it no correct endpoint writes.
#[inline(always)]
fn destination_of<'a, B: MessageBuffer, C>(
    posted: &'a mut VecDeque<Posted<B, C>>,
    parts: Parts<'a, B, C>,
    from: u32,
    envelope: &Envelope,
    whole: &'a mut Vec<u8>,
    words: &'a mut [u8; INLINE],
) -> Result<(Destination, &'a mut [u8]), &'static str> {
    let bytes = envelope.bytes;
    match Note::decode(envelope).ok_or("message between endpoints")? {
        Note::Eager(label) => match posted.iter().position(|posted| posted.filter.takes(from, &label)) {
            Some(index) if posted[index].buffer.bytes().len() as u64 >= bytes => {
                Ok((Destination::Posted(index, label), posted[index].buffer.bytes_mut()))
            }
            _ => {
                whole.resize(bytes as usize, 0);
                Ok((Destination::Kept(label), whole))
            }
        },
        Note::Part { receive, offset } => goal_of_part(parts, from, (receive, offset), bytes),
        note if bytes == INLINE as u64 => Ok((Destination::Words(note), words)),
        _ => Err("message between endpoints"),
    }
}

/// Where a part of a message goes.
fn goal_of_part<'a, B: MessageBuffer, C>(
    (receiving, coming): Parts<'a, B, C>,
    from: u32,
    (receive, offset): (u64, u64),
    bytes: u64,
) -> Result<(Destination, &'a mut [u8]), &'static str> {
    let wrong = "message part";
    if receive == UNASKED {
        let coming = coming.get_mut(&from).ok_or(wrong)?;
        return Ok((Destination::PartialMessage, coming.room(offset, bytes).ok_or(wrong)?));
    }
    let key = receive as usize;
    let Receiving { arrival, room, come, buffer, .. } = receiving.get_mut(key).ok_or(wrong)?;
    if arrival.from != from || *come != offset || bytes == 0 || bytes > *room - *come {
        return Err(wrong);
    }
    Ok((Destination::Part(key), &mut buffer.bytes_mut()[offset as usize..]))
}

/// Takes one out that is there, which is the first in most cases.
fn pick<T>(from: &mut VecDeque<T>, index: usize) -> T {
    let picked = if index == 0 { from.pop_front() } else { from.remove(index) };
    picked.expect("it was found there")
}

fn fail<B, C>(buffer: B, context: C, error: &PoolError) -> Completion<B, C> {
    Completion::Failed { buffer, context, error: error.clone() }
}
