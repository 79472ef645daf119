//! The end that reads headers and cells, and returns credits.

use std::mem;

use polder_mem::{Bell, LINE, Memory, Nanos};

use super::header::{Form, Header, Sight, unpack};
use super::link::{self, LinkState, RingFailure, Wait};
use super::{Envelope, INLINE, RingLink, RingPlace, RingShape, Turn, batch};
use crate::{PoolError, line};

/// What this end waits for, as errors name it.
const WAITS_FOR: &str = "message slot";
/// What it waits for when the producer was stopped in the middle of a header, or the header is damaged.
const HALF_WRITTEN: &str = "the rest of a half-written or damaged header of message slot";
/// The longest message that a consumer takes unless it is told otherwise: 1 GiB.
const LONGEST: u64 = 1 << 30;
/// What is reserved for a message because its first part says that it is long; beyond, memory follows its bytes.
const TRUSTED: u64 = 128 << 20;
/// Looks in vain after which credits are returned that do not make a batch yet: the producer may wait for them. An
/// answer that is on its way comes within fewer.
const IDLE_LOOKS: u32 = 32;

/// Pauses before the first look at a slot that is likely to be waited for: a look just before the header is stored takes
/// its line from the producer, and the next one takes it again. A third off a round trip, measured (Zen 3).
const PAUSES: u32 = 4;
/// Slots that are likely to be waited for after one was.
const AWAITED: u32 = 256;

const WRONG_PART: RingFailure = RingFailure::Corrupt("ring message part");

/// The receiving end of a ring. `A` says whether the producer lives.
#[derive(Debug)]
pub struct Consumer<M, A> {
    memory: M,
    intake: ConsumerState,
    link: RingLink<A>,
    fate: LinkState,
    /// The parts of a streamed message that have come.
    partial: Vec<u8>,
}

impl<M: Memory, A: Fn() -> Result<(), PoolError>> Consumer<M, A> {
    /// Attaches to a ring as its only consumer, and shows the producer of this generation that it may begin.
    pub fn new(memory: M, shape: RingShape, place: RingPlace, link: RingLink<A>) -> Self {
        let intake = ConsumerState {
            shape,
            place,
            turn: Turn::first(shape, &place),
            returned_slots: 0,
            returned_cells: 0,
            idle: 0,
            torn: false,
            ahead: None,
            streaming: None,
            longest: LONGEST,
            invalidated: false,
            awaited: 0,
            keeps_credits: false,
        };
        intake.show_credits(&memory, link.wakes);
        Self { memory, intake, link, fate: LinkState::default(), partial: Vec::new() }
    }

    /// Takes messages of up to `bytes` bytes, and no less than [`INLINE`]; a longer one is an error of the producer.
    #[must_use]
    pub fn with_longest(mut self, bytes: u64) -> Self {
        self.intake.longest = bytes.max(INLINE as u64);
        self
    }

    /// The sequence number of the next slot to come.
    pub fn sequence(&self) -> u64 {
        self.intake.turn.sequence()
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
        match self.intake.see(&self.memory, &self.link) {
            Ok(seen) => Ok(seen.map(Part::envelope)),
            Err(flaw) => Err(self.end(flaw)),
        }
    }

    /// Whether nothing has come: what a [`Consumer::peek`] in vain says, sooner. Where software keeps coherence, a look takes
    /// longer than all else, and this says nothing.
    ///
    /// # Errors
    /// Those of [`Consumer::peek`].
    #[inline(always)]
    pub(crate) fn is_idle(&mut self) -> Result<bool, PoolError> {
        if self.memory.coherence().needs_invalidation()
            || self.intake.ahead.is_some()
            || self.fate.is_broken()
        {
            return Ok(false);
        }
        // What a load says of an earlier store it says once.
        let seen = self.memory.load(self.intake.turn.header).map_err(|fault| self.end(fault.into()))?;
        let is_still = seen == self.intake.last_seen();
        if is_still {
            self.intake.rest(&self.memory, &self.link, false);
        }
        Ok(is_still)
    }

    /// Replaces `into` by the next message, if all of it has come. Parts of a streamed message are kept meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when the producer wrote what no correct one writes, [`PoolError::Memory`];
    /// [`PoolError::Broken`] ever after.
    #[inline]
    pub fn try_pop_into(&mut self, into: &mut Vec<u8>) -> Result<Option<Envelope>, PoolError> {
        self.fate.check()?;
        match self.intake.pop_into(&self.memory, &self.link, &mut self.partial, into) {
            Ok(popped) => Ok(popped),
            Err(flaw) => Err(self.end(flaw)),
        }
    }

    /// Replaces `into` by the next message, waiting for it until `deadline`.
    ///
    /// # Errors
    /// Those of [`Consumer::try_pop_into`]; [`PoolError::PeerDead`] once everything is popped that the dead producer
    /// had published whole; [`PoolError::Timeout`], also for a header that stays half written, after which the ring
    /// goes on.
    pub fn pop_into(&mut self, into: &mut Vec<u8>, deadline: Nanos) -> Result<Envelope, PoolError> {
        loop {
            if let Some(envelope) = self.try_pop_into(into)? {
                return Ok(envelope);
            }
            self.wait(deadline, false)?;
        }
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

    /// Copies the next message to the start of what `room` gives for it, which is no shorter, if it has come; how long it is. `room` may
    /// also say what of it is wrong. For rings whose messages all come whole.
    ///
    /// # Errors
    /// Those of [`Consumer::try_pop_into`]; a message in parts is [`PoolError::Corrupt`].
    #[inline(always)]
    pub(crate) fn try_pop_to<'a>(
        &mut self,
        room: impl FnOnce(&Envelope) -> Result<&'a mut [u8], &'static str>,
    ) -> Result<Option<u64>, PoolError> {
        self.fate.check()?;
        match self.intake.pop_to(&self.memory, &self.link, room) {
            Ok(popped) => Ok(popped),
            Err(flaw) => Err(self.end(flaw)),
        }
    }

    /// Copies the next message to the start of `into`, waiting for it until `deadline`.
    ///
    /// # Errors
    /// Those of [`Consumer::pop_into`]; [`PoolError::Argument`] when `into` is too short, and the message stays. A
    /// [`PoolError::Timeout`] ends the ring when part of a message has come.
    pub fn pop_slice(&mut self, into: &mut [u8], deadline: Nanos) -> Result<Envelope, PoolError> {
        loop {
            self.fate.check()?;
            match self.intake.pop_slice(&self.memory, &self.link, into) {
                Ok(Some(envelope)) => return Ok(envelope),
                Ok(None) => self.wait(deadline, true)?,
                Err(flaw) => return Err(self.end(flaw)),
            }
        }
    }

    /// Returns credits that do not make a batch yet: before this process waits for anything but this ring.
    pub fn return_credits(&mut self) {
        self.intake.return_credits(&self.memory, self.link.wakes);
    }

    /// Returns no more credits: the producer is gone, and the credit line is another ring's from now on.
    pub(crate) fn keep_credits(&mut self) {
        self.intake.keeps_credits = true;
    }

    /// Bytes that have come of a streamed message.
    #[cfg(feature = "hostile")]
    pub(super) fn come(&self) -> Option<u64> {
        self.intake.streaming.map(|streaming| streaming.come)
    }

    /// Waits for the next part. A timeout ends the ring when parts have come to where nobody keeps them.
    #[inline(never)]
    fn wait(&mut self, deadline: Nanos, parts_are_lost: bool) -> Result<(), PoolError> {
        let Self { memory, intake, link, fate, .. } = self;
        let (is_cut, sequence) = (intake.streaming.is_some(), intake.turn.sequence());
        intake.wait(memory, link, deadline).map_err(|error| match error {
            // Not the end of a stream: a part of a message has come, and the rest never will.
            PoolError::Closed { peer, .. } if is_cut => {
                fate.end(PoolError::GaveUp { peer, what: WAITS_FOR, epoch: link.epoch, sequence }, true)
            }
            error => fate.end(error, parts_are_lost && is_cut),
        })
    }

    #[cold]
    fn end(&mut self, flaw: RingFailure) -> PoolError {
        self.fate.end(self.intake.error(&self.link, flaw), true)
    }
}

/// A part of a message that has come, validated. Without gaps between the fields or behind them: where the compiler moves it
/// whole, a gap costs more than all the rest (a load of bytes that were stored one by one).
#[derive(Clone, Copy, Debug)]
struct Part {
    tag: u64,
    kind: u64,
    form: Form,
    /// Bytes of the whole message.
    total: u64,
    /// Where in it this part begins.
    begin: u64,
    bytes: u64,
    /// Its bytes, when they are in the header.
    words: u128,
}

impl Part {
    #[inline(always)]
    fn new(header: Header, total: u64, begin: u64) -> Self {
        let Header { kind, form, tag, bytes, about, .. } = header;
        Self { kind, form, tag, total, begin, bytes: bytes.into(), words: about }
    }

    #[inline(always)]
    fn envelope(&self) -> Envelope {
        Envelope { kind: self.kind, tag: self.tag, bytes: self.total }
    }

    #[inline(always)]
    fn end(&self) -> u64 {
        self.begin + self.bytes
    }

    #[inline(always)]
    fn is_last(&self) -> bool {
        self.end() == self.total
    }

    #[inline(always)]
    fn is_whole(&self) -> bool {
        self.begin == 0 && self.is_last()
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
struct ConsumerState {
    shape: RingShape,
    place: RingPlace,
    /// The slots and cells that were copied out.
    turn: Turn,
    /// Those of them that were given back.
    returned_slots: u64,
    returned_cells: u64,
    /// Looks in vain since the last slot.
    idle: u32,
    /// The last look saw part of a header.
    torn: bool,
    /// The part that was seen and not taken yet.
    ahead: Option<Part>,
    streaming: Option<Streaming>,
    longest: u64,
    /// The line of the next header has been invalidated since it was last looked at.
    invalidated: bool,
    /// So many of the next slots are likely to be waited for.
    awaited: u32,
    /// Another ring has the credit line.
    keeps_credits: bool,
}

impl ConsumerState {
    /// Waits for one part: the patience is for the silence between two, not for a whole message.
    fn wait<M: Memory, A>(&mut self, memory: &M, link: &RingLink<A>, deadline: Nanos) -> Result<(), PoolError>
    where
        A: Fn() -> Result<(), PoolError>,
    {
        let wait = Wait { deadline, what: WAITS_FOR, sequence: self.turn.sequence() };
        if self.streaming.is_some() && memory.now() >= deadline {
            // Parts that come one by one for ever do not put it off.
            return Err(link.late(memory, wait, deadline));
        }
        let seen = link.wait(memory, wait, || match self.see(memory, link) {
            Ok(seen) => Ok(seen.map(|_| ())),
            Err(flaw) => Err(self.error(link, flaw)),
        });
        seen.map_err(|error| if self.torn { error.waiting_for(HALF_WRITTEN) } else { error })
    }

    #[inline(always)]
    fn pop_into<M: Memory, A>(
        &mut self,
        memory: &M,
        link: &RingLink<A>,
        partial: &mut Vec<u8>,
        into: &mut Vec<u8>,
    ) -> Result<Option<Envelope>, RingFailure> {
        // At most a whole ring at a time: a hostile producer could go on for ever.
        for _ in 0..self.shape.slots() {
            let Some(part) = self.next(memory, link)? else { break };
            let (begin, end) = (part.begin as usize, part.end() as usize);
            let buffer = if part.is_whole() { &mut *into } else { &mut *partial };
            if buffer.len() < end {
                let bytes = part.total.min(TRUSTED) as usize;
                buffer.reserve(bytes.saturating_sub(buffer.len()));
                buffer.resize(end, 0);
            }
            self.take(memory, link, &part, &mut buffer[begin..end])?;
            if part.is_last() {
                buffer.truncate(end);
                if !part.is_whole() {
                    std::mem::swap(partial, into);
                }
                return Ok(Some(part.envelope()));
            }
        }
        Ok(None)
    }

    #[inline(always)]
    fn pop_slice<M: Memory, A>(
        &mut self,
        memory: &M,
        link: &RingLink<A>,
        into: &mut [u8],
    ) -> Result<Option<Envelope>, RingFailure> {
        for _ in 0..self.shape.slots() {
            let Some(part) = self.next(memory, link)? else { break };
            let (bytes, room) = (part.total, into.len() as u64);
            if bytes > room {
                self.ahead = Some(part);
                return Err(RingFailure::Short(room, bytes));
            }
            self.take(memory, link, &part, &mut into[part.begin as usize..part.end() as usize])?;
            if part.is_last() {
                return Ok(Some(part.envelope()));
            }
        }
        Ok(None)
    }

    #[inline(always)]
    fn pop_to<'a, M: Memory, A>(
        &mut self,
        memory: &M,
        link: &RingLink<A>,
        room: impl FnOnce(&Envelope) -> Result<&'a mut [u8], &'static str>,
    ) -> Result<Option<u64>, RingFailure> {
        let Some(part) = self.next(memory, link)? else { return Ok(None) };
        if !part.is_whole() {
            return Err(WRONG_PART);
        }
        let into = room(&part.envelope()).map_err(RingFailure::Corrupt)?;
        self.take(memory, link, &part, &mut into[..part.bytes as usize])?;
        Ok(Some(part.bytes))
    }

    /// The next part, if it has come; it stays until it is taken.
    #[inline(always)]
    fn see<M: Memory, A>(&mut self, memory: &M, link: &RingLink<A>) -> Result<Option<&Part>, RingFailure> {
        if self.ahead.is_none() {
            self.ahead = self.fetch(memory, link)?;
        }
        Ok(self.ahead.as_ref())
    }

    /// The next part, if it has come, to be taken or put back.
    #[inline(always)]
    fn next<M: Memory, A>(&mut self, memory: &M, link: &RingLink<A>) -> Result<Option<Part>, RingFailure> {
        match self.ahead.take() {
            Some(part) => Ok(Some(part)),
            None => self.fetch(memory, link),
        }
    }

    /// The part behind the last that was seen.
    #[inline(always)]
    fn fetch<M: Memory, A>(&mut self, memory: &M, link: &RingLink<A>) -> Result<Option<Part>, RingFailure> {
        match self.look(memory)? {
            Sight::Whole(header) => {
                self.idle = 0;
                self.torn = false;
                match (header.form, &self.streaming) {
                    (Form::Inline, None) => return Ok(Some(Part::new(header, header.bytes.into(), 0))),
                    _ => return self.validate(header).map(Some),
                }
            }
            Sight::Nothing => self.rest(memory, link, false),
            Sight::Torn => self.rest(memory, link, true),
            Sight::Wrong(what) => return Err(RingFailure::Corrupt(what)),
        }
        Ok(None)
    }

    /// After a look in vain.
    #[inline(always)]
    fn rest<M: Memory, A>(&mut self, memory: &M, link: &RingLink<A>, torn: bool) {
        self.torn = torn;
        self.idle = self.idle.saturating_add(1);
        if self.idle == IDLE_LOOKS.min(link.patience.spins.max(1)) {
            self.return_credits(memory, link.wakes);
        }
    }

    /// What has come. A whole header is taken from a line that was invalidated ahead; only a fresh look says that there
    /// is none, or part of one.
    // SYNC: sees what `Out::publish` of the producer stored.
    #[inline(always)]
    fn look<M: Memory>(&mut self, memory: &M) -> Result<Sight, RingFailure> {
        if mem::take(&mut self.invalidated) {
            if self.awaited > 0 {
                self.awaited -= 1;
                (0..PAUSES).for_each(|_| memory.pause());
            }
            let sight = self.glance(memory)?;
            if matches!(sight, Sight::Whole(_)) {
                return Ok(sight);
            }
            self.awaited = AWAITED;
        }
        memory.invalidate(self.turn.header, LINE);
        self.glance(memory)
    }

    /// What the first word of the next header was before.
    #[inline(always)]
    fn last_seen(&self) -> u64 {
        self.turn.sequence().saturating_sub(self.shape.slots())
    }

    /// Looks at the line of the next header; at one word of it as long as that has not changed.
    #[inline(always)]
    fn glance<M: Memory>(&self, memory: &M) -> Result<Sight, RingFailure> {
        let at = self.turn.header;
        // SYNC: pairs with `Out::publish`, as at `look`.
        memory.fence_invalidations();
        if memory.load(at)? == self.last_seen() {
            return Ok(Sight::Nothing);
        }
        let words = memory.load_line(at)?;
        Ok(Header::see(&words, self.turn.sequence(), self.place.generation, self.shape))
    }

    /// Checks a header against the message that it belongs to.
    #[inline(never)]
    fn validate(&self, header: Header) -> Result<Part, RingFailure> {
        let bytes = u64::from(header.bytes);
        let about = header.about as u64;
        let part = match (header.form, self.streaming) {
            (Form::Only, None) => Part::new(header, bytes, 0),
            (Form::First, None) if about > bytes => Part::new(header, about, 0),
            (Form::More | Form::Last, Some(Streaming { envelope, come })) if about == come => {
                Part::new(header, envelope.bytes, come)
            }
            _ => return Err(WRONG_PART),
        };
        let same = self.streaming.is_none_or(|streaming| streaming.envelope == part.envelope());
        let last = matches!(header.form, Form::Only | Form::Last);
        if !same || bytes == 0 || bytes > part.total - part.begin || part.is_last() != last {
            return Err(WRONG_PART);
        }
        if part.total > self.longest {
            return Err(RingFailure::Corrupt("ring message length"));
        }
        Ok(part)
    }

    /// Copies `part` out, and gives its slot back.
    #[inline(always)]
    fn take<M: Memory, A>(
        &mut self,
        memory: &M,
        link: &RingLink<A>,
        part: &Part,
        into: &mut [u8],
    ) -> Result<(), RingFailure> {
        if part.form == Form::Inline {
            unpack(part.words, into);
        } else {
            self.copy_out(memory, *part, into)?;
        }
        self.turn.pass_slot(self.shape, &self.place);
        if memory.coherence().needs_invalidation() {
            // Ahead of the next look, which so need not wait for it: an answer may be pushed meanwhile.
            // HARMLESS(invalidate -> write_back -> drop): a look that finds no whole header is made again, afresh.
            memory.invalidate(self.turn.header, LINE);
            self.invalidated = true;
        }
        if self.turn.slots - self.returned_slots >= batch(self.shape.slots())
            || self.turn.cells - self.returned_cells >= batch(self.shape.cells())
        {
            self.return_credits(memory, link.wakes);
        }
        Ok(())
    }

    #[inline(never)]
    fn copy_out<M: Memory>(&mut self, memory: &M, part: Part, into: &mut [u8]) -> Result<(), RingFailure> {
        let cell = self.turn.cell;
        // Rule 3: only now. A prefetcher may have filled these lines before the header said that they are written, also
        // right after an earlier message was copied out of them.
        memory.invalidate(cell, part.bytes);
        // SYNC: pairs with `Out::fill`: its fence came before the header that was seen.
        memory.fence_invalidations();
        memory.copy_out(cell, into)?;
        self.turn.pass_cell(self.shape, &self.place);
        self.streaming =
            (!part.is_last()).then_some(Streaming { envelope: part.envelope(), come: part.end() });
        Ok(())
    }

    #[inline(never)]
    fn return_credits<M: Memory>(&mut self, memory: &M, wakes: Option<Bell>) {
        if self.returned_slots < self.turn.slots && !self.keeps_credits {
            (self.returned_slots, self.returned_cells) = (self.turn.slots, self.turn.cells);
            self.show_credits(memory, wakes);
        }
    }

    // SYNC: publishes freed slots to `Out::look_for_credits` of the producer.
    fn show_credits<M: Memory>(&self, memory: &M, wakes: Option<Bell>) {
        let at = self.place.credits;
        line::store(
            memory,
            at,
            &[self.turn.slots, self.place.generation.into(), self.turn.cells, 0, 0, 0, 0],
        );
        // HARMLESS(write_back -> drop) on hdm-db: the producer sees them in a cache, and those that are lost are a dead consumer's.
        memory.write_back(at, LINE);
        link::announce(memory, wakes);
    }

    #[cold]
    fn error<A>(&self, link: &RingLink<A>, flaw: RingFailure) -> PoolError {
        link.error(flaw, self.turn.header, WAITS_FOR, self.turn.sequence())
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::{Mapped, Offset, Region};

    use super::*;
    use crate::Peer;
    use crate::wait::Patience;

    #[test]
    #[cfg_attr(miri, ignore = "maps a file")]
    fn a_look_that_finds_nothing_tells_of_a_store_that_was_lost_before_it() {
        let path = std::env::temp_dir().join(format!("polder-test-{}-still", std::process::id()));
        std::fs::write(&path, [0; 4 * 4096]).unwrap();
        let memory = Mapped::coherent(Region::open(&path).unwrap());
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(3 * 4096).unwrap();
        std::fs::remove_file(&path).unwrap();
        let place = RingPlace { lines: Offset(0), credits: Offset(2 * 4096), generation: 1 };
        let (peer, patience, alive) = (Peer::new(1, 7), Patience::DEDICATED, || Ok(()));
        let link = RingLink { peer, epoch: 1, bell: Bell(0), wakes: None, patience, alive };
        let shape = RingShape::new(4, 256).unwrap();
        let mut consumer = Consumer::new(memory.clone(), shape, place, link);
        assert_eq!(consumer.is_idle(), Ok(true));
        memory.store(Offset(3 * 4096), 1);
        assert!(matches!(consumer.is_idle(), Err(PoolError::Memory(_))));
        assert_eq!(consumer.is_idle(), Ok(false));
        assert!(matches!(consumer.peek(), Err(PoolError::Broken { .. })));
    }
}
