//! Rings in the incoherent model: each form of message through one, two and three slots, crashes of either end at any
//! operation, and a producer that starts again. Then the same on memory that its device keeps coherent, between two kernels: no bell
//! rings at the other host, and what outlives a process there makes its death known.
//!
//! The oracle is a queue: a message enters it when its push begins, and must leave it, whole and in order, when a
//! message is popped. Whatever a finished push has published is popped before its producer is called dead.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use polder_mem::model::{Change, Crash, Harmless, Kernels, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Bell, Coherence, Liveness, Memory, Nanos, Offset, ProcessSlot};

use super::group::harmless;
use super::publish::bystander;
use crate::ring::{Consumer, INLINE, Producer, RingLink, RingPlace, RingShape, write_back_for_the_dead};
use crate::wait::Patience;
use crate::{Peer, PoolError};

mod naive;

/// The suites of this protocol.
pub(super) fn suites() -> Vec<Suite> {
    let case = |name, about, case: Case| Suite::new(name, about, move |seed| case.run(seed));
    let suites = [
        case("ring-inline", "messages in their headers' lines, through two slots", INLINE_RING),
        case("ring-cells", "messages in cells, one to three of them", CELL_RING),
        case("ring-streamed", "messages larger than a cell, and than the ring", STREAM_RING),
        case("ring-forms", "messages of every form in turn, with more slots than cells", EVERY_FORM),
        Suite::new("ring-crashes", "either end dies, stops or starts again at any operation", crashes),
    ];
    let mut suites: Vec<Suite> = suites.into_iter().map(|suite| suite.harmless(HARMLESS)).collect();
    let about = "on hdm-db, either end or its host dies, or the end stops or starts again, at any operation";
    suites.push(Suite::new("ring-hdm-db", about, hdm_db).harmless(HARMLESS_ON_HDM_DB));
    suites
}

const AHEAD: &str = "// HARMLESS(invalidate -> write_back -> drop)";
const HARMLESS: &[Harmless] =
    &[harmless("consumer.rs", AHEAD, Change::Drop), harmless("consumer.rs", AHEAD, Change::Weaken)];

const CREDITS_OF_THE_DEAD: &str = "// HARMLESS(write_back -> drop) on hdm-db";
const HARMLESS_ON_HDM_DB: &[Harmless] = &[harmless("consumer.rs", CREDITS_OF_THE_DEAD, Change::Drop)];

pub(super) use naive::canaries;

/// No crash, or one of each kind of either end, by the seed.
fn crashes(seed: u64) -> Outcome {
    let (killed, down, paused) = (Crash::Process, Crash::Host, Crash::Pause);
    match seed % 10 {
        0 => EVERY_FORM.run(seed),
        1 => EVERY_FORM.crash(End::Producer, killed).run(seed),
        2 => EVERY_FORM.crash(End::Producer, down).run(seed),
        3 => EVERY_FORM.crash(End::Producer, paused).run(seed),
        4 => EVERY_FORM.crash(End::Consumer, killed).run(seed),
        5 => EVERY_FORM.crash(End::Consumer, down).run(seed),
        6 => EVERY_FORM.crash(End::Consumer, paused).run(seed),
        7 => EVERY_FORM.crash(End::Producer, killed).then(After::Restart).run(seed),
        8 => EVERY_FORM.crash(End::Producer, down).then(After::Restart).run(seed),
        _ => EVERY_FORM.crash(End::Producer, killed).then(After::WriteBack).run(seed),
    }
}

/// The same, where the device keeps caches coherent.
fn hdm_db(seed: u64) -> Outcome {
    let (killed, down, paused) = (Crash::Process, Crash::Host, Crash::Pause);
    let ring = Case { coherence: Coherence::HdmDb, ..EVERY_FORM };
    match seed % 10 {
        0 => ring.run(seed),
        1 | 2 => ring.crash(End::Producer, down).run(seed),
        3 => ring.crash(End::Producer, down).then(After::Restart).run(seed),
        4 => ring.crash(End::Consumer, down).run(seed),
        5 => ring.crash(End::Producer, killed).then(After::Restart).run(seed),
        6 => ring.crash(End::Producer, killed).run(seed),
        7 => ring.crash(End::Consumer, killed).run(seed),
        8 => ring.crash(End::Producer, paused).run(seed),
        _ => ring.crash(End::Consumer, paused).run(seed),
    }
}

/// One end of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Producer,
    Consumer,
}

/// A family of schedules of one ring.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Cells, of which the seed chooses one number, and slots beyond them.
    cells: &'static [u32],
    more_slots: u32,
    messages: u64,
    /// Lengths of messages, between which the seed chooses.
    lengths: &'static [usize],
    crash: Option<(End, Crash)>,
    after: After,
    /// On hdm-db each host has its own kernel; else they share one.
    coherence: Coherence,
}

/// What another process of the producer's host does after the crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Nothing,
    /// It attaches as a producer of the next generation.
    Restart,
    /// It writes back what the dead stored, and only then is the death made known.
    WriteBack,
}

const INLINE_RING: Case = Case {
    cells: &[2],
    more_slots: 0,
    messages: 5,
    lengths: &[0, 1, 8, 15, INLINE],
    crash: None,
    after: After::Nothing,
    coherence: Coherence::Software,
};
const CELL_RING: Case = Case { cells: &[1, 2, 3], lengths: &[17, 40, 63, 64, 100, 128], ..INLINE_RING };
const STREAM_RING: Case =
    Case { cells: &[1, 2, 3], more_slots: 1, messages: 2, lengths: &[129, 200, 384, 400], ..INLINE_RING };
const EVERY_FORM: Case =
    Case { cells: &[1, 2], more_slots: 2, lengths: &[0, 5, 16, 17, 64, 128, 129, 300], ..INLINE_RING };

const CELL_BYTES: u32 = 128;
const CREDITS: Offset = Offset(0);
const LINES: Offset = Offset(64);
const MOMENT: Duration = Duration::from_millis(2);
/// Longer than anyone pauses.
const HOUR: Duration = Duration::from_secs(3600);

type Alive = Box<dyn Fn() -> Result<(), PoolError>>;

/// What the schedule draws from its seed.
#[derive(Clone, Copy, Debug)]
struct Draw {
    seed: u64,
    ring: RingShape,
    /// From which length on payload goes past the caches.
    stream_from: usize,
    deadline: Duration,
    /// The longest sleep.
    nap: Duration,
}

impl Draw {
    fn patience(self) -> Patience {
        // Half of the schedules sleep at the first look in vain, so that what that look misses is never seen.
        let spins = if mix(self.seed, 4).is_multiple_of(2) { 0 } else { 2 };
        Patience { spins, yields: spins / 2, nap: self.nap }
    }
}

/// What both ends tell the oracle.
#[derive(Debug, Default)]
struct Log {
    /// Begun to be pushed, not popped yet.
    begun: VecDeque<(u64, Vec<u8>)>,
    pushed: u64,
    popped: u64,
    /// The newest slot of the dead producer, which was written back.
    newest: Option<u64>,
    /// The end that died under another kernel, as its host's next process or boot makes known.
    dead: Option<End>,
    /// The consumer has gone, as the restarted producer is told by whoever started it.
    over: bool,
}

type Shared = Rc<RefCell<Log>>;

impl Case {
    const fn crash(self, end: End, crash: Crash) -> Self {
        Self { crash: Some((end, crash)), ..self }
    }

    const fn then(self, after: After) -> Self {
        Self { after, ..self }
    }

    fn draw(&self, seed: u64) -> Draw {
        let cells = self.cells[mix(seed, 1) as usize % self.cells.len()];
        let slots = cells + mix(seed, 5) as u32 % (self.more_slots + 1);
        let patient = mix(seed, 3).is_multiple_of(2);
        let (deadline, nap) = match self.crash {
            // Bells of another kernel do not ring here.
            None if self.kernels() == Kernels::OnePerHost => (HOUR, MOMENT / 2),
            // Who sleeps this long is woken by the other end, or a wake-up was lost.
            None => (HOUR, if patient { HOUR } else { MOMENT / 2 }),
            Some((_, Crash::Pause)) if patient => (HOUR, Duration::from_secs(1)),
            Some((_, Crash::Pause)) => (MOMENT, MOMENT / 2),
            // A few operations: the death is noticed while it is being made known.
            Some(_) if self.after == After::WriteBack => (HOUR, Duration::from_nanos(50)),
            Some(_) => (HOUR, MOMENT / 2),
        };
        Draw {
            seed,
            ring: RingShape::new(cells, CELL_BYTES)
                .and_then(|ring| ring.with_slots(slots))
                .expect("in range"),
            stream_from: [17, 64, 1000][mix(seed, 2) as usize % 3],
            deadline,
            nap,
        }
    }

    fn run(self, seed: u64) -> Outcome {
        let draw = self.draw(seed);
        let bytes = LINES.0 + draw.ring.producer_bytes();
        let kernels = self.kernels();
        let shape =
            Shape { bytes, local_words: 1, bells: 4, kernels, coherence: self.coherence, ..Shape::default() };
        let mut world = World::new(seed, shape);
        if self.poisons().is_some() && mix(seed, 6).is_multiple_of(4) {
            world.poison_lost_lines();
        }
        let (log, later) = (Shared::default(), Shared::default());
        let (to, from, told, known) = (log.clone(), log.clone(), log.clone(), log);
        let producer = world.spawn(0, 0, move |memory| self.produce(&memory, draw, 1, &to));
        let after = later.clone();
        let consumer = world.spawn(1, 0, move |memory| {
            if self.consume(&memory, draw, 1, &from) == Fate::Died && self.after == After::Restart {
                self.consume(&memory, draw, 2, &after);
            }
            after.borrow_mut().over = true;
        });
        match self.after {
            After::Nothing => {}
            After::Restart => {
                world.spawn_after_crash(producer, 0, 1, move |memory| self.produce(&memory, draw, 2, &later));
            }
            After::WriteBack => {
                world.spawn_after_crash(producer, 0, 1, move |memory| {
                    let place = RingPlace { lines: LINES, credits: CREDITS, generation: 1 };
                    let newest = write_back_for_the_dead(&memory, draw.ring, &place).expect("model memory");
                    known.borrow_mut().newest = Some(newest);
                });
            }
        }
        if let Some((end, crash)) = self.crash {
            let (host, thread) = if end == End::Producer { (0, producer) } else { (1, consumer) };
            let with_bystander =
                self.coherence == Coherence::HdmDb && crash == Crash::Host && mix(seed, 7).is_multiple_of(2);
            let victim = if with_bystander { world.spawn(host, 2, bystander) } else { thread };
            if kernels == Kernels::OnePerHost && crash != Crash::Pause {
                let told = told.clone();
                world.spawn_after_crash(victim, host, 3, move |_| told.borrow_mut().dead = Some(end));
            }
            match self.after {
                // Where headers are stored, mostly.
                After::WriteBack => world.crash_within(victim, crash, 100),
                _ => world.crash(victim, crash),
            }
        }
        world.run()
    }

    fn kernels(&self) -> Kernels {
        if self.coherence == Coherence::HdmDb { Kernels::OnePerHost } else { Kernels::Shared }
    }

    /// The end whose host may leave lines that fail. A producer that starts again would meet the same lines.
    fn poisons(&self) -> Option<End> {
        match self.crash {
            Some((end, Crash::Host))
                if self.coherence == Coherence::HdmDb && self.after == After::Nothing =>
            {
                Some(end)
            }
            _ => None,
        }
    }

    /// Whether an end may give up because the other is late.
    fn may_be_late(&self, draw: Draw) -> bool {
        draw.deadline < HOUR
    }

    fn message(&self, draw: Draw, generation: u32, number: u64) -> (u64, Vec<u8>) {
        let unique = mix(draw.seed, u64::from(generation) << 32 | number << 8);
        let length = self.lengths[unique as usize % self.lengths.len()];
        let bytes = (0..length as u64).map(|at| (mix(unique, at / 8) >> (at % 8 * 8)) as u8).collect();
        (unique, bytes)
    }

    /// Pushes the messages of one generation. In generation 2, a process in another slot does.
    fn produce(&self, memory: &ModelMemory, draw: Draw, generation: u32, log: &Shared) {
        let mut link = link(memory, draw, Bell(0), Bell(1), Peer::new(1, 0));
        let (told, peer, alive) = (log.clone(), link.peer, link.alive);
        link.alive = Box::new(move || {
            let over = told.borrow().is_over();
            if over { Err(PoolError::PeerDead { peer, what: "", epoch: 1, sequence: 0 }) } else { alive() }
        });
        let place = RingPlace { lines: LINES, credits: CREDITS, generation };
        let mut producer =
            Producer::new(memory.clone(), draw.ring, place, link).with_streaming_from(draw.stream_from);
        for number in 0..self.messages {
            let (tag, bytes) = self.message(draw, generation, number);
            log.borrow_mut().begun.push_back((tag, bytes.clone()));
            match producer.push(number & 0xffff, tag, &bytes, memory.now() + draw.deadline) {
                Ok(()) => log.borrow_mut().pushed += 1,
                Err(PoolError::PeerDead { peer: Peer { host: 1, .. }, epoch: 1, sequence, .. }) => {
                    assert_eq!(sequence, producer.sequence());
                    let dead = memory.liveness(1, ProcessSlot(0)) == Liveness::Dead;
                    let log = log.borrow();
                    assert!(dead || log.is_over(), "called dead");
                    return;
                }
                Err(PoolError::Memory(_)) if self.poisons() == Some(End::Consumer) => return,
                Err(error) if self.may_be_late(draw) && is_late(&error) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn consume(&self, memory: &ModelMemory, draw: Draw, generation: u32, log: &Shared) -> Fate {
        let peer = Peer::new(0, generation - 1);
        let mut link = link(memory, draw, Bell(1), Bell(0), peer);
        if self.after == After::WriteBack {
            let (told, alive) = (log.clone(), link.alive);
            link.alive = Box::new(move || {
                let known = told.borrow().newest.is_some();
                if known { alive() } else { Ok(()) }
            });
        }
        if self.kernels() == Kernels::OnePerHost && generation == 1 {
            let (told, alive) = (log.clone(), link.alive);
            link.alive = Box::new(move || {
                let dead = told.borrow().dead == Some(End::Producer);
                if dead {
                    Err(PoolError::PeerDead { peer, what: "", epoch: 1, sequence: 0 })
                } else {
                    alive()
                }
            });
        }
        let place = RingPlace { lines: LINES, credits: CREDITS, generation };
        let mut consumer = Consumer::new(memory.clone(), draw.ring, place, link);
        let mut into = Vec::new();
        for number in 0..self.messages {
            let deadline = memory.now() + draw.deadline;
            let popped = receive(&mut consumer, &mut into, deadline, mix(draw.seed, number));
            match popped {
                Ok(tag) => log.borrow_mut().pop(tag, &into),
                Err(PoolError::PeerDead { peer: dead, epoch: 1, sequence, .. }) => {
                    assert_eq!((dead, sequence), (peer, consumer.sequence()));
                    assert_ne!(
                        memory.liveness(0, ProcessSlot(peer.pid as u16)),
                        Liveness::Alive,
                        "called dead"
                    );
                    let log = log.borrow();
                    assert!(log.popped >= log.pushed, "{} pushed, {} popped", log.pushed, log.popped);
                    assert!(
                        log.newest.is_none_or(|newest| sequence > newest),
                        "{:?} of {sequence}",
                        log.newest
                    );
                    return Fate::Died;
                }
                Err(PoolError::Memory(_)) if self.poisons() == Some(End::Producer) => {
                    let log = log.borrow();
                    assert!(log.popped >= log.pushed, "{} pushed, {} popped", log.pushed, log.popped);
                    return Fate::Died;
                }
                Err(error) if self.may_be_late(draw) && is_late(&error) => return Fate::Late,
                Err(error) => panic!("{error}"),
            }
        }
        Fate::Done
    }
}

/// Whether an error says that the other end lives and did not come in time.
fn is_late(error: &PoolError) -> bool {
    matches!(error, PoolError::Timeout { .. })
}

/// How a consumer's peer ended, as it saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Done,
    Died,
    Late,
}

impl Log {
    /// Whether a producer has nobody to push to, as it is told.
    fn is_over(&self) -> bool {
        self.over || self.dead == Some(End::Consumer)
    }

    fn pop(&mut self, tag: u64, bytes: &[u8]) {
        let (expected, message) = self.begun.pop_front().expect("a message that was never pushed");
        assert_eq!((tag, bytes), (expected, &message[..]), "message {}", self.popped);
        self.popped += 1;
    }
}

/// Receives a message in one of the ways there are.
fn receive(
    consumer: &mut Consumer<ModelMemory, Alive>,
    into: &mut Vec<u8>,
    deadline: Nanos,
    way: u64,
) -> Result<u64, PoolError> {
    if way.is_multiple_of(2) {
        return consumer.pop_into(into, deadline).map(|envelope| envelope.tag);
    }
    into.resize(512, 0);
    let envelope = consumer.pop_slice(into, deadline)?;
    into.truncate(envelope.bytes as usize);
    Ok(envelope.tag)
}

/// A link to the process at slot `peer.pid` of `peer.host`.
fn link(memory: &ModelMemory, draw: Draw, bell: Bell, wakes: Bell, peer: Peer) -> RingLink<Alive> {
    let memory = memory.clone();
    let alive = move || match memory.liveness(peer.host, ProcessSlot(peer.pid as u16)) {
        Liveness::Dead => Err(PoolError::PeerDead { peer, what: "", epoch: 1, sequence: 0 }),
        _ => Ok(()),
    };
    RingLink { peer, epoch: 1, bell, wakes: Some(wakes), patience: draw.patience(), alive: Box::new(alive) }
}

/// Splitmix64 of two words.
fn mix(seed: u64, salt: u64) -> u64 {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xd6e8_feb8_6659_fd93);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
