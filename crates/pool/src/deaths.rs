//! A death that a process has met, for its other groups: a rank of those may wait for it and not for the one that died.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::deviation::Deviation;
use crate::{Peer, PoolError};

/// The first process that this one has found dead since it last joined a group. All groups of the process share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deaths(Arc<Mutex<Option<Peer>>>);

impl Deaths {
    /// Remembers the process that `error` says has died, unless another died before.
    pub(crate) fn note(&self, error: &PoolError) {
        if let PoolError::PeerDead { peer, .. } = error {
            self.lock().get_or_insert(Peer::new(peer.host, peer.pid));
        }
    }

    /// The process has gone on without the dead: what ends its groups from now on has another cause.
    pub(crate) fn forget(&self) {
        *self.lock() = None;
    }

    pub(crate) fn first(&self) -> Option<Peer> {
        self.lock().filter(|_| !Deviation::KeepsDeathsToItself.is_on())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Peer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
