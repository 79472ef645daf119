//! `Range`: one virtual range for one object, bound and mapped by tier, that Python reads and writes as a buffer.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use polder_offload::{self as offload, Location, Range as Pages, StepError, TierError};
use pyo3::exceptions::PyBufferError;
use pyo3::{ffi, prelude::*};

use crate::errors::{argument, plain};

pub(crate) fn of_tier(error: TierError) -> PyErr {
    let class = if error.is_full() { "TierFullError" } else { "TierError" };
    plain(class, error.to_string())
}

pub(crate) fn of_step(error: StepError) -> PyErr {
    match error {
        StepError::Tier(error) => of_tier(error),
        error => argument(error.to_string()),
    }
}

/// A tier of memory: a NUMA node, or the path of a dax device.
#[derive(FromPyObject)]
pub(crate) enum GivenPlace {
    Node(usize),
    Device(PathBuf),
}

impl From<GivenPlace> for offload::Place {
    fn from(place: GivenPlace) -> Self {
        match place {
            GivenPlace::Node(node) => Self::Node(node),
            GivenPlace::Device(path) => Self::Device(path),
        }
    }
}

/// Bytes in each place, with places as text.
pub(crate) fn named(bytes: BTreeMap<Location, usize>) -> Vec<(String, usize)> {
    bytes.into_iter().map(|(place, of)| (place.to_string(), of)).collect()
}

/// Zeroed bytes at one range of addresses, exported as a buffer; given back when the object and what was made over it are gone.
#[pyclass(module = "polder._core", frozen, weakref)]
pub(crate) struct Range {
    pages: Arc<Mutex<Pages>>,
    /// Where they begin: they never move.
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
    /// Bytes of its pages.
    #[pyo3(get)]
    size: usize,
    release: Release,
}

impl Drop for Range {
    fn drop(&mut self) {
        self.release.call();
    }
}

/// What is called before memory goes that Python has.
#[derive(Default)]
pub(crate) struct Release(Mutex<Option<Py<PyAny>>>);

impl Release {
    pub(crate) fn set(&self, call: Py<PyAny>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
    }

    /// Calls it, once.
    pub(crate) fn call(&mut self) {
        let release = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(release) = release {
            Python::attach(|py| {
                // The code that lets go may be on its way out with an error, which the call must neither see nor clear.
                let raised = PyErr::take(py);
                if let Err(error) = release.call0(py) {
                    error.write_unraisable(py, Some(release.bind(py)));
                }
                if let Some(raised) = raised {
                    raised.restore(py);
                }
            });
        }
    }
}

#[pymethods]
impl Range {
    #[new]
    fn new(nbytes: usize) -> PyResult<Self> {
        let pages = Pages::new(nbytes).map_err(of_tier)?;
        let (address, size) = (pages.address().expose_provenance(), pages.bytes());
        Ok(Self { pages: Arc::new(Mutex::new(pages)), address, nbytes, size, release: Release::default() })
    }

    /// Puts the pages of `[begin, begin + nbytes)` on a NUMA node.
    fn bind(&self, py: Python<'_>, begin: usize, nbytes: usize, node: usize) -> PyResult<()> {
        py.detach(|| self.lock().bind(begin, nbytes, node)).map_err(of_tier)
    }

    /// Maps memory of a dax device, or of a file in memory, in place of `[begin, begin + nbytes)`, and says where it is there.
    fn map(&self, py: Python<'_>, begin: usize, nbytes: usize, path: PathBuf) -> PyResult<u64> {
        py.detach(|| self.lock().map(begin, nbytes, &path)).map_err(of_tier)
    }

    /// Has `call` called once, before the pages go.
    fn before_release(&self, call: Py<PyAny>) {
        self.release.set(call);
    }

    /// Raises if a mapped device or file has lost bytes.
    fn check(&self) -> PyResult<()> {
        self.lock().check().map_err(of_tier)
    }

    /// Bytes in each place, as the kernel says: a node, a device, or pages that were never touched.
    fn r#where(&self, py: Python<'_>) -> PyResult<Vec<(String, usize)>> {
        py.detach(|| self.lock().locate()).map(named).map_err(of_tier)
    }

    /// # Safety
    /// `view` is null or a buffer to fill, as Python's protocol says.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: as many bytes are mapped there until this object is gone, and the view keeps it; and this function's contract.
        unsafe { export(slf.as_any(), (this.address, this.nbytes), view, flags) }
    }
}

/// Fills `view` with the bytes at an address.
///
/// # Safety
/// `view` is null or a buffer to fill; the bytes are mapped while `owner` lives.
pub(crate) unsafe fn export(
    owner: &Bound<'_, PyAny>,
    (address, nbytes): (usize, usize),
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("expected a buffer to fill"));
    }
    let Ok(length) = nbytes.try_into() else {
        return Err(PyBufferError::new_err(format!("{nbytes} bytes are no buffer")));
    };
    let at = std::ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: this function's contract.
    let rc = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), at.cast(), length, 0, flags) };
    if rc == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

impl Range {
    /// Its pages.
    pub(crate) const fn pages(&self) -> &Arc<Mutex<Pages>> {
        &self.pages
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
