//! Endpoints: opening, binding, enabling, closing. What they carry is in [`transfer`](crate::transfer).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use polder_pool::endpoint::Address;

use crate::ffi::{
    Absent, ENABLE, EP_RDM, Errno, Fid, FidDomain, FidEp, Info, OPT_ENDPOINT, OPT_MIN_MULTI_RECV, Ops, OpsCm,
    OpsEp, class, flag,
};
use crate::handles::{EndpointHandle, OpenEndpoint, domain_of, endpoint_of};
use crate::ledger::Ledger;
use crate::object::{expect_place, fid, reference};
use crate::operation::Context;
use crate::port::{self, PoolEndpoint, Port};
use crate::state::Domain;
use crate::{atomic, av, cntr, cq, guard, log, rma, session, transfer};

static OPS: Ops = Ops { bind, control, ..Ops::closing(close) };

static EP_OPS: OpsEp = OpsEp {
    size: size_of::<OpsEp>(),
    cancel,
    getopt,
    setopt,
    tx_ctx: Absent::ABSENT,
    rx_ctx: Absent::ABSENT,
    rx_size_left: Absent::ABSENT,
    tx_size_left: Absent::ABSENT,
};

static CM_OPS: OpsCm = OpsCm {
    size: size_of::<OpsCm>(),
    setname: Absent::ABSENT,
    getname,
    getpeer: Absent::ABSENT,
    connect: Absent::ABSENT,
    listen: Absent::ABSENT,
    accept: Absent::ABSENT,
    reject: Absent::ABSENT,
    shutdown: Absent::ABSENT,
    join: Absent::ABSENT,
};

pub(crate) unsafe extern "C" fn open(
    domain: *mut FidDomain,
    info: *mut Info,
    place: *mut *mut FidEp,
    context: *mut c_void,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        // SAFETY: libfabric passes an open domain, and an info that lives for the call.
        let (domain, info) = unsafe { (domain_of(domain), reference(info)?) };
        // SAFETY: the parts of an info live as long as it does.
        let (kind, transmit, receive) = unsafe {
            (
                info.ep_attr.as_ref().map_or(EP_RDM, |attr| attr.kind),
                info.tx_attr.as_ref().map_or(0, |attr| attr.op_flags),
                info.rx_attr.as_ref().map_or(0, |attr| attr.op_flags),
            )
        };
        if kind != EP_RDM {
            return Err(Errno::INVAL);
        }
        let link = PoolEndpoint::open(Arc::clone(domain.session.pool()), domain.session.endpoint_options())
            .map_err(|error| port::errno_of(&error))?;
        let at = domain.state().ports.insert(Port::new(link, transmit, receive, info.caps));
        let fid = FidEp {
            fid: fid(class::EP, context, &OPS),
            ops: &EP_OPS,
            cm: &CM_OPS,
            msg: &transfer::MSG_OPS,
            rma: &rma::OPS,
            tagged: &transfer::TAGGED_OPS,
            atomic: &atomic::OPS,
            collective: std::ptr::null(),
        };
        // SAFETY: `place` is not null, and the caller's to be written.
        unsafe { EndpointHandle::hand_out(fid, OpenEndpoint { domain: Arc::clone(domain), at }, place) };
        Ok(())
    })
}

unsafe extern "C" fn close(ep: *mut Fid) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes what `open` made.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep.cast()) };
        let mut state = domain.state();
        let closed = state.ports.remove(*at).ok_or(Errno::INVAL)?;
        unbind(&closed, &mut state.ledger);
        drop(state);
        session::tally(closed.link.sent_bytes());
        // Outside the lock, for it waits for peers to come for their messages.
        if let Err(error) = closed.link.close() {
            tracing::warn!("{}", log::words(&error));
        }
        // SAFETY: as above; a program closes once.
        unsafe { EndpointHandle::close(ep.cast()) };
        Ok(())
    })
}

fn unbind(port: &Port, ledger: &mut Ledger) {
    if let Some(vector) = port.vector.and_then(|at| ledger.vectors.get_mut(at)) {
        vector.bound -= 1;
    }
    for queue in [port.transmit.queue, port.receive.queue].into_iter().flatten() {
        if let Some(queue) = ledger.queues.get_mut(queue) {
            queue.bound -= 1;
        }
    }
    for (counter, _) in &port.counters {
        if let Some(counter) = ledger.counters.get_mut(*counter) {
            counter.bound -= 1;
        }
    }
}

const COUNTED: u64 =
    flag::SEND | flag::RECV | flag::READ | flag::WRITE | flag::REMOTE_READ | flag::REMOTE_WRITE;

unsafe extern "C" fn bind(ep: *mut Fid, to: *mut Fid, flags: u64) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes an open endpoint, and an open object to bind it to.
        let (OpenEndpoint { domain, at }, class) = unsafe { (endpoint_of(ep.cast()), reference(to)?.class) };
        let mut state = domain.state();
        let (port, ledger) = state.port(*at)?;
        if port.enabled {
            return Err(Errno::OPBADSTATE);
        }
        match class {
            class::AV => {
                // SAFETY: its class says what it is.
                let open = unsafe { av::of(to.cast()) };
                same(domain, &open.domain)?;
                bind_vector(port, ledger, open.at)
            }
            class::CQ => {
                // SAFETY: its class says what it is.
                let open = unsafe { cq::of(to.cast()) };
                same(domain, &open.domain)?;
                bind_queue(port, ledger, open.at, flags)
            }
            class::CNTR => {
                // SAFETY: its class says what it is.
                let open = unsafe { cntr::of(to.cast()) };
                same(domain, &open.domain)?;
                bind_counter(port, ledger, open.at, flags)
            }
            // Nothing happens to an endpoint that a program would have to be told.
            class::EQ => Ok(()),
            _ => Err(Errno::INVAL),
        }
    })
}

fn same(one: &Arc<Domain>, other: &Arc<Domain>) -> Result<(), Errno> {
    if Arc::ptr_eq(one, other) { Ok(()) } else { Err(Errno::DOMAIN) }
}

fn bind_vector(port: &mut Port, ledger: &mut Ledger, at: usize) -> Result<(), Errno> {
    if port.vector.is_some() {
        return Err(Errno::INVAL);
    }
    ledger.vectors.get_mut(at).ok_or(Errno::INVAL)?.bound += 1;
    port.vector = Some(at);
    Ok(())
}

fn bind_queue(port: &mut Port, ledger: &mut Ledger, at: usize, flags: u64) -> Result<(), Errno> {
    const DIRECTIONS: u64 = flag::SEND | flag::RECV;
    log::expect_flags("fi_ep_bind to a queue", flags, DIRECTIONS | flag::SELECTIVE_COMPLETION)?;
    if flags & DIRECTIONS == 0 {
        return Err(Errno::BADFLAGS);
    }
    let chosen = |direction| flags & direction != 0;
    if chosen(flag::SEND) && port.transmit.queue.is_some()
        || chosen(flag::RECV) && port.receive.queue.is_some()
    {
        return Err(Errno::INVAL);
    }
    let queue = ledger.queues.get_mut(at).ok_or(Errno::INVAL)?;
    for (direction, report) in [(flag::SEND, &mut port.transmit), (flag::RECV, &mut port.receive)] {
        if chosen(direction) {
            queue.bound += 1;
            report.queue = Some(at);
            report.selective = chosen(flag::SELECTIVE_COMPLETION);
        }
    }
    Ok(())
}

fn bind_counter(port: &mut Port, ledger: &mut Ledger, at: usize, flags: u64) -> Result<(), Errno> {
    log::expect_flags("fi_ep_bind to a counter", flags, COUNTED)?;
    if flags == 0 {
        return Err(Errno::BADFLAGS);
    }
    ledger.counters.get_mut(at).ok_or(Errno::INVAL)?.bound += 1;
    port.counters.push((at, flags));
    Ok(())
}

unsafe extern "C" fn control(ep: *mut Fid, command: c_int, _argument: *mut c_void) -> c_int {
    guard::status(|| {
        // SAFETY: libfabric passes an open endpoint.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep.cast()) };
        let mut state = domain.state();
        let (port, _) = state.port(*at)?;
        match command {
            ENABLE if port.vector.is_none() => Err(Errno::NOAV),
            ENABLE if port.transmit.queue.is_none() && port.receive.queue.is_none() => Err(Errno::NOCQ),
            ENABLE => {
                port.enable();
                let Address { host, port, generation, .. } = port.link.address();
                tracing::info!(host, port, generation, "an endpoint is enabled");
                Ok(())
            }
            _ => Err(Errno::NOSYS),
        }
    })
}

unsafe extern "C" fn cancel(ep: *mut Fid, context: *mut c_void) -> isize {
    guard::amount(|| {
        // SAFETY: libfabric passes an open endpoint.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep.cast()) };
        let mut state = domain.state();
        let (port, ledger) = state.port(*at)?;
        port.cancel(ledger, Context(context)).map(|()| 0)
    })
}

unsafe extern "C" fn getopt(
    ep: *mut Fid,
    level: c_int,
    name: c_int,
    to: *mut c_void,
    room: *mut usize,
) -> c_int {
    guard::status(|| {
        if (level, name) != (OPT_ENDPOINT, OPT_MIN_MULTI_RECV) {
            return Err(Errno::NOPROTOOPT);
        }
        expect_place(to)?;
        expect_place(room)?;
        // SAFETY: libfabric passes an open endpoint, and in `room` how much may be written.
        let (OpenEndpoint { domain, at }, bytes) = unsafe { (endpoint_of(ep.cast()), room.read()) };
        if bytes < size_of::<usize>() {
            return Err(Errno::TOOSMALL);
        }
        let least = domain.state().port(*at)?.0.least_left;
        // SAFETY: as above.
        unsafe {
            to.cast::<usize>().write_unaligned(least);
            room.write(size_of::<usize>());
        }
        Ok(())
    })
}

unsafe extern "C" fn setopt(
    ep: *mut Fid,
    level: c_int,
    name: c_int,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    guard::status(|| {
        if (level, name) != (OPT_ENDPOINT, OPT_MIN_MULTI_RECV) {
            return Err(Errno::NOPROTOOPT);
        }
        if from.is_null() || bytes != size_of::<usize>() {
            return Err(Errno::INVAL);
        }
        // SAFETY: libfabric passes an open endpoint, and so many bytes.
        let (OpenEndpoint { domain, at }, least) =
            unsafe { (endpoint_of(ep.cast()), from.cast::<usize>().read_unaligned()) };
        domain.state().port(*at)?.0.least_left = least;
        Ok(())
    })
}

unsafe extern "C" fn getname(ep: *mut Fid, to: *mut c_void, room: *mut usize) -> c_int {
    guard::status(|| {
        expect_place(room)?;
        // SAFETY: libfabric passes an open endpoint.
        let OpenEndpoint { domain, at } = unsafe { endpoint_of(ep.cast()) };
        let address = domain.state().port(*at)?.0.link.address().encode();
        // SAFETY: the program says in `room` how much `to` holds.
        unsafe {
            let enough = !to.is_null() && room.read() >= address.len();
            av::give(&address, to, room);
            if enough { Ok(()) } else { Err(Errno::TOOSMALL) }
        }
    })
}
