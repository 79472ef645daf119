//! Offloaded steps of a model on a platform: bytes by object and tier, seconds by phase, and what would fit where something does not.

use polder_place::{Kind, Object, PlaceError, Placement, Policy, Problem, Tier};
use polder_platform::{Bandwidth, Bytes, Platform, Time};
use serde::{Deserialize, Serialize};

use super::gpu::{self, GpuUse};
use super::tiers::tiers;
use super::{NARROW, OffloadError, Offloaded, Optimizer, PlacingPolicy, WIDE, object};
use crate::step::job::Job;
use crate::step::layout::Refusal;
use crate::step::model::Model;

/// What is trained, and how.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// GPUs, each with its own batch.
    pub gpus: u32,
    /// Kind of rack; the first by name.
    pub rack: Option<String>,
    /// How much of the host's own memory the step may take; all of it.
    pub dram: Option<Bytes>,
    /// Cards of each kind behind the host; as many as it has.
    pub cards: Option<u32>,
    /// How parameters are updated.
    pub optimizer: Optimizer,
    /// Rank of LoRA's matrices beside each matrix of a block (Hu et al., 2021), which alone are trained.
    pub lora: Option<u32>,
    /// Whether each block's input is kept in host memory and the rest computed again; else all stays in the GPU's memory.
    pub checkpointing: bool,
    /// Whether attention is fused, and its scores never lie in memory (FlashAttention).
    pub flash: bool,
    /// Whether the loss is computed in chunks (Liger Kernel).
    pub liger: bool,
    /// Which size pinned allocations have.
    pub pinned: Pinned,
    /// Double buffers of the framework.
    pub buffers: Option<Bytes>,
    /// What else the framework takes.
    pub overhead: Option<Bytes>,
}

/// Which size pinned allocations have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pinned {
    /// That which was asked for.
    #[default]
    Exact,
    /// The next power of two, as torch's caching allocator of pinned memory rounds them.
    PowersOfTwo,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            gpus: 1,
            rack: None,
            dram: None,
            cards: None,
            optimizer: Optimizer::Adam,
            lora: None,
            checkpointing: true,
            flash: true,
            liger: true,
            pinned: Pinned::Exact,
            buffers: None,
            overhead: None,
        }
    }
}

/// Predicts offloaded steps.
#[derive(Clone, Debug)]
pub struct Planner<'a> {
    platform: &'a Platform,
    name: &'a str,
    job: Job<'a>,
    settings: Settings,
    tiers: Vec<Tier>,
    link: Bandwidth,
}

/// A context and a batch, under several policies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Tokens of a sequence.
    pub context: u32,
    /// Sequences of each GPU.
    pub batch: u32,
    /// Tokens of a step.
    pub tokens: f64,
    /// What lies in host memory.
    pub objects: Vec<ObjectBytes>,
    /// All of it.
    pub bytes: f64,
    /// What lies in each GPU's memory.
    pub gpu: GpuUse,
    /// Seconds of the step with everything in DRAM, were there as much of it.
    pub dram_only_s: f64,
    /// Under each policy.
    pub policies: Vec<Placed>,
}

/// An object of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ObjectBytes {
    /// What tables call it.
    pub name: String,
    /// How large it is.
    pub bytes: f64,
}

/// A step under a policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placed {
    /// Which.
    pub policy: String,
    /// Whether the step fits in the host's and in the GPU's memory. Without it there are no seconds.
    pub fits: bool,
    /// What does not fit.
    pub lacks: Option<String>,
    /// The first change that does.
    pub would_fit: Option<String>,
    /// Seconds of each phase.
    pub phases: Vec<PhaseSeconds>,
    /// All of them.
    pub step_s: Option<f64>,
    /// Tokens of all GPUs a second.
    pub tokens_per_s: Option<f64>,
    /// Bytes of each object in each tier.
    pub bytes: Vec<Vec<f64>>,
}

/// Seconds of a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseSeconds {
    /// Which.
    pub name: String,
    /// How long.
    pub seconds: f64,
}

/// DeepSpeed's `sub_group_size`: elements of an allocation, at most.
const GROUP: f64 = 1e9;
/// More DRAM than any step takes.
const PLENTY: f64 = 1e18;
/// The shortest context that is proposed where none fits.
const SHORTEST: u32 = 128;
/// Cards that are proposed beside those that there are, at most.
const MORE_CARDS: u32 = 8;

impl<'a> Planner<'a> {
    /// Steps on a platform, which `name` is the name of.
    ///
    /// # Errors
    /// When the platform has no accelerators or too few, or a number makes no sense.
    pub fn new(platform: &'a Platform, name: &'a str, settings: Settings) -> Result<Self, OffloadError> {
        let refused = |refusal| OffloadError::Refused { platform: name.into(), refusal };
        let job = Job::chosen(platform, settings.rack.as_deref(), None, None).map_err(refused)?;
        let host = &job.rack().host;
        if settings.gpus == 0 || settings.gpus > host.accelerators {
            let has = crate::text::accelerators(host.accelerators);
            let problem = format!(
                "{name} has {has} to a host, found {}; give 1 to {}",
                settings.gpus, host.accelerators
            );
            return Err(OffloadError::option("--gpus", problem));
        }
        if settings.lora == Some(0) {
            return Err(OffloadError::option("--lora", "expected a rank from 1 on, found 0"));
        }
        let tiers = tiers(platform, host, settings.dram, settings.cards)?;
        let measured = host.offload.as_ref().and_then(|offload| offload.link);
        let link = measured.unwrap_or_else(|| host.attach.each());
        Ok(Self { platform, name, job, settings, tiers, link })
    }

    /// The tiers that objects are placed in.
    #[must_use]
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// Bytes a second of a GPU's own link, each way.
    #[must_use]
    pub const fn link(&self) -> Bandwidth {
        self.link
    }

    /// What is known to contradict itself in the platform's numbers.
    #[must_use]
    pub fn conflict(&self) -> Option<String> {
        let host = &self.job.rack().host;
        let step = host.offload.as_ref()?.tiers.get("host")?.step?;
        let given = host.memory.read;
        (step > given).then(|| {
            format!("{step} of DRAM were measured, where {} gives it {given}: both stand", self.name)
        })
    }

    /// A step over `batch` sequences of the model's length on each GPU, under each policy.
    ///
    /// # Errors
    /// When the platform cannot run it, or a policy is none of this step.
    pub fn point(
        &self,
        model: &Model,
        batch: u32,
        policies: &[PlacingPolicy],
    ) -> Result<Point, OffloadError> {
        let (problem, gpu) = self.problem(model, batch)?;
        let tokens = f64::from(self.settings.gpus) * f64::from(batch) * f64::from(model.sequence);
        let placed = |policy: &PlacingPolicy| {
            let placement = policy.place(&problem)?;
            let mut placed = placed(policy.name(), &problem, tokens, placement, &gpu);
            if !placed.fits {
                placed.would_fit = self.would_fit(model, batch, policy)?;
            }
            Ok(placed)
        };
        Ok(Point {
            context: model.sequence,
            batch,
            tokens,
            bytes: problem.objects.iter().map(|object| object.bytes.value()).sum(),
            objects: problem
                .objects
                .iter()
                .map(|object| ObjectBytes { name: object.name.clone(), bytes: object.bytes.value() })
                .collect(),
            dram_only_s: dram_only(&problem)?,
            policies: policies.iter().map(placed).collect::<Result<_, OffloadError>>()?,
            gpu,
        })
    }

    /// What is placed, and what each GPU holds.
    ///
    /// # Errors
    /// When the platform cannot run it.
    pub fn problem(&self, model: &Model, batch: u32) -> Result<(Problem, GpuUse), OffloadError> {
        let settings = &self.settings;
        let (mut offloaded, exchanged, gpu) = self.offloaded(model, batch)?;
        let peers = self.peers();
        offloaded.exchanged = exchanged.map(|bytes| Time::new(if bytes > 0.0 { bytes / peers } else { 0.0 }));
        let mut problem = offloaded.problem(self.tiers.clone());
        let rounding = match settings.pinned {
            Pinned::Exact => 0.0,
            Pinned::PowersOfTwo => {
                let gpus = f64::from(settings.gpus);
                let groups: f64 = problem.objects.iter().map(|it| rounding(it, gpus)).sum();
                let each = NARROW * f64::from(batch) * f64::from(model.sequence) * f64::from(model.hidden);
                let checkpoints = offloaded.activations.value() / each;
                groups + checkpoints * (power_of_two(each) - each)
            }
        };
        let value = |bytes: Option<Bytes>| bytes.map_or(0.0, Bytes::value);
        problem.objects.extend([
            object("pinned rounding", Kind::Other, rounding),
            object("double buffers", Kind::Other, value(settings.buffers)),
            object("framework", Kind::Other, value(settings.overhead)),
        ]);
        Ok((problem, gpu))
    }

    /// What GPUs reach of each other, in bytes a second: measured, or what collectives reach of the rack's fabric.
    fn peers(&self) -> f64 {
        let measured = self.job.rack().host.offload.as_ref().and_then(|offload| offload.peers);
        let fabric = || self.job.fabrics().inside.map_or(f64::INFINITY, |rates| rates.reached_bytes_per_s);
        measured.map_or_else(fabric, Bandwidth::value)
    }

    /// What a step offloads, bytes of parameters that each GPU gets from others in a pass and of gradients that it sends, and what it holds.
    ///
    /// # Errors
    /// When the platform cannot run it.
    pub fn offloaded(
        &self,
        model: &Model,
        batch: u32,
    ) -> Result<(Offloaded, [f64; 2], GpuUse), OffloadError> {
        let settings = &self.settings;
        let refused = |refusal| OffloadError::Refused { platform: self.name.into(), refusal };
        if batch == 0 {
            return Err(OffloadError::option("--batch", "expected sequences of each GPU from 1 on, found 0"));
        }
        if batch.checked_mul(settings.gpus).is_none() {
            return Err(refused(Refusal::Large));
        }
        let all = model.parameters();
        let trained = settings.lora.map_or(all, |rank| lora(model, f64::from(rank)));
        let parameters = if settings.lora.is_some() { all + trained } else { all };
        let step = gpu::step(&self.job, model, settings, batch, trained).map_err(refused)?;
        let gpus = f64::from(settings.gpus);
        let checkpoint = NARROW * f64::from(batch) * f64::from(model.sequence) * f64::from(model.hidden);
        let checkpoints = if settings.checkpointing { gpus * f64::from(model.layers) } else { 0.0 };
        // Each GPU fetches its part, and gets the others' from them; of gradients it sends those of the others.
        let others = NARROW * (gpus - 1.0) / gpus;
        let exchanged = [others * parameters, others * trained];
        let host = &self.job.rack().host;
        let reached = host.offload.as_ref();
        let offloaded = Offloaded {
            parameters,
            trained,
            optimizer: settings.optimizer,
            activations: Bytes::new(checkpoint * checkpoints),
            gpus: settings.gpus,
            link: self.link,
            computation: step.computation,
            exchanged: [Time::new(0.0); 2],
            element: reached.and_then(|it| it.element).unwrap_or(Time::new(0.0)),
        };
        Ok((offloaded, exchanged, step.memory))
    }

    /// The first change with which a step fits: another policy, more cards, a smaller batch, a shorter context.
    fn would_fit(
        &self,
        model: &Model,
        batch: u32,
        policy: &PlacingPolicy,
    ) -> Result<Option<String>, OffloadError> {
        let fits = |planner: &Self, model: &Model, batch: u32, policy: &PlacingPolicy| {
            let (problem, gpu) = planner.problem(model, batch)?;
            Ok::<_, OffloadError>(gpu.fits() && policy.place(&problem)?.is_ok())
        };
        let optimal = PlacingPolicy::Rule(Policy::Optimal);
        if *policy != optimal && fits(self, model, batch, &optimal)? {
            return Ok(Some("--policy optimal".into()));
        }
        let has = self.settings.cards.unwrap_or_else(|| self.cards());
        for cards in has + 1..=has + MORE_CARDS {
            let settings = Settings { cards: Some(cards), ..self.settings.clone() };
            // A host without a kind of card gets none.
            let Ok(more) = Self::new(self.platform, self.name, settings) else { break };
            if fits(&more, model, batch, &optimal)? {
                let also = if *policy == optimal { "" } else { " --policy optimal" };
                return Ok(Some(format!("--cards {cards}{also}")));
            }
        }
        let mut smaller = batch / 2;
        while smaller > 0 {
            if fits(self, model, smaller, policy)? {
                return Ok(Some(format!("--batch {smaller}")));
            }
            smaller /= 2;
        }
        let mut shorter = model.sequence / 2;
        while shorter >= SHORTEST {
            let model = Model { sequence: shorter, ..model.clone() };
            if fits(self, &model, 1, policy)? {
                let with = if batch > 1 { " --batch 1" } else { "" };
                return Ok(Some(format!("--context {shorter}{with}")));
            }
            shorter /= 2;
        }
        Ok(None)
    }

    /// Cards of the kind that the host has most of.
    fn cards(&self) -> u32 {
        let host = &self.job.rack().host;
        host.tiers.values().filter_map(|tier| tier.port.as_ref()).map(|port| port.links).max().unwrap_or(0)
    }
}

/// Seconds with everything in DRAM.
fn dram_only(problem: &Problem) -> Result<f64, OffloadError> {
    let mut plenty = problem.clone();
    plenty.tiers[0].capacity = Bytes::new(PLENTY);
    let placement = plenty.place(Policy::Dram)?;
    Ok(plenty.seconds(&placement).iter().sum())
}

fn placed(
    policy: String,
    problem: &Problem,
    tokens: f64,
    placement: Result<Placement, PlaceError>,
    gpu: &GpuUse,
) -> Placed {
    let nothing = Placed {
        policy,
        fits: false,
        lacks: None,
        would_fit: None,
        phases: vec![],
        step_s: None,
        tokens_per_s: None,
        bytes: vec![],
    };
    if !gpu.fits() {
        let [used, has] = [gpu.used_bytes, gpu.capacity_bytes].map(|bytes| bytes / 1e9);
        let most = gpu.rows.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("", |(name, _)| name);
        let lacks = format!("a GPU holds {has:.1} GB and would have {used:.1}, most of it {most}");
        return Placed { lacks: Some(lacks), ..nothing };
    }
    let placement = match placement {
        Ok(placement) => placement,
        Err(error) => return Placed { lacks: Some(missing_memory(&error)), ..nothing },
    };
    let seconds = problem.seconds(&placement);
    let phases = problem.phases.iter().zip(&seconds);
    let step: f64 = seconds.iter().sum();
    let row = |(object, row): (&Object, &Vec<f64>)| {
        row.iter().map(|fraction| fraction * object.bytes.value()).collect()
    };
    Placed {
        fits: true,
        phases: phases
            .map(|(phase, seconds)| PhaseSeconds { name: phase.name.clone(), seconds: *seconds })
            .collect(),
        step_s: Some(step),
        tokens_per_s: Some(tokens / step),
        bytes: problem.objects.iter().zip(&placement.fractions).map(row).collect(),
        ..nothing
    }
}

/// Which memory is too small, in the digits of tables.
fn missing_memory(error: &PlaceError) -> String {
    match error {
        PlaceError::TooSmall { tier, capacity, bytes } => {
            let [has, used] = [capacity, bytes].map(|bytes| bytes.value() / 1e9);
            format!("{tier} holds {has:.1} GB and would have {used:.1}")
        }
        PlaceError::NoRoom { objects, capacity } => {
            let [has, used] = [capacity, objects].map(|bytes| bytes.value() / 1e9);
            format!("all tiers hold {has:.1} GB and the step takes {used:.1}")
        }
        other => other.to_string(),
    }
}

/// Parameters of LoRA's two matrices of this rank beside each matrix of each block, experts' too.
fn lora(model: &Model, rank: f64) -> f64 {
    rank * model.sides()
}

/// What rounding adds to an object whose bytes each GPU allocates in groups of elements.
fn rounding(object: &Object, gpus: f64) -> f64 {
    let width = match object.kind {
        Kind::Activation | Kind::Other => return 0.0,
        Kind::Parameter | Kind::Gradient => NARROW,
        _ => WIDE,
    };
    let bytes = object.bytes.value() / gpus;
    let whole = (bytes / (GROUP * width)).floor();
    let rest = bytes - whole * GROUP * width;
    gpus * (whole * (power_of_two(GROUP * width) - GROUP * width) + power_of_two(rest) - rest)
}

fn power_of_two(bytes: f64) -> f64 {
    if bytes > 0.0 { bytes.log2().ceil().exp2() } else { 0.0 }
}
