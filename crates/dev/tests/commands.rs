//! The commands of `polder-dev`: what they refuse, and that they leave nothing when they are ended.

use std::process::{Command, Stdio};

use polder_mem::testing::expect_nothing_left;

fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
    for key in
        ["POLDER_POOL", "POLDER_HOST", "POLDER_COHERENCE", "POLDER_TIMEOUT", "POLDER_LOG", "POLDER_WRAP"]
    {
        command.env_remove(key);
    }
    // A file that is not there by accident.
    command.env("POLDER_CONFIG", "/dev/null").args(arguments.split(' '));
    command
}

fn say(arguments: &str) -> String {
    let output = command(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refusal(arguments: &str) -> String {
    let output = command(arguments).output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    line
}

#[test]
fn schedules_of_none_are_refused_and_canaries_are_chosen_and_replayed_by_name() {
    for line in ["verify -n 0", "verify ring -n 0"] {
        let output = command(line).output().unwrap();
        assert!(!output.status.success());
        assert!(String::from_utf8(output.stderr).unwrap().contains(": expected 1 or more"), "{line}");
    }
    let json = |arguments: &str| -> serde_json::Value { serde_json::from_str(&say(arguments)).unwrap() };
    let explored = json("verify barrier -n 50 --json");
    assert_eq!(
        (&explored["suite"], &explored["schedules"], &explored["failed"]),
        (&"barrier".into(), &50.into(), &0.into())
    );
    for kind in ["coherent", "software", "hdm-db"] {
        let explored = json(&format!("verify barrier --coherence {kind} -n 50 --json"));
        assert_eq!((&explored["failed"], &explored[kind]), (&0.into(), &50.into()), "{kind}");
    }
    // Processes that share their caches have no run on software: this schedule failed there.
    let left_out =
        command("verify run-directories --coherence software --replay --seed 815").output().unwrap();
    assert!(left_out.status.success());
    assert!(String::from_utf8(left_out.stderr).unwrap().contains("run-directories: not on software"));
    // What schedules went through is counted: hosts stop in one suite, and die in the other.
    let counted =
        |suite: &str, what: &str| json(&format!("verify {suite} -n 200 --json"))[what].as_u64().unwrap();
    assert!(counted("eviction", "operations") > 200 * 50);
    assert!(counted("eviction", "pauses") > 10);
    assert!(counted("ring-crashes", "process_deaths") > 10 && counted("ring-crashes", "host_deaths") > 10);
    assert!(json("verify --canaries ring-shared --json")["caught_at"].is_u64());
    assert_eq!(json("verify barrier --list --json")["name"], "barrier");
    let said = say("verify --canaries ring-shared");
    let [caught, again, sum] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert!(caught.starts_with("ring-shared-line: caught in schedule "), "{said}");
    assert_eq!(sum, "1 passed, 0 failed");
    let replay = again.trim().strip_prefix("see it again: polder-dev ").unwrap();
    let trace = say(replay);
    assert!(trace.contains("the last operations") && trace.contains("  host 1: "), "{trace}");
    assert!(refusal("verify --canaries ringlet").contains("no canary begins with \"ringlet\""));
    assert!(say("verify --canaries directory-check --list").starts_with("directory-check-then-set "));
}

#[test]
fn a_soak_opens_a_pool_only_where_it_plays_with_another_machine() {
    let line = refusal("soak --join 127.0.0.1:1 --pool /before");
    assert!(line.starts_with("polder: /before: no such file"), "{line}");
    let refused = refusal("soak --pool /before --kills 1");
    assert!(refused.contains("unless --listen or --join names another machine"), "{refused}");
    let help = say("bench objects --help");
    assert!(help.contains("--log") && !help.contains("--coherence"), "{help}");
}

#[test]
fn a_command_whose_output_cannot_be_written_says_so_in_one_line() {
    for arguments in ["verify --list", "soak --kills 1 --what push/software/alone"] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let ended = command(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(
            said, "polder: cannot write to stdout: No space left on device (os error 28)\n",
            "{arguments}"
        );
        assert_eq!(ended.status.code(), Some(1), "{arguments}");
    }
}

#[test]
fn a_benchmark_or_a_soak_that_is_told_to_end_leaves_no_process_and_no_pool() {
    for (arguments, signal) in [
        ("bench ring", "TERM"),
        ("bench objects", "KILL"),
        ("soak --doom stop --what pop", "INT"),
        ("soak --doom stop --what pop", "KILL"),
    ] {
        expect_nothing_left(&command(arguments), signal);
    }
}

#[test]
fn a_benchmark_that_is_killed_leaves_nothing_in_memory() {
    let mut bench = command("bench lines").stdout(Stdio::null()).spawn().unwrap();
    let begin = format!("polder-test-{}-", bench.id());
    let directory = loop {
        assert!(bench.try_wait().unwrap().is_none(), "it ended before it was seen in memory");
        let found = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().path());
        let mut found = found.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&begin));
        match found.next() {
            Some(directory) if directory.join("region").exists() => break directory,
            _ => std::thread::yield_now(),
        }
    };
    bench.kill().unwrap();
    bench.wait().unwrap();
    // A process that cleans up is told by the kernel.
    while directory.exists() {
        std::thread::yield_now();
    }
}
