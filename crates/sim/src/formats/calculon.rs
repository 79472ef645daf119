//! Models and executions in the JSON of Calculon (Isaev et al., SC23; github.com/calculon-ai/calculon).
//!
//! What Calculon has and Polder has not: docs/plan-calculon.md.

use polder_platform::{DataError, JsonObject, TierId};
use serde_json::{Map, Value};

use crate::step::given::{GivenLayout, Tiers};
use crate::step::layout::{Offload, Overlap, Precision, Recompute, Zero};
use crate::step::model::{MOST, MOST_LAYERS, Model};

/// Accelerators, or anything else that is counted of them, at most.
const MANY: u32 = 1 << 30;

// The keys that Calculon reads (caa4b11), also those that are left out here.
const MODEL: [&str; 6] = ["hidden", "feedforward", "seq_size", "attn_heads", "attn_size", "num_blocks"];
const EXECUTION: [&str; 23] = [
    "num_procs",
    "tensor_par",
    "pipeline_par",
    "data_par",
    "tensor_par_net",
    "pipeline_par_net",
    "data_par_net",
    "batch_size",
    "microbatch_size",
    "datatype",
    "fused_activation",
    "attention_type",
    "activation_recompute",
    "pipeline_interleaving",
    "optimizer_sharding",
    "tensor_par_comm_type",
    "tensor_par_overlap",
    "seq_par_ag_redo",
    "data_par_overlap",
    "weight_offload",
    "activations_offload",
    "optimizer_offload",
    "training",
];

/// A layout that an execution file gives, with where its ranks lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    /// Accelerators.
    pub accelerators: u32,
    /// Accelerators of each rack that are used: as many as the groups on the first network take.
    pub fill: u32,
    /// The layout.
    pub layout: GivenLayout,
}

/// Reads a model. It has no embedding, head or loss: Calculon counts none.
pub(crate) fn model(file: &str, keys: &Map<String, Value>) -> Result<Model, DataError> {
    let model = JsonObject::new(file, String::new(), keys, &MODEL)?;
    Ok(Model {
        title: "model of Calculon".into(),
        source: file.into(),
        hidden: model.count("hidden", MOST)?,
        layers: model.count("num_blocks", MOST_LAYERS)?,
        heads: model.count("attn_heads", MOST)?,
        head_width: Some(model.count("attn_size", MOST)?),
        feed_forward: Some(model.count("feedforward", MOST)?),
        dropout: true,
        tied: true,
        sequence: model.count("seq_size", MOST)?,
        ..Model::default()
    })
}

/// Reads an execution.
pub(crate) fn execution(file: &str, keys: &Map<String, Value>) -> Result<Execution, DataError> {
    let execution = JsonObject::new(file, String::new(), keys, &EXECUTION)?;
    if !execution.flag("training")? {
        return Err(execution.wrong("training", "true: inference is not predicted"));
    }
    let [tp, pp, dp] = ["tensor_par", "pipeline_par", "data_par"].map(|key| execution.count(key, MANY));
    let (tp, pp, dp) = (tp?, pp?, dp?);
    let accelerators = execution.count("num_procs", MANY)?;
    if [tp, pp, dp].map(u128::from).iter().product::<u128>() != u128::from(accelerators) {
        return Err(execution.wrong("num_procs", "tensor_par x pipeline_par x data_par"));
    }
    execution.word("attention_type", &[("multihead", ())])?;
    execution.word("datatype", &[("float16", ()), ("bfloat16", ())])?;
    let sequence_parallel =
        execution.word("tensor_par_comm_type", &[("ar", false), ("p2p_rs_ag", false), ("rs_ag", true)])?;
    let recompute = execution.word(
        "activation_recompute",
        &[("none", Recompute::None), ("attn_only", Recompute::Selective), ("full", Recompute::Full)],
    )?;
    let overlap = Overlap {
        tensor: execution.word("tensor_par_overlap", &[("none", false), ("ring", true), ("pipe", true)])?,
        data: execution.flag("data_par_overlap")?,
        offload: true,
        ..Overlap::default()
    };
    let offload = Offload {
        tier: TierId::Host,
        weights: execution.flag("weight_offload")?,
        optimizer: execution.flag("optimizer_offload")?,
        activations: execution.flag("activations_offload")?,
    };
    // Says what is kept of the activation function; here its input and its output always are.
    execution.flag("fused_activation")?;
    Ok(Execution {
        accelerators,
        fill: fill(&execution, [tp, dp, pp])?,
        layout: GivenLayout {
            tp: Some(tp),
            cp: Some(1),
            ep: Some(1),
            dp: Some(dp),
            pp: Some(pp),
            interleave: Some(execution.count("pipeline_interleaving", MANY)?),
            batch: Some(execution.count("batch_size", MANY)?),
            micro_batch: Some(execution.count("microbatch_size", MANY)?),
            sequence_parallel: Some(sequence_parallel),
            gather_again: Some(execution.flag("seq_par_ag_redo")?),
            recompute: Some(recompute),
            zero: Some(if execution.flag("optimizer_sharding")? { Zero::Optimizer } else { Zero::None }),
            wide_gradients: Some(false),
            flash: Some(false),
            precision: Some(Precision::Bf16),
            overlap: Some(overlap),
            offload: Some(offload),
            tiers: Tiers::default(),
        },
    })
}

/// Accelerators of a rack: ranks lie tensor, data, pipeline, so those on the first network come before those on the second.
fn fill(execution: &JsonObject<'_>, degrees: [u32; 3]) -> Result<u32, DataError> {
    let (mut fill, mut is_inside) = (1, true);
    for (key, degree) in ["tensor_par_net", "data_par_net", "pipeline_par_net"].into_iter().zip(degrees) {
        let tier = execution.read(key, "0 or 1", |value| value.as_u64().filter(|tier| *tier < 2))?;
        match (degree, tier) {
            (1, _) => {}
            (_, 0) if is_inside => fill *= degree,
            (_, 0) => {
                return Err(
                    execution.wrong(key, "1: ranks are placed tensor, data, pipeline, the closest first")
                );
            }
            _ => is_inside = false,
        }
    }
    Ok(fill)
}
