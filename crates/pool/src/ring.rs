//! Rings: messages from one producer to one consumer, in order, across hosts.
//!
//! The producer owns header lines (slots) and cells. The consumer owns one line, on which it returns credits for both.
//! Neither ever writes a line of the other (rules 1 and 5 of docs/memory-model.md).
//!
//! - A message of up to [`INLINE`] bytes goes into its header's line, which carries a checksum.
//! - A longer one goes into a cell, which reaches memory before its header is stored.
//! - One that is longer than a cell goes through several: the consumer copies the first while the producer still writes
//!   the last.
//!
//! A push that is cut short anywhere stays invisible. A message needs a header with the right checksum, and with the
//! expected sequence and generation. What the peer writes is copied out once and then validated.
//!
//! # Extent of a producer
//! | part | bytes |
//! |---|---|
//! | headers, each in the first line of two | `slots * 128` |
//! | cells | `cells * cell_bytes` |
//!
//! Slot `n` of a generation, from 1, has the header of index `(n - 1) mod slots`. A short message lies in its header. Any
//! other part of a message lies in the next cell, in turn.
//!
//! # Words of a credit line
//! | word | what |
//! |---|---|
//! | 0 | slots that the consumer has copied out in this generation |
//! | 1 | generation |
//! | 2 | cells that the consumer has copied out in this generation |
//! | 3..7 | spare, 0 |

mod consumer;
mod header;
#[cfg(feature = "hostile")]
pub mod hostile;
mod link;
mod producer;
pub(crate) mod summary;

pub use consumer::Consumer;
pub use link::RingLink;
pub use producer::Producer;

use polder_mem::{LINE, Memory, Offset};

use crate::PoolError;
use header::{Header, Sight};

/// The longest message that rides in its header's own line, in bytes.
pub const INLINE: usize = 16;

/// The distance of one header from the next. CPUs fetch lines in pairs, so a look at one header would also fetch
/// the next, and take it away from its writer: +50% on a round trip, measured.
pub(crate) const PAIR: u64 = 2 * LINE;

/// How many messages a ring holds, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    slots: u32,
    cells: u32,
    cell_bytes: u32,
}

impl RingShape {
    /// The ring of a pair that exchanges short messages: six slots, and four cells of 256 bytes.
    pub(crate) const SMALL: Self = Self { slots: 6, cells: 4, cell_bytes: 256 };

    /// A ring of `cells` cells of `cell_bytes`, a multiple of 64, and as many slots.
    ///
    /// # Errors
    /// [`PoolError::Geometry`] when there is no cell; [`PoolError::Argument`] when a cell is no whole number of lines.
    pub fn new(cells: u32, cell_bytes: u32) -> Result<Self, PoolError> {
        in_range("ring cells", cells, 1, 1 << 16)?;
        in_range("ring cell bytes", cell_bytes, 64, 1 << 24)?;
        if !cell_bytes.is_multiple_of(LINE as u32) {
            let (what, value) = ("ring cell bytes", cell_bytes.to_string());
            return Err(PoolError::Argument { what, value, expected: "give a multiple of 64" });
        }
        Ok(Self { slots: cells, cells, cell_bytes })
    }

    /// With so many slots: a message takes one, and a cell only when its header's line does not hold it.
    ///
    /// # Errors
    /// [`PoolError::Geometry`] when there are fewer slots than cells.
    pub fn with_slots(self, slots: u32) -> Result<Self, PoolError> {
        in_range("ring slots", slots, self.cells, 1 << 16)?;
        Ok(Self { slots, ..self })
    }

    /// How many messages are under way at most.
    #[must_use]
    #[inline(always)]
    pub fn slots(self) -> u64 {
        self.slots.into()
    }

    /// How many of them are in cells at most.
    #[must_use]
    #[inline(always)]
    pub fn cells(self) -> u64 {
        self.cells.into()
    }

    /// The size of a cell in bytes: longer messages are streamed through several.
    #[must_use]
    #[inline(always)]
    pub fn cell_bytes(self) -> u64 {
        self.cell_bytes.into()
    }

    /// Bytes of the extent that the producer owns: the header lines, then the cells.
    #[must_use]
    pub fn producer_bytes(self) -> u64 {
        self.slots() * PAIR + self.cells() * self.cell_bytes()
    }

    #[inline(always)]
    fn cell_start(self, place: &RingPlace) -> Offset {
        place.lines + self.slots() * PAIR
    }

    /// Bytes of the extent that the consumer owns: a line, and its neighbour to keep others away.
    #[must_use]
    pub const fn consumer_bytes(self) -> u64 {
        PAIR
    }
}

impl Default for RingShape {
    /// Eight cells of 64 KiB, where the paper's bandwidth levels off (cMPI, Figure 9), and 64 slots, so that credits for
    /// short messages are rare.
    fn default() -> Self {
        Self { slots: 64, cells: 8, cell_bytes: 64 << 10 }
    }
}

fn in_range(what: &'static str, value: u32, low: u32, high: u32) -> Result<(), PoolError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(PoolError::Geometry { what, value: value.into(), low: low.into(), high: high.into() })
}

/// Unreturned credits, of `all` that there are, at which the consumer returns them. Never more than all, so a producer that
/// waits for a credit always has a message in the ring whose consumption returns one.
#[inline(always)]
fn batch(all: u64) -> u64 {
    (all / 4).max(1)
}

/// Where a ring lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// The producer's extent, [`RingShape::producer_bytes`] from a multiple of 128 bytes.
    pub lines: Offset,
    /// The consumer's line, best with nothing beside it in its 128 bytes.
    pub credits: Offset,
    /// Which incarnation of the ring this is; both ends agree on it, and a greater one replaces what a dead end left.
    /// Whatever carries another generation counts as never written.
    pub generation: u32,
}

/// How far one end has come in slots and cells, and where the next of each is.
#[derive(Clone, Copy, Debug)]
struct Turn {
    slots: u64,
    cells: u64,
    header: Offset,
    cell: Offset,
}

impl Turn {
    fn first(shape: RingShape, place: &RingPlace) -> Self {
        Self { slots: 0, cells: 0, header: place.lines, cell: shape.cell_start(place) }
    }

    /// The sequence of the next slot.
    #[inline(always)]
    fn sequence(&self) -> u64 {
        self.slots + 1
    }

    #[inline(always)]
    fn pass_slot(&mut self, shape: RingShape, place: &RingPlace) {
        self.slots += 1;
        self.header = self.header + PAIR;
        if self.header == shape.cell_start(place) {
            self.header = place.lines;
        }
    }

    fn pass_cell(&mut self, shape: RingShape, place: &RingPlace) {
        self.cells += 1;
        self.cell = self.cell + shape.cell_bytes();
        if self.cell == place.lines + shape.producer_bytes() {
            self.cell = shape.cell_start(place);
        }
    }
}

/// What a message says of itself beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Envelope {
    /// What sort of message it is, for the layer above: 56 bits.
    pub kind: u64,
    /// A word for the layer above.
    pub tag: u64,
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
    place: &RingPlace,
) -> Result<u64, PoolError> {
    // The cells need nothing: a header is stored only after its cell was written back and fenced.
    memory.write_back(place.lines, shape.slots() * PAIR);
    // SYNC: pairs with `In::glance`: what the dead had stored is in memory before anybody is told how far it came.
    memory.mfence();
    let mut newest = 0;
    for slot in 0..shape.slots() {
        let words = memory.load_line(place.lines + slot * PAIR)?;
        if let Sight::Whole(header) = Header::see(&words, words[0], place.generation, shape) {
            newest = newest.max(header.sequence);
        }
    }
    Ok(newest)
}
