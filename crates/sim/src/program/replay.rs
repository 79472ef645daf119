//! Follows all ranks of a program at once. A message takes the port of its host, the way, and the port of the other host, each in turn with the
//! messages that came there before it. Between hosts it can be followed flit by flit instead: messages that meet then take turns by flits.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

use polder_platform::{MessagePath, Server};
use serde::{Deserialize, Serialize};

use super::wires::{OnWire, Wires};
use super::{HostLinks, Operation, UNWAITED};
use crate::contention::FlowEvent;
use crate::message;

/// What a message takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Way {
    /// Seconds of an empty message.
    pub latency_s: f64,
    /// Bytes a second of one message that is alone.
    pub bytes_per_s: f64,
    /// Bytes a second of all messages of a host, in each direction.
    pub port_bytes_per_s: f64,
    /// Bytes of a piece that goes at once, and seconds that each further piece takes.
    pub piece: Option<(f64, f64)>,
}

impl Way {
    /// A way of a latency and a bandwidth, which the ranks of a host share.
    #[must_use]
    pub const fn new(latency_s: f64, bytes_per_s: f64) -> Self {
        Self { latency_s, bytes_per_s, port_bytes_per_s: bytes_per_s, piece: None }
    }

    /// A path between servers of a platform.
    ///
    /// # Panics
    /// When `path` is over nothing that `server` has: no path of its own is.
    #[must_use]
    pub fn of(server: &Server, path: &MessagePath) -> Self {
        let latency = |bytes| message::latency(server, path, bytes, 1.0);
        let latency_s = latency(0.0);
        // Within a piece the time is straight over the bytes.
        let piece = path.cell.map(|cell| cell.value());
        let near = piece.map_or(1e6, |piece| piece / 2.0);
        let each = (latency(near) - latency_s) / near;
        let further = piece.map(|piece| (piece, (latency(piece) - latency_s - piece * each).max(0.0)));
        let port_bytes_per_s = message::throughput(server, path, 1e12, 1e9);
        Self { latency_s, bytes_per_s: 1.0 / each, port_bytes_per_s, piece: further }
    }

    /// Seconds of a message that is alone.
    #[must_use]
    pub fn seconds(&self, bytes: u64) -> f64 {
        let bytes = bytes as f64;
        let further = self.piece.map_or(0.0, |(piece, seconds)| (bytes / piece).floor() * seconds);
        self.latency_s + further + bytes / self.bytes_per_s
    }

    /// The same where latency and bandwidth are multiplied.
    fn times(self, SizeFactor { latency, bandwidth, .. }: SizeFactor) -> Self {
        Self {
            latency_s: self.latency_s * latency,
            bytes_per_s: self.bytes_per_s * bandwidth,
            port_bytes_per_s: self.port_bytes_per_s * bandwidth,
            piece: self.piece,
        }
    }

    /// Seconds that it has a port to itself.
    fn busy(&self, bytes: u64) -> f64 {
        bytes as f64 / self.port_bytes_per_s
    }
}

/// What latency and bandwidth of long enough messages are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeFactor {
    /// It is for messages of more bytes.
    pub above: u64,
    /// Of an empty message's seconds.
    pub latency: f64,
    /// Of bytes a second.
    pub bandwidth: f64,
}

/// Where ranks run, and what joins them.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// The host of each rank.
    pub hosts: Vec<u32>,
    /// Between two ranks of a host.
    pub inside: Way,
    /// Between two hosts.
    pub between: Way,
    /// What both are multiplied by: the first factor that is for a message's size. None for the ways as they are.
    pub factors: Vec<SizeFactor>,
}

impl Network {
    /// The ways of a message, inside a host and between two.
    fn ways(&self, bytes: u64) -> [Way; 2] {
        let ways = [self.inside, self.between];
        match self.factors.iter().find(|it| bytes > it.above) {
            Some(factor) => ways.map(|it| it.times(*factor)),
            None => ways,
        }
    }
}

/// What a rank took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RankTime {
    /// Until it has ended.
    pub total_s: f64,
    /// Computing.
    pub compute_s: f64,
}

/// What a program took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replayed {
    /// Each rank.
    pub ranks: Vec<RankTime>,
    /// Until the last has ended.
    pub total_s: f64,
    /// Messages between hosts.
    pub messages: u64,
    /// Bytes between hosts.
    pub bytes: u64,
    /// Flits times the links that each crossed, if messages between hosts were followed flit by flit.
    pub flit_hops: Option<u64>,
}

/// Why a program cannot be followed to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A message goes to, or comes from, a rank that is not there.
    #[error(
        "rank {rank} has a message with rank {other}, and there are {ranks} ranks; a trace needs the files of all"
    )]
    NoRank {
        /// Which.
        rank: usize,
        /// The other.
        other: u32,
        /// How many there are.
        ranks: usize,
    },
    /// A rank waits for ever.
    #[error("rank {rank} waits for a message of rank {from} with tag {tag}, which is never sent")]
    Waits {
        /// Which.
        rank: usize,
        /// The sender.
        from: u32,
        /// The tag; -1 of a collective.
        tag: i64,
    },
    /// A wait for nothing.
    #[error("rank {rank} waits for request {request}, which nothing has begun")]
    NoRequest {
        /// Which.
        rank: usize,
        /// The request.
        request: u32,
    },
}

/// Messages of one rank to another with one tag, in order.
#[derive(Default)]
struct Channel {
    /// Of each message, once it is known.
    arrivals: Vec<Option<f64>>,
    /// Receives so far.
    posted: usize,
    /// Who waits for which message.
    waiter: Option<(usize, usize)>,
}

/// When the bytes of a message have left the host.
#[derive(Clone, Copy)]
enum Left {
    /// Then.
    At(f64),
    /// When the wires say so of this message.
    OnWire(usize),
}

#[derive(Clone, Copy)]
enum PendingRequest {
    Sent(Left),
    Receive { channel: usize, index: usize },
}

#[derive(Default)]
struct Rank {
    clock: f64,
    compute_s: f64,
    next: usize,
    begun: BTreeMap<u32, PendingRequest>,
}

/// A rank that can go on, the earliest first.
#[derive(PartialEq)]
struct Ready(f64, usize);

impl Eq for Ready {}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ready {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

/// When ports are free again.
#[derive(Clone, Copy, Default)]
struct Ports {
    out: f64,
    into: f64,
    inside: f64,
}

struct Replay<'a> {
    programs: &'a [Vec<Operation>],
    network: &'a Network,
    ranks: Vec<Rank>,
    ports: Vec<Ports>,
    names: BTreeMap<(u32, u32, i64), usize>,
    channels: Vec<Channel>,
    ready: BinaryHeap<Reverse<Ready>>,
    messages: u64,
    bytes: u64,
    /// Whether each message has ports to itself.
    is_alone: bool,
    /// Messages between hosts, if they are followed flit by flit.
    wires: Option<Wires>,
}

/// What messages do that meet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Meeting {
    /// Nothing: each has the ports of its hosts to itself.
    Alone,
    /// One waits for the other at ports.
    InTurn,
    /// Between hosts they take turns by flits over these links; inside a host one waits for the other.
    ByFlits(HostLinks),
}

/// Follows a program from the first operation of each rank, all at time 0, to the last. Messages wait for each other at ports.
///
/// # Errors
/// When a rank waits for what never comes.
///
/// # Panics
/// When the network has not a host for each rank.
pub fn replay(programs: &[Vec<Operation>], network: &Network) -> Result<Replayed, ReplayError> {
    replay_over(programs, network, Meeting::InTurn)
}

/// The same, where messages meet so.
///
/// # Errors
/// As [`replay`].
///
/// # Panics
/// As [`replay`].
pub fn replay_over(
    programs: &[Vec<Operation>],
    network: &Network,
    meeting: Meeting,
) -> Result<Replayed, ReplayError> {
    assert_eq!(programs.len(), network.hosts.len(), "each rank has a host");
    let hosts = network.hosts.iter().max().map_or(0, |last| *last as usize + 1);
    let mut all = Replay {
        programs,
        network,
        ranks: programs.iter().map(|_| Rank::default()).collect(),
        ports: vec![Ports::default(); hosts],
        names: BTreeMap::new(),
        channels: vec![],
        ready: (0..programs.len()).map(|rank| Reverse(Ready(0.0, rank))).collect(),
        messages: 0,
        bytes: 0,
        is_alone: meeting == Meeting::Alone,
        wires: match meeting {
            Meeting::Alone | Meeting::InTurn => None,
            Meeting::ByFlits(links) => Some(Wires::new(links, hosts as u32)),
        },
    };
    loop {
        let next = all.ready.peek().map(|Reverse(Ready(at, _))| *at);
        // What happens on wires before the next rank goes on may wake another.
        if all.wires.as_mut().is_some_and(|it| it.flits.advance_until(next)) {
            all.handle_wire_events();
            continue;
        }
        let Some(Reverse(Ready(_, rank))) = all.ready.pop() else { break };
        all.step_rank(rank)?;
    }
    all.finish()
}

impl Replay<'_> {
    /// Does the next operation of a rank.
    fn step_rank(&mut self, rank: usize) -> Result<(), ReplayError> {
        let Some(operation) = self.programs[rank].get(self.ranks[rank].next) else { return Ok(()) };
        self.ranks[rank].next += 1;
        match *operation {
            Operation::Compute { seconds } => {
                self.ranks[rank].compute_s += seconds;
                self.ranks[rank].clock += seconds;
            }
            Operation::Send { to, bytes, tag, request } => {
                self.known(rank, to)?;
                let left = self.send(rank, to, bytes, tag);
                match request {
                    None => {
                        self.wait_until_sent(rank, left);
                        return Ok(());
                    }
                    Some(UNWAITED) => {}
                    Some(request) => drop(self.ranks[rank].begun.insert(request, PendingRequest::Sent(left))),
                }
            }
            Operation::Receive { from, tag, request } => {
                self.known(rank, from)?;
                let channel = self.channel(from, rank as u32, tag);
                let index = self.channels[channel].posted;
                self.channels[channel].posted += 1;
                match request {
                    None => {
                        self.wait(rank, channel, index);
                        return Ok(());
                    }
                    Some(request) => {
                        self.ranks[rank].begun.insert(request, PendingRequest::Receive { channel, index });
                    }
                }
            }
            Operation::Wait { request } => match self.ranks[rank].begun.remove(&request) {
                None => return Err(ReplayError::NoRequest { rank, request }),
                Some(PendingRequest::Sent(left)) => {
                    self.wait_until_sent(rank, left);
                    return Ok(());
                }
                Some(PendingRequest::Receive { channel, index }) => {
                    self.wait(rank, channel, index);
                    return Ok(());
                }
            },
        }
        self.ready.push(Reverse(Ready(self.ranks[rank].clock, rank)));
        Ok(())
    }

    fn known(&self, rank: usize, other: u32) -> Result<(), ReplayError> {
        let ranks = self.programs.len();
        if (other as usize) < ranks { Ok(()) } else { Err(ReplayError::NoRank { rank, other, ranks }) }
    }

    fn channel(&mut self, from: u32, to: u32, tag: i64) -> usize {
        let next = self.channels.len();
        let channel = *self.names.entry((from, to, tag)).or_insert(next);
        if channel == next {
            self.channels.push(Channel::default());
        }
        channel
    }

    /// Goes on with the message, or when it comes.
    fn wait(&mut self, rank: usize, channel: usize, index: usize) {
        match self.channels[channel].arrivals.get(index).copied().flatten() {
            Some(arrival) => self.wake(rank, arrival),
            None => self.channels[channel].waiter = Some((rank, index)),
        }
    }

    /// Goes on when the bytes of a message have left the host.
    fn wait_until_sent(&mut self, rank: usize, left: Left) {
        let at = match (left, &mut self.wires) {
            (Left::OnWire(message), Some(wires)) => {
                let sent = &mut wires.messages[message];
                if sent.left.is_none() {
                    sent.waits = Some(rank);
                }
                sent.left
            }
            (Left::At(at), _) => Some(at),
            (Left::OnWire(_), None) => None,
        };
        if let Some(at) = at {
            self.wake(rank, at);
        }
    }

    /// Hears what happened on the wires.
    fn handle_wire_events(&mut self) {
        let Some(wires) = &mut self.wires else { return };
        let news: Vec<_> = wires.flits.news().collect();
        for event in news {
            let Some(wires) = &mut self.wires else { return };
            match event {
                FlowEvent::Left(message, at) => {
                    let message = &mut wires.messages[message as usize];
                    message.left = Some(at);
                    if let Some(rank) = message.waits.take() {
                        self.wake(rank, at);
                    }
                }
                FlowEvent::Arrived(message, at) => {
                    let OnWire { channel, index, later_s, .. } = wires.messages[message as usize];
                    self.arrive(channel, index, at + later_s);
                }
            }
        }
    }

    /// A message of a channel has arrived by then.
    fn arrive(&mut self, channel: usize, index: usize, at: f64) {
        let found = &mut self.channels[channel];
        found.arrivals[index] = Some(at);
        if let Some((waiter, _)) = found.waiter.take_if(|(_, waits_for)| *waits_for == index) {
            self.wake(waiter, at);
        }
    }

    fn wake(&mut self, rank: usize, at: f64) {
        let clock = self.ranks[rank].clock.max(at);
        self.ranks[rank].clock = clock;
        self.ready.push(Reverse(Ready(clock, rank)));
    }

    /// Sends a message; when its bytes have left the host.
    fn send(&mut self, rank: usize, to: u32, bytes: u64, tag: i64) -> Left {
        let hosts = &self.network.hosts;
        let [inside, between] = self.network.ways(bytes);
        let (now, from, into) = (self.ranks[rank].clock, hosts[rank] as usize, hosts[to as usize] as usize);
        let channel = self.channel(rank as u32, to, tag);
        let arrivals = &mut self.channels[channel].arrivals;
        let index = arrivals.len();
        arrivals.push(None);
        if from == into {
            let begin = if self.is_alone { now } else { now.max(self.ports[from].inside) };
            let left = begin + inside.busy(bytes);
            self.ports[from].inside = left;
            self.arrive(channel, index, begin + inside.seconds(bytes));
            return Left::At(left);
        }
        (self.messages, self.bytes) = (self.messages + 1, self.bytes + bytes);
        if let Some(wires) = &mut self.wires {
            let ends = [from as u32, into as u32];
            return Left::OnWire(wires.send(ends, bytes, now, between.seconds(bytes), [channel, index]));
        }
        let busy = between.busy(bytes);
        if self.is_alone {
            self.arrive(channel, index, now + between.seconds(bytes));
            return Left::At(now + busy);
        }
        let begin = now.max(self.ports[from].out);
        self.ports[from].out = begin + busy;
        let alone = begin + between.seconds(bytes);
        // Its last byte goes through the other port once those before it have.
        let arrival = alone.max(self.ports[into].into + busy);
        self.ports[into].into = arrival;
        self.arrive(channel, index, arrival);
        Left::At(begin + busy)
    }

    fn finish(self) -> Result<Replayed, ReplayError> {
        let waits = self.names.iter().filter_map(|((from, _, tag), at)| {
            self.channels[*at].waiter.map(|(rank, _)| ReplayError::Waits { rank, from: *from, tag: *tag })
        });
        let first =
            waits.min_by_key(|error| if let ReplayError::Waits { rank, .. } = error { *rank } else { 0 });
        if let Some(error) = first {
            return Err(error);
        }
        let ranks: Vec<_> = self
            .ranks
            .iter()
            .map(|rank| RankTime { total_s: rank.clock, compute_s: rank.compute_s })
            .collect();
        let total_s = ranks.iter().map(|rank| rank.total_s).fold(0.0, f64::max);
        let flit_hops = self.wires.as_ref().map(|wires| wires.flits.flit_hops());
        Ok(Replayed { ranks, total_s, messages: self.messages, bytes: self.bytes, flit_hops })
    }
}

#[cfg(test)]
mod tests {
    use polder_platform::{Platform, Time};

    use super::*;
    use crate::contention::FlitOptions;
    use crate::program::{Collective, Group};

    const SLOW: Way = Way::new(10e-6, 1e9);
    const FAST: Way = Way::new(1e-6, 10e9);

    fn network(ranks: u32, each: u32) -> Network {
        Network {
            hosts: (0..ranks).map(|rank| rank / each).collect(),
            inside: FAST,
            between: SLOW,
            factors: vec![],
        }
    }

    const fn send(to: u32, bytes: u64) -> Operation {
        Operation::Send { to, bytes, tag: 7, request: None }
    }

    const fn receive(from: u32) -> Operation {
        Operation::Receive { from, tag: 7, request: None }
    }

    #[test]
    fn a_message_between_hosts_takes_the_latency_and_its_bytes() {
        let programs = [vec![send(1, 1_000_000)], vec![receive(0)]];
        let found = replay(&programs, &network(2, 1)).unwrap();
        assert!((found.total_s - 1.01e-3).abs() < 1e-12, "{found:?}");
        assert!((found.ranks[0].total_s - 1e-3).abs() < 1e-12, "the sender goes on when the bytes have left");
        let near = replay(&programs, &network(2, 2)).unwrap();
        assert!((near.total_s - 101e-6).abs() < 1e-12, "{near:?}");
    }

    #[test]
    fn ranks_of_a_host_share_its_port() {
        let programs: Vec<_> = (0..8)
            .map(|rank| if rank < 4 { vec![send(rank + 4, 1_000_000)] } else { vec![receive(rank - 4)] })
            .collect();
        let found = replay(&programs, &network(8, 4)).unwrap();
        assert!((found.total_s - 4.01e-3).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn messages_to_one_host_share_its_port() {
        let mut programs: Vec<_> = (0..4).map(|_| vec![send(4, 1_000_000)]).collect();
        programs.push((0..4).map(receive).collect());
        let found = replay(&programs, &network(5, 1)).unwrap();
        assert!((found.total_s - 4.01e-3).abs() < 1e-12, "{found:?}");
    }

    /// A program over the ways between hosts of cMPI, by each fidelity: each message alone, in turn, and flit by flit.
    fn by_fidelity(programs: &[Vec<Operation>], path: &str) -> [Replayed; 3] {
        let platform = Platform::load("cmpi").unwrap();
        let server = &platform.server["host"];
        over(server, &server.path[path], programs)
    }

    fn over(server: &Server, path: &MessagePath, programs: &[Vec<Operation>]) -> [Replayed; 3] {
        let between = Way::of(server, path);
        let network = Network { between, ..network(programs.len() as u32, 1) };
        let links = HostLinks::of(server, path, &between, &FlitOptions::default()).unwrap();
        let found = [Meeting::Alone, Meeting::InTurn, Meeting::ByFlits(links)]
            .map(|meeting| replay_over(programs, &network, meeting).unwrap());
        assert_eq!(found[2].flit_hops, Some(links.flit_hops(programs, &network.hosts)));
        found
    }

    /// The sender goes on when its own bytes have left, however closely one looks.
    #[test]
    fn a_blocking_send_that_meets_nothing_holds_its_rank_as_long_by_each_fidelity() {
        let compute = Operation::Compute { seconds: 1e-3 };
        for path in ["tcp-ethernet", "roce-smartnic", "two-sided-pool"] {
            let programs = [vec![send(1, 1 << 20), compute], vec![receive(0)]];
            let [alone, turns, flits] = by_fidelity(&programs, path).map(|it| it.ranks[0].total_s);
            assert!(turns > 1.05e-3, "{path}: {turns}");
            for other in [alone, flits] {
                assert!((other / turns - 1.0).abs() < 0.02, "{path}: {alone} {turns} {flits}");
            }
        }
        let near = replay_over(&[vec![send(1, 1_000_000)], vec![receive(0)]], &network(2, 2), Meeting::Alone);
        assert!((near.unwrap().ranks[0].total_s - 100e-6).abs() < 1e-12);
    }

    /// A frame of Ethernet at 1 Gb/s takes longer than software of 1 us.
    #[test]
    fn a_message_takes_the_same_by_each_fidelity_where_a_frame_outlasts_software() {
        let platform = Platform::load("cmpi").unwrap();
        let server = &platform.server["host"];
        let path = MessagePath { message: Time::new(1e-6), ..server.path["tcp-ethernet"].clone() };
        let there = (0..100).flat_map(|_| [send(1, 8), receive(1)]).collect();
        let back = (0..100).flat_map(|_| [receive(0), send(0, 8)]).collect();
        let [alone, turns, flits] = over(server, &path, &[there, back]).map(|it| it.total_s);
        for other in [turns, flits] {
            assert!((other / alone - 1.0).abs() < 0.02, "{alone} {turns} {flits}");
        }
        let path = MessagePath { message: Time::new(0.0), ..path };
        let way = Way::of(server, &path);
        assert!(HostLinks::of(server, &path, &way, &FlitOptions::default()).is_err());
    }

    /// What happens after hours takes as long as at the begin.
    #[test]
    fn a_message_takes_as_long_after_20_000_seconds() {
        let compute = Operation::Compute { seconds: 20_000.0 };
        let programs = [
            vec![send(1, 1 << 20), compute, receive(1), compute, send(1, 1 << 20)],
            vec![receive(0), compute, send(0, 1 << 20), compute, receive(0)],
        ];
        let [alone, _, flits] = by_fidelity(&programs, "roce-smartnic");
        for (alone, flits) in alone.ranks.iter().zip(&flits.ranks) {
            let waits = [alone, flits].map(|it| it.total_s - it.compute_s);
            assert!((waits[1] / waits[0] - 1.0).abs() < 0.02, "{waits:?}");
        }
    }

    #[test]
    fn messages_that_do_not_meet_take_the_same_by_each_fidelity() {
        for path in ["tcp-ethernet", "roce-smartnic", "two-sided-pool"] {
            for bytes in [0, 64, 70_000, 1 << 22] {
                // One blocks until its bytes have left, the other waits for that after a receive.
                let later = Operation::Send { to: 0, bytes, tag: 7, request: Some(1) };
                let programs = [
                    vec![send(1, bytes), receive(1)],
                    vec![receive(0), later, Operation::Wait { request: 1 }],
                ];
                let [alone, turns, flits] = by_fidelity(&programs, path).map(|it| it.total_s);
                for other in [turns, flits] {
                    assert!((other / alone - 1.0).abs() < 0.02, "{path} {bytes}: {alone} {turns} {flits}");
                }
            }
        }
    }

    #[test]
    fn messages_that_meet_at_a_port_end_in_turn_or_together_by_flits() {
        let mut programs: Vec<_> = (0..4).map(|_| vec![send(4, 1 << 20)]).collect();
        programs.push((0..4).map(receive).collect());
        let [alone, turns, flits] = by_fidelity(&programs, "roce-smartnic");
        assert!(turns.total_s > 3.5 * alone.total_s, "{alone:?} {turns:?}");
        assert!((flits.total_s / turns.total_s - 1.0).abs() < 0.05, "{turns:?} {flits:?}");
        // The buffers before the port fill, and credits hold all senders back alike.
        let [first, last] = [&flits.ranks[0], &flits.ranks[3]].map(|it| it.total_s);
        assert!(first > 3.0 * turns.ranks[0].total_s && (first / last - 1.0).abs() < 0.01, "{flits:?}");
    }

    #[test]
    fn a_receive_that_is_begun_before_computing_hides_the_message() {
        let compute = Operation::Compute { seconds: 5e-3 };
        let begun = Operation::Receive { from: 0, tag: 7, request: Some(3) };
        let programs = [vec![send(1, 1_000_000)], vec![begun, compute, Operation::Wait { request: 3 }]];
        let found = replay(&programs, &network(2, 1)).unwrap();
        assert_eq!(found.total_s, 5e-3);
    }

    #[test]
    fn an_all_reduce_of_a_power_of_two_takes_a_step_for_each_doubling() {
        let members: Vec<_> = (0..16).collect();
        let of = |place| Group { members: &members, place }.messages(Collective::AllReduce, 8, 0);
        let programs: Vec<_> = (0..16).map(of).collect();
        let found = replay(&programs, &network(16, 1)).unwrap();
        assert!((found.total_s - 4.0 * (10e-6 + 8e-9)).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn a_message_that_never_comes_is_named() {
        let programs = [vec![], vec![receive(0)]];
        let error = replay(&programs, &network(2, 1)).unwrap_err();
        assert_eq!(error, ReplayError::Waits { rank: 1, from: 0, tag: 7 });
        let error = replay(&[vec![send(5, 1)]], &network(1, 1)).unwrap_err();
        assert_eq!(error, ReplayError::NoRank { rank: 0, other: 5, ranks: 1 });
    }
}
