//! Files that describe models and layouts: Polder's own, and those of others.

mod calculon;
mod hugging_face;
mod json;

use polder_platform::{DataError, Folder, read, text};

pub use self::calculon::Execution;
use crate::step::model::Model;

impl Model {
    /// Reads a model: one that Polder brings along by its name, any other by the path of its file, or of a `.json`:
    /// a Hugging Face `config.json` or a model of Calculon.
    ///
    /// # Errors
    /// When there is none, or its file says what cannot be.
    pub fn load(name: &str) -> Result<Self, DataError> {
        Self::load_with(name, None)
    }

    /// As [`Model::load`], with so many tokens of a sequence in place of its own, which its file need not have then.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_with(name: &str, sequence: Option<u32>) -> Result<Self, DataError> {
        let mut model: Self = match name.ends_with(".json") {
            true => json::model(name, &text(Folder::Models, name)?, sequence)?,
            false => read(Folder::Models, name)?,
        };
        model.sequence = sequence.unwrap_or(model.sequence);
        model.check().map_err(|(key, problem)| DataError::new(name, key, problem))?;
        Ok(model)
    }
}
