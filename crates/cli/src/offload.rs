//! `polder offload`: what a training script keeps in memory, and what would place it.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueHint};

use polder_measure::python;
use polder_platform::shell_word;

use crate::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a training script until each of its optimizers has taken a step. Print its memory by object, the first context that
    /// will not fit, and the lines that place it.
    Check(CheckArguments),
}

#[derive(Args)]
pub(crate) struct CheckArguments {
    /// The file of `polder probe`, whose tiers the answer names.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    platform: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// The script, as `python SCRIPT` runs it, and all that it is given: options of the check stand before it.
    #[arg(trailing_var_arg = true, required = true, value_name = "SCRIPT", value_hint = ValueHint::FilePath)]
    script: Vec<PathBuf>,
}

pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    let Command::Check(CheckArguments { platform, json, script: words }) = command;
    let [script, ..] = &words[..] else { return Err(Failure("expected a script".to_owned())) };
    let python = python()?;
    expect_torch(&python)?;
    let mut child = std::process::Command::new(python);
    child.args(["-P", "-m", "polder.offload.check"]);
    if let Some(platform) = platform {
        child.arg("--platform").arg(platform);
    }
    if *json {
        child.arg("--json");
    }
    let status = child.args(words).status()?;
    match (status.code(), status.signal()) {
        (Some(code), _) => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
        (None, Some(signal)) if signal == signal_hook::consts::signal::SIGKILL => Err(Failure(format!(
            "{}: killed before its first step ended; if the kernel did it, memory was short: use a smaller batch for the check",
            script.display()
        ))),
        (None, signal) => {
            Err(Failure(format!("{}: ended by signal {}", script.display(), signal.unwrap_or_default())))
        }
    }
}

/// Finds out before the check, which is a module of Python, that it can be imported.
fn expect_torch(python: &Path) -> Result<(), Failure> {
    let is_there = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    let ended = std::process::Command::new(python).args(["-P", "-c", is_there]).status()?;
    match ended.success() {
        true => Ok(()),
        false => Err(Failure(format!(
            "a check needs PyTorch, which is not installed; {} -m pip install torch",
            shell_word(&python.to_string_lossy())
        ))),
    }
}
