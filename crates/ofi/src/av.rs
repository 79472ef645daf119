//! Address vectors: an address of a program's is a place in one, for maps and for tables alike.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use polder_pool::endpoint::Address;

use crate::ffi::{
    self, ADDR_NOTAVAIL, AV_MAP, AV_TABLE, AV_UNSPEC, Absent, AvAttr, Errno, Fid, FidAv, FidDomain, Ops,
    OpsAv, class,
};
use crate::guard;
use crate::handles::domain_of;
use crate::log;
use crate::object::{Object, expect_place, fid, reference};
use crate::state::Domain;
use crate::vector::Vector;

/// How long an address is, encoded.
const ADDRESS_BYTES: usize = 16;

/// An open address vector.
pub(crate) struct Open {
    pub(crate) domain: Arc<Domain>,
    pub(crate) at: usize,
}

pub(crate) type Av = Object<FidAv, Open>;

static OPS: Ops = Ops::closing(close);

static AV_OPS: OpsAv = OpsAv {
    size: size_of::<OpsAv>(),
    insert,
    insertsvc: Absent::ABSENT,
    insertsym: Absent::ABSENT,
    remove,
    lookup,
    straddr,
    av_set: Absent::ABSENT,
};

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut AvAttr,
    place: *mut *mut FidAv,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: libfabric passes an open domain, and attributes that live for the call.
        let (domain, attr) = unsafe { (domain_of(domain), reference(attr)?) };
        if !matches!(attr.kind, AV_UNSPEC | AV_MAP | AV_TABLE) {
            return Err(Errno::INVAL);
        }
        // A named vector is memory that processes share, with addresses that are pointers; and none is filled in the
        // background.
        if !attr.name.is_null() || attr.flags != 0 {
            return Err(Errno::NOSYS);
        }
        let at = domain.state().ledger.vectors.insert(Vector::default());
        let fid = FidAv { fid: fid(class::AV, context, &OPS), ops: &AV_OPS };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { Av::hand_out(fid, Open { domain: Arc::clone(domain), at }, place) };
        Ok(())
    })
}

/// What belongs to an open vector.
///
/// # Safety
/// `av` is one that [`open`] made.
pub(crate) unsafe fn of<'a>(av: *const FidAv) -> &'a Open {
    // SAFETY: by this function's contract.
    unsafe { Av::of(av) }
}

unsafe extern "C" fn close(av: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made.
        let Open { domain, at } = unsafe { of(av.cast()) };
        let mut state = domain.state();
        if state.ledger.vectors.get(*at).is_some_and(|vector| vector.bound > 0) {
            return Err(Errno::BUSY);
        }
        state.ledger.vectors.remove(*at);
        drop(state);
        // SAFETY: as above; a program closes once.
        unsafe { Av::close(av.cast()) };
        Ok(())
    })
}

unsafe extern "C" fn insert(
    av: *mut FidAv,
    addresses: *const c_void,
    count: usize,
    places: *mut u64,
    flags: u64,
    _context: *mut c_void,
) -> c_int {
    guard::count(|| {
        log::expect_flags("fi_av_insert", flags, ffi::flag::MORE)?;
        if addresses.is_null() && count > 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: libfabric passes an open vector.
        let Open { domain, at } = unsafe { of(av) };
        let mut state = domain.state();
        let vector = state.ledger.vectors.get_mut(*at).ok_or(Errno::INVAL)?;
        let mut inserted = 0;
        for index in 0..count {
            let mut bytes = [0; ADDRESS_BYTES];
            // SAFETY: the program passes `count` addresses of the length that fi_getname told.
            unsafe {
                let from = addresses.cast::<u8>().add(index * ADDRESS_BYTES);
                from.copy_to_nonoverlapping(bytes.as_mut_ptr(), ADDRESS_BYTES);
            }
            let address = Address::decode(bytes);
            let place = if address.is_some() { vector.places.len() as u64 } else { ADDR_NOTAVAIL };
            if address.is_some() {
                vector.places.push(address);
                inserted += 1;
            }
            if !places.is_null() {
                // SAFETY: not null, so room for `count` answers.
                unsafe { places.add(index).write(place) };
            }
        }
        Ok(inserted)
    })
}

unsafe extern "C" fn remove(av: *mut FidAv, places: *mut u64, count: usize, _flags: u64) -> c_int {
    guard::status(|| {
        if places.is_null() && count > 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: libfabric passes an open vector.
        let Open { domain, at } = unsafe { of(av) };
        let mut state = domain.state();
        let vector = state.ledger.vectors.get_mut(*at).ok_or(Errno::INVAL)?;
        for index in 0..count {
            // SAFETY: the program passes `count` places.
            let place = unsafe { places.add(index).read() };
            let place = usize::try_from(place).ok().and_then(|place| vector.places.get_mut(place));
            *place.ok_or(Errno::INVAL)? = None;
        }
        Ok(())
    })
}

unsafe extern "C" fn lookup(av: *mut FidAv, place: u64, address: *mut c_void, bytes: *mut usize) -> c_int {
    guard::status(|| {
        expect_place(bytes)?;
        // SAFETY: libfabric passes an open vector.
        let Open { domain, at } = unsafe { of(av) };
        let state = domain.state();
        let found = state.ledger.vectors.get(*at).and_then(|vector| vector.get(place));
        let found = found.ok_or(Errno::INVAL)?.encode();
        // SAFETY: the program says in `bytes` how much `address` holds.
        unsafe { give(&found, address, bytes) };
        Ok(())
    })
}

/// Copies as much of an address as there is room for, and says how long it is.
///
/// # Safety
/// `bytes` holds how many bytes may be written at `to`, and may be written.
pub(crate) unsafe fn give(address: &[u8], to: *mut c_void, bytes: *mut usize) {
    // SAFETY: by this function's contract.
    unsafe {
        let room = if to.is_null() { 0 } else { bytes.read() };
        to.cast::<u8>().copy_from(address.as_ptr(), room.min(address.len()));
        bytes.write(address.len());
    }
}

unsafe extern "C" fn straddr(
    _av: *mut FidAv,
    address: *const c_void,
    text: *mut c_char,
    bytes: *mut usize,
) -> *const c_char {
    guard::object(|| {
        if address.is_null() || bytes.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: the program passes an address, and in `bytes` how much `text` holds.
        unsafe {
            let words = match Address::decode(address.cast::<[u8; ADDRESS_BYTES]>().read()) {
                Some(Address { host, port, generation, .. }) => {
                    format!("polder://{host}/{port}/{generation}")
                }
                None => "polder://none".to_owned(),
            };
            let room = bytes.read();
            if !text.is_null() && room > 0 {
                // Cut off, it still ends.
                let cut = words.len().min(room - 1);
                text.cast::<u8>().copy_from_nonoverlapping(words.as_ptr(), cut);
                text.add(cut).write(0);
            }
            bytes.write(words.len() + 1);
        }
        text
    })
}
