//! The staging of a group that grows with the first message that gains by it.
//!
//! Ranks meet with a little staging, which short messages fit into. Before the first operation that gains by more, each rank makes
//! a second extent, `NAME/staging/RANK`, with all the staging that the options name. Whether an operation gains follows from the
//! operation alone, so that all ranks take part. They tell each other in words 5 and 6 of their progress lines:
//!
//! - word 5: 1 once the rank has made its extent, 3 once it has opened those of all others, 0 if it cannot make one;
//! - word 6: what tells its extent from all others that its host ever made.
//!
//! Word 5 only gains bits, so that a rank which looks late reads what it needs. If all say 3, all go over to the new extents. Else
//! all keep the little staging, through which a long message goes in more rounds. No rank leaves the operation before all
//! have read the words.

use polder_mem::{LINE, Memory};

use super::{Group, GroupOptions, Signature};
use crate::PoolError;

/// The bit of word 5 that says that a rank has its extent, and both bits, once it has opened those of all others.
const MADE: u64 = 1;
const MET: u64 = 3;

/// Ranks meet with this part of all the staging.
const FIRST_PART: u64 = 64;

/// The staging with which so many ranks meet. Either half has room for two rounds of blocks of a line, and no rank has more than two
/// blocks for each rank, so that every operation can go on with it.
pub(super) fn first_bytes(options: &GroupOptions, ranks: usize) -> u64 {
    let least = (options.staging_bytes / FIRST_PART).max(8 * LINE * ranks as u64);
    least.next_multiple_of(2 * LINE).min(options.staging_bytes)
}

impl<M: Memory> Group<M> {
    /// Whether the staging is what the options name, or stays what it is.
    pub(crate) fn has_all_staging(&self) -> bool {
        self.seats.as_ref().is_none_or(|seats| seats.has_grown)
    }

    /// Why this rank could not have all of it.
    pub(crate) fn refusal(&self) -> Option<PoolError> {
        self.seats.as_ref()?.refused.clone()
    }

    /// Goes over to all the staging that the options name, as the first part of the operation with this signature, if every rank
    /// finds room for it.
    ///
    /// # Errors
    /// The group's error.
    pub(crate) fn grow_staging(&mut self, signature: Signature) -> Result<(), PoolError> {
        self.expect_whole()?;
        let Some(mut seats) = self.seats.take() else { return Ok(()) };
        let grown = self.operation(signature, |group| {
            group.pass_window()?;
            let own = match seats.make_staging(&group.options) {
                Ok(mark) => [MADE, mark],
                Err(error) => seats.refuse(error),
            };
            group.set_own_words(own);
            group.publish_step(0);
            group.await_steps(0)?;
            let words = |rank| if rank == group.rank { own } else { group.peer_words(rank) };
            let (made, marks): (Vec<_>, Vec<_>) =
                (0..group.size()).map(|rank| words(rank).into()).unzip::<u64, u64, _, _>();
            let mut places = None;
            if made.iter().all(|made| made & MADE != 0) {
                places = seats.find_staging(&marks, &group.options).map_err(|error| seats.refuse(error)).ok();
            }
            group.set_own_words(if places.is_some() { [MET, own[1]] } else { own });
            group.publish_step(1);
            group.await_steps(1)?;
            let mut peers = (0..group.size()).filter(|&rank| rank != group.rank);
            let all_met = peers.all(|rank| group.peer_words(rank)[0] & MET == MET);
            // A peer may have to read our words until here.
            group.publish_step(2);
            group.await_steps(2)?;
            Ok(places.filter(|_| all_met))
        });
        match &grown {
            Ok(Some(places)) => {
                self.staging.clone_from(places);
                self.staging_bytes = self.options.staging_bytes;
            }
            _ => seats.give_staging_back(),
        }
        seats.has_grown = true;
        self.seats = Some(seats);
        grown.map(drop)
    }
}
