//! The bytes that say what a version is.
//!
//! # Words of a head
//! | word | what |
//! |---|---|
//! | 0 | number of the version |
//! | 1 | bits 0..56 generation of the object, bits 56..64 its owner |
//! | 2 | bytes of the manifest |
//! | 3..5 | XXH3-128 of the manifest, the low word first |
//! | 5 | word of the attempt that published it; 0 for one that belongs to none |
//! | 6 | 0 |
//!
//! # Bytes of a manifest
//! | bytes | what |
//! |---|---|
//! | 4 | how many other objects it refers to |
//! | 4 | how many tensors it has |
//! | 24 each | for each other object: number of its version, word 1 of its head, its bytes of tensors |
//! | 40 and the name, each | for each tensor: 4 bytes in the name, 4 the object (0 this one, then the others from 1), 8 its first byte there, 8 bytes, 16 XXH3-128, then the name |

use std::collections::BTreeMap;

use polder_mem::{LINE, Memory};
use twox_hash::XxHash3_128;

use crate::entry::halves;
use crate::object::{GENERATION_BITS, Object};
use crate::{PoolError, line};

/// The line of the head.
pub(super) const HEAD_LINE: u64 = 1;
/// The first line of the manifest.
pub(super) const MANIFEST_LINE: u64 = 2;

const PREFIX: usize = 8;
const OTHER: usize = 24;
const TENSOR: usize = 40;

/// Which object it is, of all that there ever were.
pub(super) const fn stamp(object: &Object) -> u64 {
    object.generation() | (object.owner() as u64) << GENERATION_BITS
}

/// Where the first tensor begins, behind a manifest of so many bytes.
pub(super) const fn start(manifest_bytes: u64) -> u64 {
    (MANIFEST_LINE + manifest_bytes.div_ceil(LINE)) * LINE
}

/// What makes an object a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) manifest_bytes: u64,
    /// Of the manifest.
    pub(super) sum: u128,
    /// The attempt that published it, or 0.
    pub(super) attempt: u64,
}

impl Head {
    /// Of this manifest.
    pub(super) fn of(manifest: &[u8], attempt: u64) -> Self {
        Self { manifest_bytes: manifest.len() as u64, sum: XxHash3_128::oneshot(manifest), attempt }
    }

    /// Publishes it; once this returns, the version is in memory, and every reader finds it.
    // SYNC: pairs with `Head::read`.
    pub(super) fn publish<M: Memory>(&self, memory: &M, object: &Object, number: u64) {
        let [low, high] = halves(self.sum);
        let words = [number, stamp(object), self.manifest_bytes, low, high, self.attempt, 0];
        line::publish_and_fence(memory, object.at().lines(HEAD_LINE), &words);
    }

    /// The head of this object, if it has one.
    pub(super) fn read<M: Memory>(
        memory: &M,
        object: &Object,
        number: u64,
    ) -> Result<Option<Self>, PoolError> {
        if object.bytes() < MANIFEST_LINE * LINE {
            return Err(PoolError::Corrupt { offset: object.at(), what: "object of a version" });
        }
        // What was there before, or is being written, is none.
        let Some(words) = line::read(memory, object.at().lines(HEAD_LINE))? else { return Ok(None) };
        let [of, mark, manifest_bytes, low, high, attempt, _] = words;
        let sum = u128::from(low) | u128::from(high) << 64;
        Ok(((of, mark) == (number, stamp(object))).then_some(Self { manifest_bytes, sum, attempt }))
    }
}

/// Where the bytes of a tensor lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    /// 0 the version's own, then the others from 1.
    pub(super) object: u32,
    /// From the object's first byte.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) sum: u128,
}

/// An object of an earlier version that holds tensors of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Other {
    /// The number of its version.
    pub(super) number: u64,
    pub(super) stamp: u64,
    /// Bytes of tensors in it, whether they are still in use or not.
    pub(super) bytes: u64,
}

/// The tensors of a version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) others: Vec<Other>,
    pub(super) tensors: BTreeMap<String, Tensor>,
}

impl Manifest {
    /// The bytes of one that refers to so many other objects and has tensors of these names.
    pub(super) fn bytes<'a>(others: usize, names: impl Iterator<Item = &'a str>) -> u64 {
        (PREFIX + others * OTHER + names.map(|name| TENSOR + name.len()).sum::<usize>()) as u64
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![];
        bytes.extend((self.others.len() as u32).to_le_bytes());
        bytes.extend((self.tensors.len() as u32).to_le_bytes());
        for other in &self.others {
            bytes.extend([other.number, other.stamp, other.bytes].map(u64::to_le_bytes).as_flattened());
        }
        for (name, tensor) in &self.tensors {
            bytes.extend((name.len() as u32).to_le_bytes());
            bytes.extend(tensor.object.to_le_bytes());
            bytes.extend(tensor.offset.to_le_bytes());
            bytes.extend(tensor.bytes.to_le_bytes());
            bytes.extend(tensor.sum.to_le_bytes());
            bytes.extend(name.as_bytes());
        }
        bytes
    }

    /// `None` for bytes that no writer writes.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut take = |count: usize| {
            let (taken, after) = rest.split_at_checked(count)?;
            rest = after;
            Some(taken)
        };
        let counts = word(take(PREFIX)?)?;
        let (others, tensors) = (counts as u32, (counts >> 32) as u32);
        let mut manifest = Self::default();
        for _ in 0..others {
            let other = take(OTHER)?;
            let (number, stamp, bytes) = (word(other)?, word(&other[8..])?, word(&other[16..])?);
            manifest.others.push(Other { number, stamp, bytes });
        }
        for _ in 0..tensors {
            let entry = take(TENSOR)?;
            let (length, object) = (word(entry)? as u32, (word(entry)? >> 32) as u32);
            let (offset, bytes) = (word(&entry[8..])?, word(&entry[16..])?);
            let sum = u128::from(word(&entry[24..])?) | u128::from(word(&entry[32..])?) << 64;
            let name = String::from_utf8(take(length as usize)?.to_vec()).ok()?;
            if object > others
                || manifest.tensors.insert(name, Tensor { object, offset, bytes, sum }).is_some()
            {
                return None;
            }
        }
        rest.is_empty().then_some(manifest)
    }
}

fn word(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?))
}
