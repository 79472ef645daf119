//! A region of a rack's memory that hardware keeps coherent: what accesses to it take.

use polder_platform::{Bytes, DataError, Platform};
use serde::{Deserialize, Serialize};

use super::region::{RegionLoad, RegionRates};
use crate::given::GivenError;

use super::{Configuration, Inside, LINE, MemoryError, Question, Tier, Ways, configurations, job};

/// A region as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionQuestion {
    /// Bytes of it.
    pub region_bytes: f64,
    /// Bytes of it that each accelerator may cache.
    pub cache_bytes: f64,
    /// Bytes of the lines that the snoop filter has entries for.
    pub snoop_filter_bytes: f64,
    /// As in [`RegionLoad`].
    pub writes: f64,
    /// As in [`RegionLoad`].
    pub skew: f64,
}

/// A rack that keeps regions coherent, and what a line takes there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoherentRack {
    /// Its kind.
    pub rack: String,
    /// Accelerators of it.
    pub accelerators: u32,
    /// Bytes of an accelerator's own memory.
    pub own_bytes: f64,
    /// A line in an accelerator's own memory.
    pub own_s: f64,
    /// A load of a line of another's memory.
    pub load_s: f64,
    /// A copy of it by software.
    pub copy_s: f64,
    /// A request to a copy and its answer.
    pub snoop_s: f64,
}

/// What accesses to a region take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RegionTimes {
    /// What was asked for, in lines.
    pub load: RegionLoad,
    /// What came of it.
    pub rates: RegionRates,
    /// Mean seconds of an access by hardware.
    pub coherent_s: f64,
    /// Seconds of an access if software copies each line anew.
    pub copies_s: f64,
}

impl CoherentRack {
    /// Of a platform, with the kind of rack, the first by name when left out.
    ///
    /// # Errors
    /// When the platform's file is damaged, or racks of the kind keep nothing coherent.
    pub fn new(name: &str, kind: Option<&str>) -> Result<Self, MemoryError> {
        let platform = Platform::load(name)?;
        let job = job(name, &platform, kind)?;
        let (rack, accelerators) = (job.rack_name(), job.rack().accelerators);
        if job.rack().coherent.is_none() {
            let problem =
                "expected CXL inside the rack, which keeps regions coherent; take nvl72-cxl, or add it";
            return Err(DataError::new(name, &format!("rack.{rack}.coherent"), problem).into());
        }
        let question = Question {
            platform: name.into(),
            against: None,
            rack: kind.map(String::from),
            accelerators: None,
            ways: Ways { inside: Inside::Copy, ..Ways::default() },
        };
        let (_, machines) = configurations(&question)?;
        let (Some(load), Some(copy)) = (shared(&machines, "tiered"), shared(&machines, "clusters")) else {
            let problem = "expected a rack of two accelerators or more, which share memory";
            return Err(DataError::new(name, &format!("rack.{rack}.accelerators"), problem).into());
        };
        Ok(Self {
            rack: rack.into(),
            accelerators,
            own_bytes: machines[0].tiers[0].capacity_bytes,
            own_s: machines[0].tiers[0].access.seconds(LINE),
            load_s: load.access.seconds(LINE),
            copy_s: copy.access.seconds(LINE),
            // A copy is taken from where it lies: a request and its answer, without memory.
            snoop_s: load.access.idle() - load.access.memory_s,
        })
    }

    /// What accesses to a region of it take.
    ///
    /// # Errors
    /// When a number cannot be.
    pub fn region(&self, asked: &RegionQuestion) -> Result<RegionTimes, MemoryError> {
        let rack_bytes = self.own_bytes * f64::from(self.accelerators);
        for (key, bytes, most, whose) in [
            ("region", asked.region_bytes, rack_bytes, "the memory of a rack"),
            ("cache", asked.cache_bytes, self.own_bytes, "an accelerator's own memory"),
        ] {
            if bytes > most {
                let [bytes, most] = [bytes, most].map(Bytes::new);
                let problem = format!("expected {most} at most, {whose}, found {bytes}");
                return Err(GivenError::new(key, problem).into());
            }
        }
        let load = RegionLoad {
            accelerators: self.accelerators,
            lines: asked.region_bytes / LINE,
            cached: asked.cache_bytes / LINE,
            filter: asked.snoop_filter_bytes / LINE,
            writes: asked.writes,
            skew: asked.skew,
        };
        let rates = load.rates()?;
        // Copies of a write go at once; that of a filter's victim goes before the entry is free.
        let is_invalidated = rates.invalidations.min(asked.writes);
        let coherent_s = rates.hits * self.own_s
            + (1.0 - rates.hits) * self.load_s
            + (is_invalidated + rates.waited) * self.snoop_s;
        Ok(RegionTimes { load, rates, coherent_s, copies_s: self.copy_s })
    }
}

/// The memory of the rack, as a configuration has it.
fn shared<'a>(found: &'a [Configuration], name: &str) -> Option<&'a Tier> {
    found.iter().find(|on| on.name == name)?.tiers.iter().find(|tier| tier.name == "rack")
}
