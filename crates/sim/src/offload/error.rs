//! Why no offloaded step is predicted.

use polder_place::PlaceError;
use polder_platform::DataError;

use crate::step::layout::Refusal;

/// What was asked is no step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A file is damaged, or says what cannot be.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The platform has not what is asked for.
    #[error("{platform}: {refusal}")]
    Refused {
        /// Which.
        platform: String,
        /// Why.
        refusal: Refusal,
    },
    /// An option makes no sense.
    #[error("{option}: {problem}")]
    Option {
        /// Which, or the file of a policy.
        option: String,
        /// What was expected, what was found, and what to do.
        problem: String,
    },
    /// The placement's own problem.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

impl OffloadError {
    pub(crate) fn option(option: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Option { option: option.into(), problem: problem.into() }
    }
}
