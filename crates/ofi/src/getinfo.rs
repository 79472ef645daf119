//! What the provider offers, and whether that is what a program asks for.

use std::ffi::{CStr, c_char, c_int};

use crate::ffi::{
    self, AV_TABLE, AV_UNSPEC, DomainAttr, EP_RDM, EP_UNSPEC, EpAttr, Errno, FORMAT_UNSPEC, FabricAttr, Info,
    PROGRESS_AUTO, PROGRESS_MANUAL, PROV_SPECIFIC, RM_ENABLED, RxAttr, THREAD_SAFE, THREAD_UNSPEC, TxAttr,
    flag, mr_mode, order,
};
use crate::limits::{DEPTH, INJECT_BYTES, MESSAGE_BYTES, NAME, PIECES, RECEIVE_FLAGS, SEND_FLAGS};
use crate::note::INLINE;
use crate::object::expect_place;
use crate::{guard, libfabric, session};

/// Queues, counters and endpoints that a domain has room for.
const OBJECTS: usize = 1024;

/// An address of the pool, and what runs between two of them.
const FORMAT: u32 = PROV_SPECIFIC | 0x706f;
const PROTOCOL: u32 = PROV_SPECIFIC | 0x706f;

/// What an endpoint does when asked.
const PRIMARY: u64 = TRANSMIT | RECEIVE;
/// What it does unasked.
const SECONDARY: u64 = flag::LOCAL_COMM | flag::REMOTE_COMM | flag::SOURCE;
const TRANSMIT: u64 = MESSAGES | ONE_SIDED | flag::SEND | flag::READ | flag::WRITE;
const RECEIVE: u64 = MESSAGES
    | ONE_SIDED
    | flag::RECV
    | flag::REMOTE_READ
    | flag::REMOTE_WRITE
    | flag::DIRECTED_RECV
    | flag::MULTI_RECV
    | flag::RMA_EVENT
    | flag::SOURCE;
const MESSAGES: u64 = flag::MSG | flag::TAGGED;
const ONE_SIDED: u64 = flag::RMA | flag::ATOMIC;
/// What is asked for without saying so, of messages and of one-sided operations.
const BOTH_WAYS: u64 = flag::SEND | flag::RECV;
const ALL_WAYS: u64 = flag::READ | flag::WRITE | flag::REMOTE_READ | flag::REMOTE_WRITE;

/// The order that is kept: of messages, and of one-sided operations up to so many bytes.
const ORDER: u64 = order::SAS | order::ONE_SIDED;
const ORDERED_BYTES: usize = INLINE;
const DOMAIN: u64 = flag::LOCAL_COMM | flag::REMOTE_COMM;

/// What a program will get, within what it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) caps: u64,
    pub(crate) transmit_flags: u64,
    pub(crate) receive_flags: u64,
    pub(crate) threading: c_int,
    pub(crate) av_type: c_int,
    pub(crate) mr_mode: c_int,
}

/// What stands in the way of an offer.
pub(crate) type Unfit = &'static str;

impl Default for Offer {
    fn default() -> Self {
        Self {
            caps: PRIMARY | SECONDARY,
            transmit_flags: 0,
            receive_flags: 0,
            threading: THREAD_SAFE,
            av_type: AV_TABLE,
            mr_mode: 0,
        }
    }
}

fn refuse_if(unfit: bool, why: Unfit) -> Result<(), Unfit> {
    if unfit { Err(why) } else { Ok(()) }
}

impl Offer {
    /// What fits the hints.
    ///
    /// # Safety
    /// The parts of `hints` are null or live for the call.
    pub(crate) unsafe fn fit(hints: &Info, version: u32) -> Result<Self, Unfit> {
        refuse_if(hints.caps & !(PRIMARY | SECONDARY) != 0, "capabilities that the pool does not carry")?;
        refuse_if(!matches!(hints.addr_format, FORMAT_UNSPEC | FORMAT), "addresses of another format")?;
        refuse_if(!hints.dest_addr.is_null(), "a destination: peers are found through an address vector")?;
        let mut offer = Self::default();
        if hints.caps != 0 {
            offer.caps = hints.caps | SECONDARY;
            for (capability, ways) in [(MESSAGES, BOTH_WAYS), (ONE_SIDED, ALL_WAYS)] {
                if hints.caps & capability != 0 && hints.caps & ways == 0 {
                    offer.caps |= ways;
                }
            }
        }
        // SAFETY: by this function's contract.
        unsafe {
            hints.fabric_attr.as_ref().map_or(Ok(()), |attr| fits_fabric(attr))?;
            hints.ep_attr.as_ref().map_or(Ok(()), fits_endpoint)?;
            hints.tx_attr.as_ref().map_or(Ok(()), |attr| offer.fit_transmit(attr))?;
            hints.rx_attr.as_ref().map_or(Ok(()), |attr| offer.fit_receive(attr))?;
            hints.domain_attr.as_ref().map_or(Ok(()), |attr| offer.fit_domain(attr, version))?;
        }
        Ok(offer)
    }

    fn fit_transmit(&mut self, attr: &TxAttr) -> Result<(), Unfit> {
        refuse_if(attr.caps & !(TRANSMIT | SECONDARY) != 0, "other capabilities for sending")?;
        refuse_if(attr.op_flags & !SEND_FLAGS != 0, "other flags for sending")?;
        refuse_if(attr.msg_order & !ORDER != 0, "an order of messages beside one-sided operations")?;
        refuse_if(attr.comp_order != 0, "completions of sends in order")?;
        refuse_if(attr.inject_size > INJECT_BYTES, "larger injected messages")?;
        refuse_if(attr.size > DEPTH, "more sends at once")?;
        refuse_if(attr.iov_limit > PIECES, "sends in more pieces")?;
        refuse_if(attr.rma_iov_limit > 1, "several pieces of a peer's memory at once")?;
        self.transmit_flags = attr.op_flags;
        Ok(())
    }

    fn fit_receive(&mut self, attr: &RxAttr) -> Result<(), Unfit> {
        refuse_if(attr.caps & !(RECEIVE | SECONDARY) != 0, "other capabilities for receiving")?;
        refuse_if(attr.op_flags & !RECEIVE_FLAGS != 0, "other flags for receiving")?;
        refuse_if(attr.msg_order & !ORDER != 0, "an order of messages beside one-sided operations")?;
        refuse_if(attr.comp_order != 0, "completions of receives in order")?;
        refuse_if(attr.size > DEPTH, "more receives at once")?;
        refuse_if(attr.iov_limit > 1, "receives in several pieces")?;
        self.receive_flags = attr.op_flags;
        Ok(())
    }

    /// # Safety
    /// The domain's name is null or a C string.
    unsafe fn fit_domain(&mut self, attr: &DomainAttr, version: u32) -> Result<(), Unfit> {
        // SAFETY: by this function's contract.
        refuse_if(unsafe { is_other(attr.name) }, "another domain")?;
        let automatic = [attr.control_progress, attr.data_progress].contains(&PROGRESS_AUTO);
        refuse_if(automatic, "progress without calls")?;
        refuse_if(attr.mr_key_size > size_of::<u64>(), "longer memory keys")?;
        refuse_if(attr.cq_data_size > size_of::<u32>(), "more than 4 bytes of completion data")?;
        refuse_if(attr.caps & !DOMAIN != 0, "other capabilities of the domain")?;
        let contexts = [attr.max_ep_tx_ctx, attr.max_ep_rx_ctx];
        let shared = [attr.max_ep_stx_ctx, attr.max_ep_srx_ctx];
        refuse_if(contexts.iter().any(|&most| most > 1) || shared != [0; 2], "shared or scalable endpoints")?;
        let counts = [attr.cq_cnt, attr.ep_cnt, attr.tx_ctx_cnt, attr.rx_ctx_cnt, attr.cntr_cnt];
        refuse_if(counts.iter().any(|&count| count > OBJECTS), "more objects in a domain")?;
        refuse_if(attr.mr_iov_limit > 1, "registrations in several pieces")?;
        refuse_if(attr.auth_key_size > 0, "authorization keys")?;
        // Whoever locks more than it must is served as well.
        self.threading = if attr.threading == THREAD_UNSPEC { THREAD_SAFE } else { attr.threading };
        self.av_type = if attr.av_type == AV_UNSPEC { AV_TABLE } else { attr.av_type };
        self.mr_mode = registration(attr.mr_mode, version);
        Ok(())
    }

    /// Writes the offer into an info that libfabric made.
    ///
    /// # Safety
    /// `info` came from [`libfabric::new_info`].
    unsafe fn write(&self, info: *mut Info) -> Result<(), Errno> {
        // SAFETY: libfabric makes an info with all its parts, zeroed, and frees strings that malloc gave.
        unsafe {
            (*info).caps = self.caps;
            (*info).addr_format = FORMAT;
            let attr = (*info).tx_attr;
            (*attr).caps = self.caps & TRANSMIT;
            (*attr).op_flags = self.transmit_flags;
            (*attr).msg_order = ORDER;
            (*attr).inject_size = INJECT_BYTES;
            (*attr).size = DEPTH;
            (*attr).iov_limit = PIECES;
            (*attr).rma_iov_limit = 1;
            let attr = (*info).rx_attr;
            (*attr).caps = self.caps & RECEIVE;
            (*attr).op_flags = self.receive_flags;
            (*attr).msg_order = ORDER;
            (*attr).size = DEPTH;
            (*attr).iov_limit = 1;
            let attr = (*info).ep_attr;
            (*attr).kind = EP_RDM;
            (*attr).protocol = PROTOCOL;
            (*attr).protocol_version = 1;
            (*attr).max_msg_size = MESSAGE_BYTES;
            (*attr).max_order_raw_size = ORDERED_BYTES;
            (*attr).max_order_war_size = ORDERED_BYTES;
            (*attr).max_order_waw_size = ORDERED_BYTES;
            (*attr).mem_tag_format = ffi::TAG_GENERIC;
            (*attr).tx_ctx_cnt = 1;
            (*attr).rx_ctx_cnt = 1;
            let attr = (*info).domain_attr;
            (*attr).name = libc::strdup(NAME.as_ptr());
            (*attr).threading = self.threading;
            (*attr).control_progress = PROGRESS_MANUAL;
            (*attr).data_progress = PROGRESS_MANUAL;
            (*attr).resource_mgmt = RM_ENABLED;
            (*attr).av_type = self.av_type;
            (*attr).mr_mode = self.mr_mode;
            (*attr).mr_key_size = size_of::<u64>();
            (*attr).cq_data_size = size_of::<u32>();
            (*attr).cq_cnt = OBJECTS;
            (*attr).ep_cnt = OBJECTS;
            (*attr).tx_ctx_cnt = OBJECTS;
            (*attr).rx_ctx_cnt = OBJECTS;
            (*attr).max_ep_tx_ctx = 1;
            (*attr).max_ep_rx_ctx = 1;
            (*attr).cntr_cnt = OBJECTS;
            (*attr).mr_iov_limit = 1;
            (*attr).caps = DOMAIN;
            (*attr).mr_cnt = OBJECTS;
            let attr = (*info).fabric_attr;
            (*attr).name = libc::strdup(NAME.as_ptr());
            match (*attr).name.is_null() || (*(*info).domain_attr).name.is_null() {
                true => Err(Errno::NOMEM),
                false => Ok(()),
            }
        }
    }
}

/// # Safety
/// The fabric's name is null or a C string.
unsafe fn fits_fabric(attr: &FabricAttr) -> Result<(), Unfit> {
    // SAFETY: by this function's contract.
    refuse_if(unsafe { is_other(attr.name) }, "another fabric")
}

/// # Safety
/// `name` is null or a C string.
unsafe fn is_other(name: *const c_char) -> bool {
    // SAFETY: by this function's contract.
    !name.is_null() && unsafe { CStr::from_ptr(name) } != NAME
}

fn fits_endpoint(attr: &EpAttr) -> Result<(), Unfit> {
    refuse_if(!matches!(attr.kind, EP_UNSPEC | EP_RDM), "endpoints that are not reliable datagrams")?;
    refuse_if(!matches!(attr.protocol, 0 | PROTOCOL), "another protocol")?;
    refuse_if(attr.max_msg_size > MESSAGE_BYTES, "longer messages")?;
    refuse_if(attr.msg_prefix_size > 0, "messages with a prefix")?;
    let ordered = [attr.max_order_raw_size, attr.max_order_war_size, attr.max_order_waw_size];
    let too_long = ordered.iter().any(|&bytes| bytes > ORDERED_BYTES);
    refuse_if(too_long, "longer one-sided operations in order")?;
    refuse_if(attr.tx_ctx_cnt > 1 || attr.rx_ctx_cnt > 1, "shared or scalable endpoints")?;
    refuse_if(attr.auth_key_size > 0, "authorization keys")
}

/// How memory is registered: no way is asked for, and the old names for ways are given back as they came.
const fn registration(hint: c_int, version: u32) -> c_int {
    match hint {
        mr_mode::BASIC | mr_mode::SCALABLE => hint,
        _ if version < ffi::version(1, 5) => mr_mode::SCALABLE,
        _ => 0,
    }
}

pub(crate) unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    _flags: u64,
    hints: *const Info,
    place: *mut *mut Info,
) -> c_int {
    guard::status(|| {
        expect_place(place)?;
        if !node.is_null() || !service.is_null() {
            tracing::info!("not offered: names of nodes and services mean nothing in a pool");
            return Err(Errno::NODATA);
        }
        // SAFETY: libfabric passes hints that live for the call, or none.
        let hints = unsafe { hints.as_ref() };
        // SAFETY: as above, with all their parts.
        let offer = hints.map_or(Ok(Offer::default()), |hints| unsafe { Offer::fit(hints, version) });
        let offer = offer.map_err(|why| {
            tracing::info!("not offered: the program asks for {why}");
            Errno::NODATA
        })?;
        session::session().map_err(|why| {
            session::complain(&why);
            Errno::NODATA
        })?;
        let offer = match hints {
            None => Offer { mr_mode: registration(0, version), ..offer },
            Some(_) => offer,
        };
        let info = libfabric::new_info();
        if info.is_null() {
            return Err(Errno::NOMEM);
        }
        // SAFETY: it was just made, with all its parts, and `place` is the caller's to be written.
        unsafe {
            let written = offer.write(info);
            match written {
                Ok(()) => place.write(info),
                Err(_) => libfabric::free_info(info),
            }
            written
        }
    })
}
