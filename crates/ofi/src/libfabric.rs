//! The libfabric that loaded this provider, found in the running process: nothing of it is linked, so that one file
//! serves every release.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::ffi::{Info, Provider};

type Log = unsafe extern "C" fn(*const Provider, c_int, c_int, *const c_char, c_int, *const c_char, ...);

/// The functions that the provider calls.
pub(crate) struct Core {
    version: unsafe extern "C" fn() -> u32,
    dupinfo: unsafe extern "C" fn(*const Info) -> *mut Info,
    freeinfo: unsafe extern "C" fn(*mut Info),
    pub(crate) log_enabled: unsafe extern "C" fn(*const Provider, c_int, c_int) -> c_int,
    pub(crate) log: Log,
}

/// The newest interface that is known here, for where there is no libfabric to ask.
const NEWEST: u32 = crate::ffi::version(2, 6);

/// What the running libfabric calls itself: a provider that says less is passed over by programs that ask for more.
pub(crate) fn version() -> u32 {
    // SAFETY: fi_version takes nothing and reads a constant.
    core().map_or(NEWEST, |core| unsafe { (core.version)() })
}

/// An `Info` with all its parts, zeroed, as large as the running libfabric knows it; null when there is no memory, or no
/// libfabric.
pub(crate) fn new_info() -> *mut Info {
    // SAFETY: fi_dupinfo makes a new structure when given none.
    core().map_or(ptr::null_mut(), |core| unsafe { (core.dupinfo)(ptr::null()) })
}

/// Frees what [`new_info`] made.
///
/// # Safety
/// `info` came from there, is owned by the caller, and its strings from `strdup`.
pub(crate) unsafe fn free_info(info: *mut Info) {
    if let Some(core) = core() {
        // SAFETY: by this function's contract.
        unsafe { (core.freeinfo)(info) }
    }
}

static CORE: OnceLock<Option<Core>> = OnceLock::new();

/// The libfabric of this process.
pub(crate) fn core() -> Option<&'static Core> {
    CORE.get_or_init(|| Core::within(libc::RTLD_DEFAULT).or_else(Core::loaded)).as_ref()
}

impl Core {
    fn within(library: *mut c_void) -> Option<Self> {
        // SAFETY: the symbols are libfabric's, whose types have been these since 1.0 (`fi_log` since 1.1).
        unsafe {
            Some(Self {
                version: symbol(library, c"fi_version")?,
                dupinfo: symbol(library, c"fi_dupinfo")?,
                freeinfo: symbol(library, c"fi_freeinfo")?,
                log_enabled: symbol(library, c"fi_log_enabled")?,
                log: symbol(library, c"fi_log")?,
            })
        }
    }

    /// The first loaded library that is called libfabric: Python loads MPI so that its symbols are not everybody's.
    fn loaded() -> Option<Self> {
        unsafe extern "C" fn look(library: *mut libc::dl_phdr_info, _: usize, into: *mut c_void) -> c_int {
            // SAFETY: dl_iterate_phdr gives a valid entry, whose name is a C string or null.
            let path = unsafe { (*library).dlpi_name };
            if path.is_null() {
                return 0;
            }
            // SAFETY: not null, and alive for the length of this call.
            let path = unsafe { CStr::from_ptr(path) };
            let name = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            if !name.starts_with(b"libfabric") {
                return 0;
            }
            // SAFETY: `into` is the handle that the caller below waits for.
            unsafe { *into.cast::<*const c_char>() = path.as_ptr() };
            1
        }
        let mut path: *const c_char = ptr::null();
        // SAFETY: `look` has the type that is asked for, and `path` outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut path).cast()) };
        if path.is_null() {
            return None;
        }
        // SAFETY: the name of a library that is loaded; it called us, so that it stays loaded.
        let library = unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if library.is_null() { None } else { Self::within(library) }
    }
}

/// The function called `name`.
///
/// # Safety
/// `F` is a function pointer of the type that the function has.
pub(crate) unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: `library` is a handle of dlopen's or one of its constants, `name` a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, and of this type by the contract.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

#[cfg(test)]
pub(crate) mod standing_in {
    //! A libfabric for the tests, which have none loaded.

    use super::*;
    use crate::ffi::{DomainAttr, EpAttr, FabricAttr, RxAttr, TxAttr};

    fn zeroed<T>() -> *mut T {
        // SAFETY: allocates zeroed bytes; whoever gets them frees them.
        unsafe { libc::calloc(1, size_of::<T>()).cast() }
    }

    unsafe extern "C" fn version() -> u32 {
        NEWEST
    }

    unsafe extern "C" fn dupinfo(info: *const Info) -> *mut Info {
        assert!(info.is_null(), "the provider only makes new ones");
        let made = zeroed::<Info>();
        // SAFETY: just allocated.
        unsafe {
            (*made).tx_attr = zeroed::<TxAttr>();
            (*made).rx_attr = zeroed::<RxAttr>();
            (*made).ep_attr = zeroed::<EpAttr>();
            (*made).domain_attr = zeroed::<DomainAttr>();
            (*made).fabric_attr = zeroed::<FabricAttr>();
        }
        made
    }

    unsafe extern "C" fn freeinfo(info: *mut Info) {
        // SAFETY: made above, with strings from strdup.
        unsafe {
            libc::free((*(*info).domain_attr).name.cast());
            libc::free((*(*info).fabric_attr).name.cast());
            libc::free((*info).tx_attr.cast());
            libc::free((*info).rx_attr.cast());
            libc::free((*info).ep_attr.cast());
            libc::free((*info).domain_attr.cast());
            libc::free((*info).fabric_attr.cast());
            libc::free(info.cast());
        }
    }

    unsafe extern "C" fn log_enabled(_: *const Provider, _: c_int, _: c_int) -> c_int {
        0
    }

    unsafe extern "C" fn log(
        _: *const Provider,
        _: c_int,
        _: c_int,
        _: *const c_char,
        _: c_int,
        _: *const c_char,
    ) {
    }

    /// Takes libfabric's place.
    pub(crate) fn begin() {
        // SAFETY: never called, because nothing is enabled.
        let log = unsafe { std::mem::transmute::<*const (), Log>(log as *const ()) };
        CORE.get_or_init(|| Some(Core { version, dupinfo, freeinfo, log_enabled, log }));
    }
}
