//! `polder-dev held-out`: from what a machine is measured to take to what is predicted of it.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use polder_dev::walk::{MessagePlace, collective};
use polder_mem::testing::{Scratch, install};
use polder_platform::{Exchange, Platform, Sharing};
use polder_schedule::Collective;
use serde_json::{Value, json};

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
    command.env("POLDER_CONFIG", "/dev/null").args(arguments).output().unwrap()
}

fn stdout_of(arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = run(arguments);
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = run(arguments);
    assert!(!status.success(), "{arguments:?}");
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

/// A machine whose ranks exchange bytes, as `polder probe` writes it.
const HERE: &str = r#"
title = "here"
source = "made up"
[sharing]
cores = 2
cache = "32 MB"
core_cache = "1 MB"
memory = { capacity = "24 GB", read = "20 GB/s", write = "10 GB/s", latency = "100 ns" }
[sharing.exchange.coherent]
call = "1 us"
turn = "1 us"
switch = "10 us"
cached = "20 GB/s"
copied = "10 GB/s"
passed = "20 GB/s"
near = "20 GB/s"
[sharing.exchange.software]
call = "1 us"
turn = "1 us"
switch = "10 us"
cached = "20 GB/s"
copied = "10 GB/s"
passed = "20 GB/s"
near = "20 GB/s"
write = "10 GB/s"
read = "10 GB/s"
"#;

#[test]
fn what_measures_in_python_ends_with_its_parent() {
    // A Python beside the program that says what it is, and works for ever in another process too.
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    let [python, program, ranks] = ["python", "polder", "ranks"].map(|name| place.join(name));
    let script = "#!/bin/sh\nsleep 1000 & echo $! $$ > \"$0.new\"; mv \"$0.new\" \"${0%/*}/ranks\"; wait\n";
    install(&python, script);
    std::fs::hard_link(env!("CARGO_BIN_EXE_polder-dev"), &program).unwrap();
    let platform = place.join("here.toml");
    std::fs::write(&platform, HERE).unwrap();
    let platform = platform.to_str().unwrap();
    let measures = [vec!["bench", "collectives"], vec!["held-out", "--platform", platform]];
    for (arguments, signal) in
        measures.iter().flat_map(|arguments| [(arguments, "KILL"), (arguments, "TERM")])
    {
        let mut command = Command::new(&program);
        command.env("POLDER_CONFIG", "/dev/null").args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        let mut parent = command.spawn().unwrap();
        while !ranks.exists() {
            assert!(parent.try_wait().unwrap().is_none(), "{arguments:?} ended");
            std::thread::yield_now();
        }
        let pids = std::fs::read_to_string(&ranks).unwrap();
        std::fs::remove_file(&ranks).unwrap();
        assert!(
            Command::new("kill").args(["-s", signal, &parent.id().to_string()]).status().unwrap().success()
        );
        parent.wait().unwrap();
        let runs = |pid: &str| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z")
        };
        let begin = format!("polder-test-{}-", parent.id());
        let lies = || {
            let mut names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
            names.any(|name| name.to_string_lossy().starts_with(&begin))
        };
        // The kernel tells those that clean up.
        while pids.split_whitespace().any(runs) || lies() {
            std::thread::yield_now();
        }
    }
    std::fs::remove_dir_all(place).unwrap();
}

/// Rows of a benchmark on a machine whose constants are others than it was said to have.
fn rows(sharing: &Sharing) -> String {
    let mut text = String::new();
    for (pool, procs, log) in ["coherent", "software"]
        .into_iter()
        .flat_map(|pool| (2..=4).map(move |procs| (pool, procs)))
        .flat_map(|(pool, procs)| (12..27).step_by(2).map(move |log| (pool, procs, log)))
    {
        let far = if pool == "software" { [6e9, 5e9] } else { [f64::INFINITY; 2] };
        let truth = Exchange::from_values([2e-6, 0.5e-6, 2e-5, 3e10, 8e9, 2.5e10, 1.5e10, far[0], far[1]]);
        let hosts: Vec<u16> = (0..procs).map(|rank| rank % 2).collect();
        let size =
            if log < 20 { format!("{} KiB", 1 << (log - 10)) } else { format!("{} MiB", 1 << (log - 20)) };
        for (name, place) in [("staged", MessagePlace::Staged), ("in-pool", MessagePlace::InPool)] {
            let us =
                1e6 * collective(sharing, &truth, Collective::AllReduce, &hosts, 1 << log, place).unwrap();
            let case = format!("all-reduce {size} {procs} procs {pool} {name}");
            let row = json!({ "bench": "collectives", "case": case, "metric": "time", "value": us, "low": us, "high": us,
                "unit": "us", "kind": "measured" });
            text += &format!("{row}\n");
        }
        let gloo = json!({ "bench": "collectives", "case": format!("all-reduce {size} {procs} procs gloo"),
            "metric": "time", "value": 1e4, "low": 1e4, "high": 1e4, "unit": "us", "kind": "measured" });
        text += &format!("{gloo}\n");
    }
    text
}

#[test]
fn every_other_size_and_number_of_processes_predicts_the_others() {
    let scratch = Scratch::new();
    let [here, measured] = ["here.toml", "rows.jsonl"].map(|name| scratch.path().join(name));
    std::fs::write(&here, HERE).unwrap();
    let here = here.to_str().unwrap();
    let sharing = Platform::load(here).unwrap().sharing.unwrap();
    std::fs::write(&measured, rows(&sharing)).unwrap();
    let measured = measured.to_str().unwrap();
    let line = ["held-out", "--platform", here, "--rows", measured];
    let report: Value = serde_json::from_str(&stdout_of(&[&line[..], &["--json"]].concat())).unwrap();
    let rows = report["rows"].as_array().unwrap();
    // Sizes and pools and places and numbers of ranks; gloo's are not predicted.
    assert_eq!(rows.len(), 8 * 2 * 2 * 3);
    let judged: Vec<_> = rows.iter().filter(|row| row["fitted"] == false).collect();
    // 4 of 8 sizes at 2 of 3 numbers of ranks are fitted.
    assert_eq!(judged.len(), rows.len() - 4 * 2 * 2 * 2);
    assert_eq!(judged.iter().filter(|row| row["case"].as_str().unwrap().contains(" 3 procs ")).count(), 32);
    // A third of the rows does not give all nine constants of a software-coherent pool: two rows of three ranks fall short.
    let error = |row: &&&Value| row["predicted_s"].as_f64().unwrap() / row["seconds"].as_f64().unwrap() - 1.0;
    let short: Vec<_> = judged.iter().filter(|row| error(row).abs() > 0.15).collect();
    assert!(short.len() <= 2 && short.iter().all(|row| error(row).abs() < 0.19), "{short:?}");
    assert!(
        short.iter().all(|row| row["case"].as_str().unwrap().contains(" 3 procs software ")),
        "{short:?}"
    );
    let text = stdout_of(&line);
    let far = "rows are off by more than 15%";
    assert!(text.contains("all: 64 judged rows: mean ") && text.contains("; 62 within 15%;"), "{text}");
    assert!(
        text.contains("32 judged rows: mean 0.2%, worst 0.8%; 32 within 15%;"),
        "the coherent pool: {text}"
    );
    assert!(text.contains(&format!("short: 2 {far}")), "{text}");
    for beside in [
        "plain interpolation of the fitted rows in log-log: 64 judged rows: mean ",
        "without what fitted rows say of rows like them: 64 judged rows: mean ",
        "a latency and a bandwidth for each pool, place and fitted number of processes: 32 judged rows: mean ",
    ] {
        assert!(text.contains(beside), "{beside}: {text}");
    }
    assert!(text.contains("; one run, which says nothing of how it repeats"), "{text}");
    // A row for each of two peers is one row.
    let twice = scratch.path().join("twice.jsonl");
    let beside = |line: &str| format!("{line}\n{line}\n");
    std::fs::write(
        &twice,
        std::fs::read_to_string(measured).unwrap().lines().map(beside).collect::<String>(),
    )
    .unwrap();
    let line_of_twice = ["held-out", "--platform", here, "--rows", twice.to_str().unwrap()];
    assert_eq!(stdout_of(&line_of_twice), text);
    // The median of the runs counts, neither the best nor the mean.
    let slower = scratch.path().join("slower.jsonl");
    let changed = |file: &Path, is_changed: fn(&str) -> bool, times: f64| {
        let row = |line: &str| {
            let mut row: Value = serde_json::from_str(line).unwrap();
            if is_changed(row["case"].as_str().unwrap()) {
                for key in ["low", "value", "high"] {
                    row[key] = (row[key].as_f64().unwrap() * times).into();
                }
            }
            format!("{row}\n")
        };
        let text: String = std::fs::read_to_string(measured).unwrap().lines().map(row).collect();
        std::fs::write(file, text).unwrap();
    };
    changed(&slower, |_| true, 1.5);
    let slower = slower.to_str().unwrap();
    let text = stdout_of(&[&line[..], &["--rows", slower, "--rows", measured]].concat());
    assert!(text.contains("; halves of the runs are 50.0% from each other"), "{text}");
    assert!(text.contains("all: 64 judged rows: mean ") && text.contains("; 62 within 15%;"), "{text}");
    let twice_slower = stdout_of(&[&line[..], &["--rows", slower, "--rows", slower, "--json"]].concat());
    let twice_slower: Value = serde_json::from_str(&twice_slower).unwrap();
    for (one, other) in rows.iter().zip(twice_slower["rows"].as_array().unwrap()) {
        let times = other["seconds"].as_f64().unwrap() / one["seconds"].as_f64().unwrap();
        assert!((times - 1.5).abs() < 1e-9, "{other}");
    }
    // It can fail: three processes that take twice as long are not what rows of two and four say.
    let doubled = scratch.path().join("doubled.jsonl");
    changed(&doubled, |case| case.contains(" 3 procs "), 2.0);
    let text = stdout_of(&["held-out", "--platform", here, "--rows", doubled.to_str().unwrap()]);
    assert!(text.contains("all: 64 judged rows: mean ") && text.contains("; 32 within 15%;"), "{text}");
    assert!(text.contains(&format!("short: 32 {far}")), "{text}");
    let three = text.lines().filter(|line| line.contains(" 3 procs ")).collect::<Vec<_>>();
    assert!(three.len() == 32 && three.iter().all(|line| line.contains("% short")), "{text}");
}

/// Cores of a machine that compute, and what a demo was measured to take on two of them.
const CORES: &str = r#"
[rack.here]
accelerators = 2
accelerator = { name = "core", compute = { fp32 = "100 GFLOP/s" }, memory = { capacity = "12 GB", read = "10 GB/s", write = "10 GB/s", latency = "100 ns" }, fitted = { matrix = 0.5, depth = 0.0, attention = 0.5, stream = 1.0, launch = "5 us", inside = 1.0, between = 1.0, straggle = 0.0 } }
host = { accelerators = 2, memory = { capacity = "24 GB", read = "20 GB/s", write = "10 GB/s", latency = "100 ns" }, attach = { kind = "ucie", bandwidth = "10 GB/s" } }
[rack.here.fabric]
links = 1
link = { rate = "80 Gb/s", lanes = 1, encoding = 1.0, flit = { bytes = "64 B", payload = "64 B" }, packet = { bytes = "64 B", payload = "64 B" }, propagation = "0 ns" }
switch = { ports = 2, latency = "0 ns", reduction = "none" }
topology = { kind = "single-hop" }
software = { message = "1 us", step = "1 us" }
"#;
const DEMO: &str = r#"{"model": {"title": "demo", "source": "x", "hidden": 384, "layers": 6, "heads": 6, "vocabulary": 256,
"sequence": 64, "tied": true}, "ranks": 2, "batch": 8, "steps": {"polder": [0.3, 0.4, 0.5], "gloo": [0.4, 0.5, 0.6]}}"#;

#[test]
fn the_demos_step_is_predicted_of_its_products_and_of_what_the_pool_takes() {
    let scratch = Scratch::new();
    let [here, measured, demo] =
        ["here.toml", "rows.jsonl", "train.json"].map(|name| scratch.path().join(name));
    std::fs::write(&here, format!("{HERE}{CORES}")).unwrap();
    std::fs::write(&demo, DEMO).unwrap();
    let [here, demo] = [&here, &demo].map(|path| path.to_str().unwrap());
    let sharing = Platform::load(here).unwrap().sharing.unwrap();
    std::fs::write(&measured, rows(&sharing)).unwrap();
    let measured = measured.to_str().unwrap();
    let line = ["held-out", "--platform", here, "--rows", measured, "--demo", demo, "--json"];
    let report: Value = serde_json::from_str(&stdout_of(&line)).unwrap();
    let step = &report["demo"];
    assert_eq!(step["measured_s"], json!([0.3, 0.4, 0.5]));
    let predicted = step["predicted_s"].as_f64().unwrap();
    // 6 operations a parameter and token at half of the peak, at least; and what moves besides is less than as much again.
    let products = 6.0 * 10.6e6 * 256.0 / 50e9;
    let found: Sharing = serde_json::from_value(report["sharing"].clone()).unwrap();
    let gradients = collective(
        &found,
        &found.exchange["software"],
        Collective::AllReduce,
        &[0, 1],
        43 << 20,
        MessagePlace::Staged,
    );
    let least = products + 0.9 * gradients.unwrap();
    assert!(predicted > least && predicted < 2.0 * least, "{predicted} for {least}");
    assert!((step["error"].as_f64().unwrap() - (predicted / 0.4 - 1.0)).abs() < 1e-9);
    // Without what computes it is left out, what was measured is not lost, and who named it is told.
    std::fs::write(here, HERE).unwrap();
    let printed = |arguments: &[&str]| {
        let Output { status, stdout, stderr } = run(arguments);
        let stderr = String::from_utf8(stderr).unwrap();
        assert!(!status.success() && stderr.contains("train.json: not predicted: "), "{stderr}");
        String::from_utf8(stdout).unwrap()
    };
    let report: Value = serde_json::from_str(&printed(&line)).unwrap();
    assert_eq!(report["demo"], Value::Null);
    let why = report["left_out"].as_str().unwrap();
    assert!(why.contains("a training step needs accelerators"), "{why}");
    assert_eq!(report["rows"].as_array().unwrap().len(), 96);
    let text = printed(&line[..line.len() - 1]);
    assert!(
        text.trim_end().lines().last().unwrap().starts_with("the demo's step: not predicted: "),
        "{text}"
    );
    // What lies there by itself is left out in silence.
    std::fs::create_dir(scratch.path().join("out")).unwrap();
    std::fs::copy(demo, scratch.path().join("out/train.json")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
    let unnamed = ["held-out", "--platform", "here.toml", "--rows", "rows.jsonl"];
    let done =
        command.env("POLDER_CONFIG", "/dev/null").current_dir(scratch.path()).args(unnamed).output().unwrap();
    assert!(
        done.status.success() && String::from_utf8(done.stdout).unwrap().contains("step: not predicted: ")
    );
    std::fs::write(demo, "{}").unwrap();
    let message = refused(&line);
    assert!(message.contains("train.json: expected what `make demo` measured: missing field"), "{message}");
}

#[test]
fn what_cannot_be_held_out_gets_one_line() {
    let scratch = Scratch::new();
    let [here, measured] = ["here.toml", "rows.jsonl"].map(|name| scratch.path().join(name));
    std::fs::write(&here, HERE).unwrap();
    std::fs::write(&measured, "{\"bench\": 1}\n").unwrap();
    let [here, measured] = [&here, &measured].map(|path| path.to_str().unwrap());
    let refusal = refused(&["held-out", "--platform", "dgx-a100"]);
    assert!(refusal.contains("dgx-a100: sharing: expected what ranks pay that exchange bytes"), "{refusal}");
    let refusal = refused(&["held-out", "--platform", here, "--rows", measured]);
    assert!(refusal.contains("rows.jsonl: line 1: expected a row of a benchmark"), "{refusal}");
    let sharing = Platform::load(here).unwrap().sharing.unwrap();
    let first = rows(&sharing).lines().next().unwrap().to_owned();
    let mut row: Value = serde_json::from_str(&first).unwrap();
    row["low"] = 0.into();
    std::fs::write(measured, format!("{first}\n{row}\n")).unwrap();
    let refusal = refused(&["held-out", "--platform", here, "--rows", measured]);
    assert!(refusal.contains("rows.jsonl: line 2: low: expected more than 0, found 0"), "{refusal}");
    (row["low"], row["value"]) = (1.into(), (-1).into());
    std::fs::write(measured, format!("{first}\n{row}\n")).unwrap();
    let refusal = refused(&["held-out", "--platform", here, "--rows", measured]);
    assert!(refusal.contains("rows.jsonl: line 2: value: expected more than 0, found -1"), "{refusal}");
    // The status says whether it could be judged.
    std::fs::write(measured, format!("{first}\n")).unwrap();
    let refusal = refused(&["held-out", "--platform", here, "--rows", measured]);
    assert!(refusal.contains("no row is judged: all are fitted; take more than one size"), "{refusal}");
    let gloo = rows(&Platform::load(here).unwrap().sharing.unwrap());
    let gloo: String =
        gloo.lines().filter(|line| line.contains("gloo")).map(|line| format!("{line}\n")).collect();
    assert!(!gloo.is_empty());
    for text in ["", &gloo] {
        std::fs::write(measured, text).unwrap();
        let refusal = refused(&["held-out", "--platform", here, "--rows", measured]);
        let expected = "rows.jsonl: expected all-reduces of `polder-dev bench collectives --json` through coherent, software, ";
        assert!(refusal.contains(expected) && refusal.trim_end().ends_with(", found none"), "{refusal}");
    }
    for name in ["/dev/zero", "/"] {
        let no_file = format!("polder: {name}: expected a regular file, found a ");
        for arguments in [
            ["held-out", "--platform", here, "--rows", name],
            ["held-out", "--platform", here, "--demo", name],
        ] {
            let refusal = refused(&[&arguments[..], &["--rows", measured]].concat());
            assert!(refusal.starts_with(&no_file), "{arguments:?}: {refusal}");
        }
    }
}
