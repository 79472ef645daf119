//! `Cache`: what `polder.kv.Cache` is made of.

use std::sync::Arc;

use polder_attach::session::Session;
use polder_mem::AnyMemory;
use polder_pool::kv::{self, Identity, Key, Options, Put};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer::{self, Held, Span};
use crate::errors::{self, argument};
use crate::number::{Bytes, Number};
use crate::pool::{Owned, Pool};

/// A cache of blocks in a pool.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Cache {
    /// The cache is let go of before the session.
    held: Owned<(Arc<kv::Cache<AnyMemory>>, Arc<Session>)>,
}

impl Cache {
    fn cache(&self) -> PyResult<Arc<kv::Cache<AnyMemory>>> {
        self.held.with(|(cache, _)| Arc::clone(cache))
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
        name: &str,
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
        let opened = py.detach(|| kv::Cache::open(Arc::clone(session.pool()), name, identity, options));
        let cache = Arc::new(opened.map_err(errors::raise)?);
        Ok(Self { held: Owned::new("cache", (cache, session)) })
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
        let put = py.detach(|| {
            // SAFETY: `held` keeps the bytes. Blocks are of whoever calls until this returns.
            let blocks: Vec<&[u8]> = spans.iter().map(|span| unsafe { span.bytes() }).collect();
            cache.put(&keys, &blocks)
        });
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
        let found = py.detach(|| {
            // SAFETY: `held` keeps the bytes, no two share one, and the caller shows them to nobody before this returns.
            let mut into: Vec<&mut [u8]> = spans.iter().map(|span| unsafe { span.bytes_mut() }).collect();
            cache.get(&keys, &mut into)
        });
        found.map_err(errors::raise)
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

    /// Lets go of it. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let held = self.held.take();
        py.detach(|| drop(held));
    }
}

/// Removes a cache with all its blocks.
#[pyfunction]
pub(crate) fn kv_remove(py: Python<'_>, pool: &Bound<'_, Pool>, name: &str) -> PyResult<()> {
    let session = pool.get().session()?;
    py.detach(|| kv::Cache::remove(session.pool(), name)).map_err(errors::raise)
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
