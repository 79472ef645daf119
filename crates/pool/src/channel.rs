//! Channels: rings that have a name. One process makes a ring and sends, another opens it and receives.
//!
//! The ring is the object `NAME` of the sender. The receiver owns the object `NAME/receiver` of two lines. A name can be
//! created once, so only one process ever receives. The first line of each object is the identity of its process, and
//! never changes. Word 0 of the second line is 1 once that process has left.
//!
//! # Own words of the identity of a receiver
//! | word | what |
//! |---|---|
//! | 4 | generation of the ring's object |
//! | 5, 6 | spare, 0 |

use std::sync::Arc;
use std::time::Duration;

use polder_mem::{LINE, Memory, Offset};

use crate::endpoint::{create_ring, find_ring};
use crate::line::{self, Words};
use crate::object::Object;
use crate::owned::{self, Identity, Kind};
use crate::ring::{Consumer, Envelope, Producer, RingLink, RingPlace, RingShape};
use crate::wait::{self, Patience};
use crate::{Pool, PoolError};

/// Between two looks whether the other end has come.
const LOOKS: Patience = Patience { spins: 0, yields: 0, nap: Duration::from_millis(1) };
/// What the second line says of an end that has left.
const LEFT: Words = [1, 0, 0, 0, 0, 0, 0];

/// Whether the other end lives.
type Alive = Box<dyn Fn() -> Result<(), PoolError>>;

/// The sending end of a channel. Dropping it ends the channel; what was sent can still be received.
pub struct Sender<M: Memory> {
    pool: Arc<Pool<M>>,
    /// Taken when it is dropped.
    ring: Option<Object>,
    shape: RingShape,
    place: RingPlace,
    /// Once somebody receives, with the object that says so.
    receiver: Option<Object>,
    producer: Option<Producer<M, Alive>>,
}

/// The receiving end of a channel.
pub struct Receiver<M: Memory> {
    pool: Arc<Pool<M>>,
    /// The ring, and what says that this process receives; taken when it is dropped.
    objects: Option<(Object, Object)>,
    consumer: Consumer<M, Alive>,
}

impl<M: Memory + 'static> Sender<M> {
    /// Makes the channel `name`.
    ///
    /// # Errors
    /// Those of [`Pool::create`].
    pub fn create(pool: Arc<Pool<M>>, name: &str, shape: RingShape) -> Result<Self, PoolError> {
        let (ring, place) = create_ring(&pool, name, shape)?;
        let generation = ring.generation();
        let sender = Self { pool, ring: Some(ring), shape, place, receiver: None, producer: None };
        if let Some(left) = sender.pool.open_if_there(&receiver_name(name))? {
            match is_of(&sender.pool, &left, generation)? {
                true => sender.pool.close(left),
                // Of a ring of this name whose ends died.
                false => sender.pool.abandon(left),
            }
        }
        Ok(sender)
    }

    /// Sends a message, waiting for somebody who receives, and for room.
    ///
    /// # Errors
    /// [`PoolError::NoReceiver`] and [`PoolError::Timeout`] when that takes too long; [`PoolError::PeerDead`] and
    /// [`PoolError::Closed`] when the receiver died or closed its end; [`PoolError::Broken`] ever after; [`PoolError::Memory`].
    pub fn push(&mut self, tag: u64, bytes: &[u8], timeout: Duration) -> Result<(), PoolError> {
        let deadline = self.pool.memory().now() + timeout;
        let producer = match &mut self.producer {
            Some(producer) => producer,
            None => {
                let producer = self.meet(timeout)?;
                self.producer.insert(producer)
            }
        };
        producer.push(0, tag, bytes, deadline)
    }

    /// Waits until somebody receives.
    fn meet(&mut self, timeout: Duration) -> Result<Producer<M, Alive>, PoolError> {
        let ring = self.ring.as_ref().expect("held until it is dropped");
        let receiver = poll_until(&self.pool, timeout, || find_receiver(&self.pool, ring))?;
        let receiver = receiver.ok_or_else(|| PoolError::NoReceiver {
            name: ring.name().to_owned(),
            waited_ms: timeout.as_millis() as u64,
        })?;
        let at = self.receiver.insert(receiver).at();
        let link = link(&self.pool, ring.name(), at, Kind::Receiver)?;
        Ok(Producer::new(self.pool.memory().clone(), self.shape, self.place, link))
    }
}

impl<M: Memory> Drop for Sender<M> {
    fn drop(&mut self) {
        let Some(ring) = self.ring.take() else { return };
        leave(&self.pool, ring.at());
        // A process that opened the ring and was never met lets go of its line too, for it finds that this end has left.
        let receiver = self.receiver.take().or_else(|| find_receiver(&self.pool, &ring).ok().flatten());
        receiver.into_iter().for_each(|receiver| self.pool.abandon(receiver));
        self.pool.abandon(ring);
    }
}

impl<M: Memory + 'static> Receiver<M> {
    /// Opens the channel `name` to receive, waiting for it to be made.
    ///
    /// # Errors
    /// [`PoolError::NotFound`] when it is not made in time; [`PoolError::Exists`] when another process receives, or has
    /// received; [`PoolError::Corrupt`] when the object is no ring; those of [`Pool::create`].
    pub fn open(pool: Arc<Pool<M>>, name: &str, timeout: Duration) -> Result<Self, PoolError> {
        let found = poll_until(&pool, timeout, || pool.open_if_there(name))?;
        let ring = found.ok_or_else(|| PoolError::NotFound { name: name.to_owned() })?;
        match Self::take(&pool, &ring) {
            Ok((own, consumer)) => Ok(Self { pool, objects: Some((ring, own)), consumer }),
            Err(error) => {
                pool.close(ring);
                Err(error)
            }
        }
    }

    fn take(pool: &Arc<Pool<M>>, ring: &Object) -> Result<(Object, Consumer<M, Alive>), PoolError> {
        let (shape, place) = find_ring(pool, ring)?;
        let link = link(pool, ring.name(), ring.at(), Kind::Ring)?;
        let (name, words) = (receiver_name(ring.name()), [ring.generation(), 0, 0]);
        let own = owned::create_new(pool, &name, 2 * LINE, Kind::Receiver, words)?;
        Ok((own, Consumer::new(pool.memory().clone(), shape, place, link)))
    }

    /// What the next message says of itself, if it has come.
    ///
    /// # Errors
    /// Those of [`Consumer::peek`].
    pub fn peek(&mut self) -> Result<Option<Envelope>, PoolError> {
        self.consumer.peek()
    }

    /// Copies the next message to the start of `into`, waiting for it.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when `into` is too short, and the message stays; [`PoolError::Timeout`];
    /// [`PoolError::Closed`] when the sender has closed its end, once all that it sent is received; [`PoolError::PeerDead`] when it
    /// died; [`PoolError::GaveUp`] when it closed its end in the middle of a message;
    /// [`PoolError::Corrupt`]; [`PoolError::Broken`]; [`PoolError::Memory`].
    pub fn pop(&mut self, into: &mut [u8], timeout: Duration) -> Result<Envelope, PoolError> {
        let deadline = self.pool.memory().now() + timeout;
        self.consumer.pop_slice(into, deadline)
    }
}

impl<M: Memory> Drop for Receiver<M> {
    fn drop(&mut self) {
        let Some((ring, own)) = self.objects.take() else { return };
        leave(&self.pool, own.at());
        match has_left(&self.pool, ring.at()) {
            // It lets go of both names when it leaves.
            Ok(false) => self.pool.close(own),
            _ => self.pool.abandon(own),
        }
        self.pool.close(ring);
    }
}

fn receiver_name(ring: &str) -> String {
    format!("{ring}/receiver")
}

/// Who receives from `ring`, if anybody does.
fn find_receiver<M: Memory>(pool: &Pool<M>, ring: &Object) -> Result<Option<Object>, PoolError> {
    let Some(receiver) = pool.open_if_there(&receiver_name(ring.name()))? else { return Ok(None) };
    match is_of(pool, &receiver, ring.generation()) {
        Ok(true) => Ok(Some(receiver)),
        other => {
            pool.close(receiver);
            other.map(|_| None)
        }
    }
}

/// Whether a receiver receives from the ring of this generation.
fn is_of<M: Memory>(pool: &Pool<M>, receiver: &Object, generation: u64) -> Result<bool, PoolError> {
    identity(pool, receiver.at(), Kind::Receiver).map(|said| said.own[0] == generation)
}

/// The identity of an end.
fn identity<M: Memory>(pool: &Pool<M>, at: Offset, kind: Kind) -> Result<Identity, PoolError> {
    let said = line::read(pool.memory(), at)?.and_then(|words| Identity::decode(&words, kind));
    said.ok_or(PoolError::Corrupt { offset: at, what: "end of a channel" })
}

/// Whether the end whose object is at `at` has left; not while it says so.
fn has_left<M: Memory>(pool: &Pool<M>, at: Offset) -> Result<bool, PoolError> {
    Ok(line::read(pool.memory(), at + LINE)? == Some(LEFT))
}

/// Says that this end has left, whose object is at `at`.
fn leave<M: Memory>(pool: &Pool<M>, at: Offset) {
    line::publish(pool.memory(), at + LINE, &LEFT);
}

/// What this end of the ring `name` knows of the other, whose object is at `at`.
fn link<M>(pool: &Arc<Pool<M>>, name: &str, at: Offset, kind: Kind) -> Result<RingLink<Alive>, PoolError>
where
    M: Memory + 'static,
{
    let process = identity(pool, at, kind)?.process;
    let (peer, epoch) = (process.peer(), pool.epoch()?);
    let (layout, watcher, name) = (pool.layout(), Arc::clone(pool), name.to_owned());
    let end = if kind == Kind::Ring { "sender" } else { "receiver" };
    let alive = move || match has_left(&watcher, at)? {
        true => Err(PoolError::Closed { name: name.clone(), peer, end }),
        false => watcher.expect_alive(&process, "a channel", 0),
    };
    Ok(RingLink {
        peer,
        epoch,
        bell: layout.bell(pool.member().host, pool.memory().slot()),
        wakes: Some(layout.bell(process.host, process.slot)),
        patience: Patience::for_ranks(2),
        alive: Box::new(alive),
    })
}

/// Looks until there is something, or the time is over.
fn poll_until<M: Memory, T>(
    pool: &Pool<M>,
    timeout: Duration,
    look: impl FnMut() -> Result<Option<T>, PoolError>,
) -> Result<Option<T>, PoolError> {
    let bell = pool.layout().bell(pool.member().host, pool.memory().slot());
    let deadline = pool.memory().now() + timeout;
    wait::until(pool.memory(), bell, LOOKS, deadline, look, || pool.check_membership().map(drop))
}
