//! Pieces of bytes that are copied and summed at once: a piece is summed while it is in the caches, and read once from memory.

use std::ops::Range;

/// Bytes of a piece: it stays in a second-level cache beside its copy.
pub(crate) const PIECE_BYTES: usize = 32 << 10;

/// The pieces of so many bytes, in their order.
pub(crate) fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes).step_by(PIECE_BYTES).map(move |begin| begin..bytes.min(begin + PIECE_BYTES))
}

#[cfg(test)]
mod tests {
    use std::hash::Hasher;

    use twox_hash::{XxHash3_64, XxHash3_128};

    use super::*;

    /// Bytes, and what the reference implementation says of them.
    const SUMS: [(usize, u64, u128); 7] = [
        (0, 0x2d06_8005_38d3_94c2, 0x99aa_06d3_0147_98d8_6001_c324_468d_497f),
        (56, 0xef61_841e_c8e0_bfa7, 0xcf49_5a9f_14f5_3dd9_13ad_0ddb_7d56_846a),
        (240, 0x4917_a75c_0ef8_eed7, 0x89e3_a0a2_ee35_5d25_d10b_eb4e_0599_e4b3),
        (241, 0x541b_1922_6f00_52e8, 0x75f4_da43_f23c_ce5a_541b_1922_6f00_52e8),
        (32768, 0xb6c4_e8bd_b530_3852, 0xa059_d923_bee2_f506_b6c4_e8bd_b530_3852),
        (32769, 0x21f7_9ae5_2928_6e6f, 0x861d_e3bb_5b3f_8001_21f7_9ae5_2928_6e6f),
        (100_003, 0x82e3_6988_7246_4f8c, 0x971e_75df_1beb_f101_82e3_6988_7246_4f8c),
    ];

    #[test]
    fn sums_are_those_of_the_reference_whole_and_in_pieces() {
        for (bytes, low, wide) in SUMS {
            let bytes: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
            assert_eq!((XxHash3_64::oneshot(&bytes), XxHash3_128::oneshot(&bytes)), (low, wide));
            let (mut hash, mut wide_hash) = (XxHash3_64::new(), XxHash3_128::new());
            for piece in pieces(bytes.len()) {
                hash.write(&bytes[piece.clone()]);
                wide_hash.write(&bytes[piece]);
            }
            assert_eq!((hash.finish(), wide_hash.finish_128()), (low, wide), "{} bytes", bytes.len());
        }
    }
}
