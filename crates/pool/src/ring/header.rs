//! The header line of a message: eight words, with the sequence at both ends and a checksum.
//!
//! ```text
//! word 0  sequence: 1 for the first of a generation; never wraps
//!      1  bytes in this slot, 32 bits | generation << 32
//!      2  form, 8 bits: 1 inline, 2 only, 3 first, 4 more, 5 last | kind << 8, 56 bits
//!      3  inline: payload; first: bytes of the whole message; more and last: where in the message this slot begins
//!      4  inline: payload; else zero
//!      5  tag
//!      6  XXH3-64 of words 0 to 5, little-endian
//!      7  sequence again: a canary, not a proof
//! ```

use polder_mem::{Memory, Offset};
use twox_hash::XxHash3_64;

use super::{INLINE, RingShape};

pub(super) const WORDS: usize = 8;
/// Bits of a header's word that say its form; the others say its kind.
pub(super) const FORM_BITS: u32 = 8;
const FORM: u64 = (1 << FORM_BITS) - 1;

/// How a slot carries its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Form {
    /// The whole message, in the header.
    Inline = 1,
    /// The whole message, in the cell.
    Only = 2,
    /// The first part of a streamed message.
    First = 3,
    /// A middle part.
    More = 4,
    /// The last part.
    Last = 5,
}

impl Form {
    pub(super) const ALL: [Self; 5] = [Self::Inline, Self::Only, Self::First, Self::More, Self::Last];

    fn parse(code: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|form| *form as u64 == code)
    }
}

/// What one slot carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) generation: u32,
    pub(super) kind: u64,
    pub(super) tag: u64,
    pub(super) form: Form,
    pub(super) bytes: u32,
    /// Words 3 and 4.
    pub(super) about: u128,
}

/// What a consumer sees in the line where it expects a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// Nothing of this turn.
    Nothing,
    /// Part of a header: the rest is under way, or the line is corrupt.
    Torn,
    /// A whole header that no correct producer writes here; says what of it is wrong.
    Wrong(&'static str),
    /// The header.
    Whole(Header),
}

impl Header {
    /// Stores the header in the line at `at`: the sequence last, so that who looks at one word sees no part of the
    /// line before.
    #[inline(always)]
    pub(super) fn store<M: Memory>(&self, memory: &M, at: Offset) {
        let body @ [sequence, length, form_kind, low, high, tag] = self.body();
        let words = [sequence, length, form_kind, low, high, tag, checksum(&body), sequence];
        memory.store_line(at, &words);
    }

    /// The words that the checksum covers.
    #[inline(always)]
    fn body(&self) -> [u64; 6] {
        let length = u64::from(self.bytes) | u64::from(self.generation) << 32;
        let form_kind = self.form as u64 | self.kind << FORM_BITS;
        let (low, high) = (self.about as u64, (self.about >> 64) as u64);
        [self.sequence, length, form_kind, low, high, self.tag]
    }

    /// Judges `words`, which were found where the header of `expected` belongs.
    #[inline(always)]
    pub(super) fn see(words: &[u64; WORDS], expected: u64, generation: u32, shape: RingShape) -> Sight {
        let [sequence, length, form_kind, low, high, tag, sum, canary] = *words;
        let used_before = expected > shape.slots();
        if checksum(&[sequence, length, form_kind, low, high, tag]) != sum || canary != sequence {
            // Before the first turn of a slot anything may stand there: extents are not cleared.
            let begun = used_before || sequence == expected || canary == expected;
            return if begun { Sight::Torn } else { Sight::Nothing };
        }
        if length >> 32 != u64::from(generation) {
            return if used_before { Sight::Wrong("ring generation") } else { Sight::Nothing };
        }
        if used_before && sequence == expected - shape.slots() {
            return Sight::Nothing;
        }
        if sequence != expected {
            return Sight::Wrong("ring sequence");
        }
        let Some(form) = Form::parse(form_kind & FORM) else { return Sight::Wrong("ring message form") };
        let bytes = length & 0xffff_ffff;
        let room = if form == Form::Inline { INLINE as u64 } else { shape.cell_bytes() };
        if bytes > room {
            return Sight::Wrong("ring message length");
        }
        Sight::Whole(Self {
            sequence,
            generation,
            kind: form_kind >> FORM_BITS,
            tag,
            form,
            bytes: bytes as u32,
            about: u128::from(low) | u128::from(high) << 64,
        })
    }
}

#[inline(always)]
fn checksum(body: &[u64; 6]) -> u64 {
    let mut bytes = [0; 48];
    for (to, word) in bytes.chunks_exact_mut(8).zip(body) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    XxHash3_64::oneshot(&bytes)
}

/// Short payload as the two words of an inline header.
#[inline(always)]
pub(super) fn pack(payload: &[u8]) -> u128 {
    let word = |part: &[u8]| match part.try_into() {
        Ok(whole) => u64::from_le_bytes(whole),
        Err(_) => part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    };
    let (low, high) = payload.split_at(payload.len().min(8));
    u128::from(word(low)) | u128::from(word(high)) << 64
}

/// The inverse of [`pack`]: fills `into`, which is no longer than [`INLINE`].
#[inline(always)]
pub(super) fn unpack(words: u128, into: &mut [u8]) {
    for (word, part) in [words as u64, (words >> 64) as u64].into_iter().zip(into.chunks_mut(8)) {
        let bytes = word.to_le_bytes();
        match part.first_chunk_mut() {
            Some(whole) => *whole = bytes,
            None => part.copy_from_slice(&bytes[..part.len()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_SLOTS: (u32, u32) = (2, 64);

    fn words(header: Header) -> [u64; WORDS] {
        let [a, b, c, d, e, f] = header.body();
        [a, b, c, d, e, f, checksum(&header.body()), a]
    }

    fn shape() -> RingShape {
        RingShape::new(TWO_SLOTS.0, TWO_SLOTS.1).unwrap()
    }

    fn header(sequence: u64) -> Header {
        Header {
            sequence,
            generation: 7,
            kind: 3,
            tag: 9,
            form: Form::Inline,
            bytes: 5,
            about: pack(b"hello"),
        }
    }

    #[test]
    fn a_header_comes_back_as_it_was_written() {
        let words = words(header(4));
        assert_eq!(Header::see(&words, 4, 7, shape()), Sight::Whole(header(4)));
        let mut payload = [0; 5];
        unpack(header(4).about, &mut payload);
        assert_eq!(&payload, b"hello");
    }

    #[test]
    fn any_flipped_bit_makes_a_header_torn() {
        for bit in 0..512 {
            let mut words = words(header(4));
            words[bit / 64] ^= 1 << (bit % 64);
            assert_eq!(Header::see(&words, 4, 7, shape()), Sight::Torn, "bit {bit}");
        }
    }

    #[test]
    fn the_turn_before_and_other_generations_are_nothing_and_jumps_are_wrong() {
        assert_eq!(Header::see(&words(header(2)), 4, 7, shape()), Sight::Nothing);
        assert_eq!(Header::see(&words(header(2)), 2, 8, shape()), Sight::Nothing);
        assert_eq!(Header::see(&words(header(2)), 4, 8, shape()), Sight::Wrong("ring generation"));
        assert_eq!(Header::see(&words(header(6)), 4, 7, shape()), Sight::Wrong("ring sequence"));
        assert_eq!(Header::see(&[0; WORDS], 1, 7, shape()), Sight::Nothing);
        assert_eq!(Header::see(&[u64::MAX; WORDS], 2, 7, shape()), Sight::Nothing);
    }

    #[test]
    fn lengths_and_forms_that_no_producer_writes_are_wrong() {
        let long = Header { bytes: 17, ..header(1) };
        assert_eq!(Header::see(&words(long), 1, 7, shape()), Sight::Wrong("ring message length"));
        let longer = Header { bytes: 65, form: Form::Only, ..header(1) };
        assert_eq!(Header::see(&words(longer), 1, 7, shape()), Sight::Wrong("ring message length"));
        let mut words = words(header(1));
        words[2] = 9;
        let body: [u64; 6] = words[..6].try_into().unwrap();
        words[6] = checksum(&body);
        assert_eq!(Header::see(&words, 1, 7, shape()), Sight::Wrong("ring message form"));
    }
}
