//! What ends a job whose `polder mpi run` was killed: a process of its own, out of reach of Ctrl-C, that waits until its maker is
//! gone, kills the job's processes on this machine, and cleans up.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};

use clap::Args;
use polder_attach::settings::Settings;

use super::cleanup::Cleanup;
use super::leftovers::MARK;
use crate::Failure;

/// What a maker says that needs no guard any more.
const OVER: &[u8] = b"over";

/// The guard, as its maker holds it.
#[derive(Debug)]
pub struct Guard(Child);

impl Guard {
    /// Marks the processes of a job without a pool that `command` is to start for `maker`, and starts its guard.
    ///
    /// # Errors
    /// When the guard cannot be started.
    pub fn over_job(command: &mut Command, maker: &str) -> Result<Self, Failure> {
        let cleanup = Cleanup::new(0, maker.to_owned());
        command.env(MARK, &cleanup.mark);
        Self::over(&cleanup, &[])
    }

    /// Starts the guard of a job.
    pub(super) fn over(cleanup: &Cleanup, variables: &[(String, String)]) -> Result<Self, Failure> {
        let mut guard = Command::new(polder_measure::polder()?);
        guard.args(["mpi", "guard"]).arg(serde_json::to_string(cleanup)?).envs(variables.iter().cloned());
        // The shim is for the ranks.
        guard.env_remove("LD_PRELOAD").stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        Ok(Self(guard.spawn()?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut told) = self.0.stdin.take() {
            // A guard that was killed cannot be told.
            drop(told.write_all(OVER));
        }
        drop(self.0.wait());
    }
}

/// What the guard is to clean up.
#[derive(Args)]
pub(crate) struct Guarded {
    #[arg(value_parser = parse)]
    cleanup: Cleanup,
}

fn parse(text: &str) -> Result<Cleanup, serde_json::Error> {
    serde_json::from_str(text)
}

/// Waits for the end of the maker. If that was killed, ends the job.
pub(super) fn run(guarded: &Guarded, settings: &Settings) -> Result<ExitCode, Failure> {
    let mut told = vec![];
    std::io::stdin().read_to_end(&mut told)?;
    if told != OVER {
        eprintln!("polder: {} was killed; its ranks were ended", guarded.cleanup.maker);
        guarded.cleanup.end(settings)?;
    }
    Ok(ExitCode::SUCCESS)
}
