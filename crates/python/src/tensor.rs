//! Where the bytes of torch's tensors lie, by the table of C functions that DLPack 1.3 describes: nothing is linked to torch.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyString, PyType};
use pyo3::{ffi, intern};

/// Addresses below are looked at by Python: one into a storage that was freed is its offset from nothing.
const LOW: usize = 1 << 40;

/// DLPack's `DLTensor`.
#[repr(C)]
struct Described {
    data: *mut c_void,
    device: c_int,
    device_id: c_int,
    dims: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    offset: u64,
}

/// DLPack's numbers of memory of the host, and of complex elements.
const CPU: c_int = 1;
const COMPLEX: u8 = 5;

type Describe = unsafe extern "C" fn(*mut c_void, *mut Described) -> c_int;

/// How DLPack's `DLPackExchangeAPI` begins.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    previous: *const c_void,
    others: [*const c_void; 3],
    describe: Option<Describe>,
}

const _: () = assert!(size_of::<Described>() == 48 && size_of::<Table>() == 48);

struct Torch {
    /// `Tensor` and `Parameter`. A class of a program's own may say of itself what DLPack does not know.
    classes: [Py<PyType>; 2],
    /// What torch before 2.10 has not.
    describe: Option<Describe>,
    /// `polder.address.find`, which knows every tensor.
    find: Py<PyAny>,
    increment_version: Py<PyAny>,
}

impl Torch {
    fn new(py: Python<'_>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let class = torch.getattr("Tensor")?.cast_into::<PyType>()?;
        let parameter = torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?;
        let find = py.import("polder.address")?.getattr("find")?.unbind();
        let increment_version = torch.getattr("_C")?.getattr("_increment_version")?.unbind();
        let table = class.getattr("__dlpack_c_exchange_api__").ok().and_then(|capsule| {
            // SAFETY: this takes any object, and fails if it is no capsule of this name.
            let table =
                unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
            drop(PyErr::take(py));
            // SAFETY: a capsule of this name has such a table, which lives as long as the process.
            unsafe { table.cast::<Table>().as_ref() }
        });
        let describe = table.filter(|table| table.major == 1).and_then(|table| table.describe);
        Ok(Self { classes: [class.unbind(), parameter.unbind()], describe, find, increment_version })
    }

    fn get(py: Python<'_>) -> PyResult<&Self> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || Self::new(py))
    }

    /// What DLPack says of a tensor.
    fn described(&self, tensor: &Bound<'_, PyAny>) -> Option<Described> {
        let py = tensor.py();
        let describe = self.describe?;
        // SAFETY: it is an object.
        let class = unsafe { ffi::Py_TYPE(tensor.as_ptr()) };
        if !self.classes.iter().any(|known| known.as_ptr().cast() == class) {
            return None;
        }
        let mut at = std::mem::MaybeUninit::<Described>::uninit();
        // SAFETY: the function is of the class of this object, fills what it points to unless it fails, and this thread has the GIL.
        if unsafe { describe(tensor.as_ptr().cast(), at.as_mut_ptr()) } != 0 {
            drop(PyErr::take(py));
            return None;
        }
        // SAFETY: it did not fail.
        Some(unsafe { at.assume_init() })
    }
}

impl Described {
    /// Address and bytes, if the bytes are in memory of the host and in the order of the elements.
    fn dense(&self) -> Option<(usize, usize)> {
        let mut elements = 1;
        let mut is_dense = true;
        for dim in (0..usize::try_from(self.dims).ok()?).rev() {
            // SAFETY: they have as many lengths and strides as dimensions, as long as the tensor lives.
            let (length, stride) = unsafe { (*self.shape.add(dim), *self.strides.add(dim)) };
            is_dense &= length == 1 || stride == elements;
            elements *= length;
        }
        let (at, bytes) =
            (self.data.addr() + self.offset as usize, elements as usize * usize::from(self.bits / 8));
        let is_whole = self.device == CPU && self.lanes == 1 && self.bits.is_multiple_of(8);
        (is_whole && (elements == 0 || is_dense && at >= LOW)).then(|| {
            // Rust makes a pointer of it again.
            (self.data.expose_provenance() + self.offset as usize, bytes)
        })
    }
}

/// Address and bytes of a tensor whose bytes are its values in order, in memory of the host; `None` for any other. `what` is for errors.
pub(crate) fn place(tensor: &Bound<'_, PyAny>, what: &str) -> PyResult<Option<(usize, usize)>> {
    let py = tensor.py();
    let torch = Torch::get(py)?;
    if let Some(described) = torch.described(tensor)
        && let Some(dense) = described.dense()
        && ends_in_storage(tensor, &described, dense.1)?
    {
        // DLPack does not say it of bits that are lazy.
        let is_lazy = is_so(tensor, intern!(py, "is_neg"))?
            || described.code == COMPLEX && is_so(tensor, intern!(py, "is_conj"))?;
        return Ok((!is_lazy).then_some(dense));
    }
    let at: Option<usize> = torch.find.bind(py).call1((tensor, what))?.extract()?;
    at.map(|at| Ok((at, tensor.getattr(intern!(py, "nbytes"))?.extract()?))).transpose()
}

/// Whether the storage of a tensor holds so many bytes from its first element on. A program may have made it smaller, and DLPack does
/// not say how long it is.
fn ends_in_storage(tensor: &Bound<'_, PyAny>, described: &Described, bytes: usize) -> PyResult<bool> {
    if bytes == 0 {
        return Ok(true);
    }
    let py = tensor.py();
    let storage = said(tensor, intern!(py, "untyped_storage"))?;
    let held: usize = said(&storage, intern!(py, "nbytes"))?.extract()?;
    let before: usize = said(tensor, intern!(py, "storage_offset"))?.extract()?;
    Ok(before * usize::from(described.bits / 8) + bytes <= held)
}

fn is_so(tensor: &Bound<'_, PyAny>, method: &Bound<'_, PyString>) -> PyResult<bool> {
    said(tensor, method)?.is_truthy()
}

/// What a method says. PyO3 makes an object of the method first, where one module is for all versions of Python.
fn said<'py>(object: &Bound<'py, PyAny>, method: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    let end = ptr::null_mut::<ffi::PyObject>();
    // SAFETY: all are objects, the list of arguments ends with null, and this thread has the GIL.
    let said = unsafe { ffi::PyObject_CallMethodObjArgs(object.as_ptr(), method.as_ptr(), end) };
    // SAFETY: it gives a reference of its own, or null with an error.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), said) }
}

/// Raises the versions of tensors that are written, so that autograd sees it as any other change in place.
pub(crate) fn increment_versions(tensors: &Bound<'_, PyList>) -> PyResult<()> {
    let increment = Torch::get(tensors.py())?.increment_version.as_ptr();
    let end = ptr::null_mut::<ffi::PyObject>();
    // SAFETY: as in `is_so`.
    let done = unsafe { ffi::PyObject_CallFunctionObjArgs(increment, tensors.as_ptr(), end) };
    // SAFETY: as in `is_so`.
    unsafe { Bound::from_owned_ptr_or_err(tensors.py(), done) }.map(drop)
}
