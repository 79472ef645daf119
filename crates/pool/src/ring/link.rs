//! What an end of a ring knows of the other: who it is, how to wake it, and whether it lives.

use polder_mem::{Bell, Memory, Nanos};

use crate::wait::{self, Patience};
use crate::{Peer, PoolError};

/// The other end, as one end of a ring sees it.
#[derive(Clone, Debug)]
pub struct Link<A> {
    /// Who the other end is.
    pub peer: Peer,
    /// The view's epoch in which the ring was made.
    pub epoch: u64,
    /// Where this end sleeps.
    pub bell: Bell,
    /// Where the other end sleeps.
    pub wakes: Bell,
    /// How this end waits.
    pub patience: Patience,
    /// Fails when the other end is dead, or this one evicted.
    pub alive: A,
}

/// One wait of one end: since when, until when, for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) began: Nanos,
    pub(crate) deadline: Nanos,
    pub(crate) what: &'static str,
    pub(crate) sequence: u64,
}

impl<A: Fn() -> Result<(), PoolError>> Link<A> {
    /// Waits until `look` returns something.
    pub(super) fn wait<M: Memory, T>(
        &self,
        memory: &M,
        wait: Wait,
        mut look: impl FnMut() -> Result<Option<T>, PoolError>,
    ) -> Result<T, PoolError> {
        let alive = || self.check(wait.what, wait.sequence);
        if let Some(found) = wait::until(memory, self.bell, self.patience, wait.deadline, &mut look, alive)? {
            return Ok(found);
        }
        match alive() {
            Ok(()) => Err(self.late(memory, wait)),
            // What it published before it died counts.
            Err(dead) => look()?.ok_or(dead),
        }
    }

    /// Fails when the other end is dead, and says in its death what was waited for.
    pub(crate) fn check(&self, what: &'static str, sequence: u64) -> Result<(), PoolError> {
        (self.alive)().map_err(|error| match error {
            PoolError::PeerDead { peer, epoch, .. } => PoolError::PeerDead { peer, what, epoch, sequence },
            other => other,
        })
    }

    /// The error for a peer that lives and let `wait` come to its deadline.
    pub(crate) fn late<M: Memory>(&self, memory: &M, wait: Wait) -> PoolError {
        let Wait { began, what, sequence, .. } = wait;
        let waited_ms = memory.now().0.saturating_sub(began.0) / 1_000_000;
        PoolError::Timeout { peer: self.peer, what, epoch: self.epoch, sequence, waited_ms }
    }

    /// The error for a peer that left this generation of the ring.
    pub(super) fn left(&self, what: &'static str, sequence: u64) -> PoolError {
        PoolError::PeerDead { peer: self.peer, what, epoch: self.epoch, sequence }
    }
}

/// Whether an end still works; the failure that ended it.
#[derive(Clone, Debug, Default)]
pub(super) struct Fate(Option<Box<PoolError>>);

impl Fate {
    /// Fails when an earlier operation ended this ring.
    pub(super) fn check(&self) -> Result<(), PoolError> {
        match &self.0 {
            None => Ok(()),
            Some(cause) => Err(PoolError::Broken { what: "ring", cause: cause.clone() }),
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.0.is_some()
    }

    /// Passes `outcome` on, and remembers a failure after which this end cannot go on.
    pub(super) fn note<T>(&mut self, outcome: Result<T, PoolError>, under_way: bool) -> Result<T, PoolError> {
        match &outcome {
            Err(PoolError::Timeout { .. }) if !under_way => {}
            Err(PoolError::Argument { .. }) | Ok(_) => {}
            Err(cause) => self.0 = Some(Box::new(cause.clone())),
        }
        outcome
    }
}
