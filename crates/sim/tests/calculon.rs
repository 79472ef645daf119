//! Calculon's files, and its times beside ours on the space that both can express.

use std::path::PathBuf;

use polder_platform::{Bytes, Folder, Platform, Time, read};
use polder_sim::contention::FlitOptions;
use polder_sim::{
    Execution, Fidelity, FoundLayout, Job, Layout, Model, Overlap, Recompute, Request, Space, Zero, search,
};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Table {
    row: Vec<Row>,
}

/// A layout, with what Calculon says that it takes.
#[derive(Deserialize)]
struct Row {
    space: String,
    layout: Layout,
    step: Time,
    memory: Option<Bytes>,
}

fn rows(space: &str) -> Vec<Row> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/simulated/calculon-megatron-22b.toml");
    let table: Table = read(Folder::Published, file).unwrap();
    table.row.into_iter().filter(|row| row.space == space).collect()
}

/// A file that is gone after the test.
struct Written(PathBuf);

impl Written {
    fn new(name: &str, value: &Value) -> Self {
        let thread = std::thread::current().id();
        let name = format!("polder-calculon-{}-{thread:?}-{name}.json", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn megatron_22b() -> Value {
    json!({"hidden": 6144, "feedforward": 24576, "seq_size": 2048, "attn_heads": 64, "attn_size": 96, "num_blocks": 48})
}

fn a100() -> Value {
    let network = |bandwidth, efficiency, size, latency, half: [f64; 2], whole: [f64; 2]| {
        json!({
            "bandwidth": bandwidth, "efficiency": efficiency, "size": size, "latency": latency,
            "ops": {"p2p": [1.0, null], "reduce_scatter": half, "all_gather": half, "all_reduce": whole},
            "must_be_filled": size == 8, "processor_usage": 0.02,
        })
    };
    json!({
        "matrix": {"float16": {"tflops": 312, "gflops_efficiency": [[128, 0.95], [16, 0.9], [1, 0.6], [0, 0.1]]}},
        "vector": {"float16": {"tflops": 78, "gflops_efficiency": [[16, 0.95], [1, 0.5], [0, 0.1]]}},
        "mem1": {"GiB": 80, "GBps": 2048, "MB_efficiency": [[100, 0.9], [10, 0.75], [1, 0.6], [0, 0.3]]},
        "mem2": {"GiB": 512, "GBps": 32, "MB_efficiency": [[100, 0.95], [10, 0.9], [1, 0.7], [0, 0.3]]},
        "processing_mode": "no_overlap",
        "networks": [
            network(300, 0.65, 8, 1e-5, [1.5, -1.0], [2.0, -1.0]),
            network(25, 0.9, 65536, 2e-5, [1.0, 0.0], [1.0, 0.0]),
        ],
    })
}

/// Calculon's best on the shared space: tp 2, pp 8 of 6 parts, dp 4, sequence parallel.
fn execution() -> Value {
    json!({
        "num_procs": 64, "tensor_par": 2, "pipeline_par": 8, "data_par": 4,
        "tensor_par_net": 0, "pipeline_par_net": 1, "data_par_net": 1,
        "batch_size": 64, "microbatch_size": 1, "datatype": "float16", "fused_activation": false,
        "attention_type": "multihead", "activation_recompute": "none", "pipeline_interleaving": 6,
        "optimizer_sharding": false, "tensor_par_comm_type": "rs_ag", "tensor_par_overlap": "none",
        "seq_par_ag_redo": false, "data_par_overlap": false, "weight_offload": false,
        "activations_offload": false, "optimizer_offload": false, "training": true,
    })
}

fn model() -> Model {
    Model::load(Written::new("model", &megatron_22b()).path()).unwrap()
}

fn platform() -> Platform {
    Platform::load(Written::new("system", &a100()).path()).unwrap()
}

/// What both can express: no offload, no overlap, unfused attention, gradients in 16 bits.
fn space(model: &Model, tp: Vec<u32>, interleave: Vec<u32>) -> Space {
    let divisors = |of: u32| (1..=of).filter(|it| of.is_multiple_of(*it)).collect::<Vec<_>>();
    Space {
        tp,
        cp: vec![1],
        pp: divisors(64),
        interleave,
        micro_batch: divisors(64),
        gather_again: vec![false, true],
        flash: vec![false],
        zero: vec![Zero::None, Zero::Optimizer],
        wide_gradients: vec![false],
        overlap: vec![Overlap::default()],
        ..Space::default_for(model, 64, 64)
    }
}

/// The best where tensor parallelism alone lies in racks, as Calculon's first network has it.
fn best(interleave: &[u32]) -> FoundLayout {
    let (model, platform) = (model(), platform());
    let of_racks = |tp: u32| {
        let job = Job::new(&platform).with_fill(tp).unwrap();
        let space = space(&model, vec![tp], interleave.to_vec());
        *search(&job, &model, &space, 1, &|_, _| ()).best().unwrap()
    };
    let found = [1, 2, 4, 8].map(of_racks);
    found.into_iter().min_by(|a, b| a.step.total_s.total_cmp(&b.step.total_s)).unwrap()
}

/// How far ours is from Calculon's, as a part of it.
fn off(ours: f64, row: &Row) -> f64 {
    ours / row.step.value() - 1.0
}

#[test]
fn on_the_shared_space_the_optimum_is_calculons() {
    let all: Vec<u32> = (1..=48).collect();
    for (name, interleave, most) in [("shared", &all[..], 0.05), ("plain", &[1], 0.09)] {
        let calculons = &rows(name)[0];
        let FoundLayout { layout, step } = best(interleave);
        assert_eq!(layout, calculons.layout, "{name}");
        let off = off(step.total_s, calculons);
        assert!(off.abs() < most, "{name}: {off}");
    }
}

/// Where Calculon may lay anything on either network, it lays data parallelism beside tensor parallelism, as we do. Ours is
/// its second best, which takes 0.15% longer there: on this network it charges a reduce-scatter and an all-gather half as
/// much again as the all-reduce that they make.
#[test]
fn the_optimum_is_calculons_where_it_places_ranks_as_it_likes() {
    let (model, platform) = (model(), platform());
    let space = space(&model, vec![1, 2, 4, 8], (1..=48).collect());
    let outcome = search(&Job::new(&platform), &model, &space, 1, &|_, _| ());
    let (calculons, best) = (rows("free"), outcome.best().unwrap());
    assert_eq!(best.layout, calculons[1].layout);
    assert_eq!(best.layout, Layout { zero: Zero::Optimizer, ..calculons[0].layout });
    let off = off(best.step.total_s, &calculons[1]);
    assert!(off.abs() < 0.06, "{off}");
}

/// Over the whole space: 9.6% less on average, a rank correlation of 0.961 (docs/plan-calculon.md).
#[test]
fn times_are_ordered_as_calculons_and_as_far_off_as_is_said() {
    let (model, platform) = (model(), platform());
    let mut pairs = vec![];
    for row in rows("shared") {
        let job = Job::new(&platform).with_fill(row.layout.tp).unwrap();
        let step = job.predict(&model, &row.layout).unwrap().step;
        let off = off(step.total_s, &row);
        assert!((-0.20..0.04).contains(&off), "{:?}: {off}", row.layout);
        assert!(row.layout.tp > 1 || off.abs() < 0.035, "{:?}: {off}", row.layout);
        if row.layout.recompute == Recompute::None {
            let memory = step.memory.accelerator().used_bytes / row.memory.unwrap().value() - 1.0;
            assert!(memory.abs() < 0.05, "{:?}: {memory}", row.layout);
        }
        pairs.push([row.step.value(), step.total_s]);
    }
    let mean = pairs.iter().map(|[theirs, ours]| ours / theirs - 1.0).sum::<f64>() / pairs.len() as f64;
    assert!((-0.10..-0.08).contains(&mean), "{mean}");
    let correlation = rank_correlation(&pairs);
    assert!(correlation > 0.96, "{correlation}");
}

/// Spearman's: the correlation of places. No two times are equal.
fn rank_correlation(pairs: &[[f64; 2]]) -> f64 {
    let places = |of: usize| {
        pairs.iter().map(move |pair| pairs.iter().filter(|other| other[of] < pair[of]).count() as f64)
    };
    let squares: f64 = places(0).zip(places(1)).map(|(a, b)| (a - b).powi(2)).sum();
    let n = pairs.len() as f64;
    1.0 - 6.0 * squares / (n * (n * n - 1.0))
}

#[test]
fn an_execution_is_predicted_as_its_layout_is() {
    let files =
        [("a", megatron_22b()), ("b", a100()), ("c", execution())].map(|(name, it)| Written::new(name, &it));
    let [model, platform, layout] = files.each_ref().map(Written::path);
    let Execution { accelerators, fill, layout } = Execution::load(layout).unwrap();
    let request = Request {
        model: model.into(),
        platform: platform.into(),
        accelerators,
        rack: None,
        order: None,
        fill: Some(fill),
        against: None,
        sequence: None,
        fidelity: Fidelity::default(),
        flits: FlitOptions::default(),
        failed: vec![],
        layout,
    };
    let answer = request.train(1, &|_, _| ()).unwrap();
    let calculons = &rows("shared")[0];
    let expected = Layout { overlap: Overlap { offload: true, ..Overlap::default() }, ..calculons.layout };
    assert_eq!((answer.layout, answer.points, answer.fill), (expected, 1, 2));
    assert!(off(answer.step.total_s, calculons).abs() < 0.05);
}

/// What a key is changed to, and what is then said.
type Case = (&'static str, Value, &'static str);

fn changed(of: &Value, pointer: &str, value: &Value) -> Value {
    let mut changed = of.clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match changed.pointer_mut(parent).unwrap() {
        Value::Object(keys) if value.is_null() => drop(keys.remove(key)),
        Value::Object(keys) => drop(keys.insert(key.into(), value.clone())),
        list => list[key.parse::<usize>().unwrap()] = value.clone(),
    }
    changed
}

fn assert_refusals<T: std::fmt::Debug, E: std::fmt::Display + std::fmt::Debug>(
    of: &Value,
    cases: &[Case],
    load: impl Fn(&str) -> Result<T, E>,
) {
    for (pointer, value, expected) in cases {
        let file = Written::new("case", &changed(of, pointer, value));
        let said = load(file.path()).unwrap_err().to_string();
        assert_eq!(said, format!("{}: {expected}", file.path()));
        assert_eq!(said.lines().count(), 1);
    }
}

#[test]
fn a_bad_model_gets_one_line() {
    assert_refusals(
        &megatron_22b(),
        &[
            ("/hidden", json!(null), "hidden: expected a whole number from 1 to 67108864, found nothing"),
            ("/num_blocks", json!(0), "num_blocks: expected a whole number from 1 to 65536, found 0"),
            ("/attn_heads", json!(6.5), "attn_heads: expected a whole number from 1 to 67108864, found 6.5"),
            ("/seq_size", json!("2k"), "seq_size: expected a whole number from 1 to 67108864, found \"2k\""),
            ("/networks", json!([]), "expected a model, found a system of Calculon"),
            (
                "/hiden",
                json!(6144),
                "hiden: unknown field `hiden`, expected one of `hidden`, `feedforward`, `seq_size`, `attn_heads`, `attn_size`, `num_blocks`",
            ),
        ],
        Model::load,
    );
}

#[test]
fn a_bad_system_gets_one_line() {
    let curve = "expected pairs of a size and a part from 0 to 1, the largest size first and 0 last, found";
    let curve = |key: &str, found: &str| format!("{key}: {curve} {found}").leak() as &'static str;
    assert_refusals(
        &a100(),
        &[
            (
                "/networks/0/bandwidth",
                json!(-1),
                "networks[0].bandwidth: expected a number above 0, 1e20 at most, found -1",
            ),
            (
                "/networks/1/efficiency",
                json!(1.5),
                "networks[1].efficiency: expected a part from 0 to 1, found 1.5",
            ),
            (
                "/networks/0/ops/all_reduce",
                json!([0, 1]),
                "networks[0].ops.all_reduce: expected a list of a number above 0 and an offset, found a list of 2",
            ),
            ("/networks/0", json!(8), "networks[0]: expected an object, found 8"),
            (
                "/networks",
                json!([1, 2, 3]),
                "networks: expected a list of one network or two, found a list of 3",
            ),
            (
                "/processing_mode",
                json!("both"),
                "processing_mode: expected \"roofline\" or \"no_overlap\", found \"both\"",
            ),
            ("/matrix/float16", json!(null), "matrix.float16: expected an object, found nothing"),
            (
                "/matrix/float16/gflops_efficiency",
                json!([[1, 0.5]]),
                curve("matrix.float16.gflops_efficiency", "a list of 1"),
            ),
            ("/mem1/MB_efficiency", json!([[0, 0.5], [1, 0.9]]), curve("mem1.MB_efficiency", "a list of 2")),
            ("/mem1/GBps", json!(1e300), "mem1.GBps: expected a number above 0, 1e20 at most, found 1e+300"),
            ("/mem2", json!(null), "mem2: expected an object, found nothing"),
            (
                "/mem3",
                json!({}),
                "mem3: unknown field `mem3`, expected one of `matrix`, `vector`, `mem1`, `mem2`, `processing_mode`, `networks`",
            ),
            (
                "/matrix/fp16",
                json!({}),
                "matrix.fp16: unknown field `fp16`, expected one of `float8`, `float16`, `float32`, `bfloat16`",
            ),
            (
                "/vector/float16/gflops",
                json!(1),
                "vector.float16.gflops: unknown field `gflops`, expected one of `tflops`, `gflops_efficiency`",
            ),
            (
                "/mem2/GB",
                json!(1),
                "mem2.GB: unknown field `GB`, expected one of `GiB`, `GBps`, `MB_efficiency`",
            ),
            (
                "/networks/1/lanes",
                json!(4),
                "networks[1].lanes: unknown field `lanes`, expected one of `bandwidth`, `efficiency`, `size`, `latency`, `ops`, `must_be_filled`, `processor_usage`",
            ),
            (
                "/networks/0/ops/broadcast",
                json!([1, 0]),
                "networks[0].ops.broadcast: unknown field `broadcast`, expected one of `p2p`, `reduce_scatter`, `all_gather`, `all_reduce`",
            ),
        ],
        Platform::load,
    );
    assert_refusals(
        &execution(),
        &[("/training", json!(true), "expected a system of Calculon, found an execution of Calculon")],
        Platform::load,
    );
}

/// As its h100_80g_nvl8 has, and more types than one.
#[test]
fn every_data_type_of_calculon_is_known() {
    let rate = json!({"tflops": 500, "gflops_efficiency": [[0, 0.5]]});
    let every = json!({"float8": rate, "float16": rate, "float32": rate, "bfloat16": rate});
    let system = changed(&changed(&a100(), "/matrix", &every), "/vector", &every);
    let platform = Platform::load(Written::new("types", &system).path()).unwrap();
    let compute = platform.rack["calculon"].accelerator.compute;
    assert_eq!([compute.bf16, compute.fp8].map(|it| it.unwrap().value()), [5e14; 2]);
}

#[test]
fn what_an_execution_cannot_ask_for_gets_one_line() {
    assert_refusals(
        &execution(),
        &[
            ("/training", json!(false), "training: expected true: inference is not predicted, found false"),
            ("/num_procs", json!(32), "num_procs: expected tensor_par x pipeline_par x data_par, found 32"),
            (
                "/attention_type",
                json!("multiquery"),
                "attention_type: expected \"multihead\", found \"multiquery\"",
            ),
            (
                "/datatype",
                json!("float8"),
                "datatype: expected \"float16\" or \"bfloat16\", found \"float8\"",
            ),
            (
                "/tensor_par_comm_type",
                json!("ag"),
                "tensor_par_comm_type: expected \"ar\" or \"p2p_rs_ag\" or \"rs_ag\", found \"ag\"",
            ),
            (
                "/pipeline_par_net",
                json!(0),
                "pipeline_par_net: expected 1: ranks are placed tensor, data, pipeline, the closest first, found 0",
            ),
            ("/data_par_net", json!(2), "data_par_net: expected 0 or 1, found 2"),
            (
                "/tensor_parr",
                json!(2),
                "tensor_parr: unknown field `tensor_parr`, expected one of `num_procs`, `tensor_par`, `pipeline_par`, \
                 `data_par`, `tensor_par_net`, `pipeline_par_net`, `data_par_net`, `batch_size`, `microbatch_size`, `datatype`, \
                 `fused_activation`, `attention_type`, `activation_recompute`, `pipeline_interleaving`, `optimizer_sharding`, \
                 `tensor_par_comm_type`, `tensor_par_overlap`, `seq_par_ag_redo`, `data_par_overlap`, `weight_offload`, \
                 `activations_offload`, `optimizer_offload`, `training`",
            ),
            ("/weight_offload", json!("no"), "weight_offload: expected true or false, found \"no\""),
            (
                "/microbatch_size",
                json!(null),
                "microbatch_size: expected a whole number from 1 to 1073741824, found nothing",
            ),
        ],
        Execution::load,
    );
}

/// Their a100_80e has 80 billion GiB.
#[test]
fn memory_without_end_holds_everything() {
    let system = changed(&a100(), "/mem1/GiB", &json!(80_000_000_000_u64));
    let platform = Platform::load(Written::new("endless", &system).path()).unwrap();
    let row = &rows("shared")[0];
    let layout = Layout { tp: 1, pp: 1, dp: 64, interleave: 1, sequence_parallel: false, ..row.layout };
    assert!(Job::new(&platform).predict(&model(), &layout).unwrap().step.memory.fits());
    assert!(!Job::new(&self::platform()).predict(&model(), &layout).unwrap().step.memory.fits());
}
