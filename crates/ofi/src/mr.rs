//! Memory that peers may reach into: what of it is registered with a domain is in [`region`](crate::region).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::cntr;
use crate::ffi::{ENABLE, Errno, Fid, FidMr, MrAttr, Ops, OpsMr, class, flag, iovec};
use crate::guard;
use crate::handles::domain_of;
use crate::ledger::Ledger;
use crate::log;
use crate::object::{Object, expect_place, fid, reference};
use crate::region::{self, Region};
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
    at: *const c_void,
    bytes: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    place: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    let iov = iovec { iov_base: at.cast_mut(), iov_len: bytes };
    // SAFETY: the same arguments.
    unsafe { regv(domain, &raw const iov, 1, access, offset, key, flags, place, context) }
}

unsafe extern "C" fn regv(
    domain: *mut Fid,
    iov: *const iovec,
    count: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    place: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    let attr = MrAttr { mr_iov: iov, iov_count: count, access, offset, requested_key: key, context };
    // SAFETY: the same arguments.
    unsafe { regattr(domain, &raw const attr, flags, place) }
}

/// Takes the key that the program chose, or makes one where that is the provider's to do.
unsafe extern "C" fn regattr(
    domain: *mut Fid,
    attr: *const MrAttr,
    flags: u64,
    place: *mut *mut FidMr,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        log::expect_flags("fi_mr_reg", flags, flag::RMA_EVENT)?;
        // SAFETY: libfabric passes an open domain, and attributes that live for the call.
        let (domain, attr) = unsafe { (domain_of(domain.cast()), reference(attr)?) };
        if attr.iov_count != 1 {
            return Err(Errno::INVAL);
        }
        let MrAttr { access, requested_key, context, .. } = *attr;
        // SAFETY: the list has one piece.
        let iov = unsafe { reference(attr.mr_iov)? };
        let (at, bytes) = (iov.iov_base.expose_provenance(), iov.iov_len);
        let (wanted, first) = if domain.manner.basic { (None, at as u64) } else { (Some(requested_key), 0) };
        let region = Region { at, bytes, first, access, counters: Vec::new() };
        let key = domain.state().ledger.regions.insert(wanted, region).ok_or(Errno::NOKEY)?;
        if access & (region::READ | region::WRITE) != 0 {
            domain.serve_beside();
        }
        let fid = FidMr { fid: fid(class::MR, context, &OPS), mem_desc: std::ptr::null_mut(), key };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { Mr::hand_out(fid, Open { domain: Arc::clone(domain), key }, place) };
        Ok(())
    })
}

/// Memory is the program's again once no peer's operation uses it.
unsafe extern "C" fn close(mr: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `regattr` made.
        let Open { domain, key } = unsafe { Mr::of(mr.cast::<FidMr>()) };
        if domain.state().holds(*key) {
            let over = domain.wait(LONGEST_MS, |state| Ok((!state.holds(*key)).then_some(())))?;
            over.ok_or(Errno::BUSY)?;
        }
        let ledger = &mut domain.state().ledger;
        for (counter, _) in ledger.regions.remove(*key).into_iter().flat_map(|region| region.counters) {
            if let Some(counter) = ledger.counters.get_mut(counter) {
                counter.bound -= 1;
            }
        }
        // SAFETY: as above; a program closes once.
        unsafe { Mr::close(mr.cast()) };
        Ok(())
    })
}

/// How long an operation of a peer may keep memory that is to be closed.
const LONGEST_MS: c_int = 10_000;

/// Counters count what peers do. To whatever else it is bound, memory belongs to the whole domain, and reaches it already.
unsafe extern "C" fn bind(mr: *mut Fid, to: *mut Fid, flags: u64) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes open objects.
        let (Open { domain, key }, class) = unsafe { (Mr::of(mr.cast::<FidMr>()), reference(to)?.class) };
        if class == class::CNTR {
            // SAFETY: its class says what it is.
            let at = unsafe { cntr::of(to.cast()) }.at;
            let Ledger { regions, counters, .. } = &mut domain.state().ledger;
            counters.get_mut(at).ok_or(Errno::INVAL)?.bound += 1;
            regions.get_mut(*key).ok_or(Errno::INVAL)?.counters.push((at, flags));
        }
        Ok(())
    })
}

unsafe extern "C" fn control(_mr: *mut Fid, command: c_int, _argument: *mut c_void) -> c_int {
    guard::status(|| if command == ENABLE { Ok(()) } else { Err(Errno::NOSYS) })
}
