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
            if suite.name.starts_with("service") {
                let reached: Vec<_> = report.tally.reached.into_keys().collect();
                let all = [
                    "shards after their step",
                    "shards before their step",
                    "shards of the living",
                    "steps of heirs",
                ];
                assert_eq!(reached, all, "what is recovered of proxies");
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(explore)));
    });
}
