//! What the agent knows of a service from round to round.

use polder_linux::{Cgroup, Resume};

use crate::report::Cause;

/// What the agent knows of a service from round to round.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Of a unit.
    pub(crate) cgroup: Option<Cgroup>,
    /// The round that last looked at it.
    pub(crate) looked: u64,
    pub(crate) refaults: Option<u64>,
    /// Pages that the kernel had promoted.
    pub(crate) promoted: Option<u64>,
    /// Bytes that came back after they had gone down, since the agent started.
    pub(crate) returned: u64,
    pub(crate) oom_kills: Option<u64>,
    /// The latest last.
    pub(crate) causes: Vec<Cause>,
    /// How its pages come up, while they do.
    pub(crate) rise: Rise,
    /// What became of it when the round before asked for pages of it.
    pub(crate) demotion: Option<Demotion>,
}

impl Known {
    /// Keeps why the service is as it is. The same cause goes on from round to round.
    pub(crate) fn note(&mut self, cause: Cause) -> Cause {
        const KEPT: usize = 8;
        if let Some(last) =
            self.causes.last().filter(|last| last.what == cause.what && last.line == cause.line)
        {
            return last.clone();
        }
        self.causes.push(cause.clone());
        self.causes.drain(..self.causes.len().saturating_sub(KEPT));
        cause
    }
}

/// What became of a service whose pages were to go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Demotion {
    /// The kernel refused, which is an alarm.
    Refused,
    /// None went, because they are locked, say.
    Stuck,
    /// Some went.
    Moved,
}

/// How the pages of a service under its `local_low` come up.
#[derive(Debug, Default)]
pub(crate) struct Rise {
    /// Where the next round goes on.
    pub(crate) resume: Resume,
    /// Bytes that came up since its first process was looked at.
    moved: u64,
    /// Rounds in which it is not tried, because nothing could be moved.
    pub(crate) rest: u32,
    /// How often nothing could be moved, one time after the other.
    pub(crate) failures: u32,
}

impl Rise {
    /// The rests double up to 64 rounds.
    const MOST_FAILURES: u32 = 6;

    pub(crate) fn failed(&mut self) {
        let failures = (self.failures + 1).min(Self::MOST_FAILURES);
        *self = Self { rest: 1 << failures, failures, ..Self::default() };
    }

    /// After a round in which `bytes` came up.
    pub(crate) fn went(&mut self, bytes: u64) {
        self.moved += bytes;
        match (self.resume, self.moved) {
            (None, 0) => self.failed(),
            (None, _) => *self = Self::default(),
            (Some(_), _) => {}
        }
    }
}
