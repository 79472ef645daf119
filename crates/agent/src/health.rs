//! Health of CXL memory: which services have pages on bad places, and what the policy does for them.

use std::collections::{BTreeMap, BTreeSet};

use polder_linux::{
    Cgroup, CxlEvent, CxlKind, CxlPlace, CxlWatch, Kernel, KernelError, Settings, cxl_devices, moves_poison,
    page_owners,
};

use crate::Name;
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
    /// Services whose pages lie there.
    services: BTreeSet<String>,
    /// Whether it may hit every service with bytes on the slow tier, because the page is not known.
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
    /// Services that had bytes on the slow tier when something was found whose page is not known: one set for all of these.
    guessed: BTreeSet<String>,
    events: BTreeMap<String, u64>,
    /// What is not watched, and why.
    lacks: Vec<String>,
    /// What the last look could not read.
    failures: Vec<String>,
}

/// Bad places and faults that are kept; what is more is counted.
const MOST_WRONG: usize = 1000;

/// Services that one thing may hit and that have an alarm each; of more, their number is said.
const MOST_GUESSED: usize = 8;

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
        let mut services =
            Services::new(if news.events.iter().any(is_wrong) { services() } else { Vec::new() });
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
                _ => self.keep(kernel, wrong, event, &mut services),
            }
        }
        // A place that its device lists no more is sound again.
        self.wrong.retain(|wrong, _| {
            wrong.kind != CxlKind::Poison || !news.listed.contains(&wrong.device) || poisoned.contains(wrong)
        });
        if !self.wrong.values().any(|found| found.is_guess) {
            self.guessed.clear();
        }
        self.failures.dedup();
    }

    fn keep(&mut self, kernel: &impl Kernel, wrong: Wrong, event: CxlEvent, services: &mut Services) {
        let named = match event.place.filter(|place| place.hpa.is_some()) {
            Some(place) => services.owners(kernel, &place).map(Some),
            // It may be any of them.
            None => Ok(None),
        };
        let named = named.unwrap_or_else(|error| {
            self.failures.push(error);
            None
        });
        if named.is_none() {
            self.guessed.append(&mut services.slow);
        }
        let finding = self.wrong.entry(wrong).or_insert_with(|| Found {
            what: event.what,
            place: event.place,
            services: BTreeSet::new(),
            is_guess: false,
        });
        finding.place = event.place;
        finding.is_guess |= named.is_none();
        finding.services.extend(named.into_iter().flatten());
    }

    /// The services that the policy keeps off the slow tier, because memory there is bad.
    pub(crate) fn kept_off<'a>(
        &self,
        policy: Option<HealthPolicy>,
        kernel: &impl Kernel,
        services: impl Iterator<Item = &'a Name>,
    ) -> BTreeSet<Name> {
        let answer = policy.map_or(BadMemory::Alarm, |policy| policy.bad_memory);
        if self.wrong.is_empty() || answer == BadMemory::Alarm || !moves_poison(kernel).unwrap_or(false) {
            return BTreeSet::new();
        }
        let hit = self.counts();
        services.filter(|name| answer == BadMemory::Drain || hit.contains_key(&***name)).cloned().collect()
    }

    /// How many bad places and faults each service may be hit by, of those that are.
    pub(crate) fn counts(&self) -> BTreeMap<&str, u64> {
        let guesses = self.wrong.values().filter(|found| found.is_guess).count() as u64;
        let mut counts: BTreeMap<&str, u64> =
            self.guessed.iter().map(|service| (service.as_str(), guesses)).collect();
        for found in self.wrong.values() {
            let is_counted = |service: &String| found.is_guess && self.guessed.contains(service);
            for service in found.services.iter().filter(|service| !is_counted(service)) {
                *counts.entry(service.as_str()).or_default() += 1;
            }
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
            let is_guess = finding.is_guess && !self.guessed.is_empty();
            let alarm = |service: Option<&String>, what: String| Alarm::CxlMemory {
                device: wrong.device.clone(),
                service: service.cloned(),
                what,
                is_guess,
            };
            if is_guess && self.guessed.len() > MOST_GUESSED {
                let many = self.guessed.len();
                let what = format!("{what}; it may hit any of {many} services with bytes on the slow tier");
                alarms.push(alarm(None, what));
                continue;
            }
            let guessed = self.guessed.iter().filter(|_| is_guess);
            let names: BTreeSet<&String> = finding.services.iter().chain(guessed).collect();
            if names.is_empty() {
                alarms.push(alarm(None, what.clone()));
            }
            alarms.extend(names.into_iter().map(|name| alarm(Some(name), what.clone())));
        }
        alarms
    }
}

/// The services of a round, as health asks for them: what takes long is found once, whatever the number of bad places.
struct Services {
    seen: Vec<Seen>,
    /// The names of those with bytes on the slow tier.
    slow: BTreeSet<String>,
    /// The services by the inodes of their cgroups, once that was asked for.
    by_inode: Option<Result<BTreeMap<u64, Vec<usize>>, String>>,
}

impl Services {
    fn new(seen: Vec<Seen>) -> Self {
        let slow =
            seen.iter().filter(|service| service.is_slow).map(|service| service.name.clone()).collect();
        Self { seen, slow, by_inode: None }
    }

    /// Services whose pages lie at `place`.
    fn owners(&mut self, kernel: &impl Kernel, place: &CxlPlace) -> Result<BTreeSet<String>, String> {
        let owners = page_owners(kernel, place).map_err(|error| error.to_string())?;
        if owners.is_empty() {
            return Ok(BTreeSet::new());
        }
        let seen = &self.seen;
        let by_inode = || by_inode(kernel, seen).map_err(|error| error.to_string());
        let by_inode = self.by_inode.get_or_insert_with(by_inode).as_ref().map_err(Clone::clone)?;
        let found = owners.iter().filter_map(|inode| by_inode.get(inode)).flatten();
        Ok(found.map(|&index| seen[index].name.clone()).collect())
    }
}

fn by_inode(kernel: &impl Kernel, seen: &[Seen]) -> Result<BTreeMap<u64, Vec<usize>>, KernelError> {
    let mut found: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (index, service) in seen.iter().enumerate() {
        match service.cgroup.inodes(kernel) {
            Ok(inodes) => inodes.into_iter().for_each(|inode| found.entry(inode).or_default().push(index)),
            Err(error) if !error.is_gone() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(found)
}
