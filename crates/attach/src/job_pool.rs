//! A pool of a job's own, on one machine: one process of the job makes it, the others share it, and the last removes it.
//!
//! Each process holds a lock on the file for as long as it uses the pool. A file that no process has locked was left by a
//! job that was killed, and the next job of this user removes it, if it has the name of a job's pool and no process has attached it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use polder_mem::HostPlan;
use polder_pool::format::MAX_PROCESSES;
use polder_pool::group::{self, GroupOptions};
use polder_pool::{Geometry, Layout, Uuid, endpoint};
use rustix::fs::{FlockOperation, fcntl_lock};

use crate::session::{SessionError, create, free_bytes};

/// The usual size for each rank.
const RANK_BYTES: u64 = 1 << 30;
/// No pool is larger unless somebody asks for it.
const MOST_BYTES: u64 = 64 << 30;
/// The size is a multiple of this, in case the file system has huge pages.
const HUGE_PAGE: u64 = 2 << 20;
/// A draft of this age was given up.
const DRAFT: Duration = Duration::from_secs(60);

/// A process's share of a pool of its job's own. Dropping it gives the lock back and leaves the file.
#[derive(Debug)]
pub struct JobPool {
    path: PathBuf,
    lock: File,
}

impl JobPool {
    /// Where the pool of this user's job `job` lies, a word of 16 hexadecimal digits that no other job has.
    #[must_use]
    pub fn place(job: &str) -> PathBuf {
        Path::new(HostPlan::DIRECTORY).join(format!("{}{job}.pool", prefix()))
    }

    /// Where a pool of this user's next `polder mpi run` lies. No other run has this place, whatever its job.
    #[must_use]
    pub fn place_of_mpi() -> PathBuf {
        Path::new(HostPlan::DIRECTORY).join(format!("{}{:016x}.pool", mpi_prefix(), Uuid::fresh().0 as u64))
    }

    /// Makes the pool at `path`, for so many ranks, and takes a share of it. Removes what killed jobs have left beside it.
    ///
    /// # Errors
    /// Those of [`create`]; [`SessionError::NoRoom`] when too little is free; [`SessionError::System`] when the file system refuses.
    pub fn make(path: &Path, ranks: u16) -> Result<Self, SessionError> {
        let folder = path.parent().unwrap_or(path);
        remove_left(folder);
        let bytes = bytes_for(ranks, folder, free_bytes(folder).unwrap_or(u64::MAX))?;
        Self::make_as(path, bytes, &geometry(ranks, bytes))
    }

    /// Makes a pool of so many bytes at `path`, and takes a share of it.
    ///
    /// # Errors
    /// Those of [`create`]; [`SessionError::System`] when the file system refuses.
    pub fn make_as(path: &Path, bytes: u64, geometry: &Geometry) -> Result<Self, SessionError> {
        let draft = path.with_extension("pool.draft");
        create(&draft, bytes, geometry)?;
        let system = |source| SessionError::System { path: path.to_owned(), source };
        // It has its name once it is locked, so that no other job takes it for left.
        let lock = locked(&draft).map_err(system)?;
        std::fs::rename(&draft, path).map_err(system)?;
        Ok(Self { path: path.to_owned(), lock })
    }

    /// Takes a share of the pool that another process of the job has made.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when it is gone again; what else the file system refuses.
    pub fn share(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), lock: locked(path)? })
    }

    /// Gives the share back; the last one removes the pool.
    pub fn release(self) {
        remove_unshared(&self.path, &self.lock);
    }
}

/// The size of a job's own pool of so many ranks where so many bytes are free: a GiB for each rank, 64 GiB and half of what is free at
/// most. It takes memory only as it is used.
#[must_use]
pub fn usual_bytes(free: u64, ranks: u16) -> u64 {
    let wanted = RANK_BYTES.saturating_mul(ranks.max(1).into());
    wanted.min(MOST_BYTES).min(free / 2 / HUGE_PAGE * HUGE_PAGE)
}

/// The size of a pool in `folder` for so many ranks, where so many bytes are free: the usual one, or the least that is enough.
fn bytes_for(ranks: u16, folder: &Path, free: u64) -> Result<u64, SessionError> {
    let usual = usual_bytes(free, ranks);
    if is_enough(ranks, usual) {
        return Ok(usual);
    }
    let needed = (22..44).map(|power| 1 << power).find(|&bytes| is_enough(ranks, bytes)).unwrap_or(u64::MAX);
    match needed <= free {
        true => Ok(needed),
        false => Err(SessionError::NoRoom { folder: folder.into(), free, ranks, needed }),
    }
}

/// Whether a pool of so many bytes holds a group of all ranks, and their endpoints.
fn is_enough(ranks: u16, bytes: u64) -> bool {
    let geometry = geometry(ranks, bytes);
    let staging = group::extent_bytes(&GroupOptions::default()).div_ceil(geometry.chunk_bytes);
    let needed = u64::from(ranks) * staging + endpoint::chunks(&geometry, ranks.into(), ranks.into());
    Layout::new(&geometry, bytes).is_ok_and(|layout| needed <= layout.chunks().into())
}

fn geometry(ranks: u16, bytes: u64) -> Geometry {
    Geometry { processes: ranks.clamp(16, MAX_PROCESSES), ..Geometry::for_region(bytes) }
}

/// How the names of this user's pools begin.
fn prefix() -> String {
    format!("polder-{}-", rustix::process::getuid().as_raw())
}

/// As [`prefix`], of jobs that `polder mpi run` starts.
fn mpi_prefix() -> String {
    format!("polder-mpi-{}-", rustix::process::getuid().as_raw())
}

fn locked(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).open(path)?;
    file.lock_shared()?;
    Ok(file)
}

/// Removes the pool at `path` if no process but this one, by `file`, has it.
fn remove_unshared(path: &Path, file: &File) {
    if file.try_lock().is_ok() {
        drop(std::fs::remove_file(path));
    }
}

/// Whether a process has attached the pool `file`: each holds a record lock on it, whether it knows of shares or not. The lock that
/// tells it is gone once `file` is closed.
fn is_attached(file: &File) -> bool {
    fcntl_lock(file, FlockOperation::NonBlockingLockExclusive).is_err()
}

/// Whether a pool of this name is a job's own. Any other is its user's, whatever it begins with.
fn is_of_job(name: &str) -> bool {
    let is_word =
        |job: &str| job.len() == 16 && job.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    [prefix(), mpi_prefix()].iter().any(|prefix| name.strip_prefix(&**prefix).is_some_and(is_word))
}

/// Removes the pools in `folder` of this user's jobs that were killed before they could, and drafts that were given up.
pub fn remove_left(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Some(name) = name.to_str() else { continue };
        if name.strip_suffix(".pool").is_some_and(is_of_job) {
            match File::options().read(true).write(true).open(&path) {
                Ok(file) if !is_attached(&file) => remove_unshared(&path, &file),
                _ => {}
            }
        } else if name.strip_suffix(".pool.draft").is_some_and(is_of_job) {
            let age = entry.metadata().and_then(|it| it.modified()).ok().and_then(|it| it.elapsed().ok());
            if age.is_some_and(|age| age > DRAFT) {
                drop(std::fs::remove_file(&path));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::Scratch;

    use super::*;
    use crate::session::Session;
    use crate::settings::Settings;

    #[test]
    fn the_last_process_removes_the_pool_and_the_next_job_one_of_a_killed_job() {
        let scratch = Scratch::new();
        let path = |job: u64| scratch.path().join(format!("{}{job:016x}.pool", prefix()));
        let [one, killed, next] = [1, 2, 3].map(path);
        let first = JobPool::make(&one, 2).unwrap();
        let second = JobPool::share(&one).unwrap();
        drop(JobPool::make(&killed, 2).unwrap());
        std::fs::write(scratch.path().join("polder-other.pool"), "of another user").unwrap();
        first.release();
        assert!(one.exists(), "the second process has it");
        let last = JobPool::make(&next, 100).unwrap();
        let left = [&one, &killed, &next].map(|path| path.exists());
        assert_eq!(left, [true, false, true], "only what no process has is removed");
        second.release();
        last.release();
        assert!(!one.exists() && !next.exists());
        assert_eq!(JobPool::share(&one).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1, "nothing else is touched");
    }

    #[test]
    fn a_pool_that_is_no_jobs_stays_whatever_its_name_and_so_does_one_that_a_process_has_attached() {
        let scratch = Scratch::new();
        let at = |name: String| scratch.path().join(name);
        let named = ["hostile", "0123456789abcdef0", "0123456789ABCDEF", "0123456789abcdeg"];
        let named = named.map(|name| at(format!("{}{name}.pool", prefix())));
        let drafts = at(format!("{}mine.pool.draft", prefix()));
        let jobs = [prefix(), mpi_prefix()].map(|prefix| at(format!("{prefix}0123456789abcdef.pool")));
        for path in named.iter().chain(&jobs).chain([&drafts]) {
            create(path, 16 << 20, &geometry(2, 16 << 20)).unwrap();
        }
        File::open(&drafts).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        let attach = |path: &PathBuf| {
            let settings = Settings {
                pool: Some(path.clone()),
                run: Some(scratch.path().into()),
                ..Settings::default()
            };
            Session::open(&settings).unwrap()
        };
        let attached = jobs.each_ref().map(attach);
        remove_left(scratch.path());
        for path in named.iter().chain(&jobs).chain([&drafts]) {
            assert!(path.exists(), "{}", path.display());
        }
        drop(attached);
        remove_left(scratch.path());
        assert!(named.iter().all(|path| path.exists()) && drafts.exists());
        assert!(!jobs.iter().any(|path| path.exists()));
    }

    #[test]
    fn a_pool_that_needs_more_than_is_free_is_refused_with_both_sizes_and_the_remedy() {
        let refused = bytes_for(2, Path::new("/dev/shm"), 0).unwrap_err().to_string();
        let whole = "/dev/shm has 0 B free, and a pool for 2 ranks needs 16.0 MiB; make room there (a container has --shm-size \
                     or an emptyDir of medium Memory), or name a pool elsewhere in POLDER_POOL";
        assert_eq!(refused, whole);
        assert_eq!(bytes_for(2, Path::new("/dev/shm"), 16 << 20).unwrap(), 16 << 20, "more than half");
        for ranks in [1, 2, 8, 64] {
            let bytes = bytes_for(ranks, Path::new("/dev/shm"), u64::MAX).unwrap();
            assert!(is_enough(ranks, bytes), "{ranks} ranks in {bytes} bytes");
        }
    }

    #[test]
    fn a_pool_takes_a_gibibyte_a_rank_and_half_of_what_is_free_at_most() {
        let sizes = [(u64::MAX, 1), (u64::MAX, 8), (u64::MAX, 1024), (250 << 30, 200), (99 << 20, 8)];
        let expected = [1 << 30, 8 << 30, 64 << 30, 64 << 30, 48 << 20];
        assert_eq!(sizes.map(|(free, ranks)| usual_bytes(free, ranks)), expected);
    }

    #[test]
    fn a_pool_that_nobody_has_used_takes_next_to_no_memory() {
        use std::os::unix::fs::MetadataExt;
        let scratch = Scratch::new();
        let path = scratch.path().join("sparse.pool");
        let pool = JobPool::make(&path, 8).unwrap();
        let made = std::fs::metadata(&path).unwrap();
        assert!(made.blocks() * 512 < 1 << 20, "{} of {} bytes are there", made.blocks() * 512, made.len());
        pool.release();
    }
}
