//! What can go wrong with a pool, in words for the reader at three in the morning.

use std::fmt;

use polder_mem::{Fault, Offset};
use polder_platform::{quoted, sized};

/// Another process, as errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Peer {
    /// Its host id in the pool.
    pub host: u16,
    /// Its process id on that host; 0 when it is not known.
    pub pid: u32,
    /// Its rank, where the operation is one of a group.
    pub rank: Option<u32>,
}

impl Peer {
    /// A process of no group.
    #[must_use]
    pub const fn new(host: u16, pid: u32) -> Self {
        Self { host, pid, rank: None }
    }

    /// The same process, as a rank of a group.
    pub(crate) fn ranked(self, rank: usize) -> Self {
        Self { rank: u32::try_from(rank).ok(), ..self }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.rank, self.pid) {
            (None, 0) => write!(f, "host {}", self.host),
            (None, pid) => write!(f, "host {} pid {pid}", self.host),
            (Some(rank), 0) => write!(f, "rank {rank} (host {})", self.host),
            (Some(rank), pid) => write!(f, "rank {rank} (host {}, pid {pid})", self.host),
        }
    }
}

/// Why an operation on a pool failed. Nothing is half done when one is returned, except where the text says so, and except
/// the array that a collective was to fill or to change in place: that holds some of what it had and some of the result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The region holds no pool.
    #[error(
        "no pool in this region: the first word is {found:#018x}, not Polder's; {}",
        match found {
            0 => "run `polder pool format`",
            _ => "check the path, or lose what is there with `polder pool format --force`",
        }
    )]
    NotAPool {
        /// The word that stands where the magic number belongs.
        found: u64,
    },
    /// Formatting would destroy a pool.
    #[error(
        "this region holds {what}; attach to it, remove it with `polder pool destroy --yes`, or lose everything in it with `polder pool format --force`"
    )]
    PoolExists {
        /// What is there.
        what: String,
    },
    /// Formatting would destroy something else.
    #[error(
        "this region holds {what} (seen at offset {offset}); check the path, or lose what is there with `polder pool format --force`"
    )]
    Occupied {
        /// What is there.
        what: &'static str,
        /// Where it was seen.
        offset: Offset,
    },
    /// The pool was formatted by another version.
    #[error(
        "the pool has format {found}, this program reads format {supported}; use the Polder that made it, or format it again"
    )]
    Version {
        /// The version in the superblock.
        found: u32,
        /// The version that this program reads.
        supported: u32,
    },
    /// The region cannot hold a pool of the asked geometry.
    #[error(
        "a pool needs {} here, the region has {}; enlarge it, or lower --hosts, --names or --chunk; if a pool stood here, its end is missing",
        sized(*need), sized(*bytes)
    )]
    TooSmall {
        /// Size of the region in bytes.
        bytes: u64,
        /// Size that the geometry needs in bytes.
        need: u64,
    },
    /// A geometry that no pool can have.
    #[error("{what} is {value}, allowed are {low} to {high}")]
    Geometry {
        /// Which parameter.
        what: &'static str,
        /// The value that was asked for.
        value: u64,
        /// The least value allowed.
        low: u64,
        /// The greatest value allowed.
        high: u64,
    },
    /// Bytes in the pool that no correct writer left there.
    #[error(
        "corrupt {what} at offset {offset}; {}",
        match *what {
            "superblock" => "nothing can be read without it: put its bytes back, or format again with --force",
            _ => "run `polder pool check` to see what is affected",
        }
    )]
    Corrupt {
        /// Where.
        offset: Offset,
        /// What stands there.
        what: &'static str,
    },
    /// The host id is in use by another incarnation.
    #[error(
        "host id {host} is live (its heartbeat advanced, boot {boot:#x}); choose a free id, or run `polder pool evict {host} --fenced` once that host is off"
    )]
    HostLive {
        /// The host id.
        host: u16,
        /// A hash of the holder's boot id.
        boot: u64,
    },
    /// The keeper gives host ids, and has not given this one.
    #[error(
        "host {host} is not a member in epoch {epoch}: the keeper gives the ids of this pool; claim one from it (`polder keeper` must run)"
    )]
    NotAdmitted {
        /// The host id.
        host: u16,
        /// The epoch of the view without it.
        epoch: u64,
    },
    /// The host id belongs to another boot that gives no sign of life.
    #[error(
        "host id {host} belongs to boot {boot:#x} in epoch {epoch}, which gives no sign of life but may only be stopped; if that host is off for certain, or has booted again, run `polder pool evict {host} --fenced`"
    )]
    IdTaken {
        /// The host id.
        host: u16,
        /// A hash of the holder's boot id.
        boot: u64,
        /// The epoch of the view.
        epoch: u64,
    },
    /// Every host id is in use.
    #[error(
        "all {hosts} host ids are taken; evict one that is off (`polder pool stat`), or format a pool with more --hosts"
    )]
    NoFreeId {
        /// How many ids the pool has.
        hosts: u16,
    },
    /// No keeper answers.
    #[error(
        "no keeper answered within {waited_ms} ms; start `polder keeper` on this pool, or give host ids with POLDER_HOST"
    )]
    NoKeeper {
        /// How long, in milliseconds.
        waited_ms: u64,
    },
    /// An incarnation of the keeper that cannot start, or go on.
    #[error("keeper incarnation {asked} cannot run: {highest} has run; {}", next_keeper(*highest))]
    KeeperIncarnation {
        /// The incarnation.
        asked: u16,
        /// The highest that has run.
        highest: u16,
        /// How many the pool has places for.
        limit: u16,
    },
    /// The place of an earlier keeper cannot be taken.
    #[error("keeper incarnation {asked} has no place: it is that of keeper {held} (pid {pid}), {why}")]
    KeeperPlace {
        /// The incarnation.
        asked: u16,
        /// The keeper that has the place.
        held: u16,
        /// Its process id, 0 when it is not known.
        pid: u32,
        /// Why it is not free, and what to do.
        why: &'static str,
    },
    /// A newer keeper runs.
    #[error("keeper incarnation {incarnation} was superseded by {by}; stop it")]
    Superseded {
        /// The incarnation.
        incarnation: u16,
        /// The newer one.
        by: u16,
    },
    /// A host cannot be called fenced before it was evicted.
    #[error(
        "host {host} has not been evicted as of epoch {epoch}, and only such a host can be fenced; `polder pool evict {host}` evicts a member"
    )]
    NotEvicted {
        /// The host id.
        host: u16,
        /// The epoch of the view.
        epoch: u64,
    },
    /// This host was taken out of the view.
    #[error("host {host} was evicted in epoch {epoch}; restart its processes to join again")]
    Evicted {
        /// The host id.
        host: u16,
        /// The epoch of the view that no longer holds it.
        epoch: u64,
    },
    /// A process that this run directory does not know is this host in the pool.
    #[error(
        "host {host} slot {slot} (pid {pid}) gives signs of life, but does not share the run directory of this process; give both one directory (POLDER_RUN, or one /dev/shm), or give this process a host id of its own (POLDER_HOST)"
    )]
    Apart {
        /// The host id.
        host: u16,
        /// The slot of the process that lives.
        slot: u16,
        /// Its process id, in its own container's count; 0 when it is not known.
        pid: u32,
    },
    /// A file that the host's processes share was cut.
    #[error(
        "a file of host {host} in the run directory was cut while this process used it, and so the host's locks are lost; end its processes in this pool, then start them again"
    )]
    HostFileLost {
        /// The host id.
        host: u16,
    },
    /// A forked child uses what its parent attached.
    #[error("this pool belongs to process {pid}, which forked this one; attach to it again here")]
    Forked {
        /// The parent's process id.
        pid: u32,
    },
    /// Every process slot of this host is taken.
    #[error(
        "host {host} already has {slots} processes in this pool; {}",
        match *slots {
            512 => "no pool has more: start fewer on this host, or give some another host id (POLDER_HOST)",
            _ => "format it with a larger --processes, 512 at most",
        }
    )]
    NoSlot {
        /// The host id.
        host: u16,
        /// How many slots a host has.
        slots: u16,
    },
    /// A name that cannot be used.
    #[error("the name \"{}\" {why}; names look like /train/weights and have 1 to 255 bytes", quoted(name))]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The name exists already.
    #[error("{} exists already; open it, or destroy it first", quoted(name))]
    Exists {
        /// The name.
        name: String,
    },
    /// Another process is this rank of the group.
    #[error(
        "rank {rank} of group {} is taken by {peer}; give each process a rank of its own, or the group another name",
        quoted(group)
    )]
    RankTaken {
        /// The rank.
        rank: usize,
        /// The group's name.
        group: String,
        /// Who has it.
        peer: Peer,
    },
    /// There is no object of this name.
    #[error("no object {} in this pool; `polder pool list` shows what is there", quoted(name))]
    NotFound {
        /// The name.
        name: String,
    },
    /// A store has no such version.
    #[error(
        "the store {} keeps no {} in this pool; it keeps {}; check the name and the pool, or take a version that is kept",
        quoted(name),
        match version {
            None => "whole version".to_owned(),
            Some(version) => format!("version {version}"),
        },
        match &kept[..] {
            [] => "none".to_owned(),
            kept => kept.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and "),
        }
    )]
    NoVersion {
        /// The store's name.
        name: String,
        /// The version that was asked for; none for the newest.
        version: Option<u64>,
        /// The versions that it keeps.
        kept: Vec<u64>,
    },
    /// Another process writes to the store.
    #[error(
        "version {version} of the store {} is being written by {peer}; one process at a time writes: wait for it, or give each process a store of its own",
        quoted(name)
    )]
    VersionTaken {
        /// The store's name.
        name: String,
        /// The version.
        version: u64,
        /// Who writes it.
        peer: Peer,
    },
    /// Another attempt has published since this one began.
    #[error(
        "version {version} of the store {name} would come after {newest}, which another attempt has published since this one began; restore that, or give this job another name"
    )]
    VersionBehind {
        /// The store's name.
        name: String,
        /// The version that was to be published.
        version: u64,
        /// The newest.
        newest: u64,
    },
    /// Not enough free space, or none in one piece.
    #[error(
        "the pool is full: {} were asked for, {} are free, {} in the largest piece; destroy objects (`polder pool list`), or make a larger pool with `polder pool format --size` and name it with POLDER_POOL",
        sized(*asked), sized(*free), sized(*largest)
    )]
    Full {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that are free, not always in one piece.
        free: u64,
        /// Bytes of the largest piece.
        largest: u64,
    },
    /// The directory has no free slot for this name.
    #[error("the directory is full for {}; format the pool with a larger --names", quoted(name))]
    DirectoryFull {
        /// The name.
        name: String,
    },
    /// The job has used up its quota on this host.
    #[error(
        "job {job} may hold {} on this host and holds {}; {} more were asked for; destroy objects or raise POLDER_QUOTA",
        sized(*quota), sized(*held), sized(*asked)
    )]
    Quota {
        /// The job id.
        job: u64,
        /// Its quota in bytes.
        quota: u64,
        /// What it holds in bytes.
        held: u64,
        /// What it asked for in bytes.
        asked: u64,
    },
    /// This process holds as many objects open as it may.
    #[error(
        "this process has {limit} objects open, the most that it may; close some, or format the pool with a larger --opens"
    )]
    TooManyOpen {
        /// The limit.
        limit: u32,
    },
    /// An address of another job, or of another pool.
    #[error(
        "this address is of another job or in another pool than job {job} here, and messages go within one job; start both programs with one --pool and one POLDER_JOB"
    )]
    OtherJob {
        /// The job of this process.
        job: u64,
    },
    /// A peer died or stopped while this process waited for it.
    #[error(
        "{peer} died or stopped: its sign of life ended while this process waited for {what} {sequence} in epoch {epoch}; an array that the call was to fill may be filled in part"
    )]
    PeerDead {
        /// Who.
        peer: Peer,
        /// What was waited for.
        what: &'static str,
        /// The view's epoch.
        epoch: u64,
        /// The sequence number of the operation.
        sequence: u64,
    },
    /// The deadline came first.
    #[error(
        "no answer from {peer} within {waited_ms} ms while waiting for {what} {sequence} in epoch {epoch}; it lives but is late, or is stopped: raise timeout= or POLDER_TIMEOUT, or look at that process"
    )]
    Timeout {
        /// Who was waited for.
        peer: Peer,
        /// What was waited for.
        what: &'static str,
        /// The view's epoch.
        epoch: u64,
        /// The sequence number of the operation.
        sequence: u64,
        /// How long, in milliseconds.
        waited_ms: u64,
    },
    /// A rank did not join in time; nobody has said whose it would be.
    #[error(
        "rank {rank} has not come to group {} within {waited_ms} ms; look whether it was started, or raise timeout= or POLDER_TIMEOUT",
        quoted(group)
    )]
    Absent {
        /// The rank.
        rank: usize,
        /// The group's name.
        group: String,
        /// How long it was waited for, in milliseconds.
        waited_ms: u64,
    },
    /// The other end of a channel was closed.
    #[error(
        "{peer} has closed the {end} of the ring {name}; {}",
        match *end {
            "sender" => "everything that it sent was received, and nothing more will come",
            _ => "what it has not received is lost",
        }
    )]
    Closed {
        /// The channel's name.
        name: String,
        /// Whose end it was.
        peer: Peer,
        /// Which end: the sender or the receiver.
        end: &'static str,
    },
    /// Nobody has opened a channel to receive.
    #[error(
        "no process has opened the ring {} to receive within {waited_ms} ms; look whether the receiver was started, or wait longer",
        quoted(name)
    )]
    NoReceiver {
        /// The channel's name.
        name: String,
        /// How long, in milliseconds.
        waited_ms: u64,
    },
    /// A peer left the group or closed its end, or ended the operation because of an error of its own or because it waited for this process
    /// in vain.
    #[error(
        "{peer} gave up {what} {sequence} in epoch {epoch}: it left, failed, or timed out on this process; see its log"
    )]
    GaveUp {
        /// Who.
        peer: Peer,
        /// What was given up.
        what: &'static str,
        /// The view's epoch.
        epoch: u64,
        /// The sequence number of the operation.
        sequence: u64,
    },
    /// The caller gave up waiting, for a signal or because it ends.
    #[error("{what} {sequence} was interrupted; the other ranks are notified")]
    Interrupted {
        /// What was interrupted.
        what: &'static str,
        /// The sequence number of the operation.
        sequence: u64,
    },
    /// An earlier failure has ended this group or ring.
    #[error("this {what} ended when an earlier operation failed: {cause}")]
    Broken {
        /// What ended.
        what: &'static str,
        /// The failure that ended it.
        cause: Box<PoolError>,
    },
    /// Members of one group called different operations.
    #[error(
        "{peer} called {theirs}, this process called {ours}, as operation {sequence}; every rank must call the same operations in the same order with the same sizes"
    )]
    Mismatch {
        /// Who.
        peer: Peer,
        /// What the peer called.
        theirs: String,
        /// What was called here.
        ours: String,
        /// The sequence number of the operation.
        sequence: u64,
    },
    /// An argument that this operation does not take.
    #[error("{what} is {value}; {expected}")]
    Argument {
        /// Which argument.
        what: &'static str,
        /// Its value.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The memory itself failed.
    #[error(transparent)]
    Memory(#[from] Fault),
}

impl PoolError {
    /// The same error, with another name for what a timeout waited for.
    pub(crate) fn waiting_for(self, what: &'static str) -> Self {
        match self {
            Self::Timeout { peer, epoch, sequence, waited_ms, .. } => {
                Self::Timeout { peer, what, epoch, sequence, waited_ms }
            }
            other => other,
        }
    }
}

/// The way out for a keeper that cannot run after `highest`.
const fn next_keeper(highest: u16) -> &'static str {
    match highest {
        u16::MAX => "that is the highest there is, so the pool has to be formatted anew",
        _ => "take a higher one",
    }
}
