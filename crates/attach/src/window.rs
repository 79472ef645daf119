//! A window over any of the memories that an edge meets.

use std::sync::Arc;

use polder_mem::{Coherent, Software, Wrapped};

use polder_pool::PoolError;
use polder_pool::window::{Access, Window};

use crate::session::AnyPool;

/// A window over one of the memories that an edge meets, with the calls of a [`Window`].
#[derive(Debug)]
pub enum AnyWindow {
    /// The hardware keeps it coherent.
    Coherent(Window<Coherent>),
    /// The program does.
    Software(Window<Software>),
    /// Something is wrapped around either.
    Wrapped(Window<Wrapped>),
}

macro_rules! each_window {
    ($any:expr, $window:ident => $body:expr) => {
        match $any {
            AnyWindow::Coherent($window) => $body,
            AnyWindow::Software($window) => $body,
            AnyWindow::Wrapped($window) => $body,
        }
    };
}

impl AnyWindow {
    /// [`Window::create`].
    ///
    /// # Errors
    /// As there.
    pub fn create(pool: &AnyPool, name: &str, rank: u32, ranks: u32, bytes: u64) -> Result<Self, PoolError> {
        Ok(match pool {
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

    /// [`Window::join`].
    ///
    /// # Errors
    /// As there.
    pub fn join(&mut self) -> Result<(), PoolError> {
        each_window!(self, window => window.join())
    }

    /// [`Window::address`].
    ///
    /// # Errors
    /// As there.
    pub fn address(&self, rank: u32) -> Result<Option<*mut u8>, PoolError> {
        each_window!(self, window => window.address(rank))
    }

    /// [`Window::put`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn put(&mut self, target: u32, offset: u64, from: &[u8]) -> Result<(), PoolError> {
        each_window!(self, window => window.put(target, offset, from))
    }

    /// [`Window::get`].
    ///
    /// # Errors
    /// As there.
    pub fn get(&self, target: u32, offset: u64, into: &mut [u8]) -> Result<(), PoolError> {
        each_window!(self, window => window.get(target, offset, into))
    }

    /// [`Window::flush`].
    #[inline]
    pub fn flush(&self) {
        each_window!(self, window => window.flush());
    }

    /// [`Window::update`].
    ///
    /// # Errors
    /// As there.
    pub fn update(
        &mut self,
        target: u32,
        offset: u64,
        bytes: u64,
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), PoolError> {
        each_window!(self, window => window.update(target, offset, bytes, change))
    }

    /// [`Window::expose`].
    ///
    /// # Errors
    /// As there.
    pub fn expose(&self, target: u32, offset: u64, bytes: u64) -> Result<(), PoolError> {
        each_window!(self, window => window.expose(target, offset, bytes))
    }

    /// [`Window::renew`].
    ///
    /// # Errors
    /// As there.
    pub fn renew(&self, target: u32, offset: u64, bytes: u64) -> Result<(), PoolError> {
        each_window!(self, window => window.renew(target, offset, bytes))
    }

    /// [`Window::try_lock`].
    ///
    /// # Errors
    /// As there.
    pub fn try_lock(&mut self, target: u32, access: Access) -> Result<bool, PoolError> {
        each_window!(self, window => window.try_lock(target, access))
    }

    /// [`Window::unlock`].
    pub fn unlock(&mut self, target: u32) {
        each_window!(self, window => window.unlock(target));
    }

    /// [`Window::post`].
    ///
    /// # Errors
    /// As there.
    pub fn post(&mut self, group: &[u32]) -> Result<(), PoolError> {
        each_window!(self, window => window.post(group))
    }

    /// [`Window::start`].
    ///
    /// # Errors
    /// As there.
    pub fn start(&mut self, group: &[u32]) -> Result<(), PoolError> {
        each_window!(self, window => window.start(group))
    }

    /// [`Window::try_start`].
    ///
    /// # Errors
    /// As there.
    pub fn try_start(&mut self) -> Result<bool, PoolError> {
        each_window!(self, window => window.try_start())
    }

    /// [`Window::complete`].
    ///
    /// # Errors
    /// As there.
    pub fn complete(&mut self) -> Result<(), PoolError> {
        each_window!(self, window => window.complete())
    }

    /// [`Window::try_wait`].
    ///
    /// # Errors
    /// As there.
    pub fn try_wait(&mut self) -> Result<bool, PoolError> {
        each_window!(self, window => window.try_wait())
    }
}
