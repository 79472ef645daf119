//! The Python module `polder._core`: pools, objects, groups and plans, with Python's errors and arrays.

mod buffer;
mod errors;
mod group;
mod lane;
mod number;
mod object;
mod plan;
mod pool;
mod tellers;

use pyo3::prelude::*;

/// The compiled half of `polder`.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<pool::Pool>()?;
    module.add_class::<object::Object>()?;
    module.add_class::<object::Entry>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<group::Ticket>()?;
    module.add_function(wrap_pyfunction!(pool::format, module)?)?;
    module.add_function(wrap_pyfunction!(pool::settings, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_train, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_points, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_names, module)?)?;
    Ok(())
}
