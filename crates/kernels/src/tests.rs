//! Every level against a plain oracle.

use std::num::NonZeroU32;

use half::{bf16, f16};
use proptest::prelude::*;

use crate::lane::{narrow_half, widen_half};
use crate::level::Level;
use crate::reduce::{InPlace, Into};
use crate::{BlockMean, Dtype, KernelError, MeanVisitor, Op, divide, reduce, reduce_into, with_mean};

/// A small generator, so that a failure is repeated by its seed.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// An element's bits: often one of the values at which arithmetic is special.
    fn element(&mut self, dtype: Dtype) -> u64 {
        let word = self.word();
        if self.word().is_multiple_of(2) {
            return word;
        }
        let special: &[u64] = match dtype {
            Dtype::F64 => &[
                0,
                1 << 63,
                1,
                0x7ff0_0000_0000_0000,
                0xfff0_0000_0000_0000,
                0x7ff8_0000_0000_0123,
                0xfff0_0000_0000_0001,
                0x7fef_ffff_ffff_ffff,
            ],
            Dtype::F32 => {
                &[0, 1 << 31, 1, 0x807f_ffff, 0x7f80_0000, 0xff80_0000, 0xffc0_0123, 0x7f80_0001, 0x7f7f_ffff]
            }
            Dtype::BF16 => &[0, 0x8000, 1, 0x807f, 0x7f80, 0xff80, 0xffc1, 0x7f81, 0x7f7f],
            Dtype::F16 => &[0, 0x8000, 1, 0x83ff, 0x7c00, 0xfc00, 0xfe01, 0x7c01, 0x7bff],
            _ => {
                &[0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 0x80, 0x7f, 0x8000, 0x7fff, 1 << 31, (1 << 31) - 1]
            }
        };
        special[usize::try_from(word % special.len() as u64).unwrap()]
    }

    fn array(&mut self, dtype: Dtype, elements: usize) -> Vec<u8> {
        (0..elements).flat_map(|_| self.element(dtype).to_le_bytes()[..dtype.bytes()].to_vec()).collect()
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(whole)
}

fn double(op: Op, a: f64, b: f64) -> f64 {
    let by_order = |least: bool| match a.partial_cmp(&b) {
        None => f64::NAN,
        Some(_) if a.total_cmp(&b).is_lt() == least => a,
        Some(_) => b,
    };
    match op {
        Op::Sum | Op::Average => a + b,
        Op::Product => a * b,
        Op::Min => by_order(true),
        Op::Max => by_order(false),
        _ => unreachable!("bit operations are refused for floats"),
    }
}

/// In f64 a sum or product of two f32 is near enough to exact that rounding it to f32 is rounding once (Figueroa
/// 1995: 53 >= 2 * 24 + 2).
fn single(op: Op, a: f32, b: f32) -> f32 {
    double(op, a.into(), b.into()) as f32
}

/// What the bits of an element become, by the plainest means.
fn expected(op: Op, dtype: Dtype, a: u64, b: u64) -> u64 {
    let signed = |word: u64| {
        let unused = 64 - 8 * dtype.bytes();
        ((word << unused) as i64) >> unused
    };
    let is_signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    let less = if is_signed { signed(a) < signed(b) } else { a < b };
    match (dtype, op) {
        (Dtype::F64, _) => match double(op, f64::from_bits(a), f64::from_bits(b)) {
            nan if nan.is_nan() => 0x7ff8_0000_0000_0000,
            value => value.to_bits(),
        },
        (Dtype::F32, _) => match single(op, f32::from_bits(a as u32), f32::from_bits(b as u32)) {
            nan if nan.is_nan() => 0x7fc0_0000,
            value => value.to_bits().into(),
        },
        (Dtype::BF16, _) => {
            let wide = |bits: u64| bf16::from_bits(bits as u16).to_f32();
            match bf16::from_f32(single(op, wide(a), wide(b))) {
                nan if nan.is_nan() => 0x7fc0,
                value => value.to_bits().into(),
            }
        }
        (Dtype::F16, _) => {
            let wide = |bits: u64| f16::from_bits(bits as u16).to_f32();
            match f16::from_f32(single(op, wide(a), wide(b))) {
                nan if nan.is_nan() => 0x7e00,
                value => value.to_bits().into(),
            }
        }
        (_, Op::Sum | Op::Average) => a.wrapping_add(b),
        (_, Op::Product) => a.wrapping_mul(b),
        (_, Op::Min) => {
            if less {
                a
            } else {
                b
            }
        }
        (_, Op::Max) => {
            if less {
                b
            } else {
                a
            }
        }
        (_, Op::BitAnd) => a & b,
        (_, Op::BitOr) => a | b,
        (_, Op::BitXor) => a ^ b,
    }
}

fn expected_array(op: Op, dtype: Dtype, a: &[u8], b: &[u8]) -> Vec<u8> {
    let size = dtype.bytes();
    a.chunks(size)
        .zip(b.chunks(size))
        .flat_map(|(a, b)| expected(op, dtype, word(a), word(b)).to_le_bytes()[..size].to_vec())
        .collect()
}

/// Every operation that `dtype` takes.
fn operations(dtype: Dtype) -> impl Iterator<Item = Op> {
    Op::ALL.into_iter().filter(move |op| op.check(dtype).is_ok())
}

/// A copy of `array` that begins `by` bytes after a multiple of 8, and where it begins.
fn misaligned(array: &[u8], by: usize) -> (Vec<u8>, usize) {
    let mut room = vec![0xa5; array.len() + 16];
    let start = (by + 8 - room.as_ptr().addr() % 8) % 8;
    room[start..start + array.len()].copy_from_slice(array);
    (room, start)
}

fn check(op: Op, dtype: Dtype, a: &[u8], b: &[u8], shift: usize) {
    let expected = expected_array(op, dtype, a, b);
    let bytes = a.len();
    for level in Level::available() {
        let (mut acc, at) = misaligned(a, shift);
        let (src, from) = misaligned(b, (shift * 3 + 1) % 8);
        let (mut out, to) = misaligned(&vec![0; bytes], (shift * 5 + 2) % 8);
        let src = &src[from..from + bytes];
        level.combine(op, dtype, Into { out: &mut out[to..to + bytes], a: &acc[at..at + bytes], b: src });
        level.combine(op, dtype, InPlace { acc: &mut acc[at..at + bytes], src });
        let case = format!("{op} of {dtype}, {bytes} bytes, shifted by {shift}, {level:?}");
        assert!(acc[at..at + bytes] == expected, "in place: {case}\n{a:x?}\n{b:x?}");
        assert!(out[to..to + bytes] == expected, "into a third: {case}\n{a:x?}\n{b:x?}");
        assert!(
            acc[..at].iter().chain(&acc[at + bytes..]).all(|&byte| byte == 0xa5),
            "wrote outside: {case}"
        );
        assert!(
            out[..to].iter().chain(&out[to + bytes..]).all(|&byte| byte == 0xa5),
            "wrote outside: {case}"
        );
    }
}

#[test]
fn every_length_and_misalignment_gives_the_oracles_bits() {
    let (lengths, shifts) = if cfg!(miri) { (5..6, 3..4) } else { (0..201, 0..8) };
    let mut random = Random(1);
    for dtype in Dtype::ALL {
        for op in operations(dtype) {
            for elements in lengths.clone() {
                let (a, b) = (random.array(dtype, elements), random.array(dtype, elements));
                check(op, dtype, &a, &b, elements % 8);
            }
            for shift in shifts.clone() {
                let (a, b) = (random.array(dtype, 37), random.array(dtype, 37));
                check(op, dtype, &a, &b, shift);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 2000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn arrays_of_any_bits_become_what_the_oracle_says(
        seed: u64,
        dtype in prop::sample::select(Dtype::ALL.to_vec()),
        elements in 0_usize..2000,
        shift in 0_usize..8,
    ) {
        let elements = if cfg!(miri) { elements % 9 } else { elements };
        let mut random = Random(seed);
        let (a, b) = (random.array(dtype, elements), random.array(dtype, elements));
        for op in operations(dtype) {
            check(op, dtype, &a, &b, shift);
        }
    }

    #[test]
    fn integer_averages_truncate_toward_zero_in_every_width(value: i64, by in 1_u32..) {
        for (dtype, bytes) in [(Dtype::I8, 1), (Dtype::I16, 2), (Dtype::I32, 4), (Dtype::I64, 8)] {
            let unused = 64 - 8 * bytes;
            let narrow = (value << unused) >> unused;
            let unsigned = (value as u64) << unused >> unused;
            let signed_expected = (narrow / i64::from(by)).to_le_bytes();
            let unsigned_expected = (unsigned / u64::from(by)).to_le_bytes();
            let unsigned_type = match dtype {
                Dtype::I8 => Dtype::U8,
                Dtype::I16 => Dtype::U16,
                Dtype::I32 => Dtype::U32,
                _ => Dtype::U64,
            };
            for level in Level::available() {
                let mut acc = value.to_le_bytes();
                level.divide(dtype, &mut acc[..bytes], NonZeroU32::new(by).unwrap());
                prop_assert_eq!(&acc[..bytes], &signed_expected[..bytes]);
                acc = value.to_le_bytes();
                level.divide(unsigned_type, &mut acc[..bytes], NonZeroU32::new(by).unwrap());
                prop_assert_eq!(&acc[..bytes], &unsigned_expected[..bytes]);
            }
        }
    }
}

#[test]
fn float_averages_are_the_quotient_rounded_once() {
    let mut random = Random(2);
    for dtype in [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::F16] {
        let lengths = if cfg!(miri) { 3..6 } else { 0..70 };
        for (elements, by) in lengths.zip([1_u32, 2, 3, 7, 10, 64, 1000].into_iter().cycle()) {
            let array = random.array(dtype, elements);
            let expected: Vec<u8> =
                array.chunks(dtype.bytes()).flat_map(|bits| quotient_bits(dtype, word(bits), by)).collect();
            for level in Level::available() {
                let mut acc = array.clone();
                level.divide(dtype, &mut acc, NonZeroU32::new(by).unwrap());
                assert_eq!(acc, expected, "{dtype} by {by}, {level:?}: {array:x?}");
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "65,536 elements take minutes there")]
fn an_average_over_a_power_of_two_is_the_quotient_of_every_float_down_to_the_smallest() {
    for dtype in [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::F16] {
        // Exponents from 0 to 31 of the wide types, of both signs; every half and bfloat.
        let widened = match dtype {
            Dtype::F64 => |bits: u64| bits << 63 | bits << 41 | (bits * 0x1_2345_6789),
            Dtype::F32 => |bits: u64| bits << 31 | bits << 12 | (bits * 0x123),
            _ => |bits: u64| bits,
        };
        let array: Vec<u8> = (0..=u64::from(u16::MAX))
            .flat_map(|bits| widened(bits).to_le_bytes().into_iter().take(dtype.bytes()))
            .collect();
        for by in [1_u32, 2, 4, 1 << 12, 1 << 31] {
            let expected: Vec<u8> =
                array.chunks(dtype.bytes()).flat_map(|bits| quotient_bits(dtype, word(bits), by)).collect();
            for level in Level::available() {
                let mut acc = array.clone();
                level.divide(dtype, &mut acc, NonZeroU32::new(by).unwrap());
                assert!(acc == expected, "{dtype} by {by}, {level:?}");
            }
        }
    }
}

fn quotient_bits(dtype: Dtype, bits: u64, by: u32) -> Vec<u8> {
    let canonical = |is_nan: bool, quiet: u64, bits: u64| if is_nan { quiet } else { bits };
    let bits = match dtype {
        Dtype::F64 => {
            let value = f64::from_bits(bits) / f64::from(by);
            canonical(value.is_nan(), 0x7ff8_0000_0000_0000, value.to_bits())
        }
        Dtype::F32 => {
            let value = f32::from_bits(bits as u32) / by as f32;
            canonical(value.is_nan(), 0x7fc0_0000, value.to_bits().into())
        }
        Dtype::BF16 => {
            let value = bf16::from_f32(bf16::from_bits(bits as u16).to_f32() / by as f32);
            canonical(value.is_nan(), 0x7fc0, value.to_bits().into())
        }
        _ => {
            let value = f16::from_f32(f16::from_bits(bits as u16).to_f32() / by as f32);
            canonical(value.is_nan(), 0x7e00, value.to_bits().into())
        }
    };
    bits.to_le_bytes()[..dtype.bytes()].to_vec()
}

#[test]
#[cfg_attr(miri, ignore = "65,536 elements take minutes there")]
fn every_half_and_bfloat_survives_a_product_with_one_and_a_minimum_with_itself() {
    for (dtype, one, infinity) in [(Dtype::F16, 0x3c00_u16, 0x7c00), (Dtype::BF16, 0x3f80, 0x7f80)] {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let ones: Vec<u8> = (0..=u16::MAX).flat_map(|_| one.to_le_bytes()).collect();
        for level in Level::available() {
            for (op, other) in [(Op::Product, &ones), (Op::Min, &all), (Op::Max, &all)] {
                let mut acc = all.clone();
                level.combine(op, dtype, InPlace { acc: &mut acc, src: other });
                for (bits, result) in (0..=u16::MAX).zip(acc.as_chunks::<2>().0) {
                    let quiet = if dtype == Dtype::F16 { 0x7e00 } else { 0x7fc0 };
                    let expected = if bits & 0x7fff > infinity { quiet } else { bits };
                    assert_eq!(
                        u16::from_le_bytes(*result),
                        expected,
                        "{op} of {dtype} {bits:#06x}, {level:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn sums_of_halves_round_ties_to_even() {
    for (dtype, even, odd, half_a_place) in
        [(Dtype::BF16, 0x3f80_u16, 0x3f81_u16, 0x3b80_u16), (Dtype::F16, 0x3c00, 0x3c01, 0x1000)]
    {
        for (start, end) in [(even, even), (odd, odd + 1)] {
            let mut acc = start.to_le_bytes();
            reduce(Op::Sum, dtype, &mut acc, &half_a_place.to_le_bytes()).unwrap();
            assert_eq!(u16::from_le_bytes(acc), end, "{dtype} {start:#06x}");
        }
    }
}

#[test]
fn halves_are_widened_as_ieee_754_defines_them() {
    // Not powi, whose last bits are nobody's promise.
    let power_of_2 = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 997 } else { 1 }) {
        let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), f32::from(bits & 1023));
        let magnitude = match exponent {
            0 => fraction * power_of_2(-24),
            31 if fraction == 0.0 => f32::INFINITY,
            31 => f32::NAN,
            _ => (1024.0 + fraction) * power_of_2(exponent - 25),
        };
        let expected = if sign == 1 { -magnitude } else { magnitude };
        let wide = widen_half(bits);
        let same = wide == expected && wide.is_sign_negative() == (sign == 1);
        assert!(same || wide.is_nan() && expected.is_nan(), "{bits:#06x} became {wide}");
    }
}

#[test]
fn singles_are_rounded_to_the_nearest_half_and_ties_to_even() {
    let near = |bits: u32| bits.saturating_sub(2)..=bits.saturating_add(2);
    // Halfway between neighbours, for every half, and next to it.
    let (step, random_ones) = if cfg!(miri) { (997, 100) } else { (1, 1_000_000) };
    let ties = (0..=0x7bff_u16).step_by(step).flat_map(|half| {
        let between = (f64::from(widen_half(half)) + f64::from(widen_half(half + 1).min(65536.0))) / 2.0;
        near((between as f32).to_bits())
    });
    let mut random = Random(3);
    let others = (0..random_ones).map(|_| random.word() as u32);
    for bits in ties.chain(others).flat_map(|bits| [bits, bits | 1 << 31]) {
        let value = f32::from_bits(bits);
        let expected = if value.is_nan() { 0x7e00 } else { f16::from_f32(value).to_bits() };
        assert_eq!(narrow_half(value), expected, "{value:e} {bits:#010x}");
    }
}

#[test]
fn minimum_and_maximum_order_the_zeros_and_pass_on_nan() {
    let bits = |op, a: f32, b: f32| {
        let mut acc = a.to_le_bytes();
        reduce(op, Dtype::F32, &mut acc, &b.to_le_bytes()).unwrap();
        u32::from_le_bytes(acc)
    };
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(bits(Op::Min, a, b), (-0.0_f32).to_bits());
        assert_eq!(bits(Op::Max, a, b), 0.0_f32.to_bits());
    }
    for (a, b) in [(f32::NAN, 1.0), (1.0, -f32::NAN), (f32::from_bits(0x7f80_0001), f32::NEG_INFINITY)] {
        assert_eq!(bits(Op::Min, a, b), 0x7fc0_0000);
        assert_eq!(bits(Op::Max, a, b), 0x7fc0_0000);
    }
}

#[test]
fn a_bool_is_a_byte() {
    let (a, b) = ([0_u8, 0, 1, 1], [0_u8, 1, 0, 1]);
    for (op, expected) in [
        (Op::Min, [0, 0, 0, 1]),
        (Op::BitAnd, [0, 0, 0, 1]),
        (Op::Max, [0, 1, 1, 1]),
        (Op::BitOr, [0, 1, 1, 1]),
    ] {
        let mut out = [9; 4];
        reduce_into(op, Dtype::U8, &mut out, &a, &b).unwrap();
        assert_eq!(out, expected, "{op}");
    }
}

#[test]
fn a_name_leads_back_to_what_bears_it() {
    for dtype in Dtype::ALL {
        assert_eq!(Dtype::named(dtype.name()), Some(dtype));
    }
    for op in Op::ALL {
        assert_eq!(Op::named(op.name()), Some(op));
    }
    assert_eq!((Dtype::named("bool"), Op::named("premul_sum")), (None, None));
}

#[test]
fn bad_requests_are_refused_in_words_and_change_nothing() {
    let mut acc = [7; 6];
    let cases = [
        (
            reduce(Op::BitXor, Dtype::BF16, &mut acc, &[0; 6]),
            "xor is not defined for bfloat16; use an integer type, or sum, product, min, max or average",
        ),
        (
            reduce(Op::Sum, Dtype::F32, &mut acc, &[0; 6]),
            "6 bytes are no whole number of float32 elements; pass a multiple of 4",
        ),
        (
            reduce_into(Op::Sum, Dtype::U8, &mut acc, &[0; 6], &[0; 5]),
            "arrays of 6 and 5 bytes cannot be combined; pass arrays of one size",
        ),
        (
            divide(Dtype::I64, &mut acc, NonZeroU32::MIN),
            "6 bytes are no whole number of int64 elements; pass a multiple of 8",
        ),
    ];
    for (result, message) in cases {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
    assert_eq!(acc, [7; 6]);
    assert_eq!(reduce(Op::BitOr, Dtype::U32, &mut [], &[]), Ok::<(), KernelError>(()));
}

/// Takes the blocks of some arrays in turn.
struct Blocks<'a>(&'a [Vec<u8>]);

impl MeanVisitor for Blocks<'_> {
    type Output = Vec<u8>;

    fn visit(self, mean: impl BlockMean) -> Vec<u8> {
        let (first, others) = self.0.split_first().expect("an array");
        let block = |array: &Vec<u8>, at: usize| array.as_chunks::<64>().0[at];
        let of = |at| {
            mean.finish(others.iter().fold(block(first, at), |sum, other| mean.sum(sum, block(other, at))))
        };
        (0..first.len() / 64).flat_map(of).collect()
    }
}

#[test]
fn a_mean_by_blocks_has_the_bits_of_sums_and_a_division() {
    let mut random = Random(77);
    for dtype in Dtype::ALL {
        for by in 1..9 {
            let arrays: Vec<_> = (0..by).map(|_| random.array(dtype, 640 / dtype.bytes())).collect();
            let mut expected = arrays[0].clone();
            for other in &arrays[1..] {
                reduce(Op::Sum, dtype, &mut expected, other).unwrap();
            }
            let by = NonZeroU32::new(by).unwrap();
            divide(dtype, &mut expected, by).unwrap();
            let found = with_mean(dtype, by, Blocks(&arrays));
            assert_eq!(found, dtype.is_float().then_some(expected), "{dtype} by {by}");
        }
    }
}
