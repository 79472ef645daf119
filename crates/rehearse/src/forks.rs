//! A process that forks while another of its threads is in the handler: the child has no such thread, to give its locks back.

use std::cell::Cell;
use std::io;
use std::sync::MutexGuard;

use crate::HOST;
use crate::host::Mappings;
use crate::signals::pthread_sigmask;
use crate::trap::{Scanned, scanned};

thread_local! {
    /// What this thread has locked to fork.
    static HELD: Cell<Option<Held>> = const { Cell::new(None) };
}

/// What is locked, and the signals that were blocked before: a handler of the program that flushed would wait for its own thread.
struct Held {
    locks: (MutexGuard<'static, Scanned>, Option<MutexGuard<'static, Mappings>>),
    blocked: libc::sigset_t,
}

/// Has every fork from here on wait until no other thread has a lock of the handler's.
pub(crate) fn watch() -> io::Result<()> {
    extern "C" fn lock() {
        // SAFETY: all zeros are values of these types, which outlive the calls.
        let blocked = unsafe {
            let (mut all, mut blocked): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut blocked);
            blocked
        };
        // In the order in which the handler takes them.
        let locks = (scanned(), HOST.get().map(|host| host.mappings()));
        HELD.set(Some(Held { locks, blocked }));
    }
    extern "C" fn unlock() {
        let Some(Held { locks, blocked }) = HELD.take() else { return };
        drop(locks);
        // SAFETY: the set that `lock` was given.
        unsafe { pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, std::ptr::null_mut()) };
    }
    // SAFETY: functions of this library, which is never unloaded.
    match unsafe { libc::pthread_atfork(Some(lock), Some(unlock), Some(unlock)) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
