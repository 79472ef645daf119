//! Waiting: spin briefly, yield, then sleep on the doorbell; always with a deadline and an eye on the peer.

pub(crate) mod watch;

use std::time::Duration;

use polder_mem::{Bell, Memory, Nanos};

/// The longest that a wait spins, and yields after that, however few looks it has made: a look at remote lines takes long, and
/// the peer may need this core.
const SPIN: Duration = Duration::from_micros(100);
/// Looks between two glances at the clock.
const LOOKS_A_GLANCE: u32 = 32;

/// How often to look before sleeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Looks in a tight loop.
    pub spins: u32,
    /// Looks with the CPU offered to others between them.
    pub yields: u32,
    /// The longest sleep between two looks: bounds the delay when the waker runs under another kernel.
    pub nap: Duration,
}

impl Patience {
    /// With a core for each process: answers come within a microsecond, so spin for tens of them.
    pub const DEDICATED: Self = Self { spins: 2000, yields: 200, nap: Duration::from_micros(500) };
    /// With more processes than cores: a process that spins keeps its peer from running.
    pub const SHARED: Self = Self { spins: 50, yields: 50, nap: Duration::from_micros(500) };

    /// What suits `ranks` processes that wait for each other under this kernel.
    #[must_use]
    pub fn for_ranks(ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if ranks <= cores { Self::DEDICATED } else { Self::SHARED }
    }
}

/// Looks until `look` returns something, `deadline` has come (`Ok(None)`) or `look` fails. Before each
/// sleep, `peer` says whether the awaited process still lives; its error ends the wait.
///
/// # Errors
/// Those of `look` and `peer`.
pub fn until<M: Memory, T, E>(
    memory: &M,
    bell: Bell,
    patience: Patience,
    deadline: Nanos,
    mut look: impl FnMut() -> Result<Option<T>, E>,
    peer: impl FnMut() -> Result<(), E>,
) -> Result<Option<T>, E> {
    until_with_sleep_hint(memory, bell, patience, deadline, |_| look(), peer)
}

/// As [`until`]. `look` gets whether the wait has come so far that it sleeps: then it may look harder, too.
// SYNC: a waiter announces its sleep and looks again; `Memory::wake` fences what was published and reads the flag.
pub(crate) fn until_with_sleep_hint<M: Memory, T, E>(
    memory: &M,
    bell: Bell,
    patience: Patience,
    deadline: Nanos,
    mut look: impl FnMut(bool) -> Result<Option<T>, E>,
    mut peer: impl FnMut() -> Result<(), E>,
) -> Result<Option<T>, E> {
    for (looks, between) in [(patience.spins, M::pause as fn(&M)), (patience.yields, M::yield_now as fn(&M))]
    {
        let end = memory.now() + SPIN;
        for round in 1..=looks {
            if let Some(value) = look(false)? {
                return Ok(Some(value));
            }
            if round.is_multiple_of(LOOKS_A_GLANCE) && memory.now() >= end {
                break;
            }
            between(memory);
        }
    }
    loop {
        let seen = memory.announce_sleep(bell);
        let value = look(true);
        if !matches!(value, Ok(None)) {
            memory.cancel_sleep(bell);
            return value;
        }
        let now = memory.now();
        if now >= deadline {
            memory.cancel_sleep(bell);
            return Ok(None);
        }
        memory.sleep(bell, seen, deadline.min(now + patience.nap));
        if let Some(value) = look(true)? {
            return Ok(Some(value));
        }
        if let Err(dead) = peer() {
            // What it published before it died counts.
            return look(true)?.map_or(Err(dead), |value| Ok(Some(value)));
        }
    }
}
