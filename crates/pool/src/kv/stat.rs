//! What a cache holds, as a process that uses it knows, and as one sees from outside who attaches nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use polder_mem::{LINE, Memory, Offset};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::wire::{Control, Entry, Root, SlabHead, Slot, State, tag_of};
use super::{Cache, TOTALS_LINE, line};
use crate::format::{Layout, SETTLE, read_superblock};
use crate::inspect::{Inspection, ObjectStat};
use crate::opens::{PinnedSlot, pinned_slots};
use crate::view::{Grant, View, Views};
use crate::{PoolError, inspect as inspect_pool};

/// The longest text of an identity that is shown.
const TEXT_BYTES: u64 = 64 << 10;

/// What is in a cache.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub struct CacheStat {
    /// Its name.
    pub name: String,
    /// Bytes that its slabs may take.
    pub budget: u64,
    /// Bytes that its slabs take or are about to take.
    pub claimed: u64,
    /// Blocks that are there.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Each host's part.
    pub hosts: Vec<PartStat>,
    /// The blocks of each identity.
    pub identities: Vec<IdentityStat>,
}

/// A host's part of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub struct PartStat {
    /// The host.
    pub host: u16,
    /// Blocks that lie in its slabs.
    pub blocks: u64,
    /// Bytes that its slabs take or are about to take.
    pub claimed: u64,
    /// Blocks that its processes have put.
    pub puts: u64,
    /// Blocks that made room for others.
    pub evictions: u64,
    /// Blocks that its processes have read, of any host.
    pub hits: u64,
    /// Blocks that its processes asked for and that were not there.
    pub misses: u64,
    /// How long ago the oldest block in its slabs was put, by the clocks of the hosts. Only a look from outside sees it.
    pub oldest_seconds: Option<u64>,
    /// Blocks in its slabs that processes of any host have pinned. Only a look from outside sees it.
    pub pinned: Option<u64>,
    /// Whether there was no slab for it when it last asked for one.
    #[serde(default)]
    pub wants_room: bool,
    /// Whether it is gone for good, so that the keeper gives its room to others while they want it. That it was fenced only a look from
    /// outside sees.
    #[serde(default)]
    pub gone: bool,
}

/// The blocks of one identity.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub struct IdentityStat {
    /// The first 4 bytes of its hash, as hexadecimal digits; all 32 where its text is known.
    pub hash: String,
    /// What it is of; empty where that is damaged or not written yet.
    pub text: String,
    /// Its blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a process has done with a cache, and knows of it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct UseStat {
    /// Blocks that it knows of.
    pub blocks: u64,
    /// Bytes of its own memory in which it keeps where they are.
    pub index_bytes: u64,
    /// Bytes that the cache's slabs take or are about to take.
    pub claimed: u64,
    /// Bytes that they may take.
    pub budget: u64,
    /// Blocks that it has read.
    pub hits: u64,
    /// Blocks that it asked for and that were not there.
    pub misses: u64,
    /// Of these, copies that were void because the block had made room for another meanwhile, or was damaged.
    pub void: u64,
    /// Each host's part, with the blocks that this process knows of.
    pub hosts: Vec<PartStat>,
}

impl PartStat {
    fn new(host: u16, control: &Control, [hits, misses]: [u64; 2]) -> Self {
        let Control { claimed, puts, evictions, gone, asked, .. } = *control;
        let (oldest_seconds, pinned) = (None, None);
        Self {
            host,
            blocks: 0,
            claimed,
            puts,
            evictions,
            hits,
            misses,
            oldest_seconds,
            pinned,
            wants_room: asked > 0,
            gone,
        }
    }

    /// Takes up a block in its slabs.
    fn add(&mut self, entry: &Entry, now: u64, is_pinned: bool) {
        self.blocks += 1;
        self.oldest_seconds = self.oldest_seconds.max(Some(now.saturating_sub(entry.second)));
        self.pinned = Some(self.pinned.unwrap_or(0) + u64::from(is_pinned));
    }
}

/// Hits and misses of a host, whose object lies there.
fn totals_in<M: Memory>(memory: &M, part: Offset) -> Result<[u64; 2], PoolError> {
    let at = part.lines(TOTALS_LINE);
    refresh(memory, at, LINE);
    Ok([memory.load(at)?, memory.load(at.word(1))?])
}

impl<M: Memory> Cache<M> {
    /// What this process has done with it, and knows of it.
    ///
    /// # Errors
    /// [`PoolError::Memory`], [`PoolError::Evicted`].
    pub fn stat(&self) -> Result<UseStat, PoolError> {
        let replica = self.polled()?;
        let counts = replica.counts;
        let mut stat = UseStat {
            blocks: replica.len() as u64,
            index_bytes: replica.bytes(),
            claimed: 0,
            budget: self.geometry.budget,
            hits: counts.hits,
            misses: counts.misses,
            void: counts.void,
            hosts: vec![],
        };
        for host in 0..self.geometry.hosts {
            let Some(control) = self.control_of(host)? else { continue };
            stat.claimed = stat.claimed.saturating_add(control.claimed);
            let part = replica.peers[usize::from(host)].part.as_ref();
            let totals = part.map(|part| totals_in(self.pool.memory(), part.at())).transpose()?;
            let blocks = replica.blocks_of(host);
            stat.hosts.push(PartStat { blocks, ..PartStat::new(host, &control, totals.unwrap_or_default()) });
        }
        Ok(stat)
    }
}

impl<M: Memory> Cache<M> {
    /// Removes what is written down of its identity, which no process will have again. Its blocks make room by and by.
    ///
    /// # Errors
    /// [`PoolError::NotFound`] when the cache was removed; those of [`Pool::destroy`](crate::Pool::destroy), and none when nothing is written down.
    pub fn retire(&self) -> Result<(), PoolError> {
        self.expect_there()?;
        match self.pool.destroy(&format!("/kv/{}/id/{}", self.name, self.identity.name())) {
            Ok(()) | Err(PoolError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Which hosts are members, and which were evicted.
#[derive(Clone, Debug, Default)]
pub(super) struct Fenced {
    members: u64,
    /// Of each host that was evicted: up to which incarnation it writes no more for certain, 0 where that is not known.
    through: Vec<Option<u64>>,
}

impl Fenced {
    pub(super) fn read<M: Memory>(memory: &M, layout: &Layout) -> Result<Self, PoolError> {
        // A host that is a member again has taken its id, which one that may still write keeps: a keeper may have died in its visit.
        let of_host = |view: &View, host| match view.had_evicted(host) {
            true if view.is_fenced(host) || view.has(host) => {
                let grant = Grant::read(memory, layout, view.keeper, host, SETTLE)?;
                Ok(Some(grant.evicted_through))
            }
            was_evicted => Ok(was_evicted.then_some(0)),
        };
        let all = |view: &View| (0..layout.geometry().hosts).map(|host| of_host(view, host)).collect();
        let (view, through) = Views::new(SETTLE).read(memory, layout, all)?;
        Ok(Self { members: view.members, through })
    }

    /// Whether any host was ever evicted, so that one may be gone.
    pub(super) fn has_any_evicted(&self) -> bool {
        self.through.iter().any(Option::is_some)
    }

    /// Whether a host is a member.
    pub(super) fn is_member(&self, host: u16) -> bool {
        self.members.checked_shr(host.into()).unwrap_or(0) & 1 == 1
    }

    /// Whether the host of a part is gone for good, as far as anyone knows: it is fenced and has not come back to the cache since.
    /// A line that is torn is that of a host that died while it wrote.
    pub(super) fn is_gone(&self, host: u16, control: Option<&Control>) -> bool {
        let through = self.through.get(usize::from(host)).copied().flatten().unwrap_or(0);
        control.map_or(through > 0, |control| control.gone || control.incarnation <= through)
    }
}

/// The control line of a host, from outside: the outer nothing where it has said nothing, the inner where its line is torn or damaged.
pub(super) fn control_from_outside<M: Memory>(
    memory: &M,
    at: Offset,
) -> Result<Option<Option<Control>>, PoolError> {
    let words = line::read(memory, at)?;
    let is_empty = words == Some([0; line::WORDS]);
    Ok((!is_empty).then(|| words.and_then(|words| Control::decode(&words))))
}

/// The caches of a pool, by name, from outside: nothing is written, and no byte is trusted. What changes meanwhile may be missing.
///
/// # Errors
/// Those of [`inspect`](crate::inspect()); [`PoolError::Corrupt`] when the root of a cache is damaged.
pub fn inspect<M: Memory>(memory: &M) -> Result<Vec<CacheStat>, PoolError> {
    let Inspection { objects, .. } = inspect_pool(memory)?;
    let layout = read_superblock(memory)?.layout()?;
    let caches = named(&objects);
    if caches.is_empty() {
        return Ok(vec![]);
    }
    // Where the view is damaged nobody is known to be gone.
    let (fenced, pinned) =
        (Fenced::read(memory, &layout).unwrap_or_default(), pinned_slots(memory, &layout)?);
    let inspect = |(name, objects): (_, Vec<_>)| inspect_cache(memory, name, &objects, &fenced, &pinned);
    caches.into_iter().filter_map(|cache| inspect(cache).transpose()).collect()
}

/// The objects of each cache, with what stands behind the cache's name.
pub(super) fn named(objects: &[ObjectStat]) -> BTreeMap<&str, Vec<(&str, &ObjectStat)>> {
    let mut caches = BTreeMap::<&str, Vec<(&str, &ObjectStat)>>::new();
    for object in objects {
        let Some(name) = object.name.strip_prefix("/kv/") else { continue };
        let (name, rest) = name.split_once('/').unwrap_or((name, ""));
        caches.entry(name).or_default().push((rest, object));
    }
    caches
}

/// The host and the number of a slab, of what stands behind the cache's name.
pub(super) fn slab_of(rest: &str) -> Option<(u16, u32)> {
    let (host, slab) = rest.strip_prefix("slab/")?.split_once('/')?;
    Some((host.parse().ok()?, slab.parse().ok()?))
}

/// Nothing where a cache is being removed.
fn inspect_cache<M: Memory>(
    memory: &M,
    name: &str,
    objects: &[(&str, &ObjectStat)],
    fenced: &Fenced,
    pinned: &BTreeSet<PinnedSlot>,
) -> Result<Option<CacheStat>, PoolError> {
    let Some((_, root)) = objects.iter().find(|(rest, _)| rest.is_empty()) else { return Ok(None) };
    let corrupt = PoolError::Corrupt { offset: root.at, what: "root of a cache" };
    let words = if root.bytes < LINE { None } else { line::read(memory, root.at)? };
    let Some(geometry) = words.and_then(|words| Root::decode(&words)) else { return Err(corrupt) };
    let mut stat = CacheStat {
        name: name.to_owned(),
        budget: geometry.budget,
        claimed: 0,
        blocks: 0,
        bytes: 0,
        hosts: vec![],
        identities: vec![],
    };
    for host in 0..geometry.hosts {
        let at = root.at.lines(1 + u64::from(host));
        if root.bytes < (2 + u64::from(host)) * LINE {
            return Err(corrupt);
        }
        let Some(Some(control)) = control_from_outside(memory, at)? else { continue };
        stat.claimed = stat.claimed.saturating_add(control.claimed);
        let name = format!("host/{host}");
        let part = objects.iter().find(|(rest, _)| *rest == name);
        let part = part.filter(|(_, part)| part.bytes >= (1 + TOTALS_LINE) * LINE);
        let totals = part.map(|(_, part)| totals_in(memory, part.at)).transpose()?;
        let gone = fenced.is_gone(host, Some(&control));
        stat.hosts.push(PartStat { gone, ..PartStat::new(host, &control, totals.unwrap_or_default()) });
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut identities = BTreeMap::<u32, IdentityStat>::new();
    for (rest, object) in objects {
        if let Some(hash) = rest.strip_prefix("id/") {
            let tag = hash.get(..8).and_then(|hash| u32::from_str_radix(hash, 16).ok()).map(u32::swap_bytes);
            let text = text_of(memory, object)?;
            let found = IdentityStat { hash: hash.to_owned(), text, blocks: 0, bytes: 0 };
            tag.into_iter().for_each(|tag| drop(identities.insert(tag, found.clone())));
        }
    }
    for (rest, object) in objects {
        let Some((host, slab)) = slab_of(rest) else { continue };
        let (cache, entries) = entries(memory, object)?;
        for (index, entry) in
            entries.into_iter().filter(|(_, entry)| (entry.host, entry.slab) == (host, slab))
        {
            let bytes = u64::from(entry.bytes);
            (stat.blocks, stat.bytes) = (stat.blocks + 1, stat.bytes + bytes);
            let slot = Slot::new(slab, index).word();
            let is_pinned = pinned.contains(&PinnedSlot { cache, owner: host, slot });
            let part = stat.hosts.iter_mut().find(|part| part.host == host);
            part.into_iter().for_each(|part| part.add(&entry, now, is_pinned));
            let identity = identities.entry(entry.identity).or_insert_with(|| IdentityStat {
                hash: format!("{:08x}", entry.identity.swap_bytes()),
                text: String::new(),
                blocks: 0,
                bytes: 0,
            });
            (identity.blocks, identity.bytes) = (identity.blocks + 1, identity.bytes + bytes);
        }
    }
    stat.identities = identities.into_values().collect();
    Ok(Some(stat))
}

/// What an identity is of; nothing where that is damaged or not written yet.
fn text_of<M: Memory>(memory: &M, object: &ObjectStat) -> Result<String, PoolError> {
    if object.bytes < LINE {
        return Ok(String::new());
    }
    let Some([bytes, sum, ..]) = line::read(memory, object.at)? else { return Ok(String::new()) };
    if bytes > TEXT_BYTES.min(object.bytes - LINE) {
        return Ok(String::new());
    }
    let mut text = vec![0; bytes as usize];
    refresh(memory, object.at + LINE, bytes);
    memory.copy_out(object.at + LINE, &mut text)?;
    Ok(String::from_utf8(text)
        .ok()
        .filter(|text| XxHash3_64::oneshot(text.as_bytes()) == sum)
        .unwrap_or_default())
}

/// What names its cache in pins, and the slots of a slab that hold a block, with their lines.
fn entries<M: Memory>(memory: &M, object: &ObjectStat) -> Result<(u16, Vec<(u32, Entry)>), PoolError> {
    if object.bytes < LINE {
        return Ok((0, vec![]));
    }
    let words = line::read(memory, object.at)?;
    // The generations of the object and the cache stand in the words too, and a look that only counts can do without.
    let head = words.and_then(|words| SlabHead::decode(&words, words[3], words[4]));
    let Some(head) = head.filter(|head| head.bytes() <= object.bytes) else { return Ok((0, vec![])) };
    let cache = tag_of(words.map_or(0, |words| words[4]));
    refresh(memory, object.at.lines(1), u64::from(head.slots) * LINE);
    let mut found = vec![];
    for index in 0..head.slots {
        let at = object.at.lines(1 + u64::from(index));
        let entry = line::load(memory, at)?.and_then(|words| Entry::decode(&words));
        found.extend(entry.filter(|entry| entry.state == State::Live).map(|entry| (index, entry)));
    }
    Ok((cache, found))
}

pub(super) fn refresh<M: Memory>(memory: &M, at: Offset, bytes: u64) {
    memory.invalidate(at, bytes);
    // SYNC: pairs with `Cache::publish`.
    memory.fence_invalidations();
}
