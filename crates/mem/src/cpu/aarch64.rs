//! aarch64, whose memory is ordered more weakly: a word is loaded with acquire and stored with release, and a barrier stands before
//! and behind each copy, so that all are seen in program order as on x86-64. Flushes are complete behind a `dsb` of the whole system.
//!
//! No instruction of programs stores past the caches. A store goes into the cache here, and its line is written back: with the words
//! beside it, so what needs [`crate::Memory::store_nt`] to leave those alone does not work on memory that the program keeps coherent.

use std::arch::{asm, naked_asm};

use libc::ucontext_t;

use super::{access, each_line, fault_row};
use crate::Fold;

/// Which of the optional instructions this CPU has: none is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cpu;

/// The instruction that writes a line back or drops it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Writes back and drops.
    Civac,
    /// Writes back.
    Cvac,
}

impl Flush {
    /// Each of them.
    pub const ALL: [Self; 2] = [Self::Civac, Self::Cvac];

    /// As an assembler calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Civac => "dc civac",
            Self::Cvac => "dc cvac",
        }
    }
}

impl Cpu {
    /// This CPU.
    #[must_use]
    pub const fn detect() -> Self {
        Self
    }

    /// The least that any aarch64 has.
    #[must_use]
    pub const fn baseline() -> Self {
        Self
    }

    /// Whether `other` has all that this one has.
    #[must_use]
    pub const fn within(self, _: Self) -> bool {
        true
    }

    /// This CPU, which has each instruction.
    #[must_use]
    pub const fn with(self, _: Flush) -> Option<Self> {
        Some(self)
    }

    /// It, and each lesser one that has copies of its own: for tests.
    #[must_use]
    pub fn levels(self) -> Vec<Self> {
        vec![self]
    }

    /// The best instruction to write a line back.
    #[must_use]
    pub const fn write_back(self) -> Flush {
        Flush::Cvac
    }

    /// The best instruction to drop a line.
    #[must_use]
    pub const fn invalidate(self) -> Flush {
        Flush::Civac
    }
}

/// Loads a word; `None` when the memory failed.
///
/// # Safety
/// `at` is aligned to 8 and lies in a live mapping.
#[inline(always)]
pub(crate) unsafe fn load(at: *const u64) -> Option<u64> {
    let value: u64;
    // SAFETY: reads the 8 bytes that the caller vouches for; a fault lands behind the load with x9 = 1.
    let good =
        unsafe { access!("2: ldar {value}, [{at}]"; "x9"; at = in(reg) at, value = lateout(reg) value) };
    good.then_some(value)
}

/// Stores a word; false when the memory failed and the store was skipped.
///
/// # Safety
/// `at` is aligned to 8 and lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store(at: *mut u64, value: u64) -> bool {
    // SAFETY: writes the 8 bytes that the caller vouches for; a fault lands behind the store with x9 = 1.
    unsafe { access!("2: stlr {value}, [{at}]"; "x9"; at = in(reg) at, value = in(reg) value) }
}

/// Stores a byte; false when the memory failed and the store was skipped.
///
/// # Safety
/// `at` lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store_byte(at: *mut u8, value: u8) -> bool {
    // SAFETY: writes the byte that the caller vouches for; a fault lands behind the store with x9 = 1.
    unsafe { access!("2: stlrb {value:w}, [{at}]"; "x9"; at = in(reg) at, value = in(reg) u32::from(value)) }
}

/// Loads the words of a line, the first one first; `None` when the memory failed.
///
/// # Safety
/// `at` is aligned to 64 and lies in a live mapping.
#[inline(always)]
pub(crate) unsafe fn load_line(at: *const u64) -> Option<[u64; 8]> {
    let mut words = [0; 8];
    for (index, word) in words.iter_mut().enumerate() {
        // SAFETY: a word of the line that the caller vouches for.
        *word = unsafe { load(at.add(index)) }?;
    }
    Some(words)
}

/// Stores the words of a line, the first one last; false when the memory failed and the rest was skipped.
///
/// # Safety
/// `at` is aligned to 64 and lies in a live, writable mapping.
#[inline(always)]
pub(crate) unsafe fn store_line(at: *mut u64, words: &[u64; 8]) -> bool {
    // SAFETY: words of the line that the caller vouches for.
    (1..8).chain([0]).all(|index: usize| unsafe { store(at.add(index), words[index]) })
}

/// Stores a word and writes its line back; false when the memory failed and the store was skipped.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
pub(crate) unsafe fn store_nt(at: *mut u64, value: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe { store(at, value) && cvac(at.cast()) }
}

/// # Safety
/// `at` lies in a live mapping.
#[inline(always)]
unsafe fn civac(at: *mut u8) -> bool {
    // SAFETY: a flush changes no byte that a program sees; a fault lands behind it with x9 = 1.
    unsafe { access!("2: dc civac, {at}"; "x9"; at = in(reg) at) }
}

/// # Safety
/// As for [`civac`].
#[inline(always)]
unsafe fn cvac(at: *mut u8) -> bool {
    // SAFETY: as in `civac`.
    unsafe { access!("2: dc cvac, {at}"; "x9"; at = in(reg) at) }
}

/// Flushes every line that holds a byte of `[at, at + bytes)`; returns how far behind `at` the first of them that failed begins.
///
/// # Safety
/// The range lies in a live mapping.
#[inline(always)]
pub(crate) unsafe fn flush(how: Flush, at: *mut u8, bytes: u64) -> Option<u64> {
    // SAFETY: the caller vouches for the range.
    unsafe {
        match how {
            Flush::Civac => each_line(at, bytes, |line| civac(line)),
            Flush::Cvac => each_line(at, bytes, |line| cvac(line)),
        }
    }
}

/// Later stores and flushes wait for earlier stores and flushes: no barrier for stores alone waits for flushes.
#[inline(always)]
pub(crate) fn sfence() {
    mfence();
}

/// Everything later waits for everything earlier, flushes included.
#[inline(always)]
pub(crate) fn mfence() {
    // SAFETY: a barrier has no operand but its domain.
    unsafe { asm!("dsb sy", options(nostack, preserves_flags)) };
}

/// Later loads wait for earlier stores.
#[inline(always)]
pub(crate) fn store_load_fence() {
    // SAFETY: as in `mfence`.
    unsafe { asm!("dmb ish", options(nostack, preserves_flags)) };
}

/// The compiler keeps what stands before and after in order.
#[inline(always)]
pub(crate) fn compiler_fence() {
    // SAFETY: an empty statement.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

/// The ends of the table of faults, which the linker defines.
pub(crate) fn fault_rows() -> (usize, usize) {
    let (start, stop): (usize, usize);
    // SAFETY: takes two addresses, and touches no memory.
    unsafe {
        asm!(
            ".hidden __start_polder_fault",
            ".hidden __stop_polder_fault",
            "adrp {start}, __start_polder_fault",
            "add {start}, {start}, :lo12:__start_polder_fault",
            "adrp {stop}, __stop_polder_fault",
            "add {stop}, {stop}, :lo12:__stop_polder_fault",
            start = out(reg) start,
            stop = out(reg) stop,
            options(nomem, nostack, preserves_flags, pure),
        );
    }
    (start, stop)
}

/// Where a thread was interrupted.
pub(crate) const fn interrupted(context: &ucontext_t) -> usize {
    context.uc_mcontext.pc as usize
}

/// Has a thread that was interrupted go on at `landing`, and know that its access failed.
pub(crate) const fn land(context: &mut ucontext_t, landing: usize) {
    context.uc_mcontext.pc = landing as u64;
    context.uc_mcontext.regs[9] = 1;
}

/// A coherent copy never goes past the caches.
pub(crate) const STREAM: usize = usize::MAX;

/// The copy routines.
#[derive(Clone, Copy, Debug)]
pub struct Copier;

impl Copier {
    pub(crate) const fn new(_: Cpu) -> Self {
        Self
    }

    /// Copies into a region with ordinary loads and stores; returns the bytes that were left when the memory failed.
    ///
    /// # Safety
    /// `src` and `dst` are valid for `len` bytes, `dst` in a live mapping and `src` private to the caller, so that they do not overlap.
    #[inline(always)]
    pub(crate) unsafe fn copy_in(&self, dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe { copy_in(dst, src, len) }
    }

    /// Copies out of a region.
    ///
    /// # Safety
    /// As for [`Copier::copy_in`], with `src` in the mapping.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(&self, dst: *mut u8, src: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe { copy_out(dst, src, len) }
    }

    /// Folds nothing: buffers of this process do, with copies.
    ///
    /// # Safety
    /// None is needed.
    #[inline(always)]
    pub(crate) unsafe fn fold<F: Fold>(&self, _: *mut u8, _: &[*const u8], _: usize, _: bool, _: F) -> usize {
        0
    }

    /// Copies, fills the last word up with zeros, and writes the lines back; returns the bytes that were left when the memory failed.
    ///
    /// # Safety
    /// As for [`Copier::copy_in`]; `dst` is aligned to 8 and writable up to the next multiple of 8.
    pub(crate) unsafe fn copy_nt(&self, dst: *mut u8, src: &[u8]) -> usize {
        let (words, rest) = src.split_at(src.len() & !7);
        // SAFETY: the caller vouches for `dst`; `words` is a live slice.
        let left = unsafe { copy_in(dst, words.as_ptr(), words.len()) };
        if left > 0 {
            return left + rest.len();
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        // SAFETY: the caller vouches for `dst` up to the next multiple of 8, which is where this word ends.
        if !rest.is_empty() && !unsafe { store(dst.add(words.len()).cast(), u64::from_le_bytes(last)) } {
            return rest.len();
        }
        // SAFETY: these bytes were just written.
        let failed = unsafe { flush(Flush::Cvac, dst, src.len() as u64) };
        failed.map_or(0, |done| src.len() - done as usize)
    }
}

/// Blocks of four registers, then words, then bytes. `$region` is the address that is aligned, so that words of the region tear no
/// smaller than memory itself tears. A fault in a block lands in the loop of bytes, which goes on until the very byte that fails.
macro_rules! copy {
    ($name:ident, $region:literal) => {
        /// Copies `len` bytes from `src` to `dst` and returns how many were left when the memory failed.
        ///
        /// # Safety
        /// As for [`Copier::copy_in`].
        #[unsafe(naked)]
        unsafe extern "C" fn $name(dst: *mut u8, src: *const u8, len: usize) -> usize {
            naked_asm!(
                "dmb ish",
                "mov x9, #0",
                "20: cbz x2, 28f",
                concat!("tst ", $region, ", #7"),
                "b.ne 27f",
                "21: cmp x2, #32",
                "b.lo 23f",
                "22: ldp x3, x4, [x1]",
                "ldp x5, x6, [x1, #16]",
                "stp x3, x4, [x0]",
                "stp x5, x6, [x0, #16]",
                "31: add x0, x0, #32",
                "add x1, x1, #32",
                "sub x2, x2, #32",
                "b 21b",
                "23: cmp x2, #8",
                "b.lo 27f",
                "24: ldr x3, [x1]",
                "str x3, [x0]",
                "25: add x0, x0, #8",
                "add x1, x1, #8",
                "sub x2, x2, #8",
                "cbnz x2, 23b",
                "b 28f",
                "27: cbz x2, 28f",
                "29: ldrb w3, [x1]",
                "strb w3, [x0]",
                "30: add x0, x0, #1",
                "add x1, x1, #1",
                "sub x2, x2, #1",
                "cbz x9, 20b",
                "b 27b",
                "28: dmb ish",
                "mov x0, x2",
                "ret",
                fault_row!("22b", "31b", "27b"),
                fault_row!("24b", "25b", "27b"),
                fault_row!("29b", "30b", "28b"),
            )
        }
    };
}

copy!(copy_in, "x0");
copy!(copy_out, "x1");
