//! Threads that tell a program when an operation is over. What is told may wait for another operation, whose end another thread
//! tells: so what finds every thread busy gets a new one, and there are as many as wait in each other.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use nix::sys::signal::SigSet;
use polder_pool::PoolError;

/// What is called with how an operation ended.
pub type Then = Box<dyn FnOnce(Result<(), PoolError>) + Send>;

/// The threads of one group.
#[derive(Clone)]
pub(crate) struct Tellers(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// There is more to tell, a thread has told, or all is over.
    turn: Condvar,
    /// Signals that the program blocks. What is told runs its code, and the processes that this starts block what their maker does. The
    /// thread that starts a teller blocks all.
    signals: Option<SigSet>,
}

impl Default for Tellers {
    /// To be called on a thread of the program.
    fn default() -> Self {
        let (state, turn) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { state, turn, signals: SigSet::thread_get_mask().ok() }))
    }
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Then, Result<(), PoolError>)>,
    threads: Vec<ThreadId>,
    /// Threads that are telling.
    busy: usize,
    closed: bool,
}

impl Tellers {
    /// Calls `then` on one of the threads, soon.
    pub(crate) fn tell(&self, then: Then, outcome: Result<(), PoolError>) {
        let mut state = lock(&self.0.state);
        state.waiting.push_back((then, outcome));
        if state.threads.len() - state.busy < state.waiting.len() {
            let tellers = self.clone();
            let named = std::thread::Builder::new().name("polder-told".to_owned());
            state.threads.extend(named.spawn(move || tellers.work()).map(|started| started.thread().id()));
        }
        // Without a thread to leave it to, it is called here.
        let here = if state.threads.is_empty() { state.waiting.pop_front() } else { None };
        drop(state);
        self.0.turn.notify_all();
        if let Some((then, outcome)) = here {
            then(outcome);
        }
    }

    fn work(&self) {
        if let Some(signals) = self.0.signals {
            let _set = signals.thread_set_mask();
        }
        let mut state = lock(&self.0.state);
        loop {
            if let Some((then, outcome)) = state.waiting.pop_front() {
                state.busy += 1;
                drop(state);
                then(outcome);
                state = lock(&self.0.state);
                state.busy -= 1;
                self.0.turn.notify_all();
            } else if state.closed {
                state.threads.retain(|&thread| thread != std::thread::current().id());
                return;
            } else {
                state = self.0.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Lets what is to be told be told within `grace`; what goes on keeps its thread.
    pub(crate) fn end(&self, grace: Duration) {
        let mut state = lock(&self.0.state);
        state.closed = true;
        self.0.turn.notify_all();
        // What closes the group while it is told does not wait for itself.
        let own = usize::from(state.threads.contains(&std::thread::current().id()));
        let told = |state: &mut State| !state.waiting.is_empty() || state.busy > own;
        drop(self.0.turn.wait_timeout_while(state, grace, told));
    }
}

/// A lock that a panic elsewhere does not take away.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
