//! What an endpoint has of the pool for all its peers: blocks for small rings, send buffers, and its budget for rings of their own.

use polder_mem::{Memory, Offset};

use super::place::{
    MOST_BLOCKS, Map, block_said, create_blocks, create_buffers, endpoint_bytes, endpoint_name, first_block,
    realm_of, ring_bytes, small_generation,
};
use super::{Address, EndpointOptions};
use crate::chunks::Chunks;
use crate::object::Object;
use crate::owned::{self, Kind};
use crate::ring::RingPlace;
use crate::{Pool, PoolError};

/// A ring of its own is made only while so much of the pool is free, one part of so many: small rings need room too.
const RESERVE: u64 = 8;

/// What an endpoint has of the pool.
pub(super) struct Stock {
    /// The objects with its blocks; the first is its own.
    objects: Vec<Object>,
    map: Map,
    pub(super) address: Address,
    /// Blocks that were given out. None is given out twice: a process that was stopped may still look at it.
    blocks: u64,
    /// The send buffers, once one was needed, and those that no peer is to read.
    buffers: Option<Object>,
    free: Vec<u32>,
    /// Bytes of all objects that it has.
    bytes: u64,
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
        for port in 0..geometry.processes {
            let name = endpoint_name(member.job, member.host, port);
            let own = options.blocks().words();
            let own = match owned::create_after(pool, &name, bytes, Kind::Endpoint, own, sweep) {
                Err(PoolError::Exists { .. }) => continue,
                made => made?,
            };
            let generation = own.generation();
            let address = Address { host: member.host, port, generation, realm: realm_of(pool) };
            let (map, free) = (Map::new(geometry, own.at()), (0..options.send_buffers).collect());
            return Ok(Self {
                objects: vec![own],
                map,
                address,
                blocks: 0,
                buffers: None,
                free,
                bytes,
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

    /// A block for the small ring to a peer, which finds it from here on.
    pub(super) fn take_block<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
        to: Address,
        credits: Offset,
    ) -> Result<RingPlace, PoolError> {
        let blocks = options.blocks();
        let (number, index) = blocks.object_of(self.blocks);
        if self.blocks == MOST_BLOCKS {
            return Err(PoolError::Full { asked: 1, free: 0, largest: 0 });
        }
        if number as usize == self.objects.len() {
            let made = create_blocks(pool, self.address, number, blocks)?;
            self.bytes += made.bytes();
            self.objects.push(made);
        }
        let first =
            if number == 0 { self.map.blocks() } else { first_block(self.objects[number as usize].at()) };
        let lines = first + index * blocks.block_bytes();
        self.say(pool, to, block_said(self.blocks, to.generation));
        self.blocks += 1;
        Ok(RingPlace { lines, credits, generation: small_generation(self.address.generation) })
    }

    /// Lets a peer find no block here: what was offered to it is no longer there.
    pub(super) fn withdraw<M: Memory>(&self, pool: &Pool<M>, from: Address) {
        self.say(pool, from, 0);
    }

    fn say<M: Memory>(&self, pool: &Pool<M>, to: Address, word: u64) {
        let (memory, at) = (pool.memory(), self.map.block_word(to.host, to.port));
        memory.store(at, word);
        memory.write_back(at, 8);
        // SYNC: pairs with `Inlets::read_block`, of a receiver that has seen the news, or read what was offered.
        memory.sfence();
    }

    /// A send buffer, if one is free: its number and where it lies.
    pub(super) fn take_buffer<M: Memory>(
        &mut self,
        pool: &Pool<M>,
        options: &EndpointOptions,
    ) -> Result<Option<(u32, Offset)>, PoolError> {
        let Some(&number) = self.free.last() else { return Ok(None) };
        let each = options.ring.cell_bytes();
        let buffers = match &self.buffers {
            Some(buffers) => buffers,
            None => match create_buffers(pool, self.address, u64::from(options.send_buffers) * each) {
                Ok(made) => {
                    self.bytes += made.bytes();
                    self.buffers.insert(made)
                }
                Err(error @ (PoolError::Evicted { .. } | PoolError::Memory(_))) => return Err(error),
                // Small rings carry everything.
                Err(error) => {
                    tracing::debug!(%error, "no send buffers");
                    self.free.clear();
                    return Ok(None);
                }
            },
        };
        self.free.pop();
        Ok(Some((number, first_block(buffers.at()) + u64::from(number) * each)))
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
        if self.bytes.saturating_add(bytes) > options.memory_bytes {
            return Ok(false);
        }
        let layout = pool.layout();
        let all = u64::from(layout.chunks()) * layout.geometry().chunk_bytes;
        let has_room = Chunks(pool.directory().site).free_bytes()? >= bytes + all / RESERVE;
        self.bytes += if has_room { bytes } else { 0 };
        Ok(has_room)
    }

    /// Gives back the bytes of a ring.
    pub(super) fn release_ring(&mut self, options: &EndpointOptions) {
        self.bytes -= ring_bytes(options.ring);
    }

    /// Leaves: nobody finds anything of it from here on.
    pub(super) fn close<M: Memory>(&mut self, pool: &Pool<M>) {
        // The endpoint goes first: what it has offered is there as long as it is.
        self.objects.drain(..).chain(self.buffers.take()).for_each(|object| pool.abandon(object));
    }
}
