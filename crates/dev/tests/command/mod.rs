//! The command that is tested.

use std::process::Command;

/// The command of this build, or the one that POLDER_DEV names: scripts/test.sh names that of `make dev`, which is optimised.
pub(crate) fn polder_dev() -> Command {
    Command::new(std::env::var_os("POLDER_DEV").unwrap_or_else(|| env!("CARGO_BIN_EXE_polder-dev").into()))
}
