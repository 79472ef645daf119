//! What the messages between two endpoints say.
//!
//! # Kind and tag of a message on a ring
//! | bits 0..4 of the kind | tag | bytes |
//! |---|---|---|
//! | 1 eager | the label's | the message |
//! | 2 request | the label's | number of the send, bytes of the message, 8 bytes each |
//! | 3 grant | number of the send | number of the receive, bytes that it takes, 8 bytes each |
//! | 4 part | bits 40..64 number of the receive, bits 0..40 offset | the message from there on |
//! | 5 credit | 0 | bytes of eager messages that were taken, 8 bytes |
//!
//! Of the kind, bit 7 says that 8 bytes of data stand before the bytes of an eager message or a request, and bits 8..16 are the
//! label's kind.

use super::Label;
use crate::ring::Envelope;

/// Bits of an offset in a message.
pub(super) const OFFSET_BITS: u32 = 40;
/// Bytes of the longest message.
pub const LONGEST: u64 = (1 << OFFSET_BITS) - 1;
/// Receives that are under way at most.
pub(super) const RECEIVES: usize = 1 << (64 - OFFSET_BITS);
/// Bytes of a label's data.
pub(super) const DATA: usize = 8;

const HAS_DATA: u16 = 1 << 7;
const EAGER: u16 = 1;
const REQUEST: u16 = 2;
const GRANT: u16 = 3;
const PART: u16 = 4;
const CREDIT: u16 = 5;

/// What a message on a ring is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// A whole message, or the announcement of a long one; whether data stands before its bytes.
    Message { kind: u8, tag: u64, has_data: bool, is_request: bool },
    /// The receiver of the send of this number is ready.
    Grant { send: u64 },
    /// Bytes of the message of this receive, from an offset on.
    Part { receive: u64, offset: u64 },
    /// The receiver has taken eager messages.
    Credit,
}

impl Note {
    /// The kind and tag that say so.
    pub(super) fn encode(self) -> (u16, u64) {
        match self {
            Self::Message { kind, tag, has_data, is_request } => {
                let what = if is_request { REQUEST } else { EAGER };
                (what | if has_data { HAS_DATA } else { 0 } | u16::from(kind) << 8, tag)
            }
            Self::Grant { send } => (GRANT, send),
            Self::Part { receive, offset } => (PART, receive << OFFSET_BITS | offset),
            Self::Credit => (CREDIT, 0),
        }
    }

    /// What an envelope says; `None` when no endpoint wrote it.
    pub(super) fn decode(envelope: &Envelope) -> Option<Self> {
        let Envelope { kind: code, tag, .. } = *envelope;
        let (kind, has_data) = ((code >> 8) as u8, code & HAS_DATA != 0);
        match code & 0x7f {
            what @ (EAGER | REQUEST) => {
                Some(Self::Message { kind, tag, has_data, is_request: what == REQUEST })
            }
            GRANT if code == GRANT => Some(Self::Grant { send: tag }),
            PART if code == PART => Some(Self::Part { receive: tag >> OFFSET_BITS, offset: tag & LONGEST }),
            CREDIT if code == CREDIT => Some(Self::Credit),
            _ => None,
        }
    }

    /// A message with this label.
    pub(super) fn message(label: &Label, is_request: bool) -> Self {
        Self::Message { kind: label.kind, tag: label.tag, has_data: label.data.is_some(), is_request }
    }
}

/// Words as the bytes of a message.
pub(super) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The words of a message that has exactly so many.
pub(super) fn words_of<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    if bytes.len() != N * 8 {
        return None;
    }
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().ok()?);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_come_back_from_kind_and_tag() {
        let message = |has_data, is_request| Note::Message { kind: 3, tag: u64::MAX, has_data, is_request };
        let notes = [
            message(false, false),
            message(true, true),
            Note::Grant { send: 7 },
            Note::Part { receive: RECEIVES as u64 - 1, offset: LONGEST },
            Note::Credit,
        ];
        for note in notes {
            let (kind, tag) = note.encode();
            assert_eq!(Note::decode(&Envelope { kind, tag, bytes: 0 }), Some(note));
        }
    }

    #[test]
    fn kinds_that_no_endpoint_writes_are_none() {
        for kind in [0, 6, GRANT | HAS_DATA, PART | 1 << 8, CREDIT | HAS_DATA, 0x7f] {
            assert_eq!(Note::decode(&Envelope { kind, tag: 0, bytes: 0 }), None, "{kind}");
        }
        assert_eq!(words_of::<2>(&[0; 15]), None);
        assert_eq!(words_of(&bytes_of(&[1, u64::MAX])), Some([1, u64::MAX]));
    }
}
