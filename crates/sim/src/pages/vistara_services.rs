//! What the Vistara paper says of services on two tiers: idle times (Table I), what tiers cost, gains (Table VII) and traffic (Table VIII).

use polder_platform::{Bandwidth, DataError, Folder, Platform, read};
use serde::{Deserialize, Serialize};

use super::plan::Costs;
use super::{Idle, TrafficLaw, pair};

/// What the paper says of services, as data: `data/figures/vistara-services.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServicesFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    slow_cost: f64,
    /// Watts of 768 GB.
    pub fast_watts: f64,
    slow_watts: f64,
    server_watts: f64,
    dram_carbon: f64,
    /// Where the paper says two things.
    pub contradictions: Vec<String>,
    idle: Vec<NamedIdle>,
    /// Table VII.
    pub gain: Vec<Gain>,
    /// Table VIII.
    pub telemetry: Vec<Telemetry>,
}

/// Idle times of a service (Table I).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedIdle {
    name: String,
    points: Idle,
}

/// A gain that the paper prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gain {
    /// Of which service.
    pub service: String,
    /// What is gained.
    pub what: String,
    /// What capacities say of it.
    pub of: GainOf,
    /// By how much each unit is slower, as a part.
    #[serde(default)]
    pub slower: f64,
    /// GB of the fast tier.
    pub fast_gb: f64,
    /// GB of the slow tier, least and most.
    pub slow_gb: [f64; 2],
    /// Per cent, least and most.
    pub published: [f64; 2],
}

/// What capacities say of a gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GainOf {
    /// It is that of the memory.
    Memory,
    /// It is at most that of the memory, because something else binds.
    Bound,
    /// It is what fewer servers hold as much memory.
    Servers,
}

/// A row of Table VIII.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Telemetry {
    /// The service.
    pub service: String,
    /// Its idle times, where Table I has some.
    pub idle: Option<String>,
    /// GB of the fast tier (Table VII).
    #[serde(default)]
    pub fast_gb: f64,
    /// GB of the slow tier (Table VII).
    #[serde(default)]
    pub slow_gb: f64,
    /// Seconds that an object stays in it, least and most, where the text says so.
    pub stays_s: Option<[f64; 2]>,
    /// The part of requests that find their object, least and most.
    pub hits: Option<[f64; 2]>,
    /// Drawn of local memory.
    pub local: Bandwidth,
    /// Drawn of CXL memory.
    pub cxl: Bandwidth,
    /// Hint faults.
    pub faults_a_minute: f64,
    /// Promotions.
    pub promotions_a_minute: f64,
}

impl ServicesFigure {
    /// Reads what the paper says.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "vistara-services")
    }

    /// Idle times of a service of Table I.
    #[must_use]
    pub fn idle(&self, name: &str) -> Option<&Idle> {
        self.idle.iter().find(|it| it.name == name).map(|it| &it.points)
    }

    /// The services of Table I.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.idle.iter().map(|it| it.name.as_str()).collect()
    }

    /// What tiers cost. Watts are of a slow tier of 256 GB.
    #[must_use]
    pub fn costs(&self) -> Costs {
        Costs {
            slow_cost: self.slow_cost,
            slow_watts_a_byte: self.slow_watts / 256e9,
            server_watts: self.server_watts,
            dram_carbon: self.dram_carbon,
        }
    }

    /// The law of slow traffic that Table VIII gives. A service without capacities in Table VII is taken to fill the tiers of the platform.
    ///
    /// # Errors
    /// When a file is damaged.
    pub fn traffic_law(&self) -> Result<TrafficLaw, DataError> {
        let platform = Platform::load(&self.platform)?;
        let pair = pair(&self.platform, &platform)?;
        let capacities = [pair.fast, pair.slow].map(|tier| tier.capacity.value() / 1e9);
        let measured = |row: &Telemetry| {
            let [fast, slow] = if row.slow_gb > 0.0 { [row.fast_gb, row.slow_gb] } else { capacities };
            let (local, cxl) = (row.local.value(), row.cxl.value());
            [slow / (fast + slow), cxl / (local + cxl)]
        };
        let measured: Vec<_> = self.telemetry.iter().map(measured).collect();
        let damaged = || {
            DataError::new("vistara-services", "telemetry", "expected services with traffic of both tiers")
        };
        TrafficLaw::new(&measured).ok_or_else(damaged)
    }
}
