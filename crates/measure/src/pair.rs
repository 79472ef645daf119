//! Two processes on two emulated hosts, and one object of one pool between them.
//!
//! The same binary is started again as the second process; both then run the same cases in the same order, in step
//! through the memory itself, and the first reports.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use polder_attach::settings::{CoherenceChoice, Settings, TimeSpan};
use polder_mem::{Fault, LINE, Memory, Offset};

use crate::{Failure, Tied};

/// How one process of a benchmark attaches its pool.
pub fn settings(path: &Path, coherence: CoherenceChoice, host: u16) -> Settings {
    Settings {
        pool: Some(path.to_owned()),
        run: path.parent().map(Path::to_owned),
        coherence: Some(coherence),
        host: Some(host),
        timeout: Some(TimeSpan(Duration::from_secs(30))),
        ..Settings::default()
    }
}

/// Another process of this benchmark; killed when the first gives up on it.
pub struct Helper(Tied);

impl Helper {
    /// Starts this program again with these arguments.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start<I: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = I>) -> Result<Self, Failure> {
        Ok(Self(Tied::spawn(Command::new(std::env::current_exe()?).args(arguments))?))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it failed.
    pub fn finish(mut self) -> Result<(), Failure> {
        let status = self.0.child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(Failure(format!("a process of the benchmark ended with {status}")))
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It has ended already, unless the first process failed.
        drop(self.0.child.kill());
        drop(self.0.child.wait());
    }
}

/// The bare sequence of line operations that two processes need to hand a word to and fro: the floor of every round
/// trip. Each side owns one line.
pub struct Bare<'a, M: Memory> {
    memory: &'a M,
    own: Offset,
    other: Offset,
    first: bool,
}

impl<'a, M: Memory> Bare<'a, M> {
    /// Over two pairs of lines at `at`; `first` speaks first.
    pub fn new(memory: &'a M, at: Offset, first: bool) -> Self {
        let (mine, theirs) = if first { (0, 2) } else { (2, 0) };
        Self { memory, own: at.lines(mine), other: at.lines(theirs), first }
    }

    /// Hands `sequence` to the other side and waits until it came back.
    pub fn turn(&self, sequence: u64) -> Result<(), Fault> {
        if self.first {
            self.say(sequence);
        }
        self.hear(sequence)?;
        if !self.first {
            self.say(sequence);
        }
        Ok(())
    }

    /// Publishes `sequence` to the other side.
    pub fn say(&self, sequence: u64) {
        self.memory.store(self.own.word(1), sequence);
        self.memory.store(self.own, sequence);
        self.memory.write_back(self.own, LINE);
        self.memory.sfence();
    }

    /// Waits until the other side has published `sequence`.
    ///
    /// # Errors
    /// When the memory is gone.
    pub fn hear(&self, sequence: u64) -> Result<(), Fault> {
        loop {
            self.memory.invalidate(self.other, LINE);
            self.memory.fence_invalidations();
            if self.memory.load(self.other)? >= sequence {
                return Ok(());
            }
        }
    }
}

/// Seconds that `work` takes.
pub fn timed<E>(work: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
    let begin = Instant::now();
    work()?;
    Ok(begin.elapsed().as_secs_f64())
}
