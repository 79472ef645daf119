//! Registered memory: nobody reaches into a program's memory from outside, so that only the keys are kept.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::domain;
use crate::ffi::{ENABLE, Errno, Fid, FidMr, MrAttr, Ops, OpsMr, class, iovec};
use crate::guard;
use crate::object::{Object, fid, given, wanted};
use crate::state::Domain;

struct Open {
    domain: Arc<Domain>,
    key: u64,
}

type Mr = Object<FidMr, Open>;

static OPS: Ops = Ops { bind, control, ..Ops::closing(close) };

pub(crate) static MR_OPS: OpsMr = OpsMr { size: size_of::<OpsMr>(), reg, regv, regattr };

unsafe extern "C" fn reg(
    domain: *mut Fid,
    _at: *const c_void,
    _bytes: usize,
    _access: u64,
    _offset: u64,
    key: u64,
    flags: u64,
    place: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the same arguments.
    unsafe { register(domain, key, flags, place, context) }
}

unsafe extern "C" fn regv(
    domain: *mut Fid,
    _iov: *const iovec,
    _count: usize,
    _access: u64,
    _offset: u64,
    key: u64,
    flags: u64,
    place: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the same arguments.
    unsafe { register(domain, key, flags, place, context) }
}

unsafe extern "C" fn regattr(
    domain: *mut Fid,
    attr: *const MrAttr,
    flags: u64,
    place: *mut *mut FidMr,
) -> c_int {
    // SAFETY: attributes live for the call.
    match unsafe { given(attr) } {
        // SAFETY: the same arguments.
        Ok(attr) => unsafe { register(domain, attr.requested_key, flags, place, attr.context) },
        Err(Errno(errno)) => -errno,
    }
}

/// Takes the key that the program chose, or makes one where that is the provider's to do.
///
/// # Safety
/// `domain` is open, and `place` null or the caller's to be written.
unsafe fn register(
    domain: *mut Fid,
    key: u64,
    flags: u64,
    place: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        wanted(place)?;
        if flags != 0 {
            return Err(Errno::BADFLAGS);
        }
        // SAFETY: by this function's contract.
        let domain = unsafe { domain::of(domain.cast()) };
        let wanted = (!domain.manner.basic).then_some(key);
        let key = domain.state().regions.insert(wanted).ok_or(Errno::NOKEY)?;
        let fid = FidMr { fid: fid(class::MR, context, &OPS), mem_desc: std::ptr::null_mut(), key };
        // SAFETY: by this function's contract.
        unsafe { Mr::hand_out(fid, Open { domain: Arc::clone(domain), key }, place) };
        Ok(())
    })
}

unsafe extern "C" fn close(mr: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `register` made.
        let Open { domain, key } = unsafe { Mr::of(mr.cast::<FidMr>()) };
        domain.state().regions.remove(*key);
        // SAFETY: as above; a program closes once.
        unsafe { Mr::close(mr.cast()) };
        Ok(())
    })
}

/// Memory belongs to the whole domain: whatever it is bound to reaches it already.
unsafe extern "C" fn bind(_mr: *mut Fid, to: *mut Fid, _flags: u64) -> c_int {
    guard::status(|| wanted(to))
}

unsafe extern "C" fn control(_mr: *mut Fid, command: c_int, _argument: *mut c_void) -> c_int {
    guard::status(|| if command == ENABLE { Ok(()) } else { Err(Errno::NOSYS) })
}
