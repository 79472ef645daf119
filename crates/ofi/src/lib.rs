//! `libpolder-fi.so`: a libfabric provider, so that any MPI library that speaks libfabric runs over the pool unchanged.
//!
//! libfabric loads it from `FI_PROVIDER_PATH` and calls [`fi_prov_ini`]; everything else it reaches through the tables of
//! functions in the objects that it is given. The messages themselves are the pool's: here stands libfabric's meaning.

mod arithmetic;
mod atomic;
mod av;
mod beside;
mod cntr;
mod counter;
mod cq;
mod domain;
mod ep;
mod eq;
mod fabric;
mod ffi;
mod getinfo;
mod guard;
mod handles;
mod idle;
mod io_buffer;
mod ledger;
mod libfabric;
mod limits;
mod log;
mod mr;
mod note;
mod object;
mod operation;
mod port;
mod queue;
mod region;
mod rma;
mod session;
mod state;
#[cfg(test)]
mod tests;
mod transfer;
mod vector;

use std::ffi::c_void;
use std::ptr;

/// What libfabric calls once it has loaded this library: gives the provider's name and its first functions.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut c_void {
    let provider = guard::object(|| {
        let provider = Box::into_raw(Box::new(ffi::Provider {
            version: ffi::version(0, 1),
            fi_version: libfabric::version(),
            context: [ptr::null_mut(); 4],
            name: limits::NAME.as_ptr(),
            getinfo: getinfo::getinfo,
            fabric: fabric::open,
            cleanup: session::cleanup,
        }));
        log::start(provider);
        provider
    });
    provider.cast()
}
