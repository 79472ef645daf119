//! Operations under way: what a program or the provider waits for, and what their completions say.

use std::ffi::c_void;

use polder_pool::endpoint::Filter;

use crate::ffi::CqTaggedEntry;

/// What a program gives with an operation and gets back with its completion; never looked into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Context(pub(crate) *mut c_void);

// SAFETY: carried, never followed.
unsafe impl Send for Context {}

/// An operation under way.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) context: Context,
    /// What its completion says that it was.
    pub(crate) flags: u64,
    /// Whether its completion is written into the queue.
    pub(crate) report: bool,
    pub(crate) role: Role,
}

/// No longer than it must be, for it is moved with every operation.
#[derive(Debug)]
pub(crate) enum Role {
    Send,
    Receive,
    /// A receive into a buffer for many messages, and which it takes.
    ReceiveMany(Box<Filter>),
    /// A message that a peek set aside for a later receive with the same context.
    Claim,
    /// A message that is thrown away.
    Discard,
    /// Nothing: a receive that ends when this peer dies.
    Watch(u32),
    /// A note or an answer of one-sided operations, which no program waits for.
    SendNote,
    /// The next note of any peer.
    ReceiveNote,
    /// The answer to the request of this number.
    ReceiveAnswer(u64),
    /// The payload that follows the request of this number.
    SendPayload(u64),
    /// A payload into registered memory.
    ReceivePayload(Box<Landing>),
    /// An answer from the registered memory with this key.
    SendMemory(u64),
}

/// A payload on its way into registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Landing {
    pub(crate) from: u32,
    pub(crate) number: u64,
    pub(crate) key: u64,
    pub(crate) bytes: u64,
    pub(crate) data: Option<u32>,
}

impl Landing {
    pub(crate) const fn key(&self) -> u64 {
        self.key
    }
}

/// An operation of the provider's own, of which no program learns.
pub(crate) const fn aside(role: Role) -> Operation {
    Operation { context: Context(std::ptr::null_mut()), flags: 0, report: false, role }
}

/// What a completion says of its operation alone.
pub(crate) const fn entry(operation: &Operation) -> CqTaggedEntry {
    let Operation { context: Context(op_context), flags, .. } = *operation;
    CqTaggedEntry { op_context, flags, len: 0, buf: std::ptr::null_mut(), data: 0, tag: 0 }
}
