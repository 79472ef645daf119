//! An endpoint as libfabric means it: addresses are places in an address vector, completions go to queues and counters.

pub(crate) mod one_sided;

use std::collections::{BTreeMap, VecDeque};

use polder_mem::AnyMemory;
use polder_pool::PoolError;
use polder_pool::endpoint::{
    Address, Arrival, CompleteWhen, Completion, Endpoint, Filter, Label, MessageBuffer,
};

use self::one_sided::Remote;
pub(crate) use self::one_sided::Request;
use crate::ffi::{ADDR_NOTAVAIL, ADDR_UNSPEC, CqTaggedEntry, Errno, flag};
use crate::io_buffer::IoBuffer;
use crate::ledger::Ledger;
use crate::log;
use crate::operation::{Context, Operation, Role, entry};
use crate::queue::Queue;
use crate::vector::Vector;

/// The endpoint of the pool behind one of libfabric.
pub(crate) type PoolEndpoint = Endpoint<AnyMemory, IoBuffer, Operation>;

/// Steps of one-sided operations in one call, at most.
const ROUNDS: usize = 64;

/// The kinds of messages, which never match one another.
pub(crate) const MSG: u8 = 0;
pub(crate) const TAGGED: u8 = 1;
/// Of a message that nobody sends.
const NEVER: u8 = u8::MAX;

/// A message that was claimed: on its way, with whoever asks for it; or here.
enum Claim {
    Coming(Option<(IoBuffer, Operation)>),
    Here {
        bytes: Vec<u8>,
        from: u32,
        label: Label,
    },
    /// Thrown away once it is here.
    Unwanted,
    /// It never came.
    Lost(PoolError),
}

/// What a receive is to take, as the program says it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selector {
    pub(crate) from: u64,
    pub(crate) kind: u8,
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
}

/// Where the completions of one direction go.
#[derive(Clone, Copy, Default)]
pub(crate) struct Report {
    pub(crate) queue: Option<usize>,
    /// Only those that ask for it.
    pub(crate) selective: bool,
    /// What holds for each operation that says nothing else.
    pub(crate) flags: u64,
}

impl Report {
    /// Whether an operation with these flags is reported.
    pub(crate) const fn of(&self, flags: u64) -> bool {
        self.queue.is_some() && (!self.selective || flags & flag::COMPLETION != 0)
    }
}

pub(crate) struct Port {
    pub(crate) link: PoolEndpoint,
    pub(crate) vector: Option<usize>,
    pub(crate) transmit: Report,
    pub(crate) receive: Report,
    /// Counters, each with the directions that it counts.
    pub(crate) counters: Vec<(usize, u64)>,
    pub(crate) enabled: bool,
    /// Whether a receive's sender means anything: only where the program asked for that.
    directed: bool,
    /// Whether peers may ask for one-sided operations.
    one_sided: bool,
    /// A buffer for many messages is given back when less than this is left.
    pub(crate) least_left: usize,
    peers: Peers,
    claims: BTreeMap<Context, Claim>,
    /// Buffers for many messages: what the first of each takes, and those that come after it.
    many: Vec<(Filter, VecDeque<(IoBuffer, Operation)>)>,
    /// Peers that a program looks for messages of, and what became of them.
    watched: BTreeMap<u32, Option<PoolError>>,
    pub(crate) remote: Remote,
    /// Why a message or an answer was lost that a peer which is there waits for, and that no completion tells of.
    lost: Option<Errno>,
}

impl Port {
    pub(crate) fn new(link: PoolEndpoint, transmit_flags: u64, receive_flags: u64, caps: u64) -> Self {
        Self {
            link,
            vector: None,
            transmit: Report { flags: transmit_flags, ..Report::default() },
            receive: Report { flags: receive_flags, ..Report::default() },
            counters: Vec::new(),
            enabled: false,
            directed: caps & flag::DIRECTED_RECV != 0,
            one_sided: caps & (flag::RMA | flag::ATOMIC) != 0,
            least_left: 64,
            peers: Peers::default(),
            claims: BTreeMap::new(),
            many: Vec::new(),
            watched: BTreeMap::new(),
            remote: Remote::default(),
            lost: None,
        }
    }

    /// Begins.
    pub(crate) fn enable(&mut self) {
        if !self.enabled && self.one_sided {
            self.hear(Vec::new());
        }
        self.enabled = true;
    }

    /// Queues a message, which is complete when `until` says.
    pub(crate) fn send(
        &mut self,
        ledger: &Ledger,
        until: CompleteWhen,
        to: u64,
        label: Label,
        (span, operation): (IoBuffer, Operation),
    ) -> Result<(), Errno> {
        let to = self.peer(ledger, to)?;
        self.link.send_until(until, to, label, span, operation).map_err(|error| errno_of(&error))
    }

    /// Sends bytes that the program may use again at once; nothing tells of it but a counter.
    pub(crate) fn inject(
        &mut self,
        ledger: &mut Ledger,
        to: u64,
        label: Label,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let to = self.peer(ledger, to)?;
        self.link.inject(to, label, bytes).map_err(|error| errno_of(&error))?;
        self.count(ledger, flag::SEND, true);
        Ok(())
    }

    /// Posts a receive.
    pub(crate) fn post(
        &mut self,
        ledger: &Ledger,
        wanted: Selector,
        span: IoBuffer,
        mut operation: Operation,
    ) -> Result<(), Errno> {
        let filter = self.filter(ledger, wanted)?;
        if let Role::ReceiveMany(many) = &mut operation.role {
            **many = filter;
            // The first is filled before the next: only one at a time is where messages find it.
            if let Some((_, waiting)) = self.many.iter_mut().find(|(taken, _)| *taken == filter) {
                waiting.push_back((span, operation));
                return Ok(());
            }
            self.many.push((filter, VecDeque::new()));
        }
        self.link.receive(filter, span, operation);
        Ok(())
    }

    /// Says whether a message is there, and does with it what the flags say: leaves it, sets it aside, or throws it away.
    pub(crate) fn peek(
        &mut self,
        ledger: &mut Ledger,
        wanted: Selector,
        operation: Operation,
        flags: u64,
    ) -> Result<(), Errno> {
        let filter = self.filter(ledger, wanted)?;
        self.progress(ledger)?;
        let Some(Arrival { from, label, bytes }) = self.link.peek(filter) else {
            match filter.from.and_then(|from| self.watch(from)) {
                Some(error) => self.fail(ledger, &operation, errno_of(&error), None, &log::words(&error)),
                None => self.fail(ledger, &operation, Errno::NOMSG, None, "no such message has arrived"),
            }
            return Ok(());
        };
        let aside = match flags & (flag::CLAIM | flag::DISCARD) {
            0 => None,
            flag::CLAIM => match room(bytes) {
                Some(room) => {
                    self.claims.insert(operation.context, Claim::Coming(None));
                    Some((Role::Claim, room))
                }
                None => {
                    let text =
                        format!("no memory to set a message of {bytes} bytes aside; receive it instead");
                    self.fail(ledger, &operation, Errno::NOMEM, None, &text);
                    return Ok(());
                }
            },
            _ => Some((Role::Discard, Vec::new())),
        };
        if let Some((role, room)) = aside {
            // The message that was found is the first of its sender, kind and tag, and no posted receive fits it.
            let exactly = Filter { from: Some(from), kind: label.kind, tag: label.tag, ignore: 0 };
            let aside = Operation { context: operation.context, flags: 0, report: false, role };
            self.link.receive(exactly, IoBuffer::Held(room), aside);
        }
        self.received(ledger, &operation, Message { from, label, bytes, at: std::ptr::null_mut() });
        Ok(())
    }

    /// Why nothing will come of this peer any more. A look is no receive, so that one is posted which ends with the peer.
    fn watch(&mut self, from: u32) -> Option<PoolError> {
        let known = self.watched.get(&from).cloned();
        known.unwrap_or_else(|| {
            self.watched.insert(from, None);
            let nothing = Filter { from: Some(from), kind: NEVER, tag: 0, ignore: 0 };
            let role = Role::Watch(from);
            let operation =
                Operation { context: Context(std::ptr::null_mut()), flags: 0, report: false, role };
            self.link.receive(nothing, IoBuffer::Held(Vec::new()), operation);
            None
        })
    }

    /// Receives, or throws away, the message that a peek with this context set aside.
    pub(crate) fn claim(
        &mut self,
        ledger: &mut Ledger,
        span: IoBuffer,
        operation: Operation,
        discard: bool,
    ) -> Result<(), Errno> {
        let context = operation.context;
        match (self.claims.remove(&context).ok_or(Errno::INVAL)?, discard) {
            (Claim::Here { bytes, from, label }, false) => {
                self.deliver(ledger, span, &operation, &bytes, (from, label));
            }
            (Claim::Coming(None), false) => {
                self.claims.insert(context, Claim::Coming(Some((span, operation))));
            }
            (Claim::Here { from, label, .. }, true) => {
                self.received(
                    ledger,
                    &operation,
                    Message { from, label, bytes: 0, at: std::ptr::null_mut() },
                );
            }
            (Claim::Coming(None), true) => {
                self.claims.insert(context, Claim::Unwanted);
                self.report(ledger, &operation, entry(&operation), ADDR_NOTAVAIL);
            }
            (Claim::Lost(error), _) => {
                self.fail(ledger, &operation, errno_of(&error), None, &log::words(&error))
            }
            (Claim::Coming(Some(_)) | Claim::Unwanted, _) => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Takes back a receive.
    pub(crate) fn cancel(&mut self, ledger: &mut Ledger, context: Context) -> Result<(), Errno> {
        let cancelled = self.link.cancel(|operation| {
            operation.context == context && matches!(operation.role, Role::Receive | Role::ReceiveMany(_))
        });
        let operation = match cancelled {
            Some((_, operation)) => operation,
            None => self.withdraw(context).ok_or(Errno::NOENT)?,
        };
        self.end(ledger, operation, Errno::CANCELED, "the receive was cancelled");
        Ok(())
    }

    /// Takes back a buffer for many messages that waits for the one before it.
    fn withdraw(&mut self, context: Context) -> Option<Operation> {
        self.many.iter_mut().find_map(|(_, waiting)| {
            let at = waiting.iter().position(|(_, operation)| operation.context == context)?;
            let (_, operation) = waiting.remove(at)?;
            // The buffer before it is not finished by that.
            let flags = operation.flags | flag::MULTI_RECV;
            Some(Operation { role: Role::Receive, flags, ..operation })
        })
    }

    /// Writes down that a receive is over without a message.
    fn end(&mut self, ledger: &mut Ledger, mut operation: Operation, errno: Errno, text: &str) {
        if let Role::ReceiveMany(filter) = &operation.role {
            operation.flags |= flag::MULTI_RECV;
            self.next_of_many(**filter);
        }
        self.fail(ledger, &operation, errno, None, text);
    }

    /// Lets messages into the next buffer for many, where the one before it is finished.
    fn next_of_many(&mut self, filter: Filter) {
        let Some(at) = self.many.iter().position(|(taken, _)| *taken == filter) else { return };
        match self.many[at].1.pop_front() {
            Some((span, operation)) => self.link.receive_first(filter, span, operation),
            None => drop(self.many.swap_remove(at)),
        }
    }

    /// Moves messages, and writes down what has completed; whether any of that was a step of a one-sided operation, after which
    /// there may be more.
    pub(crate) fn progress(&mut self, ledger: &mut Ledger) -> Result<bool, Errno> {
        if !self.enabled {
            return Ok(false);
        }
        let mut one_sided = false;
        for _ in 0..ROUNDS {
            let (mut own, stepped) = match self.link.step() {
                Ok(None) => break,
                Ok(Some(completion)) => (self.settle(ledger, completion), Ok(())),
                Err(error) => (false, Err(error)),
            };
            while let Some(completion) = self.link.completion() {
                own |= self.settle(ledger, completion);
            }
            stepped.map_err(|error| errno_of(&error))?;
            if !own {
                break;
            }
            one_sided = true;
        }
        self.lost.map_or(Ok(one_sided), Err)
    }

    /// Keeps the loss of what was sent and has no completion: every later look for completions fails with it.
    fn keep(&mut self, error: &PoolError) {
        let errno = errno_of(error);
        // Receives end with a peer that is gone.
        if !matches!(error, PoolError::PeerDead { .. }) {
            self.lost.get_or_insert(errno);
        }
    }

    /// Writes down what is over. Returns whether it was a step of a one-sided operation, after which there may be another.
    fn settle(&mut self, ledger: &mut Ledger, completion: Completion<IoBuffer, Operation>) -> bool {
        match completion {
            Completion::Sent { context: operation, .. } => match operation.role {
                Role::SendNote => {}
                Role::SendPayload(number) => self.payload_out(ledger, number),
                Role::SendMemory(key) => self.give_back(key),
                _ => {
                    self.count(ledger, flag::SEND, true);
                    self.report(ledger, &operation, entry(&operation), ADDR_NOTAVAIL);
                }
            },
            Completion::Received { buffer, context: operation, arrival: Arrival { from, label, bytes } } => {
                match operation.role {
                    Role::Claim => self.claimed(ledger, operation.context, buffer, (from, label)),
                    Role::ReceiveMany(ref filter) => {
                        let filter = **filter;
                        self.one_of_many(ledger, filter, (buffer, operation), (from, label, bytes));
                    }
                    Role::Receive => {
                        let at = buffer.at();
                        self.message(ledger, &buffer, &operation, Message { from, label, bytes, at });
                    }
                    Role::ReceiveNote => {
                        self.heard(ledger, buffer, from, label.tag, bytes);
                        return true;
                    }
                    Role::ReceiveAnswer(number) => {
                        self.answered(ledger, number, &buffer, operation, (bytes, label.data));
                        return true;
                    }
                    Role::ReceivePayload(landing) => {
                        self.landed(ledger, &landing, bytes);
                        return true;
                    }
                    // A message that nobody wants; and what is sent is not received.
                    _ => {}
                }
            }
            Completion::Failed { context: operation, error, .. } => match operation.role {
                Role::Claim => self.lost(ledger, operation.context, error),
                // Who asks for a message of it is told.
                Role::Watch(peer) => drop(self.watched.insert(peer, Some(error))),
                Role::ReceiveAnswer(number) => {
                    let failure = (errno_of(&error), log::words(&error));
                    self.decided(ledger, number, operation, Err(failure));
                }
                Role::SendPayload(number) => self.payload_out(ledger, number),
                Role::ReceivePayload(landing) => self.give_back(landing.key()),
                Role::SendMemory(key) => {
                    self.give_back(key);
                    self.keep(&error);
                }
                Role::SendNote => self.keep(&error),
                Role::Discard | Role::ReceiveNote => tracing::debug!("{}", log::words(&error)),
                Role::Send | Role::Receive | Role::ReceiveMany(_) => {
                    self.end(ledger, operation, errno_of(&error), &log::words(&error));
                }
            },
            // It was counted as sent, for its bytes were the program's again.
            Completion::Lost { error } => {
                self.keep(&error);
                self.count(ledger, flag::SEND, false);
            }
        }
        false
    }

    /// Writes down a message that has come into `buffer`, whole or cut off.
    fn message(&mut self, ledger: &mut Ledger, buffer: &IoBuffer, operation: &Operation, message: Message) {
        match message.bytes <= buffer.len() as u64 {
            true => {
                self.count(ledger, flag::RECV, true);
                self.received(ledger, operation, message);
            }
            false => {
                let text = format!("a message of {} bytes came for {}", message.bytes, buffer.len());
                self.fail(ledger, operation, Errno::TRUNC, Some((message, buffer.len())), &text);
            }
        }
    }

    /// A message in a buffer for many: what is left of it waits for the next.
    fn one_of_many(
        &mut self,
        ledger: &mut Ledger,
        filter: Filter,
        (buffer, mut operation): (IoBuffer, Operation),
        (from, label, bytes): (u32, Label, u64),
    ) {
        let used = usize::try_from(bytes).map_or(buffer.len(), |bytes| bytes.min(buffer.len()));
        let left = buffer.len() - used;
        let last = left < self.least_left.max(1);
        let once = operation.flags;
        operation.flags |= if last { flag::MULTI_RECV } else { 0 };
        // That a buffer is the program's again is told whatever else is not.
        let report = operation.report;
        operation.report |= last && self.receive.queue.is_some();
        self.message(ledger, &buffer, &operation, Message { from, label, bytes, at: buffer.at() });
        if last {
            self.next_of_many(filter);
        } else {
            let operation = Operation { flags: once, report, ..operation };
            self.link.receive_first(filter, buffer.after(used), operation);
        }
    }

    fn claimed(
        &mut self,
        ledger: &mut Ledger,
        context: Context,
        buffer: IoBuffer,
        (from, label): (u32, Label),
    ) {
        let IoBuffer::Held(bytes) = buffer else { return };
        match self.claims.remove(&context) {
            Some(Claim::Coming(Some((span, operation)))) => {
                self.deliver(ledger, span, &operation, &bytes, (from, label));
            }
            Some(Claim::Coming(None)) => {
                self.claims.insert(context, Claim::Here { bytes, from, label });
            }
            Some(Claim::Unwanted | Claim::Here { .. } | Claim::Lost(_)) | None => {}
        }
    }

    /// A message that was set aside did not come.
    fn lost(&mut self, ledger: &mut Ledger, context: Context, error: PoolError) {
        match self.claims.remove(&context) {
            Some(Claim::Coming(Some((_, operation)))) => {
                self.fail(ledger, &operation, errno_of(&error), None, &log::words(&error));
            }
            Some(Claim::Coming(None)) => drop(self.claims.insert(context, Claim::Lost(error))),
            _ => log::tell(&error),
        }
    }

    /// Copies a message that was set aside to whoever claims it.
    fn deliver(
        &mut self,
        ledger: &mut Ledger,
        mut span: IoBuffer,
        operation: &Operation,
        bytes: &[u8],
        (from, label): (u32, Label),
    ) {
        let room = span.bytes_mut();
        let fill = room.len().min(bytes.len());
        room[..fill].copy_from_slice(&bytes[..fill]);
        let message = Message { from, label, bytes: bytes.len() as u64, at: span.at() };
        self.message(ledger, &span, operation, message);
    }

    fn received(&mut self, ledger: &mut Ledger, operation: &Operation, message: Message) {
        let from = self.address(ledger, message.from);
        let bytes = usize::try_from(message.bytes).unwrap_or(usize::MAX);
        self.report(ledger, operation, message.entry(operation, bytes), from);
    }

    pub(crate) fn report(&self, ledger: &mut Ledger, operation: &Operation, entry: CqTaggedEntry, from: u64) {
        if let (true, Some(queue)) = (operation.report, self.queue(ledger, operation)) {
            queue.push(entry, from);
        }
    }

    /// Writes down a failure, which is reported whether it was asked for or not.
    pub(crate) fn fail(
        &self,
        ledger: &mut Ledger,
        operation: &Operation,
        errno: Errno,
        cut: Option<(Message, usize)>,
        text: &str,
    ) {
        if errno != Errno::NOMSG {
            let direction = flag::SEND | flag::RECV | flag::READ | flag::WRITE;
            self.count(ledger, operation.flags & direction, false);
        }
        let (entry, over) = match cut {
            Some((message, bytes)) => (message.entry(operation, bytes), message.bytes - bytes as u64),
            None => (entry(operation), 0),
        };
        if let Some(queue) = self.queue(ledger, operation) {
            queue.fail(entry, errno, over, text);
        }
    }

    fn queue<'a>(&self, ledger: &'a mut Ledger, operation: &Operation) -> Option<&'a mut Queue> {
        let report = if operation.flags & flag::RECV != 0 { &self.receive } else { &self.transmit };
        ledger.queues.get_mut(report.queue?)
    }

    pub(crate) fn count(&self, ledger: &mut Ledger, direction: u64, well: bool) {
        for &(counter, directions) in &self.counters {
            if directions & direction != 0
                && let Some(counter) = ledger.counters.get_mut(counter)
            {
                counter.count(well);
            }
        }
    }

    fn filter(&mut self, ledger: &Ledger, wanted: Selector) -> Result<Filter, Errno> {
        let Selector { from, kind, tag, ignore } = wanted;
        let anyone = from == ADDR_UNSPEC || !self.directed;
        let from = if anyone { None } else { Some(self.peer(ledger, from)?) };
        Ok(Filter { from, kind, tag, ignore })
    }

    pub(crate) fn peer(&mut self, ledger: &Ledger, address: u64) -> Result<u32, Errno> {
        let vector = self.vector.and_then(|at| ledger.vectors.get(at)).ok_or(Errno::NOAV)?;
        self.peers.peer(&mut self.link, vector, address)
    }

    pub(crate) fn address(&mut self, ledger: &Ledger, peer: u32) -> u64 {
        let vector = self.vector.and_then(|at| ledger.vectors.get(at));
        vector.map_or(ADDR_NOTAVAIL, |vector| self.peers.address(&self.link, vector, peer))
    }
}

/// A message, as its completion tells of it.
pub(crate) struct Message {
    from: u32,
    label: Label,
    bytes: u64,
    at: *mut u8,
}

impl Message {
    fn entry(&self, operation: &Operation, len: usize) -> CqTaggedEntry {
        let Label { tag, data, .. } = self.label;
        CqTaggedEntry {
            flags: operation.flags | if data.is_some() { flag::REMOTE_CQ_DATA } else { 0 },
            len,
            buf: self.at.cast(),
            data: data.map_or(0, u64::from),
            tag,
            ..entry(operation)
        }
    }
}

/// Which peer of the pool's endpoint stands behind which place of the address vector.
#[derive(Default)]
struct Peers {
    of: Vec<Option<u32>>,
    places: Vec<u64>,
}

impl Peers {
    #[inline]
    fn peer(&mut self, link: &mut PoolEndpoint, vector: &Vector, address: u64) -> Result<u32, Errno> {
        let known = vector.get(address).ok_or(Errno::INVAL)?;
        // A place of the vector is an index.
        match self.of.get(address as usize) {
            Some(&Some(peer)) => Ok(peer),
            _ => {
                link.expect_endpoints(vector.places.len() as u64);
                Ok(self.meet(link, *known, address as usize))
            }
        }
    }

    #[cold]
    fn meet(&mut self, link: &mut PoolEndpoint, known: Address, at: usize) -> u32 {
        let peer = link.connect(known);
        self.of.resize(self.of.len().max(at + 1), None);
        self.of[at] = Some(peer);
        peer
    }

    /// The place of a peer, which may have written before this process wrote to it.
    fn address(&mut self, link: &PoolEndpoint, vector: &Vector, peer: u32) -> u64 {
        if let Some(&place) = self.places.get(peer as usize)
            && vector.get(place).is_some()
        {
            return place;
        }
        let place = link.address_of(peer).and_then(|address: Address| vector.place_of(address));
        let places = self.places.len().max(peer as usize + 1);
        self.places.resize(places, ADDR_NOTAVAIL);
        self.places[peer as usize] = place.unwrap_or(ADDR_NOTAVAIL);
        self.places[peer as usize]
    }
}

/// Zeros for a message of so many bytes, if there is memory for them.
fn room(bytes: u64) -> Option<Vec<u8>> {
    let bytes = usize::try_from(bytes).ok()?;
    Vec::<u8>::new().try_reserve_exact(bytes).ok()?;
    Some(vec![0; bytes])
}

/// Logs an error of the pool, and gives what libfabric calls it.
pub(crate) fn errno_of(error: &PoolError) -> Errno {
    log::tell(error);
    errno(error)
}

/// What libfabric calls an error of the pool.
fn errno(error: &PoolError) -> Errno {
    match error {
        PoolError::PeerDead { .. } | PoolError::Evicted { .. } => Errno::HOSTDOWN,
        PoolError::GaveUp { .. }
        | PoolError::Broken { .. }
        | PoolError::NotFound { .. }
        | PoolError::OtherJob { .. } => Errno::NOTCONN,
        PoolError::Timeout { .. } => Errno::TIMEDOUT,
        PoolError::Full { .. } | PoolError::Quota { .. } | PoolError::DirectoryFull { .. } => Errno::NOSPC,
        PoolError::TooManyOpen { .. } | PoolError::NoSlot { .. } => Errno::NOMEM,
        PoolError::Argument { .. } => Errno::INVAL,
        _ => Errno::IO,
    }
}
