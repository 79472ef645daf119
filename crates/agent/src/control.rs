//! The control loop: settings that are applied once and kept, and a round that looks, decides and acts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use polder_linux::{
    Cgroup, HeldShare, HostCounters, HugePages, Kernel, KernelError, KernelShares, NodeMemory,
    PROMOTION_LIMIT, Promotion, ReclaimWords, Restored, Settings, TierMemory, Tiers, page_bytes,
    share_settings, show_nodes,
};
use polder_place::pages::{
    self, Decision, DemoteReason, Link, Pace, PageMove, Past, RecordedRound, RoundLimits, ServiceBytes,
    ServicePolicy, ServiceView, TierRule,
};

use crate::cause::{Moves, cause};
use crate::health::{Health, Seen};
use crate::host;
use crate::known::{Demotion, Known, Rise};
use crate::name::Name;
use crate::pods::Pods;
use crate::policy::{FairShare, Place, Policy, Service};
use crate::report::{Alarm, Cause, Round, ServiceRound};

/// Why the agent stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The kernel's files could not be read or written.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Services that a round looks at. What a look reads and what follows from it take the kernel longer than all else that a round does, so that
/// of more of them each is looked at in turn, and is as it was meanwhile. An opted-out one is always looked at.
const LOOKS: usize = 200;

/// Rounds in which each of so many services is looked at once.
pub(crate) const fn turns(services: usize) -> usize {
    if services > LOOKS { services.div_ceil(LOOKS) } else { 1 }
}

/// A service that is there, in a round.
#[derive(Clone, Debug)]
struct Present {
    service: Service,
    cgroup: Cgroup,
    view: ServiceView,
    counts: polder_linux::Counts,
    oom_kills: u64,
    /// What became of the demotion that the look before asked for.
    demotion: Option<Demotion>,
    /// What failed after the look.
    alarm: Option<Alarm>,
}

/// The tiering agent of one host.
#[derive(Debug)]
pub struct Agent<K> {
    settings: Settings<K>,
    tiers: Tiers,
    policy: Policy,
    rounds: u64,
    changes: u64,
    past: Past,
    counters: HostCounters,
    /// Pages that the kernel had promoted at the last round.
    promoted_pages: Option<u64>,
    /// MiB a second that the kernel may promote to each fast node, as the agent told it because services go over their bounds.
    throttle: Option<u64>,
    /// Bytes of the smallest page.
    page: u64,
    /// Bytes of a transparent huge page.
    huge_page: u64,
    /// Whether the kernel makes larger pages than the smallest that are no such page, which it counts nowhere.
    makes_middle_pages: bool,
    /// Reserved huge pages of the machine, in this round.
    huge: HugePages,
    reclaim: ReclaimWords,
    link: Link,
    /// Bytes that moved in this round, and how long it took.
    moved: (u64, Duration),
    known: BTreeMap<Name, Known>,
    /// Services as an earlier round saw them, which wait until their turn comes.
    kept: BTreeMap<Name, Present>,
    /// Of the host's settings, until the policy changes.
    host_alarms: Vec<Alarm>,
    shares: KernelShares,
    health: Health,
    pods: Pods,
    /// The services of the policy; for one by label, those of its pods.
    services: Vec<Service>,
    /// Services that are kept off the slow tier, because memory there is bad.
    kept_off: BTreeSet<Name>,
}

impl<K: Kernel> Agent<K> {
    /// Restores what a killed agent left, and prepares to carry out `policy`. With `dry_run` nothing is written, the journal of a
    /// killed agent included, and rounds say what would be.
    ///
    /// # Errors
    /// [`AgentError::Kernel`], also where the machine has no slow tier. Settings are as they were then.
    pub fn start(
        kernel: K,
        policy: Policy,
        journal: &str,
        dry_run: bool,
    ) -> Result<(Self, Vec<Restored>), AgentError> {
        let tiers = Tiers::discover(&kernel)?;
        tiers.check_demotion(&kernel)?;
        let (settings, restored) = match dry_run {
            true => (Settings::dry(kernel, journal), Vec::new()),
            false => Settings::start(kernel, journal)?,
        };
        let mut agent = Self {
            page: page_bytes(settings.kernel()),
            huge_page: huge_page(settings.kernel()),
            makes_middle_pages: makes_middle_pages(settings.kernel()),
            huge: HugePages::default(),
            reclaim: ReclaimWords::default(),
            link: Link::new(tiers.slow_bandwidth(settings.kernel())),
            moved: (0, Duration::ZERO),
            promoted_pages: None,
            throttle: None,
            settings,
            tiers,
            policy,
            rounds: 0,
            changes: 0,
            past: Past::default(),
            counters: HostCounters::default(),
            known: BTreeMap::new(),
            kept: BTreeMap::new(),
            host_alarms: Vec::new(),
            shares: KernelShares::default(),
            health: Health::default(),
            pods: Pods::default(),
            services: Vec::new(),
            kept_off: BTreeSet::new(),
        };
        match host::set(&mut agent.settings, &agent.tiers, &agent.policy) {
            Ok(alarms) => agent.host_alarms = alarms,
            Err(error) => {
                drop(agent.stop());
                return Err(error.into());
            }
        }
        agent.health = Health::start(&mut agent.settings);
        Ok((agent, restored))
    }

    /// The tiers of the machine.
    pub const fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// How fast pages get from one tier to the other, as far as it is known.
    pub const fn link(&self) -> &Link {
        &self.link
    }

    /// What the rounds so far leave to the next.
    pub const fn past(&self) -> &Past {
        &self.past
    }

    /// The policy that is carried out.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// What each service was and why, the latest last.
    pub fn causes(&self) -> BTreeMap<String, Vec<Cause>> {
        self.known.iter().map(|(name, known)| (name.to_string(), known.causes.clone())).collect()
    }

    /// Replaces the policy. Settings that it no longer asks for are restored first.
    ///
    /// # Errors
    /// [`AgentError::Kernel`]. The new policy is carried out as far as it can be; the next change or the stop tries again.
    pub fn change(&mut self, policy: Policy) -> Result<(), AgentError> {
        self.policy = policy;
        self.changes += 1;
        self.kept.clear();
        self.shares.renew();
        // The next round tells the kernel anew.
        self.throttle = None;
        let Self { known, policy, .. } = self;
        known.retain(|name, _| policy.service(name).is_some());
        for known in self.known.values_mut() {
            known.cgroup = None;
        }
        self.pods.look_next();
        drop(self.find_services());
        self.health.forget();
        if self.health.lacks_the_watch() {
            self.health = Health::start(&mut self.settings);
        }
        let restored = self.restore_unwanted();
        self.host_alarms = host::set(&mut self.settings, &self.tiers, &self.policy)?;
        Ok(restored?)
    }

    /// Restores settings that the policy does not ask for.
    fn restore_unwanted(&mut self) -> Result<(), KernelError> {
        let kept = self.wanted_paths();
        if !self.asks_the_kernel() {
            self.shares.forget();
        }
        self.settings.restore_all_but(|path| kept.contains(path)).map(drop)
    }

    /// Restores every setting.
    ///
    /// # Errors
    /// [`AgentError::Kernel`]; the journal stays then, and the next start tries again.
    pub fn stop(&mut self) -> Result<Vec<Restored>, AgentError> {
        self.shares.forget();
        Ok(self.settings.restore()?)
    }

    /// Whether the policy has shares that the kernel is to hold.
    fn asks_the_kernel(&self) -> bool {
        self.policy.fair_share == FairShare::Kernel
            && self.policy.rules().any(|policy| policy.local.is_some())
    }

    /// Has the kernel hold the shares of services, if the policy asks for it. The agent leaves these alone.
    fn hold_by_kernel(&mut self, present: &mut [Present], limits: &RoundLimits, alarms: &mut Vec<Alarm>) {
        if !self.asks_the_kernel() {
            return;
        }
        let share = |present: &Present| {
            let (local, seen) = (present.view.policy.local?, &present.view.seen);
            let bytes = |share: f64| ((seen.fast + seen.slow) as f64 * share) as u64;
            // One that suffers keeps what it has.
            let suffers = limits.suffering(seen).is_some();
            let high = bytes(local.high).max(if suffers { seen.fast } else { 0 });
            Some(HeldShare { cgroup: present.cgroup.path().to_owned(), low: bytes(local.low), high })
        };
        let shares: Vec<HeldShare> = present.iter().filter_map(share).collect();
        let interval_ms = self.policy.period.as_millis().max(1) as u64;
        let quota = self.quota(shares.len());
        let outcome = self.shares.hold(&mut self.settings, &self.tiers, &shares, quota, interval_ms);
        if let Err(error) = outcome {
            alarms.push(Alarm::HostSetting { key: "fair_share".to_owned(), error: error.to_string() });
        }
        let held = self.shares.held();
        for present in present.iter_mut().filter(|present| held.contains(present.cgroup.path())) {
            present.view.policy.local = None;
        }
    }

    /// The files of the settings that the policy asks for.
    fn wanted_paths(&self) -> BTreeSet<String> {
        let mut paths: BTreeSet<String> = host::wanted(self.settings.kernel(), &self.tiers, &self.policy)
            .0
            .into_iter()
            .map(|(_, path, _)| path)
            .collect();
        paths.extend(self.health.path().map(str::to_owned));
        let services = self.services();
        for service in services.iter().filter(|service| service.policy.rule == TierRule::OptOut) {
            let cgroup = self.resolve(service);
            paths.extend(cgroup.ok().flatten().map(|cgroup| cgroup.file("cpuset.mems")));
        }
        paths.extend(self.throttle.map(|_| PROMOTION_LIMIT.to_owned()));
        if self.asks_the_kernel() {
            paths.extend(share_settings());
        }
        paths
    }

    /// Looks at every service, decides and acts. `now_ms` is the time in ms since 1970. What was decided and from what is returned beside
    /// what an operator sees.
    ///
    /// # Errors
    /// [`AgentError::Kernel`] where the machine's own files fail; a service's become an [`Alarm`].
    pub fn round(&mut self, now_ms: u64) -> Result<(Round, RecordedRound), AgentError> {
        self.rounds += 1;
        let [fast, slow] = self.look_at_memory()?;
        let throttles = self.throttle.is_some();
        let Self { settings, tiers, policy, host_alarms, .. } = self;
        let (changed, demotes) =
            host::keep(settings, tiers, policy, host_alarms, |path| throttles && path == PROMOTION_LIMIT);
        let mut round = Round {
            round: self.rounds,
            time_ms: now_ms,
            changes: self.changes,
            fast,
            slow,
            host: self.counters.read(self.settings.kernel()),
            page_bytes: self.page,
            kernel_promotes: None,
            services: Vec::new(),
            devices: Vec::new(),
            alarms: self.host_alarms.clone(),
            settings: Vec::new(),
        };
        round.alarms.extend(changed);
        let mut present = Vec::new();
        self.huge = HugePages::discover(self.settings.kernel());
        self.look_at_pods(&mut round);
        self.look_at_devices(&mut round);
        let resolved: Vec<(Service, Result<Option<Cgroup>, KernelError>)> = self
            .services()
            .into_iter()
            .map(|service| {
                let cgroup = self.resolve(&service);
                (service, cgroup)
            })
            .collect();
        let insides = overlapping(&resolved);
        let mut kept = std::mem::take(&mut self.kept);
        let turns = turns(resolved.len());
        for (index, (service, cgroup)) in resolved.into_iter().enumerate() {
            let is_due = (self.rounds as usize + index).is_multiple_of(turns);
            let is_same = |kept: &Present| {
                kept.service == service && cgroup.as_ref().is_ok_and(|it| it.as_ref() == Some(&kept.cgroup))
            };
            if let Some(kept) = kept.remove(&service.name).filter(|kept| !is_due && is_same(kept)) {
                round.alarms.extend(kept.alarm.clone());
                present.push(kept);
                continue;
            }
            let found = match insides.get(&service.name) {
                Some(error) => Err(KernelError::Missing(error.clone())),
                None => cgroup.and_then(|cgroup| self.look(&service, cgroup, turns, &mut round.alarms)),
            };
            match found {
                Ok(found) => present.push(found),
                // It has ended since the units were listed.
                Err(error) if service.is_default && error.is_gone() => {}
                Err(error) => {
                    let alarm = Alarm::of(&service, &error);
                    let what = match &alarm {
                        Alarm::NoSuchCgroup { cgroup, .. } => {
                            format!("it is not running: there is no {cgroup}")
                        }
                        _ => format!("it is left alone: {error}"),
                    };
                    let line = Some(service.lines.service);
                    let cause = Cause { what, line, since_round: self.rounds, since_ms: now_ms };
                    self.known.entry(service.name.clone()).or_default().note(cause);
                    round.alarms.push(alarm);
                }
            }
        }
        let limits =
            RoundLimits { step: if demotes { self.step() } else { 0 }, ..self.limits(&round, turns) };
        self.promoted_pages = Some(round.host.promoted_pages);
        self.hold_by_kernel(&mut present, &limits, &mut round.alarms);
        let services: Vec<ServiceView> = present.iter().map(|present| present.view.clone()).collect();
        let decision = pages::decide(&services, &limits, &mut self.past);
        for returned in &decision.returns {
            self.known.entry(present[returned.service].service.name.clone()).or_default().returned +=
                returned.bytes;
        }
        let was_held_back = self.throttle.is_some();
        if let Err(error) = self.tell_promotion(decision.kernel_promotes) {
            round.alarms.push(Alarm::HostSetting { key: "local_high".to_owned(), error: error.to_string() });
        }
        round.kernel_promotes = self.throttle.map(|mib| (mib << 20) * self.tiers.fast.len() as u64);
        round.services = self.rows(&present, &decision, now_ms);
        let mut failed = Vec::new();
        for change in &decision.moves {
            let index = change.service();
            let (present, row) = (&present[index], &mut round.services[index]);
            let outcome = match *change {
                PageMove::Demote { bytes, reason, .. } => {
                    row.demoted += bytes;
                    self.demote(present, bytes, reason)
                }
                PageMove::BringBack { bytes, .. } => self.bring_back(present, bytes, &mut round.alarms),
                PageMove::Promote { bytes, .. } => {
                    let promoted = self.promote(present, bytes);
                    row.promoted = *promoted.as_ref().unwrap_or(&0);
                    promoted.map(drop)
                }
            };
            if let Err(error) = outcome {
                if matches!(change, PageMove::Demote { .. }) {
                    row.demoted = 0;
                    let what = format!("it would give pages, and none can go down: {error}");
                    row.cause =
                        Cause { what, line: row.cause.line, since_round: self.rounds, since_ms: now_ms };
                    let known = self.known.entry(present.service.name.clone()).or_default();
                    // In place of what this round was about to do.
                    known.causes.pop_if(|cause| cause.since_round == self.rounds);
                    row.cause = known.note(row.cause.clone());
                }
                let alarm = Alarm::of(&present.service, &error);
                round.alarms.push(alarm.clone());
                failed.push((index, alarm));
            }
        }
        failed.into_iter().for_each(|(index, alarm)| present[index].alarm = Some(alarm));
        self.keep(present);
        let (bytes, took) = std::mem::take(&mut self.moved);
        self.link.measure(bytes, took.as_secs_f64());
        round.settings = self.settings.take_changes();
        if was_held_back && self.throttle.is_some() {
            // It follows what is promoted, and a log names only where that begins and ends.
            round.settings.retain(|change| change.path != PROMOTION_LIMIT);
        }
        Ok((round, RecordedRound { round: self.rounds, services, limits, decision, past: None }))
    }

    /// Keeps the services that the next round need not look at.
    fn keep(&mut self, present: Vec<Present>) {
        if turns(present.len()) == 1 {
            return;
        }
        let kept = present.into_iter().filter(|present| present.service.policy.rule != TierRule::OptOut);
        let wait = |mut present: Present| {
            // What the kernel holds for the agent it may hold no more in the next round.
            present.view.policy = present.service.policy;
            present.view.seen.waits = true;
            (present.service.name.clone(), present)
        };
        self.kept = kept.map(wait).collect();
    }

    /// The memory of the fast and of the slow tier. A node that goes between one look and the next is no failure.
    fn look_at_memory(&mut self) -> Result<[TierMemory; 2], KernelError> {
        const TRIES: u32 = 3;
        for _ in 1..TRIES {
            match self.look_at_memory_once() {
                Err(error) if error.is_gone() => {}
                looked => return looked,
            }
        }
        self.look_at_memory_once()
    }

    fn look_at_memory_once(&mut self) -> Result<[TierMemory; 2], KernelError> {
        self.look_at_nodes()?;
        let kernel = self.settings.kernel();
        Ok([self.tiers.fast_memory(kernel)?, self.tiers.slow_memory(kernel)?])
    }

    /// Takes over the tiers of a machine on which memory was brought on-line or taken away since the round before. Bytes on a node that is not
    /// known would be seen nowhere.
    fn look_at_nodes(&mut self) -> Result<(), KernelError> {
        let tiers = Tiers::discover(self.settings.kernel())?;
        if tiers == self.tiers {
            return Ok(());
        }
        tiers.check_demotion(self.settings.kernel())?;
        self.link = Link::new(tiers.slow_bandwidth(self.settings.kernel()));
        self.tiers = tiers;
        self.kept.clear();
        self.shares.renew();
        self.restore_unwanted()?;
        self.host_alarms = host::set(&mut self.settings, &self.tiers, &self.policy)?;
        Ok(())
    }

    /// What limits a round in which each service is looked at once in so many.
    fn limits(&self, round: &Round, turns: usize) -> RoundLimits {
        RoundLimits {
            fast_bytes: round.fast.bytes,
            fast_free: round.fast.free,
            slow_free: round.slow.free.saturating_sub(round.slow.kept_by_kernel()),
            step: self.step(),
            pressure: self.policy.pressure_limit,
            refaults: self.policy.refaults_a_round(),
            free_low: self.policy.free_low,
            free_high: self.policy.free_high,
            promote: if self.settings.kernel().promotes() { self.most_promoted(round) } else { 0 },
            fast_kept: round.fast.kept_by_kernel(),
            largest_page: self.huge_page,
            page: self.page,
            pace: match self.policy.step_bytes {
                Some(_) => None,
                None => Some(Pace::of(self.policy.period.as_secs_f64() * turns as f64)),
            },
        }
    }

    /// Bytes that a round may move each way.
    fn step(&self) -> u64 {
        let step = self.policy.step_bytes;
        step.unwrap_or_else(|| self.link.step(self.policy.period.as_secs_f64())).max(self.page)
    }

    /// Bytes that DAMON may move in a period for one of so many services. What these moves come to is not measured.
    fn quota(&self, services: usize) -> u64 {
        let link = Link::new(self.link.bandwidth);
        let part = match link.rate() {
            Some(_) => link.steady_step(self.policy.period.as_secs_f64()) / services.max(1) as u64,
            None => Link::FIRST,
        };
        self.policy.step_bytes.unwrap_or(part.max(self.huge_page).max(self.page))
    }

    /// Bytes that may be moved up in this round: with a limit of promotion, what the kernel has left of it.
    fn most_promoted(&self, round: &Round) -> u64 {
        let Some(rate) = self.policy.promotion_limit else { return self.step() };
        let all = (rate as f64 * self.policy.period.as_secs_f64()) as u64;
        let now = round.host.promoted_pages;
        let kernels = now.saturating_sub(self.promoted_pages.unwrap_or(now)) * self.page;
        self.step().min(all.saturating_sub(kernels))
    }

    /// Tells the kernel how many bytes it is to promote in a period; [`None`] gives back what was found, or what the policy says. The kernel's
    /// one limit is for all services. It is lowered in halves, so that few rounds write it, and never raised.
    fn tell_promotion(&mut self, bytes: Option<u64>) -> Result<(), KernelError> {
        let limit = |bytes_a_s: u64| host::limit_of(&self.tiers, bytes_a_s);
        let rate = |bytes: u64| (bytes as f64 / self.policy.period.as_secs_f64()) as u64;
        let wanted = bytes.map(|bytes| 1 << limit(rate(bytes)).ilog2());
        if wanted == self.throttle {
            return Ok(());
        }
        let told = self.policy.promotion_limit.map(limit);
        if let (None, Some(wanted)) = (self.throttle, wanted) {
            // A kernel without the file promotes nothing between tiers, or knows no limit.
            let Ok(now) = self.settings.kernel().read(PROMOTION_LIMIT) else { return Ok(()) };
            if told.or_else(|| now.trim().parse().ok()).is_some_and(|now| now <= wanted) {
                return Ok(());
            }
        }
        match wanted.or(told) {
            Some(limit) => self.settings.set(PROMOTION_LIMIT, &limit.to_string()).map(drop)?,
            None => self.settings.restore_all_but(|path| path != PROMOTION_LIMIT).map(drop)?,
        }
        // What was refused is tried again in the next round.
        self.throttle = wanted;
        Ok(())
    }

    /// The services of the policy; those that are kept off the slow tier are opted out.
    fn services(&self) -> Vec<Service> {
        let mut services = self.services.clone();
        for service in services.iter_mut().filter(|service| self.kept_off.contains(&service.name)) {
            service.policy = ServicePolicy { rule: TierRule::OptOut, local: None, slow_cache: false };
        }
        services
    }

    /// Finds the services of this round.
    fn look_at_pods(&mut self, round: &mut Round) {
        if let Some(from) = self.policy.kubernetes.clone() {
            self.pods.look(self.settings.kernel(), &from, round.time_ms);
            round.alarms.extend(
                self.pods.failure.iter().map(|error| Alarm::HostSetting {
                    key: "kubernetes.pods".to_owned(),
                    error: error.clone(),
                }),
            );
        }
        let alarms = self.find_services();
        round.alarms.extend(alarms);
        let Self { known, services, policy, .. } = self;
        // Pods come and go; services of the policy are told of as they go.
        let is_pod = |name: &str| policy.service(name).is_none_or(|it| matches!(it.place, Place::Pods(_)));
        let names: BTreeSet<&Name> = services.iter().map(|service| &service.name).collect();
        known.retain(|name, _| !is_pod(name) || names.contains(name));
    }

    /// Puts the services of pods in the place of those by label. What cannot be found is returned.
    fn find_services(&mut self) -> Vec<Alarm> {
        let (mut services, mut alarms) = (Vec::new(), Vec::new());
        let mut owners: BTreeMap<String, String> = BTreeMap::new();
        let root = self.policy.kubernetes.as_ref().map_or("/", |from| &from.cgroup_root);
        for service in &self.policy.services {
            let Place::Pods(selector) = &service.place else {
                services.push(service.clone());
                continue;
            };
            let pods = match self.pods.select(selector) {
                Ok(pods) => pods,
                Err(why) => {
                    alarms.push(Alarm::NoPods { service: service.name.to_string(), why });
                    continue;
                }
            };
            // Pods of two namespaces may have one name.
            let mut namesakes: BTreeMap<&Name, u32> = BTreeMap::new();
            for pod in &pods {
                *namesakes.entry(&pod.name).or_default() += 1;
            }
            for pod in &pods {
                let namespace =
                    if namesakes[&pod.name] > 1 { format!("{}/", pod.namespace) } else { String::new() };
                let name = format!("{}/{namespace}{}", service.name, pod.name);
                match pod.cgroup(self.settings.kernel(), root) {
                    Ok(Some(cgroup)) => match owners.insert(cgroup.path().to_owned(), name.clone()) {
                        None => services.push(Service {
                            name: name.into(),
                            place: Place::Cgroup(cgroup),
                            ..service.clone()
                        }),
                        Some(owner) => {
                            let error =
                                format!("the pod is that of {owner} too; let one label alone select it");
                            owners.insert(cgroup.path().to_owned(), owner);
                            alarms.push(Alarm::Refused { service: name, error });
                        }
                    },
                    Ok(None) => alarms.push(Alarm::NoSuchCgroup {
                        service: name,
                        cgroup: format!("of a pod below {root}, or has ended; see cgroup_root"),
                    }),
                    Err(error) => alarms.push(Alarm::Refused { service: name, error: error.to_string() }),
                }
            }
        }
        if let Err(error) = self.add_default(&mut services) {
            alarms.push(Alarm::HostSetting { key: "default".to_owned(), error: error.to_string() });
        }
        self.services = services;
        alarms
    }

    /// Adds the units of the system that no service names, but for this program's own, if the policy says what is wanted of them.
    fn add_default(&self, services: &mut Vec<Service>) -> Result<(), KernelError> {
        let Some((policy, lines)) = self.policy.default else { return Ok(()) };
        let kernel = self.settings.kernel();
        let own = kernel.read("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().filter_map(|line| line.strip_prefix("0::"));
        let mut named: BTreeSet<String> = own.map(str::to_owned).collect();
        let mut units: BTreeSet<&str> = BTreeSet::new();
        for service in services.iter() {
            match &service.place {
                Place::Cgroup(cgroup) => drop(named.insert(cgroup.path().to_owned())),
                Place::Unit(unit) => drop(units.insert(unit)),
                Place::Pods(_) => {}
            }
        }
        // A service names it, what it is inside of, or what is inside of it.
        let is_named = |path: &str| {
            let folder = format!("{path}/");
            named.range(folder.clone()..).next().is_some_and(|name| name.starts_with(&folder))
                || folder.match_indices('/').any(|(at, _)| named.contains(&folder[..at]))
                || path.split('/').any(|part| units.contains(part))
        };
        let unnamed: Vec<Service> = Cgroup::units(kernel)?
            .into_iter()
            .filter(|cgroup| !is_named(cgroup.path()))
            .map(|cgroup| {
                let name = cgroup.path().trim_start_matches('/').to_owned().into();
                Service { name, place: Place::Cgroup(cgroup), policy, lines, is_default: true }
            })
            .collect();
        services.extend(unnamed);
        Ok(())
    }

    /// Takes what CXL devices have reported, and decides which services are kept off the slow tier.
    fn look_at_devices(&mut self, round: &mut Round) {
        let mut health = std::mem::take(&mut self.health);
        let kernel = self.settings.kernel();
        health.look(kernel, round.time_ms, || self.services.iter().filter_map(|it| self.seen(it)).collect());
        round.devices = health.devices(kernel);
        round.alarms.extend(health.alarms(self.policy.health, kernel));
        let names = self.services.iter().map(|service| &service.name);
        let kept_off = health.kept_off(self.policy.health, kernel, names);
        self.health = health;
        let before = std::mem::replace(&mut self.kept_off, kept_off);
        if before.is_subset(&self.kept_off) {
            return;
        }
        // Some may use the slow tier again.
        if let Err(error) = self.restore_unwanted() {
            round.alarms.push(Alarm::HostSetting { key: "health".to_owned(), error: error.to_string() });
        }
    }

    /// A service as health looks at it; [`None`] where it is not there.
    fn seen(&self, service: &Service) -> Option<Seen> {
        let cgroup = self.resolve(service).ok()??;
        let memory = self.memory(&cgroup).ok()?;
        let slow = self.tiers.slow.iter().filter_map(|node| memory.get(node));
        let is_slow = slow.map(|memory| memory.bytes()).sum::<u64>() > 0;
        Some(Seen { name: service.name.to_string(), cgroup, is_slow })
    }

    /// The cgroup of a service; [`None`] where its unit does not run.
    fn resolve(&self, service: &Service) -> Result<Option<Cgroup>, KernelError> {
        match &service.place {
            Place::Cgroup(cgroup) => Ok(Some(cgroup.clone())),
            Place::Unit(unit) => match self.known.get(&service.name).and_then(|known| known.cgroup.clone()) {
                Some(cgroup) if self.settings.kernel().inode(&cgroup.folder()).is_ok() => Ok(Some(cgroup)),
                _ => Cgroup::of_unit(self.settings.kernel(), unit),
            },
            Place::Pods(_) => Ok(None),
        }
    }

    /// What a service is in this round; an opted-out one is kept to the fast nodes first.
    fn look(
        &mut self,
        service: &Service,
        cgroup: Option<Cgroup>,
        turns: usize,
        alarms: &mut Vec<Alarm>,
    ) -> Result<Present, KernelError> {
        let Some(cgroup) = cgroup else {
            return Err(KernelError::gone(&service.place.name()));
        };
        if service.policy.rule == TierRule::OptOut && self.settings.is_dry() {
            // What cannot be looked at cannot be told of.
            if cgroup
                .effective_nodes(self.settings.kernel())
                .is_ok_and(|nodes| !nodes.is_subset(&self.tiers.fast))
            {
                if let Err(error) = self.check_parent(&cgroup) {
                    alarms.push(Alarm::of(service, &error));
                }
                drop(self.keep_to_fast(&cgroup, false));
            }
        } else if service.policy.rule == TierRule::OptOut {
            let effective = cgroup.effective_nodes(self.settings.kernel())?;
            if !effective.is_subset(&self.tiers.fast) {
                // It may be that this fails and its bytes can be seen all the same.
                if let Err(error) = self.keep_to_fast(&cgroup, false).and_then(|()| self.check_kept(&cgroup))
                {
                    alarms.push(Alarm::of(service, &error));
                }
            }
        }
        let kernel = self.settings.kernel();
        let memory = cgroup.memory(kernel, &self.huge)?;
        let counts = cgroup.counts(kernel)?;
        let oom_kills = cgroup.oom_kills(kernel)?;
        let pressure = cgroup.pressure(kernel)?;
        let of = |nodes: &BTreeSet<u32>| nodes.iter().filter_map(|node| memory.get(node)).collect::<Vec<_>>();
        let (fast, slow) = (of(&self.tiers.fast), of(&self.tiers.slow));
        let known = self.known.entry(service.name.clone()).or_default();
        let new_kills = oom_kills.saturating_sub(known.oom_kills.unwrap_or(oom_kills));
        if new_kills > 0 {
            alarms.push(Alarm::OomKill { service: service.name.to_string(), kills: new_kills });
        }
        // Between two looks there may be several rounds.
        let looked = std::mem::replace(&mut known.looked, self.rounds);
        let rounds = self.rounds.saturating_sub(looked).max(1);
        let a_round =
            |now: u64, before: Option<u64>| now.saturating_sub(before.unwrap_or(now)).div_ceil(rounds);
        let seen = ServiceBytes {
            fast: fast.iter().map(|memory| memory.bytes()).sum(),
            slow: slow.iter().map(|memory| memory.bytes()).sum(),
            fast_cache: fast.iter().map(|memory| memory.cache()).sum(),
            pressure,
            refaults: a_round(counts.refaults, known.refaults),
            promoted: a_round(counts.promoted, known.promoted) * self.page,
            is_stuck: known.demotion.is_some_and(|demotion| demotion < Demotion::Moved),
            rests: known.rise.rest > 0,
            waits: false,
            // Of one that is new, or was away, it is not known.
            unseen: if looked == 0 { 0 } else { (rounds - 1).min(turns as u64 - 1) },
            has_small_pages: !self.makes_middle_pages && counts.huge == Some(0),
        };
        let demotion = known.demotion.take();
        known.rise.rest = known.rise.rest.saturating_sub(1);
        (known.refaults, known.promoted) = (Some(counts.refaults), Some(counts.promoted));
        known.oom_kills = Some(oom_kills);
        known.cgroup = Some(cgroup.clone());
        let view = ServiceView { name: service.name.to_string(), policy: service.policy, seen };
        Ok(Present { service: service.clone(), cgroup, view, counts, oom_kills, demotion, alarm: None })
    }

    /// Writes `cpuset.mems`: the fast nodes of those that the cgroup may use. With `migrates` the set is widened first, so that pages move.
    /// An empty set cannot be given back while the cgroup has processes; its nodes can.
    fn keep_to_fast(&mut self, cgroup: &Cgroup, migrates: bool) -> Result<(), KernelError> {
        let effective = cgroup.effective_nodes(self.settings.kernel())?;
        let mut fast: BTreeSet<u32> = effective.intersection(&self.tiers.fast).copied().collect();
        if fast.is_empty() {
            fast.clone_from(&self.tiers.fast);
        }
        let lines = match migrates {
            true => Cgroup::migration(&fast, &self.tiers.slow).to_vec(),
            false => vec![show_nodes(&fast)],
        };
        self.settings.set_in_turn(&cgroup.file("cpuset.mems"), &lines, Some(show_nodes(&effective)))
    }

    /// Whether a cgroup is kept to the fast nodes. A parent that has none of them gives it its own.
    fn check_kept(&self, cgroup: &Cgroup) -> Result<(), KernelError> {
        let effective = cgroup.effective_nodes(self.settings.kernel())?;
        match effective.is_subset(&self.tiers.fast) {
            true => Ok(()),
            false => Err(without_fast_node(cgroup, &effective)),
        }
    }

    /// As [`Agent::check_kept`] of a cgroup that would be kept to them.
    fn check_parent(&self, cgroup: &Cgroup) -> Result<(), KernelError> {
        let parent = cgroup.path().rsplit_once('/').and_then(|(parent, _)| Cgroup::new(parent));
        // The root has every node, and so has a parent without the controller.
        let nodes = parent.and_then(|parent| parent.effective_nodes(self.settings.kernel()).ok());
        match nodes.filter(|nodes| nodes.is_disjoint(&self.tiers.fast)) {
            None => Ok(()),
            Some(nodes) => Err(without_fast_node(cgroup, &nodes)),
        }
    }

    /// Asks the kernel for pages of a service. One that gives none is asked for a page in the next round, and leaves the step to others.
    fn demote(&mut self, present: &Present, bytes: u64, reason: DemoteReason) -> Result<(), KernelError> {
        let (kernel, cgroup) = (self.settings.kernel(), &present.cgroup);
        // Of less than a page the kernel would take none, and say that it took all.
        let bytes = bytes.max(self.page);
        let can = cgroup.check_demotion(kernel, &self.tiers.slow);
        if self.settings.is_dry() {
            let known = self.known.entry(present.service.name.clone()).or_default();
            known.demotion = can.is_err().then_some(Demotion::Refused);
            return can;
        }
        let began = kernel.now();
        let page_cache = reason == DemoteReason::PageCache;
        let outcome = can.and_then(|()| cgroup.demote(kernel, bytes, page_cache, &mut self.reclaim));
        let took = kernel.now().saturating_sub(began);
        let moved = match outcome {
            Err(_) => 0,
            Ok(true) => bytes,
            // It moved less: some, or none.
            Ok(false) => {
                cgroup.sum_up(kernel);
                present.view.seen.fast.saturating_sub(self.bytes_on(&self.tiers.fast, cgroup)?).min(bytes)
            }
        };
        let demotion = match (&outcome, moved) {
            (Err(_), _) => Demotion::Refused,
            (Ok(_), 0) => Demotion::Stuck,
            (Ok(_), _) => Demotion::Moved,
        };
        self.note_move(moved, took);
        let known = self.known.entry(present.service.name.clone()).or_default();
        known.demotion = known.demotion.max(Some(demotion));
        outcome.map(drop)
    }

    /// Time in which nothing moved tells nothing of how fast pages move.
    fn note_move(&mut self, bytes: u64, took: Duration) {
        if bytes > 0 {
            self.moved = (self.moved.0 + bytes, self.moved.1 + took);
        }
    }

    fn memory(&self, cgroup: &Cgroup) -> Result<BTreeMap<u32, NodeMemory>, KernelError> {
        cgroup.memory(self.settings.kernel(), &self.huge)
    }

    /// Bytes of a cgroup on these nodes.
    fn bytes_on(&self, nodes: &BTreeSet<u32>, cgroup: &Cgroup) -> Result<u64, KernelError> {
        let memory = self.memory(cgroup)?;
        Ok(nodes.iter().filter_map(|node| memory.get(node)).map(|memory| memory.bytes()).sum())
    }

    /// Migrates what lies on the slow tier against an opt-out, and says what is left. Pages that came up by themselves may still be counted
    /// there until the kernel sums up.
    fn bring_back(
        &mut self,
        present: &Present,
        mut found: u64,
        alarms: &mut Vec<Alarm>,
    ) -> Result<(), KernelError> {
        if present.cgroup.sum_up(self.settings.kernel()) {
            found = self.bytes_on(&self.tiers.slow, &present.cgroup)?;
        }
        if found == 0 {
            return Ok(());
        }
        let mut left = found;
        if !self.settings.is_dry() {
            self.keep_to_fast(&present.cgroup, true)?;
            present.cgroup.sum_up(self.settings.kernel());
            left = self.bytes_on(&self.tiers.slow, &present.cgroup)?;
        }
        alarms.push(Alarm::OptOutBroken { service: present.service.name.to_string(), found, left });
        Ok(())
    }

    /// Moves pages of a service up, and returns their bytes. Where there are none that can be moved it rests, longer each time.
    fn promote(&mut self, present: &Present, bytes: u64) -> Result<u64, KernelError> {
        let rise = &mut self.known.entry(present.service.name.clone()).or_default().rise;
        let (kernel, cgroup) = (self.settings.kernel(), &present.cgroup);
        // Without the controller every node may be used.
        let mut allowed = cgroup.effective_nodes(kernel).unwrap_or_else(|_| self.tiers.fast.clone());
        let all = show_nodes(&allowed);
        allowed.retain(|node| self.tiers.fast.contains(node));
        if allowed.is_empty() {
            rise.failed();
            return Err(KernelError::Missing(format!(
                "{}: its cpuset.mems ({all}) leaves out the fast nodes {}, so none of its pages can come up; widen it, or leave local_low \
                 out",
                cgroup.path(),
                show_nodes(&self.tiers.fast)
            )));
        }
        if self.settings.is_dry() {
            return Ok(bytes);
        }
        // On one socket there is no choice.
        let threads = match allowed.len() {
            0 | 1 => BTreeMap::new(),
            _ => cgroup.threads_by_node(kernel, &allowed)?,
        };
        let Some((to, memory)) = self.tiers.nearest(kernel, &allowed, &threads)? else { return Ok(0) };
        let bytes = bytes.max(self.page).min(memory.free.saturating_sub(memory.kept_by_kernel()));
        let what = Promotion { from: &self.tiers.slow, to, bytes };
        let began = kernel.now();
        match kernel.promote(cgroup, what, &mut rise.resume) {
            Ok(moved) => {
                rise.went(moved);
                let took = kernel.now().saturating_sub(began);
                self.note_move(moved, took);
                Ok(moved)
            }
            Err(error) => {
                rise.failed();
                Err(error)
            }
        }
    }

    fn rows(&mut self, present: &[Present], decision: &Decision, now_ms: u64) -> Vec<ServiceRound> {
        let services: Vec<&Service> = present.iter().map(|present| &present.service).collect();
        let (mut moves, mut holds, mut rises) =
            (vec![None; present.len()], vec![None; present.len()], vec![false; present.len()]);
        for change in &decision.moves {
            moves[change.service()].get_or_insert(*change);
            rises[change.service()] |= matches!(change, PageMove::Promote { .. });
        }
        for hold in &decision.holds {
            holds[hold.service].get_or_insert(hold.reason);
        }
        let returning: BTreeSet<usize> = decision.returns.iter().map(|it| it.service).collect();
        let (bad, held) = (self.health.counts(), self.shares.held());
        let mut rows = Vec::new();
        for (index, present) in present.iter().enumerate() {
            let Service { name, lines, policy, .. } = &present.service;
            let seen = &present.view.seen;
            let (what, line) = match held.contains(present.cgroup.path()) {
                true => {
                    let holds = if self.settings.is_dry() { "would hold" } else { "holds" };
                    (
                        format!("the kernel {holds} its share by goals of DAMON"),
                        lines.local_high.or(lines.local_low),
                    )
                }
                false if self.kept_off.contains(name) => (
                    "it is kept off the slow tier, because CXL memory is bad".to_owned(),
                    self.policy.health.map(|it| it.line),
                ),
                // As in the round before, until it is looked at, and not refused.
                false
                    if seen.waits
                        || present.demotion == Some(Demotion::Refused)
                            && matches!(moves[index], Some(PageMove::Demote { .. })) =>
                {
                    let last = self.known.entry(name.clone()).or_default().causes.last();
                    last.map_or_else(Default::default, |cause| (cause.what.clone(), cause.line))
                }
                false => {
                    let rise = &mut self.known.entry(name.clone()).or_default().rise;
                    let is_under = policy.local.is_some_and(|local| seen.local_share() < local.low);
                    if !(rises[index] || seen.rests && is_under) {
                        *rise = Rise::default();
                    }
                    let is_stuck = match moves[index] {
                        Some(PageMove::Demote { .. }) => present.demotion == Some(Demotion::Stuck),
                        _ => rise.failures > 0,
                    };
                    cause(
                        &services,
                        &present.service,
                        seen.local_share(),
                        moves[index],
                        holds[index],
                        Moves { is_stuck, returns: returning.contains(&index) },
                    )
                }
            };
            let cause = Cause { what, line, since_round: self.rounds, since_ms: now_ms };
            let cause = self.known.entry(name.clone()).or_default().note(cause);
            let ServiceBytes { fast, slow, fast_cache, pressure, refaults, .. } = *seen;
            rows.push(ServiceRound {
                service: present.service.name.to_string(),
                cgroup: present.cgroup.path().to_owned(),
                tier: present.service.policy.rule,
                fast,
                slow,
                fast_cache,
                local: present.view.seen.local_share(),
                pressure,
                refaults,
                demoted: 0,
                promoted: 0,
                promoted_pages: present.counts.promoted,
                demoted_pages: present.counts.demoted,
                returned: self.known.get(name).map_or(0, |known| known.returned),
                oom_kills: present.oom_kills,
                bad_memory: bad.get(&**name).copied().unwrap_or(0),
                cause,
            });
        }
        rows
    }
}

/// That the parent of an opted-out cgroup has none of the fast nodes.
fn without_fast_node(cgroup: &Cgroup, nodes: &BTreeSet<u32>) -> KernelError {
    KernelError::Missing(format!(
        "{}: its parent's cpuset.mems leaves it nodes {} alone, so it cannot be opted out; give the parent a fast node",
        cgroup.path(),
        show_nodes(nodes)
    ))
}

/// Why a service is left alone: the cgroup of another one is its own or inside its own, and what is done to it would be done to both. By name.
fn overlapping(resolved: &[(Service, Result<Option<Cgroup>, KernelError>)]) -> BTreeMap<Name, String> {
    let cgroups =
        resolved.iter().filter_map(|(service, cgroup)| Some((service, cgroup.as_ref().ok()?.as_ref()?)));
    let mut by_path: BTreeMap<&str, &Service> = BTreeMap::new();
    let mut twice: BTreeMap<&str, [&Service; 2]> = BTreeMap::new();
    for (service, cgroup) in cgroups.clone() {
        // One may be named by its unit, by its path and by a label of its pod.
        if let Some(other) = by_path.insert(cgroup.path(), service) {
            twice.insert(cgroup.path(), [other, service]);
        }
    }
    let inside = |(service, cgroup): (&Service, &Cgroup)| {
        if let Some(both) = twice.get(cgroup.path()) {
            let other = both.iter().find(|other| other.name != service.name)?;
            let error =
                format!("{} is the cgroup of the service {} too; name it once", cgroup.path(), other.name);
            return Some((service.name.clone(), error));
        }
        let folder = format!("{}/", cgroup.path());
        let (path, other) = by_path.range(&*folder..).next().filter(|(path, _)| path.starts_with(&folder))?;
        let error = format!(
            "{}: the service {} is inside it ({path}), and its pages would move too; give each service a cgroup of its own",
            cgroup.path(),
            other.name
        );
        Some((service.name.clone(), error))
    };
    cgroups.filter_map(inside).collect()
}

/// Bytes of a huge page; 0 where the kernel makes none by itself.
fn huge_page(kernel: &impl Kernel) -> u64 {
    let size = kernel.read("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok();
    size.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Whether the kernel makes pages between the smallest and the largest by itself, from Linux 6.8 on.
fn makes_middle_pages(kernel: &impl Kernel) -> bool {
    const SIZES: &str = "/sys/kernel/mm/transparent_hugepage";
    let largest = huge_page(kernel);
    let is_made = |name: &String| {
        let kib =
            name.strip_prefix("hugepages-").and_then(|name| name.strip_suffix("kB")?.parse::<u64>().ok());
        kib.is_some_and(|kib| kib << 10 < largest)
            && !kernel.read(&format!("{SIZES}/{name}/enabled")).is_ok_and(|text| text.contains("[never]"))
    };
    kernel.list(SIZES).unwrap_or_default().iter().any(is_made)
}

#[cfg(test)]
mod tests;
