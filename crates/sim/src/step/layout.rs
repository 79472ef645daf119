//! How a training step is laid out over accelerators.

use std::fmt;

use polder_platform::{TierId, quoted};
use serde::{Deserialize, Serialize};

use crate::step::model::Model;
use crate::step::order::Ranks;
use crate::text;

/// A layout of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Ranks that share each matrix.
    pub tp: u32,
    /// Ranks that share each sequence.
    #[serde(default = "one")]
    pub cp: u32,
    /// Ranks of the data-parallel group that share a block's experts.
    #[serde(default = "one")]
    pub ep: u32,
    /// Copies of the model, counting those that share experts.
    pub dp: u32,
    /// Stages.
    #[serde(default = "one")]
    pub pp: u32,
    /// Parts of each stage, apart from one another in the model.
    #[serde(default = "one")]
    pub interleave: u32,
    /// Sequences of a step.
    pub batch: u32,
    /// Sequences that go through at once.
    #[serde(default = "one")]
    pub micro_batch: u32,
    /// Whether what tensor parallelism does not share is shared along the sequence.
    #[serde(default)]
    pub sequence_parallel: bool,
    /// Whether what is shared along the sequence is gathered again for the gradients of the weights, or else kept whole.
    #[serde(default = "yes")]
    pub gather_again: bool,
    /// What is computed again in the backward pass.
    #[serde(default)]
    pub recompute: Recompute,
    /// Whether attention is one fused kernel that keeps no scores.
    #[serde(default)]
    pub flash: bool,
    /// What copies of the model share.
    #[serde(default)]
    pub zero: Zero,
    /// What matrix products are computed in.
    #[serde(default)]
    pub precision: Precision,
    /// Whether gradients are added up in 32 bits.
    #[serde(default)]
    pub wide_gradients: bool,
    /// What runs beside computation.
    #[serde(default)]
    pub overlap: Overlap,
    /// What lies outside the accelerators' memory.
    #[serde(default)]
    pub offload: Offload,
}

const fn one() -> u32 {
    1
}

const fn yes() -> bool {
    true
}

/// What is computed again in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Attention scores (Korthikanti et al., 2022).
    Selective,
    /// Everything from the input of each block on.
    Full,
    /// The same, up to the last value that a gradient needs: not the last product of a block, nor what joins it to the stream. So PyTorch's
    /// checkpoint without reentry stops since 2.1.0 (torch/utils/checkpoint.py, rule 5 and `set_checkpoint_early_stop`), and so a compiled
    /// block drops what no gradient reads. Megatron-Core's full recomputation does not.
    Needed,
    /// Every second matrix product and all that only moves data, as torchtitan does by operator: other products and attention keep what
    /// they give.
    Operators,
}

impl Recompute {
    /// Whether a block keeps its input alone.
    pub(crate) const fn keeps_inputs_alone(self) -> bool {
        matches!(self, Self::Full | Self::Needed)
    }
}

/// Stages of ZeRO (Rajbhandari et al., 2020).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Zero {
    /// Each copy has all.
    #[default]
    None,
    /// Optimizer states are shared.
    Optimizer,
    /// Gradients too.
    Gradients,
    /// Weights too.
    Weights,
}

/// What matrix products are computed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 16 bits.
    #[default]
    Bf16,
    /// 8 bits in the products with weights, 16 elsewhere.
    Fp8,
    /// 32 bits, everywhere.
    Fp32,
}

impl Precision {
    /// Of what is computed besides products with weights.
    #[must_use]
    pub(crate) const fn outside_weights(self) -> Self {
        match self {
            Self::Bf16 | Self::Fp8 => Self::Bf16,
            Self::Fp32 => Self::Fp32,
        }
    }

    /// Bytes of a value, and of a weight.
    #[must_use]
    pub(crate) const fn bytes(self) -> f64 {
        match self {
            Self::Bf16 | Self::Fp8 => 2.0,
            Self::Fp32 => 4.0,
        }
    }

    /// Bytes a parameter that the optimizer keeps: two moments and, of weights that are narrower, a copy, all in 32 bits.
    #[must_use]
    pub(crate) const fn states(self) -> f64 {
        match self {
            Self::Bf16 | Self::Fp8 => 12.0,
            Self::Fp32 => 8.0,
        }
    }
}

/// What runs beside computation. When all of it is left out, keys and values do and nothing else; else what it names, alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default = "no_overlap")]
pub struct Overlap {
    /// Tensor-parallel collectives, in parts, beside the products that they feed.
    pub tensor: bool,
    /// Keys and values, beside the attention to the last ones.
    pub context: bool,
    /// Tokens to experts and back, beside the opposite pass of another micro-batch, as in DualPipe (DeepSeek-V3, 2024, section
    /// 3.2.1) and in Megatron-Core's combined passes. It takes a second micro-batch, and keeps more of them at once.
    pub expert: bool,
    /// Sends between stages.
    pub pipeline: bool,
    /// Gradients and parameters.
    pub data: bool,
    /// What is fetched from and written to another tier.
    pub offload: bool,
}

/// What lies outside the accelerators' memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// Where.
    pub tier: TierId,
    /// Weights, fetched for each pass of each micro-batch.
    pub weights: bool,
    /// Optimizer states, fetched and written back once a step.
    pub optimizer: bool,
    /// Activations between the passes.
    pub activations: bool,
}

impl Overlap {
    /// Nothing.
    pub const NONE: Self =
        Self { tensor: false, context: false, expert: false, pipeline: false, data: false, offload: false };
    /// All that takes no other schedule of passes: everything but what goes to experts.
    pub const USUAL: Self =
        Self { tensor: true, context: true, expert: false, pipeline: true, data: true, offload: true };

    /// Each with each other.
    pub fn all() -> impl Iterator<Item = Self> {
        let bit = |bits: u32, at: u32| bits & 1 << at != 0;
        (0..64).map(move |bits| Self {
            tensor: bit(bits, 0),
            context: bit(bits, 1),
            expert: bit(bits, 2),
            pipeline: bit(bits, 3),
            data: bit(bits, 4),
            offload: bit(bits, 5),
        })
    }

    /// What of it decides the cost of a block.
    pub(crate) const fn of_block(self) -> Self {
        Self { pipeline: false, data: false, offload: false, ..self }
    }
}

const fn no_overlap() -> Overlap {
    Overlap::NONE
}

impl Default for Overlap {
    fn default() -> Self {
        Self { context: true, ..Self::NONE }
    }
}

impl Offload {
    /// Whether anything is offloaded.
    #[must_use]
    pub const fn is_any(&self) -> bool {
        self.weights || self.optimizer || self.activations
    }

    /// Nothing, then each with each other in this tier.
    pub fn all(tier: TierId) -> impl Iterator<Item = Self> {
        let bit = |it: u32, at: u32| it & 1 << at != 0;
        (0..8).map(move |it| Self {
            tier,
            weights: bit(it, 0),
            optimizer: bit(it, 1),
            activations: bit(it, 2),
        })
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tier, weights, optimizer, activations } = self;
        let what = [("weights", weights), ("optimizer states", optimizer), ("activations", activations)];
        let what: Vec<_> = what.into_iter().filter(|(_, is_far)| **is_far).map(|(name, _)| name).collect();
        match self.is_any() {
            false => f.write_str("all kept in the accelerators' memory"),
            true => write!(f, "{} offloaded to the {tier}", text::listed(&what)),
        }
    }
}

impl Layout {
    /// Accelerators, micro-batches or parts, at most.
    pub(crate) const MOST: u32 = 1 << 30;

    /// Accelerators that it takes.
    #[must_use]
    pub const fn accelerators(&self) -> u32 {
        self.tp * self.cp * self.dp * self.pp
    }

    /// Ranks of each kind, as [`Order`](crate::Order) counts them.
    pub(crate) const fn ranks(&self) -> Ranks {
        [self.tp, self.cp, self.ep, self.dp / self.ep, self.pp]
    }

    /// Copies of what all have, and of each expert: as many as there are groups that share all experts.
    pub(crate) const fn copies(&self) -> [u32; 2] {
        let members = self.dp * self.cp;
        [members, members / self.ep]
    }

    /// Micro-batches of a step on one copy.
    #[must_use]
    pub const fn micro_batches(&self) -> u32 {
        self.batch / (self.dp * self.micro_batch)
    }

    /// Whether a pass of one micro-batch runs beside the opposite pass of another, for what goes to experts.
    pub(crate) const fn pairs_passes(&self) -> bool {
        self.overlap.expert && self.ep > 1
    }

    /// Whether `model` can be cut so.
    ///
    /// # Errors
    /// What is 0, too large or does not divide.
    pub fn check(&self, model: &Model) -> Result<(), Refusal> {
        self.check_counts()?;
        self.check_block(model)?;
        self.check_copies(model)
    }

    /// Whether no count is 0.
    pub(crate) fn check_counts(&self) -> Result<(), Refusal> {
        let counts = [
            ("tp", self.tp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("dp", self.dp),
            ("pp", self.pp),
            ("interleave", self.interleave),
            ("micro-batch", self.micro_batch),
            ("batch", self.batch),
        ];
        match counts.iter().find(|(_, count)| *count == 0) {
            Some((what, _)) => Err(Refusal::Zero { what }),
            None => Ok(()),
        }
    }

    /// What does not depend on stages and copies, for counts above 0.
    pub(crate) fn check_block(&self, model: &Model) -> Result<(), Refusal> {
        if self.cp > self.batch.max(model.sequence) {
            return Err(Refusal::Large);
        }
        match model.others.is_empty() {
            true => self.check_shares(model)?,
            false => model.kinds().iter().try_for_each(|kind| self.check_shares(kind))?,
        }
        divides(
            "2 cp",
            "the sequence",
            model.sequence,
            if self.cp == 1 { 1 } else { self.cp.saturating_mul(2) },
        )?;
        if self.sequence_parallel {
            divides("tp", "the tokens of a rank", model.sequence / self.cp, self.tp)?;
        }
        divides("ep", "experts", model.experts.map_or(1, |it| it.count), self.ep)
    }

    /// What ranks share of each block of a kind.
    fn check_shares(&self, model: &Model) -> Result<(), Refusal> {
        if model.attends() {
            divides("tp", "heads", model.heads, self.tp)?;
            if self.tp > model.kv_heads() {
                divides("heads of keys and values", "tp", self.tp, model.kv_heads())?;
            } else {
                divides("tp", "heads of keys and values", model.kv_heads(), self.tp)?;
            }
        }
        if let Some(recurrent) = model.recurs() {
            divides("tp", "the recurrent width", recurrent.width, self.tp)?;
        }
        divides("tp", "the feed-forward width", model.feed_forward(), self.tp)?;
        let shared = if model.experts.is_some() { model.shared_feed_forward() } else { 0 };
        divides("tp", "the shared expert's width", shared, self.tp)
    }

    /// The rest, where that holds.
    pub(crate) fn check_copies(&self, model: &Model) -> Result<(), Refusal> {
        let product = |counts: &[u32]| counts.iter().fold(1, |all: u64, it| all.saturating_mul((*it).into()));
        let all = product(&[self.tp, self.cp, self.dp, self.pp]);
        let widest =
            all.max(product(&[self.dp, self.micro_batch])).max(product(&[self.pp, self.interleave, 2]));
        if widest > Self::MOST.into() {
            return Err(Refusal::Large);
        }
        divides("ep", "dp", self.dp, self.ep)?;
        divides("dp x micro-batch", "the batch", self.batch, self.dp * self.micro_batch)?;
        check_parts(model, self.pp, self.interleave, self.micro_batches())
    }

    /// The ways in which blocks may be dealt out to the stages; the first counts where the other is not faster.
    pub(crate) fn splits(&self, model: &Model) -> (BlockSplit, Option<BlockSplit>) {
        let (pp, layers) = (self.pp, model.layers);
        // Where stages come out even, that is it. Embedding and head in place of a block each are for the others.
        let is_counted = !layers.is_multiple_of(pp) && model.vocabulary > 0;
        (BlockSplit::new(layers, pp, false), is_counted.then(|| BlockSplit::new(layers, pp, true)))
    }
}

/// Blocks of each stage, dealt out as evenly as they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSplit {
    pub(crate) first: u32,
    /// Of the middle stages; the first `more` of them have one more.
    pub(crate) middle: u32,
    pub(crate) more: u32,
    pub(crate) last: u32,
}

impl BlockSplit {
    /// With embedding and head `counted`, each stands for a block of the first and of the last stage.
    fn new(layers: u32, pp: u32, counted: bool) -> Self {
        let slots = layers + if counted { 2 } else { 0 };
        let (each, more) = (slots / pp, slots % pp);
        // The first stage has the embedding besides, which is less than a block: it comes first where that is counted, else
        // after the middle ones. The last has the head, which is more, and never gets one.
        let first_has_more = more > if counted { 0 } else { pp.saturating_sub(2) };
        let end = each - u32::from(counted);
        Self {
            first: end + u32::from(first_has_more),
            middle: each,
            more: more - u32::from(first_has_more),
            last: end,
        }
    }

    /// Of the middle stage that has the most, which is the second of all; 0 when there is none.
    pub(crate) fn largest_middle_stage(self, pp: u32) -> u32 {
        if pp > 2 { self.middle + u32::from(self.more > 0) } else { 0 }
    }

    /// Of each stage.
    pub(crate) fn blocks(self, pp: u32) -> impl Iterator<Item = u32> {
        (0..pp).map(move |stage| match stage {
            0 => self.first,
            _ if stage == pp - 1 => self.last,
            _ => self.middle + u32::from(stage <= self.more),
        })
    }
}

/// Whether so many stages can be cut into as many parts each, with so many micro-batches.
pub(crate) fn check_parts(model: &Model, pp: u32, interleave: u32, count: u32) -> Result<(), Refusal> {
    let parts = pp * interleave;
    if parts > model.layers && !is_even(model, pp, interleave) {
        return Err(Refusal::Parts { parts, layers: model.layers });
    }
    if interleave > 1 {
        if pp < 2 {
            return Err(Refusal::Interleave { pp });
        }
        divides("pp", "the micro-batches, as interleaving wants,", count, pp)?;
    }
    Ok(())
}

fn divides(what: &'static str, of: &'static str, count: u32, by: u32) -> Result<(), Refusal> {
    match count.is_multiple_of(by) {
        true => Ok(()),
        false => Err(Refusal::Divide { what, by, of, count }),
    }
}

/// Whether all parts of all stages are alike, embedding and head counted as a layer each if need be, as in Llama 3 (section
/// 3.3).
pub(crate) fn is_even(model: &Model, pp: u32, interleave: u32) -> bool {
    let (layers, Some(parts)) = (model.layers, pp.checked_mul(interleave)) else { return false };
    let counts = model.vocabulary > 0 && pp > 1 && layers + 2 > pp;
    layers.is_multiple_of(parts) || counts && (layers + 2).is_multiple_of(parts)
}

/// Why a layout cannot run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Something is 0.
    #[error("{what} is 0; it is at least 1")]
    Zero {
        /// What.
        what: &'static str,
    },
    /// Something does not divide.
    #[error("{what} of {by} does not divide {of} of {count}")]
    Divide {
        /// What should divide.
        what: &'static str,
        /// Its value.
        by: u32,
        /// What it should divide.
        of: &'static str,
        /// How many there are.
        count: u32,
    },
    /// More parts than there are layers.
    #[error("pp x interleave of {parts} is more than the {layers} layers")]
    Parts {
        /// Parts of all stages.
        parts: u32,
        /// The model's layers.
        layers: u32,
    },
    /// Interleaving without stages.
    #[error("stages cannot be interleaved with pp of {pp}; take pp of 2 or more, or interleave of 1")]
    Interleave {
        /// The stages.
        pp: u32,
    },
    /// Numbers that no machine has.
    #[error(
        "the layout takes more than {} accelerators, micro-batches or parts; give smaller numbers",
        Layout::MOST
    )]
    Large,
    /// The platform's numbers are so far apart that no time comes out.
    #[error("the step takes no finite time; look at the platform's bandwidths and latencies")]
    Infinite,
    /// Another number of accelerators than the platform is asked for.
    #[error("tp x cp x pp of {ranks} and dp of {dp} do not make {}", text::accelerators(*asked))]
    Accelerators {
        /// tp x cp x pp.
        ranks: u64,
        /// Copies of the model.
        dp: u32,
        /// What was asked for.
        asked: u32,
    },
    /// Ranks of one copy of the model that do not divide the accelerators.
    #[error("tp x cp x pp of {ranks} does not divide {}", text::accelerators(*asked))]
    Ranks {
        /// tp x cp x pp.
        ranks: u64,
        /// What was asked for.
        asked: u32,
    },
    /// No layout is even.
    #[error("no layout{given} cuts a batch of {batch} over {} evenly", text::accelerators(*asked))]
    Uneven {
        /// The counts that were given: nothing, or such as " with tp of 8".
        given: String,
        /// Sequences of a step.
        batch: u32,
        /// What was asked for.
        asked: u32,
    },
    /// A kind of memory that the host does not have.
    #[error("the host has no memory \"{}\"; it has {known}", quoted(tier))]
    Tier {
        /// What was asked for.
        tier: String,
        /// What there is.
        known: String,
    },
    /// The platform lacks something.
    #[error("{what} needs {needs}, which this platform does not have; {remedy}")]
    Missing {
        /// What was asked for.
        what: &'static str,
        /// What it needs.
        needs: &'static str,
        /// What can be done.
        remedy: &'static str,
    },
    /// Communication that cannot be followed flit by flit.
    #[error(transparent)]
    Transfers(#[from] crate::contention::TransferError),
    /// Failed links, and no flows that could avoid them.
    #[error("failed links change flows alone; take fidelity L1 or L2")]
    FailedInClosedForm,
    /// Failed links that no flow would take.
    #[error("links between racks failed, and {} are in one rack; take more", text::accelerators(*accelerators))]
    FailedElsewhere {
        /// Accelerators of the layout.
        accelerators: u32,
    },
    /// No such link, or ranks that failed links cut off.
    #[error("failed links between racks: {0}")]
    FailedLinks(#[from] crate::contention::NetworkError),
    /// More of a rack than it has.
    #[error("{fill} accelerators of each rack cannot be used; a rack has {rack}")]
    Fill {
        /// What was asked for.
        fill: u32,
        /// What there is.
        rack: u32,
    },
    /// A kind of rack that the platform does not have.
    #[error("the platform has no rack \"{}\"; it has {known}", quoted(name))]
    Rack {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The fabric's ports or ids do not suffice.
    #[error(
        "{} need {} {what}, there are {}; {remedy}",
        text::accelerators(*accelerators),
        text::grouped(*needs),
        text::grouped(*has)
    )]
    Ports {
        /// Accelerators.
        accelerators: u32,
        /// What is short.
        what: &'static str,
        /// How many are needed.
        needs: u64,
        /// How many there are.
        has: u64,
        /// What can be done.
        remedy: &'static str,
    },
}
