//! A step as PyTorch's `ExecutionTraceObserver` writes it: an execution trace of MLCommons Chakra in JSON. It says which operators ran on which
//! tensors; how long each takes follows from operations and bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use polder_platform::{DataError, Platform, files_of, in_words, quoted, recorded_text_of};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::contention::{FlitOptions, MOST_FLOWS};
use crate::fidelity::Fidelity;
use crate::given::GivenError;
use crate::step::cost::Pattern;
use crate::step::flows::{FollowedFlits, StepFlits};
use crate::step::job::Job;
use crate::step::layout::Refusal;

/// What the machine reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorRates {
    /// Operations a second of matrix products.
    pub flops_per_s: f64,
    /// Bytes a second that other operators read and write.
    pub bytes_per_s: f64,
    /// Seconds of an operator with nothing to do.
    pub launch_s: f64,
}

/// Operators of one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OperatorTime {
    /// The name.
    pub name: String,
    /// How many ran.
    pub count: u64,
    /// Their operations, of matrix products and convolutions.
    pub flops: f64,
    /// Bytes that they read and wrote.
    pub bytes: f64,
    /// What they take.
    pub seconds: f64,
}

/// A traced step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTrace {
    operators: Vec<Operator>,
    /// Collective calls, all of them.
    pub collectives: u64,
    /// Those of which the trace says what they move, and how often each ran.
    calls: BTreeMap<Call, u64>,
}

/// A collective call: its name, bytes that each rank gives, and ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    name: String,
    bytes: u64,
    ranks: u32,
}

/// What collective calls run over.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepFabric {
    /// The machine: a name, or the path of a file. The ranks of a call are its first accelerators.
    pub platform: String,
    /// Kind of rack; the first by name when left out.
    pub rack: Option<String>,
    /// How closely calls are looked at.
    #[serde(default)]
    pub fidelity: Fidelity,
    /// What flits need.
    #[serde(default)]
    pub flits: FlitOptions,
}

/// Collective calls that are alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveTime {
    /// As PyTorch names it.
    pub name: String,
    /// Bytes that each rank gives.
    pub bytes: u64,
    /// Ranks of its group.
    pub ranks: u32,
    /// How many ran.
    pub count: u64,
    /// What they take, all of them.
    pub seconds: f64,
}

/// The collective calls of a step over a fabric.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepCommunication {
    /// All that are predicted, one after another.
    pub total_s: f64,
    /// The longest first.
    pub calls: Vec<CollectiveTime>,
    /// Calls that are not predicted: of another kind, or of which the trace does not say what they move.
    pub left_out: u64,
    /// At L2, what of the calls of all ranks was followed flit by flit, calls that are alike once.
    pub flits: Option<StepFlits>,
}

/// Why collective calls cannot be predicted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepFabricError {
    /// A file is damaged.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The platform has no such fabric, or its flits cannot be followed.
    #[error("{platform}: {error}")]
    Refused {
        /// The machine.
        platform: String,
        /// Why not.
        error: Refusal,
    },
    /// Too many messages to follow each.
    #[error(
        "{call} of {ranks} ranks is {flows} flows, more than the {} that are followed; take fidelity L0",
        MOST_FLOWS
    )]
    TooLong {
        /// Its name.
        call: String,
        /// Of how many.
        ranks: u32,
        /// How many flows it is.
        flows: u64,
    },
}

impl Call {
    /// The transfer that it is, with its bytes as [`Pattern`] counts them.
    fn transfer(&self) -> Option<(Pattern, f64)> {
        let bytes = self.bytes as f64;
        let name = self.name.replace('_', "");
        Some(match name.as_str() {
            it if it.starts_with("allreduce") => (Pattern::AllReduce, bytes),
            it if it.starts_with("allgather") => (Pattern::Half, bytes * f64::from(self.ranks)),
            it if it.starts_with("reducescatter") => (Pattern::Half, bytes),
            it if it.starts_with("alltoall") => (Pattern::AllToAll, bytes),
            _ => return None,
        })
    }

    /// Refuses what is too much to follow.
    fn check(&self, fidelity: Fidelity) -> Result<(), StepFabricError> {
        let Self { name, ranks, .. } = self;
        let flows = u64::from(*ranks) * u64::from(ranks.saturating_sub(1));
        let is_spread = matches!(self.transfer(), Some((Pattern::AllToAll, _)));
        match is_spread && fidelity != Fidelity::L0 && flows > MOST_FLOWS {
            true => Err(StepFabricError::TooLong { call: name.clone(), ranks: *ranks, flows }),
            false => Ok(()),
        }
    }
}

impl StepFabric {
    /// Seconds of each of these calls for which a transfer stands, and what was followed. Their flits are counted together before any is followed.
    fn seconds<'a>(
        &self,
        calls: impl Iterator<Item = &'a Call>,
    ) -> Result<(BTreeMap<&'a Call, f64>, Option<StepFlits>), StepFabricError> {
        let platform = Platform::load(&self.platform)?;
        let refused = |error| StepFabricError::Refused { platform: self.platform.clone(), error };
        let job = Job::chosen(&platform, self.rack.as_deref(), None, None)
            .and_then(|job| job.with_fidelity(self.fidelity, self.flits))
            .map_err(refused)?;
        let (mut seconds, mut groups) = (BTreeMap::new(), BTreeMap::<_, BTreeMap<_, _>>::new());
        for call in calls {
            let Some(transfer) = call.transfer() else { continue };
            if call.ranks < 2 || call.bytes == 0 {
                seconds.insert(call, 0.0);
                continue;
            }
            call.check(self.fidelity)?;
            groups.entry(call.ranks).or_default().insert(call, transfer);
        }
        let followed = FollowedFlits::default();
        let job = job.sharing(&followed);
        let mut price = || {
            for (ranks, calls) in &groups {
                let transfers: Vec<_> = calls.values().copied().collect();
                seconds.extend(calls.keys().copied().zip(job.collectives(*ranks, &transfers)?));
            }
            Ok::<_, Refusal>(())
        };
        price().map_err(refused)?;
        if self.fidelity == Fidelity::L2 {
            followed.begin(self.flits.window_bytes).map_err(|error| refused(error.into()))?;
            price().map_err(refused)?;
        }
        let flits = (self.fidelity == Fidelity::L2).then(|| followed.all(self.flits.window_bytes));
        Ok((seconds, flits))
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Operator {
    name: String,
    flops: f64,
    bytes: f64,
}

/// A predicted step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TracedStep {
    /// All operators, one after another.
    pub total_s: f64,
    /// By name, the longest first.
    pub operators: Vec<OperatorTime>,
}

#[derive(Deserialize)]
struct File {
    schema: String,
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: u64,
    name: String,
    ctrl_deps: Option<u64>,
    inputs: Tensors,
    outputs: Tensors,
    #[serde(default)]
    attrs: Vec<Attribute>,
}

#[derive(Deserialize)]
struct Attribute {
    name: String,
    value: Value,
}

#[derive(Deserialize)]
struct Tensors {
    shapes: Vec<Value>,
    types: Vec<String>,
}

impl OperatorRates {
    /// Whether a machine can have them.
    ///
    /// # Errors
    /// When a rate is not above 0, or a launch below it.
    pub fn check(&self) -> Result<(), GivenError> {
        GivenError::expect_above_zero("compute", self.flops_per_s)?;
        GivenError::expect_above_zero("memory", self.bytes_per_s)?;
        match self.launch_s >= 0.0 && self.launch_s.is_finite() {
            true => Ok(()),
            false => {
                let problem = format!("expected a number from 0 on, found {}", self.launch_s);
                Err(GivenError::new("launch", problem))
            }
        }
    }
}

impl StepTrace {
    /// Reads the traces of all ranks of a folder, each with the name of its file.
    ///
    /// # Errors
    /// When the folder has none, or one is no trace.
    pub fn load(folder: &Path) -> Result<Vec<(String, Self)>, DataError> {
        let remedy = "no file .json: register a file of it with torch.profiler.ExecutionTraceObserver, see docs/plan-programs.md";
        let read = |name: String| {
            let trace = Self::read(&name, &recorded_text_of(&name)?)?;
            Ok((name, trace))
        };
        files_of(folder, |name| name.ends_with(".json"), remedy)?.into_iter().map(read).collect()
    }

    /// Reads a trace.
    ///
    /// # Errors
    /// When the text is no trace of PyTorch.
    pub fn read(name: &str, text: &str) -> Result<Self, DataError> {
        let file: File = serde_json::from_str(text).map_err(|error| {
            let error_text = in_words(&error.to_string());
            let problem = format!("expected a trace of PyTorch's ExecutionTraceObserver: {error_text}");
            DataError::new(name, &format!("line {}", error.line()), problem)
        })?;
        if !file.schema.contains("chakra") {
            let problem = format!(
                "expected a version of Chakra, as PyTorch 2.3 and later write, found \"{}\"",
                quoted(&file.schema)
            );
            return Err(DataError::new(name, "schema", problem));
        }
        let schemas = |node: &Node| {
            node.attrs
                .iter()
                .any(|it| it.name == "op_schema" && it.value.as_str().is_some_and(|it| !it.is_empty()))
        };
        // Only operators have a schema. One that calls others does nothing itself.
        let operators: BTreeMap<u64, &Node> =
            file.nodes.iter().filter(|node| schemas(node)).map(|node| (node.id, node)).collect();
        let parents: BTreeSet<u64> = operators.values().filter_map(|node| node.ctrl_deps).collect();
        // What a product calls is part of it. Callers have lower ids than what they call.
        let mut inside = BTreeSet::new();
        let mut operations = vec![];
        for node in operators.values() {
            let is_inside = node.ctrl_deps.is_some_and(|caller| inside.contains(&caller));
            let is_product = node.flops(node.plain()).is_some();
            if is_inside || is_product {
                inside.insert(node.id);
            }
            let is_leaf = !parents.contains(&node.id) && !node.name.starts_with("c10d::");
            if !is_inside && (is_product || is_leaf) {
                operations.push(node.operator());
            }
        }
        let collectives: Vec<_> = file.nodes.iter().filter(|it| it.name == "record_param_comms").collect();
        let mut calls = BTreeMap::new();
        for call in collectives.iter().filter_map(|it| it.call()) {
            *calls.entry(call).or_default() += 1;
        }
        Ok(Self { operators: operations, collectives: collectives.len() as u64, calls })
    }

    /// What the collective calls of each rank take over a fabric, each with nothing beside it. Calls that are alike are looked at once.
    ///
    /// # Errors
    /// When the platform has no such fabric, or a call cannot be followed.
    pub fn communication(
        ranks: &[&Self],
        on: &StepFabric,
    ) -> Result<Vec<StepCommunication>, StepFabricError> {
        let (seconds, flits) = on.seconds(ranks.iter().flat_map(|it| it.calls.keys()))?;
        let taking = |rank: &&Self| StepCommunication { flits, ..rank.taking(&seconds) };
        Ok(ranks.iter().map(taking).collect())
    }

    /// Its collective calls, each of which takes so many seconds.
    fn taking(&self, seconds: &BTreeMap<&Call, f64>) -> StepCommunication {
        let mut taken = StepCommunication::default();
        for (call, count) in &self.calls {
            let Some(each) = seconds.get(call) else { continue };
            let Call { name, bytes, ranks } = call.clone();
            let seconds = each * *count as f64;
            taken.total_s += seconds;
            taken.calls.push(CollectiveTime { name, bytes, ranks, count: *count, seconds });
        }
        taken.calls.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        taken.left_out = self.collectives - taken.calls.iter().map(|it| it.count).sum::<u64>();
        taken
    }

    /// The names of its operators, with those that ran several times.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.operators.iter().map(|it| it.name.as_str())
    }

    /// What the step takes: each operator the longer of its operations and its bytes, and its launch.
    #[must_use]
    pub fn step(&self, rates: OperatorRates) -> TracedStep {
        let mut names: BTreeMap<&str, OperatorTime> = BTreeMap::new();
        for Operator { name, flops, bytes } in &self.operators {
            let time = names
                .entry(name)
                .or_insert_with(|| OperatorTime { name: name.clone(), ..OperatorTime::default() });
            time.count += 1;
            time.flops += flops;
            time.bytes += bytes;
            time.seconds += rates.launch_s + (flops / rates.flops_per_s).max(bytes / rates.bytes_per_s);
        }
        let mut operators: Vec<_> = names.into_values().collect();
        operators.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        // A sum of nothing is -0.0.
        TracedStep { total_s: operators.iter().fold(0.0, |sum, it| sum + it.seconds), operators }
    }
}

/// Operators that only look at a tensor in another way, or take memory.
const VIEWS: [&str; 28] = [
    "view",
    "_unsafe_view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "expand",
    "as_strided",
    "select",
    "slice",
    "narrow",
    "squeeze",
    "unsqueeze",
    "detach",
    "detach_",
    "alias",
    "split",
    "unbind",
    "empty",
    "empty_like",
    "empty_strided",
    "_reshape_alias",
    "resize_",
    "set_",
    "resolve_conj",
    "resolve_neg",
    "broadcast_tensors",
    "expand_as",
];

impl Node {
    /// The name without its library's.
    fn plain(&self) -> &str {
        self.name.strip_prefix("aten::").unwrap_or(&self.name)
    }

    fn operator(&self) -> Operator {
        let plain = self.plain();
        let bytes = if VIEWS.contains(&plain) { 0.0 } else { self.inputs.bytes() + self.outputs.bytes() };
        Operator { name: self.name.clone(), flops: self.flops(plain).unwrap_or(0.0), bytes }
    }

    /// A collective call, if its attributes say what it moves.
    fn call(&self) -> Option<Call> {
        let of = |name: &str| self.attrs.iter().find(|it| it.name == name).map(|it| &it.value);
        let count = |name: &str| of(name)?.as_u64();
        let each = match of("dtype")?.as_str()? {
            "Double" | "Long" => 8,
            "Float" | "Int" => 4,
            "Half" | "BFloat16" | "Short" => 2,
            "Byte" | "Char" | "Bool" => 1,
            _ => return None,
        };
        let bytes = count("in_msg_nelems")?.checked_mul(each)?;
        let ranks = count("pg_size")?.try_into().ok()?;
        Some(Call { name: of("collective_name")?.as_str()?.into(), bytes, ranks })
    }

    /// Two operations for each product.
    fn flops(&self, name: &str) -> Option<f64> {
        let of = |index| self.inputs.shape(index);
        Some(match name {
            "mm" | "bmm" => 2.0 * count(&of(0)?) * of(1)?.last()?,
            "addmm" | "addmm_" | "baddbmm" => 2.0 * count(&of(1)?) * of(2)?.last()?,
            "linear" | "mkldnn_linear" => 2.0 * count(&of(0)?) * of(1)?.first()?,
            "convolution"
            | "_convolution"
            | "mkldnn_convolution"
            | "thnn_conv2d"
            | "_slow_conv2d_forward" => 2.0 * count(&self.outputs.shape(0)?) * count(of(1)?.get(1..)?),
            // Of the input and of the weights; the first input is the gradient of the output.
            "convolution_backward" => 4.0 * count(&of(0)?) * count(of(2)?.get(1..)?),
            "_scaled_dot_product_flash_attention_for_cpu" => 4.0 * count(&of(0)?) * of(1)?.get(2)?,
            _ => return None,
        })
    }
}

fn count(shape: &[f64]) -> f64 {
    shape.iter().product()
}

impl Tensors {
    /// The shape of a tensor.
    fn shape(&self, index: usize) -> Option<Vec<f64>> {
        self.types.get(index).filter(|kind| kind.starts_with("Tensor("))?;
        self.shapes.get(index)?.as_array()?.iter().map(Value::as_f64).collect()
    }

    fn bytes(&self) -> f64 {
        self.types.iter().zip(&self.shapes).map(|(kind, shape)| bytes(kind, shape)).sum()
    }
}

/// Bytes of a tensor, or of a list of tensors.
fn bytes(kind: &str, shape: &Value) -> f64 {
    let Some(shapes) = shape.as_array() else { return 0.0 };
    if let Some(inside) = kind.strip_prefix("GenericList[").and_then(|it| it.strip_suffix(']')) {
        return inside.split(',').zip(shapes).map(|(kind, shape)| bytes(kind, shape)).sum();
    }
    let Some(element) = kind.strip_prefix("Tensor(").and_then(|it| it.strip_suffix(')')) else { return 0.0 };
    let each = match element {
        "double" | "long int" | "long" | "c10::complex<float>" => 8.0,
        "float" | "int" => 4.0,
        "c10::Half" | "c10::BFloat16" | "short int" | "short" => 2.0,
        "bool" | "unsigned char" | "signed char" => 1.0,
        _ => 0.0,
    };
    each * shapes.iter().filter_map(Value::as_f64).product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = r#"{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [
        {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1,
         "inputs": {"values": [], "shapes": [], "types": []}, "outputs": {"values": [], "shapes": [], "types": []}, "attrs": []},
        {"id": 5, "name": "aten::wrapped", "ctrl_deps": 1,
         "inputs": {"values": [], "shapes": [[2, 3], [4, 3]], "types": ["Tensor(float)", "Tensor(float)"]},
         "outputs": {"values": [], "shapes": [[2, 4]], "types": ["Tensor(float)"]},
         "attrs": [{"name": "op_schema", "type": "string", "value": "wrapped(...)"}]},
        {"id": 6, "name": "aten::t", "ctrl_deps": 5,
         "inputs": {"values": [], "shapes": [[4, 3]], "types": ["Tensor(float)"]},
         "outputs": {"values": [], "shapes": [[3, 4]], "types": ["Tensor(float)"]},
         "attrs": [{"name": "op_schema", "type": "string", "value": "aten::t(...)"}]},
        {"id": 7, "name": "aten::addmm", "ctrl_deps": 5,
         "inputs": {"values": [], "shapes": [[4], [2, 3], [3, 4], []], "types": ["Tensor(float)", "Tensor(float)", "Tensor(float)", "Int"]},
         "outputs": {"values": [], "shapes": [[2, 4]], "types": ["Tensor(float)"]},
         "attrs": [{"name": "op_schema", "type": "string", "value": "aten::addmm(...)"}]}]}"#;

    #[test]
    fn an_operator_that_calls_others_counts_by_them() {
        let found = StepTrace::read("step.json", TRACE).unwrap();
        let rates = OperatorRates { flops_per_s: 48.0, bytes_per_s: 1e9, launch_s: 0.5 };
        let step = found.step(rates);
        assert_eq!(
            step.operators.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(),
            ["aten::addmm", "aten::t"]
        );
        assert_eq!(step.operators[0].flops, 2.0 * 2.0 * 3.0 * 4.0);
        assert_eq!(step.operators[0].bytes, 4.0 * (4.0 + 6.0 + 12.0 + 8.0));
        assert_eq!((step.operators[1].bytes, step.total_s), (0.0, 2.0));
    }

    /// A trace with collective calls among so many ranks.
    fn calling(ranks: u32, calls: &[(&str, u64)]) -> StepTrace {
        let none = serde_json::json!({"values": [], "shapes": [], "types": []});
        let node = |(id, (name, count)): (usize, &(&str, u64))| {
            let attribute =
                |name: &str, value: Value| serde_json::json!({"name": name, "type": "", "value": value});
            let attrs = [
                attribute("collective_name", (*name).into()),
                attribute("dtype", "Float".into()),
                attribute("in_msg_nelems", (*count).into()),
                attribute("pg_size", ranks.into()),
            ];
            serde_json::json!({
                "id": id + 2, "name": "record_param_comms", "ctrl_deps": 1, "inputs": none, "outputs": none, "attrs": attrs,
            })
        };
        let nodes: Vec<_> = calls.iter().enumerate().map(node).collect();
        let file = serde_json::json!({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes});
        StepTrace::read("step.json", &file.to_string()).unwrap()
    }

    fn over(trace: &StepTrace, platform: &str, fidelity: Fidelity) -> StepCommunication {
        let (platform, flits) = (platform.into(), FlitOptions::default());
        let on = StepFabric { platform, rack: None, fidelity, flits };
        StepTrace::communication(&[trace], &on).unwrap().remove(0)
    }

    #[test]
    fn collective_calls_take_the_same_at_each_fidelity_where_they_share_no_links() {
        let alike = calling(
            8,
            &[
                ("allreduce", 65536),
                ("allreduce", 65536),
                ("_allgather_base", 8192),
                ("alltoall_base", 1 << 20),
                ("broadcast", 1),
            ],
        );
        let [alone, flows, flits] = Fidelity::ALL.map(|it| over(&alike, "nvl72-ndr", it));
        for found in [&alone, &flows, &flits] {
            assert_eq!((found.calls.len(), found.left_out), (3, 1), "{found:?}");
            for (call, same) in found.calls.iter().zip(&alone.calls) {
                assert!((call.seconds / same.seconds - 1.0).abs() < 0.02, "{same:?} {call:?}");
            }
        }
    }

    /// The formulas of docs/plan-model.md, "Collectives", by hand: in one rack, and in two.
    #[test]
    fn a_collective_call_takes_what_the_formulas_of_a_step_say() {
        let platform = Platform::load("nvl72-ndr").unwrap();
        let rack = &platform.rack["nvl72"];
        let fitted = &rack.accelerator.fitted;
        let scopes = [(rack.fabric.as_ref(), fitted.inside), (platform.between.as_ref(), fitted.between)]
            .map(|(fabric, reached)| {
                let fabric = fabric.unwrap();
                let software = &fabric.software;
                let alpha = fabric.latency().value() + software.step.value();
                (fabric.payload().value() * reached, alpha, software.message.value(), software.call.value())
            });
        for (inside, between) in [(2_u32, 1_u32), (72, 2)] {
            let ranks = inside * between;
            let (n, i, r) = (f64::from(ranks), f64::from(inside), f64::from(between));
            let bytes = 4.0 * 65536.0;
            let ring = |(bandwidth, alpha, _, call): (f64, f64, f64, f64), of: f64, bytes: f64| match of > 1.0
            {
                true => (of - 1.0) * (bytes / of / bandwidth + alpha) + call,
                false => 0.0,
            };
            let spread =
                |(bandwidth, alpha, message, call): (f64, f64, f64, f64), peers: f64| match peers > 0.0 {
                    true => peers * bytes / n / bandwidth + alpha + (peers - 1.0) * message + call,
                    false => 0.0,
                };
            let [near, far] = scopes;
            let half = |whole: f64| ring(near, i, whole) + ring(far, r, whole / i);
            let calls = [
                ("reduce_scatter_tensor", half(bytes)),
                ("_allgather_base", half(bytes * n)),
                ("all_to_all", spread(near, i - 1.0) + spread(far, n - i)),
            ];
            for (name, expected) in calls {
                let found = over(&calling(ranks, &[(name, 65536)]), "nvl72-ndr", Fidelity::L0).total_s;
                assert!((found / expected - 1.0).abs() < 1e-9, "{name} of {ranks}: {found} {expected}");
            }
        }
    }

    /// Calls of groups of any size count together.
    #[test]
    fn the_flits_of_all_calls_are_refused_together() {
        let on = StepFabric {
            platform: "nvl72-ndr".into(),
            rack: None,
            fidelity: Fidelity::L2,
            flits: FlitOptions::default(),
        };
        let of = |ranks, count| calling(ranks, &[("reduce_scatter_tensor", count)]);
        // Each takes more than is followed.
        let [one, other] = [of(8, 26_000_000_000), of(4, 26_000_000_000)];
        let hops = |traces: &[&StepTrace]| {
            let error = StepTrace::communication(traces, &on).unwrap_err().to_string();
            let (_, rest) = error.split_once("flit by flit it takes ").unwrap_or_else(|| panic!("{error}"));
            rest.split_once(" flit-hops").unwrap().0.parse::<u64>().unwrap()
        };
        let [first, second, both] = [&[&one][..], &[&other], &[&one, &one, &other]].map(hops);
        assert_eq!(both, first + second);
    }

    #[test]
    fn an_all_to_all_of_too_many_is_refused_before_its_flows_are_made() {
        let (platform, flits) = ("nvl72-ndr".into(), FlitOptions::default());
        let on = StepFabric { platform, rack: None, fidelity: Fidelity::L1, flits };
        let error = StepTrace::communication(&[&calling(7200, &[("alltoall", 7200)])], &on).unwrap_err();
        assert!(
            error.to_string().starts_with("alltoall of 7200 ranks is 51832800 flows, more than"),
            "{error}"
        );
        let step = calling(2, &[]).step(OperatorRates { flops_per_s: 1.0, bytes_per_s: 1.0, launch_s: 0.0 });
        assert!(step.total_s.is_sign_positive());
    }

    #[test]
    fn a_list_of_tensors_has_the_bytes_of_all() {
        let shape = serde_json::json!([[2, 3], [5]]);
        assert_eq!(bytes("GenericList[Tensor(float),Tensor(double)]", &shape), 24.0 + 40.0);
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        let error = StepTrace::read("a.json", "{\"nodes\": 3}").unwrap_err().to_string();
        assert!(error.starts_with("a.json: line 1: expected a trace of PyTorch's"), "{error}");
        let old = TRACE.replace("1.1.1-chakra.0.0.4", "1.0.1");
        let error = StepTrace::read("a.json", &old).unwrap_err().to_string();
        assert!(error.starts_with("a.json: schema: expected a version of Chakra"), "{error}");
        let long = "x".repeat(1 << 20);
        for text in [
            format!("\"{long}\""),
            format!("{{\"nodes\": \"{long}\"}}"),
            TRACE.replace("1.1.1-chakra.0.0.4", &long),
        ] {
            let error = StepTrace::read("a.json", &text).unwrap_err().to_string();
            assert!(error.len() < 500, "{} bytes", error.len());
        }
    }
}
