//! Pools that cannot be used: one clear line each, and nothing is lost.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use polder_attach::session::{self, Session};
use polder_attach::settings::{Settings, TimeSpan};
use polder_mem::testing::Scratch;
use polder_mem::{HostPlan, LINE, Mapped, Memory, Offset, Region};
use polder_pool::local::LocalLayout;
use polder_pool::{Geometry, Member, Pool, PoolError, inspect, line, read_superblock};

const BYTES: u64 = 1 << 20;
const GEOMETRY: Geometry =
    Geometry { hosts: 4, processes: 2, names: 61, levels: 4, chunk_bytes: 16 << 10, opens: 8, keepers: 2 };
const CONTENTS: &[u8] = b"must not be lost";

/// A pool with an object in it.
struct Made {
    scratch: Scratch,
    path: PathBuf,
}

impl Made {
    fn new() -> Self {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        session::create(&path, BYTES, &GEOMETRY).unwrap();
        let made = Self { scratch, path };
        let session = made.session(0);
        {
            let pool = session.pool();
            let object = pool.create("/kept", CONTENTS.len() as u64).unwrap();
            object.write_at(pool.memory(), 0, CONTENTS).unwrap();
            pool.close(object);
        };
        made
    }

    fn settings(&self, host: u16) -> Settings {
        Settings {
            pool: Some(self.path.clone()),
            run: Some(self.scratch.path().into()),
            host: Some(host),
            timeout: Some(TimeSpan(Duration::from_secs(5))),
            ..Settings::default()
        }
    }

    fn session(&self, host: u16) -> Session {
        Session::open(&self.settings(host)).unwrap()
    }

    fn memory(&self) -> Mapped {
        Mapped::coherent(Region::open(&self.path).unwrap())
    }

    /// That the object is there, whole.
    fn expect_kept(&self) {
        let session = self.session(1);
        {
            let pool = session.pool();
            let object = pool.open("/kept").unwrap();
            let mut read = vec![0; CONTENTS.len()];
            object.read_at(pool.memory(), 0, &mut read).unwrap();
            assert_eq!(read, CONTENTS);
            pool.close(object);
        };
    }

    fn polder(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
        command.args(arguments).arg("--pool").arg(&self.path).output().unwrap()
    }
}

/// That a command failed with one line that holds all these words.
fn expect_line(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    for word in words {
        assert!(said.contains(word), "{said:?} lacks {word:?}");
    }
}

/// Writes a superblock line whose checksum is right.
fn rewrite(made: &Made, change: impl FnOnce(&mut line::Words)) {
    let memory = made.memory();
    let mut words = line::load(&memory, Offset(0)).unwrap().unwrap();
    change(&mut words);
    line::publish(&memory, Offset(0), &words);
}

#[test]
fn a_pool_that_cannot_be_used_is_named_in_one_line_with_its_remedy_and_stays_as_it_was() {
    type Damage = fn(&Made);
    let cases: [(Damage, &[&str]); 6] = [
        (|made| std::fs::remove_file(&made.path).unwrap(), &["no such file", "polder pool format"]),
        (|made| std::fs::write(&made.path, []).unwrap(), &["is no pool: it has 0 bytes", "check the path"]),
        (
            |made| std::fs::write(&made.path, [7; 8192]).unwrap(),
            &["no pool", "0x0707070707070707", "check the path", "format --force"],
        ),
        (|made| truncate(made, 64 << 10), &["needs 1 MiB", "has 64 KiB", "enlarge"]),
        (|made| rewrite(made, |words| words[1] = 10), &["has format 10", "reads format 9"]),
        (|made| rewrite(made, |words| words[4] = 4096), &["corrupt superblock", "format again with --force"]),
    ];
    for (damage, words) in cases {
        let made = Made::new();
        damage(&made);
        let before = std::fs::read(&made.path).ok();
        for command in ["list", "stat", "check"] {
            expect_line(&made.polder(&["pool", command]), words);
        }
        expect_line(&made.polder(&["keeper"]), words);
        expect_line(&made.polder(&["pool", "evict", "1"]), words);
        let refused = Session::open(&made.settings(1)).unwrap_err().to_string();
        words.iter().for_each(|word| assert!(refused.contains(word), "{refused:?} lacks {word:?}"));
        assert_eq!(std::fs::read(&made.path).ok(), before, "a refused pool was written to");
    }
}

fn truncate(made: &Made, bytes: u64) {
    std::fs::OpenOptions::new().write(true).open(&made.path).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_pool_that_would_be_too_small_is_not_made() {
    let scratch = Scratch::new();
    let path = scratch.path().join("pool");
    let format = |size: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
        command.args(["pool", "format", "--size", size, "--pool"]).arg(&path).output().unwrap()
    };
    expect_line(&format("64KiB"), &["needs 512 KiB", "has 64 KiB", "lower --hosts"]);
    expect_line(&format("100B"), &["100 bytes is no size"]);
    assert_eq!(scratch.names(), [""; 0]);
}

#[test]
fn a_size_that_is_no_multiple_of_a_page_is_rounded_down_to_one() {
    let scratch = Scratch::new();
    let path = scratch.path().join("pool");
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    command.args(["pool", "format", "--size", "256M", "--pool"]).arg(&path);
    assert!(command.output().unwrap().status.success());
    assert_eq!(std::fs::metadata(path).unwrap().len(), 256_000_000 / 4096 * 4096);
}

#[test]
fn a_superblock_that_is_damaged_at_any_bit_is_refused_and_whole_again_when_the_bit_is() {
    let made = Made::new();
    let memory = made.memory();
    let sound = read_superblock(&memory).unwrap();
    for bit in 0..4096 * 8 {
        let at = Offset(bit / 64 * 8);
        let word = memory.load(at).unwrap();
        memory.store(at, word ^ 1 << (bit % 64));
        let refused = read_superblock(&memory).unwrap_err();
        assert!(
            matches!(refused, PoolError::Corrupt { what: "superblock", .. }),
            "bit {bit} of the superblock: {refused}"
        );
        memory.store(at, word);
    }
    assert_eq!(read_superblock(&memory), Ok(sound));
    made.expect_kept();
}

#[test]
fn metadata_that_is_damaged_at_any_bit_is_found_and_harms_nothing_else() {
    let made = Made::new();
    let memory = made.memory();
    let layout = read_superblock(&memory).unwrap().layout().unwrap();
    assert_eq!(inspect(&memory).unwrap().problems, []);
    // What is all zeros was never written: a line, or a word where each is checked by itself.
    let lines = (4096 / LINE..layout.chunk_area().0 / LINE).map(|number| Offset(0).lines(number));
    let is_zero = |at| memory.load(at) == Ok(0);
    let written: Vec<_> = lines
        .flat_map(|line| {
            let whole = line::load(&memory, line).unwrap().is_some();
            let zeros = (0..8).all(|word| is_zero(line.word(word)));
            (0..8).map(move |word| line.word(word)).filter(move |at| !zeros && (whole || !is_zero(*at)))
        })
        .collect();
    assert!(written.len() >= 5 * 8, "{written:?}");
    for at in written {
        for bit in 0..64_u32 {
            let word = memory.load(at).unwrap();
            memory.store(at, word ^ 1 << bit);
            let found = inspect(&memory).unwrap();
            assert!(
                !found.problems.is_empty(),
                "bit {} of the word at {at} is damaged, and nobody says so",
                bit % 64
            );
            if bit.is_multiple_of(13) {
                use_another_host(&made, &format!("/{at}/{bit}"));
            }
            memory.store(at, word);
        }
    }
    assert_eq!(inspect(&memory).unwrap().problems, []);
    made.expect_kept();
}

/// Whatever is damaged, a host that did not write it goes on.
fn use_another_host(made: &Made, name: &str) {
    // A process that waits for a damaged line to become whole waits in vain.
    let timeout = Some(TimeSpan(Duration::from_millis(2)));
    let session = Session::open(&Settings { timeout, ..made.settings(2) }).unwrap();
    {
        let pool = session.pool();
        pool.close(pool.create(name, 10).unwrap());
        pool.close(pool.open(name).unwrap());
        pool.destroy(name).unwrap();
        // It may be the one that is damaged: an error is an answer.
        drop(pool.open("/kept").map(|object| pool.close(object)));
        pool.maintain().unwrap();
    };
}

#[test]
fn an_object_whose_metadata_is_damaged_is_kept_by_its_owner_until_the_bit_is_right_again() {
    let made = Made::new();
    let memory = made.memory();
    let layout = read_superblock(&memory).unwrap().layout().unwrap();
    let first_word = |at: &Offset| memory.load(*at) != Ok(0);
    let entry = (0..layout.slots()).map(|slot| layout.entry(0, slot)).find(first_word).unwrap();
    let header = Offset(memory.load(entry.word(3)).unwrap());
    {
        let session = made.session(0);
        let pool = session.pool();
        pool.close(pool.create("/other", 100).unwrap())
    };
    for at in [entry, header].into_iter().flat_map(|line| (0..8).map(move |word| line.word(word))) {
        let word = memory.load(at).unwrap();
        for bit in (0..64).filter(|bit| *bit < 8 || bit % 5 == 0) {
            memory.store(at, word ^ 1 << bit);
            use_the_owner(&made, &format!("bit {bit} of the word at {at}"));
            memory.store(at, word);
            {
                let session = made.session(0);
                let pool = session.pool();
                pool.close(pool.open("/kept").unwrap())
            };
            made.expect_kept();
        }
    }
    assert_eq!(inspect(&memory).unwrap().problems, []);
}

#[test]
fn list_and_stat_say_how_many_entries_are_damaged_and_fail_then() {
    let made = Made::new();
    {
        let session = made.session(0);
        let pool = session.pool();
        pool.close(pool.create("/other", 100).unwrap())
    };
    let memory = made.memory();
    let layout = read_superblock(&memory).unwrap().layout().unwrap();
    let first_words = (0..layout.slots()).map(|slot| layout.entry(0, slot));
    let entries: Vec<_> = first_words.filter(|at| memory.load(*at) != Ok(0)).collect();
    let said = |code, command| {
        let output = made.polder(command);
        assert_eq!(output.status.code(), Some(code));
        [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap())
    };
    assert!(said(0, &["pool", "stat", "--json"])[0].contains(r#""damaged":0"#));
    for (damaged, at, remark) in [
        (1, entries[0], "1 entry is damaged; run `polder pool check`\n"),
        (2, entries[1], "2 entries are damaged; run `polder pool check`\n"),
    ] {
        memory.store(at, memory.load(at).unwrap() ^ 4);
        let [listed, warned] = said(1, &["pool", "list"]);
        assert_eq!((listed.lines().count(), &*warned), (2 - damaged, remark));
        let [counted, warned] = said(1, &["pool", "stat", "--json"]);
        assert!(counted.contains(&format!(r#""damaged":{damaged}"#)), "{counted}");
        assert_eq!(warned, remark);
    }
}

/// The owner of what is damaged starts anew, says what is damaged or has mended it, and goes on.
fn use_the_owner(made: &Made, damage: &str) {
    let timeout = Some(TimeSpan(Duration::from_millis(2)));
    let session = Session::open(&Settings { timeout, ..made.settings(0) }).unwrap();
    {
        let pool = session.pool();
        let opened = pool.open("/kept").map(|object| pool.close(object));
        let problems = inspect(pool.memory()).unwrap().problems;
        match opened {
            Ok(()) => assert_eq!(problems, [], "{damage}"),
            Err(PoolError::Corrupt { .. } | PoolError::NotFound { .. }) => {
                assert!(!problems.is_empty(), "{damage}, and nobody says so");
            }
            Err(error) => panic!("{damage}: {error}"),
        }
        pool.close(pool.open("/other").unwrap());
        // What is new goes elsewhere.
        for bytes in [10, 5_000] {
            let new = pool.create("/new", bytes).unwrap();
            new.write_at(pool.memory(), 0, &vec![255; bytes as usize]).unwrap();
            pool.close(new);
            pool.destroy("/new").unwrap();
            pool.maintain().unwrap();
        }
    };
}

#[test]
fn a_pool_without_permission_is_refused_with_its_owner_and_mode() {
    const NOBODY: u32 = 65534;
    let made = Made::new();
    std::fs::set_permissions(&made.path, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::set_permissions(made.scratch.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let me = std::fs::metadata(&made.path).unwrap().uid();
    // Where another user can run it. Copied by another process: a test that forks meanwhile would inherit the file open
    // for writing, and nobody may run it then.
    let program = made.scratch.path().join("polder");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_polder")).arg(&program).status().unwrap().success());
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(&program);
    command.args(["pool", "list", "--pool"]).arg(&made.path).current_dir("/");
    if me == 0 {
        // No mode keeps root out.
        command.uid(NOBODY).gid(NOBODY);
    } else {
        std::fs::set_permissions(&made.path, PermissionsExt::from_mode(0o0)).unwrap();
    }
    expect_line(&command.output().unwrap(), &["no permission", &format!("owner {me}"), "mode 0"]);
    std::fs::set_permissions(&made.path, PermissionsExt::from_mode(0o600)).unwrap();
    made.expect_kept();
}

/// Attaches as `host` of another boot.
fn attach_elsewhere(made: &Made, host: u16) -> Pool<Mapped> {
    let superblock = read_superblock(&made.memory()).unwrap();
    let Geometry { hosts, processes, .. } = superblock.geometry;
    let local_words = LocalLayout::new(&superblock.layout().unwrap()).words();
    let bells = u32::from(hosts * processes);
    // Another kernel's files are not this one's: its number is not the pool's own.
    let plan = HostPlan { hosts, processes, local_words, bells, ..made.scratch.plan(host) };
    Pool::attach(made.memory().attach(&plan).unwrap(), Member::new(host, 7)).unwrap()
}

#[test]
fn a_host_id_that_is_live_is_refused_and_its_holder_is_not_disturbed() {
    let made = Made::new();
    let holder = attach_elsewhere(&made, 3);
    let object = holder.create("/holder", 10).unwrap();
    let refused = std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let holder = &holder;
        scope.spawn(move || {
            while stopped
                .recv_timeout(Duration::from_millis(20))
                .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                holder.beat().unwrap();
            }
        });
        let refused = Session::open(&made.settings(3)).unwrap_err().to_string();
        drop(stop);
        refused
    });
    assert!(refused.contains("host id 3 is live") && refused.contains("polder pool evict 3"), "{refused}");
    assert!(!refused.contains('\n'));
    holder.check_membership().unwrap();
    holder.close(object);
    holder.close(holder.open("/holder").unwrap());
    made.expect_kept();
}

#[test]
fn the_id_of_a_boot_that_stands_still_is_refused_until_somebody_says_that_it_is_off() {
    let made = Made::new();
    let stopped = attach_elsewhere(&made, 3);
    let refused = Session::open(&made.settings(3)).unwrap_err().to_string();
    assert!(refused.contains("host id 3 belongs to boot 0x7"), "{refused}");
    assert!(refused.contains("polder pool evict 3 --fenced") && !refused.contains('\n'), "{refused}");
    stopped.beat().unwrap();
    // Once more is no harm.
    for _ in 0..2 {
        let mut evict = Command::new(env!("CARGO_BIN_EXE_polder"));
        let output =
            evict.args(["pool", "evict", "3", "--fenced", "--pool"]).arg(&made.path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let output = String::from_utf8(output.stdout).unwrap();
        assert!(output.contains("host 3 is out") && output.contains("fenced 3"), "{output}");
    }
    let next = made.session(3);
    assert!(matches!(stopped.beat(), Err(PoolError::Evicted { host: 3, .. })));
    drop(next);
    made.expect_kept();
}

#[test]
fn a_full_pool_fails_the_call_gives_its_bytes_back_and_all_else_goes_on() {
    let made = Made::new();
    let (session, other) = (made.session(0), made.session(1));
    let (pool, other) = (session.pool(), other.pool());
    let free = |asked| match pool.create("/all", asked) {
        Err(PoolError::Full { free, .. }) => free,
        other => panic!("{other:?}"),
    };
    let before = free(u64::MAX / 2);
    let mut names = vec![];
    let full = loop {
        let name = format!("/{}", names.len());
        match pool.create(&name, 12_000) {
            Ok(object) => pool.close(object),
            Err(error) => break error,
        }
        names.push(name);
    };
    assert!(full.to_string().starts_with("the pool is full: "), "{full}");
    let left = free(u64::MAX / 2);
    for _ in 0..100 {
        assert!(matches!(pool.create("/more", 12_000), Err(PoolError::Full { .. })));
    }
    assert_eq!(free(u64::MAX / 2), left, "calls that failed kept something");
    assert!(matches!(pool.open("/more"), Err(PoolError::NotFound { .. })));
    // What is there is there, for everybody.
    other.close(other.open("/kept").unwrap());
    other.close(other.open(&names[0]).unwrap());
    for name in names {
        pool.destroy(&name).unwrap();
    }
    pool.maintain().unwrap();
    assert_eq!(free(u64::MAX / 2), before);
    made.expect_kept();
}
