//! `polder bench torch`: every collective and message through torch, started in Python, where the peers are at home.

use super::collectives::rows_of;
use super::row::Row;
use crate::Failure;

/// What to measure.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Numbers of processes, from 2 on.
    #[arg(long, num_args = 1.., default_values_t = [2, 4], value_parser = clap::value_parser!(u16).range(2..=64))]
    procs: Vec<u16>,
    /// Sizes in bytes [default: 4 KiB to 128 MiB].
    #[arg(long, num_args = 1..)]
    sizes: Vec<u64>,
    /// Operations by name, such as all-reduce [default: all].
    #[arg(long, num_args = 1..)]
    operations: Vec<String>,
    /// Rounds of each library at each size.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Runs the benchmark's Python half and hands on each row as it comes.
pub(super) fn run(
    arguments: &Arguments,
    row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let list = |option: &str, values: Vec<String>| match values.is_empty() {
        true => vec![],
        false => [vec![option.to_owned()], values].concat(),
    };
    let words = [
        list("--procs", arguments.procs.iter().map(u16::to_string).collect()),
        list("--sizes", arguments.sizes.iter().map(u64::to_string).collect()),
        list("--operations", arguments.operations.clone()),
        vec!["--rounds".to_owned(), arguments.rounds.to_string()],
    ];
    rows_of("polder.torch.bench", words.concat(), row)
}
