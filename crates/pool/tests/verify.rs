//! Some thousands of schedules of every suite, and every mutant.

use polder_mem::model::Explorer;
use polder_pool::verify::{canaries, suites};

#[test]
fn no_schedule_of_any_suite_fails() {
    for suite in suites() {
        let report = suite.explore(3000);
        println!("{report}");
        report.expect_none();
    }
}

#[test]
fn every_mutant_is_caught_or_argued_harmless() {
    for suite in suites() {
        match suite.mutants(&Explorer::new(suite.name, 30_000).threads(2)) {
            Ok(found) => println!("{}: {} mutants", suite.name, found.len()),
            Err(table) => panic!("{table}"),
        }
    }
}

#[test]
fn every_protocol_that_is_known_to_be_wrong_is_caught() {
    for suite in canaries() {
        println!("{}", suite.explore(50_000).expect_failure().seed);
    }
}
