//! Names among a call's arguments. Python's texts may hold halves of surrogate pairs, which no name in a pool does.

use std::ops::Deref;

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::argument;

/// An argument that is to be a name, empty by default.
#[derive(Default)]
pub(crate) struct Text(String);

impl<'py> FromPyObject<'_, 'py> for Text {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match from.extract::<String>() {
            Ok(text) => Ok(Self(text)),
            Err(_) if from.is_instance_of::<PyString>() => {
                let said = from.repr()?.to_string();
                Err(argument(format!(
                    "the name {said} holds half of a surrogate pair; give text that UTF-8 has"
                )))
            }
            Err(error) => Err(error),
        }
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<Text> for String {
    fn from(text: Text) -> Self {
        text.0
    }
}
