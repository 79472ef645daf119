//! The pool's window, of whatever memory: the one place that calls it.

use std::sync::Arc;

use polder_mem::{Coherence, Coherent, Memory, Software, Wrapped};
use polder_pool::session::{AnyPool, Session};
use polder_pool::window::{Access, Window};
use polder_pool::{PoolError, each};

/// A window in a pool of one of the memories that an edge meets.
pub(crate) enum Pooled {
    Coherent(Window<Coherent>),
    Software(Window<Software>),
    Wrapped(Window<Wrapped>),
}

macro_rules! each_window {
    ($any:expr, $window:ident => $body:expr) => {
        match $any {
            Pooled::Coherent($window) => $body,
            Pooled::Software($window) => $body,
            Pooled::Wrapped($window) => $body,
        }
    };
}

impl Pooled {
    pub(crate) fn create(
        session: &Session,
        name: &str,
        rank: u32,
        ranks: u32,
        bytes: u64,
    ) -> Result<Self, PoolError> {
        Ok(match session.pool() {
            AnyPool::Coherent(pool) => {
                Self::Coherent(Window::create(Arc::clone(pool), name, rank, ranks, bytes)?)
            }
            AnyPool::Software(pool) => {
                Self::Software(Window::create(Arc::clone(pool), name, rank, ranks, bytes)?)
            }
            AnyPool::Wrapped(pool) => {
                Self::Wrapped(Window::create(Arc::clone(pool), name, rank, ranks, bytes)?)
            }
        })
    }

    pub(crate) fn join(&mut self) -> Result<(), PoolError> {
        each_window!(self, window => window.join())
    }

    /// Where the segment of a rank is mapped; nothing where it is not.
    pub(crate) fn address(&self, session: &Session, rank: u32) -> Result<Option<*mut u8>, PoolError> {
        let extent = each_window!(self, window => window.extent(rank))?;
        Ok(each!(session.pool(), pool => pool.memory().address(extent.at, extent.bytes)))
    }

    pub(crate) fn put(&mut self, target: u32, offset: u64, from: &[u8]) -> Result<(), PoolError> {
        each_window!(self, window => window.put(target, offset, from))
    }

    pub(crate) fn get(&mut self, target: u32, offset: u64, into: &mut [u8]) -> Result<(), PoolError> {
        each_window!(self, window => window.get(target, offset, into))
    }

    pub(crate) fn flush(&self) {
        each_window!(self, window => window.flush());
    }

    pub(crate) fn update(
        &mut self,
        target: u32,
        offset: u64,
        bytes: u64,
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), PoolError> {
        each_window!(self, window => window.update(target, offset, bytes, change))
    }

    pub(crate) fn expose(&self, target: u32, offset: u64, bytes: u64) -> Result<(), PoolError> {
        each_window!(self, window => window.expose(target, offset, bytes))
    }

    pub(crate) fn renew(&self, target: u32, offset: u64, bytes: u64) -> Result<(), PoolError> {
        each_window!(self, window => window.renew(target, offset, bytes))
    }

    pub(crate) fn try_lock(&mut self, target: u32, access: Access) -> Result<bool, PoolError> {
        each_window!(self, window => window.try_lock(target, access))
    }

    pub(crate) fn unlock(&mut self, target: u32) {
        each_window!(self, window => window.unlock(target));
    }

    pub(crate) fn post(&mut self, group: &[u32]) -> Result<(), PoolError> {
        each_window!(self, window => window.post(group))
    }

    pub(crate) fn start(&mut self, group: &[u32]) -> Result<(), PoolError> {
        each_window!(self, window => window.start(group))
    }

    pub(crate) fn try_start(&mut self) -> Result<bool, PoolError> {
        each_window!(self, window => window.try_start())
    }

    pub(crate) fn complete(&mut self) -> Result<(), PoolError> {
        each_window!(self, window => window.complete())
    }

    pub(crate) fn try_wait(&mut self) -> Result<bool, PoolError> {
        each_window!(self, window => window.try_wait())
    }
}

/// Whether the hardware keeps a pool's memory coherent.
pub(crate) fn is_coherent(session: &Session) -> bool {
    each!(session.pool(), pool => pool.memory().coherence()) == Coherence::Coherent
}
