//! Benchmarks that are modules of Python, where their peers are at home: `polder-dev` starts them, and hands on each row as it comes.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use clap::{Args, value_parser};
use polder_measure::{Row, Scratch, Tied, python};

use crate::Failure;

/// How often each contender is measured.
#[derive(Args)]
pub(crate) struct Rounds {
    /// Rounds of each library at each size.
    #[arg(long, default_value_t = 7, value_parser = value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
}

impl Rounds {
    /// As the benchmark's Python half takes them.
    pub(super) fn words(&self) -> Vec<String> {
        list("--rounds", [self.rounds])
    }
}

/// What collectives are measured with.
#[derive(Args)]
pub(crate) struct Runs {
    /// Numbers of processes, from 2 on.
    #[arg(long, num_args = 1.., default_values_t = [2, 4], value_parser = value_parser!(u16).range(2..=64))]
    pub(crate) procs: Vec<u16>,
    /// Sizes in bytes [default: 4 KiB to 128 MiB].
    #[arg(long, num_args = 1..)]
    pub(crate) sizes: Vec<u64>,
    #[command(flatten)]
    pub(crate) rounds: Rounds,
}

impl Runs {
    fn words(&self) -> Vec<String> {
        [list("--procs", &self.procs), list("--sizes", &self.sizes), self.rounds.words()].concat()
    }
}

/// Collectives through Python.
#[derive(Args)]
pub(crate) struct Collectives {
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

impl Collectives {
    pub(crate) fn run(&self, row: impl FnMut(&Row) -> Result<(), Failure>) -> Result<(), Failure> {
        let mut words = self.runs.words();
        let flags = [(self.alone, "--alone"), (self.pin, "--pin"), (self.without_rust, "--without-rust")];
        words.extend(flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.to_owned()));
        rows_of("polder.bench", words, row)
    }
}

/// Every collective and message through torch.
#[derive(Args)]
pub(super) struct Torch {
    #[command(flatten)]
    runs: Runs,
    /// Operations by name, such as all-reduce [default: all].
    #[arg(long, num_args = 1..)]
    operations: Vec<String>,
}

impl Torch {
    pub(super) fn run(&self, row: impl FnMut(&Row) -> Result<(), Failure>) -> Result<(), Failure> {
        let words = [self.runs.words(), list("--operations", &self.operations)];
        rows_of("polder.torch.bench", words.concat(), row)
    }
}

/// The optimizer's fused step.
#[derive(Args)]
pub(super) struct Offload {
    /// Millions of elements; 2 GB of memory for each 100.
    #[arg(long, num_args = 1.., default_values_t = [50, 200])]
    millions: Vec<u32>,
    /// Threads of a step.
    #[arg(long, num_args = 1.., default_values_t = [1, 2], value_parser = value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    #[command(flatten)]
    rounds: Rounds,
}

impl Offload {
    pub(super) fn run(&self, row: impl FnMut(&Row) -> Result<(), Failure>) -> Result<(), Failure> {
        let words =
            [list("--millions", &self.millions), list("--threads", &self.threads), self.rounds.words()];
        rows_of("polder.offload.bench", words.concat(), row)
    }
}

/// What a snapshot costs.
#[derive(Args)]
pub(super) struct Snapshot {
    /// Millions of parameters.
    #[arg(long, default_value_t = 10, value_parser = value_parser!(u32).range(1..=1000))]
    millions: u32,
    #[command(flatten)]
    rounds: Rounds,
}

impl Snapshot {
    pub(super) fn run(&self, row: impl FnMut(&Row) -> Result<(), Failure>) -> Result<(), Failure> {
        let words = [list("--millions", [self.millions]), self.rounds.words()];
        rows_of("polder.torch.bench_snapshot", words.concat(), row)
    }
}

/// What it takes to load weights from a pool.
#[derive(Args)]
pub(super) struct Weights {
    /// Mebibytes of weights.
    #[arg(long, default_value_t = 256, value_parser = value_parser!(u32).range(1..=65536))]
    mib: u32,
    /// How many processes load them at the same time.
    #[arg(long, default_value_t = 4, value_parser = value_parser!(u32).range(1..=60))]
    procs: u32,
    #[command(flatten)]
    rounds: Rounds,
}

impl Weights {
    pub(super) fn run(&self, row: impl FnMut(&Row) -> Result<(), Failure>) -> Result<(), Failure> {
        let words = [list("--mib", [self.mib]), list("--procs", [self.procs]), self.rounds.words()];
        rows_of("polder.weights.bench", words.concat(), row)
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
