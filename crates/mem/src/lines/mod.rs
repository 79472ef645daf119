//! What line operations cost on this machine: the figures behind `polder-dev bench lines`.
//!
//! The cases are those of the cMPI paper: Figure 11 (memset and flush by size and instruction) and the rows of its
//! Table 1 that one machine can measure.

mod dram;
mod loaded;
mod timing;

use std::sync::Barrier;

use crate::affinity::{allowed_cpus, pin_to_cpu};
use crate::{Cpu, Fault, Flush, LINE, Mapped, Memory, Offset};

pub use dram::{memory_bandwidth, memory_latency, range_bandwidth, range_latency};
pub use loaded::{Mix, UnderLoad, hot_latency, latencies, loaded_latency, mixed_bandwidth};
pub use timing::{Sampling, Timing};

/// How bytes reach memory, in the columns of Figure 11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMethod {
    /// Ordinary stores alone: they stay in the cache.
    Cached,
    /// Ordinary stores, then this instruction for each line.
    Flushed(Flush),
    /// Stores past the caches.
    NonTemporal,
}

impl WriteMethod {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Cached].into_iter().chain(Flush::ALL.map(Self::Flushed)).chain([Self::NonTemporal])
    }

    /// As a row calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Flushed(flush) => flush.name(),
            Self::NonTemporal => "non-temporal",
        }
    }

    /// A handle that flushes in this way; `None` when the CPU cannot.
    fn on(self, memory: &Mapped) -> Option<Mapped> {
        let cpu = Cpu::detect();
        let kept = match self {
            Self::Flushed(flush) => cpu.with(flush)?,
            Self::Cached | Self::NonTemporal => cpu,
        };
        Some(memory.using(kept))
    }
}

/// The sizes of Figure 11: 64 B to 128 KiB.
pub fn memset_sizes() -> impl Iterator<Item = u64> {
    (6..=17).map(|power| 1 << power)
}

/// Nanoseconds to set `bytes` bytes from the start of the region and to bring them to memory, fence included
/// (Figure 11, and the latency rows of Table 1 with 8 bytes). `None` when the CPU lacks the instruction.
///
/// # Errors
/// [`Fault`] when the memory fails.
///
/// # Panics
/// When the region is smaller than `bytes`.
pub fn memset(
    memory: &Mapped,
    way: WriteMethod,
    bytes: u64,
    effort: Sampling,
) -> Result<Option<Timing>, Fault> {
    let Some(memory) = way.on(memory) else { return Ok(None) };
    let mut failed = Ok(());
    let timing = effort.time(|| failed = failed.and(set(&memory, way, Offset(0), bytes)));
    failed.map(|()| Some(timing))
}

/// GB/s that `threads` threads bring to memory in pieces of 512 bytes, each on its own part of the region (the
/// bandwidth rows of Table 1). `None` when the CPU lacks the instruction.
///
/// # Errors
/// [`Fault`] when the memory fails.
///
/// # Panics
/// When the region is smaller than a page a thread.
pub fn memset_bandwidth(
    memory: &Mapped,
    way: WriteMethod,
    threads: usize,
    effort: Sampling,
) -> Result<Option<Timing>, Fault> {
    const PIECE: u64 = 512;
    let Some(memory) = way.on(memory) else { return Ok(None) };
    // Larger than a cache where the region allows it, so that bytes must go to memory.
    let part = (memory.bytes() / threads as u64).min(64 << 20) / PIECE * PIECE;
    assert!(part >= 4096, "{} bytes are too few for {threads} threads", memory.bytes());
    let failed = std::sync::Mutex::new(Ok(()));
    let timing = effort.bandwidth(threads, part, |thread| {
        let start = thread as u64 * part;
        for at in (start..start + part).step_by(PIECE as usize) {
            if let Err(fault) = set(&memory, way, Offset(at), PIECE) {
                *failed.lock().expect("no panic holds it") = Err(fault);
            }
        }
    });
    failed.into_inner().expect("no panic held it").map(|()| Some(timing))
}

/// What is set: small enough to stay in the nearest cache.
static SOURCE: [u8; 4096] = [0x5a; 4096];

/// A memset, as copies of one small source, and the fence that the paper ends it with.
#[inline]
fn set(memory: &Mapped, way: WriteMethod, at: Offset, bytes: u64) -> Result<(), Fault> {
    for done in (0..bytes).step_by(SOURCE.len()) {
        let piece = &SOURCE[..(bytes - done).min(SOURCE.len() as u64) as usize];
        match way {
            WriteMethod::NonTemporal => memory.copy_in_nt(at + done, piece)?,
            _ => memory.copy_in(at + done, piece)?,
        }
    }
    if matches!(way, WriteMethod::Flushed(_)) {
        memory.write_back(at, bytes);
    }
    memory.sfence();
    Ok(())
}

/// Runs `body` for each of `threads` threads, pinned to CPUs in turn, all from the same moment on; returns what each
/// returned.
fn on_threads<T: Send>(threads: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let cpus = allowed_cpus();
    let start = Barrier::new(threads);
    let (body, start, cpus) = (&body, &start, &cpus);
    std::thread::scope(|scope| {
        let run = |thread: usize| {
            scope.spawn(move || {
                // A thread that cannot be pinned still measures, with a wider spread.
                let _ = pin_to_cpu(cpus[thread % cpus.len()]);
                start.wait();
                body(thread)
            })
        };
        let running: Vec<_> = (0..threads).map(run).collect();
        running.into_iter().map(|thread| thread.join().expect("a measured thread does not panic")).collect()
    })
}

/// A line's bytes as a length.
const LINE_BYTES: usize = LINE as usize;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;
    use crate::testing::Scratch;

    fn quick() -> Sampling {
        Sampling { samples: 5, sample_ns: 10_000 }
    }

    #[test]
    fn every_case_of_figure_11_gives_a_time_and_leaves_its_bytes_in_memory() {
        let scratch = Scratch::new();
        let memory = Mapped::new(Region::create(scratch.path().join("region"), 1 << 20).expect("a region"));
        for way in WriteMethod::all() {
            for bytes in [8].into_iter().chain(memset_sizes()) {
                if let Some(timing) = memset(&memory, way, bytes, quick()).expect("good memory") {
                    assert!(timing.low > 0.0 && timing.low <= timing.median && timing.median <= timing.high);
                    assert_eq!(memory.load(Offset(bytes - 8)), Ok(u64::from_le_bytes([0x5a; 8])));
                }
            }
            if let Some(timing) = memset_bandwidth(&memory, way, 2, quick()).expect("good memory") {
                assert!(timing.low > 0.0, "{}: {timing:?}", way.name());
            }
        }
    }

    #[test]
    #[cfg_attr(target_arch = "aarch64", ignore = "flushes of qemu-user do nothing")]
    fn flushing_a_range_costs_more_than_leaving_it_cached() {
        let scratch = Scratch::new();
        let memory = Mapped::new(Region::create(scratch.path().join("region"), 1 << 20).expect("a region"));
        let time =
            |way| memset(&memory, way, 1 << 14, quick()).expect("good memory").expect("on every CPU").low;
        assert!(time(WriteMethod::Flushed(Flush::ALL[0])) > 2.0 * time(WriteMethod::Cached));
    }
}
