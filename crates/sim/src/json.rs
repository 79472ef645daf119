//! JSON files of others: which of the formats one is, by its keys.

use polder_platform::{DataError, Folder, Platform, text, text_of};
use serde_json::{Map, Value};

use crate::calculon::{self, Execution};
use crate::hugging_face;
use crate::model::Model;

/// What a file describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    HuggingFace,
    CalculonModel,
    CalculonSystem,
    CalculonExecution,
}

impl Kind {
    fn of(keys: &Map<String, Value>) -> Self {
        let has = |names: &[&str]| names.iter().any(|name| keys.contains_key(*name));
        if has(&["networks", "mem1", "processing_mode"]) {
            Self::CalculonSystem
        } else if has(&["num_procs", "tensor_par", "pipeline_par"]) {
            Self::CalculonExecution
        } else if has(&["attn_heads", "attn_size", "seq_size", "num_blocks"]) {
            Self::CalculonModel
        } else {
            Self::HuggingFace
        }
    }

    const fn what(self) -> &'static str {
        match self {
            Self::HuggingFace => "what may be a config.json of Hugging Face",
            Self::CalculonModel => "a model of Calculon",
            Self::CalculonSystem => "a system of Calculon",
            Self::CalculonExecution => "an execution of Calculon",
        }
    }
}

fn read(file: &str, text: &str) -> Result<(Kind, Map<String, Value>), DataError> {
    let wrong =
        |error: serde_json::Error| DataError::new(file, &format!("line {}", error.line()), error.to_string());
    let keys = serde_json::from_str(text).map_err(wrong)?;
    Ok((Kind::of(&keys), keys))
}

fn other(file: &str, expected: &str, kind: Kind) -> DataError {
    DataError::new(file, "", format!("expected {expected}, found {}", kind.what()))
}

/// A model of Hugging Face, with so many tokens of a sequence in place of its own, or of Calculon.
pub(crate) fn model(file: &str, text: &str, sequence: Option<u32>) -> Result<Model, DataError> {
    match read(file, text)? {
        (Kind::HuggingFace, keys) => hugging_face::model(file, keys, sequence),
        (Kind::CalculonModel, keys) => calculon::model(file, &keys),
        (kind, _) => Err(other(file, "a model", kind)),
    }
}

/// Reads a platform: one that Polder brings along by its name, any other by the path of its file, or of a system of
/// Calculon (`.json`).
///
/// # Errors
/// When there is none, or its file says what cannot be.
pub fn platform(name: &str) -> Result<Platform, DataError> {
    if !name.ends_with(".json") {
        return Platform::load(name);
    }
    match read(name, &text(Folder::Platforms, name)?)? {
        (Kind::CalculonSystem, keys) => calculon::platform(name, &keys),
        (kind, _) => Err(other(name, "a system of Calculon", kind)),
    }
}

impl Execution {
    /// Reads an execution of Calculon by the path of its file.
    ///
    /// # Errors
    /// When it cannot be read, or asks for what cannot be expressed.
    pub fn load(path: &str) -> Result<Self, DataError> {
        match read(path, &text_of(path)?)? {
            (Kind::CalculonExecution, keys) => calculon::execution(path, &keys),
            (kind, _) => Err(other(path, "an execution of Calculon", kind)),
        }
    }
}
