//! One block of a transformer, and what stands before and after the blocks, for one micro-batch on one accelerator.

use crate::step::cost::{CommunicationCosts, GroupSpan, Pattern, Scope, Scopes};
use crate::step::layout::{Layout, Offload, Overlap, Precision, Recompute, Zero};
use crate::step::machine::Machine;
use crate::step::model::{Experts, Indexer, Latent, Model, Recurrent};
use crate::step::order::{CP, EP, TP};

/// What decides the cost of a block: layouts that agree in it share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) tp: u32,
    pub(crate) cp: u32,
    pub(crate) ep: u32,
    pub(crate) micro_batch: u32,
    pub(crate) sequence_parallel: bool,
    pub(crate) gather_again: bool,
    pub(crate) recompute: Recompute,
    pub(crate) flash: bool,
    pub(crate) precision: Precision,
    /// What of it decides the cost of a block.
    pub(crate) overlap: Overlap,
}

/// Seconds of a kind of communication that hold computation up, and that do not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) exposed: Scopes,
    pub(crate) hidden: Scopes,
    /// What computation takes longer beside it, on the processors that it leaves.
    pub(crate) contention: f64,
}

/// Costs for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) forward: f64,
    pub(crate) backward: f64,
    /// Computed again in the backward pass.
    pub(crate) again: f64,
    pub(crate) tensor: Traffic,
    pub(crate) context: Traffic,
    pub(crate) expert: Traffic,
    /// Bytes kept from the forward to the backward pass.
    pub(crate) kept: f64,
    /// Bytes that are there in the backward pass of one block beside what is kept.
    pub(crate) passing: f64,
    pub(crate) first: Edge,
    pub(crate) last: Edge,
    /// Bytes that go on to the next stage, from each rank.
    pub(crate) handed: f64,
}

/// What the first or the last stage has besides its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Edge {
    pub(crate) forward: f64,
    pub(crate) backward: f64,
    pub(crate) kept: f64,
}

/// Bytes that a cast of a value to 8 bits moves, with one scale for a tensor: it is read for the largest and once more, and written by
/// rows and by columns (pytorch/ao, torchao/testing/training/roofline_utils.py, tensorwise; as Transformer Engine's current scaling on
/// Hopper, whose products in 8 bits take one layout alone).
pub(crate) const CAST: f64 = 2.0 + 2.0 + 1.0 + 1.0;

/// Bytes for each pair of a token and an expert that kernels of a router move, forward and backward, in 32 bits: the choice (scores in;
/// weights, what it needs backward and a map of a byte out), the same for the loss that balances the load, and that loss
/// (Transformer Engine, transformer_engine/pytorch/router.py; Megatron-LM, megatron/core/transformer/moe/router.py, with router fusion).
const CHOICE: [[f64; 2]; 3] = [[13.0, 13.0], [13.0, 12.0], [4.0, 4.0]];

/// What a block keeps of a value that a mask hides.
const MASK: f64 = 1.0;

/// What is kept of where values were dropped.
const fn mask(model: &Model) -> f64 {
    if model.dropout { MASK } else { 0.0 }
}

/// Forward and backward together, as they are added up over the kernels of a block.
#[derive(Default)]
struct Passes {
    forward: f64,
    backward: f64,
    /// Of the forward pass, what only moves data.
    moved: f64,
}

impl Passes {
    /// A product with weights: in the backward pass one for its input and one for its weights. In 8 bits what goes in is cast before,
    /// and in the backward pass the gradient.
    fn weights(&mut self, machine: &Machine, [m, n, k]: [f64; 3], precision: Precision) {
        if precision == Precision::Fp8 {
            self.moved(machine, CAST * m * k, CAST * m * n);
        }
        self.forward += machine.product(1.0, [m, n, k], precision);
        self.backward +=
            machine.product(1.0, [m, k, n], precision) + machine.product(1.0, [k, n, m], precision);
    }

    /// A kernel that moves so many bytes forward, and so many backward.
    fn moved(&mut self, machine: &Machine, forward: f64, backward: f64) {
        let seconds = machine.moved(forward);
        self.moved += seconds;
        self.forward += seconds;
        self.backward += machine.moved(backward);
    }
}

impl Key {
    pub(crate) const fn of(layout: &Layout) -> Self {
        Self {
            tp: layout.tp,
            cp: layout.cp,
            ep: layout.ep,
            micro_batch: layout.micro_batch,
            sequence_parallel: layout.sequence_parallel,
            gather_again: layout.gather_again,
            recompute: layout.recompute,
            flash: layout.flash,
            precision: layout.precision,
            overlap: layout.overlap.of_block(),
        }
    }

    /// Ranks that share a sequence.
    pub(crate) const fn ranks(&self) -> u32 {
        self.tp.saturating_mul(self.cp)
    }

    /// A layout with this block, and nothing else that can be chosen.
    pub(crate) fn layout(&self, dp: u32, pp: u32, interleave: u32, batch: u32) -> Layout {
        Layout {
            tp: self.tp,
            cp: self.cp,
            ep: self.ep,
            dp,
            pp,
            interleave,
            batch,
            micro_batch: self.micro_batch,
            sequence_parallel: self.sequence_parallel,
            gather_again: self.gather_again,
            recompute: self.recompute,
            flash: self.flash,
            zero: Zero::None,
            precision: self.precision,
            wide_gradients: false,
            overlap: self.overlap,
            offload: Offload::default(),
        }
    }
}

/// The sizes of a block for one micro-batch on one rank.
struct Sizes<'a> {
    machine: &'a Machine,
    model: &'a Model,
    key: &'a Key,
    tp: f64,
    hidden: f64,
    /// Of a head.
    width: f64,
    /// Of a feed-forward part, on this rank.
    inside: f64,
    /// Heads, and heads of keys and values, on this rank: ranks beyond the latter have copies of them.
    heads: f64,
    kv: f64,
    sequence: f64,
    /// Tokens, and those of them that are left where ranks share what tensor parallelism does not.
    tokens: f64,
    shared: f64,
    /// Bytes of a value, and of what is kept of where values were dropped.
    value: f64,
    mask: f64,
}

impl<'a> Sizes<'a> {
    fn new(machine: &'a Machine, model: &'a Model, key: &'a Key) -> Self {
        let tp = f64::from(key.tp);
        let [hidden, width, inside] = [model.hidden, model.head_width(), model.feed_forward()].map(f64::from);
        let sequence = f64::from(model.sequence);
        let tokens = f64::from(key.micro_batch) * sequence / f64::from(key.cp);
        Self {
            machine,
            model,
            key,
            tp,
            hidden,
            width,
            inside: inside / tp,
            heads: f64::from(model.heads) / tp,
            kv: (f64::from(model.kv_heads()) / tp).max(1.0),
            sequence,
            tokens,
            shared: if key.sequence_parallel { tokens / tp } else { tokens },
            value: key.precision.bytes(),
            mask: mask(model),
        }
    }

    /// Bytes of a value as it goes into a product with weights.
    fn cast(&self) -> f64 {
        if self.key.precision == Precision::Fp8 { 1.0 } else { self.value }
    }

    /// Norms, and what joins the residual stream: one of each for each part of a block.
    fn stream(&self) -> Passes {
        let Self { machine, hidden, shared, value, mask, .. } = *self;
        let mut stream = Passes::default();
        for _ in 0..self.model.parts() {
            stream.moved(machine, 2.0 * value * hidden * shared, 3.0 * value * hidden * shared);
            stream.forward += self.joined();
            stream.backward += machine.moved((2.0 * value + mask) * hidden * shared);
        }
        stream
    }

    /// What joins a part of a block to the residual stream.
    fn joined(&self) -> f64 {
        let Self { machine, hidden, shared, value, mask, .. } = *self;
        machine.moved((3.0 * value + mask) * hidden * shared)
    }

    /// The last product of a block without experts, whose result no gradient needs.
    fn last_product(&self) -> f64 {
        let Self { machine, model, key, hidden, heads, inside, tokens, tp, .. } = *self;
        let from = match model.recurs() {
            _ if model.feed_forward() > 0 => inside,
            Some(recurrent) => f64::from(recurrent.width) / tp,
            None => heads * f64::from(model.value_width()),
        };
        machine.product(1.0, [tokens, hidden, from], key.precision)
    }

    /// What turns queries and keys by their position, and their norms: kernels that read and write each value once, as Transformer Engine's
    /// rotary kernel does (transformer_engine/common/fused_rope/fused_rope.cu), and norms as those of the stream. Out of latents queries are
    /// rotated in place, and one kernel joins the one rotated key to those of all heads and parts keys from values (Megatron-LM,
    /// megatron/core/fusions/fused_mla_yarn_rope_apply.py); norms are those of the latents.
    fn turned(&self, dense: &mut Passes) {
        let Self { machine, width, heads, kv, tokens, value, model, .. } = *self;
        let mut moved = |columns: f64, forward: f64, backward: f64| {
            if columns > 0.0 {
                let bytes = value * columns * tokens;
                dense.moved(machine, forward * bytes, backward * bytes);
            }
        };
        let [normed, rotated] = match model.latent {
            Some(Latent { queries, keys, rotated, values, .. }) => {
                let [queries, keys, rotated, values] = [queries, keys, rotated, values].map(f64::from);
                let joined = heads * (width - rotated + values) + 0.5 * (1.0 + heads) * rotated;
                [[queries, keys], [heads * rotated, joined]]
            }
            None if model.query_key_norms => [[heads * width, kv * width]; 2],
            None => [[0.0; 2], [heads * width, kv * width]],
        };
        for columns in normed {
            moved(columns, 2.0, 3.0);
        }
        if model.rotary {
            for columns in rotated {
                moved(columns, 2.0, 2.0);
            }
        }
    }

    /// What gathers queries, keys and values out of a padded batch, and puts what attention gives back: kernels that gather, and kernels that
    /// scatter into zeros (Dao-AILab/flash-attention, flash_attn/bert_padding.py, index_first_axis and index_put_first_axis).
    fn unpadded(&self, dense: &mut Passes) {
        let Self { machine, width, heads, kv, tokens, value, model, .. } = *self;
        let bytes = |columns: f64| value * columns * tokens;
        let given = bytes(heads * f64::from(model.value_width()));
        for into in [heads * width, kv * width, kv * width].map(bytes) {
            dense.moved(machine, 2.0 * into, into);
            dense.backward += machine.moved(2.0 * into);
        }
        dense.moved(machine, given, 2.0 * given);
        let back = machine.moved(2.0 * given);
        dense.forward += back;
        dense.moved += back;
    }

    /// The mixer's products with weights.
    fn dense(&self) -> Passes {
        let Self { machine, hidden, width, heads, kv, tokens, key, model, .. } = *self;
        let mut dense = Passes::default();
        if model.attends() {
            self.turned(&mut dense);
            if model.unpadded {
                self.unpadded(&mut dense);
            }
        }
        let mut product =
            |columns: f64, rows: f64| dense.weights(machine, [tokens, columns, rows], key.precision);
        match model.latent.filter(|_| model.attends()) {
            Some(Latent { queries, keys, rotated, values, indexer }) => {
                let [low, keys, rotated, values] = [queries, keys, rotated, values].map(f64::from);
                // Each rank has the products into latents whole, and an indexer.
                if let Some(Indexer { heads, width, .. }) = indexer {
                    let [heads, width] = [heads, width].map(f64::from);
                    product(heads * width, if low > 0.0 { low } else { hidden });
                    product(width + heads, hidden);
                }
                match low > 0.0 {
                    true => {
                        product(low, hidden);
                        product(heads * width, low);
                    }
                    false => product(heads * width, hidden),
                }
                product(keys + rotated, hidden);
                product(heads * (width - rotated + values), keys);
                product(hidden, heads * values);
            }
            None if model.attends() => {
                let gate = if model.attention_gate { heads } else { 0.0 };
                let matrices = if model.values_by_keys { 1.0 } else { 2.0 };
                product((heads + gate + matrices * kv) * width, hidden);
                product(hidden, heads * width);
            }
            None => {}
        }
        if let Some(Recurrent { into, width, convolved, inside, .. }) = model.recurs() {
            let [into, width, convolved] = [into, width, convolved].map(|it| f64::from(it) / self.tp);
            product(into, hidden);
            product(hidden, width);
            if inside > 0 {
                product(inside.into(), width);
            }
            let bytes = self.value * convolved * tokens;
            dense.moved(machine, 2.0 * bytes, 4.0 * bytes);
        }
        dense
    }

    /// The recurrence of a mixer: its state decays, takes each token and gives one. It reads what goes in and writes what comes out.
    fn recurrence(&self, scores: &mut Passes) {
        let Some(Recurrent { into, width, state, .. }) = self.model.recurs() else { return };
        let [into, width] = [into, width].map(|it| f64::from(it) / self.tp);
        let operations = 6.0 * self.tokens * width * f64::from(state);
        let bytes = self.value * (into + width) * self.tokens;
        let products = self.key.precision.outside_weights();
        scores.forward += self.machine.fused(operations, products).max(self.machine.moved(bytes));
        scores.backward +=
            self.machine.fused(2.0 * operations, products).max(self.machine.moved(2.0 * bytes));
    }

    /// Attention's scores, and what they weigh.
    fn scores(&self) -> Passes {
        let Self { machine, width, heads, sequence, tokens, value, mask, key, model, .. } = *self;
        let products = key.precision.outside_weights();
        let mut scores = Passes::default();
        self.recurrence(&mut scores);
        if !model.attends() {
            return scores;
        }
        let pairs = tokens * sequence * heads;
        let values = f64::from(model.value_width());
        if let Some(Indexer { heads, width, .. }) = model.indexer() {
            // Half of the pairs lie in the past. Backward recomputes none: what is chosen passes no gradient on.
            let operations = tokens * sequence * f64::from(heads) * f64::from(width);
            scores.forward += machine.fused(operations, products);
        }
        if key.flash {
            // Half of the pairs lie in the past; backward takes five products where forward takes two (Dao, 2023).
            let operations = 0.5 * 2.0 * pairs * (width + values) * model.seen();
            scores.forward += machine.fused(operations, products);
            scores.backward += machine.fused(2.5 * operations, products);
            return scores;
        }
        let rows = sequence / f64::from(key.cp);
        let count = f64::from(key.micro_batch) * heads;
        for shape in [[rows, sequence, width], [rows, values, sequence]] {
            let [m, n, k] = shape;
            scores.forward += machine.product(count, shape, products);
            scores.backward +=
                machine.product(count, [m, k, n], products) + machine.product(count, [k, n, m], products);
        }
        // Softmax, then dropout with its mask.
        let dropped = if self.model.dropout { 2.0 * value + mask } else { 0.0 };
        scores.moved(machine, (2.0 * value + dropped) * pairs, (3.0 * value + dropped) * pairs);
        scores
    }

    /// The feed-forward part, with the experts that are here.
    fn feed(&self) -> Passes {
        let Self { machine, hidden, shared, tokens, value, tp, key, model, .. } = *self;
        let mut feed = Passes::default();
        let Some(experts) = model.experts else {
            if model.feed_forward() > 0 {
                self.through(&mut feed, tokens, [hidden, self.inside]);
            }
            return feed;
        };
        feed.weights(machine, [shared, f64::from(experts.count), hidden], key.precision.outside_weights());
        for [forward, backward] in CHOICE {
            let pairs = shared * f64::from(experts.count);
            feed.moved(machine, forward * pairs, backward * pairs);
        }
        let (active, here) = (f64::from(experts.active), f64::from(experts.count / key.ep));
        let mut one = Passes::default();
        let routed = f64::from(model.routed_width());
        self.through(&mut one, tokens * active / here, [routed, self.inside]);
        feed.forward += one.forward * here;
        feed.backward += one.backward * here;
        feed.moved += one.moved * here;
        for _ in 0..experts.shared {
            self.through(&mut feed, tokens, [hidden, f64::from(model.shared_feed_forward()) / tp]);
        }
        if experts.latent.is_some() {
            feed.weights(machine, [shared, routed, hidden], key.precision);
            feed.weights(machine, [shared, hidden, routed], key.precision);
        }
        // To the experts and back, in and out of the buffers that are sent.
        let bytes = 4.0 * value * routed * tokens * active / tp;
        feed.moved(machine, bytes, bytes);
        feed
    }

    /// So many tokens through one feed-forward part that is so wide outside, and inside on this rank.
    fn through(&self, feed: &mut Passes, tokens: f64, [outside, inside]: [f64; 2]) {
        let Self { machine, value, key, model, .. } = *self;
        let entries = model.entries();
        feed.weights(machine, [tokens, entries * inside, outside], key.precision);
        let bytes = value * inside * tokens;
        feed.moved(machine, (entries + 1.0) * bytes, (2.0 * entries + 1.0) * bytes);
        feed.weights(machine, [tokens, outside, inside], key.precision);
    }
}

/// What recomputation by operator takes, and keeps of what products and attention give.
struct ByOperator {
    again: f64,
    kept: f64,
}

impl Sizes<'_> {
    /// Every second product is computed again, in the order of queries, keys, values, output, and the feed-forward part's
    /// (pytorch/torchtitan b5bcd76, torchtitan/distributed/activation_checkpoint.py). Mixers and feed-forward parts that have other products
    /// are taken to compute half of them again.
    fn by_operator(&self) -> ByOperator {
        let Self { machine, model, key, hidden, width, heads, kv, inside, tokens, shared, value, .. } = *self;
        let usual = model.attends() && model.latent.is_none() && model.recurs().is_none();
        if !usual || model.experts.is_some() || model.feed_forward() == 0 {
            let [dense, feed] = [self.dense(), self.feed()];
            let products = dense.forward - dense.moved + feed.forward - feed.moved;
            return ByOperator { again: 0.5 * products, kept: 0.5 * self.kept() };
        }
        let product = |columns, rows| machine.product(1.0, [tokens, columns, rows], key.precision);
        let (feed, given) = match model.gated {
            true => (product(inside, hidden), inside * tokens + hidden * shared),
            false => (product(hidden, inside), inside * tokens),
        };
        // Queries, values and what attention gives.
        let mixed = (2.0 * heads + kv) * width * tokens;
        ByOperator {
            again: product(kv * width, hidden) + product(hidden, heads * width) + feed,
            kept: value * (mixed + given),
        }
    }

    /// Bytes kept from forward to backward (Korthikanti et al., 2022, section 4: 34 s b h + 5 a s s b for GPT).
    fn kept(&self) -> f64 {
        let Self { model, key, tp, hidden, width, heads, kv, tokens, shared, value, mask, .. } = *self;
        let inside = f64::from(model.feed_forward());
        let parts = f64::from(model.parts());
        // What goes into a product in 8 bits is kept as it was cast (Transformer Engine, low-precision training, handling transposes).
        let cast = self.cast();
        let stream = parts * (value + cast + mask) * hidden * shared;
        let gathered = if key.gather_again { 0.0 } else { parts * cast * hidden * (tokens - shared) };
        let attention = match model.latent {
            _ if !model.attends() => 0.0,
            // Latents, and queries, keys, values and output of each head.
            Some(Latent { queries, keys, rotated, values, .. }) => {
                let [low, keys, rotated, values] = [queries, keys, rotated, values].map(f64::from);
                low + keys + rotated + heads * (2.0 * width + 2.0 * values)
            }
            None => (2.0 * heads + 2.0 * kv) * width + if model.attention_gate { heads * width } else { 0.0 },
        };
        // What goes into it, what is convolved, and what comes out.
        let recurrence = model.recurs().map_or(0.0, |recurrent| {
            (f64::from(recurrent.into) + f64::from(recurrent.convolved) + f64::from(recurrent.width)) / tp
        });
        // Attention keeps what it gives beside that.
        let given = match key.precision {
            Precision::Fp8 if model.attends() => heads * f64::from(model.value_width()),
            _ => 0.0,
        };
        let mixer = (value * (attention + recurrence) + given) * tokens;
        let keeps_scores = !key.flash && key.recompute == Recompute::None && model.attends();
        let scores = if keeps_scores {
            (value + mask * 3.0) * tokens * f64::from(model.sequence) * heads
        } else {
            0.0
        };
        let through = match model.experts {
            None => inside,
            Some(experts) => {
                f64::from(experts.active) * inside
                    + f64::from(experts.shared) * f64::from(model.shared_feed_forward())
            }
        };
        let feed = (value * model.entries() + cast) * through / tp * tokens;
        // What experts get, once for each: the stream has it as it was before it was sent.
        let active = model.experts.map_or(0.0, |experts| f64::from(experts.active));
        let sent =
            cast * f64::from(model.routed_width()) * active * if key.gather_again { shared } else { tokens };
        stream + gathered + mixer + scores + feed + sent
    }
}

impl Block {
    /// A block of the model: where they differ, the mean of all, as if each stage had as many of each kind.
    pub(crate) fn new(machine: &Machine, model: &Model, layout: &Layout) -> Self {
        let mut kinds =
            model.kinds().into_iter().map(|kind| (kind.layers, Self::uniform(machine, &kind, layout)));
        let Some((mut blocks, mut mean)) = kinds.next() else { return Self::uniform(machine, model, layout) };
        for (more, block) in kinds {
            blocks += more;
            mean = mean.towards(&block, f64::from(more) / f64::from(blocks));
        }
        mean
    }

    /// So far on the way to another.
    fn towards(&self, other: &Self, part: f64) -> Self {
        let mix = |own: f64, other: f64| own + part * (other - own);
        let scopes = |own: Scopes, other: Scopes| Scopes::of(|scope| mix(own[scope], other[scope]));
        let traffic = |own: Traffic, other: Traffic| Traffic {
            exposed: scopes(own.exposed, other.exposed),
            hidden: scopes(own.hidden, other.hidden),
            contention: mix(own.contention, other.contention),
        };
        Self {
            forward: mix(self.forward, other.forward),
            backward: mix(self.backward, other.backward),
            again: mix(self.again, other.again),
            tensor: traffic(self.tensor, other.tensor),
            context: traffic(self.context, other.context),
            expert: traffic(self.expert, other.expert),
            kept: mix(self.kept, other.kept),
            passing: self.passing.max(other.passing),
            ..*self
        }
    }

    /// One of blocks that are all alike.
    fn uniform(machine: &Machine, model: &Model, layout: &Layout) -> Self {
        let (key, ranks) = (&Key::of(layout), layout.ranks());
        let sizes = Sizes::new(machine, model, key);
        let Sizes { tp, hidden, width, heads, tokens, shared, value, .. } = sizes;
        let (stream, dense, scores, feed) = (sizes.stream(), sizes.dense(), sizes.scores(), sizes.feed());
        let by_operator = sizes.by_operator();
        let forward = stream.forward + dense.forward + scores.forward + feed.forward;
        let stops = key.recompute == Recompute::Needed && model.experts.is_none();
        let unneeded = if stops { sizes.last_product() } else { 0.0 };
        let again = match key.recompute {
            Recompute::None => 0.0,
            Recompute::Operators => {
                // Attention that is not fused keeps no scores.
                let scores = if key.flash { 0.0 } else { scores.forward };
                by_operator.again + stream.forward - sizes.joined() + dense.moved + feed.moved + scores
            }
            Recompute::Selective if key.flash => 0.0,
            Recompute::Selective => scores.forward,
            Recompute::Full => forward,
            Recompute::Needed => forward - sizes.joined() - unneeded,
        };
        let backward = stream.backward + dense.backward + scores.backward + feed.backward;
        let passes = if key.recompute.keeps_inputs_alone() { 3.0 } else { 2.0 };

        // Of what goes through a feed-forward part of experts, each expert of a token gets it.
        let has_feed = f64::from(u8::from(model.feed_forward() > 0));
        let narrower = f64::from(model.routed_width()) / hidden;
        let fed = model
            .experts
            .map_or(has_feed, |it| narrower * f64::from(it.active) + f64::from(it.shared.min(1)));
        let mixes = f64::from(model.parts()) - has_feed;
        let tensor = tensor_traffic(
            machine,
            key,
            machine.span(&ranks, &[TP]),
            [(mixes, sizes.cast()), (fed, if model.experts.is_none() { sizes.cast() } else { value })]
                .map(|(times, cast)| [cast, value].map(|bytes| times * bytes * tokens * hidden)),
            passes,
            stops,
            passes * (dense.forward + feed.forward) - unneeded,
        );
        // Out of latents, each head has keys and values of its own.
        let passed = match model.latent {
            _ if !model.attends() => 0.0,
            Some(latent) => heads * (width + f64::from(latent.values)),
            None => 2.0 * sizes.kv * width,
        };
        let context =
            context_traffic(machine, key, machine.span(&ranks, &[CP]), value * tokens * passed, &scores);
        let mut expert = Traffic::default();
        if let Some(experts) = model.experts.filter(|_| key.ep > 1) {
            let routed = value * tokens * f64::from(model.routed_width()) / tp;
            let span = machine.span(&ranks, &[EP]);
            let sent = dispatched(machine, experts, span, routed);
            // Each rank learns what all chose, a byte for each token and expert, once a forward pass (deepseek-ai/DeepEP, hybrid-ep,
            // csrc/hybrid_ep/executor/executor.cu, allgather_routing_map).
            let map = f64::from(key.ep) * shared * f64::from(experts.count);
            let told = machine.alone(Pattern::Half, span, map);
            expert.exposed = Scopes::of(|scope| 2.0 * passes * sent[scope] + (passes - 1.0) * told[scope]);
        }
        if key.overlap.expert {
            let (sent, taken) = (expert.exposed, machine.taken(machine.span(&ranks, &[EP])));
            // Beside another micro-batch's passes: all that a block computes, but for what runs beside that already.
            // While the links of one kind hold it up, those of the other are idle too.
            let beside = |scope: Scope| {
                let waiting = tensor.exposed[scope.other()] + context.exposed[scope.other()];
                let computing = forward + backward + again + context.contention + waiting;
                (computing - tensor.hidden[scope] - context.hidden[scope]) / (1.0 - taken[scope])
            };
            expert.hidden = Scopes::of(|scope| sent[scope].min(beside(scope)).max(0.0));
            expert.exposed = Scopes::of(|scope| sent[scope] - expert.hidden[scope]);
            expert.contention = expert.hidden.parts(taken);
        }

        let whole = sizes.kept();
        let (kept, passing) = match key.recompute {
            Recompute::Full | Recompute::Needed => (value * hidden * shared, whole),
            Recompute::Operators => (value * hidden * shared + by_operator.kept, whole),
            Recompute::None | Recompute::Selective => (whole, 0.0),
        };
        let (first, last) = edges(machine, model, key, tokens, shared);
        // Ranks that share a tensor send a part each.
        let handed = value * tokens * hidden / tp;
        Self { forward, backward, again, tensor, context, expert, kept, passing, first, last, handed }
    }
}

/// Collectives of tensor parallelism: two all-reduces a pass, or as many pairs of all-gather and reduce-scatter
/// (Korthikanti et al., 2022, section 4.2.2), of so many bytes for attention and for the feed-forward part: those that are gathered, which in 8
/// bits are cast before (Transformer Engine, transformer_engine/pytorch/module/layernorm_linear.py; pytorch/ao,
/// torchao/float8/float8_tensor_parallel.py), and those that are scattered or added up. What is computed again may stop before the last
/// product, and before what scatters or adds up its result. They run beside so many seconds of products.
fn tensor_traffic(
    machine: &Machine,
    key: &Key,
    span: GroupSpan,
    bytes: [[f64; 2]; 2],
    passes: f64,
    stops: bool,
    products: f64,
) -> Traffic {
    if key.tp == 1 {
        return Traffic::default();
    }
    let alone = |pattern, bytes| match bytes {
        _ if bytes == 0.0 => Scopes::default(),
        _ => machine.alone(pattern, span, bytes),
    };
    let parts = bytes.map(|[gathered, summed]| match key.sequence_parallel {
        // In 16 bits both take as long.
        true if gathered == summed => [alone(Pattern::Half, summed); 2],
        true => [alone(Pattern::Half, gathered), alone(Pattern::Half, summed)],
        false => [Scopes::default(), alone(Pattern::AllReduce, summed)],
    });
    // What was scattered is gathered once more for the gradient of the weights: an all-gather for each of the two.
    let gathers = if key.gather_again { passes + 1.0 } else { passes };
    let [[_, mixed], [_, fed]] = parts;
    let last = if bytes[1][1] > 0.0 { fed } else { mixed };
    let unsent = if stops { 1.0 } else { 0.0 };
    let all = Scopes::of(|scope| {
        let both = parts.map(|[gather, sum]| gathers * gather[scope] + passes * sum[scope]);
        both[0] + both[1] - unsent * last[scope]
    });
    if !key.overlap.tensor {
        return Traffic { exposed: all, ..Traffic::default() };
    }
    // In as many parts as there are ranks, the first of which nothing runs beside.
    let total = all.sum();
    let exposed = (total - products).max(total / f64::from(key.tp));
    let part = exposed / total;
    // Copy engines move the parts (Wang et al., PyTorch's asynchronous tensor parallelism, 2024; Transformer Engine's rings in
    // userbuffers), which take no processors.
    let [exposed, hidden] = [part, 1.0 - part].map(|part| all.map(|seconds| part * seconds));
    Traffic { exposed, hidden, contention: 0.0 }
}

/// Seconds in which a rank sends its tokens, of so many bytes, to their experts, or back. A token goes once to each rack that has experts
/// of it, and from there once to each rank (DeepEP, 2025; HybridEP of Megatron-Core); back, what experts give is added up on the way.
fn dispatched(machine: &Machine, experts: Experts, span: GroupSpan, bytes: f64) -> Scopes {
    let [racks, ranks] = [span.between, span.inside * span.between].map(|groups| experts.reached(groups));
    let among = |span, bytes| machine.alone(Pattern::AllToAll, span, bytes);
    Scopes {
        inside: among(GroupSpan { between: 1, ..span }, ranks * bytes).inside,
        between: among(GroupSpan { inside: 1, ..span }, racks * bytes).between,
    }
}

/// Keys and values go around the ranks that share a sequence, overlapped beside the attention to the last ones; backward
/// their gradients too.
fn context_traffic(machine: &Machine, key: &Key, span: GroupSpan, bytes: f64, scores: &Passes) -> Traffic {
    if key.cp == 1 || bytes == 0.0 {
        return Traffic::default();
    }
    let around = machine.alone(Pattern::Half, span, bytes * f64::from(key.cp));
    let (mut traffic, taken) = (Traffic::default(), machine.taken(span));
    // What is computed again gathers again.
    let forward = if key.recompute.keeps_inputs_alone() { 2.0 } else { 1.0 };
    for (factor, beside) in [(forward, forward * scores.forward), (2.0, scores.backward)] {
        let seconds = around.map(|seconds| factor * seconds);
        let total = seconds.sum();
        // Beside it attention takes as much longer.
        let left = 1.0 - seconds.parts(taken) / total;
        let beside = if key.overlap.context { beside / left } else { 0.0 };
        let part = ((total - beside) / total).max(0.0);
        for scope in [Scope::Inside, Scope::Between] {
            traffic.exposed[scope] += part * seconds[scope];
            traffic.hidden[scope] += (1.0 - part) * seconds[scope];
        }
    }
    traffic.contention = traffic.hidden.parts(taken);
    traffic
}

/// The embedding before the first block; norm, head and loss after the last. Nothing without a vocabulary.
fn edges(machine: &Machine, model: &Model, key: &Key, tokens: f64, shared: f64) -> (Edge, Edge) {
    if model.vocabulary == 0 {
        return Default::default();
    }
    let hidden = f64::from(model.hidden);
    let vocabulary = f64::from(model.vocabulary) / f64::from(key.tp);
    let value = key.precision.bytes();
    let mut embedding = Passes::default();
    embedding.moved(machine, 3.0 * value * hidden * shared, 3.0 * value * hidden * shared);
    let mut head = Passes::default();
    head.weights(machine, [tokens, vocabulary, hidden], key.precision.outside_weights());
    // The loss in 32 bits, as Megatron-Core computes it over a shared vocabulary: widen, maximum, subtract, exponentiate,
    // sum, divide; backward multiply and narrow.
    head.moved(machine, 38.0 * vocabulary * tokens, 14.0 * vocabulary * tokens);
    let first = Edge {
        forward: embedding.forward,
        backward: embedding.backward,
        kept: mask(model) * hidden * shared,
    };
    let kept = 2.0 * value * hidden * shared + 4.0 * vocabulary * tokens;
    (first, Edge { forward: head.forward, backward: head.backward, kept })
}
