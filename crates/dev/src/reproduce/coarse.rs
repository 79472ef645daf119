//! The figures of COARSE: the text's numbers beside what follows from data sheets and formulas.

use polder_dev::judge::coarse::{CoarseBeside, CoarseFigure, CoarseReport};

use crate::Failure;
use polder_plan::table::{self, digits};

/// The claims of these figures.
pub(super) fn run(figures: &[&str], json: bool) -> Result<(), Failure> {
    let figure = CoarseFigure::load()?;
    let CoarseReport { claims, open } = figure.beside()?;
    let is_asked = |beside: &CoarseBeside| {
        let digits = beside.claim.figure.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        figures.contains(&digits)
    };
    if json {
        let claims: Vec<_> = claims.iter().filter(|beside| is_asked(beside)).collect();
        println!("{}", serde_json::json!({ "claims": claims, "open": open }));
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    let mut rows = vec![table::head("figure | | published | simulated | from | to | to over from |")];
    for beside in claims.iter().filter(|beside| is_asked(beside)) {
        let [least, most] = beside.claim.published;
        let published = match least == most {
            true => digits(least),
            false => format!("{} to {}", digits(least), digits(most)),
        };
        let reached = if beside.is_reached() { "inside" } else { "outside" };
        let name = format!("{:<4} {}", beside.claim.figure, beside.claim.says);
        let [from, to] = beside.range.map(digits);
        let wide = beside.times_wide().map_or_else(String::new, |times| format!("{times:.1}"));
        rows.push(vec![name, published, digits(beside.simulated), from, to, wide, reached.into()]);
    }
    rows[0].remove(1);
    table::print(&rows);
    println!(
        "  (from, to: over all ends of the ranges below; outside: no ends of the ranges give the published number)"
    );
    let asked = claims.iter().filter(|beside| is_asked(beside));
    let widths: Vec<_> = asked.clone().filter_map(CoarseBeside::times_wide).collect();
    let [least, most] = [widths.iter().copied().reduce(f64::min), widths.iter().copied().reduce(f64::max)];
    println!(
        "  ranges are {:.1} to {:.1} times as much at one end as at the other: so wide a range has most numbers inside, and rules little out\n",
        least.unwrap_or(1.0),
        most.unwrap_or(1.0)
    );
    let mut rows =
        vec![table::head("what the paper leaves open | value | from | to | moves a figure, times | most")];
    for moved in &open {
        let [from, to] = moved.open.range.map(|end| end.to_string());
        let most = format!("{:.2} (figure {})", moved.most_times, claims[moved.most_moved].claim.figure);
        rows.push(vec![
            moved.open.what.clone(),
            moved.open.value.to_string(),
            from,
            to,
            format!("{:.2}", moved.mean_times),
            most,
        ]);
    }
    table::print(&rows);
    println!();
    figure.machine.iter().for_each(|machine| println!("{}: {}", machine.name, machine.accelerator));
    figure.notes.iter().for_each(|line| println!("note: {line}"));
    println!("simulated; nothing is fitted to these figures");
    Ok(())
}
