//! Emulated cost: what memory that is not here would take.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock;
use crate::host::Host;

/// The latency and bandwidth of an emulated region. Whatever is timed with it is an emulated figure.
///
/// On a software-coherent region the flushes pay: one latency a call, and the bandwidth of its lines; non-temporal
/// stores pay the same; ordinary loads, stores and copies work in the cache. On a coherent region the copies pay.
/// The bandwidth is that of the region: the processes under this kernel share it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// One access, in nanoseconds.
    pub latency_ns: u64,
    /// What the region moves, in bytes a second, for all processes together; 0 is without limit.
    pub bytes_per_second: u64,
}

impl Cost {
    /// Spins for as long as moving `bytes` takes, behind whatever other processes move.
    pub(super) fn spend(&self, host: Option<&Host>, bytes: u64) {
        /// For regions that no host is attached to: of this process alone.
        static ALONE: AtomicU64 = AtomicU64::new(0);
        let busy_until = host.map_or(&ALONE, Host::busy_until);
        let start = clock::now().0;
        let free = self.reserve(busy_until, start, bytes);
        while clock::now().0 < free + self.latency_ns {
            std::hint::spin_loop();
        }
    }

    /// Takes the next free time of the region for `bytes`, and returns when they have passed.
    fn reserve(&self, busy_until: &AtomicU64, now: u64, bytes: u64) -> u64 {
        let Some(nanos) = (u128::from(bytes) * 1_000_000_000).checked_div(u128::from(self.bytes_per_second))
        else {
            return now;
        };
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        let later = |busy: u64| Some(busy.max(now).saturating_add(nanos));
        let before = busy_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
        let before = before.expect("the update always applies");
        before.max(now).saturating_add(nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_queue_behind_those_of_other_processes() {
        let busy = AtomicU64::new(0);
        let cost = Cost { latency_ns: 0, bytes_per_second: 1_000_000_000 };
        assert_eq!(cost.reserve(&busy, 1000, 64), 1064);
        assert_eq!(cost.reserve(&busy, 1010, 64), 1128, "behind the first");
        assert_eq!(cost.reserve(&busy, 2000, 64), 2064, "after a pause");
        let free = Cost { latency_ns: 300, bytes_per_second: 0 };
        assert_eq!(free.reserve(&busy, 7, 1 << 40), 7);
    }
}
