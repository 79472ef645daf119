//! Platforms by name or by path, of any format.

use crate::file::{DataError, Folder, read, text};
use crate::foreign;
use crate::machine::Platform;
use crate::simgrid::Cluster;

impl Platform {
    /// Reads a platform: one that Polder brings along by its name, any other by the path of its file, or of a system of Calculon
    /// (`.json`).
    ///
    /// # Errors
    /// When there is none, or its file says what cannot be.
    pub fn load(name: &str) -> Result<Self, DataError> {
        if Cluster::is_named(name) {
            let problem =
                "a platform of SimGrid is a fabric alone, without accelerators or memory; expected TOML";
            return Err(DataError::new(name, "", problem));
        }
        if name.ends_with(".json") {
            return foreign::platform(name, &text(Folder::Platforms, name)?);
        }
        let platform: Self = read(Folder::Platforms, name)?;
        platform.check().map_err(|(key, problem)| DataError::new(name, &key, problem))?;
        Ok(platform)
    }
}
