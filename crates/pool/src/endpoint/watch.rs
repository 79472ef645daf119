//! Waiting for what comes to an endpoint, without holding it: other threads use it meanwhile.

use std::time::Duration;

use polder_mem::{Bell, Memory};

use crate::Pool;
use crate::wait::{self, Patience};

/// Where the threads of a process sleep until something comes to its endpoint.
#[derive(Clone, Debug)]
pub struct Watch<M> {
    memory: M,
    bell: Bell,
}

impl<M: Memory> Watch<M> {
    pub(super) fn new(pool: &Pool<M>) -> Self {
        let bell = pool.layout().bell(pool.member().host, pool.memory().slot());
        Self { memory: pool.memory().clone(), bell }
    }

    /// Looks until `look` returns something or `span` has passed; sleeps between two looks once it has looked as often as
    /// `patience` says.
    ///
    /// `look` calls [`super::Endpoint::step`]; before that it calls [`super::Endpoint::search_next`] when it gets true,
    /// because a sender that is new may ring only once.
    pub fn until<T>(
        &self,
        patience: Patience,
        span: Duration,
        mut look: impl FnMut(bool) -> Option<T>,
    ) -> Option<T> {
        let deadline = self.memory.now() + span;
        let look = |harder| Ok::<_, std::convert::Infallible>(look(harder));
        let Ok(found) =
            wait::until_with_sleep_hint(&self.memory, self.bell, patience, deadline, look, || Ok(()));
        found
    }

    /// Wakes the threads of this process that sleep here.
    pub fn wake(&self) {
        self.memory.wake(self.bell);
    }
}
