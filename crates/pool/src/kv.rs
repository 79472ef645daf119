//! A cache of blocks: keys and values of attention that several serving engines share.
//!
//! Blocks are written once and named by their contents: the engine's hash of the tokens, mixed with the identity of what computed
//! them. So two hosts that store one key both succeed, and no host waits for another. Each host has slabs of slots, a line for each
//! slot, and a log. One host alone writes each of these lines. A process finds blocks by an index in its own memory, its replica:
//! it reads the lines of all slots once, and the logs from then on. Three invariants carry everything:
//!
//! 1. **The name comes last.** A slot's line says that a block is there once the block is in memory, and the log says so after the line.
//! 2. **Taken before written.** A slot's line says that it is taken before a byte of the next block is written there.
//! 3. **Looked at twice.** A reader reads the slot's line, the block, and the line again. A line that has changed makes the copy void.
//!    So a reader holds nothing, and one that stops for an hour in the middle takes no wrong byte.
//!
//! A host's slots are filled in order. When the budget allows no further slab, the oldest block that was not read since makes room. Each host
//! counts its hits in lines of its own, for the owner of the slot to see. A host that has less than
//! its part of the budget says that it wants some, and hosts that have more give up the slab that they come to next. What a dead process
//! had taken is free: its lines say who took it. A process that dies while it changes the host's part leaves a mark in the control line.
//! The next one reads the slabs and the log again, and leaves out as many sequence numbers as the log has lines. That sends each
//! reader back to the lines of the slots, so it misses nothing that the dead one logged in part.
//!
//! A reader that does not copy pins blocks: [`Cache::pin`]. The room of a host that is gone comes back by [`Cache::give_up_part`]. While
//! others want it, the keeper has it given to them: [`wanted_parts`], [`Cache::give_to_living`].
//!
//! # Objects
//! | name | what |
//! |---|---|
//! | `/kv/NAME` | line 0 the root; line `1 + H` the control line of host `H` |
//! | `/kv/NAME/id/HASH` | an identity: a line with the bytes and XXH3-64 of a text, then the text. SHA-256 of the text is the name |
//! | `/kv/NAME/host/H` | 8 lines in which host `H` keeps where it goes on, one for each size of block; a line that counts its hits and misses; its log; counts of its hits; what it has seen of all hosts' counts of its slots |
//! | `/kv/NAME/slab/H/N` | a slab: head, lines of its slots, blocks of one size |

mod check;
mod get;
mod gone;
#[cfg(feature = "hostile")]
pub mod hostile;
mod index;
mod part;
mod pin;
mod put;
mod replica;
mod slabs;
mod stat;
mod take;
#[cfg(test)]
mod tests;
mod uses;
pub(crate) mod wire;

use std::fmt;
use std::sync::{Arc, Mutex};

use polder_mem::{LINE, Memory, Offset};
use twox_hash::XxHash3_64;

use crate::chunks::Chunks;
use crate::object::{InitialContents, Object};
use crate::pool::locked;
use crate::{Pool, PoolError, line};

pub use check::{CacheCheck, DamagedSlot, check};
pub use gone::{GivenUp, GonePart, wanted_parts};
pub use pin::Pin;
pub use put::Put;
pub use stat::{CacheStat, IdentityStat, PartStat, UseStat, inspect};

use index::Replica;
use slabs::Slab;
use wire::{Root, SlabHead};

/// Sizes of blocks that a host keeps a place for.
const CLASSES: u64 = 8;
/// The line of a host's object that counts its hits and misses, and the first of its log.
const TOTALS_LINE: u64 = CLASSES;
const LOG_LINE: u64 = CLASSES + 1;
/// The most bytes of a slab, unless a few blocks take more.
const SLAB_BYTES: u64 = 64 << 20;
/// The most lines of a log: a reader may sleep for seconds while 100,000 blocks a second are put.
const LOG_LINES: u64 = 1 << 20;
/// What an object takes beside its bytes, so that a slab fills a chunk and does not begin another.
const HEADER_BYTES: u64 = 512;

/// What names a block: 16 bytes of the engine's hash of its tokens. The identity is mixed in by [`Cache`].
pub type Key = [u8; 16];

/// What the blocks of a key are computed by: a model with its weights, and all else that changes a byte of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256 of the text.
    pub hash: [u8; 32],
    /// What it is of, for people.
    pub text: String,
    /// Bytes of each of its blocks.
    pub block: u32,
}

impl Identity {
    fn name(&self) -> String {
        self.hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What is mixed into its keys.
    fn salt(&self) -> u128 {
        u128::from_le_bytes(self.hash[..16].try_into().expect("16 bytes"))
    }

    fn tag(&self) -> u32 {
        u32::from_le_bytes(self.hash[..4].try_into().expect("4 bytes"))
    }
}

/// How a cache is made and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Options {
    /// Bytes that all its slabs may take; without it what the cache has, or four fifths of what is free when it is made.
    pub budget: Option<u64>,
    /// Whether blocks carry a checksum, and are checked where they carry one.
    pub verify: bool,
}

/// A cache of blocks in a pool, for blocks of one identity. All threads of a process may use it at once.
pub struct Cache<M: Memory> {
    pool: Arc<Pool<M>>,
    name: String,
    root: Object,
    geometry: Root,
    /// This host's object.
    part: Object,
    identity: Identity,
    verify: bool,
    replica: Mutex<Replica>,
    own_slabs: Mutex<OwnSlabs>,
    /// Whether this host has said that it pins blocks.
    pins: Mutex<bool>,
    /// Whether this process stands in for its host, which is gone for good.
    stands_in: bool,
}

/// This host's slabs, as this process has seen them; in the order of their numbers.
#[derive(Debug, Default)]
struct OwnSlabs {
    /// How often they had changed then.
    changes: Option<u32>,
    slabs: Vec<(u32, Slab)>,
}

impl<M: Memory> fmt::Debug for Cache<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("name", &self.name)
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

impl<M: Memory> Cache<M> {
    /// The cache of this name, which the first process makes.
    ///
    /// # Errors
    /// [`PoolError::Name`]; [`PoolError::Argument`] for blocks of no bytes, for another budget than the cache has, and for one that
    /// holds no block; [`PoolError::Corrupt`] when its root is damaged; those of [`Pool::create`].
    pub fn open(
        pool: Arc<Pool<M>>,
        name: &str,
        identity: Identity,
        options: Options,
    ) -> Result<Self, PoolError> {
        let budget = match options.budget {
            Some(budget) => budget,
            None => Chunks(pool.directory().site).free_bytes()? / 5 * 4,
        };
        let most = pool.layout().bytes();
        if budget > most {
            let value = format!("{budget} bytes in a pool of {most}");
            return Err(PoolError::Argument {
                what: "the budget",
                value,
                expected: "at most the pool's bytes",
            });
        }
        // Of a small budget too, two hosts may have slabs.
        let slab_bytes = (budget / 16).clamp(1 << 20, SLAB_BYTES).min(budget / 4);
        let log_lines = (budget >> 20).next_power_of_two().clamp(1 << 10, LOG_LINES);
        let hosts = pool.layout().geometry().hosts;
        Self::open_with(pool, name, identity, options, Root { slab_bytes, log_lines, budget, hosts })
    }

    pub(crate) fn open_with(
        pool: Arc<Pool<M>>,
        name: &str,
        identity: Identity,
        options: Options,
        new: Root,
    ) -> Result<Self, PoolError> {
        expect_name(name)?;
        if identity.block == 0 {
            let (value, expected) = ("0 bytes".to_owned(), "a size of at least 1 byte");
            return Err(PoolError::Argument { what: "the size of a block", value, expected });
        }
        let cache = Self::open_part(pool, name, identity, options, new)?;
        cache.note_identity()?;
        cache.change(|control| {
            // The host is there from here on.
            if std::mem::take(&mut control.gone) {
                cache.publish_control(control);
            }
            Ok(())
        })?;
        Ok(cache)
    }

    /// The cache of this name, with this host's part.
    fn open_part(
        pool: Arc<Pool<M>>,
        name: &str,
        identity: Identity,
        options: Options,
        new: Root,
    ) -> Result<Self, PoolError> {
        let bytes = (1 + u64::from(new.hosts)) * LINE;
        let first = || expect_room(name, &identity, &new).map(|()| new.encode());
        let root = open_or_create(&pool, &format!("/kv/{name}"), bytes, first)?;
        let open = || {
            let found = line::read(pool.memory(), root.at())?.and_then(|words| Root::decode(&words));
            let geometry = found
                .filter(|found| found.hosts == new.hosts && root.bytes() == bytes)
                .ok_or(PoolError::Corrupt { offset: root.at(), what: "root of a cache" })?;
            if options.budget.is_some_and(|budget| budget != geometry.budget) {
                let value = format!("{} bytes where the cache {name} has {}", new.budget, geometry.budget);
                let expected = "give what the cache has, or none";
                return Err(PoolError::Argument { what: "the budget", value, expected });
            }
            expect_room(name, &identity, &geometry)?;
            Ok((geometry, open_own(&pool, &root, part_bytes(&geometry))?))
        };
        let (geometry, part) = match open() {
            Ok(opened) => opened,
            Err(error) => {
                pool.close(root);
                return Err(error);
            }
        };
        let replica = Mutex::new(Replica::new(geometry.hosts));
        Ok(Self {
            pool,
            name: name.to_owned(),
            root,
            geometry,
            part,
            identity,
            verify: options.verify,
            replica,
            own_slabs: Mutex::default(),
            pins: Mutex::default(),
            stands_in: false,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its blocks are computed by.
    #[must_use]
    pub const fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The pool that it is in.
    #[must_use]
    pub const fn pool(&self) -> &Arc<Pool<M>> {
        &self.pool
    }

    /// Which of these keys have blocks, as far as what was put before this call says.
    ///
    /// # Errors
    /// [`PoolError::Evicted`], [`PoolError::Memory`].
    pub fn lookup(&self, keys: &[Key]) -> Result<Vec<bool>, PoolError> {
        let replica = self.polled()?;
        Ok(keys.iter().map(|key| replica.place(self.own(key)).is_some()).collect())
    }

    /// Removes a cache with all its blocks, or what is left of one whose removal was cut short. No engine may be using it.
    ///
    /// # Errors
    /// [`PoolError::Name`]; [`PoolError::NotFound`] when there is none; those of [`Pool::destroy`].
    pub fn remove(pool: &Pool<M>, name: &str) -> Result<(), PoolError> {
        expect_name(name)?;
        // Whoever opens it from here on makes it anew.
        let removed = pool.destroy(&format!("/kv/{name}"));
        let others = pool.list(&format!("/kv/{name}/"))?;
        if others.is_empty() || !matches!(removed, Err(PoolError::NotFound { .. })) {
            removed?;
        }
        for object in others {
            match pool.destroy(&object.name) {
                Ok(()) | Err(PoolError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// That nobody has removed it, nor made another of its name.
    fn expect_there(&self) -> Result<(), PoolError> {
        expect_live(&self.pool, &self.root)
    }

    /// What tells it from others of its name, before and after it.
    fn stamp(&self) -> u64 {
        wire::stamp_of(self.root.generation, self.root.owner)
    }

    /// A key of this identity: the resistance of the engine's hash is kept, and no two identities meet.
    fn own(&self, key: &Key) -> u128 {
        u128::from_le_bytes(*key) ^ self.identity.salt()
    }

    /// The control line of a host.
    fn control_at(&self, host: u16) -> Offset {
        self.root.at().lines(1 + u64::from(host))
    }

    /// What the names of a host's slabs begin with.
    fn slab_prefix(&self, host: u16) -> String {
        format!("/kv/{}/slab/{host}/", self.name)
    }

    fn slab_name(&self, host: u16, slab: u32) -> String {
        format!("/kv/{}/slab/{host}/{slab}", self.name)
    }

    /// The line of a log that has this sequence number.
    fn log_at(&self, part: &Object, sequence: u64) -> Offset {
        part.at().lines(LOG_LINE + sequence % self.geometry.log_lines)
    }

    /// Writes down what the identity is, for people. Nothing depends on it.
    fn note_identity(&self) -> Result<(), PoolError> {
        let name = format!("/kv/{}/id/{}", self.name, self.identity.name());
        let text = self.identity.text.as_bytes();
        let head = [text.len() as u64, XxHash3_64::oneshot(text), self.identity.block.into(), 0, 0, 0, 0];
        match self.pool.create_filled(&name, LINE + text.len() as u64, InitialContents::Line(head)) {
            Ok(object) => {
                let written = object.write_at(self.pool.memory(), LINE, text);
                self.pool.close(object);
                written
            }
            Err(PoolError::Exists { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl<M: Memory> Drop for Cache<M> {
    fn drop(&mut self) {
        let directory = self.pool.directory();
        directory.close(&self.root);
        directory.close(&self.part);
        locked(&self.replica).parts().for_each(|part| directory.close(part));
    }
}

/// Bytes of a host's object: where it goes on, its totals, its log, its counts of hits, and what it has seen of those of all hosts.
const fn part_bytes(geometry: &Root) -> u64 {
    (LOG_LINE + geometry.log_lines + 2 * uses::use_lines(geometry.budget)) * LINE
}

fn expect_name(name: &str) -> Result<(), PoolError> {
    if name.is_empty() || name.contains('/') {
        return Err(PoolError::Name { name: name.to_owned(), why: "is empty or has a / in it" });
    }
    Ok(())
}

/// That a budget has room for a slab of one block, or is none.
fn expect_room(name: &str, identity: &Identity, geometry: &Root) -> Result<(), PoolError> {
    let least = SlabHead { block: identity.block, slots: 1, first_count: 0 }.bytes();
    if geometry.budget == 0 || geometry.budget >= least {
        return Ok(());
    }
    let value = format!("{} bytes where one block of the cache {name} takes {least}", geometry.budget);
    Err(PoolError::Argument { what: "the budget", value, expected: "give at least that" })
}

fn expect_live<M: Memory>(pool: &Pool<M>, root: &Object) -> Result<(), PoolError> {
    match pool.is_live(&root.name, root.owner, root.generation)? {
        true => Ok(()),
        false => Err(PoolError::NotFound { name: root.name.clone() }),
    }
}

/// This host's part of the cache with this root. One of another size is left of an earlier cache of the name, and goes.
fn open_own<M: Memory>(pool: &Pool<M>, root: &Object, bytes: u64) -> Result<Object, PoolError> {
    let name = format!("{}/host/{}", root.name, pool.member().host);
    loop {
        let part = open_or_create(pool, &name, bytes, || Ok([0; line::WORDS]))?;
        if part.bytes() == bytes {
            return Ok(part);
        }
        // A root that is there now was there when the part was opened: no later cache has made it.
        if let Err(error) = expect_live(pool, root) {
            pool.close(part);
            return Err(error);
        }
        match pool.discard(part) {
            Ok(()) | Err(PoolError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The object of this name, made with these words in its first line if it is not there.
fn open_or_create<M: Memory>(
    pool: &Pool<M>,
    name: &str,
    bytes: u64,
    first: impl Fn() -> Result<line::Words, PoolError>,
) -> Result<Object, PoolError> {
    loop {
        if let Some(object) = pool.open_if_there(name)? {
            return Ok(object);
        }
        match pool.create_filled(name, bytes, InitialContents::Line(first()?)) {
            // Another process was faster.
            Err(PoolError::Exists { .. }) => {}
            made => return made,
        }
    }
}
