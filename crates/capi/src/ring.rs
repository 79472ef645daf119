//! `polder_sender` and `polder_receiver`: the two ends of a ring.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use polder_attach::session::Session;
use polder_attach::settings::TimeSpan;
use polder_mem::AnyMemory;
use polder_pool::PoolError;
use polder_pool::channel;
use polder_pool::ring::RingShape;

use crate::failure::{Failure, Status};
use crate::guard::{self, exported};
use crate::pool::Pool;

// Threads that take turns may share an end: it holds the pool, which is every thread's, and nothing of a thread's own.

/// The sending end of a ring.
pub(crate) struct Sender {
    end: Mutex<channel::Sender<AnyMemory>>,
    _session: Arc<Session>,
}

/// The receiving end of a ring.
pub(crate) struct Receiver {
    end: Mutex<channel::Receiver<AnyMemory>>,
    _session: Arc<Session>,
}

exported! {
    /// Makes a ring.
    extern "C" fn polder_ring_create(
        pool: *mut Pool,
        name: *const c_char,
        cells: u32,
        cell_bytes: u32,
        sender: *mut *mut Sender,
    ) -> c_int {
        let create = || {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            let shape = match (cells, cell_bytes) {
                (0, 0) => RingShape::default(),
                _ => RingShape::new(cells, cell_bytes)?,
            };
            let end = Mutex::new(channel::Sender::create(Arc::clone(session.pool()), name, shape)?);
            Ok(Sender { end, _session: Arc::clone(session) })
        };
        guard::made(sender, create)
    }

    /// Opens a ring to receive.
    extern "C" fn polder_ring_open(
        pool: *mut Pool,
        name: *const c_char,
        timeout_ms: u64,
        receiver: *mut *mut Receiver,
    ) -> c_int {
        let open = || {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            let opened = channel::Receiver::open(Arc::clone(session.pool()), name, TimeSpan::of_millis(timeout_ms).0);
            let end = Mutex::new(opened.map_err(|error| refused(name, error))?);
            Ok(Receiver { end, _session: Arc::clone(session) })
        };
        guard::made(receiver, open)
    }

    /// Sends a message.
    extern "C" fn polder_ring_push(
        sender: *mut Sender,
        tag: u64,
        from: *const c_void,
        bytes: usize,
        timeout_ms: u64,
    ) -> c_int {
        guard::status(|| {
            let (sender, from) = (guard::given(sender, "sender")?, guard::source(from.cast(), bytes)?);
            let mut end = sender.end.lock().unwrap_or_else(PoisonError::into_inner);
            end.push(tag, from, TimeSpan::of_millis(timeout_ms).0).map_err(Failure::of_timed)
        })
    }

    /// Receives a message.
    extern "C" fn polder_ring_pop(
        receiver: *mut Receiver,
        tag: *mut u64,
        into: *mut c_void,
        room: usize,
        bytes: *mut usize,
        timeout_ms: u64,
    ) -> c_int {
        guard::status(|| {
            let (receiver, into) =
                (guard::given(receiver, "receiver")?, guard::target(into.cast(), room)?);
            let mut end = receiver.end.lock().unwrap_or_else(PoisonError::into_inner);
            let popped = end.pop(into, TimeSpan::of_millis(timeout_ms).0);
            let seen = match &popped {
                Ok(envelope) => Some(*envelope),
                Err(PoolError::Argument { .. }) => end.peek()?,
                Err(_) => None,
            };
            if let (Some(seen), Some(bytes)) = (seen, bytes.as_mut()) {
                *bytes = seen.bytes as usize;
            }
            let envelope = popped.map_err(Failure::of_timed)?;
            if let Some(tag) = tag.as_mut() {
                *tag = envelope.tag;
            }
            Ok(())
        })
    }

    /// Ends a ring.
    extern "C" fn polder_sender_close(sender: *mut Sender) -> c_int {
        guard::close(sender)
    }

    /// Receives no more.
    extern "C" fn polder_receiver_close(receiver: *mut Receiver) -> c_int {
        guard::close(receiver)
    }
}

/// Why a ring cannot be opened. What exists already is an object of the receiver's, which the caller has not named.
fn refused(ring: &str, error: PoolError) -> Failure {
    match error {
        PoolError::Exists { .. } => Failure::new(
            Status::Exists,
            format!(
                "the ring {ring} has a receiver, or had one; one process receives from a ring: make another ring for this one"
            ),
        ),
        other => other.into(),
    }
}
