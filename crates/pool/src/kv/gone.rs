//! The room of a host that is gone: how it comes back, at once or while other hosts want it.
//!
//! Nobody writes another host's part. A process attaches as the host that is gone, which the pool allows once that host has left or is fenced, and
//! gives up its slabs as the host itself would. So a process that dies in the middle leaves what a process of that host leaves.

use std::sync::Arc;

use polder_mem::{LINE, Memory};

use super::stat::{Fenced, control_from_outside, named, slab_of};
use super::wire::{Control, Root};
use super::{Cache, HEADER_BYTES, Identity, Options, expect_name};
use crate::format::read_superblock;
use crate::inspect::ObjectStat;
use crate::{Pool, PoolError, inspect as inspect_pool, line};

/// A visit gives this part of the budget, because each reads the whole part of the host that is gone.
const VISITS: u64 = 16;

/// What became of a host's slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GivenUp {
    /// Bytes of the slabs that were given up.
    pub bytes: u64,
    /// Slabs that stay, because a process is writing there or has pinned a block.
    pub kept: u64,
}

/// The part of a host that is gone, of whose room other hosts want some.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct GonePart {
    /// The cache.
    pub cache: String,
    /// The host.
    pub host: u16,
    /// How many bytes of its slabs to give up now. None, where it has to take back only that it wants some itself.
    pub bytes: u64,
}

/// The parts of hosts that are gone while others want their room, from outside: nothing is written, and no byte is trusted. A host is
/// gone that was evicted and fenced. Living hosts want room while there was no slab for them, and there is none now: the budget allows none, or no
/// free run of the pool is long enough. What a host that is gone wants keeps others at their fair parts, so that is taken back whatever others want.
///
/// # Errors
/// Those of [`inspect`](crate::inspect()); [`PoolError::Corrupt`] when the view is damaged.
pub fn wanted_parts<M: Memory>(memory: &M) -> Result<Vec<GonePart>, PoolError> {
    let layout = read_superblock(memory)?.layout()?;
    let fenced = Fenced::read(memory, &layout)?;
    if !fenced.has_any_evicted() {
        return Ok(vec![]);
    }
    let found = inspect_pool(memory)?;
    let mut parts = vec![];
    for (name, objects) in named(&found.objects) {
        parts.extend(parts_of(memory, name, &objects, &fenced, found.longest_unclaimed_bytes)?);
    }
    Ok(parts)
}

/// Those of a cache; none where it is damaged or being removed.
fn parts_of<M: Memory>(
    memory: &M,
    name: &str,
    objects: &[(&str, &ObjectStat)],
    fenced: &Fenced,
    longest: u64,
) -> Result<Vec<GonePart>, PoolError> {
    let Some((_, root)) = objects.iter().find(|(rest, _)| rest.is_empty()) else { return Ok(vec![]) };
    let words = if root.bytes < LINE { None } else { line::read(memory, root.at)? };
    let Some(geometry) = words.and_then(|words| Root::decode(&words)) else { return Ok(vec![]) };
    let mut held = vec![0_u64; geometry.hosts.into()];
    let slabs = || objects.iter().filter_map(|(rest, object)| Some((slab_of(rest)?.0, object.bytes)));
    let slab = slabs().map(|(_, bytes)| bytes).max().unwrap_or(geometry.slab_bytes);
    for (host, bytes) in slabs() {
        held.get_mut(usize::from(host)).into_iter().for_each(|held| *held = held.saturating_add(bytes));
    }
    let (mut claimed, mut asked, mut gone) = (0_u64, 0, vec![]);
    let lines = (root.bytes / LINE).saturating_sub(1);
    for (host, held) in (0..geometry.hosts).zip(held).take(lines as usize) {
        let Some(control) = control_from_outside(memory, root.at.lines(1 + u64::from(host)))? else {
            continue;
        };
        // A host that died while it wrote its line, or made or gave up a slab, may claim more than it has: a visit puts that right.
        let has = control.map_or(held.saturating_add(slab), |control| control.claimed);
        claimed = claimed.saturating_add(has);
        match control {
            _ if fenced.is_gone(host, control.as_ref()) => {
                let wants = control.is_none_or(|control| control.wants);
                gone.push((host, wants, has.max(held)));
            }
            Some(control) if fenced.is_member(host) => asked = control.asked.max(asked),
            Some(_) => {}
            None => {}
        }
    }
    // A slab lies in one piece, behind its header.
    let has_room =
        claimed.saturating_add(asked) <= geometry.budget && longest >= asked.saturating_add(HEADER_BYTES);
    let bytes = if asked > 0 && !has_room { asked.max(geometry.budget / VISITS) } else { 0 };
    let gone = gone.into_iter().filter(|(_, wants, has)| *wants || (bytes > 0 && *has > 0));
    Ok(gone.map(|(host, ..)| GonePart { cache: name.to_owned(), host, bytes }).collect())
}

impl<M: Memory> Cache<M> {
    /// Gives up the slabs of the host as which this process has attached, with their blocks: their room is any host's then. So the room of
    /// a host that never comes back returns, once its id is free to take: until then its blocks stay readable.
    ///
    /// # Errors
    /// [`PoolError::Name`]; [`PoolError::NotFound`] when there is no such cache; [`PoolError::Corrupt`] when its root is damaged; those of
    /// [`Cache::put`].
    pub fn give_up_part(pool: &Arc<Pool<M>>, name: &str) -> Result<GivenUp, PoolError> {
        Self::give_up_bytes(pool, name, u64::MAX)
    }

    /// Gives up slabs of a host that is gone, as which this process has attached, until others have the bytes that they want.
    ///
    /// # Errors
    /// Those of [`Cache::give_up_part`].
    pub fn give_to_living(pool: &Arc<Pool<M>>, part: &GonePart) -> Result<GivenUp, PoolError> {
        Self::give_up_bytes(pool, &part.cache, part.bytes)
    }

    fn give_up_bytes(pool: &Arc<Pool<M>>, name: &str, bytes: u64) -> Result<GivenUp, PoolError> {
        expect_name(name)?;
        let root = pool.open(&format!("/kv/{name}"))?;
        let found = line::read(pool.memory(), root.at());
        let corrupt = PoolError::Corrupt { offset: root.at(), what: "root of a cache" };
        pool.close(root);
        let geometry = found?.and_then(|words| Root::decode(&words)).ok_or(corrupt)?;
        match pool.open_if_there(&format!("/kv/{name}/host/{}", pool.member().host))? {
            Some(part) => pool.close(part),
            None => return Ok(GivenUp::default()),
        }
        let nobody = Identity { hash: [0; 32], text: String::new(), block: 1 };
        let mut cache = Self::open_part(Arc::clone(pool), name, nobody, Options::default(), geometry)?;
        // This process has the host's id by now, and leaves the host as gone as it was.
        let fenced = Fenced::read(pool.memory(), pool.layout())?;
        let me = pool.member().host;
        let said = control_from_outside(pool.memory(), cache.control_at(me))?;
        cache.stands_in = said.is_some_and(|said| fenced.is_gone(me, said.as_ref()));
        let given = cache.change(|control| cache.give_up_slabs(control, bytes))?;
        drop(cache);
        pool.maintain()?;
        // The next slab lies in one piece.
        pool.directory().give_back_all()?;
        Ok(given)
    }

    /// Gives up the slabs of this host that can be, until they were so many bytes.
    fn give_up_slabs(&self, control: &mut Control, bytes: u64) -> Result<GivenUp, PoolError> {
        let mut given = GivenUp::default();
        // Nobody is left that wants more.
        (control.wants, control.asked) = (false, 0);
        for (number, slab) in self.find_own(control)? {
            if given.bytes >= bytes {
                break;
            }
            match self.give_up_slab(control, number, &slab)? {
                true => given.bytes += slab.head.bytes(),
                false => given.kept += 1,
            }
        }
        self.publish_control(control);
        Ok(given)
    }
}
