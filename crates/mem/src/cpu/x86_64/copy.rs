//! Copies that survive a fault and say how far they came.
//!
//! Each routine moves blocks of four registers and keeps its progress in registers. A fault in a block lands in a
//! loop of single bytes (or words, past the caches), which goes on from the last whole block until the very byte
//! that fails. Registers move 8 aligned bytes at once, so words tear no smaller than memory itself tears.

use std::arch::naked_asm;

use super::fold::{fold_avx2, fold_sse2};
use super::{Cpu, store_nt};
use crate::Fold;
use crate::cpu::fault_row;

/// Copies `len` bytes from `src` to `dst` and returns how many were left when the memory failed.
type Routine = unsafe extern "sysv64" fn(dst: *mut u8, src: *const u8, len: usize) -> usize;

/// From here on the wide registers pay.
const BULK: usize = 256;

/// The copy routines for one CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copier {
    bulk: Routine,
    streams: Routine,
    avx2: bool,
}

impl Copier {
    pub(crate) fn new(cpu: Cpu) -> Self {
        let (bulk, streams): (Routine, Routine) = match cpu {
            Cpu { avx512: true, .. } => (copy_avx512, stream_avx512),
            Cpu { avx2: true, .. } => (copy_avx2, stream_avx2),
            _ => (copy_sse2, stream_sse2),
        };
        Self { bulk, streams, avx2: cpu.avx2 }
    }

    /// Copies into a region with ordinary loads and stores; returns the bytes that were left when the memory failed.
    ///
    /// # Safety
    /// `src` and `dst` are valid for `len` bytes, `dst` in a live mapping and `src` private to the caller, so that they do not
    /// overlap.
    #[inline(always)]
    pub(crate) unsafe fn copy_in(&self, dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller vouches for both ranges; `copy_sse2` needs 64 bytes, the others 256.
        unsafe {
            match len {
                0..=128 => copy_small(dst, src, len),
                129..BULK => copy_sse2(dst, src, len),
                _ => (self.bulk)(dst, src, len),
            }
        }
    }

    /// Copies out of a region: the same, because a register moves 8 aligned bytes at once on either side.
    ///
    /// # Safety
    /// As for [`Copier::copy_in`], with `src` in the mapping.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(&self, dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe { self.copy_in(dst, src, len) }
    }

    /// Folds whole blocks; returns the bytes that were done: fewer than all when the memory failed.
    ///
    /// # Safety
    /// That of [`fold_sse2`], but for the CPU.
    #[inline(always)]
    pub(crate) unsafe fn fold<F: Fold>(
        &self,
        into: *mut u8,
        sources: &[*const u8],
        bytes: usize,
        streams: bool,
        fold: F,
    ) -> usize {
        // SAFETY: the caller's promise; `new` was told what the CPU has.
        unsafe {
            match (self.avx2, streams) {
                (true, false) => fold_avx2::<F, false>(into, sources, bytes, fold),
                (true, true) => fold_avx2::<F, true>(into, sources, bytes, fold),
                (false, false) => fold_sse2::<F, false>(into, sources, bytes, fold),
                (false, true) => fold_sse2::<F, true>(into, sources, bytes, fold),
            }
        }
    }

    /// Copies past the caches and fills the last word up with zeros; returns the bytes that were left when the
    /// memory failed.
    ///
    /// # Safety
    /// As for [`Copier::copy_in`]; `dst` is aligned to 8 and writable up to the next multiple of 8.
    #[inline(always)]
    pub(crate) unsafe fn copy_nt(&self, dst: *mut u8, src: &[u8]) -> usize {
        let (words, rest) = src.split_at(src.len() & !7);
        // SAFETY: the caller vouches for `dst`; `words` is a live slice of whole words.
        let left = unsafe { (self.streams)(dst, words.as_ptr(), words.len()) };
        if left > 0 || rest.is_empty() {
            return left + if left > 0 { rest.len() } else { 0 };
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        // SAFETY: the caller vouches for `dst` up to the next multiple of 8, which is where this word ends.
        let good = unsafe { store_nt(dst.add(words.len()).cast(), u64::from_le_bytes(last)) };
        if good { 0 } else { rest.len() }
    }
}

/// Up to 128 bytes: the first and the last registers overlap in the middle.
///
/// # Safety
/// As for [`Copier::copy_in`], and `len` is at most 128.
#[unsafe(naked)]
unsafe extern "sysv64" fn copy_small(dst: *mut u8, src: *const u8, len: usize) -> usize {
    naked_asm!(
        "xor eax, eax",
        "20: cmp rdx, 16",
        "jb 24f",
        "cmp rdx, 32",
        "ja 22f",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + rdx - 16]",
        "movups [rdi], xmm0",
        "movups [rdi + rdx - 16], xmm1",
        "ret",
        "22: movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + rdx - 32]",
        "movups xmm3, [rsi + rdx - 16]",
        "cmp rdx, 64",
        "ja 23f",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "ret",
        "23: movups xmm4, [rsi + 32]",
        "movups xmm5, [rsi + 48]",
        "movups xmm6, [rsi + rdx - 64]",
        "movups xmm7, [rsi + rdx - 48]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + 32], xmm4",
        "movups [rdi + 48], xmm5",
        "movups [rdi + rdx - 64], xmm6",
        "movups [rdi + rdx - 48], xmm7",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "ret",
        "24: cmp edx, 8",
        "jb 25f",
        "mov rcx, [rsi]",
        "mov r8, [rsi + rdx - 8]",
        "mov [rdi], rcx",
        "mov [rdi + rdx - 8], r8",
        "ret",
        "25: cmp edx, 4",
        "jb 26f",
        "mov ecx, [rsi]",
        "mov r8d, [rsi + rdx - 4]",
        "mov [rdi], ecx",
        "mov [rdi + rdx - 4], r8d",
        "ret",
        "26: test edx, edx",
        "jz 28f",
        "27: movzx ecx, byte ptr [rsi]",
        "mov byte ptr [rdi], cl",
        "30: inc rsi",
        "inc rdi",
        "dec rdx",
        "jnz 27b",
        "28: mov rax, rdx",
        "ret",
        fault_row!("20b", "27b", "27b"),
        fault_row!("27b", "30b", "28b"),
    )
}

macro_rules! vector_copy {
    ($copy:ident, $stream:ident, $width:literal, $move:literal, $store_nt:literal, $r:literal, $leave:literal) => {
        /// Ordinary loads and stores, stores aligned after the first block.
        ///
        /// # Safety
        /// As for [`Copier::copy_in`]; the CPU has the registers, and `len` is at least four of them.
        #[unsafe(naked)]
        unsafe extern "sysv64" fn $copy(dst: *mut u8, src: *const u8, len: usize) -> usize {
            naked_asm!(
                concat!("20: ", $move, " ", $r, "0, [rsi]"),
                concat!($move, " ", $r, "1, [rsi + {w}]"),
                concat!($move, " ", $r, "2, [rsi + {w2}]"),
                concat!($move, " ", $r, "3, [rsi + {w3}]"),
                concat!($move, " [rdi], ", $r, "0"),
                concat!($move, " [rdi + {w}], ", $r, "1"),
                concat!($move, " [rdi + {w2}], ", $r, "2"),
                concat!($move, " [rdi + {w3}], ", $r, "3"),
                "21: mov rax, rdi",
                "and eax, 63",
                "neg rax",
                "add rax, {block}",
                "add rdi, rax",
                "add rsi, rax",
                "sub rdx, rax",
                "cmp rdx, {block}",
                "jb 23f",
                ".p2align 5",
                concat!("22: ", $move, " ", $r, "0, [rsi]"),
                concat!($move, " ", $r, "1, [rsi + {w}]"),
                concat!($move, " ", $r, "2, [rsi + {w2}]"),
                concat!($move, " ", $r, "3, [rsi + {w3}]"),
                concat!($move, " [rdi], ", $r, "0"),
                concat!($move, " [rdi + {w}], ", $r, "1"),
                concat!($move, " [rdi + {w2}], ", $r, "2"),
                concat!($move, " [rdi + {w3}], ", $r, "3"),
                "add rdi, {block}",
                "add rsi, {block}",
                "sub rdx, {block}",
                "cmp rdx, {block}",
                "jae 22b",
                "23: test rdx, rdx",
                "jz 28f",
                concat!("24: ", $move, " ", $r, "0, [rsi + rdx - {block}]"),
                concat!($move, " ", $r, "1, [rsi + rdx - {w3}]"),
                concat!($move, " ", $r, "2, [rsi + rdx - {w2}]"),
                concat!($move, " ", $r, "3, [rsi + rdx - {w}]"),
                concat!($move, " [rdi + rdx - {block}], ", $r, "0"),
                concat!($move, " [rdi + rdx - {w3}], ", $r, "1"),
                concat!($move, " [rdi + rdx - {w2}], ", $r, "2"),
                concat!($move, " [rdi + rdx - {w}], ", $r, "3"),
                "25: xor edx, edx",
                "28:",
                $leave,
                "mov rax, rdx",
                "ret",
                "27: movzx ecx, byte ptr [rsi]",
                "mov byte ptr [rdi], cl",
                "30: inc rsi",
                "inc rdi",
                "dec rdx",
                "jnz 27b",
                "jmp 28b",
                fault_row!("20b", "21b", "27b"),
                fault_row!("22b", "23b", "27b"),
                fault_row!("24b", "25b", "27b"),
                fault_row!("27b", "30b", "28b"),
                w = const $width,
                w2 = const 2 * $width,
                w3 = const 3 * $width,
                block = const 4 * $width,
            )
        }

        /// Non-temporal stores: words up to the first line and after the last block, whole registers between.
        ///
        /// # Safety
        /// As for [`Copier::copy_in`]; the CPU has the registers, `dst` and `len` are multiples of 8.
        #[unsafe(naked)]
        unsafe extern "sysv64" fn $stream(dst: *mut u8, src: *const u8, len: usize) -> usize {
            naked_asm!(
                "jmp 21f",
                "20: mov rax, [rsi]",
                "movnti [rdi], rax",
                "31: add rsi, 8",
                "add rdi, 8",
                "sub rdx, 8",
                "21: test rdx, rdx",
                "jz 28f",
                "test dil, 63",
                "jnz 20b",
                "cmp rdx, {block}",
                "jb 27f",
                ".p2align 5",
                concat!("22: ", $move, " ", $r, "0, [rsi]"),
                concat!($move, " ", $r, "1, [rsi + {w}]"),
                concat!($move, " ", $r, "2, [rsi + {w2}]"),
                concat!($move, " ", $r, "3, [rsi + {w3}]"),
                concat!($store_nt, " [rdi], ", $r, "0"),
                concat!($store_nt, " [rdi + {w}], ", $r, "1"),
                concat!($store_nt, " [rdi + {w2}], ", $r, "2"),
                concat!($store_nt, " [rdi + {w3}], ", $r, "3"),
                "23: add rdi, {block}",
                "add rsi, {block}",
                "sub rdx, {block}",
                "cmp rdx, {block}",
                "jae 22b",
                "jmp 26f",
                "27: mov rax, [rsi]",
                "movnti [rdi], rax",
                "30: add rsi, 8",
                "add rdi, 8",
                "sub rdx, 8",
                "26: test rdx, rdx",
                "jnz 27b",
                "28:",
                $leave,
                "mov rax, rdx",
                "ret",
                fault_row!("20b", "31b", "28b"),
                fault_row!("22b", "23b", "27b"),
                fault_row!("27b", "30b", "28b"),
                w = const $width,
                w2 = const 2 * $width,
                w3 = const 3 * $width,
                block = const 4 * $width,
            )
        }
    };
}

vector_copy!(copy_sse2, stream_sse2, 16, "movups", "movntdq", "xmm", "");
vector_copy!(copy_avx2, stream_avx2, 32, "vmovdqu", "vmovntdq", "ymm", "vzeroupper");
vector_copy!(copy_avx512, stream_avx512, 64, "vmovdqu64", "vmovntdq", "zmm", "vzeroupper");
