//! What the suites go through. `make test` explores all of them by `polder-dev verify`, which has debug assertions there.

use polder_pool::verify::suites;

#[test]
fn schedules_of_services_reach_all_that_is_recovered_of_proxies() {
    for suite in suites().into_iter().filter(|suite| suite.name.starts_with("service")) {
        let report = suite.explore(3000);
        report.expect_none();
        let reached: Vec<_> = report.tally.reached.into_keys().collect();
        let all =
            ["shards after their step", "shards before their step", "shards of the living", "steps of heirs"];
        assert_eq!(reached, all, "{}", suite.name);
    }
}
