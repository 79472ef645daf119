//! libfabric's C interface, as far as the provider meets it: the layout that 1.17 and every later release share.
//!
//! A structure that grew after 1.17 stands here without what it gained, and is made by libfabric alone.
#![cfg_attr(not(test), expect(dead_code, reason = "the layout is libfabric's, whatever of it is read here"))]

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

pub(crate) use libc::iovec;

pub(crate) const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

/// What a capability, an operation or a completion is about.
pub(crate) mod flag {
    pub(crate) const MSG: u64 = 1 << 1;
    pub(crate) const RMA: u64 = 1 << 2;
    pub(crate) const TAGGED: u64 = 1 << 3;
    pub(crate) const ATOMIC: u64 = 1 << 4;
    pub(crate) const READ: u64 = 1 << 8;
    pub(crate) const WRITE: u64 = 1 << 9;
    pub(crate) const RECV: u64 = 1 << 10;
    pub(crate) const SEND: u64 = 1 << 11;
    pub(crate) const REMOTE_READ: u64 = 1 << 12;
    pub(crate) const REMOTE_WRITE: u64 = 1 << 13;
    pub(crate) const MULTI_RECV: u64 = 1 << 16;
    pub(crate) const REMOTE_CQ_DATA: u64 = 1 << 17;
    pub(crate) const MORE: u64 = 1 << 18;
    pub(crate) const PEEK: u64 = 1 << 19;
    pub(crate) const FENCE: u64 = 1 << 21;
    pub(crate) const COMPLETION: u64 = 1 << 24;
    pub(crate) const INJECT: u64 = 1 << 25;
    pub(crate) const INJECT_COMPLETE: u64 = 1 << 26;
    pub(crate) const TRANSMIT_COMPLETE: u64 = 1 << 27;
    pub(crate) const DELIVERY_COMPLETE: u64 = 1 << 28;
    pub(crate) const MATCH_COMPLETE: u64 = 1 << 31;
    pub(crate) const LOCAL_COMM: u64 = 1 << 51;
    pub(crate) const REMOTE_COMM: u64 = 1 << 52;
    pub(crate) const RMA_EVENT: u64 = 1 << 56;
    pub(crate) const SOURCE: u64 = 1 << 57;
    pub(crate) const DIRECTED_RECV: u64 = 1 << 59;
    /// Of a tagged receive: takes the message that a peek set aside.
    pub(crate) const CLAIM: u64 = 1 << 59;
    /// Of a tagged receive: throws the message away.
    pub(crate) const DISCARD: u64 = 1 << 58;
    /// Of a question about atomics: those that fetch, and those that compare.
    pub(crate) const FETCH_ATOMIC: u64 = 1 << 58;
    pub(crate) const COMPARE_ATOMIC: u64 = 1 << 59;
    /// Of a queue that is bound: completions only where an operation asks.
    pub(crate) const SELECTIVE_COMPLETION: u64 = 1 << 59;

    /// The flags of operations by their bits. Above 57 a bit has a name of its own in each kind of call.
    const NAMES: &[(u32, &str)] = &[
        (1, "FI_MSG"),
        (2, "FI_RMA"),
        (3, "FI_TAGGED"),
        (4, "FI_ATOMIC"),
        (5, "FI_MULTICAST"),
        (6, "FI_COLLECTIVE"),
        (8, "FI_READ"),
        (9, "FI_WRITE"),
        (10, "FI_RECV"),
        (11, "FI_SEND"),
        (12, "FI_REMOTE_READ"),
        (13, "FI_REMOTE_WRITE"),
        (16, "FI_MULTI_RECV"),
        (17, "FI_REMOTE_CQ_DATA"),
        (18, "FI_MORE"),
        (19, "FI_PEEK"),
        (20, "FI_TRIGGER"),
        (21, "FI_FENCE"),
        (22, "FI_PRIORITY"),
        (24, "FI_COMPLETION"),
        (25, "FI_INJECT"),
        (26, "FI_INJECT_COMPLETE"),
        (27, "FI_TRANSMIT_COMPLETE"),
        (28, "FI_DELIVERY_COMPLETE"),
        (29, "FI_AFFINITY"),
        (30, "FI_COMMIT_COMPLETE"),
        (31, "FI_MATCH_COMPLETE"),
        (47, "FI_HMEM"),
        (48, "FI_VARIABLE_MSG"),
        (49, "FI_RMA_PMEM"),
        (50, "FI_SOURCE_ERR"),
        (51, "FI_LOCAL_COMM"),
        (52, "FI_REMOTE_COMM"),
        (53, "FI_SHARED_AV"),
        (56, "FI_RMA_EVENT"),
        (57, "FI_SOURCE"),
        (58, "FI_DISCARD"),
        (59, "FI_CLAIM"),
    ];

    /// These flags as libfabric names them.
    pub(crate) fn names(flags: u64) -> String {
        let bits = (0..u64::BITS).filter(|bit| flags & 1 << bit != 0);
        let name = |bit| NAMES.iter().find(|(known, _)| *known == bit).map(|(_, name)| (*name).to_owned());
        let names: Vec<_> = bits.map(|bit| name(bit).unwrap_or_else(|| format!("bit {bit}"))).collect();
        names.join(" | ")
    }
}

pub(crate) mod order {
    pub(crate) const SAS: u64 = 1 << 8;
    /// Reads after reads, reads after writes, writes after reads and writes after writes: of everything one-sided, of what is
    /// not atomic, and of what is.
    pub(crate) const ONE_SIDED: u64 = 0b11011 | 0xf << 32 | 0xf << 36;
}

pub(crate) mod mr_mode {
    pub(crate) const BASIC: c_int = 1 << 0;
    pub(crate) const SCALABLE: c_int = 1 << 1;
    pub(crate) const ENDPOINT: c_int = 1 << 9;

    use std::ffi::c_int;
}

/// Enumerations, whose later values are not known here: numbers, as C has them.
pub(crate) const EP_UNSPEC: c_int = 0;
pub(crate) const EP_RDM: c_int = 3;
pub(crate) const AV_UNSPEC: c_int = 0;
pub(crate) const AV_MAP: c_int = 1;
pub(crate) const AV_TABLE: c_int = 2;
pub(crate) const PROGRESS_UNSPEC: c_int = 0;
pub(crate) const PROGRESS_AUTO: c_int = 1;
pub(crate) const PROGRESS_MANUAL: c_int = 2;
pub(crate) const THREAD_UNSPEC: c_int = 0;
pub(crate) const THREAD_SAFE: c_int = 1;
pub(crate) const THREAD_DOMAIN: c_int = 3;
pub(crate) const RM_ENABLED: c_int = 2;
pub(crate) const FORMAT_UNSPEC: u32 = 0;
/// Marks what is a provider's own.
pub(crate) const PROV_SPECIFIC: u32 = 1 << 31;
pub(crate) const ADDR_UNSPEC: u64 = u64::MAX;
pub(crate) const ADDR_NOTAVAIL: u64 = u64::MAX;
/// The fields of a tag are runs of the same bit: here each bit is one.
pub(crate) const TAG_GENERIC: u64 = 0xaaaa_aaaa_aaaa_aaaa;

pub(crate) const CQ_FORMAT_UNSPEC: c_int = 0;
pub(crate) const CQ_FORMAT_CONTEXT: c_int = 1;
pub(crate) const CQ_FORMAT_MSG: c_int = 2;
pub(crate) const CQ_FORMAT_DATA: c_int = 3;
pub(crate) const CQ_FORMAT_TAGGED: c_int = 4;

pub(crate) const WAIT_NONE: c_int = 0;
pub(crate) const WAIT_UNSPEC: c_int = 1;
pub(crate) const WAIT_YIELD: c_int = 5;

pub(crate) const ENABLE: c_int = 6;
pub(crate) const OPT_ENDPOINT: c_int = 0;
pub(crate) const OPT_MIN_MULTI_RECV: c_int = 0;
pub(crate) const CNTR_EVENTS_COMP: c_int = 0;

/// What an object is, in its first word.
pub(crate) mod class {
    pub(crate) const FABRIC: usize = 1;
    pub(crate) const DOMAIN: usize = 2;
    pub(crate) const EP: usize = 3;
    pub(crate) const AV: usize = 11;
    pub(crate) const MR: usize = 12;
    pub(crate) const EQ: usize = 13;
    pub(crate) const CQ: usize = 14;
    pub(crate) const CNTR: usize = 15;
}

/// Why a call failed: an errno, or one of libfabric's own from 256 on. Calls return it negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    pub(crate) const NOENT: Self = Self(libc::ENOENT);
    pub(crate) const IO: Self = Self(libc::EIO);
    pub(crate) const AGAIN: Self = Self(libc::EAGAIN);
    pub(crate) const NOMEM: Self = Self(libc::ENOMEM);
    pub(crate) const BUSY: Self = Self(libc::EBUSY);
    pub(crate) const INVAL: Self = Self(libc::EINVAL);
    pub(crate) const NOSPC: Self = Self(libc::ENOSPC);
    pub(crate) const NOSYS: Self = Self(libc::ENOSYS);
    pub(crate) const NOMSG: Self = Self(libc::ENOMSG);
    pub(crate) const NODATA: Self = Self(libc::ENODATA);
    pub(crate) const MSGSIZE: Self = Self(libc::EMSGSIZE);
    pub(crate) const NOPROTOOPT: Self = Self(libc::ENOPROTOOPT);
    pub(crate) const OPNOTSUPP: Self = Self(libc::EOPNOTSUPP);
    pub(crate) const TIMEDOUT: Self = Self(libc::ETIMEDOUT);
    pub(crate) const HOSTDOWN: Self = Self(libc::EHOSTDOWN);
    pub(crate) const NOTCONN: Self = Self(libc::ENOTCONN);
    pub(crate) const CANCELED: Self = Self(libc::ECANCELED);
    pub(crate) const ACCES: Self = Self(libc::EACCES);
    pub(crate) const KEYREJECTED: Self = Self(libc::EKEYREJECTED);
    pub(crate) const NOKEY: Self = Self(266);
    pub(crate) const OTHER: Self = Self(256);
    pub(crate) const TOOSMALL: Self = Self(257);
    pub(crate) const OPBADSTATE: Self = Self(258);
    pub(crate) const AVAIL: Self = Self(259);
    pub(crate) const BADFLAGS: Self = Self(260);
    pub(crate) const DOMAIN: Self = Self(262);
    pub(crate) const NOCQ: Self = Self(263);
    pub(crate) const TRUNC: Self = Self(265);
    pub(crate) const NOAV: Self = Self(267);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TxAttr {
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) op_flags: u64,
    pub(crate) msg_order: u64,
    pub(crate) comp_order: u64,
    pub(crate) inject_size: usize,
    pub(crate) size: usize,
    pub(crate) iov_limit: usize,
    pub(crate) rma_iov_limit: usize,
    pub(crate) tclass: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RxAttr {
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) op_flags: u64,
    pub(crate) msg_order: u64,
    pub(crate) comp_order: u64,
    pub(crate) total_buffered_recv: usize,
    pub(crate) size: usize,
    pub(crate) iov_limit: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EpAttr {
    pub(crate) kind: c_int,
    pub(crate) protocol: u32,
    pub(crate) protocol_version: u32,
    pub(crate) max_msg_size: usize,
    pub(crate) msg_prefix_size: usize,
    pub(crate) max_order_raw_size: usize,
    pub(crate) max_order_war_size: usize,
    pub(crate) max_order_waw_size: usize,
    pub(crate) mem_tag_format: u64,
    pub(crate) tx_ctx_cnt: usize,
    pub(crate) rx_ctx_cnt: usize,
    pub(crate) auth_key_size: usize,
    pub(crate) auth_key: *mut u8,
}

#[repr(C)]
pub(crate) struct DomainAttr {
    pub(crate) domain: *mut Fid,
    pub(crate) name: *mut c_char,
    pub(crate) threading: c_int,
    pub(crate) control_progress: c_int,
    pub(crate) data_progress: c_int,
    pub(crate) resource_mgmt: c_int,
    pub(crate) av_type: c_int,
    pub(crate) mr_mode: c_int,
    pub(crate) mr_key_size: usize,
    pub(crate) cq_data_size: usize,
    pub(crate) cq_cnt: usize,
    pub(crate) ep_cnt: usize,
    pub(crate) tx_ctx_cnt: usize,
    pub(crate) rx_ctx_cnt: usize,
    pub(crate) max_ep_tx_ctx: usize,
    pub(crate) max_ep_rx_ctx: usize,
    pub(crate) max_ep_stx_ctx: usize,
    pub(crate) max_ep_srx_ctx: usize,
    pub(crate) cntr_cnt: usize,
    pub(crate) mr_iov_limit: usize,
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) auth_key: *mut u8,
    pub(crate) auth_key_size: usize,
    pub(crate) max_err_data: usize,
    pub(crate) mr_cnt: usize,
    pub(crate) tclass: u32,
}

#[repr(C)]
pub(crate) struct FabricAttr {
    pub(crate) fabric: *mut Fid,
    pub(crate) name: *mut c_char,
    pub(crate) prov_name: *mut c_char,
    pub(crate) prov_version: u32,
    pub(crate) api_version: u32,
}

#[repr(C)]
pub(crate) struct Info {
    pub(crate) next: *mut Info,
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) addr_format: u32,
    pub(crate) src_addrlen: usize,
    pub(crate) dest_addrlen: usize,
    pub(crate) src_addr: *mut c_void,
    pub(crate) dest_addr: *mut c_void,
    pub(crate) handle: *mut Fid,
    pub(crate) tx_attr: *mut TxAttr,
    pub(crate) rx_attr: *mut RxAttr,
    pub(crate) ep_attr: *mut EpAttr,
    pub(crate) domain_attr: *mut DomainAttr,
    pub(crate) fabric_attr: *mut FabricAttr,
    pub(crate) nic: *mut c_void,
}

/// What every object begins with.
#[repr(C)]
pub(crate) struct Fid {
    pub(crate) class: usize,
    pub(crate) context: *mut c_void,
    pub(crate) ops: *const Ops,
}

#[repr(C)]
pub(crate) struct Ops {
    pub(crate) size: usize,
    pub(crate) close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub(crate) bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub(crate) control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
    pub(crate) ops_open:
        unsafe extern "C" fn(*mut Fid, *const c_char, u64, *mut *mut c_void, *mut c_void) -> c_int,
    pub(crate) tostr: unsafe extern "C" fn(*const Fid, *mut c_char, usize) -> c_int,
    pub(crate) ops_set: unsafe extern "C" fn(*mut Fid, *const c_char, u64, *mut c_void, *mut c_void) -> c_int,
}

impl Ops {
    /// Of an object that can be closed, and no more.
    pub(crate) const fn closing(close: unsafe extern "C" fn(*mut Fid) -> c_int) -> Self {
        Self {
            size: size_of::<Self>(),
            close,
            bind: Absent::ABSENT,
            control: Absent::ABSENT,
            ops_open: Absent::ABSENT,
            tostr: Absent::ABSENT,
            ops_set: Absent::ABSENT,
        }
    }
}

/// A function that this provider does not have: it answers -FI_ENOSYS.
pub(crate) trait Absent {
    const ABSENT: Self;
}

macro_rules! absent {
    ($($result:ty: $($argument:ident)*;)*) => {$(
        impl<$($argument),*> Absent for unsafe extern "C" fn($($argument),*) -> $result {
            const ABSENT: Self = {
                unsafe extern "C" fn absent<$($argument),*>($(_: $argument),*) -> $result {
                    -(libc::ENOSYS as $result)
                }
                absent
            };
        }
    )*};
}

absent! {
    c_int: A;
    c_int: A B;
    c_int: A B C;
    c_int: A B C D;
    c_int: A B C D E;
    c_int: A B C D E F;
    c_int: A B C D E F G;
    c_int: A B C D E F G H;
    c_int: A B C D E F G H I;
    isize: A;
    isize: A B C;
    isize: A B C D;
    isize: A B C D E;
    isize: A B C D E F;
    isize: A B C D E F G;
    isize: A B C D E F G H;
    isize: A B C D E F G H I;
    isize: A B C D E F G H I J;
    isize: A B C D E F G H I J K;
    isize: A B C D E F G H I J K L;
    isize: A B C D E F G H I J K L M;
    isize: A B C D E F G H I J K L M N;
}

/// Tables of functions, each behind the size of what its libfabric knows.
macro_rules! tables {
    ($($table:ident { $($call:ident($($argument:ty),*) -> $result:ty;)* })*) => {$(
        #[repr(C)]
        pub(crate) struct $table {
            pub(crate) size: usize,
            $(pub(crate) $call: unsafe extern "C" fn($($argument),*) -> $result,)*
        }
    )*};
}

tables! {
    OpsFabric {
        domain(*mut FidFabric, *mut Info, *mut *mut FidDomain, *mut c_void) -> c_int;
        passive_ep(*mut FidFabric, *mut Info, *mut *mut c_void, *mut c_void) -> c_int;
        eq_open(*mut FidFabric, *mut EqAttr, *mut *mut FidEq, *mut c_void) -> c_int;
        wait_open(*mut FidFabric, *mut c_void, *mut *mut c_void) -> c_int;
        trywait(*mut FidFabric, *mut *mut Fid, c_int) -> c_int;
        domain2(*mut FidFabric, *mut Info, *mut *mut FidDomain, u64, *mut c_void) -> c_int;
    }

    OpsDomain {
        av_open(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, *mut c_void) -> c_int;
        cq_open(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, *mut c_void) -> c_int;
        endpoint(*mut FidDomain, *mut Info, *mut *mut FidEp, *mut c_void) -> c_int;
        scalable_ep(*mut FidDomain, *mut Info, *mut *mut FidEp, *mut c_void) -> c_int;
        cntr_open(*mut FidDomain, *mut CntrAttr, *mut *mut FidCntr, *mut c_void) -> c_int;
        poll_open(*mut FidDomain, *mut c_void, *mut *mut c_void) -> c_int;
        stx_ctx(*mut FidDomain, *mut TxAttr, *mut *mut c_void, *mut c_void) -> c_int;
        srx_ctx(*mut FidDomain, *mut RxAttr, *mut *mut FidEp, *mut c_void) -> c_int;
        query_atomic(*mut FidDomain, c_int, c_int, *mut AtomicAttr, u64) -> c_int;
        query_collective(*mut FidDomain, c_int, *mut c_void, u64) -> c_int;
        endpoint2(*mut FidDomain, *mut Info, *mut *mut FidEp, u64, *mut c_void) -> c_int;
    }

    OpsMr {
        reg(*mut Fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut FidMr, *mut c_void) -> c_int;
        regv(*mut Fid, *const iovec, usize, u64, u64, u64, u64, *mut *mut FidMr, *mut c_void) -> c_int;
        regattr(*mut Fid, *const MrAttr, u64, *mut *mut FidMr) -> c_int;
    }

    OpsAv {
        insert(*mut FidAv, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int;
        insertsvc(*mut FidAv, *const c_char, *const c_char, *mut u64, u64, *mut c_void) -> c_int;
        insertsym(
            *mut FidAv, *const c_char, usize, *const c_char, usize, *mut u64, u64, *mut c_void
        ) -> c_int;
        remove(*mut FidAv, *mut u64, usize, u64) -> c_int;
        lookup(*mut FidAv, u64, *mut c_void, *mut usize) -> c_int;
        straddr(*mut FidAv, *const c_void, *mut c_char, *mut usize) -> *const c_char;
        av_set(*mut FidAv, *mut c_void, *mut *mut c_void, *mut c_void) -> c_int;
    }

    OpsEp {
        cancel(*mut Fid, *mut c_void) -> isize;
        getopt(*mut Fid, c_int, c_int, *mut c_void, *mut usize) -> c_int;
        setopt(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int;
        tx_ctx(*mut FidEp, c_int, *mut TxAttr, *mut *mut FidEp, *mut c_void) -> c_int;
        rx_ctx(*mut FidEp, c_int, *mut RxAttr, *mut *mut FidEp, *mut c_void) -> c_int;
        rx_size_left(*mut FidEp) -> isize;
        tx_size_left(*mut FidEp) -> isize;
    }

    OpsCm {
        setname(*mut Fid, *mut c_void, usize) -> c_int;
        getname(*mut Fid, *mut c_void, *mut usize) -> c_int;
        getpeer(*mut FidEp, *mut c_void, *mut usize) -> c_int;
        connect(*mut FidEp, *const c_void, *const c_void, usize) -> c_int;
        listen(*mut c_void) -> c_int;
        accept(*mut FidEp, *const c_void, usize) -> c_int;
        reject(*mut c_void, *mut Fid, *const c_void, usize) -> c_int;
        shutdown(*mut FidEp, u64) -> c_int;
        join(*mut FidEp, *const c_void, u64, *mut *mut c_void, *mut c_void) -> c_int;
    }

    OpsMsg {
        recv(*mut FidEp, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize;
        recvv(*mut FidEp, *const iovec, *mut *mut c_void, usize, u64, *mut c_void) -> isize;
        recvmsg(*mut FidEp, *const Msg, u64) -> isize;
        send(*mut FidEp, *const c_void, usize, *mut c_void, u64, *mut c_void) -> isize;
        sendv(*mut FidEp, *const iovec, *mut *mut c_void, usize, u64, *mut c_void) -> isize;
        sendmsg(*mut FidEp, *const Msg, u64) -> isize;
        inject(*mut FidEp, *const c_void, usize, u64) -> isize;
        senddata(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, *mut c_void) -> isize;
        injectdata(*mut FidEp, *const c_void, usize, u64, u64) -> isize;
    }

    OpsTagged {
        recv(*mut FidEp, *mut c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize;
        recvv(*mut FidEp, *const iovec, *mut *mut c_void, usize, u64, u64, u64, *mut c_void) -> isize;
        recvmsg(*mut FidEp, *const MsgTagged, u64) -> isize;
        send(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, *mut c_void) -> isize;
        sendv(*mut FidEp, *const iovec, *mut *mut c_void, usize, u64, u64, *mut c_void) -> isize;
        sendmsg(*mut FidEp, *const MsgTagged, u64) -> isize;
        inject(*mut FidEp, *const c_void, usize, u64, u64) -> isize;
        senddata(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize;
        injectdata(*mut FidEp, *const c_void, usize, u64, u64, u64) -> isize;
    }

    OpsRma {
        read(*mut FidEp, *mut c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize;
        readv(*mut FidEp, *const iovec, *mut *mut c_void, usize, u64, u64, u64, *mut c_void) -> isize;
        readmsg(*mut FidEp, *const MsgRma, u64) -> isize;
        write(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize;
        writev(*mut FidEp, *const iovec, *mut *mut c_void, usize, u64, u64, u64, *mut c_void) -> isize;
        writemsg(*mut FidEp, *const MsgRma, u64) -> isize;
        inject(*mut FidEp, *const c_void, usize, u64, u64, u64) -> isize;
        writedata(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, u64, *mut c_void) -> isize;
        injectdata(*mut FidEp, *const c_void, usize, u64, u64, u64, u64) -> isize;
    }

    OpsAtomic {
        write(
            *mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, c_int, c_int, *mut c_void
        ) -> isize;
        writev(
            *mut FidEp, *const Ioc, *mut *mut c_void, usize, u64, u64, u64, c_int, c_int, *mut c_void
        ) -> isize;
        writemsg(*mut FidEp, *const MsgAtomic, u64) -> isize;
        inject(*mut FidEp, *const c_void, usize, u64, u64, u64, c_int, c_int) -> isize;
        readwrite(
            *mut FidEp, *const c_void, usize, *mut c_void, *mut c_void, *mut c_void, u64, u64, u64, c_int,
            c_int, *mut c_void
        ) -> isize;
        readwritev(
            *mut FidEp, *const Ioc, *mut *mut c_void, usize, *mut Ioc, *mut *mut c_void, usize, u64, u64, u64,
            c_int, c_int, *mut c_void
        ) -> isize;
        readwritemsg(*mut FidEp, *const MsgAtomic, *mut Ioc, *mut *mut c_void, usize, u64) -> isize;
        compwrite(
            *mut FidEp, *const c_void, usize, *mut c_void, *const c_void, *mut c_void, *mut c_void,
            *mut c_void, u64, u64, u64, c_int, c_int, *mut c_void
        ) -> isize;
        compwritev(
            *mut FidEp, *const Ioc, *mut *mut c_void, usize, *const Ioc, *mut *mut c_void, usize, *mut Ioc,
            *mut *mut c_void, usize, u64, u64, u64, c_int, c_int, *mut c_void
        ) -> isize;
        compwritemsg(
            *mut FidEp, *const MsgAtomic, *const Ioc, *mut *mut c_void, usize, *mut Ioc, *mut *mut c_void,
            usize, u64
        ) -> isize;
        writevalid(*mut FidEp, c_int, c_int, *mut usize) -> c_int;
        readwritevalid(*mut FidEp, c_int, c_int, *mut usize) -> c_int;
        compwritevalid(*mut FidEp, c_int, c_int, *mut usize) -> c_int;
    }

    OpsEq {
        read(*mut FidEq, *mut u32, *mut c_void, usize, u64) -> isize;
        readerr(*mut FidEq, *mut c_void, u64) -> isize;
        write(*mut FidEq, u32, *const c_void, usize, u64) -> isize;
        sread(*mut FidEq, *mut u32, *mut c_void, usize, c_int, u64) -> isize;
        strerror(*mut FidEq, c_int, *const c_void, *mut c_char, usize) -> *const c_char;
    }

    OpsCq {
        read(*mut FidCq, *mut c_void, usize) -> isize;
        readfrom(*mut FidCq, *mut c_void, usize, *mut u64) -> isize;
        readerr(*mut FidCq, *mut CqErrEntry, u64) -> isize;
        sread(*mut FidCq, *mut c_void, usize, *const c_void, c_int) -> isize;
        sreadfrom(*mut FidCq, *mut c_void, usize, *mut u64, *const c_void, c_int) -> isize;
        signal(*mut FidCq) -> c_int;
        strerror(*mut FidCq, c_int, *const c_void, *mut c_char, usize) -> *const c_char;
    }

    OpsCntr {
        read(*mut FidCntr) -> u64;
        readerr(*mut FidCntr) -> u64;
        add(*mut FidCntr, u64) -> c_int;
        set(*mut FidCntr, u64) -> c_int;
        wait(*mut FidCntr, u64, c_int) -> c_int;
        adderr(*mut FidCntr, u64) -> c_int;
        seterr(*mut FidCntr, u64) -> c_int;
    }
}

#[repr(C)]
pub(crate) struct FidFabric {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsFabric,
    pub(crate) api_version: u32,
}

#[repr(C)]
pub(crate) struct FidDomain {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsDomain,
    pub(crate) mr: *const OpsMr,
}

/// The attributes of a registration; what follows here in memory depends on libfabric's version.
#[repr(C)]
pub(crate) struct MrAttr {
    pub(crate) mr_iov: *const iovec,
    pub(crate) iov_count: usize,
    pub(crate) access: u64,
    pub(crate) offset: u64,
    pub(crate) requested_key: u64,
    pub(crate) context: *mut c_void,
}

#[repr(C)]
pub(crate) struct FidMr {
    pub(crate) fid: Fid,
    pub(crate) mem_desc: *mut c_void,
    pub(crate) key: u64,
}

#[repr(C)]
pub(crate) struct AvAttr {
    pub(crate) kind: c_int,
    pub(crate) rx_ctx_bits: c_int,
    pub(crate) count: usize,
    pub(crate) ep_per_node: usize,
    pub(crate) name: *const c_char,
    pub(crate) map_addr: *mut c_void,
    pub(crate) flags: u64,
}

#[repr(C)]
pub(crate) struct FidAv {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsAv,
}

#[repr(C)]
pub(crate) struct Msg {
    pub(crate) msg_iov: *const iovec,
    pub(crate) desc: *mut *mut c_void,
    pub(crate) iov_count: usize,
    pub(crate) addr: u64,
    pub(crate) context: *mut c_void,
    pub(crate) data: u64,
}

#[repr(C)]
pub(crate) struct MsgTagged {
    pub(crate) msg_iov: *const iovec,
    pub(crate) desc: *mut *mut c_void,
    pub(crate) iov_count: usize,
    pub(crate) addr: u64,
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
    pub(crate) context: *mut c_void,
    pub(crate) data: u64,
}

/// Memory of a peer: so many bytes, or elements of an atomic.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RmaIov {
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) key: u64,
}

#[repr(C)]
pub(crate) struct MsgRma {
    pub(crate) msg_iov: *const iovec,
    pub(crate) desc: *mut *mut c_void,
    pub(crate) iov_count: usize,
    pub(crate) addr: u64,
    pub(crate) rma_iov: *const RmaIov,
    pub(crate) rma_iov_count: usize,
    pub(crate) context: *mut c_void,
    pub(crate) data: u64,
}

/// Elements of an atomic.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ioc {
    pub(crate) addr: *mut c_void,
    pub(crate) count: usize,
}

#[repr(C)]
pub(crate) struct MsgAtomic {
    pub(crate) msg_iov: *const Ioc,
    pub(crate) desc: *mut *mut c_void,
    pub(crate) iov_count: usize,
    pub(crate) addr: u64,
    pub(crate) rma_iov: *const RmaIov,
    pub(crate) rma_iov_count: usize,
    pub(crate) datatype: c_int,
    pub(crate) op: c_int,
    pub(crate) context: *mut c_void,
    pub(crate) data: u64,
}

/// How much of an atomic is done at once, and how large an element is.
#[repr(C)]
pub(crate) struct AtomicAttr {
    pub(crate) count: usize,
    pub(crate) size: usize,
}

#[repr(C)]
pub(crate) struct FidEp {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsEp,
    pub(crate) cm: *const OpsCm,
    pub(crate) msg: *const OpsMsg,
    pub(crate) rma: *const OpsRma,
    pub(crate) tagged: *const OpsTagged,
    pub(crate) atomic: *const OpsAtomic,
    pub(crate) collective: *const c_void,
}

#[repr(C)]
pub(crate) struct EqAttr {
    pub(crate) size: usize,
    pub(crate) flags: u64,
    pub(crate) wait_obj: c_int,
    pub(crate) signaling_vector: c_int,
    pub(crate) wait_set: *mut c_void,
}

#[repr(C)]
pub(crate) struct FidEq {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsEq,
}

#[repr(C)]
pub(crate) struct CqAttr {
    pub(crate) size: usize,
    pub(crate) flags: u64,
    pub(crate) format: c_int,
    pub(crate) wait_obj: c_int,
    pub(crate) signaling_vector: c_int,
    pub(crate) wait_cond: c_int,
    pub(crate) wait_set: *mut c_void,
}

/// A completion in its longest format; the shorter ones are its beginnings.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CqTaggedEntry {
    pub(crate) op_context: *mut c_void,
    pub(crate) flags: u64,
    pub(crate) len: usize,
    pub(crate) buf: *mut c_void,
    pub(crate) data: u64,
    pub(crate) tag: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CqErrEntry {
    pub(crate) entry: CqTaggedEntry,
    pub(crate) olen: usize,
    pub(crate) err: c_int,
    pub(crate) prov_errno: c_int,
    pub(crate) err_data: *mut c_void,
    pub(crate) err_data_size: usize,
}

#[repr(C)]
pub(crate) struct FidCq {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsCq,
}

#[repr(C)]
pub(crate) struct CntrAttr {
    pub(crate) events: c_int,
    pub(crate) wait_obj: c_int,
    pub(crate) wait_set: *mut c_void,
    pub(crate) flags: u64,
}

#[repr(C)]
pub(crate) struct FidCntr {
    pub(crate) fid: Fid,
    pub(crate) ops: *const OpsCntr,
}

/// What a provider says of itself; libfabric keeps notes in `context`.
#[repr(C)]
pub(crate) struct Provider {
    pub(crate) version: u32,
    pub(crate) fi_version: u32,
    pub(crate) context: [*mut c_void; 4],
    pub(crate) name: *const c_char,
    pub(crate) getinfo:
        unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int,
    pub(crate) fabric: unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, *mut c_void) -> c_int,
    pub(crate) cleanup: unsafe extern "C" fn(),
}

// As the C compiler lays out the headers of 1.17; 2.6 differs only behind the end of what stands here.
const _: () = {
    assert!(size_of::<TxAttr>() == 80 && offset_of!(TxAttr, inject_size) == 40);
    assert!(size_of::<RxAttr>() == 64 && offset_of!(RxAttr, iov_limit) == 56);
    assert!(size_of::<EpAttr>() == 96 && offset_of!(EpAttr, mem_tag_format) == 56);
    assert!(size_of::<DomainAttr>() == 192 && offset_of!(DomainAttr, mr_mode) == 36);
    assert!(offset_of!(DomainAttr, caps) == 136 && offset_of!(DomainAttr, mr_cnt) == 176);
    assert!(size_of::<FabricAttr>() == 32 && offset_of!(FabricAttr, api_version) == 28);
    assert!(size_of::<Info>() == 120 && offset_of!(Info, handle) == 64 && offset_of!(Info, nic) == 112);
    assert!(size_of::<Fid>() == 24 && size_of::<Ops>() == 56);
    assert!(size_of::<OpsFabric>() == 56 && size_of::<FidFabric>() == 40);
    assert!(size_of::<OpsDomain>() == 96 && size_of::<OpsMr>() == 32 && size_of::<FidDomain>() == 40);
    assert!(size_of::<OpsAv>() == 64 && size_of::<FidAv>() == 32);
    assert!(size_of::<AvAttr>() == 48 && offset_of!(AvAttr, name) == 24);
    assert!(size_of::<FidMr>() == 40 && offset_of!(MrAttr, requested_key) == 32);
    assert!(offset_of!(MrAttr, context) == 40);
    assert!(size_of::<OpsEp>() == 64 && size_of::<OpsMsg>() == 80 && size_of::<OpsTagged>() == 80);
    assert!(size_of::<OpsCm>() == 80 && size_of::<OpsRma>() == 80);
    assert!(size_of::<FidEp>() == 80 && offset_of!(FidEp, tagged) == 56);
    assert!(size_of::<Msg>() == 48 && size_of::<MsgTagged>() == 64 && offset_of!(MsgTagged, data) == 56);
    assert!(size_of::<MsgRma>() == 64 && offset_of!(MsgRma, rma_iov) == 32 && size_of::<RmaIov>() == 24);
    assert!(size_of::<MsgAtomic>() == 72 && offset_of!(MsgAtomic, datatype) == 48);
    assert!(size_of::<OpsAtomic>() == 112 && size_of::<Ioc>() == 16 && size_of::<AtomicAttr>() == 16);
    assert!(size_of::<EqAttr>() == 32 && size_of::<OpsEq>() == 48 && size_of::<FidEq>() == 32);
    assert!(size_of::<CqAttr>() == 40 && offset_of!(CqAttr, wait_set) == 32);
    assert!(size_of::<OpsCq>() == 64 && size_of::<FidCq>() == 32 && size_of::<CqTaggedEntry>() == 48);
    assert!(size_of::<CqErrEntry>() == 80 && offset_of!(CqErrEntry, err) == 56);
    assert!(offset_of!(CqErrEntry, err_data_size) == 72);
    assert!(size_of::<CntrAttr>() == 24 && size_of::<OpsCntr>() == 64 && size_of::<FidCntr>() == 32);
    assert!(size_of::<Provider>() == 72 && offset_of!(Provider, name) == 40);
    assert!(offset_of!(Provider, cleanup) == 64);
};
