//! Goals of a policy that cannot all hold on a machine.

use bytesize::ByteSize;
use polder_linux::TierMemory;
use polder_place::pages::{ServicePolicy, TierRule};

use crate::policy::Policy;
use crate::report::{Round, ServiceRound};

/// Bytes that one service has to have on a tier, and why.
struct Claim {
    service: String,
    bytes: u64,
    why: String,
}

/// Services that are named; of more, their number and sum are said.
const MOST_NAMED: usize = 8;

/// What the services of a round have to have on one tier together, beyond what it has for them, by name and with figures. Empty where all
/// goals of the policy can hold.
#[must_use]
pub fn contradictions(policy: &Policy, round: &Round) -> Vec<String> {
    let size = |row: &ServiceRound| size(row.fast + row.slow);
    let fast = claims(policy, round, |row, policy| match (policy.rule, policy.local) {
        (TierRule::OptOut, _) => Some((1.0, "opt-out".to_owned())),
        (TierRule::OptIn, Some(local)) => {
            Some((local.low, format!("local_low {} of {}", local.low, size(row))))
        }
        _ => None,
    });
    let slow = claims(policy, round, |row, policy| match (policy.rule, policy.local) {
        (TierRule::Background, _) => Some((1.0, "background".to_owned())),
        (TierRule::OptIn, Some(local)) => {
            Some((1.0 - local.high, format!("what exceeds local_high {} of {}", local.high, size(row))))
        }
        _ => None,
    });
    let kept = round.fast.kept_by_kernel().max((round.fast.bytes as f64 * policy.free_low) as u64);
    [
        beyond("fast", fast, round.fast, kept, "lower local_low, or opt fewer services out"),
        beyond(
            "slow",
            slow,
            round.slow,
            round.slow.kept_by_kernel(),
            "raise local_high, or have fewer services in the background",
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What each service of a round is to have on a tier: a share of its bytes, and why.
fn claims(
    policy: &Policy,
    round: &Round,
    claim: impl Fn(&ServiceRound, ServicePolicy) -> Option<(f64, String)>,
) -> Vec<Claim> {
    let of = |row: &ServiceRound| {
        let named = policy.service(&row.service).map(|service| service.policy);
        let (share, why) = claim(row, named.or(policy.default.map(|(policy, _)| policy))?)?;
        let bytes = ((row.fast + row.slow) as f64 * share) as u64;
        (bytes > 0).then(|| Claim { service: row.service.clone(), bytes, why })
    };
    round.services.iter().filter_map(of).collect()
}

/// That these claims exceed the memory of a tier, of which `kept` bytes are to be free.
fn beyond(tier: &str, mut claims: Vec<Claim>, memory: TierMemory, kept: u64, remedy: &str) -> Option<String> {
    let (all, room) =
        (claims.iter().map(|claim| claim.bytes).sum::<u64>(), memory.bytes.saturating_sub(kept));
    if all <= room {
        return None;
    }
    claims.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.service.cmp(&b.service)));
    let others = claims.split_off(claims.len().min(MOST_NAMED));
    let mut named: Vec<String> = claims
        .iter()
        .map(|claim| format!("{} {} ({})", claim.service, size(claim.bytes), claim.why))
        .collect();
    if !others.is_empty() {
        let bytes = others.iter().map(|claim| claim.bytes).sum();
        named.push(format!("{} others {}", others.len(), size(bytes)));
    }
    Some(format!(
        "not all goals can hold: the services are to have {} on the {tier} tier, which has {} for them ({} less {} that stay free): {}; {remedy}",
        size(all),
        size(room),
        size(memory.bytes),
        size(kept),
        named.join(", ")
    ))
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}
