//! Figure 7 of ScalePool: three published ratios beside what follows from the platforms, and where they hold.

use polder_dev::judge::scalepool_tiers::{Beyond, JudgedClaim, TierFigure, TierReport, Variant};
use polder_platform::Bytes;
use polder_sim::accelerators;
use polder_sim::memory::{Configuration, Inside, NodeLatency, Nodes, Ways};

use crate::Failure;
use polder_plan::memory::ways_line;
use polder_plan::table::{self, access_size, size, time};

/// How near a ratio is to the published one that is drawn as met, as a part of it.
const NEAR: f64 = 0.1;

pub(super) fn run(json: bool) -> Result<(), Failure> {
    let figure = TierFigure::load()?;
    let report = figure.predict()?;
    match json {
        true => println!("{}", serde_json::to_string(&report)?),
        false => print(&figure, &report),
    }
    Ok(())
}

fn print(figure: &TierFigure, report: &TierReport) {
    println!("{}\n  {}\n", figure.title, figure.source);
    let bytes = figure.access[0].value();
    println!(
        "{} on {} with {}; accesses of {}. Nothing is fitted: all times follow from the platforms.",
        accelerators(report.accelerators),
        figure.platform,
        figure.against,
        access_size(bytes)
    );
    verdict(report).iter().for_each(|line| println!("{line}"));
    println!("\nwhat an access takes in each memory, simulated");
    table::print(&memories(report, bytes));
    println!(
        "\nhow many times faster two tiers are; simulated from the least to the most over the working sets of a claim"
    );
    table::print(&claims(report));
    let part = report.variants.iter().map(|variant| variant.clusters_over_baseline);
    if let Some(part) = part.max_by(|a, b| a.most.total_cmp(&b.most)) {
        println!(
            "  (at one working set the two beyond a rack take clusters that are {:.2} times faster than the baseline, whatever memory nodes",
            part.needed
        );
        println!(
            "  take; clusters are {:.2} times faster at most, so that no memory node meets both)",
            part.most
        );
    }
    println!("\nwhat a memory may take for a published ratio, where the working set goes on growing");
    table::print(&needs(report));
    println!(
        "\nwhere they hold: = within {:.0}% of the published ratio, + above, - below; empty: more than it holds",
        NEAR * 100.0
    );
    for (variant, claim) in judged(report) {
        // The others of loads look the same but for the end of a rack.
        let Ways { inside, bulk, .. } = variant.ways;
        let is_drawn = inside == Inside::Copy && !bulk || claim.beyond == Beyond::Accelerator;
        let is_same = |other: &JudgedClaim| other.map == claim.map && other.published == claim.published;
        let first =
            variant.claims.iter().find(|other| is_same(other)).is_some_and(|other| other.name == claim.name);
        if is_drawn && first {
            print_map(claim, variant, &figure.access);
        }
    }
    println!("\n--json has the maps of loads and of bulk beyond a rack too");
    figure.assumed.iter().for_each(|line| println!("assumed: {line}"));
    figure.unexplained.iter().for_each(|line| println!("not explained: {line}"));
    println!("no run over CXL validates this");
}

/// How a variant is told from the others.
fn told(variant: &Variant, beyond: Beyond) -> String {
    let Ways { nodes, inside, node_latency, bulk, .. } = variant.ways;
    let inside = if inside == Inside::Copy { "copies" } else { "loads" };
    let nodes = if nodes == Nodes::Near { ", near" } else { ", far" };
    let latency = if node_latency == NodeLatency::Added { ", added" } else { "" };
    let bulk = if bulk { ", bulk" } else { "" };
    match beyond {
        Beyond::Accelerator => format!("{inside}{bulk}"),
        Beyond::Rack => format!("{inside}{nodes}{latency}{bulk}"),
    }
}

/// Each memory once, with what an access takes.
fn memories(report: &TierReport, bytes: f64) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("| access | of it")];
    for variant in &report.variants {
        for Configuration { name, tiers, .. } in &variant.configurations {
            for tier in tiers {
                let source = match tier.name {
                    "pool" if variant.ways.node_latency == NodeLatency::Added => ", near, added",
                    "pool" if variant.ways.nodes == Nodes::Near => ", near",
                    "pool" => ", far",
                    "rack" if *name != "tiered" && variant.ways.inside == Inside::Copy => ", copies",
                    "rack" if *name != "tiered" => ", loads",
                    "rack" if variant.ways.bulk => ", bulk",
                    _ => "",
                };
                let access = &tier.access;
                let parts = [
                    ("software", access.software_s),
                    ("controllers", access.controllers_s),
                    ("switches", access.switches_s),
                    ("wires", access.wires_s),
                    ("memory", access.memory_s),
                ];
                let parts = parts.iter().filter(|(_, seconds)| *seconds > 0.0);
                let parts: Vec<_> =
                    parts.map(|(name, seconds)| format!("{name} {}", time(*seconds))).collect();
                let row = vec![
                    format!("  {name}, {}{source}", tier.name),
                    time(access.seconds(bytes)),
                    parts.join(", "),
                ];
                if !rows.contains(&row) {
                    rows.push(row);
                }
            }
        }
    }
    rows[1..].sort();
    rows
}

/// Each claim of each variant that it depends on.
fn judged(report: &TierReport) -> Vec<(&Variant, &JudgedClaim)> {
    let mut rows: Vec<(&Variant, &JudgedClaim)> = vec![];
    for variant in &report.variants {
        for claim in &variant.claims {
            // Where nodes are says nothing of sets that fit into a rack.
            let Ways { nodes, node_latency, .. } = variant.ways;
            let is_first = nodes == Nodes::Near && node_latency == NodeLatency::Given;
            if is_first || claim.beyond == Beyond::Rack {
                rows.push((variant, claim));
            }
        }
    }
    let place = |name: &str| report.variants[0].claims.iter().position(|it| it.name == name);
    rows.sort_by_key(|(_, claim)| place(&claim.name));
    rows
}

fn claims(report: &TierReport) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("| published | simulated | met at a working set of")];
    for (variant, claim) in judged(report) {
        let [least, most] = claim.simulated;
        let verdict = match claim.met_at_bytes {
            Some(set) => size(set),
            None if most < claim.published => "none: less".into(),
            None => "none: more".into(),
        };
        rows.push(vec![
            format!("  {}: {}", claim.name, told(variant, claim.beyond)),
            format!("{:.1}", claim.published),
            format!("{least:.2} to {most:.2}"),
            verdict,
        ]);
    }
    rows
}

fn needs(report: &TierReport) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("| the other's | may take | takes |")];
    for (variant, claim) in judged(report) {
        let marginal = claim.marginal_s;
        rows.push(vec![
            format!("  {}: {}", claim.name, told(variant, claim.beyond)),
            time(marginal.other),
            time(marginal.needed),
            time(marginal.simulated),
            if marginal.simulated <= marginal.needed { "holds".into() } else { "does not hold".into() },
        ]);
    }
    rows
}

fn print_map(claim: &JudgedClaim, variant: &Variant, access: &[Bytes]) {
    let both = variant
        .claims
        .iter()
        .filter(|other| other.map == claim.map && other.published == claim.published)
        .count();
    let name = if both > 1 { "beyond an accelerator, over both" } else { &claim.name };
    println!("\n{name}, published {:.1}: {}", claim.published, told(variant, claim.beyond));
    let mut head = vec!["access \\ set".to_owned()];
    head.extend(claim.sets_bytes.iter().map(|set| size(*set)));
    let mut rows = vec![head];
    for (bytes, row) in access.iter().zip(&claim.map) {
        let mut cells = vec![access_size(bytes.value())];
        cells.extend(
            row.iter().map(|times| times.map_or_else(String::new, |ratio| marked(ratio, claim.published))),
        );
        rows.push(cells);
    }
    table::print(&rows);
}

fn marked(times: f64, published: f64) -> String {
    let mark = match times / published - 1.0 {
        off if off > NEAR => '+',
        off if off < -NEAR => '-',
        _ => '=',
    };
    format!("{times:.2}{mark}")
}

/// Which of the claims are met in each variant.
fn verdict(report: &TierReport) -> Vec<String> {
    let names = |claims: &[&JudgedClaim]| {
        let names: Vec<_> = claims.iter().map(|claim| format!("{:.1}", claim.published)).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    };
    let line = |variant: &Variant| {
        let (met, not): (Vec<_>, Vec<_>) = variant.claims.iter().partition(|claim| claim.is_met());
        format!("  met: {}; not met: {}; {}", names(&met), names(&not), ways_line(variant.ways))
    };
    let head = "published ratios that are met at some working set, 1.4 over the baseline and over clusters:"
        .to_owned();
    std::iter::once(head).chain(report.variants.iter().map(line)).collect()
}
