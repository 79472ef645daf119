//! Real processes for tests: forked children that can be killed and stopped, and directories that vanish.

use std::any::Any;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::HostPlan;

/// A forked process. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
    ended: Option<Ended>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It returned (0) or panicked (101).
    Exited(i32),
    /// A signal ended it.
    Killed(i32),
}

impl Child {
    /// Runs `body` in a forked copy of this process. The copy has only the calling thread, so `body` should not wait
    /// for locks that other threads of the parent may hold.
    ///
    /// # Panics
    /// When the system has no room for another process.
    #[must_use]
    pub fn fork(body: impl FnOnce()) -> Self {
        Self::fork_and(body, || ())
    }

    /// As [`Child::fork`], and the kernel kills the copy when the thread that forked it ends, stopped or not.
    ///
    /// # Panics
    /// When the system has no room for another process.
    #[must_use]
    pub fn fork_tied(body: impl FnOnce()) -> Self {
        let parent = std::process::id();
        Self::fork_and(body, || end_with(parent))
    }

    fn fork_and(body: impl FnOnce(), first: impl FnOnce()) -> Self {
        silence_children();
        // SAFETY: the child runs `body` and ends in `_exit`; it never returns into the parent's code.
        match unsafe { libc::fork() } {
            -1 => panic!("cannot fork: {}", io::Error::last_os_error()),
            0 => {
                first();
                let code = match catch_unwind(AssertUnwindSafe(body)) {
                    Ok(()) => 0,
                    Err(panic) => {
                        complain(panic.as_ref());
                        101
                    }
                };
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(code) }
            }
            pid => Self { pid, ended: None },
        }
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    /// Ends it as `kill -9` does, and waits until it has ended.
    pub fn kill(&mut self) -> Ended {
        self.signal(libc::SIGKILL);
        self.wait()
    }

    /// Stops it as a debugger does.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Waits until it ends.
    pub fn wait(&mut self) -> Ended {
        self.reap(0).expect("a wait without WNOHANG returns when the child has ended")
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<Ended> {
        self.reap(libc::WNOHANG)
    }

    fn signal(&self, signal: i32) {
        if self.ended.is_none() {
            // SAFETY: the child has not been reaped, so its id is still its own.
            unsafe { libc::kill(self.pid, signal) };
        }
    }

    fn reap(&mut self, flags: i32) -> Option<Ended> {
        while self.ended.is_none() {
            let mut status = 0;
            // SAFETY: `status` is a live int, and the child has not been reaped.
            match unsafe { libc::waitpid(self.pid, &raw mut status, flags) } {
                0 => return None,
                -1 => {} // interrupted
                _ if libc::WIFSIGNALED(status) => self.ended = Some(Ended::Killed(libc::WTERMSIG(status))),
                _ => self.ended = Some(Ended::Exited(libc::WEXITSTATUS(status))),
            }
        }
        self.ended
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A started program. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Running(pub std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Has the kernel kill `command`, stopped or not, when the thread that spawns it ends. What the command starts is not killed.
pub fn tie(command: &mut Command) -> &mut Command {
    let parent = std::process::id();
    // SAFETY: between fork and exec it calls on numbers alone.
    unsafe {
        command.pre_exec(move || {
            end_with(parent);
            Ok(())
        })
    }
}

/// Has the kernel kill this process when the thread that forked it ends.
fn end_with(parent: u32) {
    // SAFETY: calls on numbers. Of a parent that ended before the first, the second tells.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::getppid().unsigned_abs() != parent {
            libc::_exit(1);
        }
    }
}

/// Gives this process a /dev/shm of its own, as a container has one. False where that is not permitted; then nothing has changed
/// that others see.
#[must_use]
pub fn own_shm() -> bool {
    let root = c"/".as_ptr();
    let null = std::ptr::null();
    // SAFETY: changes the mounts of this process alone; all strings end with a zero.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(null, root, null, libc::MS_REC | libc::MS_PRIVATE, null.cast()) == 0
            && libc::mount(c"tmpfs".as_ptr(), c"/dev/shm".as_ptr(), c"tmpfs".as_ptr(), 0, null.cast()) == 0
    }
}

/// Lets forked children say their last words by [`complain`] alone. The hook of this process waits for locks that another of its threads may
/// hold as it forks: a child that panicked would never end.
fn silence_children() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let (parent, hook) = (std::process::id(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |panic| {
            if std::process::id() == parent {
                hook(panic);
            }
        }));
    });
}

/// Says on stderr, past what the test harness captures, why a child panicked.
fn complain(panic: &(dyn Any + Send)) {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words");
    let line = format!("forked process {}: {words}\n", std::process::id());
    // SAFETY: writes the bytes of a live string to stderr.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

/// A directory on tmpfs, removed when dropped by the process that made it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    pid: u32,
}

impl Scratch {
    /// Makes a directory in /dev/shm.
    ///
    /// # Panics
    /// When that is impossible.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "making a directory is no default")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let pid = std::process::id();
        let path = format!("/dev/shm/polder-test-{pid}-{}", NEXT.fetch_add(1, Ordering::Relaxed)).into();
        std::fs::create_dir(&path).expect("a directory in /dev/shm");
        Self { path, pid }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How a process attaches as one of two hosts whose own files lie in it, each of two processes, with a word and a bell.
    #[must_use]
    pub fn plan(&self, host: u16) -> HostPlan {
        HostPlan {
            pool: 1,
            host,
            hosts: 2,
            processes: 2,
            local_words: 1,
            bells: 1,
            directory: self.path.clone(),
            kept: 0..0,
            patience: HostPlan::PATIENCE,
        }
    }

    /// What lies in it.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Makes a file that may be run, with its folders.
///
/// # Panics
/// When it cannot be made.
pub fn install(path: &Path, script: &str) {
    // Written by another process: a test that forks meanwhile would keep it open, and nobody may run it then.
    let mut install = Command::new("install");
    install.args(["-D", "-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut install = install.spawn().expect("install runs");
    install.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("it reads");
    assert!(install.wait().expect("its end").success(), "{} is not made", path.display());
}

/// The processes that have `word` in their environment or among their arguments, as /proc shows them.
fn processes_of(word: &str) -> Vec<String> {
    let of = |file: &str, pid: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().into_string().ok());
    let pids = pids.filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()));
    let has = |bytes: &[u8]| bytes.windows(word.len()).any(|part| part == word.as_bytes());
    pids.filter(|pid| {
        pid.parse() != Ok(std::process::id()) && (has(&of("environ", pid)) || has(&of("cmdline", pid)))
    })
    .collect()
}

/// Starts a command, sends it `signal` once it and a second process of the same program work, and waits until no process and no
/// directory of it is left.
///
/// # Panics
/// When it ends by itself, or its directory stays.
pub fn expect_nothing_left(asked: &Command, signal: &str) {
    // A script that runs the tests in the background has them ignore SIGINT.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(asked.get_program()).args(asked.get_args());
    for (key, value) in asked.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    // Every process of it has this in its environment.
    let mark = format!("{}-{:?}-{signal}", std::process::id(), asked.get_args());
    command.env("POLDER_TEST_MARK", &mark).stdout(Stdio::null()).stderr(Stdio::null());
    let mark = format!("POLDER_TEST_MARK={mark}");
    let mut running = command.spawn().expect("it runs");
    let own = format!("polder-test-{}-", running.id());
    // It, its guards, and another that works.
    let program = Path::new(asked.get_program()).file_name().expect("a program");
    let name = [program.as_encoded_bytes(), b"\n"].concat();
    let works = |pid: &String| std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == name);
    while processes_of(&mark).iter().filter(|pid| works(pid)).count() < 2 {
        assert!(running.try_wait().expect("its state").is_none(), "{asked:?} ended");
        std::thread::yield_now();
    }
    let told = Command::new("kill").args(["-s", signal, &running.id().to_string()]).status();
    assert!(told.expect("kill runs").success());
    running.wait().expect("its end");
    // The kernel tells those that clean up. A process that becomes another program is not seen for a moment.
    let mut unseen = 0;
    while unseen < 20 {
        unseen = if processes_of(&mark).is_empty() { unseen + 1 } else { 0 };
    }
    let mut folders = std::fs::read_dir("/dev/shm").expect("/dev/shm").flatten();
    let stays = folders.any(|folder| folder.file_name().to_string_lossy().starts_with(&own));
    assert!(!stays, "{asked:?}, {signal}: its folder stays");
}
