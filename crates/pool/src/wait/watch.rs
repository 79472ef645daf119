//! Waiting for another host, in calls that nobody wakes: longer each time, with a deadline and an eye on the view.

use std::time::Duration;

use polder_mem::{Memory, Nanos};

use crate::PoolError;
use crate::site::Site;

const SPINS: u32 = 16;
const YIELDS: u32 = 256;
const NAP: Duration = Duration::from_micros(500);

/// How long a call has waited for other hosts, and which of them it need not wait for.
#[derive(Debug)]
pub(crate) struct Watch {
    since: Nanos,
    deadline: Nanos,
    rounds: u32,
    /// The hosts that are off for certain, as of the last look at the view.
    fenced: u64,
}

impl Watch {
    /// Waits for as long as a call of this process may.
    pub(crate) fn new<M: Memory>(site: &Site<'_, M>) -> Self {
        let since = site.memory.now();
        Self { since, deadline: since + site.patience, rounds: 0, fenced: 0 }
    }

    /// Whether what `host` was seen to have begun must be waited for: it may go on.
    pub(crate) fn must_wait_for<M: Memory>(&mut self, site: &Site<'_, M>, host: u16) -> bool {
        if self.fenced >> host & 1 == 1 {
            // It may have come back since.
            self.fenced = site.fenced();
        }
        self.fenced >> host & 1 == 0
    }

    /// Waits a little; `false` when the deadline has come.
    pub(crate) fn wait<M: Memory>(&mut self, site: &Site<'_, M>) -> bool {
        let now = site.memory.now();
        if now >= self.deadline {
            return false;
        }
        if self.rounds < SPINS {
            site.memory.pause();
        } else if self.rounds < YIELDS {
            site.memory.yield_now();
        } else {
            let bell = site.layout.bell(site.host(), site.me.slot);
            let seen = site.memory.announce_sleep(bell);
            let waited = Duration::from_nanos(now.0.saturating_sub(self.since.0));
            site.memory.sleep(bell, seen, self.deadline.min(now + NAP.max(waited / 8)));
        }
        self.rounds += 1;
        if self.rounds.is_multiple_of(SPINS) {
            self.fenced = site.fenced();
        }
        true
    }

    /// Waits a little.
    ///
    /// # Errors
    /// What `late` makes, when the deadline has come.
    pub(crate) fn wait_or<M: Memory>(
        &mut self,
        site: &Site<'_, M>,
        late: impl FnOnce() -> PoolError,
    ) -> Result<(), PoolError> {
        if self.wait(site) { Ok(()) } else { Err(late()) }
    }
}
