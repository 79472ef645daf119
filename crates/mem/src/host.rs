//! What the processes of one host share outside the pool: local words, doorbells, process slots.
//!
//! There are two files in the run directory (/dev/shm). `polder-<pool>-<host>` holds the words of one host, zeros at first.
//! `polder-<pool>-kernel` is shared by all processes of the pool under this kernel (see `kernel`). The last process removes
//! both. If it was killed, the next process takes them over, or they are removed when another pool is attached.
//!
//! If only its owner may write a pool, its files lie in the owner's own folder, `polder-<user>`, which no other user enters.
//! The files of any other pool lie in the shared directory. Each is checked after it was opened: its owner, its group, its
//! mode, its names. A file that none of the pool's users can have made is refused.

use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::kernel::{self, Access, Gate, Locks};
use crate::shm::{BellWord, Shm};
use crate::{Bell, LINE, Liveness, LocalWord, Nanos, ProcessSlot, Region, bounds, clock};

/// Which host to join, and how large its memory is. All processes of a pool give the same numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// What tells this pool from others under this kernel.
    pub pool: u64,
    /// The host id.
    pub host: u16,
    /// Host ids in the pool.
    pub hosts: u16,
    /// Process slots of each host.
    pub processes: u16,
    /// Local words of each host.
    pub local_words: u32,
    /// Doorbells of this kernel.
    pub bells: u32,
    /// Where the files lie: a tmpfs that all processes of this kernel see.
    pub directory: PathBuf,
    /// Local words that stay when no process of the host is left, as long as the file does.
    pub kept: Range<u32>,
    /// How long another process may be attaching or detaching before this one gives up.
    pub patience: Duration,
}

impl HostPlan {
    /// The directory that every Linux has for such files.
    pub const DIRECTORY: &str = "/dev/shm";
    /// How long another process may be attaching, unless something else is said.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    /// Where the files of a pool lie when nothing else is said. It follows from the pool alone, so that all its processes go
    /// to the same: its owner's folder where no other user may write the pool, and [`HostPlan::DIRECTORY`] elsewhere.
    ///
    /// # Errors
    /// Those of [`HostPlan::folder_of`].
    pub fn directory_for(region: &Region) -> Result<PathBuf, HostError> {
        match region.access() {
            access if access.is_private() => Self::folder_of(access.owner),
            _ => Ok(Self::DIRECTORY.into()),
        }
    }

    /// The folder of this process's own user.
    ///
    /// # Errors
    /// Those of [`HostPlan::folder_of`].
    pub fn own_folder() -> Result<PathBuf, HostError> {
        Self::folder_of(kernel::user())
    }

    /// The folder that no other user than `user` enters; it is made where it is missing.
    ///
    /// # Errors
    /// [`HostError::Stranger`] when something else stands there, and [`HostError::System`].
    pub fn folder_of(user: u32) -> Result<PathBuf, HostError> {
        let path = Path::new(Self::DIRECTORY).join(format!("polder-{user}"));
        let me = kernel::user();
        if me == user || me == 0 {
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) if me != user => {
                    chown(&path, Some(user), None).map_err(failed(&path, "give it to the pool's owner"))?;
                }
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed(&path, "make it")(error));
                }
                _ => {}
            }
        }
        // Nobody else can put another in its place: the directory that it lies in is sticky.
        let metadata = path.symlink_metadata().map_err(failed(&path, "look at it"))?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o777);
        let what = match metadata.is_dir() {
            false => "is no folder".to_owned(),
            true if owner != user => format!("belongs to user {owner}, not to {user}"),
            true if mode & 0o077 != 0 => format!("has mode {mode:04o}, so that other users may enter"),
            true => return Ok(path),
        };
        Err(HostError::Stranger { path, what })
    }

    /// Why the file at `path` could not be opened.
    fn refused(path: &Path, access: Access, error: io::Error) -> HostError {
        let is_refused =
            error.kind() == io::ErrorKind::PermissionDenied || error.raw_os_error() == Some(libc::ELOOP);
        let found = if is_refused { path.symlink_metadata().ok() } else { None };
        match found.and_then(|found| access.stranger(&found)) {
            Some(what) => HostError::Stranger { path: path.into(), what },
            None => failed(path, "open it")(error),
        }
    }

    fn kernel_file(&self) -> PathBuf {
        self.directory.join(format!("polder-{:016x}-kernel", self.pool))
    }

    fn host_file(&self) -> PathBuf {
        self.directory.join(format!("polder-{:016x}-{}", self.pool, self.host))
    }

    fn shadow_file(&self) -> PathBuf {
        self.directory.join(format!("polder-{:016x}-{}-shadow", self.pool, self.host))
    }

    fn slots(&self) -> u32 {
        u32::from(self.hosts) * u32::from(self.processes)
    }

    fn slot_index(&self, host: u16, slot: u16) -> Option<u32> {
        let inside = host < self.hosts && slot < self.processes;
        inside.then(|| self.slots_of(host).0 + u32::from(slot))
    }

    /// The first slot of a host, and how many it has.
    fn slots_of(&self, host: u16) -> (u32, u32) {
        (u32::from(host) * u32::from(self.processes), u32::from(self.processes))
    }
}

/// Why a process could not join its host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A host id that this pool does not have.
    #[error(
        "host id {host} is not one of this pool's ids, 0 to {}; choose one of these, or format it with more --hosts", hosts - 1
    )]
    NoHost {
        /// The id.
        host: u16,
        /// How many there are.
        hosts: u16,
    },
    /// Every process slot is taken.
    #[error(
        "host {host} already has {slots} processes in this pool; start fewer on it, or format the pool with more --processes, 512 at most"
    )]
    NoSlot {
        /// The host id.
        host: u16,
        /// How many slots it has.
        slots: u16,
    },
    /// Another process stopped while it held the gate.
    #[error(
        "{path}: another process has been attaching or detaching for {waited_ms} ms; find it with `fuser {path}`, and continue or kill it"
    )]
    Busy {
        /// The file.
        path: PathBuf,
        /// How long this one waited, in milliseconds.
        waited_ms: u64,
    },
    /// Running processes use the file with other numbers.
    #[error(
        "{path}: its {what} is {found}, this process has {ours}; all processes of a pool must run the same Polder"
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Which number.
        what: &'static str,
        /// The number in the file.
        found: u64,
        /// The number of this process.
        ours: u64,
    },
    /// Processes with another run directory are this host in the pool.
    #[error(
        "host {host} is in use by processes that do not share the run directory {directory} with this one; give all of them one directory (POLDER_RUN, or one /dev/shm), or give this process a host id of its own (POLDER_HOST)"
    )]
    Apart {
        /// The host id.
        host: u16,
        /// The directory of this process.
        directory: PathBuf,
    },
    /// What stands at a path is none of the pool's.
    #[error(
        "{path} {what}; it is not this pool's: remove it, or name paths in a directory that no other user may write, with POLDER_POOL for the pool and POLDER_RUN for its host's files"
    )]
    Stranger {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file system has no room for what the host's processes share.
    #[error(
        "{path}: its file system has no room for {bytes} bytes; make room there (`df`), or set POLDER_RUN to a directory on another tmpfs"
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// How long it must be.
        bytes: u64,
    },
    /// Running processes use a file of another length.
    #[error(
        "{path}: its size in bytes is {found}, this process has {ours}; it was cut, or another version of Polder uses it: end the processes of `fuser {path}`, then start them again"
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// How long it is.
        found: u64,
        /// How long it must be.
        ours: u64,
    },
    /// The system refused.
    #[error("{path}: cannot {doing}: {source}{remedy}")]
    System {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// What to do, as the end of the sentence; empty when the kernel's words say enough.
        remedy: &'static str,
    },
}

/// "POLDERK1": the first word of a kernel file.
const MAGIC: u64 = u64::from_le_bytes(*b"POLDERK1");

/// Words of the kernel file. The header says with which numbers it was made.
const HEADER: [&str; 4] = ["magic number", "number of hosts", "number of processes", "number of bells"];
/// When the emulated memory will be free again: `CLOCK_MONOTONIC`, which all processes of a kernel share.
#[cfg(feature = "instruments")]
const BUSY_UNTIL: usize = 8;
/// From here on, the bells, a line each; then a word for each slot: the last process that held it; then a word for
/// each host: the bytes of its shadow.
const BELLS: usize = 16;

/// How long the kernel may take to let go of a killed process's byte of the pool after that of its slot.
const PASSING: Duration = Duration::from_secs(2);

/// A process's place among the processes of its host.
pub(crate) struct Host {
    plan: HostPlan,
    slot: u16,
    words: Shm,
    #[cfg_attr(not(feature = "instruments"), expect(dead_code, reason = "only instruments ask for one"))]
    shadow: Option<Shm>,
    kernel: Shm,
    locks: Locks,
    /// On the pool's own file, where that can be.
    on_pool: Option<Locks>,
}

impl Host {
    /// Takes the first free slot of the host in `plan`, for the pool in `region`.
    pub(crate) fn attach(plan: &HostPlan, region: &Region, shadow_bytes: usize) -> Result<Self, HostError> {
        let access = region.access();
        if plan.host >= plan.hosts {
            return Err(HostError::NoHost { host: plan.host, hosts: plan.hosts });
        }
        sweep(plan);
        let path = plan.kernel_file();
        loop {
            let locks =
                Locks::open(&path, Some(access)).map_err(|error| HostPlan::refused(&path, access, error))?;
            let locks = locks.expect("made if missing");
            expect_ours(&path, locks.file(), access)?;
            let Some(gate) = locks.gate(clock::now() + plan.patience).map_err(failed(&path, "lock it"))?
            else {
                return Err(HostError::Busy { path, waited_ms: plan.patience.as_millis() as u64 });
            };
            // The process that held the gate before may have been the last, and have removed the file.
            if locks.stands_at(&path).map_err(failed(&path, "look at it"))? {
                let entered = Entered::enter(plan, region, shadow_bytes, &gate);
                if matches!(&entered, Err(error) if !matches!(error, HostError::Stranger { .. })) {
                    // What it made is of no use to anybody. A stranger's file is not for this process to remove.
                    let _ = remove_unused(plan, &locks);
                }
                let Entered { slot, words, shadow, kernel, on_pool } = entered?;
                drop(gate);
                return Ok(Self { plan: plan.clone(), slot, words, shadow, kernel, locks, on_pool });
            }
        }
    }

    pub(crate) fn slot(&self) -> ProcessSlot {
        ProcessSlot(self.slot)
    }

    /// What stands in place of the host's caches, when it was asked for.
    #[cfg(feature = "instruments")]
    pub(crate) fn shadow(&self) -> Option<&Shm> {
        self.shadow.as_ref()
    }

    /// When the emulated memory will be free again.
    #[cfg(feature = "instruments")]
    pub(crate) fn busy_until(&self) -> &AtomicU64 {
        self.kernel.word(BUSY_UNTIL)
    }

    /// The slot's file names the last process that ran here. A host id may have moved to another run directory since: its process
    /// there has the same slot, and nothing is known of it here. A move to another kernel is not seen here; the host's line
    /// in the pool tells of it.
    pub(crate) fn liveness(&self, host: u16, slot: ProcessSlot) -> Liveness {
        let Some(index) = self.plan.slot_index(host, slot.0) else { return Liveness::Unknown };
        if (host, slot.0) == (self.plan.host, self.slot) || self.locks.others_hold(index, 1).unwrap_or(true) {
            return Liveness::Alive;
        }
        match self.holder(index) {
            0 => Liveness::Unknown,
            _ if self.is_held_elsewhere(host) => Liveness::Unknown,
            _ => Liveness::Dead,
        }
    }

    /// Whether processes with another run directory are `host`. The pool's file is asked first: a process lets go of its slot before it
    /// lets go of the pool.
    fn is_held_elsewhere(&self, host: u16) -> bool {
        let (first, count) = self.plan.slots_of(host);
        host != self.plan.host
            && self.host_is_held(host) == Some(true)
            && self.locks.others_hold(first, count).is_ok_and(|held| !held)
    }

    /// Whether a process of `host` under this kernel holds its byte on the pool's file. Each such process does, from before its line says
    /// that it lives until it has ended.
    pub(crate) fn host_is_held(&self, host: u16) -> Option<bool> {
        self.on_pool.as_ref()?.host_is_held(self.plan.pool, host)
    }

    /// Behind the gate: gives the slot back, and removes the files that no process uses any more.
    fn leave(&self) -> io::Result<()> {
        self.locks.release_slots()?;
        if let Some(on_pool) = &self.on_pool {
            on_pool.release_slots()?;
        }
        remove_unused(&self.plan, &self.locks)
    }

    /// The process id that last held a slot under this kernel; 0 for none.
    fn holder(&self, index: u32) -> u64 {
        self.kernel.word(holder_word(&self.plan, index)).load(Ordering::SeqCst)
    }

    #[inline(always)]
    #[track_caller]
    fn word(&self, word: LocalWord) -> &AtomicU64 {
        self.words.word(bounds::local(self.plan.local_words as usize, word))
    }

    #[inline(always)]
    #[track_caller]
    pub(crate) fn load(&self, word: LocalWord) -> u64 {
        self.word(word).load(Ordering::SeqCst)
    }

    #[inline(always)]
    #[track_caller]
    pub(crate) fn store(&self, word: LocalWord, value: u64) {
        self.word(word).store(value, Ordering::SeqCst);
    }

    #[inline(always)]
    #[track_caller]
    pub(crate) fn cas(&self, word: LocalWord, old: u64, new: u64) -> Result<(), u64> {
        self.word(word).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }

    #[inline(always)]
    #[track_caller]
    pub(crate) fn bell(&self, bell: Bell) -> BellWord<'_> {
        assert!(bell.0 < self.plan.bells, "bell {} of {}", bell.0, self.plan.bells);
        BellWord(self.kernel.half_word(BELLS + bell.0 as usize * 8))
    }
}

impl Drop for Host {
    /// Gives the slot back and removes the files with the last process. A forked child leaves all that to its parent.
    fn drop(&mut self) {
        if self.locks.inherited() {
            return;
        }
        // When the gate cannot be had, the files stay for the next process to take over.
        if let Ok(Some(_gate)) = self.locks.gate(clock::now() + Duration::from_secs(1)) {
            let _ = self.leave();
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}, slot {}", self.plan.host, self.slot)
    }
}

fn holder_word(plan: &HostPlan, index: u32) -> usize {
    BELLS + plan.bells as usize * 8 + index as usize
}

fn shadow_word(plan: &HostPlan) -> usize {
    holder_word(plan, plan.slots()) + usize::from(plan.host)
}

/// What a process has once it passed the gate.
struct Entered {
    slot: u16,
    words: Shm,
    shadow: Option<Shm>,
    kernel: Shm,
    on_pool: Option<Locks>,
}

impl Entered {
    /// Behind the gate: maps the files, emptied first where no process lives that uses them, and takes a slot.
    fn enter(
        plan: &HostPlan,
        region: &Region,
        shadow_bytes: usize,
        gate: &Gate<'_>,
    ) -> Result<Self, HostError> {
        let (path, access) = (plan.kernel_file(), region.access());
        let (first, count) = plan.slots_of(plan.host);
        let free = |first, count| gate.locks().others_hold(first, count).map(|held| !held);
        let free = |first, count| free(first, count).map_err(failed(&path, "look at its locks"));
        let (kernel_is_free, host_is_free) = (free(0, plan.slots())?, free(first, count)?);

        // Before anything changes.
        let on_pool =
            Locks::of_pool(region.file()).map_err(failed(region.path(), "open it for its locks"))?;
        if let Some(locks) = &on_pool {
            let until = clock::now() + PASSING.min(plan.patience);
            let is_held = locks.hold_host(plan.pool, plan.host, host_is_free, until);
            if !is_held.map_err(failed(region.path(), "lock it"))? {
                return Err(HostError::Apart { host: plan.host, directory: plan.directory.clone() });
            }
        }
        let kernel_words = holder_word(plan, plan.slots()) + usize::from(plan.hosts);
        let made = Made { access, is_fresh: kernel_is_free, kept: 0..0 };
        let kernel = file(&path, kernel_words * 8, &made)?;
        same_numbers(plan, &kernel)?;
        same_shadow(plan, &kernel, shadow_bytes as u64, host_is_free)?;
        let made = Made { access, is_fresh: host_is_free, kept: plan.kept.clone() };
        let words = file(&plan.host_file(), plan.local_words as usize * 8, &made)?;
        let shadow = match shadow_bytes {
            0 => None,
            bytes => Some(file(&plan.shadow_file(), bytes, &Made { kept: 0..0, ..made })?),
        };
        for (slot, index) in (0..plan.processes).zip(first..) {
            if gate.locks().take_slot(index).map_err(failed(&path, "lock a slot"))? {
                kernel.word(holder_word(plan, index)).store(u64::from(std::process::id()), Ordering::SeqCst);
                return Ok(Self { slot, words, shadow, kernel, on_pool });
            }
        }
        Err(HostError::NoSlot { host: plan.host, slots: plan.processes })
    }
}

/// How a file comes to be.
struct Made {
    access: Access,
    /// No living process uses it: it is made, or emptied.
    is_fresh: bool,
    /// Words that outlive the emptying.
    kept: Range<u32>,
}

/// Maps a file of `bytes` bytes. All of it is there: a page that is missing when it is touched would end the process.
fn file(path: &Path, bytes: usize, made: &Made) -> Result<Shm, HostError> {
    let Made { access, is_fresh, ref kept } = *made;
    let bytes = bytes.next_multiple_of(LINE as usize).max(LINE as usize);
    let opened = kernel::open(path, is_fresh.then_some(access));
    let file = opened.map_err(|error| HostPlan::refused(path, access, error))?;
    let file = file.ok_or_else(|| failed(path, "open it")(io::ErrorKind::NotFound.into()))?;
    expect_ours(path, &file, access)?;
    let length = || file.metadata().map(|metadata| metadata.len()).map_err(failed(path, "look at it"));
    if is_fresh {
        let at = u64::from(kept.start) * 8;
        let mut words = vec![0; if length()? == bytes as u64 { kept.len() * 8 } else { 0 }];
        file.read_exact_at(&mut words, at).map_err(failed(path, "read it"))?;
        file.set_len(0).map_err(failed(path, "empty it"))?;
        allocate(path, &file, bytes as u64)?;
        file.write_all_at(&words, at).map_err(failed(path, "write it"))?;
    }
    match length()? {
        length if length == bytes as u64 => Shm::map(&file, bytes).map_err(failed(path, "map it")),
        length => Err(HostError::Size { path: path.into(), found: length, ours: bytes as u64 }),
    }
}

/// Takes all of the file's pages.
fn allocate(path: &Path, file: &File, bytes: u64) -> Result<(), HostError> {
    loop {
        // SAFETY: the descriptor is open; the call changes the file alone.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => return Ok(()),
            libc::EINTR => {}
            libc::ENOSPC | libc::EDQUOT => return Err(HostError::NoRoom { path: path.into(), bytes }),
            code => return Err(failed(path, "allocate it")(io::Error::from_raw_os_error(code))),
        }
    }
}

/// Refuses a file that none of the pool's users can have made.
fn expect_ours(path: &Path, file: &File, access: Access) -> Result<(), HostError> {
    let found = file.metadata().map_err(failed(path, "look at it"))?;
    access.stranger(&found).map_or(Ok(()), |what| Err(HostError::Stranger { path: path.into(), what }))
}

/// Writes the numbers of `plan` into a fresh kernel file, or compares them with those in it.
fn same_numbers(plan: &HostPlan, kernel: &Shm) -> Result<(), HostError> {
    let ours = [MAGIC, u64::from(plan.hosts), u64::from(plan.processes), u64::from(plan.bells)];
    for (index, (what, ours)) in HEADER.into_iter().zip(ours).enumerate() {
        match kernel.word(index).load(Ordering::SeqCst) {
            0 => kernel.word(index).store(ours, Ordering::SeqCst),
            found if found == ours => {}
            found => return Err(HostError::Mismatch { path: plan.kernel_file(), what, found, ours }),
        }
    }
    Ok(())
}

/// All processes of a host work on its shadow, or none: one that did not would see what the others have not written
/// back.
fn same_shadow(plan: &HostPlan, kernel: &Shm, ours: u64, fresh: bool) -> Result<(), HostError> {
    let word = kernel.word(shadow_word(plan));
    if fresh {
        word.store(ours, Ordering::SeqCst);
    }
    match word.load(Ordering::SeqCst) {
        theirs if theirs == ours => Ok(()),
        theirs => Err(HostError::Mismatch {
            path: plan.shadow_file(),
            what: "size as the host's shadow",
            found: theirs,
            ours,
        }),
    }
}

/// Removes the files of pools all of whose processes under this kernel were killed. What it may not open, or what is
/// busy, it leaves alone.
fn sweep(plan: &HostPlan) {
    let common = Path::new(HostPlan::DIRECTORY);
    let own = common.join(format!("polder-{}", kernel::user()));
    if plan.directory == common {
        sweep_directory(&HostPlan { directory: own, ..plan.clone() });
    } else if plan.directory == own {
        sweep_directory(&HostPlan { directory: common.into(), ..plan.clone() });
    }
    sweep_directory(plan);
}

fn sweep_directory(plan: &HostPlan) {
    let Ok(entries) = std::fs::read_dir(&plan.directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pool = name.to_str().and_then(|name| name.strip_prefix("polder-")?.strip_suffix("-kernel"));
        if let Some(pool) =
            pool.and_then(|pool| u64::from_str_radix(pool, 16).ok()).filter(|pool| *pool != plan.pool)
        {
            let _ = sweep_pool(&HostPlan { pool, ..plan.clone() });
        }
    }
}

fn sweep_pool(plan: &HostPlan) -> io::Result<()> {
    let path = plan.kernel_file();
    let Some(locks) = Locks::open(&path, None)? else { return Ok(()) };
    let Some(_gate) = locks.gate(Nanos(0))? else { return Ok(()) };
    if locks.stands_at(&path)? && !locks.others_hold(0, u32::MAX)? {
        remove_pool(&plan.directory, plan.pool)?;
    }
    Ok(())
}

/// Behind the gate, by a process that holds no slot: removes the files that no other process uses.
fn remove_unused(plan: &HostPlan, locks: &Locks) -> io::Result<()> {
    let (first, count) = plan.slots_of(plan.host);
    if !locks.others_hold(first, count)? {
        for path in [plan.host_file(), plan.shadow_file()] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    if !locks.others_hold(0, plan.slots())? {
        remove_pool(&plan.directory, plan.pool)?;
    }
    Ok(())
}

/// Behind the gate of a pool that no process uses: removes its files.
fn remove_pool(directory: &Path, pool: u64) -> io::Result<()> {
    let prefix = format!("polder-{pool:016x}-");
    for entry in std::fs::read_dir(directory)?.flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn failed(path: &Path, doing: &'static str) -> impl Fn(io::Error) -> HostError {
    move |source| {
        let remedy = match source.kind() {
            io::ErrorKind::NotFound => "; POLDER_RUN names the directory of such files, and it must be there",
            io::ErrorKind::PermissionDenied => {
                "; another user's pool of this kernel: its group must be the pool's, and this user in it"
            }
            _ => "",
        };
        HostError::System { path: path.into(), doing, source, remedy }
    }
}
