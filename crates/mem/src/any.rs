//! The memory of a pool as an edge meets it: what keeps its caches in step is said at run time.

use std::fmt;

#[cfg(feature = "instruments")]
use crate::Wrapped;
use crate::host::{HostError, HostPlan};
use crate::mapped::Mapped;
use crate::memory::forward;
use crate::{Bell, Coherence, Fault, Fold, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot, Region};

/// One process's access to a mapped region, with or without instruments around it.
#[derive(Clone)]
pub enum AnyMemory {
    /// Nothing is wrapped around it.
    Mapped(Mapped),
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
            Self::Mapped(memory) if in_shadow => Wrapped::shadow(memory.with_coherence(Coherence::Coherent)),
            Self::Mapped(memory) => Wrapped::from(memory),
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
    forward! { inner {}
        fn bytes(&self) -> u64;
        fn coherence(&self) -> Coherence;
        fn emulated(&self) -> bool;
        fn address(&self, at: Offset, bytes: u64) -> Option<*mut u8>;
        fn populate(&self, at: Offset, bytes: u64);
        fn load(&self, at: Offset) -> Result<u64, Fault>;
        fn store(&self, at: Offset, value: u64);
        fn store_byte(&self, at: Offset, value: u8);
        fn load_line(&self, at: Offset) -> Result<[u64; 8], Fault>;
        fn store_line(&self, at: Offset, words: &[u64; 8]);
        fn store_nt(&self, at: Offset, value: u64);
        fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault>;
        fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault>;
        fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault>;
        fn write_back(&self, at: Offset, bytes: u64);
        fn invalidate(&self, at: Offset, bytes: u64);
        fn sfence(&self);
        fn mfence(&self);
        fn fence_invalidations(&self);
        fn pause(&self);
        fn yield_now(&self);
        fn now(&self) -> Nanos;
        fn local_load(&self, word: LocalWord) -> u64;
        fn local_store(&self, word: LocalWord, value: u64);
        fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64>;
        fn slot(&self) -> ProcessSlot;
        fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness;
        fn host_is_held(&self, host: u16) -> Option<bool>;
        fn announce_sleep(&self, bell: Bell) -> u32;
        fn sleep(&self, bell: Bell, seen: u32, until: Nanos);
        fn cancel_sleep(&self, bell: Bell);
        fn wake(&self, bell: Bell);
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
}

impl fmt::Debug for AnyMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        inner!(self, memory => memory.fmt(f))
    }
}
