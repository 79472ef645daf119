//! What `polder agent` costs: its calls of the kernel that read and write, and its memory. The test is alone in its process, because it looks
//! at the children of it.

mod command;
mod recorded;

use std::path::Path;
use std::process::Stdio;
use std::{env, fs};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use recorded::{agent, host, policy, put, text};

/// Calls that read and write, in a run of so many rounds.
fn calls(root: &Path, rounds: u64) -> u64 {
    let rounds = rounds.to_string();
    let record = root.join("record.jsonl");
    let more = ["--rounds", &rounds, "--listen", "127.0.0.1:0", "--record", record.to_str().unwrap()];
    let mut child =
        agent(root, &more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let pid = Pid::from_raw(child.id().cast_signed());
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
    // It has ended, and is not reaped: what the kernel counted is final, and still there.
    let io = text(&fs::read(format!("/proc/{pid}/io")).unwrap());
    assert!(child.wait().unwrap().success());
    let count = |name: &str| -> u64 {
        io.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).expect(name)
    };
    count("syscr:") + count("syscw:")
}

/// The same of one round. What a start and an end take is in both runs.
fn calls_of_a_round(root: &Path) -> u64 {
    const ROUNDS: u64 = 15;
    let begin = calls(root, ROUNDS);
    drop(fs::remove_file(root.join("record.jsonl")));
    let all = calls(root, 2 * ROUNDS);
    let record = fs::read_to_string(root.join("record.jsonl")).unwrap();
    assert_eq!(record.lines().count() as u64, 2 * ROUNDS, "it did its rounds");
    assert!(record.lines().all(|line| line.contains("over-high")), "and decided in each");
    (all - begin).div_ceil(ROUNDS)
}

/// A file takes two reads, the second of which finds its end: four files of a service, one more of one that moves, and a write.
const OF_A_SERVICE: u64 = 11;
/// One that is opted out, and has bytes on the slow tier: four files and its nodes; then its nodes, their setting, two writes, and what is left.
const OF_AN_OPT_OUT: u64 = 18;
/// Node memory, counts of the host, the state, the record and a folder of huge pages.
const OF_THE_HOST: u64 = 40;

#[test]
fn a_round_reads_a_few_files_of_each_of_a_hundred_services_and_the_agent_has_20_mb() {
    let folder = host(100);
    // In so short a period the link moves less than a page for each service: this much is what it moves in one of two seconds.
    put(folder.path(), "policy.toml", &format!("step = \"32MiB\"\n{}", policy(100, "1ms")));
    let calls = calls_of_a_round(folder.path());
    println!("{calls} calls a round");
    assert!(calls <= 67 * OF_A_SERVICE + 33 * OF_AN_OPT_OUT + OF_THE_HOST, "{calls} calls");
    assert!(calls > 100 * 8, "the control: {calls} calls");
    expect_little_memory();
}

/// The installed command has 20 MB. That of this build is not optimised, and larger.
fn expect_little_memory() {
    let kib = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    println!("{kib} KiB");
    assert!(kib * 1024 < 20_000_000 || env::var_os("POLDER").is_none(), "{kib} KiB");
}

#[test]
fn a_round_reads_the_files_of_two_hundred_while_all_of_a_thousand_services_move() {
    let folder = host(1000);
    let mut text = "step = \"8GiB\"\nperiod = \"1ms\"\n".to_owned();
    for service in 0..1000 {
        text += &format!(
            "[service.s{service}]\ncgroup = \"/system.slice/s{service}.service\"\ntier = \"opt-in\"\nlocal_high = 0.5\n"
        );
    }
    put(folder.path(), "policy.toml", &text);
    let calls = calls_of_a_round(folder.path());
    println!("{calls} calls a round");
    assert!(calls <= 200 * OF_A_SERVICE + OF_THE_HOST, "{calls} calls");
    assert!(calls > 200 * 8, "the control: {calls} calls");
    expect_little_memory();
}
