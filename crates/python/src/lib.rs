//! The Python module `polder._core`: pools, objects, groups, plans and placements, with Python's errors and arrays.

mod buffer;
mod entry;
mod errors;
mod group;
mod job_pool;
mod kv;
mod lane;
mod messages;
mod number;
mod object;
mod offload;
mod optimizer;
mod plan;
mod pool;
mod pool_memory;
mod range;
mod service;
mod signals;
mod store;
mod tensor;
mod text;

use pyo3::prelude::*;

/// The compiled half of `polder`.
#[pymodule(gil_used = true)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<pool::Pool>()?;
    module.add_class::<job_pool::JobPool>()?;
    module.add_class::<object::Object>()?;
    module.add_class::<entry::Entry>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<group::Ticket>()?;
    module.add_class::<group::Agreed>()?;
    module.add_class::<group::AnyOperation>()?;
    module.add_class::<messages::Messages>()?;
    module.add_class::<messages::Channel>()?;
    module.add_class::<messages::Message>()?;
    module.add_function(wrap_pyfunction!(pool::format, module)?)?;
    module.add_function(wrap_pyfunction!(pool::settings, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_train, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_pays, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_platform, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_points, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_memory, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_fabric, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_inference, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_coherence, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_sync, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_mixed, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_mpi, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_chakra, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_tier, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_offload, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_names, module)?)?;
    module.add_class::<range::Range>()?;
    module.add_class::<pool_memory::PoolMemory>()?;
    module.add_class::<offload::States>()?;
    module.add_class::<offload::Saved>()?;
    module.add_function(wrap_pyfunction!(offload::offload_place, module)?)?;
    module.add_function(wrap_pyfunction!(offload::available_memory, module)?)?;
    module.add_function(wrap_pyfunction!(offload::offload_disk, module)?)?;
    module.add_function(wrap_pyfunction!(offload::offload_tiers, module)?)?;
    module.add_function(wrap_pyfunction!(optimizer::offload_step, module)?)?;
    module.add_function(wrap_pyfunction!(optimizer::offload_squares, module)?)?;
    module.add_function(wrap_pyfunction!(optimizer::offload_clip, module)?)?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::Version>()?;
    module.add_class::<kv::Cache>()?;
    module.add_class::<kv::KvConnector>()?;
    module.add_function(wrap_pyfunction!(kv::kv_remove, module)?)?;
    module.add_class::<service::ServiceClient>()?;
    module.add_function(wrap_pyfunction!(service::service_proxy, module)?)?;
    module.add_function(wrap_pyfunction!(service::service_shard_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(service::service_split, module)?)?;
    module.add_function(wrap_pyfunction!(service::service_predict, module)?)?;
    module.add_function(wrap_pyfunction!(service::service_shards, module)?)?;
    Ok(())
}
