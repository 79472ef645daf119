//! A directory in memory that is gone when its maker is, in whatever way that ends.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use polder_mem::testing;

/// The directory.
pub(crate) struct Scratch {
    directory: testing::Scratch,
    _guard: Guard,
}

impl Scratch {
    pub(crate) fn new() -> io::Result<Self> {
        let directory = testing::Scratch::new();
        let guard = Guard::over(directory.path())?;
        Ok(Self { directory, _guard: guard })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes the directory of a process that is interrupted or killed: a process of its own, out of reach of Ctrl-C, that
/// waits until its maker is gone.
struct Guard(Child);

impl Guard {
    fn over(directory: &Path) -> io::Result<Self> {
        let mut guard = Command::new("sh");
        guard.args(["-c", "cat > /dev/null; rm -rf \"$0\""]).arg(directory);
        Ok(Self(guard.stdin(Stdio::piped()).process_group(0).spawn()?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It has nothing left to do, and says so by ending.
        drop(self.0.wait());
    }
}
