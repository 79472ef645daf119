//! What a front asks: a step on a platform, with whatever of its layout is given; the rest is searched for.

use polder_platform::Platform;
use serde::{Deserialize, Serialize};

use crate::layout::{FarTier, Layout, Offload, Overlap, Precision, Recompute, Refusal, Zero};
use crate::model::Model;
use crate::search::{Found, Outcome, Space, search};
use crate::step::Step;
use crate::train::{Job, Plan};

/// What of a layout is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Given {
    /// Tensor parallelism.
    pub tp: Option<u32>,
    /// Context parallelism.
    pub cp: Option<u32>,
    /// Expert parallelism.
    pub ep: Option<u32>,
    /// Copies of the model.
    pub dp: Option<u32>,
    /// Stages.
    pub pp: Option<u32>,
    /// Parts of a stage.
    pub interleave: Option<u32>,
    /// Sequences of a step; when left out the power of two that makes 16 Mi tokens at most.
    pub batch: Option<u32>,
    /// Sequences at once.
    pub micro_batch: Option<u32>,
    /// Sharing along the sequence.
    pub sequence_parallel: Option<bool>,
    /// What is computed again.
    pub recompute: Option<Recompute>,
    /// What copies share.
    pub zero: Option<Zero>,
    /// Gradients in 32 bits; yes when left out.
    pub wide_gradients: Option<bool>,
    /// Fused attention; yes when left out.
    pub flash: Option<bool>,
    /// What products are computed in; bf16 when left out.
    pub precision: Option<Precision>,
    /// What runs beside computation; all that can when left out.
    pub overlap: Option<Overlap>,
    /// What lies elsewhere; nothing when left out.
    pub offload: Option<Offload>,
    /// Whether everything is tried elsewhere, in each tier, when `offload` is left out.
    pub tiers: bool,
}

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
    /// Another platform, which the same layout is predicted on too.
    pub against: Option<String>,
    /// Tokens of a sequence, in place of the model's.
    pub sequence: Option<u32>,
    /// What of the layout is given.
    #[serde(default)]
    pub layout: Given,
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// How the figures were obtained: "simulated".
    pub kind: &'static str,
    /// The model's name or path.
    pub model: String,
    /// The platform's name or path.
    pub platform: String,
    /// Accelerators.
    pub accelerators: u32,
    /// Accelerators of each rack that are used.
    pub fill: u32,
    /// How the step is laid out.
    pub layout: Layout,
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
    /// The same layout on another platform.
    pub against: Option<Box<Self>>,
    /// What must be said with it.
    pub note: Option<&'static str>,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A file is damaged or missing.
    #[error(transparent)]
    Data(#[from] polder_platform::DataError),
    /// The platform, or the model, refuses.
    #[error("{name}: {refusal}")]
    Refused {
        /// Which.
        name: String,
        /// Why.
        refusal: Refusal,
    },
    /// No layout takes as many accelerators.
    #[error("no layout of {model} takes {accelerators} accelerators: give a number that 2 divides often")]
    None {
        /// The model.
        model: String,
        /// The accelerators.
        accelerators: u32,
    },
}

const UNPROVED: &str = "no run over CXL validates the difference between these fabrics";

/// Told of each block that is done, of how many.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

impl Given {
    /// The layouts that have what is given.
    #[must_use]
    pub fn space(&self, model: &Model, accelerators: u32) -> Space {
        let batch = self.batch.unwrap_or_else(|| 1 << ((16 << 20) / model.sequence).max(1).ilog2());
        let all = Space::usual(model, accelerators, batch);
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
            micro_batch: only(all.micro_batch, self.micro_batch),
            sequence_parallel: only(all.sequence_parallel, self.sequence_parallel),
            recompute: only(all.recompute, self.recompute),
            zero: only(all.zero, self.zero),
            wide_gradients: only(all.wide_gradients, self.wide_gradients),
            flash: only(all.flash, self.flash),
            precision: only(all.precision, self.precision),
            overlap: only(all.overlap, self.overlap),
            offload: match self.offload {
                Some(offload) => vec![offload],
                None if self.tiers => offloads(),
                None => all.offload,
            },
            ..all
        }
    }
}

/// Nothing elsewhere, then each choice in each tier.
fn offloads() -> Vec<Offload> {
    let far = |tier| {
        let bit = |it: u32, at: u32| it & 1 << at != 0;
        (1..8).map(move |it| Offload {
            tier,
            weights: bit(it, 0),
            optimizer: bit(it, 1),
            activations: bit(it, 2),
        })
    };
    [Offload::default()].into_iter().chain(far(FarTier::Host)).chain(far(FarTier::Pool)).collect()
}

impl Request {
    fn job<'a>(&self, name: &str, platform: &'a Platform) -> Result<Job<'a>, RequestError> {
        let refused = |refusal| RequestError::Refused { name: name.into(), refusal };
        let mut job = Job::new(platform);
        if let Some(rack) = &self.rack {
            job = job.with_rack(rack).map_err(refused)?;
        }
        match self.fill {
            Some(fill) => job.with_fill(fill).map_err(refused),
            None => Ok(job),
        }
    }

    fn model(&self) -> Result<Model, RequestError> {
        let model = Model::load(&self.model)?;
        let model = Model { sequence: self.sequence.unwrap_or(model.sequence), ..model };
        model.check().map_err(|(key, problem)| polder_platform::DataError::new(&self.model, key, problem))?;
        Ok(model)
    }

    /// Predicts every layout that has what is given.
    ///
    /// # Errors
    /// When a file is damaged, or no layout can run at all; one that does not fit is in the outcome.
    pub fn search(&self, threads: usize, progress: Progress<'_>) -> Result<Outcome, RequestError> {
        let platform = Platform::load(&self.platform)?;
        let model = self.model()?;
        let job = self.job(&self.platform, &platform)?;
        let space = self.layout.space(&model, self.accelerators);
        let outcome = search(&job, &model, &space, threads, progress);
        match outcome.points {
            0 => Err(self.why_none(&job, &model, &space, outcome)),
            _ => Ok(outcome),
        }
    }

    /// Why no layout goes: the platform's reason, or that of the layout that was given.
    fn why_none(&self, job: &Job<'_>, model: &Model, space: &Space, outcome: Outcome) -> RequestError {
        if let Some(refusal) = outcome.refusal {
            return RequestError::Refused { name: self.platform.clone(), refusal };
        }
        let refused = |refusal| RequestError::Refused { name: self.model.clone(), refusal };
        let Some(layout) = space.first() else { return refused(Refusal::Large) };
        let ranks = [layout.tp, layout.cp, layout.pp].map(u64::from).iter().product::<u64>();
        if ranks != 0 && ranks.saturating_mul(layout.dp.into()) != u64::from(self.accelerators) {
            let alone = Layout { dp: 1, ep: 1, micro_batch: 1, interleave: 1, ..layout };
            let count = Refusal::Accelerators { ranks, dp: layout.dp, asked: self.accelerators };
            return refused(alone.check(model).err().unwrap_or(count));
        }
        match job.predict(model, &layout) {
            Err(refusal) => refused(refusal),
            Ok(_) => RequestError::None { model: self.model.clone(), accelerators: self.accelerators },
        }
    }

    /// Predicts the fastest layout that fits of those that have what is given, or the nearest to fitting.
    ///
    /// # Errors
    /// As [`Request::search`]; and when the other platform cannot run the layout.
    pub fn train(&self, threads: usize, progress: Progress<'_>) -> Result<Answer, RequestError> {
        let outcome = self.search(threads, progress)?;
        let found = outcome.best().or(outcome.nearest.as_ref()).map(|found| found.layout);
        let Some(layout) = found else { unreachable!("a layout was predicted") };
        let model = self.model()?;
        let mut answer = self.answer(&self.platform, &model, &layout, outcome.points)?;
        if let Some(other) = &self.against {
            let other = self.answer(other, &model, &layout, 1)?;
            answer.note = answer.note.or(other.note);
            answer.against = Some(Box::new(other));
        }
        Ok(answer)
    }

    fn answer(
        &self,
        name: &str,
        model: &Model,
        layout: &Layout,
        points: u64,
    ) -> Result<Answer, RequestError> {
        let platform = Platform::load(name)?;
        let job = self.job(name, &platform)?;
        let refused = |refusal| RequestError::Refused { name: name.into(), refusal };
        let Plan { layout, fill, step } = job.predict(model, layout).map_err(refused)?;
        let compute = job.rack().accelerator.compute;
        let peak = match layout.precision {
            Precision::Fp8 => compute.fp8.unwrap_or(compute.bf16),
            Precision::Bf16 => compute.bf16,
        };
        let is_cxl = platform.between.as_ref().is_some_and(|between| !between.carries.is_empty());
        Ok(Answer {
            kind: "simulated",
            model: self.model.clone(),
            platform: name.into(),
            accelerators: self.accelerators,
            fill,
            layout,
            step,
            model_flops: model.flops(layout.batch),
            peak_flops: peak.value(),
            points,
            fits: step.memory.fits(),
            against: None,
            note: is_cxl.then_some(UNPROVED),
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

/// Of points on several platforms those that no other beats in time, in the accelerator's memory and in the other tier; the
/// fastest first, and of equal ones those of the earlier platform.
#[must_use]
pub fn front<T: Clone>(points: &[(T, Found)]) -> Vec<(T, Found)> {
    let cost =
        |found: &Found| [found.step.total_s, found.step.memory.used_bytes, found.step.memory.far_bytes];
    let is_beaten = |(index, (_, found)): (usize, &(T, Found))| {
        let ours = cost(found);
        points.iter().enumerate().any(|(other, (_, it))| {
            let theirs = cost(it);
            (0..3).all(|axis| theirs[axis] <= ours[axis]) && (theirs != ours || other < index)
        })
    };
    let mut front: Vec<_> = points
        .iter()
        .enumerate()
        .filter(|point| !is_beaten(*point))
        .map(|(_, point)| point.clone())
        .collect();
    front.sort_by(|(_, a), (_, b)| a.step.total_s.total_cmp(&b.step.total_s));
    front
}

/// The numbers of a layout, in the order of [`NUMBERS`].
#[must_use]
pub fn numbers(layout: &Layout) -> [u32; NUMBERS.len()] {
    let Overlap { tensor, pipeline, data, offload } = layout.overlap;
    let Offload { tier, weights, optimizer, activations } = layout.offload;
    [
        layout.tp,
        layout.cp,
        layout.ep,
        layout.dp,
        layout.pp,
        layout.interleave,
        layout.batch,
        layout.micro_batch,
        layout.sequence_parallel.into(),
        layout.recompute as u32,
        layout.flash.into(),
        layout.zero as u32,
        layout.precision as u32,
        layout.wide_gradients.into(),
        tensor.into(),
        pipeline.into(),
        data.into(),
        offload.into(),
        tier as u32,
        weights.into(),
        optimizer.into(),
        activations.into(),
    ]
}

/// The numbers that name a layout in a table of many; what is a choice is counted from 0 in the order of its type.
pub const NUMBERS: [&str; 22] = [
    "tp",
    "cp",
    "ep",
    "dp",
    "pp",
    "interleave",
    "batch",
    "micro_batch",
    "sequence_parallel",
    "recompute",
    "flash",
    "zero",
    "precision",
    "wide_gradients",
    "overlap_tensor",
    "overlap_pipeline",
    "overlap_data",
    "overlap_offload",
    "offload_tier",
    "offload_weights",
    "offload_optimizer",
    "offload_activations",
];

fn layout(numbers: &[u32]) -> Option<Layout> {
    let &[tp, cp, ep, dp, pp, interleave, batch, micro_batch, ref choices @ ..] = numbers else {
        return None;
    };
    let &[sequence_parallel, recompute, flash, zero, precision, wide_gradients, ref rest @ ..] = choices
    else {
        return None;
    };
    let &[tensor, pipeline, data, offload, tier, weights, optimizer, activations] = rest else { return None };
    Some(Layout {
        tp,
        cp,
        ep,
        dp,
        pp,
        interleave,
        batch,
        micro_batch,
        sequence_parallel: sequence_parallel != 0,
        recompute: *[Recompute::None, Recompute::Selective, Recompute::Full].get(recompute as usize)?,
        flash: flash != 0,
        zero: *[Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Weights].get(zero as usize)?,
        precision: *[Precision::Bf16, Precision::Fp8].get(precision as usize)?,
        wide_gradients: wide_gradients != 0,
        overlap: Overlap {
            tensor: tensor != 0,
            pipeline: pipeline != 0,
            data: data != 0,
            offload: offload != 0,
        },
        offload: Offload {
            tier: *[FarTier::Host, FarTier::Pool].get(tier as usize)?,
            weights: weights != 0,
            optimizer: optimizer != 0,
            activations: activations != 0,
        },
    })
}

/// Predicts many layouts, each given by the [`NUMBERS`] of a row; a row of [`Step::COLUMNS`] for each, all NaN where the layout
/// cannot run.
///
/// # Errors
/// When a file is damaged or missing, or the platform has no such rack.
pub fn points(
    model: &str,
    platform: &str,
    rack: Option<String>,
    fill: Option<u32>,
    numbers: &[u32],
) -> Result<Vec<f64>, RequestError> {
    let request = Request {
        model: model.into(),
        platform: platform.into(),
        accelerators: 0,
        rack,
        fill,
        against: None,
        sequence: None,
        layout: Given::default(),
    };
    let loaded = Platform::load(platform)?;
    let model = Model::load(model)?;
    let job = request.job(platform, &loaded)?;
    let rows = numbers.chunks_exact(NUMBERS.len()).map(|row| {
        let plan = layout(row).and_then(|layout| job.predict(&model, &layout).ok());
        plan.map_or([f64::NAN; Step::COLUMNS.len()], |plan| plan.step.columns())
    });
    Ok(rows.flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_the_one_that_its_numbers_name() {
        let row: Vec<_> = (0..8).map(|it| it + 1).chain([1, 2, 0, 3, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0]).collect();
        assert_eq!(numbers(&layout(&row).unwrap()).to_vec(), row);
        assert_eq!(layout(&[0; 22][..21]), None);
        let mut wrong = row;
        wrong[9] = 3;
        assert_eq!(layout(&wrong), None, "there are three kinds of recomputation");
    }
}
