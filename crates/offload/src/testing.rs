//! What tests of several modules need: folders, and disks that fail.

use std::fs::OpenOptions;
use std::path::PathBuf;

use crate::tier::TierFile;

/// A folder on a disk: that of the build.
pub(crate) fn disk() -> PathBuf {
    std::env::current_exe().expect("a test has a file").parent().expect("in a folder").into()
}

/// A tier that is read as zeros, and has no room for any write.
pub(crate) fn full(size: u64) -> TierFile {
    let full = OpenOptions::new().read(true).write(true).open("/dev/full").expect("there");
    TierFile::over(full, &disk(), size).expect("threads")
}

/// Numbers that look random, from a seed that is printed (xorshift64).
pub(crate) fn numbers() -> impl FnMut(usize) -> usize {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let mut state = now.as_nanos() as u64 | 1;
    println!("seed {state}");
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below
    }
}
