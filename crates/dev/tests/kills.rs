//! Real processes that are killed and stopped at any memory operation, and survivors that go on: `polder-dev soak`.

use std::process::Command;

/// Plays a soak and returns what it sums up at its end: a line for each scene, and one for all. Whatever fails prints its seed.
fn soak(arguments: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
    let output = command.args(["soak", "--log", "error"]).args(arguments.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "polder-dev soak {arguments}\n{said}{failed}");
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
fn a_service_names_its_dead_and_a_store_keeps_its_versions_wherever_a_process_is_killed() {
    println!("{}", soak("--kills 250 --seed 0 --what client,proxy"));
    println!("{}", soak("--kills 150 --seed 0 --what publish"));
}

#[test]
fn a_process_that_stands_still_is_named_and_nothing_is_lost_when_it_goes_on() {
    // Services wait a quarter of a second in each round: `polder-dev soak --doom stop --what client,proxy` plays them.
    println!("{}", soak("--doom stop --kills 200 --seed 0 --what push,stream,pop,create,all-reduce,publish"));
}

#[test]
fn a_soak_leaves_nothing_behind() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
    let command = command.args(["soak", "--kills", "3", "--what", "push/software/shared"]);
    let child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let pid = child.id();
    assert!(child.wait_with_output().unwrap().status.success());
    let left = std::fs::read_dir("/dev/shm").unwrap().flatten();
    let prefix = format!("polder-test-{pid}-");
    let left: Vec<_> = left.filter(|file| file.file_name().to_string_lossy().starts_with(&prefix)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn two_machines_play_one_soak_and_what_was_killed_on_one_is_named_on_the_other() {
    let scratch = polder_mem::testing::Scratch::new();
    let pool = scratch.path().join("pool");
    // Of few chunks for its hosts, so that none keeps an empty one.
    let geometry = polder_pool::Geometry {
        hosts: 8,
        processes: 4,
        names: 61,
        levels: 3,
        chunk_bytes: 16 << 10,
        opens: 16,
        keepers: 2,
    };
    polder_attach::session::create(&pool, 1 << 20, &geometry).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    // Each with files of its own, as under a kernel of its own.
    let start = |words: &str, run: &str| {
        let run = scratch.path().join(run);
        std::fs::create_dir(&run).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
        command.args(["soak", "--log", "error", "--coherence", "software"]).args(words.split(' '));
        command.env("POLDER_POOL", &pool).env("POLDER_RUN", run).env("POLDER_CONFIG", "/dev/null");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let plays =
        start(&format!("--listen {address} --kills 40 --seed 0 --what push,create,all-reduce"), "one");
    let joins = start(&format!("--join {address}"), "other");
    let [plays, joins] = [plays, joins].map(|child| child.wait_with_output().unwrap());
    let output = String::from_utf8_lossy(&plays.stdout);
    assert!(plays.status.success(), "{output}{}", String::from_utf8_lossy(&plays.stderr));
    assert!(joins.status.success(), "{}", String::from_utf8_lossy(&joins.stderr));
    println!("{output}");
    assert!(killed(output.trim()) >= 20, "{output}");
}

#[test]
fn a_doom_that_needs_another_machine_or_none_is_refused() {
    for (words, why) in [
        ("--doom kernel --kills 1", "--doom kernel needs a second machine"),
        ("--listen 127.0.0.1:1 --doom stop --kills 1", "--doom stop plays on one machine"),
        ("--listen 127.0.0.1:1 --join 127.0.0.1:2", "cannot be used with"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder-dev"));
        let output = command.arg("soak").args(words.split(' ')).output().unwrap();
        let failed = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && failed.contains(why), "{words}: {failed}");
    }
}
