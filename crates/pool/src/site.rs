//! One process's place in a pool: its access to memory, where everything lies, and the host's own words.

use std::time::Duration;

use polder_mem::{LocalWord, Memory, ProcessSlot};

use crate::PoolError;
use crate::format::Layout;
use crate::local::{Local, LocalGuard, LocalLock};
use crate::state::{LockName, StateLayout};
use crate::view::Views;

/// A process of a host, and how long it waits for others.
#[derive(Debug)]
pub(crate) struct Site<'a, M> {
    pub(crate) memory: &'a M,
    pub(crate) layout: &'a Layout,
    /// The process, as the host's locks name it.
    pub(crate) me: &'a Local,
    /// How long a call waits for another process or host before it fails.
    pub(crate) patience: Duration,
}

impl<M> Clone for Site<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Site<'_, M> {}

impl<'a, M: Memory> Site<'a, M> {
    pub(crate) const fn host(&self) -> u16 {
        self.me.host
    }

    pub(crate) const fn words(&self) -> &'a StateLayout {
        self.me.layout.state()
    }

    /// The hosts of a mask.
    pub(crate) fn hosts(&self, mask: u64) -> impl Iterator<Item = u16> + use<M> {
        (0..self.layout.geometry().hosts).filter(move |host| mask >> host & 1 == 1)
    }

    /// The slots of a host's processes.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ProcessSlot> + use<M> {
        (0..self.layout.geometry().processes).map(ProcessSlot)
    }

    /// Invalidates, with `prepare`, what the caller wants to see of each other host that was ever in the pool, fences, and
    /// returns those hosts and this one. What a host published before it was seen here, the caller sees.
    // SYNC: pairs with the announcement of the host line when a host joins.
    pub(crate) fn survey(&self, prepare: impl Fn(u16)) -> Result<u64, PoolError> {
        let all = u64::MAX >> (64 - self.layout.geometry().hosts);
        let mut prepared = 1 << self.host();
        loop {
            let known = self.get(self.words().known_hosts()) & all | 1 << self.host();
            for host in self.hosts(known & !prepared) {
                prepare(host);
            }
            prepared |= known;
            for host in self.hosts(all & !known) {
                self.memory.invalidate(self.layout.host_line(host), 8);
            }
            // SYNC: pairs with `arrive` of a host that joins, and with what each host published before that was seen.
            self.memory.fence_invalidations();
            let mut joined = 0;
            for host in self.hosts(all & !known) {
                let is_there = self.memory.load(self.layout.host_line(host))? != 0;
                joined |= u64::from(is_there) << host;
            }
            if joined == 0 {
                return Ok(known);
            }
            self.set_bits(self.words().known_hosts(), joined);
        }
    }

    /// The hosts that are off for certain; none while the view cannot be read. Only what these have begun may be passed over:
    /// an evicted host may be stopped only, and go on. Ask after what they have begun was seen: a host that came back since
    /// it was fenced is a member by then.
    pub(crate) fn fenced(&self) -> u64 {
        let view = Views::new(Duration::ZERO).read(self.memory, self.layout, |_| Ok(()));
        view.map_or(0, |(view, ())| view.fenced & !view.members)
    }

    /// Takes one of the locks that are not striped.
    pub(crate) fn lock(&self, name: LockName) -> Result<LocalGuard<'a, M>, PoolError> {
        self.lock_word(self.words().lock(name))
    }

    pub(crate) fn lock_word(&self, word: LocalWord) -> Result<LocalGuard<'a, M>, PoolError> {
        LocalLock::at(word).lock(self.memory, self.me, self.patience)
    }

    pub(crate) fn get(&self, word: LocalWord) -> u64 {
        self.memory.local_load(word)
    }

    pub(crate) fn set(&self, word: LocalWord, value: u64) {
        self.memory.local_store(word, value);
    }

    /// Changes a word that other processes change as well, or leaves it as it is; returns what stood there.
    pub(crate) fn update(&self, word: LocalWord, change: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        let mut old = self.get(word);
        loop {
            let Some(new) = change(old) else { return Err(old) };
            match self.memory.local_cas(word, old, new) {
                Ok(()) => return Ok(old),
                Err(now) => old = now,
            }
        }
    }

    pub(crate) fn set_bits(&self, word: LocalWord, bits: u64) {
        let _ = self.update(word, |old| (old & bits != bits).then_some(old | bits));
    }

    pub(crate) fn clear_bits(&self, word: LocalWord, bits: u64) {
        let _ = self.update(word, |old| (old & bits != 0).then_some(old & !bits));
    }

    /// The tag of a directory slot: 0 while it is free.
    pub(crate) fn tag(&self, slot: u32) -> u8 {
        let (word, shift) = self.words().tag(slot);
        (self.get(word) >> shift) as u8
    }

    /// Replaces the tag of a directory slot, unless it is not `old`.
    pub(crate) fn retag(&self, slot: u32, old: u8, new: u8) -> bool {
        let (word, shift) = self.words().tag(slot);
        let change = |tags: u64| {
            let others = tags & !(0xff << shift);
            ((tags >> shift) as u8 == old).then_some(others | u64::from(new) << shift)
        };
        self.update(word, change).is_ok()
    }
}
