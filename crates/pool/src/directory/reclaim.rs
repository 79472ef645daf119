//! Frees what is left of destroyed objects: a condemned entry once no process holds it open, a tombstone once its entry is
//! gone.
//!
//! A host lists its tombstones (burials) for the owners of the entries. The list is only a hint: an owner condemns an entry
//! only if a whole tombstone names its generation. A tombstone that does not fit is listed when there is room again.

use polder_mem::{LINE, Memory};

use crate::chunks::Chunks;
use crate::deviation::Deviation;
use crate::directory::{Directory, Intent, Sight, Stripe, corrupt};
use crate::entry::{self, Entry, State, Tombstone};
use crate::extents::Extents;
use crate::local::LocalGuard;
use crate::opens::Opens;
use crate::state::{DAMAGED, LockName, Marks};
use crate::{PoolError, line, word};

/// So many entries are condemned before the announcements are read, to share the cost.
const BATCH: u64 = 64;
/// In a burial the slot stands above the owner.
const OWNER_BITS: u32 = 6;

impl<M: Memory> Directory<'_, M> {
    /// Frees what can be freed: condemns what other hosts destroyed, frees what nobody holds open, takes away tombstones
    /// whose entries are gone, gives back empty chunks. What others of this host were freeing is free then as well. Returns
    /// how many slots and chunks came free.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host does not let go of a lock.
    pub(crate) fn maintain(&self) -> Result<u64, PoolError> {
        let mut freed = self.clear_tombstones()?;
        self.condemn_buried()?;
        // What another is about to condemn is to be reclaimed here.
        freed += self.await_concurrent_reclaims()?;
        freed += self.reclaim()?;
        freed += self.await_concurrent_reclaims()?;
        let chunks = 0..self.site.layout.chunks();
        freed += u64::from(Extents(self.site).has_empty(chunks.clone()));
        Chunks(self.site).give_back(chunks)?;
        Ok(freed)
    }

    /// Gives back all empty chunks, also the one that this host keeps: what was one run of chunks is one again.
    ///
    /// # Errors
    /// Those of [`Directory::maintain`].
    pub(crate) fn give_back_all(&self) -> Result<(), PoolError> {
        Extents(self.site).keep_none();
        Chunks(self.site).give_back(0..self.site.layout.chunks())
    }

    /// Waits for other processes of this host, and threads of this one, that are in the middle of condemning or freeing: what
    /// they have begun is not found by who looks for something to free, and it is not free yet. Returns how many slots came free.
    fn await_concurrent_reclaims(&self) -> Result<u64, PoolError> {
        let mut freed = 0;
        for stripe in 0..self.site.words().stripes() {
            let intent = self.intent(stripe);
            if let Some(Intent::Condemn(_) | Intent::Reclaim(_) | Intent::Clear(_)) = intent {
                drop(self.lock(stripe)?);
                freed += u64::from(!matches!(intent, Some(Intent::Condemn(_))));
            }
        }
        Ok(freed)
    }

    /// Condemns the entry that was seen, unless it is another one by now.
    // SYNC: pairs with `Directory::admit`: the opener announces and reads the entry again.
    pub(crate) fn condemn(&self, stripe: &Stripe<'_, M>, sight: &Sight) -> Result<bool, PoolError> {
        let Sight { slot, record, .. } = *sight;
        if self.load_entry(self.site.host(), slot)? != Some(Entry::Object(State::Live, record)) {
            return Ok(false);
        }
        self.set_intent(stripe.index, Intent::Condemn(slot));
        self.mark(Marks::Condemned, slot);
        let entry = Entry::Object(State::Condemned, record);
        line::publish_and_fence(self.site.memory, self.entry(slot), &entry.encode());
        self.clear_intent(stripe.index);
        let hint = self.site.words().condemned_hint();
        self.site.set(hint, self.site.get(hint) + 1);
        Ok(true)
    }

    /// Reclaims after a destroy when that is worth its cost.
    pub(crate) fn reclaim_when_due(&self, bytes: u64) -> Result<(), PoolError> {
        let large = bytes >= self.site.layout.geometry().chunk_bytes / 2;
        if large || self.site.get(self.site.words().condemned_hint()) >= BATCH {
            self.reclaim()?;
        }
        Ok(())
    }

    /// Frees the condemned entries that nobody holds open. Returns how many.
    pub(crate) fn reclaim(&self) -> Result<u64, PoolError> {
        self.site.set(self.site.words().condemned_hint(), 0);
        let condemned = self.condemned()?;
        if condemned.is_empty() {
            return Ok(0);
        }
        // The fence of the survey comes before anything of the announcements is invalidated.
        let announced = Opens(self.site).collect(self.site.survey(|_| ())?)?;
        let (mut fenced, mut freed) = (None, 0);
        for sight in condemned {
            let holders = announced.holders(sight.announcement());
            let held = holders != 0 && holders & !*fenced.get_or_insert_with(|| self.site.fenced()) != 0;
            if !held || Deviation::IgnoreAnnouncements.is_on() {
                freed += u64::from(self.free(&sight)?);
            }
        }
        Ok(freed)
    }

    /// The condemned entries of this host, with their lines written back: another process may have condemned some and not
    /// fenced yet.
    fn condemned(&self) -> Result<Vec<Sight>, PoolError> {
        let host = self.site.host();
        let mut condemned = vec![];
        for slot in self.marked(Marks::Condemned) {
            if let Some(Entry::Object(State::Condemned, record)) = self.load_entry(host, slot)? {
                self.site.memory.write_back(self.entry(slot), LINE);
                condemned.push(Sight { host, slot, record });
            }
        }
        Ok(condemned)
    }

    /// Frees a condemned entry and its extent; `false` when another process did so before.
    fn free(&self, sight: &Sight) -> Result<bool, PoolError> {
        let Sight { slot, record, .. } = *sight;
        let mut stripe = self.lock(self.site.words().stripe_of(record.hash))?;
        if self.load_entry(self.site.host(), slot)? != Some(Entry::Object(State::Condemned, record)) {
            return Ok(false);
        }
        self.set_intent(stripe.index, Intent::Reclaim(slot));
        let reclaimed = self.finish_reclaim(stripe.index, slot);
        self.end(&mut stripe, reclaimed).map(|()| true)
    }

    /// Frees the entry in a slot, from wherever the holder of the directory lock was.
    fn finish_reclaim(&self, stripe: u32, slot: u32) -> Result<(), PoolError> {
        if let Some(Entry::Object(_, record)) = self.load_entry(self.site.host(), slot)? {
            let extent = self.extent_of(&record).ok_or_else(|| corrupt(self.entry(slot)))?;
            Extents(self.site).intend(stripe, extent, record.job);
        }
        self.finish_free(stripe, slot, Marks::Condemned)
    }

    /// Frees a slot and the extent that the directory lock's intent holds.
    fn finish_free(&self, stripe: u32, slot: u32, marks: Marks) -> Result<(), PoolError> {
        if let Some(extent) = Extents(self.site).intended(stripe)
            && !Deviation::FreeUnwritten.is_on()
        {
            // What this host stored there, and need not have written back for itself, reaches memory before the entry is free, and
            // another host can have the chunk. Processes of other hosts have written back what they stored before they closed it.
            Extents(self.site).write_back(extent);
            // SYNC: pairs with `Chunks::look` of the host that takes the chunk next.
            self.site.memory.sfence();
        }
        line::publish_unfenced(self.site.memory, self.entry(slot), &Entry::Free.encode());
        self.unmark(marks, slot);
        if let Some(extent) = Extents(self.site).free(stripe)? {
            Chunks(self.site).try_give_back(Extents(self.site).chunks(extent));
        }
        self.site.retag(slot, stripe as u8 + 1, 0);
        self.clear_intent(stripe);
        Ok(())
    }

    /// Puts right what the holder of a directory lock was doing when it died or failed: nothing of it is left then, except
    /// what is complete.
    pub(crate) fn repair_stripe(&self, stripe: u32) -> Result<(), PoolError> {
        let Some(intent) = self.intent(stripe) else { return Ok(()) };
        let (memory, slot) = (self.site.memory, intent.slot());
        if slot >= self.site.layout.slots() || self.site.tag(slot) != stripe as u8 + 1 {
            self.clear_intent(stripe);
            return Ok(());
        }
        match (intent, self.load_entry(self.site.host(), slot)?) {
            (Intent::Create(_), Some(Entry::Object(State::Live | State::Condemned, _))) => {
                Extents(self.site).release_intent(stripe);
            }
            (Intent::Create(_), _) => return self.finish_free(stripe, slot, Marks::Condemned),
            (Intent::Condemn(_), None) => self.finish_condemned(slot)?,
            (Intent::Reclaim(_), _) => return self.finish_reclaim(stripe, slot),
            (Intent::Bury(_), Some(Entry::Tombstone(_))) | (Intent::Condemn(_), _) => {}
            (Intent::Bury(_) | Intent::Clear(_), _) => {
                return self.finish_free(stripe, slot, Marks::Tombstones);
            }
        }
        // Another process may have stored what was found, and died before it wrote it back: others may wait for it.
        memory.write_back(self.entry(slot), LINE);
        self.clear_intent(stripe);
        Ok(())
    }

    /// Condemns for good an entry whose line was left between live and condemned.
    fn finish_condemned(&self, slot: u32) -> Result<(), PoolError> {
        let (memory, at) = (self.site.memory, self.entry(slot));
        let (words, sum) = line::load_torn(memory, at)?;
        if let Some((_, record)) = entry::half_condemned(&words, sum) {
            self.mark(Marks::Condemned, slot);
            line::publish_and_fence(memory, at, &Entry::Object(State::Condemned, record).encode());
        }
        Ok(())
    }

    // Tombstones.

    /// Takes away the tombstones whose entries are gone, and lists the others. Returns how many went.
    fn clear_tombstones(&self) -> Result<u64, PoolError> {
        let (site, mut tombstones) = (self.site, vec![]);
        for slot in self.marked(Marks::Tombstones) {
            if let Some(Entry::Tombstone(tombstone)) = self.load_entry(site.host(), slot)? {
                let Tombstone { owner, slot: target, .. } = tombstone;
                if owner < site.layout.geometry().hosts && target < site.layout.slots() {
                    site.memory.invalidate(site.layout.entry(owner, target), LINE);
                }
                tombstones.push((slot, tombstone));
            }
        }
        // HARMLESS(fence_invalidations -> sfence -> drop), one look at tombstones: a line from before the invalidation says
        // that the entry is still live, as it was when this host buried it, and it is looked at again.
        site.memory.fence_invalidations();
        let mut cleared = 0;
        for (slot, tombstone) in tombstones {
            if self.is_done(&tombstone)? {
                cleared += u64::from(self.clear(slot, tombstone)?);
            }
        }
        self.list_tombstones()?;
        Ok(cleared)
    }

    /// Lists the tombstones that there are, as many as there is room for.
    fn list_tombstones(&self) -> Result<(), PoolError> {
        let (_guard, mut listed) = (self.lock_burials()?, 0);
        for slot in self.marked(Marks::Tombstones) {
            if let Some(Entry::Tombstone(tombstone)) = self.load_entry(self.site.host(), slot)?
                && listed < self.site.layout.burials()
            {
                self.set_burial(listed, tombstone.owner, slot);
                listed += 1;
            }
        }
        self.set_burials(listed);
        Ok(())
    }

    /// Whether the entry that a tombstone destroys is gone: its line was invalidated, and a fence followed.
    fn is_done(&self, tombstone: &Tombstone) -> Result<bool, PoolError> {
        let Tombstone { owner, slot, generation, .. } = *tombstone;
        if owner >= self.site.layout.geometry().hosts || slot >= self.site.layout.slots() {
            return Ok(true);
        }
        Ok(match self.load_entry(owner, slot)? {
            None => false,
            Some(Entry::Object(State::Live, record)) => record.generation != generation,
            Some(_) => true,
        })
    }

    fn clear(&self, slot: u32, tombstone: Tombstone) -> Result<bool, PoolError> {
        let mut stripe = self.lock(self.site.words().stripe_of(tombstone.hash))?;
        if self.load_entry(self.site.host(), slot)? != Some(Entry::Tombstone(tombstone)) {
            return Ok(false);
        }
        self.set_intent(stripe.index, Intent::Clear(slot));
        let cleared = self.finish_free(stripe.index, slot, Marks::Tombstones);
        self.end(&mut stripe, cleared).map(|()| true)
    }

    /// Lets one process at a time list tombstones. Whatever a dead holder left is right: the list is a hint.
    pub(crate) fn lock_burials(&self) -> Result<LocalGuard<'_, M>, PoolError> {
        let mut guard = self.site.lock(LockName::Burials)?;
        guard.repaired();
        Ok(guard)
    }

    /// Lists a new tombstone, if there is room. Under the lock of burials, which the caller keeps until the tombstone is there:
    /// who lists them anew finds it then.
    pub(crate) fn list_burial(&self, owner: u16, slot: u32) -> Result<(), PoolError> {
        let at = self.site.layout.burial_count(self.site.host());
        let listed = word::open(self.site.memory.load(at)?).unwrap_or(0);
        if listed < self.site.layout.burials().into() {
            self.set_burial(listed as u32, owner, slot);
            self.set_burials(listed as u32 + 1);
        }
        Ok(())
    }

    fn set_burial(&self, index: u32, owner: u16, slot: u32) {
        let at = self.site.layout.burial_count(self.site.host()).word(u64::from(index) + 1);
        self.site.memory.store(at, word::seal(u64::from(slot) << OWNER_BITS | u64::from(owner)));
        self.site.memory.write_back(at, 8);
    }

    fn set_burials(&self, count: u32) {
        let at = self.site.layout.burial_count(self.site.host());
        self.site.memory.store(at, word::seal(count.into()));
        self.site.memory.write_back(at, 8);
    }

    /// The slots of the tombstones that `host` lists for this host's entries; the count's line was invalidated, and a fence
    /// followed.
    fn burials(&self, host: u16) -> Result<Vec<u32>, PoolError> {
        let (memory, layout) = (self.site.memory, self.site.layout);
        let at = layout.burial_count(host);
        let count = word::open(memory.load(at)?).unwrap_or(0).min(layout.burials().into());
        memory.invalidate(at.word(1), count * 8);
        // SYNC: pairs with `set_burial` of that host. It is a hint: one that has not come yet is found by a later look.
        memory.fence_invalidations();
        let mut slots = vec![];
        for index in 0..count {
            let Some(burial) = word::open(memory.load(at.word(index + 1))?) else { continue };
            let slot = u32::try_from(burial >> OWNER_BITS).unwrap_or(u32::MAX);
            if burial & ((1 << OWNER_BITS) - 1) == u64::from(self.site.host()) && slot < layout.slots() {
                slots.push(slot);
            }
        }
        Ok(slots)
    }

    /// Condemns the entries of this host that others have destroyed.
    fn condemn_buried(&self) -> Result<(), PoolError> {
        let (site, me) = (self.site, self.site.host());
        let hosts = site.survey(|host| site.memory.invalidate(site.layout.burial_count(host), 8))?;
        for host in site.hosts(hosts & !(1 << me)) {
            for burial in self.burials(host)? {
                let Some(Entry::Tombstone(tombstone)) = self.read_entry(host, burial)? else { continue };
                let Tombstone { hash, generation, owner, slot } = tombstone;
                if owner != me || slot >= site.layout.slots() || site.tag(slot) == DAMAGED {
                    continue;
                }
                let Some(Entry::Object(State::Live, record)) = self.load_entry(me, slot)? else { continue };
                if (record.hash, record.generation) == (hash, generation) {
                    let stripe = self.lock(site.words().stripe_of(hash))?;
                    self.condemn(&stripe, &Sight { host: me, slot, record })?;
                }
            }
        }
        Ok(())
    }

    // Marks.

    /// Before an entry of this kind is written, so that none is overlooked.
    pub(crate) fn mark(&self, kind: Marks, slot: u32) {
        let marks = self.site.words().marks(kind);
        self.site.set_bits(marks.bits(slot / 64), 1 << (slot % 64));
        self.site.set_bits(marks.summary(slot / 4096), 1 << (slot / 64 % 64));
    }

    fn unmark(&self, kind: Marks, slot: u32) {
        let (site, marks) = (self.site, self.site.words().marks(kind));
        let (bits, summary) = (marks.bits(slot / 64), marks.summary(slot / 4096));
        site.clear_bits(bits, 1 << (slot % 64));
        if site.get(bits) == 0 {
            site.clear_bits(summary, 1 << (slot / 64 % 64));
            // Another process may have set a bit in between.
            if site.get(bits) != 0 {
                site.set_bits(summary, 1 << (slot / 64 % 64));
            }
        }
    }

    /// The slots that may hold an entry of this kind.
    fn marked(&self, kind: Marks) -> Vec<u32> {
        let (site, marks) = (self.site, self.site.words().marks(kind));
        let words = (0..marks.summaries)
            .flat_map(|summary| bits(site.get(marks.summary(summary))).map(move |word| summary * 64 + word));
        words.flat_map(|word| bits(site.get(marks.bits(word))).map(move |slot| word * 64 + slot)).collect()
    }
}

fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}
