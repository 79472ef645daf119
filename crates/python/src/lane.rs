//! Runs one group's operations in the order of their submission. If the caller waits and no other operation is queued, an
//! operation runs on the caller's thread. Otherwise it runs on a thread of the group, so that Python goes on meanwhile. Callbacks
//! of Python run on threads of their own (see `tellers`), because a callback may wait for the next operation.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use polder_pool::{Operation, PoolError};
use pyo3::prelude::*;

use crate::buffer::Span;
use crate::errors;
use crate::object::Extent;
use crate::tellers::{Tellers, tell};

/// How often a wait looks whether Ctrl-C was pressed.
pub(crate) const SIGNALS: Duration = Duration::from_millis(50);

/// How long what is queued may take when a group is closed.
const GRACE: Duration = Duration::from_secs(2);

/// Where the arrays of a collective are.
pub(crate) enum Buffers {
    /// In one span, as input and output.
    InPlace(Span),
    /// In two, of which one is empty where this rank has no use for it.
    Apart {
        from: Span,
        into: Span,
    },
    /// In a span for each chunk.
    Lists {
        from: Vec<Span>,
        into: Vec<Span>,
    },
    Pool(Extent),
}

/// What a group runs.
pub(crate) enum Call {
    /// A collective, so many times in a row.
    Collective { operation: Operation, buffers: Buffers, times: u32 },
    /// Finds out whether all ranks say yes; the call is the first of a message of so many bytes.
    Agree { yes: bool, message: u64, verdict: Verdict },
    /// One piece of a message of so many bytes: where all ranks have said yes in the pool, otherwise private from it.
    Piece { message: u64, verdict: Verdict, operation: Operation, in_pool: Option<Extent>, private: Span },
}

/// What ranks have agreed on, once they have.
pub(crate) type Verdict = Arc<OnceLock<bool>>;

/// Host and process id of a rank, and whether the process lives.
pub(crate) type Member = (u16, u32, bool);

/// A group of whichever memory.
pub(crate) trait Collectives: Send {
    /// Runs one call to its end; its waits last at most `timeout`, or what the group was joined with. `beside` says that
    /// the program goes on meanwhile, and wants its core.
    ///
    /// # Safety
    /// The call's spans stay alive, those that it reads unwritten, and those that it writes untouched by others.
    unsafe fn run(&mut self, call: &Call, timeout: Option<Duration>, beside: bool) -> Result<(), PoolError>;

    /// Fails when the group is broken: then nothing that peers may still read is written any more.
    fn expect_whole(&self) -> Result<(), PoolError>;

    /// The operation that `rank` has called and this one has not.
    fn called_ahead(&self, rank: usize) -> Option<String>;

    /// Host and process id of each rank, and whether the process lives.
    fn members(&self) -> Result<Vec<Member>, PoolError>;

    /// Tells the others that this rank does not go on.
    fn give_up(&mut self);

    /// Leaves the group; fails when another rank called something else last.
    fn leave(self: Box<Self>) -> Result<(), PoolError>;
}

/// Asked by a group's waits before they sleep: whether to give up.
pub(crate) type Interrupt = Box<dyn Fn() -> bool + Send>;

/// Runs a group's calls one after the other.
pub(crate) struct Lane {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    runner: Mutex<Option<Box<dyn Collectives>>>,
    queue: Mutex<Queue>,
    /// There is more to do, or nothing any more.
    turn: Condvar,
    stop: Arc<Mutex<bool>>,
    tellers: Tellers,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: bool,
    closed: bool,
}

impl Queue {
    fn is_busy(&self) -> bool {
        self.running || !self.jobs.is_empty()
    }
}

struct Job {
    call: Call,
    timeout: Option<Duration>,
    ticket: Arc<Ticket>,
    tellers: Tellers,
    arrays: Arrays,
}

/// What keeps a call's arrays alive, and what returns once they hold what is sent: a GPU may still copy it there.
pub(crate) struct Arrays {
    pub(crate) ready: Option<Py<PyAny>>,
    pub(crate) _kept: Vec<Py<PyAny>>,
}

impl Arrays {
    fn wait(&self) -> Result<(), PoolError> {
        let Some(ready) = &self.ready else { return Ok(()) };
        let value = Python::attach(|py| ready.call0(py).map_err(|error| error.to_string()));
        let of = |value| PoolError::Argument {
            what: "a tensor on a GPU",
            value,
            expected: "one that can be copied",
        };
        value.map(drop).map_err(of)
    }
}

impl Drop for Job {
    /// Nobody waits for ever for a job that a panic or the group's end threw away.
    fn drop(&mut self) {
        if self.ticket.outcome().is_none() {
            self.ticket.finish(Err(closed()), &self.tellers);
        }
    }
}

impl Lane {
    /// A lane over the runner that `join` makes; it gets what its waits must ask. They ask `given_up` too, but only in `join`.
    pub(crate) fn new(
        py: Python<'_>,
        given_up: Option<Py<PyAny>>,
        join: impl FnOnce(Interrupt) -> Result<Box<dyn Collectives>, PoolError> + Send,
    ) -> PyResult<Self> {
        let stop = Arc::new(Mutex::new(false));
        let asked = Arc::clone(&stop);
        let interrupt: Interrupt = Box::new(move || *lock(&asked) || signals::arrived());
        let runner = watched_asking(py, given_up, || join(interrupt))?;
        let runner = Mutex::new(Some(runner));
        let (queue, turn, tellers) = (Mutex::default(), Condvar::new(), Tellers::default());
        let shared = Shared { runner, queue, turn, stop, tellers };
        Ok(Self { shared: Arc::new(shared), worker: Mutex::default() })
    }

    /// Runs `call` after everything that was submitted before, once `arrays` are ready, and returns when it is done.
    ///
    /// # Safety
    /// As [`Collectives::run`], from when `arrays` are ready until this returns.
    pub(crate) unsafe fn run(
        &self,
        py: Python<'_>,
        call: Call,
        timeout: Option<Duration>,
        arrays: Option<&Arrays>,
    ) -> PyResult<()> {
        while !self.shared.is_idle() {
            py.detach(|| self.shared.is_idle_within(SIGNALS));
            py.check_signals()?;
        }
        if let Some(ready) = arrays.and_then(|arrays| arrays.ready.as_ref()) {
            py.detach(|| self.shared.expect_whole()).map_err(errors::raise)?;
            // The others wait for this call.
            ready.call0(py).inspect_err(|_| self.give_up(py))?;
        }
        // SAFETY: the caller's promise.
        watched(py, move || unsafe { self.shared.run(&call, timeout, false) })
    }

    /// The operation that `rank` has called and this one has not; unknown while an operation runs here.
    pub(crate) fn called_ahead(&self, rank: usize) -> Option<String> {
        self.shared.runner.try_lock().ok()?.as_ref()?.called_ahead(rank)
    }

    /// The ranks, once what runs here has ended.
    pub(crate) fn members(&self, py: Python<'_>) -> PyResult<Vec<Member>> {
        py.detach(|| lock(&self.shared.runner).as_ref().map_or_else(|| Err(closed()), |it| it.members()))
            .map_err(errors::raise)
    }

    /// Tells the others that this rank does not go on, once what runs here has ended.
    pub(crate) fn give_up(&self, py: Python<'_>) {
        py.detach(|| self.shared.give_up());
    }

    /// Queues `call` for the group's thread.
    ///
    /// # Safety
    /// As [`Collectives::run`], until the ticket is done and from when `arrays` are ready, which keep the spans alive.
    pub(crate) unsafe fn submit(
        &self,
        call: Call,
        timeout: Option<Duration>,
        arrays: Arrays,
    ) -> PyResult<Arc<Ticket>> {
        let ticket = Arc::new(Ticket::default());
        let tellers = self.shared.tellers.clone();
        let job = Job { call, timeout, ticket: Arc::clone(&ticket), tellers, arrays };
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = Arc::clone(&self.shared);
            let named = std::thread::Builder::new().name("polder-group".to_owned());
            let started = named.spawn(move || shared.work());
            *worker = Some(started.map_err(|error| {
                errors::plain("PolderError", format!("cannot start the group's thread: {error}"))
            })?);
        }
        let mut queue = lock(&self.shared.queue);
        if queue.closed {
            return Err(errors::raise(closed()));
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.turn.notify_all();
        Ok(ticket)
    }

    /// Lets what is queued end within `grace`, stops the rest, and lets go of the group. Without the GIL: what ends may
    /// want it to say so.
    fn end(&self, grace: Duration) -> Result<(), PoolError> {
        lock(&self.shared.queue).closed = true;
        self.shared.turn.notify_all();
        if !self.shared.is_idle_within(grace) {
            *lock(&self.shared.stop) = true;
        }
        if let Some(worker) = lock(&self.worker).take() {
            // A panic of the worker has been told to whoever waited for its ticket.
            drop(worker.join());
        }
        let runner = lock(&self.shared.runner).take();
        let left = runner.map_or(Ok(()), |runner| runner.leave());
        self.shared.tellers.end(grace);
        left
    }

    /// Ends the lane, as dropping it does.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.end(GRACE)).map_err(errors::raise)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Nobody is there to be told.
        let _left = Python::attach(|py| self.close(py));
    }
}

/// What waits on this thread ask, while it is [`watched`]: whether a signal has come.
pub(crate) fn interrupt() -> Interrupt {
    Box::new(signals::arrived)
}

/// As [`watched`]; the waits of this call also ask `given_up`.
pub(crate) fn watched_asking<T: Send>(
    py: Python<'_>,
    given_up: Option<Py<PyAny>>,
    wait: impl FnOnce() -> Result<T, PoolError> + Send,
) -> PyResult<T> {
    signals::ask(given_up);
    let outcome = watched(py, wait);
    signals::ask(None);
    outcome
}

/// Runs `wait`, which may take long, without the GIL and with an eye on signals.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce() -> Result<T, PoolError> + Send,
) -> PyResult<T> {
    let outcome = py.detach(|| signals::watched(wait));
    match (outcome, signals::taken()) {
        (Err(_), Some(signal)) => Err(signal),
        (outcome, _) => outcome.map_err(errors::raise),
    }
}

impl Shared {
    fn is_idle(&self) -> bool {
        !lock(&self.queue).is_busy()
    }

    fn is_idle_within(&self, grace: Duration) -> bool {
        let waited = self.turn.wait_timeout_while(lock(&self.queue), grace, |queue| queue.is_busy());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// # Safety
    /// As [`Collectives::run`].
    unsafe fn run(&self, call: &Call, timeout: Option<Duration>, beside: bool) -> Result<(), PoolError> {
        match lock(&self.runner).as_mut() {
            // SAFETY: the same promise.
            Some(runner) => unsafe { runner.run(call, timeout, beside) },
            None => Err(closed()),
        }
    }

    fn expect_whole(&self) -> Result<(), PoolError> {
        lock(&self.runner).as_ref().map_or_else(|| Err(closed()), |runner| runner.expect_whole())
    }

    fn give_up(&self) {
        if let Some(runner) = lock(&self.runner).as_mut() {
            runner.give_up();
        }
    }

    fn work(&self) {
        let _end = WorkerEnd(self);
        while let Some(job) = self.next() {
            // SAFETY: whoever submitted it promised so until the ticket is done.
            let run = || unsafe { self.run(&job.call, job.timeout, true) };
            // The others wait for this call.
            let ready = || job.arrays.wait().inspect_err(|_| self.give_up());
            let outcome = self.expect_whole().and_then(|()| ready()).and_then(|()| run());
            // Before the lane is idle: a call that then runs on its caller's thread finds every earlier ticket done.
            job.ticket.finish(outcome, &job.tellers);
            lock(&self.queue).running = false;
            self.turn.notify_all();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                queue.running = true;
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = self.turn.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Throws away what a worker that panicked leaves.
struct WorkerEnd<'a>(&'a Shared);

impl Drop for WorkerEnd<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.queue);
        (queue.closed, queue.running) = (true, false);
        let left = std::mem::take(&mut queue.jobs);
        drop(queue);
        drop(left);
        self.0.turn.notify_all();
    }
}

/// Ctrl-C while a thread of Python's waits in a group.
mod signals {
    use std::cell::{Cell, RefCell};
    use std::time::Instant;

    use pyo3::prelude::*;

    use super::SIGNALS;

    thread_local! {
        static WATCHED: Cell<bool> = const { Cell::new(false) };
        /// When a watched call last looked; none before it begins to wait.
        static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
        static TAKEN: RefCell<Option<PyErr>> = const { RefCell::new(None) };
        static GIVEN_UP: RefCell<Option<Py<PyAny>>> = const { RefCell::new(None) };
    }

    /// Lets this thread's waits ask Python whether to give up, besides looking for signals.
    pub(super) fn ask(given_up: Option<Py<PyAny>>) {
        GIVEN_UP.set(given_up);
    }

    fn is_given_up(py: Python<'_>) -> PyResult<bool> {
        let given_up = GIVEN_UP.with_borrow(|asked| asked.as_ref().map(|asked| asked.clone_ref(py)));
        given_up.map_or(Ok(false), |asked| asked.call0(py)?.is_truthy(py))
    }

    /// Runs `call`, a thread of Python's without the GIL, with an eye on signals.
    pub(super) fn watched<T>(call: impl FnOnce() -> T) -> T {
        WATCHED.set(true);
        let done = call();
        WATCHED.set(false);
        LOOKED.set(None);
        done
    }

    /// Whether a signal's handler has raised; looks now and then, and only on a watched thread.
    pub(super) fn arrived() -> bool {
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
    pub(super) fn taken() -> Option<PyErr> {
        TAKEN.take()
    }
}

/// What becomes of one queued call.
#[derive(Default)]
pub(crate) struct Ticket {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    outcome: Option<Result<(), PoolError>>,
    then: Vec<Py<PyAny>>,
}

impl Ticket {
    /// Says how it ended; the first word counts.
    pub(crate) fn finish(&self, outcome: Result<(), PoolError>, tellers: &Tellers) {
        let mut state = lock(&self.state);
        if state.outcome.is_some() {
            return;
        }
        let then = std::mem::take(&mut state.then);
        state.outcome = Some(outcome.clone());
        drop(state);
        self.done.notify_all();
        for then in then {
            tellers.tell(then, outcome.clone());
        }
    }

    /// How it ended, once it has.
    pub(crate) fn outcome(&self) -> Option<Result<(), PoolError>> {
        lock(&self.state).outcome.clone()
    }

    /// Waits until the call is done, or `timeout` has passed: then `false`. `wait` waits for the outcome, so long at most.
    pub(crate) fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        wait: impl Fn(&Self, Duration) -> Option<Result<(), PoolError>> + Sync,
    ) -> PyResult<bool> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left =
                deadline.map_or(SIGNALS, |end| end.saturating_duration_since(Instant::now()).min(SIGNALS));
            if let Some(outcome) = py.detach(|| wait(self, left)) {
                return outcome.map(|()| true).map_err(errors::raise);
            }
            py.check_signals()?;
            if deadline.is_some_and(|end| Instant::now() >= end) {
                return Ok(false);
            }
        }
    }

    pub(crate) fn wait_briefly(&self, span: Duration) -> Option<Result<(), PoolError>> {
        let state = lock(&self.state);
        let waited = self.done.wait_timeout_while(state, span, |state| state.outcome.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.outcome.clone()
    }

    /// Calls `then` with `None` or the exception, once the call is done: now, or on a thread of the group's.
    pub(crate) fn when_done(&self, py: Python<'_>, then: Py<PyAny>) {
        let mut state = lock(&self.state);
        match state.outcome.clone() {
            None => state.then.push(then),
            Some(outcome) => {
                drop(state);
                tell(py, &then, outcome);
            }
        }
    }
}

fn closed() -> PoolError {
    PoolError::Argument { what: "the group", value: "closed".to_owned(), expected: "join it anew" }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
