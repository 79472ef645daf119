//! Models, systems and executions in the JSON of Calculon (Isaev et al., SC23; github.com/calculon-ai/calculon).
//!
//! What Calculon has and Polder has not: docs/plan-calculon.md.

use std::collections::BTreeMap;

use polder_platform::{
    Accelerator, Attach, Bandwidth, ByteUnit, Bytes, Compute, Curve, DataError, Efficiency, Fabric, Fitted,
    FlopRate, Host, Link, Packet, Platform, Quantity, Rack, Reached, Reduction, Software, Switch, Tier, Time,
    Topology, TransferRate, Unit,
};
use serde_json::{Map, Value};

use crate::layout::{FarTier, Offload, Overlap, Precision, Recompute, Zero};
use crate::model::{MOST, MOST_LAYERS, Model};
use crate::request::{Given, Tiers};

/// Accelerators, or anything else that is counted of them, at most.
const MANY: u32 = 1 << 30;

// The keys that Calculon reads (caa4b11), also those that are left out here.
const MODEL: [&str; 6] = ["hidden", "feedforward", "seq_size", "attn_heads", "attn_size", "num_blocks"];
const SYSTEM: [&str; 6] = ["matrix", "vector", "mem1", "mem2", "processing_mode", "networks"];
const DATATYPES: [&str; 4] = ["float8", "float16", "float32", "bfloat16"];
const PROCESSOR: [&str; 2] = ["tflops", "gflops_efficiency"];
const MEMORY: [&str; 3] = ["GiB", "GBps", "MB_efficiency"];
const NETWORK: [&str; 7] =
    ["bandwidth", "efficiency", "size", "latency", "ops", "must_be_filled", "processor_usage"];
const OPS: [&str; 4] = ["p2p", "reduce_scatter", "all_gather", "all_reduce"];
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
    pub layout: Given,
}

/// An object of a file, with the keys that lead to it.
struct Object<'a> {
    file: &'a str,
    at: String,
    keys: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// One that has no keys but those `known`; `at` leads to them.
    fn new(
        file: &'a str,
        at: String,
        keys: &'a Map<String, Value>,
        known: &[&str],
    ) -> Result<Self, DataError> {
        let object = Self { file, at, keys };
        let Some(key) = keys.keys().find(|key| !known.contains(&key.as_str())) else { return Ok(object) };
        let problem = format!("unknown field `{key}`, expected one of `{}`", known.join("`, `"));
        Err(DataError::new(file, &object.key(key), problem))
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.at)
    }

    fn wrong(&self, key: &str, expected: &str) -> DataError {
        wrong(self.file, &self.key(key), expected, self.keys.get(key))
    }

    /// What `read` makes of a value, where it makes anything of it.
    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, DataError> {
        self.keys.get(key).and_then(read).ok_or_else(|| self.wrong(key, expected))
    }

    fn count(&self, key: &str, most: u32) -> Result<u32, DataError> {
        let count = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|it| (1..=most).contains(it));
        self.read(key, &format!("a whole number from 1 to {most}"), count)
    }

    fn flag(&self, key: &str) -> Result<bool, DataError> {
        self.read(key, "true or false", Value::as_bool)
    }

    fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<T, DataError> {
        let known: Vec<_> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
        let find = |value: &Value| {
            let word = value.as_str()?;
            words.iter().find(|(known, _)| *known == word).map(|(_, it)| *it)
        };
        self.read(key, &known.join(" or "), find)
    }

    /// A number that a machine can have: more than 0.
    fn size(&self, key: &str) -> Result<f64, DataError> {
        self.read(key, "a number above 0, 1e20 at most", |value| number(value).filter(|it| *it > 0.0))
    }

    /// The same, or 0.
    fn maybe_size(&self, key: &str) -> Result<f64, DataError> {
        self.read(key, "a number from 0 to 1e20", number)
    }

    fn part(&self, key: &str) -> Result<f64, DataError> {
        self.read(key, "a part from 0 to 1", |value| number(value).filter(|it| *it > 0.0 && *it <= 1.0))
    }

    fn object(&self, key: &str, known: &[&str]) -> Result<Self, DataError> {
        let keys = self.read(key, "an object", Value::as_object)?;
        Self::new(self.file, format!("{}.", self.key(key)), keys, known)
    }

    /// Rates by data type.
    fn processor(&self, key: &str) -> Result<Self, DataError> {
        let processor = self.object(key, &DATATYPES)?;
        for datatype in processor.keys.keys() {
            processor.object(datatype, &PROCESSOR)?;
        }
        Ok(processor)
    }

    /// Efficiency by size, each with the size from which it counts: a step from each to the next.
    fn curve<U: Unit>(&self, key: &str, scale: f64) -> Result<Curve<U>, DataError> {
        let pair = |pair: &Value| match pair.as_array()?.as_slice() {
            [from, reached] => number(from).zip(number(reached)),
            _ => None,
        };
        let steps = |value: &Value| {
            let steps: Vec<(f64, f64)> = value.as_array()?.iter().map(pair).collect::<Option<_>>()?;
            let falls = steps.windows(2).all(|pair| pair[1].0 < pair[0].0);
            let parts = steps.iter().all(|(_, reached)| *reached > 0.0 && *reached <= 1.0);
            (falls && parts && steps.last()?.0 == 0.0).then_some(steps)
        };
        let expected = "pairs of a size and a part from 0 to 1, the largest size first and 0 last";
        let mut steps = self.read(key, expected, steps)?;
        steps.reverse();
        let point = |size: f64, reached| Reached { size: Quantity::new(size * scale), reached };
        let mut points: Vec<_> = steps
            .windows(2)
            .flat_map(|pair| [point(pair[1].0, pair[0].1), point(pair[1].0, pair[1].1)])
            .collect();
        if let [(_, reached)] = steps[..] {
            points.push(point(1.0, reached));
        }
        Curve::try_from(points).map_err(|problem| DataError::new(self.file, &self.key(key), problem))
    }
}

fn wrong(file: &str, key: &str, expected: &str, found: Option<&Value>) -> DataError {
    let found = match found {
        None => "nothing".into(),
        Some(Value::Array(all)) => format!("a list of {}", all.len()),
        Some(Value::Object(_)) => "an object".into(),
        Some(value) => value.to_string(),
    };
    DataError::new(file, key, format!("expected {expected}, found {found}"))
}

/// A number that no product of a few makes infinite.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().filter(|it| *it == 0.0 || (1e-20..1e20).contains(it))
}

/// Reads a model. It has no embedding, head or loss: Calculon counts none.
pub(crate) fn model(file: &str, keys: &Map<String, Value>) -> Result<Model, DataError> {
    let model = Object::new(file, String::new(), keys, &MODEL)?;
    Ok(Model {
        title: "model of Calculon".into(),
        source: file.into(),
        hidden: model.count("hidden", MOST)?,
        layers: model.count("num_blocks", MOST_LAYERS)?,
        heads: model.count("attn_heads", MOST)?,
        kv_heads: None,
        head_width: Some(model.count("attn_size", MOST)?),
        feed_forward: Some(model.count("feedforward", MOST)?),
        gated: false,
        dropout: true,
        vocabulary: 0,
        tied: true,
        sequence: model.count("seq_size", MOST)?,
        experts: None,
    })
}

/// Reads a system: its first network joins a rack, its second the racks.
pub(crate) fn platform<'a>(file: &'a str, keys: &'a Map<String, Value>) -> Result<Platform, DataError> {
    let system = Object::new(file, String::new(), keys, &SYSTEM)?;
    let matrix = system.processor("matrix")?;
    if keys.contains_key("vector") {
        system.processor("vector")?;
    }
    let half = if matrix.keys.contains_key("bfloat16") { "bfloat16" } else { "float16" };
    let half = matrix.object(half, &PROCESSOR)?;
    let rate = |of: &Object<'_>| Ok(FlopRate::new(of.size("tflops")? * 1e12));
    let fp8 = matrix.keys.contains_key("float8");
    let fp8 = fp8.then(|| rate(&matrix.object("float8", &PROCESSOR)?)).transpose()?;
    let products = half.curve("gflops_efficiency", 1e9)?;
    let (near, far) = (system.object("mem1", &MEMORY)?, system.object("mem2", &MEMORY)?);
    let kernels = near.curve("MB_efficiency", 1e6)?;
    let in_turn = system.word("processing_mode", &[("roofline", false), ("no_overlap", true)])?;

    let few = |value: &'a Value| value.as_array().filter(|all| matches!(all.len(), 1 | 2));
    let networks = system.read("networks", "a list of one network or two", few)?;
    let network = |(index, value): (usize, &'a Value)| {
        let key = format!("networks[{index}]");
        let keys = value.as_object().ok_or_else(|| wrong(file, &key, "an object", Some(value)))?;
        fabric(&Object::new(file, format!("{key}."), keys, &NETWORK)?)
    };
    let mut networks = networks.iter().enumerate().map(network);
    let Some(inside) = networks.next() else { unreachable!("there is a network") };
    let ((accelerators, inside, inside_reached), between) = (inside?, networks.next().transpose()?);
    let fitted = Fitted {
        matrix: products.most(),
        depth: 0.0,
        // Calculon fuses no attention: it is taken to reach what large products do.
        attention: products.most(),
        stream: kernels.most(),
        launch: Time::new(0.0),
        inside: inside_reached,
        between: between.as_ref().map_or(1.0, |(_, _, reached)| *reached),
        straggle: 0.0,
    };
    let tier = |of: &Object<'_>, reached: f64| {
        let bandwidth = Bandwidth::new(of.size("GBps")? * 1e9 * reached);
        let capacity = Bytes::new(of.maybe_size("GiB")? * 1024f64.powi(3));
        Ok(Tier { capacity, read: bandwidth, write: bandwidth, latency: Time::new(0.0) })
    };
    let host = tier(&far, far.curve::<ByteUnit>("MB_efficiency", 1e6)?.most())?;
    let rack = Rack {
        accelerators,
        accelerator: Accelerator {
            name: "accelerator".into(),
            compute: Compute { bf16: Some(rate(&half)?), fp8, fp32: None },
            memory: tier(&near, 1.0)?,
            fitted,
            efficiency: Efficiency { matrix: Some(products), memory: Some(kernels), in_turn },
        },
        fabric: Some(inside),
        host: Host {
            accelerators: 1,
            memory: host,
            attach: Attach { kind: None, bandwidth: host.read, accelerators: 1 },
            tier: BTreeMap::new(),
        },
    };
    Ok(Platform {
        title: "system of Calculon".into(),
        source: file.into(),
        rack: BTreeMap::from([("calculon".into(), rack)]),
        between: between.map(|(_, fabric, _)| fabric),
        pool: None,
        server: BTreeMap::new(),
        sharing: None,
    })
}

/// A network: how many it joins, by what, and what part of its bandwidth is reached.
fn fabric(network: &Object<'_>) -> Result<(u32, Fabric, f64), DataError> {
    let size = network.count("size", MANY)?;
    let ops = network.object("ops", &OPS)?;
    let scalar = |value: &Value| match value.as_array()?.as_slice() {
        [scalar, _] => number(scalar).filter(|it| *it > 0.0),
        _ => None,
    };
    // Rings send everything twice, a switch that adds once.
    let reduction = match ops.read("all_reduce", "a list of a number above 0 and an offset", scalar)? < 1.5 {
        true => Reduction::InSwitch,
        false => Reduction::None,
    };
    let nothing = Time::new(0.0);
    let whole = Packet { bytes: Bytes::new(1.0), payload: Bytes::new(1.0) };
    let fabric = Fabric {
        links: 1,
        link: Link {
            rate: TransferRate::new(network.size("bandwidth")? * 8e9),
            lanes: 1,
            encoding: 1.0,
            flit: whole,
            packet: whole,
            propagation: nothing,
        },
        switch: Switch { ports: size, latency: nothing, reduction },
        topology: Topology::SingleHop,
        software: Software {
            message: nothing,
            step: nothing,
            call: Time::new(network.maybe_size("latency")?),
        },
        carries: vec![],
        pbr: None,
    };
    Ok((size, fabric, network.part("efficiency")?))
}

/// Reads an execution.
pub(crate) fn execution(file: &str, keys: &Map<String, Value>) -> Result<Execution, DataError> {
    let execution = Object::new(file, String::new(), keys, &EXECUTION)?;
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
        tier: FarTier::Host,
        weights: execution.flag("weight_offload")?,
        optimizer: execution.flag("optimizer_offload")?,
        activations: execution.flag("activations_offload")?,
    };
    // Says what is kept of the activation function; here its input and its output always are.
    execution.flag("fused_activation")?;
    Ok(Execution {
        accelerators,
        fill: fill(&execution, [tp, dp, pp])?,
        layout: Given {
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
fn fill(execution: &Object<'_>, degrees: [u32; 3]) -> Result<u32, DataError> {
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
