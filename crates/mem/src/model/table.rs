//! The table of litmus tests: what the walk through every state of the model found, beside what is allowed.

use std::fmt;

use super::machine::BackInvalidation;
use super::walk::{Walked, walk, walk_deaths};
use crate::Coherence;
use crate::litmus::{DeathLitmus, Litmus};

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

/// What the walk through every state found of one test whose host may die.
#[derive(Clone, Debug)]
pub struct DeathRow {
    test: &'static DeathLitmus,
    software: Walked,
    coherent: Walked,
    /// On each machine of [`BackInvalidation::ALL`].
    hdm_db: Vec<(BackInvalidation, Walked)>,
}

impl DeathRow {
    /// Walks `test` on each kind of memory.
    #[must_use]
    pub fn of(test: &'static DeathLitmus) -> Self {
        let on = |coherence| walk_deaths(test, coherence, BackInvalidation::default());
        let hdm_db =
            BackInvalidation::ALL.map(|device| (device, walk_deaths(test, Coherence::HdmDb, device)));
        Self {
            test,
            software: on(Coherence::Software),
            coherent: on(Coherence::Coherent),
            hdm_db: hdm_db.into(),
        }
    }

    /// Whether exactly what is allowed was seen; where lines are poisoned, nothing else and not what a protocol fears.
    #[must_use]
    pub fn agrees(&self) -> bool {
        let same = |walked: &Walked, coherence, keeps_dirty| {
            walked.outcomes.iter().eq(self.test.allowed(coherence, keeps_dirty).iter())
        };
        let of_device = |(device, walked): &(BackInvalidation, Walked)| {
            let allowed = self.test.allowed(Coherence::HdmDb, device.keeps_dirty);
            match device.poisons {
                true => walked.outcomes.iter().all(|seen| seen.is_empty() || allowed.contains(&&seen[..])),
                false => same(walked, Coherence::HdmDb, device.keeps_dirty),
            }
        };
        same(&self.software, Coherence::Software, false)
            && same(&self.coherent, Coherence::Coherent, false)
            && self.hdm_db.iter().all(of_device)
    }
}

impl fmt::Display for DeathRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Litmus { name, feared, .. } = self.test.test;
        let seen = |walked: &Walked| list(walked.outcomes.iter().map(|outcome| &outcome[..]), feared);
        let states = self.hdm_db.iter().map(|(_, walked)| walked.states).sum::<usize>();
        let mut cells = vec![name.to_string(), programs(&self.test.test), self.test.dies.to_string()];
        cells.push(seen(&self.software));
        cells.extend(self.hdm_db.iter().map(|(_, walked)| seen(walked)));
        cells.extend([seen(&self.coherent), states.to_string()]);
        write!(f, "| {} |", cells.join(" | "))
    }
}

/// The table of docs/memory-model.md of the tests whose host may die.
#[must_use]
pub fn death_table(rows: &[DeathRow]) -> String {
    let mut text = String::from(
        "| test | threads | dies | software | hdm-db, written back | written back, poison | hdm-db, kept dirty | kept dirty, poison | coherent | states of hdm-db |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
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

    use super::super::walk::walk_on;
    use super::*;
    use crate::litmus::{DEATHS, TESTS};

    /// Walked once for all tests.
    fn rows() -> &'static [Row] {
        static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
        ROWS.get_or_init(|| TESTS.iter().map(Row::of).collect())
    }

    fn death_rows() -> &'static [DeathRow] {
        static ROWS: OnceLock<Vec<DeathRow>> = OnceLock::new();
        ROWS.get_or_init(|| DEATHS.iter().map(DeathRow::of).collect())
    }

    #[test]
    fn every_litmus_test_shows_what_is_allowed_and_nothing_else() {
        for row in rows() {
            assert!(row.agrees(), "{row}");
        }
    }

    #[test]
    fn every_litmus_test_with_a_death_shows_what_is_allowed_and_nothing_else() {
        for row in death_rows() {
            assert!(row.agrees(), "{row}");
        }
    }

    #[test]
    fn where_nobody_dies_and_lines_go_from_host_to_host_hdm_db_shows_what_coherent_memory_does() {
        let device = BackInvalidation { keeps_dirty: true, poisons: false };
        for test in TESTS {
            for walked in [walk(test, Coherence::HdmDb), walk_on(test, Coherence::HdmDb, device)] {
                assert!(
                    walked.outcomes.iter().eq(test.coherent.iter()),
                    "{}: {:?}",
                    test.name,
                    walked.outcomes
                );
            }
        }
    }

    /// `POLDER_BLESS=1 cargo test -p polder-mem litmus` writes the tables anew.
    #[test]
    fn the_litmus_tables_in_the_documentation_are_the_ones_that_the_model_makes() {
        const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/memory-model.md");
        let old = fs::read_to_string(PAGE).unwrap();
        let new = replaced(&old, "litmus", &table(rows()));
        let new = replaced(&new, "deaths", &death_table(death_rows()));
        if std::env::var_os("POLDER_BLESS").is_some() {
            fs::write(PAGE, new).unwrap();
        } else {
            assert!(
                old == new,
                "a litmus table is out of date; run POLDER_BLESS=1 cargo test -p polder-mem litmus"
            );
        }
    }

    /// `page` with other text between its marks of this name.
    fn replaced(page: &str, name: &str, text: &str) -> String {
        let (begin, end) = (format!("<!-- {name}:begin -->\n"), format!("<!-- {name}:end -->"));
        let (head, rest) = page.split_once(&begin).expect("the mark where the table begins");
        let (_, tail) = rest.split_once(&end).expect("the mark where the table ends");
        format!("{head}{begin}{text}{end}{tail}")
    }
}
