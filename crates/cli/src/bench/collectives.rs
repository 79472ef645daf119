//! `polder bench collectives`: started in Python, where the peers are at home.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::row::Row;
use crate::Failure;
use crate::scratch::{Scratch, Tied};

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

/// An option with its values; nothing where there are none, so that the default holds.
pub(super) fn list(option: &str, values: impl IntoIterator<Item = impl ToString>) -> Vec<String> {
    let values: Vec<_> = values.into_iter().map(|it| it.to_string()).collect();
    match values.is_empty() {
        true => vec![],
        false => [vec![option.to_owned()], values].concat(),
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

/// Runs a benchmark that is a module of Python, and hands on each row as it comes.
pub(super) fn rows_of(
    module: &str,
    words: impl IntoIterator<Item = String>,
    mut row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let python = python()?;
    let mut command = Command::new(&python);
    command.args(["-P", "-m", module]).args(words).stdout(Stdio::piped());
    // Its pools go when it is killed.
    let scratch = Scratch::new()?;
    command.env("POLDER_BENCH_FOLDER", scratch.path());
    let mut tied = Tied::spawn(command.stdin(Stdio::null()))
        .map_err(|error| Failure(format!("{}: {error}", python.display())))?;
    let output = tied.child.stdout.take().ok_or_else(|| Failure("the benchmark has no output".to_owned()))?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        let parsed =
            serde_json::from_str(&line).map_err(|_| Failure(format!("no row of a benchmark: {line}")))?;
        row(&parsed)?;
    }
    let status = tied.child.wait()?;
    if status.success() { Ok(()) } else { Err(Failure(format!("{}: {status}", python.display()))) }
}

/// The Python beside this program, as `make setup` puts it.
pub(crate) fn python() -> Result<PathBuf, Failure> {
    let python = std::env::current_exe()?.with_file_name("python");
    match python.exists() {
        true => Ok(python),
        false => Err(Failure(format!(
            "{} does not exist: Python is needed, the one that polder was installed into; try .venv/bin/polder",
            python.display()
        ))),
    }
}
