//! What an endpoint has of the pool for all its peers: blocks for small rings, send buffers, and its budget for rings of their own.

use std::collections::VecDeque;

use polder_mem::{Memory, Offset};

use super::place::{
    MOST_BLOCKS, Map, block_of, create_blocks, create_buffers, encode_block, endpoint_bytes, endpoint_name,
    first_block, realm_of, ring_bytes, share_of_rings, small_generation,
};
use super::{Address, EndpointOptions};
use crate::chunks::Chunks;
use crate::membership::Process;
use crate::object::Object;
use crate::opens::Opens;
use crate::owned::{self, Kind};
use crate::ring::{PAIR, RingPlace};
use crate::{Pool, PoolError};

/// A ring of its own is made only while so much of the pool is free, one part of so many: small rings need room too.
const RESERVE: u64 = 8;
/// Blocks of which it is asked whether they are free, before one that is new is taken.
const ASKED: usize = 4;

/// Objects that a process leaves unopened for endpoints and blocks of peers, without which nothing goes: one part of all, of so many.
const SPARED: u32 = 4;

/// Whether this process may open an object without which a conversation goes on, too.
pub(super) fn can_open_more<M: Memory>(pool: &Pool<M>) -> bool {
    let limit = pool.layout().geometry().opens;
    Opens(pool.directory().site).left() > limit / SPARED
}

/// What the word of a port says that this process took.
fn taker<M: Memory>(pool: &Pool<M>) -> u64 {
    pool.directory().site.me.holder() ^ of_job(pool)
}

/// Whether the word of a port says that a process of this job took it that is still there.
fn is_taken<M: Memory>(pool: &Pool<M>, port: u16) -> bool {
    let site = pool.directory().site;
    let word = site.get(site.words().port(port));
    word != 0 && !site.me.is_gone(site.memory, word ^ of_job(pool))
}

/// So that the word of another job is that of no process here.
fn of_job<M: Memory>(pool: &Pool<M>) -> u64 {
    pool.member().job.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// What an endpoint has of the pool.
pub(super) struct Stock {
    /// The objects with its blocks; the first is its own.
    objects: Vec<Object>,
    map: Map,
    pub(super) address: Address,
    /// Blocks that were ever given out.
    blocks: u64,
    /// Those of conversations that are over, and who may still look at them: a process that was only stopped.
    used: VecDeque<(u64, Process)>,
    /// The send buffers, once one was needed, and those that no peer is to read.
    buffers: Option<Object>,
    free: Vec<u32>,
    /// There was no room for a ring of a pair since the last look at those that are idle.
    pub(super) is_short: bool,
    /// Bytes of all objects that it has.
    bytes: u64,
    /// Bytes of rings that pairs have for themselves.
    ring_bytes: u64,
    /// Endpoints that may speak with one another, this one among them: the small rings between them come first.
    pub(super) endpoints: u64,
    /// Messages and parts that went out.
    pub(super) pushed: u64,
}

impl Stock {
    /// Makes the object of an endpoint at the first port that is free, or whose endpoint died.
    pub(super) fn open<M: Memory>(pool: &Pool<M>, options: &EndpointOptions) -> Result<Self, PoolError> {
        let (member, geometry) = (pool.member(), pool.layout().geometry());
        // Where one has died its rings have stayed, and often others with it.
        let sweep = || pool.sweep_job(member.job).map(drop);
        let bytes = endpoint_bytes(geometry, options);
        // Those of which a word says that they are taken come last: the word may be of another job, or old.
        let (taken, free): (Vec<_>, Vec<_>) = (0..geometry.processes).partition(|&port| is_taken(pool, port));
        for port in free.into_iter().chain(taken) {
            let name = endpoint_name(member.job, member.host, port);
            let own = options.blocks().words();
            let own = match owned::create_after(pool, &name, bytes, Kind::Endpoint, own, sweep) {
                Err(PoolError::Exists { .. }) => continue,
                made => made?,
            };
            let site = pool.directory().site;
            site.set(site.words().port(port), taker(pool));
            let generation = own.generation();
            let address = Address { host: member.host, port, generation, realm: realm_of(pool) };
            let (map, free) = (Map::new(geometry, own.at()), (0..options.send_buffers).collect());
            return Ok(Self {
                objects: vec![own],
                map,
                address,
                blocks: 0,
                used: VecDeque::new(),
                buffers: None,
                free,
                is_short: false,
                bytes,
                ring_bytes: 0,
                endpoints: 1,
                pushed: 0,
            });
        }
        Err(PoolError::NoSlot { host: member.host, slots: geometry.processes })
    }

    /// Where its parts lie.
    pub(super) const fn map(&self) -> Map {
        self.map
    }

    /// Bytes of the pool that it has.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A block for the small ring to a peer, which finds it from here on: its number, and where the ring lies.
    pub(super) fn take_block<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        to: Address,
        credits: Offset,
    ) -> Result<(u64, RingPlace), PoolError> {
        let again = self.take_used(pool)?;
        let block = again.unwrap_or(self.blocks);
        let lines = self.make_block(pool, options, block)?;
        if again.is_some() {
            for slot in 0..options.small_ring.slots() {
                pool.memory().store_line(lines + slot * PAIR, &[0; 8]);
            }
            // The fence of `say` is theirs, too: the next receiver learns of the block by what comes after it.
            pool.memory().write_back(lines, options.small_ring.slots() * PAIR);
        }
        self.blocks = self.blocks.max(block + 1);
        self.say(pool, to, encode_block(block, to.generation));
        Ok((block, RingPlace { lines, credits, generation: small_generation(self.address.generation) }))
    }

    /// A block at which nobody looks any more, if there is one.
    fn take_used<M: Memory>(&mut self, pool: &Pool<M>) -> Result<Option<u64>, PoolError> {
        for _ in 0..self.used.len().min(ASKED) {
            let Some((block, process)) = self.used.pop_front() else { break };
            if pool.is_gone(&process)? {
                return Ok(Some(block));
            }
            self.used.push_back((block, process));
        }
        Ok(None)
    }

    /// Where this block lies, in an object that is made for it if need be.
    fn make_block<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        block: u64,
    ) -> Result<Offset, PoolError> {
        let blocks = options.blocks();
        let (number, index) = blocks.object_of(block);
        if block == MOST_BLOCKS {
            return Err(PoolError::Full { asked: 1, free: 0, largest: 0 });
        }
        if number as usize == self.objects.len() {
            let made = create_blocks(pool, self.address, number, blocks)?;
            self.bytes += made.bytes();
            self.objects.push(made);
        }
        let first =
            if number == 0 { self.map.blocks() } else { first_block(self.objects[number as usize].at()) };
        Ok(first + index * blocks.block_bytes())
    }

    /// Lets a peer find no block here: what was offered to it is no longer there. Its block is another's once its process is gone.
    /// A later endpoint at its place may have one by now, and keeps it.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub(super) fn withdraw<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        from: Address,
        (block, process): (u64, Process),
    ) -> Result<(), PoolError> {
        let said = pool.memory().load(self.map.block_word(from.host, from.port))?;
        if block_of(said, from.generation) == Some(block) {
            self.say(pool, from, 0);
        }
        self.used.push_back((block, process));
        Ok(())
    }

    fn say<M: Memory>(&self, pool: &Pool<M>, to: Address, word: u64) {
        let (memory, at) = (pool.memory(), self.map.block_word(to.host, to.port));
        memory.store(at, word);
        memory.write_back(at, 8);
        // SYNC: pairs with `Inlets::read_block`, of a receiver that has seen the news, or read what was offered.
        memory.sfence();
    }

    /// The slot and generation of the send buffers, which it makes at first; nothing where there are none.
    pub(super) fn make_buffers<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
    ) -> Result<Option<(u32, u64)>, PoolError> {
        if self.buffers.is_none() && !self.free.is_empty() && can_open_more(pool) {
            let bytes = u64::from(options.send_buffers) * options.ring.cell_bytes();
            match create_buffers(pool, self.address, bytes) {
                Ok(made) => {
                    self.bytes += made.bytes();
                    self.buffers = Some(made);
                }
                Err(error @ (PoolError::Evicted { .. } | PoolError::Memory(_))) => return Err(error),
                // Small rings carry everything.
                Err(error) => {
                    tracing::debug!(%error, "no send buffers");
                    self.free.clear();
                }
            }
        }
        Ok(self.buffers.as_ref().map(|buffers| (buffers.slot, buffers.generation())))
    }

    /// A send buffer, if one is free: its number and where it lies.
    pub(super) fn take_buffer(&mut self, options: &EndpointOptions) -> Option<(u32, Offset)> {
        let first = first_block(self.buffers.as_ref()?.at());
        let number = self.free.pop()?;
        Some((number, first + u64::from(number) * options.ring.cell_bytes()))
    }

    /// Nobody reads this send buffer any more.
    pub(super) fn free_buffer(&mut self, number: u32) {
        self.free.push(number);
    }

    /// Counts a ring of its own for a peer, if there is room for one.
    pub(super) fn reserve_ring<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
    ) -> Result<bool, PoolError> {
        let bytes = ring_bytes(options.ring);
        let layout = pool.layout();
        let all = u64::from(layout.chunks()) * layout.geometry().chunk_bytes;
        let has_room = self.bytes.saturating_add(bytes) <= options.memory_bytes
            && self.ring_bytes + bytes <= share_of_rings(layout.geometry(), options, self.endpoints, all)
            && can_open_more(pool)
            && Chunks(pool.directory().site).free_bytes()? >= bytes + all / RESERVE;
        if has_room {
            self.bytes += bytes;
            self.ring_bytes += bytes;
        }
        self.is_short |= !has_room;
        Ok(has_room)
    }

    /// Gives back the bytes of a ring.
    pub(super) fn release_ring(&mut self, options: &EndpointOptions) {
        self.bytes -= ring_bytes(options.ring);
        self.ring_bytes -= ring_bytes(options.ring);
    }

    /// Leaves: nobody finds anything of it from here on.
    pub(super) fn close<M: Memory>(&mut self, pool: &Pool<M>) {
        let site = pool.directory().site;
        let _ = site.update(site.words().port(self.address.port), |now| (now == taker(pool)).then_some(0));
        // The endpoint goes first: what it has offered is there as long as it is.
        self.objects.drain(..).chain(self.buffers.take()).for_each(|object| pool.abandon(object));
    }
}
