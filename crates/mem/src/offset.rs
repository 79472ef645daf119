//! Where a byte lies in a region.

use std::fmt;
use std::ops::Add;

/// Bytes in a cache line: the unit in which caches fill, evict and write back.
pub const LINE: u64 = 64;

/// The distance of a byte from the start of a region, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Offset(pub u64);

impl Offset {
    /// The start of the line that holds this byte.
    #[must_use]
    pub const fn line(self) -> Self {
        Self(self.0 & !(LINE - 1))
    }

    /// The `index`-th 8-byte word from here.
    #[must_use]
    pub const fn word(self, index: u64) -> Self {
        Self(self.0 + index * 8)
    }

    /// The `index`-th line from here.
    #[must_use]
    pub const fn lines(self, index: u64) -> Self {
        Self(self.0 + index * LINE)
    }
}

impl Add<u64> for Offset {
    type Output = Self;

    fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Debug for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
