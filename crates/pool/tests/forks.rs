//! A process that forks while another of its threads attaches to a pool for the first time.
//!
//! Its `main` is C's, as where Polder is a library in somebody's process. In a Rust program each thread notes its stack as it
//! begins and as it ends, under a lock of the standard library's, and no child that is forked meanwhile can begin a thread.
#![no_main]

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use polder_mem::testing::{Child, Ended, Scratch};
use polder_pool::Geometry;
use polder_pool::session::{self, Session};
use polder_pool::settings::Settings;

/// Each a process of its own, since only its first attachment sets anything up; the fork comes at another moment in each.
const SCHEDULES: u32 = 2000;
/// Long beyond what an attachment takes: a child that waits for a lock waits for ever.
const PATIENCE: Duration = Duration::from_secs(20);

fn attach(folder: &Path, host: u16) {
    let settings = Settings {
        pool: Some(folder.join("pool")),
        run: Some(folder.into()),
        host: Some(host),
        ..Settings::default()
    };
    drop(Session::open(&settings).unwrap());
}

#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    std::panic::catch_unwind(children_attach_though_their_parents_were_just_attaching_when_they_forked)
        .is_err()
        .into()
}

fn children_attach_though_their_parents_were_just_attaching_when_they_forked() {
    let scratch = Scratch::new();
    let made = Child::fork(|| {
        let bytes = 16 << 20;
        session::create(&scratch.path().join("pool"), bytes, &Geometry::for_region(bytes)).unwrap();
    })
    .wait();
    assert_eq!(made, Ended::Exited(0));
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
