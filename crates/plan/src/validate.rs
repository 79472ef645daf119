//! Predictions beside published steps.

use std::collections::BTreeSet;

use clap::Args;
use polder_platform::{Accelerator, DataError, Fitted};
use polder_sim::fabrics::{self, Measure, Role};
use polder_sim::{Compared, Judged, Margin, Pooled, StepClass, validate};
use serde::Serialize;

use super::fidelity::ClosedForm;
use super::table;
use super::table::span;
use super::written::Json;
use crate::Failure;

/// Holds predictions against published steps.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    fidelity: ClosedForm,
    #[command(flatten)]
    json: Json,
    /// Print the constants with which each table was judged.
    #[arg(long)]
    constants: bool,
}

#[derive(Serialize)]
struct Report {
    tables: Vec<Judged>,
    /// Of tables that constants are fitted to, and of blind ones.
    pooled: Pooled,
    blind: Pooled,
    /// The margin of each kind of step that was published: on an accelerator of which steps were published, and on another.
    classes: Vec<Margin>,
    unknown: Vec<Margin>,
    fabrics: Vec<fabrics::FabricTable>,
    fabrics_pooled: fabrics::PooledFabrics,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let why =
        "the constants of an accelerator are fitted in closed form; plan train takes L1 and L2 for a layout";
    arguments.fidelity.check("validate", why)?;
    let tables = validate()?;
    let of = |blind: bool| tables.iter().filter(move |table| table.blind == blind);
    let [pooled, blind] = [false, true].map(|blind| Pooled::of(of(blind)));
    let is_published = |it: &Margin| it.blind.published + it.fitted.published > 0;
    let margins = |accelerator: &Accelerator| -> Result<Vec<_>, DataError> {
        let margins = StepClass::ALL.into_iter().map(|class| Margin::of(accelerator, class));
        Ok(margins.collect::<Result<Vec<_>, _>>()?.into_iter().filter(is_published).collect())
    };
    let known = of(false).next().map(|table| &table.chip).expect("a table is published that is not blind");
    let other = Accelerator { name: String::new(), ..known.clone() };
    let [classes, unknown] = [margins(known)?, margins(&other)?];
    let fabrics = fabrics::validate()?;
    if arguments.json.json {
        let fabrics_pooled = fabrics::PooledFabrics::of(&fabrics);
        let report = Report { tables, pooled, blind, classes, unknown, fabrics, fabrics_pooled };
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    print_errors([&classes, &unknown], [blind, pooled], &tables);
    println!(
        "\npublished: steps that others ran. simulated: Polder's closed form. range: where 80% of steps of its kind should lie, set"
    );
    println!(
        "without the row's publication. The first row of a table sets one scalar for its software; the others are judged with it too."
    );
    println!("\nblind: simulated with the constants of the platforms' files, which no row of these sets");
    of(true).for_each(|judged| print_steps(judged, arguments.constants));
    println!(
        "\nothers: eight constants an accelerator are fitted to them, for each table without its publication"
    );
    of(false).for_each(|judged| print_steps(judged, arguments.constants));
    println!("\nno run over CXL validates any of this: what differs between fabrics is simulated");
    print_fabrics(&fabrics);
    Ok(())
}

/// How far off predictions are, by kind of step: first steps that nothing is fitted to.
fn print_errors([classes, unknown]: [&[Margin]; 2], [blind, fitted]: [Pooled; 2], tables: &[Judged]) {
    println!(
        "training steps, each predicted with constants and a range that were set without its publication"
    );
    let mut rows = vec![table::head(
        "| steps | raw error | rows | with scalar | constant rate | in the 80% range | refused: do not fit",
    )];
    let mut block = |title: &str, all: &Pooled, of: fn(&Margin) -> &Pooled| {
        rows.push(vec![title.to_owned()]);
        for margin in classes.iter().filter(|it| of(it).published > 0) {
            rows.push(summary(margin.step_class.name(), of(margin)));
        }
        rows.push(summary("all", all));
    };
    block("blind: nothing is fitted to them", &blind, |margin| &margin.blind);
    block("others, each without its publication", &fitted, |margin| &margin.fitted);
    table::print(&rows);
    let all = Pooled::of(tables);
    println!(
        "  in the range: {:.0} of {:.0} steps, {:.0}%; the mean of the publications is {:.0}%; 80% is the aim",
        all.in_range * all.steps,
        all.steps,
        all.in_range * 100.0,
        mean_in_range(tables) * 100.0
    );
    for (Margin { step_class, range, publications, .. }, other) in classes.iter().zip(unknown) {
        println!(
            "  the range of {}, by {publications} publications: {} times what is predicted; {} where nothing of the accelerator was published",
            step_class.name(),
            span(*range),
            span(other.range)
        );
    }
    let [blind, fitted] = [blind, fitted].map(|it| it.worst_ratio * 100.0);
    println!("  ratios inside a blind table: worst {blind:.1}%; of tables that are not blind {fitted:.1}%");
}

/// Mean and worst of each error.
fn summary(title: &str, of: &Pooled) -> Vec<String> {
    let errors = |mean: f64, worst: f64| format!("{:.1}%, worst {:.1}%", mean * 100.0, worst * 100.0);
    vec![
        format!("  {title}"),
        format!("{:.0}", of.steps),
        errors(of.mean_without_scalar, of.worst_without_scalar),
        format!("{:.0}", of.rows),
        errors(of.mean, of.worst),
        errors(of.constant_mean, of.constant_worst),
        format!("{:.0} of {:.0}", of.in_range * of.steps, of.steps),
        format!("{} of {}", of.published - of.fits, of.published),
    ]
}

/// The part of its steps that a publication has in their ranges, of all publications on average.
fn mean_in_range(tables: &[Judged]) -> f64 {
    let publications: BTreeSet<_> = tables.iter().map(|table| &table.publication).collect();
    let of = |name| Pooled::of(tables.iter().filter(|table| &table.publication == name)).in_range;
    publications.iter().map(|name| of(*name)).sum::<f64>() / publications.len() as f64
}

/// One publication's steps.
fn print_steps(judged: &Judged, constants: bool) {
    println!("\n{}\n  {}", judged.title, judged.source);
    if !judged.assumed.is_empty() {
        println!("  not in the publication, assumed: {}", judged.assumed.join("; "));
    }
    if constants {
        let constants = Fitted::NAMES.iter().zip(judged.fitted.values());
        println!(
            "  {}",
            constants.map(|(name, value)| format!("{name} {value:.3e}")).collect::<Vec<_>>().join(", ")
        );
    }
    let head = [
        "",
        "kind",
        "interleave",
        "published s",
        "range s",
        "simulated s",
        "raw error",
        "with scalar s",
        "error",
        "constant rate",
        "memory, GB",
        "in the source",
    ];
    let is_placed = judged.rows.iter().any(|row| row.place.is_some());
    let head = head.iter().take(if is_placed { 12 } else { 11 });
    let mut rows = vec![head.map(|it| (*it).to_owned()).collect()];
    rows.extend(judged.rows.iter().chain(&judged.also).enumerate().map(|(index, row)| step_row(index, row)));
    table::print(&rows);
    if !judged.blind {
        let [least, most] = judged.shipped;
        println!(
            "  by the platform's own constants, fitted to it too: published took {least:.3} to {most:.3} times what is simulated"
        );
    }
    for ratio in &judged.ratios {
        let [dividend, divisor] = &ratio.rows;
        let (published, predicted, error) = (ratio.published, ratio.predicted, percent(ratio.error()));
        println!(
            "  {dividend} over {divisor}: published {published:.3}, simulated {predicted:.3}, error {error}"
        );
    }
    for unexplained in &judged.unexplained {
        println!("  not explained: {unexplained}");
    }
}

/// One step.
fn step_row(index: usize, row: &Compared) -> Vec<String> {
    let error = match (row.judged, index) {
        (true, _) => percent(row.error()),
        (_, 0) => "scalar".into(),
        _ => format!("not judged {}", percent(row.error())),
    };
    let memory = &row.memory;
    let over = if memory.fits() { "" } else { ": refused, does not fit" };
    let [least, most] = row.range_s;
    let outside = if row.is_in_range() { "" } else { ": outside" };
    let mut cells = vec![
        format!("  {}", row.name),
        row.step_class.name().into(),
        row.interleave.to_string(),
        format!("{:.3}", row.published_s),
        format!("{least:.2} to {most:.2}{outside}"),
        format!("{:.3}", row.predicted_s),
        percent(row.raw_error()),
        format!("{:.3}", row.anchored_s),
        error,
        percent(row.constant_error()),
        format!(
            "{:.1} of {:.0}{over}",
            memory.accelerator().used_bytes / 1e9,
            memory.accelerator().capacity_bytes / 1e9
        ),
    ];
    cells.extend(row.place.clone());
    cells
}

/// What was published of fabrics and memory themselves.
fn print_fabrics(tables: &[fabrics::FabricTable]) {
    println!("\nfabrics and memory, apart from training steps");
    println!(
        "published: what others measured, or NCCL's own model. simulated: the closed form on the platform's description; a row to"
    );
    println!(
        "which one of its constants is fitted says so, the others are judged. data sheet: with nothing fitted, and no software."
    );
    for table in tables {
        println!("\n{}\n  {}", table.title, table.source);
        for assumed in &table.assumed {
            println!("  assumed: {assumed}");
        }
        let (trends, held): (Vec<_>, Vec<_>) = table.rows.iter().partition(|row| row.holds().is_some());
        let (same, held): (Vec<_>, Vec<_>) = held.into_iter().partition(|row| row.role == Role::Same);
        let head = table::head("| published | simulated | error | data sheet");
        let figures = held.iter().map(|row| {
            let verdict = match row.role {
                Role::Fitted => "fitted".into(),
                Role::NotJudged => format!("not judged {}", percent(row.error())),
                _ => percent(row.error()),
            };
            let [published, simulated] =
                [row.published, row.simulated].map(|value| written(value, row.measure));
            let plain = percent(row.plain / row.published - 1.0);
            vec![format!("  {}", row.name), published, simulated, verdict, plain]
        });
        table::print(&[vec![head], figures.collect()].concat());
        for row in held {
            if let Some(why) = &row.why {
                println!("  not judged: {}: {why}", row.name);
            }
        }
        if !same.is_empty() {
            let worst = same.iter().map(|row| row.error().abs()).fold(0.0, f64::max) * 100.0;
            println!(
                "  {} figures of its own constants and formulas come out the same, to {worst:.1}%",
                same.len()
            );
        }
        if !trends.is_empty() {
            println!("  trends; no side of one is a figure that a constant of this table is fitted to:");
            let head = table::head("| simulated |  |");
            let rows = trends.into_iter().map(|row| {
                let bound = if row.role == Role::AtLeast { "at least published" } else { "above simulated" };
                let [bounding, simulated] =
                    [row.published, row.simulated].map(|value| written(value, row.measure));
                let verdict = if row.holds() == Some(true) { "holds" } else { "broken" };
                vec![format!("    {}", row.name), simulated, format!("{bound} {bounding}"), verdict.into()]
            });
            table::print(&[vec![head], rows.collect()].concat());
        }
        for unexplained in &table.unexplained {
            println!("  not explained: {unexplained}");
        }
        println!("  {}", summed_up(&fabrics::PooledFabrics::of(std::slice::from_ref(table))));
    }
    println!("\nall tables of fabrics and memory: {}", summed_up(&fabrics::PooledFabrics::of(tables)));
    println!(
        "runs over CXL are among these: of memory behind a host, and of messages between two. None is of a training step"
    );
}

fn summed_up(pooled: &fabrics::PooledFabrics) -> String {
    let fabrics::PooledFabrics { rows, mean, worst, plain_mean, trends, held } = *pooled;
    let [mean, worst, plain] = [mean, worst, plain_mean].map(|part| part * 100.0);
    let trends = if trends > 0 { format!("; {held} of {trends} trends hold") } else { String::new() };
    format!("{rows} judged rows, mean {mean:.1}%, worst {worst:.1}% (data sheet: mean {plain:.1}%){trends}")
}

fn written(value: f64, measure: Measure) -> String {
    match measure {
        Measure::Bandwidth if value < 1e9 => format!("{:.1} MB/s", value / 1e6),
        Measure::Bandwidth => format!("{:.2} GB/s", value / 1e9),
        Measure::Time if value < 1e-6 => format!("{:.0} ns", value * 1e9),
        Measure::Time => format!("{:.1} us", value * 1e6),
        Measure::Times => format!("{value:.1} times"),
    }
}

fn percent(part: f64) -> String {
    format!("{:+.1}%", part * 100.0)
}
