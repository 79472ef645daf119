//! Giving the processor up, where others use their time slices.
//!
//! A thread that gives the processor up loses the rest of its slice: Linux counts it as used. So beside processes that compute it comes
//! back after about a slice of each of them, although it has used next to nothing. A thread that waits in this way uses little of its
//! share, but gets each turn late. A shorter slice brings the turns sooner: the share stays the same.
//!
//! Linux takes slices of threads from 6.12 on; before that, asking changes nothing. Threads that this one starts inherit the slice.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A thread that was away for so long has probably waited for another's slice: default slices are about as long, or longer.
const LONG: Duration = Duration::from_millis(1);
/// The shortest slice that Linux gives, in nanoseconds.
const SHORTEST: u64 = 100_000;

thread_local! {
    /// Whether this thread has asked for short slices.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Gives the processor up, and says how long that took.
pub fn give_up() -> Duration {
    let start = Instant::now();
    std::thread::yield_now();
    let took = start.elapsed();
    was_away(took);
    took
}

/// Tells that this thread was away from its work for so long. If it was for a slice of another, it asks for short slices, once.
#[inline]
pub fn was_away(took: Duration) {
    if took >= LONG {
        ask_once();
    }
}

#[cold]
fn ask_once() {
    if !ASKED.replace(true) {
        shorten(SHORTEST);
    }
}

/// What Linux calls `sched_attr`, in its first version.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48);

/// How this thread is scheduled, where the system says so.
fn attributes() -> Option<Attributes> {
    let mut attributes = Attributes::default();
    let size = size_of::<Attributes>();
    // SAFETY: a place for so many bytes of answer.
    let code = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    (code == 0).then_some(attributes)
}

/// Asks for slices of so many nanoseconds, unless this thread has a policy that has none.
fn shorten(nanoseconds: u64) {
    let Some(attributes) = attributes() else { return };
    let policies = [libc::SCHED_OTHER, libc::SCHED_BATCH].map(i32::unsigned_abs);
    if policies.contains(&attributes.policy) {
        let asked = Attributes { runtime_ns: nanoseconds, ..attributes };
        // It goes on as before where this is refused.
        // SAFETY: attributes as long as they say.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const asked, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at a thread that was away for so long.
    fn slice_after(away: Duration) -> (u64, u64) {
        let looked = std::thread::spawn(move || {
            let slice = || attributes().map_or(0, |attributes| attributes.runtime_ns);
            let before = slice();
            was_away(away);
            (before, slice())
        });
        looked.join().unwrap()
    }

    #[test]
    fn a_thread_that_has_waited_for_a_slice_of_another_gets_short_ones() {
        let (before, after) = slice_after(LONG);
        // 0 where the system has no slices of threads.
        assert_eq!(after, if before == 0 { 0 } else { SHORTEST });
    }

    #[test]
    fn a_thread_that_gets_the_processor_back_soon_keeps_its_slices() {
        let (before, after) = slice_after(LONG - Duration::from_nanos(1));
        assert_eq!(after, before);
    }

    #[test]
    fn a_thread_keeps_its_policy_and_its_nice_value() {
        let same = std::thread::spawn(|| {
            let of =
                || attributes().map(|attributes| (attributes.policy, attributes.nice, attributes.priority));
            let before = of();
            was_away(LONG);
            (before, of())
        });
        let (before, after) = same.join().unwrap();
        assert_eq!(after, before);
    }
}
