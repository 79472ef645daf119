//! One element: from bytes, combined with another, to bytes. Written without branches, so that the compiler makes
//! vectors of it.

/// A type of elements of `N` bytes.
pub(crate) trait Lane<const N: usize>: Copy {
    fn from_bytes(bytes: [u8; N]) -> Self;
    fn to_bytes(self) -> [u8; N];
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn divide(self, by: u32) -> Self;
    /// [`Lane::divide`] by a power of two.
    #[inline(always)]
    fn divide_by_power(self, by: u32) -> Self {
        self.divide(by)
    }
}

macro_rules! integer {
    ($($type:ty, $wide:ty);*) => { $(
        impl Lane<{ size_of::<$type>() }> for $type {
            #[inline(always)]
            fn from_bytes(bytes: [u8; size_of::<$type>()]) -> Self {
                Self::from_le_bytes(bytes)
            }
            #[inline(always)]
            fn to_bytes(self) -> [u8; size_of::<$type>()] {
                self.to_le_bytes()
            }
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            // A quotient is never larger than its dividend, so it fits the narrow type.
            #[inline(always)]
            fn divide(self, by: u32) -> Self {
                (<$wide>::from(self) / <$wide>::from(by)) as Self
            }
        }
    )* };
}

integer!(u8, u32; u16, u32; u32, u32; u64, u64; i8, i64; i16, i64; i32, i64; i64, i64);

/// A float, held as its bits; `$wide` is what it is computed in.
macro_rules! float {
    ($name:ident, $bits:ty, $signed:ty, $wide:ty, $widen:path, $narrow:path, $quiet:literal, $infinity:literal) => {
        #[doc = concat!("A float of the bits of a ", stringify!($bits), ", computed in ", stringify!($wide), ".")]
        #[derive(Clone, Copy)]
        pub(crate) struct $name($bits);

        impl $name {
            #[inline(always)]
            fn is_nan(self) -> bool {
                self.0 & (<$bits>::MAX >> 1) > $infinity
            }

            /// Every NaN becomes the one quiet NaN. On the bits, because the compiler may take one NaN for another.
            #[inline(always)]
            fn from_wide(value: $wide) -> Self {
                let narrow = Self($narrow(value));
                if narrow.is_nan() { Self($quiet) } else { narrow }
            }

            /// Orders like the values, and -0.0 below 0.0: below zero, larger magnitudes are smaller.
            #[inline(always)]
            fn key(self) -> $signed {
                let signed = self.0 as $signed;
                signed ^ ((signed >> (<$bits>::BITS - 1)) as $bits >> 1) as $signed
            }
        }

        impl Lane<{ size_of::<$bits>() }> for $name {
            #[inline(always)]
            fn from_bytes(bytes: [u8; size_of::<$bits>()]) -> Self {
                Self(<$bits>::from_le_bytes(bytes))
            }
            #[inline(always)]
            fn to_bytes(self) -> [u8; size_of::<$bits>()] {
                self.0.to_le_bytes()
            }
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self::from_wide($widen(self.0) + $widen(other.0))
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                Self::from_wide($widen(self.0) * $widen(other.0))
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                let least = if self.key() < other.key() { self } else { other };
                if self.is_nan() | other.is_nan() { Self($quiet) } else { least }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let most = if self.key() > other.key() { self } else { other };
                if self.is_nan() | other.is_nan() { Self($quiet) } else { most }
            }
            #[inline(always)]
            fn divide(self, by: u32) -> Self {
                Self::from_wide($widen(self.0) / by as $wide)
            }
            // The inverse of a power of two is exact, so the product rounds as the quotient does; a product takes a tenth of the time.
            #[inline(always)]
            fn divide_by_power(self, by: u32) -> Self {
                Self::from_wide($widen(self.0) * (1.0 / by as $wide))
            }
        }
    };
}

float!(F64, u64, i64, f64, f64::from_bits, f64::to_bits, 0x7ff8_0000_0000_0000, 0x7ff0_0000_0000_0000);
float!(F32, u32, i32, f32, f32::from_bits, f32::to_bits, 0x7fc0_0000, 0x7f80_0000);
float!(Bf16, u16, i16, f32, widen_bfloat, narrow_bfloat, 0x7fc0, 0x7f80);
float!(F16, u16, i16, f32, widen_half, narrow_half, 0x7e00, 0x7c00);

#[inline(always)]
pub(crate) fn widen_bfloat(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Adding just under half of the last place, and one more where the last bit is set, carries exactly where rounding to
/// nearest even goes up; a carry out of the fraction is the next exponent, and infinity at the end.
#[inline(always)]
pub(crate) fn narrow_bfloat(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN could be rounded to an infinity.
    (if value.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// Exponents of f16 are biased by 15, those of f32 by 127.
const REBIAS: u32 = (127 - 15) << 23;

#[inline(always)]
pub(crate) fn widen_half(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    let normal = (magnitude << 13) + REBIAS;
    // Below 2^-14 the bits count multiples of 2^-24; exponent 31 (infinity, NaN) becomes 255.
    let denormal = (magnitude as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let small = if magnitude < 0x400 { denormal } else { normal };
    let all = if magnitude < 0x7c00 { small } else { normal + REBIAS };
    f32::from_bits(all | (u32::from(bits & 0x8000) << 16))
}

#[inline(always)]
pub(crate) fn narrow_half(value: f32) -> u16 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let sign = (value.to_bits() >> 16) & 0x8000;
    // As for bfloat16; what is too large ends as infinity.
    let rounded = magnitude.wrapping_sub(REBIAS).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    let normal = if rounded < 0x7c00 { rounded } else { 0x7c00 };
    // Below 2^-14: in a sum with 0.5 the last place is 2^-24, so that the CPU rounds.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < 0x3880_0000 { denormal } else { normal };
    (if magnitude > 0x7f80_0000 { 0x7e00 } else { finite | sign }) as u16
}
