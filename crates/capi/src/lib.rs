//! `libpolder.so`: the C API. `include/polder.h` says what each call means; a test holds it equal to what stands here.

mod failure;
mod guard;
mod kv;
mod object;
mod pool;
mod ring;
mod window;

use std::ffi::{CStr, c_char};

/// The version of this library.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn polder_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no zero in it"),
        };
    VERSION.as_ptr()
}

/// What went wrong last in this thread.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn polder_error() -> *const c_char {
    failure::last()
}
