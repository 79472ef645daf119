//! The commands as a user gives them: pools, their counters, the keeper, settings, logs and completion.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use polder_attach::session::Session;
use polder_attach::settings::Settings;
use polder_mem::Memory;
use polder_mem::testing::{Running, Scratch, expect_nothing_left};
use polder_pool::PoolError;
use polder_pool::endpoint::{Endpoint, EndpointOptions, Label};
use polder_pool::kv::{Cache, Identity, Options};
use serde_json::Value;

/// A directory for a pool, and commands that leave everything of theirs in it.
struct Desk {
    scratch: Scratch,
}

impl Desk {
    fn new() -> Self {
        Self { scratch: Scratch::new() }
    }

    fn pool(&self) -> PathBuf {
        self.scratch.path().join("pool")
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
        for key in ["POLDER_HOST", "POLDER_COHERENCE", "POLDER_TIMEOUT", "POLDER_LOG", "POLDER_WRAP"] {
            command.env_remove(key);
        }
        command.env("POLDER_POOL", self.pool()).env("POLDER_RUN", self.scratch.path());
        // A file that is not there by accident.
        command.env("POLDER_CONFIG", "/dev/null");
        command.args(arguments.split(' '));
        command
    }

    /// A command with mounts of its own, which `script` changes first.
    fn behind(&self, script: &str, arguments: &str) -> Command {
        let asked = self.command(arguments);
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c"]);
        command
            .arg(format!("{script} && exec \"$@\""))
            .arg("sh")
            .arg(asked.get_program())
            .args(asked.get_args());
        for (name, value) in asked.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// What a command says that does what it should.
    fn say(&self, arguments: &str) -> String {
        said(arguments, &self.command(arguments).output().unwrap())
    }

    /// The line with which a command refuses.
    fn refusal(&self, arguments: &str) -> String {
        refused(&self.command(arguments).output().unwrap())
    }

    fn session(&self, host: Option<u16>, job: u64) -> Session {
        let settings = Settings {
            pool: Some(self.pool()),
            run: Some(self.scratch.path().into()),
            host,
            job: Some(job),
            ..Settings::default()
        };
        Session::open(&settings).unwrap()
    }
}

fn said(what: &str, output: &Output) -> String {
    assert!(output.status.success(), "polder {what}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output) -> String {
    let line = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    line
}

/// A process that runs until it is stopped, and its lines.
fn start(mut command: Command) -> (Running, impl Iterator<Item = String>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    (Running(child), lines)
}

#[test]
fn without_proc_a_command_says_that_it_is_missing_and_how_to_have_it() {
    let desk = Desk::new();
    let apart = |arguments: &str| refused(&desk.behind("umount -l /proc", arguments).output().unwrap());
    for arguments in ["pool format --size 64MiB", "pool stat"] {
        let line = apart(arguments);
        assert!(line.ends_with(": mount -t proc proc /proc\n"), "{arguments}: {line}");
        // The control, which makes the pool for the next.
        desk.say(arguments);
    }
}

#[test]
fn a_run_directory_in_which_no_file_can_be_made_is_named_with_what_to_do() {
    let desk = Desk::new();
    desk.say("pool format --size 64MiB");
    let run = desk.scratch.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let remedy = "; set POLDER_RUN to a directory in which the processes of this host may make files";
    let script = format!("mount -t tmpfs -o ro none {}", run.display());
    let read_only = refused(&desk.behind(&script, "pool sweep").env("POLDER_RUN", &run).output().unwrap());
    assert!(read_only.contains("Read-only file system") && read_only.contains(remedy), "{read_only}");
    let file = refused(&desk.command("pool sweep").env("POLDER_RUN", desk.pool()).output().unwrap());
    assert!(file.contains("Not a directory") && file.contains(remedy), "{file}");
}

#[test]
fn the_room_of_a_host_that_is_gone_comes_back_by_a_flush_of_its_blocks_alone() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --hosts 3 --processes 4");
    let put = |host, key| {
        let session = desk.session(Some(host), 1);
        let identity = Identity { hash: [7; 32], text: "some model".into(), block: 4096 };
        let options = Options { budget: Some(4 << 20), verify: false };
        let cache = Cache::open(Arc::clone(session.pool()), "llm", identity, options).unwrap();
        cache.put(&[[key; 16]], &[&[key; 4096]]).unwrap().stored
    };
    assert_eq!([put(0, 1), put(2, 2)], [1, 1]);
    let said = desk.say("kv flush llm --of-host 2");
    assert!(said.contains("host 2 gave back 1019.8 KiB of the cache llm"), "{said}");
    let stat = desk.say("kv stat llm");
    assert!(
        stat.contains("cache llm: 1 blocks") && stat.contains("host 2: 0 blocks, 1 put, 1 evicted"),
        "{stat}"
    );
    assert!(desk.say("kv flush llm --of-host 1").contains("host 1 gave back 0"));
    assert!(desk.refusal("kv flush other --of-host 2").contains("/kv/other"));
    assert_eq!(put(1, 3), 1);
}

#[test]
fn a_cache_that_a_host_has_open_keeps_its_blocks_and_no_object_of_a_cache_is_removed_alone() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --hosts 3 --processes 4");
    let session = desk.session(Some(2), 1);
    let identity = Identity { hash: [7; 32], text: "some model".into(), block: 4096 };
    let options = Options { budget: Some(4 << 20), verify: false };
    let cache = Cache::open(Arc::clone(session.pool()), "llm", identity, options).unwrap();
    assert_eq!(cache.put(&[[1; 16]], &[&[1; 4096]]).unwrap().stored, 1);
    let line = desk.refusal("kv flush llm --of-host 2");
    let holder = format!("cache llm open in host 2 pid {}; end those processes", std::process::id());
    assert!(line.contains("host 2 is here, and has the ") && line.contains(&holder), "{line}");
    assert!(desk.say("kv flush llm --of-host 1").contains("host 1 gave back 0"));
    assert_eq!(cache.lookup(&[[1; 16]]).unwrap(), [true]);
    drop((cache, session));
    for of in ["/kv/llm", "/kv/llm/host/2", "--force /kv/llm"] {
        let line = desk.refusal(&format!("pool remove {of}"));
        assert!(line.contains("is of the cache llm,") && line.contains("`polder kv flush llm`"), "{line}");
    }
    assert!(desk.say("kv check llm").contains("; 0 damaged"));
    desk.say("kv flush llm --of-host 2");
    desk.say("kv flush llm");
    // Of no cache that is there.
    let session = desk.session(Some(2), 1);
    session.pool().close(session.pool().create("/kv/llm/host/2", 64).unwrap());
    desk.say("pool remove /kv/llm/host/2");
    // A flush ends what a process began that was killed behind the root.
    session.pool().close(session.pool().create("/kv/llm/host/2", 64).unwrap());
    desk.say("kv flush llm");
    let line = desk.refusal("kv flush llm");
    assert!(line.contains("no cache llm; there are none"), "{line}");
}

#[test]
fn a_keeper_gives_the_room_of_a_host_that_is_fenced_to_one_that_wants_some() {
    for ids in ["launcher", "keeper"] {
        let desk = Desk::new();
        desk.say("pool format --size 16MiB --hosts 3 --processes 4");
        let (mut keeper, mut lines) = start(desk.command(&format!("keeper --ids {ids}")));
        lines.next().unwrap();
        let open = |host| {
            let session = desk.session(Some(host), 1);
            let identity = Identity { hash: [7; 32], text: "some model".into(), block: 4096 };
            let options = Options { budget: Some(4 << 20), verify: false };
            let cache = Cache::open(Arc::clone(session.pool()), "llm", identity, options).unwrap();
            (session, cache)
        };
        let put = |cache: &Cache<_>, first: u16, blocks: u16| {
            for name in first..first + blocks {
                let [low, high] = name.to_le_bytes();
                let key = std::array::from_fn(|at| if at % 2 == 0 { low } else { high });
                cache.put(&[key], &[&[low; 4096]]).unwrap();
            }
        };
        let (gone, stays) = (open(2), open(0));
        put(&gone.1, 0, 600);
        put(&stays.1, 1000, 300);
        let stat = desk.say("kv stat llm");
        assert!(stat.contains("host 2: 600 blocks") && stat.contains("wants room"), "{stat}");
        assert!(desk.say("kv check llm").contains("  host 0 wants room: there was no slab"));
        let doctor = desk.command("doctor").output().unwrap();
        let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
        assert!(
            doctor.contains("note: cache llm in ") && doctor.contains("when they last asked: 0\n"),
            "{doctor}"
        );
        assert!(desk.say("pool evict 2 --fenced").contains("fenced 2"));
        drop(gone);
        let given = lines.find(|line| line.contains("is gone")).unwrap();
        assert!(given.starts_with("host 2 is gone: 1019.8 KiB of its blocks in the cache llm"), "{given}");
        put(&stays.1, 2000, 300);
        let stat = desk.say("kv stat llm");
        assert!(stat.contains(", gone") && !stat.contains("host 2: 600 blocks"), "{stat}");
        // Its id is free, and its part is its own again.
        let (session, back) = open(2);
        put(&back, 3000, 1);
        assert!(!desk.say("kv stat llm").contains(", gone"), "{ids}");
        drop((back, session));
        let told = Command::new("kill").arg(keeper.0.id().to_string()).status().unwrap();
        assert!(told.success() && !keeper.0.wait().unwrap().success());
    }
}

#[test]
fn a_doctor_finds_that_the_pool_that_was_named_is_not_there() {
    let desk = Desk::new();
    let report = |arguments: &str| {
        let output = desk.command(arguments).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let all = report["findings"].as_array().unwrap().clone();
        let found = all.iter().find(|it| it["subject"] == "pool").cloned();
        (output.status.code(), found)
    };
    let missing = desk.pool().display().to_string();
    for arguments in ["doctor --json", "doctor --json --pool /none"] {
        let path = if arguments.ends_with("/none") { "/none" } else { &missing };
        let (code, found) = report(arguments);
        let found = found.unwrap_or_else(|| panic!("{arguments}: no finding of the pool"));
        assert_eq!((code, found["severity"].as_str()), (Some(1), Some("problem")), "{found}");
        assert!(found["found"].as_str().unwrap().starts_with(&format!("{path}: no such file")), "{found}");
    }
    desk.say("pool format --size 16MiB");
    assert_eq!(report("doctor --json").1, None, "the control");
}

#[test]
fn a_doctor_of_a_copy_of_files_refuses_a_pool_and_passes_over_one_of_the_environment() {
    let desk = Desk::new();
    let host = desk.scratch.path().join("host").display().to_string();
    desk.say(&format!("agent example {host}"));
    let line = desk.refusal(&format!("doctor --root {host} --pool /none"));
    assert!(line.contains("do not apply here: a copy of a host's files below --root has no pool"), "{line}");
    desk.say(&format!("doctor --root {host}"));
}

#[test]
fn the_memory_of_messages_is_shown_by_kind_by_endpoint_and_by_pair() {
    let desk = Desk::new();
    desk.say("pool format --size 32MiB --hosts 2 --processes 4");
    let sessions = [0, 1].map(|host| desk.session(Some(host), 7));
    let open = |host: usize| Endpoint::open(Arc::clone(sessions[host].pool()), EndpointOptions::default());
    let mut ends: Vec<Endpoint<_, Vec<u8>, ()>> = [0, 1, 1].map(|host| open(host).unwrap()).into();
    let label = Label { kind: 1, tag: 0, data: None };
    // All say something to the first, and the second sends it a long message, for which the pair gets a ring.
    let to = ends[0].address();
    for end in &mut ends[1..] {
        let peer = end.connect(to);
        end.inject(peer, label, b"short").unwrap();
    }
    ends[1].send(0, label, vec![7; 100_000], ()).unwrap();
    let counters: Value = serde_json::from_str(&desk.say("pool stat --json --messages")).unwrap();
    let bytes = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("no number: {counters}"));
    let [first, second] = ["/endpoint/7/0.0", "/endpoint/7/1.0"].map(|name| &counters["endpoints"][name]);
    assert_eq!((&first["rings"], &second["rings"]), (&0.into(), &1.into()));
    let ring = bytes(&second["ring_bytes"]);
    assert!(ring > 8 * (64 << 10) && ring == bytes(&counters["uses"]["rings of pairs"]), "{counters}");
    let small: u64 =
        counters["endpoints"].as_object().unwrap().values().map(|end| bytes(&end["small_ring_bytes"])).sum();
    assert_eq!(small, bytes(&counters["uses"]["small rings"]));
    let all: u64 = counters["uses"].as_object().unwrap().values().map(bytes).sum();
    assert_eq!(all, bytes(&counters["object_bytes"]), "every byte is of one use");
    let pairs = counters["by_pair"].as_array().unwrap();
    let of = |pair: &Value| (pair["from"].clone(), pair["to"].clone(), bytes(&pair["ring_bytes"]));
    let wanted = [("/endpoint/7/1.0", ring), ("/endpoint/7/1.1", 0)];
    assert_eq!(
        pairs.iter().map(of).collect::<Vec<_>>(),
        wanted.map(|(from, ring)| (from.into(), "/endpoint/7/0.0".into(), ring))
    );
    assert_eq!((&counters["pairs"]["pairs"], &counters["pairs"]["with_rings"]), (&2.into(), &1.into()));
    let block = bytes(&pairs[1]["small_ring_bytes"]);
    assert!(block > 0 && bytes(&counters["pairs"]["bytes"]) == 2 * block + ring, "{counters}");
    let shown = desk.say("pool stat --messages");
    assert!(
        shown.contains("2 directions of pairs: ") && shown.contains("1 have a ring of their own"),
        "{shown}"
    );
    assert!(
        shown.contains("/endpoint/7/1.1 to /endpoint/7/0.0: 1.8 KiB small ring, 0 B ring of its own"),
        "{shown}"
    );
    assert!(!desk.say("pool stat").contains(" to /endpoint"), "pairs are listed when they are asked for");
    drop(ends);
    let counters: Value = serde_json::from_str(&desk.say("pool stat --json")).unwrap();
    assert_eq!((&counters["pairs"]["pairs"], &counters["by_pair"]), (&0.into(), &Value::Null));
}

#[test]
fn a_pool_is_made_listed_counted_checked_and_removed() {
    let desk = Desk::new();
    let made = desk.say("pool format --size 16MiB --hosts 3 --processes 4 --keepers 2");
    assert!(made.contains("for 3 hosts of 4 processes"), "{made}");
    let session = desk.session(Some(2), 7);
    {
        let pool = session.pool();
        for (name, bytes) in [("/a/one", 5000), ("/a/two", 300), ("/b", 10)] {
            pool.close(pool.create(name, bytes).unwrap());
        }
    };
    let listed = desk.say("pool list /a");
    assert_eq!(listed.lines().count(), 2);
    assert!(listed.contains("host 2") && listed.contains("job 7") && listed.contains("/a/two"), "{listed}");
    let first: Value = serde_json::from_str(desk.say("pool list --json /a").lines().next().unwrap()).unwrap();
    assert_eq!((&first["name"], &first["bytes"]), (&"/a/one".into(), &5000.into()));
    let counters: Value = serde_json::from_str(&desk.say("pool stat --json")).unwrap();
    assert_eq!((&counters["objects"], &counters["jobs"]["7"]), (&3.into(), &5310.into()));
    assert_eq!(counters["hosts"][0]["processes"], Value::from(vec![std::process::id()]));
    assert!(desk.say("pool stat").contains("host 2 live: 3 objects"));
    assert!(desk.say("pool check").contains("3 objects, 0 problems"));
    assert!(desk.refusal("pool destroy").contains("give --yes"));
    drop(session);
    desk.say("pool destroy --yes");
    assert_eq!(desk.scratch.names(), [""; 0]);
}

#[test]
fn what_is_no_pool_is_not_formatted_without_force() {
    let desk = Desk::new();
    let bytes = b"a photograph".repeat(1 << 20);
    std::fs::write(desk.pool(), &bytes).unwrap();
    assert!(desk.refusal("pool format").contains("lose what is there with `polder pool format --force`"));
    assert!(std::fs::read(desk.pool()).unwrap() == bytes, "it was written to");
    assert!(desk.say("pool format --force").contains("for "));
}

#[test]
fn a_file_system_is_not_formatted_without_force_wherever_its_bytes_stand() {
    let desk = Desk::new();
    // The first 1024 bytes of an ext4 image are zeros.
    let mut image = vec![0; 4 << 20];
    image[1024..1028].copy_from_slice(&1024_u32.to_le_bytes());
    image[1080..1082].copy_from_slice(&[0x53, 0xef]);
    image[1 << 20..2 << 20].fill(7);
    std::fs::write(desk.pool(), &image).unwrap();
    let line = desk.refusal("pool format");
    let seen = "an ext2, ext3 or ext4 file system (seen at offset 0x438)";
    assert!(line.contains(seen) && line.contains("--force"), "{line}");
    assert!(std::fs::read(desk.pool()).unwrap() == image, "it was written to");
    // Bytes behind all that a format zeroes, in a file with holes.
    let file = std::fs::File::create(desk.pool()).unwrap();
    file.set_len(16 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"kept", (16 << 20) - 5).unwrap();
    let line = desk.refusal("pool format");
    assert!(line.contains("seen at offset 0xfffffb"), "{line}");
    file.set_len(0).unwrap();
    file.set_len(16 << 20).unwrap();
    assert!(desk.say("pool format").contains("for 8 hosts"), "a hole goes without force");
    assert!(desk.refusal("pool format").contains("attach to it"));
    assert!(desk.say("pool format --force").contains("for 8 hosts"));
}

#[test]
fn no_file_is_made_among_devices() {
    let desk = Desk::new();
    for arguments in ["--size 16MiB --pool /dev/dax77.0", "--pool /dev/dax77.0"] {
        let line = desk.refusal(&format!("pool format {arguments}"));
        assert!(line.starts_with("polder: /dev/dax77.0: ") && line.ends_with("`daxctl list`\n"), "{line}");
    }
    assert!(!PathBuf::from("/dev/dax77.0").exists());
}

#[test]
fn a_pool_keeps_the_coherence_that_it_was_formatted_for() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --coherence software");
    let session = desk.session(Some(0), 0);
    assert_eq!(session.pool().memory().coherence(), polder_mem::Coherence::Software);
    assert!(desk.say("pool stat").contains("\ncoherence: software, for every process\n"));
    let counters: Value = serde_json::from_str(&desk.say("pool stat --json")).unwrap();
    assert_eq!(counters["coherence"], "software");
    let line = desk.refusal("pool stat --coherence coherent");
    assert!(line.contains("formatted with --coherence software, and coherent is set here"), "{line}");
    drop(session);
    // Formatted anew it is what is said then.
    desk.say("pool format --force");
    let counters: Value = serde_json::from_str(&desk.say("pool stat --json")).unwrap();
    assert_eq!(counters["coherence"], Value::Null);
    desk.say("pool stat --coherence coherent");
    // What only the operator can know is kept as well.
    desk.say("pool format --force --coherence hdm-db");
    assert_eq!(desk.session(Some(0), 0).pool().memory().coherence(), polder_mem::Coherence::HdmDb);
    assert!(desk.say("pool stat").contains("\ncoherence: hdm-db, for every process\n"));
}

#[test]
fn a_pool_larger_than_its_file_system_is_not_made() {
    let desk = Desk::new();
    let line = desk.refusal("pool format --size 4096TiB");
    assert!(line.contains(" free, not 4.0 PiB; give a smaller --size"), "{line}");
    assert_eq!(desk.scratch.names(), [""; 0]);
}

#[test]
fn killed_processes_and_evicted_hosts_are_shown_as_such_and_holders_named_when_a_pool_is_removed() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --hosts 4");
    let (keeper, mut lines) = start(desk.command("keeper"));
    lines.next().unwrap();
    let session = desk.session(Some(1), 0);
    let mut killed = desk.command("verify --litmus 0 --host 2 --timeout 60s");
    let mut killed = killed.stdout(Stdio::null()).spawn().unwrap();
    while !desk.say("pool list").contains("/polder/litmus") {
        assert!(killed.try_wait().unwrap().is_none(), "it ended without the other role");
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(desk.say("pool stat").contains(&format!("processes none, gone {}\n", killed.id())));
    let counters: Value = serde_json::from_str(&desk.say("pool stat --json")).unwrap();
    let gone = |host: u16| {
        counters["hosts"].as_array().unwrap().iter().find(|it| it["host"] == host).unwrap()["gone"].clone()
    };
    assert_eq!([gone(1), gone(2)], [serde_json::json!([]), serde_json::json!([killed.id()])]);
    let refused = desk.refusal("pool evict 3");
    assert!(refused.contains("host 3 is no member, and was not evicted; members 1 2; "), "{refused}");
    // A server does it with its own id as it boots, also for the first time.
    assert!(desk.say("pool evict 3 --fenced").contains("host 3 is no member, and was not evicted"));
    // Once more is no harm.
    for _ in 0..2 {
        assert!(desk.say("pool evict 2").contains("host 2 is out"));
    }
    let seen = desk.say("pool stat");
    assert!(seen.contains("host 1 live:") && seen.contains("host 2 evicted:"), "{seen}");
    drop(keeper);
    let removed = desk.command("pool destroy --yes").output().unwrap();
    let warned = String::from_utf8(removed.stderr).unwrap();
    assert_eq!(
        warned,
        format!("host 1: processes {} still have the removed pool open\n", std::process::id())
    );
    // Processes that have it open go on.
    session.pool().close(session.pool().create("/after", 10).unwrap());
    assert!(desk.refusal("pool stat").contains("no such file"));
    drop(session);
}

#[test]
fn a_sweep_removes_nothing_that_is_of_no_dead_process() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    assert_eq!(desk.say("pool sweep"), "");
    let session = desk.session(Some(0), 7);
    session.pool().close(session.pool().create("/endpoint/7/mine", 5000).unwrap());
    assert!(desk.say("pool sweep").ends_with("job 7: removed 0 objects of 0 B\n"));
    assert!(desk.say("pool list").contains("/endpoint/7/mine"));
}

#[test]
fn an_object_is_removed_by_its_name_and_one_that_is_open_only_by_force() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    assert!(desk.refusal("pool remove /none").contains("no object /none in this pool"));
    let session = desk.session(Some(1), 0);
    let (held, let_go) = {
        let pool = session.pool();
        let held = pool.create("/held", 5000).unwrap();
        pool.close(pool.create("/let/go", 5000).unwrap());
        (held.name().to_owned(), "/let/go")
    };
    assert!(desk.say(&format!("pool remove {let_go}")).ends_with("/pool: removed /let/go\n"));
    let line = desk.refusal(&format!("pool remove {held}"));
    let holder = format!("/held is held open by host 1 pid {}; end those processes,", std::process::id());
    assert!(line.contains(&holder) && line.contains("--force"), "{line}");
    assert!(desk.say("pool list").ends_with(" /held\n"));
    desk.say(&format!("pool remove --force {held}"));
    assert_eq!(desk.say("pool list"), "");
}

#[test]
fn what_cannot_be_made_is_refused_by_the_name_that_the_user_gave() {
    let desk = Desk::new();
    let pool = desk.pool().display().to_string();
    let line = desk.refusal("pool format --size 1000");
    assert!(line.starts_with(&format!("polder: {pool}: 1000 bytes is no size")), "{line}");
    let line = desk.refusal(&format!("pool format --size 16MiB --pool {pool}/nowhere"));
    assert!(line.contains("/pool/nowhere: cannot make it"), "{line}");
    assert!(line.contains("make its directory first"), "{line}");
}

#[test]
fn a_size_for_a_pool_that_is_there_says_so_and_how_to_remove_it() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    let line = desk.refusal("pool format --size 16MiB");
    assert!(line.contains("this region holds pool") && line.contains("polder pool destroy --yes"), "{line}");
    desk.say("pool destroy --yes");
    for (bytes, shown) in [(8192, "8.0 KiB"), (5, "5 B"), (0, "0 B")] {
        std::fs::write(desk.pool(), vec![0; bytes]).unwrap();
        let line = desk.refusal("pool format --size 16MiB");
        let words =
            format!("is there already and has {shown}; --size only makes a new file; remove it first");
        assert!(line.contains(&words), "{line}");
        assert_eq!(line.contains("leave --size out"), bytes >= 4096, "{line}");
    }
    // A file of somebody's, named by mistake, is not to be removed.
    for bytes in [8192, 5] {
        std::fs::write(desk.pool(), vec![b'x'; bytes]).unwrap();
        let line = desk.refusal("pool format --size 16MiB");
        assert!(line.contains("check the path") && !line.contains("remove it"), "{line}");
    }
}

#[test]
fn a_pool_is_not_destroyed_through_a_link_and_the_refusal_names_the_pool() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    let link = desk.scratch.path().join("link");
    std::os::unix::fs::symlink(desk.pool(), &link).unwrap();
    let line = desk.refusal(&format!("pool destroy --yes --pool {}", link.display()));
    let (link, pool) = (link.display(), desk.pool().display().to_string());
    assert_eq!(line, format!("polder: {link} is a link to {pool}; name that\n"));
    assert!(desk.say("pool list").is_empty(), "the pool is whole");
    desk.say("pool destroy --yes");
    assert_eq!(desk.scratch.names(), ["link"]);
}

#[test]
fn the_live_view_goes_on_until_it_is_stopped_and_shows_what_has_changed() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    let (_watch, lines) = start(desk.command("pool stat --json --watch 10ms"));
    let mut objects = lines.map(|line| serde_json::from_str::<Value>(&line).unwrap()["objects"].clone());
    assert_eq!(objects.next(), Some(0.into()));
    let session = desk.session(Some(0), 0);
    session.pool().close(session.pool().create("/new", 1).unwrap());
    assert!(objects.any(|count| count == 1));
}

#[test]
fn a_cache_that_is_not_there_is_told_from_those_that_are_and_no_option_is_passed_over() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    for command in ["kv flush nope", "kv stat nope", "kv check nope --json"] {
        assert!(desk.refusal(command).contains("/pool: no cache nope; there are none"), "{command}");
    }
    for (option, value) in [("--root", "/proc/self/root"), ("--state", "/nowhere"), ("--policy", "/nowhere")]
    {
        let line = desk.refusal(&format!("top {option} {value} sync --once"));
        assert!(
            line.contains(&format!("{option} does not apply here: polder top sync looks into a pool")),
            "{line}"
        );
    }
    assert_eq!(desk.say("top --json sync --once"), "[]\n");
    let (_top, mut lines) = start(desk.command("kv top"));
    assert!(lines.next().unwrap().ends_with("/pool: no caches"));
}

#[test]
fn a_keeper_gives_host_ids_and_takes_them_back() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --keepers 1");
    let (keeper, mut lines) = start(desk.command("keeper --ids keeper"));
    assert!(lines.next().unwrap().starts_with("keeper 1 of "));
    let session = desk.session(None, 0);
    assert_eq!(session.pool().member().host, 0);
    assert!(desk.say("pool evict 0").contains("host 0 is out; members none, fenced none"));
    let standing = session.pool().check_membership();
    assert!(matches!(standing, Err(PoolError::Evicted { host: 0, .. })), "{standing:?}");
    assert!(desk.say("pool evict 0 --fenced").contains("fenced 0"));
    assert!(desk.say("pool stat").contains("host 0 left"));
    drop(keeper);
    assert!(desk.refusal("keeper").contains("format a pool with more --keepers"));
}

#[test]
fn a_keeper_whose_reader_goes_away_ends_at_once_and_one_whose_reader_reads_nothing_goes_on() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --keepers 2");
    let mut command = desk.command("keeper");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    // As `polder keeper | head -1`: no host comes or goes, so nothing more is printed.
    drop(out);
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(ended.status.code() == Some(1) && said.contains("cannot write to stdout: Broken pipe"), "{said}");
    let (reader, writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while (&writer).write(&[b'.'; 1]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut keeper = Running(desk.command("keeper --ids keeper").stdout(writer).spawn().unwrap());
    // It gives an id, though the pipe was full before its first line.
    drop(desk.session(None, 1));
    assert_eq!(keeper.0.try_wait().unwrap(), None);
    let told = Command::new("kill").arg(keeper.0.id().to_string()).status().unwrap();
    drop(reader);
    assert!(told.success() && !keeper.0.wait().unwrap().success());
}

#[test]
fn a_keeper_ends_where_its_pool_was_removed_or_replaced() {
    let desk = Desk::new();
    for is_replaced in [false, true] {
        desk.say("pool format --size 16MiB");
        let mut keeper =
            desk.command("keeper").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(keeper.stdout.take().unwrap()).lines();
        assert!(lines.next().unwrap().unwrap().starts_with("keeper 1 of "));
        std::fs::remove_file(desk.pool()).unwrap();
        if is_replaced {
            desk.say("pool format --size 16MiB");
        }
        let line = refused(&keeper.wait_with_output().unwrap());
        assert!(line.contains("this pool was removed, or another lies here now"), "{line}");
        let _none = std::fs::remove_file(desk.pool());
    }
}

#[test]
fn a_keeper_that_would_evict_hosts_between_two_heartbeats_is_refused() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    for asked in ["0", "1ms", "999ms"] {
        let line = desk.refusal(&format!("keeper --evict-after {asked}"));
        assert!(line.contains("give at least 1s"), "{line}");
    }
}

#[test]
fn keepers_and_evictions_never_use_a_pool_up() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB --keepers 2");
    for round in 0..3 {
        // One is killed, one is told to end, and each eviction is a keeper of its own.
        for signal in ["KILL", "TERM"] {
            let (mut keeper, mut lines) = start(desk.command("keeper"));
            let first = lines.next().unwrap();
            assert!(first.starts_with("keeper ") && first.contains(" runs;"), "{first}");
            let told =
                Command::new("kill").args(["-s", signal, &keeper.0.id().to_string()]).status().unwrap();
            assert!(told.success() && !keeper.0.wait().unwrap().success());
        }
        let session = desk.session(Some(1), 0);
        assert!(desk.say("pool evict 1").contains("host 1 is out"), "round {round}");
        drop(session);
    }
    let (_first, mut lines) = start(desk.command("keeper"));
    let number = |line: &str| line.split(' ').nth(1).unwrap().parse::<u16>().unwrap();
    let first = number(&lines.next().unwrap());
    let line = desk.refusal(&format!("keeper --incarnation {}", first + 2));
    assert!(line.contains("whose view is in force; take another incarnation"), "{line}");
    let line = desk.refusal(&format!("keeper --incarnation {first}"));
    assert!(line.contains(&format!("{first} has run; take a higher one")), "{line}");
}

#[test]
fn the_litmus_tests_run_between_two_processes_also_in_what_a_run_that_was_killed_has_left() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    let role = |role: u64| {
        let arguments = format!("verify --litmus {role} --rounds 20 --coherence software --host {role}");
        desk.command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut alone = role(0);
    while !desk.say("pool list").contains("/polder/litmus") {
        assert!(alone.try_wait().unwrap().is_none(), "it ended without the other role");
    }
    alone.kill().unwrap();
    alone.wait().unwrap();
    for ended in [role(0), role(1)].map(|child| child.wait_with_output().unwrap()) {
        // Hosts of one kernel share coherent caches: no control shows a stale read, so that the run proves nothing.
        let output = String::from_utf8(ended.stdout).unwrap();
        assert_eq!(ended.status.code(), Some(3), "{output}");
        assert!(
            output.contains("\nINCONCLUSIVE: message passing: 2 right in 40 rounds, 0 forbidden"),
            "{output}"
        );
        let end = output.lines().last().unwrap();
        assert!(
            end.starts_with("INCONCLUSIVE: nothing forbidden was seen, but controls were not"),
            "{output}"
        );
        assert!(end.contains("(520 rounds, ") && end.ends_with(" s)"), "{output}");
    }
    assert_eq!(desk.say("pool list"), "");
}

#[test]
fn the_litmus_tests_of_hosts_that_miss_flushes_show_the_controls_of_stale_reads() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    let role = |role: u64| {
        let arguments = format!("verify --litmus {role} --rounds 200 --coherence software --host {role}");
        let mut command = desk.command(&arguments);
        command.env("POLDER_WRAP", "shadow").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // On a busy machine one role may be over before the other begins, round after round.
    for _ in 0..20 {
        let ended = [role(0), role(1)].map(|child| child.wait_with_output().unwrap());
        let output = ended.map(|ended| {
            assert!(matches!(ended.status.code(), Some(0 | 3)), "{ended:?}");
            String::from_utf8(ended.stdout).unwrap()
        });
        let right = "message passing: 2 right in 400 rounds, 0 forbidden outcomes; ";
        assert!(output.iter().all(|output| output.contains(right)), "{output:?}");
        if output.iter().all(|output| output.contains(&format!("\nPASS: {right}"))) {
            return;
        }
    }
    panic!("no stale read was seen in 20 games of 2000 rounds of controls");
}

#[test]
fn rounds_of_none_are_refused() {
    let output = Desk::new().command("verify --litmus 0 --rounds 0").output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains(": expected 1 or more"));
}

#[test]
fn an_argument_goes_before_the_environment_and_that_before_the_config_file() {
    let desk = Desk::new();
    let config = desk.scratch.path().join("config.toml");
    std::fs::write(&config, "pool = \"/from/the/file\"\ntimeout = \"5s\"\n").unwrap();
    let mut from_file = desk.command("pool stat");
    from_file.env("POLDER_CONFIG", &config).env_remove("POLDER_POOL");
    assert!(refused(&from_file.output().unwrap()).contains("/from/the/file: no such file"));
    let mut from_environment = desk.command("pool stat");
    from_environment.env("POLDER_CONFIG", &config).env("POLDER_POOL", "/from/the/environment");
    assert!(refused(&from_environment.output().unwrap()).contains("/from/the/environment"));
    let mut from_arguments = desk.command("pool stat --pool /from/the/arguments");
    from_arguments.env("POLDER_CONFIG", &config).env("POLDER_POOL", "/from/the/environment");
    assert!(refused(&from_arguments.output().unwrap()).contains("/from/the/arguments"));
    std::fs::write(&config, "hots = 3\n").unwrap();
    let mut misspelt = desk.command("pool stat");
    let line = refused(&misspelt.env("POLDER_CONFIG", &config).output().unwrap());
    assert!(line.contains("config.toml") && line.contains("hots"), "{line}");
}

#[test]
fn a_config_file_that_never_ends_or_that_another_user_put_here_is_refused() {
    let desk = Desk::new();
    let pipe = desk.scratch.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    for path in [&pipe, Path::new("/dev/zero")] {
        let mut command = desk.command("pool stat");
        let line = refused(&command.env("POLDER_CONFIG", path).output().unwrap());
        assert!(line.contains("not a regular file; name a config file, or unset it"), "{line}");
    }
    let large = desk.scratch.path().join("large.toml");
    std::fs::File::create(&large).unwrap().set_len(6 << 30).unwrap();
    let line = refused(&desk.command("pool stat").env("POLDER_CONFIG", &large).output().unwrap());
    assert!(line.contains("large.toml: expected a file of 1 MiB at most"), "{line}");
    let here = desk.scratch.path().join("polder.toml");
    std::fs::write(&here, "pool = \"/from/here\"\n").unwrap();
    let stat = |config: Option<&str>| {
        let mut command = desk.command("pool stat");
        command.current_dir(desk.scratch.path()).env_remove("POLDER_CONFIG").env_remove("POLDER_POOL");
        refused(&command.envs(config.map(|path| ("POLDER_CONFIG", path))).output().unwrap())
    };
    assert!(stat(None).contains("/from/here: no such file"), "{}", stat(None));
    if !rustix::process::geteuid().is_root() {
        eprintln!("the other user's file is left out: only root gives files away");
        return;
    }
    std::os::unix::fs::chown(&here, Some(1), None).unwrap();
    let line = stat(None);
    assert!(
        line.contains("polder.toml: it belongs to user 1, and this process runs as user 0; ")
            && line.trim_end().ends_with("set POLDER_CONFIG=polder.toml"),
        "{line}"
    );
    assert!(stat(Some("polder.toml")).contains("/from/here: no such file"));
}

#[test]
fn what_a_terminal_takes_as_a_command_is_escaped_in_names_of_files() {
    let desk = Desk::new();
    let named = desk.scratch.path().join("no\u{1b}[31m");
    let mut command = desk.command("pool stat");
    let line = refused(&command.env("POLDER_POOL", &named).output().unwrap());
    assert!(line.contains("no\\u{1b}[31m") && !line.contains('\u{1b}'), "{line}");
    let mut format = desk.command("pool format --size 64MiB");
    let made = said("format", &format.env("POLDER_POOL", &named).output().unwrap());
    assert!(made.contains("no\\u{1b}[31m: pool ") && !made.contains('\u{1b}'), "{made}");
    let mut stat = desk.command("pool stat");
    let said = said("stat", &stat.env("POLDER_POOL", &named).output().unwrap());
    assert!(said.contains("no\\u{1b}[31m: ") && !said.contains('\u{1b}'), "{said}");
}

#[test]
fn a_log_filter_that_is_none_and_a_number_that_is_none_are_refused() {
    let desk = Desk::new();
    for (filter, why) in
        [("polder_pool=loud", "not a log filter"), ("warm", "warm is no level: off, error, ")]
    {
        let argument = desk.command(&format!("pool stat --log {filter}")).output().unwrap();
        let words = String::from_utf8(argument.stderr).unwrap();
        assert!(words.contains("'--log <FILTER>'") && words.contains(why), "{words}");
        let line = refused(&desk.command("pool stat").env("POLDER_LOG", filter).output().unwrap());
        assert!(line.contains(&format!("POLDER_LOG={filter}: ")) && line.contains(why), "{line}");
    }
    let mut wrong = desk.command("pool stat");
    let line = refused(&wrong.env("POLDER_TIMEOUT", "soon").output().unwrap());
    assert!(line.contains("POLDER_TIMEOUT=soon: expected a time such as 30s"), "{line}");
    let refused = desk.refusal("--host 3 probe");
    assert!(refused.contains("do not apply here: it makes pools of its own"), "{refused}");
}

#[test]
fn what_opens_a_pool_is_told_which_before_its_name_or_after_and_what_opens_none_is_not_asked() {
    let desk = Desk::new();
    for (before, after) in
        [("", " --pool /after"), ("--pool /before ", ""), ("--pool /before ", " -p /after")]
    {
        for command in ["pool stat", "keeper", "verify --litmus 0 --host 0"] {
            let given = if after.is_empty() { "/before" } else { "/after" };
            let line = desk.refusal(&format!("{before}{command}{after}"));
            assert!(line.starts_with(&format!("polder: {given}: no such file")), "{line}");
        }
    }
    for command in ["plan train", "plan search", "probe"] {
        let help = desk.say(&format!("{command} --help"));
        assert!(help.contains("--log") && !help.contains("--coherence"), "{help}");
    }
    assert!(desk.say("mpi run --help").contains("--coherence"));
    let wrong = desk.command("plan train -p dgx-h100").output().unwrap();
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("unexpected argument '-p'"));
}

#[test]
fn every_shell_gets_a_completion_script_that_knows_the_commands_and_where_it_can_platforms_and_models() {
    let desk = Desk::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = desk.say(&format!("completion {shell}"));
        assert!(script.contains("keeper") && script.contains("evict"), "{shell}");
        let takes_words = matches!(shell, "bash" | "zsh" | "fish");
        assert_eq!(script.contains("nvl72-ndr") && script.contains("llama3-405b"), takes_words, "{shell}");
    }
}

#[test]
fn a_command_whose_output_cannot_be_written_says_so_in_one_line() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    for arguments in [
        "pool stat",
        "pool stat --json",
        "pool check",
        "pool list --help",
        "--version",
        "completion bash",
        "plan show",
        "plan train --help",
        "keeper",
        "pool evict 1 --fenced",
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let ended = desk.command(arguments).stdout(full).output().unwrap();
        let output = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(
            output, "polder: cannot write to stdout: No space left on device (os error 28)\n",
            "{arguments}"
        );
        assert_eq!(ended.status.code(), Some(1), "{arguments}");
    }
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let ended = desk.command("pool stat --pool /none").stderr(full()).status().unwrap();
    assert_eq!(ended.code(), Some(1), "of stderr nobody can be told");
}

#[test]
fn logs_have_no_colour_where_there_is_no_terminal() {
    let desk = Desk::new();
    desk.say("pool format --size 16MiB");
    let logged = desk.command("pool sweep --log info").output().unwrap();
    let log = String::from_utf8(logged.stderr).unwrap();
    assert!(log.contains(" INFO ") && log.contains("attached") && !log.contains('\u{1b}'), "{log:?}");
}

#[test]
fn a_probe_that_is_told_to_end_leaves_no_process_and_no_pool() {
    for signal in ["KILL", "INT"] {
        expect_nothing_left(&Desk::new().command("probe --force --out /dev/null"), signal);
    }
}

#[test]
fn a_bare_command_says_what_one_can_want_and_a_version_names_the_commit_and_the_format() {
    let desk = Desk::new();
    let mut bare = Command::new(env!("CARGO_BIN_EXE_polder"));
    let screen = said("", &bare.env("POLDER_CONFIG", "/dev/null").output().unwrap());
    for word in ["\nshare ", "\nplace ", "\nplan ", "\noperate "] {
        assert!(screen.contains(word), "{screen}");
    }
    // Each command of the screen is one.
    for line in screen.lines().filter_map(|line| line.split_once("polder ")).map(|(_, rest)| rest) {
        let is_word = |word: &&str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase());
        let words: Vec<_> = line.split(' ').take_while(is_word).collect();
        // The last line is of all commands.
        if !words.is_empty() {
            desk.say(&format!("{} --help", words.join(" ")));
        }
    }
    let version = desk.say("--version");
    let format = format!(", pool format {})\n", polder_pool::FORMAT_VERSION);
    assert!(version.starts_with(concat!("polder ", env!("CARGO_PKG_VERSION"), " (commit ")), "{version}");
    assert!(version.ends_with(&format), "{version}");
}
