//! Progress for peers while the program computes.
//!
//! The operations of peers on memory of this process are done by its progress, and a program that computes calls nothing that makes
//! any. So once memory is registered that peers may reach, a thread makes progress beside the program. It naps most of the time,
//! longer from one look in vain to the next, and leaves all to a program that looks itself.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use polder_mem::threads;

/// Naps. What the longest costs with nothing to do: a thousand looks a second, half a percent of a core.
const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);
/// How long the thread looks on after it has done something: a peer that has its answer often asks for the next.
const BURST: Duration = Duration::from_micros(50);

/// What a look has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// No memory is registered that peers may reach.
    Closed,
    /// The program is in the domain, or was since the look before.
    Busy,
    /// Nobody asks for anything.
    Vain,
    /// Something was done for a peer.
    Done,
}

/// The thread. It ends with its domain.
pub(crate) struct ProgressThread {
    wakes: Sender<()>,
    thread: JoinHandle<()>,
}

impl ProgressThread {
    /// Starts it; `look` is one look, nothing once the domain is gone. It gets what it left there at the look before.
    pub(crate) fn start(look: impl FnMut(&mut u64) -> Option<Look> + Send + 'static) -> io::Result<Self> {
        let (wakes, woken) = channel();
        let thread =
            threads::start(Builder::new().name("polder-progress".to_owned()), move || run(look, &woken))?;
        Ok(Self { wakes, thread })
    }

    /// Says that memory is registered which peers may reach.
    pub(crate) fn wake(&self) {
        // It hears that as long as the domain is there.
        let _ = self.wakes.send(());
    }

    /// Ends it, and waits until it has ended.
    pub(crate) fn end(self) {
        drop(self.wakes);
        drop(self.thread.join());
    }
}

fn run(mut look: impl FnMut(&mut u64) -> Option<Look>, woken: &Receiver<()>) {
    let (mut nap, mut polls) = (Some(SHORTEST), 0);
    loop {
        let slept = match nap {
            Some(nap) => woken.recv_timeout(nap),
            None => woken.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        if slept == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        let Some(last) = burst(|| look(&mut polls)) else { return };
        nap = match last {
            Look::Closed => None,
            Look::Busy => Some(LONGEST),
            Look::Done => Some(SHORTEST),
            Look::Vain => Some((nap.unwrap_or(SHORTEST) * 2).min(LONGEST)),
        };
    }
}

/// Looks, and goes on for as long as peers ask for more.
fn burst(mut look: impl FnMut() -> Option<Look>) -> Option<Look> {
    let mut done = None::<Instant>;
    loop {
        match look()? {
            Look::Done => done = Some(Instant::now()),
            Look::Vain if done.is_some_and(|done| done.elapsed() < BURST) => thread::yield_now(),
            Look::Vain if done.is_some() => return Some(Look::Done),
            last => return Some(last),
        }
    }
}
