//! Schedules of every suite with debug assertions and checks of overflow, which the installed command lacks. `make test` runs more of them
//! by that command, and every mutant and canary.

use polder_pool::verify::suites;

#[test]
fn no_schedule_of_any_suite_fails() {
    for suite in suites() {
        let report = suite.explore(3000);
        println!("{report}");
        report.expect_none();
    }
}
