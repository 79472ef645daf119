//! Rust's errors as the tree of `polder.errors`: the same messages, and attributes instead of parsing.

use std::path::Path;

use polder_attach::settings::SettingsError;
use polder_mem::Fault;
use polder_pool::{Peer, PoolError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Attributes of an exception.
type Facts = Vec<(&'static str, u64)>;

/// The Python exception of an error.
pub(crate) fn raise(error: PoolError) -> PyErr {
    raise_as(error.to_string(), error)
}

/// The Python exception of an error with the pool at `path`.
pub(crate) fn raise_at(path: &Path, error: PoolError) -> PyErr {
    raise_as(format!("{}: {error}", path.display()), error)
}

fn raise_as(message: String, error: PoolError) -> PyErr {
    Python::attach(|py| {
        let (class, facts) = classify(&error);
        let advice = match error {
            PoolError::PeerDead { .. } => "; restart that process and join again",
            PoolError::GaveUp { .. } | PoolError::Interrupted { .. } => "; join again to go on",
            _ => "",
        };
        let raised = exception(py, class, message + advice, facts);
        if let PoolError::Broken { cause, .. } = error {
            raised.set_cause(py, Some(raise(*cause)));
        }
        raised
    })
}

/// An argument that cannot be used.
pub(crate) fn argument(message: String) -> PyErr {
    plain("ArgumentError", message)
}

/// A setting that cannot be used.
pub(crate) fn settings(error: &SettingsError) -> PyErr {
    plain("SettingsError", error.to_string())
}

/// An exception of `class` in `polder.errors` without attributes.
pub(crate) fn plain(class: &str, message: String) -> PyErr {
    Python::attach(|py| exception(py, class, message, Facts::new()))
}

fn exception(py: Python<'_>, class: &str, message: String, facts: Facts) -> PyErr {
    let build = || {
        let errors = ERRORS.get_or_try_init(py, || py.import("polder.errors").map(Bound::unbind))?;
        let raised = errors.bind(py).getattr(class)?.call1((message,))?;
        for (name, value) in facts {
            raised.setattr(name, value)?;
        }
        Ok(PyErr::from_value(raised))
    };
    build().unwrap_or_else(|failure: PyErr| failure)
}

fn classify(error: &PoolError) -> (&'static str, Facts) {
    match error {
        PoolError::NotAPool { .. } => ("NotAPoolError", vec![]),
        PoolError::Version { .. } => ("VersionError", vec![]),
        PoolError::TooSmall { .. } => ("TooSmallError", vec![]),
        PoolError::Geometry { .. } | PoolError::Name { .. } | PoolError::Argument { .. } => {
            ("ArgumentError", vec![])
        }
        PoolError::Corrupt { offset, .. } => ("CorruptError", vec![("offset", offset.0)]),
        PoolError::HostLive { host, .. } => ("HostLiveError", vec![("host", u64::from(*host))]),
        PoolError::Evicted { host, epoch } => {
            ("EvictedError", vec![("host", u64::from(*host)), ("epoch", *epoch)])
        }
        PoolError::NoSlot { .. } => ("NoSlotError", vec![]),
        PoolError::Forked { .. } => ("ClosedError", vec![]),
        PoolError::Apart { .. }
        | PoolError::HostFileLost { .. }
        | PoolError::NotAdmitted { .. }
        | PoolError::IdTaken { .. }
        | PoolError::NoFreeId { .. }
        | PoolError::NoKeeper { .. } => ("MembershipError", vec![]),
        PoolError::Exists { .. } | PoolError::RankTaken { .. } | PoolError::VersionBehind { .. } => {
            ("NameExistsError", vec![])
        }
        PoolError::VersionTaken { peer, version, .. } => ("NameExistsError", peer_facts(*peer, 0, *version)),
        PoolError::NotFound { .. } | PoolError::NoVersion { .. } => ("NotFoundError", vec![]),
        PoolError::Quota { .. } => ("QuotaError", vec![]),
        PoolError::Full { .. } | PoolError::DirectoryFull { .. } | PoolError::TooManyOpen { .. } => {
            ("PoolFullError", vec![])
        }
        PoolError::PeerDead { peer, epoch, sequence, .. } => {
            ("PeerDeadError", peer_facts(*peer, *epoch, *sequence))
        }
        PoolError::Timeout { peer, epoch, sequence, .. } => {
            ("PeerTimeoutError", peer_facts(*peer, *epoch, *sequence))
        }
        PoolError::Absent { .. } => ("PeerTimeoutError", vec![]),
        PoolError::GaveUp { peer, epoch, sequence, .. } => {
            ("PeerGaveUpError", peer_facts(*peer, *epoch, *sequence))
        }
        PoolError::Closed { peer, .. } => ("PeerGaveUpError", peer_facts(*peer, 0, 0)),
        PoolError::Mismatch { peer, sequence, .. } => ("MismatchError", peer_facts(*peer, 0, *sequence)),
        PoolError::Broken { cause, .. } => ("BrokenError", classify(cause).1),
        PoolError::Memory(Fault { offset, .. }) => ("MemoryFaultError", vec![("offset", offset.0)]),
        _ => ("PolderError", vec![]),
    }
}

fn peer_facts(peer: Peer, epoch: u64, sequence: u64) -> Facts {
    vec![
        ("host", u64::from(peer.host)),
        ("pid", u64::from(peer.pid)),
        ("epoch", epoch),
        ("sequence", sequence),
    ]
    .into_iter()
    .chain(peer.rank.map(|rank| ("rank", u64::from(rank))))
    .collect()
}
