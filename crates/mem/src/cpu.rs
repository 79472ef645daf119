//! All that hangs on the CPU: its operations on memory that other hosts may write, in assembly, because the compiler may assume
//! nothing about this memory and because each must survive a fault.
//!
//! Each CPU has a file with the same items:
//!
//! - [`Cpu`] and [`Flush`]: which instructions there are;
//! - `load`, `store`, `load_line`, `store_line`, `store_nt` and `flush`: one word or line, ordered among each other as x86-64 does;
//! - `Copier` and `STREAM`: bulk copies, ordered behind and before words in the same way;
//! - `sfence`, `mfence`, `store_load_fence` and `compiler_fence`;
//! - `fault_rows`, `interrupted` and `land`: how a fault finds its landing.
//!
//! The assembly is volatile and claims all memory, so the compiler keeps program order.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as own;
#[cfg(target_arch = "x86_64")]
use x86_64 as own;

pub(crate) use own::{
    Copier, STREAM, compiler_fence, fault_rows, flush, interrupted, land, load, load_line, mfence, sfence,
    store, store_byte, store_line, store_load_fence, store_nt,
};
pub use own::{Cpu, Flush};

/// Adds a row to the table of faults, inside `asm!` or `naked_asm!`: accesses in `[$start, $end)` land at `$landing`.
macro_rules! fault_row {
    ($start:literal, $end:literal, $landing:literal) => {
        concat!(
            ".pushsection polder_fault, \"aR\", @progbits\n.balign 4\n",
            ".long ",
            $start,
            " - .\n.long ",
            $end,
            " - .\n.long ",
            $landing,
            " - .\n",
            ".popsection"
        )
    };
}
use fault_row;

/// Accesses between the labels 2 and 3; a fault sets the register `$failed`. Gives whether the memory was there.
macro_rules! access {
    ($($code:expr),+; $failed:tt; $($operands:tt)+) => {{
        let failed: u64;
        asm!(
            $($code,)+
            "3:",
            fault_row!("2b", "3b", "3b"),
            $($operands)+,
            inlateout($failed) 0_u64 => failed,
            options(nostack, preserves_flags),
        );
        failed == 0
    }};
}
use access;

/// Flushes each line that holds a byte of `[at, at + bytes)`; returns how far behind `at` the first of them that failed begins.
#[inline(always)]
fn each_line(at: *mut u8, bytes: u64, mut flush: impl FnMut(*mut u8) -> bool) -> Option<u64> {
    if bytes == 0 {
        return None;
    }
    let skip = at.addr() % 64;
    let first = at.wrapping_byte_sub(skip);
    let count = (skip + bytes as usize).div_ceil(64);
    let mut failed = (!flush(first)).then_some(0);
    for index in 1..count {
        if !flush(first.wrapping_byte_add(index * 64)) && failed.is_none() {
            failed = Some((index * 64 - skip) as u64);
        }
    }
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_flushed_line_by_line_up_to_its_last_byte() {
        let base = 0x1000 as *mut u8;
        let flushed = |at: usize, bytes| {
            let mut lines = Vec::new();
            let failed = each_line(base.wrapping_byte_add(at), bytes, |line| {
                lines.push(line.addr() - base.addr());
                true
            });
            assert_eq!(failed, None);
            lines
        };
        assert_eq!(flushed(0, 0), []);
        assert_eq!(flushed(0, 64), [0]);
        assert_eq!(flushed(63, 1), [0]);
        assert_eq!(flushed(63, 2), [0, 64]);
        assert_eq!(flushed(70, 130), [64, 128, 192]);
    }

    type Copy = unsafe fn(&Copier, *mut u8, *const u8, usize) -> usize;

    #[test]
    fn every_alignment_and_length_copies_exactly_its_bytes() {
        let from: Vec<u8> = (0..2048_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let copies: [Copy; 2] = [Copier::copy_in, Copier::copy_out];
        let copiers = Cpu::detect().levels().into_iter().map(Copier::new);
        for (copier, copy) in copiers.flat_map(|copier| copies.map(|copy| (copier, copy))) {
            for length in (0..600).chain([1023, 1024, 1500]) {
                for (to_skip, from_skip) in [(0, 0), (1, 0), (0, 3), (8, 16), (63, 5), (64, 64), (31, 33)] {
                    let mut to = vec![0xaa; 2048];
                    let (dst, src) = (to[to_skip..].as_mut_ptr(), from[from_skip..].as_ptr());
                    // SAFETY: both ranges lie in live vectors: skips are at most 64, lengths at most 1500.
                    let left = unsafe { copy(&copier, dst, src, length) };
                    let end = to_skip + length;
                    assert_eq!(left, 0);
                    assert_eq!(to[to_skip..end], from[from_skip..from_skip + length]);
                    assert!(to[..to_skip].iter().all(|byte| *byte == 0xaa), "before {to_skip} {length}");
                    assert!(to[end..].iter().all(|byte| *byte == 0xaa), "after {to_skip} {length}");
                }
            }
        }
    }

    #[test]
    fn a_copy_past_the_caches_fills_its_last_word_with_zeros() {
        let from: Vec<u8> = (1..=255).cycle().take(2048).collect();
        for copier in Cpu::detect().levels().into_iter().map(Copier::new) {
            for length in (0..600_usize).chain([1023, 1024, 1500]) {
                for skip in [0, 1, 5, 7] {
                    let mut to = vec![0xaaaa_aaaa_aaaa_aaaa_u64; 256];
                    let end = length.next_multiple_of(8);
                    // SAFETY: `to` is aligned to 8 and has 2048 bytes, of which 8 + at most 1504 are written.
                    let left = unsafe {
                        copier.copy_nt(to.as_mut_ptr().add(skip).cast(), &from[skip..skip + length])
                    };
                    sfence();
                    let bytes: Vec<u8> = to.iter().flat_map(|word| word.to_le_bytes()).collect();
                    let got = &bytes[skip * 8..];
                    assert_eq!(left, 0);
                    assert_eq!(got[..length], from[skip..skip + length]);
                    assert!(got[length..end].iter().all(|byte| *byte == 0));
                    assert!(got[end..].iter().all(|byte| *byte == 0xaa));
                }
            }
        }
    }
}
