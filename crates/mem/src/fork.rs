//! Which process this is among those that were forked from one another.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// The forks that lie between this process and the first that asked. What a process noted before a fork differs from what
/// its child is told. No system call, unlike a process id.
///
/// # Panics
/// When there is no memory for a fork handler.
#[must_use]
pub fn forks() -> u32 {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    in_children(count, &WATCHED).expect("no memory for a fork handler");
    FORKS.load(Ordering::Relaxed)
}

/// Has every child that is forked from here on run `handler`, once for each thread that was the first to ask. No `Once`:
/// a child that is forked while another thread is inside one would wait for that thread, which it does not have.
pub(crate) fn in_children(handler: extern "C" fn(), arranged: &AtomicBool) -> io::Result<()> {
    if arranged.load(Ordering::Acquire) {
        return Ok(());
    }
    // SAFETY: the handlers are functions of this program that make only async-signal-safe calls.
    match unsafe { libc::pthread_atfork(None, None, Some(handler)) } {
        0 => arranged.store(true, Ordering::Release),
        code => return Err(io::Error::from_raw_os_error(code)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "forks")]
    fn a_child_is_told_another_number_than_its_parent() {
        let before = forks();
        // SAFETY: the child calls nothing but what is allowed after a fork of a program with threads.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child at once, without what the parent would run at its end.
            0 => unsafe { libc::_exit(i32::from(forks() == before)) },
            child => {
                let mut status = 0;
                // SAFETY: waits for the child that was just made, and `status` outlives the call.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
                assert_eq!(forks(), before);
            }
        }
    }
}
