//! The memory of a pool as an edge meets it: what keeps its caches in step is said at run time.

use std::fmt;

#[cfg(feature = "instruments")]
use crate::Wrapped;
use crate::host::{HostError, HostPlan};
use crate::mapped::Mapped;
use crate::variants::AnyLines;
use crate::{Bell, Coherence, Fault, Fold, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot, Region};

/// One process's access to a mapped region of any kind, with or without instruments around it. It does what [`crate::Coherent`] and
/// [`crate::Software`] do, or what memory takes that its device keeps coherent, at a branch for each flush and fence.
#[derive(Clone)]
pub enum AnyMemory {
    /// The hardware keeps it coherent, or the program, or the device.
    Mapped(Mapped<AnyLines>),
    /// Something is wrapped around it.
    #[cfg(feature = "instruments")]
    Wrapped(Wrapped),
}

macro_rules! inner {
    ($self:expr, $memory:ident => $body:expr) => {
        match $self {
            Self::Mapped($memory) => $body,
            #[cfg(feature = "instruments")]
            Self::Wrapped($memory) => $body,
        }
    };
}

impl AnyMemory {
    /// Access to `region` alone, its caches kept in step by the program, which is right for each kind.
    #[must_use]
    pub fn new(region: Region) -> Self {
        Self::Mapped(Mapped::new(region))
    }

    /// The same access before it is attached, its caches kept in step as `coherence` says. What is wrapped says so itself.
    #[must_use]
    pub fn with_coherence(self, coherence: Coherence) -> Self {
        match self {
            Self::Mapped(memory) => Self::Mapped(memory.with_coherence(coherence)),
            #[cfg(feature = "instruments")]
            wrapped @ Self::Wrapped(_) => wrapped,
        }
    }

    /// The same access before it is attached, for instruments to be wrapped around: a shadow, or nothing yet.
    #[cfg(feature = "instruments")]
    #[must_use]
    pub fn wrapped(self, in_shadow: bool) -> Wrapped {
        match self {
            Self::Mapped(memory) if in_shadow => Wrapped::shadow(memory.kept_by()),
            Self::Mapped(memory) => Wrapped::any(memory),
            #[cfg(feature = "instruments")]
            Self::Wrapped(memory) => memory,
        }
    }

    /// Joins the processes of a host; see [`Mapped::attach`].
    ///
    /// # Errors
    /// [`HostError`], when no slot is free or the files cannot be had.
    pub fn attach(self, plan: &HostPlan) -> Result<Self, HostError> {
        Ok(match self {
            Self::Mapped(memory) => Self::Mapped(memory.attach(plan)?),
            #[cfg(feature = "instruments")]
            Self::Wrapped(memory) => Self::Wrapped(memory.attach(plan)?),
        })
    }

    /// What is wrapped around it.
    #[cfg(feature = "instruments")]
    #[must_use]
    pub const fn instruments(&self) -> Option<&Wrapped> {
        match self {
            Self::Mapped(_) => None,
            #[cfg(feature = "instruments")]
            Self::Wrapped(memory) => Some(memory),
        }
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &Region {
        inner!(self, memory => memory.region())
    }
}

impl Memory for AnyMemory {
    #[inline(always)]
    fn bytes(&self) -> u64 {
        inner!(self, memory => memory.bytes())
    }

    #[inline(always)]
    fn coherence(&self) -> Coherence {
        inner!(self, memory => memory.coherence())
    }

    #[inline(always)]
    fn emulated(&self) -> bool {
        inner!(self, memory => memory.emulated())
    }

    #[inline(always)]
    fn address(&self, at: Offset, bytes: u64) -> Option<*mut u8> {
        inner!(self, memory => memory.address(at, bytes))
    }

    fn populate(&self, at: Offset, bytes: u64) {
        match self {
            Self::Mapped(memory) => memory.populate(at, bytes),
            #[cfg(feature = "instruments")]
            Self::Wrapped(memory) => memory.populate(at, bytes),
        }
    }

    #[inline(always)]
    #[track_caller]
    fn load(&self, at: Offset) -> Result<u64, Fault> {
        inner!(self, memory => memory.load(at))
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, at: Offset, value: u64) {
        inner!(self, memory => memory.store(at, value))
    }

    #[inline(always)]
    #[track_caller]
    fn store_byte(&self, at: Offset, value: u8) {
        inner!(self, memory => memory.store_byte(at, value))
    }

    #[inline(always)]
    #[track_caller]
    fn load_line(&self, at: Offset) -> Result<[u64; 8], Fault> {
        inner!(self, memory => memory.load_line(at))
    }

    #[inline(always)]
    #[track_caller]
    fn store_line(&self, at: Offset, words: &[u64; 8]) {
        inner!(self, memory => memory.store_line(at, words))
    }

    #[inline(always)]
    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64) {
        inner!(self, memory => memory.store_nt(at, value))
    }

    #[inline(always)]
    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        inner!(self, memory => memory.copy_in(at, from))
    }

    #[inline(always)]
    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        inner!(self, memory => memory.copy_in_nt(at, from))
    }

    #[inline(always)]
    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
        inner!(self, memory => memory.copy_out(at, into))
    }

    #[inline(always)]
    #[track_caller]
    fn fold<F: Fold>(
        &self,
        into: Offset,
        sources: &[Offset],
        bytes: u64,
        past_caches: bool,
        fold: F,
    ) -> Result<(), Fault> {
        inner!(self, memory => memory.fold(into, sources, bytes, past_caches, fold))
    }

    #[inline(always)]
    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64) {
        inner!(self, memory => memory.write_back(at, bytes))
    }

    #[inline(always)]
    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64) {
        inner!(self, memory => memory.invalidate(at, bytes))
    }

    #[inline(always)]
    #[track_caller]
    fn sfence(&self) {
        inner!(self, memory => memory.sfence())
    }

    #[inline(always)]
    #[track_caller]
    fn mfence(&self) {
        inner!(self, memory => memory.mfence())
    }

    #[inline(always)]
    #[track_caller]
    fn fence_invalidations(&self) {
        inner!(self, memory => memory.fence_invalidations())
    }

    #[inline(always)]
    fn pause(&self) {
        inner!(self, memory => memory.pause())
    }

    #[inline(always)]
    fn yield_now(&self) {
        inner!(self, memory => memory.yield_now())
    }

    #[inline(always)]
    fn now(&self) -> Nanos {
        inner!(self, memory => memory.now())
    }

    #[inline(always)]
    #[track_caller]
    fn local_load(&self, word: LocalWord) -> u64 {
        inner!(self, memory => memory.local_load(word))
    }

    #[inline(always)]
    #[track_caller]
    fn local_store(&self, word: LocalWord, value: u64) {
        inner!(self, memory => memory.local_store(word, value))
    }

    #[inline(always)]
    #[track_caller]
    fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64> {
        inner!(self, memory => memory.local_cas(word, old, new))
    }

    #[inline(always)]
    #[track_caller]
    fn slot(&self) -> ProcessSlot {
        inner!(self, memory => memory.slot())
    }

    #[inline(always)]
    #[track_caller]
    fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness {
        inner!(self, memory => memory.liveness(host, slot))
    }

    #[inline(always)]
    fn host_is_held(&self, host: u16) -> Option<bool> {
        inner!(self, memory => memory.host_is_held(host))
    }

    #[inline(always)]
    #[track_caller]
    fn announce_sleep(&self, bell: Bell) -> u32 {
        inner!(self, memory => memory.announce_sleep(bell))
    }

    #[inline(always)]
    #[track_caller]
    fn sleep(&self, bell: Bell, seen: u32, until: Nanos) {
        inner!(self, memory => memory.sleep(bell, seen, until))
    }

    #[inline(always)]
    fn cancel_sleep(&self, bell: Bell) {
        inner!(self, memory => memory.cancel_sleep(bell))
    }

    #[inline(always)]
    #[track_caller]
    fn wake(&self, bell: Bell) {
        inner!(self, memory => memory.wake(bell))
    }
}

impl fmt::Debug for AnyMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        inner!(self, memory => memory.fmt(f))
    }
}
