//! What a search has found as a page that needs nothing else: the ranges as bars, and the tables.

use serde_json::{Value, json};

use super::super::page::filled;
use super::print::{RANGES, choices, distinct, rows, summary, title};
use super::{Point, Report};
use crate::Failure;

/// The page: the same layouts as people read in the terminal.
pub(super) fn page(report: &Report<'_>) -> Result<String, Failure> {
    let Report { arguments, front, best, unproved, unjudged, .. } = report;
    let listed: Vec<_> = distinct(front).into_iter().take(arguments.rows).collect();
    let several = best.len() > 1;
    let mut tables = vec![];
    if several {
        tables.push(json!({ "title": "The fastest of each", "rows": rows(report, best.iter()) }));
    }
    tables.push(json!({ "title": "All that no other beats", "rows": rows(report, listed.iter().copied()) }));
    let fastest = best.iter().filter(|_| several).map(|point| bar(point, true));
    let bars: Vec<_> = fastest.chain(listed.iter().map(|point| bar(point, false))).collect();
    let unproved = unproved.iter().map(|(platform, note)| format!("{platform}: {note}"));
    let notes =
        std::iter::once(RANGES.to_owned()).chain(unproved).chain(unjudged.iter().map(|it| (*it).into()));
    let data = json!({
        "choices": if several { choices(report) } else { vec![] },
        "bars": bars,
        "tables": tables,
        "notes": notes.chain(summary(report)).collect::<Vec<_>>(),
    });
    filled(include_str!("search.html"), &title(report), &data)
}

fn bar(point: &Point<'_>, is_best: bool) -> Value {
    let Point { platform, accelerators, layout, step, range_s, .. } = point;
    let name = format!(
        "{platform}, {accelerators}: tp {} cp {} dp {} pp {}",
        layout.tp, layout.cp, layout.dp, layout.pp
    );
    json!({ "name": name, "is_best": is_best, "range": range_s, "predicted": step.total_s })
}
