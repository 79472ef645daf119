//! A step as PyTorch's `ExecutionTraceObserver` writes it: an execution trace of MLCommons Chakra in JSON. It says which operators ran on which
//! tensors; how long each takes follows from operations and bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use polder_platform::{DataError, Platform, files_of, in_words, printable, quoted, recorded_text_of};
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
    /// Seconds of an all-reduce of so many bytes by so many ranks, as that of a training step, and what was followed.
    ///
    /// # Errors
    /// When the platform has no such fabric, or it cannot be followed.
    pub fn all_reduce(&self, ranks: u32, bytes: u64) -> Result<(f64, Option<StepFlits>), StepFabricError> {
        let call = Call { name: "allreduce".into(), bytes, ranks };
        let (seconds, flits) = self.seconds(std::iter::once(&call))?;
        Ok((seconds[&call], flits))
    }

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
    /// What is no tensor is said here.
    #[serde(default)]
    values: Vec<Value>,
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
            if trace.operators.is_empty() && trace.collectives == 0 {
                let problem =
                    "expected operators, each with an op_schema, found none; observe a step that runs some";
                return Err(DataError::new(&name, "nodes", problem));
            }
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
        let mut ids = BTreeSet::new();
        if let Some(twice) = file.nodes.iter().find(|node| !ids.insert(node.id)) {
            let problem = "expected an id of its own, found that of another node";
            return Err(DataError::new(name, &format!("node {}", twice.id), problem));
        }
        let schemas = |node: &Node| {
            node.attrs.iter().any(|attribute| {
                attribute.name == "op_schema" && attribute.value.as_str().is_some_and(|text| !text.is_empty())
            })
        };
        // Only operators have a schema. One that calls others counts by them, unless they are its helpers alone.
        let operators: BTreeMap<u64, &Node> =
            file.nodes.iter().filter(|node| schemas(node)).map(|node| (node.id, node)).collect();
        for node in operators.values() {
            node.check().map_err(|problem| DataError::new(name, &format!("node {}", node.id), problem))?;
        }
        let mut called: BTreeMap<u64, CalledTotals> = BTreeMap::new();
        // Callers have lower ids than what they call.
        for node in operators.values().rev() {
            let own = called.get(&node.id).copied().unwrap_or_default();
            if let Some(caller) = node.ctrl_deps {
                called.entry(caller).or_default().add(node, own);
            }
        }
        // What an operator calls that does its work itself is part of it.
        let mut inside = BTreeSet::new();
        let mut operations = vec![];
        for node in operators.values() {
            let is_inside = node.ctrl_deps.is_some_and(|caller| inside.contains(&caller));
            let works = called.get(&node.id).is_none_or(|called| node.has_own_work(*called));
            if is_inside || works {
                inside.insert(node.id);
            }
            if !is_inside && works && !node.name.starts_with("c10d::") {
                operations.push(node.operator());
            }
        }
        let collectives: Vec<_> =
            file.nodes.iter().filter(|node| node.name == "record_param_comms").collect();
        let mut calls = BTreeMap::new();
        for call in collectives.iter().filter_map(|node| node.call()) {
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
const VIEWS: &str = "_coalesced_ _conj _has_compatible_shallow_copy_type _indices _neg_view _nnz _reshape_alias \
    _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors _unsafe_view _values adjoint alias as_strided as_strided_ \
    broadcast_tensors broadcast_to chunk conj data dense_dim detach detach_ diagonal empty empty_like empty_strided expand \
    expand_as flatten hsplit imag indices is_coalesced is_pinned is_same_size lift lift_fresh mT matrix_H movedim moveaxis narrow \
    new_empty new_empty_strided numel numpy_T permute ravel real record_stream requires_grad_ reshape reshape_as resize_ \
    resize_as_ resolve_conj resolve_neg result_type select set_ size slice sparse_dim split split_with_sizes squeeze squeeze_ \
    stride swapaxes swapdims t t_ tensor_split transpose transpose_ unbind unflatten unfold unsafe_chunk unsafe_split \
    unsafe_split_with_sizes unsqueeze unsqueeze_ values view view_as view_as_complex view_as_real vsplit";

/// Operators that look into a sparse tensor or make one. The shapes around them are those of the dense tensor that it stands for.
const SPARSE: &str =
    "_indices _nnz _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors _values indices values";

/// Fused attention over [sequences, heads, tokens, width].
const ATTENTION: [&str; 4] = [
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
];

/// Products of matrices besides fused attention.
const PRODUCTS: &str = "_addmm_activation _convolution _cudnn_rnn _cudnn_rnn_backward _efficient_attention_backward \
    _efficient_attention_forward _flash_attention_backward _flash_attention_forward _grouped_mm _int_mm _scaled_grouped_mm _scaled_mm \
    _slow_conv2d_forward addmm addmm_ baddbmm bmm convolution convolution_backward linear miopen_rnn miopen_rnn_backward \
    mkldnn_convolution mkldnn_linear mkldnn_rnn_layer mkldnn_rnn_layer_backward mm thnn_conv2d";

fn is_among(words: &str, name: &str) -> bool {
    words.split_ascii_whitespace().any(|word| word == name)
}

/// What an operator calls, all together.
#[derive(Clone, Copy, Default)]
struct CalledTotals {
    bytes: f64,
    has_product: bool,
    is_sparse: bool,
}

impl CalledTotals {
    /// One more, which calls these in its turn.
    fn add(&mut self, node: &Node, own: Self) {
        let plain = node.plain();
        self.bytes += own.bytes.max(node.operator().bytes);
        self.has_product |= own.has_product || node.flops(plain).is_some();
        self.is_sparse |= own.is_sparse || is_among(SPARSE, plain);
    }
}

impl Node {
    /// The name without its library's.
    fn plain(&self) -> &str {
        self.name.strip_prefix("aten::").unwrap_or(&self.name)
    }

    /// Whether its caller is known by then, its tensors are such, and a product has the sides that it takes.
    fn check(&self) -> Result<(), String> {
        if let Some(caller) = self.ctrl_deps.filter(|caller| *caller >= self.id) {
            return Err(format!("expected a caller with a lower id, found {caller}"));
        }
        let of = |side: &str, tensors: &Tensors| {
            tensors.check().map_err(|problem| format!("{}: {side}: {problem}", printable(&self.name)))
        };
        of("inputs", &self.inputs)?;
        of("outputs", &self.outputs)?;
        match self.flops(self.plain()).is_some_and(f64::is_nan) {
            true => Err(format!("{}: inputs: expected the shapes of a product", printable(&self.name))),
            false => Ok(()),
        }
    }

    /// Whether it does its work itself, beside what it calls: a product, and an operator of whose largest side that moves less than half.
    fn has_own_work(&self, called: CalledTotals) -> bool {
        let plain = self.plain();
        let side = self.inputs.bytes().max(self.outputs.bytes());
        let moves = !is_among(VIEWS, plain) && !called.is_sparse && 2.0 * called.bytes < side;
        self.flops(plain).is_some() || moves && !called.has_product
    }

    fn operator(&self) -> Operator {
        let plain = self.plain();
        let bytes = if is_among(VIEWS, plain) { 0.0 } else { self.inputs.bytes() + self.outputs.bytes() };
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

    /// Two operations for each product; no number where the trace has not its sides.
    fn flops(&self, name: &str) -> Option<f64> {
        is_product(name).then(|| self.products(name).unwrap_or(f64::NAN))
    }

    fn products(&self, name: &str) -> Option<f64> {
        let of = |index| self.inputs.shape(index);
        Some(match name {
            "mm" | "bmm" | "_scaled_mm" | "_grouped_mm" | "_scaled_grouped_mm" | "_int_mm" => {
                2.0 * count(&of(0)?) * of(1)?.last()?
            }
            "addmm" | "addmm_" | "_addmm_activation" | "baddbmm" => 2.0 * count(&of(1)?) * of(2)?.last()?,
            "linear" | "mkldnn_linear" => 2.0 * count(&of(0)?) * of(1)?.first()?,
            // Each weight of an output meets each of its elements; of a transposed one, each of an input.
            "convolution" | "_convolution" if self.inputs.says(6) => {
                2.0 * count(&of(0)?) * count(of(1)?.get(1..)?)
            }
            "convolution"
            | "_convolution"
            | "mkldnn_convolution"
            | "thnn_conv2d"
            | "_slow_conv2d_forward" => 2.0 * count(&self.outputs.shape(0)?) * count(of(1)?.get(1..)?),
            // Of the input and of the weights, if both are asked for; the first input is the gradient of the output.
            "convolution_backward" => {
                let met = if self.inputs.says(7) { of(1)? } else { of(0)? };
                let asked = self.inputs.values.get(10).and_then(Value::as_array);
                let gradients =
                    asked.map_or(2, |all| all.iter().take(2).filter(|it| **it != Value::Bool(false)).count());
                2.0 * gradients as f64 * count(&met) * count(of(2)?.get(1..)?)
            }
            // Matrices of a layer, of the input and of the state, take each token once; backward their gradients too.
            "mkldnn_rnn_layer" => 2.0 * self.tokens()? * (count(&of(1)?) + count(&of(2)?)),
            "mkldnn_rnn_layer_backward" => 4.0 * self.tokens()? * (count(&of(1)?) + count(&of(2)?)),
            "_cudnn_rnn" | "miopen_rnn" => 2.0 * self.tokens()? * self.inputs.matrices(1)?,
            "_cudnn_rnn_backward" | "miopen_rnn_backward" => {
                4.0 * self.tokens()? * self.inputs.matrices(1)?
            }
            // Tokens come before heads.
            "_flash_attention_forward" => self.packed_attention([0, 1, 2], 4, 6)?,
            "_efficient_attention_forward" => self.packed_attention([0, 1, 2], 5, 7)?,
            "_flash_attention_backward" | "_efficient_attention_backward" => {
                2.5 * self.packed_attention([1, 2, 3], 7, 9)?
            }
            _ if ATTENTION.contains(&name) => self.attention([0, 1, 2], tokens_at(2))?,
            // Five products where forward takes two (Dao, 2023). The first input is the gradient of the output.
            _ if name.strip_suffix("_backward").is_some_and(|it| ATTENTION.contains(&it)) => {
                2.5 * self.attention([1, 2, 3], tokens_at(2))?
            }
            _ => return None,
        })
    }

    /// Scores and what they weigh, of these queries, keys and values, as if each token looked at so many of these keys.
    fn attention(&self, inputs: [usize; 3], seen: impl Fn(&[f64]) -> Option<f64>) -> Option<f64> {
        let [queries, keys, values] = inputs.map(|index| self.inputs.shape(index));
        let (queries, keys, values) = (queries?, keys?, values?);
        let rows = count(&queries) / queries.last()?;
        Some(2.0 * rows * seen(&keys)? * (queries.last()? + values.last()?))
    }

    /// The same over tokens before heads. Sequences may lie one behind another: then a tensor says where their keys start, and a number how
    /// many tokens the longest has, beyond which no token looks.
    fn packed_attention(&self, inputs: [usize; 3], starts: usize, longest: usize) -> Option<f64> {
        let is_packed = self.inputs.shape(inputs[0])?.len() == 3
            || self.inputs.shape(starts).is_some_and(|shape| !shape.is_empty() && count(&shape) > 1.0);
        match is_packed {
            true => self.attention(inputs, |_| self.inputs.values.get(longest)?.as_f64()),
            false => self.attention(inputs, tokens_at(1)),
        }
    }

    /// Tokens of the first input, whose last side is a width.
    fn tokens(&self) -> Option<f64> {
        let shape = self.inputs.shape(0)?;
        Some(count(&shape) / shape.last()?)
    }
}

/// Tokens of keys that have them at this place.
fn tokens_at(place: usize) -> impl Fn(&[f64]) -> Option<f64> {
    move |keys| keys.get(place).copied()
}

/// Whether an operator is a product of matrices.
fn is_product(name: &str) -> bool {
    let forward = name.strip_suffix("_backward").unwrap_or(name);
    is_among(PRODUCTS, name) || ATTENTION.contains(&forward)
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

    /// Whether an argument is true.
    fn says(&self, index: usize) -> bool {
        self.values.get(index) == Some(&Value::Bool(true))
    }

    /// Elements of the matrices in a list of tensors.
    fn matrices(&self, index: usize) -> Option<f64> {
        let shapes = self.shapes.get(index)?.as_array()?.iter().filter_map(Value::as_array);
        let matrices = shapes.filter(|shape| shape.len() == 2);
        Some(matrices.map(|shape| shape.iter().filter_map(Value::as_f64).product::<f64>()).sum())
    }

    fn bytes(&self) -> f64 {
        self.types.iter().zip(&self.shapes).map(|(kind, shape)| bytes(kind, shape)).sum()
    }

    /// Whether each tensor is of a known type, with sides that are whole numbers.
    fn check(&self) -> Result<(), String> {
        match self.types.len() == self.shapes.len() {
            true => self.types.iter().zip(&self.shapes).try_for_each(|(kind, shape)| check(kind, shape)),
            false => {
                Err(format!("expected {} shapes, as types, found {}", self.types.len(), self.shapes.len()))
            }
        }
    }
}

/// Elements of a tensor at most: so many are counted one by one in 64-bit floats.
const MOST_ELEMENTS: f64 = 9_007_199_254_740_992.0;

fn check(kind: &str, shape: &Value) -> Result<(), String> {
    let wrong = |expected: &str| Err(format!("expected {expected}, found {}", quoted(&shape.to_string())));
    if let Some(inside) = kind.strip_prefix("GenericList[").and_then(|it| it.strip_suffix(']')) {
        let kinds = inside.split(',');
        return match shape.as_array() {
            Some(shapes) => kinds.zip(shapes).try_for_each(|(kind, shape)| check(kind, shape)),
            None => wrong("a list of shapes"),
        };
    }
    let Some(element) = kind.strip_prefix("Tensor(").and_then(|it| it.strip_suffix(')')) else {
        return Ok(());
    };
    if element_bytes(element).is_none() {
        return Err(format!("expected a tensor of a known type, found {}", quoted(element)));
    }
    let sides: Option<Vec<_>> = shape
        .as_array()
        .and_then(|sides| sides.iter().map(|side| side.as_u64().map(|it| it as f64)).collect());
    match sides.is_some_and(|sides| count(&sides) <= MOST_ELEMENTS) {
        true => Ok(()),
        false => wrong("the sides of a tensor, whole numbers from 0 on"),
    }
}

/// Bytes of an element, as PyTorch names its types; of a tensor without memory none.
fn element_bytes(element: &str) -> Option<f64> {
    Some(match element {
        "c10::complex<double>" => 16.0,
        "double"
        | "long int"
        | "long"
        | "long long"
        | "unsigned long"
        | "long unsigned int"
        | "c10::complex<float>" => 8.0,
        "float" | "int" | "unsigned int" | "c10::qint32" | "c10::complex<c10::Half>" => 4.0,
        "c10::Half" | "c10::BFloat16" | "short int" | "short" | "unsigned short" | "short unsigned int" => {
            2.0
        }
        "bool" | "unsigned char" | "signed char" | "c10::qint8" | "c10::quint8" | "c10::quint4x2"
        | "c10::quint2x4" => 1.0,
        _ if element.starts_with("c10::Float8") || element.starts_with("c10::Float4") => 1.0,
        _ if element.starts_with("c10::bits") || element.starts_with("nullptr") => 0.0,
        _ => return None,
    })
}

/// Bytes of a tensor, or of a list of tensors.
fn bytes(kind: &str, shape: &Value) -> f64 {
    let Some(shapes) = shape.as_array() else { return 0.0 };
    if let Some(inside) = kind.strip_prefix("GenericList[").and_then(|it| it.strip_suffix(']')) {
        return inside.split(',').zip(shapes).map(|(kind, shape)| bytes(kind, shape)).sum();
    }
    let Some(element) = kind.strip_prefix("Tensor(").and_then(|it| it.strip_suffix(')')) else { return 0.0 };
    element_bytes(element).unwrap_or(0.0) * shapes.iter().filter_map(Value::as_f64).product::<f64>()
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
    fn what_would_be_counted_as_nothing_or_less_is_refused_by_its_node() {
        let read = |text: &str| StepTrace::read("step.json", text).unwrap_err().to_string();
        for (from, to, expected) in [
            ("\"id\": 6,", "\"id\": 5,", "step.json: node 5: expected an id of its own"),
            (
                "\"ctrl_deps\": 5",
                "\"ctrl_deps\": 9",
                "step.json: node 6: expected a caller with a lower id, found 9",
            ),
            ("[[4, 3]]", "[[-4, 3]]", "step.json: node 6: aten::t: inputs: expected the sides of a tensor"),
            ("[[4, 3]]", "[[4.5, 3]]", "step.json: node 6: aten::t: inputs: expected the sides of a tensor"),
            (
                "[[4, 3]]",
                "[[1125899906842624, 3000]]",
                "step.json: node 6: aten::t: inputs: expected the sides of a tensor",
            ),
            (
                "[[4, 3]], \"types\": [\"Tensor(float)\"]",
                "[[4, 3]], \"types\": [\"Tensor(of dreams)\"]",
                "step.json: node 6: aten::t: inputs: expected a tensor of a known type, found of dreams",
            ),
            (
                "[[4, 3]], \"types\": [\"Tensor(float)\"]",
                "[[4, 3]], \"types\": []",
                "step.json: node 6: aten::t: inputs: expected 0 shapes, as types, found 1",
            ),
            (
                "[[4], [2, 3], [3, 4], []], \"types\": [\"Tensor(float)\", \"Tensor(float)\", \"Tensor(float)\", \"Int\"]",
                "[], \"types\": []",
                "step.json: node 7: aten::addmm: inputs: expected the shapes of a product",
            ),
        ] {
            let text = TRACE.replace(from, to);
            assert_ne!(text, TRACE, "{from}");
            let refusal = read(&text);
            assert!(refusal.starts_with(expected), "{refusal}");
        }
    }

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

    /// Operations of one operator with these arguments, tensors by their shapes and others by their values, and with one result.
    fn flops_of(name: &str, arguments: &[Value], result: &Value) -> f64 {
        let is_shape = |it: &&Value| it.as_array().is_some_and(|all| all.iter().all(Value::is_u64));
        let kind = |it| if is_shape(&it) { "Tensor(float)" } else { "Bool" };
        let shapes: Vec<_> = arguments
            .iter()
            .map(|it| if is_shape(&it) { it.clone() } else { serde_json::json!([]) })
            .collect();
        let types: Vec<_> = arguments.iter().map(kind).collect();
        let file = serde_json::json!({"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 2, "name": format!("aten::{name}"), "ctrl_deps": 1,
            "inputs": {"values": arguments, "shapes": shapes, "types": types},
            "outputs": {"values": [], "shapes": [result], "types": ["Tensor(float)"]},
            "attrs": [{"name": "op_schema", "type": "string", "value": "a(...)"}]}]});
        let rates = OperatorRates { flops_per_s: 1.0, bytes_per_s: 1.0, launch_s: 0.0 };
        StepTrace::read("step.json", &file.to_string()).unwrap().step(rates).operators[0].flops
    }

    /// As torch.utils.flop_counter counts them: a transposed convolution, and a first layer, whose input needs no gradient.
    #[test]
    fn convolutions_count_by_the_way_they_go_and_by_the_gradients_that_are_asked_for() {
        use serde_json::json;
        // Of 8 channels to 4, 3 wide in steps of 2: 16 x 16 becomes 33 x 33.
        let (narrow, wide, weights) = (json!([2, 8, 16, 16]), json!([2, 4, 33, 33]), json!([8, 4, 3, 3]));
        let no = json!(null);
        let forward = |transposed: bool, input: &Value, output: &Value| {
            let arguments = [input, &weights, &no, &no, &no, &no, &json!(transposed), &no, &json!(1)];
            flops_of("convolution", &arguments.map(Clone::clone), output)
        };
        let each = 2.0 * f64::from(2 * 16 * 16) * f64::from(8 * 4 * 9);
        assert_eq!(forward(true, &narrow, &wide), each);
        assert_eq!(forward(false, &wide, &narrow), each);
        let backward = |transposed: bool, [gradient, input]: [&Value; 2], asked: Value| {
            let arguments =
                [gradient, input, &weights, &no, &no, &no, &no, &json!(transposed), &no, &json!(1), &asked];
            flops_of("convolution_backward", &arguments.map(Clone::clone), input)
        };
        let all = json!([true, true, true]);
        assert_eq!(backward(true, [&wide, &narrow], all.clone()), 2.0 * each);
        assert_eq!(backward(false, [&narrow, &wide], all), 2.0 * each);
        assert_eq!(backward(false, [&narrow, &wide], json!([false, true, false])), each);
    }

    #[test]
    fn attention_over_sequences_one_behind_another_looks_no_farther_than_the_longest() {
        use serde_json::json;
        // 100 tokens of sequences of at most 40, 4 heads of 16.
        let (packed, starts, none) = (json!([100, 4, 16]), json!([4]), json!(null));
        let forward = 2.0 * f64::from(100 * 4 * 40 * (16 + 16));
        let of = |name, arguments: &[&Value], result: &Value| {
            flops_of(name, &arguments.iter().map(|it| (*it).clone()).collect::<Vec<_>>(), result)
        };
        let longest = json!(40);
        let flash = [&packed, &packed, &packed, &starts, &starts, &longest, &longest];
        assert_eq!(of("_flash_attention_forward", &flash, &packed), forward);
        let one = json!([1, 100, 4, 16]);
        let efficient = [&one, &one, &one, &none, &starts, &starts, &longest, &longest];
        assert_eq!(of("_efficient_attention_forward", &efficient, &one), forward);
        let backward =
            [&packed, &packed, &packed, &packed, &packed, &none, &starts, &starts, &longest, &longest];
        assert_eq!(of("_flash_attention_backward", &backward, &packed), 2.5 * forward);
        // Each sequence by itself looks at all of its own.
        let whole = [&one, &one, &one, &none, &none, &none, &longest, &longest];
        assert_eq!(of("_efficient_attention_forward", &whole, &one), forward * 100.0 / 40.0);
    }

    /// Operations and bytes of each operator of a trace: its id, its name, its caller, shapes of inputs and of outputs.
    type Traced<'a> = (u64, &'a str, u64, Value, Value);

    fn counted(kind: &str, nodes: &[Traced<'_>]) -> BTreeMap<String, (u64, f64, f64)> {
        let tensors = |shapes: &Value| {
            let of = |shape: &Value| match shape[0].is_array() {
                true => format!(
                    "GenericList[{}]",
                    vec![format!("Tensor({kind})"); shape.as_array().unwrap().len()].join(",")
                ),
                false => format!("Tensor({kind})"),
            };
            let types: Vec<_> = shapes.as_array().unwrap().iter().map(of).collect();
            serde_json::json!({"values": [], "shapes": shapes, "types": types})
        };
        let node = |(id, name, caller, inputs, outputs): &Traced<'_>| {
            let attrs = [serde_json::json!({"name": "op_schema", "type": "string", "value": "a(...)"})];
            serde_json::json!({"id": id, "name": format!("aten::{name}"), "ctrl_deps": caller, "inputs": tensors(inputs),
                "outputs": tensors(outputs), "attrs": attrs})
        };
        let nodes: Vec<_> = nodes.iter().map(node).collect();
        let file = serde_json::json!({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes});
        let rates = OperatorRates { flops_per_s: 1.0, bytes_per_s: 1.0, launch_s: 0.0 };
        let step = StepTrace::read("step.json", &file.to_string()).unwrap().step(rates);
        step.operators
            .into_iter()
            .map(|it| (it.name[6..].to_owned(), (it.count, it.flops, it.bytes)))
            .collect()
    }

    /// Whatever device runs it, attention counts with its helpers, and so does its backward pass.
    #[test]
    fn fused_attention_counts_forward_and_backward_whatever_helpers_it_calls() {
        let side = serde_json::json!([2, 4, 64, 32]);
        let (three, five) =
            (serde_json::json!([side, side, side]), serde_json::json!([side, side, side, side, side]));
        let forward = 4.0 * f64::from(2 * 4 * 64 * 64 * 32);
        for name in ATTENTION {
            let backward = format!("{name}_backward");
            let nodes = [
                (2, "scaled_dot_product_attention", 1, three.clone(), serde_json::json!([side])),
                (3, name, 2, three.clone(), serde_json::json!([side])),
                (4, "transpose", 3, serde_json::json!([side]), serde_json::json!([side])),
                (5, "_flash_attention_forward", 3, three.clone(), serde_json::json!([side])),
                (6, backward.as_str(), 1, five.clone(), three.clone()),
                (7, "zero_", 6, serde_json::json!([side]), serde_json::json!([side])),
            ];
            let operators = counted("float", &nodes);
            let bytes = |tensors: u64| (tensors * 4 * 2 * 4 * 64 * 32) as f64;
            let expected =
                [(name.to_owned(), (1, forward, bytes(4))), (backward, (1, 2.5 * forward, bytes(8)))];
            assert_eq!(operators, BTreeMap::from(expected));
        }
        // The layout of the kernel itself: tokens before heads. Values may be narrower than keys.
        let (queries, values) = (serde_json::json!([1, 64, 4, 192]), serde_json::json!([1, 64, 4, 128]));
        let alone = [(
            2,
            "_flash_attention_forward",
            1,
            serde_json::json!([queries, queries, values]),
            serde_json::json!([values]),
        )];
        assert_eq!(
            counted("float", &alone)["_flash_attention_forward"].1,
            2.0 * f64::from(64 * 64 * 4 * (192 + 128))
        );
    }

    #[test]
    fn products_in_8_bits_of_groups_and_of_recurrent_layers_count() {
        let one = |kind: &str, name: &str, inputs: Value, output: Value| {
            counted(kind, &[(2, name, 1, inputs, output)])[name]
        };
        let scaled = one(
            "c10::Float8_e4m3fn",
            "_scaled_mm",
            serde_json::json!([[8192, 4096], [4096, 4096]]),
            serde_json::json!([[8192, 4096]]),
        );
        assert_eq!(scaled, (1, 2.0 * 8192.0 * 4096.0 * 4096.0, 4096.0 * (8192.0 + 4096.0 + 8192.0)));
        let grouped = one(
            "c10::BFloat16",
            "_grouped_mm",
            serde_json::json!([[8192, 4096], [8, 4096, 1024]]),
            serde_json::json!([[8192, 1024]]),
        );
        assert_eq!(grouped.1, 2.0 * 8192.0 * 4096.0 * 1024.0);
        // 20 tokens of 5 sequences, 32 wide, into four gates of 64.
        let layer = serde_json::json!([[20, 5, 32], [256, 32], [256, 64], [256], [256]]);
        let products = 2.0 * 100.0 * 256.0 * (32.0 + 64.0);
        assert_eq!(
            one("float", "mkldnn_rnn_layer", layer.clone(), serde_json::json!([[20, 5, 64]])).1,
            products
        );
        assert_eq!(
            one("float", "mkldnn_rnn_layer_backward", layer, serde_json::json!([[20, 5, 32]])).1,
            2.0 * products
        );
        let list = serde_json::json!([[20, 5, 32], [[256, 32], [256, 64], [256], [256]]]);
        assert_eq!(one("float", "_cudnn_rnn", list, serde_json::json!([[20, 5, 64]])).1, products);
    }

    #[test]
    fn an_operator_whose_helpers_move_little_does_its_work_itself_and_what_looks_into_a_sparse_tensor_moves_nothing()
     {
        let large = serde_json::json!([256, 1024]);
        let operators = counted(
            "float",
            &[
                (2, "sum", 1, serde_json::json!([large]), serde_json::json!([[]])),
                (3, "sum", 2, serde_json::json!([large]), serde_json::json!([[]])),
                (4, "as_strided", 3, serde_json::json!([[]]), serde_json::json!([[1, 1]])),
                (5, "fill_", 3, serde_json::json!([[1, 1]]), serde_json::json!([[1, 1]])),
                (6, "contiguous", 1, serde_json::json!([large]), serde_json::json!([large])),
                (7, "copy_", 6, serde_json::json!([large, large]), serde_json::json!([large])),
                (8, "add_", 1, serde_json::json!([large, large]), serde_json::json!([large])),
                (9, "_nnz", 8, serde_json::json!([large]), serde_json::json!([[]])),
                (10, "_values", 8, serde_json::json!([large]), serde_json::json!([[16, 1024]])),
                (11, "as_strided_", 1, serde_json::json!([large]), serde_json::json!([large])),
                (12, "view_as_real", 1, serde_json::json!([large]), serde_json::json!([large])),
            ],
        );
        let (nothing, whole) = ((1, 0.0, 0.0), 4.0 * 256.0 * 1024.0);
        let expected = [
            ("sum", (1, 0.0, whole + 4.0)),
            ("copy_", (1, 0.0, 3.0 * whole)),
            ("_nnz", nothing),
            ("_values", nothing),
            ("as_strided_", nothing),
            ("view_as_real", nothing),
        ];
        assert_eq!(operators, expected.map(|(name, counts)| (name.to_owned(), counts)).into());
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
