//! Figure 6 of ScalePool: five models on racks of NVLink joined by InfiniBand, against racks joined by CXL.
//!
//! The paper (section 6) gives three numbers: 1.22 on average, 1.84 at best, 3.79 for communication. It gives no bandwidth
//! and no latency between the racks, no layout, no speed of the pool. What it leaves open is listed here, with the value
//! taken and a range that is plausible.

use std::collections::BTreeMap;

use polder_platform::{Bandwidth, DataError, Folder, Packet, Platform, TierId, Time, TransferRate, read};
use polder_sim::{Job, Layout, Model, Offload, Refusal, Step};
use serde::{Deserialize, Serialize};

use super::open::OpenValue;

/// What the paper gives, as data: `data/figures/scalepool-fig6.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The platform that both sides share: its racks.
    pub platform: String,
    /// The platform that Polder brings along for ScalePool's side.
    pub tiered: String,
    /// What the paper says.
    pub paper: Paper,
    /// What it leaves open.
    pub open: Vec<OpenValue<Parameter>>,
    /// What it leaves open that is no number.
    pub choice: Vec<Choice>,
    /// Its workloads.
    pub row: Vec<Workload>,
}

/// What the paper says, as ratios of baseline over ScalePool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    /// Of the whole step, on average.
    pub mean: f64,
    /// Of the whole step, at best.
    pub best: f64,
    /// Of communication between racks.
    pub communication: f64,
}

/// Something that the paper leaves open, which was taken to be one of several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// What it is, in a line.
    pub what: String,
    /// What was taken.
    pub taken: String,
    /// What is plausible besides.
    pub instead: Vec<Alternative>,
}

/// What a figure may rest on instead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alternative {
    /// What it is, in a word.
    pub value: String,
    /// Which workloads it is of; all when left out.
    #[serde(default)]
    pub models: Vec<String>,
    /// The model in their place.
    pub model: Option<String>,
    /// What of their layouts is another.
    #[serde(default)]
    pub layout: serde_json::Map<String, serde_json::Value>,
    /// Which open parameters have another value.
    #[serde(default)]
    pub open: BTreeMap<Parameter, f64>,
    /// Whether racks are filled, where else each has the ranks of one tensor.
    #[serde(default)]
    pub fills_racks: bool,
}

/// What is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Parameter {
    /// GB/s of each accelerator between racks, over InfiniBand.
    InfinibandBandwidth,
    /// GB/s of each accelerator between racks, over CXL.
    CxlBandwidth,
    /// GB/s of each accelerator to the CPU's memory.
    HostBandwidth,
    /// GB/s of each accelerator to the pool.
    PoolBandwidth,
    /// Microseconds of a step of a collective over InfiniBand.
    InfinibandLatency,
    /// Microseconds of a step of a collective over CXL.
    CxlLatency,
}

/// A model with its layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// The model's name in `data/models`.
    pub model: String,
    /// Its layout.
    pub layout: Layout,
    /// Where the layout comes from.
    pub source: String,
    /// Whether racks are filled, where else each has the ranks of one tensor.
    #[serde(default)]
    pub fills_racks: bool,
}

/// A workload on both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// The model's name.
    pub model: String,
    /// Accelerators.
    pub accelerators: u32,
    /// Over InfiniBand, with what is offloaded in the CPU's memory.
    pub baseline: Step,
    /// Over CXL, with what is offloaded in the pool.
    pub scalepool: Step,
    /// How many times faster the step is.
    pub speedup: f64,
    /// How many times faster communication between racks is, as far as it holds computation up.
    pub communication_speedup: f64,
}

/// Seconds in the paper's three categories: communication, computation, other (bubbles and offloading).
#[must_use]
pub fn categories(step: &Step) -> [f64; 3] {
    let (communication, computation) = (step.communication.exposed_s(), step.compute.total_s());
    [communication, computation, step.total_s - communication - computation]
}

/// Seconds between racks.
fn between(step: &Step) -> f64 {
    let all = &step.communication;
    [&all.tensor, &all.context, &all.expert, &all.pipeline, &all.data]
        .map(|it| it.between.exposed_s)
        .iter()
        .sum()
}

/// The three numbers of the paper, as predicted.
#[must_use]
pub fn summary(pairs: &[Pair]) -> Paper {
    let speedups = pairs.iter().map(|pair| pair.speedup);
    let communication = pairs.iter().map(|pair| pair.communication_speedup);
    let count = pairs.len() as f64;
    Paper {
        mean: speedups.clone().sum::<f64>() / count,
        best: speedups.fold(0.0, f64::max),
        communication: communication.sum::<f64>() / count,
    }
}

impl Figure {
    /// Reads the figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "scalepool-fig6")
    }

    /// The figure with something else in place of what was taken.
    ///
    /// # Errors
    /// When a layout has no such key.
    pub fn with(&self, instead: &Alternative) -> Result<Self, DataError> {
        let wrong = |error: serde_json::Error| {
            DataError::new(
                "scalepool-fig6",
                &format!("choice.instead {:?}: layout", instead.value),
                error.to_string(),
            )
        };
        let mut figure = self.clone();
        for open in &mut figure.open {
            open.value = instead.open.get(&open.name).copied().unwrap_or(open.value);
        }
        for row in &mut figure.row {
            if !instead.models.is_empty() && !instead.models.contains(&row.model) {
                continue;
            }
            let mut layout = serde_json::to_value(row.layout).map_err(wrong)?;
            layout.as_object_mut().expect("a layout has keys").extend(instead.layout.clone());
            row.layout = serde_json::from_value(layout).map_err(wrong)?;
            row.model = instead.model.clone().unwrap_or_else(|| row.model.clone());
            row.fills_racks |= instead.fills_racks;
        }
        Ok(figure)
    }

    /// The value of a parameter, or what `instead` says of it.
    fn value(&self, parameter: Parameter, instead: Option<(Parameter, f64)>) -> f64 {
        match instead {
            Some((other, value)) if other == parameter => value,
            _ => self.open.iter().find(|open| open.name == parameter).map_or(0.0, |open| open.value),
        }
    }

    /// Predicts all workloads on both sides, with one parameter perhaps at another value than the figure's.
    ///
    /// # Errors
    /// When a file is damaged, or a layout cannot run.
    pub fn predict(&self, instead: Option<(Parameter, f64)>) -> Result<Vec<Pair>, FigureError> {
        use Parameter::{
            CxlBandwidth, CxlLatency, HostBandwidth, InfinibandBandwidth, InfinibandLatency, PoolBandwidth,
        };
        let racks = Platform::load(&self.platform)?;
        let side = |bandwidth, latency, far| {
            let value = |parameter| self.value(parameter, instead);
            side(&racks, value(bandwidth), value(latency), value(far))
        };
        let baseline = side(InfinibandBandwidth, InfinibandLatency, HostBandwidth);
        let scalepool = side(CxlBandwidth, CxlLatency, PoolBandwidth);
        // The far tier's speed is that of the side: the CPU's memory, or the pool in its place.
        self.row.iter().map(|row| row.predict(&baseline, &scalepool, TierId::Host)).collect()
    }

    /// Predicts all workloads on the platforms that Polder brings along: nothing of them is fitted to the figure.
    ///
    /// # Errors
    /// When a file is damaged, or a layout cannot run.
    pub fn shipped(&self) -> Result<Shipped, FigureError> {
        let [baseline, scalepool] = [&self.platform, &self.tiered];
        let [from, to] = [Platform::load(baseline)?, Platform::load(scalepool)?];
        let pairs = self.row.iter().map(|row| row.predict(&from, &to, TierId::Pool));
        let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
        let reached = |platform: &Platform| {
            Job::new(platform).fabrics().between.map_or(0.0, |rates| rates.reached_bytes_per_s / 1e9)
        };
        let share = |platform: &Platform, tier| {
            let tiers = platform.tiers(Job::new(platform).rack());
            tiers
                .into_iter()
                .find(|(id, _)| *id == tier)
                .map_or([0.0; 2], |(_, it)| [it.read / 1e9, it.both / 1e9])
        };
        let bandwidths_gb_per_s = [reached(&from), reached(&to), share(&to, TierId::Pool)[0]];
        let [infiniband, cxl, pool] = bandwidths_gb_per_s;
        let replaced = Alternative {
            value: "the platforms'".into(),
            open: BTreeMap::from([
                (Parameter::InfinibandBandwidth, infiniband),
                (Parameter::CxlBandwidth, cxl),
                (Parameter::PoolBandwidth, pool),
                (Parameter::HostBandwidth, share(&from, TierId::Host)[1]),
            ]),
            ..Alternative::default()
        };
        Ok(Shipped {
            platforms: [baseline.clone(), scalepool.clone()],
            bandwidths_gb_per_s,
            replaced: summary(&self.with(&replaced)?.predict(None)?),
            simulated: summary(&pairs),
        })
    }
}

/// The figure on platforms that nothing of it was fitted to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shipped {
    /// Of the baseline, and of ScalePool.
    pub platforms: [String; 2],
    /// What an accelerator gets between racks over InfiniBand and over CXL, as far as collectives reach it, and of the memory nodes while it
    /// reads alone.
    pub bandwidths_gb_per_s: [f64; 3],
    /// The three numbers with these in place of the fitted ones, and with the CPU memory of the baseline's platform.
    pub replaced: Paper,
    /// The three numbers by both platforms as they are.
    pub simulated: Paper,
}

/// The racks joined by a fabric of which nothing is known but what each accelerator gets of it.
fn side(racks: &Platform, gigabytes: f64, microseconds: f64, far: f64) -> Platform {
    let mut platform = racks.clone();
    if let Some(between) = &mut platform.between {
        let whole = Packet { bytes: between.link.flit.bytes, payload: between.link.flit.bytes };
        (between.links, between.link.lanes, between.link.encoding) = (1, 8, 1.0);
        (between.link.rate, between.link.flit, between.link.packet) =
            (TransferRate::new(gigabytes * 1e9), whole, whole);
        between.software.message = Time::new(0.0);
        let wires = between.latency().value();
        between.software.step = Time::new((microseconds * 1e-6 - wires).max(0.0));
    }
    for rack in platform.rack.values_mut() {
        rack.accelerator.fitted.between = 1.0;
        rack.host.attach.bandwidth = Bandwidth::new(far * 1e9);
        // It is each way's, and what is behind the link keeps up with both.
        let both = Bandwidth::new(2.0 * far * 1e9 * f64::from(rack.host.accelerators));
        (rack.host.memory.read, rack.host.memory.write) = (both, both);
    }
    platform
}

impl Workload {
    /// Weights and optimizer states lie in the CPU's memory on the baseline's side, and `far` on the other.
    fn predict(&self, baseline: &Platform, scalepool: &Platform, far: TierId) -> Result<Pair, FigureError> {
        let model = Model::load(&self.model)?;
        let step = |platform: &Platform, tier| {
            let offload = Offload { tier, weights: true, optimizer: true, activations: false };
            let layout = Layout { offload, ..self.layout };
            // Tensor parallelism stays in the rack; pipeline and data parallelism cross racks (section 6).
            let job = Job::new(platform);
            let job = if self.fills_racks { job } else { job.with_fill(layout.tp)? };
            Ok::<_, Refusal>(job.predict(&model, &layout)?.step)
        };
        let (baseline, scalepool) = (step(baseline, TierId::Host)?, step(scalepool, far)?);
        Ok(Pair {
            model: self.model.clone(),
            accelerators: self.layout.accelerators(),
            baseline,
            scalepool,
            speedup: baseline.total_s / scalepool.total_s,
            communication_speedup: between(&baseline) / between(&scalepool),
        })
    }
}

/// Why a figure cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FigureError {
    /// A file is damaged.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A layout cannot run.
    #[error(transparent)]
    Refused(#[from] Refusal),
}
