//! How fast blocks in the first-level cache are combined: `cargo bench -p polder-kernels`.
//!
//! A block of 8 KiB, because that is what collectives copy out of the pool before they combine it. The figure counts
//! the bytes of one source, in the median of 21 runs.

use std::hint::black_box;
use std::time::Instant;

use polder_kernels::{Dtype, Op, reduce};

const BLOCK: usize = 8 << 10;
const ROUNDS: usize = 20_000;

fn main() {
    println!("{:<6} {:<8} {:>8}", "type", "op", "GB/s");
    for dtype in Dtype::ALL {
        for op in [Op::Sum, Op::Product, Op::Min] {
            println!("{:<6} {:<8} {:>8.1}", dtype.to_string(), op.to_string(), gigabytes_a_second(op, dtype));
        }
    }
}

fn gigabytes_a_second(op: Op, dtype: Dtype) -> f64 {
    let (mut acc, src) = (vec![0_u64; BLOCK / 8], vec![0_u64; BLOCK / 8]);
    let mut runs: Vec<f64> = (0..21)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..ROUNDS {
                reduce(op, dtype, bytes_mut(black_box(&mut acc)), bytes(black_box(&src)))
                    .expect("sizes agree");
            }
            (BLOCK * ROUNDS) as f64 / start.elapsed().as_nanos() as f64
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

fn bytes(words: &[u64]) -> &[u8] {
    // SAFETY: u64 has no padding, and every byte is a valid u8.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

fn bytes_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: as in `bytes`, and every pattern of bytes is a valid u64.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}
