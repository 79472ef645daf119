//! Health of CXL memory: which services have pages on bad places, and what the policy does for them.

use std::collections::{BTreeMap, BTreeSet};

use polder_linux::{
    Cgroup, CxlEvent, CxlKind, CxlPlace, CxlWatch, Kernel, KernelError, Settings, cxl_devices, moves_poison,
    page_owners,
};

use crate::policy::{BadMemory, HealthPolicy};
use crate::report::{Alarm, DeviceHealth};

/// One thing that is wrong with a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Wrong {
    device: String,
    kind: CxlKind,
    /// Its address on the device, if it is a place.
    dpa: Option<u64>,
}

/// What is known of it.
#[derive(Clone, Debug)]
struct Found {
    what: String,
    place: Option<CxlPlace>,
    services: BTreeSet<String>,
    /// Whether the services are those with bytes on the slow tier, because the page is not known.
    is_guess: bool,
}

/// A service as health looks at it.
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) cgroup: Cgroup,
    /// Whether it has bytes on the slow tier.
    pub(crate) is_slow: bool,
}

/// What devices of a host have reported.
#[derive(Debug, Default)]
pub(crate) struct Health {
    watch: Option<CxlWatch>,
    wrong: BTreeMap<Wrong, Found>,
    events: BTreeMap<String, u64>,
    /// What is not watched, and why.
    lacks: Vec<String>,
    /// What the last look could not read.
    failures: Vec<String>,
}

/// Bad places and faults that are kept; what is more is counted.
const MOST_WRONG: usize = 1000;

impl Health {
    /// Begins to watch. What cannot be watched is said in alarms.
    pub(crate) fn start<K: Kernel>(settings: &mut Settings<K>) -> Self {
        let mut health = Self::default();
        match CxlWatch::start(settings) {
            Ok(watch) => health.watch = watch,
            Err(error) => health.lacks.push(format!(
                "{error}; poison and faults of CXL devices ({}) are not seen",
                cxl_devices(settings.kernel()).join(", ")
            )),
        }
        health
    }

    /// Whether something that can be had later is not watched.
    pub(crate) const fn lacks_the_watch(&self) -> bool {
        self.watch.is_none() && !self.lacks.is_empty()
    }

    /// The folder that watching made.
    pub(crate) fn path(&self) -> Option<&'static str> {
        self.watch.is_some().then(CxlWatch::path)
    }

    /// Forgets what was reported, but for places on a poison list: these are asked for in the next round.
    pub(crate) fn forget(&mut self) {
        self.wrong.retain(|wrong, _| wrong.kind == CxlKind::Poison);
        if let Some(watch) = &mut self.watch {
            watch.scan_next();
        }
    }

    /// Takes what was reported since the round before. `services` are asked for if something is wrong.
    pub(crate) fn look(&mut self, kernel: &impl Kernel, now_ms: u64, services: impl FnOnce() -> Vec<Seen>) {
        let Some(watch) = &mut self.watch else { return };
        let news = watch.look(kernel, now_ms);
        let is_wrong = |event: &CxlEvent| !matches!(event.kind, CxlKind::Note | CxlKind::Cleared);
        let services = if news.events.iter().any(is_wrong) { services() } else { Vec::new() };
        self.failures = news.failures.iter().map(ToString::to_string).collect();
        self.failures.dedup();
        let mut poisoned = BTreeSet::new();
        for event in news.events {
            let wrong = Wrong {
                device: event.device.clone(),
                kind: event.kind,
                dpa: event.place.map(|place| place.dpa),
            };
            match event.kind {
                CxlKind::Poison => {
                    poisoned.insert(wrong.clone());
                }
                _ => *self.events.entry(event.device.clone()).or_default() += 1,
            }
            match event.kind {
                CxlKind::Note => {}
                CxlKind::Cleared => {
                    self.wrong.retain(|other, _| other.device != wrong.device || other.dpa != wrong.dpa)
                }
                _ if self.wrong.len() >= MOST_WRONG && !self.wrong.contains_key(&wrong) => {}
                _ => self.keep(kernel, wrong, event, &services),
            }
        }
        // A place that its device lists no more is sound again.
        self.wrong.retain(|wrong, _| {
            wrong.kind != CxlKind::Poison || !news.listed.contains(&wrong.device) || poisoned.contains(wrong)
        });
    }

    fn keep(&mut self, kernel: &impl Kernel, wrong: Wrong, event: CxlEvent, services: &[Seen]) {
        let named = match event.place.filter(|place| place.hpa.is_some()) {
            Some(place) => owners(kernel, &place, services).map(|named| (named, false)),
            // It may be any of them.
            None => Ok((slow(services), true)),
        };
        let (named, is_guess) = named.unwrap_or_else(|error| {
            self.failures.push(error.to_string());
            (slow(services), true)
        });
        let finding = self.wrong.entry(wrong).or_insert_with(|| Found {
            what: event.what,
            place: event.place,
            services: BTreeSet::new(),
            is_guess,
        });
        finding.place = event.place;
        finding.services.extend(named);
    }

    /// Whether the policy keeps a service off the slow tier, because memory there is bad.
    pub(crate) fn keeps_off(
        &self,
        policy: Option<HealthPolicy>,
        kernel: &impl Kernel,
        service: &str,
    ) -> bool {
        let can_move = || moves_poison(kernel).unwrap_or(false);
        match policy.map(|policy| policy.bad_memory) {
            None | Some(BadMemory::Alarm) => false,
            Some(BadMemory::OptOut) => {
                self.wrong.values().any(|found| found.services.contains(service)) && can_move()
            }
            Some(BadMemory::Drain) => !self.wrong.is_empty() && can_move(),
        }
    }

    /// How many bad places and faults each service may be hit by, of those that are.
    pub(crate) fn counts(&self) -> BTreeMap<&str, u64> {
        let mut counts = BTreeMap::new();
        for service in self.wrong.values().flat_map(|found| &found.services) {
            *counts.entry(service.as_str()).or_default() += 1;
        }
        counts
    }

    /// The devices of the host, and what they reported.
    pub(crate) fn devices(&self, kernel: &impl Kernel) -> Vec<DeviceHealth> {
        if self.watch.is_none() {
            return Vec::new();
        }
        let mut names: BTreeSet<String> = cxl_devices(kernel).into_iter().collect();
        names.extend(self.wrong.keys().map(|wrong| wrong.device.clone()));
        names
            .into_iter()
            .map(|device| {
                let of = self.wrong.iter().filter(|(wrong, _)| wrong.device == device);
                DeviceHealth {
                    bad_places: of.clone().filter(|(wrong, _)| wrong.dpa.is_some()).count() as u64,
                    events: self.events.get(&device).copied().unwrap_or(0),
                    said: of
                        .map(|(_, found)| found.what.clone())
                        .collect::<BTreeSet<_>>()
                        .into_iter()
                        .collect(),
                    device,
                }
            })
            .collect()
    }

    /// An alarm for each bad place or fault, and each service that it hits; and for what is not watched.
    pub(crate) fn alarms(&self, policy: Option<HealthPolicy>, kernel: &impl Kernel) -> Vec<Alarm> {
        let host = |error: &String| Alarm::HostSetting { key: "health".to_owned(), error: error.clone() };
        let mut alarms: Vec<Alarm> = self.lacks.iter().chain(&self.failures).map(host).collect();
        if let Some(watch) = &self.watch {
            let without = watch.without_list();
            if !without.is_empty() {
                let names = without.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
                alarms.push(host(&format!(
                    "{names}: no trigger_poison_list, because Linux is before 6.4 or the device keeps no list; poison from before the start \
                     is not seen"
                )));
            }
        }
        let answers = policy.is_some_and(|policy| policy.bad_memory != BadMemory::Alarm);
        if answers && !self.wrong.is_empty() && !moves_poison(kernel).unwrap_or(false) {
            alarms.push(host(
                &"bad_memory is left at \"alarm\", because a machine before Linux 6.11 may stop when it moves a poisoned page".to_owned(),
            ));
        }
        for (wrong, finding) in &self.wrong {
            let place = finding.place.map_or(String::new(), |place| {
                let hpa = place.hpa.map_or(String::new(), |hpa| format!(", {hpa:#x} on the host"));
                format!(" at {:#x} on the device{hpa}", place.dpa)
            });
            let what = format!("{}{place}", finding.what);
            let names: Vec<Option<String>> = match finding.services.is_empty() {
                true => vec![None],
                false => finding.services.iter().cloned().map(Some).collect(),
            };
            alarms.extend(names.into_iter().map(|service| Alarm::CxlMemory {
                device: wrong.device.clone(),
                service,
                what: what.clone(),
                is_guess: finding.is_guess,
            }));
        }
        alarms
    }
}

fn slow(services: &[Seen]) -> BTreeSet<String> {
    services.iter().filter(|service| service.is_slow).map(|service| service.name.clone()).collect()
}

/// Services whose pages lie at `place`.
fn owners(
    kernel: &impl Kernel,
    place: &CxlPlace,
    services: &[Seen],
) -> Result<BTreeSet<String>, KernelError> {
    let owners = page_owners(kernel, place)?;
    let mut named = BTreeSet::new();
    if owners.is_empty() {
        return Ok(named);
    }
    for service in services {
        match service.cgroup.inodes(kernel) {
            Ok(inodes) if !inodes.is_disjoint(&owners) => {
                named.insert(service.name.clone());
            }
            Err(error) if !error.is_gone() => return Err(error),
            _ => {}
        }
    }
    Ok(named)
}
