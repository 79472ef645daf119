//! `polder agent` on copies of the files of a host: its endpoint, a changed policy, and why a service is as it is.

mod command;
mod recorded;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use polder_agent::write_host_with_pages;
use polder_mem::testing::Running;
use recorded::{agent, agent_with, host, policy, put, text};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{Resource, Rlimit, prlimit};

fn polder(arguments: &[&str], path: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_polder")).args(arguments).arg(path).output().unwrap()
}

/// An agent that is ended when the test is.
struct RunningAgent {
    program: Running,
    out: BufReader<std::process::ChildStdout>,
}

impl RunningAgent {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { program: Running(child), out }
    }

    fn round(&mut self) -> serde_json::Value {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    /// The address of its endpoint, and what else it says to stderr.
    fn endpoint(&mut self) -> (String, BufReader<ChildStderr>) {
        let mut errors = BufReader::new(self.program.0.stderr.take().unwrap());
        let mut told = String::new();
        errors.read_line(&mut told).unwrap();
        let address = told.trim().strip_prefix("polder: metrics at http://");
        let address = address.and_then(|rest| rest.strip_suffix("/metrics"));
        (address.unwrap_or_else(|| panic!("{told}")).to_owned(), errors)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.program.0.id()).unwrap()), signal).unwrap();
    }

    /// Ends it by a signal, and returns what else it printed.
    fn end(&mut self, signal: Signal) -> String {
        self.signal(signal);
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        assert!(self.program.0.wait().unwrap().success(), "{signal}");
        rest
    }
}

/// A host with so many services and a policy over them.
fn governed(services: usize) -> tempfile::TempDir {
    let folder = host(services);
    put(folder.path(), "policy.toml", &policy(services, "20ms"));
    folder
}

/// What the endpoint of an agent answers.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// `polder agent check` on the host below `root`.
fn check(root: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    command.args(["agent", "check", "--root"]).arg(root).arg("--policy").arg(root.join("policy.toml"));
    command.output().unwrap()
}

#[test]
fn the_endpoint_answers_and_a_changed_policy_is_taken_over_and_explained() {
    let folder = governed(3);
    let root = folder.path();
    let record = root.join("record.jsonl");
    let options = ["--json", "--listen", "127.0.0.1:0", "--record", record.to_str().unwrap()];
    let mut running = RunningAgent::start(agent(root, &options));
    let (address, mut errors) = running.endpoint();
    assert_eq!(running.round()["services"].as_array().unwrap().len(), 3);
    let metrics = get(&address, "/metrics");
    assert!(metrics.starts_with("HTTP/1.0 200"), "{metrics}");
    assert!(metrics.contains("application/openmetrics-text"), "{metrics}");
    assert!(metrics.contains("polder_service_bytes{service=\"s0\",tier=\"fast\"}"), "{metrics}");
    assert!(get(&address, "/").starts_with("HTTP/1.0 404"));
    assert!(get(&address, "/metrics?x=1").starts_with("HTTP/1.0 200"));

    let state: PathBuf = root.join("agent.state");
    let output = polder(&["agent", "explain", "s0", "--state"], &state);
    let why = text(&output.stdout);
    assert!(why.contains("it is over local_high") && why.contains("policy.toml line 6)"), "{why}");
    let output = text(&polder(&["agent", "explain", "nobody", "--state"], &state).stderr);
    assert!(output.contains("has no service \"nobody\"; it has s0, s1, s2"), "{output}");
    put(root, "other.txt", "no state\n");
    for command in [&["agent", "explain", "s0", "--state"][..], &["top", "--once", "--state"]] {
        let output = text(&polder(command, &root.join("other.txt")).stderr);
        assert!(
            output.contains("other.txt is no state of an agent (") && output.contains("--state"),
            "{output}"
        );
    }
    let table = polder(&["top", "--once", "--state"], &state);
    assert!(text(&table.stdout).contains("it is over local_high"), "{}", text(&table.stderr));
    // A mistake leaves the policy before.
    put(root, "policy.new", "period = \"20ms\"\npace = 3\n");
    fs::rename(root.join("policy.new"), root.join("policy.toml")).unwrap();
    running.signal(Signal::SIGHUP);
    let mut told = String::new();
    errors.read_line(&mut told).unwrap();
    assert!(told.contains("policy.toml: line 2: pace: unknown field") && told.contains("goes on"), "{told}");
    // A change is noticed without a signal.
    put(root, "policy.new", &policy(1, "20ms"));
    fs::rename(root.join("policy.new"), root.join("policy.toml")).unwrap();
    let changed =
        (0..500).map(|_| running.round()).find(|round| round["changes"] == 1).expect("it is noticed");
    assert_eq!(changed["services"].as_array().unwrap().len(), 1);
    let mut told = String::new();
    errors.read_line(&mut told).unwrap();
    assert!(told.ends_with("policy.toml: read again, and the next round goes by it\n"), "{told}");

    let rest = running.end(Signal::SIGTERM);
    assert!(rest.contains("restored /sys/kernel/mm/numa/demotion_enabled to \"false\""), "{rest}");
    let output = polder(&["agent", "replay"], &root.join("record.jsonl"));
    assert!(text(&output.stdout).contains("decided as recorded"), "{}", text(&output.stdout));
}

#[test]
fn a_host_has_one_agent_and_the_second_names_it() {
    let folder = governed(1);
    let root = folder.path();
    let other = |more: &[&str]| {
        let more = [&["--rounds", "1"], more].concat();
        agent_with(root, "/other.journal", "/other.state", &more).output().unwrap()
    };
    let mut running = RunningAgent::start(agent(root, &["--json"]));
    running.round();
    let named = format!(
        "another agent runs on this host: process {} with the journal /agent.journal; stop it",
        running.program.0.id()
    );
    for second in [agent(root, &["--listen", "127.0.0.1:0"]).output().unwrap(), other(&[])] {
        let said = text(&second.stderr);
        assert!(!second.status.success() && said.contains(&named) && !said.contains("metrics"), "{said}");
    }
    // What writes nothing runs beside it, and so does an agent of another tree.
    for beside in [other(&["--dry-run"]), check(root)] {
        assert!(beside.status.success(), "{beside:?}");
    }
    let another = governed(1);
    assert!(agent(another.path(), &["--rounds", "1"]).output().unwrap().status.success());
    // A kill leaves no lock, but settings, which come back before another journal is begun.
    running.signal(Signal::SIGKILL);
    running.program.0.wait().unwrap();
    assert_eq!(demotion(root), "true", "the control");
    let said = text(&other(&[]).stderr);
    let remedy = format!("polder agent restore --root {} --journal /agent.journal", root.display());
    assert!(
        said.contains("an agent that was killed left settings changed") && said.contains(&remedy),
        "{said}"
    );
    // Without the root, it would set what is noted on this machine itself, where this process may not.
    let journal = root.join("agent.journal");
    let itself = Command::new("unshare")
        .args(["--user", "--map-root-user", env!("CARGO_BIN_EXE_polder"), "agent", "restore", "--journal"])
        .arg(&journal)
        .output()
        .unwrap();
    let said = text(&itself.stderr);
    let refused = format!(
        "it notes settings of the copy below {0}, and would be restored to this machine itself; give --root {0}",
        root.display()
    );
    assert!(!itself.status.success() && said.contains(&refused), "{said}");
    assert_eq!((demotion(root).as_str(), journal.exists()), ("true", true));
    let again = polder(&["agent", "restore", "--journal", "/agent.journal", "--root"], root);
    assert!(again.status.success() && text(&again.stdout).contains("restored "), "{again:?}");
    assert!(other(&[]).status.success());
    assert_eq!(demotion(root), "false");
}

#[test]
fn an_agent_that_cannot_write_its_state_or_its_record_goes_on_says_so_once_and_writes_again() {
    let folder = governed(3);
    let root = folder.path();
    fs::create_dir(root.join("files")).unwrap();
    fs::write(root.join("no-folder"), "").unwrap();
    let record = root.join("files/record.jsonl");
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    command.args(["agent", "run", "--json", "--journal", "/agent.journal", "--state", "/files/agent.state"]);
    command
        .arg("--record")
        .arg(&record)
        .arg("--policy")
        .arg(root.join("policy.toml"))
        .arg("--root")
        .arg(root);
    let mut running = RunningAgent::start(command);
    running.round();
    let mut errors = BufReader::new(running.program.0.stderr.take().unwrap());
    let mut complaints = || {
        let mut said = [String::new(), String::new()];
        for line in &mut said {
            errors.read_line(line).unwrap();
        }
        // A folder may go between the two files of a round.
        said.sort_by_key(|line| line.contains("the record"));
        said
    };
    let exchange = || {
        renameat_with(CWD, root.join("files"), CWD, root.join("no-folder"), RenameFlags::EXCHANGE).unwrap()
    };
    let mut last = 0;
    for _ in 0..2 {
        exchange();
        let [state, recorded] = complaints();
        for (said, what) in [(state, "the state"), (recorded, "the record")] {
            let end = format!("the agent goes on, and tries to write {what} in each round\n");
            assert!(said.contains("files is a link or no folder") && said.ends_with(&end), "{said}");
        }
        for _ in 0..3 {
            last = running.round()["round"].as_u64().unwrap();
        }
        assert_eq!(demotion(root), "true", "it goes on");
        exchange();
        let [state, recorded] = complaints();
        for (said, what) in [(state, "agent.state: the state"), (recorded, "record.jsonl: the record")] {
            assert!(said.contains(&format!("{what} is written again; ")), "said once before: {said}");
        }
    }
    // As logs are moved away.
    fs::rename(&record, root.join("before.jsonl")).unwrap();
    while !record.exists() {
        running.round();
    }
    running.end(Signal::SIGTERM);
    assert_eq!(demotion(root), "false");
    let rounds = |path: &Path| -> Vec<(u64, bool)> {
        let lines = fs::read_to_string(path).unwrap();
        let rounds = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        rounds.map(|round| (round["round"].as_u64().unwrap(), round.get("past").is_some())).collect()
    };
    for path in [&record, &root.join("before.jsonl")] {
        let output = polder(&["agent", "replay"], path);
        assert!(text(&output.stdout).contains("decided as recorded"), "{output:?}");
        // Where rounds are missing, what they left is there.
        let rounds = rounds(path);
        assert!(rounds.windows(2).all(|pair| (pair[1].0 > pair[0].0 + 1) == pair[1].1), "{rounds:?}");
        assert_eq!(rounds[0].1, rounds[0].0 > 1, "{rounds:?}");
    }
    assert!(
        rounds(&root.join("before.jsonl")).iter().filter(|(_, has_past)| *has_past).count() == 2 && last > 0
    );
}

#[test]
fn an_agent_goes_on_when_the_disk_of_its_record_is_full_and_the_record_replays() {
    let folder = governed(3);
    let root = folder.path();
    put(root, "policy.toml", &policy(3, "1ms"));
    let disk = root.join("disk");
    fs::create_dir(&disk).unwrap();
    let script = "mount -t tmpfs -o size=16k none \"$1/disk\"
        \"$0\" agent run --rounds 60 --journal /agent.journal --state /agent.state --record \"$1/disk/r\" --policy \"$1/policy.toml\" --root \"$1\"
        df --output=avail \"$1/disk\" && \"$0\" agent replay \"$1/disk/r\"";
    let mut shell = Command::new("unshare");
    shell.args(["--user", "--map-root-user", "--mount", "sh", "-ec", script, env!("CARGO_BIN_EXE_polder")]);
    let output = shell.arg(root).output().unwrap();
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("decided as recorded"), "{out} {said}");
    assert_eq!(said.matches("No space left on device").count(), 1, "{said}");
    assert_eq!(demotion(root), "false");
}

#[test]
fn an_example_that_has_no_room_leaves_the_folder_empty() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "mount -t tmpfs -o size=64k none \"$1\"; \"$0\" agent example \"$1/host\" || ls -A \"$1/host\"";
    let mut shell = Command::new("unshare");
    shell.args(["--user", "--map-root-user", "--mount", "sh", "-ec", script, env!("CARGO_BIN_EXE_polder")]);
    let output = shell.arg(folder.path()).output().unwrap();
    assert!(text(&output.stderr).contains("No space left on device"), "{output:?}");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[test]
fn a_user_without_the_right_is_told_that_root_runs_the_agent() {
    let folder = governed(1);
    let root = folder.path();
    fs::create_dir(root.join("run")).unwrap();
    fs::set_permissions(root.join("run"), fs::Permissions::from_mode(0o555)).unwrap();
    // Without root's capabilities.
    let mut shell = Command::new("unshare");
    shell.args(["--user", env!("CARGO_BIN_EXE_polder"), "agent", "run", "--rounds", "1"]);
    let output =
        shell.arg("--policy").arg(root.join("policy.toml")).arg("--root").arg(root).output().unwrap();
    let said = text(&output.stderr);
    assert!(
        !output.status.success()
            && said.contains("Permission denied (os error 13); settings of a host are root's"),
        "{said}"
    );
}

#[test]
fn in_a_container_that_may_not_write_sys_the_agent_says_so_and_its_dry_run_works() {
    let folder = governed(1);
    let script = "mount --bind \"$1/sys\" \"$1/sys\" && mount -o remount,ro,bind \"$1/sys\"
        for more in --dry-run --json; do
            \"$0\" agent run --rounds 1 $more --journal /j --state /s --policy \"$1/policy.toml\" --root \"$1\" >&2 || echo ended with $?
        done";
    let mut shell = Command::new("unshare");
    shell.args(["--user", "--map-root-user", "--mount", "sh", "-ec", script, env!("CARGO_BIN_EXE_polder")]);
    let output = shell.arg(folder.path()).output().unwrap();
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(out, "ended with 1\n", "{said}");
    assert!(
        said.contains("demotion_enabled: Read-only file system") && said.contains("a container needs /sys"),
        "{said}"
    );
}

#[test]
fn a_file_that_is_no_record_is_refused_before_a_setting_is_changed() {
    let folder = governed(1);
    let root = folder.path();
    put(root, "fstab", "# <file system>\n");
    let record = root.join("fstab");
    for path in [record.clone(), root.join("policy.toml/record.jsonl")] {
        let output = agent(root, &["--rounds", "1", "--record", path.to_str().unwrap()]).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert!(text(&output.stderr).contains(&root.display().to_string()), "{output:?}");
    }
    assert_eq!(fs::read_to_string(record).unwrap(), "# <file system>\n");
    // Nor is a state that cannot be one taken for a full disk.
    let output = agent_with(root, "/agent.journal", "/sys", &["--rounds", "1"]).output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("/sys"), "{output:?}");
    assert_eq!(demotion(root), "false");
}

#[test]
fn a_policy_whose_goals_cannot_all_hold_is_warned_of_by_a_check_and_by_a_run() {
    const GIB: u64 = 1 << 30;
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let services = [
        ("/system.slice/s0.service", [30 * GIB, 10 * GIB]),
        ("/system.slice/s1.service", [30 * GIB, 10 * GIB]),
    ];
    write_host_with_pages(root, [64 * GIB, 128 * GIB], &services, 4096).unwrap();
    let bounds = |low: f64| {
        let service = |name| {
            format!("[service.{name}]\nunit = \"{name}.service\"\ntier = \"opt-in\"\nlocal_low = {low:?}\n")
        };
        put(root, "policy.toml", &format!("period = \"1ms\"\n{}{}", service("s0"), service("s1")));
    };
    let warned = |output: Output| -> usize {
        assert!(output.status.success(), "{output:?}");
        let said = text(&output.stderr);
        let warning = "policy.toml: not all goals can hold: the services are to have 72.0 GiB on the fast tier, which has 63.0 GiB for them \
            (64.0 GiB less 1.0 GiB that stay free): s0 36.0 GiB (local_low 0.9 of 40.0 GiB), s1 36.0 GiB (local_low 0.9 of 40.0 GiB)";
        assert_eq!(said.matches("warning: ").count(), said.matches(warning).count(), "{said}");
        said.matches(warning).count()
    };
    for (low, warnings) in [(0.9, 1), (0.7, 0)] {
        bounds(low);
        assert_eq!(warned(check(root)), warnings);
        assert_eq!(warned(agent(root, &["--rounds", "3"]).output().unwrap()), warnings);
    }
}

#[test]
fn an_agent_that_nobody_reads_any_more_restores_its_settings() {
    let folder = governed(1);
    let root = folder.path();
    let mut command = agent(root, &["--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    assert_eq!(demotion(root), "true", "the control");
    // As `polder agent run --json | head -1`.
    drop(out);
    let ended = child.wait_with_output().unwrap();
    let output = text(&ended.stderr);
    assert!(!ended.status.success() && output.contains("Broken pipe"), "{}: {output}", ended.status);
    assert_eq!(demotion(root), "false", "{output}");
    assert!(!root.join("agent.journal").exists());
}

#[test]
fn an_agent_whose_reader_goes_away_ends_before_it_prints_again() {
    let folder = host(1);
    let root = folder.path();
    put(root, "policy.toml", &policy(1, "1m"));
    let mut command = agent(root, &["--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    drop(out);
    let ended = child.wait_with_output().unwrap();
    let output = text(&ended.stderr);
    assert!(!ended.status.success() && output.contains("Broken pipe"), "{}: {output}", ended.status);
    let state: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(root.join("agent.state")).unwrap()).unwrap();
    assert_eq!(state["round"]["round"], 1, "it noticed only as it printed the next round");
    assert_eq!(demotion(root), "false");
}

#[test]
fn a_tree_of_64_kib_pages_is_read_in_its_own_pages() {
    const GIB: u64 = 1 << 30;
    const PAGE: u64 = 64 << 10;
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let service = ("/system.slice/s0.service", [36 * GIB, 4 * GIB]);
    write_host_with_pages(root, [64 * GIB, 128 * GIB], &[service], PAGE).unwrap();
    put(root, "/proc/sys/kernel/osrelease", "6.12.0-arm64-64k\n");
    put(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", &format!("{}\n", 512 << 20));
    put(root, "/proc/vmstat", "pgpromote_success 3\npgdemote_kswapd 5\n");
    let stat = root.join("sys/fs/cgroup/system.slice/s0.service/memory.stat");
    let text_of_stat = fs::read_to_string(&stat).unwrap();
    let stat_lines = text_of_stat.lines().filter(|line| !line.starts_with("pgdemote_"));
    let lines: Vec<&str> = stat_lines.chain(["pgdemote_proactive 7"]).collect();
    fs::write(&stat, lines.join("\n") + "\n").unwrap();
    // A step below a page of this host.
    let text_of_policy = "step = \"4KiB\"\nperiod = \"10ms\"\n[service.s0]\nunit = \"s0.service\"\ntier = \"opt-in\"\nlocal_high = 0.5\n";
    put(root, "policy.toml", text_of_policy);
    let report: serde_json::Value = {
        let output = polder(&["doctor", "--json", "--root"], root);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let nodes = report["nodes"].as_array().unwrap();
    assert_eq!(nodes[0]["unmovable_bytes"].as_u64().unwrap(), 64 * GIB, "all pages of node 0");
    let mut running = RunningAgent::start(agent(root, &["--json", "--listen", "127.0.0.1:0"]));
    let (address, _errors) = running.endpoint();
    assert_eq!(running.round()["page_bytes"], PAGE);
    let reclaim =
        fs::read_to_string(root.join("sys/fs/cgroup/system.slice/s0.service/memory.reclaim")).unwrap();
    let asked: Vec<u64> =
        reclaim.split_whitespace().filter_map(|word| word.parse().ok()).filter(|bytes| *bytes > 1).collect();
    assert!(!asked.is_empty() && asked.iter().all(|bytes| bytes.is_multiple_of(PAGE)), "{reclaim:?}");
    let metrics = get(&address, "/metrics");
    for (line, pages) in [
        ("polder_host_promoted_bytes_total", 3),
        ("polder_host_demoted_bytes_total", 5),
        ("polder_service_demoted_bytes_total{service=\"s0\"}", 7),
    ] {
        assert!(metrics.contains(&format!("{line} {}\n", pages * PAGE)), "{line}: {metrics}");
    }
    running.signal(Signal::SIGTERM);
}

#[test]
fn a_policy_that_is_read_again_and_again_brings_no_round_forward() {
    let folder = host(1);
    let root = folder.path();
    let policy_of = |period: &str| {
        put(root, "policy.new", &policy(1, period));
        fs::rename(root.join("policy.new"), root.join("policy.toml")).unwrap();
    };
    policy_of("1h");
    let mut running = RunningAgent::start(agent(root, &["--json"]));
    assert_eq!(running.round()["round"], 1);
    let mut errors = BufReader::new(running.program.0.stderr.take().unwrap());
    for period in ["1h", "1h", "59m", "1ms"] {
        policy_of(period);
        running.signal(Signal::SIGHUP);
        let mut told = String::new();
        errors.read_line(&mut told).unwrap();
        assert!(told.ends_with("read again, and the next round goes by it\n"), "{told}");
    }
    let round = running.round();
    assert_eq!(["round", "changes"].map(|count| round[count].as_u64()), [Some(2), Some(4)]);
    running.end(Signal::SIGTERM);
}

#[test]
fn a_top_does_not_show_the_last_round_of_an_agent_that_has_stopped_for_ever() {
    let folder = governed(1);
    let root = folder.path();
    let state = root.join("agent.state");
    let mut running = RunningAgent::start(agent(root, &["--json"]));
    running.round();
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    command.args(["top", "--json", "--state"]).arg(&state);
    let mut top = RunningAgent::start(command);
    assert!(top.round()["round"].as_u64().unwrap() > 0);
    running.signal(Signal::SIGKILL);
    running.program.0.wait().unwrap();
    // As it is when some time has passed.
    let written = fs::read_to_string(&state).unwrap();
    let mut old: serde_json::Value = serde_json::from_str(&written).unwrap();
    let round = old["round"]["round"].clone();
    old["round"]["time_ms"] = 0.into();
    put(root, "agent.new", &old.to_string());
    fs::rename(root.join("agent.new"), &state).unwrap();
    let mut said = String::new();
    top.program.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let end =
        format!("agent.state: the agent has written nothing since round {round}; it may have stopped\n");
    assert!(!top.program.0.wait().unwrap().success() && said.ends_with(&end), "{said}");
}

#[test]
fn each_signal_that_would_end_it_restores_its_settings() {
    for signal in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGALRM, Signal::SIGUSR1, Signal::SIGUSR2] {
        let folder = governed(1);
        let root = folder.path();
        let mut running = RunningAgent::start(agent(root, &["--json"]));
        running.round();
        assert_eq!(demotion(root), "true", "the control");
        let rest = running.end(signal);
        assert_eq!(demotion(root), "false", "{signal}: {rest}");
        assert!(!root.join("agent.journal").exists(), "{signal}");
    }
}

#[test]
fn an_agent_whose_reader_reads_nothing_goes_on_and_restores_its_settings() {
    let folder = governed(40);
    let root = folder.path();
    let mut running = RunningAgent::start(agent(root, &["--json"]));
    let bytes = running.round().to_string().len() as u64;
    let round = || {
        let state = fs::read_to_string(root.join("agent.state")).ok()?;
        serde_json::from_str::<serde_json::Value>(&state).ok()?["round"]["round"].as_u64()
    };
    // Many times what a pipe and what is read ahead of it hold.
    while round().is_none_or(|round| round * bytes < 1 << 20) {
        assert_eq!(running.program.0.try_wait().unwrap(), None);
        std::thread::yield_now();
    }
    assert_eq!(demotion(root), "true", "the control");
    running.signal(Signal::SIGTERM);
    assert!(running.program.0.wait().unwrap().success());
    assert_eq!(demotion(root), "false");
    assert!(!root.join("agent.journal").exists());
}

fn demotion(root: &Path) -> String {
    fs::read_to_string(root.join("sys/kernel/mm/numa/demotion_enabled")).unwrap().trim().to_owned()
}

#[test]
fn a_local_user_cannot_end_the_agent_by_its_endpoint() {
    let folder = governed(1);
    let root = folder.path();
    let mut running = RunningAgent::start(agent(root, &["--json", "--listen", "127.0.0.1:0"]));
    let (address, _errors) = running.endpoint();
    running.round();
    let files = || fs::read_dir(format!("/proc/{}/fd", running.program.0.id())).unwrap().count();
    let before = files();
    let send = |request: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        drop(stream.write_all(request.as_bytes()));
        stream
    };
    let mut clients: Vec<TcpStream> =
        (0..200).map(|_| send("POST /metrics HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n")).collect();
    clients.extend((0..200).map(|_| send("GET /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n")));
    clients.extend((0..200).map(|_| send("GET /metr")));
    let mut answer = String::new();
    send("GET /metrics HTTP/1.1\r\n\r\n").read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(files() <= before + 33, "{} files", files() - before);
    let first = running.round()["round"].as_u64();
    assert!(running.round()["round"].as_u64() > first, "it goes on");
    assert_eq!(demotion(root), "true", "the control");
    running.end(Signal::SIGTERM);
    assert_eq!(demotion(root), "false");
}

#[test]
fn an_agent_that_can_open_no_file_any_more_restores_its_settings() {
    let folder = governed(2);
    let root = folder.path();
    let mut running = RunningAgent::start(agent(root, &[]));
    running.out.read_line(&mut String::new()).unwrap();
    assert_eq!(demotion(root), "true", "the control");
    // Numbers that it always holds: others are of files that it opens in passing.
    let files = |_| -> BTreeSet<u64> {
        let names = fs::read_dir(format!("/proc/{}/fd", running.program.0.id())).unwrap();
        names.filter_map(|name| name.unwrap().file_name().to_str()?.parse().ok()).collect()
    };
    let held = (0..50).map(files).reduce(|held, now| &held & &now).unwrap();
    let limit = Rlimit { current: (0..).find(|number| !held.contains(number)), maximum: Some(4096) };
    let pid = rustix::process::Pid::from_raw(i32::try_from(running.program.0.id()).unwrap());
    prlimit(pid, Resource::Nofile, limit).unwrap();
    let mut output = String::new();
    running.program.0.stderr.take().unwrap().read_to_string(&mut output).unwrap();
    assert!(
        !running.program.0.wait().unwrap().success() && output.contains("Too many open files"),
        "{output}"
    );
    assert_eq!(demotion(root), "false", "{output}");
    assert!(!root.join("agent.journal").exists(), "{output}");
}

#[test]
fn a_dry_run_lists_what_it_would_write_and_a_run_what_it_writes() {
    let folder = host(2);
    let root = folder.path();
    put(root, "policy.toml", &policy(2, "1ms"));
    for name in ["cpuset.mems", "cpuset.mems.effective"] {
        put(root, &format!("/sys/fs/cgroup/system.slice/s1.service/{name}"), "0-1\n");
    }
    let run = |more: &[&str]| text(&agent(root, more).output().unwrap().stdout);
    let would = run(&["--rounds", "3", "--dry-run"]);
    for line in [
        "dry run: no setting is written; this is what a first round would do",
        "would write /sys/kernel/mm/numa/demotion_enabled: false -> true",
        "would write /proc/sys/kernel/numa_balancing: 1 -> 2",
        "would write /sys/fs/cgroup/system.slice/s1.service/cpuset.mems: 0-1 -> 0",
    ] {
        assert_eq!(would.lines().filter(|it| *it == line).count(), 1, "{line}:\n{would}");
    }
    assert!(!would.contains("there still") && !would.contains("wrote"), "{would}");
    assert_eq!(demotion(root), "false");
    let wrote = run(&["--rounds", "3"]);
    assert!(
        wrote.contains("wrote /proc/sys/kernel/numa_balancing: 1 -> 2\n") && !wrote.contains("would"),
        "{wrote}"
    );
    let checked = check(root);
    assert!(
        checked.status.success()
            && text(&checked.stdout).contains("would write /proc/sys/kernel/numa_balancing: 1 -> 2")
    );
    // Without HMAT no time is promised.
    let unknown = "the slow tier's bandwidth is not known (HMAT): the first round moves 32.0 MiB at most";
    let output = text(&check(root).stdout);
    assert!(output.contains(unknown) && !output.contains("to move"), "{output}");
    for access in ["read", "write"] {
        put(
            root,
            &format!("/sys/devices/system/node/node1/access0/initiators/{access}_bandwidth"),
            "10000\n",
        );
    }
    put(root, "policy.toml", &policy(2, "2s"));
    let output = text(&check(root).stdout);
    for part in [
        "at most 1.9 GiB a round of 2 s, each way: 10% of the slow tier's 9.3 GiB/s, or what the kernel moves in that time",
        "  s0: ",
        " to move, done in ",
    ] {
        assert!(output.contains(part), "{part}: {output}");
    }
    // Of what cannot go down no time is promised.
    let effective = "/sys/fs/cgroup/system.slice/s0.service/cpuset.mems.effective";
    put(root, effective, "0\n");
    let output = text(&check(root).stdout);
    assert!(output.contains("none can go down") && !output.contains("  s0: "), "{output}");
    put(root, effective, "0-1\n");
    put(root, "policy.toml", &format!("step = \"4MiB\"\n{}", policy(2, "2s")));
    assert!(
        text(&check(root).stdout).contains("at most 4.0 MiB a round of 2 s, each way, by step\n"),
        "{output}"
    );
    // A machine with one tier: the policy is good all the same.
    fs::remove_dir_all(root.join("sys/devices/virtual/memory_tiering")).unwrap();
    put(root, "/sys/devices/system/node/has_memory", "0\n");
    put(root, "policy.toml", "[service.x]\ncgroup = \"/sys/fs/cgroup/x\"\ntier = \"opt-in\"\n");
    let checked = check(root);
    let (output, warned) = (text(&checked.stdout), text(&checked.stderr));
    assert!(checked.status.success(), "{output} {warned}");
    assert!(
        output.contains(
            "note: the policy is good, and was not tried here: this machine has one tier of memory"
        ),
        "{output}"
    );
    assert!(warned.contains("warning: ") && warned.contains("write \"/x\""), "{warned}");
    let doctor = text(&polder(&["doctor", "--root"], root).stdout);
    assert!(doctor.contains("one tier: nodes 0\n"), "{doctor}");
}

#[test]
fn each_alarm_of_the_host_has_a_line_of_its_own() {
    let folder = governed(1);
    let root = folder.path();
    let text_of_policy = policy(1, "1ms");
    let lacks =
        format!("fair_share = \"kernel\"\n{text_of_policy}[interleave]\nweights = {{ 0 = 3, 1 = 1 }}\n");
    put(root, "policy.toml", &lacks);
    let told = text(&agent(root, &["--rounds", "2"]).output().unwrap().stdout);
    for alarm in [
        "alarm: fair_share: ",
        "alarm: interleave: this kernel has no /sys/kernel/mm/mempolicy/weighted_interleave/node0",
        "alarm: interleave: this kernel has no /sys/kernel/mm/mempolicy/weighted_interleave/node1",
    ] {
        assert_eq!(told.matches(alarm).count(), 1, "{alarm}: {told}");
    }
}

#[test]
fn a_damaged_journal_is_kept_and_named_by_a_start_and_by_doctor() {
    let folder = governed(1);
    let root = folder.path();
    let mut running = RunningAgent::start(agent(root, &["--json"]));
    running.round();
    running.signal(Signal::SIGKILL);
    running.program.0.wait().unwrap();
    let journal = root.join("agent.journal");
    let damaged = fs::read_to_string(&journal).unwrap().replacen("numa_balancing", "numa_balancinG", 1);
    fs::write(&journal, &damaged).unwrap();
    let started = agent(root, &["--rounds", "1"]).output().unwrap();
    let output = text(&started.stderr);
    assert!(!started.status.success() && output.contains("line 2 is damaged: its checksum"), "{output}");
    assert_eq!(
        (fs::read_to_string(&journal).unwrap(), demotion(root)),
        (damaged.clone(), "false".to_owned())
    );
    let doctor = polder(&["doctor", "--journal", "/agent.journal", "--root"], root);
    let output = text(&doctor.stdout);
    assert!(
        !doctor.status.success() && output.contains("PROBLEM: journal: /agent.journal: line 2 is damaged"),
        "{output}"
    );
    assert_eq!(fs::read_to_string(&journal).unwrap(), damaged);
}

#[test]
fn a_restore_from_a_journal_that_never_was_is_refused_and_makes_nothing() {
    let folder = host(1);
    let root = folder.path();
    let mistyped = root.join("lib/polder/agent.journal");
    let output = polder(&["agent", "restore", "--journal"], &mistyped);
    let said = text(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    assert!(said.contains(&format!("{}: there is no such journal", mistyped.display())), "{said}");
    assert!(!root.join("lib").exists(), "a folder was made");
    // An agent that failed before it had the journal that it has by default is followed by a restore too.
    let script = "mount -t tmpfs none /var/lib && \"$0\" agent restore && ls /var/lib";
    let alone = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-ec", script, env!("CARGO_BIN_EXE_polder")])
        .output()
        .unwrap();
    let said = "nothing to restore: no agent was killed with /var/lib/polder/agent.journal\n";
    assert_eq!((text(&alone.stdout).as_str(), alone.status.success()), (said, true), "{alone:?}");
    // An agent that ended well left no journal, and what follows its end by rule finds nothing to do.
    put(root, "policy.toml", &policy(1, "20ms"));
    assert!(agent(root, &["--rounds", "1"]).output().unwrap().status.success());
    let journal = root.join("agent.journal");
    assert!(!journal.exists(), "the control");
    let output = polder(&["agent", "restore", "--journal"], &journal);
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stdout).starts_with("nothing to restore: "), "{output:?}");
    let doctor = |journal: &str| polder(&["doctor", "--journal", journal, "--root"], root);
    let output = doctor("/none.journal");
    let found = "PROBLEM: journal: /none.journal: no agent has run with such a journal";
    assert!(!output.status.success() && text(&output.stdout).contains(found), "{output:?}");
    assert!(!text(&doctor("/agent.journal").stdout).contains("PROBLEM: journal"));
}

#[test]
fn an_address_that_other_machines_reach_is_refused() {
    let folder = host(1);
    put(folder.path(), "policy.toml", &policy(1, "1s"));
    let output = agent(folder.path(), &["--listen", "0.0.0.0:0"]).output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("is reached from other machines"));
    assert_eq!(demotion(folder.path()), "false");
}

#[test]
fn a_record_without_rounds_agrees_with_nothing() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "record.jsonl", "");
    let output = polder(&["agent", "replay"], &folder.path().join("record.jsonl"));
    assert!(!output.status.success() && text(&output.stderr).contains("there is no round in it"));
    // The second line is cut short, and the third has more bytes than any machine.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/guest.jsonl");
    let guest = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = guest.lines().take(2).collect();
    let cut = format!("{}\n{}", lines[0], &lines[1][..100]);
    let huge = format!(
        "{}\n{}\n",
        lines[0],
        lines[1].replacen("\"slow\":", "\"slow\":2000000000000000000,\"unused\":", 1)
    );
    for (record, what) in [
        (cut, "torn.jsonl is no record of an agent (line 2, column 100: EOF while parsing "),
        (huge, "torn.jsonl is no record of an agent (line 2: no machine has "),
    ] {
        put(folder.path(), "torn.jsonl", &record);
        for command in [&["agent", "replay"][..], &["plan", "tier", "--record"]] {
            let output = polder(command, &folder.path().join("torn.jsonl"));
            assert!(!output.status.success() && text(&output.stderr).contains(what), "{output:?}");
        }
    }
    put(folder.path(), "other.txt", "no record\n");
    let other = folder.path().join("other.txt");
    for (command, what) in [
        (&["agent", "replay"][..], "other.txt is no record of an agent ("),
        (&["doctor", "--against"], "other.txt is no report of a doctor ("),
        (&["plan", "tier", "--record"], "other.txt is no record of an agent ("),
    ] {
        let output = polder(command, &other);
        assert!(!output.status.success() && text(&output.stderr).contains(what), "{output:?}");
    }
}

#[test]
fn a_guest_s_record_is_decided_as_it_was() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/guest.jsonl");
    let output = polder(&["agent", "replay"], &path);
    assert!(
        output.status.success() && text(&output.stdout).contains("decided as recorded"),
        "{}",
        text(&output.stdout)
    );
    let moves = text(&output.stdout).split_whitespace().nth(3).and_then(|count| count.parse::<u32>().ok());
    assert!(moves.is_some_and(|moves| moves >= 4), "{}", text(&output.stdout));
}

#[test]
fn doctor_shows_where_a_host_differs_from_another() {
    let (here, there) = (host(1), host(1));
    put(there.path(), "/sys/kernel/mm/numa/demotion_enabled", "true\n");
    let report = polder(&["doctor", "--json", "--root"], there.path());
    put(here.path(), "reference.json", &text(&report.stdout));
    let reference = here.path().join("reference.json");
    let output = polder(&["doctor", "--against", reference.to_str().unwrap(), "--root"], here.path());
    let said = text(&output.stdout);
    let drift = "drift: /sys/kernel/mm/numa/demotion_enabled: false here, true in the reference";
    assert!(said.contains(drift), "{said}");
    assert_eq!(said.matches("drift:").count(), 1, "{said}");
    assert!(!output.status.success());
    let output = polder(&["doctor", "--against", "/dev/zero", "--root"], here.path());
    assert!(text(&output.stderr).contains("/dev/zero: expected a regular file"), "{output:?}");
}

/// A kubelet of a test: it gives one answer after the other, and says where it is.
fn kubelet(answers: Vec<(&'static str, &'static str)>) -> (String, std::thread::JoinHandle<()>) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/pods", server.local_addr().unwrap());
    let serve = move || {
        for (status, text) in answers {
            let (mut stream, _) = server.accept().unwrap();
            let head =
                BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            assert!(head.count() > 0);
            let length = text.len();
            write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
            )
            .unwrap();
        }
    };
    (address, std::thread::spawn(serve))
}

#[test]
fn pods_of_a_label_come_from_a_kubelet_and_a_kubelet_that_refuses_is_named() {
    const PODS: &str = include_str!("../../agent/tests/pods.json");
    const POD: &str = "/sys/fs/cgroup/kubepods/burstable/podb2c1f8c0-1df0-4c1c-9c6f-7a3de1b0a6f1";
    let folder = host(1);
    let root = folder.path();
    for name in ["memory.numa_stat", "memory.stat", "memory.pressure", "memory.events"] {
        let recorded =
            fs::read_to_string(root.join("sys/fs/cgroup/system.slice/s0.service").join(name)).unwrap();
        put(root, &format!("{POD}/{name}"), &recorded);
    }
    let run = |address: &str, label: &str| {
        let file = format!(
            "[kubernetes]\npods = \"{address}\"\n[service.web]\nlabel = \"{label}\"\ntier = \"opt-in\"\n"
        );
        put(root, "/policy.toml", &file);
        let output = agent(root, &["--rounds", "1"]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let (address, kubelet) = kubelet(vec![("200 OK", PODS), ("200 OK", PODS), ("403 Forbidden", "no")]);
    let stdout = run(&address, "app=web");
    assert!(stdout.contains("web/web-6d4cf56db6-7xk2p: it is opted in"), "{stdout}");
    let stdout = run(&address, "app=wbe");
    assert!(stdout.contains("no pod of this node has app=wbe; its values are cache, web"), "{stdout}");
    let stdout = run(&address, "app=web");
    assert!(stdout.contains("answers 403 Forbidden"), "{stdout}");
    kubelet.join().unwrap();
    let stdout = run(&address, "app=web");
    assert!(
        stdout.contains("kubernetes.pods: ") && stdout.contains("refused"),
        "it listens no more: {stdout}"
    );
}

#[test]
fn the_example_is_checked_run_dry_shown_and_sound() {
    let folder = tempfile::tempdir().unwrap();
    // A shell takes what is printed, whatever the folder is called.
    let root = folder.path().join("a made-up host's");
    let polder = |words: &str| {
        let words = format!("\"$0\" {words}");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &words, env!("CARGO_BIN_EXE_polder")]).arg(&root).output().unwrap();
        assert!(output.status.success(), "{words}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    };
    let commands = polder("agent example \"$1\"");
    let commands: Vec<&str> = commands.lines().filter_map(|line| line.strip_prefix("  polder ")).collect();
    let [check, run, top, doctor] = commands[..] else { panic!("{commands:?}") };
    for (command, words) in [
        (check, &["cache: ", "to move, done in"][..]),
        (
            run,
            &["would write /sys/kernel/mm/numa/demotion_enabled: false -> true", "batch: it is background"],
        ),
        (top, &["36.0 GiB", "90.0%", "it is over local_high, and its coldest pages go down"]),
        (doctor, &["node"]),
    ] {
        let shown = polder(command);
        assert!(words.iter().all(|word| shown.contains(word)), "{command}: {shown}");
    }
    let before = fs::read_to_string(root.join("policy.toml")).unwrap();
    let again =
        Command::new(env!("CARGO_BIN_EXE_polder")).args(["agent", "example"]).arg(&root).output().unwrap();
    assert!(!again.status.success() && text(&again.stderr).contains("is not empty"), "{again:?}");
    assert_eq!(fs::read_to_string(root.join("policy.toml")).unwrap(), before);
    let output = self::polder(&["agent", "example"], &root.join("policy.toml"));
    assert!(text(&output.stderr).contains("policy.toml: it is no folder; name a folder"), "{output:?}");
}
