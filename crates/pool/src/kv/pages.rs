//! Which pages of the pool this process has mapped for blocks: a first touch of each page costs a fault, and many at once cost one call.

use polder_mem::{Memory, Offset};

use super::Cache;
use crate::pool::locked;

/// Bytes that are mapped at once.
const PIECE: u64 = 2 << 20;

/// The pieces of the pool that were mapped, one bit each. They stay mapped, whatever comes to lie there.
#[derive(Debug, Default)]
pub(super) struct Pages(Vec<u64>);

impl Pages {
    /// Takes up a piece; whether it is new.
    fn add(&mut self, piece: u64) -> bool {
        let (word, bit) = ((piece / 64) as usize, 1 << (piece % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }
}

impl<M: Memory> Cache<M> {
    /// Maps the pages of blocks that are about to be copied, and those beside them in the same piece.
    pub(super) fn map_blocks(&self, blocks: impl Iterator<Item = Offset>, writes: bool) {
        let (memory, mut pages) = (self.pool.memory(), locked(&self.pages));
        for block in blocks {
            for piece in block.0 / PIECE..=(block.0 + u64::from(self.identity.block) - 1) / PIECE {
                if pages.add(piece) {
                    let first = piece * PIECE;
                    memory.populate(Offset(first), PIECE.min(memory.bytes() - first), writes);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_new_once() {
        let mut pages = Pages::default();
        assert_eq!([0, 64, 0, 63, 64].map(|piece| pages.add(piece)), [true, true, false, true, false]);
    }
}
