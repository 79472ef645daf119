//! The border that no panic crosses: each function that C calls does its work in here.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use crate::ffi::Errno;

/// What a call on data answers: how much, or the negated error.
pub(crate) fn amount(body: impl FnOnce() -> Result<usize, Errno>) -> isize {
    match outcome(body) {
        Ok(amount) => amount as isize,
        Err(Errno(errno)) => -(errno as isize),
    }
}

/// What a call that does one thing answers: 0 or the negated error.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    count(|| body().map(|()| 0))
}

/// What a call on several things answers: how many, or the negated error.
pub(crate) fn count(body: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    match outcome(body) {
        Ok(count) => count,
        Err(Errno(errno)) => -errno,
    }
}

/// What a call that makes something answers: where it is, or null.
pub(crate) fn object<T>(body: impl FnOnce() -> *mut T) -> *mut T {
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
    fn a_panic_becomes_an_error() {
        assert_eq!(status(|| panic!("in a test")), -Errno::OTHER.0);
        assert_eq!(amount(|| panic!("in a test")), -(Errno::OTHER.0 as isize));
        assert!(object::<u8>(|| panic!("in a test")).is_null());
    }
}
