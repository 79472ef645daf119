//! `polder plan memory`, `inference`, `coherence` and `tier`.

use std::process::Output;

use serde_json::Value;

use crate::{front, json, refused, scratch, stdout_of};

#[test]
fn access_times_are_printed_by_working_set_with_where_each_tier_pays() {
    let text = stdout_of("memory --platform nvl72-cxl --against nvl72-ndr");
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
    let alone = stdout_of("memory --platform nvl72-cxl");
    assert!(!alone.contains("baseline"), "{alone}");
}

#[test]
fn access_times_are_the_same_in_json_csv_and_on_the_page() {
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (csv, html) = (path("memory.csv"), path("memory.html"));
    let answer = json(&format!(
        "memory --platform nvl72-cxl --against nvl72-ndr --nodes near --json --csv {csv} --html {html}"
    ));
    assert_eq!((&answer["kind"], &answer["nodes"]), (&"simulated".into(), &"near".into()));
    let points = answer["points"].as_array().unwrap();
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
        assert!(
            line.iter().skip(2).zip(seconds).all(|(cell, number)| is_near(cell, number)),
            "{line:?} {point}"
        );
    }
    let page = std::fs::read_to_string(html).unwrap();
    assert!(
        !page.contains("http") && !page.contains("src=") && !page.contains('@'),
        "nothing is fetched or left open"
    );
    let data = page.split("const plan = ").nth(1).and_then(|rest| rest.split(";\n").next()).unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["curves"], answer);
    for configuration in answer["configurations"].as_array().unwrap() {
        assert!(
            page.contains(&format!("{}: \"#", configuration["name"])),
            "{} has no colour",
            configuration["name"]
        );
    }
}

#[test]
fn access_times_of_what_makes_no_sense_are_refused_in_one_line() {
    let scratch = scratch();
    let path = scratch.path().join("odd.toml").display().to_string();
    let file = |text: &str| {
        std::fs::write(&path, text).unwrap();
        refused(&format!("memory --platform {path}"))
    };
    let memory = "memory --platform nvl72-cxl";
    let slow = "extends = \"nvl72-cxl\"\n[rack.nvl72.accelerator]\nmemory = { latency = \"0 ns\" }";
    let odd = "extends = \"nvl72-cxl\"\n[rack.nvl72.coherent]\ncarries = [\"mem\"]";
    for (output, expected) in [
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
        assert_eq!(output, format!("polder: {expected}"));
    }
    let Output { status, stderr, .. } =
        front().args(["memory", "--platform", "nvl72-cxl", "--working-set", "2 PB"]).output().unwrap();
    let output = String::from_utf8(stderr).unwrap();
    assert!(!status.success());
    let expected = "polder: --working-set: 1,152 accelerators and their memory nodes hold 589 TB at most, found 2.00 PB; give a smaller one, or more --gpus\n";
    assert_eq!(output, expected);
}

#[test]
fn slow_memory_beside_a_servers_own_is_planned() {
    let text = stdout_of("tier --idle cache");
    for line in [
        "containers of 64.0 GB on memserver, idle times cache, each draws 15.0 GB/s and waits for memory 50% of its time; simulated",
        "slow traffic, touches and slower are lower bounds: by idle times a page is read once in each",
        "At 1:1 Vistara measured 3 to 9% (Web) and 12 to 19% (DPP)",
        "12 containers on fast memory alone",
        "neither a bound nor a promise for yours",
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
    // What others asked of slow memory: more at each spill, and from the service that asks for the least to the one that asks for the most.
    let others: Vec<[f64; 3]> = serde_json::from_value(report["slow_traffic_by_others"].clone()).unwrap();
    assert!(
        others.iter().all(|traffic| traffic[0] < traffic[1] && traffic[1] < traffic[2]) && others.is_sorted(),
        "{others:?}"
    );
    assert_eq!(others.len(), 3);
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
    let hot = json(
        "tier --idle 25%=100ms,50%=200ms,75%=300ms,99%=400ms --ratio 4:1,3:1,1:1 --draws 150GB/s --json",
    );
    assert!(hot["rows"][0]["slow_bytes_per_s"].as_f64().unwrap() > 1000.0 * of(0, "slow_bytes_per_s"));
    let scratch = scratch();
    let [csv, html] = ["csv", "html"].map(|name| scratch.path().join(name).display().to_string());
    stdout_of(&format!("tier --idle web1 --csv {csv} --html {html}"));
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 6);
    assert!(std::fs::read_to_string(&html).unwrap().contains("Containers a server"));
    for (message, expected) in [
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
        (
            refused("tier --idle ads --fast cxl --slow local"),
            "--slow: \"local\" is not slower than \"cxl\", which is the fast tier",
        ),
        (refused("tier --idle ads --slow local"), "--slow: \"local\" is not slower than \"local\""),
        (refused("tier --idle ads --slow hbm"), "--slow: memserver has no server with a tier \"hbm\""),
        (refused("tier --idle ads --waits 101"), "--waits: expected per cent from 0 to 100, found 101"),
        (refused("tier --record /nowhere"), "/nowhere: "),
        (refused("tier --idle cache --draws 1B/s"), "--draws: 13 containers draw 13 B/s of all memory"),
    ] {
        assert!(message.starts_with(&format!("polder: {expected}")), "{message}\n{expected}");
    }
}

#[test]
fn a_trace_of_page_accesses_is_followed_page_by_page() {
    let scratch = scratch();
    let [path, csv] = ["trace", "csv"].map(|name| scratch.path().join(name).display().to_string());
    let mut text = "generation,service,page\n".to_owned();
    for generation in 0..60 {
        // All pages at first, then a hot tenth; numbers of pages may lie anywhere.
        for page in 0..if generation == 0 { 600 } else { 60 } {
            text += &format!("{generation},db,{}\n{generation},web,{page}\n", page * 4096 + 7);
        }
    }
    std::fs::write(&path, &text).unwrap();
    let said_of = stdout_of(&format!("tier --trace {path} --ratio 3:1 --fair-share --csv {csv}"));
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
    let record = concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/tests/recorded/guest.jsonl");
    let text = stdout_of(&format!("tier --record {record}"));
    for line in ["2 services in 10 recorded rounds", "opted out", "together they lived with "] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    // What only containers have, or only simulated pages, is not passed over.
    for more in
        ["--unit 5GB", "--draws 3GB/s", "--waits 3", "--ratio 9:1", "--slow-cost 0.4", "--server-watts 3"]
    {
        let args = format!("tier --record {record} {more}");
        let Output { status, stderr, .. } = front().args(args.split(' ')).output().unwrap();
        assert!(
            !status.success() && String::from_utf8(stderr).unwrap().contains("cannot be used with"),
            "{args}"
        );
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
fn a_kv_cache_that_a_rack_does_not_hold_is_read_faster_from_nodes_than_by_copies() {
    let found =
        json("inference --platform nvl72-cxl --against nvl72-ndr --sequences 256,1024,1000000 --json");
    let step = |row: usize, name: &str| found["rows"][row]["steps"][name]["seconds"].as_f64();
    assert_eq!(step(0, "tiered"), step(0, "baseline"), "it fits into the accelerators' own memory");
    assert!(step(1, "tiered").unwrap() < step(1, "baseline").unwrap());
    assert_eq!(step(2, "tiered"), None, "it fits nowhere");
    let text = stdout_of("inference --platform nvl72-cxl --load retrieval --serving 8");
    assert!(text.contains("vectors of an index, 8 of 1,152"), "{text}");
    for (more, expected) in [
        ("--set 1TB", "--set: a step of load kv does not read it; leave it out"),
        (
            "--load embedding --context 8",
            "--context: a step of load embedding does not read it; leave it out",
        ),
        (
            "--load embedding --set 1kB --access 1MB",
            "--access: expected 1 kB at most, the size of the set, found 1 MB",
        ),
    ] {
        let why = refused(&format!("inference --platform nvl72-cxl {more}"));
        assert_eq!(why, format!("polder: {expected}"));
    }
    // A step of minutes gives less than one a second.
    let slow =
        stdout_of("inference --platform nvl72-cxl --load embedding --sequences 64 --visits 4000000000");
    assert!(!slow.contains("  0  "), "{slow}");
    let large = "inference --platform dgx-h100 --gpus 8 --model llama3-405b --sequences 1";
    let why = "clusters: weights alone take 101 GB of each accelerator that serves, which has 80.0 GB\n";
    assert!(stdout_of(large).contains(why), "{}", stdout_of(large));
    let few = stdout_of("inference --platform nvl72-cxl --serving 1 --model llama3-405b --sequences 1");
    assert!(few.contains(" which has 186 GB; let more serve (--serving)\n"), "{few}");
    let experts = "a step reads the experts that its tokens choose, each as likely\n";
    let mixture = stdout_of("inference --platform nvl72-cxl --model deepseek-v3 --sequences 1");
    assert!(mixture.contains(experts) && !few.contains(experts), "{mixture}");
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
    let text = stdout_of("inference --platform nvl72-cxl --serving 64 --sequences 300 --fidelity L1");
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
fn hits_of_caches_stand_beside_the_working_set() {
    let asked = "memory --platform nvl72-cxl --against nvl72-ndr --working-set 1TB,10TB";
    let cached = format!("{asked} --cache 1GB --snoop-filter 100GB");
    let [plain, found] = [asked, &cached].map(|words| json(&format!("{words} --json")));
    let tiered = |found: &Value, at: usize| found["points"][at]["seconds"][2].as_f64().unwrap();
    for at in [0, 1] {
        assert!(tiered(&found, at) < tiered(&plain, at), "{found:#}");
        assert_eq!(
            found["points"][at]["seconds"][0], plain["points"][at]["seconds"][0],
            "copies hit nowhere"
        );
        assert_eq!(
            (&found["points"][at]["hits"][0], &plain["points"][at]["hits"][2]),
            (&0.0.into(), &0.0.into())
        );
        let hits = found["points"][at]["hits"][2].as_f64().unwrap();
        assert!(hits > 0.0 && hits < 1.0, "{hits}");
    }
    let text = stdout_of(&cached);
    for line in ["hits, tiered", "each accelerator caches 1.00 GB of what it loads over CXL (--cache)"] {
        assert!(text.contains(line), "{line:?}: {text}");
    }
    let why = refused("memory --platform nvl72-ndr --cache 1GB");
    assert!(why.starts_with("polder: --cache: expected memory that is loaded over CXL"), "{why}");
}

#[test]
fn a_snoop_filter_that_knows_less_than_is_cached_invalidates_copies() {
    let found = json("coherence --platform nvl72-cxl --region 4GB --writes 0 --json");
    let rates = |found: &Value| found["regions"][0]["rates"].clone();
    assert!(rates(&found)["back_invalidations"].as_f64().unwrap() > 0.1, "{found:#}");
    let large = json("coherence --platform nvl72-cxl --region 4GB --writes 0 --snoop-filter 4GB --json");
    assert_eq!(rates(&large)["back_invalidations"], 0.0);
    for (more, expected) in [
        ("--region 1PB", "--region: expected 13.392 TB at most, the memory of a rack, found 1 PB"),
        ("--cache 1TB", "--cache: expected 186 GB at most, an accelerator's own memory, found 1 TB"),
    ] {
        assert_eq!(refused(&format!("coherence --platform nvl72-cxl {more}")), format!("polder: {expected}"));
    }
    let why = refused("coherence --platform nvl72-ndr");
    assert!(why.contains("rack.nvl72.coherent: expected CXL inside the rack"), "{why}");
}
