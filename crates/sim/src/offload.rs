//! Seconds of the phases of an offloaded training step, from its bytes and the tiers that they lie in.
//!
//! Everything lies in host memory, as with ZeRO-3 and both offloads: a GPU reads bf16 parameters layer by layer, writes
//! checkpointed activations and reads them again, and writes bf16 gradients; the CPU then runs the optimizer. A phase
//! lasts as long as its slowest link: see [`polder_place::Problem::seconds`].

use polder_place::{Kind, Moved, Object, Phase, Placement, Problem, Tier};
use polder_platform::{Bandwidth, Bytes, Time};

/// What a step offloads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offloaded {
    /// Parameters of the model.
    pub parameters: f64,
    /// Checkpointed activations of all GPUs.
    pub activations: Bytes,
    /// GPUs, each of which has a link of its own.
    pub gpus: u32,
    /// The link of a GPU, each way.
    pub link: Bandwidth,
    /// What the GPUs compute in a forward and a backward pass.
    pub computation: [Time; 2],
}

/// Bytes of 32-bit and of 16-bit numbers.
const WIDE: f64 = 4.0;
const NARROW: f64 = 2.0;

/// The optimizer alone: 28 bytes of traffic a parameter, in the order of Table I's lower half.
#[must_use]
pub fn optimizer(parameters: f64, tiers: Vec<Tier>) -> Problem {
    let objects = [
        ("momentum", Kind::Momentum),
        ("variance", Kind::Variance),
        ("fp32 gradients", Kind::MasterGradient),
        ("fp32 parameters", Kind::MasterParameter),
    ];
    let objects = objects.into_iter().map(|(name, kind)| object(name, kind, WIDE * parameters)).collect();
    let moved = |object, write| Moved { object, read: 1.0, write };
    let moved = vec![moved(0, 1.0), moved(1, 1.0), moved(2, 0.0), moved(3, 1.0)];
    let step = Phase { name: "STEP".into(), by_device: false, least_s: 0.0, moved };
    Problem { tiers, objects, phases: vec![step] }
}

fn object(name: &str, kind: Kind, bytes: f64) -> Object {
    Object { name: name.into(), kind, bytes: Bytes::new(bytes), only: None }
}

impl Offloaded {
    /// The objects of Table I, and the phases FWD, BWD and STEP that move them.
    #[must_use]
    pub fn problem(&self, tiers: Vec<Tier>) -> Problem {
        let Problem { tiers, mut objects, phases } = optimizer(self.parameters, tiers);
        objects.extend([
            object("bf16 parameters", Kind::Parameter, NARROW * self.parameters),
            object("activations", Kind::Activation, self.activations.value()),
            object("bf16 gradients", Kind::Gradient, NARROW * self.parameters),
        ]);
        let [parameters, activations, gradients] = [4, 5, 6];
        let read = |object| Moved { object, read: 1.0, write: 0.0 };
        let written = |object| Moved { object, read: 0.0, write: 1.0 };
        let [forward, backward] = self.computation;
        let by_gpus = |name: &str, computation: Time, moved: Vec<Moved>| {
            let bytes: f64 =
                moved.iter().map(|it| (it.read + it.write) * objects[it.object].bytes.value()).sum();
            let crossed = bytes / (self.link.value() * f64::from(self.gpus));
            Phase { name: name.into(), by_device: true, least_s: computation.value().max(crossed), moved }
        };
        let forward = by_gpus("FWD", forward, vec![read(parameters), written(activations)]);
        let moved = vec![read(parameters), read(activations), written(gradients)];
        let backward = by_gpus("BWD", backward, moved);
        let step = phases.into_iter().map(|mut step| {
            step.moved.push(written(parameters));
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
