//! Figures 9 and 10 of Liaw and Chen: throughput of placed steps beside that of steps with everything in DRAM.
//!
//! The paper's text gives the lowest and the highest of each panel. Two constants are fitted to the twelve end-points of Figure 9,
//! and the eight of Figure 10 are judged. All rates of memory and links are measured ones of the platform.

use polder_place::{Computing, Placement, Policy};
use polder_platform::{Bytes, DataError, Folder, Platform, Time, read};
use polder_sim::offload::{OffloadError, Offloaded, Planner, Settings};
use polder_sim::{Model, descend};
use serde::{Deserialize, Serialize};

/// A figure of throughputs, as data: `data/figures/cxl-fig9.toml` and `cxl-fig10.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// DRAM of the baseline.
    pub baseline: Bytes,
    /// DRAM that a placed step may take.
    pub dram: Bytes,
    /// Contexts of the assumed grid.
    pub contexts: Vec<u32>,
    /// Batches of it.
    pub batches: Vec<u32>,
    /// What is taken to be so.
    pub assumed: Vec<String>,
    /// The ranges that the text gives.
    pub row: Vec<CxlRow>,
}

/// A range that the text gives, in percent of the throughput with everything in DRAM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlRow {
    /// The panel.
    pub panel: String,
    /// Of which models, pooled.
    pub models: Vec<String>,
    /// On which platform.
    pub platform: String,
    /// On how many GPUs.
    pub gpus: u32,
    /// Under which policy.
    pub policy: String,
    /// The lowest and the highest.
    pub published: [f64; 2],
}

/// What is fitted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CxlConstants {
    /// What GPUs reach of each other, in bytes a second.
    pub peers_bytes_per_s: f64,
    /// Seconds that the CPUs take for an element, wherever it lies.
    pub element_s: f64,
}

/// A range beside what is predicted of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CxlRange {
    /// What was published.
    #[serde(flatten)]
    pub row: CxlRow,
    /// As simulated: the lowest and the highest, in percent of the throughput with everything in DRAM.
    pub simulated: [f64; 2],
    /// Context and batch of both.
    pub at: [[u32; 2]; 2],
    /// Points of the grid that fit.
    pub points: usize,
}

/// A figure made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CxlReport {
    /// What was fitted.
    pub constants: CxlConstants,
    /// Figure 9's ranges, which the constants are fitted to.
    pub fitted: Vec<CxlRange>,
    /// Figure 10's, which are judged.
    pub judged: Vec<CxlRange>,
    /// The root mean square of the errors of both, in points.
    pub fitted_rms: f64,
    /// Of those that are judged.
    pub judged_rms: f64,
    /// Every point of both figures, with the order of the policies.
    pub points: Vec<CxlPoint>,
}

/// A point of the grid: what each policy reaches there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CxlPoint {
    /// The panel.
    pub panel: String,
    /// What is trained.
    pub model: String,
    /// On how many GPUs.
    pub gpus: u32,
    /// Tokens of a sequence.
    pub context: u32,
    /// Sequences of a GPU.
    pub batch: u32,
    /// Each policy under which the step fits with its percent of the throughput with everything in DRAM, the fastest first.
    pub policies: Vec<(String, f64)>,
}

/// The most that judged end-points are to be off, as a root mean square, in points.
pub const CXL_POINTS: f64 = 3.0;

/// What of a step depends on no fitted constant: one under a policy, and with everything in DRAM.
struct Sample {
    model: String,
    context: u32,
    batch: u32,
    computing: [f64; 2],
    overlap: f64,
    exchanged: [f64; 2],
    trained: f64,
    placed: Copies,
    dram: Copies,
}

/// Seconds of copies and of the optimizer.
struct Copies {
    /// Of each pass: of all copies, then of those of each stream alone.
    passes: [Vec<f64>; 2],
    step: f64,
}

/// The samples of a row.
struct Sampled<'a> {
    row: &'a CxlRow,
    samples: Vec<Sample>,
}

impl CxlFigure {
    /// Reads one of the figures.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load(name: &str) -> Result<Self, DataError> {
        read(Folder::Figures, name)
    }

    fn sampled(&self) -> Result<Vec<Sampled<'_>>, OffloadError> {
        self.row.iter().map(|row| Ok(Sampled { row, samples: self.samples(row)? })).collect()
    }

    fn samples(&self, row: &CxlRow) -> Result<Vec<Sample>, OffloadError> {
        let platform = Platform::load(&row.platform)?;
        let with = |dram| Settings { gpus: row.gpus, dram: Some(dram), ..Settings::default() };
        let planner = Planner::new(&platform, &row.platform, with(self.dram))?;
        let policy: Policy = row.policy.parse().map_err(|problem: polder_place::PolicyError| {
            DataError::new("cxl", "policy", problem.to_string())
        })?;
        let mut samples = vec![];
        for name in &row.models {
            for context in &self.contexts {
                let model = Model::load_with(name, Some(*context))?;
                for batch in &self.batches {
                    samples.extend(self.sample(&planner, policy, (name, &model), *batch)?);
                }
            }
        }
        Ok(samples)
    }

    /// The sample at a point, if it fits also with everything in the baseline's DRAM.
    fn sample(
        &self,
        planner: &Planner<'_>,
        policy: Policy,
        (name, model): (&str, &Model),
        batch: u32,
    ) -> Result<Option<Sample>, OffloadError> {
        let (offloaded, exchanged, gpu) = planner.offloaded(model, batch)?;
        let nothing = [Time::new(0.0); 2];
        let transfers = Offloaded { computation: nothing, element: Time::new(0.0), ..offloaded };
        let problem = transfers.problem(planner.tiers().to_vec());
        let bytes: f64 = problem.objects.iter().map(|it| it.bytes.value()).sum();
        let Ok(placement) = problem.place(policy) else { return Ok(None) };
        if bytes > self.baseline.value() || !gpu.fits() {
            return Ok(None);
        }
        let all_in_dram = |row: &Vec<f64>| (0..row.len()).map(|tier| f64::from(tier == 0)).collect();
        let dram = Placement { fractions: placement.fractions.iter().map(all_in_dram).collect() };
        let copies = |placement| Copies {
            passes: [0, 1].map(|pass| problem.copies(&problem.phases[pass], placement)),
            step: problem.seconds(placement)[2],
        };
        Ok(Some(Sample {
            model: name.to_owned(),
            context: model.sequence,
            batch,
            computing: offloaded.computation.map(Time::value),
            overlap: problem.phases[0].computing.overlap,
            exchanged,
            trained: offloaded.trained,
            placed: copies(&placement),
            dram: copies(&dram),
        }))
    }
}

impl Sample {
    /// Throughput in percent of that with everything in DRAM.
    fn percent(&self, constants: &CxlConstants) -> f64 {
        let CxlConstants { peers_bytes_per_s, element_s } = *constants;
        let exchanged = self.exchanged.map(|bytes| bytes / peers_bytes_per_s);
        let seconds = |of: &Copies| {
            let passes = of.passes.iter().zip(self.computing).map(|(copies, seconds)| {
                let turns = copies.iter().zip(std::iter::once(0.0).chain(exchanged));
                let slowest = turns.map(|(copies, exchanged)| copies + exchanged).fold(0.0, f64::max);
                Computing { seconds, overlap: self.overlap }.beside(slowest)
            });
            passes.sum::<f64>() + of.step.max(element_s * self.trained)
        };
        seconds(&self.dram) / seconds(&self.placed) * 100.0
    }
}

impl Sampled<'_> {
    fn range(&self, constants: &CxlConstants) -> CxlRange {
        let percents = self.samples.iter().map(|it| (it.percent(constants), [it.context, it.batch]));
        let least = percents.clone().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::NAN, [0; 2]));
        let most = percents.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::NAN, [0; 2]));
        CxlRange {
            row: self.row.clone(),
            simulated: [least.0, most.0],
            at: [least.1, most.1],
            points: self.samples.len(),
        }
    }
}

/// The points of some rows, each with its policies, the fastest first.
fn points(rows: &[Sampled<'_>], constants: &CxlConstants) -> Vec<CxlPoint> {
    let mut points: Vec<CxlPoint> = vec![];
    for (row, sample) in rows.iter().flat_map(|rows| rows.samples.iter().map(|sample| (rows.row, sample))) {
        let is_same = |point: &&mut CxlPoint| {
            (&point.panel, &point.model, point.context, point.batch)
                == (&row.panel, &sample.model, sample.context, sample.batch)
        };
        let reached = (row.policy.clone(), sample.percent(constants));
        match points.iter_mut().find(is_same) {
            Some(point) => point.policies.push(reached),
            None => points.push(CxlPoint {
                panel: row.panel.clone(),
                model: sample.model.clone(),
                gpus: row.gpus,
                context: sample.context,
                batch: sample.batch,
                policies: vec![reached],
            }),
        }
    }
    points.iter_mut().for_each(|it| it.policies.sort_by(|a, b| b.1.total_cmp(&a.1)));
    points
}

/// The root mean square of the errors of both ends of each range, in points.
fn rms(ranges: &[CxlRange]) -> f64 {
    let errors =
        ranges.iter().flat_map(|it| it.simulated.into_iter().zip(it.row.published).map(|(a, b)| a - b));
    let (sum, count) = errors.fold((0.0, 0.0), |(sum, count), error| (sum + error * error, count + 1.0));
    (sum / count).sqrt()
}

/// Constants at a place of the search.
fn constants([peers, element]: &[f64; 2]) -> CxlConstants {
    CxlConstants {
        peers_bytes_per_s: 20e9 * (0.5 * peers).exp2(),
        element_s: (100e-12 * (1.0 + 0.25 * element)).max(0.0),
    }
}

/// Fits the constants to Figure 9, and judges Figure 10 by them.
///
/// # Errors
/// When a file is damaged.
pub fn cxl_throughput() -> Result<CxlReport, OffloadError> {
    let [nine, ten] = [CxlFigure::load("cxl-fig9")?, CxlFigure::load("cxl-fig10")?];
    let (fitted, judged) = (nine.sampled()?, ten.sampled()?);
    let ranges = |rows: &[Sampled<'_>], constants: &CxlConstants| {
        rows.iter().map(|it| it.range(constants)).collect::<Vec<_>>()
    };
    // Figure 10 has no part in it.
    let constants = constants(&descend(|at| rms(&ranges(&fitted, &constants(at)))));
    let points = [&fitted, &judged].into_iter().flat_map(|rows| points(rows, &constants)).collect();
    let (fitted, judged) = (ranges(&fitted, &constants), ranges(&judged, &constants));
    Ok(CxlReport { constants, fitted_rms: rms(&fitted), judged_rms: rms(&judged), fitted, judged, points })
}
