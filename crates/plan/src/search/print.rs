//! What a search has found, as people read it.

use polder_sim::{Layout, Offload, Space, grouped, listed};

use super::super::table::{self, print_wrapped, span, three};
use super::super::train::{computed_line, lower};
use super::costs::{AXES, electricity_line, print_sources};
use super::{Costs, Point, Report};

/// How much worse a layout may be that is left out of the table: this part of its time and costs, and of the memory that there is.
const TOLERANCE: f64 = 0.01;

/// Which platform takes the least, the fastest of each, then the front, then what both rest on and how many there were.
pub(super) fn print(report: &Report<'_>) {
    let Report { arguments, front, best, unproved, unjudged, .. } = report;
    print_wrapped(&title(report));
    if best.len() > 1 {
        choices(report).iter().for_each(|line| print_wrapped(line));
        println!("the fastest of each:");
        table::print(&rows(report, best.iter()));
    }
    println!("all that no other beats:");
    let distinct = distinct(front);
    table::print(&rows(report, distinct.iter().copied().take(arguments.rows)));
    if distinct.len() > arguments.rows {
        println!("and {} more: --rows", grouped((distinct.len() - arguments.rows) as u64));
    }
    print_wrapped(RANGES);
    print_wrapped(&format!("not looked at unless given: {}", Space::left_out()));
    for (platform, note) in unproved {
        print_wrapped(&format!("{platform}: {note}"));
    }
    unjudged.iter().for_each(|note| print_wrapped(note));
    sources(report);
    summary(report).iter().for_each(|line| print_wrapped(line));
}

/// What ranges are.
pub(super) const RANGES: &str = "range: where 80% of steps from another publication would lie (`polder plan validate`); step: as predicted";

/// What was searched.
pub(super) fn title(report: &Report<'_>) -> String {
    let batch = report.front.first().map_or(0, |point| point.layout.batch);
    format!("{}, batch {batch}, simulated", report.arguments.subject.model)
}

/// How they are computed, and how many there are.
pub(super) fn summary(report: &Report<'_>) -> Vec<String> {
    let Report { points, fits, front, .. } = report;
    // All that is searched is computed alike.
    let first = front.first();
    let computed = first.map(|Point { sequence, layout, order, .. }| {
        format!("{}; ranks are placed {order}", computed_line(*sequence, layout))
    });
    let distinct = distinct(front).len();
    let here = (distinct < front.len()).then(|| {
        format!(
            "{} of them here: one of these is as good as each other one to within {:.0}%; --csv and --json have all",
            grouped(distinct as u64),
            TOLERANCE * 100.0
        )
    });
    let paid = paid_axes(front).map(|(name, _)| name);
    let axes: Vec<_> = ["time", "memory"].into_iter().chain(paid).collect();
    let all = format!(
        "{} layouts, {} fit, {} that no other beats in {} (simulated)",
        grouped(*points),
        grouped(*fits),
        front.len(),
        listed(&axes)
    );
    computed.into_iter().chain([all]).chain(here).collect()
}

/// Of the costs those that are known.
fn paid_axes(front: &[Point<'_>]) -> impl Iterator<Item = (&'static str, (&'static str, f64))> {
    let known = front.first().and_then(|point| point.costs.as_ref()).map_or([None; 3], Costs::paid);
    AXES.into_iter().zip(known).filter_map(|(axis, cost)| cost.map(|_| axis))
}

/// Which platform takes the least of each axis, as far as the ranges say so.
pub(super) fn choices(report: &Report<'_>) -> Vec<String> {
    let seconds: fn(&Point<'_>) -> Option<f64> = |point| Some(point.step.total_s);
    let money: fn(&Point<'_>) -> Option<f64> = |point| point.costs.as_ref()?.paid()[0];
    let energy: fn(&Point<'_>) -> Option<f64> = |point| point.costs.as_ref()?.paid()[1];
    let carbon: fn(&Point<'_>) -> Option<f64> = |point| point.costs.as_ref()?.paid()[2];
    let axes = [("time", seconds), (AXES[0].0, money), (AXES[1].0, energy), (AXES[2].0, carbon)];
    axes.into_iter()
        .filter_map(|(axis, cost)| Some(format!("least {axis}: {}", least(report, cost)?)))
        .collect()
}

/// The platform that takes the least, and all that may take less than it.
fn least(report: &Report<'_>, cost: fn(&Point<'_>) -> Option<f64>) -> Option<String> {
    let Report { front, best, arguments, .. } = report;
    let own = |site: &Point<'_>| {
        let its = front.iter().chain(*best).filter(|it| it.place() == site.place());
        its.filter_map(cost).min_by(f64::total_cmp)
    };
    let sites = best.iter().map(|site| Some((site, own(site)?))).collect::<Option<Vec<_>>>()?;
    let surely = |(site, cost): &&(&Point<'_>, f64)| site.margin.spread(*cost)[1];
    let (first, least) = sites.iter().min_by(|a, b| surely(a).total_cmp(&surely(b)))?;
    let may = |(site, cost): &&(&Point<'_>, f64)| {
        site.place() == first.place() || site.margin.times(&first.margin, cost / least)[0] < 1.0
    };
    let named = |(site, _): &(&Point<'_>, f64)| match arguments.gpus.len() {
        0 | 1 => site.platform.to_owned(),
        _ => format!("{} with {}", site.platform, grouped(site.accelerators.into())),
    };
    let named: Vec<_> = sites.iter().filter(may).map(named).collect();
    Some(match &named[..] {
        [one] => one.clone(),
        several => format!("{}: their ranges overlap", several.join(" or ")),
    })
}

/// Of the front, what is printed: no layout that one before it is as good as, to within the tolerance.
pub(super) fn distinct<'a, 'b>(front: &'a [Point<'b>]) -> Vec<&'a Point<'b>> {
    // A figure, its range, and what it is a part of.
    type Axis = (f64, [f64; 2], f64);
    let axes = |point: &Point<'_>| {
        let memory = point.step.memory.tiers.map(|it| (it.used_bytes, [it.used_bytes; 2], it.capacity_bytes));
        let costs = point.costs.iter().flat_map(|costs| costs.paid().into_iter().flatten());
        let paid = std::iter::once(point.step.total_s).chain(costs);
        let paid = paid.map(|it| (it, point.margin.spread(it), it));
        paid.chain(memory).collect::<Vec<_>>()
    };
    let mut printed: Vec<(_, &Point<'_>)> = vec![];
    for point in front {
        let own = axes(point);
        let is_near = |(axes, other): &(Vec<Axis>, &Point<'_>)| {
            let is_alike = other.margin.is_of_one_accelerator(&point.margin);
            axes.iter().zip(&own).all(|((other, [_, most], _), (own, [least, _], whole))| {
                let (other, own) = if is_alike { (other, own) } else { (most, least) };
                *other <= own + whole * TOLERANCE
            })
        };
        if !printed.iter().any(is_near) {
            printed.push((own, point));
        }
    }
    printed.into_iter().map(|(_, point)| point).collect()
}

/// A head, and a row for each layout. A column is called as the option that sets it.
pub(super) fn rows<'a, 'b: 'a>(
    report: &Report<'_>,
    points: impl Iterator<Item = &'a Point<'b>>,
) -> Vec<Vec<String>> {
    let (is_run, several) = (report.arguments.tokens.is_some(), report.arguments.gpus.len() > 1);
    let paid: Vec<_> = paid_axes(report.front).map(|(_, (unit, _))| unit).collect();
    let mut head = vec!["platform", "rack"];
    head.extend(several.then_some("gpus"));
    head.extend(["range, s", "step, s"]);
    head.extend(is_run.then_some("run days"));
    head.extend(paid);
    head.extend(["memory, GB", "offloaded, GB", "tp", "cp", "ep", "dp", "pp", "interleave", "micro-batch"]);
    head.extend(["fill", "sequence-parallel", "recompute", "zero", "offload"]);
    let row = |point: &Point<'_>| {
        let Point { platform, rack, fill, layout, step, range_s, costs, margin, .. } = point;
        let mut row = vec![(*platform).to_owned(), (*rack).to_owned()];
        row.extend(several.then(|| grouped(layout.accelerators().into())));
        row.extend([span(*range_s), three(step.total_s)]);
        if let Some(costs) = costs {
            row.extend(is_run.then(|| span(margin.spread(costs.total_s / 86400.0))));
            let paid = AXES.into_iter().zip(costs.paid());
            row.extend(paid.filter_map(|((_, (_, unit)), cost)| Some(span(margin.spread(cost? / unit)))));
        }
        row.extend(step.memory.tiers.map(|tier| three(tier.used_bytes / 1e9)));
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

/// What the costs follow from.
fn sources(report: &Report<'_>) {
    let Report { arguments, sites, costs_left_out, .. } = report;
    let Some(prices) = &arguments.prices else { return };
    let what = if arguments.tokens.is_some() { "the run" } else { "a step" };
    let known = sites.iter().filter_map(|it| Some((it.platform, it.accelerators, it.rates.as_ref()?)));
    print_sources(what, prices, &known.collect::<Vec<_>>(), costs_left_out);
    electricity_line(costs_left_out, prices).iter().for_each(|line| print_wrapped(line));
}

#[cfg(test)]
mod tests {
    use polder_platform::Platform;
    use polder_sim::{Margin, MemoryUse, Order, Step, StepClass, TierUse};

    use super::*;

    #[test]
    fn the_table_leaves_out_what_another_line_is_as_good_as_to_within_the_tolerance() {
        let platform = Platform::load("nvl72").unwrap();
        let margin = Margin::of(&platform.rack["nvl72"].accelerator, StepClass::Bf16).unwrap();
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
            range_s: [total_s; 2],
            costs: None,
            note: None,
            margin: margin.clone(),
        };
        let points = [
            point(1.0, 100.0, 0.0),
            point(1.001, 98.5, 0.5),
            point(1.002, 97.0, 0.0),
            point(1.003, 95.5, 1.0),
            point(1.02, 95.0, 0.0),
            point(1.03, 20.0, 50.0),
        ];
        let times: Vec<_> = distinct(&points).iter().map(|point| point.step.total_s).collect();
        assert_eq!(times, [1.0, 1.002, 1.03]);
    }
}
