//! Which process this is among those that were forked from one another.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// The forks that lie between this process and the first that asked. What a process noted before a fork differs from what
/// its child is told. No system call, unlike a process id.
#[must_use]
pub fn forks() -> u32 {
    WATCH.call_once(|| {
        extern "C" fn in_the_child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler is a function of this program and only counts, which is allowed after a fork.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
        assert_eq!(rc, 0, "no memory for a fork handler");
    });
    FORKS.load(Ordering::Relaxed)
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
