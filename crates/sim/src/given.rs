//! Why a given value cannot be: an error that several folders share.

/// A given value that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct GivenError {
    /// Which value, as options are named, without dashes before it.
    pub key: &'static str,
    /// What was expected, and what was found.
    pub problem: String,
}

impl GivenError {
    pub(crate) fn new(key: &'static str, problem: impl Into<String>) -> Self {
        Self { key, problem: problem.into() }
    }

    /// A number above 0 where it has to be.
    pub(crate) fn expect_above_zero(key: &'static str, value: f64) -> Result<(), Self> {
        match value > 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(Self::new(key, format!("expected a number above 0, found {value}"))),
        }
    }
}
