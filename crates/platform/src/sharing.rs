//! What ranks of one machine pay that move bytes by copying them.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tier::check_rate;
use crate::{Bandwidth, Bytes, MemoryTier, Time};

/// Cores and caches of ranks that share memory, and the ways in which they exchange bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sharing {
    /// Cores that the ranks share.
    pub cores: u32,
    /// The last cache, of all cores together.
    pub cache: Bytes,
    /// The largest cache of a core.
    pub core_cache: Bytes,
    /// The memory behind it, as all cores together reach it.
    pub memory: MemoryTier,
    /// The ways, by name: `coherent` and `software` through a pool, `loopback` through sockets.
    pub exchange: BTreeMap<String, Exchange>,
}

/// Nine constants of a way to exchange bytes; each bandwidth is that of one rank with a core of its own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// Beginning and ending an operation.
    pub call: Time,
    /// Until a peer sees that a step is done.
    pub turn: Time,
    /// What a core takes to go over to another rank, where it has several.
    pub switch: Time,
    /// Copies and sums of messages that the last cache holds.
    pub cached: Bandwidth,
    /// Copies and sums of messages that are longer.
    pub copied: Bandwidth,
    /// What a core reads that another has just written, and writes that another has read, while caches of cores hold it.
    pub passed: Bandwidth,
    /// What is staged for ranks of the same host.
    pub near: Bandwidth,
    /// What is written for other hosts takes so much longer; no longer when left out.
    pub write: Option<Bandwidth>,
    /// What is read of other hosts takes so much longer; no longer when left out.
    pub read: Option<Bandwidth>,
}

impl Sharing {
    /// What it cannot be, with its key.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        if self.cores == 0 {
            return Err(("cores".into(), "expected at least one".into()));
        }
        self.memory.check().map_err(|(key, problem)| (format!("memory.{key}"), problem))?;
        for (name, Exchange { cached, copied, passed, near, write, read, .. }) in &self.exchange {
            let always = [("cached", cached), ("copied", copied), ("passed", passed), ("near", near)];
            let given = [("write", write), ("read", read)].map(|(key, rate)| Some((key, rate.as_ref()?)));
            for (key, rate) in always.into_iter().chain(given.into_iter().flatten()) {
                check_rate(*rate).map_err(|problem| (format!("exchange.{name}.{key}"), problem))?;
            }
        }
        Ok(())
    }
}

impl Exchange {
    /// The constants in their order, in seconds and bytes a second; infinite where nothing takes longer.
    #[must_use]
    pub fn values(&self) -> [f64; 9] {
        let Self { call, turn, switch, cached, copied, passed, near, write, read } = self;
        let [call, turn, switch] = [call, turn, switch].map(|time| time.value());
        let [cached, copied, passed, near] = [cached, copied, passed, near].map(|rate| rate.value());
        let [write, read] = [write, read].map(|rate| rate.map_or(f64::INFINITY, Bandwidth::value));
        [call, turn, switch, cached, copied, passed, near, write, read]
    }

    /// The constants from their values.
    ///
    /// # Panics
    /// When one is negative or no number, or one of the first seven infinite.
    #[must_use]
    pub fn from_values(values: [f64; 9]) -> Self {
        let [call, turn, switch, cached, copied, passed, near, write, read] = values;
        let far = |rate: f64| (rate < f64::INFINITY).then(|| Bandwidth::new(rate));
        Self {
            call: Time::new(call),
            turn: Time::new(turn),
            switch: Time::new(switch),
            cached: Bandwidth::new(cached),
            copied: Bandwidth::new(copied),
            passed: Bandwidth::new(passed),
            near: Bandwidth::new(near),
            write: far(write),
            read: far(read),
        }
    }
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, turn, switch, cached, copied, passed, near, write, read } = self;
        write!(f, "call {call}, turn {turn}, switch {switch}, cached {cached}, copied {copied}, ")?;
        write!(f, "passed {passed}, near {near}")?;
        let far = [("write", write), ("read", read)];
        far.into_iter().try_for_each(|(name, rate)| match rate {
            Some(rate) => write!(f, ", {name} {rate}"),
            None => Ok(()),
        })
    }
}
