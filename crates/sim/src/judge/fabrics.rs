//! What others have published of fabrics and memory, and how far predictions are from it: apart from training steps.

use polder_platform::{
    Bandwidth, Bytes, DataError, FittedTier, Folder, MessagePath, Platform, Server, Time, names, quoted, read,
};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use crate::message;
use crate::step::cost::{CommunicationCosts, GroupSpan, Pattern};
use crate::step::job::Job;
use crate::step::machine::{LinkRates, Machine};

/// A file of `data/fabrics`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    title: String,
    source: String,
    #[serde(default)]
    assumed: Vec<String>,
    #[serde(default)]
    unexplained: Vec<String>,
    row: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    at: String,
    platform: String,
    of: Question,
    published: Claim,
}

/// What is predicted.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum Question {
    /// Of a kind of memory, with so large a part of reads.
    Bandwidth { tier: String, reads: f64 },
    /// Of a load, at this part of the channels' peak.
    Latency {
        tier: String,
        #[serde(default)]
        utilisation: f64,
    },
    /// Of a load, while so much is drawn.
    LatencyUnder { tier: String, drawn: Bandwidth },
    /// Of a line that is written and flushed.
    Flushed { tier: String },
    /// Of one message, between so many processes half of which send.
    Message {
        path: String,
        bytes: Bytes,
        #[serde(default = "two")]
        processes: u32,
    },
    /// Of many messages, between so many processes half of which send.
    Messages { path: String, bytes: Bytes, processes: u32 },
    /// How many times what is predicted of `over` is predicted of `path`: the most of all sizes and numbers of processes between
    /// these, each twice the one before. What "up to" says.
    UpTo { each: Each, path: String, over: String, bytes: [Bytes; 2], processes: [u32; 2] },
    /// Of an empty all-reduce, as a training step has it.
    AllReduce { ranks: u32, nodes: u32 },
    /// Of an empty all-reduce with these latencies of a step, and one of the whole.
    Steps { algorithm: Algorithm, ranks: u32, nodes: u32, whole: Time, inside: Time, between: Time },
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Algorithm {
    /// One ring through all ranks, that enters each node once.
    Ring,
    /// A chain in each node, two trees between nodes.
    Tree,
}

/// What "up to" is about.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Each {
    /// Seconds of one message.
    Message,
    /// Bytes a second of many.
    Messages,
}

const fn two() -> u32 {
    2
}

/// What a publication says.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Claim {
    Judged(Figure),
    Fitted(Figure),
    Same(Figure),
    AtLeast(Figure),
    Exceeds(Question),
    NotJudged { says: Figure, why: String },
}

/// A bandwidth, a time or a number of times.
enum Figure {
    Bandwidth(Bandwidth),
    Time(Time),
    Times(f64),
}

impl<'de> Deserialize<'de> for Figure {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let times =
            || text.strip_suffix(" times")?.parse().ok().filter(|times| *times > 0.0).map(Self::Times);
        let time = || Time::parse(&text).map(Self::Time);
        Bandwidth::parse(&text).map(Self::Bandwidth).or_else(|_| time()).ok().or_else(times).ok_or_else(|| {
            de::Error::custom(format!(
                "expected a bandwidth, a time or a ratio such as \"48 GB/s\", \"269 ns\" or \"3.7 times\", found \"{}\"",
                quoted(&text)
            ))
        })
    }
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Measure {
    /// Bytes a second.
    #[serde(rename = "B/s")]
    Bandwidth,
    /// Seconds.
    #[serde(rename = "s")]
    Time,
    /// One bandwidth or time over another.
    #[serde(rename = "times")]
    Times,
}

/// What a row is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The prediction is judged by it.
    Judged,
    /// A constant is fitted to it.
    Fitted,
    /// The publication's own formula with its own constants, which must come out the same.
    Same,
    /// The prediction is not below it.
    AtLeast,
    /// The prediction exceeds another, which stands in its place.
    Exceeds,
    /// Nothing is judged by it, for the reason that [`FabricRow::why`] gives.
    NotJudged,
}

/// A published figure beside the predicted one, in bytes a second, in seconds or as a ratio.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FabricRow {
    /// What tells it from the others.
    pub name: String,
    /// Where in the publication it stands.
    pub at: String,
    /// The platform that it is of.
    pub platform: String,
    /// What it is for.
    pub role: Role,
    /// What it counts.
    pub measure: Measure,
    /// What was published; of [`Role::Exceeds`], what is predicted of the other.
    pub published: f64,
    /// What is predicted.
    pub simulated: f64,
    /// What is predicted with nothing that was fitted: what data sheets say.
    pub plain: f64,
    /// Why it is not judged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl FabricRow {
    /// Predicted over published, less 1.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.simulated / self.published - 1.0
    }

    /// Of a trend, whether it holds.
    #[must_use]
    pub fn holds(&self) -> Option<bool> {
        match self.role {
            Role::AtLeast => Some(self.simulated >= self.published),
            Role::Exceeds => Some(self.simulated > self.published),
            Role::Judged | Role::Fitted | Role::Same | Role::NotJudged => None,
        }
    }
}

/// A table of published figures, each beside its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FabricTable {
    /// Its name.
    pub table: String,
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// What the publication does not say, or says in two ways.
    pub assumed: Vec<String>,
    /// What the closed form does not explain.
    pub unexplained: Vec<String>,
    /// Its rows.
    pub rows: Vec<FabricRow>,
}

/// What the judged rows of some tables come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PooledFabrics {
    /// Judged rows.
    pub rows: usize,
    /// Mean of the absolute errors.
    pub mean: f64,
    /// The largest.
    pub worst: f64,
    /// The mean with nothing that was fitted.
    pub plain_mean: f64,
    /// Trends.
    pub trends: usize,
    /// Those that hold.
    pub held: usize,
}

impl PooledFabrics {
    /// Pools tables.
    #[must_use]
    pub fn of(tables: &[FabricTable]) -> Self {
        let mut pooled = Self::default();
        for row in tables.iter().flat_map(|table| &table.rows) {
            if let Some(holds) = row.holds() {
                pooled.trends += 1;
                pooled.held += usize::from(holds);
            }
            if row.role == Role::Judged {
                pooled.rows += 1;
                pooled.mean += row.error().abs();
                pooled.worst = pooled.worst.max(row.error().abs());
                pooled.plain_mean += (row.plain / row.published - 1.0).abs();
            }
        }
        let rows = pooled.rows.max(1) as f64;
        Self { mean: pooled.mean / rows, plain_mean: pooled.plain_mean / rows, ..pooled }
    }
}

/// Holds predictions against all tables of fabrics and memory.
///
/// # Errors
/// When a file is damaged, or asks for what its platform does not have.
pub fn validate() -> Result<Vec<FabricTable>, DataError> {
    names(Folder::Fabrics).into_iter().map(table).collect()
}

/// Holds predictions against one table: one that Polder brings along by its name, any other by the path of its file.
///
/// # Errors
/// As [`validate`].
pub fn table(name: &str) -> Result<FabricTable, DataError> {
    let File { title, source, assumed, unexplained, row } = read(Folder::Fabrics, name)?;
    let rows = row.into_iter().map(|entry| entry.held(name)).collect::<Result<_, _>>()?;
    Ok(FabricTable { table: name.into(), title, source, assumed, unexplained, rows })
}

impl Entry {
    fn held(self, table: &str) -> Result<FabricRow, DataError> {
        let Self { name, at, platform, of, published } = self;
        let wrong =
            |key: &str, problem: String| DataError::new(table, &format!("row {name}: {key}"), problem);
        let machine = Platform::load(&platform)?;
        let predict = |key: &str, question: &Question, machine: &Platform| {
            question.predict(machine).map_err(|(at, problem)| wrong(&format!("{key}.{at}"), problem))
        };
        let simulated = predict("of", &of, &machine)?;
        let plain = predict("of", &of, &without_fits(machine.clone()))?;
        let mut why = None;
        let (role, value, measure) = match published {
            Claim::NotJudged { says, why: reason } => {
                why = Some(reason);
                (Role::NotJudged, says.value(), says.measure())
            }
            Claim::Judged(figure) => (Role::Judged, figure.value(), figure.measure()),
            Claim::Fitted(figure) => (Role::Fitted, figure.value(), figure.measure()),
            Claim::Same(figure) => (Role::Same, figure.value(), figure.measure()),
            Claim::AtLeast(figure) => (Role::AtLeast, figure.value(), figure.measure()),
            Claim::Exceeds(other) => {
                (Role::Exceeds, predict("published.exceeds", &other, &machine)?, other.measure())
            }
        };
        if measure != of.measure() {
            let expected = match of.measure() {
                Measure::Time => "a time",
                Measure::Bandwidth => "a bandwidth",
                Measure::Times => "a ratio",
            };
            return Err(wrong("published", format!("expected {expected}, as what is predicted is one")));
        }
        Ok(FabricRow { name, at, platform, role, measure, published: value, simulated, plain, why })
    }
}

impl Figure {
    const fn value(&self) -> f64 {
        match self {
            Self::Bandwidth(bandwidth) => bandwidth.value(),
            Self::Time(time) => time.value(),
            Self::Times(times) => *times,
        }
    }

    const fn measure(&self) -> Measure {
        match self {
            Self::Bandwidth(_) => Measure::Bandwidth,
            Self::Time(_) => Measure::Time,
            Self::Times(_) => Measure::Times,
        }
    }
}

impl Question {
    const fn measure(&self) -> Measure {
        match self {
            Self::Bandwidth { .. } | Self::Messages { .. } => Measure::Bandwidth,
            Self::UpTo { .. } => Measure::Times,
            _ => Measure::Time,
        }
    }

    /// Bytes a second or seconds; what is wrong otherwise, with the key.
    fn predict(&self, platform: &Platform) -> Result<f64, (&'static str, String)> {
        let memory = |name: &str| {
            platform.tier(name).ok_or_else(|| {
                ("tier", format!("expected a tier of the platform, found \"{}\"", quoted(name)))
            })
        };
        match self {
            Self::Bandwidth { reads, .. } if !(0.0..=1.0).contains(reads) => {
                Err(("reads", format!("expected a part from 0 to 1, found {reads}")))
            }
            Self::Bandwidth { tier, reads } => Ok(memory(tier)?.bandwidth(*reads)),
            Self::Latency { utilisation, .. } if !(0.0..1.0).contains(utilisation) => {
                Err(("utilisation", format!("expected a part below 1, found {utilisation}")))
            }
            Self::Latency { tier, utilisation } => Ok(memory(tier)?.loaded_latency(*utilisation)),
            Self::LatencyUnder { tier, drawn } => {
                let (memory, drawn) = (memory(tier)?, *drawn);
                match drawn < memory.peak() {
                    true => Ok(memory.loaded_latency(drawn.value() / memory.peak().value())),
                    false => Err(("drawn", format!("expected less than {}, found {drawn}", memory.peak()))),
                }
            }
            Self::Flushed { tier } => {
                let flushed = memory(tier)?.flushed;
                flushed
                    .map(Time::value)
                    .ok_or_else(|| ("tier", format!("expected {tier} with the key flushed")))
            }
            Self::Message { path, bytes, processes } => {
                let (server, path) = way(platform, path)?;
                Ok(message::latency(server, path, bytes.value(), senders(*processes)?))
            }
            Self::Messages { path, bytes, processes } => {
                let (server, path) = way(platform, path)?;
                Ok(message::throughput(server, path, bytes.value(), senders(*processes)?))
            }
            Self::UpTo { each, path, over, bytes, processes } => {
                let (sizes, counts) =
                    (doubling_steps("bytes", bytes.map(Bytes::value))?, processes.map(f64::from));
                let mut most = 0.0;
                for processes in doubling_steps("processes", counts)? {
                    let senders = senders(processes as u32)?;
                    for bytes in &sizes {
                        let of = |path: &str| {
                            let (server, path) = way(platform, path)?;
                            Ok(match each {
                                Each::Message => message::latency(server, path, *bytes, senders),
                                Each::Messages => message::throughput(server, path, *bytes, senders),
                            })
                        };
                        most = f64::max(most, of(path)? / of(over)?);
                    }
                }
                Ok(most)
            }
            Self::AllReduce { ranks, nodes } => {
                let inside = evenly(*ranks, *nodes)?;
                if platform.rack.is_empty() {
                    return Err(("kind", "expected a platform with accelerators".into()));
                }
                let job = Job::new(platform).with_fill(inside).map_err(|why| ("ranks", why.to_string()))?;
                let machine = Machine::new(platform, job.rack(), inside, job.order());
                let span = GroupSpan { inside, between: *nodes, near: 1, far: inside };
                Ok(machine.alone(Pattern::AllReduce, span, 0.0).sum())
            }
            Self::Steps { algorithm, ranks, nodes, whole, inside, between } => {
                let each = evenly(*ranks, *nodes)?;
                let [inside, between] = [inside, between].map(|step| LinkRates::of(step.value()));
                Ok(whole.value()
                    + match algorithm {
                        Algorithm::Ring => {
                            2.0 * (inside.ring(ranks - nodes + 1, 0.0) + between.ring(*nodes, 0.0))
                        }
                        Algorithm::Tree => 2.0 * inside.ring(each, 0.0) + between.trees(*nodes, 0.0),
                    })
            }
        }
    }
}

/// The first server that has a path of this name, with it.
fn way<'a>(
    platform: &'a Platform,
    name: &str,
) -> Result<(&'a Server, &'a MessagePath), (&'static str, String)> {
    let found = platform.server.values().find_map(|server| Some((server, server.path.get(name)?)));
    found.ok_or_else(|| ("path", format!("expected a path of the platform, found \"{}\"", quoted(name))))
}

/// From the first on, each twice the one before, to the last at most.
fn doubling_steps(key: &'static str, [first, last]: [f64; 2]) -> Result<Vec<f64>, (&'static str, String)> {
    match first >= 1.0 && first <= last {
        true => {
            Ok(std::iter::successors(Some(first), |it| Some(2.0 * it)).take_while(|it| *it <= last).collect())
        }
        false => Err((key, format!("expected from 1 on, the lesser first; found {first} and {last}"))),
    }
}

fn senders(processes: u32) -> Result<f64, (&'static str, String)> {
    match processes > 0 && processes.is_multiple_of(2) {
        true => Ok(f64::from(processes / 2)),
        false => Err(("processes", format!("expected an even number, found {processes}"))),
    }
}

fn evenly(ranks: u32, nodes: u32) -> Result<u32, (&'static str, String)> {
    match nodes > 0 && ranks >= nodes && ranks.is_multiple_of(nodes) {
        true => Ok(ranks / nodes),
        false => Err(("ranks", format!("expected a multiple of nodes, {nodes}; found {ranks}"))),
    }
}

/// The platform with nothing that was fitted to what ran on it, and no software.
fn without_fits(mut platform: Platform) -> Platform {
    let none = Time::new(0.0);
    for server in platform.server.values_mut() {
        for memory in server.tiers.values_mut() {
            memory.fitted = FittedTier::default();
            if let Some(port) = &mut memory.port {
                port.reached = 1.0;
            }
        }
        for path in server.path.values_mut() {
            (path.message, path.gap, path.flushes) = (none, none, 0);
        }
    }
    let inside = platform.rack.values_mut().filter_map(|rack| rack.fabric.as_mut());
    for fabric in inside.chain(platform.between.as_mut()) {
        let software = &mut fabric.software;
        (software.message, software.call, software.step) = (none, none, none);
    }
    platform
}
