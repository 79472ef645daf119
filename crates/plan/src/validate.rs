//! Predictions beside published steps.

use clap::Args;
use polder_platform::Fitted;
use polder_sim::fabrics::{self, Measure, Role};
use polder_sim::{Judged, Pooled, validate};
use serde::Serialize;

use super::fidelity::ClosedForm;
use super::table;
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
    pooled: Pooled,
    fabrics: Vec<fabrics::FabricTable>,
    fabrics_pooled: fabrics::PooledFabrics,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let why =
        "the constants of an accelerator are fitted in closed form; plan train takes L1 and L2 for a layout";
    arguments.fidelity.check("validate", why)?;
    let tables = validate()?;
    let pooled = Pooled::of(&tables);
    let fabrics = fabrics::validate()?;
    if arguments.json.json {
        let fabrics_pooled = fabrics::PooledFabrics::of(&fabrics);
        println!("{}", serde_json::to_string(&Report { tables, pooled, fabrics, fabrics_pooled })?);
        return Ok(());
    }
    println!(
        "published: steps that others ran. simulated: Polder's closed form, its eight constants an accelerator fitted"
    );
    println!(
        "without the table's publication. The first row sets one scalar for the table's software; the others are judged."
    );
    for judged in &tables {
        print_steps(judged, arguments.constants);
    }
    print_pooled(pooled);
    println!("no run over CXL validates any of this: what differs between fabrics is simulated");
    print_fabrics(&fabrics);
    Ok(())
}

/// One publication's steps.
fn print_steps(judged: &Judged, constants: bool) {
    println!("\n{}\n  {}", judged.title, judged.source);
    if !judged.assumed.is_empty() {
        println!("  not in the publication, assumed: {}", judged.assumed.join(", "));
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
        "interleave",
        "published s",
        "simulated s",
        "with scalar",
        "error",
        "constant rate",
        "memory, GB",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (index, row) in judged.rows.iter().chain(&judged.also).enumerate() {
        let error = match (row.judged, index) {
            (true, _) => percent(row.error()),
            (_, 0) => "scalar".into(),
            _ => format!("not judged {}", percent(row.error())),
        };
        let memory = &row.memory;
        let over = if memory.fits() { "" } else { ": does not fit" };
        rows.push(vec![
            format!("  {}", row.name),
            row.interleave.to_string(),
            format!("{:.3}", row.published_s),
            format!("{:.3}", row.predicted_s),
            format!("{:.3}", row.anchored_s),
            error,
            percent(row.constant_s / row.published_s - 1.0),
            format!(
                "{:.1} of {:.0}{over}",
                memory.accelerator().used_bytes / 1e9,
                memory.accelerator().capacity_bytes / 1e9
            ),
        ]);
    }
    table::print(&rows);
    let [least, most] = judged.shipped;
    println!(
        "  by the platform's own constants, fitted to it too: published took {least:.3} to {most:.3} times what is simulated"
    );
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

fn print_pooled(pooled: Pooled) {
    let Pooled { rows, mean, worst, mean_without_scalar, constant_mean, constant_worst, .. } = pooled;
    let Pooled { worst_ratio, steps, fits, .. } = pooled;
    println!(
        "\nall tables, {rows:.0} judged rows: mean {:.1}%, worst {:.1}%; ratios inside a table: worst {:.1}%",
        mean * 100.0,
        worst * 100.0,
        worst_ratio * 100.0
    );
    println!("without the scalars: mean {:.1}%", mean_without_scalar * 100.0);
    println!(
        "a constant rate an accelerator, with the scalars: mean {:.1}%, worst {:.1}%",
        constant_mean * 100.0,
        constant_worst * 100.0
    );
    println!("memory: {fits} of {steps} published steps are predicted to fit");
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
        let head = ["", "published", "simulated", "error", "data sheet"].map(String::from).to_vec();
        let figures = held.iter().map(|row| {
            let verdict = match row.role {
                Role::Fitted => "fitted".into(),
                Role::NotJudged => format!("not judged {}", percent(row.error())),
                _ => percent(row.error()),
            };
            let [published, simulated] = [row.published, row.simulated].map(|it| written(it, row.measure));
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
            let head = ["", "simulated", "", ""].map(String::from).to_vec();
            let rows = trends.into_iter().map(|row| {
                let bound = if row.role == Role::AtLeast { "at least published" } else { "above simulated" };
                let [bounding, simulated] = [row.published, row.simulated].map(|it| written(it, row.measure));
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
