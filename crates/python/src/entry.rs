//! `Entry`: an object as a list of the pool names it.

use polder_pool::ListedObject;
use pyo3::prelude::*;

/// An object in the list of `Pool.list`.
#[pyclass(module = "polder._core", frozen, get_all)]
pub(crate) struct Entry {
    /// Its name.
    pub(crate) name: String,
    /// Its size in bytes.
    pub(crate) nbytes: u64,
    /// The host that created it, and in whose chunks it lies.
    pub(crate) owner: u16,
    /// The job that it is booked to.
    pub(crate) job: u64,
}

impl From<ListedObject> for Entry {
    fn from(ListedObject { name, bytes, owner, job, .. }: ListedObject) -> Self {
        Self { name, nbytes: bytes, owner, job }
    }
}

#[pymethods]
impl Entry {
    fn __repr__(&self) -> String {
        format!("Entry(name={:?}, nbytes={}, owner={}, job={})", self.name, self.nbytes, self.owner, self.job)
    }
}
