//! The norm of gradients, in a pass of its own: it has to be known before the first parameter is clipped.

use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::lane::widen_bfloat;
use crate::level::Level;
use crate::step::{Gradients, prefetch};

/// Elements of a partial sum: cut alike for any number of threads, so that the result has the same bits.
const CHUNK: usize = 128 << 10;

/// Of each array the sum of squares, in 64 bits, on at most `threads` threads.
///
/// The squares of 32-bit numbers are exact in 64 bits and their sum cannot overflow. So a sum is finite if and only if
/// all numbers are: NaN and infinity are found on the way. The bits depend neither on `threads` nor on the CPU.
///
/// ```
/// use polder_kernels::{Gradients, squares};
///
/// let overflown = [1.0, f32::INFINITY];
/// assert_eq!(squares(&[Gradients::F32(&[3e30, 4e30]), Gradients::F32(&overflown)], 2)[1], f64::INFINITY);
/// ```
#[must_use]
pub fn squares(gradients: &[Gradients<'_>], threads: usize) -> Vec<f64> {
    squares_at(Level::best(), gradients, threads)
}

pub(crate) fn squares_at(level: Level, gradients: &[Gradients<'_>], threads: usize) -> Vec<f64> {
    let mut chunks = vec![];
    for (array, all) in gradients.iter().enumerate() {
        let mut rest = *all;
        while rest.len() > 0 {
            let (chunk, after) = rest.split_at(CHUNK.min(rest.len()));
            chunks.push((array, chunk));
            rest = after;
        }
    }
    let elements: usize = gradients.iter().map(Gradients::len).sum();
    let threads = threads.clamp(1, elements / (64 << 10) + 1).min(chunks.len().max(1));
    let partial = Mutex::new(vec![0.0; chunks.len()]);
    let left = Mutex::new(chunks.iter().enumerate());
    let rest = || {
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((index, (_, chunk))) = next() {
            let sum = level.square_sum(*chunk);
            partial.lock().unwrap_or_else(PoisonError::into_inner)[index] = sum;
        }
    };
    thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(rest)));
        rest();
    });
    let mut sums = vec![0.0; gradients.len()];
    let partial = partial.into_inner().unwrap_or_else(PoisonError::into_inner);
    chunks.iter().zip(partial).for_each(|((array, _), partial)| sums[*array] += partial);
    sums
}

impl Level {
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
    use super::{Gradients, square_sum};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn square_sum_avx2(gradients: Gradients<'_>) -> f64 {
        square_sum(gradients)
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn square_sum_avx512(gradients: Gradients<'_>) -> f64 {
        square_sum(gradients)
    }
}

/// Elements between two prefetches.
const BLOCK: usize = 64;
/// Sums that go side by side: the chains of additions that a CPU works on at once.
const LANES: usize = 32;

#[inline(always)]
fn square_sum(gradients: Gradients<'_>) -> f64 {
    match gradients {
        Gradients::F32(all) => sum(all, |it| it),
        Gradients::Bf16(all) => sum(all, widen_bfloat),
    }
}

#[inline(always)]
fn sum<T: Copy>(all: &[T], widened: impl Fn(T) -> f32) -> f64 {
    let mut lanes = [0.0; LANES];
    let (blocks, rest) = all.as_chunks::<BLOCK>();
    for block in blocks {
        prefetch(block);
        for part in block.as_chunks::<LANES>().0 {
            for (lane, it) in lanes.iter_mut().zip(part) {
                let wide = f64::from(widened(*it));
                *lane += wide * wide;
            }
        }
    }
    for (index, it) in rest.iter().enumerate() {
        let wide = f64::from(widened(*it));
        lanes[index % LANES] += wide * wide;
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_sum_of_squares_is_near_the_exact_one_and_has_the_same_bits_everywhere(
            numbers in proptest::collection::vec(any::<f32>().prop_filter("finite", |it| it.is_finite()), 0..300),
            repeats in 1_usize..3000,
            threads in 1_usize..5,
        ) {
            let numbers: Vec<f32> = numbers.iter().cycle().take(numbers.len() * repeats).copied().collect();
            let halves: Vec<u16> = numbers.iter().map(|it| half::bf16::from_f32(*it).to_bits()).collect();
            let widened: Vec<f32> = halves.iter().map(|it| half::bf16::from_bits(*it).to_f32()).collect();
            let arrays = [Gradients::F32(&numbers), Gradients::Bf16(&halves), Gradients::F32(&widened)];
            let sums = squares(&arrays, threads);
            let exact: f64 = numbers.iter().map(|it| f64::from(*it).powi(2)).sum();
            prop_assert!((sums[0] - exact).abs() <= exact * numbers.len() as f64 * f64::EPSILON);
            prop_assert_eq!(sums[1].to_bits(), sums[2].to_bits());
            prop_assert_eq!(sums[1].is_finite(), widened.iter().all(|it| it.is_finite()));
            for level in Level::available() {
                let other = squares_at(level, &arrays, 1);
                prop_assert!(other.iter().zip(&sums).all(|(one, other)| one.to_bits() == other.to_bits()), "{:?}", level);
            }
        }

        #[test]
        fn one_number_that_is_not_finite_is_found_anywhere(
            elements in 1_usize..300_000,
            at in any::<prop::sample::Index>(),
            odd in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
        ) {
            let mut halves = vec![half::bf16::MAX.to_bits(); elements];
            prop_assert!(squares(&[Gradients::Bf16(&halves)], 2)[0].is_finite());
            halves[at.index(elements)] = half::bf16::from_f32(odd).to_bits();
            prop_assert!(!squares(&[Gradients::Bf16(&halves)], 2)[0].is_finite());
        }
    }
}
