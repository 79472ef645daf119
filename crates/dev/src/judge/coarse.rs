//! Figures 16 and 17 of COARSE, with what its Figures 2 and 14 say: the text's numbers beside what follows from data sheets and formulas.
//!
//! The paper gives neither step times nor bandwidths. What it leaves open has a value and a range; the report has what each claim becomes
//! with the values, and the least and the most over all ends of the ranges.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use polder_platform::{Bandwidth, DataError, Folder, read};
use polder_sim::sync::{ShardOrder, SyncJob};
use serde::{Deserialize, Serialize};

use super::open::OpenValue;

/// What the paper gives, as data: `data/figures/coarse-fig16.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoarseFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// What has to be known.
    pub notes: Vec<String>,
    /// The three machines.
    pub machine: Vec<CoarseMachine>,
    /// What the paper leaves open.
    pub open: Vec<OpenValue>,
    /// What the text says.
    pub claim: Vec<CoarseClaim>,
}

/// A machine of Table I.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CoarseMachine {
    /// Its name.
    pub name: String,
    /// What it has.
    pub accelerator: String,
    /// Operations a second of an accelerator at its peak.
    pub flops: f64,
    /// Whether accelerators copy to each other.
    pub between_gpus: bool,
    /// What a path under one switch has against one between switches (Figure 15).
    pub local: LocalPath,
}

/// What a path under one switch has against one between switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LocalPath {
    /// The same bandwidth.
    Equal,
    /// More.
    Faster,
    /// Less: anti-locality.
    Slower,
}

/// A number of the text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoarseClaim {
    /// Which figure's.
    pub figure: String,
    /// What it is.
    pub says: String,
    /// The number, or the range.
    pub published: [f64; 2],
    /// What is computed for it.
    pub case: CoarseCase,
}

/// What is trained where, and which figure of it counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CoarseCase {
    /// The machine.
    pub machine: String,
    /// `bert` or `resnet-50`.
    pub model: String,
    /// Workers of a node.
    pub workers: u32,
    /// Workers that share a memory device.
    #[serde(default = "one")]
    pub workers_a_device: u32,
    /// Nodes of the service.
    #[serde(default = "one")]
    pub nodes: u32,
    /// Nodes of the all-reduce beside it, if they are others.
    pub against_nodes: Option<u32>,
    /// Sequences of a worker with the service, where the all-reduce has two.
    pub batch: Option<u32>,
    /// Which figure.
    pub metric: CoarseMetric,
}

const fn one() -> u32 {
    1
}

/// Which figure of a case counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoarseMetric {
    /// Step of DENSE over that of the service.
    SpeedOverCentral,
    /// Step of the all-reduce over that of the service.
    SpeedOverAllReduce,
    /// Sequences a second over those of the all-reduce.
    RateOverAllReduce,
    /// Blocked seconds over those of DENSE.
    BlockedOverCentral,
    /// Blocked seconds over those of the all-reduce.
    BlockedOverAllReduce,
    /// Blocked part of a step with the all-reduce.
    CommunicationShare,
    /// Megabytes from which a transfer has 0.95 of the bandwidth.
    FullFrom,
}

/// A claim beside ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoarseBeside {
    /// The claim.
    #[serde(flatten)]
    pub claim: CoarseClaim,
    /// Ours, with the values taken.
    pub simulated: f64,
    /// The least and the most over all ends of the ranges.
    pub range: [f64; 2],
}

impl CoarseBeside {
    /// Whether some end of the ranges lies on each side of the published number, or ours is inside it.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        let [least, most] = self.claim.published;
        self.range[0] <= most && self.range[1] >= least
    }

    /// How many times as much one end of the range is as the other; `None` from 0.
    #[must_use]
    pub fn times_wide(&self) -> Option<f64> {
        let [least, most] = self.range;
        (least > 0.0).then(|| most / least)
    }
}

/// What an open value does to the claims: the mean over claims of the largest ratio of both ends.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// The open value.
    #[serde(flatten)]
    pub open: OpenValue,
    /// How many times larger a claim is at one end than at the other, on average over the claims that it moves.
    pub mean_times: f64,
    /// The claim that it moves most, by its index.
    pub most_moved: usize,
    /// How many times that one.
    pub most_times: f64,
}

/// All claims beside ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoarseReport {
    /// Each claim.
    pub claims: Vec<CoarseBeside>,
    /// Each open value, the one that moves most first.
    pub open: Vec<Sensitivity>,
}

/// Values of what is open, and which of them were asked for.
struct Values<'a> {
    of: &'a BTreeMap<&'a str, f64>,
    used: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Values<'a> {
    const fn new(of: &'a BTreeMap<&'a str, f64>) -> Self {
        Self { of, used: RefCell::new(BTreeSet::new()) }
    }

    fn get(&self, name: &str) -> Result<f64, DataError> {
        let Some((name, value)) = self.of.get_key_value(name) else {
            let what = format!("nothing that is open is called {name}");
            return Err(DataError::new("coarse-fig16", "open", what));
        };
        self.used.borrow_mut().insert(name);
        Ok(*value)
    }
}

impl CoarseFigure {
    /// Reads the figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "coarse-fig16")
    }

    /// The claims beside ours.
    ///
    /// # Errors
    /// When a case names a machine, a model or an open value that is not there.
    pub fn beside(&self) -> Result<CoarseReport, DataError> {
        let taken = self.taken();
        let mut claims = vec![];
        for claim in &self.claim {
            let values = Values::new(&taken);
            let simulated = self.value(&claim.case, &values)?;
            // Only what the claim rests on can move it.
            let used = values.used.into_inner();
            let moved: Vec<_> = self.open.iter().filter(|open| used.contains(open.name.as_str())).collect();
            let mut range = [simulated; 2];
            for ends in 0..1_u32 << moved.len() {
                let mut at = taken.clone();
                for (index, open) in moved.iter().enumerate() {
                    at.insert(&open.name, open.range[(ends >> index & 1) as usize]);
                }
                let value = self.value(&claim.case, &Values::new(&at))?;
                range = [range[0].min(value), range[1].max(value)];
            }
            claims.push(CoarseBeside { claim: claim.clone(), simulated, range });
        }
        let mut open =
            self.open.iter().map(|it| self.sensitivity(it, &taken)).collect::<Result<Vec<_>, _>>()?;
        open.sort_by(|one, other| other.mean_times.total_cmp(&one.mean_times));
        Ok(CoarseReport { claims, open })
    }

    fn taken(&self) -> BTreeMap<&str, f64> {
        self.open.iter().map(|open| (open.name.as_str(), open.value)).collect()
    }

    fn sensitivity(&self, open: &OpenValue, taken: &BTreeMap<&str, f64>) -> Result<Sensitivity, DataError> {
        let mut times = vec![];
        for claim in &self.claim {
            let at = |value| {
                let mut values = taken.clone();
                values.insert(&open.name, value);
                self.value(&claim.case, &Values::new(&values))
            };
            let [low, high] = [at(open.range[0])?, at(open.range[1])?];
            times.push(if low.min(high) > 0.0 { low.max(high) / low.min(high) } else { 1.0 });
        }
        let moved: Vec<_> = times.iter().copied().filter(|it| *it > 1.001).collect();
        let mean_times = if moved.is_empty() { 1.0 } else { moved.iter().sum::<f64>() / moved.len() as f64 };
        let most_moved = (0..times.len()).max_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
        Ok(Sensitivity { open: open.clone(), mean_times, most_moved, most_times: times[most_moved] })
    }

    fn value(&self, case: &CoarseCase, values: &Values<'_>) -> Result<f64, DataError> {
        let wrong = |what: String| DataError::new("coarse-fig16", "claim.case", what);
        let machine = self
            .machine
            .iter()
            .find(|it| it.name == case.machine)
            .ok_or_else(|| wrong(format!("there is no machine {}", case.machine)))?;
        if case.metric == CoarseMetric::FullFrom {
            // latency + bytes / bandwidth = bytes / (0.95 bandwidth)
            return Ok(values.get("message")? * 1e-6 * values.get("bus")? * 1e9 * 0.95 / 0.05 / 1e6);
        }
        let service = self.job(machine, case, case.nodes, case.batch.unwrap_or(0), values)?;
        let nodes = case.against_nodes.unwrap_or(case.nodes);
        let beside = self.job(machine, case, nodes, 0, values)?;
        let ours = service.service(service.split_bytes()).seconds;
        let all_reduce = beside.all_reduce();
        let central = || {
            let bus = values.get("bus")? * 1e9;
            let slowed = |name| Ok::<_, DataError>(Bandwidth::new(bus / values.get(name)?));
            Ok::<_, DataError>(beside.central(slowed("write-slowdown")?, slowed("read-slowdown")?))
        };
        let sequences = |nodes: u32, batch: u32| f64::from(nodes * case.workers * batch);
        Ok(match case.metric {
            CoarseMetric::SpeedOverCentral => central()?.step_s / ours.step_s,
            CoarseMetric::SpeedOverAllReduce => all_reduce.step_s / ours.step_s,
            CoarseMetric::RateOverAllReduce => {
                let ours = sequences(case.nodes, case.batch.unwrap_or(2)) / ours.step_s;
                ours / (sequences(nodes, 2) / all_reduce.step_s)
            }
            CoarseMetric::BlockedOverCentral => ours.blocked_s / central()?.blocked_s,
            CoarseMetric::BlockedOverAllReduce => ours.blocked_s / all_reduce.blocked_s,
            CoarseMetric::CommunicationShare => all_reduce.blocked_s / all_reduce.step_s,
            CoarseMetric::FullFrom => unreachable!("computed above"),
        })
    }

    /// What is trained; `batch` sequences a worker, or with 0 the paper's.
    fn job(
        &self,
        machine: &CoarseMachine,
        case: &CoarseCase,
        nodes: u32,
        batch: u32,
        values: &Values<'_>,
    ) -> Result<SyncJob, DataError> {
        // Forward operations of a worker's batch: 4.1 billion multiply-adds an image (He et al., 2016, table 1, with the last layer), two
        // operations a parameter and token.
        let (parameters, layers, flops) = match case.model.as_str() {
            "resnet-50" => (25.6e6, 17, 64.0 * 8.2e9),
            "bert" => {
                let parameters = values.get("bert-parameters")? * 1e6;
                let sequences = if batch == 0 { 2.0 } else { f64::from(batch) };
                (parameters, 25, 2.0 * parameters * sequences * values.get("bert-sequence")?)
            }
            other => {
                return Err(DataError::new(
                    "coarse-fig16",
                    "claim.case.model",
                    format!("there is no model {other}"),
                ));
            }
        };
        let forward_s = flops / (machine.flops * values.get("reached-compute")?);
        let bus = values.get("bus")? * 1e9;
        let whole = if machine.between_gpus { bus } else { bus * values.get("through-host")? };
        let slower = || values.get("slower-path").map(|part| whole * part);
        // A ring of workers crosses switches, and where that is faster also a path under one switch. Proxies use the better path alone.
        let (worker, proxy) = match machine.local {
            LocalPath::Equal => (whole, whole),
            LocalPath::Faster => (slower()?, slower()?),
            LocalPath::Slower => (slower()?, whole),
        };
        let link = if machine.local == LocalPath::Equal { whole } else { bus };
        let shared = f64::from(case.workers_a_device);
        let across = |rate: f64| match nodes {
            1 => Ok(rate),
            _ => values.get("network").map(|network| rate.min(network * 1e9)),
        };
        Ok(SyncJob {
            layers: vec![(4.0 * parameters / f64::from(layers)) as u64; layers as usize],
            workers: case.workers * nodes,
            forward_s,
            backward_s: 2.0 * forward_s,
            worker: Bandwidth::new(across(worker)?),
            proxies: None,
            proxy: Bandwidth::new(across(proxy)?),
            link: Bandwidth::new(link / shared),
            latency_s: values.get("message")? * 1e-6,
            shard_bytes: 2_000_000,
            order: ShardOrder::FirstLayersFirst,
        })
    }
}
