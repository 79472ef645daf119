//! Figures 2 to 7 of Liaw and Chen: what the text says beside what follows from the platform.

use polder_place::{Placement, Policy};
use polder_platform::{Bytes, DataError, Folder, Host, Platform, read};
use polder_sim::offload::{OffloadError, Planner, Settings};
use polder_sim::{Job, Model};
use serde::{Deserialize, Serialize};

/// What a figure says, as data: `data/figures/cxl-fig2.toml` and its like.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlText {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    /// What is trained, if anything is.
    pub model: Option<String>,
    /// What the text says, or leaves to be computed.
    pub claim: Vec<CxlClaim>,
    /// What has to be known.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// A sentence of the text.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlClaim {
    /// Which figure of ours stands beside it.
    pub key: String,
    /// What it says.
    pub says: String,
    /// A number or a range, where it gives one.
    pub published: Option<[f64; 2]>,
    /// Of what.
    #[serde(default)]
    pub unit: String,
    /// Whether ours is a number that the platform or the model took from the source, and so no prediction.
    #[serde(default)]
    pub echo: bool,
}

/// A sentence beside a figure of ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClaimBeside {
    /// What the text says.
    pub says: String,
    /// A number or a range, where it gives one.
    pub published: Option<[f64; 2]>,
    /// Ours.
    pub simulated: f64,
    /// Of what.
    pub unit: String,
    /// Whether ours is an input, and so no prediction.
    pub echo: bool,
}

impl ClaimBeside {
    /// How far ours is from the published number or from the nearer end of the range, as a part of it; 0 inside the range.
    #[must_use]
    pub fn off(&self) -> Option<f64> {
        let [least, most] = self.published?;
        let nearest = self.simulated.clamp(least, most);
        Some(if nearest == self.simulated { 0.0 } else { self.simulated / nearest - 1.0 })
    }
}

/// A figure beside ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextReport {
    /// Each sentence.
    pub claims: Vec<ClaimBeside>,
}

/// A 12B step on this host.
struct Twelve<'a> {
    platform: &'a Platform,
    name: &'a str,
    model: &'a str,
}

/// Sequences a GPU, of Figure 2.
const BATCH: u32 = 5;
/// Contexts of Figure 2, and batches of Figure 3.
const CONTEXTS: [u32; 7] = [512, 1024, 2048, 4096, 8192, 16384, 32768];
const BATCHES: [u32; 10] = [1, 2, 4, 8, 12, 16, 20, 24, 32, 48];
/// Sequences a GPU, of Figure 7; its context and Figure 3's.
const SIXTEEN: u32 = 16;
const CONTEXT: u32 = 4096;
/// How near to the most a throughput is saturated.
const SATURATED: f64 = 0.95;
/// Of 128 GiB, what is taken to be the step's.
const DRAM: f64 = 125.0 * 1073741824.0;
/// Bytes of an element: parameter, gradient and two states.
const ELEMENT: f64 = 16.0;

impl CxlText {
    /// Reads a figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load(name: &str) -> Result<Self, DataError> {
        read(Folder::Figures, name)
    }

    /// Sets what the text says beside what follows from the platform.
    ///
    /// # Errors
    /// When a file is damaged.
    pub fn beside(&self) -> Result<TextReport, OffloadError> {
        let platform = Platform::load(&self.platform)?;
        let host = &Job::new(&platform).rack().host;
        let claim = |claim: &CxlClaim| {
            let twelve = Twelve {
                platform: &platform,
                name: &self.platform,
                model: self.model.as_deref().unwrap_or("mistral-nemo-12b"),
            };
            let simulated = match of_host(&claim.key, host) {
                Some(value) => value,
                None => twelve.value(&claim.key)?.ok_or_else(|| {
                    DataError::new("cxl", "claim.key", format!("no figure {:?} is simulated", claim.key))
                })?,
            };
            let CxlClaim { says, published, unit, echo, .. } = claim.clone();
            Ok(ClaimBeside { says, published, simulated, unit, echo })
        };
        let claims = self.claim.iter().map(claim).collect::<Result<_, OffloadError>>()?;
        Ok(TextReport { claims })
    }
}

/// What follows from a host alone.
fn of_host(key: &str, host: &Host) -> Option<f64> {
    let offload = host.offload.as_ref()?;
    let (name, tier) = host.tiers.iter().next()?;
    let [own, card] = ["host", name].map(|name| offload.tiers.get(name).copied().unwrap_or_default());
    let (dram, far) = (own.step?.value(), card.step?.value());
    let link = offload.link?.value();
    let [read, write] = [card.read?.value(), card.write?.value()];
    let gib = f64::from(1 << 30);
    Some(match key {
        "dram-latency" => host.memory.latency.value() * 1e9,
        "card-latency" => tier.idle_latency() * 1e9,
        "step-ratio" => dram / far,
        "step-ratio-described" => host.memory.read.value() / tier.bandwidth(4.0 / 7.0),
        "knee" => offload.cache?.value() / ELEMENT / 1e6,
        "one-gpu-dram" => link / 1e9,
        "one-gpu-read" => link.min(read) / link,
        "one-gpu-write" => link.min(write) / link,
        "two-gpus-read" => (2.0 * link).min(read) / gib,
        "two-gpus-read-each" => link.min(read / 2.0) / gib,
        "two-gpus-write-each" => link.min(write / 2.0) / gib,
        "two-gpus-dram" => 2.0 * link / gib,
        _ => return None,
    })
}

impl Twelve<'_> {
    fn planner(&self, gpus: u32, dram: Option<Bytes>) -> Result<Planner<'_>, OffloadError> {
        Planner::new(self.platform, self.name, Settings { gpus, dram, ..Settings::default() })
    }

    fn bytes(&self, gpus: u32, context: u32, batch: u32) -> Result<f64, OffloadError> {
        let model = Model::load_with(self.model, Some(context))?;
        let (problem, _) = self.planner(gpus, None)?.problem(&model, batch)?;
        Ok(problem.objects.iter().map(|it| it.bytes.value()).sum())
    }

    /// Bytes a token of context.
    fn slope(&self, gpus: u32) -> Result<f64, OffloadError> {
        let [first, last] = [CONTEXTS[0], CONTEXTS[CONTEXTS.len() - 1]];
        let more = self.bytes(gpus, last, BATCH)? - self.bytes(gpus, first, BATCH)?;
        Ok(more / f64::from(last - first))
    }

    /// How far bytes are from the straight line through both ends, at most, as a part of them.
    fn bend(&self, points: &[(u32, u32)], along: impl Fn((u32, u32)) -> u32) -> Result<f64, OffloadError> {
        let at = |(context, batch)| self.bytes(2, context, batch);
        let [first, last] = [points[0], points[points.len() - 1]];
        let (low, high) = (at(first)?, at(last)?);
        let mut most: f64 = 0.0;
        for point in points {
            let part = f64::from(along(*point) - along(first)) / f64::from(along(last) - along(first));
            most = most.max((at(*point)? / (low + part * (high - low)) - 1.0).abs());
        }
        Ok(most)
    }

    /// Tokens a second with everything in DRAM, at each batch.
    fn throughputs(&self) -> Result<Vec<f64>, OffloadError> {
        let planner = self.planner(2, None)?;
        let model = Model::load_with(self.model, Some(CONTEXT))?;
        let rate = |batch: &u32| {
            let point = planner.point(&model, *batch, &[])?;
            Ok(point.tokens / point.dram_only_s)
        };
        BATCHES.iter().map(rate).collect()
    }

    /// How many times longer each phase takes when pages are interleaved.
    fn slower(&self, gpus: u32) -> Result<[f64; 3], OffloadError> {
        let planner = self.planner(gpus, Some(Bytes::new(DRAM)))?;
        let model = Model::load_with(self.model, Some(CONTEXT))?;
        let (problem, _) = planner.problem(&model, SIXTEEN)?;
        let naive = problem.place(Policy::Interleave)?;
        let all_in_dram = |row: &Vec<f64>| (0..row.len()).map(|tier| f64::from(tier == 0)).collect();
        let dram = Placement { fractions: naive.fractions.iter().map(all_in_dram).collect() };
        let (naive, dram) = (problem.seconds(&naive), problem.seconds(&dram));
        Ok([0, 1, 2].map(|it| naive[it] / dram[it]))
    }

    fn value(&self, key: &str) -> Result<Option<f64>, OffloadError> {
        let contexts = CONTEXTS.map(|context| (context, BATCH));
        let batches = BATCHES.map(|batch| (CONTEXT, batch));
        Ok(Some(match key {
            "context-bend" => self.bend(&contexts, |(context, _)| context)? * 100.0,
            "context-slope" => self.slope(2)? / 1e6,
            "gpus-slope" => self.slope(2)? / self.slope(1)?,
            "longest-bytes" => self.bytes(2, CONTEXTS[CONTEXTS.len() - 1], BATCH)? / 1e9,
            "shortest-bytes" => self.bytes(2, CONTEXTS[0], BATCH)? / 1e9,
            "batch-bend" => self.bend(&batches, |(_, batch)| batch)? * 100.0,
            "batch-slope" => (self.bytes(2, CONTEXT, 48)? - self.bytes(2, CONTEXT, 1)?) / 47.0 / 1e9,
            "throughput-falls" => {
                let rates = self.throughputs()?;
                rates.windows(2).filter(|pair| pair[1] < pair[0]).count() as f64
            }
            "saturated-batch" => {
                let rates = self.throughputs()?;
                let most = rates.iter().copied().fold(0.0, f64::max);
                let at = rates.iter().position(|rate| *rate >= SATURATED * most).unwrap_or(0);
                f64::from(BATCHES[at])
            }
            "step-most" => {
                let [forward, backward, step] = self.slower(1)?;
                f64::from(u8::from(step > forward.max(backward)))
            }
            "passes-worse" => {
                let (one, two) = (self.slower(1)?, self.slower(2)?);
                f64::from(u8::from(two[0] > one[0] && two[1] > one[1]))
            }
            "fwd-one" => self.slower(1)?[0],
            "bwd-one" => self.slower(1)?[1],
            "step-one" => self.slower(1)?[2],
            "fwd-two" => self.slower(2)?[0],
            "bwd-two" => self.slower(2)?[1],
            "step-two" => self.slower(2)?[2],
            _ => return Ok(None),
        }))
    }
}
