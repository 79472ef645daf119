//! Whole arrays: which loop runs for which operation and type.

use std::num::NonZeroU32;

use crate::dtype::{Dtype, KernelError, Op};
use crate::lane::{Bf16, F16, F32, F64, Lane};
use crate::level::Level;

/// Sets every element of `acc` to `op(acc, src)`. Arrays may have any alignment and any number of elements, 0 too.
///
/// # Errors
/// [`KernelError`] when the operation does not take this type, or a size does not fit; then `acc` is as it was.
pub fn reduce(op: Op, dtype: Dtype, acc: &mut [u8], src: &[u8]) -> Result<(), KernelError> {
    check(op, dtype, acc.len(), [src.len()])?;
    Level::best().combine(op, dtype, InPlace { acc, src });
    Ok(())
}

/// Sets every element of `out` to `op(a, b)`: the same bits as copying `a` to `out` and then [`reduce`] with `b`.
///
/// # Errors
/// [`KernelError`] when the operation does not take this type, or a size does not fit; then `out` is as it was.
pub fn reduce_into(op: Op, dtype: Dtype, out: &mut [u8], a: &[u8], b: &[u8]) -> Result<(), KernelError> {
    check(op, dtype, out.len(), [a.len(), b.len()])?;
    Level::best().combine(op, dtype, Into { out, a, b });
    Ok(())
}

/// Divides every element of `acc` by `by`: the last step of [`Op::Average`]. bf16 and f16 are divided as f32 and
/// rounded once; integers truncate toward 0.
///
/// # Errors
/// [`KernelError::Partial`] when `acc` is no whole number of elements; then it is as it was.
pub fn divide(dtype: Dtype, acc: &mut [u8], by: NonZeroU32) -> Result<(), KernelError> {
    check(Op::Sum, dtype, acc.len(), [])?;
    Level::best().divide(dtype, acc, by);
    Ok(())
}

fn check<const N: usize>(op: Op, dtype: Dtype, bytes: usize, others: [usize; N]) -> Result<(), KernelError> {
    op.check(dtype)?;
    if let Some(&other) = others.iter().find(|&&other| other != bytes) {
        return Err(KernelError::Sizes { first: bytes, other });
    }
    if !bytes.is_multiple_of(dtype.bytes()) {
        return Err(KernelError::Partial { bytes, dtype });
    }
    Ok(())
}

impl Level {
    /// Combines `arrays`. The level must be one of [`Level::available`].
    pub(crate) fn combine(self, op: Op, dtype: Dtype, arrays: impl Arrays) {
        match self {
            Self::Portable => combine(op, dtype, arrays),
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::combine_avx2(op, dtype, arrays) },
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::combine_avx512(op, dtype, arrays) },
        }
    }

    /// Divides every element of `acc` by `by`. The level must be one of [`Level::available`].
    pub(crate) fn divide(self, dtype: Dtype, acc: &mut [u8], by: NonZeroU32) {
        match self {
            Self::Portable => quotients(dtype, acc, by.get()),
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::divide_avx2(dtype, acc, by.get()) },
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::divide_avx512(dtype, acc, by.get()) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Arrays, Dtype, Op, combine, quotients};

    #[target_feature(enable = "avx2")]
    pub(super) fn combine_avx2(op: Op, dtype: Dtype, arrays: impl Arrays) {
        combine(op, dtype, arrays);
    }

    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn combine_avx512(op: Op, dtype: Dtype, arrays: impl Arrays) {
        combine(op, dtype, arrays);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn divide_avx2(dtype: Dtype, acc: &mut [u8], by: u32) {
        quotients(dtype, acc, by);
    }

    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn divide_avx512(dtype: Dtype, acc: &mut [u8], by: u32) {
        quotients(dtype, acc, by);
    }
}

/// Where operands come from and results go. The two ways are two loops, because the compiler must know that what is
/// written does not overlap what is read, or is the same.
pub(crate) trait Arrays {
    /// Applies `f` to every pair of `N` bytes.
    fn each<const N: usize>(self, f: impl Fn([u8; N], [u8; N]) -> [u8; N]);
}

/// acc = op(acc, src)
pub(crate) struct InPlace<'a> {
    pub(crate) acc: &'a mut [u8],
    pub(crate) src: &'a [u8],
}

impl Arrays for InPlace<'_> {
    #[inline(always)]
    fn each<const N: usize>(self, f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
        for (acc, src) in self.acc.as_chunks_mut::<N>().0.iter_mut().zip(self.src.as_chunks::<N>().0) {
            *acc = f(*acc, *src);
        }
    }
}

/// out = op(a, b)
pub(crate) struct Into<'a> {
    pub(crate) out: &'a mut [u8],
    pub(crate) a: &'a [u8],
    pub(crate) b: &'a [u8],
}

impl Arrays for Into<'_> {
    #[inline(always)]
    fn each<const N: usize>(self, f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
        let operands = self.a.as_chunks::<N>().0.iter().zip(self.b.as_chunks::<N>().0);
        for (out, (a, b)) in self.out.as_chunks_mut::<N>().0.iter_mut().zip(operands) {
            *out = f(*a, *b);
        }
    }
}

/// The loop for `op` and `dtype`; bit operations on floats have been refused before.
#[inline(always)]
fn combine(op: Op, dtype: Dtype, arrays: impl Arrays) {
    match (op, dtype) {
        (Op::BitAnd, _) => arrays.each(|[a], [b]| [a & b]),
        (Op::BitOr, _) => arrays.each(|[a], [b]| [a | b]),
        (Op::BitXor, _) => arrays.each(|[a], [b]| [a ^ b]),
        (_, Dtype::F64) => lanes::<F64, 8, _>(op, arrays),
        (_, Dtype::F32) => lanes::<F32, 4, _>(op, arrays),
        (_, Dtype::BF16) => lanes::<Bf16, 2, _>(op, arrays),
        (_, Dtype::F16) => lanes::<F16, 2, _>(op, arrays),
        // Wrapped sums and products have the same bits, signed or not.
        (Op::Min | Op::Max, Dtype::I8) => extremes::<i8, 1, _>(op, arrays),
        (Op::Min | Op::Max, Dtype::I16) => extremes::<i16, 2, _>(op, arrays),
        (Op::Min | Op::Max, Dtype::I32) => extremes::<i32, 4, _>(op, arrays),
        (Op::Min | Op::Max, Dtype::I64) => extremes::<i64, 8, _>(op, arrays),
        (_, Dtype::U8 | Dtype::I8) => lanes::<u8, 1, _>(op, arrays),
        (_, Dtype::U16 | Dtype::I16) => lanes::<u16, 2, _>(op, arrays),
        (_, Dtype::U32 | Dtype::I32) => lanes::<u32, 4, _>(op, arrays),
        (_, Dtype::U64 | Dtype::I64) => lanes::<u64, 8, _>(op, arrays),
    }
}

#[inline(always)]
fn lanes<T: Lane<N>, const N: usize, A: Arrays>(op: Op, arrays: A) {
    match op {
        Op::Product => arrays.each(|a, b| T::from_bytes(a).product(T::from_bytes(b)).to_bytes()),
        Op::Min | Op::Max => extremes::<T, N, A>(op, arrays),
        _ => arrays.each(|a, b| T::from_bytes(a).sum(T::from_bytes(b)).to_bytes()),
    }
}

#[inline(always)]
fn extremes<T: Lane<N>, const N: usize, A: Arrays>(op: Op, arrays: A) {
    match op {
        Op::Min => arrays.each(|a, b| T::from_bytes(a).min(T::from_bytes(b)).to_bytes()),
        _ => arrays.each(|a, b| T::from_bytes(a).max(T::from_bytes(b)).to_bytes()),
    }
}

/// The loop of [`divide`] for `dtype`.
#[inline(always)]
fn quotients(dtype: Dtype, acc: &mut [u8], by: u32) {
    match dtype {
        Dtype::F64 => quotient::<F64, 8>(acc, by),
        Dtype::F32 => quotient::<F32, 4>(acc, by),
        Dtype::BF16 => quotient::<Bf16, 2>(acc, by),
        Dtype::F16 => quotient::<F16, 2>(acc, by),
        Dtype::U8 => quotient::<u8, 1>(acc, by),
        Dtype::I8 => quotient::<i8, 1>(acc, by),
        Dtype::U16 => quotient::<u16, 2>(acc, by),
        Dtype::I16 => quotient::<i16, 2>(acc, by),
        Dtype::U32 => quotient::<u32, 4>(acc, by),
        Dtype::I32 => quotient::<i32, 4>(acc, by),
        Dtype::U64 => quotient::<u64, 8>(acc, by),
        Dtype::I64 => quotient::<i64, 8>(acc, by),
    }
}

#[inline(always)]
fn quotient<T: Lane<N>, const N: usize>(acc: &mut [u8], by: u32) {
    let elements = acc.as_chunks_mut::<N>().0.iter_mut();
    if by.is_power_of_two() {
        elements.for_each(|element| *element = T::from_bytes(*element).divide_by_power(by).to_bytes());
    } else {
        elements.for_each(|element| *element = T::from_bytes(*element).divide(by).to_bytes());
    }
}
