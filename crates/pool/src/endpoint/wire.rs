//! What the messages between two endpoints say.
//!
//! # Kind and tag of a message on a ring
//! | bits 0..4 of the kind | tag | bytes |
//! |---|---|---|
//! | 1 eager | the label's | the message |
//! | 2 request | the label's | number of the send, bytes of the message, 8 bytes each |
//! | 3 grant | number of the send | number of the receive, bytes that it takes, 8 bytes each |
//! | 4 part | bits 40..64 number of the receive, bits 0..40 offset | the message from there on |
//! | 5 credit | 0 | bytes of eager messages that were taken, and 0, 8 bytes each |
//! | 6 offer | the label's | bits 0..24 number of the send, bits 24..64 bytes of the message; where in the pool they lie, 8 bytes each |
//! | 7 synchronous request | the label's | as a request; when all that was granted is where it belongs, a grant of 0 bytes says so |
//! | 8 piece | as of a part | where in the sender's send buffers it lies; bits 0..32 its bytes, bits 32..64 number of the send buffer, 8 bytes each |
//! | 9 taken | number of the send buffer of a piece that was copied out | 16 zeros |
//! | 10 moved | 0 | 16 zeros; the last on this ring of the pair for now: it goes on in its other one |
//! | 11 open | 0 | 16 zeros; the receiver is to open the ring that is for the pair alone, and to answer |
//! | 12 opened | 1 if it could, else 0 | 16 zeros |
//! | 13 unasked | the label's | bytes of the message, and 0, 8 bytes each; its parts come as those of receive 2^24 - 1 |
//! | 14 buffers | 0 | slot of the entry of the sender's send buffers, and their generation, 8 bytes each |
//!
//! If it is of an eager or unasked message, a request of either sort or an offer, the kind has more bits: bits 8..16 are the
//! label's kind, bits 16..48 its data, and bit 7 is 1 if there is data.

use super::Label;
use crate::ring::{Envelope, INLINE};

/// Bits of an offset in a message.
pub(super) const OFFSET_BITS: u32 = 40;
/// Bytes of the longest message.
pub const LONGEST: u64 = (1 << OFFSET_BITS) - 1;
/// The number of the receive that parts of an unasked message name: the highest that has room beside an offset.
pub(super) const UNASKED: u64 = (1 << (64 - OFFSET_BITS)) - 1;
/// Receives that are under way at most.
pub(super) const RECEIVES: usize = UNASKED as usize;

const HAS_DATA: u64 = 1 << 7;
const LABEL_BITS: u32 = 8;
const DATA_BITS: u32 = 16;
const END_BITS: u32 = 48;
const EAGER: u64 = 1;
const REQUEST: u64 = 2;
const GRANT: u64 = 3;
const PART: u64 = 4;
const CREDIT: u64 = 5;
const OFFER: u64 = 6;
const SYNCHRONOUS: u64 = 7;
const PIECE: u64 = 8;
const TAKEN: u64 = 9;
const MOVED: u64 = 10;
const OPEN: u64 = 11;
const OPENED: u64 = 12;
const COMES: u64 = 13;
const BUFFERS: u64 = 14;

/// What a message on a ring is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// A whole message.
    Eager(Label),
    /// The announcement of a long one.
    Request(Label),
    /// That of one whose sender wants to be told that it has come.
    Synchronous(Label),
    /// That of a long one whose bytes lie in the pool.
    Offer(Label),
    /// The receiver of the send of this number is ready, or has all that it takes.
    Grant { send: u64 },
    /// Bytes of the message of this receive, from an offset on.
    Part { receive: u64, offset: u64 },
    /// The receiver has taken eager messages.
    Credit,
    /// As a part, and the bytes lie in a send buffer.
    Piece { receive: u64, offset: u64 },
    /// The receiver has copied out what lies in this send buffer.
    Taken { buffer: u32 },
    /// The sender goes on in the other ring of the pair.
    Moved,
    /// The receiver is to open the ring that the pair has for itself.
    Open,
    /// It has, or cannot.
    Opened(bool),
    /// Where the sender's send buffers are.
    Buffers,
    /// A whole message comes in parts, unasked.
    Unasked(Label),
}

impl Note {
    /// The kind and tag that say so.
    #[inline]
    pub(super) fn encode(self) -> (u64, u64) {
        match self {
            Self::Eager(label) => (EAGER | kind_of(&label), label.tag),
            Self::Request(label) => (REQUEST | kind_of(&label), label.tag),
            Self::Synchronous(label) => (SYNCHRONOUS | kind_of(&label), label.tag),
            Self::Offer(label) => (OFFER | kind_of(&label), label.tag),
            Self::Grant { send } => (GRANT, send),
            Self::Part { receive, offset } => (PART, receive << OFFSET_BITS | offset),
            Self::Credit => (CREDIT, 0),
            Self::Piece { receive, offset } => (PIECE, receive << OFFSET_BITS | offset),
            Self::Taken { buffer } => (TAKEN, buffer.into()),
            Self::Moved => (MOVED, 0),
            Self::Open => (OPEN, 0),
            Self::Opened(could) => (OPENED, could.into()),
            Self::Buffers => (BUFFERS, 0),
            Self::Unasked(label) => (COMES | kind_of(&label), label.tag),
        }
    }

    /// What an envelope says; `None` when no endpoint wrote it.
    #[inline]
    pub(super) fn decode(envelope: &Envelope) -> Option<Self> {
        let Envelope { kind, tag, .. } = *envelope;
        match kind & (HAS_DATA - 1) {
            EAGER => Some(Self::Eager(label_of(kind, tag)?)),
            REQUEST => Some(Self::Request(label_of(kind, tag)?)),
            SYNCHRONOUS => Some(Self::Synchronous(label_of(kind, tag)?)),
            OFFER => Some(Self::Offer(label_of(kind, tag)?)),
            GRANT if kind == GRANT => Some(Self::Grant { send: tag }),
            PART if kind == PART => Some(Self::Part { receive: tag >> OFFSET_BITS, offset: tag & LONGEST }),
            CREDIT if kind == CREDIT => Some(Self::Credit),
            PIECE if kind == PIECE => {
                Some(Self::Piece { receive: tag >> OFFSET_BITS, offset: tag & LONGEST })
            }
            TAKEN if kind == TAKEN => Some(Self::Taken { buffer: u32::try_from(tag).ok()? }),
            MOVED if kind == MOVED => Some(Self::Moved),
            OPEN if kind == OPEN && tag == 0 => Some(Self::Open),
            OPENED if kind == OPENED && tag < 2 => Some(Self::Opened(tag == 1)),
            BUFFERS if kind == BUFFERS && tag == 0 => Some(Self::Buffers),
            COMES => Some(Self::Unasked(label_of(kind, tag)?)),
            _ => None,
        }
    }
}

/// The bits of a kind that say a label.
#[inline]
fn kind_of(label: &Label) -> u64 {
    let data = label.data.map_or(0, |data| HAS_DATA | u64::from(data) << DATA_BITS);
    u64::from(label.kind) << LABEL_BITS | data
}

/// The label that they say; `None` when they say more than one has.
#[inline]
fn label_of(kind: u64, tag: u64) -> Option<Label> {
    let data = (kind >> DATA_BITS) as u32;
    let has_data = kind & HAS_DATA != 0;
    let label = Label { kind: (kind >> LABEL_BITS) as u8, tag, data: has_data.then_some(data) };
    (kind >> END_BITS == 0 && (has_data || data == 0)).then_some(label)
}

/// The number of a send and its bytes, where a place stands beside them; `None` for a number that has no room there.
pub(super) fn offered(send: u64, bytes: u64) -> Option<u64> {
    (send < RECEIVES as u64).then_some(send | bytes << (64 - OFFSET_BITS))
}

/// The inverse of [`offered`].
pub(super) const fn offer_of(word: u64) -> (u64, u64) {
    (word & UNASKED, word >> (64 - OFFSET_BITS))
}

/// The number of a send buffer and the bytes of the piece in it.
pub(super) const fn piece_of(buffer: u32, bytes: u64) -> u64 {
    (buffer as u64) << 32 | bytes
}

/// The inverse of [`piece_of`].
pub(super) const fn buffer_of(word: u64) -> (u32, u64) {
    ((word >> 32) as u32, word & 0xffff_ffff)
}

/// Two words as the bytes of a message.
pub(super) fn bytes_of(low: u64, high: u64) -> [u8; INLINE] {
    (u128::from(low) | u128::from(high) << 64).to_le_bytes()
}

/// The inverse of [`bytes_of`].
pub(super) fn words_of(bytes: [u8; INLINE]) -> [u64; 2] {
    let words = u128::from_le_bytes(bytes);
    [words as u64, (words >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_back_from_kind_and_tag() {
        let label = |data| Label { kind: u8::MAX, tag: u64::MAX, data };
        let notes = [
            Note::Eager(label(None)),
            Note::Request(label(Some(u32::MAX))),
            Note::Synchronous(label(None)),
            Note::Offer(label(Some(7))),
            Note::Eager(label(Some(0))),
            Note::Grant { send: 7 },
            Note::Part { receive: RECEIVES as u64 - 1, offset: LONGEST },
            Note::Credit,
            Note::Piece { receive: RECEIVES as u64 - 1, offset: LONGEST },
            Note::Taken { buffer: u32::MAX },
            Note::Moved,
            Note::Open,
            Note::Opened(true),
            Note::Opened(false),
            Note::Buffers,
            Note::Unasked(label(Some(1))),
        ];
        for note in notes {
            let (kind, tag) = note.encode();
            assert_eq!(Note::decode(&Envelope { kind, tag, bytes: 0 }), Some(note));
        }
    }

    #[test]
    fn kinds_that_no_endpoint_writes_are_none() {
        let data_unsaid = EAGER | 1 << DATA_BITS;
        for kind in [
            0,
            15,
            GRANT | HAS_DATA,
            PART | 1 << 8,
            CREDIT | HAS_DATA,
            0x7f,
            data_unsaid,
            1 << END_BITS | EAGER,
        ] {
            assert_eq!(Note::decode(&Envelope { kind, tag: 0, bytes: 0 }), None, "{kind}");
        }
        assert_eq!(words_of(bytes_of(1, u64::MAX)), [1, u64::MAX]);
        for (kind, tag) in [(OPEN, 1), (OPENED, 2), (BUFFERS, 1)] {
            assert_eq!(Note::decode(&Envelope { kind, tag, bytes: 0 }), None, "{kind}");
        }
        assert_eq!(buffer_of(piece_of(u32::MAX, 7)), (u32::MAX, 7));

        assert_eq!(offered(9, LONGEST).map(offer_of), Some((9, LONGEST)));
        assert_eq!(offered(RECEIVES as u64, 1), None);
    }
}
