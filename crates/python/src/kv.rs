//! `Cache`: what `polder.kv.Cache` is made of; and `KvConnector`, as LMCache loads it.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use polder_attach::background::{Background, Work};
use polder_attach::named_blocks::NamedBlocks;
use polder_attach::session::Session;
use polder_mem::AnyMemory;
use polder_pool::PoolError;
use polder_pool::kv::{self, Identity, Key, Options, Put};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::buffer::{self, Held, Span};
use crate::errors::{self, argument};
use crate::number::{Bytes, Number};
use crate::pool::{Owned, Pool};
use crate::text::Text;

/// Where what was submitted runs: a load never waits for a store, and a look-up for neither.
#[derive(Clone, Copy)]
enum Lane {
    Store,
    Load,
    Lookup,
}

/// What came of a job.
enum Done {
    Put(Put),
    /// Whether all blocks are there.
    Stored(bool),
    Found(Vec<bool>),
}

type Outcome = Result<Done, PoolError>;
/// A job's number, what came of it, and the seconds that it took.
type Told = (u64, Result<Done, PyErr>, f64);

/// Jobs under way, with the time that each takes, and the buffers that Python has lent to them.
struct Jobs {
    background: Background<(Outcome, Duration)>,
    lent: Mutex<HashMap<u64, Vec<Py<PyAny>>>>,
}

impl Jobs {
    fn start() -> PyResult<Self> {
        Ok(Self { background: Background::start("polder-kv", 3)?, lent: Mutex::default() })
    }

    /// Has a lane work with buffers, which it has until Python is told of its end.
    fn submit(&self, lane: Lane, lent: Vec<Py<PyAny>>, work: Work<Outcome>) -> u64 {
        // Whoever is told of the job's end waits for this lock.
        let mut all = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let timed = move || {
            let begin = Instant::now();
            (work(), begin.elapsed())
        };
        let job = self.background.submit(lane as usize, Box::new(timed));
        all.insert(job, lent);
        job
    }

    /// The jobs that have ended, each once.
    fn drain(&self) -> Vec<Told> {
        let ended = self.background.drain();
        let mut all = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let lent: Vec<_> = ended.iter().map(|(job, _)| all.remove(job)).collect();
        // Python runs from here on, and may hand the GIL to a thread that waits for this lock.
        drop(all);
        drop(lent);
        ended
            .into_iter()
            .map(|(job, came)| match came {
                Some((outcome, took)) => (job, outcome.map_err(errors::raise), took.as_secs_f64()),
                None => {
                    let why = "a thread of the cache panicked; the message stands on stderr";
                    (job, Err(errors::plain("PolderError", why.to_owned())), 0.0)
                }
            })
            .collect()
    }
}

/// A cache, what uses it, and the session under it; let go of in this order.
struct Open {
    jobs: OnceLock<Arc<Jobs>>,
    cache: Arc<kv::Cache<AnyMemory>>,
    _session: Arc<Session>,
}

/// A cache of blocks in a pool.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Cache {
    held: Owned<Open>,
}

impl Cache {
    fn cache(&self) -> PyResult<Arc<kv::Cache<AnyMemory>>> {
        self.held.with(|open| Arc::clone(&open.cache))
    }

    fn jobs(&self) -> PyResult<Arc<Jobs>> {
        self.held.with(|open| match open.jobs.get() {
            Some(jobs) => Ok(Arc::clone(jobs)),
            None => {
                let jobs = Arc::new(Jobs::start()?);
                Ok(Arc::clone(open.jobs.get_or_init(|| jobs)))
            }
        })?
    }
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(signature = (pool, name, hash, text, block, budget=None, verify=false))]
    #[expect(clippy::too_many_arguments, reason = "what polder.kv.Cache passes on")]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        name: Text,
        hash: [u8; 32],
        text: String,
        block: Number,
        budget: Option<Bytes>,
        verify: bool,
    ) -> PyResult<Self> {
        let session = pool.get().session()?;
        let block = block.of("block")?;
        let budget = budget.map(|budget| budget.of("budget")).transpose()?;
        let (identity, options) = (Identity { hash, text, block }, Options { budget, verify });
        let opened = py.detach(|| kv::Cache::open(Arc::clone(session.pool()), &name, identity, options));
        let cache = Arc::new(opened.map_err(errors::raise)?);
        Ok(Self { held: Owned::new("cache", Open { jobs: OnceLock::new(), cache, _session: session }) })
    }

    /// Which of these keys have blocks.
    fn lookup(&self, py: Python<'_>, keys: Vec<Bound<'_, PyBytes>>) -> PyResult<Vec<bool>> {
        let (cache, keys) = (self.cache()?, keys_of(&keys)?);
        py.detach(|| cache.lookup(&keys)).map_err(errors::raise)
    }

    /// Stores blocks that are not there yet: how many were stored, were there, and had no room.
    fn put(
        &self,
        py: Python<'_>,
        keys: Vec<Bound<'_, PyBytes>>,
        blocks: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<(u64, u64, u64)> {
        let (cache, keys) = (self.cache()?, keys_of(&keys)?);
        let held = blocks.iter().map(buffer::bytes_to_read).collect::<PyResult<Vec<_>>>()?;
        let spans = spans_of(&held);
        // SAFETY: `held` keeps the bytes. Blocks are of whoever calls until this returns.
        let put = py.detach(|| cache.put(&keys, &unsafe { read_spans(&spans) }));
        let Put { stored, present, refused, .. } = put.map_err(errors::raise)?;
        Ok((stored, present, refused))
    }

    /// Fills buffers with blocks; which of them were there.
    fn get(
        &self,
        py: Python<'_>,
        keys: Vec<Bound<'_, PyBytes>>,
        into: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Vec<bool>> {
        let (cache, keys) = (self.cache()?, keys_of(&keys)?);
        let held = into.iter().map(buffer::bytes_to_write).collect::<PyResult<Vec<_>>>()?;
        let spans = spans_of(&held);
        buffer::expect_apart("get", &spans)?;
        // SAFETY: `held` keeps the bytes, no two share one, and the caller shows them to nobody before this returns.
        let found = py.detach(|| cache.get(&keys, &mut unsafe { written_spans(&spans) }));
        found.map_err(errors::raise)
    }

    /// As `put`, on a thread of Rust's: the job's number.
    fn submit_put(&self, keys: Vec<Bound<'_, PyBytes>>, blocks: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let (cache, jobs, keys) = (self.cache()?, self.jobs()?, keys_of(&keys)?);
        let (spans, lent) = lend(&blocks, buffer::bytes_to_read)?;
        // SAFETY: they are lent until the job has ended.
        let work = move || cache.put(&keys, &unsafe { read_spans(&spans) }).map(Done::Put);
        Ok(jobs.submit(Lane::Store, lent, Box::new(work)))
    }

    /// As `get`, on a thread of Rust's: the job's number.
    fn submit_get(&self, keys: Vec<Bound<'_, PyBytes>>, into: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let (cache, jobs, keys) = (self.cache()?, self.jobs()?, keys_of(&keys)?);
        let (spans, lent) = lend(&into, buffer::bytes_to_write)?;
        buffer::expect_apart("submit_get", &spans)?;
        // SAFETY: they are lent until the job has ended, and no two share a byte.
        let work = move || cache.get(&keys, &mut unsafe { written_spans(&spans) }).map(Done::Found);
        Ok(jobs.submit(Lane::Load, lent, Box::new(work)))
    }

    /// A descriptor that can be read when a job has ended.
    fn event_fd(&self) -> PyResult<i32> {
        Ok(self.jobs()?.background.event().as_raw_fd())
    }

    /// The jobs that have ended, each once: number, error, what a put did, and what a get found. With `wait` all jobs end first.
    #[expect(clippy::type_complexity, reason = "it is a tuple in Python")]
    fn drain(
        &self,
        py: Python<'_>,
        wait: bool,
    ) -> PyResult<Vec<(u64, Option<Py<PyAny>>, Option<(u64, u64, u64)>, Option<Vec<bool>>, f64)>> {
        let jobs = self.jobs()?;
        if wait {
            py.detach(|| jobs.background.wait());
        }
        let told = |(job, done, took): Told| match done {
            Ok(Done::Put(Put { stored, present, refused, .. })) => {
                (job, None, Some((stored, present, refused)), None, took)
            }
            Ok(Done::Found(found)) => (job, None, None, Some(found), took),
            Ok(Done::Stored(_)) => (job, None, None, None, took),
            Err(error) => (job, Some(error.into_value(py).into_any()), None, None, took),
        };
        Ok(jobs.drain().into_iter().map(told).collect())
    }

    /// Blocks that this process knows of, bytes that slabs take, bytes that they may take, hits, misses and void copies; and for each
    /// host its id, known blocks, bytes, puts and evictions.
    #[expect(clippy::type_complexity, reason = "it is a tuple in Python")]
    fn stat(&self, py: Python<'_>) -> PyResult<([u64; 6], Vec<(u16, u64, u64, u64, u64)>)> {
        let cache = self.cache()?;
        let stat = py.detach(|| cache.stat()).map_err(errors::raise)?;
        let hosts = stat.hosts.iter();
        let hosts = hosts.map(|part| (part.host, part.blocks, part.claimed, part.puts, part.evictions));
        Ok(([stat.blocks, stat.claimed, stat.budget, stat.hits, stat.misses, stat.void], hosts.collect()))
    }

    /// Removes what is written down of its identity.
    fn retire(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.cache()?;
        py.detach(|| cache.retire()).map_err(errors::raise)
    }

    /// Lets all jobs end, and lets go of it. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let held = self.held.take();
        py.detach(|| drop(held));
    }
}

/// Removes a cache with all its blocks.
#[pyfunction]
pub(crate) fn kv_remove(py: Python<'_>, pool: &Bound<'_, Pool>, name: Text) -> PyResult<()> {
    let session = pool.get().session()?;
    py.detach(|| kv::Cache::remove(session.pool(), &name)).map_err(errors::raise)
}

/// What LMCache asks of a native plug-in: batches on threads of its own, and a descriptor that says when one has ended.
#[pyclass(module = "polder._core", subclass, frozen)]
pub(crate) struct KvConnector {
    held: Owned<(Arc<Jobs>, Arc<NamedBlocks>)>,
}

impl KvConnector {
    fn both(&self) -> PyResult<(Arc<Jobs>, Arc<NamedBlocks>)> {
        self.held.with(Clone::clone)
    }
}

#[pymethods]
impl KvConnector {
    #[new]
    #[pyo3(signature = (pool, name, hash, text, budget=None))]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        name: Text,
        hash: [u8; 32],
        text: String,
        budget: Option<Bytes>,
    ) -> PyResult<Self> {
        let session = pool.get().session()?;
        let budget = budget.map(|budget| budget.of("budget")).transpose()?;
        let opened = py.detach(|| NamedBlocks::open(session, &name, (hash, text), budget));
        let blocks = Arc::new(opened.map_err(errors::raise)?);
        Ok(Self { held: Owned::new("connector", (Arc::new(Jobs::start()?), blocks)) })
    }

    /// A descriptor that can be read when a batch has ended.
    fn event_fd(&self) -> PyResult<i32> {
        Ok(self.both()?.0.background.event().as_raw_fd())
    }

    /// Stores blocks: the batch's number.
    fn submit_batch_set(&self, keys: Vec<String>, memoryviews: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let (jobs, blocks) = self.both()?;
        let (spans, lent) = lend(&memoryviews, buffer::bytes_to_read)?;
        // SAFETY: they are lent until the batch has ended.
        let work = move || blocks.put(&keys, &unsafe { read_spans(&spans) }).map(Done::Stored);
        Ok(jobs.submit(Lane::Store, lent, Box::new(work)))
    }

    /// Fills buffers with blocks: the batch's number.
    fn submit_batch_get(&self, keys: Vec<String>, memoryviews: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let (jobs, blocks) = self.both()?;
        let (spans, lent) = lend(&memoryviews, buffer::bytes_to_write)?;
        buffer::expect_apart("submit_batch_get", &spans)?;
        // SAFETY: they are lent until the batch has ended, and no two share a byte.
        let work = move || blocks.get(&keys, unsafe { written_spans(&spans) }).map(Done::Found);
        Ok(jobs.submit(Lane::Load, lent, Box::new(work)))
    }

    /// Asks which blocks are there: the batch's number.
    fn submit_batch_exists(&self, keys: Vec<String>) -> PyResult<u64> {
        let (jobs, blocks) = self.both()?;
        let work = move || blocks.lookup(&keys).map(Done::Found);
        Ok(jobs.submit(Lane::Lookup, vec![], Box::new(work)))
    }

    /// The batches that have ended, each once: number, whether it did all, what went wrong, and what was found.
    #[expect(clippy::type_complexity, reason = "it is a tuple in Python")]
    fn drain_completions(&self, py: Python<'_>) -> PyResult<Vec<(u64, bool, String, Option<Vec<bool>>)>> {
        let told = |(job, done, _): Told| match done {
            Ok(Done::Found(found)) => (job, true, String::new(), Some(found)),
            Ok(Done::Stored(true) | Done::Put(_)) => (job, true, String::new(), None),
            Ok(Done::Stored(false)) => (job, false, "the cache has no room".to_owned(), None),
            Err(error) => (job, false, error.value(py).to_string(), None),
        };
        Ok(self.both()?.0.drain().into_iter().map(told).collect())
    }

    /// Lets all batches end, and lets go of the cache. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let held = self.held.take();
        py.detach(|| drop(held));
    }
}

fn keys_of(keys: &[Bound<'_, PyBytes>]) -> PyResult<Vec<Key>> {
    let key = |key: &Bound<'_, PyBytes>| {
        let bytes = key.as_bytes();
        Key::try_from(bytes).map_err(|_| {
            argument(format!("a key has {} bytes; give the first 16 of the engine's hash", bytes.len()))
        })
    };
    keys.iter().map(key).collect()
}

fn spans_of(held: &[Held]) -> Vec<Span> {
    held.iter().map(|held| held.span).collect()
}

/// The bytes of buffers, and what keeps them until it is dropped.
fn lend(
    arrays: &[Bound<'_, PyAny>],
    bytes_of: fn(&Bound<'_, PyAny>) -> PyResult<Held>,
) -> PyResult<(Vec<Span>, Vec<Py<PyAny>>)> {
    let lent = |array: &Bound<'_, PyAny>| {
        let span = bytes_of(array)?.span;
        Ok((span, PyMemoryView::from(array)?.into_any().unbind()))
    };
    arrays.iter().map(lent).collect::<PyResult<Vec<_>>>().map(|both| both.into_iter().unzip())
}

/// Bytes to read.
///
/// # Safety
/// As [`Span::bytes`].
unsafe fn read_spans<'a>(spans: &[Span]) -> Vec<&'a [u8]> {
    // SAFETY: by this function's contract.
    spans.iter().map(|span| unsafe { span.bytes() }).collect()
}

/// Bytes to write.
///
/// # Safety
/// As [`Span::bytes_mut`], and no two share a byte.
unsafe fn written_spans<'a>(spans: &[Span]) -> Vec<&'a mut [u8]> {
    // SAFETY: by this function's contract.
    spans.iter().map(|span| unsafe { span.bytes_mut() }).collect()
}
