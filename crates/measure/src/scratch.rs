//! A directory in memory that is gone when its maker is, in whatever way that ends.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use polder_mem::testing;
use polder_pool::Uuid;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};

/// The directory.
pub struct Scratch {
    path: PathBuf,
    /// The process that made it.
    maker: u32,
    /// Locked for as long as a process has it.
    _lock: File,
    _guard: DirectoryGuard,
}

impl Scratch {
    /// Makes it in /dev/shm, and removes those whose makers were killed.
    ///
    /// # Errors
    /// When it cannot be made, naming it.
    pub fn new() -> io::Result<Self> {
        Self::below(Path::new(PLACE))
    }

    fn below(place: &Path) -> io::Result<Self> {
        remove_left(place);
        let maker = std::process::id();
        let path = place.join(format!("{NAME}{maker}-{}", Uuid::fresh()));
        let make = || {
            std::fs::create_dir(&path)?;
            Ok((lock(&path)?, DirectoryGuard::over(&path)?))
        };
        let (lock, guard) = make().map_err(|error: io::Error| {
            drop(std::fs::remove_dir_all(&path));
            io::Error::new(error.kind(), format!("{}: {error}; what is measured lies there", path.display()))
        })?;
        Ok(Self { path, maker, _lock: lock, _guard: guard })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.maker == std::process::id() {
            drop(std::fs::remove_dir_all(&self.path));
        }
    }
}

/// Where directories are made.
const PLACE: &str = "/dev/shm";
/// How their names begin.
const NAME: &str = "polder-test-";
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
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(NAME.as_bytes());
        let Ok(file) = File::open(path.join(LOCK)) else { continue };
        if is_ours && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // What another user made stays.
            drop(std::fs::remove_dir_all(path));
        }
    }
}

/// A command in a process group of its own, all of which is killed when this process ends, in whatever way. The thread that starts
/// it has to live as long as it.
pub struct Tied {
    /// The command.
    pub child: Child,
    guard: GroupGuard,
}

impl Tied {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        // The guard comes first: a signal may end this process between the two. The guard may then end before the command is in
        // its group, so the kernel watches too.
        let (guard, group) = GroupGuard::new()?;
        let child = testing::tie(command).process_group(group).spawn()?;
        Ok(Self { child, guard })
    }

    /// Runs it to its end. The output is what it wrote to stdout.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn output(command: &mut Command) -> io::Result<Output> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let Self { child, guard: _guard } = Self::spawn(command)?;
        child.wait_with_output()
    }
}

/// A process of its own, out of reach of Ctrl-C, that does `task` when the last process has ended that has the other end of
/// its stdin.
fn guard(task: &str, argument: &Path) -> io::Result<Child> {
    let mut guard = Command::new("sh");
    guard.args(["-c", &format!("read -r _; {task}")]).arg(argument);
    guard.stdin(Stdio::piped()).process_group(0).spawn()
}

/// Removes a directory when its maker and all commands that the maker has started since are gone: none makes files there
/// any more.
struct DirectoryGuard(Child);

impl DirectoryGuard {
    fn over(directory: &Path) -> io::Result<Self> {
        let guard = Self(guard("rm -rf \"$0\"", directory)?);
        if let Some(end) = &guard.0.stdin {
            fcntl_setfd(end, FdFlags::empty())?;
        }
        Ok(guard)
    }
}

impl Drop for DirectoryGuard {
    fn drop(&mut self) {
        // The directory is gone, and a command that still runs would keep it waiting.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Kills its process group, itself too, when its maker has ended.
struct GroupGuard(Child);

impl GroupGuard {
    fn new() -> io::Result<(Self, i32)> {
        let guard = Self(guard("kill -s KILL -- \"-$$\"", Path::new("sh"))?);
        let group = i32::try_from(guard.0.id()).expect("Linux has ids below 2^22");
        Ok((guard, group))
    }
}

impl Drop for GroupGuard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It has nothing left to do, and says so by ending.
        drop(self.0.wait());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

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

    #[test]
    fn a_place_that_takes_no_directory_is_an_error_that_names_it() {
        let place = testing::Scratch::new();
        let file = place.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = Scratch::below(&file).err().unwrap().to_string();
        assert!(
            error.starts_with(&file.display().to_string()) && error.ends_with("is measured lies there"),
            "{error}"
        );
        drop(Scratch::below(place.path()).unwrap());
        assert_eq!(place.names(), ["file"]);
    }

    #[test]
    fn a_killed_maker_leaves_no_directory_though_its_command_still_makes_files() {
        const ROUNDS: usize = 200;
        for round in 0..ROUNDS {
            // All processes of a round inherit one end, so that the other ends when none is left.
            let (mut all_ended, held) = std::io::pipe().unwrap();
            let mut maker = testing::Child::fork(|| {
                fcntl_setfd(&held, FdFlags::empty()).unwrap();
                let scratch = Scratch::new().unwrap();
                let mut command = Command::new("sh");
                command.args(["-c", "n=0; while :; do : > \"$0/$n\"; n=$(((n + 1) % 999)); done"]);
                let _tied = Tied::spawn(command.arg(scratch.path())).unwrap();
                loop {
                    std::thread::park();
                }
            });
            drop(held);
            let own = format!("polder-test-{}-", maker.pid());
            let directory = loop {
                let mut entries = std::fs::read_dir(PLACE).unwrap().flatten();
                let found = entries.find(|it| it.file_name().to_string_lossy().starts_with(&own));
                match found.map(|it| it.path()) {
                    Some(path) if path.join("0").exists() => break path,
                    _ => std::thread::yield_now(),
                }
            };
            maker.kill();
            all_ended.read_to_end(&mut Vec::new()).unwrap();
            assert!(!directory.exists(), "round {round}: {} stays", directory.display());
        }
        println!("{ROUNDS} kills");
    }

    #[test]
    fn a_command_that_its_guard_missed_ends_with_its_maker() {
        let (mut ended, held) = std::io::pipe().unwrap();
        let mut maker = testing::Child::fork(|| {
            let mut command = Command::new("sleep");
            let mut tied = Tied::spawn(command.arg("infinity").stdout(held.try_clone().unwrap())).unwrap();
            drop((tied.guard.0.kill(), tied.guard.0.wait()));
            drop(command);
            (&held).write_all(&[0]).unwrap();
            loop {
                std::thread::park();
            }
        });
        drop(held);
        ended.read_exact(&mut [0]).unwrap();
        maker.kill();
        ended.read_to_end(&mut Vec::new()).unwrap();
    }
}
