//! Seconds of the phases of an offloaded training step, from its bytes and the tiers that they lie in.
//!
//! Everything lies in host memory, as with ZeRO-3 and both offloads: a GPU reads bf16 parameters layer by layer, writes
//! checkpointed activations and reads them again, and writes bf16 gradients; the CPU then runs the optimizer. A phase
//! lasts as long as its slowest link: see [`polder_place::Problem::seconds`]. A [`Planner`] makes all of it of a model and a platform.

mod error;
mod gpu;
mod plan;
mod policy;
mod tiers;

use polder_place::{Computing, Kind, Moved, Object, Phase, Placement, Problem, Stream, Tier};
use polder_platform::{Bandwidth, Bytes, Time};
use serde::{Deserialize, Serialize};

pub use error::OffloadError;
pub use gpu::GpuUse;
pub use plan::{ObjectBytes, PhaseSeconds, Pinned, Placed, Planner, Point, Settings};
pub use policy::PlacingPolicy;

/// How parameters are updated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Optimizer {
    /// Two states a parameter: Table I of Liaw and Chen.
    #[default]
    Adam,
    /// One state a parameter (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023).
    Lion,
}

/// What a step offloads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offloaded {
    /// Parameters of the model, which each pass reads.
    pub parameters: f64,
    /// Those of them that the optimizer updates.
    pub trained: f64,
    /// By which optimizer.
    pub optimizer: Optimizer,
    /// Checkpointed activations of all GPUs.
    pub activations: Bytes,
    /// GPUs, each of which has a link of its own.
    pub gpus: u32,
    /// The link of a GPU, each way.
    pub link: Bandwidth,
    /// What the GPUs compute in a forward and a backward pass.
    pub computation: [Time; 2],
    /// Seconds in which they send each other parameters, in each pass, and gradients.
    pub exchanged: [Time; 2],
    /// What the CPUs take to update a parameter, wherever it lies.
    pub element: Time,
}

/// Parameters that are fetched ahead of the computation: `stage3_prefetch_bucket_size` of DeepSpeed, as it is by default.
const PREFETCHED: f64 = 5e7;
/// Bytes of 32-bit and of 16-bit numbers.
const WIDE: f64 = 4.0;
const NARROW: f64 = 2.0;

/// The step of Adam alone: 28 bytes of traffic a parameter, in the order of Table I's lower half.
#[must_use]
pub fn optimizer(parameters: f64, tiers: Vec<Tier>) -> Problem {
    Optimizer::Adam.step(parameters, tiers)
}

impl Optimizer {
    /// The step alone: states and parameters are read and written, gradients are read.
    #[must_use]
    pub fn step(self, parameters: f64, tiers: Vec<Tier>) -> Problem {
        let states: &[_] = match self {
            Self::Adam => &[("momentum", Kind::Momentum), ("variance", Kind::Variance)],
            Self::Lion => &[("momentum", Kind::Momentum)],
        };
        let others = [("fp32 gradients", Kind::MasterGradient), ("fp32 parameters", Kind::MasterParameter)];
        let all: Vec<_> = states.iter().copied().chain(others).collect();
        let moved = all.iter().enumerate().map(|(object, (_, kind))| {
            let write = if *kind == Kind::MasterGradient { 0.0 } else { 1.0 };
            Moved { object, read: 1.0, write }
        });
        let step = Phase {
            name: "STEP".into(),
            by_device: false,
            least_s: 0.0,
            computing: Computing::default(),
            streams: vec![],
            moved: moved.collect(),
        };
        let objects = all.iter().map(|(name, kind)| object(name, *kind, WIDE * parameters)).collect();
        Problem { tiers, objects, phases: vec![step] }
    }
}

fn object(name: &str, kind: Kind, bytes: f64) -> Object {
    Object { name: name.into(), kind, bytes: Bytes::new(bytes), only: vec![] }
}

impl Offloaded {
    /// The part of computation and of transfers that runs beside the other. ZeRO-3 fetches a bucket while it computes with the one
    /// before (DeepSpeed, `PartitionedParameterCoordinator.fetch_sub_module`). So only the first fetch and the last computation of
    /// a pass run alone: with n equal buckets, an n-th of the shorter one.
    fn overlap(&self) -> f64 {
        1.0 - 1.0 / (self.parameters / PREFETCHED).ceil().max(1.0)
    }

    /// The objects of Table I, and the phases FWD, BWD and STEP that move them.
    #[must_use]
    pub fn problem(&self, tiers: Vec<Tier>) -> Problem {
        let Problem { tiers, mut objects, phases } = self.optimizer.step(self.trained, tiers);
        let [parameters, activations, gradients] = [0, 1, 2].map(|offset| objects.len() + offset);
        objects.extend([
            object("bf16 parameters", Kind::Parameter, NARROW * self.parameters),
            object("activations", Kind::Activation, self.activations.value()),
            object("bf16 gradients", Kind::Gradient, NARROW * self.trained),
        ]);
        let read = |object| Moved { object, read: 1.0, write: 0.0 };
        let written = |object| Moved { object, read: 0.0, write: 1.0 };
        let crossed = |moved: &Moved| {
            let bytes = (moved.read + moved.write) * objects[moved.object].bytes.value();
            bytes / (self.link.value() * f64::from(self.gpus))
        };
        let by_gpus = |name: &str, pass: usize, moved: Vec<Moved>| {
            let computing = Computing { seconds: self.computation[pass].value(), overlap: self.overlap() };
            // ZeRO-3 gathers a bucket on the stream that fetched it, and copies gradients on that which reduced them.
            let stream = |(exchanged, object): (Time, usize)| {
                let place = moved.iter().position(|transfer| transfer.object == object)?;
                let least_s = crossed(&moved[place]);
                Some(Stream { moved: vec![place], exchanged_s: exchanged.value(), least_s })
            };
            let [gathered, reduced] = self.exchanged;
            let streams = [(gathered, parameters), (reduced, gradients)].into_iter().filter_map(stream);
            Phase {
                name: name.into(),
                by_device: true,
                least_s: moved.iter().map(crossed).sum(),
                computing,
                streams: streams.collect(),
                moved,
            }
        };
        let forward = by_gpus("FWD", 0, vec![read(parameters), written(activations)]);
        let moved = vec![read(parameters), read(activations), written(gradients)];
        let backward = by_gpus("BWD", 1, moved);
        let step = phases.into_iter().map(|mut step| {
            // Of the 16-bit parameters, those that were updated.
            let write = if self.parameters > 0.0 { self.trained / self.parameters } else { 0.0 };
            step.least_s = self.element.value() * self.trained;
            step.moved.push(Moved { object: parameters, read: 0.0, write });
            step
        });
        let phases = [forward, backward].into_iter().chain(step).collect();
        Problem { tiers, objects, phases }
    }
}

/// Seconds of the optimizer's step where `cache` bytes of it stay in the CPU's last caches: as much less as they are of
/// its traffic. Below some 20 million parameters it is most of it.
#[must_use]
pub fn cached(problem: &Problem, placement: &Placement, cache: Bytes) -> f64 {
    let step = problem.phases.iter().zip(problem.seconds(placement)).next_back();
    step.map_or(0.0, |(phase, seconds)| {
        let moved = |it: &Moved| (it.read + it.write) * problem.objects[it.object].bytes.value();
        let traffic: f64 = phase.moved.iter().map(moved).sum();
        seconds * (1.0 - cache.value() / traffic).max(0.0)
    })
}
