//! Peers that are compiled when they are measured.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;

/// A peer's source, and what compiles it.
pub(super) struct Peer {
    /// What errors call it.
    pub(super) name: &'static str,
    /// A file's name and text.
    pub(super) source: (&'static str, &'static str),
    pub(super) compiler: &'static str,
    pub(super) options: &'static [&'static str],
    pub(super) library: &'static str,
    /// Debian's packages that have the compiler and the library.
    pub(super) packages: &'static str,
}

impl Peer {
    /// Compiles it in this folder: the program.
    pub(super) fn compile(&self, folder: &Path) -> Result<PathBuf, Failure> {
        let Self { name, source: (file, text), compiler, packages, .. } = self;
        let (source, program) = (folder.join(file), folder.join("peer"));
        std::fs::write(&source, text)?;
        let hint =
            format!("install it with `apt-get install {packages}`, or measure without {name}: --alone");
        let ended = Command::new(compiler)
            .args(self.options)
            .arg("-o")
            .args([&program, &source])
            .arg(self.library)
            .output()
            .map_err(|error| Failure(format!("{compiler}: {error}; {hint}")))?;
        match ended.status.success() {
            true => Ok(program),
            false => {
                let why = String::from_utf8_lossy(&ended.stderr);
                let why = why.lines().find(|line| line.contains("error")).unwrap_or("no reason");
                Err(Failure(format!("{name} cannot be compiled: {why}; {hint}")))
            }
        }
    }
}
