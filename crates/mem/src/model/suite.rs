//! A protocol's suite, as `cargo test` and `polder-dev verify` run it.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::explore::{self, Explorer, Outcome, Report};
use super::mutants::{Harmless, Mutant, SiteKind, judge};
use crate::Coherence;

/// One protocol, as a function of a seed, with the mutants of it that do no harm.
#[derive(Clone)]
pub struct Suite {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What it shows, in a sentence.
    pub about: &'static str,
    run: Arc<dyn Fn(u64) -> Outcome + Send + Sync>,
    files: &'static [&'static str],
    harmless: &'static [Harmless],
    shares_caches: bool,
}

impl Suite {
    /// A suite whose mutants must all be caught.
    pub fn new(
        name: &'static str,
        about: &'static str,
        run: impl Fn(u64) -> Outcome + Send + Sync + 'static,
    ) -> Self {
        Self { name, about, run: Arc::new(run), files: &[""], harmless: &[], shares_caches: false }
    }

    /// Runs on this kind of memory alone, whatever kind its schedules draw.
    #[must_use]
    pub fn on(self, coherence: Coherence) -> Self {
        let run = self.run;
        Self { run: Arc::new(move |seed| explore::on(coherence, || run(seed))), ..self }
    }

    /// Says that its processes are of one host, whose caches the hardware keeps in step: it has no run on software.
    #[must_use]
    pub fn sharing_caches(self) -> Self {
        Self { shares_caches: true, ..self }
    }

    /// Whether its scenes can be on this kind of memory.
    #[must_use]
    pub fn can_be_on(&self, coherence: Coherence) -> bool {
        !self.shares_caches || coherence != Coherence::Software
    }

    /// Takes mutants from files whose paths end so only, for a suite that stands on protocols which other suites judge.
    #[must_use]
    pub fn mutates(mut self, files: &'static [&'static str]) -> Self {
        self.files = files;
        self
    }

    /// Lists the mutants that may survive.
    #[must_use]
    pub fn harmless(mut self, harmless: &'static [Harmless]) -> Self {
        self.harmless = harmless;
        self
    }

    /// Runs one schedule.
    ///
    /// # Errors
    /// Its failure.
    pub fn run(&self, seed: u64) -> Outcome {
        (self.run)(seed)
    }

    /// Runs `schedules` schedules on one OS thread, from seed 0, until the first failure.
    #[must_use]
    pub fn explore(&self, schedules: u64) -> Report {
        Explorer::new(self.name, schedules).run(|seed| self.run(seed))
    }

    /// The flushes and fences that it reaches within the schedules from which mutants are learned.
    ///
    /// # Panics
    /// When the suite fails.
    #[must_use]
    pub fn sites(&self, explorer: &Explorer<'_>) -> Vec<(&'static Location<'static>, SiteKind)> {
        explorer.sites(&|seed| self.run(seed))
    }

    /// Runs all mutants, each until it is caught or through all schedules, and holds the survivors against the list. A mutant of
    /// the list has schedules of its own: [`Explorer::listed`].
    ///
    /// # Errors
    /// The table, when a mutant survives that is not listed, or an entry of the list names none.
    ///
    /// # Panics
    /// When the suite fails without any change.
    pub fn mutants(&self, explorer: &Explorer<'_>) -> Result<Vec<Mutant>, String> {
        let mutants = explorer.mutants_of(self.files, self.harmless, |seed| self.run(seed));
        match judge(&mutants, self.harmless) {
            Ok(()) => Ok(mutants),
            Err(complaints) => {
                let table: Vec<String> = mutants.iter().map(ToString::to_string).collect();
                Err(format!("{}:\n{}\n\n{complaints}", self.name, table.join("\n")))
            }
        }
    }
}

impl fmt::Debug for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Suite {{ {}: {} }}", self.name, self.about)
    }
}
