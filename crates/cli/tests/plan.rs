//! `polder plan` as a user gives it.

use std::process::{Command, Output};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
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
fn a_step_says_how_sure_it_is() {
    let given = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform";
    let step = json(&format!("{given} dgx-h100 --json"));
    let number = |key: &str| step["margin"][key].as_f64().unwrap();
    assert_eq!(step["margin"]["accelerator"], "H100-SXM5-80GB");
    assert!(0.0 < number("mean") && number("mean") < number("worst") && number("least") < number("most"));
    let scratch = polder_mem::testing::Scratch::new();
    let page = scratch.path().join("page.html");
    let text = said(&format!("{given} ualink-1024 --html {}", page.display()));
    let sure = "how sure: nothing was published of this accelerator; steps of others took ";
    assert!(text.contains(sure) && std::fs::read_to_string(&page).unwrap().contains(sure), "{text}");
}

#[test]
fn ranks_are_counted_in_the_order_that_is_given() {
    let cut = "--tp 8 --pp 8 --dp 4 --cp 1 --micro-batch 1 --interleave 1 --batch 1024";
    let train = format!("train --model llama3-70b --platform nvl72-ndr --gpus 256 {cut}");
    let json = |order: &str| json(&format!("{train} --json{order}"));
    let (usual, turned) = (json(""), json(" --order tp-cp-ep-pp-dp"));
    assert_eq!((&usual["order"], &turned["order"]), (&"tp-cp-ep-dp-pp".into(), &"tp-cp-ep-pp-dp".into()));
    let sent = |of: &Value, kind: &str| {
        let [inside, between] = ["inside", "between"].map(|scope| {
            let seconds = &of["step"]["communication"][kind][scope];
            seconds["exposed_s"].as_f64().unwrap() + seconds["hidden_s"].as_f64().unwrap()
        });
        (inside > 0.0, between > 0.0)
    };
    assert_eq!((sent(&turned, "pipeline"), sent(&turned, "data")), ((true, false), (false, true)));
    assert_eq!(sent(&usual, "pipeline"), (false, true));
    let text = said(&format!("{train} --order tp-cp-ep-pp-dp"));
    assert!(text.contains("ranks are placed tensor, context, expert, pipeline, data; 64 accel"), "{text}");

    let search =
        "search --model llama3-70b --platform nvl72-ndr --gpus 256 --batch 1024 --tp 8 --json --order";
    let front = said(&format!("{search} tp-cp-ep-pp-dp"));
    let first: Value = serde_json::from_str(front.lines().next().unwrap()).unwrap();
    assert_eq!(first["order"], "tp-cp-ep-pp-dp");
    assert_eq!(
        refused(&format!("{search} tp-dp")),
        "polder: --order: expected an order of tp, cp, ep, dp and pp, each once, such as \"tp-cp-ep-dp-pp\", found \"tp-dp\""
    );
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

const OURS: &str = r#"
title = "ours"
[everywhere]
electricity = { value = "0.10 USD/kWh", source = "our contract" }
carbon = { value = "300 gCO2/kWh", source = "our grid" }
[machine.dgx-h100]
rent = { value = "2.5 USD/h", source = "our cloud" }
accelerator = { power = { value = "1 kW", source = "our meter" } }
[machine.dgx-a100]
rent = { value = "1 USD/h", source = "our cloud" }
accelerator = { power = { value = "0.5 kW", source = "our meter" } }
[machine.nvl72-ndr]
rent = { value = "4 USD/h", source = "our cloud" }
"#;

#[test]
fn money_energy_and_carbon_are_axes_of_the_front() {
    let scratch = polder_mem::testing::Scratch::new();
    let [path, table, typed] =
        ["ours.toml", "front.csv", "front.parquet"].map(|name| scratch.path().join(name));
    std::fs::write(&path, OURS).unwrap();
    let search = "search --model llama3-8b --batch 512 --gpus 64,128 --platform dgx-a100,dgx-h100";
    let priced = format!("{search} --prices {}", path.display());
    let points = |arguments: &str| -> Vec<Value> {
        let text = said(&format!("{arguments} --json"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let number = |of: &Value| of.as_f64().unwrap();
    let count = |point: &Value| {
        let layout = &point["layout"];
        ["tp", "cp", "dp", "pp"].map(|kind| number(&layout[kind])).iter().product::<f64>()
    };
    // Without prices nothing speaks for fewer and slower accelerators.
    let plain = points(search);
    assert!(plain.iter().all(|point| point["bill"].is_null()));
    let places = |points: &[Value]| {
        let mut places: Vec<_> =
            points.iter().map(|it| (it["platform"].to_string(), count(it) as u32)).collect();
        places.sort();
        places.dedup();
        places
    };
    let front = points(&format!("{priced} --csv {} --parquet {}", table.display(), typed.display()));
    assert!(places(&front).len() > places(&plain).len(), "{:?}", places(&front));
    for point in &front {
        let (bill, seconds) = (&point["bill"], number(&point["step"]["total_s"]));
        let (dollars, watts) = if point["platform"] == "dgx-h100" { (2.5, 1000.0) } else { (1.0, 500.0) };
        for (figure, expected) in [
            ("money_usd", dollars / 3600.0 * count(point) * seconds),
            ("energy_j", watts * count(point) * seconds),
            ("carbon_g", watts * count(point) * seconds / 3.6e6 * 300.0),
        ] {
            assert!((number(&bill[figure]) / expected - 1.0).abs() < 1e-12, "{figure}: {bill}");
        }
        let beats = |other: &Value| {
            let axes = |of: &Value| {
                let memory = &of["step"]["memory"];
                let [time, money, energy] =
                    [&of["step"]["total_s"], &of["bill"]["money_usd"], &of["bill"]["energy_j"]];
                [time, money, energy, &memory["used_bytes"], &memory["far_bytes"]].map(number)
            };
            let (other, own) = (axes(other), axes(point));
            other != own && other.iter().zip(&own).all(|(other, own)| other <= own)
        };
        assert!(!front.iter().any(beats), "{point}");
    }
    let text = std::fs::read_to_string(&table).unwrap();
    assert!(text.lines().next().unwrap().ends_with(",bill_steps,bill_total_s,money_usd,energy_j,carbon_g"));
    let columns: Vec<_> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, vec![1 + 23 + 37 + 5; front.len() + 1]);

    // Parquet has the same columns, numbers as numbers.
    let file = SerializedFileReader::new(std::fs::File::open(&typed).unwrap()).unwrap();
    let mut lines = text.lines();
    let names: Vec<_> = lines.next().unwrap().split(',').collect();
    for (row, line) in file.get_row_iter(None).unwrap().zip(lines.by_ref()) {
        let row = row.unwrap();
        for (((name, field), cell), expected) in row.get_column_iter().zip(line.split(',')).zip(&names) {
            assert_eq!(name, expected);
            match field {
                Field::Str(text) => assert_eq!(format!("\"{text}\""), cell),
                Field::UInt(number) => assert_eq!(number.to_string(), cell),
                Field::Double(figure) => assert_eq!(figure.to_string(), cell),
                other => panic!("{name}: {other}"),
            }
        }
        assert_eq!(row.len(), names.len());
    }
    assert_eq!((file.metadata().file_metadata().num_rows() as usize, lines.next()), (front.len(), None));
    let elsewhere = refused(&format!("{priced} --parquet /nowhere/front.parquet"));
    assert!(elsewhere.starts_with("polder: /nowhere/front.parquet: cannot write it: "), "{elsewhere}");

    // A run of as many steps as make 1e12 tokens in 512 sequences of 8,192.
    let run = points(&format!("{priced} --tokens 1e12"));
    let steps = (1e12_f64 / (512.0 * 8192.0)).ceil();
    for (run, step) in run.iter().zip(&front) {
        assert_eq!(number(&run["bill"]["steps"]), steps);
        let times = number(&run["bill"]["money_usd"]) / number(&step["bill"]["money_usd"]);
        assert!((times / steps - 1.0).abs() < 1e-12);
    }
    let text = said(&format!("{priced} --tokens 1e12"));
    for line in [
        "that no other beats in time, memory, money, energy and carbon (simulated)",
        "run days",
        "kg CO2",
        "dgx-h100, 128 accelerators: 128 x accelerator, 1 kW; 128 x accelerator, 2.5 USD/h",
        "  accelerator, 2.5 USD/h: our cloud",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn an_axis_without_a_number_for_each_machine_is_left_out() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("ours.toml");
    std::fs::write(&path, OURS).unwrap();
    let search = "search --model llama3-8b --batch 512 --gpus 64 --tp 8";
    let text = said(&format!("{search} --platform dgx-h100,nvl72-ndr --prices {}", path.display()));
    assert!(text.contains("in time, memory and money (simulated)"), "{text}");
    assert!(text.contains("energy is left out: ") && text.contains("has none for nvl72-ndr"), "{text}");
    let text = said(&format!("{search} --platform dgx-h100 --prices watts"));
    assert!(text.contains("in time, memory and energy (simulated)"), "{text}");
    let said = refused(&format!("{search} --platform ualink-1024 --prices watts"));
    assert!(
        said.starts_with("polder: watts: machine: expected \"ualink-1024\", or its accelerator"),
        "{said}"
    );
    let said = refused(&format!("{search} --platform dgx-h100 --prices dear"));
    assert!(said.starts_with("polder: dear: no file of prices of this name; there are watts, or"), "{said}");
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
            "train --model llama3-8b --platform memserver --gpus 8".to_owned(),
            "polder: memserver: a training step needs accelerators, which this platform does not have; take ",
        ),
        (
            "search --model llama3-8b --platform cmpi --gpus 8".to_owned(),
            "polder: cmpi: a training step needs accelerators",
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
    let priced = format!("search --model {model} --platform {system} --gpus 16 --prices watts");
    assert!(refused(&priced).contains("watts: machine: expected"), "{}", refused(&priced));
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
        "memory: 36 of 38 published steps",
        ": does not fit",
        "not judged ",
        "no run over CXL validates",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let report = json("validate --json");
    assert_eq!(report["tables"].as_array().unwrap().len(), 8);
    assert!(report["pooled"]["mean"].as_f64().unwrap() < 0.06);
}

#[test]
fn fabrics_and_memory_are_judged_apart_from_training_steps() {
    let text = said("validate");
    let (steps, fabrics) = text.split_once("\nfabrics and memory, apart from training steps\n").unwrap();
    assert!(!steps.contains("Vistara"), "{steps}");
    for line in
        ["Vistara, Table III\n", "fitted", "broken", "holds", "not explained: ", "come out the same, to 0.0%"]
    {
        assert!(fabrics.contains(line), "{line}: {fabrics}");
    }
    let report = json("validate --json");
    let rows = |of: &str| {
        report[of].as_array().unwrap().iter().flat_map(|it| it["rows"].as_array().unwrap()).count()
    };
    let judged = report["fabrics_pooled"]["rows"].as_u64().unwrap();
    assert!(0 < judged && judged < rows("fabrics") as u64);
    assert_eq!(rows("tables"), 38, "rows of fabrics are not among those of steps");
}

#[test]
fn the_figure_of_scalepool_says_what_it_rests_on() {
    let text = said("reproduce scalepool-fig6");
    for line in [
        "mean, times faster ",
        "CXL ports an accelerator",
        "with one port to the pool",
        "fitted",
        "layout of GPT-3, tp/pp/dp ",
        "25.0 and 94.6, another fit's",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(json("reproduce scalepool-fig6 --json")["pairs"].as_array().unwrap().len(), 5);
}

#[test]
fn all_that_polder_brings_along_is_listed() {
    let text = said("list");
    for name in
        ["nvl72-cxl", "dgx-a100", "memserver", "cmpi", "finetuning-b", "llama3-405b", "palm-540b", "watts"]
    {
        assert!(text.contains(name), "{text}");
    }
}
