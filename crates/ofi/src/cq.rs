//! Completion queues.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;

use crate::ffi::{
    self, CQ_FORMAT_CONTEXT, CQ_FORMAT_DATA, CQ_FORMAT_MSG, CQ_FORMAT_TAGGED, CQ_FORMAT_UNSPEC, CqAttr,
    CqErrEntry, Errno, Fid, FidCq, FidDomain, Ops, OpsCq, WAIT_NONE, WAIT_UNSPEC, WAIT_YIELD, class,
};
use crate::guard;
use crate::handles::domain_of;
use crate::object::{Object, expect_place, fid, reference};
use crate::queue::{Failure, Queue, TAGGED_BYTES};
use crate::state::{Domain, State};

/// An open queue.
pub(crate) struct Open {
    pub(crate) domain: Arc<Domain>,
    pub(crate) at: usize,
}

impl Open {
    fn queue<'a>(&self, state: &'a mut State) -> Result<&'a mut Queue, Errno> {
        state.ledger.queues.get_mut(self.at).ok_or(Errno::INVAL)
    }
}

pub(crate) type Cq = Object<FidCq, Open>;

static OPS: Ops = Ops::closing(close);

static CQ_OPS: OpsCq =
    OpsCq { size: size_of::<OpsCq>(), read, readfrom, readerr, sread, sreadfrom, signal, strerror };

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut CqAttr,
    place: *mut *mut FidCq,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: libfabric passes an open domain, and attributes that live for the call.
        let (domain, attr) = unsafe { (domain_of(domain), reference(attr)?) };
        let entry_bytes = match attr.format {
            CQ_FORMAT_CONTEXT | CQ_FORMAT_UNSPEC => 8,
            CQ_FORMAT_MSG => 24,
            CQ_FORMAT_DATA => 40,
            CQ_FORMAT_TAGGED => TAGGED_BYTES,
            _ => return Err(Errno::NOSYS),
        };
        // There is nothing to poll on: progress is made by whoever waits.
        if !matches!(attr.wait_obj, WAIT_NONE | WAIT_UNSPEC | WAIT_YIELD) {
            return Err(Errno::NOSYS);
        }
        let at = domain.state().ledger.queues.insert(Queue::new(entry_bytes));
        let fid = FidCq { fid: fid(class::CQ, context, &OPS), ops: &CQ_OPS };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { Cq::hand_out(fid, Open { domain: Arc::clone(domain), at }, place) };
        Ok(())
    })
}

/// What belongs to an open queue.
///
/// # Safety
/// `cq` is one that [`open`] made.
pub(crate) unsafe fn of<'a>(cq: *const FidCq) -> &'a Open {
    // SAFETY: by this function's contract.
    unsafe { Cq::of(cq) }
}

unsafe extern "C" fn close(cq: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made.
        let queue = unsafe { of(cq.cast()) };
        let mut state = queue.domain.state();
        if queue.queue(&mut state)?.bound > 0 {
            return Err(Errno::BUSY);
        }
        state.ledger.queues.remove(queue.at);
        drop(state);
        // SAFETY: as above; a program closes once.
        unsafe { Cq::close(cq.cast()) };
        Ok(())
    })
}

unsafe extern "C" fn read(cq: *mut FidCq, to: *mut c_void, count: usize) -> isize {
    // SAFETY: the same call, without addresses.
    unsafe { readfrom(cq, to, count, std::ptr::null_mut()) }
}

unsafe extern "C" fn readfrom(cq: *mut FidCq, to: *mut c_void, count: usize, from: *mut u64) -> isize {
    guard::amount(|| {
        // SAFETY: libfabric passes an open queue.
        let open = unsafe { of(cq) };
        let count = if to.is_null() { 0 } else { count };
        open.domain.poll(|state| {
            // SAFETY: the program has room for `count` entries, and for addresses if it asks for them.
            let read = unsafe { open.queue(state)?.take(to, count, from) };
            Ok((read, read != Err(Errno::AGAIN)))
        })?
    })
}

unsafe extern "C" fn sread(
    cq: *mut FidCq,
    to: *mut c_void,
    count: usize,
    cond: *const c_void,
    timeout_ms: c_int,
) -> isize {
    // SAFETY: the same call, without addresses.
    unsafe { sreadfrom(cq, to, count, std::ptr::null_mut(), cond, timeout_ms) }
}

unsafe extern "C" fn sreadfrom(
    cq: *mut FidCq,
    to: *mut c_void,
    count: usize,
    from: *mut u64,
    _cond: *const c_void,
    timeout_ms: c_int,
) -> isize {
    guard::waited(|| {
        // SAFETY: libfabric passes an open queue.
        let open = unsafe { of(cq) };
        let count = if to.is_null() { 0 } else { count };
        let read = open.domain.wait(timeout_ms, |state| {
            let queue = open.queue(state)?;
            // SAFETY: as for a read that does not wait.
            match unsafe { queue.take(to, count, from) } {
                Err(Errno::AGAIN) if !std::mem::take(&mut queue.signalled) => Ok(None),
                read => read.map(Some),
            }
        });
        read?.ok_or(Errno::AGAIN)
    })
}

unsafe extern "C" fn readerr(cq: *mut FidCq, to: *mut CqErrEntry, _flags: u64) -> isize {
    guard::amount(|| {
        expect_place(to)?;
        // SAFETY: libfabric passes an open queue.
        let open = unsafe { of(cq) };
        let mut state = open.domain.state();
        let queue = open.queue(&mut state)?;
        let Some(Failure { entry, errno: Errno(err), over, text }) = queue.take_failure() else {
            return Err(Errno::AGAIN);
        };
        queue.failure_text = CString::new(text).unwrap_or_default();
        // SAFETY: not null, and the program's to be written; its own buffer for more stays as it is.
        unsafe {
            (*to).entry = entry;
            (*to).olen = usize::try_from(over).unwrap_or(usize::MAX);
            (*to).err = err;
            (*to).prov_errno = -err;
            // Before 1.5 an entry ended there, and it is the program's memory.
            if open.domain.manner.version >= ffi::version(1, 5) {
                (*to).err_data_size = 0;
            }
        }
        Ok(1)
    })
}

unsafe extern "C" fn signal(cq: *mut FidCq) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes an open queue.
        let open = unsafe { of(cq) };
        open.queue(&mut open.domain.state())?.signalled = true;
        Ok(())
    })
}

unsafe extern "C" fn strerror(
    cq: *mut FidCq,
    _prov_errno: c_int,
    _err_data: *const c_void,
    to: *mut c_char,
    room: usize,
) -> *const c_char {
    guard::object(|| {
        // SAFETY: libfabric passes an open queue.
        let open = unsafe { of(cq) };
        let mut state = open.domain.state();
        let Ok(queue) = open.queue(&mut state) else { return std::ptr::null_mut() };
        if to.is_null() || room == 0 {
            return queue.failure_text.as_ptr().cast_mut();
        }
        let text = queue.failure_text.as_bytes();
        let bytes = text.len().min(room - 1);
        // SAFETY: the program says how much room there is.
        unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), bytes);
            to.add(bytes).write(0);
        }
        to
    })
}
