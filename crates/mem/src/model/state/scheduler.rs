//! Who goes on, and when the clock jumps.

use super::{Mode, State, bits};

/// Nanoseconds that an operation takes.
const OPERATION_NS: u64 = 10;
/// Set-ups and checks of a world may make so many times the operations of its schedule.
const ALONE_BUDGETS: u64 = 100;
/// The first jump of the clock when nobody can go on.
pub(super) const LEAP_NS: u64 = 200;
/// The longest.
const LONGEST_LEAP_NS: u64 = 1 << 36;
/// Waits of a thread after which its buffer is empty once.
const DRAINING_WAITS: u32 = 64;

impl State {
    /// Counts an operation of the current thread; false when the schedule has to end here.
    #[inline]
    pub(in crate::model) fn count(&mut self) -> bool {
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

    /// Counts an operation of a set-up or a check, in which nobody else goes on.
    ///
    /// # Panics
    /// When there are too many: it waits for something that nobody does.
    #[inline]
    pub(in crate::model) fn count_alone(&mut self) {
        self.alone += 1;
        self.now += OPERATION_NS;
        if self.alone > self.budget * ALONE_BUDGETS {
            // Its destructors wait for nobody.
            self.mode = Mode::Over;
            panic!("no progress after {} operations alone: livelock", self.alone - 1);
        }
    }

    /// Whether another thread should go on before an operation that others can notice.
    #[inline]
    pub(in crate::model) fn wants_switch(&mut self) -> bool {
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
    pub(in crate::model) fn start(&mut self) -> Option<usize> {
        self.mode = Mode::Running;
        for thread in bits(self.ready) {
            if self.rates.late != 0 && self.random.chance(self.rates.late) {
                self.stall(thread);
            }
        }
        self.choose()
    }

    /// The current thread waits for others: it goes on when they do not, or now and then.
    ///
    /// Its buffer is drained once in many waits, as every buffer is some time. Where the adversary hardly commits, a small
    /// buffer is moved on by its own thread alone: whoever writes a line and waits, over and over, would have the end of
    /// each line still in the buffer whenever it waits, and others, who go on only then, would see the line torn for ever.
    pub(in crate::model) fn wait(&mut self) {
        let me = self.current;
        self.waiting |= 1 << me;
        self.threads[me].waits += 1;
        if self.threads[me].waits.is_multiple_of(DRAINING_WAITS) {
            while !self.machine.is_drained(me) {
                self.drain_step();
            }
        }
    }

    /// The thread that goes on; none when all have ended, or the schedule has failed.
    pub(in crate::model) fn choose(&mut self) -> Option<usize> {
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

    pub(super) fn rouse(&mut self, thread: usize) {
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
    pub(in crate::model) fn finish(&mut self, thread: usize) {
        self.ready &= !(1 << thread);
        self.threads[thread].ended = true;
        self.changes += 1;
        self.start_followers(thread, false);
    }

    pub(super) fn start_followers(&mut self, ended: usize, crashed: bool) {
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
}
