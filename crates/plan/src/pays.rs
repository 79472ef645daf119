//! `polder plan pays`: from which bandwidths on one fabric between racks is faster than another.

use clap::Args;
use polder_platform::{Bandwidth, Prices, Rates};
use polder_sim::{CellCost, FabricMap, FoundLayout, MapCell, PaysError, PaysQuestion, Tiers, accelerators};
use serde_json::json;

use super::fidelity::ClosedForm;
use super::option::accelerator_count;
use super::search::costs::{AXES, electricity_line, print_sources};
use super::table::{self, print_wrapped, three};
use super::train::{Subject, layout_line, none_fits, threads, with_progress_bar};
use super::written::{Outputs, escaped_csv};
use crate::Failure;

/// Compares the fastest layouts over two fabrics.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    subject: Subject,
    /// Number of accelerators.
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    gpus: String,
    /// The machine that there is: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "PLATFORM", default_value = "nvl72-ndr")]
    platform: String,
    /// The machine that may pay; on a kind of rack with `:RACK` behind it.
    #[arg(long, value_name = "PLATFORM", default_value = "nvl72-cxl")]
    against: String,
    /// What an accelerator gets between racks in one direction, on both.
    #[arg(long, value_name = "BANDWIDTH", value_delimiter = ',', value_parser = positive_bandwidth,
          default_value = "12.5 GB/s,25 GB/s,50 GB/s,100 GB/s,200 GB/s")]
    between: Vec<Bandwidth>,
    /// What an accelerator reads from the memory nodes of --against, such as "50 GB/s,100 GB/s" [default: as it is there].
    #[arg(long, value_name = "BANDWIDTH", value_delimiter = ',', value_parser = positive_bandwidth)]
    pool: Vec<Bandwidth>,
    /// What the machines cost as they are, in money, watts and carbon: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "PRICES")]
    prices: Option<String>,
    #[command(flatten)]
    fidelity: ClosedForm,
    #[command(flatten)]
    pub(super) outputs: Outputs,
    /// Threads [default: one for each core].
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
}

fn positive_bandwidth(text: &str) -> Result<Bandwidth, String> {
    let bandwidth = Bandwidth::parse(text)?;
    match bandwidth.value() > 0.0 {
        true => Ok(bandwidth),
        false => Err(format!("expected a bandwidth above 0, found {bandwidth}")),
    }
}

/// Prints the map.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.fidelity.check("pays", "it compares the fastest of all layouts at each point")?;
    let Arguments { subject, platform, against, between, pool, prices, outputs, .. } = arguments;
    let name = prices.as_deref().unwrap_or_default();
    let prices = prices.as_deref().map(Prices::load).transpose()?;
    let request = subject.request(platform, Some(accelerator_count(&arguments.gpus)?), Tiers::All)?;
    let question = PaysQuestion { request: &request, against, between, pool, prices: prices.as_ref() };
    let map = with_progress_bar(|progress| question.map(threads(arguments.threads), progress)).map_err(
        |error| match error {
            PaysError::NothingFits { platform, outcome } => {
                let FoundLayout { layout, step } = outcome.nearest.expect("something comes nearest");
                Failure(format!(
                    "{platform}: {}",
                    none_fits(outcome.points, &layout, &step, &outcome.would_fit)
                ))
            }
            other => other.into(),
        },
    )?;
    outputs.table(|| csv(&map))?;
    let title =
        format!("{} on {}: {against} beside {platform}", subject.model, accelerators(request.accelerators));
    let tables = tables(&map);
    let as_it_is = format!(
        "what a step costs is by {name} for both as they are: a port costs as much at each bandwidth"
    );
    let costs_note = prices.is_some().then_some(as_it_is.as_str());
    let notes = || [BANDWIDTHS, LEGEND, map.note].into_iter().chain(costs_note);
    outputs.page(|| {
        let tables: Vec<_> =
            tables.iter().map(|(title, rows)| json!({"title": title, "rows": rows})).collect();
        let lines: Vec<_> = own(&map).into_iter().chain(notes().map(String::from)).collect();
        super::page::filled(include_str!("pays.html"), &title, &json!({"tables": tables, "lines": lines}))
    })?;
    outputs.json.print(&map, || {
        print_wrapped(&format!("{title}; {}, simulated", tables[0].0));
        own(&map).iter().for_each(|line| print_wrapped(line));
        for (at, (title, rows)) in tables.iter().enumerate() {
            if at > 0 {
                print_wrapped(&format!("{title}:"));
            }
            table::print(rows);
        }
        notes().for_each(print_wrapped);
        if let Some(rates) = &map.rates {
            let sites = [0, 1].map(|at| (&*map.platforms[at], request.accelerators, &rates[at]));
            print_sources("a step", name, &sites, &map.left_out());
            electricity_line(&map.left_out(), name).iter().for_each(|line| print_wrapped(line));
        }
    })
}

const BANDWIDTHS: &str = "bandwidths are an accelerator's: between racks in one direction, and reading from memory nodes, which are no faster than \
                          its link";
const LEGEND: &str = "+ pays: its whole range is above 1; - does not: its whole range is below 1; ? is open; each cell has the fastest layouts of both";

/// What the platforms give as they are.
fn own(map: &FabricMap) -> Vec<String> {
    let FabricMap { platforms: [there, other], own, .. } = map;
    let [from, to] = own.between_bytes_per_s.map(gigabytes);
    let pool = pool_of(own);
    let [least, most] = own.range.map(three);
    let [before, after] = own.seconds.map(three);
    let [before_layout, after_layout] = own.layouts.each_ref().map(layout_line);
    let mut lines = vec![
        format!(
            "as they are ({there} {from}, {other} {to}{pool}): {before} and {after} s, {} times as fast ({least} to {most}) {}",
            three(own.times),
            pays_symbol(own.pays()),
        ),
        format!("on {there}: {before_layout}"),
        format!("on {other}: {after_layout}"),
    ];
    for (axis, (unit, per), cost) in costs(own) {
        let [before, after] = cost.step.map(|it| three(it / per));
        let [before_each, after_each] = cost.step.map(|it| three(it / per / map.tokens * 1e6));
        let [least, most] = cost.range.map(three);
        lines.push(format!(
            "{axis}: {before} and {after} {unit} a step, {before_each} and {after_each} for a million tokens, {} times as cheap ({least} to {most}) {}",
            three(cost.times),
            pays_symbol(cost.pays())
        ));
    }
    lines
}

/// What a step costs, with the name, the unit and how much of [`Rates::NAMES`] that is.
fn costs(cell: &MapCell) -> impl Iterator<Item = (&'static str, (&'static str, f64), &CellCost)> {
    cell.costs.iter().filter_map(|cost| {
        let at = Rates::NAMES.iter().position(|name| *name == cost.name)?;
        Some((AXES[at].0, AXES[at].1, cost))
    })
}

fn gigabytes(bytes_per_s: f64) -> String {
    format!("{} GB/s", three(bytes_per_s / 1e9))
}

/// Its memory nodes, in words that follow its bandwidth.
fn pool_of(cell: &MapCell) -> String {
    cell.pool_bytes_per_s.map_or_else(String::new, |it| format!(", pool {}", gigabytes(it)))
}

/// Whether it pays, as tables have it.
fn pays_symbol(pays: Option<bool>) -> &'static str {
    match pays {
        Some(true) => "+",
        Some(false) => "-",
        None => "?",
    }
}

/// The map of time, and one of each cost.
fn tables(map: &FabricMap) -> Vec<(String, Vec<Vec<String>>)> {
    let time = rows(map, |cell| (cell.times, cell.pays()));
    let costs = costs(&map.own).enumerate().map(|(at, (axis, ..))| {
        let rows = rows(map, |cell| (cell.costs[at].times, cell.costs[at].pays()));
        (format!("how many times as cheap, by {axis}"), rows)
    });
    std::iter::once(("how many times as fast".to_owned(), time)).chain(costs).collect()
}

/// A row for each bandwidth of the platform that may pay and of its memory nodes, a column for each of the other.
fn rows(map: &FabricMap, of: impl Fn(&MapCell) -> (f64, Option<bool>)) -> Vec<Vec<String>> {
    let FabricMap { platforms: [there, other], cells, .. } = map;
    let [_, first] = cells.first().map_or([0.0; 2], |cell| cell.between_bytes_per_s);
    let is_first = |cell: &&MapCell| {
        cell.between_bytes_per_s[1] == first && cell.pool_bytes_per_s == cells[0].pool_bytes_per_s
    };
    let columns: Vec<_> =
        cells.iter().take_while(is_first).map(|cell| gigabytes(cell.between_bytes_per_s[0])).collect();
    let head = std::iter::once(format!("{other} beside {there}")).chain(columns.iter().cloned()).collect();
    let rows = cells.chunks(columns.len().max(1)).map(|row| {
        let name = format!("{}{}", gigabytes(row[0].between_bytes_per_s[1]), pool_of(&row[0]));
        std::iter::once(name)
            .chain(row.iter().map(|cell| {
                let (times, pays) = of(cell);
                format!("{} {}", three(times), pays_symbol(pays))
            }))
            .collect()
    });
    std::iter::once(head).chain(rows).collect()
}

/// A line for each cell.
fn csv(map: &FabricMap) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    let names = [
        "kind",
        "platform",
        "against",
        "between_bytes_per_s",
        "against_between_bytes_per_s",
        "pool_bytes_per_s",
    ];
    let figures = ["total_s", "against_total_s", "times", "times_least", "times_most", "pays"];
    let of_costs = costs(&map.own).flat_map(|(axis, _, cost)| {
        let name = cost.name;
        [
            name.into(),
            format!("against_{name}"),
            format!("{axis}_times"),
            format!("{axis}_times_least"),
            format!("{axis}_times_most"),
            format!("{axis}_pays"),
        ]
    });
    writer.write_record(names.into_iter().chain(figures).map(String::from).chain(of_costs))?;
    let FabricMap { platforms: [there, other], .. } = map;
    for cell in std::iter::once(&map.own).chain(&map.cells) {
        let MapCell { between_bytes_per_s: [from, to], pool_bytes_per_s, seconds, times, range, .. } = cell;
        let pool = pool_bytes_per_s.map_or_else(String::new, |it| it.to_string());
        let places =
            [map.kind.to_owned(), there.clone(), other.clone(), from.to_string(), to.to_string(), pool];
        let costs = cell.costs.iter().flat_map(|it| figures_of(it.step, it.times, it.range, it.pays()));
        let time = figures_of(*seconds, *times, *range, cell.pays());
        writer.write_record(places.into_iter().chain(time).chain(costs))?;
    }
    escaped_csv(writer)
}

/// What it takes on both, how many times as much, and whether that pays.
fn figures_of(
    both: [f64; 2],
    times: f64,
    range: [f64; 2],
    pays: Option<bool>,
) -> impl Iterator<Item = String> {
    let figures = both.into_iter().chain([times]).chain(range).map(|it| it.to_string());
    figures.chain([pays.map_or_else(String::new, |pays| pays.to_string())])
}
