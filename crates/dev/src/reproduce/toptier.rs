//! Limits of cgroups that know tiers, beside the agent.

use polder_dev::judge::toptier::{SPLIT_POINTS, ToptierFigure, ToptierReport, ToptierRow, ToptierTable};
use polder_platform::Platform;
use serde_json::json;

use super::server::{self, Operated};
use super::table;
use crate::Failure;

/// Both tables of the source.
pub(super) fn run(json: bool) -> Result<(), Failure> {
    let figure = ToptierFigure::load()?;
    let reports =
        figure.published.iter().map(|table| follow(&figure, table)).collect::<Result<Vec<_>, _>>()?;
    if json {
        println!("{}", json!({ "bound": figure.bound(), "tables": reports }));
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    for report in &reports {
        print(&figure, report);
    }
    let all = || reports.iter().flat_map(|report| report.rows.iter());
    println!(
        "of {} rows {} have both parts within {SPLIT_POINTS} points, and {} change by half as much as published at least and twice at most; nothing is fitted",
        all().count(),
        all().filter(|row| row.split_holds()).count(),
        all().filter(|row| row.change_holds()).count(),
    );
    figure.assumed.iter().for_each(|line| println!("assumed: {line}"));
    Ok(())
}

fn follow(figure: &ToptierFigure, published: &ToptierTable) -> Result<ToptierReport, Failure> {
    let platform = Platform::load(&figure.platform)?;
    let slow =
        platform.tier("cxl").ok_or_else(|| Failure(format!("{} has no tier \"cxl\"", figure.platform)))?;
    let tree = server::tree(figure.tiers_gb(), slow, figure.moves_gb);
    let names: Vec<String> = (0..=figure.hogs).map(|index| format!("s{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut agent = Operated::start(&tree, &names, [0.0, figure.bound()], figure.pages_a_gb)?;
    let mut failure = None;
    let report = figure.beside(published, &platform, &mut |second, pages| {
        if let Err(error) = agent.second(second, pages) {
            failure.get_or_insert(error);
        }
    })?;
    failure.map_or(Ok(report), Err)
}

fn print(figure: &ToptierFigure, report: &ToptierReport) {
    let per_cent = |part: f64| format!("{:.1}%", 100.0 * part);
    let short = |holds: bool| if holds { "holds" } else { "short" }.to_owned();
    let mut rows = vec![table::head("| published | simulated | off |")];
    for row in &report.rows {
        let ToptierRow { service, published_local, local, published_mops, mops } = row;
        for (side, words) in ["without", "with bounds"].into_iter().enumerate() {
            rows.push(vec![
                format!("{service}, part on fast memory, {words}"),
                per_cent(published_local[side]),
                per_cent(local[side]),
                format!("{:+.1} points", row.off_points()[side]),
                short(row.off_points()[side].abs() <= SPLIT_POINTS),
            ]);
        }
        for (side, words) in ["without", "with bounds"].into_iter().enumerate() {
            rows.push(vec![
                format!("{service}, Mops/s, {words}"),
                format!("{:.1}", published_mops[side]),
                format!("{:.1}", mops[side]),
                format!("{:+.1}%", 100.0 * (mops[side] / published_mops[side] - 1.0)),
                if *service == "hog" && side == 0 { "taken as the rate on fast memory" } else { "" }
                    .to_owned(),
            ]);
        }
        let [published, simulated] = row.changes().map(|change| format!("{:+.1}%", 100.0 * change));
        rows.push(vec![
            format!("{service}, change of its rate"),
            published,
            simulated,
            String::new(),
            short(row.change_holds()),
        ]);
    }
    println!("{} reads", report.reads);
    table::print(&rows);
    let [[up, down], [bound_up, bound_down]] = report.moved_gb;
    println!(
        "  promoted and demoted in the measured minute: {up:.1} and {down:.1} GB without, {bound_up:.1} and {bound_down:.1} GB with bounds of {}\n",
        per_cent(figure.bound())
    );
}
