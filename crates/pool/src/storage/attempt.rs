//! Attempts: processes that publish the same numbers, each in a store of its own. A version counts once all of them have it.

use std::collections::BTreeSet;

use polder_mem::{LINE, Memory};

use super::manifest::{self, Head};
use super::{Found, Plan, Published, Store};
use crate::PoolError;
use crate::deviation::Deviation;
use crate::list::ListedObject;
use crate::object::Object;
use crate::owned::{self, Identity, Kind};

/// One start of a job, as one of its processes sees it.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'s, M: Memory> {
    /// What tells it from every other start; not 0.
    pub word: u64,
    /// The number of its first version: above all that its processes have found.
    pub first: u64,
    /// The version that counts until one of this attempt is whole; 0 for none.
    pub base: u64,
    /// Versions of lower numbers are left alone.
    pub floor: u64,
    /// The highest number that was in this process's own store when the attempt began.
    pub seen: u64,
    /// The stores of its other processes.
    pub others: &'s [Store<M>],
    /// Stores of processes that the attempt before had and this one has not: this process clears them.
    pub left: &'s [Store<M>],
}

impl<M: Memory> Attempt<'_, M> {
    fn is_it(&self, word: u64) -> bool {
        word == self.word || Deviation::AnyAttempt.is_on()
    }
}

impl<M: Memory> Store<M> {
    fn owner_name(&self) -> String {
        format!("/version/{}/owner", self.name)
    }

    /// Makes this process the owner of the store: the only one that publishes there. It is until it leaves the pool.
    ///
    /// # Errors
    /// [`PoolError::VersionTaken`] while another process, which may live, is the owner; those of [`Pool::create`](crate::Pool::create).
    pub fn own(&self) -> Result<(), PoolError> {
        let name = self.owner_name();
        loop {
            if let Some(object) = self.pool.open_if_there(&name)? {
                let owner = self.is_ours(&object);
                let writer = self.writer(&object);
                self.pool.close(object);
                if owner? || Deviation::OwnsTheLiving.is_on() {
                    return Ok(());
                }
                if let Some(peer) = writer? {
                    let version = self.marked().unwrap_or(0) + 1;
                    return Err(PoolError::VersionTaken { name: self.name.clone(), version, peer });
                }
            }
            match owned::create(&self.pool, &name, LINE, Kind::Version, [0; 3]) {
                // Another process was faster: who is it?
                Err(PoolError::Exists { .. }) => self.pool.memory().pause(),
                made => return made.map(|object| self.pool.close(object)),
            }
        }
    }

    /// Gives up what [`Store::own`] took, if this process has it; also what a dead process had.
    pub fn disown(&self) {
        let Ok(Some(object)) = self.pool.open_if_there(&self.owner_name()) else { return };
        let is_free = matches!(self.is_ours(&object), Ok(true)) || matches!(self.writer(&object), Ok(None));
        match is_free {
            true => self.pool.abandon(object),
            false => self.pool.close(object),
        }
    }

    fn is_ours(&self, object: &Object) -> Result<bool, PoolError> {
        let owner = Identity::find(&self.pool, object, Kind::Version)?;
        Ok(owner.is_some_and(|owner| owner.process.identity() == self.pool.this_process().identity()))
    }

    /// Publishes version `number` of an attempt, and removes what nothing needs any more. Until a version of the attempt is whole, its
    /// base stays, and all before it while there is room. Then the newest whole one stays, what is newer, and the one before it.
    /// An attempt of one process takes a higher number where `number` is in use.
    ///
    /// # Errors
    /// [`PoolError::VersionBehind`] when another attempt has published since this one began; otherwise those of
    /// [`Store::publish_over`].
    pub fn publish_in(
        &self,
        attempt: &Attempt<'_, M>,
        number: u64,
        tensors: &[(&str, &[u8])],
    ) -> Result<Published, PoolError> {
        let is_alone = attempt.others.is_empty();
        let mut published = self.publish_number(attempt, number, tensors);
        // Whether the newest is whole may have come out since. Alone, a process keeps two.
        for with_spare in if is_alone { &[true][..] } else { &[true, false][..] } {
            if !matches!(published, Err(PoolError::Full { .. })) {
                break;
            }
            self.prune(attempt, *with_spare)?;
            published = self.publish_number(attempt, number, tensors);
        }
        let published = published?;
        // What stays is removed after the next version.
        if let Err(error) = self.prune(attempt, true) {
            tracing::warn!("versions of {} stay in the pool: {error}", self.name);
        }
        Ok(published)
    }

    fn publish_number(
        &self,
        attempt: &Attempt<'_, M>,
        number: u64,
        tensors: &[(&str, &[u8])],
    ) -> Result<Published, PoolError> {
        let listed = self.listed()?;
        self.expect_newest(attempt, number, &listed)?;
        // Alone, it need not be the number that others have.
        let number = match attempt.others.is_empty() {
            true => number.max(self.next_number(&listed).unwrap_or(number)),
            false => number,
        };
        let base = self.base(&listed, None)?;
        self.remove_unpublished(&listed, number)?;
        let mut plan = Plan::new(number, tensors, base.as_ref())?;
        plan.attempt = attempt.word;
        let marks = self.marks_or_new()?;
        let published = self.publish_object(&mut plan, || {});
        drop(base);
        let marked = published.and_then(|published| self.mark(&marks, number).map(|()| published));
        self.pool.close(marks);
        marked
    }

    /// Removes what a writer that died left under this number before it was a version: the processes of an attempt agree on the number
    /// by the versions that they find. No writer that lives has it, as `base` has seen.
    fn remove_unpublished(&self, listed: &[(u64, ListedObject)], number: u64) -> Result<(), PoolError> {
        let Some((_, left)) = listed.iter().find(|(other, _)| *other == number) else { return Ok(()) };
        let Some(object) = self.open_listed(left)? else { return Ok(()) };
        if let Found::Unpublished(object) = self.find(number, object)? {
            self.pool.abandon(object);
        }
        Ok(())
    }

    /// Nobody else has published since the attempt began.
    fn expect_newest(
        &self,
        attempt: &Attempt<'_, M>,
        number: u64,
        listed: &[(u64, ListedObject)],
    ) -> Result<(), PoolError> {
        for &(newest, _) in listed.iter().take_while(|(newest, _)| *newest > attempt.seen) {
            let is_other = self.attempt_of(newest)?.is_some_and(|word| !attempt.is_it(word));
            if is_other && !Deviation::PublishesBehind.is_on() {
                return Err(PoolError::VersionBehind { name: self.name.clone(), version: number, newest });
            }
        }
        Ok(())
    }

    /// The attempt of a version that is published, whether all its objects are there or not.
    fn attempt_of(&self, number: u64) -> Result<Option<u64>, PoolError> {
        let read = || {
            let Some(object) = self.pool.open_if_there(&self.object_name(number))? else { return Ok(None) };
            let head = Head::read(self.pool.memory(), &object, number);
            self.pool.close(object);
            Ok(head?.map(|head| head.attempt))
        };
        match read() {
            Err(PoolError::Corrupt { .. }) => Ok(None),
            read => read,
        }
    }

    /// Removes what an attempt does not need.
    fn prune(&self, attempt: &Attempt<'_, M>, with_spare: bool) -> Result<(), PoolError> {
        let listed = self.listed()?;
        let own = self.published_in(attempt, &listed)?;
        let whole = self.newest_whole(attempt, &own)?;
        let spare = whole.map(|whole| own.iter().copied().find(|own| *own < whole).unwrap_or(attempt.base));
        let stays = |number: u64| match whole {
            _ if number < attempt.floor && !Deviation::IgnoresFloor.is_on() => true,
            Some(whole) => number >= whole || with_spare && Some(number) == spare,
            None => with_spare || number >= attempt.first || number == attempt.base,
        };
        self.remove_all_but(&listed, &self.needed(&listed, stays)?);
        // The base counts until a version is whole, and is the spare until the one after that.
        let has_spare = whole.is_some_and(|whole| !with_spare || own.iter().any(|number| *number < whole));
        if has_spare || Deviation::ClearsAtOnce.is_on() {
            attempt.left.iter().try_for_each(|left| left.clear(attempt))?;
        }
        Ok(())
    }

    /// The stamps of the objects of those versions that stay: what they share with others stays with them.
    fn needed(
        &self,
        listed: &[(u64, ListedObject)],
        stays: impl Fn(u64) -> bool,
    ) -> Result<BTreeSet<u64>, PoolError> {
        let mut needed = BTreeSet::new();
        for (number, listed) in listed.iter().filter(|(number, _)| stays(*number)) {
            let Some(object) = self.open_listed(listed)? else { continue };
            needed.insert(manifest::stamp(&object));
            match self.find(*number, object) {
                Ok(Found::Whole(version)) => needed.extend(version.held.iter().map(manifest::stamp)),
                Ok(Found::Unpublished(object)) => self.pool.close(object),
                Ok(Found::Gone) | Err(PoolError::Corrupt { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(needed)
    }

    /// Removes what a process left that an attempt has no more. If another process that lives owns its store, or another attempt has
    /// published there since, all stays.
    fn clear(&self, attempt: &Attempt<'_, M>) -> Result<(), PoolError> {
        let stays = |number: u64| number < attempt.floor && !Deviation::IgnoresFloor.is_on();
        let listed = self.listed()?;
        if listed.iter().all(|(number, _)| stays(*number)) {
            // Of a process that died while it cleared.
            self.disown();
            return Ok(());
        }
        match self.own() {
            Err(PoolError::VersionTaken { .. }) => return Ok(()),
            owned => owned?,
        }
        let listed = self.listed()?;
        // What a dead writer left unpublished counts for nothing.
        let newer = listed.iter().take_while(|(number, _)| *number >= attempt.first);
        let mut published = newer.map(|(number, _)| self.attempt_of(*number));
        if published.try_fold(true, |none, by| by.map(|by| none && by.is_none()))? {
            // First the marks: no reader looks for what is gone.
            if let Some(marks) = self.marks()? {
                self.discard(marks)?;
            }
            self.remove_all_but(&listed, &self.needed(&listed, stays)?);
        }
        self.disown();
        Ok(())
    }

    /// The newest version of an attempt that all of its processes have published, if this one has it.
    ///
    /// # Errors
    /// Those of [`Pool::list`](crate::Pool::list) and [`Pool::open`](crate::Pool::open).
    pub fn whole_in(&self, attempt: &Attempt<'_, M>) -> Result<Option<u64>, PoolError> {
        let own = self.published_in(attempt, &self.listed()?)?;
        self.newest_whole(attempt, &own)
    }

    /// The numbers that this process has published in an attempt and that are kept, the newest first.
    fn published_in(
        &self,
        attempt: &Attempt<'_, M>,
        listed: &[(u64, ListedObject)],
    ) -> Result<Vec<u64>, PoolError> {
        let mut own = vec![];
        for &(number, _) in listed.iter().take_while(|(number, _)| *number >= attempt.first) {
            if self.attempt_of(number)? == Some(attempt.word) {
                own.push(number);
            }
        }
        Ok(own)
    }

    /// The newest of these numbers that all processes of the attempt have published.
    fn newest_whole(&self, attempt: &Attempt<'_, M>, numbers: &[u64]) -> Result<Option<u64>, PoolError> {
        for &number in numbers {
            let mut is_whole = true;
            for other in attempt.others.iter().filter(|_| !Deviation::PrunesAlone.is_on()) {
                is_whole &= other.attempt_of(number)?.is_some_and(|word| attempt.is_it(word));
            }
            if is_whole {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }
}
