//! Polls in vain: whoever polls keeps a processor that the peer it waits for may need. MPI libraries do not all give it up
//! wherever they wait (MPICH does not in `MPI_Win_flush`), and each turn then takes a time slice of the scheduler.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// Polls in vain after which the processor is given up where nobody else wants it: tens of microseconds, beside which the
/// system call is nothing.
const PATIENCE: u32 = 256;
/// Giving up takes a few hundred nanoseconds; what took longer let somebody else run.
const SWITCH: Duration = Duration::from_nanos(1500);

thread_local! {
    static IDLE: Cell<Idle> = const { Cell::new(Idle::AT_FIRST) };
}

/// A poll of this thread.
pub(crate) struct Poll {
    /// Somebody else ran since the poll before: the program gives the processor up itself.
    yields: bool,
}

impl Poll {
    pub(crate) fn begin() -> Self {
        Self { yields: IDLE.get().last.is_some_and(|last| last.elapsed() > SWITCH) }
    }

    /// Says what it found, with no lock held; gives the processor up after many in vain.
    pub(crate) fn end(self, found: bool) {
        let mut idle = IDLE.get();
        if idle.is_over(found) {
            let start = Instant::now();
            if !self.yields {
                thread::yield_now();
            }
            idle.gave_up(start.elapsed());
        }
        idle.last = (!found && idle.patience < PATIENCE).then(Instant::now);
        IDLE.set(idle);
    }
}

#[derive(Clone, Copy)]
struct Idle {
    /// Polls in vain since the last that found something, or gave up.
    vain: u32,
    /// So many are enough.
    patience: u32,
    /// When the poll before ended, where others want the processor.
    last: Option<Instant>,
}

impl Idle {
    const AT_FIRST: Self = Self { vain: 0, patience: PATIENCE, last: None };

    const fn is_over(&mut self, found: bool) -> bool {
        self.vain = if found { 0 } else { self.vain + 1 };
        self.vain >= self.patience
    }

    /// Sooner the next time where somebody was waiting for the processor.
    fn gave_up(&mut self, took: Duration) {
        self.vain = 0;
        self.patience = if took > SWITCH { 1 } else { (self.patience * 2).min(PATIENCE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many polls in vain it gives up.
    fn polls(idle: &mut Idle) -> u32 {
        1 + (0..).find(|_| idle.is_over(false)).unwrap()
    }

    #[test]
    fn whoever_polls_in_vain_gives_up_at_every_poll_where_others_wait_and_rarely_where_nobody_does() {
        let mut idle = Idle::AT_FIRST;
        assert_eq!(polls(&mut idle), PATIENCE);
        idle.gave_up(Duration::from_micros(50));
        assert_eq!(polls(&mut idle), 1);
        for patience in [2, 4, 8, 16, 32, 64, 128, 256, 256] {
            idle.gave_up(Duration::from_nanos(300));
            assert_eq!(polls(&mut idle), patience);
        }
    }

    #[test]
    fn whoever_finds_something_goes_on() {
        let mut idle = Idle { patience: 4, ..Idle::AT_FIRST };
        assert!((0..100).all(|poll| !idle.is_over(poll % 4 == 3)));
    }
}
