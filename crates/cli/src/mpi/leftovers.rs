//! What a job leaves on this machine when its processes are killed: processes of its own, and files in /dev/shm.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getuid, pidfd_open, pidfd_send_signal};

/// What the environment of every process of a run says: a word that no other run has.
pub(super) const MARK: &str = "POLDER_MPI_RUN";

/// How long processes that are killed may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Kills the processes of this machine that have `mark` in their environment, until there are none.
pub(super) fn kill_marked(mark: &str) {
    let start = Instant::now();
    // A process of another user has an environment that cannot be read.
    let is_marked = |pid: u32| is_in(&fs::read(format!("/proc/{pid}/environ")).unwrap_or_default(), mark);
    let kill = |pid: u32| {
        let process = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
        // What was marked may have ended, and its id be another's: the descriptor stays with one process.
        (is_marked(pid) && pidfd_send_signal(&process, Signal::KILL).is_ok()).then_some(process)
    };
    loop {
        let marked: Vec<_> = processes().filter(|&pid| is_marked(pid)).collect();
        if marked.is_empty() || start.elapsed() > PATIENCE {
            return;
        }
        // A look at all processes costs much where there are many: the next one comes when these have ended, with their files closed.
        let killed: Vec<_> = marked.into_iter().filter_map(kill).collect();
        for process in &killed {
            let left = Timespec::try_from(PATIENCE.saturating_sub(start.elapsed())).ok();
            // Interrupted or not, another look follows.
            let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], left.as_ref());
        }
        if killed.is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// How the name of a run's tally begins, before its mark.
pub(super) const TALLIES: &str = "polder-mpi-";
/// How it ends, behind the mark.
pub(super) const TALLY_END: &str = ".tally";

/// Removes the tallies in `folder` of this user's runs that were killed: a run that goes on has locked its own.
pub(super) fn remove_tallies(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let mark = name.to_str().and_then(|name| name.strip_prefix(TALLIES)?.strip_suffix(TALLY_END));
        let is_tally = mark.is_some_and(|mark| mark.len() == 32 && u128::from_str_radix(mark, 16).is_ok());
        let is_own = || entry.metadata().is_ok_and(|it| it.is_file() && it.uid() == getuid().as_raw());
        if is_tally && is_own() && fs::File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Whether a process, which is there, may be of the run with this mark. One that ends has lost its environment before its locks.
pub(super) fn may_be_marked(pid: u32, mark: &str) -> bool {
    fs::read(format!("/proc/{pid}/environ")).is_ok_and(|all| all.is_empty() || is_in(&all, mark))
}

/// Whether an environment has the mark.
fn is_in(environment: &[u8], mark: &str) -> bool {
    let entry = format!("{MARK}={mark}");
    environment.split(|&byte| byte == 0).any(|variable| variable == entry.as_bytes())
}

/// How the files begin that MPI libraries make in /dev/shm: MPICH's, Open MPI's to 4.1 and from 5.0 on, Intel MPI's, and those of the
/// layers below them.
const OF_LIBRARIES: [&str; 9] = [
    "mpich_shm_",
    "mpich_shar_tmp",
    "vader_segment.",
    "sm_segment.",
    "Intel_MPI_",
    "psm_shm.",
    "psm2_shm.",
    "psm3_shm.",
    "ucx_shm_posix_",
];

/// Removes files of MPI libraries in `folder` that were made since `start`, are this user's, and are in use by no process; says how many.
/// A process has such a file open before it has mapped it, and mapped from then on.
pub(super) fn remove_files(folder: &Path, start: SystemTime) -> usize {
    let is_left = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let Ok(metadata) = fs::symlink_metadata(file) else { return false };
        let is_new = metadata.modified().is_ok_and(|made| made >= start);
        let is_theirs = OF_LIBRARIES.iter().any(|begin| name.starts_with(begin));
        is_theirs && metadata.is_file() && metadata.uid() == getuid().as_raw() && is_new
    };
    let files = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut left: BTreeSet<_> = files.filter(is_left).collect();
    if left.is_empty() {
        return 0;
    }
    for pid in processes() {
        for file in used_by(&Path::new("/proc").join(pid.to_string()), folder) {
            left.remove(&file);
        }
    }
    left.iter().filter(|file| fs::remove_file(file).is_ok()).count()
}

/// Files of `folder` that the process of this folder of /proc has open, then those that it has mapped. One that ends has lost its memory
/// before its files are closed, and uses none.
fn used_by(process: &Path, folder: &Path) -> Vec<PathBuf> {
    let open = fs::read_dir(process.join("fd")).into_iter().flatten();
    let open = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut used: Vec<_> = open.filter(|file| file.starts_with(folder)).collect();
    // Any process may have mapped a file whose name is no UTF-8.
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    if maps.is_empty() {
        return vec![];
    }
    let path = |line: &[u8]| {
        Some(PathBuf::from(OsStr::from_bytes(&line[line.iter().position(|&byte| byte == b'/')?..])))
    };
    used.extend(maps.split(|&byte| byte == b'\n').filter_map(path).filter(|file| file.starts_with(folder)));
    used
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_in_use_that_a_process_has_open_or_mapped_whatever_else_it_has_mapped() {
        let process = tempfile::tempdir().unwrap();
        let at = |name: &str| process.path().join(name);
        fs::create_dir(at("fd")).unwrap();
        std::os::unix::fs::symlink("/dev/shm/mpich_shm_open", at("fd/3")).unwrap();
        std::os::unix::fs::symlink("socket:[1]", at("fd/4")).unwrap();
        let maps = b"1000-2000 rw-s 00000000 00:1a 7    /dev/shm/mpich_shm_mapped\n\
                     2000-3000 r--p 00000000 00:1a 8    /tmp/of\xffthe program\n3000-4000 rw-p 00000000 00:00 0\n";
        fs::write(at("maps"), maps).unwrap();
        let used = used_by(process.path(), Path::new("/dev/shm"));
        assert_eq!(used, ["/dev/shm/mpich_shm_open", "/dev/shm/mpich_shm_mapped"].map(PathBuf::from));
        // It has lost its memory, and is closing its files.
        fs::write(at("maps"), "").unwrap();
        assert!(used_by(process.path(), Path::new("/dev/shm")).is_empty());
    }
}
