//! A region of a rack's memory that hardware keeps coherent: hits of the accelerators' caches, misses of the snoop filter, and
//! back-invalidations, from a run of many accesses.
//!
//! Each accelerator caches lines of the region, the least recently used go first. The home of a line has an entry of the snoop filter while any
//! accelerator caches it. A filter without room takes the entry of the line that was asked for the longest ago, and has its copies
//! invalidated (CXL 3, back-invalidate).

use std::collections::BTreeMap;

use polder_platform::{DataError, Platform};
use serde::{Deserialize, Serialize};

use super::{Configuration, Inside, LINE, MemoryError, Question, Tier, Ways, configurations, job};
use crate::given::GivenError;
use crate::random::Random;

/// What is asked of a coherent region.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionLoad {
    /// Accelerators that access it.
    pub accelerators: u32,
    /// Lines of the region.
    pub lines: f64,
    /// Lines of it that each accelerator may cache.
    pub cached: f64,
    /// Entries of the snoop filter.
    pub filter: f64,
    /// The part of the accesses that write.
    pub writes: f64,
    /// How much more often some lines are accessed: the exponent of Zipf's law, 0 where all are alike.
    pub skew: f64,
    /// What accesses are drawn from.
    pub seed: u64,
}

/// What comes of it, each a number an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RegionRates {
    /// Found in the accelerator's own cache, with the right to do it.
    pub hits: f64,
    /// Of the accesses, those whose line the snoop filter did not know.
    pub filter_misses: f64,
    /// Copies that the filter had invalidated because it had no room.
    pub back_invalidations: f64,
    /// Copies that a write had invalidated.
    pub invalidations: f64,
    /// Accesses that waited for a back-invalidation.
    pub waited: f64,
}

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
    /// As in [`RegionLoad`].
    #[serde(default)]
    pub seed: u64,
}

/// A rack that keeps regions coherent, and what a line takes there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoherentRack {
    /// Its kind.
    pub rack: String,
    /// Accelerators of it.
    pub accelerators: u32,
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
    /// What was followed.
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
        let load = RegionLoad {
            accelerators: self.accelerators,
            lines: asked.region_bytes / LINE,
            cached: asked.cache_bytes / LINE,
            filter: asked.snoop_filter_bytes / LINE,
            writes: asked.writes,
            skew: asked.skew,
            seed: asked.seed,
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

/// Lines that are followed, at most: a larger region is made smaller, with its caches and its filter.
const MOST_LINES: f64 = 4096.0;
/// Accesses of an accelerator to each line, on average, before counting and while counting.
const TURNS: u32 = 5;

/// The least recently used of a set.
#[derive(Default)]
struct Recent {
    stamps: BTreeMap<u32, u64>,
    lines: BTreeMap<u64, u32>,
    clock: u64,
}

impl Recent {
    fn has(&self, line: u32) -> bool {
        self.stamps.contains_key(&line)
    }

    fn touch(&mut self, line: u32) {
        self.remove(line);
        self.clock += 1;
        self.stamps.insert(line, self.clock);
        self.lines.insert(self.clock, line);
    }

    fn remove(&mut self, line: u32) -> bool {
        self.stamps.remove(&line).is_some_and(|stamp| self.lines.remove(&stamp).is_some())
    }

    /// The one that was used the longest ago, if there are as many as there may be.
    fn full(&self, most: usize) -> Option<u32> {
        if self.stamps.len() < most { None } else { self.lines.values().next().copied() }
    }
}

/// Who caches a line, and whether one may write it.
#[derive(Clone, Default)]
struct Sharers {
    all: Vec<u32>,
    is_owned: bool,
}

struct Region {
    caches: Vec<Recent>,
    cached: usize,
    filter: Recent,
    entries: usize,
    sharers: Vec<Sharers>,
    seen: RegionRates,
}

impl RegionLoad {
    /// Follows accesses of all accelerators in turn.
    ///
    /// # Errors
    /// When a number cannot be.
    pub fn rates(&self) -> Result<RegionRates, GivenError> {
        self.check()?;
        let scale = (MOST_LINES / self.lines).min(1.0);
        let scaled = |lines: f64| ((lines * scale).round() as usize).max(1);
        let lines = scaled(self.lines);
        let mut region = Region {
            caches: (0..self.accelerators).map(|_| Recent::default()).collect(),
            cached: scaled(self.cached),
            filter: Recent::default(),
            entries: scaled(self.filter),
            sharers: vec![Sharers::default(); lines],
            seen: RegionRates::default(),
        };
        let mut random = Random::new(self.seed);
        let turns = TURNS * lines as u32;
        for turn in 0..2 * turns {
            if turn == turns {
                region.seen = RegionRates::default();
            }
            for accelerator in 0..self.accelerators {
                let line = self.line(&mut random, lines);
                let is_write = random.unit() < self.writes;
                region.access(accelerator, line, is_write);
            }
        }
        let count = f64::from(turns) * f64::from(self.accelerators);
        let RegionRates { hits, filter_misses, back_invalidations, invalidations, waited } = region.seen;
        Ok(RegionRates {
            hits: hits / count,
            filter_misses: filter_misses / count,
            back_invalidations: back_invalidations / count,
            invalidations: invalidations / count,
            waited: waited / count,
        })
    }

    fn check(&self) -> Result<(), GivenError> {
        if !(1..=1024).contains(&self.accelerators) {
            let problem = format!("expected 1 to 1024, found {}", self.accelerators);
            return Err(GivenError::new("accelerators", problem));
        }
        for (key, value) in [("region", self.lines), ("cache", self.cached), ("snoop-filter", self.filter)] {
            if !(value >= 1.0 && value.is_finite()) {
                return Err(GivenError::new(key, format!("expected a line or more, found {value}")));
            }
        }
        for (key, value, most) in [("writes", self.writes, 1.0), ("skew", self.skew, 4.0)] {
            if !(0.0..=most).contains(&value) {
                return Err(GivenError::new(
                    key,
                    format!("expected a number from 0 to {most}, found {value}"),
                ));
            }
        }
        Ok(())
    }

    /// A line by Zipf's law, which is taken to be continuous.
    fn line(&self, random: &mut Random, lines: usize) -> u32 {
        let (draw, count) = (random.unit(), lines as f64);
        let exponent = 1.0 - self.skew;
        let at = match exponent.abs() < 1e-9 {
            true => (count + 1.0).powf(draw),
            false => (draw * ((count + 1.0).powf(exponent) - 1.0) + 1.0).powf(1.0 / exponent),
        };
        ((at - 1.0) as u32).min(lines as u32 - 1)
    }
}

impl Region {
    fn access(&mut self, accelerator: u32, line: u32, is_write: bool) {
        let own = accelerator as usize;
        let sharers = &self.sharers[line as usize];
        let may = !is_write || sharers.is_owned && sharers.all == [accelerator];
        if self.caches[own].has(line) && may {
            self.seen.hits += 1.0;
            return self.caches[own].touch(line);
        }
        if !self.filter.has(line) {
            self.seen.filter_misses += 1.0;
            if let Some(victim) = self.filter.full(self.entries) {
                self.back_invalidate(victim);
            }
        }
        self.filter.touch(line);
        if is_write {
            for other in std::mem::take(&mut self.sharers[line as usize].all) {
                if other != accelerator {
                    self.caches[other as usize].remove(line);
                    self.seen.invalidations += 1.0;
                }
            }
        }
        if !self.caches[own].has(line)
            && let Some(victim) = self.caches[own].full(self.cached)
        {
            self.caches[own].remove(victim);
            self.forget(victim, accelerator);
        }
        self.caches[own].touch(line);
        let sharers = &mut self.sharers[line as usize];
        if !sharers.all.contains(&accelerator) {
            sharers.all.push(accelerator);
        }
        sharers.is_owned = is_write;
    }

    fn back_invalidate(&mut self, victim: u32) {
        let copies = std::mem::take(&mut self.sharers[victim as usize]).all;
        for sharer in &copies {
            self.caches[*sharer as usize].remove(victim);
        }
        self.seen.back_invalidations += copies.len() as f64;
        self.seen.waited += f64::from(u8::from(!copies.is_empty()));
        self.filter.remove(victim);
    }

    /// An accelerator has no copy any more; without any the filter needs no entry.
    fn forget(&mut self, line: u32, accelerator: u32) {
        let sharers = &mut self.sharers[line as usize];
        sharers.all.retain(|it| *it != accelerator);
        if sharers.all.is_empty() {
            self.filter.remove(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: RegionLoad = RegionLoad {
        accelerators: 4,
        lines: 4000.0,
        cached: 1000.0,
        filter: 4000.0,
        writes: 0.0,
        skew: 0.0,
        seed: 7,
    };

    #[test]
    fn even_accesses_hit_as_often_as_the_cache_is_a_part_of_the_region() {
        let found = LOAD.rates().unwrap();
        assert!((found.hits - 0.25).abs() < 0.01, "{found:?}");
        assert_eq!(found.back_invalidations, 0.0, "the filter has an entry for each line");
        let whole = RegionLoad { cached: 4000.0, ..LOAD }.rates().unwrap();
        assert!(whole.hits > 0.99, "{whole:?}");
    }

    #[test]
    fn a_filter_without_room_takes_copies_away() {
        let small = RegionLoad { filter: 500.0, ..LOAD }.rates().unwrap();
        assert!(small.back_invalidations > 0.1 && small.hits < 0.2, "{small:?}");
        assert!(small.waited <= small.filter_misses);
        // No more lines are cached than the filter has entries: each is cached by a quarter of the accelerators or more.
        assert!(small.hits <= 500.0 / 4000.0 + 0.01, "{small:?}");
    }

    #[test]
    fn writes_take_the_copies_of_others_away_and_skew_makes_hits() {
        let even = RegionLoad { writes: 0.3, ..LOAD }.rates().unwrap();
        assert!(even.invalidations > 0.0 && even.hits < LOAD.rates().unwrap().hits, "{even:?}");
        let skewed = RegionLoad { skew: 1.2, ..LOAD }.rates().unwrap();
        assert!(skewed.hits > 0.7, "{skewed:?}");
    }

    #[test]
    fn a_large_region_is_followed_as_a_small_one_of_the_same_parts() {
        let large = RegionLoad { lines: 4e6, cached: 1e6, filter: 4e6, ..LOAD }.rates().unwrap();
        assert!((large.hits - LOAD.rates().unwrap().hits).abs() < 0.01, "{large:?}");
        let error = RegionLoad { writes: 2.0, ..LOAD }.rates().unwrap_err();
        assert_eq!(error.to_string(), "writes: expected a number from 0 to 1, found 2");
    }
}
