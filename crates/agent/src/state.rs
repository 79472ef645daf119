//! What the running agent publishes of itself, and the answer to why a service is as it is.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, UNIX_EPOCH};

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::{Alarm, Cause, Round};

/// What the agent writes after each round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The policy file.
    pub policy: String,
    /// Nodes of the fast tier.
    pub fast_nodes: String,
    /// Nodes of the slow tier.
    pub slow_nodes: String,
    /// The policy's time between rounds, in ms.
    pub period_ms: u64,
    /// The last round.
    pub round: Round,
    /// What each service was and why, the latest last.
    pub causes: BTreeMap<String, Vec<Cause>>,
}

/// A time in ms since 1970, for people.
fn show_time(ms: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

impl State {
    /// Whether a running agent may have written this: it is younger than three periods, and than ten seconds if these are shorter. `now_ms`
    /// is in ms since 1970.
    #[must_use]
    pub fn is_fresh(&self, now_ms: u64) -> bool {
        // Since a clock was set back a running agent has written again.
        now_ms.abs_diff(self.round.time_ms) < self.period_ms.saturating_mul(3).max(10_000)
    }

    /// Why a service is as it is, since when, and by which line of the policy; [`None`] for one that the policy does not name.
    #[must_use]
    pub fn explain(&self, service: &str) -> Option<String> {
        if let Some(causes) = self.causes.get(service) {
            return Some(self.explain_one(service, causes));
        }
        // The pods of a service by label.
        let is_of = |name: &&String| name.split_once('/').is_some_and(|(of, _)| of == service);
        let pods: Vec<String> =
            self.causes.keys().filter(is_of).map(|name| self.explain_one(name, &self.causes[name])).collect();
        (!pods.is_empty()).then(|| pods.concat())
    }

    fn explain_one(&self, service: &str, causes: &[Cause]) -> String {
        let mut text = String::new();
        let line = |cause: &Cause| {
            cause.line.map_or(String::new(), |line| format!(" ({} line {line})", self.policy))
        };
        // Writing to a string cannot fail.
        match self.round.services.iter().find(|row| row.service == service) {
            Some(row) => {
                let size = |bytes| ByteSize(bytes).display().iec();
                let tier = row.tier.name();
                let _ = writeln!(text, "{service}: {tier}, cgroup {}", row.cgroup);
                let _ = writeln!(
                    text,
                    "  {} on the fast tier, {} on the slow tier: {:.1}% local",
                    size(row.fast),
                    size(row.slow),
                    100.0 * row.local
                );
                let _ = writeln!(
                    text,
                    "  pressure {:.2}%, {} pages read again and {} asked to go down in the last round",
                    row.pressure,
                    row.refaults,
                    size(row.demoted)
                );
                if row.returned > 0 {
                    let _ = writeln!(
                        text,
                        "  {} came back soon after they went down, since the agent started",
                        size(row.returned)
                    );
                }
            }
            None => {
                let _ = writeln!(text, "{service}: not there");
            }
        }
        for (index, cause) in causes.iter().rev().enumerate() {
            let word = if index == 0 { "now" } else { "before" };
            let since = show_time(cause.since_ms);
            let _ = writeln!(
                text,
                "  {word}: {}{}, since round {}, {since}",
                cause.what,
                line(cause),
                cause.since_round
            );
        }
        for alarm in self.round.alarms.iter().filter(|alarm| alarm.service() == Some(service)) {
            let _ = writeln!(text, "  alarm: {alarm}");
        }
        let _ = writeln!(text, "  as of round {}, {}", self.round.round, show_time(self.round.time_ms));
        text
    }
}

impl Alarm {
    /// The service that it is about; [`None`] for the host.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        match self {
            Self::OptOutBroken { service, .. }
            | Self::NoPods { service, .. }
            | Self::NoSuchCgroup { service, .. }
            | Self::Refused { service, .. }
            | Self::OomKill { service, .. } => Some(service),
            Self::CxlMemory { service, .. } => service.as_deref(),
            Self::HostSetting { .. } => None,
        }
    }

    /// Its kind, as in JSON.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::OptOutBroken { .. } => "opt-out-broken",
            Self::NoPods { .. } => "no-pods",
            Self::NoSuchCgroup { .. } => "no-such-cgroup",
            Self::Refused { .. } => "refused",
            Self::HostSetting { .. } => "host-setting",
            Self::OomKill { .. } => "oom-kill",
            Self::CxlMemory { .. } => "cxl-memory",
        }
    }
}

impl std::fmt::Display for Alarm {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = |bytes: u64| ByteSize(bytes).display().iec();
        match self {
            Self::OptOutBroken { service, found, left: 0 } => {
                let found = size(*found);
                write!(
                    to,
                    "{service} is opted out and had {found} on the slow tier; all of it was brought back"
                )
            }
            Self::OptOutBroken { service, found, left } => {
                let (found, left) = (size(*found), size(*left));
                write!(
                    to,
                    "{service} is opted out and had {found} on the slow tier; {left} are there still, such as shared pages"
                )
            }
            Self::NoPods { service, why } => write!(to, "{service} has no pods: {why}"),
            Self::NoSuchCgroup { service, cgroup } => write!(to, "{service} has no cgroup {cgroup}"),
            Self::Refused { service, error } => write!(to, "{service}: {error}"),
            Self::HostSetting { key, error } => write!(to, "{key}: {error}"),
            Self::OomKill { service, kills } => {
                write!(to, "memory ran out, and the kernel killed {kills} processes of {service}")
            }
            Self::CxlMemory { device, service: Some(service), what, is_guess: false } => {
                write!(to, "{service} has pages on bad memory of {device}: {what}")
            }
            Self::CxlMemory { device, service: Some(service), what, is_guess: true } => {
                write!(
                    to,
                    "{service} has pages on the slow tier, where {device} is bad: {what}; which pages is not known"
                )
            }
            Self::CxlMemory { device, service: None, what, is_guess: true } => {
                write!(to, "{device} is bad: {what}")
            }
            Self::CxlMemory { device, service: None, what, is_guess: false } => {
                write!(to, "{device} is bad: {what}; no service of the policy has pages there")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_agent_wrote_is_fresh_for_three_periods_and_for_ten_seconds() {
        for (period_ms, last) in [(2_000, 9_999), (1, 9_999), (60_000, 179_999), (3_600_000, 10_799_999)] {
            let round = Round { time_ms: 1 << 40, ..Round::default() };
            let [policy, fast_nodes, slow_nodes] = std::array::from_fn(|_| String::new());
            let state = State { policy, fast_nodes, slow_nodes, period_ms, round, causes: BTreeMap::new() };
            let at = 1 << 40;
            assert!([at - last, at, at + last].iter().all(|now| state.is_fresh(*now)), "{period_ms}");
            assert!([0, at - last - 1, at + last + 1].iter().all(|now| !state.is_fresh(*now)), "{period_ms}");
        }
    }
}
