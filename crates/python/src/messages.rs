//! `Messages`, `Channel` and `Message`: tagged messages between the ranks of groups, over one endpoint of this process.
//!
//! A thread that waits for a message drives the endpoint itself. While messages are under way and no thread waits for one, a
//! thread of the endpoint drives it. Both sleep when nothing comes for a while, and a peer's message wakes them.
//!
//! # Labels
//! | part | what |
//! |---|---|
//! | kind | 1 a message of the program, 2 a word of a monitored barrier |
//! | tag | bits 32..64 the receiver's number of the group, bits 0..32 the program's tag, or the number of the barrier |
//! | data | 1 and the place in [`TYPES`], if the element type is one of these |

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use polder_attach::session::Session;
use polder_mem::Memory;
use polder_pool::endpoint::{
    self, Address, Arrival, Completion, Endpoint, EndpointOptions, Filter, Label, MessageBuffer,
};
use polder_pool::wait::Patience;
use polder_pool::{Peer, PoolError};
use pyo3::prelude::*;
use slab::Slab;

use crate::buffer::{Elements, Span};
use crate::errors::{self, argument};
use crate::group::{Group, Ticket};
use crate::lane::{self, lock};
use crate::pool::{self, Owned, Pool};
use crate::tellers::Tellers;

/// Element types as torch spells them: a message says which it has.
const TYPES: [&str; 18] = [
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
];

/// Kinds of messages by the names that Python gives.
const KINDS: [&str; 2] = ["message", "monitored barrier"];

/// Turns between two glances at the clock, which is looked at before each sleep too.
const TURNS_A_GLANCE: u32 = 256;
/// How long the endpoint's thread leaves a new message to a caller that may come to wait for it.
const HANDOVER: Duration = Duration::from_millis(1);
/// Between two looks at who died, and at what is late.
const LOOK: Duration = Duration::from_millis(25);
/// How long a callback may go on when the endpoint is closed.
const GRACE: Duration = Duration::from_secs(2);

/// Bytes of a record by which ranks tell each other where their endpoints are.
const RECORD: usize = 32;

/// Bytes of a tensor, lent until a message is over.
struct Lent(Span);

impl MessageBuffer for Lent {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the job keeps the tensors alive, and nobody writes them meanwhile.
        unsafe { self.0.bytes() }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; what a message is received into is touched by nobody else meanwhile.
        unsafe { self.0.bytes_mut() }
    }
}

/// The message of a job.
struct Part {
    job: usize,
    /// The other rank, unless the message may be any rank's.
    rank: Option<usize>,
    is_receive: bool,
    bytes: usize,
    dtype: Option<u32>,
}

impl Part {
    fn say(&self) -> String {
        said(if self.is_receive { "receive" } else { "send" }, self.bytes as u64, self.dtype)
    }
}

fn said(what: &str, bytes: u64, dtype: Option<u32>) -> String {
    let name = dtype.and_then(|code| TYPES.get((code as usize).checked_sub(1)?));
    name.map_or_else(
        || format!("{what} of {bytes} bytes"),
        |name| format!("{what} of {bytes} bytes ({name})"),
    )
}

/// The pool's endpoint, of whichever memory.
trait Link: Send {
    fn address(&self) -> Address;
    fn connect(&mut self, address: Address) -> u32;
    fn send(&mut self, to: u32, label: Label, lent: Lent, part: Part) -> Result<(), PoolError>;
    fn receive(&mut self, filter: Filter, lent: Lent, part: Part);
    /// Takes back a receive of the job that nothing has matched.
    fn cancel(&mut self, job: usize) -> Option<Part>;
    fn step(&mut self) -> Result<Option<Completion<Lent, Part>>, PoolError>;
    fn search_next(&mut self);
    fn peek(&self, filter: Filter) -> Option<Arrival>;
    fn watch(&self) -> Box<dyn Watch>;
    fn check_alive(&mut self, peer: u32) -> Result<(), PoolError>;
    fn is_quiet(&self) -> bool;
    fn moves(&self) -> u64;
    fn close(self: Box<Self>) -> Result<(), PoolError>;
}

/// An endpoint, and the session whose heartbeat says that this process lives; the endpoint leaves first.
struct Opened<M: Memory> {
    endpoint: Endpoint<M, Lent, Part>,
    _session: Arc<Session>,
}

/// Where threads sleep until something comes to the endpoint, of whichever memory.
trait Watch: Send + Sync {
    /// Waits until `look`, which looks harder when it gets true, or `span` has passed.
    fn until(&self, patience: Patience, span: Duration, look: &mut dyn FnMut(bool) -> bool);
    fn wake(&self);
}

impl<M: Memory + Send + Sync> Watch for endpoint::Watch<M> {
    fn until(&self, patience: Patience, span: Duration, look: &mut dyn FnMut(bool) -> bool) {
        self.until(patience, span, |harder| look(harder).then_some(()));
    }

    fn wake(&self) {
        self.wake();
    }
}

impl<M: Memory + Send + Sync + 'static> Link for Opened<M> {
    fn address(&self) -> Address {
        self.endpoint.address()
    }

    fn connect(&mut self, address: Address) -> u32 {
        self.endpoint.connect(address)
    }

    fn send(&mut self, to: u32, label: Label, lent: Lent, part: Part) -> Result<(), PoolError> {
        self.endpoint.send(to, label, lent, part)
    }

    fn receive(&mut self, filter: Filter, lent: Lent, part: Part) {
        self.endpoint.receive(filter, lent, part);
    }

    fn cancel(&mut self, job: usize) -> Option<Part> {
        self.endpoint.cancel(|part| part.job == job).map(|(_, part)| part)
    }

    fn step(&mut self) -> Result<Option<Completion<Lent, Part>>, PoolError> {
        self.endpoint.step()
    }

    fn search_next(&mut self) {
        self.endpoint.search_next();
    }

    fn peek(&self, filter: Filter) -> Option<Arrival> {
        self.endpoint.peek(filter)
    }

    fn watch(&self) -> Box<dyn Watch> {
        Box::new(self.endpoint.watch())
    }

    fn check_alive(&mut self, peer: u32) -> Result<(), PoolError> {
        self.endpoint.check_alive(peer)
    }

    fn is_quiet(&self) -> bool {
        self.endpoint.is_quiet()
    }

    fn moves(&self) -> u64 {
        self.endpoint.moves()
    }

    fn close(self: Box<Self>) -> Result<(), PoolError> {
        self.endpoint.close()
    }
}

fn open<M: Memory + Send + Sync + 'static>(
    session: &Arc<Session>,
    pool: &Arc<polder_pool::Pool<M>>,
) -> Result<Box<dyn Link>, PoolError> {
    let options = EndpointOptions { rings_bells: true, ..EndpointOptions::default() };
    let endpoint = Endpoint::open(Arc::clone(pool), options)?;
    Ok(Box::new(Opened { endpoint, _session: Arc::clone(session) }))
}

/// A rank of a group, as this process reaches it.
#[derive(Clone, Copy)]
struct Seat {
    /// Its number at the endpoint.
    peer: u32,
    /// Its number of the group.
    channel: u32,
    place: Peer,
}

/// A message on its way, as long as it has its tensor.
struct Job {
    what: &'static str,
    sequence: u64,
    ticket: Arc<lane::Ticket>,
    seats: Arc<[Seat]>,
    /// This rank, and the other one, unless the message may be any rank's.
    rank: usize,
    other: Option<usize>,
    source: Arc<OnceLock<usize>>,
    deadline: Instant,
    timeout: Duration,
    /// What keeps the tensors alive.
    _arrays: Py<PyAny>,
}

impl Job {
    fn place(&self, rank: Option<usize>) -> Peer {
        // A message of any rank is missed from all: the first of the others stands for them.
        self.seats[rank.unwrap_or(usize::from(self.rank == 0)).min(self.seats.len() - 1)].place
    }

    /// The error, as one of this rank's operation.
    fn named(&self, error: PoolError, rank: Option<usize>) -> PoolError {
        match error {
            PoolError::PeerDead { epoch, .. } => PoolError::PeerDead {
                peer: self.place(rank),
                what: self.what,
                epoch,
                sequence: self.sequence,
            },
            other => other,
        }
    }
}

/// Tickets that are over, to be told without the endpoint's lock: a callback may want it.
type Over = Vec<(Arc<lane::Ticket>, Result<(), PoolError>)>;

/// The endpoint, and what is under way on it.
struct Engine {
    link: Box<dyn Link>,
    jobs: Slab<Job>,
    broken: Option<PoolError>,
    looked: Instant,
    /// Turns since the last glance at the clock.
    turns: u32,
}

impl Engine {
    fn is_busy(&self) -> bool {
        !self.jobs.is_empty() || !self.link.is_quiet()
    }

    /// Takes in what has come; looks for new senders too when it looks `harder`. Whether something has moved.
    fn turn(&mut self, harder: bool, over: &mut Over) -> bool {
        let before = self.link.moves();
        if harder {
            self.link.search_next();
        }
        loop {
            match self.link.step() {
                Ok(None) => break,
                Ok(Some(completion)) => self.settle(completion, over),
                Err(error) => {
                    self.fail_all(&error, over);
                    return true;
                }
            }
        }
        self.turns += 1;
        if harder || self.turns >= TURNS_A_GLANCE {
            self.turns = 0;
            if self.looked.elapsed() >= LOOK {
                self.look(over);
            }
        }
        self.link.moves() != before || !over.is_empty()
    }

    fn settle(&mut self, completion: Completion<Lent, Part>, over: &mut Over) {
        let (part, error) = match completion {
            Completion::Sent { context, .. } => (context, None),
            Completion::Received { context, arrival, .. } => {
                let Some(job) = self.jobs.get(context.job) else { return };
                let from = job.seats.iter().position(|seat| seat.peer == arrival.from);
                from.map(|from| job.source.set(from));
                let fits = arrival.bytes == context.bytes as u64 && arrival.label.data == context.dtype;
                let error = (!fits).then(|| PoolError::Mismatch {
                    peer: job.place(from),
                    theirs: said("send", arrival.bytes, arrival.label.data),
                    ours: context.say(),
                    sequence: job.sequence,
                });
                (context, error)
            }
            Completion::Failed { context, error, .. } => (context, Some(error)),
            // An answer to a peer that is gone.
            Completion::Lost { .. } => return,
        };
        self.close_part(&part, error, over);
    }

    fn close_part(&mut self, part: &Part, error: Option<PoolError>, over: &mut Over) {
        let Some(job) = self.jobs.try_remove(part.job) else { return };
        let outcome = error.map_or(Ok(()), |error| Err(job.named(error, part.rank)));
        over.push((job.ticket, outcome));
    }

    /// Ends a job before its message. It stays as long as the message has its tensor.
    fn fail(&mut self, key: usize, error: PoolError, over: &mut Over) {
        over.push((Arc::clone(&self.jobs[key].ticket), Err(error)));
        if self.link.cancel(key).is_some() {
            self.jobs.remove(key);
        }
    }

    fn fail_all(&mut self, error: &PoolError, over: &mut Over) {
        self.broken = Some(error.clone());
        over.extend(self.jobs.drain().map(|job| (job.ticket, Err(error.clone()))));
    }

    /// Looks whose process is gone of those that something is awaited of, and what is late.
    fn look(&mut self, over: &mut Over) {
        self.looked = Instant::now();
        for key in self.jobs.iter().map(|(key, _)| key).collect::<Vec<_>>() {
            let Some(job) = self.jobs.get(key) else { continue };
            if job.ticket.outcome().is_some() {
                continue;
            }
            let (seats, own, other) = (Arc::clone(&job.seats), job.rank, job.other);
            let dead = (0..seats.len())
                .filter(|&rank| other.map_or(rank != own, |other| rank == other))
                .find_map(|rank| self.link.check_alive(seats[rank].peer).err().map(|error| (rank, error)));
            if let Some((rank, error)) = dead {
                // What it had sent before has been taken in.
                while let Ok(Some(completion)) = self.link.step() {
                    self.settle(completion, over);
                }
                if other.is_none()
                    && let Some(job) = self.jobs.get(key)
                {
                    let error = job.named(error, Some(rank));
                    self.fail(key, error, over);
                }
                continue;
            }
            let job = &self.jobs[key];
            if self.looked >= job.deadline {
                let error = PoolError::Timeout {
                    peer: job.place(job.other),
                    what: job.what,
                    epoch: 0,
                    sequence: job.sequence,
                    waited_ms: u64::try_from(job.timeout.as_millis()).unwrap_or(u64::MAX),
                };
                self.fail(key, error, over);
            }
        }
    }
}

/// Which thread drives.
#[derive(Default)]
struct Attention {
    /// Callers that wait for a message, and whether one of them drives.
    waiters: usize,
    driven: bool,
    /// How often a caller has driven.
    drives: u64,
    /// Whether something is under way.
    busy: bool,
    /// Whether the endpoint's thread waits to be told that something is.
    dozes: bool,
    closing: bool,
}

struct Shared {
    engine: Mutex<Option<Engine>>,
    watch: Box<dyn Watch>,
    attention: Mutex<Attention>,
    /// For the endpoint's thread: something is under way, or all is over.
    turn: Condvar,
    /// For callers that wait and do not drive: a message is over, or nobody drives.
    handover: Condvar,
    tellers: Tellers,
    /// The channels that were made, of which each has its number.
    channels: Mutex<u32>,
}

impl Shared {
    /// Tells what is over, and the callers that wait for it.
    fn tell(&self, over: Over, drives: bool) {
        if over.is_empty() {
            return;
        }
        for (ticket, outcome) in over {
            ticket.finish(outcome, &self.tellers);
        }
        let attention = lock(&self.attention);
        let (waiters, driven) = (attention.waiters, attention.driven);
        drop(attention);
        if waiters > 0 {
            self.handover.notify_all();
        }
        if driven && !drives {
            // The message may be that of the caller that sleeps there.
            self.watch.wake();
        }
    }

    /// Does something with the endpoint, and tells what is over by it.
    fn with_engine<T>(
        &self,
        act: impl FnOnce(&mut Engine, &mut Over) -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        let mut over = vec![];
        let mut held = lock(&self.engine);
        let engine = held.as_mut().ok_or_else(closed)?;
        if let Some(error) = &engine.broken {
            return Err(error.clone());
        }
        let acted = act(engine, &mut over);
        let busy = engine.is_busy();
        drop(held);
        self.tell(over, false);
        if busy {
            let mut attention = lock(&self.attention);
            attention.busy = true;
            if attention.dozes {
                self.turn.notify_all();
            }
        }
        acted
    }

    /// Takes in what has come; looks for new senders too when it looks `harder`. Whether something has moved.
    fn turn(&self, harder: bool, drives: bool) -> bool {
        let mut over = vec![];
        let mut held = lock(&self.engine);
        let Some(engine) = held.as_mut() else { return false };
        let moved = engine.turn(harder, &mut over);
        drop(held);
        self.tell(over, drives);
        moved
    }

    fn is_busy(&self) -> bool {
        lock(&self.engine).as_ref().is_some_and(Engine::is_busy)
    }

    /// Waits until the ticket's outcome is there, or `span` has passed. One of the callers that wait drives the endpoint.
    /// Without the GIL.
    fn wait(
        &self,
        ticket: &lane::Ticket,
        span: Duration,
        patience: Patience,
    ) -> Option<Result<(), PoolError>> {
        if let Some(outcome) = ticket.outcome() {
            return Some(outcome);
        }
        let end = Instant::now() + span;
        let mut attention = lock(&self.attention);
        attention.waiters += 1;
        while attention.driven && ticket.outcome().is_none() && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            attention = self.handover.wait_timeout(attention, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if !attention.driven {
            attention.driven = true;
            drop(attention);
            self.drive(ticket, end, patience);
            let busy = self.is_busy();
            attention = lock(&self.attention);
            (attention.driven, attention.busy) = (false, busy);
            attention.drives += 1;
            if attention.waiters > 1 {
                self.handover.notify_all();
            }
        }
        attention.waiters -= 1;
        drop(attention);
        ticket.outcome()
    }

    /// Drives the endpoint until the ticket's outcome is there, or until `end`.
    fn drive(&self, ticket: &lane::Ticket, end: Instant, patience: Patience) {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if ticket.outcome().is_some() || left.is_zero() {
                return;
            }
            self.watch
                .until(patience, left, &mut |harder| self.turn(harder, true) || ticket.outcome().is_some());
        }
    }

    /// The endpoint's thread.
    fn work(&self) {
        let mut attention = lock(&self.attention);
        while !attention.closing {
            if !attention.busy {
                attention.dozes = true;
                attention = self.turn.wait(attention).unwrap_or_else(PoisonError::into_inner);
                attention.dozes = false;
                continue;
            }
            let drives = attention.drives;
            let waited = self.turn.wait_timeout_while(attention, HANDOVER, |attention| !attention.closing);
            attention = waited.unwrap_or_else(PoisonError::into_inner).0;
            if attention.waiters > 0 || attention.drives != drives {
                continue;
            }
            drop(attention);
            while self.is_unattended() {
                self.watch.until(Patience::SHARED, LOOK, &mut |harder| {
                    self.turn(harder, false) || !self.is_unattended()
                });
            }
            attention = lock(&self.attention);
        }
    }

    /// Whether something is under way that no caller waits for.
    fn is_unattended(&self) -> bool {
        let busy = self.is_busy();
        let mut attention = lock(&self.attention);
        attention.busy = busy;
        busy && attention.waiters == 0 && !attention.closing
    }
}

fn closed() -> PoolError {
    PoolError::Argument {
        what: "the endpoint",
        value: "closed".to_owned(),
        expected: "make the process group anew",
    }
}

/// This process's endpoint in a pool, and the thread that drives it.
struct Station {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Station {
    /// Ends what is under way, and leaves. Without the GIL.
    fn end(&self) -> Result<(), PoolError> {
        lock(&self.shared.attention).closing = true;
        self.shared.turn.notify_all();
        if let Some(worker) = lock(&self.worker).take() {
            drop(worker.join());
        }
        let engine = lock(&self.shared.engine).take();
        let Some(mut engine) = engine else { return Ok(()) };
        let mut over = vec![];
        engine.fail_all(&closed(), &mut over);
        self.shared.tell(over, false);
        let left = engine.link.close();
        self.shared.tellers.end(GRACE);
        left
    }
}

impl Drop for Station {
    fn drop(&mut self) {
        let _left = Python::attach(|py| py.detach(|| self.end()));
    }
}

/// Where the messages of this process's groups come and go.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Messages {
    station: Owned<Arc<Station>>,
}

#[pymethods]
impl Messages {
    /// Opens an endpoint in the pool.
    #[new]
    fn new(py: Python<'_>, pool: &Bound<'_, Pool>) -> PyResult<Self> {
        let session = pool.get().session()?;
        let link = py.detach(|| open(&session, session.pool())).map_err(errors::raise)?;
        let watch = link.watch();
        let engine = Engine { link, jobs: Slab::new(), broken: None, looked: Instant::now(), turns: 0 };
        let shared = Arc::new(Shared {
            engine: Mutex::new(Some(engine)),
            watch,
            attention: Mutex::default(),
            turn: Condvar::new(),
            handover: Condvar::new(),
            tellers: Tellers::default(),
            channels: Mutex::new(0),
        });
        let station = Arc::new(Station { shared, worker: Mutex::default() });
        Ok(Self { station: Owned::new("endpoint", station) })
    }

    /// Waits until the peers have what was sent to them, and leaves. Closing twice is harmless.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(station) = self.station.take() else { return Ok(()) };
        py.detach(|| station.end()).map_err(errors::raise)
    }
}

/// The messages between the ranks of one group.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Channel {
    station: Owned<Arc<Station>>,
    seats: Arc<[Seat]>,
    rank: usize,
    number: u32,
    patience: Patience,
    sequence: Mutex<u64>,
}

#[pymethods]
impl Channel {
    /// Tells the ranks of a group where this process's endpoint is, and learns where theirs are. Every rank calls it.
    #[new]
    fn new(py: Python<'_>, messages: &Bound<'_, Messages>, group: &Bound<'_, Group>) -> PyResult<Self> {
        let station = messages.get().station.with(Arc::clone)?;
        let number = {
            let mut made = lock(&station.shared.channels);
            *made += 1;
            *made
        };
        let group = group.get();
        let address = py.detach(|| station.shared.with_engine(|engine, _| Ok(engine.link.address())));
        let mut record = address.map_err(errors::raise)?.encode().to_vec();
        record.extend(u64::from(number).to_le_bytes());
        record.extend(u64::from(std::process::id()).to_le_bytes());
        let everyone = group.gather_records(py, &record)?;
        let seats = everyone.chunks_exact(RECORD).enumerate().map(|(rank, record)| {
            let (address, words) = record.split_at(16);
            let address = <[u8; 16]>::try_from(address).ok().and_then(Address::decode);
            let word =
                |at: usize| words[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
            let address =
                address.ok_or_else(|| argument(format!("rank {rank} has told no address of an endpoint")))?;
            Ok((address, word(0), Peer { host: address.host, pid: word(8), rank: u32::try_from(rank).ok() }))
        });
        let seats = seats.collect::<PyResult<Vec<_>>>()?;
        let connected = py.detach(|| {
            station.shared.with_engine(|engine, _| {
                let seat =
                    |(address, channel, place)| Seat { peer: engine.link.connect(address), channel, place };
                Ok(seats.into_iter().map(seat).collect::<Arc<[Seat]>>())
            })
        });
        let seats = connected.map_err(errors::raise)?;
        Ok(Self {
            station: Owned::new("channel", station),
            patience: Patience::for_ranks(seats.len()),
            seats,
            rank: group.own_rank(),
            number,
            sequence: Mutex::default(),
        })
    }

    /// Sends a message to `rank`, or receives one from there, or with no `rank` from any. `place` is an address and bytes.
    ///
    /// The address must be that of a tensor in `arrays`, contiguous and as long as the bytes say.
    #[expect(clippy::too_many_arguments, reason = "one call for every message of one private caller")]
    fn start(
        &self,
        py: Python<'_>,
        what: &str,
        kind: &str,
        tag: u32,
        rank: Option<usize>,
        place: (usize, usize),
        receives: bool,
        dtype: &str,
        timeout: f64,
        arrays: Py<PyAny>,
    ) -> PyResult<Py<Message>> {
        let station = self.station.with(Arc::clone)?;
        let kind = KINDS.iter().position(|&name| name == kind);
        let kind = kind.ok_or_else(|| argument(format!("there is no kind of message {what:?}")))? as u8 + 1;
        let dtype = TYPES.iter().position(|&name| name == dtype).map(|place| place as u32 + 1);
        if rank.map_or(!receives, |rank| rank >= self.seats.len()) {
            return Err(argument(format!(
                "{what} names rank {rank:?}; the group has ranks 0 to {}",
                self.seats.len() - 1
            )));
        }
        // SAFETY: the caller promises that `arrays` keeps this memory alive, and the job keeps `arrays`.
        let span = unsafe { Span::raw(place, Elements::BYTES) }?;
        let timeout = pool::span(timeout)?.0;
        let sequence = {
            let mut sequence = lock(&self.sequence);
            *sequence += 1;
            *sequence
        };
        let (ticket, source) = (Arc::new(lane::Ticket::default()), Arc::new(OnceLock::new()));
        let job = Job {
            what: OPERATIONS.iter().copied().find(|&name| name == what).unwrap_or("message"),
            sequence,
            ticket: Arc::clone(&ticket),
            seats: Arc::clone(&self.seats),
            rank: self.rank,
            other: rank,
            source: Arc::clone(&source),
            deadline: Instant::now() + timeout,
            timeout,
            _arrays: arrays,
        };
        start_worker(&station)?;
        let submitted = py.detach(|| {
            station.shared.with_engine(|engine, over| {
                let job = engine.jobs.insert(job);
                let part = || Part { job, rank, is_receive: receives, bytes: span.len(), dtype };
                match rank.map(|rank| self.seats[rank]) {
                    Some(Seat { peer, channel, .. }) if !receives => {
                        let label = Label { kind, tag: tag_of(channel, tag), data: dtype };
                        if let Err(error) = engine.link.send(peer, label, Lent(span), part()) {
                            engine.close_part(&part(), Some(error), over);
                        }
                    }
                    seat => {
                        let from = seat.map(|seat| seat.peer);
                        let filter = Filter { from, kind, tag: tag_of(self.number, tag), ignore: 0 };
                        engine.link.receive(filter, Lent(span), part());
                    }
                }
                while let Some(completion) = engine.link.step()? {
                    engine.settle(completion, over);
                }
                Ok(())
            })
        });
        submitted.map_err(errors::raise)?;
        let patience = self.patience;
        let wait = move |ticket: &lane::Ticket, span| station.shared.wait(ticket, span, patience);
        let base = Ticket::new(ticket, Box::new(wait));
        Py::new(py, PyClassInitializer::from(base).add_subclass(Message { source }))
    }

    /// The message that a rank has sent and this one has not received, for errors.
    fn unreceived(&self, py: Python<'_>, rank: usize) -> PyResult<Option<String>> {
        let station = self.station.with(Arc::clone)?;
        let from = self.seats.get(rank).map(|seat| seat.peer);
        let filter = Filter { from, kind: 1, tag: tag_of(self.number, 0), ignore: u64::from(u32::MAX) };
        let found = py.detach(|| {
            station.shared.with_engine(|engine, over| {
                engine.turn(true, over);
                Ok(engine.link.peek(filter))
            })
        });
        let found = found.map_err(errors::raise)?;
        Ok(found.map(|arrival| said("send", arrival.bytes, arrival.label.data)))
    }

    /// Lets go of the endpoint.
    fn close(&self) {
        drop(self.station.take());
    }
}

/// What operations are called in errors.
const OPERATIONS: [&str; 4] = ["send", "receive", "receive from any rank", "monitored barrier"];

fn tag_of(channel: u32, tag: u32) -> u64 {
    u64::from(channel) << 32 | u64::from(tag)
}

fn start_worker(station: &Station) -> PyResult<()> {
    let mut worker = lock(&station.worker);
    if worker.is_none() {
        let shared = Arc::clone(&station.shared);
        let named = std::thread::Builder::new().name("polder-messages".to_owned());
        let started = named.spawn(move || shared.work()).map_err(|error| {
            errors::plain("PolderError", format!("cannot start the endpoint's thread: {error}"))
        })?;
        *worker = Some(started);
    }
    Ok(())
}

/// Messages on their way. A caller that waits for them drives the endpoint.
#[pyclass(module = "polder._core", frozen, extends = Ticket)]
pub(crate) struct Message {
    source: Arc<OnceLock<usize>>,
}

#[pymethods]
impl Message {
    /// The rank whose message was received.
    #[getter]
    fn source(&self) -> Option<usize> {
        self.source.get().copied()
    }
}
