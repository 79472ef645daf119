//! The border that no panic crosses: each function that C calls does its work in here.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use polder_border::Uncancelled;

use crate::ffi::Errno;

/// What a call on data answers: how much, or the negated error. Programs make millions of them. So they keep no cancellation out: they have a
/// cancellation point only where they log, or first meet a peer.
pub(crate) fn amount(body: impl FnOnce() -> Result<usize, Errno>) -> isize {
    match outcome(body) {
        Ok(amount) => amount as isize,
        Err(Errno(errno)) => -(errno as isize),
    }
}

/// As [`amount`], of a call that may wait.
pub(crate) fn waited(body: impl FnOnce() -> Result<usize, Errno>) -> isize {
    let _uncancelled = Uncancelled::begin();
    amount(body)
}

/// What a call that does one thing answers: 0 or the negated error.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    count(|| body().map(|()| 0))
}

/// What a call on several things answers: how many, or the negated error.
pub(crate) fn count(body: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    let _uncancelled = Uncancelled::begin();
    match outcome(body) {
        Ok(count) => count,
        Err(Errno(errno)) => -errno,
    }
}

/// What a call that makes something answers: where it is, or null.
pub(crate) fn object<T>(body: impl FnOnce() -> *mut T) -> *mut T {
    let _uncancelled = Uncancelled::begin();
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(ptr::null_mut())
}

fn outcome<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Whatever a panic left half done is as good as after a call that failed, or lost with the call.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        tracing::error!("the provider panicked; the message stands above, please report it");
        Err(Errno::OTHER)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_not_cancelled_within_a_call_that_makes_something_or_waits() {
        let is_not = || Uncancelled::begin().was_begun();
        assert_eq!(count(|| Ok(is_not().into())), 1);
        assert_eq!(status(|| if is_not() { Ok(()) } else { Err(Errno::OTHER) }), 0);
        assert_eq!(waited(|| Ok(is_not().into())), 1);
        let found = object(|| if is_not() { ptr::dangling_mut::<u8>() } else { ptr::null_mut() });
        assert!(!found.is_null() && !is_not());
    }

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(status(|| panic!("in a test")), -Errno::OTHER.0);
        assert_eq!(amount(|| panic!("in a test")), -(Errno::OTHER.0 as isize));
        assert!(object::<u8>(|| panic!("in a test")).is_null());
    }
}
