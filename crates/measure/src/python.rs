//! The `polder` and the Python that are installed.

use std::path::PathBuf;

use crate::Failure;

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
