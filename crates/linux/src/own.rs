//! Files of this program's own: a journal, a state, a record. A user of the host can lead none of them elsewhere.
//!
//! Each folder on the way is opened without following links. It belongs to root or to this process's user, and no
//! other user may write in it, or it is sticky as /tmp is. The file itself is a regular one of the same owners with
//! one name, and no other user may write it.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::{Holder, KernelError};

const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The folder of a file, and the file's name in it.
struct Place<'p> {
    folder: OwnedFd,
    name: &'p std::ffi::OsStr,
    path: &'p Path,
}

impl<'p> Place<'p> {
    fn find(path: &'p Path, makes_folders: bool) -> Result<Self, KernelError> {
        let named = path.to_string_lossy();
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(refused(path, "is no path of a file"));
        };
        let parent = std::path::absolute(parent).map_err(KernelError::file(&named))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |at: &OwnedFd, name: &std::ffi::OsStr| rustix::fs::openat(at, name, flags, Mode::empty());
        let mut folder =
            rustix::fs::open("/", flags, Mode::empty()).map_err(|error| failed(&named, error))?;
        let mut so_far = PathBuf::from("/");
        for component in parent.components() {
            let name = match component {
                Component::RootDir => continue,
                Component::Normal(name) => name,
                _ => return Err(refused(path, "steps upwards; give the path without \"..\"")),
            };
            so_far.push(name);
            folder = match open(&folder, name) {
                Err(Errno::NOENT) if makes_folders => {
                    rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o755))
                        .and_then(|()| open(&folder, name))
                        .map_err(|error| failed(&named, error))?
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(refused(&so_far, "is a link or no folder; give the path that it leads to"));
                }
                other => other.map_err(|error| failed(&named, error))?,
            };
            let stat = rustix::fs::fstat(&folder).map_err(|error| failed(&named, error))?;
            check_owner(&so_far, &stat)?;
            if stat.st_mode & OTHERS_WRITE != 0 && stat.st_mode & STICKY == 0 {
                return Err(refused(
                    &so_far,
                    "may be written by other users; remove that right with chmod go-w",
                ));
            }
        }
        Ok(Self { folder, name, path })
    }

    /// Opens the file, and checks that it is one of ours.
    fn open(&self, flags: OFlags) -> Result<File, KernelError> {
        self.open_as(flags, 0o644)
    }

    /// As [`Place::open`]; a file that is made has this mode.
    fn open_as(&self, flags: OFlags, mode: u32) -> Result<File, KernelError> {
        // NONBLOCK: a pipe in its place is refused, and not waited for.
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::openat(&self.folder, self.name, flags, Mode::from_raw_mode(mode));
        let file = match opened {
            Err(Errno::LOOP) => {
                return Err(refused(self.path, "is a link; give the path that it leads to, or remove it"));
            }
            other => other.map_err(|error| failed(&self.path.to_string_lossy(), error))?,
        };
        let stat = rustix::fs::fstat(&file).map_err(|error| failed(&self.path.to_string_lossy(), error))?;
        check_owner(self.path, &stat)?;
        // One that is read may have been replaced meanwhile, as a state is in each round.
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        let has_one_name = stat.st_nlink == 1 || (stat.st_nlink == 0 && !writes);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(self.path, "is no regular file; name another"));
        }
        if !has_one_name {
            return Err(refused(self.path, "has another name too, a hard link; remove that"));
        }
        if stat.st_mode & OTHERS_WRITE != 0 {
            return Err(refused(
                self.path,
                "may be written by other users; remove that right with chmod go-w",
            ));
        }
        Ok(File::from(file))
    }

    fn sync_folder(&self) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::fsync(rustix::fs::openat(&self.folder, ".", flags, Mode::empty())?)?)
    }
}

fn failed(path: &str, error: Errno) -> KernelError {
    KernelError::file(path)(error.into())
}

fn refused(path: &Path, why: &'static str) -> KernelError {
    KernelError::Unsafe { path: path.to_string_lossy().into_owned(), why }
}

fn check_owner(path: &Path, stat: &Stat) -> Result<(), KernelError> {
    match stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw() {
        true => Ok(()),
        false => Err(refused(path, "belongs to another user; root or the user of the agent must own it")),
    }
}

/// Bytes of one of our files, at most.
pub(crate) const MOST_BYTES: u64 = 16 << 20;

/// The text of one of our files.
pub(crate) fn read(path: &Path) -> Result<String, KernelError> {
    let mut text = String::new();
    let mut file = Place::find(path, false)?.open(OFlags::RDONLY)?.take(MOST_BYTES + 1);
    file.read_to_string(&mut text).map_err(|error| match error.kind() {
        ErrorKind::InvalidData => refused(path, "is no text in UTF-8; it is no policy and no journal"),
        _ => KernelError::file(&path.to_string_lossy())(error),
    })?;
    match text.len() as u64 > MOST_BYTES {
        true => Err(refused(path, "is larger than 16 MiB; it is no policy and no journal")),
        false => Ok(text),
    }
}

/// Adds a line, which is on disk when the call returns.
pub(crate) fn append(path: &Path, line: &str) -> Result<(), KernelError> {
    let place = Place::find(path, true)?;
    let (mut file, is_new) = match place.open(OFlags::WRONLY | OFlags::APPEND) {
        Err(error) if error.kind() == Some(ErrorKind::NotFound) => {
            (place.open(OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL)?, true)
        }
        other => (other?, false),
    };
    let mut write = || {
        file.write_all(format!("{line}\n").as_bytes())?;
        file.sync_data()?;
        if is_new { place.sync_folder() } else { Ok(()) }
    };
    write().map_err(KernelError::file(&path.to_string_lossy()))
}

/// A file of JSON lines that a writer adds to, which need not be on disk at once.
#[derive(Debug)]
pub(crate) struct Lines<'p> {
    path: &'p Path,
    file: File,
    /// Bytes of its whole lines.
    bytes: u64,
}

impl<'p> Lines<'p> {
    /// Opens it, or makes it. A line that its writer's end cut short is left out.
    pub(crate) fn open(path: &'p Path) -> Result<Self, KernelError> {
        /// With this each line begins: a file of something else is left as it is.
        const BEGINNING: u8 = b'{';
        let file = Place::find(path, true)?.open(OFlags::RDWR | OFlags::APPEND | OFlags::CREATE)?;
        let wrong = |error| KernelError::file(&path.to_string_lossy())(error);
        let mut bytes = file.metadata().map_err(wrong)?.len();
        let mut part = [0; 4096];
        if bytes > 0 && (file.read_at(&mut part[..1], 0).map_err(wrong)?, part[0]) != (1, BEGINNING) {
            return Err(refused(path, "is no record; name another"));
        }
        while bytes > 0 {
            let count = (part.len() as u64).min(bytes) as usize;
            file.read_exact_at(&mut part[..count], bytes - count as u64).map_err(wrong)?;
            match part[..count].iter().rposition(|byte| *byte == b'\n') {
                Some(end) => {
                    bytes -= (count - 1 - end) as u64;
                    break;
                }
                None => bytes -= count as u64,
            }
        }
        Ok(Self { path, file, bytes })
    }

    /// Adds a line, or leaves the file with whole lines alone; `line` is asked whether it is the first.
    pub(crate) fn add(mut self, line: impl FnOnce(bool) -> String) -> Result<(), KernelError> {
        let write = || {
            self.file.set_len(self.bytes)?;
            self.file.write_all((line(self.bytes == 0) + "\n").as_bytes())
        };
        let written = write();
        if written.is_err() {
            // Where this fails too, the next that opens it leaves out the rest.
            drop(self.file.set_len(self.bytes));
        }
        written.map_err(KernelError::file(&self.path.to_string_lossy()))
    }
}

/// Replaces the text in one step: a reader sees the old one or the new one. With `on_disk` so does a machine that
/// lost its power.
pub(crate) fn replace(path: &Path, text: &str, on_disk: bool) -> Result<(), KernelError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new_path = path.with_file_name(&name);
    let place = Place::find(&new_path, true)?;
    match rustix::fs::unlinkat(&place.folder, &name, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => return Err(failed(&new_path.to_string_lossy(), error)),
        _ => {}
    }
    let mut file = place.open(OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
    let write = |file: &mut File| {
        file.write_all(text.as_bytes())?;
        if on_disk {
            file.sync_data()?;
        }
        rustix::fs::renameat(&place.folder, &name, &place.folder, path.file_name().unwrap_or_default())?;
        if on_disk { place.sync_folder() } else { Ok(()) }
    };
    write(&mut file).map_err(KernelError::file(&path.to_string_lossy()))
}

/// Removes a file.
pub(crate) fn remove(path: &Path) -> Result<(), KernelError> {
    let place = Place::find(path, false)?;
    rustix::fs::unlinkat(&place.folder, place.name, AtFlags::empty())
        .map_err(|error| failed(&path.to_string_lossy(), error))
}

/// The right to be the only process that changes the settings of a journal, or of a host. It ends with the process.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock beside the journal at `journal`; [`None`] while another process holds it.
    ///
    /// # Errors
    /// [`KernelError::Unsafe`] where another user could lead the file elsewhere; otherwise as opening it fails.
    pub fn take(journal: &Path) -> Result<Option<Self>, KernelError> {
        let path = Self::beside(journal);
        let lock = Self::open(&path)?;
        Ok(lock.hold(&path)?.then_some(lock))
    }

    /// Takes the lock of a host at `path`: one process at a time changes its settings, with whatever journal. What the file says of its last
    /// holder is returned too.
    ///
    /// # Errors
    /// [`KernelError::Held`] while another process has it; otherwise as [`Lock::take`].
    pub(crate) fn of_host(path: &Path) -> Result<(Self, Option<Holder>), KernelError> {
        let lock = Self::open(path)?;
        let is_held = !lock.hold(path)?;
        let mut text = Vec::new();
        let read = (&lock.file).take(MOST_BYTES).read_to_end(&mut text);
        // One that has just taken it may be writing who it is: then nobody is named.
        let holder = Holder::parse(&String::from_utf8_lossy(&text));
        match is_held {
            true => Err(KernelError::Held { holder }),
            false => read.map(|_| (lock, holder)).map_err(KernelError::file(&path.to_string_lossy())),
        }
    }

    /// Says who holds it.
    pub(crate) fn note(&self, holder: &Holder) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(format!("{}\n{}\n", holder.process, holder.journal).as_bytes(), 0)
    }

    fn open(path: &Path) -> Result<Self, KernelError> {
        // No other user may open it, because with an open file anyone can hold its lock.
        Ok(Self { file: Place::find(path, true)?.open_as(OFlags::RDWR | OFlags::CREATE, 0o600)? })
    }

    /// Whether no other process has it.
    fn hold(&self, path: &Path) -> Result<bool, KernelError> {
        match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(failed(&path.to_string_lossy(), error)),
        }
    }

    /// As [`Lock::take`], and makes nothing where no process has had a journal at `journal`.
    ///
    /// # Errors
    /// As [`Lock::take`]; [`KernelError::Missing`] where [`Lock::was_taken`] says no.
    pub fn take_again(journal: &Path) -> Result<Option<Self>, KernelError> {
        match Self::was_taken(journal) {
            true => Self::take(journal),
            false => Err(KernelError::Missing(format!(
                "{}: there is no such journal, and no agent has used it; name the agent's with --journal",
                journal.display()
            ))),
        }
    }

    /// Whether the journal is there, or the lock that a process leaves which ended well. One that cannot be looked at may be.
    #[must_use]
    pub fn was_taken(journal: &Path) -> bool {
        let is_there = |path: &Path| {
            path.symlink_metadata().map_or_else(|error| error.kind() != ErrorKind::NotFound, |_| true)
        };
        is_there(journal) || is_there(&Self::beside(journal))
    }

    fn beside(journal: &Path) -> PathBuf {
        let mut name = journal.file_name().unwrap_or_default().to_owned();
        name.push(".lock");
        journal.with_file_name(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn why(result: Result<impl std::fmt::Debug, KernelError>) -> String {
        result.expect_err("it is refused").to_string()
    }

    #[test]
    fn what_is_appended_and_replaced_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/journal");
        append(&path, "one").unwrap();
        append(&path, "two").unwrap();
        assert_eq!(read(&path).unwrap(), "one\ntwo\n");
        replace(&path, "three", true).unwrap();
        assert_eq!(read(&path).unwrap(), "three");
        remove(&path).unwrap();
        assert!(read(&path).unwrap_err().is_gone());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        fs::write(&path, [b'{', 0xff]).unwrap();
        assert!(why(read(&path)).ends_with("journal is no text in UTF-8; it is no policy and no journal"));
    }

    #[test]
    fn a_link_is_never_followed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::write(&target, "theirs").unwrap();
        let link = folder.path().join("journal");
        symlink(&target, &link).unwrap();
        assert!(why(append(&link, "x")).contains("is a link"));
        assert!(why(read(&link)).contains("is a link"));
        // In the place of the next text a link is removed, and its target is left alone.
        symlink(&target, folder.path().join("state.new")).unwrap();
        replace(&folder.path().join("state"), "ours", false).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "theirs");
        let to_folder = folder.path().join("away");
        symlink(folder.path(), &to_folder).unwrap();
        assert!(why(append(&to_folder.join("journal2"), "x")).contains("is a link or no folder"));
    }

    #[test]
    fn what_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("journal");
        append(&file, "x").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(why(append(&file, "x")).contains("may be written by other users"));
        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(why(append(&open.join("journal"), "x")).contains("may be written by other users"));
        fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
        append(&open.join("journal"), "x").unwrap();
    }

    #[test]
    fn what_is_no_regular_file_with_one_name_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("journal");
        append(&file, "x").unwrap();
        fs::hard_link(&file, folder.path().join("other")).unwrap();
        assert!(why(append(&file, "x")).contains("another name too"));
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        assert!(why(read(&pipe)).contains("no regular file"));
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can give a file away");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("home");
        fs::create_dir(&theirs).unwrap();
        append(&theirs.join("journal"), "x").unwrap();
        std::os::unix::fs::chown(theirs.join("journal"), Some(4242), None).unwrap();
        assert!(why(read(&theirs.join("journal"))).contains("belongs to another user"));
        std::os::unix::fs::chown(&theirs, Some(4242), None).unwrap();
        assert!(why(append(&theirs.join("other"), "x")).contains("belongs to another user"));
    }

    #[test]
    fn a_lock_of_a_journal_that_never_was_is_refused_and_makes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("a/b/journal");
        let refused = why(Lock::take_again(&journal));
        assert!(
            refused.starts_with(&format!("{}: there is no such journal", journal.display())),
            "{refused}"
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // One that ended well has left its lock, and one from elsewhere is a journal alone.
        drop(Lock::take(&journal).unwrap());
        assert!(Lock::take_again(&journal).unwrap().is_some());
        fs::remove_file(journal.with_file_name("journal.lock")).unwrap();
        append(&journal, "x").unwrap();
        assert!(Lock::take_again(&journal).unwrap().is_some());
    }

    #[test]
    fn one_lock_is_held_by_one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let journal = folder.path().join("journal");
        let first = Lock::take(&journal).unwrap().expect("it is free");
        let mode = fs::metadata(folder.path().join("journal.lock")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "no other user can hold it");
        assert!(Lock::take(&journal).unwrap().is_none());
        drop(first);
        assert!(Lock::take(&journal).unwrap().is_some());
    }

    #[test]
    fn the_lock_of_a_host_names_its_holder_and_tells_the_next_of_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/agent.lock");
        let holder = Holder::of("/a journal\nof two lines");
        let (first, last) = Lock::of_host(&path).unwrap();
        assert_eq!(last, None);
        first.note(&holder).unwrap();
        let refused = Lock::of_host(&path).unwrap_err();
        assert!(matches!(&refused, KernelError::Held { holder: Some(it) } if *it == holder), "{refused}");
        drop(first);
        let (second, last) = Lock::of_host(&path).unwrap();
        assert_eq!(last, Some(holder));
        // What was cut short names nobody, and holds all the same.
        for text in ["", "12", "12\n/b", "x\n/b\n", "\u{fffd}"] {
            fs::write(&path, text).unwrap();
            let refused = why(Lock::of_host(&path));
            assert!(refused.starts_with("another agent runs on this host; stop it"), "{text:?}: {refused}");
        }
        drop(second);
        assert_eq!(Lock::of_host(&path).unwrap().1, None);
    }
    #[test]
    fn a_line_that_was_cut_short_is_left_out_and_what_is_no_record_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/record.jsonl");
        let add =
            |line: &str| Lines::open(&path).unwrap().add(|is_first| format!("{{{line}{is_first}}}")).unwrap();
        add("1");
        add("2");
        let whole = "{1true}\n{2false}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
        for torn in ["{3".to_owned(), "{".repeat(5000), "{".repeat(4096)] {
            fs::write(&path, format!("{whole}{torn}")).unwrap();
            drop(Lines::open(&path).unwrap());
            assert_eq!(
                fs::read_to_string(&path).unwrap(),
                format!("{whole}{torn}"),
                "a look changes nothing"
            );
            add("3");
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("{whole}{{3false}}\n"));
            fs::write(&path, &torn).unwrap();
            add("1");
            assert_eq!(fs::read_to_string(&path).unwrap(), "{1true}\n");
        }
        fs::write(&path, "# a table of file systems\n").unwrap();
        assert!(why(Lines::open(&path)).ends_with("record.jsonl is no record; name another"));
        // A disk without room takes a part of a line at most.
        fs::write(&path, whole).unwrap();
        let lines = Lines { file: File::open(&path).unwrap(), ..Lines::open(&path).unwrap() };
        assert!(lines.add(|_| "{4}".to_owned()).is_err(), "it is open for reading alone");
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    }
}
