//! Numbers and sizes among a call's arguments. Python's numbers have no end, so one that does not fit is told by name, value and
//! range. True and False are whole numbers of Python, and never meant as one.

use polder_attach::settings::{ByteCount, TimeSpan};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors::argument;

/// An argument that is to be a whole number, 0 by default.
pub(crate) struct Number(Result<u64, String>);

impl Default for Number {
    fn default() -> Self {
        Self(Ok(0))
    }
}

impl<'py> FromPyObject<'_, 'py> for Number {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match whole(from) {
            Some(number) => Ok(Self(Ok(number))),
            None => Ok(Self(Err(from.repr()?.to_string()))),
        }
    }
}

/// A whole number that is no bool.
fn whole(from: Borrowed<'_, '_, PyAny>) -> Option<u64> {
    (!from.is_instance_of::<PyBool>()).then(|| from.extract().ok())?
}

impl Number {
    /// The value of the argument `what`, an unsigned number.
    ///
    /// # Errors
    /// `ArgumentError` when it is none, or does not fit.
    pub(crate) fn of<T: TryFrom<u64>>(self, what: &str) -> PyResult<T> {
        let most = u64::MAX >> (64 - 8 * size_of::<T>());
        let refused = |said| argument(format!("{what} is {said}; give a whole number from 0 to {most}"));
        let number = self.0.map_err(refused)?;
        T::try_from(number).map_err(|_| refused(number.to_string()))
    }
}

/// An argument that is to be a number of bytes, or a size in words such as `"8GiB"`.
pub(crate) struct Bytes(Result<u64, String>);

impl<'py> FromPyObject<'_, 'py> for Bytes {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let words = || from.extract::<String>().ok()?.parse::<ByteCount>().ok();
        match whole(from).or_else(|| Some(words()?.0)) {
            Some(bytes) => Ok(Self(Ok(bytes))),
            None => Ok(Self(Err(from.repr()?.to_string()))),
        }
    }
}

impl Bytes {
    /// The value of the argument `what`.
    ///
    /// # Errors
    /// `ArgumentError` when it is no size.
    pub(crate) fn of(self, what: &str) -> PyResult<u64> {
        self.0.map_err(|said| {
            argument(format!("{what} is {said}; give a number of bytes, or a size such as 64KiB or 8GiB"))
        })
    }
}

/// An argument that is to be seconds, with the name `timeout`.
pub(crate) struct Seconds(Result<f64, String>);

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match from.extract::<f64>() {
            Ok(seconds) if !from.is_instance_of::<PyBool>() => Ok(Self(Ok(seconds))),
            _ => Ok(Self(Err(from.repr()?.to_string()))),
        }
    }
}

impl Seconds {
    /// The time that it says.
    ///
    /// # Errors
    /// `ArgumentError` when it is no number, or below 0.
    pub(crate) fn span(self) -> PyResult<TimeSpan> {
        let refused = |said: String| argument(format!("timeout is {said}; give a number from 0 on"));
        let seconds = self.0.map_err(refused)?;
        TimeSpan::of_seconds(seconds).ok_or_else(|| refused(format!("{seconds} s")))
    }
}
