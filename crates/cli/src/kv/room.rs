//! What `polder keeper` does for caches: the room of hosts that are gone goes to hosts that want some.
//!
//! A thread stands in for the host that is gone, one visit at a time. Beside it the keeper answers its claim as any other's.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use polder_attach::settings::Settings;
use polder_mem::AnyMemory;
use polder_platform::printable;
use polder_pool::keeper::Keeper;
use polder_pool::kv::{Cache, GivenUp, GonePart, wanted_parts};

use super::stand_in;
use crate::Failure;
use crate::pool::bytes;

/// Between two looks. A host that comes back finds its id free then.
const PERIOD: Duration = Duration::from_secs(2);
/// The same while visits give nothing, as where blocks are pinned; longer where they take long.
const LONGEST_PERIOD: Duration = Duration::from_secs(64);
/// So many times the time of a look that gave nothing pass until the next: a look reads the entries of all objects, and a visit all
/// lines of a host's part.
const REST: u32 = 32;

/// The thread, while it goes on.
pub(crate) struct Visits {
    ends: Option<Sender<()>>,
    thread: JoinHandle<()>,
    left: Receiver<(u16, u64)>,
    told: Receiver<String>,
}

impl Visits {
    pub(crate) fn start(memory: AnyMemory, settings: &Settings) -> Self {
        let (ends, ended) = channel();
        let (leaves, left) = channel();
        let (tells, told) = channel();
        let settings = settings.clone();
        let visitor = Visitor { settings, leaves, tells };
        let thread = std::thread::spawn(move || visitor.run(&memory, &ended));
        Self { ends: Some(ends), thread, left, told }
    }

    /// Lines about what was given since the last call.
    pub(crate) fn told(&self) -> impl Iterator<Item = String> {
        self.told.try_iter()
    }

    /// Has the keeper take back the ids of hosts that the thread stood in for.
    pub(crate) fn take_back(&self, keeper: &mut Keeper<AnyMemory>) -> Result<(), Failure> {
        for (host, incarnation) in self.left.try_iter() {
            keeper.take_back(host, incarnation)?;
        }
        Ok(())
    }

    /// Ends after the visit that goes on, which may need the keeper's answer.
    pub(crate) fn end(&mut self) {
        self.ends = None;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }
}

/// What the thread has.
struct Visitor {
    settings: Settings,
    leaves: Sender<(u16, u64)>,
    tells: Sender<String>,
}

impl Visitor {
    fn run(&self, memory: &AnyMemory, ended: &Receiver<()>) {
        let (mut period, mut warned) = (PERIOD, String::new());
        while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
            let begun = Instant::now();
            let visited = wanted_parts(memory)
                .map_err(Failure::from)
                .and_then(|parts| parts.iter().map(|part| self.visit(part)).collect::<Result<Vec<_>, _>>());
            let (given, warning) = match visited {
                Ok(visits) => (visits.iter().map(|given| given.bytes).max(), String::new()),
                Err(error) => (Some(0), error.to_string()),
            };
            if !warning.is_empty() && warning != warned {
                eprintln!("warning: a host that is gone keeps its room: {warning}");
            }
            warned = warning;
            let rest = REST * begun.elapsed();
            period = match given {
                // A look reads what all objects are, though nobody wants room.
                None => PERIOD.max(rest),
                Some(0) => (2 * period).min(LONGEST_PERIOD).max(rest),
                Some(_) => PERIOD,
            };
        }
    }

    /// Stands in for a host that is gone, and gives what is wanted of one of its parts.
    fn visit(&self, part: &GonePart) -> Result<GivenUp, Failure> {
        let session = stand_in(&self.settings, part.host)?;
        let incarnation = session.pool().this_process().host_incarnation;
        let given = Cache::give_to_living(session.pool(), part);
        drop(session);
        // The keeper that ends takes nothing back, and tells nothing.
        _ = self.leaves.send((part.host, incarnation));
        let given = given?;
        if given.bytes > 0 {
            let (host, name, bytes) = (part.host, printable(&part.cache), bytes(given.bytes));
            let what = format!("{bytes} of its blocks in the cache {name} made room for others");
            _ = self.tells.send(format!("host {host} is gone: {what}\n"));
        }
        Ok(given)
    }
}
