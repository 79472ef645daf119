//! Death and standstill at a chosen operation.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Fault, LINE, Offset};

/// When this process kills or stops itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// The operation before which it happens, counted from 1. A copy into the region counts once a line.
    pub operation: u64,
    /// What happens.
    pub action: TriggerAction,
}

/// What a trigger does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TriggerAction {
    /// SIGKILL: nothing of the program runs any more.
    Kill,
    /// SIGSTOP: the process stands still until someone sends SIGCONT.
    Stop,
}

/// The operations of one process so far, and what happens at one of them.
#[derive(Debug, Default)]
pub(super) struct Operations {
    count: AtomicU64,
    /// The number of the operation that triggers; 0 is none.
    at: AtomicU64,
    stops: AtomicBool,
}

impl Operations {
    pub(super) fn until(trigger: Trigger) -> Self {
        let operations = Self::default();
        operations.arm(trigger);
        operations
    }

    /// Has `trigger` count from here.
    pub(super) fn arm(&self, trigger: Trigger) {
        self.stops.store(trigger.action == TriggerAction::Stop, Ordering::Relaxed);
        self.at.store(self.count().saturating_add(trigger.operation), Ordering::Release);
    }

    fn is_armed(&self) -> bool {
        self.at.load(Ordering::Relaxed) != 0
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts an operation that is about to be made.
    #[inline]
    pub(super) fn next(&self) {
        let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if self.at.load(Ordering::Acquire) == number {
            let stops = self.stops.load(Ordering::Relaxed);
            if stops { TriggerAction::Stop } else { TriggerAction::Kill }.take();
        }
    }

    /// Makes a copy line by line, each an operation, so that the trigger also falls into the middle of one.
    #[track_caller]
    pub(super) fn pieces(
        &self,
        at: Offset,
        from: &[u8],
        copy: impl Fn(Offset, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if !self.is_armed() {
            self.count.fetch_add((from.len() as u64).div_ceil(LINE).max(1), Ordering::Relaxed);
            return copy(at, from);
        }
        let mut done = 0;
        loop {
            self.next();
            let here = at + done;
            let piece = &from[done as usize..];
            let piece = &piece[..piece.len().min((here.line().0 + LINE - here.0) as usize)];
            copy(here, piece).map_err(|fault| Fault { done: done + fault.done, ..fault })?;
            done += piece.len() as u64;
            if done == from.len() as u64 {
                return Ok(());
            }
        }
    }
}

impl TriggerAction {
    #[cold]
    fn take(self) {
        let signal = match self {
            Self::Kill => libc::SIGKILL,
            Self::Stop => libc::SIGSTOP,
        };
        // SAFETY: sends a signal to this process; SIGKILL ends it, SIGSTOP returns once it is continued.
        unsafe { libc::kill(libc::getpid(), signal) };
    }
}
