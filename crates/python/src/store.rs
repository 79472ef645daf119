//! `Store` and `Version`: what `polder.torch.snapshot` and `restore` are made of.

use std::sync::Arc;

use polder_attach::session::Session;
use polder_mem::{Memory, populate_buffer};
use polder_pool::PoolError;
use polder_pool::storage::{self, Published};
use pyo3::prelude::*;

use crate::buffer::{self, Span};
use crate::errors;
use crate::number::Number;
use crate::pool::{Owned, Pool};
use crate::text::Text;

/// A version of whichever memory.
trait Whole: Send {
    fn number(&self) -> u64;
    fn attempt(&self) -> u64;
    fn tensors(&self) -> Vec<(String, u64)>;
    fn sums(&self) -> Vec<(String, u128)>;
    fn read(&self, name: &str, into: &mut [u8]) -> Result<(), PoolError>;
    fn read_rows(&self, name: &str, first: u64, rows: [u64; 2], into: &mut [u8]) -> Result<(), PoolError>;
}

impl<M: Memory + Send + Sync> Whole for storage::Version<M> {
    fn number(&self) -> u64 {
        self.number()
    }

    fn attempt(&self) -> u64 {
        self.attempt()
    }

    fn tensors(&self) -> Vec<(String, u64)> {
        self.tensors().map(|(name, bytes)| (name.to_owned(), bytes)).collect()
    }

    fn sums(&self) -> Vec<(String, u128)> {
        self.sums().map(|(name, sum)| (name.to_owned(), sum)).collect()
    }

    fn read(&self, name: &str, into: &mut [u8]) -> Result<(), PoolError> {
        self.read(name, into)
    }

    fn read_rows(&self, name: &str, first: u64, rows: [u64; 2], into: &mut [u8]) -> Result<(), PoolError> {
        self.read_rows(name, first, rows, into)
    }
}

/// Versions of named bytes in a pool.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Store {
    session: Owned<Arc<Session>>,
    name: String,
}

impl Store {
    fn session(&self) -> PyResult<Arc<Session>> {
        self.session.with(Arc::clone)
    }
}

#[pymethods]
impl Store {
    #[new]
    fn new(pool: &Bound<'_, Pool>, name: Text) -> PyResult<Self> {
        let session = pool.get().session()?;
        storage::Store::new(Arc::clone(session.pool()), &name).map(drop).map_err(errors::raise)?;
        Ok(Self { session: Owned::new("store", session), name: name.into() })
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Publishes a version of these arrays, over the newest or over version `over`: its number, the bytes that were copied, and those that have not changed.
    #[pyo3(signature = (tensors, over=None))]
    fn publish(
        &self,
        py: Python<'_>,
        tensors: Vec<(String, Bound<'_, PyAny>)>,
        over: Option<u64>,
    ) -> PyResult<(u64, u64, u64)> {
        let session = self.session()?;
        publish_spans(py, tensors, |tensors| {
            storage::Store::new(Arc::clone(session.pool()), &self.name)?.publish_over(tensors, over)
        })
    }

    /// As `publish`, version `number` of an attempt: its word, its first number, the version that counts until one of it is whole, the
    /// number below which versions are left alone, and the highest that this store had. `others` are the stores of its other processes,
    /// `left` those of processes that it has no more and that this one clears.
    fn publish_in(
        &self,
        py: Python<'_>,
        attempt: Terms,
        others: Vec<String>,
        left: Vec<String>,
        number: u64,
        tensors: Vec<(String, Bound<'_, PyAny>)>,
    ) -> PyResult<(u64, u64, u64)> {
        let session = self.session()?;
        publish_spans(py, tensors, |tensors| {
            let pool = session.pool();
            in_attempt(pool, attempt, [&others, &left], |attempt| {
                storage::Store::new(Arc::clone(pool), &self.name)?.publish_in(attempt, number, tensors)
            })
        })
    }

    /// The newest version of an attempt, as `publish_in` takes it, that all of its processes have published.
    fn whole_in(&self, py: Python<'_>, attempt: Terms, others: Vec<String>) -> PyResult<Option<u64>> {
        let session = self.session()?;
        let whole = py.detach(|| {
            let pool = session.pool();
            in_attempt(pool, attempt, [&others, &[]], |attempt| {
                storage::Store::new(Arc::clone(pool), &self.name)?.whole_in(attempt)
            })
        });
        whole.map_err(errors::raise)
    }

    /// Makes this process the only one that publishes here, until it leaves the pool.
    fn own(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.session()?;
        let owned = py.detach(|| storage::Store::new(Arc::clone(session.pool()), &self.name)?.own());
        owned.map_err(errors::raise)
    }

    /// Gives up what `own` took.
    fn disown(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.session()?;
        let disowned = py.detach(|| {
            storage::Store::new(Arc::clone(session.pool()), &self.name).map(|store| store.disown())
        });
        disowned.map_err(errors::raise)
    }

    /// All whole versions, the newest first and not older than what was published before the call; the numbers and errors of damaged ones.
    #[expect(clippy::type_complexity, reason = "it is a tuple in Python")]
    fn kept(&self, py: Python<'_>) -> PyResult<(Vec<Version>, Vec<(u64, Py<PyAny>)>)> {
        let session = self.session()?;
        let kept = py.detach(|| {
            let pool = session.pool();
            let kept = storage::Store::new(Arc::clone(pool), &self.name)?.kept()?;
            let boxed = |version| Box::new(version) as Box<dyn Whole>;
            Ok((kept.versions.into_iter().map(boxed).collect::<Vec<_>>(), kept.damaged))
        });
        let (versions, damaged) = kept.map_err(errors::raise)?;
        let damaged =
            damaged.into_iter().map(|(number, error)| (number, errors::raise(error).into_value(py).into()));
        Ok((versions.into_iter().map(|whole| Version::new(whole, &session)).collect(), damaged.collect()))
    }

    /// The version of this number, else the newest.
    #[pyo3(signature = (number=None))]
    fn open(&self, py: Python<'_>, number: Option<Number>) -> PyResult<Version> {
        let number = number.map(|number| number.of("number")).transpose()?;
        let session = self.session()?;
        let opened = py.detach(|| {
            let pool = session.pool();
            let store = storage::Store::new(Arc::clone(pool), &self.name)?;
            let version = match number {
                Some(number) => store.open(number),
                None => store.newest(),
            };
            version.map(|version| Box::new(version) as Box<dyn Whole>)
        });
        Ok(Version::new(opened.map_err(errors::raise)?, &session))
    }

    /// The numbers of the versions that are whole, the oldest first.
    fn versions(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let session = self.session()?;
        let versions = py.detach(|| storage::Store::new(Arc::clone(session.pool()), &self.name)?.versions());
        versions.map_err(errors::raise)
    }

    /// The highest number that was ever published here; 0 for none.
    fn marked(&self, py: Python<'_>) -> PyResult<u64> {
        let session = self.session()?;
        let marked = py.detach(|| storage::Store::new(Arc::clone(session.pool()), &self.name)?.marked());
        marked.map_err(errors::raise)
    }

    /// Removes every version.
    fn remove(&self, py: Python<'_>) -> PyResult<()> {
        let session = self.session()?;
        let removed = py.detach(|| storage::Store::new(Arc::clone(session.pool()), &self.name)?.remove());
        removed.map_err(errors::raise)
    }

    /// Lets go of the pool. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let session = self.session.take();
        py.detach(|| drop(session));
    }
}

/// Of an attempt: its word, its first number, its base, its floor, and what it saw in its own store.
type Terms = (u64, u64, u64, u64, u64);

/// Does something in an attempt, beside the stores of its other processes and those that are left.
fn in_attempt<M: Memory, R>(
    pool: &Arc<polder_pool::Pool<M>>,
    (word, first, base, floor, seen): Terms,
    stores: [&[String]; 2],
    act: impl FnOnce(&storage::Attempt<'_, M>) -> Result<R, PoolError>,
) -> Result<R, PoolError> {
    let opened = stores.map(|names| {
        names.iter().map(|name| storage::Store::new(Arc::clone(pool), name)).collect::<Result<Vec<_>, _>>()
    });
    let [others, left] = opened;
    act(&storage::Attempt { word, first, base, floor, seen, others: &others?, left: &left? })
}

/// Publishes arrays by `publish`: the number, the bytes that were copied, and those that have not changed.
fn publish_spans(
    py: Python<'_>,
    tensors: Vec<(String, Bound<'_, PyAny>)>,
    publish: impl Send + FnOnce(&[(&str, &[u8])]) -> Result<Published, PoolError>,
) -> PyResult<(u64, u64, u64)> {
    let held = tensors.iter().map(|(_, array)| buffer::bytes_to_read(array));
    let held = held.collect::<PyResult<Vec<_>>>()?;
    let spans: Vec<(String, Span)> =
        tensors.into_iter().zip(&held).map(|((name, _), held)| (name, held.span)).collect();
    let published = py.detach(|| {
        // SAFETY: `held` keeps the bytes. If a program writes them meanwhile, the copy of a small tensor counts, and a large one's
        // checksum says so when it is read.
        let tensors: Vec<(&str, &[u8])> =
            spans.iter().map(|(name, span)| (name.as_str(), unsafe { span.bytes() })).collect();
        publish(&tensors)
    });
    let Published { version, copied, shared, .. } = published.map_err(errors::raise)?;
    Ok((version, copied, shared))
}

/// A whole version, held open.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Version {
    /// The version is let go of before the session.
    whole: Owned<(Box<dyn Whole>, Arc<Session>)>,
    number: u64,
}

impl Version {
    fn new(whole: Box<dyn Whole>, session: &Arc<Session>) -> Self {
        let number = whole.number();
        Self { whole: Owned::new("version", (whole, Arc::clone(session))), number }
    }
}

impl Version {
    fn fill(
        &self,
        array: &Bound<'_, PyAny>,
        read: impl Send + FnOnce(&dyn Whole, &mut [u8]) -> Result<(), PoolError>,
    ) -> PyResult<()> {
        let held = buffer::bytes_to_write(array)?;
        let span = held.span;
        let read = array.py().detach(|| {
            self.whole.with(|(whole, _)| {
                // SAFETY: `held` keeps the bytes; the caller shows them to nobody before this returns.
                let into = unsafe { span.bytes_mut() };
                read(&**whole, into)
            })
        });
        read?.map_err(errors::raise)
    }
}

#[pymethods]
impl Version {
    /// Its number.
    #[getter]
    fn number(&self) -> u64 {
        self.number
    }

    /// The word of the attempt that published it; 0 for one that belongs to none.
    #[getter]
    fn attempt(&self) -> PyResult<u64> {
        self.whole.with(|(whole, _)| whole.attempt())
    }

    /// The names of its tensors and the XXH3-128 of each.
    fn sums(&self) -> PyResult<Vec<(String, u128)>> {
        self.whole.with(|(whole, _)| whole.sums())
    }

    /// The names of its tensors and their bytes.
    fn tensors(&self) -> PyResult<Vec<(String, u64)>> {
        self.whole.with(|(whole, _)| whole.tensors())
    }

    /// Fills `array` with the bytes of a tensor, once they match their checksum; `fresh` if nobody has touched its memory yet.
    #[pyo3(signature = (name, array, fresh=false))]
    fn read_into(&self, name: &str, array: &Bound<'_, PyAny>, fresh: bool) -> PyResult<()> {
        self.fill(array, |whole, into| {
            if fresh {
                populate_buffer(into);
            }
            whole.read(name, into)
        })
    }

    /// Fills `array` with rows of a tensor, once that matches its checksum: of `row` bytes each, from byte `first` on, and from row to row
    /// `stride` bytes.
    fn read_rows(
        &self,
        name: &str,
        first: u64,
        row: u64,
        stride: u64,
        array: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.fill(array, |whole, into| whole.read_rows(name, first, [row, stride], into))
    }

    /// Lets go of it. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let whole = self.whole.take();
        py.detach(|| drop(whole));
    }
}
