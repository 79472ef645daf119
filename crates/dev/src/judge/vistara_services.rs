//! Tables VII and VIII of the Vistara paper, and figures 9 to 12: what follows from capacities, from idle times, and from how long a
//! cache keeps its objects.

use polder_sim::pages::vistara_services::{Gain, GainOf, ServicesFigure, Telemetry};
use polder_sim::pages::{Idle, PAGE_BYTES};
use serde::Serialize;

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

/// Table VII beside what follows from capacities.
#[must_use]
pub fn gains(figure: &ServicesFigure) -> Vec<GainBeside> {
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
    figure.gain.iter().map(beside).collect()
}

/// Table VIII: caches beside what follows from their idle times; of the others whether they agree with the text.
#[must_use]
pub fn telemetry(figure: &ServicesFigure) -> Vec<TelemetryBeside> {
    let beside = |row: &Telemetry| {
        let idle = row.idle.as_ref().and_then(|name| figure.idle(name));
        TelemetryBeside {
            simulated: idle.map(|idle| simulated(row, idle)),
            by_turnover: by_turnover(row),
            promotions_fault: row.promotions_a_minute <= row.faults_a_minute,
            ratio: row.local.value() / row.cxl.value(),
            row: row.clone(),
        }
    };
    figure.telemetry.iter().map(beside).collect()
}

impl TelemetryBeside {
    /// Whether what was published lies within what the turnover says; `None` where the text does not give it.
    #[must_use]
    pub fn is_within_turnover(&self) -> Option<bool> {
        self.by_turnover.map(|[least, most]| (least..=most).contains(&self.row.cxl.value()))
    }
}

/// The slow tier holds as much of what comes and is read as of the cache, because all objects are read alike (section V-B).
fn by_turnover(row: &Telemetry) -> Option<[f64; 2]> {
    let ([soon, late], [few, many]) = (row.stays_s?, row.hits?);
    let drawn = |stays_s, hits| Turnover { stays_s, hits }.bytes_per_s(row.slow_gb * 1e9);
    Some([drawn(late, few), drawn(soon, many)])
}

fn simulated(row: &Telemetry, idle: &Idle) -> Simulated {
    let all = row.fast_gb + row.slow_gb;
    let spill = row.slow_gb / all;
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
        published_turn_s: row.slow_gb * 1e9 / row.cxl.value(),
        least_idle_s: idle.seconds(1.0 - spill),
        half_idle_s: idle.seconds(0.5),
    }
}

/// A cache that is full: an object stays for a time, and all that stay are read alike. No tier can hold the hot ones, because none is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turnover {
    /// Seconds that an object stays.
    pub stays_s: f64,
    /// The part of requests that find their object, below 1.
    pub hits: f64,
}

impl Turnover {
    /// Bytes a second that so many bytes of it draw, on whichever tier. A request that finds no object brings one, so that an object
    /// answers `hits / (1 - hits)` requests while it stays; with the write that brings it, it is accessed `1 / (1 - hits)` times.
    #[must_use]
    pub fn bytes_per_s(&self, bytes: f64) -> f64 {
        bytes / (self.stays_s * (1.0 - self.hits))
    }
}

#[cfg(test)]
mod tests {
    use polder_sim::Random;
    use polder_sim::pages::{Kernel, Pages, Service};

    use super::*;

    /// A full cache of a page an object, page by page: the oldest object gives its page to the next, and requests find any object alike.
    #[test]
    fn a_full_cache_draws_of_slow_memory_what_turnover_says_whichever_pages_the_kernel_moves() {
        const PAGES: u32 = 4096;
        let turnover = Turnover { stays_s: 64.0, hits: 0.8 };
        let kernel = Kernel {
            fast_pages: PAGES * 3 / 4,
            slow_pages: PAGES / 2,
            low_free: 16,
            high_free: 32,
            scan: 256,
            ..Kernel::default()
        };
        let mut pages = Pages::new(kernel, &[Service::opt_in("cache", PAGES)]).unwrap();
        pages.access(&(0..PAGES).collect::<Vec<_>>());
        let (mut random, mut oldest, mut slow, mut slow_pages) = (Random::new(11), 0, 0_u64, 0_u64);
        const GENERATIONS: u32 = 2000;
        for generation in 0..2 * GENERATIONS {
            let before = pages.seen(0);
            let mut brought = 0;
            while brought < PAGES / 64 {
                let is_hit = random.unit() < turnover.hits;
                let page = if is_hit { random.below(PAGES) } else { oldest };
                if !is_hit {
                    (oldest, brought) = ((oldest + 1) % PAGES, brought + 1);
                }
                pages.access(&[page]);
            }
            pages.advance();
            if generation >= GENERATIONS {
                slow += pages.seen(0).slow_accesses - before.slow_accesses;
                slow_pages += u64::from(before.slow);
            }
        }
        let found = slow as f64 / f64::from(GENERATIONS);
        let expected = turnover.bytes_per_s(slow_pages as f64 / f64::from(GENERATIONS));
        assert!((found / expected - 1.0).abs() < 0.1, "{found} pages a generation, expected {expected}");
        assert!(pages.seen(0).promotions > 1000, "{:?}", pages.seen(0));
    }
}
