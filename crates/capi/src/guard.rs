//! The border that no panic crosses: each function that C calls does its work in here.

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use polder_border::Uncancelled;
use polder_mem::forks;

use crate::failure::{Failure, Status};

/// Functions of the library's, whose arguments are as `polder.h` says: a handle is null or open, and one that is closed is used no more;
/// a name is null or a string of C; what is given back is null or may be written; arrays are as long as is told, and the caller's to be
/// read, or to be written.
macro_rules! exported {
    ($($(#[$about:meta])* extern "C" fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        $(#[$about])*
        ///
        /// # Safety
        /// Its arguments are as `polder.h` says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            // SAFETY: by this function's contract.
            unsafe { $body }
        }
    )*};
}
pub(crate) use exported;

/// What a call that does one thing answers: 0 or a status.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    caught(body).map_or_else(Failure::tell, |()| 0)
}

/// What a call answers that has no status: `instead` where it fails, which `polder_error` explains.
pub(crate) fn value<T>(instead: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    caught(body).unwrap_or_else(|failure| {
        failure.tell();
        instead
    })
}

fn caught<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let _uncancelled = Uncancelled::begin();
    // Whatever a panic left half done is behind a lock that is poisoned, or lost with the call.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        Err(Failure::new(Status::Other, "libpolder panicked; the message stands on stderr, please report it"))
    })
}

/// What a handle points to; its first field, so that it points to that as well.
#[repr(C)]
struct Held<T> {
    value: T,
    /// The process that made it.
    process: u32,
    /// Tells that process from its children, cheaper than its id.
    forks: u32,
}

/// What a call answers that makes something: a status, and where it is in `place`, or null there.
///
/// # Safety
/// `place` is null or may be written.
pub(crate) unsafe fn made<T>(place: *mut *mut T, body: impl FnOnce() -> Result<T, Failure>) -> c_int {
    if place.is_null() {
        return Failure::argument("the place for the handle is NULL; pass the address of a pointer").tell();
    }
    let mut handle = ptr::null_mut();
    let status = status(|| {
        let held = Held { value: body()?, process: std::process::id(), forks: forks() };
        handle = Box::into_raw(Box::new(held)).cast();
        Ok(())
    });
    // SAFETY: not null, and writable by this function's contract.
    unsafe { place.write(handle) };
    status
}

/// What a handle stands for.
///
/// # Safety
/// `handle` is null, or came from [`made`] and is not closed while the reference lives.
pub(crate) unsafe fn given<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: by this function's contract.
    let held = unsafe { handle.cast::<Held<T>>().as_ref() };
    let held = held.ok_or_else(|| Failure::argument(format!("the {what} is NULL; pass one that is open")))?;
    if held.forks != forks() {
        let process = held.process;
        return Err(Failure::argument(format!(
            "this {what} belongs to process {process}, which forked this one; open it again here"
        )));
    }
    Ok(&held.value)
}

/// Gives a handle up.
///
/// # Safety
/// `handle` is null, or came from [`made`] and nobody uses it any more.
pub(crate) unsafe fn close<T>(handle: *mut T) -> c_int {
    status(|| {
        if !handle.is_null() {
            // SAFETY: it came from a box of this type.
            let held = unsafe { Box::from_raw(handle.cast::<Held<T>>()) };
            match held.forks == forks() {
                true => drop(held),
                // The threads that it would join and the locks that it would give back are the parent's.
                false => std::mem::forget(held),
            }
        }
        Ok(())
    })
}

/// A string of C.
///
/// # Safety
/// `text` is null, or ends with a zero and is not written while the reference lives.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::argument(format!("the {what} is NULL; pass a string")));
    }
    // SAFETY: not null, and a string of C by this function's contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::argument(format!("the {what} {text:?} is no UTF-8")))
}

/// `bytes` bytes to read.
///
/// # Safety
/// They may be read, and nobody writes them while the slice lives.
pub(crate) unsafe fn source<'a>(from: *const u8, bytes: usize) -> Result<&'a [u8], Failure> {
    check(from.is_null(), bytes)?;
    if bytes == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, no longer than anything can be, and readable by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(from, bytes) })
}

/// `bytes` bytes to write.
///
/// # Safety
/// They may be written, and nobody else touches them while the slice lives.
pub(crate) unsafe fn target<'a>(into: *mut u8, bytes: usize) -> Result<&'a mut [u8], Failure> {
    check(into.is_null(), bytes)?;
    if bytes == 0 {
        return Ok(&mut []);
    }
    // SAFETY: not null, no longer than anything can be, and writable by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(into, bytes) })
}

fn check(is_null: bool, bytes: usize) -> Result<(), Failure> {
    if isize::try_from(bytes).is_err() || is_null && bytes > 0 {
        return Err(Failure::argument(format!(
            "{bytes} bytes at NULL, or more than there can be; pass an array"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use polder_mem::testing::{Child, Ended};

    use super::*;

    #[test]
    fn a_panic_becomes_a_status_and_a_sentence() {
        assert_eq!(status(|| panic!("in a test")), Status::Other as c_int);
        // SAFETY: what `last` gives is a string of C until the next failure.
        let said = unsafe { CStr::from_ptr(crate::failure::last()) };
        assert!(said.to_str().unwrap().contains("please report it"), "{said:?}");
    }

    #[test]
    fn a_thread_is_not_cancelled_within_a_call() {
        assert!(value(false, || Ok(Uncancelled::begin().was_begun())));
    }

    #[test]
    fn a_forked_child_is_told_that_a_handle_is_its_parents_and_may_close_it() {
        struct Loud;
        impl Drop for Loud {
            fn drop(&mut self) {
                panic!("a child dropped what is its parent's");
            }
        }
        let mut place = ptr::null_mut::<Loud>();
        // SAFETY: `place` is a variable of this test.
        assert_eq!(unsafe { made(&raw mut place, || Ok(Loud)) }, 0);
        let child = Child::fork(|| {
            // SAFETY: `place` came from `made`, and is closed once.
            let refused = unsafe { given(place, "pool") }.err().expect("it is the parent's");
            assert_eq!(refused.tell(), Status::Argument as c_int);
            // SAFETY: what `last` gives is a string of C until the next failure.
            let said = unsafe { CStr::from_ptr(crate::failure::last()) }.to_str().unwrap();
            assert!(
                said.contains("this pool belongs to process") && said.contains("open it again here"),
                "{said}"
            );
            // SAFETY: as above.
            assert_eq!(value(7, || unsafe { given(place, "pool") }.map(|_| 8)), 7);
            // SAFETY: as above.
            assert_eq!(unsafe { close(place) }, 0);
        })
        .wait();
        assert_eq!(child, Ended::Exited(0));
        // SAFETY: as above.
        assert!(unsafe { given(place, "pool") }.is_ok());
    }

    #[test]
    fn what_could_not_be_made_is_null() {
        let mut place = ptr::dangling_mut::<u8>();
        // SAFETY: `place` is a variable of this test.
        let status = unsafe { made(&raw mut place, || Err(Failure::argument("no"))) };
        assert_eq!((status, place.is_null()), (Status::Argument as c_int, true));
    }
}
