//! Removes what a job leaves if its processes are killed. An object is removed once no process can still need it:
//!
//! - a ring: when both its ends are gone, because messages of a dead sender are still received;
//! - an endpoint with its blocks: when its process is gone, none of its rings is kept, and all are gone to which it has a small ring;
//! - the segments of a window: when all their processes are gone, because a rank that looks for a dead one must find its name;
//! - private memory: when no endpoint from its host is kept whose process is gone, and no ring, because receivers read there what a dead sender has offered;
//! - a group: when all its ranks are gone.
//!
//! Damaged objects stay. So do those of a process that may still go on.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use polder_mem::Memory;

use crate::list::ListedObject;
use crate::name::Name;
use crate::object::Object;
use crate::owned::{Identity, Kind};
use crate::purpose::Use;
use crate::{Peer, Pool, PoolError};
use crate::{endpoint, group};

/// Who may miss an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// Its process, or it is not known whose it is.
    Stays,
    /// This process did, and never goes on.
    Gone(Peer),
    /// There is no such object any more.
    Nobody,
}

/// What a sweep has removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepReport {
    /// The objects.
    pub objects: Vec<ListedObject>,
    /// The processes whose endpoints were among them.
    pub dead: Vec<Peer>,
}

impl<M: Memory> Pool<M> {
    /// The jobs that have endpoints, windows or private memory.
    ///
    /// # Errors
    /// Those of [`Pool::list`].
    pub fn jobs(&self) -> Result<BTreeSet<u64>, PoolError> {
        let (found, _) = self.directory().list("")?;
        let job = |listed: &ListedObject| {
            let uses = ["/endpoint/", "/window/", "/memory/"];
            let name = uses.iter().find_map(|of| listed.name.strip_prefix(of))?;
            name.split_once('/')?.0.parse().ok()
        };
        Ok(found.iter().filter_map(job).collect())
    }

    /// Removes what processes of `job` have left that are gone, and returns what it was. A process of another kernel counts
    /// as gone once it has left, its host has cleaned up after it, or the view says that its host is off.
    ///
    /// # Errors
    /// Those of [`Pool::list`] and [`Pool::check_membership`].
    pub fn sweep_job(&self, job: u64) -> Result<SweepReport, PoolError> {
        let memory = |listed: &ListedObject| matches!(Use::of(&listed.name, job), Some(Use::Memory(_)));
        let mut known = BTreeMap::new();
        // A process that is gone by now has made all its rings, and the list that follows has them.
        for listed in self.directory().list("/memory/")?.0.into_iter().filter(memory) {
            let holder = self.holder(&listed.name, listed.generation, Kind::Private)?;
            known.insert((listed.name, listed.generation), holder);
        }
        let (mut objects, _) = self.directory().list("")?;
        objects.retain(|listed| Use::of(&listed.name, job).is_some());
        objects.retain(|listed| {
            !memory(listed) || known.contains_key(&(listed.name.clone(), listed.generation))
        });
        let mut is_over = |name: &str, generation| {
            let holder = match known.entry((name.to_owned(), generation)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(unknown) => {
                    let kind = Use::of(name, job).map_or(Kind::Endpoint, |of| of.kind());
                    *unknown.insert(self.holder(name, generation, kind)?)
                }
            };
            Ok::<_, PoolError>(holder != Holder::Stays)
        };
        // A search among all objects for each receiver of each endpoint would take the cube of a job's ranks.
        let mut found: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for listed in objects.iter().filter(|listed| Use::of(&listed.name, job) == Some(Use::Endpoint)) {
            found.entry(&listed.name).or_default().push(listed.generation);
        }
        let (mut kept, mut heard) = (BTreeSet::new(), BTreeSet::new());
        for listed in &objects {
            let is_kept = match Use::of(&listed.name, job) {
                Some(Use::Ring([receiver, sender])) => {
                    let is_kept = !is_over(&receiver.0, receiver.1)? || !is_over(&sender.0, sender.1)?;
                    if is_kept {
                        heard.extend(sender.0.rsplit_once('.').map(|(host, _)| host.to_owned()));
                        kept.insert(sender);
                    }
                    is_kept
                }
                Some(Use::Blocks(endpoint)) => {
                    let is_kept = !is_over(&endpoint.0, endpoint.1)?;
                    kept.extend(is_kept.then_some(endpoint));
                    is_kept
                }
                Some(Use::Endpoint) if is_over(&listed.name, listed.generation)? => {
                    let is_kept = self.has_live_receiver(job, listed, &found, &mut is_over)?;
                    if is_kept {
                        heard.extend(listed.name.rsplit_once('.').map(|(host, _)| host.to_owned()));
                    }
                    is_kept
                }
                _ => !is_over(&listed.name, listed.generation)?,
            };
            kept.extend(is_kept.then(|| (listed.name.clone(), listed.generation)));
        }
        let window = |listed: &ListedObject| match Use::of(&listed.name, job) {
            Some(Use::Segment(window)) => Some(window.to_owned()),
            _ => None,
        };
        let is_kept = |listed: &ListedObject| match Use::of(&listed.name, job) {
            Some(Use::Blocks(endpoint)) => kept.contains(&endpoint),
            _ => kept.contains(&(listed.name.clone(), listed.generation)),
        };
        let windows: BTreeSet<_> =
            objects.iter().filter(|listed| is_kept(listed)).filter_map(window).collect();
        let is_offered = |listed: &ListedObject| match Use::of(&listed.name, job) {
            Some(Use::Memory(host)) => heard.contains(&format!("/endpoint/{job}/{host}")),
            _ => false,
        };
        objects.retain(|listed| {
            !is_kept(listed)
                && !window(listed).is_some_and(|window| windows.contains(&window))
                && !is_offered(listed)
        });
        // An endpoint goes before what it has offered.
        objects.sort_by_key(memory);
        objects.retain(|listed| self.remove(listed));
        let dead = |listed: &ListedObject| match known.get(&(listed.name.clone(), listed.generation)) {
            Some(Holder::Gone(peer)) if Use::of(&listed.name, job) == Some(Use::Endpoint) => Some(*peer),
            _ => None,
        };
        Ok(SweepReport { dead: objects.iter().filter_map(dead).collect(), objects })
    }

    /// Removes the extents of groups of which no rank is left that could go on, those of `job` alone where one is given.
    ///
    /// # Errors
    /// Those of [`Pool::list`] and [`Pool::check_membership`].
    pub fn sweep_groups(&self, job: Option<u64>) -> Result<SweepReport, PoolError> {
        let (mut found, _) = self.directory().list("")?;
        found.retain(|listed| job.is_none_or(|job| job == listed.job));
        let mut groups: BTreeMap<String, Option<Vec<(ListedObject, Peer)>>> = BTreeMap::new();
        for listed in found {
            let Some((group, rank)) = listed.name.rsplit_once('/') else { continue };
            if rank.parse::<usize>().is_err() {
                continue;
            }
            let extents = groups.entry(group.to_owned()).or_insert_with(|| Some(vec![]));
            match self.rank_of(&listed)? {
                Holder::Nobody => {}
                Holder::Stays => *extents = None,
                Holder::Gone(peer) => extents.iter_mut().for_each(|of| of.push((listed.clone(), peer))),
            }
        }
        let mut gone: Vec<_> = groups.into_values().flatten().flatten().collect();
        gone.retain(|(listed, _)| self.remove(listed));
        let (objects, mut dead): (_, Vec<_>) = gone.into_iter().unzip();
        dead.sort_by_key(|peer| (peer.host, peer.pid));
        dead.dedup();
        Ok(SweepReport { objects, dead })
    }

    /// Whose extent of a group the object is; nobody's when it is of another kind, or gone.
    fn rank_of(&self, listed: &ListedObject) -> Result<Holder, PoolError> {
        let object = match self.open(&listed.name) {
            Err(PoolError::NotFound { .. }) => return Ok(Holder::Nobody),
            opened => opened?,
        };
        let process = match object.generation() == listed.generation {
            true => group::process_of(self, &object),
            false => Ok(None),
        };
        self.close(object);
        match process? {
            None => Ok(Holder::Nobody),
            Some(process) if self.is_gone(&process)? => Ok(Holder::Gone(process.peer())),
            Some(_) => Ok(Holder::Stays),
        }
    }

    /// The processes that hold the object `name` open and may still use it, beside this one.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::Name`]; those of [`Pool::process`] and [`Pool::check_membership`].
    pub fn holders(&self, name: &str) -> Result<Vec<Peer>, PoolError> {
        let announced = self.directory().announcement_of(&Name::parse(name)?)?;
        let mut holders = vec![];
        for (host, slot) in self.directory().announcers(announced)? {
            if (host, slot) == (self.member().host, self.this_process().slot) {
                continue;
            }
            let process = self.process(host, slot)?;
            if !self.is_gone(&process)? {
                holders.push(process.peer());
            }
        }
        Ok(holders)
    }

    /// Whether an endpoint has a small ring to another of those that were found that is not over.
    fn has_live_receiver(
        &self,
        job: u64,
        endpoint: &ListedObject,
        found: &BTreeMap<&str, Vec<u64>>,
        is_over: &mut impl FnMut(&str, u64) -> Result<bool, PoolError>,
    ) -> Result<bool, PoolError> {
        let receivers = match endpoint::receivers_of(self, job, &endpoint.name, endpoint.generation) {
            Err(PoolError::NotFound { .. } | PoolError::Corrupt { .. }) => return Ok(false),
            receivers => receivers?,
        };
        for (name, is_it) in receivers {
            let generations = found.get(&*name).into_iter().flatten();
            for &generation in generations.filter(|&&generation| is_it(generation)) {
                if !is_over(&name, generation)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Who holds the object of this name, generation and kind.
    fn holder(&self, name: &str, generation: u64, kind: Kind) -> Result<Holder, PoolError> {
        let of_object = |object: &Object| {
            if object.generation() != generation {
                return Ok(Holder::Nobody);
            }
            let process = Identity::read(self, object, kind)?.process;
            Ok(if self.is_gone(&process)? { Holder::Gone(process.peer()) } else { Holder::Stays })
        };
        let holder = match self.open(name) {
            Err(PoolError::NotFound { .. }) => Ok(Holder::Nobody),
            Err(error) => Err(error),
            Ok(object) => {
                let holder = of_object(&object);
                self.close(object);
                holder
            }
        };
        match holder {
            Err(
                error @ (PoolError::Corrupt { .. } | PoolError::Argument { .. } | PoolError::Timeout { .. }),
            ) => {
                tracing::warn!("{name} is kept: {error}");
                Ok(Holder::Stays)
            }
            holder => holder,
        }
    }

    /// Destroys the object that was listed, unless its name is another's by now; whether it did.
    fn remove(&self, listed: &ListedObject) -> bool {
        let Ok(object) = self.open(&listed.name) else { return false };
        if object.generation() != listed.generation {
            self.close(object);
            return false;
        }
        match self.discard(object) {
            Ok(()) => true,
            Err(PoolError::NotFound { .. }) => false,
            Err(error) => {
                tracing::warn!("{} stays in the pool: {error}", listed.name);
                false
            }
        }
    }
}
