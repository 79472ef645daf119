//! `polder plan train`: steps, layouts and refusals.

use std::process::Output;

use serde_json::Value;

use crate::{json, plan, refused, scratch, stdout_of};

pub(crate) const LLAMA: &str = "train --model llama3-405b --platform nvl72-ndr --gpus 16384 --batch 2048";

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
fn outputs_say_what_was_predicted() {
    let cut = "--model llama3-8b --platform mixed-nvlink-ualink-cxl --rack ualink --gpus 16 --batch 16 --tp 2 --cp 1 --pp 1";
    let given =
        "--sequence 4096 --precision fp8 --wide-gradients false --overlap tensor,data --no-flash --fill 8";
    let computed =
        "sequences of 4,096 tokens, fp8, unfused attention, gradients in 16 bits; overlap: tensor and data; ";
    let text = stdout_of(&format!("train {cut} {given}"));
    assert!(text.contains(&format!("\n{computed}racks of ualink\n")), "{text}");
    let step = json(&format!("train {cut} {given} --json"));
    assert_eq!((&step["sequence"], &step["rack"]), (&4096.into(), &"ualink".into()));
    let scratch = scratch();
    let path = scratch.path().join("front.csv");
    let text = stdout_of(&format!("search {cut} {given} --csv {}", path.display()));
    assert!(text.contains(&format!("\n{computed}ranks are placed tp-cp-ep-dp-pp\n")), "{text}");
    let table = text.lines().find(|line| line.starts_with("platform")).unwrap();
    for column in
        ["rack", "range, s", "fill", "sequence-parallel", "recompute", "zero", "offload", "interleave"]
    {
        assert!(table.contains(column), "{column}: {table}");
    }
    let csv = std::fs::read_to_string(&path).unwrap();
    assert!(csv.starts_with("platform,kind,accelerators,sequence,rack,fill,order,tp,"), "{csv}");
    let first = csv.lines().nth(1).unwrap();
    assert!(
        first.starts_with("mixed-nvlink-ualink-cxl,simulated,16,4096,ualink,8,tp-cp-ep-dp-pp,2,"),
        "{first}"
    );
    let point = stdout_of(&format!("search {cut} {given} --json"));
    let point: Value = serde_json::from_str(point.lines().next().unwrap()).unwrap();
    for key in ["sequence", "rack", "fill", "order"] {
        assert_eq!(point[key], step[key], "{key}");
    }
}

#[test]
fn a_step_says_how_sure_it_is() {
    let given = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform";
    let step = json(&format!("{given} dgx-h100 --json"));
    let margin = &step["margin"];
    assert_eq!(margin["accelerator"], "H100-SXM5-80GB");
    assert_eq!(margin["step_class"], "dense bf16");
    // How far off steps were that nothing was fitted to stands beside how far off others were.
    let number = |of: &str, key: &str| margin[of][key].as_f64().unwrap();
    for of in ["blind", "fitted"] {
        assert!(0.0 < number(of, "mean") && number(of, "mean_without_scalar") > 0.0, "{margin}");
    }
    // A scalar need not help where nothing was fitted.
    assert!(number("fitted", "mean") < number("fitted", "mean_without_scalar"), "{margin}");
    let fp8 = json(&format!("{given} dgx-h100 --precision fp8 --json"));
    let width =
        |of: &Value| of["margin"]["range"][1].as_f64().unwrap() / of["margin"]["range"][0].as_f64().unwrap();
    assert!(width(&fp8) > width(&step) && fp8["margin"]["step_class"] == "dense fp8", "{fp8}");
    let scratch = scratch();
    let page = scratch.path().join("page.html");
    let text = stdout_of(&format!("{given} ualink-1024 --html {}", page.display()));
    // First the range, then the point, and what both rest on last.
    let lines: Vec<_> = text.lines().collect();
    let (range, point) = lines[1].split_once(" s; predicted: ").unwrap();
    let (least, most) =
        range.strip_prefix("a step on ualink-1024 takes ").unwrap().split_once(" to ").unwrap();
    let [least, most, point] =
        [least, most, point.trim_end_matches(" s")].map(|it| it.parse::<f64>().unwrap());
    assert!(least < most && (0.5 * least..2.0 * most).contains(&point), "{text}");
    let page = std::fs::read_to_string(&page).unwrap();
    let blind = "  published steps that no constant is fitted to: 26 of dense bf16, off by ";
    let others = "  others, each predicted without its publication: 38 of dense bf16, off by ";
    let known = "  no constant of this accelerator is fitted to a published step of it";
    for sure in
        ["the range: 80% of steps of dense bf16 that others publish should lie in it; ", blind, others, known]
    {
        assert!(text.contains(sure) && page.contains(sure), "{sure}: {text}");
    }
    assert!(text.find(blind) < text.find(others), "{text}");
}

/// A time that no machine could take is no yardstick.
#[test]
fn a_layout_that_does_not_fit_on_the_other_platform_gets_no_ratio() {
    let train = "train --model llama3-70b --platform nvl72-ndr --gpus 64 --batch 64 --tp 4 --pp 1 --cp 1 --micro-batch 1";
    let train = format!("{train} --zero optimizer --recompute none --offload none --against");
    let text = stdout_of(&format!("{train} dgx-h100"));
    assert!(text.contains("on dgx-h100 it does not fit, and is not compared: "), "{text}");
    assert!(!text.contains("times as long as"), "{text}");
    let answer = json(&format!("{train} dgx-h100 --json"));
    assert!(answer["times_against"].is_null() && answer["against"]["fits"] == false, "{answer}");
    let text = stdout_of(&format!("{train} nvl72-cxl"));
    assert!(text.contains("times as long as nvl72-cxl"), "{text}");
}

/// NVLink and InfiniBand against UALink with CXL or Ethernet, in one command each.
#[test]
fn another_machine_or_another_kind_of_rack_is_compared_in_one_command() {
    let train = "train --model llama3-70b --gpus 144 --batch 144 --tp 8 --pp 1 --cp 1 --micro-batch 1 --recompute none \
        --zero optimizer --offload none --json --platform";
    let mixed = "mixed-nvlink-ualink-cxl";
    let racks = json(&format!("{train} {mixed} --rack nvl72 --against {mixed}:ualink"));
    let machines = json(&format!("{train} nvl72-ndr --against ualink-cxl"));
    let ethernet = json(&format!("{train} nvl72-ndr --against ualink-roce"));
    for answer in [&racks, &machines, &ethernet] {
        assert!(answer["times_against"].is_array() && answer["rack"] == "nvl72", "{answer}");
        assert_eq!(answer["against"]["rack"], "ualink");
    }
    // The same racks on the same fabric are the same machine.
    assert_eq!(racks["against"]["step"], machines["against"]["step"]);
    assert_ne!(ethernet["against"]["step"], machines["against"]["step"]);
    let unknown = json(&format!("{train} {mixed} --rack nvl72 --against {mixed}:tpu"));
    assert!(unknown["left_out"].as_str().unwrap().contains("ualink"), "{unknown}");
}

#[test]
fn a_step_says_what_of_its_machine_changes_no_figure() {
    let given = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform";
    let text = stdout_of(&format!("{given} nvl72-ndr --against nvl72-cxl"));
    let lines = "are used\nCPUs attach by c2c; no fabric carries CXL\n\
        on nvl72-cxl: CPUs attach by c2c; between racks CXL carries io, mem, cache\n";
    assert!(text.contains(lines), "{text}");
    let answer = json(&format!("{given} dgx-h100 --against dgx-a100 --json"));
    let said = "CPUs attach by pcie-switch; no fabric carries CXL";
    assert_eq!((&answer["machine"], &answer["against"]["machine"]), (&said.into(), &said.into()));
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
    let text = stdout_of(&format!("{train} --order tp-cp-ep-pp-dp"));
    assert!(
        text.contains("pipeline, data (--order tp-cp-ep-pp-dp); of each rack 64 accelerators are used"),
        "{text}"
    );

    let search = "search --model llama3-70b --platform nvl72-ndr --gpus 256 --batch 1024 --tp 8 --offload none --json --order";
    let front = stdout_of(&format!("{search} tp-cp-ep-pp-dp"));
    let first: Value = serde_json::from_str(front.lines().next().unwrap()).unwrap();
    assert_eq!(first["order"], "tp-cp-ep-pp-dp");
    // A line of the front says what its step was predicted for.
    let once = stdout_of(&format!("{} tp-cp-ep-pp-dp", search.replace("search", "train")));
    let once: Value = serde_json::from_str(&once).unwrap();
    for key in ["step", "layout", "sequence", "rack", "fill", "order"] {
        assert_eq!(first[key], once[key], "{key}");
    }
    assert_eq!(
        refused(&format!("{search} tp-dp")),
        "polder: --order: expected an order of tp, cp, ep, dp and pp, each once, such as \"tp-cp-ep-dp-pp\", found \"tp-dp\""
    );
}

#[test]
fn stages_need_not_divide_the_layers() {
    let cut =
        "--model llama3-70b --platform dgx-h100 --gpus 48 --batch 48 --tp 8 --pp 6 --cp 1 --micro-batch 1";
    let text = stdout_of(&format!("train {cut} --interleave 1 --recompute full"));
    assert!(text.contains("blocks of the stages: 13, 14 in each of 2, 13 in each of 3"), "{text}");
    let answer = json(&format!("train {cut} --interleave 3 --recompute full --json"));
    let blocks = |stage: &Value| stage["blocks"].as_u64().unwrap();
    assert_eq!(answer["stages"].as_array().unwrap().iter().map(blocks).sum::<u64>(), 80);
    assert_eq!(
        refused(&format!("train {cut} --interleave 16")),
        "polder: llama3-70b: pp x interleave of 96 is more than the 80 layers; interleave of 13, or pp of 3 would run"
    );
    // In parts that are powers of two, a search finds them; others only where they are asked for.
    let parts = |given: &str| {
        let front = stdout_of(&format!("search {cut} --recompute full --json{given}"));
        let points = front.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        points.map(|point| point["layout"]["interleave"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert!(!parts("").is_empty() && parts("").iter().all(|it| it.is_power_of_two()));
    assert!(!parts(" --interleave 3").is_empty());
    let text = stdout_of(&format!("search {cut}"));
    assert!(text.contains("not looked at unless given: tp and ep above 64; cp above 2"), "{text}");
}

#[test]
fn each_kind_runs_beside_computation_or_holds_it_up() {
    let cut = "train --model mixtral-8x7b --platform dgx-h100 --gpus 64 --batch 256 --tp 2 --cp 2 --ep 8 --pp 2 --interleave 1";
    let hidden = |given: &str| {
        let step = json(&format!("{cut} --micro-batch 1 --json{given}"));
        // Published steps of experts are among those that its range rests on.
        assert_eq!(step["note"], Value::Null);
        ["tensor", "context", "expert", "pipeline", "data"].map(|kind| {
            let of = &step["step"]["communication"][kind];
            ["inside", "between"].iter().any(|scope| of[scope]["hidden_s"].as_f64() > Some(0.0))
        })
    };
    assert_eq!(hidden(""), [true, true, false, true, true]);
    assert_eq!(hidden(" --overlap tensor,context,expert,pipeline,data"), [true; 5]);
    assert_eq!(hidden(" --overlap expert,data"), [false, false, true, false, true]);
    assert_eq!(hidden(" --no-overlap data,context"), [true, false, false, true, false]);
    assert_eq!(hidden(" --no-overlap"), [false; 5]);
    assert_eq!(hidden(" --overlap none"), [false; 5]);
    let bytes = |given: &str| {
        let step = json(&format!("{cut} --micro-batch 1 --zero none --json --wide-gradients {given}"));
        step["step"]["memory"][0]["gradients_bytes"].as_f64().unwrap()
    };
    assert_eq!(bytes("true"), 2.0 * bytes("false"));
    let both = stdout_of(&format!("{cut} --micro-batch 1 --against nvl72-cxl"));
    assert!(!both.contains("no published step"), "{both}");
    let both = stdout_of(
        "train --model deepseek-v3 --platform nvl72-ndr --gpus 512 --batch 512 --against nvl72-cxl",
    );
    let note = "these fabrics, and the model has windows";
    assert!(both.contains(note), "{both}");
}

#[test]
fn what_lies_elsewhere_is_printed_by_kind() {
    let cut =
        "--model llama3-70b --platform nvl72-cxl --gpus 64 --batch 64 --tp 8 --pp 1 --cp 1 --micro-batch 1";
    let text = stdout_of(&format!("train {cut} --offload weights,optimizer --to pool"));
    let far = text.split("offloaded, GB").nth(1).unwrap();
    assert!(far.contains("\n  weights") && far.contains("\n  optimizer states"), "{text}");
    assert!(!far.contains("\n  activations"), "{text}");
}

#[test]
fn the_batch_that_is_taken_suits_few_accelerators_too() {
    let batch = |arguments: &str| json(&format!("{arguments} --json"))["layout"]["batch"].as_u64().unwrap();
    let train = "train --model llama3-8b --platform dgx-h100 --tp 1 --pp 1 --cp 1 --gpus";
    assert_eq!([8, 64, 512, 2048].map(|gpus| batch(&format!("{train} {gpus}"))), [32, 256, 2048, 2048]);
    // Steps that are compared are of one batch.
    let front =
        stdout_of("search --model llama3-8b --platform dgx-h100 --gpus 8,64 --tp 1 --pp 1 --cp 1 --json");
    let batches: std::collections::BTreeSet<_> = front
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter_map(|it| {
            let point = if it["beaten"].is_null() { &it } else { &it["beaten"] };
            point["layout"]["batch"].as_u64()
        })
        .collect();
    assert_eq!(batches.into_iter().collect::<Vec<_>>(), [256]);
}

#[test]
fn fabrics_stand_beside_each_other() {
    let train = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform nvl72-ndr --against";
    let text = stdout_of(&format!("{train} nvl72-cxl"));
    let answer = json(&format!("{train} nvl72-cxl --json"));
    let mut lines =
        text.lines().skip_while(|line| !line.starts_with("links inside racks, GB/s an accelerator"));
    for place in ["inside", "between"] {
        for (key, unit) in [("payload_bytes_per_s", 1e9), ("reached_bytes_per_s", 1e9), ("latency_s", 1e-6)] {
            let of = |of: &Value| format!("{:.1}", of["fabrics"][place][key].as_f64().unwrap() / unit);
            let expected = [of(&answer), of(&answer["against"])];
            let line = lines.next().unwrap();
            assert!(line.split_whitespace().rev().take(2).eq(expected.iter().rev()), "{line}: {expected:?}");
        }
    }
    // One rack of one accelerator has neither.
    let alone =
        stdout_of("train --model llama3-8b --platform finetuning-a --gpus 1 --batch 1 --against nvl72-ndr");
    let line = alone.lines().find(|line| line.starts_with("links between racks")).unwrap();
    assert_eq!(line.split_whitespace().rev().nth(1), Some("none"), "{line}");
    assert!(text.contains("TFLOP/s count attention over all pairs of tokens; a causal kernel computes half"));
}

#[test]
fn a_trace_has_every_pass_of_every_stage() {
    let scratch = scratch();
    let path = scratch.path().join("trace.json");
    stdout_of(&format!(
        "{LLAMA} --tp 8 --pp 16 --interleave 8 --micro-batch 1 --cp 1 --trace {}",
        path.display()
    ));
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let passes =
        events.iter().filter(|event| event["cat"] == "forward" || event["cat"] == "backward").count();
    assert_eq!(passes, 2 * 16 * 8 * 16);
    // Each stage has a track of what it computes, and those of what it sends, all named.
    let names = |what: &str| events.iter().filter(|event| event["name"] == what).count();
    let tracks: std::collections::BTreeSet<_> =
        events.iter().filter(|event| event["ph"] == "X").map(|event| event["tid"].as_u64()).collect();
    assert_eq!((names("process_name"), names("thread_name")), (16, 16 * tracks.len()));
    for name in ["computed", "tensor, inside racks, hidden", "pipeline, between racks, exposed"] {
        assert!(events.iter().any(|event| event["args"]["name"] == name), "{name}");
    }
    let elsewhere = refused(&format!("{LLAMA} --tp 8 --trace /nowhere/trace.json"));
    assert!(elsewhere.starts_with("polder: /nowhere/trace.json: cannot write it: "), "{elsewhere}");
}

#[test]
fn more_passes_than_can_be_drawn_are_refused_with_what_to_give_less_of() {
    let scratch = scratch();
    let path = scratch.path().join("step");
    let cut = "train --model megatron-22b --platform dgx-a100 --gpus 8 --tp 8 --pp 1 --interleave 1 --micro-batch 1 --recompute full";
    for option in ["--trace", "--html"] {
        let given = |batch: u32| format!("{cut} --batch {batch} {option} {}", path.display());
        let remedy = "give less of --batch, --pp or --interleave, or a larger --micro-batch";
        assert_eq!(
            refused(&given(67_000_000)),
            format!("polder: {option}: the step has 134,000,000 passes, 200,000 can be drawn; {remedy}")
        );
        assert!(refused(&given(100_001)).contains("the step has 200,002 passes"));
        assert!(!path.exists());
        stdout_of(&given(1000));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn what_a_trace_has_of_each_stage_adds_up_to_the_steps_figures() {
    let scratch = scratch();
    let path = scratch.path().join("trace.json");
    let cut = "--batch 128 --tp 4 --cp 2 --pp 2 --ep 4 --zero optimizer --offload activations --to pool";
    let step = json(&format!(
        "train --model mixtral-8x7b --platform nvl72-cxl --gpus 128 {cut} --json --trace {}",
        path.display()
    ));
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let communication = &step["step"]["communication"];
    let mut checked = 0;
    let pace = |stage: usize| step["stages"][stage]["pace"].as_f64().unwrap();
    assert!(pace(0) < 1.0 && pace(1) == 1.0, "the head takes longer than a block");
    for stage in 0..2 {
        let mut check = |what: String, shown: &Value| {
            for kind in ["exposed", "hidden"] {
                let own = events
                    .iter()
                    .filter(|it| it["pid"] == stage && it["name"] == what.as_str() && it["cat"] == kind);
                let all: f64 = own.map(|it| it["dur"].as_f64().unwrap()).sum();
                let expected = shown[format!("{kind}_s")].as_f64().unwrap() * 1e6;
                let in_passes = ["tensor", "context", "expert"].iter().any(|it| what.starts_with(it));
                let expected = if kind == "hidden" || in_passes { pace(stage) * expected } else { expected };
                assert!((all - expected).abs() <= 1e-9 * expected.max(1e6), "{what}: {all} for {expected}");
                checked += usize::from(expected > 0.0);
            }
        };
        for kind in ["tensor", "context", "expert", "pipeline", "data"] {
            for scope in ["inside", "between"] {
                check(format!("{kind}, {scope} racks"), &communication[kind][scope]);
            }
        }
        check("offload".into(), &step["step"]["offload"]);
    }
    assert!(checked >= 2 * 6, "{checked} kinds took time");
}

/// Each with its reason, and with what was tried and does run.
#[test]
fn a_refusal_gives_the_true_reason_and_the_nearest_that_runs() {
    for (arguments, expected) in [
        // 1,009 is a prime.
        (
            "llama3-405b --platform nvl72-ndr --gpus 1009",
            "llama3-405b: no layout cuts a batch of 2048 over 1,009 accelerators evenly; a batch of 2018, or 1,008 accelerators would run",
        ),
        (
            "llama3-8b --platform nvl72 --gpus 144 --batch 144",
            "nvl72: more than one rack needs a fabric between racks, which this platform does not have; take as many accelerators as a rack has, or fewer; 72 accelerators would run",
        ),
        (
            "llama3-405b --platform dgx-h100 --gpus 98304",
            "dgx-h100: 98,304 accelerators need 98,304 ports, there are 65,536; take fewer, more levels, or switches with more ports; 65,536 accelerators would run",
        ),
        (
            "llama3-8b --platform nvl72-cxl --gpus 300000 --batch 4 --pp 1 --tp 8 --cp 2",
            "nvl72-cxl: 300,000 accelerators need 600,000 ports, there are 524,288; take fewer, more levels, or switches with more ports; 64 accelerators would run",
        ),
        (
            "qwen3-235b-a22b --platform dgx-h100 --gpus 256 --ep 64 --tp 4 --pp 3",
            "qwen3-235b-a22b: tp x cp x pp of 12 does not divide 256 accelerators; pp of 1, or 768 accelerators would run",
        ),
        (
            "llama3-405b --platform nvl72-ndr --gpus 16384 --tp 8 --cp 1 --pp 1 --dp 8",
            "llama3-405b: tp x cp x pp of 8 and dp of 8 do not make 16,384 accelerators; cp of 256, dp of 2048, or 64 accelerators would run",
        ),
        (
            "llama3-8b --platform dgx-h100 --gpus 0",
            "dgx-h100: the number of accelerators is 0; it is at least 1; 1 accelerator would run",
        ),
        (
            "llama3-8b --platform dgx-a100 --gpus 8 --precision fp8",
            "dgx-a100: fp8 needs accelerators with 8-bit floats, which this platform does not have; precision bf16 would run",
        ),
        (
            "llama3-8b --platform finetuning-a --gpus 2 --offload weights --to cxm",
            "finetuning-a: the host has no memory \"cxm\"; it has host, cxl; weights offloaded to the host would run",
        ),
        (
            "llama3-8b --platform dgx-h100 --gpus 64 --offload weights --to cxl",
            "dgx-h100: the host has no memory \"cxl\"; it has host; all kept in the accelerators' memory would run",
        ),
        (
            "gpt3-175b --platform dgx-a100 --gpus 896 --tp 8 --pp 16 --dp 7 --micro-batch 1 --batch 1536",
            "gpt3-175b: dp x micro-batch of 7 does not divide the batch of 1536; a batch of 1533 would run",
        ),
        (
            "llama3-8b --platform dgx-h100 --gpus 64 --tp 7 --pp 11",
            "llama3-8b: tp of 7 does not divide heads of 32; 64 accelerators without tp of 7, pp of 11 would run",
        ),
    ] {
        assert_eq!(refused(&format!("train --model {arguments}")), format!("polder: {expected}"));
    }
}

/// What is told to fit does.
#[test]
fn what_does_not_fit_is_refused_with_what_was_tried_and_does() {
    let train = "train --model llama3-8b --platform dgx-h100 --gpus 8 --sequence 1048576";
    let refusal = refused(train);
    assert!(
        refusal.starts_with("polder: of ")
            && refusal.contains(" layouts none fits; the nearest (layout: tp 8, "),
        "{refusal}"
    );
    assert!(
        refusal.contains("most of it activations (") && refusal.ends_with(" GB); 16 accelerators would fit"),
        "{refusal}"
    );
    assert!(json(&format!("{} --json", train.replace("--gpus 8", "--gpus 16")))["fits"].as_bool().unwrap());
    let Output { stdout, .. } = plan(train);
    assert!(stdout.is_empty(), "no table of a step that cannot run");

    let train = "train --model llama3-70b --platform dgx-a100 --gpus 8 --batch 8";
    let refusal = refused(&format!("{train} --offload none"));
    let (_, would) = refusal.split_once("; weights and optimizer states offloaded to the host, or ").unwrap();
    assert!(would.ends_with(" accelerators would fit"), "{refusal}");
    let far = json(&format!("{train} --offload weights,optimizer --json"));
    assert_eq!((&far["fits"], &far["would_fit"]), (&true.into(), &Value::Array(vec![])));
    let Output { stdout, .. } = plan(&format!("{train} --json --offload none"));
    let answer: Value = serde_json::from_slice(&stdout).unwrap();
    assert_eq!(answer["would_fit"][0], "weights and optimizer states offloaded to the host");

    let whole =
        "train --model llama3-8b --platform dgx-a100 --gpus 8 --batch 8 --tp 1 --pp 1 --cp 1 --zero none";
    let refusal = refused(&format!("{whole} --offload none"));
    assert!(refusal.contains("GB); tp of 2, pp of 2, zero optimizer, "), "{refusal}");
}

#[test]
fn what_fits_nowhere_else_lies_elsewhere_and_the_output_says_so() {
    let train = "train --model llama3-70b --platform dgx-a100 --gpus 8 --batch 8";
    let text = stdout_of(&format!("{train} --against nvl72-cxl"));
    let far = "optimizer states and activations offloaded to the host";
    let note = format!("nothing fits in the accelerators' memory on dgx-a100: the layout has {far}");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[3].starts_with("layout: tp ") && lines[3].ends_with(&format!("; {far}")), "{text}");
    let difference = "no run over CXL validates the difference between these fabrics";
    assert!(lines.contains(&format!("{note}, and {difference}").as_str()), "{text}");
    let answer = json(&format!("{train} --json"));
    assert_eq!((&answer["fits"], &answer["note"]), (&true.into(), &note.into()));
    // The file of the page has the layout and the note too, and a platform without the tier is left out.
    let scratch = scratch();
    let path = scratch.path().join("step.html");
    let behind = "train --model llama3-405b --platform nvl72-cxl --gpus 32 --batch 64";
    let Output { status, stderr, .. } =
        plan(&format!("{behind} --against dgx-h100 --html {}", path.display()));
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(
        status.success() && stderr.starts_with("polder: left out dgx-h100: offload to the pool"),
        "{stderr}"
    );
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(page.contains("nothing fits in the accelerators' memory on nvl72-cxl: the layout has "));
    assert!(page.contains(" offloaded to the pool; sequences of 8,192 tokens, bf16, fused attention, "));
    // Nothing is, where something else fits, or where that is asked for.
    let roomy = json("train --model llama3-8b --platform dgx-h100 --gpus 64 --batch 64 --json");
    assert_eq!((&roomy["layout"]["offload"]["optimizer"], &roomy["note"]), (&false.into(), &Value::Null));
    // Then a step says that a faster one may be there.
    let open = "train --model llama3-8b --platform dgx-h100 --gpus 8 --batch 32 --tp 2";
    let untried = "\nnot looked at unless given: offload; tp and ep above 64; ";
    assert!(stdout_of(open).contains(untried), "{}", stdout_of(open));
    for known in [stdout_of(&format!("{open} --offload none")), stdout_of(train)] {
        assert!(known.contains("\nnot looked at unless given: tp and ep above 64; "), "{known}");
    }
    let none = refused(&format!("{train} --offload none --to host"));
    assert!(none.starts_with("polder: --to host: nothing is offloaded; "), "{none}");
    let front =
        stdout_of("search --model llama3-8b --platform dgx-h100 --gpus 8 --batch 64 --offload none --json");
    let points = front.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    assert!(points.map(|it| it["step"]["memory"][1]["used_bytes"].as_f64()).all(|far| far == Some(0.0)));
}

#[test]
fn the_other_platform_is_left_out_when_it_cannot_run_the_layout() {
    let train = "train --model llama3-70b --platform nvl72-cxl --gpus 72 --batch 72 --offload optimizer --to pool --against";
    let Output { status, stdout, stderr } = plan(&format!("{train} nvl72-ndr --json"));
    assert!(status.success());
    let answer: Value = serde_json::from_slice(&stdout).unwrap();
    assert!(answer["against"].is_null());
    let reason = "nvl72-ndr: offload to the pool needs memory nodes, which this platform does not have; offload to the host, or take a platform with a pool";
    assert_eq!(answer["left_out"], reason);
    assert_eq!(answer["note"], "no run over CXL validates this");
    assert_eq!(String::from_utf8(stderr).unwrap(), format!("polder: left out {reason}\n"));
    assert!(json(&format!("{train} nvl72-cxl-wide --json"))["left_out"].is_null());
}

#[test]
fn one_is_written_as_one_and_a_slow_machine_has_a_rate() {
    let text = stdout_of("train --model llama3-8b --platform dgx-h100 --gpus 2 --pp 1 --batch 2");
    assert!(text.contains("pp 1; batch") && !text.contains("1 parts"), "{text}");
    let scratch = scratch();
    let path = scratch.path().join("slow.toml");
    let slow = r#"
extends = "finetuning-a"
[rack.server.accelerator]
compute = { bf16 = "50 GFLOP/s" }
"#;
    std::fs::write(&path, slow).unwrap();
    let text = stdout_of(&format!(
        "train --model llama3-8b --platform {} --gpus 1 --batch 1 --offload optimizer",
        path.display()
    ));
    assert!(
        text.contains("on 1 accelerator, simulated") && text.contains("of each rack 1 accelerator is used"),
        "{text}"
    );
    let rate = text.lines().find(|line| line.starts_with("TFLOP/s")).unwrap();
    assert!(rate.split_whitespace().last().unwrap().parse::<f64>().unwrap() > 0.0, "{rate}");
}

#[test]
fn what_cannot_run_is_refused_in_one_line() {
    for (arguments, expected) in [
        (
            format!("{LLAMA} --tp 7"),
            "polder: llama3-405b: tp of 7 does not divide heads of 128; tp of 8 would run",
        ),
        (format!("{LLAMA} --tp 0 --pp 1"), "polder: llama3-405b: tp is 0; it is at least 1"),
        (format!("{LLAMA} --pp 4294967295"), "polder: llama3-405b: "),
        (
            format!("{LLAMA} --tp 8 --cp 1 --pp 1 --dp 8"),
            "tp x cp x pp of 8 and dp of 8 do not make 16,384 accelerators",
        ),
        (format!("{LLAMA} --rack dgx"), "polder: nvl72-ndr: the platform has no rack \"dgx\"; it has nvl72"),
        (
            format!("{LLAMA} --fill 80"),
            "polder: nvl72-ndr: 80 accelerators of each rack cannot be used; a rack has 72",
        ),
        (
            format!("{LLAMA} --tp 8 --cp 1 --pp 1 --ep 1 --zero none --micro-batch 1 --offload none"),
            "most of it optimizer states (608.8 GB); ",
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
            format!("{LLAMA} --offload none,weights"),
            "--offload: expected none alone, found something beside it",
        ),
        (format!("{LLAMA} --overlap data,none"), "--overlap: expected none alone, found something beside it"),
        (
            format!("{LLAMA} --no-overlap none,data"),
            "--no-overlap: expected none alone, found something beside it",
        ),
        (
            "train --model llama --platform dgx-a100 --gpus 8".to_owned(),
            "polder: llama: no model of this name; there are ",
        ),
        (
            "train --model llama3-8b --platform dgx-h100, --gpus 8".to_owned(),
            "polder: --platform: a name is empty; write one comma between two names",
        ),
        (
            "search --model llama3-8b --platform ,dgx-h100 --gpus 8".to_owned(),
            "polder: --platform: a name is empty; write one comma between two names",
        ),
    ] {
        let refusal = refused(&arguments);
        assert!(refusal.contains(expected), "{refusal}");
    }
}

#[test]
fn a_step_on_racks_of_two_kinds_is_divided_and_two_kinds_in_one_rack_are_refused() {
    const STEP: &str = "train --model llama3-70b --platform nvl72-cxl --platform mixed-nvlink-ualink-cxl --tp 8 --pp 1 --batch 720";
    let answer = json(&format!("{STEP} --rack nvl72,ualink --gpus 144,144 --json"));
    let parts = answer["parts"].as_array().unwrap();
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap();
    assert_eq!(
        parts.iter().map(|part| number(part, "copies") * number(part, "sequences")).sum::<f64>(),
        720.0
    );
    assert!(parts.iter().all(|part| number(&answer, "total_s") < number(part, "alone_s")), "{answer:#}");
    for (words, why) in [
        ("--rack nvl72+ualink,ualink --gpus 144,144", "physical layers and flits differ"),
        ("--rack nvl72,pod --gpus 144,144", "nvl72, ualink"),
        ("--rack nvl72 --gpus 144,144", "--rack: expected two values, of the two of --platform, found 1"),
        ("--rack nvl72,ualink --gpus 144", "--gpus: expected two values"),
        (
            "--rack nvl72,ualink --gpus 144,144 --against dgx-h100",
            "--against: a step on two kinds of rack has none",
        ),
        ("--rack nvl72,ualink --gpus 144,144 --platform nvl72", "--platform: expected two at most, found 3"),
    ] {
        let line = refused(&format!("{STEP} {words}"));
        assert!(line.contains(why), "{words}: {line}");
    }
}
