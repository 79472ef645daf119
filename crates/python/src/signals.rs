//! Ctrl-C while a thread of Python's waits: it waits without the GIL, and looks for signals now and then.

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::time::{Duration, Instant};

use polder_attach::lane::Ticket;
use polder_pool::PoolError;
use polder_pool::group::Interrupt;
use pyo3::prelude::*;

use crate::errors;

/// How often a wait looks whether Ctrl-C was pressed.
pub(crate) const SIGNALS: Duration = Duration::from_millis(50);

/// What waits on this thread ask, while it is [`watched`]: whether a signal has come.
pub(crate) fn interrupt() -> Interrupt {
    Box::new(arrived)
}

/// As [`watched`]; the waits of this call also ask `given_up`.
pub(crate) fn watched_asking<T: Send>(
    py: Python<'_>,
    given_up: Option<Py<PyAny>>,
    wait: impl FnOnce() -> Result<T, PoolError> + Send,
) -> PyResult<T> {
    ask(given_up);
    let outcome = watched(py, wait);
    ask(None);
    outcome
}

/// Runs `wait`, which may take long, without the GIL and with an eye on signals.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce() -> Result<T, PoolError> + Send,
) -> PyResult<T> {
    let outcome = py.detach(|| watching(wait));
    match (outcome, taken()) {
        (Err(_), Some(signal)) => Err(signal),
        (outcome, _) => outcome.map_err(errors::raise),
    }
}

/// Waits until a call is done, or `timeout` has passed: then `false`. `wait` waits for the outcome, so long at most.
pub(crate) fn outcome(
    py: Python<'_>,
    ticket: &Ticket,
    timeout: Option<Duration>,
    wait: impl Fn(&Ticket, Duration) -> Option<Result<(), PoolError>> + Sync,
) -> PyResult<bool> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = deadline.map_or(SIGNALS, |end| end.saturating_duration_since(Instant::now()).min(SIGNALS));
        if let Some(outcome) = py.detach(|| wait(ticket, left)) {
            return outcome.map(|()| true).map_err(errors::raise);
        }
        py.check_signals()?;
        if deadline.is_some_and(|end| Instant::now() >= end) {
            return Ok(false);
        }
    }
}

/// What is dropped without the GIL, because what its threads do until they end may want it.
pub(crate) struct Detached<T: Send>(Option<T>);

impl<T: Send> Detached<T> {
    pub(crate) const fn new(held: T) -> Self {
        Self(Some(held))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("held until dropped")
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let held = self.0.take();
        Python::attach(|py| py.detach(|| drop(held)));
    }
}

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    /// When a watched call last looked; none before it begins to wait.
    static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
    static TAKEN: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    static GIVEN_UP: RefCell<Option<Py<PyAny>>> = const { RefCell::new(None) };
}

/// Lets this thread's waits ask Python whether to give up, besides looking for signals.
fn ask(given_up: Option<Py<PyAny>>) {
    GIVEN_UP.set(given_up);
}

fn is_given_up(py: Python<'_>) -> PyResult<bool> {
    let given_up = GIVEN_UP.with_borrow(|asked| asked.as_ref().map(|asked| asked.clone_ref(py)));
    given_up.map_or(Ok(false), |asked| asked.call0(py)?.is_truthy(py))
}

/// Runs `call`, a thread of Python's without the GIL, with an eye on signals.
fn watching<T>(call: impl FnOnce() -> T) -> T {
    WATCHED.set(true);
    let done = call();
    WATCHED.set(false);
    LOOKED.set(None);
    done
}

/// Whether a signal's handler has raised; looks now and then, and only on a watched thread.
fn arrived() -> bool {
    if !WATCHED.get() {
        return false;
    }
    let looked = LOOKED.get();
    if looked.is_some_and(|looked| looked.elapsed() < SIGNALS) {
        return false;
    }
    LOOKED.set(Some(Instant::now()));
    if looked.is_none() {
        return false;
    }
    match Python::attach(|py| py.check_signals().and_then(|()| is_given_up(py))) {
        Ok(given_up) => given_up,
        Err(raised) => {
            TAKEN.set(Some(raised));
            true
        }
    }
}

/// What the handler has raised.
fn taken() -> Option<PyErr> {
    TAKEN.take()
}
