//! Hosts and processes: which are there, and how others know that they live.
//!
//! Each host has one line: which incarnation of the host holds the id. Each of its processes has two: its identity, and a
//! heartbeat. A heartbeat is a counter, timed by its reader's clock. Only processes of a host write its lines. If one dies
//! in the middle, another process of the same host repairs its lines, because the two share their caches.
//!
//! # Words of a host line
//! | word | what |
//! |---|---|
//! | 0 | state: 0 free, 1 live, 2 left |
//! | 1 | hash of the boot id |
//! | 2 | incarnation, from 1: another for each boot, and after each eviction |
//! | 3 | epoch of the view in which it joined |
//! | 4..7 | spare, 0 |
//!
//! # Words of a process line
//! | word | what |
//! |---|---|
//! | 0 | state: 0 free, 1 live, 2 left, 3 dead |
//! | 1 | incarnation: which process it is of those that were ever at the slot, from 1 |
//! | 2 | process id |
//! | 3 | incarnation of its host |
//! | 4 | job id |
//! | 5 | the job's quota on this host in bytes |
//! | 6 | spare, 0 |
//!
//! # Words of a heartbeat line
//! | word | what |
//! |---|---|
//! | 0 | counter |
//! | 1 | incarnation of the process, or 0 for a keeper's |
//! | 2..7 | spare, 0 |
//!
//! # Words of a claim line
//! | word | what |
//! |---|---|
//! | 0 | 1 a claimant asks for the id, 2 a command asks to evict, 3 a command says that the host is fenced |
//! | 1 | the claimant's nonce |
//! | 2 | hash of the claimant's boot id |
//! | 3 | the incarnation that is to be evicted, or is fenced |
//! | 4..7 | spare, 0 |

pub mod claim;
pub mod view;

use std::collections::BTreeMap;
use std::time::Duration;

use polder_mem::{Fault, Memory, Nanos, Offset, ProcessSlot};

use crate::format::{Layout, SETTLE, read_settled};
use crate::line::{self, Words};
use crate::{Peer, PoolError, Superblock};

/// What a host's line says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum HostState {
    /// Nobody ever held the id.
    #[default]
    Free,
    /// The host is in the pool.
    Live,
    /// Its last process has left; its objects stay.
    Left,
}

/// Which incarnation of a host holds a host id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct HostLine {
    /// Whether it is there.
    pub state: HostState,
    /// A hash of its boot id.
    pub boot: u64,
    /// From 1: another for each boot, and after each eviction.
    pub incarnation: u64,
    /// The epoch of the view in which it joined.
    pub epoch: u64,
}

impl HostLine {
    pub(crate) const fn encode(&self) -> Words {
        let state = match self.state {
            HostState::Free => 0,
            HostState::Live => 1,
            HostState::Left => 2,
        };
        [state, self.boot, self.incarnation, self.epoch, 0, 0, 0]
    }

    pub(crate) const fn decode(words: &Words) -> Option<Self> {
        let [state, boot, incarnation, epoch, ..] = *words;
        let state = match state {
            0 => HostState::Free,
            1 => HostState::Live,
            2 => HostState::Left,
            _ => return None,
        };
        Some(Self { state, boot, incarnation, epoch })
    }

    pub(crate) fn read<M: Memory>(
        memory: &M,
        layout: &Layout,
        host: u16,
        patience: Duration,
    ) -> Result<Self, PoolError> {
        let at = layout.host_line(host);
        let words = read_settled(memory, at, "host line", patience)?;
        Self::decode(&words).ok_or(PoolError::Corrupt { offset: at, what: "host line" })
    }

    /// Reads the line also when its writer died in the middle, and says whether it is whole. A torn line shows a live holder,
    /// and of its boot and incarnation each what was written or what stood there before.
    pub(crate) fn read_torn<M: Memory>(
        memory: &M,
        layout: &Layout,
        host: u16,
        patience: Duration,
    ) -> Result<(Self, bool), PoolError> {
        match Self::read(memory, layout, host, patience) {
            Ok(line) => Ok((line, true)),
            Err(PoolError::Corrupt { offset, .. }) => {
                let (boot, incarnation) = (memory.load(offset.word(1))?, memory.load(offset.word(2))?);
                Ok((Self { state: HostState::Live, boot, incarnation, epoch: 0 }, false))
            }
            Err(error) => Err(error),
        }
    }
}

/// What a process's line says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ProcessState {
    /// Nobody was ever at the slot.
    #[default]
    Free,
    /// The process is in the pool, or died and nobody has noticed yet.
    Live,
    /// It left.
    Left,
    /// It died, and another process of its host has cleaned up after it.
    Dead,
}

/// A process, as its line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its host id.
    pub host: u16,
    /// Its slot.
    pub slot: ProcessSlot,
    /// Whether it is there.
    pub state: ProcessState,
    /// Which process it is of those that were ever at the slot, from 1.
    pub incarnation: u64,
    /// Its process id.
    pub pid: u32,
    /// The incarnation of its host.
    pub host_incarnation: u64,
    /// Its job id.
    pub job: u64,
    /// The job's quota on this host in bytes.
    pub quota: u64,
}

impl Process {
    /// Words by which an object says whose it is.
    pub(crate) fn identity(&self) -> [u64; 3] {
        let place = u64::from(self.host) << 48 | u64::from(self.slot.0) << 32 | u64::from(self.pid);
        [place, self.incarnation, self.host_incarnation]
    }

    /// The live process that an object names by these words.
    pub(crate) const fn from_identity([place, incarnation, host_incarnation]: [u64; 3]) -> Self {
        Self {
            host: (place >> 48) as u16,
            slot: ProcessSlot((place >> 32) as u16),
            state: ProcessState::Live,
            incarnation,
            pid: place as u32,
            host_incarnation,
            job: 0,
            quota: 0,
        }
    }

    /// As errors name it.
    #[must_use]
    pub const fn peer(&self) -> Peer {
        Peer::new(self.host, self.pid)
    }

    pub(crate) fn encode(&self) -> Words {
        let state = match self.state {
            ProcessState::Free => 0,
            ProcessState::Live => 1,
            ProcessState::Left => 2,
            ProcessState::Dead => 3,
        };
        [state, self.incarnation, self.pid.into(), self.host_incarnation, self.job, self.quota, 0]
    }

    pub(crate) fn decode(words: &Words, host: u16, slot: ProcessSlot) -> Option<Self> {
        let [state, incarnation, pid, host_incarnation, job, quota, _] = *words;
        let state = match state {
            0 => ProcessState::Free,
            1 => ProcessState::Live,
            2 => ProcessState::Left,
            3 => ProcessState::Dead,
            _ => return None,
        };
        let pid = u32::try_from(pid).ok()?;
        Some(Self { host, slot, state, incarnation, pid, host_incarnation, job, quota })
    }

    /// Reads a process line of this host under the membership lock: when it is torn, its writer died in the middle.
    pub(crate) fn read_own<M: Memory>(
        memory: &M,
        layout: &Layout,
        host: u16,
        slot: ProcessSlot,
    ) -> Result<Option<Self>, Fault> {
        let words = line::read(memory, layout.process_line(host, slot))?;
        Ok(words.and_then(|words| Self::decode(&words, host, slot)))
    }

    /// Reads the process line at `slot` of `host`.
    pub(crate) fn read<M: Memory>(
        memory: &M,
        layout: &Layout,
        host: u16,
        slot: ProcessSlot,
        patience: Duration,
    ) -> Result<Self, PoolError> {
        let at = layout.process_line(host, slot);
        let words = read_settled(memory, at, "process line", patience)?;
        Self::decode(&words, host, slot).ok_or(PoolError::Corrupt { offset: at, what: "process line" })
    }
}

/// What a heartbeat line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Heartbeat {
    /// Grows while its writer lives.
    pub count: u64,
    /// The incarnation of the process, 0 for a keeper's.
    pub incarnation: u64,
}

impl Heartbeat {
    /// Publishes this beat; nobody else writes the line.
    // SYNC: pairs with `Heartbeat::read`.
    pub(crate) fn publish<M: Memory>(self, memory: &M, at: Offset) {
        line::publish(memory, at, &[self.count, self.incarnation, 0, 0, 0, 0, 0]);
    }

    /// What the line says now; `None` while it is torn, which is no news.
    pub(crate) fn read<M: Memory>(memory: &M, at: Offset) -> Result<Option<Self>, Fault> {
        let words = line::read(memory, at)?;
        Ok(words.map(|words| Self::decode(&words)))
    }

    pub(crate) const fn decode(&[count, incarnation, ..]: &Words) -> Self {
        Self { count, incarnation }
    }
}

/// Times heartbeats by the reader's own clock.
#[derive(Clone, Debug)]
pub struct HeartbeatMonitor {
    silence: Duration,
    seen: BTreeMap<Offset, (Heartbeat, Nanos)>,
}

impl HeartbeatMonitor {
    /// Calls a heartbeat silent that stays the same for `silence`.
    #[must_use]
    pub fn new(silence: Duration) -> Self {
        Self { silence, seen: BTreeMap::new() }
    }

    /// How long a heartbeat must stay the same.
    #[must_use]
    pub const fn silence(&self) -> Duration {
        self.silence
    }

    /// Starts the clock anew at the next look.
    pub fn forget(&mut self, at: Offset) {
        self.seen.remove(&at);
    }

    /// Whether the heartbeat at line `at` has been the same for too long. The clock starts at the first look.
    ///
    /// # Errors
    /// [`Fault`] when the memory itself fails.
    pub fn is_silent<M: Memory>(&mut self, memory: &M, at: Offset) -> Result<bool, Fault> {
        // A process that is stopped before it has looked, or after that, does not count the time.
        let asked = memory.now();
        let beat = Heartbeat::read(memory, at)?;
        let (last, since) = self.seen.entry(at).or_insert_with(|| (beat.unwrap_or_default(), memory.now()));
        match beat {
            Some(beat) if beat != *last => (*last, *since) = (beat, memory.now()),
            _ => {}
        }
        Ok(asked >= *since + self.silence)
    }
}

/// Whether any of the heartbeats at `lines` moves while this process watches, for at most `silence`.
///
/// # Errors
/// [`Fault`] when the memory itself fails.
pub(crate) fn any_heartbeat<M: Memory>(
    memory: &M,
    lines: impl Iterator<Item = Offset> + Clone,
    silence: Duration,
) -> Result<bool, Fault> {
    let deadline = memory.now() + silence;
    let first = lines.clone().map(|at| Heartbeat::read(memory, at)).collect::<Result<Vec<_>, _>>()?;
    loop {
        // A process that was stopped meanwhile looks once more.
        let is_late = memory.now() >= deadline;
        for (at, old) in lines.clone().zip(&first) {
            let new = Heartbeat::read(memory, at)?;
            // A line that was torn and is whole is a sign of life as well: somebody wrote it.
            if new.is_some() && new != *old {
                return Ok(true);
            }
        }
        if is_late {
            return Ok(false);
        }
        memory.yield_now();
    }
}

/// What somebody asks of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Request {
    /// A claimant wants the host id.
    Claim { nonce: u64, boot: u64 },
    /// This incarnation of the host is to leave the view.
    Evict { incarnation: u64 },
    /// This incarnation of the host is surely off.
    Fence { incarnation: u64 },
}

impl Request {
    pub(crate) const fn encode(self) -> Words {
        let [kind, nonce, boot, incarnation] = match self {
            Self::Claim { nonce, boot } => [1, nonce, boot, 0],
            Self::Evict { incarnation } => [2, 0, 0, incarnation],
            Self::Fence { incarnation } => [3, 0, 0, incarnation],
        };
        [kind, nonce, boot, incarnation, 0, 0, 0]
    }

    pub(crate) const fn decode(words: &Words) -> Option<Self> {
        let [kind, nonce, boot, incarnation, ..] = *words;
        match kind {
            1 => Some(Self::Claim { nonce, boot }),
            2 => Some(Self::Evict { incarnation }),
            3 => Some(Self::Fence { incarnation }),
            _ => None,
        }
    }
}

/// The first process of `host` whose line says that it lives; [`None`] when there is none.
///
/// # Errors
/// [`PoolError::HostLive`] when another boot than `boot` holds the host id; as reading fails.
pub fn live_process<M: Memory>(
    memory: &M,
    superblock: &Superblock,
    host: u16,
    boot: u64,
) -> Result<Option<Process>, PoolError> {
    let layout = superblock.layout()?;
    let (HostLine { boot: found, .. }, is_whole) = HostLine::read_torn(memory, &layout, host, SETTLE)?;
    if is_whole && found != boot {
        return Err(PoolError::HostLive { host, boot: found });
    }
    let processes = (0..superblock.geometry.processes).map(ProcessSlot);
    let mut lines = processes.filter_map(|slot| Process::read_own(memory, &layout, host, slot).ok()?);
    Ok(lines.find(|line| line.state == ProcessState::Live))
}

/// The first host but `own` that lives under another kernel than that with `boot`: it holds its id, and gives signs of life within
/// `silence`.
///
/// # Errors
/// [`PoolError::Memory`]; [`PoolError::Geometry`] when the superblock has none that fits.
pub fn host_of_other_kernel<M: Memory>(
    memory: &M,
    superblock: &Superblock,
    own: u16,
    boot: u64,
    silence: Duration,
) -> Result<Option<u16>, PoolError> {
    let layout = superblock.layout()?;
    for host in (0..superblock.geometry.hosts).filter(|&host| host != own) {
        let (line, is_whole) = HostLine::read_torn(memory, &layout, host, SETTLE)?;
        let is_others = is_whole && line.state == HostState::Live && line.boot != boot;
        if is_others && any_heartbeat(memory, layout.heartbeat_lines(host), silence)? {
            return Ok(Some(host));
        }
    }
    Ok(None)
}

/// That a pool of this layout has room for host `host`.
pub(crate) fn expect_host(layout: &Layout, host: u16) -> Result<(), PoolError> {
    let high = layout.geometry().hosts - 1;
    match host <= high {
        true => Ok(()),
        false => {
            Err(PoolError::Geometry { what: "the host id", value: host.into(), low: 0, high: high.into() })
        }
    }
}

pub(crate) fn milliseconds(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_from_their_words() {
        let host = HostLine { state: HostState::Left, boot: 1, incarnation: 2, epoch: 3 };
        assert_eq!(HostLine::decode(&host.encode()), Some(host));
        let process = Process {
            host: 3,
            slot: ProcessSlot(4),
            state: ProcessState::Dead,
            incarnation: 5,
            pid: 6,
            host_incarnation: 7,
            job: 8,
            quota: 9,
        };
        assert_eq!(Process::decode(&process.encode(), 3, ProcessSlot(4)), Some(process));
        for request in [
            Request::Claim { nonce: 1, boot: 2 },
            Request::Evict { incarnation: 2 },
            Request::Fence { incarnation: 2 },
        ] {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
    }

    #[test]
    fn unknown_states_are_refused() {
        assert_eq!(HostLine::decode(&[3, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(Process::decode(&[4, 0, 0, 0, 0, 0, 0], 0, ProcessSlot(0)), None);
        assert_eq!(Process::decode(&[1, 0, 1 << 32, 0, 0, 0, 0], 0, ProcessSlot(0)), None);
        assert_eq!(Request::decode(&[0; 7]), None);
    }
}
