//! A training step in closed form.
//!
//! What layouts share is computed once: a [`Block`] for all that agree in how a block is cut. What is left is a few dozen
//! operations a layout, so that a search and a single prediction are one code.

use serde::Serialize;

use crate::block::{Block, Edge, Traffic};
use crate::layout::{Deal, FarTier, Layout, Precision, Zero, is_even};
use crate::machine::{Machine, Scopes, Span};
use crate::model::Model;
use crate::order::{CP, DP, EP, PP};

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
    /// Weights in the other tier.
    pub far_weights_bytes: f64,
    /// Optimizer states there.
    pub far_optimizer_bytes: f64,
    /// Activations there.
    pub far_activations_bytes: f64,
    /// What lies there, all of it.
    pub far_bytes: f64,
    /// What an accelerator's share of that has.
    pub far_capacity_bytes: f64,
}

impl Step {
    /// The names of its figures, flat, for tables of many steps.
    pub const COLUMNS: [&str; 40] = [
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
        "far_weights_bytes",
        "far_optimizer_bytes",
        "far_activations_bytes",
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
            memory.far_weights_bytes,
            memory.far_optimizer_bytes,
            memory.far_activations_bytes,
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

    /// Seconds of which up to `hidden` run beside computation, those inside a rack first, as far as there is room.
    #[inline(always)]
    fn split(seconds: Scopes, hidden: f64, [inside, between]: &mut [Room; 2]) -> Self {
        let near = inside.take(hidden.min(seconds[0]));
        let far = between.take((hidden - near).min(seconds[1]));
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

/// Predicts a step of a layout that `model` can be cut into, on a machine that has what it asks for.
pub(crate) fn step(machine: &Machine, model: &Model, block: &Block, layout: &Layout) -> Step {
    let stages = Stages::new(machine, model, block, layout);
    let copies = Copies::new(machine, block, layout, &stages);
    finish(machine, block, layout, &stages, &copies, memory(machine, layout, &copies))
}

/// What layouts share that have the same block, stages and copies.
pub(crate) struct Stages {
    /// Micro-batches.
    count: f64,
    /// Blocks of the slowest stage, which sets the pace.
    layers: f64,
    /// Seconds of the slowest stage's passes, one micro-batch.
    forward: f64,
    backward: f64,
    bubble: f64,
    /// Tokens to experts and back, all micro-batches together.
    expert: Scoped,
    /// Seconds between stages: all of them, and those that can run beside computation.
    sent: Scopes,
    steady: f64,
    straggle: f64,
    /// Parameters of a block on an accelerator.
    block: Parameters,
    /// The first, the second and the last stage.
    kinds: [Kind; 3],
    /// Those that have the same weights, and those that have the same experts: ranks that share sequences, in each group
    /// that shares all experts.
    copies: Span,
    expert_copies: Span,
}

/// Parameters on an accelerator: what all copies of the model have, and what experts spread among copies.
#[derive(Clone, Copy, Default)]
struct Parameters {
    dense: f64,
    spread: f64,
}

impl Parameters {
    const fn all(self) -> f64 {
        self.dense + self.spread
    }

    /// On each of so many that share the first, and so many that share the second.
    const fn shared(self, [dense, spread]: [f64; 2]) -> f64 {
        self.dense / dense + self.spread / spread
    }
}

/// A stage, for what it keeps.
#[derive(Clone, Copy)]
struct Kind {
    layers: f64,
    parameters: Parameters,
    /// Micro-batches under way, in whole stages.
    under_way: f64,
    /// Bytes kept besides the blocks'.
    edge: f64,
}

impl Stages {
    pub(crate) fn new(machine: &Machine, model: &Model, block: &Block, layout: &Layout) -> Self {
        let count = f64::from(layout.micro_batches());
        let (pp, parts) = (f64::from(layout.pp), f64::from(layout.interleave));
        let cut = Cut::new(layout, model, block);
        let (layers, edge) = (cut.layers[cut.slow], cut.edges[cut.slow]);
        // What runs beside another micro-batch's passes does not while the stages fill and empty, nor where the last one, which
        // waits the longest for a backward pass, has none yet.
        let hidden = block.expert.hidden;
        let alone = if layout.pairs_passes() { count.min(((parts - 1.0) * pp + 1.0) / parts) } else { 0.0 };
        let filling = f64::from(model.layers) / pp * (hidden[0] + hidden[1]);
        let times = count * layers;
        let expert = [0, 1].map(|scope| Shown {
            exposed_s: times * block.expert.exposed[scope] + alone * layers * hidden[scope],
            hidden_s: (count - alone) * layers * hidden[scope],
        });
        // Each part of each stage hands on once forward and once backward.
        let one = match layout.pp {
            1 => [0.0; 2],
            _ => machine.send(machine.span(&layout.ranks(), &[PP]), block.handed),
        };
        let steady = 2.0 * count * parts;
        let tp = f64::from(layout.tp);
        let of_block = Parameters {
            dense: model.dense_parameters() / tp,
            spread: model.spread_parameters() / (tp * f64::from(layout.ep)),
        };
        let table = model.embedding_parameters() / tp;
        let tables = match (layout.pp, model.tied) {
            (1, true) => [1.0; 3],
            (1, false) => [2.0; 3],
            (_, _) => [1.0, 0.0, 1.0],
        };
        // The last stage has its logits of one micro-batch; the first what is kept of the embedding, of all under way.
        let kind = |index: usize, stage: f64| {
            let (layers, edge) = (cut.layers[index], cut.edges[index]);
            let under_way = under_way(layout, count, stage);
            let edge = if index == 2 || layout.pp == 1 { edge.kept } else { edge.kept * under_way };
            let dense = layers * of_block.dense + tables[index] * table;
            Kind {
                layers,
                parameters: Parameters { dense, spread: layers * of_block.spread },
                under_way,
                edge,
            }
        };
        Self {
            count,
            layers,
            forward: layers * block.forward + edge.forward,
            backward: layers * block.backward + edge.backward,
            bubble: (pp - 1.0) / parts * (cut.mean + filling),
            expert: Scoped { inside: expert[0], between: expert[1] },
            sent: one.map(|seconds| (2.0 * (pp - 1.0) + steady) * seconds),
            steady: steady * (one[0] + one[1]),
            straggle: machine.straggle * f64::from(layout.accelerators()).log2(),
            block: of_block,
            kinds: [
                kind(0, 0.0),
                kind(if layout.pp > 2 { 1 } else { 2 }, (pp - 1.0).min(1.0)),
                kind(2, pp - 1.0),
            ],
            copies: machine.span(&layout.ranks(), &[CP, EP, DP]),
            expert_copies: machine.span(&layout.ranks(), &[CP, DP]),
        }
    }

    /// Of the stage that has the most.
    fn parameters(&self) -> Parameters {
        let [first, second, last] = self.kinds.map(|kind| kind.parameters);
        let heavier = |a: Parameters, b: Parameters| if b.all() > a.all() { b } else { a };
        heavier(heavier(first, second), last)
    }
}

/// How blocks are dealt out to the stages, so that the slowest is as fast as can be.
struct Cut {
    deal: Deal,
    /// Seconds of a block, both passes of a micro-batch, with what holds them up.
    each: f64,
    /// Blocks of the first stage, of the middle one that has the most, and of the last; and what they have besides.
    layers: [f64; 3],
    edges: [Edge; 3],
    /// Seconds of these for a micro-batch, which of them is the slowest, and what a stage takes on average.
    works: [f64; 3],
    slow: usize,
    mean: f64,
}

impl Cut {
    fn new(layout: &Layout, model: &Model, block: &Block) -> Self {
        let mut cuts = layout.deals(model).map(|deal| Self::of(deal, layout.pp, block));
        let Some(first) = cuts.next() else { unreachable!("blocks can be dealt out") };
        cuts.fold(first, |best, cut| if cut.works[cut.slow] < best.works[best.slow] { cut } else { best })
    }

    fn of(deal: Deal, pp: u32, block: &Block) -> Self {
        let ends = Edge {
            forward: block.first.forward + block.last.forward,
            backward: block.first.backward + block.last.backward,
            kept: block.first.kept + block.last.kept,
        };
        let edges = match pp {
            1 => [ends; 3],
            _ => [block.first, Edge::default(), block.last],
        };
        let held_up = |traffic: &Traffic| traffic.exposed[0] + traffic.exposed[1];
        let sending = held_up(&block.tensor) + held_up(&block.context) + held_up(&block.expert);
        let each = block.forward + block.backward + block.again + sending;
        let layers = [deal.first, deal.most_of_middle(pp), deal.last].map(f64::from);
        let works = [0, 1, 2].map(|index| work(layers[index], each, edges[index]));
        let slow =
            if works[2] >= works[0] && works[2] >= works[1] { 2 } else { usize::from(works[1] > works[0]) };
        let (more, fewer) = (f64::from(deal.more), f64::from(pp) - 2.0 - f64::from(deal.more));
        let middle = more * works[1] + fewer * work(deal.middle.into(), each, edges[1]);
        let mean = if pp == 1 { works[0] } else { (works[0] + works[2] + middle) / f64::from(pp) };
        Self { deal, each, layers, edges, works, slow, mean }
    }
}

/// Seconds of a stage of so many blocks for a micro-batch.
fn work(layers: f64, each: f64, edge: Edge) -> f64 {
    layers * each + edge.forward + edge.backward
}

/// A stage of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// Its blocks.
    pub blocks: u32,
    /// Seconds of its passes as a part of those of the slowest stage; 1 where all stages come out alike, embedding and head
    /// counted as a layer each.
    pub pace: f64,
}

/// The stages of a layout, the first one first.
pub(crate) fn stages(model: &Model, block: &Block, layout: &Layout) -> Vec<Stage> {
    let cut = Cut::new(layout, model, block);
    let is_even = is_even(model, layout.pp, layout.interleave);
    let stage = |(stage, blocks): (u32, u32)| {
        let edge = match stage {
            0 => cut.edges[0],
            _ if stage == layout.pp - 1 => cut.edges[2],
            _ => cut.edges[1],
        };
        let pace = if is_even { 1.0 } else { work(blocks.into(), cut.each, edge) / cut.works[cut.slow] };
        Stage { blocks, pace }
    };
    (0..).zip(cut.deal.blocks(layout.pp)).map(stage).collect()
}

/// Micro-batches that a stage keeps at once, in whole stages: one less from stage to stage, and with interleaving two
/// parts less (Narayanan et al., SC21, section 2.2; Korthikanti et al., 2022, section 4.2.3, for the first). Where the passes of
/// two run beside each other, two less without interleaving too, and one part more (Megatron-Core, combined passes).
fn under_way(layout: &Layout, count: f64, stage: f64) -> f64 {
    let (pp, parts) = (f64::from(layout.pp), f64::from(layout.interleave));
    let parts_kept = match (layout.interleave, layout.pairs_passes()) {
        (1, false) => pp - stage,
        (_, more) => (parts - 1.0) * pp + 2.0 * (pp - 1.0 - stage) + if more { 2.0 } else { 1.0 },
    };
    count.min(parts_kept / parts)
}

/// What layouts share whose copies of the model share the same.
pub(crate) struct Copies {
    /// Seconds of gradients and weights among copies, and what they can run beside.
    seconds: Scopes,
    beside: f64,
    optimizer: f64,
    /// Of the stage that has the most, for what is fetched from and written to another tier.
    weights: f64,
    states: f64,
    /// Of the first, the second and the last stage.
    held: [Held; 3],
}

/// Bytes of a stage.
#[derive(Clone, Copy)]
struct Held {
    weights: f64,
    gradients: f64,
    states: f64,
    kept: f64,
    passing: f64,
    /// The part of what lies elsewhere that is here: two blocks, one in use, one on its way.
    here: f64,
}

impl Copies {
    pub(crate) fn new(machine: &Machine, block: &Block, layout: &Layout, stages: &Stages) -> Self {
        let members = layout.dp * layout.cp;
        let (value, states) = (layout.precision.bytes(), layout.precision.states());
        let width = if layout.wide_gradients { 4.0 } else { value };
        // Each expert has as many copies as there are groups that share all of them.
        let copies = [f64::from(members), f64::from(members / layout.ep)];
        let share = |from: Zero| if layout.zero >= from { copies } else { [1.0; 2] };
        let parameters = stages.parameters();
        let mut seconds = [0.0; 2];
        let mut add = |span: Span, parameters: f64| {
            let one = Self::exchange(machine, layout, span, width, parameters, stages.count);
            seconds = [seconds[0] + one[0], seconds[1] + one[1]];
        };
        if members > 1 {
            add(stages.copies, parameters.dense);
        }
        if parameters.spread > 0.0 && members > layout.ep {
            add(stages.expert_copies, parameters.spread);
        }
        // All but one block's, beside the passes of one micro-batch; with interleaving of as many as there are stages, for
        // they go through one part after the other; with shared gradients or weights of all.
        let passes = match layout.zero {
            Zero::Gradients | Zero::Weights => stages.count,
            _ if layout.interleave > 1 => f64::from(layout.pp),
            _ => 1.0,
        };
        let forward = if layout.zero == Zero::None { 0.0 } else { stages.forward };
        let part = 1.0 - 1.0 / stages.layers.max(1.0);
        let beside = (passes * (forward + stages.backward)).min(seconds[0] + seconds[1]) * part;
        // What is shared is whole for a block at a time.
        let whole =
            |from: Zero, bytes: f64| if layout.zero >= from { bytes * stages.block.all() } else { 0.0 };
        let held = stages.kinds.map(|kind| Held {
            weights: value * kind.parameters.shared(share(Zero::Weights)) + whole(Zero::Weights, 2.0 * value),
            gradients: width * kind.parameters.shared(share(Zero::Gradients)) + whole(Zero::Gradients, width),
            states: states * kind.parameters.shared(share(Zero::Optimizer)),
            kept: kind.under_way * kind.layers * block.kept,
            passing: block.passing + kind.edge,
            here: (2.0 / kind.layers.max(1.0)).min(1.0),
        });
        let own = parameters.shared(share(Zero::Optimizer));
        let updated = if layout.precision == Precision::Fp32 { 2.0 * value } else { value };
        Self {
            seconds,
            beside,
            // Read the gradient and, for its norm, once more; read and write the states; write the weight, which where there is
            // no copy of it was read too.
            optimizer: machine.moved(own * (2.0 * width + 2.0 * states + updated)),
            weights: value * parameters.shared(share(Zero::Weights)),
            states: states * own,
            held,
        }
    }

    /// Gradients and weights of so many parameters: once a step, or what is shared of them for each pass of each micro-batch.
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
            Zero::Optimizer => (1.0, 1.0),
            Zero::Gradients => (count, 1.0),
            Zero::Weights => (count, 2.0 * count),
        };
        let scatter = machine.half(span, width * parameters);
        let gather = machine.half(span, layout.precision.bytes() * parameters);
        [0, 1].map(|scope| scatters * scatter[scope] + gathers * gather[scope])
    }
}

/// Seconds of computation that a link is still idle in. Links of a rack and links between racks can both be busy beside the
/// same computation; nothing runs where something else runs already.
struct Room(f64);

impl Room {
    /// Takes up to so many seconds.
    #[inline(always)]
    fn take(&mut self, seconds: f64) -> f64 {
        let taken = seconds.min(self.0).max(0.0);
        self.0 -= taken;
        taken
    }
}

/// What is left once the stages, the copies and the memory are known: what runs beside what.
#[inline(always)]
pub(crate) fn finish(
    machine: &Machine,
    block: &Block,
    layout: &Layout,
    stages: &Stages,
    copies: &Copies,
    memory: Memory,
) -> Step {
    let count = stages.count;
    let times = count * stages.layers;
    let compute = Compute {
        forward_s: count * stages.forward,
        backward_s: count * stages.backward,
        recompute_s: times * block.again,
        optimizer_s: copies.optimizer,
    };
    let seconds = compute.forward_s + compute.backward_s + compute.recompute_s;
    let mut rooms = [0, 1].map(|scope| {
        let taken = times * (block.tensor.hidden[scope] + block.context.hidden[scope]);
        let expert = [stages.expert.inside, stages.expert.between][scope].hidden_s;
        Room((seconds - taken - expert).max(0.0))
    });
    let overlap = layout.overlap;
    let pipeline = if overlap.pipeline { stages.steady } else { 0.0 };
    let data = if overlap.data { copies.beside } else { 0.0 };
    let communication = Communication {
        tensor: Scoped::new(&block.tensor, times),
        context: Scoped::new(&block.context, times),
        expert: stages.expert,
        pipeline: Scoped::split(stages.sent, pipeline, &mut rooms),
        data: Scoped::split(copies.seconds, data, &mut rooms),
    };
    // The host has a link of its own; the pool hangs on those between the racks.
    let [_, between] = rooms;
    let room = if layout.offload.tier == FarTier::Pool { between } else { Room(seconds) };
    let offload = offload(machine, block, layout, stages, copies, room);
    let busy = compute.total_s() + communication.exposed_s() + stages.bubble + offload.exposed_s;
    let straggle_s = stages.straggle * busy;
    Step {
        total_s: busy + straggle_s,
        compute,
        communication,
        bubble_s: stages.bubble,
        offload,
        straggle_s,
        memory,
    }
}

/// To and from another tier: weights for each pass of each micro-batch, states once, activations there and back.
#[inline(always)]
fn offload(
    machine: &Machine,
    block: &Block,
    layout: &Layout,
    stages: &Stages,
    copies: &Copies,
    mut room: Room,
) -> Shown {
    let offload = layout.offload;
    let Some(far) = machine.far(offload.tier) else { return Shown::default() };
    let passes = 2.0 * stages.count;
    // A block at a time.
    let late = passes * stages.layers * far.latency;
    let weights = if offload.weights { passes * copies.weights / far.read + late } else { 0.0 };
    // Both ways at a time.
    let states = if offload.optimizer { copies.states / far.both + stages.layers * far.latency } else { 0.0 };
    let kept = stages.layers * block.kept * stages.count;
    let activations = if offload.activations { kept / far.read + kept / far.write + late } else { 0.0 };
    let total = weights + states + activations;
    // States can go beside one micro-batch's backward pass at most: the last gradient comes with its end.
    let hidden = match layout.overlap.offload {
        true => room.take(weights + activations) + room.take(states.min(stages.backward)),
        false => 0.0,
    };
    Shown { exposed_s: total - hidden, hidden_s: hidden }
}

/// Bytes of the stage that has the most here.
pub(crate) fn memory(machine: &Machine, layout: &Layout, copies: &Copies) -> Memory {
    let offload = layout.offload;
    let mut fullest = Memory::default();
    let far_capacity_bytes = machine.far(offload.tier).map_or(0.0, |tier| tier.capacity);
    let mut farthest = Elsewhere::default();
    for held in &copies.held {
        let near = |bytes: f64, is_far: bool| if is_far { bytes * held.here } else { bytes };
        let far = |bytes: f64, is_far: bool| if is_far { bytes } else { 0.0 };
        let weights = near(held.weights, offload.weights);
        let states = near(held.states, offload.optimizer);
        let activations = near(held.kept, offload.activations) + held.passing;
        let used = weights + held.gradients + states + activations;
        let there = Elsewhere {
            weights: far(held.weights, offload.weights),
            states: far(held.states, offload.optimizer),
            kept: far(held.kept, offload.activations),
        };
        if there.all() > farthest.all() {
            farthest = there;
        }
        if used > fullest.used_bytes {
            fullest = Memory {
                weights_bytes: weights,
                gradients_bytes: held.gradients,
                optimizer_bytes: states,
                activations_bytes: activations,
                used_bytes: used,
                ..fullest
            };
        }
    }
    Memory {
        capacity_bytes: machine.capacity,
        far_weights_bytes: farthest.weights,
        far_optimizer_bytes: farthest.states,
        far_activations_bytes: farthest.kept,
        far_bytes: farthest.all(),
        far_capacity_bytes,
        ..fullest
    }
}

/// Bytes of a stage in another tier.
#[derive(Clone, Copy, Default)]
struct Elsewhere {
    weights: f64,
    states: f64,
    kept: f64,
}

impl Elsewhere {
    const fn all(self) -> f64 {
        self.weights + self.states + self.kept
    }
}
