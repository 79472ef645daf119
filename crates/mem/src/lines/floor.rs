//! Floors: the bare operations that any protocol must make for the same message, with nothing around them.

use std::time::Instant;

use super::{Effort, Timing, on_threads};
use crate::{Fault, LINE, Memory, Offset};

/// Nanoseconds for a round trip of 8 bytes between two threads, each with its own handle and CPU: a word that one
/// stores, writes back and fences, and the other invalidates, fences and loads until it changes; then the same way
/// back, on a line four lines on (prefetchers fetch lines in pairs, and would pass a neighbour to and fro). Where the hardware keeps coherence the flushes are none, and a store and a load are left.
///
/// # Errors
/// [`Fault`] when the memory fails.
///
/// # Panics
/// When the regions hold less than five lines.
pub fn ping_pong_floor<M: Memory + Send + Sync>(players: [&M; 2], effort: Effort) -> Result<Timing, Fault> {
    const ROUNDS: u64 = 200;
    const LINES: [Offset; 2] = [Offset(0), Offset(4 * LINE)];
    let trips = (effort.sample_ns / (300 * ROUNDS)).max(1) * ROUNDS;
    for memory in players {
        for at in LINES {
            memory.store(at, 0);
            memory.write_back(at, 8);
        }
        memory.mfence();
    }
    let samples = on_threads(2, |player| {
        let memory = players[player];
        let (mine, theirs) = (LINES[player], LINES[1 - player]);
        let mut samples = Vec::with_capacity(effort.samples);
        let mut turn = 0;
        for _ in 0..=effort.samples {
            let start = Instant::now();
            for _ in 0..trips {
                turn += 1;
                if player == 0 {
                    say(memory, mine, turn);
                    hear(memory, theirs, turn)?;
                } else {
                    hear(memory, theirs, turn)?;
                    say(memory, mine, turn);
                }
            }
            samples.push(start.elapsed().as_nanos() as f64 / trips as f64);
        }
        Ok(samples)
    });
    let first = samples.into_iter().next().expect("two players");
    // The first sample warms up.
    first.map(|samples| Timing::of(samples[1..].to_vec()))
}

#[inline(always)]
fn say<M: Memory>(memory: &M, at: Offset, turn: u64) {
    memory.store(at, turn);
    memory.write_back(at, 8);
    memory.sfence();
}

#[inline(always)]
fn hear<M: Memory>(memory: &M, at: Offset, turn: u64) -> Result<(), Fault> {
    let mut looks = 0_u32;
    loop {
        memory.invalidate(at, 8);
        memory.fence_invalidations();
        if memory.load(at)? == turn {
            return Ok(());
        }
        looks += 1;
        // Two players on one CPU would otherwise wait for the end of a time slice.
        if looks.is_multiple_of(1 << 14) {
            memory.yield_now();
        }
    }
}

/// The bandwidth of the two copies that a message makes, through the pool, with the flushes it needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copies {
    /// GB/s of messages when one copy follows the other, as for a single message.
    pub in_turn: Timing,
    /// GB/s of messages when two CPUs copy at the same time, each its own, as for a stream of messages: that of the
    /// slower copy.
    pub at_once: Timing,
}

/// Measures the two copies of messages of `bytes` bytes: in, from a private buffer past the caches or through them, as
/// the memory prefers; out, behind an invalidation, into a private buffer.
///
/// # Errors
/// [`Fault`] when the memory fails.
///
/// # Panics
/// When the region holds less than two messages.
pub fn copies_floor<M: Memory + Send + Sync>(
    players: [&M; 2],
    bytes: u64,
    effort: Effort,
) -> Result<Copies, Fault> {
    let [writer, reader] = players;
    let stride = bytes.next_multiple_of(LINE);
    let in_turn = on_threads(1, |_| {
        let (sent, mut received) = (vec![1; bytes as usize], vec![0; bytes as usize]);
        let mut failed = Ok(());
        let timing = effort.time(|| {
            let one =
                copy_in(writer, Offset(0), &sent).and_then(|()| copy_out(reader, Offset(0), &mut received));
            failed = failed.and(one);
        });
        failed.map(|()| timing)
    });
    let in_turn = in_turn.into_iter().next().expect("one thread")?;
    let at_once = on_threads(2, |player| {
        let mut buffer = vec![1; bytes as usize];
        let mut failed = Ok(());
        let timing = effort.time(|| {
            let one = match player {
                0 => copy_in(writer, Offset(0), &buffer),
                _ => copy_out(reader, Offset(stride), &mut buffer),
            };
            failed = failed.and(one);
        });
        failed.map(|()| timing)
    });
    let mut slower = in_turn;
    for (player, timing) in at_once.into_iter().enumerate() {
        let timing = timing?;
        if player == 0 || timing.median > slower.median {
            slower = timing;
        }
    }
    let gigabytes = |ns: f64| bytes as f64 / ns;
    Ok(Copies { in_turn: in_turn.map(gigabytes), at_once: slower.map(gigabytes) })
}

#[inline]
fn copy_in<M: Memory>(memory: &M, at: Offset, from: &[u8]) -> Result<(), Fault> {
    memory.copy_in_nt(at, from)?;
    memory.sfence();
    Ok(())
}

#[inline]
fn copy_out<M: Memory>(memory: &M, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
    memory.invalidate(at, into.len() as u64);
    memory.fence_invalidations();
    memory.copy_out(at, into)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use crate::{Coherent, Region, Software};

    #[test]
    fn floors_are_measured_on_both_kinds_of_memory() {
        let scratch = Scratch::new();
        let path = scratch.path().join("region");
        drop(Region::create(&path, 1 << 20).expect("a region"));
        let region = || Region::open(&path).expect("it");
        let effort = Effort { samples: 5, sample_ns: 100_000 };
        let software = [Software::new(region()), Software::new(region())];
        let coherent = [Coherent::new(region()), Coherent::new(region())];
        let trip = ping_pong_floor(software.each_ref(), effort).expect("good memory");
        assert!(trip.low > 0.0, "{trip:?}");
        let trip = ping_pong_floor(coherent.each_ref(), effort).expect("good memory");
        assert!(trip.low > 0.0, "{trip:?}");
        let copies = copies_floor(software.each_ref(), 1 << 16, effort).expect("good memory");
        assert!(copies.in_turn.low > 0.0 && copies.at_once.low > 0.0, "{copies:?}");
    }
}
