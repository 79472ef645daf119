//! Real processes that are killed and stopped at any memory operation, and survivors that go on: `polder soak`.

use std::process::Command;

/// Plays a soak and returns what it sums up at its end: a line for each scene, and one for all. Whatever fails prints its seed.
fn soak(arguments: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    let output = command.args(["soak", "--log", "error"]).args(arguments.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "polder soak {arguments}\n{said}{failed}");
    let sums = said.lines().skip_while(|line| !line.contains(" of ")).collect::<Vec<_>>();
    sums.join("\n")
}

/// The processes that the last line counts: those that died in the middle of what they did.
fn killed(summary: &str) -> u64 {
    let (before, _) = summary.rsplit_once(" processes killed").expect(summary);
    before.rsplit(' ').next().and_then(|number| number.parse().ok()).expect(summary)
}

#[test]
fn survivors_go_on_after_ten_thousand_kills_at_every_memory_operation_of_a_push_a_create_and_an_all_reduce() {
    let halves = [
        "--once --seed 0 --what push,create/software/shared,all-reduce/software/shared",
        "--once --seed 0 --what create/coherent/alone",
    ];
    let killed: u64 = std::thread::scope(|scope| {
        let soaks = halves.map(|half| scope.spawn(|| soak(half)));
        let ends = soaks.map(|soak| soak.join().unwrap());
        ends.iter().for_each(|end| println!("{end}"));
        ends.iter().map(|end| killed(end)).sum()
    });
    assert!(killed >= 10_000, "{killed} kills only");
}

#[test]
fn a_process_that_attaches_where_another_was_killed_may_be_killed_as_well() {
    println!("{}", soak("--kills 600 --seed 0 --what attach,pop,stream"));
}

#[test]
fn nothing_is_left_of_jobs_whose_endpoints_are_killed_anywhere() {
    println!("{}", soak("--kills 300 --seed 0 --what job"));
}

#[test]
fn a_process_that_stands_still_is_named_and_nothing_is_lost_when_it_goes_on() {
    println!("{}", soak("--doom stop --kills 200 --seed 0"));
}

#[test]
fn a_soak_leaves_nothing_behind() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    let command = command.args(["soak", "--kills", "3", "--what", "push/software/shared"]);
    let child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let pid = child.id();
    assert!(child.wait_with_output().unwrap().status.success());
    let left = std::fs::read_dir("/dev/shm").unwrap().flatten();
    let prefix = format!("polder-test-{pid}-");
    let left: Vec<_> = left.filter(|file| file.file_name().to_string_lossy().starts_with(&prefix)).collect();
    assert!(left.is_empty(), "{left:?}");
}
