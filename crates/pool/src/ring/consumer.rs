//! The end that reads headers and cells, and returns credits.

use polder_mem::{LINE, Memory, Nanos, Offset};

use super::header::{self, Form, Header, Sight, unpack};
use super::link::{Fate, Wait};
use super::{Envelope, Link, Place, RingShape};
use crate::{PoolError, line};

/// The longest message that a consumer takes unless it is told otherwise: 1 GiB.
const LONGEST: u64 = 1 << 30;
/// What is reserved for a message because its first part says that it is long; beyond, memory follows its bytes.
const TRUSTED: u64 = 128 << 20;
/// What this end waits for, as errors name it.
pub(crate) const WAITS_FOR: &str = "message slot";
/// What it waits for when the producer was stopped in the middle of a header, or the header is damaged.
pub(crate) const HALF_WRITTEN: &str = "the rest of a half-written or damaged header of message slot";
/// Looks in vain after which credits are returned that do not make a batch yet: the producer may wait for them.
const IDLE_LOOKS: u32 = 8;

/// The receiving end of a ring. `A` says whether the producer lives.
#[derive(Debug)]
pub struct Consumer<M, A> {
    intake: In<M>,
    link: Link<A>,
    fate: Fate,
    /// The parts of a streamed message that have come.
    partial: Vec<u8>,
    summary: Option<Offset>,
}

impl<M: Memory, A: Fn() -> Result<(), PoolError>> Consumer<M, A> {
    /// Attaches to a ring as its only consumer, and shows the producer of this generation that it may begin.
    pub fn new(memory: M, shape: RingShape, place: Place, link: Link<A>) -> Self {
        let intake = In {
            memory,
            shape,
            place,
            consumed: 0,
            returned: 0,
            idle: 0,
            torn: false,
            ahead: None,
            streaming: None,
            longest: LONGEST,
        };
        intake.show_credits(&link);
        Self { intake, link, fate: Fate::default(), partial: Vec::new(), summary: None }
    }

    /// Takes messages of up to `bytes` bytes; a longer one is an error of the producer.
    #[must_use]
    pub fn with_longest(mut self, bytes: u64) -> Self {
        self.intake.longest = bytes;
        self
    }

    /// Says in which word of its host's summary line the producer counts what it publishes, for an
    /// [`Inbox`](crate::summary::Inbox).
    #[must_use]
    pub fn with_summary(mut self, word: Offset) -> Self {
        self.summary = Some(word);
        self
    }

    /// The sequence number of the next slot to come.
    pub fn sequence(&self) -> u64 {
        self.intake.consumed + 1
    }

    /// Fails when the producer is dead. [`Consumer::try_pop_into`] does not ask.
    ///
    /// # Errors
    /// Those of the link.
    pub fn check_peer(&self) -> Result<(), PoolError> {
        self.link.check(WAITS_FOR, self.sequence())
    }

    /// What the next message says of itself, as soon as its first part is there.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`], [`PoolError::Memory`]; [`PoolError::Broken`] ever after.
    pub fn peek(&mut self) -> Result<Option<Envelope>, PoolError> {
        self.fate.check()?;
        if let Some(streaming) = &self.intake.streaming {
            return Ok(Some(streaming.envelope));
        }
        let part = self.intake.next_part(&self.link);
        Ok(self.fate.note(part, false)?.map(|part| part.envelope))
    }

    /// Replaces `into` by the next message, if all of it has come. Parts of a streamed message are kept meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when the producer wrote what no correct one writes, [`PoolError::Memory`];
    /// [`PoolError::Broken`] ever after.
    pub fn try_pop_into(&mut self, into: &mut Vec<u8>) -> Result<Option<Envelope>, PoolError> {
        self.fate.check()?;
        let popped = self.intake.pop_into(&mut self.partial, into, &self.link);
        self.fate.note(popped, false)
    }

    /// Replaces `into` by the next message, waiting for it until `deadline`.
    ///
    /// # Errors
    /// Those of [`Consumer::try_pop_into`]; [`PoolError::PeerDead`] once everything is popped that the dead producer
    /// had published whole; [`PoolError::Timeout`], also for a header that stays half written, after which the ring
    /// goes on.
    pub fn pop_into(&mut self, into: &mut Vec<u8>, deadline: Nanos) -> Result<Envelope, PoolError> {
        self.fate.check()?;
        let Self { intake, link, partial, .. } = self;
        let popped = intake.until(deadline, link, |intake, link| intake.pop_into(partial, into, link));
        self.fate.note(popped, false)
    }

    /// The next message, waiting for it until `deadline`.
    ///
    /// # Errors
    /// Those of [`Consumer::pop_into`].
    pub fn pop(&mut self, deadline: Nanos) -> Result<(Envelope, Vec<u8>), PoolError> {
        let mut bytes = Vec::new();
        let envelope = self.pop_into(&mut bytes, deadline)?;
        Ok((envelope, bytes))
    }

    /// Copies the next message to the start of `into`, if all of it has come. A streamed message comes in parts:
    /// after `None`, call again with the same `into`.
    ///
    /// # Errors
    /// Those of [`Consumer::try_pop_into`]; [`PoolError::Argument`] when `into` is too short, and the message stays.
    pub fn try_pop_slice(&mut self, into: &mut [u8]) -> Result<Option<Envelope>, PoolError> {
        self.fate.check()?;
        let popped = self.intake.pop_slice(into, &self.link);
        self.fate.note(popped, false)
    }

    /// Copies the next message to the start of `into`, waiting for it until `deadline`.
    ///
    /// # Errors
    /// Those of [`Consumer::pop_into`]; [`PoolError::Argument`] when `into` is too short, and the message stays. A
    /// [`PoolError::Timeout`] ends the ring when part of a message has come.
    pub fn pop_slice(&mut self, into: &mut [u8], deadline: Nanos) -> Result<Envelope, PoolError> {
        self.fate.check()?;
        let popped = self.intake.until(deadline, &self.link, |intake, link| intake.pop_slice(into, link));
        self.fate.note(popped, self.intake.streaming.is_some())
    }

    /// Returns credits that do not make a batch yet: before this process waits for anything but this ring.
    pub fn return_credits(&mut self) {
        self.intake.return_credits(&self.link);
    }

    /// Bytes that have come of a streamed message.
    pub(super) fn come(&self) -> Option<u64> {
        self.intake.streaming.map(|streaming| streaming.come)
    }

    pub(crate) fn summary(&self) -> Option<Offset> {
        self.summary
    }

    pub(crate) fn link(&self) -> &Link<A> {
        &self.link
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.fate.is_broken()
    }

    /// Fails when an earlier failure has ended this ring.
    pub(crate) fn check(&self) -> Result<(), PoolError> {
        self.fate.check()
    }

    /// Ends this ring, and passes `cause` on.
    pub(crate) fn end<T>(&mut self, cause: PoolError) -> Result<T, PoolError> {
        self.fate.note(Err(cause), true)
    }

    /// Whether the last look met a half-written header: its producer is at it, or stopped, or the line is damaged.
    pub(crate) fn is_torn(&self) -> bool {
        self.intake.torn && !self.is_broken()
    }
}

/// A part of a message that has come, validated.
#[derive(Clone, Copy, Debug)]
struct Part {
    envelope: Envelope,
    /// Where in the message it begins.
    begin: u64,
    bytes: u64,
    /// Its words, when it is in the header.
    inline: Option<[u64; 2]>,
}

impl Part {
    fn end(&self) -> u64 {
        self.begin + self.bytes
    }

    fn is_last(&self) -> bool {
        self.end() == self.envelope.bytes
    }
}

/// A message of which parts have come.
#[derive(Clone, Copy, Debug)]
struct Streaming {
    envelope: Envelope,
    /// Bytes that have come.
    come: u64,
}

/// The state of a consumer, apart from what it knows of the producer.
#[derive(Debug)]
struct In<M> {
    memory: M,
    shape: RingShape,
    place: Place,
    /// The sequence of the newest slot that was copied out.
    consumed: u64,
    /// The newest slot that was given back.
    returned: u64,
    /// Looks in vain since the last slot.
    idle: u32,
    /// The last look saw part of a header.
    torn: bool,
    /// The part that was seen and not taken yet.
    ahead: Option<Part>,
    streaming: Option<Streaming>,
    longest: u64,
}

impl<M: Memory> In<M> {
    /// Runs `pop` until it has a message.
    fn until<A, T>(
        &mut self,
        deadline: Nanos,
        link: &Link<A>,
        mut pop: impl FnMut(&mut Self, &Link<A>) -> Result<Option<T>, PoolError>,
    ) -> Result<T, PoolError>
    where
        A: Fn() -> Result<(), PoolError>,
    {
        if let Some(message) = pop(self, link)? {
            return Ok(message);
        }
        let memory = self.memory.clone();
        let began = memory.now();
        loop {
            // Waits for one part at a time: the patience is for the silence between two, not for a whole message.
            let sequence = self.consumed + 1;
            let wait = Wait { began, deadline, what: WAITS_FOR, sequence };
            let part = link.wait(&memory, wait, || self.next_part(link));
            part.map_err(|error| if self.torn { error.waiting_for(HALF_WRITTEN) } else { error })?;
            if let Some(message) = pop(self, link)? {
                return Ok(message);
            }
            if memory.now() >= deadline {
                // Parts that come one by one for ever do not put it off.
                return Err(link.late(&memory, wait));
            }
        }
    }

    fn pop_into<A>(
        &mut self,
        partial: &mut Vec<u8>,
        into: &mut Vec<u8>,
        link: &Link<A>,
    ) -> Result<Option<Envelope>, PoolError> {
        // At most a whole ring at a time: a hostile producer could go on for ever.
        for _ in 0..self.shape.slots() {
            let Some(part) = self.next_part(link)? else { return Ok(None) };
            let whole = part.begin == 0 && part.is_last();
            let buffer = if whole { &mut *into } else { &mut *partial };
            if buffer.len() < part.end() as usize {
                buffer.reserve((part.envelope.bytes.min(TRUSTED) as usize).saturating_sub(buffer.len()));
                buffer.resize(part.end() as usize, 0);
            }
            self.take(part, &mut buffer[part.begin as usize..part.end() as usize], link)?;
            if part.is_last() {
                buffer.truncate(part.end() as usize);
                if !whole {
                    std::mem::swap(partial, into);
                }
                return Ok(Some(part.envelope));
            }
        }
        Ok(None)
    }

    fn pop_slice<A>(&mut self, into: &mut [u8], link: &Link<A>) -> Result<Option<Envelope>, PoolError> {
        for _ in 0..self.shape.slots() {
            let Some(part) = self.next_part(link)? else { return Ok(None) };
            let (bytes, room) = (part.envelope.bytes, into.len() as u64);
            if bytes > room {
                let value = format!("{room} bytes long for a message of {bytes}");
                let expected = "look with `peek` and pass a slice that holds the message";
                return Err(PoolError::Argument { what: "the slice to receive into", value, expected });
            }
            self.take(part, &mut into[part.begin as usize..part.end() as usize], link)?;
            if part.is_last() {
                return Ok(Some(part.envelope));
            }
        }
        Ok(None)
    }

    /// The next part, if it has come; it stays until it is taken.
    fn next_part<A>(&mut self, link: &Link<A>) -> Result<Option<Part>, PoolError> {
        if self.ahead.is_some() {
            return Ok(self.ahead);
        }
        let sight = self.look()?;
        self.torn = sight == Sight::Torn;
        match sight {
            Sight::Whole(header) => {
                self.idle = 0;
                self.ahead = Some(self.validate(&header)?);
            }
            Sight::Nothing | Sight::Torn => {
                self.idle += 1;
                if self.idle == IDLE_LOOKS.min(link.patience.spins) {
                    self.return_credits(link);
                }
            }
            Sight::Wrong(what) => return Err(self.corrupt(what)),
        }
        Ok(self.ahead)
    }

    /// Looks at the line of the next header; at one word of it as long as that has not changed.
    // SYNC: sees what `Out::publish` of the producer stored.
    fn look(&self) -> Result<Sight, PoolError> {
        let at = self.header();
        self.memory.invalidate(at, LINE);
        self.memory.fence_invalidations();
        let resting = (self.consumed + 1).saturating_sub(self.shape.slots());
        if self.memory.load(at)? == resting {
            return Ok(Sight::Nothing);
        }
        let words = header::load(&self.memory, at)?;
        Ok(Header::see(&words, self.consumed + 1, self.place.generation, self.shape))
    }

    /// Checks a header against the message that it belongs to.
    fn validate(&self, header: &Header) -> Result<Part, PoolError> {
        let bytes = u64::from(header.bytes);
        let about = header.about[0];
        let begun = |streaming: Streaming| Part {
            envelope: streaming.envelope,
            begin: streaming.come,
            bytes,
            inline: None,
        };
        let part = match (header.form, self.streaming) {
            (Form::Inline, None) => {
                Part { envelope: Envelope::of(header, bytes), begin: 0, bytes, inline: Some(header.about) }
            }
            (Form::Only, None) => {
                Part { envelope: Envelope::of(header, bytes), begin: 0, bytes, inline: None }
            }
            (Form::First, None) if about > bytes => {
                Part { envelope: Envelope::of(header, about), begin: 0, bytes, inline: None }
            }
            (Form::More | Form::Last, Some(streaming))
                if about == streaming.come
                    && streaming.envelope == Envelope::of(header, streaming.envelope.bytes)
                    && bytes <= streaming.envelope.bytes - streaming.come =>
            {
                begun(streaming)
            }
            _ => return Err(self.corrupt("ring message part")),
        };
        let last = matches!(header.form, Form::Inline | Form::Only | Form::Last);
        if part.is_last() != last || bytes == 0 && header.form != Form::Inline {
            return Err(self.corrupt("ring message part"));
        }
        if part.envelope.bytes > self.longest {
            return Err(self.corrupt("ring message length"));
        }
        Ok(part)
    }

    /// Copies `part` out, and gives its slot back.
    fn take<A>(&mut self, part: Part, into: &mut [u8], link: &Link<A>) -> Result<(), PoolError> {
        match part.inline {
            Some(words) => unpack(words, into),
            None => {
                let cell = self.place.cell(self.shape, self.consumed + 1);
                // Rule 3: only now. A prefetcher may have filled these lines before the header said that they are
                // written, also right after an earlier message was copied out of them.
                self.memory.invalidate(cell, part.bytes);
                self.memory.fence_invalidations();
                self.memory.copy_out(cell, into)?;
            }
        }
        self.ahead = None;
        self.streaming = (!part.is_last()).then_some(Streaming { envelope: part.envelope, come: part.end() });
        self.consumed += 1;
        if self.consumed - self.returned >= self.shape.batch() {
            self.return_credits(link);
        }
        Ok(())
    }

    fn return_credits<A>(&mut self, link: &Link<A>) {
        if self.returned < self.consumed {
            self.returned = self.consumed;
            self.show_credits(link);
        }
    }

    // SYNC: publishes freed slots to `Out::room` of the producer.
    fn show_credits<A>(&self, link: &Link<A>) {
        let at = self.place.credits;
        line::store(&self.memory, at, &[self.consumed, self.place.generation, 0, 0, 0, 0, 0]);
        self.memory.write_back(at, LINE);
        // Its fence stands for the `sfence` of rule 2.
        self.memory.wake(link.wakes);
    }

    fn header(&self) -> Offset {
        self.place.header(self.shape, self.consumed + 1)
    }

    fn corrupt(&self, what: &'static str) -> PoolError {
        PoolError::Corrupt { offset: self.header(), what }
    }
}
