//! A kernel that answers from the real files.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};

use crate::error::KernelError;
use crate::kernel::{Cgroup, Kernel, Promotion, Resume};
use crate::own::{self, Lock};
use crate::promote::{self, MovePages};

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

    /// Adds a line to a file of our own, such as a record, which need not outlive the machine's power. It is the user's file, wherever the
    /// host's root is.
    ///
    /// # Errors
    /// As [`Kernel::read_own`].
    pub fn record(&self, path: &str, line: &str) -> Result<(), KernelError> {
        own::append(Path::new(path), line, false)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
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
        // One write call: the kernel takes each call as a whole setting. A bare newline clears a list.
        let opened = OpenOptions::new().write(true).open(self.at(path));
        opened
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
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
        own::append(&self.at(path), line, true)
    }

    fn replace(&self, path: &str, text: &str) -> Result<(), KernelError> {
        own::replace(&self.at(path), text, true)
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        own::remove(&self.at(path))
    }
}
