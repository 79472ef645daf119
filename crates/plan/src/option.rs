//! Options that are text until a command reads them, so that a wrong one gets one line that names it.

use clap::Args;
use polder_platform::{Quantity, Unit};
use polder_sim::GivenError;
use polder_sim::memory::MemoryError;

use crate::Failure;

/// A machine that has racks.
#[derive(Args)]
pub(super) struct Machine {
    /// The machine: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "PLATFORM")]
    pub(super) platform: String,
    /// Kind of rack, if the platform has several [default: the first by name].
    #[arg(long, value_name = "NAME")]
    pub(super) rack: Option<String>,
}

/// The quantity that an option gives.
pub(super) fn quantity<U: Unit>(option: &str, text: &str) -> Result<Quantity<U>, Failure> {
    Quantity::parse(text).map_err(|problem| Failure(format!("{option}: {problem}")))
}

/// That of an option which may be left out.
pub(super) fn given<U: Unit>(option: &str, text: Option<&str>) -> Result<Option<Quantity<U>>, Failure> {
    text.map(|text| quantity(option, text)).transpose()
}

/// What is wrong with an option's value.
pub(super) fn wrong(GivenError { key, problem }: &GivenError) -> Failure {
    Failure(format!("--{key}: {problem}"))
}

/// The same, or what else is wrong with a question about memory.
pub(super) fn of_memory(error: MemoryError) -> Failure {
    match error {
        MemoryError::Given(error) => wrong(&error),
        other => other.into(),
    }
}
