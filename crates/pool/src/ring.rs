//! Rings: messages from one producer to one consumer, in order, across hosts.
//!
//! The producer owns `slots` header lines and as many cells, the consumer owns one line on which it returns credits;
//! neither ever writes the other's (rules 1 and 5 of docs/memory-model.md). A message of up to [`INLINE`] bytes rides
//! in its header's own line, which carries a checksum; a longer one lies in a cell that is written back before its
//! header is stored; one that no cell holds is streamed through several, and the consumer copies the first out while
//! the producer still writes the last.
//!
//! A push that is cut short anywhere is invisible: only a header whose checksum is right, of the expected sequence and
//! generation, makes a message. Whatever the peer writes is copied out once and validated after.

mod consumer;
mod header;
pub mod hostile;
mod link;
mod producer;

pub use consumer::Consumer;
pub use link::Link;
pub use producer::Producer;

pub(crate) use consumer::{HALF_WRITTEN, WAITS_FOR};
pub(crate) use link::Wait;

use polder_mem::{LINE, Memory, Offset};

use crate::PoolError;
use header::{Header, Sight};

/// The longest message that rides in its header's own line, in bytes.
pub const INLINE: usize = 16;

/// How many messages a ring holds, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    slots: u32,
    cell_bytes: u32,
}

impl RingShape {
    /// A ring of `slots` headers, each with a cell of `cell_bytes`, a multiple of 64.
    ///
    /// # Errors
    /// [`PoolError::Geometry`] when there is no slot, or a cell is no whole number of lines.
    pub fn new(slots: u32, cell_bytes: u32) -> Result<Self, PoolError> {
        let ranged = |what, value: u32, low: u32, high: u32| match (low..=high).contains(&value) {
            true => Ok(()),
            false => {
                Err(PoolError::Geometry { what, value: value.into(), low: low.into(), high: high.into() })
            }
        };
        ranged("ring slots", slots, 1, 1 << 16)?;
        ranged("ring cell bytes", cell_bytes, 64, 1 << 24)?;
        ranged("ring cell bytes beyond a whole line", cell_bytes % 64, 0, 0)?;
        Ok(Self { slots, cell_bytes })
    }

    /// How many messages are under way at most.
    #[must_use]
    pub fn slots(self) -> u64 {
        self.slots.into()
    }

    /// The size of a cell in bytes: longer messages are streamed through several.
    #[must_use]
    pub fn cell_bytes(self) -> u64 {
        self.cell_bytes.into()
    }

    /// Bytes of the extent that the producer owns: the header lines, then the cells.
    #[must_use]
    pub fn producer_bytes(self) -> u64 {
        self.slots() * (LINE + self.cell_bytes())
    }

    /// Bytes of the extent that the consumer owns.
    #[must_use]
    pub const fn consumer_bytes(self) -> u64 {
        LINE
    }

    /// Unreturned credits at which the consumer returns them all. At most `slots`, so a producer that waits for a
    /// credit always has a message before it whose consumption returns one.
    fn batch(self) -> u64 {
        (self.slots() / 4).max(1)
    }
}

impl Default for RingShape {
    /// Eight cells of 64 KiB: where the paper's bandwidth levels off (cMPI, Figure 9).
    fn default() -> Self {
        Self { slots: 8, cell_bytes: 64 << 10 }
    }
}

/// Where a ring lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The producer's extent, [`RingShape::producer_bytes`] from the start of a line.
    pub lines: Offset,
    /// The consumer's line.
    pub credits: Offset,
    /// Which incarnation of the ring this is; both ends agree on it, and a greater one replaces what a dead end left.
    /// Whatever carries another generation counts as never written.
    pub generation: u64,
}

impl Place {
    fn header(&self, shape: RingShape, sequence: u64) -> Offset {
        self.lines.lines((sequence - 1) % shape.slots())
    }

    fn cell(&self, shape: RingShape, sequence: u64) -> Offset {
        self.lines.lines(shape.slots()) + (sequence - 1) % shape.slots() * shape.cell_bytes()
    }
}

/// What a message says of itself beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Envelope {
    /// What sort of message it is, for the layer above.
    pub kind: u16,
    /// A word for the layer above.
    pub tag: u32,
    /// How many bytes it has.
    pub bytes: u64,
}

/// Writes back the headers of a ring whose producer died, from another process of its host, which shares its caches:
/// what the dead had stored becomes visible, and nothing is finished in its name. Returns the sequence of the newest
/// slot that it had published, 0 when there is none.
///
/// # Errors
/// [`PoolError::Memory`].
pub fn write_back_for_the_dead<M: Memory>(
    memory: &M,
    shape: RingShape,
    place: &Place,
) -> Result<u64, PoolError> {
    // The cells need nothing: a header is stored only after its cell was written back and fenced.
    memory.write_back(place.lines, shape.slots() * LINE);
    memory.mfence();
    let mut newest = 0;
    for slot in 0..shape.slots() {
        let words = header::load(memory, place.lines.lines(slot))?;
        if let Sight::Whole(header) = Header::see(&words, words[0], place.generation, shape) {
            newest = newest.max(header.sequence);
        }
    }
    Ok(newest)
}
