//! The seam: what the agent needs of a kernel, and how it names a cgroup.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::CGROUPS;
use crate::error::KernelError;

/// A cgroup, by its path below the mount of cgroup version 2, such as `/system.slice/web.service`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cgroup {
    path: String,
}

impl Cgroup {
    /// The cgroup at `path`; [`None`] when the path is not absolute, is the root, steps upwards, or has characters that a terminal takes
    /// as commands.
    #[must_use]
    pub fn new(path: &str) -> Option<Self> {
        let inside = path.strip_prefix('/')?;
        let is_plain = inside
            .split('/')
            .all(|part| !matches!(part, "" | "." | "..") && !part.chars().any(char::is_control));
        is_plain.then(|| Self { path: path.to_owned() })
    }

    /// Its path below the mount.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("{CGROUPS}{}", self.path)
    }

    /// The file of the setting `name`.
    #[must_use]
    pub fn file(&self, name: &str) -> String {
        format!("{CGROUPS}{}/{name}", self.path)
    }
}

/// What is to go up.
#[derive(Clone, Copy, Debug)]
pub struct Promotion<'a> {
    /// Nodes that pages leave.
    pub from: &'a BTreeSet<u32>,
    /// The node that they go to.
    pub to: u32,
    /// Bytes at most; a huge page that begins within them goes up whole.
    pub bytes: u64,
}

/// Where the next call goes on: a process and an address in it; [`None`] for the first process.
pub type Resume = Option<(u32, usize)>;

/// What the agent needs of a kernel's files, and of one file of its own.
pub trait Kernel {
    /// Time since a moment in the past, by a clock that never goes back.
    fn now(&self) -> Duration;

    /// The folder below which a copy of a kernel's files is used; [`None`] where they are the machine's own.
    fn copied(&self) -> Option<String>;

    /// The text of a file.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn read(&self, path: &str) -> Result<String, KernelError>;

    /// Writes a line in one call, which a signal may interrupt.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn write(&self, path: &str, line: &str) -> Result<(), KernelError>;

    /// Names in a folder, sorted.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn list(&self, path: &str) -> Result<Vec<String>, KernelError>;

    /// The inode of a folder, by which a cgroup is told from a later one of the same path.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn inode(&self, path: &str) -> Result<u64, KernelError>;

    /// What a stream of the kernel's, such as `trace_pipe`, holds now. It is taken from the stream.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn drain(&self, path: &str) -> Result<String, KernelError>;

    /// `count` words of 64 bits of a file, from the word `first` on; fewer where the file ends.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn words(&self, path: &str, first: u64, count: u64) -> Result<Vec<u64>, KernelError>;

    /// What a server of this host answers at an address such as `http://127.0.0.1:10255/pods`.
    ///
    /// # Errors
    /// [`KernelError::File`] where it cannot be reached; [`KernelError::Missing`] where it answers with an error.
    fn fetch(&self, address: &str) -> Result<String, KernelError>;

    /// Makes a folder, by which the kernel makes what it stands for, such as a tracing instance.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn make_folder(&self, path: &str) -> Result<(), KernelError>;

    /// Removes such a folder.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn remove_folder(&self, path: &str) -> Result<(), KernelError>;

    /// Whether [`Kernel::promote`] works here.
    fn promotes(&self) -> bool;

    /// Moves anonymous memory of a cgroup up, and returns how many bytes. What is shared stays. `resume` says where a call before
    /// ended, and is [`None`] once all was looked at.
    ///
    /// # Errors
    /// [`KernelError::Missing`] with what is lacking; [`KernelError::File`].
    fn promote(&self, cgroup: &Cgroup, what: Promotion<'_>, resume: &mut Resume) -> Result<u64, KernelError>;

    /// The text of a file of our own.
    ///
    /// # Errors
    /// [`KernelError::File`]; [`KernelError::Unsafe`] where another user could lead the path elsewhere.
    fn read_own(&self, path: &str) -> Result<String, KernelError>;

    /// Adds a line to a file of our own, which is made if it is not there; the line is on disk when the call returns.
    ///
    /// # Errors
    /// As [`Kernel::read_own`].
    fn append(&self, path: &str, line: &str) -> Result<(), KernelError>;

    /// Replaces the text of a file of our own in one step; the new text is on disk when the call returns.
    ///
    /// # Errors
    /// As [`Kernel::read_own`].
    fn replace(&self, path: &str, text: &str) -> Result<(), KernelError>;

    /// Removes a file of our own.
    ///
    /// # Errors
    /// As [`Kernel::read_own`].
    fn remove(&self, path: &str) -> Result<(), KernelError>;
}

/// A number of a kernel's file: bytes, pages or a count. [`None`] for what no machine has, so that sums of a few hold.
pub(crate) fn number(text: &str) -> Option<u64> {
    const MOST: u64 = 1 << 60;
    text.trim().parse().ok().filter(|number| *number < MOST)
}

impl<K: Kernel> Kernel for &K {
    fn now(&self) -> Duration {
        (**self).now()
    }

    fn copied(&self) -> Option<String> {
        (**self).copied()
    }

    fn read(&self, path: &str) -> Result<String, KernelError> {
        (**self).read(path)
    }

    fn write(&self, path: &str, line: &str) -> Result<(), KernelError> {
        (**self).write(path, line)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, KernelError> {
        (**self).list(path)
    }

    fn inode(&self, path: &str) -> Result<u64, KernelError> {
        (**self).inode(path)
    }

    fn drain(&self, path: &str) -> Result<String, KernelError> {
        (**self).drain(path)
    }

    fn words(&self, path: &str, first: u64, count: u64) -> Result<Vec<u64>, KernelError> {
        (**self).words(path, first, count)
    }

    fn fetch(&self, address: &str) -> Result<String, KernelError> {
        (**self).fetch(address)
    }

    fn make_folder(&self, path: &str) -> Result<(), KernelError> {
        (**self).make_folder(path)
    }

    fn remove_folder(&self, path: &str) -> Result<(), KernelError> {
        (**self).remove_folder(path)
    }

    fn promotes(&self) -> bool {
        (**self).promotes()
    }

    fn promote(&self, cgroup: &Cgroup, what: Promotion<'_>, resume: &mut Resume) -> Result<u64, KernelError> {
        (**self).promote(cgroup, what, resume)
    }

    fn read_own(&self, path: &str) -> Result<String, KernelError> {
        (**self).read_own(path)
    }

    fn append(&self, path: &str, line: &str) -> Result<(), KernelError> {
        (**self).append(path, line)
    }

    fn replace(&self, path: &str, text: &str) -> Result<(), KernelError> {
        (**self).replace(path, text)
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        (**self).remove(path)
    }
}
