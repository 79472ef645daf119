//! How long each service will take to its bounds, by the decisions that rounds will make.

use std::collections::BTreeMap;
use std::time::Duration;

use polder_place::pages::{PageMove, Past, RecordedRound, RoundLimits, decide};

use crate::control::turns;

/// What will move of a service, if it does what is asked and nothing else changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Bytes that move.
    pub bytes: u64,
    /// Time until the last of them has moved; [`None`] where that takes more rounds than are looked at.
    pub time: Option<Duration>,
}

/// Rounds that are looked at.
const MOST_ROUNDS: u32 = 10_000;

/// Decides rounds from a recorded one on, each of which moves `step` bytes each way at most, or a page. Services that nothing moves of are
/// left out.
#[must_use]
pub fn forecast(recorded: &RecordedRound, step: u64, period: Duration) -> BTreeMap<String, Forecast> {
    let mut services = recorded.services.clone();
    let step = step.max(recorded.limits.page);
    let promote = if recorded.limits.promote > 0 { step } else { 0 };
    let mut limits = RoundLimits { step, promote, ..recorded.limits };
    let (mut past, mut found) = (Past::default(), BTreeMap::new());
    // Services under their low bound come up from the second look on.
    let mut still = 0;
    let turns = turns(services.len());
    for round in 1..=MOST_ROUNDS {
        for (index, view) in services.iter_mut().enumerate() {
            view.seen.waits = !(round as usize + index).is_multiple_of(turns);
        }
        let moves = decide(&services, &limits, &mut past).moves;
        still = if moves.is_empty() { still + 1 } else { 0 };
        if still > turns {
            return found;
        }
        for change in moves {
            let (service, down, up) = match change {
                PageMove::Demote { service, bytes, .. } => (service, bytes, 0),
                PageMove::Promote { service, bytes } => (service, 0, bytes),
                PageMove::BringBack { service, bytes } => (service, 0, bytes),
            };
            let view = &mut services[service];
            view.seen.fast = view.seen.fast + up - down;
            view.seen.slow = view.seen.slow + down - up;
            view.seen.fast_cache = view.seen.fast_cache.min(view.seen.fast);
            limits.fast_free = (limits.fast_free + down).saturating_sub(up);
            limits.slow_free = (limits.slow_free + up).saturating_sub(down);
            let forecast =
                found.entry(view.name.clone()).or_insert(Forecast { bytes: 0, time: Some(Duration::ZERO) });
            forecast.bytes += down + up;
            forecast.time = Some(period * round);
        }
    }
    // What still moves then is not done.
    let last = Some(period * MOST_ROUNDS);
    found.values_mut().filter(|forecast| forecast.time == last).for_each(|forecast| forecast.time = None);
    found
}
