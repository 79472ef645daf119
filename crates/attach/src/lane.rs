//! Runs one group's calls in the order of their submission. A call that its caller waits for runs on the caller's thread, once no other
//! is queued. A call that is submitted runs on a thread of the group, so that the program goes on meanwhile. What is to be told of a call's
//! end is told on threads of its own (see [`crate::tellers`]), because it may wait for the next call.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use polder_mem::{AnyMemory, threads};
use polder_pool::PoolError;
use polder_pool::group::{Group, GroupOptions, Interrupt, JoinedGroup};
use polder_pool::wait::Patience;

use crate::session::Session;
use crate::tellers::{Tellers, Then, lock};

/// How long what is queued may take when a group is closed.
const GRACE: Duration = Duration::from_secs(2);

/// What a group runs, with the buffers that it lends.
pub trait LaneCall: Send {
    /// Waits until its buffers hold what is sent.
    ///
    /// # Errors
    /// When they never will.
    fn ready(&self) -> Result<(), PoolError>;

    /// Runs to its end.
    ///
    /// # Errors
    /// Those of the group.
    fn run(&self, group: &mut Group<AnyMemory>) -> Result<(), PoolError>;
}

/// Host and process id of a rank, and whether the process lives.
pub type Member = (u16, u32, bool);

/// Runs a group's calls one after the other.
pub struct Lane {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    runner: Mutex<Option<Runner>>,
    queue: Mutex<Queue>,
    /// There is more to do, or nothing any more.
    turn: Condvar,
    stop: Arc<Mutex<bool>>,
    tellers: Tellers,
}

/// A group, and the session whose heartbeat says that this process lives; the group leaves first.
struct Runner {
    group: JoinedGroup<AnyMemory>,
    _session: Arc<Session>,
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
    call: Box<dyn LaneCall>,
    timeout: Option<Duration>,
    ticket: Arc<Ticket>,
    tellers: Tellers,
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
    /// Joins a group, whose waits last `timeout` at most, or what the pool says. They give up when `interrupt` says so.
    ///
    /// # Errors
    /// Those of [`Group::join`].
    pub fn join(
        session: &Arc<Session>,
        name: &str,
        (rank, size): (usize, usize),
        timeout: Option<Duration>,
        interrupt: Interrupt,
    ) -> Result<Self, PoolError> {
        let pool = session.pool();
        let timeout = timeout.unwrap_or(pool.member().timeout);
        let options =
            GroupOptions { timeout, patience: Patience::for_ranks(size), ..GroupOptions::default() };
        let stop = Arc::new(Mutex::new(false));
        let asked = Arc::clone(&stop);
        let interrupt: Interrupt = Box::new(move || *lock(&asked) || interrupt());
        let group = Group::join(Arc::clone(pool), name, rank, size, options, Some(interrupt))?;
        let runner = Mutex::new(Some(Runner { group, _session: Arc::clone(session) }));
        let (queue, turn, tellers) = (Mutex::default(), Condvar::new(), Tellers::default());
        let shared = Shared { runner, queue, turn, stop, tellers };
        Ok(Self { shared: Arc::new(shared), worker: Mutex::default() })
    }

    /// Whether nothing is queued or runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !lock(&self.shared.queue).is_busy()
    }

    /// The same, once that is so or `grace` has passed.
    #[must_use]
    pub fn is_idle_within(&self, grace: Duration) -> bool {
        self.shared.is_idle_within(grace)
    }

    /// Runs a call that is ready on this thread. Its waits last `timeout` at most, or what the group was joined with.
    ///
    /// # Errors
    /// Those of the call, or that the group is closed.
    pub fn run(&self, call: &dyn LaneCall, timeout: Option<Duration>) -> Result<(), PoolError> {
        self.shared.run(call, timeout, false)
    }

    /// Starts the group's thread, which [`Lane::submit`] needs, if it does not run.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(&self) -> io::Result<()> {
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = Arc::clone(&self.shared);
            *worker =
                Some(threads::start(Builder::new().name("polder-group".to_owned()), move || shared.work())?);
        }
        Ok(())
    }

    /// Queues a call for the group's thread.
    ///
    /// # Errors
    /// When the group is closed.
    pub fn submit(
        &self,
        call: Box<dyn LaneCall>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Ticket>, PoolError> {
        let ticket = Arc::new(Ticket::default());
        let tellers = self.shared.tellers.clone();
        let job = Job { call, timeout, ticket: Arc::clone(&ticket), tellers };
        let mut queue = lock(&self.shared.queue);
        if queue.closed {
            return Err(closed());
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.turn.notify_all();
        Ok(ticket)
    }

    /// Fails when the group is broken: then nothing that peers may still read is written any more.
    ///
    /// # Errors
    /// Why it is.
    pub fn expect_whole(&self) -> Result<(), PoolError> {
        self.shared.with_group(|group| group.expect_whole())
    }

    /// The operation that `rank` has called and this one has not; unknown while a call runs here.
    #[must_use]
    pub fn called_ahead(&self, rank: usize) -> Option<String> {
        self.shared.runner.try_lock().ok()?.as_ref()?.group.called_ahead(rank)
    }

    /// The ranks, once what runs here has ended.
    ///
    /// # Errors
    /// When the group is closed.
    pub fn members(&self) -> Result<Vec<Member>, PoolError> {
        self.shared.with_group(|group| {
            let ranks = group.members().iter().enumerate();
            ranks.map(|(rank, at)| Ok((at.host, at.pid, !group.has_died(rank)?))).collect()
        })
    }

    /// Tells the others that this rank does not go on, once what runs here has ended.
    pub fn give_up(&self) {
        self.shared.give_up();
    }

    /// Lets what is queued end for a while, stops the rest, and leaves the group, as dropping it does.
    ///
    /// # Errors
    /// When another rank called something else last.
    pub fn close(&self) -> Result<(), PoolError> {
        lock(&self.shared.queue).closed = true;
        self.shared.turn.notify_all();
        if !self.shared.is_idle_within(GRACE) {
            *lock(&self.shared.stop) = true;
        }
        if let Some(worker) = lock(&self.worker).take() {
            // A panic of the worker has been told to the thread that waited for its ticket.
            drop(worker.join());
        }
        let runner = lock(&self.shared.runner).take();
        let left = runner.map_or(Ok(()), |runner| runner.group.leave());
        self.shared.tellers.end(GRACE);
        left
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Nobody is there to be told.
        let _left = self.close();
    }
}

impl Shared {
    fn is_idle_within(&self, grace: Duration) -> bool {
        let waited = self.turn.wait_timeout_while(lock(&self.queue), grace, |queue| queue.is_busy());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn with_group<T>(
        &self,
        act: impl FnOnce(&mut Group<AnyMemory>) -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        lock(&self.runner).as_mut().map_or_else(|| Err(closed()), |runner| act(&mut runner.group))
    }

    /// Runs one call to its end. `beside` says that the program goes on meanwhile, and wants its core.
    fn run(&self, call: &dyn LaneCall, timeout: Option<Duration>, beside: bool) -> Result<(), PoolError> {
        self.with_group(|group| {
            let GroupOptions { timeout: usual, patience, .. } = *group.options();
            group.set_timeout(timeout.unwrap_or(usual));
            group.set_patience(if beside { Patience::SHARED } else { patience });
            let outcome = call.run(group);
            group.set_timeout(usual);
            group.set_patience(patience);
            outcome
        })
    }

    fn give_up(&self) {
        // A group that is closed has been given up.
        let _given_up = self.with_group(|group| {
            group.give_up();
            Ok(())
        });
    }

    fn work(&self) {
        let _end = WorkerEnd(self);
        while let Some(job) = self.next() {
            // The others wait for this call.
            let ready = || job.call.ready().inspect_err(|_| self.give_up());
            let whole = self.with_group(|group| group.expect_whole());
            let outcome = whole.and_then(|()| ready()).and_then(|()| self.run(&*job.call, job.timeout, true));
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

/// What becomes of one call that was queued.
#[derive(Default)]
pub struct Ticket {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    outcome: Option<Result<(), PoolError>>,
    then: Vec<Then>,
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
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), PoolError>> {
        lock(&self.state).outcome.clone()
    }

    /// The same, once that is so or `span` has passed.
    #[must_use]
    pub fn outcome_within(&self, span: Duration) -> Option<Result<(), PoolError>> {
        let state = lock(&self.state);
        let waited = self.done.wait_timeout_while(state, span, |state| state.outcome.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.outcome.clone()
    }

    /// Tells `then` how it ended, once it has: now, or on a thread of the group's.
    pub fn when_done(&self, then: Then) {
        let mut state = lock(&self.state);
        match state.outcome.clone() {
            None => state.then.push(then),
            Some(outcome) => {
                drop(state);
                then(outcome);
            }
        }
    }
}

fn closed() -> PoolError {
    PoolError::Argument { what: "the group", value: "closed".to_owned(), expected: "join it again" }
}
