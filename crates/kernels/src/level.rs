//! Instruction sets: the same loops compiled once for each, one of them picked at run time.

use crate::dtype::{Dtype, Op};
use crate::norm::square_sum;
use crate::optimizer::{Factor, Update};
use crate::reduce::{Arrays, combine, quotients};
use crate::step::{Gradients, Piece, pass};
use std::num::NonZeroU32;

/// What the loops may be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every CPU of the target has.
    Portable,
    /// AVX2, with fused multiply-adds.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The levels that this CPU has, the best one last.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        let avx2 = !cfg!(miri) && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        [(Self::Portable, true), (Self::Avx2, avx2), (Self::Avx512, avx512)]
            .into_iter()
            .filter_map(|(level, here)| here.then_some(level))
    }

    /// The levels that this CPU has, the best one last.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        [Self::Portable].into_iter()
    }

    /// The best level of this CPU.
    pub(crate) fn best() -> Self {
        Self::available().next_back().unwrap_or(Self::Portable)
    }

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

    /// Applies one step of an optimizer. The level must be one of [`Level::available`].
    pub(crate) fn step(self, update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
        match self {
            Self::Portable => pass(update, factor, piece, is_streamed),
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::step_avx2(update, factor, piece, is_streamed) },
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::step_avx512(update, factor, piece, is_streamed) },
        }
    }

    /// The sum of squares. The level must be one of [`Level::available`].
    pub(crate) fn square_sum(self, gradients: Gradients<'_>) -> f64 {
        match self {
            Self::Portable => square_sum(gradients),
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::square_sum_avx2(gradients) },
            // SAFETY: `available` has found these features in this CPU.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::square_sum_avx512(gradients) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Arrays, Dtype, Factor, Gradients, Op, Piece, Update, combine, pass, quotients, square_sum};

    // Generic code is inlined into these functions, and only there are its loops compiled with their features.

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

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn step_avx2(update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
        pass(update, factor, piece, is_streamed);
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn step_avx512(update: &Update, factor: Factor, piece: Piece<'_>, is_streamed: bool) {
        pass(update, factor, piece, is_streamed);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn square_sum_avx2(gradients: Gradients<'_>) -> f64 {
        square_sum(gradients)
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn square_sum_avx512(gradients: Gradients<'_>) -> f64 {
        square_sum(gradients)
    }
}
