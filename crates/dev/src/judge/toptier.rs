//! The tables of the patches for tier-aware limits of cgroups: three services fill fast memory, and a fourth comes.
//!
//! What keeps the bounds is given: `polder-dev` gives the agent itself.

use polder_platform::{DataError, Folder, Platform, read};
use polder_sim::Random;
use polder_sim::pages::{Kernel, Pages, Pair, Seen, Service, pair};
use serde::{Deserialize, Serialize};

use super::vistara::VistaraError;
use super::vistara_fair::Keeper;

/// The tables, as data: `data/figures/toptier-limits.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToptierFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    fast_gb: f64,
    slow_gb: f64,
    /// GB of each service.
    pub unit_gb: f64,
    /// Services that are there before the victim.
    pub hogs: usize,
    /// Simulated pages that stand for a GB.
    pub pages_a_gb: u32,
    hot_gb: f64,
    hot_reads: f64,
    free_gb: f64,
    scan_gb: f64,
    /// GB that the kernel moves in a second when the agent asks for it.
    pub moves_gb: f64,
    page_bytes: f64,
    settle_s: u32,
    measure_s: u32,
    seed: u64,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    /// Both tables.
    pub published: Vec<ToptierTable>,
}

/// A table of the source. Pairs are without limits, and with them.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToptierTable {
    /// How services read: `random`, or `hot and cold`.
    pub reads: String,
    victim_fast_gb: [f64; 2],
    hog_fast_gb: [f64; 2],
    victim_mops: [f64; 2],
    hog_mops: [Vec<f64>; 2],
}

/// A service, published and simulated. Pairs are without bounds, and with them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToptierRow {
    /// `victim`, or `hog`: the mean of the hogs.
    pub service: &'static str,
    /// Parts of it that were on fast memory.
    pub published_local: [f64; 2],
    /// The same, simulated.
    pub local: [f64; 2],
    /// Millions of reads a second.
    pub published_mops: [f64; 2],
    /// The same, simulated.
    pub mops: [f64; 2],
}

/// Points that a part may be off.
pub const SPLIT_POINTS: f64 = 10.0;

impl ToptierRow {
    /// Points that both parts are off.
    #[must_use]
    pub fn off_points(&self) -> [f64; 2] {
        [0, 1].map(|side| 100.0 * (self.local[side] - self.published_local[side]))
    }

    /// How much the rate changes with bounds, published and simulated.
    #[must_use]
    pub fn changes(&self) -> [f64; 2] {
        [self.published_mops, self.mops].map(|[without, with]| with / without - 1.0)
    }

    /// Whether its parts are within [`SPLIT_POINTS`].
    #[must_use]
    pub fn split_holds(&self) -> bool {
        self.off_points().iter().all(|off| off.abs() <= SPLIT_POINTS)
    }

    /// Whether its rate changes in the published direction by half as much at least, and twice at most.
    #[must_use]
    pub fn change_holds(&self) -> bool {
        let [published, simulated] = self.changes();
        (0.5..=2.0).contains(&(simulated / published))
    }
}

/// A table made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToptierReport {
    /// How services read.
    pub reads: String,
    /// The victim, and the mean of the hogs.
    pub rows: [ToptierRow; 2],
    /// GB promoted and demoted in the measured minute, without bounds and with them.
    pub moved_gb: [[f64; 2]; 2],
}

/// What becomes of the services in the measured minute.
struct Outcome {
    local: Vec<f64>,
    /// Rates as parts of that on fast memory alone.
    speed: Vec<f64>,
    /// GB promoted and demoted.
    moved_gb: [f64; 2],
}

impl ToptierFigure {
    /// Reads the tables.
    ///
    /// # Errors
    /// When their file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "toptier-limits")
    }

    /// The upper bound of each service: the source's formula.
    #[must_use]
    pub fn bound(&self) -> f64 {
        self.fast_gb / (self.fast_gb + self.slow_gb)
    }

    /// GB of both tiers.
    #[must_use]
    pub const fn tiers_gb(&self) -> [f64; 2] {
        [self.fast_gb, self.slow_gb]
    }

    /// Follows the services of a table without bounds, and with those that `keeper` keeps. The hogs come first, and the victim is the last.
    ///
    /// # Errors
    /// When the file is damaged.
    pub fn beside(
        &self,
        table: &ToptierTable,
        platform: &Platform,
        keeper: Keeper<'_>,
    ) -> Result<ToptierReport, VistaraError> {
        let Pair { fast, slow } = pair(&self.platform, platform)?;
        let slower = slow.idle_latency() / fast.idle_latency();
        let sides = [self.follow(table, slower, None)?, self.follow(table, slower, Some(keeper))?];
        let full = table.full_mops();
        let mean = |values: &[f64]| values[..self.hogs].iter().sum::<f64>() / self.hogs as f64;
        let both = |of: &dyn Fn(&Outcome) -> f64| sides.each_ref().map(of);
        let victim = ToptierRow {
            service: "victim",
            published_local: table.victim_fast_gb.map(|gb| gb / self.unit_gb),
            local: both(&|it| it.local[self.hogs]),
            published_mops: table.victim_mops,
            mops: both(&|it| full * it.speed[self.hogs]),
        };
        let hog = ToptierRow {
            service: "hog",
            published_local: table.hog_fast_gb.map(|gb| gb / self.unit_gb),
            local: both(&|it| mean(&it.local)),
            published_mops: table.hog_mops.each_ref().map(|mops| mean(mops)),
            mops: both(&|it| full * mean(&it.speed)),
        };
        let moved_gb = sides.each_ref().map(|it| it.moved_gb);
        Ok(ToptierReport { reads: table.reads.clone(), rows: [victim, hog], moved_gb })
    }

    fn pages_of(&self, gb: f64) -> u32 {
        (gb * f64::from(self.pages_a_gb)).round() as u32
    }

    fn follow(
        &self,
        table: &ToptierTable,
        slower: f64,
        mut keeper: Option<Keeper<'_>>,
    ) -> Result<Outcome, VistaraError> {
        let (size, free) = (self.pages_of(self.unit_gb), self.pages_of(self.free_gb));
        let kernel = Kernel {
            fast_pages: self.pages_of(self.fast_gb),
            slow_pages: self.pages_of(self.slow_gb),
            min_free: 0,
            low_free: free,
            high_free: free,
            scan: self.pages_of(self.scan_gb),
            hot_age: 0,
            promotions: u32::MAX,
            demotions: u32::MAX,
        };
        let count = self.hogs + 1;
        let services: Vec<Service> =
            (0..count).map(|index| Service::opt_in(&format!("s{index}"), size)).collect();
        let mut pages = Pages::new(kernel, &services)?;
        // Reads of a simulated page in a second, if all is fast.
        let reads = table.full_mops() * 1e6 * self.page_bytes / (self.unit_gb * 1e9) * f64::from(size);
        let mut random = Random::new(self.seed);
        let mut speed = vec![1.0; count];
        let mut sums = vec![0.0; count];
        let (mut started, mut moved) = (self.hogs, [0, 0]);
        let of = |pages: &Pages| (0..count).map(|at| pages.seen(at)).collect::<Vec<_>>();
        let touch = |pages: &mut Pages, at: usize| {
            let first = pages.first_page(at);
            pages.access(&(first..first + size).collect::<Vec<_>>());
        };
        (0..self.hogs).for_each(|at| touch(&mut pages, at));
        let measured = self.settle_s;
        for second in 0..measured + self.measure_s {
            if second == measured {
                touch(&mut pages, self.hogs);
                started = count;
            }
            let before = of(&pages);
            let mut trace = vec![];
            for (at, speed) in speed.iter().enumerate().take(started) {
                let first = pages.first_page(at);
                for _ in 0..(reads * speed) as u32 {
                    trace.push(first + self.page_of_a_read(table, size, &mut random));
                }
            }
            pages.access(&trace);
            pages.advance();
            if let Some(keeper) = &mut keeper {
                keeper(second, &mut pages);
            }
            let after = of(&pages);
            for (at, (before, after)) in before.iter().zip(&after).enumerate().take(started) {
                let fast = (after.fast_accesses - before.fast_accesses) as f64;
                let slow = (after.slow_accesses - before.slow_accesses) as f64;
                speed[at] = (fast + slow) / (fast + slow * slower);
                if second >= measured {
                    sums[at] += speed[at];
                    moved[0] += after.promotions - before.promotions;
                    moved[1] += after.demotions - before.demotions;
                }
            }
        }
        let local = |it: Seen| f64::from(it.fast) / f64::from(it.fast + it.slow);
        Ok(Outcome {
            local: of(&pages).into_iter().map(local).collect(),
            speed: sums.iter().map(|sum| sum / f64::from(self.measure_s)).collect(),
            moved_gb: moved.map(|pages| pages as f64 / f64::from(self.pages_a_gb)),
        })
    }

    /// The first pages of an order that goes through all in long strides are hot.
    fn page_of_a_read(&self, table: &ToptierTable, size: u32, random: &mut Random) -> u32 {
        // A prime that divides no size of a service.
        const STRIDE: u64 = 1361;
        let hot = self.pages_of(self.hot_gb);
        let nth = match table.reads.as_str() {
            "random" => random.below(size),
            _ if random.unit() < self.hot_reads => random.below(hot),
            _ => hot + random.below(size - hot),
        };
        (u64::from(nth) * STRIDE % u64::from(size)) as u32
    }
}

impl ToptierTable {
    /// The published rate of a service on fast memory alone.
    fn full_mops(&self) -> f64 {
        self.hog_mops[0].iter().sum::<f64>() / self.hog_mops[0].len() as f64
    }
}
