//! Checked words: 56 bits and a check of 8, for what must be seen whole in one atomic word.
//!
//! A line of several words may tear: a reader may see old and new words, and then reads it again. A chunk claim or an
//! announcement must never be in doubt, so each stands in one word.
//!
//! Bits 0..8 are CRC-8 (polynomial x^8 + x^2 + x + 1) of the payload's 7 bytes, the highest first; bits 8..64 are the
//! payload. The check misses no error of one or two bits in 64, and no odd number of them. The empty word is 0.

/// The bits that a checked word carries.
pub const BITS: u32 = 56;

const POLYNOMIAL: u8 = 0x07;
const TABLE: [u8; 256] = table();

const fn table() -> [u8; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x80 == 0 { crc << 1 } else { (crc << 1) ^ POLYNOMIAL };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

fn crc(payload: u64) -> u8 {
    payload.to_be_bytes()[1..].iter().fold(0, |crc, byte| TABLE[usize::from(crc ^ byte)])
}

/// The checked word that carries `payload`, whose upper 8 bits must be zero.
#[must_use]
pub fn seal(payload: u64) -> u64 {
    assert!(payload >> BITS == 0, "a checked word carries {BITS} bits, not {payload:#x}");
    payload << 8 | u64::from(crc(payload))
}

/// What a checked word carries, or `None` when its bits are damaged.
#[must_use]
pub fn open(word: u64) -> Option<u64> {
    let payload = word >> 8;
    (u64::from(crc(payload)) == word & 0xff).then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_word_is_zero() {
        assert_eq!(seal(0), 0);
        assert_eq!(open(0), Some(0));
    }

    #[test]
    fn every_payload_comes_back() {
        for payload in [1, 0x00ff_00ff_00ff_00ff, (1 << BITS) - 1, 0x0012_3456_789a_bcde] {
            assert_eq!(open(seal(payload)), Some(payload));
        }
    }

    #[test]
    fn one_or_two_flipped_bits_are_noticed() {
        for payload in [0, 1, 0x0055_5555_5555_5555, (1 << BITS) - 1] {
            let word = seal(payload);
            for first in 0..64 {
                assert_eq!(open(word ^ 1 << first), None);
                for second in 0..first {
                    assert_eq!(open(word ^ 1 << first ^ 1 << second), None);
                }
            }
        }
    }
}
