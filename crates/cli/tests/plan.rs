//! `polder plan` as a user gives it.

mod command;

use std::process::{Command, Output};

use command::polder;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::Value;

fn plan(arguments: &str) -> Output {
    let mut command = polder();
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
fn outputs_say_what_was_predicted() {
    let cut = "--model llama3-8b --platform mixed-nvlink-ualink-cxl --rack ualink --gpus 16 --batch 16 --tp 2 --cp 1 --pp 1";
    let given =
        "--sequence 4096 --precision fp8 --wide-gradients false --overlap tensor,data --no-flash --fill 8";
    let computed =
        "sequences of 4,096 tokens, fp8, unfused attention, gradients in 16 bits; overlap: tensor and data; ";
    let text = said(&format!("train {cut} {given}"));
    assert!(text.contains(&format!("\n{computed}racks of ualink\n")), "{text}");
    let step = json(&format!("train {cut} {given} --json"));
    assert_eq!((&step["sequence"], &step["rack"]), (&4096.into(), &"ualink".into()));
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("front.csv");
    let text = said(&format!("search {cut} {given} --csv {}", path.display()));
    assert!(text.contains(&format!("\n{computed}ranks are placed tp-cp-ep-dp-pp\n")), "{text}");
    let table = text.lines().find(|line| line.starts_with("platform")).unwrap();
    for column in ["range, s", "fill", "sequence-parallel", "recompute", "zero", "offload", "interleave"] {
        assert!(table.contains(column), "{column}: {table}");
    }
    let csv = std::fs::read_to_string(&path).unwrap();
    assert!(csv.starts_with("platform,kind,accelerators,sequence,rack,fill,order,tp,"), "{csv}");
    let first = csv.lines().nth(1).unwrap();
    assert!(
        first.starts_with("mixed-nvlink-ualink-cxl,simulated,16,4096,ualink,8,tp-cp-ep-dp-pp,2,"),
        "{first}"
    );
    let point = said(&format!("search {cut} {given} --json"));
    let point: Value = serde_json::from_str(point.lines().next().unwrap()).unwrap();
    for key in ["sequence", "rack", "fill", "order"] {
        assert_eq!(point[key], step[key], "{key}");
    }
}

#[test]
fn a_step_says_how_sure_it_is() {
    let given = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform";
    let step = json(&format!("{given} dgx-h100 --json"));
    let number = |key: &str| step["margin"][key].as_f64().unwrap();
    assert_eq!(step["margin"]["accelerator"], "H100-SXM5-80GB");
    assert!(0.0 < number("mean") && number("mean") < number("worst") && number("least") < number("most"));
    // A step that was published took 9.347 s: the range has it, of a prediction that is fitted to it.
    let cut =
        "--gpus 128 --batch 64 --tp 4 --pp 8 --cp 2 --interleave 8 --micro-batch 1 --sequence-parallel true";
    let alike =
        "--zero optimizer --recompute none --wide-gradients false --overlap tensor,context,pipeline,data";
    let step = json(&format!("train --model llama3-405b --platform nvl72-ndr {cut} {alike} --json"));
    let makes = |key: &str| step["margin"][key].as_f64().unwrap() * step["step"]["total_s"].as_f64().unwrap();
    assert!((0.98..1.001).contains(&(makes("least") / 9.347)), "{step}");
    assert!((0.999..1.02).contains(&(makes("most") / 9.347)), "{step}");
    let scratch = polder_mem::testing::Scratch::new();
    let page = scratch.path().join("page.html");
    let text = said(&format!("{given} ualink-1024 --html {}", page.display()));
    // First the range, then the point, and what both rest on last.
    let lines: Vec<_> = text.lines().collect();
    let (range, point) = lines[1].split_once(" s; predicted: ").unwrap();
    let (least, most) =
        range.strip_prefix("a step on ualink-1024 takes ").unwrap().split_once(" to ").unwrap();
    let [least, most, point] =
        [least, most, point.trim_end_matches(" s")].map(|it| it.parse::<f64>().unwrap());
    assert!(least < most && (0.5 * least..2.0 * most).contains(&point), "{text}");
    let sure = "the range: nothing was published of this accelerator; steps of others took ";
    assert!(text.contains(sure) && std::fs::read_to_string(&page).unwrap().contains(sure), "{text}");
}

#[test]
fn a_step_says_what_of_its_machine_changes_no_figure() {
    let given = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform";
    let text = said(&format!("{given} nvl72-ndr --against nvl72-cxl"));
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
    let text = said(&format!("{train} --order tp-cp-ep-pp-dp"));
    assert!(
        text.contains("pipeline, data (--order tp-cp-ep-pp-dp); of each rack 64 accelerators are used"),
        "{text}"
    );

    let search = "search --model llama3-70b --platform nvl72-ndr --gpus 256 --batch 1024 --tp 8 --offload none --json --order";
    let front = said(&format!("{search} tp-cp-ep-pp-dp"));
    let first: Value = serde_json::from_str(front.lines().next().unwrap()).unwrap();
    assert_eq!(first["order"], "tp-cp-ep-pp-dp");
    // A line of the front says what its step was predicted for.
    let once = said(&format!("{} tp-cp-ep-pp-dp", search.replace("search", "train")));
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
    let text = said(&format!("train {cut} --interleave 1 --recompute full"));
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
        let front = said(&format!("search {cut} --recompute full --json{given}"));
        let points = front.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        points.map(|point| point["layout"]["interleave"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert!(!parts("").is_empty() && parts("").iter().all(|it| it.is_power_of_two()));
    assert!(!parts(" --interleave 3").is_empty());
    let text = said(&format!("search {cut}"));
    assert!(text.contains("not looked at unless given: tp and ep above 64; cp above 2"), "{text}");
}

#[test]
fn each_kind_runs_beside_computation_or_holds_it_up() {
    let cut = "train --model mixtral-8x7b --platform dgx-h100 --gpus 64 --batch 256 --tp 2 --cp 2 --ep 8 --pp 2 --interleave 1";
    let hidden = |given: &str| {
        let step = json(&format!("{cut} --micro-batch 1 --json{given}"));
        assert_eq!(step["note"], "no published step of a mixture of experts validates its time");
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
    let both = said(&format!("{cut} --micro-batch 1 --against nvl72-cxl"));
    let note = "these fabrics, and no published step of a mixture of experts validates its time";
    assert!(both.contains(note), "{both}");
}

#[test]
fn what_lies_elsewhere_is_printed_by_kind() {
    let cut =
        "--model llama3-70b --platform nvl72-cxl --gpus 64 --batch 64 --tp 8 --pp 1 --cp 1 --micro-batch 1";
    let text = said(&format!("train {cut} --offload weights,optimizer --to pool"));
    let far = text.split("offloaded, GB").nth(1).unwrap();
    assert!(far.contains("\n  weights") && far.contains("\n  optimizer states"), "{text}");
    assert!(!far.contains("\n  activations"), "{text}");
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
    let points = front.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let points: Vec<_> = points.filter(|line| line["beaten"].is_null()).collect();
    let of = |name: &str| points.iter().filter(|point| point["platform"] == name).count();
    assert!(of("nvl72-cxl") > 0 && of("nvl72-ndr") + of("nvl72-cxl") == points.len());
    let is_far = |point: &&Value| point["step"]["memory"][1]["used_bytes"].as_f64() > Some(0.0);
    let far = points.iter().filter(is_far).count();
    assert!(
        0 < far && far < points.len(),
        "some keep something elsewhere, some nothing: {far} of {}",
        points.len()
    );
    for point in &points {
        assert_eq!((&point["kind"], &point["accelerators"]), (&"simulated".into(), &512.into()));
        let is_proved = point["platform"] == "nvl72-ndr";
        let note = (!is_proved).then_some("no run over CXL validates this");
        assert_eq!(point["note"].as_str(), note);
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let names = lines.next().unwrap();
    let at = |name: &str| names.iter().position(|it| *it == name).unwrap();
    for (line, point) in lines.zip(&points) {
        let layout = &point["layout"];
        for (name, value) in [
            ("kind", &point["kind"]),
            ("accelerators", &point["accelerators"]),
            ("recompute", &layout["recompute"]),
            ("zero", &layout["zero"]),
            ("offload_tier", &layout["offload"]["tier"]),
            ("offload_weights", &layout["offload"]["weights"]),
            ("sequence_parallel", &layout["sequence_parallel"]),
        ] {
            assert_eq!(line[at(name)], value.to_string().trim_matches('"'), "{name}");
        }
    }
    // The table has those that differ; the files have all, and the table says so.
    let table = said(&format!("{search} nvl72-ndr,nvl72-cxl --rows 100000"));
    let noted: Vec<_> = table.lines().filter(|line| line.contains("no run over CXL")).collect();
    assert_eq!(noted, ["nvl72-cxl: no run over CXL validates this"]);
    let (_, front) = table.split_once("\nall that no other beats:\n").unwrap();
    // How many there were stands last.
    let here = front.lines().last().unwrap();
    let lines = front.lines();
    assert!(here.ends_with("to within 1%; --csv, --parquet and --json have all"), "{here}");
    let printed = lines.filter(|line| line.starts_with("nvl72-") && !noted.contains(line)).count();
    assert!(here.starts_with(&format!("{printed} of them here")) && printed < points.len(), "{here}");
    let columns: Vec<_> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, vec![7 + 25 + 40 + 2; points.len() + 1]);
    // Alone, a platform has at least what it has among others.
    assert!(said(&format!("{search} nvl72-cxl --json")).lines().count() >= of("nvl72-cxl"));
}

/// A platform that loses everywhere is on no front: the best of it is printed all the same, and first.
#[test]
fn the_fastest_of_each_platform_comes_first_also_of_one_that_loses_everywhere() {
    let search = "search --model llama3-8b --gpus 64 --batch 256 --offload none --platform dgx-a100,dgx-h100";
    let lines = said(&format!("{search} --json"));
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (beaten, front): (Vec<_>, Vec<_>) = lines.iter().partition(|line| !line["beaten"].is_null());
    assert!(front.iter().all(|point| point["platform"] == "dgx-h100"), "{front:?}");
    let [beaten] = beaten[..] else { panic!("one platform is beaten: {beaten:?}") };
    assert_eq!((&beaten["platform"], &beaten["accelerators"]), (&"dgx-a100".into(), &64.into()));
    // It is what a search of that platform alone finds.
    let alone = said(&format!("{} --json", search.replace(",dgx-h100", "")));
    let alone: Value = serde_json::from_str(alone.lines().next().unwrap()).unwrap();
    assert_eq!(beaten["beaten"], alone);
    let table = said(search);
    let (best, _) = table.split_once("\nall that no other beats:\n").unwrap();
    let (_, best) = best.split_once("\nthe fastest of each:\n").unwrap();
    let names: Vec<_> = best.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["platform", "dgx-h100", "dgx-a100"]);
    let seconds = format!("  {:.2}  ", alone["step"]["total_s"].as_f64().unwrap());
    assert!(best.lines().last().unwrap().contains(&seconds), "{best}");
}

/// A ratio, a peak and a choice say no more than the ranges that they are made of: 2.577 stood where these allowed 2.06 to 2.57.
#[test]
fn what_is_compared_follows_the_ranges() {
    let cut = "--model llama3-8b --batch 512 --gpus 64 --tp 8 --pp 1 --cp 1";
    let answer = json(&format!("train {cut} --platform dgx-a100 --against dgx-h100 --json"));
    let number = |of: &Value| of.as_f64().unwrap();
    let ends = |of: &Value| [0, 1].map(|end| number(&of[end]));
    let [low, high] = ends(&answer["range_s"]);
    let [other_low, other_high] = ends(&answer["against"]["range_s"]);
    let [least, most] = ends(&answer["times_against"]);
    assert!((least * other_high / low - 1.0).abs() < 1e-12 && (most * other_low / high - 1.0).abs() < 1e-12);
    let range = ends(&answer["margin"]["range"]);
    for (end, times) in [low, high].iter().zip(range) {
        assert!((times * number(&answer["step"]["total_s"]) / end - 1.0).abs() < 1e-12, "{end} {times}");
    }
    let text = said(&format!("train {cut} --platform dgx-a100 --against dgx-h100"));
    let three = |it: f64| format!("{it:.0$}", if it < 10.0 { 2 } else { 1 });
    let line =
        format!("dgx-a100 takes {} to {} times as long as dgx-h100; predicted: ", three(least), three(most));
    assert!(text.contains(&line), "{line}: {text}");
    // The part of the peak is what the step leaves of it, from the slowest to the fastest.
    let peak = text.lines().find(|line| line.starts_with("part of its peak")).unwrap();
    let rate = number(&answer["model_flops"]) / 64.0 / number(&answer["peak_flops"]) * 100.0;
    let part = format!("{:.0} to {:.0}%", rate / high, rate / low);
    assert!(peak.contains(&part), "{part}: {peak}");
    // On one accelerator both are off alike, and the error of a comparison is left.
    let alike = json(&format!("train {cut} --platform nvl72-ndr --against nvl72-cxl --json"));
    let predicted = number(&alike["step"]["total_s"]) / number(&alike["against"]["step"]["total_s"]);
    let [least, most] = ends(&alike["times_against"]);
    assert!(
        0.85 * predicted < least
            && least < 0.99 * predicted
            && 1.01 * predicted < most
            && most < 1.2 * predicted
    );
}

#[test]
fn a_choice_is_open_where_ranges_overlap() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("ours.toml");
    let search = "search --model llama3-8b --batch 512 --gpus 64 --platform dgx-a100,dgx-h100 --offload none";
    let chosen = |rent: &str| {
        std::fs::write(&path, OURS.replace("\"1 USD/h\"", rent)).unwrap();
        let text = said(&format!("{search} --prices {}", path.display()));
        let lines = text.lines().filter_map(|line| line.strip_prefix("least "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    // 2.6 times as long is surely longer; for two fifths of the rent it is as dear, as far as anyone can tell.
    let (surely, open) = ("time: dgx-h100", "money: dgx-h100 or dgx-a100: their ranges overlap");
    let lines = chosen("\"1 USD/h\"");
    assert!(lines.contains(&surely.to_owned()) && lines.contains(&open.to_owned()), "{lines:?}");
    assert!(chosen("\"9 USD/h\"").contains(&"money: dgx-h100".to_owned()));
    assert!(chosen("\"0.1 USD/h\"").contains(&"money: dgx-a100".to_owned()));
}

/// Nothing is cut where no terminal is.
#[test]
fn a_search_is_no_wider_than_the_terminal() {
    let search =
        "search --model llama3-8b --batch 512 --gpus 64,128 --platform dgx-a100,dgx-h100 --prices watts";
    for columns in ["80", "120"] {
        let mut command = polder();
        command.env("POLDER_CONFIG", "/dev/null").env("COLUMNS", columns).arg("plan").args(search.split(' '));
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= columns.parse().unwrap(), "{widest}: {text}");
        assert!(text.contains("sequence-parallel") && text.contains("\n1  dgx-h100"), "{text}");
    }
    assert!(said(search).lines().any(|line| line.chars().count() > 120));
}

#[test]
fn the_batch_that_is_taken_suits_few_accelerators_too() {
    let batch = |arguments: &str| json(&format!("{arguments} --json"))["layout"]["batch"].as_u64().unwrap();
    let train = "train --model llama3-8b --platform dgx-h100 --tp 1 --pp 1 --cp 1 --gpus";
    assert_eq!([8, 64, 512, 2048].map(|gpus| batch(&format!("{train} {gpus}"))), [32, 256, 2048, 2048]);
    // Steps that are compared are of one batch.
    let front = said("search --model llama3-8b --platform dgx-h100 --gpus 8,64 --tp 1 --pp 1 --cp 1 --json");
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

/// What is written nowhere else would be lost.
#[test]
fn no_output_replaces_an_input() {
    let scratch = polder_mem::testing::Scratch::new();
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
        (&search, "--parquet"),
        (&search, "--html"),
        (&offload, "--csv"),
        (&offload, "--html"),
        (&train, "--trace"),
        (&train, "--html"),
    ] {
        // Also what the file extends, and by another name.
        for input in [&ours, &base, &link] {
            let Output { status, stderr, .. } = plan(&format!("{command} {option} {input}"));
            let said = String::from_utf8(stderr).unwrap();
            let expected = format!(
                "polder: {input}: cannot write it: this command has read it, and would replace it; name another file\n"
            );
            assert!(!status.success() && said == expected, "{option}: {said}");
            assert_eq!(std::fs::read_to_string(&base).unwrap(), text("finetuning-a"));
            assert_eq!(std::fs::read_to_string(&ours).unwrap(), text(&base));
        }
    }
    // A file of an earlier run is no input.
    let csv = path("front.csv");
    said(&format!("{search} --csv {csv}"));
    said(&format!("{search} --csv {csv}"));
}

#[test]
fn no_cell_of_a_table_is_a_formula() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (trace, csv) = (path("trace.csv"), path("out.csv"));
    std::fs::write(&trace, "generation,service,page\n1,=HYPERLINK(1),0\n1,@db,0\n1,+x,0\n1,-y,0\n").unwrap();
    said(&format!("tier --trace {trace} --ratio 1:1 --csv {csv}"));
    let text = std::fs::read_to_string(&csv).unwrap();
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let names: Vec<_> = reader.records().map(|it| it.unwrap()[1].to_owned()).collect();
    assert_eq!(names, ["'=HYPERLINK(1)", "'@db", "'+x", "'-y"]);
}

/// So that a page that was sent to someone can be made again.
#[test]
fn every_page_says_what_made_it() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("page.html").display().to_string();
    for command in [
        "train --model llama3-8b --platform dgx-h100 --gpus 8 --batch 8 --tp 8",
        "search --model llama3-8b --platform dgx-a100,dgx-h100 --gpus 8 --batch 8 --tp 8",
        "offload --model qwen2.5-7b --platform finetuning-a --context 4096",
        "fabric --platform nvl72-ndr --gpus 128",
        "memory --platform nvl72-cxl",
        "tier --idle cache",
    ] {
        said(&format!("{command} --html {path}"));
        let page = std::fs::read_to_string(&path).unwrap();
        let made =
            page.split("<p class=\"note\">polder ").nth(1).and_then(|it| it.split("</p>").next()).unwrap();
        let (head, line) = made.split_once(": ").unwrap();
        assert_eq!(line, format!("polder plan {command} --html {path}"));
        let (version, day) = head.split_once(", ").unwrap();
        assert_eq!((version, day.len()), (env!("CARGO_PKG_VERSION"), "2026-11-28".len()), "{head}");
        // Nothing is fetched, and nothing left open.
        assert!(!page.contains("http") && !page.contains("src=") && !page.contains('@'), "{command}");
    }
}

#[test]
fn fabrics_stand_beside_each_other() {
    let train = "train --model gpt3-175b --gpus 64 --batch 64 --tp 8 --pp 8 --platform nvl72-ndr --against";
    let text = said(&format!("{train} nvl72-cxl"));
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
        said("train --model llama3-8b --platform finetuning-a --gpus 1 --batch 1 --against nvl72-ndr");
    let line = alone.lines().find(|line| line.starts_with("links between racks")).unwrap();
    assert_eq!(line.split_whitespace().rev().nth(1), Some("none"), "{line}");
    assert!(text.contains("TFLOP/s count attention over all pairs of tokens; a causal kernel computes half"));
}

#[test]
fn a_platform_is_shown_with_its_sources_as_a_file_that_is_one() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("shown.toml");
    for name in polder_platform::names(polder_platform::Folder::Platforms) {
        let text = said(&format!("show {name}"));
        let platform = polder_platform::Platform::load(name).unwrap();
        assert!(text.contains(&format!("\n# source: {}\n", platform.source)), "{text}");
        std::fs::write(&path, &text).unwrap();
        let shown = polder_platform::Platform::load(path.to_str().unwrap()).unwrap();
        let [shown, platform] = [shown, platform].map(|it| toml::to_string(&it).unwrap());
        assert_eq!(shown, platform);
    }
    let text = said("show nvl72-cxl");
    for line in ["# extends nvl72, source: ", "# between racks: 110.7", "[rack.nvl72.accelerator.fitted]"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(refused("show nowhere").starts_with("polder: nowhere: no platform of this name; there are "));
}

/// Wherever a file is named: a device, a pipe, a folder and a file beyond all bounds, and nothing of them is read for long.
#[test]
fn what_is_no_regular_file_or_too_large_is_refused_in_one_line() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (pipe, large) = (path("pipe.json"), path("large.toml"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::File::create(&large).unwrap().set_len((16 << 20) + 1).unwrap();
    let folder = scratch.path().display().to_string();
    let no_file = "expected a regular file, found a device, a pipe or a socket";
    let probed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/platform.toml");
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
            format!("verify --platform {probed} --rows {name}"),
            format!("verify --platform {probed} --rows {probed} --demo {name}"),
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
    let scratch = polder_mem::testing::Scratch::new();
    let write = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let titled = "title = \"ours \\u001b[31mred\"\nsource = \"a\\u202eb\"\n";
    let platform = write("ours.toml", &format!("extends = \"dgx-h100\"\n{titled}"));
    let text = said(&format!("show {platform}"));
    assert!(text.contains(": ours \\u{1b}[31mred\n# source: a\\u{202e}b\n"), "{text}");
    let config = r#"{"model_type": "\u001b[31mllama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}"#;
    let model = write("config.json", config);
    let text = refused(&format!("train --model {model} --platform {platform} --gpus 8 --tp 8"));
    assert!(text.contains("found \"\\u001b[31mllama\"") && !text.contains('\u{1b}'), "{text}");
    let model = write("model.toml", "extends = \"llama3-8b\"\ntitle = \"\\u001b[31mours\"\n");
    let text = said(&format!("train --model {model} --platform {platform} --gpus 8 --tp 8"));
    assert!(text.contains("model.toml: \\u{1b}[31mours on 8") && !text.contains('\u{1b}'), "{text}");
    let named = |name: &str, text: &str| {
        let path = write("named.toml", text);
        let said = refused(&format!("show {path}"));
        let key = said.strip_prefix(&format!("polder: {path}: ")).unwrap().to_owned();
        assert!(!said.contains('\u{1b}') && key.starts_with(name), "{said}");
        assert!(key.ends_with("expected a name without control characters, found \"\\u{1b}[31m\""), "{said}");
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
    let said = refused(&format!("search --model llama3-8b --platform dgx-h100 --gpus 8 --prices {prices}"));
    assert!(
        said.ends_with("machine: expected a name without control characters, found \"\\u{1b}[31m\""),
        "{said}"
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
    let scratch = polder_mem::testing::Scratch::new();
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
    for (said, expected) in [
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
        assert_eq!(said, format!("polder: {expected}"));
    }
    // What is kept is there: no layout without sequence parallelism is looked at, which would keep nothing.
    let front = said(&format!("{search} 8 --keep-gathered --json"));
    for line in front.lines() {
        let point: Value = serde_json::from_str(line).unwrap();
        let layout = &point["layout"];
        assert_eq!((&layout["sequence_parallel"], &layout["gather_again"]), (&true.into(), &false.into()));
    }
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
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["beaten"].is_null()).collect()
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
        let [low, high] = [0, 1].map(|end| number(&point["range_s"][end]) / seconds);
        for (ends, figure) in [
            (["total_low_s", "total_high_s"], seconds),
            (["money_low_usd", "money_high_usd"], number(&bill["money_usd"])),
            (["energy_low_j", "energy_high_j"], number(&bill["energy_j"])),
            (["carbon_low_g", "carbon_high_g"], number(&bill["carbon_g"])),
        ] {
            for (end, times) in ends.into_iter().zip([low, high]) {
                assert!((number(&bill[end]) / figure / times - 1.0).abs() < 1e-12, "{end}: {bill}");
            }
        }
        // One on the other accelerator beats it only if it does with the whole of both ranges.
        let beats = |other: &Value| {
            let axes = |of: &Value, times: f64| {
                let memory = &of["step"]["memory"];
                let paid = [&of["step"]["total_s"], &of["bill"]["money_usd"], &of["bill"]["energy_j"]];
                let [time, money, energy] = paid.map(|it| number(it) * times);
                [time, money, energy, number(&memory[0]["used_bytes"]), number(&memory[1]["used_bytes"])]
            };
            let most = number(&other["range_s"][1]) / number(&other["step"]["total_s"]);
            let [most, least] = if other["platform"] == point["platform"] { [1.0; 2] } else { [most, low] };
            let (other, own) = (axes(other, most), axes(point, least));
            other != own && other.iter().zip(&own).all(|(other, own)| other <= own)
        };
        assert!(!front.iter().any(beats), "{point}");
    }
    let text = std::fs::read_to_string(&table).unwrap();
    let paid = ",money_usd,money_low_usd,money_high_usd,energy_j,energy_low_j,energy_high_j,carbon_g,carbon_low_g,carbon_high_g";
    let bill =
        format!(",total_low_s,total_high_s,bill_steps,bill_total_s,bill_total_low_s,bill_total_high_s{paid}");
    assert!(text.lines().next().unwrap().ends_with(&bill), "{text}");
    let columns: Vec<_> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, vec![7 + 25 + 40 + 2 + 13; front.len() + 1]);

    // Parquet has the same columns, numbers as numbers.
    let file = SerializedFileReader::new(std::fs::File::open(&typed).unwrap()).unwrap();
    let mut lines = text.lines();
    let names: Vec<_> = lines.next().unwrap().split(',').collect();
    for (row, line) in file.get_row_iter(None).unwrap().zip(lines.by_ref()) {
        let row = row.unwrap();
        for (((name, field), cell), expected) in row.get_column_iter().zip(line.split(',')).zip(&names) {
            assert_eq!(name, expected);
            match field {
                Field::Str(text) => assert_eq!(text, cell.trim_matches('"')),
                Field::Bool(is_so) => assert_eq!(is_so.to_string(), cell),
                Field::UInt(number) => assert_eq!(number.to_string(), cell),
                Field::Double(figure) => assert_eq!(figure.to_string(), cell),
                other => panic!("{name}: {other}"),
            }
        }
        assert_eq!(row.len(), names.len());
    }
    assert_eq!((file.metadata().file_metadata().num_rows() as usize, lines.next()), (front.len(), None));
    std::fs::write(&path, OURS.replace("machine.nvl72-ndr", "machine.nvl72-cxx")).unwrap();
    let few = "search --model llama3-8b --batch 8 --gpus 8 --platform dgx-h100";
    let Output { status, stderr, .. } = plan(&format!("{few} --prices {}", path.display()));
    let unknown = "machine.nvl72-cxx: no platform and no accelerator of this name; it is passed over";
    let warned = format!("polder: {}: {unknown}\n", path.display());
    assert!(status.success());
    assert_eq!(String::from_utf8(stderr).unwrap(), warned);
    std::fs::write(&path, OURS).unwrap();
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
fn money_of_machines_has_electricity_of_all_or_of_none() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("bought.toml");
    let bought = r#"
title = "bought"
[everywhere]
electricity = { value = "0.12 USD/kWh", source = "our contract" }
lifetime = { value = "4 years", source = "our accountant" }
[machine.dgx-h100.accelerator]
price = { value = "30000 USD", source = "our order" }
power = { value = "700 W", source = "data sheet" }
[machine.nvl72-cxl.accelerator]
price = { value = "40000 USD", source = "our order" }
"#;
    std::fs::write(&path, bought).unwrap();
    let search = "search --model llama3-8b --batch 512 --gpus 64 --tp 8 --pp 1 --cp 1 --offload none";
    let priced = |platforms: &str| {
        plan(&format!("{search} --prices {} --json --platform {platforms}", path.display()))
    };
    let (life, power) = (4.0 * 365.25 * 86_400.0, 64.0 * 0.7 / 3600.0 * 0.12);
    let left_out = format!(
        "electricity is left out of money, but of rents: {} has no power or no price of it for nvl72-cxl",
        path.display()
    );
    for (platforms, electricity, said) in
        [("dgx-h100", power, String::new()), ("dgx-h100,nvl72-cxl", 0.0, format!("polder: {left_out}\n"))]
    {
        let Output { stdout, stderr, .. } = priced(platforms);
        assert_eq!(String::from_utf8(stderr).unwrap(), said);
        for line in String::from_utf8(stdout).unwrap().lines() {
            let point: Value = serde_json::from_str(line).unwrap();
            let point = if point["beaten"].is_null() { &point } else { &point["beaten"] };
            let price = if point["platform"] == "dgx-h100" { 30_000.0 } else { 40_000.0 };
            let a_second = 64.0 * price / life + electricity;
            let paid =
                point["bill"]["money_usd"].as_f64().unwrap() / point["step"]["total_s"].as_f64().unwrap();
            assert!((paid / a_second - 1.0).abs() < 1e-12, "{paid} for {a_second}: {line}");
        }
    }
    let text = said(&format!("{search} --prices {} --platform nvl72-cxl,dgx-h100", path.display()));
    assert!(text.contains("time, memory and money (simulated)") && text.contains(&left_out), "{text}");
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
    let scratch = polder_mem::testing::Scratch::new();
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
        said(&given(1000));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_page_holds_all_that_it_draws() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("step.html");
    let cut = "--tp 8 --pp 16 --interleave 8 --micro-batch 1 --cp 1 --zero optimizer --offload optimizer";
    said(&format!("{LLAMA} {cut} --against nvl72-cxl --html {}", path.display()));
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(
        !page.contains("http") && !page.contains("src=") && !page.contains('@'),
        "nothing is fetched or left open"
    );
    let data = page.split("const plan = ").nth(1).and_then(|rest| rest.split(";\n").next()).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let number = |of: &Value| of.as_f64().unwrap();
    let platforms = data["platforms"].as_array().unwrap();
    let names: Vec<_> = platforms.iter().map(|it| it["name"].as_str().unwrap()).collect();
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
        drawn.extend(timeline.iter().map(|it| it[1].as_str().unwrap()));
        drawn.extend(times.iter().map(|it| it[0].as_str().unwrap().split(", ").next().unwrap()));
    }
    // One palette, by name.
    let palette = page.split("const palette = {").nth(1).and_then(|rest| rest.split("};").next()).unwrap();
    for name in drawn {
        assert!(palette.contains(&format!("\"{name}\": \"#")), "{name} has no colour");
    }
}

#[test]
fn what_a_trace_has_of_each_stage_adds_up_to_the_steps_figures() {
    let scratch = polder_mem::testing::Scratch::new();
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

#[test]
fn a_config_without_a_sequence_takes_the_one_that_is_given() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("config.json");
    let config =
        r#"{"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}"#;
    std::fs::write(&path, config).unwrap();
    let cut = format!("--model {} --platform dgx-h100 --gpus 8 --batch 64", path.display());
    let asked = refused(&format!("train {cut}"));
    let problem =
        "max_position_embeddings: expected a whole number, found nothing; give the tokens of a sequence";
    assert_eq!(asked, format!("polder: {}: {problem}", path.display()));
    assert!(said(&format!("train {cut} --sequence 2048")).contains("bloom of "));
    assert!(said(&format!("search {cut} --sequence 2048 --tokens 1e12 --prices watts")).contains("tp"));
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
    let said = refused(train);
    assert!(
        said.starts_with("polder: of ") && said.contains(" layouts none fits; the nearest (layout: tp 8, "),
        "{said}"
    );
    assert!(
        said.contains("most of it activations (") && said.ends_with(" GB); 16 accelerators would fit"),
        "{said}"
    );
    assert!(json(&format!("{} --json", train.replace("--gpus 8", "--gpus 16")))["fits"].as_bool().unwrap());
    let Output { stdout, .. } = plan(train);
    assert!(stdout.is_empty(), "no table of a step that cannot run");

    let train = "train --model llama3-70b --platform dgx-a100 --gpus 8 --batch 8";
    let said = refused(&format!("{train} --offload none"));
    let (_, would) = said.split_once("; weights and optimizer states offloaded to the host, or ").unwrap();
    assert!(would.ends_with(" accelerators would fit"), "{said}");
    let far = json(&format!("{train} --offload weights,optimizer --json"));
    assert_eq!((&far["fits"], &far["would_fit"]), (&true.into(), &Value::Array(vec![])));
    let Output { stdout, .. } = plan(&format!("{train} --json --offload none"));
    let answer: Value = serde_json::from_slice(&stdout).unwrap();
    assert_eq!(answer["would_fit"][0], "weights and optimizer states offloaded to the host");

    let whole =
        "train --model llama3-8b --platform dgx-a100 --gpus 8 --batch 8 --tp 1 --pp 1 --cp 1 --zero none";
    let said = refused(&format!("{whole} --offload none"));
    assert!(said.contains("GB); tp of 2, pp of 2, zero optimizer, "), "{said}");
}

#[test]
fn what_fits_nowhere_else_lies_elsewhere_and_the_output_says_so() {
    let train = "train --model llama3-70b --platform dgx-a100 --gpus 8 --batch 8";
    let text = said(&format!("{train} --against nvl72-cxl"));
    let far = "optimizer states and activations offloaded to the host";
    let note = format!("nothing fits in the accelerators' memory on dgx-a100: the layout has {far}");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[3].starts_with("layout: tp ") && lines[3].ends_with(&format!("; {far}")), "{text}");
    let difference = "no run over CXL validates the difference between these fabrics";
    assert!(lines.contains(&format!("{note}, and {difference}").as_str()), "{text}");
    let answer = json(&format!("{train} --json"));
    assert_eq!((&answer["fits"], &answer["note"]), (&true.into(), &note.into()));
    // The file of the page has the layout and the note too, and a platform without the tier is left out.
    let scratch = polder_mem::testing::Scratch::new();
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
    let none = refused(&format!("{train} --offload none --to host"));
    assert!(none.starts_with("polder: --to host: nothing is offloaded; "), "{none}");
    let front =
        said("search --model llama3-8b --platform dgx-h100 --gpus 8 --batch 64 --offload none --json");
    let points = front.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    assert!(points.map(|it| it["step"]["memory"][1]["used_bytes"].as_f64()).all(|far| far == Some(0.0)));
}

#[test]
fn a_place_without_what_is_kept_there_is_refused_and_a_search_keeps_to_it() {
    let without = refused("train --model llama3-8b --platform nvl72-cxl --gpus 8 --to pool");
    let expected =
        "polder: --to pool: nothing is offloaded; give --offload weights, optimizer or activations too";
    assert_eq!(without, expected);
    let tiers = |arguments: &str| {
        let text = said(&format!("search --model llama3-8b --gpus 2 --batch 16 --json {arguments}"));
        let points = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let far = points.filter(|it| it["step"]["memory"][1]["used_bytes"].as_f64() > Some(0.0));
        let mut tiers: Vec<_> =
            far.map(|it| it["layout"]["offload"]["tier"].as_str().unwrap().to_owned()).collect();
        tiers.sort();
        tiers.dedup();
        tiers
    };
    assert_eq!(tiers("--platform nvl72-cxl --to pool"), ["pool"]);
    assert_eq!(tiers("--platform nvl72-cxl --to host"), ["host"]);
    assert_eq!(tiers("--platform finetuning-b --to cxl"), ["cxl"]);
    let card = json(
        "train --model llama3-8b --platform finetuning-b --gpus 2 --batch 16 --offload optimizer --to cxl --json",
    );
    assert_eq!(card["layout"]["offload"]["tier"], "cxl");
    assert_eq!(card["note"], "no run over CXL validates this");
}

#[test]
fn a_search_leaves_out_what_cannot_run_and_fails_when_nothing_is_left() {
    let search = "search --model llama3-8b --batch 144";
    let Output { status, stdout, stderr } =
        plan(&format!("{search} --platform dgx-h100,nvl72,memserver --gpus 72,144 --json"));
    assert!(status.success());
    let lines = String::from_utf8(stdout).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let left_out: Vec<_> = lines.iter().filter(|line| line["left_out"].is_string()).collect();
    let places: Vec<_> = left_out
        .iter()
        .map(|it| (it["platform"].as_str().unwrap(), it["accelerators"].as_u64().unwrap()))
        .collect();
    assert_eq!(places, [("nvl72", 144), ("memserver", 72), ("memserver", 144)]);
    assert!(lines.len() > left_out.len());
    let stderr = String::from_utf8(stderr).unwrap();
    let expected = [
        "polder: left out nvl72 with 144 accelerators: more than one rack needs a fabric between racks, which this platform does not have; take as many accelerators as a rack has, or fewer; 72 accelerators would run",
        "polder: left out memserver with 72 accelerators: a training step needs accelerators, which this platform does not have; take a platform with racks",
    ];
    assert_eq!(stderr.lines().take(2).collect::<Vec<_>>(), expected);

    let Output { status, stdout, stderr } = plan(&format!("{search} --platform memserver,cmpi --gpus 8"));
    assert!(!status.success() && stdout.is_empty());
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(stderr.lines().count(), 3);
    assert!(
        stderr.ends_with("polder: no platform that was asked for can run it with so many accelerators\n"),
        "{stderr}"
    );
    let said = refused("search --model llama3-405b --platform dgx-a100 --gpus 8 --batch 8");
    assert!(said.starts_with("polder: dgx-a100: of ") && said.ends_with(" accelerators would fit"), "{said}");
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
    let text = said("train --model llama3-8b --platform dgx-h100 --gpus 2 --pp 1 --batch 2");
    assert!(text.contains("pp 1; batch") && !text.contains("1 parts"), "{text}");
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("slow.toml");
    let slow = r#"
extends = "finetuning-a"
[rack.server.accelerator]
compute = { bf16 = "50 GFLOP/s" }
"#;
    std::fs::write(&path, slow).unwrap();
    let text = said(&format!(
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
        "  interleave  published s  simulated s  with scalar",
        "\n  530B, interleave 3 ",
        "not in the publication, assumed: sizes of micro-batches, interleave: 2 from eight stages on where the blocks of a stage divide by two, 1 elsewhere",
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
    assert_eq!(rows("tables"), 38, "rows of fabrics are not among those of steps");
}

#[test]
fn the_figure_of_scalepool_says_what_it_rests_on() {
    let text = said("reproduce scalepool-fig6");
    for line in [
        "mean, times faster ",
        "published  simulated, fitted to it ",
        "CXL ports an accelerator",
        " 1.00 for 110.7 GB/s between racks, 2.03 for",
        "where collectives reach 0.75 of a port, as `polder plan train` has it on nvl72-cxl, 1.33 between racks",
        "512 GB/s of 2 accelerators, as nvl72-ndr has it, are 128 each way, the low end",
        "with the payload of one port to the pool, 110.8 GB/s",
        "fitted",
        "layout of GPT-3, tp/pp/dp ",
        "times faster  between racks\n",
        "By model and category the paper's text gives no number",
        "25.0 and 94.6, another fit's",
        "the three fitted bandwidths, GB/s an accelerator, beside those of nvl72-ndr and nvl72-cxl\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let report = json("reproduce scalepool-fig6 --json");
    // What was fitted is no evidence: beside it stands what follows without.
    let shipped = report["shipped"]["replaced"]["mean"].as_f64().unwrap();
    assert!(
        (0.96..0.98).contains(&shipped) && text.contains("1.22 / 1.87 / 3.79  0.97 / 1.29 / 2.25"),
        "{text}"
    );
    let pairs = report["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 5);
    for pair in pairs {
        let times = ["speedup", "communication_speedup"].map(|key| pair[key].as_f64().unwrap());
        let line = format!("{}, CXL ", pair["model"].as_str().unwrap());
        let line = text.lines().find(|it| it.starts_with(&line)).unwrap();
        let [whole, between] = times.map(|it| format!("{it:.2}"));
        assert!(line.split_whitespace().rev().take(2).eq([between, whole]), "{line}: {times:?}");
    }
}

#[test]
fn all_that_polder_brings_along_is_listed() {
    let text = said("list");
    for name in
        ["nvl72-cxl", "dgx-a100", "memserver", "cmpi", "finetuning-b", "llama3-405b", "palm-540b", "watts"]
    {
        assert!(text.contains(name), "{text}");
    }
    let listed = json("list --json");
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
fn flows_take_what_the_closed_form_says_but_where_they_share_links() {
    let scratch = polder_mem::testing::Scratch::new();
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
    let text = said(&format!("train --model llama3-8b --platform {path} --gpus 64 --batch 64 --fidelity L1"));
    assert!(
        text.contains("communication by the flows of all groups at the same time (--fidelity L1)\n"),
        "{text}"
    );
    let text = said("train --model llama3-8b --platform dgx-h100 --gpus 64 --batch 64");
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
    let scratch = polder_mem::testing::Scratch::new();
    let ring = scratch.path().join("ring.toml").display().to_string();
    let torus = "extends = \"dgx-h100\"\n[between]\nlinks = 1\ntopology = { kind = \"torus\", dimensions = [8, 1, 1], endpoints = 8 }";
    std::fs::write(&ring, torus).unwrap();
    let [[_, alone], [_, flows], [_, flits]] = by_fidelity(&format!("{layout} --dp 8 --platform {ring}"));
    assert!(flows > 1.5 * alone && (flits / flows - 1.0).abs() < 0.05, "{alone} {flows} {flits}");
    let text = said(&format!("{layout} --dp 8 --platform {ring} --fidelity L2 --window 256KiB"));
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
    let text = said(&format!("{train} {failed}"));
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
    let scratch = polder_mem::testing::Scratch::new();
    let ring = scratch.path().join("ring.toml").display().to_string();
    let torus = "extends = \"dgx-h100\"\n[between]\nlinks = 1\ntopology = { kind = \"torus\", dimensions = [8, 1, 1], endpoints = 8 }";
    std::fs::write(&ring, torus).unwrap();
    let train = format!("train --model llama3-8b --platform {ring} --batch 16 --tp 8 --micro-batch 1");
    // A switch that no rank is at loses both of its links.
    let failed = "--fidelity L1 --failed 4-5,5-6";
    let text = said(&format!("{train} --gpus 16 {failed}"));
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
fn access_times_are_printed_by_working_set_with_where_each_tier_pays() {
    let text = said("memory --platform nvl72-cxl --against nvl72-ndr");
    for line in [
        "access time by working set, 1,152 accelerators, simulated\n",
        "  baseline: nvl72-ndr, accelerators alone: GB200 NVL72 racks joined by NDR InfiniBand\n",
        "access of 64 B: its parts, there and back, in each memory\n",
        "tiered, rack: pays from 191 GB on: there an access is 5% faster than with what baseline has",
        "tiered, pool: pays from 13.7 TB on: there an access is 5% faster than with what baseline has",
        "memory nodes: as far as ports of the fabric are (--nodes)",
        "no run over CXL validates this",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let cells = |text: &str, begin: &str| {
        let line = text.lines().find(|it| it.starts_with(begin)).unwrap_or_else(|| panic!("{begin}: {text}"));
        line[begin.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(cells(&text, "13.4 TB "), ["1.62", "us", "1.62", "us", "854", "ns", "1.90", "1.90"]);
    assert_eq!(cells(&text, "tiered, pool ")[..5], ["load", "576", "TB", "2.05", "us"]);
    // Alone, a platform has its own two; one without tiers its accelerators.
    let alone = said("memory --platform nvl72-cxl");
    assert!(!alone.contains("baseline"), "{alone}");
}

#[test]
fn access_times_are_the_same_in_json_csv_and_on_the_page() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (csv, html) = (path("memory.csv"), path("memory.html"));
    let found = json(&format!(
        "memory --platform nvl72-cxl --against nvl72-ndr --nodes near --json --csv {csv} --html {html}"
    ));
    assert_eq!((&found["kind"], &found["nodes"]), (&"simulated".into(), &"near".into()));
    let points = found["points"].as_array().unwrap();
    let mut lines = csv::Reader::from_path(&csv).unwrap();
    let names = ["access_bytes", "working_set_bytes", "baseline_s", "clusters_s", "tiered_s"];
    assert_eq!(lines.headers().unwrap().iter().collect::<Vec<_>>(), names);
    let lines: Vec<_> = lines.records().map(Result::unwrap).collect();
    assert_eq!(lines.len(), points.len());
    // serde_json reads numbers to the last digit but one.
    let is_near = |cell: &str, number: &Value| match (cell.parse::<f64>(), number.as_f64()) {
        (Ok(cell), Some(number)) => (cell / number - 1.0).abs() < 1e-12,
        (cell, number) => cell.is_err() && number.is_none(),
    };
    for (line, point) in lines.iter().zip(points) {
        assert!(is_near(&line[1], &point["working_set_bytes"]), "{line:?} {point}");
        let seconds = point["seconds"].as_array().unwrap();
        assert!(line.iter().skip(2).zip(seconds).all(|(cell, it)| is_near(cell, it)), "{line:?} {point}");
    }
    let page = std::fs::read_to_string(html).unwrap();
    assert!(
        !page.contains("http") && !page.contains("src=") && !page.contains('@'),
        "nothing is fetched or left open"
    );
    let data = page.split("const plan = ").nth(1).and_then(|rest| rest.split(";\n").next()).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["curves"], found);
    for it in found["configurations"].as_array().unwrap() {
        assert!(page.contains(&format!("{}: \"#", it["name"])), "{} has no colour", it["name"]);
    }
}

#[test]
fn access_times_of_what_makes_no_sense_are_refused_in_one_line() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("odd.toml").display().to_string();
    let file = |text: &str| {
        std::fs::write(&path, text).unwrap();
        refused(&format!("memory --platform {path}"))
    };
    let memory = "memory --platform nvl72-cxl";
    let slow = "extends = \"nvl72-cxl\"\n[rack.nvl72.accelerator]\nmemory = { latency = \"0 ns\" }";
    let odd = "extends = \"nvl72-cxl\"\n[rack.nvl72.coherent]\ncarries = [\"mem\"]";
    for (said, expected) in [
        (
            refused(&format!("{memory} --access 64")),
            "--access: expected a size such as \"80 GB\", found \"64\": its unit is missing",
        ),
        (
            refused(&format!("{memory} --working-set -1")),
            "--working-set: expected a size such as \"80 GB\", found \"-1\": its unit is missing",
        ),
        (
            refused(&format!("{memory} --gpus x")),
            "--gpus: expected a whole number of accelerators, found \"x\"",
        ),
        (refused(&format!("{memory} --gpus 0")), "nvl72-cxl: a count of accelerators is 0; it is at least 1"),
        (
            refused("memory --platform memserver"),
            "memserver: rack: expected a kind of rack, whose accelerators access memory",
        ),
        (refused(&format!("{memory} --rack no")), "nvl72-cxl: the platform has no rack \"no\"; it has nvl72"),
        (
            file(slow),
            &format!(
                "{path}: rack.nvl72.accelerator.memory.latency: expected a time above 0, which every access takes, found 0 ps"
            ),
        ),
        (
            file(odd),
            &format!(
                "{path}: rack.nvl72.coherent.carries: expected \"cache\", by which accelerators load each other's memory"
            ),
        ),
    ] {
        assert_eq!(said, format!("polder: {expected}"));
    }
    let Output { status, stderr, .. } = polder()
        .env("POLDER_CONFIG", "/dev/null")
        .args(["plan", "memory", "--platform", "nvl72-cxl", "--working-set", "2 PB"])
        .output()
        .unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(!status.success());
    let expected = "polder: --working-set: 1,152 accelerators and their memory nodes hold 589 TB at most, found 2.00 PB; give a smaller one, or more --gpus\n";
    assert_eq!(said, expected);
}

#[test]
fn figure_7_of_scalepool_says_which_ratios_hold_where() {
    let text = said("reproduce scalepool-fig7");
    for line in [
        "Nothing is fitted: all times follow from the platforms.",
        "  met: 1.4, 1.4, 4.5; not met: 1.6; memory nodes: one switch away",
        "  met: 1.4, 1.4, 1.6; not met: 4.5; memory nodes: as far as ports of the fabric are",
        "  met: none; not met: 1.4, 1.4, 4.5, 1.6;",
        "clusters that are 2.81 times faster than the baseline",
        "so that no memory node meets both",
        "beyond an accelerator, over both, published 1.4: loads\n",
        "beyond an accelerator, over both, published 1.4: copies, bulk\n",
        "beyond a rack, over clusters, published 1.6: copies, far\n",
        "assumed: each byte of a working set is as likely",
        "not explained: ",
        "no run over CXL validates this",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let report = json("reproduce scalepool-fig7 --json");
    let variants = report["variants"].as_array().unwrap();
    assert_eq!(variants.len(), 6);
    for claim in variants.iter().flat_map(|it| it["claims"].as_array().unwrap()) {
        let [least, most] = [0, 1].map(|at| format!("{:.2}", claim["simulated"][at].as_f64().unwrap()));
        let begin = format!("  {}: ", claim["name"].as_str().unwrap());
        let line =
            text.lines().find(|it| it.starts_with(&begin) && it.contains(&format!("{least} to {most}")));
        assert!(line.is_some(), "{claim}");
    }
}

const OFFLOAD: &str = "offload --model mistral-nemo-12b --platform finetuning-b --dram 128GiB";

#[test]
fn an_offloaded_step_is_printed_by_object_tier_and_phase() {
    let text =
        said("offload --model qwen2.5-7b --platform finetuning-a --gpus 2 --context 4096,32768 --batch 1,32");
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
    let scratch = polder_mem::testing::Scratch::new();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (csv, html, policy) = (path("a.csv"), path("a.html"), path("policy.json"));
    // Numbers by tier, and a list; what is not named lies in DRAM.
    let fractions = r#"{"optimizer states": {"dram": 0.5, "cxl1": 0.5}, "activations": [0, 0.5, 0.5], "framework": [0, 1, 0]}"#;
    std::fs::write(&policy, fractions).unwrap();
    let small = OFFLOAD.replace("mistral-nemo-12b", "qwen2.5-7b");
    let given =
        format!("{small} --context 4096,8192 --batch 1,2 --overhead 1GB --policy dram,paper,{policy}");
    let found = json(&format!("{given} --json --csv {csv} --html {html}"));
    assert_eq!((&found["kind"], &found["gpus"]), (&"simulated".into(), &1.into()));
    assert_eq!(found["tiers"][0]["capacity_bytes"].as_f64(), Some(137438953472.0));
    let text = std::fs::read_to_string(&csv).unwrap();
    let mut reader = text.lines();
    let names: Vec<_> = reader.next().unwrap().split(',').collect();
    let rows: Vec<Vec<_>> = reader.map(|line| line.split(',').collect()).collect();
    let column = |name: &str| names.iter().position(|it| *it == name).unwrap();
    let points = found["points"].as_array().unwrap();
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
                assert_eq!(
                    row[column("total_s")].parse::<f64>().unwrap(),
                    placed["step_s"].as_f64().unwrap()
                );
                let phases = placed["phases"].as_array().unwrap();
                let sum: f64 = phases.iter().map(|it| it["seconds"].as_f64().unwrap()).sum();
                assert!((sum / placed["step_s"].as_f64().unwrap() - 1.0).abs() < 1e-12);
            } else {
                assert_eq!((row[column("total_s")], &placed["would_fit"]), ("", &"--policy optimal".into()));
            }
        }
        let given = &point["policies"][2]["bytes"];
        let momentum = point["objects"][0]["bytes"].as_f64().unwrap();
        assert_eq!(given[0], serde_json::json!([momentum / 2.0, 0.0, momentum / 2.0]));
        let framework = point["objects"].as_array().unwrap().iter().position(|it| it["name"] == "framework");
        assert_eq!(given[framework.unwrap()], serde_json::json!([0.0, 1e9, 0.0]));
    }
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(!page.contains("http://") && !page.contains("https://"), "the page needs something else");
    let data = page.lines().find_map(|line| line.strip_prefix("const plan = ")?.strip_suffix(';')).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["report"], found);
}

#[test]
fn an_offloaded_step_that_makes_no_sense_is_refused_in_one_line() {
    let scratch = polder_mem::testing::Scratch::new();
    let path = scratch.path().join("policy.json").display().to_string();
    let file = |text: &str| {
        std::fs::write(&path, text).unwrap();
        refused(&format!("{OFFLOAD} --context 4096 --policy {path}"))
    };
    for (said, expected) in [
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
        assert!(said.starts_with(&format!("polder: {expected}")), "{said}\n{expected}");
    }
}

#[test]
fn figures_of_liaw_and_chen_are_printed_beside_what_is_predicted() {
    for name in ["cxl-fig9", "cxl-fig10"] {
        let text = said(&format!("reproduce {name}"));
        for line in [
            "lowest and highest over the assumed grid",
            "  9(a) qwen2.5-7b ",
            "  10(a) mistral-nemo-12b ",
            "of the 12 end-points of Figure 9, which are fitted: short of 3 points\n",
            "of the 8 end-points of Figure 10, which are judged: within 3 points\n",
            "fitted to Figure 9 alone: ",
            "assumed: the grid: contexts of 4K, 8K, 16K and 32K, each with batches of ",
            "assumed: the form of the model was chosen with both figures in sight",
        ] {
            assert!(text.contains(line), "{line:?}: {text}");
        }
        let report = json(&format!("reproduce {name} --json"));
        assert_eq!(report["judged"].as_array().unwrap().len(), 4);
        // The order of the policies stands at every point that counts.
        let points = report["points"].as_array().unwrap();
        let counted = ["fitted", "judged"].iter().flat_map(|of| report[*of].as_array().unwrap());
        let policies = points.iter().map(|it| it["policies"].as_array().unwrap().len() as u64);
        assert_eq!(policies.sum::<u64>(), counted.map(|it| it["points"].as_u64().unwrap()).sum::<u64>());
        let ahead = points.iter().filter(|it| it["policies"][0][0] == "paper").count();
        assert!(text.contains(&format!("ahead at {ahead} of {} points", points.len())), "{text}");
    }
    for figure in 2..=7 {
        let text = said(&format!("reproduce cxl-fig{figure}"));
        assert!(text.contains("nothing is fitted to this figure"), "{text}");
        let report = json(&format!("reproduce cxl-fig{figure} --json"));
        assert!(report["claims"].as_array().unwrap().len() >= 2, "{report}");
    }
    let text = said("reproduce cxl-adam");
    assert!(text.contains("10 judged steps: 2.0% off on average, 6.0% at worst"), "{text}");
}

#[test]
fn messages_of_a_pattern_share_the_links_of_a_fabric() {
    let pattern = "fabric --platform nvl72-ndr --gpus 1024";
    let text = said(pattern);
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
    let scratch = polder_mem::testing::Scratch::new();
    let [csv, html, trace] =
        ["csv", "html", "trace"].map(|name| scratch.path().join(name).display().to_string());
    said(&format!("{pattern} --csv {csv} --html {html} --trace {trace}"));
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    assert_eq!(read(&csv).lines().count(), 1025);
    assert!(read(&html).contains("permutation of 67.1 MB"));
    assert!(read(&html).contains("Simulated by flows (--fidelity L1): "));
    let events =
        serde_json::from_str::<Value>(&read(&trace)).unwrap()["traceEvents"].as_array().unwrap().len();
    assert_eq!(events, 1024);
    let text = said("fabric --platform nvl72-cxl --gpus 128 --message 4MiB --fidelity L2 --window 256KiB");
    let alone = said(&format!("{pattern} --fidelity L0"));
    assert!(!alone.contains("most used links") && alone.contains("nothing shares a link"), "{alone}");
    assert!(!alone.contains('%'), "{alone}");
    // Too short for the longest way, and the window that is named is not.
    let short = "fabric --platform nvl72-cxl --gpus 128 --message 4MiB --fidelity L2 --window";
    let text_of = |window: &str| said(&format!("{short} {window}"));
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
    let scratch = polder_mem::testing::Scratch::new();
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
fn a_cluster_of_simgrid_is_a_fabric() {
    let scratch = polder_mem::testing::Scratch::new();
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
fn a_parameter_service_is_predicted_beside_all_reduces() {
    let base =
        "sync --layers 125MB,24x50MB --workers 4 --forward 40ms --backward 80ms --worker-bandwidth 12GB/s";
    let found = json(&format!("{base} --link-bandwidth 24GB/s --latency 0ns --json"));
    let step = |of: &str| found[of]["step_s"].as_f64().unwrap();
    // 120 ms of computation, and 2(p-1)/p x 1.325 GB at 12 GB/s.
    assert!((step("all_reduce") - 0.285625).abs() < 1e-9, "{found}");
    assert!(step("overlapped") < step("all_reduce") && step("service") < step("overlapped"), "{found}");
    assert!(step("central") > step("all_reduce"), "{found}");
    let sweep: Vec<_> =
        found["sweep"].as_array().unwrap().iter().map(|it| it["step_s"].as_f64().unwrap()).collect();
    assert_eq!(sweep.len(), 11);
    assert!(sweep.iter().all(|it| *it >= 0.95 * step("service")), "{sweep:?}");
    let scratch = polder_mem::testing::Scratch::new();
    let csv = scratch.path().join("sweep.csv").display().to_string();
    let text = said(&format!("{base} --csv {csv}"));
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

/// Commands of a page that take longer than all others together: `make cases` runs them, with POLDER_CASES set.
const HEAVY: [&str; 1] = ["polder plan coherence"];

/// Every console block of docs/plan*.md whose commands need no other program, to the character; `...` stands for lines that are left out.
#[test]
fn pages_show_what_commands_print() {
    let scratch = polder_mem::testing::Scratch::new();
    let home = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap();
    std::os::unix::fs::symlink(home.join("crates"), scratch.path().join("crates")).unwrap();
    let program = std::path::PathBuf::from(polder().get_program()).canonicalize().unwrap();
    let search = format!("{}:/usr/bin:/bin", program.parent().unwrap().display());
    let mut pages: Vec<_> =
        std::fs::read_dir(home.join("docs")).unwrap().map(|it| it.unwrap().path()).collect();
    pages.retain(|it| {
        it.extension().is_some_and(|it| it == "md")
            && it.file_name().unwrap().to_str().unwrap().starts_with("plan")
    });
    pages.sort();
    let mut checked = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let name = page.file_name().unwrap().to_string_lossy();
        let mut words = "";
        for (at, part) in text.split("```").enumerate() {
            let (kind, body) = part.split_once('\n').unwrap_or((part, ""));
            match (at % 2, kind) {
                (0, _) => words = part,
                // "Save this as `NAME`:" stands before a file.
                (_, "toml") => {
                    let saved =
                        words.trim_end().strip_suffix("`:").and_then(|it| it.rsplit_once("Save this as `"));
                    if let Some((_, file)) = saved {
                        std::fs::write(scratch.path().join(file), body).unwrap();
                    }
                }
                (_, "console") => {
                    let commands: Vec<_> =
                        body.split("$ polder ").map(|it| it.split_once('\n').unwrap_or((it, ""))).collect();
                    let is_ours = commands[0].0.is_empty() && !body.contains("$(");
                    if !is_ours
                        || body.lines().any(|it| it.starts_with("$ ") && !it.starts_with("$ polder plan "))
                    {
                        println!("{name}: {:?} needs another program", body.lines().next());
                        continue;
                    }
                    for (command, shown) in &commands[1..] {
                        let command = format!("polder {command}");
                        if HEAVY.iter().any(|it| command.starts_with(it))
                            && std::env::var_os("POLDER_CASES").is_none()
                        {
                            println!("{name}: {command:?} takes long, and runs in `make cases`");
                            continue;
                        }
                        let mut shell = Command::new("sh");
                        shell.args(["-c", &format!("{command} 2>&1")]).current_dir(scratch.path());
                        shell.env("PATH", &search).env("POLDER_CONFIG", "/dev/null").env_remove("COLUMNS");
                        let said = String::from_utf8(shell.output().unwrap().stdout).unwrap();
                        assert!(
                            is_shown(shown, &said),
                            "{name}: {command}\nshows\n{shown}\nand prints\n{said}"
                        );
                        checked += 1;
                    }
                }
                _ => {}
            }
        }
    }
    assert!(checked >= 11, "{checked} commands");
}

/// Whether all lines of `shown` are in `said`, one after the other, and where no `...` stands between none is missing.
fn is_shown(shown: &str, said: &str) -> bool {
    let said: Vec<_> = said.lines().collect();
    let shown: Vec<_> = shown.lines().collect();
    let parts: Vec<_> = shown.split(|line| *line == "...").collect();
    let mut from = 0;
    for (at, part) in parts.iter().enumerate() {
        let (is_first, is_last) = (at == 0, at + 1 == parts.len());
        let mut places =
            (from..=said.len().saturating_sub(part.len())).filter(|at| said[*at..].starts_with(part));
        let found = if is_last && !is_first { places.next_back() } else { places.next() };
        match found {
            Some(place) if is_first && place != 0 => return false,
            Some(place) => from = place + part.len(),
            None => return false,
        }
    }
    parts.last().is_none_or(|it| it.is_empty() && parts.len() > 1) || from == said.len()
}

#[test]
fn a_page_that_leaves_lines_out_says_so() {
    let said = "one\ntwo\nthree\n";
    for shown in ["one\ntwo\nthree\n", "one\n...\n", "...\nthree\n", "one\n...\nthree\n", "...\ntwo\n...\n"] {
        assert!(is_shown(shown, said), "{shown}");
    }
    for shown in [
        "one\ntwo\n",
        "one\nthree\n",
        "two\nthree\n",
        "one\n...\ntwo\n",
        "three\n...\none\n...\n",
        "on\n...\n",
    ] {
        assert!(!is_shown(shown, said), "{shown}");
    }
}

#[test]
fn figures_of_coarse_stand_beside_what_follows_from_data_sheets() {
    let report = json("reproduce coarse-fig16 --json");
    let claims = report["claims"].as_array().unwrap();
    assert_eq!(claims.len(), 13);
    for claim in claims {
        let [least, most] = [0, 1].map(|end| claim["range"][end].as_f64().unwrap());
        let simulated = claim["simulated"].as_f64().unwrap();
        assert!(least <= simulated && simulated <= most, "{claim}");
    }
    assert_eq!(report["open"].as_array().unwrap().len(), 10);
    let text = said("reproduce coarse-fig17");
    for line in [
        "  ranges are ",
        "simulated; nothing is fitted to these figures",
        "17d  V100, BERT, 4 workers: blocked over all-reduce's",
        "what the paper leaves open",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn slow_memory_beside_a_servers_own_is_planned() {
    let text = said("tier --idle cache");
    for line in [
        "containers of 64.0 GB on memserver, idle times cache, each draws 15.0 GB/s and waits for memory 50% of its time; simulated",
        "slow traffic, touches and slower are lower bounds: by idle times a page is read once in each",
        "At 1:1 Vistara measured 3 to 9% (Web) and 12 to 19% (DPP)",
        "12 containers on fast memory alone",
        "fast:slow",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    // Idle times give neither a go nor a no-go, also to a program.
    assert!(!text.contains("down to") && !text.contains("no container"), "{text}");
    let report = json("tier --idle cache --ratio 4:1,3:1,1:1 --json");
    assert!(report["ratio"].is_null() && report["note"].as_str().unwrap().contains("lower bounds"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let of = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    // 768 + 256 GB hold 16 containers of 64 GB, where 768 hold 12: a quarter fewer servers.
    assert_eq!((of(1, "units"), of(1, "servers"), of(1, "spill")), (16.0, 0.75, 0.25));
    assert!(of(0, "slow_bytes_per_s") < of(1, "slow_bytes_per_s"));
    assert!(of(1, "slow_bytes_per_s") < of(2, "slow_bytes_per_s"));
    assert!(of(1, "watts") > of(2, "watts") && of(1, "memory_cost") > of(2, "memory_cost"));
    assert!(of(1, "carbon") < of(1, "carbon_new"));
    // Points of one's own, as those of Table I.
    let own = json("tier --idle 25%=4.3min,50%=19.4min,75%=43.8min,99%=1.4h --ratio 4:1,3:1,1:1 --json");
    assert_eq!(own["rows"], report["rows"]);
    // Hotter pages draw more of slow memory.
    let hot = json("tier --idle 25%=100ms,50%=200ms,75%=300ms,99%=400ms --ratio 4:1,3:1,1:1 --json");
    assert!(hot["rows"][0]["slow_bytes_per_s"].as_f64().unwrap() > 1000.0 * of(0, "slow_bytes_per_s"));
    let scratch = polder_mem::testing::Scratch::new();
    let [csv, html] = ["csv", "html"].map(|name| scratch.path().join(name).display().to_string());
    said(&format!("tier --idle web1 --csv {csv} --html {html}"));
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 6);
    assert!(std::fs::read_to_string(&html).unwrap().contains("Containers a server"));
    for (said, expected) in [
        (refused("tier --idle cash"), "--idle: expected one of ads, cache, web1, web2, or points such as"),
        (
            refused("tier --idle 50%=3s,40%=5s"),
            "--idle: idle times [[0.5, 3.0], [0.4, 5.0]]: expected shares",
        ),
        (
            refused("tier --idle ads --ratio 3"),
            "--ratio: expected two numbers above 0 such as 3:1, found \"3\"",
        ),
        (refused("tier --idle ads --unit 1TB"), "--unit: 1 TB is more than local has, 768 GB; give less"),
        (refused("tier --idle ads --slow hbm"), "--slow: memserver has no server with a tier \"hbm\""),
        (refused("tier --idle ads --waits 101"), "--waits: expected per cent from 0 to 100, found 101"),
        (refused("tier --record /nowhere"), "/nowhere: "),
    ] {
        assert!(said.starts_with(&format!("polder: {expected}")), "{said}\n{expected}");
    }
}

#[test]
fn a_trace_of_page_accesses_is_followed_page_by_page() {
    let scratch = polder_mem::testing::Scratch::new();
    let [path, csv] = ["trace", "csv"].map(|name| scratch.path().join(name).display().to_string());
    let mut text = "generation,service,page\n".to_owned();
    for generation in 0..60 {
        // All pages at first, then a hot tenth; numbers of pages may lie anywhere.
        for page in 0..if generation == 0 { 600 } else { 60 } {
            text += &format!("{generation},db,{}\n{generation},web,{page}\n", page * 4096 + 7);
        }
    }
    std::fs::write(&path, &text).unwrap();
    let said_of = said(&format!("tier --trace {path} --ratio 3:1 --fair-share --csv {csv}"));
    for line in
        ["8,280 accesses in 60 generations; simulated page by page, with fair share", "db    600  75.0%"]
    {
        assert!(said_of.contains(line), "{line:?}: {said_of}");
    }
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 3);
    let report = json(&format!("tier --trace {path} --ratio 3:1,1:1 --json"));
    for at in [0, 1] {
        let service = &report[at]["services"][0];
        let pages = [0, 1].map(|tier| service[["fast", "slow"][tier]].as_u64().unwrap());
        assert_eq!(pages[0] + pages[1], 600, "{service}");
        assert!(service["slow_part"].as_f64().unwrap() < 0.2, "{service}");
    }
    for (wrong, expected) in [
        (
            "generation,service,page\n2,a,0\n1,a,0\n",
            "generation 1 after 2; expected lines of generation,service,page",
        ),
        ("generation,service,page\n", "it has no accesses; "),
        ("generation,service,page\n1,a,-1\n", "expected lines of generation,service,page"),
    ] {
        std::fs::write(&path, wrong).unwrap();
        let line = refused(&format!("tier --trace {path}"));
        assert!(line.contains(expected), "{line}");
    }
}

#[test]
fn a_record_of_the_agent_shows_the_ratio_that_services_lived_with() {
    let record = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded/guest.jsonl");
    let text = said(&format!("tier --record {record}"));
    for line in ["2 services in 10 recorded rounds", "opted out", "together they lived with "] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    let report = json(&format!("tier --record {record} --json"));
    let cache = &report["services"][0];
    assert_eq!((&cache["name"], &cache["is_opted_out"]), (&"cache".into(), &false.into()));
    let share = cache["share"].as_f64().unwrap();
    assert!((0.65..0.75).contains(&share), "{share}: its policy holds it at 70%");
    let [alone, both] = [0, 1].map(|at| report["units"][at].as_f64().unwrap());
    assert!(both > alone, "{report}");
}

#[test]
fn tables_of_the_vistara_paper_are_printed_beside_what_is_predicted() {
    let text = said("reproduce vistara-table10");
    for line in [
        "judged",
        "fitted to the first row: ",
        "by capacity: the baseline",
        "assumed: an access reads or writes",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    assert_eq!(json("reproduce vistara-table10 --json")["rows"].as_array().unwrap().len(), 8);
    let text = said("reproduce vistara-table7");
    for line in [
        "CacheA: 25% more throughput in Table VII, 33% in section V-B",
        "Spark: 25% more executors in Table VII, up to 33% in section V-C",
        "FtStorEx: 8.6% more throughput in Table VII, 8.4% less compute capacity in section V-C",
        "the knee of Table X: 75% where it is described, about 60% in the paragraph after",
        "at most 34.9%",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    assert_eq!(json("reproduce vistara-table7 --json")["gains"].as_array().unwrap().len(), 9);
    let text = said("reproduce vistara-table8");
    for line in [
        "the other rows are checked for consistency only",
        "CacheA: CXL bandwidth short by Table I: 5.00 GB/s",
        "by what stays: 2.1 to 85.3 GB/s; what was published is inside",
        "missing in the paper: ",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    assert_eq!(json("reproduce vistara-table8 --json")["rows"].as_array().unwrap().len(), 7);
    let text = said("reproduce vistara-table9");
    for line in [
        "A, Fair Share",
        "B, without bounds",
        "A loses local memory and gets faster",
        "these two rows have their answer set",
        "leaves 72 GB unused, with Fair Share 53 GB",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    assert!(json("reproduce vistara-table9 --json")["fair"]["local"].is_array());
    let text = said("reproduce vistara-ratio");
    for line in [
        "under 1% at 3:1 and 2:1, more at 1:1: holds",
        "DPP loses more than Web at 1:1: holds",
        "20 + 76 GB beside 96 GB: ",
    ] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    // What misses says so beside the trends that hold.
    assert!(text.contains("short: DPP at 1:1, 26.97% lost where 12.0 to 19.0% were published"), "{text}");
    let report = json("reproduce vistara-ratio --json");
    let off: Vec<_> =
        report["rows"].as_array().unwrap().iter().map(|it| it["off"].as_f64().unwrap()).collect();
    assert_eq!((off.len(), off.iter().filter(|it| **it != 0.0).count()), (6, 2), "{off:?}");
}

#[test]
fn figure_10_of_cmpi_is_printed_with_both_inputs_and_the_cause_of_what_misses() {
    let text = said("reproduce cmpi-fig10");
    for part in
        ["Table 1", "section 4.2", "25.3", "cause: ", "not explained: the paper disagrees with itself"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let report = json("reproduce cmpi-fig10 --json");
    let first = &report[0];
    assert_eq!((&first["input"], &first["sharing"]), (&"Table 1".into(), &"node".into()));
    let claims = first["claims"].as_array().unwrap();
    assert_eq!(claims.len(), 6);
    // Ethernet has an 80th of CXL's bandwidth, so CXL wins with either program.
    assert!(claims.iter().filter(|it| it["over"] == "ethernet").all(|it| it["sign"] == true), "{claims:#?}");
    assert_eq!(said("reproduce cmpi-fig10 --json"), said("reproduce cmpi-fig10 --json"));
}

#[test]
fn a_step_on_racks_of_two_kinds_is_divided_and_two_kinds_in_one_rack_are_refused() {
    const STEP: &str = "mixed --model llama3-70b --tp 8 --batch 720 --racks";
    let found = json(&format!("{STEP} nvl72=144,ualink=144 --json"));
    let parts = found["parts"].as_array().unwrap();
    let number = |it: &Value, key: &str| it[key].as_f64().unwrap();
    assert_eq!(parts.iter().map(|it| number(it, "copies") * number(it, "sequences")).sum::<f64>(), 720.0);
    assert!(parts.iter().all(|it| number(&found, "total_s") < number(it, "alone_s")), "{found:#}");
    let why = refused(&format!("{STEP} nvl72+ualink=144,ualink=144"));
    assert!(why.contains("physical layers and flits differ"), "{why}");
    let why = refused(&format!("{STEP} nvl72=144,pod=144"));
    assert!(why.contains("pod") && why.contains("nvl72, ualink"), "{why}");
}

#[test]
fn a_kv_cache_that_a_rack_does_not_hold_is_read_faster_from_nodes_than_by_copies() {
    let found =
        json("inference --platform nvl72-cxl --against nvl72-ndr --sequences 256,1024,1000000 --json");
    let step = |row: usize, name: &str| found["rows"][row]["steps"][name]["seconds"].as_f64();
    assert_eq!(step(0, "tiered"), step(0, "baseline"), "it fits into the accelerators' own memory");
    assert!(step(1, "tiered").unwrap() < step(1, "baseline").unwrap());
    assert_eq!(step(2, "tiered"), None, "it fits nowhere");
    let text = said("inference --platform nvl72-cxl --load retrieval --serving 8");
    assert!(text.contains("vectors of an index, 8 of 1,152"), "{text}");
    let why = refused("inference --platform nvl72-cxl --serving 73");
    assert!(why.contains("--serving: expected 1 to 72"), "{why}");
}

#[test]
fn readers_that_share_links_of_few_holders_wait_for_them() {
    let asked = "inference --platform nvl72-cxl --serving 64 --sequences 300 --json";
    let [alone, flows] = ["L0", "L1"].map(|level| json(&format!("{asked} --fidelity {level}")));
    let rack = |found: &Value| found["rows"][0]["steps"]["tiered"]["tiers"][1].clone();
    // 64 read the memory of 8, each over one link of its own.
    let rates = [&alone, &flows].map(|found| rack(found)["bytes_per_s"].as_f64().unwrap());
    assert!((rates[0] / rates[1] - 8.0).abs() < 1e-9, "{rates:?}");
    let text = said("inference --platform nvl72-cxl --serving 64 --sequences 300 --fidelity L1");
    assert!(text.contains("64 accelerators at once, as flows (--fidelity L1)"), "{text}");
    let why = refused("inference --platform nvl72-cxl --fidelity L2 --sequences 512,1024");
    let window = why.split("give ").nth(1).and_then(|it| it.split(" of each").next()).unwrap();
    assert!(window.starts_with("--window "), "{why}");
    for (more, expected) in [
        ("--nodes near", "--nodes: expected far with fidelities L1 and L2"),
        ("--window 1MiB", "fidelity: expected L2, which windows"),
    ] {
        let why = refused(&format!("inference --platform nvl72-cxl --fidelity L1 {more}"));
        assert!(why.contains(expected), "{why}");
    }
}

#[test]
fn a_snoop_filter_that_knows_less_than_is_cached_invalidates_copies() {
    let found = json("coherence --platform nvl72-cxl --region 4GB --writes 0 --json");
    let rates = |found: &Value| found["regions"][0]["rates"].clone();
    assert!(rates(&found)["back_invalidations"].as_f64().unwrap() > 0.1, "{found:#}");
    let large = json("coherence --platform nvl72-cxl --region 4GB --writes 0 --snoop-filter 4GB --json");
    assert_eq!(rates(&large)["back_invalidations"], 0.0);
    let why = refused("coherence --platform nvl72-ndr");
    assert!(why.contains("rack.nvl72.coherent: expected CXL inside the rack"), "{why}");
}

#[test]
fn a_program_that_took_no_time_has_no_error_in_percent() {
    let scratch = polder_mem::testing::Scratch::new();
    let folder = scratch.path().display();
    std::fs::write(scratch.path().join("rank-0"), "polder-mpi-trace 1\nrank 0 1 here\nend 0\n").unwrap();
    let text = said(&format!("mpi {folder} --latency 1us --bandwidth 5GB/s"));
    assert!(text.contains(": 1 rank on 1 host, 0 messages of ") && !text.contains('%'), "{text}");
    let line =
        refused(&format!("chakra {folder} --compute 1TFLOP/s --memory 1GB/s --launch 1us --measured 0s"));
    assert!(line.ends_with("--measured: expected a time above 0"), "{line}");
    // What is always refused is no option that a user should find.
    let help = said("mpi --help");
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
    let text = said(&format!("{sync} --fidelity L1"));
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
        ("verify", "which is no fabric"),
    ] {
        let said = refused(&format!("{words} --fidelity L1"));
        assert!(said.contains("--fidelity L1: plan ") && said.contains(why), "{said}");
    }
    let step = |level| {
        let words = "mixed --model llama3-8b --tp 8 --batch 20 --racks nvl72=8,ualink=8 --json --fidelity";
        json(&format!("{words} {level}"))["total_s"].as_f64().unwrap()
    };
    let [alone, flows, flits] = ["L0", "L1", "L2 --window 64KiB"].map(step);
    for other in [flows, flits] {
        assert!((other / alone - 1.0).abs() < 0.02, "{alone} {flows} {flits}");
    }
}

#[test]
fn a_window_that_is_too_short_is_named_by_each_command_that_follows_flits() {
    const SHORT: &str = "of each message (too short for the longest way: rates are steady from --window ";
    for command in [
        "sync --layers 10x1MiB --workers 8 --platform nvl72-cxl --forward 10ms --backward 20ms",
        "mixed --model llama3-70b --racks nvl72=16,ualink=16 --tp 8 --batch 16",
    ] {
        let at = |window| said(&format!("{command} --fidelity L2 --window {window}"));
        assert!(at("64KiB").contains(SHORT), "{command}");
        let steady = at("256KiB");
        assert!(steady.contains(" flit-hops of the first 262 kB of each message, "), "{steady}");
    }
}
