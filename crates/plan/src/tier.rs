//! `polder plan tier`: the ratio of fast to slow memory that a service lives with, and what a server then holds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use polder_agent::read_record;
use polder_platform::{Bandwidth, Bytes, Time, quoted, recorded_text_of};
use polder_sim::pages::Pair;
use polder_sim::pages::plan::{Costs, Followed, Lived, Row, Trace, lived};
use polder_sim::{GivenIdle, TierError, TierQuestion, TierRow, TierServer, grouped};
use serde::Serialize;
use serde_json::json;

use super::fidelity::ClosedForm;
use super::option::{quantity, wrong};
use super::page::filled;
use super::table::{self, print_wrapped, size, three, time};
use super::written::{Outputs, escaped_csv};
use crate::Failure;

/// Predicts what slow memory beside a server's own is good for.
#[derive(Args)]
#[command(mut_arg("html", |it| it.conflicts_with_all(["record", "trace"])))]
pub(crate) struct Arguments {
    #[command(flatten)]
    fidelity: ClosedForm,
    /// The machine, with a server of two tiers: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "PLATFORM", default_value = "memserver", conflicts_with = "trace")]
    platform: String,
    /// The server's own memory, by the name of its tier.
    #[arg(long, value_name = "TIER", default_value = "local", conflicts_with = "trace")]
    fast: String,
    /// Its slow memory, by the name of its tier.
    #[arg(long, value_name = "TIER", default_value = "cxl", conflicts_with = "trace")]
    slow: String,
    #[command(flatten)]
    service: ServiceArguments,
    /// Ratios of fast to slow memory, such as 3:1; the fast memory stays as it is.
    #[arg(
        long,
        value_name = "FAST:SLOW",
        value_delimiter = ',',
        default_value = "8:1,4:1,3:1,2:1,1:1",
        conflicts_with = "record"
    )]
    ratio: Vec<String>,
    /// Cost of a GB of slow memory, as a part of that of fast memory [default: 0.13, Vistara's reused DIMMs].
    #[arg(long, value_name = "PART", conflicts_with_all = ["record", "trace"])]
    slow_cost: Option<f64>,
    /// Watts of a server without slow memory [default: 455, Vistara's].
    #[arg(long, value_name = "WATTS", conflicts_with_all = ["record", "trace"])]
    server_watts: Option<f64>,
    #[command(flatten)]
    pub(super) outputs: Outputs,
}

/// The service.
#[derive(Args)]
struct ServiceArguments {
    /// How long its pages lie idle: ads, cache, web1 or web2 (Vistara, Table I), or points such as
    /// "25%=22s,50%=28min,75%=1.3h,99%=1.9h".
    #[arg(long, value_name = "IDLE", required_unless_present_any = ["record", "trace"], conflicts_with_all = ["record", "trace"])]
    idle: Option<String>,
    /// Memory of one container or VM.
    #[arg(long, value_name = "SIZE", default_value = "64 GB", conflicts_with_all = ["record", "trace"])]
    unit: String,
    /// What one draws of memory; the default is as much for each GB as CacheA's (Vistara, Table VIII).
    #[arg(long, value_name = "RATE", default_value = "15 GB/s", conflicts_with_all = ["record", "trace"])]
    draws: String,
    /// The part of its time that one waits for memory, in per cent.
    #[arg(long, value_name = "PERCENT", default_value_t = 50.0, conflicts_with_all = ["record", "trace"])]
    waits: f64,
    /// Take the services from what `polder agent run --record` wrote.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    record: Option<PathBuf>,
    /// Simulate the accesses of this CSV file page by page: `generation,service,page`, generations in their order.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, conflicts_with = "record")]
    trace: Option<PathBuf>,
    /// Hold the fast part of every service of a trace by fair share, as `polder agent` does.
    #[arg(long, requires = "trace")]
    fair_share: bool,
}

/// What is predicted of a described service.
#[derive(Serialize)]
struct Report {
    platform: String,
    idle: String,
    unit_bytes: f64,
    unit_bytes_per_s: f64,
    waits: f64,
    fast_bytes: f64,
    costs: Costs,
    /// Containers on fast memory alone.
    units_alone: u32,
    /// What must be said with traffic and slowdowns.
    note: &'static str,
    rows: Vec<Row>,
    /// Of each row, bytes a second of slow memory if the service were one of Table VIII of Vistara: the one that draws the least of it, the
    /// middle one, and the one that draws the most.
    slow_traffic_by_others: Vec<[f64; 3]>,
    /// Bytes a second that slow memory carries, three reads to a write.
    slow_carries: f64,
}

/// What a record shows.
#[derive(Serialize)]
struct RecordReport {
    platform: String,
    services: Vec<Lived>,
    bytes: f64,
    fast_bytes: f64,
    /// Fast bytes for each slow one that all services together lived with.
    ratio: Option<f64>,
    /// Bytes of slow memory beside the platform's fast memory at that ratio, as far as it has them.
    slow_bytes: f64,
    /// How often all services fit on a server, with fast memory alone and with both.
    units: [f64; 2],
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.fidelity.check("tier", "a server's memory is no fabric; plan fabric has messages on one")?;
    let question = TierQuestion {
        platform: arguments.platform.clone(),
        fast: arguments.fast.clone(),
        slow: arguments.slow.clone(),
        slow_cost: arguments.slow_cost,
        server_watts: arguments.server_watts,
    };
    let server = TierServer::new(&question).map_err(of_tier)?;
    match (&arguments.service.record, &arguments.service.trace) {
        (Some(path), _) => recorded(arguments, server.pair(), path),
        (None, Some(path)) => traced(arguments, path),
        (None, None) => described(arguments, &server),
    }
}

fn of_tier(error: TierError) -> Failure {
    match error {
        TierError::Given(error) => wrong(&error),
        other => other.into(),
    }
}

fn described(arguments: &Arguments, server: &TierServer) -> Result<(), Failure> {
    let named = arguments.service.idle.as_deref().unwrap_or_default();
    let row = TierRow {
        idle: idle(named),
        unit_bytes: quantity("--unit", &arguments.service.unit).map(Bytes::value)?,
        unit_bytes_per_s: quantity("--draws", &arguments.service.draws).map(Bandwidth::value)?,
        waits: percent("--waits", arguments.service.waits, 100.0)?,
        ratio: 0.0,
    };
    let of = |text: &String| server.row(&TierRow { ratio: ratio(text)?, ..row.clone() }).map_err(of_tier);
    let rows = arguments.ratio.iter().map(of).collect::<Result<Vec<_>, _>>()?;
    let fast_bytes = server.fast_bytes();
    let report = Report {
        platform: arguments.platform.clone(),
        idle: named.to_owned(),
        unit_bytes: row.unit_bytes,
        unit_bytes_per_s: row.unit_bytes_per_s,
        waits: row.waits,
        fast_bytes,
        costs: server.costs,
        units_alone: (fast_bytes / row.unit_bytes + 1e-9).floor() as u32,
        note: NOTE,
        slow_traffic_by_others: rows
            .iter()
            .map(|it| server.slow_traffic(it.spill, f64::from(it.units) * row.unit_bytes_per_s))
            .collect(),
        slow_carries: server.pair().slow.bandwidth(0.75),
        rows,
    };
    arguments.outputs.json.print(&report, || print(&report))?;
    arguments.outputs.table(|| csv(&report.rows))?;
    arguments.outputs.page(|| {
        let title = format!("Slow memory beside {}: idle times {}", report.platform, report.idle);
        let data = json!({ "rows": report.rows, "about": format!("{}. {NOTE}", about(&report)) });
        filled(include_str!("tier.html"), &title, &data)
    })
}

/// What idle times do not say.
const NOTE: &str = "slow traffic, touches and slower are lower bounds: by idle times a page is read once in each, and programs read it more often. \
                    They say neither that a ratio will do nor that it will not. At 1:1 Vistara measured 3 to 9% (Web) and 12 to 19% (DPP), and a \
                    cache that drew 70 times what its idle times give";

fn percent(option: &str, value: f64, most: f64) -> Result<f64, Failure> {
    match (0.0..=most).contains(&value) {
        true => Ok(value / 100.0),
        false => Err(Failure(format!("{option}: expected per cent from 0 to {most}, found {value}"))),
    }
}

/// Fast memory for each byte of slow memory.
fn ratio(text: &str) -> Result<f64, Failure> {
    let parts = text
        .split_once(':')
        .and_then(|(fast, slow)| Some((fast.trim().parse().ok()?, slow.trim().parse().ok()?)));
    let wrong =
        || Failure(format!("--ratio: expected two numbers above 0 such as 3:1, found \"{}\"", quoted(text)));
    let (fast, slow): (f64, f64) = parts.ok_or_else(wrong)?;
    let ratio = fast / slow;
    (fast > 0.0 && slow > 0.0 && ratio.is_finite()).then_some(ratio).ok_or_else(wrong)
}

/// The points that an option gives, or the name of a service.
fn idle(text: &str) -> GivenIdle {
    let point = |part: &str| {
        let (share, idle) = part.split_once('=')?;
        let share: f64 = share.trim().strip_suffix('%')?.trim().parse().ok()?;
        Some([share / 100.0, seconds(idle.trim())?])
    };
    let points: Option<Vec<_>> = text.split(',').map(|part| point(part.trim())).collect();
    points.map_or_else(|| GivenIdle::Named(text.into()), GivenIdle::Points)
}

/// Seconds, minutes or hours, or a time of a platform's file such as "300 ms".
fn seconds(text: &str) -> Option<f64> {
    let units = [("min", 60.0), ("h", 3600.0), ("ms", 1e-3)];
    let long = units
        .iter()
        .find_map(|(unit, scale)| Some(text.strip_suffix(unit)?.trim().parse::<f64>().ok()? * scale));
    let short = || text.strip_suffix('s').and_then(|number| number.trim().parse::<f64>().ok());
    long.or_else(short).or_else(|| Time::parse(text).ok().map(Time::value))
}

/// What was asked, in a line.
fn about(report: &Report) -> String {
    let Report { platform, idle, unit_bytes, unit_bytes_per_s, waits, .. } = report;
    format!(
        "containers of {} on {platform}, idle times {idle}, each draws {}/s and waits for memory {:.0}% of its time; simulated",
        size(*unit_bytes),
        size(*unit_bytes_per_s),
        waits * 100.0
    )
}

fn print(report: &Report) {
    print_wrapped(&about(report));
    print_wrapped(&format!(
        "{} containers on fast memory alone, {}\n",
        report.units_alone,
        size(report.fast_bytes)
    ));
    let mut lines = vec![table::head(
        "fast:slow | slow | spill | containers | slower, at least | neighbours | load | slow traffic, at least | touches/min, at least | servers | memory cost | watts each | carbon | new DIMMs",
    )];
    lines.extend(report.rows.iter().map(line));
    table::print(&lines);
    print_wrapped(
        "  (spill: part of each container on slow memory; servers, memory cost and carbon: for as many containers, of what fast memory alone takes)",
    );
    print_wrapped(
        "a container holds its memory whole, and is as large on both tiers; the coldest pages lie on slow memory, as reclaim keeps them",
    );
    print_wrapped(report.note);
    print_wrapped(&format!(
        "slow traffic that a server would ask for if its containers were as services that Vistara measured, from the one that draws the least of slow memory to the one that draws the most; neither a bound nor a promise for yours (in a clone: `make reproduce NAME=vistara-tier`). Slow memory carries {}/s:",
        size(report.slow_carries)
    ));
    let head = table::head("fast:slow | least | middle | most");
    let others = report.rows.iter().zip(&report.slow_traffic_by_others).map(|(row, traffic)| {
        let rates = traffic.iter().map(|bytes| format!("{}/s", size(*bytes)));
        std::iter::once(ratio_of(row)).chain(rates).collect()
    });
    table::print(&std::iter::once(head).chain(others).collect::<Vec<_>>());
    print_wrapped(
        "in a clone, `make reproduce NAME=vistara-ratio` and `NAME=vistara-table8` print what was measured beside what is predicted of it, `NAME=vistara-table7` gains beside what follows from capacities",
    );
}

fn ratio_of(row: &Row) -> String {
    match row.ratio {
        ratio if ratio >= 1e-3 => format!("{}:1", (ratio * 1000.0).round() / 1000.0),
        ratio => format!("1:{:.0}", 1.0 / ratio),
    }
}

fn line(row: &Row) -> Vec<String> {
    let part = |value: f64| format!("{:.0}%", value * 100.0);
    vec![
        ratio_of(row),
        size(row.slow_bytes),
        format!("{:.1}%", row.spill * 100.0),
        row.units.to_string(),
        slower(row.slowdown),
        slower(row.crowding),
        row.mean_s.map_or_else(String::new, time),
        format!("{}/s", size(row.slow_bytes_per_s)),
        three(row.touches_a_minute),
        part(row.servers),
        part(row.memory_cost),
        format!("{:.1}", row.watts),
        part(row.carbon),
        part(row.carbon_new),
    ]
}

fn slower(part: Option<f64>) -> String {
    let percent = |it: f64| {
        let places = if it < 0.1 { 2 } else { 1 };
        // Zero has no sign.
        let shown = if (it * 1e4).round() == 0.0 { 0.0 } else { it * 100.0 };
        format!("{shown:+.places$}%")
    };
    part.map_or_else(|| "no bandwidth".into(), percent)
}

fn csv(rows: &[impl Serialize]) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    for row in rows {
        writer.serialize(row)?;
    }
    escaped_csv(writer)
}

fn recorded(arguments: &Arguments, pair: Pair<'_>, path: &Path) -> Result<(), Failure> {
    let wrong = |what: String| {
        Failure(format!("{}{what}; make one with: polder agent run --record FILE", path.display()))
    };
    let text = recorded_text_of(&path.to_string_lossy())?;
    let rounds = read_record(&text).map_err(|error| wrong(format!(" is no record of an agent ({error})")))?;
    let services = lived(&rounds);
    if services.is_empty() {
        return Err(wrong(": no service had any bytes".to_owned()));
    }
    let bytes: f64 = services.iter().map(|it| it.bytes as f64).sum();
    let fast_bytes: f64 = services.iter().map(Lived::fast_bytes).sum();
    let ratio = (fast_bytes < bytes).then(|| fast_bytes / (bytes - fast_bytes));
    let fast = pair.fast.capacity.value();
    let slow_bytes = ratio.map_or(0.0, |ratio| fast / ratio.max(fast / pair.slow.capacity.value()));
    let report = RecordReport {
        platform: arguments.platform.clone(),
        ratio,
        slow_bytes,
        units: [fast / bytes, (fast + slow_bytes) / bytes],
        services,
        bytes,
        fast_bytes,
    };
    arguments.outputs.json.print(&report, || print_record(&report, rounds.len()))?;
    arguments.outputs.table(|| csv(&report.services))
}

fn print_record(report: &RecordReport, rounds: usize) {
    let count = report.services.len();
    println!("{count} services in {rounds} recorded rounds; measured by the agent");
    let mut lines = vec![table::head("| most | rounds | fast share lived with | suffered at")];
    let share =
        |part: Option<f64>| part.map_or_else(|| "never".into(), |part| format!("{:.1}%", part * 100.0));
    for service in &report.services {
        let lowest = if service.is_opted_out { "opted out".into() } else { share(service.share) };
        let row = [
            service.name.clone(),
            size(service.bytes as f64),
            service.rounds.to_string(),
            lowest,
            share(service.suffered),
        ];
        lines.push(row.to_vec());
    }
    table::print(&lines);
    println!(
        "  (lived with: the lowest share in a round without pressure or refaults beyond the policy's limits)"
    );
    let [alone, both] = report.units;
    match report.ratio {
        None => println!("no service left its fast memory: the record shows no ratio that they live with"),
        Some(ratio) => println!(
            "together they lived with {ratio:.2}:1 of fast to slow memory. With {} of slow memory, {} holds them {both:.1} times, where fast memory alone does {alone:.1} times: {:.0}% fewer servers",
            size(report.slow_bytes),
            report.platform,
            (1.0 - alone / both) * 100.0
        ),
    }
}

/// A ratio with what becomes of the services of a trace.
#[derive(Serialize)]
struct TraceReport {
    ratio: f64,
    fair_share: bool,
    services: Vec<Followed>,
}

/// A line of a trace.
#[derive(serde::Deserialize)]
struct Access {
    generation: u64,
    service: String,
    page: u64,
}

fn traced(arguments: &Arguments, path: &Path) -> Result<(), Failure> {
    let trace = read_trace(path)?;
    let fair_share = arguments.service.fair_share;
    let report = |text: &String| {
        let ratio = ratio(text)?;
        Ok(TraceReport { ratio, fair_share, services: trace.follow(ratio, fair_share)? })
    };
    let reports = arguments.ratio.iter().map(report).collect::<Result<Vec<_>, Failure>>()?;
    arguments.outputs.json.print(&reports, || print_trace(&trace, &reports))?;
    arguments.outputs.table(|| trace_csv(&reports))
}

/// Accesses of a file, with pages numbered as they appear.
fn read_trace(path: &Path) -> Result<Trace, Failure> {
    let named = |problem: String| {
        Failure(format!(
            "{}: {problem}; expected lines of generation,service,page below that head",
            path.display()
        ))
    };
    let text = recorded_text_of(&path.to_string_lossy())?;
    let mut reader = ::csv::Reader::from_reader(text.as_bytes());
    let (mut trace, mut numbers, mut generation) = (Trace::default(), BTreeMap::new(), None);
    for access in reader.deserialize() {
        let Access { generation: of, service, page } =
            access.map_err(|error: ::csv::Error| named(error.to_string()))?;
        match generation {
            Some(last) if of < last => return Err(named(format!("generation {of} after {last}"))),
            Some(last) if of == last => {}
            _ => trace.generations.push(vec![]),
        }
        generation = Some(of);
        let at = trace.services.iter().position(|(name, _)| *name == service).unwrap_or_else(|| {
            trace.services.push((service, 0));
            trace.services.len() - 1
        });
        let pages = &mut trace.services[at].1;
        let number = *numbers.entry((at, page)).or_insert_with(|| {
            *pages += 1;
            *pages - 1
        });
        trace.generations.last_mut().expect("a generation was begun").push([at as u32, number]);
    }
    if trace.services.is_empty() {
        return Err(named("it has no accesses".into()));
    }
    Ok(trace)
}

fn print_trace(trace: &Trace, reports: &[TraceReport]) {
    let accesses: usize = trace.generations.iter().map(Vec::len).sum();
    println!(
        "{} accesses in {} generations; simulated page by page, {}",
        grouped(accesses as u64),
        grouped(trace.generations.len() as u64),
        if reports.iter().any(|it| it.fair_share) { "with fair share" } else { "without bounds" }
    );
    let mut lines = vec![table::head(
        "fast:slow |  | pages | fast | accesses to slow | hint faults | promoted | demoted",
    )];
    for report in reports {
        for Followed { name, seen, slow_part } in &report.services {
            let pages = u64::from(seen.fast) + u64::from(seen.slow);
            lines.push(vec![
                format!("{}:1", (report.ratio * 1000.0).round() / 1000.0),
                name.clone(),
                grouped(pages),
                format!("{:.1}%", f64::from(seen.fast) / pages.max(1) as f64 * 100.0),
                format!("{:.2}%", slow_part * 100.0),
                grouped(seen.faults),
                grouped(seen.promotions),
                grouped(seen.demotions),
            ]);
        }
    }
    table::print(&lines);
    println!(
        "  (at each ratio both tiers would hold all pages of the trace, and slow memory has room to spare; fast: after its last generation)"
    );
}

fn trace_csv(reports: &[TraceReport]) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    let head =
        ["ratio", "service", "fast_pages", "slow_pages", "slow_part", "faults", "promotions", "demotions"];
    writer.write_record(head)?;
    for report in reports {
        for Followed { name, seen, slow_part } in &report.services {
            let pages = [seen.fast, seen.slow].map(|it| it.to_string());
            let counts = [seen.faults, seen.promotions, seen.demotions].map(|it| it.to_string());
            let record = [report.ratio.to_string(), name.clone()].into_iter().chain(pages);
            writer.write_record(record.chain([slow_part.to_string()]).chain(counts))?;
        }
    }
    escaped_csv(writer)
}
