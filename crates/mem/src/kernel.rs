//! The file that all processes of a pool under one kernel share: who lives, and the doorbells.
//!
//! A process holds its slot by a lock on one byte, of the kind that belongs to an open file description: the kernel
//! lets go of it when the process dies, other threads and libraries cannot lose it by closing a descriptor of
//! their own, and two attachments in one process exclude each other. Two things would keep such a lock alive
//! beyond its process, and are avoided: a mapping through the locked descriptor (the mapping has its own), and a
//! forked child (which swaps the descriptor for /dev/null).
//!
//! One more byte is the gate: whoever creates, takes over or removes files holds it meanwhile.

use std::fs::{File, OpenOptions, Permissions};
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
        match control(&self.file, libc::F_OFD_SETLK, &mut range(libc::F_WRLCK, byte, 1)) {
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

/// Who may use a file beside a pool: whoever may use the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Permission bits.
    pub(crate) mode: u32,
    /// Group id.
    pub(crate) group: u32,
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
                // Refused to the pool's owner who is not in its group, and then its members are left out.
                drop(fchown(&file, None, Some(access.group)));
                // What the umask took away.
                file.set_permissions(Permissions::from_mode(access.mode))?;
                return Ok(Some(file));
            }
        }
    }
}

const NO_FD: RawFd = -1;

/// The descriptors that a forked child gives up.
static OPEN: [AtomicI32; 256] = [const { AtomicI32::new(NO_FD) }; 256];

/// Arranges that a forked child gives `fd` up; the place it returns is cleared once `fd` is closed here.
fn close_in_children(fd: RawFd) -> io::Result<&'static AtomicI32> {
    static ARRANGED: AtomicBool = AtomicBool::new(false);
    fork::in_children(in_child, &ARRANGED)?;
    let free =
        |place: &&AtomicI32| place.compare_exchange(NO_FD, fd, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    OPEN.iter().find(free).ok_or_else(|| io::Error::other("this process is attached 256 times; detach some"))
}

/// Runs in a forked child: the child is no holder of its parent's slots, whatever becomes of the parent. The numbers
/// stay in use, so that whoever drops an inherited handle closes nothing else.
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
