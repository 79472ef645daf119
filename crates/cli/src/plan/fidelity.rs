//! `--fidelity` of commands in which nothing shares a fabric.

use clap::Args;
use polder_sim::Fidelity;

use super::train::FidelityKind;
use crate::Failure;

/// How closely communication is looked at.
#[derive(Args)]
pub(super) struct ClosedForm {
    /// How closely communication is looked at: here in closed form alone.
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "L0")]
    fidelity: FidelityKind,
}

impl ClosedForm {
    /// Refuses what is more than a closed form; `why` says why there is no more, and what has it.
    pub(super) fn check(&self, command: &str, why: &str) -> Result<(), Failure> {
        match Fidelity::from(self.fidelity) {
            Fidelity::L0 => Ok(()),
            more => Err(Failure(format!(
                "--fidelity {}: plan {command} computes in closed form: {why}",
                more.name()
            ))),
        }
    }
}
