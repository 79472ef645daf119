//! What goes to one peer: the ring to it, and what waits for room there.

use std::collections::VecDeque;

use polder_mem::{Bell, Memory, Offset};
use slab::Slab;

use super::inlet::{Alive, link};
use super::place::{create_ring, endpoint_name, news_base, news_word, realm_of, ring_name};
use super::wire::{Note, bytes_of, offered};
use super::{Address, CompleteWhen, Completion, EndpointOptions, Label, MessageBuffer, OVERHEAD, fail};
use crate::membership::Process;
use crate::object::Object;
use crate::owned::{Identity, Kind};
use crate::ring::Producer;
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

/// The ring to a peer.
pub(super) struct Outlet<M> {
    /// The peer's endpoint, whose news says that the ring is there.
    endpoint: Object,
    ring: Object,
    producer: Producer<M, Alive>,
}

/// A peer, as one endpoint sees it.
pub(super) struct PeerTraffic<M, B, C> {
    pub(super) address: Address,
    /// Its process, once it was looked up.
    process: Option<Process>,
    outlet: Option<Outlet<M>>,
    pub(super) control: VecDeque<Control>,
    pub(super) queue: VecDeque<Outgoing<B, C>>,
    sending: Slab<Sending<B, C>>,
    /// The sends that were granted, in turn.
    granted: VecDeque<usize>,
    /// Bytes of eager messages that it has not taken.
    untaken: u64,
    /// Bytes of its eager messages that we have taken and not said so.
    consumed: u64,
    pub(super) broken: Option<PoolError>,
    /// Messages and parts that went out.
    pub(super) pushed: u64,
}

impl<M: Memory, B: MessageBuffer, C> PeerTraffic<M, B, C> {
    pub(super) const fn new(address: Address) -> Self {
        Self {
            address,
            process: None,
            outlet: None,
            control: VecDeque::new(),
            queue: VecDeque::new(),
            sending: Slab::new(),
            granted: VecDeque::new(),
            untaken: 0,
            consumed: 0,
            broken: None,
            pushed: 0,
        }
    }

    /// Whether nothing waits for room.
    pub(super) fn is_quiet(&self) -> bool {
        self.queue.is_empty() && self.control.is_empty() && self.granted.is_empty()
    }

    /// Owes the peer a credit once that is worth a message.
    pub(super) fn take(&mut self, options: &EndpointOptions, bytes: u64) {
        self.consumed += bytes + OVERHEAD;
        if self.consumed >= options.window_bytes / 4 {
            self.control.push_back(Control::Credit(std::mem::take(&mut self.consumed)));
        }
    }

    /// Whether the peer would miss messages, of which the caller has been told or never will be, if this end left now.
    pub(super) fn is_owing(&mut self) -> bool {
        let is_copied = |(_, sending): (usize, &Sending<B, C>)| matches!(sending.load, Load::Copied(_));
        let is_met = |outlet: &mut Outlet<M>| outlet.producer.is_met().unwrap_or(true);
        !self.is_quiet() || self.sending.iter().any(is_copied) || !self.outlet.as_mut().is_none_or(is_met)
    }

    /// Whether the last message that waits is a copy.
    pub(super) fn ends_with_copy(&self) -> bool {
        matches!(self.queue.back(), Some(Outgoing { load: Load::Copied(_), .. }))
    }

    /// Whether something was requested that the peer has not taken.
    pub(super) fn is_sending(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Whether a message goes out as it is, unasked.
    #[inline]
    fn is_eager(&self, options: &EndpointOptions, bytes: &[u8]) -> bool {
        let length = bytes.len() as u64;
        length <= options.eager_bytes.min(options.ring.cell_bytes())
            && self.untaken + length + OVERHEAD <= options.window_bytes
    }

    /// Pushes a short message at once, if it can.
    #[inline]
    pub(super) fn inject(&mut self, options: &EndpointOptions, label: &Label, bytes: &[u8]) -> bool {
        let can = self.queue.is_empty() && self.is_eager(options, bytes);
        let (true, Some(Outlet { producer, .. })) = (can, &mut self.outlet) else { return false };
        let (kind, tag) = Note::Eager(*label).encode();
        // What fails here fails again, and is told, when it is queued.
        let pushed = producer.try_push(kind, tag, bytes).unwrap_or(false);
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
        own: Address,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<(), PoolError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        if self.outlet.is_none() {
            let (endpoint, process) = find(pool, self.address)?;
            self.process = Some(process);
            let wakes = options.rings_bells.then(|| pool.layout().bell(process.host, process.slot));
            self.outlet = Some(Outlet::open(pool, options, own, (self.address, wakes), endpoint)?);
        }
        while self.answer()? || self.begin(options, done)? || self.stream(options, done)? {
            self.pushed += 1;
        }
        Ok(())
    }

    /// Pushes an answer.
    fn answer(&mut self) -> Result<bool, PoolError> {
        let (Some(control), Some(outlet)) = (self.control.front(), &mut self.outlet) else {
            return Ok(false);
        };
        let (note, bytes) = match *control {
            Control::Grant { send, receive, room } => (Note::Grant { send }, bytes_of(receive, room)),
            Control::Credit(taken) => (Note::Credit, bytes_of(taken, 0)),
        };
        let (kind, tag) = note.encode();
        let pushed = outlet.producer.try_push(kind, tag, &bytes)?;
        if pushed {
            self.control.pop_front();
        }
        Ok(pushed)
    }

    /// Pushes the next message, or a request for it.
    fn begin(
        &mut self,
        options: &EndpointOptions,
        done: &mut VecDeque<Completion<B, C>>,
    ) -> Result<bool, PoolError> {
        let Some(Outgoing { label, load, place, until }) = self.queue.front() else { return Ok(false) };
        let is_eager = until.may_be_eager() && self.is_eager(options, load.bytes());
        let synchronous = until.is_synchronous();
        let Some(Outlet { producer, .. }) = &mut self.outlet else { return Ok(false) };
        let (bytes, number) = (load.bytes(), self.sending.vacant_key() as u64);
        let length = bytes.len() as u64;
        let offer = place.and_then(|place| Some((offered(number, length)?, place)));
        let pushed = if is_eager {
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
            if is_eager {
                self.untaken += length + OVERHEAD;
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
        let end = (*out + options.ring.cell_bytes()).min(*room);
        let (kind, tag) = Note::Part { receive: *receive, offset: *out }.encode();
        let pushed = outlet.producer.try_push(kind, tag, &load.bytes()[*out as usize..end as usize])?;
        if pushed {
            *out = end;
            let (is_over, waits) = (end == *room, *synchronous);
            self.granted.rotate_left(1);
            if is_over {
                self.granted.pop_back();
            }
            if is_over && !waits {
                finish(self.sending.remove(number).load, done);
            }
        }
        Ok(pushed)
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
        let Address { host, port, generation, .. } = self.address;
        let Some(process) = self.process else {
            let (endpoint, process) = find(pool, self.address)?;
            pool.close(endpoint);
            self.process = Some(process);
            return pool.expect_alive(&process, "message", 0);
        };
        match pool.is_live(&endpoint_name(pool.member().job, host, port), host, generation)? {
            true => pool.expect_alive(&process, "message", 0),
            false => Err(self.left(pool)?),
        }
    }

    /// The error for a peer that has left.
    pub(super) fn left(&self, pool: &Pool<M>) -> Result<PoolError, PoolError> {
        left(pool, self.address, self.process.map_or(0, |process| process.pid))
    }

    /// Whether nothing was said to the peer that waits for more, so that a ring which cannot be made now may be made later.
    pub(super) fn may_begin_later(&self, error: &PoolError) -> bool {
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
    pub(super) fn lose(&mut self, pool: &Pool<M>, error: &PoolError, done: &mut VecDeque<Completion<B, C>>) {
        self.broken.get_or_insert_with(|| error.clone());
        self.close(pool);
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
    }
}

impl<M: Memory, B, C> PeerTraffic<M, B, C> {
    /// Lets go of the ring.
    pub(super) fn close(&mut self, pool: &Pool<M>) {
        if let Some(Outlet { endpoint, ring, .. }) = self.outlet.take() {
            pool.abandon(ring);
            pool.close(endpoint);
        }
    }
}

impl<M: Memory> Outlet<M> {
    /// Makes the ring to the peer of `endpoint`, which learns of it from the first message.
    fn open(
        pool: &Pool<M>,
        options: &EndpointOptions,
        own: Address,
        (to, wakes): (Address, Option<Bell>),
        endpoint: Object,
    ) -> Result<Self, PoolError> {
        let name = ring_name(pool.member().job, own, to);
        let (ring, place) = match create_ring(pool, &name, options.ring) {
            Ok(made) => made,
            Err(error) => {
                pool.close(endpoint);
                return Err(error);
            }
        };
        let word = news_word(pool.layout().geometry(), endpoint.at(), own.host, own.port);
        let base = news_base(own.generation);
        let producer = Producer::new(pool.memory().clone(), options.ring, place, link(pool, to.host, wakes));
        Ok(Self { endpoint, ring, producer: producer.of_new_ring().with_summary(word, base) })
    }
}

/// The endpoint with this address, held open, and its process.
fn find<M: Memory>(pool: &Pool<M>, address: Address) -> Result<(Object, Process), PoolError> {
    if address.realm != realm_of(pool) {
        return Err(PoolError::OtherJob { job: pool.member().job });
    }
    let opened = match pool.open(&endpoint_name(pool.member().job, address.host, address.port)) {
        Err(PoolError::NotFound { .. }) => None,
        opened => Some(opened?),
    };
    let endpoint = match opened {
        Some(endpoint) if endpoint.generation() == address.generation => endpoint,
        other => {
            other.into_iter().for_each(|other| pool.close(other));
            return Err(left(pool, address, 0)?);
        }
    };
    match Identity::read(pool, &endpoint, Kind::Endpoint) {
        Ok(identity) => Ok((endpoint, identity.process)),
        Err(error) => {
            pool.close(endpoint);
            Err(error)
        }
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
