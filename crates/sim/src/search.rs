//! Predicts every layout of a space, each as a single prediction would.
//!
//! The order of the walk lets layouts share work: first a block, then stages and copies, then parts of stages. For each layout
//! two questions are left: what runs beside what, and what lies where. Only the best layouts are kept.

pub(crate) mod mixed;
pub(crate) mod nearest;
pub(crate) mod pays;
pub(crate) mod request;
pub(crate) mod rows;
pub(crate) mod tier;

use crate::judge::margin::Margin;
use crate::step::block::{Block, Key};
use crate::step::closed_form::{Copies, Parts, Shared, Stages};
use crate::step::figures::{MemoryUse, Step};
use crate::step::job::Job;
use crate::step::layout::{
    Layout, Offload, Overlap, Precision, Recompute, Refusal, Zero, check_parts, is_even,
};
use crate::step::machine::Machine;
use crate::step::model::Model;

/// The layouts that are looked at: each choice with each other, as far as they go together.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// Accelerators.
    pub accelerators: u32,
    /// Sequences of a step.
    pub batch: u32,
    /// Ranks that share a matrix.
    pub tp: Vec<u32>,
    /// Ranks that share a sequence.
    pub cp: Vec<u32>,
    /// Ranks that share experts.
    pub ep: Vec<u32>,
    /// Stages; copies of the model fill the rest.
    pub pp: Vec<u32>,
    /// How many copies that must be, if that is given.
    pub dp: Option<u32>,
    /// Parts of a stage, where all are alike.
    pub interleave: Vec<u32>,
    /// Those of them that are looked at too where stages or parts are not.
    pub uneven: Vec<u32>,
    /// Sequences at once.
    pub micro_batch: Vec<u32>,
    /// Sharing along the sequence.
    pub sequence_parallel: Vec<bool>,
    /// Gathering again what is shared along the sequence.
    pub gather_again: Vec<bool>,
    /// What is computed again.
    pub recompute: Vec<Recompute>,
    /// Fused attention.
    pub flash: Vec<bool>,
    /// What copies share.
    pub zero: Vec<Zero>,
    /// What products are computed in.
    pub precision: Vec<Precision>,
    /// Gradients in 32 bits.
    pub wide_gradients: Vec<bool>,
    /// What runs beside computation.
    pub overlap: Vec<Overlap>,
    /// What lies elsewhere.
    pub offload: Vec<Offload>,
}

/// Of each kind, at most, in [`Space::default_for`].
const MOST_RANKS: u32 = 64;
/// Tokens beyond which sequences are long, and ranks that share one up to there, and beyond.
const LONG: u32 = 16_384;
const MOST_OF_SEQUENCE: [u32; 2] = [2, 32];
/// Sequences at once, at most.
const MOST_AT_ONCE: u32 = 16;

impl Space {
    /// All that a user would try today: everything that divides, fused attention, all that can overlap in the usual schedules
    /// overlapped, no offload; without what [`Space::left_out`] says.
    #[must_use]
    pub fn default_for(model: &Model, accelerators: u32, batch: u32) -> Self {
        let divisors = |of: u32, most: u32| {
            (1..=of.min(most)).filter(|divisor| of.is_multiple_of(*divisor)).collect::<Vec<_>>()
        };
        let powers = |most: u32| (0..=most.ilog2()).map(|exponent| 1 << exponent).collect::<Vec<_>>();
        Self {
            accelerators,
            batch,
            tp: divisors(model.heads, MOST_RANKS.min(accelerators)),
            cp: powers(MOST_OF_SEQUENCE[usize::from(model.sequence > LONG)]),
            ep: model.experts.map_or(vec![1], |experts| divisors(experts.count, MOST_RANKS)),
            pp: (1..=model.layers.min(accelerators))
                .filter(|stages| accelerators.is_multiple_of(*stages))
                .collect(),
            dp: None,
            interleave: (1..=model.layers).collect(),
            // Every number would be several times as many layouts.
            uneven: powers(model.layers),
            micro_batch: powers(MOST_AT_ONCE),
            sequence_parallel: vec![false, true],
            gather_again: vec![true],
            recompute: vec![Recompute::None, Recompute::Selective, Recompute::Full],
            flash: vec![true],
            zero: vec![Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Weights],
            precision: vec![Precision::Bf16],
            wide_gradients: vec![true],
            overlap: vec![Overlap::USUAL],
            offload: vec![Offload::default()],
        }
    }

    /// What [`Space::default_for`] leaves out, in words.
    #[must_use]
    pub fn left_out() -> String {
        let [most, most_of_long] = MOST_OF_SEQUENCE;
        format!(
            "tp and ep above {MOST_RANKS}; cp above {most}, {most_of_long} with more than {LONG} tokens; micro-batches above \
             {MOST_AT_ONCE}; cp, micro-batches and, where stages or parts are uneven, interleaving by other than powers of two; \
             expert overlapped, anything else exposed; what is gathered kept; recomputation by operator; attention unfused; gradients in 16 bits; fp8, fp32"
        )
    }

    /// The keys of all blocks, in order; of two that are the same block in other words the first.
    fn keys(&self) -> Vec<Key> {
        let mut keys = vec![];
        let keeps_all = self.recompute.contains(&Recompute::None);
        let overlaps = Overlap::all().filter(|it| self.overlap.iter().any(|other| other.of_block() == *it));
        let overlaps: Vec<_> = overlaps.collect();
        for &tp in &self.tp {
            for &cp in &self.cp {
                for &ep in &self.ep {
                    for &micro_batch in &self.micro_batch {
                        for &sequence_parallel in &self.sequence_parallel {
                            for &gather_again in &self.gather_again {
                                for &recompute in &self.recompute {
                                    for &flash in &self.flash {
                                        // Fused attention computes its scores again anyway.
                                        if flash && recompute == Recompute::Selective && keeps_all {
                                            continue;
                                        }
                                        for &precision in &self.precision {
                                            keys.extend(overlaps.iter().map(|&overlap| Key {
                                                tp,
                                                cp,
                                                ep,
                                                micro_batch,
                                                sequence_parallel,
                                                gather_again,
                                                recompute,
                                                flash,
                                                precision,
                                                overlap,
                                            }));
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        keys
    }

    /// Each number of stages with the numbers of parts that a stage can be cut into.
    fn cuts(&self, model: &Model) -> Vec<(u32, Vec<u32>)> {
        let cut = |&pp: &u32| {
            let has_blocks = |parts: &u32| (1..=model.layers / pp.max(1)).contains(parts);
            let is_cut =
                |parts: &u32| is_even(model, pp, *parts) || has_blocks(parts) && self.uneven.contains(parts);
            (pp, self.interleave.iter().copied().filter(is_cut).collect())
        };
        self.pp.iter().map(cut).collect()
    }
}

/// A layout with what is predicted for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FoundLayout {
    /// The layout.
    pub layout: Layout,
    /// What it takes.
    pub step: Step,
}

/// What a search has found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Layouts that were predicted.
    pub points: u64,
    /// Those among them that fit.
    pub fits: u64,
    /// Why the platform cannot run a layout that the model can be cut into: the first such reason.
    pub refusal: Option<Refusal>,
    /// The layout that comes nearest to what the tiers have, when none fits.
    pub nearest: Option<FoundLayout>,
    /// What would fit when nothing does, each with one thing changed: what [`Request::search`](crate::Request::search)
    /// then tries besides.
    pub would_fit: Vec<String>,
    /// What no other layout is better than in time, in the accelerator's memory and in the other tier; the fastest first.
    pub front: Vec<FoundLayout>,
}

impl Outcome {
    /// The fastest that fits.
    #[must_use]
    pub fn best(&self) -> Option<&FoundLayout> {
        self.front.first()
    }
}

/// The best so far. The outcome is the same in whatever order points come, for each has its place in the space: of two that
/// are equally good the earlier counts.
#[derive(Default)]
struct Best {
    points: u64,
    fits: u64,
    refusal: Option<(u64, Refusal)>,
    nearest: Option<(f64, u64, FoundLayout)>,
    /// What each of the front takes, beside each other so that most points are dismissed at a glance.
    costs: Vec<Cost>,
    #[expect(clippy::vec_box, reason = "they change places often, and are long")]
    front: Vec<Box<FoundLayout>>,
}

#[derive(Clone, Copy)]
struct Cost {
    total_s: f64,
    used: f64,
    far: f64,
    place: u64,
}

impl Cost {
    fn of(step: &Step, place: u64) -> Self {
        let [used, far] = step.memory.tiers.map(|tier| tier.used_bytes);
        Self { total_s: step.total_s, used, far, place }
    }

    /// Whether nothing speaks for the other.
    fn covers(&self, other: &Self) -> bool {
        let no_worse = self.total_s <= other.total_s && self.used <= other.used && self.far <= other.far;
        let equal = self.total_s == other.total_s && self.used == other.used && self.far == other.far;
        no_worse && (!equal || self.place < other.place)
    }
}

impl Best {
    fn refuse(&mut self, place: u64, refusal: Refusal) {
        if self.refusal.as_ref().is_none_or(|(known, _)| place < *known) {
            self.refusal = Some((place, refusal));
        }
    }

    /// Counts a layout that fits. Only of one that nothing covers is more than its costs looked at.
    #[inline(always)]
    fn add(&mut self, place: u64, layout: &Layout, memory: MemoryUse, shared: &Shared<'_>) {
        self.points += 1;
        self.fits += 1;
        let cost = Cost::of(&shared.finish(layout, memory), place);
        if !self.is_covered(&cost) {
            self.offer(&cost, || FoundLayout { layout: *layout, step: shared.step(layout) });
        }
    }

    #[inline(always)]
    fn is_covered(&mut self, cost: &Cost) -> bool {
        let Some(index) = self.costs.iter().position(|it| it.covers(cost)) else { return false };
        // What dismisses one point dismisses its neighbours.
        if index > 0 {
            self.costs.swap(index, index / 2);
            self.front.swap(index, index / 2);
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn offer(&mut self, cost: &Cost, found: impl FnOnce() -> FoundLayout) {
        for index in (0..self.costs.len()).rev() {
            if cost.covers(&self.costs[index]) {
                self.costs.swap_remove(index);
                self.front.swap_remove(index);
            }
        }
        self.costs.push(*cost);
        self.front.push(Box::new(found()));
    }

    /// Counts so many layouts that do not fit and lie alike, the first of which is this one.
    #[inline(always)]
    fn miss(&mut self, count: usize, place: u64, layout: &Layout, memory: &MemoryUse, shared: &Shared<'_>) {
        self.points += count as u64;
        if self.fits == 0 {
            let found = || FoundLayout { layout: *layout, step: shared.step(layout) };
            self.offer_nearest(over(memory), place, found);
        }
    }

    #[cold]
    #[inline(never)]
    fn offer_nearest(&mut self, over: f64, place: u64, found: impl FnOnce() -> FoundLayout) {
        if self.nearest.as_ref().is_none_or(|(known, at, _)| (over, place) < (*known, *at)) {
            self.nearest = Some((over, place, found()));
        }
    }

    fn join(&mut self, other: Self) {
        for (cost, layout) in other.costs.iter().zip(&other.front) {
            if !self.is_covered(cost) {
                self.offer(cost, || **layout);
            }
        }
        if let Some((place, refusal)) = other.refusal {
            self.refuse(place, refusal);
        }
        if let Some((over, place, layout)) = other.nearest {
            self.offer_nearest(over, place, || layout);
        }
        self.points += other.points;
        self.fits += other.fits;
    }

    fn outcome(self) -> Outcome {
        let mut front: Vec<_> = self.costs.into_iter().zip(self.front).collect();
        front.sort_by(|(a, _), (b, _)| a.total_s.total_cmp(&b.total_s).then(a.place.cmp(&b.place)));
        Outcome {
            points: self.points,
            fits: self.fits,
            refusal: self.refusal.map(|(_, refusal)| refusal),
            nearest: self.nearest.filter(|_| self.fits == 0).map(|(_, _, found)| found),
            would_fit: vec![],
            front: front.into_iter().map(|(_, found)| *found).collect(),
        }
    }
}

/// Bytes beyond what there is.
fn over(memory: &MemoryUse) -> f64 {
    let [accelerator, offloaded] = memory.tiers.map(|tier| (tier.used_bytes - tier.capacity_bytes).max(0.0));
    accelerator + offloaded
}

/// Of points on several platforms those that no other beats in time, in the accelerator's memory, in the other tier and in
/// what they cost besides, all of which grows with time; the one that surely ends first comes first, and of equal ones the earlier.
///
/// A point on another accelerator beats one in these only where the whole of its range does.
#[must_use]
pub fn front<'m, T: Clone, const N: usize>(
    points: &[(T, FoundLayout)],
    margin: impl Fn(&(T, FoundLayout)) -> &'m Margin,
    costs: impl Fn(&(T, FoundLayout)) -> [f64; N],
) -> Vec<(T, FoundLayout)> {
    struct Axes<const N: usize> {
        /// The first point of the same accelerator.
        accelerator: usize,
        range: [f64; 2],
        bytes: [f64; 2],
        seconds: f64,
        costs: [f64; N],
    }
    let margins: Vec<_> = points.iter().map(margin).collect();
    let axes: Vec<_> = points
        .iter()
        .zip(&margins)
        .map(|(point, margin)| Axes {
            accelerator: margins.iter().position(|it| it.is_of_one_accelerator(margin)).unwrap_or(0),
            range: margin.range,
            bytes: point.1.step.memory.tiers.map(|tier| tier.used_bytes),
            seconds: point.1.step.total_s,
            costs: costs(point),
        })
        .collect();
    let is_beaten = |place: usize| {
        let own = &axes[place];
        axes.iter().enumerate().any(|(at, other)| {
            let [most, least] = match other.accelerator == own.accelerator {
                true => [1.0; 2],
                false => [other.range[1], own.range[0]],
            };
            let in_time = |other: f64, own: f64| other * most <= own * least;
            let equal = (other.seconds, other.bytes, other.costs) == (own.seconds, own.bytes, own.costs);
            (at < place || !equal)
                && other.bytes.iter().zip(&own.bytes).all(|(other, own)| other <= own)
                && in_time(other.seconds, own.seconds)
                && other.costs.iter().zip(&own.costs).all(|(other, own)| in_time(*other, *own))
        })
    };
    let best = points.iter().enumerate().filter(|(place, _)| !is_beaten(*place));
    let mut front: Vec<_> =
        best.map(|(place, point)| (axes[place].range[1] * axes[place].seconds, point)).collect();
    front.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    front.into_iter().map(|(_, point)| point.clone()).collect()
}

/// Told of each block that is done, of how many.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Predicts every layout of `space` on `threads` threads. `progress` is told of every block that is done, of how many.
///
/// The same space gives the same outcome on any number of threads.
pub fn search(
    job: &Job<'_>,
    model: &Model,
    space: &Space,
    threads: usize,
    progress: Progress<'_>,
) -> Outcome {
    let (keys, cuts) = (space.keys(), space.cuts(model));
    let threads = threads.clamp(1, keys.len().max(1));
    let walk = |first: usize| {
        let mut best = Best::default();
        for (index, key) in keys.iter().enumerate().skip(first).step_by(threads) {
            each_of_block(job, model, space, &cuts, key, (index as u64) << 32, &mut best);
            progress(index, keys.len());
        }
        best
    };
    let best = std::thread::scope(|scope| {
        let walk = &walk;
        let others: Vec<_> = (1..threads).map(|first| scope.spawn(move || walk(first))).collect();
        let mut best = walk(0);
        for other in others {
            best.join(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        best
    });
    best.outcome()
}

/// The offloads with which the machine can run a layout; none if it cannot run the layout as it is.
fn runnable_offloads(
    machine: &Machine,
    layout: &Layout,
    offloads: &[Offload],
    place: u64,
    best: &mut Best,
) -> Vec<Offload> {
    let mut can_run = |offload: &Offload| {
        let checked = machine.check(&Layout { offload: *offload, ..*layout });
        checked.map_err(|refusal| best.refuse(place, refusal)).is_ok()
    };
    match can_run(&layout.offload) {
        true => offloads.iter().copied().filter(can_run).collect(),
        false => vec![],
    }
}

/// Predicts the layouts that share a block; `place` is that of the first.
fn each_of_block(
    job: &Job<'_>,
    model: &Model,
    space: &Space,
    cuts: &[(u32, Vec<u32>)],
    key: &Key,
    mut place: u64,
    best: &mut Best,
) {
    if key.layout(1, 1, 1, space.batch).check_counts().is_err()
        || key.layout(1, 1, 1, space.batch).check_block(model).is_err()
    {
        return;
    }
    let (mut known, mut copies) = (None, vec![]);
    let of_zero = |&zero| space.wide_gradients.iter().map(move |wide_gradients| (zero, *wide_gradients));
    let shares: Vec<_> = space.zero.iter().flat_map(of_zero).collect();
    let overlaps: Vec<_> = space.overlap.iter().filter(|it| it.of_block() == key.overlap).copied().collect();
    for &(pp, ref parts) in cuts {
        let ranks = u64::from(key.ranks()) * u64::from(pp);
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX);
        let is_whole = ranks != 0 && space.accelerators.is_multiple_of(ranks);
        if !is_whole || space.dp.is_some_and(|dp| dp != space.accelerators / ranks) {
            continue;
        }
        let mut layout = key.layout(space.accelerators / ranks, pp, 1, space.batch);
        if layout.check_copies(model).is_err() {
            continue;
        }
        let count = layout.micro_batches();
        let is_cut = |interleave: &u32| check_parts(model, pp, *interleave, count).is_ok();
        let mut parts = parts.iter().copied().filter(is_cut).peekable();
        if parts.peek().is_none() {
            continue;
        }
        if !job.order().is_block_first() {
            known = None;
        }
        let (machine, block, offloads) = known.get_or_insert_with(|| {
            let machine = job.machine(&layout);
            let block = Block::new(&machine, model, &layout);
            let offloads = runnable_offloads(&machine, &layout, &space.offload, place, best);
            (machine, block, offloads)
        });
        if offloads.is_empty() {
            continue;
        }
        let stages = Stages::new(machine, model, block, &layout);
        copies.clear();
        for &(zero, wide_gradients) in &shares {
            (layout.zero, layout.wide_gradients) = (zero, wide_gradients);
            copies.push(Copies::new(machine, &layout, &stages));
        }
        for interleave in parts {
            layout.interleave = interleave;
            let parts = Parts::new(block, &layout, &stages);
            for (&(zero, wide_gradients), copies) in shares.iter().zip(&copies) {
                (layout.zero, layout.wide_gradients) = (zero, wide_gradients);
                let shared = Shared { machine, stages: &stages, copies, parts: &parts };
                for &offload in &*offloads {
                    layout.offload = offload;
                    let memory = shared.memory(&layout);
                    if memory.fits() {
                        for (place, &overlap) in (place..).zip(&overlaps) {
                            layout.overlap = overlap;
                            best.add(place, &layout, memory, &shared);
                        }
                    } else {
                        layout.overlap = overlaps[0];
                        best.miss(overlaps.len(), place, &layout, &memory, &shared);
                    }
                    place += overlaps.len() as u64;
                }
            }
        }
    }
}
