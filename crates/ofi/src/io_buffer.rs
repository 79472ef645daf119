//! A program's memory, lent to the provider until the operation on it completes.

use std::ffi::c_void;
use std::sync::OnceLock;

use polder_mem::Offset;
use polder_pool::endpoint::MessageBuffer;

use crate::libfabric::symbol;
use crate::session;

/// Says where in the pool with a uuid some bytes lie, or all ones.
type PlaceOf = unsafe extern "C" fn(*const c_void, usize, *const u128) -> u64;

/// The window shim's word on memory that it has given the program from the pool: it is loaded before the program, if at all.
fn place_of() -> Option<PlaceOf> {
    static FOUND: OnceLock<Option<PlaceOf>> = OnceLock::new();
    // SAFETY: the type is the shim's.
    *FOUND.get_or_init(|| unsafe { symbol(libc::RTLD_DEFAULT, c"polder_place") })
}

/// The bytes of an operation.
#[derive(Debug)]
pub(crate) enum IoBuffer {
    /// The program's own.
    Lent { at: *mut u8, bytes: usize },
    /// Copied from the program, or not yet asked for by it.
    Held(Vec<u8>),
}

// SAFETY: libfabric's rule: until an operation completes its bytes belong to the provider, on whatever thread.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    /// What a program lends.
    ///
    /// # Safety
    /// The bytes are the provider's until their operation completes or is given back: nobody else writes them, nor reads
    /// them if they are to be filled.
    pub(crate) const unsafe fn lent(at: *mut c_void, bytes: usize) -> Self {
        match at.is_null() {
            true => Self::Held(Vec::new()),
            false => Self::Lent { at: at.cast(), bytes },
        }
    }

    pub(crate) const fn at(&self) -> *mut u8 {
        match self {
            Self::Lent { at, .. } => *at,
            Self::Held(_) => std::ptr::null_mut(),
        }
    }

    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Lent { bytes, .. } => *bytes,
            Self::Held(bytes) => bytes.len(),
        }
    }

    /// What follows the first `bytes`, which are the program's again.
    pub(crate) fn after(self, bytes: usize) -> Self {
        match self {
            // SAFETY: `bytes` is at most the length, by the minimum.
            Self::Lent { at, bytes: all } => unsafe {
                let bytes = bytes.min(all);
                Self::Lent { at: at.add(bytes), bytes: all - bytes }
            },
            Self::Held(mut held) => Self::Held(held.split_off(bytes.min(held.len()))),
        }
    }
}

impl MessageBuffer for IoBuffer {
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: not null, and lent by the contract of `IoBuffer::lent`.
            Self::Lent { at, bytes } => unsafe { std::slice::from_raw_parts(*at, *bytes) },
            Self::Held(bytes) => bytes,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            // SAFETY: as above; the bytes of a receive are the provider's alone.
            Self::Lent { at, bytes } => unsafe { std::slice::from_raw_parts_mut(*at, *bytes) },
            Self::Held(bytes) => bytes,
        }
    }

    fn place(&self) -> Option<Offset> {
        let Self::Lent { at, bytes } = self else { return None };
        let (place_of, uuid) = (place_of()?, session::uuid()?);
        // SAFETY: the bytes are lent, and the uuid is there for the call.
        let place = unsafe { place_of(at.cast(), *bytes, &raw const uuid) };
        (place != u64::MAX).then_some(Offset(place))
    }
}
