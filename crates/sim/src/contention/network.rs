//! The links of a fabric, each direction on its own, and routes over them.

use std::fmt;
use std::ops::Range;

use polder_platform::{Fabric, Graph, Topology};
use serde::{Deserialize, Serialize};

/// An end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Node {
    /// A port of an endpoint: accelerator `i` has ports `i * links` and on.
    Port(u32),
    /// A switch, as `Topology::graph` numbers them.
    Switch(u32),
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, "port {port}"),
            Self::Switch(switch) => write!(f, "switch {switch}"),
        }
    }
}

/// Which of the shortest ways a flow takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// The one that the port id of its destination selects, digit by digit: in a Clos, the destination modulo the ports up (D-mod-k).
    #[default]
    Minimal,
    /// At each switch, the next link with the fewest flows so far.
    Adaptive,
}

/// Why there is no such network, or no way through it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// More endpoints than ports.
    #[error("{asked} ports are asked for, the fabric has {ports}; ask for fewer accelerators")]
    TooMany {
        /// How many there would be.
        asked: u64,
        /// How many there are.
        ports: u64,
    },
    /// Too many switches to hold each link on its own.
    #[error(
        "the fabric has {links} links, more than the {most} that are held one by one; give its switches fewer ports or levels"
    )]
    TooLarge {
        /// How many there would be.
        links: u64,
        /// How many may be.
        most: u64,
    },
    /// No such link.
    #[error("no link joins switch {one} and switch {other}; switch {one}'s neighbours are {neighbours}")]
    NoLink {
        /// One end.
        one: u32,
        /// The other.
        other: u32,
        /// What the first is joined to.
        neighbours: String,
    },
    /// A link that has failed is named once more.
    #[error("the link between switch {one} and switch {other} has failed already; name it once")]
    FailedTwice {
        /// One end.
        one: u32,
        /// The other.
        other: u32,
    },
    /// No such switch.
    #[error("there is no switch {switch}: there are {switches}, numbered from 0")]
    NoSwitch {
        /// What was named.
        switch: u32,
        /// How many there are.
        switches: u32,
    },
    /// Failed links leave no way.
    #[error("no way leads from port {from} to port {to}: the failed links cut the fabric in two")]
    NoWay {
        /// Where the flow begins.
        from: u32,
        /// Where it would end.
        to: u32,
    },
}

/// A fabric link by link: first one from each port into the fabric, then one to each port, then those between switches.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    ports: u32,
    /// The switch that each port hangs on.
    leaves: Vec<u32>,
    /// The links of each switch to others: where they lead. The index of the first one's link, switch by switch.
    graph: Graph,
    firsts: Vec<u32>,
    /// Whether a link between switches has failed.
    has_failed: Vec<bool>,
    /// Flows that were routed over each link.
    crossings: Vec<u32>,
    /// Of each switch that a flow has led to: links from every other to it.
    distances: Vec<Option<Box<[u16]>>>,
    /// How its ways go, if that follows from the numbers of its switches.
    clos: Option<Clos>,
}

/// A folded Clos of two levels or more none of whose links has failed, as `Graph::clos` numbers its switches.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Clos {
    /// Links of a switch to the level above.
    half: u32,
    /// Levels below the top one.
    lower: u32,
    /// Switches of each of these.
    below: u32,
}

impl Clos {
    fn new(fabric: &Fabric) -> Option<Self> {
        let Topology::Clos { levels } = fabric.topology else { return None };
        let (half, lower) = (fabric.switch.ports / 2, levels.checked_sub(1)?);
        (lower > 0).then(|| Self { half, lower, below: 2 * half.pow(lower) })
    }

    /// The links of a switch, by their places, that lead on by a shortest way to the switch `end` of the lowest level: one down where the
    /// numbers differ in digits of lower levels alone, else all that go up.
    fn ways(self, at: u32, end: u32) -> Range<usize> {
        let Self { half, lower, below } = self;
        let (level, switch) = (at / below, at % below);
        let is_above = |level| switch / half.pow(level) == end / half.pow(level);
        let place = |level: u32| end / half.pow(level - 1);
        let (first, count) = match level {
            0 => (0, half),
            // It leads down to every switch that has its other digits.
            level if level == lower => (place(level), 1),
            level if is_above(level) => (place(level) % half, 1),
            _ => (half, half),
        };
        first as usize..(first + count) as usize
    }
}

/// Links that are held one by one, at most.
const MOST_LINKS: u64 = 1 << 25;

/// No way leads there.
const FAR: u16 = u16::MAX;

impl Network {
    /// The fabric with so many ports in use, the first ones first.
    ///
    /// # Errors
    /// When the fabric has fewer, or is too large.
    pub fn new(fabric: &Fabric, ports: u32) -> Result<Self, NetworkError> {
        let there = fabric.ports();
        if u64::from(ports) > there {
            return Err(NetworkError::TooMany { asked: ports.into(), ports: there });
        }
        let links = fabric.switch_ports(there);
        if links > MOST_LINKS {
            return Err(NetworkError::TooLarge { links, most: MOST_LINKS });
        }
        let planes = if fabric.topology == Topology::SingleHop { fabric.links } else { 1 };
        let mut graph = fabric.topology.graph(fabric.switch.ports);
        // A single hop has as many switches in parallel as an accelerator has links, each port on the next one.
        if planes > 1 {
            graph.endpoints = graph.endpoints.repeat(planes as usize);
            graph.links.resize(planes as usize, vec![]);
        }
        let leaves = if planes > 1 {
            (0..ports).map(|port| port % planes).collect()
        } else {
            let each = graph.endpoints.iter().enumerate();
            each.flat_map(|(switch, count)| std::iter::repeat_n(switch as u32, *count as usize))
                .take(ports as usize)
                .collect()
        };
        let mut firsts = Vec::with_capacity(graph.links.len() + 1);
        let mut next = 2 * ports;
        for links in &graph.links {
            firsts.push(next);
            next += links.len() as u32;
        }
        firsts.push(next);
        let distances = vec![None; graph.links.len()];
        let (has_failed, crossings) = (vec![false; next as usize], vec![0; next as usize]);
        let clos = Clos::new(fabric);
        Ok(Self { ports, leaves, graph, firsts, has_failed, crossings, distances, clos })
    }

    /// How many links there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.crossings.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.crossings.is_empty()
    }

    /// How many switches there are.
    #[must_use]
    pub fn switches(&self) -> u32 {
        self.graph.links.len() as u32
    }

    /// Flows that were routed over a link.
    #[must_use]
    pub fn crossings(&self, link: u32) -> u32 {
        self.crossings[link as usize]
    }

    /// Whether a link is one between switches that has failed.
    #[must_use]
    pub fn has_failed(&self, link: u32) -> bool {
        self.has_failed[link as usize]
    }

    /// From where to where a link leads.
    #[must_use]
    pub fn ends(&self, link: u32) -> (Node, Node) {
        let leaf = |port: u32| Node::Switch(self.leaves[port as usize]);
        if link < self.ports {
            return (Node::Port(link), leaf(link));
        }
        if link < 2 * self.ports {
            return (leaf(link - self.ports), Node::Port(link - self.ports));
        }
        let switch = self.firsts.partition_point(|first| *first <= link) - 1;
        let other = self.graph.links[switch][(link - self.firsts[switch]) as usize];
        (Node::Switch(switch as u32), Node::Switch(other as u32))
    }

    /// Lets a link between two switches fail, both directions; of several in parallel the first that has not.
    ///
    /// # Errors
    /// When no link joins them.
    pub fn fail(&mut self, one: u32, other: u32) -> Result<(), NetworkError> {
        let switches = self.switches();
        if let Some(switch) = [one, other].into_iter().find(|switch| *switch >= switches) {
            return Err(NetworkError::NoSwitch { switch, switches });
        }
        for (from, to) in [(one, other), (other, one)] {
            let neighbours = &self.graph.links[from as usize];
            let first = self.firsts[from as usize] as usize;
            let leads = |place: &usize| neighbours[*place] == to as usize && !self.has_failed[first + place];
            let Some(place) = (0..neighbours.len()).find(leads) else {
                let mut known: Vec<_> = neighbours.clone();
                known.sort_unstable();
                known.dedup();
                let neighbours = known.iter().take(8).map(ToString::to_string).collect::<Vec<_>>().join(", ");
                let more = if known.len() > 8 { ", …" } else { "" };
                if known.contains(&(to as usize)) {
                    return Err(NetworkError::FailedTwice { one, other });
                }
                return Err(NetworkError::NoLink { one: from, other: to, neighbours: neighbours + more });
            };
            self.has_failed[first + place] = true;
        }
        self.distances.fill(None);
        self.clos = None;
        Ok(())
    }

    /// Whether a way leads from each of these ports to each other.
    ///
    /// # Errors
    /// Names the first port that cannot be reached from the first one.
    pub fn check_ways(&self, mut ports: impl Iterator<Item = u32>) -> Result<(), NetworkError> {
        let Some(from) = ports.next() else { return Ok(()) };
        let distances = self.distances_to(self.leaves[from as usize]);
        // Links fail in both directions, so that one tree reaches all if any does. Planes of a single hop are joined by endpoints.
        let is_cut = |port: &u32| {
            let leaf = self.leaves[*port as usize];
            distances[leaf as usize] == FAR && !self.graph.links[leaf as usize].is_empty()
        };
        match ports.find(is_cut) {
            Some(to) => Err(NetworkError::NoWay { from, to }),
            None => Ok(()),
        }
    }

    /// What crosses the busiest link if each flow, from a port to a port, is spread evenly at each switch over all links that lead on by a
    /// shortest way and have not failed (equal-cost multipath); a flow counts 1 on the links of its ports.
    ///
    /// # Errors
    /// When a flow has no way.
    pub fn busiest(&self, flows: &[(u32, u32)]) -> Result<f64, NetworkError> {
        let mut loads = vec![0.0; self.len()];
        // Flows to one switch share its tree of ways: what arrives at a switch for it goes on alike, wherever it began.
        let mut ends: Vec<Vec<(u32, u32)>> = vec![vec![]; self.graph.links.len()];
        for (from, to) in flows {
            loads[*from as usize] += 1.0;
            loads[(self.ports + to) as usize] += 1.0;
            ends[self.leaves[*to as usize] as usize].push((*from, *to));
        }
        let mut arrived = vec![0.0; self.graph.links.len()];
        for (end, flows) in ends.iter().enumerate().filter(|(_, flows)| !flows.is_empty()) {
            let (distances, order) = self.ways_to(end as u32);
            for (from, to) in flows {
                let leaf = self.leaves[*from as usize] as usize;
                if distances[leaf] == FAR {
                    return Err(NetworkError::NoWay { from: *from, to: *to });
                }
                arrived[leaf] += 1.0;
            }
            // The farthest first: all that a switch passes on has then arrived there.
            for switch in order.iter().rev().map(|it| *it as usize) {
                let amount = std::mem::take(&mut arrived[switch]);
                if amount == 0.0 || switch == end {
                    continue;
                }
                let (first, neighbours) = (self.firsts[switch] as usize, &self.graph.links[switch]);
                let leads = |place: &usize| {
                    distances[neighbours[*place]].saturating_add(1) == distances[switch]
                        && !self.has_failed[first + place]
                };
                let part = amount / (0..neighbours.len()).filter(leads).count() as f64;
                for place in (0..neighbours.len()).filter(leads) {
                    loads[first + place] += part;
                    arrived[neighbours[place]] += part;
                }
            }
        }
        Ok(loads.into_iter().fold(0.0, f64::max))
    }

    /// The links of a flow between two ports, by one of the shortest ways that have not failed.
    ///
    /// # Errors
    /// When there is no way.
    pub fn route(&mut self, from: u32, to: u32, routing: Routing) -> Result<Vec<u32>, NetworkError> {
        let (mut at, end) = (self.leaves[from as usize], self.leaves[to as usize]);
        let mut distances = self.distances[end as usize].take();
        let mut links = vec![from];
        let mut digits = to;
        while at != end {
            let place = match self.clos {
                Some(clos) => self.choose(at, clos.ways(at, end), routing, &mut digits),
                None => {
                    let near = &**distances.get_or_insert_with(|| self.distances_to(end));
                    if near[at as usize] == FAR {
                        break;
                    }
                    self.choose(at, self.nearer(at, near), routing, &mut digits)
                }
            };
            links.push(self.firsts[at as usize] + place as u32);
            at = self.graph.links[at as usize][place] as u32;
        }
        self.distances[end as usize] = distances;
        if at != end {
            return Err(NetworkError::NoWay { from, to });
        }
        links.push(self.ports + to);
        links.iter().for_each(|link| self.crossings[*link as usize] += 1);
        Ok(links)
    }

    /// The links of a switch, by their places, that have not failed and lead to switches which are nearer.
    fn nearer(&self, at: u32, near: &[u16]) -> impl Iterator<Item = usize> + Clone {
        let (first, neighbours) = (self.firsts[at as usize] as usize, &self.graph.links[at as usize]);
        (0..neighbours.len()).filter(move |place| {
            near[neighbours[*place]].saturating_add(1) == near[at as usize] && !self.has_failed[first + place]
        })
    }

    /// One of the ways on from a switch.
    fn choose(
        &self,
        at: u32,
        mut ways: impl Iterator<Item = usize> + Clone,
        routing: Routing,
        digits: &mut u32,
    ) -> usize {
        let count = ways.clone().count() as u32;
        let turn = *digits % count;
        *digits /= count;
        let first = self.firsts[at as usize] as usize;
        let place = match routing {
            Routing::Minimal => ways.nth(turn as usize),
            // Of links that are alike, the one that comes next for the destination.
            Routing::Adaptive => ways
                .enumerate()
                .min_by_key(|(way, place)| {
                    (self.crossings[first + place], (*way as u32 + count - turn) % count)
                })
                .map(|(_, place)| place),
        };
        place.expect("a switch that is nearer")
    }

    /// Links on the shortest way from each switch to one.
    fn distances_to(&self, end: u32) -> Box<[u16]> {
        self.ways_to(end).0
    }

    /// The same, and the switches from which a way leads there, the nearest first.
    fn ways_to(&self, end: u32) -> (Box<[u16]>, Vec<u32>) {
        let mut distances = vec![FAR; self.graph.links.len()];
        distances[end as usize] = 0;
        let mut order = vec![end];
        let mut next = 0;
        // Links fail in both directions, so that the way there is as long as the way back.
        while let Some(switch) = order.get(next).map(|it| *it as usize) {
            next += 1;
            let first = self.firsts[switch] as usize;
            for (place, other) in self.graph.links[switch].iter().enumerate() {
                if distances[*other] == FAR && !self.has_failed[first + place] {
                    distances[*other] = distances[switch] + 1;
                    order.push(*other as u32);
                }
            }
        }
        (distances.into(), order)
    }
}

#[cfg(test)]
mod tests {
    use polder_platform::Platform;

    use super::*;

    /// Against distances that are counted link by link, from every switch and for every pair.
    #[test]
    fn ways_of_a_clos_follow_from_numbers_as_they_do_from_distances() {
        let mut between = Platform::load("nvl72-ndr").unwrap().between.unwrap();
        for (levels, ports) in [(1, 4), (2, 4), (2, 8), (3, 4), (3, 6), (4, 4)] {
            between.topology = Topology::Clos { levels };
            between.switch.ports = ports;
            let count = u32::try_from(between.ports()).unwrap();
            let mut short = Network::new(&between, count).unwrap();
            assert_eq!(short.clos.is_some(), levels > 1);
            let mut long = Network { clos: None, ..short.clone() };
            for end in 0..short.leaves[count as usize - 1] + 1 {
                let near = long.distances_to(end);
                for at in (0..short.switches()).filter(|at| *at != end) {
                    let ways = short.clos.unwrap().ways(at, end);
                    assert_eq!(
                        ways.collect::<Vec<_>>(),
                        long.nearer(at, &near).collect::<Vec<_>>(),
                        "{at} to {end}"
                    );
                }
            }
            for routing in [Routing::Minimal, Routing::Adaptive] {
                for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
                    assert_eq!(
                        short.route(from, to, routing),
                        long.route(from, to, routing),
                        "{from} to {to}"
                    );
                }
            }
            assert_eq!(short.crossings, long.crossings);
        }
    }
}
