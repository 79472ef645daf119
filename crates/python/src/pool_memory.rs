//! `PoolMemory`: bytes of a pool that this process alone writes, which peers read in place and Python as a buffer.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use polder_attach::session::Session;
use polder_mem::Offset;
use polder_mem::{AnyMemory, Memory};
use polder_pool::PrivateMemory;
use pyo3::{ffi, prelude::*};

use crate::buffer::Elements;
use crate::errors::{self, argument};
use crate::object::Extent;
use crate::pool::{Owned, Pool};
use crate::range::{Release, export};

/// A GPU is told of whole pages.
const PAGE: usize = 4096;

/// The numbers of what Python takes, apart from those of MPI_Alloc_mem in the same process.
static TAKEN: Mutex<u64> = Mutex::new(1 << 63);

/// Zeroed bytes in whole pages of their own; given back when the object and what was made over it are gone.
#[pyclass(module = "polder._core", frozen, weakref)]
pub(crate) struct PoolMemory {
    open: Owned<Arc<Open>>,
    /// In the pool.
    at: Offset,
    /// Where they begin in this process.
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
    release: Release,
}

/// Held by the object, and by every collective on it until that is over.
struct Open {
    // Before the session: it lies in its pool.
    _held: PrivateMemory<AnyMemory>,
    session: Arc<Session>,
}

fn next_number() -> u64 {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    *taken += 1;
    *taken
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        self.release.call();
    }
}

impl PoolMemory {
    /// `nbytes` of it from `begin` on, as such elements, for a collective of a group that was joined through `session`.
    pub(crate) fn extent(
        &self,
        session: &Weak<Session>,
        (begin, nbytes): (usize, usize),
        elements: Elements,
    ) -> PyResult<Extent> {
        let open = self.open.with(Arc::clone)?;
        if Arc::as_ptr(&open.session) != session.as_ptr() {
            return Err(argument("the memory is of another Pool than the group's".to_owned()));
        }
        if begin.checked_add(nbytes).is_none_or(|end| end > self.nbytes) {
            let Self { nbytes: all, .. } = self;
            return Err(argument(format!("{nbytes} bytes from {begin} on are not in memory of {all} bytes")));
        }
        let at = self.at + begin as u64;
        Ok(Extent { at, bytes: nbytes as u64, elements, _kept: open })
    }
}

#[pymethods]
impl PoolMemory {
    /// Takes it; `None` where this process has no address for the pool's bytes, as in a shadow.
    #[staticmethod]
    fn take(py: Python<'_>, pool: &Bound<'_, Pool>, nbytes: usize) -> PyResult<Option<Self>> {
        let session = pool.get().session()?;
        let nbytes = nbytes.div_ceil(PAGE).saturating_mul(PAGE);
        // It begins behind a line of the pool's own.
        let asked = nbytes.saturating_add(PAGE) as u64;
        let number = next_number();
        let held = py
            .detach(|| PrivateMemory::take(Arc::clone(session.pool()), number, asked))
            .map_err(errors::raise)?;
        let Some(begin) = session.pool().memory().address(held.at(), held.bytes()) else { return Ok(None) };
        let skip = begin.addr().next_multiple_of(PAGE) - begin.addr();
        let (at, address) = (held.at() + skip as u64, begin.expose_provenance() + skip);
        let open = Owned::new("memory of a pool", Arc::new(Open { _held: held, session }));
        Ok(Some(Self { open, at, address, nbytes, release: Release::default() }))
    }

    /// Bytes of its pages.
    #[getter]
    fn size(&self) -> usize {
        self.nbytes
    }

    /// Has `call` called once, before it goes.
    fn before_release(&self, call: Py<PyAny>) {
        self.release.set(call);
    }

    /// # Safety
    /// `view` is null or a buffer to fill, as Python's protocol says.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: as many bytes are mapped there until this object is gone, and the view keeps it; and this function's contract.
        unsafe { export(slf.as_any(), (this.address, this.nbytes), view, flags) }
    }
}
