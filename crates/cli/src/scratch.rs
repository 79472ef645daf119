//! A directory in memory that is gone when its maker is, in whatever way that ends.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use polder_mem::testing;
use rustix::fs::{FlockOperation, flock};

/// The directory.
pub(crate) struct Scratch {
    directory: testing::Scratch,
    /// Locked for as long as a process has it.
    _lock: File,
    _guard: Guard,
}

impl Scratch {
    pub(crate) fn new() -> io::Result<Self> {
        remove_left(Path::new(PLACE));
        let directory = testing::Scratch::new();
        let lock = lock(directory.path())?;
        let guard = Guard::over(directory.path())?;
        Ok(Self { directory, _lock: lock, _guard: guard })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Where directories are made.
const PLACE: &str = "/dev/shm";
/// A file that is locked while its directory is somebody's.
const LOCK: &str = ".lock";

/// Makes the lock of a directory: it has its name once it is locked.
fn lock(directory: &Path) -> io::Result<File> {
    let draft = directory.join(".new");
    let file = File::create(&draft)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    std::fs::rename(draft, directory.join(LOCK))?;
    Ok(file)
}

/// Removes directories whose makers were killed, and their guards with them: those whose lock nobody holds.
fn remove_left(place: &Path) {
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(b"polder-test-");
        let Ok(file) = File::open(path.join(LOCK)) else { continue };
        if is_ours && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // What another user made stays.
            drop(std::fs::remove_dir_all(path));
        }
    }
}

/// A command in a process group of its own, all of which is killed when this process ends, in whatever way.
pub(crate) struct Tied {
    pub(crate) child: Child,
    _guard: Guard,
}

impl Tied {
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        // The guard comes first: a signal may end this process between the two.
        let (guard, group) = Guard::over_group()?;
        let child = command.process_group(group).spawn()?;
        Ok(Self { child, _guard: guard })
    }

    /// What it says to its end.
    pub(crate) fn output(command: &mut Command) -> io::Result<Output> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let Self { child, _guard } = Self::spawn(command)?;
        child.wait_with_output()
    }
}

/// Removes the directory of a process that is interrupted or killed: a process of its own, out of reach of Ctrl-C, that
/// waits until its maker is gone.
struct Guard(Child);

impl Guard {
    /// A process group, all of which it kills, itself too, when this process has ended.
    fn over_group() -> io::Result<(Self, i32)> {
        let mut guard = Command::new("sh");
        guard.args(["-c", "cat > /dev/null; kill -s KILL -- \"-$$\""]);
        let guard = Self(guard.stdin(Stdio::piped()).process_group(0).spawn()?);
        let group = i32::try_from(guard.0.id()).expect("Linux has ids below 2^22");
        Ok((guard, group))
    }

    fn over(directory: &Path) -> io::Result<Self> {
        let mut guard = Command::new("sh");
        guard.args(["-c", "cat > /dev/null; rm -rf \"$0\""]).arg(directory);
        Ok(Self(guard.stdin(Stdio::piped()).process_group(0).spawn()?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It has nothing left to do, and says so by ending.
        drop(self.0.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_run_removes_what_a_killed_one_left_and_nothing_of_the_living() {
        let place = testing::Scratch::new();
        let [killed, alive, other] = ["polder-test-1-0", "polder-test-2-0", "polder-test-3-0"].map(|name| {
            let path = place.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("pool"), "bytes").unwrap();
            path
        });
        drop(lock(&killed).unwrap());
        let _held = lock(&alive).unwrap();
        remove_left(place.path());
        assert_eq!((killed.exists(), alive.exists(), other.exists()), (false, true, true));
    }
}
