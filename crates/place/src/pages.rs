//! Which pages of the services of a host move in one control round.
//!
//! The function is pure: the agent calls it with what the kernel says, a simulator with what it models, and a record
//! of a run replays to the same decisions ([`replay`]). The bounds are those of Fair Share in the Vistara paper (section V-H): a service over
//! `local_high` gives its coldest pages to the slow tier, and while a service is under `local_low` its neighbours give
//! theirs, so that it finds room. The kernel fills that room with pages that are used. A service that is still under `local_low` a round
//! later gets other pages back, because the kernel may have demoted what nobody uses.
//!
//! What a round may move is divided among the services in proportion to what each has too much, too little or to give. A service that can
//! move less leaves the rest to the others. How much that is follows from the machine: [`Link`] bounds all services together, [`Pace`] each.
//!
//! Of very many services a round may look at some in turn. Those that wait for theirs stay as they are, and so does what the rounds before
//! left of them. [`Pace`] is then that of the time between two looks.
//!
//! Pages that go down may come back at once, because the kernel promotes what is used and knows no bounds of services. Two rules of
//! Equilibria (Zhao et al., arXiv 2602.08800) keep that small: the kernel is told to promote less while it brings services over their
//! bounds, by the fourth power of bound over usage, and half as much goes down of a service whose pages return.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Where a service may keep its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TierRule {
    /// On both tiers.
    OptIn,
    /// On the fast tier alone.
    OptOut,
    /// On the slow tier as far as possible.
    Background,
}

impl TierRule {
    /// As a policy has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OptIn => "opt-in",
            Self::OptOut => "opt-out",
            Self::Background => "background",
        }
    }
}

/// Bounds of the share of a service's bytes that lie on the fast tier, each from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalBounds {
    /// The neighbours give way below this share, and pages of the service come up.
    pub low: f64,
    /// The service gives way above this share.
    pub high: f64,
}

/// What is wanted of one service.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServicePolicy {
    /// Where it may keep its pages.
    pub rule: TierRule,
    /// The bounds of its share of the fast tier; only of meaning with [`TierRule::OptIn`].
    pub local: Option<LocalBounds>,
    /// Whether its page cache goes to the slow tier.
    pub slow_cache: bool,
}

impl ServicePolicy {
    /// The share of its bytes that may lie on the fast tier; [`None`] for no bound.
    fn bound(&self) -> Option<f64> {
        match self.rule {
            TierRule::OptIn => self.local.map(|local| local.high),
            TierRule::Background => Some(0.0),
            TierRule::OptOut => None,
        }
    }
}

/// What was seen of one service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServiceBytes {
    /// Bytes on the fast tier.
    pub fast: u64,
    /// Bytes on the slow tier.
    pub slow: u64,
    /// Bytes of `fast` that are page cache of files.
    pub fast_cache: u64,
    /// Percent of the last ten seconds in which a task of the service waited for memory.
    pub pressure: f64,
    /// Pages that the service read again since the round before, after they had been taken from it.
    pub refaults: u64,
    /// Bytes of it that the kernel promoted in a round; 0 where the kernel does not count them by cgroup.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub promoted: u64,
    /// Whether nothing of it went down when the round before asked for it. It is asked for one page then, so that it takes nothing from others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_stuck: bool,
    /// Whether nothing of it could be moved up lately, so that it is not tried in this round.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rests: bool,
    /// Whether this round does not look at it: all of this is what an earlier round saw, and nothing of it moves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
    /// Rounds just before this one that did not look at it. `refaults` and `promoted` are means over these and this one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unseen: u64,
    /// Whether the kernel says that it has no huge page: the largest that moves is one of [`RoundLimits::page`] then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_small_pages: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl ServiceBytes {
    /// The share of its bytes on the fast tier, from 0 to 1; 1 for a service without bytes.
    #[must_use]
    pub fn local_share(&self) -> f64 {
        let all = self.fast + self.slow;
        if all == 0 { 1.0 } else { self.fast as f64 / all as f64 }
    }

    /// Bytes that the kernel promoted since the last look.
    const fn promoted_since(&self) -> u64 {
        self.promoted.saturating_mul(self.unseen.saturating_add(1))
    }

    /// Bytes on the fast tier above (or, negative, below) `share` of all of its bytes.
    fn above(&self, share: f64) -> f64 {
        self.fast as f64 - share * (self.fast + self.slow) as f64
    }
}

/// One service in a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceView {
    /// Its name, by which it is known from round to round.
    pub name: String,
    /// What is wanted of it.
    pub policy: ServicePolicy,
    /// What was seen of it.
    pub seen: ServiceBytes,
}

/// What one round moves of a service at most. The next rounds see first what the service says to it. Parts are millionths, so that a record
/// has them to the last bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pace {
    /// Of what it has too much, or too little.
    pub part_ppm: u32,
    /// Of all its bytes: so much a round moves all the same, so that the last of it comes.
    pub least_ppm: u32,
}

impl Pace {
    /// Seconds after which half of it is left: those of the average in which what a service suffers is seen (PSI, `avg10`).
    const HALF_S: f64 = 10.0;
    /// The part of its bytes that goes in a second at least.
    const LEAST_A_SECOND: f64 = 0.005;

    /// Of rounds that are so many seconds apart.
    #[must_use]
    pub fn of(period_s: f64) -> Self {
        let ppm = |part: f64| (part.min(1.0) * 1e6).round() as u32;
        let part = 1.0 - (-period_s / Self::HALF_S).exp2();
        Self { part_ppm: ppm(part), least_ppm: ppm(Self::LEAST_A_SECOND * period_s) }
    }

    /// Bytes of a service that move of those that it has too much, or too little.
    fn bytes(self, wants: f64, all: u64) -> f64 {
        (f64::from(self.part_ppm) * wants).max(f64::from(self.least_ppm) * all as f64) / 1e6
    }
}

/// How fast pages get from one tier to the other, in bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// What the slow tier carries, as far as it is known.
    pub bandwidth: Option<f64>,
    /// What moves came to, once some were measured.
    pub moved: Option<f64>,
    /// Bytes, and the seconds in which they moved, that are too few to tell.
    pending: (u64, f64),
}

impl Link {
    /// The part of the slow tier's bandwidth that moves may take each way. Nine tenths are left to the services.
    pub const PART: f64 = 0.1;
    /// Bytes that a round moves while none were measured.
    pub const FIRST: u64 = 32 << 20;

    /// A link of which so much is known by the machine's word.
    #[must_use]
    pub const fn new(bandwidth: Option<f64>) -> Self {
        Self { bandwidth, moved: None, pending: (0, 0.0) }
    }

    /// Takes in that so many bytes moved in so many seconds. Few wait for more, because their time is that of calls.
    pub fn measure(&mut self, bytes: u64, seconds: f64) {
        const FEWEST: u64 = 1 << 20;
        let (bytes, seconds) = (self.pending.0 + bytes, self.pending.1 + seconds);
        if bytes < FEWEST {
            self.pending = (bytes, seconds);
            return;
        }
        self.pending = (0, 0.0);
        if seconds <= 0.0 {
            return;
        }
        let rate = bytes as f64 / seconds;
        self.moved = Some(self.moved.map_or(rate, |before| f64::midpoint(before, rate)));
    }

    /// Bytes a second that may move each way, once moves were measured; [`None`] while nothing is known. Where the bandwidth is not known, it
    /// is at least what moves came to.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        let part = self.bandwidth.or(self.moved)? * Self::PART;
        Some(part.min(self.moved.unwrap_or(f64::INFINITY)))
    }

    /// Bytes that a round of so many seconds may move each way. They take a round's time at most. The first that move are few, because it is
    /// not known how long they take.
    #[must_use]
    pub fn step(&self, period_s: f64) -> u64 {
        let steady = self.steady_step(period_s);
        if self.moved.is_some() { steady } else { steady.min(Self::FIRST) }
    }

    /// The same as if moves had been measured; [`Self::FIRST`] while nothing is known. It is 4 KiB at least: where pages are larger, the caller
    /// makes it one.
    #[must_use]
    pub fn steady_step(&self, period_s: f64) -> u64 {
        self.rate().map_or(Self::FIRST, |rate| ((rate * period_s) as u64).max(USUAL_PAGE))
    }
}

/// What limits the moves of one round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundLimits {
    /// Bytes of the fast tier.
    pub fast_bytes: u64,
    /// Bytes that are free on the fast tier, beyond what the kernel keeps back.
    pub fast_free: u64,
    /// Bytes that are free on the slow tier: more would be evicted in place of demoted.
    pub slow_free: u64,
    /// Bytes that are demoted in one round at most, of all services together.
    pub step: u64,
    /// A service under more pressure than this percentage is left alone.
    pub pressure: f64,
    /// A service that read more pages again than this in one round is left alone.
    pub refaults: u64,
    /// Proactive demotion begins when less than this share of the fast tier is free; 0 for never.
    pub free_low: f64,
    /// It ends when this share is free.
    pub free_high: f64,
    /// Bytes that are moved up in one round at most, of all services under their `local_low` together; 0 where nothing can be moved up.
    #[serde(default)]
    pub promote: u64,
    /// Free bytes of the fast tier that moves up leave.
    #[serde(default)]
    pub fast_kept: u64,
    /// Bytes of the largest page: a move takes the last one whole.
    #[serde(default)]
    pub largest_page: u64,
    /// Bytes of the smallest page of the host, in which moves are counted.
    #[serde(default = "usual_page", skip_serializing_if = "is_usual")]
    pub page: u64,
    /// What a round moves of one service at most; [`None`] for no such bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<Pace>,
}

/// Bytes of the smallest page of most hosts. Records leave it out.
const USUAL_PAGE: u64 = 4096;

const fn usual_page() -> u64 {
    USUAL_PAGE
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_usual(page: &u64) -> bool {
    *page == USUAL_PAGE
}

/// What is to be done about one service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
    /// Move so many bytes up, because the service is under its `local_low`.
    Promote {
        /// Index of the service.
        service: usize,
        /// Bytes.
        bytes: u64,
    },
}

impl PageMove {
    /// The index of the service whose pages move.
    #[must_use]
    pub const fn service(&self) -> usize {
        match *self {
            Self::Demote { service, .. }
            | Self::BringBack { service, .. }
            | Self::Promote { service, .. } => service,
        }
    }
}

/// Why pages of a service go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DemoteReason {
    /// The service is over its own `local_high`.
    OverHigh,
    /// The service belongs on the slow tier.
    Background,
    /// They are page cache, which belongs on the slow tier.
    PageCache,
    /// A neighbour, named by its index, is under its `local_low` and finds no free memory.
    MakesRoom {
        /// Index of the neighbour.
        for_service: usize,
    },
    /// Too little of the fast tier is free.
    Watermark,
}

/// Why pages of a service stay that would have gone down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HoldReason {
    /// Its tasks wait for memory.
    Pressure,
    /// It reads again what was taken from it.
    Refaults,
    /// The slow tier is full.
    SlowFull,
    /// Its part of what a round may move is less than a page: its turn comes in a later one.
    Waits,
}

/// A service that is left alone in this round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Index of the service.
    pub service: usize,
    /// Why.
    pub reason: HoldReason,
}

/// What a round decides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// What moves.
    pub moves: Vec<PageMove>,
    /// Services whose pages would have moved, and stay.
    pub holds: Vec<Hold>,
    /// Services half or more of whose pages came back after they had gone down.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Return>,
    /// Bytes that the kernel is to promote by itself until the next round; [`None`] for as many as it may without the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_promotes: Option<u64>,
}

/// Pages of a service that the kernel promoted soon after they had gone down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Return {
    /// Index of the service.
    pub service: usize,
    /// Bytes that came back since the round before. Which pages came up is not known, so that it may be less.
    pub bytes: u64,
}

impl RoundLimits {
    /// Bytes that a service under its `local_low` finds on the fast tier.
    fn room(&self) -> f64 {
        match self.promote {
            0 => self.fast_free as f64,
            _ => self.fast_free as f64 - (self.free_low * self.fast_bytes as f64).max(self.fast_kept as f64),
        }
    }

    /// Bytes of the largest page that a move of a service may take.
    const fn largest_of(&self, seen: &ServiceBytes) -> u64 {
        if seen.has_small_pages || self.largest_page < self.page { self.page } else { self.largest_page }
    }

    /// Why a service that suffers is left alone; [`None`] of one that does not.
    #[must_use]
    pub fn suffering(&self, seen: &ServiceBytes) -> Option<HoldReason> {
        match *seen {
            ServiceBytes { pressure, .. } if pressure > self.pressure => Some(HoldReason::Pressure),
            ServiceBytes { refaults, .. } if refaults > self.refaults => Some(HoldReason::Refaults),
            _ => None,
        }
    }

    /// How far a service is from suffering: 1 for one that waits for nothing and reads nothing again, 0 where it is left alone.
    fn ease(&self, seen: &ServiceBytes) -> f64 {
        let left = |seen: f64, limit: f64| if seen > 0.0 { (1.0 - seen / limit).max(0.0) } else { 1.0 };
        left(seen.pressure, self.pressure) * left(seen.refaults as f64, self.refaults as f64)
    }
}

/// What one round leaves to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Past {
    /// How often the step of a service was halved, because it suffered or its pages returned.
    halvings: BTreeMap<String, u32>,
    /// Whether proactive demotion is under way.
    refilling: bool,
    /// Services that were under their `local_low`.
    under: BTreeSet<String>,
    /// Bytes less than a page that services are owed of what goes down, and up.
    owed_down: BTreeMap<String, u64>,
    owed_up: BTreeMap<String, u64>,
    /// Bytes that went down of late: those of each round count half as much in the next that looks at the service.
    lately_down: BTreeMap<String, u64>,
    /// Bytes that the kernel is to promote between two rounds.
    kernel_promotes: Option<u64>,
}

/// The step of a service is halved so often at most.
const MOST_HALVINGS: u32 = 6;

impl Past {
    /// How often the step of each service is halved, and whether it is left alone. A round in which it suffers or its pages return halves
    /// its step, another doubles it again.
    fn back_off(
        &mut self,
        services: &[ServiceView],
        limits: &RoundLimits,
        returned: &[u64],
    ) -> Vec<(u32, Option<HoldReason>)> {
        let before = std::mem::take(&mut self.halvings);
        let mut back_off = |(service, returned): (&ServiceView, &u64)| {
            let halvings = before.get(&service.name).copied().unwrap_or(0);
            let reason = limits.suffering(&service.seen).filter(|_| !service.seen.waits);
            let next = match reason.is_some() || *returned > 0 {
                _ if service.seen.waits => halvings,
                true => (halvings + 1).min(MOST_HALVINGS),
                false => halvings.saturating_sub(1),
            };
            self.halvings.extend((next > 0).then(|| (service.name.clone(), next)));
            (if *returned > 0 { next } else { halvings }, reason)
        };
        services.iter().zip(returned).map(&mut back_off).collect()
    }

    /// Bytes of each service that came back; 0 where it was less than half of what went down of late.
    fn returned(&self, services: &[ServiceView]) -> Vec<u64> {
        let returned = |view: &ServiceView| {
            let down = self.lately_down.get(&view.name).copied().unwrap_or(0);
            let bytes = down.min(view.seen.promoted_since());
            if bytes >= down.div_ceil(2) && !view.seen.waits { bytes } else { 0 }
        };
        services.iter().map(returned).collect()
    }

    fn note_down(&mut self, services: &[ServiceView], given: &[u64]) {
        let before = std::mem::take(&mut self.lately_down);
        for (service, given) in services.iter().zip(given) {
            let down = before.get(&service.name).copied().unwrap_or(0);
            let bytes = if service.seen.waits { down } else { down / 2 + given };
            self.lately_down.extend((bytes > 0).then(|| (service.name.clone(), bytes)));
        }
    }

    /// What the kernel is to promote. It knows one limit for all services: each asks for what it got, those over their bound for the part
    /// (bound / usage)^4 of it, the others for twice as much. Once no promotion brings a service over its bound, the limit doubles
    /// until it is gone.
    fn throttle(&mut self, services: &[ServiceView], limits: &RoundLimits, returned: &[u64]) -> Option<u64> {
        const LEAST_OF_STEP: u64 = 64;
        let (mut brings_over, mut wanted) = (false, 0.0);
        for (ServiceView { policy, seen, .. }, returned) in services.iter().zip(returned) {
            let part = policy.bound().map_or(1.0, |bound| bound / seen.local_share()).min(1.0);
            let is_over = part < 1.0 && seen.promoted > 0;
            brings_over |= is_over;
            let asks = match is_over {
                true if *returned > 0 => part.powi(4) / 2.0,
                true => part.powi(4),
                false => 2.0,
            };
            wanted += seen.promoted as f64 * asks;
        }
        let before = self.kernel_promotes;
        self.kernel_promotes = match brings_over {
            true => Some((wanted as u64).min(before.unwrap_or(u64::MAX)).max(limits.step / LEAST_OF_STEP)),
            false => before.map(|bytes| bytes.saturating_mul(2)).filter(|bytes| *bytes < limits.step),
        };
        self.kernel_promotes
    }

    /// Bytes that proactive demotion wants.
    fn refill(&mut self, limits: &RoundLimits) -> f64 {
        let share = |share: f64| share * limits.fast_bytes as f64 - limits.fast_free as f64;
        self.refilling = match self.refilling {
            true => share(limits.free_high) > 0.0 && limits.free_low > 0.0,
            false => share(limits.free_low) > 0.0,
        };
        if self.refilling { share(limits.free_high).max(0.0) } else { 0.0 }
    }
}

/// Decides the moves of one control round.
#[must_use]
pub fn decide(services: &[ServiceView], limits: &RoundLimits, past: &mut Past) -> Decision {
    let returned = past.returned(services);
    let (halvings, reasons) = past.back_off(services, limits, &returned).into_iter().unzip();
    let kernel_promotes = past.throttle(services, limits, &returned);
    let returns = (0..).zip(&returned).filter(|(_, bytes)| **bytes > 0);
    let returns = returns.map(|(service, bytes)| Return { service, bytes: *bytes }).collect();
    let refill = past.refill(limits);
    let mut round = Round {
        services,
        limits,
        left: limits.step.min(limits.slow_free),
        is_slow_full: limits.slow_free < limits.page,
        halvings,
        returned,
        reasons,
        given: vec![0; services.len()],
        is_held: vec![false; services.len()],
        decision: Decision { moves: bring_back(services), holds: Vec::new(), returns, kernel_promotes },
    };
    round.take_excess(&mut past.owed_down);
    let needy = needy(services);
    let donors = donors(services);
    let mut room = limits.room().max(0.0);
    for Needy { service, lacks } in &needy {
        let moved = lacks.min(room);
        room -= moved;
        round.take_from(&donors, lacks - moved, DemoteReason::MakesRoom { for_service: *service });
    }
    // The kernel has a round to promote what is used.
    let name = |needy: &Needy| services[needy.service].name.clone();
    round.promote(needy.iter().filter(|needy| past.under.contains(&name(needy))), &mut past.owed_up);
    let waits = services.iter().filter(|view| view.seen.waits && past.under.contains(&view.name));
    past.under = needy.iter().map(name).chain(waits.map(|view| view.name.clone())).collect();
    let given: u64 = round.given.iter().sum();
    round.take_from(&donors, refill - given as f64, DemoteReason::Watermark);
    past.note_down(services, &round.given);
    round.decision
}

/// A round that is being decided.
struct Round<'s> {
    services: &'s [ServiceView],
    limits: &'s RoundLimits,
    /// Bytes that may go down yet.
    left: u64,
    is_slow_full: bool,
    /// Of each service, how often its step is halved.
    halvings: Vec<u32>,
    /// Of each service, bytes that came back after they had gone down.
    returned: Vec<u64>,
    /// Of each service, why it is left alone.
    reasons: Vec<Option<HoldReason>>,
    /// Of each service, bytes that go down.
    given: Vec<u64>,
    /// Of each service, whether the decision says that it is held.
    is_held: Vec<bool>,
    decision: Decision,
}

impl Round<'_> {
    fn hold(&mut self, service: usize, reason: HoldReason) {
        if !std::mem::replace(&mut self.is_held[service], true) {
            self.decision.holds.push(Hold { service, reason });
        }
    }

    /// Why pages of a service do not go down.
    fn held(&self, service: usize) -> Option<HoldReason> {
        self.reasons[service].or(self.is_slow_full.then_some(HoldReason::SlowFull))
    }

    /// Bytes of a service that may move at most, of those that it has too much, too little or to give.
    fn step(&self, service: usize, wants: f64) -> u64 {
        let Self { limits, halvings, returned, .. } = self;
        let seen = &self.services[service].seen;
        let whole = match limits.pace {
            None => limits.step,
            Some(pace) => (pace.bytes(wants, seen.fast + seen.slow) * limits.ease(seen)) as u64,
        };
        // More goes down than the kernel promotes, however much returns: a bound is reached all the same.
        let least =
            if returned[service] > 0 { whole.min(seen.promoted_since().saturating_mul(2)) } else { 0 };
        let step = (whole >> halvings[service]).max(least);
        // The kernel moves whole pages.
        if limits.pace.is_some() { step.max(limits.largest_of(seen)) } else { step }
    }

    /// Bytes of a service that may go down at most.
    fn step_down(&self, service: usize, wants: f64) -> u64 {
        let step = self.step(service, wants);
        if self.services[service].seen.is_stuck { step.min(self.limits.page) } else { step }
    }

    /// Divides the step among the services that have too much on the fast tier by their own rules.
    fn take_excess(&mut self, owed: &mut BTreeMap<String, u64>) {
        let mut claims = Vec::new();
        for (service, view) in self.services.iter().enumerate() {
            let wants: u64 = excess(view).iter().map(|(_, bytes)| bytes).sum();
            match self.held(service) {
                _ if wants == 0 || view.seen.waits => {}
                Some(reason) => self.hold(service, reason),
                None => {
                    let most = wants.min(self.step_down(service, wants as f64));
                    claims.push(Claim { service, wants, most });
                }
            }
        }
        let page = self.limits.page;
        for (service, mut part) in divide(self.left, page, claims, self.services, owed) {
            if part == 0 {
                self.hold(service, HoldReason::Waits);
            }
            for (reason, bytes) in excess(&self.services[service]) {
                part -= self.demote(service, bytes.min(part) as f64, u64::MAX, reason);
            }
        }
    }

    /// Bytes that go down of `wanted`, if the service gives `most` in this round at most.
    fn demote(&mut self, service: usize, wanted: f64, most: u64, reason: DemoteReason) -> u64 {
        let given = self.given[service];
        let wanted = (wanted.max(0.0).round() as u64).min(self.services[service].seen.fast - given);
        if let Some(reason) = self.held(service).filter(|_| wanted > 0) {
            self.hold(service, reason);
            return 0;
        }
        let bytes = wanted.min(self.left).min(most.saturating_sub(given));
        if bytes > 0 {
            self.left -= bytes;
            self.given[service] += bytes;
            self.decision.moves.push(PageMove::Demote { service, bytes, reason });
        }
        bytes
    }

    /// Moves up what services lack, as far as there is room, and never so much that one comes over its `local_high`: a page at the end goes
    /// up whole.
    fn promote<'n>(&mut self, needy: impl Iterator<Item = &'n Needy>, owed: &mut BTreeMap<String, u64>) {
        let limits = self.limits;
        let page = limits.page;
        let whole = |bytes: f64| bytes.max(0.0) as u64 / page * page;
        let claim = |&Needy { service, lacks }: &Needy| {
            let ServiceView { policy, seen, .. } = &self.services[service];
            let wants = whole(lacks + (page - 1) as f64);
            let last = limits.largest_of(seen);
            let last = if last > page { last as f64 } else { 0.0 };
            let below_high = -seen.above(policy.local.map_or(1.0, |local| local.high)) - last;
            let most = wants.min(whole(below_high)).min(seen.slow).min(self.step(service, lacks));
            let is_tried = self.reasons[service].is_none() && !seen.rests && most > 0;
            is_tried.then_some(Claim { service, wants, most })
        };
        let most = limits.promote.min(whole(limits.room()));
        if most < page {
            return;
        }
        for (service, bytes) in divide(most, page, needy.filter_map(claim).collect(), self.services, owed) {
            match bytes {
                0 => self.hold(service, HoldReason::Waits),
                _ => self.decision.moves.push(PageMove::Promote { service, bytes }),
            }
        }
    }

    /// Takes `missing` bytes from the services that have them to give, in proportion to what each has. The one with the most gives what is
    /// left of whole pages.
    fn take_from(&mut self, donors: &[usize], missing: f64, reason: DemoteReason) {
        let missing = missing.max(0.0).round() as u64;
        if missing == 0 || self.left == 0 && !self.is_slow_full {
            return;
        }
        let mut claims = Vec::new();
        for &service in donors {
            let (spare, given) = (spare_bytes(&self.services[service]), self.given[service]);
            let wants = (spare.round() as u64).min(self.services[service].seen.fast).saturating_sub(given);
            match self.held(service) {
                _ if wants == 0 => {}
                Some(why) => self.hold(service, why),
                None => {
                    let most = wants.min(self.step_down(service, spare).saturating_sub(given));
                    claims.push(Claim { service, wants, most });
                }
            }
        }
        let missing = missing.min(self.left);
        let most = claims.iter().map(|claim| (claim.service, claim.most)).collect::<Vec<_>>();
        let parts = divide(missing, self.limits.page, claims, self.services, &mut BTreeMap::new());
        let mut rest = missing - parts.values().sum::<u64>();
        for (service, most) in most.into_iter().rev() {
            let more = rest.min(most - parts[&service]);
            rest -= more;
            self.demote(service, (parts[&service] + more) as f64, u64::MAX, reason);
        }
    }
}

/// What a service wants of a round.
struct Claim {
    service: usize,
    wants: u64,
    /// Bytes that it can take at most.
    most: u64,
}

/// Divides `bytes` among claims, in proportion to what each wants. What one cannot take goes to the others. A part is all that its claim can
/// take, or whole pages of `page` bytes; what it lacks of the next page is `owed` to the service in the next round. Returns the parts by service.
fn divide(
    bytes: u64,
    page: u64,
    mut claims: Vec<Claim>,
    services: &[ServiceView],
    owed: &mut BTreeMap<String, u64>,
) -> BTreeMap<usize, u64> {
    let before = std::mem::take(owed);
    let waits = services.iter().filter(|view| view.seen.waits && !before.is_empty());
    owed.extend(waits.filter_map(|view| Some((view.name.clone(), *before.get(&view.name)?))));
    let mut wanted: u128 = claims.iter().map(|claim| u128::from(claim.wants)).sum();
    let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
    // Those that can take the smallest part of what they want leave the rest to those behind them.
    claims.sort_by_key(|claim| claim.service);
    claims.sort_by(|a, b| product(a.most, b.wants).cmp(&product(b.most, a.wants)));
    // Exact parts are of `left`; pages are of `unspent`.
    let (mut left, mut unspent) = (bytes, bytes);
    let mut parts = BTreeMap::new();
    for Claim { service, wants, most } in claims {
        // A byte at least, so that a page comes in the end.
        let exact = u64::try_from(product(left, wants) / wanted).unwrap_or(u64::MAX).max(1).min(most);
        wanted -= u128::from(wants);
        left = left.saturating_sub(exact);
        let name = &services[service].name;
        let due = exact + before.get(name).copied().unwrap_or(0);
        let part = if due >= most { most } else { due / page * page }.min(unspent);
        unspent -= part;
        owed.extend((part < most && due > part).then(|| (name.clone(), due - part)));
        parts.insert(service, part);
    }
    parts
}

/// Opted-out services with bytes on the slow tier.
fn bring_back(services: &[ServiceView]) -> Vec<PageMove> {
    let broken = |(service, ServiceView { policy, seen, .. }): (usize, &ServiceView)| {
        (policy.rule == TierRule::OptOut && seen.slow > 0)
            .then_some(PageMove::BringBack { service, bytes: seen.slow })
    };
    services.iter().enumerate().filter_map(broken).collect()
}

/// Bytes that a service has too much on the fast tier by its own rule, and why.
fn excess(ServiceView { policy, seen, .. }: &ServiceView) -> [(DemoteReason, u64); 2] {
    let over = match (policy.rule, policy.local) {
        (TierRule::Background, _) => (DemoteReason::Background, seen.fast),
        (TierRule::OptIn, Some(local)) => {
            (DemoteReason::OverHigh, (seen.above(local.high).max(0.0).round() as u64).min(seen.fast))
        }
        (TierRule::OptIn | TierRule::OptOut, _) => (DemoteReason::OverHigh, 0),
    };
    let has_slow_cache = policy.rule == TierRule::OptIn && policy.slow_cache;
    let cache = if has_slow_cache { seen.fast_cache.min(seen.fast - over.1) } else { 0 };
    [over, (DemoteReason::PageCache, cache)]
}

/// A service under its `local_low`.
struct Needy {
    service: usize,
    /// Bytes that it lacks on the fast tier.
    lacks: f64,
}

/// Services under their `local_low`.
fn needy(services: &[ServiceView]) -> Vec<Needy> {
    let lacking = |(service, ServiceView { policy, seen, .. }): (usize, &ServiceView)| {
        let local = policy.local.filter(|_| policy.rule == TierRule::OptIn && !seen.waits)?;
        let lacks = -seen.above(local.low);
        (lacks > 0.0).then_some(Needy { service, lacks })
    };
    services.iter().enumerate().filter_map(lacking).collect()
}

/// Services that have bytes to give, the one with the most last. None of them is under its own `local_low`.
fn donors(services: &[ServiceView]) -> Vec<usize> {
    let spare = |service: usize| spare_bytes(&services[service]);
    let is_donor = |service: &usize| spare(*service) > 0.0 && !services[*service].seen.waits;
    let mut donors: Vec<usize> = (0..services.len()).filter(is_donor).collect();
    donors.sort_by(|a, b| spare(*a).total_cmp(&spare(*b)).then(b.cmp(a)));
    donors
}

/// Bytes that a service can give to a neighbour without falling under its own `local_low`.
fn spare_bytes(ServiceView { policy, seen, .. }: &ServiceView) -> f64 {
    match policy.rule {
        TierRule::OptOut => 0.0,
        TierRule::Background => seen.fast as f64,
        TierRule::OptIn => seen.above(policy.local.map_or(0.0, |local| local.low)).max(0.0),
    }
}

/// One round of a record: what was seen, and what was decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedRound {
    /// Its number; with 1 a run begins.
    pub round: u64,
    /// The services that were there.
    pub services: Vec<ServiceView>,
    /// What limited the moves.
    pub limits: RoundLimits,
    /// What was decided.
    pub decision: Decision,
    /// What the rounds before it left, where these are not in the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub past: Option<Past>,
}

/// Decides the rounds of a record anew. Returns how many moves there were, and the first round that comes out otherwise.
#[must_use]
pub fn replay<'r>(rounds: impl IntoIterator<Item = &'r RecordedRound>) -> (usize, Option<(u64, Decision)>) {
    let (mut past, mut moves) = (Past::default(), 0);
    for recorded in rounds {
        match &recorded.past {
            Some(left) => past.clone_from(left),
            None if recorded.round == 1 => past = Past::default(),
            None => {}
        }
        let decision = decide(&recorded.services, &recorded.limits, &mut past);
        if decision != recorded.decision {
            return (moves, Some((recorded.round, decision)));
        }
        moves += decision.moves.len();
    }
    (moves, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const PAGE: u64 = USUAL_PAGE;

    fn opt_in(low: f64, high: f64) -> ServicePolicy {
        ServicePolicy { rule: TierRule::OptIn, local: Some(LocalBounds { low, high }), slow_cache: false }
    }

    fn bytes(fast: u64, slow: u64) -> ServiceBytes {
        ServiceBytes { fast: fast * MIB, slow: slow * MIB, ..ServiceBytes::default() }
    }

    const LIMITS: RoundLimits = RoundLimits {
        fast_bytes: 1 << 30,
        fast_free: 0,
        slow_free: u64::MAX,
        step: 1 << 40,
        pressure: 10.0,
        refaults: 100,
        free_low: 0.0,
        free_high: 0.0,
        promote: 0,
        fast_kept: 0,
        largest_page: 0,
        page: PAGE,
        pace: None,
    };

    fn views(policies: &[ServicePolicy], seen: &[ServiceBytes]) -> Vec<ServiceView> {
        let view = |(index, (policy, seen)): (usize, (&ServicePolicy, &ServiceBytes))| ServiceView {
            name: format!("s{index}"),
            policy: *policy,
            seen: *seen,
        };
        policies.iter().zip(seen).enumerate().map(view).collect()
    }

    fn once(policies: &[ServicePolicy], seen: &[ServiceBytes], limits: &RoundLimits) -> Decision {
        decide(&views(policies, seen), limits, &mut Past::default())
    }

    fn demote(service: usize, mib: u64, reason: DemoteReason) -> PageMove {
        PageMove::Demote { service, bytes: mib * MIB, reason }
    }

    #[test]
    fn a_service_over_its_high_bound_gives_what_is_over() {
        let decision = once(&[opt_in(0.4, 0.6)], &[bytes(100, 0)], &LIMITS);
        assert_eq!(decision.moves, [demote(0, 40, DemoteReason::OverHigh)]);
    }

    #[test]
    fn a_service_within_its_bounds_is_left_alone() {
        assert_eq!(once(&[opt_in(0.4, 0.6)], &[bytes(50, 50)], &LIMITS), Decision::default());
    }

    #[test]
    fn neighbours_make_room_in_proportion_to_what_each_has_above_its_low_bound() {
        let policies = [opt_in(0.8, 1.0), opt_in(0.2, 1.0), opt_in(0.5, 1.0)];
        let decision = once(&policies, &[bytes(40, 60), bytes(90, 10), bytes(60, 0)], &LIMITS);
        // 70 and 30 MiB above.
        let reason = DemoteReason::MakesRoom { for_service: 0 };
        assert_eq!(decision.moves, [demote(1, 28, reason), demote(2, 12, reason)]);
        // What one cannot give comes of the other.
        let stuck = ServiceBytes { is_stuck: true, ..bytes(90, 10) };
        let decision = once(&policies, &[bytes(40, 60), stuck, bytes(60, 0)], &LIMITS);
        let page = PageMove::Demote { service: 1, bytes: PAGE, reason };
        assert_eq!(decision.moves, [page, demote(2, 30, reason)]);
    }

    /// What the kernel promotes, as it is told to by the round before; bytes move as it does and as rounds decide.
    fn under_promotion(
        policy: ServicePolicy,
        limits: &RoundLimits,
        wants: u64,
        is_told: bool,
    ) -> (ServiceBytes, [u64; 2]) {
        let (mut past, mut seen, mut moved) = (Past::default(), bytes(100 << 10, 0), [0, 0]);
        let mut told = None;
        for round in 0..120 {
            let most = told.filter(|_| is_told).unwrap_or(u64::MAX);
            seen.promoted = wants.min(seen.slow).min(most);
            (seen.fast, seen.slow) = (seen.fast + seen.promoted, seen.slow - seen.promoted);
            let decision = decide(&views(&[policy], &[seen]), limits, &mut past);
            let down: u64 = decision
                .moves
                .iter()
                .map(|it| if let PageMove::Demote { bytes, .. } = it { *bytes } else { 0 })
                .sum();
            (seen.fast, seen.slow) = (seen.fast - down, seen.slow + down);
            told = decision.kernel_promotes;
            // The first minute brings it down to its bound.
            if round >= 60 {
                moved = [moved[0] + seen.promoted, moved[1] + down];
            }
        }
        (seen, moved)
    }

    #[test]
    fn a_kernel_that_is_told_to_promotes_less_over_a_bound_and_less_goes_down_again() {
        let limits = RoundLimits { pace: Some(Pace::of(2.0)), step: 8 << 30, ..LIMITS };
        for policy in
            [opt_in(0.0, 0.5), ServicePolicy { rule: TierRule::Background, local: None, slow_cache: false }]
        {
            let wants = 512 * MIB;
            let (kept, [up, down]) = under_promotion(policy, &limits, wants, true);
            let (held, [all, _]) = under_promotion(policy, &limits, wants, false);
            assert!(up * 2 < all && down.abs_diff(up) < all / 4, "{up} and {down} of {all}");
            // Also where the kernel cannot be told, more goes down than comes up.
            let bound = policy.bound().unwrap();
            for seen in [kept, held] {
                assert!(seen.local_share() < bound + 0.05, "{seen:?}");
            }
        }
    }

    #[test]
    fn what_returns_is_counted_and_half_as_much_goes_down_of_it() {
        let limits = RoundLimits { step: 16 * MIB, ..LIMITS };
        let mut past = Past::default();
        let mut round = |promoted: u64| {
            let seen = ServiceBytes { promoted: promoted * MIB, ..bytes(100, 0) };
            decide(&views(&[opt_in(0.4, 0.6)], &[seen]), &limits, &mut past)
        };
        let over = DemoteReason::OverHigh;
        assert_eq!((round(0).moves, round(7).moves), (vec![demote(0, 16, over)], vec![demote(0, 16, over)]));
        // 24 MiB went down of late, and no more than these come back.
        let decision = round(3);
        assert_eq!((decision.returns, decision.moves), (vec![], vec![demote(0, 16, over)]));
        let decision = round(40);
        assert_eq!(decision.returns, [Return { service: 0, bytes: 28 * MIB }]);
        assert_eq!(decision.moves, [demote(0, 16, over)], "twice what came up, as far as the step goes");
        let decision = round(0);
        assert_eq!((decision.returns, decision.moves), (vec![], vec![demote(0, 8, over)]));
        assert_eq!(round(0).moves, [demote(0, 16, over)]);
        // Of what returns the kernel is to promote half of the part, (0.6 / 1)^4, that it is of other pages.
        let told = |promoted: u64| {
            let mut past = Past::default();
            let seen = |promoted: u64| ServiceBytes { promoted: promoted * MIB, ..bytes(100, 0) };
            let mut round =
                |promoted| decide(&views(&[opt_in(0.4, 0.6)], &[seen(promoted)]), &limits, &mut past);
            round(0);
            round(promoted).kernel_promotes.map(|bytes| bytes as f64 / (promoted * MIB) as f64)
        };
        for (promoted, part) in [(7, 0.1296), (8, 0.0648), (16, 0.0648)] {
            assert!(told(promoted).is_some_and(|told| (told - part).abs() < 1e-5), "{promoted}");
        }
    }

    #[test]
    fn the_kernel_is_told_by_the_fourth_power_and_is_free_again_once_none_is_over() {
        let limits = RoundLimits { step: 1 << 30, ..LIMITS };
        let policies = [opt_in(0.0, 0.5), opt_in(0.0, 1.0)];
        let mut past = Past::default();
        let mut round = |fast: u64, promoted: [u64; 2]| {
            let of = |promoted: u64, seen: ServiceBytes| ServiceBytes { promoted: promoted * MIB, ..seen };
            let seen = [of(promoted[0], bytes(fast, 1000 - fast)), of(promoted[1], bytes(500, 500))];
            decide(&views(&policies, &seen), &limits, &mut past).kernel_promotes.map(|bytes| bytes / MIB)
        };
        assert_eq!(round(500, [64, 64]), None, "none is over its bound");
        assert_eq!(round(1000, [0, 64]), None, "no promotion brought it there");
        // One sixteenth of 160, and twice 20.
        assert_eq!(round(1000, [160, 20]), Some(50));
        assert_eq!(round(1000, [160, 200]), Some(50), "it grows only once none is over");
        assert_eq!(round(1000, [1, 0]), Some(16), "the least is a part of the step");
        assert_eq!((round(500, [16, 0]), round(400, [32, 0])), (Some(32), Some(64)));
        assert_eq!([128, 256, 512].map(|_| round(400, [0, 0])), [128, 256, 512].map(Some));
        assert_eq!(round(400, [0, 0]), None);
    }

    #[test]
    fn free_memory_is_room_enough() {
        let limits = RoundLimits { fast_free: 40 * MIB, ..LIMITS };
        let decision = once(&[opt_in(0.8, 1.0), opt_in(0.2, 1.0)], &[bytes(40, 60), bytes(90, 10)], &limits);
        assert_eq!(decision, Decision::default());
    }

    #[test]
    fn the_step_is_divided_by_what_each_service_has_too_much() {
        let policies = [opt_in(0.0, 0.5), opt_in(0.0, 0.4), opt_in(0.0, 0.9)];
        let seen = [bytes(1200, 0), bytes(325, 175), bytes(100, 0)];
        let limits = RoundLimits { step: 32 * MIB, ..LIMITS };
        // 600, 125 and 10 MiB are too much.
        let mut given = [0; 3];
        let mut past = Past::default();
        for _ in 0..10 {
            for change in decide(&views(&policies, &seen), &limits, &mut past).moves {
                let PageMove::Demote { service, bytes, reason: DemoteReason::OverHigh } = change else {
                    panic!("{change:?}")
                };
                given[service] += bytes;
            }
        }
        for (given, mib) in given.into_iter().zip([600, 125, 10]) {
            assert!(given.abs_diff(320 * MIB * mib / 735) <= 3 * PAGE, "{given} of {mib}");
        }
    }

    #[test]
    fn a_service_that_cannot_go_down_leaves_the_step_to_the_others() {
        let policies = [
            opt_in(0.0, 0.5),
            opt_in(0.0, 0.5),
            ServicePolicy { rule: TierRule::Background, ..opt_in(0.0, 1.0) },
        ];
        let limits = RoundLimits { step: 32 * MIB, ..LIMITS };
        let stuck = ServiceBytes { is_stuck: true, ..bytes(90_000, 0) };
        let suffers = ServiceBytes { pressure: 11.0, ..bytes(90_000, 0) };
        let decision = once(&policies, &[stuck, bytes(200, 0), suffers], &limits);
        let over = DemoteReason::OverHigh;
        let probe = PageMove::Demote { service: 0, bytes: PAGE, reason: over };
        let rest = PageMove::Demote { service: 1, bytes: 32 * MIB - PAGE, reason: over };
        assert_eq!(decision.moves, [probe, rest]);
        // One that is to make room, and cannot, does not keep the next from it.
        let policies = [opt_in(0.8, 1.0), opt_in(0.2, 1.0), opt_in(0.5, 1.0)];
        let stuck = ServiceBytes { is_stuck: true, ..bytes(90, 10) };
        let decision = once(&policies, &[bytes(40, 60), stuck, bytes(100, 0)], &LIMITS);
        let room = |service, bytes| PageMove::Demote {
            service,
            bytes,
            reason: DemoteReason::MakesRoom { for_service: 0 },
        };
        assert_eq!(decision.moves, [room(1, PAGE), room(2, 40 * MIB - PAGE)]);
    }

    #[test]
    fn a_part_below_a_page_waits_and_comes_in_a_later_round() {
        let policies = [opt_in(0.0, 0.5), opt_in(0.0, 0.5)];
        let limits = RoundLimits { step: MIB, ..LIMITS };
        let seen = [bytes(1 << 20, 0), bytes(1, 0)];
        let mut past = Past::default();
        let (mut waited, mut given) = (0, 0);
        for _ in 0..10_000 {
            let decision = decide(&views(&policies, &seen), &limits, &mut past);
            waited += usize::from(decision.holds == [Hold { service: 1, reason: HoldReason::Waits }]);
            given += decision.moves.iter().filter(|change| change.service() == 1).count();
        }
        // The second is due a byte in each round.
        assert_eq!((waited, given), (9_998, 2));
    }

    #[test]
    fn room_is_divided_by_what_services_lack_and_one_that_rests_takes_none() {
        let limits = RoundLimits { fast_free: 300 * MIB, ..UP };
        let policies = [opt_in(0.6, 0.7); 3];
        let rests = ServiceBytes { rests: true, ..bytes(0, 4000) };
        let seen = [rests, bytes(0, 300), bytes(0, 100)];
        let mut past = Past::default();
        drop(decide(&views(&policies, &seen), &limits, &mut past));
        let up = |service, mib: u64| PageMove::Promote { service, bytes: mib * MIB };
        assert_eq!(decide(&views(&policies, &seen), &limits, &mut past).moves, [up(1, 24), up(2, 8)]);
        let limits = RoundLimits { fast_free: 24 * MIB, ..limits };
        assert_eq!(decide(&views(&policies, &seen), &limits, &mut past).moves[..2], [up(1, 12), up(2, 4)]);
    }

    #[test]
    fn an_opted_out_service_with_bytes_on_the_slow_tier_gets_them_back_and_never_gives() {
        let out = ServicePolicy { rule: TierRule::OptOut, local: None, slow_cache: false };
        let decision = once(&[out, opt_in(0.9, 1.0)], &[bytes(50, 20), bytes(10, 90)], &LIMITS);
        assert_eq!(decision.moves, [PageMove::BringBack { service: 0, bytes: 20 * MIB }]);
    }

    #[test]
    fn page_cache_goes_down_and_the_rest_of_a_service_stays() {
        let policy = ServicePolicy { local: None, slow_cache: true, ..opt_in(0.0, 1.0) };
        let seen = ServiceBytes { fast_cache: 30 * MIB, ..bytes(100, 0) };
        assert_eq!(once(&[policy], &[seen], &LIMITS).moves, [demote(0, 30, DemoteReason::PageCache)]);
    }

    #[test]
    fn a_service_that_suffers_is_left_alone_and_then_gives_in_smaller_steps() {
        let limits = RoundLimits { step: 16 * MIB, ..LIMITS };
        let mut past = Past::default();
        let mut round = |seen: ServiceBytes| decide(&views(&[opt_in(0.4, 0.6)], &[seen]), &limits, &mut past);
        let suffers = [
            (ServiceBytes { pressure: 11.0, ..bytes(100, 0) }, HoldReason::Pressure),
            (ServiceBytes { refaults: 101, ..bytes(100, 0) }, HoldReason::Refaults),
        ];
        for (seen, reason) in suffers {
            assert_eq!(
                round(seen),
                Decision { holds: vec![Hold { service: 0, reason }], ..Decision::default() }
            );
        }
        for mib in [4, 8, 16, 16] {
            assert_eq!(round(bytes(100, 0)).moves, [demote(0, mib, DemoteReason::OverHigh)]);
        }
    }

    #[test]
    fn half_of_what_is_too_much_goes_in_ten_seconds_whatever_the_period_and_the_last_of_it_too() {
        for period in [0.25, 2.0, 10.0] {
            let limits = RoundLimits { pace: Some(Pace::of(period)), ..LIMITS };
            // 100 GiB, of which half is too much: 2 s take 6.5 GiB, and 1 GiB at least.
            let mut seen = [bytes(100 << 10, 0)];
            let rounds_of = |seconds: f64| (seconds / period).round() as usize;
            rounds(&[opt_in(0.0, 0.5)], &mut seen, &limits, rounds_of(10.0));
            let left = seen[0].above(0.5) / seen[0].fast as f64 * 0.75;
            assert!((left - 0.25).abs() < 1e-4, "{period}: {left}");
            rounds(&[opt_in(0.0, 0.5)], &mut seen, &limits, rounds_of(40.0));
            assert!(seen[0].above(0.5).abs() < 1.0, "{period}: {seen:?}");
        }
    }

    #[test]
    fn neighbours_give_and_pages_come_up_at_a_pace_too() {
        let limits = RoundLimits { pace: Some(Pace::of(2.0)), ..UP };
        let limits = RoundLimits { step: 1 << 40, promote: 1 << 40, ..limits };
        let mut seen = [bytes(30 << 10, 70 << 10), bytes(100 << 10, 0)];
        let policies = [opt_in(0.6, 0.7), opt_in(0.2, 1.0)];
        let moves = rounds(&policies, &mut seen, &limits, 60);
        let part = f64::from(Pace::of(2.0).part_ppm) / 1e6;
        let PageMove::Demote { service: 1, bytes: given, .. } = moves[0][0] else { panic!("{:?}", moves[0]) };
        // Of the 80 GiB that it has to spare.
        assert!((given as f64 - part * 80.0 * 1024.0 * MIB as f64).abs() < 2.0, "{given}");
        assert!((seen[0].local_share() - 0.6).abs() < 1e-3, "{seen:?}");
        let most = |up: &PageMove| !matches!(up, PageMove::Promote { bytes, .. } if *bytes > 4 << 30);
        assert!(moves.concat().iter().all(most), "30 GiB are lacking at most");
    }

    #[test]
    fn a_service_near_to_suffering_moves_less_and_a_page_at_least() {
        let limits = RoundLimits { pace: Some(Pace::of(2.0)), ..LIMITS };
        let given = |pressure: f64, refaults: u64| {
            let seen = ServiceBytes { pressure, refaults, ..bytes(100 << 10, 0) };
            let moves = once(&[opt_in(0.4, 0.6)], &[seen], &limits).moves;
            moves
                .iter()
                .map(|it| if let PageMove::Demote { bytes, .. } = it { *bytes } else { 0 })
                .sum::<u64>()
        };
        let free = given(0.0, 0);
        for (pressure, refaults, part) in [(5.0, 0, 0.5), (0.0, 75, 0.25), (5.0, 75, 0.125)] {
            assert!(
                (given(pressure, refaults) as f64 / free as f64 - part).abs() < 1e-6,
                "{pressure} {refaults}"
            );
        }
        assert_eq!([given(10.0, 0), given(10.1, 0), given(0.0, 101)], [PAGE, 0, 0]);
    }

    #[test]
    fn moves_take_a_tenth_of_the_link_or_what_they_came_to_and_few_bytes_before_any_was_measured() {
        let mut link = Link::new(Some(40e9));
        assert_eq!((link.step(2.0), link.steady_step(2.0)), (Link::FIRST, 8_000_000_000));
        link.measure(Link::FIRST, 1.0 / 64.0);
        assert_eq!(link.step(2.0), 4 << 30, "the kernel moves 2 GiB a second");
        link.measure(1 << 30, 0.0);
        link.measure(PAGE, 0.25);
        assert_eq!(link.moved, Some((2u64 << 30) as f64), "of no time nothing is learnt, and few bytes wait");
        link.measure((6 << 30) - PAGE, 0.25);
        assert_eq!((link.moved, link.step(2.0)), (Some((7u64 << 30) as f64), 8_000_000_000));
        let mut unknown = Link::default();
        assert_eq!((unknown.rate(), unknown.step(2.0)), (None, Link::FIRST));
        unknown.measure(Link::FIRST, 1.0 / 64.0);
        assert_eq!(unknown.step(2.0), (4 << 30) / 10);
        let slow = Link { moved: Some(2e9), ..Link::new(Some(1e6)) };
        assert_eq!(slow.step(0.001), PAGE, "a page at least");
    }

    #[test]
    fn proactive_demotion_begins_below_the_low_watermark_and_ends_at_the_high_one() {
        let limits =
            |free: u64| RoundLimits { fast_free: free * MIB, free_low: 0.02, free_high: 0.05, ..LIMITS };
        let mut past = Past::default();
        let mut moves =
            |free| decide(&views(&[opt_in(0.2, 1.0)], &[bytes(900, 0)]), &limits(free), &mut past).moves;
        assert_eq!(moves(30), [], "above the low watermark of 20.48 MiB");
        let given = |mib: f64| {
            [PageMove::Demote {
                service: 0,
                bytes: (mib * MIB as f64).round() as u64,
                reason: DemoteReason::Watermark,
            }]
        };
        assert_eq!(moves(10), given(51.2 - 10.0));
        assert_eq!(moves(30), given(51.2 - 30.0), "it goes on to the high one");
        assert_eq!(moves(52), []);
        assert_eq!(moves(30), [], "and begins anew below the low one alone");
    }

    #[test]
    fn nothing_is_demoted_to_a_slow_tier_that_is_full() {
        let limits = RoundLimits { slow_free: 0, ..LIMITS };
        let decision = once(&[opt_in(0.4, 0.6)], &[bytes(100, 0)], &limits);
        assert_eq!(
            decision,
            Decision {
                holds: vec![Hold { service: 0, reason: HoldReason::SlowFull }],
                ..Decision::default()
            }
        );
        let limits = RoundLimits { slow_free: 3 * MIB, ..LIMITS };
        let decision = once(&[opt_in(0.4, 0.6)], &[bytes(100, 0)], &limits);
        assert_eq!(decision.moves, [demote(0, 3, DemoteReason::OverHigh)]);
    }

    const UP: RoundLimits = RoundLimits {
        promote: 32 * MIB,
        step: 32 * MIB,
        fast_kept: 8 * MIB,
        largest_page: 2 * MIB,
        ..LIMITS
    };

    /// Rounds on a host that promotes nothing by itself: moves of each, and the bytes in the end.
    fn rounds(
        policies: &[ServicePolicy],
        seen: &mut [ServiceBytes],
        limits: &RoundLimits,
        count: usize,
    ) -> Vec<Vec<PageMove>> {
        let (mut past, mut limits) = (Past::default(), *limits);
        let mut round = |_| {
            let moves = decide(&views(policies, seen), &limits, &mut past).moves;
            for change in &moves {
                let (service, up) = match *change {
                    PageMove::Demote { service, bytes, .. } => (service, -(bytes as i64)),
                    PageMove::Promote { service, bytes } => (service, bytes as i64),
                    PageMove::BringBack { .. } => panic!("nobody is opted out"),
                };
                let seen = &mut seen[service];
                seen.fast = seen.fast.strict_add_signed(up);
                seen.slow = seen.slow.strict_add_signed(-up);
                limits.fast_free = limits.fast_free.strict_add_signed(-up);
            }
            moves
        };
        (0..count).map(&mut round).collect()
    }

    #[test]
    fn cold_pages_of_a_service_under_its_low_bound_come_up_to_it_in_steps_and_no_further() {
        let mut seen = [bytes(30, 170)];
        let limits = RoundLimits { fast_free: 300 * MIB, ..UP };
        let moves = rounds(&[opt_in(0.6, 0.7)], &mut seen, &limits, 12);
        let up = |mib: u64| vec![PageMove::Promote { service: 0, bytes: mib * MIB }];
        assert_eq!(moves[..5], [vec![], up(32), up(32), up(26), vec![]], "the kernel has the first round");
        assert!(moves[5..].iter().all(Vec::is_empty) && seen[0].fast == 120 * MIB, "{moves:?}");
    }

    #[test]
    fn without_room_nothing_comes_up_and_room_is_what_is_left_to_nobody() {
        for (limits, left) in [
            (RoundLimits { fast_free: 8 * MIB, ..UP }, 90),
            (RoundLimits { fast_free: 20 * MIB, free_low: 0.02, free_high: 0.02, ..UP }, 90),
            (RoundLimits { fast_free: 20 * MIB, ..UP }, 102),
            (RoundLimits { fast_free: 300 * MIB, promote: 0, ..UP }, 90),
        ] {
            let mut seen = [bytes(90, 110)];
            let moves = rounds(&[opt_in(0.6, 0.7)], &mut seen, &limits, 12);
            assert_eq!(seen[0].fast, left * MIB, "{moves:?}");
        }
    }

    #[test]
    fn neighbours_make_the_room_that_is_kept_free_and_stay_over_their_own_bound() {
        let mut seen = [bytes(90, 110), bytes(150, 50)];
        let moves = rounds(&[opt_in(0.6, 0.7), opt_in(0.7, 1.0)], &mut seen, &UP, 12);
        // 8 MiB are kept free, and the neighbour has 10 to give.
        assert_eq!(seen.map(|seen| seen.fast / MIB), [92, 140], "{moves:?}");
    }

    #[test]
    fn a_huge_page_at_the_end_never_brings_a_service_over_its_high_bound() {
        let limits = RoundLimits { fast_free: 300 * MIB, ..UP };
        for (low, high, left) in [(0.6, 0.6, 118), (0.6, 0.605, 119), (0.6, 0.62, 120)] {
            let mut seen = [bytes(100, 100)];
            rounds(&[opt_in(low, high)], &mut seen, &limits, 12);
            assert_eq!(seen[0].fast / MIB, left);
        }
    }

    #[test]
    fn pages_of_a_service_that_suffers_do_not_come_up() {
        let limits = RoundLimits { fast_free: 300 * MIB, ..UP };
        let mut seen = [ServiceBytes { pressure: 11.0, ..bytes(30, 170) }];
        assert!(rounds(&[opt_in(0.6, 0.7)], &mut seen, &limits, 12).concat().is_empty());
    }

    fn any_service() -> impl Strategy<Value = (ServicePolicy, ServiceBytes)> {
        let rule = prop_oneof![Just(TierRule::OptIn), Just(TierRule::OptOut), Just(TierRule::Background)];
        let local = proptest::option::of((0.0..1.0f64, 0.0..1.0f64))
            .prop_map(|pair| pair.map(|(a, b)| LocalBounds { low: a.min(b), high: a.max(b) }));
        let seen =
            (0..1u64 << 40, 0..1u64 << 40, 0..2000u64, 0..200u64, 0.0..1.0f64, any::<bool>(), any::<bool>());
        (rule, local, any::<bool>(), seen, 0..4u64).prop_map(
            |(rule, local, slow_cache, (fast, slow, pressure, refaults, cache, is_stuck, rests), unseen)| {
                let fast_cache = (fast as f64 * cache) as u64;
                let pressure = pressure as f64 / 100.0;
                let promoted = if rests { slow / 2 } else { 0 };
                let seen = ServiceBytes {
                    fast,
                    slow,
                    fast_cache,
                    pressure,
                    refaults,
                    promoted,
                    is_stuck,
                    rests,
                    waits: unseen == 0 && rule != TierRule::OptOut,
                    unseen,
                    has_small_pages: refaults % 2 == 0,
                };
                (ServicePolicy { rule, local, slow_cache }, seen)
            },
        )
    }

    proptest! {
        #[test]
        fn no_round_moves_more_than_its_limits_or_than_a_service_has(
            rounds in proptest::collection::vec(
                (proptest::collection::vec(any_service(), 0..8), 0..1u64 << 40, 0..1u64 << 40, 0..1u64 << 40), 1..4),
            paced in any::<bool>(),
            page in prop_oneof![Just(PAGE), Just(64 << 10)],
        ) {
            let mut past = Past::default();
            let mut record = Vec::new();
            for (index, (services, fast_free, slow_free, step)) in rounds.into_iter().enumerate() {
                let (policies, seen): (Vec<_>, Vec<_>) = services.into_iter().unzip();
                let limits = RoundLimits {
                    fast_bytes: 1 << 41, fast_free, slow_free, step, free_low: 0.1, free_high: 0.2, promote: step / 2,
                    fast_kept: fast_free / 2, largest_page: 2 * MIB, page, pace: paced.then(|| Pace::of(2.0)), ..LIMITS
                };
                let services = views(&policies, &seen);
                let decision = decide(&services, &limits, &mut past);
                let (mut demoted, mut promoted) = (vec![0; seen.len()], 0);
                for change in &decision.moves {
                    match *change {
                        PageMove::Demote { service, bytes, .. } => {
                            prop_assert!(policies[service].rule != TierRule::OptOut);
                            prop_assert!(seen[service].pressure <= 10.0 && seen[service].refaults <= 100);
                            demoted[service] += bytes;
                            prop_assert!(!seen[service].is_stuck || demoted[service] <= page);
                        }
                        PageMove::BringBack { service, bytes } => {
                            prop_assert!(policies[service].rule == TierRule::OptOut && bytes == seen[service].slow);
                        }
                        PageMove::Promote { service, bytes } => {
                            let (policy, seen) = (&policies[service], &seen[service]);
                            prop_assert!(policy.rule == TierRule::OptIn && limits.suffering(seen).is_none() && !seen.rests);
                            let after = ServiceBytes { fast: seen.fast + bytes, slow: seen.slow - bytes, ..*seen };
                            let local = policy.local.unwrap();
                            prop_assert!(seen.local_share() < local.low && after.above(local.low) <= page as f64);
                            let last = if seen.has_small_pages { 0.0 } else { 2.0 * MIB as f64 };
                            prop_assert!(after.above(local.high) <= -last);
                            promoted += bytes;
                        }
                    }
                }
                prop_assert!(demoted.iter().sum::<u64>() <= step.min(slow_free));
                prop_assert!(promoted <= (step / 2).min(fast_free / 2) + page);
                prop_assert!(demoted.iter().zip(&seen).all(|(bytes, seen)| *bytes <= seen.fast));
                let most = |seen: &ServiceBytes| (seen.fast + seen.slow) * u64::from(Pace::of(2.0).part_ppm) / 1_000_000 + 1;
                prop_assert!(!paced || demoted.iter().zip(&seen).all(|(bytes, seen)| *bytes <= most(seen).max(2 * MIB)));
                // What has too much goes down, or says why not.
                let is_held = |service| decision.holds.iter().any(|hold| hold.service == service);
                let has_excess = |service: usize| excess(&services[service]).iter().any(|(_, bytes)| *bytes > 0);
                let waits = |service: usize| seen[service].waits;
                let is_told = |service| waits(service) || !has_excess(service) || demoted[service] > 0 || is_held(service);
                prop_assert!((0..seen.len()).all(is_told));
                let moved = |service| decision.moves.iter().any(|change| change.service() == service);
                prop_assert!((0..seen.len()).all(|service| !waits(service) || !(moved(service) || is_held(service))));
                record.push(RecordedRound { round: index as u64 + 1, services, limits, decision, past: None });
            }
            let (_, otherwise) = replay(&record);
            prop_assert_eq!(otherwise, None);
        }
    }

    #[test]
    fn a_service_that_waits_for_its_look_stays_as_it_is_and_so_does_what_is_known_of_it() {
        let decide_both = |past: &mut Past, seen: [ServiceBytes; 2], step: u64| {
            let services = views(&[opt_in(0.4, 0.6), opt_in(0.4, 0.6)], &seen);
            decide(&services, &RoundLimits { step: step * MIB, ..LIMITS }, past)
        };
        let (looked, over) = (ServiceBytes::default(), bytes(1000, 0));
        let wait = |seen: ServiceBytes| ServiceBytes { waits: true, ..seen };
        let mut past = Past::default();
        let down = |decision: &Decision| -> [u64; 2] {
            [0, 1].map(|service| {
                let of = decision.moves.iter().filter(|change| change.service() == service);
                of.map(|change| if let PageMove::Demote { bytes, .. } = change { bytes / MIB } else { 0 })
                    .sum()
            })
        };
        assert_eq!(down(&decide_both(&mut past, [over, over], 64)), [32, 32]);
        for _ in 0..4 {
            // All of the step is for the one that is looked at.
            let decision = decide_both(&mut past, [over, wait(over)], 64);
            assert_eq!((down(&decision), decision.holds.len()), ([64, 0], 0));
        }
        // 16 MiB of 32 came back in five rounds: half, which halves the step. Rounds without a look do not let them fade.
        let came = ServiceBytes { promoted: 16 * MIB / 5 + 1, unseen: 4, ..over };
        let decision = decide_both(&mut past, [looked, came], 64);
        assert_eq!(decision.returns.iter().map(|it| it.service).collect::<Vec<_>>(), [1]);
        assert_eq!(down(&decision), [0, 32]);
        // The halved step waits, too.
        decide_both(&mut past, [looked, wait(over)], 64);
        let suffers = ServiceBytes { pressure: 11.0, ..over };
        decide_both(&mut past, [looked, suffers], 64);
        decide_both(&mut past, [looked, wait(over)], 64);
        assert_eq!(down(&decide_both(&mut past, [looked, over], 64)), [0, 16]);
    }

    #[test]
    fn services_that_are_looked_at_in_turn_get_their_pages_of_a_step_of_less_than_one() {
        let mut past = Past::default();
        let mut given = [0; 12];
        // A page a round among twelve, of which three are looked at.
        for round in 0..48 {
            let seen: Vec<ServiceBytes> = (0..12)
                .map(|index| ServiceBytes { waits: (index + round) % 4 != 0, ..bytes(100, 0) })
                .collect();
            let services = views(&[opt_in(0.4, 0.6); 12], &seen);
            for change in decide(&services, &RoundLimits { step: PAGE, ..LIMITS }, &mut past).moves {
                given[change.service()] += 1;
            }
        }
        assert!(given.iter().all(|pages| (2..=6).contains(pages)), "{given:?}");
    }

    #[test]
    fn on_a_host_of_large_pages_a_round_asks_for_whole_ones_and_for_no_more_than_its_step() {
        const LARGE: u64 = 64 << 10;
        let limits = RoundLimits { step: 8 * LARGE, page: LARGE, ..LIMITS };
        let (policies, seen) = ([opt_in(0.0, 0.5); 32], [bytes(1000, 0); 32]);
        let (mut past, mut given) = (Past::default(), [0; 32]);
        for _ in 0..16 {
            let moves = decide(&views(&policies, &seen), &limits, &mut past).moves;
            let of = |change: &PageMove| {
                let PageMove::Demote { service, bytes, .. } = *change else { panic!("{change:?}") };
                (service, bytes)
            };
            let asked: Vec<(usize, u64)> = moves.iter().map(of).collect();
            assert!(asked.iter().all(|(_, bytes)| bytes.is_multiple_of(LARGE)), "{asked:?}");
            assert!(asked.iter().map(|(_, bytes)| bytes).sum::<u64>() <= limits.step, "{asked:?}");
            asked.iter().for_each(|(service, bytes)| given[*service] += bytes);
        }
        assert!(given.iter().all(|bytes| *bytes > 0), "each has its turn: {given:?}");
        // What comes up ends below the upper bound, and a tier with less room than a page is full.
        let limits = RoundLimits { fast_free: 300 * MIB, page: LARGE, largest_page: 0, ..UP };
        let mut seen =
            [ServiceBytes { fast: 50 * MIB, slow: 50 * MIB + LARGE / 2, ..ServiceBytes::default() }];
        rounds(&[opt_in(0.6, 0.6)], &mut seen, &limits, 12);
        assert!(seen[0].above(0.6) <= 0.0 && seen[0].fast.is_multiple_of(LARGE), "{seen:?}");
        let full = RoundLimits { slow_free: LARGE - 1, page: LARGE, ..LIMITS };
        let holds = once(&[opt_in(0.0, 0.5)], &[bytes(100, 0)], &full).holds;
        assert_eq!(holds, [Hold { service: 0, reason: HoldReason::SlowFull }]);
        let stuck = ServiceBytes { is_stuck: true, ..bytes(100, 0) };
        let moves = once(&[opt_in(0.0, 0.5)], &[stuck], &RoundLimits { page: LARGE, ..LIMITS }).moves;
        let reason = DemoteReason::OverHigh;
        assert_eq!(moves, [PageMove::Demote { service: 0, bytes: LARGE, reason }], "one page is tried");
    }

    #[test]
    fn a_service_without_huge_pages_keeps_its_pace_and_comes_up_where_a_huge_page_has_512_mib() {
        let limits = RoundLimits { page: 64 << 10, largest_page: 512 * MIB, ..LIMITS };
        let limits = RoundLimits { pace: Some(Pace::of(2.0)), ..limits };
        let small = |seen: ServiceBytes| ServiceBytes { has_small_pages: true, ..seen };
        // 400 MiB are too much, of which 13% are due.
        let given = |seen| once(&[opt_in(0.0, 0.6)], &[seen], &limits).moves;
        let reason = DemoteReason::OverHigh;
        assert_eq!(given(bytes(1000, 0)), [demote(0, 400, reason)], "of a huge page all goes");
        let [PageMove::Demote { bytes: down, .. }] = given(small(bytes(1000, 0)))[..] else { panic!() };
        assert_eq!(down / MIB, 400 * u64::from(Pace::of(2.0).part_ppm) / 1_000_000);
        let limits = RoundLimits { fast_free: 900 * MIB, promote: 1 << 30, pace: None, ..limits };
        for (seen, left) in [(bytes(300, 700), 300), (small(bytes(300, 700)), 500)] {
            let mut seen = [seen];
            rounds(&[opt_in(0.5, 0.6)], &mut seen, &limits, 4);
            assert_eq!(seen[0].fast / MIB, left);
        }
    }

    #[test]
    fn a_record_that_was_changed_does_not_replay() {
        let services = views(&[opt_in(0.4, 0.6)], &[bytes(100, 0)]);
        let decision = decide(&services, &LIMITS, &mut Past::default());
        let mut recorded = RecordedRound { round: 1, services, limits: LIMITS, decision, past: None };
        assert_eq!(replay([&recorded]), (1, None));
        recorded.services[0].seen.slow += MIB;
        assert!(matches!(replay([&recorded]), (0, Some((1, _)))));
    }
    #[test]
    fn a_record_that_lacks_rounds_replays_by_what_these_left() {
        // A service that suffers gives half as much, and half of that, until it does not.
        let mut past = Past::default();
        let round = |round: u64, past: &mut Past| {
            let pressure = if round < 4 { 11.0 } else { 0.0 };
            let services = views(&[opt_in(0.4, 0.6)], &[ServiceBytes { pressure, ..bytes(1000, 0) }]);
            let limits = RoundLimits { step: 64 * MIB, ..LIMITS };
            let left = Some(past.clone());
            let decision = decide(&services, &limits, past);
            RecordedRound { round, services, limits, decision, past: left }
        };
        let rounds: Vec<RecordedRound> = (1..8).map(|number| round(number, &mut past)).collect();
        let lacking = |with_past: bool| -> Vec<RecordedRound> {
            let of = |recorded: &RecordedRound| RecordedRound {
                past: recorded.past.clone().filter(|_| with_past && recorded.round == 5),
                ..recorded.clone()
            };
            rounds.iter().filter(|it| !(2..5).contains(&it.round)).map(of).collect()
        };
        assert_eq!(replay(&lacking(true)).1, None);
        assert!(matches!(replay(&lacking(false)).1, Some((5, _))), "the control");
    }
}
