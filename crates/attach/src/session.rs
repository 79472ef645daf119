//! How a process of an edge comes to a pool: from settings to a region, the host's files, an attached pool and its
//! heartbeat.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use bytesize::ByteSize;
use polder_mem::{
    AnyMemory, Coherence, HostError, HostPlan, Memory, Region, RegionError, RegionKind, forks, threads,
};
use polder_platform::shell_word;

use polder_pool::claim::{Admission, IdClaim, claim_host_id, look_up_admission};
use polder_pool::endpoint::EndpointOptions;
use polder_pool::local::LocalLayout;
use polder_pool::membership::{host_of_other_kernel, live_process};
use polder_pool::{
    Geometry, Member, Overwrite, Pool, PoolError, Superblock, Uuid, format_as, read_superblock,
};

use crate::settings::{ByteCount, CoherenceChoice, Settings, TIMEOUT, Wrap, in_terms_of};

/// Why a process could not come to its pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// No pool was named where one is needed.
    #[error("no pool is named; give --pool PATH or set POLDER_POOL")]
    NoPool,
    /// A device that several hosts share needs an id for this one.
    #[error(
        "{path} may be shared by several hosts, and this one has no id; set POLDER_HOST to a number that no other host has"
    )]
    NoHostId {
        /// The device.
        path: PathBuf,
    },
    /// The pool is kept coherent in one way, and another is set here.
    #[error(
        "{path} was formatted with --coherence {kept}, and {asked} is set here; leave that setting out (POLDER_COHERENCE, coherence= or --coherence), or format it again"
    )]
    Coherence {
        /// The region.
        path: PathBuf,
        /// What its superblock says.
        kept: Coherence,
        /// What is set.
        asked: Coherence,
    },
    /// A pool for one kernel that another kernel uses too.
    #[error(
        "{path}: host {host} runs under another kernel, and coherent memory is for one: a host that dies alone takes with it what it stored and did not write back; use the pool with --coherence software on each host (hdm-db where the device keeps their caches coherent)"
    )]
    SecondKernel {
        /// The region.
        path: PathBuf,
        /// The host that lives under another kernel.
        host: u16,
    },
    /// A file larger than what its file system has free: it would be made, and a later write into it would fail.
    #[error(
        "{}: {} has {} free, not {}; give a smaller --size or size=, or make room there",
        path.display(), folder.display(), ByteSize(*free).display().iec(), ByteSize(*bytes).display().iec()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
        /// Bytes that are free there.
        free: u64,
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// A job's own pool does not fit into what its folder has free.
    #[error(
        "{} has {} free, and a pool for {ranks} ranks needs {}; make room there (a container has --shm-size or an emptyDir of medium Memory), or name a pool elsewhere in POLDER_POOL",
        folder.display(), ByteSize(*free).display().iec(), ByteSize(*needed).display().iec()
    )]
    NoRoom {
        /// Where it would lie.
        folder: PathBuf,
        /// Bytes that are free there.
        free: u64,
        /// The ranks that are to share it.
        ranks: u16,
        /// The bytes that it would need.
        needed: u64,
    },
    /// The pool has another size than was asked for.
    #[error(
        "{} is a pool of {}, and a size of {} is asked for; leave the size out, or destroy that pool first (`polder pool destroy --yes --pool {}`)",
        path.display(), ByteSize(*kept).display().iec(), ByteSize(*asked).display().iec(), shell_word(&path.to_string_lossy())
    )]
    OtherSize {
        /// The region.
        path: PathBuf,
        /// Bytes that the pool has.
        kept: u64,
        /// The bytes that were asked for.
        asked: u64,
    },
    /// A file that is too short for any pool.
    #[error(
        "{} is no pool: it has {bytes} bytes, and the smallest pool has {PAGE} bytes; check the path, or make a pool under another name (`polder pool format`)",
        path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
    /// The region cannot be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The host's files cannot be had.
    #[error("{}{}", .0, remedy(.0))]
    Host(#[from] HostError),
    /// Processes with another run directory are this host in the pool.
    #[error(
        "{path}: host {host}{process} lives, but does not share the run directory {run} with this process; give both one directory (POLDER_RUN, or one /dev/shm for their containers), or give this process a host id of its own (POLDER_HOST)"
    )]
    Apart {
        /// The region.
        path: PathBuf,
        /// The host id.
        host: u16,
        /// The slot and the process id of one of them, as the error says it.
        process: String,
        /// The directory of this process.
        run: PathBuf,
    },
    /// The pool refused.
    #[error("{path}: {source}")]
    Pool {
        /// The region.
        path: PathBuf,
        /// Why.
        source: PoolError,
    },
    /// The kernel does not say which boot this is.
    #[error("{path}: {source}; the pool tells a host that has booted again by it: mount -t proc proc /proc")]
    Boot {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The system starts no thread for the heartbeat.
    #[error(
        "{path}: there is no thread for the heartbeat: {source}; raise the limit of processes (ulimit -u, or pids.max of the cgroup)"
    )]
    Thread {
        /// The region.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file system refused.
    #[error("{path}: {source}")]
    System {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// What to do about a run directory that cannot be one, as the end of the sentence.
fn remedy(error: &HostError) -> &'static str {
    match error {
        HostError::System { source, remedy: "", .. }
            if [ErrorKind::ReadOnlyFilesystem, ErrorKind::NotADirectory].contains(&source.kind()) =>
        {
            "; set POLDER_RUN to a directory in which the processes of this host may make files, as in /dev/shm"
        }
        _ => "",
    }
}

/// A pool as an edge meets it.
pub type AnyPool = Pool<AnyMemory>;

/// Maps the pool at `path`, kept coherent as its superblock says; where that says nothing, as `choice` does.
///
/// # Errors
/// [`SessionError::Coherence`] when both say something else; [`SessionError::TooShort`]; [`RegionError`].
pub fn open_memory(path: &Path, choice: CoherenceChoice) -> Result<AnyMemory, SessionError> {
    // Right for either: nothing is taken from a cache.
    let memory = AnyMemory::new(pool_at(path)?);
    // A superblock that cannot be read is the matter of the caller, who reads it too.
    let kept = read_superblock(&memory).ok().and_then(|superblock| superblock.coherence);
    match (kept, choice.chosen()) {
        (Some(kept), Some(asked)) if kept != asked => {
            Err(SessionError::Coherence { path: path.to_owned(), kept, asked })
        }
        (kept, asked) => Ok(with_coherence(memory, kept.or(asked))),
    }
}

/// What a pool on such memory is formatted with, so that every process keeps it coherent alike: what `choice` asks for, unasked what dax memory
/// needs. Of other memory a pool keeps nothing unasked, and each process says it.
#[must_use]
pub fn formatted_coherence(choice: CoherenceChoice, kind: RegionKind) -> Option<Coherence> {
    choice.chosen().or_else(|| Some(kind.coherence()).filter(|it| *it == Coherence::Software))
}

/// Maps what is at `path`, whatever it is, to be formatted.
///
/// # Errors
/// [`RegionError`].
pub fn open_unformatted(path: &Path, choice: CoherenceChoice) -> Result<AnyMemory, RegionError> {
    Ok(with_coherence(AnyMemory::new(Region::open(path)?), choice.chosen()))
}

/// Memory that is kept coherent so, or as its kind of region is.
fn with_coherence(memory: AnyMemory, coherence: Option<Coherence>) -> AnyMemory {
    let coherence = coherence.unwrap_or_else(|| memory.region().kind().coherence());
    memory.with_coherence(coherence)
}

#[cfg(feature = "instruments")]
fn wrapped(memory: AnyMemory, wrap: &Wrap) -> AnyMemory {
    let mut memory = memory.wrapped(wrap.shadow);
    if let Some(site) = &wrap.without {
        memory = memory.without_flushes_at(site.clone());
    }
    if let Some(cost) = wrap.cost {
        memory = memory.with_cost(cost);
    }
    if let Some(trigger) = wrap.trigger {
        memory = memory.with_trigger(trigger);
    }
    AnyMemory::Wrapped(memory)
}

/// A pool that this process has attached, with a thread that gives its sign of life. Dropping it detaches.
#[derive(Debug)]
pub struct Session {
    // The thread ends first: it holds the pool as well.
    _beat: Heartbeat,
    pool: Arc<AnyPool>,
    memory_per_rank: Option<ByteCount>,
}

/// The session of a library in somebody's process: attached when it is first asked for, with the settings of the environment
/// and of config files. It is not that of the process's children: the threads that they would join and the locks that they
/// would give back are their parent's.
#[derive(Debug, Default)]
pub struct ProcessSession(Mutex<Option<(Arc<Session>, u32)>>);

impl ProcessSession {
    /// One that is not attached.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The session. `before` sees the settings before it is attached.
    ///
    /// # Errors
    /// One line that says what is wrong and what to do.
    pub fn get(&self, before: impl FnOnce(&Settings)) -> Result<Arc<Session>, String> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(kept.take_if(|(_, forks)| *forks != polder_mem::forks()));
        if let Some((session, _)) = &*kept {
            return Ok(Arc::clone(session));
        }
        let settings = Settings::load(Settings::default()).map_err(|error| error.to_string())?;
        before(&settings);
        let session = Arc::new(Session::open(&settings).map_err(|error| in_terms_of(TIMEOUT, &error))?);
        *kept = Some((Arc::clone(&session), polder_mem::forks()));
        Ok(session)
    }

    /// Which pool it is, once it is attached.
    #[must_use]
    pub fn uuid(&self) -> Option<Uuid> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = kept.as_ref().filter(|(_, forks)| *forks == polder_mem::forks());
        own.map(|(session, _)| session.pool().superblock().uuid)
    }

    /// Hands the session out for good; nothing where it is the parent's, or there is none.
    #[must_use]
    pub fn take(&self) -> Option<Arc<Session>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match kept {
            Some((session, forks)) if forks == polder_mem::forks() => Some(session),
            parents => {
                std::mem::forget(parents);
                None
            }
        }
    }
}

impl Session {
    /// Attaches the pool that `settings` name.
    ///
    /// # Errors
    /// [`SessionError`], naming the path, the host id and the remedy.
    pub fn open(settings: &Settings) -> Result<Self, SessionError> {
        let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
        let memory = match &settings.wrap {
            None => open_memory(path, settings.coherence.unwrap_or_default())?,
            #[cfg(not(feature = "instruments"))]
            Some(wrap) => match *wrap {},
            // A shadow keeps its own copies, whatever keeps the region behind them coherent.
            #[cfg(feature = "instruments")]
            Some(wrap) if wrap.shadow => wrapped(AnyMemory::new(pool_at(path)?), wrap),
            #[cfg(feature = "instruments")]
            Some(wrap) => wrapped(open_memory(path, settings.coherence.unwrap_or_default())?, wrap),
        };
        let refused = |source| SessionError::Pool { path: path.to_owned(), source };
        let superblock = read_superblock(&memory).map_err(refused)?;
        let boot = boot()?;
        let host = host_id(settings, &memory, boot).map_err(refused)?;
        let host = host.ok_or_else(|| SessionError::NoHostId { path: path.to_owned() })?;
        let directory = match &settings.run {
            Some(run) => run.clone(),
            None => HostPlan::directory_for(memory.region())?,
        };
        let member = member(settings, host, boot);
        let one_kernel = || match memory.coherence() {
            Coherence::Coherent => host_of_other_kernel(&memory, &superblock, host, boot, member.silence),
            _ => Ok(None),
        };
        let expect_one_kernel = || match one_kernel().map_err(refused)? {
            Some(host) => Err(SessionError::SecondKernel { path: path.to_owned(), host }),
            None => Ok(()),
        };
        expect_one_kernel()?;
        let plan = host_plan(&superblock, &member, directory).map_err(refused)?;
        let attach =
            || -> Result<AnyPool, Refused> { Ok(Pool::attach(memory.clone().attach(&plan)?, member)?) };
        let pool = attach().map(Arc::new).map_err(|error| {
            let apart = |process| {
                let (path, run) = (path.to_owned(), plan.directory.clone());
                SessionError::Apart { path, host, process, run }
            };
            match error {
                Refused::Host(HostError::Apart { .. }) => match holder(&memory, &superblock, &member) {
                    Ok(process) => apart(process),
                    Err(error) => refused(error),
                },
                Refused::Pool(PoolError::Apart { slot, pid, .. }) => {
                    apart(format!(" slot {slot} (pid {pid})"))
                }
                Refused::Host(error) => error.into(),
                Refused::Pool(error) => refused(error),
            }
        })?;
        let beat = Heartbeat::start(Arc::clone(&pool))
            .map_err(|source| SessionError::Thread { path: path.to_owned(), source })?;
        // Of two kernels that attach at once, one at least sees the other.
        expect_one_kernel()?;
        let coherence = pool.memory().coherence();
        tracing::info!(pool = %path.display(), host, ?coherence, "attached");
        Ok(Self { _beat: beat, pool, memory_per_rank: settings.memory_per_rank })
    }

    /// How an endpoint of this process sends, as the settings say.
    #[must_use]
    pub fn endpoint_options(&self) -> EndpointOptions {
        let usual = EndpointOptions::default();
        let memory_bytes = self.memory_per_rank.map_or(usual.memory_bytes, |ByteCount(bytes)| bytes);
        EndpointOptions { memory_bytes, ..usual }
    }

    /// Attaches the pool that `settings` name, which is made first, with `bytes`, when there is no such file.
    ///
    /// # Errors
    /// [`SessionError`].
    pub fn open_or_create(settings: &Settings, bytes: u64) -> Result<Self, SessionError> {
        let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
        if !path.exists() {
            let is_shadow = settings.wrap.as_ref().is_some_and(Wrap::is_shadow);
            let coherence = if is_shadow { None } else { settings.coherence };
            match create_as(path, bytes, &Geometry::for_region(bytes), coherence.unwrap_or_default()) {
                // Another process was faster: its pool is as good.
                Err(SessionError::Region(RegionError::Exists { .. })) => {}
                made => drop(made?),
            }
        }
        Self::open(settings)
    }

    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> &Arc<AnyPool> {
        &self.pool
    }

    /// That the pool has the size that was asked for.
    ///
    /// # Errors
    /// [`SessionError::OtherSize`].
    pub fn expect_bytes(&self, asked: u64) -> Result<(), SessionError> {
        let (kept, path) = (self.pool.superblock().bytes, self.pool.memory().region().path().to_owned());
        if kept == whole_pages(asked) { Ok(()) } else { Err(SessionError::OtherSize { path, kept, asked }) }
    }
}

/// As people write sizes: 1GB is no multiple of a page.
const fn whole_pages(bytes: u64) -> u64 {
    if bytes > PAGE { bytes - bytes % PAGE } else { bytes }
}

/// Maps what is to be a pool.
fn pool_at(path: &Path) -> Result<Region, SessionError> {
    Region::open(path).map_err(|error| match error {
        RegionError::Size { path, bytes, .. } => SessionError::TooShort { path, bytes },
        other => other.into(),
    })
}

/// The pool of a user's own, for where nobody named one: in the folder that no other user enters.
///
/// # Errors
/// [`SessionError::Host`] when something else stands where the folder belongs.
pub fn default_pool() -> Result<PathBuf, SessionError> {
    Ok(HostPlan::own_folder()?.join("pool"))
}

/// Makes the file `path` with a pool of `geometry` in it, of `bytes` or the whole pages of them. The file appears with the
/// whole pool at once.
///
/// # Errors
/// [`SessionError`]; [`RegionError::Exists`] when something is there.
pub fn create(path: &Path, bytes: u64, geometry: &Geometry) -> Result<Superblock, SessionError> {
    create_as(path, bytes, geometry, CoherenceChoice::Auto)
}

/// As [`create`], a pool that all processes keep coherent as `choice` says.
///
/// # Errors
/// Those of [`create`].
pub fn create_as(
    path: &Path,
    bytes: u64,
    geometry: &Geometry,
    choice: CoherenceChoice,
) -> Result<Superblock, SessionError> {
    let bytes = whole_pages(bytes);
    expect_space(path, bytes)?;
    let (region, draft) = Region::draft(path, bytes)?;
    let coherence = formatted_coherence(choice, region.kind());
    let memory = with_coherence(AnyMemory::new(region), coherence);
    // A new file holds nothing that could be lost.
    let (uuid, overwrite) = (Uuid::fresh(), Overwrite::Zeros);
    let made = format_as(&memory, geometry, uuid, overwrite, coherence);
    let made = made.map_err(|source| SessionError::Pool { path: path.to_owned(), source })?;
    draft.publish()?;
    Ok(made)
}

/// Bytes that are free in `folder`.
///
/// # Errors
/// When the file system refuses.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let space = rustix::fs::statvfs(folder)?;
    // A tmpfs without a limit has no blocks.
    Ok(if space.f_blocks == 0 { u64::MAX } else { space.f_bavail.saturating_mul(space.f_frsize) })
}

/// That the file system could hold all of a file, which takes up nothing at first.
fn expect_space(path: &Path, bytes: u64) -> Result<(), SessionError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Where the folder cannot be looked at, neither can the file be made, which says why.
    match free_bytes(folder) {
        Ok(free) if free < bytes => {
            Err(SessionError::NoSpace { path: path.into(), folder: folder.into(), free, bytes })
        }
        _ => Ok(()),
    }
}

/// Why a process cannot be one of its host's.
enum Refused {
    Host(HostError),
    Pool(PoolError),
}

impl From<HostError> for Refused {
    fn from(error: HostError) -> Self {
        Self::Host(error)
    }
}

impl From<PoolError> for Refused {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

/// Which process is the host that this one was to be, as an error says it.
fn holder<M: Memory>(memory: &M, superblock: &Superblock, member: &Member) -> Result<String, PoolError> {
    let live = live_process(memory, superblock, member.host, member.boot)?;
    Ok(live.map_or_else(String::new, |line| format!(" slot {} (pid {})", line.slot.0, line.pid)))
}

/// The id that was set, or that the keeper or else a launcher gives; 0 on memory that has one host.
fn host_id(settings: &Settings, memory: &AnyMemory, boot: u64) -> Result<Option<u16>, PoolError> {
    match look_up_admission(memory, boot, settings.host)? {
        Admission::Admitted(host) => Ok(Some(host)),
        Admission::MustClaim => {
            let mut claim = IdClaim::new(settings.host, boot);
            claim.timeout = settings.timeout.map_or(claim.timeout, |timeout| timeout.0);
            Ok(Some(claim_host_id(memory, &claim)?.host))
        }
        Admission::Launcher => {
            let shared = matches!(memory.region().kind(), RegionKind::DaxDevice | RegionKind::DaxFile);
            Ok(host_without_keeper(settings, shared))
        }
    }
}

/// Machines of a job share memory only where it is a device: a file is one machine's, and has one host unless more are said.
fn host_without_keeper(settings: &Settings, shared: bool) -> Option<u16> {
    let of_machine = if shared { settings.node } else { Some(0) };
    settings.host.or(settings.launched).or(of_machine)
}

fn host_plan(superblock: &Superblock, member: &Member, directory: PathBuf) -> Result<HostPlan, PoolError> {
    let local = LocalLayout::new(&superblock.layout()?);
    let Geometry { hosts, processes, .. } = superblock.geometry;
    Ok(HostPlan {
        pool: (superblock.uuid.0 as u64) ^ (superblock.uuid.0 >> 64) as u64,
        host: member.host,
        hosts,
        processes,
        local_words: local.words(),
        bells: u32::from(hosts) * u32::from(processes),
        directory,
        kept: local.kept_words(),
        patience: member.timeout,
    })
}

fn member(settings: &Settings, host: u16, boot: u64) -> Member {
    let mut member = Member::new(host, boot);
    member.job = settings.job.unwrap_or(0);
    member.quota = settings.quota.map_or(u64::MAX, |quota| quota.0);
    if let Some(timeout) = settings.timeout {
        member.timeout = timeout.0;
    }
    member
}

/// A hash of this kernel's boot id, by which a host line says whose it is.
///
/// # Errors
/// [`SessionError::Boot`] where the kernel does not say it.
pub fn boot() -> Result<u64, SessionError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = std::fs::read_to_string(path)
        .map_err(|source| SessionError::Boot { path: path.to_owned(), source })?;
    Ok(twox_hash::XxHash3_64::oneshot(text.trim().as_bytes()))
}

/// What the size of a file is a multiple of.
const PAGE: u64 = 4096;

/// Beats between two rounds of maintenance.
const MAINTENANCE: u32 = 8;

/// The thread that beats for a process, and cleans up for its host when nobody calls; it ends with it.
#[derive(Debug)]
struct Heartbeat {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Tells the process from its children, which do not have the thread.
    forks: u32,
}

impl Heartbeat {
    fn start<M: Memory + Send + Sync + 'static>(pool: Arc<Pool<M>>) -> io::Result<Self> {
        let (stop, stopped) = channel();
        let pause = pool.member().silence / 8;
        let thread = threads::start(Builder::new().name("polder-beat".to_owned()), move || {
            for beat in 1.. {
                if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let alive = match pool.check_membership() {
                    Err(evicted @ PoolError::Evicted { .. }) => Err(evicted),
                    _ => pool.beat(),
                };
                if let Err(error) = alive {
                    tracing::error!("no more heartbeats: {error}");
                    return;
                }
                if beat % MAINTENANCE == 0
                    && let Err(error) = pool.maintain_within(pause)
                {
                    tracing::warn!(
                        "objects that were destroyed, or left by dead processes, stay for now: {error}"
                    );
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread), forks: forks() })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        if self.forks != forks() {
            std::mem::forget((self.stop.take(), self.thread.take()));
            return;
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so already.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use polder_pool::keeper::{Keeper, KeeperTask};

    use super::*;

    /// A directory that is gone when the test ends.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("polder-session-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn settings(&self, host: u16) -> Settings {
            Settings {
                pool: Some(self.0.join("pool")),
                run: Some(self.0.clone()),
                host: Some(host),
                ..Settings::default()
            }
        }

        fn files(&self) -> usize {
            std::fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_last_session_leaves_the_pool_and_nothing_else() {
        let scratch = Scratch::new("last");
        let first = Session::open_or_create(&scratch.settings(0), 64 << 20).unwrap();
        let second = Session::open_or_create(&scratch.settings(1), 64 << 20).unwrap();
        assert_eq!(first.pool().hosts_present().unwrap(), 0b11);
        drop(first);
        drop(second);
        assert_eq!(scratch.files(), 1);
    }

    #[test]
    fn coherent_memory_is_refused_where_a_host_of_another_kernel_lives() {
        let scratch = Scratch::new("kernels");
        drop(Session::open_or_create(&scratch.settings(0), 64 << 20).unwrap());
        let path = scratch.0.join("pool");
        let memory = open_memory(&path, CoherenceChoice::Coherent).unwrap();
        let superblock = read_superblock(&memory).unwrap();
        let member = member(&scratch.settings(1), 1, !boot().unwrap());
        let plan = host_plan(&superblock, &member, scratch.0.clone()).unwrap();
        let other = Arc::new(Pool::attach(memory.attach(&plan).unwrap(), member).unwrap());
        let beats = Heartbeat::start(Arc::clone(&other)).unwrap();
        for host in [0, 2] {
            let error = Session::open(&scratch.settings(host)).unwrap_err();
            assert!(matches!(error, SessionError::SecondKernel { host: 1, .. }), "{error}");
        }
        let software = Settings { coherence: Some(CoherenceChoice::Software), ..scratch.settings(0) };
        drop(Session::open(&software).unwrap());
        // Nobody is there any more, whatever its line says.
        drop(beats);
        drop(Session::open(&scratch.settings(0)).unwrap());
        drop(other);
    }

    #[test]
    fn a_pool_that_was_not_named_or_is_not_there_is_an_error_with_its_remedy() {
        let error = Session::open(&Settings::default()).unwrap_err();
        assert_eq!(error.to_string(), "no pool is named; give --pool PATH or set POLDER_POOL");
        let scratch = Scratch::new("missing");
        let error = Session::open(&scratch.settings(0)).unwrap_err().to_string();
        assert!(
            error.contains("pool") && error.contains("no such file") || error.contains("No such file"),
            "{error}"
        );
        std::fs::write(scratch.0.join("pool"), vec![7; 1 << 20]).unwrap();
        let error = Session::open(&scratch.settings(0)).unwrap_err().to_string();
        assert!(error.contains("polder pool format"), "{error}");
    }

    #[test]
    fn the_command_that_removes_a_pool_of_another_size_can_be_copied_whatever_its_path() {
        let (path, kept, asked) = ("/dev/shm/my pool".into(), 1 << 20, 2 << 20);
        let error = SessionError::OtherSize { path, kept, asked }.to_string();
        assert!(error.ends_with("(`polder pool destroy --yes --pool '/dev/shm/my pool'`)"), "{error}");
    }

    #[test]
    fn every_attach_follows_the_coherence_of_the_pool_and_another_is_refused_by_both_names() {
        use CoherenceChoice::{Auto, Coherent, HdmDb, Software};
        for (kept, other) in [(Software, Coherent), (Coherent, HdmDb), (HdmDb, Software)] {
            let scratch = Scratch::new(&format!("kept-{kept}"));
            let asked = |choice| Settings { coherence: choice, ..scratch.settings(0) };
            let made = Session::open_or_create(&asked(Some(kept)), 64 << 20).unwrap();
            let uuid = made.pool().superblock().uuid;
            for choice in [None, Some(Auto), Some(kept)] {
                let session = Session::open_or_create(&asked(choice), 64 << 20).unwrap();
                assert_eq!(Some(session.pool().memory().coherence()), kept.chosen());
                assert_eq!(session.pool().superblock().uuid, uuid);
            }
            let refused = Session::open(&asked(Some(other))).unwrap_err().to_string();
            let words = format!("pool was formatted with --coherence {kept}, and {other} is set here;");
            assert!(refused.contains(&words), "{refused}");
        }
        for (kind, unasked) in [
            (RegionKind::DaxDevice, Some(Coherence::Software)),
            (RegionKind::DaxFile, Some(Coherence::Software)),
            (RegionKind::Tmpfs, None),
            (RegionKind::File, None),
        ] {
            assert_eq!(formatted_coherence(Auto, kind), unasked);
            assert_eq!(formatted_coherence(HdmDb, kind), Some(Coherence::HdmDb));
        }
        let scratch = Scratch::new("kept-by-none");
        create(&scratch.0.join("pool"), 64 << 20, &Geometry::for_region(64 << 20)).unwrap();
        for choice in [Software, Coherent, HdmDb] {
            let settings = Settings { coherence: Some(choice), ..scratch.settings(0) };
            assert_eq!(Some(Session::open(&settings).unwrap().pool().memory().coherence()), choice.chosen());
        }
    }

    #[test]
    fn a_machine_of_a_slurm_job_is_the_host_of_its_number_where_memory_is_shared_and_nothing_else_is_said() {
        let node = Settings { node: Some(3), ..Settings::default() };
        assert_eq!([true, false].map(|shared| host_without_keeper(&node, shared)), [Some(3), Some(0)]);
        let said = Settings { host: Some(1), ..node };
        assert_eq!([true, false].map(|shared| host_without_keeper(&said, shared)), [Some(1); 2]);
        assert_eq!(host_without_keeper(&Settings::default(), true), None);
    }

    #[test]
    fn hosts_of_a_shadow_see_each_other_through_flushes_alone() {
        let scratch = Scratch::new("shadow");
        let shadow = |host| Settings { wrap: Some("shadow".parse().unwrap()), ..scratch.settings(host) };
        let first = Session::open_or_create(&shadow(0), 64 << 20).unwrap();
        let second = Session::open(&shadow(1)).unwrap();
        for session in [&first, &second] {
            assert_eq!(session.pool().hosts_present().unwrap(), 0b11);
        }
    }

    #[test]
    fn a_host_without_an_id_asks_the_keeper_for_one_and_its_processes_share_it() {
        let scratch = Scratch::new("keeper");
        let settings = Settings { host: None, ..scratch.settings(0) };
        create(&scratch.0.join("pool"), 64 << 20, &Geometry::for_region(64 << 20)).unwrap();
        let memory = open_memory(&scratch.0.join("pool"), CoherenceChoice::Coherent).unwrap();
        let charge =
            KeeperTask { incarnation: 1, id_source: Some(polder_pool::IdSource::Keeper), evict_after: None };
        let mut keeper = Keeper::start(memory, charge).unwrap();
        let (stop, stopped) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                    keeper.tick().unwrap();
                }
            });
            let sessions = [Session::open(&settings).unwrap(), Session::open(&settings).unwrap()];
            let hosts = sessions.each_ref().map(|session| session.pool().member().host);
            assert_eq!(hosts[0], hosts[1]);
            drop(stop);
        });
    }

    #[test]
    fn a_timeout_that_is_set_holds_for_the_attachment_too() {
        let scratch = Scratch::new("timeout");
        create(&scratch.0.join("pool"), 64 << 20, &Geometry::for_region(64 << 20)).unwrap();
        let timeout = Some(crate::settings::TimeSpan(std::time::Duration::from_millis(30)));
        let settings = Settings { host: None, timeout, ..scratch.settings(0) };
        let member = member(&settings, 0, 1);
        let memory = open_memory(&scratch.0.join("pool"), CoherenceChoice::Coherent).unwrap();
        let superblock = read_superblock(&memory).unwrap();
        let plan = host_plan(&superblock, &member, scratch.0.clone()).unwrap();
        assert_eq!([member.timeout, plan.patience], [std::time::Duration::from_millis(30); 2]);
        let charge =
            KeeperTask { incarnation: 1, id_source: Some(polder_pool::IdSource::Keeper), evict_after: None };
        drop(Keeper::start(memory, charge).unwrap());
        let refused = Session::open(&settings).unwrap_err().to_string();
        assert!(refused.contains("no keeper answered within 30 ms"), "{refused}");
    }

    #[test]
    fn sizes_in_thousands_make_pools_of_whole_pages() {
        let scratch = Scratch::new("pages");
        let crate::settings::ByteCount(bytes) = "17MB".parse().unwrap();
        drop(Session::open_or_create(&scratch.settings(0), bytes).unwrap());
        let made = std::fs::metadata(scratch.0.join("pool")).unwrap().len();
        assert_eq!((bytes, made), (17_000_000, 16_998_400));
    }

    #[test]
    fn a_host_that_is_evicted_is_told_by_its_next_call() {
        let scratch = Scratch::new("evicted");
        let [one, other] =
            [0, 1].map(|host| Session::open_or_create(&scratch.settings(host), 64 << 20).unwrap());
        one.pool().evict(1).map(drop).unwrap();
        let refused = loop {
            if let Err(error) = {
                let pool = other.pool();
                pool.create("/late", 64).and_then(|object| {
                    pool.close(object);
                    pool.destroy("/late")
                })
            } {
                break error;
            }
            std::thread::yield_now();
        };
        assert!(matches!(refused, PoolError::Evicted { host: 1, .. }), "{refused}");
        one.pool().create("/still", 64).map(drop).unwrap();
    }

    #[test]
    fn of_many_who_make_one_pool_each_attaches_the_same() {
        let scratch = Scratch::new("race");
        let uuids: Vec<_> = std::thread::scope(|scope| {
            let open = |host| Session::open_or_create(&scratch.settings(host), 64 << 20).unwrap();
            let threads: Vec<_> = (0..4).map(|host| scope.spawn(move || open(host))).collect();
            let sessions: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            sessions.iter().map(|session| session.pool().superblock().uuid).collect()
        });
        assert!(uuids.iter().all(|uuid| *uuid == uuids[0]), "{uuids:?}");
    }
}
