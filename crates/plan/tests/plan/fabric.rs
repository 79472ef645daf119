//! `polder plan fabric`, and the fidelities of other commands.

use serde_json::Value;

use crate::{json, refused, scratch, stdout_of};

#[test]
fn flows_take_what_the_closed_form_says_but_where_they_share_links() {
    let scratch = scratch();
    let path = scratch.path().join("torus.toml").display().to_string();
    // A rack on each switch of a torus, and stages that lie in turn next to each other.
    let torus = "extends = \"dgx-h100\"\n[between]\nlinks = 1\ntopology = { kind = \"torus\", dimensions = [8, 4, 4], endpoints = 8 }";
    std::fs::write(&path, torus).unwrap();
    let seconds = |platform: &str, pp: u32, fidelity: &str| {
        let layout = format!("--tp 8 --pp {pp} --cp 1 --dp {} --micro-batch 1 --interleave 1", 128 / pp);
        let train = format!(
            "train --model gpt3-175b --platform {platform} --gpus 1024 --batch 512 {layout} --fidelity {fidelity}"
        );
        let answer = json(&format!("{train} --no-overlap --zero optimizer --recompute full --json"));
        assert_eq!(answer["fidelity"], fidelity);
        let data = &answer["step"]["communication"]["data"]["between"]["exposed_s"];
        [&answer["step"]["total_s"], data].map(|it| it.as_f64().unwrap())
    };
    for platform in ["nvl72-ndr", "nvl72-cxl", "dgx-h100"] {
        let [closed, flows] = ["L0", "L1"].map(|fidelity| seconds(platform, 8, fidelity)[0]);
        assert!((flows / closed - 1.0).abs() < 0.02, "{platform}: {closed} {flows}");
    }
    // Copies that are eight racks apart go along another axis than neighbours; the closed form takes both for neighbours of all axes.
    let [closed, flows] = ["L0", "L1"].map(|fidelity| seconds(&path, 8, fidelity)[1]);
    assert!(flows > 1.5 * closed, "{closed} {flows}");
    let text =
        stdout_of(&format!("train --model llama3-8b --platform {path} --gpus 64 --batch 64 --fidelity L1"));
    assert!(
        text.contains("communication by the flows of all groups at the same time (--fidelity L1)\n"),
        "{text}"
    );
    let text = stdout_of("train --model llama3-8b --platform dgx-h100 --gpus 64 --batch 64");
    assert!(text.contains("as if it were alone (--fidelity L0)\n"), "{text}");
}

/// What a step takes by each fidelity, and what of it copies take between racks.
fn by_fidelity(words: &str) -> [[f64; 2]; 3] {
    ["L0", "L1", "L2 --window 256KiB"].map(|fidelity| {
        let answer = json(&format!("{words} --fidelity {fidelity} --json"));
        assert_eq!(answer["fidelity"], fidelity[..2]);
        assert_eq!(answer["flits"].is_null(), !fidelity.starts_with("L2"), "{answer}");
        let data = &answer["step"]["communication"]["data"]["between"]["exposed_s"];
        [&answer["step"]["total_s"], data].map(|it| it.as_f64().unwrap())
    })
}

#[test]
fn a_step_takes_the_same_at_each_fidelity_unless_its_transfers_share_links() {
    let layout = "train --model llama3-8b --gpus 64 --batch 64 --micro-batch 1 --tp 8 --no-overlap";
    // No two transfers cross the same link.
    let [[alone, _], [flows, _], [flits, _]] =
        by_fidelity(&format!("{layout} --dp 4 --pp 2 --platform dgx-h100"));
    for other in [flows, flits] {
        assert!((other / alone - 1.0).abs() < 0.02, "{alone} {flows} {flits}");
    }
    // Eight of each rack send to the next rack over one link, and the closed form takes half of them to go the other way.
    let scratch = scratch();
    let ring = scratch.path().join("ring.toml").display().to_string();
    let torus = "extends = \"dgx-h100\"\n[between]\nlinks = 1\ntopology = { kind = \"torus\", dimensions = [8, 1, 1], endpoints = 8 }";
    std::fs::write(&ring, torus).unwrap();
    let [[_, alone], [_, flows], [_, flits]] = by_fidelity(&format!("{layout} --dp 8 --platform {ring}"));
    assert!(flows > 1.5 * alone && (flits / flows - 1.0).abs() < 0.05, "{alone} {flows} {flits}");
    let text = stdout_of(&format!("{layout} --dp 8 --platform {ring} --fidelity L2 --window 256KiB"));
    assert!(
        text.contains("(--fidelity L2): ") && text.contains(" flit-hops of the first 262 kB of"),
        "{text}"
    );
}

#[test]
fn a_step_of_too_many_flits_is_refused_before_any_is_followed() {
    let step =
        "train --model llama3-70b --platform nvl72-cxl --gpus 576 --batch 576 --tp 8 --pp 4 --micro-batch 1";
    let line = refused(&format!("{step} --fidelity L2"));
    let (_, rest) = line.split_once("nvl72-cxl: flit by flit it takes ").unwrap_or_else(|| panic!("{line}"));
    let (hops, rest) =
        rest.split_once(" flit-hops, more than the 500000000 that are followed; give --window ").unwrap();
    assert!(hops.parse::<u64>().unwrap() > 500_000_000, "{line}");
    assert!(rest.ends_with("KiB of each message, or fidelity L1"), "{line}");
    let line = refused(&format!("{step} --window 1MiB"));
    assert!(line.contains("fidelity: expected L2, which windows, channels"), "{line}");
}

#[test]
fn failed_links_slow_a_step_and_are_refused_where_they_cannot_be() {
    let train =
        "train --model gpt3-175b --platform nvl72-ndr --gpus 1152 --tp 8 --pp 8 --batch 1152 --micro-batch 1";
    // The first switch keeps two of its links to the next level.
    let links: Vec<_> = (2048..2078).map(|spine| format!("0-{spine}")).collect();
    let failed = format!("--fidelity L1 --failed {} --against nvl72-ndr", links.join(","));
    let answer = json(&format!("{train} {failed} --json"));
    assert_eq!(answer["failed"].as_array().unwrap().len(), 30);
    assert_eq!(answer["against"]["failed"], serde_json::json!([]));
    let seconds = |answer: &Value| answer["step"]["total_s"].as_f64().unwrap();
    assert!(seconds(&answer) > 1.01 * seconds(&answer["against"]), "{answer}");
    let text = stdout_of(&format!("{train} {failed}"));
    assert!(text.contains("at the same time (--fidelity L1), without 30 failed links\n"), "{text}");
    let cut: Vec<_> = (2048..2080).map(|spine| format!("0-{spine}")).collect();
    for (options, error) in [
        ("--fidelity L2".into(), " flit-hops, more than the 500000000 that are followed; give --window "),
        ("--failed 0-2048".to_owned(), "failed links change flows alone; take fidelity L1 or L2"),
        (
            "--fidelity L1 --failed 0-2048,0-2048".into(),
            "the link between switch 0 and switch 2048 has failed already; name it once",
        ),
        (
            "--fidelity L1 --failed 0-1".into(),
            "failed links between racks: no link joins switch 0 and switch 1",
        ),
        ("--fidelity L1 --failed 0".into(), "--failed: expected two switches such as 3-520, found \"0\""),
        (format!("--fidelity L1 --failed {}", cut.join(",")), "the failed links cut the fabric in two"),
    ] {
        let refused = refused(&format!("{train} {options}"));
        assert!(refused.contains(error), "{options}: {refused}");
    }
}

#[test]
fn a_failed_link_of_a_torus_changes_all_routes_and_one_of_other_racks_cuts_nothing() {
    let scratch = scratch();
    let ring = scratch.path().join("ring.toml").display().to_string();
    let torus = "extends = \"dgx-h100\"\n[between]\nlinks = 1\ntopology = { kind = \"torus\", dimensions = [8, 1, 1], endpoints = 8 }";
    std::fs::write(&ring, torus).unwrap();
    let train = format!("train --model llama3-8b --platform {ring} --batch 16 --tp 8 --micro-batch 1");
    // A switch that no rank is at loses both of its links.
    let failed = "--fidelity L1 --failed 4-5,5-6";
    let text = stdout_of(&format!("{train} --gpus 16 {failed}"));
    for line in
        ["(--fidelity L1), without 2 failed links\n", "without detours; with none they go one axis after"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    let line = refused(&format!("{train} --gpus 64 {failed}"));
    assert!(line.contains("no way leads from port 0 to port 40: the failed links cut"), "{line}");
    let line = refused(&format!("{train} --gpus 8 {failed}"));
    assert!(line.contains("links between racks failed, and 8 accelerators are in one rack"), "{line}");
}

#[test]
fn messages_of_a_pattern_share_the_links_of_a_fabric() {
    let pattern = "fabric --platform nvl72-ndr --gpus 1024";
    let text = stdout_of(pattern);
    assert!(
        text.starts_with("permutation of 67.1 MB on nvl72-ndr, 1,024 accelerators, fabric between racks"),
        "{text}"
    );
    assert!(text.contains("1,024 messages") && text.contains("most used links"), "{text}");
    let found = json(&format!("{pattern} --json"));
    let last = |found: &Value| found["seconds"]["max_s"].as_f64().unwrap();
    assert!(last(&json(&format!("{pattern} --routing adaptive --json"))) < last(&found));
    // A link of the most used that joins switches fails: what went over it is slower, and the answer says so.
    let shift = format!("{pattern} --pattern shift --json");
    let whole = json(&shift);
    let of = |link: &Value, end: &str| link[end].as_str().unwrap().strip_prefix("switch ").map(String::from);
    let link =
        whole["links"].as_array().unwrap().iter().find_map(|it| Some((of(it, "from")?, of(it, "to")?)));
    let (one, other) = link.unwrap();
    assert!(last(&json(&format!("{shift} --failed {one}-{other}"))) > last(&whole));
    let scratch = scratch();
    let [csv, html, trace] =
        ["csv", "html", "trace"].map(|name| scratch.path().join(name).display().to_string());
    stdout_of(&format!("{pattern} --csv {csv} --html {html} --trace {trace}"));
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    assert_eq!(read(&csv).lines().count(), 1025);
    assert!(read(&html).contains("permutation of 67.1 MB"));
    assert!(read(&html).contains("Simulated by flows (--fidelity L1): "));
    let events =
        serde_json::from_str::<Value>(&read(&trace)).unwrap()["traceEvents"].as_array().unwrap().len();
    assert_eq!(events, 1024);
    let text =
        stdout_of("fabric --platform nvl72-cxl --gpus 128 --message 4MiB --fidelity L2 --window 256KiB");
    let alone = stdout_of(&format!("{pattern} --fidelity L0"));
    assert!(!alone.contains("most used links") && alone.contains("nothing shares a link"), "{alone}");
    assert!(!alone.contains('%'), "{alone}");
    // Too short for the longest way, and the window that is named is not.
    let short = "fabric --platform nvl72-cxl --gpus 128 --message 4MiB --fidelity L2 --window";
    let text_of = |window: &str| stdout_of(&format!("{short} {window}"));
    let unsteady = text_of("64KiB");
    let (_, rest) =
        unsteady.split_once("rates are steady from --window ").unwrap_or_else(|| panic!("{unsteady}"));
    let steady = text_of(rest.split_once(' ').unwrap().0);
    assert!(!steady.contains("rates are steady"), "{steady}");
    for line in [
        "fabric between racks, simulated flit by flit (--fidelity L2)\n",
        " steps of flits of the first 262 kB of each message",
        "1 virtual channel of ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn one_virtual_channel_of_a_torus_deadlocks_by_name() {
    let scratch = scratch();
    let path = scratch.path().join("ring.toml").display().to_string();
    let ring = "extends = \"dgx-h100\"\n[between]\nlinks = 1\ntopology = { kind = \"torus\", dimensions = [8, 1, 1], endpoints = 8 }";
    std::fs::write(&path, ring).unwrap();
    let shift = format!(
        "fabric --platform {path} --gpus 64 --pattern shift --message 256KiB --fidelity L2 --buffer 4"
    );
    let line = refused(&format!("{shift} --routing adaptive --virtual-channels 1"));
    assert!(
        line.contains("deadlock with 1 virtual channels") && line.contains("wait for each other: switch "),
        "{line}"
    );
    let found = json(&format!("{shift} --routing adaptive --json"));
    assert_eq!(found["flits"]["channels"], 4);
}

#[test]
fn a_pattern_that_cannot_be_is_refused_in_one_line() {
    let base = "fabric --platform nvl72-ndr --gpus";
    for (arguments, why) in [
        ("1", "accelerators: expected 2 or more, found 1"),
        ("-8", "--gpus: expected a whole number of accelerators"),
        ("64 --message 0", "--message: "),
        ("64 --rack none", "nvl72-ndr has no rack \"none\"; it has "),
        ("4096 --pattern all-to-all", "ask for fewer accelerators"),
        ("4000000", "ask for fewer accelerators"),
        ("1024 --failed 3", "--failed: expected two switches such as 3-520, found \"3\""),
        ("1024 --failed 0-1", "no link joins switch 0 and switch 1; switch 0's neighbours are "),
        ("1024 --failed 0-99999999", "there is no switch 99999999"),
        (
            "1024 --window 1MiB",
            "fidelity: expected L2, which windows, channels, buffers and error rates are for, found L1",
        ),
        (
            "1024 --fidelity L2 --window 64B",
            "window: expected 32 KiB or more, which are 8 flits on each link",
        ),
        ("1024 --fidelity L2 --window x", "--window: "),
        ("1024 --fidelity L2 --virtual-channels 0", "virtual channels: expected 1 to 255, found 0"),
        ("1024 --fidelity L2 --buffer 0", "buffer: expected 1 flit or more, found 0"),
        ("1024 --fidelity L2 --error-rate 0.9", "error rate: expected 0 to 0.5, found 0.9"),
        ("1024 --fidelity L2 --message 1TB", " of each message, or fidelity L1"),
    ] {
        let line = refused(&format!("{base} {arguments}"));
        assert!(line.contains(why), "{arguments}: {line}");
    }
    let line = refused("fabric --platform cmpi --gpus 8");
    assert!(line.ends_with("cmpi has no racks with accelerators"), "{line}");
}

#[test]
fn a_program_that_took_no_time_has_no_error_in_percent() {
    let scratch = scratch();
    let folder = scratch.path().display();
    std::fs::write(scratch.path().join("rank-0"), "polder-mpi-trace 1\nrank 0 1 here\nend 0\n").unwrap();
    let text = stdout_of(&format!("mpi {folder} --latency 1us --bandwidth 5GB/s"));
    assert!(text.contains(": 1 rank on 1 host, 0 messages of ") && !text.contains('%'), "{text}");
    let line =
        refused(&format!("chakra {folder} --compute 1TFLOP/s --memory 1GB/s --launch 1us --measured 0s"));
    assert!(line.ends_with("--measured: expected a time above 0"), "{line}");
    let trace = r#"{"schema": "1.1.1-chakra.0.0.4", "nodes": []}"#;
    std::fs::write(scratch.path().join("step.json"), trace).unwrap();
    let line = refused(&format!("chakra {folder} --compute 1TFLOP/s --memory 1GB/s --launch 1us"));
    assert!(
        line.contains("step.json: nodes: expected operators, each with an op_schema, found none"),
        "{line}"
    );
    // An operator of another library may be a product.
    let node = |id: u32, name: &str| {
        let tensor = r#"{"values": [], "shapes": [[8, 8]], "types": ["Tensor(float)"]}"#;
        format!(
            r#"{{"id": {id}, "name": "{name}", "ctrl_deps": 1, "inputs": {tensor}, "outputs": {tensor}, "attrs": [{{"name": "op_schema", "value": "a"}}]}}"#
        )
    };
    let nodes = [node(2, "aten::neg"), node(3, "flash_attn::_flash_attn_forward")].join(", ");
    let trace = format!(r#"{{"schema": "1.1.1-chakra.0.0.4", "nodes": [{nodes}]}}"#);
    std::fs::write(scratch.path().join("step.json"), trace).unwrap();
    let text = stdout_of(&format!("chakra {folder} --compute 1TFLOP/s --memory 1GB/s --launch 1us"));
    let line =
        "\nby their bytes alone, because their operations are not known: flash_attn::_flash_attn_forward\n";
    assert!(text.contains(line), "{text}");
    // What is always refused is no option that a user should find.
    let help = stdout_of("mpi --help");
    assert!(help.contains("--buffer") && !help.contains("--window"), "{help}");
}

#[test]
fn workers_on_a_platform_reach_the_same_at_each_fidelity() {
    let sync = "sync --layers 4x2MB --workers 16 --forward 40ms --backward 80ms --platform dgx-h100";
    let [alone, flows, flits] = ["L0", "L1", "L2"].map(|fidelity| {
        let found = json(&format!("{sync} --json --fidelity {fidelity}"));
        assert_eq!(found["fidelity"], fidelity);
        found["worker_bytes_per_s"].as_f64().unwrap()
    });
    for other in [flows, flits] {
        assert!((other / alone - 1.0).abs() < 0.02, "{alone} {flows} {flits}");
    }
    // As the collective of a step: inside racks, then each accelerator's part between them.
    let scratch = scratch();
    let call = r#"{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 2, "name": "record_param_comms", "ctrl_deps": 1,
        "inputs": {"shapes": [], "types": []}, "outputs": {"shapes": [], "types": []}, "attrs": [{"name": "collective_name", "value": "allreduce"},
        {"name": "dtype", "value": "Float"}, {"name": "in_msg_nelems", "value": 2000000}, {"name": "pg_size", "value": 16}]}]}"#;
    std::fs::write(scratch.path().join("step.json"), call).unwrap();
    let traced = json(&format!(
        "chakra {} --compute 1TFLOP/s --memory 1GB/s --launch 1us --platform dgx-h100 --json",
        scratch.path().display()
    ));
    let seconds = traced["predicted_s"].as_f64().unwrap();
    assert!((alone * seconds / (8e6 * 2.0 * 15.0 / 16.0) - 1.0).abs() < 1e-9, "{alone} B/s, {seconds} s");
    let text = stdout_of(&format!("{sync} --fidelity L1"));
    assert!(text.contains("an all-reduce among workers on dgx-h100 reaches "), "{text}");
    let line = refused(&format!("{} --fidelity L2", sync.replace("4x2MB", "4x2TB --shard 1GB")));
    assert!(line.contains(" flit-hops, more than the 500000000 that are followed; give --window "), "{line}");
}

#[test]
fn commands_in_which_nothing_shares_a_fabric_refuse_flows_with_the_reason() {
    for (words, why) in [
        ("memory --platform nvl72-cxl", "plan fabric has what messages"),
        (
            "search --model llama3-8b --gpus 64 --platform dgx-a100",
            "give the one that it finds to plan train",
        ),
        ("sync --layers 50MB --forward 40ms --backward 80ms --worker-bandwidth 5GB/s", "no fabric is"),
        ("offload --model llama3-8b --platform finetuning-a", "plan train --fidelity L1 has steps"),
        ("tier --idle 0.3", "a server's memory is no fabric"),
        ("coherence --platform nvl72-cxl", "plan fabric has what messages"),
        ("chakra none --compute 1TFLOP/s --memory 1GB/s --launch 1us", "no --platform says what they run on"),
        ("validate", "fitted in closed form"),
    ] {
        let refusal = refused(&format!("{words} --fidelity L1"));
        assert!(refusal.contains("--fidelity L1: plan ") && refusal.contains(why), "{refusal}");
    }
    let step = |level| {
        let words = "train --model llama3-8b --tp 8 --pp 1 --batch 20 --rack nvl72,ualink --gpus 8,8 --json";
        json(&format!("{words} {TWO_KINDS} --fidelity {level}"))["total_s"].as_f64().unwrap()
    };
    let [alone, flows, flits] = ["L0", "L1", "L2 --window 64KiB"].map(step);
    for other in [flows, flits] {
        assert!((other / alone - 1.0).abs() < 0.02, "{alone} {flows} {flits}");
    }
}

/// A platform that has two kinds of rack, once for each.
const TWO_KINDS: &str = "--platform mixed-nvlink-ualink-cxl,mixed-nvlink-ualink-cxl";

#[test]
fn a_window_that_is_too_short_is_named_by_each_command_that_follows_flits() {
    const SHORT: &str = "of each message (too short for the longest way: rates are steady from --window ";
    for command in [
        "sync --layers 10x1MiB --workers 8 --platform nvl72-cxl --forward 10ms --backward 20ms",
        &format!(
            "train --model llama3-70b {TWO_KINDS} --rack nvl72,ualink --gpus 16,16 --tp 8 --pp 1 --batch 16"
        ),
    ] {
        let at = |window| stdout_of(&format!("{command} --fidelity L2 --window {window}"));
        assert!(at("64KiB").contains(SHORT), "{command}");
        let steady = at("256KiB");
        assert!(steady.contains(" flit-hops of the first 262 kB of each message, "), "{steady}");
    }
}
