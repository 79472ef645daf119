//! Barrier without atomics: the cMPI paper's sequence array (section 3.4), one line for each rank.
//!
//! Each rank writes the number of its operation to its own line and waits until every other line says at least as
//! much. Nothing is counted together, so nothing needs an atomic operation between hosts.

use polder_mem::Memory;
use polder_schedule::Collective;

use crate::PoolError;
use crate::group::{Group, MAX_BYTES, Signature};

impl<M: Memory> Group<M> {
    /// Returns once every rank has entered. What a rank wrote back to the pool before is then in memory: its readers
    /// on other hosts invalidate and load it.
    ///
    /// # Errors
    /// The group's error when a rank died, is late, or called something else; the group is broken then.
    pub fn barrier(&mut self) -> Result<(), PoolError> {
        self.barrier_of(0)
    }

    /// A barrier of ranks that give the same `number`; the low 38 bits of it count.
    ///
    /// # Errors
    /// As [`Group::barrier`], and [`PoolError::Mismatch`] when a rank gives another number.
    pub(crate) fn barrier_of(&mut self, number: u64) -> Result<(), PoolError> {
        self.operation(Signature::new(Collective::Barrier, 0, number & MAX_BYTES), |group| {
            group.pass_window()?;
            group.publish_step(1);
            group.await_steps(1)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::group::tests::{on_threads, quick};

    #[test]
    fn nobody_leaves_before_all_have_entered() {
        let entered = std::sync::Mutex::new(0);
        on_threads(&[0, 0, 1], quick(), |group| {
            for round in 1..=200 {
                *entered.lock().unwrap() += 1;
                group.barrier().unwrap();
                assert!(*entered.lock().unwrap() >= 3 * round, "left round {round} early");
                group.barrier().unwrap();
            }
        });
    }

    #[test]
    fn a_rank_that_died_is_named_at_once() {
        let options = crate::group::GroupOptions { timeout: Duration::from_secs(60), ..quick() };
        let stay = std::sync::Barrier::new(2);
        on_threads(&[0, 1, 2], options, |group| {
            group.barrier().unwrap();
            if group.rank() == 1 {
                return;
            }
            let error = group.barrier().unwrap_err();
            assert!(
                matches!(error, PoolError::PeerDead { peer, sequence: 2, .. } if peer.host == 1),
                "{error}"
            );
            assert!(matches!(group.barrier(), Err(PoolError::Broken { what: "group", .. })));
            assert_eq!([0, 1, 2].map(|rank| group.has_died(rank).unwrap()), [false, true, false]);
            stay.wait();
        });
    }

    #[test]
    fn a_rank_that_gives_up_is_told_to_those_that_wait_for_it() {
        let options = crate::group::GroupOptions { timeout: Duration::from_secs(60), ..quick() };
        let stay = std::sync::Barrier::new(2);
        on_threads(&[0, 1], options, |group| {
            if group.rank() == 1 {
                group.give_up();
                assert!(matches!(group.barrier(), Err(PoolError::Broken { what: "group", .. })));
            } else {
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, PoolError::GaveUp { peer, .. } if peer.host == 1), "{error}");
            }
            assert!(!group.has_died(1 - group.rank()).unwrap());
            stay.wait();
        });
    }

    #[test]
    fn a_rank_that_stays_away_is_late_by_name() {
        let options = crate::group::GroupOptions { timeout: Duration::from_millis(100), ..quick() };
        let stay = std::sync::Barrier::new(3);
        on_threads(&[0, 1, 2], options, |group| {
            if group.rank() != 2 {
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, PoolError::Timeout { peer, .. } if peer.host == 2), "{error}");
                let remedy = "it lives but is late, or is stopped: raise timeout= or POLDER_TIMEOUT, or look at that process";
                assert!(error.to_string().ends_with(remedy), "{error}");
            }
            stay.wait();
            if group.rank() == 2 {
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, PoolError::GaveUp { .. }), "{error}");
            }
        });
    }
}
