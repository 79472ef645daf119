//! What goes wrong: processes and hosts that die, threads that stop, memory that fails.

use super::super::explore;
use super::{Crash, Kernels, Mode, State, Thread};
use crate::Liveness;

impl State {
    /// The planned crash of the current thread; false when it does not go on now.
    pub(super) fn crash(&mut self) -> bool {
        let me = self.current;
        let (host, slot) = (self.threads[me].host, self.threads[me].slot);
        let kind = self.threads[me].crash;
        self.record(me, "CRASH", None, 0, None);
        explore::with_session(|session| session.tally.count(kind));
        self.changes += 1;
        if kind == Crash::Pause {
            self.ready &= !(1 << me);
            self.stopped |= 1 << me;
            // From nothing to some minutes.
            let length = self.random.magnitude(38).max(self.shape.stop.as_nanos() as u64);
            self.threads[me].until = self.now + length;
            return false;
        }
        for thread in 0..self.threads.len() {
            let victim = &self.threads[thread];
            // Whoever has not started yet is of the next life.
            if victim.host == host
                && (kind == Crash::Host || victim.slot == slot)
                && victim.after.is_none()
                && !victim.ended
            {
                self.kill(thread);
                if kind == Crash::Process {
                    self.machine.drain(thread, &mut self.random);
                }
            }
        }
        if kind == Crash::Host {
            for victim in
                self.threads.iter_mut().filter(|victim| victim.host == host && victim.after.is_none())
            {
                victim.is_gone = true;
            }
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

    /// What the process `asker` can say of the process `asked`, each a host and a slot.
    pub(in crate::model) fn liveness(&self, asker: (u16, u16), asked: (u16, u16)) -> Liveness {
        if asker == asked {
            return Liveness::Alive;
        }
        if self.shape.kernels == Kernels::OnePerHost && asker.0 != asked.0 {
            return Liveness::Unknown;
        }
        let started = |thread: &&Thread| (thread.host, thread.slot) == asked && thread.after.is_none();
        let known = || self.threads.iter().filter(started);
        match (known().next(), known().any(|thread| !thread.crashed && !thread.is_gone)) {
            (None, _) => Liveness::Unknown,
            (_, true) => Liveness::Alive,
            (_, false) => Liveness::Dead,
        }
    }

    /// Everything that survived reaches memory; what runs now runs alone.
    pub(in crate::model) fn settle(&mut self) {
        self.machine.settle(&mut self.random);
        self.mode = Mode::Alone;
    }

    /// Lets the line of `word` fail from operation `from` of the world on.
    pub(in crate::model) fn poison(&mut self, word: u32, from: u64) {
        self.poison.push((Self::line_of(word), from));
    }

    fn may_fail(&self) -> bool {
        !self.poison.is_empty() || self.machine.has_poison()
    }

    fn fails(&self, word: u32) -> bool {
        let fails = |(line, from): &(u32, u64)| *line == Self::line_of(word) && *from <= self.operations;
        self.machine.is_poisoned(word) || self.poison.iter().any(fails)
    }

    /// The word whose failure a load of `word` reports: its own, or that of an earlier store.
    #[inline]
    pub(in crate::model) fn load_fault(&mut self, word: u32) -> Option<u32> {
        if self.mode != Mode::Running || !self.may_fail() {
            return None;
        }
        let earlier = self.threads[self.current].fault.take();
        earlier.or_else(|| self.fails(word).then_some(word))
    }

    /// Whether a store of `word` meets a failing line.
    #[inline]
    pub(in crate::model) fn store_fault(&mut self, word: u32) -> bool {
        if self.mode != Mode::Running || !self.may_fail() {
            return false;
        }
        let fails = self.fails(word);
        if fails {
            self.threads[self.current].fault = Some(word);
        }
        fails
    }

    /// Ends the process when a destructor after the end of a schedule waits for ever.
    pub(in crate::model) fn count_after_the_end(&mut self) {
        self.operations += 1;
        if self.operations > self.budget + 1_000_000 {
            eprintln!("a destructor of a thread of the model waits for ever: it needs a deadline");
            std::process::abort();
        }
    }
}
