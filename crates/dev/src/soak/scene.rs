//! What is played: which victim meets which fate, at which memory operation, in which pool.

use std::fmt;

use clap::ValueEnum;
use polder_attach::settings::CoherenceChoice;
use polder_mem::{Trigger, TriggerAction};

/// What the victim is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(super) enum What {
    /// It pushes messages of every form.
    Push,
    /// It pushes messages through a ring that is too small for them, so that it also waits.
    Stream,
    /// It pops messages.
    Pop,
    /// It creates, writes, opens, destroys and lists objects.
    Create,
    /// It takes part in barriers and all-reduces.
    AllReduce,
    /// It attaches where another was just killed while it created, and cleans up after that one.
    Attach,
    /// It is one of three endpoints of a job, of which others may die as well, and the job is swept up.
    Job,
    /// It is a client of a parameter service.
    Client,
    /// It is the proxy of a parameter service.
    Proxy,
    /// It publishes versions of a store.
    Publish,
    /// It is one of four processes that put, get and pin blocks of a cache that is too small for them, and that all die.
    Kv,
}

/// A kind of round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Scene {
    pub(super) what: What,
    pub(super) coherence: CoherenceChoice,
    /// Whether the victim is the only process of its host.
    pub(super) alone: bool,
}

impl Scene {
    /// Every scene.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let pools = [CoherenceChoice::Software, CoherenceChoice::Coherent];
        What::value_variants().iter().flat_map(move |&what| {
            pools
                .into_iter()
                .flat_map(move |coherence| [false, true].map(|alone| Self { what, coherence, alone }))
        })
    }

    /// The scenes whose names begin with `words`, which ends where a part of the name does.
    pub(super) fn named(words: &str) -> Vec<Self> {
        Self::all()
            .filter(|scene| {
                let name = scene.to_string();
                name.strip_prefix(words).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
            .collect()
    }

    /// The victim's host.
    pub(super) const fn host(self) -> u16 {
        if self.alone { LONELY_HOST } else { SHARED_HOST }
    }
}

/// The host of the first survivor.
pub(super) const FIRST_HOST: u16 = 0;
/// The host of the second survivor, and of victims that share it.
pub(super) const SHARED_HOST: u16 = 1;
/// The host that only victims have.
pub(super) const LONELY_HOST: u16 = 2;

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.alone { "alone" } else { "shared" };
        let what = self.what.to_possible_value().expect("none is left out");
        write!(f, "{}/{}/{place}", what.get_name(), self.coherence)
    }
}

/// What befalls the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fate {
    /// Before which memory operation, from 1; past the last one it ends after its last.
    pub(super) operation: u64,
    pub(super) action: TriggerAction,
}

impl Fate {
    pub(super) const fn trigger(self) -> Trigger {
        Trigger { operation: self.operation, action: self.action }
    }
}

/// One round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) scene: Scene,
    /// Draws what is sent, and where the first of two victims dies.
    pub(super) seed: u64,
    /// The number of the round in its pool, from 1: names and generations are used once.
    pub(super) number: u64,
    pub(super) fate: Fate,
}

/// A generator of numbers that only has to be repeatable (SplitMix64).
#[derive(Clone, Debug)]
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(super) fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.draw() as u8).collect()
    }
}
