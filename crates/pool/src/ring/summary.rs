//! One line per sending host: how a receiver with many rings learns which of them to look at.
//!
//! Each sending process owns one byte of a line that belongs to its host, 64 processes a line. The byte counts what the
//! process has published for this receiver, modulo 256. A sender is never so far ahead of its receiver that the two counts
//! agree again: its rings have fewer slots. The processes of a host share their caches, so any of them writes back the whole
//! line. A byte is only a hint: it is stored after the header that it counts, without a fence between the two. The receiver
//! looks at a ring for as long as its byte differs from what was taken.
//!
//! # Bytes of a summary line
//! | byte | what |
//! |---|---|
//! | 0..64 | slots that this sending process has published for the receiver, modulo 256, one byte a process |

use polder_mem::{Bell, LINE, Memory, Nanos, Offset};

use crate::PoolError;
use crate::ring::{Consumer, Envelope, HALF_WRITTEN, WAITS_FOR, Wait};
use crate::wait::{self, Patience};

/// The senders that share one line.
pub const SENDERS: u64 = LINE;

/// Slots that the rings of one sender to one receiver have together, at most, if they are counted in a summary line.
pub const MOST_SLOTS: u64 = u8::MAX as u64;

/// The byte at `at` of its word.
pub(crate) const fn byte_of(word: u64, at: Offset) -> u8 {
    word.to_le_bytes()[(at.0 % 8) as usize]
}

/// Looks in vain after which all credits are returned, those that do not make a batch too.
const IDLE_LOOKS: u32 = 8;

/// Many rings with one receiver, taken in turn.
#[derive(Debug)]
pub struct Inbox<M, A> {
    memory: M,
    rings: Vec<Ring<M, A>>,
    /// The distinct lines that hold the senders' bytes.
    lines: Vec<Offset>,
    /// The ring to look at first.
    turn: usize,
    /// Looks in vain since the last message.
    idle: u32,
    bell: Bell,
    patience: Patience,
}

#[derive(Debug)]
struct Ring<M, A> {
    consumer: Consumer<M, A>,
    /// What the sender's byte last said, if it has one.
    promised: Option<u8>,
}

impl<M: Memory, A: Fn() -> Result<(), PoolError>> Ring<M, A> {
    /// Whether a look may find something.
    fn has_unread(&self) -> bool {
        self.promised.is_none_or(|promised| promised != (self.consumer.sequence() - 1) as u8)
    }
}

impl<M: Memory, A: Fn() -> Result<(), PoolError>> Inbox<M, A> {
    /// An inbox over `consumers`, whose peers all ring `bell`. A consumer that knows no summary byte is looked at each
    /// time.
    pub fn new(memory: M, consumers: Vec<Consumer<M, A>>, bell: Bell, patience: Patience) -> Self {
        let mut lines: Vec<_> = consumers.iter().filter_map(|ring| Some(ring.summary()?.line())).collect();
        lines.sort_unstable();
        lines.dedup();
        let ring = |consumer: Consumer<M, A>| {
            let promised = consumer.summary().map(|_| 0);
            Ring { consumer, promised }
        };
        let rings = consumers.into_iter().map(ring).collect();
        Self { memory, rings, lines, turn: 0, idle: 0, bell, patience }
    }

    /// The consumer of the ring at `index`, to look ahead or to receive from it alone.
    pub fn ring(&mut self, index: usize) -> Option<&mut Consumer<M, A>> {
        self.rings.get_mut(index).map(|ring| &mut ring.consumer)
    }

    /// Replaces `into` by a message that has come, and says from which ring; the rings take turns.
    ///
    /// # Errors
    /// Those of [`Consumer::try_pop_into`], once for each ring that fails; the others go on. [`PoolError::Broken`] when
    /// all have failed.
    pub fn try_next(&mut self, into: &mut Vec<u8>) -> Result<Option<(usize, Envelope)>, PoolError> {
        if let Some(message) = self.sweep(into)? {
            return Ok(Some(message));
        }
        self.read_summaries()?;
        if let Some(message) = self.sweep(into)? {
            return Ok(Some(message));
        }
        self.rings.iter().find(|ring| !ring.consumer.is_broken()).map_or_else(
            || self.rings.first().map_or(Ok(None), |ring| ring.consumer.check().map(|()| None)),
            |_| Ok(None),
        )
    }

    /// Replaces `into` by the next message of any ring, waiting for it until `deadline`.
    ///
    /// # Errors
    /// Those of [`Inbox::try_next`]; [`PoolError::PeerDead`], once for each sender that died, when all that it published
    /// has been received; [`PoolError::Timeout`], which names a sender that was stopped in the middle of a header, else
    /// the one whose turn it is.
    pub fn next(&mut self, into: &mut Vec<u8>, deadline: Nanos) -> Result<(usize, Envelope), PoolError> {
        self.idle = 0;
        if let Some(message) = self.try_next(into)? {
            return Ok(message);
        }
        let (memory, bell, patience) = (self.memory.clone(), self.bell, self.patience);
        let began = memory.now();
        // The look itself asks after the senders, each of its own ring.
        let message = wait::until(&memory, bell, patience, deadline, || self.look(into), || Ok(()))?;
        if let Some(message) = message {
            return Ok(message);
        }
        Err(self.timeout(began, deadline))
    }

    /// Offers one message of the rings that promise something, beginning with the one whose turn it is.
    fn sweep(&mut self, into: &mut Vec<u8>) -> Result<Option<(usize, Envelope)>, PoolError> {
        let count = self.rings.len();
        for index in (self.turn..count).chain(0..self.turn.min(count)) {
            let ring = &mut self.rings[index];
            if !ring.has_unread() || ring.consumer.is_broken() {
                continue;
            }
            if let Some(envelope) = ring.consumer.try_pop_into(into)? {
                self.turn = (index + 1) % count;
                return Ok(Some((index, envelope)));
            }
        }
        Ok(None)
    }

    /// Reads afresh what the senders say that they have published: one fence for all lines.
    // SYNC: sees what `Out::publish` of the producers stored in their bytes.
    fn read_summaries(&mut self) -> Result<(), PoolError> {
        if self.lines.is_empty() {
            return Ok(());
        }
        for line in &self.lines {
            self.memory.invalidate(*line, LINE);
        }
        self.memory.fence_invalidations();
        for Ring { consumer, promised } in &mut self.rings {
            if let Some(byte) = consumer.summary() {
                *promised = Some(byte_of(self.memory.load(Offset(byte.0 & !7))?, byte));
            }
        }
        Ok(())
    }

    fn look(&mut self, into: &mut Vec<u8>) -> Result<Option<(usize, Envelope)>, PoolError> {
        if let Some(found) = self.try_next(into)? {
            return Ok(Some(found));
        }
        self.idle += 1;
        if self.idle == IDLE_LOOKS.min(self.patience.spins.max(1)) {
            self.rings.iter_mut().for_each(|ring| ring.consumer.return_credits());
        }
        if self.idle > self.patience.spins + self.patience.yields {
            return self.look_at_the_dead(into);
        }
        Ok(None)
    }

    /// Takes what dead senders published without counting it, and ends their rings after that.
    fn look_at_the_dead(&mut self, into: &mut Vec<u8>) -> Result<Option<(usize, Envelope)>, PoolError> {
        for (index, Ring { consumer, .. }) in self.rings.iter_mut().enumerate() {
            if consumer.is_broken() {
                continue;
            }
            if let Err(dead) = consumer.check_peer() {
                return match consumer.try_pop_into(into)? {
                    Some(envelope) => Ok(Some((index, envelope))),
                    None => Err(consumer.end_with(dead)),
                };
            }
        }
        Ok(None)
    }

    fn timeout(&self, began: Nanos, deadline: Nanos) -> PoolError {
        let torn = self.rings.iter().find(|ring| ring.consumer.is_torn());
        let Some(Ring { consumer, .. }) = torn.or(self.rings.get(self.turn)) else {
            let expected = "give the inbox a ring to wait for";
            return PoolError::Argument { what: "the number of rings", value: "0".into(), expected };
        };
        let what = if torn.is_some() { HALF_WRITTEN } else { WAITS_FOR };
        let wait = Wait { deadline, what, sequence: consumer.sequence() };
        consumer.link().late(&self.memory, wait, began)
    }
}
