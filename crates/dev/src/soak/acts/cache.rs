//! Four processes share a cache of blocks whose bytes follow from their keys, so that each knows whether a block is right.

use std::sync::Arc;

use polder_mem::{AnyMemory, Memory};
use polder_pool::kv::{Cache, Identity, Key, Options};
use polder_pool::{Pool, PoolError};

use super::super::scene::{Dice, Round};
use super::{Actor, die, instruments};
use crate::Failure;

/// Bytes of a block: some lines, and no whole number of them.
const BLOCK: usize = 1000;
/// Four slabs of 14 blocks.
const BUDGET: u64 = 64 << 10;
/// Blocks that there are: more than the cache holds.
const BLOCKS: u64 = 96;
/// Blocks beyond those, which one process alone puts.
const KEPT: [u64; 3] = [BLOCKS, BLOCKS + 1, BLOCKS + 2];
/// Calls of each process.
const CALLS: usize = 12;

fn name(round: &Round) -> String {
    format!("victim-{}", round.number)
}

pub(super) fn open(pool: &Arc<Pool<AnyMemory>>, round: &Round) -> Result<Cache<AnyMemory>, PoolError> {
    let identity = Identity { hash: [7; 32], text: "soak".to_owned(), block: BLOCK as u32 };
    let options = Options { budget: Some(BUDGET), verify: false };
    Cache::open(Arc::clone(pool), &name(round), identity, options)
}

fn key(block: u64) -> Key {
    let mut dice = Dice(block);
    (u128::from(dice.draw()) << 64 | u128::from(dice.draw())).to_le_bytes()
}

fn bytes(block: u64) -> Vec<u8> {
    Dice(!block).bytes(BLOCK)
}

/// Puts, gets and pins some blocks, until it dies.
pub(super) fn share(actor: &mut Actor<'_>, round: &Round, rank: usize) -> Result<(), Failure> {
    let memory = actor.pool.memory();
    let first = instruments(memory).operations();
    instruments(memory).arm(round.fate.trigger());
    let cache = open(actor.pool, round)?;
    let mut dice = Dice(round.seed ^ (rank as u64 + 1) << 32);
    for _ in 0..CALLS {
        let blocks: Vec<_> = (0..1 + dice.draw() % 4).map(|_| dice.draw() % BLOCKS).collect();
        match dice.draw() % 6 {
            0..3 => put(&cache, &blocks).map(drop)?,
            3 => pin(&cache, &blocks)?,
            _ => get(&cache, &blocks).map(drop)?,
        }
    }
    drop(cache);
    actor.wire.say(&format!("total {}", instruments(memory).operations() - first))?;
    die(memory)
}

/// Stores blocks; how many had no room.
fn put(cache: &Cache<AnyMemory>, blocks: &[u64]) -> Result<u64, Failure> {
    let keys: Vec<_> = blocks.iter().map(|block| key(*block)).collect();
    let blocks: Vec<_> = blocks.iter().map(|block| bytes(*block)).collect();
    let blocks: Vec<_> = blocks.iter().map(Vec::as_slice).collect();
    Ok(cache.put(&keys, &blocks)?.refused)
}

/// Reads blocks; which of them were there.
fn get(cache: &Cache<AnyMemory>, blocks: &[u64]) -> Result<Vec<bool>, Failure> {
    let keys: Vec<_> = blocks.iter().map(|block| key(*block)).collect();
    let mut buffers = vec![vec![0; BLOCK]; blocks.len()];
    let mut into: Vec<_> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    let present = cache.get(&keys, &mut into)?;
    for ((block, read), _) in blocks.iter().zip(&buffers).zip(&present).filter(|(_, present)| **present) {
        expect(*block, read)?;
    }
    Ok(present)
}

/// Pins blocks, and reads those that are there where they lie.
fn pin(cache: &Cache<AnyMemory>, blocks: &[u64]) -> Result<(), Failure> {
    let keys: Vec<_> = blocks.iter().map(|block| key(*block)).collect();
    let pin = cache.pin(&keys)?;
    for (index, block) in blocks.iter().enumerate() {
        let Some(at) = pin.block(index) else { continue };
        let mut read = vec![0; BLOCK];
        cache.pool().memory().copy_out(at, &mut read).map_err(PoolError::from)?;
        expect(*block, &read)?;
    }
    Ok(())
}

fn expect(block: u64, read: &[u8]) -> Result<(), Failure> {
    match *read == bytes(block) {
        true => Ok(()),
        false => Err(Failure(format!("block {block} has another's bytes"))),
    }
}

/// No block is wrong, and the budget holds. Once the hosts have `repaired` what the dead left, no key is blocked and none is pinned.
pub(super) fn judge(actor: &Actor<'_>, round: &Round, repaired: bool) -> Result<(), Failure> {
    let cache = open(actor.pool, round)?;
    let all: Vec<_> = (0..BLOCKS).collect();
    get(&cache, &all)?;
    let stat = cache.stat()?;
    if stat.claimed > stat.budget {
        return Err(Failure(format!("slabs take {} bytes of {}", stat.claimed, stat.budget)));
    }
    let me = actor.pool.member().host;
    let has_slabs = stat.hosts.iter().any(|part| part.host == me && part.claimed > 0);
    for block in all.iter().filter(|_| repaired && has_slabs) {
        if put(&cache, &[*block])? > 0 || get(&cache, &[*block])? != [true] {
            return Err(Failure(format!("block {block} is blocked by what the dead left: {stat:?}")));
        }
    }
    Ok(())
}

pub(super) fn keep(pool: &Arc<Pool<AnyMemory>>, round: &Round) -> Result<(), Failure> {
    match put(&open(pool, round)?, &KEPT)? {
        0 => Ok(()),
        refused => Err(Failure(format!("{refused} blocks had no room in an empty cache"))),
    }
}

pub(super) fn find_kept(pool: &Arc<Pool<AnyMemory>>, round: &Round) -> Result<(), Failure> {
    let present = get(&open(pool, round)?, &KEPT)?;
    match present.iter().all(|present| *present) {
        true => Ok(()),
        false => Err(Failure(format!("of the blocks of a host that is dead, {present:?} are there"))),
    }
}

pub(super) fn give_up(pool: &Arc<Pool<AnyMemory>>, round: &Round) -> Result<(), Failure> {
    let given = Cache::give_up_part(pool, &name(round))?;
    let me = pool.member().host;
    let left = open(pool, round)?.stat()?.hosts.into_iter().find(|part| part.host == me);
    match (given.kept, left.map_or(0, |part| part.claimed)) {
        (0, 0) => Ok(()),
        (kept, claimed) => Err(Failure(format!(
            "host {me} was to give up all slabs, keeps {kept} and has {claimed} bytes still"
        ))),
    }
}

pub(super) fn remove(pool: &Pool<AnyMemory>, round: &Round) -> Result<(), Failure> {
    Ok(Cache::remove(pool, &name(round))?)
}
