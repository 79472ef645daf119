//! The provider as libfabric and MPI libraries call it: through its tables, with the hints that each library gives.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{from_mut, null, null_mut};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use polder_attach::session as pools;
use polder_pool::Geometry;
use polder_pool::endpoint::{Address, Completion, EndpointOptions, Filter, Label};

use crate::ffi::*;
use crate::getinfo::getinfo;
use crate::io_buffer::IoBuffer;
use crate::libfabric::{self, standing_in};
use crate::note::INLINE;
use crate::operation::{Role, aside};
use crate::port::PoolEndpoint;
use crate::{fabric, session};

const ENODATA: c_int = -libc::ENODATA;
const EINVAL: c_int = -libc::EINVAL;
const EAGAIN: isize = -(libc::EAGAIN as isize);
const EAVAIL: isize = -259;

/// One pool for all tests of this process, in a directory that is gone once it is attached.
fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        standing_in::begin();
        let directory = std::env::temp_dir().join(format!("polder-fi-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let pool = directory.join("pool");
        pools::create(&pool, 64 << 20, &Geometry::for_region(64 << 20)).unwrap();
        // SAFETY: every test comes through here before it reads the environment.
        unsafe {
            std::env::set_var("POLDER_POOL", &pool);
            std::env::set_var("POLDER_RUN", &directory);
        }
        session::session().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    });
}

/// What a library says in its hints, where it says anything.
#[derive(Clone, Copy, Default)]
struct Hints {
    version: u32,
    caps: u64,
    transmit_flags: u64,
    receive_flags: u64,
    transmit_order: u64,
    threading: c_int,
    progress: c_int,
    av_type: c_int,
    mr_mode: c_int,
    cq_data_size: usize,
    kind: c_int,
}

const WAYS: u64 = flag::SEND | flag::RECV | flag::READ | flag::WRITE | flag::REMOTE_READ | flag::REMOTE_WRITE;
const MPI: u64 = flag::MSG | flag::TAGGED | flag::LOCAL_COMM | flag::REMOTE_COMM | flag::DIRECTED_RECV;

/// MPICH 5.0.2 and 4.2.3, with the capabilities that they found without hints.
const MPICH: Hints = Hints {
    version: version(2, 5),
    caps: MPI | WAYS | flag::RMA | flag::ATOMIC | flag::MULTI_RECV | flag::SOURCE,
    transmit_flags: flag::COMPLETION | flag::DELIVERY_COMPLETE,
    receive_flags: flag::COMPLETION,
    transmit_order: order::SAS | 0xf0_0000_0000,
    threading: THREAD_DOMAIN,
    progress: PROGRESS_MANUAL,
    av_type: AV_TABLE,
    mr_mode: mr_mode::ENDPOINT,
    cq_data_size: 4,
    kind: EP_RDM,
};

/// Open MPI 5.0.11, without memory of devices.
const OPEN_MPI_5: Hints = Hints {
    version: version(1, 18),
    caps: MPI,
    transmit_flags: flag::COMPLETION,
    progress: PROGRESS_UNSPEC,
    av_type: AV_MAP,
    mr_mode: 0x20,
    ..MPICH
};

/// Open MPI 4.1.
const OPEN_MPI_4: Hints = Hints { version: version(1, 5), caps: MPI & !flag::MSG, mr_mode: 0, ..OPEN_MPI_5 };

/// Intel MPI 2021.18.1.
const INTEL: Hints = Hints {
    version: version(1, 5),
    transmit_flags: flag::COMPLETION,
    mr_mode: 0x70,
    cq_data_size: 0,
    ..MPICH
};

/// An info of the stand-in, freed at its end.
struct OneSided(*mut Info);

impl Drop for OneSided {
    fn drop(&mut self) {
        // SAFETY: made by new_info.
        unsafe { libfabric::free_info(self.0) };
    }
}

impl Hints {
    fn info(&self) -> OneSided {
        begin();
        let info = libfabric::new_info();
        // SAFETY: new, with all its parts.
        unsafe {
            (*info).caps = self.caps;
            (*(*info).tx_attr).op_flags = self.transmit_flags;
            (*(*info).tx_attr).msg_order = self.transmit_order;
            (*(*info).rx_attr).op_flags = self.receive_flags;
            (*(*info).rx_attr).msg_order = self.transmit_order & order::SAS;
            (*(*info).ep_attr).kind = self.kind;
            let domain = (*info).domain_attr;
            (*domain).threading = self.threading;
            (*domain).control_progress = self.progress;
            (*domain).data_progress = self.progress;
            (*domain).resource_mgmt = RM_ENABLED;
            (*domain).av_type = self.av_type;
            (*domain).mr_mode = self.mr_mode;
            (*domain).cq_data_size = self.cq_data_size;
        }
        OneSided(info)
    }

    fn ask(&self) -> Result<OneSided, c_int> {
        let hints = self.info();
        let mut found = null_mut();
        // SAFETY: as libfabric calls it.
        match unsafe { getinfo(self.version, null(), null(), 0, hints.0, &raw mut found) } {
            0 => Ok(OneSided(found)),
            errno => Err(errno),
        }
    }
}

#[test]
fn each_library_is_offered_what_it_asks_for() {
    for hints in [MPICH, OPEN_MPI_5, OPEN_MPI_4, INTEL] {
        let found = hints.ask().unwrap();
        // SAFETY: a whole info.
        unsafe {
            let info = &*found.0;
            assert_eq!(info.caps & hints.caps, hints.caps);
            assert_eq!(info.mode, 0);
            assert_eq!((*info.domain_attr).threading, THREAD_DOMAIN);
            assert_eq!((*info.domain_attr).av_type, hints.av_type);
            assert_eq!((*info.domain_attr).mr_mode, 0);
            assert!((*info.domain_attr).cq_data_size >= hints.cq_data_size);
            assert_eq!((*info.tx_attr).op_flags, hints.transmit_flags);
            assert_eq!((*info.tx_attr).msg_order & hints.transmit_order, hints.transmit_order);
            assert_eq!((*info.ep_attr).mem_tag_format >> 63, 1, "all 64 bits of a tag");
            assert_eq!(CStr::from_ptr((*info.fabric_attr).name), c"polder");
        }
    }
}

#[test]
fn without_hints_everything_is_offered_and_an_old_program_gets_the_old_name_for_registration() {
    begin();
    for (version, mr_mode) in [(0, mr_mode::SCALABLE), (version(1, 5), 0), (version(2, 5), 0)] {
        let mut info = null_mut();
        // SAFETY: as libfabric calls it.
        assert_eq!(unsafe { getinfo(version, null(), null(), 0, null(), &raw mut info) }, 0);
        let info = OneSided(info);
        // SAFETY: a whole info.
        unsafe {
            assert_eq!((*info.0).caps & MPICH.caps, MPICH.caps);
            assert_eq!((*(*info.0).domain_attr).mr_mode, mr_mode);
        }
    }
}

#[test]
fn what_the_pool_does_not_carry_is_not_offered() {
    let unfit = [
        ("triggered operations", Hints { caps: MPICH.caps | 1 << 20, ..MPICH }),
        ("an order of messages and writes", Hints { transmit_order: 0xf0_0000_0180, ..MPICH }),
        ("progress without calls", Hints { progress: PROGRESS_AUTO, ..MPICH }),
        ("five bytes of data", Hints { cq_data_size: 5, ..MPICH }),
        ("connected endpoints", Hints { kind: 1, ..MPICH }),
        ("a fence", Hints { transmit_flags: flag::FENCE, ..MPICH }),
    ];
    for (what, hints) in unfit {
        assert_eq!(hints.ask().err(), Some(ENODATA), "{what}");
    }
    begin();
    let mut found = null_mut();
    // SAFETY: as libfabric calls it.
    unsafe {
        assert_eq!(getinfo(0, c"node".as_ptr(), null(), 0, null(), &raw mut found), ENODATA);
        assert_eq!(getinfo(0, null(), null(), 0, null(), null_mut()), EINVAL);
    }
}

/// An open endpoint and all that it needs, closed in order.
struct Bench {
    fabric: *mut FidFabric,
    domain: *mut FidDomain,
    av: *mut FidAv,
    cq: *mut FidCq,
    cntr: *mut FidCntr,
    ep: *mut FidEp,
}

fn close(fid: *mut Fid) -> c_int {
    // SAFETY: an open object.
    unsafe { ((*(*fid).ops).close)(fid) }
}

fn bind(fid: *mut Fid, to: *mut Fid, flags: u64) -> c_int {
    // SAFETY: open objects.
    unsafe { ((*(*fid).ops).bind)(fid, to, flags) }
}

fn enable(ep: *mut FidEp) -> c_int {
    // SAFETY: an open endpoint.
    unsafe { ((*(*ep).fid.ops).control)(ep.cast(), ENABLE, null_mut()) }
}

impl Bench {
    /// All of it, bound to nothing.
    fn open(hints: Hints) -> Self {
        let info = hints.ask().unwrap();
        let (mut fabric, mut domain, mut av) = (null_mut(), null_mut(), null_mut());
        let (mut cq, mut cntr, mut ep) = (null_mut(), null_mut(), null_mut());
        let mut av_attr = AvAttr {
            kind: AV_TABLE,
            rx_ctx_bits: 0,
            count: 4,
            ep_per_node: 0,
            name: null(),
            map_addr: null_mut(),
            flags: 0,
        };
        let mut cq_attr = CqAttr {
            size: 0,
            flags: 0,
            format: CQ_FORMAT_TAGGED,
            wait_obj: WAIT_UNSPEC,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: null_mut(),
        };
        let mut cntr_attr =
            CntrAttr { events: CNTR_EVENTS_COMP, wait_obj: WAIT_UNSPEC, wait_set: null_mut(), flags: 0 };
        // SAFETY: as a program calls libfabric, which writes down for which interface it was built.
        unsafe {
            (*(*info.0).fabric_attr).api_version = hints.version;
            assert_eq!(fabric::open((*info.0).fabric_attr, &raw mut fabric, null_mut()), 0);
            assert_eq!(((*(*fabric).ops).domain)(fabric, info.0, &raw mut domain, null_mut()), 0);
            let ops = &*(*domain).ops;
            assert_eq!((ops.av_open)(domain, &raw mut av_attr, &raw mut av, null_mut()), 0);
            assert_eq!((ops.cq_open)(domain, &raw mut cq_attr, &raw mut cq, null_mut()), 0);
            assert_eq!((ops.cntr_open)(domain, &raw mut cntr_attr, &raw mut cntr, null_mut()), 0);
            assert_eq!((ops.endpoint)(domain, info.0, &raw mut ep, null_mut()), 0);
        }
        Self { fabric, domain, av, cq, cntr, ep }
    }

    /// Bound as MPI libraries do, enabled, and with its own address at place 0.
    fn enabled(hints: Hints) -> Self {
        let bench = Self::open(hints);
        assert_eq!(bind(bench.ep.cast(), bench.av.cast(), 0), 0);
        let both = flag::SEND | flag::RECV;
        assert_eq!(bind(bench.ep.cast(), bench.cq.cast(), both | flag::SELECTIVE_COMPLETION), 0);
        assert_eq!(bind(bench.ep.cast(), bench.cntr.cast(), both | flag::READ | flag::WRITE), 0);
        assert_eq!(enable(bench.ep), 0);
        assert_eq!(bench.insert(&bench.name()), 0);
        bench
    }

    fn name(&self) -> [u8; 16] {
        let (mut name, mut bytes) = ([0; 16], 16);
        // SAFETY: an open endpoint, and room for a name.
        unsafe {
            assert_eq!(
                ((*(*self.ep).cm).getname)(self.ep.cast(), name.as_mut_ptr().cast(), &raw mut bytes),
                0
            )
        };
        assert_eq!(bytes, 16);
        name
    }

    fn insert(&self, name: &[u8; 16]) -> u64 {
        let mut place = 77;
        // SAFETY: an open vector, one address and room for one place.
        let inserted = unsafe {
            ((*(*self.av).ops).insert)(self.av, name.as_ptr().cast(), 1, &raw mut place, 0, null_mut())
        };
        assert_eq!(inserted, 1);
        place
    }

    fn tsend(&self, to: u64, bytes: &[u8], tag: u64) -> isize {
        // SAFETY: the stand-in copies at once.
        unsafe {
            ((*(*self.ep).tagged).send)(
                self.ep,
                bytes.as_ptr().cast(),
                bytes.len(),
                null_mut(),
                to,
                tag,
                context(1),
            )
        }
    }

    fn trecv(&self, room: &mut [u8], from: u64, tag: u64, ignore: u64) -> isize {
        let at = room.as_mut_ptr().cast();
        // SAFETY: tests read the room after the completion.
        unsafe {
            ((*(*self.ep).tagged).recv)(self.ep, at, room.len(), null_mut(), from, tag, ignore, context(2))
        }
    }

    fn trecvmsg(&self, room: &mut [u8], tag: u64, flags: u64) -> isize {
        let iov = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let msg = MsgTagged {
            msg_iov: &raw const iov,
            desc: null_mut(),
            iov_count: 1,
            addr: ADDR_UNSPEC,
            tag,
            ignore: 0,
            context: context(3),
            data: 0,
        };
        // SAFETY: as above.
        unsafe { ((*(*self.ep).tagged).recvmsg)(self.ep, &raw const msg, flags | flag::COMPLETION) }
    }

    fn tsendmsg(&self, to: u64, bytes: &[u8], tag: u64, flags: u64) -> isize {
        let iov = iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let msg = MsgTagged {
            msg_iov: &raw const iov,
            desc: null_mut(),
            iov_count: 1,
            addr: to,
            tag,
            ignore: 0,
            context: context(1),
            data: 0,
        };
        // SAFETY: tests keep the bytes until the completion.
        unsafe { ((*(*self.ep).tagged).sendmsg)(self.ep, &raw const msg, flags | flag::COMPLETION) }
    }

    fn recvmsg(&self, room: &mut [u8], number: usize, flags: u64) -> isize {
        let iov = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let msg = Msg {
            msg_iov: &raw const iov,
            desc: null_mut(),
            iov_count: 1,
            addr: ADDR_UNSPEC,
            context: context(number),
            data: 0,
        };
        // SAFETY: as above.
        unsafe { ((*(*self.ep).msg).recvmsg)(self.ep, &raw const msg, flags) }
    }

    /// Injects a message to ourselves.
    fn inject(&self, bytes: &[u8]) -> isize {
        // SAFETY: an open endpoint.
        unsafe { ((*(*self.ep).msg).inject)(self.ep, bytes.as_ptr().cast(), bytes.len(), 0) }
    }

    /// The next completion, once there is one.
    fn next(&self) -> Result<(CqTaggedEntry, u64), isize> {
        let late = Instant::now() + Duration::from_secs(5);
        loop {
            match self.read() {
                Err(EAGAIN) if Instant::now() < late => std::thread::yield_now(),
                read => return read,
            }
        }
    }

    /// Looks for a message that was sent until it is there.
    fn peek(&self, tag: u64, flags: u64) -> CqTaggedEntry {
        let late = Instant::now() + Duration::from_secs(5);
        loop {
            assert_eq!(self.trecvmsg(&mut [], tag, flag::PEEK | flags), 0);
            match self.read() {
                Ok((found, _)) => return found,
                Err(_) => assert_eq!(self.failure().err, libc::ENOMSG),
            }
            assert!(Instant::now() < late, "no message came");
        }
    }

    /// The next completion, if there is one, and who it came from.
    fn read(&self) -> Result<(CqTaggedEntry, u64), isize> {
        let mut entry = EMPTY;
        let mut from = 0;
        // SAFETY: an open queue, and room for one entry and one address.
        let read =
            unsafe { ((*(*self.cq).ops).readfrom)(self.cq, from_mut(&mut entry).cast(), 1, &raw mut from) };
        if read == 1 { Ok((entry, from)) } else { Err(read) }
    }

    fn failure(&self) -> CqErrEntry {
        let mut entry = CqErrEntry {
            entry: EMPTY,
            olen: 0,
            err: 0,
            prov_errno: 0,
            err_data: null_mut(),
            err_data_size: 77,
        };
        // SAFETY: an open queue, and room for an entry.
        assert_eq!(unsafe { ((*(*self.cq).ops).readerr)(self.cq, &raw mut entry, 0) }, 1);
        entry
    }
}

const EMPTY: CqTaggedEntry =
    CqTaggedEntry { op_context: null_mut(), flags: 0, len: 0, buf: null_mut(), data: 0, tag: 0 };

fn context(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number)
}

impl Drop for Bench {
    fn drop(&mut self) {
        let Self { fabric, domain, av, cq, cntr, ep } = *self;
        for fid in [ep.cast(), cq.cast(), av.cast(), cntr.cast(), domain.cast(), fabric.cast::<Fid>()] {
            assert_eq!(close(fid), 0);
        }
    }
}

#[test]
fn nothing_closes_while_something_uses_it() {
    let bench = Bench::enabled(MPICH);
    for fid in
        [bench.cq.cast(), bench.av.cast(), bench.cntr.cast(), bench.domain.cast(), bench.fabric.cast::<Fid>()]
    {
        assert_eq!(close(fid), -libc::EBUSY);
    }
}

#[test]
fn an_endpoint_is_enabled_once_it_has_addresses_and_a_queue_of_its_own_domain() {
    let (bench, other) = (Bench::open(MPICH), Bench::open(MPICH));
    let ep: *mut Fid = bench.ep.cast();
    assert_eq!(bench.tsend(0, b"early", 1), -258, "not enabled");
    assert_eq!(enable(bench.ep), -267, "no address vector");
    assert_eq!(bind(ep, other.av.cast(), 0), -262, "another domain's");
    assert_eq!(bind(ep, bench.av.cast(), 0), 0);
    assert_eq!(bind(ep, bench.av.cast(), 0), EINVAL, "bound already");
    assert_eq!(enable(bench.ep), -263, "no queue");
    assert_eq!(bind(ep, bench.cq.cast(), 0), -260, "no direction");
    assert_eq!(bind(ep, bench.cq.cast(), flag::SEND | flag::RECV), 0);
    assert_eq!(bind(ep, null_mut(), 0), EINVAL);
    assert_eq!(bind(ep, bench.domain.cast(), 0), EINVAL);
    assert_eq!(enable(bench.ep), 0);
    assert_eq!(bind(ep, bench.cntr.cast(), flag::SEND), -258, "enabled already");
    assert_eq!(bench.tsend(5, b"nobody", 1), isize::try_from(EINVAL).unwrap(), "no such address");
}

#[test]
fn a_name_that_finds_no_room_says_how_long_it_is() {
    let bench = Bench::open(MPICH);
    let mut bytes = 0;
    // SAFETY: an open endpoint, and no room.
    let status = unsafe { ((*(*bench.ep).cm).getname)(bench.ep.cast(), null_mut(), &raw mut bytes) };
    assert_eq!((status, bytes), (-257, 16));
}

#[test]
fn a_tagged_message_completes_at_both_ends_with_tag_length_and_sender() {
    let (one, other) = (Bench::enabled(OPEN_MPI_5), Bench::enabled(OPEN_MPI_5));
    let to = one.insert(&other.name());
    let from = other.insert(&one.name());
    let mut room = [0; 8];
    assert_eq!(other.trecv(&mut room, from, 0x8000_0000_0000_0001, 0xff00), 0);
    assert_eq!(other.read().unwrap_err(), EAGAIN);
    assert_eq!(one.tsend(to, b"hello", 0x8000_0000_0000_1201), 0);
    // Until the receiver has come for the first message, the sender may have to wait as well.
    let late = Instant::now() + Duration::from_secs(5);
    let (mut sent, mut got) = (one.read(), other.read());
    while (sent.is_err() || got.is_err()) && Instant::now() < late {
        sent = sent.or_else(|_| one.read());
        got = got.or_else(|_| other.read());
    }
    let (sent, _) = sent.unwrap();
    assert_eq!((sent.op_context, sent.flags), (context(1), flag::SEND | flag::TAGGED));
    let (got, source) = got.unwrap();
    assert_eq!((got.op_context, got.flags), (context(2), flag::RECV | flag::TAGGED));
    assert_eq!((got.len, got.tag, source), (5, 0x8000_0000_0000_1201, from));
    assert_eq!(&room[..5], b"hello");
    // SAFETY: an open counter.
    unsafe { assert_eq!(((*(*other.cntr).ops).read)(other.cntr), 1) };
}

#[test]
fn the_sender_of_a_message_is_where_its_address_stands_now() {
    let (one, other) = (Bench::enabled(OPEN_MPI_5), Bench::enabled(OPEN_MPI_5));
    let to = one.insert(&other.name());
    let mut place = other.insert(&one.name());
    for _ in 0..2 {
        let mut room = [0; 8];
        assert_eq!(other.trecv(&mut room, place, 1, 0), 0);
        assert_eq!(one.tsend(to, b"hello", 1), 0);
        let late = Instant::now() + Duration::from_secs(5);
        let mut got = other.read();
        while got.is_err() && Instant::now() < late {
            let _sent = one.read();
            got = other.read();
        }
        assert_eq!(got.unwrap().1, place);
        // SAFETY: an open vector, and one place.
        unsafe { assert_eq!(((*(*other.av).ops).remove)(other.av, &raw mut place, 1, 0), 0) };
        let again = other.insert(&one.name());
        assert_ne!(again, std::mem::replace(&mut place, again));
    }
}

#[test]
fn a_send_that_asks_for_its_delivery_is_complete_when_the_message_is_received() {
    let (one, other, to) = pair();
    for (bytes, flags) in [(0, 0), (8, 0), (8, flag::INJECT), (40_000, 0), (200_000, 0)] {
        let (sent, mut room) = (pattern(bytes), vec![0; bytes]);
        assert_eq!(one.tsendmsg(to, &sent, 5, flags | flag::DELIVERY_COMPLETE), 0);
        for _ in 0..100 {
            assert!(one.read().is_err() && other.read().is_err(), "{bytes} bytes");
        }
        assert_eq!(other.trecv(&mut room, ADDR_UNSPEC, 5, 0), 0);
        let done = one.next_beside(&other).unwrap();
        assert_eq!((done.op_context, done.flags), (context(1), flag::SEND | flag::TAGGED));
        assert_eq!(other.next().unwrap().0.op_context, context(2));
        assert!(room == sent, "{bytes} bytes are there");
    }
    // As a default it is asked for by MPICH, whose programs count on short messages to be out of their way.
    let (short, long, mut room) = (pattern(40_000), pattern(200_000), vec![0; 200_000]);
    assert_eq!(one.tsend(to, &short, 6), 0);
    assert_eq!(one.next().unwrap().0.op_context, context(1));
    assert_eq!(one.tsend(to, &long, 7), 0);
    for _ in 0..100 {
        assert!(one.read().is_err() && other.read().is_err());
    }
    assert_eq!(other.trecv(&mut room, ADDR_UNSPEC, 7, 0), 0);
    assert_eq!(one.next_beside(&other).unwrap().op_context, context(1));
    assert!(room == long);
}

#[test]
fn a_send_that_asks_for_its_match_is_complete_when_a_receive_or_a_claim_has_matched_it() {
    let (one, other, to) = pair();
    for (bytes, flags) in [(0, 0), (8, 0), (8, flag::INJECT), (40_000, 0), (200_000, 0)] {
        for claims in [false, true] {
            let (sent, mut room) = (pattern(bytes), vec![0; bytes]);
            assert_eq!(one.tsendmsg(to, &sent, 5, flags | flag::MATCH_COMPLETE), 0);
            for _ in 0..100 {
                assert!(one.read().is_err() && other.read().is_err(), "{bytes} bytes");
            }
            if claims {
                assert_eq!(other.peek(5, flag::PEEK | flag::CLAIM).tag, 5);
            } else {
                assert_eq!(other.trecv(&mut room, ADDR_UNSPEC, 5, 0), 0);
            }
            let done = one.next_beside(&other).unwrap();
            assert_eq!((done.op_context, done.flags), (context(1), flag::SEND | flag::TAGGED));
            if claims {
                assert_eq!(other.trecvmsg(&mut room, 5, flag::CLAIM), 0);
            }
            while other.read().is_err() {
                assert!(one.read().is_err());
            }
            assert!(room == sent, "{bytes} bytes are there");
        }
    }
}

/// What is logged while something is called.
fn logged(call: impl FnOnce()) -> String {
    let (read, write) = std::io::pipe().unwrap();
    let logs = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(write)).finish();
    tracing::subscriber::with_default(logs, call);
    std::io::read_to_string(read).unwrap()
}

#[test]
fn flags_that_are_refused_are_named() {
    let bench = Bench::enabled(MPICH);
    assert_eq!(bench.tsendmsg(0, b"refused", 5, flag::FENCE), -(Errno::BADFLAGS.0 as isize));
    let (refused, fabric, domain) = (-Errno::BADFLAGS.0, bench.fabric, bench.domain);
    let mut attr = AtomicAttr { count: 0, size: 0 };
    // SAFETY: as libfabric calls them; what is refused is not looked at.
    let log = logged(|| unsafe {
        let domain2 = (*(*fabric).ops).domain2;
        assert_eq!(domain2(fabric, null_mut(), null_mut(), flag::FENCE, null_mut()), refused);
        let ops = (*domain).ops;
        assert_eq!(((*ops).endpoint2)(domain, null_mut(), null_mut(), flag::PEEK, null_mut()), refused);
        assert_eq!(((*ops).query_atomic)(domain, 7, 2, &raw mut attr, flag::INJECT), refused);
    });
    for line in [
        "fi_domain2 is refused: FI_FENCE is not offered here",
        "fi_endpoint2 is refused: FI_PEEK is not offered here",
        "fi_query_atomic is refused: FI_INJECT is not offered here",
    ] {
        assert!(log.contains(line), "{line} is not in\n{log}");
    }
    assert_eq!(
        flag::names(flag::FENCE | flag::MATCH_COMPLETE | 1 << 45),
        "FI_FENCE | FI_MATCH_COMPLETE | bit 45"
    );
}

#[test]
fn a_message_that_is_too_long_is_cut_off_and_says_by_how_much() {
    let bench = Bench::enabled(MPICH);
    let mut room = [0; 4];
    assert_eq!(bench.tsend(0, b"too long", 9), 0);
    assert!(bench.next().is_ok(), "sent");
    assert_eq!(bench.trecv(&mut room, ADDR_UNSPEC, 9, 0), 0);
    assert_eq!(bench.next().unwrap_err(), EAVAIL);
    let failure = bench.failure();
    assert_eq!((failure.err, failure.olen, failure.entry.len, failure.entry.tag), (265, 4, 4, 9));
    assert_eq!(&room, b"too ");
    let mut text = [0; 64];
    // SAFETY: an open queue, and room for the text.
    let text = unsafe {
        let said = ((*(*bench.cq).ops).strerror)(bench.cq, failure.prov_errno, null(), text.as_mut_ptr(), 64);
        CStr::from_ptr(said).to_str().unwrap().to_owned()
    };
    assert_eq!(text, "a message of 8 bytes came for 4");
}

#[test]
fn a_receive_that_is_cancelled_completes_as_such_and_takes_nothing() {
    let bench = Bench::enabled(MPICH);
    let mut room = [0; 4];
    assert_eq!(bench.trecv(&mut room, ADDR_UNSPEC, 1, 0), 0);
    // SAFETY: an open endpoint.
    let cancel = || unsafe { ((*(*bench.ep).ops).cancel)(bench.ep.cast(), context(2)) };
    assert_eq!(cancel(), 0);
    assert_eq!(cancel(), -(libc::ENOENT as isize));
    assert_eq!(bench.read().unwrap_err(), EAVAIL);
    let failure = bench.failure();
    assert_eq!((failure.err, failure.entry.op_context), (libc::ECANCELED, context(2)));
}

#[test]
fn a_peek_leaves_a_message_claims_it_or_throws_it_away() {
    let bench = Bench::enabled(MPICH);
    let mut room = [0; 8];
    assert_eq!(bench.trecvmsg(&mut [], 5, flag::PEEK), 0);
    assert_eq!(bench.read().unwrap_err(), EAVAIL);
    assert_eq!(bench.failure().err, libc::ENOMSG);
    for bytes in [b"first", b"other"] {
        assert_eq!(bench.tsend(0, bytes, 5), 0);
        assert!(bench.next().is_ok());
    }
    assert_eq!(bench.peek(5, 0).len, 5);
    assert_eq!(bench.peek(5, flag::CLAIM).len, 5);
    // Claimed, the first is no longer in the way of the other.
    assert_eq!(bench.peek(5, flag::DISCARD).len, 5);
    assert_eq!(bench.trecvmsg(&mut [], 5, flag::PEEK), 0);
    assert_eq!(bench.read().unwrap_err(), EAVAIL);
    assert_eq!(bench.failure().err, libc::ENOMSG);
    assert_eq!(bench.trecvmsg(&mut room, 5, flag::CLAIM), 0);
    assert_eq!(bench.next().unwrap().0.len, 5);
    assert_eq!(&room[..5], b"first");
    assert_eq!(bench.trecvmsg(&mut room, 5, flag::CLAIM), isize::try_from(EINVAL).unwrap(), "claimed once");
}

#[test]
fn a_claim_of_a_message_whose_sender_is_gone_fails_whenever_it_comes() {
    for claims_before in [true, false] {
        let (one, other) = (Bench::enabled(MPICH), Bench::enabled(MPICH));
        let long = vec![7; 100_000];
        assert_eq!(one.tsend(one.insert(&other.name()), &long, 5), 0);
        let mut room = [0; 8];
        // Until the receiver has come for the first message, the sender may have to wait as well.
        for _ in 0..100 {
            assert!(other.read().is_err() && one.read().is_err());
        }
        assert_eq!(other.peek(5, 0).len, long.len());
        drop(one);
        assert_eq!(other.peek(5, flag::CLAIM).len, long.len());
        if !claims_before {
            assert_eq!(other.read().unwrap_err(), EAGAIN, "nobody is told of it yet");
        }
        assert_eq!(other.trecvmsg(&mut room, 5, flag::CLAIM), 0);
        assert_eq!(other.next().unwrap_err(), EAVAIL);
        let failure = other.failure();
        assert_eq!((failure.err, failure.entry.op_context), (libc::EHOSTDOWN, context(3)));
    }
}

#[test]
fn a_message_that_memory_cannot_hold_is_thrown_away_and_not_claimed() {
    let bench = Bench::enabled(MPICH);
    let bytes = (1 << 40) - 1;
    // SAFETY: addresses that nothing is behind, and nothing reads.
    let at = unsafe {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(null_mut(), bytes, libc::PROT_NONE, kind, -1, 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    for tag in [1, 2] {
        // SAFETY: an open endpoint, and bytes that stay.
        let sent =
            unsafe { ((*(*bench.ep).tagged).send)(bench.ep, at, bytes, null_mut(), 0, tag, context(1)) };
        assert_eq!(sent, 0);
    }
    assert_eq!(bench.peek(1, flag::DISCARD).len, bytes);
    assert!(bench.next().is_ok(), "it is sent");
    // Where a kernel promises whatever is asked, a claim succeeds.
    let promises = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    if promises.trim() != "1" {
        assert_eq!(bench.peek(2, 0).len, bytes);
        assert_eq!(bench.trecvmsg(&mut [], 2, flag::PEEK | flag::CLAIM), 0);
        assert_eq!(bench.read().unwrap_err(), EAVAIL);
        assert_eq!(bench.failure().err, libc::ENOMEM);
    }
}

#[test]
fn a_buffer_for_many_messages_fills_until_too_little_is_left() {
    let bench = Bench::enabled(MPICH);
    let least = 8_usize;
    let mut room = [0_u8; 20];
    // SAFETY: an open endpoint.
    unsafe {
        let set = (*(*bench.ep).ops).setopt;
        let value = (&raw const least).cast();
        assert_eq!(set(bench.ep.cast(), OPT_ENDPOINT, OPT_MIN_MULTI_RECV, value, size_of::<usize>()), 0);
        assert_eq!(set(bench.ep.cast(), OPT_ENDPOINT, 99, value, size_of::<usize>()), -libc::ENOPROTOOPT);
    }
    assert_eq!(bench.recvmsg(&mut room, 4, flag::MULTI_RECV | flag::COMPLETION), 0);
    for bytes in [b"seven77", b"another"] {
        assert_eq!(bench.inject(bytes), 0);
    }
    let (first, _) = bench.next().unwrap();
    assert_eq!((first.op_context, first.flags, first.len), (context(4), flag::RECV | flag::MSG, 7));
    let (second, _) = bench.next().unwrap();
    assert_eq!(second.flags, flag::RECV | flag::MSG | flag::MULTI_RECV, "the buffer is the program's again");
    assert_eq!(second.buf.addr() - first.buf.addr(), 7);
    assert_eq!(&room[..14], b"seven77another");
}

#[test]
fn buffers_for_many_messages_are_filled_one_after_the_other_and_each_says_that_it_is_given_back() {
    let bench = Bench::enabled(MPICH);
    let mut rooms = [[0_u8; 80], [0; 80], [0; 80]];
    let (many, flags) = (flag::RECV | flag::MSG, flag::MULTI_RECV);
    for (room, number) in rooms.iter_mut().zip(4..) {
        // The first is not reported but for its end.
        let asked = if number == 4 { flags } else { flags | flag::COMPLETION };
        assert_eq!(bench.recvmsg(room, number, asked), 0);
    }
    for length in [10, 10, 10] {
        assert_eq!(bench.inject(&[length; 10]), 0);
    }
    let (first, _) = bench.next().unwrap();
    assert_eq!((first.op_context, first.flags, first.len), (context(4), many | flags, 10));
    assert_eq!(bench.next().unwrap().0.op_context, context(5));
    for number in [6, 5] {
        // SAFETY: an open endpoint.
        assert_eq!(unsafe { ((*(*bench.ep).ops).cancel)(bench.ep.cast(), context(number)) }, 0);
        assert_eq!(bench.read().unwrap_err(), EAVAIL);
        let failure = bench.failure();
        assert_eq!((failure.err, failure.entry.op_context), (libc::ECANCELED, context(number)));
        assert_eq!(failure.entry.flags, many | flags);
    }
    let (_, last) = rooms.split_at(2);
    assert_eq!(last[0], [0; 80]);
}

#[test]
fn defaults_for_many_messages_do_not_concern_tagged_receives() {
    let bench = Bench::enabled(Hints { receive_flags: flag::COMPLETION | flag::MULTI_RECV, ..MPICH });
    let mut room = [0; 4];
    assert_eq!(bench.trecv(&mut room, ADDR_UNSPEC, 1, 0), 0);
}

#[test]
fn an_injected_message_that_is_lost_is_counted_as_a_failure() {
    let (one, other) = (Bench::enabled(MPICH), Bench::enabled(MPICH));
    assert_eq!(one.insert(&other.name()), 1);
    drop(other);
    // SAFETY: an open endpoint and counter.
    unsafe {
        assert_eq!(((*(*one.ep).tagged).inject)(one.ep, b"lost".as_ptr().cast(), 4, 1, 9), 0);
        assert_eq!(((*(*one.cntr).ops).readerr)(one.cntr), 1);
    }
}

#[test]
fn an_old_program_gets_no_more_of_a_failure_than_it_has_room_for() {
    for (version, kept) in [(version(1, 4), 77), (version(1, 5), 0)] {
        let bench = Bench::enabled(Hints { version, ..MPICH });
        assert_eq!(bench.trecvmsg(&mut [], 5, flag::PEEK), 0);
        assert_eq!(bench.failure().err_data_size, kept);
    }
}

#[test]
fn where_keys_are_the_providers_each_registration_gets_its_own() {
    let bench = Bench::enabled(Hints { mr_mode: mr_mode::BASIC, ..MPICH });
    let mut regions = [null_mut(); 2];
    for region in &mut regions {
        // SAFETY: an open domain.
        let registered = unsafe {
            ((*(*bench.domain).mr).reg)(
                bench.domain.cast(),
                null(),
                0,
                0,
                0,
                0,
                0,
                from_mut(region),
                null_mut(),
            )
        };
        assert_eq!(registered, 0);
    }
    // SAFETY: open registrations.
    unsafe { assert_ne!((*regions[0]).key, (*regions[1]).key) };
    for region in regions {
        assert_eq!(close(region.cast()), 0);
    }
}

#[test]
fn completion_data_travels_and_quiet_sends_say_nothing() {
    let quiet = Hints { transmit_flags: 0, ..MPICH };
    let bench = Bench::enabled(quiet);
    let mut room = [0; 4];
    assert_eq!(bench.trecv(&mut room, 0, 3, 0), 0);
    // SAFETY: an open endpoint.
    let sent = unsafe {
        let send = (*(*bench.ep).tagged).senddata;
        send(bench.ep, b"data".as_ptr().cast(), 4, null_mut(), 0xdead_beef, 0, 3, context(1))
    };
    assert_eq!(sent, 0);
    let (got, _) = bench.next().unwrap();
    assert_eq!((got.flags, got.data), (flag::RECV | flag::TAGGED | flag::REMOTE_CQ_DATA, 0xdead_beef));
    assert_eq!(bench.read().unwrap_err(), EAGAIN);
}

#[test]
fn waiting_for_nothing_ends_with_the_timeout() {
    let bench = Bench::enabled(MPICH);
    let mut entry = EMPTY;
    // SAFETY: an open queue and counter.
    unsafe {
        let sread = (*(*bench.cq).ops).sread;
        assert_eq!(sread(bench.cq, from_mut(&mut entry).cast(), 1, null(), 5), EAGAIN);
        assert_eq!(((*(*bench.cntr).ops).wait)(bench.cntr, 1, 5), -libc::ETIMEDOUT);
        assert_eq!(((*(*bench.cq).ops).signal)(bench.cq), 0);
        assert_eq!(sread(bench.cq, from_mut(&mut entry).cast(), 1, null(), -1), EAGAIN);
    }
}

#[test]
fn what_is_not_there_answers_so_instead_of_crashing() {
    let bench = Bench::enabled(MPICH);
    let (mut nothing, mut nothing_else) = (null_mut(), null_mut());
    let mut named = AvAttr {
        kind: AV_MAP,
        rx_ctx_bits: 0,
        count: 1,
        ep_per_node: 0,
        name: c"shared".as_ptr(),
        map_addr: null_mut(),
        flags: 0,
    };
    let nosys = -libc::ENOSYS;
    // SAFETY: open objects, and arguments that are not looked at.
    unsafe {
        let ops = &*(*bench.domain).ops;
        assert_eq!((ops.av_open)(bench.domain, &raw mut named, &raw mut nothing, null_mut()), nosys);
        assert_eq!((ops.av_open)(bench.domain, null_mut(), &raw mut nothing, null_mut()), EINVAL);
        assert_eq!((ops.stx_ctx)(bench.domain, null_mut(), &raw mut nothing_else, null_mut()), nosys);
        let (mut mr, mut twin) = (null_mut(), null_mut());
        let register = (*(*bench.domain).mr).reg;
        let domain = bench.domain.cast();
        assert_eq!(register(domain, null(), 0, 0, 0, 42, 0, &raw mut mr, null_mut()), 0);
        assert_eq!(
            register(domain, null(), 0, 0, 0, 42, 0, &raw mut twin, null_mut()),
            -266,
            "the key is taken"
        );
        assert_eq!((*mr).key, 42);
        assert_eq!(close(mr.cast()), 0);
    }
}

#[test]
fn an_endpoint_that_is_gone_fails_a_send_with_its_name_in_words() {
    let (one, other) = (Bench::enabled(MPICH), Bench::enabled(MPICH));
    let to = one.insert(&other.name());
    drop(other);
    assert_eq!(one.tsend(to, b"hello?", 1), 0);
    assert_eq!(one.next().unwrap_err(), EAVAIL);
    assert_eq!(one.failure().err, libc::EHOSTDOWN);
}

/// A registration of a test's memory.
struct Registered(*mut FidMr);

impl Registered {
    fn key(&self) -> u64 {
        // SAFETY: open.
        unsafe { (*self.0).key }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        assert_eq!(close(self.0.cast()), 0);
    }
}

const ALL: u64 = flag::REMOTE_READ | flag::REMOTE_WRITE;

impl Bench {
    fn register(&self, memory: &mut [u8], access: u64, key: u64) -> Registered {
        let mut mr = null_mut();
        let (at, bytes) = (memory.as_mut_ptr().cast(), memory.len());
        // SAFETY: an open domain; tests look at the memory when nothing is under way.
        let registered = unsafe {
            let register = (*(*self.domain).mr).reg;
            register(self.domain.cast(), at, bytes, access, 0, key, 0, &raw mut mr, null_mut())
        };
        assert_eq!(registered, 0);
        Registered(mr)
    }

    fn write(&self, bytes: &[u8], to: u64, address: u64, key: u64) -> isize {
        let at = bytes.as_ptr().cast();
        // SAFETY: tests keep the bytes until the completion.
        unsafe {
            ((*(*self.ep).rma).write)(self.ep, at, bytes.len(), null_mut(), to, address, key, context(5))
        }
    }

    fn fetch(&self, bytes: &mut [u8], to: u64, address: u64, key: u64) -> isize {
        let at = bytes.as_mut_ptr().cast();
        // SAFETY: as above.
        unsafe {
            ((*(*self.ep).rma).read)(self.ep, at, bytes.len(), null_mut(), to, address, key, context(6))
        }
    }

    /// The next completion, while the other goes on too.
    fn next_beside(&self, other: &Self) -> Result<CqTaggedEntry, isize> {
        let late = Instant::now() + Duration::from_secs(5);
        loop {
            // SAFETY: an open counter, which makes progress.
            unsafe { ((*(*other.cntr).ops).read)(other.cntr) };
            match self.read() {
                Err(EAGAIN) if Instant::now() < late => {}
                read => return read.map(|(entry, _)| entry),
            }
        }
    }
}

/// Two that know each other, and where the first finds the second.
fn pair() -> (Bench, Bench, u64) {
    let (one, other) = (Bench::enabled(MPICH), Bench::enabled(MPICH));
    let to = one.insert(&other.name());
    other.insert(&one.name());
    (one, other, to)
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 % 251) as u8).collect()
}

#[test]
fn what_is_written_to_a_peer_stands_there_and_is_read_back() {
    let (one, other, to) = pair();
    let mut memory = vec![0; 1 << 20];
    let at = memory.as_ptr();
    let region = other.register(&mut memory, ALL, 42);
    for bytes in [0, 1, 8, INLINE, INLINE + 1, 100_000, (1 << 20) - 3] {
        let (sent, mut came) = (pattern(bytes), vec![0; bytes]);
        assert_eq!(one.write(&sent, to, 3, region.key()), 0);
        let done = one.next_beside(&other).unwrap();
        assert_eq!((done.op_context, done.flags), (context(5), flag::RMA | flag::WRITE));
        // SAFETY: the write is complete.
        assert!(unsafe { std::slice::from_raw_parts(at.add(3), bytes) } == sent, "{bytes} bytes written");
        assert_eq!(one.fetch(&mut came, to, 3, region.key()), 0);
        let done = one.next_beside(&other).unwrap();
        assert_eq!((done.op_context, done.flags), (context(6), flag::RMA | flag::READ));
        assert!(came == sent, "{bytes} bytes read");
    }
    // SAFETY: an open counter.
    unsafe { assert_eq!(((*(*one.cntr).ops).read)(one.cntr), 14) };
}

#[test]
fn what_peers_ask_for_is_done_while_the_program_calls_nothing() {
    let (one, other, to) = pair();
    let mut memory = vec![0; 1 << 20];
    let region = other.register(&mut memory, ALL, 42);
    for bytes in [8, 100_000, 1 << 20] {
        let (sent, mut came) = (pattern(bytes), vec![0; bytes]);
        assert_eq!(one.write(&sent, to, 0, region.key()), 0);
        assert!(one.next().is_ok(), "{bytes} bytes written");
        assert_eq!(one.fetch(&mut came, to, 0, region.key()), 0);
        assert!(one.next().is_ok(), "{bytes} bytes read");
        assert!(came == sent, "{bytes} bytes");
    }
    drop(region);
    // What is registered later is reached too, and messages are as before.
    let region = other.register(&mut memory, ALL, 43);
    assert_eq!(one.write(&[7; 8], to, 0, region.key()), 0);
    assert!(one.next().is_ok());
    drop(region);
    assert_eq!(memory[..8], [7; 8]);
    let mut room = [0; 3];
    assert_eq!(one.tsend(to, b"abc", 1), 0);
    assert_eq!(other.trecv(&mut room, ADDR_UNSPEC, 1, 0), 0);
    assert!(other.next().is_ok() && room == *b"abc");
}

#[test]
fn reads_and_writes_in_pieces_are_put_together() {
    let (one, other, to) = pair();
    let mut memory = vec![0; 20_000];
    let region = other.register(&mut memory, ALL, 1);
    let sent = pattern(20_000);
    let mut came = vec![0; 20_000];
    let list = |bytes: &[u8]| {
        [0..7, 7..9000, 9000..20_000].map(|range| iovec {
            iov_base: bytes[range.clone()].as_ptr().cast_mut().cast(),
            iov_len: range.len(),
        })
    };
    let there = RmaIov { addr: 0, len: 20_000, key: region.key() };
    let msg = |pieces: &[iovec]| MsgRma {
        msg_iov: pieces.as_ptr(),
        desc: null_mut(),
        iov_count: pieces.len(),
        addr: to,
        rma_iov: &raw const there,
        rma_iov_count: 1,
        context: context(7),
        data: 0,
    };
    let (out, back) = (list(&sent), list(&came));
    let (written, read) = (msg(&out), msg(&back));
    // SAFETY: an open endpoint; the bytes stay until the completions.
    unsafe {
        let ops = &*(*one.ep).rma;
        assert_eq!((ops.writemsg)(one.ep, &raw const written, flag::COMPLETION), 0);
        assert_eq!(one.next_beside(&other).unwrap().op_context, context(7));
        assert_eq!((ops.readmsg)(one.ep, &raw const read, flag::COMPLETION), 0);
        assert_eq!(one.next_beside(&other).unwrap().op_context, context(7));
        let two = MsgRma { rma_iov_count: 2, ..msg(&out) };
        assert_eq!((ops.writemsg)(one.ep, &raw const two, 0), EINVAL as isize);
    }
    assert!(came.iter_mut().zip(&sent).all(|(came, sent)| came == sent));
}

#[test]
fn what_is_not_registered_for_it_is_refused_and_stays_as_it_is() {
    let (one, other, to) = pair();
    let (mut memory, mut wide) = (vec![7; 20_000], vec![1; 20_000]);
    let before = memory.clone();
    let at = memory.as_ptr();
    let region = other.register(&mut memory[..10_000], flag::REMOTE_READ, 9);
    let (key, rejected) = (region.key(), libc::EKEYREJECTED);
    for (bytes, address, key, errno) in [
        (8, 0, key, libc::EACCES),
        (20_000, 0, key, libc::EACCES),
        (8, 0, key + 1, rejected),
        (20_000, 0, key + 1, rejected),
    ] {
        assert_eq!(one.write(&wide[..bytes], to, address, key), 0);
        assert_eq!(one.next_beside(&other).unwrap_err(), EAVAIL);
        let failure = one.failure();
        assert_eq!((failure.err, failure.entry.op_context), (errno, context(5)));
    }
    for (bytes, address) in [(10_001, 0), (1, 10_000), (8, u64::MAX - 3)] {
        assert_eq!(one.fetch(&mut wide[..bytes], to, address, key), 0);
        assert_eq!(one.next_beside(&other).unwrap_err(), EAVAIL);
        assert_eq!(one.failure().err, libc::EACCES);
    }
    // SAFETY: nothing is under way.
    assert!(unsafe { std::slice::from_raw_parts(at, 20_000) } == before);
    assert_eq!(one.fetch(&mut wide[..10_000], to, 0, key), 0);
    assert!(one.next_beside(&other).is_ok(), "what was refused stands in no other one's way");
    // SAFETY: an open counter.
    unsafe { assert_eq!(((*(*one.cntr).ops).readerr)(one.cntr), 7) };
}

#[test]
fn whoever_is_written_to_is_told_with_data_and_counts() {
    let (one, other, to) = pair();
    let mut memory = vec![0; 8];
    let region = other.register(&mut memory, ALL, 1);
    assert_eq!(bind(region.0.cast(), other.cntr.cast(), flag::REMOTE_WRITE), 0);
    // SAFETY: an open endpoint; injected bytes are copied.
    unsafe {
        let ops = &*(*one.ep).rma;
        assert_eq!((ops.inject)(one.ep, b"quietly".as_ptr().cast(), 7, to, 0, region.key()), 0);
        assert_eq!((ops.injectdata)(one.ep, b"loud".as_ptr().cast(), 4, 0xfeed, to, 0, region.key()), 0);
    }
    let late = Instant::now() + Duration::from_secs(5);
    let told = loop {
        assert_eq!(one.read().unwrap_err(), EAGAIN, "nobody is told of what is injected");
        match other.read() {
            Ok((told, _)) => break told,
            Err(_) => assert!(Instant::now() < late),
        }
    };
    assert_eq!(told.flags, flag::RMA | flag::REMOTE_WRITE | flag::REMOTE_CQ_DATA);
    assert_eq!((told.data, told.len), (0xfeed, 4));
    // SAFETY: open counters.
    unsafe {
        assert_eq!(((*(*other.cntr).ops).read)(other.cntr), 2);
        while ((*(*one.cntr).ops).read)(one.cntr) < 2 {
            assert!(other.read().is_err() && Instant::now() < late);
        }
    }
    drop(region);
    assert_eq!(memory, b"loudtly\0");
}

#[test]
fn atomics_fetch_compare_and_say_what_there_is() {
    let (word, double, long_double): (c_int, c_int, c_int) = (7, 9, 12);
    let (one, other, to) = pair();
    let mut memory = 40_u64.to_le_bytes().to_vec();
    let region = other.register(&mut memory, ALL, 1);
    let (operand, compare, mut before) = (2_u64, 42_u64, 0_u64);
    let (at, back) = ((&raw const operand).cast(), (&raw mut before).cast());
    let (none, key, ep) = (null_mut(), region.key(), one.ep);
    // SAFETY: an open endpoint; operands and results stay until the completions.
    unsafe {
        let ops = &*(*ep).atomic;
        assert_eq!((ops.write)(ep, at, 1, none, to, 0, key, word, 2, context(8)), 0);
        assert_eq!(one.next_beside(&other).unwrap().flags, flag::ATOMIC | flag::WRITE);
        assert_eq!((ops.readwrite)(ep, null(), 1, none, back, none, to, 0, key, word, 10, context(8)), 0);
        assert_eq!(one.next_beside(&other).unwrap().flags, flag::ATOMIC | flag::READ);
        assert_eq!(before, 42);
        let compared = (&raw const compare).cast();
        let swap = ops.compwrite;
        assert_eq!(swap(ep, at, 1, none, compared, none, back, none, to, 0, key, word, 12, context(8)), 0);
        assert!(one.next_beside(&other).is_ok());
        assert_eq!(swap(ep, at, 1, none, compared, none, back, none, to, 0, key, word, 12, context(8)), 0);
        assert!(one.next_beside(&other).is_ok());
        assert_eq!(before, 2, "it was swapped before, and not again");
        let mut count = 0;
        assert_eq!((ops.writevalid)(ep, double, 2, &raw mut count), 0);
        assert_eq!(count, INLINE / 8);
        assert_eq!((ops.compwritevalid)(ep, double, 12, &raw mut count), 0);
        assert_eq!(count, INLINE / 16);
        let absent = -libc::EOPNOTSUPP;
        assert_eq!((ops.writevalid)(ep, double, 6, &raw mut count), absent, "bits of a double");
        assert_eq!((ops.readwritevalid)(ep, long_double, 2, &raw mut count), absent);
        let refused = (ops.write)(ep, at, 1, none, to, 0, key, double, 6, context(8));
        assert_eq!(refused, absent as isize);
        let long = (ops.write)(ep, at, INLINE, none, to, 0, key, word, 2, context(8));
        assert_eq!(long, -(libc::EMSGSIZE as isize));
        let mut attr = AtomicAttr { count: 0, size: 0 };
        let query = (*(*one.domain).ops).query_atomic;
        assert_eq!(query(one.domain, word, 12, &raw mut attr, flag::COMPARE_ATOMIC), 0);
        assert_eq!((attr.count, attr.size), (INLINE / 16, 8));
    }
    drop(region);
    assert_eq!(memory, 2_u64.to_le_bytes());
}

#[test]
fn writes_land_in_the_order_in_which_they_were_asked_for() {
    let (one, other, to) = pair();
    let mut memory = vec![0; INLINE];
    let region = other.register(&mut memory, ALL, 1);
    let sent: Vec<_> = (0..600_usize).map(|number| vec![number as u8; INLINE]).collect();
    // So many are beyond the window of what is eager, and are announced.
    for bytes in &sent {
        assert_eq!(one.write(bytes, to, 0, region.key()), 0);
    }
    for _ in &sent {
        assert!(one.next_beside(&other).is_ok());
    }
    drop(region);
    assert!(memory == sent[599]);
}

#[test]
fn no_more_are_under_way_than_an_endpoint_has_room_for() {
    let (one, other, to) = pair();
    let mut memory = vec![0; 8];
    let region = other.register(&mut memory, ALL, 1);
    for _ in 0..1024 {
        assert_eq!(one.write(&[1], to, 0, region.key()), 0);
    }
    assert_eq!(one.write(&[1], to, 0, region.key()), EAGAIN);
    for _ in 0..1024 {
        assert!(one.next_beside(&other).is_ok());
    }
    assert_eq!(one.write(&[1], to, 0, region.key()), 0);
    assert!(one.next_beside(&other).is_ok());
}

#[test]
fn an_operation_on_the_memory_of_one_that_is_gone_fails() {
    let (one, other, to) = pair();
    drop(other);
    for bytes in [8, 100_000] {
        assert_eq!(one.write(&vec![0; bytes], to, 0, 1), 0);
        assert_eq!(one.next().unwrap_err(), EAVAIL);
        assert_eq!(one.failure().err, libc::EHOSTDOWN);
    }
    let mut room = [0; 8];
    assert_eq!(one.fetch(&mut room, to, 0, 1), 0);
    assert_eq!(one.next().unwrap_err(), EAVAIL);
    assert_eq!(one.failure().err, libc::EHOSTDOWN);
}

#[test]
fn where_keys_are_the_providers_addresses_are_the_programs_own() {
    let (one, other) = (Bench::enabled(MPICH), Bench::enabled(Hints { mr_mode: mr_mode::BASIC, ..MPICH }));
    let to = one.insert(&other.name());
    let mut memory = vec![0; 8];
    let at = memory.as_ptr().addr() as u64;
    let region = other.register(&mut memory, ALL, 0);
    assert_eq!(one.write(&[9; 4], to, at + 4, region.key()), 0);
    assert!(one.next_beside(&other).is_ok());
    drop(region);
    assert_eq!(memory, [0, 0, 0, 0, 9, 9, 9, 9]);
}

/// Numbers that come again with their seed.
struct Dice(u64);

impl Dice {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 13 ^ self.0 << 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }
}

/// A note that is almost one.
fn almost(dice: &mut Dice, key: u64, number: u64) -> Vec<u8> {
    let bytes = [0, 1, 8, 64, INLINE as u64, 20_000, u64::MAX][dice.below(7) as usize];
    let address = [0, 1, 63, 64, 1000, 1020, u64::MAX - 7][dice.below(7) as usize];
    let carried = bytes.saturating_mul(dice.below(3)).min(2 * INLINE as u64);
    let mut note = Vec::new();
    for word in [number, key + dice.below(8) / 7, address, bytes] {
        note.extend(word.to_le_bytes());
    }
    note.extend([0, 0, 0, 0, dice.below(7) as u8, dice.below(20) as u8, dice.below(17) as u8, 0]);
    note.resize(note.len() + carried as usize, 0xee);
    if dice.below(4) == 0 {
        note.truncate(dice.below(60) as usize);
    }
    note
}

#[test]
fn a_peer_that_asks_for_whatever_it_likes_reaches_nothing_that_is_not_registered() {
    let mut answers = 0;
    for seed in 0..20 {
        let victim = Bench::enabled(MPICH);
        let mut memory = vec![7; 4096];
        let at = memory.as_ptr();
        let region = victim.register(&mut memory[1024..2048], ALL, 3);
        let mut hostile =
            PoolEndpoint::open(Arc::clone(session::session().unwrap().pool()), EndpointOptions::default())
                .unwrap();
        let to = hostile.connect(Address::decode(victim.name()).unwrap());
        let (mut dice, mut turn) = (Dice(seed), 0);
        let operation = || aside(Role::SendNote);
        // In the last rounds answers come that a thread beside the program has still to give.
        for number in 0..300 {
            if number < 200 {
                let (kind, tag) = match dice.below(10) {
                    0 => (3 + dice.below(2) as u8, dice.below(number + 1)),
                    1 => (2, dice.word()),
                    _ => {
                        turn += 1;
                        (2, turn - 1)
                    }
                };
                let label = Label { kind, tag, data: None };
                let note = almost(&mut dice, region.key(), number);
                hostile.send(to, label, IoBuffer::Held(note), operation()).unwrap();
                let answer = Filter { from: Some(to), kind: 4, tag: 0, ignore: u64::MAX };
                hostile.receive(answer, IoBuffer::Held(vec![0; 100]), operation());
            }
            let mut done = hostile.step().unwrap();
            while let Some(over) = done {
                answers += usize::from(matches!(over, Completion::Received { .. }));
                done = hostile.completion();
            }
            assert_ne!(victim.read().unwrap_err(), -256, "it panicked with seed {seed}");
        }
        // SAFETY: nobody writes it now.
        let now = unsafe { std::slice::from_raw_parts(at, 4096) };
        assert!(now[..1024] == [7; 1024] && now[2048..] == [7; 2048], "it wrote elsewhere with seed {seed}");
    }
    assert!(answers > 100, "only {answers} notes were understood");
}
