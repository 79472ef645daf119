//! Links, switches and what is built of them.

use serde::{Deserialize, Serialize};

use crate::{Bandwidth, Bytes, Graph, Time, TransferRate};

/// A link between two ports, one direction of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bits a second of a lane, on the wire.
    pub rate: TransferRate,
    /// Lanes in a direction.
    pub lanes: u32,
    /// The part of the bits that the line code leaves: 1 for PAM4 flits, 0.985 for 128b/130b.
    pub encoding: f64,
    /// What goes over the wire at once.
    pub flit: Packet,
    /// A transaction's packet in the flits' payload.
    pub packet: Packet,
    /// From one end to the other.
    pub propagation: Time,
}

/// Bytes of which some carry what the program sends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packet {
    /// All of it.
    pub bytes: Bytes,
    /// What it carries.
    pub payload: Bytes,
}

impl Packet {
    /// The part that is payload.
    #[must_use]
    pub fn efficiency(&self) -> f64 {
        self.payload.value() / self.bytes.value()
    }
}

impl Link {
    /// Bits a second of a lane, at least.
    const SLOWEST: f64 = 1e6;

    /// What the wire carries, framing included.
    #[must_use]
    pub fn raw(&self) -> Bandwidth {
        Bandwidth::new(self.rate.value() * f64::from(self.lanes) / 8.0 * self.encoding)
    }

    /// What a program can send at most: the rate less line code, flit framing and packet headers.
    #[must_use]
    pub fn payload(&self) -> Bandwidth {
        Bandwidth::new(self.raw().value() * self.flit.efficiency() * self.packet.efficiency())
    }

    /// What lines come to, both directions together, when this part of them is read and the others are written. What is read takes a
    /// packet's header one way and a packet the other; what is written the reverse. The busier direction sets the pace.
    #[must_use]
    pub fn lines(&self, reads: f64) -> Bandwidth {
        let Packet { bytes, payload } = self.packet;
        let header = (bytes.value() - payload.value()) / payload.value();
        let busier = reads.max(1.0 - reads);
        let taken = busier * bytes.value() / payload.value() + (1.0 - busier) * header;
        Bandwidth::new(self.raw().value() * self.flit.efficiency() / taken)
    }

    /// Whether its own numbers can be built: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.rate.value() < Self::SLOWEST {
            return Err(("rate", format!("expected 1 MT/s or more, found {}", self.rate)));
        }
        if self.lanes == 0 {
            return Err(("lanes", "expected at least one".into()));
        }
        if !(self.encoding > 0.0 && self.encoding <= 1.0) {
            return Err(("encoding", format!("expected a part from 0 to 1, found {}", self.encoding)));
        }
        for (key, packet) in [("flit", &self.flit), ("packet", &self.packet)] {
            if packet.payload > packet.bytes {
                let Packet { bytes, payload } = packet;
                return Err((key, format!("expected at most {bytes} of payload, found {payload}")));
            }
        }
        Ok(())
    }
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// Ports of the width of the fabric's link.
    pub ports: u32,
    /// From the first bit in to the first bit out.
    pub latency: Time,
    /// Whether it adds up what passes through it.
    #[serde(default)]
    pub reduction: Reduction,
}

/// What adds in an all-reduce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reduction {
    /// The accelerators.
    #[default]
    None,
    /// The switch, as NVLink SHARP does.
    InSwitch,
}

/// What software adds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// To a message.
    pub message: Time,
    /// To each step of a collective.
    pub step: Time,
    /// To a message or a collective as a whole, however many steps it has.
    #[serde(default = "nothing")]
    pub call: Time,
    /// The part of an accelerator's processors that a collective's kernel takes while it runs.
    #[serde(default)]
    pub processors: f64,
}

/// How switches are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Topology {
    /// Every port meets every other in one switch (several in parallel).
    SingleHop,
    /// A folded Clos of full bisection.
    Clos {
        /// Levels of switches.
        levels: u32,
    },
    /// A 3D torus of switches.
    Torus {
        /// Switches along each axis.
        dimensions: [u32; 3],
        /// Ports of each switch for endpoints.
        endpoints: u32,
    },
    /// Groups of switches, each group joined to each other.
    Dragonfly {
        /// Ports of each switch for endpoints.
        endpoints: u32,
        /// Switches in a group.
        group: u32,
        /// Ports of each switch to other groups.
        global: u32,
    },
}

/// What of CXL a path carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// CXL.cache: coherent access by devices.
    Cache,
    /// CXL.mem: loads and stores by hosts.
    Mem,
    /// CXL.io: bulk transfers, as PCIe.
    Io,
}

impl Protocol {
    /// As files have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Mem => "mem",
            Self::Io => "io",
        }
    }
}

/// How a CXL fabric spends its port ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pbr {
    /// Ids of one domain, [`Pbr::MOST`] at most.
    pub ids: u32,
    /// Domains that are joined.
    #[serde(default = "one")]
    pub domains: u32,
    /// Whether a rack has one id, of a bridge behind which its ports have addresses of their own.
    #[serde(default)]
    pub rack_bridges: bool,
}

const fn nothing() -> Time {
    Time::new(0.0)
}

const fn one() -> u32 {
    1
}

/// A fabric, as one accelerator sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// Links of each accelerator into it.
    pub links: u32,
    /// One of them.
    pub link: Link,
    /// What joins them.
    pub switch: Switch,
    /// How.
    pub topology: Topology,
    /// What software adds.
    pub software: Software,
    /// What of CXL it carries; empty when it is no CXL. A pool needs `mem` between racks. Memory of others is loaded where it
    /// carries `cache`, and copied by software where it does not; a training step takes the same either way.
    #[serde(default)]
    pub carries: Vec<Protocol>,
    /// Its port ids, when it is CXL.
    pub pbr: Option<Pbr>,
    /// What controllers and physical layers at both ends add to a load of another's memory, there and back.
    pub controllers: Option<Time>,
}

impl Pbr {
    /// Ids of a domain at most: they have 12 bits.
    pub const MOST: u32 = 1 << 12;

    fn check(&self) -> Result<(), (&'static str, String)> {
        let (ids, most) = (self.ids, Self::MOST);
        if ids == 0 || ids > most {
            return Err(("pbr.ids", format!("expected 1 to {most}, which 12 bits are, found {ids}")));
        }
        match self.domains {
            0 => Err(("pbr.domains", "expected at least one".into())),
            _ => Ok(()),
        }
    }
}

/// Switches along an axis of a torus, at most.
const MOST_OF_AXIS: u32 = 1 << 16;

/// Between two of so many switches around a ring, the shorter way: about a quarter of them.
fn mean_distance(switches: u32) -> f64 {
    (f64::from(switches).powi(2) / 4.0).floor() / f64::from(switches)
}

impl Fabric {
    /// What an accelerator can send into it, in one direction.
    #[must_use]
    pub fn payload(&self) -> Bandwidth {
        Bandwidth::new(self.link.payload().value() * f64::from(self.links))
    }

    /// Switches between two ports that are far apart; in a torus and a dragonfly on average over all pairs.
    #[must_use]
    pub fn hops(&self) -> f64 {
        match self.topology {
            Topology::SingleHop => 1.0,
            Topology::Clos { levels } => f64::from(2 * levels - 1),
            Topology::Torus { dimensions, .. } => 1.0 + dimensions.map(mean_distance).iter().sum::<f64>(),
            // Local, global, local: four switches, fewer where the global port is on the way.
            Topology::Dragonfly { .. } => 4.0,
        }
    }

    /// The part of what all endpoints send at once that the links between switches carry: to neighbours, as rings and stages
    /// send, and to all others alike. The load of the busiest links by shortest paths (Dally and Towles, 2004, chapter 3); to
    /// neighbours over all axes of a torus, and in a dragonfly by way of another switch, which takes two links for one (Kim
    /// et al., 2008).
    #[must_use]
    pub fn carried(&self) -> [f64; 2] {
        match self.topology {
            Topology::SingleHop | Topology::Clos { .. } => [1.0; 2],
            Topology::Torus { dimensions, endpoints } => {
                let axes = || dimensions.iter().filter(|n| **n > 1);
                let to_all = axes().map(|n| 2.0 / mean_distance(*n)).fold(f64::INFINITY, f64::min);
                let links = if axes().count() == 0 { f64::INFINITY } else { 2.0 * axes().count() as f64 };
                [links, to_all].map(|links| (links / f64::from(endpoints)).min(1.0))
            }
            Topology::Dragonfly { endpoints, group, global } => {
                let [group, global] = [group, global].map(f64::from);
                // Of what goes to all, so much leaves its group.
                let leaves = group * global / (group * global + 1.0);
                let outside = if global > 0.0 { global / leaves } else { f64::INFINITY };
                let (inside, near) = match group > 1.0 {
                    true => (group / (1.0 + leaves), (group - 1.0) / 2.0),
                    false => (f64::INFINITY, if global > 0.0 { global / 2.0 } else { f64::INFINITY }),
                };
                [near, outside.min(inside)].map(|links| (links / f64::from(endpoints)).min(1.0))
            }
        }
    }

    /// Endpoint ports that it can have.
    #[must_use]
    pub fn ports(&self) -> u64 {
        let radix = u64::from(self.switch.ports);
        match self.topology {
            // Links of one accelerator go to as many switches in parallel.
            Topology::SingleHop => radix * u64::from(self.links),
            Topology::Clos { levels } => 2 * (radix / 2).saturating_pow(levels),
            Topology::Torus { dimensions, endpoints } => {
                dimensions.iter().fold(u64::from(endpoints), |ports, n| ports.saturating_mul(u64::from(*n)))
            }
            Topology::Dragonfly { endpoints, group, global } => {
                let groups = u64::from(group) * u64::from(global) + 1;
                groups.saturating_mul(u64::from(group)).saturating_mul(u64::from(endpoints))
            }
        }
    }

    /// Ports of switches that so many endpoint ports take, those between switches counted.
    #[must_use]
    pub fn switch_ports(&self, endpoints: u64) -> u64 {
        let (each, of) = match self.topology {
            Topology::SingleHop => (1, 1),
            // One up and one down at each level but the last.
            Topology::Clos { levels } => (2 * levels - 1, 1),
            Topology::Torus { endpoints, .. } => (endpoints + 6, endpoints),
            Topology::Dragonfly { endpoints, group, global } => (endpoints + group - 1 + global, endpoints),
        };
        (endpoints * u64::from(each)).div_ceil(u64::from(of.max(1)))
    }

    /// The time of an empty message: what software adds, the switches, the wires between, and a flit at each.
    #[must_use]
    pub fn latency(&self) -> Time {
        self.latency_over(self.hops())
    }

    /// The same by way of so many switches.
    #[must_use]
    pub fn latency_over(&self, hops: f64) -> Time {
        let flit = self.link.flit.bytes.value() / self.link.raw().value();
        let wires = (hops + 1.0) * self.link.propagation.value();
        let switches = hops * (self.switch.latency.value() + flit);
        Time::new(self.software.message.value() + wires + flit + switches)
    }

    /// Whether its own numbers can be built: what is wrong otherwise, with the key.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        self.link.check().map_err(|(key, problem)| (format!("link.{key}"), problem))?;
        let taken = self.software.processors;
        let own = match self.links {
            0 => Err(("links", "expected at least one".into())),
            _ if !(0.0..1.0).contains(&taken) => {
                Err(("software.processors", format!("expected a part from 0 to below 1, found {taken}")))
            }
            _ => Ok(()),
        };
        let checked = own.and_then(|()| self.pbr.as_ref().map_or(Ok(()), Pbr::check));
        let checked = checked.and_then(|()| self.topology.check(self.switch.ports));
        checked.map_err(|(key, problem)| (key.to_owned(), problem))
    }
}

impl Topology {
    /// The switches and the links between them, where switches have so many ports; each link stands once for each of its two
    /// directions. The levels of a Clos have their most switches.
    ///
    /// # Panics
    /// When switches of so many ports cannot be joined so, which a platform's file is refused for.
    #[must_use]
    pub fn graph(self, ports: u32) -> Graph {
        assert!(self.check(ports).is_ok(), "a topology that was checked");
        match self {
            Self::SingleHop => Graph { endpoints: vec![ports], links: vec![vec![]] },
            Self::Clos { levels } => Graph::clos(levels, ports as usize),
            Self::Torus { dimensions, endpoints } => {
                Graph::torus(dimensions.map(|it| it as usize), endpoints)
            }
            Self::Dragonfly { endpoints, group, global } => {
                Graph::dragonfly(endpoints, group as usize, global as usize)
            }
        }
    }

    /// Whether switches of so many ports can be joined so: what is wrong otherwise, with the key.
    fn check(self, ports: u32) -> Result<(), (&'static str, String)> {
        match self {
            Topology::Clos { levels } if levels == 0 || levels > 4 || ports < 2 => Err((
                "topology",
                format!("expected 1 to 4 levels of switches of 2 ports or more, found {levels} of {ports}"),
            )),
            Topology::Torus { endpoints: 0, .. } | Topology::Dragonfly { endpoints: 0, .. } => {
                Err(("topology.endpoints", "expected at least one".into()))
            }
            Topology::Dragonfly { group: 0, .. } => Err(("topology.group", "expected at least one".into())),
            Topology::Torus { dimensions, .. }
                if dimensions.iter().any(|n| !(1..=MOST_OF_AXIS).contains(n)) =>
            {
                let problem =
                    format!("expected 1 to {MOST_OF_AXIS} switches along each axis, found {dimensions:?}");
                Err(("topology.dimensions", problem))
            }
            Topology::Torus { endpoints, .. } if u64::from(endpoints) + 6 > u64::from(ports) => Err((
                "topology.endpoints",
                format!(
                    "{endpoints} endpoints and 6 neighbours need {} ports, the switch has {ports}",
                    u64::from(endpoints) + 6
                ),
            )),
            Topology::Dragonfly { endpoints, group, global }
                if u64::from(endpoints) + u64::from(global) + u64::from(group) - 1 > u64::from(ports) =>
            {
                let needed = u64::from(endpoints) + u64::from(global) + u64::from(group) - 1;
                Err(("topology", format!("a switch of this dragonfly needs {needed} ports, it has {ports}")))
            }
            _ => Ok(()),
        }
    }
}
