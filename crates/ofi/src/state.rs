//! Everything that belongs to a domain, one thread at a time: endpoints, address vectors, queues and counters.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use polder_attach::session::Session;
use polder_mem::{Serial, SerialGuard};

use crate::beside::{Look, ProgressThread};
use crate::ffi::{Errno, THREAD_DOMAIN};
use crate::idle::{Idle, STAY};
use crate::ledger::{Ledger, Table};
use crate::port::Port;

/// A domain, as its objects hold it.
pub(crate) struct Domain {
    pub(crate) session: Arc<Session>,
    pub(crate) manner: Manner,
    state: Serial<State>,
    /// What makes progress beside the program, once memory is registered that peers may reach.
    beside: Mutex<Option<ProgressThread>>,
}

/// How the program that opened a domain was built, and what it asked for.
#[derive(Clone, Copy)]
pub(crate) struct Manner {
    /// The interface that it was built for.
    pub(crate) version: u32,
    /// Whether keys of registered memory are the provider's, and peers give addresses as the program sees them.
    pub(crate) basic: bool,
    /// Which of its threads may be in the domain at once.
    pub(crate) threading: c_int,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) ports: Table<Port>,
    pub(crate) ledger: Ledger,
    idle: Idle,
    /// How often the program has looked.
    polls: u64,
}

impl Domain {
    pub(crate) fn new(session: Arc<Session>, manner: Manner) -> Self {
        let state = State { idle: Idle::measured(), ..State::default() };
        let state = match manner.threading {
            // SAFETY: what FI_THREAD_DOMAIN says of the domain and all that is opened on it.
            THREAD_DOMAIN => unsafe { Serial::promised(state) },
            _ => Serial::locked(state),
        };
        Self { session, manner, state, beside: Mutex::new(None) }
    }

    /// Lets a thread do what peers ask for while the program computes: they may reach memory of this process from here on. The
    /// program's threads take turns with it by a lock then.
    pub(crate) fn serve_beside(self: &Arc<Self>) {
        let mut beside = self.beside.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = &*beside {
            return thread.wake();
        }
        self.state.lock_turns();
        let domain = Arc::downgrade(self);
        match ProgressThread::start(move |polls| Some(domain.upgrade()?.look_beside(polls))) {
            Ok(thread) => *beside = Some(thread),
            Err(error) => tracing::warn!(
                "peers wait until this program makes a call, because no progress thread could start: {error}"
            ),
        }
    }

    /// Ends that thread.
    pub(crate) fn end_beside(&self) {
        let thread = self.beside.lock().unwrap_or_else(PoisonError::into_inner).take();
        thread.into_iter().for_each(ProgressThread::end);
    }

    /// One look of that thread; `polls` is how often the program had looked at the look before.
    pub(crate) fn look_beside(&self, polls: &mut u64) -> Look {
        let Some(mut state) = self.state.try_turn() else { return Look::Busy };
        if !state.ledger.regions.any_for_peers() {
            return Look::Closed;
        }
        if std::mem::replace(polls, state.polls) != state.polls {
            return Look::Busy;
        }
        // The program meets an error at its own next look.
        if state.step().unwrap_or(false) { Look::Done } else { Look::Vain }
    }

    /// A call that panicked said so; what it left is as good as a call that failed.
    #[inline]
    pub(crate) fn state(&self) -> SerialGuard<'_, State> {
        self.state.take_turn()
    }

    /// Makes progress and looks once, as a program does again and again; `look` also says whether it found something.
    #[inline(always)]
    pub(crate) fn poll<T>(
        &self,
        mut look: impl FnMut(&mut State) -> Result<(T, bool), Errno>,
    ) -> Result<T, Errno> {
        let mut state = self.state();
        let yields = state.idle.yields();
        if yields || state.idle.is_crowded() {
            state.ports.iter_mut().for_each(|port| port.link.read_news_next());
        }
        let mut once = |state: &mut State| {
            state.progress()?;
            look(state)
        };
        let (mut looked, mut looks) = (once(&mut state), 1_u32);
        // Not where another thread of the program may wait for its turn.
        let is_alone = self.manner.threading == THREAD_DOMAIN;
        if matches!(looked, Ok((_, false))) && is_alone && state.idle.stays() {
            let start = Instant::now();
            // To look at the clock takes as long as to look for messages.
            while matches!(looked, Ok((_, false))) && (!looks.is_multiple_of(4) || start.elapsed() < STAY) {
                looked = once(&mut state);
                looks += 1;
            }
        }
        let is_over = state.idle.is_over(!matches!(looked, Ok((_, false))), looks);
        drop(state);
        if is_over {
            let took = (!yields).then(Idle::give_up);
            self.state().idle.gave_up(took);
        }
        looked.map(|(told, _)| told)
    }

    /// Makes progress and looks, again and again, until there is something or `timeout_ms` are over; negative: for ever.
    pub(crate) fn wait<T>(
        &self,
        timeout_ms: i32,
        mut look: impl FnMut(&mut State) -> Result<Option<T>, Errno>,
    ) -> Result<Option<T>, Errno> {
        let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let start = Instant::now();
        loop {
            let mut state = self.state();
            state.progress()?;
            if let Some(value) = look(&mut state)? {
                return Ok(Some(value));
            }
            drop(state);
            let waited = start.elapsed();
            if limit.is_some_and(|limit| waited >= limit) {
                return Ok(None);
            }
            match waited < SPIN {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// How long a wait keeps its processor, and how long it sleeps between looks after that.
const SPIN: Duration = Duration::from_micros(50);
const PAUSE: Duration = Duration::from_micros(50);

impl State {
    /// Moves messages, and writes down what has completed.
    pub(crate) fn progress(&mut self) -> Result<(), Errno> {
        self.polls += 1;
        if self.step()? {
            self.idle.hurry();
        }
        Ok(())
    }

    /// The same; whether any of that was a step of a one-sided operation.
    fn step(&mut self) -> Result<bool, Errno> {
        let mut one_sided = false;
        for port in self.ports.iter_mut() {
            one_sided |= port.progress(&mut self.ledger)?;
        }
        Ok(one_sided)
    }

    pub(crate) fn port(&mut self, at: usize) -> Result<(&mut Port, &mut Ledger), Errno> {
        Ok((self.ports.get_mut(at).ok_or(Errno::INVAL)?, &mut self.ledger))
    }

    /// Whether a peer's operation uses registered memory.
    pub(crate) fn holds(&mut self, key: u64) -> bool {
        self.ports.iter_mut().any(|port| port.holds(key))
    }

    /// The port at a place that carries messages.
    pub(crate) fn enabled_port(&mut self, at: usize) -> Result<(&mut Port, &mut Ledger), Errno> {
        let (port, ledger) = self.port(at)?;
        if port.enabled { Ok((port, ledger)) } else { Err(Errno::OPBADSTATE) }
    }

    /// Whether any object of the domain is open.
    pub(crate) fn in_use(&self) -> bool {
        let Ledger { queues, counters, vectors, regions } = &self.ledger;
        let open = [self.ports.len(), queues.len(), counters.len(), vectors.len(), regions.len()];
        open.iter().any(|&open| open > 0)
    }
}
