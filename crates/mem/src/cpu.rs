//! The CPU's own operations on memory that other hosts may write: one word or one line each, in assembly, because
//! the compiler may assume nothing about this memory and because each must survive a fault.
//!
//! The assembly is volatile and claims all memory, so the compiler keeps program order; x86-64 does the rest.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};

use crate::fault::fault_row;

/// Which of the optional instructions this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Flushes of different lines that overtake one another.
    pub clflushopt: bool,
    /// Write-backs that leave the line cached.
    pub clwb: bool,
    /// 32-byte registers.
    pub avx2: bool,
    /// 64-byte registers.
    pub avx512: bool,
}

/// The instruction that writes a line back or drops it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Writes back and drops, one line after another: on every x86-64.
    Clflush,
    /// Writes back and drops.
    Clflushopt,
    /// Writes back.
    Clwb,
}

impl Cpu {
    /// What CPUID says of this CPU.
    #[must_use]
    pub fn detect() -> Self {
        let leaf7 = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
        Self {
            clflushopt: leaf7 & 1 << 23 != 0,
            clwb: leaf7 & 1 << 24 != 0,
            avx2: std::is_x86_feature_detected!("avx2"),
            avx512: std::is_x86_feature_detected!("avx512f"),
        }
    }

    /// The least that any x86-64 has.
    #[must_use]
    pub const fn baseline() -> Self {
        Self { clflushopt: false, clwb: false, avx2: false, avx512: false }
    }

    /// Whether `other` has all that this one has.
    #[must_use]
    pub const fn within(self, other: Self) -> bool {
        (other.clflushopt || !self.clflushopt)
            && (other.clwb || !self.clwb)
            && (other.avx2 || !self.avx2)
            && (other.avx512 || !self.avx512)
    }

    /// Whether `flush` is there.
    #[must_use]
    pub const fn has(self, flush: Flush) -> bool {
        match flush {
            Flush::Clflush => true,
            Flush::Clflushopt => self.clflushopt,
            Flush::Clwb => self.clwb,
        }
    }

    /// The best instruction to write a line back.
    #[must_use]
    pub const fn write_back(self) -> Flush {
        if self.clwb { Flush::Clwb } else { self.invalidate() }
    }

    /// The best instruction to drop a line.
    #[must_use]
    pub const fn invalidate(self) -> Flush {
        if self.clflushopt { Flush::Clflushopt } else { Flush::Clflush }
    }
}

/// Loads a word; `None` when the memory failed.
///
/// # Safety
/// `at` is aligned to 8 and lies in a live mapping.
#[inline(always)]
pub(crate) unsafe fn load(at: *const u64) -> Option<u64> {
    let (value, failed): (u64, u64);
    // SAFETY: reads the 8 bytes that the caller vouches for; a fault lands behind the load with r11 = 1.
    unsafe {
        asm!(
            "2: mov {value}, qword ptr [{at}]",
            "3:",
            fault_row!("2b", "3b", "3b"),
            at = in(reg) at,
            value = lateout(reg) value,
            inlateout("r11") 0_u64 => failed,
            options(nostack, preserves_flags),
        );
    }
    (failed == 0).then_some(value)
}

/// Stores a word; false when the memory failed and the store was skipped.
///
/// # Safety
/// `at` is aligned to 8 and lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store(at: *mut u64, value: u64) -> bool {
    let failed: u64;
    // SAFETY: writes the 8 bytes that the caller vouches for; a fault lands behind the store with r11 = 1.
    unsafe {
        asm!(
            "2: mov qword ptr [{at}], {value}",
            "3:",
            fault_row!("2b", "3b", "3b"),
            at = in(reg) at,
            value = in(reg) value,
            inlateout("r11") 0_u64 => failed,
            options(nostack, preserves_flags),
        );
    }
    failed == 0
}

/// Loads the words of a line, the first one first; `None` when the memory failed.
///
/// # Safety
/// `at` is aligned to 64 and lies in a live mapping.
#[inline(always)]
pub(crate) unsafe fn load_line(at: *const u64) -> Option<[u64; 8]> {
    let failed: u64;
    let (a, b, c, d, e, f, g, h): (u64, u64, u64, u64, u64, u64, u64, u64);
    // SAFETY: reads the 64 bytes that the caller vouches for; a fault lands behind the loads with r11 = 1.
    unsafe {
        asm!(
            "2: mov {a}, qword ptr [{at}]",
            "mov {b}, qword ptr [{at} + 8]",
            "mov {c}, qword ptr [{at} + 16]",
            "mov {d}, qword ptr [{at} + 24]",
            "mov {e}, qword ptr [{at} + 32]",
            "mov {f}, qword ptr [{at} + 40]",
            "mov {g}, qword ptr [{at} + 48]",
            "mov {h}, qword ptr [{at} + 56]",
            "3:",
            fault_row!("2b", "3b", "3b"),
            at = in(reg) at,
            a = out(reg) a,
            b = out(reg) b,
            c = out(reg) c,
            d = out(reg) d,
            e = out(reg) e,
            f = out(reg) f,
            g = out(reg) g,
            h = out(reg) h,
            inlateout("r11") 0_u64 => failed,
            options(nostack, preserves_flags),
        );
    }
    (failed == 0).then_some([a, b, c, d, e, f, g, h])
}

/// Stores the words of a line, the first one last; false when the memory failed and the rest was skipped.
///
/// # Safety
/// `at` is aligned to 64 and lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store_line(at: *mut u64, words: &[u64; 8]) -> bool {
    let failed: u64;
    let [a, b, c, d, e, f, g, h] = *words;
    // SAFETY: writes the 64 bytes that the caller vouches for; a fault lands behind the stores with r11 = 1.
    unsafe {
        asm!(
            "2: mov qword ptr [{at} + 8], {b}",
            "mov qword ptr [{at} + 16], {c}",
            "mov qword ptr [{at} + 24], {d}",
            "mov qword ptr [{at} + 32], {e}",
            "mov qword ptr [{at} + 40], {f}",
            "mov qword ptr [{at} + 48], {g}",
            "mov qword ptr [{at} + 56], {h}",
            "mov qword ptr [{at}], {a}",
            "3:",
            fault_row!("2b", "3b", "3b"),
            at = in(reg) at,
            a = in(reg) a,
            b = in(reg) b,
            c = in(reg) c,
            d = in(reg) d,
            e = in(reg) e,
            f = in(reg) f,
            g = in(reg) g,
            h = in(reg) h,
            inlateout("r11") 0_u64 => failed,
            options(nostack, preserves_flags),
        );
    }
    failed == 0
}

/// Stores a word past the caches; false when the memory failed and the store was skipped.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub(crate) unsafe fn store_nt(at: *mut u64, value: u64) -> bool {
    let failed: u64;
    // SAFETY: as in `store`.
    unsafe {
        asm!(
            "2: movnti qword ptr [{at}], {value}",
            "3:",
            fault_row!("2b", "3b", "3b"),
            at = in(reg) at,
            value = in(reg) value,
            inlateout("r11") 0_u64 => failed,
            options(nostack, preserves_flags),
        );
    }
    failed == 0
}

macro_rules! flush_line {
    ($name:ident, $instruction:literal) => {
        /// Flushes one line; false when the memory failed.
        ///
        /// # Safety
        /// `at` lies in a live mapping, and the CPU has the instruction.
        #[inline(always)]
        unsafe fn $name(at: *mut u8) -> bool {
            let failed: u64;
            // SAFETY: a flush changes no byte that a program sees; a fault lands behind it with r11 = 1.
            unsafe {
                asm!(
                    concat!("2: ", $instruction, " byte ptr [{at}]"),
                    "3:",
                    fault_row!("2b", "3b", "3b"),
                    at = in(reg) at,
                    inlateout("r11") 0_u64 => failed,
                    options(nostack, preserves_flags),
                );
            }
            failed == 0
        }
    };
}

flush_line!(clflush, "clflush");
flush_line!(clflushopt, "clflushopt");
flush_line!(clwb, "clwb");

/// Flushes every line that holds a byte of `[at, at + bytes)`; returns how far behind `at` the first of them that
/// failed begins.
///
/// # Safety
/// The range lies in a live mapping, and the CPU has the instruction.
#[inline(always)]
pub(crate) unsafe fn flush(how: Flush, at: *mut u8, bytes: u64) -> Option<u64> {
    // The instruction is chosen once a call, not once a line.
    // SAFETY: the caller vouches for the range and the instruction.
    unsafe {
        match how {
            Flush::Clwb => each_line(at, bytes, |line| clwb(line)),
            Flush::Clflushopt => each_line(at, bytes, |line| clflushopt(line)),
            Flush::Clflush => each_line(at, bytes, |line| clflush(line)),
        }
    }
}

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

/// Later stores and flushes wait for earlier stores and flushes.
#[inline(always)]
pub(crate) fn sfence() {
    // SAFETY: a fence has no operand.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) };
}

/// Everything later waits for everything earlier, flushes and non-temporal stores included.
#[inline(always)]
pub(crate) fn mfence() {
    // SAFETY: a fence has no operand.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) };
}

/// Later loads wait for earlier ordinary stores. Faster than `mfence`, which flushes and non-temporal stores need.
#[inline(always)]
pub(crate) fn store_load_fence() {
    // SAFETY: adds 0 to a word of this thread's own stack (below the stack pointer lies the red zone, whose bytes
    // keep their values).
    unsafe { asm!("lock or dword ptr [rsp - 8], 0", options(nostack)) };
}

/// The compiler keeps what stands before and after in order.
#[inline(always)]
pub(crate) fn compiler_fence() {
    // SAFETY: an empty statement.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_without_clflushopt_flushes_with_clflush() {
        assert_eq!(Cpu::baseline().write_back(), Flush::Clflush);
        assert_eq!(Cpu::baseline().invalidate(), Flush::Clflush);
    }

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
}
