//! Polls in vain: whoever polls keeps a processor that the peer it waits for may need. MPI libraries do not all give it up
//! wherever they wait (MPICH does not in `MPI_Win_flush`), and each turn then takes a time slice of the scheduler.

use std::thread;
use std::time::{Duration, Instant};

/// Polls in vain after which the processor is given up where nobody else wants it: tens of microseconds, beside which the
/// system call is nothing.
const PATIENCE: u32 = 256;
/// Giving up to nobody takes some hundred nanoseconds, more on a virtual machine; to somebody, many times as long.
const TO_SOMEBODY: u32 = 3;

/// What is known of the polls of a domain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    /// Polls in vain since the last that found something, or gave up.
    vain: u32,
    /// So many are enough.
    patience: u32,
    /// When the poll before ended, where others want the processor.
    last: Option<Instant>,
    /// The shortest time that giving up took.
    shortest: Duration,
}

impl Default for Idle {
    fn default() -> Self {
        Self { vain: 0, patience: PATIENCE, last: None, shortest: Duration::MAX / TO_SOMEBODY }
    }
}

impl Idle {
    /// Whether somebody else ran since the poll before: the program gives the processor up itself.
    pub(crate) fn yields(&self) -> bool {
        self.last.is_some_and(|last| self.is_switch(last.elapsed()))
    }

    /// Whether a poll that found something, or did not, is the last before the processor is given up.
    #[inline(always)]
    pub(crate) fn is_over(&mut self, found: bool) -> bool {
        self.vain = if found { 0 } else { self.vain + 1 };
        if self.patience < PATIENCE {
            self.last = (!found).then(Instant::now);
        }
        self.vain >= self.patience
    }

    /// Gives the processor up, and says how long that took.
    #[cold]
    pub(crate) fn give_up() -> Duration {
        let start = Instant::now();
        thread::yield_now();
        start.elapsed()
    }

    /// Sooner the next time where somebody was waiting for the processor; `took` is nothing where the program gave it up.
    pub(crate) fn gave_up(&mut self, took: Option<Duration>) {
        self.shortest = took.map_or(self.shortest, |took| took.min(self.shortest));
        self.vain = 0;
        self.patience =
            if took.is_some_and(|took| self.is_switch(took)) { 1 } else { (self.patience * 2).min(PATIENCE) };
        self.last = (self.patience < PATIENCE).then(Instant::now);
    }

    fn is_switch(&self, took: Duration) -> bool {
        took > self.shortest * TO_SOMEBODY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: Option<Duration> = Some(Duration::from_nanos(300));
    const SOMEBODY: Option<Duration> = Some(Duration::from_micros(50));

    /// After how many polls in vain it gives up.
    fn polls(idle: &mut Idle) -> u32 {
        1 + (0..).find(|_| idle.is_over(false)).unwrap()
    }

    #[test]
    fn whoever_polls_in_vain_gives_up_at_every_poll_where_others_wait_and_rarely_where_nobody_does() {
        let mut idle = Idle::default();
        assert_eq!(polls(&mut idle), PATIENCE);
        idle.gave_up(NOBODY);
        idle.gave_up(SOMEBODY);
        assert_eq!(polls(&mut idle), 1);
        for patience in [2, 4, 8, 16, 32, 64, 128, 256, 256] {
            idle.gave_up(NOBODY);
            assert_eq!(polls(&mut idle), patience);
        }
    }

    #[test]
    fn what_giving_up_takes_where_nobody_waits_is_learned() {
        let mut idle = Idle::default();
        // Nobody knows what the first was.
        idle.gave_up(SOMEBODY);
        assert_eq!(polls(&mut idle), PATIENCE);
        idle.gave_up(NOBODY);
        idle.gave_up(SOMEBODY);
        assert_eq!(polls(&mut idle), 1);
        // Another program's turns say nothing of it.
        idle.gave_up(None);
        assert_eq!((polls(&mut idle), idle.shortest), (2, NOBODY.unwrap()));
    }

    #[test]
    fn whoever_finds_something_goes_on() {
        let mut idle = Idle { patience: 4, ..Idle::default() };
        assert!((0..100).all(|poll| !idle.is_over(poll % 4 == 3)));
    }
}
