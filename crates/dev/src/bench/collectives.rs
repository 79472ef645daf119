//! `polder-dev bench collectives`: started in Python, where the peers are at home.

use polder_measure::{Row, list, rows_of};

use crate::Failure;

/// How often each contender is measured.
#[derive(clap::Args)]
pub(crate) struct Rounds {
    /// Rounds of each library at each size.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
}

impl Rounds {
    /// As the benchmark's Python half takes them.
    pub(super) fn words(&self) -> Vec<String> {
        list("--rounds", [self.rounds])
    }
}

/// What collectives are measured with.
#[derive(clap::Args)]
pub(crate) struct Runs {
    /// Numbers of processes, from 2 on.
    #[arg(long, num_args = 1.., default_values_t = [2, 4], value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(crate) procs: Vec<u16>,
    /// Sizes in bytes [default: 4 KiB to 128 MiB].
    #[arg(long, num_args = 1..)]
    pub(crate) sizes: Vec<u64>,
    #[command(flatten)]
    pub(crate) rounds: Rounds,
}

impl Runs {
    /// As the benchmark's Python half takes them.
    pub(super) fn words(&self) -> Vec<String> {
        [list("--procs", &self.procs), list("--sizes", &self.sizes), self.rounds.words()].concat()
    }
}

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) runs: Runs,
    /// Leave out gloo and Open MPI.
    #[arg(long)]
    pub(crate) alone: bool,
    /// Keep each rank on one processor, in turn.
    #[arg(long)]
    pub(crate) pin: bool,
    /// Leave out calls from Rust, as a program without Python makes them.
    #[arg(long)]
    pub(crate) without_rust: bool,
}

/// Runs the benchmark's Python half and hands on each row as it comes.
pub(crate) fn run(
    arguments: &Arguments,
    row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut words = arguments.runs.words();
    let flags =
        [(arguments.alone, "--alone"), (arguments.pin, "--pin"), (arguments.without_rust, "--without-rust")];
    words.extend(flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.to_owned()));
    rows_of("polder.bench", words, row)
}
