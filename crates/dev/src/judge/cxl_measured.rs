//! What Liaw and Chen measured and published as files, beside what follows from the platform: steps of CPU Adam, and copies of GPUs.

use polder_place::{Computing, Kind, Moved, Object, Phase, Placement, Problem};
use polder_platform::{Bytes, DataError, Folder, Platform, read};
use polder_sim::Job;
use polder_sim::offload::{OffloadError, Planner, Settings, cached, optimizer};
use serde::{Deserialize, Serialize};

/// Steps of CPU Adam, as data: `data/figures/cxl-adam.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    /// From how many elements on a step is judged.
    pub least: f64,
    /// What has to be known.
    pub notes: Vec<String>,
    /// Parts on the card, of each column.
    pub on_card: Vec<f64>,
    /// The steps.
    pub row: Vec<AdamRow>,
}

/// Steps over so many elements.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamRow {
    /// How many.
    pub elements: f64,
    /// Milliseconds of each column.
    pub measured_ms: Vec<f64>,
}

/// Copies between host memory and GPUs, as data: `data/figures/cxl-copies.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyFigure {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The machine.
    pub platform: String,
    /// Bytes that each GPU copies.
    pub bytes: f64,
    /// What has to be known.
    pub notes: Vec<String>,
    /// The copies.
    pub row: Vec<CopyRow>,
}

/// Copies of so many GPUs at once, first all reads and then all writes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRow {
    /// How many, each on a link of its own.
    pub gpus: u32,
    /// Where the buffers lie.
    pub nodes: String,
    /// Their part on the card.
    pub on_card: f64,
    /// Milliseconds of a read by the GPUs, and of a write.
    pub measured_ms: [f64; 2],
    /// Whether the platform's rates are those of this copy.
    #[serde(default)]
    pub echo: bool,
}

/// A measured time beside ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeBeside<T> {
    /// What was timed.
    #[serde(flatten)]
    pub timed: T,
    /// Milliseconds, as measured.
    pub measured_ms: f64,
    /// As simulated.
    pub simulated_ms: f64,
    /// Whether it counts.
    pub counts: TimeUse,
}

/// Whether a measured time counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeUse {
    /// It gives a rate of the platform, or repeats one, and so is no prediction.
    Echo,
    /// It is judged.
    Judged,
    /// It is too short, and reported alone.
    Reported,
}

/// A step of CPU Adam.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdamStep {
    /// Elements.
    pub elements: f64,
    /// Their part on the card.
    pub on_card: f64,
}

/// A copy by each of some GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuCopy {
    /// How many GPUs.
    pub gpus: u32,
    /// Where the buffers lie.
    pub nodes: String,
    /// Their part on the card.
    pub on_card: f64,
    /// Whether the GPUs write.
    pub is_write: bool,
}

impl<T> TimeBeside<T> {
    /// How far ours is off, as a part of what was measured.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.simulated_ms / self.measured_ms - 1.0
    }
}

impl AdamFigure {
    /// Reads the figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "cxl-adam")
    }

    /// Each step beside what follows from the platform.
    ///
    /// # Errors
    /// When a file is damaged.
    pub fn beside(&self) -> Result<Vec<TimeBeside<AdamStep>>, OffloadError> {
        let platform = Platform::load(&self.platform)?;
        let planner = Planner::new(&platform, &self.platform, Settings::default())?;
        let offload = Job::new(&platform).rack().host.offload.as_ref();
        let cache = offload.and_then(|it| it.cache).unwrap_or(Bytes::new(0.0));
        let most = self.row.iter().map(|row| row.elements).fold(0.0, f64::max);
        let mut steps = vec![];
        for row in &self.row {
            let problem = optimizer(row.elements, planner.tiers()[..2].to_vec());
            for (on_card, measured_ms) in self.on_card.iter().copied().zip(row.measured_ms.iter().copied()) {
                let simulated_ms = cached(&problem, &spread(&problem, on_card), cache) * 1e3;
                let is_pure = on_card == 0.0 || on_card == 1.0;
                let counts = match row.elements {
                    elements if elements == most && is_pure => TimeUse::Echo,
                    elements if elements >= self.least => TimeUse::Judged,
                    _ => TimeUse::Reported,
                };
                let timed = AdamStep { elements: row.elements, on_card };
                steps.push(TimeBeside { timed, measured_ms, simulated_ms, counts });
            }
        }
        Ok(steps)
    }
}

impl CopyFigure {
    /// Reads the figure.
    ///
    /// # Errors
    /// When its file is damaged.
    pub fn load() -> Result<Self, DataError> {
        read(Folder::Figures, "cxl-copies")
    }

    /// Each copy beside what follows from the platform. A copy lasts as long as its slowest link. GPUs share memory and the card.
    ///
    /// # Errors
    /// When a file is damaged.
    pub fn beside(&self) -> Result<Vec<TimeBeside<GpuCopy>>, OffloadError> {
        let platform = Platform::load(&self.platform)?;
        let planner = Planner::new(&platform, &self.platform, Settings::default())?;
        let host = &Job::new(&platform).rack().host;
        let link = host.offload.as_ref().and_then(|it| it.link).unwrap_or_else(|| host.attach.each());
        let mut copies = vec![];
        for row in &self.row {
            for (is_write, measured_ms) in [false, true].into_iter().zip(row.measured_ms) {
                let [read, write] = if is_write { [0.0, 1.0] } else { [1.0, 0.0] };
                let copy = Phase {
                    name: "copy".into(),
                    by_device: true,
                    least_s: self.bytes / link.value(),
                    computing: Computing::default(),
                    streams: vec![],
                    moved: vec![Moved { object: 0, read, write }],
                };
                let bytes = Bytes::new(f64::from(row.gpus) * self.bytes);
                // No policy places it, so the kind does not matter.
                let buffers = Object { name: "buffers".into(), kind: Kind::Activation, bytes, only: vec![] };
                let tiers = planner.tiers()[..2].to_vec();
                let problem = Problem { tiers, objects: vec![buffers], phases: vec![copy] };
                let seconds: f64 = problem.seconds(&spread(&problem, row.on_card)).iter().sum();
                let CopyRow { gpus, nodes, on_card, echo, .. } = row.clone();
                let counts = if echo { TimeUse::Echo } else { TimeUse::Judged };
                let timed = GpuCopy { gpus, nodes, on_card, is_write };
                copies.push(TimeBeside { timed, measured_ms, simulated_ms: seconds * 1e3, counts });
            }
        }
        Ok(copies)
    }
}

/// Each object in two tiers, this part of it in the second.
fn spread(problem: &Problem, on_card: f64) -> Placement {
    Placement { fractions: vec![vec![1.0 - on_card, on_card]; problem.objects.len()] }
}
