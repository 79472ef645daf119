//! Looks for damaged blocks from outside: nothing is written, and no byte is trusted.

use std::hash::Hasher;

use polder_mem::{LINE, Memory, Offset};
use serde::Serialize;
use twox_hash::XxHash3_64;

use super::stat::{control_from_outside, named, refresh, slab_of};
use super::wire::{Entry, SlabHead, State};
use crate::deviation::Deviation;
use crate::inspect::{Inspection, ObjectStat};
use crate::line::{self, Words};
use crate::pieces::{PIECE_BYTES, pieces};
use crate::{PoolError, inspect as inspect_pool};

/// How often a line is read that another process may be writing.
const LOOKS: u32 = 1000;

/// What a check found in a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheCheck {
    /// Its name.
    pub name: String,
    /// Blocks that are there.
    pub blocks: u64,
    /// Of these, blocks with a checksum, whose bytes were read.
    pub read: u64,
    /// What is damaged.
    pub damaged: Vec<DamagedSlot>,
    /// Hosts for which there was no slab when they last asked for one.
    pub want_room: Vec<u16>,
}

/// A slot whose line or whose block is damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DamagedSlot {
    /// The host of the slab.
    pub host: u16,
    /// The slab.
    pub slab: u32,
    /// The slot in it.
    pub slot: u32,
    /// Where its damage lies in the pool: its line, or its block.
    pub offset: u64,
    /// What is wrong.
    pub what: &'static str,
}

/// Reads the lines of all slots of each cache, and the blocks with a checksum. What changes meanwhile is passed over.
///
/// # Errors
/// Those of [`inspect`](crate::inspect()).
pub fn check<M: Memory>(memory: &M) -> Result<Vec<CacheCheck>, PoolError> {
    let Inspection { objects, .. } = inspect_pool(memory)?;
    let caches = named(&objects).into_iter();
    let checked = caches.map(|(name, objects)| {
        let (damaged, want_room) = (vec![], vec![]);
        let mut found = CacheCheck { name: name.to_owned(), blocks: 0, read: 0, damaged, want_room };
        for (rest, object) in objects {
            match slab_of(rest) {
                Some(place) => check_slab(memory, place, object, &mut found)?,
                None if rest.is_empty() => found.want_room = hosts_in_want(memory, object)?,
                None => {}
            }
        }
        Ok(found)
    });
    checked.collect()
}

/// The hosts for which there was no slab, as the control lines behind a root say; what is no control line says nothing.
fn hosts_in_want<M: Memory>(memory: &M, root: &ObjectStat) -> Result<Vec<u16>, PoolError> {
    let mut hosts = vec![];
    for host in (0..u16::MAX).take((root.bytes / LINE).saturating_sub(1) as usize) {
        let control = control_from_outside(memory, root.at.lines(1 + u64::from(host)))?.flatten();
        hosts.extend(control.is_some_and(|control| control.asked > 0).then_some(host));
    }
    Ok(hosts)
}

/// Nothing is looked at in a slab that is being made, and nothing is told of one that is gone meanwhile.
fn check_slab<M: Memory>(
    memory: &M,
    (host, slab): (u16, u32),
    object: &ObjectStat,
    all: &mut CacheCheck,
) -> Result<(), PoolError> {
    let words = if object.bytes < LINE { None } else { line::read(memory, object.at)? };
    let head = words.and_then(|words| SlabHead::decode(&words, words[3], words[4]));
    let Some(head) = head.filter(|head| head.bytes() <= object.bytes) else { return Ok(()) };
    let (mut blocks, mut read, mut damaged) = (0, 0, vec![]);
    for slot in 0..head.slots {
        let at = object.at.lines(1 + u64::from(slot));
        let block = object.at.lines(1 + u64::from(head.slots)) + u64::from(slot) * head.stride();
        let mut damage = |offset: Offset, what| {
            damaged.push(DamagedSlot { host, slab, slot, offset: offset.0, what });
        };
        let Some(words) = settled(memory, at)? else {
            damage(at, "its line is torn, and its slot free");
            continue;
        };
        match Entry::decode(&words) {
            None => damage(at, "its line has a state that there is not"),
            Some(entry) if entry.state != State::Live => {}
            Some(entry) if (entry.host, entry.slab, entry.bytes) != (host, slab, head.block) => {
                damage(at, "its line is of another place");
            }
            Some(entry) => {
                blocks += 1;
                read += u64::from(entry.sum != 0);
                if entry.sum != 0 && !is_whole(memory, &entry, block) && is_still(memory, at, &words)? {
                    damage(block, "its block does not match its checksum");
                }
            }
        }
    }
    // What is damaged in a slab that has gone is of whatever has its place now.
    if damaged.is_empty() || object.stands(memory)? {
        all.blocks += blocks;
        all.read += read;
        all.damaged.append(&mut damaged);
    }
    Ok(())
}

/// Whether a block matches its checksum; memory that fails does not.
// SYNC: pairs with `Cache::publish`: the block was in memory before its line was.
fn is_whole<M: Memory>(memory: &M, entry: &Entry, block: Offset) -> bool {
    let bytes = u64::from(entry.bytes);
    refresh(memory, block, bytes);
    let (mut hash, mut copy) = (XxHash3_64::new(), [0; PIECE_BYTES]);
    for piece in pieces(bytes as usize) {
        let copy = &mut copy[..piece.len()];
        if memory.copy_out(block + piece.start as u64, copy).is_err() {
            return false;
        }
        hash.write(copy);
    }
    hash.finish().max(1) == entry.sum
}

/// A slot's line; nothing where it stays torn, as a process that died leaves it.
fn settled<M: Memory>(memory: &M, at: Offset) -> Result<Option<Words>, PoolError> {
    for _ in 0..LOOKS {
        if let Some(words) = line::read(memory, at)? {
            return Ok(Some(words));
        }
        memory.pause();
    }
    Ok(None)
}

/// The second look: whether a slot's line says what it said before its block was read.
// SYNC: pairs with `Cache::take`, as the second look of `Cache::get`.
fn is_still<M: Memory>(memory: &M, at: Offset, words: &Words) -> Result<bool, PoolError> {
    // HARMLESS(fence_invalidations -> sfence -> drop) in the model, where loads are done in order; elsewhere as in `Cache::get`.
    memory.fence_invalidations();
    Ok(Deviation::LooksOnce.is_on() || line::read(memory, at)?.as_ref() == Some(words))
}
