//! What of a layout is given; the rest is searched for.

use polder_platform::TierId;
use serde::{Deserialize, Serialize};

use super::layout::{Layout, Offload, Overlap, Precision, Recompute, Refusal, Zero};
use super::model::Model;

/// What of a layout is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GivenLayout {
    /// Tensor parallelism.
    pub tp: Option<u32>,
    /// Context parallelism.
    pub cp: Option<u32>,
    /// Expert parallelism.
    pub ep: Option<u32>,
    /// Copies of the model.
    pub dp: Option<u32>,
    /// Stages.
    pub pp: Option<u32>,
    /// Parts of a stage.
    pub interleave: Option<u32>,
    /// Sequences of a step; when left out the power of two that makes 16 Mi tokens at most, and 32 Ki an accelerator.
    pub batch: Option<u32>,
    /// Sequences at once.
    pub micro_batch: Option<u32>,
    /// Sharing along the sequence.
    pub sequence_parallel: Option<bool>,
    /// Gathering again what is shared along the sequence; yes when left out.
    pub gather_again: Option<bool>,
    /// What is computed again.
    pub recompute: Option<Recompute>,
    /// What copies share.
    pub zero: Option<Zero>,
    /// Gradients in 32 bits; yes when left out.
    pub wide_gradients: Option<bool>,
    /// Fused attention; yes when left out.
    pub flash: Option<bool>,
    /// What products are computed in; bf16 when left out.
    pub precision: Option<Precision>,
    /// What runs beside computation; all but what goes to experts when left out.
    pub overlap: Option<Overlap>,
    /// What lies elsewhere; when left out, what `tiers` says is tried.
    pub offload: Option<Offload>,
    /// Where everything is tried when `offload` is left out.
    pub tiers: Tiers,
}

/// Where a search tries to keep what need not be in the accelerators' memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tiers {
    /// Nowhere, and wherever there is memory where nothing fits without.
    #[default]
    IfNeeded,
    /// Wherever there is memory.
    All,
    /// Here.
    One(TierId),
}

/// Tokens of a step at most, where no batch is given: of all accelerators, and of one.
const MOST_TOKENS: u64 = 16 << 20;
const MOST_TOKENS_OF_ONE: u64 = 32 << 10;

impl GivenLayout {
    /// What is given here, and where nothing is, there.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            tp: self.tp.or(other.tp),
            cp: self.cp.or(other.cp),
            ep: self.ep.or(other.ep),
            dp: self.dp.or(other.dp),
            pp: self.pp.or(other.pp),
            interleave: self.interleave.or(other.interleave),
            batch: self.batch.or(other.batch),
            micro_batch: self.micro_batch.or(other.micro_batch),
            sequence_parallel: self.sequence_parallel.or(other.sequence_parallel),
            gather_again: self.gather_again.or(other.gather_again),
            recompute: self.recompute.or(other.recompute),
            zero: self.zero.or(other.zero),
            wide_gradients: self.wide_gradients.or(other.wide_gradients),
            flash: self.flash.or(other.flash),
            precision: self.precision.or(other.precision),
            overlap: self.overlap.or(other.overlap),
            offload: self.offload.or(other.offload),
            tiers: if self.tiers == Tiers::IfNeeded { other.tiers } else { self.tiers },
        }
    }

    /// What is asked next where nothing fits.
    pub(crate) fn if_needed(&self) -> Option<Self> {
        let is_open = self.offload.is_none() && self.tiers == Tiers::IfNeeded;
        is_open.then(|| Self { tiers: Tiers::All, ..self.clone() })
    }

    /// Sequences of a step on so many accelerators.
    #[must_use]
    pub fn batch(&self, model: &Model, accelerators: u32) -> u32 {
        let tokens = MOST_TOKENS.min(MOST_TOKENS_OF_ONE * u64::from(accelerators));
        self.batch.unwrap_or_else(|| 1 << (tokens / u64::from(model.sequence)).max(1).ilog2())
    }

    /// Whether no count that is given is 0: anything divides a batch of nothing.
    pub(crate) fn check_counts(&self) -> Result<(), Refusal> {
        self.alone(self.batch.unwrap_or(1)).check_counts()
    }

    /// What is given, and of all else the least; `dp` of at least `ep`.
    pub(crate) fn alone(&self, batch: u32) -> Layout {
        Layout {
            tp: self.tp.unwrap_or(1),
            cp: self.cp.unwrap_or(1),
            ep: self.ep.unwrap_or(1),
            dp: self.dp.or(self.ep).unwrap_or(1),
            pp: self.pp.unwrap_or(1),
            interleave: self.pp.and(self.interleave).unwrap_or(1),
            batch,
            micro_batch: self.micro_batch.unwrap_or(1),
            sequence_parallel: self.sequence_parallel.unwrap_or_default(),
            gather_again: true,
            recompute: Recompute::default(),
            flash: true,
            zero: Zero::default(),
            precision: self.precision.unwrap_or_default(),
            wide_gradients: true,
            overlap: Overlap::default(),
            offload: self.offload.unwrap_or_default(),
        }
    }
}
