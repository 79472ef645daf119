//! Tables VII and VIII of the Vistara paper, and figures 9 to 12: what follows from capacities, from idle times, and from how long a
//! cache keeps its objects.

use polder_platform::{Bandwidth, DataError, Folder, Platform, read};
use serde::{Deserialize, Serialize};

use crate::judge::vistara::pair;
use crate::pages::plan::Costs;
use crate::pages::{Idle, PAGE_BYTES, TrafficLaw, Turnover};

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
    gain: Vec<Gain>,
    telemetry: Vec<Telemetry>,
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

/// A gain beside what follows from capacities.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GainBeside {
    /// What was published.
    #[serde(flatten)]
    pub gain: Gain,
    /// Per cent, least and most.
    pub simulated: [f64; 2],
}

impl GainBeside {
    /// Points from the nearer end of what was published; 0 where the ranges meet, or the bound holds.
    #[must_use]
    pub fn off_points(&self) -> f64 {
        let ([least, most], [low, high]) = (self.simulated, self.gain.published);
        match self.gain.of {
            GainOf::Bound => (low - most).max(0.0),
            GainOf::Memory | GainOf::Servers if least > high => least - high,
            GainOf::Memory | GainOf::Servers => (most - low).min(0.0),
        }
    }
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

/// A row of Table VIII beside what follows from idle times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TelemetryBeside {
    /// What was published.
    #[serde(flatten)]
    pub row: Telemetry,
    /// From Table I, of a service that it has.
    pub simulated: Option<Simulated>,
    /// Bytes a second of CXL memory, least and most, by how long objects stay and how many requests they answer.
    pub by_turnover: Option<[f64; 2]>,
    /// Whether no more pages are promoted than fault.
    pub promotions_fault: bool,
    /// Local over CXL bandwidth.
    pub ratio: f64,
}

/// What follows from idle times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Simulated {
    /// Bytes a second of CXL memory at most: each access to an idle page is of the whole page.
    pub cxl_bytes_per_s: f64,
    /// Hint faults a minute, by the marks that the kernel makes.
    pub faults_a_minute: f64,
    /// Promotions a minute: faults within a second of the mark.
    pub promotions_a_minute: f64,
    /// Seconds in which what was published reads each byte of CXL memory once.
    pub published_turn_s: f64,
    /// Seconds that the most recently accessed page of CXL memory lies idle, by Table I.
    pub least_idle_s: f64,
    /// Seconds that half of the memory lies idle or longer, by Table I.
    pub half_idle_s: f64,
}

/// Bandwidth of Table VIII is held to this part (section V-I: 10 to 100 times lower than local).
pub const RATIO: [f64; 2] = [10.0, 100.0];

/// Pages that a process marks in a second at least and at most: 256 MB each 60 s to each second (Linux, numa_balancing).
const SCAN_S: f64 = 60.0;
const SCAN_BYTES: f64 = 256.0 * 1048576.0;

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

    /// Table VII beside what follows from capacities.
    #[must_use]
    pub fn gains(&self) -> Vec<GainBeside> {
        let beside = |gain: &Gain| {
            let simulated = gain.slow_gb.map(|slow| {
                let more = (gain.fast_gb + slow) / gain.fast_gb;
                let per_cent = match gain.of {
                    GainOf::Memory | GainOf::Bound => more - 1.0,
                    GainOf::Servers => 1.0 - 1.0 / (more * (1.0 - gain.slower)),
                };
                per_cent * 100.0
            });
            GainBeside { gain: gain.clone(), simulated }
        };
        self.gain.iter().map(beside).collect()
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

    /// Table VIII: caches beside what follows from their idle times; of the others whether they agree with the text.
    #[must_use]
    pub fn telemetry(&self) -> Vec<TelemetryBeside> {
        let beside = |row: &Telemetry| {
            let idle = row.idle.as_ref().and_then(|name| self.idle(name));
            TelemetryBeside {
                simulated: idle.map(|idle| row.simulated(idle)),
                by_turnover: row.by_turnover(),
                promotions_fault: row.promotions_a_minute <= row.faults_a_minute,
                ratio: row.local.value() / row.cxl.value(),
                row: row.clone(),
            }
        };
        self.telemetry.iter().map(beside).collect()
    }
}

impl TelemetryBeside {
    /// Whether what was published lies within what the turnover says; `None` where the text does not give it.
    #[must_use]
    pub fn is_within_turnover(&self) -> Option<bool> {
        self.by_turnover.map(|[least, most]| (least..=most).contains(&self.row.cxl.value()))
    }
}

impl Telemetry {
    /// The slow tier holds as much of what comes and is read as of the cache, because all objects are read alike (section V-B).
    fn by_turnover(&self) -> Option<[f64; 2]> {
        let ([soon, late], [few, many]) = (self.stays_s?, self.hits?);
        let drawn = |stays_s, hits| Turnover { stays_s, hits }.bytes_per_s(self.slow_gb * 1e9);
        Some([drawn(late, few), drawn(soon, many)])
    }

    fn simulated(&self, idle: &Idle) -> Simulated {
        let all = self.fast_gb + self.slow_gb;
        let spill = self.slow_gb / all;
        let pages = all * 1e9 / PAGE_BYTES as f64;
        let touches_per_s = idle.touches_per_s(spill) * pages;
        // Marks turn round the slow tier at the slowest pace of one process; a marked page faults once.
        let marks_per_s = SCAN_BYTES / PAGE_BYTES as f64 / SCAN_S;
        let mean_idle_s = spill * pages / touches_per_s;
        let turn_s = spill * pages / marks_per_s;
        let faults_per_s = marks_per_s * (1.0 - (-turn_s / mean_idle_s).exp());
        Simulated {
            cxl_bytes_per_s: touches_per_s * PAGE_BYTES as f64,
            faults_a_minute: faults_per_s * 60.0,
            promotions_a_minute: marks_per_s * (1.0 - (-1.0 / mean_idle_s).exp()) * 60.0,
            published_turn_s: self.slow_gb * 1e9 / self.cxl.value(),
            least_idle_s: idle.seconds(1.0 - spill),
            half_idle_s: idle.seconds(0.5),
        }
    }
}
