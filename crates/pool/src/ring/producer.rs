//! The end that writes headers and cells.

use polder_mem::{LINE, Memory, Nanos, Offset};

use super::header::{Form, Header, pack};
use super::link::{Fate, Wait};
use super::{Envelope, INLINE, Link, Place, RingShape};
use crate::{PoolError, line};

/// From this many bytes on a payload is written past the caches; below, by stores and write-backs.
const STREAM_FROM: usize = 512;

/// What this end waits for, as errors name it.
const WAITS_FOR: &str = "room in the ring for slot";
/// What it waits for when the consumer was stopped in the middle of its line, or the line is damaged.
const HALF_WRITTEN: &str = "the rest of a half-written or damaged credit line for slot";

/// The sending end of a ring. `A` says whether the consumer lives.
#[derive(Debug)]
pub struct Producer<M, A> {
    out: Out<M>,
    link: Link<A>,
    fate: Fate,
}

impl<M: Memory, A: Fn() -> Result<(), PoolError>> Producer<M, A> {
    /// Attaches to a ring as its only producer. Nothing is written before the consumer of this generation has shown
    /// itself, so what an earlier producer left is not disturbed while it is still read.
    pub fn new(memory: M, shape: RingShape, place: Place, link: Link<A>) -> Self {
        let out = Out {
            memory,
            shape,
            place,
            sent: 0,
            consumed: None,
            streamed: 0,
            stream_from: STREAM_FROM,
            summary: None,
            torn: false,
        };
        Self { out, link, fate: Fate::default() }
    }

    /// Counts what is published in `word` too: this process's own word of its host's summary line for the consumer.
    #[must_use]
    pub fn with_summary(mut self, word: Offset) -> Self {
        self.out.summary = Some(word);
        self
    }

    /// Writes payload of `bytes` and more past the caches.
    #[must_use]
    pub fn with_streaming_from(mut self, bytes: usize) -> Self {
        self.out.stream_from = bytes;
        self
    }

    /// The sequence number of the next slot to be published.
    pub fn sequence(&self) -> u64 {
        self.out.sent + 1
    }

    /// Fails when the consumer is dead. [`Producer::try_push`] does not ask.
    ///
    /// # Errors
    /// Those of the link.
    pub fn check_peer(&self) -> Result<(), PoolError> {
        self.link.check(WAITS_FOR, self.sequence())
    }

    /// Pushes a message if there is room. The consumer can see it once this returns `true`. A message that no cell
    /// holds goes out in parts: after `false`, call again with the same message until it is `true`.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when the consumer went over to another generation, [`PoolError::Corrupt`] when it
    /// returned credits that it never got, [`PoolError::Memory`]; [`PoolError::Broken`] ever after.
    pub fn try_push(&mut self, kind: u16, tag: u32, bytes: &[u8]) -> Result<bool, PoolError> {
        self.fate.check()?;
        let pushed = self.out.push(kind, tag, bytes, &self.link);
        self.fate.note(pushed, false)
    }

    /// Pushes a message, waiting for room until `deadline`.
    ///
    /// # Errors
    /// Those of [`Producer::try_push`]; [`PoolError::PeerDead`]; [`PoolError::Timeout`], after which the ring goes on
    /// unless part of this message is out already.
    pub fn push(&mut self, kind: u16, tag: u32, bytes: &[u8], deadline: Nanos) -> Result<(), PoolError> {
        self.fate.check()?;
        let pushed = self.push_until(kind, tag, bytes, deadline);
        self.fate.note(pushed, self.out.streamed > 0)
    }

    fn push_until(&mut self, kind: u16, tag: u32, bytes: &[u8], deadline: Nanos) -> Result<(), PoolError> {
        let Self { out, link, .. } = self;
        if out.push(kind, tag, bytes, link)? {
            return Ok(());
        }
        let memory = out.memory.clone();
        let began = memory.now();
        loop {
            let wait = Wait { began, deadline, what: WAITS_FOR, sequence: out.sent + 1 };
            let room = link.wait(&memory, wait, || out.room(link).map(|room| room.then_some(())));
            room.map_err(|error| if out.torn { error.waiting_for(HALF_WRITTEN) } else { error })?;
            if out.push(kind, tag, bytes, link)? {
                return Ok(());
            }
            if memory.now() >= deadline {
                return Err(link.late(&memory, wait));
            }
        }
    }
}

/// The state of a producer, apart from what it knows of the consumer.
#[derive(Debug)]
struct Out<M> {
    memory: M,
    shape: RingShape,
    place: Place,
    /// The sequence of the newest published slot.
    sent: u64,
    /// The newest slot that the consumer gave back; nothing before it has shown itself.
    consumed: Option<u64>,
    /// Bytes of the present message that are out already.
    streamed: usize,
    stream_from: usize,
    summary: Option<Offset>,
    torn: bool,
}

impl<M: Memory> Out<M> {
    /// Publishes as much of the message as there is room for; whether that was all of it.
    fn push<A>(&mut self, kind: u16, tag: u32, bytes: &[u8], link: &Link<A>) -> Result<bool, PoolError>
    where
        A: Fn() -> Result<(), PoolError>,
    {
        assert!(
            self.streamed <= bytes.len(),
            "a message of {} bytes was begun and not finished",
            self.streamed
        );
        while self.room(link)? {
            let (form, part, about) = self.part(bytes);
            if form != Form::Inline {
                self.fill(part)?;
            }
            self.publish(kind, tag, form, part.len(), about, link);
            self.streamed += part.len();
            if self.streamed == bytes.len() {
                self.streamed = 0;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next part of a message: its form, its bytes, and the two words of the header that depend on them.
    fn part<'a>(&self, message: &'a [u8]) -> (Form, &'a [u8], [u64; 2]) {
        let rest = &message[self.streamed..];
        let part = &rest[..rest.len().min(self.shape.cell_bytes() as usize)];
        match (self.streamed, part.len() == rest.len()) {
            (0, true) if part.len() <= INLINE => (Form::Inline, part, pack(part)),
            (0, true) => (Form::Only, part, [0; 2]),
            (0, false) => (Form::First, part, [message.len() as u64, 0]),
            (begin, false) => (Form::More, part, [begin as u64, 0]),
            (begin, true) => (Form::Last, part, [begin as u64, 0]),
        }
    }

    /// Whether a slot is free, looking at the consumer's line only when it seems not.
    // SYNC: sees what `Consumer` returned by `return_credits`, after it had copied those slots out.
    fn room<A>(&mut self, link: &Link<A>) -> Result<bool, PoolError>
    where
        A: Fn() -> Result<(), PoolError>,
    {
        let free = |consumed: u64| self.sent - consumed < self.shape.slots();
        if self.consumed.is_some_and(free) {
            return Ok(true);
        }
        let Some([consumed, generation, ..]) = line::read(&self.memory, self.place.credits)? else {
            self.torn = true;
            return Ok(false);
        };
        self.torn = false;
        if generation != self.place.generation {
            return match self.consumed {
                // What the consumer of an earlier generation left, or nothing at all.
                None => Ok(false),
                Some(_) => Err(link.left(WAITS_FOR, self.sent + 1)),
            };
        }
        if consumed > self.sent || self.consumed.is_some_and(|before| consumed < before) {
            return Err(PoolError::Corrupt { offset: self.place.credits, what: "ring credit" });
        }
        self.consumed = Some(consumed);
        Ok(free(consumed))
    }

    /// Brings the payload to where the consumer can see it once it sees the header.
    fn fill(&self, part: &[u8]) -> Result<(), PoolError> {
        let cell = self.place.cell(self.shape, self.sent + 1);
        if part.len() >= self.stream_from {
            self.memory.copy_in_nt(cell, part)?;
        } else {
            self.memory.copy_in(cell, part)?;
            self.memory.write_back(cell, part.len() as u64);
        }
        self.memory.sfence();
        Ok(())
    }

    // SYNC: publishes the slot to `In::look` of the consumer.
    fn publish<A>(&mut self, kind: u16, tag: u32, form: Form, bytes: usize, about: [u64; 2], link: &Link<A>) {
        let generation = self.place.generation;
        self.sent += 1;
        let at = self.place.header(self.shape, self.sent);
        let header = Header { sequence: self.sent, generation, kind, tag, form, bytes: bytes as u32, about };
        for (index, word) in (0..).zip(header.words()) {
            self.memory.store(at.word(index), word);
        }
        self.memory.write_back(at, LINE);
        if let Some(word) = self.summary {
            // No fence before it: the summary only says where to look, and goes on saying so.
            self.memory.store(word, self.sent);
            self.memory.write_back(word, 8);
        }
        // Its fence stands for the `sfence` of rule 2.
        self.memory.wake(link.wakes);
    }
}

impl Envelope {
    /// The envelope of `bytes` bytes.
    pub(super) const fn of(header: &Header, bytes: u64) -> Self {
        Self { kind: header.kind, tag: header.tag, bytes }
    }
}
