//! Memory under load: bandwidth by the mix of reads and writes, latency beside threads that load it, and its tail (the
//! Vistara paper's Tables III, IV and X, and Figure 5).

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::dram::{STEPS, chase, link};
use super::{LINE_BYTES, Sampling, Timing, on_threads};

/// Words that are read, or read and modified, at once: 4 KiB.
const BLOCK: usize = 512;
/// Loads that one latency is the mean of, so that reading the clock takes little of it.
const LOADS: usize = 64;

/// Lines that are read for each line that is written. A line that is modified is first read into the cache, so it counts as one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    read_only: usize,
    modified: usize,
}

impl Mix {
    /// Reads alone.
    pub const READS: Self = Self { read_only: 1, modified: 0 };
    /// The rows of Table III.
    pub const ALL: [Self; 4] = [
        Self::READS,
        Self { read_only: 2, modified: 1 },
        Self { read_only: 1, modified: 1 },
        Self { read_only: 0, modified: 1 },
    ];

    /// As a row calls it: `3:1` is three lines read for each that is written.
    #[must_use]
    pub fn name(self) -> String {
        match self.modified {
            0 => "all reads".to_owned(),
            modified => format!("{}:{modified} read:write", self.read_only + modified),
        }
    }

    /// Blocks of one turn.
    const fn turn(self) -> usize {
        self.read_only + self.modified
    }

    /// Bytes that go over the memory's bus in one turn.
    const fn turn_bytes(self) -> usize {
        (self.read_only + 2 * self.modified) * BLOCK * 8
    }

    /// Reads a turn's blocks, and modifies the last of them.
    fn pass(self, blocks: &mut [u64]) {
        let (read, modified) = blocks.split_at_mut(self.read_only * BLOCK);
        black_box(read.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
        modified.iter_mut().for_each(|word| *word = word.wrapping_add(1));
        black_box(modified);
    }
}

/// GB/s that `threads` threads move to and from a range, a part of it each, over and over.
///
/// # Panics
/// When a part holds less than the blocks of one turn, which are 12 KiB at most.
pub fn mixed_bandwidth(words: &mut [u64], threads: usize, mix: Mix, effort: Sampling) -> Timing {
    let each = words.len() / threads / (mix.turn() * BLOCK) * mix.turn() * BLOCK;
    assert!(each > 0, "{} words are too few for {threads} threads", words.len());
    let bytes = each / (mix.turn() * BLOCK) * mix.turn_bytes();
    let parts: Vec<Mutex<&mut [u64]>> = words.chunks_exact_mut(each).map(Mutex::new).collect();
    effort.bandwidth(threads, bytes as u64, |thread| {
        let mut part = parts[thread].lock().unwrap_or_else(PoisonError::into_inner);
        part.chunks_exact_mut(mix.turn() * BLOCK).for_each(|turn| mix.pass(turn));
    })
}

/// What memory does under load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnderLoad {
    /// GB/s of the threads that load it.
    pub load: f64,
    /// Nanoseconds of a load that the load before it chose, by one more thread.
    pub latency: Timing,
}

/// Latency of a load from the first quarter of a range, while `threads` threads read the rest of it. Each pauses so long after a block
/// that it takes `share` of the time it would need without: 1 for no pause, 0 for no load.
///
/// # Panics
/// When `share` is not from 0 to 1, or the range holds less than 16 KiB a thread.
pub fn loaded_latency(words: &mut [u64], threads: usize, share: f64, effort: Sampling) -> UnderLoad {
    assert!((0.0..=1.0).contains(&share), "a share is from 0 to 1");
    let (chased, read) = words.split_at_mut(words.len() / 4);
    link(chased);
    beside_readers(chased, read, if share > 0.0 { threads } else { 0 }, share, effort)
}

/// Latency of a load from the first `hot` bytes of a range, while `threads` threads read the same bytes: a footprint of which a part is
/// hot (Table X).
///
/// # Panics
/// When `hot` is less than 4 KiB a thread, or more than the range.
pub fn hot_latency(words: &mut [u64], hot: usize, threads: usize, effort: Sampling) -> UnderLoad {
    let words = &mut words[..hot / 8];
    link(words);
    let words: &[u64] = words;
    beside_readers(words, words, threads, 1.0, effort)
}

/// Chases through `chased`, while threads read `read`.
fn beside_readers(chased: &[u64], read: &[u64], threads: usize, share: f64, effort: Sampling) -> UnderLoad {
    let each = read.len() / threads.max(1) / BLOCK * BLOCK;
    assert!(each > 0, "{} words are too few for {threads} threads", read.len());
    let (latency, is_over) = (OnceLock::new(), AtomicBool::new(false));
    let loads = on_threads(threads + 1, |thread| match thread.checked_sub(1) {
        Some(reader) => load(&read[reader * each..][..each], share, &is_over),
        None => {
            let _ = latency.set(chase(chased, effort));
            is_over.store(true, Ordering::Relaxed);
            0.0
        }
    });
    let latency = latency.into_inner().expect("the first thread chases");
    UnderLoad { load: loads.into_iter().sum(), latency }
}

/// GB/s that this thread reads of `part`, over and over, until it is over.
fn load(part: &[u64], share: f64, is_over: &AtomicBool) -> f64 {
    let (began, mut bytes) = (Instant::now(), 0_usize);
    'load: loop {
        for block in part.chunks_exact(BLOCK) {
            let before = Instant::now();
            black_box(block.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
            bytes += BLOCK * 8;
            if is_over.load(Ordering::Relaxed) {
                break 'load;
            }
            let took = before.elapsed();
            let until = Instant::now() + pause(took, share);
            while share < 1.0 && Instant::now() < until && !is_over.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
    }
    bytes as f64 / began.elapsed().as_nanos() as f64
}

/// How long to wait after a block that took `took`, so that blocks take `share` of the time.
fn pause(took: Duration, share: f64) -> Duration {
    if share > 0.0 { took.mul_f64(1.0 / share - 1.0).min(Duration::from_millis(1)) } else { Duration::ZERO }
}

/// Latencies in ns of `threads` threads that chase through a part of a range each, at the same time, in ascending order (Figure 5). Each
/// is the mean of 64 loads.
///
/// # Panics
/// When a part holds less than two lines.
pub fn latencies(words: &mut [u64], threads: usize, effort: Sampling) -> Vec<f64> {
    let each = words.len() / threads / (LINE_BYTES / 8) * (LINE_BYTES / 8);
    let parts: Vec<Mutex<&mut [u64]>> = words.chunks_exact_mut(each).map(Mutex::new).collect();
    let times = on_threads(threads, |thread| {
        let mut part = parts[thread].lock().unwrap_or_else(PoisonError::into_inner);
        link(&mut part);
        let mut line = 0;
        let mut times = Vec::with_capacity(effort.samples * STEPS / LOADS);
        while times.len() < times.capacity() {
            let start = Instant::now();
            for _ in 0..LOADS {
                line = part[line * (LINE_BYTES / 8)] as usize;
            }
            black_box(line);
            times.push(start.elapsed().as_nanos() as f64 / LOADS as f64);
        }
        times
    });
    let mut times: Vec<f64> = times.into_iter().flatten().collect();
    times.sort_by(f64::total_cmp);
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Sampling = Sampling { samples: 3, sample_ns: 20_000 };

    #[test]
    fn a_mix_reads_and_modifies_the_blocks_that_it_says() {
        let names = Mix::ALL.map(Mix::name);
        assert_eq!(names, ["all reads", "3:1 read:write", "2:1 read:write", "1:1 read:write"]);
        for mix in Mix::ALL {
            let mut blocks = vec![0_u64; mix.turn() * BLOCK];
            mix.pass(&mut blocks);
            let modified = blocks.iter().filter(|word| **word == 1).count() / BLOCK;
            let read = mix.turn();
            assert_eq!(mix.turn_bytes(), (read + modified) * BLOCK * 8, "{}", mix.name());
            assert!(blocks[..mix.read_only * BLOCK].iter().all(|word| *word == 0), "{}", mix.name());
        }
    }

    #[test]
    fn a_pause_leaves_its_share_of_the_time() {
        let took = Duration::from_micros(3);
        assert_eq!(pause(took, 1.0), Duration::ZERO);
        assert_eq!(pause(took, 0.25), Duration::from_micros(9));
        assert_eq!(
            pause(Duration::from_secs(1), 0.1),
            Duration::from_millis(1),
            "a stalled block does not stop the load"
        );
    }

    #[test]
    fn every_figure_comes_and_a_chase_visits_what_is_hot_alone() {
        let mut range = vec![0; 1 << 17];
        for mix in Mix::ALL {
            assert!(mixed_bandwidth(&mut range, 2, mix, EFFORT).low > 0.0, "{}", mix.name());
        }
        let idle = loaded_latency(&mut range, 1, 0.0, EFFORT);
        assert!(idle.latency.low > 0.0 && idle.load == 0.0, "{idle:?}");
        let full = loaded_latency(&mut range, 1, 1.0, EFFORT);
        assert!(full.load > 0.0, "{full:?}");
        let hot = 1 << 18;
        range.fill(u64::MAX);
        assert!(hot_latency(&mut range, hot, 1, EFFORT).load > 0.0);
        let cold = range[hot / 8..].iter().all(|word| *word == u64::MAX);
        assert!(cold, "what is cold is not linked");
        let times = latencies(&mut range, 2, EFFORT);
        assert_eq!(times.len(), 2 * EFFORT.samples * STEPS / LOADS);
        assert!(times.is_sorted() && times[0] > 0.0);
    }
}
