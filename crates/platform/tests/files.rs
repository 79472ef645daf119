//! What a platform's file may say, and the line with which anything else is refused.

use std::path::PathBuf;

use polder_platform::{Folder, Platform, Topology, names};

/// A file that is gone after the test.
struct Written(PathBuf);

impl Written {
    fn new(text: &str) -> Self {
        let name = format!("polder-platform-{}-{:?}.toml", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn refused(text: &str) -> String {
    let file = Written::new(text);
    let path = file.0.to_str().unwrap();
    let said = Platform::load(path).unwrap_err().to_string();
    assert_eq!(said.lines().count(), 1, "{said}");
    said.strip_prefix(path).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&said).to_owned()
}

#[test]
fn what_polder_brings_along_loads() {
    let platforms = names(Folder::Platforms);
    assert!(platforms.len() >= 9, "{platforms:?}");
    for name in platforms {
        let platform = Platform::load(name).unwrap();
        assert!(!platform.title.is_empty() && !platform.source.is_empty(), "{name}");
    }
}

#[test]
fn a_file_lies_over_the_one_that_it_extends() {
    let file = Written::new("extends = \"nvl72-ndr\"\n[between]\nlinks = 2\n");
    let (ours, base) =
        (Platform::load(file.0.to_str().unwrap()).unwrap(), Platform::load("nvl72-ndr").unwrap());
    let payload = |platform: &Platform| platform.between.as_ref().unwrap().payload().value();
    assert_eq!(payload(&ours), 2.0 * payload(&base));
    assert_eq!(ours.rack, base.rack);
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
        (over("[between.link]\nencoding = 0"), "between.link.encoding: "),
        (refused("extends = \"nowhere\""), "nowhere: no platform of this name; there are dgx-a100, "),
        (refused("title = "), "line 1: "),
        (refused("title = \"x\""), "missing field `source`"),
    ];
    for (said, expected) in cases {
        assert!(said.starts_with(expected), "{said}\n  where expected: {expected}");
    }
}

#[test]
fn a_file_that_extends_itself_is_refused() {
    let file = Written::new("");
    std::fs::write(&file.0, format!("extends = {:?}", file.0)).unwrap();
    let said = Platform::load(file.0.to_str().unwrap()).unwrap_err().to_string();
    assert!(said.ends_with("extends this file itself"), "{said}");
}

#[test]
fn topologies_have_the_ports_and_hops_that_they_can_have() {
    let mut fabric = Platform::load("nvl72-ndr").unwrap().between.unwrap();
    assert_eq!((fabric.ports(), fabric.hops()), (65_536, 5.0));
    fabric.topology = Topology::Clos { levels: 2 };
    assert_eq!((fabric.ports(), fabric.hops()), (2_048, 3.0));
    fabric.topology = Topology::Torus { dimensions: [8, 8, 8], endpoints: 4 };
    assert_eq!((fabric.ports(), fabric.hops()), (2_048, 7.0));
    fabric.topology = Topology::Dragonfly { endpoints: 8, group: 16, global: 8 };
    assert_eq!(fabric.ports(), 129 * 16 * 8);
}

/// 256-byte flits of 240, three lines in 13 slots: 128 GB/s less 13.5%.
#[test]
fn a_link_carries_its_rate_less_what_flits_and_headers_take() {
    let between = Platform::load("nvl72-cxl").unwrap().between.unwrap();
    assert_eq!(between.link.raw().to_string(), "128 GB/s");
    let expected = 128e9 * 240.0 / 256.0 * 192.0 / 208.0;
    assert!((between.link.payload().value() / expected - 1.0).abs() < 1e-12);
}
