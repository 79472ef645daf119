//! Traffic of slow memory in section V-G of the Vistara paper, by a law whose constants come from Table VIII alone.

use polder_platform::{Bandwidth, Platform};
use polder_sim::pages::pair;
use polder_sim::pages::vistara_services::ServicesFigure;
use serde::Serialize;

use super::vistara::VistaraError;
use super::vistara_ratio::{RatioFigure, RatioRow};

/// The factor within which a judged row counts as met.
pub const TRAFFIC_FACTOR: f64 = 2.0;

/// A bandwidth of section V-G beside what the law says of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrafficBeside {
    /// The service.
    pub service: String,
    /// Bytes of local memory for each of CXL memory.
    pub ratio: f64,
    /// The part of its memory that is on CXL, as the paper gives it.
    pub spill: f64,
    /// What was drawn of CXL memory, least and most.
    pub published: [f64; 2],
    /// By the service of Table VIII that draws the least of CXL memory, the middle one, and the one that draws the most.
    pub simulated: [f64; 3],
    /// By idle times of Table I, where it has the service: each page read once in its idle time.
    pub by_idle: Option<f64>,
}

impl TrafficBeside {
    /// What the middle service gives, over the nearer end of what was published; 1 inside.
    #[must_use]
    pub fn off(&self) -> f64 {
        let [least, most] = self.published;
        self.simulated[1] / self.simulated[1].clamp(least, most)
    }

    /// Whether that is within [`TRAFFIC_FACTOR`].
    #[must_use]
    pub fn is_met(&self) -> bool {
        (1.0 / TRAFFIC_FACTOR..=TRAFFIC_FACTOR).contains(&self.off())
    }

    /// Whether what was published lies between the least and the most.
    #[must_use]
    pub fn is_within(&self) -> bool {
        let [least, _, most] = self.simulated;
        self.published[1] >= least && self.published[0] <= most
    }
}

/// The five bandwidths of the section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrafficReport {
    /// Powers of the spill by Table VIII, rising.
    pub powers: Vec<f64>,
    /// The middle one.
    pub middle: f64,
    /// Bytes a second that a server draws of memory.
    pub drawn: f64,
    /// The rows.
    pub rows: Vec<TrafficBeside>,
}

/// Holds the law against the bandwidths of section V-G.
///
/// # Errors
/// When a file is damaged.
pub fn traffic() -> Result<TrafficReport, VistaraError> {
    let (figure, services) = (RatioFigure::load()?, ServicesFigure::load()?);
    let platform = Platform::load(&figure.platform)?;
    let pair = pair(&figure.platform, &platform)?;
    let law = services.traffic_law()?;
    let drawn = figure.operating() * pair.fast.peak().value();
    let all = pair.fast.capacity.value() + pair.slow.capacity.value();
    let idle_of = |service: &str| services.idle(if service == "Web" { "web1" } else { service });
    let beside = |row: &RatioRow| {
        Some(TrafficBeside {
            service: row.service.clone(),
            ratio: row.ratio,
            spill: row.spill,
            published: row.published_cxl?.map(Bandwidth::value),
            simulated: law.part(row.spill).map(|part| part * drawn),
            by_idle: idle_of(&row.service).map(|idle| idle.touches_per_s(row.spill) * all),
        })
    };
    let rows = figure.rows().iter().filter_map(beside).collect();
    Ok(TrafficReport { powers: law.powers().to_vec(), middle: law.middle(), drawn, rows })
}
