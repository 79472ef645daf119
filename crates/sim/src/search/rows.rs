//! Layouts and steps as rows of numbers, for tables of many.

use std::collections::{BTreeSet, HashMap};

use polder_platform::{Platform, TierId};

use crate::judge::margin::Margin;
use crate::judge::range::StepClass;
use crate::search::request::RequestError;
use crate::step::figures::Step;
use crate::step::given::GivenLayout;
use crate::step::job::Job;
use crate::step::layout::{Layout, Precision, Recompute, Refusal, Zero};
use crate::step::model::{MOST, Model};
use crate::step::order::Order;

/// One number of a layout in a table of many: its name, what it says, and the field that it is of.
struct Column {
    name: &'static str,
    kind: Kind,
    get: fn(&Layout) -> u32,
    /// `None` for a number that is no choice.
    set: fn(&mut Layout, u32) -> Option<()>,
}

/// What a number says.
enum Kind {
    Count,
    Flag,
    /// Which of these, in the order of their type.
    Choice(&'static [&'static str]),
    /// Which place: of these, or one of the platform's that follows.
    Tier(&'static [&'static str]),
}

macro_rules! column {
    ($name:literal, count $($field:ident).+) => {
        Column {
            name: $name,
            kind: Kind::Count,
            get: |layout| layout.$($field).+,
            set: |layout, number| {
                layout.$($field).+ = number;
                Some(())
            },
        }
    };
    ($name:literal, flag $($field:ident).+) => {
        Column {
            name: $name,
            kind: Kind::Flag,
            get: |layout| layout.$($field).+.into(),
            set: |layout, number| {
                layout.$($field).+ = number != 0;
                Some(())
            },
        }
    };
    ($name:literal, $field:ident of $($choice:literal = $is:expr),+) => {
        Column {
            name: $name,
            kind: Kind::Choice(&[$($choice),+]),
            get: |layout| layout.$field as u32,
            set: |layout, number| {
                layout.$field = *[$($is),+].get(number as usize)?;
                Some(())
            },
        }
    };
}

/// The one list of a layout's numbers.
const COLUMNS: [Column; 25] = [
    column!("tp", count tp),
    column!("cp", count cp),
    column!("ep", count ep),
    column!("dp", count dp),
    column!("pp", count pp),
    column!("interleave", count interleave),
    column!("batch", count batch),
    column!("micro_batch", count micro_batch),
    column!("sequence_parallel", flag sequence_parallel),
    column!("gather_again", flag gather_again),
    column!("recompute", recompute of "none" = Recompute::None, "selective" = Recompute::Selective, "full" = Recompute::Full, "operators" = Recompute::Operators, "needed" = Recompute::Needed),
    column!("flash", flag flash),
    column!(
        "zero", zero of "none" = Zero::None, "optimizer" = Zero::Optimizer, "gradients" = Zero::Gradients, "weights" = Zero::Weights
    ),
    column!("precision", precision of "bf16" = Precision::Bf16, "fp8" = Precision::Fp8, "fp32" = Precision::Fp32),
    column!("wide_gradients", flag wide_gradients),
    column!("overlap_tensor", flag overlap.tensor),
    column!("overlap_context", flag overlap.context),
    column!("overlap_expert", flag overlap.expert),
    column!("overlap_pipeline", flag overlap.pipeline),
    column!("overlap_data", flag overlap.data),
    column!("overlap_offload", flag overlap.offload),
    Column {
        name: "offload_tier",
        kind: Kind::Tier(&["host", "pool"]),
        get: |layout| match layout.offload.tier {
            TierId::Host => 0,
            TierId::Pool => 1,
            TierId::Named(_) => 2,
        },
        // It counts among the places that a row comes with.
        set: |_, _| Some(()),
    },
    column!("offload_weights", flag offload.weights),
    column!("offload_optimizer", flag offload.optimizer),
    column!("offload_activations", flag offload.activations),
];

/// The numbers that name a layout in a table of many; what is a choice is its place in [`choices`], and tiers behind the host
/// follow there by name.
pub const NUMBERS: [&str; COLUMNS.len()] = {
    let mut names = [""; COLUMNS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = COLUMNS[at].name;
        at += 1;
    }
    names
};

/// The names of what is a choice, in the order of its type, from which its number is counted.
#[must_use]
pub fn choices() -> Vec<(&'static str, &'static [&'static str])> {
    let names = |column: &Column| match column.kind {
        Kind::Choice(names) | Kind::Tier(names) => Some((column.name, names)),
        Kind::Count | Kind::Flag => None,
    };
    COLUMNS.iter().filter_map(names).collect()
}

/// A column of a layout, as people read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// How many.
    Count(u32),
    /// Whether.
    Flag(bool),
    /// Which.
    Choice(String),
}

/// The columns of a layout, in the order of [`NUMBERS`].
#[must_use]
pub fn cells(layout: &Layout) -> [Cell; NUMBERS.len()] {
    COLUMNS.map(|Column { kind, get, .. }| match kind {
        Kind::Count => Cell::Count(get(layout)),
        Kind::Flag => Cell::Flag(get(layout) != 0),
        Kind::Choice(names) => Cell::Choice(names[get(layout) as usize].into()),
        Kind::Tier(_) => Cell::Choice(layout.offload.tier.to_string()),
    })
}

/// The layout of a row; `tiers` are the places that its tier is counted among.
fn layout(numbers: &[u32], tiers: &[TierId]) -> Option<Layout> {
    let numbers: &[u32; NUMBERS.len()] = numbers.try_into().ok()?;
    let mut layout = GivenLayout::default().alone(0);
    for (Column { kind, set, .. }, &number) in COLUMNS.iter().zip(numbers) {
        set(&mut layout, number)?;
        if let Kind::Tier(_) = kind {
            layout.offload.tier = *tiers.get(number as usize)?;
        }
    }
    Some(layout)
}

/// What comes before the [`NUMBERS`] of a row: which of the platforms, so many accelerators in all or 0 where the layout says it, and
/// the tokens of a sequence or 0 for the model's.
pub const SITE_NUMBERS: usize = 3;

/// The columns that follow the figures of a step: from how many to how many seconds it takes, as far as can be relied on.
pub const RANGE: [&str; 2] = ["total_low_s", "total_high_s"];

/// Many predicted layouts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Points {
    /// Rows of [`Step::FIGURES`] and [`RANGE`], all NaN where a layout cannot run.
    pub figures: Vec<f64>,
    /// Of each row why it cannot run, as a place in [`Points::reasons`]; 0 where it can.
    pub refused: Vec<u32>,
    /// Every reason once; the first is empty.
    pub reasons: Vec<String>,
}

/// Predicts many layouts, each given by a row of [`SITE_NUMBERS`] and [`NUMBERS`]. Where `dp` is 0, it is what the accelerators leave. Where
/// `tiers` are named, a row's tier is its place among them.
///
/// # Errors
/// When a file is damaged or missing, a platform has no such rack, or none has such a tier.
pub fn points(
    model: &str,
    platforms: &[String],
    tiers: &[TierId],
    rack: Option<&str>,
    fill: Option<u32>,
    order: Option<Order>,
    rows: &[u32],
) -> Result<Points, RequestError> {
    let loaded = platforms.iter().map(|name| Platform::load(name)).collect::<Result<Vec<_>, _>>()?;
    // Where each row has a sequence of its own, the model need have none.
    let sequences = || rows.chunks_exact(SITE_NUMBERS + NUMBERS.len()).map(|row| row[SITE_NUMBERS - 1]);
    let longest = sequences().max().filter(|_| sequences().all(|tokens| tokens > 0));
    let model = Model::load_with(model, longest.map(|tokens| tokens.min(MOST)))?;
    let job = |(name, platform): (&String, _)| {
        Job::chosen(platform, rack, fill, order).map_err(|refusal| RequestError::refused(name, refusal))
    };
    let jobs = platforms.iter().zip(&loaded).map(job).collect::<Result<Vec<_>, _>>()?;
    let places = |job: &Job<'_>| {
        let behind = job.tiers().into_iter().filter(|tier| matches!(tier, TierId::Named(_)));
        [TierId::Host, TierId::Pool].into_iter().chain(behind).collect::<Vec<_>>()
    };
    let known: BTreeSet<_> = jobs.iter().flat_map(places).map(|tier| tier.to_string()).collect();
    if let Some(tier) = tiers.iter().map(TierId::to_string).find(|tier| !known.contains(tier)) {
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        return Err(RequestError::refused(&platforms.join(", "), Refusal::Tier { tier, known }));
    }
    let places = |job: &Job<'_>| if tiers.is_empty() { places(job) } else { tiers.to_vec() };
    let ranges_of = |job: &Job<'_>| {
        let of = |class| Margin::of(&job.rack().accelerator, class).map(|margin| margin.range);
        StepClass::ALL.into_iter().map(of).collect::<Result<Vec<_>, _>>()
    };
    let ranges = jobs.iter().map(ranges_of).collect::<Result<Vec<_>, _>>()?;
    let jobs: Vec<_> = jobs.into_iter().map(|job| (places(&job), job)).collect();
    let mut points = Points { reasons: vec![String::new()], ..Points::default() };
    let mut known = HashMap::new();
    for row in rows.chunks_exact(SITE_NUMBERS + NUMBERS.len()) {
        let place = match predicted(&jobs, &model, row) {
            Ok((step, class)) => {
                points.figures.extend(step.figures());
                points
                    .figures
                    .extend(ranges[row[0] as usize][class as usize].map(|times| times * step.total_s));
                0
            }
            Err(reason) => {
                points.figures.extend([f64::NAN; Step::FIGURES.len() + RANGE.len()]);
                let next = points.reasons.len();
                *known.entry(reason).or_insert_with_key(|reason: &String| {
                    points.reasons.push(reason.clone());
                    next as u32
                })
            }
        };
        points.refused.push(place);
    }
    Ok(points)
}

/// The step of a row and its class, or why there is none; each platform comes with the places that tiers are counted among.
fn predicted(
    jobs: &[(Vec<TierId>, Job<'_>)],
    model: &Model,
    row: &[u32],
) -> Result<(Step, StepClass), String> {
    let (&[platform, accelerators, sequence], numbers) = row.split_first_chunk().ok_or("no row")?;
    let (tiers, job) = jobs.get(platform as usize).ok_or("no such platform")?;
    let mut layout = layout(numbers, tiers).ok_or("no such choice")?;
    let ranks: u64 = [layout.tp, layout.cp, layout.pp].map(u64::from).iter().product();
    if layout.dp == 0 && ranks > 0 {
        layout.dp = (u64::from(accelerators) / ranks) as u32;
    }
    if accelerators > 0 && ranks.saturating_mul(layout.dp.into()) != u64::from(accelerators) {
        return Err(Refusal::Accelerators { ranks, dp: layout.dp, asked: accelerators }.to_string());
    }
    let longer;
    let model = match sequence {
        0 => model,
        _ => {
            longer = Model { sequence, ..model.clone() };
            longer.check().map_err(|(key, problem)| format!("{key}: {problem}"))?;
            &longer
        }
    };
    let plan = job.predict(model, &layout).map_err(|refusal| refusal.to_string())?;
    Ok((plan.step, StepClass::of(model, &layout)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_read_as_its_json_is() {
        let row: Vec<_> =
            (0..8).map(|it| it + 1).chain([1, 0, 2, 0, 3, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0]).collect();
        let layout = layout(&row, &[TierId::Host, TierId::Pool]).unwrap();
        let whole = serde_json::to_value(layout).unwrap();
        for (name, cell) in NUMBERS.iter().zip(cells(&layout)) {
            let value = match name.split_once('_') {
                Some((of @ ("overlap" | "offload"), key)) => &whole[of][key],
                _ => &whole[name],
            };
            let ours: serde_json::Value = match cell {
                Cell::Count(count) => count.into(),
                Cell::Flag(is_so) => is_so.into(),
                Cell::Choice(which) => which.into(),
            };
            assert_eq!(&ours, value, "{name}");
        }
    }

    #[test]
    fn rows_with_sequences_need_none_of_the_model() {
        let path = std::env::temp_dir().join(format!("polder-rows-{}.json", std::process::id()));
        let config = r#"{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "multi_query": true, "vocab_size": 65024}"#;
        std::fs::write(&path, config).unwrap();
        let row = |sequence: u32| {
            let layout = [1, 1, 1, 8, 1, 1, 8, 1].into_iter().chain([0; NUMBERS.len() - 8]);
            [0, 0, sequence].into_iter().chain(layout).collect::<Vec<_>>()
        };
        let points =
            |rows: &[u32]| points(path.to_str().unwrap(), &["dgx-h100".into()], &[], None, None, None, rows);
        let given = points(&[row(1024), row(2048), row(u32::MAX)].concat()).unwrap();
        let refused = points(&[row(1024), row(0)].concat()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(given.refused, [0, 0, 1]);
        assert!(
            given.reasons[1].starts_with("sequence: expected a number from 1 to "),
            "{:?}",
            given.reasons
        );
        assert!(
            refused.contains("max_position_embeddings: expected a whole number, found nothing; "),
            "{refused}"
        );
    }

    #[test]
    fn a_layout_is_the_one_that_its_numbers_name() {
        let row: Vec<_> = (0..8)
            .map(|number| number + 1)
            .chain([1, 0, 2, 0, 3, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0])
            .collect();
        let tiers = ["host", "pool", "cxl"].map(|tier| tier.parse().unwrap());
        let layout_of_row = layout(&row, &tiers).unwrap();
        assert_eq!(COLUMNS.map(|column| (column.get)(&layout_of_row)).to_vec(), row);
        assert_eq!(layout(&[0; 25][..24], &tiers), None);
        let wrong = |place: usize| {
            row.iter()
                .enumerate()
                .map(|(at, number)| if at == place { 5 } else { *number })
                .collect::<Vec<_>>()
        };
        assert_eq!(layout(&wrong(10), &tiers), None, "there are five kinds of recomputation");
        assert_eq!(layout(&wrong(21), &tiers), None, "there are three places");
        assert_eq!(layout(&row, &tiers[..0]), None);
    }
}
