//! Tables of the Vistara paper, made again.

use polder_dev::judge::vistara::{
    KNEE_BANDWIDTH, KNEE_LATENCY, KneeBeside, KneeFigure, KneePoint, KneeReport, VistaraError, errors,
};
use polder_dev::judge::vistara_fair::{
    DROP_POINTS, FAIR_POINTS, FairFigure, FairReport, JudgedRow, Keeper, P99_PART,
};
use polder_dev::judge::vistara_ratio::{RatioBeside, RatioFigure};
use polder_dev::judge::vistara_services::{self, GainBeside, RATIO, Simulated, TelemetryBeside};
use polder_dev::judge::vistara_tier::{TRAFFIC_FACTOR, TrafficBeside, traffic};
use polder_platform::Platform;
use polder_sim::grouped;
use polder_sim::pages::vistara_services::{GainOf, ServicesFigure};
use serde_json::json;

use super::server::{self, ByDefault, Operated};
use crate::Failure;
use polder_plan::table;

/// Table X.
pub(super) fn knee(json: bool) -> Result<(), Failure> {
    let figure = KneeFigure::load()?;
    let report = figure.beside()?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    let mut rows = vec![table::head(
        "hot |  | latency ns | simulated | off | local GB/s | simulated | off | CXL GB/s | simulated | off | by capacity | off",
    )];
    rows.extend(report.rows.iter().map(knee_row));
    table::print(&rows);
    println!(
        "  (by capacity: the baseline, hot pages that spill as far as {} GB are too few for them, and no migration)",
        figure.fast_gb
    );
    print_knee_verdict(&figure, &report);
    figure.assumed.iter().for_each(|line| println!("assumed: {line}"));
    Ok(())
}

fn knee_row(beside: &KneeBeside) -> Vec<String> {
    let KneeBeside { row, simulated, by_capacity } = beside;
    let off = |error: f64| format!("{:+.1}%", error * 100.0);
    let (ours, baseline) = (errors(row, simulated), errors(row, by_capacity));
    let gb = |bytes: f64| format!("{:.1}", bytes / 1e9);
    vec![
        format!("{:.0}%", row.hot * 100.0),
        if row.fitted { "fitted" } else { "judged" }.into(),
        format!("{:.0}", row.latency.value() * 1e9),
        format!("{:.0}", simulated.latency_s * 1e9),
        off(ours[0]),
        gb(row.local.value()),
        gb(simulated.local_bytes_per_s),
        off(ours[1]),
        gb(row.cxl.value()),
        gb(simulated.cxl_bytes_per_s),
        off(ours[2]),
        gb(by_capacity.cxl_bytes_per_s),
        off(baseline[2]),
    ]
}

fn print_knee_verdict(figure: &KneeFigure, report: &KneeReport) {
    let worst = |at: usize, of: fn(&KneeBeside) -> &KneePoint| {
        let judged = report.rows.iter().filter(|knee| !knee.row.fitted);
        judged.map(|knee| errors(&knee.row, of(knee))[at].abs()).fold(0.0, f64::max)
    };
    for (what, at, limit) in [("latency", 0, KNEE_LATENCY), ("CXL bandwidth", 2, KNEE_BANDWIDTH)] {
        let [ours, baseline] = [worst(at, |knee| &knee.simulated), worst(at, |knee| &knee.by_capacity)];
        let verdict = if ours <= limit { "within" } else { "short of" };
        println!(
            "{what} of the judged rows: {:.1}% off at worst, {verdict} {:.0}%; by capacity {:.1}%",
            ours * 100.0,
            limit * 100.0,
            baseline * 100.0
        );
    }
    println!(
        "fitted to the first row: programs keep {:.1} kB under way, and each GB that is not hot draws {:.4}% of what is drawn. The",
        report.under_way_bytes / 1e3,
        report.cold_part_a_gb * 100.0
    );
    println!(
        "  rest follows from hot parts, from {} and {} GB, and from the platform {}; nothing is fitted to the rows that are judged",
        figure.fast_gb, figure.slow_gb, figure.platform
    );
}

/// Table VII, and the contradictions of the paper.
pub(super) fn gains(json: bool) -> Result<(), Failure> {
    let figure = ServicesFigure::load()?;
    let gains = vistara_services::gains(&figure);
    if json {
        println!("{}", json!({ "gains": gains, "contradictions": figure.contradictions }));
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    let mut rows = vec![table::head("| gain | local GB | CXL GB | published | by capacity | off, points |")];
    rows.extend(gains.iter().map(gain_row));
    table::print(&rows);
    println!(
        "  (by capacity: what local and CXL memory hold over what local memory holds; at most: something else binds, and capacity is a"
    );
    println!("  bound. Off: from the nearer end of what was published, to the nearer end of ours)");
    println!("nothing is fitted. The paper says two things of:");
    figure.contradictions.iter().for_each(|line| println!("  {line}"));
    Ok(())
}

fn range([least, most]: [f64; 2], unit: &str, digits: usize) -> String {
    match least == most {
        true => format!("{least:.digits$}{unit}"),
        false => format!("{least:.digits$} to {most:.digits$}{unit}"),
    }
}

fn gain_row(it: &GainBeside) -> Vec<String> {
    let GainBeside { gain, simulated } = it;
    let at_most = if gain.of == GainOf::Bound { "at most " } else { "" };
    let off = it.off_points();
    vec![
        gain.service.clone(),
        gain.what.clone(),
        format!("{}", gain.fast_gb),
        range(gain.slow_gb, "", 0),
        range(gain.published, "%", 1),
        format!("{at_most}{}", range(*simulated, "%", 1)),
        if off == 0.0 { "inside".into() } else { format!("{off:+.1}") },
        if off.abs() > 5.0 { "short" } else { "" }.into(),
    ]
}

/// Table VIII.
pub(super) fn telemetry(json: bool) -> Result<(), Failure> {
    let figure = ServicesFigure::load()?;
    let rows = vistara_services::telemetry(&figure);
    if json {
        println!("{}", json!({ "rows": rows }));
        return Ok(());
    }
    println!("CXL bandwidth, hint faults and promotions of services\n  Vistara, Tables I, VII and VIII\n");
    let mut lines = vec![table::head(
        "| CXL GB/s | predicted | faults/min | predicted | promotions/min | predicted | no more than faults | local over CXL | 10 to 100",
    )];
    lines.extend(rows.iter().map(telemetry_row));
    table::print(&lines);
    println!(
        "predicted from idle times (Table I, Cache) and capacities (Table VII) alone; the other rows are checked for consistency only"
    );
    rows.iter().for_each(print_cache);
    println!(
        "missing in the paper: how long CacheB's objects stay, and the size of a page and how many processes are scanned, by which hint faults go"
    );
    Ok(())
}

/// A cache of Table VIII by Table I, and by how long its objects stay.
fn print_cache(row: &TelemetryBeside) {
    let Some(simulated) = row.simulated else { return };
    println!(
        "{}: CXL bandwidth short by Table I: {:.2} GB/s published, {:.3} predicted at most. What was published reads each byte of CXL memory every {:.0} s; by Table I the coldest {:.0} GB lie idle for {} s or more",
        row.row.service,
        row.row.cxl.value() / 1e9,
        simulated.cxl_bytes_per_s / 1e9,
        simulated.published_turn_s,
        row.row.slow_gb,
        grouped(simulated.least_idle_s as u64)
    );
    if let (Some(stays_s), Some(hits), Some([least, most])) = (row.row.stays_s, row.row.hits, row.by_turnover)
    {
        println!(
            "  by what stays: {:.1} to {:.1} GB/s; {}. Objects stay for {:.0} to {:.0} s, {:.0}% to {:.0}% of requests find theirs, and all are read alike",
            least / 1e9,
            most / 1e9,
            if row.is_within_turnover() == Some(true) { "what was published is inside" } else { "short" },
            stays_s[0],
            stays_s[1],
            hits[0] * 100.0,
            hits[1] * 100.0
        );
        println!(
            "  (section V-B): CXL memory draws what it holds over time of stay and part of misses. Nothing is fitted. So this cache is not that of"
        );
        println!(
            "  Table I, half of which lies idle for {} s or more: each page is written anew before",
            grouped(simulated.half_idle_s as u64)
        );
    }
    println!(
        "  hint faults short: {:.0} a minute were published. The slowest scan of Linux marks {} pages a minute, and {} of them are accessed before the next turn",
        row.row.faults_a_minute,
        grouped((256.0 * 1048576.0 / 4096.0) as u64),
        grouped(simulated.faults_a_minute as u64)
    );
}

fn telemetry_row(beside: &TelemetryBeside) -> Vec<String> {
    let predicted = |of: fn(&Simulated) -> String| beside.simulated.as_ref().map_or_else(String::new, of);
    let yes = |holds: bool| if holds { "yes" } else { "no" }.to_owned();
    vec![
        beside.row.service.clone(),
        format!("{:.3}", beside.row.cxl.value() / 1e9),
        predicted(|rates| format!("{:.3}", rates.cxl_bytes_per_s / 1e9)),
        grouped(beside.row.faults_a_minute as u64),
        predicted(|rates| grouped(rates.faults_a_minute as u64)),
        grouped(beside.row.promotions_a_minute as u64),
        predicted(|rates| grouped(rates.promotions_a_minute as u64)),
        yes(beside.promotions_fault),
        format!("{:.1}", beside.ratio),
        yes((RATIO[0]..=RATIO[1]).contains(&beside.ratio)),
    ]
}

/// Table IX.
pub(super) fn fair(json: bool) -> Result<(), Failure> {
    let figure = FairFigure::load()?;
    let operated = FairRun::follow(&figure, figure.tiers_gb(), FairFigure::beside)?;
    let [fast, slow] = figure.absolute.tiers_gb;
    let absolute = FairRun::follow(&figure, [fast + figure.free_gb, slow], FairFigure::absolute)?.report;
    let judged = figure.judge(&absolute);
    let report = operated.report;
    let servers = MOVES_GB.map(server::by_default).into_iter().collect::<Result<Vec<_>, _>>()?;
    if json {
        println!(
            "{}",
            json!({ "bound": report.bound, "baseline": report.baseline, "fair": report.fair, "seconds": operated.within_s, "by_default": servers, "absolute": absolute, "judged": judged, "suspects": figure.suspects() })
        );
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    let mut rows = vec![table::head("part that is local | published | simulated | off, points |")];
    let sides = [
        ("without bounds", figure.published_baseline, report.baseline.local, ["fitted", "follows from A"]),
        ("Fair Share", figure.published_fair, report.fair.local, ["by its bound"; 2]),
    ];
    for (side, published, simulated, counts) in sides {
        for (at, name) in ["A", "B"].into_iter().enumerate() {
            let off = (simulated[at] - published[at]) * 100.0;
            let short = if off.abs() > FAIR_POINTS { ", short" } else { "" };
            let per_cent = |part: f64| format!("{:.1}%", part * 100.0);
            rows.push(vec![
                format!("{name}, {side}"),
                per_cent(published[at]),
                per_cent(simulated[at]),
                format!("{off:+.1}"),
                format!("{}{short}", counts[at]),
            ]);
        }
    }
    table::print(&rows);
    println!(
        "  (both bounds are {:.1}%, the 3:1 of the server, and Fair Share keeps a service at its bound)\n",
        report.bound * 100.0
    );
    print_signs(&report);
    print_requests(&figure, &report);
    print_absolute(&figure, &absolute, &judged);
    print_suspects(&figure);
    print_default(&figure, &operated, &servers);
    figure.mechanism.iter().for_each(|line| println!("{line}"));
    let [without, fair] = figure.unused_gb();
    println!(
        "short: OOM. A shortage of memory has the wrong sign: without bounds the paper's table leaves {without:.0} GB unused, with Fair Share {fair:.0} GB."
    );
    println!(
        "  Missing in the paper: the limit of a container, what a waiting request holds, how large and how long the spike is, and what killed A"
    );
    figure.assumed.iter().for_each(|line| println!("assumed: {line}"));
    Ok(())
}

/// GB a second that a kernel may move when it is asked to.
const MOVES_GB: [f64; 4] = [1.0, 2.0, 4.0, 8.0];

/// Table IX with the agent itself.
struct FairRun {
    report: FairReport,
    /// Seconds after bounds are set until A and B are within a point of them.
    within_s: [Option<u32>; 2],
    /// GB that a round moved down at most.
    most_gb: f64,
}

impl FairRun {
    /// Follows both caches on tiers of so many GB.
    fn follow(
        figure: &FairFigure,
        tiers_gb: [f64; 2],
        beside: impl FnOnce(&FairFigure, Keeper<'_>) -> Result<FairReport, VistaraError>,
    ) -> Result<Self, Failure> {
        let platform = Platform::load(&figure.platform)?;
        let slow = platform
            .tier("cxl")
            .ok_or_else(|| Failure(format!("{} has no tier \"cxl\"", figure.platform)))?;
        let tree = server::tree(tiers_gb, slow, figure.moves_gb);
        let bound = figure.bound();
        let mut agent = Operated::start(&tree, &["a", "b"], [bound; 2], figure.pages_a_gb)?;
        let (mut within_s, mut most, mut failure) = ([None; 2], 0, None);
        let report = beside(figure, &mut |second, pages| {
            if let Err(error) = agent.second(second, pages) {
                failure.get_or_insert(error);
            }
            most = most.max(agent.demoted);
            for (index, within_s) in within_s.iter_mut().enumerate() {
                let seen = pages.seen(index);
                let local = f64::from(seen.fast) / f64::from(seen.fast + seen.slow);
                let is_within = (local - bound).abs() <= 0.01;
                *within_s = within_s.or(is_within.then_some(second));
            }
        })?;
        failure.map_or(Ok(Self { report, within_s, most_gb: most as f64 / 1e9 }), Err)
    }
}

/// How long the agent's default takes: in Table IX, and on a server whose services are all on local memory.
fn print_default(figure: &FairFigure, run: &FairRun, servers: &[ByDefault]) {
    let seconds = |time: Option<u32>| time.map_or("never".to_owned(), |seconds| format!("{seconds} s"));
    let [a, b] = run.within_s.map(seconds);
    println!(
        "bounds are set, and after {a} (A) and {b} (B) they are kept within a point; a round moves {:.1} GB at most, where the kernel moves {} GB a\n  second. Simulated by the agent's code and its default step. The paper says that A's QPS recovers within seconds\n",
        run.most_gb, figure.moves_gb
    );
    let [fast, slow] = server::TIERS_GB;
    let services = server::SERVICES.map(|(name, gb, _)| format!("{name} of {gb} GB"));
    println!(
        "default of the agent, simulated: {} on {fast} + {slow} GB, at first on local memory alone; local_high {}",
        services.join(" and "),
        server::BOUNDS[1]
    );
    let mut rows =
        vec![table::head("kernel moves, GB/s | all within bounds | GB down | most in a round, GB")];
    rows.extend(servers.iter().map(|server| {
        vec![
            format!("{}", server.moves_gb),
            seconds(server.within_s),
            format!("{:.1}", server.demoted_gb),
            format!("{:.1}", server.most_gb),
        ]
    }));
    table::print(&rows);
    println!("  (the paper gives no such row)\n");
}

fn print_signs(report: &FairReport) {
    let FairReport { baseline, fair, .. } = report;
    let yes = |holds: bool| if holds { "holds" } else { "short" }.to_owned();
    let per_cent = |part: f64| format!("{:.1}%", part * 100.0);
    let points = |[before, after]: [f64; 2]| format!("{:+.3} points", (after - before) * 100.0);
    let head = ["sign", "without bounds", "Fair Share", "published", ""];
    let rows = [
        [
            "local memory in use, GB".to_owned(),
            format!("{:.0}", baseline.local_gb),
            format!("{:.0}", fair.local_gb),
            "722, 673".into(),
            yes(fair.local_gb < baseline.local_gb),
        ],
        [
            "least local part of A in B's spike".into(),
            per_cent(baseline.least_local),
            per_cent(fair.least_local),
            "lower without (QPS dips 65%, 12%)".into(),
            yes(report.dip_is_smaller()),
        ],
        [
            "A's accesses to CXL memory in the spike, over before".into(),
            points(baseline.slow_accesses),
            points(fair.slow_accesses),
            "more without".into(),
            yes(report.spike_costs_less()),
        ],
        [
            "pages without room in local memory in the spike, GB".into(),
            format!("{:.1}", baseline.no_room_gb),
            format!("{:.1}", fair.no_room_gb),
            "P99 is longer without".into(),
            yes(report.has_more_room()),
        ],
        [
            "memory that was not there (OOM)".into(),
            grouped(baseline.failures),
            grouped(fair.failures),
            "A is killed without".into(),
            yes(baseline.failures > 0 && fair.failures == 0),
        ],
    ];
    let mut lines = vec![head.map(String::from).to_vec()];
    lines.extend(rows.into_iter().map(|row| row.to_vec()));
    table::print(&lines);
}

/// What requests wait, beside what was published of them.
fn print_requests(figure: &FairFigure, report: &FairReport) {
    let judged = |holds: bool| if holds { "holds" } else { "short" }.to_owned();
    let per_cent = |part: f64| format!("{:.1}%", 100.0 * part);
    let mut rows = vec![table::head("requests | published | simulated | off |")];
    for (at, (simulated, name)) in figure.p99_us(report).into_iter().zip(["A", "B"]).enumerate() {
        let published = figure.published_p99_us[0][at];
        let off = simulated / published - 1.0;
        rows.push(vec![
            format!("{name}, P99 without bounds, us"),
            format!("{published:.0}"),
            format!("{simulated:.0}"),
            format!("{:+.0}%", 100.0 * off),
            judged(off.abs() <= P99_PART),
        ]);
    }
    let outcomes = [("without bounds", &report.baseline), ("Fair Share", &report.fair)];
    for ((words, outcome), published) in outcomes.into_iter().zip(figure.published_drop) {
        let off = 100.0 * (figure.drop(outcome) - published);
        rows.push(vec![
            format!("A's drop in the spike, {words}"),
            per_cent(published),
            per_cent(figure.drop(outcome)),
            format!("{off:+.0} points"),
            judged(off.abs() <= DROP_POINTS),
        ]);
    }
    table::print(&rows);
    println!(
        "  (a request that finds no room waits {:.0} us. Without bounds {} of A's and {} of B's do, with Fair Share {} and {}; in the spike {} and {} of A's)\n",
        figure.wait_us(),
        per_cent(report.baseline.waits[0]),
        per_cent(report.baseline.waits[1]),
        per_cent(report.fair.waits[0]),
        per_cent(report.fair.waits[1]),
        per_cent(report.baseline.spike_waits),
        per_cent(report.fair.spike_waits),
    );
}

/// Each figure of the table beside what follows from nothing of it.
fn print_absolute(figure: &FairFigure, report: &FairReport, judged: &[JudgedRow]) {
    println!(
        "judged: each figure of the table, from nothing of it. Both caches have {:.0} GB at most, and the constants are those of sections V-A, V-B,\n  V-G and V-H and of Tables VI and VII",
        figure.absolute.limit_gb()
    );
    let mut rows = vec![table::head("| published | simulated | off |")];
    for row in judged {
        let shown = |value: f64| match row.unit {
            "killed" => if value > 0.0 { "yes" } else { "no" }.to_owned(),
            unit => format!("{value:.0} {unit}"),
        };
        let off = match row.unit {
            "GB" | "us" => format!("{:+.0}%", 100.0 * row.off()),
            "killed" => String::new(),
            _ => format!("{:+.0} points", row.off()),
        };
        let verdict = if row.holds() { "within" } else { "off" }.to_owned();
        rows.push(vec![row.what.clone(), shown(row.published), shown(row.simulated), off, verdict]);
    }
    table::print(&rows);
    let within = judged.iter().filter(|row| row.holds()).count();
    let psi = |waits: f64| format!("{:.1}%", 100.0 * figure.pressure(waits));
    let FairReport { baseline, fair, .. } = report;
    println!(
        "  (of {} rows {within} are within 10% of GB, 3 points of a part, 25% of P99 and 10 points of a drop)",
        judged.len()
    );
    println!(
        "  some request waits for room (PSI), without bounds: A {} and B {} of the time, A in the spike {}; with Fair Share {}, {} and {}",
        psi(baseline.waits[0]),
        psi(baseline.waits[1]),
        psi(baseline.spike_waits),
        psi(fair.waits[0]),
        psi(fair.waits[1]),
        psi(fair.spike_waits),
    );
    figure.absolute.assumed.iter().for_each(|line| println!("  assumed: {line}"));
    println!();
}

/// What could make requests wait, beside what the table needs.
fn print_suspects(figure: &FairFigure) {
    println!("what could make requests wait, at most, by what the sources say of it; nothing is fitted");
    let mut rows = vec![table::head("| of requests | P99 | drop | source|")];
    for suspect in figure.suspects() {
        rows.push(vec![
            suspect.what.to_owned(),
            format!("{:.2}%", 100.0 * suspect.part),
            format!("{:.0} us", suspect.p99_us),
            format!("{:.0}%", 100.0 * suspect.drop),
            suspect.source.to_owned(),
        ]);
    }
    table::print(&rows);
    let ([a, b], waiting) = figure.needed();
    println!(
        "  needed: without bounds more than 1% of A's requests wait {a:.0} us longer, of B's {b:.0} us, where a move of 32 pages takes {:.0} us;\n  \
         in the spike {waiting:.0} of A's requests wait at any time, where a node has one task reclaim at a time",
        figure.wait_us()
    );
    println!(
        "  missing: how requests come to cores, and what so many of them wait for at once. Direct reclaim and memory.max need memory to run out\n"
    );
}

/// Section V-G.
pub(super) fn ratio(json: bool) -> Result<(), Failure> {
    let figure = RatioFigure::load()?;
    let report = figure.beside()?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!("{}\n  {}\n", figure.title, figure.source);
    let mut rows = vec![table::head(
        "| local:CXL | spill | CXL GB/s at P90 | simulated | load ns | lost | simulated | off, points",
    )];
    rows.extend(report.rows.iter().map(ratio_row));
    table::print(&rows);
    let yes = |holds: bool| if holds { "holds" } else { "does not hold: short" };
    println!("under 1% at 3:1 and 2:1, more at 1:1: {}", yes(report.below_until_1_1));
    println!("DPP loses more than Web at 1:1: {}", yes(report.preprocessing_is_worse));
    for beside in report.rows.iter().filter(|beside| beside.off != 0.0) {
        println!(
            "short: {} at {}:1, {:.2}% lost where {} were published",
            beside.row.service,
            beside.row.ratio,
            beside.loss() * 100.0,
            range(beside.row.published_loss.map(|loss| loss * 100.0), "%", 1)
        );
    }
    println!(
        "20 + 76 GB beside 96 GB: {:.3} GB/s of CXL memory, {:.3}% lost; the paper says the same throughput: {}",
        report.steered_bytes_per_s / 1e9,
        report.steered_loss * 100.0,
        yes(report.steered_loss < 0.01)
    );
    println!(
        "fitted: the power of the spill, {:.2}, to two bandwidths of the paper; and that {:.0} loads wait in vain for each second lost, to Web's IPC at 1:1",
        report.power, report.hidden
    );
    figure.assumed.iter().for_each(|line| println!("assumed: {line}"));
    Ok(())
}

fn ratio_row(beside: &RatioBeside) -> Vec<String> {
    let gb = |bytes: f64| bytes / 1e9;
    let published = beside.row.published_cxl.map(|both| both.map(|one| gb(one.value())));
    vec![
        beside.row.service.clone(),
        format!("{}:1", beside.row.ratio),
        format!("{:.0}%", beside.row.spill * 100.0),
        published.map_or_else(String::new, |both| range(both, "", 1)),
        format!("{:.1}", gb(beside.cxl_bytes_per_s)),
        format!("{:.0}", beside.cxl_s * 1e9),
        range(beside.row.published_loss.map(|loss| loss * 100.0), "%", 1),
        format!("{:.2}%", beside.loss() * 100.0),
        match (beside.is_fitted, beside.off) {
            (true, _) => "fitted".into(),
            (_, 0.0) => "inside".into(),
            (_, off) => format!("{:+.1}, short", off * 100.0),
        },
    ]
}

/// Section V-G by Table VIII.
pub(super) fn tier(json: bool) -> Result<(), Failure> {
    let report = traffic()?;
    if json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!(
        "CXL bandwidth of Web and DPP by the part of their memory that is on CXL\n  Vistara, Table VIII and section V-G\n"
    );
    let mut rows = vec![table::head(
        "| local:CXL | spill | published, GB/s | middle | off | least to most | | by idle times",
    )];
    rows.extend(report.rows.iter().map(traffic_row));
    table::print(&rows);
    let count = |is: fn(&TrafficBeside) -> bool| report.rows.iter().filter(|it| is(it)).count();
    println!(
        "of {} rows {} are within a factor of {TRAFFIC_FACTOR}, and {} lie between the least and the most",
        report.rows.len(),
        count(TrafficBeside::is_met),
        count(TrafficBeside::is_within)
    );
    let powers: Vec<_> = report.powers.iter().map(|power| format!("{power:.2}")).collect();
    println!(
        "law: spill^k of all that is drawn is drawn of CXL memory. k by the {} services of Table VIII: {}; the middle is {:.2}",
        powers.len(),
        powers.join(", "),
        report.middle
    );
    println!(
        "  (by idle times: each page read once in its idle time of Table I, web1; a lower bound. DPP is not in Table I)"
    );
    println!(
        "nothing is fitted to section V-G. That a power fits it was known when the law was chosen (vistara-ratio)"
    );
    for line in [
        format!(
            "a server draws {:.0} GB/s, 60% of the peak of local memory, as section III-A says of production",
            report.drawn / 1e9
        ),
        "services of Table VIII without capacities in Table VII fill 768 + 256 GB".to_owned(),
        "published are P90, and Table VIII does not say what it is".to_owned(),
    ] {
        println!("assumed: {line}");
    }
    Ok(())
}

fn traffic_row(beside: &TrafficBeside) -> Vec<String> {
    let gb = |bytes: f64| bytes / 1e9;
    let [least, middle, most] = beside.simulated.map(gb);
    let off = beside.off();
    vec![
        beside.service.clone(),
        format!("{}:1", beside.ratio),
        format!("{:.0}%", beside.spill * 100.0),
        range(beside.published.map(gb), "", 1),
        format!("{middle:.2}"),
        if off == 1.0 { "inside".into() } else { format!("{off:.2} times") },
        format!("{least:.2} to {most:.1}"),
        if beside.is_met() { "met" } else { "short" }.into(),
        beside.by_idle.map_or_else(String::new, |bytes| format!("{:.3}", gb(bytes))),
    ]
}
