//! A pool, as one process of one host has it attached.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use polder_mem::{Fault, LINE, Liveness, Memory, ProcessSlot, forks, host_file_lost};

use crate::PoolError;
use crate::deaths::Deaths;
use crate::deviation::Deviation;
use crate::format::{Layout, SETTLE, Superblock, read_superblock};
use crate::line;
use crate::local::{Local, LocalLayout};
use crate::membership::{
    Heartbeat, HeartbeatMonitor, HostLine, HostState, Process, ProcessState, any_heartbeat,
};
use crate::shared::SharedObjects;
use crate::view::{Grant, IdSource, View, Views};

/// How long the words of one line may reach memory one after another: far more than any link takes.
const ON_THEIR_WAY: Duration = Duration::from_millis(1);

/// Who attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The host id, from the launcher or from [`crate::claim::claim_host_id`].
    pub host: u16,
    /// A hash of the host's boot id: tells a rebooted host from the one before.
    pub boot: u64,
    /// The process id, for errors.
    pub pid: u32,
    /// The job that the process belongs to.
    pub job: u64,
    /// How many bytes the job may hold on this host.
    pub quota: u64,
    /// The deadline of every call that waits.
    pub timeout: Duration,
    /// A heartbeat that stays the same for so long is a dead process's.
    pub silence: Duration,
}

impl Member {
    /// This process as a member of `host`, with job 0, no quota, 10 seconds for a call and 2 of silence.
    #[must_use]
    pub fn new(host: u16, boot: u64) -> Self {
        Self {
            host,
            boot,
            pid: std::process::id(),
            job: 0,
            quota: u64::MAX,
            timeout: Duration::from_secs(10),
            silence: Duration::from_secs(2),
        }
    }
}

/// Whether another process is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerState {
    /// Nobody is at this slot.
    Absent,
    /// It gives signs of life, or is new.
    Alive,
    /// It died.
    Dead,
    /// Its host does not belong to the pool any more.
    Evicted,
}

/// A pool that this process has attached. Dropping it detaches.
#[derive(Debug)]
pub struct Pool<M: Memory> {
    pub(crate) memory: M,
    pub(crate) superblock: Superblock,
    pub(crate) layout: Layout,
    pub(crate) member: Member,
    /// This process among those of its host, for local locks.
    pub(crate) local: Local,
    /// The incarnation of this host that the process belongs to.
    pub(crate) host_incarnation: u64,
    views: Mutex<Views>,
    heartbeats: Mutex<HeartbeatMonitor>,
    beats: Mutex<u64>,
    /// The epoch in which this host was evicted, once that has been seen.
    evicted: OnceLock<u64>,
    attached: bool,
    /// What the groups of this process tell each other.
    pub(crate) deaths: Deaths,
    /// Objects that several endpoints of this process hold open.
    pub(crate) shared: SharedObjects,
    /// Tells the process from its children.
    forks: u32,
}

impl<M: Memory> Pool<M> {
    /// Attaches this process, which holds the slot of `memory` on its host. The first process of a host takes the host
    /// id, the others join it.
    ///
    /// # Errors
    /// Those of [`read_superblock`]; [`PoolError::Apart`] when a process of this host lives that this one's run directory does
    /// not know; [`PoolError::HostLive`] when another host holds the id and lives;
    /// [`PoolError::IdTaken`] when it gives no sign of life, but has neither left nor been fenced;
    /// [`PoolError::Evicted`] when ids come from the keeper and it has not admitted this host; [`PoolError::NoSlot`].
    pub fn attach(memory: M, member: Member) -> Result<Self, PoolError> {
        let superblock = read_superblock(&memory)?;
        let layout = superblock.layout()?;
        Self::attach_in(memory, superblock, layout, member)
    }

    /// Attaches to a pool whose superblock was read before.
    pub(crate) fn attach_in(
        memory: M,
        superblock: Superblock,
        layout: Layout,
        member: Member,
    ) -> Result<Self, PoolError> {
        let slot = usable_slot(&memory, &layout, &member)?;
        let words = LocalLayout::new(&layout);
        if !Deviation::FileKnowsAll.is_on() {
            expect_known(&memory, &layout, &words, &member)?;
        }
        let older = last_incarnation(&memory, &layout, member.host, slot)?;
        let local = Local::enter(&memory, words, member.host, member.pid, older);
        let mut pool = Self {
            superblock,
            layout,
            member,
            local,
            host_incarnation: 0,
            views: Mutex::new(Views::new(member.timeout)),
            heartbeats: Mutex::new(HeartbeatMonitor::new(member.silence)),
            beats: Mutex::new(0),
            evicted: OnceLock::new(),
            attached: false,
            deaths: Deaths::default(),
            shared: SharedObjects::default(),
            forks: forks(),
            memory,
        };
        pool.join()?;
        Ok(pool)
    }

    fn join(&mut self) -> Result<(), PoolError> {
        let memory = self.memory.clone();
        let mut guard = self.local.layout.membership().lock(&memory, &self.local, self.member.timeout)?;
        self.host_incarnation = self.take_host()?;
        if !Deviation::WithoutObjects.is_on() {
            self.directory().prepare()?;
        }
        self.sweep_processes(self.member.timeout)?;
        self.repair_process(self.local.slot, self.member.timeout)?;
        self.write_process(ProcessState::Live);
        self.attached = true;
        guard.repaired();
        drop(guard);
        self.beat()?;
        // A keeper that starts meanwhile may not have seen this host: wait until it has said so or not.
        *self.views() = Views::new(self.member.timeout);
        self.check_membership()?;
        Ok(())
    }

    /// Makes the host line say that this host holds the id, and returns its incarnation. Under the membership lock.
    fn take_host(&self) -> Result<u64, PoolError> {
        let Member { host, boot, .. } = self.member;
        let (old, is_whole) = HostLine::read_torn(&self.memory, &self.layout, host, self.settle())?;
        let HostLine { boot: holder, incarnation: last, .. } = old;
        let is_ours = is_whole && holder == boot;
        let in_use = old.state == HostState::Live && !is_ours;
        if in_use && any_heartbeat(&self.memory, self.layout.heartbeat_lines(host), self.member.silence)? {
            return Err(PoolError::HostLive { host, boot: holder });
        }
        let (view, grant) = self.view_and_grant()?;
        // A torn line with no other boot in it was left by a process of this boot that died while it wrote it. A host of another
        // boot may only stand still, and would go on to write what is this one's by then: it has to leave, or to be fenced,
        // after which its line says that it left.
        let is_others = is_whole || ![0, boot].contains(&holder);
        if in_use && is_others && !Deviation::SilenceIsEnough.is_on() {
            return Err(PoolError::IdTaken { host, boot: holder, epoch: view.epoch });
        }
        let incarnation = match view.id_source {
            IdSource::Keeper if grant.stands_in(&view, host) && grant.boot == boot => grant.incarnation,
            IdSource::Keeper => return Err(PoolError::NotAdmitted { host, epoch: view.epoch }),
            IdSource::Launcher => {
                let gone = if view.had_evicted(host) { grant.evicted_through } else { 0 };
                let stays = is_ours && old.state != HostState::Free && last > gone;
                if stays { last } else { last.max(gone).saturating_add(1) }
            }
        };
        let new = HostLine { state: HostState::Live, boot, incarnation, epoch: view.epoch };
        let alone = self.others().all(|slot| self.memory.liveness(host, slot) != Liveness::Alive);
        if !alone && is_whole && old == (HostLine { epoch: old.epoch, ..new }) {
            return Ok(incarnation);
        }
        if !is_ours && old.state != HostState::Free {
            self.await_writes();
        }
        if !is_ours && !Deviation::WithoutObjects.is_on() {
            // Another host held the id: what this one knew of the shard is of no use.
            self.directory().forget();
        }
        enter_shard(&self.memory, &self.layout, host);
        arrive(&self.memory, &self.layout, host, &new);
        Ok(incarnation)
    }

    /// Waits until whatever another boot, or a process that died, wrote last is in memory. A host line was seen whole as soon as
    /// the words were there that changed, and those that did not change may still be on their way.
    pub(crate) fn await_writes(&self) {
        let settled = self.memory.now() + ON_THEIR_WAY;
        while self.memory.now() < settled {
            self.memory.yield_now();
        }
    }

    fn view_and_grant(&self) -> Result<(View, Grant), PoolError> {
        let (memory, layout, host) = (&self.memory, &self.layout, self.member.host);
        self.views()
            .read(memory, layout, |view| Grant::read(memory, layout, view.keeper, host, self.settle()))
    }

    fn settle(&self) -> Duration {
        self.member.timeout.min(SETTLE)
    }

    /// The other slots of this host.
    fn others(&self) -> impl Iterator<Item = ProcessSlot> + use<M> {
        let mine = self.local.slot;
        (0..self.layout.geometry().processes).map(ProcessSlot).filter(move |&slot| slot != mine)
    }

    /// Puts right what processes of this host left that died, if there are any.
    pub(crate) fn sweep(&self, patience: Duration) -> Result<(), PoolError> {
        let (memory, host) = (&self.memory, self.member.host);
        let is_left_over = |slot| {
            let line = Process::read_own(memory, &self.layout, host, slot);
            let beat = line::load(memory, self.layout.heartbeat_line(host, slot));
            let is_clean = matches!(line, Ok(Some(line)) if line.state != ProcessState::Live)
                && matches!(beat, Ok(Some(_)));
            !is_clean && memory.liveness(host, slot) != Liveness::Alive
        };
        if self.others().any(is_left_over) {
            // What a dead holder of the lock left is not all put right here: the next to attach does that.
            let _guard = self.local.layout.membership().lock(memory, &self.local, patience)?;
            self.sweep_processes(patience)?;
        }
        Ok(())
    }

    /// Puts right what the processes of this host which died left, and says that they are dead. Under the membership lock.
    fn sweep_processes(&self, patience: Duration) -> Result<(), PoolError> {
        let host = self.member.host;
        for slot in self.others() {
            if self.memory.liveness(host, slot) == Liveness::Alive {
                continue;
            }
            let beat = self.layout.heartbeat_line(host, slot);
            if line::load(&self.memory, beat)?.is_none() {
                // It died in the middle of its first sign of life, perhaps before its own line said that it lives.
                Heartbeat::default().publish(&self.memory, beat);
            }
            let line = Process::read_own(&self.memory, &self.layout, host, slot)?;
            if line.is_none_or(|line| line.state == ProcessState::Live) {
                if let Err(error) = self.repair_process(slot, patience) {
                    tracing::warn!(%error, slot = slot.0, "could not clean up after a dead process; the next sweep will");
                    continue;
                }
                let line = line.unwrap_or(self.this_process());
                let dead = Process { slot, state: ProcessState::Dead, ..line };
                line::publish(&self.memory, self.layout.process_line(host, slot), &dead.encode());
                tracing::info!(host, pid = line.pid, "cleaned up after a process that died");
            }
        }
        Ok(())
    }

    fn repair_process(&self, slot: ProcessSlot, patience: Duration) -> Result<(), PoolError> {
        if Deviation::WithoutObjects.is_on() {
            return Ok(());
        }
        self.directory_within(patience).repair_process(slot)
    }

    fn write_process(&self, state: ProcessState) {
        let process = Process { state, ..self.this_process() };
        let at = self.layout.process_line(self.member.host, self.local.slot);
        line::publish(&self.memory, at, &process.encode());
    }

    /// This process, as its line says.
    #[must_use]
    pub fn this_process(&self) -> Process {
        let Member { host, pid, job, quota, .. } = self.member;
        Process {
            host,
            slot: self.local.slot,
            state: ProcessState::Live,
            incarnation: self.local.incarnation,
            pid,
            host_incarnation: self.host_incarnation,
            job,
            quota,
        }
    }

    /// Detaches: the process's lines say that it left, and so does the host's when it was the last.
    ///
    /// # Errors
    /// [`PoolError::Timeout`] when another process of this host holds the membership lock for too long.
    pub fn detach(mut self) -> Result<(), PoolError> {
        self.leave()
    }

    fn leave(&mut self) -> Result<(), PoolError> {
        if !std::mem::take(&mut self.attached) || self.expect_own().is_err() {
            return Ok(());
        }
        let (memory, host) = (&self.memory, self.member.host);
        let mut guard = self.local.layout.membership().lock(memory, &self.local, self.member.timeout)?;
        let line = HostLine::read(memory, &self.layout, host, self.settle())?;
        if line.boot != self.member.boot {
            // The shard is another host's now: it cleans up.
            return Ok(());
        }
        self.repair_process(self.local.slot, self.member.timeout)?;
        self.write_process(ProcessState::Left);
        self.sweep_processes(self.member.timeout)?;
        if line.incarnation == self.host_incarnation && self.is_last() {
            let left = HostLine { state: HostState::Left, ..line };
            line::publish(memory, self.layout.host_line(host), &left.encode());
        }
        guard.repaired();
        Ok(())
    }

    fn is_last(&self) -> bool {
        let line = |slot| Process::read_own(&self.memory, &self.layout, self.member.host, slot);
        self.others().all(|slot| matches!(line(slot), Ok(Some(line)) if line.state != ProcessState::Live))
    }

    /// Gives a sign of life. Call it a few times within [`Member::silence`].
    ///
    /// # Errors
    /// [`PoolError::Evicted`] when another incarnation holds the host id; nothing is written then.
    pub fn beat(&self) -> Result<(), PoolError> {
        self.expect_own()?;
        self.holds_id(0)?;
        let mut beats = locked(&self.beats);
        *beats += 1;
        let beat = Heartbeat { count: *beats, incarnation: self.local.incarnation };
        beat.publish(&self.memory, self.layout.heartbeat_line(self.member.host, self.local.slot));
        Ok(())
    }

    /// Whether the host line still names this incarnation; `epoch` is for the error.
    fn holds_id(&self, epoch: u64) -> Result<(), PoolError> {
        let host = self.member.host;
        let line = HostLine::read(&self.memory, &self.layout, host, self.settle())?;
        match (line.incarnation, line.boot) == (self.host_incarnation, self.member.boot) {
            true => Ok(()),
            false => Err(PoolError::Evicted { host, epoch: epoch.max(line.epoch) }),
        }
    }

    /// Whether this process still belongs to the pool; the epoch in which it does.
    ///
    /// # Errors
    /// [`PoolError::Evicted`] when its host was evicted, or another incarnation holds the host id.
    pub fn check_membership(&self) -> Result<u64, PoolError> {
        self.expect_own()?;
        let host = self.member.host;
        let (view, grant) = self.view_and_grant()?;
        let belongs = match view.id_source {
            IdSource::Keeper => view.has(host) && grant.incarnation == self.host_incarnation,
            IdSource::Launcher => !view.had_evicted(host) || grant.evicted_through < self.host_incarnation,
        };
        let standing = match belongs {
            true => self.holds_id(view.epoch).map(|()| view.epoch),
            false => Err(PoolError::Evicted { host, epoch: view.epoch }),
        };
        if let Err(PoolError::Evicted { epoch, .. }) = standing {
            self.evicted.get_or_init(|| epoch);
        }
        standing
    }

    /// Whether it was this process that attached, and still has the host's files: the slot and the locks of a parent are not a
    /// child's.
    fn expect_own(&self) -> Result<(), PoolError> {
        match (self.forks == forks(), host_file_lost()) {
            (true, false) => Ok(()),
            (false, _) => Err(PoolError::Forked { pid: self.member.pid }),
            (true, true) => Err(PoolError::HostFileLost { host: self.member.host }),
        }
    }

    /// Fails once [`Pool::check_membership`] has found that this host was evicted; looks at nothing itself.
    ///
    /// # Errors
    /// [`PoolError::Evicted`].
    pub fn expect_member(&self) -> Result<(), PoolError> {
        self.expect_own()?;
        match self.evicted.get() {
            None => Ok(()),
            Some(&epoch) => Err(PoolError::Evicted { host: self.member.host, epoch }),
        }
    }

    /// The newest view.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when its lines are damaged, [`PoolError::Memory`] when the memory fails.
    pub fn view(&self) -> Result<View, PoolError> {
        self.views().read(&self.memory, &self.layout, |_| Ok(())).map(|(view, ())| view)
    }

    /// The epoch of the newest view; 0 before any keeper ran.
    ///
    /// # Errors
    /// Those of [`Pool::view`].
    pub fn epoch(&self) -> Result<u64, PoolError> {
        self.view().map(|view| view.epoch)
    }

    /// The hosts that were ever in the pool, one bit each: those whose shards can hold anything. A host that joins
    /// later sees what this process published before.
    ///
    /// # Errors
    /// [`PoolError::Memory`] when the memory fails.
    pub fn hosts_present(&self) -> Result<u64, PoolError> {
        Ok(hosts_present(&self.memory, &self.layout)?)
    }

    /// The process at `slot` of `host`.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] when its line is damaged, [`PoolError::Argument`] when there is no such slot.
    pub fn process(&self, host: u16, slot: ProcessSlot) -> Result<Process, PoolError> {
        let geometry = self.layout.geometry();
        if host >= geometry.hosts || slot.0 >= geometry.processes {
            let value = format!("host {host} slot {}", slot.0);
            return Err(PoolError::Argument {
                what: "the process",
                value,
                expected: "this pool has no such slot",
            });
        }
        Process::read(&self.memory, &self.layout, host, slot, self.settle())
    }

    /// What is known of the process at `slot` of `host`, from this kernel, the view, its line and its heartbeat.
    ///
    /// # Errors
    /// Those of [`Pool::process`] and [`Pool::view`].
    pub fn peer_state(&self, host: u16, slot: ProcessSlot) -> Result<PeerState, PoolError> {
        let process = self.process(host, slot)?;
        self.state_of(&process)
    }

    fn state_of(&self, process: &Process) -> Result<PeerState, PoolError> {
        match process.state {
            ProcessState::Free | ProcessState::Left => return Ok(PeerState::Absent),
            ProcessState::Dead => return Ok(PeerState::Dead),
            ProcessState::Live => {}
        }
        if !self.view()?.has(process.host) {
            return Ok(PeerState::Evicted);
        }
        match self.liveness(process)? {
            Liveness::Alive => Ok(PeerState::Alive),
            Liveness::Dead => Ok(PeerState::Dead),
            Liveness::Unknown => {
                let at = self.layout.heartbeat_line(process.host, process.slot);
                let silent = locked(&self.heartbeats).is_silent(&self.memory, at)?;
                Ok(if silent { PeerState::Dead } else { PeerState::Alive })
            }
        }
    }

    /// Whether the process at `slot` of `host` is there and gives signs of life.
    ///
    /// # Errors
    /// Those of [`Pool::peer_state`].
    pub fn peer_alive(&self, host: u16, slot: ProcessSlot) -> Result<bool, PoolError> {
        self.peer_state(host, slot).map(|state| state == PeerState::Alive)
    }

    /// Whether `peer`, as it was seen before, is still the same process and lives; for waits.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when it is not, naming `what` and `sequence`; [`PoolError::Evicted`] when it is this
    /// process that does not belong any more.
    pub fn expect_alive(&self, peer: &Process, what: &'static str, sequence: u64) -> Result<(), PoolError> {
        self.check_membership()?;
        let now = match self.process(peer.host, peer.slot) {
            // Its line stays torn where it was stopped, or died with its host, while it wrote it.
            Err(PoolError::Corrupt { .. }) => *peer,
            now => now?,
        };
        let same = now.incarnation == peer.incarnation && now.host_incarnation == peer.host_incarnation;
        if same && self.state_of(&now)? == PeerState::Alive {
            return Ok(());
        }
        Err(self.dead_peer_error(peer, what, sequence)?)
    }

    /// The error that says that `peer` died while it was waited for.
    pub(crate) fn dead_peer_error(
        &self,
        peer: &Process,
        what: &'static str,
        sequence: u64,
    ) -> Result<PoolError, PoolError> {
        let error = PoolError::PeerDead { peer: peer.peer(), what, epoch: self.epoch()?, sequence };
        self.deaths.note(&error);
        Ok(error)
    }

    /// Whether `peer`, as it was seen before, will never go on. That it gives no sign of life, or was evicted, is not enough: it
    /// may only stand still.
    ///
    /// # Errors
    /// Those of [`Pool::process`] and [`Pool::view`].
    pub(crate) fn is_gone(&self, peer: &Process) -> Result<bool, PoolError> {
        let view = self.view()?;
        let is_fenced = (view.fenced & !view.members) >> peer.host & 1 == 1;
        // Its line is not asked first: the process that died while it wrote it has left it torn.
        if is_fenced || self.liveness(peer)? == Liveness::Dead {
            return Ok(true);
        }
        let now = self.process(peer.host, peer.slot)?;
        let same = now.incarnation == peer.incarnation && now.host_incarnation == peer.host_incarnation;
        Ok(!same || now.state != ProcessState::Live || self.ended_unseen(peer)?)
    }

    /// What this kernel knows of `process`. A kernel remembers of each slot the last process that it ran there. Once the host id has moved
    /// to another kernel, that is not the process of the slot, and nothing is known here of those that came with the move.
    ///
    /// # Errors
    /// [`PoolError::Memory`] when the memory fails.
    pub(crate) fn liveness(&self, process: &Process) -> Result<Liveness, PoolError> {
        match self.memory.liveness(process.host, process.slot) {
            Liveness::Dead if self.moved_with_its_host(process)? => Ok(Liveness::Unknown),
            known => Ok(known),
        }
    }

    /// Whether another kernel holds the id of the host of `process`, in the incarnation that the process is of. A torn line has no processes
    /// of its incarnation yet.
    fn moved_with_its_host(&self, process: &Process) -> Result<bool, PoolError> {
        let (line, is_whole) = HostLine::read_torn(&self.memory, &self.layout, process.host, self.settle())?;
        Ok(is_whole && line.boot != self.member.boot && line.incarnation == process.host_incarnation)
    }

    /// Whether `peer` ran under this kernel and has ended, though this run directory knows nothing of it: the last process that did has
    /// removed its files, or a later one has made them anew. No process under this kernel holds the peer's host then.
    fn ended_unseen(&self, peer: &Process) -> Result<bool, PoolError> {
        let memory = &self.memory;
        if memory.liveness(peer.host, peer.slot) != Liveness::Unknown
            || memory.host_is_held(peer.host) != Some(false)
        {
            return Ok(false);
        }
        let (line, is_whole) = HostLine::read_torn(memory, &self.layout, peer.host, self.settle())?;
        Ok(is_whole && (line.boot, line.incarnation) == (self.member.boot, peer.host_incarnation))
    }

    /// The memory that the pool lies in.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// What the first page says.
    pub const fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Where everything lies.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// As whom this process attached.
    pub const fn member(&self) -> &Member {
        &self.member
    }

    fn views(&self) -> MutexGuard<'_, Views> {
        locked(&self.views)
    }
}

#[cfg(test)]
impl<M: Memory> Pool<M> {
    /// Ends like a process that is killed: nothing is cleaned up, and the kernel takes the slot back.
    pub(crate) fn die(mut self) {
        self.attached = false;
    }
}

impl<M: Memory> Drop for Pool<M> {
    fn drop(&mut self) {
        // A process that cannot say good-bye looks like one that died, and is cleaned up after like one.
        if !std::thread::panicking()
            && let Err(error) = self.leave()
        {
            tracing::debug!(%error, "could not detach");
        }
    }
}

/// What it guards is whole after every statement, so that a panic elsewhere does not spoil it.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops what this host cached of its shard: it may be older than what another host wrote there as this one.
pub(crate) fn enter_shard<M: Memory>(memory: &M, layout: &Layout, host: u16) {
    let (shard, bytes) = layout.shard(host);
    memory.invalidate(shard, bytes);
    // Before anything of the shard is loaded.
    // SYNC: pairs with `Keeper::adopt` and with the end of an earlier boot: the host line that tells of it was read before.
    memory.fence_invalidations();
}

/// Makes a host seen before it claims anything.
// SYNC: pairs with `present`: of two hosts that arrive and then look around, at least one sees the other.
pub(crate) fn arrive<M: Memory>(memory: &M, layout: &Layout, host: u16, line: &HostLine) {
    line::publish_and_fence(memory, layout.host_line(host), &line.encode());
}

/// The hosts whose lines are not empty.
// SYNC: pairs with `arrive`.
pub(crate) fn hosts_present<M: Memory>(memory: &M, layout: &Layout) -> Result<u64, Fault> {
    let hosts = layout.geometry().hosts;
    memory.invalidate(layout.host_line(0), u64::from(hosts) * LINE);
    memory.fence_invalidations();
    let mut present = 0;
    for host in 0..hosts {
        // A line that is torn is being written: its host may be there.
        let is_free = line::load(memory, layout.host_line(host))? == Some([0; line::WORDS]);
        present |= u64::from(!is_free) << host;
    }
    Ok(present)
}

/// The highest incarnation that the slot's own lines show: a process may have died while it wrote one of them.
fn last_incarnation<M: Memory>(
    memory: &M,
    layout: &Layout,
    host: u16,
    slot: ProcessSlot,
) -> Result<u64, PoolError> {
    let line = Process::read_own(memory, layout, host, slot)?;
    let beat = Heartbeat::read(memory, layout.heartbeat_line(host, slot))?;
    Ok(line.map_or(0, |line| line.incarnation).max(beat.map_or(0, |beat| beat.incarnation)))
}

/// Refuses a process whose run directory does not know all that live as its host. Its words hold the incarnation of each
/// process that entered through them. A process line with a later one was written through other words, or through a file
/// that was removed. Whether that process lives is seen by its heartbeat, which is watched for as long as one may be silent.
/// The line of a process that has left is watched too while the host's says that it is live, and none that is known has said so: the
/// last one to leave writes that after its own.
// SYNC: `Local::enter` stores the incarnation before its process publishes a line or a beat with it.
fn expect_known<M: Memory>(
    memory: &M,
    layout: &Layout,
    words: &LocalLayout,
    member: &Member,
) -> Result<(), PoolError> {
    let Member { host, boot, .. } = *member;
    let is_known = |slot, incarnation| incarnation <= memory.local_load(words.incarnation(slot));
    let slots = || (0..layout.geometry().processes).map(ProcessSlot);
    let is_ours = |slot, line: Option<Process>| {
        line.is_some_and(|line| line.state == ProcessState::Live && is_known(slot, line.incarnation))
    };
    let (mut unknown, mut any_is_ours) = (Vec::new(), false);
    for slot in slots() {
        let line = Process::read_own(memory, layout, host, slot)?;
        let at = layout.heartbeat_line(host, slot);
        let is_unknown = match line {
            Some(line) => !is_known(slot, line.incarnation),
            // It is torn: its beats say whose it is.
            None => Heartbeat::read(memory, at)?.is_none_or(|beat| !is_known(slot, beat.incarnation)),
        };
        any_is_ours |= is_ours(slot, line);
        if is_unknown {
            let is_there = line.is_none_or(|line| line.state == ProcessState::Live);
            unknown.push((slot, at, line.map_or(0, |line| line.pid), is_there));
        }
    }
    if unknown.is_empty() {
        return Ok(());
    }
    // Those of another boot are judged by the host line and the view.
    let (host_line, _) = HostLine::read_torn(memory, layout, host, member.timeout.min(SETTLE))?;
    let any_is_there = unknown.iter().any(|&(.., is_there)| is_there);
    let is_leaving = host_line.state == HostState::Live && !any_is_ours && !Deviation::LeftIsGone.is_on();
    if host_line.boot != boot || !(any_is_there || is_leaving) {
        return Ok(());
    }
    // A line that is torn at every look is a sign of life as well, if it is torn in another way.
    let beats = |at| line::load_torn(memory, at);
    let before = unknown.iter().map(|&(_, at, ..)| beats(at)).collect::<Result<Vec<_>, _>>()?;
    // One that is known may have said so meanwhile.
    let any_comes = || {
        let mut lines = slots().map(|slot| Ok((slot, Process::read_own(memory, layout, host, slot)?)));
        lines.try_fold(false, |any, line: Result<_, Fault>| {
            line.map(|(slot, line)| any || is_ours(slot, line))
        })
    };
    let deadline = memory.now() + member.silence;
    loop {
        // A process that was stopped meanwhile looks once more.
        let is_late = memory.now() >= deadline;
        for (&(slot, at, pid, _), before) in unknown.iter().zip(&before) {
            let now = beats(at)?;
            if now != *before && !is_known(slot, Heartbeat::decode(&now.0).incarnation) {
                return Err(PoolError::Apart { host, slot: slot.0, pid });
            }
        }
        let host_line =
            line::load(memory, layout.host_line(host))?.and_then(|words| HostLine::decode(&words));
        let has_left = host_line.is_some_and(|line| line.state != HostState::Live);
        if is_late || !any_is_there && (has_left || any_comes()?) {
            return Ok(());
        }
        memory.yield_now();
    }
}

fn usable_slot<M: Memory>(memory: &M, layout: &Layout, member: &Member) -> Result<ProcessSlot, PoolError> {
    let geometry = layout.geometry();
    if member.host >= geometry.hosts {
        return Err(PoolError::Geometry {
            what: "the host id",
            value: member.host.into(),
            low: 0,
            high: u64::from(geometry.hosts) - 1,
        });
    }
    let slot = memory.slot();
    match slot.0 < geometry.processes {
        true => Ok(slot),
        false => Err(PoolError::NoSlot { host: member.host, slots: geometry.processes }),
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::Scratch;
    use polder_mem::{HostPlan, Mapped, Region};

    use super::*;
    use crate::format::{Geometry, Overwrite, Uuid, format};
    use crate::keeper::{MembershipChange, change_membership};
    use crate::testing::{formatted, plan_of};

    const TINY: Geometry =
        Geometry { hosts: 3, processes: 2, names: 5, levels: 2, chunk_bytes: 256, opens: 3, keepers: 3 };
    const BYTES: u64 = 64 << 10;

    fn member(host: u16, boot: u64) -> Member {
        let (timeout, silence) = (Duration::from_secs(5), Duration::from_millis(30));
        Member { timeout, silence, pid: 100 + u32::from(host), ..Member::new(host, boot) }
    }

    #[test]
    fn a_host_is_live_from_its_first_process_to_its_last() {
        let heap = formatted(&TINY, BYTES);
        let state = || HostLine::read(&heap, &Layout::new(&TINY, BYTES).unwrap(), 1, SETTLE).unwrap();
        let first = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let second = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 7)).unwrap();
        assert_eq!((state().state, state().boot, state().incarnation), (HostState::Live, 7, 1));
        assert_eq!(first.hosts_present(), Ok(0b10));
        assert!(second.peer_alive(1, ProcessSlot(0)).unwrap());
        first.detach().unwrap();
        assert_eq!(second.peer_state(1, ProcessSlot(0)), Ok(PeerState::Absent));
        assert_eq!(state().state, HostState::Live);
        second.detach().unwrap();
        assert_eq!(state().state, HostState::Left);
    }

    #[test]
    fn a_process_that_died_is_seen_and_swept_by_the_next() {
        let heap = formatted(&TINY, BYTES);
        let watcher = Pool::attach(heap.clone(), member(0, 7)).unwrap();
        let victim = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let seen = watcher.process(1, ProcessSlot(0)).unwrap();
        watcher.expect_alive(&seen, "message", 3).unwrap();
        let announced = victim.layout.announcement(1, ProcessSlot(0), 2);
        heap.store(announced, 99);
        victim.die();
        assert_eq!(watcher.peer_state(1, ProcessSlot(0)), Ok(PeerState::Dead));
        let lost = watcher.expect_alive(&seen, "message", 3).unwrap_err();
        assert!(lost.to_string().starts_with("host 1 pid 101 died or stopped"), "{lost}");
        let next = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 7)).unwrap();
        assert_eq!(heap.load(announced), Ok(0));
        assert_eq!(next.process(1, ProcessSlot(0)).unwrap().state, ProcessState::Dead);
        assert_eq!(next.host_incarnation, 1, "the host has not rebooted");
    }

    #[test]
    fn a_sibling_that_maintains_cleans_up_after_a_process_that_died() {
        let heap = formatted(&TINY, BYTES);
        let sibling = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 7)).unwrap();
        let victim = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let announced = victim.layout.announcement(1, ProcessSlot(0), 2);
        heap.store(announced, 99);
        sibling.maintain().unwrap();
        assert_eq!(heap.load(announced), Ok(99), "it lives");
        victim.die();
        sibling.maintain().unwrap();
        assert_eq!(heap.load(announced), Ok(0));
        assert_eq!(sibling.process(1, ProcessSlot(0)).unwrap().state, ProcessState::Dead);
    }

    #[test]
    fn a_heartbeat_that_maintains_waits_no_longer_than_it_may_for_who_has_the_lock() {
        let heap = formatted(&TINY, BYTES);
        let sibling = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 7)).unwrap();
        let victim = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        victim.die();
        let patience = Duration::from_millis(3);
        let held = sibling.local.layout.membership().lock(&sibling.memory, &sibling.local, patience).unwrap();
        let refused = sibling.maintain_within(patience).unwrap_err();
        assert!(matches!(refused, PoolError::Timeout { waited_ms: 3, .. }), "{refused}");
        drop(held);
        sibling.maintain_within(patience).unwrap();
        assert_eq!(sibling.process(1, ProcessSlot(0)).unwrap().state, ProcessState::Dead);
    }

    #[test]
    fn a_process_whose_words_do_not_know_one_that_lives_is_refused_until_that_is_silent() {
        let heap = formatted(&TINY, BYTES);
        let holder = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        // As in a host file that was just made.
        heap.process(1, ProcessSlot(1)).local_store(holder.local.layout.incarnation(ProcessSlot(0)), 0);
        let attach = || Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 7));
        let refused = std::thread::scope(|scope| {
            let refused = scope.spawn(attach);
            while !refused.is_finished() {
                holder.beat().unwrap();
            }
            refused.join().unwrap().unwrap_err()
        });
        assert_eq!(refused, PoolError::Apart { host: 1, slot: 0, pid: 101 });
        assert_eq!(
            heap.process(1, ProcessSlot(1)).local_load(holder.local.layout.incarnation(ProcessSlot(1))),
            0
        );
        holder.die();
        attach().unwrap();
    }

    #[test]
    fn processes_of_a_second_job_do_not_watch_those_that_left_before_it() {
        let heap = formatted(&TINY, BYTES);
        // Who watches them does so for a century.
        let member = || Member { silence: Duration::from_hours(24 * 36_525), ..member(1, 7) };
        let attach = |slot| Pool::attach(heap.process(1, ProcessSlot(slot)), member()).unwrap();
        let first = [attach(0), attach(1)];
        let words = first[0].local.layout;
        drop(first);
        // As in a host file that was just made.
        for slot in [0, 1].map(ProcessSlot) {
            heap.process(1, slot).local_store(words.incarnation(slot), 0);
        }
        let second = [attach(0), attach(1)];
        assert!(second.iter().all(|pool| pool.check_membership().is_ok()));
    }

    #[test]
    fn a_host_id_is_refused_to_another_boot_until_its_holder_has_left() {
        let heap = formatted(&TINY, BYTES);
        let holder = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let attach = || Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 8));
        let silent = attach().unwrap_err();
        assert_eq!(silent, PoolError::IdTaken { host: 1, boot: 7, epoch: 0 });
        assert!(silent.to_string().contains("boot 0x7") && silent.to_string().contains("evict 1 --fenced"));
        let refused = std::thread::scope(|scope| {
            let refused = scope.spawn(attach);
            while !refused.is_finished() {
                holder.beat().unwrap();
            }
            refused.join().unwrap().unwrap_err()
        });
        assert_eq!(refused, PoolError::HostLive { host: 1, boot: 7 });
        holder.check_membership().unwrap();
        drop(holder);
        let next = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 8)).unwrap();
        assert_eq!(next.host_incarnation, 2);
    }

    #[test]
    fn processes_of_a_host_that_has_booted_again_may_come_at_once() {
        let heap = formatted(&TINY, BYTES);
        Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap().die();
        for asked in [MembershipChange::Evict, MembershipChange::Fence] {
            let Member { timeout, silence, .. } = member(1, 7);
            change_membership(&heap, 1, asked, timeout, silence).unwrap();
        }
        let [one, two] = [0, 1].map(|slot| heap.process(1, ProcessSlot(slot)));
        let first = Pool::attach(one, member(1, 8)).unwrap();
        let second = Pool::attach(two, member(1, 8)).unwrap();
        assert_eq!([first.host_incarnation, second.host_incarnation], [2, 2]);
    }

    /// Host 1 ran here, as host 0 does, and goes on under another kernel (boot 8) or with another run directory (boot 7).
    #[test]
    fn a_process_whose_host_id_moved_away_from_here_is_not_called_dead_by_what_ran_here_before() {
        let scratch = Scratch::new();
        let process = |directory: &str, pool, host| {
            let directory = scratch.path().join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            let plan = HostPlan { pool, ..plan_of(&TINY, BYTES, host, &directory) };
            let path = scratch.path().join("region");
            let region = Region::open(&path).or_else(|_| Region::create(&path, BYTES)).unwrap();
            Mapped::coherent(region).attach(&plan).unwrap()
        };
        let here = process("here", 1, 0);
        format(&here, &TINY, Uuid(1), Overwrite::Refuse).unwrap();
        let patient = Member { silence: Duration::from_secs(60), ..member(0, 7) };
        let watcher = Pool::attach(here, patient).unwrap();
        let state = || watcher.peer_state(1, ProcessSlot(0)).unwrap();
        // Under another number the locks on the pool's file are not seen here, as those of another kernel are not.
        for (boot, pool) in [(8, 2), (7, 1)] {
            let holder = Pool::attach(process("here", 1, 1), member(1, 7)).unwrap();
            let before = holder.this_process();
            assert_eq!(state(), PeerState::Alive);
            holder.die();
            assert_eq!(state(), PeerState::Dead, "it died under this kernel");
            assert!(watcher.is_gone(&before).unwrap());
            Pool::attach(process("here", 1, 1), member(1, 7)).unwrap().detach().unwrap();

            let moved = Pool::attach(process("there", pool, 1), member(1, boot)).unwrap();
            let now = watcher.process(1, ProcessSlot(0)).unwrap();
            assert_eq!(now, moved.this_process(), "it has the slot of the one that died");
            moved.beat().unwrap();
            assert_eq!(state(), PeerState::Alive, "boot {boot}");
            watcher.expect_alive(&now, "message", 1).unwrap();
            assert!(!watcher.is_gone(&now).unwrap(), "a lock of it must not pass on");
            assert!(watcher.is_gone(&before).unwrap());
            drop(moved);
        }
    }

    #[test]
    fn a_host_id_or_slot_outside_the_pool_is_refused() {
        let heap = formatted(&TINY, BYTES);
        let refused = Pool::attach(heap.clone(), member(3, 7)).unwrap_err();
        assert_eq!(refused.to_string(), "the host id is 3, allowed are 0 to 2");
        let pool = Pool::attach(heap, member(0, 7)).unwrap();
        assert!(matches!(pool.peer_state(0, ProcessSlot(2)), Err(PoolError::Argument { .. })));
    }
}
