//! Checksummed lines: how one writer publishes 56 bytes that a reader gets whole or not at all.
//!
//! Rules 2 and 3 of docs/memory-model.md. Memory becomes visible 8 bytes at a time, so the last word is a checksum
//! over the seven before it. A line that was never written is all zeros, which is valid and empty.

use polder_mem::{Fault, LINE, Memory, Offset};
use twox_hash::XxHash3_64;

/// The words that a line carries beside its checksum.
pub const WORDS: usize = 7;

/// What a line holds.
pub type Words = [u64; WORDS];

/// The last word of a line that holds `words`: XXH3 of their little-endian bytes, and 0 for the empty line.
#[must_use]
pub fn checksum(words: &Words) -> u64 {
    if *words == [0; WORDS] {
        return 0;
    }
    let mut bytes = [0; WORDS * 8];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    XxHash3_64::oneshot(&bytes).max(1)
}

/// Stores `words` and their checksum into the line at `at`, without making it visible.
pub fn store<M: Memory>(memory: &M, at: Offset, words: &Words) {
    let [a, b, c, d, e, f, g] = *words;
    memory.store_line(at, &[a, b, c, d, e, f, g, checksum(words)]);
}

/// Publishes the line at `at`: other hosts see it soon, and before whatever is published later. Earlier stores of the
/// payload must have been written back and fenced before.
// SYNC: pairs with `read`.
pub fn publish<M: Memory>(memory: &M, at: Offset, words: &Words) {
    store(memory, at, words);
    // What is published leaves the cache.
    memory.write_back(at, LINE);
    // HARMLESS(sfence -> drop) for a group: what a rank stores after it has published its progress need not come after
    // it; the staging of its next operation is another half.
    memory.sfence();
}

/// Gives up what the line at `at` says, for `words`: other hosts see it at some time, and nothing depends on when.
// SYNC: pairs with `read`.
pub fn publish_unfenced<M: Memory>(memory: &M, at: Offset, words: &Words) {
    store(memory, at, words);
    memory.write_back(at, LINE);
}

/// Publishes the line at `at` before a scan of other lines: later loads wait until other hosts can see it (rule 4).
// SYNC: pairs with `read`, in both directions: of two who announce and then scan, at least one sees the other.
pub fn publish_and_fence<M: Memory>(memory: &M, at: Offset, words: &Words) {
    store(memory, at, words);
    // What is announced leaves the cache.
    memory.write_back(at, LINE);
    memory.mfence();
}

/// Reads the line at `at` afresh; `None` when it is torn, or corrupt for good: look again until a deadline.
///
/// # Errors
/// [`Fault`] when the memory itself fails.
// SYNC: pairs with `publish` and `publish_and_fence`.
pub fn read<M: Memory>(memory: &M, at: Offset) -> Result<Option<Words>, Fault> {
    memory.invalidate(at, LINE);
    memory.fence_invalidations();
    load(memory, at)
}

/// Loads the line at `at` without invalidating it: for lines that this host writes, and after a common fence.
///
/// # Errors
/// [`Fault`] when the memory itself fails.
pub fn load<M: Memory>(memory: &M, at: Offset) -> Result<Option<Words>, Fault> {
    let (words, sum) = load_torn(memory, at)?;
    Ok((sum == checksum(&words)).then_some(words))
}

/// As [`load`], with the checksum in the line, whether it is right or not.
pub(crate) fn load_torn<M: Memory>(memory: &M, at: Offset) -> Result<(Words, u64), Fault> {
    let [a, b, c, d, e, f, g, sum] = memory.load_line(at)?;
    Ok(([a, b, c, d, e, f, g], sum))
}
