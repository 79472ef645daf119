//! `polder-dev bench weights`: what it takes to load weights from a pool, started in Python, where engines are at home.

use polder_measure::{Row, list, rows_of};

use super::collectives::Rounds;
use crate::Failure;

/// What to measure.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Mebibytes of weights.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    mib: u32,
    /// How many processes load them at the same time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=60))]
    procs: u32,
    #[command(flatten)]
    rounds: Rounds,
}

/// Runs the benchmark's Python half and hands on each row as it comes.
pub(super) fn run(
    arguments: &Arguments,
    row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let words =
        [list("--mib", [arguments.mib]), list("--procs", [arguments.procs]), arguments.rounds.words()];
    rows_of("polder.weights.bench", words.concat(), row)
}
