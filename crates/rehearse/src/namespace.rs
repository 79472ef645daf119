//! Moves a process into its host: a mount namespace where the shared file is the host's copy of it.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The host whose mounts this process already has, which it inherits.
const ENTERED: &str = "POLDER_REHEARSE_ENTERED";

/// Enters the host that `POLDER_HOST` names, and returns its folder. A process of another host, as a launcher starts it, leaves that.
pub(crate) fn enter(rack: &Path) -> io::Result<PathBuf> {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let (host, entered) = (variable("POLDER_HOST"), variable(ENTERED));
    let folder = rack.join(&host);
    if host.parse::<u16>().is_err() || !folder.is_dir() {
        return Err(io::Error::other(format!("POLDER_HOST={host:?} names no host of this rehearsal")));
    }
    if host != entered {
        own_mounts().map_err(|error| {
            let remedy = "run as root, or allow user namespaces (user.max_user_namespaces, kernel.unprivileged_userns_clone)";
            io::Error::other(format!("this user may not mount a file for one process alone ({error}); {remedy}"))
        })?;
        let file = PathBuf::from(variable("POLDER_REHEARSE_FILE"));
        if entered.is_empty() {
            bind(&file, &rack.join("memory"))?;
        }
        bind(&folder.join("copy"), &file)?;
        // A kernel of its own.
        bind(&folder.join("boot_id"), Path::new("/proc/sys/kernel/random/boot_id"))?;
        // SAFETY: the program has no other thread before it runs.
        unsafe {
            std::env::set_var(ENTERED, host);
            std::env::set_var("POLDER_RUN", folder.join("run"));
        }
    }
    Ok(folder)
}

/// Gives this process mounts of its own; where only root may, as the owner of a user namespace.
fn own_mounts() -> io::Result<()> {
    // SAFETY: these calls have no effect on memory.
    let (user, group) = unsafe { (libc::getuid(), libc::getgid()) };
    // SAFETY: as above.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        // SAFETY: as above.
        done(unsafe { libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWUSER) })?;
        std::fs::write("/proc/self/setgroups", "deny")?;
        std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    let (none, flags) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: a path that ends with a zero, and no others.
    done(unsafe { libc::mount(none, c"/".as_ptr(), none, flags, none.cast()) })
}

/// Has one file in the place of another.
fn bind(source: &Path, target: &Path) -> io::Result<()> {
    let [from, to] = [source, target].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (from, to, none) = (from?, to?, std::ptr::null());
    // SAFETY: paths that end with a zero.
    done(unsafe { libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast()) })
        .map_err(|error| io::Error::other(format!("{} over {}: {error}", source.display(), target.display())))
}

fn done(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
