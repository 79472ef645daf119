//! The pool of a job's own, which its processes on one machine share.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use polder_attach::job_pool;
use pyo3::prelude::*;

use crate::pool::session_error;

/// A process's share of the pool. Until it is released, no other job takes the pool for left.
#[pyclass(frozen, module = "polder._core")]
pub(crate) struct JobPool(Mutex<Option<job_pool::JobPool>>);

impl JobPool {
    fn of(share: job_pool::JobPool) -> Self {
        Self(Mutex::new(Some(share)))
    }
}

#[pymethods]
impl JobPool {
    /// Where the pool of this user's job `job` lies.
    #[staticmethod]
    fn place(job: &str) -> PathBuf {
        job_pool::JobPool::place(job)
    }

    /// Makes the pool, for so many ranks.
    #[staticmethod]
    fn make(py: Python<'_>, path: PathBuf, ranks: u16) -> PyResult<Self> {
        py.detach(|| job_pool::JobPool::make(&path, ranks)).map(Self::of).map_err(session_error)
    }

    /// Takes a share of the pool that another process of the job has made.
    #[staticmethod]
    fn share(path: PathBuf) -> PyResult<Self> {
        Ok(Self::of(job_pool::JobPool::share(&path)?))
    }

    /// Gives the share back, once; the last process removes the pool.
    fn release(&self) {
        let share = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        share.into_iter().for_each(job_pool::JobPool::release);
    }
}
