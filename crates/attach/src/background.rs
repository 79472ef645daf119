//! Threads that do what a program submits while the program goes on, and an event descriptor that says when something has ended.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use polder_mem::threads;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use crate::tellers::lock;

/// What a thread runs.
pub type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// A job by its number, and what came of it; nothing if it panicked.
pub type Ended<T> = (u64, Option<T>);

/// Threads, one a lane. What is submitted to a lane runs in this order, and no lane waits for another. Dropping it lets all that was
/// submitted end.
pub struct Background<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// There is more to do, something has ended, or nothing more will come.
    turn: Condvar,
    event: OwnedFd,
}

struct State<T> {
    lanes: Vec<VecDeque<(u64, Work<T>)>>,
    /// The number of the next job.
    next: u64,
    /// Jobs that wait or run.
    open: usize,
    ended: Vec<Ended<T>>,
    closed: bool,
}

impl<T: Send + 'static> Background<T> {
    /// Starts a thread for each lane.
    ///
    /// # Errors
    /// When the system has no descriptor or no thread to give.
    pub fn start(name: &str, lanes: usize) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let queues = std::iter::repeat_with(VecDeque::new).take(lanes).collect();
        let state = State { lanes: queues, next: 0, open: 0, ended: vec![], closed: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), turn: Condvar::new(), event });
        let mut started = Self { shared, threads: vec![] };
        for lane in 0..lanes {
            let shared = Arc::clone(&started.shared);
            started.threads.push(threads::start(Builder::new().name(format!("{name}-{lane}")), move || {
                shared.work(lane)
            })?);
        }
        Ok(started)
    }

    /// Has a lane do something: the job's number.
    pub fn submit(&self, lane: usize, work: Work<T>) -> u64 {
        let mut state = lock(&self.shared.state);
        let job = state.next;
        state.next += 1;
        state.open += 1;
        state.lanes[lane].push_back((job, work));
        drop(state);
        self.shared.turn.notify_all();
        job
    }

    /// Can be read when a job has ended that [`Background::drain`] has not told of.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// The jobs that have ended, each once.
    #[must_use]
    pub fn drain(&self) -> Vec<Ended<T>> {
        let mut state = lock(&self.shared.state);
        // It has counted nothing if nothing has ended.
        let _nothing = read(&self.shared.event, &mut [0; 8]);
        std::mem::take(&mut state.ended)
    }

    /// Waits until all that was submitted has ended.
    pub fn wait(&self) {
        let open = self.shared.turn.wait_while(lock(&self.shared.state), |state| state.open > 0);
        drop(open.unwrap_or_else(PoisonError::into_inner));
    }
}

impl<T> Shared<T> {
    fn work(&self, lane: usize) {
        while let Some((job, work)) = self.next(lane) {
            let came = catch_unwind(AssertUnwindSafe(work)).ok();
            let mut state = lock(&self.state);
            state.ended.push((job, came));
            state.open -= 1;
            // Under the lock, so that whoever drains finds what the descriptor says. It is full after 2^64 jobs.
            let _told = write(&self.event, &1_u64.to_le_bytes());
            drop(state);
            self.turn.notify_all();
        }
    }

    fn next(&self, lane: usize) -> Option<(u64, Work<T>)> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.lanes[lane].pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.turn.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of a job was caught.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_told(background: &Background<u32>) -> bool {
        let event = background.event();
        poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
            == 1
    }

    #[test]
    fn a_lane_keeps_its_order_and_waits_for_no_other() {
        let background = Background::<u32>::start("test", 2).unwrap();
        let (go, gone) = channel::<()>();
        let held = background.submit(0, Box::new(move || gone.recv().map_or(0, |()| 1)));
        let behind = background.submit(0, Box::new(|| 2));
        let beside = background.submit(1, Box::new(|| 3));
        let ended = loop {
            let ended = background.drain();
            if !ended.is_empty() {
                break ended;
            }
        };
        assert_eq!(ended, [(beside, Some(3))]);
        assert!(!is_told(&background));
        go.send(()).unwrap();
        background.wait();
        assert!(is_told(&background));
        assert_eq!(background.drain(), [(held, Some(1)), (behind, Some(2))]);
        assert!(!is_told(&background) && background.drain().is_empty());
    }

    #[test]
    fn a_job_that_panics_ends_and_the_next_one_runs() {
        let background = Background::start("test", 1).unwrap();
        let failed = background.submit(0, Box::new(|| panic!("in a test")));
        let next = background.submit(0, Box::new(|| 7));
        background.wait();
        assert_eq!(background.drain(), [(failed, None), (next, Some(7))]);
    }

    #[test]
    fn what_was_submitted_ends_before_it_is_dropped() {
        let (tell, told) = channel();
        let background = Background::start("test", 1).unwrap();
        for number in 0..100 {
            let tell = tell.clone();
            background.submit(0, Box::new(move || tell.send(number).unwrap()));
        }
        drop((background, tell));
        assert_eq!(told.iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    }
}
