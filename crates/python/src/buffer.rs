//! The bytes of Python's arrays: whatever speaks the buffer protocol, and bare pointers for torch.

use std::borrow::Cow;
use std::ffi::{CStr, c_char};

use polder_kernels::{Dtype, Op};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::argument;
use crate::object::Object;

/// What an array's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elements {
    pub(crate) dtype: Dtype,
    /// Whether they are bools, 0 or 1, and must stay so.
    logical: bool,
}

impl Elements {
    pub(crate) const BYTES: Self = Self { dtype: Dtype::U8, logical: false };

    /// The type of this name; bools are bytes.
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        let logical = name == "bool";
        let dtype = if logical { Some(Dtype::U8) } else { Dtype::named(name) };
        let dtype =
            dtype.ok_or_else(|| argument(format!("elements of type {name} cannot be combined; {KNOWN}")))?;
        Ok(Self { dtype, logical })
    }

    /// The type of a buffer's format, in the letters of Python's `struct`.
    fn of(format: &CStr, item_bytes: usize) -> PyResult<Self> {
        let text = format.to_bytes();
        let letter = match text {
            [letter] | [b'@' | b'=' | b'<', letter] => *letter,
            _ => 0,
        };
        let dtype = match (letter, item_bytes) {
            (b'd', 8) => Dtype::F64,
            (b'f', 4) => Dtype::F32,
            (b'e', 2) => Dtype::F16,
            (b'?' | b'B' | b'c', 1) => Dtype::U8,
            (b'b', 1) => Dtype::I8,
            (b'H', 2) => Dtype::U16,
            (b'h', 2) => Dtype::I16,
            (b'I' | b'L', 4) => Dtype::U32,
            (b'i' | b'l', 4) => Dtype::I32,
            (b'Q' | b'L' | b'N', 8) => Dtype::U64,
            (b'q' | b'l' | b'n', 8) => Dtype::I64,
            _ => {
                let format = String::from_utf8_lossy(text);
                return Err(argument(format!("elements of format {format:?} cannot be sent; {KNOWN}")));
            }
        };
        Ok(Self { dtype, logical: letter == b'?' })
    }

    /// The operation of this name on these elements: on bools a sum is "or", and a product is "and".
    pub(crate) fn op(&self, name: &str) -> PyResult<Op> {
        let op = Op::named(name).ok_or_else(|| {
            let known = Op::ALL.map(Op::name).join(", ");
            argument(format!("no operation {name:?}; there are {known}"))
        })?;
        match (op, self.logical) {
            (Op::Sum, true) => Ok(Op::Max),
            (Op::Product, true) => Ok(Op::Min),
            (Op::Average, true) => Err(argument("bools have no average; convert them to a float".to_owned())),
            // The sum of two ranks may be too large for them already.
            (Op::Average, false) if !self.dtype.is_float() && self.dtype.bytes() < 4 => {
                Err(argument(format!(
                    "the average of {} is that of a sum, which wraps around in {} bits; convert them to int64 or a float",
                    self.dtype,
                    8 * self.dtype.bytes()
                )))
            }
            (op, _) => Ok(op),
        }
    }
}

const KNOWN: &str =
    "there are little-endian floats of 16, 32 and 64 bits, integers and bool, and bfloat16 from torch";

/// Bytes that Python keeps alive for the length of a call, which other Python threads may reach meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    at: usize,
    bytes: usize,
    pub(crate) elements: Elements,
}

impl Span {
    /// No bytes.
    pub(crate) const EMPTY: Self = Self { at: 0, bytes: 0, elements: Elements::BYTES };

    /// `bytes` bytes at an address.
    ///
    /// # Safety
    /// They stay allocated, and writable if `bytes_mut` is called, until the span is no longer used.
    pub(crate) unsafe fn raw((at, bytes): (usize, usize), elements: Elements) -> PyResult<Self> {
        match bytes {
            bytes if isize::try_from(bytes).is_ok() && (at != 0 || bytes == 0) => {
                Ok(Self { at, bytes, elements })
            }
            _ => Err(argument(format!("{bytes} bytes at address {at:#x} are no array"))),
        }
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.elements.dtype
    }

    /// Whether the two share a byte.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.at < other.at + other.bytes
            && other.at < self.at + self.bytes
    }

    /// Whether this is chunk `index` of `whole`, which has chunks of this length.
    pub(crate) fn is_chunk(&self, whole: &Self, index: usize) -> bool {
        self.at == whole.at + index * self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes, to read.
    ///
    /// # Safety
    /// The span's memory is alive, and nobody writes it meanwhile: a program that writes an array while a
    /// collective reads it has a race of its own making, as with every other library.
    pub(crate) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: not null for a positive length, alive and unwritten by this function's contract.
        unsafe { std::slice::from_raw_parts(self.at as *const u8, self.bytes) }
    }

    /// The bytes as they are now, to read while a call writes to `into`: a copy, if they share one with it.
    ///
    /// # Safety
    /// As [`Span::bytes`], where nothing of `into` is written before this returns.
    pub(crate) unsafe fn bytes_beside<'a>(&self, into: &[Self]) -> Cow<'a, [u8]> {
        // SAFETY: the same contract.
        let bytes = unsafe { self.bytes() };
        match into.iter().any(|into| self.overlaps(into)) {
            true => Cow::Owned(bytes.to_vec()),
            false => Cow::Borrowed(bytes),
        }
    }

    /// The bytes, to write.
    ///
    /// # Safety
    /// As [`Span::bytes`], and nobody else reads or writes them meanwhile.
    pub(crate) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: not null for a positive length, alive and ours alone by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.at as *mut u8, self.bytes) }
    }
}

/// That no two outputs of a call share a byte.
pub(crate) fn expect_apart(what: &str, into: &[Span]) -> PyResult<()> {
    let mut order: Vec<_> = (0..into.len()).filter(|index| into[*index].bytes > 0).collect();
    order.sort_by_key(|index| into[*index].at);
    match order.windows(2).find(|pair| into[pair[0]].overlaps(&into[pair[1]])) {
        None => Ok(()),
        Some(pair) => {
            let (one, other) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            Err(argument(format!(
                "{what} got outputs {one} and {other} that share memory; give each its own"
            )))
        }
    }
}

/// Whether elements of this format, in the letters of Python's `struct`, are or have references to objects. Names of fields stand
/// between colons.
fn has_objects(format: &CStr) -> bool {
    format.to_bytes().split(|byte| *byte == b':').step_by(2).any(|letters| letters.contains(&b'O'))
}

/// A Python object's buffer, held until it is dropped, with the GIL.
pub(crate) struct Held {
    view: Box<ffi::Py_buffer>,
    pub(crate) span: Span,
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: `view` was filled by `PyObject_GetBuffer`, is released once, and a `Held`, which is not Send, lives on a
        // thread that has the GIL.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.view) };
    }
}

/// Takes the buffer of `array` to read.
pub(crate) fn readable(array: &Bound<'_, PyAny>) -> PyResult<Held> {
    if array.is_instance_of::<Object>() {
        return Err(argument(
            "this call takes arrays; all_reduce, broadcast, and without out all_gather and reduce_scatter take an Object, \
             others what its read() gives"
                .to_owned(),
        ));
    }
    let mut held = bytes_to_read(array)?;
    let format = match held.view.format.is_null() {
        true => c"B",
        // SAFETY: a format that is not null is a C string that lives as long as the view.
        false => unsafe { CStr::from_ptr(held.view.format) },
    };
    held.span.elements = Elements::of(format, held.view.itemsize.unsigned_abs())?;
    Ok(held)
}

/// Takes the buffer of `array` to write.
pub(crate) fn writable(array: &Bound<'_, PyAny>) -> PyResult<Held> {
    to_write(readable(array)?)
}

/// Takes the buffer of `array`, of whatever elements, to read its bytes.
pub(crate) fn bytes_to_read(array: &Bound<'_, PyAny>) -> PyResult<Held> {
    // At its final place before it is filled: exporters let it point into itself.
    let mut view = Box::new(ffi::Py_buffer::new());
    // SAFETY: `array` is an object, `view` a buffer to fill, and this thread has the GIL.
    let rc = unsafe { ffi::PyObject_GetBuffer(array.as_ptr(), &raw mut *view, ffi::PyBUF_RECORDS_RO) };
    if rc != 0 {
        return Err(PyErr::fetch(array.py()));
    }
    let span = Span { at: view.buf as usize, bytes: view.len.unsigned_abs(), elements: Elements::BYTES };
    let held = Held { view, span };
    // SAFETY: the view is filled.
    if unsafe { ffi::PyBuffer_IsContiguous(&raw const *held.view, b'C' as c_char) } == 0 {
        return Err(argument(
            "the array is not contiguous; pass numpy.ascontiguousarray(array), and copy the result back"
                .to_owned(),
        ));
    }
    // SAFETY: a format that is not null is a C string that lives as long as the view.
    if !held.view.format.is_null() && has_objects(unsafe { CStr::from_ptr(held.view.format) }) {
        return Err(argument(
            "the array holds references to Python objects, which mean nothing elsewhere; pass one of numbers or bytes"
                .to_owned(),
        ));
    }
    Ok(held)
}

/// Takes the buffer of `array`, of whatever elements, to write its bytes.
pub(crate) fn bytes_to_write(array: &Bound<'_, PyAny>) -> PyResult<Held> {
    to_write(bytes_to_read(array)?)
}

fn to_write(held: Held) -> PyResult<Held> {
    if held.view.readonly != 0 {
        return Err(argument("the array is read-only; pass one that can be written".to_owned()));
    }
    Ok(held)
}
