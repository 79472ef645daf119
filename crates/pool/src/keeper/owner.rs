//! Which process is an incarnation of the keeper. Its place can be taken once that process is gone for certain.
//!
//! # Words of an owner line
//! | word | what |
//! |---|---|
//! | 0 | bits 0..16 the keeper's incarnation, bits 16..32 what it does: 1 it runs, 2 it has ended and writes no more |
//! | 1 | hash of the boot id and of the process namespace, 0 if not known |
//! | 2 | process id |
//! | 3 | when the process started, in ticks of its kernel |
//! | 4..7 | spare, 0 |

use polder_mem::{Fault, Memory};
use rustix::process::{Pid, test_kill_process};
use twox_hash::XxHash3_64;

use crate::format::Layout;
use crate::line::{self, Words};

/// A process, as no other of any host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Owner {
    /// A hash of the boot id and of the namespace in which its id counts; 0 when it is not known.
    kernel: u64,
    pid: u32,
    started: u64,
    has_ended: bool,
}

/// What can be said of a keeper's process here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeeperFate {
    /// It writes no more.
    Gone,
    Runs,
    /// It is another kernel's, or has not said which it is.
    Unseen,
}

impl Owner {
    /// This process.
    pub(crate) fn this() -> Self {
        let pid = std::process::id();
        let started = state_and_start(pid).map_or(0, |(_, started)| started);
        Self { kernel: here().unwrap_or(0), pid, started, has_ended: false }
    }

    pub(crate) const fn ended(self) -> Self {
        Self { has_ended: true, ..self }
    }

    pub(crate) const fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn encode(&self, keeper: u16) -> Words {
        let does = if self.has_ended { 2 } else { 1 };
        [u64::from(keeper) | does << 16, self.kernel, self.pid.into(), self.started, 0, 0, 0]
    }

    /// Reads who keeper incarnation `keeper` is; one that has not said so is nobody that is known.
    pub(crate) fn read<M: Memory>(memory: &M, layout: &Layout, keeper: u16) -> Result<Self, Fault> {
        let words = line::read(memory, layout.keeper_owner_line(keeper))?;
        Ok(match words {
            Some([first, kernel, pid, started, ..]) if first as u16 == keeper => {
                Self { kernel, pid: pid as u32, started, has_ended: first >> 16 == 2 }
            }
            _ => Self::default(),
        })
    }

    pub(crate) fn fate(&self) -> KeeperFate {
        match self.kernel != 0 && here() == Some(self.kernel) {
            _ if self.has_ended => KeeperFate::Gone,
            false => KeeperFate::Unseen,
            true if self.is_dead() => KeeperFate::Gone,
            true => KeeperFate::Runs,
        }
    }

    /// Whether this kernel has no such process any more.
    fn is_dead(&self) -> bool {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return false };
        if test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
            return true;
        }
        // One that nobody has waited for, or another under the same id.
        let found = state_and_start(self.pid);
        found.is_some_and(|(state, started)| matches!(state, 'Z' | 'X') || started != self.started)
    }
}

/// A hash of what a process id counts in.
fn here() -> Option<u64> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(XxHash3_64::oneshot(format!("{} {}", boot.trim(), namespace.display()).as_bytes()).max(1))
}

/// The state of a process and when it started, of those that can be seen.
fn state_and_start(pid: u32) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name may hold anything but the last bracket.
    let mut words = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = words.next()?.chars().next()?;
    Some((state, words.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::Child;

    use super::*;

    #[test]
    fn a_process_runs_until_it_is_dead_and_others_cannot_be_seen() {
        let mine = Owner::this();
        assert_eq!(mine.fate(), KeeperFate::Runs);
        assert_eq!(
            Owner { started: mine.started + 1, ..mine }.fate(),
            KeeperFate::Gone,
            "another under its id"
        );
        assert_eq!(Owner { kernel: mine.kernel ^ 1, ..mine }.fate(), KeeperFate::Unseen);
        assert_eq!(Owner::default().fate(), KeeperFate::Unseen);
        assert_eq!(Owner { kernel: 5, ..Owner::default() }.ended().fate(), KeeperFate::Gone);
        let mut child = Child::fork(|| {
            loop {
                std::thread::park()
            }
        });
        let (_, started) = state_and_start(child.pid()).unwrap();
        let owner = Owner { pid: child.pid(), started, ..mine };
        child.stop();
        assert_eq!(owner.fate(), KeeperFate::Runs, "it may go on");
        child.kill();
        assert_eq!(owner.fate(), KeeperFate::Gone);
    }
}
