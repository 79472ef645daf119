//! Table X of the Vistara paper: what a stress test draws of both tiers while a growing part of its memory is hot.
//!
//! A sample of the pages is simulated ([`polder_sim::pages`]); what it draws follows from where its pages lie, by Little's law
//! and the platform's latencies under load. The first row gives two constants: what the pages that are not hot draw, and how
//! many bytes programs keep under way. The other rows are judged.

use polder_platform::{Bandwidth, DataError, Folder, Platform, Time, read};
use polder_sim::Random;
use polder_sim::pages::{Kernel, Load, Pages, PagesError, Pair, Service, pair};
use serde::{Deserialize, Serialize};

/// The table, as data: `data/figures/vistara-table10.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KneeFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    /// Of the fast tier, what services have, in GB.
    pub fast_gb: f64,
    /// Of the slow tier.
    pub slow_gb: f64,
    /// What hot parts are of, in GB.
    pub whole_gb: f64,
    /// Simulated pages that stand for a GB.
    pub pages_a_gb: u32,
    /// Generations of a second that are simulated.
    pub generations: u32,
    /// Of these, the last ones, which count.
    pub counted: u32,
    /// GB that are marked in a second.
    pub scan_gb: f64,
    /// Of the random numbers.
    pub seed: u64,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    /// The rows.
    pub row: Vec<KneeRow>,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KneeRow {
    /// The part of the memory that is hot.
    pub hot: f64,
    /// Of a load of CXL memory.
    pub latency: Time,
    /// Drawn of local memory.
    pub local: Bandwidth,
    /// Drawn of CXL memory.
    pub cxl: Bandwidth,
    /// Whether constants are fitted to it.
    #[serde(default)]
    pub fitted: bool,
}

/// What is predicted of a row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KneePoint {
    /// Seconds of a load of CXL memory.
    pub latency_s: f64,
    /// Seconds of a load, over both tiers.
    pub mean_s: f64,
    /// Bytes a second of local memory, migration with it.
    pub local_bytes_per_s: f64,
    /// Bytes a second of CXL memory, migration with it.
    pub cxl_bytes_per_s: f64,
    /// Bytes a second that are promoted; as many are demoted.
    pub promoted_bytes_per_s: f64,
}

/// A row beside what is predicted of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KneeBeside {
    /// What was published.
    #[serde(flatten)]
    pub row: KneeRow,
    /// By the pages.
    pub simulated: KneePoint,
    /// With hot pages that spill as far as the fast tier is too small for them, and nothing that moves.
    pub by_capacity: KneePoint,
}

/// Prediction over what was published, less 1: latency, local and CXL bandwidth.
#[must_use]
pub fn errors(row: &KneeRow, point: &KneePoint) -> [f64; 3] {
    [
        point.latency_s / row.latency.value() - 1.0,
        point.local_bytes_per_s / row.local.value() - 1.0,
        point.cxl_bytes_per_s / row.cxl.value() - 1.0,
    ]
}

/// The table made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KneeReport {
    /// Bytes that programs keep under way: fitted to the first row.
    pub under_way_bytes: f64,
    /// The part of all accesses that a GB draws which is not hot, in the first row: fitted to it.
    pub cold_part_a_gb: f64,
    /// The rows.
    pub rows: Vec<KneeBeside>,
}

/// How far the latency of a judged row may be off, as a part of it.
pub const KNEE_LATENCY: f64 = 0.04;
/// How far its CXL bandwidth may be off.
pub const KNEE_BANDWIDTH: f64 = 0.15;

/// Why a table of the paper cannot be made again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VistaraError {
    /// A file is damaged, or has not what is asked for.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Its pages cannot be simulated.
    #[error(transparent)]
    Pages(#[from] PagesError),
}

impl KneeFigure {
    /// Reads the table.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "vistara-table10")
    }

    /// Fits the first row's constants, and predicts all rows.
    ///
    /// # Errors
    /// When a file is damaged.
    pub fn beside(&self) -> Result<KneeReport, VistaraError> {
        let platform = Platform::load(&self.platform)?;
        let pair = pair(&self.platform, &platform)?;
        let fitted = self.row.iter().find(|row| row.fitted).ok_or_else(|| {
            DataError::new("vistara-table10", "row", "expected one that is fitted".to_owned())
        })?;
        let (local, cxl) = (fitted.local.value(), fitted.cxl.value());
        let drawn = local + cxl;
        let under_way_bytes = drawn * pair.at(drawn, cxl / drawn).mean_s();
        let cold_part_a_gb = cxl / drawn / self.slow_gb;
        let stress = Stress { figure: self, pair, under_way_bytes, cold_part_a_gb };
        let beside = |row: &KneeRow| {
            Ok(KneeBeside {
                row: *row,
                simulated: stress.simulated(row.hot)?,
                by_capacity: stress.by_capacity(row.hot),
            })
        };
        let rows = self.row.iter().map(beside).collect::<Result<_, PagesError>>()?;
        Ok(KneeReport { under_way_bytes, cold_part_a_gb, rows })
    }
}

/// The stress test with its constants.
struct Stress<'a> {
    figure: &'a KneeFigure,
    pair: Pair<'a>,
    under_way_bytes: f64,
    cold_part_a_gb: f64,
}

/// By how much the part of accesses to the slow tier follows that of a generation.
const FOLLOWS: f64 = 0.1;

impl Stress<'_> {
    /// GB that services have, and GB that are hot.
    fn sizes(&self, hot: f64) -> [f64; 2] {
        let all = self.figure.fast_gb + self.figure.slow_gb;
        [all, (hot * self.figure.whole_gb).min(all)]
    }

    fn point(&self, load: &Load, promoted_bytes_per_s: f64) -> KneePoint {
        // A page that is promoted is read there and written here, and one is demoted in its place.
        let [local, cxl] =
            [load.fast_bytes_per_s, load.slow_bytes_per_s].map(|drawn| drawn + 2.0 * promoted_bytes_per_s);
        let slow = self.pair.slow;
        KneePoint {
            latency_s: slow.loaded_latency(cxl / slow.peak().value()),
            mean_s: load.mean_s(),
            local_bytes_per_s: local,
            cxl_bytes_per_s: cxl,
            promoted_bytes_per_s,
        }
    }

    /// The baseline: hot pages lie on the fast tier as far as it holds them, and nothing moves.
    fn by_capacity(&self, hot: f64) -> KneePoint {
        let slow_part = self.part_by_capacity(self.sizes(hot));
        self.point(&self.pair.drawn(self.under_way_bytes, slow_part), 0.0)
    }

    fn part_by_capacity(&self, [all, hot]: [f64; 2]) -> f64 {
        let spilled = (hot - self.figure.fast_gb).max(0.0);
        let cold = all - hot;
        let of_hot = (1.0 - self.cold_part_a_gb * cold) * spilled / hot;
        self.cold_part_a_gb * (self.figure.slow_gb - spilled).min(cold) + of_hot
    }

    fn simulated(&self, hot: f64) -> Result<KneePoint, PagesError> {
        let figure = self.figure;
        let a_gb = f64::from(figure.pages_a_gb);
        let pages_of = |gb: f64| (gb * a_gb).round() as u32;
        let [all, hot_gb] = self.sizes(hot);
        let (count, hot_count) = (pages_of(all), pages_of(hot_gb));
        let scan = pages_of(figure.scan_gb);
        // Reclaim leaves room for what a generation can promote; the fast tier is larger by that.
        let kernel = Kernel {
            fast_pages: pages_of(figure.fast_gb) + scan,
            slow_pages: count - pages_of(figure.fast_gb),
            min_free: 0,
            low_free: scan,
            high_free: scan,
            scan,
            hot_age: 0,
            promotions: u32::MAX,
            demotions: u32::MAX,
        };
        let mut pages = Pages::new(kernel, &[Service::opt_in("stress", count)])?;
        // Hot pages are spread evenly, and touched first.
        let is_hot = |page: &u32| {
            let before = |page: u32| u64::from(page) * u64::from(hot_count) / u64::from(count);
            before(page + 1) > before(*page)
        };
        let (hot, cold): (Vec<u32>, Vec<u32>) = (0..count).partition(is_hot);
        pages.access(&hot);
        pages.access(&cold);
        let cold_part = self.cold_part_a_gb * (all - hot_gb);
        let mut random = Random::new(figure.seed);
        let mut slow_part = self.part_by_capacity([all, hot_gb]);
        let (mut trace, mut sums) = (vec![], [0.0_f64; 2]);
        for generation in 0..figure.generations {
            // An access is of a whole page: as many GB a second as are drawn, each of so many simulated pages.
            let drawn = self.pair.drawn(self.under_way_bytes, slow_part).bytes_per_s();
            let accesses = pages_of(drawn / 1e9);
            trace.clear();
            for _ in 0..accesses {
                let from = if random.unit() < cold_part { &cold } else { &hot };
                trace.push(from[random.below(from.len() as u32) as usize]);
            }
            let before = pages.seen(0);
            pages.access(&trace);
            pages.advance();
            let after = pages.seen(0);
            let part = (after.slow_accesses - before.slow_accesses) as f64 / f64::from(accesses);
            slow_part += FOLLOWS * (part - slow_part);
            if generation + figure.counted >= figure.generations {
                sums[0] += part;
                sums[1] += (after.promotions - before.promotions) as f64 / a_gb * 1e9;
            }
        }
        let [slow_part, promoted] = sums.map(|sum| sum / f64::from(figure.counted));
        Ok(self.point(&self.pair.drawn(self.under_way_bytes, slow_part), promoted))
    }
}
