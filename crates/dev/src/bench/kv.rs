//! `polder-dev bench kv`: blocks in a cache beside other caches, started in Python, where engines are at home; and look-ups without it.

mod scale;

use std::collections::BTreeMap;
use std::sync::Arc;

use polder_attach::session::{self, Session};
use polder_attach::settings::CoherenceChoice;
use polder_measure::pair::settings;
use polder_measure::{Better, Row, Sample, Scratch};
use polder_mem::AnyMemory;
use polder_pool::Geometry;
use polder_pool::kv::{Cache, Identity, Key, Options};
use rustix::time::{ClockId, clock_gettime};

use super::python::{Rounds, list, rows_of};
use crate::Failure;

/// What to measure.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Numbers of processes [default: 1 2 4].
    #[arg(long, num_args = 1.., value_parser = clap::value_parser!(u16).range(1..=32))]
    procs: Vec<u16>,
    /// Bytes of a block [default: 64 KiB, 2 MiB and 16 MiB].
    #[arg(long, num_args = 1..)]
    sizes: Vec<u32>,
    /// Mebibytes of blocks that a process puts in a round.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
    #[command(flatten)]
    rounds: Rounds,
    /// Measure beside the floor alone, without other caches.
    #[arg(long)]
    alone: bool,
    /// Measure instead what a cache of so many blocks of 4 KiB takes beside them, and to join it. They take no memory.
    #[arg(long, value_parser = clap::value_parser!(u64).range(100_000..=100_000_000))]
    blocks: Option<u64>,
}

/// Keys of a call, and calls of a figure.
const LOOK_UPS: u128 = 1000;
const CALLS: u32 = 200;
/// Hosts that have joined the cache, as the Python half has them too.
const JOINED: [u16; 2] = [2, 16];
/// How a case of the Python half ends, and the same case here.
const WAYS: [&str; 2] = ["through Python", "natively"];

/// Runs the benchmark's Python half and hands on each row as it comes; look-ups stand natively beside the same peers too.
pub(super) fn run(
    arguments: &Arguments,
    mut row: impl FnMut(&Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if let Some(blocks) = arguments.blocks {
        return scale::rows(blocks)?.iter().try_for_each(row);
    }
    let mut words = [list("--procs", &arguments.procs), list("--sizes", &arguments.sizes)].concat();
    words.extend([list("--mib", [arguments.mib]), arguments.rounds.words()].concat());
    words.extend(arguments.alone.then(|| "--alone".to_owned()));
    let native = look_ups(arguments.rounds.rounds)?;
    rows_of("polder.kv.bench", words, |found| {
        row(found)?;
        let own = native.get(&found.case.replace(WAYS[0], WAYS[1]));
        let beside = own.zip(found.peer.as_deref()).zip(found.peer_value);
        beside.map_or(Ok(()), |((own, peer), theirs)| row(&own.clone().beside(peer, theirs, Better::Less)))
    })?;
    native.values().try_for_each(row)
}

/// What a thousand look-ups take without Python, by case.
fn look_ups(rounds: u32) -> Result<BTreeMap<String, Row>, Failure> {
    let mut rows = BTreeMap::new();
    for coherence in [CoherenceChoice::Coherent, CoherenceChoice::Software] {
        for hosts in JOINED {
            for (what, times) in ["hit", "miss"].into_iter().zip(look_up(coherence, hosts, rounds)?) {
                let case = format!("look-up of {LOOK_UPS} keys {what} {coherence} {hosts} hosts {}", WAYS[1]);
                let sample = Sample::of(times).expect("there is a round");
                rows.insert(case.clone(), Row::measured("kv", case, "CPU", sample, "us"));
            }
        }
    }
    Ok(rows)
}

/// Microseconds of a call whose keys are there, and of one whose keys are not; a figure a round.
fn look_up(coherence: CoherenceChoice, hosts: u16, rounds: u32) -> Result<[Vec<f64>; 2], Failure> {
    let (bytes, block) = (256 << 20, 4096);
    let scratch = Scratch::new()?;
    let path = scratch.path().join("pool");
    session::create(&path, bytes, &Geometry { hosts, processes: 4, ..Geometry::for_region(bytes) })?;
    let join = |host| -> Result<Cache<AnyMemory>, Failure> {
        let session = Session::open(&settings(&path, coherence, host))?;
        let identity = Identity { hash: [0; 32], text: "{}".to_owned(), block };
        let options = Options { budget: Some(32 << 20), verify: false };
        Ok(Cache::open(Arc::clone(session.pool()), "bench", identity, options)?)
    };
    let caches = (0..hosts).map(join).collect::<Result<Vec<_>, _>>()?;
    let keys: [Vec<Key>; 2] = [0, LOOK_UPS].map(|first| {
        // The index spreads keys by their bits, as those of hashes are.
        (first..first + LOOK_UPS)
            .map(|key| twox_hash::XxHash3_128::oneshot(&key.to_le_bytes()).to_le_bytes())
            .collect()
    });
    let contents = vec![0; block as usize];
    let put = caches[usize::from(hosts) - 1].put(&keys[0], &vec![contents.as_slice(); LOOK_UPS as usize])?;
    assert_eq!(u128::from(put.stored), LOOK_UPS);
    let mut times = [vec![], vec![]];
    for round in 0..=rounds {
        for (what, keys) in keys.iter().enumerate() {
            let begin = cpu_us();
            let mut found = vec![];
            for _ in 0..CALLS {
                found = caches[0].lookup(keys)?;
            }
            let time = (cpu_us() - begin) / f64::from(CALLS);
            assert!(found.iter().all(|found| *found == (what == 0)));
            // The first round takes up what was put.
            times[what].extend((round > 0).then_some(time));
        }
    }
    Ok(times)
}

/// Processor time of this thread.
fn cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}
