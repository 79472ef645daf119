//! What a host does when one of its processes has died, and when its own words are new: it puts its shard right, and builds
//! its local state from it.

use std::cmp::Reverse;

use polder_mem::{Memory, ProcessSlot};

use crate::chunks::Chunks;
use crate::directory::{Directory, Sight};
use crate::entry::{self, Entry, Record, State};
use crate::extents::Extents;
use crate::local::LocalLock;
use crate::object::GENERATION_BITS;
use crate::opens::{Announcement, Opens};
use crate::state::{DAMAGED, LockName, Marks};
use crate::{PoolError, line};

impl<M: Memory> Directory<'_, M> {
    /// Makes the host's state ready, once for all its processes: after a start, or when the host-local file was lost, from
    /// the shard. Call it before anything else, when the host line is published.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host does not come to the end of it.
    pub(crate) fn prepare(&self) -> Result<(), PoolError> {
        let (site, ready) = (self.site, self.site.words().ready());
        if site.get(ready) != 0 {
            return Ok(());
        }
        let mut guard = site.lock(LockName::Recovery)?;
        if site.get(ready) == 0 {
            self.rebuild()?;
            site.set(ready, 1);
        }
        guard.repaired();
        Ok(())
    }

    /// Has the state built anew by the next [`Directory::prepare`].
    pub(crate) fn forget(&self) {
        self.site.set(self.site.words().ready(), 0);
    }

    /// Builds the state from the shard, whatever a process that died in the middle left of it.
    fn rebuild(&self) -> Result<(), PoolError> {
        let site = self.site;
        for slot in site.slots() {
            self.release_announcements(slot)?;
        }
        self.reset();
        Chunks(site).rebuild()?;
        let (mut highest, mut is_damaged, mut condemned) = (0, false, vec![]);
        for slot in 0..site.layout.slots() {
            match self.rebuild_slot(slot, &mut condemned)? {
                Some(generation) => highest = highest.max(generation),
                None => is_damaged = true,
            }
        }
        self.rebuild_condemned(condemned);
        self.rebuild_generations(highest)?;
        if is_damaged {
            Extents(site).mark_all_used();
        }
        let chunks = 0..site.layout.chunks();
        self.flush_empty_chunks();
        Extents(site).release_empty_chunks(chunks)?;
        Chunks(site).publish_all();
        Ok(())
    }

    fn reset(&self) {
        let (site, words) = (self.site, self.site.words());
        Extents(site).reset();
        let singles = [words.condemned_hint(), words.known_hosts()];
        let tags = (0..site.layout.slots()).step_by(8).map(|slot| words.tag(slot).0);
        let [condemned, tombstones] = [Marks::Condemned, Marks::Tombstones].map(|kind| words.marks(kind));
        let marks = condemned.all().chain(tombstones.all());
        let intents = (0..words.stripes()).flat_map(|stripe| [0, 1].map(|word| words.intent(stripe, word)));
        let ports = site.slots().map(|slot| words.port(slot.0));
        for word in singles.into_iter().chain(tags).chain(marks).chain(intents).chain(ports) {
            if site.get(word) != 0 {
                site.set(word, 0);
            }
        }
    }

    /// Takes up what a slot of this host holds, or leaves it to the condemned, and returns the generation in it; `None` when it
    /// is damaged, and kept as it is.
    fn rebuild_slot(&self, slot: u32, condemned: &mut Vec<Sight>) -> Result<Option<u64>, PoolError> {
        let (site, at) = (self.site, self.entry(slot));
        let (words, sum) = line::load_torn(site.memory, at)?;
        let is_whole = sum == line::checksum(&words);
        let entry = match entry::half_condemned(&words, sum) {
            Some((state, record)) if !is_whole => {
                let entry = Entry::Object(state, record);
                line::publish_and_fence(site.memory, at, &entry.encode());
                Some(entry)
            }
            _ => is_whole.then(|| Entry::decode(&words)).flatten(),
        };
        let (keeps, hash, generation) = match entry {
            Some(Entry::Free) => return Ok(Some(0)),
            Some(Entry::Object(State::Condemned, record)) => {
                condemned.push(Sight { host: site.host(), slot, record });
                return Ok(Some(record.generation));
            }
            Some(Entry::Object(State::Live, record)) if !self.takes_up(&record) => {
                return Ok(self.keep_damaged(slot));
            }
            Some(Entry::Object(State::Live, record)) => (true, record.hash, record.generation),
            Some(Entry::Object(State::Claimed, record)) => (false, record.hash, record.generation),
            Some(Entry::Tombstone(tombstone)) => (true, tombstone.hash, 0),
            None if entry::may_be_torn(&words, sum) => (false, 0, 0),
            None => return Ok(self.keep_damaged(slot)),
        };
        if !keeps {
            tracing::debug!(host = site.host(), slot, ?entry, "an entry that was never whole is freed");
            line::publish_unfenced(site.memory, at, &Entry::Free.encode());
            return Ok(Some(generation));
        }
        site.retag(slot, 0, site.words().stripe_of(hash) as u8 + 1);
        if let Some(Entry::Tombstone(_)) = entry {
            self.mark(Marks::Tombstones, slot);
        }
        Ok(Some(generation))
    }

    /// Whether the place of an entry is its own.
    fn takes_up(&self, record: &Record) -> bool {
        self.extent_of(record).is_some_and(|extent| Extents(self.site).mark(extent, record.job))
    }

    /// Takes up the entries that are condemned. Memory may not have been told yet that one was freed before its host died:
    /// its place is then that of whatever is live there, or was made there last.
    fn rebuild_condemned(&self, mut condemned: Vec<Sight>) {
        let site = self.site;
        condemned.sort_unstable_by_key(|sight| Reverse(sight.record.generation));
        for Sight { slot, record, .. } in condemned {
            if self.takes_up(&record) {
                site.retag(slot, 0, site.words().stripe_of(record.hash) as u8 + 1);
                self.mark(Marks::Condemned, slot);
            } else {
                tracing::debug!(host = site.host(), slot, ?record, "an entry that was freed before is freed");
                line::publish_unfenced(site.memory, self.entry(slot), &Entry::Free.encode());
            }
        }
    }

    /// Keeps an entry that is damaged, and what it may lead to, for whoever can put it right.
    fn keep_damaged(&self, slot: u32) -> Option<u64> {
        let (host, offset) = (self.site.host(), self.entry(slot));
        tracing::warn!(host, slot, %offset, "a damaged entry is kept as it is; run `polder pool check`");
        self.site.retag(slot, 0, DAMAGED);
        None
    }

    /// Begins where no generation was ever used, also when the line that says where is damaged.
    fn rebuild_generations(&self, highest: u64) -> Result<(), PoolError> {
        let (site, words) = (self.site, self.site.words());
        let at = site.layout.generation_line(site.host());
        let limit = match line::load(site.memory, at)? {
            Some([limit, ..]) if limit >> GENERATION_BITS == 0 => Some(limit),
            _ => None,
        };
        let next = limit.unwrap_or(highest + (1 << 32)).max(highest + 1);
        if limit.is_none() {
            line::publish_and_fence(site.memory, at, &[next, 0, 0, 0, 0, 0, 0]);
        }
        site.set(words.generation_limit(), next);
        site.set(words.generation(), next);
        Ok(())
    }

    /// A process that died may have stored to chunks that other hosts get now: it reaches memory before the claim words say
    /// that they are free. Clean lines may stay in the cache: whoever uses them again invalidates first.
    fn flush_empty_chunks(&self) {
        let site = self.site;
        for chunk in 0..site.layout.chunks() {
            if Extents(site).chunk(chunk).is_empty() {
                site.memory.write_back(site.layout.chunk(chunk), site.layout.geometry().chunk_bytes);
            }
        }
        // Before the claim words say so.
        // SYNC: pairs with `Chunks::look` of the host that takes such a chunk.
        site.memory.sfence();
    }

    /// Puts right what the process at `slot` of this host left when it died. The caller sees to it that no other process takes
    /// the slot meanwhile, or is the one that does.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host does not let go of a lock.
    pub(crate) fn repair_process(&self, slot: ProcessSlot) -> Result<(), PoolError> {
        let (site, words) = (self.site, self.site.words());
        let is_abandoned = |word| LocalLock::at(word).is_abandoned(site.memory, site.me);
        for stripe in 0..words.stripes() {
            if is_abandoned(words.stripe_lock(stripe)) {
                drop(self.lock(stripe)?);
            }
        }
        if is_abandoned(words.lock(LockName::Chunks)) {
            drop(Chunks(site).lock()?);
        }
        if is_abandoned(words.lock(LockName::Allocator)) {
            drop(Extents(site).lock()?);
        }
        self.release_announcements(slot)
    }

    /// Clears what a dead process of this host announced. What it stored to those objects reaches memory first: their extents
    /// may be another host's soon.
    fn release_announcements(&self, slot: ProcessSlot) -> Result<(), PoolError> {
        for object in Opens(self.site).left_by(slot)? {
            self.flush(object)?;
        }
        // Before the announcements are gone.
        // SYNC: pairs with `Opens::collect` of the owner, which frees what nobody announces.
        self.site.memory.sfence();
        Opens(self.site).clear(slot);
        Ok(())
    }

    fn flush(&self, object: Announcement) -> Result<(), PoolError> {
        let (site, (host, slot)) = (self.site, object.entry());
        if host >= site.layout.geometry().hosts || slot >= site.layout.slots() {
            return Ok(());
        }
        if let Some(Entry::Object(_, record)) = self.read_entry(host, slot)?
            && (Sight { host, slot, record }).announcement() == object
            && let Some(extent) = self.extent_of(&record)
        {
            Extents(site).write_back(extent);
        }
        Ok(())
    }
}
