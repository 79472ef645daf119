//! `Messages`, `Channel` and `Message`: tagged messages between the ranks of groups, as Python has them.

use std::sync::{Arc, OnceLock};

use polder_attach::messages::{self, Sending, Station, TYPES};
use polder_pool::PoolError;
use polder_pool::endpoint::MessageBuffer;
use pyo3::prelude::*;

use crate::buffer::{Elements, Span};
use crate::errors::{self, argument};
use crate::group::{Group, Ticket};
use crate::number::Seconds;
use crate::pool::{Owned, Pool};
use crate::signals::Detached;

/// Kinds of messages by the names that Python gives.
const KINDS: [&str; 2] = ["message", "monitored barrier"];

/// What operations are called in errors.
const OPERATIONS: [&str; 4] = ["send", "receive", "receive from any rank", "monitored barrier"];

/// Bytes of a tensor, lent until a message is over, and what keeps the tensor alive.
struct Lent {
    span: Span,
    _arrays: Py<PyAny>,
}

impl MessageBuffer for Lent {
    fn bytes(&self) -> &[u8] {
        // SAFETY: this keeps the tensor alive, and nobody writes it meanwhile.
        unsafe { self.span.bytes() }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; what a message is received into is touched by nobody else meanwhile.
        unsafe { self.span.bytes_mut() }
    }
}

/// An error of a call: of the pool's, or Python's own.
struct Raised(PyErr);

impl From<PoolError> for Raised {
    fn from(error: PoolError) -> Self {
        Self(errors::raise(error))
    }
}

/// Where the messages of this process's groups come and go.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Messages {
    station: Owned<Detached<Arc<Station<Lent>>>>,
}

#[pymethods]
impl Messages {
    /// Opens an endpoint in the pool.
    #[new]
    fn new(py: Python<'_>, pool: &Bound<'_, Pool>) -> PyResult<Self> {
        let session = pool.get().session()?;
        let station = py.detach(|| Station::open(&session)).map_err(errors::raise)?;
        Ok(Self { station: Owned::new("endpoint", Detached::new(Arc::new(station))) })
    }

    /// Waits until the peers have what was sent to them, and leaves. Closing twice is harmless.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(station) = self.station.take() else { return Ok(()) };
        py.detach(|| station.close()).map_err(errors::raise)
    }
}

/// The messages between the ranks of one group.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Channel {
    channel: Owned<Arc<Detached<messages::Channel<Lent>>>>,
}

#[pymethods]
impl Channel {
    /// Tells the ranks of a group where this process's endpoint is, and learns where theirs are. Every rank calls it.
    #[new]
    fn new(py: Python<'_>, messages: &Bound<'_, Messages>, group: &Bound<'_, Group>) -> PyResult<Self> {
        let station = messages.get().station.with(|station| Arc::clone(station))?;
        let group = group.get();
        let gather = |record: &[u8]| Python::attach(|py| group.gather_records(py, record)).map_err(Raised);
        let channel = py.detach(|| messages::Channel::join(station, group.own_rank(), gather));
        let channel = channel.map_err(|Raised(error)| error)?;
        Ok(Self { channel: Owned::new("channel", Arc::new(Detached::new(channel))) })
    }

    /// Sends a message to `rank`, or receives one from there, or with no `rank` from any. `place` is an address and bytes.
    ///
    /// The address must be that of a tensor in `arrays`, contiguous and as long as the bytes say.
    #[expect(clippy::too_many_arguments, reason = "one call for every message of one private caller")]
    fn start(
        &self,
        py: Python<'_>,
        what: &str,
        kind: &str,
        tag: u32,
        rank: Option<usize>,
        place: (usize, usize),
        receives: bool,
        dtype: &str,
        timeout: Seconds,
        arrays: Py<PyAny>,
    ) -> PyResult<Py<Message>> {
        let channel = self.channel.with(Arc::clone)?;
        let kind = KINDS.iter().position(|&name| name == kind);
        let kind = kind.ok_or_else(|| argument(format!("there is no kind of message {what:?}")))? as u8;
        if rank.map_or(!receives, |rank| rank >= channel.size()) {
            return Err(argument(format!(
                "{what} names rank {rank:?}; the group has ranks 0 to {}",
                channel.size() - 1
            )));
        }
        // SAFETY: the caller promises that `arrays` keeps this memory alive, and the buffer keeps `arrays`.
        let span = unsafe { Span::raw(place, Elements::BYTES) }?;
        let sending = Sending {
            what: OPERATIONS.iter().copied().find(|&name| name == what).unwrap_or("message"),
            kind: messages::MESSAGE + kind,
            tag,
            rank,
            receives,
            dtype: TYPES.iter().position(|&name| name == dtype).map(|place| place as u32 + 1),
            buffer: Lent { span, _arrays: arrays },
            timeout: timeout.span()?.0,
        };
        channel.start_thread().map_err(|error| {
            errors::plain("PolderError", format!("cannot start the endpoint's thread: {error}"))
        })?;
        let started = py.detach(|| channel.start(sending)).map_err(errors::raise)?;
        let base = Ticket::new(started.ticket, Box::new(move |ticket, span| channel.wait(ticket, span)));
        Py::new(py, PyClassInitializer::from(base).add_subclass(Message { source: started.source }))
    }

    /// The message that a rank has sent and this one has not received, for errors.
    fn unreceived(&self, py: Python<'_>, rank: usize) -> PyResult<Option<String>> {
        let channel = self.channel.with(Arc::clone)?;
        py.detach(|| channel.unreceived(rank)).map_err(errors::raise)
    }

    /// Lets go of the endpoint.
    fn close(&self) {
        drop(self.channel.take());
    }
}

/// Messages on their way. A caller that waits for them drives the endpoint.
#[pyclass(module = "polder._core", frozen, extends = Ticket)]
pub(crate) struct Message {
    source: Arc<OnceLock<usize>>,
}

#[pymethods]
impl Message {
    /// The rank whose message was received.
    #[getter]
    fn source(&self) -> Option<usize> {
        self.source.get().copied()
    }
}
