//! Predicted steps: a question and its answer as JSON, which the front gives types, and tables of many layouts.

use polder_sim::{NUMBERS, OrderError, Request, Step, points};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::argument;

/// Answers a [`Request`] in JSON.
#[pyfunction]
pub(crate) fn plan_train(py: Python<'_>, request: &str) -> PyResult<String> {
    let request: Request = serde_json::from_str(request).map_err(|error| argument(error.to_string()))?;
    py.detach(|| {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let answer = request.train(threads, &|_, _| ()).map_err(|error| argument(error.to_string()))?;
        serde_json::to_string(&answer).map_err(|error| argument(error.to_string()))
    })
}

/// The names of a layout's numbers and of a step's figures.
#[pyfunction]
pub(crate) fn plan_names() -> (Vec<&'static str>, Vec<&'static str>) {
    (NUMBERS.to_vec(), Step::COLUMNS.to_vec())
}

/// Predicts rows of unsigned 32-bit numbers, into rows of 64-bit floats.
#[pyfunction]
#[pyo3(signature = (model, platform, numbers, *, rack=None, fill=None, order=None))]
pub(crate) fn plan_points<'py>(
    py: Python<'py>,
    model: &str,
    platform: &str,
    numbers: PyBuffer<u32>,
    rack: Option<String>,
    fill: Option<u32>,
    order: Option<&str>,
) -> PyResult<Bound<'py, PyBytes>> {
    let numbers = numbers.to_vec(py)?;
    let order = order.map(str::parse).transpose().map_err(|error: OrderError| argument(error.to_string()))?;
    let rows = py
        .detach(|| points(model, platform, rack.as_deref(), fill, order, &numbers))
        .map_err(|error| argument(error.to_string()))?;
    let bytes: Vec<u8> = rows.iter().flat_map(|figure| figure.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}
