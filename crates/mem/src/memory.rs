//! The seam: what the hardware does, and no more.

use std::fmt;
use std::ops::Add;
use std::str::FromStr;
use std::time::Duration;

use crate::Offset;
use crate::fold::{BLOCK, Fold};

/// A word of the memory that the processes of one host share among themselves, outside the pool. They are cached
/// coherently and survive the death of a process, not of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalWord(pub u32);

/// A doorbell: where a process sleeps until another process under the same kernel wakes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bell(pub u32);

/// The place of a process among the processes of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessSlot(pub u16);

/// A point of the reader's own monotonic clock, in nanoseconds. Clocks of two processes are never compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Nanos(pub u64);

impl Add<Duration> for Nanos {
    type Output = Self;

    fn add(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Who keeps the caches of two hosts in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coherence {
    /// The hardware, of one kernel: caches live and die together. Flushes cost nothing because none are made.
    Coherent,
    /// The program, with the CPU's line instructions.
    Software,
    /// The device, by back-invalidation (CXL 3): caches of all hosts agree, and a host that dies loses its dirty lines. Lines are written
    /// back, and none is invalidated.
    HdmDb,
}

impl Coherence {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Coherent, Self::Software, Self::HdmDb];

    /// Whether a host that dies may lose what it stored and did not write back.
    #[must_use]
    pub const fn needs_write_back(self) -> bool {
        matches!(self, Self::Software | Self::HdmDb)
    }

    /// Whether what another host showed may be gone at a later look: its dirty line was seen, and the host died with it.
    #[must_use]
    pub const fn takes_back(self) -> bool {
        matches!(self, Self::HdmDb)
    }

    /// Whether a cache may hold what another host has changed.
    #[must_use]
    pub const fn needs_invalidation(self) -> bool {
        matches!(self, Self::Software)
    }
}

impl FromStr for Coherence {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.to_string() == text);
        found.ok_or_else(|| "expected coherent, software or hdm-db".to_owned())
    }
}

impl fmt::Display for Coherence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Coherent => "coherent",
            Self::Software => "software",
            Self::HdmDb => "hdm-db",
        })
    }
}

/// What one process can say of another process of the same kernel, without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Liveness {
    /// It holds its slot.
    Alive,
    /// It held its slot and is gone; its caches live on in this host.
    Dead,
    /// It runs under another kernel: only its heartbeat in the pool can tell.
    Unknown,
}

/// An access that the hardware refused: poison, a lost link, or a file that was truncated below its mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory at offset {offset} failed (poison, a lost link, a truncated file, or no memory left for it); {done} bytes were copied before it"
)]
pub struct Fault {
    /// The first byte that failed.
    pub offset: Offset,
    /// The bytes that a copy had moved before it.
    pub done: u64,
}

/// One thread's access to a region that other hosts may write, and to the memory of its own host.
///
/// The operations are those of x86-64 with the guarantees of docs/memory-model.md, and none besides. Offsets of
/// words are multiples of 8. An offset outside the region is a mistake of the caller and panics; whatever is read
/// from a region must therefore be validated before it is used as an offset.
///
/// Operations carry the caller's source location, so that the incoherent model can drop or weaken a single flush
/// or fence without an edit.
pub trait Memory: Clone {
    /// The size of the region in bytes.
    fn bytes(&self) -> u64;

    /// Who keeps caches in step. Protocols branch on it for speed alone, but for [`Coherence::takes_back`].
    fn coherence(&self) -> Coherence;

    /// Whether what is timed on it is an emulated figure.
    fn emulated(&self) -> bool {
        false
    }

    /// Where `[at, at + bytes)` is mapped, for programs that load and store there themselves; `None` where nothing is, as in a
    /// shadow.
    fn address(&self, _at: Offset, _bytes: u64) -> Option<*mut u8> {
        None
    }

    /// Maps the pages of `[at, at + bytes)` that are about to be written into this process: a read maps many at once, and a write one. Nothing but
    /// time depends on it.
    fn populate(&self, _at: Offset, _bytes: u64) {}

    /// Loads the aligned word at `at`; the 8 bytes are atomic. Passes an earlier `sfence`.
    ///
    /// # Errors
    /// [`Fault`] when the line is poisoned or its link is lost, also when an earlier store met such a line.
    #[track_caller]
    fn load(&self, at: Offset) -> Result<u64, Fault>;

    /// Stores the aligned word at `at` into this host's cache.
    #[track_caller]
    fn store(&self, at: Offset, value: u64);

    /// Stores the byte at `at` into this host's cache, and leaves the other bytes of its word alone, also where other processes of the
    /// host store them at the same time.
    #[track_caller]
    fn store_byte(&self, at: Offset, value: u8);

    /// Loads the words of the line at `at`, one by one, the first one first.
    ///
    /// # Errors
    /// Those of [`Memory::load`].
    #[track_caller]
    fn load_line(&self, at: Offset) -> Result<[u64; 8], Fault> {
        let mut words = [0; 8];
        // No closure, which would hide the caller.
        for (index, word) in (0..).zip(&mut words) {
            *word = self.load(at.word(index))?;
        }
        Ok(words)
    }

    /// Stores the words of the line at `at` into this host's cache, one by one, the first one last.
    #[track_caller]
    fn store_line(&self, at: Offset, words: &[u64; 8]) {
        for index in (1..8).chain([0]) {
            self.store(at.word(index), words[index as usize]);
        }
    }

    /// Stores the aligned word at `at` past the caches, leaving the other words of its line alone. Ordered with
    /// nothing until a fence.
    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64);

    /// Copies `from` to `at`, of any alignment, with ordinary stores.
    ///
    /// # Errors
    /// [`Fault`], saying how far the copy came.
    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault>;

    /// Copies `from` to the aligned word `at` past the caches, for bulk. The last word is filled up with zeros, so
    /// the caller owns the bytes up to the next multiple of 8. Needs a fence, and no write-back.
    ///
    /// # Errors
    /// [`Fault`], saying how far the copy came.
    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault>;

    /// Copies the bytes at `at`, of any alignment, to `into` with ordinary loads. Words may be torn against a
    /// concurrent writer at every 8 aligned bytes.
    ///
    /// # Errors
    /// [`Fault`], saying how far the copy came.
    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault>;

    /// Folds `bytes` bytes of the first source with those of the others, in their order, into `into`, which may be one of them. It loads
    /// as [`Memory::copy_out`] does, and stores as [`Memory::copy_in`], or `past_caches` as [`Memory::copy_in_nt`].
    ///
    /// # Errors
    /// [`Fault`], saying how far it came.
    #[track_caller]
    fn fold<F: Fold>(
        &self,
        into: Offset,
        sources: &[Offset],
        bytes: u64,
        past_caches: bool,
        fold: F,
    ) -> Result<(), Fault> {
        fold_in_pieces(self, into, sources, bytes, past_caches, fold)
    }

    /// Writes back every line that holds a byte of `[at, at + bytes)` and may keep it cached (`clwb`). Ordered after
    /// older stores to the same line; complete only after a fence.
    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64);

    /// Writes back if dirty, and drops from this host's caches, every line that holds a byte of `[at, at + bytes)`
    /// (`clflushopt`). Later loads wait for it only behind an `mfence` or `fence_invalidations`.
    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64);

    /// Later stores and flushes wait until earlier stores and flushes have reached memory. Loads pass it.
    #[track_caller]
    fn sfence(&self);

    /// Everything later waits until everything earlier is done.
    #[track_caller]
    fn mfence(&self);

    /// Later loads wait until earlier invalidations are done: `mfence` where software keeps coherence, nothing
    /// where the hardware does.
    #[track_caller]
    fn fence_invalidations(&self);

    /// Tells the CPU (and the model's scheduler) that this thread waits for another.
    #[inline(always)]
    fn pause(&self) {
        std::hint::spin_loop();
    }

    /// Lets other threads of this CPU run.
    fn yield_now(&self) {
        crate::give_up();
    }

    /// This thread's clock.
    fn now(&self) -> Nanos;

    /// Loads a word of the host's own memory; all operations on local words are sequentially consistent.
    fn local_load(&self, word: LocalWord) -> u64;

    /// Stores a word of the host's own memory.
    fn local_store(&self, word: LocalWord, value: u64);

    /// Replaces `old` by `new` in a word of the host's own memory, atomically among the processes of the host.
    ///
    /// # Errors
    /// The word's value when it was not `old`.
    fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64>;

    /// The slot of this process among the processes of its host.
    fn slot(&self) -> ProcessSlot;

    /// Whether the process at `slot` of host `host` still runs.
    fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness;

    /// Whether a process under this kernel holds `host`, whatever its run directory is; `None` where nothing says so. What runs under
    /// another kernel is not seen.
    fn host_is_held(&self, host: u16) -> Option<bool> {
        let _ = host;
        None
    }

    /// Announces that this thread is about to sleep on `bell` and returns the bell's count. The caller then looks
    /// once more at what it waits for, and calls [`Memory::sleep`] or [`Memory::cancel_sleep`].
    fn announce_sleep(&self, bell: Bell) -> u32;

    /// Sleeps until `bell`'s count differs from `seen` or `until` has come, or for no reason at all; ends the
    /// announcement. Only processes under the same kernel can wake it. A wait for a process of another kernel
    /// passes a short `until`.
    fn sleep(&self, bell: Bell, seen: u32, until: Nanos);

    /// Ends an announcement without sleeping.
    fn cancel_sleep(&self, bell: Bell);

    /// Wakes every thread that sleeps on `bell` or has announced that it will. Contains the fence that orders what was
    /// published before with the look at the sleepers.
    fn wake(&self, bell: Bell);
}

/// Methods of [`Memory`] that are those of what `$inner!` names as `memory`, after `$before`.
macro_rules! forward {
    ($inner:ident $before:block $(
        fn $name:ident(&$self:ident $(, $argument:ident: $kind:ty)*) $(-> $result:ty)?;
    )*) => {$(
        #[inline(always)]
        #[track_caller]
        fn $name(&$self $(, $argument: $kind)*) $(-> $result)? {
            $before
            $inner!($self, memory => memory.$name($($argument),*))
        }
    )*};
}
pub(crate) use forward;

/// Blocks of a piece of a fold: two buffers of 4 KiB leave most of a first-level cache to what is copied.
const FOLD_PIECE: usize = 64;

/// Folds through buffers of this process, with the copies of `memory`.
///
/// # Errors
/// [`Fault`], saying how far the fold came.
#[track_caller]
pub(crate) fn fold_in_pieces<M: Memory, F: Fold>(
    memory: &M,
    into: Offset,
    sources: &[Offset],
    bytes: u64,
    past_caches: bool,
    fold: F,
) -> Result<(), Fault> {
    let Some((first, others)) = sources.split_first() else { return Ok(()) };
    let (mut sum, mut part) = ([[0; BLOCK]; FOLD_PIECE], [[0; BLOCK]; FOLD_PIECE]);
    let mut start = 0;
    while start < bytes {
        let length = (bytes - start).min((FOLD_PIECE * BLOCK) as u64) as usize;
        let blocks = length.div_ceil(BLOCK);
        let so_far = |fault: Fault| Fault { done: start + fault.done, ..fault };
        memory.copy_out(*first + start, &mut sum.as_flattened_mut()[..length]).map_err(so_far)?;
        for other in others {
            memory.copy_out(*other + start, &mut part.as_flattened_mut()[..length]).map_err(so_far)?;
            for (sum, part) in sum[..blocks].iter_mut().zip(&part) {
                *sum = fold.combine(*sum, *part);
            }
        }
        sum[..blocks].iter_mut().for_each(|sum| *sum = fold.finish(*sum));
        let from = &sum.as_flattened()[..length];
        let stored = match past_caches {
            true => memory.copy_in_nt(into + start, from),
            false => memory.copy_in(into + start, from),
        };
        stored.map_err(so_far)?;
        start += length as u64;
    }
    Ok(())
}
