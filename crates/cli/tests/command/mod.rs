//! The command that is tested.

use std::process::Command;

/// The command of this build, or the one that POLDER names: scripts/test.sh names the installed one, which is optimised.
pub(crate) fn polder() -> Command {
    Command::new(std::env::var_os("POLDER").unwrap_or_else(|| env!("CARGO_BIN_EXE_polder").into()))
}
