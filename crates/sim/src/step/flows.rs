//! Fidelities L1 and L2: the flows of a step of a collective, of all groups at the same time, share the links on their routes.
//!
//! Sharing is max-min fair. The flows of such a step begin together and have the same size, and then the last of them ends when the busiest
//! link has carried all that crosses it: each flow gets at least the smallest fair share, `capacity / crossings` of that link, because to
//! give each flow that much is possible; and the flows that cross that link cannot have more of it together. So counting crossings is
//! enough, and `tests` holds it against sharing that is computed rate by rate.
//!
//! Flit by flit (L2) each flow is a message that is followed instead, over one of the shortest ways. What the last one takes longer than
//! alone slows the transfer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use polder_platform::{Fabric, Platform, Rack};
use serde::Serialize;

use crate::contention::{
    FlitCount, FlitOptions, FlitWork, MOST_FLOWS, Network, Routing, TransferError, Transfers,
};
use crate::fidelity::Fidelity;
use crate::step::cost::{CommunicationCosts, Pattern, Scopes, Transfer};
use crate::step::machine::{LinkRates, Links};
use crate::step::routes::Routes;

/// So many ranks on the fabrics of a platform.
#[derive(Debug)]
pub(crate) struct Flows {
    /// Inside a rack and between racks, as if nothing were shared.
    rates: [LinkRates; 2],
    /// The links, where there is such a fabric.
    routes: [Option<Ways>; 2],
    /// Ranks of each rack, its accelerators, and all ranks.
    fill: u32,
    rack: u32,
    ranks: u32,
    /// Flit by flit, if flows are looked at so closely.
    followed: Option<Mutex<Followed>>,
}

/// How flows cross a fabric.
#[derive(Clone, Debug, PartialEq)]
enum Ways {
    /// All of it: routes follow from the topology.
    Whole(Routes),
    /// With failed links, link by link; an endpoint has so many.
    Failed(Arc<Network>, u32),
}

impl Ways {
    /// How many flows of which each fills an endpoint's links cross the busiest link.
    fn busiest(&self, flows: &[(u32, u32)]) -> f64 {
        match self {
            Self::Whole(routes) => routes.busiest(flows),
            Self::Failed(network, links) => {
                let ports = |(from, to): &(u32, u32)| {
                    let (from, to) = (from * links, to * links);
                    (0..*links).map(move |link| (from + link, to + link))
                };
                let parts: Vec<_> = flows.iter().flat_map(ports).collect();
                network.busiest(&parts).expect("ways were checked when links failed")
            }
        }
    }
}

impl Flows {
    /// With `failed`, that network is the fabric between racks. With `flits`, flows are followed flit by flit, or counted before that.
    pub(crate) fn new(
        platform: &Platform,
        rack: &Rack,
        fill: u32,
        ranks: u32,
        failed: Option<Arc<Network>>,
        flits: Option<(FlitOptions, FollowedFlits)>,
    ) -> Self {
        let fitted = rack.accelerator.fitted;
        let racks = ranks.div_ceil(fill);
        let fabrics = [
            (rack.fabric.as_ref(), fitted.inside, fill.min(ranks)),
            (platform.between.as_ref(), fitted.between, racks * rack.accelerators),
        ];
        let rates = |(fabric, reached, _): (Option<&Fabric>, f64, u32)| LinkRates::whole(fabric, reached);
        let ways = |(fabric, _, endpoints): (Option<&Fabric>, f64, u32)| {
            Some(Ways::Whole(Routes::new(fabric?, endpoints)))
        };
        let followed = flits.map(|(options, shared)| {
            let fabrics =
                fabrics.map(|(fabric, reached, endpoints)| Some((fabric?.clone(), reached, endpoints)));
            Mutex::new(Followed {
                options,
                fabrics,
                networks: [None, failed.as_deref().cloned()],
                failed: failed.clone(),
                shared,
                used: vec![],
                error: None,
            })
        });
        let mut routes = fabrics.map(ways);
        if let (Some(network), (Some(fabric), ..)) = (failed, fabrics[1]) {
            routes[1] = Some(Ways::Failed(network, fabric.links));
        }
        Self { rates: fabrics.map(rates), routes, fill, rack: rack.accelerators, ranks, followed }
    }

    fn followed(&self) -> Option<MutexGuard<'_, Followed>> {
        self.followed.as_ref().map(|it| it.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What was followed, or why it could not be.
    pub(crate) fn flits(&self) -> Result<Option<StepFlits>, TransferError> {
        self.followed().map(|mut it| it.flits()).transpose()
    }

    /// Where a rank hangs on the fabric between racks: racks keep the ports of accelerators that are not used.
    const fn endpoint(&self, rank: u32) -> u32 {
        endpoint(rank, self.fill, self.rack)
    }

    /// How many times longer than alone the last flow between racks takes, when each rank sends so many bytes to those that `peers` gives,
    /// of which there are `each` at most.
    fn between(&self, peers: impl FnMut(u32, &mut dyn FnMut(u32)), each: u32, bytes: f64) -> f64 {
        self.slowed(1, self.ranks, |rank| self.endpoint(rank), peers, each, bytes)
    }

    /// The same inside a rack.
    fn inside(&self, peers: impl FnMut(u32, &mut dyn FnMut(u32)), each: u32, bytes: f64) -> f64 {
        self.slowed(0, self.fill.min(self.ranks), |rank| rank, peers, each, bytes)
    }

    fn slowed(
        &self,
        scope: usize,
        ranks: u32,
        endpoint: impl Fn(u32) -> u32,
        mut peers: impl FnMut(u32, &mut dyn FnMut(u32)),
        each: u32,
        bytes: f64,
    ) -> f64 {
        let Some(routes) = &self.routes[scope] else { return 1.0 };
        let mut flows = vec![];
        for rank in 0..ranks {
            let from = endpoint(rank);
            peers(rank, &mut |peer| {
                if peer < ranks && peer != rank {
                    flows.push((from, endpoint(peer)));
                }
            });
        }
        let times = match self.followed() {
            None => routes.busiest(&flows),
            Some(mut followed) => followed.times(scope, flows, bytes),
        };
        (times / f64::from(each)).max(1.0)
    }

    /// The links as a transfer gets them.
    fn rates(&self, Transfer { pattern, span, bytes }: Transfer) -> [LinkRates; 2] {
        let [mut near, mut far] = self.rates;
        let [inside, between] = [Group::new(span.inside, span.near), Group::new(span.between, span.far)];
        // What a member of a ring sends in a step: its part, or all of it where a switch adds.
        let part = |scope: &LinkRates, members: u32, bytes: f64| match scope.in_switch {
            true if pattern == Pattern::AllReduce => bytes,
            _ => bytes / f64::from(members),
        };
        match pattern {
            Pattern::AllReduce | Pattern::Half => {
                let left = bytes / f64::from(span.inside);
                let [one, other] = [part(&near, span.inside, bytes), part(&far, span.between, left)];
                near.share(self.inside(|rank, to| to(inside.next(rank)), 1, one));
                far.share(self.between(|rank, to| to(between.next(rank)), 1, other));
                if pattern == Pattern::AllReduce && !far.in_switch && span.between > 1 {
                    // Each of two trees carries half of the bytes: two flows are as much as a ring's one.
                    far.share_trees(self.between(|rank, to| between.parents(rank, to), 2, 0.5 * left));
                }
            }
            Pattern::Send if span.between > 1 => {
                far.share(self.between(
                    |rank, to| {
                        if !between.is_last(rank) {
                            to(between.next(rank))
                        }
                    },
                    1,
                    bytes,
                ));
            }
            Pattern::Send => near.share(self.inside(
                |rank, to| {
                    if !inside.is_last(rank) {
                        to(inside.next(rank))
                    }
                },
                1,
                bytes,
            )),
            Pattern::AllToAll => {
                let each = bytes / f64::from(span.inside * span.between);
                let near_peers = span.inside.saturating_sub(1).max(1);
                near.share(self.inside(|rank, to| inside.others(rank, to), near_peers, each));
                let peers =
                    |rank, to: &mut dyn FnMut(u32)| between.others(rank, &mut |other| inside.all(other, to));
                let far_peers = (span.between.saturating_sub(1) * span.inside).max(1);
                far.share(self.between(peers, far_peers, each));
            }
        }
        [near, far]
    }
}

/// The endpoint of a rank, with `fill` ranks in each rack of so many accelerators.
pub(crate) const fn endpoint(rank: u32, fill: u32, rack: u32) -> u32 {
    rank / fill * rack + rank % fill
}

/// What of a step was followed flit by flit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepFlits {
    /// Bytes of each message that were followed, if it has as many; all of them when left out.
    pub window_bytes: Option<f64>,
    /// Flits times the links that each crossed, of each transfer of the step once.
    pub flit_hops: u64,
    /// Flits that were damaged and sent again.
    pub replays: u64,
    /// Bytes of a window that sees steady rates on the longest way of all transfers.
    pub steady_window_bytes: f64,
}

impl From<FlitCount> for StepFlits {
    fn from(it: FlitCount) -> Self {
        let FlitCount { window_bytes, flit_hops, replays, steady_window_bytes, .. } = it;
        Self { window_bytes: Some(window_bytes), flit_hops, replays, steady_window_bytes }
    }
}

/// Flows that the steps of a command follow flit by flit. First those of all steps are counted, so that what takes too long is refused before any
/// is followed; then each is followed once.
#[derive(Clone, Debug, Default)]
pub(crate) struct FollowedFlits(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    is_following: bool,
    /// All that was counted.
    work: FlitWork,
    /// What is counted or followed already.
    known: Vec<TimedFlows>,
}

/// What some flows took, each with this window.
fn sum<'a>(window_bytes: Option<f64>, known: impl Iterator<Item = &'a TimedFlows>) -> StepFlits {
    let none = StepFlits { window_bytes, flit_hops: 0, replays: 0, steady_window_bytes: 0.0 };
    known.fold(none, |sum, it| StepFlits {
        flit_hops: sum.flit_hops + it.flit_hops,
        replays: sum.replays + it.replays,
        steady_window_bytes: sum.steady_window_bytes.max(it.steady_window_bytes),
        ..sum
    })
}

/// Flows that begin together.
#[derive(Debug)]
struct TimedFlows {
    asked: FlowSet,
    /// As how many that share a link the last ends; what took how many flits.
    times: f64,
    flit_hops: u64,
    replays: u64,
    steady_window_bytes: f64,
}

/// Flows of so many bytes each between endpoints of a fabric, which reach a part of its payload.
#[derive(Debug)]
struct FlowSet {
    fabric: Fabric,
    reached: f64,
    endpoints: u32,
    failed: Option<Arc<Network>>,
    flows: Vec<(u32, u32)>,
    bytes: f64,
}

impl PartialEq for FlowSet {
    fn eq(&self, other: &Self) -> bool {
        let is_network = match (&self.failed, &other.failed) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let plain = |it: &Self| (it.reached, it.endpoints, it.bytes);
        is_network && plain(self) == plain(other) && self.fabric == other.fabric && self.flows == other.flows
    }
}

impl FollowedFlits {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many questions were counted or followed.
    #[cfg(test)]
    pub(crate) fn distinct_sets(&self) -> usize {
        self.lock().known.len()
    }

    /// Once all was counted: from now on flits are followed, with this window.
    ///
    /// # Errors
    /// When they are too many, or the window is too short.
    pub(crate) fn begin(&self, window_bytes: Option<f64>) -> Result<(), TransferError> {
        let mut shared = self.lock();
        shared.work.check(window_bytes)?;
        shared.is_following = true;
        shared.known.clear();
        Ok(())
    }

    /// What was followed since it began, with this window.
    pub(crate) fn all(&self, window_bytes: Option<f64>) -> StepFlits {
        sum(window_bytes, self.lock().known.iter())
    }
}

/// Flows of a step flit by flit.
#[derive(Debug)]
struct Followed {
    options: FlitOptions,
    /// Inside a rack and between racks: the fabric, the part of its payload that is reached, and its endpoints; its links once they are
    /// needed.
    fabrics: [Option<(Fabric, f64, u32)>; 2],
    networks: [Option<Network>; 2],
    failed: Option<Arc<Network>>,
    shared: FollowedFlits,
    /// What of it this step has.
    used: Vec<usize>,
    error: Option<TransferError>,
}

impl Followed {
    fn flits(&mut self) -> Result<StepFlits, TransferError> {
        self.error.take().map_or(Ok(()), Err)?;
        let shared = self.shared.lock();
        self.used.sort_unstable();
        self.used.dedup();
        Ok(sum(self.options.window_bytes, self.used.drain(..).map(|at| &shared.known[at])))
    }

    /// As how many flows that share a link the last of these ends.
    fn times(&mut self, scope: usize, flows: Vec<(u32, u32)>, bytes: f64) -> f64 {
        if flows.is_empty() || bytes <= 0.0 || self.error.is_some() {
            return 1.0;
        }
        let Some((fabric, reached, endpoints)) = self.fabrics[scope].clone() else { return 1.0 };
        let failed = self.failed.clone().filter(|_| scope == 1);
        let asked = FlowSet { fabric, reached, endpoints, failed, flows, bytes };
        let shared = self.shared.clone();
        let mut shared = shared.lock();
        let known = shared.known.iter().position(|it| it.asked == asked);
        let at = known.map_or_else(|| self.time_flows(scope, asked, &mut shared), Ok);
        match at {
            Ok(at) => {
                self.used.push(at);
                shared.known[at].times
            }
            Err(error) => {
                self.error = Some(error);
                1.0
            }
        }
    }

    /// Counts or follows flows; where they stand then.
    fn time_flows(
        &mut self,
        scope: usize,
        asked: FlowSet,
        shared: &mut Shared,
    ) -> Result<usize, TransferError> {
        let FlowSet { fabric, reached, endpoints, flows, bytes, .. } = &asked;
        let parts = flows.len() as u64 * u64::from(fabric.links);
        if parts > MOST_FLOWS {
            return Err(TransferError::TooManyFlows { parts, most: MOST_FLOWS });
        }
        let mut network = match self.networks[scope].take() {
            Some(network) => network,
            None => Network::new(fabric, endpoints * fabric.links)?,
        };
        let transfers = Transfers {
            fabric,
            reached: *reached,
            bytes: *bytes,
            step_s: 0.0,
            routing: Routing::Minimal,
            seed: 0,
            fidelity: Fidelity::L2,
            flits: self.options,
        };
        let (mut times, mut count) = (1.0, None);
        if shared.is_following {
            let followed = transfers.times(&mut network, flows)?;
            let alone_s = bytes / (fabric.payload().value() * reached);
            times = 1.0 + followed.delay_s() / alone_s;
            count = followed.flits;
        } else {
            shared.work.add(transfers.work(&transfers.ways(&mut network, flows)?));
        }
        self.networks[scope] = Some(network);
        let known = TimedFlows {
            times,
            flit_hops: count.map_or(0, |it| it.flit_hops),
            replays: count.map_or(0, |it| it.replays),
            steady_window_bytes: count.map_or(0.0, |it| it.steady_window_bytes),
            asked,
        };
        shared.known.push(known);
        Ok(shared.known.len() - 1)
    }
}

impl CommunicationCosts for Flows {
    fn seconds<const N: usize>(&self, transfers: [Transfer; N]) -> [Scopes; N] {
        transfers.map(|transfer| Links(&self.rates(transfer)).seconds(transfer))
    }
}

/// Groups of so many ranks, each so far from the next.
#[derive(Clone, Copy)]
struct Group {
    members: u32,
    stride: u32,
}

impl Group {
    const fn new(members: u32, stride: u32) -> Self {
        Self { members, stride: if stride == 0 { 1 } else { stride } }
    }

    /// Which of its group a rank is.
    const fn place(self, rank: u32) -> u32 {
        rank / self.stride % self.members
    }

    /// The member at this place of the group of `rank`.
    const fn at(self, rank: u32, place: u32) -> u32 {
        rank - self.place(rank) * self.stride + place * self.stride
    }

    const fn next(self, rank: u32) -> u32 {
        self.at(rank, (self.place(rank) + 1) % self.members)
    }

    const fn is_last(self, rank: u32) -> bool {
        self.place(rank) + 1 == self.members
    }

    fn others(self, rank: u32, to: &mut dyn FnMut(u32)) {
        let own = self.place(rank);
        (0..self.members).filter(|place| *place != own).for_each(|place| to(self.at(rank, place)));
    }

    fn all(self, rank: u32, to: &mut dyn FnMut(u32)) {
        (0..self.members).for_each(|place| to(self.at(rank, place)));
    }

    /// To the parents in two trees: in the one each odd member is a leaf, the other is its mirror image, or where the members are odd in
    /// number, as far on as by one (Sanders et al., 2009; NCCL).
    fn parents(self, rank: u32, to: &mut dyn FnMut(u32)) {
        let (place, members) = (self.place(rank), self.members);
        if let Some(parent) = parent(place, members) {
            to(self.at(rank, parent));
        }
        let turned = |place: u32| {
            if members.is_multiple_of(2) { members - 1 - place } else { (place + members - 1) % members }
        };
        let back =
            |place: u32| if members.is_multiple_of(2) { members - 1 - place } else { (place + 1) % members };
        if let Some(parent) = parent(turned(place), members) {
            to(self.at(rank, back(parent)));
        }
    }
}

/// The parent of a place in a tree over so many, by its lowest bit.
fn parent(place: u32, members: u32) -> Option<u32> {
    if place == 0 {
        return None;
    }
    let bit = place & place.wrapping_neg();
    let above = (place ^ bit) | (bit << 1);
    Some(if above < members { above } else { place ^ bit })
}

#[cfg(test)]
mod tests {
    use polder_platform::Topology;

    use super::*;
    use crate::step::cost::GroupSpan;
    use crate::step::machine::Machine;
    use crate::step::order::Order;

    /// The last completion of flows of one byte over links of capacity 1, by progressive filling: rates are max-min fair, and are shared
    /// anew whenever a flow ends.
    fn last_completion(flows: &[Vec<(usize, f64)>]) -> f64 {
        let links = flows.iter().flatten().map(|(link, _)| link + 1).max().unwrap_or(0);
        let mut left = vec![1.0; flows.len()];
        let mut now = 0.0;
        loop {
            let mut open: Vec<_> = (0..flows.len()).filter(|flow| left[*flow] > 1e-9).collect();
            if open.is_empty() {
                return now;
            }
            let active = open.clone();
            let (mut rates, mut spare) = (vec![0.0; flows.len()], vec![1.0; links]);
            while !open.is_empty() {
                let mut weights = vec![0.0; links];
                open.iter()
                    .for_each(|flow| flows[*flow].iter().for_each(|(link, part)| weights[*link] += part));
                let shares =
                    (0..links).filter(|link| weights[*link] > 0.0).map(|link| spare[link] / weights[link]);
                let more = shares.fold(f64::INFINITY, f64::min);
                for flow in &open {
                    rates[*flow] += more;
                    flows[*flow].iter().for_each(|(link, part)| spare[*link] -= more * part);
                }
                open.retain(|flow| flows[*flow].iter().all(|(link, _)| spare[*link] > 1e-9));
            }
            let until = active.iter().map(|flow| left[*flow] / rates[*flow]).fold(f64::INFINITY, f64::min);
            active.iter().for_each(|flow| left[*flow] -= rates[*flow] * until);
            now += until;
        }
    }

    /// The same numbers from the same seed.
    fn random(state: &mut u64, below: u32) -> u32 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((*state >> 33) % u64::from(below)) as u32
    }

    fn fabrics() -> Vec<Fabric> {
        let between = Platform::load("nvl72-ndr").unwrap().between.unwrap();
        let topologies = [
            (Topology::SingleHop, 64),
            (Topology::Clos { levels: 2 }, 8),
            (Topology::Clos { levels: 3 }, 4),
            (Topology::Torus { dimensions: [4, 3, 2], endpoints: 2 }, 16),
            (Topology::Dragonfly { endpoints: 2, group: 4, global: 2 }, 16),
        ];
        let of = |(topology, ports)| {
            let mut fabric = between.clone();
            (fabric.topology, fabric.switch.ports) = (topology, ports);
            fabric
        };
        topologies.map(of).into()
    }

    #[test]
    fn the_last_of_equal_flows_ends_when_the_busiest_link_has_carried_all() {
        let mut state = 20260;
        for fabric in fabrics() {
            for links in [1, 2] {
                let fabric = Fabric { links, ..fabric.clone() };
                let endpoints = (fabric.ports() / u64::from(links)).min(16) as u32;
                let routes = Routes::new(&fabric, endpoints);
                for round in 0..20 {
                    let flows: Vec<_> = (0..4 * endpoints)
                        .map(|_| (random(&mut state, endpoints), random(&mut state, endpoints)))
                        .filter(|(from, to)| from != to)
                        .collect();
                    // A flow is spread over the links of its endpoint: each part is a flow of its own.
                    let parts = flows
                        .iter()
                        .flat_map(|(from, to)| (0..links).map(|link| routes.parts(*from, *to, link)));
                    let shared = last_completion(&parts.collect::<Vec<_>>());
                    let counted = routes.short(&flows);
                    assert!(
                        (shared / counted - 1.0).abs() < 1e-6,
                        "{:?} {round}: {shared} {counted}",
                        fabric.topology
                    );
                }
            }
        }
    }

    /// The costs of the same transfers, alone and with all groups at once.
    fn both(platform: &Platform, ranks: u32, pattern: Pattern, span: GroupSpan, bytes: f64) -> [f64; 2] {
        let rack = platform.rack.values().next().unwrap();
        let fill = rack.accelerators.min(ranks);
        let machine = Machine::new(platform, rack, fill, Order::default());
        let flows = Flows::new(platform, rack, fill, ranks, None, None);
        [machine.alone(pattern, span, bytes).sum(), flows.alone(pattern, span, bytes).sum()]
    }

    const PATTERNS: [Pattern; 4] = [Pattern::AllReduce, Pattern::Half, Pattern::AllToAll, Pattern::Send];

    /// Parity: 64 B to 1 GiB, every pattern, inside racks and between them, on fabrics where nothing contends.
    #[test]
    fn without_contention_flows_take_what_the_closed_form_says() {
        let mut compared = 0;
        for (name, racks) in
            [("nvl72-ndr", 8), ("nvl72-cxl", 8), ("nvl72-cxl-wide", 4), ("dgx-h100", 16), ("dgx-a100", 16)]
        {
            let platform = Platform::load(name).unwrap();
            let rack = platform.rack.values().next().unwrap().accelerators;
            let spans = [
                (8, 1, 1, 8),
                (1, racks, 1, rack),
                (8, racks, 1, rack),
                (1, racks / 2, 1, 2 * rack),
                (4, 2, 2, rack),
            ];
            for (inside, between, near, far) in spans {
                let span = GroupSpan { inside, between, near, far };
                for pattern in PATTERNS {
                    for bytes in [6, 10, 14, 18, 22, 26, 30].map(|power| f64::from(1u32 << power)) {
                        let [alone, flows] = both(&platform, racks * rack, pattern, span, bytes);
                        let apart = flows / alone - 1.0;
                        assert!(apart.abs() < 0.02, "{name} {pattern:?} {span:?} {bytes}: {alone} {flows}");
                        compared += 1;
                    }
                }
            }
        }
        assert_eq!(compared, 5 * 5 * 4 * 7);
    }

    /// Spread switch by switch over all that has not failed, flows load the busiest link as their routes do where none has.
    #[test]
    fn a_network_without_failed_links_is_as_busy_as_routes_are() {
        let mut state = 20261;
        let mut compared = 0;
        for fabric in fabrics() {
            // A torus takes one axis after the other, and a dragonfly detours too.
            if !matches!(fabric.topology, Topology::SingleHop | Topology::Clos { .. }) {
                continue;
            }
            for links in [1, 2] {
                let fabric = Fabric { links, ..fabric.clone() };
                let endpoints = (fabric.ports() / u64::from(links)).min(64) as u32;
                let whole = Ways::Whole(Routes::new(&fabric, endpoints));
                let network = Network::new(&fabric, endpoints * links).unwrap();
                network.check_ways(0..endpoints * links).unwrap();
                let each = Ways::Failed(Arc::new(network), links);
                for _ in 0..20 {
                    let flows: Vec<_> = (0..4 * endpoints)
                        .map(|_| (random(&mut state, endpoints), random(&mut state, endpoints)))
                        .filter(|(from, to)| from != to)
                        .collect();
                    let [whole, each] = [whole.busiest(&flows), each.busiest(&flows)];
                    assert!((whole / each - 1.0).abs() < 1e-9, "{:?}: {whole} {each}", fabric.topology);
                    compared += 1;
                }
            }
        }
        assert_eq!(compared, 3 * 2 * 20);
    }

    #[test]
    fn a_failed_link_slows_the_leaf_that_has_one_less_and_a_leaf_without_links_is_refused() {
        let mut fabric = fabrics().remove(1);
        fabric.links = 1;
        let half = fabric.switch.ports / 2;
        let mut network = Network::new(&fabric, 4 * half).unwrap();
        // All endpoints of the first leaf send to the second.
        let flows: Vec<_> = (0..half).map(|port| (port, port + half)).collect();
        assert_eq!(network.busiest(&flows).unwrap(), 1.0);
        let spines = network.switches() - half;
        for failed in 1..=half {
            network.fail(0, spines + failed - 1).unwrap();
            match failed < half {
                true => {
                    network.check_ways(0..4 * half).unwrap();
                    let expected = f64::from(half) / f64::from(half - failed);
                    assert!((network.busiest(&flows).unwrap() - expected).abs() < 1e-9);
                }
                false => {
                    // A leaf at which nothing hangs that sends may be cut off.
                    network.check_ways(half..4 * half).unwrap();
                    let error = network.check_ways(0..4 * half).unwrap_err().to_string();
                    assert!(error.contains("the failed links cut the fabric in two"), "{error}");
                    assert!(network.busiest(&flows).is_err());
                }
            }
        }
    }

    #[test]
    fn a_torus_slows_what_goes_far_and_not_what_goes_to_neighbours() {
        let mut platform = Platform::load("dgx-h100").unwrap();
        let rack = platform.rack.values().next().unwrap().accelerators;
        let between = platform.between.as_mut().unwrap();
        between.links = 1;
        between.topology = Topology::Torus { dimensions: [8, 8, 8], endpoints: rack };
        let rack_kind = platform.rack.values().next().unwrap();
        let flows = Flows::new(&platform, rack_kind, rack, 512 * rack, None, None);
        let slowed = |members, stride| {
            let group = Group::new(members, stride);
            flows.between(|rank, to| to(group.next(rank)), 1, 1.0)
        };
        // Eight endpoints of a switch send over one link to the next switch; half way around the ring four links carry eight each, in
        // two directions.
        assert_eq!(slowed(8, rack), 8.0);
        assert_eq!(slowed(2, 4 * rack), 16.0);
        // The first axis is done: rings along the second and the third.
        assert_eq!([slowed(8, 8 * rack), slowed(8, 64 * rack)], [8.0, 8.0]);
    }

    #[test]
    fn every_member_has_a_parent_in_both_trees_but_for_their_roots_and_is_inside_one_at_most() {
        for members in 2..40 {
            let group = Group::new(members, 3);
            let mut children = [vec![0; members as usize], vec![0; members as usize]];
            let mut edges = 0;
            for place in 0..members {
                for (tree, counts) in children.iter_mut().enumerate() {
                    let turned = if tree == 0 {
                        place
                    } else if members % 2 == 0 {
                        members - 1 - place
                    } else {
                        (place + members - 1) % members
                    };
                    if let Some(parent) = parent(turned, members) {
                        counts[parent as usize] += 1;
                        assert!(counts[parent as usize] <= 2 || parent == 0);
                    }
                }
                group.parents(place * 3, &mut |to| {
                    assert!(to % 3 == 0 && to < 3 * members && to != place * 3);
                    edges += 1;
                });
            }
            assert_eq!(edges, 2 * (members - 1), "{members}");
        }
    }
}
