//! The fabric: all hosts that map the pool.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use crate::ffi::{Absent, Errno, FabricAttr, Fid, FidDomain, FidFabric, Info, Ops, OpsFabric, class};
use crate::handles::{FabricHandle, OpenFabric};
use crate::limits::NAME;
use crate::object::{expect_place, fid, reference};
use crate::{domain, eq, guard, log};

static OPS: Ops = Ops::closing(close);

static FABRIC_OPS: OpsFabric = OpsFabric {
    size: size_of::<OpsFabric>(),
    domain: domain::open,
    passive_ep: Absent::ABSENT,
    eq_open: eq::open,
    wait_open: Absent::ABSENT,
    trywait,
    domain2,
};

pub(crate) unsafe extern "C" fn open(
    attr: *mut FabricAttr,
    place: *mut *mut FidFabric,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: attributes live for the call.
        let attr = unsafe { reference(attr)? };
        // SAFETY: a name that is not null is a C string.
        if attr.name.is_null() || unsafe { CStr::from_ptr(attr.name) } != NAME {
            return Err(Errno::NODATA);
        }
        let fid = FidFabric {
            fid: fid(class::FABRIC, context, &OPS),
            ops: &FABRIC_OPS,
            api_version: attr.api_version,
        };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { FabricHandle::hand_out(fid, OpenFabric::default(), place) };
        Ok(())
    })
}

unsafe extern "C" fn close(fabric: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made.
        let open = unsafe { FabricHandle::of(fabric.cast::<FidFabric>()) };
        if Arc::strong_count(&open.domains) > 1 {
            return Err(Errno::BUSY);
        }
        // SAFETY: as above; a program closes once.
        unsafe { FabricHandle::close(fabric.cast()) };
        Ok(())
    })
}

/// Whoever waits polls, so that nothing stands in the way of waiting.
unsafe extern "C" fn trywait(_fabric: *mut FidFabric, _fids: *mut *mut Fid, _count: c_int) -> c_int {
    0
}

unsafe extern "C" fn domain2(
    fabric: *mut FidFabric,
    info: *mut Info,
    place: *mut *mut FidDomain,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    match log::expect_flags("fi_domain2", flags, 0) {
        // SAFETY: the same arguments.
        Ok(()) => unsafe { domain::open(fabric, info, place, context) },
        Err(refused) => -refused.0,
    }
}
