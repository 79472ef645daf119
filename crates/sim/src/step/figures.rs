//! What is predicted of a step: every figure, as every output has it.

use polder_platform::TierId;
use serde::{Serialize, Serializer};

/// What a step is predicted to take. Seconds and bytes are those of the accelerator that sets the pace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Step {
    /// All of it: the sum of everything below but what is hidden.
    pub total_s: f64,
    /// Computing.
    pub compute: ComputeTimes,
    /// Sending, by what it is for.
    pub communication: Communication,
    /// Waiting for other stages at the beginning and at the end.
    pub bubble_s: f64,
    /// To and from another tier.
    pub offload: Exposure,
    /// Waiting for the slowest of many.
    pub straggle_s: f64,
    /// What lies where.
    pub memory: MemoryUse,
}

/// Seconds of computing, all micro-batches together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ComputeTimes {
    /// Forward pass.
    pub forward_s: f64,
    /// Backward pass, without what is computed again.
    pub backward_s: f64,
    /// Computed again.
    pub recompute_s: f64,
    /// What these take longer because collectives beside them take processors.
    pub contention_s: f64,
    /// Of that, what is beside messages of experts. It is no figure of its own.
    #[serde(skip)]
    pub expert_contention_s: f64,
    /// The optimizer.
    pub optimizer_s: f64,
}

/// Seconds that hold computation up, and that run beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Exposure {
    /// Holding it up.
    pub exposed_s: f64,
    /// Beside it.
    pub hidden_s: f64,
}

/// Seconds inside a rack, and between racks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Scoped {
    /// Inside a rack.
    pub inside: Exposure,
    /// Between racks.
    pub between: Exposure,
}

/// Seconds of sending, by what it is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Communication {
    /// Parts of matrix products.
    pub tensor: Scoped,
    /// Keys and values.
    pub context: Scoped,
    /// Tokens to experts and back.
    pub expert: Scoped,
    /// Activations between stages.
    pub pipeline: Scoped,
    /// Gradients and weights among copies.
    pub data: Scoped,
}

/// Bytes in each tier of memory: an accelerator's own, then its share of the one that takes what is offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct MemoryUse {
    /// The tiers, the nearest first.
    pub tiers: [TierUse; 2],
}

/// Bytes in a tier of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TierUse {
    /// The tier beyond the accelerator; none for the accelerator's own memory.
    #[serde(serialize_with = "write_tier_name")]
    pub tier: Option<TierId>,
    /// Weights.
    pub weights_bytes: f64,
    /// Gradients.
    pub gradients_bytes: f64,
    /// Optimizer states.
    pub optimizer_bytes: f64,
    /// Activations between the passes, and in the accelerator's memory the largest that pass by.
    pub activations_bytes: f64,
    /// All of it.
    pub used_bytes: f64,
    /// What the accelerator has there.
    pub capacity_bytes: f64,
}

fn write_tier_name<S: Serializer>(tier: &Option<TierId>, to: S) -> Result<S::Ok, S::Error> {
    match tier {
        None => to.serialize_str("accelerator"),
        Some(tier) => to.collect_str(tier),
    }
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureUnit {
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
}

/// A figure of a step. Tables, CSV, Python and pictures take their columns from [`Step::FIGURES`], and a test holds JSON
/// against it.
#[derive(Clone, Copy, Debug)]
pub struct StepFigure {
    /// Its name in tables of many steps.
    pub key: &'static str,
    /// The keys that lead to it in JSON, with dots.
    pub path: &'static str,
    /// What people read; seconds that hold computation up, and those beside it, have the same.
    pub label: &'static str,
    /// What it counts.
    pub unit: FigureUnit,
    /// Whether it is seconds beside computation.
    pub is_hidden: bool,
    /// The figure of a step.
    pub of: fn(&Step) -> f64,
}

/// Seconds of a kind of sending, inside racks and between them.
macro_rules! sending {
    ($kind:ident) => {
        [
            sending!($kind, inside, exposed_s, false),
            sending!($kind, inside, hidden_s, true),
            sending!($kind, between, exposed_s, false),
            sending!($kind, between, hidden_s, true),
        ]
    };
    ($kind:ident, $scope:ident, $part:ident, $is_hidden:literal) => {
        StepFigure {
            key: concat!(stringify!($kind), "_", stringify!($scope), "_", stringify!($part)),
            path: concat!(
                "communication.",
                stringify!($kind),
                ".",
                stringify!($scope),
                ".",
                stringify!($part)
            ),
            label: concat!(stringify!($kind), ", ", stringify!($scope), " racks"),
            unit: FigureUnit::Seconds,
            is_hidden: $is_hidden,
            of: |step| step.communication.$kind.$scope.$part,
        }
    };
}

const fn seconds(
    key: &'static str,
    path: &'static str,
    label: &'static str,
    is_hidden: bool,
    of: fn(&Step) -> f64,
) -> StepFigure {
    StepFigure { key, path, label, unit: FigureUnit::Seconds, is_hidden, of }
}

/// Bytes in a tier, whose keys in tables begin with `prefix`.
macro_rules! tier {
    ($prefix:literal, $place:literal, $all:literal) => {
        [
            tier!($prefix, $place, weights_bytes, "weights"),
            tier!($prefix, $place, gradients_bytes, "gradients"),
            tier!($prefix, $place, optimizer_bytes, "optimizer states"),
            tier!($prefix, $place, activations_bytes, "activations"),
            tier!($prefix, $place, used_bytes, $all),
            tier!($prefix, $place, capacity_bytes, "of"),
        ]
    };
    ($prefix:literal, $place:literal, $kind:ident, $label:literal) => {
        StepFigure {
            key: concat!($prefix, stringify!($kind)),
            path: concat!("memory.", $place, ".", stringify!($kind)),
            label: $label,
            unit: FigureUnit::Bytes,
            is_hidden: false,
            of: |step| step.memory.tiers[$place].$kind,
        }
    };
}

const SENDING: [[StepFigure; 4]; 5] =
    [sending!(tensor), sending!(context), sending!(expert), sending!(pipeline), sending!(data)];
const TIERS: [[StepFigure; 6]; 2] = [tier!("", 0, "memory"), tier!("offload_", 1, "offloaded")];

impl Step {
    /// Its figures, flat, in the order of JSON.
    pub const FIGURES: [StepFigure; 41] = {
        let [[t0, t1, t2, t3], [c0, c1, c2, c3], [e0, e1, e2, e3], [p0, p1, p2, p3], [d0, d1, d2, d3]] =
            SENDING;
        // Gradients are never offloaded.
        let [[a0, a1, a2, a3, a4, a5], [o0, _, o2, o3, o4, o5]] = TIERS;
        [
            seconds("total_s", "total_s", "step", false, |it| it.total_s),
            seconds("forward_s", "compute.forward_s", "forward", false, |it| it.compute.forward_s),
            seconds("backward_s", "compute.backward_s", "backward", false, |it| it.compute.backward_s),
            seconds("recompute_s", "compute.recompute_s", "recompute", false, |it| it.compute.recompute_s),
            seconds("contention_s", "compute.contention_s", "contention", false, |it| {
                it.compute.contention_s
            }),
            seconds("optimizer_s", "compute.optimizer_s", "optimizer", false, |it| it.compute.optimizer_s),
            t0,
            t1,
            t2,
            t3,
            c0,
            c1,
            c2,
            c3,
            e0,
            e1,
            e2,
            e3,
            p0,
            p1,
            p2,
            p3,
            d0,
            d1,
            d2,
            d3,
            seconds("bubble_s", "bubble_s", "bubble", false, |it| it.bubble_s),
            seconds("offload_exposed_s", "offload.exposed_s", "offload", false, |it| it.offload.exposed_s),
            seconds("offload_hidden_s", "offload.hidden_s", "offload", true, |it| it.offload.hidden_s),
            seconds("straggle_s", "straggle_s", "stragglers", false, |it| it.straggle_s),
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            o0,
            o2,
            o3,
            o4,
            o5,
        ]
    };

    /// The figures, in the order of [`Step::FIGURES`].
    #[must_use]
    pub fn figures(&self) -> [f64; Self::FIGURES.len()] {
        Self::FIGURES.map(|figure| (figure.of)(self))
    }

    /// What its time is made of, in order: each with the seconds that hold computation up, and those beside it.
    #[must_use]
    pub fn times(&self) -> Vec<(&'static str, Exposure)> {
        let parts = Self::FIGURES[1..].iter().filter(|figure| figure.unit == FigureUnit::Seconds);
        let mut times: Vec<(&'static str, Exposure)> = vec![];
        for figure in parts {
            let value = (figure.of)(self);
            match times.last_mut() {
                Some((label, shown)) if *label == figure.label && figure.is_hidden => shown.hidden_s = value,
                _ => times.push((figure.label, Exposure { exposed_s: value, hidden_s: 0.0 })),
            }
        }
        times
    }
}

impl MemoryUse {
    /// Whether it fits where it lies.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.tiers.iter().all(TierUse::fits)
    }

    /// The accelerator's own memory.
    #[must_use]
    pub const fn accelerator(&self) -> &TierUse {
        &self.tiers[0]
    }

    /// The accelerator's share of the tier that takes what is offloaded.
    #[must_use]
    pub const fn offloaded(&self) -> &TierUse {
        &self.tiers[1]
    }
}

impl TierUse {
    /// Whether it fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.used_bytes <= self.capacity_bytes
    }

    /// What lies there, by what people call it.
    #[must_use]
    pub const fn kinds(&self) -> [(&'static str, f64); 4] {
        [
            ("weights", self.weights_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer states", self.optimizer_bytes),
            ("activations", self.activations_bytes),
        ]
    }
}

impl Scoped {
    /// What holds computation up.
    #[must_use]
    pub fn exposed_s(&self) -> f64 {
        self.inside.exposed_s + self.between.exposed_s
    }
}

impl Communication {
    /// What holds computation up.
    #[must_use]
    pub fn exposed_s(&self) -> f64 {
        let Self { tensor, context, expert, pipeline, data } = self;
        tensor.exposed_s()
            + context.exposed_s()
            + expert.exposed_s()
            + pipeline.exposed_s()
            + data.exposed_s()
    }
}

impl ComputeTimes {
    /// All of it.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        self.forward_s + self.backward_s + self.recompute_s + self.contention_s + self.optimizer_s
    }
}

/// A stage of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// Its blocks.
    pub blocks: u32,
    /// Seconds of its passes as a part of those of the slowest stage.
    pub pace: f64,
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The leaves of an object, with the keys that lead to them.
    fn leaves(at: &str, value: &Value, figures: &mut Vec<(String, f64)>) {
        match value {
            Value::Object(keys) => keys.iter().for_each(|(key, value)| {
                let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                leaves(&at, value, figures);
            }),
            Value::Array(tiers) => {
                tiers
                    .iter()
                    .enumerate()
                    .for_each(|(place, tier)| leaves(&format!("{at}.{place}"), tier, figures));
            }
            // The name of a tier.
            Value::String(_) => {}
            value => figures.push((at.to_owned(), value.as_f64().expect("a figure"))),
        }
    }

    #[test]
    fn json_has_the_figures_of_the_table_and_no_other() {
        let mut numbers = 0.0;
        let mut next = || {
            numbers += 1.0;
            numbers
        };
        let mut shown = || Exposure { exposed_s: next(), hidden_s: next() };
        let mut scoped = || Scoped { inside: shown(), between: shown() };
        let communication = Communication {
            tensor: scoped(),
            context: scoped(),
            expert: scoped(),
            pipeline: scoped(),
            data: scoped(),
        };
        let step = Step {
            total_s: 101.0,
            compute: ComputeTimes {
                forward_s: 102.0,
                backward_s: 103.0,
                recompute_s: 104.0,
                contention_s: 105.0,
                expert_contention_s: 0.0,
                optimizer_s: 106.0,
            },
            communication,
            bubble_s: 107.0,
            offload: Exposure { exposed_s: 108.0, hidden_s: 109.0 },
            straggle_s: 113.0,
            memory: MemoryUse {
                tiers: [
                    TierUse { weights_bytes: 110.0, ..TierUse::default() },
                    TierUse { capacity_bytes: 111.0, used_bytes: 112.0, ..TierUse::default() },
                ],
            },
        };
        let mut figures = vec![];
        leaves("", &serde_json::to_value(step).unwrap(), &mut figures);
        figures.retain(|(path, _)| path != "memory.1.gradients_bytes");
        let mut expected: Vec<_> =
            Step::FIGURES.iter().map(|figure| (figure.path.to_owned(), (figure.of)(&step))).collect();
        figures.sort_by(|a, b| a.0.cmp(&b.0));
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(figures, expected);
        // A key is its path without the group.
        for StepFigure { key, path, unit, .. } in Step::FIGURES {
            let groups = ["compute.", "communication.", "memory.0."];
            let own = groups.iter().find_map(|group| path.strip_prefix(group)).unwrap_or(path);
            assert_eq!(key, own.replace("memory.1.", "offload.").replace('.', "_"));
            assert_eq!(unit == FigureUnit::Bytes, key.ends_with("_bytes"));
        }
        let exposed: f64 = step.times().iter().map(|(_, shown)| shown.exposed_s + shown.hidden_s).sum();
        assert_eq!(exposed, (1..=20).sum::<i32>() as f64 + (102..=109).sum::<i32>() as f64 + 113.0);
    }
}
