//! x86-64: the compiler keeps program order, and the CPU does the rest.

mod copy;
mod fold;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};

use libc::ucontext_t;

use super::{access, each_line, fault_row};
pub(crate) use copy::Copier;

/// From this size on, a coherent bulk copy goes past the caches; below it, the reader finds the bytes in one. Whether the
/// reader's core shares a cache with the writer's changes while a virtual machine runs. Seen between two of its cores,
/// there and back in us, through the caches in the best and in the worst times, and past them in all: 1 KiB 0.1, 0.5 and
/// 0.5; 4 KiB 0.4, 2.1 and 1.0; 16 KiB 2.5, 8.7 and 2.5; 64 KiB 10, 34 and 8; 16 MiB 1,300, 8,000 and 1,650.
pub(crate) const STREAM: usize = 4 << 10;

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

impl Flush {
    /// Each of them.
    pub const ALL: [Self; 3] = [Self::Clflush, Self::Clflushopt, Self::Clwb];

    /// As an assembler calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clflush => "clflush",
            Self::Clflushopt => "clflushopt",
            Self::Clwb => "clwb",
        }
    }
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

    /// This CPU, with `flush` as the best instruction to write a line back; `None` if it lacks that.
    #[must_use]
    pub fn with(self, flush: Flush) -> Option<Self> {
        let clflushopt = flush == Flush::Clflushopt || flush == Flush::Clwb && self.clflushopt;
        let cpu = Self { clflushopt, clwb: flush == Flush::Clwb, ..self };
        cpu.within(self).then_some(cpu)
    }

    /// It, and each lesser one that has copies of its own: for tests.
    #[must_use]
    pub fn levels(self) -> Vec<Self> {
        vec![Self::baseline(), Self { avx512: false, ..self }, self]
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
    let value: u64;
    // SAFETY: reads the 8 bytes that the caller vouches for; a fault lands behind the load with r11 = 1.
    let good = unsafe {
        access!("2: mov {value}, qword ptr [{at}]"; "r11"; at = in(reg) at, value = lateout(reg) value)
    };
    good.then_some(value)
}

/// Stores a word; false when the memory failed and the store was skipped.
///
/// # Safety
/// `at` is aligned to 8 and lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store(at: *mut u64, value: u64) -> bool {
    // SAFETY: writes the 8 bytes that the caller vouches for; a fault lands behind the store with r11 = 1.
    unsafe { access!("2: mov qword ptr [{at}], {value}"; "r11"; at = in(reg) at, value = in(reg) value) }
}

/// Stores a byte; false when the memory failed and the store was skipped.
///
/// # Safety
/// `at` lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store_byte(at: *mut u8, value: u8) -> bool {
    // SAFETY: writes the byte that the caller vouches for; a fault lands behind the store with r11 = 1.
    unsafe { access!("2: mov byte ptr [{at}], {value}"; "r11"; at = in(reg) at, value = in(reg_byte) value) }
}

/// Loads the words of a line, the first one first; `None` when the memory failed.
///
/// # Safety
/// `at` is aligned to 64 and lies in a live mapping.
#[inline(always)]
pub(crate) unsafe fn load_line(at: *const u64) -> Option<[u64; 8]> {
    let (a, b, c, d, e, f, g, h): (u64, u64, u64, u64, u64, u64, u64, u64);
    // SAFETY: reads the 64 bytes that the caller vouches for; a fault lands behind the loads with r11 = 1.
    let good = unsafe {
        access!(
            "2: mov {a}, qword ptr [{at}]",
            "mov {b}, qword ptr [{at} + 8]",
            "mov {c}, qword ptr [{at} + 16]",
            "mov {d}, qword ptr [{at} + 24]",
            "mov {e}, qword ptr [{at} + 32]",
            "mov {f}, qword ptr [{at} + 40]",
            "mov {g}, qword ptr [{at} + 48]",
            "mov {h}, qword ptr [{at} + 56]";
            "r11";
            at = in(reg) at,
            a = out(reg) a,
            b = out(reg) b,
            c = out(reg) c,
            d = out(reg) d,
            e = out(reg) e,
            f = out(reg) f,
            g = out(reg) g,
            h = out(reg) h
        )
    };
    good.then_some([a, b, c, d, e, f, g, h])
}

/// Stores the words of a line, the first one last; false when the memory failed and the rest was skipped.
///
/// # Safety
/// `at` is aligned to 64 and lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store_line(at: *mut u64, words: &[u64; 8]) -> bool {
    let [a, b, c, d, e, f, g, h] = *words;
    // SAFETY: writes the 64 bytes that the caller vouches for; a fault lands behind the stores with r11 = 1.
    unsafe {
        access!(
            "2: mov qword ptr [{at} + 8], {b}",
            "mov qword ptr [{at} + 16], {c}",
            "mov qword ptr [{at} + 24], {d}",
            "mov qword ptr [{at} + 32], {e}",
            "mov qword ptr [{at} + 40], {f}",
            "mov qword ptr [{at} + 48], {g}",
            "mov qword ptr [{at} + 56], {h}",
            "mov qword ptr [{at}], {a}";
            "r11";
            at = in(reg) at,
            a = in(reg) a,
            b = in(reg) b,
            c = in(reg) c,
            d = in(reg) d,
            e = in(reg) e,
            f = in(reg) f,
            g = in(reg) g,
            h = in(reg) h
        )
    }
}

/// Stores a word past the caches; false when the memory failed and the store was skipped.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub(crate) unsafe fn store_nt(at: *mut u64, value: u64) -> bool {
    // SAFETY: as in `store`.
    unsafe { access!("2: movnti qword ptr [{at}], {value}"; "r11"; at = in(reg) at, value = in(reg) value) }
}

macro_rules! flush_line {
    ($name:ident, $instruction:literal) => {
        /// Flushes one line; false when the memory failed.
        ///
        /// # Safety
        /// `at` lies in a live mapping, and the CPU has the instruction.
        #[inline(always)]
        unsafe fn $name(at: *mut u8) -> bool {
            // SAFETY: a flush changes no byte that a program sees; a fault lands behind it with r11 = 1.
            unsafe { access!(concat!("2: ", $instruction, " byte ptr [{at}]"); "r11"; at = in(reg) at) }
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

/// The ends of the table of faults, which the linker defines.
pub(crate) fn fault_rows() -> (usize, usize) {
    let (start, stop): (usize, usize);
    // SAFETY: takes two addresses, and touches no memory.
    unsafe {
        asm!(
            ".hidden __start_polder_fault",
            ".hidden __stop_polder_fault",
            "lea {start}, [rip + __start_polder_fault]",
            "lea {stop}, [rip + __stop_polder_fault]",
            start = lateout(reg) start,
            stop = lateout(reg) stop,
            options(nomem, nostack, preserves_flags, pure),
        );
    }
    (start, stop)
}

/// Where a thread was interrupted.
pub(crate) const fn interrupted(context: &ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize
}

/// Has a thread that was interrupted go on at `landing`, and know that its access failed.
pub(crate) const fn land(context: &mut ucontext_t, landing: usize) {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = landing as i64;
    context.uc_mcontext.gregs[libc::REG_R11 as usize] = 1;
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
}
