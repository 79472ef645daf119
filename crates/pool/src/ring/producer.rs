//! The end that writes headers and cells.

use polder_mem::{Bell, LINE, Memory, Nanos, Offset};

use super::header::{FORM_BITS, Form, Header, pack};
use super::link::{self, LinkState, RingFailure, Wait};
use super::summary::MOST_SLOTS;
use super::{INLINE, RingLink, RingPlace, RingShape, Turn};
use crate::{PoolError, line};

/// From this many bytes on a payload is written past the caches: all that needs a cell, because no length was found for
/// which stores and write-backs take less time (Zen 4, 24 B to 4 KiB).
const STREAM_FROM: usize = 0;

/// Kinds of messages that a header can name.
const KINDS: u64 = 1 << (u64::BITS - FORM_BITS);

/// What this end waits for, as errors name it.
const WAITS_FOR: &str = "room in the ring for slot";
/// What it waits for when the consumer was stopped in the middle of its line, or the line is damaged.
const HALF_WRITTEN: &str = "the rest of a half-written or damaged credit line for slot";

/// The sending end of a ring. `A` says whether the consumer lives.
#[derive(Debug)]
pub struct Producer<M, A> {
    memory: M,
    out: ProducerState,
    link: RingLink<A>,
    fate: LinkState,
}

impl<M: Memory, A: Fn() -> Result<(), PoolError>> Producer<M, A> {
    /// Attaches to a ring as its only producer. Nothing is written before the consumer of this generation has shown
    /// itself, so what an earlier producer left is not disturbed while it is still read.
    pub fn new(memory: M, shape: RingShape, place: RingPlace, link: RingLink<A>) -> Self {
        let out = ProducerState {
            shape,
            place,
            turn: Turn::first(shape, &place),
            slot_limit: 0,
            cell_limit: 0,
            met: false,
            streamed: 0,
            stream_from: STREAM_FROM,
            summary: None,
            torn: false,
        };
        Self { memory, out, link, fate: LinkState::default() }
    }

    /// Counts what is published in `byte` too, from `base` on: this process's own byte of its host's summary line for the
    /// consumer.
    ///
    /// # Panics
    /// When the ring has more slots than a byte can count.
    #[must_use]
    pub fn with_summary(mut self, byte: Offset, base: u64) -> Self {
        self.count_in(byte, base);
        self
    }

    /// As [`Producer::with_summary`], later.
    pub(crate) fn count_in(&mut self, byte: Offset, base: u64) {
        let slots = self.out.shape.slots();
        assert!(slots <= MOST_SLOTS, "a ring of {slots} slots is counted in a byte");
        self.out.summary = Some((byte, base));
    }

    /// Begins before the consumer has shown itself: nobody used the ring before, and its bytes are zeros.
    #[must_use]
    pub fn of_new_ring(mut self) -> Self {
        (self.out.slot_limit, self.out.cell_limit) = (self.out.shape.slots(), self.out.shape.cells());
        self
    }

    /// Whether the consumer has shown itself, or nothing is there for it to take.
    ///
    /// # Errors
    /// Those of [`Producer::try_push`].
    pub fn is_met(&mut self) -> Result<bool, PoolError> {
        self.fate.check()?;
        if !self.out.met && self.out.turn.slots > 0 {
            let looked = self.out.look_for_credits(&self.memory);
            looked.map_err(|flaw| self.fate.end(self.out.error(&self.link, flaw), false))?;
        }
        Ok(self.out.met || self.out.turn.slots == 0)
    }

    /// Whether a message that takes no cell has room.
    ///
    /// # Errors
    /// Those of [`Producer::try_push`].
    pub(crate) fn has_slot(&mut self) -> Result<bool, PoolError> {
        self.fate.check()?;
        let room = self.out.has_slot(&self.memory);
        room.map_err(|flaw| self.fate.end(self.out.error(&self.link, flaw), false))
    }

    /// Where it lies.
    pub(crate) const fn memory(&self) -> &M {
        &self.memory
    }

    /// Slots that it has published.
    #[inline(always)]
    pub(crate) fn published(&self) -> u64 {
        self.out.turn.slots
    }

    /// Writes payload of `bytes` and more past the caches, and shorter by stores and write-backs.
    #[must_use]
    pub fn with_streaming_from(mut self, bytes: usize) -> Self {
        self.out.stream_from = bytes;
        self
    }

    /// The sequence number of the next slot to be published.
    pub fn sequence(&self) -> u64 {
        self.out.turn.sequence()
    }

    /// Pushes a message if there is room. The consumer can see it soon after this returns `true`, whatever becomes of this
    /// process. A message that no cell holds goes out in parts: after `false`, call again with the same message until it
    /// is `true`.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when the consumer went over to another generation, [`PoolError::Corrupt`] when it
    /// returned credits that it never got, [`PoolError::Memory`]; [`PoolError::Broken`] ever after.
    pub fn try_push(&mut self, kind: u64, tag: u64, bytes: &[u8]) -> Result<bool, PoolError> {
        self.fate.check()?;
        match self.out.push(&self.memory, self.link.wakes, OutgoingMessage { kind, tag, bytes }) {
            Ok(pushed) => Ok(pushed),
            Err(flaw) => Err(self.fate.end(self.out.error(&self.link, flaw), false)),
        }
    }

    /// Pushes a message, waiting for room until `deadline`.
    ///
    /// # Errors
    /// Those of [`Producer::try_push`]; [`PoolError::PeerDead`]; [`PoolError::Timeout`], after which the ring goes on
    /// unless part of this message is out already.
    pub fn push(&mut self, kind: u64, tag: u64, bytes: &[u8], deadline: Nanos) -> Result<(), PoolError> {
        self.fate.check()?;
        let letter = OutgoingMessage { kind, tag, bytes };
        loop {
            match self.out.push(&self.memory, self.link.wakes, letter) {
                Ok(true) => return Ok(()),
                Ok(false) => self.wait(deadline)?,
                Err(flaw) => return Err(self.fate.end(self.out.error(&self.link, flaw), false)),
            }
        }
    }

    /// Waits for room for one slot.
    fn wait(&mut self, deadline: Nanos) -> Result<(), PoolError> {
        let Self { memory, out, link, fate } = self;
        out.wait(memory, link, deadline).map_err(|error| fate.end(error, out.streamed > 0))
    }
}

/// A message to be sent.
#[derive(Clone, Copy, Debug)]
struct OutgoingMessage<'a> {
    kind: u64,
    tag: u64,
    bytes: &'a [u8],
}

/// The state of a producer, apart from what it knows of the consumer.
#[derive(Debug)]
struct ProducerState {
    shape: RingShape,
    place: RingPlace,
    /// The slots and cells that are published.
    turn: Turn,
    /// Slots and cells that the consumer's credits allow; 0 before it has shown itself, but in a new ring.
    slot_limit: u64,
    cell_limit: u64,
    /// The consumer has shown itself.
    met: bool,
    /// Bytes of the present message that are out already.
    streamed: usize,
    stream_from: usize,
    summary: Option<(Offset, u64)>,
    torn: bool,
}

impl ProducerState {
    /// Waits for room for one slot.
    fn wait<M: Memory, A>(&mut self, memory: &M, link: &RingLink<A>, deadline: Nanos) -> Result<(), PoolError>
    where
        A: Fn() -> Result<(), PoolError>,
    {
        let wait = Wait { deadline, what: WAITS_FOR, sequence: self.turn.sequence() };
        if self.streamed > 0 && memory.now() >= deadline {
            // Credits that come one by one for ever do not put it off.
            return Err(link.late(memory, wait, deadline));
        }
        // A process that waits for a cell looks for both: which of the two was missing does not matter.
        let (slots, cells) = (self.slot_limit, self.cell_limit);
        let room = link.wait(memory, wait, || match self.has_more(memory, slots, cells) {
            Ok(room) => Ok(room.then_some(())),
            Err(flaw) => Err(self.error(link, flaw)),
        });
        room.map_err(|error| if self.torn { error.waiting_for(HALF_WRITTEN) } else { error })
    }

    /// Publishes as much of the message as there is room for; whether that was all of it.
    #[inline(always)]
    fn push<M: Memory>(
        &mut self,
        memory: &M,
        wakes: Option<Bell>,
        letter: OutgoingMessage<'_>,
    ) -> Result<bool, RingFailure> {
        assert!(letter.kind < KINDS, "a kind of message has 56 bits, not those of {:#x}", letter.kind);
        if letter.bytes.len() > INLINE {
            return self.push_parts(memory, wakes, letter);
        }
        assert!(
            self.streamed == 0,
            "a message of more than {} bytes was begun and not finished",
            self.streamed
        );
        let room = self.has_slot(memory)?;
        if room {
            self.publish(memory, wakes, &letter, Form::Inline, letter.bytes.len(), pack(letter.bytes));
        }
        Ok(room)
    }

    #[inline(never)]
    fn push_parts<M: Memory>(
        &mut self,
        memory: &M,
        wakes: Option<Bell>,
        letter: OutgoingMessage<'_>,
    ) -> Result<bool, RingFailure> {
        let whole = letter.bytes.len();
        assert!(
            self.streamed < whole,
            "a message of more than {} bytes was begun and not finished",
            self.streamed
        );
        while self.has_cell(memory)? {
            let (form, part, about) = self.part(letter.bytes);
            self.fill(memory, part)?;
            self.turn.pass_cell(self.shape, &self.place);
            self.publish(memory, wakes, &letter, form, part.len(), about.into());
            self.streamed += part.len();
            if self.streamed == whole {
                self.streamed = 0;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next part of a message: its form, its bytes, and the word of the header that places it.
    fn part<'a>(&self, message: &'a [u8]) -> (Form, &'a [u8], u64) {
        let rest = &message[self.streamed..];
        let part = &rest[..rest.len().min(self.shape.cell_bytes() as usize)];
        match (self.streamed, part.len() == rest.len()) {
            (0, true) => (Form::Only, part, 0),
            (0, false) => (Form::First, part, message.len() as u64),
            (begin, false) => (Form::More, part, begin as u64),
            (begin, true) => (Form::Last, part, begin as u64),
        }
    }

    /// Whether a slot is free, looking at the consumer's line only when it seems not.
    #[inline(always)]
    fn has_slot<M: Memory>(&mut self, memory: &M) -> Result<bool, RingFailure> {
        if self.turn.slots < self.slot_limit {
            return Ok(true);
        }
        self.look_for_credits(memory)?;
        Ok(self.turn.slots < self.slot_limit)
    }

    /// Whether a slot and a cell are free.
    fn has_cell<M: Memory>(&mut self, memory: &M) -> Result<bool, RingFailure> {
        if self.turn.cells >= self.cell_limit {
            self.look_for_credits(memory)?;
        }
        Ok(self.turn.cells < self.cell_limit && self.has_slot(memory)?)
    }

    // SYNC: sees what `In::show_credits` of the consumer stored, after it had copied those slots out.
    #[inline(never)]
    fn look_for_credits<M: Memory>(&mut self, memory: &M) -> Result<(), RingFailure> {
        let seen = line::read(memory, self.place.credits)?;
        self.torn = seen.is_none();
        let Some([slots, generation, cells, ..]) = seen else { return Ok(()) };
        let own = u64::from(self.place.generation);
        let slot_limit = slots.saturating_add(self.shape.slots());
        let cell_limit = cells.saturating_add(self.shape.cells());
        let is_less = slot_limit < self.slot_limit || cell_limit < self.cell_limit;
        if self.met && (generation < own || generation == own && is_less) && memory.coherence().takes_back() {
            // The consumer's host died with what this end had seen. Those slots were copied out, and its death ends the wait.
            return Ok(());
        }
        if generation != own {
            // Before the consumer has shown itself: what one of an earlier generation left, or nothing at all.
            return if self.met { Err(RingFailure::Left) } else { Ok(()) };
        }
        let too_many = slots > self.turn.slots || cells > self.turn.cells;
        if too_many || is_less {
            return Err(RingFailure::Corrupt("ring credit"));
        }
        (self.slot_limit, self.cell_limit, self.met) = (slot_limit, cell_limit, true);
        Ok(())
    }

    /// Whether the consumer has returned more than it had.
    fn has_more<M: Memory>(&mut self, memory: &M, slots: u64, cells: u64) -> Result<bool, RingFailure> {
        self.look_for_credits(memory)?;
        Ok((self.slot_limit, self.cell_limit) != (slots, cells))
    }

    /// Brings the payload to where the consumer can see it once it sees the header.
    fn fill<M: Memory>(&self, memory: &M, part: &[u8]) -> Result<(), RingFailure> {
        let cell = self.turn.cell;
        if part.len() >= self.stream_from {
            memory.copy_in_nt(cell, part)?;
        } else {
            memory.copy_in(cell, part)?;
            memory.write_back(cell, part.len() as u64);
        }
        // SYNC: pairs with `In::copy_out`, once the consumer has seen the header.
        memory.sfence();
        Ok(())
    }

    // SYNC: publishes the slot to `In::look` of the consumer.
    #[inline(always)]
    fn publish<M: Memory>(
        &mut self,
        memory: &M,
        wakes: Option<Bell>,
        letter: &OutgoingMessage<'_>,
        form: Form,
        bytes: usize,
        about: u128,
    ) {
        let at = self.turn.header;
        let OutgoingMessage { kind, tag, .. } = *letter;
        let (sequence, generation) = (self.turn.sequence(), self.place.generation);
        Header { sequence, generation, kind, tag, form, bytes: bytes as u32, about }.store(memory, at);
        memory.write_back(at, LINE);
        self.turn.pass_slot(self.shape, &self.place);
        if let Some((byte, base)) = self.summary {
            // No fence before it: the summary only says where to look, and goes on saying so.
            memory.store_byte(byte, (base + sequence) as u8);
            memory.write_back(byte, 1);
        }
        link::announce(memory, wakes);
    }

    #[cold]
    fn error<A>(&self, link: &RingLink<A>, flaw: RingFailure) -> PoolError {
        link.error(flaw, self.place.credits, WAITS_FOR, self.turn.sequence())
    }
}
