//! Messages, with tags and without: libfabric's many ways to say send and receive.

use std::ffi::c_void;

use polder_pool::endpoint::{CompleteWhen, Filter, Label, MessageBuffer};

use crate::ffi::{Errno, FidEp, Msg, MsgTagged, OpsMsg, OpsTagged, flag, iovec};
use crate::guard;
use crate::handles::{OpenEndpoint, endpoint_of};
use crate::io_buffer::IoBuffer;
use crate::limits::{INJECT_BYTES, PIECES, RECEIVE_FLAGS, SEND_FLAGS};
use crate::log;
use crate::object::{calls, reference};
use crate::operation::{Context, Operation, Role};
use crate::port::{MSG, Selector, TAGGED};

pub(crate) static MSG_OPS: OpsMsg = OpsMsg {
    size: size_of::<OpsMsg>(),
    recv,
    recvv,
    recvmsg,
    send,
    sendv,
    sendmsg,
    inject,
    senddata,
    injectdata,
};

pub(crate) static TAGGED_OPS: OpsTagged = OpsTagged {
    size: size_of::<OpsTagged>(),
    recv: trecv,
    recvv: trecvv,
    recvmsg: trecvmsg,
    send: tsend,
    sendv: tsendv,
    sendmsg: tsendmsg,
    inject: tinject,
    senddata: tsenddata,
    injectdata: tinjectdata,
};

const TAGGED_RECEIVE_FLAGS: u64 = flag::COMPLETION | flag::MORE | flag::PEEK | flag::CLAIM | flag::DISCARD;

/// A message and where it goes.
struct Outgoing {
    to: u64,
    label: Label,
    span: IoBuffer,
    context: *mut c_void,
    /// What was said with the call; without, the endpoint's own hold.
    flags: Option<u64>,
}

/// # Safety
/// `ep` is open.
unsafe fn transmit(ep: *mut FidEp, outgoing: impl FnOnce() -> Result<Outgoing, Errno>) -> isize {
    guard::amount(|| {
        // SAFETY: by this function's contract.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep) };
        let Outgoing { to, label, mut span, context, flags } = outgoing()?;
        let mut state = domain.state();
        let (port, ledger) = state.enabled_port(*at)?;
        let (said, flags) = (flags.is_some(), flags.unwrap_or(port.transmit.flags));
        log::expect_flags("a send", flags, SEND_FLAGS)?;
        // MPICH asks for it of every message, and its programs send short ones that nobody receives yet.
        let until = match (flags & flag::DELIVERY_COMPLETE != 0, said) {
            (true, true) => CompleteWhen::Received,
            (false, _) if flags & flag::MATCH_COMPLETE != 0 => CompleteWhen::Matched,
            (true, false) => CompleteWhen::LongReceived,
            (false, _) => CompleteWhen::Out,
        };
        if flags & flag::INJECT != 0 {
            if span.len() > INJECT_BYTES {
                return Err(Errno::MSGSIZE);
            }
            span = IoBuffer::Held(span.bytes().to_vec());
        }
        let operation = Operation {
            context: Context(context),
            flags: flag::SEND | kind_flag(label.kind),
            report: port.transmit.of(flags),
            role: Role::Send,
        };
        port.send(ledger, until, to, label, (span, operation)).map(|()| 0)
    })
}

/// # Safety
/// `ep` is open, and `at` holds so many bytes.
unsafe fn give_away(ep: *mut FidEp, at: *const c_void, bytes: usize, to: u64, label: Label) -> isize {
    guard::amount(|| {
        if bytes > INJECT_BYTES {
            return Err(Errno::MSGSIZE);
        }
        // SAFETY: by this function's contract; the bytes are read before it returns.
        let (OpenEndpoint { domain, at: port }, span) =
            unsafe { (endpoint_of(ep), IoBuffer::lent(at.cast_mut(), bytes)) };
        let mut state = domain.state();
        let (port, ledger) = state.enabled_port(*port)?;
        port.inject(ledger, to, label, span.bytes()).map(|()| 0)
    })
}

/// A receive and what it takes.
struct Incoming {
    wanted: Selector,
    span: IoBuffer,
    context: *mut c_void,
    flags: Option<u64>,
}

/// # Safety
/// `ep` is open.
unsafe fn receive(ep: *mut FidEp, incoming: impl FnOnce() -> Result<Incoming, Errno>) -> isize {
    guard::amount(|| {
        // SAFETY: by this function's contract.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep) };
        let Incoming { wanted, span, context, flags } = incoming()?;
        let mut state = domain.state();
        let (port, ledger) = state.enabled_port(*at)?;
        let allowed = if wanted.kind == TAGGED { TAGGED_RECEIVE_FLAGS } else { RECEIVE_FLAGS };
        // The defaults may name FI_MULTI_RECV, which a tagged receive does not have.
        let flags = flags.unwrap_or(port.receive.flags & allowed);
        log::expect_flags("a receive", flags, allowed)?;
        let many = flags & flag::MULTI_RECV != 0;
        let role = match many {
            true => Role::ReceiveMany(Box::new(Filter { from: None, kind: MSG, tag: 0, ignore: 0 })),
            false => Role::Receive,
        };
        let operation = Operation {
            context: Context(context),
            flags: flag::RECV | kind_flag(wanted.kind),
            report: port.receive.of(flags),
            role,
        };
        // FI_CLAIM and FI_DISCARD share their bits with what only a binding says.
        match (wanted.kind == TAGGED, flags & flag::PEEK != 0, flags & (flag::CLAIM | flag::DISCARD)) {
            (true, true, _) => port.peek(ledger, wanted, operation, flags),
            (true, false, 0) | (false, ..) => port.post(ledger, wanted, span, operation),
            (true, false, flag::DISCARD) => Err(Errno::INVAL),
            (true, false, said) => port.claim(ledger, span, operation, said & flag::DISCARD != 0),
        }
        .map(|()| 0)
    })
}

const fn kind_flag(kind: u8) -> u64 {
    if kind == TAGGED { flag::TAGGED } else { flag::MSG }
}

/// The room of a receive with a list of pieces: one at most, as the attributes say.
///
/// # Safety
/// As [`IoBuffer::lent`], for what the list names.
unsafe fn lent(iov: *const iovec, count: usize) -> Result<IoBuffer, Errno> {
    match count {
        0 => Ok(IoBuffer::Held(Vec::new())),
        1 => {
            // SAFETY: a list of one lives for the call.
            let piece = unsafe { reference(iov)? };
            // SAFETY: by this function's contract.
            Ok(unsafe { IoBuffer::lent(piece.iov_base, piece.iov_len) })
        }
        _ => Err(Errno::INVAL),
    }
}

/// The bytes of a send with a list of pieces: several are gathered at once.
///
/// # Safety
/// As [`IoBuffer::lent`], for what the list names.
pub(crate) unsafe fn gathered(iov: *const iovec, count: usize) -> Result<IoBuffer, Errno> {
    if count < 2 {
        // SAFETY: the same contract.
        return unsafe { lent(iov, count) };
    }
    // SAFETY: the same contract.
    let pieces = unsafe { pieces(iov, count, |piece| Ok(IoBuffer::lent(piece.iov_base, piece.iov_len)))? };
    Ok(IoBuffer::Held(pieces.iter().flat_map(|piece| piece.bytes()).copied().collect()))
}

/// The pieces of a list, each where `span` says that it is.
///
/// # Safety
/// The list lives for the call.
pub(crate) unsafe fn pieces<T>(
    list: *const T,
    count: usize,
    span: impl Fn(&T) -> Result<IoBuffer, Errno>,
) -> Result<Vec<IoBuffer>, Errno> {
    if count > PIECES {
        return Err(Errno::INVAL);
    }
    // SAFETY: the list has `count` pieces.
    (0..count).map(|index| span(unsafe { reference(list.wrapping_add(index))? })).collect()
}

/// The data of a call whose flags say that there is some. Of it as many bytes count as the domain says: 4.
pub(crate) const fn data_of(flags: u64, data: u64) -> Option<u32> {
    if flags & flag::REMOTE_CQ_DATA != 0 { Some(data as u32) } else { None }
}

const fn plain(data: Option<u32>) -> Label {
    Label { kind: MSG, tag: 0, data }
}

const fn tagged(tag: u64, data: Option<u32>) -> Label {
    Label { kind: TAGGED, tag, data }
}

const fn any(from: u64) -> Selector {
    Selector { from, kind: MSG, tag: 0, ignore: 0 }
}

calls! {
    fn send(ep, at: *const c_void, bytes: usize, _desc: *mut c_void, to: u64, context: *mut c_void) {
        let span = IoBuffer::lent(at.cast_mut(), bytes);
        transmit(ep, || Ok(Outgoing { to, label: plain(None), span, context, flags: None }))
    }

    fn sendv(ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, to: u64, context: *mut c_void) {
        let span = gathered(iov, count);
        transmit(ep, || Ok(Outgoing { to, label: plain(None), span: span?, context, flags: None }))
    }

    fn sendmsg(ep, msg: *const Msg, flags: u64) {
        transmit(ep, || {
            let Msg { msg_iov, iov_count, addr: to, context, data, .. } = *reference(msg)?;
            let data = data_of(flags, data);
            let span = gathered(msg_iov, iov_count)?;
            Ok(Outgoing { to, label: plain(data), span, context, flags: Some(flags) })
        })
    }

    fn senddata(
        ep, at: *const c_void, bytes: usize, _desc: *mut c_void, data: u64, to: u64, context: *mut c_void
    ) {
        let span = IoBuffer::lent(at.cast_mut(), bytes);
        transmit(ep, || Ok(Outgoing { to, label: plain(Some(data as u32)), span, context, flags: None }))
    }

    fn inject(ep, at: *const c_void, bytes: usize, to: u64) {
        give_away(ep, at, bytes, to, plain(None))
    }

    fn injectdata(ep, at: *const c_void, bytes: usize, data: u64, to: u64) {
        give_away(ep, at, bytes, to, plain(Some(data as u32)))
    }

    fn recv(ep, at: *mut c_void, bytes: usize, _desc: *mut c_void, from: u64, context: *mut c_void) {
        let span = IoBuffer::lent(at, bytes);
        receive(ep, || Ok(Incoming { wanted: any(from), span, context, flags: None }))
    }

    fn recvv(ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, from: u64, context: *mut c_void) {
        let span = lent(iov, count);
        receive(ep, || Ok(Incoming { wanted: any(from), span: span?, context, flags: None }))
    }

    fn recvmsg(ep, msg: *const Msg, flags: u64) {
        receive(ep, || {
            let Msg { msg_iov, iov_count, addr: from, context, .. } = *reference(msg)?;
            let span = lent(msg_iov, iov_count)?;
            Ok(Incoming { wanted: any(from), span, context, flags: Some(flags) })
        })
    }

    fn tsend(
        ep, at: *const c_void, bytes: usize, _desc: *mut c_void, to: u64, tag: u64, context: *mut c_void
    ) {
        let span = IoBuffer::lent(at.cast_mut(), bytes);
        transmit(ep, || Ok(Outgoing { to, label: tagged(tag, None), span, context, flags: None }))
    }

    fn tsendv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, to: u64, tag: u64, context: *mut c_void
    ) {
        let span = gathered(iov, count);
        transmit(ep, || Ok(Outgoing { to, label: tagged(tag, None), span: span?, context, flags: None }))
    }

    fn tsendmsg(ep, msg: *const MsgTagged, flags: u64) {
        transmit(ep, || {
            let MsgTagged { msg_iov, iov_count, addr: to, tag, context, data, .. } = *reference(msg)?;
            let data = data_of(flags, data);
            let span = gathered(msg_iov, iov_count)?;
            Ok(Outgoing { to, label: tagged(tag, data), span, context, flags: Some(flags) })
        })
    }

    fn tsenddata(
        ep, at: *const c_void, bytes: usize, _desc: *mut c_void, data: u64, to: u64, tag: u64,
        context: *mut c_void
    ) {
        let span = IoBuffer::lent(at.cast_mut(), bytes);
        transmit(ep, || {
            Ok(Outgoing { to, label: tagged(tag, Some(data as u32)), span, context, flags: None })
        })
    }

    fn tinject(ep, at: *const c_void, bytes: usize, to: u64, tag: u64) {
        give_away(ep, at, bytes, to, tagged(tag, None))
    }

    fn tinjectdata(ep, at: *const c_void, bytes: usize, data: u64, to: u64, tag: u64) {
        give_away(ep, at, bytes, to, tagged(tag, Some(data as u32)))
    }

    fn trecv(
        ep, at: *mut c_void, bytes: usize, _desc: *mut c_void, from: u64, tag: u64, ignore: u64,
        context: *mut c_void
    ) {
        let span = IoBuffer::lent(at, bytes);
        let wanted = Selector { from, kind: TAGGED, tag, ignore };
        receive(ep, || Ok(Incoming { wanted, span, context, flags: None }))
    }

    fn trecvv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, from: u64, tag: u64, ignore: u64,
        context: *mut c_void
    ) {
        let span = lent(iov, count);
        let wanted = Selector { from, kind: TAGGED, tag, ignore };
        receive(ep, || Ok(Incoming { wanted, span: span?, context, flags: None }))
    }

    fn trecvmsg(ep, msg: *const MsgTagged, flags: u64) {
        receive(ep, || {
            let MsgTagged { msg_iov, iov_count, addr: from, tag, ignore, context, .. } = *reference(msg)?;
            let span =
                if flags & flag::PEEK != 0 { IoBuffer::Held(Vec::new()) } else { lent(msg_iov, iov_count)? };
            let wanted = Selector { from, kind: TAGGED, tag, ignore };
            Ok(Incoming { wanted, span, context, flags: Some(flags) })
        })
    }
}
