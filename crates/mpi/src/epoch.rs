//! In which epochs a window is: which calls MPI allows on it now. All others give MPI_ERR_RMA_SYNC.
//!
//! MPI leaves some orders open, and the libraries differ there. Those that MPICH allows are allowed here too: a program that begins
//! another epoch after a fence has ended the fence's, if nothing was accessed since.

use std::collections::BTreeSet;

/// What this process may access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Access {
    #[default]
    Closed,
    /// Every rank, after a fence.
    Fence,
    /// The ranks of a start.
    Start(BTreeSet<u32>),
    /// The ranks whose locks this process has, of which there are some.
    Lock(BTreeSet<u32>),
    /// Every rank, by MPI_Win_lock_all.
    LockAll,
}

/// How others may access the part of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Exposure {
    #[default]
    Closed,
    Fence,
    Post,
}

/// The epochs of this process on a window.
#[derive(Clone, Debug, Default)]
pub(crate) struct Epochs {
    access: Access,
    exposure: Exposure,
    /// Whether something was accessed since the last fence: then only another fence ends its epoch.
    is_fence_used: bool,
}

/// The error says what is wrong, and what to do.
type Allowed = Result<(), String>;

fn refuse(why: &str) -> Allowed {
    Err(why.to_owned())
}

impl Epochs {
    /// Accesses the part of a rank.
    #[inline(always)]
    pub(crate) fn access(&mut self, target: u32) -> Allowed {
        match &self.access {
            Access::LockAll => Ok(()),
            Access::Lock(ranks) | Access::Start(ranks) if ranks.contains(&target) => Ok(()),
            Access::Fence => {
                self.is_fence_used |= self.exposure == Exposure::Fence;
                Ok(())
            }
            _ => Err(no_epoch(target)),
        }
    }

    /// Flushes: at the part of a rank, or everywhere.
    #[inline(always)]
    pub(crate) fn flush(&self, target: Option<u32>) -> Allowed {
        match (&self.access, target) {
            (Access::LockAll, _) | (Access::Lock(_), None) => Ok(()),
            (Access::Lock(ranks), Some(target)) if ranks.contains(&target) => Ok(()),
            _ => refuse("no lock is held here; call MPI_Win_lock or MPI_Win_lock_all first"),
        }
    }

    /// Ends a fence's epoch, and begins another unless this is said to be the last.
    pub(crate) fn fence(&mut self, is_last: bool) -> Allowed {
        let is_fenced = matches!(self.access, Access::Closed | Access::Fence);
        if !is_fenced || self.exposure == Exposure::Post {
            return refuse("an epoch of another kind is open; end it before MPI_Win_fence");
        }
        *self = Self::default();
        if !is_last {
            (self.access, self.exposure) = (Access::Fence, Exposure::Fence);
        }
        Ok(())
    }

    pub(crate) fn post(&mut self) -> Allowed {
        if self.exposure == Exposure::Post || self.is_fence_used {
            return refuse("the window is exposed already; end that epoch first");
        }
        self.exposure = Exposure::Post;
        Ok(())
    }

    /// What is waited for has to be posted.
    pub(crate) fn is_posted(&self) -> Allowed {
        match self.exposure {
            Exposure::Post => Ok(()),
            _ => refuse("nothing is posted; call MPI_Win_post first"),
        }
    }

    /// What was posted is over.
    pub(crate) fn withdraw(&mut self) {
        self.exposure = Exposure::Closed;
    }

    pub(crate) fn start(&mut self, targets: &[u32]) -> Allowed {
        self.begin(Access::Start(targets.iter().copied().collect()))
    }

    pub(crate) fn complete(&mut self) -> Allowed {
        match self.access {
            Access::Start(_) => self.access = Access::Closed,
            _ => return refuse("no accesses have begun; call MPI_Win_start first"),
        }
        Ok(())
    }

    pub(crate) fn lock(&mut self, target: u32) -> Allowed {
        let Access::Lock(ranks) = &mut self.access else {
            return self.begin(Access::Lock(BTreeSet::from([target])));
        };
        match ranks.insert(target) {
            true => Ok(()),
            false => Err(format!("this process holds the lock of rank {target} already; unlock it first")),
        }
    }

    /// What is unlocked has to be locked.
    pub(crate) fn is_locked(&self, target: u32) -> Allowed {
        match &self.access {
            Access::Lock(ranks) if ranks.contains(&target) => Ok(()),
            _ => Err(format!("this process does not hold the lock of rank {target}; lock it first")),
        }
    }

    pub(crate) fn unlock(&mut self, target: u32) {
        if let Access::Lock(ranks) = &mut self.access {
            ranks.remove(&target);
            if ranks.is_empty() {
                self.access = Access::Closed;
            }
        }
    }

    pub(crate) fn lock_all(&mut self) -> Allowed {
        self.begin(Access::LockAll)
    }

    pub(crate) fn is_all_locked(&self) -> Allowed {
        match self.access {
            Access::LockAll => Ok(()),
            _ => refuse("not all ranks are locked; call MPI_Win_lock_all first"),
        }
    }

    /// Accesses that could not begin have not, or all are over.
    pub(crate) fn close(&mut self) {
        self.access = Access::Closed;
    }

    /// A window is freed outside of epochs.
    pub(crate) fn is_over(&self) -> Allowed {
        let is_open = !self.may_begin() || self.exposure == Exposure::Post;
        if is_open { refuse("an epoch is open; end it before the window is freed") } else { Ok(()) }
    }

    fn begin(&mut self, access: Access) -> Allowed {
        if !self.may_begin() {
            return refuse("accesses have begun already; end that epoch first");
        }
        self.access = access;
        Ok(())
    }

    fn may_begin(&self) -> bool {
        match self.access {
            Access::Closed => true,
            Access::Fence => !self.is_fence_used,
            _ => false,
        }
    }
}

#[cold]
fn no_epoch(target: u32) -> String {
    format!(
        "no epoch is open for accesses to rank {target}; call MPI_Win_lock, MPI_Win_fence or MPI_Win_start first"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_needs_an_epoch_that_has_its_target() {
        let mut epochs = Epochs::default();
        assert!(epochs.access(0).is_err() && epochs.flush(None).is_err());
        epochs.lock(1).unwrap();
        assert!(epochs.access(0).is_err() && epochs.flush(Some(0)).is_err());
        assert_eq!((epochs.access(1), epochs.flush(Some(1)), epochs.flush(None)), (Ok(()), Ok(()), Ok(())));
        epochs.unlock(1);
        epochs.start(&[2]).unwrap();
        assert!(epochs.access(1).is_err() && epochs.flush(None).is_err());
        epochs.access(2).unwrap();
        epochs.complete().unwrap();
        epochs.fence(false).unwrap();
        epochs.access(0).unwrap();
        epochs.fence(true).unwrap();
        assert!(epochs.access(0).is_err());
    }

    #[test]
    fn epochs_of_two_kinds_exclude_each_other() {
        let mut epochs = Epochs::default();
        epochs.lock(0).unwrap();
        epochs.lock(1).unwrap();
        assert!(epochs.lock(1).is_err() && epochs.lock_all().is_err() && epochs.start(&[2]).is_err());
        assert!(epochs.fence(false).is_err() && epochs.is_all_locked().is_err() && epochs.is_over().is_err());
        epochs.unlock(0);
        assert!(epochs.lock_all().is_err());
        epochs.unlock(1);
        epochs.lock_all().unwrap();
        assert!(epochs.lock(0).is_err() && epochs.is_locked(0).is_err());
        epochs.close();
        epochs.post().unwrap();
        assert!(epochs.post().is_err() && epochs.fence(false).is_err() && epochs.is_over().is_err());
        // Own accesses go on beside that.
        epochs.lock(0).unwrap();
        epochs.withdraw();
        assert!(epochs.is_posted().is_err());
    }

    #[test]
    fn a_fence_that_nothing_has_used_is_over_when_another_epoch_begins() {
        let mut epochs = Epochs::default();
        epochs.fence(false).unwrap();
        assert_eq!(
            (epochs.clone().lock(0), epochs.clone().post(), epochs.is_over()),
            (Ok(()), Ok(()), Ok(()))
        );
        epochs.access(0).unwrap();
        assert!(
            epochs.clone().lock(0).is_err() && epochs.clone().post().is_err() && epochs.is_over().is_err()
        );
        epochs.fence(false).unwrap();
        epochs.is_over().unwrap();
    }
}
