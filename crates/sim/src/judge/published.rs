//! Steps that others have run and published, and how far a prediction is from them.

use std::collections::BTreeMap;

use polder_platform::{Accelerator, DataError, Fitted, Folder, Platform, names, read};
use serde::{Deserialize, Serialize};

use crate::judge::fit::fit;
use crate::judge::range::{Residual, Residuals, StepClass};
use crate::step::figures::{MemoryUse, Step};
use crate::step::job::Job;
use crate::step::layout::Layout;
use crate::step::model::Model;

/// A table of training steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// What it is, in a line.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The platform that it ran on.
    pub platform: String,
    /// Which publication it is one table of; its own name when left out. Constants and ranges are set without all of them.
    pub publication: Option<String>,
    /// Whether its rows are judged alone: no constant is fitted to a blind table.
    #[serde(default)]
    pub blind: bool,
    /// What the publication does not say.
    #[serde(default)]
    pub assumed: Vec<String>,
    /// What the closed form does not explain.
    #[serde(default)]
    pub unexplained: Vec<String>,
    /// As how many rows it counts, where its rows say nearly the same.
    pub counts_as: Option<u32>,
    /// Pairs of rows whose ratio is judged, by name.
    #[serde(default)]
    pub ratio: Vec<[String; 2]>,
    /// The steps; the first sets the table's software scalar.
    pub row: Vec<Row>,
    /// The same steps under another assumption: compared, but neither fitted to nor judged.
    #[serde(default)]
    pub also: Vec<Row>,
}

/// A published step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What tells it from the others.
    pub name: String,
    /// Where in the table's source it stands, if that has several tables.
    pub place: Option<String>,
    /// What was trained.
    pub model: Model,
    /// How.
    pub layout: Layout,
    /// What was seen.
    pub published: PublishedTime,
}

/// What was published of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum PublishedTime {
    /// Its time.
    Seconds {
        /// Seconds of a step.
        seconds: f64,
    },
    /// Tokens of all accelerators together.
    Tokens {
        /// Tokens a second.
        tokens_per_second: f64,
    },
    /// Its rate.
    Rate {
        /// TFLOP/s of each accelerator.
        tflops: f64,
        /// What counts as an operation.
        counting: Counting,
    },
}

/// What counts as an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Counting {
    /// What the model needs: 72 B s L h^2 (1 + s/6h + V/12Lh) for GPT.
    Model,
    /// The blocks' forward pass twice: 96 B s L h^2 (1 + s/6h + V/16Lh) for GPT.
    Recomputation,
}

impl Table {
    fn publication<'a>(&'a self, name: &'a str) -> &'a str {
        self.publication.as_deref().unwrap_or(name)
    }
}

impl Row {
    /// Seconds of the step.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        match self.published {
            PublishedTime::Seconds { seconds } => seconds,
            PublishedTime::Tokens { tokens_per_second } => {
                f64::from(self.layout.batch) * f64::from(self.model.sequence) / tokens_per_second
            }
            PublishedTime::Rate { tflops, counting } => {
                self.operations(counting) / (tflops * 1e12) / f64::from(self.layout.accelerators())
            }
        }
    }

    fn operations(&self, counting: Counting) -> f64 {
        let Self { model, layout, .. } = self;
        let all = model.flops(layout.batch);
        let head = 6.0 * f64::from(layout.batch) * f64::from(model.sequence) * model.embedding_parameters();
        match counting {
            Counting::Model => all,
            Counting::Recomputation => (all - head) * 4.0 / 3.0 + head,
        }
    }

    /// Operations as a predictor counts that knows nothing but a rate: with what is computed again.
    fn plain_operations(&self) -> f64 {
        let full = self.layout.recompute.keeps_inputs_alone();
        self.operations(if full { Counting::Recomputation } else { Counting::Model })
    }
}

/// How a row compares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The row's name.
    pub name: String,
    /// Where in the table's source it stands, if that is said.
    pub place: Option<String>,
    /// What kind of step it is.
    pub step_class: StepClass,
    /// Parts of a stage, as they are taken.
    pub interleave: u32,
    /// What was published.
    pub published_s: f64,
    /// What is predicted with the constants as they are.
    pub predicted_s: f64,
    /// From how many to how many seconds it takes, by a range that is set without its publication.
    pub range_s: [f64; 2],
    /// What is predicted with the table's software scalar, from its first row.
    pub anchored_s: f64,
    /// What a constant rate an accelerator gives, with such a scalar.
    pub constant_s: f64,
    /// Whether it is judged: the row that sets the scalar is not, nor one under another assumption.
    pub judged: bool,
    /// What is predicted to lie where.
    pub memory: MemoryUse,
}

impl Compared {
    fn new(row: &Row, step: &Step, scalar: f64, rate: f64, judged: bool) -> Self {
        Self {
            name: row.name.clone(),
            place: row.place.clone(),
            step_class: StepClass::of(&row.model, &row.layout),
            interleave: row.layout.interleave,
            published_s: row.seconds(),
            predicted_s: step.total_s,
            range_s: [step.total_s; 2],
            anchored_s: step.total_s * scalar,
            constant_s: row.plain_operations() / f64::from(row.layout.accelerators()) / rate,
            judged,
            memory: step.memory,
        }
    }

    /// Predicted over published, less 1.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.anchored_s / self.published_s - 1.0
    }

    /// The same without the table's scalar.
    #[must_use]
    pub fn raw_error(&self) -> f64 {
        self.predicted_s / self.published_s - 1.0
    }

    /// That of a constant rate.
    #[must_use]
    pub fn constant_error(&self) -> f64 {
        self.constant_s / self.published_s - 1.0
    }

    /// Whether its range has what was published.
    #[must_use]
    pub fn is_in_range(&self) -> bool {
        let [least, most] = self.range_s;
        (least..=most).contains(&self.published_s)
    }
}

/// A ratio of two rows of a table that is predicted too: what full recomputation costs, or what scaling gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The rows, the dividend first.
    pub rows: [String; 2],
    /// As published.
    pub published: f64,
    /// As predicted.
    pub predicted: f64,
}

impl Ratio {
    /// Predicted over published, less 1.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.predicted / self.published - 1.0
    }
}

/// How a table compares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// The table's name.
    pub table: String,
    /// The publication that it is a table of.
    pub publication: String,
    /// Whether no constant is fitted to it.
    pub blind: bool,
    /// The accelerator that it is of.
    pub accelerator: String,
    /// The same with its numbers.
    #[serde(skip)]
    pub chip: Accelerator,
    /// Its title.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// What the publication does not say.
    pub assumed: Vec<String>,
    /// What the closed form does not explain.
    pub unexplained: Vec<String>,
    /// The constants, fitted without this table's publication.
    pub fitted: Fitted,
    /// The table's software scalar.
    pub scalar: f64,
    /// From how many to how many times as long as the platform's file predicts its rows took; that file's constants are fitted to
    /// them too.
    pub shipped: [f64; 2],
    /// How much each of its judged rows counts.
    pub weight: f64,
    /// Its rows.
    pub rows: Vec<Compared>,
    /// Some of them under another assumption, which count nowhere.
    pub also: Vec<Compared>,
    /// Its ratios.
    pub ratios: Vec<Ratio>,
}

/// Reads all tables of training steps, each with its name and platform.
///
/// # Errors
/// When one cannot be read or does not fit its platform.
pub fn tables() -> Result<Vec<(String, Table, Platform)>, DataError> {
    let steps = names(Folder::Published).into_iter().map(|name| {
        let table: Table = read(Folder::Published, name)?;
        let platform = Platform::load(&table.platform)?;
        for row in table.row.iter().chain(&table.also) {
            let wrong =
                |key: &str, problem| DataError::new(name, &format!("row {}: {key}", row.name), problem);
            row.model.check().map_err(|(key, problem)| wrong(&format!("model.{key}"), problem))?;
            row.layout.check(&row.model).map_err(|refusal| wrong("layout", refusal.to_string()))?;
        }
        Ok((name.to_owned(), table, platform))
    });
    steps.collect()
}

/// Predicted steps with these constants; one that cannot run takes no number of seconds.
pub(crate) fn predicted(rows: &[Row], platform: &Platform, fitted: &Fitted) -> Vec<Step> {
    let mut platform = platform.clone();
    for rack in platform.rack.values_mut() {
        rack.accelerator.fitted = *fitted;
    }
    let job = Job::new(&platform);
    let none = Step { total_s: f64::NAN, ..Step::default() };
    rows.iter().map(|row| job.predict(&row.model, &row.layout).map_or(none, |plan| plan.step)).collect()
}

/// Compares a table with what these constants predict.
fn compare(name: &str, table: &Table, platform: &Platform, fitted: Fitted) -> Judged {
    let steps = predicted(&table.row, platform, &fitted);
    let first = &table.row[0];
    let scalar = first.seconds() / steps[0].total_s;
    let rate = first.plain_operations() / f64::from(first.layout.accelerators()) / first.seconds();
    let compared = |row: &Row, step: &Step, judged| Compared::new(row, step, scalar, rate, judged);
    let rows = table.row.iter().zip(&steps).enumerate();
    let rows: Vec<_> = rows.map(|(index, (row, step))| compared(row, step, index > 0)).collect();
    let also = table.also.iter().zip(predicted(&table.also, platform, &fitted));
    let also = also.map(|(row, step)| compared(row, &step, false)).collect();
    let ratio = |pair: &[String; 2]| {
        let [dividend, divisor] = pair.each_ref().map(|name| rows.iter().find(|row| row.name == *name));
        let (dividend, divisor) = dividend.zip(divisor)?;
        Some(Ratio {
            rows: pair.clone(),
            published: dividend.published_s / divisor.published_s,
            predicted: dividend.predicted_s / divisor.predicted_s,
        })
    };
    let ratios = table.ratio.iter().filter_map(ratio).collect();
    let shipped = predicted(&table.row, platform, &Job::new(platform).rack().accelerator.fitted);
    let shipped = table.row.iter().zip(shipped).map(|(row, step)| row.seconds() / step.total_s);
    let judged = rows.len().saturating_sub(1).max(1) as f64;
    Judged {
        table: name.into(),
        publication: table.publication(name).into(),
        blind: table.blind,
        accelerator: chip(platform).into(),
        chip: Job::new(platform).rack().accelerator.clone(),
        title: table.title.clone(),
        source: table.source.clone(),
        assumed: table.assumed.clone(),
        unexplained: table.unexplained.clone(),
        fitted,
        scalar,
        shipped: [shipped.clone().fold(f64::INFINITY, f64::min), shipped.fold(0.0, f64::max)],
        weight: table.counts_as.map_or(1.0, |rows| f64::from(rows) / judged),
        rows,
        also,
        ratios,
    }
}

/// Compares all tables, each with constants and a range that are set without its publication. Constants are fitted to the same
/// accelerator's other publications; of a blind table they are those of its platform's file, which no blind table sets. The range is set
/// from what the steps of all other publications took.
///
/// # Errors
/// When a table is damaged.
pub fn validate() -> Result<Vec<Judged>, DataError> {
    let all = tables()?;
    let judge = |(name, table, platform): &(String, Table, Platform)| {
        let fitted = match table.blind {
            true => Job::new(platform).rack().accelerator.fitted,
            false => fitted_to(&all, |other, its, accelerator| {
                accelerator == chip(platform) && other.publication(its) != table.publication(name)
            }),
        };
        compare(name, table, platform, fitted)
    };
    let mut judged: Vec<_> = all.iter().map(judge).collect();
    let ranges: Vec<_> = judged.iter().map(|table| ranges_without(&judged, &table.publication)).collect();
    for (table, ranges) in judged.iter_mut().zip(ranges) {
        for row in table.rows.iter_mut().chain(&mut table.also) {
            row.range_s = ranges[row.step_class as usize].map(|times| times * row.predicted_s);
        }
    }
    Ok(judged)
}

/// The same tables with what is predicted of an accelerator by constants that are fitted to others alone.
pub(crate) fn borrowed(judged: &[Judged]) -> Result<Vec<Judged>, DataError> {
    let all = tables()?;
    let mut constants = BTreeMap::new();
    let mut borrowed = judged.to_vec();
    for ((_, table, platform), judged) in all.iter().zip(&mut borrowed) {
        let own = chip(platform);
        let is_fitted = || all.iter().any(|(_, table, platform)| !table.blind && chip(platform) == own);
        let fitted = constants.entry(own).or_insert_with(|| match is_fitted() {
            true => fitted_to(&all, |_, _, its| its != own),
            // Its file has those of another already.
            false => Job::new(platform).rack().accelerator.fitted,
        });
        for (row, step) in judged.rows.iter_mut().zip(predicted(&table.row, platform, fitted)) {
            row.predicted_s = step.total_s;
        }
    }
    Ok(borrowed)
}

/// The range of each class, set without one publication.
fn ranges_without(all: &[Judged], publication: &str) -> [[f64; 2]; StepClass::ALL.len()] {
    let others = all.iter().filter(|table| table.publication != publication);
    let residuals = residuals(others, |row| Some(row.predicted_s));
    StepClass::ALL.map(|class| residuals.range(class))
}

/// What the rows of some tables took beside `predicted` of them, if that says anything of a row.
pub(crate) fn residuals<'a>(
    tables: impl IntoIterator<Item = &'a Judged>,
    predicted: impl Fn(&Compared) -> Option<f64>,
) -> Residuals<'a> {
    let rows = tables.into_iter().flat_map(|table| table.rows.iter().map(move |row| (table, row)));
    let residual = |(table, row): (&'a Judged, &'a Compared)| {
        let log = (row.published_s / predicted(row)?).ln();
        Some(Residual { publication: &table.publication, class: row.step_class, log, weight: table.weight })
    };
    rows.filter_map(residual).collect()
}

/// The constants of an accelerator, fitted to everything that was published of it but for blind tables: what its platforms' files have.
///
/// # Errors
/// When a table is damaged.
pub fn fitted(accelerator: &str) -> Result<Fitted, DataError> {
    Ok(fitted_to(&tables()?, |_, _, its| its == accelerator))
}

/// Constants fitted to the tables that `is_one` takes by themselves, their names and their accelerators, without blind ones.
fn fitted_to(all: &[(String, Table, Platform)], is_one: impl Fn(&Table, &str, &str) -> bool) -> Fitted {
    let its = all
        .iter()
        .filter(|(name, table, platform)| !table.blind && is_one(table, name, chip(platform)))
        .map(|(_, table, platform)| (table, platform));
    fit(&its.collect::<Vec<_>>())
}

/// What the rows of some tables come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pooled {
    /// Published steps; those of a table that counts as fewer are parts.
    pub steps: f64,
    /// Mean of the absolute errors without the tables' software scalars.
    pub mean_without_scalar: f64,
    /// The largest.
    pub worst_without_scalar: f64,
    /// The part of the steps that lies in ranges which are set without their publication.
    pub in_range: f64,
    /// Rows that are judged with their table's scalar: all but those that set one.
    pub rows: f64,
    /// Mean of their absolute errors.
    pub mean: f64,
    /// The largest.
    pub worst: f64,
    /// The mean of a predictor with one constant rate an accelerator, which each table's first row sets.
    pub constant_mean: f64,
    /// Its largest.
    pub constant_worst: f64,
    /// The largest error of a ratio inside a table.
    pub worst_ratio: f64,
    /// Rows of the tables, none of them in parts.
    pub published: usize,
    /// Those that are predicted to fit where they lie, as all of them did. The others are refused where a layout is asked for.
    pub fits: usize,
}

impl Pooled {
    /// Pools tables.
    #[must_use]
    pub fn of<'a>(tables: impl IntoIterator<Item = &'a Judged>) -> Self {
        Self::of_class(tables, None)
    }

    /// Pools the rows of one class, or all.
    #[must_use]
    pub fn of_class<'a>(tables: impl IntoIterator<Item = &'a Judged>, class: Option<StepClass>) -> Self {
        let mut pooled = Self::default();
        for table in tables {
            for row in table.rows.iter().filter(|row| class.is_none_or(|class| row.step_class == class)) {
                pooled.add(row, table.weight);
            }
            let ratios = table.ratios.iter().filter(|_| class.is_none()).map(|ratio| ratio.error().abs());
            pooled.worst_ratio = ratios.fold(pooled.worst_ratio, f64::max);
        }
        let [steps, rows] = [pooled.steps, pooled.rows].map(|it| it.max(f64::MIN_POSITIVE));
        pooled.mean_without_scalar /= steps;
        pooled.in_range /= steps;
        pooled.mean /= rows;
        pooled.constant_mean /= rows;
        pooled
    }

    /// Adds a row: means are sums until all are added.
    fn add(&mut self, row: &Compared, weight: f64) {
        let raw = row.raw_error().abs();
        self.published += 1;
        self.fits += usize::from(row.memory.fits());
        self.steps += weight;
        self.mean_without_scalar += weight * raw;
        self.worst_without_scalar = self.worst_without_scalar.max(raw);
        self.in_range += if row.is_in_range() { weight } else { 0.0 };
        if row.judged {
            let (error, constant) = (row.error().abs(), row.constant_error().abs());
            self.rows += weight;
            self.mean += weight * error;
            self.worst = self.worst.max(error);
            self.constant_mean += weight * constant;
            self.constant_worst = self.constant_worst.max(constant);
        }
    }
}

fn chip(platform: &Platform) -> &str {
    &Job::new(platform).rack().accelerator.name
}
