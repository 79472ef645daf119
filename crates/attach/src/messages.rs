//! Tagged messages between the ranks of groups, over one endpoint of this process.
//!
//! A thread that waits for a message drives the endpoint itself. While messages are under way and no thread waits for one, a
//! thread of the endpoint drives it. Both sleep when nothing comes for a while, and a peer's message wakes them.
//!
//! # Labels
//! | part | what |
//! |---|---|
//! | kind | what the sender says; [`MESSAGE`] is one of the program |
//! | tag | bits 32..64 the receiver's number of the group, bits 0..32 the program's tag |
//! | data | 1 and the place in [`TYPES`], if the element type is one of these |

use std::io;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use polder_mem::{AnyMemory, threads};
use polder_pool::endpoint::{
    Address, Completion, Endpoint, EndpointOptions, Filter, Label, MessageBuffer, Watch,
};
use polder_pool::wait::Patience;
use polder_pool::{Peer, PoolError};
use slab::Slab;

use crate::lane::Ticket;
use crate::session::Session;
use crate::tellers::{Tellers, lock};

/// The kind of a program's messages.
pub const MESSAGE: u8 = 1;

/// Element types as torch spells them: a message says which it has.
pub const TYPES: [&str; 18] = [
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
    ticket: Arc<Ticket>,
    seats: Arc<[Seat]>,
    /// This rank, and the other one, unless the message may be any rank's.
    rank: usize,
    other: Option<usize>,
    source: Arc<OnceLock<usize>>,
    deadline: Instant,
    timeout: Duration,
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
type Over = Vec<(Arc<Ticket>, Result<(), PoolError>)>;

/// The endpoint, and what is under way on it.
struct Engine<B> {
    link: Endpoint<AnyMemory, B, Part>,
    // After the endpoint, which leaves first.
    _session: Arc<Session>,
    jobs: Slab<Job>,
    broken: Option<PoolError>,
    looked: Instant,
    /// Turns since the last glance at the clock.
    turns: u32,
}

impl<B: MessageBuffer> Engine<B> {
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

    fn settle(&mut self, completion: Completion<B, Part>, over: &mut Over) {
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
        if self.link.cancel(|part| part.job == key).is_some() {
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

struct Shared<B> {
    engine: Mutex<Option<Engine<B>>>,
    watch: Watch<AnyMemory>,
    attention: Mutex<Attention>,
    /// For the endpoint's thread: something is under way, or all is over.
    turn: Condvar,
    /// For callers that wait and do not drive: a message is over, or nobody drives.
    handover: Condvar,
    tellers: Tellers,
    /// The channels that were made, of which each has its number.
    channels: Mutex<u32>,
}

impl<B: MessageBuffer> Shared<B> {
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
        act: impl FnOnce(&mut Engine<B>, &mut Over) -> Result<T, PoolError>,
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
        lock(&self.engine).as_ref().is_some_and(|engine| engine.is_busy())
    }

    /// Waits until the ticket's outcome is there, or `span` has passed. One of the callers that wait drives the endpoint.
    fn wait(&self, ticket: &Ticket, span: Duration, patience: Patience) -> Option<Result<(), PoolError>> {
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
    fn drive(&self, ticket: &Ticket, end: Instant, patience: Patience) {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if ticket.outcome().is_some() || left.is_zero() {
                return;
            }
            let look = |harder| (self.turn(harder, true) || ticket.outcome().is_some()).then_some(());
            self.watch.until(patience, left, look);
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
                let look = |harder| (self.turn(harder, false) || !self.is_unattended()).then_some(());
                self.watch.until(Patience::SHARED, LOOK, look);
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
        expected: "create the process group again",
    }
}

/// This process's endpoint in a pool, and the thread that drives it. Its messages lend buffers `B`.
pub struct Station<B: MessageBuffer> {
    shared: Arc<Shared<B>>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl<B: MessageBuffer + Send + 'static> Station<B> {
    /// Opens an endpoint in the session's pool.
    ///
    /// # Errors
    /// Those of [`Endpoint::open`].
    pub fn open(session: &Arc<Session>) -> Result<Self, PoolError> {
        let options = EndpointOptions { rings_bells: true, ..session.endpoint_options() };
        let link = Endpoint::open(Arc::clone(session.pool()), options)?;
        let watch = link.watch();
        let engine = Engine {
            link,
            _session: Arc::clone(session),
            jobs: Slab::new(),
            broken: None,
            looked: Instant::now(),
            turns: 0,
        };
        let shared = Arc::new(Shared {
            engine: Mutex::new(Some(engine)),
            watch,
            attention: Mutex::default(),
            turn: Condvar::new(),
            handover: Condvar::new(),
            tellers: Tellers::default(),
            channels: Mutex::new(0),
        });
        Ok(Self { shared, worker: Mutex::default() })
    }

    /// Starts the endpoint's thread, which messages need, if it does not run.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(&self) -> io::Result<()> {
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = Arc::clone(&self.shared);
            *worker = Some(threads::start(Builder::new().name("polder-messages".to_owned()), move || {
                shared.work()
            })?);
        }
        Ok(())
    }
}

impl<B: MessageBuffer> Station<B> {
    /// Ends what is under way, waits until the peers have what was sent to them, and leaves, as dropping it does.
    ///
    /// # Errors
    /// Those of [`Endpoint::close`].
    pub fn close(&self) -> Result<(), PoolError> {
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

impl<B: MessageBuffer> Drop for Station<B> {
    fn drop(&mut self) {
        // Nobody is there to be told.
        let _left = self.close();
    }
}

/// The messages between the ranks of one group.
pub struct Channel<B: MessageBuffer> {
    station: Arc<Station<B>>,
    seats: Arc<[Seat]>,
    rank: usize,
    number: u32,
    patience: Patience,
    sequence: Mutex<u64>,
}

/// A message that is started.
pub struct Sending<B> {
    /// What operation of the program it is, for errors.
    pub what: &'static str,
    /// Its kind.
    pub kind: u8,
    /// The program's tag.
    pub tag: u32,
    /// The other rank; nothing for a receive from any.
    pub rank: Option<usize>,
    /// Whether it is received.
    pub receives: bool,
    /// The element type, if it is one of [`TYPES`].
    pub dtype: Option<u32>,
    /// What is sent, or received into.
    pub buffer: B,
    /// How long it may take.
    pub timeout: Duration,
}

/// A message on its way.
pub struct Message {
    /// How it ends.
    pub ticket: Arc<Ticket>,
    /// The rank whose message was received, once it is.
    pub source: Arc<OnceLock<usize>>,
}

impl<B: MessageBuffer + Send + 'static> Channel<B> {
    /// Tells the ranks of a group where this process's endpoint is, and learns where theirs are. `gather` gets this rank's record, and
    /// returns those of all ranks, in their order.
    ///
    /// # Errors
    /// Those of `gather`, and when a rank has told nothing.
    pub fn join<E: From<PoolError>>(
        station: Arc<Station<B>>,
        rank: usize,
        gather: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>,
    ) -> Result<Self, E> {
        let number = {
            let mut made = lock(&station.shared.channels);
            *made += 1;
            *made
        };
        let address = station.shared.with_engine(|engine, _| Ok(engine.link.address()))?;
        let mut record = address.encode().to_vec();
        record.extend(u64::from(number).to_le_bytes());
        record.extend(u64::from(std::process::id()).to_le_bytes());
        let everyone = gather(&record)?;
        let seats = everyone.chunks_exact(RECORD).enumerate().map(|(rank, record)| {
            let (address, words) = record.split_at(16);
            let address = <[u8; 16]>::try_from(address).ok().and_then(Address::decode);
            let word =
                |at: usize| words[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
            let address = address.ok_or_else(|| PoolError::Argument {
                what: "the endpoint of a rank",
                value: rank.to_string(),
                expected: "a rank that has published the address of its endpoint",
            })?;
            Ok((address, word(0), Peer { host: address.host, pid: word(8), rank: u32::try_from(rank).ok() }))
        });
        let seats = seats.collect::<Result<Vec<_>, PoolError>>()?;
        let seats = station.shared.with_engine(|engine, _| {
            let seat =
                |(address, channel, place)| Seat { peer: engine.link.connect(address), channel, place };
            Ok(seats.into_iter().map(seat).collect::<Arc<[Seat]>>())
        })?;
        let patience = Patience::for_ranks(seats.len());
        Ok(Self { station, seats, rank, number, patience, sequence: Mutex::default() })
    }

    /// How many ranks the group has.
    #[must_use]
    pub fn size(&self) -> usize {
        self.seats.len()
    }

    /// Starts the endpoint's thread, which messages need, if it does not run.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start_thread(&self) -> io::Result<()> {
        self.station.start()
    }

    /// Starts a message.
    ///
    /// # Errors
    /// When the endpoint is closed or broken.
    pub fn start(&self, sending: Sending<B>) -> Result<Message, PoolError> {
        let Sending { what, kind, tag, rank, receives, dtype, buffer, timeout } = sending;
        let sequence = {
            let mut sequence = lock(&self.sequence);
            *sequence += 1;
            *sequence
        };
        let (ticket, source) = (Arc::new(Ticket::default()), Arc::new(OnceLock::new()));
        let job = Job {
            what,
            sequence,
            ticket: Arc::clone(&ticket),
            seats: Arc::clone(&self.seats),
            rank: self.rank,
            other: rank,
            source: Arc::clone(&source),
            deadline: Instant::now() + timeout,
            timeout,
        };
        self.station.shared.with_engine(|engine, over| {
            let (job, bytes) = (engine.jobs.insert(job), buffer.bytes().len());
            let part = || Part { job, rank, is_receive: receives, bytes, dtype };
            match rank.map(|rank| self.seats[rank]) {
                Some(Seat { peer, channel, .. }) if !receives => {
                    let label = Label { kind, tag: tag_of(channel, tag), data: dtype };
                    if let Err(error) = engine.link.send(peer, label, buffer, part()) {
                        engine.close_part(&part(), Some(error), over);
                    }
                }
                seat => {
                    let from = seat.map(|seat| seat.peer);
                    let filter = Filter { from, kind, tag: tag_of(self.number, tag), ignore: 0 };
                    engine.link.receive(filter, buffer, part());
                }
            }
            while let Some(completion) = engine.link.step()? {
                engine.settle(completion, over);
            }
            Ok(())
        })?;
        Ok(Message { ticket, source })
    }

    /// How a message ended, once it has or `span` has passed. Meanwhile one of the callers that wait drives the endpoint.
    #[must_use]
    pub fn wait(&self, ticket: &Ticket, span: Duration) -> Option<Result<(), PoolError>> {
        self.station.shared.wait(ticket, span, self.patience)
    }

    /// The message of the program that a rank has sent and this one has not received, for errors.
    ///
    /// # Errors
    /// When the endpoint is closed or broken.
    pub fn unreceived(&self, rank: usize) -> Result<Option<String>, PoolError> {
        let from = self.seats.get(rank).map(|seat| seat.peer);
        let filter = Filter { from, kind: MESSAGE, tag: tag_of(self.number, 0), ignore: u64::from(u32::MAX) };
        let arrival = self.station.shared.with_engine(|engine, over| {
            engine.turn(true, over);
            Ok(engine.link.peek(filter))
        })?;
        Ok(arrival.map(|arrival| said("send", arrival.bytes, arrival.label.data)))
    }
}

fn tag_of(channel: u32, tag: u32) -> u64 {
    u64::from(channel) << 32 | u64::from(tag)
}
