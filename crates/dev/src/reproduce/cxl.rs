//! The figures of Liaw and Chen: what their text gives beside what follows from the platforms.

use std::collections::BTreeSet;

use polder_dev::judge::cxl::{CXL_POINTS, CxlFigure, CxlPoint, CxlRange, CxlReport, CxlRow, cxl_throughput};
use polder_dev::judge::cxl_measured::{AdamFigure, AdamStep, CopyFigure, GpuCopy, TimeBeside, TimeUse};
use polder_dev::judge::cxl_text::{ClaimBeside, CxlText};
use polder_sim::grouped;
use serde::Serialize;
use serde_json::json;

use crate::Failure;
use polder_plan::table;

/// Sentences of the text.
pub(super) fn text(name: &str, json: bool) -> Result<(), Failure> {
    let figure = CxlText::load(name)?;
    let report = figure.beside()?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    let (echoes, predicted): (Vec<_>, Vec<_>) = report.claims.iter().partition(|it| it.echo);
    for (claims, head, last) in [(predicted, "simulated", "off"), (echoes, "echo of an input", "")] {
        if claims.is_empty() {
            continue;
        }
        let head = ["", "published", head, last, ""];
        let mut rows = vec![head.map(String::from).to_vec()];
        rows.extend(claims.into_iter().map(claim));
        table::print(&rows);
        println!();
    }
    figure.notes.iter().for_each(|line| println!("note: {line}"));
    println!("simulated from the platform {}; nothing is fitted to this figure", figure.platform);
    Ok(())
}

fn claim(beside: &ClaimBeside) -> Vec<String> {
    let holds = |value: f64| if value == 1.0 { "yes" } else { "no" }.to_owned();
    let number = |value: f64| match value.abs() >= 100.0 {
        true => format!("{value:.0}"),
        false => format!("{value:.2}"),
    };
    let is_sentence = beside.unit == "holds";
    let shown = |value: f64| if is_sentence { holds(value) } else { number(value) };
    let published = match beside.published {
        Some([least, most]) if least == most => shown(least),
        Some([least, most]) => format!("{} to {}", shown(least), shown(most)),
        None => "none".into(),
    };
    let off = match beside.off().filter(|_| !beside.echo) {
        Some(0.0) if beside.published.is_some_and(|[least, most]| least < most) => "inside".into(),
        Some(_) if is_sentence => String::new(),
        Some(off) if off.is_finite() => format!("{:+.0}%", off * 100.0),
        _ => String::new(),
    };
    let unit = if is_sentence { String::new() } else { beside.unit.clone() };
    vec![format!("  {}", beside.says), published, shown(beside.simulated), off, unit]
}

/// Figure 9 or 10, both printed.
pub(super) fn throughput(name: &str, json: bool) -> Result<(), Failure> {
    let report = cxl_throughput()?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    let [nine, ten] = [CxlFigure::load("cxl-fig9")?, CxlFigure::load("cxl-fig10")?];
    let asked = if name == "cxl-fig9" { &nine } else { &ten };
    println!("{}\n  {}\n", asked.title, asked.source);
    println!(
        "percent of the throughput with everything in {} of DRAM; lowest and highest over the assumed grid",
        asked.baseline
    );
    table::print(&ranges(&report));
    println!("  (points: contexts and batches that fit; off: lowest, highest, in points)");
    print_order(&report);
    print_rms(&report);
    let constants = report.constants;
    println!(
        "fitted to Figure 9 alone: GPUs reach {:.2} GB/s of each other; the CPUs take at least {:.0} ps an element.",
        constants.peers_bytes_per_s / 1e9,
        constants.element_s * 1e12,
    );
    println!(
        "  All other rates are measured, see `polder plan show {}`. Copies run beside computation as ZeRO-3 prefetches",
        asked.row[0].platform
    );
    nine.assumed.iter().chain(&ten.assumed).for_each(|line| println!("assumed: {line}"));
    Ok(())
}

/// Which policy is ahead at each point, and by how many points.
fn print_order(report: &CxlReport) {
    println!("\nthe policy that is ahead at each point of the grid, by how many points, simulated");
    let batches: BTreeSet<_> = report.points.iter().map(|point| point.batch).collect();
    let mut lines: Vec<_> =
        report.points.iter().map(|point| (&point.panel, &point.model, point.context)).collect();
    lines.dedup();
    let mut rows = vec![vec!["context and batch".to_owned(), String::new()]];
    rows[0].extend(batches.iter().map(u32::to_string));
    for (panel, model, context) in lines {
        let at = |batch: &u32| {
            let is_it = |point: &&CxlPoint| {
                (&point.panel, &point.model, point.context, point.batch) == (panel, model, context, *batch)
            };
            let policies = &report.points.iter().find(is_it)?.policies;
            let [(first, reached), (_, next)] = &policies[..] else { return None };
            Some(format!("{first} {:.1}", reached - next))
        };
        let mut row = vec![format!("  {panel} {model}"), grouped(context.into())];
        row.extend(batches.iter().map(|batch| at(batch).unwrap_or_default()));
        rows.push(row);
    }
    table::print(&rows);
    println!("  (empty: does not fit under both) the paper's allocation is ahead at");
    for figure in ["9", "10"] {
        let of_figure =
            |point: &&CxlPoint| point.panel.starts_with(&format!("{figure}(")) && point.policies.len() > 1;
        let first = report.points.iter().filter(of_figure).map(|point| point.policies[0].0.as_str());
        let all = first.clone().count();
        let ahead = first.filter(|policy| *policy == "paper").count();
        println!("  {ahead} of {all} points of Figure {figure}; the text has it ahead in each panel");
    }
    println!();
}

fn print_rms(report: &CxlReport) {
    let verdict = |rms: f64| if rms <= CXL_POINTS { "within" } else { "short of" };
    for (ranges, rms, what) in [
        (&report.fitted, report.fitted_rms, "Figure 9, which are fitted"),
        (&report.judged, report.judged_rms, "Figure 10, which are judged"),
    ] {
        println!(
            "root mean square error: {rms:.2} points of the {} end-points of {what}: {} {CXL_POINTS} points",
            2 * ranges.len(),
            verdict(rms)
        );
    }
}

fn ranges(report: &CxlReport) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("|  | GPUs | policy | published | simulated | off | points")];
    let row = |range: &CxlRange, counts: &str| {
        let CxlRow { panel, models, gpus, policy, published, .. } = &range.row;
        let [low, high] = [0, 1].map(|end| range.simulated[end] - published[end]);
        vec![
            format!("  {panel} {}", models.join(", ")),
            counts.into(),
            gpus.to_string(),
            policy.clone(),
            format!("{:.0} to {:.0}", published[0], published[1]),
            format!("{:.1} to {:.1}", range.simulated[0], range.simulated[1]),
            format!("{low:+.1}, {high:+.1}"),
            range.points.to_string(),
        ]
    };
    rows.extend(report.fitted.iter().map(|range| row(range, "fitted")));
    rows.extend(report.judged.iter().map(|range| row(range, "judged")));
    rows
}

/// Steps that were measured.
pub(super) fn adam(json: bool) -> Result<(), Failure> {
    let figure = AdamFigure::load()?;
    let (AdamFigure { title, source, notes, .. }, steps) = (&figure, figure.beside()?);
    let words = |it: &AdamStep| vec![grouped(it.elements as u64), format!("{:.0}%", it.on_card * 100.0)];
    Measured { head: &["elements", "on the card"], what: "steps", title, source, notes, times: &steps }
        .print(words, json)
}

/// Copies that were measured.
pub(super) fn copies(json: bool) -> Result<(), Failure> {
    let figure = CopyFigure::load()?;
    let (CopyFigure { title, source, notes, .. }, copies) = (&figure, figure.beside()?);
    let words = |it: &GpuCopy| {
        let way = if it.is_write { "write" } else { "read" };
        vec![it.gpus.to_string(), it.nodes.clone(), way.into()]
    };
    Measured { head: &["GPUs", "buffers in", ""], what: "copies", title, source, notes, times: &copies }
        .print(words, json)
}

/// Times of a figure beside ours.
struct Measured<'a, T> {
    title: &'a str,
    source: &'a str,
    notes: &'a [String],
    /// Names of the columns that say what was timed, and what all of it is.
    head: &'a [&'a str],
    what: &'a str,
    times: &'a [TimeBeside<T>],
}

impl<T: Serialize> Measured<'_, T> {
    fn print(&self, words: impl Fn(&T) -> Vec<String>, json: bool) -> Result<(), Failure> {
        let judged = self.times.iter().filter(|it| it.counts == TimeUse::Judged);
        let errors: Vec<_> = judged.map(|it| it.error().abs()).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let worst = errors.iter().copied().fold(0.0, f64::max);
        if json {
            let report = json!({ "points": self.times, "judged_mean": mean, "judged_worst": worst });
            println!("{}", serde_json::to_string(&report)?);
            return Ok(());
        }
        println!("{}\n  {}\n", self.title, self.source);
        for (counts, name) in [
            (TimeUse::Judged, "judged"),
            (TimeUse::Reported, "reported alone"),
            (TimeUse::Echo, "echo of an input"),
        ] {
            let head = self.head.iter().copied().chain(["measured ms", "simulated ms", "off", name]);
            let mut rows = vec![head.map(String::from).collect::<Vec<_>>()];
            rows.extend(self.times.iter().filter(|it| it.counts == counts).map(|it| {
                let times = [it.measured_ms, it.simulated_ms].map(|ms| format!("{ms:.2}"));
                let off = format!("{:+.1}%", it.error() * 100.0);
                words(&it.timed).into_iter().chain(times).chain([off, String::new()]).collect()
            }));
            if rows.len() > 1 {
                table::print(&rows);
                println!();
            }
        }
        let (count, what) = (errors.len(), self.what);
        let [mean, worst] = [mean, worst].map(|it| it * 100.0);
        println!("{count} judged {what}: {mean:.1}% off on average, {worst:.1}% at worst");
        self.notes.iter().for_each(|line| println!("note: {line}"));
        Ok(())
    }
}
