//! `polder plan search`: every layout on several machines, and those that no other beats.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use clap::Args;
use polder_platform::{DataError, Prices, Rates};
use polder_sim::{
    Cell, Found, Job, Layout, Memory, NUMBERS, Offload, Order, RequestError, Space, Step, Tiers,
    accelerators, cells, front, grouped, listed, unjudged,
};
use serde::Serialize;
use serde_json::json;

use super::train::{Subject, computed_line, none_fits, threads, with_bar, write};
use super::{parquet, table};
use crate::Failure;

/// Looks at every layout.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    subject: Subject,
    /// Accelerators; several counts are looked at each.
    #[arg(long, value_name = "COUNT", value_delimiter = ',', required_unless_present = "layout")]
    gpus: Vec<u32>,
    /// The machines: names (`polder plan list`), or paths of files.
    #[arg(long, value_name = "PLATFORM", value_delimiter = ',', required = true)]
    platform: Vec<String>,
    /// What the machines cost, in money, watts and carbon: a name (`polder plan list`), or the path of a file.
    #[arg(long, value_name = "PRICES")]
    prices: Option<String>,
    /// Count what a run over so many tokens costs, such as 15e12, in place of a step.
    #[arg(long, value_name = "TOKENS", requires = "prices", value_parser = tokens)]
    tokens: Option<f64>,
    /// Write what is found as CSV, each layout with all figures.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    csv: Option<PathBuf>,
    /// Write the same as Parquet.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    parquet: Option<PathBuf>,
    /// Lines that are printed of the table, the fastest first.
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    rows: usize,
    /// Threads; when left out, one for each core.
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
}

fn tokens(text: &str) -> Result<f64, String> {
    let tokens = text.parse().ok().filter(|tokens: &f64| (1.0..1e30).contains(tokens));
    tokens.ok_or_else(|| "expected a number of tokens such as 15e12".into())
}

/// Where a layout was looked at.
struct Place<'a> {
    platform: &'a str,
    job: Job<'a>,
    accelerators: u32,
    rates: Option<Rates>,
}

/// Where no layout can run.
struct LeftOut<'a> {
    platform: &'a str,
    accelerators: u32,
    reason: String,
}

impl fmt::Display for LeftOut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = format!("{}: ", self.platform);
        let reason = self.reason.strip_prefix(&named).unwrap_or(&self.reason);
        write!(f, "{} with {}: {reason}", self.platform, accelerators(self.accelerators))
    }
}

/// What steps cost.
#[derive(Serialize)]
pub(super) struct Bill {
    steps: f64,
    total_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    money_usd: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_j: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    carbon_g: Option<f64>,
}

impl Bill {
    /// Of a step, or of as many as go through so many tokens.
    fn new(rates: &Rates, Found { layout, step }: &Found, run: Option<Run>) -> Self {
        let steps = run.map_or(1.0, |run| (run.tokens / (run.sequence * f64::from(layout.batch))).ceil());
        let total_s = steps * step.total_s;
        let [money_usd, energy_j, carbon_g] = rates.a_second.map(|rate| rate.map(|rate| rate * total_s));
        Self { steps, total_s, money_usd, energy_j, carbon_g }
    }

    /// In the order of [`Rates::NAMES`].
    const fn costs(&self) -> [Option<f64>; Rates::NAMES.len()] {
        [self.money_usd, self.energy_j, self.carbon_g]
    }
}

/// A run over so many tokens, in sequences of so many.
#[derive(Clone, Copy)]
struct Run {
    tokens: f64,
    sequence: f64,
}

/// Looks at every layout on every platform, and prints the front.
pub(super) fn search(arguments: &Arguments) -> Result<(), Failure> {
    let subject = &arguments.subject;
    let prices = arguments.prices.as_deref().map(Prices::load).transpose()?;
    let machines = arguments.platform.iter().map(|name| Ok((name.as_str(), polder_sim::platform(name)?)));
    let machines = machines.collect::<Result<Vec<_>, DataError>>()?;
    if let Some(prices) = &prices {
        prices.unknown(&machines)?.iter().for_each(|it| eprintln!("polder: {it}"));
    }
    let model = subject.loaded()?;
    let sequence = model.sequence;
    let run = arguments.tokens.map(|tokens| Run { tokens, sequence: sequence.into() });
    let (mut points, mut fits, mut places, mut found, mut left_out) = (0, 0, vec![], vec![], vec![]);
    let counts: Vec<_> = match arguments.gpus[..] {
        [] => vec![None],
        ref counts => counts.iter().copied().map(Some).collect(),
    };
    for &(platform, ref machine) in &machines {
        for &count in &counts {
            let request = subject.request(platform, count, Tiers::All)?;
            let accelerators = request.accelerators;
            let mut leave_out = |reason| left_out.push(LeftOut { platform, accelerators, reason });
            let looked = with_bar(|progress| {
                let rates = prices.as_ref().map(|prices| request.rates(prices)).transpose()?;
                Ok((rates, request.search(threads(arguments.threads), progress)?))
            });
            let (rates, outcome) = match looked {
                Err(error @ RequestError::Refused { .. }) => {
                    leave_out(error.to_string());
                    continue;
                }
                looked => looked?,
            };
            points += outcome.points;
            fits += outcome.fits;
            if let Some(Found { layout, step }) = &outcome.nearest {
                let none = none_fits(outcome.points, layout, step, &outcome.would_fit);
                leave_out(format!("{platform}: {none}"));
                continue;
            }
            found.extend(outcome.front.into_iter().map(|it| (places.len(), it)));
            let job = Job::chosen(machine, request.rack.as_deref(), request.fill, request.order)?;
            places.push(Place { platform, job, accelerators, rates });
        }
    }
    match &left_out[..] {
        [only] if places.is_empty() => return Err(Failure(only.reason.clone())),
        all => all.iter().for_each(|it| eprintln!("polder: left out {it}")),
    }
    if places.is_empty() {
        return Err(Failure("no platform that was asked for can run it with so many accelerators".into()));
    }
    let without = leave_out(&mut places);
    let unfed = leave_electricity_out(&mut places).map(|platform| {
        let prices = arguments.prices.as_deref().unwrap_or_default();
        format!("electricity is left out of money, but of rents: {prices} has no power or no price of it for {platform}")
    });
    let bill = |(place, found): &(usize, Found)| {
        let rates = places[*place].rates.as_ref();
        rates.map(|rates| Bill::new(rates, found, run))
    };
    let found = front(&found, |point| {
        bill(point).map_or([0.0; Rates::NAMES.len()], |bill| bill.costs().map(|cost| cost.unwrap_or(0.0)))
    });
    let unjudged = unjudged(&model);
    // Also of a place that others beat.
    let everywhere = places.iter().map(|place| (place, Offload::default()));
    let offloads = everywhere.chain(found.iter().map(|(at, it)| (&places[*at], it.layout.offload)));
    let unproved: BTreeSet<_> = offloads
        .filter_map(|(place, offload)| Some((place.platform, place.job.unproved(&offload)?)))
        .collect();
    let found: Vec<_> = found
        .into_iter()
        .map(|point| {
            let (Place { platform, job, accelerators, .. }, Found { layout, step }) =
                (&places[point.0], point.1);
            Point {
                bill: bill(&point),
                platform,
                kind: "simulated",
                accelerators: *accelerators,
                sequence,
                rack: job.rack_name(),
                fill: job.fill(&layout),
                order: job.order(),
                layout,
                step,
                note: [job.unproved(&layout.offload), unjudged]
                    .into_iter()
                    .flatten()
                    .map(String::from)
                    .reduce(|all, it| format!("{all}, and {it}")),
            }
        })
        .collect();
    if let Some(path) = &arguments.csv {
        write(path, &csv(&found))?;
    }
    if let Some(path) = &arguments.parquet {
        let said =
            |error: &dyn std::fmt::Display| Failure(format!("{}: cannot write it: {error}", path.display()));
        let file = std::fs::File::create(path).map_err(|error| said(&error))?;
        parquet::write(&found, file).map_err(|error| said(&error))?;
    }
    if subject.json {
        for point in &found {
            println!("{}", serde_json::to_string(point)?);
        }
        if let Some(line) = unfed {
            eprintln!("polder: {line}");
        }
        for LeftOut { platform, accelerators, reason } in &left_out {
            println!("{}", json!({"platform": platform, "accelerators": accelerators, "left_out": reason}));
        }
        return Ok(());
    }
    print(arguments, points, fits, &found, &apart(&found));
    println!("not looked at unless given: {}", Space::left_out());
    for (platform, note) in unproved {
        println!("{platform}: {note}");
    }
    if let Some(note) = unjudged {
        println!("{note}");
    }
    bills(arguments, &places, &without);
    unfed.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Leaves out what some machine has no number for, for it could not be compared: each such axis with the first machine.
fn leave_out<'a>(places: &mut [Place<'a>]) -> Vec<(&'static str, &'a str)> {
    let mut left_out = vec![];
    for (axis, (name, _)) in AXES.into_iter().enumerate() {
        let lacks = |place: &Place<'_>| place.rates.as_ref().is_some_and(|it| it.a_second[axis].is_none());
        let is_known = places.iter().any(|place| !lacks(place));
        let Some(without) = places.iter().find(|place| lacks(place)).map(|place| place.platform) else {
            continue;
        };
        if is_known {
            left_out.push((name, without));
        }
        for rates in places.iter_mut().filter_map(|place| place.rates.as_mut()) {
            rates.a_second[axis] = None;
        }
    }
    left_out
}

/// Leaves electricity out of the money of all where that of some machine is not known, for unlike sums would be compared: the first
/// such machine.
fn leave_electricity_out<'a>(places: &mut [Place<'a>]) -> Option<&'a str> {
    let paid = |place: &Place<'_>| place.rates.as_ref().filter(|it| it.a_second[0].is_some())?.electricity;
    let without = places.iter().find(|place| paid(place).is_none())?.platform;
    places.iter().find_map(paid)?;
    for rates in places.iter_mut().filter_map(|place| place.rates.as_mut()) {
        let electricity = rates.electricity.unwrap_or(0.0);
        rates.a_second[0] = rates.a_second[0].map(|money| money - electricity);
    }
    Some(without)
}

/// What is paid besides time and memory, each with the unit of its column and how much of [`Rates::NAMES`] that is.
const AXES: [(&str, (&str, f64)); Rates::NAMES.len()] =
    [("money", ("USD", 1.0)), ("energy", ("kWh", 3.6e6)), ("carbon", ("kg CO2", 1e3))];

/// How much worse a layout may be that is left out of the table: this part of its time and costs, and of the memory that there is.
const TOLERANCE: f64 = 0.01;

/// Of the front, the fastest first, what is printed: no layout that one before it is as good as, to within the tolerance.
fn apart<'a, 'b>(found: &'a [Point<'b>]) -> Vec<&'a Point<'b>> {
    // Each figure, and what it is a part of.
    let axes = |point: &Point<'_>| {
        let Memory { used_bytes, capacity_bytes, far_bytes, far_capacity_bytes, .. } = point.step.memory;
        let costs = point.bill.iter().flat_map(|bill| bill.costs().into_iter().flatten());
        let paid = std::iter::once(point.step.total_s).chain(costs).map(|it| (it, it));
        paid.chain([(used_bytes, capacity_bytes), (far_bytes, far_capacity_bytes)]).collect::<Vec<_>>()
    };
    let mut printed: Vec<(Vec<(f64, f64)>, &Point<'_>)> = vec![];
    for point in found {
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

/// The front as a table: of its layouts those that are apart.
fn print(arguments: &Arguments, points: u64, fits: u64, found: &[Point<'_>], apart: &[&Point<'_>]) {
    let known = found.first().and_then(|point| point.bill.as_ref()).map_or([None; 3], Bill::costs);
    let paid: Vec<_> = AXES.into_iter().zip(known).filter_map(|(axis, cost)| cost.map(|_| axis)).collect();
    let axes: Vec<_> = ["time", "memory"].into_iter().chain(paid.iter().map(|(name, _)| *name)).collect();
    println!(
        "{} layouts, {} fit, {} that no other beats in {} (simulated)",
        grouped(points),
        grouped(fits),
        found.len(),
        listed(&axes)
    );
    if apart.len() < found.len() {
        println!(
            "{} of them here: one of these is as good as each other one to within {:.0}%; --csv, --parquet and --json have all",
            grouped(apart.len() as u64),
            TOLERANCE * 100.0
        );
    }
    // All that is searched is computed alike.
    if let Some(Point { sequence, layout, order, .. }) = found.first() {
        println!("{}; ranks are placed {order}", computed_line(*sequence, layout));
    }
    let several = arguments.gpus.len() > 1;
    let mut head = vec!["platform"];
    head.extend(several.then_some("accelerators"));
    head.push("step s");
    head.extend(arguments.tokens.map(|_| "run days"));
    head.extend(paid.iter().map(|(_, (unit, _))| *unit));
    head.extend(["GB", "GB elsewhere", "tp", "cp", "ep", "dp", "pp", "parts", "micro-batch"]);
    head.extend(["of a rack", "seq. par.", "again", "shared", "elsewhere"]);
    let mut rows = vec![head.into_iter().map(String::from).collect()];
    for Point { platform, fill, layout, step, bill, .. } in apart.iter().take(arguments.rows) {
        let mut row = vec![(*platform).to_owned()];
        row.extend(several.then(|| grouped(layout.accelerators().into())));
        row.push(format!("{:.3}", step.total_s));
        if let Some(bill) = bill {
            row.extend(arguments.tokens.map(|_| format!("{:.1}", bill.total_s / 86400.0)));
            let costs = AXES.into_iter().zip(bill.costs());
            row.extend(
                costs.filter_map(|((_, (_, unit)), cost)| cost.map(|cost| format!("{:.3}", cost / unit))),
            );
        }
        row.push(format!("{:.1}", step.memory.used_bytes / 1e9));
        row.push(format!("{:.1}", step.memory.far_bytes / 1e9));
        let counts =
            [layout.tp, layout.cp, layout.ep, layout.dp, layout.pp, layout.interleave, layout.micro_batch];
        row.extend(counts.map(|count| count.to_string()));
        row.push(fill.to_string());
        row.push(if layout.sequence_parallel { "yes" } else { "no" }.into());
        row.push(format!("{:?}", layout.recompute).to_lowercase());
        row.push(format!("{:?}", layout.zero).to_lowercase());
        row.push(elsewhere(layout));
        rows.push(row);
    }
    table::print(&rows);
    if apart.len() > arguments.rows {
        println!("and {} more: --rows", grouped((apart.len() - arguments.rows) as u64));
    }
}

/// What the costs follow from, each number once with its source.
fn bills(arguments: &Arguments, places: &[Place<'_>], without: &[(&str, &str)]) {
    let Some(prices) = &arguments.prices else { return };
    let of = if arguments.tokens.is_some() { "the run" } else { "a step" };
    println!("what {of} costs, by {prices}, as if everything took its full power all the time:");
    let mut sources = vec![];
    for Place { platform, accelerators: count, rates, .. } in places {
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
    let mut seen = std::collections::BTreeSet::new();
    for line in sources.iter().filter(|line| seen.insert(*line)) {
        println!("{line}");
    }
    for (axis, platform) in without {
        println!("{axis} is left out: {prices} has none for {platform}");
    }
}

/// What lies elsewhere, and where.
fn elsewhere(layout: &Layout) -> String {
    let Offload { tier, weights, optimizer, activations } = layout.offload;
    let what = [("weights", weights), ("optimizer", optimizer), ("activations", activations)];
    let what: Vec<_> = what.into_iter().filter(|(_, is_far)| *is_far).map(|(name, _)| name).collect();
    match what.is_empty() {
        true => "nothing".into(),
        false => format!("{} ({tier})", what.join(", ")),
    }
}

/// What comes before a layout in its line: where it was looked at.
pub(super) const PLACE: [&str; 7] = ["platform", "kind", "accelerators", "sequence", "rack", "fill", "order"];

/// A line for each layout: where it was looked at, how it is cut, all figures of its step, and what it costs.
fn csv(found: &[Point<'_>]) -> String {
    let names = found.first().map_or(vec![], Point::names);
    let mut text = PLACE.into_iter().chain(NUMBERS).chain(names).collect::<Vec<_>>().join(",") + "\n";
    for point in found {
        // A path may hold commas and quotes.
        let mut row = vec![format!("\"{}\"", point.platform.replace('"', "\"\""))];
        row.extend([point.kind.into(), point.accelerators.to_string(), point.sequence.to_string()]);
        row.extend([point.rack.into(), point.fill.to_string(), point.order.to_string()]);
        row.extend(cells(&point.layout).map(|cell| match cell {
            Cell::Count(count) => count.to_string(),
            Cell::Flag(is_so) => is_so.to_string(),
            Cell::Choice(which) => which,
        }));
        row.extend(point.figures().map(|figure| figure.to_string()));
        text += &(row.join(",") + "\n");
    }
    text
}

/// A layout of the front.
#[derive(Serialize)]
pub(super) struct Point<'a> {
    pub(super) platform: &'a str,
    /// How the figures were obtained: "simulated".
    pub(super) kind: &'static str,
    pub(super) accelerators: u32,
    pub(super) sequence: u32,
    pub(super) rack: &'a str,
    pub(super) fill: u32,
    pub(super) order: Order,
    pub(super) layout: Layout,
    pub(super) step: Step,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bill: Option<Bill>,
    /// What must be said with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
}

impl Point<'_> {
    /// The names of its figures.
    pub(super) fn names(&self) -> Vec<&'static str> {
        let bill = self.bill.iter().flat_map(|bill| {
            let costs = Rates::NAMES.into_iter().zip(bill.costs());
            ["bill_steps", "bill_total_s"]
                .into_iter()
                .chain(costs.filter_map(|(name, cost)| cost.and(Some(name))))
        });
        Step::COLUMNS.into_iter().chain(bill).collect()
    }

    /// The figures, in the order of their names.
    pub(super) fn figures(&self) -> impl Iterator<Item = f64> {
        let bill = self.bill.iter().flat_map(|bill| {
            [bill.steps, bill.total_s].into_iter().chain(bill.costs().into_iter().flatten())
        });
        self.step.columns().into_iter().chain(bill)
    }
}

#[cfg(test)]
mod tests {
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
                memory: Memory {
                    used_bytes: used,
                    capacity_bytes: 200.0,
                    far_bytes: far,
                    far_capacity_bytes: 50.0,
                    ..Memory::default()
                },
                ..Step::default()
            },
            bill: None,
            note: None,
        };
        let found = [
            point(1.0, 100.0, 0.0),
            point(1.001, 98.5, 0.5),
            point(1.002, 97.0, 0.0),
            point(1.003, 95.5, 1.0),
            point(1.02, 95.0, 0.0),
            point(1.03, 20.0, 50.0),
        ];
        let times: Vec<_> = apart(&found).iter().map(|point| point.step.total_s).collect();
        assert_eq!(times, [1.0, 1.002, 1.03]);
    }
}
