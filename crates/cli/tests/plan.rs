//! `polder plan` as a user gives it.

use std::process::{Command, Output};

use serde_json::Value;

fn plan(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    command.env("POLDER_CONFIG", "/dev/null").arg("plan").args(arguments.split(' ')).output().unwrap()
}

fn said(arguments: &str) -> String {
    let Output { status, stdout, stderr } = plan(arguments);
    assert!(status.success(), "{arguments}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn refused(arguments: &str) -> String {
    let Output { status, stderr, .. } = plan(arguments);
    assert!(!status.success(), "{arguments}");
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said.trim_end().to_owned()
}

fn json(arguments: &str) -> Value {
    serde_json::from_str(&said(arguments)).unwrap()
}

const LLAMA: &str = "train --model llama3-405b --platform nvl72-ndr --gpus 16384 --batch 2048";

#[test]
fn a_step_is_predicted_of_the_layout_that_is_given() {
    let step = json(&format!(
        "{LLAMA} --tp 8 --pp 16 --dp 128 --cp 1 --micro-batch 1 --interleave 8 --against nvl72-cxl --json"
    ));
    assert_eq!((&step["kind"], &step["layout"]["pp"]), (&"simulated".into(), &16.into()));
    let seconds = |of: &Value| of["step"]["total_s"].as_f64().unwrap();
    assert!(seconds(&step["against"]) < seconds(&step));
    assert_eq!(step["note"], "no run over CXL validates the difference between these fabrics");
}

#[test]
fn without_a_layout_the_fastest_that_fits_is_found() {
    let best = json(&format!("{LLAMA} --json"));
    let given = json(&format!("{LLAMA} --tp 8 --pp 16 --json"));
    let seconds = |of: &Value| of["step"]["total_s"].as_f64().unwrap();
    assert!(seconds(&best) <= seconds(&given));
    assert!(best["fits"].as_bool().unwrap());
}

#[test]
fn the_same_input_gives_the_same_bytes_on_any_number_of_threads() {
    let search = "search --model llama3-70b --platform nvl72-cxl --gpus 1024 --batch 1024";
    let once = said(&format!("{search} --threads 1"));
    assert!(once.lines().count() > 3, "{once}");
    for threads in [1, 2, 3] {
        assert_eq!(said(&format!("{search} --threads {threads}")), once);
    }
}

#[test]
fn several_platforms_and_tiers_share_one_front() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("front.csv");
    let search = "search --model llama3-70b --gpus 512 --batch 512 --platform";
    let front = said(&format!("{search} nvl72-ndr,nvl72-cxl --json --csv {}", path.display()));
    let points: Vec<Value> = front.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |name: &str| points.iter().filter(|point| point["platform"] == name).count();
    assert!(of("nvl72-cxl") > 0 && of("nvl72-ndr") + of("nvl72-cxl") == points.len());
    let is_far = |point: &&Value| point["step"]["memory"]["far_bytes"].as_f64() > Some(0.0);
    let far = points.iter().filter(is_far).count();
    assert!(
        0 < far && far < points.len(),
        "some keep something elsewhere, some nothing: {far} of {}",
        points.len()
    );
    let text = std::fs::read_to_string(&path).unwrap();
    let columns: Vec<_> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, vec![1 + 23 + 37; points.len() + 1]);
    // Alone, a platform has at least what it has among others.
    assert!(said(&format!("{search} nvl72-cxl --json")).lines().count() >= of("nvl72-cxl"));
}

#[test]
fn a_trace_has_every_pass_of_every_stage() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("trace.json");
    said(&format!("{LLAMA} --tp 8 --pp 16 --interleave 8 --micro-batch 1 --cp 1 --trace {}", path.display()));
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let passes =
        events.iter().filter(|event| event["cat"] == "forward" || event["cat"] == "backward").count();
    assert_eq!(passes, 2 * 16 * 8 * 16);
    let elsewhere = refused(&format!("{LLAMA} --tp 8 --trace /nowhere/trace.json"));
    assert!(elsewhere.starts_with("polder: /nowhere/trace.json: cannot write it: "), "{elsewhere}");
}

#[test]
fn a_page_holds_all_that_it_draws() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("step.html");
    said(&format!("{LLAMA} --tp 8 --pp 16 --interleave 8 --micro-batch 1 --cp 1 --html {}", path.display()));
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(
        !page.contains("http") && !page.contains("src=") && !page.contains('@'),
        "nothing is fetched or left open"
    );
    let data = page.split("const plan = ").nth(1).and_then(|rest| rest.split(";\n").next()).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let sum: f64 = data["times"].as_array().unwrap().iter().map(|part| part[1].as_f64().unwrap()).sum();
    assert!((sum / data["total_s"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert!(data["timeline"].as_array().unwrap().len() >= 2 * 16 * 8 * 16);
}

#[test]
fn what_cannot_run_is_refused_in_one_line() {
    for (arguments, expected) in [
        (format!("{LLAMA} --tp 7"), "polder: llama3-405b: tp of 7 does not divide heads of 128; 8 does"),
        (format!("{LLAMA} --tp 0 --pp 1"), "polder: llama3-405b: tp is 0; it is at least 1"),
        (format!("{LLAMA} --pp 4294967295"), "polder: llama3-405b: "),
        (
            format!("{LLAMA} --tp 8 --cp 1 --pp 1 --dp 8"),
            "tp x cp x pp of 8 and dp of 8 do not make 16384 accelerators",
        ),
        (format!("{LLAMA} --rack dgx"), "polder: nvl72-ndr: the platform has no rack \"dgx\"; it has nvl72"),
        (
            format!("{LLAMA} --fill 80"),
            "polder: nvl72-ndr: 80 accelerators of each rack cannot be used; a rack has 72",
        ),
        (
            "train --model llama3-405b --platform dgx-a100 --gpus 8 --batch 8".to_owned(),
            "polder: it does not fit: ",
        ),
        (
            "train --model llama --platform dgx-a100 --gpus 8".to_owned(),
            "polder: llama: no model of this name; there are ",
        ),
    ] {
        let said = refused(&arguments);
        assert!(said.contains(expected), "{said}");
    }
}

/// A model, a system and an execution in Calculon's format.
const CALCULON: [(&str, &str); 3] = [
    (
        "model.json",
        r#"{"hidden": 6144, "feedforward": 24576, "seq_size": 2048, "attn_heads": 64, "attn_size": 96, "num_blocks": 48}"#,
    ),
    (
        "system.json",
        r#"{"matrix": {"float16": {"tflops": 312, "gflops_efficiency": [[128, 0.95], [16, 0.9], [1, 0.6], [0, 0.1]]}},
        "vector": {"float16": {"tflops": 78, "gflops_efficiency": [[0, 0.5]]}},
        "mem1": {"GiB": 80, "GBps": 2048, "MB_efficiency": [[100, 0.9], [10, 0.75], [0, 0.5]]},
        "mem2": {"GiB": 512, "GBps": 32, "MB_efficiency": [[0, 0.9]]}, "processing_mode": "no_overlap",
        "networks": [
            {"bandwidth": 300, "efficiency": 0.65, "size": 8, "latency": 0.00001, "ops": {"all_reduce": [2.0, -1]}},
            {"bandwidth": 25, "efficiency": 0.9, "size": 64, "latency": 0.00002, "ops": {"all_reduce": [1.0, 0]}}]}"#,
    ),
    (
        "execution.json",
        r#"{"num_procs": 64, "tensor_par": 2, "pipeline_par": 8, "data_par": 4, "tensor_par_net": 0,
        "pipeline_par_net": 1, "data_par_net": 1, "batch_size": 64, "microbatch_size": 1, "datatype": "float16",
        "fused_activation": true, "attention_type": "multihead", "activation_recompute": "none",
        "pipeline_interleaving": 6, "optimizer_sharding": false, "tensor_par_comm_type": "rs_ag",
        "tensor_par_overlap": "ring", "seq_par_ag_redo": true, "data_par_overlap": true, "weight_offload": false,
        "activations_offload": false, "optimizer_offload": true, "training": true}"#,
    ),
];

#[test]
fn files_of_calculon_are_read_and_arguments_count_before_them() {
    let scratch = polder_mem::testing::Scratch::new();
    let [model, system, execution] = CALCULON.map(|(name, text)| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    });
    let train = format!("train --model {model} --platform {system} --layout {execution}");
    let given = json(&format!("{train} --json"));
    assert_eq!(
        (&given["accelerators"], &given["fill"], &given["points"]),
        (&64.into(), &2.into(), &1.into())
    );
    let layout = &given["layout"];
    let expected: [(&str, Value); 10] = [
        ("tp", 2.into()),
        ("pp", 8.into()),
        ("dp", 4.into()),
        ("interleave", 6.into()),
        ("batch", 64.into()),
        ("sequence_parallel", true.into()),
        ("gather_again", true.into()),
        ("flash", false.into()),
        ("recompute", "none".into()),
        ("zero", "none".into()),
    ];
    for (key, value) in expected {
        assert_eq!(layout[key], value, "{key}");
    }
    assert_eq!(layout["overlap"]["tensor"], true);
    assert_eq!(layout["offload"]["optimizer"], true);
    let over = json(&format!(
        "{train} --gpus 32 --dp 2 --recompute full --keep-gathered --no-overlap --fill 8 --json"
    ));
    assert_eq!(
        (&over["layout"]["tp"], &over["layout"]["dp"], &over["fill"]),
        (&2.into(), &2.into(), &8.into())
    );
    assert_eq!(
        (&over["layout"]["recompute"], &over["layout"]["gather_again"]),
        (&"full".into(), &false.into())
    );
    assert_eq!(over["layout"]["overlap"]["tensor"], false);
    // A system is a platform wherever one is asked for, beside any model.
    let against = format!("train --model llama3-8b --platform dgx-a100 --gpus 64 --against {system} --json");
    assert!(json(&against)["against"]["step"]["total_s"].is_number());
    assert!(
        said(&format!("search --model {model} --platform {system},dgx-a100 --gpus 16"))
            .contains("system.json")
    );
    assert!(
        said(&format!("train --model {model} --platform dgx-a100 --layout {execution}")).contains("step, s")
    );
}

#[test]
fn what_is_wrong_in_a_file_of_calculon_gets_one_line() {
    let scratch = polder_mem::testing::Scratch::new();
    let written = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let [model, system, execution] = CALCULON.map(|(name, text)| written(name, text));
    let train = |model: &str, system: &str, execution: &str| {
        refused(&format!("train --model {model} --platform {system} --layout {execution}"))
    };
    let [_, (_, system_text), (_, execution_text)] = CALCULON;
    let efficient = written("efficient.json", &system_text.replace("0.65", "1.65"));
    let inference =
        written("inference.json", &execution_text.replace("\"training\": true", "\"training\": false"));
    let small = written("small.json", &system_text.replace("\"size\": 64", "\"size\": 32"));
    let broken = written("broken.json", "{\"networks\": [");
    for (said, expected) in [
        (
            train(&model, &efficient, &execution),
            format!("{efficient}: networks[0].efficiency: expected a part from 0 to 1, found 1.65"),
        ),
        (
            train(&model, &system, &inference),
            format!("{inference}: training: expected true: inference is not predicted, found false"),
        ),
        (
            train(&model, &small, &execution),
            format!("{small}: 64 accelerators need 64 ports, there are 32; "),
        ),
        (train(&model, &broken, &execution), format!("{broken}: line 1: EOF while parsing")),
        (
            train(&system, &system, &execution),
            format!("{system}: expected a model, found a system of Calculon"),
        ),
        (
            train(&model, &model, &execution),
            format!("{model}: expected a system of Calculon, found a model of Calculon"),
        ),
        (
            train(&model, &system, &system),
            format!("{system}: expected an execution of Calculon, found a system of Calculon"),
        ),
        (train(&model, &system, "nowhere.json"), "nowhere.json: cannot read it: ".into()),
    ] {
        assert!(said.starts_with(&format!("polder: {expected}")), "{said}");
    }
}

#[test]
fn validation_prints_its_error_and_that_of_a_constant_rate() {
    let text = said("validate");
    for line in [
        "all tables, ",
        "without the scalars: mean ",
        "a constant rate an accelerator",
        "no run over CXL validates",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let report = json("validate --json");
    assert_eq!(report["tables"].as_array().unwrap().len(), 8);
    assert!(report["pooled"]["mean"].as_f64().unwrap() < 0.06);
}

#[test]
fn the_figure_of_scalepool_says_what_it_rests_on() {
    let text = said("reproduce scalepool-fig6");
    for line in ["mean, times faster ", "CXL ports an accelerator", "with one port to the pool", "fitted"] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(json("reproduce scalepool-fig6 --json")["pairs"].as_array().unwrap().len(), 5);
}

#[test]
fn all_that_polder_brings_along_is_listed() {
    let text = said("list");
    for name in ["nvl72-cxl", "dgx-a100", "llama3-405b", "palm-540b"] {
        assert!(text.contains(name), "{text}");
    }
}
