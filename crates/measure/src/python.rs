//! Benchmarks and measurements that are modules of Python, where their peers are at home.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::{Failure, Row, Scratch, Tied};

/// An option with its values; nothing where there are none, so that the default holds.
pub fn list(option: &str, values: impl IntoIterator<Item = impl ToString>) -> Vec<String> {
    let values: Vec<_> = values.into_iter().map(|it| it.to_string()).collect();
    match values.is_empty() {
        true => vec![],
        false => [vec![option.to_owned()], values].concat(),
    }
}

/// Runs a benchmark that is a module of Python, and hands on each row as it comes.
pub fn rows_of(
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

/// The installed `polder`: this program, or that of the checkout in which `polder-dev` was built.
///
/// # Errors
/// When there is none.
pub fn polder() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe()?;
    if own.file_name().is_some_and(|name| name == "polder") {
        return Ok(own);
    }
    // .cache/dev/polder-dev, or target/release/polder-dev.
    let checkout = own.ancestors().nth(3).unwrap_or(&own);
    let polder = checkout.join(".venv/bin/polder");
    match polder.exists() {
        true => Ok(polder),
        false => Err(Failure(format!("{} does not exist: `make setup` installs it", polder.display()))),
    }
}

/// The Python beside the installed `polder`, as `make setup` puts it.
///
/// # Errors
/// When there is none.
pub fn python() -> Result<PathBuf, Failure> {
    let python = polder()?.with_file_name("python");
    match python.exists() {
        true => Ok(python),
        false => Err(Failure(format!(
            "{} does not exist: Python is needed, the one that polder was installed into; try .venv/bin/polder",
            python.display()
        ))),
    }
}
