//! The Python module `polder._core`.
use pyo3::prelude::*;

/// The compiled half of `polder`.
#[pymodule]
fn _core(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
