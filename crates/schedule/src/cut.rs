//! How a message is cut into chunks, and these into the parts of rounds.

use std::ops::Range;

use crate::plan::{Chunk, Plan, SLOTS};
use crate::{Collective, Schedule};

/// Chunks of vectors and parts of rounds begin at multiples of so many bytes, which is a cache line and a whole number of
/// elements of every size: so no line of the pool is filled by two ranks, and no element is torn.
pub const GRAIN: u64 = 64;

/// A message, cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of a chunk; the last chunks of a vector may be shorter, or empty.
    pub chunk: u64,
    /// Bytes of an input.
    pub input: u64,
    /// Bytes of an output.
    pub output: u64,
    /// Bytes of a chunk that one round moves, a multiple of [`GRAIN`].
    pub segment: u64,
    /// How many rounds, at least 1.
    pub rounds: u64,
}

impl Cut {
    /// Cuts a message into rounds of equal segments of at most `limit` bytes. `bytes` are those of the vector of an
    /// all-reduce, reduce or broadcast, and those of one rank's part of the others.
    ///
    /// # Panics
    /// When `limit` is 0.
    #[must_use]
    pub fn new(plan: &Plan, bytes: u64, limit: u64) -> Self {
        let chunk = match plan.collective {
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast if plan.chunks > 1 => {
                bytes.div_ceil(plan.chunks as u64).next_multiple_of(GRAIN)
            }
            _ => bytes,
        };
        let rounds = chunk.div_ceil(limit).max(1);
        let segment = chunk.div_ceil(rounds).next_multiple_of(GRAIN);
        let rounds = chunk.div_ceil(segment.max(GRAIN)).max(1);
        let (inputs, outputs) = Schedule::natural_chunks(plan.collective, plan.ranks);
        Self { chunk, input: bytes * inputs as u64, output: bytes * outputs as u64, segment, rounds }
    }

    /// Cuts a message so that its blocks fit `staging` bytes of each rank: at once, or in segments of which [`SLOTS`] fit.
    /// Segments have at most `limit` bytes. `None` when the staging is too small for any.
    ///
    /// # Panics
    /// When `limit` is 0.
    #[must_use]
    pub fn staged(plan: &Plan, bytes: u64, staging: u64, limit: u64) -> Option<Self> {
        let fits = |slots: u64| staging / (plan.blocks as u64 * slots) / GRAIN * GRAIN;
        let whole = Self::new(plan, bytes, u64::MAX);
        if whole.segment <= fits(1).min(limit) {
            return Some(whole);
        }
        let segment = fits(SLOTS).min(limit);
        (segment > 0).then(|| Self::new(plan, bytes, segment))
    }

    /// What round `round` moves of a chunk, in bytes of the buffer that it belongs to; empty past the buffer's end.
    #[must_use]
    pub fn part(&self, chunk: Chunk, round: u64) -> Range<u64> {
        let (chunk, total) = match chunk {
            Chunk::Input(chunk) => (chunk, self.input),
            Chunk::Output(chunk) => (chunk, self.output),
        };
        let start = chunk as u64 * self.chunk;
        let end = (start + self.chunk).min(total);
        let from = (start + round * self.segment).min(end);
        from..(from + self.segment).min(end)
    }

    /// Where the block with this index lies in a rank's staging in a round.
    #[must_use]
    pub fn block_at(&self, plan: &Plan, index: usize, round: u64) -> u64 {
        (round % SLOTS * plan.blocks as u64 + index as u64) * self.segment
    }
}
