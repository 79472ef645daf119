//! Files of other tools, what Polder brings, and published steps.

use serde_json::Value;

use crate::{json, refused, scratch, stdout_of};

#[test]
fn a_platform_is_shown_with_its_sources_as_a_file_that_is_one() {
    let scratch = scratch();
    let path = scratch.path().join("shown.toml");
    for name in polder_platform::names(polder_platform::Folder::Platforms) {
        let text = stdout_of(&format!("show {name}"));
        let platform = polder_platform::Platform::load(name).unwrap();
        assert!(text.contains(&format!("\n# source: {}\n", platform.source)), "{text}");
        std::fs::write(&path, &text).unwrap();
        let shown = polder_platform::Platform::load(path.to_str().unwrap()).unwrap();
        let [shown, platform] = [shown, platform].map(|it| toml::to_string(&it).unwrap());
        assert_eq!(shown, platform);
    }
    let text = stdout_of("show nvl72-cxl");
    for line in ["# extends nvl72, source: ", "# between racks: 110.7", "[rack.nvl72.accelerator.fitted]"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(refused("show nowhere").starts_with("polder: nowhere: no platform of this name; there are "));
    for folder in [polder_platform::Folder::Models, polder_platform::Folder::Prices] {
        for name in polder_platform::names(folder) {
            assert_eq!(stdout_of(&format!("show {name}")), polder_platform::text(folder, name).unwrap());
        }
    }
    let shown: serde_json::Value = serde_json::from_str(&stdout_of("show gpt3-175b --json")).unwrap();
    assert!(shown["title"].is_string(), "{shown}");
}

#[test]
fn a_config_without_a_sequence_takes_the_one_that_is_given() {
    let scratch = scratch();
    let path = scratch.path().join("config.json");
    let config =
        r#"{"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}"#;
    std::fs::write(&path, config).unwrap();
    let cut = format!("--model {} --platform dgx-h100 --gpus 8 --batch 64", path.display());
    let asked = refused(&format!("train {cut}"));
    let problem =
        "max_position_embeddings: expected a whole number, found nothing; give the tokens of a sequence";
    assert_eq!(asked, format!("polder: {}: {problem}", path.display()));
    assert!(stdout_of(&format!("train {cut} --sequence 2048")).contains("bloom of "));
    assert!(stdout_of(&format!("search {cut} --sequence 2048 --tokens 1e12 --prices watts")).contains("tp"));
    // Keys and values of so many tokens are read; gradients have none.
    let path = path.display();
    let kept = stdout_of(&format!("inference --platform nvl72-cxl --model {path} --context 8192"));
    assert!(kept.contains("8,192 tokens of 492 kB each"), "{kept}");
    // A table of learned positions ends.
    let learned = scratch.path().join("learned.json");
    std::fs::write(&learned, r#"{"model_type": "gpt2", "n_positions": 1024}"#).unwrap();
    let learned = learned.display();
    for asked in [
        format!("train --model {learned} --platform dgx-h100 --gpus 8 --sequence 1025"),
        format!("inference --platform nvl72-cxl --model {learned} --context 1025"),
        format!("offload --platform finetuning-a --model {learned} --context 1025"),
    ] {
        let why =
            format!("polder: {learned}: sequence: expected 1024 at most, the learned positions, found 1025");
        assert_eq!(refused(&asked), why);
    }
    assert!(
        stdout_of(&format!("offload --platform finetuning-a --model {learned} --context 1024"))
            .contains("gpt2 of ")
    );
    let synced = stdout_of(&format!(
        "sync --model {path} --forward 1ms --backward 2ms --worker-bandwidth 10GB/s --workers 2"
    ));
    assert!(synced.contains("of gradients in 31 layers"), "{synced}");
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
    let scratch = scratch();
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
        stdout_of(&format!("search --model {model} --platform {system},dgx-a100 --gpus 16"))
            .contains("system.json")
    );
    let priced = format!("search --model {model} --platform {system} --gpus 16 --prices watts");
    assert!(refused(&priced).contains("watts: machine: expected"), "{}", refused(&priced));
    assert!(
        stdout_of(&format!("train --model {model} --platform dgx-a100 --layout {execution}"))
            .contains("step, s")
    );
}

#[test]
fn what_is_wrong_in_a_file_of_calculon_gets_one_line() {
    let scratch = scratch();
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
    for (message, expected) in [
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
        assert!(message.starts_with(&format!("polder: {expected}")), "{message}");
    }
}

#[test]
fn validation_prints_its_error_and_that_of_a_constant_rate() {
    let text = stdout_of("validate");
    for line in [
        "training steps, each predicted with constants and a range that were set without its publication\n",
        "\n  MoE  ",
        "constant rate",
        "refused: do not fit",
        ": refused, does not fit",
        ": outside",
        "not judged ",
        "interleave  published s ",
        "\n  530B, interleave 3 ",
        "not in the publication, assumed: sizes of micro-batches; interleave: 2 from eight stages on where the blocks of a stage divide by two, 1 elsewhere",
        "no run over CXL validates",
    ] {
        assert!(text.contains(line), "{text}");
    }
    // What nothing is fitted to stands before what constants are fitted to.
    let [blind, others] = ["\nblind: nothing is fitted to them", "\nothers, each without its publication"]
        .map(|title| text.find(title).unwrap());
    assert!(blind < others, "{text}");
    let report = json("validate --json");
    let tables = report["tables"].as_array().unwrap();
    assert_eq!((tables.len(), tables.iter().filter(|it| it["blind"] == true).count()), (15, 7));
    let number = |of: &str, key: &str| report[of][key].as_f64().unwrap();
    assert!(number("pooled", "mean") < 0.06 && number("pooled", "mean") < number("blind", "mean"));
}

#[test]
fn fabrics_and_memory_are_judged_apart_from_training_steps() {
    let text = stdout_of("validate");
    let (steps, fabrics) = text.split_once("\nfabrics and memory, apart from training steps\n").unwrap();
    assert!(!steps.contains("Vistara"), "{steps}");
    for line in [
        "Vistara, Table III\n",
        "fitted",
        "broken",
        "holds",
        "not explained: ",
        "come out the same, to 0.0%",
        "assumed: Figure 11 is left out: memory that CPUs do not cache, ",
        "not judged: two-sided, Ethernet, 1 MB, 32 processes: it follows from the rate of Ethernet, which is fitted",
        "trends; no side of one is a figure that a constant of this table is fitted to:",
        "not judged: bandwidth, two-sided: CXL over Ethernet: both sides are fitted: ",
    ] {
        assert!(fabrics.contains(line), "{line}: {fabrics}");
    }
    let report = json("validate --json");
    let rows = |of: &str| {
        report[of].as_array().unwrap().iter().flat_map(|it| it["rows"].as_array().unwrap()).count()
    };
    let judged = report["fabrics_pooled"]["rows"].as_u64().unwrap();
    assert!(0 < judged && judged < rows("fabrics") as u64);
    assert_eq!(rows("tables"), 38 + 35, "rows of fabrics are not among those of steps");
}

#[test]
fn all_that_polder_brings_along_is_listed() {
    let text = stdout_of("show");
    for name in
        ["nvl72-cxl", "dgx-a100", "memserver", "cmpi", "finetuning-b", "llama3-405b", "palm-540b", "watts"]
    {
        assert!(text.contains(name), "{text}");
    }
    let listed = json("show --json");
    for (kind, folder) in [
        ("platforms", polder_platform::Folder::Platforms),
        ("models", polder_platform::Folder::Models),
        ("prices", polder_platform::Folder::Prices),
    ] {
        let names: Vec<_> =
            listed[kind].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(names, polder_platform::names(folder), "{kind}");
    }
    let shown = json("show nvl72-cxl --json");
    let platform = polder_platform::Platform::load("nvl72-cxl").unwrap();
    assert_eq!(shown["platform"], serde_json::to_value(&platform).unwrap());
}

#[test]
fn a_cluster_of_simgrid_is_a_fabric() {
    let scratch = scratch();
    let path = scratch.path().join("cluster.xml").display().to_string();
    let cluster = |more: &str| {
        let text = format!(
            "<platform version=\"4.1\">\n<cluster id=\"c\" prefix=\"\" suffix=\"\" speed=\"1Gf\" bw=\"1GBps\" lat=\"50us\" {more}/>\n</platform>"
        );
        std::fs::write(&path, text).unwrap();
    };
    cluster("radical=\"0-3\"");
    let incast = format!("fabric --platform {path} --gpus 4 --pattern incast --message 1MB");
    let found = json(&format!("{incast} --json"));
    // Three messages take the link of one host, and each begins after both of its links.
    assert!((found["total_s"].as_f64().unwrap() / 3.1e-3 - 1.0).abs() < 1e-4, "{found}");
    for (arguments, why) in [
        (
            "--gpus 4 --fidelity L2",
            "fidelity: expected L0 or L1, because a platform of SimGrid has no flits, found L2",
        ),
        ("--gpus 4 --rack r", "has no rack \"r\"; it has c"),
        ("--gpus 5", "radical: expected 4 hosts of cluster c at most, found 5"),
    ] {
        let line = refused(&format!("fabric --platform {path} --pattern incast {arguments}"));
        assert!(line.contains(why), "{line}");
    }
    let line = refused(&format!("train --model llama3-8b --platform {path} --gpus 4"));
    assert!(line.contains("a platform of SimGrid is a fabric alone"), "{line}");
    cluster("radical=\"0-15\" topology=\"FAT_TREE\" topo_parameters=\"2;4,4;1,4;1,1\"");
    let far = json(&format!("fabric --platform {path} --gpus 16 --pattern shift --message 1MB --json"));
    // Four links each way, and no link is shared.
    assert!((far["total_s"].as_f64().unwrap() / 1.2e-3 - 1.0).abs() < 1e-4, "{far}");
    cluster("radical=\"0-15\" topology=\"TORUS\" topo_parameters=\"4,2,2\"");
    let line = refused(&incast);
    assert!(
        line.contains("cluster.xml: line 2: <cluster>: topology: expected FLAT or FAT_TREE, found TORUS"),
        "{line}"
    );
}
