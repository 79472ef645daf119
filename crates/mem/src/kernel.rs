//! The file that all processes of a pool under one kernel share: who lives, and the doorbells.
//!
//! A process holds its slot by a lock on one byte, which belongs to an open file description:
//!
//! - The kernel releases it when the process dies.
//! - Other threads and libraries cannot lose it by closing a descriptor of their own.
//! - Two attachments in one process exclude each other.
//!
//! Two things could keep such a lock alive beyond its process. One is a mapping through the locked descriptor, so the mapping
//! has a descriptor of its own. The other is a forked child, so a child replaces the descriptor by /dev/null.
//!
//! One more byte is the gate: a process holds it while it creates, takes over or removes files.
//!
//! On the pool's own file, all processes of a host with one run directory share the lock of one more byte. A process of the
//! same host with another run directory cannot get it. If each container has its own node of a device, there is no such byte.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use crate::{Nanos, clock, fork};

/// The byte that is the gate. Locks may lie beyond the end of the file.
const GATE: i64 = 1 << 40;

/// Where the bytes of the slots begin.
const SLOTS: i64 = 1 << 41;

/// Where the bytes of the hosts begin, on the pool's file.
const HOSTS: i64 = 1 << 42;

/// The byte of a host on the pool's file. What was formatted anew is another pool.
const fn host_byte(pool: u64, host: u16) -> i64 {
    HOSTS + ((pool as u32 as i64) << u16::BITS) + host as i64
}

/// The descriptor through which this process holds its locks on a file.
#[derive(Debug)]
pub(crate) struct Locks {
    file: File,
    forked: &'static AtomicI32,
    pid: u32,
}

/// The gate, held until dropped.
pub(crate) struct Gate<'a>(&'a Locks);

impl Locks {
    /// Opens `path`; when there is no such file, makes it for `access`, or returns `None`.
    pub(crate) fn open(path: &Path, access: Option<Access>) -> io::Result<Option<Self>> {
        match open(path, access)? {
            Some(file) => {
                let forked = close_in_children(file.as_raw_fd())?;
                Ok(Some(Self { file, forked, pid: std::process::id() }))
            }
            None => Ok(None),
        }
    }

    /// Those on the pool behind `file`, through a description of their own; `None` where the system has no such thing.
    pub(crate) fn of_pool(file: &File) -> io::Result<Option<Self>> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => {
                let forked = close_in_children(file.as_raw_fd())?;
                Ok(Some(Self { file, forked, pid: std::process::id() }))
            }
            Err(_) => Ok(None),
        }
    }

    /// Holds `host` of `pool` on the pool's file together with the processes that share this one's run directory; `is_first` says that
    /// none of them holds it. False when those of another directory hold it, and still do at `until`.
    pub(crate) fn hold_host(&self, pool: u64, host: u16, is_first: bool, until: Nanos) -> io::Result<bool> {
        let byte = host_byte(pool, host);
        // Alone first: of two directories that come at once, one is refused.
        let alone = if is_first { Some(libc::F_WRLCK) } else { None };
        for kind in alone.into_iter().chain([libc::F_RDLCK]) {
            match poll(until, || self.lock_as(kind, byte)) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // File systems without locks: heartbeats are all that is left.
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether a process, this one not counted, holds `host` of `pool` on the pool's file; `None` where that cannot be seen: each node of
    /// a device has bytes of its own, and some file systems have no locks.
    pub(crate) fn host_is_held(&self, pool: u64, host: u16) -> Option<bool> {
        if !self.file.metadata().ok()?.is_file() {
            return None;
        }
        let mut range = range(libc::F_WRLCK, host_byte(pool, host), 1);
        control(&self.file, libc::F_OFD_GETLK, &mut range).ok()?;
        Some(i32::from(range.l_type) != libc::F_UNLCK)
    }

    /// The file that they are on.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Waits for the gate until `until`; `None` when another process still holds it.
    pub(crate) fn gate(&self, until: Nanos) -> io::Result<Option<Gate<'_>>> {
        Ok(poll(until, || self.lock(GATE))?.then_some(Gate(self)))
    }

    /// Whether the file still stands at `path`, and was not removed by the last holder of its gate.
    pub(crate) fn stands_at(&self, path: &Path) -> io::Result<bool> {
        let mine = self.file.metadata()?;
        match std::fs::metadata(path) {
            Ok(there) => Ok((there.dev(), there.ino()) == (mine.dev(), mine.ino())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Takes the slot with this index; false when another holds it.
    pub(crate) fn take_slot(&self, index: u32) -> io::Result<bool> {
        self.lock(SLOTS + i64::from(index))
    }

    /// Whether another holds one of the `count` slots from `first` on.
    pub(crate) fn others_hold(&self, first: u32, count: u32) -> io::Result<bool> {
        let mut range = range(libc::F_WRLCK, SLOTS + i64::from(first), i64::from(count));
        control(&self.file, libc::F_OFD_GETLK, &mut range)?;
        Ok(i32::from(range.l_type) != libc::F_UNLCK)
    }

    /// Gives back whatever slots this description holds.
    pub(crate) fn release_slots(&self) -> io::Result<()> {
        control(&self.file, libc::F_OFD_SETLK, &mut range(libc::F_UNLCK, SLOTS, 0))
    }

    /// Whether this process inherited the locks by a fork, and so does not hold them.
    pub(crate) fn inherited(&self) -> bool {
        self.pid != std::process::id()
    }

    fn lock(&self, byte: i64) -> io::Result<bool> {
        self.lock_as(libc::F_WRLCK, byte)
    }

    fn lock_as(&self, kind: i32, byte: i64) -> io::Result<bool> {
        match control(&self.file, libc::F_OFD_SETLK, &mut range(kind, byte, 1)) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        // First, so that a child that is forked between the clearing and the closing keeps nothing alive.
        if !self.inherited() {
            let _ = self.release_slots();
        }
        self.forked.store(NO_FD, Ordering::SeqCst);
    }
}

impl Gate<'_> {
    /// The locks of the file whose gate this is.
    pub(crate) fn locks(&self) -> &Locks {
        self.0
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        // Cannot fail for a range that this description holds; its death would let go of it too.
        let _ = control(&self.0.file, libc::F_OFD_SETLK, &mut range(libc::F_UNLCK, GATE, 1));
    }
}

/// Waits in short steps for `ready`, until `until`.
fn poll(until: Nanos, mut ready: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    loop {
        if ready()? {
            return Ok(true);
        }
        if clock::now() >= until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn range(kind: i32, start: i64, length: i64) -> libc::flock {
    // SAFETY: an all-zero flock is a valid value of the C struct; l_pid must be 0 for this kind of lock.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start;
    range.l_len = length;
    range
}

fn control(file: &File, command: i32, range: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open, and `range` is a live flock, which these commands read or fill.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut *range) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The users of a file beside a pool: those that may use the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Permission bits.
    pub(crate) mode: u32,
    /// User id of the pool's owner.
    pub(crate) owner: u32,
    /// Group id.
    pub(crate) group: u32,
}

impl Access {
    /// Whether no user but the owner may write.
    pub(crate) const fn is_private(self) -> bool {
        self.mode & 0o022 == 0
    }

    /// What shows that no process of the pool made this file; `None` when one may have.
    pub(crate) fn stranger(self, file: &Metadata) -> Option<String> {
        let (owner, mode) = (file.uid(), file.mode() & 0o777);
        let is_let_in = [user(), 0, self.owner].contains(&owner)
            || self.mode & 0o020 != 0 && file.gid() == self.group
            || self.mode & 0o002 != 0;
        match file.nlink() {
            _ if file.file_type().is_symlink() => Some("is a symbolic link, which is not followed".into()),
            _ if !file.is_file() => Some("is no ordinary file".into()),
            _ if !is_let_in => Some(format!("belongs to user {owner}, group {}", file.gid())),
            _ if mode & 0o022 & !self.mode != 0 => {
                Some(format!("has mode {mode:04o}, so that more users may write it than the pool"))
            }
            // A file with no name was removed by its last process.
            0 | 1 => None,
            names => Some(format!("has {names} names, and so is another file too")),
        }
    }
}

/// The user that this process acts as.
pub(crate) fn user() -> u32 {
    // SAFETY: reads a number of this process and cannot fail.
    unsafe { libc::geteuid() }
}

/// Opens a file for reading and writing; when it is not there, makes it for `access`, or returns `None`.
pub(crate) fn open(path: &Path, access: Option<Access>) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
    loop {
        // Two calls, since kernels refuse O_CREAT on another user's file in a sticky directory.
        let access = match (options.open(path), access) {
            (Err(e), None) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            (Err(e), Some(access)) if e.kind() == io::ErrorKind::NotFound => access,
            (opened, _) => return opened.map(Some),
        };
        match options.clone().mode(access.mode).create_new(true).open(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => {
                let file = made?;
                if user() == 0 {
                    // Root in a user's pool does not keep that user out.
                    fchown(&file, Some(access.owner), None)?;
                }
                // Refused to a pool's owner that is not in its group; then no group is let in.
                let of_group = fchown(&file, None, Some(access.group)).is_ok();
                let mode = if of_group { access.mode } else { access.mode & !0o060 };
                // What the umask took away.
                file.set_permissions(Permissions::from_mode(mode))?;
                return Ok(Some(file));
            }
        }
    }
}

const NO_FD: RawFd = -1;

/// The descriptors that a forked child gives up.
static OPEN: [AtomicI32; 512] = [const { AtomicI32::new(NO_FD) }; 512];

/// Arranges that a forked child gives `fd` up; the place it returns is cleared once `fd` is closed here.
fn close_in_children(fd: RawFd) -> io::Result<&'static AtomicI32> {
    static ARRANGED: AtomicBool = AtomicBool::new(false);
    fork::in_children(in_child, &ARRANGED)?;
    let free =
        |place: &&AtomicI32| place.compare_exchange(NO_FD, fd, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    OPEN.iter().find(free).ok_or_else(|| io::Error::other("this process is attached 256 times; detach some"))
}

/// Runs in a forked child: the child is no holder of its parent's slots, whatever becomes of the parent. The numbers
/// stay in use, so that dropping an inherited handle closes nothing else.
extern "C" fn in_child() {
    for place in &OPEN {
        let fd = place.load(Ordering::SeqCst);
        if fd == NO_FD {
            continue;
        }
        // SAFETY: replaces a descriptor that this process inherited and that only the parent's handle uses.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            libc::dup3(null, fd, libc::O_CLOEXEC);
            libc::close(null);
        }
    }
}
