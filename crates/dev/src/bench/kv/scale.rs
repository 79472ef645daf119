//! `polder-dev bench kv --blocks`: a cache of very many small blocks. What lies beside a block in the pool and in a process, how long a
//! process takes to join, and to make room.
//!
//! The blocks have 4 KiB each, which stay holes of the pool's file. Of the pool's 16 hosts each has its part of them; two are live.

use std::sync::Arc;

use polder_attach::session::Session;
use polder_attach::settings::CoherenceChoice;
use polder_measure::pair::settings;
use polder_measure::{Row, Sample, Scratch};
use polder_mem::{AnyMemory, Region};
use polder_pool::kv::{Cache, Identity, Key, Options, UseStat};
use polder_pool::{Geometry, Overwrite, Uuid, format};

use super::cpu_us;
use crate::Failure;

const HOSTS: u16 = 16;
const BLOCK: u32 = 4096;
/// Keys of a call.
const BATCH: u64 = 512;

/// What was measured.
#[derive(Debug, Default)]
struct Figures {
    blocks: u64,
    /// Bytes beside a block: in the pool, and in a process.
    in_pool: f64,
    in_process: f64,
    /// The most bytes that the slabs had, of those that the budget allows.
    claimed: u64,
    budget: u64,
    /// Processor time in microseconds: of a process until its first look-up is answered, and of a block.
    join: f64,
    put: f64,
    evict: f64,
}

/// Measures a cache of so many blocks.
pub(super) fn rows(blocks: u64) -> Result<Vec<Row>, Failure> {
    let figures = measure(blocks)?;
    let row = |what: &str, metric: &str, value: f64, unit: &str| {
        let case = format!("{what} {} blocks of 4 KiB {HOSTS} hosts coherent", figures.blocks);
        Row::measured("kv", case, metric, Sample::one(value), unit)
    };
    Ok(vec![
        row("join", "CPU", figures.join / 1e6, "s"),
        row("put", "CPU", figures.put, "us/block"),
        row("put and evict", "CPU", figures.evict, "us/block"),
        row("beside a block in the pool", "memory", figures.in_pool, "B"),
        row("beside a block in a process", "memory", figures.in_process, "B"),
        row("slabs of the budget", "memory", figures.claimed as f64 / figures.budget as f64 * 100.0, "%"),
    ])
}

fn measure(blocks: u64) -> Result<Figures, Failure> {
    let stage = Stage::new(blocks)?;
    let mut figures = Figures { budget: stage.budget, ..Figures::default() };
    let (part, mut live) = (blocks / u64::from(HOSTS), vec![]);
    for host in 0..HOSTS {
        let cache = stage.join(host)?;
        // What others have put is taken up before.
        cache.lookup(&[key(0)])?;
        let begin = cpu_us();
        put(&cache, u64::from(host) * part, part, &mut figures)?;
        figures.put += (cpu_us() - begin) / (part * u64::from(HOSTS)) as f64;
        live.extend((host >= HOSTS - 2).then_some(cache));
    }
    let begin = cpu_us();
    let late = stage.join(HOSTS - 2)?;
    let found = late.lookup(&[key(0), key(blocks)])?;
    figures.join = cpu_us() - begin;
    assert_eq!(found, [true, false], "the blocks of a host that has left are there");
    let stat = late.stat()?;
    figures.blocks = stat.blocks;
    figures.in_process = stat.index_bytes as f64 / stat.blocks as f64;
    let objects = late.pool().list("/kv/")?;
    let all: u64 = objects.iter().map(|object| object.bytes).sum();
    let slabs = objects.iter().filter(|object| object.name.contains("/slab/"));
    // A slab that is not full holds no less than its slots.
    let slots: u64 = slabs.map(|slab| slab.bytes / (64 + u64::from(BLOCK))).sum();
    figures.in_pool = (all - slots * u64::from(BLOCK)) as f64 / slots as f64;
    let [.., last] = &live[..] else { return Err(Failure("no host is live".to_owned())) };
    // What the budget has left.
    put(last, blocks, part, &mut figures)?;
    let (before, begin) = (evictions(&last.stat()?), cpu_us());
    put(last, blocks + part, part, &mut figures)?;
    let took = cpu_us() - begin;
    let evicted = evictions(&last.stat()?) - before;
    if evicted < part {
        return Err(Failure(format!("{evicted} blocks made room for {part}")));
    }
    figures.evict = took / evicted as f64;
    Ok(figures)
}

fn evictions(stat: &UseStat) -> u64 {
    stat.hosts.iter().map(|part| part.evictions).sum()
}

/// A pool for a cache.
struct Stage {
    scratch: Scratch,
    budget: u64,
}

impl Stage {
    /// A pool for a cache of so many blocks, which takes more room than its file system may have.
    fn new(blocks: u64) -> Result<Self, Failure> {
        // The last slab of a host is not full.
        let budget = blocks * (64 + u64::from(BLOCK)) / 100 * 103;
        let chunk_bytes = (budget / 16).next_power_of_two().min(64 << 20);
        // What hosts have beside slabs, and a chunk of each that is not full.
        let bytes = (budget + budget / 8 + 3 * u64::from(HOSTS) * chunk_bytes).next_multiple_of(4096);
        let geometry = Geometry {
            hosts: HOSTS,
            processes: 4,
            names: 1009,
            levels: 4,
            chunk_bytes,
            opens: 256,
            keepers: 1,
        };
        let scratch = Scratch::new()?;
        let memory = AnyMemory::new(Region::create(scratch.path().join("pool"), bytes)?);
        format(&memory, &geometry, Uuid::fresh(), Overwrite::Zeros)?;
        Ok(Self { scratch, budget })
    }

    /// A process of this host that has the cache open.
    fn join(&self, host: u16) -> Result<Cache<AnyMemory>, Failure> {
        let path = self.scratch.path().join("pool");
        let session = Session::open(&settings(&path, CoherenceChoice::Coherent, host))?;
        let identity = Identity { hash: [3; 32], text: "{}".to_owned(), block: BLOCK };
        let options = Options { budget: Some(self.budget), verify: false };
        Ok(Cache::open(Arc::clone(session.pool()), "scale", identity, options)?)
    }
}

/// As a hash is.
fn key(block: u64) -> Key {
    twox_hash::XxHash3_128::oneshot(&block.to_le_bytes()).to_le_bytes()
}

/// Puts so many blocks from this one on; all of them have room, within the budget.
fn put(cache: &Cache<AnyMemory>, first: u64, count: u64, figures: &mut Figures) -> Result<(), Failure> {
    for begin in (first..first + count).step_by(BATCH as usize) {
        let keys: Vec<_> = (begin..(begin + BATCH).min(first + count)).map(key).collect();
        let put = cache.put_holes(&keys)?;
        if put.stored != keys.len() as u64 {
            return Err(Failure(format!("stored {} of {} blocks", put.stored, keys.len())));
        }
    }
    let claimed = cache.stat()?.claimed;
    if claimed > figures.budget {
        return Err(Failure(format!("slabs of {claimed} bytes within a budget of {}", figures.budget)));
    }
    figures.claimed = figures.claimed.max(claimed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_have_at_most_80_bytes_beside_them_in_the_pool_and_40_in_a_process() {
        let figures = measure(200_000).unwrap();
        assert!(figures.blocks == 200_000, "{figures:?}");
        assert!(figures.in_pool <= 80.0 && figures.in_process <= 40.0, "{figures:?}");
        assert!(figures.claimed <= figures.budget, "{figures:?}");
    }
}
