//! `polder-dev bench snapshot`: what a snapshot costs, started in Python, where torch's own checkpoints are at home.

use polder_measure::{list, rows_of};

use super::collectives::Rounds;
use crate::Failure;
use polder_measure::Row;

/// What to measure.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Millions of parameters.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    millions: u32,
    #[command(flatten)]
    rounds: Rounds,
}

/// Runs the benchmark's Python half and hands on each row as it comes.
pub(super) fn run(
    arguments: &Arguments,
    row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let words = [list("--millions", [arguments.millions]), arguments.rounds.words()];
    rows_of("polder.torch.bench_snapshot", words.concat(), row)
}
