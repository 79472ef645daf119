//! Real processes on the memory of their hosts: slots, liveness, what the last one and a killed one leave behind.

use std::time::{Duration, Instant};

use polder_mem::conformance;
use polder_mem::testing::{Child, Ended, Scratch};
use polder_mem::{
    Bell, HostError, HostPlan, Liveness, LocalWord, Mapped, Memory, Offset, ProcessSlot, Region, Trigger,
    TriggerAction, Wrapped,
};

fn plan(scratch: &Scratch, pool: u64, host: u16) -> HostPlan {
    HostPlan { pool, local_words: 8, bells: 2, ..scratch.plan(host) }
}

/// A process of `host` with a mapping of its own.
fn attach(scratch: &Scratch, host: u16) -> Result<Mapped, HostError> {
    let path = scratch.path().join("region");
    let region = Region::open(&path).or_else(|_| Region::create(&path, 4096)).expect("a region");
    Mapped::coherent(region).attach(&plan(scratch, 1, host))
}

/// Waits until `found` says so.
fn eventually(what: &str, mut found: impl FnMut() -> bool) {
    let start = Instant::now();
    while !found() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} never came");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Forks a process that attaches to `host`, says so in local word 0 or in bell 0, and sleeps until it is killed.
fn sleeper(scratch: &Scratch, host: u16) -> Child {
    Child::fork(|| {
        let memory = attach(scratch, host).expect("a slot");
        memory.local_store(LocalWord(0), 1 + u64::from(memory.slot().0));
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    })
}

#[test]
fn processes_of_one_host_take_different_slots_and_a_killed_one_is_dead_and_its_slot_free() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    assert_eq!(memory.slot(), ProcessSlot(0));
    assert_eq!(memory.liveness(0, ProcessSlot(1)), Liveness::Unknown, "never held under this kernel");

    let mut child = sleeper(&scratch, 0);
    eventually("the child's word", || memory.local_load(LocalWord(0)) == 2);
    assert_eq!(memory.liveness(0, ProcessSlot(0)), Liveness::Alive);
    assert_eq!(memory.liveness(0, ProcessSlot(1)), Liveness::Alive);
    let full = attach(&scratch, 0).expect_err("both slots are taken");
    assert!(matches!(full, HostError::NoSlot { host: 0, slots: 2 }), "{full}");

    assert_eq!(child.kill(), Ended::Killed(libc::SIGKILL));
    assert_eq!(memory.liveness(0, ProcessSlot(1)), Liveness::Dead);
    let next = attach(&scratch, 0).expect("the dead one's slot");
    assert_eq!(next.slot(), ProcessSlot(1));
    assert_eq!(next.local_load(LocalWord(0)), 2, "the words outlive a process");
    assert_eq!(memory.liveness(0, ProcessSlot(1)), Liveness::Alive);
    drop((memory, next));
    assert_eq!(scratch.names(), ["region"]);
}

#[test]
fn a_stopped_process_is_alive() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    let child = sleeper(&scratch, 1);
    eventually("the child", || memory.liveness(1, ProcessSlot(0)) == Liveness::Alive);
    child.stop();
    assert_eq!(memory.liveness(1, ProcessSlot(0)), Liveness::Alive);
}

#[test]
fn two_attachments_of_one_process_hold_two_slots_and_dropping_one_keeps_the_other() {
    let scratch = Scratch::new();
    let one = attach(&scratch, 0).expect("a slot");
    let two = attach(&scratch, 0).expect("another slot");
    assert_eq!((one.slot(), two.slot()), (ProcessSlot(0), ProcessSlot(1)));
    let clone = one.clone();
    drop(one);
    assert_eq!(two.liveness(0, ProcessSlot(0)), Liveness::Alive, "a clone still holds it");
    drop(clone);
    assert_eq!(two.liveness(0, ProcessSlot(0)), Liveness::Dead);
    assert_eq!(two.liveness(0, ProcessSlot(1)), Liveness::Alive);
}

#[test]
fn what_killed_processes_left_is_taken_over_with_zeroed_words() {
    let scratch = Scratch::new();
    for host in [0, 1] {
        let mut child = sleeper(&scratch, host);
        eventually("the child's word", || {
            let words = std::fs::read(scratch.path().join(format!("polder-{:016x}-{host}", 1)));
            words.is_ok_and(|words| words.first() == Some(&1))
        });
        child.kill();
    }
    assert_eq!(scratch.names().len(), 4, "region, kernel file, two host files");
    let memory = attach(&scratch, 0).expect("a slot");
    assert_eq!(memory.slot(), ProcessSlot(0));
    assert_eq!(memory.local_load(LocalWord(0)), 0);
    assert_eq!(memory.liveness(1, ProcessSlot(0)), Liveness::Unknown, "nothing is known of an earlier time");
    drop(memory);
    assert_eq!(scratch.names(), ["region"], "the last process removes the other host's file too");
}

#[test]
fn what_killed_processes_left_is_swept_when_another_pool_is_attached() {
    let scratch = Scratch::new();
    let mut child = sleeper(&scratch, 1);
    eventually("the child's files", || scratch.names().len() == 3);
    let path = scratch.path().join("other");
    let other = Mapped::coherent(Region::create(&path, 4096).expect("a region"));
    let other = other.attach(&plan(&scratch, 2, 0)).expect("a slot");
    assert!(
        scratch.names().iter().any(|name| name.contains("0001-kernel")),
        "a living process keeps its files"
    );
    child.kill();
    let again =
        Mapped::coherent(Region::open(&path).expect("it")).attach(&plan(&scratch, 2, 0)).expect("a slot");
    assert!(scratch.names().iter().all(|name| !name.contains("0001-")), "{:?}", scratch.names());
    drop((other, again));
    assert_eq!(scratch.names(), ["other", "region"]);
}

#[test]
fn a_forked_child_neither_keeps_its_parents_slot_alive_nor_gives_it_back() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    let mut parent = Child::fork(|| {
        let mut inherited = attach(&scratch, 1).ok();
        // A grandchild that drops what it inherited, and outlives its parent.
        let grandchild = Child::fork(|| {
            drop(inherited.take().expect("a slot"));
            let memory = attach(&scratch, 0).expect("a slot of its own");
            memory.local_store(LocalWord(1), u64::from(std::process::id()));
            std::thread::sleep(Duration::from_secs(60));
        });
        std::mem::forget(grandchild);
        std::thread::sleep(Duration::from_secs(60));
    });
    eventually("the grandchild", || memory.local_load(LocalWord(1)) != 0);
    assert_eq!(
        memory.liveness(1, ProcessSlot(0)),
        Liveness::Alive,
        "the drop in the grandchild changed nothing"
    );
    parent.kill();
    assert_eq!(memory.liveness(1, ProcessSlot(0)), Liveness::Dead, "though the grandchild lives");
    let grandchild = memory.local_load(LocalWord(1)) as libc::pid_t;
    // SAFETY: sends a signal to a process that this test started.
    unsafe { libc::kill(grandchild, libc::SIGKILL) };
}

#[test]
fn processes_that_come_and_go_and_are_killed_at_any_moment_leave_nothing_that_hinders_the_next() {
    let scratch = Scratch::new();
    drop(attach(&scratch, 0).expect("makes the region"));
    let come_and_go = |host| {
        for _ in 0..100 {
            match attach(&scratch, host) {
                Ok(memory) => {
                    let mine = LocalWord(2 + u32::from(memory.slot().0));
                    assert_eq!(memory.local_cas(mine, 0, 1), Ok(()), "no other process has this slot");
                    memory.local_store(mine, 0);
                }
                Err(HostError::NoSlot { .. }) => {}
                Err(e) => panic!("{e}"),
            }
        }
    };
    let mut steady: Vec<_> = [0, 1].map(|host| Child::fork(|| come_and_go(host))).into();
    for round in 0..60_u64 {
        let mut victim = Child::fork(|| {
            loop {
                drop(attach(&scratch, 1));
            }
        });
        std::thread::sleep(Duration::from_micros(round * 137 % 4000));
        victim.kill();
    }
    for child in &mut steady {
        assert_eq!(child.wait(), Ended::Exited(0));
    }
    drop(attach(&scratch, 1).expect("a slot"));
    assert_eq!(scratch.names(), ["region"]);
}

#[test]
fn other_numbers_than_those_of_living_processes_are_refused() {
    let scratch = Scratch::new();
    let _memory = attach(&scratch, 0).expect("a slot");
    let region = || Mapped::coherent(Region::open(scratch.path().join("region")).expect("it"));
    let other = HostPlan { bells: 3, ..plan(&scratch, 1, 1) };
    let error = region().attach(&other).expect_err("another number of bells").to_string();
    assert!(error.contains("-kernel: its size in bytes is") || error.contains("number of bells"), "{error}");
    let none = HostPlan { host: 2, ..plan(&scratch, 1, 0) };
    let error = region().attach(&none).expect_err("no such host").to_string();
    assert_eq!(
        error,
        "host id 2 is not one of this pool's ids, 0 to 1; choose one of these, or format it with more --hosts"
    );
}

#[test]
fn a_process_that_was_killed_asleep_does_not_silence_the_bell() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    for _ in 0..20 {
        let mut child = Child::fork(|| {
            let memory = attach(&scratch, 1).expect("a slot");
            let seen = memory.announce_sleep(Bell(1));
            memory.local_store(LocalWord(0), 1);
            memory.sleep(Bell(1), seen, memory.now() + Duration::from_secs(60));
        });
        eventually("the sleeper", || memory.liveness(1, ProcessSlot(0)) == Liveness::Alive);
        std::thread::sleep(Duration::from_millis(2));
        child.kill();
        let seen = memory.announce_sleep(Bell(1));
        memory.wake(Bell(1));
        let start = Instant::now();
        memory.sleep(Bell(1), seen, memory.now() + Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn two_processes_pass_messages_and_wake_each_other() {
    let scratch = Scratch::new();
    let path = scratch.path().join("software");
    drop(Region::create(&path, conformance::BYTES).expect("a region"));
    let attach = |host| {
        let memory = Mapped::new(Region::open(&path).expect("it"));
        memory.attach(&plan(&scratch, 3, host)).expect("a slot")
    };
    let mut other = Child::fork(|| {
        let memory = attach(1);
        conformance::subscriber(&memory, 5000);
        conformance::bells(&memory, 1, 20_000);
    });
    let memory = attach(0);
    conformance::publisher(&memory, 5000);
    conformance::bells(&memory, 0, 20_000);
    assert_eq!(other.wait(), Ended::Exited(0));
}

/// Adds messages by rule 2, with an operation at which it dies or stops.
fn write_messages(scratch: &Scratch, trigger: Trigger) {
    let region = Region::open(scratch.path().join("region")).expect("it");
    let memory = Wrapped::from(Mapped::coherent(region)).with_trigger(trigger);
    let memory = memory.attach(&plan(scratch, 1, 1)).expect("a slot");
    for message in 1..=3_u64 {
        memory.copy_in(Offset(64), &[message as u8; 128]).expect("good memory");
        memory.write_back(Offset(64), 128);
        memory.sfence();
        memory.store(Offset(0), message);
        memory.write_back(Offset(0), 8);
        memory.sfence();
    }
    // Attaching makes no operation, each message 7: a copy of two lines and five more.
    assert_eq!(memory.operations(), 21);
}

#[test]
fn a_process_killed_at_each_operation_in_turn_leaves_what_came_before_it() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    for operation in 1..=22 {
        memory.copy_in(Offset(0), &[0; 192]).expect("good memory");
        let trigger = Trigger { operation, action: TriggerAction::Kill };
        let ended = Child::fork(|| write_messages(&scratch, trigger)).wait();
        assert_eq!(ended, if operation > 21 { Ended::Exited(0) } else { Ended::Killed(libc::SIGKILL) });
        let (whole, part) = ((operation - 1) / 7, (operation - 1) % 7);
        assert_eq!(
            memory.load(Offset(0)),
            Ok(if part > 4 { whole + 1 } else { whole }),
            "killed before {operation}"
        );
        let first_line = if part > 0 { whole + 1 } else { whole };
        let second_line = if part > 1 { whole + 1 } else { whole };
        let expected = [first_line, second_line].map(|byte| Ok(u64::from_le_bytes([byte as u8; 8])));
        assert_eq!(
            [memory.load(Offset(64)), memory.load(Offset(128))],
            expected,
            "killed before {operation}"
        );
    }
}

#[test]
fn a_process_stopped_at_an_operation_goes_on_when_it_is_let() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    let trigger = Trigger { operation: 12, action: TriggerAction::Stop };
    let mut child = Child::fork(|| write_messages(&scratch, trigger));
    eventually("the first message", || memory.load(Offset(0)) == Ok(1));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((memory.load(Offset(0)), child.ended()), (Ok(1), None), "it stands still before the second");
    child.go_on();
    assert_eq!(child.wait(), Ended::Exited(0));
    assert_eq!(memory.load(Offset(0)), Ok(3));
}

#[test]
fn a_trigger_that_is_armed_late_counts_from_there() {
    let scratch = Scratch::new();
    let memory = attach(&scratch, 0).expect("a slot");
    let mut child = Child::fork(|| {
        let region = Region::open(scratch.path().join("region")).expect("it");
        let memory = Wrapped::from(Mapped::coherent(region)).attach(&plan(&scratch, 1, 1)).expect("a slot");
        memory.store(Offset(0), 1);
        memory.store(Offset(8), 2);
        memory.clone().arm(Trigger { operation: 2, action: TriggerAction::Kill });
        memory.store(Offset(16), 3);
        memory.store(Offset(24), 4);
    });
    assert_eq!(child.wait(), Ended::Killed(libc::SIGKILL));
    assert_eq!([0, 8, 16, 24].map(|at| memory.load(Offset(at)).unwrap()), [1, 2, 3, 0]);
}

#[test]
fn a_line_that_a_killed_process_held_in_the_shadow_is_free_for_its_sibling() {
    let scratch = Scratch::new();
    let path = scratch.path().join("region");
    drop(Region::create(&path, 4096).expect("a region"));
    let shadow = || {
        let memory = Wrapped::shadow(Mapped::coherent(Region::open(&path).expect("it")));
        memory.attach(&plan(&scratch, 1, 0)).expect("a slot")
    };
    let memory = shadow();
    for round in 0..100_u64 {
        let mut child = Child::fork(|| {
            let memory = shadow();
            loop {
                memory.store(Offset(0), 1);
                memory.write_back(Offset(0), 8);
            }
        });
        eventually("the child's store", || memory.load(Offset(0)) == Ok(1));
        std::thread::sleep(Duration::from_micros(round * 7));
        child.kill();
        memory.store(Offset(0), 0);
        memory.write_back(Offset(0), 8);
        assert_eq!(memory.load(Offset(0)), Ok(0));
    }
}

/// As [`attach`], with a run directory of its own for the same pool.
fn attach_in(scratch: &Scratch, directory: &str) -> Result<Mapped, HostError> {
    let directory = scratch.path().join(directory);
    std::fs::create_dir_all(&directory).expect("a directory");
    let region = Region::open(scratch.path().join("region")).expect("it");
    Mapped::coherent(region).attach(&HostPlan {
        directory,
        patience: Duration::from_millis(20),
        ..plan(scratch, 1, 0)
    })
}

#[test]
fn of_two_run_directories_one_has_a_host_of_a_pool_and_the_other_is_refused_by_name() {
    const ROUNDS: u32 = 20;
    let scratch = Scratch::new();
    drop(attach(&scratch, 0).expect("makes the region"));
    for round in 0..ROUNDS {
        let start = std::sync::Barrier::new(2);
        let come = |name| {
            start.wait();
            attach_in(&scratch, name)
        };
        let (one, two) = std::thread::scope(|scope| {
            let one = scope.spawn(|| come("one"));
            (come("two"), one.join().expect("no panic"))
        });
        let (refused, holder) = match (one, two) {
            (Ok(holder), Err(refused)) | (Err(refused), Ok(holder)) => (refused, holder),
            both => panic!("round {round} of {ROUNDS}: {both:?}"),
        };
        assert!(refused.to_string().contains("host 0 is in use by processes that do not share"), "{refused}");
        assert!(refused.to_string().contains(&*scratch.path().to_string_lossy()), "{refused}");
        drop(holder);
    }
    let mut killed = Child::fork(|| {
        let _memory = attach_in(&scratch, "one").expect("nobody else is there");
        std::fs::write(scratch.path().join("there"), "").expect("a file");
        std::thread::sleep(Duration::from_secs(60));
    });
    eventually("the child", || scratch.path().join("there").exists());
    let refused = attach_in(&scratch, "two").expect_err("the other lives");
    assert!(matches!(refused, HostError::Apart { host: 0, .. }), "{refused}");
    let names = std::fs::read_dir(scratch.path().join("two")).expect("it").count();
    assert_eq!(names, 0, "what is refused leaves no files");
    killed.kill();
    drop(attach_in(&scratch, "two").expect("the other was killed"));
    println!("{ROUNDS} rounds of two directories that come at once");
}

#[test]
fn words_that_are_kept_outlive_all_processes_and_the_others_are_zeros_again() {
    let scratch = Scratch::new();
    drop(attach(&scratch, 0).expect("makes the region"));
    let again = || {
        let region = Region::open(scratch.path().join("region")).expect("it");
        let plan = HostPlan { kept: 1..3, ..plan(&scratch, 1, 0) };
        Mapped::coherent(region).attach(&plan).expect("a slot")
    };
    let mut killed = Child::fork(|| {
        let memory = again();
        for word in 0..8 {
            memory.local_store(LocalWord(word), 7);
        }
        std::fs::write(scratch.path().join("there"), "").expect("a file");
        std::thread::sleep(Duration::from_secs(60));
    });
    eventually("the child", || scratch.path().join("there").exists());
    killed.kill();
    let memory = again();
    assert_eq!([0, 1, 2, 3, 7].map(|word| memory.local_load(LocalWord(word))), [0, 7, 7, 0, 0]);
}

#[test]
fn a_host_file_that_was_cut_is_refused_by_name_and_size() {
    let scratch = Scratch::new();
    let _memory = attach(&scratch, 0).expect("a slot");
    let path = scratch.path().join(format!("polder-{:016x}-0", 1));
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(0)).expect("it");
    let refused = attach(&scratch, 0).expect_err("it was cut").to_string();
    assert!(
        refused.starts_with(&format!("{}: its size in bytes is 0, this process has 64;", path.display()))
    );
    assert!(refused.contains("it was cut, or another version"), "{refused}");
}

/// Runs `body` in a child as root that has mounts of its own, unless that is not permitted here.
fn with_own_mounts(body: impl FnOnce()) {
    // SAFETY: reads a number of this process.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut child = Child::fork(|| {
        // SAFETY: changes the mounts of this process alone; the strings end with a zero.
        let apart = unsafe {
            is_root
                && libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
        };
        if !apart {
            println!("skipped: this user may not have mounts of its own");
            return;
        }
        body();
    });
    assert_eq!(child.wait(), Ended::Exited(0));
}

fn mount_tmpfs(at: &std::path::Path, options: &std::ffi::CStr) {
    let at = std::ffi::CString::new(at.to_str().expect("a path")).expect("a path");
    // SAFETY: all are strings that end with a zero.
    let rc =
        unsafe { libc::mount(c"tmpfs".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast()) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_run_directory_that_is_full_is_an_error_and_nothing_is_left_there() {
    let scratch = Scratch::new();
    drop(attach(&scratch, 0).expect("makes the region"));
    let run = scratch.path().join("run");
    std::fs::create_dir(&run).expect("a directory");
    with_own_mounts(|| {
        mount_tmpfs(&run, c"size=64k");
        let region = Region::open(scratch.path().join("region")).expect("it");
        let plan = HostPlan { directory: run.clone(), local_words: 1 << 17, ..plan(&scratch, 1, 0) };
        let refused = Mapped::coherent(region).attach(&plan).expect_err("no room").to_string();
        assert!(
            refused.contains("-0: its file system has no room for 1048576 bytes; make room"),
            "{refused}"
        );
        assert_eq!(std::fs::read_dir(&run).expect("it").count(), 0);
    });
}

/// Runs `body` in a child as another user, in no group of root's.
fn as_user(user: u32, body: impl FnOnce()) {
    let mut child = Child::fork(|| {
        // SAFETY: calls on numbers.
        let changed = unsafe {
            libc::setgroups(0, std::ptr::null()) == 0 && libc::setgid(user) == 0 && libc::setuid(user) == 0
        };
        assert!(changed, "{}", std::io::Error::last_os_error());
        body();
    });
    assert_eq!(child.wait(), Ended::Exited(0));
}

#[test]
fn what_another_user_planted_is_refused_by_name() {
    const VICTIM: u32 = 4711;
    const OTHER: u32 = 4712;
    // SAFETY: reads a number of this process.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: only root can act as two users");
        return;
    }
    let scratch = Scratch::new();
    let open_to_all = |path: &std::path::Path| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("chmod");
    };
    open_to_all(scratch.path());
    let refused = || {
        let words = std::cell::RefCell::new(String::new());
        as_user(VICTIM, || {
            words.replace(attach(&scratch, 0).expect_err("it was planted").to_string());
            std::fs::write(scratch.path().join("words"), &*words.borrow()).expect("a file");
        });
        std::fs::read_to_string(scratch.path().join("words")).expect("it")
    };
    as_user(VICTIM, || drop(attach(&scratch, 0).expect("makes the region")));
    let kernel = scratch.path().join(format!("polder-{:016x}-kernel", 1));
    let host = scratch.path().join(format!("polder-{:016x}-0", 1));
    for path in [&kernel, &host] {
        for mode in [0o666, 0o600] {
            as_user(OTHER, || {
                std::fs::write(path, "").expect("a file");
                std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
                    .expect("it");
            });
            let words = refused();
            let wrong =
                format!("{} belongs to user {OTHER}, group {OTHER}; it is not this pool's", path.display());
            assert!(words.starts_with(&wrong), "{words}");
            std::fs::remove_file(path).expect("it");
        }
    }
    // The victim's own bytes under a name of the pool's.
    let precious = scratch.path().join("precious");
    as_user(VICTIM, || std::fs::write(&precious, "precious").expect("a file"));
    std::fs::hard_link(&precious, &host).expect("a link");
    assert!(refused().contains("-0 has 2 names, and so is another file too"));
    std::fs::remove_file(&host).and_then(|()| std::fs::remove_file(&kernel)).expect("both");
    as_user(OTHER, || std::os::unix::fs::symlink(&precious, &kernel).expect("a link"));
    assert!(refused().contains("-kernel is a symbolic link, which is not followed"));
    std::fs::remove_file(&kernel).expect("it");
    assert_eq!(std::fs::read(&precious).expect("it"), b"precious");
    as_user(VICTIM, || drop(attach(&scratch, 0).expect("nothing is planted any more")));
    // A folder of the victim's name.
    let folder = std::path::PathBuf::from(format!("/dev/shm/polder-{VICTIM}"));
    for planter in [OTHER, VICTIM] {
        as_user(planter, || {
            std::fs::create_dir(&folder).expect("a folder");
            std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o755))
                .expect("it");
        });
        as_user(VICTIM, || {
            let words = HostPlan::folder_of(VICTIM).expect_err("it was planted").to_string();
            assert!(
                words.contains("belongs to user 4712, not to 4711") || words.contains("has mode 0755"),
                "{words}"
            );
        });
        std::fs::remove_dir(&folder).expect("it");
    }
    as_user(VICTIM, || {
        assert_eq!(HostPlan::folder_of(VICTIM).expect("it is made"), folder);
        let pool = folder.join("pool");
        let region = Region::create(&pool, 4096).expect("a region");
        assert_eq!(HostPlan::directory_for(&region).expect("it"), folder, "nobody else may write the pool");
    });
    let region = Region::open(folder.join("pool")).expect("root may");
    let plan = HostPlan { directory: HostPlan::directory_for(&region).expect("it"), ..plan(&scratch, 1, 0) };
    let root = Mapped::coherent(region).attach(&plan).expect("root in a user's pool");
    as_user(VICTIM, || {
        let region = Region::open(folder.join("pool")).expect("it");
        let both = Mapped::coherent(region).attach(&plan).expect("beside root");
        assert_eq!(both.slot(), ProcessSlot(1));
    });
    drop(root);
    std::fs::remove_dir_all(&folder).expect("it");
}
