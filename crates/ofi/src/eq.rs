//! Event queues: nothing here happens in the background, so that a program finds there what it wrote itself.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use polder_border::Uncancelled;

use crate::ffi::{
    EqAttr, Errno, Fid, FidEq, FidFabric, Ops, OpsEq, WAIT_NONE, WAIT_UNSPEC, WAIT_YIELD, class, flag,
};
use crate::guard;
use crate::object::{Object, expect_place, fid, reference};

#[derive(Default)]
struct Open {
    events: Mutex<VecDeque<(u32, Vec<u8>)>>,
}

impl Open {
    fn events(&self) -> MutexGuard<'_, VecDeque<(u32, Vec<u8>)>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Eq = Object<FidEq, Open>;

static OPS: Ops = Ops::closing(close);

static EQ_OPS: OpsEq = OpsEq { size: size_of::<OpsEq>(), read, readerr, write, sread, strerror };

pub(crate) unsafe extern "C" fn open(
    _fabric: *mut FidFabric,
    attr: *mut EqAttr,
    place: *mut *mut FidEq,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: attributes live for the call.
        let attr = unsafe { reference(attr)? };
        if !matches!(attr.wait_obj, WAIT_NONE | WAIT_UNSPEC | WAIT_YIELD) {
            return Err(Errno::NOSYS);
        }
        let fid = FidEq { fid: fid(class::EQ, context, &OPS), ops: &EQ_OPS };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { Eq::hand_out(fid, Open::default(), place) };
        Ok(())
    })
}

unsafe extern "C" fn close(eq: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made, once.
        unsafe { Eq::close(eq.cast()) };
        Ok(())
    })
}

unsafe extern "C" fn read(
    eq: *mut FidEq,
    event: *mut u32,
    to: *mut c_void,
    room: usize,
    flags: u64,
) -> isize {
    guard::amount(|| {
        expect_place(event)?;
        // SAFETY: libfabric passes an open queue.
        let mut events = unsafe { Eq::of(eq) }.events();
        let (kind, bytes) = events.front().ok_or(Errno::AGAIN)?;
        if to.is_null() || room < bytes.len() {
            return Err(Errno::TOOSMALL);
        }
        let read = bytes.len();
        // SAFETY: the program says how much room there is, and `event` is not null.
        unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), read);
            event.write(*kind);
        }
        if flags & flag::PEEK == 0 {
            events.pop_front();
        }
        Ok(read)
    })
}

unsafe extern "C" fn sread(
    eq: *mut FidEq,
    event: *mut u32,
    to: *mut c_void,
    room: usize,
    timeout_ms: c_int,
    flags: u64,
) -> isize {
    let _uncancelled = Uncancelled::begin();
    let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let start = Instant::now();
    loop {
        // SAFETY: the same arguments.
        let count = unsafe { read(eq, event, to, room, flags) };
        let late = limit.is_some_and(|limit| start.elapsed() >= limit);
        if count != -(libc::EAGAIN as isize) || late {
            return count;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Between two looks.
const PAUSE: Duration = Duration::from_micros(50);

unsafe extern "C" fn readerr(_eq: *mut FidEq, _to: *mut c_void, _flags: u64) -> isize {
    -(libc::EAGAIN as isize)
}

unsafe extern "C" fn write(
    eq: *mut FidEq,
    event: u32,
    from: *const c_void,
    bytes: usize,
    _flags: u64,
) -> isize {
    guard::amount(|| {
        if from.is_null() && bytes > 0 {
            return Err(Errno::INVAL);
        }
        let mut copy = vec![0; bytes];
        // SAFETY: the program passes so many bytes, and the copy has room for them.
        unsafe { copy.as_mut_ptr().copy_from(from.cast(), bytes) };
        // SAFETY: libfabric passes an open queue.
        unsafe { Eq::of(eq) }.events().push_back((event, copy));
        Ok(bytes)
    })
}

unsafe extern "C" fn strerror(
    _eq: *mut FidEq,
    _prov_errno: c_int,
    _err_data: *const c_void,
    _to: *mut c_char,
    _room: usize,
) -> *const c_char {
    c"no error".as_ptr()
}
