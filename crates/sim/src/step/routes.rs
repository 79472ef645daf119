//! The links that flows cross: those of endpoints, and those between switches, by the shortest ways.
//!
//! In a Clos each flow is spread evenly over all of them. In a torus it goes along one axis after the other, both ways around where they are
//! equally long. In a dragonfly flows are spread over the one way that is the shortest and those by way of another group, so that the
//! busiest link carries the least.

use polder_platform::{Fabric, Topology};

/// A fabric with so many endpoints on it, the first ports first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Routes {
    topology: Topology,
    /// Half of a switch's ports.
    half: usize,
    /// Links of an endpoint.
    links: u32,
    endpoints: usize,
    /// Links of the fabric, and of some of them that carry alike the first alone.
    count: usize,
}

/// What of a flow, or of its part on one of the endpoint's links, crosses a link.
type Crossing<'a> = &'a mut dyn FnMut(usize, f64);

impl Routes {
    pub(crate) fn new(fabric: &Fabric, endpoints: u32) -> Self {
        let (links, half) = (fabric.links, fabric.switch.ports as usize / 2);
        let ends = 2 * endpoints as usize * links as usize;
        let between = match fabric.topology {
            Topology::SingleHop => 0,
            // Of each level, and in each direction, those of a subtree.
            Topology::Clos { levels } => (0..levels - 1).map(|level| 4 * half.pow(levels - 1 - level)).sum(),
            Topology::Torus { dimensions, .. } => {
                6 * dimensions.map(|n| n as usize).iter().product::<usize>()
            }
            Topology::Dragonfly { group, global, .. } => {
                let [group, global] = [group, global].map(|it| it as usize);
                (group * global + 1) * group * (group + global)
            }
        };
        Self { topology: fabric.topology, half, links, endpoints: endpoints as usize, count: ends + between }
    }

    /// How many flows of which each fills an endpoint's links cross the busiest link.
    pub(crate) fn busiest(&self, flows: &[(u32, u32)]) -> f64 {
        let short = self.loads(flows, false);
        if !matches!(self.topology, Topology::Dragonfly { .. }) {
            return short.into_iter().fold(0.0, f64::max);
        }
        let round = self.loads(flows, true);
        let most = |part: f64| {
            short.iter().zip(&round).map(|(short, round)| short + part * (round - short)).fold(0.0, f64::max)
        };
        // The most of straight lines is convex.
        let (mut from, mut until) = (0.0, 1.0);
        for _ in 0..60 {
            let third = (until - from) / 3.0;
            if most(from + third) <= most(until - third) {
                until -= third;
            } else {
                from += third;
            }
        }
        most(0.5 * (from + until))
    }

    /// What each link carries.
    fn loads(&self, flows: &[(u32, u32)], is_round: bool) -> Vec<f64> {
        let mut loads = vec![0.0; self.count];
        for (from, to) in flows {
            for link in 0..self.links {
                self.cross(*from, *to, link, is_round, &mut |at, part| loads[at] += part);
            }
        }
        loads
    }

    /// What crosses which links of the part of a flow on one of its endpoint's links; of a dragonfly by way of other groups, or not.
    fn cross(&self, from: u32, to: u32, link: u32, is_round: bool, crossing: Crossing<'_>) {
        let [from, to] = [from, to].map(|it| it as usize * self.links as usize + link as usize);
        let all = self.endpoints * self.links as usize;
        crossing(from, 1.0);
        crossing(all + to, 1.0);
        let mut crossing = |at: usize, part: f64| crossing(2 * all + at, part);
        match self.topology {
            Topology::SingleHop => {}
            Topology::Clos { levels } => self.climb(levels, from / self.half, to / self.half, &mut crossing),
            Topology::Torus { dimensions, endpoints } => {
                let [from, to] = [from, to].map(|port| port / endpoints as usize);
                around(dimensions.map(|n| n as usize), from, to, &mut crossing);
            }
            Topology::Dragonfly { endpoints, group, global } => {
                let [from, to] = [from, to].map(|port| port / endpoints as usize);
                let all = Groups { group: group as usize, global: global as usize };
                match is_round && from / all.group != to / all.group && all.count() > 2 {
                    true => all.detour(from, to, &mut crossing),
                    false => all.direct(from, to, 1.0, &mut crossing),
                }
            }
        }
    }

    /// From a leaf up to where its subtree has the other, and down: evenly over all links that lead out of a subtree, of which one stands
    /// for all.
    fn climb(&self, levels: u32, from: usize, to: usize, crossing: Crossing<'_>) {
        let (mut base, mut subtrees) = (0, (from, to));
        for level in 0..levels - 1 {
            if subtrees.0 == subtrees.1 {
                return;
            }
            let count = 2 * self.half.pow(levels - 1 - level);
            let part = 1.0 / self.half.pow(level + 1) as f64;
            crossing(base + subtrees.0, part);
            crossing(base + count + subtrees.1, part);
            base += 2 * count;
            subtrees = (subtrees.0 / self.half, subtrees.1 / self.half);
        }
    }
}

/// Along the axes of a torus, one after the other, the shorter way around.
fn around(dimensions: [usize; 3], from: usize, to: usize, crossing: Crossing<'_>) {
    let mut at = from;
    let mut stride = 1;
    for (axis, count) in dimensions.into_iter().enumerate() {
        let [here, there] = [at, to].map(|switch| switch / stride % count);
        let ahead = (there + count - here) % count;
        let base = at - here * stride;
        let mut go = |steps: usize, is_ahead: bool, part: f64| {
            for step in 0..steps {
                let place = if is_ahead { here + step } else { here + count - step } % count;
                crossing((base + place * stride) * 6 + 2 * axis + usize::from(is_ahead), part);
            }
        };
        match (2 * ahead).cmp(&count) {
            std::cmp::Ordering::Less => go(ahead, true, 1.0),
            std::cmp::Ordering::Greater => go(count - ahead, false, 1.0),
            std::cmp::Ordering::Equal => {
                [true, false].into_iter().for_each(|is_ahead| go(ahead, is_ahead, 0.5))
            }
        }
        at = base + there * stride;
        stride *= count;
    }
}

/// The groups of a dragonfly: switches of each, and ports of each switch to other groups.
#[derive(Clone, Copy)]
struct Groups {
    group: usize,
    global: usize,
}

impl Groups {
    const fn count(self) -> usize {
        self.group * self.global + 1
    }

    /// From a switch to another, by the one link between their groups.
    fn direct(self, from: usize, to: usize, part: f64, crossing: Crossing<'_>) {
        let [here, there] = [from, to].map(|switch| switch / self.group);
        if here == there {
            return self.local(from, to, part, crossing);
        }
        let (out, back) = self.gate(here, there);
        self.local(from, out, part, crossing);
        let port = (there + self.count() - here - 1) % self.count();
        crossing(self.count() * self.group * self.group + here * self.group * self.global + port, part);
        self.local(back, to, part, crossing);
    }

    /// By way of each other group, evenly: to the switch there that the link between the groups leads to, and on.
    fn detour(self, from: usize, to: usize, crossing: Crossing<'_>) {
        let [here, there] = [from, to].map(|switch| switch / self.group);
        let part = 1.0 / (self.count() - 2) as f64;
        for by in (0..self.count()).filter(|by| *by != here && *by != there) {
            let (_, middle) = self.gate(here, by);
            self.direct(from, middle, part, crossing);
            self.direct(middle, to, part, crossing);
        }
    }

    /// The switches at the ends of the link from a group to another.
    const fn gate(self, here: usize, there: usize) -> (usize, usize) {
        let count = self.count();
        let [out, back] = [(there + count - here - 1) % count, (here + count - there - 1) % count];
        (here * self.group + out / self.global, there * self.group + back / self.global)
    }

    fn local(self, from: usize, to: usize, part: f64, crossing: Crossing<'_>) {
        if from != to {
            crossing(from * self.group + to % self.group, part);
        }
    }
}

#[cfg(test)]
mod tests {
    use polder_platform::{Graph, Platform};

    use super::*;

    fn fabric(topology: Topology, ports: u32) -> Fabric {
        let mut fabric = Platform::load("nvl72-ndr").unwrap().between.unwrap();
        (fabric.topology, fabric.switch.ports, fabric.links) = (topology, ports, 1);
        fabric
    }

    impl Routes {
        /// The links that a flow's part crosses, with how much of it.
        pub(crate) fn parts(&self, from: u32, to: u32, link: u32) -> Vec<(usize, f64)> {
            let mut parts = vec![];
            self.cross(from, to, link, false, &mut |at, part| parts.push((at, part)));
            parts
        }

        pub(crate) fn short(&self, flows: &[(u32, u32)]) -> f64 {
            self.loads(flows, false).into_iter().fold(0.0, f64::max)
        }
    }

    /// The links that a flow from one to another crosses between switches are as many as the shortest way has, whatever it is spread over.
    #[test]
    fn ways_are_the_shortest_of_the_graph() {
        for (topology, ports) in [
            (Topology::Clos { levels: 1 }, 8),
            (Topology::Clos { levels: 2 }, 8),
            (Topology::Clos { levels: 3 }, 4),
            (Topology::Torus { dimensions: [4, 3, 2], endpoints: 2 }, 16),
            (Topology::Torus { dimensions: [5, 1, 1], endpoints: 1 }, 16),
        ] {
            let graph: Graph = topology.graph(ports);
            let fabric = fabric(topology, ports);
            let endpoints = fabric.ports() as u32;
            let routes = Routes::new(&fabric, endpoints);
            let leaf: Vec<_> =
                (0..graph.endpoints.len()).flat_map(|it| vec![it; graph.endpoints[it] as usize]).collect();
            for from in 0..endpoints {
                let distances = graph.distances(leaf[from as usize]);
                for to in 0..endpoints {
                    let parts = routes.parts(from, to, 0);
                    let crossed: f64 = match topology {
                        // One link stands for all that lead out of a subtree.
                        Topology::Clos { .. } => parts.len() as f64 - 2.0,
                        _ => parts.iter().map(|(_, part)| part).sum::<f64>() - 2.0,
                    };
                    let distance = distances[leaf[to as usize]].unwrap();
                    assert!(
                        (crossed - f64::from(distance)).abs() < 1e-9,
                        "{topology:?} {from} {to}: {parts:?}"
                    );
                    assert!(parts.iter().all(|(at, _)| *at < routes.count));
                }
            }
        }
    }

    #[test]
    fn a_dragonflys_ways_are_links_of_its_graph_and_a_detour_spreads_a_group_over_all_others() {
        let topology = Topology::Dragonfly { endpoints: 2, group: 4, global: 2 };
        let graph = topology.graph(16);
        let groups = Groups { group: 4, global: 2 };
        for here in 0..groups.count() {
            for there in (0..groups.count()).filter(|it| *it != here) {
                let (out, back) = groups.gate(here, there);
                assert!(graph.links[out].contains(&back) && (out / 4, back / 4) == (here, there));
            }
        }
        // All eight endpoints of a group send to the next group: over one link, or by way of the seven others.
        let routes = Routes::new(&fabric(topology, 16), 72);
        let flows: Vec<_> = (0..8).map(|port| (port, port + 8)).collect();
        assert_eq!(routes.short(&flows), 8.0);
        let spread = routes.busiest(&flows);
        assert!(spread < 2.0, "{spread}");
    }

    #[test]
    fn all_to_all_loads_a_torus_as_its_graph_is_loaded() {
        let topology = Topology::Torus { dimensions: [4, 4, 2], endpoints: 3 };
        let fabric = fabric(topology, 16);
        let endpoints = fabric.ports() as u32;
        let flows: Vec<_> =
            (0..endpoints).flat_map(|from| (0..endpoints).map(move |to| (from, to))).collect();
        let busiest = Routes::new(&fabric, endpoints).short(&flows);
        let loads = topology.graph(16).loads_of_all_to_all();
        let most = loads.iter().flatten().copied().fold(0.0, f64::max) * f64::from(endpoints);
        // Endpoints themselves send as much as there are of them.
        assert!((busiest - most.max(f64::from(endpoints))).abs() < 1e-6, "{busiest} {most}");
    }
}
