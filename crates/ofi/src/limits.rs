//! What a program may ask of the provider: its name, the longest and the most of everything, and flags.

use std::ffi::CStr;

use polder_pool::endpoint;

use crate::ffi::flag;

/// The provider, its fabric and its domain.
pub(crate) const NAME: &CStr = c"polder";

/// What a program may send and forget in one call.
pub(crate) const INJECT_BYTES: usize = 256;

/// The longest message.
pub(crate) const MESSAGE_BYTES: usize = endpoint::LONGEST as usize;

/// Operations that a program may have under way in each direction.
pub(crate) const DEPTH: usize = 1024;

/// Pieces that a send, a read or a write may have.
pub(crate) const PIECES: usize = 8;

/// What a call may say of a send, and of a receive.
pub(crate) const SEND_FLAGS: u64 = flag::COMPLETION
    | flag::INJECT
    | flag::INJECT_COMPLETE
    | flag::TRANSMIT_COMPLETE
    | flag::DELIVERY_COMPLETE
    | flag::MATCH_COMPLETE
    | flag::REMOTE_CQ_DATA
    | flag::MORE;
pub(crate) const RECEIVE_FLAGS: u64 = flag::COMPLETION | flag::MULTI_RECV | flag::MORE;
