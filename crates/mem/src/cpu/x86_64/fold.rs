//! Folds straight from the region and back to it. What a fold computes is the caller's, and is compiled into the loop.
//!
//! Loads and stores are assembly that survives a fault: the loop
//! ends at the block that failed. A slower loop then goes on from there, and says which byte it was.

use std::arch::asm;
use std::arch::x86_64::{__m128i, __m256i};

use crate::cpu::{access, fault_row};
use crate::{BLOCK, Fold};

// Memory bounds a fold, so registers wider than AVX2's would gain nothing.
macro_rules! fold {
    ($fold:ident, $load:ident, $store:ident $(, $feature:meta)?) => {
        /// Folds whole blocks of `sources` into `into`, past the caches if it streams; a fence of the caller follows then. Returns how
        /// many bytes were done: fewer than all whole blocks when the memory failed.
        ///
        /// # Safety
        /// `into` and all sources are valid for `bytes` bytes in live mappings. If it streams, `into` is aligned to a line. The CPU has
        /// the instructions.
        $(#[$feature])?
        pub(crate) unsafe fn $fold<F: Fold, const STREAMS: bool>(
            into: *mut u8,
            sources: &[*const u8],
            bytes: usize,
            fold: F,
        ) -> usize {
            let Some((&first, others)) = sources.split_first() else { return 0 };
            let mut at = 0;
            while at + BLOCK <= bytes {
                // SAFETY: the block lies in what the caller vouches for.
                let Some(mut sum) = (unsafe { $load(first.add(at)) }) else { break };
                for &other in others {
                    // SAFETY: as above.
                    let Some(block) = (unsafe { $load(other.add(at)) }) else { return at };
                    sum = fold.combine(sum, block);
                }
                // SAFETY: as above; the caller has aligned what is streamed.
                if !unsafe { $store::<STREAMS>(into.add(at), fold.finish(sum)) } {
                    break;
                }
                at += BLOCK;
            }
            at
        }
    };
}

fold!(fold_sse2, load_sse2, store_sse2);
fold!(fold_avx2, load_avx2, store_avx2, target_feature(enable = "avx2"));

/// Stores registers one after the other, 16 or 32 bytes apart, by `$op`; false when the memory failed.
macro_rules! store {
    ($op:literal, $at:ident, $class:ident, $first:ident $(, $part:ident + $offset:literal)+) => {
        access!(
            concat!("2: ", $op, " [{at}], {", stringify!($first), "}")
            $(, concat!($op, " [{at} + ", $offset, "], {", stringify!($part), "}"))+;
            "r11";
            at = in(reg) $at,
            $first = in($class) $first
            $(, $part = in($class) $part)+
        )
    };
}

/// # Safety
/// `at` is valid for a block in a live mapping.
#[inline(always)]
unsafe fn load_sse2(at: *const u8) -> Option<[u8; BLOCK]> {
    let (a, b, c, d): (__m128i, __m128i, __m128i, __m128i);
    // SAFETY: reads the 64 bytes that the caller vouches for; a fault lands behind the loads with r11 = 1. Any bits are a block.
    unsafe {
        access!(
            "2: movups {a}, [{at}]",
            "movups {b}, [{at} + 16]",
            "movups {c}, [{at} + 32]",
            "movups {d}, [{at} + 48]";
            "r11";
            at = in(reg) at,
            a = out(xmm_reg) a,
            b = out(xmm_reg) b,
            c = out(xmm_reg) c,
            d = out(xmm_reg) d
        )
        .then_some(std::mem::transmute::<[__m128i; 4], [u8; BLOCK]>([a, b, c, d]))
    }
}

/// # Safety
/// `at` is valid for a block in a live mapping, and aligned to a line if it is streamed.
#[inline(always)]
unsafe fn store_sse2<const STREAMS: bool>(at: *mut u8, block: [u8; BLOCK]) -> bool {
    // SAFETY: any bits are registers.
    let [a, b, c, d] = unsafe { std::mem::transmute::<[u8; BLOCK], [__m128i; 4]>(block) };
    // SAFETY: writes the 64 bytes that the caller vouches for; a fault lands behind the stores with r11 = 1.
    unsafe {
        match STREAMS {
            true => store!("movntdq", at, xmm_reg, a, b + 16, c + 32, d + 48),
            false => store!("movups", at, xmm_reg, a, b + 16, c + 32, d + 48),
        }
    }
}

/// # Safety
/// As for [`load_sse2`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_avx2(at: *const u8) -> Option<[u8; BLOCK]> {
    let (a, b): (__m256i, __m256i);
    // SAFETY: as in `load_sse2`.
    unsafe {
        access!(
            "2: vmovdqu {a}, [{at}]",
            "vmovdqu {b}, [{at} + 32]";
            "r11";
            at = in(reg) at,
            a = out(ymm_reg) a,
            b = out(ymm_reg) b
        )
        .then_some(std::mem::transmute::<[__m256i; 2], [u8; BLOCK]>([a, b]))
    }
}

/// # Safety
/// As for [`store_sse2`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_avx2<const STREAMS: bool>(at: *mut u8, block: [u8; BLOCK]) -> bool {
    // SAFETY: any bits are registers.
    let [a, b] = unsafe { std::mem::transmute::<[u8; BLOCK], [__m256i; 2]>(block) };
    // SAFETY: as in `store_sse2`.
    unsafe {
        match STREAMS {
            true => store!("vmovntdq", at, ymm_reg, a, b + 32),
            false => store!("vmovdqu", at, ymm_reg, a, b + 32),
        }
    }
}
