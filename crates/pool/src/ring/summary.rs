//! One line per sending host: how a receiver with many rings learns which of them to look at.
//!
//! Each sending process owns one byte of a line that belongs to its host, 64 processes a line. The byte counts what the
//! process has published for this receiver, modulo 256. A sender is never so far ahead of its receiver that the two counts
//! agree again: its rings have fewer slots. The processes of a host share their caches, so any of them writes back the whole
//! line. A byte is only a hint: it is stored after the header that it counts, without a fence between the two. The receiver
//! looks at a ring for as long as its byte differs from what was taken.
//!
//! # Bytes of a summary line
//! | byte | what |
//! |---|---|
//! | 0..64 | slots that this sending process has published for the receiver, modulo 256, one byte a process |

use polder_mem::LINE;

/// The senders that share one line.
pub(crate) const SENDERS: u64 = LINE;

/// Slots that the rings of one sender to one receiver have together, at most, if they are counted in a summary line.
pub(crate) const MOST_SLOTS: u64 = u8::MAX as u64;
