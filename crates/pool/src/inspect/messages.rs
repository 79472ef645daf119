//! What the objects of a pool are for, and what the messages of its endpoints take: by kind, by endpoint and by pair.

use std::collections::BTreeMap;

use polder_mem::Memory;
use serde::Serialize;

use super::{Inspector, ObjectStat};
use crate::endpoint::SmallRings;
use crate::owned::Kind;
use crate::purpose::Use;
use crate::{PoolError, line};

/// What an endpoint has in a pool: its objects, and the rings on which it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EndpointStat {
    /// Bytes of its objects, and of the rings that pairs have for themselves on which it sends.
    pub bytes: u64,
    /// Those rings.
    pub rings: u64,
    /// Bytes of its small rings, those to nobody too.
    pub small_ring_bytes: u64,
    /// Bytes of its send buffers, which all its peers share.
    pub send_buffer_bytes: u64,
    /// Bytes of the rings that pairs have for themselves on which it sends.
    pub ring_bytes: u64,
}

/// What an endpoint has to send to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PairStat {
    /// Bytes of the small ring.
    pub small_ring_bytes: u64,
    /// Bytes of the ring that the pair has for itself, if it has one.
    pub ring_bytes: u64,
}

impl PairStat {
    /// All of it.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.small_ring_bytes + self.ring_bytes
    }
}

/// What all pairs have together. Each direction counts for itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PairsStat {
    /// How many there are.
    pub pairs: u64,
    /// How many have a ring for themselves.
    pub with_rings: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes of the one that has most.
    pub most_bytes: u64,
}

const ENDPOINTS: &str = "endpoints";
const SMALL_RINGS: &str = "small rings";
const SEND_BUFFERS: &str = "send buffers";
const RINGS: &str = "rings of pairs";

impl<M: Memory> Inspector<'_, M> {
    /// Counts what the objects are for, by kind and endpoint; returns what each pair has.
    pub(super) fn count_messages(&mut self) -> Result<BTreeMap<(String, String), PairStat>, PoolError> {
        let (mut pairs, objects) = (BTreeMap::<_, PairStat>::new(), std::mem::take(&mut self.objects));
        for object in &objects {
            match Use::of(&object.name, object.job) {
                Some(Use::Endpoint) => self.count_endpoint(object, &mut pairs)?,
                Some(Use::Blocks((name, _))) => {
                    let are_buffers = object.name.ends_with("/blocks/0");
                    let stat = self.stat.endpoints.entry(name).or_default();
                    stat.bytes += object.bytes;
                    if are_buffers {
                        stat.send_buffer_bytes += object.bytes;
                    } else {
                        stat.small_ring_bytes += object.bytes;
                    }
                    self.count_use(if are_buffers { SEND_BUFFERS } else { SMALL_RINGS }, object.bytes);
                }
                Some(Use::Ring([(receiver, _), (sender, _)])) => {
                    let stat = self.stat.endpoints.entry(sender.clone()).or_default();
                    stat.bytes += object.bytes;
                    stat.rings += 1;
                    stat.ring_bytes += object.bytes;
                    pairs.entry((sender, receiver)).or_default().ring_bytes += object.bytes;
                    self.count_use(RINGS, object.bytes);
                }
                other => {
                    let kind = match other {
                        Some(Use::Segment(_)) => "windows",
                        Some(Use::Memory(_)) => "private memory",
                        _ => self.kind_of(object)?,
                    };
                    self.count_use(kind, object.bytes);
                }
            }
        }
        self.objects = objects;
        for pair in pairs.values() {
            let stat = &mut self.stat.pairs;
            stat.pairs += 1;
            stat.with_rings += u64::from(pair.ring_bytes > 0);
            stat.bytes += pair.bytes();
            stat.most_bytes = stat.most_bytes.max(pair.bytes());
        }
        Ok(pairs)
    }

    fn count_use(&mut self, of: &'static str, bytes: u64) {
        *self.stat.uses.entry(of).or_default() += bytes;
    }

    fn count_endpoint(
        &mut self,
        object: &ObjectStat,
        pairs: &mut BTreeMap<(String, String), PairStat>,
    ) -> Result<(), PoolError> {
        let stat = self.stat.endpoints.entry(object.name.clone()).or_default();
        stat.bytes += object.bytes;
        // One that is damaged counts as a whole.
        let rings = SmallRings::find(self.memory, self.layout.geometry(), object.at, object.bytes)?;
        let first_bytes = rings.as_ref().map_or(0, |small| small.first_bytes);
        stat.small_ring_bytes += first_bytes;
        for (host, port) in rings.iter().flat_map(|small| &small.receivers) {
            let receiver = format!("/endpoint/{}/{host}.{port}", object.job);
            let pair = pairs.entry((object.name.clone(), receiver)).or_default();
            pair.small_ring_bytes += rings.as_ref().map_or(0, |small| small.bytes);
        }
        self.count_use(ENDPOINTS, object.bytes - first_bytes);
        self.count_use(SMALL_RINGS, first_bytes);
        Ok(())
    }

    /// What an object is for that is not of messages: its name says it, or its first line.
    fn kind_of(&self, object: &ObjectStat) -> Result<&'static str, PoolError> {
        if object.name.starts_with("/kv/") {
            return Ok("caches of blocks");
        }
        let words = if object.bytes < polder_mem::LINE { None } else { line::read(self.memory, object.at)? };
        Ok(match words.and_then(|words| Kind::of(&words)) {
            Some(Kind::Rank) => "groups",
            Some(Kind::Ring | Kind::Receiver) => "channels",
            Some(Kind::Part) => "parameter services",
            Some(Kind::Version) => "stores",
            _ => "other objects",
        })
    }
}
