//! Patterns of traffic on a fabric: which flows each is, and when they end.

use polder_platform::{Cluster, DataError, Fabric, Platform, Topology};
use serde::{Deserialize, Serialize};

use super::flits::{FlitFlow, FlitRun, FlitTiming, follow};
use super::network::{Network, NetworkError, Node, Routing};
use super::sharing::{Flow, finish_times};
use crate::fidelity::Fidelity;
use crate::random::Random;

/// Which accelerators send to which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrafficPattern {
    /// Each sends to one other and receives from one, drawn at random.
    Permutation,
    /// Each sends to the one half of all further on.
    Shift,
    /// All others send to the first.
    Incast,
    /// Each sends to every other.
    AllToAll,
    /// Each sends to the next.
    Ring,
    /// An all-reduce by a ring over all: steps in which each sends its part to the next.
    AllReduce,
}

impl TrafficPattern {
    /// As options have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Permutation => "permutation",
            Self::Shift => "shift",
            Self::Incast => "incast",
            Self::AllToAll => "all-to-all",
            Self::Ring => "ring",
            Self::AllReduce => "all-reduce",
        }
    }

    /// Who sends to whom, of so many.
    fn pairs(self, count: u32, seed: u64) -> Vec<(u32, u32)> {
        match self {
            Self::Permutation => {
                let to = cycle(count, seed);
                (0..count).zip(to).collect()
            }
            Self::Shift => (0..count).map(|from| (from, (from + count / 2) % count)).collect(),
            Self::Incast => (1..count).map(|from| (from, 0)).collect(),
            // Everyone begins with the next, so that no two begin with the same.
            Self::AllToAll => (0..count)
                .flat_map(|from| (1..count).map(move |step| (from, (from + step) % count)))
                .collect(),
            Self::Ring | Self::AllReduce => (0..count).map(|from| (from, (from + 1) % count)).collect(),
        }
    }

    /// How many messages it is.
    const fn messages(self, count: u32) -> u64 {
        let count = count as u64;
        match self {
            Self::Incast => count - 1,
            Self::AllToAll => count * (count - 1),
            _ => count,
        }
    }
}

/// A random permutation of one cycle (Sattolo, 1986), so that nobody sends to itself.
fn cycle(count: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    let mut to: Vec<_> = (0..count).collect();
    for last in (1..count as usize).rev() {
        to.swap(last, (random.bits() % last as u64) as usize);
    }
    to
}

/// What is asked of a fabric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricQuestion {
    /// The machine: a name, or the path of a file.
    pub platform: String,
    /// Kind of rack; the first by name when left out.
    pub rack: Option<String>,
    /// Number of accelerators: those of one rack are on its own fabric, more are on that between racks.
    pub accelerators: u32,
    /// Who sends to whom.
    pub pattern: TrafficPattern,
    /// Bytes of each message; of an all-reduce, what each accelerator has.
    pub message_bytes: f64,
    /// Which of the shortest ways messages take.
    #[serde(default)]
    pub routing: Routing,
    /// Links between two switches that have failed.
    #[serde(default)]
    pub failed: Vec<(u32, u32)>,
    /// What a permutation is drawn from, and damage to flits.
    #[serde(default)]
    pub seed: u64,
    /// How closely messages are looked at: each as if it were alone, as flows, or flit by flit.
    #[serde(default = "flows")]
    pub fidelity: Fidelity,
    /// What flits need beside the platform.
    #[serde(default)]
    pub flits: FlitOptions,
}

const fn flows() -> Fidelity {
    Fidelity::L1
}

/// What flits need that a platform does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlitOptions {
    /// Bytes of each message that are followed; the rest takes what the second half of them took. All of them when left out.
    pub window_bytes: Option<f64>,
    /// Virtual channels of a link; when left out 1 in a Clos, and elsewhere one for each link between switches of the longest way.
    pub channels: Option<u32>,
    /// Flits that the buffer of a channel holds; two round trips when left out.
    pub buffer: Option<u32>,
    /// The part of the flits that arrive damaged.
    pub error_rate: f64,
}

/// Why a pattern cannot be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A file is damaged, or has not what is asked for.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The fabric is no such network.
    #[error("{platform}: {error}")]
    Network {
        /// The machine.
        platform: String,
        /// What is wrong.
        error: NetworkError,
    },
    /// The machine has no kind of rack of that name, or none.
    #[error("{platform} has no rack {rack:?}; it has {known}")]
    NoRack {
        /// The machine.
        platform: String,
        /// What was asked for.
        rack: String,
        /// What there is.
        known: String,
    },
    /// So many accelerators need a fabric that the machine has not.
    #[error(
        "{platform} has no fabric {where_} racks, which {accelerators} accelerators need; its racks have {each}"
    )]
    NoFabric {
        /// The machine.
        platform: String,
        /// `inside` or `between`.
        where_: &'static str,
        /// How many were asked for.
        accelerators: u32,
        /// Of a rack.
        each: u32,
    },
    /// Fewer than two accelerators, or messages of nothing.
    #[error("{what}: expected {expected}, found {found}")]
    Invalid {
        /// Which value.
        what: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// Buffers that wait for each other.
    #[error(
        "{platform}: deadlock with {channels} virtual channels of a link: {left} flits never arrive; these buffers wait for each other: {circle}; give more --virtual-channels"
    )]
    Deadlock {
        /// The machine.
        platform: String,
        /// Virtual channels of a link.
        channels: u32,
        /// Flits that have not arrived.
        left: u64,
        /// The buffers.
        circle: String,
    },
    /// A window in which no steady rate can be seen.
    #[error("window: expected {least} or more, which are {flits} flits on each link of an accelerator")]
    Window {
        /// The least that may be.
        least: String,
        /// Flits on each link.
        flits: u64,
    },
    /// Too many flits to follow each.
    #[error(
        "{pattern} of {accelerators} accelerators takes {hops} steps of flits, more than the {most} that are followed; give a window of {window} of each message, or fidelity L1"
    )]
    TooManyFlits {
        /// Which pattern.
        pattern: &'static str,
        /// Of how many.
        accelerators: u32,
        /// Flits times the links of each.
        hops: u64,
        /// How many may be.
        most: u64,
        /// What of each message would do.
        window: String,
    },
    /// Too many messages to follow each.
    #[error(
        "{pattern} of {accelerators} accelerators is {parts} flows, more than the {most} that are followed one by one; ask for fewer accelerators"
    )]
    TooLong {
        /// Which pattern.
        pattern: &'static str,
        /// Of how many.
        accelerators: u32,
        /// How many flows it is.
        parts: u64,
        /// How many may be.
        most: u64,
    },
}

/// Flows that are followed one by one, at most: some seconds, and some hundred bytes each.
const MOST_FLOWS: u64 = 1 << 22;

/// A message: from which accelerator to which, when its last byte arrives, and how many times longer that is than alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FlowTime {
    /// Which accelerator sends.
    pub from: u32,
    /// Which receives.
    pub to: u32,
    /// When its last byte arrives, in seconds.
    pub end_s: f64,
    /// As a multiple of what it takes alone.
    pub slowdown: f64,
}

/// Quantiles of seconds: of so many parts of the messages, none takes longer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Of half of them.
    pub p50_s: f64,
    /// Of nine in ten.
    pub p90_s: f64,
    /// Of 99 in 100.
    pub p99_s: f64,
    /// Of all.
    pub max_s: f64,
}

/// A link that something crosses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkUse {
    /// Where it begins: `switch N`, or `accelerator N`.
    pub from: String,
    /// Where it ends.
    pub to: String,
    /// Flows that cross it. A message is a flow on each link of its accelerator.
    pub flows: u32,
    /// The part of what it could carry until the last flow ends.
    pub used: f64,
}

/// What comes of a pattern.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FabricAnswer {
    /// The machine.
    pub platform: String,
    /// `inside` or `between` racks.
    pub fabric: &'static str,
    /// What was asked.
    pub question: FabricQuestion,
    /// Of how many steps the pattern is, each as the one that is given; 1 but for an all-reduce.
    pub steps: u32,
    /// Bytes of a message of a step.
    pub step_bytes: f64,
    /// Until the last message of the last step has arrived.
    pub total_s: f64,
    /// Of messages of a step.
    pub seconds: Quantiles,
    /// Bytes a second that reach an accelerator, on average until the last message ends.
    pub bytes_per_s: f64,
    /// What an accelerator's links carry, less what the platform's fit says is never reached.
    pub payload_bytes_per_s: f64,
    /// Every message of a step, by sender.
    pub messages: Vec<FlowTime>,
    /// Links that are crossed, the most used first.
    pub links: Vec<LinkUse>,
    /// The mean use of the links between switches that a message crosses; none where none does.
    pub mean_used_between_switches: Option<f64>,
    /// What was followed flit by flit, with fidelity L2.
    pub flits: Option<FlitCount>,
}

/// What was followed flit by flit, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FlitCount {
    /// Bytes of each message that were followed.
    pub window_bytes: f64,
    /// Flits times the links that each crossed.
    pub flit_hops: u64,
    /// Flits that were damaged and sent again.
    pub replays: u64,
    /// Virtual channels of a link.
    pub channels: u32,
    /// Flits that the buffer of a channel holds.
    pub buffer: u32,
}

/// Follows each message of a pattern over the links of a fabric.
///
/// # Errors
/// When the platform has no such fabric, or the question cannot be computed.
pub fn answer(question: &FabricQuestion) -> Result<FabricAnswer, FabricError> {
    check(question)?;
    let (fabric, reached, scope) = fabric_of(question)?;
    let fabric = &fabric;
    let broken = |error| FabricError::Network { platform: question.platform.clone(), error };
    let count = question.accelerators;
    let parts = question.pattern.messages(count) * u64::from(fabric.links);
    if parts > MOST_FLOWS {
        let (pattern, most) = (question.pattern.name(), MOST_FLOWS);
        return Err(FabricError::TooLong { pattern, accelerators: count, parts, most });
    }
    let ports = u64::from(count) * u64::from(fabric.links);
    let ports = u32::try_from(ports)
        .map_err(|_| broken(NetworkError::TooMany { asked: ports, ports: fabric.ports() }))?;
    let mut network = Network::new(fabric, ports).map_err(broken)?;
    for (one, other) in &question.failed {
        network.fail(*one, *other).map_err(broken)?;
    }
    let (steps, step_bytes) = match question.pattern {
        TrafficPattern::AllReduce => (2 * (count - 1), question.message_bytes / f64::from(count)),
        _ => (1, question.message_bytes),
    };
    let rate = fabric.link.payload().value() * reached;
    let bytes = step_bytes / f64::from(fabric.links);
    let pairs = question.pattern.pairs(count, question.seed);
    let mut ways = Vec::with_capacity(parts as usize);
    for (from, to) in &pairs {
        for link in 0..fabric.links {
            let [from, to] = [from, to].map(|it| it * fabric.links + link);
            ways.push(network.route(from, to, question.routing).map_err(broken)?);
        }
    }
    let step_s = if steps > 1 { fabric.software.step.value() } else { 0.0 };
    let PartTimes { ends, alone, flits } = match question.fidelity {
        Fidelity::L2 => {
            let flits = Flits { question, fabric, reached, network: &network, bytes, step_s };
            flits.times(&ways)?
        }
        fidelity => flow_times(fabric, fidelity, rate, bytes, step_s, &network, ways),
    };
    let most = |part: &[f64]| part.iter().copied().fold(0.0, f64::max);
    let messages: Vec<_> = pairs
        .iter()
        .zip(ends.chunks(fabric.links as usize).zip(alone.chunks(fabric.links as usize)))
        .map(|((from, to), (ends, alone))| {
            let end_s = most(ends);
            FlowTime { from: *from, to: *to, end_s, slowdown: end_s / most(alone) }
        })
        .collect();
    let seconds = quantiles(&messages);
    let total_s =
        seconds.max_s * f64::from(steps) + fabric.software.call.value() * f64::from(u8::from(steps > 1));
    let receivers = if question.pattern == TrafficPattern::Incast { 1.0 } else { f64::from(count) };
    let links = uses(&network, fabric.links, bytes, rate * seconds.max_s);
    Ok(FabricAnswer {
        platform: question.platform.clone(),
        fabric: scope,
        question: question.clone(),
        steps,
        step_bytes,
        total_s,
        seconds,
        bytes_per_s: step_bytes * messages.len() as f64 / receivers / seconds.max_s,
        payload_bytes_per_s: rate * f64::from(fabric.links),
        messages,
        mean_used_between_switches: mean_between(&network, bytes, rate * seconds.max_s),
        links,
        flits,
    })
}

/// When each part of each message ends, a part a link of an accelerator; and when it would end alone.
struct PartTimes {
    ends: Vec<f64>,
    alone: Vec<f64>,
    flits: Option<FlitCount>,
}

/// By flows that share links, or each as if it were alone.
fn flow_times(
    fabric: &Fabric,
    fidelity: Fidelity,
    rate: f64,
    bytes: f64,
    step_s: f64,
    network: &Network,
    ways: Vec<Vec<u32>>,
) -> PartTimes {
    let flow = |links: Vec<u32>| {
        let start_s = fabric.latency_over((links.len() - 1) as f64).value() + step_s;
        Flow { links, bytes, start_s }
    };
    let flows: Vec<_> = ways.into_iter().map(flow).collect();
    let alone: Vec<_> = flows.iter().map(|it| it.start_s + bytes / rate).collect();
    let ends = match fidelity {
        Fidelity::L0 => alone.clone(),
        _ => finish_times(&vec![rate; network.len()], &flows),
    };
    PartTimes { ends, alone, flits: None }
}

/// Flits times their links that are followed at most: a minute.
const MOST_FLIT_HOPS: u64 = 500_000_000;
/// Flits of a window on each link, at least: fewer say nothing of a steady rate.
const LEAST_WINDOW: u64 = 8;

/// A pattern flit by flit.
struct Flits<'a> {
    question: &'a FabricQuestion,
    fabric: &'a Fabric,
    /// The part of the payload that collectives reach.
    reached: f64,
    network: &'a Network,
    /// Of each part of a message.
    bytes: f64,
    step_s: f64,
}

impl Flits<'_> {
    fn timing(&self, longest: u32) -> FlitTiming {
        let (fabric, options) = (self.fabric, &self.question.flits);
        let flit_s = fabric.link.flit.bytes.value() / fabric.link.raw().value();
        let interval_s = flit_s / self.reached;
        let (propagation_s, switch_s) = (fabric.link.propagation.value(), fabric.switch.latency.value());
        // Sent and across, through the switch, sent on, and the way back of the credit.
        let round = (2.0 * (flit_s + propagation_s) + switch_s) / interval_s;
        let channels = match fabric.topology {
            Topology::SingleHop | Topology::Clos { .. } => 1,
            _ => longest.saturating_sub(2).max(1),
        };
        FlitTiming {
            flit_s,
            interval_s,
            propagation_s,
            switch_s,
            buffer: options.buffer.unwrap_or((2.0 * round).ceil() as u32),
            channels: options.channels.unwrap_or(channels),
            error_rate: options.error_rate,
            seed: self.question.seed,
        }
    }

    /// What a flit carries for the program.
    fn payload(&self) -> f64 {
        self.fabric.link.flit.payload.value() * self.fabric.link.packet.efficiency()
    }

    /// When a port can send the first flit of a part: once software has run and all bytes of the flit are there, at the link's rate.
    fn start_s(&self, bytes: f64) -> f64 {
        let rate = self.fabric.link.payload().value() * self.reached;
        self.fabric.software.message.value() + self.step_s + bytes.min(self.payload()) / rate
    }

    /// When the last of so many bytes of each part has arrived.
    fn follow(&self, timing: &FlitTiming, ways: &[Vec<u32>], bytes: f64) -> Result<FlitRun, FabricError> {
        let flits = (bytes / self.payload()).ceil() as u64;
        let start_s = self.start_s(bytes);
        // The channel of a link is how many links between switches lie before it: so no circle of channels can wait.
        let flow = |links: &Vec<u32>| {
            let channel = |place: usize| (place.saturating_sub(1) as u32).min(timing.channels - 1);
            let way = links.iter().enumerate().map(|(place, link)| (*link, channel(place))).collect();
            FlitFlow { way, flits, start_s }
        };
        let flows: Vec<_> = ways.iter().map(flow).collect();
        follow(timing, self.network.len(), &flows).map_err(|deadlock| FabricError::Deadlock {
            platform: self.question.platform.clone(),
            channels: timing.channels,
            left: deadlock.left,
            circle: deadlock.named(|link| self.network.ends(link)),
        })
    }

    fn times(&self, ways: &[Vec<u32>]) -> Result<PartTimes, FabricError> {
        let links = f64::from(self.fabric.links);
        let window = self.question.flits.window_bytes.map_or(self.bytes, |it| (it / links).min(self.bytes));
        let is_cut = window < self.bytes;
        let crossed: u64 = ways.iter().map(|it| it.len() as u64).sum();
        let flits = |bytes: f64| (bytes / self.payload()).ceil() as u64;
        if is_cut && flits(window) < LEAST_WINDOW {
            let least = (LEAST_WINDOW as f64 * self.payload() * links / 1024.0).ceil() as u64;
            return Err(FabricError::Window { least: format!("{least} KiB"), flits: LEAST_WINDOW });
        }
        let hops = crossed.saturating_mul(flits(window) + if is_cut { flits(0.5 * window) } else { 0 });
        if hops > MOST_FLIT_HOPS {
            let most = MOST_FLIT_HOPS / 2 / crossed;
            // Both halves of the window are followed.
            let window = most as f64 * self.payload() * links;
            return Err(FabricError::TooManyFlits {
                pattern: self.question.pattern.name(),
                accelerators: self.question.accelerators,
                hops,
                most: MOST_FLIT_HOPS,
                window: format!("{} KiB", ((window / 1024.0) as u64).max(1)),
            });
        }
        let longest = ways.iter().map(|it| it.len() as u32).max().unwrap_or(1);
        let timing = self.timing(longest);
        let whole = self.follow(&timing, ways, window)?;
        let mut count = FlitCount {
            window_bytes: window * links,
            flit_hops: whole.flit_hops,
            replays: whole.replays,
            channels: timing.channels,
            buffer: timing.buffer,
        };
        let mut ends = whole.ends_s;
        if is_cut {
            let half = self.follow(&timing, ways, 0.5 * window)?;
            count.flit_hops += half.flit_hops;
            count.replays += half.replays;
            let [all, halves] = [window, 0.5 * window].map(|bytes| flits(bytes) as f64);
            let rest = flits(self.bytes) as f64 - all;
            for (end, half) in ends.iter_mut().zip(half.ends_s) {
                *end += (*end - half) / (all - halves) * rest;
            }
        }
        let FlitTiming { flit_s, interval_s, propagation_s, switch_s, .. } = timing;
        let sent = flit_s + (flits(self.bytes) as f64 - 1.0) * interval_s;
        let alone = |links: &Vec<u32>| {
            let switches = (links.len() - 1) as f64;
            let wires = (switches + 1.0) * propagation_s;
            self.start_s(self.bytes) + sent + wires + switches * (switch_s + flit_s)
        };
        Ok(PartTimes { ends, alone: ways.iter().map(alone).collect(), flits: Some(count) })
    }
}

fn check(question: &FabricQuestion) -> Result<(), FabricError> {
    if question.accelerators < 2 {
        let found = question.accelerators.to_string();
        return Err(FabricError::Invalid { what: "accelerators", expected: "2 or more", found });
    }
    let FlitOptions { window_bytes, channels, buffer, error_rate } = question.flits;
    let is_wrong = |bytes: f64, least: f64| !(bytes.is_finite() && bytes >= least);
    for (what, bytes, least, expected) in [
        ("message", question.message_bytes, 1.0, "1 B or more"),
        ("window", window_bytes.unwrap_or(f64::MAX), 1.0, "1 B or more"),
    ] {
        if is_wrong(bytes, least) {
            return Err(FabricError::Invalid { what, expected, found: format!("{bytes} B") });
        }
    }
    let (what, expected) = ("virtual channels", "1 to 64");
    if let Some(found) = channels.filter(|it| !(1..=64).contains(it)) {
        return Err(FabricError::Invalid { what, expected, found: found.to_string() });
    }
    let (what, expected) = ("buffer", "1 flit or more");
    if let Some(found) = buffer.filter(|it| *it == 0) {
        return Err(FabricError::Invalid { what, expected, found: found.to_string() });
    }
    // A link of which half is damaged sends each flit twice.
    if is_wrong(error_rate, 0.0) || error_rate > 0.5 {
        let found = error_rate.to_string();
        return Err(FabricError::Invalid { what: "error rate", expected: "0 to 0.5", found });
    }
    if question.fidelity != Fidelity::L2 && question.flits != FlitOptions::default() {
        let (what, expected) = ("fidelity", "L2, which windows, channels, buffers and error rates are for");
        return Err(FabricError::Invalid { what, expected, found: question.fidelity.name().into() });
    }
    Ok(())
}

/// The fabric that joins the accelerators, the part of its payload that is reached, and where it is. A cluster of SimGrid is one rack, of
/// which hosts stand for accelerators.
fn fabric_of(question: &FabricQuestion) -> Result<(Fabric, f64, &'static str), FabricError> {
    let name = &question.platform;
    if !Cluster::is_named(name) {
        let platform = Platform::load(name)?;
        let (fabric, reached, scope) = chosen(&platform, question)?;
        return Ok((fabric.clone(), reached, scope));
    }
    let Cluster { hosts, fabric, name: cluster } = Cluster::load(name)?;
    if let Some(rack) = question.rack.as_ref().filter(|it| **it != cluster) {
        return Err(FabricError::NoRack { platform: name.clone(), rack: rack.clone(), known: cluster });
    }
    if question.accelerators > hosts {
        let problem =
            format!("expected {hosts} hosts of cluster {cluster} at most, found {}", question.accelerators);
        return Err(DataError::new(name, "radical", problem).into());
    }
    if question.fidelity == Fidelity::L2 {
        let (what, expected) = ("fidelity", "L0 or L1, because a platform of SimGrid has no flits");
        return Err(FabricError::Invalid { what, expected, found: question.fidelity.name().into() });
    }
    Ok((fabric, 1.0, "inside"))
}

/// The same of a platform.
fn chosen<'a>(
    platform: &'a Platform,
    question: &FabricQuestion,
) -> Result<(&'a Fabric, f64, &'static str), FabricError> {
    let found = match &question.rack {
        Some(name) => platform.rack.get(name),
        None => platform.rack.values().next(),
    };
    let Some(rack) = found else {
        let known = platform.rack.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Err(FabricError::NoRack {
            platform: question.platform.clone(),
            rack: question.rack.clone().unwrap_or_default(),
            known: if known.is_empty() { "none".into() } else { known },
        });
    };
    let is_inside = question.accelerators <= rack.accelerators;
    let (fabric, reached, scope) = match is_inside {
        true => (rack.fabric.as_ref(), rack.accelerator.fitted.inside, "inside"),
        false => (platform.between.as_ref(), rack.accelerator.fitted.between, "between"),
    };
    let fabric = fabric.ok_or_else(|| FabricError::NoFabric {
        platform: question.platform.clone(),
        where_: scope,
        accelerators: question.accelerators,
        each: rack.accelerators,
    })?;
    Ok((fabric, reached, scope))
}

fn quantiles(messages: &[FlowTime]) -> Quantiles {
    let mut ends: Vec<_> = messages.iter().map(|it| it.end_s).collect();
    ends.sort_by(f64::total_cmp);
    let at = |part: f64| ends[((part * ends.len() as f64).ceil() as usize).clamp(1, ends.len()) - 1];
    Quantiles { p50_s: at(0.5), p90_s: at(0.9), p99_s: at(0.99), max_s: at(1.0) }
}

/// What each crossed link carried of what it could.
fn uses(network: &Network, each: u32, bytes: f64, could: f64) -> Vec<LinkUse> {
    let named = |node| match node {
        Node::Port(port) => format!("accelerator {}", port / each),
        Node::Switch(switch) => format!("switch {switch}"),
    };
    let mut found: Vec<_> = (0..network.len() as u32)
        .map(|link| (link, network.crossings(link)))
        .filter(|(_, flows)| *flows > 0)
        .collect();
    found.sort_by_key(|(link, flows)| (std::cmp::Reverse(*flows), *link));
    found
        .into_iter()
        .map(|(link, flows)| {
            let (from, to) = network.ends(link);
            LinkUse { from: named(from), to: named(to), flows, used: f64::from(flows) * bytes / could }
        })
        .collect()
}

fn mean_between(network: &Network, bytes: f64, could: f64) -> Option<f64> {
    let (mut flows, mut links) = (0u64, 0u64);
    for link in 0..network.len() as u32 {
        let crossed = network.crossings(link);
        if crossed > 0 && matches!(network.ends(link), (Node::Switch(_), Node::Switch(_))) {
            flows += u64::from(crossed);
            links += 1;
        }
    }
    (links > 0).then(|| flows as f64 * bytes / could / links as f64)
}
