//! Where endpoints and the rings between them lie.
//!
//! An endpoint is the object `/endpoint/JOB/HOST.PORT`. Two endpoints that talk begin with a small ring in each direction. It
//! lies in a block of the sender, and its credit line in the object of the receiver. The first blocks lie in the sender's object
//! itself, the others in `SENDER/blocks/NUMBER`, with the sender's generation. A pair that talks much has a ring of its own, the
//! object `RECEIVER/from/SENDER`, with the generations of both. The sender owns it.
//!
//! # Object of an endpoint
//! | part | bytes |
//! |---|---|
//! | identity of its process, and a spare line | 128 |
//! | news: for each host whole lines, with a byte for each of its ports | `hosts * news` |
//! | senders: for each host whole lines, with a word for each of its ports | `hosts * ports` |
//! | credit lines, one for each port of each host | `hosts * processes * 64` |
//! | blocks: for each host whole lines, with a word for each of its ports | `hosts * ports` |
//! | from the next multiple of 128 on the first blocks | `first * block` |
//!
//! Here `news` is the number `processes`, and `ports` the number of bytes of `processes` words, each filled up to a line.
//!
//! A byte of the news, and a word of the senders, belong to the sender with that port of that host. The word is 0 until that sender
//! begins to send. Then bits 40..64 are the lowest bits of the sender's generation, and bits 0..40 are 1. The byte is the
//! number of slots that the sender has published, modulo 256: it is the summary byte of its rings.
//!
//! A word of the blocks is the endpoint's own, and belongs to the receiver with that port of that host. It is 0 as long as this
//! endpoint sends nothing there. Else bits 40..64 are the lowest bits of the receiver's generation, and bits 0..40 the number of
//! the block, from 1, in which the small ring to it lies.
//!
//! # Blocks
//! | object | blocks |
//! |---|---|
//! | of the endpoint | `first` of them, from 1 |
//! | `blocks/NUMBER`, from 1 | the next, as many as all before it |
//! | `blocks/0` | none, but send buffers |
//!
//! A block is the producer's extent of a small ring, filled up to a multiple of 128 bytes. In an object of blocks they, or send buffers,
//! begin with the first multiple of 128 behind its first line, the identity of its process. A block is used again once the process
//! of its receiver is gone. Its headers are zeros then. The generation of a small ring is the low half of its sender's, or 1 if
//! that is 0.
//!
//! # Own words of the identity of an endpoint
//! | word | what |
//! |---|---|
//! | 4 | of its small rings: bits 0..32 slots, bits 32..64 cells |
//! | 5 | of its small rings: bytes of a cell |
//! | 6 | `first`, the number of its first blocks |
//!
//! # Object of a ring
//! Its first line is the identity of the ring. The offsets below count from the first multiple of 128 bytes in the object.
//!
//! | bytes | what |
//! |---|---|
//! | 128..192 | credits |
//! | from 256 on | the producer's extent |
//!
//! # Own words of the identity of a ring
//! | word | what |
//! |---|---|
//! | 4 | bits 0..32 slots, bits 32..64 cells |
//! | 5 | bytes of a cell |
//! | 6 | spare, 0 |

use polder_mem::{LINE, Memory, Offset};
use twox_hash::XxHash3_64;

use super::{Address, EndpointOptions};
use crate::format::Geometry;
use crate::line;
use crate::membership::Process;
use crate::name::Name;
use crate::object::{MAX_HEADER_LINES, Object, header_lines};
use crate::owned::{self, Identity, Kind};
use crate::ring::{RingPlace, RingShape};
use crate::shared::SharedObject;
use crate::summary::SENDERS;
use crate::{Pool, PoolError};

/// Lines of an endpoint before its news.
const HEAD: u64 = 2;
/// Where the parts of a ring and of an endpoint begin.
const ALIGNED: u64 = 128;
/// Objects are made for one ring and never used again.
const GENERATION: u32 = 1;
/// Blocks that an endpoint has at most.
pub(super) const MOST_BLOCKS: u64 = 1 << 20;

/// Bits of a word of the senders, or of the blocks, below those of a generation.
const COUNT_BITS: u32 = 40;

/// What tells the endpoints of this process's job in this pool from those of other pools and jobs.
pub(super) fn realm_of<M: Memory>(pool: &Pool<M>) -> u32 {
    let (uuid, job) = (pool.superblock().uuid.0.to_le_bytes(), pool.member().job.to_le_bytes());
    XxHash3_64::oneshot(&[&uuid[..], &job[..]].concat()) as u32
}

/// The name of the endpoint at `port` of `host`.
pub(super) fn endpoint_name(job: u64, host: u16, port: u16) -> String {
    format!("/endpoint/{job}/{host}.{port}")
}

/// The name of the ring from `sender` to `receiver`.
pub(super) fn ring_name(job: u64, sender: Address, receiver: Address) -> String {
    let receiver_name = endpoint_name(job, receiver.host, receiver.port);
    let Address { host, port, generation, .. } = sender;
    format!("{receiver_name}.{}/from/{host}.{port}.{generation}", receiver.generation)
}

/// The name of the object of this number with blocks of an endpoint.
pub(super) fn blocks_name(job: u64, address: Address, number: u32) -> String {
    let name = endpoint_name(job, address.host, address.port);
    format!("{name}.{}/blocks/{number}", address.generation)
}

/// Bytes of the words of the senders, or of the blocks, of one host.
fn port_bytes(geometry: &Geometry) -> u64 {
    (u64::from(geometry.processes) * 8).next_multiple_of(LINE)
}

/// Bytes of the news of one host.
fn news_bytes(geometry: &Geometry) -> u64 {
    u64::from(geometry.processes).div_ceil(SENDERS) * LINE
}

/// Bytes of an endpoint's object.
pub(super) fn endpoint_bytes(geometry: &Geometry, options: &EndpointOptions) -> u64 {
    let blocks = options.blocks();
    let fixed = Map::new(geometry, Offset(0)).blocks();
    fixed.0 + ALIGNED + blocks.count(0) * blocks.block_bytes()
}

/// The blocks of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    /// The shape of the ring in each.
    pub(super) small: RingShape,
    /// How many lie in the object of the endpoint.
    pub(super) first: u32,
}

impl Blocks {
    /// The own words of the identity of the endpoint.
    pub(super) fn words(self) -> [u64; 3] {
        let [counts, cell_bytes, _] = words_of_shape(self.small);
        [counts, cell_bytes, self.first.into()]
    }

    /// The inverse of [`Blocks::words`]; `None` for words that no endpoint has.
    fn from_words(words: [u64; 3]) -> Option<Self> {
        let first = u32::try_from(words[2]).ok()?;
        let small = decode_shape(words)?;
        (1..=MOST_BLOCKS as u32).contains(&first).then_some(Self { small, first })
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(self) -> u64 {
        self.small.producer_bytes().next_multiple_of(ALIGNED)
    }

    /// Blocks in the object of this number.
    fn count(self, number: u32) -> u64 {
        u64::from(self.first) << number.saturating_sub(1)
    }

    /// The number of the object in which the block of this number lies, 0 for the endpoint itself, and the place there.
    pub(super) fn object_of(self, block: u64) -> (u32, u64) {
        let number = (block / u64::from(self.first)).checked_ilog2().map_or(0, |power| power + 1);
        (number, block - if number == 0 { 0 } else { self.count(number) })
    }

    /// Bytes of the object of this number.
    fn object_bytes(self, number: u32) -> u64 {
        2 * ALIGNED + self.count(number) * self.block_bytes()
    }
}

/// Where the parts of an endpoint lie that starts at `at`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Map {
    geometry: Geometry,
    at: Offset,
}

impl Map {
    pub(super) const fn new(geometry: &Geometry, at: Offset) -> Self {
        Self { geometry: *geometry, at }
    }

    /// The byte of the news of the sender at `port` of `host`.
    pub(super) fn news_byte(&self, host: u16, port: u16) -> Offset {
        self.at + HEAD * LINE + u64::from(host) * news_bytes(&self.geometry) + u64::from(port)
    }

    /// The word of the sender at `port` of `host`.
    pub(super) fn sender_word(&self, host: u16, port: u16) -> Offset {
        let at = self.news_byte(self.geometry.hosts, 0);
        at + u64::from(host) * port_bytes(&self.geometry) + u64::from(port) * 8
    }

    /// The credit line of the small ring of the sender at `port` of `host`.
    pub(super) fn credits(&self, host: u16, port: u16) -> Offset {
        let line = u64::from(host) * u64::from(self.geometry.processes) + u64::from(port);
        self.sender_word(self.geometry.hosts, 0) + line * LINE
    }

    /// The word of the block of the receiver at `port` of `host`.
    pub(super) fn block_word(&self, host: u16, port: u16) -> Offset {
        let at = self.credits(self.geometry.hosts, 0);
        at + u64::from(host) * port_bytes(&self.geometry) + u64::from(port) * 8
    }

    /// Where the first blocks begin.
    pub(super) fn blocks(&self) -> Offset {
        Offset(self.block_word(self.geometry.hosts, 0).0.next_multiple_of(ALIGNED))
    }
}

/// What a word of the blocks says of the block of this number, for the receiver of this generation.
pub(super) const fn encode_block(block: u64, receiver: u64) -> u64 {
    generation_bits(receiver) | (block + 1)
}

/// The number of the block that such a word says, if it is for the receiver of this generation.
pub(super) fn block_of(word: u64, receiver: u64) -> Option<u64> {
    let (count, base) = split_word(word);
    (base == generation_bits(receiver) && (1..=MOST_BLOCKS).contains(&count)).then(|| count - 1)
}

/// The generation of the small rings of an endpoint.
pub(super) fn small_generation(sender: u64) -> u32 {
    (sender as u32).max(1)
}

/// An endpoint of this job that this process holds open.
#[derive(Debug)]
pub(super) struct HeldEndpoint {
    pub(super) object: SharedObject,
    pub(super) process: Process,
    pub(super) blocks: Blocks,
}

/// Holds the endpoint at `port` of `host` open, of a generation that `is_it`.
///
/// # Errors
/// [`PoolError::NotFound`] when it is of another; [`PoolError::Corrupt`] when its identity is damaged; those of [`Pool::open`].
pub(super) fn hold_endpoint<M: Memory>(
    pool: &Pool<M>,
    (host, port): (u16, u16),
    is_it: impl Fn(u64) -> bool,
) -> Result<HeldEndpoint, PoolError> {
    let object = pool.share(&endpoint_name(pool.member().job, host, port), is_it)?;
    match identity_of(pool, &object) {
        Ok((process, blocks)) => Ok(HeldEndpoint { object, process, blocks }),
        Err(error) => {
            pool.let_go(object);
            Err(error)
        }
    }
}

fn identity_of<M: Memory>(pool: &Pool<M>, object: &SharedObject) -> Result<(Process, Blocks), PoolError> {
    let corrupt = || PoolError::Corrupt { offset: object.at(), what: "identity of an endpoint" };
    let said = line::read(pool.memory(), object.at())?.ok_or_else(corrupt)?;
    let said = Identity::decode(&said, Kind::Endpoint).ok_or_else(corrupt)?;
    let blocks = Blocks::from_words(said.own).ok_or_else(corrupt)?;
    let first = Map::new(pool.layout().geometry(), object.at()).blocks();
    let is_inside = first.0 + blocks.count(0) * blocks.block_bytes() <= object.at().0 + object.bytes();
    is_inside.then_some((said.process, blocks)).ok_or_else(corrupt)
}

/// The endpoints to which the one with this name and generation has a small ring: host, port, and how a generation is told.
///
/// # Errors
/// Those of [`hold_endpoint`].
pub(crate) fn receivers_of<M: Memory>(
    pool: &Pool<M>,
    job: u64,
    name: &str,
    generation: u64,
) -> Result<Vec<(String, impl Fn(u64) -> bool)>, PoolError> {
    let endpoint = pool.share(name, |found| found == generation)?;
    let words = identity_of(pool, &endpoint)
        .and_then(|_| block_words(pool.memory(), pool.layout().geometry(), endpoint.at()));
    pool.let_go(endpoint);
    let receiver = |((host, port), word): ((u16, u16), u64)| {
        let (count, base) = split_word(word);
        let is_it = move |generation| generation_bits(generation) == base;
        (count > 0).then(|| (endpoint_name(job, host, port), is_it))
    };
    Ok(words?.into_iter().filter_map(receiver).collect())
}

/// A word of each port of each host, with those.
type PortWords = Vec<((u16, u16), u64)>;

/// The words of the blocks of an endpoint whose object starts at `at`, with the host and port of each receiver.
fn block_words<M: Memory>(memory: &M, geometry: &Geometry, at: Offset) -> Result<PortWords, PoolError> {
    let map = Map::new(geometry, at);
    let (first, end) = (map.block_word(0, 0), map.block_word(geometry.hosts, 0));
    // HARMLESS(invalidate -> write_back -> drop), the blocks of the dead: an older word means that no one hears an endpoint whose process is
    // gone, as if that had died before it spoke. What it has offered goes after it.
    memory.invalidate(first, end.0 - first.0);
    // SYNC: sees what `Stock::say` of a process that is gone stored.
    // HARMLESS(fence_invalidations -> sfence -> drop), one look at what the dead said: as above.
    memory.fence_invalidations();
    let ports = (0..geometry.hosts).flat_map(|host| (0..geometry.processes).map(move |port| (host, port)));
    ports.map(|(host, port)| Ok(((host, port), memory.load(map.block_word(host, port))?))).collect()
}

/// The small rings of an endpoint, as its object says.
#[derive(Debug)]
pub(crate) struct SmallRings {
    /// Bytes of each.
    pub(crate) bytes: u64,
    /// Bytes of those that have room in the object itself.
    pub(crate) first_bytes: u64,
    /// The host and port of each receiver.
    pub(crate) receivers: Vec<(u16, u16)>,
}

impl SmallRings {
    /// Those of the endpoint whose object lies here; nothing where it is damaged, or too short.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub(crate) fn find<M: Memory>(
        memory: &M,
        geometry: &Geometry,
        at: Offset,
        bytes: u64,
    ) -> Result<Option<Self>, PoolError> {
        let words = line::read(memory, at)?.and_then(|words| Identity::decode(&words, Kind::Endpoint));
        let Some(blocks) = words.and_then(|words| Blocks::from_words(words.own)) else { return Ok(None) };
        let first_bytes = blocks.count(0) * blocks.block_bytes();
        if Map::new(geometry, at).blocks().0 + first_bytes > at.0 + bytes {
            return Ok(None);
        }
        let words = block_words(memory, geometry, at)?.into_iter();
        let receivers = words.filter(|(_, word)| split_word(*word).0 > 0).map(|(place, _)| place).collect();
        Ok(Some(Self { bytes: blocks.block_bytes(), first_bytes, receivers }))
    }
}

/// Holds the object open in which a block of an endpoint lies; where the block lies, and the object unless it is the endpoint's.
///
/// # Errors
/// [`PoolError::NotFound`] when the endpoint has left; [`PoolError::Corrupt`] when the object is too short; those of [`Pool::open`].
pub(super) fn hold_block<M: Memory>(
    pool: &Pool<M>,
    endpoint: &HeldEndpoint,
    address: Address,
    block: u64,
) -> Result<(Offset, Option<SharedObject>), PoolError> {
    let shape = endpoint.blocks;
    let (number, index) = shape.object_of(block);
    let within = index * shape.block_bytes();
    if number == 0 {
        let map = Map::new(pool.layout().geometry(), endpoint.object.at());
        return Ok((map.blocks() + within, None));
    }
    let blocks = pool.share(&blocks_name(pool.member().job, address, number), |_| true)?;
    let at = first_block(blocks.at());
    if at.0 + shape.count(number) * shape.block_bytes() > blocks.at().0 + blocks.bytes() {
        let error = PoolError::Corrupt { offset: blocks.at(), what: "size of an object of blocks" };
        pool.let_go(blocks);
        return Err(error);
    }
    Ok((at + within, Some(blocks)))
}

/// Makes the object of this number with blocks of an endpoint of this process.
///
/// # Errors
/// Those of [`Pool::create`].
pub(super) fn create_blocks<M: Memory>(
    pool: &Pool<M>,
    address: Address,
    number: u32,
    blocks: Blocks,
) -> Result<Object, PoolError> {
    let name = blocks_name(pool.member().job, address, number);
    owned::create_new(pool, &name, blocks.object_bytes(number), Kind::Blocks, [0; 3])
}

/// Makes the object of the send buffers of an endpoint of this process, which take so many bytes.
///
/// # Errors
/// Those of [`Pool::create`].
pub(super) fn create_buffers<M: Memory>(
    pool: &Pool<M>,
    address: Address,
    bytes: u64,
) -> Result<Object, PoolError> {
    let name = blocks_name(pool.member().job, address, 0);
    owned::create_unfilled(pool, &name, 2 * ALIGNED + bytes, Kind::Blocks, [0; 3])
}

/// Where the first block lies in an object of blocks that starts at `at`.
pub(super) fn first_block(at: Offset) -> Offset {
    Offset((at + LINE).0.next_multiple_of(ALIGNED))
}

/// What the word of the sender of this generation says.
pub(super) const fn encode_sender(generation: u64) -> u64 {
    generation_bits(generation) | 1
}

/// The bits of a word of the senders, or of the blocks, that say a generation.
pub(super) const fn generation_bits(generation: u64) -> u64 {
    generation << COUNT_BITS
}

/// What such a word says below a generation, and the bits that say that.
pub(super) const fn split_word(word: u64) -> (u64, u64) {
    let low = word & ((1 << COUNT_BITS) - 1);
    (low, word - low)
}

/// Bytes before the objects of endpoints and rings, at most.
fn header_bytes() -> u64 {
    let furthest = Address { host: u16::MAX, port: u16::MAX, generation: u64::MAX, realm: 0 };
    let name = ring_name(u64::MAX, furthest, furthest);
    u64::from(Name::parse(&name).map_or(MAX_HEADER_LINES, |name| header_lines(&name))) * LINE
}

/// Bytes of an endpoint with a small ring to each of so many peers, and of the largest object of it.
fn endpoint_with_blocks(geometry: &Geometry, options: &EndpointOptions, peers: u64) -> (u64, u64) {
    let (last, _) = options.blocks().object_of(peers.saturating_sub(1));
    let blocks = (1..=last).map(|number| header_bytes() + options.blocks().object_bytes(number));
    let own = header_bytes() + endpoint_bytes(geometry, options);
    (own + blocks.clone().sum::<u64>(), blocks.fold(own, u64::max))
}

/// Chunks that one host holds for `endpoints` endpoints of a job and `rings` rings of this shape to others, at most.
pub(super) fn chunks(geometry: &Geometry, options: &EndpointOptions, endpoints: u64, rings: u64) -> u64 {
    let ring = header_bytes() + ring_bytes(options.ring);
    let (endpoint, _) = endpoint_with_blocks(geometry, options, rings / endpoints.max(1));
    // Chunks of another host may stand between those of this one once: no ring lies over such a gap.
    (endpoints * endpoint + rings * ring + ring).div_ceil(geometry.chunk_bytes)
}

/// Chunks that one host holds for `endpoints` endpoints of a job with small rings in `pairs` pairs, and their send buffers.
pub(super) fn least_chunks(
    geometry: &Geometry,
    options: &EndpointOptions,
    endpoints: u64,
    pairs: u64,
) -> u64 {
    let (endpoint, largest) = least_bytes(geometry, options, pairs.div_ceil(endpoints.max(1)));
    // As above: no object lies over such a gap.
    (endpoints * endpoint + largest).div_ceil(geometry.chunk_bytes)
}

/// Bytes of an endpoint with a small ring to each of so many peers and its send buffers, and of the largest object of it.
fn least_bytes(geometry: &Geometry, options: &EndpointOptions, peers: u64) -> (u64, u64) {
    let (endpoint, largest) = endpoint_with_blocks(geometry, options, peers);
    let buffers = header_bytes() + 2 * ALIGNED + u64::from(options.send_buffers) * options.ring.cell_bytes();
    (endpoint + buffers, largest.max(buffers))
}

/// Bytes that rings of pairs may take of one of so many endpoints: an equal part of what the small rings and send buffers of all leave of
/// the `all` bytes of a pool. So no pair's own ring takes the place of a small one that is not made yet.
pub(super) fn share_of_rings(
    geometry: &Geometry,
    options: &EndpointOptions,
    endpoints: u64,
    all: u64,
) -> u64 {
    let (endpoint, largest) = least_bytes(geometry, options, endpoints - 1);
    // Each host leaves a gap, as above, and the rest of its last chunk.
    let gap = largest.max(header_bytes() + ring_bytes(options.ring)) + geometry.chunk_bytes;
    let hosts = endpoints.min(geometry.hosts.into());
    all.saturating_sub(endpoints * endpoint + hosts * gap) / endpoints
}

/// Bytes of the object of a ring.
pub(super) fn ring_bytes(shape: RingShape) -> u64 {
    3 * ALIGNED + shape.producer_bytes()
}

/// Makes the object of a ring.
///
/// # Errors
/// Those of [`Pool::create`].
pub(crate) fn create_ring<M: Memory>(
    pool: &Pool<M>,
    name: &str,
    shape: RingShape,
) -> Result<(Object, RingPlace), PoolError> {
    let ring = owned::create_new(pool, name, ring_bytes(shape), Kind::Ring, words_of_shape(shape))?;
    let place = place_of(&ring);
    Ok((ring, place))
}

/// The shape and place of the ring in `object`.
///
/// # Errors
/// [`PoolError::Corrupt`] when it is no ring's, or damaged.
pub(crate) fn find_ring<M: Memory>(
    pool: &Pool<M>,
    object: &Object,
) -> Result<(RingShape, RingPlace), PoolError> {
    let corrupt = || PoolError::Corrupt { offset: object.at(), what: "ring identity" };
    let said = line::read(pool.memory(), object.at())?;
    let said = said.and_then(|said| Identity::decode(&said, Kind::Ring)).ok_or_else(corrupt)?;
    let shape = decode_shape(said.own).ok_or_else(corrupt)?;
    let is_inside = ring_bytes(shape) == object.bytes();
    is_inside.then(|| (shape, place_of(object))).ok_or_else(corrupt)
}

/// The own words of an identity that says the shape of a ring.
pub(super) fn words_of_shape(shape: RingShape) -> [u64; 3] {
    [shape.slots() | shape.cells() << 32, shape.cell_bytes(), 0]
}

/// The shape that they say.
fn decode_shape([counts, cell_bytes, _]: [u64; 3]) -> Option<RingShape> {
    let shape = RingShape::new((counts >> 32) as u32, u32::try_from(cell_bytes).ok()?).ok()?;
    shape.with_slots(counts as u32).ok()
}

fn place_of(ring: &Object) -> RingPlace {
    let start = Offset(ring.at().0.next_multiple_of(ALIGNED));
    RingPlace { lines: start + 2 * ALIGNED, credits: start + ALIGNED, generation: GENERATION }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_lies_in_one_object_behind_the_one_before() {
        let blocks = EndpointOptions::default().blocks();
        let all = (0..1024).map(|block| blocks.object_of(block));
        let wanted = (0..).flat_map(|number| (0..blocks.count(number)).map(move |index| (number, index)));
        assert!(all.eq(wanted.take(1024)));
        assert_eq!(blocks.object_of(1023), (7, 511));
    }

    #[test]
    fn a_word_of_the_blocks_is_for_one_receiver() {
        let word = encode_block(5, 9);
        assert_eq!(block_of(word, 9), Some(5));
        assert_eq!(block_of(word, 10), None);
        assert_eq!(block_of(0, 0), None);
        assert_eq!(block_of(u64::MAX, u64::MAX), None);
    }

    #[test]
    fn a_pair_that_exchanges_short_messages_takes_at_most_4_kib() {
        // In each direction a block, a credit line, a byte of the news, and a word of the senders and one of the blocks.
        let bytes = 2 * (EndpointOptions::default().blocks().block_bytes() + LINE + 17);
        assert!(bytes <= 4096, "{bytes}");
    }
}
