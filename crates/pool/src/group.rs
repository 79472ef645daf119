//! Groups: ranks that call the same operations in the same order, and write only lines of their own.
//!
//! Each rank owns one extent: a *progress line* that says how far it has come, and *staging* that its peers read.
//! All else is reading the progress lines of others. Three invariants carry every operation:
//!
//! 1. **One writer.** A rank writes its own extent only, so every line has one writer for ever.
//! 2. **The window.** A rank publishes progress in operation `k` only after it has seen every peer in operation
//!    `k - 1`, or has what depends on all of them. A peer that is in `k - 1` has returned from `k - 2`. So no two ranks are ever more than one operation apart.
//!    A progress line has two signatures, of this operation and of the one before. One of them is always the one to compare
//!    with.
//! 3. **Two halves.** Operation `k` stages in half `k % 2`. The half last held operation `k - 2`. A rank passes the window
//!    before it writes its first byte of staging, so every reader of `k - 2` has returned.
//!
//! Ranks that met by name begin with a little staging, which grows when an operation gains by it.
//!
//! After an error a group is broken for good. The rank publishes which peer it gave up on, so that the others fail at once
//! and name the same peer. Then nothing in its extent changes any more.

pub(crate) mod barrier;
#[cfg(feature = "hostile")]
pub mod hostile;
mod join;
mod progress;
mod signature;
mod staging;

use std::cell::{Cell, RefCell};
use std::time::Duration;

use polder_mem::{Bell, Fault, Liveness, Memory, Nanos, Offset, ProcessSlot};
use polder_platform::sized;
use polder_schedule::{DIRECT_BYTES, SEGMENT_BYTES, STAGING_BYTES};

use crate::collectives::{CollectiveCache, too_long};
use crate::deaths::Deaths;
use crate::deviation::Deviation;
use crate::line::{self, Words};
use crate::wait::{self, Patience};
use crate::{Peer, PoolError};

pub use join::JoinedGroup;
use join::Seats;
pub(crate) use join::process_of;
pub(crate) use progress::MAX_STEP;
pub use progress::{LINES, staging_at};
pub(crate) use progress::{Mark, Pulse};
use progress::{Own, PeerProgress, Progress};
use signature::MAX_RANKS;
pub(crate) use signature::{MAX_BYTES, Signature};

/// One rank's place: its extent, and how to see and wake its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// The first byte of its extent, a multiple of the line.
    pub at: Offset,
    /// Bytes of its extent: [`extent_bytes`].
    pub bytes: u64,
    /// Its host; ranks of one host see each other's stores without flushes.
    pub host: u16,
    /// Its slot on that host, for [`Memory::liveness`].
    pub slot: ProcessSlot,
    /// Its process id, for errors.
    pub pid: u32,
    /// Its doorbell, when it runs under this kernel.
    pub bell: Option<Bell>,
    /// A word in the pool that its process counts up while it lives.
    pub heartbeat: Option<Offset>,
    /// A line in the pool, and what it holds while its process is at the slot.
    pub sign: Option<(Offset, Words)>,
}

impl RankPlace {
    /// Whether its process is gone: another is at its slot, its kernel says so, or its heartbeat has stood still for `silence`.
    pub(crate) fn is_dead<M: Memory>(
        &self,
        memory: &M,
        pulse: &Pulse,
        silence: Duration,
    ) -> Result<bool, Fault> {
        if let Some((at, words)) = self.sign
            && line::read(memory, at)?.is_some_and(|now| now != words)
        {
            return Ok(true);
        }
        // What this kernel knows of the slot of another kernel's process is of an earlier process.
        let liveness = self.bell.map_or(Liveness::Unknown, |_| memory.liveness(self.host, self.slot));
        match (liveness, self.heartbeat) {
            (Liveness::Dead, _) => Ok(true),
            (Liveness::Alive, _) | (Liveness::Unknown, None) => Ok(false),
            (Liveness::Unknown, Some(at)) => {
                // Before the look: this process may be stopped after it.
                let now = memory.now();
                Ok(pulse.silent_since(memory, at)? + silence < now)
            }
        }
    }
}

/// How a group waits and how much it stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// Staging of each rank in bytes, both halves together; a multiple of two lines. Ranks that meet by name take less until a
    /// message needs more.
    pub staging_bytes: u64,
    /// Bytes of a chunk that one round of a long operation moves.
    pub segment_bytes: u64,
    /// Messages up to so many bytes go in one exchange, in which every rank reads everything. In a group of more than four ranks
    /// they are shorter, so that a rank reads no more than among four.
    pub direct_bytes: u64,
    /// From this size of a message on, it is found out by timing whether stores past the caches are faster where ordinary
    /// ones do as well.
    pub stream_bytes: u64,
    /// How long one wait for a peer may take.
    pub timeout: Duration,
    /// A peer under another kernel whose heartbeat stands still for so long is dead.
    pub silence: Duration,
    /// How to wait.
    pub patience: Patience,
    /// The epoch of the view, for errors.
    pub epoch: u64,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            staging_bytes: STAGING_BYTES,
            segment_bytes: SEGMENT_BYTES,
            direct_bytes: DIRECT_BYTES,
            stream_bytes: 4 << 10,
            timeout: Duration::from_secs(30),
            silence: Duration::from_secs(5),
            patience: Patience::DEDICATED,
            epoch: 0,
        }
    }
}

/// The bytes of one rank's extent.
#[must_use]
pub fn extent_bytes(options: &GroupOptions) -> u64 {
    staging_at(Offset(0)).0 + options.staging_bytes
}

/// The ranks that call operations together, as one of them sees them.
pub struct Group<M: Memory> {
    memory: M,
    rank: usize,
    members: Vec<RankPlace>,
    /// Where the staging of each rank begins, and how much of it each has now.
    staging: Vec<Offset>,
    staging_bytes: u64,
    /// What holds the extents of ranks that met by name.
    seats: Option<Seats<M>>,
    peers_progress: Vec<PeerProgress>,
    pulses: Vec<Pulse>,
    own: RefCell<Progress>,
    /// Whether we have come further than we have said.
    owes: Cell<bool>,
    /// Since when this rank looks at what it waits for without a gap, and when it last did.
    looks: Cell<[Nanos; 2]>,
    options: GroupOptions,
    /// The number of the current or last operation.
    sequence: u64,
    operation: Signature,
    /// The operation before the current one.
    before: Signature,
    /// The last operation that ended here by what every peer did in it.
    heard_all: Option<u64>,
    broken: Option<PoolError>,
    deaths: Deaths,
    pub(crate) collective_cache: CollectiveCache,
    local: bool,
    interrupt: Option<Interrupt>,
    /// Bytes of the message that operations are pieces of.
    message: Option<u64>,
}

/// Asked before each sleep of a wait: whether to give the operation up.
pub type Interrupt = Box<dyn Fn() -> bool + Send>;

/// Why a wait ended without its answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The process of this rank is gone.
    Dead(usize),
    /// This rank did not come within the timeout.
    Late(usize, Duration),
    /// This rank called something else than we did as the operation of this number.
    Mismatch(usize, u64, Signature),
    /// This rank's line or data is none that a correct rank writes.
    Corrupt(Offset, &'static str),
    /// A peer gave up, and says why.
    Told(usize, Mark),
    /// The caller does not want to wait any longer.
    Interrupted,
    /// The memory failed.
    Memory(polder_mem::Fault),
}

impl From<polder_mem::Fault> for Failure {
    fn from(fault: polder_mem::Fault) -> Self {
        Self::Memory(fault)
    }
}

impl<M: Memory> Group<M> {
    /// A group over extents whose lines before [`staging_at`] were zeroed before any rank came here.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for a rank, an extent or staging that cannot be.
    pub fn over_extents(
        memory: M,
        members: Vec<RankPlace>,
        rank: usize,
        options: GroupOptions,
    ) -> Result<Self, PoolError> {
        check(&memory, &members, rank, &options)?;
        let local = members.iter().all(|member| member.host == members[rank].host);
        let peers_progress = members.iter().map(|_| PeerProgress::default()).collect();
        let pulses = members.iter().map(|_| Pulse::default()).collect();
        let staging = members.iter().map(|member| staging_at(member.at)).collect();
        Ok(Self {
            memory,
            rank,
            members,
            staging,
            staging_bytes: options.staging_bytes,
            seats: None,
            peers_progress,
            pulses,
            own: RefCell::default(),
            owes: Cell::new(false),
            looks: Cell::default(),
            options,
            sequence: 0,
            operation: Signature::default(),
            before: Signature::default(),
            heard_all: None,
            broken: None,
            deaths: Deaths::default(),
            collective_cache: CollectiveCache::default(),
            local,
            interrupt: None,
            message: None,
        })
    }

    /// Lets the group tell of a death that another group of this process has met.
    pub(crate) fn sharing(mut self, deaths: Deaths) -> Self {
        self.deaths = deaths;
        self
    }

    /// Lets `asked` end waits, say when the user presses Ctrl-C: the group is broken then, as after any error.
    pub fn on_wait(&mut self, asked: Interrupt) {
        self.interrupt = Some(asked);
    }

    /// Changes how long one wait for a peer may take, from the next operation on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.options.timeout = timeout;
    }

    /// Says that the operations from the next one on are pieces of a message of so many bytes, or that they are whole. Ranks
    /// compare the message's bytes in place of a piece's: each cuts it alike.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the message is longer than one may be.
    pub fn set_message(&mut self, bytes: Option<u64>) -> Result<(), PoolError> {
        if let Some(bytes) = bytes.filter(|&bytes| bytes > MAX_BYTES) {
            return Err(too_long(bytes));
        }
        self.message = bytes;
        Ok(())
    }

    /// Bytes of the message that operations are pieces of, if they are.
    pub(crate) fn message(&self) -> Option<u64> {
        self.message
    }

    /// Changes how to wait, from the next operation on.
    pub fn set_patience(&mut self, patience: Patience) {
        self.options.patience = patience;
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The ranks, as this one sees them.
    #[must_use]
    pub fn members(&self) -> &[RankPlace] {
        &self.members
    }

    /// The host of each rank.
    pub fn hosts(&self) -> impl Iterator<Item = u16> {
        self.members.iter().map(|member| member.host)
    }

    /// How many operations were begun.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// How the group waits and stages.
    #[must_use]
    pub fn options(&self) -> &GroupOptions {
        &self.options
    }

    /// The operation that `rank` has called and this one has not, with what it works on; none where they are as far.
    #[must_use]
    pub fn called_ahead(&self, rank: usize) -> Option<String> {
        let (standing, at) = (self.peers_progress.get(rank)?, self.members[rank].at);
        if self.is_remote(rank) {
            progress::forget(&self.memory, at);
            // HARMLESS(fence_invalidations -> sfence -> drop), one look ahead: it only tells what is known of a peer.
            self.memory.fence_invalidations();
        }
        standing.refresh(&self.memory, at).ok()?;
        let sequence = standing.sequence();
        let ahead = (sequence > self.sequence).then(|| standing.signature_of(sequence)).flatten();
        ahead.map(|signature| signature.to_string())
    }

    /// Whether the process of `rank` is gone, broken as the group may be. Asked again and again, it finds silent hosts too.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub fn has_died(&self, rank: usize) -> Result<bool, PoolError> {
        if Deviation::NobodyHasDied.is_on() {
            return Ok(false);
        }
        Ok(rank != self.rank && self.is_dead(rank).map_err(PoolError::Memory)?)
    }

    /// Whether the group can go on.
    ///
    /// # Errors
    /// [`PoolError::Broken`] after an error of the group.
    pub fn expect_whole(&self) -> Result<(), PoolError> {
        let broken = |cause: &PoolError| PoolError::Broken { what: "group", cause: Box::new(cause.clone()) };
        self.broken.as_ref().map_or(Ok(()), |cause| Err(broken(cause)))
    }

    /// Looks afresh at `rank`, and fails with what it gave up with if it has. A barrier may have seen it come, and no more since then.
    ///
    /// # Errors
    /// The group's error; the group is broken then.
    pub(crate) fn expect_going_on(&mut self, rank: usize) -> Result<(), PoolError> {
        // It never comes so far. This one look has to do, so that its fence counts here.
        self.poll_fresh(rank, u64::MAX).map_err(|failure| self.fail(failure)).map(drop)
    }

    /// Tells the others that this rank does not go on in the group. It still knows which ranks live.
    pub fn give_up(&mut self) {
        if self.broken.is_none() {
            self.fail(Failure::Interrupted);
        }
    }

    /// The memory that the group works on.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Runs one operation: `body` between its begin and its end, and its failure turned into the one error that every
    /// survivor gets.
    pub(crate) fn operation<T>(
        &mut self,
        signature: Signature,
        body: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, PoolError> {
        self.expect_whole()?;
        self.before = std::mem::replace(&mut self.operation, signature);
        self.sequence += 1;
        body(self).map_err(|failure| self.fail(failure))
    }

    /// Passes the window (invariant 2): every peer is at least in the operation before this one. Only now may this rank
    /// publish progress in this one, and stage.
    pub(crate) fn pass_window(&self) -> Result<(), Failure> {
        let mut others = (0..self.size()).filter(|&rank| rank != self.rank);
        if self.heard_all != Some(self.sequence - 1) {
            self.await_all(progress::at(self.sequence - 1, 0))?;
            // The operation before may have ended here without a look at every peer, as a short broadcast does at its root.
            others.clone().try_for_each(|rank| self.compare_as(self.sequence - 1, self.before, rank))?;
        }
        self.own.borrow_mut().enter(self.sequence, self.operation);
        // A peer that was ahead has said what this operation is to it before we were in it.
        others.try_for_each(|rank| self.compare(rank))
    }

    /// Notes that the operation has ended here by what every peer did in it, also where this rank saw only some of them: from each peer
    /// a chain of ranks leads here, of which each saw the one before it in this operation, and called the same. So the window
    /// behind it needs no look.
    // SYNC: each rank of the chain has fenced before it published, and looked afresh at the one before.
    pub(crate) fn has_heard_all(&mut self) {
        self.heard_all = Some(self.sequence);
    }

    /// Where the staging of `rank` begins.
    pub(crate) fn staging(&self, rank: usize) -> Offset {
        self.staging[rank]
    }

    /// Bytes of staging that each rank has now, both halves together.
    pub(crate) fn staging_bytes(&self) -> u64 {
        self.staging_bytes
    }

    /// The first byte of the half that this operation stages in (invariant 3).
    pub(crate) fn staging_half(&self) -> u64 {
        self.sequence % 2 * (self.staging_bytes / 2)
    }

    /// Sets this operation's own words of the line; they go out with the next step.
    pub(crate) fn set_own_words(&self, own: Own) {
        self.own.borrow_mut().set_own(own);
    }

    /// The own words of a peer that was seen in this operation.
    pub(crate) fn peer_words(&self, rank: usize) -> Own {
        self.peers_progress[rank].own()
    }

    /// That `rank` has published what no correct rank does.
    pub(crate) fn corrupt(&self, rank: usize) -> Failure {
        Failure::Corrupt(progress::line_at(self.members[rank].at), "progress line of a peer")
    }

    /// Comes to `step` without saying so at once: nobody waits for it soon. It goes out with the next step, or before
    /// this rank waits.
    pub(crate) fn enter_step(&self, step: u32) {
        self.own.borrow_mut().advance(self.sequence, step);
        self.owes.set(true);
    }

    /// Publishes that this rank has come to `step` of its operation. What it staged must have been fenced before.
    // SYNC: pairs with `poll_fresh`.
    pub(crate) fn publish_step(&self, step: u32) {
        self.own.borrow_mut().advance(self.sequence, step);
        self.publish();
    }

    fn publish(&self) {
        self.owes.set(false);
        self.own.borrow().publish(&self.memory, self.members[self.rank].at, self.local);
        for (rank, member) in self.members.iter().enumerate() {
            if let Some(bell) = member.bell.filter(|_| rank != self.rank) {
                self.memory.wake(bell);
            }
        }
    }

    /// Waits until every peer has come to `step` of this operation.
    pub(crate) fn await_steps(&self, step: u32) -> Result<(), Failure> {
        self.await_all(progress::at(self.sequence, step))
    }

    /// Waits until each of these ranks has come to its step of this operation.
    pub(crate) fn await_turns(
        &self,
        turns: impl Iterator<Item = (usize, u32)> + Clone,
    ) -> Result<(), Failure> {
        self.await_marks(turns.map(|(rank, step)| (rank, progress::at(self.sequence, step))))
    }

    fn await_all(&self, want: u64) -> Result<(), Failure> {
        self.await_marks((0..self.size()).filter(|&rank| rank != self.rank).map(|rank| (rank, want)))
    }

    fn await_marks(&self, wanted: impl Iterator<Item = (usize, u64)> + Clone) -> Result<(), Failure> {
        let behind = || wanted.clone().filter(|&(rank, want)| self.peers_progress[rank].mark() < want);
        loop {
            let Some((rank, want)) = behind().next() else { return Ok(()) };
            if behind().nth(1).is_none() {
                return self.await_mark(rank, want, std::iter::empty);
            }
            self.look_at_all(behind())?;
            if let Some((rank, want)) = behind().next() {
                self.await_mark(rank, want, || behind().skip(1))?;
            }
        }
    }

    /// Looks once at several peers, with one fence for all.
    fn look_at_all(&self, wanted: impl Iterator<Item = (usize, u64)> + Clone) -> Result<(), Failure> {
        for (rank, _) in wanted.clone().filter(|&(rank, _)| self.is_remote(rank)) {
            progress::forget(&self.memory, self.members[rank].at);
        }
        // HARMLESS(fence_invalidations -> sfence -> drop), one look at all: a line from before the invalidation is an older
        // one, and whoever is behind by it is looked at again.
        self.memory.fence_invalidations();
        for (rank, want) in wanted {
            self.poll_cached(rank, want)?;
        }
        Ok(())
    }

    /// Waits until `rank` has come to `want`. The `others` are waited for after it: that one of them is dead ends this wait, too.
    fn await_mark<I: Iterator<Item = (usize, u64)>>(
        &self,
        rank: usize,
        want: u64,
        others: impl Fn() -> I,
    ) -> Result<(), Failure> {
        if self.peers_progress[rank].mark() >= want {
            return Ok(());
        }
        if self.poll_fresh(rank, want)?.is_some() {
            return Ok(());
        }
        if self.owes.get() {
            self.publish();
        }
        let looks = Cell::new(0);
        let begin = self.memory.now();
        self.looks.set([begin; 2]);
        let mut deadline = begin + self.options.timeout;
        let mut latest = deadline + self.options.timeout;
        loop {
            let came = wait::until(
                &self.memory,
                self.members[self.rank].bell.unwrap_or(Bell(0)),
                self.options.patience,
                deadline,
                || self.poll_fresh(rank, want),
                || {
                    self.check_peer(rank, want, &looks)?;
                    others().try_for_each(|(other, want)| self.expect_there(other, want))
                },
            )?;
            if came.is_some() {
                return Ok(());
            }
            // A rank that stood still has seen too little of its peers to judge them.
            if self.is_recent(self.looks_since()) && !Deviation::CountsNaps.is_on() {
                latest = self.memory.now() + self.options.timeout;
            } else if self.late(rank, want, latest)? {
                return Ok(());
            }
            deadline = latest.min(self.memory.now() + self.recent() * 2);
        }
    }

    /// Looks afresh at the line of `rank`.
    // SYNC: pairs with `publish_step`; whatever was fenced before it can be read once this returns something.
    fn poll_fresh(&self, rank: usize, want: u64) -> Result<Option<()>, Failure> {
        if self.is_remote(rank) {
            progress::forget(&self.memory, self.members[rank].at);
            // HARMLESS(fence_invalidations -> sfence -> drop), one look at one: an older line means another look.
            self.memory.fence_invalidations();
        }
        self.poll_cached(rank, want)
    }

    /// Looks at the line of `rank` as this host's caches have it.
    fn poll_cached(&self, rank: usize, want: u64) -> Result<Option<()>, Failure> {
        let standing = &self.peers_progress[rank];
        if standing.refresh(&self.memory, self.members[rank].at)? {
            self.compare(rank)?;
        }
        let came = standing.mark() >= want;
        match standing.gave_up() {
            // What it gave up later does not concern us yet.
            Some(mark) if !came || standing.sequence() <= self.sequence && !mark.is_left() => {
                Err(Failure::Told(rank, mark))
            }
            _ => Ok(came.then_some(())),
        }
    }

    /// Holds what `rank` has published against what a correct rank can be doing while we are here.
    fn compare(&self, rank: usize) -> Result<(), Failure> {
        if self.peers_progress[rank].mark() < progress::at(self.sequence, 0) {
            return Ok(());
        }
        self.compare_as(self.sequence, self.operation, rank)
    }

    /// Holds what `rank` called as operation `sequence`, in which it was seen, against what we called.
    fn compare_as(&self, sequence: u64, ours: Signature, rank: usize) -> Result<(), Failure> {
        match self.peers_progress[rank].signature_of(sequence) {
            Some(theirs) if theirs == ours => Ok(()),
            Some(theirs) => Err(Failure::Mismatch(rank, sequence, theirs)),
            None => Err(self.corrupt(rank)),
        }
    }

    /// Asked before each further sleep: may we still hope for `rank`?
    fn check_peer(&self, rank: usize, want: u64, looks: &Cell<u64>) -> Result<(), Failure> {
        looks.set(looks.get() + 1);
        self.looks_since();
        self.own.borrow_mut().wait_for(rank, want, looks.get());
        self.publish();
        if self.interrupt.as_ref().is_some_and(|asked| asked()) {
            return Err(Failure::Interrupted);
        }
        self.expect_there(rank, want)?;
        for other in (0..self.size()).filter(|&other| other != self.rank && other != rank) {
            if self.is_remote(other) {
                progress::forget(&self.memory, self.members[other].at);
                // HARMLESS(fence_invalidations -> sfence -> drop), one look for bad news: it comes with the next.
                self.memory.fence_invalidations();
            }
            if self.peers_progress[other].refresh(&self.memory, self.members[other].at)? {
                self.compare(other)?;
            }
            if let Some(mark) = self.peers_progress[other].gave_up().filter(|mark| !mark.is_left()) {
                return Err(Failure::Told(other, mark));
            }
        }
        Ok(())
    }

    fn alive(&self, rank: usize) -> Result<(), Failure> {
        if self.is_dead(rank)? { Err(Failure::Dead(rank)) } else { Ok(()) }
    }

    fn is_dead(&self, rank: usize) -> Result<bool, Fault> {
        self.members[rank].is_dead(&self.memory, &self.pulses[rank], self.options.silence)
    }

    /// That `rank` lives, or came to `want` before it died; else fails with the rank that died first, as far as is known. One that died
    /// because of another has said so, or waited for it.
    fn expect_there(&self, rank: usize, want: u64) -> Result<(), Failure> {
        if !self.is_dead(rank)? || self.poll_fresh(rank, want)?.is_some() {
            return Ok(());
        }
        let mut first = rank;
        for _ in 0..self.size() {
            match self.peers_progress[first].waits_for() {
                Some((next, want)) if next < self.size() && next != self.rank => {
                    let is_dead = self.is_dead(next)?;
                    // What it said before it died counts.
                    if self.poll_fresh(next, want)?.is_some() || !is_dead {
                        break;
                    }
                    first = next;
                }
                _ => break,
            }
        }
        Err(Failure::Dead(first))
    }

    /// The deadline has come while waiting for `rank`, and it has come as well (true), or whoever holds it up is about to go on
    /// (false), which is waited for until `latest`. Fails with whom all others wait for.
    fn late(&self, rank: usize, want: u64, latest: Nanos) -> Result<bool, Failure> {
        // This process may have been stopped since it last looked.
        if self.poll_fresh(rank, want)?.is_some() {
            return Ok(true);
        }
        let mut late = rank;
        for _ in 0..self.size() {
            let Some((next, want)) = self.peers_progress[late].waits_for().filter(|_| !self.is_torn(late))
            else {
                break;
            };
            let has_come = self.has_arrived(next, want);
            if has_come && self.is_still_polling(late) && self.memory.now() < latest {
                return Ok(false);
            }
            if has_come || next == self.rank || next >= self.size() {
                break;
            }
            late = next;
        }
        if self.is_dead(late)? {
            // It may have said why since the last look, and then ended.
            self.poll_fresh(late, u64::MAX)?;
            return Err(Failure::Dead(late));
        }
        Err(Failure::Late(late, self.options.timeout))
    }

    /// Whether everybody should be able to see that `rank` has come to `want`.
    fn has_arrived(&self, rank: usize, want: u64) -> bool {
        if rank == self.rank {
            return self.own.borrow().mark() >= want;
        }
        self.peers_progress.get(rank).is_some_and(|standing| standing.mark() >= want)
            && !self.is_torn(rank)
            && self.alive(rank).is_ok()
    }

    /// Whether `rank` was stopped while it wrote its line.
    fn is_torn(&self, rank: usize) -> bool {
        self.peers_progress[rank].torn().is_some_and(|since| !self.is_recent(since))
    }

    /// Whether `rank` still looks at what it waits for: if that has come, it has come to our host only.
    fn is_still_polling(&self, rank: usize) -> bool {
        self.is_recent(self.peers_progress[rank].looked())
    }

    /// Notes that this rank looks, and returns since when it does so without a gap.
    fn looks_since(&self) -> Nanos {
        let (now, [since, last]) = (self.memory.now(), self.looks.get());
        let since = if self.is_recent(last) { since } else { now };
        self.looks.set([since, now]);
        since
    }

    /// Whether `rank` looks for us, whom it has not seen come: then it was us who stood still.
    fn waits_for_us(&self, rank: usize) -> bool {
        self.is_still_polling(rank)
            && self.peers_progress[rank].waits_for().is_some_and(|(next, _)| next == self.rank)
    }

    /// For how long a peer that looks and sleeps in turn may not have been seen to: it may wait for a CPU, too.
    fn recent(&self) -> Duration {
        let naps = self.options.patience.nap * 4;
        if Deviation::CountsNaps.is_on() { naps } else { naps.max(self.options.timeout / 4) }
    }

    fn is_recent(&self, moment: Nanos) -> bool {
        moment + self.recent() > self.memory.now()
    }

    /// Breaks the group and says so to the others.
    pub(crate) fn fail(&mut self, failure: Failure) -> PoolError {
        let failure = self.own_mismatch(failure);
        let mark = self.mark_of(&failure);
        let error = self.explain(failure);
        self.deaths.note(&error);
        self.own.borrow_mut().give_up(mark);
        self.publish();
        self.broken = Some(error.clone());
        error
    }

    /// Says that this rank expects nothing more of the group, and nobody should of it.
    pub(crate) fn leave(&self) {
        if self.broken.is_none() {
            let mark = self.deaths.first().map_or(Mark::left(self.rank), Mark::left_after_death);
            self.own.borrow_mut().give_up(mark);
            self.publish();
        }
    }

    /// Holds the last operation against what the peers called, after this rank has left and said so.
    pub(crate) fn compare_last(&mut self) -> Result<(), PoolError> {
        if self.broken.is_some() {
            return Ok(());
        }
        // SYNC: of two ranks that leave, one at least sees the other's line.
        self.memory.mfence();
        for rank in (0..self.size()).filter(|&rank| rank != self.rank) {
            // Whatever else is wrong with a peer does not concern this rank any more.
            let _looked = self.poll_fresh(rank, 0);
            if let Err(differs @ Failure::Mismatch(..)) = self.compare(rank) {
                return Err(self.fail(differs));
            }
        }
        Ok(())
    }

    /// What the others are told: whom to blame.
    fn mark_of(&self, failure: &Failure) -> Mark {
        match *failure {
            Failure::Dead(rank) => Mark::dead(rank),
            Failure::Late(rank, _) => Mark::late(if self.waits_for_us(rank) { self.rank } else { rank }),
            Failure::Mismatch(rank, ..) => Mark::mismatch(rank),
            Failure::Interrupted => self.deaths.first().map_or(Mark::own(self.rank), Mark::own_after_death),
            Failure::Corrupt(..) | Failure::Memory(_) => Mark::own(self.rank),
            // Its line could not be read just now: a third rank finds the difference in the other.
            Failure::Told(by, mark) if mark.is_mismatch() && mark.rank() == self.rank => Mark::mismatch(by),
            Failure::Told(_, mark) => mark.death_met_by_writer().map_or(mark, Mark::own_after_death),
        }
    }

    fn explain(&self, failure: Failure) -> PoolError {
        let (epoch, sequence) = (self.options.epoch, self.sequence);
        let what = self.operation.name();
        let dead = |peer| PoolError::PeerDead { peer, what, epoch, sequence };
        let late = |peer, waited: Duration| {
            let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            PoolError::Timeout { peer, what, epoch, sequence, waited_ms }
        };
        let gave_up = |peer| PoolError::GaveUp { peer, what, epoch, sequence };
        match failure {
            Failure::Dead(rank) => dead(self.peer(rank)),
            Failure::Late(rank, waited) => late(self.peer(rank), waited),
            Failure::Mismatch(rank, sequence, theirs) => self.mismatch(rank, sequence, theirs),
            Failure::Corrupt(offset, what) => PoolError::Corrupt { offset, what },
            Failure::Memory(fault) => PoolError::Memory(fault),
            Failure::Interrupted => PoolError::Interrupted { what, sequence },
            Failure::Told(by, mark) => {
                if let Some(process) = mark.death_met_by_writer() {
                    let is_self = self.is_of(self.rank, process);
                    return if is_self { gave_up(self.peer(by)) } else { dead(self.ranked(process)) };
                }
                let blamed = self.peer(if mark.rank() < self.size() { mark.rank() } else { by });
                if mark.is_dead() && mark.rank() != self.rank {
                    dead(blamed)
                } else if mark.is_late() && mark.rank() != self.rank {
                    late(blamed, self.options.timeout)
                } else {
                    gave_up(self.peer(by))
                }
            }
        }
    }

    pub(crate) fn peer(&self, rank: usize) -> Peer {
        let RankPlace { host, pid, .. } = self.members[rank];
        Peer::new(host, pid).ranked(rank)
    }

    fn is_of(&self, rank: usize, process: Peer) -> bool {
        (self.members[rank].host, self.members[rank].pid) == (process.host, process.pid)
    }

    /// A process with its rank, where it is one of the group.
    fn ranked(&self, process: Peer) -> Peer {
        (0..self.size()).find(|&rank| self.is_of(rank, process)).map_or(process, |rank| self.peer(rank))
    }

    fn mismatch(&self, rank: usize, sequence: u64, theirs: Signature) -> PoolError {
        let ours = if sequence == self.sequence { self.operation } else { self.before };
        PoolError::Mismatch {
            peer: self.peer(rank),
            theirs: theirs.to_string(),
            ours: ours.to_string(),
            sequence,
        }
    }

    /// If a peer told of a mismatch, in this operation or the one before: our own, with it or with the rank that it names. One
    /// of the two must differ from us as well. So a third rank that hears it from us differs from us, or from the rank that we name.
    fn own_mismatch(&self, failure: Failure) -> Failure {
        let Failure::Told(by, mark) = failure else { return failure };
        if !mark.is_mismatch() {
            return failure;
        }
        let others = [mark.rank(), by].into_iter().filter(|&rank| rank != self.rank && rank < self.size());
        let calls = [(self.sequence - 1, self.before), (self.sequence, self.operation)];
        let own = others.into_iter().find_map(|rank| {
            // It may have come that far since we last looked at it.
            let _looked = self.poll_fresh(rank, 0);
            calls.into_iter().find_map(|(sequence, ours)| {
                let theirs = self.peers_progress[rank].signature_of(sequence)?;
                (theirs != ours).then_some(Failure::Mismatch(rank, sequence, theirs))
            })
        });
        own.unwrap_or(failure)
    }

    /// Whether all ranks live on one host: then nothing needs a flush.
    pub(crate) fn is_local(&self) -> bool {
        self.local
    }

    /// Whether another rank lives on our host.
    pub(crate) fn has_local_peers(&self) -> bool {
        (0..self.size()).any(|rank| rank != self.rank && !self.is_remote(rank))
    }

    fn is_remote(&self, rank: usize) -> bool {
        self.members[rank].host != self.members[self.rank].host
    }
}

fn check<M: Memory>(
    memory: &M,
    members: &[RankPlace],
    rank: usize,
    options: &GroupOptions,
) -> Result<(), PoolError> {
    let bad = |what, value: String, expected| Err(PoolError::Argument { what, value, expected });
    if rank >= members.len() || members.len() > MAX_RANKS {
        return bad(
            "rank",
            format!("{rank} of {}", members.len()),
            "a rank below the size, and at most 4096 ranks",
        );
    }
    if !options.staging_bytes.is_multiple_of(2 * polder_mem::LINE) || options.staging_bytes == 0 {
        let bytes = sized(options.staging_bytes);
        return bad("staging", bytes, "bytes that are a positive multiple of 128");
    }
    for member in members {
        let end = member.at.0.checked_add(member.bytes);
        let inside = end.is_some_and(|end| end <= memory.bytes());
        if !inside || member.at.line() != member.at || member.bytes < extent_bytes(options) {
            let extent = format!("[{}, +{})", member.at, member.bytes);
            return bad(
                "extent",
                extent,
                "line-aligned, inside the region, and as large as the staging needs",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use polder_mem::{Heap, HeapShape};

    use super::*;

    /// GroupOptions for tests: little staging, and short waits.
    pub(crate) fn quick() -> GroupOptions {
        GroupOptions {
            staging_bytes: 4096,
            timeout: Duration::from_secs(10),
            patience: Patience { spins: 20, yields: 20, nap: Duration::from_millis(1) },
            ..GroupOptions::default()
        }
    }

    /// The ranks of `hosts` side by side from the start of a region, each with a bell of its own.
    pub(crate) fn side_by_side(hosts: &[u16], options: &GroupOptions) -> Vec<RankPlace> {
        let bytes = extent_bytes(options);
        let member = |rank: usize| {
            let slot = hosts[..rank].iter().filter(|&&host| host == hosts[rank]).count();
            RankPlace {
                at: Offset(bytes * rank as u64),
                bytes,
                host: hosts[rank],
                slot: ProcessSlot(u16::try_from(slot).unwrap()),
                pid: 100 + u32::try_from(rank).unwrap(),
                bell: Some(Bell(u32::try_from(rank).unwrap())),
                heartbeat: None,
                sign: None,
            }
        };
        (0..hosts.len()).map(member).collect()
    }

    /// Runs `body` as each rank, on a thread of its own; a rank dies when its body returns.
    pub(crate) fn on_threads(hosts: &[u16], options: GroupOptions, body: impl Fn(&mut Group<Heap>) + Sync) {
        on_threads_with(hosts, options, 0, |group, _| body(group));
    }

    /// As `on_threads`, with an extent of `bytes` more bytes for each rank.
    pub(crate) fn on_threads_with(
        hosts: &[u16],
        options: GroupOptions,
        bytes: u64,
        body: impl Fn(&mut Group<Heap>, Offset) + Sync,
    ) {
        let members = side_by_side(hosts, &options);
        let ranks = u16::try_from(hosts.len()).unwrap();
        let end = members.len() as u64 * members[0].bytes;
        let heap = Heap::new(HeapShape {
            bytes: end + u64::from(ranks) * bytes,
            hosts: 16,
            processes: ranks,
            local_words: 1,
            bells: u32::from(ranks),
        });
        let handles: Vec<Heap> = members
            .iter()
            .map(|member| match (member.host, member.slot.0) {
                (0, 0) => heap.clone(),
                (host, slot) => heap.process(host, ProcessSlot(slot)),
            })
            .collect();
        drop(heap);
        std::thread::scope(|scope| {
            for (rank, handle) in handles.into_iter().enumerate() {
                let (members, body) = (members.clone(), &body);
                let at = Offset(end + rank as u64 * bytes);
                scope.spawn(move || {
                    body(&mut Group::over_extents(handle, members, rank, options).unwrap(), at)
                });
            }
        });
    }

    #[test]
    fn a_peer_that_ran_ahead_into_another_operation_is_found_out() {
        use polder_kernels::{Dtype, Op};
        use polder_schedule::Collective;
        on_threads(&[0, 1], quick(), |group| {
            if group.rank() == 1 {
                group.barrier().unwrap();
                group.all_reduce(Op::Sum, Dtype::U8, &mut [1, 2]).unwrap_err();
                return;
            }
            let barrier = Signature::new(Collective::Barrier, 0, 0);
            let late = group.operation(barrier, |group| {
                group.pass_window()?;
                group.publish_step(1);
                // Rank 1 goes on meanwhile, and its line says so at our first look.
                std::thread::sleep(Duration::from_millis(200));
                group.await_steps(1)
            });
            late.unwrap();
            let error = group.all_reduce(Op::Sum, Dtype::U8, &mut [1]).unwrap_err();
            assert!(matches!(error, PoolError::Mismatch { sequence: 2, .. }), "{error}");
        });
    }

    #[test]
    fn a_rank_that_stood_still_blames_itself_and_no_peer_that_had_no_cpu_for_some_naps() {
        use polder_schedule::Collective;
        let (waits, told) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        on_threads(&[0, 0], quick(), |group| {
            let nap = group.options().patience.nap;
            if group.rank() == 1 {
                // It has said that it waits for rank 0, and then gets no CPU.
                group.own.borrow_mut().enter(1, Signature::new(Collective::Barrier, 0, 0));
                group.own.borrow_mut().wait_for(0, progress::at(1, 0), 1);
                group.publish();
                waits.wait();
                told.wait();
                let Err(Failure::Told(0, mark)) = group.poll_fresh(0, progress::at(1, 0)) else {
                    panic!("not told")
                };
                assert_eq!(mark, Mark::late(0), "rank 0 blames itself");
                let error = group.fail(Failure::Told(0, mark));
                assert!(
                    matches!(error, PoolError::Timeout { peer: Peer { rank: Some(0), .. }, .. }),
                    "{error}"
                );
                return;
            }
            waits.wait();
            group.operation = Signature::new(Collective::Barrier, 0, 0);
            group.sequence = 1;
            assert!(matches!(group.poll_fresh(1, progress::at(1, 1)), Ok(None)));
            let seen = group.memory().now();
            // This rank has gone on after its deadline, and gets no CPU either.
            while group.memory().now() < seen + nap * 8 {
                std::thread::yield_now();
            }
            group.fail(Failure::Late(1, group.options().timeout));
            told.wait();
        });
    }

    #[test]
    fn a_death_ends_the_wait_for_a_rank_that_comes_before_it() {
        let over = std::sync::Barrier::new(2);
        on_threads(&[0, 0, 1], quick(), |group| {
            match group.rank() {
                0 => {
                    let error = group.barrier().unwrap_err();
                    assert!(
                        matches!(error, PoolError::PeerDead { peer: Peer { rank: Some(2), .. }, .. }),
                        "{error}"
                    );
                    over.wait();
                }
                // Late, and alive until the others know.
                1 => drop(over.wait()),
                _ => {}
            }
        });
    }

    #[test]
    fn of_two_dead_ranks_the_one_is_named_that_the_other_waited_for() {
        use polder_schedule::Collective;
        on_threads(&[0, 0, 1], quick(), |group| match group.rank() {
            0 => {
                while !(1..3).all(|rank| group.has_died(rank).unwrap()) {
                    std::thread::yield_now();
                }
                let error = group.barrier().unwrap_err();
                assert!(
                    matches!(error, PoolError::PeerDead { peer: Peer { rank: Some(2), .. }, .. }),
                    "{error}"
                );
            }
            // Killed while it waited for rank 2, before it could say that this one is dead.
            1 => {
                group.own.borrow_mut().enter(1, Signature::new(Collective::Barrier, 0, 0));
                group.own.borrow_mut().wait_for(2, progress::at(1, 0), 1);
                group.publish();
            }
            _ => {}
        });
    }

    #[test]
    fn a_wait_ends_when_the_caller_says_so_and_the_others_are_told() {
        let interrupted = std::sync::Barrier::new(2);
        on_threads(&[0, 1], quick(), |group| {
            if group.rank() == 0 {
                group.on_wait(Box::new(|| true));
                assert_eq!(group.barrier(), Err(PoolError::Interrupted { what: "barrier", sequence: 1 }));
                interrupted.wait();
            } else {
                interrupted.wait();
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, PoolError::GaveUp { sequence: 1, .. }), "{error}");
            }
        });
    }

    #[test]
    fn members_that_do_not_fit_are_refused() {
        let heap = Heap::new(HeapShape { bytes: 8192, hosts: 1, processes: 1, local_words: 1, bells: 1 });
        let members = side_by_side(&[0, 0], &quick());
        let refused = |members: &[RankPlace], rank, options| {
            let error = Group::over_extents(heap.clone(), members.to_vec(), rank, options).err().unwrap();
            assert!(matches!(error, PoolError::Argument { .. }), "{error}");
        };
        refused(&members, 0, quick());
        refused(&members[..1], 1, quick());
        refused(&members[..1], 0, GroupOptions { staging_bytes: 100, ..quick() });
    }
}
