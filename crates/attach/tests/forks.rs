//! A process that forks while another of its threads attaches to a pool for the first time, a child that uses the session of
//! its parent, a process whose host's files are cut, processes of containers that do not share /dev/shm, a program that waits for
//! a signal, and one that has no thread left.
//!
//! Its `main` is C's, as where Polder is a library in somebody's process. In a Rust program each thread notes its stack as it
//! begins and as it ends, under a lock of the standard library's, and no child that is forked meanwhile can begin a thread.
#![no_main]

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{Uid, getpid, getuid};
use polder_attach::session::{self, Session};
use polder_attach::settings::Settings;
use polder_mem::testing::{Child, Ended, Scratch, own_shm};
use polder_pool::{Geometry, PoolError};

/// Each a process of its own, since only its first attachment sets anything up; the fork comes at another moment in each.
const SCHEDULES: u32 = 2000;
/// Long beyond what an attachment takes: a child that waits for a lock waits for ever.
const PATIENCE: Duration = Duration::from_secs(20);

fn attach(folder: &Path, host: u16) {
    drop(open(folder, host));
}

#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    let tests = || {
        a_child_is_told_that_the_session_is_its_parents_and_lets_go_of_it();
        a_host_file_that_is_cut_fails_the_next_calls_and_ends_nobody();
        a_signal_that_the_program_blocks_waits_for_it();
        a_process_without_a_thread_for_the_heartbeat_is_refused();
        containers_that_do_not_share_dev_shm_are_refused_and_lose_nothing();
        children_attach_though_their_parents_were_just_attaching_when_they_forked();
    };
    std::panic::catch_unwind(tests).is_err().into()
}

fn make(folder: &Path) {
    let made = Child::fork(|| {
        let bytes = 16 << 20;
        session::create(&folder.join("pool"), bytes, &Geometry::for_region(bytes)).unwrap();
    })
    .wait();
    assert_eq!(made, Ended::Exited(0));
}

fn a_child_is_told_that_the_session_is_its_parents_and_lets_go_of_it() {
    let scratch = Scratch::new();
    make(scratch.path());
    let parent = Child::fork(|| {
        let mut session = Some(open(scratch.path(), 0));
        let mut child = Child::fork(|| {
            let inherited = session.take().expect("it was opened");
            let refused = inherited.pool().create("/child", 64).unwrap_err();
            assert!(
                refused.to_string().ends_with("which forked this one; attach to it again here"),
                "{refused}"
            );
            let refused = inherited.pool().beat().unwrap_err();
            assert!(matches!(refused, PoolError::Forked { .. }), "{refused}");
            // Joins no thread, and detaches nobody.
            drop(inherited);
            attach(scratch.path(), 0);
        });
        assert_eq!(child.wait(), Ended::Exited(0));
        let session = session.expect("the child has a copy");
        {
            let pool = session.pool();
            pool.check_membership().unwrap();
            assert_eq!(pool.process(0, pool.this_process().slot).unwrap(), pool.this_process());
            pool.close(pool.create("/parent", 64).unwrap());
        };
    })
    .wait();
    assert_eq!(parent, Ended::Exited(0));
}

fn a_host_file_that_is_cut_fails_the_next_calls_and_ends_nobody() {
    let scratch = Scratch::new();
    make(scratch.path());
    let process = Child::fork(|| {
        let session = open(scratch.path(), 0);
        session.pool().close(session.pool().create("/before", 64).unwrap());
        for name in scratch.names().iter().filter(|name| name.starts_with("polder-")) {
            let file = std::fs::File::options().write(true).open(scratch.path().join(name)).unwrap();
            file.set_len(0).unwrap();
        }
        // The first may find out in the middle.
        let calls = ["/one", "/two"].map(|name| session.pool().create(name, 64).map(drop));
        for refused in calls {
            assert_eq!(refused.unwrap_err(), PoolError::HostFileLost { host: 0 });
        }
        drop(session);
    })
    .wait();
    assert_eq!(process, Ended::Exited(0));
}

fn a_signal_that_the_program_blocks_waits_for_it() {
    let scratch = Scratch::new();
    make(scratch.path());
    let process = Child::fork(|| {
        let session = open(scratch.path(), 0);
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGUSR1);
        signals.thread_block().unwrap();
        // It ends a process with a thread that does not block it.
        kill(getpid(), Signal::SIGUSR1).unwrap();
        assert_eq!(signals.wait().unwrap(), Signal::SIGUSR1);
        drop(session);
    })
    .wait();
    assert_eq!(process, Ended::Exited(0));
}

fn a_process_without_a_thread_for_the_heartbeat_is_refused() {
    const NOBODY: u32 = 65534;
    let scratch = Scratch::new();
    make(scratch.path());
    let process = Child::fork(|| {
        if getuid().is_root() {
            // No limit holds for root.
            for path in [scratch.path().to_owned(), scratch.path().join("pool")] {
                std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
            let nobody = Uid::from_raw(NOBODY);
            nix::unistd::setresuid(nobody, nobody, nobody).unwrap();
        }
        setrlimit(Resource::RLIMIT_NPROC, 1, 1).unwrap();
        let refused = Session::open(&settings(scratch.path(), 0)).unwrap_err().to_string();
        assert!(refused.contains("there is no thread for the heartbeat"), "{refused}");
    })
    .wait();
    assert_eq!(process, Ended::Exited(0));
    // It has detached: the host's files are gone.
    assert_eq!(scratch.names(), ["pool"]);
}

/// Each container has the pool, and a /dev/shm of its own.
fn containers_that_do_not_share_dev_shm_are_refused_and_lose_nothing() {
    // Elsewhere than in /dev/shm, which a container does not see.
    let folder = std::env::temp_dir().join(format!("polder-containers-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    make(&folder);
    let settings = || Settings { pool: Some(folder.join("pool")), ..Settings::default() };
    let patiently = |name: &str| {
        let late = Instant::now() + PATIENCE;
        while !folder.join(name).exists() && Instant::now() < late {
            std::thread::yield_now();
        }
        assert!(folder.join(name).exists(), "{name} never came");
    };
    let tell = |name: &str| std::fs::write(folder.join(name), "").unwrap();
    let mut one = Child::fork(|| {
        if !own_shm() {
            tell("skipped");
            tell("attached");
            return;
        }
        let session = Session::open(&settings()).unwrap();
        tell("attached");
        patiently("refused");
        session.pool().close(session.pool().create("/one", 1 << 20).unwrap());
    });
    patiently("attached");
    if folder.join("skipped").exists() {
        println!("containers: skipped, this user may not have mounts of its own");
    } else {
        let other = |expect_refusal: bool| {
            Child::fork(|| {
                assert!(own_shm());
                let opened = Session::open(&settings());
                if !expect_refusal {
                    let session = opened.unwrap();
                    {
                        let pool = session.pool();
                        pool.close(pool.open("/one").unwrap());
                        pool.close(pool.create("/two", 1 << 20).unwrap());
                    };
                    return;
                }
                let refused = opened.unwrap_err().to_string();
                let parts =
                    ["pool: host 0 slot 0 (pid ", "run directory /dev/shm", "POLDER_RUN", "POLDER_HOST"];
                assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");
            })
            .wait()
        };
        assert_eq!(other(true), Ended::Exited(0));
        tell("refused");
        assert_eq!(one.wait(), Ended::Exited(0));
        assert_eq!(other(false), Ended::Exited(0));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

fn settings(folder: &Path, host: u16) -> Settings {
    Settings {
        pool: Some(folder.join("pool")),
        run: Some(folder.into()),
        host: Some(host),
        ..Settings::default()
    }
}

fn open(folder: &Path, host: u16) -> Session {
    Session::open(&settings(folder, host)).unwrap()
}

fn children_attach_though_their_parents_were_just_attaching_when_they_forked() {
    let scratch = Scratch::new();
    make(scratch.path());
    for schedule in 0..SCHEDULES {
        let parent = Child::fork(|| {
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    attach(scratch.path(), 0);
                });
                start.wait();
                for _ in 0..schedule % 200 * 20 {
                    std::hint::spin_loop();
                }
                let mut child = Child::fork(|| attach(scratch.path(), 1));
                let late = Instant::now() + PATIENCE;
                while child.ended().is_none() && Instant::now() < late {
                    std::thread::yield_now();
                }
                assert_eq!(child.ended(), Some(Ended::Exited(0)), "in schedule {schedule} of {SCHEDULES}");
            });
        })
        .wait();
        assert_eq!(parent, Ended::Exited(0));
    }
    println!(
        "{SCHEDULES} schedules of a child that attaches though its parent was just attaching when it forked"
    );
}
