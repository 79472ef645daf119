//! What an end of a ring knows of the other: who it is, how to wake it, and whether it lives.

use polder_mem::{Bell, Fault, Memory, Nanos, Offset};

use crate::wait::{self, Patience};
use crate::{Peer, PoolError};

/// The other end, as one end of a ring sees it.
#[derive(Clone, Debug)]
pub struct RingLink<A> {
    /// Who the other end is.
    pub peer: Peer,
    /// The view's epoch in which the ring was made.
    pub epoch: u64,
    /// Where this end sleeps.
    pub bell: Bell,
    /// Where the other end sleeps, if it ever does.
    pub wakes: Option<Bell>,
    /// How this end waits.
    pub patience: Patience,
    /// Fails when the other end is dead, or this one evicted.
    pub alive: A,
}

/// One wait of one end: until when, for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) deadline: Nanos,
    pub(crate) what: &'static str,
    pub(crate) sequence: u64,
}

impl<A: Fn() -> Result<(), PoolError>> RingLink<A> {
    /// Waits until `look` returns something.
    pub(super) fn wait<M: Memory, T>(
        &self,
        memory: &M,
        wait: Wait,
        mut look: impl FnMut() -> Result<Option<T>, PoolError>,
    ) -> Result<T, PoolError> {
        if let Some(value) = look()? {
            return Ok(value);
        }
        let began = memory.now();
        let alive = || self.check(wait.what, wait.sequence);
        if let Some(value) = wait::until(memory, self.bell, self.patience, wait.deadline, &mut look, alive)? {
            return Ok(value);
        }
        match alive() {
            Ok(()) => Err(self.late(memory, wait, began)),
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

    /// The error for a peer that lives and let `wait`, which began then, come to its deadline.
    #[cold]
    pub(crate) fn late<M: Memory>(&self, memory: &M, wait: Wait, began: Nanos) -> PoolError {
        let waited_ms = memory.now().0.saturating_sub(began.0) / 1_000_000;
        PoolError::Timeout {
            peer: self.peer,
            what: wait.what,
            epoch: self.epoch,
            sequence: wait.sequence,
            waited_ms,
        }
    }
}

/// Makes what was written back visible to the other end, and wakes it where it sleeps.
#[inline(always)]
pub(super) fn announce<M: Memory>(memory: &M, wakes: Option<Bell>) {
    match wakes {
        // Its fence stands for the `sfence` of rule 2.
        Some(bell) => memory.wake(bell),
        // Nothing is read after it that must be newer: `wake` would wait until the line is out.
        // SYNC: pairs with `In::glance` at a header, and with `Out::look_for_credits`.
        None => memory.sfence(),
    }
}

/// Whether an end still works; the failure that ended it.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkState(Option<Box<PoolError>>);

impl LinkState {
    /// Fails when an earlier operation ended this ring.
    #[inline]
    pub(super) fn check(&self) -> Result<(), PoolError> {
        match &self.0 {
            None => Ok(()),
            Some(cause) => Err(PoolError::Broken { what: "ring", cause: cause.clone() }),
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.0.is_some()
    }

    /// Remembers a failure after which this end cannot go on, and passes it on. A timeout is one when a message is
    /// under way.
    #[cold]
    pub(super) fn end(&mut self, cause: PoolError, under_way: bool) -> PoolError {
        match &cause {
            PoolError::Argument { .. } => {}
            PoolError::Timeout { .. } if !under_way => {}
            cause => self.0 = Some(Box::new(cause.clone())),
        }
        cause
    }
}

/// Why an operation failed, in two words that cost the hot path nothing; a [`PoolError`] at the door.
#[derive(Clone, Copy, Debug)]
pub(super) enum RingFailure {
    /// The peer wrote what no correct one writes.
    Corrupt(&'static str),
    /// The peer went over to another generation.
    Left,
    /// A slice of so many bytes is too short for a message of so many.
    Short(u64, u64),
    Memory(Fault),
}

impl From<Fault> for RingFailure {
    fn from(fault: Fault) -> Self {
        Self::Memory(fault)
    }
}

impl<A> RingLink<A> {
    /// The error for a flaw that was met at `offset`, in an operation on the slot of this sequence.
    #[cold]
    pub(super) fn error(
        &self,
        flaw: RingFailure,
        offset: Offset,
        what: &'static str,
        sequence: u64,
    ) -> PoolError {
        match flaw {
            RingFailure::Corrupt(what) => PoolError::Corrupt { offset, what },
            RingFailure::Left => PoolError::PeerDead { peer: self.peer, what, epoch: self.epoch, sequence },
            RingFailure::Short(room, bytes) => PoolError::Argument {
                what: "the room to receive into",
                value: format!("{room} bytes for a message of {bytes} bytes"),
                expected: "the message stays; receive it into room for all of it",
            },
            RingFailure::Memory(fault) => PoolError::Memory(fault),
        }
    }
}
