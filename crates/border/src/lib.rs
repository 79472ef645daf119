//! The border of a library in a process that is not Polder's: what comes from the program's threads and ends here.

use std::ffi::c_int;
use std::ptr;

unsafe extern "C" {
    /// Of the C library.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_DISABLE.
const DISABLE: c_int = 1;

/// The time in which this thread is not cancelled: the C library would unwind it through the call, and end the process where Rust catches
/// panics. A `pthread_cancel` meanwhile takes effect after it.
#[derive(Debug)]
pub struct Uncancelled {
    before: c_int,
}

impl Uncancelled {
    /// Until the result is dropped. It takes 7 to 10 ns: calls that are as short and have no cancellation point do without.
    #[must_use]
    pub fn begin() -> Self {
        let mut before = DISABLE;
        // SAFETY: `before` may be written.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before }
    }

    /// Whether this thread was not cancelled before it either.
    #[must_use]
    pub const fn was_begun(&self) -> bool {
        self.before == DISABLE
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: the state that the C library gave, and nothing to write.
        unsafe { pthread_setcancelstate(self.before, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_cancelled_again_after_the_last_of_them_alone() {
        let first = Uncancelled::begin();
        let second = Uncancelled::begin();
        assert!(!first.was_begun() && second.was_begun());
        drop(second);
        assert!(Uncancelled::begin().was_begun());
        drop(first);
        assert!(!Uncancelled::begin().was_begun());
    }
}
