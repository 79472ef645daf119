//! Reading versions.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use polder_mem::{Fault, LINE, Memory, Offset};
use twox_hash::XxHash3_128;

use super::manifest::{HEAD_LINE, MANIFEST_LINE, Manifest, Tensor};
use super::{Found, MANIFEST, Store};
use crate::deviation::Deviation;
use crate::list::ListedObject;
use crate::object::Object;
use crate::pieces::{PIECE_BYTES, pieces};
use crate::pool::locked;
use crate::{Pool, PoolError, word};

/// A whole version. What it holds stays where it is until it is dropped.
#[derive(Debug)]
pub struct Version<M: Memory> {
    pub(super) pool: Arc<Pool<M>>,
    pub(super) number: u64,
    pub(super) attempt: u64,
    /// Bytes of tensors in its own object.
    pub(super) own_bytes: u64,
    /// Its own object, and the others that its manifest names, in that order.
    pub(super) held: Vec<Object>,
    pub(super) manifest: Manifest,
    /// The tensors that matched their checksums.
    pub(super) checked: Mutex<BTreeSet<String>>,
}

/// What a store keeps.
#[derive(Debug)]
pub struct Kept<M: Memory> {
    /// The whole versions, the newest first.
    pub versions: Vec<Version<M>>,
    /// The numbers of damaged versions, the newest first, and what is damaged; the highest number there is for the marks.
    pub damaged: Vec<(u64, PoolError)>,
}

impl<M: Memory> Store<M> {
    /// The newest version.
    ///
    /// # Errors
    /// [`PoolError::NoVersion`] when there is none; [`PoolError::Corrupt`] when it is damaged, and a writer's next version
    /// is whole again; those of [`Pool::list`] and [`Pool::open`].
    pub fn newest(&self) -> Result<Version<M>, PoolError> {
        let Kept { versions, damaged } = self.look(true)?;
        let newest = versions.into_iter().next();
        match damaged.into_iter().next() {
            Some((number, error)) if newest.as_ref().is_none_or(|newest| newest.number < number) => {
                Err(error)
            }
            _ => newest.ok_or_else(|| self.no_version(None)),
        }
    }

    /// All versions, held open. The newest among them is not older than any that was published before the call.
    ///
    /// # Errors
    /// Those of [`Pool::list`] and [`Pool::open`]. Damage is none.
    pub fn kept(&self) -> Result<Kept<M>, PoolError> {
        self.look(false)
    }

    fn look(&self, only_newest: bool) -> Result<Kept<M>, PoolError> {
        let memory = self.pool.memory();
        let deadline = memory.now() + self.pool.member().timeout;
        let (due, damage) = match self.marked() {
            Err(error @ PoolError::Corrupt { .. }) => (0, Some((u64::MAX, error))),
            marked => (marked?, None),
        };
        let mut due = if Deviation::NewestByList.is_on() { 0 } else { due };
        loop {
            // A list misses what is published after it began, and so may miss all that was there before.
            let (mut kept, mut is_missing) = (Kept { versions: vec![], damaged: vec![] }, false);
            kept.damaged.extend(damage.clone());
            for (number, listed) in self.listed()? {
                match self.find_listed(number, &listed, due) {
                    Ok(Found::Whole(version)) => kept.versions.push(version),
                    Ok(Found::Unpublished(object)) => self.pool.close(object),
                    // A newer version is there.
                    Ok(Found::Gone) => is_missing |= kept.versions.is_empty(),
                    Err(error @ PoolError::Corrupt { .. }) => kept.damaged.push((number, error)),
                    Err(error) => return Err(error),
                }
                if is_missing || only_newest && !kept.versions.is_empty() {
                    break;
                }
            }
            let damaged = kept.damaged.last().map_or(0, |(number, _)| *number);
            let newest = kept.versions.first().map_or(0, |version| version.number).max(damaged);
            if newest >= due && !is_missing {
                return Ok(kept);
            }
            if memory.now() > deadline {
                return Ok(Kept { versions: vec![], damaged: kept.damaged });
            }
            // Who clears a store takes the marks away first.
            due = due.min(self.marked().unwrap_or(due));
            memory.pause();
        }
    }

    /// As [`Store::find`] of what was listed; a version that is due and has no head is damaged.
    fn find_listed(&self, number: u64, listed: &ListedObject, due: u64) -> Result<Found<M>, PoolError> {
        match self.open_listed(listed)?.map(|object| self.find(number, object)) {
            None => Ok(Found::Gone),
            Some(Ok(Found::Unpublished(object))) if number == due => {
                let offset = object.at().lines(HEAD_LINE);
                self.pool.close(object);
                Err(PoolError::Corrupt { offset, what: "head of a version" })
            }
            Some(found) => found,
        }
    }

    /// The highest number that a writer has marked as published; 0 when none has. It costs no look at what is there.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when the marks are damaged; those of [`Pool::open`].
    pub fn marked(&self) -> Result<u64, PoolError> {
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

    /// The attempt that published it, as [`Attempt`](super::Attempt) names it; 0 for one that belongs to none.
    #[must_use]
    pub const fn attempt(&self) -> u64 {
        self.attempt
    }

    /// The names and sizes in bytes of its tensors, in the order of the names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, u64)> {
        self.manifest.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.bytes))
    }

    /// The names of its tensors and the XXH3-128 of each, in the order of the names.
    pub fn sums(&self) -> impl Iterator<Item = (&str, u128)> {
        self.manifest.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.sum))
    }

    /// Fills `into` with the bytes of a tensor, and holds them against their checksum.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when it has no tensor of this name and this size; [`PoolError::Corrupt`] when the bytes are
    /// not those that were written; [`PoolError::Memory`]. `into` holds nothing of use after an error.
    // SYNC: pairs with the writer's copy: the head, which was seen, came after it.
    pub fn read(&self, name: &str, into: &mut [u8]) -> Result<(), PoolError> {
        let expected = "a name that the version has, and the size that it has there";
        let tensor = self.manifest.tensors.get(name).filter(|tensor| tensor.bytes == into.len() as u64);
        let tensor = tensor.ok_or_else(|| not_there(name, into.len(), expected))?;
        let memory = self.pool.memory();
        self.sum(tensor, |from, piece, hash| {
            let piece = &mut into[piece];
            memory.copy_out(from, piece)?;
            hash.write(piece);
            Ok(())
        })
    }

    /// Fills `into` with rows of a tensor, of `row` bytes each. The first begins at byte `first`, and each begins `stride` bytes after the one
    /// before. The first call for a tensor reads all of it, to hold it against its checksum.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for rows that are not inside the tensor or do not fill `into`; otherwise those of [`Version::read`].
    // SYNC: pairs with the writer's copy, in `sum`: what was right once is right for as long as the version is held.
    pub fn read_rows(
        &self,
        name: &str,
        first: u64,
        [row, stride]: [u64; 2],
        into: &mut [u8],
    ) -> Result<(), PoolError> {
        let expected = "a name that the version has, and whole rows inside the tensor";
        let rows = (into.len() as u64).checked_div(row).filter(|rows| rows * row == into.len() as u64);
        let end = rows.and_then(|rows| rows.saturating_sub(1).checked_mul(stride));
        let end = end.and_then(|last| last.checked_add(row)?.checked_add(first));
        let tensor =
            self.manifest.tensors.get(name).filter(|tensor| end.is_some_and(|end| end <= tensor.bytes));
        let tensor = tensor.ok_or_else(|| not_there(name, into.len(), expected))?;
        let memory = self.pool.memory();
        if !locked(&self.checked).contains(name) {
            let mut scratch = vec![0; PIECE_BYTES.min(tensor.bytes as usize)];
            self.sum(tensor, |from, piece, hash| {
                let piece = &mut scratch[..piece.len()];
                memory.copy_out(from, piece)?;
                hash.write(piece);
                Ok(())
            })?;
            locked(&self.checked).insert(name.to_owned());
        }
        let mut from = self.at(tensor) + first;
        for piece in into.chunks_exact_mut(row as usize) {
            memory.copy_out(from, piece)?;
            from = from + stride;
        }
        Ok(())
    }

    /// Has a tensor copied piece by piece, and holds it against its checksum. `copy` is told where in the pool a piece begins, and which bytes
    /// of the tensor it has.
    // SYNC: pairs with the writer's copy, as in `read`.
    fn sum(
        &self,
        tensor: &Tensor,
        mut copy: impl FnMut(Offset, Range<usize>, &mut XxHash3_128) -> Result<(), Fault>,
    ) -> Result<(), PoolError> {
        let (memory, at) = (self.pool.memory(), self.at(tensor));
        // What this host saw of the object that lay there before.
        memory.invalidate(at, tensor.bytes);
        // SYNC: pairs with the writer's copy, as above.
        memory.fence_invalidations();
        let (mut hash, bytes) = (XxHash3_128::new(), tensor.bytes as usize);
        for piece in pieces(bytes) {
            copy(at + piece.start as u64, piece, &mut hash)?;
        }
        match hash.finish_128() == tensor.sum {
            true => Ok(()),
            false => Err(PoolError::Corrupt { offset: at, what: "tensor of a version" }),
        }
    }

    fn at(&self, tensor: &Tensor) -> Offset {
        self.held[tensor.object as usize].at() + tensor.offset
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

fn not_there(name: &str, bytes: usize, expected: &'static str) -> PoolError {
    PoolError::Argument { what: "the tensor", value: format!("{name:?} of {bytes} bytes"), expected }
}

impl<M: Memory> Drop for Version<M> {
    fn drop(&mut self) {
        for object in self.held.drain(..) {
            self.pool.close(object);
        }
    }
}
