//! Private memory in a pool of any of the memories that an edge meets.

use std::sync::Arc;

use polder_mem::{Coherent, Memory, Offset, Software, Wrapped};
use polder_pool::{PoolError, PrivateMemory};

use crate::each;
use crate::session::AnyPool;

/// Private memory in one of the pools that an edge meets. Dropping it gives it back.
#[derive(Debug)]
pub enum AnyPrivateMemory {
    /// The hardware keeps it coherent.
    Coherent(PrivateMemory<Coherent>),
    /// The program does.
    Software(PrivateMemory<Software>),
    /// Something is wrapped around either.
    Wrapped(PrivateMemory<Wrapped>),
}

macro_rules! each_held {
    ($any:expr, $held:ident => $body:expr) => {
        match $any {
            AnyPrivateMemory::Coherent($held) => $body,
            AnyPrivateMemory::Software($held) => $body,
            AnyPrivateMemory::Wrapped($held) => $body,
        }
    };
}

impl AnyPrivateMemory {
    /// [`PrivateMemory::take`].
    ///
    /// # Errors
    /// As there.
    pub fn take(pool: &AnyPool, number: u64, bytes: u64) -> Result<Self, PoolError> {
        Ok(match pool {
            AnyPool::Coherent(pool) => Self::Coherent(PrivateMemory::take(Arc::clone(pool), number, bytes)?),
            AnyPool::Software(pool) => Self::Software(PrivateMemory::take(Arc::clone(pool), number, bytes)?),
            AnyPool::Wrapped(pool) => Self::Wrapped(PrivateMemory::take(Arc::clone(pool), number, bytes)?),
        })
    }

    /// Where it begins: a multiple of 64.
    #[must_use]
    pub const fn at(&self) -> Offset {
        each_held!(self, held => held.at())
    }

    /// How long it is.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        each_held!(self, held => held.bytes())
    }

    /// Where it is mapped in `pool`, which it was taken from; `None` where nothing is, as in a shadow.
    #[must_use]
    pub fn address(&self, pool: &AnyPool) -> Option<*mut u8> {
        each!(pool, pool => pool.memory().address(self.at(), self.bytes()))
    }
}
