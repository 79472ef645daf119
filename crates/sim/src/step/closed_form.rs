//! A training step in closed form.
//!
//! What layouts share is computed once: a [`Block`] for all that agree in how a block is cut. What is left is a few dozen
//! operations a layout, so that a search and a single prediction are one code.

use polder_platform::TierId;

use super::figures::{Communication, ComputeTimes, Exposure, MemoryUse, Scoped, Stage, Step, TierUse};
use crate::step::block::{Block, CAST, Edge, Traffic};
use crate::step::cost::{CommunicationCosts, GroupSpan, Pattern, Scope, Scopes};
use crate::step::layout::{BlockSplit, Layout, Precision, Zero};
use crate::step::machine::Machine;
use crate::step::model::Model;
use crate::step::order::{CP, DP, EP, PP};

impl Scoped {
    fn new(traffic: &Traffic, times: f64) -> Self {
        let shown = |scope: Scope| Exposure {
            exposed_s: times * traffic.exposed[scope],
            hidden_s: times * traffic.hidden[scope],
        };
        Self { inside: shown(Scope::Inside), between: shown(Scope::Between) }
    }
}

/// Predicts a step of a layout that `model` can be cut into, on a machine that has what it asks for.
pub(crate) fn step(machine: &Machine, model: &Model, block: &Block, layout: &Layout) -> Step {
    let stages = Stages::new(machine, model, block, layout);
    let copies = Copies::new(machine, layout, &stages);
    let parts = Parts::new(block, layout, &stages);
    Shared { machine, stages: &stages, copies: &copies, parts: &parts }.step(layout)
}

/// All that layouts share. What is left for each is what lies where, and what runs beside what.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) stages: &'a Stages,
    pub(crate) copies: &'a Copies,
    pub(crate) parts: &'a Parts,
}

/// What layouts share that have the same block, and as many stages and copies.
pub(crate) struct Stages {
    /// Micro-batches.
    count: f64,
    pp: f64,
    cut: Cut,
    /// Blocks of the slowest stage, which sets the pace, and of the stage that has the most.
    layers: f64,
    most_layers: f64,
    /// Seconds of the slowest stage's passes, one micro-batch.
    forward: f64,
    backward: f64,
    /// Bytes that the stage of the most blocks keeps of them, all micro-batches together.
    kept: f64,
    /// Seconds of a stage that run beside another micro-batch's passes, but not while the stages fill and empty.
    filling: f64,
    /// Seconds from a stage to the next.
    handed: Scopes,
    straggle: f64,
    /// Parameters of a block on an accelerator.
    block: f64,
    /// Of the first, the second and the last stage, and of the one that has the most.
    parameters: [Parameters; 3],
    most: Parameters,
    /// Of the optimizer states that these have elsewhere the part that is here: two blocks, one in use, one on its way.
    here: [f64; 3],
    /// Those that have the same weights, and those that have the same experts: ranks that share sequences, in each group
    /// that shares all experts.
    groups: [Option<Group>; 2],
}

/// Ranks that have copies of the same parameters.
struct Group {
    span: GroupSpan,
    parameters: f64,
    /// Seconds to gather them.
    gather: Scopes,
}

/// Parameters on an accelerator: what all copies of the model have, and what experts spread among copies.
#[derive(Clone, Copy)]
struct Parameters {
    dense: f64,
    spread: f64,
    /// Of the embedding or the head, which is in use as a whole.
    table: f64,
    /// All of them, and what is left where copies share them.
    all: f64,
    shared: f64,
}

impl Parameters {
    /// With so many that share the first, and so many that share the second.
    const fn new(dense: f64, spread: f64, table: f64, copies: [f64; 2]) -> Self {
        Self { dense, spread, table, all: dense + spread, shared: dense / copies[0] + spread / copies[1] }
    }

    /// What lies on each accelerator of what is shared from some stage of ZeRO on.
    const fn left(&self, is_shared: bool) -> f64 {
        if is_shared { self.shared } else { self.all }
    }
}

impl Stages {
    pub(crate) fn new(machine: &Machine, model: &Model, block: &Block, layout: &Layout) -> Self {
        let count = f64::from(layout.micro_batches());
        let pp = f64::from(layout.pp);
        let cut = Cut::new(layout, model, block);
        let (layers, edge) = (cut.layers[cut.slow], cut.edges[cut.slow]);
        let most_layers = cut.layers[0].max(cut.layers[1]).max(cut.layers[2]);
        let handed = match layout.pp {
            1 => Scopes::default(),
            _ => machine.alone(Pattern::Send, machine.span(&layout.ranks(), &[PP]), block.handed),
        };
        let tp = f64::from(layout.tp);
        let dense = model.dense_parameters() / tp;
        let spread = model.spread_parameters() / (tp * f64::from(layout.ep));
        let table = model.embedding_parameters() / tp;
        let tables = match (layout.pp, model.tied) {
            (1, true) => [1.0; 3],
            (1, false) => [2.0; 3],
            (_, _) => [1.0, 0.0, 1.0],
        };
        // Every rank of the first stage has all rows of learned positions.
        let positions = model.position_parameters();
        let positions = if layout.pp == 1 { [positions; 3] } else { [positions, 0.0, 0.0] };
        let [copies, expert_copies] = layout.copies();
        let parameters = |(kind, _): (usize, u32)| {
            let layers = cut.layers[kind];
            Parameters::new(
                layers * dense + tables[kind] * table + positions[kind],
                layers * spread,
                tables[kind].min(1.0) * table,
                [copies, expert_copies].map(f64::from),
            )
        };
        let [first, second, last] = ends(layout.pp).map(parameters);
        let heavier = |a: Parameters, b: Parameters| if b.all > a.all { b } else { a };
        let most = heavier(heavier(first, second), last);
        let group = |kinds: &[usize], parameters: f64| {
            let span = machine.span(&layout.ranks(), kinds);
            let gather = machine.alone(Pattern::Half, span, layout.precision.bytes() * parameters);
            Group { span, parameters, gather }
        };
        Self {
            count,
            pp,
            layers,
            most_layers,
            forward: layers * block.forward + edge.forward,
            backward: layers * block.backward + edge.backward,
            kept: most_layers * block.kept * count,
            filling: f64::from(model.layers) / pp * (block.expert.hidden.sum() - block.expert.contention),
            handed,
            straggle: machine.straggle * f64::from(layout.accelerators()).log2(),
            block: dense + spread,
            parameters: [first, second, last],
            most,
            here: ends(layout.pp).map(|(kind, _)| (2.0 / cut.layers[kind].max(1.0)).min(1.0)),
            groups: [
                (copies > 1).then(|| group(&[CP, EP, DP], most.dense)),
                (expert_copies > 1 && most.spread > 0.0).then(|| group(&[CP, DP], most.spread)),
            ],
            cut,
        }
    }
}

/// How blocks are dealt out to the stages, so that the slowest is as fast as can be.
struct Cut {
    split: BlockSplit,
    /// Seconds of a block, both passes of a micro-batch, with what holds them up.
    each: f64,
    /// Blocks of the first stage, of the middle one that has the most, and of the last; and what they have besides.
    layers: [f64; 3],
    edges: [Edge; 3],
    /// Which of these is the slowest; seconds of it for a micro-batch, and what a stage takes on average.
    slow: usize,
    slowest: f64,
    mean: f64,
}

impl Cut {
    fn new(layout: &Layout, model: &Model, block: &Block) -> Self {
        let (first, other) = layout.splits(model);
        let best = Self::of(first, layout.pp, block);
        let other = other.map(|split| Self::of(split, layout.pp, block));
        other.filter(|other| other.slowest < best.slowest).unwrap_or(best)
    }

    fn of(split: BlockSplit, pp: u32, block: &Block) -> Self {
        let ends = Edge {
            forward: block.first.forward + block.last.forward,
            backward: block.first.backward + block.last.backward,
            kept: block.first.kept + block.last.kept,
        };
        let edges = match pp {
            1 => [ends; 3],
            _ => [block.first, Edge::default(), block.last],
        };
        let [tensor, context, expert] =
            [&block.tensor, &block.context, &block.expert].map(|it| it.exposed.sum());
        let sending = tensor + context + expert;
        let contention = block.context.contention + block.expert.contention;
        let each = block.forward + block.backward + block.again + contention + sending;
        let layers = [split.first, split.largest_middle_stage(pp), split.last].map(f64::from);
        let works = [0, 1, 2].map(|index| work(layers[index], each, edges[index]));
        let slow =
            if works[2] >= works[0] && works[2] >= works[1] { 2 } else { usize::from(works[1] > works[0]) };
        let (more, fewer) = (f64::from(split.more), f64::from(pp) - 2.0 - f64::from(split.more));
        let middle = more * works[1] + fewer * work(split.middle.into(), each, edges[1]);
        let mean = if pp == 1 { works[0] } else { (works[0] + works[2] + middle) / f64::from(pp) };
        Self { split, each, layers, edges, slow, slowest: works[slow], mean }
    }
}

/// The first, the second and the last of so many stages: where each of them is in a [`Cut`], and how many come before.
fn ends(pp: u32) -> [(usize, u32); 3] {
    [(0, 0), (if pp > 2 { 1 } else { 2 }, 1.min(pp - 1)), (2, pp - 1)]
}

/// Seconds of a stage of so many blocks for a micro-batch.
fn work(layers: f64, each: f64, edge: Edge) -> f64 {
    layers * each + edge.forward + edge.backward
}

/// The stages of a layout, the first one first.
pub(crate) fn stages(model: &Model, block: &Block, layout: &Layout) -> Vec<Stage> {
    let cut = Cut::new(layout, model, block);
    let stage = |(stage, blocks): (u32, u32)| {
        let edge = match stage {
            0 => cut.edges[0],
            _ if stage == layout.pp - 1 => cut.edges[2],
            _ => cut.edges[1],
        };
        Stage { blocks, pace: work(blocks.into(), cut.each, edge) / cut.slowest }
    };
    (0..).zip(cut.split.blocks(layout.pp)).map(stage).collect()
}

/// What layouts share whose copies of the model share the same, besides block and stages.
pub(crate) struct Copies {
    /// Seconds of gradients and weights among copies, and the part of them that can run beside the passes of so many
    /// micro-batches, with stages in one part, and in more, each of which computes for so long.
    seconds: Scopes,
    part: f64,
    /// The part of the processors that they take from computation beside them, and how many times as long it takes then.
    taken: Scopes,
    longer: Scopes,
    passes: [f64; 2],
    pass: f64,
    /// Seconds in which what is shared is copied out of the buffers that it comes in, and into those that it goes in: in forward passes,
    /// and in backward ones.
    copied: [f64; 2],
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
    /// Of weights that copies share what is whole at a time; and where they lie elsewhere what is here.
    whole: f64,
    in_use: f64,
    gradients: f64,
    states: f64,
}

impl Copies {
    pub(crate) fn new(machine: &Machine, layout: &Layout, stages: &Stages) -> Self {
        let (value, states) = (layout.precision.bytes(), layout.precision.states());
        let width = if layout.wide_gradients { 4.0 } else { value };
        let (mut seconds, mut taken) = (Scopes::default(), Scopes::default());
        // Experts come first: what all copies have spans as many racks or more.
        for group in stages.groups.iter().rev().flatten() {
            let one = group.exchange(machine, layout, width, stages.count);
            taken = machine.taken(group.span);
            seconds = Scopes::of(|scope| seconds[scope] + one[scope]);
        }
        // All but one block's, beside the passes of one micro-batch; with interleaving of as many as there are stages, for
        // they go through one part after the other; with shared gradients or weights of all.
        let passes = match layout.zero {
            Zero::Gradients | Zero::Weights => [stages.count; 2],
            _ => [1.0, stages.pp],
        };
        let forward = if layout.zero == Zero::None { 0.0 } else { stages.forward };
        let is_shared = |from: Zero| layout.zero >= from;
        // What is shared is whole for a block at a time, or for the embedding or the head; of weights the next block is on its way.
        let held = |parameters: &Parameters| {
            let whole = |from: Zero, bytes: f64| if is_shared(from) { bytes } else { 0.0 };
            let weights = value * parameters.left(is_shared(Zero::Weights));
            let in_use = value * (2.0 * stages.block).max(parameters.table);
            let gradients = width * stages.block.max(parameters.table);
            Held {
                weights,
                whole: whole(Zero::Weights, in_use),
                in_use: if is_shared(Zero::Weights) { in_use } else { in_use.min(weights) },
                gradients: width * parameters.left(is_shared(Zero::Gradients))
                    + whole(Zero::Gradients, gradients),
                states: states * parameters.left(is_shared(Zero::Optimizer)),
            }
        };
        let [first, second, last] = &stages.parameters;
        let own = stages.most.left(is_shared(Zero::Optimizer));
        // In 8 bits weights are cast once a step, all that the products of an accelerator take.
        let cast = match layout.precision {
            Precision::Fp8 => machine.moved(CAST * stages.most.all),
            Precision::Bf16 | Precision::Fp32 => 0.0,
        };
        let updated = if layout.precision == Precision::Fp32 { 2.0 * value } else { value };
        Self {
            seconds,
            part: 1.0 - 1.0 / stages.most_layers.max(1.0),
            taken,
            longer: taken.map(|taken| 1.0 / (1.0 - taken)),
            passes,
            pass: forward + stages.backward,
            copied: copied(machine, layout, stages, width),
            // Read the gradient and, for its norm, once more; read and write the states; write the weight, which where there is
            // no copy of it was read too.
            optimizer: machine.moved(own * (2.0 * width + 2.0 * states + updated)) + cast,
            weights: value * stages.most.left(is_shared(Zero::Weights)),
            states: states * own,
            held: [held(first), held(second), held(last)],
        }
    }
}

/// Weights that are gathered for each pass are copied out of one buffer into tensors, and gradients into one that is scattered, in each
/// micro-batch (pytorch/pytorch, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
fn copied(machine: &Machine, layout: &Layout, stages: &Stages, width: f64) -> [f64; 2] {
    let value = layout.precision.bytes();
    let seconds = |bytes: f64| stages.count * machine.moved(bytes * stages.most.all);
    match layout.zero {
        Zero::None | Zero::Optimizer => [0.0; 2],
        Zero::Gradients => [0.0, seconds(value + width)],
        Zero::Weights => [seconds(2.0 * value), seconds(2.0 * value + value + width)],
    }
}

impl Group {
    /// Gradients and weights: once a step, or what is shared of them for each pass of each micro-batch.
    fn exchange(&self, machine: &Machine, layout: &Layout, width: f64, count: f64) -> Scopes {
        let bytes = width * self.parameters;
        let (scatters, gathers) = match layout.zero {
            Zero::None => return machine.alone(Pattern::AllReduce, self.span, bytes),
            Zero::Optimizer => (1.0, 1.0),
            Zero::Gradients => (count, 1.0),
            Zero::Weights => (count, 2.0 * count),
        };
        let scatter = machine.alone(Pattern::Half, self.span, bytes);
        Scopes::of(|scope| scatters * scatter[scope] + gathers * self.gather[scope])
    }
}

/// What layouts share whose stages are cut into as many parts, besides block and stages.
pub(crate) struct Parts {
    /// All but the optimizer.
    compute: ComputeTimes,
    /// All but what goes between stages and among copies.
    communication: Communication,
    /// What holds computation up inside racks and between them.
    waiting: Scopes,
    /// What is left for those: computation, and waiting for the other links.
    rooms: Scopes,
    bubble: f64,
    /// Seconds between stages: all of them, and those that can run beside computation.
    sent: Scopes,
    steady: f64,
    /// Bytes of the first, the second and the last stage: those kept from pass to pass, of these what is here where they lie
    /// elsewhere, and those that pass by.
    kept: [[f64; 3]; 3],
}

impl Parts {
    pub(crate) fn new(block: &Block, layout: &Layout, stages: &Stages) -> Self {
        let (Stages { count, pp, layers, cut, .. }, parts) = (stages, f64::from(layout.interleave));
        // What runs beside another micro-batch's passes does not while the stages fill and empty, nor where the last one, which
        // waits the longest for a backward pass, has none yet.
        let hidden = block.expert.hidden;
        let alone = if layout.pairs_passes() { count.min(((parts - 1.0) * pp + 1.0) / parts) } else { 0.0 };
        let times = count * layers;
        let [inside, between] = [Scope::Inside, Scope::Between].map(|scope| Exposure {
            exposed_s: times * block.expert.exposed[scope] + alone * layers * hidden[scope],
            hidden_s: (count - alone) * layers * hidden[scope],
        });
        let communication = Communication {
            tensor: Scoped::new(&block.tensor, times),
            context: Scoped::new(&block.context, times),
            expert: Scoped { inside, between },
            ..Communication::default()
        };
        let expert_contention_s = (count - alone) * layers * block.expert.contention;
        let compute = ComputeTimes {
            forward_s: count * stages.forward,
            backward_s: count * stages.backward,
            recompute_s: times * block.again,
            contention_s: times * block.context.contention + expert_contention_s,
            expert_contention_s,
            optimizer_s: 0.0,
        };
        let seconds = compute.total_s();
        let expert = |hidden: bool| match hidden {
            true => Scopes { inside: inside.hidden_s, between: between.hidden_s },
            false => Scopes { inside: inside.exposed_s, between: between.exposed_s },
        };
        let waiting = Scopes::of(|scope| {
            expert(false)[scope] + times * (block.tensor.exposed[scope] + block.context.exposed[scope])
        });
        let rooms = Scopes::of(|scope| {
            let taken = times * (block.tensor.hidden[scope] + block.context.hidden[scope]);
            (seconds + waiting[scope.other()] - taken - expert(true)[scope]).max(0.0)
        });
        // Each part of each stage hands on once forward and once backward.
        let steady = 2.0 * count * parts;
        let handed = stages.handed;
        // The last stage has its logits of one micro-batch; the first what is kept of the embedding, of all under way.
        let kept = |(kind, stage): (usize, u32)| {
            let (layers, edge) = (cut.layers[kind], cut.edges[kind].kept);
            let under_way = under_way(layout, *count, f64::from(stage));
            let edge = if kind == 2 || layout.pp == 1 { edge } else { edge * under_way };
            let kept = under_way * layers * block.kept;
            // Of one micro-batch a block that is in use, and one on its way.
            [kept, kept.min(2.0 * block.kept), block.passing + edge]
        };
        let [first, second, last] = ends(layout.pp);
        Self {
            compute,
            communication,
            waiting,
            rooms,
            bubble: (pp - 1.0) / parts * (cut.mean + stages.filling),
            sent: handed.map(|seconds| (2.0 * (pp - 1.0) + steady) * seconds),
            steady: steady * handed.sum(),
            kept: [kept(first), kept(second), kept(last)],
        }
    }
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

    /// Seconds of which up to `hidden` run beside computation, as far as there is room.
    #[inline(always)]
    fn share(&mut self, seconds: f64, hidden: f64) -> Exposure {
        let hidden_s = self.take(hidden.min(seconds));
        Exposure { exposed_s: seconds - hidden_s, hidden_s }
    }
}

impl Shared<'_> {
    pub(crate) fn step(&self, layout: &Layout) -> Step {
        self.finish(layout, self.memory(layout))
    }

    /// Bytes of the stage that has the most here.
    #[inline(always)]
    pub(crate) fn memory(&self, layout: &Layout) -> MemoryUse {
        let Self { machine, stages, copies, parts } = self;
        let offload = layout.offload;
        let mut fullest = TierUse { capacity_bytes: machine.capacity, ..TierUse::default() };
        let capacity_bytes = machine.tier(offload.tier).map_or(0.0, |tier| tier.capacity);
        let mut farthest = TierUse { tier: Some(offload.tier), capacity_bytes, ..TierUse::default() };
        for ((held, &[kept, in_use, passing]), here) in copies.held.iter().zip(&parts.kept).zip(&stages.here)
        {
            let weights_bytes = if offload.weights { held.in_use } else { held.weights + held.whole };
            let optimizer_bytes = if offload.optimizer { held.states * here } else { held.states };
            let activations_bytes = if offload.activations { in_use } else { kept } + passing;
            let used_bytes = weights_bytes + held.gradients + optimizer_bytes + activations_bytes;
            if used_bytes > fullest.used_bytes {
                let gradients_bytes = held.gradients;
                fullest = TierUse {
                    weights_bytes,
                    gradients_bytes,
                    optimizer_bytes,
                    activations_bytes,
                    used_bytes,
                    ..fullest
                };
            }
            if offload.is_any() {
                let far = |bytes: f64, is_far: bool| if is_far { bytes } else { 0.0 };
                let weights_bytes = far(held.weights, offload.weights);
                let optimizer_bytes = far(held.states, offload.optimizer);
                let activations_bytes = far(kept, offload.activations);
                let used_bytes = weights_bytes + optimizer_bytes + activations_bytes;
                if used_bytes > farthest.used_bytes {
                    farthest =
                        TierUse { weights_bytes, optimizer_bytes, activations_bytes, used_bytes, ..farthest };
                }
            }
        }
        MemoryUse { tiers: [fullest, farthest] }
    }

    /// What runs beside what, once it is known what lies where.
    #[inline(always)]
    pub(crate) fn finish(&self, layout: &Layout, memory: MemoryUse) -> Step {
        let Self { stages, copies, parts, .. } = self;
        let overlap = layout.overlap;
        let [mut inside, mut between] = [parts.rooms.inside, parts.rooms.between].map(Room);
        // Stages hand on inside racks or between them; while they wait for that, the other links have room.
        let steady = if overlap.pipeline { parts.steady } else { 0.0 };
        let pipeline = Scoped {
            inside: inside.share(parts.sent.inside, steady),
            between: between.share(parts.sent.between, steady),
        };
        inside.0 += pipeline.between.exposed_s;
        between.0 += pipeline.inside.exposed_s;
        // All but one block's, as long as passes take with what holds them up.
        let passes = copies.passes[usize::from(layout.interleave > 1)];
        let waiting = parts.waiting.sum() + pipeline.exposed_s();
        let beside = passes * (copies.pass + waiting / stages.count);
        let part = if overlap.data { copies.part } else { 0.0 };
        let Scopes { inside: near, between: far } = copies.seconds;
        // Computation that a collective slows down has as much more time beside it.
        let (taken, longer) = (copies.taken, copies.longer);
        inside.0 *= longer.inside;
        between.0 *= longer.between;
        let near = inside.share(near, (part * near).min(beside * longer.inside));
        between.0 += near.exposed_s;
        let far = between.share(far, (part * far).min(beside * longer.between + near.exposed_s));
        between.0 *= 1.0 - taken.between;
        let data = Scoped { inside: near, between: far };
        let hidden = Scopes { inside: near.hidden_s, between: far.hidden_s };
        let contention_s = parts.compute.contention_s + hidden.parts(taken);
        let communication = Communication { pipeline, data, ..parts.communication };
        // The host has a link of its own; the pool hangs on those between the racks.
        let exposed = communication.exposed_s();
        let ComputeTimes { forward_s, backward_s, .. } = parts.compute;
        let [forward_s, backward_s] = [forward_s + copies.copied[0], backward_s + copies.copied[1]];
        let compute = ComputeTimes { contention_s, forward_s, backward_s, ..parts.compute };
        let alone = Room(compute.total_s() + exposed);
        let (room, waiting) = match layout.offload.tier {
            TierId::Pool => {
                let waiting = (parts.waiting.inside + pipeline.inside.exposed_s) / stages.count;
                (between, waiting + data.inside.exposed_s)
            }
            _ => (alone, waiting / stages.count + data.exposed_s()),
        };
        let offload = self.offload(layout, room, waiting);
        let compute = ComputeTimes { optimizer_s: copies.optimizer, ..compute };
        // Stages that fill and empty wait for the copies of a micro-batch too.
        let filling = (stages.pp - 1.0) / f64::from(layout.interleave) / stages.count;
        let bubble_s = parts.bubble + filling * (copies.copied[0] + copies.copied[1]);
        let busy = compute.total_s() + exposed + bubble_s + offload.exposed_s;
        let straggle_s = stages.straggle * busy;
        Step { total_s: busy + straggle_s, compute, communication, bubble_s, offload, straggle_s, memory }
    }

    /// To and from another tier: weights for each pass of each micro-batch, states once, activations there and back; while the
    /// links that it takes are idle, of that `waiting` from the last micro-batch on.
    #[inline(always)]
    fn offload(&self, layout: &Layout, mut room: Room, waiting: f64) -> Exposure {
        let Self { machine, stages, copies, .. } = self;
        let offload = layout.offload;
        let Some(far) = machine.tier(offload.tier) else { return Exposure::default() };
        let passes = 2.0 * stages.count;
        // A block at a time.
        let late = passes * stages.most_layers * far.latency;
        // Each pass fetches them; once they are updated, they go back.
        let weights = match offload.weights {
            true => passes * copies.weights / far.read + copies.weights / far.write + late,
            false => 0.0,
        };
        // Both ways at a time.
        let states =
            if offload.optimizer { copies.states / far.both + stages.most_layers * far.latency } else { 0.0 };
        let kept = stages.kept;
        let activations = if offload.activations { kept / far.read + kept / far.write + late } else { 0.0 };
        let total = weights + states + activations;
        // States can go beside one micro-batch's backward pass at most, for the last gradient comes with its end, and beside what
        // holds that and the step's end up.
        let hidden = match layout.overlap.offload {
            true => room.take(weights + activations) + room.take(states.min(stages.backward + waiting)),
            false => 0.0,
        };
        // The sums round.
        Exposure { exposed_s: (total - hidden).max(0.0), hidden_s: hidden }
    }
}
