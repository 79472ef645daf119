//! Why the kernel's files could not be read or written.

use std::fmt;
use std::io::{self, ErrorKind};

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
    /// A file of this program's own could be led elsewhere by another user of the host.
    #[error("{path} {why}")]
    Unsafe {
        /// The file, or a folder on the way to it.
        path: String,
        /// What is wrong with it, and the remedy.
        why: &'static str,
    },
    /// A line of the journal is no record.
    #[error(
        "{path}: line {line} is damaged: {why}; {outcome}; read the line, set by hand what it names, and take it out of the file"
    )]
    Damaged {
        /// The journal.
        path: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
        /// What became of the settings.
        outcome: String,
    },
    /// A journal notes settings of other files than those that would be restored.
    #[error(
        "{path}: it notes settings of {}, and would be restored to {}; {}",
        files(noted.as_ref()), files(here.as_ref()),
        noted.as_ref().map_or_else(
            || "leave --root out if so (an earlier version noted no copy: look at the paths in it)".to_owned(),
            |root| format!("give --root {root}, and the journal as a path below that"),
        )
    )]
    OtherFiles {
        /// The journal.
        path: String,
        /// Below which folder the copy lies whose settings were changed; none for the machine's own.
        noted: Option<String>,
        /// Below which folder they would be restored.
        here: Option<String>,
    },
    /// Another process changes the settings of the host.
    #[error("another agent runs on this host{}; stop it, or wait for its end", holder.as_ref().map_or_else(String::new, |it| format!(": {it}")))]
    Held {
        /// It, if it has said who it is.
        holder: Option<Holder>,
    },
    /// The machine lacks what tiering needs.
    #[error("{0}")]
    Missing(String),
}

fn files(copied: Option<&String>) -> String {
    copied.map_or_else(|| "this machine itself".to_owned(), |root| format!("the copy below {root}"))
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

    /// The number of the kernel's refusal, if it refused.
    pub(crate) fn raw(&self) -> Option<i32> {
        match self {
            Self::File { source, .. } => source.raw_os_error(),
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

    /// That `path` is gone.
    #[must_use]
    pub fn gone(path: &str) -> Self {
        Self::File { path: path.to_owned(), source: ErrorKind::NotFound.into() }
    }

    pub(crate) fn file(path: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File { path: path.to_owned(), source }
    }
}

/// The process that holds the lock of a host, or held it last, as it says itself: for people alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number, in its own namespace.
    pub process: u32,
    /// Its journal.
    pub journal: String,
}

impl Holder {
    /// This process.
    pub(crate) fn of(journal: &str) -> Self {
        Self { process: std::process::id(), journal: journal.to_owned() }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (process, journal) = text.strip_suffix('\n')?.split_once('\n')?;
        Some(Self { process: process.parse().ok()?, journal: journal.to_owned() })
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "process {} with the journal {}", self.process, self.journal)
    }
}
