//! `polder plan search`: fronts, prices and what is left out.

use std::process::Output;

use serde_json::Value;

use crate::train::LLAMA;
use crate::{front, json, plan, refused, scratch, stdout_of};

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
    let once = stdout_of(&format!("{search} --threads 1"));
    assert!(once.lines().count() > 3, "{once}");
    for threads in [1, 2, 3] {
        assert_eq!(stdout_of(&format!("{search} --threads {threads}")), once);
    }
}

#[test]
fn several_platforms_and_tiers_share_one_front() {
    let scratch = scratch();
    let path = scratch.path().join("front.csv");
    let search = "search --model llama3-70b --gpus 512 --batch 512 --platform";
    let front = stdout_of(&format!("{search} nvl72-ndr,nvl72-cxl --json --csv {}", path.display()));
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
    let table = stdout_of(&format!("{search} nvl72-ndr,nvl72-cxl --rows 100000"));
    let noted: Vec<_> = table.lines().filter(|line| line.contains("no run over CXL")).collect();
    assert_eq!(noted, ["nvl72-cxl: no run over CXL validates this"]);
    let (_, front) = table.split_once("\nall that no other beats:\n").unwrap();
    // How many there were stands last.
    let here = front.lines().last().unwrap();
    let lines = front.lines();
    assert!(here.ends_with("to within 1%; --csv and --json have all"), "{here}");
    let printed = lines.filter(|line| line.starts_with("nvl72-") && !noted.contains(line)).count();
    assert!(here.starts_with(&format!("{printed} of them here")) && printed < points.len(), "{here}");
    let columns: Vec<_> = text.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(columns, vec![7 + 25 + 41 + 2; points.len() + 1]);
    // Alone, a platform has at least what it has among others.
    assert!(stdout_of(&format!("{search} nvl72-cxl --json")).lines().count() >= of("nvl72-cxl"));
}

/// A platform that loses everywhere is on no front: the best of it is printed all the same, and first.
#[test]
fn the_fastest_of_each_platform_comes_first_also_of_one_that_loses_everywhere() {
    let search =
        "search --model llama3-8b --gpus 64 --batch 256 --offload none --platform dgx-a100,nvl72-ndr";
    let lines = stdout_of(&format!("{search} --json"));
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (beaten, front): (Vec<_>, Vec<_>) = lines.iter().partition(|line| !line["beaten"].is_null());
    assert!(front.iter().all(|point| point["platform"] == "nvl72-ndr"), "{front:?}");
    let [beaten] = beaten[..] else { panic!("one platform is beaten: {beaten:?}") };
    assert_eq!((&beaten["platform"], &beaten["accelerators"]), (&"dgx-a100".into(), &64.into()));
    // It is what a search of that platform alone finds.
    let alone = stdout_of(&format!("{} --json", search.replace(",nvl72-ndr", "")));
    let alone: Value = serde_json::from_str(alone.lines().next().unwrap()).unwrap();
    assert_eq!(beaten["beaten"], alone);
    let table = stdout_of(search);
    let (best, _) = table.split_once("\nall that no other beats:\n").unwrap();
    let (_, best) = best.split_once("\nthe fastest of each:\n").unwrap();
    let names: Vec<_> = best.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["platform", "nvl72-ndr", "dgx-a100"]);
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
    let text = stdout_of(&format!("train {cut} --platform dgx-a100 --against dgx-h100"));
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
    let scratch = scratch();
    let path = scratch.path().join("ours.toml");
    let search = "search --model llama3-8b --batch 512 --gpus 64 --platform dgx-a100,dgx-h100 --offload none";
    let chosen = |rent: &str| {
        std::fs::write(&path, OURS.replace("\"1 USD/h\"", rent)).unwrap();
        let text = stdout_of(&format!("{search} --prices {}", path.display()));
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
        let mut command = front();
        command.env("COLUMNS", columns).args(search.split(' '));
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= columns.parse().unwrap(), "{widest}: {text}");
        assert!(text.contains("sequence-parallel") && text.contains("\n1  dgx-h100"), "{text}");
    }
    assert!(stdout_of(search).lines().any(|line| line.chars().count() > 120));
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
    let scratch = scratch();
    let [path, table] = ["ours.toml", "front.csv"].map(|name| scratch.path().join(name));
    std::fs::write(&path, OURS).unwrap();
    let search = "search --model llama3-8b --batch 512 --gpus 64,128 --platform dgx-a100,dgx-h100";
    let priced = format!("{search} --prices {}", path.display());
    let points = |arguments: &str| -> Vec<Value> {
        let text = stdout_of(&format!("{arguments} --json"));
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
            points.iter().map(|point| (point["platform"].to_string(), count(point) as u32)).collect();
        places.sort();
        places.dedup();
        places
    };
    let front = points(&format!("{priced} --csv {}", table.display()));
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
                let [time, money, energy] = paid.map(|value| number(value) * times);
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
    assert_eq!(columns, vec![7 + 25 + 41 + 2 + 13; front.len() + 1]);

    std::fs::write(&path, OURS.replace("machine.nvl72-ndr", "machine.nvl72-cxx")).unwrap();
    let few = "search --model llama3-8b --batch 8 --gpus 8 --platform dgx-h100";
    let Output { status, stderr, .. } = plan(&format!("{few} --prices {}", path.display()));
    let unknown = "machine.nvl72-cxx: no platform and no accelerator of this name; it is passed over";
    let warned = format!("polder: {}: {unknown}\n", path.display());
    assert!(status.success());
    assert_eq!(String::from_utf8(stderr).unwrap(), warned);
    std::fs::write(&path, OURS).unwrap();
    let elsewhere = refused(&format!("{priced} --csv /nowhere/front.csv"));
    assert!(elsewhere.starts_with("polder: /nowhere/front.csv: "), "{elsewhere}");

    // A run of as many steps as make 1e12 tokens in 512 sequences of 8,192.
    let run = points(&format!("{priced} --tokens 1e12"));
    let steps = (1e12_f64 / (512.0 * 8192.0)).ceil();
    for (run, step) in run.iter().zip(&front) {
        assert_eq!(number(&run["bill"]["steps"]), steps);
        let times = number(&run["bill"]["money_usd"]) / number(&step["bill"]["money_usd"]);
        assert!((times / steps - 1.0).abs() < 1e-12);
    }
    let text = stdout_of(&format!("{priced} --tokens 1e12"));
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
    let scratch = scratch();
    let path = scratch.path().join("ours.toml");
    std::fs::write(&path, OURS).unwrap();
    let search = "search --model llama3-8b --batch 512 --gpus 64 --tp 8";
    let text = stdout_of(&format!("{search} --platform dgx-h100,nvl72-ndr --prices {}", path.display()));
    assert!(text.contains("in time, memory and money (simulated)"), "{text}");
    assert!(text.contains("energy is left out: ") && text.contains("has none for nvl72-ndr"), "{text}");
    let text = stdout_of(&format!("{search} --platform dgx-h100 --prices watts"));
    assert!(text.contains("in time, memory and energy (simulated)"), "{text}");
    let message = refused(&format!("{search} --platform ualink-1024 --prices watts"));
    assert!(
        message.starts_with("polder: watts: machine: expected \"ualink-1024\", or its accelerator"),
        "{message}"
    );
    let message = refused(&format!("{search} --platform dgx-h100 --prices dear"));
    assert!(
        message.starts_with("polder: dear: no file of prices of this name; there are watts, or"),
        "{message}"
    );
}

#[test]
fn money_of_machines_has_electricity_of_all_or_of_none() {
    let scratch = scratch();
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
    for (platforms, electricity, warning) in
        [("dgx-h100", power, String::new()), ("dgx-h100,nvl72-cxl", 0.0, format!("polder: {left_out}\n"))]
    {
        let Output { stdout, stderr, .. } = priced(platforms);
        assert_eq!(String::from_utf8(stderr).unwrap(), warning);
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
    let text = stdout_of(&format!("{search} --prices {} --platform nvl72-cxl,dgx-h100", path.display()));
    assert!(text.contains("time, memory and money (simulated)") && text.contains(&left_out), "{text}");
}

#[test]
fn a_place_without_what_is_kept_there_is_refused_and_a_search_keeps_to_it() {
    let without = refused("train --model llama3-8b --platform nvl72-cxl --gpus 8 --to pool");
    let expected =
        "polder: --to pool: nothing is offloaded; give --offload weights, optimizer or activations too";
    assert_eq!(without, expected);
    let tiers = |arguments: &str| {
        let text = stdout_of(&format!("search --model llama3-8b --gpus 2 --batch 16 --json {arguments}"));
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
    let refusal = refused("search --model llama3-405b --platform dgx-a100 --gpus 8 --batch 8");
    assert!(
        refusal.starts_with("polder: dgx-a100: of ") && refusal.ends_with(" accelerators would fit"),
        "{refusal}"
    );
}

#[test]
fn a_map_of_bandwidths_says_where_one_fabric_pays_against_another() {
    let scratch = scratch();
    let [csv, html] = ["map.csv", "map.html"].map(|name| scratch.path().join(name));
    let asked = "pays --model palm-540b --gpus 2048 --batch 512 --between 12.5GB/s,100GB/s";
    let files = format!("--csv {} --html {}", csv.display(), html.display());
    let map = json(&format!("{asked} --pool 50GB/s,800GB/s --json {files}"));
    let cells = map["cells"].as_array().unwrap();
    // At 12.5 GB/s the link holds both pools back, which are one then.
    assert_eq!(cells.len(), 2 + 2 * 2);
    let number = |it: &Value| it.as_f64().unwrap();
    let cell = |other: f64, there: f64| {
        let is = |it: &&Value| it["between_bytes_per_s"] == serde_json::json!([there, other]);
        number(&cells.iter().rfind(is).unwrap()["times"])
    };
    assert!(cell(100e9, 12.5e9) > cell(100e9, 100e9), "a slower fabric that is there gains more: {map}");
    assert!(cell(100e9, 12.5e9) > cell(12.5e9, 12.5e9), "a faster one gains more: {map}");
    let text = stdout_of(asked);
    assert!(text.contains("no run over CXL validates the difference between these fabrics"), "{text}");
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 1 + 1 + cells.len());
    assert!(std::fs::read_to_string(&html).unwrap().contains("nvl72-cxl beside nvl72-ndr"));
    let prices = scratch.path().join("prices.toml");
    let machine = |name: &str, usd: &str| {
        format!("[machine.{name}]\nrent = {{ value = \"{usd} USD/h\", source = \"a test\" }}\n")
    };
    let rents = ["extends = \"watts\"\n", &machine("nvl72-ndr", "3"), &machine("nvl72-cxl", "1")].concat();
    std::fs::write(&prices, rents).unwrap();
    let priced = format!("{asked} --prices {}", prices.display());
    let map = json(&format!("{priced} --json --csv {}", csv.display()));
    for cell in map["cells"].as_array().unwrap().iter().chain([&map["own"]]) {
        let [money, energy] = &cell["costs"].as_array().unwrap()[..] else { panic!("{cell}") };
        assert_eq!([&money["name"], &energy["name"]], ["money_usd", "energy_j"]);
        let dearer = number(&money["times"]) / number(&cell["times"]);
        assert!((dearer - 3.0).abs() < 1e-9, "a second costs a third: {cell}");
        let step = [0, 1].map(|at| number(&money["step"][at]));
        assert!((step[0] / step[1] / number(&money["times"]) - 1.0).abs() < 1e-9, "{cell}");
    }
    let head = std::fs::read_to_string(&csv).unwrap().lines().next().unwrap().to_owned();
    assert!(head.ends_with("energy_times_least,energy_times_most,energy_pays"), "{head}");
    let text = stdout_of(&priced);
    for part in
        ["how many times as cheap, by money:", " USD a step, ", "a port costs as much at each bandwidth"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let pool = refused("pays --model llama3-8b --gpus 64 --against dgx-h100 --pool 50GB/s");
    assert!(pool.contains("dgx-h100: has no memory nodes"), "{pool}");
    let zero = plan("pays --model llama3-8b --gpus 64 --between 0GB/s");
    assert!(!zero.status.success() && String::from_utf8_lossy(&zero.stderr).contains("expected a bandwidth"));
}
