//! A rack that is killed leaves nothing: neither its folder in /dev/shm nor its kernels.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Waits until `found` has something.
fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{what} never came");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program in place of QEMU, which writes its command line to a file and goes on.
fn stand_in(folder: &Path) -> PathBuf {
    let path = folder.join("qemu-system-x86_64");
    let text = "#!/bin/sh\necho \"$$ $*\" > \"$TOLD.new\"\nmv \"$TOLD.new\" \"$TOLD\"\nexec sleep 600\n";
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn rack(folder: &Path, told: &Path) -> Child {
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut rack = Command::new(env!("CARGO_BIN_EXE_polder-rack"));
    rack.args(["kernel", "initrd", "--logs"]).arg(folder).env("PATH", path).env("TOLD", told);
    rack.stdout(Stdio::null()).spawn().unwrap()
}

/// Whether a process runs; one that ended and that nobody waited for does not.
fn runs(pid: &str) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

#[test]
fn a_rack_that_is_killed_leaves_no_folder_and_no_kernel() {
    let folder = tempfile::tempdir().unwrap();
    stand_in(folder.path());
    for (number, signal) in [Signal::TERM, Signal::INT, Signal::KILL].into_iter().enumerate() {
        let told = folder.path().join(format!("told{number}"));
        let mut rack = rack(folder.path(), &told);
        let line = eventually("the kernel", || fs::read_to_string(&told).ok());
        let (pid, words) = line.split_once(' ').unwrap();
        let memory = words.split(['=', ',']).find(|word| word.starts_with("/dev/shm/polder-rack-")).unwrap();
        let shared = Path::new(memory).parent().unwrap();
        assert!(shared.is_dir() && runs(pid), "{line}");
        kill_process(Pid::from_child(&rack), signal).unwrap();
        assert!(!rack.wait().unwrap().success());
        eventually("its end", || (!shared.exists() && !runs(pid)).then_some(()));
    }
}
