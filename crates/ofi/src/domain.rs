//! The domain: this process in the pool.

use std::ffi::{c_int, c_void};

use crate::ffi::{
    Absent, Errno, Fid, FidDomain, FidEp, FidFabric, Info, Ops, OpsDomain, THREAD_SAFE, class, mr_mode,
};
use crate::handles::{DomainHandle, FabricHandle, OpenDomain, domain_of};
use crate::object::{expect_place, fid, reference};
use crate::state::{Domain, Manner};
use crate::{atomic, av, cntr, cq, ep, guard, log, mr, session};

static OPS: Ops = Ops { bind, ..Ops::closing(close) };

static DOMAIN_OPS: OpsDomain = OpsDomain {
    size: size_of::<OpsDomain>(),
    av_open: av::open,
    cq_open: cq::open,
    endpoint: ep::open,
    scalable_ep: Absent::ABSENT,
    cntr_open: cntr::open,
    poll_open: Absent::ABSENT,
    stx_ctx: Absent::ABSENT,
    srx_ctx: Absent::ABSENT,
    query_atomic: atomic::query,
    query_collective: Absent::ABSENT,
    endpoint2,
};

pub(crate) unsafe extern "C" fn open(
    fabric: *mut FidFabric,
    info: *mut Info,
    place: *mut *mut FidDomain,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: libfabric passes an open fabric, and an info that lives for the call.
        let (version, fabric, info) =
            unsafe { (reference(fabric)?.api_version, FabricHandle::of(fabric), reference(info)?) };
        // SAFETY: the parts of an info live as long as it does.
        let attr = unsafe { info.domain_attr.as_ref() };
        let (mr_mode, threading) = attr.map_or((0, THREAD_SAFE), |attr| (attr.mr_mode, attr.threading));
        let manner = Manner { version, basic: mr_mode == mr_mode::BASIC, threading };
        let session = session::session().map_err(|why| {
            session::complain(&why);
            Errno::NODATA
        })?;
        let open = OpenDomain::new(Domain::new(session, manner), fabric);
        let fid = FidDomain { fid: fid(class::DOMAIN, context, &OPS), ops: &DOMAIN_OPS, mr: &mr::MR_OPS };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { DomainHandle::hand_out(fid, open, place) };
        Ok(())
    })
}

unsafe extern "C" fn close(domain: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made.
        let open = unsafe { domain_of(domain.cast()) };
        if open.state().in_use() {
            return Err(Errno::BUSY);
        }
        open.end_beside();
        // SAFETY: as above; a program closes once.
        unsafe { DomainHandle::close(domain.cast()) };
        Ok(())
    })
}

/// An event queue would be told of registrations and insertions in the background: there are none.
unsafe extern "C" fn bind(_domain: *mut Fid, to: *mut Fid, _flags: u64) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes an open object, or the program passed none.
        match unsafe { reference(to)? }.class {
            class::EQ => Ok(()),
            _ => Err(Errno::INVAL),
        }
    })
}

unsafe extern "C" fn endpoint2(
    domain: *mut FidDomain,
    info: *mut Info,
    place: *mut *mut FidEp,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    match log::expect_flags("fi_endpoint2", flags, 0) {
        // SAFETY: the same arguments.
        Ok(()) => unsafe { ep::open(domain, info, place, context) },
        Err(refused) => -refused.0,
    }
}
