//! A process that forks while another of its threads is in the handler: the child has no such thread, to give its locks back.

use std::cell::Cell;
use std::io;
use std::sync::MutexGuard;

use crate::HOST;
use crate::host::Mappings;
use crate::trap::{Scanned, scanned};

thread_local! {
    /// What this thread has locked to fork.
    static HELD: Cell<Option<Held>> = const { Cell::new(None) };
}

type Held = (MutexGuard<'static, Scanned>, Option<MutexGuard<'static, Mappings>>);

/// Has every fork from here on wait until no other thread has a lock of the handler's.
pub(crate) fn watch() -> io::Result<()> {
    extern "C" fn lock() {
        // In the order in which the handler takes them.
        HELD.set(Some((scanned(), HOST.get().map(|host| host.mappings()))));
    }
    extern "C" fn unlock() {
        HELD.take();
    }
    // SAFETY: functions of this library, which is never unloaded.
    match unsafe { libc::pthread_atfork(Some(lock), Some(unlock), Some(unlock)) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
