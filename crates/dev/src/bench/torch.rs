//! `polder-dev bench torch`: every collective and message through torch, started in Python, where the peers are at home.

use polder_measure::{list, rows_of};

use super::collectives::Runs;
use crate::Failure;
use polder_measure::Row;

/// What to measure.
#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    runs: Runs,
    /// Operations by name, such as all-reduce [default: all].
    #[arg(long, num_args = 1..)]
    operations: Vec<String>,
}

/// Runs the benchmark's Python half and hands on each row as it comes.
pub(super) fn run(
    arguments: &Arguments,
    row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let words = [arguments.runs.words(), list("--operations", &arguments.operations)];
    rows_of("polder.torch.bench", words.concat(), row)
}
