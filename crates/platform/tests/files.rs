//! What a platform's file may say, and the line with which anything else is refused.

use std::collections::BTreeMap;
use std::path::PathBuf;

use polder_platform::{Folder, Graph, Platform, Prices, Rates, Topology, names};

/// A file that is gone after the test.
struct TempFile(PathBuf);

impl TempFile {
    fn new(text: &str) -> Self {
        let name = format!("polder-platform-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn refused(text: &str) -> String {
    let file = TempFile::new(text);
    let path = file.0.to_str().unwrap();
    let said = Platform::load(path).unwrap_err().to_string();
    assert_eq!(said.lines().count(), 1, "{said}");
    said.strip_prefix(path).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&said).to_owned()
}

#[test]
fn what_polder_brings_along_loads() {
    let platforms = names(Folder::Platforms);
    assert!(platforms.len() >= 14, "{platforms:?}");
    for name in names(Folder::Prices) {
        assert!(!Prices::load(name).unwrap().title.is_empty(), "{name}");
    }
    for name in platforms {
        let platform = Platform::load(name).unwrap();
        assert!(!platform.title.is_empty() && !platform.source.is_empty(), "{name}");
    }
}

#[test]
fn a_file_lies_over_the_one_that_it_extends() {
    let file = TempFile::new("extends = \"nvl72-ndr\"\n[between]\nlinks = 2\n");
    let (ours, base) =
        (Platform::load(file.0.to_str().unwrap()).unwrap(), Platform::load("nvl72-ndr").unwrap());
    let payload = |platform: &Platform| platform.between.as_ref().unwrap().payload().value();
    assert_eq!(payload(&ours), 2.0 * payload(&base));
    assert_eq!(ours.rack, base.rack);
}

const ANNOTATED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/platform.toml");

/// The paths of all tables inside a table.
fn tables(at: &[String], table: &toml::Table, found: &mut Vec<Vec<String>>) {
    found.push(at.to_vec());
    for (key, value) in table {
        if let Some(inner) = value.as_table() {
            tables(&[at, std::slice::from_ref(key)].concat(), inner, found);
        }
    }
}

#[test]
fn the_annotated_file_has_every_key_and_each_of_its_topologies_loads() {
    let text = std::fs::read_to_string(ANNOTATED).unwrap();
    Platform::load(ANNOTATED).unwrap();
    let whole: toml::Table = toml::from_str(&text).unwrap();
    let mut paths = vec![];
    tables(&[], &whole, &mut paths);
    // With a key too many, a table says which it has.
    let mut known = std::collections::BTreeSet::new();
    for path in paths {
        let mut odd = whole.clone();
        let table = path.iter().fold(&mut odd, |table, key| table[key].as_table_mut().unwrap());
        table.insert("odd".into(), 1.into());
        let file = TempFile::new(&odd.to_string());
        let output =
            Platform::load(file.0.to_str().unwrap()).map_or_else(|it| it.to_string(), |_| String::new());
        let expected = output.split_once("unknown field `odd`, expected ").map_or("", |(_, rest)| rest);
        known.extend(expected.split('`').skip(1).step_by(2).map(str::to_owned));
    }
    let headers = text.lines().filter_map(|line| line.strip_prefix('[')?.strip_suffix(']'));
    let headers: Vec<_> = headers.flat_map(|line| line.split('.')).collect();
    let is_there = |key: &str| text.contains(&format!("{key} = ")) || headers.contains(&key);
    let missing: Vec<_> = known.iter().filter(|key| !is_there(key)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(known.len() > 70, "{known:?}");

    let mut kinds = vec![];
    for line in text.lines().filter_map(|line| line.strip_prefix("# topology = ")) {
        let file = TempFile::new(&format!("extends = {ANNOTATED:?}\n[between]\ntopology = {line}"));
        let between = Platform::load(file.0.to_str().unwrap()).unwrap().between.unwrap();
        assert!(between.ports() > 1 << 16, "{line}: {}", between.ports());
        kinds.push(between.topology);
    }
    assert!(matches!(kinds[..], [Topology::Torus { .. }, Topology::Dragonfly { .. }]), "{kinds:?}");
}

#[test]
fn how_cpus_attach_may_be_left_out() {
    let said = "kind = \"pcie-switch\", bandwidth = \"55 GB/s\", accelerators = 2";
    let text = std::fs::read_to_string(ANNOTATED).unwrap().replace(said, "bandwidth = \"55 GB/s\"");
    let file = TempFile::new(&text);
    let platform = Platform::load(file.0.to_str().unwrap()).unwrap();
    assert_eq!(platform.rack["pod"].host.attach.kind, None);
}

#[test]
fn bad_input_gets_one_line_with_the_key_and_what_was_expected() {
    let over = |text: &str| refused(&format!("extends = \"nvl72-ndr\"\n{text}"));
    let cases = [
        (
            over("[between]\nlink = { rates = \"1 GT/s\" }"),
            "between.link.rates: unknown field `rates`, expected one of",
        ),
        (
            over("[between.link]\nrate = 100"),
            "between.link.rate: invalid type: integer `100`, expected a rate of a lane with its unit, such as \"64 GT/s\"",
        ),
        (
            over(
                "[pool]\naccelerators = 1\nports = 1\nmemory = { capacity = \"1 TB\", read = \"-5 GB/s\", write = \"5 GB/s\", latency = \"1 us\" }",
            ),
            "pool.memory.read: expected a bandwidth such as \"900 GB/s\", found \"-5 GB/s\": it is negative",
        ),
        (
            over("[between.link.flit]\nbytes = \"256\""),
            "between.link.flit.bytes: expected a size such as \"80 GB\", found \"256\": its unit is missing",
        ),
        (
            over("[rack.nvl72.fabric.switch]\nports = 16"),
            "rack.nvl72.fabric.topology: 72 accelerators with 18 links need 1296 ports, the topology has 288",
        ),
        (
            over("[between]\ntopology = { kind = \"torus\", dimensions = [8, 8, 8], endpoints = 60 }"),
            "between.topology.endpoints: 60 endpoints and 6 neighbours need 66 ports, the switch has 64",
        ),
        (
            over("[between]\ntopology = { kind = \"torus\", dimensions = [8, 8, 8], endpoints = 0 }"),
            "between.topology.endpoints: expected at least one",
        ),
        (
            over("[between]\ntopology = { kind = \"dragonfly\", endpoints = 0, group = 4, global = 4 }"),
            "between.topology.endpoints: expected at least one",
        ),
        (
            over(
                "[between]\ntopology = { kind = \"torus\", dimensions = [4294967295, 8, 8], endpoints = 2 }",
            ),
            "between.topology.dimensions: expected 1 to 65536 switches along each axis, found [4294967295, 8, 8]",
        ),
        (
            over("[between.link]\nrate = \"1e-21 GT/s\""),
            "between.link.rate: expected 1 MT/s or more, found 0.000000000000000001 MT/s",
        ),
        (
            over("[rack.nvl72.accelerator.fitted]\nstraggle = 1e300"),
            "rack.nvl72.accelerator.fitted.straggle: expected a part from 0 to 1, found 1",
        ),
        (
            over("[rack.nvl72.host.attach]\naccelerators = 2"),
            "rack.nvl72.host.attach.accelerators: expected 1, or those behind a link of a \"pcie-switch\", found 2",
        ),
        (
            over("[between]\ntopology = { kind = \"star\" }"),
            "between.topology.kind: unknown variant `star`, expected one of `single-hop`, `clos`, `torus`, `dragonfly`",
        ),
        (
            over("[rack.nvl72.accelerator.fitted]\nmatrix = 1.5"),
            "rack.nvl72.accelerator.fitted.matrix: expected a part from 0 to 1, found 1.5",
        ),
        (
            over("[rack.nvl72.accelerator.efficiency]\nmatrix = [{ size = \"1 GB\", reached = 0.5 }]"),
            "rack.nvl72.accelerator.efficiency.matrix[0].size: expected a number of operations such as \"16 GFLOP\", found \"1 GB\": its units are ",
        ),
        (
            over("[rack.nvl72.accelerator.efficiency]\nmemory = [{ size = \"1 GB\", reached = 1.5 }]"),
            "rack.nvl72.accelerator.efficiency.memory: expected a part from 0 to 1 at 1 GB, found 1.5",
        ),
        (
            over("[between]\npbr = { ids = 5000 }"),
            "between.pbr.ids: expected 1 to 4096, which 12 bits are, found 5000",
        ),
        (over("[between]\npbr = { ids = 4096, domains = 0 }"), "between.pbr.domains: expected at least one"),
        (
            refused("extends = \"nvl72-cxl\"\n[between]\ncarries = [\"cache\"]"),
            "between.carries: expected \"mem\", by which a memory pool is loaded, or \"io\", by which it is copied",
        ),
        (
            over("[between]\nlinks = 1.5"),
            "between.links: invalid type: floating point `1.5`, expected a whole number from 0 on",
        ),
        (
            over("[rack.nvl72]\naccelerators = \"72\""),
            "rack.nvl72.accelerators: invalid type: string \"72\", expected a whole number from 0 on",
        ),
        (
            over("[rack.nvl72.accelerator.fitted]\nmatrix = \"0.5\""),
            "rack.nvl72.accelerator.fitted.matrix: invalid type: string \"0.5\", expected a number",
        ),
        (over("[rack]\nnvl72 = 3"), "rack.nvl72: invalid type: integer `3`, expected a table"),
        (over("[between]\ncarries = 3"), "between.carries: invalid type: integer `3`, expected a list"),
        (over("[between.link]\nencoding = 0"), "between.link.encoding: "),
        (over("[between.link]\nlanes = 0"), "between.link.lanes: expected at least one"),
        (
            over("[between.software]\nprocessors = 1"),
            "between.software.processors: expected a part from 0 to below 1, found 1",
        ),
        (
            refused("extends = \"nowhere\""),
            "extends: nowhere: no platform of this name; there are cmpi, dgx-a100, ",
        ),
        (refused("title = "), "line 1: "),
        (refused("title = \"x\""), "missing field `source`"),
        (refused(""), "expected a platform, and the file has no keys; give another path, or one of cmpi, "),
        (refused("# of comments alone\n"), "expected a platform, and the file has no keys"),
        (
            Platform::load("").unwrap_err().to_string(),
            "\"\": the name of a platform is empty; there are cmpi, dgx-a100, ",
        ),
    ];
    for (said, expected) in cases {
        assert!(said.starts_with(expected), "{said}\n  where expected: {expected}");
    }
}

fn rates(prices: &str, name: &str, accelerators: u32) -> Result<Rates, String> {
    let file = TempFile::new(prices);
    let path = file.0.to_str().unwrap();
    let platform = Platform::load(name).unwrap();
    let rack = platform.rack.values().next().unwrap();
    let rates = Prices::load(path).and_then(|prices| prices.rates(name, &platform, rack, accelerators));
    rates.map_err(|said| said.to_string().strip_prefix(path).unwrap().to_owned())
}

const OURS: &str = r#"
title = "ours"
[everywhere]
lifetime = { value = "4 years", source = "our accountant" }
electricity = { value = "0.12 USD/kWh", source = "our contract" }
carbon = { value = "350 gCO2/kWh", source = "our grid" }
[machine."GB200, one of two B200"]
accelerator = { price = { value = "40000 USD", source = "our order" }, power = { value = "1200 W", source = "data sheet" } }
host = { price = { value = "5000 USD", source = "our order" }, power = { value = "1 kW", source = "data sheet" } }
port = { price = { value = "1000 USD", source = "our order" }, power = { value = "10 W", source = "data sheet" } }
node = { power = { value = "800 W", source = "data sheet" } }
[machine.nvl72-ndr]
rent = { value = "3 USD/h", source = "our cloud" }
"#;

/// 1,000 accelerators, 500 hosts, 125 memory nodes of 8 ports: 2,000 endpoints and, in three levels, 10,000 ports of switches.
#[test]
fn rates_are_the_sum_of_what_a_machine_has() {
    let [money, power, carbon] = rates(OURS, "nvl72-cxl", 1000).unwrap().a_second.map(Option::unwrap);
    let watts = 1000.0 * 1200.0 + 500.0 * 1000.0 + 10_000.0 * 10.0 + 125.0 * 800.0;
    assert_eq!(power, watts);
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} for {b}");
    near(carbon, watts / 3.6e6 * 350.0);
    let bought = 1000.0 * 40_000.0 + 500.0 * 5000.0 + 10_000.0 * 1000.0;
    near(money, bought / (4.0 * 365.25 * 86_400.0) + watts / 3.6e6 * 0.12);
    // A rack needs no ports to other racks.
    assert_eq!(rates(OURS, "nvl72-ndr", 72).unwrap().a_second[1], Some(72.0 * 1200.0 + 36.0 * 1000.0));
}

#[test]
fn what_is_said_of_a_platform_comes_before_its_accelerator_and_rent_before_prices() {
    let rates = rates(OURS, "nvl72-ndr", 1000).unwrap();
    assert!((rates.a_second[0].unwrap() / (3000.0 / 3600.0) - 1.0).abs() < 1e-12);
    let rent = rates.inputs.iter().find(|input| input.source == "our cloud").unwrap();
    assert_eq!((rent.count, rent.value.as_str()), (Some(1000), "3 USD/h"));
    assert!(rates.inputs.iter().all(|input| input.what != "lifetime"), "{:?}", rates.inputs);
}

#[test]
fn prices_of_what_nobody_has_are_told() {
    let more = "[machine.nvl72-cxx]\nrent = { value = \"3 USD/h\", source = \"x\" }";
    let chip = OURS.replace("machine.nvl72-ndr", "machine.XPU");
    let file = TempFile::new(&format!("{chip}{more}"));
    let path = file.0.to_str().unwrap();
    let unknown = |platforms: &[(&str, Platform)]| {
        let said = Prices::load(path).unwrap().unknown(platforms).unwrap();
        said.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let said = |key: &str| {
        format!("{path}: machine.{key}: no platform and no accelerator of this name; it is passed over")
    };
    assert_eq!(unknown(&[]), [said("XPU"), said("nvl72-cxx")]);
    let mut ours = Platform::load("nvl72-ndr").unwrap();
    ours.rack.values_mut().for_each(|rack| rack.accelerator.name = "XPU".into());
    assert_eq!(unknown(&[("ours.toml", ours.clone())]), [said("nvl72-cxx")]);
    assert_eq!(unknown(&[("nvl72-cxx", ours)]), [""; 0]);
}

#[test]
fn bad_prices_get_one_line_with_the_key_and_what_was_expected() {
    let over = |text: &str| rates(&format!("extends = \"watts\"\n{text}"), "dgx-h100", 8).unwrap_err();
    for (message, expected) in [
        (
            over("[machine.dgx-h100]\nrent = { value = \"2.5 USD\", source = \"x\" }"),
            ": machine.dgx-h100.rent.value: expected a rent such as \"2.5 USD/h\", found \"2.5 USD\": its units are USD/h",
        ),
        (
            over("[machine.dgx-h100]\nrent = { value = \"2.5 USD/h\" }"),
            ": machine.dgx-h100.rent: missing field `source`",
        ),
        (
            over("[everywhere]\nwatts = 1"),
            ": everywhere.watts: unknown field `watts`, expected one of `rent`",
        ),
        (
            over("[everywhere]\ncarbon = { value = \"-1 gCO2/kWh\", source = \"x\" }"),
            ": everywhere.carbon.value: expected a carbon intensity such as",
        ),
        (
            over("[machine.dgx-h100.accelerator]\nprice = { value = \"1 USD\", source = \"x\" }"),
            ": everywhere.lifetime: dgx-h100 has prices to be spread over it; expected one such as \"4 years\"",
        ),
        (
            rates("title = \"none\"", "dgx-h100", 8).unwrap_err(),
            ": machine: expected \"dgx-h100\", or its accelerator \"H100-SXM5-80GB\", with rent, or",
        ),
    ] {
        assert!(message.starts_with(expected), "{message}\n  where expected: {expected}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn bad_memory_and_paths_of_servers_get_such_a_line() {
    let over = |base: &str, text: &str| refused(&format!("extends = \"{base}\"\n{text}"));
    let cases = [
        (
            over("memserver", "[server.memserver.tier.cxl]\nrate = 2400"),
            "server.memserver.tier.cxl.rate: invalid type: integer `2400`, expected a rate of a lane with its unit",
        ),
        (
            over("memserver", "[server.memserver.tier.cxl]\nchannels = 0"),
            "server.memserver.tier.cxl.channels: expected at least one",
        ),
        (
            over("memserver", "[server.memserver.tier.local.fitted]\nreads = 1.2"),
            "server.memserver.tier.local.fitted.reads: expected a part from 0 to 1, found 1.2",
        ),
        (
            over("memserver", "[server.memserver.tier.local.fitted]\nwrites = 0.5"),
            "server.memserver.tier.local.fitted.writes: unknown field `writes`, expected one of",
        ),
        (
            over("memserver", "[server.memserver.tier.cxl.port]\nlinks = 0"),
            "server.memserver.tier.cxl.port.links: expected at least one",
        ),
        (
            over("memserver", "[server.memserver.tier.cxl.port]\nreached = 0.0"),
            "server.memserver.tier.cxl.port.reached: expected a part from 0 to 1, found 0",
        ),
        (
            over("memserver", "[server.memserver.tier.cxl.port.link]\nlanes = 0"),
            "server.memserver.tier.cxl.port.link.lanes: expected at least one",
        ),
        (
            over("memserver", "[server.memserver.tier.cxl.port]\nhops = [\"9\"]"),
            "server.memserver.tier.cxl.port.hops[0]: expected a time such as \"500 ns\", found \"9\": its unit is missing",
        ),
        (over("memserver", "[server.memserver]\ncount = 0"), "server.memserver.count: expected at least one"),
        (
            over("cmpi", "[server.host.tier.pool]\nhosts = 5"),
            "server.host.tier.pool.hosts: expected 1 to 4, found 5",
        ),
        (
            over("cmpi", "[server.host.tier.local]\nhosts = 2"),
            "server.host.tier.local.port: expected how 2 hosts reach it",
        ),
        (
            over("cmpi", "[server.host.path.udp]\nover = \"wire\""),
            "server.host.path.udp.over: expected one of ethernet, smartnic, smartnic-roce, local, pool, found \"wire\"",
        ),
        (
            over("cmpi", "[server.host.path.near]\nover = \"local\"\nflushes = 1"),
            "server.host.path.near.flushes: expected a tier local with the key flushed",
        ),
        (
            over("cmpi", "[server.host.path.one-sided-pool]\ncopies = 0"),
            "server.host.path.one-sided-pool.copies: expected at least one",
        ),
        (
            over("cmpi", "[server.host.nic.ethernet]\nencoding = 2.0"),
            "server.host.nic.ethernet.encoding: expected a part from 0 to 1, found 2",
        ),
        (
            over("finetuning-a", "[rack.server.host.tier.cxl]\nchannels = 0"),
            "rack.server.host.tier.cxl.channels: expected at least one",
        ),
        (
            over("finetuning-a", "[rack.server.host.tier.cxl]\nhosts = 0"),
            "rack.server.host.tier.cxl.hosts: expected at least one",
        ),
        (
            over(
                "finetuning-a",
                "[rack.server.host.tier.pool]\ncapacity = \"1 GB\"\nchannels = 1\nrate = \"4800 MT/s\"\nlatency = \"1 us\"",
            ),
            "rack.server.host.tier.pool: expected another name: these are the host's own memory and the pool",
        ),
        (
            refused("title = \"x\"\nsource = \"x\""),
            "rack: expected at least one kind of rack, or a kind of server",
        ),
        (
            refused("title = \"x\"\nsource = \"x\"\n[server.a]\ncount = 1\ntier = {}"),
            "server.a.tier: expected at least one kind of memory",
        ),
    ];
    for (said, expected) in cases {
        assert!(said.starts_with(expected), "{said}\n  where expected: {expected}");
    }
}

#[test]
fn a_file_that_extends_itself_is_refused() {
    let file = TempFile::new("");
    std::fs::write(&file.0, format!("extends = {:?}", file.0)).unwrap();
    let said = Platform::load(file.0.to_str().unwrap()).unwrap_err().to_string();
    assert!(said.ends_with("extends this file itself"), "{said}");
}

#[test]
fn topologies_have_the_ports_and_hops_that_they_can_have() {
    let mut fabric = Platform::load("nvl72-ndr").unwrap().between.unwrap();
    assert_eq!((fabric.ports(), fabric.hops(), fabric.switch_ports(2)), (65_536, 5.0, 10));
    fabric.topology = Topology::Clos { levels: 2 };
    assert_eq!((fabric.ports(), fabric.hops()), (2_048, 3.0));
    fabric.topology = Topology::Torus { dimensions: [8, 8, 8], endpoints: 4 };
    assert_eq!((fabric.ports(), fabric.hops()), (2_048, 7.0));
    fabric.topology = Topology::Dragonfly { endpoints: 8, group: 16, global: 8 };
    assert_eq!(fabric.ports(), 129 * 16 * 8);
    assert_eq!(fabric.switch_ports(8), 8 + 15 + 8);
}

#[test]
fn links_between_switches_carry_what_their_number_says() {
    let mut fabric = Platform::load("nvl72-ndr").unwrap().between.unwrap();
    assert_eq!(fabric.carried(), [1.0; 2]);
    let mut torus = |dimensions, endpoints| {
        fabric.topology = Topology::Torus { dimensions, endpoints };
        fabric.carried()
    };
    // Two links an axis; the mean way is two switches along each.
    assert_eq!(torus([8, 8, 8], 4), [1.0, 2.0 / 2.0 / 4.0]);
    // The bisection of 16 x 16 x 16 is 512 links, which a quarter of what all send crosses each way.
    assert_eq!(torus([16, 16, 16], 32), [6.0 / 32.0, 512.0 / (16.0_f64.powi(3) * 32.0 / 4.0)]);
    assert_eq!(torus([4, 1, 1], 4), [2.0 / 4.0, 2.0 / 4.0]);
    assert_eq!(torus([1, 1, 1], 60), [1.0; 2]);
    let mut dragonfly = |endpoints, group, global| {
        fabric.topology = Topology::Dragonfly { endpoints, group, global };
        fabric.carried()
    };
    // As many endpoints as global links, and twice as many switches in a group: what goes to all is carried whole.
    assert_eq!(dragonfly(8, 16, 8), [7.5 / 8.0, 1.0]);
    // With two global links for forty endpoints there is a twentieth, and a little for what stays in its group.
    assert!((dragonfly(40, 20, 2)[1] - 2.0 / 40.0 * 41.0 / 40.0).abs() < 1e-12);
    assert_eq!(dragonfly(4, 1, 2), [1.0 / 4.0, 2.0 / 4.0 * 3.0 / 2.0]);
    assert_eq!(dragonfly(4, 1, 0), [1.0; 2]);
}

/// Switches on the way, and the part of all-to-all traffic that links carry, are those of the switches and links themselves.
#[test]
fn hops_and_what_links_carry_are_those_of_the_graph() {
    let mut fabric = Platform::load("nvl72-ndr").unwrap().between.unwrap();
    let torus = |dimensions, endpoints| (Topology::Torus { dimensions, endpoints }, 16);
    let dragonfly = |endpoints, group, global| (Topology::Dragonfly { endpoints, group, global }, 64);
    for (topology, ports) in [
        (Topology::SingleHop, 16),
        (Topology::Clos { levels: 1 }, 8),
        (Topology::Clos { levels: 2 }, 8),
        (Topology::Clos { levels: 3 }, 4),
        torus([4, 4, 4], 2),
        torus([5, 3, 2], 4),
        torus([6, 1, 1], 4),
        torus([1, 1, 1], 4),
        dragonfly(2, 4, 2),
        dragonfly(3, 6, 3),
        dragonfly(8, 4, 1),
        dragonfly(4, 1, 2),
    ] {
        (fabric.topology, fabric.switch.ports, fabric.links) = (topology, ports, 1);
        let graph = topology.graph(ports);
        let endpoints: u64 = graph.endpoints.iter().copied().map(u64::from).sum();
        assert_eq!(endpoints, fabric.ports(), "{topology:?}");
        let taken =
            graph.endpoints.iter().zip(&graph.links).map(|(ends, links)| *ends as usize + links.len());
        assert!(taken.max().unwrap() <= ports as usize, "{topology:?}");
        // The mean over all pairs, those of one switch too; of a Clos the farthest, of a dragonfly at most.
        let with_ends: Vec<_> = (0..graph.links.len()).filter(|it| graph.endpoints[*it] > 0).collect();
        let switches = |from: usize| {
            let distances = graph.distances(from);
            with_ends
                .iter()
                .map(move |to| f64::from(distances[*to].expect("all are joined")) + 1.0)
                .collect::<Vec<_>>()
        };
        let all: Vec<_> = with_ends.iter().flat_map(|from| switches(*from)).collect();
        let [mean, most] =
            [all.iter().sum::<f64>() / all.len() as f64, all.iter().copied().fold(0.0, f64::max)];
        match topology {
            Topology::SingleHop | Topology::Clos { .. } => assert_eq!(fabric.hops(), most, "{topology:?}"),
            Topology::Torus { .. } => {
                assert!((fabric.hops() / mean - 1.0).abs() < 1e-12, "{topology:?}: {mean}")
            }
            Topology::Dragonfly { group, .. } => {
                // Its routing takes the one link between two groups, with a local one before and behind it.
                let (_, longest) = of_dragonfly(&graph, group as usize);
                assert!(
                    longest == fabric.hops() || group == 1 && longest < fabric.hops(),
                    "{topology:?}: {longest}"
                );
            }
        }
        // The busiest link carries one part of what it is offered. Shortest ways of a dragonfly may take two links between groups
        // where its routing takes one, with local ones beside it.
        let busiest = match topology {
            Topology::Dragonfly { group, .. } => of_dragonfly(&graph, group as usize).0,
            _ => graph.loads_of_all_to_all().into_iter().flatten().fold(0.0, f64::max),
        };
        let carried = (1.0 / busiest).min(1.0);
        assert!((carried / fabric.carried()[1] - 1.0).abs() < 1e-9, "{topology:?}: {carried}");
    }
}

/// What the busiest link carries when every endpoint sends one in all to all, each by the one link between the two groups, and the
/// switches on the longest way.
fn of_dragonfly(graph: &Graph, group: usize) -> (f64, f64) {
    let count = graph.links.len();
    let all: f64 = graph.endpoints.iter().copied().map(f64::from).sum();
    let pairs = || (0..count).flat_map(|one| graph.links[one].iter().map(move |other| (one, *other)));
    let between: BTreeMap<_, _> = pairs()
        .filter(|(one, other)| one / group != other / group)
        .map(|(one, other)| ((one / group, other / group), (one, other)))
        .collect();
    let mut loads: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    let mut longest = 0;
    for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
        let rate = f64::from(graph.endpoints[from]) * f64::from(graph.endpoints[to]) / all;
        let way = match between.get(&(from / group, to / group)) {
            Some(&(out, back)) => vec![(from, out), (out, back), (back, to)],
            None => vec![(from, to)],
        };
        let way: Vec<_> = way.into_iter().filter(|(one, other)| one != other).collect();
        longest = way.len().max(longest);
        way.into_iter().for_each(|link| *loads.entry(link).or_default() += rate);
    }
    assert!(loads.keys().all(|(one, other)| graph.links[*one].contains(other)), "each is a link");
    (loads.into_values().fold(0.0, f64::max), (longest + 1) as f64)
}

/// 256-byte flits of 240, three lines in 13 slots: 128 GB/s less 13.5%.
#[test]
fn a_link_carries_its_rate_less_what_flits_and_headers_take() {
    let between = Platform::load("nvl72-cxl").unwrap().between.unwrap();
    assert_eq!(between.link.raw().to_string(), "128 GB/s");
    let expected = 128e9 * 240.0 / 256.0 * 192.0 / 208.0;
    assert!((between.link.payload().value() / expected - 1.0).abs() < 1e-12);
}

#[test]
fn a_coherent_fabric_of_a_rack_carries_loads_and_has_a_port_for_each_link() {
    let over = |text: &str| refused(&format!("extends = \"nvl72-cxl\"\n[rack.nvl72.coherent]\n{text}"));
    for (message, expected) in [
        (over("carries = [\"io\"]"), "rack.nvl72.coherent.carries: expected \"cache\", by which"),
        (
            over("switch = { ports = 36, latency = \"1 ns\" }"),
            "rack.nvl72.coherent.topology: 72 accelerators with 1 links need 72 ports, the topology has 36",
        ),
        (
            over("controllers = 120"),
            "rack.nvl72.coherent.controllers: invalid type: integer `120`, expected a time",
        ),
        (over("link = { lanes = 0 }"), "rack.nvl72.coherent.link.lanes: expected at least one"),
    ] {
        assert!(message.contains(expected), "{message}");
    }
    // Without it, and without controllers, a platform is what it was.
    let older = Platform::load("nvl72-ndr").unwrap();
    assert!(older.rack["nvl72"].coherent.is_none() && older.between.unwrap().controllers.is_none());
}

/// The paths of all values inside a value that are no lists or tables.
fn leaves(at: &[String], value: &toml::Value, paths: &mut Vec<Vec<String>>) {
    let mut go = |key: String, inner: &toml::Value| leaves(&[at, &[key]].concat(), inner, paths);
    match value {
        toml::Value::Table(table) => table.iter().for_each(|(key, inner)| go(key.clone(), inner)),
        toml::Value::Array(all) => {
            all.iter().enumerate().for_each(|(index, inner)| go(index.to_string(), inner))
        }
        _ => paths.push(at.to_vec()),
    }
}

fn leaf<'a>(value: &'a mut toml::Value, at: &[String]) -> &'a mut toml::Value {
    at.iter().fold(value, |value, key| match value {
        toml::Value::Array(all) => &mut all[key.parse::<usize>().unwrap()],
        table => &mut table[key.as_str()],
    })
}

/// What no number of a file can be: of each, and of what has a unit, with that.
fn no_numbers(value: &toml::Value) -> Vec<toml::Value> {
    match value {
        toml::Value::Integer(_) => {
            vec![(-1).into(), i64::MAX.into(), 1.5.into(), f64::NAN.into(), "1".into()]
        }
        toml::Value::Float(_) => {
            vec![(-1.0).into(), 1e300.into(), f64::INFINITY.into(), f64::NAN.into(), "1".into()]
        }
        toml::Value::String(text) => match text.split_once(' ') {
            Some((number, unit)) if number.parse::<f64>().is_ok() => {
                ["-1", "1e300", "inf", "nan", "x"].map(|it| format!("{it} {unit}").into()).into()
            }
            _ => vec![],
        },
        _ => vec![],
    }
}

/// Each value of a file in turn is made what it cannot be, and a megabyte of text.
fn expect_refusals(text: &str, load: impl Fn(&str) -> Result<(), String>) {
    let whole: toml::Value = toml::from_str::<toml::Table>(text).unwrap().into();
    let load = |changed: &toml::Value| {
        let file = TempFile::new(&toml::to_string(changed).unwrap());
        load(file.0.to_str().unwrap())
    };
    assert_eq!(load(&whole), Ok(()));
    let mut found = vec![];
    leaves(&[], &whole, &mut found);
    for at in found {
        let own = leaf(&mut whole.clone(), &at).clone();
        for value in no_numbers(&own) {
            let mut changed = whole.clone();
            *leaf(&mut changed, &at) = value.clone();
            let refusal = load(&changed).expect_err(&format!("{at:?} is taken as {value}"));
            // A part of the path, because what is wrong may be how two values go together.
            assert!(at.iter().any(|key| refusal.contains(key.as_str())), "{at:?} as {value}: {refusal}");
        }
        let mut changed = whole.clone();
        *leaf(&mut changed, &at) = "x".repeat(1 << 20).into();
        let refusal = load(&changed).err().unwrap_or_default();
        assert!(refusal.len() < 2000, "{at:?}: {} bytes: {}", refusal.len(), &refusal[..300]);
    }
}

#[test]
fn a_number_that_none_can_be_is_refused_at_its_key_and_no_error_quotes_a_megabyte() {
    let platform = |path: &str| Platform::load(path).map(drop).map_err(|error| error.to_string());
    expect_refusals(&std::fs::read_to_string(ANNOTATED).unwrap(), platform);
    let prices = |path: &str| Prices::load(path).map(drop).map_err(|error| error.to_string());
    for name in names(Folder::Prices) {
        expect_refusals(&polder_platform::text(Folder::Prices, name).unwrap(), prices);
    }
    let long = "x".repeat(1 << 20);
    for text in [
        format!("{long} = 1"),
        format!("[{long}]\n{long} = 2"),
        long.clone(),
        format!("extends = \"{long}\""),
    ] {
        let refusal = platform(TempFile::new(&text).0.to_str().unwrap()).unwrap_err();
        assert!(refusal.len() < 2000, "{} bytes: {}", refusal.len(), &refusal[..300]);
    }
}
