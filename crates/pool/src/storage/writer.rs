//! Writing versions.

use std::collections::{BTreeMap, BTreeSet};

use polder_mem::{LINE, Memory, Offset};
use twox_hash::XxHash3_128;

use super::manifest::{self, Head, MANIFEST_LINE, Manifest, Other, Tensor};
use super::{Found, Store, Version};
use crate::deviation::Deviation;
use crate::list::ListedObject;
use crate::object::Object;
use crate::owned::{self, Identity, Kind};
use crate::{PoolError, word};

/// How often a writer takes a number. A list misses the object of a writer that died while it was made, until a process of that
/// writer's host has put the entry right. If another has the number, the next list shows it, unless it is damaged.
const ATTEMPTS: u32 = 8;

/// A tensor of at most so many bytes may change while it is published, as a running mean does: what counts is the copy.
const MAY_CHANGE_BYTES: usize = 1 << 20;

const fn may_change(bytes: &[u8]) -> bool {
    bytes.len() <= MAY_CHANGE_BYTES
}

/// What a writer has published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The number of the version.
    pub version: u64,
    /// Bytes of tensors that were copied.
    pub copied: u64,
    /// Bytes of tensors that have not changed, and were not copied.
    pub shared: u64,
}

/// What a version will be.
pub(crate) struct Plan<'t> {
    manifest: Manifest,
    /// The tensors that are copied, by name.
    fresh: Vec<(&'t str, &'t [u8])>,
    published: Published,
    /// The attempt that publishes it, or 0.
    pub(super) attempt: u64,
    /// Bytes of the object.
    pub(crate) bytes: u64,
}

impl<M: Memory> Store<M> {
    /// As [`Store::publish_over`], over the newest version.
    ///
    /// # Errors
    /// As there.
    pub fn publish(&self, tensors: &[(&str, &[u8])]) -> Result<Published, PoolError> {
        self.publish_over(tensors, None)
    }

    /// Publishes a version of these tensors. Once this returns, every process finds it, also when this one is killed. Until
    /// then every process finds the version before. That one is kept, or the version `over` if that is given, and all others are
    /// removed: give it where a version counts only once other stores have theirs too.
    /// If another thread writes a tensor meanwhile, of at most 1 MiB the copy counts, and a larger one is corrupt.
    ///
    /// # Errors
    /// [`PoolError::VersionTaken`] when another process, which may live, is writing one; [`PoolError::Full`] when there is no room for a
    /// third version beside the two that are kept; [`PoolError::Argument`] for two tensors of one name; [`PoolError::NoVersion`] when
    /// another process removed the version meanwhile; those of [`Pool::create`](crate::Pool::create). Nothing is left of it then.
    pub fn publish_over(&self, tensors: &[(&str, &[u8])], over: Option<u64>) -> Result<Published, PoolError> {
        for _ in 1..ATTEMPTS {
            match self.publish_once(tensors, over) {
                Err(PoolError::Exists { .. }) => {}
                done => return done,
            }
        }
        self.publish_once(tensors, over)
    }

    fn publish_once(&self, tensors: &[(&str, &[u8])], over: Option<u64>) -> Result<Published, PoolError> {
        let listed = self.listed()?;
        let number = self.next_number(&listed)?;
        let base = self.base(&listed, over)?;
        if over.is_some() && base.is_none() {
            return Err(self.no_version(over));
        }
        let mut plan = Plan::new(number, tensors, base.as_ref())?;
        let marks = self.marks_or_new()?;
        let published = self.publish_planned(&listed, &mut plan, base.as_ref());
        drop(base);
        let marked = published.and_then(|published| self.mark(&marks, number).map(|()| published));
        self.pool.close(marks);
        marked
    }

    /// The number after the highest of which an object or a mark is there.
    pub(super) fn next_number(&self, listed: &[(u64, ListedObject)]) -> Result<u64, PoolError> {
        let highest = listed.first().map_or(0, |(number, _)| *number).max(self.marked()?);
        // Marks have room for so many. No writer comes there.
        let corrupt = |at| PoolError::Corrupt { offset: at, what: "number of a version" };
        let at = listed.first().map_or(Offset(0), |(_, listed)| listed.at);
        highest.checked_add(1).filter(|number| number >> word::BITS == 0).ok_or_else(|| corrupt(at))
    }

    fn publish_planned(
        &self,
        listed: &[(u64, ListedObject)],
        plan: &mut Plan<'_>,
        base: Option<&Version<M>>,
    ) -> Result<Published, PoolError> {
        let manifest = plan.manifest.clone();
        let published = self.publish_object(plan, || {
            if Deviation::RemoveFirst.is_on() {
                self.remove_older(listed, &manifest, None);
            }
        })?;
        self.remove_older(listed, &plan.manifest, base);
        Ok(published)
    }

    /// Makes the object of a version, and publishes it; `made` comes between.
    pub(super) fn publish_object(
        &self,
        plan: &mut Plan<'_>,
        made: impl FnOnce(),
    ) -> Result<Published, PoolError> {
        let number = plan.published.version;
        let name = self.object_name(number);
        let object = owned::create_unfilled(&self.pool, &name, plan.bytes, Kind::Version, [0; 3])?;
        made();
        if let Err(error) = self.write(&object, plan) {
            self.pool.abandon(object);
            return Err(error);
        }
        let is_there = self.pool.is_live(object.name(), object.owner(), object.generation());
        self.pool.close(object);
        if !is_there? {
            return Err(self.no_version(Some(number)));
        }
        Ok(plan.published)
    }

    /// The newest version or the one that is asked for, and that nobody else writes.
    pub(super) fn base(
        &self,
        listed: &[(u64, ListedObject)],
        over: Option<u64>,
    ) -> Result<Option<Version<M>>, PoolError> {
        for (number, listed) in listed {
            let Some(object) = self.open_listed(listed)? else { continue };
            match self.find(*number, object) {
                Ok(Found::Whole(version)) if over.is_none_or(|over| over == *number) => {
                    return Ok(Some(version));
                }
                Ok(Found::Unpublished(object)) => {
                    let writer = self.writer(&object);
                    self.pool.close(object);
                    if let Some(peer) = writer? {
                        return Err(PoolError::VersionTaken {
                            name: self.name.clone(),
                            version: *number,
                            peer,
                        });
                    }
                }
                // The new version refers to none of it.
                Ok(Found::Whole(_) | Found::Gone) | Err(PoolError::Corrupt { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The process that writes this object, unless it died.
    pub(super) fn writer(&self, object: &Object) -> Result<Option<crate::Peer>, PoolError> {
        let Some(identity) = Identity::find(&self.pool, object, Kind::Version)? else { return Ok(None) };
        match self.pool.expect_alive(&identity.process, "version", 0) {
            Ok(()) => Ok(Some(identity.process.peer())),
            Err(PoolError::PeerDead { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    // SYNC: pairs with `load_manifest` and `Version::read`.
    pub(crate) fn write(&self, object: &Object, plan: &mut Plan<'_>) -> Result<(), PoolError> {
        let (memory, number) = (self.pool.memory(), plan.published.version);
        if Deviation::HeadFirst.is_on() {
            for (name, bytes) in &plan.fresh {
                plan.manifest
                    .tensors
                    .entry((*name).to_owned())
                    .and_modify(|it| it.sum = XxHash3_128::oneshot(bytes));
            }
            Head::of(&plan.manifest.encode(), plan.attempt).publish(memory, object, number);
        }
        let mut copy = vec![];
        for &(name, bytes) in &plan.fresh {
            let tensor = plan.manifest.tensors.get_mut(name).expect("what is copied is in the manifest");
            let at = object.at() + tensor.offset;
            if !may_change(bytes) {
                memory.copy_in_nt(at, bytes)?;
                continue;
            }
            copy.clear();
            copy.extend_from_slice(bytes);
            tensor.sum = XxHash3_128::oneshot(&copy);
            memory.copy_in_nt(at, &copy)?;
        }
        let encoded = plan.manifest.encode();
        memory.copy_in_nt(object.at().lines(MANIFEST_LINE), &encoded)?;
        // All of it is in memory before the head that leads to it.
        // SYNC: pairs with `load_manifest` and `Version::read`.
        memory.sfence();
        Head::of(&encoded, plan.attempt).publish(memory, object, number);
        Ok(())
    }

    /// The marks of the store, made anew if it has none.
    pub(crate) fn marks_or_new(&self) -> Result<Object, PoolError> {
        if let Some(marks) = self.marks()? {
            return Ok(marks);
        }
        match self.pool.create(&self.marks_name(), self.marks_bytes()) {
            // Another process was faster.
            Err(PoolError::Exists { name }) => self.marks()?.ok_or(PoolError::NotFound { name }),
            made => made,
        }
    }

    /// Raises the mark of this host. Once this returns, every reader looks for this version or a newer one.
    // SYNC: pairs with `marked`.
    pub(crate) fn mark(&self, marks: &Object, number: u64) -> Result<(), PoolError> {
        let (memory, at) = (self.pool.memory(), marks.at().lines(self.pool.member().host.into()));
        if word::open(memory.load(at)?).is_none_or(|marked| marked < number) {
            memory.store(at, word::seal(number));
            memory.write_back(at, LINE);
            memory.mfence();
        }
        Ok(())
    }

    /// Removes the objects that neither the new version nor the one before it needs. What stays is removed after the next version.
    fn remove_older(&self, listed: &[(u64, ListedObject)], manifest: &Manifest, base: Option<&Version<M>>) {
        let mut needed: BTreeSet<u64> = manifest.others.iter().map(|other| other.stamp).collect();
        needed.extend(base.iter().flat_map(|base| &base.held).map(manifest::stamp));
        self.remove_all_but(listed, &needed);
    }

    pub(super) fn remove_all_but(&self, listed: &[(u64, ListedObject)], needed: &BTreeSet<u64>) {
        for (_, listed) in listed {
            match self.open_listed(listed) {
                Ok(Some(object)) if needed.contains(&manifest::stamp(&object)) => self.pool.close(object),
                Ok(Some(object)) => self.pool.abandon(object),
                Ok(None) => {}
                Err(error) => tracing::warn!("{} stays in the pool: {error}", listed.name),
            }
        }
    }
}

impl<'t> Plan<'t> {
    /// Shares with `base` what has not changed, unless that keeps an object of which more than half is out of use.
    pub(crate) fn new<M: Memory>(
        number: u64,
        tensors: &[(&'t str, &'t [u8])],
        base: Option<&Version<M>>,
    ) -> Result<Self, PoolError> {
        let unchanged: Vec<_> = tensors.iter().map(|(name, bytes)| base?.same(name, bytes)).collect();
        let mut in_use = BTreeMap::<u32, u64>::new();
        for old in unchanged.iter().flatten() {
            *in_use.entry(old.object).or_default() += old.bytes.next_multiple_of(LINE);
        }
        in_use.retain(|object, bytes| base.is_some_and(|base| *bytes * 2 >= base.bytes_of(*object)));
        // In the order of the objects of the base, from 1.
        let objects: BTreeMap<u32, u32> = in_use.keys().copied().zip(1..).collect();
        let mut manifest = Manifest::default();
        manifest
            .others
            .extend(base.iter().flat_map(|base| objects.keys().map(|&object| base.reference(object))));
        let names = tensors.iter().map(|(name, _)| *name);
        let mut end = manifest::start(Manifest::bytes(objects.len(), names));
        let (mut fresh, mut copied, mut shared) = (vec![], 0, 0);
        for (index, (name, bytes)) in tensors.iter().enumerate() {
            let kept =
                unchanged[index].and_then(|old| Some(Tensor { object: *objects.get(&old.object)?, ..old }));
            let length = bytes.len() as u64;
            // One that may change is summed when it is copied.
            let sum = if kept.is_some() || may_change(bytes) { 0 } else { XxHash3_128::oneshot(bytes) };
            let tensor = kept.unwrap_or(Tensor { object: 0, offset: end, bytes: length, sum });
            match kept {
                Some(_) => shared += length,
                None => {
                    fresh.push((*name, *bytes));
                    copied += length;
                    end += length.next_multiple_of(LINE);
                }
            }
            if manifest.tensors.insert((*name).to_owned(), tensor).is_some() {
                return Err(PoolError::Argument {
                    what: "the name of a tensor",
                    value: format!("{name:?} twice"),
                    expected: "a different name for each",
                });
            }
        }
        Ok(Self {
            manifest,
            fresh,
            published: Published { version: number, copied, shared },
            attempt: 0,
            bytes: end,
        })
    }

    /// As another thread does that writes the tensors before they are copied.
    #[cfg(test)]
    pub(super) fn change(&mut self, to: &[&'t [u8]]) {
        for ((_, bytes), to) in self.fresh.iter_mut().zip(to) {
            *bytes = to;
        }
    }
}

impl<M: Memory> Version<M> {
    /// Where this tensor lies in the version, if it has these bytes there.
    fn same(&self, name: &str, bytes: &[u8]) -> Option<Tensor> {
        let old = *self.manifest.tensors.get(name)?;
        let is_it = old.bytes == bytes.len() as u64
            && !bytes.is_empty()
            && self.begins_with(&old, bytes)
            && XxHash3_128::oneshot(bytes) == old.sum;
        is_it.then_some(old)
    }

    /// Whether the first bytes are these: it spares the sum of most tensors that have changed. What this host saw there before
    /// may be something else. Then the tensor is summed, or copied, in vain.
    fn begins_with(&self, tensor: &Tensor, bytes: &[u8]) -> bool {
        let mut line = [0; LINE as usize];
        let first = &mut line[..bytes.len().min(LINE as usize)];
        let at = self.held[tensor.object as usize].at() + tensor.offset;
        self.pool.memory().copy_out(at, first).is_err() || bytes.starts_with(first)
    }

    /// Bytes of tensors in an object that it holds, those included that it does not use.
    fn bytes_of(&self, object: u32) -> u64 {
        match object.checked_sub(1) {
            None => self.own_bytes,
            Some(index) => self.manifest.others[index as usize].bytes,
        }
    }

    /// One of its objects, as the manifest of a later version names it.
    fn reference(&self, object: u32) -> Other {
        match object.checked_sub(1) {
            None => {
                Other { number: self.number, stamp: manifest::stamp(&self.held[0]), bytes: self.own_bytes }
            }
            Some(index) => self.manifest.others[index as usize],
        }
    }
}
