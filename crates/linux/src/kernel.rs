//! The files of a kernel: what can be read and written, and where.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Why the kernel's files could not be read, written or understood.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The kernel refused.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A file says what this program does not understand.
    #[error("{path}: {text:?} is not {expected}")]
    Format {
        /// The file.
        path: String,
        /// What it says.
        text: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The machine lacks what tiering needs.
    #[error("{0}")]
    Missing(String),
}

impl KernelError {
    /// The kind of the kernel's refusal, if it refused.
    #[must_use]
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::File { source, .. } => Some(source.kind()),
            _ => None,
        }
    }

    /// Whether the file is gone, as that of a cgroup that was removed: such files answer ENOENT or ENODEV.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        const ENODEV: i32 = 19;
        match self {
            Self::File { source, .. } => {
                source.kind() == ErrorKind::NotFound || source.raw_os_error() == Some(ENODEV)
            }
            _ => false,
        }
    }

    pub(crate) fn file(path: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File { path: path.to_owned(), source }
    }
}

/// What the agent needs of a kernel's files, and of one file of its own.
pub trait Kernel {
    /// The text of a file.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn read(&self, path: &str) -> Result<String, KernelError>;

    /// Writes a line in one call.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn write(&self, path: &str, line: &str) -> Result<(), KernelError>;

    /// Names in a folder, sorted.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn list(&self, path: &str) -> Result<Vec<String>, KernelError>;

    /// Adds a line to a file on disk, which is made if it is not there; the line is on disk when the call returns.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn append(&self, path: &str, line: &str) -> Result<(), KernelError>;

    /// Removes a file on disk.
    ///
    /// # Errors
    /// [`KernelError::File`].
    fn remove(&self, path: &str) -> Result<(), KernelError>;
}

impl<K: Kernel> Kernel for &K {
    fn read(&self, path: &str) -> Result<String, KernelError> {
        (**self).read(path)
    }

    fn write(&self, path: &str, line: &str) -> Result<(), KernelError> {
        (**self).write(path, line)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, KernelError> {
        (**self).list(path)
    }

    fn append(&self, path: &str, line: &str) -> Result<(), KernelError> {
        (**self).append(path, line)
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        (**self).remove(path)
    }
}

/// This machine's kernel, or a copy of its files below another root.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
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
        Self { root: root.to_owned() }
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
    fn read(&self, path: &str) -> Result<String, KernelError> {
        fs::read_to_string(self.at(path)).map_err(KernelError::file(path))
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

    fn append(&self, path: &str, line: &str) -> Result<(), KernelError> {
        let append = || {
            let at = self.at(path);
            let folder = at.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(folder)?;
            let is_new = !at.exists();
            let mut file = OpenOptions::new().append(true).create(true).open(&at)?;
            file.write_all(format!("{line}\n").as_bytes())?;
            file.sync_data()?;
            if is_new { fs::File::open(folder)?.sync_all() } else { Ok(()) }
        };
        append().map_err(KernelError::file(path))
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        fs::remove_file(self.at(path)).map_err(KernelError::file(path))
    }
}
