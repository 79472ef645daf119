//! The last round for Prometheus, in the text format of OpenMetrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::{DeviceHealth, Round, ServiceRound};

/// What the endpoint serves: each round replaces what was there, so that a service that is gone has no series.
#[derive(Debug, Default)]
pub struct Metrics(Mutex<Shown>);

#[derive(Clone, Debug, Default)]
struct Shown {
    round: Arc<Round>,
    /// Made when the first client asks for it, so that a round is written once for all.
    text: Option<Arc<str>>,
}

impl Metrics {
    /// No round yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what a round saw. It never waits for an answer that is being written.
    pub fn observe(&self, round: &Round) {
        let shown = Shown { round: Arc::new(round.clone()), text: None };
        *self.shown() = shown;
    }

    /// The text of the answer.
    ///
    /// # Panics
    /// Never: writing to a string cannot fail.
    #[must_use]
    pub fn text(&self) -> Arc<str> {
        let Shown { round, text } = self.shown().clone();
        text.unwrap_or_else(|| {
            let (mut text, mut registry) = (String::new(), Registry::with_prefix("polder"));
            registry.register_collector(Box::new(LastRound(Arc::clone(&round))));
            prometheus_client::encoding::text::encode(&mut text, &registry).expect("a string takes all");
            let text: Arc<str> = text.into();
            let mut shown = self.shown();
            if Arc::ptr_eq(&shown.round, &round) {
                shown.text = Some(Arc::clone(&text));
            }
            text
        })
    }
}

#[derive(Debug)]
struct LastRound(Arc<Round>);

impl Collector for LastRound {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let round = &self.0;
        let mut families = Families(encoder);
        families.host(round)?;
        families.services(&round.services, round.page_bytes)?;
        families.devices(&round.devices)?;
        families.alarms(round)
    }
}

type Labels<'l> = Vec<(&'static str, &'l str)>;

struct Families<'e>(DescriptorEncoder<'e>);

impl Families<'_> {
    /// A family whose series are told apart by labels.
    fn family<'l, M: EncodeMetric>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'l>, M)>,
    ) -> Result<(), std::fmt::Error> {
        let mut values = values.into_iter().peekable();
        let Some((_, first)) = values.peek() else { return Ok(()) };
        let mut family = self.0.encode_descriptor(name, help, None, first.metric_type())?;
        values.try_for_each(|(labels, value)| value.encode(family.encode_family(&labels)?))
    }

    fn one(&mut self, name: &str, help: &str, value: impl EncodeMetric) -> Result<(), std::fmt::Error> {
        let encoder = self.0.encode_descriptor(name, help, None, value.metric_type())?;
        value.encode(encoder)
    }

    fn host(&mut self, round: &Round) -> Result<(), std::fmt::Error> {
        let tiers = [("fast", &round.fast), ("slow", &round.slow)];
        let label = |tier| vec![("tier", tier)];
        self.family(
            "tier_bytes",
            "Memory of a tier",
            tiers.map(|(tier, memory)| (label(tier), bytes(memory.bytes))),
        )?;
        self.family(
            "tier_free_bytes",
            "Free memory of a tier",
            tiers.map(|(tier, memory)| (label(tier), bytes(memory.free))),
        )?;
        self.one("rounds", "Control rounds", ConstCounter::new(round.round))?;
        self.one("policy_changes", "Changes of the policy", ConstCounter::new(round.changes))?;
        let host = &round.host;
        self.one(
            "host_promoted_bytes",
            "Bytes promoted on the host",
            ConstCounter::new(host.promoted_pages * round.page_bytes),
        )?;
        self.one(
            "host_demoted_bytes",
            "Bytes demoted on the host, but for DAMON's",
            ConstCounter::new(host.demoted_pages * round.page_bytes),
        )?;
        self.family(
            "promotion_throttle_bytes_per_second",
            "What the agent lets the kernel promote, while services go over their bounds",
            round.kernel_promotes.map(|rate| (vec![], bytes(rate))),
        )?;
        self.one("hint_faults", "Faults of NUMA balancing", ConstCounter::new(host.hint_faults))?;
        self.one(
            "kswapd_cpu_seconds",
            "Processor time of kswapd",
            ConstCounter::new(host.kswapd_ms as f64 / 1e3),
        )?;
        self.one(
            "kdamond_cpu_seconds",
            "Processor time of DAMON",
            ConstCounter::new(host.kdamond_ms as f64 / 1e3),
        )
    }

    fn services(&mut self, services: &[ServiceRound], page: u64) -> Result<(), std::fmt::Error> {
        self.family(
            "service_bytes",
            "Bytes of a service on a tier",
            services.iter().flat_map(|row| {
                [("fast", row.fast), ("slow", row.slow)].map(|(tier, count)| {
                    (vec![("service", row.service.as_str()), ("tier", tier)], bytes(count))
                })
            }),
        )?;
        self.gauges(services, "service_local_ratio", "Share of a service's bytes on the fast tier", |row| {
            row.local
        })?;
        self.gauges(
            services,
            "service_fast_cache_bytes",
            "Page cache of a service on the fast tier",
            |row| row.fast_cache as f64,
        )?;
        self.gauges(
            services,
            "service_pressure_percent",
            "Time in which a task of a service waited for memory",
            |row| row.pressure,
        )?;
        self.gauges(services, "service_asked_bytes", "Bytes that the last round asked to demote", |row| {
            row.demoted as f64
        })?;
        self.counters(services, "service_promoted_bytes", "Bytes promoted of a service", |row| {
            row.promoted_pages * page
        })?;
        self.counters(services, "service_demoted_bytes", "Bytes demoted of a service", |row| {
            row.demoted_pages * page
        })?;
        self.counters(
            services,
            "service_returned_bytes",
            "Bytes of a service that were promoted soon after they had gone down",
            |row| row.returned,
        )?;
        self.gauges(
            services,
            "service_bad_memory",
            "Bad places of CXL memory, and faults of its devices, that hit a service",
            |row| row.bad_memory as f64,
        )?;
        self.counters(services, "service_oom_kills", "Processes killed because memory ran out", |row| {
            row.oom_kills
        })?;
        self.family(
            "service_info",
            "The rule of a service and why it is as it is",
            services.iter().map(|row| {
                let labels = vec![
                    ("service", row.service.as_str()),
                    ("rule", row.tier.name()),
                    ("cause", row.cause.what.as_str()),
                ];
                (labels, ConstGauge::new(1_i64))
            }),
        )
    }

    fn devices(&mut self, devices: &[DeviceHealth]) -> Result<(), std::fmt::Error> {
        self.family(
            "cxl_bad_places",
            "Poisoned or unreadable places of a CXL memory device",
            devices.iter().map(|row| (vec![("device", row.device.as_str())], bytes(row.bad_places))),
        )?;
        self.family(
            "cxl_events",
            "Events that a CXL memory device reported",
            devices.iter().map(|row| (vec![("device", row.device.as_str())], ConstCounter::new(row.events))),
        )
    }

    fn gauges(
        &mut self,
        services: &[ServiceRound],
        name: &str,
        help: &str,
        value: impl Fn(&ServiceRound) -> f64,
    ) -> Result<(), std::fmt::Error> {
        self.family(
            name,
            help,
            services.iter().map(|row| (vec![("service", row.service.as_str())], ConstGauge::new(value(row)))),
        )
    }

    fn counters(
        &mut self,
        services: &[ServiceRound],
        name: &str,
        help: &str,
        value: impl Fn(&ServiceRound) -> u64,
    ) -> Result<(), std::fmt::Error> {
        self.family(
            name,
            help,
            services
                .iter()
                .map(|row| (vec![("service", row.service.as_str())], ConstCounter::new(value(row)))),
        )
    }

    fn alarms(&mut self, round: &Round) -> Result<(), std::fmt::Error> {
        let labels = |alarm: &'_ crate::Alarm| (alarm.kind(), alarm.service().unwrap_or("").to_owned());
        let mut counts: BTreeMap<(&str, String), i64> = BTreeMap::new();
        for alarm in &round.alarms {
            *counts.entry(labels(alarm)).or_default() += 1;
        }
        self.family(
            "alarms",
            "Alarms of the last round",
            counts.iter().map(|((kind, service), count)| {
                (vec![("alarm", *kind), ("service", service.as_str())], ConstGauge::new(*count))
            }),
        )
    }
}

fn bytes(count: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Agent, Policy};
    use polder_linux::fake::Tree;

    const PAGE: &str = include_str!("../../../docs/agent.md");

    #[test]
    fn a_service_has_series_while_it_is_there() {
        let tree = Tree::new(1 << 30);
        tree.add_group("/a", [3 << 20, 1 << 20]);
        tree.add_cxl("mem0");
        tree.poison("mem0", 0x1000, u64::MAX);
        let policy = Policy::parse("[service.a]\ncgroup = \"/a\"\ntier = \"opt-out\"\n").unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, "/j", false).unwrap();
        let metrics = Metrics::new();
        metrics.observe(&agent.round(0).unwrap().0);
        let text = metrics.text();
        for line in [
            "# TYPE polder_service_bytes gauge",
            "polder_service_bytes{service=\"a\",tier=\"fast\"} 4194304",
            "polder_service_local_ratio{service=\"a\"} 1.0",
            "polder_tier_bytes{tier=\"fast\"} 1073741824",
            "polder_rounds_total 1",
            "polder_cxl_bad_places{device=\"mem0\"} 1",
            "polder_cxl_events_total{device=\"mem0\"} 0",
            "polder_service_bad_memory{service=\"a\"} 1.0",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        tree.remove_group("/a");
        metrics.observe(&agent.round(0).unwrap().0);
        let text = metrics.text();
        assert!(Arc::ptr_eq(&text, &metrics.text()), "a round is written once");
        assert!(!text.contains("polder_service_bytes"), "{text}");
        assert!(text.contains("polder_alarms{alarm=\"no-such-cgroup\",service=\"a\"} 1"), "{text}");
    }

    #[test]
    fn the_dashboard_and_the_page_ask_for_metrics_that_there_are() {
        let dashboard: serde_json::Value = serde_json::from_str(crate::DASHBOARD).unwrap();
        let source = include_str!("telemetry.rs");
        let text = dashboard.to_string() + PAGE;
        let mut asked = 0;
        for word in text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let Some(name) = word.strip_prefix("polder_").filter(|name| !["place", "sim"].contains(name))
            else {
                continue;
            };
            let name = name.strip_suffix("_total").unwrap_or(name);
            assert!(source.contains(&format!("\"{name}\"")), "polder_{name} is asked for");
            asked += 1;
        }
        assert!(asked >= 16, "{asked}");
    }

    #[test]
    fn the_policies_of_the_page_are_right() {
        let policies: Vec<&str> =
            PAGE.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert!(policies.len() >= 3);
        for policy in policies {
            assert!(Policy::parse(policy).is_ok_and(|policy| policy.warnings.is_empty()), "{policy}");
        }
    }
}
