//! What comes nearest to a question without an answer: one thing of it is changed at a time, and what then fits was predicted.

use crate::search::{FoundLayout, Space, search};
use crate::step::given::{GivenLayout, Tiers};
use crate::step::job::Job;
use crate::step::layout::{Layout, Precision, Recompute, Zero};
use crate::step::model::Model;
use crate::text::accelerators;

/// A question.
#[derive(Clone, Copy)]
pub(crate) struct Question<'a> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) model: &'a Model,
    pub(crate) given: &'a GivenLayout,
    pub(crate) accelerators: u32,
}

/// What stands in the way.
#[derive(Clone, Copy)]
pub(crate) enum Obstacle {
    /// The platform has not what is asked of it.
    Machine,
    /// Something does not divide, or is cut into more parts than it has.
    Evenness,
    /// There is too little memory.
    Memory,
}

/// What is changed, in words, and what is asked then.
type Change = (String, GivenLayout, u32);

/// A count that may be given, by its name.
type Count = (&'static str, fn(&mut GivenLayout) -> &mut Option<u32>);

const COUNTS: [Count; 7] = [
    ("tp", |it| &mut it.tp),
    ("cp", |it| &mut it.cp),
    ("ep", |it| &mut it.ep),
    ("dp", |it| &mut it.dp),
    ("pp", |it| &mut it.pp),
    ("interleave", |it| &mut it.interleave),
    ("micro-batch", |it| &mut it.micro_batch),
];

/// Values of one kind that are tried.
const TRIED: usize = 2048;

impl Question<'_> {
    /// Counts that are given, in words.
    pub(crate) fn words(&self) -> String {
        let mut given = self.given.clone();
        let counts =
            COUNTS.iter().filter_map(|(name, of)| of(&mut given).map(|own| format!("{name} of {own}")));
        counts.collect::<Vec<_>>().join(", ")
    }

    /// What would run and fit, the nearest of each kind of change; two changes only where none alone helps.
    pub(crate) fn nearest(&self, obstacle: Obstacle) -> Vec<String> {
        let choices =
            || self.choices(obstacle).into_iter().find_map(|changes| self.first(changes.into_iter()));
        let offload = || self.offload(self.accelerators);
        let others = || self.first(self.others());
        let (counts, rest) = match obstacle {
            Obstacle::Machine => (vec![], [choices(), offload(), others()]),
            Obstacle::Evenness => {
                (self.nearest_counts(), [self.first(self.batches(self.given)), others(), None])
            }
            Obstacle::Memory => {
                let more = self.times(|count| self.fits(self.given, count).then(String::new));
                (self.nearest_counts(), [choices(), offload(), more])
            }
        };
        let single: Vec<_> = counts.into_iter().chain(rest.into_iter().flatten()).collect();
        if !single.is_empty() {
            return single;
        }
        let two = match obstacle {
            Obstacle::Evenness => self.first(self.pairs()).or_else(|| self.first(self.without_counts())),
            Obstacle::Machine | Obstacle::Memory => {
                self.times(|count| Some(format!(" with {}", self.offload(count)?)))
            }
        };
        two.into_iter().collect()
    }

    /// Those two of the counts that are given that have to change by the least factor.
    fn nearest_counts(&self) -> Vec<String> {
        let mut given = self.given.clone();
        let changed = COUNTS.iter().filter_map(|count @ (_, of)| {
            let own = (*of(&mut given))?;
            let (words, mut changed, _) =
                self.counts(count).find(|(_, given, count)| self.fits(given, *count))?;
            let factor = f64::from(own.max(1)) / f64::from((*of(&mut changed))?);
            Some((factor.ln().abs(), words))
        });
        let mut changed: Vec<_> = changed.collect();
        changed.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        changed.into_iter().map(|(_, words)| words).take(2).collect()
    }

    fn found(&self, given: &GivenLayout, accelerators: u32) -> Option<FoundLayout> {
        given.check_counts().ok()?;
        let space = least_kept(given.space(self.job, self.model, accelerators));
        search(self.job, self.model, &space, 1, &|_, _| ()).best().copied()
    }

    fn fits(&self, given: &GivenLayout, accelerators: u32) -> bool {
        self.found(given, accelerators).is_some()
    }

    fn first(&self, mut changes: impl Iterator<Item = Change>) -> Option<String> {
        changes.find(|(_, given, accelerators)| self.fits(given, *accelerators)).map(|(words, ..)| words)
    }

    /// Each choice that is given with those in its place that ask for less.
    fn choices(&self, obstacle: Obstacle) -> Vec<Vec<Change>> {
        let own = self.given;
        let changed = |word: &dyn std::fmt::Debug, of: &str, given: GivenLayout| {
            (format!("{of}{word:?}").to_lowercase(), given, self.accelerators)
        };
        let precision = [Precision::Bf16, Precision::Fp32].map(|precision| {
            changed(
                &precision,
                "precision ",
                GivenLayout { precision: own.precision.and(Some(precision)), ..own.clone() },
            )
        });
        let again = [Recompute::Selective, Recompute::Full].map(|recompute| {
            changed(
                &recompute,
                "recompute ",
                GivenLayout { recompute: own.recompute.and(Some(recompute)), ..own.clone() },
            )
        });
        let zero = [Zero::Optimizer, Zero::Gradients, Zero::Weights].map(|zero| {
            changed(&zero, "zero ", GivenLayout { zero: own.zero.and(Some(zero)), ..own.clone() })
        });
        let all = match obstacle {
            Obstacle::Machine => vec![precision.to_vec()],
            Obstacle::Evenness => vec![],
            Obstacle::Memory => vec![again.to_vec(), zero.to_vec()],
        };
        all.into_iter()
            .map(|changes| changes.into_iter().filter(|(_, given, _)| given != own).collect())
            .collect()
    }

    /// A count that is given, changed: the nearest first.
    fn counts(&self, (name, of): &Count) -> impl Iterator<Item = Change> {
        let most = match *name {
            "interleave" => self.model.layers,
            "micro-batch" => self.given.batch(self.model, self.accelerators),
            _ => self.accelerators,
        };
        let any = *name == "interleave";
        let own = *of(&mut self.given.clone());
        let values = own.into_iter().flat_map(move |own| outward(own, most));
        values.filter(move |it| any || most.is_multiple_of(*it)).map(move |it| {
            let mut given = self.given.clone();
            *of(&mut given) = Some(it);
            (format!("{name} of {it}"), given, self.accelerators)
        })
    }

    fn batches(&self, given: &GivenLayout) -> impl Iterator<Item = Change> {
        outward(given.batch(self.model, self.accelerators), u32::MAX).take(TRIED).map(|batch| {
            let given = GivenLayout { batch: Some(batch), ..given.clone() };
            (format!("a batch of {batch}"), given, self.accelerators)
        })
    }

    /// Other accelerators, the nearest that the platform can join and the given ranks divide first.
    fn others(&self) -> impl Iterator<Item = Change> {
        let Layout { tp, cp, dp, pp, .. } = self.given.alone(1);
        let ranks = [tp, cp, dp, pp].into_iter().fold(1, u32::saturating_mul).max(1);
        let (from, most) = (self.accelerators / ranks, self.job.most_accelerators() / ranks);
        let below =
            (!self.accelerators.is_multiple_of(ranks)).then_some(from).filter(|it| (1..=most).contains(it));
        // Where nothing near is even, powers of two are.
        let powers = (0..u32::BITS).rev().map(|it| 1 << it).filter(move |it| *it <= most);
        let others = below.into_iter().chain(outward(from, most)).take(TRIED).chain(powers);
        others.map(move |copies| (accelerators(copies * ranks), self.given.clone(), copies * ranks))
    }

    /// A count and the batch.
    fn pairs(&self) -> impl Iterator<Item = Change> {
        let counts = COUNTS.iter().flat_map(|count| self.counts(count));
        counts.flat_map(|(words, given, _)| {
            let batches: Vec<_> = self.batches(&given).collect();
            batches
                .into_iter()
                .map(move |(batch, given, count)| (format!("{words} with {batch}"), given, count))
        })
    }

    /// The nearest accelerators when none of the counts is given.
    fn without_counts(&self) -> impl Iterator<Item = Change> {
        let mut free = self.given.clone();
        COUNTS.iter().for_each(|(_, of)| *of(&mut free) = None);
        let counts = std::iter::once(self.accelerators)
            .chain(outward(self.accelerators, self.job.most_accelerators()));
        let words = self.words();
        counts
            .take(TRIED)
            .map(move |count| (format!("{} without {words}", accelerators(count)), free.clone(), count))
    }

    /// The fewest times as many accelerators with which `fits` has something to say.
    fn times(&self, fits: impl Fn(u32) -> Option<String>) -> Option<String> {
        let most = self.job.most_accelerators() / self.accelerators.max(1);
        let tried = |times: u32| {
            fits(times * self.accelerators).map(|words| accelerators(times * self.accelerators) + &words)
        };
        let doubled = std::iter::successors(Some(2_u32), |times| times.checked_mul(2));
        let enough = doubled.take_while(|times| *times <= most).find(|times| tried(*times).is_some())?;
        // Of many more not each is tried.
        let step = (enough / 128).max(1);
        (enough / 2 + step..=enough).step_by(step as usize).find_map(tried)
    }

    /// What is kept elsewhere in the fastest layout that then fits, if that is not what was asked.
    fn offload(&self, accelerators: u32) -> Option<String> {
        let given = GivenLayout { offload: None, tiers: Tiers::All, ..self.given.clone() };
        let FoundLayout { layout, .. } =
            (given != *self.given).then(|| self.found(&given, accelerators))??;
        Some(layout.offload.to_string())
    }
}

/// Of layouts that differ in what they keep those that keep least.
fn least_kept(space: Space) -> Space {
    fn ends<T: Copy>(all: &[T]) -> Vec<T> {
        all.first().into_iter().chain(all.last().filter(|_| all.len() > 1)).copied().collect()
    }
    let first = |all: Vec<u32>| all.into_iter().take(1).collect();
    Space {
        interleave: first(space.interleave),
        micro_batch: first(space.micro_batch),
        recompute: space.recompute.last().copied().into_iter().collect(),
        zero: ends(&space.zero),
        ..space
    }
}

/// Numbers from 1 to `most_accelerators` but this one, the nearest first, and of two the smaller.
fn outward(from: u32, most: u32) -> impl Iterator<Item = u32> {
    let near = from.clamp(1, most.max(1));
    let both = (0..=near.max(most - near.min(most))).flat_map(move |step| {
        let above = if step == 0 { None } else { near.checked_add(step) };
        [near.checked_sub(step), above]
    });
    both.flatten().filter(move |it| *it != from && (1..=most).contains(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_outward_and_stay_between_1_and_the_most() {
        assert_eq!(outward(3, 5).collect::<Vec<_>>(), [2, 4, 1, 5]);
        assert_eq!(outward(9, 3).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(outward(0, 2).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(outward(1, 1).count(), 0);
    }
}
