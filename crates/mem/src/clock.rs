//! The clock of this process.

use std::time::Duration;

use crate::Nanos;

/// `CLOCK_MONOTONIC` in nanoseconds, the clock that futex deadlines are given in.
#[inline]
pub(crate) fn now() -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live timespec that the call fills; CLOCK_MONOTONIC cannot fail on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Nanos(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

/// How long from `from` until `until`; nothing when that has passed.
pub(crate) fn remaining(from: Nanos, until: Nanos) -> Duration {
    Duration::from_nanos(until.0.saturating_sub(from.0))
}
