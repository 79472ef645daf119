//! Patterns of traffic on a fabric: which flows each is, and when they end.

use polder_platform::{Cluster, DataError, Fabric, Platform, quoted};
use serde::{Deserialize, Serialize};

use super::network::{Network, NetworkError, Node, Routing};
use super::transfers::{FlitCount, FlitOptions, MOST_FLOWS, TransferError, TransferTimes, Transfers};
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
    /// All.
    pub const ALL: [Self; 6] =
        [Self::Permutation, Self::Shift, Self::Incast, Self::AllToAll, Self::Ring, Self::AllReduce];

    /// Who sends to whom, in words.
    #[must_use]
    pub const fn about(self) -> &'static str {
        match self {
            Self::Permutation => "Each sends to one other, drawn at random",
            Self::Shift => "Each sends to the one half of all further on",
            Self::Incast => "All send to the first",
            Self::AllToAll => "Each sends to every other",
            Self::Ring => "Each sends to the next",
            Self::AllReduce => "An all-reduce by a ring over all",
        }
    }

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
    #[serde(default = "seed")]
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

const fn seed() -> u64 {
    FabricQuestion::SEED
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
    #[error("{platform} has no {}", missing_rack(rack, known))]
    NoRack {
        /// The machine.
        platform: String,
        /// What was asked for; empty if nothing was.
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
    /// Its messages cannot be followed.
    #[error("{platform}: {error}")]
    Transfers {
        /// The machine.
        platform: String,
        /// Why not.
        error: TransferError,
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

fn missing_rack(rack: &str, known: &str) -> String {
    match rack {
        "" => "racks with accelerators".into(),
        rack => format!("rack \"{}\"; it has {known}", quoted(rack)),
    }
}

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
    /// The part of what it could carry until the last flow ends; nothing in closed form, where each message is alone on its links.
    pub used: Option<f64>,
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
    /// Bytes a second that reach an accelerator, on average until the last message ends; nothing in closed form, where no two messages share
    /// its links.
    pub bytes_per_s: Option<f64>,
    /// What an accelerator's links carry, less what the platform's fit says is never reached.
    pub payload_bytes_per_s: f64,
    /// Every message of a step, by sender.
    pub messages: Vec<FlowTime>,
    /// Links that are crossed, the most used first.
    pub links: Vec<LinkUse>,
    /// The mean use of the links between switches that a message crosses; none where none does, and in closed form.
    pub mean_used_between_switches: Option<f64>,
    /// What was followed flit by flit, with fidelity L2.
    pub flits: Option<FlitCount>,
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
    let transfers = Transfers {
        fabric,
        reached,
        bytes: step_bytes,
        step_s: if steps > 1 { fabric.software.step.value() } else { 0.0 },
        routing: question.routing,
        seed: question.seed,
        fidelity: question.fidelity,
        flits: question.flits,
    };
    let TransferTimes { ends, alone, flits } =
        transfers.times(&mut network, &pairs).map_err(|error| question.refused(error))?;
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
    // In closed form links carry whatever is asked of them, so that no use of them follows.
    let is_shared = question.fidelity != Fidelity::L0;
    let could = is_shared.then_some(rate * seconds.max_s);
    let links = uses(&network, fabric.links, bytes, could);
    Ok(FabricAnswer {
        platform: question.platform.clone(),
        fabric: scope,
        question: question.clone(),
        steps,
        step_bytes,
        total_s,
        seconds,
        bytes_per_s: is_shared.then(|| step_bytes * messages.len() as f64 / receivers / seconds.max_s),
        payload_bytes_per_s: rate * f64::from(fabric.links),
        messages,
        mean_used_between_switches: could.and_then(|could| mean_between(&network, bytes, could)),
        links,
        flits,
    })
}

impl FabricQuestion {
    /// What permutations are drawn from if nothing else is given.
    pub const SEED: u64 = 1;

    fn refused(&self, error: TransferError) -> FabricError {
        let platform = self.platform.clone();
        match error {
            TransferError::Network(error) => FabricError::Network { platform, error },
            error => FabricError::Transfers { platform, error },
        }
    }
}

fn check(question: &FabricQuestion) -> Result<(), FabricError> {
    if question.accelerators < 2 {
        let count = question.accelerators.to_string();
        return Err(FabricError::Invalid { what: "accelerators", expected: "2 or more", found: count });
    }
    let bytes = question.message_bytes;
    if !(bytes.is_finite() && bytes >= 1.0) {
        let (what, expected) = ("message", "1 B or more");
        return Err(FabricError::Invalid { what, expected, found: format!("{bytes} B") });
    }
    question.flits.check(question.fidelity).map_err(|error| question.refused(error))
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
    let rack = match &question.rack {
        Some(name) => platform.rack.get(name),
        None => platform.rack.values().next(),
    };
    let Some(rack) = rack else {
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
fn uses(network: &Network, each: u32, bytes: f64, could: Option<f64>) -> Vec<LinkUse> {
    let named = |node| match node {
        Node::Port(port) => format!("accelerator {}", port / each),
        Node::Switch(switch) => format!("switch {switch}"),
    };
    let mut loaded: Vec<_> = (0..network.len() as u32)
        .map(|link| (link, network.crossings(link)))
        .filter(|(_, flows)| *flows > 0)
        .collect();
    loaded.sort_by_key(|(link, flows)| (std::cmp::Reverse(*flows), *link));
    loaded
        .into_iter()
        .map(|(link, flows)| {
            let (from, to) = network.ends(link);
            let used = could.map(|could| f64::from(flows) * bytes / could);
            LinkUse { from: named(from), to: named(to), flows, used }
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
