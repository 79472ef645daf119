//! `polder plan pays`: from which bandwidths on one fabric between racks is faster than another.

use clap::Args;
use polder_platform::Bandwidth;
use polder_sim::{FabricMap, FoundLayout, MapCell, PaysError, PaysQuestion, Tiers, accelerators};
use serde_json::json;

use super::fidelity::ClosedForm;
use super::option::accelerator_count;
use super::table::{self, say, three};
use super::train::{Subject, layout_line, none_fits, threads, with_bar};
use super::written::{Outputs, harmless};
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
    #[arg(long, value_name = "BANDWIDTH", value_delimiter = ',', value_parser = above_zero,
          default_value = "12.5 GB/s,25 GB/s,50 GB/s,100 GB/s,200 GB/s")]
    between: Vec<Bandwidth>,
    /// What an accelerator reads from the memory nodes of --against, such as "50 GB/s,100 GB/s" [default: as it is there].
    #[arg(long, value_name = "BANDWIDTH", value_delimiter = ',', value_parser = above_zero)]
    pool: Vec<Bandwidth>,
    #[command(flatten)]
    fidelity: ClosedForm,
    #[command(flatten)]
    outputs: Outputs,
    /// Threads [default: one for each core].
    #[arg(long, value_name = "COUNT")]
    threads: Option<usize>,
}

fn above_zero(text: &str) -> Result<Bandwidth, String> {
    let bandwidth = Bandwidth::parse(text)?;
    match bandwidth.value() > 0.0 {
        true => Ok(bandwidth),
        false => Err(format!("expected a bandwidth above 0, found {bandwidth}")),
    }
}

/// Prints the map.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.fidelity.check("pays", "it compares the fastest of all layouts at each point")?;
    let Arguments { subject, platform, against, between, pool, outputs, .. } = arguments;
    let request = subject.request(platform, Some(accelerator_count(&arguments.gpus)?), Tiers::All)?;
    let question = PaysQuestion { request: &request, against, between, pool };
    let map =
        with_bar(|progress| question.map(threads(arguments.threads), progress)).map_err(
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
    let rows = rows(&map);
    outputs.page(|| {
        let lines: Vec<_> =
            own(&map).into_iter().chain([BANDWIDTHS, LEGEND, map.note].map(String::from)).collect();
        super::page::filled(include_str!("pays.html"), &title, &json!({"rows": rows, "lines": lines}))
    })?;
    outputs.json.print(&map, || {
        say(&format!("{title}; how many times as fast, simulated"));
        own(&map).iter().for_each(|line| say(line));
        table::print(&rows);
        [BANDWIDTHS, LEGEND, map.note].into_iter().for_each(say);
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
    vec![
        format!(
            "as they are ({there} {from}, {other} {to}{pool}): {before} and {after} s, {} times as fast ({least} to {most}) {}",
            three(own.times),
            sign(own),
        ),
        format!("on {there}: {before_layout}"),
        format!("on {other}: {after_layout}"),
    ]
}

fn gigabytes(bytes_per_s: f64) -> String {
    format!("{} GB/s", three(bytes_per_s / 1e9))
}

/// Its memory nodes, in words that follow its bandwidth.
fn pool_of(cell: &MapCell) -> String {
    cell.pool_bytes_per_s.map_or_else(String::new, |it| format!(", pool {}", gigabytes(it)))
}

/// Whether it pays, as tables have it.
fn sign(cell: &MapCell) -> &'static str {
    match cell.pays() {
        Some(true) => "+",
        Some(false) => "-",
        None => "?",
    }
}

/// A row for each bandwidth of the platform that may pay and of its memory nodes, a column for each of the other.
fn rows(map: &FabricMap) -> Vec<Vec<String>> {
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
            .chain(row.iter().map(|cell| format!("{} {}", three(cell.times), sign(cell))))
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
    writer.write_record(names.into_iter().chain([
        "total_s",
        "against_total_s",
        "times",
        "times_least",
        "times_most",
        "pays",
    ]))?;
    let FabricMap { platforms: [there, other], .. } = map;
    for cell in std::iter::once(&map.own).chain(&map.cells) {
        let MapCell {
            between_bytes_per_s: [from, to],
            pool_bytes_per_s,
            seconds: [before, after],
            times,
            range: [least, most],
            ..
        } = cell;
        let pool = pool_bytes_per_s.map_or_else(String::new, |it| it.to_string());
        let places =
            [map.kind.to_owned(), there.clone(), other.clone(), from.to_string(), to.to_string(), pool];
        let figures = [before, after, times, least, most].map(f64::to_string);
        writer.write_record(
            places
                .into_iter()
                .chain(figures)
                .chain([cell.pays().map_or_else(String::new, |pays| pays.to_string())]),
        )?;
    }
    harmless(writer)
}
