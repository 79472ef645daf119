//! One world: the machine, its threads, its clock, and the adversary that runs them.

use std::panic::Location;
use std::time::Duration;

use self::adversary::Rates;
use self::scheduler::LEAP_NS;
use super::explore;
use super::machine::{BackInvalidation, Machine, WORDS};
use super::mutants::{Change, SiteKind};
use super::trace::Trace;
use crate::Coherence;
use crate::random::Random;

mod adversary;
mod faults;
mod scheduler;

/// Which processes can wake each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Kernels {
    /// Each host has its own kernel: bells do not cross hosts, and liveness is unknown there.
    #[default]
    OnePerHost,
    /// All hosts are processes of one kernel.
    Shared,
}

/// The size and kind of a world.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Hosts, numbered from 0.
    pub hosts: u16,
    /// Bytes in the region; a multiple of 64.
    pub bytes: u64,
    /// Local words of each host.
    pub local_words: u32,
    /// Bells of each kernel.
    pub bells: u32,
    /// Which processes can wake each other.
    pub kernels: Kernels,
    /// Software: each host has caches of its own. Coherent: only the store buffers are left. Hdm-db: caches of hosts agree, and die alone;
    /// the seed draws whether dirty lines go from host to host.
    pub coherence: Coherence,
    /// By how much longer than asked a thread may sleep, as on a busy machine.
    pub oversleep: Duration,
    /// For how long a stopped thread stands still at least.
    pub stop: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            hosts: 2,
            bytes: 4096,
            local_words: 64,
            bells: 8,
            kernels: Kernels::OnePerHost,
            coherence: Coherence::Software,
            oversleep: Duration::ZERO,
            stop: Duration::ZERO,
        }
    }
}

/// What befalls a thread at one of its memory operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// All threads of its process die; their buffers drain into the host's cache, which lives on.
    Process,
    /// All processes of its host die; buffers, dirty lines and what is on its way to memory are lost. Local words are 0
    /// after it.
    Host,
    /// The thread stops, with stores still in its buffer, and goes on after a while: at once, or after minutes.
    Pause,
}

/// Operations after which a schedule is called endless.
const BUDGET: u64 = 200_000;
/// Lines that the adversary remembers as just used.
const RECENT: usize = 8;

/// What a world is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Mode {
    /// One closure has the machine to itself: operations go straight to memory.
    #[default]
    Alone,
    /// Threads run under the adversary.
    Running,
    /// The schedule has been judged: operations do nothing.
    Over,
}

/// One thread, as the scheduler sees it.
#[derive(Clone, Debug)]
pub(super) struct Thread {
    pub(super) host: u16,
    pub(super) slot: u16,
    pub(super) operations: u64,
    /// How often it has waited for others.
    waits: u32,
    /// The operation at which `crash` falls.
    crash_at: u64,
    crash: Crash,
    /// The store after which `crash` falls, where one is awaited.
    aim: Option<Aim>,
    /// When a sleep or a pause ends.
    until: u64,
    bell: usize,
    /// The operation of the world up to which it is put aside.
    stalled_until: u64,
    /// The thread whose end it waits for before it starts, and whether only a crash counts.
    after: Option<(usize, bool)>,
    pub(super) crashed: bool,
    ended: bool,
    /// It had ended before its host died: what it said last may be lost, and no kernel calls it alive.
    is_gone: bool,
    /// A word on a failing line that was stored into: the next load says so.
    fault: Option<u32>,
}

/// A store of a thread that a crash waits for.
#[derive(Clone, Copy, Debug)]
struct Aim {
    word: u32,
    /// Stores to the word before it.
    before: u64,
    /// Operations of the thread after it.
    operations: u64,
}

#[derive(Clone, Debug, Default)]
struct BellState {
    count: u32,
    announced: u32,
}

/// A flush or fence that is changed, as a mutant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mutation {
    pub(super) site: &'static Location<'static>,
    pub(super) kind: SiteKind,
    pub(super) change: Change,
}

/// What a handle works on.
#[derive(Default)]
pub(super) struct State {
    pub(super) machine: Machine,
    pub(super) random: Random,
    rates: Rates,
    pub(super) mode: Mode,
    pub(super) shape: Shape,
    pub(super) threads: Vec<Thread>,
    /// Bit sets of threads: able to run; waiting in a pause; waiting and has looked since the last change; put aside;
    /// asleep; stopped.
    ready: u64,
    waiting: u64,
    looked: u64,
    stalled: u64,
    sleeping: u64,
    stopped: u64,
    pub(super) current: usize,
    pub(super) next: Option<usize>,
    pub(super) now: u64,
    pub(super) operations: u64,
    /// Those of set-ups and checks.
    alone: u64,
    pub(super) budget: u64,
    leap: u64,
    /// The machine's changes when the scheduler last looked, and those outside the region.
    seen: u64,
    changes: u64,
    pub(super) local: Vec<u64>,
    bells: Vec<BellState>,
    pub(super) failure: Option<String>,
    pub(super) trace: Option<Trace>,
    mutation: Option<Mutation>,
    sites: Option<Vec<(&'static Location<'static>, SiteKind)>>,
    recent: [u32; RECENT],
    uses: usize,
    skew: u64,
    /// Lines that fail, and the operation of the world from which on they do.
    poison: Vec<(u32, u64)>,
}

impl Default for Random {
    fn default() -> Self {
        Self::new(0)
    }
}

impl State {
    /// Makes this a fresh world, reusing what it had allocated.
    pub(super) fn reset(&mut self, seed: u64, mut shape: Shape) {
        let session = explore::session();
        shape.coherence = session.coherence.unwrap_or(shape.coherence);
        assert!(shape.hosts >= 1 && shape.hosts <= 64, "a world has 1 to 64 hosts, not {}", shape.hosts);
        assert!(
            shape.bytes > 0 && shape.bytes.is_multiple_of(64),
            "{} bytes are no whole lines",
            shape.bytes
        );
        let hosts = usize::from(shape.hosts);
        self.random = Random::new(seed);
        let mut device = BackInvalidation::default();
        if shape.coherence == Coherence::HdmDb {
            device.keeps_dirty = self.random.below(2) == 0;
        }
        self.machine.reset(hosts, (shape.bytes / 64) as usize, shape.coherence, device);
        self.rates = Rates::draw(&mut self.random);
        self.skew = self.random.next();
        self.mode = Mode::Alone;
        self.shape = shape;
        self.threads.clear();
        (self.ready, self.waiting, self.looked) = (0, 0, 0);
        (self.stalled, self.sleeping, self.stopped) = (0, 0, 0);
        (self.current, self.next) = (0, None);
        (self.now, self.operations, self.alone, self.budget) = (0, 0, 0, BUDGET);
        (self.leap, self.seen, self.changes) = (LEAP_NS, 0, 0);
        self.local.clear();
        self.local.resize(hosts * shape.local_words as usize, 0);
        let kernels = if shape.kernels == Kernels::Shared { 1 } else { hosts };
        self.bells.clear();
        self.bells.resize(kernels * shape.bells as usize, BellState::default());
        self.failure = None;
        (self.recent, self.uses) = ([0; RECENT], 0);
        self.poison.clear();
        self.trace = session.tracing.then(Trace::default);
        self.mutation = session.mutation;
        self.sites = session.recording.then(Vec::new);
    }

    pub(super) fn calm(&mut self) {
        self.rates = Rates::calm();
    }

    pub(super) fn add_thread(&mut self, host: u16, slot: u16, after: Option<(usize, bool)>) -> usize {
        assert!(self.threads.len() < 64, "a world has at most 64 threads");
        assert!(host < self.shape.hosts, "host {host} of a world with {} hosts", self.shape.hosts);
        let thread = self.machine.add_thread(usize::from(host));
        self.threads.push(Thread {
            host,
            slot,
            operations: 0,
            waits: 0,
            crash_at: u64::MAX,
            crash: Crash::Pause,
            aim: None,
            until: 0,
            bell: 0,
            stalled_until: 0,
            after,
            crashed: false,
            ended: false,
            is_gone: false,
            fault: None,
        });
        if after.is_none() {
            self.ready |= 1 << thread;
        }
        thread
    }

    /// Lets `crash` befall `thread` at its operation `at`, or at one drawn so that every power of two is as likely.
    pub(super) fn plan_crash(&mut self, thread: usize, crash: Crash, within: Option<u64>) {
        let at = match within {
            Some(bound) => self.random.below(bound.max(1) as usize) as u64,
            None => self.random.magnitude(11),
        };
        self.plan_crash_at(thread, crash, at);
    }

    pub(super) fn plan_crash_at(&mut self, thread: usize, crash: Crash, at: u64) {
        self.threads[thread].crash = crash;
        self.threads[thread].crash_at = at;
    }

    /// Lets `crash` befall `thread` so many operations after a store to `word`, which follows `before` others.
    pub(super) fn aim_crash(&mut self, thread: usize, crash: Crash, word: u32, before: u64, operations: u64) {
        self.threads[thread].crash = crash;
        self.threads[thread].aim = Some(Aim { word, before, operations });
    }

    /// Notes a store of the current thread, for a crash that waits for it.
    #[inline]
    pub(super) fn pass_aim(&mut self, word: u32) {
        if self.mode != Mode::Running {
            return;
        }
        let thread = &mut self.threads[self.current];
        let Some(aim) = thread.aim.as_mut().filter(|aim| aim.word == word) else { return };
        match aim.before.checked_sub(1) {
            Some(left) => aim.before = left,
            None => {
                thread.crash_at = thread.operations + aim.operations;
                thread.aim = None;
            }
        }
    }

    pub(super) fn fail(&mut self, message: String) {
        self.failure.get_or_insert(message);
        self.next = None;
    }

    // Sleep.

    fn bell(&mut self, host: u16, bell: u32) -> usize {
        assert!(bell < self.shape.bells, "bell {bell} of a world with {} bells a kernel", self.shape.bells);
        let kernel = if self.shape.kernels == Kernels::Shared { 0 } else { usize::from(host) };
        kernel * self.shape.bells as usize + bell as usize
    }

    pub(super) fn announce(&mut self, host: u16, bell: u32) -> u32 {
        let bell = self.bell(host, bell);
        self.bells[bell].announced += 1;
        self.bells[bell].count
    }

    pub(super) fn withdraw(&mut self, host: u16, bell: u32) {
        let bell = self.bell(host, bell);
        self.bells[bell].announced = self.bells[bell].announced.saturating_sub(1);
    }

    /// Puts the current thread to sleep; false when there is no reason to.
    pub(super) fn sleep(&mut self, host: u16, bell: u32, seen: u32, until: u64) -> bool {
        let bell = self.bell(host, bell);
        if self.bells[bell].count != seen || until <= self.now {
            return false;
        }
        let late = match self.shape.oversleep.as_nanos() as usize {
            0 => 0,
            longest => self.random.below(longest) as u64,
        };
        let me = self.current;
        self.threads[me].bell = bell;
        self.threads[me].until = until.saturating_add(late);
        self.ready &= !(1 << me);
        self.sleeping |= 1 << me;
        true
    }

    pub(super) fn ring(&mut self, host: u16, bell: u32) {
        let bell = self.bell(host, bell);
        if self.bells[bell].announced == 0 {
            return;
        }
        self.bells[bell].count = self.bells[bell].count.wrapping_add(1);
        self.changes += 1;
        for thread in bits(self.sleeping) {
            if self.threads[thread].bell == bell {
                self.rouse(thread);
            }
        }
    }

    /// What a process adds to the clock, so that clocks of two processes cannot be compared.
    pub(super) fn skew(&self, host: u16, slot: u16) -> u64 {
        let mut random = Random::new(self.skew ^ (u64::from(host) << 16 | u64::from(slot)));
        random.next() >> 20
    }

    // Local words.

    pub(super) fn local_index(&self, host: u16, word: u32) -> usize {
        let words = self.shape.local_words;
        assert!(word < words, "local word {word} of a host with {words}");
        usize::from(host) * words as usize + word as usize
    }

    pub(super) fn set_local(&mut self, index: usize, value: u64) {
        self.changes += u64::from(self.local[index] != value);
        self.local[index] = value;
    }

    // Traces and mutants.

    #[inline]
    pub(super) fn record(
        &mut self,
        thread: usize,
        what: &'static str,
        at: Option<u64>,
        value: u64,
        site: Option<&'static Location<'static>>,
    ) {
        if let Some(trace) = &mut self.trace {
            let place = self.threads.get(thread).map_or((0, 0), |thread| (thread.host, thread.slot));
            trace.operation((thread, place), what, at, value, site);
        }
    }

    /// What becomes of the flush or fence at `site`.
    #[inline]
    pub(super) fn mutate(&mut self, kind: SiteKind, site: &'static Location<'static>) -> Option<Change> {
        if self.mode != Mode::Running {
            return None;
        }
        if let Some(sites) = &mut self.sites
            && !sites.contains(&(site, kind))
        {
            sites.push((site, kind));
        }
        let mutation = self.mutation?;
        (mutation.kind == kind && mutation.site == site).then_some(mutation.change)
    }

    pub(super) fn take_sites(&mut self) -> Vec<(&'static Location<'static>, SiteKind)> {
        self.sites.take().unwrap_or_default()
    }

    pub(super) fn word_index(&self, at: u64, what: &str) -> u32 {
        assert!(at.is_multiple_of(8), "{what} at {at:#x}: words lie at multiples of 8");
        assert!(
            at < self.machine.words() as u64 * 8,
            "{what} at {at:#x}: the region has {} bytes",
            self.shape.bytes
        );
        (at / 8) as u32
    }

    pub(super) fn line_of(word: u32) -> u32 {
        word / WORDS as u32
    }
}

fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(bit)
    })
}
