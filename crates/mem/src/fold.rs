//! What becomes of several sources that are folded into one, a line at a time.

/// A line's bytes: what a fold takes of each source at a time.
pub const BLOCK: usize = 64;

/// What becomes of the blocks that lie at one place of all sources. Both functions become part of the loop, so they are to be inlined.
pub trait Fold: Copy {
    /// Combines the block of a further source with those before it.
    fn combine(self, so_far: [u8; BLOCK], block: [u8; BLOCK]) -> [u8; BLOCK];

    /// What is stored.
    fn finish(self, combined: [u8; BLOCK]) -> [u8; BLOCK];
}
