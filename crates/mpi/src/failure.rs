//! Why a call of MPI failed: the class that the program is told, and the line on stderr.

use std::ffi::c_int;
use std::io::Write as _;

use polder_attach::settings::{TIMEOUT, in_terms_of};
use polder_pool::PoolError;

use crate::abi::Abi;

/// What a user of MPI can do when a process is gone: a rank cannot come back to its job.
const END: &str = "the MPI job cannot go on: end it, and start it again";

/// Why a call failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// MPI's class, or the library's own code.
    pub(crate) code: c_int,
    pub(crate) why: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, why: impl Into<String>) -> Self {
        Self { code, why: why.into() }
    }

    /// What the pool refused.
    pub(crate) fn pool<A: Abi>(error: &PoolError) -> Self {
        let errors = &A::NUMBERS.error;
        let code = match error {
            PoolError::Argument { what: "the range", .. } => errors.rma_range,
            PoolError::Argument { what: "the rank", .. } => errors.rank,
            PoolError::Argument { .. } => errors.rma_sync,
            _ => errors.other,
        };
        let ends = matches!(
            error,
            PoolError::PeerDead { .. } | PoolError::Evicted { .. } | PoolError::GaveUp { .. }
        );
        let why = in_terms_of(TIMEOUT, error);
        Self::new(code, if ends { format!("{why}; {END}") } else { why })
    }
}

/// Says something on stderr, in one piece.
pub(crate) fn say(what: &str) {
    // Nobody is left to be told.
    let _ = std::io::stderr().write_all(format!("polder: {what}\n").as_bytes());
}
