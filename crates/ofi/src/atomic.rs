//! Atomics on a peer's memory: the peer's progress does one after the other, so that each is atomic to all others.

use std::ffi::{c_int, c_void};

use polder_pool::endpoint::MessageBuffer;

use crate::arithmetic::{Datatype, Form, Op};
use crate::ffi::{AtomicAttr, Errno, FidDomain, FidEp, Ioc, MsgAtomic, OpsAtomic, flag};
use crate::guard;
use crate::io_buffer::IoBuffer;
use crate::log;
use crate::note::{Act, INLINE};
use crate::object::{calls, expect_place, reference};
use crate::port::Request;
use crate::rma::{OneSided, Reporting, ask};
use crate::transfer;

pub(crate) static OPS: OpsAtomic = OpsAtomic {
    size: size_of::<OpsAtomic>(),
    write,
    writev,
    writemsg,
    inject,
    readwrite,
    readwritev,
    readwritemsg,
    compwrite,
    compwritev,
    compwritemsg,
    writevalid,
    readwritevalid,
    compwritevalid,
};

/// An atomic that there is.
#[derive(Clone, Copy)]
struct Kind {
    form: Form,
    op: Op,
    datatype: Datatype,
}

impl Kind {
    fn of(form: Form, datatype: c_int, op: c_int) -> Result<Self, Errno> {
        let op = u8::try_from(op).ok().and_then(Op::of);
        let datatype = u8::try_from(datatype).ok().and_then(Datatype::of);
        match (op, datatype) {
            (Some(op), Some(datatype)) if datatype.takes(form, op) => Ok(Self { form, op, datatype }),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Elements that are done at once, at most.
    const fn most(self) -> usize {
        let operands = if matches!(self.form, Form::Compare) { 2 } else { 1 };
        INLINE / operands / self.datatype.bytes()
    }

    /// The elements of a list, gathered.
    ///
    /// # Safety
    /// The program lends what the list names.
    unsafe fn gather(self, ioc: *const Ioc, count: usize) -> Result<Vec<u8>, Errno> {
        // SAFETY: by this function's contract.
        let pieces = unsafe { self.pieces(ioc, count)? };
        Ok(pieces.iter().flat_map(|piece| piece.bytes()).copied().collect())
    }

    /// The elements of a list, each piece where it is.
    ///
    /// # Safety
    /// As [`IoBuffer::lent`], for what the list names.
    unsafe fn pieces(self, ioc: *const Ioc, count: usize) -> Result<Vec<IoBuffer>, Errno> {
        let span = |piece: &Ioc| {
            let bytes = piece.count.checked_mul(self.datatype.bytes()).ok_or(Errno::INVAL)?;
            // SAFETY: by this function's contract.
            Ok(unsafe { IoBuffer::lent(piece.addr, bytes) })
        };
        // SAFETY: by this function's contract.
        unsafe { transfer::pieces(ioc, count, span) }
    }

    /// What is asked for on the peer's elements at an address; `operands` are what is done, and then what is compared with.
    fn request(
        self,
        (address, key, elements): (u64, u64, usize),
        operands: [Vec<u8>; 2],
        back: Vec<IoBuffer>,
    ) -> Result<Request, Errno> {
        let Self { form, op, datatype } = self;
        let bytes = elements * datatype.bytes();
        let [mut out, compare] = operands;
        if op == Op::Read {
            out.clear();
        }
        let expected =
            [if op == Op::Read { 0 } else { bytes }, if form == Form::Compare { bytes } else { 0 }];
        let came: usize = back.iter().map(IoBuffer::len).sum();
        let back_bytes = if form == Form::Plain { 0 } else { bytes };
        if [out.len(), compare.len()] != expected || came != back_bytes {
            return Err(Errno::INVAL);
        }
        out.extend(compare);
        let act = Act::Atomic(form, op, datatype);
        Ok(Request { act, key, address, bytes: bytes as u64, data: None, out: IoBuffer::Held(out), back })
    }
}

/// An atomic as any of the calls says it.
struct AtomicCall {
    kind: Result<Kind, Errno>,
    to: u64,
    there: (u64, u64),
    out: (*const Ioc, usize),
    compare: (*const Ioc, usize),
    back: (*const Ioc, usize),
    context: *mut c_void,
    reporting: Reporting,
    /// Elements, where they are said apart from the lists.
    elements: Option<usize>,
}

const NONE: (*const Ioc, usize) = (std::ptr::null(), 0);

/// What all calls with arguments of their own say; there is nothing in the lists yet.
fn plainly(
    form: Form,
    (datatype, op): (c_int, c_int),
    to: u64,
    there: (u64, u64),
    context: *mut c_void,
) -> AtomicCall {
    let kind = Kind::of(form, datatype, op);
    AtomicCall {
        kind,
        to,
        there,
        out: NONE,
        compare: NONE,
        back: NONE,
        context,
        reporting: Reporting::Default,
        elements: None,
    }
}

/// # Safety
/// `ep` is open, and the program lends what the lists name.
unsafe fn start(ep: *mut FidEp, call: impl FnOnce() -> Result<AtomicCall, Errno>) -> isize {
    // SAFETY: by this function's contract.
    unsafe {
        ask(ep, || {
            let AtomicCall { kind, to, there, out, compare, back, context, reporting, elements } = call()?;
            let kind = kind?;
            let back = kind.pieces(back.0, back.1)?;
            let elements = match elements {
                Some(elements) => elements,
                None => {
                    let out = kind.pieces(out.0, out.1)?;
                    out.iter().map(IoBuffer::len).sum::<usize>() / kind.datatype.bytes()
                }
            };
            if elements > kind.most() {
                return Err(Errno::MSGSIZE);
            }
            let out = if kind.op == Op::Read { Vec::new() } else { kind.gather(out.0, out.1)? };
            let operands = [out, kind.gather(compare.0, compare.1)?];
            let request = kind.request((there.0, there.1, elements), operands, back)?;
            Ok(OneSided { to, request, context, reporting })
        })
    }
}

const fn run(at: *const c_void, count: usize) -> Ioc {
    Ioc { addr: at.cast_mut(), count }
}

/// # Safety
/// As [`say`]; the message lives for the call.
unsafe fn say_msg(
    ep: *mut FidEp,
    form: Form,
    msg: *const MsgAtomic,
    compare: (*const Ioc, usize),
    back: (*const Ioc, usize),
    flags: u64,
) -> isize {
    // SAFETY: by this function's contract.
    unsafe {
        start(ep, || {
            let msg = reference(msg)?;
            if msg.rma_iov_count != 1 {
                return Err(Errno::INVAL);
            }
            let there = reference(msg.rma_iov)?;
            log::expect_flags("an atomic operation", flags, !flag::REMOTE_CQ_DATA)?;
            Ok(AtomicCall {
                kind: Kind::of(form, msg.datatype, msg.op),
                to: msg.addr,
                there: (there.addr, there.key),
                out: (msg.msg_iov, msg.iov_count),
                compare,
                back,
                context: msg.context,
                reporting: Reporting::Flags(flags),
                elements: Some(there.len),
            })
        })
    }
}

calls! {
    fn write(
        ep, at: *const c_void, count: usize, _desc: *mut c_void, to: u64, address: u64, key: u64,
        datatype: c_int, op: c_int, context: *mut c_void
    ) {
        let out = run(at, count);
        start(ep, || {
            let plain = plainly(Form::Plain, (datatype, op), to, (address, key), context);
            Ok(AtomicCall { out: (&raw const out, 1), elements: Some(count), ..plain })
        })
    }

    fn writev(
        ep, iov: *const Ioc, _desc: *mut *mut c_void, count: usize, to: u64, address: u64, key: u64,
        datatype: c_int, op: c_int, context: *mut c_void
    ) {
        start(ep, || {
            let plain = plainly(Form::Plain, (datatype, op), to, (address, key), context);
            Ok(AtomicCall { out: (iov, count), ..plain })
        })
    }

    fn inject(
        ep, at: *const c_void, count: usize, to: u64, address: u64, key: u64, datatype: c_int, op: c_int
    ) {
        let out = run(at, count);
        start(ep, || {
            let plain = plainly(Form::Plain, (datatype, op), to, (address, key), std::ptr::null_mut());
            Ok(AtomicCall {
                out: (&raw const out, 1),
                reporting: Reporting::Injected,
                elements: Some(count),
                ..plain
            })
        })
    }

    fn readwrite(
        ep, at: *const c_void, count: usize, _desc: *mut c_void, result: *mut c_void,
        _result_desc: *mut c_void, to: u64, address: u64, key: u64, datatype: c_int, op: c_int,
        context: *mut c_void
    ) {
        let out = run(at, count);
        let came = run(result, count);
        start(ep, || {
            let plain = plainly(Form::Fetch, (datatype, op), to, (address, key), context);
            Ok(AtomicCall {
                out: (&raw const out, 1),
                back: (&raw const came, 1),
                elements: Some(count),
                ..plain
            })
        })
    }

    fn readwritev(
        ep, iov: *const Ioc, _desc: *mut *mut c_void, count: usize, result: *mut Ioc,
        _result_desc: *mut *mut c_void, results: usize, to: u64, address: u64, key: u64, datatype: c_int,
        op: c_int, context: *mut c_void
    ) {
        start(ep, || {
            let plain = plainly(Form::Fetch, (datatype, op), to, (address, key), context);
            Ok(AtomicCall { out: (iov, count), back: (result, results), ..plain })
        })
    }

    fn compwrite(
        ep, at: *const c_void, count: usize, _desc: *mut c_void, compare: *const c_void,
        _compare_desc: *mut c_void, result: *mut c_void, _result_desc: *mut c_void, to: u64, address: u64,
        key: u64, datatype: c_int, op: c_int, context: *mut c_void
    ) {
        let out = run(at, count);
        let compared = run(compare, count);
        let came = run(result, count);
        start(ep, || {
            let plain = plainly(Form::Compare, (datatype, op), to, (address, key), context);
            Ok(AtomicCall {
                out: (&raw const out, 1),
                compare: (&raw const compared, 1),
                back: (&raw const came, 1),
                elements: Some(count),
                ..plain
            })
        })
    }

    fn compwritev(
        ep, iov: *const Ioc, _desc: *mut *mut c_void, count: usize, compare: *const Ioc,
        _compare_desc: *mut *mut c_void, compares: usize, result: *mut Ioc, _result_desc: *mut *mut c_void,
        results: usize, to: u64, address: u64, key: u64, datatype: c_int, op: c_int, context: *mut c_void
    ) {
        start(ep, || {
            let plain = plainly(Form::Compare, (datatype, op), to, (address, key), context);
            Ok(AtomicCall {
                out: (iov, count),
                compare: (compare, compares),
                back: (result, results),
                ..plain
            })
        })
    }

    fn writemsg(ep, msg: *const MsgAtomic, flags: u64) {
        say_msg(ep, Form::Plain, msg, NONE, NONE, flags)
    }

    fn readwritemsg(
        ep, msg: *const MsgAtomic, result: *mut Ioc, _desc: *mut *mut c_void, results: usize, flags: u64
    ) {
        say_msg(ep, Form::Fetch, msg, NONE, (result, results), flags)
    }

    fn compwritemsg(
        ep, msg: *const MsgAtomic, compare: *const Ioc, _compare_desc: *mut *mut c_void, compares: usize,
        result: *mut Ioc, _desc: *mut *mut c_void, results: usize, flags: u64
    ) {
        say_msg(ep, Form::Compare, msg, (compare, compares), (result, results), flags)
    }
}

/// # Safety
/// `count` is null or the program's to be written.
unsafe fn valid(form: Form, datatype: c_int, op: c_int, count: *mut usize) -> c_int {
    guard::status(|| {
        expect_place(count)?;
        let most = Kind::of(form, datatype, op)?.most();
        // SAFETY: not null, so the program's to be written.
        unsafe { count.write(most) };
        Ok(())
    })
}

unsafe extern "C" fn writevalid(_ep: *mut FidEp, datatype: c_int, op: c_int, count: *mut usize) -> c_int {
    // SAFETY: the same arguments.
    unsafe { valid(Form::Plain, datatype, op, count) }
}

unsafe extern "C" fn readwritevalid(_ep: *mut FidEp, datatype: c_int, op: c_int, count: *mut usize) -> c_int {
    // SAFETY: the same arguments.
    unsafe { valid(Form::Fetch, datatype, op, count) }
}

unsafe extern "C" fn compwritevalid(_ep: *mut FidEp, datatype: c_int, op: c_int, count: *mut usize) -> c_int {
    // SAFETY: the same arguments.
    unsafe { valid(Form::Compare, datatype, op, count) }
}

pub(crate) unsafe extern "C" fn query(
    _domain: *mut FidDomain,
    datatype: c_int,
    op: c_int,
    attr: *mut AtomicAttr,
    flags: u64,
) -> c_int {
    guard::status(|| {
        expect_place(attr)?;
        let form = match flags {
            0 => Form::Plain,
            flag::FETCH_ATOMIC => Form::Fetch,
            flag::COMPARE_ATOMIC => Form::Compare,
            _ => return Err(log::refuse("fi_query_atomic", flags)),
        };
        let kind = Kind::of(form, datatype, op)?;
        // SAFETY: not null, so the program's to be written.
        unsafe { attr.write(AtomicAttr { count: kind.most(), size: kind.datatype.bytes() }) };
        Ok(())
    })
}
