//! What a front asks: a step on a platform, with whatever of its layout is given; the rest is searched for.

use polder_platform::{FlopRate, Platform, Prices, Rates, Topology};
use serde::{Deserialize, Serialize};

use crate::contention::{FlitOptions, TransferError};
use crate::fidelity::Fidelity;
use crate::formats::Execution;
use crate::judge::margin::Margin;
use crate::judge::range::StepClass;
use crate::search::nearest::{Obstacle, Question};
use crate::search::{Outcome, Progress, Space, search};
use crate::step::figures::{Stage, Step};
use crate::step::flows::{FollowedFlits, StepFlits};
use crate::step::given::{GivenLayout, Tiers};
use crate::step::job::{Fabrics, Job, PlannedStep};
use crate::step::layout::{Layout, Offload, Precision, Refusal};
use crate::step::model::{Mixer, Model};
use crate::step::order::Order;

/// A question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// A model's name or path.
    pub model: String,
    /// A platform's name or path.
    pub platform: String,
    /// Accelerators.
    pub accelerators: u32,
    /// Kind of rack; the platform's first when left out.
    pub rack: Option<String>,
    /// Accelerators of each rack that are used.
    pub fill: Option<u32>,
    /// In which order ranks are counted; tensor, context, expert, data, pipeline when left out.
    pub order: Option<Order>,
    /// Another platform, which the same layout is predicted on too.
    pub against: Option<String>,
    /// Tokens of a sequence, in place of the model's.
    pub sequence: Option<u32>,
    /// How closely communication of the layout is looked at, once it is found; it is searched for in closed form.
    #[serde(default)]
    pub fidelity: Fidelity,
    /// What flits need beside the platform, with fidelity L2.
    #[serde(default)]
    pub flits: FlitOptions,
    /// Links between two switches of the platform's fabric between racks that have failed; `against` has all of its own.
    #[serde(default)]
    pub failed: Vec<(u32, u32)>,
    /// What of the layout is given.
    #[serde(default)]
    pub layout: GivenLayout,
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// How the figures were obtained: "simulated".
    pub kind: &'static str,
    /// The model's name or path.
    pub model: String,
    /// Tokens of a sequence.
    pub sequence: u32,
    /// The platform's name or path.
    pub platform: String,
    /// How its CPUs attach, and what of CXL its fabrics carry.
    pub machine: String,
    /// What its fabrics give an accelerator.
    pub fabrics: Fabrics,
    /// Accelerators.
    pub accelerators: u32,
    /// Kind of rack.
    pub rack: String,
    /// Accelerators of each rack that are used.
    pub fill: u32,
    /// In which order ranks are counted, the closest first.
    pub order: Order,
    /// How closely communication was looked at.
    pub fidelity: Fidelity,
    /// What of it was followed flit by flit, with fidelity L2.
    pub flits: Option<StepFlits>,
    /// Links between two switches of the fabric between racks that have failed.
    pub failed: Vec<(u32, u32)>,
    /// How the step is laid out.
    pub layout: Layout,
    /// The stages, the first one first.
    pub stages: Vec<Stage>,
    /// What it takes.
    pub step: Step,
    /// Operations that the model needs for the step.
    pub model_flops: f64,
    /// Dense peak of an accelerator, in operations a second.
    pub peak_flops: f64,
    /// Layouts that were looked at.
    pub points: u64,
    /// Whether it fits where it lies.
    pub fits: bool,
    /// From how many to how many seconds the step takes, as far as can be relied on.
    pub range_s: [f64; 2],
    /// How far such predictions are from published steps.
    pub margin: Margin,
    /// What would fit when this does not, each with one thing changed, as it was tried.
    pub would_fit: Vec<String>,
    /// The same layout on another platform.
    pub against: Option<Box<Self>>,
    /// From how many to how many times as long as there it takes; `None` where it does not fit on both.
    pub times_against: Option<[f64; 2]>,
    /// Why the other platform cannot run it.
    pub left_out: Option<String>,
    /// What must be said with it.
    pub note: Option<String>,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A file is damaged or missing.
    #[error(transparent)]
    Data(#[from] polder_platform::DataError),
    /// The platform, or the model, refuses.
    #[error("{name}: {}{}", untried(refusal, nearest), alternatives(nearest, "run"))]
    Refused {
        /// Which.
        name: String,
        /// Why.
        refusal: Refusal,
        /// What would run, each with one thing changed.
        nearest: Vec<String>,
    },
}

impl RequestError {
    /// A refusal beside which nothing was tried.
    pub(crate) fn refused(name: &str, refusal: Refusal) -> Self {
        Self::Refused { name: name.into(), refusal, nearest: vec![] }
    }
}

/// A refusal, without the remedy where that was tried and is found after it.
fn untried(refusal: &Refusal, nearest: &[String]) -> String {
    let whole = refusal.to_string();
    match whole.rsplit_once("; take ") {
        Some((reason, taken)) if nearest.contains(&format!("precision {taken}")) => reason.into(),
        _ => whole,
    }
}

/// What would `run`, or fit, after a reason why something else does not.
#[must_use]
pub fn alternatives(nearest: &[String], run: &str) -> String {
    match nearest {
        [] => String::new(),
        [one] => format!("; {one} would {run}"),
        [most @ .., last] => format!("; {}, or {last} would {run}", most.join(", ")),
    }
}

pub(super) const UNPROVED_DIFFERENCE: &str = "no run over CXL validates the difference between these fabrics";

/// What must be said of a model with blocks that no published step has.
#[must_use]
pub fn unjudged(model: &Model) -> Option<&'static str> {
    let has_other_blocks = !model.others.is_empty()
        || model.window.is_some_and(|window| window.tokens > 0)
        || model.latent.is_some()
        || model.mixer != Mixer::Attention;
    has_other_blocks.then_some(
        "the model has windows, latent attention, recurrent mixers or blocks that differ, whose time no published step validates",
    )
}

impl GivenLayout {
    /// The layouts that have what is given.
    #[must_use]
    pub fn space(&self, job: &Job<'_>, model: &Model, accelerators: u32) -> Space {
        let all = Space::default_for(model, accelerators, self.batch(model, accelerators));
        fn only<T>(all: Vec<T>, one: Option<T>) -> Vec<T> {
            one.map_or(all, |one| vec![one])
        }
        Space {
            tp: only(all.tp, self.tp),
            cp: only(all.cp, self.cp),
            ep: only(all.ep, self.ep),
            pp: only(all.pp, self.pp),
            dp: self.dp,
            interleave: only(all.interleave, self.interleave),
            uneven: only(all.uneven, self.interleave),
            micro_batch: only(all.micro_batch, self.micro_batch),
            sequence_parallel: only(all.sequence_parallel, self.sequence_parallel),
            gather_again: only(all.gather_again, self.gather_again),
            recompute: only(all.recompute, self.recompute),
            zero: only(all.zero, self.zero),
            wide_gradients: only(all.wide_gradients, self.wide_gradients),
            flash: only(all.flash, self.flash),
            precision: only(all.precision, self.precision),
            overlap: only(all.overlap, self.overlap),
            offload: match (self.offload, self.tiers) {
                (Some(offload), _) => vec![offload],
                (None, Tiers::IfNeeded) => all.offload,
                (None, Tiers::One(tier)) => Offload::all(tier).collect(),
                (None, Tiers::All) => {
                    let some = job.tiers().into_iter().flat_map(|tier| Offload::all(tier).skip(1));
                    all.offload.into_iter().chain(some).collect()
                }
            },
            ..all
        }
    }
}

impl Request {
    /// With what an execution of Calculon gives of what is left open here; `accelerators` is open where it is 0.
    #[must_use]
    pub fn or(self, execution: &Execution) -> Self {
        let Execution { accelerators, fill, layout } = execution;
        Self {
            accelerators: if self.accelerators == 0 { *accelerators } else { self.accelerators },
            fill: self.fill.or(Some(*fill)),
            layout: self.layout.or(layout.clone()),
            ..self
        }
    }

    /// The same question on a platform that `--against` names, with its file: on a kind of rack where one stands behind a colon.
    pub(super) fn on<'a>(&self, other: &'a str) -> (&'a str, Self) {
        // A path may hold a colon, a kind of rack neither a point nor a slash.
        let is_rack = |rack: &str| !rack.is_empty() && !rack.contains(['.', '/', '\\']);
        let (file, rack) = match other.rsplit_once(':').filter(|(_, rack)| is_rack(rack)) {
            Some((file, rack)) => (file, Some(rack.to_owned())),
            None => (other, self.rack.clone()),
        };
        (file, Self { platform: file.into(), rack, against: None, ..self.clone() })
    }

    pub(super) fn job<'a>(&self, name: &str, platform: &'a Platform) -> Result<Job<'a>, RequestError> {
        Job::chosen(platform, self.rack.as_deref(), self.fill, self.order)
            .map_err(|refusal| RequestError::refused(name, refusal))
    }

    pub(super) fn model(&self) -> Result<Model, RequestError> {
        Ok(Model::load_with(&self.model, self.sequence)?)
    }

    /// Predicts every layout that has what is given; what lies elsewhere, if [`Tiers`] says so, only where nothing fits
    /// without.
    ///
    /// # Errors
    /// When a file is damaged, or no layout can run at all; one that does not fit is in the outcome.
    pub fn search(&self, threads: usize, progress: Progress<'_>) -> Result<Outcome, RequestError> {
        self.look(&Platform::load(&self.platform)?, &self.model()?, threads, progress)
    }

    pub(super) fn look(
        &self,
        platform: &Platform,
        model: &Model,
        threads: usize,
        progress: Progress<'_>,
    ) -> Result<Outcome, RequestError> {
        let job = self.job(&self.platform, platform)?;
        let (given, accelerators) = (&self.layout, self.accelerators);
        let if_needed = given.if_needed();
        let asked = Question { job: &job, model, given: if_needed.as_ref().unwrap_or(given), accelerators };
        let refused = |name: &str, obstacle, refusal| {
            let nearest = asked.nearest(obstacle);
            RequestError::Refused { name: name.into(), refusal, nearest }
        };
        let machine = |refusal| refused(&self.platform, Obstacle::Machine, refusal);
        let uneven = |refusal| refused(&self.model, Obstacle::Evenness, refusal);
        self.check_machine(&job, model).map_err(machine)?;
        self.check_given(model).map_err(uneven)?;
        let mut outcome = search(&job, model, &given.space(&job, model, accelerators), threads, progress);
        if outcome.points == 0 {
            let batch = given.batch(model, accelerators);
            let given = Some(asked.words()).filter(|words| !words.is_empty());
            let given = given.map_or_else(String::new, |words| format!(" with {words}"));
            let none = || uneven(Refusal::Uneven { given, batch, asked: accelerators });
            return Err(outcome.refusal.map_or_else(none, machine));
        }
        if let (0, Some(given)) = (outcome.fits, &if_needed) {
            // The same blocks once more.
            let progress = |index, all| progress(all + index, 2 * all);
            outcome = search(&job, model, &given.space(&job, model, accelerators), threads, &progress);
        }
        if outcome.fits == 0 {
            outcome.would_fit = asked.nearest(Obstacle::Memory);
        }
        Ok(outcome)
    }

    /// Whether the platform has as many accelerators, and what is asked of them, however they are laid out.
    fn check_machine(&self, job: &Job<'_>, model: &Model) -> Result<(), Refusal> {
        if self.accelerators == 0 {
            return Err(Refusal::Zero { what: "the number of accelerators" });
        }
        let GivenLayout { precision, offload, tiers, .. } = self.layout;
        let offload = match tiers {
            Tiers::One(tier) if offload.is_none() => {
                Some(Offload { tier, weights: true, ..Offload::default() })
            }
            _ => offload,
        };
        let dp = Some(self.accelerators);
        let whole = GivenLayout { dp, precision, offload, ..GivenLayout::default() }.alone(self.accelerators);
        whole.check(model)?;
        job.check(&whole)
    }

    /// Whether what is given goes together, and with the model, whatever is chosen besides.
    fn check_given(&self, model: &Model) -> Result<(), Refusal> {
        let (given, asked) = (&self.layout, self.accelerators);
        let alone = given.alone(given.batch(model, asked));
        alone.check(model)?;
        let ranks = [alone.tp, alone.cp, alone.pp].map(u64::from).iter().product();
        if !u64::from(asked).is_multiple_of(ranks) {
            return Err(Refusal::Ranks { ranks, asked });
        }
        let all = [given.tp, given.cp, given.pp].iter().all(Option::is_some);
        let copies = u64::from(asked) / ranks;
        match given.dp {
            Some(dp) if !copies.is_multiple_of(dp.into()) || all && copies != u64::from(dp) => {
                Err(Refusal::Accelerators { ranks, dp, asked })
            }
            _ => Ok(()),
        }
    }

    /// What the machine costs a second.
    ///
    /// # Errors
    /// When a file is damaged, or says nothing of the machine.
    pub fn rates(&self, prices: &Prices) -> Result<Rates, RequestError> {
        let platform = Platform::load(&self.platform)?;
        let job = self.job(&self.platform, &platform)?;
        Ok(prices.rates(&self.platform, &platform, job.rack(), self.accelerators)?)
    }

    /// Predicts the fastest layout that fits of those that have what is given, or the nearest to fitting.
    ///
    /// # Errors
    /// As [`Request::search`]. That the other platform cannot run the layout is in the answer.
    pub fn train(&self, threads: usize, progress: Progress<'_>) -> Result<Answer, RequestError> {
        let (platform, model) = (Platform::load(&self.platform)?, self.model()?);
        let outcome = self.look(&platform, &model, threads, progress)?;
        let followed = FollowedFlits::default();
        if self.fidelity == Fidelity::L2 {
            self.answers(&platform, &model, &outcome, &followed)?;
            let too_many = |error: TransferError| RequestError::refused(&self.platform, error.into());
            followed.begin(self.flits.window_bytes).map_err(too_many)?;
        }
        self.answers(&platform, &model, &outcome, &followed)
    }

    /// The same, of which flits are counted or followed with those of other requests.
    pub(crate) fn train_sharing(&self, followed: &FollowedFlits) -> Result<Answer, RequestError> {
        let (platform, model) = (Platform::load(&self.platform)?, self.model()?);
        let outcome = self.look(&platform, &model, 1, &|_, _| ())?;
        self.answers(&platform, &model, &outcome, followed)
    }

    /// What was found, and the same on the other platform.
    fn answers(
        &self,
        platform: &Platform,
        model: &Model,
        outcome: &Outcome,
        followed: &FollowedFlits,
    ) -> Result<Answer, RequestError> {
        let chosen = outcome.best().or(outcome.nearest.as_ref()).map(|chosen| chosen.layout);
        let Some(layout) = chosen else { unreachable!("a layout was predicted") };
        let mut answer =
            self.answer(&self.platform, platform, model, (&layout, &self.failed), outcome.points, followed)?;
        answer.would_fit.clone_from(&outcome.would_fit);
        if let Some(other) = &self.against {
            let (file, there) = self.on(other);
            match there.answer(other, &Platform::load(file)?, model, (&layout, &[]), 1, followed) {
                Ok(other) => {
                    answer.note = answer.note.or(other.note.clone()).map(|_| UNPROVED_DIFFERENCE.into());
                    let predicted = answer.step.total_s / other.step.total_s;
                    // What does not fit takes no time that could be compared.
                    let is_comparable = answer.fits && other.fits;
                    answer.times_against =
                        is_comparable.then(|| answer.margin.times(&other.margin, predicted));
                    answer.against = Some(Box::new(other));
                }
                Err(refused) => answer.left_out = Some(refused.to_string()),
            }
        }
        let Layout { offload, .. } = layout;
        let is_needed = answer.fits && offload.is_any() && self.layout.if_needed().is_some();
        let needed = is_needed.then(|| {
            format!("nothing fits in the accelerators' memory on {}: the layout has {offload}", self.platform)
        });
        let notes = [needed, answer.note, unjudged(model).map(Into::into), self.rerouted(platform)];
        let notes: Vec<_> = notes.into_iter().flatten().collect();
        answer.note = (!notes.is_empty()).then(|| notes.join(", and "));
        Ok(answer)
    }

    /// What a failed link changes of all routes, also of those that never took it.
    fn rerouted(&self, platform: &Platform) -> Option<String> {
        let topology = &platform.between.as_ref()?.topology;
        let whole = match topology {
            Topology::Dragonfly { .. } => "take detours through other groups too",
            Topology::Torus { .. } => "go one axis after the other",
            _ => return None,
        };
        let is_changed = self.fidelity == Fidelity::L1 && !self.failed.is_empty();
        is_changed.then(|| {
            format!("with a failed link all flows take the shortest ways that are left, without detours; with none they {whole}")
        })
    }

    fn answer(
        &self,
        name: &str,
        platform: &Platform,
        model: &Model,
        (layout, failed): (&Layout, &[(u32, u32)]),
        points: u64,
        followed: &FollowedFlits,
    ) -> Result<Answer, RequestError> {
        let refused = |refusal| RequestError::refused(name, refusal);
        let job = self.job(name, platform)?.with_fidelity(self.fidelity, self.flits).map_err(refused)?;
        let job = job.with_failed(failed).map_err(refused)?.sharing(followed);
        let (planned, stages) = job.predict_stages(model, layout).map_err(refused)?;
        let PlannedStep { layout, fill, step, flits } = planned;
        let compute = job.rack().accelerator.compute;
        let margin = Margin::of(&job.rack().accelerator, StepClass::of(model, &layout))?;
        let peak = match layout.precision {
            Precision::Bf16 => compute.bf16,
            Precision::Fp8 => compute.fp8,
            Precision::Fp32 => compute.fp32,
        };
        Ok(Answer {
            kind: "simulated",
            model: self.model.clone(),
            sequence: model.sequence,
            platform: name.into(),
            machine: job.recorded(),
            fabrics: job.fabrics(),
            accelerators: self.accelerators,
            rack: job.rack_name().into(),
            fill,
            order: job.order(),
            fidelity: self.fidelity,
            flits,
            failed: failed.to_vec(),
            layout,
            stages,
            step,
            model_flops: model.flops(layout.batch),
            peak_flops: peak.map_or(0.0, FlopRate::value),
            points,
            fits: step.memory.fits(),
            range_s: margin.spread(step.total_s),
            margin,
            would_fit: vec![],
            against: None,
            times_against: None,
            left_out: None,
            note: job.unproved(&layout.offload).map(Into::into),
        })
    }
}

impl Answer {
    /// Operations a second of each accelerator, as the model counts them.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.model_flops / self.step.total_s / f64::from(self.accelerators)
    }
}
