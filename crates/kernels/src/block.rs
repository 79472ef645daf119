//! Means block by block, where a caller brings each block from memory and back by itself: memory of which there is no slice.

use std::marker::PhantomData;
use std::num::NonZeroU32;

use crate::dtype::Dtype;
use crate::lane::{Bf16, F16, F32, F64, Lane};

/// The bytes of a line, as one piece of an array.
pub type Block = [u8; 64];

/// The mean of some arrays, block by block. Both functions become part of the caller's loop, with its instruction set.
pub trait BlockMean: Copy {
    /// Adds a block to the sum of those of the arrays before.
    fn sum(self, sum: Block, block: Block) -> Block;

    /// Divides the sum.
    fn finish(self, sum: Block) -> Block;
}

/// What is done with a [`BlockMean`], whichever it is.
pub trait MeanVisitor {
    /// What comes of it.
    type Output;

    /// Uses `mean`.
    fn visit(self, mean: impl BlockMean) -> Self::Output;
}

/// Gives `visitor` the mean of `by` arrays of floats: the same bits as [`reduce`](crate::reduce) with
/// [`Op::Sum`](crate::Op::Sum), one array after the other, and then [`divide`](crate::divide). `None` for integers.
pub fn with_mean<V: MeanVisitor>(dtype: Dtype, by: NonZeroU32, visitor: V) -> Option<V::Output> {
    Some(match dtype {
        Dtype::F64 => of_lane::<F64, 8, V>(by.get(), visitor),
        Dtype::F32 => of_lane::<F32, 4, V>(by.get(), visitor),
        Dtype::BF16 => of_lane::<Bf16, 2, V>(by.get(), visitor),
        Dtype::F16 => of_lane::<F16, 2, V>(by.get(), visitor),
        _ => return None,
    })
}

fn of_lane<T: Lane<N>, const N: usize, V: MeanVisitor>(by: u32, visitor: V) -> V::Output {
    let lane = PhantomData::<T>;
    match by.is_power_of_two() {
        true => visitor.visit(Of::<T, N, true> { by, lane }),
        false => visitor.visit(Of::<T, N, false> { by, lane }),
    }
}

/// The mean of `by` arrays of elements `T` of `N` bytes; whether `by` is a power of two.
struct Of<T, const N: usize, const POWER: bool> {
    by: u32,
    lane: PhantomData<T>,
}

impl<T, const N: usize, const POWER: bool> Clone for Of<T, N, POWER> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const N: usize, const POWER: bool> Copy for Of<T, N, POWER> {}

impl<T: Lane<N>, const N: usize, const POWER: bool> BlockMean for Of<T, N, POWER> {
    #[inline(always)]
    fn sum(self, mut sum: Block, block: Block) -> Block {
        for (to, from) in sum.as_chunks_mut::<N>().0.iter_mut().zip(block.as_chunks::<N>().0) {
            *to = T::from_bytes(*to).sum(T::from_bytes(*from)).to_bytes();
        }
        sum
    }

    #[inline(always)]
    fn finish(self, mut sum: Block) -> Block {
        for of in sum.as_chunks_mut::<N>().0 {
            let element = T::from_bytes(*of);
            *of = if POWER { element.divide_by_power(self.by) } else { element.divide(self.by) }.to_bytes();
        }
        sum
    }
}
