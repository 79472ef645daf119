//! A training step in closed form.
//!
//! What layouts share is computed once: a [`Block`] for all that agree in how a block is cut. What is left is a few dozen
//! operations a layout, so that a search and a single prediction are one code.

use serde::Serialize;

use crate::block::{Block, Edge, Key, Traffic};
use crate::layout::{Layout, Zero};
use crate::machine::{Machine, Scopes, Span};
use crate::model::Model;

/// What a step is predicted to take. Seconds and bytes are those of the accelerator that sets the pace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Step {
    /// All of it: the sum of everything below but what is hidden.
    pub total_s: f64,
    /// Computing.
    pub compute: Compute,
    /// Sending, by what it is for.
    pub communication: Communication,
    /// Waiting for other stages at the beginning and at the end.
    pub bubble_s: f64,
    /// To and from another tier.
    pub offload: Shown,
    /// Waiting for the slowest of many.
    pub straggle_s: f64,
    /// What lies where.
    pub memory: Memory,
}

/// Seconds of computing, all micro-batches together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Compute {
    /// Forward pass.
    pub forward_s: f64,
    /// Backward pass, without what is computed again.
    pub backward_s: f64,
    /// Computed again.
    pub recompute_s: f64,
    /// The optimizer.
    pub optimizer_s: f64,
}

/// Seconds that hold computation up, and that run beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Shown {
    /// Holding it up.
    pub exposed_s: f64,
    /// Beside it.
    pub hidden_s: f64,
}

/// Seconds inside a rack, and between racks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Scoped {
    /// Inside a rack.
    pub inside: Shown,
    /// Between racks.
    pub between: Shown,
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

/// Bytes on an accelerator, and on its share of another tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Weights.
    pub weights_bytes: f64,
    /// Gradients.
    pub gradients_bytes: f64,
    /// Optimizer states.
    pub optimizer_bytes: f64,
    /// Activations between the passes, and the largest that pass by.
    pub activations_bytes: f64,
    /// All of it.
    pub used_bytes: f64,
    /// What the accelerator has.
    pub capacity_bytes: f64,
    /// What lies in the other tier.
    pub far_bytes: f64,
    /// What an accelerator's share of that has.
    pub far_capacity_bytes: f64,
}

impl Step {
    /// The names of its figures, flat, for tables of many steps.
    pub const COLUMNS: [&str; 37] = [
        "total_s",
        "forward_s",
        "backward_s",
        "recompute_s",
        "optimizer_s",
        "tensor_inside_exposed_s",
        "tensor_inside_hidden_s",
        "tensor_between_exposed_s",
        "tensor_between_hidden_s",
        "context_inside_exposed_s",
        "context_inside_hidden_s",
        "context_between_exposed_s",
        "context_between_hidden_s",
        "expert_inside_exposed_s",
        "expert_inside_hidden_s",
        "expert_between_exposed_s",
        "expert_between_hidden_s",
        "pipeline_inside_exposed_s",
        "pipeline_inside_hidden_s",
        "pipeline_between_exposed_s",
        "pipeline_between_hidden_s",
        "data_inside_exposed_s",
        "data_inside_hidden_s",
        "data_between_exposed_s",
        "data_between_hidden_s",
        "bubble_s",
        "offload_exposed_s",
        "offload_hidden_s",
        "straggle_s",
        "weights_bytes",
        "gradients_bytes",
        "optimizer_bytes",
        "activations_bytes",
        "used_bytes",
        "capacity_bytes",
        "far_bytes",
        "far_capacity_bytes",
    ];

    /// The figures, in the order of [`Step::COLUMNS`].
    #[must_use]
    pub fn columns(&self) -> [f64; Self::COLUMNS.len()] {
        let Self { compute, communication, offload, memory, .. } = self;
        let Communication { tensor, context, expert, pipeline, data } = communication;
        let mut columns = [0.0; Self::COLUMNS.len()];
        let sent = [tensor, context, expert, pipeline, data].into_iter().flat_map(|kind| {
            [kind.inside.exposed_s, kind.inside.hidden_s, kind.between.exposed_s, kind.between.hidden_s]
        });
        let first =
            [self.total_s, compute.forward_s, compute.backward_s, compute.recompute_s, compute.optimizer_s];
        let last = [
            self.bubble_s,
            offload.exposed_s,
            offload.hidden_s,
            self.straggle_s,
            memory.weights_bytes,
            memory.gradients_bytes,
            memory.optimizer_bytes,
            memory.activations_bytes,
            memory.used_bytes,
            memory.capacity_bytes,
            memory.far_bytes,
            memory.far_capacity_bytes,
        ];
        for (column, figure) in columns.iter_mut().zip(first.into_iter().chain(sent).chain(last)) {
            *column = figure;
        }
        columns
    }
}

impl Memory {
    /// Whether it fits where it lies.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.used_bytes <= self.capacity_bytes && self.far_bytes <= self.far_capacity_bytes
    }
}

impl Scoped {
    fn new(traffic: &Traffic, times: f64) -> Self {
        let shown = |scope: usize| Shown {
            exposed_s: times * traffic.exposed[scope],
            hidden_s: times * traffic.hidden[scope],
        };
        Self { inside: shown(0), between: shown(1) }
    }

    /// Seconds of which `hidden` run beside computation, those inside a rack first.
    fn split(seconds: Scopes, hidden: f64) -> Self {
        let near = hidden.min(seconds[0]);
        let far = (hidden - near).min(seconds[1]);
        let shown = |seconds: f64, hidden: f64| Shown { exposed_s: seconds - hidden, hidden_s: hidden };
        Self { inside: shown(seconds[0], near), between: shown(seconds[1], far) }
    }

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

impl Compute {
    /// All of it.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        self.forward_s + self.backward_s + self.recompute_s + self.optimizer_s
    }
}

/// Bytes a parameter that the optimizer keeps: a copy in 32 bits and two moments.
const STATES: f64 = 12.0;

/// Predicts a step of a layout that `model` can be cut into, on a machine that has what it asks for.
pub(crate) fn step(machine: &Machine, model: &Model, block: &Block, layout: &Layout) -> Step {
    let stages = Stages::new(machine, model, block, layout);
    let copies = Copies::new(machine, layout, &stages);
    finish(machine, block, layout, &stages, &copies)
}

/// The block of a layout.
pub(crate) fn block(machine: &Machine, model: &Model, layout: &Layout) -> Block {
    Block::new(machine, model, &Key::of(layout))
}

/// What layouts share that have the same block, stages and copies.
pub(crate) struct Stages {
    /// Micro-batches.
    count: f64,
    /// Blocks of the slowest stage, which sets the pace, and of the first, which keeps the most.
    layers: f64,
    first: f64,
    /// Bytes that the first stage keeps besides its blocks', for each micro-batch.
    first_kept: f64,
    /// Seconds of the slowest stage's passes, one micro-batch.
    forward: f64,
    backward: f64,
    bubble: f64,
    /// Seconds between stages: all of them, and those that can run beside computation.
    sent: Scopes,
    steady: f64,
    /// Parameters on an accelerator of the heaviest stage: what copies have whole, and what experts spread.
    dense: f64,
    spread: f64,
    /// Micro-batches under way in the first stage.
    under_way: f64,
    straggle: f64,
}

impl Stages {
    pub(crate) fn new(machine: &Machine, model: &Model, block: &Block, layout: &Layout) -> Self {
        let count = f64::from(layout.micro_batches());
        let (pp, parts) = (f64::from(layout.pp), f64::from(layout.interleave));
        let Some([first, middle, last]) = layout.stages_of(model) else {
            unreachable!("the layout was checked")
        };
        let single = layout.pp == 1;
        let ends = Edge {
            forward: block.first.forward + block.last.forward,
            backward: block.first.backward + block.last.backward,
            kept: block.first.kept + block.last.kept,
        };
        let stages = match single {
            true => [(first, ends); 3],
            false => [(first, block.first), (middle, Edge::default()), (last, block.last)],
        };
        let held_up = |traffic: &Traffic| traffic.exposed[0] + traffic.exposed[1];
        let sending = held_up(&block.tensor) + held_up(&block.context) + held_up(&block.expert);
        let each = block.forward + block.backward + block.again + sending;
        let works = stages.map(|(layers, edge)| layers * each + edge.forward + edge.backward);
        let slow =
            if works[2] >= works[0] && works[2] >= works[1] { 2 } else { usize::from(works[1] > works[0]) };
        let (layers, edge) = stages[slow];
        let mean = match single {
            true => works[0],
            false => (works[0] + works[2] + (pp - 2.0) * works[1]) / pp,
        };
        // Each part of each stage hands on once forward and once backward.
        let one = match single {
            true => [0.0; 2],
            false => machine.send(layout.tp * layout.cp * layout.dp, block.handed),
        };
        let steady = 2.0 * count * parts;
        // The embedding counts to each end.
        let tables = if single && !model.tied { 2.0 } else { 1.0 };
        let tp = f64::from(layout.tp);
        let most = first.max(middle);
        Self {
            count,
            layers,
            first,
            first_kept: stages[0].1.kept,
            forward: layers * block.forward + edge.forward,
            backward: layers * block.backward + edge.backward,
            bubble: (pp - 1.0) / parts * mean,
            sent: one.map(|seconds| (2.0 * (pp - 1.0) + steady) * seconds),
            steady: steady * (one[0] + one[1]),
            dense: (most * model.dense_parameters() + tables * model.embedding_parameters()) / tp,
            spread: most * model.spread_parameters() / (tp * f64::from(layout.ep)),
            // As many as stages, and a part more with interleaving (Korthikanti et al., 2022, section 4.2.3).
            under_way: count.min(pp + if layout.interleave > 1 { (pp - 1.0) / parts } else { 0.0 }),
            straggle: machine.straggle * f64::from(layout.accelerators()).log2(),
        }
    }

    fn parameters(&self) -> f64 {
        self.dense + self.spread
    }
}

/// What layouts share whose copies of the model share the same.
pub(crate) struct Copies {
    /// Seconds of gradients and weights among copies, and what they can run beside.
    seconds: Scopes,
    beside: f64,
    optimizer: f64,
    weights: f64,
    gradients: f64,
    states: f64,
}

impl Copies {
    pub(crate) fn new(machine: &Machine, layout: &Layout, stages: &Stages) -> Self {
        let members = layout.dp * layout.cp;
        let width = if layout.wide_gradients { 4.0 } else { 2.0 };
        let shards = if layout.zero >= Zero::Optimizer { f64::from(members) } else { 1.0 };
        let share = |from: Zero| if layout.zero >= from { shards } else { 1.0 };
        let parameters = stages.parameters();
        let mut seconds = [0.0; 2];
        if members > 1 {
            let mut add = |span, parameters: f64| {
                let one = Self::exchange(machine, layout, span, width, parameters, stages.count);
                seconds = [seconds[0] + one[0], seconds[1] + one[1]];
            };
            add(machine.span(layout.tp, members), stages.dense);
            if stages.spread > 0.0 && members > layout.ep {
                add(machine.span(layout.tp * layout.cp * layout.ep, members / layout.ep), stages.spread);
            }
        }
        // All but one block's, beside the passes of one micro-batch; with interleaving of as many as there are stages, for
        // they go through one part after the other; with shared weights of all.
        let passes = match layout.zero {
            Zero::Weights => stages.count,
            _ if layout.interleave > 1 => f64::from(layout.pp),
            _ => 1.0,
        };
        let forward = if layout.zero == Zero::None { 0.0 } else { stages.forward };
        let part = 1.0 - 1.0 / stages.layers;
        let beside = (passes * (forward + stages.backward)).min(seconds[0] + seconds[1]) * part;
        Self {
            seconds,
            beside,
            // Read the gradient and, for its norm, once more; read and write the states; write the weight.
            optimizer: machine.moved(parameters / shards * (2.0 * width + 2.0 * STATES + 2.0)),
            weights: 2.0 * parameters / share(Zero::Weights),
            gradients: width * parameters / share(Zero::Gradients),
            states: STATES * parameters / shards,
        }
    }

    /// Gradients and weights of so many parameters, once a step or, shared, for each pass of each micro-batch.
    fn exchange(
        machine: &Machine,
        layout: &Layout,
        span: Span,
        width: f64,
        parameters: f64,
        count: f64,
    ) -> Scopes {
        let (scatters, gathers) = match layout.zero {
            Zero::None => return machine.all_reduce(span, width * parameters),
            Zero::Weights => (count, 2.0 * count),
            _ => (1.0, 1.0),
        };
        let scatter = machine.half(span, width * parameters);
        let gather = machine.half(span, 2.0 * parameters);
        [0, 1].map(|scope| scatters * scatter[scope] + gathers * gather[scope])
    }
}

/// What is left once the stages and the copies are known: what runs beside what, and what lies where.
#[inline(always)]
pub(crate) fn finish(
    machine: &Machine,
    block: &Block,
    layout: &Layout,
    stages: &Stages,
    copies: &Copies,
) -> Step {
    let count = stages.count;
    let times = count * stages.layers;
    let compute = Compute {
        forward_s: count * stages.forward,
        backward_s: count * stages.backward,
        recompute_s: times * block.again,
        optimizer_s: copies.optimizer,
    };
    let communication = Communication {
        tensor: Scoped::new(&block.tensor, times),
        context: Scoped::new(&block.context, times),
        expert: Scoped::new(&block.expert, times),
        pipeline: Scoped::split(stages.sent, if layout.overlap.pipeline { stages.steady } else { 0.0 }),
        data: Scoped::split(copies.seconds, if layout.overlap.data { copies.beside } else { 0.0 }),
    };
    let offload = offload(machine, block, layout, stages, copies);
    let busy = compute.total_s() + communication.exposed_s() + stages.bubble + offload.exposed_s;
    let straggle_s = stages.straggle * busy;
    Step {
        total_s: busy + straggle_s,
        compute,
        communication,
        bubble_s: stages.bubble,
        offload,
        straggle_s,
        memory: memory(machine, block, layout, stages, copies),
    }
}

/// To and from another tier: weights for each pass of each micro-batch, states once, activations there and back.
#[inline(always)]
fn offload(machine: &Machine, block: &Block, layout: &Layout, stages: &Stages, copies: &Copies) -> Shown {
    let offload = layout.offload;
    let Some(far) = machine.far[offload.tier as usize] else { return Shown::default() };
    let passes = 2.0 * stages.count;
    let weights = if offload.weights { passes * copies.weights / far.read } else { 0.0 };
    // Both ways at a time.
    let states = if offload.optimizer { copies.states / far.read.min(far.write) } else { 0.0 };
    let kept = stages.layers * block.kept * stages.count;
    let activations = if offload.activations { kept / far.read + kept / far.write } else { 0.0 };
    let total = weights + states + activations;
    let hidden = if layout.overlap.offload {
        let busy = stages.count * (stages.forward + stages.backward);
        (weights + activations).min(busy) + states.min(stages.backward)
    } else {
        0.0
    };
    Shown { exposed_s: total - hidden, hidden_s: hidden }
}

/// Bytes of the first stage, which keeps the activations of the most micro-batches.
#[inline(always)]
fn memory(machine: &Machine, block: &Block, layout: &Layout, stages: &Stages, copies: &Copies) -> Memory {
    let offload = layout.offload;
    let kept = stages.under_way * stages.first * block.kept;
    let passing = block.passing + stages.first_kept;
    // Of what lies elsewhere, two blocks are here: one in use, one on its way.
    let here = (2.0 / stages.first).min(1.0);
    let near = |bytes: f64, is_far: bool| if is_far { bytes * here } else { bytes };
    let far = |bytes: f64, is_far: bool| if is_far { bytes } else { 0.0 };
    let weights = near(copies.weights, offload.weights);
    let states = near(copies.states, offload.optimizer);
    let activations = near(kept, offload.activations) + passing;
    Memory {
        weights_bytes: weights,
        gradients_bytes: copies.gradients,
        optimizer_bytes: states,
        activations_bytes: activations,
        used_bytes: weights + copies.gradients + states + activations,
        capacity_bytes: machine.capacity,
        far_bytes: far(copies.weights, offload.weights)
            + far(copies.states, offload.optimizer)
            + far(kept, offload.activations),
        far_capacity_bytes: machine.far[offload.tier as usize].map_or(0.0, |tier| tier.capacity),
    }
}
