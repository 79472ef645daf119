//! The control loop: settings that are applied once and kept, and a round that looks, decides and acts.

use std::collections::{BTreeMap, BTreeSet};

use polder_linux::{BALANCING, Cgroup, DEMOTION, Kernel, KernelError, Restored, Settings, Tiers, show_nodes};
use polder_place::pages::{self, DemoteReason, PageMove, RoundLimits, ServiceBytes, ServicePolicy, TierRule};
use serde::Serialize;

use crate::{Policy, Service};

/// Why the agent stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The kernel's files could not be read or written.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// What an operator is told of at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
        /// Its cgroup.
        cgroup: String,
    },
    /// A setting could not be changed in this round; the next one tries again.
    Refused {
        /// The service.
        service: String,
        /// What the kernel said.
        error: String,
    },
}

/// One service after a round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServiceRound {
    /// The service.
    pub service: String,
    /// Bytes on the fast tier, as the round found them.
    pub fast: u64,
    /// Bytes on the slow tier, as the round found them.
    pub slow: u64,
    /// The share of its bytes on the fast tier.
    pub local: f64,
    /// Bytes that the kernel was asked to demote.
    pub demoted: u64,
    /// Why, in words.
    pub reason: Option<String>,
}

/// What one round saw and did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Round {
    /// Its number, from 1.
    pub round: u64,
    /// The services that are there.
    pub services: Vec<ServiceRound>,
    /// What went wrong.
    pub alarms: Vec<Alarm>,
}

/// The tiering agent of one host.
#[derive(Debug)]
pub struct Agent<K> {
    settings: Settings<K>,
    tiers: Tiers,
    policy: Policy,
    rounds: u64,
    dry_run: bool,
}

impl<K: Kernel> Agent<K> {
    /// Restores what a killed agent left, and prepares to carry out `policy`. With `dry_run` nothing is written, the journal of a
    /// killed agent included.
    ///
    /// # Errors
    /// [`AgentError::Kernel`], also where the machine has no slow tier.
    pub fn start(
        kernel: K,
        policy: Policy,
        journal: &str,
        dry_run: bool,
    ) -> Result<(Self, Vec<Restored>), AgentError> {
        let tiers = Tiers::discover(&kernel)?;
        tiers.check_demotion(&kernel)?;
        let (settings, restored) = match dry_run {
            true => (Settings::detached(kernel, journal), Vec::new()),
            false => Settings::start(kernel, journal)?,
        };
        let mut agent = Self { settings, tiers, policy, rounds: 0, dry_run };
        agent.set_host()?;
        Ok((agent, restored))
    }

    /// The tiers of the machine.
    pub const fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Replaces the policy. Settings that it no longer asks for are restored first.
    ///
    /// # Errors
    /// [`AgentError::Kernel`].
    pub fn change(&mut self, policy: Policy) -> Result<(), AgentError> {
        self.policy = policy;
        if !self.dry_run {
            let kept = self.policy.settings();
            self.settings.restore_all_but(|path| kept.contains(path))?;
        }
        self.set_host()
    }

    /// Restores every setting.
    ///
    /// # Errors
    /// [`AgentError::Kernel`]; the journal stays then, and the next start tries again.
    pub fn stop(&mut self) -> Result<Vec<Restored>, AgentError> {
        if self.dry_run { Ok(Vec::new()) } else { Ok(self.settings.restore()?) }
    }

    /// Demotion on, and promotion of hot pages of the slow tier.
    fn set_host(&mut self) -> Result<(), AgentError> {
        if !self.dry_run && !self.policy.services.is_empty() {
            self.settings.set(DEMOTION, "true")?;
            self.settings.set(BALANCING, "2")?;
        }
        Ok(())
    }

    /// Looks at every service, decides and acts.
    ///
    /// # Errors
    /// [`AgentError::Kernel`] where the machine's own files fail; a service's become an [`Alarm`].
    pub fn round(&mut self) -> Result<Round, AgentError> {
        self.rounds += 1;
        let mut round = Round { round: self.rounds, ..Round::default() };
        let services = self.policy.services.clone();
        let mut present: Vec<(&Service, ServiceBytes)> = Vec::new();
        for service in &services {
            match self.look(service) {
                Ok(bytes) => present.push((service, bytes)),
                Err(error) => round.alarms.push(alarm(service, &error)),
            }
        }
        let policies: Vec<ServicePolicy> = present.iter().map(|(service, _)| service.policy).collect();
        let seen: Vec<ServiceBytes> = present.iter().map(|(_, bytes)| *bytes).collect();
        let limits = RoundLimits {
            fast_free: self.tiers.fast_free(self.settings.kernel())?,
            step: self.policy.step_bytes,
            pressure: self.policy.pressure_limit,
        };
        let moves = pages::decide(&policies, &seen, &limits);
        let names: Vec<&str> = present.iter().map(|(service, _)| service.name.as_str()).collect();
        round.services = present.iter().map(|(service, bytes)| unmoved(service, bytes)).collect();
        for change in moves {
            let (index, outcome) = match change {
                PageMove::Demote { service, bytes, reason } => {
                    round.services[service].demoted += bytes;
                    round.services[service].reason = Some(in_words(reason, &names));
                    (service, self.demote(&present[service].0.cgroup, bytes))
                }
                PageMove::BringBack { service, bytes } => {
                    (service, self.bring_back(present[service].0, bytes, &mut round))
                }
            };
            if let Err(error) = outcome {
                round.alarms.push(alarm(present[index].0, &error));
            }
        }
        Ok(round)
    }

    /// Bytes of a service by tier; an opted-out one is kept to the fast nodes first.
    fn look(&mut self, service: &Service) -> Result<ServiceBytes, KernelError> {
        if service.policy.rule == TierRule::OptOut && !self.dry_run {
            let effective = service.cgroup.effective_nodes(self.settings.kernel())?;
            if !effective.is_subset(&self.tiers.fast) {
                self.keep_to_fast(service, &[show_nodes(&self.tiers.fast)])?;
            }
        }
        let kernel = self.settings.kernel();
        let by_node = service.cgroup.bytes_by_node(kernel)?;
        let (fast, slow) = (sum(&by_node, &self.tiers.fast), sum(&by_node, &self.tiers.slow));
        Ok(ServiceBytes { fast, slow, pressure: service.cgroup.pressure(kernel)? })
    }

    /// Writes `cpuset.mems`. An empty set cannot be given back while the cgroup has processes; its nodes can.
    fn keep_to_fast(&mut self, service: &Service, lines: &[String]) -> Result<(), KernelError> {
        let effective = service.cgroup.effective_nodes(self.settings.kernel())?;
        let path = service.cgroup.file("cpuset.mems");
        self.settings.set_in_turn(&path, lines, Some(show_nodes(&effective)))
    }

    fn demote(&self, cgroup: &Cgroup, bytes: u64) -> Result<(), KernelError> {
        if !self.dry_run {
            cgroup.demote(self.settings.kernel(), bytes)?;
        }
        Ok(())
    }

    /// Migrates what lies on the slow tier against an opt-out, and says what is left.
    fn bring_back(&mut self, service: &Service, found: u64, round: &mut Round) -> Result<(), KernelError> {
        let mut left = found;
        if !self.dry_run {
            self.keep_to_fast(service, &Cgroup::migration(&self.tiers.fast, &self.tiers.all()))?;
            left = sum(&service.cgroup.bytes_by_node(self.settings.kernel())?, &self.tiers.slow);
        }
        round.alarms.push(Alarm::OptOutBroken { service: service.name.clone(), found, left });
        Ok(())
    }
}

fn sum(by_node: &BTreeMap<u32, u64>, nodes: &BTreeSet<u32>) -> u64 {
    nodes.iter().filter_map(|node| by_node.get(node)).sum()
}

fn unmoved(service: &Service, bytes: &ServiceBytes) -> ServiceRound {
    let ServiceBytes { fast, slow, .. } = *bytes;
    ServiceRound {
        service: service.name.clone(),
        fast,
        slow,
        local: bytes.local_share(),
        demoted: 0,
        reason: None,
    }
}

fn alarm(service: &Service, error: &KernelError) -> Alarm {
    let (name, cgroup) = (service.name.clone(), service.cgroup.path().to_owned());
    match error.is_gone() {
        true => Alarm::NoSuchCgroup { service: name, cgroup },
        false => Alarm::Refused { service: name, error: error.to_string() },
    }
}

fn in_words(reason: DemoteReason, names: &[&str]) -> String {
    match reason {
        DemoteReason::OverHigh => "over local_high".to_owned(),
        DemoteReason::Background => "background".to_owned(),
        DemoteReason::MakesRoom { for_service } => format!("makes room for {}", names[for_service]),
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

    #[test]
    fn a_share_over_its_bound_comes_within_it_in_steps() {
        let tree = machine();
        let mut agent = start(&tree);
        let demoted: Vec<u64> = (0..5).map(|_| agent.round().unwrap().services[0].demoted / MIB).collect();
        assert_eq!(demoted, [32, 32, 26, 0, 0]);
        assert_eq!(tree.bytes("/cache"), [110 * MIB, 90 * MIB]);
    }

    #[test]
    fn an_opt_out_that_demotion_broke_is_repaired_in_the_round_that_sees_it() {
        let tree = machine();
        let mut agent = start(&tree);
        agent.round().unwrap();
        assert_eq!(tree.bytes("/web"), [100 * MIB, 0], "the cpuset moves what is there");
        tree.write("/sys/fs/cgroup/web/memory.reclaim", &(20 * MIB).to_string()).unwrap();
        assert_eq!(tree.bytes("/web"), [80 * MIB, 20 * MIB], "demotion ignores cpusets");
        let round = agent.round().unwrap();
        let broken = Alarm::OptOutBroken { service: "web".to_owned(), found: 20 * MIB, left: 0 };
        assert_eq!(round.alarms, [broken]);
        assert_eq!(tree.bytes("/web"), [100 * MIB, 0]);
    }

    #[test]
    fn a_service_that_is_gone_is_an_alarm_and_the_others_go_on() {
        let tree = machine();
        let mut agent = start(&tree);
        tree.remove_group("/web");
        let round = agent.round().unwrap();
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
        agent.round().unwrap();
        tree.remove_group("/web");
        tree.add_group("/web", [10 * MIB, 0]);
        tree.set_nodes("/web", "1");
        agent.round().unwrap();
        assert_eq!(tree.settings()["/sys/fs/cgroup/web/cpuset.mems"], "0", "the later one is opted out too");
        agent.stop().unwrap();
        assert_eq!(tree.settings()["/sys/fs/cgroup/web/cpuset.mems"], "1");
    }

    #[test]
    fn a_change_restores_what_the_new_policy_leaves_out_and_touches_nothing_else() {
        let tree = machine();
        tree.set_nodes("/web", "0-1");
        let mut agent = start(&tree);
        agent.round().unwrap();
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
        assert_eq!(agent.round().unwrap().services[0].demoted, 32 * MIB);
        agent.stop().unwrap();
        assert_eq!((tree.settings(), tree.bytes("/cache"), tree.disk().len()), (before, [200 * MIB, 0], 0));
    }

    #[test]
    fn an_agent_that_is_killed_at_any_of_its_writes_leaves_nothing_behind_after_the_next_start() {
        let mut kills = 0;
        for writes in 1.. {
            let tree = machine();
            let before = tree.settings();
            tree.kill_after(writes);
            let policy = || Policy::parse(TEXT).unwrap();
            if let Ok((mut agent, _)) = Agent::start(&tree, policy(), JOURNAL, false) {
                for _ in 0..3 {
                    drop(agent.round());
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
        assert!(kills >= 12, "the agent wrote {kills} times only");
    }

    /// A policy of up to four services, drawn.
    fn any_policy() -> impl Strategy<Value = Policy> {
        let service = (0..4usize, 0..3usize, 0.0..1.0f64, 0.0..1.0f64);
        proptest::collection::vec(service, 0..4).prop_map(|drawn| {
            let mut text = String::new();
            let mut taken = BTreeSet::new();
            for (group, rule, a, b) in drawn {
                if taken.insert(group) {
                    let tier = ["opt-in", "opt-out", "background"][rule];
                    text += &format!("[service.s{group}]\ncgroup = \"/g{group}\"\ntier = \"{tier}\"\n");
                    if rule == 0 {
                        text += &format!("local_low = {}\nlocal_high = {}\n", a.min(b), a.max(b));
                    }
                }
            }
            Policy::parse(&text).expect(&text)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
        /// 500 runs of 20 changes each: 10,000 policy changes, with kills, refusals and cgroups that go.
        #[test]
        fn random_policy_changes_leave_every_setting_as_found(
            policies in proptest::collection::vec(any_policy(), 20),
            kill in proptest::option::of(1..200u64),
            busy in proptest::option::of(0..40u64),
            gone in proptest::option::of((0..4usize, 0..20usize)),
        ) {
            let tree = Tree::new(512 * MIB);
            for group in 0..4 {
                tree.add_group(&format!("/g{group}"), [60 * MIB, 30 * MIB]);
                tree.set_nodes(&format!("/g{group}"), ["", "0", "0-1", "1"][group]);
            }
            let mut before = tree.settings();
            tree.kill_after(kill.unwrap_or(u64::MAX));
            tree.busy_after(busy.unwrap_or(u64::MAX));
            let started = Agent::start(&tree, Policy::parse("").unwrap(), JOURNAL, false);
            let Ok((mut agent, _)) = started else { return Err(TestCaseError::fail("it starts")) };
            for (index, policy) in policies.into_iter().enumerate() {
                if let Some((group, at)) = gone && at == index {
                    tree.remove_group(&format!("/g{group}"));
                    before.remove(&format!("/sys/fs/cgroup/g{group}/cpuset.mems"));
                }
                drop(agent.change(policy));
                drop(agent.round());
            }
            drop(agent.stop());
            if tree.is_dead() || !tree.disk().is_empty() {
                tree.revive();
                Agent::start(&tree, Policy::parse("").unwrap(), JOURNAL, false).unwrap().0.stop().unwrap();
            }
            prop_assert_eq!(tree.settings(), before);
            prop_assert!(tree.disk().is_empty());
        }
    }
}
