//! `polder-dev bench mpi --figure`: the sweeps of figures 5 to 8 of the cMPI paper, as tables and as a picture.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use polder_attach::settings::ByteCount;

use super::{Bench, Case, Figures, Operation, Way, case};
use crate::Failure;
use polder_measure::python;
use polder_measure::size;
use polder_measure::{Better, Row, short, times};

/// What of which sweep.
#[derive(Args)]
pub(super) struct Sweep {
    /// The sweep of a figure of the cMPI paper instead, beside TCP: 5 and 6 are the bandwidth and the latency of one-sided
    /// messages, 7 and 8 those of two-sided ones. All of it takes a library about a quarter of an hour.
    #[arg(long, value_parser = clap::value_parser!(u16).range(5..=8))]
    pub(super) figure: Option<u16>,
    /// Ranks of the sweep, half of them origins, with commas between them; 2,4,8,16,32 when left out.
    #[arg(long, value_name = "RANKS", value_delimiter = ',', requires = "figure", value_parser = even)]
    ranks: Vec<u16>,
    /// Sizes of the sweep, such as 8B,64KiB; the powers of two from 1 B to 8 MiB when left out.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', requires = "figure", value_parser = up_to_longest)]
    sizes: Vec<ByteCount>,
    /// Draw the sweep into this file too: SVG, PNG or PDF, by its name.
    #[arg(long, value_name = "FILE", requires = "figure", value_hint = clap::ValueHint::FilePath)]
    plot: Option<PathBuf>,
}

const RANKS: [u16; 5] = [2, 4, 8, 16, 32];
/// What the pool has room for with the most ranks, and as far as the paper went.
const LONGEST: u64 = 8 << 20;

fn even(word: &str) -> Result<u16, String> {
    let ranks = word.parse().ok().filter(|ranks: &u16| ranks.is_multiple_of(2) && (2..=32).contains(ranks));
    ranks.ok_or_else(|| "expected an even number from 2 to 32".to_owned())
}

fn up_to_longest(word: &str) -> Result<ByteCount, String> {
    let size: ByteCount = word.parse()?;
    let is_in = (1..=LONGEST).contains(&size.0);
    is_in.then_some(size).ok_or_else(|| "expected a size from 1B to 8MiB".to_owned())
}

impl Sweep {
    /// The ranks and cases of a figure.
    pub(super) fn suites(&self, figure: u16) -> Vec<(u16, Vec<Case>)> {
        let operation = match figure {
            5 => Operation::PutStream,
            6 => Operation::Put,
            7 => Operation::Stream,
            _ => Operation::Latency,
        };
        let sizes: Vec<_> = match &self.sizes[..] {
            [] => (0..=LONGEST.ilog2()).map(|power| 1 << power).collect(),
            sizes => sizes.iter().map(|size| size.0 as usize).collect(),
        };
        let cases: Vec<_> = sizes.into_iter().map(|bytes| case(operation, bytes)).collect();
        let ranks = if self.ranks.is_empty() { &RANKS[..] } else { &self.ranks };
        ranks.iter().map(|&ranks| (ranks, cases.clone())).collect()
    }

    /// Finds out before a long sweep that it can be drawn after it.
    pub(super) fn expect_plot(&self) -> Result<(), Failure> {
        if self.plot.is_none() {
            return Ok(());
        }
        let python = python()?;
        let found = Command::new(&python).args(["-c", "import matplotlib"]).stderr(Stdio::null()).status()?;
        match found.success() {
            true => Ok(()),
            false => {
                let remedy = format!("{} -m pip install matplotlib, or leave out --plot", python.display());
                Err(Failure(format!("--plot draws with matplotlib, which is not installed; {remedy}")))
            }
        }
    }

    /// Draws the rows of a sweep, if that was asked for.
    pub(super) fn plot(&self, rows: &[Row]) -> Result<(), Failure> {
        self.plot.as_deref().map_or(Ok(()), |file| draw(rows, file))
    }
}

/// Python draws: it reads the rows as anybody else may.
fn draw(rows: &[Row], file: &Path) -> Result<(), Failure> {
    let python = python()?;
    let mut command = Command::new(&python);
    command.args(["-P", "-m", "polder.figures"]).arg(file).stdin(Stdio::piped());
    let mut child = command.spawn().map_err(|error| Failure(format!("{}: {error}", python.display())))?;
    if let Some(mut input) = child.stdin.take() {
        for row in rows {
            writeln!(input, "{}", serde_json::to_string(row)?)?;
        }
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(Failure(format!("{}: {status}", python.display()))) }
}

impl Bench<'_> {
    /// The sweep of so many ranks: a line for each size, a column for each way, and how many times better software
    /// coherence is than TCP, with the shim where there is one.
    pub(super) fn table(&self, figure: u16, ranks: u16, cases: &[Case], figures: &Figures) -> String {
        let goes = |way: &Way| cases.iter().any(|case| figures.contains_key(&(*way, case.word())));
        let ways: Vec<_> = Way::ALL.into_iter().filter(goes).collect();
        let soft = [Way::SoftwareShim, Way::Software].into_iter().find(|way| ways.contains(way));
        let beside = soft.map_or_else(String::new, |way| format!("  {} beside tcp", way.word()));
        let [first, ..] = cases else { return String::new() };
        let (metric, unit, better) = first.measure();
        let (library, what, rounds) = (self.install.library, first.operation.name(), self.arguments.rounds());
        let title = format!(
            "\nfigure {figure}, {library}, {ranks} ranks: {what}, {metric} in {unit}, median of {rounds}"
        );
        let heads: String = ways.iter().map(|way| format!("{:>14}", way.word())).collect();
        let mut lines = vec![title, format!("{:>8}{heads}{beside}", "size")];
        for case in cases {
            let median = |way| Some(case.sample(ranks, figures.get(&(way, case.word()))?)?.median);
            let cells: String = ways
                .iter()
                .map(|way| format!("{:>14}", median(*way).map_or_else(String::new, short)))
                .collect();
            let ratio = soft.and_then(median).zip(case.tcp(ranks, figures)).map(|(soft, tcp)| match better {
                Better::Less => tcp / soft,
                Better::More => soft / tcp,
            });
            let ratio = ratio.map_or_else(String::new, |ratio| format!("  {}", times(ratio)));
            lines.push(format!("{:>8}{cells}{ratio}", size(case.bytes)));
        }
        lines.join("\n")
    }
}

/// What the paper says in words of its own curves, on FPGA-based CXL memory of two hosts, beside TCP over CX-6 Dx
/// (section 4.2): the figure, where, and both.
const PUBLISHED: [(u16, &str, f64, Option<f64>); 5] = [
    (5, "16 KiB 8 procs", 7.42, None),
    (5, "at most", 8.6, Some(10.15)),
    (6, "1 B to 16 KiB", 12.0, Some(620.0)),
    (7, "at most", 6.05, Some(12.5)),
    (8, "below 64 KiB", 12.0, Some(55.0)),
];

/// The rows of what the paper published.
pub(super) fn published(figure: u16, case: Case) -> Vec<Row> {
    let (metric, unit, better) = case.measure();
    let of_figure = PUBLISHED.iter().filter(|(number, ..)| *number == figure);
    let row = |(_, place, value, tcp): &(u16, &str, f64, Option<f64>)| {
        let name = format!("figure {figure} {} {place} cMPI on CXL", case.operation.name());
        let row = Row::published("mpi", name, metric, *value, unit);
        tcp.map_or_else(|| row.clone(), |tcp| row.clone().beside("tcp over CX-6 Dx", tcp, better))
    };
    of_figure.map(row).collect()
}
