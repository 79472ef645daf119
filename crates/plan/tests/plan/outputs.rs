//! Tables, pages and bad input of all commands.

use std::process::{Command, Output};

use serde_json::Value;

use crate::train::LLAMA;
use crate::{plan, refused, scratch, stdout_of};

/// What is written nowhere else would be lost.
#[test]
fn no_output_replaces_an_input() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (ours, base) = (path("ours.toml"), path("base.toml"));
    let text = |of: &str| format!("extends = \"{of}\"\ntitle = \"ours\"\nsource = \"x\"\n");
    std::fs::write(&base, text("finetuning-a")).unwrap();
    std::fs::write(&ours, text(&base)).unwrap();
    let search = format!("search --model llama3-8b --platform {ours} --gpus 2 --batch 2");
    let offload = format!("offload --model qwen2.5-7b --platform {ours} --context 4096");
    let train = format!("train --model llama3-8b --platform {ours} --gpus 2 --batch 2");
    let link = path("link.csv");
    std::os::unix::fs::symlink(&ours, &link).unwrap();
    for (command, option) in [
        (&search, "--csv"),
        (&search, "--html"),
        (&offload, "--csv"),
        (&offload, "--html"),
        (&train, "--trace"),
        (&train, "--html"),
    ] {
        // Also what the file extends, and by another name.
        for input in [&ours, &base, &link] {
            let Output { status, stderr, .. } = plan(&format!("{command} {option} {input}"));
            let stderr = String::from_utf8(stderr).unwrap();
            let expected = format!(
                "polder: {input}: cannot write it: this command has read it, and would replace it; name another file\n"
            );
            assert!(!status.success() && stderr == expected, "{option}: {stderr}");
            assert_eq!(std::fs::read_to_string(&base).unwrap(), text("finetuning-a"));
            assert_eq!(std::fs::read_to_string(&ours).unwrap(), text(&base));
        }
    }
    // A file of an earlier run is no input.
    let csv = path("front.csv");
    stdout_of(&format!("{search} --csv {csv}"));
    stdout_of(&format!("{search} --csv {csv}"));
}

/// Nothing is read before: no machine of that name is there.
#[test]
fn one_file_for_two_outputs_is_refused_before_anything_is_predicted() {
    let scratch = scratch();
    let path = scratch.path().join("out").display().to_string();
    let same = format!("{}/./out", scratch.path().display());
    for (command, options) in [
        ("train --model llama3-8b --gpus 8", &["trace", "html"][..]),
        ("search --model llama3-8b --gpus 8", &["csv", "html"]),
        ("pays --model llama3-8b --gpus 8", &["csv", "html"]),
        ("memory", &["csv", "html"]),
        ("fabric --gpus 8", &["csv", "html", "trace"]),
        ("offload --model qwen2.5-7b --context 4096", &["csv", "html"]),
        ("tier --idle cache", &["csv", "html"]),
    ] {
        for (at, one) in options.iter().enumerate() {
            for (other, twice) in options[..at].iter().flat_map(|other| [(other, &path), (other, &same)]) {
                let line = format!("{command} --platform no-such --{other} {path} --{one} {twice}");
                let expected =
                    format!("polder: {path}: two outputs would be written to it; name another file for one");
                assert_eq!(refused(&line), expected, "{line}");
                assert!(!scratch.path().join("out").exists(), "{line}");
            }
        }
    }
}

#[test]
fn no_cell_of_a_table_is_a_formula() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (trace, csv) = (path("trace.csv"), path("out.csv"));
    std::fs::write(&trace, "generation,service,page\n1,=HYPERLINK(1),0\n1,@db,0\n1,+x,0\n1,-y,0\n").unwrap();
    stdout_of(&format!("tier --trace {trace} --ratio 1:1 --csv {csv}"));
    let text = std::fs::read_to_string(&csv).unwrap();
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let names: Vec<_> = reader.records().map(|it| it.unwrap()[1].to_owned()).collect();
    assert_eq!(names, ["'=HYPERLINK(1)", "'@db", "'+x", "'-y"]);
}

/// So that a page that was sent to someone can be made again.
#[test]
fn every_page_says_what_made_it() {
    let scratch = scratch();
    let path = scratch.path().join("page.html").display().to_string();
    for command in [
        "train --model llama3-8b --platform dgx-h100 --gpus 8 --batch 8 --tp 8",
        "search --model llama3-8b --platform dgx-a100,dgx-h100 --gpus 8 --batch 8 --tp 8",
        "offload --model qwen2.5-7b --platform finetuning-a --context 4096",
        "fabric --platform nvl72-ndr --gpus 128",
        "memory --platform nvl72-cxl",
        "tier --idle cache",
    ] {
        stdout_of(&format!("{command} --html {path}"));
        let page = std::fs::read_to_string(&path).unwrap();
        let made =
            page.split("<p class=\"note\">polder ").nth(1).and_then(|it| it.split("</p>").next()).unwrap();
        let (head, line) = made.split_once(": ").unwrap();
        assert_eq!(
            line.replace("polder-plan ", "polder plan "),
            format!("polder plan {command} --html {path}")
        );
        let (version, day) = head.split_once(", ").unwrap();
        assert_eq!((version, day.len()), (env!("CARGO_PKG_VERSION"), "2026-11-28".len()), "{head}");
        // Nothing is fetched, and nothing left open.
        assert!(!page.contains("http") && !page.contains("src=") && !page.contains('@'), "{command}");
    }
}

/// Wherever a file is named: a device, a pipe, a folder and a file beyond all bounds, and nothing of them is read for long.
#[test]
fn what_is_no_regular_file_or_too_large_is_refused_in_one_line() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (pipe, large) = (path("pipe.json"), path("large.toml"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::File::create(&large).unwrap().set_len((16 << 20) + 1).unwrap();
    let folder = scratch.path().display().to_string();
    let no_file = "expected a regular file, found a device, a pipe or a socket";
    for (name, problem) in [
        ("/dev/zero", no_file),
        (pipe.as_str(), no_file),
        (folder.as_str(), "expected a regular file, found a folder"),
        (large.as_str(), "expected a file of 16 MiB at most, found a larger one"),
    ] {
        for arguments in [
            format!("show {name}"),
            format!("train --model {name} --platform dgx-h100 --gpus 8"),
            format!("train --model llama3-8b --platform {name} --gpus 8"),
            format!("train --model llama3-8b --platform dgx-h100 --layout {name}"),
            format!("search --model llama3-8b --platform dgx-h100 --gpus 8 --prices {name}"),
        ] {
            assert_eq!(refused(&arguments), format!("polder: {name}: {problem}"), "{arguments}");
        }
    }
    std::fs::File::create(&large).unwrap().set_len((1 << 30) + 1).unwrap();
    for (name, problem) in [
        ("/dev/zero", no_file),
        (pipe.as_str(), no_file),
        (large.as_str(), "expected a file of 1024 MiB at most, found a larger one"),
    ] {
        for arguments in [format!("tier --record {name}"), format!("tier --ratio 3:1 --trace {name}")] {
            assert_eq!(refused(&arguments), format!("polder: {name}: {problem}"), "{arguments}");
        }
    }
}

#[test]
fn what_a_terminal_takes_as_a_command_is_printed_escaped_and_no_name() {
    let scratch = scratch();
    let write = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let titled = "title = \"ours \\u001b[31mred\"\nsource = \"a\\u202eb\"\n";
    let platform = write("ours.toml", &format!("extends = \"dgx-h100\"\n{titled}"));
    let text = stdout_of(&format!("show {platform}"));
    assert!(text.contains(": ours \\u{1b}[31mred\n# source: a\\u{202e}b\n"), "{text}");
    let config = r#"{"model_type": "\u001b[31mllama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}"#;
    let model = write("config.json", config);
    let text = refused(&format!("train --model {model} --platform {platform} --gpus 8 --tp 8"));
    assert!(text.contains("found \"\\u001b[31mllama\"") && !text.contains('\u{1b}'), "{text}");
    let model = write("model.toml", "extends = \"llama3-8b\"\ntitle = \"\\u001b[31mours\"\n");
    let text = stdout_of(&format!("train --model {model} --platform {platform} --gpus 8 --tp 8"));
    assert!(text.contains("model.toml: \\u{1b}[31mours on 8") && !text.contains('\u{1b}'), "{text}");
    let named = |name: &str, text: &str| {
        let path = write("named.toml", text);
        let message = refused(&format!("show {path}"));
        let key = message.strip_prefix(&format!("polder: {path}: ")).unwrap().to_owned();
        assert!(!message.contains('\u{1b}') && key.starts_with(name), "{message}");
        assert!(
            key.ends_with("expected a name without control characters, found \"\\u{1b}[31m\""),
            "{message}"
        );
    };
    let rack = polder_platform::Platform::load("nvl72").unwrap();
    let rack = toml::to_string(&rack.rack["nvl72"]).unwrap();
    named("rack: ", &format!("title = \"x\"\nsource = \"x\"\n{}", under("rack.\"\\u001b[31m\"", &rack)));
    named(
        "rack.nvl72.accelerator.name: ",
        "extends = \"nvl72\"\n[rack.nvl72.accelerator]\nname = \"\\u001b[31m\"",
    );
    named(
        "server.host.path: ",
        "extends = \"cmpi\"\n[server.host.path.\"\\u001b[31m\"]\nover = \"ethernet\"",
    );
    let prices = write("dear.toml", "title = \"x\"\n[machine.\"\\u001b[31m\"]");
    let message =
        refused(&format!("search --model llama3-8b --platform dgx-h100 --gpus 8 --prices {prices}"));
    assert!(
        message.ends_with("machine: expected a name without control characters, found \"\\u{1b}[31m\""),
        "{message}"
    );
}

/// The tables of a TOML text below a key.
fn under(key: &str, text: &str) -> String {
    let lines = text.lines().map(|line| match line.strip_prefix('[') {
        Some(rest) => format!("[{key}.{rest}\n"),
        None => format!("{line}\n"),
    });
    format!("[{key}]\n{}", lines.collect::<String>())
}

#[test]
fn numbers_that_make_no_sense_get_one_line_with_the_option_or_the_key() {
    let scratch = scratch();
    let path = scratch.path().join("odd.toml").display().to_string();
    let file = |text: &str, arguments: &str| {
        std::fs::write(&path, text).unwrap();
        refused(&arguments.replace("FILE", &path))
    };
    let train = "train --model llama3-8b --platform dgx-h100 --gpus";
    let search = "search --model llama3-8b --platform dgx-h100 --gpus";
    let model = "extends = \"mixtral-8x7b\"\n[experts]\ncount = 0";
    let group = "extends = \"nvl72-ndr\"\n[between]\ntopology = { kind = \"dragonfly\", endpoints = 8, group = 0, global = 4 }";
    let slow = "extends = \"dgx-h100\"\n[rack.dgx.host]\nmemory = { read = \"1 B/s\" }";
    let attach = "extends = \"dgx-h100\"\n[rack.dgx.host]\nattach = { bandwidth = \"1 B/s\" }";
    for (message, expected) in [
        (refused(&format!("{train} -8")), "--gpus: expected a whole number of accelerators, found \"-8\"".to_owned()),
        (refused(&format!("{search} -8")), "--gpus: expected a whole number of accelerators, found \"-8\"".into()),
        (refused(&format!("{search} 8,8")), "--gpus: expected each value once, found 8 twice".into()),
        (
            refused("search --model llama3-8b --platform nvl72,nvl72 --gpus 8"),
            "--platform: expected each value once, found nvl72 twice".into(),
        ),
        (
            refused(&format!("{train} 8 --batch 0")),
            "llama3-8b: batch is 0; it is at least 1; a batch of 1 would run".into(),
        ),
        (
            file(model, "train --model FILE --platform dgx-h100 --gpus 8"),
            format!("{path}: experts.count: expected a number from 1 to 67108864, found 0"),
        ),
        (
            file(group, "train --model llama3-8b --platform FILE --gpus 8"),
            format!("{path}: between.topology.group: expected at least one"),
        ),
        (
            file(slow, "train --model llama3-8b --platform FILE --gpus 8"),
            format!("{path}: rack.dgx.host.memory.read: expected 1 MB/s or more, found 1 B/s"),
        ),
        (
            file(attach, "train --model llama3-8b --platform FILE --gpus 8"),
            format!("{path}: rack.dgx.host.attach.bandwidth: expected 1 MB/s or more, found 1 B/s"),
        ),
        (
            refused(&format!("{train} 8 --keep-gathered --sequence-parallel false")),
            "--keep-gathered: nothing is gathered with --sequence-parallel false; give --sequence-parallel true".into(),
        ),
        (
            refused(&format!("{train} 8 --keep-gathered --tp 1")),
            "--keep-gathered: nothing is gathered with --tp 1; give --tp 2 or more".into(),
        ),
    ] {
        assert_eq!(message, format!("polder: {expected}"));
    }
    // What is kept is there: no layout without sequence parallelism is looked at, which would keep nothing.
    let front = stdout_of(&format!("{search} 8 --keep-gathered --json"));
    for line in front.lines() {
        let point: Value = serde_json::from_str(line).unwrap();
        let layout = &point["layout"];
        assert_eq!((&layout["sequence_parallel"], &layout["gather_again"]), (&true.into(), &false.into()));
    }
}

#[test]
fn a_page_holds_all_that_it_draws() {
    let scratch = scratch();
    let path = scratch.path().join("step.html");
    let cut = "--tp 8 --pp 16 --interleave 8 --micro-batch 1 --cp 1 --zero optimizer --offload optimizer";
    stdout_of(&format!("{LLAMA} {cut} --against nvl72-cxl --html {}", path.display()));
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(
        !page.contains("http") && !page.contains("src=") && !page.contains('@'),
        "nothing is fetched or left open"
    );
    let data = page.split("const plan = ").nth(1).and_then(|rest| rest.split(";\n").next()).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let number = |of: &Value| of.as_f64().unwrap();
    let platforms = data["platforms"].as_array().unwrap();
    let names: Vec<_> = platforms.iter().map(|platform| platform["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["nvl72-ndr", "nvl72-cxl"]);
    let mut drawn = std::collections::BTreeSet::new();
    for platform in platforms {
        let times = platform["times"].as_array().unwrap();
        let sum: f64 = times.iter().map(|part| number(&part[1])).sum();
        assert!((sum / number(&platform["total_s"]) - 1.0).abs() < 1e-9);
        assert!(times.iter().any(|part| number(&part[2]) > 0.0), "some is hidden");
        let tiers = platform["tiers"].as_array().unwrap();
        assert_eq!(tiers.len(), 2, "the accelerator's memory and the host's");
        for tier in tiers {
            let kinds = tier["kinds"].as_array().unwrap();
            let sum: f64 = kinds.iter().map(|kind| number(&kind[1])).sum();
            assert!((sum / number(&tier["used_gb"]) - 1.0).abs() < 1e-9, "{tier}");
            drawn.extend(kinds.iter().map(|kind| kind[0].as_str().unwrap()));
        }
        let timeline = platform["timeline"].as_array().unwrap();
        assert!(timeline.len() >= 2 * 16 * 8 * 16);
        drawn.extend(timeline.iter().map(|stretch| stretch[1].as_str().unwrap()));
        drawn.extend(times.iter().map(|part| part[0].as_str().unwrap().split(", ").next().unwrap()));
    }
    // One palette, by name.
    let palette = page.split("const palette = {").nth(1).and_then(|rest| rest.split("};").next()).unwrap();
    for name in drawn {
        assert!(palette.contains(&format!("\"{name}\": \"#")), "{name} has no colour");
    }
}
