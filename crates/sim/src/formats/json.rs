//! JSON files of others.

use polder_platform::{DataError, JsonKind, other_json, read_json, text_of};

use super::calculon::{self, Execution};
use super::hugging_face;
use crate::step::model::Model;

/// A model of Hugging Face, with so many tokens of a sequence in place of its own, or of Calculon.
pub(crate) fn model(file: &str, text: &str, sequence: Option<u32>) -> Result<Model, DataError> {
    match read_json(file, text)? {
        (JsonKind::HuggingFace, keys) => hugging_face::model(file, keys, sequence),
        (JsonKind::CalculonModel, keys) => calculon::model(file, &keys),
        (kind, _) => Err(other_json(file, "a model", kind)),
    }
}

impl Execution {
    /// Reads an execution of Calculon by the path of its file.
    ///
    /// # Errors
    /// When it cannot be read, or asks for what cannot be expressed.
    pub fn load(path: &str) -> Result<Self, DataError> {
        match read_json(path, &text_of(path)?)? {
            (JsonKind::CalculonExecution, keys) => calculon::execution(path, &keys),
            (kind, _) => Err(other_json(path, "an execution of Calculon", kind)),
        }
    }
}
