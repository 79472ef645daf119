//! What a round says: what it saw, what it did, and what went wrong.

use polder_linux::{Change, HostCounts, KernelError, TierMemory};
use polder_place::pages::TierRule;
use serde::{Deserialize, Serialize};

use crate::policy::Service;

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
        /// A service with pages there; [`None`] where no service of the policy has any, or any of many may.
        service: Option<String>,
        /// What is wrong, and where.
        what: String,
        /// Whether it is not known which pages: the service is one with bytes on the slow tier.
        is_guess: bool,
    },
}

/// What a CXL memory device has reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceHealth {
    /// The device, such as `mem0`.
    pub device: String,
    /// Places that are poisoned, or could not be read correctly.
    pub bad_places: u64,
    /// Events since the agent started, those of the poison list left out.
    pub events: u64,
    /// What is wrong with it, in words; empty for a sound one.
    pub said: Vec<String>,
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
    /// Bytes that the kernel promoted soon after they had gone down, since the agent started.
    #[serde(default)]
    pub returned: u64,
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
    /// Bytes of a page of the host, in which it counts.
    #[serde(default = "page_bytes")]
    pub page_bytes: u64,
    /// Bytes a second that the kernel may promote, while the agent holds it back because it brings services over their bounds.
    #[serde(default)]
    pub kernel_promotes: Option<u64>,
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

/// Of a round that an earlier agent wrote: it took all pages for such.
const fn page_bytes() -> u64 {
    4096
}

impl Alarm {
    /// That something of a service failed in this round.
    pub(crate) fn of(service: &Service, error: &KernelError) -> Self {
        let (name, cgroup) = (service.name.to_string(), service.place.name());
        match error.is_gone() {
            true => Self::NoSuchCgroup { service: name, cgroup },
            false => Self::Refused { service: name, error: error.to_string() },
        }
    }
}
