//! The dynamic third implementation: a mapped region with wrappers around it, for tests and for emulated hardware.
//!
//! Three wrappers, in any combination: a **shadow** (each host works on a private copy, so that a real program fails
//! where a flush is missing), a **cost** (latency and bandwidth of memory that is not here), and a **trigger** (the
//! process kills or stops itself at its n-th operation).

mod cost;
mod shadow;
mod trigger;

use std::fmt;
use std::sync::Arc;

use crate::host::{HostError, HostPlan};
use crate::mapped::Mapped;
use crate::memory::forward;
use crate::{Bell, Coherence, Fault, LINE, Liveness, LocalWord, Memory, Nanos, Offset, ProcessSlot, Region};

pub use cost::Cost;
pub use shadow::{FlushSite, FlushSiteError};
pub use trigger::{Trigger, TriggerAction};

use shadow::Shadow;
use trigger::Operations;

/// A mapped region with wrappers around it.
#[derive(Clone)]
pub struct Wrapped {
    inner: Inner,
    cost: Option<Cost>,
    operations: Arc<Operations>,
}

#[derive(Clone)]
enum Inner {
    Mapped(Mapped),
    Shadow(Shadow),
}

/// Evaluates an expression with whatever is wrapped.
macro_rules! inner {
    ($self:expr, $memory:ident => $body:expr) => {
        match &$self.inner {
            Inner::Mapped($memory) => $body,
            Inner::Shadow($memory) => $body,
        }
    };
}

impl From<Mapped> for Wrapped {
    fn from(memory: Mapped) -> Self {
        Self::around(Inner::Mapped(memory))
    }
}

impl Wrapped {
    fn around(inner: Inner) -> Self {
        Self { inner, cost: None, operations: Arc::new(Operations::default()) }
    }

    /// Software coherence without its hardware: once attached, the processes of a host share a private copy of the
    /// region in place of a cache. What was stored reaches `region` when its line is written back, and what another
    /// host wrote is seen when the line was invalidated.
    ///
    /// Its lines are never evicted, so a missing flush shows every time. When the last process of a host is killed,
    /// the copy is lost as if the host had died.
    #[must_use]
    pub fn shadow(region: Mapped) -> Self {
        Self::around(Inner::Shadow(Shadow::new(region)))
    }

    /// Leaves out the write-backs and invalidations that are called at `site`, for tests of tests.
    ///
    /// # Panics
    /// When this is no shadow: real caches would hide the mistake most of the time.
    #[must_use]
    pub fn without_flushes_at(mut self, site: FlushSite) -> Self {
        match &mut self.inner {
            Inner::Shadow(shadow) => shadow.leave_out(site),
            _ => panic!("only a shadow leaves flushes out"),
        }
        self
    }

    /// Makes memory as slow as `cost` says.
    #[must_use]
    pub fn with_cost(mut self, cost: Cost) -> Self {
        self.cost = Some(cost);
        self
    }

    /// Kills or stops this process at an operation of this handle and its clones.
    #[must_use]
    pub fn with_trigger(mut self, trigger: Trigger) -> Self {
        self.operations = Arc::new(Operations::until(trigger));
        self
    }

    /// Kills or stops this process at an operation of this handle or a clone, counted from 1 at the next one.
    pub fn arm(&self, trigger: Trigger) {
        self.operations.arm(trigger);
    }

    /// Joins the processes of a host; see [`crate::Mapped::attach`].
    ///
    /// # Errors
    /// [`HostError`], when no slot is free or the files cannot be had.
    pub fn attach(mut self, plan: &HostPlan) -> Result<Self, HostError> {
        self.inner = match self.inner {
            Inner::Mapped(memory) => Inner::Mapped(memory.attach(plan)?),
            Inner::Shadow(memory) => Inner::Shadow(memory.attach(plan)?),
        };
        Ok(self)
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &Region {
        inner!(self, memory => memory.region())
    }

    /// Operations of this handle and its clones so far, in the count that a [`Trigger`] goes by.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.operations.count()
    }

    /// Charges for moving `bytes` between the caches and the region.
    #[inline]
    fn charge(&self, bytes: u64) {
        if let Some(cost) = &self.cost {
            inner!(self, memory => cost.spend(memory.host_if_attached(), bytes));
        }
    }

    /// Charges for a copy or a store that only a coherent region pays for when it is made: elsewhere the flush pays.
    #[inline]
    fn charge_if_coherent(&self, bytes: u64) {
        if self.cost.is_some() && self.coherence() == Coherence::Coherent {
            self.charge(bytes);
        }
    }

    /// Charges for flushing the lines of `[at, at + bytes)`, if they are flushed.
    #[inline]
    fn charge_flush(&self, at: Offset, bytes: u64, is_flushed: bool) {
        if self.cost.is_some() && is_flushed && bytes > 0 {
            let end = (at.0 + bytes).next_multiple_of(LINE);
            self.charge(end - at.line().0);
        }
    }
}

impl Memory for Wrapped {
    forward! { inner {}
        fn bytes(&self) -> u64;
        fn coherence(&self) -> Coherence;
        fn address(&self, at: Offset, bytes: u64) -> Option<*mut u8>;
        fn populate(&self, at: Offset, bytes: u64);
        fn now(&self) -> Nanos;
        fn slot(&self) -> ProcessSlot;
        fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness;
        fn host_is_held(&self, host: u16) -> Option<bool>;
    }

    forward! { inner { self.operations.next(); }
        fn load(&self, at: Offset) -> Result<u64, Fault>;
        fn store(&self, at: Offset, value: u64);
        fn store_byte(&self, at: Offset, value: u8);
        fn sfence(&self);
        fn mfence(&self);
        fn fence_invalidations(&self);
        fn local_load(&self, word: LocalWord) -> u64;
        fn local_store(&self, word: LocalWord, value: u64);
        fn local_cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64>;
        fn announce_sleep(&self, bell: Bell) -> u32;
        fn sleep(&self, bell: Bell, seen: u32, until: Nanos);
        fn cancel_sleep(&self, bell: Bell);
        fn wake(&self, bell: Bell);
    }

    fn emulated(&self) -> bool {
        self.cost.is_some() || matches!(self.inner, Inner::Shadow(_))
    }

    #[track_caller]
    fn store_nt(&self, at: Offset, value: u64) {
        self.operations.next();
        self.charge(8);
        inner!(self, memory => memory.store_nt(at, value));
    }

    #[track_caller]
    fn copy_in(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        self.charge_if_coherent(from.len() as u64);
        self.operations.pieces(at, from, |at, piece| inner!(self, memory => memory.copy_in(at, piece)))
    }

    #[track_caller]
    fn copy_in_nt(&self, at: Offset, from: &[u8]) -> Result<(), Fault> {
        self.charge(from.len() as u64);
        self.operations.pieces(at, from, |at, piece| inner!(self, memory => memory.copy_in_nt(at, piece)))
    }

    #[track_caller]
    fn copy_out(&self, at: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.operations.next();
        self.charge_if_coherent(into.len() as u64);
        inner!(self, memory => memory.copy_out(at, into))
    }

    #[track_caller]
    fn write_back(&self, at: Offset, bytes: u64) {
        self.operations.next();
        self.charge_flush(at, bytes, self.coherence().needs_write_back());
        inner!(self, memory => memory.write_back(at, bytes));
    }

    #[track_caller]
    fn invalidate(&self, at: Offset, bytes: u64) {
        self.operations.next();
        self.charge_flush(at, bytes, self.coherence().needs_invalidation());
        inner!(self, memory => memory.invalidate(at, bytes));
    }
}

impl fmt::Debug for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, inner): (_, &dyn fmt::Debug) = match &self.inner {
            Inner::Mapped(memory) => ("Wrapped", memory),
            Inner::Shadow(memory) => ("Shadow", memory),
        };
        write!(f, "{name}({inner:?}, {:?}, {:?})", self.cost, self.operations)
    }
}
