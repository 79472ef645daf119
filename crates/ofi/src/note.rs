//! What one endpoint asks of another's registered memory: a message of its own, read by the other's progress.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | number of the request, which its answer and its payload carry as their tags |
//! | 8..16 | key of the memory |
//! | 16..24 | address there, as the key's owner counts |
//! | 24..32 | bytes of the memory |
//! | 32..36 | data for the completion queue, 0 without |
//! | 36 | 1 write, 2 read, 3 atomic, 4 atomic that fetches, 5 atomic that compares |
//! | 37, 38 | operator and datatype of an atomic |
//! | 39 | 1 with data |
//! | 40.. | what is written, unless it follows as a payload; operands; what is compared with |

use crate::arithmetic::{Datatype, Form, Op};

/// Bytes of the longest note.
pub(crate) const LONGEST: usize = 8192;
const HEADER: usize = 40;
/// What a note carries itself.
pub(crate) const INLINE: usize = LONGEST - HEADER;

/// Bytes that are written or read at once, at most: those of the longest message.
const MOST: u64 = (1 << 40) - 1;

const WRITE: u8 = 1;
const READ: u8 = 2;
const ATOMIC: u8 = 3;
const FETCH: u8 = 4;
const COMPARE: u8 = 5;

/// What is to be done with the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Write,
    Read,
    Atomic(Form, Op, Datatype),
}

/// A request, with what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note<'a> {
    pub(crate) number: u64,
    pub(crate) act: Act,
    pub(crate) key: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) data: Option<u32>,
    pub(crate) carried: &'a [u8],
}

impl<'a> Note<'a> {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (act, op, datatype) = match self.act {
            Act::Write => (WRITE, 0, 0),
            Act::Read => (READ, 0, 0),
            Act::Atomic(Form::Plain, op, datatype) => (ATOMIC, op.code(), datatype.code()),
            Act::Atomic(Form::Fetch, op, datatype) => (FETCH, op.code(), datatype.code()),
            Act::Atomic(Form::Compare, op, datatype) => (COMPARE, op.code(), datatype.code()),
        };
        let mut bytes = Vec::with_capacity(HEADER + self.carried.len());
        for word in [self.number, self.key, self.address, self.bytes] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.data.unwrap_or(0).to_le_bytes());
        bytes.extend([act, op, datatype, u8::from(self.data.is_some())]);
        bytes.extend(self.carried);
        bytes
    }

    /// The inverse of [`Note::encode`]; `None` for bytes that it never gives.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (header, carried) = bytes.split_first_chunk::<HEADER>()?;
        let word = |at: usize| header[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        let data = u32::from_le_bytes(header[32..36].try_into().ok()?);
        let form = match header[36] {
            ATOMIC => Some(Form::Plain),
            FETCH => Some(Form::Fetch),
            COMPARE => Some(Form::Compare),
            _ => None,
        };
        let act = match (header[36], form) {
            (WRITE, _) if header[37..39] == [0; 2] => Act::Write,
            (READ, _) if header[37..39] == [0; 2] => Act::Read,
            (_, Some(form)) => Act::Atomic(form, Op::of(header[37])?, Datatype::of(header[38])?),
            _ => return None,
        };
        let data = match (header[39], data) {
            (0, 0) => None,
            (1, data) => Some(data),
            _ => return None,
        };
        let note = Self {
            number: word(0)?,
            act,
            key: word(8)?,
            address: word(16)?,
            bytes: word(24)?,
            data,
            carried,
        };
        note.is_whole().then_some(note)
    }

    /// Whether it carries as much as it says.
    fn is_whole(&self) -> bool {
        if self.bytes > MOST {
            return false;
        }
        let carried = self.carried.len() as u64;
        match self.act {
            Act::Write => carried == self.bytes || carried == 0 && self.bytes > INLINE as u64,
            Act::Read => carried == 0,
            Act::Atomic(form, op, datatype) => {
                let operands = match (form, op) {
                    (Form::Fetch, Op::Read) => 0,
                    (Form::Compare, _) => 2,
                    _ => 1,
                };
                datatype.takes(form, op)
                    && self.bytes <= INLINE as u64
                    && self.bytes.is_multiple_of(datatype.bytes() as u64)
                    && carried == operands * self.bytes
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTE: Note<'_> = Note {
        number: 7,
        act: Act::Write,
        key: u64::MAX,
        address: 1 << 40,
        bytes: 3,
        data: Some(0),
        carried: b"abc",
    };

    #[test]
    fn notes_come_back_from_their_bytes() {
        let sum = |form| Act::Atomic(form, Op::Sum, Datatype::F64);
        let swap = Act::Atomic(Form::Compare, Op::Cswap, Datatype::U16);
        let notes = [
            NOTE,
            Note { data: None, bytes: INLINE as u64 + 1, carried: b"", ..NOTE },
            Note { act: Act::Read, bytes: MOST, carried: b"", ..NOTE },
            Note { act: sum(Form::Plain), bytes: 8, carried: &[1; 8], ..NOTE },
            Note { act: sum(Form::Fetch), bytes: 16, carried: &[1; 16], ..NOTE },
            Note { act: swap, bytes: 6, carried: &[1; 12], ..NOTE },
        ];
        for note in notes {
            assert_eq!(Note::decode(&note.encode()), Some(note));
        }
    }

    #[test]
    fn notes_that_carry_another_amount_than_they_say_are_none() {
        let read = Act::Atomic(Form::Fetch, Op::Read, Datatype::U64);
        let notes = [
            Note { bytes: 4, ..NOTE },
            Note { bytes: 1, carried: b"", ..NOTE },
            Note { act: Act::Read, ..NOTE },
            Note { act: Act::Read, bytes: MOST + 1, carried: b"", ..NOTE },
            Note { act: read, bytes: 8, carried: &[0; 8], ..NOTE },
            Note { act: read, bytes: 12, carried: b"", ..NOTE },
            Note { act: read, bytes: 1 << 40, carried: b"", ..NOTE },
            Note {
                act: Act::Atomic(Form::Plain, Op::Bor, Datatype::F32),
                bytes: 4,
                carried: &[0; 4],
                ..NOTE
            },
        ];
        for note in notes {
            assert_eq!(Note::decode(&note.encode()), None, "{note:?}");
        }
        let bytes = NOTE.encode();
        assert_eq!(Note::decode(&bytes[..HEADER - 1]), None);
        for (at, wrong) in [(36, 0), (36, 6), (37, 1), (38, 1), (39, 2), (39, 0x80)] {
            let mut bytes = bytes.clone();
            bytes[at] = wrong;
            assert_eq!(Note::decode(&bytes), None, "byte {at}");
        }
    }
}
