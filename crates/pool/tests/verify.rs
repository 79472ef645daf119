//! Schedules of every suite with debug assertions and checks of overflow, which the installed command lacks. `make test` runs more of them
//! by that command, and every mutant and canary.

use std::sync::Mutex;

use polder_pool::verify::suites;

#[test]
fn no_schedule_of_any_suite_fails() {
    let suites = Mutex::new(suites().into_iter());
    let next = || suites.lock().unwrap().next();
    let explore = || {
        while let Some(suite) = next() {
            let report = suite.explore(3000);
            println!("{report}");
            report.expect_none();
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(explore)));
    });
}
