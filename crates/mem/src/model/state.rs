//! One world: the machine, its threads, its clock, and the adversary that runs them.

use std::panic::Location;

use super::explore;
use super::machine::{Entry, Kind, Machine, WORDS};
use super::mutants::{Change, SiteKind};
use super::random::Random;
use super::trace::Trace;
use crate::{Coherence, Liveness};

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
    /// Software: each host has caches of its own. Coherent: only the store buffers are left.
    pub coherence: Coherence,
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

/// Nanoseconds that an operation takes.
const OPERATION_NS: u64 = 10;
/// The first jump of the clock when nobody can go on.
const LEAP_NS: u64 = 200;
/// The longest.
const LONGEST_LEAP_NS: u64 = 1 << 36;
/// Operations after which a schedule is called endless.
const BUDGET: u64 = 200_000;
/// Lines that the adversary remembers as just used.
const RECENT: usize = 8;

/// How wild the adversary is; chances out of 65,536.
#[derive(Clone, Debug, Default)]
struct Rates {
    /// That it acts at all between two operations, and how often in a row.
    act: u32,
    acts: usize,
    /// What it then does, cumulative out of 256: commit, deliver, evict, prefetch; the rest writes a dirty line back.
    commit: u8,
    deliver: u8,
    evict: u8,
    prefetch: u8,
    /// That an invalidated line is filled again at once, and a line that was stored into is evicted at once.
    refill: u32,
    spill: u32,
    /// That a delivery is of one word only.
    tear: u32,
    /// That a fill reads only some words at first.
    torn_fill: u32,
    /// That another thread goes on where a switch can matter.
    switch: u32,
    /// That a waiting thread may be the one.
    poll: u32,
    /// That a thread is put aside where a switch can matter, and the binary digits of the longest time.
    stall: u32,
    stall_digits: u32,
    /// That a thread starts late.
    late: u32,
    /// Entries in a buffer before the oldest is forced out.
    buffer: usize,
    /// Threads and hosts whose buffers and queues are slow.
    lazy_threads: u64,
    lazy_hosts: u64,
    /// That a sleep ends for no reason.
    spurious: u32,
    /// That a copy runs backwards.
    backwards: u32,
}

impl Rates {
    fn draw(random: &mut Random) -> Self {
        if random.below(8) == 0 {
            return Self::calm();
        }
        let weights = [
            random.pick(&[1, 2, 4, 16]),
            random.pick(&[1, 2, 4, 16]),
            random.pick(&[0, 1, 2, 8]),
            random.pick(&[0, 1, 2, 8]),
            random.pick(&[0, 1, 2]),
        ];
        let total: u32 = weights.iter().sum();
        let upto = |n: usize| (weights[..n].iter().sum::<u32>() * 255 / total) as u8;
        Self {
            act: random.pick(&[1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16]),
            acts: random.pick(&[1, 1, 2, 4]),
            commit: upto(1),
            deliver: upto(2),
            evict: upto(3),
            prefetch: upto(4),
            refill: random.pick(&[0, 1 << 12, 1 << 15]),
            spill: random.pick(&[0, 1 << 12, 1 << 14]),
            tear: random.pick(&[0, 1 << 12, 1 << 14, 1 << 16]),
            torn_fill: random.pick(&[0, 1 << 13, 1 << 15]),
            switch: random.pick(&[1 << 11, 1 << 13, 1 << 14, 1 << 15, 3 << 14]),
            poll: random.pick(&[1 << 11, 1 << 13, 1 << 15]),
            stall: random.pick(&[0, 1 << 10, 1 << 12, 1 << 13]),
            stall_digits: random.pick(&[4, 7, 10]),
            late: random.pick(&[0, 1 << 15]),
            buffer: random.pick(&[2, 8, 48]),
            lazy_threads: if random.below(2) == 0 { random.next() & random.next() } else { 0 },
            lazy_hosts: if random.below(2) == 0 { random.next() & random.next() } else { 0 },
            spurious: random.pick(&[0, 1 << 8]),
            backwards: random.pick(&[0, 1 << 15]),
        }
    }

    /// Everything soon, whole and in order.
    fn calm() -> Self {
        Self {
            act: 1 << 16,
            acts: 2,
            commit: 120,
            deliver: 250,
            evict: 251,
            prefetch: 252,
            switch: 1 << 12,
            poll: 1 << 13,
            buffer: 48,
            ..Self::default()
        }
    }
}

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
    /// The operation at which `crash` falls.
    crash_at: u64,
    crash: Crash,
    /// When a sleep or a pause ends.
    until: u64,
    bell: usize,
    /// The operation of the world up to which it is put aside.
    stalled_until: u64,
    /// The thread whose end it waits for before it starts, and whether only a crash counts.
    after: Option<(usize, bool)>,
    pub(super) crashed: bool,
    ended: bool,
    /// A word on a failing line that was stored into: the next load says so.
    fault: Option<u32>,
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
    pub(super) fn reset(&mut self, seed: u64, shape: Shape) {
        assert!(shape.hosts >= 1 && shape.hosts <= 64, "a world has 1 to 64 hosts, not {}", shape.hosts);
        assert!(
            shape.bytes > 0 && shape.bytes.is_multiple_of(64),
            "{} bytes are no whole lines",
            shape.bytes
        );
        let hosts = usize::from(shape.hosts);
        self.machine.reset(hosts, (shape.bytes / 64) as usize, shape.coherence == Coherence::Coherent);
        self.random = Random::new(seed);
        self.rates = Rates::draw(&mut self.random);
        self.skew = self.random.next();
        self.mode = Mode::Alone;
        self.shape = shape;
        self.threads.clear();
        (self.ready, self.waiting, self.looked) = (0, 0, 0);
        (self.stalled, self.sleeping, self.stopped) = (0, 0, 0);
        (self.current, self.next) = (0, None);
        (self.now, self.operations, self.budget) = (0, 0, BUDGET);
        (self.leap, self.seen, self.changes) = (LEAP_NS, 0, 0);
        self.local.clear();
        self.local.resize(hosts * shape.local_words as usize, 0);
        let kernels = if shape.kernels == Kernels::Shared { 1 } else { hosts };
        self.bells.clear();
        self.bells.resize(kernels * shape.bells as usize, BellState::default());
        self.failure = None;
        (self.recent, self.uses) = ([0; RECENT], 0);
        self.poison.clear();
        let session = explore::session();
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
            crash_at: u64::MAX,
            crash: Crash::Pause,
            until: 0,
            bell: 0,
            stalled_until: 0,
            after,
            crashed: false,
            ended: false,
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

    pub(super) fn fail(&mut self, message: String) {
        self.failure.get_or_insert(message);
        self.next = None;
    }

    // The adversary.

    /// Remembers that a thread works on `line`.
    #[inline]
    pub(super) fn use_line(&mut self, line: u32) {
        if self.recent[self.uses % RECENT] != line {
            self.uses += 1;
            self.recent[self.uses % RECENT] = line;
        }
    }

    /// What happens between two operations.
    #[inline]
    pub(super) fn adversary(&mut self) {
        if self.random.chance(self.rates.act) {
            for _ in 0..self.rates.acts {
                self.act();
            }
        }
    }

    fn act(&mut self) {
        let draw = self.random.next() as u8;
        if draw < self.rates.commit {
            self.commit_some();
        } else if draw < self.rates.deliver {
            self.deliver_some();
        } else if self.machine.coherent() {
        } else if draw < self.rates.evict {
            self.evict_some(true);
        } else if draw < self.rates.prefetch {
            self.prefetch_some();
        } else {
            self.evict_some(false);
        }
    }

    fn commit_some(&mut self) {
        // A stopped thread's stores stay in its buffer.
        let buffered = self.machine.buffered & !self.stopped;
        if buffered == 0 {
            return;
        }
        let thread = self.random.bit(buffered);
        if self.rates.lazy_threads & (1 << thread) != 0 && self.random.below(16) != 0 {
            return;
        }
        if let Some(index) = self.machine.eligible(thread, &mut self.random) {
            self.commit(thread, index);
        }
    }

    fn commit(&mut self, thread: usize, index: usize) {
        let entry = self.machine.commit(thread, index);
        if let Some(trace) = &mut self.trace {
            let line = (entry.kind != Kind::Sfence).then(|| entry.line());
            trace.adversary(self.machine.host_of(thread), commit_name(&entry), line);
        }
        if !self.machine.coherent() {
            self.follow(thread, entry);
        }
    }

    /// Spite: the moments in which an eviction or a fill hurts most.
    fn follow(&mut self, thread: usize, entry: Entry) {
        let (host, line) = (self.machine.host_of(thread), entry.line());
        match entry.kind {
            Kind::Store if self.rates.spill != 0 && self.random.chance(self.rates.spill) => {
                self.trace_adversary(host, "evicts", line);
                self.machine.evict(host, line);
            }
            Kind::Invalidate if self.rates.refill != 0 && self.random.chance(self.rates.refill) => {
                self.trace_adversary(host, "prefetches", line);
                self.machine.fill(host, line);
            }
            _ => {}
        }
    }

    fn deliver_some(&mut self) {
        if self.machine.queued == 0 {
            return;
        }
        let host = self.random.bit(self.machine.queued);
        if self.rates.lazy_hosts & (1 << host) != 0 && self.random.below(16) != 0 {
            return;
        }
        let index = self.random.below(self.machine.queue(host).len());
        let line = self.machine.queue(host)[index].line;
        if self.random.chance(self.rates.tear) {
            let word = self.random.bit(u64::from(self.machine.queue(host)[index].left));
            if self.machine.is_deliverable(host, index, word) {
                self.machine.deliver(host, index, word);
                self.trace_adversary(host, "one word reaches memory of", line);
            }
        } else {
            self.machine.deliver_line(host, index);
            self.trace_adversary(host, "memory has", line);
        }
    }

    fn trace_adversary(&mut self, host: usize, what: &'static str, line: u32) {
        if let Some(trace) = &mut self.trace {
            trace.adversary(host, what, Some(line));
        }
    }

    fn evict_some(&mut self, drop: bool) {
        let host = self.random.below(usize::from(self.shape.hosts));
        let resident = self.machine.resident(host);
        if resident.is_empty() {
            return;
        }
        let line = resident[self.random.below(resident.len())];
        if drop {
            self.trace_adversary(host, "evicts", line);
            self.machine.evict(host, line);
        } else if self.machine.is_dirty(host, line) {
            self.trace_adversary(host, "writes back", line);
            self.machine.clean(host, line);
        }
    }

    fn prefetch_some(&mut self) {
        let host = self.random.below(usize::from(self.shape.hosts));
        let line = self.recent[self.random.below(RECENT)];
        if self.machine.holds(host, line) {
            return;
        }
        if self.random.chance(self.rates.torn_fill) {
            let taken = self.random.next() as u8;
            self.trace_adversary(host, "begins to fill", line);
            self.machine.begin_fill(host, line, taken);
        } else {
            self.trace_adversary(host, "prefetches", line);
            self.machine.fill(host, line);
        }
    }

    /// Makes room in the current thread's buffer.
    fn relieve(&mut self) {
        while self.machine.entries(self.current).len() >= self.rates.buffer {
            self.drain_step();
        }
    }

    pub(super) fn push(&mut self, entry: Entry) {
        self.relieve();
        self.machine.push(self.current, entry);
    }

    /// One step towards the point where a fence of the current thread would return.
    pub(super) fn drain_step(&mut self) {
        self.advance(self.current);
    }

    fn advance(&mut self, thread: usize) {
        match self.machine.eligible(thread, &mut self.random) {
            Some(index) => self.commit(thread, index),
            None => {
                if let Some(line) = self.machine.deliver_awaited(thread) {
                    self.trace_adversary(self.machine.host_of(thread), "memory has", line);
                }
            }
        }
    }

    pub(super) fn runs_backwards(&mut self) -> bool {
        self.rates.backwards != 0 && self.random.chance(self.rates.backwards)
    }

    // The scheduler.

    /// Counts an operation of the current thread; false when the schedule has to end here.
    #[inline]
    pub(super) fn count(&mut self) -> bool {
        self.operations += 1;
        self.now += OPERATION_NS;
        if self.operations > self.budget {
            self.fail(format!("no progress after {} operations: livelock", self.budget));
            return false;
        }
        let thread = &mut self.threads[self.current];
        let at = thread.operations;
        thread.operations += 1;
        if at == thread.crash_at {
            return self.crash();
        }
        true
    }

    /// Whether another thread should go on before an operation that others can notice.
    #[inline]
    pub(super) fn wants_switch(&mut self) -> bool {
        if self.rates.stall != 0 && self.random.chance(self.rates.stall) {
            self.stall(self.current);
            return true;
        }
        self.random.chance(self.rates.switch)
    }

    /// Puts `thread` aside for a while, unless nobody else can go on.
    fn stall(&mut self, thread: usize) {
        let length = self.random.magnitude(self.rates.stall_digits);
        self.threads[thread].stalled_until = self.operations + length;
        self.stalled |= 1 << thread;
    }

    /// The first thread to go on.
    pub(super) fn start(&mut self) -> Option<usize> {
        self.mode = Mode::Running;
        for thread in bits(self.ready) {
            if self.rates.late != 0 && self.random.chance(self.rates.late) {
                self.stall(thread);
            }
        }
        self.choose()
    }

    /// The current thread waits for others: it goes on when they do not, or now and then.
    pub(super) fn wait(&mut self) {
        self.waiting |= 1 << self.current;
    }

    /// The thread that goes on; none when all have ended, or the schedule has failed.
    pub(super) fn choose(&mut self) -> Option<usize> {
        if self.failure.is_some() {
            return None;
        }
        loop {
            self.release();
            let busy = self.ready & !self.waiting & !self.stalled;
            if busy != 0 {
                let polls = self.ready & !self.stalled;
                let set = if busy != polls && self.random.chance(self.rates.poll) { polls } else { busy };
                return Some(self.go(set));
            }
            if self.stalled != 0 {
                self.stalled = 0;
                continue;
            }
            self.notice_changes();
            let curious = self.ready & !self.looked;
            if curious != 0 {
                let thread = self.go(curious);
                self.looked |= 1 << thread;
                return Some(thread);
            }
            if !self.pass_time() {
                return None;
            }
        }
    }

    fn go(&mut self, set: u64) -> usize {
        let thread = self.random.bit(set);
        self.waiting &= !(1 << thread);
        thread
    }

    /// Lets go on whoever's time has come.
    fn release(&mut self) {
        for thread in bits(self.stalled) {
            if self.threads[thread].stalled_until <= self.operations {
                self.stalled &= !(1 << thread);
            }
        }
        for thread in bits(self.sleeping | self.stopped) {
            if self.threads[thread].until <= self.now {
                self.rouse(thread);
            }
        }
        if self.sleeping != 0 && self.rates.spurious != 0 && self.random.chance(self.rates.spurious) {
            let thread = self.random.bit(self.sleeping);
            self.rouse(thread);
        }
    }

    fn rouse(&mut self, thread: usize) {
        let bit = 1 << thread;
        self.sleeping &= !bit;
        self.stopped &= !bit;
        self.ready |= bit;
        self.waiting &= !bit;
    }

    /// Whoever waits looks again after something changed.
    fn notice_changes(&mut self) {
        let changes = self.machine.changes + self.changes;
        if changes != self.seen {
            self.seen = changes;
            self.looked = 0;
            self.leap = (self.leap / 8).max(LEAP_NS);
        }
    }

    /// Everyone waits and has looked. What is on its way arrives first; then the clock jumps. False at the end.
    fn pass_time(&mut self) -> bool {
        if self.ready | self.sleeping | self.stopped == 0 {
            return false;
        }
        if self.arrive() {
            return true;
        }
        let due = bits(self.sleeping | self.stopped).map(|thread| self.threads[thread].until).min();
        if self.ready == 0 {
            match due {
                Some(u64::MAX) | None => {
                    self.fail("every thread sleeps and none has a deadline: a lost wake-up".into());
                    return false;
                }
                Some(due) => self.now = self.now.max(due),
            }
        } else {
            self.now = due.map_or(self.now + self.leap, |due| due.min(self.now + self.leap)).max(self.now);
            self.leap = (self.leap * 2).min(LONGEST_LEAP_NS);
        }
        self.looked = 0;
        true
    }

    /// Moves buffers and queues on until something changes; false when nothing more can.
    fn arrive(&mut self) -> bool {
        loop {
            let buffered = self.machine.buffered & !self.stopped;
            if buffered != 0 {
                let thread = self.random.bit(buffered);
                self.advance(thread);
            } else if self.machine.queued != 0 {
                let host = self.random.bit(self.machine.queued);
                let index = self.random.below(self.machine.queue(host).len());
                self.machine.deliver_line(host, index);
            } else {
                return false;
            }
            if self.machine.changes + self.changes != self.seen {
                self.notice_changes();
                return true;
            }
        }
    }

    /// The current thread has returned.
    pub(super) fn finish(&mut self, thread: usize) {
        self.ready &= !(1 << thread);
        self.threads[thread].ended = true;
        self.changes += 1;
        self.start_followers(thread, false);
    }

    fn start_followers(&mut self, ended: usize, crashed: bool) {
        for thread in 0..self.threads.len() {
            if let Some((after, only_crash)) = self.threads[thread].after
                && after == ended
                && (crashed || !only_crash)
                && !self.threads[thread].ended
            {
                self.threads[thread].after = None;
                self.ready |= 1 << thread;
            }
        }
    }

    // Crashes.

    /// The planned crash of the current thread; false when it does not go on now.
    fn crash(&mut self) -> bool {
        let me = self.current;
        let (host, slot) = (self.threads[me].host, self.threads[me].slot);
        let kind = self.threads[me].crash;
        self.record(me, "CRASH", None, 0, None);
        self.changes += 1;
        if kind == Crash::Pause {
            self.ready &= !(1 << me);
            self.stopped |= 1 << me;
            // From nothing to some minutes.
            self.threads[me].until = self.now + self.random.magnitude(38);
            return false;
        }
        for thread in 0..self.threads.len() {
            let it = &self.threads[thread];
            // Whoever has not started yet is of the next life.
            if it.host == host && (kind == Crash::Host || it.slot == slot) && it.after.is_none() && !it.ended
            {
                self.kill(thread);
                if kind == Crash::Process {
                    self.machine.drain(thread, &mut self.random);
                }
            }
        }
        if kind == Crash::Host {
            self.machine.lose(usize::from(host));
            let words = self.shape.local_words as usize;
            self.local[usize::from(host) * words..][..words].fill(0);
        }
        for thread in 0..self.threads.len() {
            if self.threads[thread].crashed && self.threads[thread].host == host {
                self.start_followers(thread, true);
            }
        }
        false
    }

    fn kill(&mut self, thread: usize) {
        let keep = !(1 << thread);
        self.ready &= keep;
        self.waiting &= keep;
        self.stalled &= keep;
        self.sleeping &= keep;
        self.stopped &= keep;
        self.threads[thread].crashed = true;
        self.threads[thread].ended = true;
    }

    pub(super) fn liveness(&self, asker: u16, host: u16, slot: u16) -> Liveness {
        if self.shape.kernels == Kernels::OnePerHost && asker != host {
            return Liveness::Unknown;
        }
        let started = |thread: &&Thread| (thread.host, thread.slot) == (host, slot) && thread.after.is_none();
        let known = || self.threads.iter().filter(started);
        match (known().next(), known().any(|thread| !thread.crashed)) {
            (None, _) => Liveness::Unknown,
            (_, true) => Liveness::Alive,
            (_, false) => Liveness::Dead,
        }
    }

    /// Everything that survived reaches memory; what runs now runs alone.
    pub(super) fn settle(&mut self) {
        self.machine.settle(&mut self.random);
        self.mode = Mode::Alone;
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
        let me = self.current;
        self.threads[me].bell = bell;
        self.threads[me].until = until;
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

    // Failing memory.

    /// Lets the line of `word` fail from operation `from` of the world on.
    pub(super) fn poison(&mut self, word: u32, from: u64) {
        self.poison.push((Self::line_of(word), from));
    }

    fn fails(&self, word: u32) -> bool {
        self.poison.iter().any(|(line, from)| *line == Self::line_of(word) && *from <= self.operations)
    }

    /// The word whose failure a load of `word` reports: its own, or that of an earlier store.
    #[inline]
    pub(super) fn load_fault(&mut self, word: u32) -> Option<u32> {
        if self.poison.is_empty() || self.mode != Mode::Running {
            return None;
        }
        let earlier = self.threads[self.current].fault.take();
        earlier.or_else(|| self.fails(word).then_some(word))
    }

    /// Whether a store of `word` meets a failing line.
    #[inline]
    pub(super) fn store_fault(&mut self, word: u32) -> bool {
        if self.poison.is_empty() || self.mode != Mode::Running {
            return false;
        }
        let fails = self.fails(word);
        if fails {
            self.threads[self.current].fault = Some(word);
        }
        fails
    }

    /// Ends the process when a destructor after the end of a schedule waits for ever.
    pub(super) fn count_after_the_end(&mut self) {
        self.operations += 1;
        if self.operations > self.budget + 1_000_000 {
            eprintln!("a destructor of a thread of the model waits for ever: it needs a deadline");
            std::process::abort();
        }
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

fn commit_name(entry: &Entry) -> &'static str {
    match entry.kind {
        Kind::Store => "the cache takes a store to",
        Kind::StoreNt => "a non-temporal store leaves for",
        Kind::WriteBack => "clwb of",
        Kind::Invalidate => "clflushopt of",
        Kind::Flush | Kind::Flushing => "clflush of",
        Kind::Sfence => "an sfence is done",
    }
}

fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(bit)
    })
}
