//! How far predictions are from published steps that they were made without, and the range of a prediction that follows.
//!
//! The logarithm of published over predicted is taken to be `mean + publication + step`: publications differ by their software, steps of one
//! publication by what the formulas miss. The range is where the next publication's step lies in 80 of 100 cases, by Student's t over the
//! publications, as a random effect of unknown variance is predicted (Gelman et al., Bayesian Data Analysis, section 5.4). The variance is a
//! sum of two that are estimated, of which that of steps is known better: its degrees of freedom are those of Satterthwaite (An approximate
//! distribution of estimates of variance components, Biometrics Bulletin 2, 1946).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::judge::fit::SOFTWARE;
use crate::step::layout::{Layout, Precision};
use crate::step::model::Model;

/// Student's t below which 90% lie, for 1 to 20 degrees of freedom: between both ends lie 80%.
const T90: [f64; 20] = [
    3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341,
    1.337, 1.333, 1.330, 1.328, 1.325,
];

/// A kind of step: predictions of one kind are off by about as much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum StepClass {
    /// Dense blocks in 16 bits.
    #[serde(rename = "dense bf16")]
    Bf16,
    /// Dense blocks whose products with weights are in 8 bits.
    #[serde(rename = "dense fp8")]
    Fp8,
    /// Dense blocks in 32 bits.
    #[serde(rename = "dense fp32")]
    Fp32,
    /// Blocks with experts.
    #[serde(rename = "MoE")]
    Mixture,
}

impl StepClass {
    /// All.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Fp8, Self::Fp32, Self::Mixture];

    /// That of a step.
    #[must_use]
    pub fn of(model: &Model, layout: &Layout) -> Self {
        match (model.experts, layout.precision) {
            (Some(_), _) => Self::Mixture,
            (None, Precision::Bf16) => Self::Bf16,
            (None, Precision::Fp8) => Self::Fp8,
            (None, Precision::Fp32) => Self::Fp32,
        }
    }

    /// As it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "dense bf16",
            Self::Fp8 => "dense fp8",
            Self::Fp32 => "dense fp32",
            Self::Mixture => "MoE",
        }
    }
}

/// How far a published step is from its prediction.
pub(crate) struct Residual<'a> {
    pub(crate) publication: &'a str,
    pub(crate) class: StepClass,
    /// The logarithm of published over predicted.
    pub(crate) log: f64,
    /// As how many steps it counts.
    pub(crate) weight: f64,
}

/// Those of some publications.
pub(crate) struct Residuals<'a>(BTreeMap<&'a str, Vec<Residual<'a>>>);

impl<'a> FromIterator<Residual<'a>> for Residuals<'a> {
    fn from_iter<I: IntoIterator<Item = Residual<'a>>>(all: I) -> Self {
        let mut publications: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for residual in all {
            publications.entry(residual.publication).or_default().push(residual);
        }
        Self(publications)
    }
}

impl Residuals<'_> {
    /// How many publications there are.
    pub(crate) fn publications(&self) -> usize {
        self.0.len()
    }

    /// From how many to how many times its prediction a step of a class takes. How far publications are from one another is not known of
    /// one alone: what is plausible stands for it, with one degree of freedom.
    pub(crate) fn range(&self, class: StepClass) -> [f64; 2] {
        let means: Vec<_> =
            self.0.values().map(|its| weighted(its.iter().map(|it| (it.log, it.weight)))).collect();
        let count = means.len() as f64;
        let mean = weighted(means.iter().map(|it| (*it, 1.0)));
        let between = match means.len() {
            0 | 1 => SOFTWARE.powi(2),
            _ => means.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / (count - 1.0),
        };
        let between = between * (1.0 + 1.0 / count.max(1.0));
        let (within, steps) = self.within(class, &means);
        let off = t90(satterthwaite([(between, count - 1.0), (within, steps)])) * (between + within).sqrt();
        [mean - off, mean + off].map(f64::exp)
    }

    /// How many times off, up or down, a step of a class is whose publication's software is known: nothing differs between publications.
    pub(crate) fn comparison(&self, class: StepClass) -> f64 {
        let (within, _) = self.within(class, &vec![0.0; self.0.len()]);
        (t90(self.0.len() as f64 - 1.0) * within.sqrt()).exp()
    }

    /// Mean square of what steps of a class are apart from their publication's centre, each publication with as much weight, and how many
    /// steps there are besides one of each; that of the widest class where no publication has a step of it.
    fn within(&self, class: StepClass, centres: &[f64]) -> (f64, f64) {
        let of = |class| {
            let squares = self.0.values().zip(centres).filter_map(|(its, centre)| {
                let its = || its.iter().filter(|it| it.class == class);
                its().next()?;
                let more = (its().map(|it| it.weight).sum::<f64>() - 1.0).max(0.0);
                Some((weighted(its().map(|it| ((it.log - centre).powi(2), it.weight))), more))
            });
            let squares: Vec<_> = squares.collect();
            let mean = weighted(squares.iter().map(|(square, _)| (*square, 1.0)));
            (!squares.is_empty()).then(|| (mean, squares.iter().map(|(_, more)| more).sum()))
        };
        let widest = || StepClass::ALL.into_iter().filter_map(of).max_by(|a, b| a.0.total_cmp(&b.0));
        of(class).or_else(widest).unwrap_or_default()
    }
}

/// Degrees of freedom of a sum of variances, each with its own.
fn satterthwaite(variances: [(f64, f64); 2]) -> f64 {
    let sum: f64 = variances.iter().map(|(variance, _)| variance).sum();
    let parts = variances.iter().map(|(variance, freedom)| variance.powi(2) / freedom.max(1.0));
    sum.powi(2) / parts.sum::<f64>().max(f64::MIN_POSITIVE)
}

/// Student's t below which 90% lie; between whole degrees of freedom it is straight in their reciprocals.
fn t90(freedom: f64) -> f64 {
    let freedom = freedom.clamp(1.0, T90.len() as f64);
    let whole = freedom.floor();
    let [below, above] = [0, 1].map(|more| T90[(whole as usize - 1 + more).min(T90.len() - 1)]);
    let part = (1.0 / whole - 1.0 / freedom) / (1.0 / whole - 1.0 / (whole + 1.0));
    below + part * (above - below)
}

/// The mean of weighted values; 0 of none.
fn weighted(values: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (sum, weights) =
        values.fold((0.0, 0.0), |(sum, all), (value, weight)| (sum + weight * value, all + weight));
    sum / f64::max(weights, f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn residuals(rows: &[(&'static str, StepClass, f64)]) -> Residuals<'static> {
        let all = rows.iter().map(|(publication, class, log)| Residual {
            publication,
            class: *class,
            log: *log,
            weight: 1.0,
        });
        all.collect()
    }

    /// Of GB200 one publication's steps were half a per cent apart, and the next publication's a third off.
    #[test]
    fn one_publication_alone_gives_a_wide_range() {
        let alone =
            residuals(&[("a", StepClass::Bf16, 0.23), ("a", StepClass::Bf16, 0.24)]).range(StepClass::Bf16);
        assert!(alone[1] / alone[0] > 3.0, "{alone:?}");
        let three = [("a", 0.2), ("b", 0.25), ("c", 0.22)].map(|(name, log)| (name, StepClass::Bf16, log));
        let three = residuals(&three).range(StepClass::Bf16);
        assert!(three[1] / three[0] < 1.2 && alone[0] < three[0] && three[1] < alone[1], "{three:?}");
    }

    #[test]
    fn a_class_that_was_never_published_has_the_range_of_the_widest() {
        let rows = [
            ("a", StepClass::Bf16, 0.1),
            ("a", StepClass::Fp8, 0.4),
            ("a", StepClass::Fp8, -0.2),
            ("b", StepClass::Bf16, 0.1),
        ];
        let all = residuals(&rows);
        assert_eq!(all.range(StepClass::Mixture), all.range(StepClass::Fp8));
        assert!(all.range(StepClass::Bf16)[1] < all.range(StepClass::Fp8)[1]);
    }

    /// Where both variances weigh alike, that of steps is known by far more of them: then t is nearly the normal distribution's 1.282.
    #[test]
    fn what_many_steps_tell_makes_up_for_few_publications() {
        assert_eq!([1.0, 4.0, 20.0, 100.0].map(t90), [3.078, 1.533, 1.325, 1.325]);
        assert!(t90(4.5) < t90(4.0) && t90(5.0) < t90(4.5));
        assert_eq!(satterthwaite([(0.02, 9.0), (0.0, 60.0)]), 9.0);
        let both = satterthwaite([(0.01, 9.0), (0.01, 60.0)]);
        assert!((both - 4.0 / (1.0 / 9.0 + 1.0 / 60.0)).abs() < 1e-9, "{both}");
    }

    /// By drawing publications and steps of known variances.
    #[test]
    fn four_of_five_steps_of_another_publication_lie_in_the_range() {
        let mut random = Random::new(50);
        let mut normal = || (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
        let (mut inside, names) = (0, ["a", "b", "c", "d", "e", "f", "g", "h"]);
        for _ in 0..4000 {
            let mut publication = || {
                let own = 0.1 + 0.15 * normal();
                [(); 8].map(|()| own + 0.08 * normal())
            };
            let rows = names.map(|name| publication().map(|log| (name, StepClass::Bf16, log))).concat();
            let [low, high] = residuals(&rows).range(StepClass::Bf16);
            inside += usize::from((low..=high).contains(&publication()[0].exp()));
        }
        assert!((0.78..0.82).contains(&(f64::from(inside as u32) / 4000.0)), "{inside}");
    }

    /// By drawing publications of the sizes in data/published, the blind ones first, as far apart as those are: a share above nine of ten
    /// of the blind steps is no proof of a range that is too wide.
    #[test]
    fn a_range_for_four_of_five_steps_holds_over_nine_of_ten_of_four_publications_in_each_third_draw() {
        let mut random = Random::new(51);
        let mut normal = || (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"];
        let sizes = [17, 7, 7, 4, 11, 10, 8, 3, 3, 2, 1];
        let (mut over, mut held) = (0, 0.0);
        for _ in 0..2000 {
            let drawn: Vec<Vec<_>> = names
                .into_iter()
                .zip(sizes)
                .map(|(name, steps)| {
                    let own = 0.14 * normal();
                    (0..steps).map(|_| (name, StepClass::Bf16, own + 0.055 * normal())).collect()
                })
                .collect();
            let inside = |of: usize| {
                let others = drawn.iter().enumerate().filter(|(it, _)| *it != of).flat_map(|(_, rows)| rows);
                let [low, high] = residuals(&others.copied().collect::<Vec<_>>()).range(StepClass::Bf16);
                drawn[of].iter().filter(|(.., log)| (low..=high).contains(&log.exp())).count()
            };
            let part = f64::from((0..4).map(inside).sum::<usize>() as u32) / 35.0;
            (over, held) = (over + u32::from(part > 0.9), held + part);
        }
        assert!((0.78..0.83).contains(&(held / 2000.0)), "{held}");
        assert!((0.30..0.37).contains(&(f64::from(over) / 2000.0)), "{over}");
    }
}
