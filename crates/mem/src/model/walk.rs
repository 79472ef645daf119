//! Every state of a litmus test: each order of the threads' steps, and each choice of the adversary.

use std::collections::{BTreeSet, HashSet};

use super::machine::{BackInvalidation, Entry, Kind, Machine, WORDS};
use crate::Coherence;
use crate::litmus::{DeathLitmus, Litmus, Step};

/// Lines of a litmus machine.
const LINES: usize = 3;

/// What a walk found.
#[derive(Clone, Debug)]
pub struct Walked {
    /// Every outcome that can be reached.
    pub outcomes: BTreeSet<Vec<u64>>,
    /// Distinct states.
    pub states: usize,
}

#[derive(Clone)]
struct Node {
    machine: Machine,
    /// The next step of each thread.
    at: Vec<usize>,
    /// What each load saw, thread by thread.
    seen: Vec<Vec<u64>>,
    /// Whether a load met poison, which ends its thread.
    failed: bool,
    dead: bool,
}

struct Walk<'a> {
    litmus: &'a Litmus,
    /// The host that may die.
    dies: Option<u16>,
    tears: bool,
    known: HashSet<Box<[u8]>>,
    todo: Vec<Node>,
    outcomes: BTreeSet<Vec<u64>>,
}

/// Walks every state of `litmus` on memory of this kind.
#[must_use]
pub fn walk(litmus: &Litmus, coherence: Coherence) -> Walked {
    walk_on(litmus, coherence, BackInvalidation::default())
}

/// The same, on a given device; it counts on hdm-db alone.
pub(super) fn walk_on(litmus: &Litmus, coherence: Coherence, device: BackInvalidation) -> Walked {
    walk_all(litmus, coherence, device, None)
}

/// Walks every state of `litmus` on memory of this kind, and lets its host die in each. `device` counts on hdm-db alone. An outcome is
/// empty if a load met poison.
#[must_use]
pub fn walk_deaths(litmus: &DeathLitmus, coherence: Coherence, device: BackInvalidation) -> Walked {
    walk_all(&litmus.test, coherence, device, Some(litmus.dies))
}

fn walk_all(litmus: &Litmus, coherence: Coherence, device: BackInvalidation, dies: Option<u16>) -> Walked {
    let hosts = litmus.threads.iter().map(|thread| usize::from(thread.host) + 1).max().unwrap_or(1);
    let mut machine = Machine::default();
    machine.reset(hosts, LINES, coherence, device);
    let live = litmus.places().fold(0, |live, place| live | 1 << place.word);
    machine.use_words(live);
    for thread in litmus.threads {
        machine.add_thread(usize::from(thread.host));
    }
    let threads = litmus.threads.len();
    let mut walk = Walk {
        litmus,
        dies,
        tears: live.count_ones() > 1 && coherence == Coherence::Software,
        known: HashSet::new(),
        todo: Vec::new(),
        outcomes: BTreeSet::new(),
    };
    let (at, seen) = (vec![0; threads], vec![Vec::new(); threads]);
    walk.meet(Node { machine, at, seen, failed: false, dead: false });
    while let Some(node) = walk.todo.pop() {
        walk.expand(&node);
    }
    Walked { outcomes: walk.outcomes, states: walk.known.len() }
}

impl Walk<'_> {
    /// Takes in a state, after every step that only enters a thread's own buffer: those commute with all others.
    fn meet(&mut self, mut node: Node) {
        for thread in 0..node.at.len() {
            while let Some(step) = self.litmus.threads[thread].steps.get(node.at[thread])
                && node.enter(thread, *step)
            {
                node.at[thread] += 1;
            }
        }
        let mut key = Vec::with_capacity(64);
        key.push(u8::from(node.dead) << 1 | u8::from(node.failed));
        for (at, seen) in node.at.iter().zip(&node.seen) {
            key.push(*at as u8);
            key.extend(seen.iter().map(|value| *value as u8));
        }
        node.machine.encode(&mut key);
        if self.known.insert(key.into_boxed_slice()) {
            self.todo.push(node);
        }
    }

    fn expand(&mut self, node: &Node) {
        let ended =
            (0..node.at.len()).all(|thread| node.at[thread] == self.litmus.threads[thread].steps.len());
        if ended && (self.litmus.last.is_empty() || node.machine.is_settled()) {
            self.outcomes.insert(node.outcome(self.litmus));
            return;
        }
        self.step_threads(node);
        self.empty_buffers(node);
        self.deliver(node);
        if node.machine.has_caches() {
            self.stir_caches(node);
        }
        if let (Some(host), false) = (self.dies, node.dead) {
            self.next(node, |next| next.die(self.litmus, host));
        }
    }

    fn next(&mut self, node: &Node, change: impl FnOnce(&mut Node)) {
        let mut next = node.clone();
        change(&mut next);
        self.meet(next);
    }

    fn step_threads(&mut self, node: &Node) {
        for thread in 0..node.at.len() {
            match self.litmus.threads[thread].steps.get(node.at[thread]) {
                Some(Step::Load(place)) if node.machine.is_poisoned(place.index()) => {
                    self.next(node, |next| {
                        next.failed = true;
                        next.at[thread] = self.litmus.threads[thread].steps.len();
                    })
                }
                Some(Step::Load(place)) => self.next(node, |next| {
                    let value = next.machine.load(thread, place.index());
                    next.seen[thread].push(value);
                    next.at[thread] += 1;
                }),
                Some(Step::Mfence | Step::FenceInvalidations) if node.machine.is_drained(thread) => {
                    self.next(node, |next| next.at[thread] += 1);
                }
                _ => {}
            }
        }
    }

    fn empty_buffers(&mut self, node: &Node) {
        for thread in 0..node.at.len() {
            for index in 0..node.machine.entries(thread).len() {
                if node.machine.is_eligible(thread, index) {
                    self.next(node, |next| {
                        next.machine.commit(thread, index);
                    });
                }
            }
        }
    }

    fn deliver(&mut self, node: &Node) {
        for host in 0..self.hosts(node) {
            for index in 0..node.machine.queue(host).len() {
                for word in 0..WORDS {
                    if node.machine.is_deliverable(host, index, word) {
                        self.next(node, |next| {
                            next.machine.deliver(host, index, word);
                        });
                    }
                }
            }
        }
    }

    fn stir_caches(&mut self, node: &Node) {
        for host in 0..self.hosts(node) {
            let wanted = self.wanted(node, host);
            for line in 0..LINES as u32 {
                let is_wanted = wanted & (1 << line) != 0;
                if node.machine.is_dirty(host, line) {
                    self.next(node, |next| next.machine.evict(host, line));
                    self.next(node, |next| next.machine.clean(host, line));
                } else if is_wanted && node.machine.holds(host, line) {
                    self.next(node, |next| next.machine.evict(host, line));
                } else if is_wanted {
                    self.next(node, |next| next.machine.fill(host, line));
                    if self.tears && !node.machine.is_filling(host) {
                        for taken in 1..self.litmus.words() {
                            self.next(node, |next| next.machine.begin_fill(host, line, taken));
                        }
                    }
                }
            }
        }
    }

    fn hosts(&self, node: &Node) -> usize {
        node.at.len().min(node.machine.hosts())
    }

    /// The lines that threads of `host` have yet to load or store: what its cache holds of others matters to nobody.
    fn wanted(&self, node: &Node, host: usize) -> u32 {
        let mut wanted = 0;
        for (thread, program) in self.litmus.threads.iter().enumerate() {
            if usize::from(program.host) != host {
                continue;
            }
            for step in &program.steps[node.at[thread]..] {
                if let Step::Load(place) | Step::Store(place, _) = step {
                    wanted |= 1 << place.line;
                }
            }
            for entry in node.machine.entries(thread).iter().filter(|entry| entry.kind == Kind::Store) {
                wanted |= 1 << entry.line();
            }
        }
        wanted
    }
}

impl Node {
    /// Makes `step` if all it does is to enter the buffer of `thread`.
    fn enter(&mut self, thread: usize, step: Step) -> bool {
        let coherence = self.machine.coherence();
        let entry = match step {
            Step::Load(_) | Step::Mfence => return false,
            Step::FenceInvalidations => return !coherence.needs_invalidation(),
            Step::Invalidate(_) if !coherence.needs_invalidation() => return true,
            Step::WriteBack(_) | Step::Flush(_) if !coherence.needs_write_back() => return true,
            Step::Sfence if self.machine.is_drained(thread) => return true,
            Step::Store(place, value) => Entry::store(place.index(), 0xff, value),
            Step::StoreNt(place, value) => Entry::store_nt(place.index(), value),
            Step::WriteBack(place) => Entry::on_line(Kind::WriteBack, place.line.into()),
            Step::Invalidate(place) => Entry::on_line(Kind::Invalidate, place.line.into()),
            Step::Flush(place) => Entry::on_line(Kind::Flush, place.line.into()),
            Step::Sfence => Entry::sfence(),
        };
        self.machine.push(thread, entry);
        true
    }

    /// `host` dies.
    fn die(&mut self, litmus: &Litmus, host: u16) {
        self.dead = true;
        self.machine.lose(host.into());
        for (thread, program) in litmus.threads.iter().enumerate().filter(|(_, thread)| thread.host == host) {
            self.at[thread] = program.steps.len();
        }
    }

    fn outcome(&self, litmus: &Litmus) -> Vec<u64> {
        if self.failed {
            return Vec::new();
        }
        let last = litmus.last.iter().map(|place| self.machine.peek(place.index()));
        litmus.judge(self.seen.iter().flatten().copied().chain(last).collect())
    }
}
