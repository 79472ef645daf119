//! Reading versions.

use std::sync::Arc;

use polder_mem::{LINE, Memory};
use xxhash_rust::xxh3::Xxh3;

use super::manifest::{MANIFEST_LINE, Manifest, Tensor};
use super::{Found, MANIFEST, Store};
use crate::object::Object;
use crate::{Pool, PoolError, word};

/// What is copied is summed while it is in the caches.
const PIECE_BYTES: usize = 128 << 10;

/// A whole version. What it holds stays where it is until it is dropped.
#[derive(Debug)]
pub struct Version<M: Memory> {
    pub(super) pool: Arc<Pool<M>>,
    pub(super) number: u64,
    /// Bytes of tensors in its own object.
    pub(super) own_bytes: u64,
    /// Its own object, and the others that its manifest names, in that order.
    pub(super) held: Vec<Object>,
    pub(super) manifest: Manifest,
}

impl<M: Memory> Store<M> {
    /// The newest version.
    ///
    /// # Errors
    /// [`PoolError::NoVersion`] when there is none; [`PoolError::Corrupt`] when its manifest is damaged, and a writer's next version
    /// is whole again; those of [`Pool::list`] and [`Pool::open`].
    pub fn newest(&self) -> Result<Version<M>, PoolError> {
        let memory = self.pool.memory();
        let deadline = memory.now() + self.pool.member().timeout;
        let due = self.marked()?;
        loop {
            // A list misses what is published after it began, and so may miss all that was there before.
            let mut is_over = due == 0;
            for (number, listed) in self.listed()? {
                let found = match self.open_listed(&listed)? {
                    Some(object) => self.find(number, object)?,
                    None => Found::Gone,
                };
                match found {
                    Found::Whole(version) if number >= due => return Ok(version),
                    Found::Unpublished(object) => self.pool.close(object),
                    // A newer version is there.
                    Found::Whole(_) | Found::Gone => {
                        is_over = false;
                        break;
                    }
                }
            }
            if is_over || memory.now() > deadline {
                return Err(self.no_version(None));
            }
            memory.pause();
        }
    }

    /// The highest number that a writer has marked as published; 0 when none has.
    pub(crate) fn marked(&self) -> Result<u64, PoolError> {
        let Some(marks) = self.marks()? else { return Ok(0) };
        let marked = self.marked_in(&marks);
        self.pool.close(marks);
        marked
    }

    // SYNC: pairs with `mark`.
    pub(crate) fn marked_in(&self, marks: &Object) -> Result<u64, PoolError> {
        let memory = self.pool.memory();
        // What this host saw of them before.
        memory.invalidate(marks.at(), self.marks_bytes());
        memory.fence_invalidations();
        let mut highest = 0;
        for host in 0..self.marks_bytes() / LINE {
            let offset = marks.at().lines(host);
            let corrupt = PoolError::Corrupt { offset, what: "marks of a store" };
            highest = highest.max(word::open(memory.load(offset)?).ok_or(corrupt)?);
        }
        Ok(highest)
    }

    /// The version of this number.
    ///
    /// # Errors
    /// [`PoolError::NoVersion`] when it is not kept; [`PoolError::Corrupt`] when its manifest is damaged; those of [`Pool::open`].
    pub fn open(&self, number: u64) -> Result<Version<M>, PoolError> {
        if let Some(object) = self.pool.open_if_there(&self.object_name(number))? {
            match self.find(number, object)? {
                Found::Whole(version) => return Ok(version),
                Found::Unpublished(object) => self.pool.close(object),
                Found::Gone => {}
            }
        }
        Err(self.no_version(Some(number)))
    }
}

impl<M: Memory> Version<M> {
    /// Its number; the first version of a store has number 1.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The names and sizes in bytes of its tensors, in the order of the names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, u64)> {
        self.manifest.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.bytes))
    }

    /// Fills `into` with the bytes of a tensor, and holds them against their checksum.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when it has no tensor of this name and this size; [`PoolError::Corrupt`] when the bytes are
    /// not those that were written; [`PoolError::Memory`]. `into` holds nothing of use after an error.
    // SYNC: pairs with the writer's copy: the head, which was seen, came after it.
    pub fn read(&self, name: &str, into: &mut [u8]) -> Result<(), PoolError> {
        let Some(tensor) = self.manifest.tensors.get(name).filter(|tensor| tensor.bytes == into.len() as u64)
        else {
            return Err(PoolError::Argument {
                what: "the tensor",
                value: format!("{name:?} of {} bytes", into.len()),
                expected: "a name that the version has, and the size that it has there",
            });
        };
        let (memory, at) = (self.pool.memory(), self.held[tensor.object as usize].at() + tensor.offset);
        // What this host saw of the object that lay there before.
        memory.invalidate(at, tensor.bytes);
        memory.fence_invalidations();
        let (mut hash, mut from) = (Xxh3::new(), at);
        for piece in into.chunks_mut(PIECE_BYTES) {
            memory.copy_out(from, piece)?;
            hash.update(piece);
            from = from + PIECE_BYTES as u64;
        }
        match hash.digest128() == tensor.sum {
            true => Ok(()),
            false => Err(PoolError::Corrupt { offset: at, what: "tensor of a version" }),
        }
    }

    /// Whether all tensors lie inside the objects that are held.
    pub(super) fn check(&self) -> Result<(), PoolError> {
        let is_inside = |tensor: &Tensor| {
            let end = tensor.offset.checked_add(tensor.bytes);
            let object = self.held.get(tensor.object as usize);
            object.zip(end).is_some_and(|(object, end)| end <= object.bytes())
        };
        let offset = self.held[0].at().lines(MANIFEST_LINE);
        self.manifest
            .tensors
            .values()
            .all(is_inside)
            .then_some(())
            .ok_or(PoolError::Corrupt { offset, what: MANIFEST })
    }
}

impl<M: Memory> Drop for Version<M> {
    fn drop(&mut self) {
        for object in self.held.drain(..) {
            self.pool.close(object);
        }
    }
}
