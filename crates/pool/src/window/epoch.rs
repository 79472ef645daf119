//! Post, start, complete and wait: who may access a window, and when they have done.
//!
//! A target counts how often it posted its window for each origin. An origin counts how many accesses to each target it
//! completed. Each count stands in a word of its own, and both begin at 0. An origin may access the target while the count of
//! posts is above the count of completed accesses. The target has its window for itself again once the two counts are equal
//! for every origin.

use polder_mem::{Memory, Offset};

use super::Window;
use super::lock::Turn;
use super::place::{Segment, Word};
use crate::PoolError;

/// The ranks that take part in an epoch, and how far its wait has come.
#[derive(Debug)]
pub(super) struct Epoch {
    group: Vec<u32>,
    turn: Turn,
}

impl<M: Memory> Window<M> {
    /// Opens this rank's segment for accesses of the ranks of `group`. What this rank stored there must have been
    /// [exposed](Window::expose).
    ///
    /// # Errors
    /// [`PoolError::Argument`] when it is open, or the window has no such rank.
    // SYNC: pairs with `try_start`.
    pub fn post(&mut self, group: &[u32]) -> Result<(), PoolError> {
        self.begin(self.exposure.is_some(), group)?;
        group.iter().for_each(|&rank| self.count(Word::Posts, rank));
        self.exposure = Some(Epoch { group: group.to_vec(), turn: Turn::default() });
        Ok(())
    }

    /// Begins accesses to the segments of the ranks of `group`, each once it has posted: [`Window::try_start`] says when.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when accesses have begun, or the window has no such rank.
    pub fn start(&mut self, group: &[u32]) -> Result<(), PoolError> {
        self.begin(self.access.is_some(), group)?;
        self.access = Some(Epoch { group: group.to_vec(), turn: Turn::default() });
        Ok(())
    }

    /// Whether all ranks that were given to [`Window::start`] have posted. After an error accesses have not begun.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when one never will; [`PoolError::Argument`] when accesses have not begun;
    /// [`PoolError::Evicted`], [`PoolError::Memory`].
    // SYNC: pairs with `post`.
    pub fn try_start(&mut self) -> Result<bool, PoolError> {
        let mut epoch = self.access.take().ok_or_else(|| order("start() comes first"))?;
        let came =
            self.catch_up(&mut epoch, Word::Posts, |window, rank| window.counts[rank as usize].completed + 1);
        if came.is_ok() {
            self.access = Some(epoch);
        }
        came
    }

    /// Ends the accesses: what was put is there before the targets learn of it.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when [`Window::try_start`] has not returned true.
    // SYNC: pairs with `try_wait`.
    pub fn complete(&mut self) -> Result<(), PoolError> {
        let started = |epoch: &mut Epoch| epoch.turn.passed() == epoch.group.len();
        let Some(Epoch { group, .. }) = self.access.take_if(started) else {
            return Err(order("try_start() has to return true first"));
        };
        // What was put is there first.
        self.pool.memory().sfence();
        group.iter().for_each(|&rank| self.count(Word::Completions, rank));
        Ok(())
    }

    /// Whether all ranks for which this rank posted have completed: its segment is its own again then, and what they put is seen
    /// once it is [renewed](Window::renew).
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when one never will; [`PoolError::Argument`] when nothing was posted; [`PoolError::Evicted`],
    /// [`PoolError::Memory`].
    // SYNC: pairs with `complete`.
    pub fn try_wait(&mut self) -> Result<bool, PoolError> {
        let mut epoch = self.exposure.take().ok_or_else(|| order("post() comes first"))?;
        let came =
            self.catch_up(&mut epoch, Word::Completions, |window, rank| window.counts[rank as usize].posted);
        if came != Ok(true) {
            self.exposure = Some(epoch);
        }
        came
    }

    fn begin(&self, is_open: bool, group: &[u32]) -> Result<(), PoolError> {
        group.iter().try_for_each(|&rank| self.segment(rank).map(drop))?;
        if is_open { Err(order("the epoch before has to end first")) } else { Ok(()) }
    }

    /// Counts one more post for `rank`, or completion, and says so.
    fn count(&mut self, word: Word, rank: u32) {
        let counts = &mut self.counts[rank as usize];
        let count = if word == Word::Posts { &mut counts.posted } else { &mut counts.completed };
        *count += 1;
        let (memory, at) = (self.pool.memory(), self.segments[self.rank as usize].word(word, rank));
        memory.store(at, *count);
        memory.write_back(at, 8);
    }

    /// Whether each of the group has counted, for this rank, as far as `wanted`.
    fn catch_up(
        &mut self,
        epoch: &mut Epoch,
        word: Word,
        wanted: impl Fn(&Self, u32) -> u64,
    ) -> Result<bool, PoolError> {
        let Epoch { group, turn } = epoch;
        let place = |window: &Self, index: usize| -> (u32, Offset) {
            let rank = group[index];
            (rank, window.segments[rank as usize].word(word, window.rank))
        };
        self.pass(turn, group.len(), place, |window, rank, _, count| {
            let is_behind = count < wanted(window, rank);
            let Segment { gone, process, .. } = window.segments[rank as usize];
            match is_behind && gone {
                true => Err(window.pool.dead_peer_error(&process, "rank of a window", rank.into())?),
                false => Ok(is_behind),
            }
        })
    }
}

fn order(expected: &'static str) -> PoolError {
    PoolError::Argument { what: "the order of calls on a window", value: "another".into(), expected }
}
