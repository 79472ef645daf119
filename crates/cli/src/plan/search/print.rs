//! What a search has found, as people read it.

use std::collections::BTreeSet;

use polder_sim::{Layout, Offload, Space, accelerators, grouped, listed};

use super::super::table;
use super::super::train::{computed_line, lower, range};
use super::costs::AXES;
use super::{Costs, Point, Report, Site};

/// How much worse a layout may be that is left out of the table: this part of its time and costs, and of the memory that there is.
const TOLERANCE: f64 = 0.01;

/// The fastest of each platform, then the front, then what both rest on.
pub(super) fn print(report: &Report<'_>) {
    let Report { arguments, front, best, unproved, unjudged, costs_left_out, .. } = report;
    summary(report);
    if best.len() > 1 {
        println!("the fastest of each:");
        table::print(&rows(report, best.iter()));
        println!("all that no other beats:");
    }
    let distinct = distinct(front);
    table::print(&rows(report, distinct.iter().copied().take(arguments.rows)));
    if distinct.len() > arguments.rows {
        println!("and {} more: --rows", grouped((distinct.len() - arguments.rows) as u64));
    }
    println!(
        "range: how long published steps of the accelerator took beside what is predicted of them (`polder plan validate`)"
    );
    println!("not looked at unless given: {}", Space::left_out());
    for (platform, note) in unproved {
        println!("{platform}: {note}");
    }
    unjudged.iter().for_each(|note| println!("{note}"));
    sources(report);
    costs_left_out.electricity_line(arguments).iter().for_each(|line| println!("{line}"));
}

/// How many there are, and how they are computed.
fn summary(report: &Report<'_>) {
    let Report { points, fits, front, .. } = report;
    let paid = paid_axes(front).map(|(name, _)| name);
    let axes: Vec<_> = ["time", "memory"].into_iter().chain(paid).collect();
    println!(
        "{} layouts, {} fit, {} that no other beats in {} (simulated)",
        grouped(*points),
        grouped(*fits),
        front.len(),
        listed(&axes)
    );
    let distinct = distinct(front).len();
    if distinct < front.len() {
        println!(
            "{} of them here: one of these is as good as each other one to within {:.0}%; --csv, --parquet and --json have all",
            grouped(distinct as u64),
            TOLERANCE * 100.0
        );
    }
    // All that is searched is computed alike.
    if let Some(Point { sequence, layout, order, .. }) = front.first() {
        println!("{}; ranks are placed {order}", computed_line(*sequence, layout));
    }
}

/// Of the costs those that are known.
fn paid_axes(front: &[Point<'_>]) -> impl Iterator<Item = (&'static str, (&'static str, f64))> {
    let known = front.first().and_then(|point| point.costs.as_ref()).map_or([None; 3], Costs::paid);
    AXES.into_iter().zip(known).filter_map(|(axis, cost)| cost.map(|_| axis))
}

/// Of the front, the fastest first, what is printed: no layout that one before it is as good as, to within the tolerance.
fn distinct<'a, 'b>(front: &'a [Point<'b>]) -> Vec<&'a Point<'b>> {
    // Each figure, and what it is a part of.
    let axes = |point: &Point<'_>| {
        let memory = point.step.memory.tiers.map(|tier| (tier.used_bytes, tier.capacity_bytes));
        let costs = point.costs.iter().flat_map(|costs| costs.paid().into_iter().flatten());
        let paid = std::iter::once(point.step.total_s).chain(costs).map(|it| (it, it));
        paid.chain(memory).collect::<Vec<_>>()
    };
    let mut printed: Vec<(Vec<(f64, f64)>, &Point<'_>)> = vec![];
    for point in front {
        let own = axes(point);
        let is_near = |(other, _): &(Vec<(f64, f64)>, _)| {
            other.iter().zip(&own).all(|((other, _), (own, whole))| *other <= own + whole * TOLERANCE)
        };
        if !printed.iter().any(is_near) {
            printed.push((own, point));
        }
    }
    printed.into_iter().map(|(_, point)| point).collect()
}

/// A head, and a row for each layout. A column is called as the option that sets it.
fn rows<'a, 'b: 'a>(report: &Report<'_>, points: impl Iterator<Item = &'a Point<'b>>) -> Vec<Vec<String>> {
    let (is_run, several) = (report.arguments.tokens.is_some(), report.arguments.gpus.len() > 1);
    let paid: Vec<_> = paid_axes(report.front).map(|(_, (unit, _))| unit).collect();
    let mut head = vec!["platform"];
    head.extend(several.then_some("gpus"));
    head.extend(["range, s", "step, s"]);
    head.extend(is_run.then_some("run days"));
    head.extend(paid);
    head.extend(["memory, GB", "offloaded, GB", "tp", "cp", "ep", "dp", "pp", "interleave", "micro-batch"]);
    head.extend(["fill", "sequence-parallel", "recompute", "zero", "offload"]);
    let row = |point: &Point<'_>| {
        let Point { platform, fill, layout, step, costs, margin, .. } = point;
        let mut row = vec![(*platform).to_owned()];
        row.extend(several.then(|| grouped(layout.accelerators().into())));
        row.extend([range(margin, step.total_s, 3), format!("{:.3}", step.total_s)]);
        if let Some(costs) = costs {
            row.extend(is_run.then(|| format!("{:.1}", costs.total_s / 86400.0)));
            let paid = AXES.into_iter().zip(costs.paid());
            row.extend(paid.filter_map(|((_, (_, unit)), cost)| Some(format!("{:.3}", cost? / unit))));
        }
        row.extend(step.memory.tiers.map(|tier| format!("{:.1}", tier.used_bytes / 1e9)));
        let Layout { tp, cp, ep, dp, pp, interleave, micro_batch, .. } = layout;
        row.extend([tp, cp, ep, dp, pp, interleave, micro_batch, fill].map(ToString::to_string));
        row.push(layout.sequence_parallel.to_string());
        row.extend([lower(&layout.recompute), lower(&layout.zero), offload(layout)]);
        row
    };
    let head = head.into_iter().map(String::from).collect();
    std::iter::once(head).chain(points.map(row)).collect()
}

/// As `--offload` and `--to` have it.
fn offload(layout: &Layout) -> String {
    let Offload { tier, weights, optimizer, activations } = layout.offload;
    let what = [("weights", weights), ("optimizer", optimizer), ("activations", activations)];
    let what: Vec<_> = what.into_iter().filter(|(_, is_far)| *is_far).map(|(name, _)| name).collect();
    match what.is_empty() {
        true => "none".into(),
        false => format!("{} ({tier})", what.join(",")),
    }
}

/// What the costs follow from, each number once with its source.
fn sources(report: &Report<'_>) {
    let Report { arguments, sites, costs_left_out, .. } = report;
    let Some(prices) = &arguments.prices else { return };
    let of = if arguments.tokens.is_some() { "the run" } else { "a step" };
    println!("what {of} costs, by {prices}, as if everything took its full power all the time:");
    let mut sources = vec![];
    for Site { platform, accelerators: count, rates, .. } in *sites {
        let inputs = rates.iter().flat_map(|rates| &rates.inputs);
        let counted = inputs.map(|input| {
            sources.push(format!("  {}, {}: {}", input.what, input.value, input.source));
            match input.count {
                Some(count) => format!("{} x {}, {}", grouped(count), input.what, input.value),
                None => format!("{}, {}", input.what, input.value),
            }
        });
        let counted: Vec<_> = counted.collect();
        println!("  {platform}, {}: {}", accelerators(*count), counted.join("; "));
    }
    println!("from");
    let mut seen = BTreeSet::new();
    for line in sources.iter().filter(|line| seen.insert(*line)) {
        println!("{line}");
    }
    for (axis, platform) in &costs_left_out.axes {
        println!("{axis} is left out: {prices} has none for {platform}");
    }
}

#[cfg(test)]
mod tests {
    use polder_sim::{Margin, MemoryUse, Order, Step, TierUse};

    use super::*;

    #[test]
    fn the_table_leaves_out_what_another_line_is_as_good_as_to_within_the_tolerance() {
        let point = |total_s: f64, used: f64, far: f64| Point {
            platform: "ours",
            kind: "simulated",
            accelerators: 8,
            sequence: 2048,
            rack: "ours",
            fill: 8,
            order: Order::default(),
            layout: serde_json::from_str(r#"{"tp": 8, "dp": 1, "batch": 8}"#).unwrap(),
            step: Step {
                total_s,
                memory: MemoryUse {
                    tiers: [(used, 200.0), (far, 50.0)].map(|(used_bytes, capacity_bytes)| TierUse {
                        used_bytes,
                        capacity_bytes,
                        ..TierUse::default()
                    }),
                },
                ..Step::default()
            },
            costs: None,
            note: None,
            margin: Margin::of("none").unwrap(),
        };
        let found = [
            point(1.0, 100.0, 0.0),
            point(1.001, 98.5, 0.5),
            point(1.002, 97.0, 0.0),
            point(1.003, 95.5, 1.0),
            point(1.02, 95.0, 0.0),
            point(1.03, 20.0, 50.0),
        ];
        let times: Vec<_> = distinct(&found).iter().map(|point| point.step.total_s).collect();
        assert_eq!(times, [1.0, 1.002, 1.03]);
    }
}
