//! A kernel that answers from the real files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Holder, KernelError};
use crate::kernel::{Cgroup, Kernel, Promotion, Resume};
use crate::own::{self, Lock};
use crate::promote::{self, MovePages};

/// The lock of all settings of a host.
const HOST_LOCK: &str = "/run/polder/agent.lock";

/// This machine's kernel, or a copy of its files below another root.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
    move_pages: Option<MovePages>,
}

impl Host {
    /// The kernel of this machine.
    #[must_use]
    pub fn new() -> Self {
        Self::below(Path::new("/"))
    }

    /// The files below `root`, such as a recorded tree.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self { root: root.to_owned(), move_pages: None }
    }

    /// Moves pages of processes by this call, which asks this machine's kernel: not for a copy of files below another root.
    #[must_use]
    pub fn moving_pages_by(self, move_pages: MovePages) -> Self {
        Self { move_pages: Some(move_pages), ..self }
    }

    /// Takes the right to be the only process that changes the settings of `journal`; [`None`] while another has it.
    ///
    /// # Errors
    /// As [`Lock::take`].
    pub fn lock(&self, journal: &str) -> Result<Option<Lock>, KernelError> {
        Lock::take(&self.at(journal))
    }

    /// Takes the right to be the only process that changes settings of this host, for one that notes them in `journal`.
    ///
    /// # Errors
    /// [`KernelError::Held`] while another process has it; [`KernelError::Missing`] while settings that a killed one changed are noted in a
    /// journal that is not this one: they would be taken for what was found.
    pub fn lock_all(&self, journal: &str) -> Result<Lock, KernelError> {
        let path = self.at(HOST_LOCK);
        let (lock, last) = Lock::of_host(&path)?;
        let is_left = |it: &Holder| {
            it.journal != journal && self.read_own(&it.journal).is_ok_and(|text| !text.is_empty())
        };
        if let Some(Holder { journal, .. }) = last.filter(is_left) {
            let root = self.copied().map_or_else(String::new, |root| format!(" --root {root}"));
            return Err(KernelError::Missing(format!(
                "an agent that was killed left settings changed, as {} notes; give them back with: polder agent restore{root} --journal {journal}",
                self.at(&journal).display()
            )));
        }
        // A full disk keeps no agent from running: then nobody is told who it is.
        drop(lock.note(&Holder::of(journal)));
        Ok(lock)
    }

    /// As [`Host::lock_all`], for one that restores what another left; [`None`] where no process has changed any since the machine started.
    ///
    /// # Errors
    /// As [`Host::lock_all`].
    pub fn lock_to_restore(&self) -> Result<Option<Lock>, KernelError> {
        let path = self.at(HOST_LOCK);
        match path.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            _ => {
                let (lock, last) = Lock::of_host(&path)?;
                drop(lock.note(&Holder::of(&last.map_or_else(String::new, |last| last.journal))));
                Ok(Some(lock))
            }
        }
    }

    /// Whether a process has had this journal.
    #[must_use]
    pub fn had(&self, journal: &str) -> bool {
        Lock::was_taken(&self.at(journal))
    }

    /// As [`Host::lock`], of a journal that a process has had: nothing is made where none has.
    ///
    /// # Errors
    /// As [`Lock::take_again`].
    pub fn lock_again(&self, journal: &str) -> Result<Option<Lock>, KernelError> {
        Lock::take_again(&self.at(journal))
    }

    /// Replaces the text of a file of our own in one step, as a state that each control round writes: it need not
    /// outlive the machine's power.
    ///
    /// # Errors
    /// As [`Kernel::read_own`].
    pub fn publish(&self, path: &str, text: &str) -> Result<(), KernelError> {
        own::replace(&self.at(path), text, false)
    }

    /// Adds a line to a record, a file of JSON lines that need not outlive the machine's power. `line` is asked whether it is the first of the
    /// file. A line that cannot be written whole, or was cut short by an earlier writer's end, is taken out. It is the user's file, wherever the
    /// host's root is.
    ///
    /// # Errors
    /// [`KernelError::Unsafe`] where the file holds something else; otherwise as [`Kernel::read_own`].
    pub fn record(&self, path: &str, line: impl FnOnce(bool) -> String) -> Result<(), KernelError> {
        own::Lines::open(Path::new(path))?.add(line)
    }

    /// Makes sure that [`Host::record`] can add to this file, which is made if it is not there.
    ///
    /// # Errors
    /// As [`Host::record`].
    pub fn check_record(&self, path: &str) -> Result<(), KernelError> {
        own::Lines::open(Path::new(path)).map(drop)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// Writes by one call: the kernel takes each as a whole setting. What a signal interrupts is not repeated, because a reclaim has done a part
/// of its work by then, and would do all of it again.
fn write_once(to: &mut impl Write, text: &str) -> io::Result<()> {
    match to.write(text.as_bytes())? {
        written if written == text.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Kernel for Host {
    fn now(&self) -> Duration {
        let now = clock_gettime(ClockId::Monotonic);
        Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
    }

    fn copied(&self) -> Option<String> {
        let root = self.root.canonicalize().unwrap_or_else(|_| self.root.clone());
        (root != Path::new("/")).then(|| root.to_string_lossy().into_owned())
    }

    fn read(&self, path: &str) -> Result<String, KernelError> {
        // The kernel does not say how long such a file is, so it is not asked: an agent reads hundreds a round.
        let mut bytes = Vec::with_capacity(8 << 10);
        let file = File::open(self.at(path));
        file.and_then(|file| file.take(u64::MAX).read_to_end(&mut bytes)).map_err(KernelError::file(path))?;
        // A process or a file may have a name that is no text.
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    fn write(&self, path: &str, line: &str) -> Result<(), KernelError> {
        // A bare newline clears a list.
        let opened = OpenOptions::new().write(true).open(self.at(path));
        opened
            .and_then(|mut file| write_once(&mut file, &format!("{line}\n")))
            .map_err(KernelError::file(path))
    }

    fn list(&self, path: &str) -> Result<Vec<String>, KernelError> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.at(path)).map_err(KernelError::file(path))? {
            let entry = entry.map_err(KernelError::file(path))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn inode(&self, path: &str) -> Result<u64, KernelError> {
        fs::metadata(self.at(path)).map(|folder| folder.ino()).map_err(KernelError::file(path))
    }

    fn drain(&self, path: &str) -> Result<String, KernelError> {
        /// Bytes of one look; the rest waits for the next.
        const MOST: usize = 1 << 20;
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("flags are bits of an int");
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(self.at(path))
            .map_err(KernelError::file(path))?;
        let (mut text, mut part) = (Vec::new(), [0; 4096]);
        while text.len() < MOST {
            match file.read(&mut part) {
                Ok(0) => break,
                Ok(count) => text.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(KernelError::file(path)(error)),
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    #[expect(clippy::host_endian_bytes, reason = "the kernel answers in the order of its processor")]
    fn words(&self, path: &str, first: u64, count: u64) -> Result<Vec<u64>, KernelError> {
        const BYTES: u64 = 8;
        let file = fs::File::open(self.at(path)).map_err(KernelError::file(path))?;
        let (mut at, end) = (first.saturating_mul(BYTES), first.saturating_add(count).saturating_mul(BYTES));
        let (mut words, mut part) = (Vec::new(), [0; 4096]);
        while at < end {
            let wanted = (end - at).min(part.len() as u64) as usize;
            let read = file.read_at(&mut part[..wanted], at).map_err(KernelError::file(path))?;
            let (whole, _) = part[..read].as_chunks();
            if whole.is_empty() {
                break;
            }
            words.extend(whole.iter().map(|word| u64::from_ne_bytes(*word)));
            at += whole.len() as u64 * BYTES;
        }
        Ok(words)
    }

    fn fetch(&self, address: &str) -> Result<String, KernelError> {
        /// From the first byte sent to the last one received.
        const PATIENCE: Duration = Duration::from_secs(2);
        let config = ureq::Agent::config_builder();
        // A server of this host: no proxy, and no other server that it points to.
        let config =
            config.timeout_global(Some(PATIENCE)).proxy(None).max_redirects(0).http_status_as_error(false);
        let failed = |error: ureq::Error| KernelError::file(address)(error.into_io());
        let mut answer = config.build().new_agent().get(address).call().map_err(failed)?;
        let status = answer.status();
        if !status.is_success() {
            return Err(KernelError::Missing(format!("{address} answers {status}")));
        }
        answer.body_mut().with_config().limit(own::MOST_BYTES).read_to_string().map_err(failed)
    }

    fn make_folder(&self, path: &str) -> Result<(), KernelError> {
        fs::create_dir(self.at(path)).map_err(KernelError::file(path))
    }

    fn remove_folder(&self, path: &str) -> Result<(), KernelError> {
        fs::remove_dir(self.at(path)).map_err(KernelError::file(path))
    }

    fn promotes(&self) -> bool {
        self.move_pages.is_some()
    }

    fn promote(&self, cgroup: &Cgroup, what: Promotion<'_>, resume: &mut Resume) -> Result<u64, KernelError> {
        let move_pages = self.move_pages.ok_or_else(|| KernelError::gone("move_pages"))?;
        promote::promote(self, move_pages, cgroup, what, resume)
    }

    fn read_own(&self, path: &str) -> Result<String, KernelError> {
        own::read(&self.at(path))
    }

    fn append(&self, path: &str, line: &str) -> Result<(), KernelError> {
        own::append(&self.at(path), line)
    }

    fn replace(&self, path: &str, text: &str) -> Result<(), KernelError> {
        own::replace(&self.at(path), text, true)
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        own::remove(&self.at(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel's file whose every call a signal interrupts.
    struct Interrupted(u32);

    impl Write for Interrupted {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            self.0 += 1;
            match self.0 {
                1 => Err(ErrorKind::Interrupted.into()),
                _ => panic!("it is asked again"),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_setting_that_a_signal_interrupts_is_not_written_again_by_itself() {
        let error = write_once(&mut Interrupted(0), "4096\n").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        let mut taken = Vec::new();
        write_once(&mut taken, "4096\n").unwrap();
        assert_eq!(taken, b"4096\n");
        assert_eq!(write_once(&mut &mut [0; 3][..], "4096\n").unwrap_err().kind(), ErrorKind::WriteZero);
    }

    #[test]
    fn a_host_has_one_agent_whatever_its_journal_and_a_killed_one_s_settings_come_back_first() {
        let folder = tempfile::tempdir().unwrap();
        let host = Host::below(folder.path());
        assert!(host.lock_to_restore().unwrap().is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is made where none was");
        let first = host.lock_all("/a.journal").unwrap();
        for refused in [host.lock_all("/b.journal").unwrap_err(), host.lock_to_restore().unwrap_err()] {
            let own = format!(
                "another agent runs on this host: process {} with the journal /a.journal;",
                std::process::id()
            );
            assert!(refused.to_string().starts_with(&own), "{refused}");
        }
        Host::below(tempfile::tempdir().unwrap().path()).lock_all("/a.journal").unwrap();
        host.append("/a.journal", "{}").unwrap();
        drop(first);
        // As after a kill. A restore keeps the name of the journal, should it be killed too.
        drop(host.lock_to_restore().unwrap().unwrap());
        let refused = host.lock_all("/b.journal").unwrap_err().to_string();
        let root = folder.path().display();
        assert!(
            refused.ends_with(&format!("polder agent restore --root {root} --journal /a.journal")),
            "{refused}"
        );
        drop(host.lock_all("/a.journal").unwrap());
        host.remove("/a.journal").unwrap();
        drop(host.lock_all("/b.journal").unwrap());
    }
}
