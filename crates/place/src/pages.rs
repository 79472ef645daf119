//! Which pages of the services of a host move in one control round.
//!
//! The function is pure: the agent calls it with what the kernel says, a simulator with what it models. The bounds
//! are those of Fair Share in the Vistara paper (section V-H): a service over `local_high` gives its coldest pages
//! to the slow tier, and while a service is under `local_low` its neighbours give theirs, so that it finds room.

/// Where a service may keep its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierRule {
    /// On both tiers.
    OptIn,
    /// On the fast tier alone.
    OptOut,
    /// On the slow tier as far as possible.
    Background,
}

/// Bounds of the share of a service's bytes that lie on the fast tier, each from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalBounds {
    /// The neighbours give way below this share.
    pub low: f64,
    /// The service gives way above this share.
    pub high: f64,
}

/// What is wanted of one service.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServicePolicy {
    /// Where it may keep its pages.
    pub rule: TierRule,
    /// The bounds of its share of the fast tier; only of meaning with [`TierRule::OptIn`].
    pub local: Option<LocalBounds>,
}

/// What was seen of one service.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServiceBytes {
    /// Bytes on the fast tier.
    pub fast: u64,
    /// Bytes on the slow tier.
    pub slow: u64,
    /// Percent of the last ten seconds in which a task of the service waited for memory.
    pub pressure: f64,
}

impl ServiceBytes {
    /// The share of its bytes on the fast tier, from 0 to 1; 1 for a service without bytes.
    #[must_use]
    pub fn local_share(&self) -> f64 {
        let all = self.fast + self.slow;
        if all == 0 { 1.0 } else { self.fast as f64 / all as f64 }
    }

    /// Bytes on the fast tier above (or, negative, below) `share` of all of its bytes.
    fn above(&self, share: f64) -> f64 {
        self.fast as f64 - share * (self.fast + self.slow) as f64
    }
}

/// What limits the moves of one round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundLimits {
    /// Bytes that are free on the fast tier, beyond what the kernel keeps back.
    pub fast_free: u64,
    /// Bytes that are demoted in one round at most, of all services together.
    pub step: u64,
    /// A service under more pressure than this percentage is left alone.
    pub pressure: f64,
}

/// What is to be done about one service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageMove {
    /// Demote so many bytes of the coldest pages.
    Demote {
        /// Index of the service.
        service: usize,
        /// Bytes.
        bytes: u64,
        /// Why.
        reason: DemoteReason,
    },
    /// Bring back what lies on the slow tier against an opt-out.
    BringBack {
        /// Index of the service.
        service: usize,
        /// Bytes that lie there.
        bytes: u64,
    },
}

/// Why pages of a service go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoteReason {
    /// The service is over its own `local_high`.
    OverHigh,
    /// The service belongs on the slow tier.
    Background,
    /// A neighbour, named by its index, is under its `local_low` and finds no free memory.
    MakesRoom {
        /// Index of the neighbour.
        for_service: usize,
    },
}

/// Decides the moves of one control round. `policies` and `seen` are of the same services in the same order.
///
/// # Panics
/// If the two differ in length.
#[must_use]
pub fn decide(policies: &[ServicePolicy], seen: &[ServiceBytes], limits: &RoundLimits) -> Vec<PageMove> {
    assert_eq!(policies.len(), seen.len(), "each service has one policy and one observation");
    let mut moves = bring_back(policies, seen);
    let mut left = limits.step;
    let mut demoted = vec![0; seen.len()];
    let mut demote = |service: usize, wanted: f64, reason, demoted: &mut Vec<u64>| {
        if seen[service].pressure > limits.pressure {
            return 0;
        }
        let bytes = (wanted.max(0.0).round() as u64).min(left).min(seen[service].fast - demoted[service]);
        if bytes > 0 {
            left -= bytes;
            demoted[service] += bytes;
            moves.push(PageMove::Demote { service, bytes, reason });
        }
        bytes
    };
    for (service, (policy, bytes)) in policies.iter().zip(seen).enumerate() {
        match (policy.rule, policy.local) {
            (TierRule::Background, _) => {
                demote(service, bytes.fast as f64, DemoteReason::Background, &mut demoted);
            }
            (TierRule::OptIn, Some(local)) => {
                demote(service, bytes.above(local.high), DemoteReason::OverHigh, &mut demoted);
            }
            (TierRule::OptIn | TierRule::OptOut, _) => {}
        }
    }
    for (needy, missing) in missing_room(policies, seen, limits.fast_free) {
        let mut missing = missing;
        for donor in donors(policies, seen, needy) {
            let spare = spare_bytes(&policies[donor], &seen[donor]) - demoted[donor] as f64;
            let reason = DemoteReason::MakesRoom { for_service: needy };
            missing -= demote(donor, spare.min(missing), reason, &mut demoted) as f64;
        }
    }
    moves
}

/// Opted-out services with bytes on the slow tier.
fn bring_back(policies: &[ServicePolicy], seen: &[ServiceBytes]) -> Vec<PageMove> {
    let broken = |(service, (policy, bytes)): (usize, (&ServicePolicy, &ServiceBytes))| {
        (policy.rule == TierRule::OptOut && bytes.slow > 0)
            .then_some(PageMove::BringBack { service, bytes: bytes.slow })
    };
    policies.iter().zip(seen).enumerate().filter_map(broken).collect()
}

/// Services under their `local_low`, with the bytes that they lack beside what is free.
fn missing_room(policies: &[ServicePolicy], seen: &[ServiceBytes], fast_free: u64) -> Vec<(usize, f64)> {
    let mut free = fast_free as f64;
    let mut missing = Vec::new();
    for (service, (policy, bytes)) in policies.iter().zip(seen).enumerate() {
        let Some(local) = policy.local.filter(|_| policy.rule == TierRule::OptIn) else { continue };
        let lacks = -bytes.above(local.low);
        if lacks > 0.0 {
            let found = lacks.min(free);
            free -= found;
            missing.push((service, lacks - found));
        }
    }
    missing
}

/// Bytes that a service can give to a neighbour without falling under its own `local_low`.
fn spare_bytes(policy: &ServicePolicy, bytes: &ServiceBytes) -> f64 {
    match policy.rule {
        TierRule::OptOut => 0.0,
        TierRule::Background => bytes.fast as f64,
        TierRule::OptIn => bytes.above(policy.local.map_or(0.0, |local| local.low)).max(0.0),
    }
}

/// The neighbours of `needy` with bytes to give, the one with the most first.
fn donors(policies: &[ServicePolicy], seen: &[ServiceBytes], needy: usize) -> Vec<usize> {
    let spare = |service: usize| spare_bytes(&policies[service], &seen[service]);
    let mut donors: Vec<usize> =
        (0..seen.len()).filter(|service| *service != needy && spare(*service) > 0.0).collect();
    donors.sort_by(|a, b| spare(*b).total_cmp(&spare(*a)).then(a.cmp(b)));
    donors
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn opt_in(low: f64, high: f64) -> ServicePolicy {
        ServicePolicy { rule: TierRule::OptIn, local: Some(LocalBounds { low, high }) }
    }

    fn bytes(fast: u64, slow: u64) -> ServiceBytes {
        ServiceBytes { fast: fast * MIB, slow: slow * MIB, pressure: 0.0 }
    }

    const LIMITS: RoundLimits = RoundLimits { fast_free: 0, step: 1 << 40, pressure: 10.0 };

    #[test]
    fn a_service_over_its_high_bound_gives_what_is_over() {
        let moves = decide(&[opt_in(0.4, 0.6)], &[bytes(100, 0)], &LIMITS);
        assert_eq!(moves, [PageMove::Demote { service: 0, bytes: 40 * MIB, reason: DemoteReason::OverHigh }]);
    }

    #[test]
    fn a_service_within_its_bounds_is_left_alone() {
        assert_eq!(decide(&[opt_in(0.4, 0.6)], &[bytes(50, 50)], &LIMITS), []);
    }

    #[test]
    fn the_neighbour_with_most_to_give_makes_room_for_a_service_under_its_low_bound() {
        let policies = [opt_in(0.8, 1.0), opt_in(0.2, 1.0), opt_in(0.5, 1.0)];
        let moves = decide(&policies, &[bytes(40, 60), bytes(90, 10), bytes(60, 0)], &LIMITS);
        let reason = DemoteReason::MakesRoom { for_service: 0 };
        assert_eq!(moves, [PageMove::Demote { service: 1, bytes: 40 * MIB, reason }]);
    }

    #[test]
    fn free_memory_is_room_enough() {
        let limits = RoundLimits { fast_free: 40 * MIB, ..LIMITS };
        assert_eq!(
            decide(&[opt_in(0.8, 1.0), opt_in(0.2, 1.0)], &[bytes(40, 60), bytes(90, 10)], &limits),
            []
        );
    }

    #[test]
    fn an_opted_out_service_with_bytes_on_the_slow_tier_gets_them_back_and_never_gives() {
        let out = ServicePolicy { rule: TierRule::OptOut, local: None };
        let moves = decide(&[out, opt_in(0.9, 1.0)], &[bytes(50, 20), bytes(10, 90)], &LIMITS);
        assert_eq!(moves, [PageMove::BringBack { service: 0, bytes: 20 * MIB }]);
    }

    #[test]
    fn a_service_under_pressure_is_left_alone() {
        let pressed = ServiceBytes { pressure: 11.0, ..bytes(100, 0) };
        assert_eq!(decide(&[opt_in(0.4, 0.6)], &[pressed], &LIMITS), []);
    }

    fn any_service() -> impl Strategy<Value = (ServicePolicy, ServiceBytes)> {
        let rule = prop_oneof![Just(TierRule::OptIn), Just(TierRule::OptOut), Just(TierRule::Background)];
        let local = proptest::option::of((0.0..1.0f64, 0.0..1.0f64))
            .prop_map(|pair| pair.map(|(a, b)| LocalBounds { low: a.min(b), high: a.max(b) }));
        let seen = (0..1u64 << 40, 0..1u64 << 40, 0.0..20.0f64)
            .prop_map(|(fast, slow, pressure)| ServiceBytes { fast, slow, pressure });
        (rule, local, seen).prop_map(|(rule, local, seen)| (ServicePolicy { rule, local }, seen))
    }

    proptest! {
        #[test]
        fn no_round_moves_more_than_its_step_or_than_a_service_has(
            services in proptest::collection::vec(any_service(), 0..8),
            fast_free in 0..1u64 << 40,
            step in 0..1u64 << 40,
        ) {
            let (policies, seen): (Vec<_>, Vec<_>) = services.into_iter().unzip();
            let limits = RoundLimits { fast_free, step, pressure: 10.0 };
            let mut demoted = vec![0; seen.len()];
            for change in decide(&policies, &seen, &limits) {
                match change {
                    PageMove::Demote { service, bytes, .. } => {
                        prop_assert!(policies[service].rule != TierRule::OptOut);
                        prop_assert!(seen[service].pressure <= 10.0);
                        demoted[service] += bytes;
                    }
                    PageMove::BringBack { service, bytes } => {
                        prop_assert!(policies[service].rule == TierRule::OptOut && bytes == seen[service].slow);
                    }
                }
            }
            prop_assert!(demoted.iter().sum::<u64>() <= step);
            prop_assert!(demoted.iter().zip(&seen).all(|(bytes, seen)| *bytes <= seen.fast));
        }
    }
}
