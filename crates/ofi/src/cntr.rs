//! Counters of operations that have completed.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::counter::Counter;
use crate::ffi::{
    CNTR_EVENTS_COMP, CntrAttr, Errno, Fid, FidCntr, FidDomain, Ops, OpsCntr, WAIT_NONE, WAIT_UNSPEC,
    WAIT_YIELD, class,
};
use crate::guard;
use crate::handles::domain_of;
use crate::object::{Object, expect_place, fid, reference};
use crate::state::{Domain, State};

/// An open counter.
pub(crate) struct Open {
    pub(crate) domain: Arc<Domain>,
    pub(crate) at: usize,
}

impl Open {
    fn counter<'a>(&self, state: &'a mut State) -> Result<&'a mut Counter, Errno> {
        state.ledger.counters.get_mut(self.at).ok_or(Errno::INVAL)
    }
}

pub(crate) type Cntr = Object<FidCntr, Open>;

static OPS: Ops = Ops::closing(close);

static CNTR_OPS: OpsCntr =
    OpsCntr { size: size_of::<OpsCntr>(), read, readerr, add, set, wait, adderr, seterr };

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    attr: *mut CntrAttr,
    place: *mut *mut FidCntr,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: libfabric passes an open domain, and attributes that live for the call.
        let (domain, attr) = unsafe { (domain_of(domain), reference(attr)?) };
        let waits = matches!(attr.wait_obj, WAIT_NONE | WAIT_UNSPEC | WAIT_YIELD);
        if attr.events != CNTR_EVENTS_COMP || !waits || attr.flags != 0 {
            return Err(Errno::NOSYS);
        }
        let at = domain.state().ledger.counters.insert(Counter::default());
        let fid = FidCntr { fid: fid(class::CNTR, context, &OPS), ops: &CNTR_OPS };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { Cntr::hand_out(fid, Open { domain: Arc::clone(domain), at }, place) };
        Ok(())
    })
}

/// What belongs to an open counter.
///
/// # Safety
/// `cntr` is one that [`open`] made.
pub(crate) unsafe fn of<'a>(cntr: *const FidCntr) -> &'a Open {
    // SAFETY: by this function's contract.
    unsafe { Cntr::of(cntr) }
}

unsafe extern "C" fn close(cntr: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made.
        let open = unsafe { of(cntr.cast()) };
        let mut state = open.domain.state();
        if open.counter(&mut state)?.bound > 0 {
            return Err(Errno::BUSY);
        }
        state.ledger.counters.remove(open.at);
        drop(state);
        // SAFETY: as above; a program closes once.
        unsafe { Cntr::close(cntr.cast()) };
        Ok(())
    })
}

/// Reads a counter after some progress; a program learns of what went wrong there from its queue.
unsafe fn look(cntr: *mut FidCntr, of_it: impl Fn(&Counter) -> u64) -> u64 {
    let mut value = 0;
    guard::status(|| {
        // SAFETY: libfabric passes an open counter.
        let open = unsafe { of(cntr) };
        let polled = open.domain.poll(|state| {
            let counter = open.counter(state)?;
            value = of_it(counter);
            Ok(((), counter.is_news()))
        });
        if polled.is_err() {
            value = of_it(open.counter(&mut open.domain.state())?);
        }
        polled
    });
    value
}

unsafe extern "C" fn read(cntr: *mut FidCntr) -> u64 {
    // SAFETY: the same counter.
    unsafe { look(cntr, |counter| counter.well) }
}

unsafe extern "C" fn readerr(cntr: *mut FidCntr) -> u64 {
    // SAFETY: the same counter.
    unsafe { look(cntr, |counter| counter.badly) }
}

unsafe fn change(cntr: *mut FidCntr, how: impl FnOnce(&mut Counter)) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes an open counter.
        let open = unsafe { of(cntr) };
        how(open.counter(&mut open.domain.state())?);
        Ok(())
    })
}

unsafe extern "C" fn add(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: the same counter.
    unsafe { change(cntr, |counter| counter.well = counter.well.wrapping_add(value)) }
}

unsafe extern "C" fn set(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: the same counter.
    unsafe { change(cntr, |counter| counter.well = value) }
}

unsafe extern "C" fn adderr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: the same counter.
    unsafe { change(cntr, |counter| counter.badly = counter.badly.wrapping_add(value)) }
}

unsafe extern "C" fn seterr(cntr: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: the same counter.
    unsafe { change(cntr, |counter| counter.badly = value) }
}

unsafe extern "C" fn wait(cntr: *mut FidCntr, threshold: u64, timeout_ms: c_int) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes an open counter.
        let open = unsafe { of(cntr) };
        let badly = open.counter(&mut open.domain.state())?.badly;
        let waited = open.domain.wait(timeout_ms, |state| {
            let counter = open.counter(state)?;
            match counter.badly == badly {
                true => Ok((counter.well >= threshold).then_some(())),
                false => Err(Errno::AVAIL),
            }
        });
        waited?.ok_or(Errno::TIMEDOUT)
    })
}
