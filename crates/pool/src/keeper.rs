//! The keeper: the one voice that says who belongs to the pool.
//!
//! An incarnation of the keeper is authorised from outside: by the operator, a launcher, or a supervisor that counts its
//! restarts. The pool only makes sure that the highest incarnation counts. The keeper does three things:
//!
//! - It admits hosts that claim an id, if ids come from the keeper.
//! - It evicts hosts that a command asks to evict, and with `--evict-after` also hosts that fell silent.
//! - It takes over the shards of hosts that a command confirms to be off (fenced).
//!
//! `polder keeper` also gives the room of fenced hosts in caches to others: see [`kv`](crate::kv), and [`Keeper::take_back`].
//!
//! A request to the keeper stands on the claim line of the host id. It is the only kind of line with a checksum that several
//! hosts may write at the same time. The keeper also writes the shard and the host line of a fenced host, which writes no more.
//!
//! If a request is torn or overwritten, the process that still waits for an answer writes it again. The answer is the keeper's
//! grant line together with its view. A claimant holds the id under three conditions: the view has the host, the grant names
//! the claimant's nonce, and the grant is not newer than the view.

mod owner;

use std::iter;
use std::time::Duration;

use polder_mem::{Memory, Nanos, ProcessSlot};

use self::owner::KeeperFate;
pub(crate) use self::owner::Owner;
use crate::format::{Layout, SETTLE, read_superblock};
use crate::line;
use crate::membership::{
    Heartbeat, HeartbeatMonitor, HostLine, HostState, Process, ProcessState, Request, any_heartbeat,
    expect_host, milliseconds,
};
use crate::view::{
    CHANGES, Grant, IdSource, KeeperLines, View, Views, announced, newest_above, read_keeper, with_launched,
};
use crate::{Pool, PoolError};

/// What an incarnation of the keeper was started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeeperTask {
    /// The incarnation, from 1: each start of a keeper has a higher one than all before it.
    pub incarnation: u16,
    /// Who gives host ids from now on; `None` leaves it as it is.
    pub id_source: Option<IdSource>,
    /// A host is evicted when all its processes have been silent for so long; `None` leaves that to the operator.
    pub evict_after: Option<Duration>,
}

/// When the place of an earlier keeper may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceKeeper {
    /// Once that keeper said that it ended, or this kernel has its process no more.
    Gone,
    /// Also when that cannot be seen here: the caller knows that no such keeper goes on. One that does would write over what
    /// its successor says.
    Unseen,
}

/// The lowest incarnation that a keeper may start as now: higher than all before it, in a place that is free.
///
/// # Errors
/// [`PoolError::KeeperPlace`] when no place is free; those of [`read_superblock`].
pub fn next_incarnation<M: Memory>(memory: &M, replace: ReplaceKeeper) -> Result<u16, PoolError> {
    let layout = read_superblock(memory)?.layout()?;
    let highest = announced(memory, &layout)?.first().copied().unwrap_or(0);
    let mut refused = None;
    for asked in (1..=layout.geometry().keepers).map_while(|more| highest.checked_add(more)) {
        match expect_place(memory, &layout, asked, replace) {
            Ok(()) => return Ok(asked),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or(PoolError::KeeperIncarnation {
        asked: highest,
        highest,
        limit: layout.geometry().keepers,
    }))
}

/// That the place of incarnation `asked`, which is higher than all that were, is nobody's or may be taken.
fn expect_place<M: Memory>(
    memory: &M,
    layout: &Layout,
    asked: u16,
    replace: ReplaceKeeper,
) -> Result<(), PoolError> {
    let keepers = announced(memory, layout)?;
    let shares = |held: &&u16| layout.view_line(**held, 0) == layout.view_line(asked, 0);
    let Some(&held) = keepers.iter().find(shares) else { return Ok(()) };
    let owner = Owner::read(memory, layout, held)?;
    let refuse = |why| Err(PoolError::KeeperPlace { asked, held, pid: owner.pid(), why });
    let mut in_force = None;
    for keeper in keepers {
        if matches!(read_keeper(memory, layout, keeper)?.0, KeeperLines::View(_) | KeeperLines::Unclear) {
            in_force = Some(keeper);
            break;
        }
    }
    match owner.fate() {
        _ if in_force == Some(held) => {
            refuse("whose view is in force; take another incarnation, or format a pool with more --keepers")
        }
        KeeperFate::Runs => refuse("which runs; stop it first"),
        KeeperFate::Unseen if replace == ReplaceKeeper::Gone => {
            refuse("which another machine may run; say --force once all keepers before are gone for certain")
        }
        KeeperFate::Gone | KeeperFate::Unseen => Ok(()),
    }
}

/// The highest incarnation of a keeper that this pool has seen, 0 if none: the next must be higher.
///
/// # Errors
/// Those of [`read_superblock`].
pub fn last_incarnation<M: Memory>(memory: &M) -> Result<u16, PoolError> {
    let layout = read_superblock(memory)?.layout()?;
    Ok(newest_above(memory, &layout, 0)?.map_or(0, |(keeper, _)| keeper))
}

/// One incarnation of the keeper, the only writer of its block of lines.
#[derive(Debug)]
pub struct Keeper<M: Memory> {
    memory: M,
    layout: Layout,
    incarnation: u16,
    owner: Owner,
    view: View,
    grants: Vec<Grant>,
    /// When each grant was given, for claimants that die before they attach.
    granted_at: Vec<Nanos>,
    beats: u64,
    heartbeats: Option<HeartbeatMonitor>,
    /// How long a host may be in the middle of a line.
    settle: Duration,
}

impl<M: Memory> Keeper<M> {
    /// Starts an incarnation of the keeper, which takes over what the one before it said.
    ///
    /// # Errors
    /// [`PoolError::KeeperIncarnation`] when a keeper of this or a higher incarnation has run;
    /// [`PoolError::KeeperPlace`] when its place is one that may be another's; [`PoolError::Superseded`] when a higher
    /// one starts meanwhile.
    pub fn start(memory: M, charge: KeeperTask) -> Result<Self, PoolError> {
        Self::start_replacing(memory, charge, ReplaceKeeper::Gone)
    }

    /// As [`Keeper::start`], in a place that is free by `over`.
    ///
    /// # Errors
    /// Those of [`Keeper::start`].
    pub fn start_replacing(memory: M, charge: KeeperTask, replace: ReplaceKeeper) -> Result<Self, PoolError> {
        let layout = read_superblock(&memory)?.layout()?;
        Self::start_in(memory, layout, charge, Owner::this(), replace)
    }

    // SYNC: announces itself before it reads what older keepers said; pairs with `newest_above`. A process that had its place
    // before has written its last there, and a newer keeper has taken over what that said.
    pub(crate) fn start_in(
        memory: M,
        layout: Layout,
        charge: KeeperTask,
        owner: Owner,
        replace: ReplaceKeeper,
    ) -> Result<Self, PoolError> {
        let incarnation = charge.incarnation;
        let highest = newest_above(&memory, &layout, 0)?.map_or(0, |(keeper, _)| keeper);
        if incarnation <= highest {
            let limit = layout.geometry().keepers;
            return Err(PoolError::KeeperIncarnation { asked: incarnation, highest, limit });
        }
        expect_place(&memory, &layout, incarnation, replace)?;
        line::publish_and_fence(&memory, layout.view_line(incarnation, 0), &View::starting(incarnation));
        line::publish_and_fence(&memory, layout.keeper_owner_line(incarnation), &owner.encode(incarnation));
        let settle = charge.evict_after.unwrap_or(SETTLE).min(SETTLE);
        let (view, grants) = take_over(&memory, &layout, incarnation, charge.id_source, settle)?;
        let now = memory.now();
        let mut keeper = Self {
            granted_at: vec![now; grants.len()],
            beats: 0,
            settle,
            heartbeats: charge.evict_after.map(HeartbeatMonitor::new),
            memory,
            layout,
            incarnation,
            owner,
            view: View { epoch: u64::from(incarnation) * CHANGES, keeper: incarnation, ..view },
            grants,
        };
        for host in 0..keeper.hosts() {
            keeper.write_grant(host, keeper.grants[usize::from(host)]);
        }
        keeper.publish(keeper.view)?;
        Ok(keeper)
    }

    /// Ends, and says that this keeper writes no more: its place may be taken by any host then. What it said stays in force.
    // SYNC: everything that it wrote is in memory before.
    pub fn end(self) {
        let ended = self.owner.ended().encode(self.incarnation);
        line::publish_and_fence(&self.memory, self.layout.keeper_owner_line(self.incarnation), &ended);
    }

    fn hosts(&self) -> u16 {
        self.layout.geometry().hosts
    }

    /// The view that this keeper has published.
    #[must_use]
    pub const fn view(&self) -> &View {
        &self.view
    }

    /// Looks once at everything: who asks, who fell silent, and whether a newer keeper runs. Call it a few times a
    /// second.
    ///
    /// # Errors
    /// [`PoolError::Superseded`] when a newer keeper runs: this one must end. Damaged lines of hosts are passed over.
    pub fn tick(&mut self) -> Result<(), PoolError> {
        self.expect_highest()?;
        self.beat();
        for host in 0..self.hosts() {
            self.evict_if_silent(host)?;
            let words = line::read(&self.memory, self.layout.claim_line(host))?;
            match words.as_ref().and_then(Request::decode) {
                Some(Request::Claim { nonce, boot }) => self.consider(host, nonce, boot)?,
                Some(Request::Evict { incarnation }) if self.holder(host)? == incarnation => {
                    self.evict(host)?;
                }
                Some(Request::Fence { incarnation }) if self.may_fence(host, incarnation)? => {
                    self.fence(host)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn beat(&mut self) {
        self.beats += 1;
        let beat = Heartbeat { count: self.beats, incarnation: 0 };
        beat.publish(&self.memory, self.layout.keeper_heartbeat_line(self.incarnation));
    }

    fn expect_highest(&self) -> Result<(), PoolError> {
        match newest_above(&self.memory, &self.layout, self.incarnation)? {
            None => Ok(()),
            Some((by, _)) => Err(PoolError::Superseded { incarnation: self.incarnation, by }),
        }
    }

    /// Makes `view` the next view.
    // SYNC: of this keeper, which publishes and then looks for a newer one, and a newer one, which announces itself and
    // then reads this view, at least one sees the other.
    fn publish(&mut self, view: View) -> Result<(), PoolError> {
        let epoch = self.view.epoch + 1;
        if epoch.is_multiple_of(CHANGES) {
            let limit = self.layout.geometry().keepers;
            return Err(PoolError::KeeperIncarnation {
                asked: self.incarnation,
                highest: self.incarnation,
                limit,
            });
        }
        self.view = View { epoch, ..view };
        let at = self.layout.view_line(self.incarnation, View::line_of(epoch));
        line::publish_and_fence(&self.memory, at, &self.view.encode());
        self.expect_highest()
    }

    /// Writes the grant of `host`, which is in force once a view is published that is not older.
    // SYNC: nobody sees that view before this grant.
    fn write_grant(&mut self, host: u16, grant: Grant) {
        self.grants[usize::from(host)] = grant;
        line::publish_and_fence(
            &self.memory,
            self.layout.grant_line(self.incarnation, host),
            &grant.encode(),
        );
    }

    fn host_line(&self, host: u16) -> Result<HostLine, PoolError> {
        HostLine::read(&self.memory, &self.layout, host, self.settle)
    }

    /// Whether `host` belongs to the pool now.
    fn has(&self, host: u16) -> Result<bool, PoolError> {
        Ok(with_launched(&self.memory, &self.layout, self.view, self.settle)?.has(host))
    }

    /// The incarnation of `host` that belongs to the pool, 0 if none.
    pub(crate) fn holder(&self, host: u16) -> Result<u64, PoolError> {
        match (self.has(host)?, self.view.id_source) {
            (false, _) => Ok(0),
            (true, IdSource::Keeper) => Ok(self.grants[usize::from(host)].incarnation),
            (true, IdSource::Launcher) => {
                let (line, _) = HostLine::read_torn(&self.memory, &self.layout, host, self.settle)?;
                Ok(line.incarnation.max(1))
            }
        }
    }

    fn consider(&mut self, host: u16, nonce: u64, boot: u64) -> Result<(), PoolError> {
        let answered = nonce == 0 || nonce == self.grants[usize::from(host)].nonce;
        if answered
            || self.view.id_source == IdSource::Launcher
            || self.has(host)?
            || !self.is_clean(host, boot)?
        {
            return Ok(());
        }
        self.admit(host, nonce, boot)
    }

    /// Whether nobody can write the shard of `host` any more but the claimant, whose boot is `boot`.
    fn is_clean(&self, host: u16, boot: u64) -> Result<bool, PoolError> {
        if self.view.is_fenced(host) {
            return Ok(true);
        }
        let grant = self.grants[usize::from(host)];
        let Ok(line) = self.host_line(host) else { return Ok(false) };
        let arrived = line.incarnation >= grant.incarnation;
        let left = line.state != HostState::Live || line.boot == boot;
        Ok(left && (arrived || grant.boot == boot))
    }

    /// Gives the id `host` to the claimant with this nonce, as a new incarnation of the host.
    pub(crate) fn admit(&mut self, host: u16, nonce: u64, boot: u64) -> Result<(), PoolError> {
        let old = self.grants[usize::from(host)];
        let seen = self.host_line(host).map_or(0, |line| line.incarnation);
        let incarnation = old.incarnation.max(old.evicted_through).max(seen).saturating_add(1);
        let epoch = self.view.epoch + 1;
        self.write_grant(host, Grant { nonce, boot, incarnation, epoch, ..old });
        self.granted_at[usize::from(host)] = self.memory.now();
        self.forget_heartbeats(host);
        let bit = 1 << host;
        self.publish(View { members: self.view.members | bit, fenced: self.view.fenced & !bit, ..self.view })
    }

    /// Takes `host` out of the view; nothing happens when it is not in it.
    ///
    /// # Errors
    /// [`PoolError::Superseded`] when a newer keeper runs; it decides then.
    pub fn evict(&mut self, host: u16) -> Result<(), PoolError> {
        expect_host(&self.layout, host)?;
        let incarnation = self.holder(host)?;
        if incarnation == 0 {
            return self.expect_highest();
        }
        let old = self.grants[usize::from(host)];
        let evicted_through = old.evicted_through.max(incarnation);
        self.write_grant(host, Grant { evicted_through, ..old });
        let bit = 1 << host;
        let View { members, evicted, fenced, .. } = self.view;
        // One that the launcher sent again was fenced before, and counts as fenced no longer.
        let fenced = fenced & !bit;
        self.publish(View { members: members & !bit, evicted: evicted | bit, fenced, ..self.view })
    }

    /// Takes back the id of a host that left as this incarnation, so that any host may have it. Nothing happens where it has not left, or
    /// somebody has come since.
    ///
    /// # Errors
    /// Those of [`Keeper::evict`].
    pub fn take_back(&mut self, host: u16, incarnation: u64) -> Result<(), PoolError> {
        expect_host(&self.layout, host)?;
        let line = self.host_line(host).unwrap_or_default();
        let has_left = line.state == HostState::Left && line.incarnation == incarnation;
        if has_left && self.holder(host)? == incarnation { self.evict(host) } else { Ok(()) }
    }

    fn evict_if_silent(&mut self, host: u16) -> Result<(), PoolError> {
        if self.heartbeats.is_none() || !self.has(host)? {
            return Ok(());
        }
        let Ok(line) = self.host_line(host) else { return Ok(()) };
        let grant = self.grants[usize::from(host)];
        let arrived = self.view.id_source == IdSource::Launcher || line.incarnation == grant.incarnation;
        let silent = match line.state {
            HostState::Live if arrived => self.is_silent(host)?,
            HostState::Left if arrived => false,
            _ => self.memory.now() >= self.granted_at[usize::from(host)] + self.silence(),
        };
        if silent { self.evict(host) } else { Ok(()) }
    }

    fn silence(&self) -> Duration {
        self.heartbeats.as_ref().map_or(Duration::MAX, HeartbeatMonitor::silence)
    }

    fn is_silent(&mut self, host: u16) -> Result<bool, PoolError> {
        let lines = self.layout.heartbeat_lines(host);
        let Some(heartbeats) = &mut self.heartbeats else { return Ok(false) };
        let mut silent = true;
        for at in lines {
            silent &= heartbeats.is_silent(&self.memory, at)?;
        }
        Ok(silent)
    }

    fn forget_heartbeats(&mut self, host: u16) {
        let lines = self.layout.heartbeat_lines(host);
        if let Some(heartbeats) = &mut self.heartbeats {
            lines.for_each(|at| heartbeats.forget(at));
        }
    }

    fn may_fence(&self, host: u16, incarnation: u64) -> Result<bool, PoolError> {
        let through = self.grants[usize::from(host)].evicted_through;
        Ok(!self.has(host)? && !self.view.is_fenced(host) && incarnation != 0 && incarnation == through)
    }

    /// Records that `host`, which was evicted, is surely off, and takes over its shard in place: its processes are dead,
    /// what they announced is void, its objects stay. Only the operator can know this. If the host is not off, it can destroy
    /// what its successor writes.
    ///
    /// # Errors
    /// [`PoolError::NotEvicted`] when the host is still in the view; [`PoolError::Superseded`].
    pub fn fence(&mut self, host: u16) -> Result<(), PoolError> {
        expect_host(&self.layout, host)?;
        if self.has(host)? {
            return Err(PoolError::NotEvicted { host, epoch: self.view.epoch });
        }
        if self.view.is_fenced(host) {
            return self.expect_highest();
        }
        self.expect_highest()?;
        // Before the view says so, after which this is not done again.
        self.adopt(host)?;
        self.publish(View { fenced: self.view.fenced | 1 << host, ..self.view })
    }

    /// Puts the lines of an evicted host's shard right, as its last process would have done. Its id is another's to take as soon
    /// as its host line says that it left.
    fn adopt(&self, host: u16) -> Result<(), PoolError> {
        let (line, _) = HostLine::read_torn(&self.memory, &self.layout, host, self.settle)?;
        // A process that left has done it, or a keeper has that died after it: another may be in by now.
        if line.state != HostState::Live || line.incarnation > self.grants[usize::from(host)].evicted_through
        {
            return Ok(());
        }
        for slot in (0..self.layout.geometry().processes).map(ProcessSlot) {
            let Ok(line) = Process::read(&self.memory, &self.layout, host, slot, self.settle) else {
                continue;
            };
            clear_announcements(&self.memory, &self.layout, host, slot);
            if line.state == ProcessState::Live {
                let dead = Process { state: ProcessState::Dead, ..line };
                line::publish(&self.memory, self.layout.process_line(host, slot), &dead.encode());
            }
        }
        let left = HostLine { state: HostState::Left, ..line };
        // SYNC: the process that is told that the host has left sees all of this.
        line::publish_and_fence(&self.memory, self.layout.host_line(host), &left.encode());
        Ok(())
    }
}

/// Voids what the process at `slot` of `host` announced. Until others see it, they only keep extents for longer.
fn clear_announcements<M: Memory>(memory: &M, layout: &Layout, host: u16, slot: ProcessSlot) {
    let opens = layout.geometry().opens;
    for index in 0..opens {
        memory.store(layout.announcement(host, slot, index), 0);
    }
    memory.write_back(layout.announcement(host, slot, 0), u64::from(opens) * 8);
    // HARMLESS(sfence -> drop): the host line that is announced last brings a fence for all of them.
    memory.sfence();
}

/// What a new keeper starts from: the view and the grants of the highest older one that said anything.
fn take_over<M: Memory>(
    memory: &M,
    layout: &Layout,
    incarnation: u16,
    id_source: Option<IdSource>,
    settle: Duration,
) -> Result<(View, Vec<Grant>), PoolError> {
    let mut base = View::INITIAL;
    for older in announced(memory, layout)?.into_iter().filter(|&older| older < incarnation) {
        if let (KeeperLines::View(view), _) = read_keeper(memory, layout, older)? {
            base = view;
            break;
        }
    }
    let id_source = id_source.unwrap_or(base.id_source);
    let members = with_launched(memory, layout, base, settle)?.members;
    let mut grants = Vec::new();
    for host in 0..layout.geometry().hosts {
        grants.push(inherit(memory, layout, &base, members >> host & 1 == 1, host, settle)?);
    }
    let members = if id_source == IdSource::Keeper { members } else { 0 };
    Ok((View { id_source, members, ..base }, grants))
}

/// The grant of `host` that a new keeper starts from.
fn inherit<M: Memory>(
    memory: &M,
    layout: &Layout,
    base: &View,
    is_member: bool,
    host: u16,
    settle: Duration,
) -> Result<Grant, PoolError> {
    let line = HostLine::read(memory, layout, host, settle).unwrap_or_default();
    let epoch = base.epoch;
    match Grant::read(memory, layout, base.keeper, host, settle) {
        Err(PoolError::Memory(fault)) => Err(fault.into()),
        Ok(grant) if base.id_source == IdSource::Keeper && grant.epoch <= epoch => Ok(grant),
        // Ids came from the launcher; or the older keeper was about to give this one to somebody, and never did.
        Ok(grant) => Ok(Grant {
            nonce: 0,
            boot: line.boot,
            incarnation: line.incarnation,
            epoch: 0,
            evicted_through: grant.evicted_through,
        }),
        // A damaged grant: the process that is in is the one that the host line names, and everyone before it is out.
        Err(_) => {
            let evicted_through = line.incarnation - u64::from(is_member && line.incarnation > 0);
            Ok(Grant { nonce: 0, boot: line.boot, incarnation: line.incarnation, epoch: 0, evicted_through })
        }
    }
}

/// What an operator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MembershipChange {
    /// The host is to leave the view.
    Evict,
    /// The host, which was evicted, is surely off.
    Fence,
}

/// Has `change` carried out for `host`: by the keeper if one runs, and else as a keeper for this one change, whose
/// incarnation is the next. Returns the view that has it.
///
/// # Errors
/// [`PoolError::NotEvicted`] when a host is to be fenced that was not evicted; [`PoolError::NoKeeper`] when a keeper
/// runs and does not answer within `timeout`; those of [`Keeper::start`].
pub fn change_membership<M: Memory>(
    memory: &M,
    host: u16,
    change: MembershipChange,
    timeout: Duration,
    silence: Duration,
) -> Result<View, PoolError> {
    change_membership_replacing(memory, host, change, timeout, silence, ReplaceKeeper::Gone)
}

/// As [`change_membership`]; a keeper that has to be started takes a place that is free by `over`.
///
/// # Errors
/// Those of [`change_membership`].
pub fn change_membership_replacing<M: Memory>(
    memory: &M,
    host: u16,
    change: MembershipChange,
    timeout: Duration,
    silence: Duration,
    replace: ReplaceKeeper,
) -> Result<View, PoolError> {
    let layout = read_superblock(memory)?.layout()?;
    expect_host(&layout, host)?;
    let mut views = Views::new(timeout);
    let settle = timeout.min(SETTLE);
    let look = |views: &mut Views| {
        views.read(memory, &layout, |view| Grant::read(memory, &layout, view.keeper, host, settle))
    };
    let (view, grant) = look(&mut views)?;
    let request = match change {
        MembershipChange::Evict if !view.has(host) => return Ok(view),
        MembershipChange::Evict if view.id_source == IdSource::Keeper => {
            Request::Evict { incarnation: grant.incarnation }
        }
        MembershipChange::Evict => {
            let (line, _) = HostLine::read_torn(memory, &layout, host, settle)?;
            Request::Evict { incarnation: line.incarnation.max(1) }
        }
        MembershipChange::Fence if view.has(host) => {
            return Err(PoolError::NotEvicted { host, epoch: view.epoch });
        }
        // Nobody was evicted who could go on.
        MembershipChange::Fence if view.is_fenced(host) || !view.had_evicted(host) => return Ok(view),
        MembershipChange::Fence => Request::Fence { incarnation: grant.evicted_through },
    };
    let keeper_beats = view.keeper != 0
        && any_heartbeat(memory, iter::once(layout.keeper_heartbeat_line(view.keeper)), silence)?;
    if !keeper_beats {
        return carry_out(memory, host, change, replace);
    }
    let deadline = memory.now() + timeout;
    let at = layout.claim_line(host);
    loop {
        let is_late = memory.now() >= deadline;
        if line::read(memory, at)? != Some(request.encode()) {
            line::publish_and_fence(memory, at, &request.encode());
        }
        let (view, grant) = look(&mut views)?;
        if is_done(request, host, &view, &grant) {
            return Ok(view);
        }
        if is_late {
            return Err(PoolError::NoKeeper { waited_ms: milliseconds(timeout) });
        }
        memory.yield_now();
    }
}

fn is_done(request: Request, host: u16, view: &View, grant: &Grant) -> bool {
    match request {
        Request::Claim { .. } => false,
        Request::Fence { .. } => view.is_fenced(host),
        Request::Evict { incarnation } => {
            let replaced = grant.stands_in(view, host) && grant.incarnation > incarnation;
            let out = !view.has(host) || view.id_source == IdSource::Launcher || replaced;
            view.had_evicted(host) && grant.evicted_through >= incarnation && out
        }
    }
}

fn carry_out<M: Memory>(
    memory: &M,
    host: u16,
    change: MembershipChange,
    replace: ReplaceKeeper,
) -> Result<View, PoolError> {
    let incarnation = next_incarnation(memory, replace)?;
    let charge = KeeperTask { incarnation, id_source: None, evict_after: None };
    let mut keeper = Keeper::start_replacing(memory.clone(), charge, replace)?;
    let done = match change {
        MembershipChange::Evict => keeper.evict(host),
        MembershipChange::Fence => keeper.fence(host),
    };
    let view = keeper.view;
    keeper.end();
    done.map(|()| view)
}

impl<M: Memory> Pool<M> {
    /// Has `host` evicted from the view; see [`change_membership`].
    ///
    /// # Errors
    /// Those of [`change_membership`].
    pub fn evict(&self, host: u16) -> Result<View, PoolError> {
        change_membership(
            self.memory(),
            host,
            MembershipChange::Evict,
            self.member().timeout,
            self.member().silence,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use polder_mem::{Heap, HeapShape};

    use super::*;
    use crate::claim::{IdClaim, claim_host_id};
    use crate::format::{Geometry, Overwrite, Uuid, format};
    use crate::local::LocalLayout;
    use crate::{Member, PeerState};

    const TINY: Geometry =
        Geometry { hosts: 3, processes: 2, names: 5, levels: 2, chunk_bytes: 256, opens: 3, keepers: 4 };
    const BYTES: u64 = 64 << 10;
    const SILENCE: Duration = Duration::from_millis(20);
    const PATIENCE: Duration = Duration::from_secs(20);

    fn formatted() -> Heap {
        let layout = Layout::new(&TINY, BYTES).unwrap();
        let local_words = LocalLayout::new(&layout).words();
        let heap = Heap::new(HeapShape { bytes: BYTES, hosts: 4, processes: 2, local_words, bells: 6 });
        format(&heap, &TINY, Uuid(1), Overwrite::Refuse).unwrap();
        heap
    }

    fn keeper(memory: &Heap, incarnation: u16, id_source: Option<IdSource>) -> Keeper<Heap> {
        Keeper::start(memory.clone(), KeeperTask { incarnation, id_source, evict_after: None }).unwrap()
    }

    fn member(host: u16, boot: u64) -> Member {
        Member { timeout: PATIENCE, silence: SILENCE, ..Member::new(host, boot) }
    }

    fn claim_of(host: Option<u16>, nonce: u64) -> IdClaim {
        IdClaim { host, boot: 100 + nonce, nonce, timeout: PATIENCE, silence: SILENCE }
    }

    /// Lets a keeper tick while `work` runs.
    fn with_ticking_keeper<T>(mut keeper: Keeper<Heap>, work: impl FnOnce() -> T) -> (Keeper<Heap>, T) {
        let stop = std::sync::Mutex::new(false);
        std::thread::scope(|scope| {
            let ticking = scope.spawn(|| {
                while !*stop.lock().unwrap() {
                    keeper.tick().unwrap();
                    std::thread::yield_now();
                }
                keeper
            });
            let done = catch_unwind(AssertUnwindSafe(work));
            *stop.lock().unwrap() = true;
            (ticking.join().unwrap(), done.unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    #[test]
    fn a_host_that_came_back_from_the_launcher_after_it_was_fenced_is_not_fenced_once_it_is_evicted_again() {
        let heap = formatted();
        let mut keeper = keeper(&heap, 1, Some(IdSource::Launcher));
        let attach = |slot, boot| Pool::attach(heap.process(1, ProcessSlot(slot)), member(1, boot)).unwrap();
        let _off = attach(0, 7);
        keeper.evict(1).unwrap();
        keeper.fence(1).unwrap();
        let back = attach(1, 8);
        back.check_membership().unwrap();
        assert_eq!(keeper.view().fenced & !back.view().unwrap().members, 0);
        keeper.evict(1).unwrap();
        assert!(matches!(back.check_membership(), Err(PoolError::Evicted { host: 1, .. })));
        assert!(!keeper.view().is_fenced(1), "nobody has said that it is off again");
        keeper.fence(1).unwrap();
        assert!(keeper.view().is_fenced(1));
    }

    #[test]
    fn a_keeper_that_adopts_a_shard_again_leaves_the_next_boot_alone() {
        let heap = formatted();
        let off = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let mut keeper = keeper(&heap, 1, None);
        keeper.evict(1).unwrap();
        let early = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 8)).unwrap_err();
        assert_eq!(early, PoolError::IdTaken { host: 1, boot: 7, epoch: keeper.view().epoch });
        keeper.adopt(1).unwrap();
        let next = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 8)).unwrap();
        keeper.adopt(1).unwrap();
        assert_eq!(next.process(1, ProcessSlot(1)), Ok(next.this_process()));
        next.check_membership().unwrap();
        off.die();
    }

    #[test]
    fn without_a_keeper_an_order_is_carried_out_as_the_next_incarnation() {
        let heap = formatted();
        let one = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let two = Pool::attach(heap.process(2, ProcessSlot(0)), member(2, 7)).unwrap();
        assert_eq!(two.view().unwrap().members, 0b110);
        let view = two.evict(1).unwrap();
        assert_eq!((view.epoch, view.keeper, view.id_source), (1_000_002, 1, IdSource::Launcher));
        assert_eq!(one.check_membership(), Err(PoolError::Evicted { host: 1, epoch: 1_000_002 }));
        assert_eq!(two.peer_state(1, ProcessSlot(0)), Ok(PeerState::Evicted));
        let again = Pool::attach(heap.process(1, ProcessSlot(1)), member(1, 7)).unwrap();
        assert_eq!(again.this_process().host_incarnation, 2);
        again.check_membership().unwrap();
        assert!(one.check_membership().is_err(), "the old incarnation stays out");
        assert_eq!(two.view().unwrap().members, 0b110);
    }

    #[test]
    fn places_of_keepers_that_ended_are_taken_again_for_ever_and_what_they_said_stays() {
        let heap = formatted();
        let charge = |incarnation| KeeperTask { incarnation, id_source: None, evict_after: None };
        let mut first = keeper(&heap, 1, Some(IdSource::Keeper));
        first.admit(2, 5, 105).unwrap();
        first.end();
        for turn in 0..4 * TINY.keepers {
            let incarnation = next_incarnation(&heap, ReplaceKeeper::Gone).unwrap();
            assert_eq!(incarnation, turn + 2);
            let next = keeper(&heap, incarnation, None);
            assert_eq!(
                (next.view().members, next.view().id_source, next.grants[2].nonce),
                (0b100, IdSource::Keeper, 5)
            );
            next.end();
        }
        // Ordered without a keeper, one after the other.
        for _ in 0..2 * TINY.keepers {
            let _one = Pool::attach(heap.process(2, ProcessSlot(0)), member(2, 105)).unwrap();
            change_membership(&heap, 2, MembershipChange::Evict, PATIENCE, SILENCE).unwrap();
            change_membership(&heap, 2, MembershipChange::Fence, PATIENCE, SILENCE).unwrap();
            let mut next = keeper(&heap, next_incarnation(&heap, ReplaceKeeper::Gone).unwrap(), None);
            next.admit(2, 6, 105).unwrap();
            next.end();
        }
        let live = keeper(&heap, next_incarnation(&heap, ReplaceKeeper::Gone).unwrap(), None);
        let held = live.incarnation;
        let refused = Keeper::start(heap.clone(), charge(held + TINY.keepers)).unwrap_err();
        assert!(refused.to_string().contains("whose view is in force; take another"), "{refused}");
        keeper(&heap, held + 1, None).end();
        let refused = Keeper::start(heap.clone(), charge(held + TINY.keepers)).unwrap_err();
        assert!(
            matches!(refused, PoolError::KeeperPlace { why: "which runs; stop it first", .. }),
            "{refused}"
        );
        assert_eq!(next_incarnation(&heap, ReplaceKeeper::Unseen), Ok(held + 2), "another place is free");
    }

    #[test]
    fn a_place_of_a_keeper_that_cannot_be_seen_is_taken_by_force_alone() {
        let heap = formatted();
        let layout = Layout::new(&TINY, BYTES).unwrap();
        for incarnation in 1..=TINY.keepers {
            let charge = KeeperTask { incarnation, id_source: Some(IdSource::Keeper), evict_after: None };
            // As one of another kernel.
            let owner = Owner::default();
            Keeper::start_in(heap.clone(), layout.clone(), charge, owner, ReplaceKeeper::Gone).unwrap();
        }
        let refused = next_incarnation(&heap, ReplaceKeeper::Gone).unwrap_err().to_string();
        assert!(
            refused.contains("has no place: it is that of keeper 1") && refused.contains("--force"),
            "{refused}"
        );
        let refused = change_membership(&heap, 1, MembershipChange::Fence, PATIENCE, SILENCE);
        assert!(refused.is_ok(), "nothing is to be done");
        let next = next_incarnation(&heap, ReplaceKeeper::Unseen).unwrap();
        assert_eq!(next, TINY.keepers + 1);
        let charge = KeeperTask { incarnation: next, id_source: None, evict_after: None };
        let keeper = Keeper::start_replacing(heap.clone(), charge, ReplaceKeeper::Unseen).unwrap();
        assert_eq!((keeper.view().id_source, last_incarnation(&heap)), (IdSource::Keeper, Ok(next)));
    }

    #[test]
    fn a_claimant_gets_the_id_and_a_second_is_refused() {
        let heap = formatted();
        let (_, ()) = with_ticking_keeper(keeper(&heap, 1, Some(IdSource::Keeper)), || {
            let refused = Pool::attach(heap.process(2, ProcessSlot(0)), member(2, 101)).unwrap_err();
            assert!(matches!(refused, PoolError::NotAdmitted { host: 2, .. }), "{refused}");
            let granted = claim_host_id(&heap, &claim_of(Some(2), 1)).unwrap();
            assert_eq!((granted.host, granted.incarnation), (2, 1));
            let pool = Pool::attach(heap.process(2, ProcessSlot(0)), member(2, 101)).unwrap();
            // As patient as a machine may be busy: one beat is enough.
            let patient = IdClaim { silence: PATIENCE, ..claim_of(Some(2), 2) };
            std::thread::scope(|scope| {
                let second = scope.spawn(|| claim_host_id(&heap, &patient));
                while !second.is_finished() {
                    pool.beat().unwrap();
                }
                assert_eq!(second.join().unwrap(), Err(PoolError::HostLive { host: 2, boot: 101 }));
            });
            let other = claim_host_id(&heap, &claim_of(None, 3)).unwrap();
            assert_eq!(other.host, 0);
        });
    }

    #[test]
    fn a_claim_without_a_keeper_says_so() {
        let heap = formatted();
        let impatient = IdClaim { timeout: Duration::from_millis(5), ..claim_of(Some(1), 1) };
        let refused = claim_host_id(&heap, &impatient).unwrap_err();
        assert_eq!(refused, PoolError::NoKeeper { waited_ms: 5 });
        let at = Layout::new(&TINY, BYTES).unwrap().claim_line(1);
        assert_eq!(line::read(&heap, at), Ok(Some([0; line::WORDS])), "the claim was taken back");
    }

    #[test]
    fn a_keeper_takes_over_from_the_one_before_and_ends_it() {
        let heap = formatted();
        let one = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let mut old = keeper(&heap, 1, Some(IdSource::Keeper));
        old.admit(2, 5, 105).unwrap();
        assert_eq!(old.view().members, 0b110);
        let new = keeper(&heap, 2, None);
        assert_eq!((new.view().members, new.view().id_source), (0b110, IdSource::Keeper));
        assert_eq!(new.grants[2].nonce, 5);
        assert_eq!(old.evict(1), Err(PoolError::Superseded { incarnation: 1, by: 2 }));
        assert_eq!(old.tick(), Err(PoolError::Superseded { incarnation: 1, by: 2 }));
        one.check_membership().unwrap();
        let refused =
            Keeper::start(heap.clone(), KeeperTask { incarnation: 2, id_source: None, evict_after: None });
        assert!(matches!(refused, Err(PoolError::KeeperIncarnation { asked: 2, highest: 2, limit: 4 })));
        assert_eq!(last_incarnation(&heap), Ok(2));
    }

    #[test]
    fn a_silent_host_is_evicted_and_its_id_given_away_once_it_is_fenced() {
        let heap = formatted();
        let charge =
            KeeperTask { incarnation: 1, id_source: Some(IdSource::Keeper), evict_after: Some(SILENCE) };
        let mut keeper = Keeper::start(heap.clone(), charge).unwrap();
        keeper.admit(1, 1, 101).unwrap();
        let pool = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 101)).unwrap();
        let announced = pool.layout().announcement(1, ProcessSlot(0), 0);
        heap.store(announced, 5);
        while keeper.view().has(1) {
            keeper.tick().unwrap();
        }
        assert!(matches!(pool.check_membership(), Err(PoolError::Evicted { host: 1, .. })));
        let (keeper, refused) = with_ticking_keeper(keeper, || {
            claim_host_id(&heap, &IdClaim { timeout: 50 * SILENCE, ..claim_of(Some(1), 2) }).unwrap_err()
        });
        assert!(matches!(refused, PoolError::IdTaken { host: 1, .. }), "{refused}");
        let (_, granted) = with_ticking_keeper(keeper, || {
            change_membership(&heap, 1, MembershipChange::Fence, PATIENCE, PATIENCE).unwrap();
            claim_host_id(&heap, &claim_of(Some(1), 3)).unwrap()
        });
        assert_eq!(granted.incarnation, 2);
        assert_eq!(heap.load(announced), Ok(0), "the shard was adopted");
        pool.die();
    }

    #[test]
    fn a_running_keeper_carries_orders_out() {
        let heap = formatted();
        let one = Pool::attach(heap.process(1, ProcessSlot(0)), member(1, 7)).unwrap();
        let (keeper, view) = with_ticking_keeper(keeper(&heap, 1, None), || {
            let early = change_membership(&heap, 1, MembershipChange::Fence, PATIENCE, PATIENCE).unwrap_err();
            assert!(matches!(early, PoolError::NotEvicted { host: 1, .. }), "{early}");
            change_membership(&heap, 1, MembershipChange::Evict, PATIENCE, PATIENCE).unwrap()
        });
        assert!(!view.has(1));
        assert_eq!(keeper.view().keeper, 1, "no other keeper was needed");
        assert!(one.check_membership().is_err());
    }

    #[test]
    fn one_of_the_claimants_of_an_id_wins_in_a_thousand_races() {
        let heap = formatted();
        let handles: Vec<Heap> = (1..4).map(|host| heap.process(host, ProcessSlot(0))).collect();
        let mut keeper = keeper(&heap, 1, Some(IdSource::Keeper));
        for race in 0..1000 {
            let (ticked, won) = with_ticking_keeper(keeper, || race_for_an_id(&handles, race));
            keeper = ticked;
            assert_eq!(won, 1, "race {race}");
            keeper.evict(1).unwrap();
            keeper.fence(1).unwrap();
        }
    }

    /// How many claimants believe that they hold the id 1; a winner beats until the others have seen it.
    fn race_for_an_id(handles: &[Heap], race: u64) -> usize {
        let refused = std::sync::Mutex::new(0);
        let run = &|memory: &Heap, nonce: u64| match claim_host_id(memory, &claim_of(Some(1), nonce)) {
            Err(error) => {
                assert!(matches!(error, PoolError::HostLive { host: 1, .. }), "{error}");
                *refused.lock().unwrap() += 1;
                false
            }
            Ok(_) => {
                let at = Layout::new(&TINY, BYTES).unwrap().heartbeat_line(1, ProcessSlot(0));
                for count in 1.. {
                    Heartbeat { count, incarnation: nonce }.publish(memory, at);
                    std::thread::yield_now();
                    if *refused.lock().unwrap() == handles.len() - 1 {
                        break;
                    }
                }
                true
            }
        };
        std::thread::scope(|scope| {
            let nonces = 4 * race + 1..;
            let claimants: Vec<_> = handles
                .iter()
                .zip(nonces)
                .map(|(memory, nonce)| scope.spawn(move || run(memory, nonce)))
                .collect();
            claimants.into_iter().filter_map(|claimant| claimant.join().unwrap().then_some(())).count()
        })
    }
}
