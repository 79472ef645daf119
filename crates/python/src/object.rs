//! `Object`.

use std::any::Any;
use std::sync::{Arc, OnceLock, Weak};

use polder_attach::session::Session;
use polder_mem::Offset;
use polder_pool::Object as PoolObject;
use pyo3::prelude::*;

use crate::buffer::{self, Elements};
use crate::errors::{self, argument};
use crate::number::Number;
use crate::pool::{Owned, Pool};
use crate::text::Text;

/// Named bytes that this process holds open.
#[pyclass(module = "polder._core", subclass, frozen, weakref)]
pub(crate) struct Object {
    open: Owned<Arc<Open>>,
    name: String,
    note: String,
    nbytes: u64,
    /// What the front says that it holds: the elements, and how many bytes of them.
    held: OnceLock<(Option<Elements>, u64)>,
}

/// Held by the object, and by every collective on it until that is over.
struct Open {
    session: Arc<Session>,
    /// Taken when it is closed.
    object: Option<PoolObject>,
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(object) = self.object.take() {
            self.session.pool().close(object);
        }
    }
}

/// An array that lives in the pool, and stays there while this is kept.
pub(crate) struct Extent {
    pub(crate) at: Offset,
    pub(crate) bytes: u64,
    pub(crate) elements: Elements,
    pub(crate) _kept: Arc<dyn Any + Send + Sync>,
}

impl Object {
    /// Where its array lies, for a collective without a copy of a group that was joined through `session`: a place says
    /// nothing in any other pool.
    pub(crate) fn extent(&self, session: &Weak<Session>) -> PyResult<Extent> {
        let &(elements, bytes) =
            self.held.get().ok_or_else(|| argument(format!("{} holds no array", self.name)))?;
        let elements = elements.ok_or_else(|| {
            argument(format!("{} holds elements that cannot be combined; give it another dtype", self.name))
        })?;
        let open = self.open.with(Arc::clone)?;
        if Arc::as_ptr(&open.session) != session.as_ptr() {
            return Err(argument(format!(
                "{} was opened through another Pool than the group's; open it through the one that the group was made with",
                self.name
            )));
        }
        let at = open.object.as_ref().expect("open until dropped").at();
        Ok(Extent { at, bytes, elements, _kept: open })
    }
}

#[pymethods]
impl Object {
    /// Makes the object `name` of `nbytes`, with a note on what it holds, or opens it when no size is given.
    #[new]
    #[pyo3(signature = (pool, name, nbytes, note))]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        name: Text,
        nbytes: Option<Number>,
        note: &str,
    ) -> PyResult<Self> {
        let nbytes = nbytes.map(|nbytes| nbytes.of::<u64>("nbytes")).transpose()?;
        let session = pool.get().session()?;
        let object = py.detach(|| {
            let pool = session.pool();
            match nbytes {
                Some(nbytes) => pool.create_noted(&name, nbytes, note),
                None => pool.open(&name),
            }
        });
        let object = object.map_err(errors::raise)?;
        let (nbytes, note) = (object.bytes(), object.note().to_owned());
        let open = Owned::new("object", Arc::new(Open { session, object: Some(object) }));
        Ok(Self { open, name: name.into(), note, nbytes, held: OnceLock::new() })
    }

    /// Says, once, that `nbytes` of it are an array of `dtype`, or all of it.
    fn hold(&self, dtype: &str, nbytes: Option<Number>) -> PyResult<()> {
        let bytes = nbytes.map(|bytes| bytes.of::<u64>("the array's size in bytes")).transpose()?;
        let (name, has, bytes) = (&self.name, self.nbytes, bytes.unwrap_or(self.nbytes));
        if bytes > has {
            return Err(argument(format!(
                "{name} has {has} bytes, the array {bytes}; open it with a smaller shape"
            )));
        }
        self.held.get_or_init(|| (Elements::named(dtype).ok(), bytes));
        Ok(())
    }

    /// What its creator noted of it; empty where it noted nothing.
    #[getter]
    fn note(&self) -> &str {
        &self.note
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Its size in bytes, as it was created.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Fills `array` with the object's first bytes, as they are published now.
    fn read_into(&self, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let held = buffer::bytes_to_write(array)?;
        let span = held.span;
        let read = array.py().detach(|| {
            self.open.with(|open| {
                // SAFETY: `held` keeps the bytes; the caller has just made the array and shows it to nobody.
                let into = unsafe { span.bytes_mut() };
                let object = open.object.as_ref().expect("open until dropped");
                open.session.pool().expect_member()?;
                object.read_at(open.session.pool().memory(), 0, into)
            })
        });
        read?.map_err(errors::raise)
    }

    /// Publishes the bytes of `array` as the object's first.
    fn write_from(&self, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let held = buffer::bytes_to_read(array)?;
        let span = held.span;
        let written = array.py().detach(|| {
            self.open.with(|open| {
                // SAFETY: `held` keeps the bytes; a process that writes them meanwhile publishes what is there.
                let from = unsafe { span.bytes() };
                let object = open.object.as_ref().expect("open until dropped");
                open.session.pool().expect_member()?;
                object.write_at(open.session.pool().memory(), 0, from)
            })
        });
        written?.map_err(errors::raise)
    }

    /// Closes it, once the collectives on it are over. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let open = self.open.take();
        py.detach(|| drop(open));
    }
}
