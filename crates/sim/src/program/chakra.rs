//! A step as PyTorch's `ExecutionTraceObserver` writes it: an execution trace of MLCommons Chakra in JSON. It says which operators ran on which
//! tensors; how long each takes follows from operations and bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use polder_platform::{DataError, files_of, recorded_text_of};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::given::GivenError;

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
    /// Collective calls, whose time is not predicted.
    pub collectives: u64,
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
            let problem = format!("expected a trace of PyTorch's ExecutionTraceObserver: {error}");
            DataError::new(name, &format!("line {}", error.line()), problem)
        })?;
        if !file.schema.contains("chakra") {
            let problem = format!(
                "expected a version of Chakra, as PyTorch 2.3 and later write, found {:?}",
                file.schema
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
        let mut found = vec![];
        for node in operators.values() {
            let is_inside = node.ctrl_deps.is_some_and(|caller| inside.contains(&caller));
            let is_product = node.flops(node.plain()).is_some();
            if is_inside || is_product {
                inside.insert(node.id);
            }
            let is_leaf = !parents.contains(&node.id) && !node.name.starts_with("c10d::");
            if !is_inside && (is_product || is_leaf) {
                found.push(node.operator());
            }
        }
        let is_collective = |node: &&Node| node.name == "record_param_comms";
        Ok(Self { operators: found, collectives: file.nodes.iter().filter(is_collective).count() as u64 })
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
            let it = names
                .entry(name)
                .or_insert_with(|| OperatorTime { name: name.clone(), ..OperatorTime::default() });
            it.count += 1;
            it.flops += flops;
            it.bytes += bytes;
            it.seconds += rates.launch_s + (flops / rates.flops_per_s).max(bytes / rates.bytes_per_s);
        }
        let mut operators: Vec<_> = names.into_values().collect();
        operators.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        TracedStep { total_s: operators.iter().map(|it| it.seconds).sum(), operators }
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
    }
}
