//! `Range`: one virtual range for one object, bound and mapped by tier, that Python reads and writes as a buffer.

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use polder_mem::{Range as Pages, TierError};
use pyo3::exceptions::PyBufferError;
use pyo3::{ffi, prelude::*};

use crate::errors::plain;

fn of_tier(error: TierError) -> PyErr {
    plain("TierError", error.to_string())
}

/// Zeroed bytes at one range of addresses, exported as a buffer; given back when the object and what was made over it are gone.
#[pyclass(module = "polder._core", frozen, weakref)]
pub(crate) struct Range {
    pages: Mutex<Pages>,
    /// Where they begin: they never move.
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
    /// Bytes of its pages.
    #[pyo3(get)]
    size: usize,
}

#[pymethods]
impl Range {
    #[new]
    fn new(nbytes: usize) -> PyResult<Self> {
        let pages = Pages::new(nbytes).map_err(of_tier)?;
        let (address, size) = (pages.address().expose_provenance(), pages.bytes());
        Ok(Self { pages: Mutex::new(pages), address, nbytes, size })
    }

    /// Puts the pages of `[begin, begin + nbytes)` on a NUMA node.
    fn bind(&self, py: Python<'_>, begin: usize, nbytes: usize, node: usize) -> PyResult<()> {
        py.detach(|| self.lock().bind(begin, nbytes, node)).map_err(of_tier)
    }

    /// Maps memory of a dax device, or of a file in memory, in place of `[begin, begin + nbytes)`.
    #[pyo3(signature = (begin, nbytes, path, offset=0))]
    fn map(&self, begin: usize, nbytes: usize, path: PathBuf, offset: u64) -> PyResult<()> {
        self.lock().map(begin, nbytes, &path, offset).map_err(of_tier)
    }

    /// Raises if a mapped device or file has lost bytes.
    fn check(&self) -> PyResult<()> {
        self.lock().check().map_err(of_tier)
    }

    /// Bytes in each place, as the kernel says: a node, a device, or pages that were never touched.
    fn r#where(&self, py: Python<'_>) -> PyResult<Vec<(String, usize)>> {
        let places = py.detach(|| self.lock().locate()).map_err(of_tier)?;
        Ok(places.into_iter().map(|(place, bytes)| (place.to_string(), bytes)).collect())
    }

    /// # Safety
    /// `view` is null or a buffer to fill, as Python's protocol says.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("expected a buffer to fill"));
        }
        let this = slf.get();
        let Ok(length) = this.nbytes.try_into() else {
            return Err(PyBufferError::new_err(format!("{} bytes are no buffer", this.nbytes)));
        };
        let at = std::ptr::with_exposed_provenance_mut::<u8>(this.address);
        // SAFETY: `view` is live; as many bytes are mapped there until this object is gone, and the view keeps it.
        let rc = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), at.cast(), length, 0, flags) };
        if rc == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Range {
    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
