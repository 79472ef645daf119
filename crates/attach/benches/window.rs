//! What the calls on a window cost that wait for nobody, between two hosts whose other rank stands still:
//! `cargo bench -p polder-pool --bench window [FILTER]`. Users run `polder-dev bench mpi`.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_attach::session::{self, Session};
use polder_attach::settings::Settings;
use polder_mem::Memory;
use polder_mem::testing::{Child, Scratch};
use polder_pool::window::{Access, Window};
use polder_pool::{Geometry, Pool};

const BYTES: u64 = 4 << 20;
const BATCHES: usize = 21;
const CALLS: u32 = 2000;

fn main() {
    let filter = std::env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    for coherence in ["software", "coherent"] {
        let scratch = Scratch::new();
        let path = scratch.path().join("pool");
        session::create(&path, BYTES, &Geometry::for_region(BYTES)).expect("a pool on tmpfs");
        let settings = |host| environment(&path, scratch.path(), coherence, host);
        let mut other = Child::fork(|| {
            let session = Session::open(&settings(1)).expect("the pool that was just made");
            {
                let pool = session.pool();
                let _window = enter(pool, 1);
                std::thread::sleep(Duration::from_secs(60));
            };
        });
        let session = Session::open(&settings(0)).expect("the pool that was just made");
        {
            let pool = session.pool();
            println!("{coherence}");
            measure(&mut enter(pool, 0), &filter);
        };
        other.kill();
    }
}

fn measure<M: Memory>(window: &mut Window<M>, filter: &str) {
    let (mut bytes, time) = (vec![7; 4096], |name: &str, call: &mut dyn FnMut()| {
        if name.contains(filter) {
            println!("  {name:<24} {:>9.0} ns", median(call));
        }
    });
    for length in [4, 8, 64, 4096] {
        time(&format!("put and flush {length}"), &mut || {
            window.put(1, 64, &bytes[..length]).expect("it fits");
            window.flush();
        });
        time(&format!("get {length}"), &mut || {
            window.get(1, 64, black_box(&mut bytes[..length])).expect("it fits");
        });
    }
    time("update 8", &mut || {
        window.update(1, 64, 8, &mut |word| word[0] = word[0].wrapping_add(1)).expect("it fits");
    });
    for (name, access) in [("lock and unlock", Access::Exclusive), ("share and unlock", Access::Shared)] {
        time(name, &mut || {
            while !window.try_lock(1, access).expect("the other lives") {}
            window.unlock(1);
        });
    }
}

/// The median of a few batches, in nanoseconds a call.
fn median(call: &mut dyn FnMut()) -> f64 {
    let mut batches: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| call());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    batches[BATCHES / 2]
}

fn enter<M: Memory>(pool: &Arc<Pool<M>>, rank: u32) -> Window<M> {
    let mut window = Window::create(Arc::clone(pool), "bench", rank, 2, 8192).expect("there is room");
    while window.join().is_err() {
        std::thread::yield_now();
    }
    window
}

fn environment(path: &Path, run: &Path, coherence: &str, host: u16) -> Settings {
    let lookup = |key: &str| match key {
        "POLDER_POOL" => Some(path.to_str()?.to_owned()),
        "POLDER_RUN" => Some(run.to_str()?.to_owned()),
        "POLDER_COHERENCE" => Some(coherence.to_owned()),
        "POLDER_HOST" => Some(host.to_string()),
        _ => None,
    };
    Settings::environment(lookup).expect("settings that are right")
}
