//! `polder plan offload` and `sync`.

use serde_json::Value;

use crate::{json, refused, scratch, stdout_of};

const OFFLOAD: &str = "offload --model mistral-nemo-12b --platform finetuning-b --dram 128GiB";

#[test]
fn an_offloaded_step_is_printed_by_object_tier_and_phase() {
    let text = stdout_of(
        "offload --model qwen2.5-7b --platform finetuning-a --gpus 2 --context 4096,32768 --batch 1,32",
    );
    for line in [
        "Qwen2.5 7B on 2 accelerators of finetuning-a, simulated\n",
        "278 GB/s of DRAM were measured, where finetuning-a gives it 204.8 GB/s: both stand",
        "\ncontext 4,096, batch 1: 8,192 tokens a step\n",
        "\ncontext 32,768, batch 32: 2,097,152 tokens a step\n",
        "\nFWD, s ",
        "\nSTEP, s ",
        "\ntokens a second ",
        "\nof DRAM alone ",
        "\nGB in dram + cxl\n",
        "\n  activations, ",
        "\n  pinned rounding, 0 ",
        "\na GPU holds ",
        "does not fit: a GPU holds 80.0 GB and would have ",
        "; --batch ",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
}

#[test]
fn an_offloaded_step_is_the_same_in_json_csv_and_on_the_page() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (csv, html, policy) = (path("a.csv"), path("a.html"), path("policy.json"));
    // Numbers by tier, and a list; what is not named lies in DRAM.
    let fractions = r#"{"optimizer states": {"dram": 0.5, "cxl1": 0.5}, "activations": [0, 0.5, 0.5], "framework": [0, 1, 0]}"#;
    std::fs::write(&policy, fractions).unwrap();
    let small = OFFLOAD.replace("mistral-nemo-12b", "qwen2.5-7b");
    let given =
        format!("{small} --context 4096,8192 --batch 1,2 --overhead 1GB --policy dram,paper,{policy}");
    let report = json(&format!("{given} --json --csv {csv} --html {html}"));
    assert_eq!((&report["kind"], &report["gpus"]), (&"simulated".into(), &1.into()));
    assert_eq!(report["tiers"][0]["capacity_bytes"].as_f64(), Some(137438953472.0));
    let text = std::fs::read_to_string(&csv).unwrap();
    let mut reader = text.lines();
    let names: Vec<_> = reader.next().unwrap().split(',').collect();
    let rows: Vec<Vec<_>> = reader.map(|line| line.split(',').collect()).collect();
    let column = |name: &str| names.iter().position(|head| *head == name).unwrap();
    let points = report["points"].as_array().unwrap();
    assert_eq!((points.len(), rows.len()), (4, 12));
    let mut row = rows.iter();
    for point in points {
        for placed in point["policies"].as_array().unwrap() {
            let row = row.next().unwrap();
            assert_eq!(row[column("policy")], placed["policy"]);
            let fits = placed["fits"].as_bool().unwrap();
            assert_eq!(row[column("fits")], fits.to_string());
            assert_eq!(fits, placed["policy"] != "dram", "{placed}");
            if fits {
                // By one reader: serde_json's is off by a unit of the last place at times.
                assert_eq!(
                    serde_json::from_str::<f64>(row[column("total_s")]).unwrap(),
                    placed["step_s"].as_f64().unwrap()
                );
                let phases = placed["phases"].as_array().unwrap();
                let sum: f64 = phases.iter().map(|phase| phase["seconds"].as_f64().unwrap()).sum();
                assert!((sum / placed["step_s"].as_f64().unwrap() - 1.0).abs() < 1e-12);
            } else {
                assert_eq!((row[column("total_s")], &placed["would_fit"]), ("", &"--policy optimal".into()));
            }
        }
        let given = &point["policies"][2]["bytes"];
        let momentum = point["objects"][0]["bytes"].as_f64().unwrap();
        assert_eq!(given[0], serde_json::json!([momentum / 2.0, 0.0, momentum / 2.0]));
        let framework =
            point["objects"].as_array().unwrap().iter().position(|object| object["name"] == "framework");
        assert_eq!(given[framework.unwrap()], serde_json::json!([0.0, 1e9, 0.0]));
    }
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(!page.contains("http://") && !page.contains("https://"), "the page needs something else");
    let data = page.lines().find_map(|line| line.strip_prefix("const plan = ")?.strip_suffix(';')).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["report"], report);
}

#[test]
fn an_offloaded_step_that_makes_no_sense_is_refused_in_one_line() {
    let scratch = scratch();
    let path = scratch.path().join("policy.json").display().to_string();
    let file = |text: &str| {
        std::fs::write(&path, text).unwrap();
        refused(&format!("{OFFLOAD} --context 4096 --policy {path}"))
    };
    for (message, expected) in [
        (refused("offload --model no --platform finetuning-a"), "no: no model of this name; there are "),
        (refused("offload --model qwen2.5-7b --platform no"), "no: no platform of this name; there are "),
        (
            refused("offload --model qwen2.5-7b --platform memserver"),
            "memserver: a training step needs accelerators, which this platform does not have; take a platform with racks",
        ),
        (
            refused(&format!("{OFFLOAD} --gpus 0")),
            "--gpus: finetuning-b has 2 accelerators to a host, found 0; give 1 to 2",
        ),
        (
            refused(&format!("{OFFLOAD} --gpus 3")),
            "--gpus: finetuning-b has 2 accelerators to a host, found 3; give 1 to 2",
        ),
        (
            refused(&format!("{OFFLOAD} --gpus x")),
            "--gpus: expected a whole number of accelerators, found \"x\"",
        ),
        (
            refused(&format!("{OFFLOAD} --batch 1,0")),
            "--batch: expected a whole number from 1 on, found \"0\"",
        ),
        (
            refused(&format!("{OFFLOAD} --context -4")),
            "--context: expected a whole number from 1 on, found \"-4\"",
        ),
        (refused(&format!("{OFFLOAD} --lora 0")), "--lora: expected a whole number from 1 on, found \"0\""),
        (refused(&format!("{OFFLOAD} --cards 65")), "--cards: expected 0 to 64, found 65"),
        (
            refused(&format!("{OFFLOAD} --overhead 1")),
            "--overhead: expected a size such as \"80 GB\", found \"1\": its unit is missing",
        ),
        (
            refused("offload --model llama3-8b --platform dgx-h100 --cards 1"),
            "--cards: the host has no cards, only its own memory; leave it out",
        ),
        (
            refused(&format!("{OFFLOAD} --policy best")),
            "--policy: \"best\" is no policy and no file; there are dram, interleave, paper, optimal",
        ),
        (file("["), &format!("{path}: expected JSON: ")),
        (file("[]"), &format!("{path}: expected an object such as ")),
        (
            file(r#"{"weight": [1, 0, 0]}"#),
            &format!(
                "{path}: weight: no object of this step; there are momentum, variance, fp32 gradients, "
            ),
        ),
        (
            file(r#"{"activations": {"cxl2": 1}}"#),
            &format!("{path}: activations: cxl2: no tier of this name; there are dram, cxl0, cxl1"),
        ),
        (
            file(r#"{"activations": [0.5, 0.4, 0]}"#),
            &format!("{path}: activations: expected fractions that add up to 1, found 0.9"),
        ),
        (
            file(r#"{"activations": [0, 1]}"#),
            &format!("{path}: activations: expected a fraction for each of 3 tiers, found 2"),
        ),
        (
            file(r#"{"activations": [2, -1, 0]}"#),
            &format!("{path}: activations: expected fractions from 0 to 1, found 2"),
        ),
        (
            file(r#"{"activations": ["all"]}"#),
            &format!("{path}: activations: expected a number, found \"all\""),
        ),
        (
            refused(
                "offload --model mistral-nemo-12b --platform finetuning-a --context 4096 --dram 1GB --cards 0",
            ),
            "it does not fit: context 4096 and batch 1 under policy dram: dram holds 1.0 GB and would have ",
        ),
    ] {
        assert!(message.starts_with(&format!("polder: {expected}")), "{message}\n{expected}");
    }
}

#[test]
fn a_parameter_service_is_predicted_beside_all_reduces() {
    let base =
        "sync --layers 125MB,24x50MB --workers 4 --forward 40ms --backward 80ms --worker-bandwidth 12GB/s";
    let answer = json(&format!("{base} --link-bandwidth 24GB/s --latency 0ns --json"));
    let step = |of: &str| answer[of]["step_s"].as_f64().unwrap();
    // 120 ms of computation, and 2(p-1)/p x 1.325 GB at 12 GB/s.
    assert!((step("all_reduce") - 0.285625).abs() < 1e-9, "{answer}");
    assert!(step("overlapped") < step("all_reduce") && step("service") < step("overlapped"), "{answer}");
    assert!(step("central") > step("all_reduce"), "{answer}");
    let sweep: Vec<_> =
        answer["sweep"].as_array().unwrap().iter().map(|point| point["step_s"].as_f64().unwrap()).collect();
    assert_eq!(sweep.len(), 11);
    assert!(sweep.iter().all(|point| *point >= 0.95 * step("service")), "{sweep:?}");
    let scratch = scratch();
    let csv = scratch.path().join("sweep.csv").display().to_string();
    let text = stdout_of(&format!("{base} --csv {csv}"));
    for line in [
        "a step of 4 workers with 1.32 GB of gradients in 25 layers, simulated\n",
        "\nparameter service, best m",
        " by the formula (m = ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 12);
    assert_eq!(
        json("sync --model llama3-8b --forward 1s --backward 2s --worker-bandwidth 50GB/s --json")["layers"],
        33
    );
    for (arguments, why) in [
        ("--layers 0x5MB", "--layers: expected 1 to 100000 layers of a size, found \"0x5MB\""),
        ("--layers 60000x1B,60000x1B", "--layers: expected 100000 layers at most, in all"),
        ("--layers 3x0.1B", "--layers: expected 1 B of gradients or more"),
        ("--layers 5", "--layers: expected a size"),
        ("--layers 1TB --shard 4B", "--shard: 1 TB are 250000000000 shards of 4 B, more than 4194304; give "),
        ("--layers 1GB --proxy-bandwidth 0GB/s", "--proxy-bandwidth: expected a bandwidth"),
        ("--model nothing", "nothing"),
    ] {
        let line = refused(&format!("sync {arguments} --forward 1s --backward 1s --worker-bandwidth 1GB/s"));
        assert!(line.contains(why), "{arguments}: {line}");
    }
}
