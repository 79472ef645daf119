//! Real processes on a shadow, where each host sees of the others what was flushed and nothing else: the pool, its rings, its
//! windows and its collectives work between two of them, and fail when a flush is left out anywhere.

use std::path::Path;
use std::time::{Duration, Instant};

use polder_attach::session::{self, Session};
use polder_attach::settings::Settings;
use polder_lab::hosts::{FLUSHES, Part};
use polder_mem::testing::{Child, Ended, Scratch};
use polder_pool::Geometry;

const GEOMETRY: Geometry =
    Geometry { hosts: 2, processes: 2, names: 61, levels: 3, chunk_bytes: 64 << 10, opens: 32, keepers: 1 };
/// When nothing is left out; long enough for a machine that is busy.
const PATIENT: Duration = Duration::from_secs(30);
/// When something is: what does not come soon does not come.
const IMPATIENT: Duration = Duration::from_secs(1);

/// Plays `part` as host 0 and host 1, in a process each, under `POLDER_WRAP`; whether both came to their end.
fn passes(wrap: &str, timeout: Duration, part: Part) -> bool {
    let scratch = Scratch::new();
    let path = scratch.path().join("pool");
    session::create(&path, 2 << 20, &GEOMETRY).unwrap();
    let mut hosts = [0, 1].map(|host| {
        let settings = environment(&path, scratch.path(), wrap, timeout, host);
        Child::fork(|| {
            let session = Session::open(&settings).unwrap();
            assert!(session.pool().memory().instruments().is_some(), "POLDER_WRAP wraps");
            part.play(session.pool(), host);
        })
    });
    let start = Instant::now();
    let mut ended = [None, None];
    while ended.iter().any(Option::is_none) && start.elapsed() < 20 * timeout {
        ended = [0, 1].map(|host: usize| hosts[host].ended());
        std::thread::sleep(Duration::from_millis(1));
    }
    ended == [Some(Ended::Exited(0)); 2]
}

fn environment(path: &Path, run: &Path, wrap: &str, timeout: Duration, host: u16) -> Settings {
    let lookup = |key: &str| match key {
        "POLDER_POOL" => Some(path.to_str()?.to_owned()),
        "POLDER_RUN" => Some(run.to_str()?.to_owned()),
        "POLDER_WRAP" => Some(wrap.to_owned()),
        "POLDER_HOST" => Some(host.to_string()),
        "POLDER_TIMEOUT" => Some(timeout.as_secs().to_string()),
        _ => None,
    };
    Settings::environment(lookup).unwrap()
}

#[test]
fn objects_rings_offers_windows_and_collectives_work_between_hosts_that_share_nothing_but_what_they_flush() {
    for part in Part::ALL {
        assert!(passes("shadow", PATIENT, part), "{part:?}");
    }
}

#[test]
fn each_of_them_fails_when_one_flush_is_left_out() {
    for (flush, part) in FLUSHES {
        let site = flush.site();
        let passed = passes(&format!("shadow,without={site}"), IMPATIENT, part);
        assert!(!passed, "nobody misses the flush at {site}");
        println!("the flush at {site} is missed");
    }
}
