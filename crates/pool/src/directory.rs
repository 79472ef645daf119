//! The directory: names of objects, which any host creates, opens and destroys, with no lock between hosts.
//!
//! Each host's shard has a table of entries in levels of prime sizes. A name may stand in one slot of each level of each
//! shard, and a look-up reads them all behind one fence.
//!
//! - **Create:** the creator publishes its claim in its own shard, fences, and looks at all candidates of the name:
//!   - a live entry: the name exists;
//!   - a claim of a lower host: the creator withdraws, and looks again when that claim is settled;
//!   - a claim of a higher host: the creator waits, because that host may have looked before it could see this claim;
//!   - nothing: the entry goes live.
//! - **Destroy:** the owner condemns its entry. Any other host leaves a tombstone in its own shard, which a look-up meets
//!   beside the entry. The owner condemns an entry when it finds a tombstone of it. The other host removes the tombstone
//!   when the entry is gone. If two hosts destroy one object at the same time, both may succeed.
//! - **Open:** the opener announces the entry, fences, and reads it again. The owner condemns, fences, and frees an entry
//!   that no process announces.
//!
//! **Half-written lines.** A writer announces a line before its call goes on. So a line that is read half written belongs to a
//! call that has not returned. A look-up does not wait for it:
//!
//! - Half claimed, or half live: the object is not there yet, and may never be.
//! - Half condemned: it is condemned, because nothing makes it live again. Repair goes by the same rule.
//! - Half freed or half buried: the line holds no live entry.
//!
//! A creator waits for a half-written claim as for a whole one. All wait for a line that no writer leaves half written so: it is
//! damaged, or was read while it changed several times.
//!
//! A host that died in the middle blocks the creators of the one name that it was claiming. The block ends when another process
//! repairs what it left, or when the view says that the host is fenced. Eviction is not enough: an evicted host might go on, and
//! take a name that another host has taken meanwhile. The live names of a dead host stay, and others may destroy them.
//!
//! The processes of one host change names under striped locks that survive their holders. A holder writes what it is doing
//! to the stripe's intent, so that the process that takes the lock over can undo it.

pub(crate) mod entry;
pub(crate) mod list;
pub(crate) mod opens;
mod reclaim;
mod recover;

use std::ops::Range;

use polder_mem::{LINE, Memory, Offset, ProcessSlot};

use crate::chunks::Chunks;
use crate::deviation::Deviation;
use crate::entry::{Entry, HalfWritten, Record, State, Tombstone};
use crate::extents::{Account, Extent, Extents, Room};
use crate::format::MAX_LEVELS;
use crate::local::LocalGuard;
use crate::name::Name;
use crate::object::{self, GENERATION_BITS, Header, InitialContents, Object};
use crate::opens::{Announcement, Opens};
use crate::site::Site;
use crate::state::{DAMAGED, Marks};
use crate::watch::Watch;
use crate::{Peer, PoolError, line};

/// Generations that a host may use before it raises its limit again.
const GENERATIONS: u64 = 1 << 16;
/// Up to so many bytes an object is filled before anybody knows whether its name is free.
const SMALL: u64 = 1 << 16;

/// A name, and where it may stand in every shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) hash: u128,
    slots: [u32; MAX_LEVELS as usize],
    levels: usize,
}

impl Key {
    pub(crate) fn new<M: Memory>(site: &Site<'_, M>, hash: u128) -> Self {
        let mut key = Self { hash, slots: [0; MAX_LEVELS as usize], levels: 0 };
        for slot in site.layout.candidates(hash) {
            key.slots[key.levels] = slot;
            key.levels += 1;
        }
        key
    }

    pub(crate) fn slots(&self) -> &[u32] {
        &self.slots[..self.levels]
    }
}

/// An entry of an object, and where it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    pub(crate) host: u16,
    pub(crate) slot: u32,
    pub(crate) record: Record,
}

impl Sight {
    pub(crate) const fn announcement(&self) -> Announcement {
        Announcement::new(self.host, self.slot, self.record.generation)
    }

    /// Whether this is the header of the object that the entry names.
    pub(crate) fn has(&self, header: &Header) -> bool {
        (header.owner, header.slot) == (self.host, self.slot)
            && (header.generation, header.bytes) == (self.record.generation, self.record.bytes)
    }

    fn is(&self, owner: u16, generation: u64) -> bool {
        (self.host, self.record.generation) == (owner, generation)
    }

    fn is_destroyed_by(&self, tombstone: &Tombstone) -> bool {
        (tombstone.owner, tombstone.slot) == (self.host, self.slot)
            && tombstone.generation == self.record.generation
    }
}

/// All that the candidate slots of a name said at one look.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    live: Vec<Sight>,
    claimed: Vec<Sight>,
    tombstones: Vec<Tombstone>,
    /// Lines in which a claim is half written, or an entry half live, and whose they are.
    half_claimed: Vec<(u16, Offset)>,
    /// Lines that are damaged, or changed while they were read, and whose they are.
    unclear: Vec<(u16, Offset)>,
}

impl Scan {
    /// The object of this name: the highest (generation, host), if there should be two.
    fn object(&self) -> Option<Sight> {
        let lives =
            |sight: &&Sight| !self.tombstones.iter().any(|tombstone| sight.is_destroyed_by(tombstone));
        let order = |sight: &&Sight| (sight.record.generation, sight.host);
        self.live.iter().filter(lives).max_by_key(order).copied()
    }

    /// Whether no host was seen to have, or to want, the name.
    #[cfg(feature = "model")]
    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.claimed.is_empty()
    }

    pub(crate) fn claimants(&self) -> impl Iterator<Item = u16> {
        self.claimed.iter().map(|sight| sight.host)
    }
}

/// How a creator's look at the others ended.
enum Contest {
    Won,
    Exists,
    /// This host's claim goes first.
    Yield(u16),
}

/// What the holder of a directory lock is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// Making an entry in this slot.
    Create(u32),
    /// Condemning the live entry in this slot.
    Condemn(u32),
    /// Freeing the condemned entry in this slot.
    Reclaim(u32),
    /// Leaving a tombstone in this slot.
    Bury(u32),
    /// Taking the tombstone in this slot away.
    Clear(u32),
}

impl Intent {
    const fn encode(self) -> u64 {
        let (kind, slot) = match self {
            Self::Create(slot) => (1, slot),
            Self::Condemn(slot) => (2, slot),
            Self::Reclaim(slot) => (3, slot),
            Self::Bury(slot) => (4, slot),
            Self::Clear(slot) => (5, slot),
        };
        kind << 32 | slot as u64
    }

    const fn decode(word: u64) -> Option<Self> {
        let slot = word as u32;
        match word >> 32 {
            1 => Some(Self::Create(slot)),
            2 => Some(Self::Condemn(slot)),
            3 => Some(Self::Reclaim(slot)),
            4 => Some(Self::Bury(slot)),
            5 => Some(Self::Clear(slot)),
            _ => None,
        }
    }

    pub(crate) const fn slot(self) -> u32 {
        let (Self::Create(slot)
        | Self::Condemn(slot)
        | Self::Reclaim(slot)
        | Self::Bury(slot)
        | Self::Clear(slot)) = self;
        slot
    }
}

/// The names of a pool, as one process of one host uses them.
pub(crate) struct Directory<'a, M> {
    pub(crate) site: Site<'a, M>,
    /// On whose account objects are created.
    pub(crate) account: Account,
}

/// A directory lock that is held.
pub(crate) struct Stripe<'a, M: Memory> {
    pub(crate) index: u32,
    guard: LocalGuard<'a, M>,
}

impl<M: Memory> Stripe<'_, M> {
    /// What the slots are tagged with that entries of this stripe's names take.
    pub(crate) const fn tag(&self) -> u8 {
        self.index as u8 + 1
    }
}

impl<'a, M: Memory> Directory<'a, M> {
    /// Creates an object and holds it open.
    ///
    /// # Errors
    /// [`PoolError::Exists`]; [`PoolError::Full`], [`PoolError::DirectoryFull`] and [`PoolError::Quota`] when something is used
    /// up; [`PoolError::TooManyOpen`]; [`PoolError::Timeout`] when another host claims the name and does not go on.
    pub(crate) fn create(
        &self,
        name: &Name<'_>,
        bytes: u64,
        fill: InitialContents,
    ) -> Result<Object, PoolError> {
        match self.create_once(name, bytes, fill) {
            Err(PoolError::Full { .. } | PoolError::DirectoryFull { .. } | PoolError::Quota { .. }) => {
                // Also when nothing comes free by it: another process may have freed it just before.
                self.maintain()?;
                self.create_once(name, bytes, fill)
            }
            made => made,
        }
    }

    fn create_once(&self, name: &Name<'_>, bytes: u64, fill: InitialContents) -> Result<Object, PoolError> {
        let key = Key::new(&self.site, name.hash());
        if bytes > SMALL && self.find(&key)?.is_some() {
            // Before anybody is told.
            // SYNC: pairs with `scan` of whomever the caller tells: `look` has written back what another process stored here.
            self.site.memory.sfence();
            return Err(exists(name));
        }
        let held = Opens(self.site).reserve()?;
        let created = self.create_locked(name, &key, bytes, fill, held);
        if created.is_err() {
            Opens(self.site).release(held);
        }
        created
    }

    fn create_locked(
        &self,
        name: &Name<'_>,
        key: &Key,
        bytes: u64,
        fill: InitialContents,
        held: u32,
    ) -> Result<Object, PoolError> {
        let mut stripe = self.lock(self.site.words().stripe_of(key.hash))?;
        let created = self.create_in(&stripe, name, key, bytes, fill, held);
        self.end(&mut stripe, created)
    }

    /// Ends what was done under a directory lock: on failure it is undone, or left to the next who takes the lock.
    pub(crate) fn end<T>(
        &self,
        stripe: &mut Stripe<'_, M>,
        done: Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        if done.is_err()
            && let Err(error) = self.repair_stripe(stripe.index)
        {
            tracing::warn!(%error, "could not undo; the next to use these names will");
            stripe.guard.spoil();
        }
        done
    }

    fn create_in(
        &self,
        stripe: &Stripe<'_, M>,
        name: &Name<'_>,
        key: &Key,
        bytes: u64,
        fill: InitialContents,
        held: u32,
    ) -> Result<Object, PoolError> {
        let (site, memory) = (self.site, self.site.memory);
        let header_lines = object::header_lines(name);
        let header_bytes = u64::from(header_lines) * LINE;
        let levels = match key.slots().len() {
            // The last level is for tombstones, so that a full directory can be emptied from any host.
            levels @ 4.. => levels - 1,
            levels => levels,
        };
        let slot = match self.take_slot(stripe, &key.slots()[..levels], Intent::Create, name) {
            // The object of this name may be among what fills the slots. Whoever is told fences when it lets go of what it holds.
            Err(PoolError::DirectoryFull { .. }) if self.find(key)?.is_some() => return Err(exists(name)),
            taken => taken?,
        };
        let extent =
            self.allocate(stripe.index, Extents(site).units_for(bytes.saturating_add(header_bytes)))?;
        let at = Extents(site).offset(extent);
        let generation = self.next_generation()?;
        let (owner, note) = (site.host(), name.note().into());
        let header = Header { name: name.as_str().into(), note, bytes, generation, owner, slot };
        header.write(memory, at)?;
        object::fill(memory, at + header_bytes, bytes.next_multiple_of(LINE), fill)?;
        let (hash, job, creator) = (key.hash, self.account.job, site.me.slot);
        let record = Record { hash, generation, header: at, bytes, job, creator, header_lines };
        Opens(site).announce(held, Announcement::new(site.host(), slot, generation));
        self.claim(key, slot, record, name)?;
        // Whoever is told of it from here on finds it.
        line::publish_and_fence(memory, self.entry(slot), &Entry::Object(State::Live, record).encode());
        Extents(site).release_intent(stripe.index);
        self.clear_intent(stripe.index);
        let Header { name, note, .. } = header;
        Ok(Object { name, note, at: record.data(), bytes, generation, owner, slot, held })
    }

    /// Takes the extent of a new entry, from chunks that this host holds or claims now.
    fn allocate(&self, stripe: u32, units: u64) -> Result<Extent, PoolError> {
        let extents = Extents(self.site);
        loop {
            if extents.fits_a_chunk(units)
                && let Room::Taken(extent) = extents.allocate(stripe, units, self.account)?
            {
                return Ok(extent);
            }
            if let Room::Taken(extent) = Chunks(self.site).grow(stripe, units, self.account)? {
                return Ok(extent);
            }
        }
    }

    fn next_generation(&self) -> Result<u64, PoolError> {
        let (site, words) = (self.site, self.site.words());
        let next = |generation: u64| Some(generation + 1);
        let generation = site.update(words.generation(), next).unwrap_or_else(|same| same);
        if generation >= site.get(words.generation_limit()) {
            let _guard = Extents(site).lock()?;
            if generation >= site.get(words.generation_limit()) {
                let limit = generation + GENERATIONS;
                let at = site.layout.generation_line(site.host());
                line::publish_and_fence(site.memory, at, &[limit, 0, 0, 0, 0, 0, 0]);
                site.set(words.generation_limit(), limit);
            }
        }
        Ok(generation & ((1 << GENERATION_BITS) - 1))
    }

    /// Claims the name and looks at all others until it is this host's or another's.
    // SYNC: pairs with itself on another host: of two claims at least one is seen by the other's owner.
    fn claim(&self, key: &Key, slot: u32, record: Record, name: &Name<'_>) -> Result<(), PoolError> {
        let (memory, mut watch) = (self.site.memory, Watch::new(&self.site));
        loop {
            if !Deviation::CheckThenSet.is_on() {
                line::publish_and_fence(
                    memory,
                    self.entry(slot),
                    &Entry::Object(State::Claimed, record).encode(),
                );
            }
            match self.contest(key, &mut watch)? {
                Contest::Won => return Ok(()),
                Contest::Exists => return Err(exists(name)),
                Contest::Yield(host) => {
                    line::publish_unfenced(memory, self.entry(slot), &Entry::Free.encode());
                    self.await_settled(key, host, &mut watch)?;
                }
            }
        }
    }

    /// Looks until nobody is in the way any more or somebody goes first.
    fn contest(&self, key: &Key, watch: &mut Watch) -> Result<Contest, PoolError> {
        let me = self.site.host();
        loop {
            let scan = self.scan(key)?;
            if let Some(sight) = scan.object() {
                if self.is_still_live(&sight)? {
                    return Ok(Contest::Exists);
                }
                watch.wait_or(&self.site, || self.late(sight.host))?;
                continue;
            }
            if let Some(host) =
                scan.claimants().find(|&host| host < me && watch.must_wait_for(&self.site, host))
            {
                return Ok(Contest::Yield(host));
            }
            let waits = !Deviation::LowerDoesNotWait.is_on();
            let higher =
                scan.claimants().find(|&host| host > me && waits && watch.must_wait_for(&self.site, host));
            let unsettled = self.unclear(&scan, watch).or_else(|| self.awaited(&scan.half_claimed, watch));
            match (higher, unsettled) {
                (None, None) => return Ok(Contest::Won),
                (Some(host), _) => watch.wait_or(&self.site, || self.late(host))?,
                (None, Some(offset)) => watch.wait_or(&self.site, || corrupt(offset))?,
            }
        }
    }

    /// Waits until no host that goes first claims the name any more.
    fn await_settled(&self, key: &Key, mut host: u16, watch: &mut Watch) -> Result<(), PoolError> {
        loop {
            watch.wait_or(&self.site, || self.late(host))?;
            let scan = self.scan(key)?;
            match scan
                .claimants()
                .find(|&host| host < self.site.host() && watch.must_wait_for(&self.site, host))
            {
                Some(other) => host = other,
                None => return Ok(()),
            }
        }
    }

    fn late(&self, host: u16) -> PoolError {
        PoolError::Timeout {
            peer: Peer::new(host, 0),
            what: "a claim of the same name",
            epoch: 0,
            sequence: 0,
            waited_ms: self.site.patience.as_millis().try_into().unwrap_or(u64::MAX),
        }
    }

    /// Opens the object of this name.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::TooManyOpen`], and [`PoolError::Corrupt`] when its entry or header is damaged.
    pub(crate) fn open(&self, name: &Name<'_>) -> Result<Object, PoolError> {
        let key = Key::new(&self.site, name.hash());
        let held = Opens(self.site).reserve()?;
        let opened = self.open_held(name, &key, held);
        if opened.is_err() {
            // Fences before anybody is told.
            Opens(self.site).release(held);
        }
        opened
    }

    fn open_held(&self, name: &Name<'_>, key: &Key, held: u32) -> Result<Object, PoolError> {
        let mut watch = Watch::new(&self.site);
        loop {
            let scan = self.scan(key)?;
            let Some(sight) = scan.object() else {
                let Some(offset) = self.unclear(&scan, &mut watch) else { return Err(not_found(name)) };
                watch.wait_or(&self.site, || corrupt(offset))?;
                continue;
            };
            Opens(self.site).announce(held, sight.announcement());
            if let Some(Header { name, note, bytes, generation, owner, slot }) = self.admit(name, &sight)? {
                let at = sight.record.data();
                return Ok(Object { name, note, at, bytes, generation, owner, slot, held });
            }
            watch.wait_or(&self.site, || corrupt(self.site.layout.entry(sight.host, sight.slot)))?;
        }
    }

    /// After an announcement: reads the entry again, and what it leads to. `None` when it is another one by now.
    // SYNC: pairs with `Directory::reclaim`, which condemns and then looks at the announcements.
    fn admit(&self, name: &Name<'_>, sight: &Sight) -> Result<Option<Header>, PoolError> {
        let (site, memory, record) = (self.site, self.site.memory, &sight.record);
        let entry = site.layout.entry(sight.host, sight.slot);
        let extent = self.extent_of(record).ok_or_else(|| corrupt(entry))?;
        let chunks = Extents(site).chunks(extent);
        // The announcement is out first: a line that is invalidated before may be filled again while it is not.
        memory.mfence();
        if sight.host != site.host() {
            memory.invalidate(entry, LINE);
            memory.invalidate(record.header, u64::from(record.header_lines) * LINE);
            Chunks(site).invalidate(sight.host, &chunks);
            // SYNC: pairs with the `line::publish_and_fence` of the entry, which its owner made after header and chunks were there.
            memory.fence_invalidations();
        }
        if self.load_entry(sight.host, sight.slot)? != Some(Entry::Object(State::Live, *record)) {
            return Ok(None);
        }
        if !Chunks(site).are_held(sight.host, chunks)? {
            return Err(corrupt(entry));
        }
        match Header::load(memory, record.header, record.header_lines)? {
            Some(header) if !sight.has(&header) => Err(corrupt_header(record.header)),
            // Two names with one hash of 128 bits.
            Some(header) if header.name != name.as_str() => Err(not_found(name)),
            Some(header) => Ok(Some(header)),
            None => Err(corrupt_header(record.header)),
        }
    }

    /// Lets go of an object.
    pub(crate) fn close(&self, object: &Object) {
        Opens(self.site).release(object.held);
    }

    /// Destroys the object of this name: no process finds it from now on. A process that holds it open keeps it.
    ///
    /// # Errors
    /// [`PoolError::NotFound`]; [`PoolError::DirectoryFull`] when another host owns it and this one has no slot to say so.
    pub(crate) fn destroy(&self, name: &Name<'_>) -> Result<(), PoolError> {
        self.destroy_if(name, |_| true)
    }

    /// What a process announces that holds the object of this name open.
    ///
    /// # Errors
    /// [`PoolError::NotFound`].
    pub(crate) fn announcement_of(&self, name: &Name<'_>) -> Result<Announcement, PoolError> {
        let sight = self.find(&Key::new(&self.site, name.hash()))?.ok_or_else(|| not_found(name))?;
        Ok(sight.announcement())
    }

    /// The processes that announce this.
    pub(crate) fn announcers(&self, object: Announcement) -> Result<Vec<(u16, ProcessSlot)>, PoolError> {
        Opens(self.site).announcers(object)
    }

    /// Lets go of an object and destroys it, unless the name is another's by now.
    ///
    /// # Errors
    /// Those of [`Directory::destroy`].
    pub(crate) fn discard(&self, object: &Object) -> Result<(), PoolError> {
        self.close(object);
        self.destroy_if(&Name::parse(&object.name)?, |sight| sight.is(object.owner, object.generation))
    }

    /// Whether an object of a host has not been destroyed, as far as one look says: it may be there behind a line that cannot be
    /// read.
    pub(crate) fn is_live(&self, name: &Name<'_>, owner: u16, generation: u64) -> Result<bool, PoolError> {
        let scan = self.scan(&Key::new(&self.site, name.hash()))?;
        Ok(scan.object().map_or(!scan.unclear.is_empty(), |sight| sight.is(owner, generation)))
    }

    /// Whether the entry in this slot of `owner` is that of a live object of this generation, as far as one look says: a line that cannot
    /// be read may be. That another host has destroyed it is not seen before its owner knows.
    // SYNC: pairs with the `line::publish_and_fence` of `Directory::condemn`.
    pub(crate) fn stands(&self, owner: u16, slot: u32, generation: u64) -> Result<bool, PoolError> {
        Ok(match self.read_entry(owner, slot)? {
            Some(Entry::Object(State::Live, record)) => record.generation == generation,
            Some(_) => false,
            None => true,
        })
    }

    /// Where the object of this generation lies whose entry is in this slot of `owner`, as one look at it says. Its owner frees it only
    /// after it is not: what a process read there before the look was the object's. That another host has destroyed it is not seen before
    /// its owner knows.
    // SYNC: pairs with the `line::publish_and_fence` of `Directory::condemn`.
    pub(crate) fn find_place(
        &self,
        owner: u16,
        slot: u32,
        generation: u64,
    ) -> Result<Option<Range<u64>>, PoolError> {
        Ok(match self.read_entry(owner, slot)? {
            Some(Entry::Object(State::Live, record))
                if record.generation == generation && self.extent_of(&record).is_some() =>
            {
                let start = record.data().0;
                Some(start..start + record.bytes)
            }
            _ => None,
        })
    }

    fn destroy_if(&self, name: &Name<'_>, wanted: impl Fn(&Sight) -> bool) -> Result<(), PoolError> {
        let key = Key::new(&self.site, name.hash());
        let mut destroyed = self.destroy_once(&key, name, &wanted);
        if matches!(destroyed, Err(PoolError::DirectoryFull { .. })) && self.maintain()? > 0 {
            destroyed = self.destroy_once(&key, name, &wanted);
        }
        self.reclaim_when_due(destroyed?)
    }

    /// Returns the bytes that may come free.
    fn destroy_once(
        &self,
        key: &Key,
        name: &Name<'_>,
        wanted: impl Fn(&Sight) -> bool,
    ) -> Result<u64, PoolError> {
        let mut stripe = self.lock(self.site.words().stripe_of(key.hash))?;
        loop {
            let Some(sight) = self.find(key)?.filter(&wanted) else { return Err(not_found(name)) };
            if sight.host != self.site.host() {
                let buried = self.bury(&stripe, key, &sight, name);
                return self.end(&mut stripe, buried).map(|()| 0);
            }
            if self.site.tag(sight.slot) == DAMAGED {
                // It was when the host started: what it takes up is not known to be its own.
                return Err(corrupt(self.entry(sight.slot)));
            }
            if self.condemn(&stripe, &sight)? {
                return Ok(sight.record.bytes);
            }
        }
    }

    fn bury(
        &self,
        stripe: &Stripe<'_, M>,
        key: &Key,
        sight: &Sight,
        name: &Name<'_>,
    ) -> Result<(), PoolError> {
        let slot = self.take_slot(stripe, key.slots(), Intent::Bury, name)?;
        let Sight { host: owner, slot: target, record } = *sight;
        let Record { hash, generation, .. } = record;
        self.mark(Marks::Tombstones, slot);
        let _guard = self.lock_burials()?;
        self.list_burial(owner, slot)?;
        let tombstone = Entry::Tombstone(Tombstone { hash, generation, owner, slot: target });
        line::publish_and_fence(self.site.memory, self.entry(slot), &tombstone.encode());
        self.clear_intent(stripe.index);
        Ok(())
    }

    /// The live object of this name.
    pub(crate) fn find(&self, key: &Key) -> Result<Option<Sight>, PoolError> {
        let mut watch = Watch::new(&self.site);
        loop {
            let scan = self.scan(key)?;
            match (scan.object(), self.unclear(&scan, &mut watch)) {
                (Some(sight), _) if self.is_still_live(&sight)? => return Ok(Some(sight)),
                (None, None) => return Ok(None),
                (Some(sight), _) => watch.wait_or(&self.site, || self.late(sight.host))?,
                (None, Some(offset)) => watch.wait_or(&self.site, || corrupt(offset))?,
            }
        }
    }

    /// Whether an entry without a tombstone beside it is live now. A tombstone goes when its entry is gone: a look that
    /// found the one before and the other after would take a destroyed object for a live one.
    fn is_still_live(&self, sight: &Sight) -> Result<bool, PoolError> {
        let now = self.read_entry(sight.host, sight.slot)?;
        Ok(now == Some(Entry::Object(State::Live, sight.record)))
    }

    /// A line that may hold an object of the name, and cannot be read.
    fn unclear(&self, scan: &Scan, watch: &mut Watch) -> Option<Offset> {
        let waits = Deviation::WaitForHalfWritten.is_on();
        let half_claimed = waits.then(|| self.awaited(&scan.half_claimed, watch)).flatten();
        half_claimed.or_else(|| self.awaited(&scan.unclear, watch))
    }

    /// The first of these lines that may still become whole. What a host that is off left torn was seen by nobody.
    fn awaited(&self, lines: &[(u16, Offset)], watch: &mut Watch) -> Option<Offset> {
        lines.iter().find(|(host, _)| watch.must_wait_for(&self.site, *host)).map(|(_, at)| *at)
    }

    /// Reads all candidate slots of a name, of every host that was ever in the pool.
    pub(crate) fn scan(&self, key: &Key) -> Result<Scan, PoolError> {
        let (site, memory) = (self.site, self.site.memory);
        let hosts = site.survey(|host| {
            for &slot in key.slots() {
                memory.invalidate(site.layout.entry(host, slot), LINE);
            }
        })?;
        let mut scan = Scan::default();
        for host in site.hosts(hosts) {
            for &slot in key.slots() {
                self.look(key, host, slot, &mut scan)?;
            }
        }
        Ok(scan)
    }

    /// Adds one candidate slot to a scan. A line whose first word is not the name's holds nothing of the name that was
    /// announced before the scan, so it need not be whole. A line of this host, which another process may have stored and not
    /// written back, is written back. A process fences before it tells others what the line says.
    fn look(&self, key: &Key, host: u16, slot: u32, scan: &mut Scan) -> Result<(), PoolError> {
        let at = self.site.layout.entry(host, slot);
        if self.site.memory.load(at)? != entry::first_word(key.hash) {
            return Ok(());
        }
        let (words, sum) = line::load_torn(self.site.memory, at)?;
        let is_whole = sum == line::checksum(&words);
        let entry = is_whole.then(|| Entry::decode(&words)).flatten();
        if host == self.site.host() && !matches!(entry, Some(Entry::Object(State::Claimed, _))) {
            self.site.memory.write_back(at, LINE);
        }
        let half = || if is_whole { None } else { entry::half_written(&words, sum) };
        match entry {
            None => match half() {
                Some(HalfWritten::Claim) => scan.half_claimed.push((host, at)),
                Some(HalfWritten::Gone) if !Deviation::WaitForHalfWritten.is_on() => {}
                Some(HalfWritten::Gone) | None => scan.unclear.push((host, at)),
            },
            Some(Entry::Object(state, record)) if record.hash == key.hash => match state {
                State::Live => scan.live.push(Sight { host, slot, record }),
                State::Claimed => scan.claimed.push(Sight { host, slot, record }),
                State::Condemned => {}
            },
            Some(Entry::Tombstone(tombstone)) if tombstone.hash == key.hash => {
                scan.tombstones.push(tombstone)
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// The extent of header and object, or `None` when none could lie there.
    pub(crate) fn extent_of(&self, record: &Record) -> Option<Extent> {
        Extents(self.site).at(record.header, record.whole_bytes()?)
    }

    /// Where an entry of this host stands.
    pub(crate) fn entry(&self, slot: u32) -> Offset {
        self.site.layout.entry(self.site.host(), slot)
    }

    /// Loads an entry without invalidating it; `None` when it is being written, or is damaged.
    pub(crate) fn load_entry(&self, host: u16, slot: u32) -> Result<Option<Entry>, PoolError> {
        let words = line::load(self.site.memory, self.site.layout.entry(host, slot))?;
        Ok(words.and_then(|words| Entry::decode(&words)))
    }

    /// Reads an entry afresh.
    pub(crate) fn read_entry(&self, host: u16, slot: u32) -> Result<Option<Entry>, PoolError> {
        if host != self.site.host() {
            self.site.memory.invalidate(self.site.layout.entry(host, slot), LINE);
            // SYNC: pairs with the `line::publish_and_fence` of the entry by its owner.
            self.site.memory.fence_invalidations();
        }
        self.load_entry(host, slot)
    }

    // Among the processes of this host.

    /// Takes a directory lock and puts right what a dead holder left.
    pub(crate) fn lock(&self, index: u32) -> Result<Stripe<'a, M>, PoolError> {
        let mut guard = self.site.lock_word(self.site.words().stripe_lock(index))?;
        if guard.recovered() {
            self.repair_stripe(index)?;
            guard.repaired();
        }
        Ok(Stripe { index, guard })
    }

    /// Takes a free one of the candidate slots, for what the intent says from now on.
    fn take_slot(
        &self,
        stripe: &Stripe<'_, M>,
        slots: &[u32],
        intent: impl Fn(u32) -> Intent,
        name: &Name<'_>,
    ) -> Result<u32, PoolError> {
        for &slot in slots {
            if self.site.tag(slot) != 0 {
                continue;
            }
            // First, so that a slot with this stripe's tag that its intent names was taken for the intent.
            if !Deviation::IntendsLate.is_on() {
                self.set_intent(stripe.index, intent(slot));
            }
            if self.site.retag(slot, 0, stripe.tag()) {
                if Deviation::IntendsLate.is_on() {
                    self.set_intent(stripe.index, intent(slot));
                }
                return Ok(slot);
            }
        }
        self.clear_intent(stripe.index);
        Err(PoolError::DirectoryFull { name: name.as_str().into() })
    }

    pub(crate) fn set_intent(&self, stripe: u32, intent: Intent) {
        self.site.set(self.site.words().intent(stripe, 0), intent.encode());
    }

    pub(crate) fn intent(&self, stripe: u32) -> Option<Intent> {
        Intent::decode(self.site.get(self.site.words().intent(stripe, 0)))
    }

    pub(crate) fn clear_intent(&self, stripe: u32) {
        self.site.set(self.site.words().intent(stripe, 0), 0);
    }
}

pub(crate) fn corrupt(offset: Offset) -> PoolError {
    PoolError::Corrupt { offset, what: "directory entry" }
}

fn corrupt_header(offset: Offset) -> PoolError {
    PoolError::Corrupt { offset, what: "object header" }
}

fn exists(name: &Name<'_>) -> PoolError {
    PoolError::Exists { name: name.as_str().into() }
}

fn not_found(name: &Name<'_>) -> PoolError {
    PoolError::NotFound { name: name.as_str().into() }
}
