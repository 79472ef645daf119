//! How far off a prediction may be, as it is printed with one.

use std::sync::OnceLock;

use polder_platform::{Accelerator, DataError};
use serde::Serialize;

use crate::judge::published::{Judged, Pooled, borrowed, residuals, validate};
use crate::judge::range::StepClass;

/// How far predictions of a kind of step are from published steps that they were made without.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Margin {
    /// The accelerator; `None` where no constant of it is fitted to a published step.
    pub accelerator: Option<String>,
    /// The kind of step.
    pub step_class: StepClass,
    /// From how many to how many times as long as predicted a step takes: where 80% of steps of another publication would lie. Without
    /// constants of the accelerator, it is set from steps that were predicted with those of other accelerators.
    pub range: [f64; 2],
    /// The publications that set it.
    pub publications: usize,
    /// Steps of this kind that no constant was fitted to.
    pub blind: Pooled,
    /// Steps of this kind that constants are fitted to, each predicted without its publication.
    pub fitted: Pooled,
    /// Which accelerator it was asked for.
    #[serde(skip)]
    asked: Accelerator,
    /// How many times off a comparison on one software is.
    #[serde(skip)]
    comparison: f64,
}

impl Margin {
    /// That of a kind of step on an accelerator. One that has the name of a published one and other rates or constants is another.
    ///
    /// # Errors
    /// When a table is damaged.
    pub fn of(accelerator: &Accelerator, class: StepClass) -> Result<Self, DataError> {
        static ALL: OnceLock<Vec<Judged>> = OnceLock::new();
        static BORROWED: OnceLock<Vec<Judged>> = OnceLock::new();
        let all = once(&ALL, validate)?;
        let is_fitted = all.iter().any(|table| !table.blind && is_one(&table.chip, accelerator));
        let predicted = if is_fitted { all } else { once(&BORROWED, || borrowed(all))? };
        let raw = residuals(predicted, |row| Some(row.predicted_s));
        let anchored = residuals(all, |row| row.judged.then_some(row.anchored_s));
        let pooled = |blind| Pooled::of_class(all.iter().filter(|table| table.blind == blind), Some(class));
        Ok(Self {
            accelerator: is_fitted.then(|| accelerator.name.clone()),
            step_class: class,
            range: raw.range(class),
            publications: raw.publications(),
            blind: pooled(true),
            fitted: pooled(false),
            asked: accelerator.clone(),
            comparison: anchored.comparison(class),
        })
    }

    /// What so many of a prediction come to: from the least to the most.
    #[must_use]
    pub fn spread(&self, predicted: f64) -> [f64; 2] {
        self.range.map(|times| times * predicted)
    }

    /// From how many to how many times as much a step takes as one of the other margin, where `predicted` times as much is predicted. On
    /// one accelerator only the error of comparisons is left, because both are off alike.
    #[must_use]
    pub fn times(&self, other: &Self, predicted: f64) -> [f64; 2] {
        let ([low, high], [other_low, other_high]) = (self.range, other.range);
        match self.is_of_one_accelerator(other) {
            true => [predicted / self.comparison, predicted * self.comparison],
            false => [predicted * low / other_high, predicted * high / other_low],
        }
    }

    /// Whether both are of one accelerator, so that predictions of both are off alike.
    #[must_use]
    pub fn is_of_one_accelerator(&self, other: &Self) -> bool {
        is_one(&self.asked, &other.asked)
    }
}

/// Whether predictions of both are off alike: how much an accelerator holds does not change how fast it is.
fn is_one(accelerator: &Accelerator, other: &Accelerator) -> bool {
    let rates = |it: &Accelerator| (it.compute, it.memory.read, it.memory.write, it.fitted);
    accelerator.name == other.name
        && rates(accelerator) == rates(other)
        && accelerator.efficiency == other.efficiency
}

/// What a cell has, which is made where it has nothing.
fn once(
    cell: &'static OnceLock<Vec<Judged>>,
    make: impl FnOnce() -> Result<Vec<Judged>, DataError>,
) -> Result<&'static [Judged], DataError> {
    match cell.get() {
        Some(tables) => Ok(tables),
        None => {
            let tables = make()?;
            Ok(cell.get_or_init(|| tables))
        }
    }
}
