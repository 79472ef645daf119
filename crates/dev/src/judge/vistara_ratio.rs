//! Section V-G of the Vistara paper: two services with less and less local memory, and 20 + 76 GB beside 96 GB.
//!
//! The spill of each ratio is the paper's. What it draws of CXL memory is a power law of it, through two of the paper's
//! numbers. Loads that go there wait longer, and programs hide a part of that; what CXL memory cannot carry is lost.

use polder_platform::{Bandwidth, BuiltTier, DataError, Folder, Platform, read};
use polder_sim::pages::vistara_services::ServicesFigure;
use polder_sim::pages::{PAGE_BYTES, pair};
use serde::{Deserialize, Serialize};

use super::vistara::VistaraError;

/// The section, as data: `data/figures/vistara-ratio.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RatioFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    operating: f64,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    law: Law,
    fitted: FittedLoss,
    row: Vec<RatioRow>,
    steered: Steered,
}

/// Two points of what is drawn of CXL memory by spill.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Law {
    spills: [f64; 2],
    cxl: [Bandwidth; 2],
}

/// The loss that what programs hide is fitted to.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct FittedLoss {
    service: String,
    ratio: f64,
    loss: f64,
}

/// A cache with little fast memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Steered {
    idle: String,
    fast_gb: f64,
    slow_gb: f64,
}

/// A service at a ratio.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RatioRow {
    /// The service.
    pub service: String,
    /// Bytes of local memory for each of CXL memory.
    pub ratio: f64,
    /// The part of its memory that is on CXL, as the paper gives it.
    pub spill: f64,
    /// What is drawn of CXL memory at P90, where the paper gives it: least and most.
    pub published_cxl: Option<[Bandwidth; 2]>,
    /// What is lost of throughput or of instructions, least and most.
    pub published_loss: [f64; 2],
}

/// A row beside what is predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RatioBeside {
    /// What was published.
    #[serde(flatten)]
    pub row: RatioRow,
    /// Bytes a second that are asked of CXL memory.
    pub cxl_bytes_per_s: f64,
    /// Seconds of a load of CXL memory.
    pub cxl_s: f64,
    /// The part that is lost to longer loads.
    pub waiting: f64,
    /// The part that is lost because CXL memory carries no more.
    pub full: f64,
    /// Whether the loss is fitted to.
    pub is_fitted: bool,
    /// How far what is lost is beyond what was published, as a part; 0 inside.
    pub off: f64,
}

impl RatioBeside {
    /// What is lost.
    #[must_use]
    pub fn loss(&self) -> f64 {
        1.0 - (1.0 - self.waiting) * (1.0 - self.full)
    }
}

/// The section made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RatioReport {
    /// The power of the spill that is fitted.
    pub power: f64,
    /// Loads that programs keep waiting in vain, for each second lost: fitted.
    pub hidden: f64,
    /// The rows.
    pub rows: Vec<RatioBeside>,
    /// Bytes a second that the cache of 20 + 76 GB draws of CXL memory.
    pub steered_bytes_per_s: f64,
    /// What it loses beside 96 GB of local memory.
    pub steered_loss: f64,
    /// Whether losses are under 1% at 3:1 and 2:1, and more at 1:1.
    pub below_until_1_1: bool,
    /// Whether DPP loses more than Web at 1:1.
    pub preprocessing_is_worse: bool,
}

/// Part of reads among accesses.
const READS: f64 = 0.75;
/// Bytes of a load.
const LINE: f64 = 64.0;

impl RatioFigure {
    /// Reads the section.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "vistara-ratio")
    }

    /// What is drawn of local memory in production, as a part of its peak.
    #[must_use]
    pub const fn operating(&self) -> f64 {
        self.operating
    }

    /// The rows.
    #[must_use]
    pub fn rows(&self) -> &[RatioRow] {
        &self.row
    }

    /// Fits two constants, and predicts the rows.
    ///
    /// # Errors
    /// When a file is damaged.
    pub fn beside(&self) -> Result<RatioReport, VistaraError> {
        let platform = Platform::load(&self.platform)?;
        let pair = pair(&self.platform, &platform)?;
        let [low, high] = self.law.cxl.map(Bandwidth::value);
        let [from, to] = self.law.spills;
        let power = (high / low).ln() / (to / from).ln();
        let drawn = |spill: f64| low * (spill / from).powf(power);
        let local_s = pair.fast.loaded_latency(self.operating);
        let longer = |asked: f64| longer_per_s(pair.slow, asked, local_s);
        let is_fitted = |row: &RatioRow| row.service == self.fitted.service && row.ratio == self.fitted.ratio;
        let fitted = self.row.iter().find(|row| is_fitted(row)).ok_or_else(|| {
            DataError::new("vistara-ratio", "fitted", "expected the service and the ratio of a row")
        })?;
        let hidden = longer(drawn(fitted.spill)) / self.fitted.loss;
        let most = pair.slow.bandwidth(READS);
        let beside = |row: &RatioRow| {
            let asked = drawn(row.spill);
            let mut beside = RatioBeside {
                cxl_bytes_per_s: asked,
                cxl_s: pair.slow.loaded_latency(asked.min(most) / pair.slow.peak().value()),
                waiting: longer(asked) / hidden,
                full: (1.0 - most / asked).max(0.0),
                is_fitted: is_fitted(row),
                off: 0.0,
                row: row.clone(),
            };
            let [least, most] = row.published_loss;
            beside.off = beside.loss() - beside.loss().clamp(least, most);
            beside
        };
        let rows: Vec<_> = self.row.iter().map(beside).collect();
        let services = ServicesFigure::load()?;
        let Steered { idle, fast_gb, slow_gb } = &self.steered;
        let idle = services.idle(idle).ok_or_else(|| {
            DataError::new("vistara-ratio", "steered.idle", format!("no service {idle:?} of Table I"))
        })?;
        let all = fast_gb + slow_gb;
        let pages = all * 1e9 / PAGE_BYTES as f64;
        let steered_bytes_per_s = idle.touches_per_s(slow_gb / all) * pages * PAGE_BYTES as f64;
        let at_one = |service: &str| {
            rows.iter().find(|it| it.row.service == service && it.row.ratio == 1.0).map(RatioBeside::loss)
        };
        Ok(RatioReport {
            power,
            hidden,
            steered_bytes_per_s,
            steered_loss: longer(steered_bytes_per_s) / hidden,
            below_until_1_1: rows.iter().all(|it| (it.loss() < 0.01) == (it.row.ratio > 1.0)),
            preprocessing_is_worse: at_one("DPP") > at_one("Web"),
            rows,
        })
    }
}

/// Seconds that loads of CXL memory take longer than local ones, of those of a second.
fn longer_per_s(slow: &BuiltTier, asked: f64, local_s: f64) -> f64 {
    let carried = asked.min(slow.bandwidth(READS));
    let slow_s = slow.loaded_latency(carried / slow.peak().value());
    carried / LINE * (slow_s - local_s).max(0.0)
}
