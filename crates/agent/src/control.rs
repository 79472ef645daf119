//! The control loop: settings that are applied once and kept, and a round that looks, decides and acts.

use std::collections::{BTreeMap, BTreeSet};

use polder_linux::{
    BALANCING, Cgroup, Change, DEMOTION, HeldShare, HostCounters, HostCounts, INTERLEAVE, INTERLEAVE_AUTO,
    Kernel, KernelError, KernelShares, PROMOTION_LIMIT, Promotion, Restored, Resume, Settings, TierMemory,
    Tiers, share_settings, show_nodes,
};
use polder_place::pages::{
    self, Decision, DemoteReason, HoldReason, PageMove, Past, RecordedRound, RoundLimits, ServiceBytes,
    ServicePolicy, ServiceView, TierRule,
};
use serde::{Deserialize, Serialize};

use crate::health::{Health, Seen};
use crate::pods::Pods;
use crate::policy::{FairShare, weights_of};
use crate::{DeviceHealth, Name, Place, Policy, Service, Weights};

/// Why the agent stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The kernel's files could not be read or written.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// What an operator is told of at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "alarm", rename_all = "kebab-case")]
pub enum Alarm {
    /// An opted-out service had bytes on the slow tier; they were migrated, and so many are left.
    OptOutBroken {
        /// The service.
        service: String,
        /// Bytes that lay there.
        found: u64,
        /// Bytes that lie there still, such as pages that it shares with others.
        left: u64,
    },
    /// A service of the policy has no cgroup.
    NoSuchCgroup {
        /// The service.
        service: String,
        /// Its cgroup or its unit.
        cgroup: String,
    },
    /// A service by label has no pods on this node.
    NoPods {
        /// The service.
        service: String,
        /// What there is instead.
        why: String,
    },
    /// A setting of a service could not be changed in this round; the next one tries again.
    Refused {
        /// The service.
        service: String,
        /// What the kernel said.
        error: String,
    },
    /// A setting of the host that the policy asks for could not be made.
    HostSetting {
        /// The key of the policy.
        key: String,
        /// What the kernel said, or lacks.
        error: String,
    },
    /// The kernel killed processes of a service because memory ran out.
    OomKill {
        /// The service.
        service: String,
        /// How many since the round before.
        kills: u64,
    },
    /// Memory of a CXL device is bad.
    CxlMemory {
        /// The device, such as `mem0`.
        device: String,
        /// A service with pages there; [`None`] where no service of the policy has any.
        service: Option<String>,
        /// What is wrong, and where.
        what: String,
        /// Whether it is not known which pages: the service is one with bytes on the slow tier.
        is_guess: bool,
    },
}

/// Why a service is as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// In words.
    pub what: String,
    /// The line of the policy that says so, if one does.
    pub line: Option<usize>,
    /// The round since when.
    pub since_round: u64,
    /// The time since when, in ms since 1970.
    pub since_ms: u64,
}

/// One service after a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceRound {
    /// The service.
    pub service: String,
    /// Its cgroup.
    pub cgroup: String,
    /// Its rule.
    pub tier: TierRule,
    /// Bytes on the fast tier, as the round found them.
    pub fast: u64,
    /// Bytes on the slow tier, as the round found them.
    pub slow: u64,
    /// Bytes of page cache on the fast tier.
    pub fast_cache: u64,
    /// The share of its bytes on the fast tier.
    pub local: f64,
    /// Percent of the last ten seconds in which a task of it waited for memory.
    pub pressure: f64,
    /// Pages that it read again since the round before.
    pub refaults: u64,
    /// Bytes that the kernel was asked to demote.
    pub demoted: u64,
    /// Bytes that the agent moved up, because the service was under its `local_low`.
    #[serde(default)]
    pub promoted: u64,
    /// Pages that the kernel promoted since the cgroup was made.
    pub promoted_pages: u64,
    /// Pages that the kernel demoted since the cgroup was made.
    pub demoted_pages: u64,
    /// Processes that the kernel killed because memory ran out, since the cgroup was made.
    pub oom_kills: u64,
    /// Bad places of CXL memory, and faults of its devices, that hit it.
    #[serde(default)]
    pub bad_memory: u64,
    /// Why it is so.
    pub cause: Cause,
}

/// What one round saw and did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Its number, from 1.
    pub round: u64,
    /// When it was, in ms since 1970.
    pub time_ms: u64,
    /// How often the policy was changed since the start.
    pub changes: u64,
    /// Memory of the fast tier.
    pub fast: TierMemory,
    /// Memory of the slow tier.
    pub slow: TierMemory,
    /// What the host has counted.
    pub host: HostCounts,
    /// The services that are there.
    pub services: Vec<ServiceRound>,
    /// CXL memory devices, where they are watched.
    #[serde(default)]
    pub devices: Vec<DeviceHealth>,
    /// What went wrong.
    pub alarms: Vec<Alarm>,
    /// Settings that were changed since the round before; in a dry run, those that would have been.
    #[serde(default)]
    pub settings: Vec<Change>,
}

/// What the agent knows of a service from round to round.
#[derive(Debug, Default)]
struct Known {
    /// Of a unit.
    cgroup: Option<Cgroup>,
    refaults: Option<u64>,
    oom_kills: Option<u64>,
    /// The latest last.
    causes: Vec<Cause>,
    /// How its pages come up, while they do.
    rise: Rise,
    /// What became of it when the round before asked for pages of it.
    demotion: Option<Demotion>,
}

/// What became of a service whose pages were to go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Demotion {
    /// The kernel refused, which is an alarm.
    Refused,
    /// None went, because they are locked, say.
    Stuck,
    /// Some went.
    Moved,
}

/// How the pages of a service under its `local_low` come up.
#[derive(Debug, Default)]
struct Rise {
    /// Where the next round goes on.
    resume: Resume,
    /// Bytes that came up since its first process was looked at.
    moved: u64,
    /// Rounds in which it is not tried, because nothing could be moved.
    rest: u32,
    /// How often nothing could be moved, one time after the other.
    failures: u32,
}

impl Rise {
    /// The rests double up to 64 rounds.
    const MOST_FAILURES: u32 = 6;

    fn failed(&mut self) {
        let failures = (self.failures + 1).min(Self::MOST_FAILURES);
        *self = Self { rest: 1 << failures, failures, ..Self::default() };
    }

    /// After a round in which `bytes` came up.
    fn went(&mut self, bytes: u64) {
        self.moved += bytes;
        match (self.resume, self.moved) {
            (None, 0) => self.failed(),
            (None, _) => *self = Self::default(),
            (Some(_), _) => {}
        }
    }
}

/// A service that is there, in a round.
struct Present {
    service: Service,
    cgroup: Cgroup,
    view: ServiceView,
    counts: polder_linux::Counts,
    oom_kills: u64,
    /// What became of the demotion that the round before asked for.
    demotion: Option<Demotion>,
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
    /// Bytes of a huge page.
    huge_page: u64,
    known: BTreeMap<Name, Known>,
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
            huge_page: huge_page(settings.kernel()),
            promoted_pages: None,
            settings,
            tiers,
            policy,
            rounds: 0,
            changes: 0,
            past: Past::default(),
            counters: HostCounters::default(),
            known: BTreeMap::new(),
            host_alarms: Vec::new(),
            shares: KernelShares::default(),
            health: Health::default(),
            pods: Pods::default(),
            services: Vec::new(),
            kept_off: BTreeSet::new(),
        };
        if let Err(error) = agent.set_host() {
            drop(agent.stop());
            return Err(error);
        }
        agent.health = Health::start(&mut agent.settings);
        Ok((agent, restored))
    }

    /// The tiers of the machine.
    pub const fn tiers(&self) -> &Tiers {
        &self.tiers
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
        self.set_host()?;
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
            && self.policy.services.iter().any(|service| service.policy.local.is_some())
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
        let outcome = self.shares.hold(&mut self.settings, &self.tiers, &shares, limits.step, interval_ms);
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
        let mut paths: BTreeSet<String> =
            self.host_settings().0.into_iter().map(|(_, path, _)| path).collect();
        paths.extend(self.health.path().map(str::to_owned));
        let services = self.services();
        for service in services.iter().filter(|service| service.policy.rule == TierRule::OptOut) {
            let cgroup = self.resolve(service);
            paths.extend(cgroup.ok().flatten().map(|cgroup| cgroup.file("cpuset.mems")));
        }
        if self.asks_the_kernel() {
            paths.extend(share_settings());
        }
        paths
    }

    /// Key of the policy, file and value of each setting of the host; and what this kernel lacks of them.
    fn host_settings(&self) -> (Vec<(&'static str, String, String)>, Vec<Alarm>) {
        let mut settings = Vec::new();
        let mut alarms = Vec::new();
        if !self.policy.services.is_empty() {
            // Demotion on, and promotion of hot pages of the slow tier.
            settings.push(("service", DEMOTION.to_owned(), "true".to_owned()));
            settings.push(("service", BALANCING.to_owned(), "2".to_owned()));
        }
        if let Some(rate) = self.policy.promotion_limit_mbps {
            settings.push(("promotion_limit", PROMOTION_LIMIT.to_owned(), rate.to_string()));
        }
        let weights = match &self.policy.weights {
            None => Ok(BTreeMap::new()),
            Some(Weights::Given(weights)) => Ok(weights.clone()),
            Some(Weights::Auto) => {
                self.tiers.bandwidths(self.settings.kernel()).map(|bandwidths| weights_of(&bandwidths))
            }
        };
        match weights {
            Ok(weights) => {
                // A weight that is written ends the kernel's own derivation, which is a setting too.
                if !weights.is_empty() && self.settings.kernel().read(INTERLEAVE_AUTO).is_ok() {
                    settings.push(("interleave", INTERLEAVE_AUTO.to_owned(), "false".to_owned()));
                }
                settings.extend(weights.into_iter().map(|(node, weight)| {
                    ("interleave", format!("{INTERLEAVE}/node{node}"), weight.to_string())
                }));
            }
            Err(error) => {
                alarms.push(Alarm::HostSetting { key: "interleave".to_owned(), error: error.to_string() });
            }
        }
        (settings, alarms)
    }

    /// Makes the settings of the host. One that tiering can do without becomes an alarm.
    fn set_host(&mut self) -> Result<(), AgentError> {
        let (settings, mut alarms) = self.host_settings();
        for (key, path, value) in settings {
            match self.settings.set(&path, &value) {
                Err(error) if key == "service" && error.is_gone() => {
                    let lacks = format!(
                        "this kernel has no {path}, without which nothing moves between tiers; is /proc mounted? polder doctor says more"
                    );
                    return Err(KernelError::Missing(lacks).into());
                }
                Err(error) if key == "service" => return Err(error.into()),
                Err(error) => alarms.push(Alarm::HostSetting {
                    key: key.to_owned(),
                    error: match error.is_gone() {
                        true => format!("this kernel has no {path}; see polder doctor"),
                        false => error.to_string(),
                    },
                }),
                Ok(_) => {}
            }
        }
        self.host_alarms = alarms;
        Ok(())
    }

    /// Looks at every service, decides and acts. `now_ms` is the time in ms since 1970. What was decided and from what is returned beside
    /// what an operator sees.
    ///
    /// # Errors
    /// [`AgentError::Kernel`] where the machine's own files fail; a service's become an [`Alarm`].
    pub fn round(&mut self, now_ms: u64) -> Result<(Round, RecordedRound), AgentError> {
        self.rounds += 1;
        let kernel = self.settings.kernel();
        let mut round = Round {
            round: self.rounds,
            time_ms: now_ms,
            changes: self.changes,
            fast: self.tiers.fast_memory(kernel)?,
            slow: self.tiers.slow_memory(kernel)?,
            host: self.counters.read(self.settings.kernel()),
            services: Vec::new(),
            devices: Vec::new(),
            alarms: self.host_alarms.clone(),
            settings: Vec::new(),
        };
        let mut present = Vec::new();
        self.look_at_pods(&mut round);
        self.look_at_devices(&mut round);
        for service in self.services() {
            match self.look(&service, &mut round.alarms) {
                Ok(found) => present.push(found),
                Err(error) => {
                    let alarm = alarm(&service, &error);
                    let what = match &alarm {
                        Alarm::NoSuchCgroup { cgroup, .. } => {
                            format!("it is not running: there is no {cgroup}")
                        }
                        _ => format!("it cannot be looked at: {error}"),
                    };
                    let line = Some(service.lines.service);
                    note(
                        &mut self.known,
                        &service.name,
                        Cause { what, line, since_round: self.rounds, since_ms: now_ms },
                    );
                    round.alarms.push(alarm);
                }
            }
        }
        let limits = self.limits(&round);
        self.promoted_pages = Some(round.host.promoted_pages);
        self.hold_by_kernel(&mut present, &limits, &mut round.alarms);
        let services: Vec<ServiceView> = present.iter().map(|present| present.view.clone()).collect();
        let decision = pages::decide(&services, &limits, &mut self.past);
        round.services = self.rows(&present, &decision, now_ms);
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
                round.alarms.push(alarm(&present.service, &error));
            }
        }
        round.settings = self.settings.take_changes();
        Ok((round, RecordedRound { round: self.rounds, services, limits, decision }))
    }

    fn limits(&self, round: &Round) -> RoundLimits {
        RoundLimits {
            fast_bytes: round.fast.bytes,
            fast_free: round.fast.free,
            slow_free: round.slow.free.saturating_sub(kept_by_kernel(round.slow)),
            step: self.policy.step_bytes,
            pressure: self.policy.pressure_limit,
            refaults: self.policy.refaults_a_round(),
            free_low: self.policy.free_low,
            free_high: self.policy.free_high,
            promote: if self.settings.kernel().promotes() { self.most_promoted(round) } else { 0 },
            fast_kept: kept_by_kernel(round.fast),
            largest_page: self.huge_page,
        }
    }

    /// Bytes that may be moved up in this round: with a limit of promotion, what the kernel has left of it.
    fn most_promoted(&self, round: &Round) -> u64 {
        const PAGE: u64 = 4096;
        let Some(rate_mbps) = self.policy.promotion_limit_mbps else { return self.policy.step_bytes };
        let all = (rate_mbps as f64 * 1e6 * self.policy.period.as_secs_f64()) as u64;
        let now = round.host.promoted_pages;
        let kernels = now.saturating_sub(self.promoted_pages.unwrap_or(now)) * PAGE;
        self.policy.step_bytes.min(all.saturating_sub(kernels))
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
        self.services = services;
        alarms
    }

    /// Takes what CXL devices have reported, and decides which services are kept off the slow tier.
    fn look_at_devices(&mut self, round: &mut Round) {
        let mut health = std::mem::take(&mut self.health);
        let kernel = self.settings.kernel();
        health.look(kernel, round.time_ms, || self.services.iter().filter_map(|it| self.seen(it)).collect());
        round.devices = health.devices(kernel);
        round.alarms.extend(health.alarms(self.policy.health, kernel));
        let names = self.services.iter().map(|service| &service.name);
        let kept_off =
            names.filter(|name| health.keeps_off(self.policy.health, kernel, name)).cloned().collect();
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
        let memory = cgroup.memory(self.settings.kernel()).ok()?;
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
    fn look(&mut self, service: &Service, alarms: &mut Vec<Alarm>) -> Result<Present, KernelError> {
        let Some(cgroup) = self.resolve(service)? else {
            return Err(KernelError::gone(&service.place.name()));
        };
        if service.policy.rule == TierRule::OptOut && self.settings.is_dry() {
            // What cannot be looked at cannot be told of.
            if cgroup
                .effective_nodes(self.settings.kernel())
                .is_ok_and(|nodes| !nodes.is_subset(&self.tiers.fast))
            {
                drop(self.keep_to_fast(&cgroup, false));
            }
        } else if service.policy.rule == TierRule::OptOut {
            let effective = cgroup.effective_nodes(self.settings.kernel())?;
            if !effective.is_subset(&self.tiers.fast) {
                // It may be that this fails and its bytes can be seen all the same.
                if let Err(error) = self.keep_to_fast(&cgroup, false).and_then(|()| self.check_kept(&cgroup))
                {
                    alarms.push(alarm(service, &error));
                }
            }
        }
        let kernel = self.settings.kernel();
        let memory = cgroup.memory(kernel)?;
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
        let seen = ServiceBytes {
            fast: fast.iter().map(|memory| memory.bytes()).sum(),
            slow: slow.iter().map(|memory| memory.bytes()).sum(),
            fast_cache: fast.iter().map(|memory| memory.cache()).sum(),
            pressure,
            refaults: counts.refaults.saturating_sub(known.refaults.unwrap_or(counts.refaults)),
            is_stuck: known.demotion.is_some_and(|demotion| demotion < Demotion::Moved),
            rests: known.rise.rest > 0,
        };
        let demotion = known.demotion.take();
        known.rise.rest = known.rise.rest.saturating_sub(1);
        known.refaults = Some(counts.refaults);
        known.oom_kills = Some(oom_kills);
        known.cgroup = Some(cgroup.clone());
        let view = ServiceView { name: service.name.to_string(), policy: service.policy, seen };
        Ok(Present { service: service.clone(), cgroup, view, counts, oom_kills, demotion })
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
            false => Err(KernelError::Missing(format!(
                "{}: its parent's cpuset.mems leaves it nodes {} alone, so it cannot be opted out; give the parent a fast node",
                cgroup.path(),
                show_nodes(&effective)
            ))),
        }
    }

    /// Asks the kernel for pages of a service. One that gives none is asked for a page in the next round, and leaves the step to others.
    fn demote(&mut self, present: &Present, bytes: u64, reason: DemoteReason) -> Result<(), KernelError> {
        if self.settings.is_dry() {
            return Ok(());
        }
        let (kernel, cgroup) = (self.settings.kernel(), &present.cgroup);
        let outcome = cgroup.demote(kernel, bytes, reason == DemoteReason::PageCache);
        let demotion = match outcome {
            Err(_) => Demotion::Refused,
            Ok(true) => Demotion::Moved,
            // It moved less: some, or none.
            Ok(false) => {
                let fast = self.bytes_on(&self.tiers.fast, cgroup)?;
                if fast < present.view.seen.fast { Demotion::Moved } else { Demotion::Stuck }
            }
        };
        let known = self.known.entry(present.service.name.clone()).or_default();
        known.demotion = known.demotion.max(Some(demotion));
        outcome.map(drop)
    }

    /// Bytes of a cgroup on these nodes.
    fn bytes_on(&self, nodes: &BTreeSet<u32>, cgroup: &Cgroup) -> Result<u64, KernelError> {
        let memory = cgroup.memory(self.settings.kernel())?;
        Ok(nodes.iter().filter_map(|node| memory.get(node)).map(|memory| memory.bytes()).sum())
    }

    /// Migrates what lies on the slow tier against an opt-out, and says what is left.
    fn bring_back(
        &mut self,
        present: &Present,
        found: u64,
        alarms: &mut Vec<Alarm>,
    ) -> Result<(), KernelError> {
        let mut left = found;
        if !self.settings.is_dry() {
            self.keep_to_fast(&present.cgroup, true)?;
            left = self.bytes_on(&self.tiers.slow, &present.cgroup)?;
        }
        alarms.push(Alarm::OptOutBroken { service: present.service.name.to_string(), found, left });
        Ok(())
    }

    /// Moves pages of a service up, and returns their bytes. Where there are none that can be moved it rests, longer each time.
    fn promote(&mut self, present: &Present, bytes: u64) -> Result<u64, KernelError> {
        if self.settings.is_dry() {
            return Ok(bytes);
        }
        let rise = &mut self.known.entry(present.service.name.clone()).or_default().rise;
        let (kernel, cgroup) = (self.settings.kernel(), &present.cgroup);
        // Without the controller every node may be used.
        let allowed = cgroup.effective_nodes(kernel).unwrap_or_else(|_| self.tiers.fast.clone());
        let Some((to, memory)) = self.tiers.roomiest(kernel, &allowed)? else { return Ok(0) };
        let bytes = bytes.min(memory.free.saturating_sub(kept_by_kernel(memory)));
        let what = Promotion { from: &self.tiers.slow, to, bytes };
        match kernel.promote(cgroup, what, &mut rise.resume) {
            Ok(moved) => {
                rise.went(moved);
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
                    cause(&services, present, moves[index], holds[index], is_stuck)
                }
            };
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
                oom_kills: present.oom_kills,
                bad_memory: bad.get(&**name).copied().unwrap_or(0),
                cause: note(
                    &mut self.known,
                    name,
                    Cause { what, line, since_round: self.rounds, since_ms: now_ms },
                ),
            });
        }
        rows
    }
}

/// Keeps why a service is as it is. The same cause goes on from round to round.
fn note(known: &mut BTreeMap<Name, Known>, service: &Name, cause: Cause) -> Cause {
    const KEPT: usize = 8;
    let causes = &mut known.entry(service.clone()).or_default().causes;
    if let Some(last) = causes.last().filter(|last| last.what == cause.what && last.line == cause.line) {
        return last.clone();
    }
    causes.push(cause.clone());
    causes.drain(..causes.len().saturating_sub(KEPT));
    cause
}

/// What the kernel keeps free of a tier or a node is about this much.
const fn kept_by_kernel(memory: TierMemory) -> u64 {
    memory.bytes / 64
}

/// Bytes of a huge page; 0 where the kernel makes none by itself.
fn huge_page(kernel: &impl Kernel) -> u64 {
    let size = kernel.read("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok();
    size.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn alarm(service: &Service, error: &KernelError) -> Alarm {
    let (name, cgroup) = (service.name.to_string(), service.place.name());
    match error.is_gone() {
        true => Alarm::NoSuchCgroup { service: name, cgroup },
        false => Alarm::Refused { service: name, error: error.to_string() },
    }
}

/// Why a service is as it is after a decision, and by which line of the policy.
fn cause(
    services: &[&Service],
    present: &Present,
    moved: Option<PageMove>,
    held: Option<HoldReason>,
    is_stuck: bool,
) -> (String, Option<usize>) {
    const STUCK: &str = "the kernel can move none of its pages";
    const WAITS: &str = "waits for its part of step";
    let Service { policy, lines, .. } = &present.service;
    let (tier, share) = (Some(lines.tier), present.view.seen.local_share());
    let why = match held {
        Some(HoldReason::Pressure) => Some("its tasks wait for memory longer than pressure_limit"),
        Some(HoldReason::Refaults) => Some("it reads more pages again than refault_limit"),
        Some(HoldReason::SlowFull) => Some("the slow tier is full"),
        Some(HoldReason::Waits) | None => None,
    };
    if let Some(why) = why {
        return (format!("it would give pages and is left alone: {why}"), None);
    }
    let goes = |goes: &'static str| if is_stuck { STUCK } else { goes };
    let waits = held.is_some();
    match (moved, policy.rule, policy.local) {
        (Some(PageMove::BringBack { .. }), ..) => {
            ("it is opted out, and what demotion put on the slow tier is brought back".to_owned(), tier)
        }
        (Some(PageMove::Promote { .. }), ..) if !is_stuck => {
            ("it is under local_low, and its pages come up".to_owned(), lines.local_low)
        }
        (Some(PageMove::Demote { reason, .. }), ..) => match reason {
            DemoteReason::OverHigh => {
                let goes = goes("its coldest pages go down");
                (format!("it is over local_high, and {goes}"), lines.local_high)
            }
            DemoteReason::Background => {
                (format!("it is background, and {}", goes("its pages go down")), tier)
            }
            DemoteReason::PageCache if is_stuck => {
                (format!("its page cache belongs on the slow tier, and {STUCK}"), lines.page_cache)
            }
            DemoteReason::PageCache => ("its page cache goes down".to_owned(), lines.page_cache),
            DemoteReason::MakesRoom { for_service } => {
                let needy = services[for_service];
                let stuck = if is_stuck { format!(", and {STUCK}") } else { String::new() };
                let what = format!("it makes room for {}, which is under its local_low{stuck}", needy.name);
                (what, needy.lines.local_low)
            }
            DemoteReason::Watermark => {
                let stuck = if is_stuck { format!(", and {STUCK}") } else { String::new() };
                (format!("it makes room: less than free_low of the fast tier was free{stuck}"), None)
            }
        },
        (_, TierRule::OptOut, _) => ("it is opted out, and nothing lies on the slow tier".to_owned(), tier),
        (_, TierRule::Background, _) if waits => (format!("it is background, and {WAITS}"), tier),
        (_, TierRule::Background, _) => ("it is background, and lies on the slow tier".to_owned(), tier),
        (_, TierRule::OptIn, Some(local)) if share < local.low && is_stuck => (
            "it is under local_low, and what it has on the slow tier is shared, page cache or refused"
                .to_owned(),
            lines.local_low,
        ),
        (_, TierRule::OptIn, Some(local)) if share < local.low && waits => {
            (format!("it is under local_low, and {WAITS}"), lines.local_low)
        }
        (_, TierRule::OptIn, Some(local)) if share < local.low => (
            "it is under local_low, and finds room as the kernel promotes its hot pages".to_owned(),
            lines.local_low,
        ),
        (_, TierRule::OptIn, Some(local)) if share > local.high && waits => {
            (format!("it is over local_high, and {WAITS}"), lines.local_high)
        }
        (_, TierRule::OptIn, _) if waits => (format!("its page cache {WAITS}"), lines.page_cache),
        (_, TierRule::OptIn, None) => ("it is opted in, and has no bounds".to_owned(), tier),
        (_, TierRule::OptIn, Some(_)) => {
            ("it is within its bounds".to_owned(), lines.local_high.or(lines.local_low))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polder_linux::fake::Tree;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const JOURNAL: &str = "/run/polder/agent.journal";
    const TEXT: &str = "step = \"32MiB\"
        [service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\nlocal_low = 0.45\nlocal_high = 0.55
        [service.web]\ncgroup = \"/web\"\ntier = \"opt-out\"\n";

    fn machine() -> Tree {
        let tree = Tree::new(512 * MIB);
        tree.add_group("/cache", [200 * MIB, 0]);
        tree.add_group("/web", [80 * MIB, 20 * MIB]);
        tree
    }

    fn start(tree: &Tree) -> Agent<&Tree> {
        Agent::start(tree, Policy::parse(TEXT).unwrap(), JOURNAL, false).unwrap().0
    }

    /// A round of a test, where time does not pass.
    fn look(agent: &mut Agent<&Tree>) -> Round {
        agent.round(0).unwrap().0
    }

    #[test]
    fn a_share_over_its_bound_comes_within_it_in_steps() {
        let tree = machine();
        let mut agent = start(&tree);
        let demoted: Vec<u64> = (0..5).map(|_| look(&mut agent).services[0].demoted / MIB).collect();
        assert_eq!(demoted, [32, 32, 26, 0, 0]);
        assert_eq!(tree.bytes("/cache"), [110 * MIB, 90 * MIB]);
    }

    #[test]
    fn services_over_their_bound_share_the_step_and_none_says_that_it_is_within() {
        let text = |low: f64| {
            format!(
                "[service.big]\ncgroup = \"/big\"\ntier = \"opt-in\"\nlocal_high = 0.40\n\
                 [service.small]\ncgroup = \"/small\"\ntier = \"opt-in\"\nlocal_high = {low:?}\n"
            )
        };
        let tree = Tree::new(4096 * MIB);
        tree.add_group("/big", [2000 * MIB, 0]);
        tree.add_group("/small", [650 * MIB, 350 * MIB]);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text(0.4)).unwrap(), JOURNAL, false).unwrap();
        let round = look(&mut agent);
        // 1,200 and 250 MiB are too much.
        let demoted: Vec<u64> = round.services.iter().map(|row| row.demoted).collect();
        assert_eq!(demoted.iter().sum::<u64>().div_ceil(MIB), 32);
        assert_eq!(demoted[1].div_ceil(MIB), 6, "{demoted:?}");
        for row in &round.services {
            assert_eq!(row.cause.what, "it is over local_high, and its coldest pages go down");
        }
        // A part of a byte a round is no page yet.
        tree.put_bytes("/big", [1 << 40, 0]);
        tree.put_bytes("/small", [MIB, 0]);
        let row = look(&mut agent).services.remove(1);
        assert_eq!(
            (row.demoted, row.cause.what.as_str()),
            (0, "it is over local_high, and waits for its part of step")
        );
        assert_eq!(row.cause.line, Some(8));
    }

    #[test]
    fn a_service_that_cannot_go_down_keeps_the_step_from_no_other_and_says_so() {
        let text = "[service.a]\ncgroup = \"/a\"\ntier = \"background\"\n[service.b]\ncgroup = \"/b\"\ntier = \"background\"\n\
            [service.c]\ncgroup = \"/c\"\ntier = \"background\"\n";
        let tree = Tree::new(4096 * MIB);
        tree.add_group("/a", [2000 * MIB, 0]);
        tree.lock("/a", 2000 * MIB);
        tree.add_group("/b", [2000 * MIB, 0]);
        tree.take("/sys/fs/cgroup/b/memory.reclaim");
        tree.add_group("/c", [60 * MIB, 0]);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        (0..3).for_each(|_| drop(look(&mut agent)));
        assert!(tree.bytes("/c")[0] < MIB, "{:?}", tree.bytes("/c"));
        let round = look(&mut agent);
        assert_eq!(
            round.services[0].cause.what,
            "it is background, and the kernel can move none of its pages"
        );
        assert!(
            matches!(&round.alarms[..], [Alarm::NoSuchCgroup { service, .. }] if service == "b"),
            "{:?}",
            round.alarms
        );
        // Once it can, it goes on as before.
        tree.lock("/a", 0);
        look(&mut agent);
        assert_eq!(look(&mut agent).services[0].demoted.div_ceil(MIB), 32);
    }

    #[test]
    fn a_service_that_cannot_come_up_keeps_the_step_from_no_other() {
        let text = "[service.a]\ncgroup = \"/a\"\ntier = \"opt-in\"\nlocal_low = 0.5\n\
            [service.b]\ncgroup = \"/b\"\ntier = \"opt-in\"\nlocal_low = 0.5\n";
        let tree = Tree::new(8192 * MIB);
        tree.add_group("/a", [0, 2000 * MIB]);
        tree.share("/a", 2000 * MIB);
        tree.add_group("/b", [0, 60 * MIB]);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        (0..3).for_each(|_| drop(look(&mut agent)));
        assert_eq!(tree.bytes("/b"), [30 * MIB, 30 * MIB]);
        assert!(agent.causes()["a"].last().unwrap().what.contains("is shared"), "{:?}", agent.causes());
    }

    #[test]
    fn a_service_whose_cold_pages_the_kernel_demoted_comes_to_its_low_bound_within_12_rounds() {
        let tree = machine();
        tree.put("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
        let mut agent = start(&tree);
        (0..4).for_each(|_| drop(look(&mut agent)));
        // 25 points below 45%, and the tree promotes nothing by itself.
        tree.write("/sys/fs/cgroup/cache/memory.reclaim", &(70 * MIB).to_string()).unwrap();
        assert_eq!(tree.bytes("/cache"), [40 * MIB, 160 * MIB]);
        let rounds: Vec<ServiceRound> = (0..12).map(|_| look(&mut agent).services.remove(0)).collect();
        let promoted: Vec<u64> = rounds.iter().map(|row| row.promoted / MIB).collect();
        assert_eq!(promoted, [0, 32, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(rounds.iter().all(|row| row.demoted == 0), "it never goes down again");
        assert_eq!(tree.bytes("/cache"), [90 * MIB, 110 * MIB]);
        let causes = agent.causes();
        let said: Vec<&str> = causes["cache"].iter().map(|cause| cause.what.as_str()).collect();
        assert_eq!(said.last(), Some(&"it is within its bounds"));
        assert!(said.contains(&"it is under local_low, and its pages come up"), "{said:?}");
    }

    #[test]
    fn nothing_comes_up_without_room_or_against_a_limit_or_where_it_cannot_be_moved() {
        let up = |text: &str, fast: u64, prepare: &dyn Fn(&Tree)| {
            let tree = Tree::new(fast * MIB);
            tree.add_group("/cache", [40 * MIB, 160 * MIB]);
            tree.add_group("/web", [80 * MIB, 20 * MIB]);
            prepare(&tree);
            let policy = Policy::parse(text).unwrap();
            let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
            let rounds: Vec<Round> = (0..12).map(|_| look(&mut agent)).collect();
            assert!(rounds.iter().all(|round| round.alarms.is_empty()), "{rounds:?}");
            tree.bytes("/cache")[0] / MIB
        };
        assert_eq!(up(TEXT, 512, &|_| {}), 90, "the control");
        // The kernel keeps back 2 MiB of 140, and web takes 100.
        assert_eq!(up(TEXT, 140, &|_| {}), 40);
        assert_eq!(up(&format!("free_low = 0.8\n{TEXT}"), 512, &|_| {}), 40);
        // 12 rounds of 1.9 MiB, but for the first.
        assert_eq!(up(&format!("promotion_limit = \"1MB/s\"\n{TEXT}"), 512, &|_| {}), 60);
        assert_eq!(up(TEXT, 512, &|tree| tree.lacks_promotion()), 40);
        assert_eq!(up(TEXT, 512, &|tree| tree.share("/cache", 150 * MIB)), 50);
        assert_eq!(up(TEXT, 512, &|tree| tree.suffer("/cache", 25.0, 0, 0)), 40);
    }

    #[test]
    fn pages_that_cannot_be_moved_are_tried_ever_more_seldom() {
        let tree = machine();
        tree.put_bytes("/cache", [40 * MIB, 160 * MIB]);
        tree.share("/cache", 160 * MIB);
        let mut agent = start(&tree);
        look(&mut agent);
        let tried = |agent: &Agent<&Tree>| agent.known[&"cache".to_owned().into()].rise.rest;
        let mut tries = 0;
        for _ in 0..200 {
            let before = tried(&agent);
            look(&mut agent);
            tries += u32::from(tried(&agent) > before);
        }
        assert!((5..=8).contains(&tries), "{tries} tries");
        assert!(agent.causes()["cache"].last().unwrap().what.contains("is shared"));
        tree.share("/cache", 0);
        (0..70).for_each(|_| drop(look(&mut agent)));
        assert_eq!(tree.bytes("/cache")[0], 90 * MIB);
    }

    #[test]
    fn an_opt_out_that_demotion_broke_is_repaired_in_the_round_that_sees_it() {
        let tree = machine();
        let mut agent = start(&tree);
        look(&mut agent);
        assert_eq!(tree.bytes("/web"), [100 * MIB, 0], "the cpuset moves what is there");
        tree.write("/sys/fs/cgroup/web/memory.reclaim", &(20 * MIB).to_string()).unwrap();
        assert_eq!(tree.bytes("/web"), [80 * MIB, 20 * MIB], "demotion ignores cpusets");
        let round = look(&mut agent);
        let broken = Alarm::OptOutBroken { service: "web".to_owned(), found: 20 * MIB, left: 0 };
        assert_eq!(round.alarms, [broken]);
        assert_eq!(tree.bytes("/web"), [100 * MIB, 0]);
    }

    #[test]
    fn a_service_that_is_gone_is_an_alarm_and_the_others_go_on() {
        let tree = machine();
        let mut agent = start(&tree);
        tree.remove_group("/web");
        let round = look(&mut agent);
        let gone = Alarm::NoSuchCgroup { service: "web".to_owned(), cgroup: "/web".to_owned() };
        assert_eq!((round.alarms, round.services.len()), (vec![gone], 1));
        agent.stop().unwrap();
    }

    #[test]
    fn a_kernel_with_one_tier_is_refused_because_reclaim_would_evict() {
        let tree = machine();
        tree.merge_tiers();
        for dry_run in [false, true] {
            let started = Agent::start(&tree, Policy::parse(TEXT).unwrap(), JOURNAL, dry_run);
            let error = started.expect_err("it is refused").to_string();
            assert!(error.contains("puts nodes 0-1 into one memory tier"), "{error}");
        }
        assert!(tree.disk().is_empty());
    }

    #[test]
    fn the_setting_of_a_cgroup_that_is_gone_is_not_given_to_a_later_one_of_its_path() {
        let tree = machine();
        let mut agent = start(&tree);
        look(&mut agent);
        tree.remove_group("/web");
        tree.add_group("/web", [10 * MIB, 0]);
        tree.set_nodes("/web", "1");
        look(&mut agent);
        assert_eq!(tree.settings()["/sys/fs/cgroup/web/cpuset.mems"], "0", "the later one is opted out too");
        agent.stop().unwrap();
        assert_eq!(tree.settings()["/sys/fs/cgroup/web/cpuset.mems"], "1");
    }

    #[test]
    fn a_change_restores_what_the_new_policy_leaves_out_and_touches_nothing_else() {
        let tree = machine();
        tree.set_nodes("/web", "0-1");
        let mut agent = start(&tree);
        look(&mut agent);
        agent
            .change(Policy::parse("[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\n").unwrap())
            .unwrap();
        let settings = tree.settings();
        assert_eq!(settings["/sys/fs/cgroup/web/cpuset.mems"], "0-1");
        assert_eq!(settings[DEMOTION], "true\n");
    }

    #[test]
    fn a_dry_run_decides_and_writes_nothing() {
        let tree = machine();
        let before = tree.settings();
        let (mut agent, _) = Agent::start(&tree, Policy::parse(TEXT).unwrap(), JOURNAL, true).unwrap();
        assert_eq!(look(&mut agent).services[0].demoted, 32 * MIB);
        agent.stop().unwrap();
        assert_eq!((tree.settings(), tree.bytes("/cache"), tree.disk().len()), (before, [200 * MIB, 0], 0));
    }

    #[test]
    fn a_dry_run_names_each_setting_that_a_run_writes_and_a_run_those_that_it_writes() {
        let text = format!("fair_share = \"kernel\"\npromotion_limit = \"200MB/s\"\n{TEXT}");
        let written = |dry_run: bool, prepare: &dyn Fn(&Tree)| {
            let tree = machine();
            tree.has_goals();
            tree.add_cxl("mem0");
            prepare(&tree);
            let (mut agent, _) =
                Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, dry_run).unwrap();
            let rounds = [look(&mut agent), look(&mut agent)];
            assert!(rounds[1].settings.is_empty(), "each is named once: {:?}", rounds[1].settings);
            let alarms: Vec<Alarm> = rounds.iter().flat_map(|round| round.alarms.clone()).collect();
            (rounds[0].settings.iter().map(ToString::to_string).collect::<Vec<_>>(), alarms)
        };
        let (wrote, _) = written(false, &|_| {});
        let (would, alarms) = written(true, &|_| {});
        let state = "/sys/kernel/mm/damon/admin/kdamonds/0/state: off -> on";
        assert_eq!(wrote.last().map(String::as_str), Some(state));
        assert_eq!(would, wrote[..wrote.len() - 1], "the state is there once the kdamond is");
        for line in [
            "/proc/sys/kernel/numa_balancing: 1 -> 2",
            "/sys/kernel/mm/numa/demotion_enabled: false -> true",
            "/proc/sys/kernel/numa_balancing_promote_rate_limit_MBps: 65536 -> 200",
            "/sys/fs/cgroup/web/cpuset.mems: \"\" -> 0",
            "/sys/module/damon_stat/parameters/enabled: Y -> N",
            "/sys/kernel/tracing/instances/polder: absent -> made",
        ] {
            assert!(would.iter().any(|it| it == line), "{line} is not in {would:?}");
        }
        // What lies on the slow tier is told of; nothing is said of a repair.
        let broken = |alarm: &Alarm| matches!(alarm, Alarm::OptOutBroken { .. });
        assert!(alarms.iter().all(broken), "{alarms:?}");
        // Beside an agent that runs there is nothing to write.
        let agent = |tree: &Tree| {
            let (mut agent, _) = Agent::start(tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
            look(&mut agent);
            std::mem::forget(agent);
        };
        let (would, alarms) = written(true, &agent);
        assert!(would.is_empty() && alarms.is_empty(), "{would:?} {alarms:?}");
    }

    #[test]
    fn a_policy_of_pods_costs_by_their_number_and_not_by_its_square() {
        const ADDRESS: &str = "http://127.0.0.1:10255/pods";
        let text = "[kubernetes]\npods = \"http://127.0.0.1:10255/pods\"\n\
            [service.web]\nlabel = \"app=web\"\ntier = \"opt-out\"\n";
        // Comparisons of names and calls of the kernel, in a round that looks at so many pods, half of which are there.
        let cost = |pods: usize| {
            let tree = machine();
            let pod = |index: usize| {
                if index.is_multiple_of(2) {
                    tree.add_group(&format!("/kubepods/pod{index}"), [MIB, 0]);
                }
                format!(
                    "{{\"metadata\":{{\"name\":\"p{index}\",\"uid\":\"{index}\",\"labels\":{{\"app\":\"web\"}}}}}}"
                )
            };
            let items: Vec<String> = (0..pods).map(pod).collect();
            tree.answer(ADDRESS, Some(&format!("{{\"items\":[{}]}}", items.join(","))));
            let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
            look(&mut agent);
            let before = (crate::name::COMPARISONS.get(), tree.calls());
            let round = agent.round(20_000).unwrap().0;
            assert_eq!((round.services.len(), round.alarms.len()), (pods / 2, pods / 2));
            (crate::name::COMPARISONS.get() - before.0, tree.calls() - before.1)
        };
        let (few, many) = (cost(200), cost(1600));
        println!("200 pods: {few:?}; 1,600 pods: {many:?}");
        // Eight times as many, and as the logarithm grows.
        assert!(many.0 <= 16 * few.0 && many.1 <= 9 * few.1, "{few:?} {many:?}");
        assert!(few.0 > 200 && few.1 > 200, "the control: {few:?}");
    }

    #[test]
    fn an_agent_that_is_killed_at_any_of_its_writes_leaves_nothing_behind_after_the_next_start() {
        let kills = killed_at_each_write(TEXT, &|_| {});
        assert!(kills >= 12, "the agent wrote {kills} times only");
        let kills = killed_at_each_write(&format!("fair_share = \"kernel\"\n{TEXT}"), &Tree::has_goals);
        assert!(kills >= 50, "the agent wrote {kills} times only");
        let kills = killed_at_each_write(&format!("health.bad_memory = \"drain\"\n{TEXT}"), &|tree| {
            tree.add_cxl("mem0");
            tree.poison("mem0", 0x1000, u64::MAX);
        });
        assert!(kills >= 20, "the agent wrote {kills} times only");
    }

    /// How many writes an agent makes; it is killed at each of them once.
    fn killed_at_each_write(text: &str, prepare: &dyn Fn(&Tree)) -> u32 {
        let mut kills = 0;
        for writes in 1.. {
            let tree = machine();
            prepare(&tree);
            let before = tree.settings();
            tree.kill_after(writes);
            let policy = || Policy::parse(text).unwrap();
            if let Ok((mut agent, _)) = Agent::start(&tree, policy(), JOURNAL, false) {
                for _ in 0..3 {
                    drop(agent.round(0));
                }
                drop(agent.stop());
            }
            if !tree.is_dead() {
                break;
            }
            kills += 1;
            tree.revive();
            let (mut agent, _) = Agent::start(&tree, policy(), JOURNAL, false).unwrap();
            agent.stop().unwrap();
            assert_eq!(tree.settings(), before, "killed at write {writes}");
            assert!(tree.disk().is_empty(), "killed at write {writes}");
        }
        println!("killed at {kills} writes");
        kills
    }

    #[test]
    fn the_kernel_holds_a_share_by_goals_that_follow_the_service() {
        let tree = machine();
        tree.has_goals();
        let before = tree.settings();
        let policy = Policy::parse(&format!("fair_share = \"kernel\"\n{TEXT}")).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        let local = |round: &Round| round.services[0].local;
        for _ in 0..6 {
            assert_eq!(look(&mut agent).services[0].demoted, 0, "the agent itself demotes nothing");
        }
        let round = look(&mut agent);
        assert!((0.45..=0.55).contains(&local(&round)) && round.alarms.is_empty(), "{round:?}");
        assert_eq!(round.services[0].cause.what, "the kernel holds its share by goals of DAMON");
        tree.put_bytes("/cache", [60 * MIB, 240 * MIB]);
        (0..6).for_each(|_| drop(look(&mut agent)));
        assert!((0.45..=0.55).contains(&local(&look(&mut agent))), "it grew, and its hot pages went up");
        tree.remove_group("/cache");
        tree.add_group("/cache", [300 * MIB, 0]);
        (0..6).for_each(|_| drop(look(&mut agent)));
        assert!((0.45..=0.55).contains(&local(&look(&mut agent))), "it was made anew within a period");
        tree.put_bytes("/cache", [300 * MIB, 0]);
        tree.suffer("/cache", 25.0, 0, 0);
        look(&mut agent);
        // A goal is a whole part of 10,000 of the node.
        let part = 512 * MIB / 10_000 + 1;
        let left = tree.bytes("/cache")[0];
        assert!((300 * MIB - part..=300 * MIB).contains(&left), "one that suffers keeps what it has: {left}");
        agent.change(Policy::parse(TEXT).unwrap()).unwrap();
        assert_eq!(
            tree.settings()["/sys/module/damon_stat/parameters/enabled"],
            "Y\n",
            "DAMON_STAT runs again"
        );
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before);
    }

    #[test]
    fn a_kernel_without_goals_or_with_another_user_of_damon_leaves_shares_to_the_agent() {
        let policy = || Policy::parse(&format!("fair_share = \"kernel\"\n{TEXT}")).unwrap();
        let said = |prepare: &dyn Fn(&Tree)| {
            let tree = machine();
            prepare(&tree);
            let before = tree.settings();
            let (mut agent, _) = Agent::start(&tree, policy(), JOURNAL, false).unwrap();
            let round = look(&mut agent);
            assert_eq!(round.services[0].demoted, 32 * MIB);
            agent.stop().unwrap();
            assert_eq!(tree.settings(), before);
            round.alarms.iter().map(ToString::to_string).collect::<String>()
        };
        let old = said(&|_| {});
        assert!(old.starts_with("fair_share: Linux 6.12.0-fake has no goals of DAMON by cgroup"), "{old}");
        let used = said(&|tree| {
            tree.has_goals();
            tree.write("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "1").unwrap();
        });
        assert!(used.contains("has 1 kdamonds of another program"), "{used}");
    }

    /// A host whose CXL device has a page of cache on a poisoned place.
    fn poisoned(policy: &str, prepare: &dyn Fn(&Tree)) -> (Tree, Policy, BTreeMap<String, String>) {
        let tree = machine();
        tree.add_cxl("mem0");
        tree.put_bytes("/cache", [100 * MIB, 100 * MIB]);
        tree.set_nodes("/cache", "0-1");
        tree.poison("mem0", 0x1000, 0x1_1000_1000);
        tree.put_page(0x1_1000_1000, "/cache");
        prepare(&tree);
        let before = tree.settings();
        (tree, Policy::parse(&format!("{policy}{TEXT}")).unwrap(), before)
    }

    fn named(round: &Round) -> Vec<(Option<&str>, bool)> {
        let named = round.alarms.iter().filter_map(|alarm| match alarm {
            Alarm::CxlMemory { service, is_guess, .. } => Some((service.as_deref(), *is_guess)),
            _ => None,
        });
        named.collect()
    }

    #[test]
    fn poison_names_the_service_whose_page_lies_there_and_the_policy_answers() {
        for (policy, off, cache, web) in [
            ("", false, 100 * MIB, 100 * MIB),
            ("health.bad_memory = \"alarm\"\n", false, 100 * MIB, 100 * MIB),
            ("health.bad_memory = \"opt-out\"\n", true, 200 * MIB, 100 * MIB),
            ("health.bad_memory = \"drain\"\n", true, 200 * MIB, 100 * MIB),
        ] {
            let (tree, policy, before) = poisoned(policy, &|_| {});
            let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
            let round = look(&mut agent);
            assert_eq!(named(&round), [(Some("cache"), false)]);
            let said = round.alarms.iter().map(ToString::to_string).collect::<String>();
            assert!(said.contains("cache has pages on bad memory of mem0: poison (Injected) at 0x1000 on the device, 0x110001000"), "{said}");
            assert_eq!((tree.bytes("/cache")[0], tree.bytes("/web")[0]), (cache, web));
            assert_eq!(round.services[0].bad_memory, 1);
            assert_eq!((round.devices[0].device.as_str(), round.devices[0].bad_places), ("mem0", 1));
            assert_eq!(
                round.services[0].cause.what.contains("CXL memory is bad"),
                off,
                "{:?}",
                round.services[0].cause
            );
            assert_eq!(tree.settings()["/sys/fs/cgroup/cache/cpuset.mems"], if off { "0" } else { "0-1" });
            // It stays so from round to round, and over a change of the policy.
            agent.change(agent.policy().clone()).unwrap();
            let round = agent.round(2000).unwrap().0;
            assert_eq!((named(&round).len(), round.services[0].bad_memory), (1, 1));
            assert_eq!(tree.settings()["/sys/fs/cgroup/cache/cpuset.mems"], if off { "0" } else { "0-1" });
            // The next look at the list finds it cleared, and the service may use both tiers again.
            tree.clear_poison("mem0");
            assert_eq!(named(&agent.round(3000).unwrap().0).len(), 1, "the list is asked for once a minute");
            let round = agent.round(70_000).unwrap().0;
            assert_eq!((named(&round).len(), round.devices[0].bad_places), (0, 0));
            assert_eq!(tree.settings()["/sys/fs/cgroup/cache/cpuset.mems"], "0-1");
            agent.stop().unwrap();
            assert_eq!(tree.settings(), before);
        }
    }

    #[test]
    fn a_drain_keeps_every_service_off_a_device_that_is_not_well() {
        let (tree, policy, _) =
            poisoned("health.bad_memory = \"drain\"\n", &|tree| tree.clear_poison("mem0"));
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        assert_eq!(named(&look(&mut agent)), []);
        tree.put_bytes("/cache", [120 * MIB, 80 * MIB]);
        tree.trace("cxl_memory_module: memdev=mem0 log=Failure : health_status='REPLACEMENT_NEEDED' media_status='Normal'");
        tree.trace("cxl_poison: memdev=mem0 dpa=none");
        let round = look(&mut agent);
        assert_eq!(
            named(&round),
            [(Some("cache"), true)],
            "it has bytes on the slow tier, and no place is named"
        );
        assert!(
            round
                .alarms
                .iter()
                .any(|alarm| alarm.kind() == "host-setting" && alarm.to_string().contains("dpa=0x"))
        );
        assert_eq!((round.devices[0].events, tree.bytes("/cache")[1]), (1, 0));
        assert_eq!(round.services[0].cause.line, Some(1));
        agent.change(agent.policy().clone()).unwrap();
        assert_eq!(named(&look(&mut agent)), [], "a reload forgets what is on no list");
    }

    #[test]
    fn what_of_health_cannot_be_had_is_said() {
        let said = |prepare: &dyn Fn(&Tree)| {
            let (tree, policy, before) = poisoned("health.bad_memory = \"opt-out\"\n", prepare);
            let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
            let round = look(&mut agent);
            let moved = tree.bytes("/cache")[1] == 0;
            agent.stop().unwrap();
            assert_eq!(tree.settings(), before);
            (round.alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"), moved)
        };
        let (untraced, moved) = said(&|tree| tree.take("/sys/kernel/tracing/events/cxl/enable"));
        assert!(untraced.contains("it needs 6.3 or later, tracefs") && !moved, "{untraced}");
        assert!(untraced.contains("poison and faults of CXL devices (mem0) are not seen"), "{untraced}");
        let (old, moved) = said(&|tree| tree.put("/proc/sys/kernel/osrelease", "6.10.1\n"));
        assert!(old.contains("may stop when it moves a poisoned page") && !moved, "{old}");
        let (unlisted, moved) = said(&|tree| {
            tree.take("/sys/bus/cxl/devices/mem0/trigger_poison_list");
            tree.put("/sys/bus/cxl/devices/mem0/serial", "1\n");
        });
        assert!(unlisted.contains("mem0: no trigger_poison_list") && !moved, "{unlisted}");
        let (other, moved) = said(&|tree| tree.make_folder(polder_linux::CxlWatch::path()).unwrap());
        assert!(other.contains("this agent has not made it") && !moved, "{other}");
        let tree = machine();
        assert!(look(&mut start(&tree)).devices.is_empty(), "a host without CXL devices");
    }

    #[test]
    fn each_service_says_why_it_is_as_it_is_since_when_and_by_which_line() {
        let tree = machine();
        let mut agent = start(&tree);
        let mut causes = Vec::new();
        for round in 0..5 {
            let (round, _) = agent.round(1000 * round).unwrap();
            causes.push((round.services[0].cause.since_ms, round.services[0].cause.line));
        }
        assert_eq!(causes, [(0, Some(6)), (0, Some(6)), (0, Some(6)), (3000, Some(6)), (3000, Some(6))]);
        let history = &agent.causes()["cache"];
        let said: Vec<&str> = history.iter().map(|cause| cause.what.as_str()).collect();
        assert_eq!(said, ["it is over local_high, and its coldest pages go down", "it is within its bounds"]);
        assert_eq!(agent.causes()["web"][0].what, "it is opted out, and nothing lies on the slow tier");
    }

    #[test]
    fn a_unit_is_found_in_slices_of_the_system_and_never_in_those_of_users() {
        let tree = machine();
        let policy = "[service.db]\nunit = \"db.service\"\ntier = \"background\"\n";
        tree.add_group("/user.slice", [0, 0]);
        tree.add_group("/user.slice/db.service", [MIB, 0]);
        tree.add_group("/system.slice", [0, 0]);
        tree.add_group("/system.slice/web.service", [0, 0]);
        tree.add_group("/system.slice/web.service/db.service", [MIB, 0]);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(policy).unwrap(), JOURNAL, false).unwrap();
        let none = Alarm::NoSuchCgroup { service: "db".to_owned(), cgroup: "db.service".to_owned() };
        assert_eq!(look(&mut agent).alarms, [none]);
        tree.add_group("/system.slice/db.slice", [0, 0]);
        tree.add_group("/system.slice/db.slice/db.service", [8 * MIB, 0]);
        assert_eq!(look(&mut agent).services[0].cgroup, "/system.slice/db.slice/db.service");
        assert_eq!(tree.bytes("/system.slice/db.slice/db.service"), [0, 8 * MIB]);
        tree.rename_group("/system.slice/db.slice/db.service", "/system.slice/db.service");
        assert_eq!(look(&mut agent).services[0].cgroup, "/system.slice/db.service");
    }

    #[test]
    fn pods_with_a_label_are_services_as_they_come_and_go() {
        const ADDRESS: &str = "http://127.0.0.1:10255/pods";
        const PATH: &str = "/kubepods/burstable/pod";
        let text = "[kubernetes]\npods = \"http://127.0.0.1:10255/pods\"\n\
            [service.web]\nlabel = \"app=web\"\nnamespace = \"shop\"\ntier = \"opt-out\"\n";
        let pods = include_str!("../tests/pods.json");
        let (first, second) =
            ("b2c1f8c0-1df0-4c1c-9c6f-7a3de1b0a6f1", "c9a0d1de-7b44-4f5e-8d2a-63b7a9f0c4e2");
        let tree = machine();
        for id in [first, second] {
            tree.add_group(&format!("{PATH}{id}"), [50 * MIB, 30 * MIB]);
        }
        let before = tree.settings();
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        let said =
            |round: &Round| round.alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        let round = look(&mut agent);
        assert!(
            said(&round).contains("kubernetes.pods: http://127.0.0.1:10255/pods: connection refused"),
            "{}",
            said(&round)
        );
        tree.answer(ADDRESS, Some(pods));
        let round = agent.round(10_000).unwrap().0;
        let names: Vec<&str> = round.services.iter().map(|row| row.service.as_str()).collect();
        assert_eq!(names, ["web/web-6d4cf56db6-7xk2p", "web/web-6d4cf56db6-qz9lm"]);
        assert_eq!(tree.bytes(&format!("{PATH}{first}")), [80 * MIB, 0]);
        // A kubelet that cannot be reached for a while: its pods go on.
        tree.answer(ADDRESS, None);
        let round = agent.round(20_000).unwrap().0;
        assert_eq!((round.services.len(), said(&round).contains("connection refused")), (2, true));
        tree.answer(ADDRESS, Some("Unauthorized"));
        let round = agent.round(30_000).unwrap().0;
        assert!(
            round.services.len() == 2 && said(&round).contains("it is no list of pods"),
            "{}",
            said(&round)
        );
        // One pod ends: before the kubelet's next list its cgroup is missed, and then it is forgotten.
        tree.remove_group(&format!("{PATH}{second}"));
        let round = agent.round(31_000).unwrap().0;
        assert!(
            round.services.len() == 1 && said(&round).contains("web/web-6d4cf56db6-qz9lm has no cgroup"),
            "{}",
            said(&round)
        );
        tree.answer(ADDRESS, Some(&pods.replace("\"phase\": \"Running\"", "\"phase\": \"Failed\"")));
        tree.remove_group(&format!("{PATH}{first}"));
        let round = agent.round(40_000).unwrap().0;
        assert_eq!(round.services.len(), 0);
        assert_eq!(said(&round), "web has no pods: no pod of this node is in the namespace shop");
        assert!(agent.causes().is_empty(), "pods that are gone leave nothing behind");
        agent.stop().unwrap();
        let settings = tree.settings();
        assert!(settings.iter().all(|(path, value)| before.get(path) == Some(value)), "{settings:?}");
    }

    #[test]
    fn a_pod_that_two_labels_select_is_of_one_service() {
        let text = "[kubernetes]\npods = \"/etc/polder/pods.json\"\n\
            [service.all]\nlabel = \"app=web\"\ntier = \"opt-out\"\n\
            [service.canary]\nlabel = \"track=canary\"\ntier = \"background\"\n";
        let tree = machine();
        tree.add_group("/kubepods/burstable/podc9a0d1de-7b44-4f5e-8d2a-63b7a9f0c4e2", [50 * MIB, 30 * MIB]);
        tree.append("/etc/polder/pods.json", include_str!("../tests/pods.json")).unwrap();
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        let round = look(&mut agent);
        assert_eq!(round.services.len(), 1);
        let said = round.alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(
            said.contains("canary/web-6d4cf56db6-qz9lm: the pod is that of all/web-6d4cf56db6-qz9lm too"),
            "{said}"
        );
        agent.stop().unwrap();
    }

    #[test]
    fn pods_of_one_name_in_two_namespaces_are_two_services() {
        let pod = |namespace: &str, id: &str| {
            format!(
                "{{\"metadata\": {{\"name\": \"web-0\", \"namespace\": \"{namespace}\", \"uid\": \"{id}\", \"labels\": {{\"app\": \"web\"}}}}}}"
            )
        };
        let tree = machine();
        for id in ["a", "b"] {
            tree.add_group(&format!("/kubepods/pod{id}"), [50 * MIB, 0]);
        }
        let text =
            "[kubernetes]\npods = \"/pods.json\"\n[service.web]\nlabel = \"app=web\"\ntier = \"opt-in\"\n";
        tree.append("/pods.json", &format!("{{\"items\": [{}, {}]}}", pod("shop", "a"), pod("bank", "b")))
            .unwrap();
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        let names: Vec<_> = look(&mut agent).services.into_iter().map(|row| row.service).collect();
        assert_eq!(names, ["web/shop/web-0", "web/bank/web-0"]);
        assert_eq!(agent.causes().len(), 2);
    }

    #[test]
    fn a_cgroup_that_goes_at_any_step_is_an_alarm_and_leaves_nothing_behind() {
        let mut steps = 0;
        for calls in 0.. {
            let tree = machine();
            let mut before = tree.settings();
            tree.remove_after(calls, "/web");
            let mut agent = start(&tree);
            let mut alarms = vec![];
            for _ in 0..3 {
                // Demotion breaks the opt-out in each round.
                drop(tree.write("/sys/fs/cgroup/web/memory.reclaim", &(20 * MIB).to_string()));
                alarms.extend(look(&mut agent).alarms);
            }
            agent.stop().unwrap();
            if tree.bytes("/web") != [0, 0] {
                break;
            }
            let is_known =
                |alarm: &Alarm| matches!(alarm, Alarm::NoSuchCgroup { .. } | Alarm::OptOutBroken { .. });
            assert!(alarms.iter().all(is_known), "removed at step {calls}: {alarms:?}");
            before.remove("/sys/fs/cgroup/web/cpuset.mems");
            assert_eq!(tree.settings(), before, "removed at step {calls}");
            assert!(tree.disk().is_empty(), "removed at step {calls}");
            steps += 1;
        }
        println!("removed at {steps} steps");
        assert!(steps >= 60, "the agent took {steps} steps only");
    }

    #[test]
    fn a_cgroup_without_a_controller_is_there_and_the_alarm_names_the_controller() {
        for (file, controller) in [("memory.numa_stat", "memory"), ("cpuset.mems.effective", "cpuset")] {
            let tree = machine();
            tree.take(&format!("/sys/fs/cgroup/web/{file}"));
            let mut agent = start(&tree);
            let alarms = look(&mut agent).alarms;
            let said = alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
            let expected = format!(
                "no {controller} controller; enable it with: echo +{controller} > /sys/fs/cgroup/cgroup.subtree_control"
            );
            assert!(alarms.len() == 1 && said.contains(&expected), "{said}");
        }
    }

    #[test]
    fn page_cache_goes_down_and_a_kernel_that_cannot_tell_it_is_an_alarm() {
        let policy = "[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\npage_cache = \"slow\"\n";
        for (can_tell, left) in [(true, 170), (false, 200)] {
            let tree = machine();
            tree.set_cache("/cache", [30 * MIB, 0]);
            if !can_tell {
                tree.lacks_swappiness();
            }
            let (mut agent, _) = Agent::start(&tree, Policy::parse(policy).unwrap(), JOURNAL, false).unwrap();
            let round = look(&mut agent);
            assert_eq!(tree.bytes("/cache")[0], left * MIB);
            let is_refused = matches!(&round.alarms[..], [Alarm::Refused { error, .. }] if error.contains("before Linux 6.9"));
            assert_eq!(is_refused, !can_tell, "{:?}", round.alarms);
        }
    }

    #[test]
    fn interleave_weights_are_set_and_what_the_kernel_lacks_is_an_alarm() {
        let auto = "[interleave]\nweights = \"auto\"\n";
        let tree = machine();
        let alarms = |tree: &Tree| {
            let (mut agent, _) = Agent::start(tree, Policy::parse(auto).unwrap(), JOURNAL, false).unwrap();
            let alarms = look(&mut agent).alarms;
            let weights =
                [0, 1].map(|node| tree.read(&format!("{INTERLEAVE}/node{node}")).unwrap_or_default());
            agent.stop().unwrap();
            (alarms.len(), weights.concat())
        };
        assert_eq!(alarms(&tree), (1, "1\n1\n".to_owned()), "HMAT is missing");
        for (node, rate) in [(0, 60_000), (1, 20_000)] {
            let path = format!("/sys/devices/system/node/node{node}/access0/initiators/read_bandwidth");
            tree.put(&path, &rate.to_string());
        }
        let before = tree.settings();
        assert_eq!(alarms(&tree), (0, "3\n1\n".to_owned()));
        assert_eq!(tree.settings(), before);
        tree.take(&format!("{INTERLEAVE}/node0"));
        tree.take(&format!("{INTERLEAVE}/node1"));
        assert_eq!(alarms(&tree).0, 2, "each weight is named");
    }

    #[test]
    fn weights_that_the_kernel_derived_are_derived_again_after_a_stop() {
        let tree = machine();
        tree.derives_weights();
        let before = tree.settings();
        let policy = Policy::parse("[interleave]\nweights = { 0 = 3, 1 = 1 }\n").unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        assert_eq!(tree.settings()[INTERLEAVE_AUTO], "false\n");
        agent.change(Policy::parse("").unwrap()).unwrap();
        assert_eq!(tree.settings(), before);
    }

    #[test]
    fn a_service_that_suffers_or_loses_processes_is_seen() {
        let tree = machine();
        let mut agent = start(&tree);
        look(&mut agent);
        tree.suffer("/cache", 25.0, 0, 2);
        let round = look(&mut agent);
        assert_eq!(round.services[0].demoted, 0);
        assert!(round.services[0].cause.what.contains("pressure_limit"));
        assert_eq!(round.alarms, [Alarm::OomKill { service: "cache".to_owned(), kills: 2 }]);
        tree.suffer("/cache", 0.0, 1_000_000, 0);
        assert!(look(&mut agent).services[0].cause.what.contains("refault_limit"));
    }

    #[test]
    fn an_opt_out_keeps_the_nodes_that_an_operator_left_out() {
        let tree = machine();
        tree.set_parent_nodes("/web", "1");
        let mut agent = start(&tree);
        let alarms = look(&mut agent).alarms;
        let is_named = |alarm: &Alarm| matches!(alarm, Alarm::Refused { error, .. } if error.contains("give the parent a fast node"));
        assert!(alarms.iter().any(is_named), "{alarms:?}");
        agent.stop().unwrap();
    }

    #[test]
    fn a_record_of_a_run_replays_to_the_same_decisions() {
        let tree = machine();
        let mut agent = start(&tree);
        let mut record = Vec::new();
        for round in 0..12 {
            if round == 4 {
                tree.suffer("/cache", 25.0, 0, 0);
            }
            if round == 5 {
                tree.suffer("/cache", 0.0, 0, 0);
                tree.put_bytes("/cache", [400 * MIB, 0]);
            }
            let line = serde_json::to_string(&agent.round(0).unwrap().1).unwrap();
            record.push(serde_json::from_str(&line).unwrap());
        }
        let (moves, otherwise) = pages::replay(&record);
        assert_eq!(otherwise, None);
        assert!(moves >= 8, "{moves} moves");
    }

    /// A policy of up to four services, with keys of the host, drawn.
    fn any_policy() -> impl Strategy<Value = Policy> {
        let service = (0..4usize, 0..3usize, 0.0..1.0f64, 0.0..1.0f64, any::<bool>(), any::<bool>());
        let answers = proptest::sample::select(vec!["", "alarm", "opt-out", "drain"]);
        let host = (0..4usize, proptest::option::of(1..1000u64), any::<bool>(), any::<bool>(), answers);
        (proptest::collection::vec(service, 0..4), host).prop_map(
            |(drawn, (weights, rate, fills, by_kernel, answer))| {
                let mut text = String::new();
                if by_kernel {
                    text += "fair_share = \"kernel\"\n";
                }
                if !answer.is_empty() {
                    text += &format!("health.bad_memory = \"{answer}\"\n");
                }
                if let Some(rate) = rate {
                    text += &format!("promotion_limit = \"{rate}MB/s\"\n");
                }
                if fills {
                    text += "free_low = 0.4\nfree_high = 0.5\n";
                }
                text += [
                    "",
                    "[interleave]\nweights = \"auto\"\n",
                    "[interleave]\nweights = { 0 = 5, 1 = 2 }\n",
                    "[interleave]\nweights = { 0 = 5, 9 = 2 }\n",
                ][weights];
                let mut taken = BTreeSet::new();
                for (group, rule, a, b, by_unit, slow_cache) in drawn {
                    if !taken.insert(group) {
                        continue;
                    }
                    let tier = ["opt-in", "opt-out", "background"][rule];
                    let place = match by_unit {
                        true => format!("unit = \"g{group}.service\""),
                        false => format!("cgroup = \"/system.slice/g{group}.service\""),
                    };
                    text += &format!("[service.s{group}]\n{place}\ntier = \"{tier}\"\n");
                    if rule == 0 {
                        text += &format!("local_low = {:?}\nlocal_high = {:?}\n", a.min(b), a.max(b));
                    }
                    if slow_cache && rule != 1 {
                        text += "page_cache = \"slow\"\n";
                    }
                }
                Policy::parse(&text).expect(&text)
            },
        )
    }

    /// What happens to a host beside the agent, before one of its changes.
    #[derive(Clone, Debug)]
    enum Event {
        Killed,
        Busy(u64),
        Gone(usize),
        Renamed(usize),
        Recreated(usize),
        LosesFile(usize, usize),
        Suffers(usize),
        Grows(usize),
        Poisoned(usize),
        Cleared,
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Killed),
            (0..6u64).prop_map(Event::Busy),
            (0..4usize).prop_map(Event::Gone),
            (0..4usize).prop_map(Event::Renamed),
            (0..4usize).prop_map(Event::Recreated),
            (0..4usize, 0..4usize).prop_map(|(group, file)| Event::LosesFile(group, file)),
            (0..4usize).prop_map(Event::Suffers),
            (0..4usize).prop_map(Event::Grows),
            (0..4usize).prop_map(Event::Poisoned),
            Just(Event::Cleared),
        ]
    }

    const FILES: [&str; 4] = ["memory.pressure", "memory.reclaim", "memory.stat", "cpuset.mems"];

    fn happen(tree: &Tree, event: &Event, before: &mut BTreeMap<String, String>) {
        let path = |group: &usize| format!("/system.slice/g{group}.service");
        let mems = |group: &usize| format!("/sys/fs/cgroup{}/cpuset.mems", path(group));
        match event {
            Event::Killed => {}
            Event::Busy(writes) => tree.busy_after(*writes),
            Event::Gone(group) => {
                tree.remove_group(&path(group));
                before.remove(&mems(group));
            }
            Event::Renamed(group) => {
                let to = format!("/system.slice/renamed.slice/g{group}.service");
                if before.remove(&mems(group)).is_some() {
                    tree.rename_group(&path(group), &to);
                    before.insert(format!("/sys/fs/cgroup{to}/cpuset.mems"), "0-1".to_owned());
                }
            }
            Event::Recreated(group) => {
                tree.add_group(&path(group), [70 * MIB, 10 * MIB]);
                before.insert(mems(group), "0-1".to_owned());
            }
            Event::LosesFile(group, 3) => {
                // A controller that is turned off takes the setting with it.
                if before.contains_key(&mems(group)) && tree.settings()[&mems(group)] == before[&mems(group)]
                {
                    tree.take(&mems(group));
                }
            }
            Event::LosesFile(group, file) => {
                tree.take(&format!("/sys/fs/cgroup{}/{}", path(group), FILES[*file]))
            }
            Event::Suffers(group) => tree.suffer(&path(group), 30.0, 5000, 1),
            Event::Grows(group) => tree.put_bytes(&path(group), [90 * MIB, 30 * MIB]),
            Event::Poisoned(group) => {
                let at = *group as u64 * 4096;
                tree.poison("mem0", at, 0x1_0000_0000 + at);
                tree.put_page(0x1_0000_0000 + at, &path(group));
            }
            Event::Cleared => tree.clear_poison("mem0"),
        }
    }

    #[test]
    fn ten_thousand_random_policy_changes_leave_every_setting_as_found() {
        const RUNS: u32 = 500;
        const CHANGES: usize = 20;
        let made = std::cell::Cell::new([0_u64; 3]);
        let strategy = (
            proptest::collection::vec((any_policy(), proptest::option::of(any_event())), CHANGES),
            proptest::option::of(1..200u64),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        );
        let config = ProptestConfig { cases: RUNS, failure_persistence: None, ..ProptestConfig::default() };
        let mut runner = proptest::test_runner::TestRunner::new(config);
        let outcome = runner.run(&strategy, |(changes, kill, derives, goals, cxl)| {
            let tree = Tree::new(512 * MIB);
            if cxl {
                tree.add_cxl("mem0");
            }
            if goals {
                tree.has_goals();
            }
            if derives {
                tree.derives_weights();
            }
            tree.add_group("/system.slice", [0, 0]);
            for group in 0..4 {
                let path = format!("/system.slice/g{group}.service");
                tree.add_group(&path, [60 * MIB, 30 * MIB]);
                tree.set_cache(&path, [20 * MIB, 0]);
                tree.set_nodes(&path, ["", "0", "0-1", "1"][group]);
                tree.set_parent_nodes(&path, ["", "", "0", ""][group]);
            }
            let mut before = tree.settings();
            tree.kill_after(kill.unwrap_or(u64::MAX));
            let [mut count, mut kills, mut moved] = made.get();
            let mut agent = Agent::start(&tree, Policy::parse("").unwrap(), JOURNAL, false).ok();
            for (policy, event) in changes {
                if let Some(event) = &event {
                    happen(&tree, event, &mut before);
                    if matches!(event, Event::Killed) {
                        agent = None;
                    }
                }
                if agent.is_none() || tree.is_dead() {
                    // It was killed, and a service manager starts it anew.
                    kills += 1;
                    tree.revive();
                    agent = Agent::start(&tree, policy, JOURNAL, false)
                        .ok()
                        .map(|(agent, _)| (agent, Vec::new()));
                } else if let Some((agent, _)) = &mut agent {
                    // What fails is an alarm of the next round.
                    drop(agent.change(policy));
                }
                if let Some((agent, _)) = &mut agent {
                    moved += agent.round(0).map_or(0, |(_, recorded)| recorded.decision.moves.len() as u64);
                }
                count += 1;
            }
            made.set([count, kills, moved]);
            if let Some((mut agent, _)) = agent {
                drop(agent.stop());
            }
            if tree.is_dead() || !tree.disk().is_empty() {
                tree.revive();
                Settings::start(&tree, JOURNAL).unwrap();
            }
            prop_assert_eq!(tree.settings(), before);
            prop_assert!(tree.disk().is_empty());
            Ok(())
        });
        let [count, kills, moved] = made.get();
        println!("{count} changes, {kills} kills, {moved} moves");
        if let Err(error) = outcome {
            panic!("{error}");
        }
        assert!(
            count >= 10_000 && kills >= 500 && moved >= 5_000,
            "{count} changes, {kills} kills, {moved} moves"
        );
    }
}
