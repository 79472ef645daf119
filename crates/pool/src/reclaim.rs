//! What is left of destroyed objects, and how it goes: condemned entries are freed when nobody holds them open, tombstones
//! when their entry is gone.
//!
//! The tombstones of a host that wait for one owner are a list: the owner finds there what it has to condemn. The list is a
//! hint to it, and nothing more: it condemns only what a whole tombstone names by its generation.

use polder_mem::{LINE, Memory};

use crate::chunks::Chunks;
use crate::directory::{Directory, Intent, Sight, Stripe, corrupt};
use crate::entry::{self, Entry, State, Tombstone};
use crate::extents::Extents;
use crate::local::LocalGuard;
use crate::opens::Opens;
use crate::site::Flaw;
use crate::state::LockName;
use crate::{PoolError, line, word};

/// So many entries are condemned before the announcements are read, to share the cost.
const BATCH: u64 = 64;
/// The tag of a slot whose tombstone is being taken away.
const CLEARING: u8 = u8::MAX;

const PUSH: u64 = 1;
const UNLINK: u64 = 2;

impl<'a, M: Memory> Directory<'a, M> {
    /// Frees what can be freed: condemns what other hosts destroyed, frees what nobody holds open, takes away tombstones
    /// whose entries are gone, gives back empty chunks. Returns how many slots came free.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host does not let go of a lock.
    pub(crate) fn maintain(&self) -> Result<u64, PoolError> {
        let mut freed = 0;
        for owner in self.site.hosts(!(1 << self.site.host())) {
            freed += self.clear_tombstones(owner)?;
        }
        self.harvest()?;
        freed += self.reclaim()?;
        let chunks = 0..self.site.layout.chunks();
        freed += u64::from(Extents(self.site).has_empty(chunks.clone()));
        Chunks(self.site).give_back(chunks)?;
        Ok(freed)
    }

    /// Condemns the entry that was seen, unless it is another one by now.
    // SYNC: pairs with `Directory::admit`: the opener announces and reads the entry again.
    pub(crate) fn condemn(&self, _stripe: &Stripe<'_, M>, sight: &Sight) -> Result<bool, PoolError> {
        let Sight { slot, record, .. } = *sight;
        if self.load_entry(self.site.host(), slot)? != Some(Entry::Object(State::Live, record)) {
            return Ok(false);
        }
        self.note_condemned(slot);
        let entry = Entry::Object(State::Condemned, record);
        line::announce(self.site.memory, self.entry(slot), &entry.encode());
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
        // Another process may have condemned some and not fenced yet; their lines were written back above.
        self.site.memory.mfence();
        let announced = Opens(self.site).collect(self.site.survey(|_| ())?)?;
        let (mut fenced, mut freed) = (None, 0);
        for sight in condemned {
            let holders = announced.holders(sight.announcement());
            let held = holders != 0 && holders & !*fenced.get_or_insert_with(|| self.site.fenced()) != 0;
            if !held || self.site.flaw == Flaw::IgnoreAnnouncements {
                freed += u64::from(self.free(&sight)?);
            }
        }
        Ok(freed)
    }

    /// The condemned entries of this host, with their lines written back.
    fn condemned(&self) -> Result<Vec<Sight>, PoolError> {
        let (site, words) = (self.site, self.site.words());
        let mut condemned = vec![];
        for summary in 0..words.condemned_summaries() {
            for index in bits(site.get(words.condemned_summary(summary))) {
                let index = summary * 64 + index;
                for slot in bits(site.get(words.condemned_bits(index))) {
                    let slot = index * 64 + slot;
                    if let Some(Entry::Object(State::Condemned, record)) =
                        self.load_entry(site.host(), slot)?
                    {
                        site.memory.write_back(self.entry(slot), LINE);
                        condemned.push(Sight { host: site.host(), slot, record });
                    }
                }
            }
        }
        Ok(condemned)
    }

    /// Before an entry is condemned, so that no condemned one is overlooked.
    pub(crate) fn note_condemned(&self, slot: u32) {
        let words = self.site.words();
        self.site.set_bits(words.condemned_bits(slot / 64), 1 << (slot % 64));
        self.site.set_bits(words.condemned_summary(slot / 4096), 1 << (slot / 64 % 64));
    }

    fn forget_condemned(&self, slot: u32) {
        let (site, words) = (self.site, self.site.words());
        let (bits, summary) = (words.condemned_bits(slot / 64), words.condemned_summary(slot / 4096));
        site.clear_bits(bits, 1 << (slot % 64));
        if site.get(bits) == 0 {
            site.clear_bits(summary, 1 << (slot / 64 % 64));
            // Another process may have set a bit in between.
            if site.get(bits) != 0 {
                site.set_bits(summary, 1 << (slot / 64 % 64));
            }
        }
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
        let extents = Extents(self.site);
        if let Some(Entry::Object(_, record)) = self.load_entry(self.site.host(), slot)? {
            let extent = self.extent_of(&record).ok_or_else(|| corrupt(self.entry(slot)))?;
            extents.intend(stripe, extent, record.job);
        }
        line::publish(self.site.memory, self.entry(slot), &Entry::Free.encode());
        self.forget_condemned(slot);
        self.free_intended(stripe)?;
        self.site.retag(slot, stripe as u8 + 1, 0);
        self.clear_intent(stripe);
        Ok(())
    }

    /// Frees the extent that a directory lock's intent holds, and gives back chunks that are empty then.
    fn free_intended(&self, stripe: u32) -> Result<(), PoolError> {
        let extents = Extents(self.site);
        if let Some(extent) = extents.free(stripe)? {
            Chunks(self.site).give_back_soon(extents.chunks(extent));
        }
        Ok(())
    }

    /// Puts right what the holder of a directory lock was doing when it died or failed: nothing of it is left then, except
    /// what is complete.
    pub(crate) fn repair_stripe(&self, stripe: u32) -> Result<(), PoolError> {
        let Some(intent) = self.intent(stripe) else { return Ok(()) };
        let (Intent::Create(slot) | Intent::Reclaim(slot) | Intent::Bury(slot)) = intent;
        if slot >= self.site.layout.slots() || self.site.tag(slot) != stripe as u8 + 1 {
            self.clear_intent(stripe);
            return Ok(());
        }
        let entry = self.load_entry(self.site.host(), slot)?;
        match (intent, entry) {
            (Intent::Create(_), Some(Entry::Object(State::Live | State::Condemned, _))) => {
                Extents(self.site).release_intent(stripe);
            }
            (Intent::Bury(_), Some(Entry::Tombstone(_))) => {}
            (Intent::Create(_) | Intent::Bury(_), _) => self.undo(stripe, slot)?,
            (Intent::Reclaim(_), _) => self.finish_reclaim(stripe, slot)?,
        }
        // Another process may have stored what was found, and died before it wrote it back.
        self.site.memory.write_back(self.entry(slot), LINE);
        self.site.memory.mfence();
        self.clear_intent(stripe);
        Ok(())
    }

    fn undo(&self, stripe: u32, slot: u32) -> Result<(), PoolError> {
        let memory = self.site.memory;
        if let Some(extent) = Extents(self.site).intended(stripe) {
            // What was stored there must not reach memory after another host has the chunk.
            let bytes = extent.units * self.site.words().unit_bytes();
            memory.invalidate(Extents(self.site).offset(extent), bytes);
            memory.mfence();
        }
        line::publish(memory, self.entry(slot), &Entry::Free.encode());
        self.free_intended(stripe)?;
        self.site.retag(slot, stripe as u8 + 1, 0);
        Ok(())
    }

    // Tombstones.

    /// Leaves a tombstone in a slot that the caller has taken, and adds it to the list of its owner.
    pub(crate) fn push_tombstone(&self, slot: u32, tombstone: Tombstone) -> Result<(), PoolError> {
        let mut guard = self.lock_tombstones()?;
        self.log_tombstone(PUSH, slot, tombstone.owner);
        let linked = self.link(slot, tombstone);
        self.end_tombstone(&mut guard, linked)
    }

    fn link(&self, slot: u32, tombstone: Tombstone) -> Result<(), PoolError> {
        let next = self.head(self.site.host(), tombstone.owner)?;
        let entry = Entry::Tombstone(Tombstone { next, ..tombstone });
        line::announce(self.site.memory, self.entry(slot), &entry.encode());
        self.set_head(tombstone.owner, Some(slot));
        Ok(())
    }

    /// Takes away the tombstones for entries of `owner` that are gone. Returns how many.
    fn clear_tombstones(&self, owner: u16) -> Result<u64, PoolError> {
        if self.head(self.site.host(), owner)?.is_none() {
            return Ok(0);
        }
        let mut guard = self.lock_tombstones()?;
        let list = self.tombstones_of(self.site.host(), owner)?;
        for (_, tombstone) in &list {
            self.site.memory.invalidate(self.site.layout.entry(owner, tombstone.slot), LINE);
        }
        self.site.memory.fence_invalidations();
        let mut cleared = 0;
        for (slot, tombstone) in list {
            let is_gone = match self.load_entry(owner, tombstone.slot)? {
                None => false,
                Some(Entry::Object(State::Live, record)) => record.generation != tombstone.generation,
                Some(_) => true,
            };
            if is_gone {
                self.log_tombstone(UNLINK, slot, owner);
                let unlinked = self.unlink(slot, owner);
                self.end_tombstone(&mut guard, unlinked)?;
                cleared += 1;
            }
        }
        Ok(cleared)
    }

    fn unlink(&self, slot: u32, owner: u16) -> Result<(), PoolError> {
        self.site.retag(slot, self.site.tag(slot), CLEARING);
        self.finish_unlink(slot, owner)
    }

    fn finish_unlink(&self, slot: u32, owner: u16) -> Result<(), PoolError> {
        let list = self.tombstones_of(self.site.host(), owner)?;
        if let Some(index) = list.iter().position(|(other, _)| *other == slot) {
            let next = list[index].1.next;
            match index.checked_sub(1).map(|before| list[before]) {
                None => self.set_head(owner, next),
                Some((before, tombstone)) => {
                    let entry = Entry::Tombstone(Tombstone { next, ..tombstone });
                    line::publish(self.site.memory, self.entry(before), &entry.encode());
                }
            }
        }
        line::publish(self.site.memory, self.entry(slot), &Entry::Free.encode());
        self.site.retag(slot, CLEARING, 0);
        Ok(())
    }

    /// Takes the tombstone lock and puts right what a dead holder left.
    pub(crate) fn lock_tombstones(&self) -> Result<LocalGuard<'a, M>, PoolError> {
        let mut guard = self.site.lock(LockName::Tombstones)?;
        if guard.recovered() {
            let repaired = self.repair_tombstones();
            self.end_tombstone(&mut guard, repaired)?;
            guard.repaired();
        }
        Ok(guard)
    }

    fn repair_tombstones(&self) -> Result<(), PoolError> {
        let words = self.site.words();
        let [log, owner] = [0, 1].map(|word| self.site.get(words.tombstone_log(word)));
        let (slot, owner) = (log as u32, owner as u16);
        match log >> 32 {
            PUSH => {
                let is_listed =
                    self.tombstones_of(self.site.host(), owner)?.iter().any(|(other, _)| *other == slot);
                if let (false, Some(Entry::Tombstone(tombstone))) =
                    (is_listed, self.load_entry(self.site.host(), slot)?)
                {
                    self.link(slot, tombstone)?;
                }
            }
            UNLINK if self.site.tag(slot) == CLEARING => self.finish_unlink(slot, owner)?,
            _ => {}
        }
        Ok(())
    }

    fn log_tombstone(&self, operation: u64, slot: u32, owner: u16) {
        self.site.set(self.site.words().tombstone_log(1), owner.into());
        self.site.set(self.site.words().tombstone_log(0), operation << 32 | u64::from(slot));
    }

    /// Ends what was logged, or leaves it to the next who takes the lock.
    fn end_tombstone(
        &self,
        guard: &mut LocalGuard<'_, M>,
        done: Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        match done {
            Ok(()) => self.site.set(self.site.words().tombstone_log(0), 0),
            Err(_) => guard.spoil(),
        }
        done
    }

    /// Where the list of the tombstones of `host` for `owner` begins, afresh unless it is this host's own.
    fn head(&self, host: u16, owner: u16) -> Result<Option<u32>, PoolError> {
        let head = word::open(self.site.memory.load(self.site.layout.tombstone_head(host, owner))?);
        let slot = head.and_then(|head| u32::try_from(head).ok()?.checked_sub(1));
        Ok(slot.filter(|&slot| slot < self.site.layout.slots()))
    }

    pub(crate) fn set_head(&self, owner: u16, head: Option<u32>) {
        let at = self.site.layout.tombstone_head(self.site.host(), owner);
        self.site.memory.store(at, word::seal(entry::encode_next(head)));
        self.site.memory.write_back(at, 8);
        self.site.memory.sfence();
    }

    /// The tombstones of `host` for entries of `owner`, as far as the list is whole.
    fn tombstones_of(&self, host: u16, owner: u16) -> Result<Vec<(u32, Tombstone)>, PoolError> {
        let mut list: Vec<(u32, Tombstone)> = vec![];
        let (mut next, mut mark, mut power) = (self.head(host, owner)?, None, 1);
        while let Some(slot) = next {
            let Some(Entry::Tombstone(tombstone)) = self.read_entry(host, slot)? else { break };
            if tombstone.owner != owner || tombstone.slot >= self.site.layout.slots() || mark == next {
                break;
            }
            // Brent: a list that bites its tail is left when it comes by the mark again.
            if list.len() == power {
                (mark, power) = (next, 2 * power);
            }
            list.push((slot, tombstone));
            next = tombstone.next.filter(|&slot| slot < self.site.layout.slots());
        }
        Ok(list)
    }

    /// Condemns the entries of this host that others have destroyed.
    fn harvest(&self) -> Result<(), PoolError> {
        let (site, me) = (self.site, self.site.host());
        let hosts = site.survey(|host| site.memory.invalidate(site.layout.tombstone_head(host, me), 8))?;
        for host in site.hosts(hosts & !(1 << me)) {
            for (_, tombstone) in self.tombstones_of(host, me)? {
                let Tombstone { hash, generation, slot, .. } = tombstone;
                let Some(Entry::Object(State::Live, record)) = self.load_entry(me, slot)? else { continue };
                if (record.hash, record.generation) == (hash, generation) {
                    let stripe = self.lock(site.words().stripe_of(hash))?;
                    self.condemn(&stripe, &Sight { host: me, slot, record })?;
                }
            }
        }
        Ok(())
    }
}

fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}
