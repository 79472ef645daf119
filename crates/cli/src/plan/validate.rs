//! Predictions beside published steps.

use clap::Args;
use polder_platform::Fitted;
use polder_sim::{Judged, Pooled, validate};
use serde::Serialize;

use super::table;
use crate::Failure;

/// Holds predictions against published steps.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print what constants each table was judged with.
    #[arg(long)]
    constants: bool,
}

#[derive(Serialize)]
struct Report {
    tables: Vec<Judged>,
    pooled: Pooled,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let tables = validate()?;
    let pooled = Pooled::of(&tables);
    if arguments.json {
        println!("{}", serde_json::to_string(&Report { tables, pooled })?);
        return Ok(());
    }
    println!(
        "published: steps that others ran. simulated: Polder's closed form, its eight constants an accelerator fitted"
    );
    println!(
        "without the table's publication. The first row sets one scalar for the table's software; the others are judged."
    );
    for judged in &tables {
        println!("\n{}\n  {}", judged.title, judged.source);
        if !judged.assumed.is_empty() {
            println!("  not in the publication, assumed: {}", judged.assumed.join(", "));
        }
        if arguments.constants {
            let constants = Fitted::NAMES.iter().zip(judged.fitted.values());
            println!(
                "  {}",
                constants.map(|(name, value)| format!("{name} {value:.3e}")).collect::<Vec<_>>().join(", ")
            );
        }
        let mut rows = vec![
            ["", "published s", "simulated s", "with scalar", "error", "constant rate"]
                .map(String::from)
                .to_vec(),
        ];
        for row in &judged.rows {
            let error = if row.judged { percent(row.error()) } else { "scalar".into() };
            rows.push(vec![
                format!("  {}", row.name),
                format!("{:.3}", row.published_s),
                format!("{:.3}", row.predicted_s),
                format!("{:.3}", row.anchored_s),
                error,
                percent(row.constant_s / row.published_s - 1.0),
            ]);
        }
        table::print(&rows);
        for ratio in &judged.ratios {
            let [dividend, divisor] = &ratio.rows;
            let (published, predicted, error) = (ratio.published, ratio.predicted, percent(ratio.error()));
            println!(
                "  {dividend} over {divisor}: published {published:.3}, simulated {predicted:.3}, error {error}"
            );
        }
    }
    let Pooled { rows, mean, worst, mean_without_scalar, constant_mean, constant_worst, worst_ratio } =
        pooled;
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
    println!("no run over CXL validates any of this: what differs between fabrics is simulated");
    Ok(())
}

fn percent(part: f64) -> String {
    format!("{:+.1}%", part * 100.0)
}
