//! Clusters that SimGrid's platform files describe (simgrid.org, XML of version 4): hosts, and the fabric that joins them.

use std::ops::RangeInclusive;

use roxmltree::{Document, Node, ParsingOptions};

use crate::{
    Bytes, DataError, Fabric, Link, Packet, Reduction, Software, Switch, Time, Topology, TransferRate,
    quoted, text_of,
};

/// A cluster of SimGrid.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Its id.
    pub name: String,
    /// How many hosts it has.
    pub hosts: u32,
    /// What joins them: each has one link.
    pub fabric: Fabric,
}

/// Hosts at most.
const MOST_HOSTS: u32 = 1 << 20;
/// Ports of a switch at most.
const MOST_PORTS: u32 = 1 << 16;

/// Attributes of a cluster that change nothing of messages between two hosts.
const IDLE: [&str; 7] = ["prefix", "suffix", "speed", "core", "router_id", "loopback_bw", "loopback_lat"];
const READ: [&str; 7] = ["id", "radical", "bw", "lat", "topology", "topo_parameters", "sharing_policy"];

impl Cluster {
    /// Whether a file of this name is read as a platform of SimGrid.
    #[must_use]
    pub fn is_named(file: &str) -> bool {
        file.ends_with(".xml")
    }

    /// Reads the only cluster of a platform.
    ///
    /// # Errors
    /// When it cannot be read, is no platform of SimGrid, or has what Polder's fabrics do not: the element, its line, and what was expected.
    pub fn load(file: &str) -> Result<Self, DataError> {
        Self::read(file, &text_of(file)?)
    }

    fn read(file: &str, text: &str) -> Result<Self, DataError> {
        // The files name a DTD.
        let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
        let document = Document::parse_with_options(text, options).map_err(|error| {
            let problem = format!("expected a platform of SimGrid as XML: {error}");
            DataError::new(file, &format!("line {}", error.pos().row), problem)
        })?;
        let element = |node| Element { file, node };
        let root = element(document.root_element());
        if !root.node.has_tag_name("platform") {
            return Err(root.wrong("expected <platform>"));
        }
        if !root.get("version").is_some_and(|it| it == "4" || it.starts_with("4.")) {
            return Err(root.wrong("expected version 4 or 4.1"));
        }
        let mut inside = root.only_child()?;
        while inside.node.has_tag_name("zone") || inside.node.has_tag_name("AS") {
            inside = inside.only_child()?;
        }
        inside.cluster()
    }
}

/// An element of a file.
#[derive(Clone, Copy)]
struct Element<'a> {
    file: &'a str,
    node: Node<'a, 'a>,
}

impl<'a> Element<'a> {
    fn wrong(&self, problem: &str) -> DataError {
        let line = self.node.document().text_pos_at(self.node.range().start).row;
        DataError::new(self.file, &format!("line {line}: <{}>", self.node.tag_name().name()), problem)
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        self.node.attribute(name)
    }

    fn need(&self, name: &str) -> Result<&'a str, DataError> {
        self.get(name).ok_or_else(|| self.wrong(&format!("expected an attribute {name}, found none")))
    }

    /// The only element inside, but for properties.
    fn only_child(&self) -> Result<Self, DataError> {
        let inside = self.node.children().filter(|it| it.is_element() && !it.has_tag_name("prop"));
        let inside: Vec<_> = inside.map(|node| Self { file: self.file, node }).collect();
        match &inside[..] {
            [] => Err(self.wrong("expected one <cluster> inside, found nothing")),
            [one] => Ok(*one),
            [_, other, ..] => Err(other
                .wrong("expected one <cluster> and nothing beside it: polder plan fabric takes one fabric")),
        }
    }

    fn cluster(&self) -> Result<Cluster, DataError> {
        if !self.node.has_tag_name("cluster") {
            return Err(self.wrong(
                "expected <cluster>: routes of single hosts and links have no counterpart; describe the fabric in TOML, see docs/platform.toml",
            ));
        }
        for attribute in self.node.attributes() {
            let name = attribute.name();
            if !IDLE.contains(&name) && !READ.contains(&name) {
                let why = match name {
                    "bb_bw" | "bb_lat" | "bb_sharing_policy" => {
                        "a backbone that all hosts share has no counterpart"
                    }
                    "limiter_link" => "a limit on both directions of a host has no counterpart",
                    _ => "SimGrid's attribute is unknown here",
                };
                return Err(self.wrong(&format!("{name}: {why}; expected {}", READ.join(", "))));
            }
        }
        match self.get("sharing_policy") {
            None | Some("SPLITDUPLEX") => {}
            Some(other) => {
                return Err(self.wrong(&format!(
                    "sharing_policy: expected SPLITDUPLEX, each direction of a link on its own, found {other}"
                )));
            }
        }
        let hosts = self.hosts()?;
        let (topology, ports) = self.topology(hosts)?;
        let rate = 8.0 * self.quantity("bw", "125MBps", &BANDWIDTH)?;
        let latency = self.quantity("lat", "50us", &LATENCY)?;
        // SimGrid sends streams: flits of a byte.
        let byte = Packet { bytes: Bytes::new(1.0), payload: Bytes::new(1.0) };
        let nothing = Time::new(0.0);
        let fabric = Fabric {
            links: 1,
            link: Link {
                rate: TransferRate::new(rate),
                lanes: 1,
                encoding: 1.0,
                flit: byte,
                packet: byte,
                propagation: Time::new(latency),
            },
            switch: Switch { ports, latency: nothing, reduction: Reduction::None },
            topology,
            software: Software { message: nothing, step: nothing, call: nothing, processors: 0.0 },
            carries: vec![],
            pbr: None,
            controllers: None,
        };
        fabric.check().map_err(|(key, problem)| self.wrong(&format!("{key}: {problem}")))?;
        let name = self.need("id")?.to_owned();
        Ok(Cluster { name, hosts, fabric })
    }

    /// How many hosts a radical names: numbers and ranges with commas.
    fn hosts(&self) -> Result<u32, DataError> {
        let radical = self.need("radical")?;
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (first <= last).then(|| u64::from(last - first) + 1)
        };
        let count = radical.split(',').map(range).sum::<Option<u64>>();
        let count = count.and_then(|it| u32::try_from(it).ok()).filter(|it| *it <= MOST_HOSTS);
        count.ok_or_else(|| {
            self.wrong(&format!(
                "radical: expected numbers of hosts such as 0-255, {MOST_HOSTS} at most, found \"{}\"",
                quoted(radical)
            ))
        })
    }

    /// How switches are joined, and their ports.
    fn topology(&self, hosts: u32) -> Result<(Topology, u32), DataError> {
        match self.get("topology") {
            None | Some("FLAT") => Ok((Topology::SingleHop, hosts)),
            Some("FAT_TREE") => self.fat_tree(hosts),
            Some("TORUS") => Err(self.wrong(
                "topology: expected FLAT or FAT_TREE, found TORUS: SimGrid's hosts pass on messages of others, which has no counterpart",
            )),
            Some("DRAGONFLY") => Err(self.wrong(
                "topology: expected FLAT or FAT_TREE, found DRAGONFLY: SimGrid joins chassis inside a group, which has no counterpart",
            )),
            Some(other) => Err(self.wrong(&format!("topology: expected FLAT or FAT_TREE, found {}", quoted(other)))),
        }
    }

    /// A fat tree that is a folded Clos: switches have as many links up as down, but those of the last level.
    fn fat_tree(&self, hosts: u32) -> Result<(Topology, u32), DataError> {
        let given = self.need("topo_parameters")?;
        let wrong =
            |problem: &str| self.wrong(&format!("topo_parameters: {problem}, found \"{}\"", quoted(given)));
        let numbers = |part: &str, range: RangeInclusive<u32>| {
            part.split(',')
                .map(|text| text.trim().parse().ok().filter(|number| range.contains(number)))
                .collect::<Option<Vec<u32>>>()
        };
        let parts: Vec<_> = given.split(';').collect();
        let [levels, down, up, parallel] = parts[..] else {
            return Err(wrong("expected LEVELS;DOWN;UP;PARALLEL such as 2;16,32;1,16;1,1"));
        };
        let levels = numbers(levels, 1..=4).filter(|list| list.len() == 1).map(|list| list[0] as usize);
        let [down, up, parallel] = [down, up, parallel].map(|part| numbers(part, 1..=MOST_PORTS));
        let (Some(levels), Some(down), Some(up), Some(parallel)) = (levels, down, up, parallel) else {
            return Err(wrong("expected 1 to 4 levels, and numbers above 0 of each"));
        };
        if [&down, &up, &parallel].iter().any(|list| list.len() != levels) {
            return Err(wrong(&format!("expected {levels} numbers down, up and in parallel")));
        }
        let all: u64 = down.iter().map(|count| u64::from(*count)).product();
        if all != u64::from(hosts) {
            return Err(wrong(&format!(
                "expected switches for the {hosts} hosts of radical, which {all} are not"
            )));
        }
        if parallel.iter().any(|links| *links != 1) {
            return Err(wrong("expected one link in parallel: several as one have no counterpart"));
        }
        let (last, lower) = down.split_last().expect("one level or more");
        if up[0] != 1 {
            return Err(wrong("expected one link of each host"));
        }
        if levels == 1 {
            return Ok((Topology::SingleHop, hosts));
        }
        let each = lower[0];
        if lower.iter().any(|links| *links != each)
            || up[1..].iter().any(|links| *links != each)
            || *last > 2 * each
        {
            return Err(wrong(&format!(
                "expected {each} links down and up of every switch, and at most {} of the last level: a fat tree of less than full bisection has no counterpart",
                2 * each
            )));
        }
        Ok((Topology::Clos { levels: levels as u32 }, 2 * each))
    }

    /// A number above 0 with one of some units, the first when there is none.
    fn quantity(&self, name: &str, example: &str, units: &[(&str, f64)]) -> Result<f64, DataError> {
        let text = self.need(name)?.trim();
        let end = text
            .char_indices()
            .find(|(at, character)| {
                // The e of 1e9 is no unit.
                let is_exponent = matches!(character, 'e' | 'E')
                    && text[at + 1..].starts_with(|next: char| next.is_ascii_digit() || next == '-');
                !(character.is_ascii_digit() || matches!(character, '.' | '+' | '-') || is_exponent)
            })
            .map_or(text.len(), |(at, _)| at);
        let (number, unit) = text.split_at(end);
        let scale = match unit.trim() {
            "" => units.first().map(|(_, scale)| *scale),
            unit => units.iter().find(|(known, _)| *known == unit).map(|(_, scale)| *scale),
        };
        let value = number.parse::<f64>().ok().zip(scale).map(|(number, scale)| number * scale);
        value.filter(|number| *number > 0.0 && number.is_finite()).ok_or_else(|| {
            self.wrong(&format!(
                "{name}: expected a quantity above 0 such as {example}, found \"{}\"",
                quoted(text)
            ))
        })
    }
}

/// In bytes a second.
const BANDWIDTH: [(&str, f64); 18] = [
    ("Bps", 1.0),
    ("kBps", 1e3),
    ("MBps", 1e6),
    ("GBps", 1e9),
    ("TBps", 1e12),
    ("KiBps", 1024.0),
    ("MiBps", 1048576.0),
    ("GiBps", 1073741824.0),
    ("TiBps", 1099511627776.0),
    ("bps", 0.125),
    ("kbps", 125.0),
    ("Mbps", 125e3),
    ("Gbps", 125e6),
    ("Tbps", 125e9),
    ("Kibps", 128.0),
    ("Mibps", 131072.0),
    ("Gibps", 134217728.0),
    ("Tibps", 137438953472.0),
];

/// In seconds.
const LATENCY: [(&str, f64); 5] = [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ps", 1e-12)];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bandwidth;

    fn platform(cluster: &str) -> String {
        format!(
            "<?xml version='1.0'?>\n<!DOCTYPE platform SYSTEM \"https://simgrid.org/simgrid.dtd\">\n<platform version=\"4.1\">\n  <zone id=\"world\" routing=\"Full\">\n    {cluster}\n  </zone>\n</platform>\n"
        )
    }

    fn read(cluster: &str) -> Result<Cluster, DataError> {
        Cluster::read("c.xml", &platform(cluster))
    }

    const GIVEN: &str = "id=\"c\" prefix=\"n-\" suffix=\"\" speed=\"1Gf\" bw=\"125MBps\" lat=\"50us\"";

    #[test]
    fn a_flat_cluster_is_one_switch() {
        let cluster = read(&format!("<cluster {GIVEN} radical=\"0-9,12,20-24\"/>")).unwrap();
        assert_eq!((cluster.name.as_str(), cluster.hosts), ("c", 16));
        assert_eq!(cluster.fabric.topology, Topology::SingleHop);
        assert_eq!(cluster.fabric.payload(), Bandwidth::new(125e6));
        // Up and down.
        assert!((cluster.fabric.latency().value() / 100e-6 - 1.0).abs() < 1e-3);
        let fast = GIVEN.replace("125MBps", "1e1Gbps").replace("50us", "1.5e-6");
        let cluster = read(&format!("<cluster {fast} radical=\"0-1\"/>")).unwrap();
        assert_eq!(cluster.fabric.payload(), Bandwidth::new(1.25e9));
        assert_eq!(cluster.fabric.link.propagation, Time::new(1.5e-6));
    }

    #[test]
    fn a_fat_tree_of_full_bisection_is_a_clos() {
        let tree = |radical: &str, parameters: &str| {
            read(&format!(
                "<cluster {GIVEN} radical=\"{radical}\" topology=\"FAT_TREE\" topo_parameters=\"{parameters}\"/>"
            ))
        };
        let found = tree("0-511", "2;16,32;1,16;1,1").unwrap();
        assert_eq!(found.fabric.topology, Topology::Clos { levels: 2 });
        assert_eq!((found.fabric.switch.ports, found.fabric.ports()), (32, 512));
        assert_eq!(tree("0-23", "1;24;1;1").unwrap().fabric.topology, Topology::SingleHop);
        for (radical, parameters, expected) in [
            ("0-511", "2;16,32;1,8;1,1", "expected 16 links down and up of every switch"),
            ("0-1055", "2;16,66;1,16;1,1", "at most 32 of the last level"),
            (
                "0-510",
                "2;16,32;1,16;1,1",
                "expected switches for the 511 hosts of radical, which 512 are not",
            ),
            ("0-511", "2;16,32;1,16;1,2", "expected one link in parallel"),
            ("0-511", "2;16,32;2,16;1,1", "expected one link of each host"),
            ("0-511", "2;16,32;1,16", "expected LEVELS;DOWN;UP;PARALLEL"),
            ("0-511", "2;16;1,16;1,1", "expected 2 numbers down, up and in parallel"),
            ("0-511", "9;16,x;1,16;1,1", "expected 1 to 4 levels"),
        ] {
            let refusal = tree(radical, parameters).unwrap_err().to_string();
            assert!(refusal.starts_with("c.xml: line 5: <cluster>: topo_parameters: "), "{refusal}");
            assert!(refusal.contains(expected), "{refusal}");
        }
    }

    #[test]
    fn what_does_not_map_is_named_with_its_line() {
        for (cluster, expected) in [
            ("<host id=\"a\" speed=\"1Gf\"/>", "line 5: <host>: expected <cluster>"),
            ("", "line 4: <zone>: expected one <cluster> inside, found nothing"),
            (
                "<cluster id=\"a\"/>\n<link id=\"b\"/>",
                "line 6: <link>: expected one <cluster> and nothing beside it",
            ),
            (
                "<cluster bb_bw=\"1GBps\"/>",
                "line 5: <cluster>: bb_bw: a backbone that all hosts share has no counterpart",
            ),
            ("<cluster sharing_policy=\"FATPIPE\"/>", "sharing_policy: expected SPLITDUPLEX"),
            ("<cluster id=\"a\"/>", "line 5: <cluster>: expected an attribute radical, found none"),
            ("<cluster radical=\"9-0\"/>", "radical: expected numbers of hosts such as 0-255"),
            ("<cluster radical=\"0-4294967295\"/>", "1048576 at most, found \"0-4294967295\""),
            ("<cluster radical=\"0-3\" topology=\"TORUS\"/>", "found TORUS: SimGrid's hosts pass on"),
            ("<cluster radical=\"0-3\" topology=\"DRAGONFLY\"/>", "found DRAGONFLY"),
            ("<cluster radical=\"0-3\" topology=\"STAR\"/>", "expected FLAT or FAT_TREE, found STAR"),
            (
                "<cluster radical=\"0-3\" bw=\"fast\"/>",
                "bw: expected a quantity above 0 such as 125MBps, found \"fast\"",
            ),
            (
                "<cluster radical=\"0-3\" bw=\"1GBps\" lat=\"0\"/>",
                "lat: expected a quantity above 0 such as 50us",
            ),
            ("<cluster radical=\"0-3\" bw=\"8bps\" lat=\"1us\"/>", "link.rate: expected 1 MT/s or more"),
        ] {
            let refusal = read(cluster).unwrap_err().to_string();
            assert!(refusal.contains(expected), "{refusal}\n{expected}");
        }
        for (text, expected) in [
            ("<platform version=\"4.1\">\n</zone>", "c.xml: line 2: expected a platform of SimGrid as XML: "),
            ("<html/>", "c.xml: line 1: <html>: expected <platform>"),
            ("<platform version=\"3\"/>", "c.xml: line 1: <platform>: expected version 4 or 4.1"),
        ] {
            let refusal = Cluster::read("c.xml", text).unwrap_err().to_string();
            assert!(refusal.starts_with(expected), "{refusal}\n{expected}");
        }
    }
}
