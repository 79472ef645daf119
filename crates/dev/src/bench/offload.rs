//! `polder-dev bench offload`: the optimizer's fused step, started in Python, where its peers are at home.

use polder_measure::{list, rows_of};

use super::collectives::Rounds;
use crate::Failure;
use polder_measure::Row;

/// What to measure.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Millions of elements; 2 GB of memory for each 100.
    #[arg(long, num_args = 1.., default_values_t = [50, 200])]
    millions: Vec<u32>,
    /// Threads of a step.
    #[arg(long, num_args = 1.., default_values_t = [1, 2], value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    #[command(flatten)]
    rounds: Rounds,
}

/// Runs the benchmark's Python half and hands on each row as it comes.
pub(super) fn run(
    arguments: &Arguments,
    row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let words = [
        list("--millions", &arguments.millions),
        list("--threads", &arguments.threads),
        arguments.rounds.words(),
    ];
    rows_of("polder.offload.bench", words.concat(), row)
}
