//! What happens between two operations: commits, deliveries, evictions, fills, at rates that the seed draws.

use super::super::machine::{Entry, Kind};
use super::{RECENT, State};
use crate::Coherence;
use crate::random::Random;

/// How wild the adversary is; chances out of 65,536.
#[derive(Clone, Debug, Default)]
pub(super) struct Rates {
    /// That it acts at all between two operations, and how often in a row.
    pub(super) act: u32,
    pub(super) acts: usize,
    /// What it then does, cumulative out of 256: commit, deliver, evict, prefetch; the rest writes a dirty line back.
    pub(super) commit: u8,
    pub(super) deliver: u8,
    pub(super) evict: u8,
    pub(super) prefetch: u8,
    /// That an invalidated line is filled again at once, and a line that was stored into is evicted at once.
    pub(super) refill: u32,
    pub(super) spill: u32,
    /// That a delivery is of one word only.
    pub(super) tear: u32,
    /// That a fill reads only some words at first.
    pub(super) torn_fill: u32,
    /// That another thread goes on where a switch can matter.
    pub(super) switch: u32,
    /// That a waiting thread may be the one.
    pub(super) poll: u32,
    /// That a thread is put aside where a switch can matter, and the binary digits of the longest time.
    pub(super) stall: u32,
    pub(super) stall_digits: u32,
    /// That a thread starts late.
    pub(super) late: u32,
    /// Entries in a buffer before the oldest is forced out.
    pub(super) buffer: usize,
    /// Threads and hosts whose buffers and queues are slow.
    pub(super) lazy_threads: u64,
    pub(super) lazy_hosts: u64,
    /// That a sleep ends for no reason.
    pub(super) spurious: u32,
    /// That a copy runs backwards.
    pub(super) backwards: u32,
}

impl Rates {
    pub(in crate::model) fn draw(random: &mut Random) -> Self {
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
    pub(in crate::model) fn calm() -> Self {
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

impl State {
    /// Remembers that a thread works on `line`.
    #[inline]
    pub(in crate::model) fn use_line(&mut self, line: u32) {
        if self.recent[self.uses % RECENT] != line {
            self.uses += 1;
            self.recent[self.uses % RECENT] = line;
        }
    }

    /// What happens between two operations.
    #[inline]
    pub(in crate::model) fn adversary(&mut self) {
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
        } else if !self.machine.has_caches() {
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
        if self.machine.has_caches() {
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
        if self.random.chance(self.rates.torn_fill) && self.shape.coherence == Coherence::Software {
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

    pub(in crate::model) fn push(&mut self, entry: Entry) {
        self.relieve();
        self.machine.push(self.current, entry);
    }

    /// One step towards the point where a fence of the current thread would return.
    pub(in crate::model) fn drain_step(&mut self) {
        self.advance(self.current);
    }

    pub(super) fn advance(&mut self, thread: usize) {
        match self.machine.eligible(thread, &mut self.random) {
            Some(index) => self.commit(thread, index),
            None => {
                if let Some(line) = self.machine.deliver_awaited(thread) {
                    self.trace_adversary(self.machine.host_of(thread), "memory has", line);
                }
            }
        }
    }

    pub(in crate::model) fn runs_backwards(&mut self) -> bool {
        self.rates.backwards != 0 && self.random.chance(self.rates.backwards)
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
