//! `libpolder-rehearse.so`: caches of a host that are not coherent with those of other hosts, for a program that knows nothing of it.
//!
//! `polder rehearse` loads it before a program by `LD_PRELOAD`. The program maps its host's copy of a shared file, which plays the host's
//! caches (`namespace.rs`). This library puts a trap in place of each instruction that flushes a line or stores around the caches, and does there
//! what the instruction does: it moves the line between the copy and the true memory (`host.rs`). All else of the program runs as it is.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod adversary;
mod code;
mod forks;
mod host;
mod namespace;
mod signals;
mod trap;

use std::ffi::{c_int, c_long, c_void};
use std::path::Path;
use std::sync::OnceLock;

use host::Host;

/// The host that this process runs on, once the library has started.
static HOST: OnceLock<Host> = OnceLock::new();

/// Runs before the program, and before any constructor of its own.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Does nothing where `polder rehearse` did not start the program.
extern "C" fn start() {
    let Ok(folder) = std::env::var("POLDER_REHEARSE") else { return };
    let seed =
        std::env::var("POLDER_REHEARSE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_default();
    let host = namespace::enter(Path::new(&folder)).and_then(|folder| Host::open(&folder, seed));
    let host = match host {
        Ok(host) => HOST.get_or_init(|| host),
        Err(error) => refuse(&error.to_string()),
    };
    if std::env::var_os("POLDER_REHEARSE_ADVERSARY").is_some() {
        adversary::run(host, seed);
    }
    if let Err(error) = forks::watch().and_then(|()| trap::install()) {
        refuse(&error.to_string());
    }
}

/// Ends a program whose memory would be the host's own by mistake.
fn refuse(why: &str) -> ! {
    eprintln!("polder: {why}");
    std::process::exit(125)
}

/// The program's `munmap`: what is known of its mappings may be wrong from now on.
///
/// # Safety
/// As munmap of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's arguments, for the same call.
    let done = unsafe { libc::syscall(libc::SYS_munmap, address, bytes) };
    HOST.get().into_iter().for_each(Host::forget_mappings);
    done as c_int
}

/// The program's `mmap`, which may map the file.
///
/// # Safety
/// As mmap of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller's arguments, for the same call.
    let at = unsafe { libc::syscall(libc::SYS_mmap, address, bytes, protection, flags, file, offset) };
    HOST.get().into_iter().for_each(Host::forget_mappings);
    at as *mut c_void
}

/// The program's `mremap`. The C library may map again what it leaves, by calls that do not come here.
///
/// # Safety
/// As mremap of the C library, whose last argument is there where the flags say so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    address: *mut c_void,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's arguments, for the same call, which takes the last where the flags say so.
    let at = unsafe { libc::syscall(libc::SYS_mremap, address, bytes, new_bytes, flags, new_address) };
    HOST.get().into_iter().for_each(Host::forget_mappings);
    at as *mut c_void
}

/// The same by its other name.
///
/// # Safety
/// As mmap64 of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller's arguments, for the same call.
    unsafe { mmap(address, bytes, protection, flags, file, offset) }
}
