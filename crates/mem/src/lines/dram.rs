//! The first row of Table 1: this machine's own memory, read past its caches.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use super::{LINE_BYTES, Sampling, Timing};

/// Words in a line.
const WORDS: usize = LINE_BYTES / 8;

/// Nanoseconds for a load from ordinary memory that the load before it chose, over `bytes` bytes: a chase of pointers
/// through all lines in random order. Beyond the caches this is the latency of memory.
///
/// # Panics
/// When `bytes` holds less than two lines.
#[must_use]
pub fn memory_latency(bytes: usize, effort: Sampling) -> Timing {
    chase(&cycle(bytes / LINE_BYTES), effort)
}

/// As [`memory_latency`], over words that lie where the caller put them.
///
/// # Panics
/// When there are less than two lines of them.
pub fn range_latency(words: &mut [u64], effort: Sampling) -> Timing {
    link(words);
    chase(words, effort)
}

/// Loads that are timed at once.
pub(super) const STEPS: usize = 4096;

pub(super) fn chase(cycle: &[u64], effort: Sampling) -> Timing {
    let mut line = 0;
    effort
        .time(|| {
            for _ in 0..STEPS {
                line = cycle[line * WORDS] as usize;
            }
            black_box(line);
        })
        .map(|ns| ns / STEPS as f64)
}

/// GB/s that `threads` threads read from ordinary memory, `bytes` bytes each, over and over.
#[must_use]
pub fn memory_bandwidth(threads: usize, bytes: usize, effort: Sampling) -> Timing {
    let parts: Vec<Vec<u64>> = (0..threads).map(|_| words(bytes / 8)).collect();
    effort.bandwidth(threads, bytes as u64, |thread| {
        black_box(parts[thread].iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
    })
}

/// GB/s that `threads` threads read of words that lie where the caller put them, and write to them, a part of them each, over and over.
pub fn range_bandwidth(words: &mut [u64], threads: usize, effort: Sampling) -> [Timing; 2] {
    let each = words.len() / threads;
    let read = effort.bandwidth(threads, 8 * each as u64, |thread| {
        let part = &words[thread * each..][..each];
        black_box(part.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
    });
    let parts: Vec<Mutex<&mut [u64]>> = words.chunks_exact_mut(each).map(Mutex::new).collect();
    let write = effort.bandwidth(threads, 8 * each as u64, |thread| {
        let mut part = parts[thread].lock().unwrap_or_else(PoisonError::into_inner);
        part.fill(thread as u64);
        black_box(&mut **part);
    });
    [read, write]
}

/// One random cycle through `lines` lines: the first word of each holds the number of the next (Sattolo's shuffle).
fn cycle(lines: usize) -> Vec<u64> {
    let mut cycle = words(lines * WORDS);
    link(&mut cycle);
    cycle
}

/// Links lines to one random cycle: the first word of each holds the number of the next.
pub(super) fn link(cycle: &mut [u64]) {
    let lines = cycle.len() / WORDS;
    assert!(lines >= 2, "a chase needs two lines");
    for line in 0..lines {
        cycle[line * WORDS] = line as u64;
    }
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..lines).rev() {
        // xorshift64: any even order will do, and the same one in every run.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        cycle.swap(last * WORDS, (random % last as u64) as usize * WORDS);
    }
}

/// Words, on huge pages where the kernel has them, so that a chase measures memory and not the tables of its pages.
fn words(count: usize) -> Vec<u64> {
    let mut words: Vec<u64> = Vec::with_capacity(count);
    // SAFETY: advice on pages that the vector has allocated changes none of their bytes; the kernel ignores what it
    // does not like.
    unsafe {
        let start = words.as_mut_ptr().map_addr(|address| address.next_multiple_of(4096));
        libc::madvise(start.cast(), (count * 8).saturating_sub(4096) & !4095, libc::MADV_HUGEPAGE);
    }
    words.resize(count, 1);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_visits_every_line_once() {
        let cycle = cycle(1000);
        let mut seen = [false; 1000];
        let mut line = 0;
        for _ in 0..1000 {
            assert!(!seen[line], "line {line} twice");
            seen[line] = true;
            line = cycle[line * WORDS] as usize;
        }
        assert_eq!(line, 0);
    }

    #[test]
    fn near_memory_is_not_slower_than_far_memory() {
        let effort = Sampling { samples: 5, sample_ns: 200_000 };
        let (near, far) = (memory_latency(8 << 10, effort), memory_latency(128 << 20, effort));
        assert!(near.low < far.low, "{near:?} {far:?}");
        assert!(memory_bandwidth(2, 1 << 20, effort).low > 0.0);
        let mut range = words(1 << 17);
        assert!(range_latency(&mut range, effort).low > 0.0);
        assert!(range_bandwidth(&mut range, 2, effort).iter().all(|it| it.low > 0.0));
    }
}
