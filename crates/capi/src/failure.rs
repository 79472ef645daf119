//! What C is told of an error: a number, and the sentence that it asks for afterwards.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::io::ErrorKind;

use polder_attach::session::SessionError;
use polder_attach::settings::{SettingsError, TIMEOUT, in_terms_of};
use polder_mem::{HostError, RegionError};
use polder_pool::PoolError;

/// `polder_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    Argument = 1,
    NotFound = 2,
    Exists = 3,
    Full = 4,
    Timeout = 5,
    PeerDead = 6,
    Corrupt = 7,
    Membership = 8,
    Memory = 9,
    Other = 10,
    Ended = 11,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    status: Status,
    why: String,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The sentence of this thread's last failure, which stays until the next.
pub(crate) fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"this thread ends".as_ptr())
}

impl Failure {
    pub(crate) fn new(status: Status, why: impl Into<String>) -> Self {
        Self { status, why: why.into() }
    }

    /// An argument that cannot be used.
    pub(crate) fn argument(why: impl Into<String>) -> Self {
        Self::new(Status::Argument, why)
    }

    /// Why a call failed that takes a time.
    pub(crate) fn of_timed(error: PoolError) -> Self {
        Self::new(status(&error), in_terms_of("timeout_ms", &error))
    }

    /// Keeps the sentence for this thread, and gives the number.
    pub(crate) fn tell(self) -> c_int {
        let why = CString::new(self.why.replace('\0', "\\0")).unwrap_or_default();
        // A thread that ends tells nobody.
        let _ = LAST.try_with(|last| *last.borrow_mut() = why);
        self.status as c_int
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        Self::new(status(&error), in_terms_of(TIMEOUT, &error))
    }
}

impl From<SettingsError> for Failure {
    fn from(error: SettingsError) -> Self {
        Self::argument(error.to_string())
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Self {
        let status = match &error {
            // The other fronts have other words for where it is named.
            SessionError::NoPool => {
                return Self::argument("no pool is named; pass its path, or set POLDER_POOL");
            }
            SessionError::NoHostId { .. } | SessionError::Coherence { .. } => Status::Argument,
            SessionError::TooShort { .. } => Status::NotFound,
            SessionError::Host(HostError::NoHost { .. } | HostError::NoSlot { .. }) => Status::Membership,
            SessionError::Host(HostError::Busy { .. }) => Status::Timeout,
            SessionError::Region(RegionError::Missing { .. }) => Status::NotFound,
            SessionError::Pool { source, .. } => status(source),
            SessionError::Apart { .. } => Status::Membership,
            SessionError::System { source, .. } if source.kind() == ErrorKind::NotFound => Status::NotFound,
            _ => Status::Other,
        };
        Self::new(status, in_terms_of(TIMEOUT, &error))
    }
}

fn status(error: &PoolError) -> Status {
    match error {
        PoolError::Geometry { .. } | PoolError::Name { .. } | PoolError::Argument { .. } => Status::Argument,
        PoolError::NotAPool { .. } | PoolError::NotFound { .. } => Status::NotFound,
        PoolError::Exists { .. } | PoolError::RankTaken { .. } => Status::Exists,
        PoolError::Full { .. }
        | PoolError::DirectoryFull { .. }
        | PoolError::Quota { .. }
        | PoolError::TooManyOpen { .. } => Status::Full,
        PoolError::Timeout { .. } | PoolError::Absent { .. } | PoolError::NoReceiver { .. } => {
            Status::Timeout
        }
        PoolError::Closed { end: "sender", .. } => Status::Ended,
        PoolError::PeerDead { .. } | PoolError::GaveUp { .. } | PoolError::Closed { .. } => Status::PeerDead,
        PoolError::Corrupt { .. } => Status::Corrupt,
        PoolError::Forked { .. } => Status::Argument,
        PoolError::HostLive { .. }
        | PoolError::Apart { .. }
        | PoolError::HostFileLost { .. }
        | PoolError::NotAdmitted { .. }
        | PoolError::IdTaken { .. }
        | PoolError::NoFreeId { .. }
        | PoolError::NoKeeper { .. }
        | PoolError::Evicted { .. }
        | PoolError::NoSlot { .. } => Status::Membership,
        PoolError::Memory(_) => Status::Memory,
        PoolError::Broken { cause, .. } => status(cause),
        _ => Status::Other,
    }
}
