//! What other programs write as JSON: systems of Calculon as platforms (Isaev et al., SC23; github.com/calculon-ai/calculon), and of
//! any JSON file which format it is in.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::file::in_words;
use crate::unit::ByteUnit;
use crate::{
    Accelerator, Attach, Bandwidth, Bytes, Compute, Curve, DataError, Efficiency, Fabric, Fitted, FlopRate,
    Host, Link, MemoryTier, Packet, Platform, Quantity, Rack, Reached, Reduction, Software, Switch, Time,
    Topology, TransferRate, Unit, quoted,
};

/// What a JSON file describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonKind {
    /// A model, as a `config.json` of Hugging Face.
    HuggingFace,
    /// A model of Calculon.
    CalculonModel,
    /// A system of Calculon.
    CalculonSystem,
    /// An execution of Calculon.
    CalculonExecution,
}

impl JsonKind {
    fn of(keys: &Map<String, Value>) -> Self {
        let has = |names: &[&str]| names.iter().any(|name| keys.contains_key(*name));
        if has(&["model_type", "architectures"]) {
            Self::HuggingFace
        } else if has(&["networks", "mem1", "processing_mode"]) {
            Self::CalculonSystem
        } else if has(&["num_procs", "tensor_par", "pipeline_par"]) {
            Self::CalculonExecution
        } else if has(&["attn_heads", "attn_size", "seq_size", "num_blocks"]) {
            Self::CalculonModel
        } else {
            Self::HuggingFace
        }
    }

    const fn kind_name(self) -> &'static str {
        match self {
            Self::HuggingFace => "what may be a config.json of Hugging Face",
            Self::CalculonModel => "a model of Calculon",
            Self::CalculonSystem => "a system of Calculon",
            Self::CalculonExecution => "an execution of Calculon",
        }
    }
}

/// The keys of a JSON file, and which format it is in by them.
///
/// # Errors
/// When it is no JSON; numbers that JSON lacks and Python writes, such as `Infinity`, are read as strings.
pub fn read_json(file: &str, text: &str) -> Result<(JsonKind, Map<String, Value>), DataError> {
    let wrong = |error: serde_json::Error| {
        let line = format!("line {}", error.line());
        DataError::new(file, &line, in_words(&error.to_string()))
    };
    let keys = serde_json::from_str(&without_infinities(text)).map_err(wrong)?;
    Ok((JsonKind::of(&keys), keys))
}

/// A JSON text with quotes around what Python writes for numbers that JSON lacks.
fn without_infinities(text: &str) -> Cow<'_, str> {
    const NO_NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    if !NO_NUMBERS.iter().any(|word| text.contains(word)) {
        return text.into();
    }
    let (mut quoted, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(next) = rest.chars().next() {
        let length = match NO_NUMBERS.iter().find(|word| rest.starts_with(**word)) {
            Some(word) => {
                quoted.extend(["\"", word, "\""]);
                rest = &rest[word.len()..];
                continue;
            }
            None if next == '"' => string_length(rest),
            None => next.len_utf8(),
        };
        quoted.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    quoted.into()
}

/// Bytes of the JSON string that a text begins with, quotes too.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    let ends = text.char_indices().skip(1).find(|(_, it)| {
        let ends = *it == '"' && !is_escaped;
        is_escaped = *it == '\\' && !is_escaped;
        ends
    });
    ends.map_or(text.len(), |(at, _)| at + 1)
}

/// That a file is in another format than the one that was expected.
#[must_use]
pub fn other_json(file: &str, expected: &str, kind: JsonKind) -> DataError {
    DataError::new(file, "", format!("expected {expected}, found {}", kind.kind_name()))
}

/// Accelerators, or anything else that is counted of them, at most.
const MANY: u32 = 1 << 30;

const SYSTEM: [&str; 6] = ["matrix", "vector", "mem1", "mem2", "processing_mode", "networks"];
const DATATYPES: [&str; 4] = ["float8", "float16", "float32", "bfloat16"];
const PROCESSOR: [&str; 2] = ["tflops", "gflops_efficiency"];
const MEMORY: [&str; 3] = ["GiB", "GBps", "MB_efficiency"];
const NETWORK: [&str; 7] =
    ["bandwidth", "efficiency", "size", "latency", "ops", "must_be_filled", "processor_usage"];
const OPS: [&str; 4] = ["p2p", "reduce_scatter", "all_gather", "all_reduce"];
/// An object of a JSON file, with the keys that lead to it.
pub struct JsonObject<'a> {
    file: &'a str,
    at: String,
    keys: &'a Map<String, Value>,
}

impl<'a> JsonObject<'a> {
    /// One that has no keys but those `known`; `at` leads to them.
    ///
    /// # Errors
    /// Its first other key.
    pub fn new(
        file: &'a str,
        at: String,
        keys: &'a Map<String, Value>,
        known: &[&str],
    ) -> Result<Self, DataError> {
        let object = Self { file, at, keys };
        let Some(key) = keys.keys().find(|key| !known.contains(&key.as_str())) else { return Ok(object) };
        let problem = format!("unknown field `{}`, expected one of `{}`", quoted(key), known.join("`, `"));
        Err(DataError::new(file, &object.key(key), problem))
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.at)
    }

    /// What is wrong at a key.
    #[must_use]
    pub fn wrong(&self, key: &str, expected: &str) -> DataError {
        wrong(self.file, &self.key(key), expected, self.keys.get(key))
    }

    /// What `read` makes of a value, where it makes anything of it.
    ///
    /// # Errors
    /// When it makes nothing of it.
    pub fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, DataError> {
        self.keys.get(key).and_then(read).ok_or_else(|| self.wrong(key, expected))
    }

    /// A whole number from 1 to `most`.
    ///
    /// # Errors
    /// When it is none.
    pub fn count(&self, key: &str, most: u32) -> Result<u32, DataError> {
        let count = |value: &Value| u32::try_from(value.as_u64()?).ok().filter(|it| (1..=most).contains(it));
        self.read(key, &format!("a whole number from 1 to {most}"), count)
    }

    /// True or false.
    ///
    /// # Errors
    /// When it is neither.
    pub fn flag(&self, key: &str) -> Result<bool, DataError> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// What one of some words stands for.
    ///
    /// # Errors
    /// When it is another.
    pub fn word<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<T, DataError> {
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
        Some(value) => quoted(&value.to_string()),
    };
    DataError::new(file, key, format!("expected {expected}, found {found}"))
}

/// A number that no product of a few makes infinite.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().filter(|it| *it == 0.0 || (1e-20..1e20).contains(it))
}

/// Reads a platform from the text of a JSON file.
pub(crate) fn platform(file: &str, text: &str) -> Result<Platform, DataError> {
    match read_json(file, text)? {
        (JsonKind::CalculonSystem, keys) => platform_of(file, &keys),
        (kind, _) => Err(other_json(file, "a system of Calculon", kind)),
    }
}

/// Reads a system: its first network joins a rack, its second the racks.
fn platform_of<'a>(file: &'a str, keys: &'a Map<String, Value>) -> Result<Platform, DataError> {
    let system = JsonObject::new(file, String::new(), keys, &SYSTEM)?;
    let matrix = system.processor("matrix")?;
    if keys.contains_key("vector") {
        system.processor("vector")?;
    }
    let half = if matrix.keys.contains_key("bfloat16") { "bfloat16" } else { "float16" };
    let half = matrix.object(half, &PROCESSOR)?;
    let rate = |of: &JsonObject<'_>| Ok(FlopRate::new(of.size("tflops")? * 1e12));
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
        fabric(&JsonObject::new(file, format!("{key}."), keys, &NETWORK)?)
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
    let tier = |of: &JsonObject<'_>, reached: f64| {
        let bandwidth = Bandwidth::new(of.size("GBps")? * 1e9 * reached);
        let capacity = Bytes::new(of.maybe_size("GiB")? * 1024f64.powi(3));
        Ok(MemoryTier { capacity, read: bandwidth, write: bandwidth, latency: Time::new(0.0) })
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
        coherent: None,
        host: Host {
            accelerators: 1,
            memory: host,
            attach: Attach { kind: None, bandwidth: host.read, accelerators: 1 },
            tiers: BTreeMap::new(),
            offload: None,
        },
    };
    Ok(Platform {
        title: "system of Calculon".into(),
        source: file.into(),
        rack: BTreeMap::from([("calculon".into(), rack)]),
        between: between.map(|(_, fabric, _)| fabric),
        pool: None,
        storage: None,
        server: BTreeMap::new(),
        local_tiers: BTreeMap::new(),
        disk: BTreeMap::new(),
        sharing: None,
    })
}

/// A network: how many it joins, by what, and what part of its bandwidth is reached.
fn fabric(network: &JsonObject<'_>) -> Result<(u32, Fabric, f64), DataError> {
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
            processors: 0.0,
        },
        carries: vec![],
        pbr: None,
        controllers: None,
    };
    Ok((size, fabric, network.part("efficiency")?))
}
