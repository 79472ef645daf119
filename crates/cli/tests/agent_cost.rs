//! What `polder agent` costs, by getrusage. The test is alone in its process: it counts the children of it.

mod command;
mod recorded;

use std::{env, fs};

use nix::sys::resource::{UsageWho, getrusage};
use recorded::{agent, host, policy, put, text};

/// With the default period of two seconds a control round may take 10 ms of a core: 0.5%. It judges the command that users have, because
/// that of this build is not optimised.
#[test]
#[ignore = "POLDER has to name the installed command, as in scripts/test.sh"]
fn a_hundred_services_cost_under_half_a_percent_of_a_core_and_20_mb() {
    const ROUNDS: u32 = 100;
    const PERIOD_S: f64 = 2.0;
    assert!(env::var_os("POLDER").is_some(), "POLDER names no command");
    let folder = host(100);
    // In so short a period the link moves less than a page for each service: this much is what it moves in one of two seconds.
    put(folder.path(), "policy.toml", &format!("step = \"32MiB\"\n{}", policy(100, "1ms")));
    let command = &mut agent(
        folder.path(),
        &["--rounds", "100", "--listen", "127.0.0.1:0", "--record", "/record.jsonl"],
    );
    let before = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    let output = command.output().unwrap();
    let after = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    let cpu_s = seconds(after.user_time()) + seconds(after.system_time())
        - seconds(before.user_time())
        - seconds(before.system_time());
    let share = cpu_s / f64::from(ROUNDS) / PERIOD_S;
    // Of the largest child of this process, which is this one or smaller.
    let kib = after.max_rss();
    println!("{:.3}% of a core, {kib} KiB", 100.0 * share);
    let record = fs::read_to_string(folder.path().join("record.jsonl")).unwrap();
    assert_eq!(record.lines().count(), ROUNDS as usize, "it did its rounds");
    assert!(record.lines().last().unwrap().contains("over-high"), "and decided in each");
    assert!(share < 0.005, "{:.3}% of a core", 100.0 * share);
    assert!(kib * 1024 < 20_000_000, "{kib} KiB");
}
