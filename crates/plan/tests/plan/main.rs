//! `polder plan` as a user gives it, by subject.

mod fabric;
mod formats;
mod memory;
mod offload;
mod outputs;
mod pages;
mod search;
mod train;

use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// The front of this build, or of the command that POLDER names: scripts/test.sh names the installed one, which is optimised.
fn front() -> Command {
    let mut command = match std::env::var_os("POLDER") {
        Some(polder) => {
            let mut command = Command::new(polder);
            command.arg("plan");
            command
        }
        None => Command::new(env!("CARGO_BIN_EXE_polder-plan")),
    };
    command.env("POLDER_CONFIG", "/dev/null");
    command
}

fn plan(arguments: &str) -> Output {
    front().args(arguments.split(' ')).output().unwrap()
}

fn stdout_of(arguments: &str) -> String {
    let Output { status, stdout, stderr } = plan(arguments);
    assert!(status.success(), "{arguments}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn refused(arguments: &str) -> String {
    let Output { status, stderr, .. } = plan(arguments);
    assert!(!status.success(), "{arguments}");
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr.trim_end().to_owned()
}

fn json(arguments: &str) -> Value {
    serde_json::from_str(&stdout_of(arguments)).unwrap()
}

fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}
