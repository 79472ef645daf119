//! Announcements: which objects each process holds open, so that no extent is used again while a process looks at it; and which slots of
//! caches of blocks it has pinned.
//!
//! A process announces an object, and then looks at the entry once more. The owner condemns an entry, and then looks at the
//! announcements. So at least one of the two sees the other. With a slot of a cache it is the same.
//!
//! # Words
//! An announcement is a checked word: bits 0..19 the low bits of the generation, bits 19..49 the slot of the entry, bits
//! 49..55 its owner, bit 55 is 1. If two objects have the same word, neither is freed while the other is open; nothing worse
//! happens.
//! A pin is a checked word too: bit 0 is 1, bits 1..17 a tag of the cache, bits 17..49 the slot, bits 49..55 its owner, bit 55 is 0. If slots of
//! two caches have the same word, neither is used again while the other is pinned; nothing worse happens.
//! A mark is a checked word: the lines of announcements that the process ever used.

mod look;

use polder_mem::{LINE, Memory, Offset, ProcessSlot};

use crate::site::Site;
use crate::state::LockName;
use crate::{PoolError, word};

pub(crate) use look::pinned_slots;

const GENERATION_BITS: u32 = 19;
const SLOT_BITS: u32 = 30;
/// Below the slot of a pin, so that its owner stands where that of an object does.
const PIN_SLOT_SHIFT: u32 = GENERATION_BITS + SLOT_BITS - u32::BITS;
/// One bit below it says that a word is a pin.
const PIN_CACHE_SHIFT: u32 = 1;
const WORDS_PER_LINE: u32 = (LINE / 8) as u32;

const _: () = assert!(GENERATION_BITS + SLOT_BITS + 6 + 1 == word::BITS);
const _: () = assert!(PIN_CACHE_SHIFT + u16::BITS == PIN_SLOT_SHIFT);

/// A slot of a cache of blocks, as pins name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PinnedSlot {
    /// A tag of the cache.
    pub(crate) cache: u16,
    pub(crate) owner: u16,
    pub(crate) slot: u32,
}

/// An object, as announcements name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Announcement(u64);

impl Announcement {
    pub(crate) const fn new(owner: u16, slot: u32, generation: u64) -> Self {
        let generation = generation & ((1 << GENERATION_BITS) - 1);
        let slot = (slot as u64) << GENERATION_BITS;
        let owner = (owner as u64) << (GENERATION_BITS + SLOT_BITS);
        Self(generation | slot | owner | 1 << (word::BITS - 1))
    }

    /// A slot of a cache of blocks, whatever block is there.
    pub(crate) const fn pin(of: PinnedSlot) -> Self {
        let owner = (of.owner as u64) << (GENERATION_BITS + SLOT_BITS);
        Self(1 | (of.cache as u64) << PIN_CACHE_SHIFT | (of.slot as u64) << PIN_SLOT_SHIFT | owner)
    }

    /// The owner and slot of the entry.
    pub(crate) const fn entry(self) -> (u16, u32) {
        let owner = self.0 >> (GENERATION_BITS + SLOT_BITS) & 0x3f;
        let slot = self.0 >> GENERATION_BITS & ((1 << SLOT_BITS) - 1);
        (owner as u16, slot as u32)
    }

    const fn owner(self) -> u16 {
        self.entry().0
    }

    /// The slot that it pins.
    fn pinned(self) -> Option<PinnedSlot> {
        let is_pin = self.0 >> (word::BITS - 1) == 0 && self.0 & 1 == 1;
        let (cache, slot) = ((self.0 >> PIN_CACHE_SHIFT) as u16, (self.0 >> PIN_SLOT_SHIFT) as u32);
        is_pin.then(|| PinnedSlot { cache, owner: self.owner(), slot })
    }
}

/// What the processes of some hosts hold open of one owner's objects.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    /// In order, with the hosts that hold it.
    objects: Vec<(Announcement, u64)>,
    /// Hosts with words that cannot be read: they may hold anything.
    unclear: u64,
}

impl Announced {
    /// The hosts that hold this object open, one bit each.
    pub(crate) fn holders(&self, object: Announcement) -> u64 {
        let first = self.objects.partition_point(|(held, _)| *held < object);
        let same = self.objects[first..].iter().take_while(|(held, _)| *held == object);
        same.fold(self.unclear, |hosts, (_, host)| hosts | host)
    }
}

/// The announcements of the processes of a pool.
pub(crate) struct Opens<'a, M>(pub(crate) Site<'a, M>);

impl<'a, M: Memory> Opens<'a, M> {
    /// Takes one of this process's announcement words.
    ///
    /// # Errors
    /// [`PoolError::TooManyOpen`] when all are in use.
    pub(crate) fn reserve(&self) -> Result<u32, PoolError> {
        let site = self.0;
        let limit = site.layout.geometry().opens;
        for word in 0..site.words().open_words() {
            let free = |bits: u64| {
                let bit = bits.trailing_ones();
                (bit < 64 && word * 64 + bit < limit).then(|| bits | 1 << bit)
            };
            if let Ok(bits) = site.update(site.words().open_bits(site.me.slot, word), free) {
                let index = word * 64 + bits.trailing_ones();
                self.raise_mark(index / WORDS_PER_LINE).inspect_err(|_| self.give_back(index))?;
                return Ok(index);
            }
        }
        Err(PoolError::TooManyOpen { limit })
    }

    /// How many more objects this process can announce.
    pub(crate) fn left(&self) -> u32 {
        let site = self.0;
        let used =
            (0..site.words().open_words()).map(|word| site.get(site.words().open_bits(site.me.slot, word)));
        site.layout.geometry().opens - used.map(u64::count_ones).sum::<u32>()
    }

    /// Lets others know that line `line` of this process's announcements is in use from now on.
    fn raise_mark(&self, line: u32) -> Result<(), PoolError> {
        let site = self.0;
        let (memory, mark) = (site.memory, site.words().open_mark(site.me.slot));
        if site.get(mark) > line.into() {
            return Ok(());
        }
        let mut guard = site.lock(LockName::Announcements)?;
        guard.repaired();
        if site.get(mark) <= line.into() {
            let raised = u64::from((line + 1).next_power_of_two().min(self.lines()));
            let at = site.layout.open_mark(site.host(), site.me.slot);
            memory.store(at, word::seal(raised));
            memory.write_back(at, 8);
            // SYNC: pairs with `collect`, which reads marks first: this is out before a word of that line announces anything.
            memory.mfence();
            site.set(mark, raised);
        }
        Ok(())
    }

    fn lines(&self) -> u32 {
        self.0.layout.geometry().opens.div_ceil(WORDS_PER_LINE)
    }

    /// Announces an object in a word that [`Opens::reserve`] gave. The caller's `mfence` makes it count.
    // SYNC: pairs with `collect`: the owner condemns, fences and collects; this side announces, fences and reads again.
    pub(crate) fn announce(&self, index: u32, object: Announcement) {
        let at = self.at(index);
        self.0.memory.store(at, word::seal(object.0));
        self.0.memory.write_back(at, 8);
    }

    /// Takes an announcement back and frees its word. What this process wrote to the object, and wrote back, reaches memory
    /// before.
    pub(crate) fn release(&self, index: u32) {
        let (site, at) = (self.0, self.at(index));
        // SYNC: pairs with `collect` of the owner, which frees the bytes only once it sees that this word is empty.
        site.memory.sfence();
        site.memory.store(at, 0);
        site.memory.write_back(at, 8);
        self.give_back(index);
    }

    /// Frees a word that announces nothing.
    fn give_back(&self, index: u32) {
        let site = self.0;
        site.clear_bits(site.words().open_bits(site.me.slot, index / 64), 1 << (index % 64));
    }

    fn at(&self, index: u32) -> Offset {
        self.0.layout.announcement(self.0.host(), self.0.me.slot, index)
    }

    /// The announcements of the process at `slot` of this host, which is dead.
    pub(crate) fn left_by(&self, slot: ProcessSlot) -> Result<Vec<Announcement>, PoolError> {
        let site = self.0;
        let words = site.layout.geometry().opens;
        let mut left = vec![];
        for index in 0..words {
            let at = site.layout.announcement(site.host(), slot, index);
            let object = word::open(site.memory.load(at)?).filter(|&object| object != 0);
            left.extend(object.map(Announcement));
        }
        Ok(left)
    }

    /// Clears the announcements of the process at `slot` of this host, which is dead, and whose dirty lines have been written
    /// back.
    pub(crate) fn clear(&self, slot: ProcessSlot) {
        let site = self.0;
        for index in 0..site.layout.geometry().opens {
            let at = site.layout.announcement(site.host(), slot, index);
            site.memory.store(at, 0);
            // What a dead process announced leaves the cache.
            site.memory.write_back(at, 8);
        }
        for word in 0..site.words().open_words() {
            site.set(site.words().open_bits(slot, word), 0);
        }
    }

    /// What the processes of `hosts` hold open of this host's objects. The caller has condemned the entries that it asks for,
    /// written their lines back and fenced.
    // SYNC: pairs with `announce`.
    pub(crate) fn collect(&self, hosts: u64) -> Result<Announced, PoolError> {
        let (site, memory) = (self.0, self.0.memory);
        let processes = || site.hosts(hosts).flat_map(|host| site.slots().map(move |slot| (host, slot)));
        for (host, slot) in processes().filter(|(host, _)| *host != site.host()) {
            memory.invalidate(site.layout.open_mark(host, slot), 8);
        }
        memory.fence_invalidations();
        let mut used = vec![];
        for (host, slot) in processes() {
            let lines = match word::open(memory.load(site.layout.open_mark(host, slot))?) {
                Some(lines) => lines.min(self.lines().into()) as u32,
                None => self.lines(),
            };
            if lines != 0 {
                used.push((host, slot, lines));
            }
        }
        for &(host, slot, lines) in used.iter().filter(|(host, ..)| *host != site.host()) {
            memory.invalidate(site.layout.announcement(host, slot, 0), u64::from(lines) * LINE);
        }
        // SYNC: pairs with `announce`: this host has condemned and fenced, so who announces later reads that.
        memory.fence_invalidations();
        let mut announced = Announced::default();
        for (host, slot, lines) in used {
            self.load(host, slot, lines, &mut announced)?;
        }
        announced.objects.sort_unstable();
        Ok(announced)
    }

    fn load(&self, host: u16, slot: ProcessSlot, lines: u32, into: &mut Announced) -> Result<(), PoolError> {
        let site = self.0;
        for index in 0..(lines * WORDS_PER_LINE).min(site.layout.geometry().opens) {
            match word::open(site.memory.load(site.layout.announcement(host, slot, index))?) {
                Some(0) => {}
                Some(object) if Announcement(object).owner() == site.host() => {
                    into.objects.push((Announcement(object), 1 << host));
                }
                Some(_) => {}
                None => into.unclear |= 1 << host,
            }
        }
        Ok(())
    }
}
