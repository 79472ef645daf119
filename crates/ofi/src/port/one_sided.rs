//! One-sided operations. A note asks for an operation; the progress of the memory's owner does it.
//!
//! The owner answers every note, so an operation is complete only when it is done. An answer is a message with the number of
//! the note as its tag. The requester has posted a receive for it. The bytes of a read go straight into the program's memory; a
//! failure is the data of the message. The receive also ends when the owner dies.
//!
//! What is too long for its note follows it as a payload, and is streamed straight into the registered memory.
//!
//! Notes are numbered and done in that order, even if one was announced and comes later than the next. So the bytes inside a
//! note are ordered. A payload, and the answer to a long read, are not.

use std::collections::BTreeMap;

use polder_pool::endpoint::{Filter, Label, MessageBuffer};

use super::{Port, errno_of};
use crate::arithmetic::{Form, Op};
use crate::ffi::{ADDR_NOTAVAIL, CqTaggedEntry, Errno, flag};
use crate::io_buffer::IoBuffer;
use crate::ledger::Ledger;
use crate::limits::DEPTH;
use crate::note::{self, Act, INLINE, Note};
use crate::operation::{Landing, Operation, Role, aside, entry};
use crate::region::{self, Refusal};

/// The kinds of messages of one-sided operations.
const NOTE: u8 = 2;
const PAYLOAD: u8 = 3;
const ANSWER: u8 = 4;

/// Notes that may come before the one that is next: more than anybody has under way.
const EARLY: u64 = 1 << 16;

/// What is asked of another process.
pub(crate) struct Request {
    pub(crate) act: Act,
    pub(crate) key: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) data: Option<u32>,
    /// What is written, or operands.
    pub(crate) out: IoBuffer,
    /// Where what comes back belongs, in pieces.
    pub(crate) back: Vec<IoBuffer>,
}

/// An operation that has more to wait for, or to do, than its answer.
#[derive(Default)]
struct Pending {
    /// The payload is not out.
    payload: bool,
    /// Where the pieces of what came belong.
    pieces: Vec<IoBuffer>,
    /// What became of it.
    outcome: Option<(Operation, Outcome)>,
}

/// What became of an operation; the failure also in words.
type Outcome = Result<(), (Errno, String)>;

/// The notes between this endpoint and a peer.
#[derive(Default)]
struct Conversation {
    said: u64,
    heard: u64,
    early: BTreeMap<u64, Vec<u8>>,
}

/// The one-sided operations of an endpoint.
#[derive(Default)]
pub(crate) struct Remote {
    conversations: BTreeMap<u32, Conversation>,
    /// The number of the last note.
    last: u64,
    under_way: usize,
    pending: BTreeMap<u64, Pending>,
    /// How often registered memory is lent, by key.
    lent: BTreeMap<u64, usize>,
}

impl Port {
    /// Lets others ask: the next note is received here. One at a time is enough, for a call of the endpoint's progress ends with it,
    /// and each that is posted is looked at when a message comes.
    pub(crate) fn hear(&mut self, mut room: Vec<u8>) {
        room.resize(note::LONGEST, 0);
        let any = Filter { from: None, kind: NOTE, tag: 0, ignore: u64::MAX };
        self.link.receive(any, IoBuffer::Held(room), aside(Role::ReceiveNote));
    }

    // What is asked of others.

    /// Begins a one-sided operation.
    pub(crate) fn ask(
        &mut self,
        ledger: &Ledger,
        to: u64,
        request: Request,
        mut operation: Operation,
    ) -> Result<(), Errno> {
        if self.remote.under_way >= DEPTH {
            return Err(Errno::AGAIN);
        }
        let to = self.peer(ledger, to)?;
        let number = self.remote.last + 1;
        let Request { act, key, address, bytes, data, out, mut back } = request;
        let follows = act == Act::Write && bytes > INLINE as u64;
        let carried = if follows { &[] } else { out.bytes() };
        let note = Note { number, act, key, address, bytes, data, carried }.encode();
        let conversation = self.remote.conversations.entry(to).or_default();
        let label = Label { kind: NOTE, tag: conversation.said, data: None };
        self.link
            .send(to, label, IoBuffer::Held(note), aside(Role::SendNote))
            .map_err(|error| errno_of(&error))?;
        conversation.said += 1;
        self.remote.last = number;
        self.remote.under_way += 1;
        let mut pending = Pending { payload: follows, ..Pending::default() };
        let back = if back.len() < 2 {
            back.pop().unwrap_or(IoBuffer::Held(Vec::new()))
        } else {
            let bytes = back.iter().map(IoBuffer::len).sum();
            pending.pieces = back;
            IoBuffer::Held(vec![0; bytes])
        };
        if follows || !pending.pieces.is_empty() {
            self.remote.pending.insert(number, pending);
        }
        operation.role = Role::ReceiveAnswer(number);
        let answer = Filter { from: Some(to), kind: ANSWER, tag: number, ignore: 0 };
        self.link.receive(answer, back, operation);
        if follows {
            let label = Label { kind: PAYLOAD, tag: number, data: None };
            if self.link.send(to, label, out, aside(Role::SendPayload(number))).is_err() {
                // The answer will not come either.
                self.payload_is_out(number);
            }
        }
        Ok(())
    }

    /// The answer to a request has come, so many bytes of it, or a failure.
    pub(crate) fn answered(
        &mut self,
        ledger: &mut Ledger,
        number: u64,
        buffer: &IoBuffer,
        operation: Operation,
        (bytes, failure): (u64, Option<u32>),
    ) {
        let result = match failure {
            Some(errno) => {
                let errno = Errno(errno.cast_signed());
                let text = match errno {
                    Errno::KEYREJECTED => "the peer has no memory registered with this key".to_owned(),
                    Errno::ACCES => "the peer's memory is not registered for this, or not so far".to_owned(),
                    Errno(errno) => format!("the peer refused with error {errno}"),
                };
                Err((errno, text))
            }
            None if bytes == buffer.len() as u64 => Ok(()),
            None => Err((Errno::IO, format!("{bytes} bytes came for {}", buffer.len()))),
        };
        if let Some(pending) = self.remote.pending.get_mut(&number)
            && result.is_ok()
        {
            let mut bytes = buffer.bytes();
            for piece in &mut pending.pieces {
                let (these, rest) = bytes.split_at(piece.len().min(bytes.len()));
                piece.bytes_mut()[..these.len()].copy_from_slice(these);
                bytes = rest;
            }
        }
        self.decided(ledger, number, operation, result);
    }

    /// What becomes of a request is known; it is over once its payload is the program's again.
    pub(crate) fn decided(
        &mut self,
        ledger: &mut Ledger,
        number: u64,
        operation: Operation,
        result: Outcome,
    ) {
        match self.remote.pending.get_mut(&number) {
            Some(pending) if pending.payload => pending.outcome = Some((operation, result)),
            _ => {
                self.remote.pending.remove(&number);
                self.over(ledger, &operation, result);
            }
        }
    }

    /// A payload is the program's again.
    pub(crate) fn payload_out(&mut self, ledger: &mut Ledger, number: u64) {
        if let Some((operation, result)) = self.payload_is_out(number) {
            self.remote.pending.remove(&number);
            self.over(ledger, &operation, result);
        }
    }

    fn payload_is_out(&mut self, number: u64) -> Option<(Operation, Outcome)> {
        let pending = self.remote.pending.get_mut(&number)?;
        pending.payload = false;
        pending.outcome.take()
    }

    fn over(&mut self, ledger: &mut Ledger, operation: &Operation, result: Outcome) {
        self.remote.under_way -= 1;
        match result {
            Ok(()) => {
                self.count(ledger, operation.flags & (flag::READ | flag::WRITE), true);
                self.report(ledger, operation, entry(operation), ADDR_NOTAVAIL);
            }
            Err((errno, text)) => self.fail(ledger, operation, errno, None, &text),
        }
    }

    // What others ask.

    /// A note has come.
    pub(crate) fn heard(&mut self, ledger: &mut Ledger, buffer: IoBuffer, from: u32, turn: u64, bytes: u64) {
        let IoBuffer::Held(mut room) = buffer else { return };
        let conversation = self.remote.conversations.entry(from).or_default();
        let ahead = turn.wrapping_sub(conversation.heard);
        if ahead >= EARLY {
            tracing::warn!(from, turn, "a peer says what was said");
            return self.hear(room);
        }
        // What is longer than notes are was cut off, and is none.
        room.truncate(if bytes > note::LONGEST as u64 { 0 } else { bytes as usize });
        if ahead > 0 {
            conversation.early.insert(turn, room);
            return self.hear(Vec::new());
        }
        self.serve(ledger, from, &room);
        self.hear(room);
        while let Some(note) = self.next_early(from) {
            self.serve(ledger, from, &note);
        }
    }

    /// Goes on to the next turn of a peer, whose note may have come already.
    fn next_early(&mut self, from: u32) -> Option<Vec<u8>> {
        let conversation = self.remote.conversations.get_mut(&from)?;
        conversation.heard += 1;
        conversation.early.remove(&conversation.heard)
    }

    fn serve(&mut self, ledger: &mut Ledger, from: u32, bytes: &[u8]) {
        let Some(note) = Note::decode(bytes) else {
            tracing::warn!(from, "a peer asks for what no endpoint asks for");
            return;
        };
        let access = match note.act {
            Act::Write | Act::Atomic(Form::Plain, ..) => region::WRITE,
            Act::Read | Act::Atomic(Form::Fetch, Op::Read, _) => region::READ,
            Act::Atomic(..) => region::READ | region::WRITE,
        };
        let follows = note.act == Act::Write && note.carried.is_empty() && note.bytes > 0;
        let found = ledger.regions.find(note.key, note.address, note.bytes, access);
        // Of no bytes nothing is asked.
        let found = if note.bytes == 0 { Ok(0) } else { found };
        match (found, note.act) {
            (Err(refusal), _) => {
                let errno = match refusal {
                    Refusal::NoKey => Errno::KEYREJECTED,
                    Refusal::NoAccess => Errno::ACCES,
                };
                tracing::warn!(from, ?note.act, note.key, note.address, note.bytes, ?refusal, "refused");
                self.refuse(from, note.number, follows, errno);
            }
            (Ok(at), Act::Write) if follows => {
                let Note { number, key, bytes, data, .. } = note;
                self.lend(key);
                // SAFETY: registered for this, and not given back while it is lent.
                let span = unsafe { memory(at, bytes) };
                let role = Role::ReceivePayload(Box::new(Landing { from, number, key, bytes, data }));
                self.link.receive(payload_of(from, number), span, aside(role));
            }
            (Ok(at), Act::Write) => {
                // SAFETY: registered for this.
                unsafe { store(at, note.carried) };
                let Note { number, key, bytes, data, .. } = note;
                self.written(ledger, &Landing { from, number, key, bytes, data });
            }
            (Ok(at), Act::Read) => {
                // SAFETY: registered for this, and not given back while it is lent.
                let span = unsafe { memory(at, note.bytes) };
                self.happened(ledger, note.key, flag::REMOTE_READ);
                if note.bytes > INLINE as u64 {
                    self.lend(note.key);
                    self.answer(from, note.number, span, None, Role::SendMemory(note.key));
                } else {
                    let copy = IoBuffer::Held(span.bytes().to_vec());
                    self.answer(from, note.number, copy, None, Role::SendNote);
                }
            }
            (Ok(at), Act::Atomic(form, op, datatype)) => {
                let bytes = note.bytes as usize;
                // SAFETY: registered for this.
                let before = unsafe { memory(at, note.bytes) }.bytes().to_vec();
                let (operand, compare) = note.carried.split_at(bytes.min(note.carried.len()));
                if op != Op::Read {
                    let after = datatype.apply(op, &before, operand, compare);
                    // SAFETY: as above.
                    unsafe { store(at, &after) };
                }
                let back = if form == Form::Plain { Vec::new() } else { before };
                let what = if form == Form::Plain { flag::REMOTE_WRITE } else { flag::REMOTE_READ };
                self.happened(ledger, note.key, what);
                self.answer(from, note.number, IoBuffer::Held(back), None, Role::SendNote);
            }
        }
    }

    /// A payload has come into registered memory.
    pub(crate) fn landed(&mut self, ledger: &mut Ledger, landing: &Landing, bytes: u64) {
        self.give_back(landing.key);
        if bytes == landing.bytes {
            self.written(ledger, landing);
        } else {
            self.refuse(landing.from, landing.number, false, Errno::TRUNC);
        }
    }

    /// What a peer wrote is there.
    fn written(&mut self, ledger: &mut Ledger, &Landing { from, number, key, bytes, data }: &Landing) {
        self.happened(ledger, key, flag::REMOTE_WRITE);
        if let Some(data) = data {
            let source = self.address(ledger, from);
            if let Some(queue) = self.receive.queue.and_then(|at| ledger.queues.get_mut(at)) {
                queue.push(
                    CqTaggedEntry {
                        op_context: std::ptr::null_mut(),
                        flags: flag::RMA | flag::REMOTE_WRITE | flag::REMOTE_CQ_DATA,
                        len: bytes as usize,
                        buf: std::ptr::null_mut(),
                        data: u64::from(data),
                        tag: 0,
                    },
                    source,
                );
            }
        }
        self.answer(from, number, IoBuffer::Held(Vec::new()), None, Role::SendNote);
    }

    /// Answers that nothing was done, and throws away the payload that follows.
    fn refuse(&mut self, to: u32, number: u64, follows: bool, errno: Errno) {
        if follows {
            self.link.receive(payload_of(to, number), IoBuffer::Held(Vec::new()), aside(Role::Discard));
        }
        self.answer(to, number, IoBuffer::Held(Vec::new()), Some(errno), Role::SendNote);
    }

    fn answer(&mut self, to: u32, number: u64, span: IoBuffer, failure: Option<Errno>, role: Role) {
        let data = failure.map(|Errno(errno)| errno.cast_unsigned());
        let label = Label { kind: ANSWER, tag: number, data };
        let served = if let Role::SendMemory(key) = role { Some(key) } else { None };
        if let Err(error) = self.link.send(to, label, span, aside(role)) {
            tracing::warn!("{error}");
            served.into_iter().for_each(|key| self.give_back(key));
        }
    }

    /// Counts what a peer did with registered memory.
    fn happened(&self, ledger: &mut Ledger, key: u64, what: u64) {
        self.count(ledger, what, true);
        let Ledger { regions, counters, .. } = ledger;
        for (counter, events) in regions.get_mut(key).into_iter().flat_map(|region| &region.counters) {
            if events & what != 0
                && let Some(counter) = counters.get_mut(*counter)
            {
                counter.count(true);
            }
        }
    }

    // Which registered memory is lent.

    fn lend(&mut self, key: u64) {
        *self.remote.lent.entry(key).or_default() += 1;
    }

    pub(crate) fn give_back(&mut self, key: u64) {
        if let Some(times) = self.remote.lent.get_mut(&key) {
            *times -= 1;
            if *times == 0 {
                self.remote.lent.remove(&key);
            }
        }
    }

    /// Whether registered memory is in use still, once what no payload has begun to fill is refused.
    pub(crate) fn holds(&mut self, key: u64) -> bool {
        let lands = |operation: &Operation| matches!(&operation.role, Role::ReceivePayload(landing) if landing.key == key);
        while let Some((_, Operation { role: Role::ReceivePayload(landing), .. })) = self.link.cancel(lands) {
            self.give_back(key);
            self.refuse(landing.from, landing.number, true, Errno::KEYREJECTED);
        }
        self.remote.lent.contains_key(&key)
    }
}

const fn payload_of(from: u32, number: u64) -> Filter {
    Filter { from: Some(from), kind: PAYLOAD, tag: number, ignore: 0 }
}

/// Registered memory.
///
/// # Safety
/// As [`IoBuffer::lent`].
unsafe fn memory(at: usize, bytes: u64) -> IoBuffer {
    // SAFETY: by this function's contract; what is registered is as long as a usize can say.
    unsafe { IoBuffer::lent(std::ptr::with_exposed_provenance_mut(at), bytes as usize) }
}

/// Copies to registered memory.
///
/// # Safety
/// There is room for the bytes, and the program lets peers write there.
unsafe fn store(at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: by this function's contract.
        unsafe { bytes.as_ptr().copy_to(std::ptr::with_exposed_provenance_mut(at), bytes.len()) };
    }
}
