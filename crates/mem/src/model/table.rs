//! The table of litmus tests: what the walk through every state of the model found, beside what is allowed.

use std::fmt;

use super::walk::{Walked, walk};
use crate::Coherence;
use crate::litmus::Litmus;

/// What the walk through every state found of one test.
#[derive(Clone, Debug)]
pub struct Row {
    test: &'static Litmus,
    software: Walked,
    coherent: Walked,
}

impl Row {
    /// Walks `test` on both kinds of memory.
    #[must_use]
    pub fn of(test: &'static Litmus) -> Self {
        Self { test, software: walk(test, Coherence::Software), coherent: walk(test, Coherence::Coherent) }
    }

    /// Whether exactly what is allowed was seen.
    #[must_use]
    pub fn agrees(&self) -> bool {
        let same = |walked: &Walked, allowed: &[&[u64]]| walked.outcomes.iter().eq(allowed.iter());
        same(&self.software, self.test.allowed) && same(&self.coherent, self.test.coherent)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let test = self.test;
        let seen = |walked: &Walked| list(walked.outcomes.iter().map(|outcome| &outcome[..]), test.feared);
        let cells = [
            test.name.to_string(),
            programs(test),
            list(test.allowed.iter().copied(), test.feared),
            seen(&self.software),
            list(test.forbidden().iter().map(|outcome| &outcome[..]), test.feared),
            seen(&self.coherent),
            self.software.states.to_string(),
        ];
        write!(f, "| {} |", cells.join(" | "))
    }
}

/// The table of docs/memory-model.md.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "An outcome is what the reads saw, host by host and from left to right. If nothing is read, it is the words `X` and `X.1` in\n\
         memory at the end. Bold marks an outcome that would break a protocol. `X`, `X.1` and `X.2` share a line. `mfence*` is an `mfence` on\n\
         software-coherent memory. On coherent memory it is nothing, and no flush is made either. \"Allowed\" was written by hand from\n\
         the rules above; \"seen\" is what the walk through every state found.\n\
         \n\
         | test | threads | allowed | seen | forbidden | seen on coherent memory | states |\n|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        text.push_str(&format!("{row}\n"));
    }
    text
}

fn programs(test: &Litmus) -> String {
    let threads = test.threads.iter().map(|thread| {
        let steps: Vec<String> = thread.steps.iter().map(ToString::to_string).collect();
        format!("host {}: `{}`", thread.host, steps.join("; "))
    });
    threads.collect::<Vec<_>>().join("<br>")
}

fn list<'a>(outcomes: impl Iterator<Item = &'a [u64]>, feared: &[u64]) -> String {
    let written = outcomes.map(|outcome| {
        let digits: String = outcome.iter().map(ToString::to_string).collect();
        match outcome {
            [] => "thrown away".to_string(),
            _ if outcome == feared => format!("**{digits}**"),
            _ => digits,
        }
    });
    let written: Vec<String> = written.collect();
    if written.is_empty() { "none".into() } else { written.join(" ") }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::OnceLock;

    use super::*;
    use crate::litmus::TESTS;

    /// Walked once for all tests.
    fn rows() -> &'static [Row] {
        static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
        ROWS.get_or_init(|| TESTS.iter().map(Row::of).collect())
    }

    #[test]
    fn every_litmus_test_shows_what_is_allowed_and_nothing_else() {
        for row in rows() {
            assert!(row.agrees(), "{row}");
        }
    }

    /// `POLDER_BLESS=1 cargo test -p polder-mem litmus` writes the table anew.
    #[test]
    fn the_table_in_the_documentation_is_the_one_that_the_model_makes() {
        const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/memory-model.md");
        let page = fs::read_to_string(PAGE).unwrap();
        let (head, rest) =
            page.split_once("<!-- litmus:begin -->\n").expect("the mark where the table begins");
        let (old, tail) = rest.split_once("<!-- litmus:end -->").expect("the mark where the table ends");
        let new = table(rows());
        if std::env::var_os("POLDER_BLESS").is_some() {
            fs::write(PAGE, format!("{head}<!-- litmus:begin -->\n{new}<!-- litmus:end -->{tail}")).unwrap();
        } else {
            assert!(
                old == new,
                "the litmus table is out of date; run POLDER_BLESS=1 cargo test -p polder-mem litmus"
            );
        }
    }
}
