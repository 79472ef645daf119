//! Steps that others have run and published, and how far a prediction is from them.

use std::sync::OnceLock;

use polder_platform::{DataError, Fitted, Folder, Platform, names, read};
use serde::{Deserialize, Serialize};

use crate::judge::fit::fit;
use crate::step::figures::{MemoryUse, Step};
use crate::step::job::Job;
use crate::step::layout::{Layout, Recompute};
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
    /// Which publication it is one table of; its own name when left out. Constants are fitted without all of them.
    pub publication: Option<String>,
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
        let full = self.layout.recompute == Recompute::Full;
        self.operations(if full { Counting::Recomputation } else { Counting::Model })
    }
}

/// How a row compares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The row's name.
    pub name: String,
    /// Parts of a stage, as they are taken.
    pub interleave: u32,
    /// What was published.
    pub published_s: f64,
    /// What is predicted with the constants as they are.
    pub predicted_s: f64,
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
            interleave: row.layout.interleave,
            published_s: row.seconds(),
            predicted_s: step.total_s,
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
    /// The accelerator that it is of.
    pub accelerator: String,
    /// Its title.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// What the publication does not say.
    pub assumed: Vec<String>,
    /// What the closed form does not explain.
    pub unexplained: Vec<String>,
    /// The constants, fitted without this table.
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
#[must_use]
pub fn compare(name: &str, table: &Table, platform: &Platform, fitted: Fitted) -> Judged {
    let steps = predicted(&table.row, platform, &fitted);
    let first = &table.row[0];
    let scalar = first.seconds() / steps[0].total_s;
    let rate = first.plain_operations() / f64::from(first.layout.accelerators()) / first.seconds();
    let rows = table.row.iter().zip(&steps).enumerate();
    let rows: Vec<_> =
        rows.map(|(index, (row, step))| Compared::new(row, step, scalar, rate, index > 0)).collect();
    let also = table.also.iter().zip(predicted(&table.also, platform, &fitted));
    let also = also.map(|(row, step)| Compared::new(row, &step, scalar, rate, false)).collect();
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
        accelerator: chip(platform).into(),
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

/// Compares all tables, each with constants that are fitted to the same accelerator's other publications.
///
/// # Errors
/// When a table is damaged.
pub fn validate() -> Result<Vec<Judged>, DataError> {
    let all = tables()?;
    let judge = |(name, table, platform): &(String, Table, Platform)| {
        let publication = table.publication(name);
        let others = all.iter().filter(|(name, table, other)| {
            chip(other) == chip(platform) && table.publication(name) != publication
        });
        let others: Vec<_> = others.map(|(_, table, platform)| (table, platform)).collect();
        compare(name, table, platform, fit(&others))
    };
    Ok(all.iter().map(judge).collect())
}

/// The constants of an accelerator, fitted to everything that was published of it: what its platforms' files have.
///
/// # Errors
/// When a table is damaged.
pub fn fitted(accelerator: &str) -> Result<Fitted, DataError> {
    let all = tables()?;
    let its = all.iter().filter(|(_, _, platform)| chip(platform) == accelerator);
    Ok(fit(&its.map(|(_, table, platform)| (table, platform)).collect::<Vec<_>>()))
}

/// What the judged rows of some tables come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pooled {
    /// Judged rows; those of a table that counts as fewer are parts.
    pub rows: f64,
    /// Mean of the absolute errors.
    pub mean: f64,
    /// The largest.
    pub worst: f64,
    /// The mean without the tables' software scalars, their first rows too.
    pub mean_without_scalar: f64,
    /// The mean of a predictor with one constant rate an accelerator and each table's scalar.
    pub constant_mean: f64,
    /// Its largest.
    pub constant_worst: f64,
    /// The largest error of a ratio inside a table.
    pub worst_ratio: f64,
    /// Published steps, judged or not.
    pub steps: usize,
    /// Those that are predicted to fit where they lie, as all of them did.
    pub fits: usize,
}

impl Pooled {
    /// Pools tables.
    #[must_use]
    pub fn of<'a>(tables: impl IntoIterator<Item = &'a Judged>) -> Self {
        let mut pooled = Self::default();
        let mut all = 0.0;
        for table in tables {
            for row in &table.rows {
                pooled.steps += 1;
                pooled.fits += usize::from(row.memory.fits());
                pooled.mean_without_scalar += table.weight * (row.predicted_s / row.published_s - 1.0).abs();
                all += table.weight;
                if row.judged {
                    let (error, constant) =
                        (row.error().abs(), (row.constant_s / row.published_s - 1.0).abs());
                    pooled.rows += table.weight;
                    pooled.mean += table.weight * error;
                    pooled.worst = pooled.worst.max(error);
                    pooled.constant_mean += table.weight * constant;
                    pooled.constant_worst = pooled.constant_worst.max(constant);
                }
            }
            let ratios = table.ratios.iter().map(|ratio| ratio.error().abs());
            pooled.worst_ratio = ratios.fold(pooled.worst_ratio, f64::max);
        }
        let rows = pooled.rows.max(f64::MIN_POSITIVE);
        (pooled.mean, pooled.constant_mean) = (pooled.mean / rows, pooled.constant_mean / rows);
        pooled.mean_without_scalar /= f64::max(all, f64::MIN_POSITIVE);
        pooled
    }
}

/// How far predictions for an accelerator are from published steps: as they are, and as [`validate`] judges them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Margin {
    /// The accelerator; `None` when nothing was published of it, and the margin is that of all others.
    pub accelerator: Option<String>,
    /// From how many to how many times as long as predicted a step takes, as far as can be relied on: no narrower than any error below.
    /// Of an accelerator of which nothing was published, that of all others together.
    pub range: [f64; 2],
    /// How many times as long as predicted its published steps took, by the constants of the platforms' files, which are fitted to
    /// them: the least.
    pub least: f64,
    /// The most.
    pub most: f64,
    /// Mean of the absolute errors of steps that are predicted without their publication, as [`Pooled::mean_without_scalar`].
    pub mean_without_scalar: f64,
    /// Rows judged with their table's software scalar too, as [`Pooled::rows`].
    pub rows: f64,
    /// Mean of their absolute errors: how far a comparison on one software is off.
    pub mean: f64,
    /// The largest.
    pub worst: f64,
    /// Which accelerator it was asked for.
    #[serde(skip)]
    asked: String,
    /// The largest error of a comparison on one software, of all accelerators.
    #[serde(skip)]
    comparison: f64,
}

impl Margin {
    /// That of an accelerator, by its name.
    ///
    /// # Errors
    /// When a table is damaged.
    pub fn of(accelerator: &str) -> Result<Self, DataError> {
        static ALL: OnceLock<Vec<Judged>> = OnceLock::new();
        let all = match ALL.get() {
            Some(all) => all,
            None => {
                let all = validate()?;
                ALL.get_or_init(|| all)
            }
        };
        let of = |name: &str| all.iter().filter(|table| table.accelerator == name).collect::<Vec<_>>();
        let own = of(accelerator);
        let ranges = match own.is_empty() {
            true => all.iter().map(|table| range(&of(&table.accelerator))).collect(),
            false => vec![range(&own)],
        };
        let published = (!own.is_empty()).then(|| accelerator.to_owned());
        let tables = if own.is_empty() { all.iter().collect() } else { own };
        let [least, most] = hull(tables.iter().map(|table| table.shipped));
        let Pooled { rows, mean, worst, mean_without_scalar, .. } = Pooled::of(tables.iter().copied());
        Ok(Self {
            accelerator: published,
            range: hull(ranges),
            least,
            most,
            mean_without_scalar,
            rows,
            mean,
            worst,
            asked: accelerator.to_owned(),
            comparison: Pooled::of(all).worst,
        })
    }

    /// What so many of a prediction come to: from the least to the most that can be relied on.
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
            true => [predicted * (1.0 - self.comparison), predicted / (1.0 - self.comparison)],
            false => [predicted * low / other_high, predicted * high / other_low],
        }
    }

    /// Whether both are of one accelerator, so that predictions of both are off alike.
    #[must_use]
    pub fn is_of_one_accelerator(&self, other: &Self) -> bool {
        self.asked == other.asked
    }
}

/// What can be relied on of one accelerator's tables: what published steps took of their predictions, and no less than what predictions were
/// off by, either way.
fn range(tables: &[&Judged]) -> [f64; 2] {
    let Pooled { worst, mean_without_scalar, .. } = Pooled::of(tables.iter().copied());
    let off = 1.0 - worst.max(mean_without_scalar);
    hull(tables.iter().map(|table| table.shipped).chain([[off, off.recip()]]))
}

/// From the least of some ranges to the most.
fn hull(ranges: impl IntoIterator<Item = [f64; 2]>) -> [f64; 2] {
    let both = |[low, high]: [f64; 2], it: [f64; 2]| [low.min(it[0]), high.max(it[1])];
    ranges.into_iter().fold([f64::INFINITY, 0.0], both)
}

fn chip(platform: &Platform) -> &str {
    &Job::new(platform).rack().accelerator.name
}
