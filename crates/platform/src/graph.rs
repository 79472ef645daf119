//! A topology as switches and the links between them.

use std::collections::VecDeque;

/// Switches, by their index: endpoint ports of each, and the switches that its links lead to, one entry a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    /// Ports for endpoints of each switch.
    pub endpoints: Vec<u32>,
    /// Where the links of each switch lead.
    pub links: Vec<Vec<usize>>,
}

impl Graph {
    /// So many switches with so many endpoints each, and no links yet.
    fn new(switches: usize, endpoints: u32) -> Self {
        Self { endpoints: vec![endpoints; switches], links: vec![vec![]; switches] }
    }

    /// A link, in both directions.
    fn join(&mut self, one: usize, other: usize) {
        self.links[one].push(other);
        self.links[other].push(one);
    }

    /// A folded Clos: a tree of `levels` whose inner nodes are as many switches as keep the bisection full.
    pub(crate) fn clos(levels: u32, ports: usize) -> Self {
        let half = ports / 2;
        if levels == 1 {
            return Self::new(1, 2 * half as u32);
        }
        // Below the top level as many columns as half the ports to the power of the levels below, twice.
        let columns = half.pow(levels - 1);
        let below = 2 * columns;
        let lower = levels as usize - 1;
        let mut graph = Self::new(lower * below + columns, 0);
        graph.endpoints[..below].fill(half as u32);
        // A switch of a level is joined to those of the next that differ from it in that level's digit alone, as in a butterfly.
        for level in 0..lower {
            let digit = half.pow(level as u32);
            let is_top = level + 1 == lower;
            for switch in 0..below {
                for up in 0..half {
                    let changed = switch - switch / digit % half * digit + up * digit;
                    let above = if is_top { changed % columns } else { changed };
                    graph.join(level * below + switch, (level + 1) * below + above);
                }
            }
        }
        graph
    }

    /// A torus: two neighbours along each axis of more than one switch, or two links to the only other.
    pub(crate) fn torus(dimensions: [usize; 3], endpoints: u32) -> Self {
        let [x, y, z] = dimensions;
        let mut graph = Self::new(x * y * z, endpoints);
        for switch in 0..x * y * z {
            for (axis, stride) in [1, x, x * y].into_iter().enumerate() {
                let count = dimensions[axis];
                if count > 1 {
                    let place = switch / stride % count;
                    graph.join(switch, switch - place * stride + (place + 1) % count * stride);
                }
            }
        }
        graph
    }

    /// A dragonfly: groups whose switches are all joined, and a link between each two groups.
    pub(crate) fn dragonfly(endpoints: u32, group: usize, global: usize) -> Self {
        let groups = group * global + 1;
        let mut graph = Self::new(groups * group, endpoints);
        for here in 0..groups {
            for one in 0..group {
                (one + 1..group).for_each(|other| graph.join(here * group + one, here * group + other));
            }
            // A group's ports lead to the others in turn: port p of a group to the one that is p + 1 further.
            for there in here + 1..groups {
                let [out, back] = [there - here - 1, groups + here - there - 1].map(|port| port / global);
                graph.join(here * group + out, there * group + back);
            }
        }
        graph
    }

    /// Links on the shortest way from one switch to each.
    #[must_use]
    pub fn distances(&self, from: usize) -> Vec<Option<u32>> {
        let mut distances = vec![None; self.links.len()];
        distances[from] = Some(0);
        let mut next = VecDeque::from([(from, 0)]);
        while let Some((switch, distance)) = next.pop_front() {
            for &other in &self.links[switch] {
                if distances[other].is_none() {
                    distances[other] = Some(distance + 1);
                    next.push_back((other, distance + 1));
                }
            }
        }
        distances
    }

    /// What each link of each switch carries when every endpoint sends one in all to all endpoints, itself too, by shortest ways
    /// that share equally.
    #[must_use]
    pub fn loads_of_all_to_all(&self) -> Vec<Vec<f64>> {
        let mut loads: Vec<_> = self.links.iter().map(|links| vec![0.0; links.len()]).collect();
        let all: f64 = self.endpoints.iter().copied().map(f64::from).sum();
        for (from, endpoints) in self.endpoints.iter().enumerate().filter(|(_, count)| **count > 0) {
            let distances = self.distances(from);
            let mut order: Vec<_> = (0..self.links.len()).filter(|it| distances[*it].is_some()).collect();
            order.sort_by_key(|it| distances[*it]);
            let is_next = |one: usize, other: usize| distances[other] == distances[one].map(|it| it + 1);
            // In how many ways each is reached.
            let mut ways = vec![0.0; self.links.len()];
            ways[from] = 1.0;
            for &one in &order {
                for &other in self.links[one].iter().filter(|other| is_next(one, **other)) {
                    ways[other] += ways[one];
                }
            }
            // What ends at a switch or goes on from it, from the farthest inward.
            let sent = f64::from(*endpoints) / all;
            let mut through: Vec<_> = self.endpoints.iter().map(|count| sent * f64::from(*count)).collect();
            for &one in order.iter().rev() {
                for (link, &other) in self.links[one].iter().enumerate() {
                    if is_next(one, other) {
                        let part = through[other] * ways[one] / ways[other];
                        loads[one][link] += part;
                    }
                }
                let passed: f64 = self.links[one]
                    .iter()
                    .filter(|other| is_next(one, **other))
                    .map(|&other| through[other] * ways[one] / ways[other])
                    .sum();
                through[one] += passed;
            }
        }
        loads
    }
}
