//! Reads and writes of a peer's memory: libfabric's many ways to ask for them.

use std::ffi::c_void;

use polder_pool::endpoint::MessageBuffer;

use crate::arithmetic::Form;
use crate::ffi::{Errno, FidEp, MsgRma, OpsRma, flag, iovec};
use crate::guard;
use crate::handles::{OpenEndpoint, endpoint_of};
use crate::io_buffer::IoBuffer;
use crate::limits::{INJECT_BYTES, MESSAGE_BYTES, SEND_FLAGS};
use crate::log;
use crate::note::Act;
use crate::object::{calls, reference};
use crate::operation::{Context, Operation, Role};
use crate::port::Request;
use crate::transfer::{self, data_of, gathered};

pub(crate) static OPS: OpsRma = OpsRma {
    size: size_of::<OpsRma>(),
    read,
    readv,
    readmsg,
    write,
    writev,
    writemsg,
    inject,
    writedata,
    injectdata,
};

/// How the program learns that an operation is complete.
pub(crate) enum Reporting {
    /// As the endpoint says.
    Default,
    /// As the call says.
    Flags(u64),
    /// Not at all, and its bytes are the program's again at once.
    Injected,
}

/// A request and where it goes.
pub(crate) struct OneSided {
    pub(crate) to: u64,
    pub(crate) request: Request,
    pub(crate) context: *mut c_void,
    pub(crate) reporting: Reporting,
}

/// # Safety
/// `ep` is open.
pub(crate) unsafe fn ask(ep: *mut FidEp, asked: impl FnOnce() -> Result<OneSided, Errno>) -> isize {
    guard::amount(|| {
        // SAFETY: by this function's contract.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep) };
        let OneSided { to, mut request, context, reporting } = asked()?;
        if request.bytes > MESSAGE_BYTES as u64 {
            return Err(Errno::MSGSIZE);
        }
        let mut state = domain.state();
        let (port, ledger) = state.enabled_port(*at)?;
        let (flags, injected) = match reporting {
            Reporting::Default => (port.transmit.flags, port.transmit.flags & flag::INJECT != 0),
            Reporting::Flags(flags) => (flags, flags & flag::INJECT != 0),
            Reporting::Injected => (0, true),
        };
        log::expect_flags("a one-sided operation", flags, SEND_FLAGS)?;
        if injected && request.act != Act::Read {
            if request.out.len() > INJECT_BYTES {
                return Err(Errno::MSGSIZE);
            }
            request.out = IoBuffer::Held(request.out.bytes().to_vec());
        }
        let operation = Operation {
            context: Context(context),
            flags: request.act.flags(),
            report: !matches!(reporting, Reporting::Injected) && port.transmit.of(flags),
            role: Role::Send,
        };
        port.ask(ledger, to, request, operation).map(|()| 0)
    })
}

impl Act {
    /// What its completion says that it was.
    const fn flags(self) -> u64 {
        match self {
            Self::Write => flag::RMA | flag::WRITE,
            Self::Read => flag::RMA | flag::READ,
            Self::Atomic(Form::Plain, ..) => flag::ATOMIC | flag::WRITE,
            Self::Atomic(..) => flag::ATOMIC | flag::READ,
        }
    }
}

fn writing(out: IoBuffer, (address, key): (u64, u64), data: Option<u32>) -> Request {
    Request { act: Act::Write, key, address, bytes: out.len() as u64, data, out, back: Vec::new() }
}

fn reading(back: Vec<IoBuffer>, (address, key): (u64, u64)) -> Request {
    let bytes = back.iter().map(|piece| piece.len() as u64).sum();
    Request { act: Act::Read, key, address, bytes, data: None, out: IoBuffer::Held(Vec::new()), back }
}

/// The pieces of a list, each where it is.
///
/// # Safety
/// As [`IoBuffer::lent`], for what the list names.
unsafe fn pieces(iov: *const iovec, count: usize) -> Result<Vec<IoBuffer>, Errno> {
    // SAFETY: by this function's contract.
    unsafe { transfer::pieces(iov, count, |piece| Ok(IoBuffer::lent(piece.iov_base, piece.iov_len))) }
}

/// The peer's memory of a message: one piece, as long as what stands here.
///
/// # Safety
/// The list lives for the call.
unsafe fn there(msg: &MsgRma, bytes: u64) -> Result<(u64, u64), Errno> {
    if msg.rma_iov_count != 1 {
        return Err(Errno::INVAL);
    }
    // SAFETY: by this function's contract.
    let there = unsafe { reference(msg.rma_iov)? };
    if there.len as u64 == bytes { Ok((there.addr, there.key)) } else { Err(Errno::INVAL) }
}

calls! {
    fn read(
        ep, at: *mut c_void, bytes: usize, _desc: *mut c_void, to: u64, address: u64, key: u64,
        context: *mut c_void
    ) {
        let back = vec![IoBuffer::lent(at, bytes)];
        let request = reading(back, (address, key));
        ask(ep, || Ok(OneSided { to, request, context, reporting: Reporting::Default }))
    }

    fn readv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, to: u64, address: u64, key: u64,
        context: *mut c_void
    ) {
        ask(ep, || {
            let request = reading(pieces(iov, count)?, (address, key));
            Ok(OneSided { to, request, context, reporting: Reporting::Default })
        })
    }

    fn readmsg(ep, msg: *const MsgRma, flags: u64) {
        ask(ep, || {
            let msg = reference(msg)?;
            let mut request = reading(pieces(msg.msg_iov, msg.iov_count)?, (0, 0));
            (request.address, request.key) = there(msg, request.bytes)?;
            Ok(OneSided { to: msg.addr, request, context: msg.context, reporting: Reporting::Flags(flags) })
        })
    }

    fn write(
        ep, at: *const c_void, bytes: usize, _desc: *mut c_void, to: u64, address: u64, key: u64,
        context: *mut c_void
    ) {
        let request = writing(IoBuffer::lent(at.cast_mut(), bytes), (address, key), None);
        ask(ep, || Ok(OneSided { to, request, context, reporting: Reporting::Default }))
    }

    fn writev(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, to: u64, address: u64, key: u64,
        context: *mut c_void
    ) {
        ask(ep, || {
            let request = writing(gathered(iov, count)?, (address, key), None);
            Ok(OneSided { to, request, context, reporting: Reporting::Default })
        })
    }

    fn writemsg(ep, msg: *const MsgRma, flags: u64) {
        ask(ep, || {
            let msg = reference(msg)?;
            let out = gathered(msg.msg_iov, msg.iov_count)?;
            let there = there(msg, out.len() as u64)?;
            let request = writing(out, there, data_of(flags, msg.data));
            Ok(OneSided { to: msg.addr, request, context: msg.context, reporting: Reporting::Flags(flags) })
        })
    }

    fn inject(ep, at: *const c_void, bytes: usize, to: u64, address: u64, key: u64) {
        let request = writing(IoBuffer::lent(at.cast_mut(), bytes), (address, key), None);
        ask(ep, || {
            Ok(OneSided { to, request, context: std::ptr::null_mut(), reporting: Reporting::Injected })
        })
    }

    fn writedata(
        ep, at: *const c_void, bytes: usize, _desc: *mut c_void, data: u64, to: u64, address: u64, key: u64,
        context: *mut c_void
    ) {
        let request = writing(IoBuffer::lent(at.cast_mut(), bytes), (address, key), Some(data as u32));
        ask(ep, || Ok(OneSided { to, request, context, reporting: Reporting::Default }))
    }

    fn injectdata(ep, at: *const c_void, bytes: usize, data: u64, to: u64, address: u64, key: u64) {
        let request = writing(IoBuffer::lent(at.cast_mut(), bytes), (address, key), Some(data as u32));
        ask(ep, || {
            Ok(OneSided { to, request, context: std::ptr::null_mut(), reporting: Reporting::Injected })
        })
    }
}
