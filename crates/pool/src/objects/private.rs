//! Private memory: bytes of the pool that one process alone writes. Others read in place what it sends from there.
//!
//! It is the object `/memory/JOB/HOST.PID.NUMBER`. Its process alone stores there.
//!
//! # Object of private memory
//! | line | what |
//! |---|---|
//! | 0 | identity of its process |
//! | from 1 on | the bytes |

use std::sync::Arc;

use polder_mem::{LINE, Memory, Offset};

use crate::object::Object;
use crate::owned::{self, Kind};
use crate::{Pool, PoolError};

/// The name of what a process of a host has, by a number of its own.
pub(crate) fn private_name(job: u64, host: u16, pid: u32, number: u64) -> String {
    format!("/memory/{job}/{host}.{pid}.{number}")
}

/// Private memory. Dropping it gives it back.
#[derive(Debug)]
pub struct PrivateMemory<M: Memory> {
    pool: Arc<Pool<M>>,
    object: Option<Object>,
    at: Offset,
    bytes: u64,
}

impl<M: Memory> PrivateMemory<M> {
    /// Takes `bytes` zeros under a number that this process has not given to what it still has.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when there are not so many bytes; those of [`Pool::create`].
    pub fn take(pool: Arc<Pool<M>>, number: u64, bytes: u64) -> Result<Self, PoolError> {
        let total = bytes.checked_add(LINE).ok_or_else(|| PoolError::Argument {
            what: "the memory",
            value: format!("{bytes} bytes"),
            expected: "ask for less",
        })?;
        let member = pool.member();
        let name = private_name(member.job, member.host, member.pid, number);
        let object = owned::create(&pool, &name, total, Kind::Private, [0; 3])?;
        let at = object.at() + LINE;
        Ok(Self { pool, object: Some(object), at, bytes })
    }

    /// Where it begins: a multiple of 64.
    #[must_use]
    pub const fn at(&self) -> Offset {
        self.at
    }

    /// How long it is.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl<M: Memory> Drop for PrivateMemory<M> {
    fn drop(&mut self) {
        if let Some(object) = self.object.take() {
            self.pool.abandon(object);
        }
    }
}
