//! Where endpoints and the rings between them lie.
//!
//! An endpoint is the object `/endpoint/JOB/HOST.PORT`. The ring on which one sends to another is the object
//! `RECEIVER/from/SENDER`, with the generations of both. The sender owns it.
//!
//! # Object of an endpoint
//! | line | what |
//! |---|---|
//! | 0 | identity of its process |
//! | 1 | spare, 0 |
//! | from 2 on | news: for each host whole lines, with a word for each of its ports |
//!
//! A word of the news belongs to the sender with that port of that host. It is 0 until that sender has sent anything. Then
//! bits 40..64 are the lowest bits of the sender's generation, and bits 0..40 the number of slots that it has published.
//! So it is the ring's summary word.
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

use polder_mem::{Memory, Offset};
use xxhash_rust::xxh3::xxh3_64;

use super::Address;
use crate::format::Geometry;
use crate::line;
use crate::name::Name;
use crate::object::{MAX_HEADER_LINES, Object, header_lines};
use crate::owned::{self, Identity, Kind};
use crate::ring::{RingPlace, RingShape};
use crate::summary::SENDERS;
use crate::{Pool, PoolError};

/// Lines of an endpoint before its news.
const HEAD: u64 = 2;
/// Where a ring's parts begin.
const ALIGNED: u64 = 128;
/// Objects are made for one ring and never used again.
const GENERATION: u32 = 1;

/// Bits of a word of the news that count.
const COUNT_BITS: u32 = 40;

/// What tells the endpoints of this process's job in this pool from those of other pools and jobs.
pub(super) fn realm_of<M: Memory>(pool: &Pool<M>) -> u32 {
    let (uuid, job) = (pool.superblock().uuid.0.to_le_bytes(), pool.member().job.to_le_bytes());
    xxh3_64(&[&uuid[..], &job[..]].concat()) as u32
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

/// Lines of the news of one host.
fn lines_of_host(geometry: &Geometry) -> u64 {
    u64::from(geometry.processes).div_ceil(SENDERS)
}

/// Bytes of an endpoint's object.
pub(super) fn endpoint_bytes(geometry: &Geometry) -> u64 {
    Offset(0).lines(HEAD + u64::from(geometry.hosts) * lines_of_host(geometry)).0
}

/// The word of the news in an endpoint that starts at `at`, of the sender at `port` of `host`.
pub(super) fn news_word(geometry: &Geometry, at: Offset, host: u16, port: u16) -> Offset {
    let line = HEAD + u64::from(host) * lines_of_host(geometry) + u64::from(port) / SENDERS;
    at.lines(line).word(u64::from(port) % SENDERS)
}

/// What an endpoint of this generation adds its counts to, in its words of others' news.
pub(super) const fn news_base(generation: u64) -> u64 {
    generation << COUNT_BITS
}

/// What a word of the news counts, and from what on.
pub(super) const fn split_news_word(word: u64) -> (u64, u64) {
    let count = word & ((1 << COUNT_BITS) - 1);
    (count, word - count)
}

/// Chunks that one host holds for `endpoints` endpoints of a job and `rings` rings of this shape to others, at most.
pub(super) fn chunks(geometry: &Geometry, shape: RingShape, endpoints: u64, rings: u64) -> u64 {
    let furthest = Address { host: u16::MAX, port: u16::MAX, generation: u64::MAX, realm: 0 };
    let name = ring_name(u64::MAX, furthest, furthest);
    let header =
        Offset(0).lines(Name::parse(&name).map_or(MAX_HEADER_LINES, |name| header_lines(&name)).into());
    let (chunk, ring) = (geometry.chunk_bytes, header.0 + ring_bytes(shape));
    let bytes = endpoints * (header.0 + endpoint_bytes(geometry)) + rings * ring;
    // Chunks of another host may stand between those of this one once: no ring lies over such a gap.
    (bytes + ring).div_ceil(chunk)
}

/// Bytes of the object of a ring.
fn ring_bytes(shape: RingShape) -> u64 {
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
    let own = [shape.slots() | shape.cells() << 32, shape.cell_bytes(), 0];
    let ring = owned::create_new(pool, name, ring_bytes(shape), Kind::Ring, own)?;
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
    let [counts, cell_bytes, _] = said.own;
    let cell_bytes = u32::try_from(cell_bytes).map_err(|_| corrupt())?;
    let shape = RingShape::new((counts >> 32) as u32, cell_bytes)
        .and_then(|shape| shape.with_slots(counts as u32))
        .map_err(|_| corrupt())?;
    let is_inside = ring_bytes(shape) == object.bytes();
    is_inside.then(|| (shape, place_of(object))).ok_or_else(corrupt)
}

fn place_of(ring: &Object) -> RingPlace {
    let start = Offset(ring.at().0.next_multiple_of(ALIGNED));
    RingPlace { lines: start + 2 * ALIGNED, credits: start + ALIGNED, generation: GENERATION }
}
