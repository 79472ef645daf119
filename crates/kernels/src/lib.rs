//! Arithmetic on arrays with SIMD: the reductions of collectives, and the step of an optimizer.
//!
//! Arrays are plain bytes of any alignment, little-endian, so that callers need no typed slices:
//!
//! ```
//! use polder_kernels::{Dtype, Op, reduce};
//!
//! let mut acc = [1.5_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat();
//! let src = [0.5_f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat();
//! reduce(Op::Max, Dtype::F32, &mut acc, &src).unwrap();
//! assert_eq!(acc[..4], 1.5_f32.to_le_bytes());
//! assert!(f32::from_le_bytes(acc[4..].try_into().unwrap()).is_nan());
//! ```
//!
//! # What an element becomes
//! The result is a function of the two values alone: the same bits on every CPU, at every place in the array, with
//! any instruction set.
//! - Integers wrap around, as torch's do.
//! - f32 and f64 follow IEEE 754, rounding to nearest even. bf16 and f16 are widened to f32, combined there and
//!   rounded back once, to nearest even.
//! - A NaN among the operands gives a NaN, for `Min` and `Max` too, as in torch; it is always the positive quiet NaN
//!   with no payload, whichever NaN came in. (x86 would keep the first operand's payload, and a compiler may swap
//!   operands.)
//! - `Min` orders -0.0 below 0.0, and so does `Max`.
//! - Bit operations take integers only. A bool is a `U8` of 0 or 1: use `Min`, `Max`, `BitAnd` or `BitOr` on it.
//! - `Average` sums like `Sum`; the last step of the reduction is [`divide`] by the number of operands. Division, not
//!   a product with the inverse, so that the result is the one of torch's `tensor.div_(n)`; integers truncate toward 0.
//!
//! The CPU's bf16 instructions are not used: they flush denormals, so their bits would differ; f16 is converted in
//! integer arithmetic, which vectorises on every CPU. With the CPU set to flush
//! denormals (`torch.set_flush_denormal`) the sums differ, as all arithmetic of that thread does.

mod block;
mod dtype;
mod lane;
mod level;
mod norm;
mod optimizer;
mod reduce;
mod step;
#[cfg(test)]
mod tests;

pub use block::{Block, BlockMean, MeanVisitor, with_mean};
pub use dtype::{Dtype, KernelError, Op};
pub use norm::squares;
pub use optimizer::{Adam, Factor, Lion, Sgd, Update, clip};
pub use reduce::{divide, reduce, reduce_into};
pub use step::{Gradients, PIECE, Piece, Work, step};
