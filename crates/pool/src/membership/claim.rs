//! How a host comes to its id where the keeper gives ids: the claim, and the wait for its answer.
//!
//! A claimant writes its claim on the claim line of the host id; the keeper answers with its grant line and its view. The
//! module [`keeper`](crate::keeper) says what the keeper does with a claim.

use std::time::Duration;

use polder_mem::{Memory, Nanos};

use super::{expect_host, milliseconds};
use crate::PoolError;
use crate::format::{Layout, SETTLE, Uuid, read_superblock};
use crate::line::{self, Words};
use crate::membership::{Request, any_heartbeat};
use crate::view::{Grant, IdSource, View, Views};

/// What a process asks of the keeper that has no host id yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdClaim {
    /// The id that it wants, or any that is free.
    pub host: Option<u16>,
    /// A hash of its boot id.
    pub boot: u64,
    /// What no other claimant has; never 0.
    pub nonce: u64,
    /// How long it waits for the keeper.
    pub timeout: Duration,
    /// How long it watches the holder of an id for a sign of life.
    pub silence: Duration,
}

impl IdClaim {
    /// A claim of `host`, or of any id, that waits 10 seconds for the keeper and watches a holder for 2.
    #[must_use]
    pub fn new(host: Option<u16>, boot: u64) -> Self {
        let (timeout, silence) = (Duration::from_secs(10), Duration::from_secs(2));
        Self { host, boot, nonce: fresh_nonce(), timeout, silence }
    }
}

fn fresh_nonce() -> u64 {
    (Uuid::fresh().0 as u64).max(1)
}

/// A host id that the keeper gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrantedId {
    /// The host id.
    pub host: u16,
    /// The incarnation of the host.
    pub incarnation: u64,
    /// The epoch of the view that has it.
    pub epoch: u64,
}

/// Asks the keeper for a host id and waits until it is given. At most one claimant of an id is given it.
///
/// # Errors
/// [`PoolError::HostLive`] when another holds the id; [`PoolError::IdTaken`] when its holder is silent and nobody
/// evicted it, or nobody said that it is off; [`PoolError::NoFreeId`]; [`PoolError::NoKeeper`] when no keeper answers.
pub fn claim_host_id<M: Memory>(memory: &M, claim: &IdClaim) -> Result<GrantedId, PoolError> {
    let layout = read_superblock(memory)?.layout()?;
    if let Some(host) = claim.host {
        expect_host(&layout, host)?;
    }
    let mut claimant = Claimant::new(memory, &layout, claim);
    match claim.host {
        Some(host) => claimant.claim_one(host),
        None => claimant.claim_any(),
    }
}

pub(crate) struct Claimant<'a, M: Memory> {
    memory: &'a M,
    layout: &'a Layout,
    claim: &'a IdClaim,
    views: Views,
    /// The epoch at the first look: a grant after it went to a competitor.
    began: Option<u64>,
    /// Another's request that stands on the claim line, and since when.
    rival: Option<(Words, Nanos)>,
    deadline: Nanos,
    /// Whether the deadline had come before the last look: who was stopped beyond it looks once more.
    is_late: bool,
}

/// What a claimant finds.
pub(crate) enum ClaimAnswer {
    /// The id is its own.
    Mine(GrantedId),
    /// Another has it.
    Taken { boot: u64, lately: bool },
    /// Nobody has it, the claim stands, and the boot that had it last was this.
    Asked { view: View, boot: u64 },
}

impl<'a, M: Memory> Claimant<'a, M> {
    pub(crate) fn new(memory: &'a M, layout: &'a Layout, claim: &'a IdClaim) -> Self {
        let deadline = memory.now() + claim.timeout;
        Self {
            memory,
            layout,
            claim,
            views: Views::new(claim.timeout),
            began: None,
            rival: None,
            deadline,
            is_late: false,
        }
    }

    pub(crate) fn claim_one(&mut self, host: u16) -> Result<GrantedId, PoolError> {
        loop {
            let error = match self.look(host)? {
                ClaimAnswer::Mine(granted) => return Ok(granted),
                ClaimAnswer::Taken { boot, lately } if lately || self.is_beating(host)? => {
                    self.withdraw(host)?;
                    return Err(PoolError::HostLive { host, boot });
                }
                ClaimAnswer::Taken { boot, .. } => {
                    PoolError::IdTaken { host, boot, epoch: self.began.unwrap_or(0) }
                }
                ClaimAnswer::Asked { view, boot } => self.unanswered(host, boot, &view),
            };
            self.pause(error)?;
        }
    }

    /// Tries the ids in turn, each for as long as a keeper may take to answer.
    fn claim_any(&mut self) -> Result<GrantedId, PoolError> {
        loop {
            let mut error = PoolError::NoFreeId { hosts: self.layout.geometry().hosts };
            for host in 0..self.layout.geometry().hosts {
                let next = self.memory.now() + self.claim.silence;
                while let ClaimAnswer::Asked { view, boot } = match self.look(host)? {
                    ClaimAnswer::Mine(granted) => return Ok(granted),
                    found => found,
                } {
                    error = self.unanswered(host, boot, &view);
                    if self.memory.now() >= next {
                        break;
                    }
                    self.pause(error.clone())?;
                }
                self.withdraw(host)?;
            }
            self.pause(error)?;
        }
    }

    pub(crate) fn look(&mut self, host: u16) -> Result<ClaimAnswer, PoolError> {
        self.is_late = self.memory.now() >= self.deadline;
        let (memory, layout) = (self.memory, self.layout);
        let settle = self.claim.timeout.min(SETTLE);
        let (view, grant) =
            self.views.read(memory, layout, |view| Grant::read(memory, layout, view.keeper, host, settle))?;
        let began = *self.began.get_or_insert(view.epoch);
        match view.id_source == IdSource::Keeper && grant.stands_in(&view, host) {
            true if grant.nonce == self.claim.nonce => {
                let Grant { incarnation, .. } = grant;
                Ok(ClaimAnswer::Mine(GrantedId { host, incarnation, epoch: view.epoch }))
            }
            true => Ok(ClaimAnswer::Taken { boot: grant.boot, lately: grant.epoch > began }),
            false => {
                self.write_claim(host, grant.nonce)?;
                Ok(ClaimAnswer::Asked { view, boot: grant.boot })
            }
        }
    }

    fn is_beating(&self, host: u16) -> Result<bool, PoolError> {
        Ok(any_heartbeat(self.memory, self.layout.heartbeat_lines(host), self.claim.silence)?)
    }

    fn request(&self) -> Words {
        Request::Claim { nonce: self.claim.nonce, boot: self.claim.boot }.encode()
    }

    /// Writes the claim unless it stands there. Another's request is given the time to be answered first, unless it is the
    /// claim that was `answered` last.
    fn write_claim(&mut self, host: u16, answered: u64) -> Result<(), PoolError> {
        let at = self.layout.claim_line(host);
        let now = self.memory.now();
        let present = line::read(self.memory, at)?;
        match (present, self.rival) {
            (Some(words), _) if words == self.request() => return Ok(()),
            (Some(words), _) if matches!(Request::decode(&words), Some(Request::Claim { nonce, .. }) if nonce == answered) =>
                {}
            (Some(words), Some((rival, since))) if words == rival && now < since + self.claim.silence => {
                return Ok(());
            }
            (Some(words), rival)
                if words != [0; line::WORDS] && rival.is_none_or(|(old, _)| old != words) =>
            {
                self.rival = Some((words, now));
                return Ok(());
            }
            _ => {}
        }
        self.rival = None;
        // The claim is out before its author waits for the answer.
        line::publish_and_fence(self.memory, at, &self.request());
        Ok(())
    }

    /// Takes the claim back, so that the id is not given to somebody who does not wait for it.
    fn withdraw(&self, host: u16) -> Result<(), PoolError> {
        let at = self.layout.claim_line(host);
        if line::read(self.memory, at)? == Some(self.request()) {
            line::publish(self.memory, at, &[0; line::WORDS]);
        }
        Ok(())
    }

    fn unanswered(&self, host: u16, boot: u64, view: &View) -> PoolError {
        match view.id_source {
            IdSource::Keeper if view.had_evicted(host) && !view.is_fenced(host) => {
                PoolError::IdTaken { host, boot, epoch: view.epoch }
            }
            _ => PoolError::NoKeeper { waited_ms: milliseconds(self.claim.timeout) },
        }
    }

    /// Waits a moment, or fails with `error` when the deadline has come.
    fn pause(&self, error: PoolError) -> Result<(), PoolError> {
        if self.is_late {
            self.claim.host.map_or(Ok(()), |host| self.withdraw(host))?;
            return Err(error);
        }
        self.memory.yield_now();
        Ok(())
    }
}

/// How a host that is about to attach comes to its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Admission {
    /// The launcher gives it.
    Launcher,
    /// The keeper has given it, to an earlier process of this host.
    Admitted(u16),
    /// It has to claim one from the keeper with [`claim_host_id`].
    MustClaim,
}

/// How the host with this boot hash comes to an id: as any, or as `host`.
///
/// # Errors
/// Those of [`read_superblock`]; [`PoolError::Corrupt`] when the view is damaged.
pub fn look_up_admission<M: Memory>(
    memory: &M,
    boot: u64,
    host: Option<u16>,
) -> Result<Admission, PoolError> {
    let layout = read_superblock(memory)?.layout()?;
    let admitted = |view: &View| {
        let ids = 0..layout.geometry().hosts;
        for id in ids.filter(|&id| view.has(id) && host.is_none_or(|host| host == id)) {
            if Grant::read(memory, &layout, view.keeper, id, SETTLE)?.boot == boot {
                return Ok(Some(id));
            }
        }
        Ok(None)
    };
    let (view, admitted) = Views::new(PATIENCE).read(memory, &layout, admitted)?;
    Ok(match (view.id_source, admitted) {
        (IdSource::Launcher, _) => Admission::Launcher,
        (IdSource::Keeper, Some(id)) => Admission::Admitted(id),
        (IdSource::Keeper, None) => Admission::MustClaim,
    })
}

/// How long a keeper may be in the middle of starting while somebody asks.
const PATIENCE: Duration = Duration::from_secs(10);
