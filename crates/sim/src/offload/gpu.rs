//! What a GPU computes and holds in a step whose tensors lie in the host's memory: two blocks, one in use and one on its way.

use polder_platform::Time;
use serde::Serialize;

use super::Settings;
use crate::step::block::Block;
use crate::step::job::Job;
use crate::step::layout::{Layout, Offload, Overlap, Precision, Recompute, Refusal, Zero};
use crate::step::model::Model;

/// Bytes in a GPU's memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuUse {
    /// What lies there, by name.
    pub rows: Vec<(&'static str, f64)>,
    /// All of it.
    pub used_bytes: f64,
    /// What there is.
    pub capacity_bytes: f64,
}

impl GpuUse {
    /// Whether it fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.used_bytes <= self.capacity_bytes
    }
}

/// One GPU's part of a step.
pub(crate) struct GpuStep {
    /// Seconds of a forward and of a backward pass.
    pub(crate) computation: [Time; 2],
    pub(crate) memory: GpuUse,
}

/// A copy of the model on each GPU, all of it fetched block by block.
const fn layout(settings: &Settings, batch: u32) -> Layout {
    Layout {
        tp: 1,
        cp: 1,
        ep: 1,
        dp: settings.gpus,
        pp: 1,
        interleave: 1,
        batch: settings.gpus * batch,
        micro_batch: batch,
        sequence_parallel: false,
        gather_again: true,
        recompute: if settings.checkpointing { Recompute::Full } else { Recompute::None },
        flash: settings.flash,
        zero: Zero::Weights,
        precision: Precision::Bf16,
        wide_gradients: false,
        overlap: Overlap::USUAL,
        offload: Offload {
            tier: polder_platform::TierId::Host,
            weights: true,
            optimizer: true,
            activations: true,
        },
    }
}

/// Tokens of a chunk in which Liger computes the loss: as many that its logits take what the input takes (Hsu et al., Liger Kernel,
/// 2024, section 3.2: 2^ceil(log2(B T / ceil(V / H)))).
fn chunk(tokens: f64, vocabulary: f64, hidden: f64) -> f64 {
    let parts = (vocabulary / hidden).ceil().max(1.0);
    (tokens / parts).ceil().log2().ceil().exp2().min(tokens)
}

/// One GPU's part of a step over `batch` sequences of the model's length on each.
pub(crate) fn step(
    job: &Job<'_>,
    model: &Model,
    settings: &Settings,
    batch: u32,
    trained: f64,
) -> Result<GpuStep, Refusal> {
    let layout = layout(settings, batch);
    layout.check(model)?;
    let machine = job.machine(&layout);
    machine.check(&layout)?;
    let block = Block::new(&machine, model, &layout);
    let layers = f64::from(model.layers);
    let forward = layers * block.forward + block.first.forward + block.last.forward;
    let backward = match settings.lora {
        None => layers * block.backward + block.first.backward + block.last.backward,
        // Gradients of inputs, and none of the weights that stay as they are: half of the products.
        Some(_) => forward,
    };
    let again = layers * block.again;

    let value = layout.precision.bytes();
    let [hidden, vocabulary] = [model.hidden, model.vocabulary].map(f64::from);
    let tokens = f64::from(batch) * f64::from(model.sequence);
    let weights = value * (2.0 * model.largest_block()).max(model.embedding_parameters());
    // Those of what is in use: as large as it, or the trained part of two blocks.
    let gradients = match settings.lora {
        None => weights,
        Some(_) => value * trained * 2.0 / layers,
    };
    let activations = match settings.checkpointing {
        true => block.passing + 2.0 * block.kept,
        false => layers * block.kept,
    };
    let pairs = tokens * f64::from(model.sequence) * f64::from(model.heads);
    let attends = model.attends() || model.kinds().iter().any(Model::attends);
    let scores = match settings.flash || !settings.checkpointing || !attends {
        true => 0.0,
        // Scores and what softmax makes of them, in 16 bits (Korthikanti et al., 2022, section 4.1).
        false => 4.0 * pairs,
    };
    let logits = match settings.liger {
        true => value * vocabulary * chunk(tokens, vocabulary, hidden),
        // In 16 bits, widened to 32 for the loss, and their gradients: transformers' ForCausalLMLoss.
        false => 10.0 * vocabulary * tokens,
    };
    let rows = vec![
        ("weights in use", weights),
        ("gradients in use", gradients),
        ("activations", activations),
        ("attention scores", scores),
        ("logits", logits),
    ];
    let used_bytes = rows.iter().map(|(_, bytes)| bytes).sum();
    let capacity_bytes = job.rack().accelerator.memory.capacity.value();
    Ok(GpuStep {
        computation: [forward, backward + again].map(Time::new),
        memory: GpuUse { rows, used_bytes, capacity_bytes },
    })
}
