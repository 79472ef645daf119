//! Objects as libfabric has them: a structure that C knows the beginning of, made here and freed here.

use std::ffi::c_void;

use crate::ffi::{Errno, Fid, Ops};

/// What C sees (`fid`), and what belongs to it.
#[repr(C)]
pub(crate) struct Object<F, T> {
    fid: F,
    body: T,
}

impl<F, T> Object<F, T> {
    /// Makes an object and stores where it is in `place`.
    ///
    /// # Safety
    /// `place` may be written.
    pub(crate) unsafe fn hand_out(fid: F, body: T, place: *mut *mut F) {
        let object = Box::into_raw(Box::new(Self { fid, body }));
        // SAFETY: by this function's contract.
        unsafe { place.write(object.cast()) };
    }

    /// What belongs to the object that C calls `fid`.
    ///
    /// # Safety
    /// `fid` came from [`Object::hand_out`] with these types, and is not closed while the reference lives.
    pub(crate) unsafe fn of<'a>(fid: *const F) -> &'a T {
        // SAFETY: by this function's contract; C writes no part of `body`.
        unsafe { &(*fid.cast::<Self>()).body }
    }

    /// Frees the object.
    ///
    /// # Safety
    /// As [`Object::of`], and nobody uses it afterwards.
    pub(crate) unsafe fn close(fid: *mut F) {
        // SAFETY: it came from a box of this type.
        drop(unsafe { Box::from_raw(fid.cast::<Self>()) });
    }
}

/// Functions of the tables of endpoints, which are called with open ones.
macro_rules! calls {
    ($(fn $call:ident($ep:ident $(, $argument:ident: $kind:ty)* $(,)?) $body:block)*) => {$(
        unsafe extern "C" fn $call($ep: *mut FidEp, $($argument: $kind),*) -> isize {
            // SAFETY: libfabric passes an open endpoint, what a message names lives for the call, and the program lends all bytes.
            unsafe { $body }
        }
    )*};
}
pub(crate) use calls;

/// The beginning of an object.
pub(crate) const fn fid(class: usize, context: *mut c_void, ops: &'static Ops) -> Fid {
    Fid { class, context, ops }
}

/// What `at` points to, if to anything.
///
/// # Safety
/// `at` is null, or points to a `T` that nobody writes while the reference lives.
pub(crate) unsafe fn reference<'a, T>(at: *const T) -> Result<&'a T, Errno> {
    // SAFETY: by this function's contract.
    unsafe { at.as_ref() }.ok_or(Errno::INVAL)
}

/// Refuses a place for an answer that is none.
pub(crate) fn expect_place<T>(place: *mut T) -> Result<(), Errno> {
    if place.is_null() { Err(Errno::INVAL) } else { Ok(()) }
}
