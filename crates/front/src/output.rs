//! What commands print: where nobody can read it, a command ends with one line that says so.

use std::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Failure;

/// Prints to stdout. That it cannot be printed unwinds to the end of the command.
pub fn print(words: fmt::Arguments<'_>) {
    if let Err(error) = std::io::stdout().write_fmt(words) {
        resume_unwind(Box::new(unwritten(&error)));
    }
}

/// Prints to stderr; of one that cannot be written to nobody can be told.
pub fn complain(words: fmt::Arguments<'_>) {
    drop(std::io::stderr().write_fmt(words));
}

/// What `work` returns, or that what it printed could not be written.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let worked = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| match panic.downcast() {
        Ok(failure) => Err(*failure),
        Err(panic) => resume_unwind(panic),
    })?;
    match std::io::stdout().flush() {
        Ok(()) => Ok(worked),
        Err(error) => Err(unwritten(&error)),
    }
}

pub(crate) fn unwritten(error: &std::io::Error) -> Failure {
    Failure(format!("cannot write to stdout: {error}"))
}
