//! The checks of a scenario: each is printed, and the first that fails ends it.

/// Why a scenario ends early, in words.
pub type Failed = String;

/// How many checks held so far.
#[derive(Debug, Default)]
pub struct Checks(pub u32);

impl Checks {
    /// Prints whether `what` holds.
    ///
    /// # Errors
    /// `what`, when it does not.
    pub fn check(&mut self, holds: bool, what: &str) -> Result<(), Failed> {
        self.0 += 1;
        println!("check {}: {what}: {}", self.0, if holds { "holds" } else { "FAILS" });
        if holds { Ok(()) } else { Err(what.to_owned()) }
    }
}
