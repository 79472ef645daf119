//! `Pool` and `Object`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use polder_mem::{Coherence, Memory, forks};

use polder_attach::session::{self, Session, SessionError};
use polder_attach::settings::{ByteCount, CoherenceChoice, Settings};
use polder_pool::{Geometry, inspect};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::entry::Entry;
use crate::errors::{self, argument};
use crate::number::{Bytes, Number, Seconds};
use crate::text::Text;

/// The size of a pool that is made without one.
const DEFAULT_BYTES: u64 = 1 << 30;

/// Something that belongs to the process that made it: a child that was forked must not touch it.
pub(crate) struct Owned<T> {
    held: Mutex<Option<T>>,
    process: u32,
    /// Tells the process from its children, cheaper than its id.
    forks: u32,
    what: &'static str,
}

impl<T> Owned<T> {
    pub(crate) fn new(what: &'static str, held: T) -> Self {
        Self { held: Mutex::new(Some(held)), process: std::process::id(), forks: forks(), what }
    }

    /// What is held. `look` must not wait for the GIL.
    ///
    /// # Errors
    /// `ClosedError` when it was closed, or belongs to the process that forked this one.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&T) -> R) -> PyResult<R> {
        self.check_process()?;
        // An exception is made with the GIL, and the thread that has that may wait for this lock: first one, then the other.
        let looked = self.lock().as_ref().map(look);
        looked.ok_or_else(|| {
            errors::plain("ClosedError", format!("this {} is closed; open it again", self.what))
        })
    }

    /// Takes what is held, once.
    pub(crate) fn take(&self) -> Option<T> {
        if self.forks == forks() { self.lock().take() } else { None }
    }

    fn check_process(&self) -> PyResult<()> {
        if self.forks == forks() {
            return Ok(());
        }
        let message = format!(
            "this {} belongs to process {}, which forked this one; open it again here",
            self.what, self.process
        );
        Err(errors::plain("ClosedError", message))
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.forks != forks() {
            // The threads that it would join and the locks that it would give back are the parent's.
            std::mem::forget(self.lock().take());
        }
    }
}

/// A pool that this process has attached.
#[pyclass(module = "polder._core", subclass, frozen, weakref)]
pub(crate) struct Pool {
    session: Owned<Arc<Session>>,
    settings: Settings,
}

impl Pool {
    /// The session. While it is held, it stays attached and its heartbeat goes on.
    pub(crate) fn session(&self) -> PyResult<Arc<Session>> {
        self.session.with(Arc::clone)
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (path=None, *, size=None, host=None, coherence=None, job=None, quota=None, timeout=None, run=None, launched=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python class")]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        size: Option<Bytes>,
        host: Option<Number>,
        coherence: Option<&str>,
        job: Option<Number>,
        quota: Option<Bytes>,
        timeout: Option<Seconds>,
        run: Option<PathBuf>,
        launched: Option<Number>,
    ) -> PyResult<Self> {
        let arguments = Settings {
            pool: path,
            coherence: coherence.map(choice).transpose()?,
            host: host.map(|host| host.of("host")).transpose()?,
            launched: launched.map(|host| host.of("launched")).transpose()?,
            job: job.map(|job| job.of("job")).transpose()?,
            quota: quota.map(|quota| quota.of("quota").map(ByteCount)).transpose()?,
            timeout: timeout.map(Seconds::span).transpose()?,
            run,
            ..Settings::default()
        };
        let size = size.map(|size| size.of("size")).transpose()?;
        let mut settings = Settings::load(arguments).map_err(|error| errors::settings(&error))?;
        if let Some(filter) = &settings.log {
            filter.start();
        }
        let bytes = match (size, &settings.pool) {
            (Some(size), _) => Some(size),
            (None, None) => Some(DEFAULT_BYTES),
            (None, Some(_)) => None,
        };
        if settings.pool.is_none() {
            settings.pool = Some(session::default_pool().map_err(session_error)?);
        }
        let opened = py.detach(|| {
            let session = match bytes {
                Some(bytes) => Session::open_or_create(&settings, bytes)?,
                None => Session::open(&settings)?,
            };
            size.map_or(Ok(()), |size| session.expect_bytes(size)).map(|()| session)
        });
        let session = opened.map_err(session_error)?;
        Ok(Self { session: Owned::new("pool", Arc::new(session)), settings })
    }

    /// The region's path.
    #[getter]
    fn path(&self) -> Option<PathBuf> {
        self.settings.pool.clone()
    }

    /// This host's id.
    #[getter]
    fn host(&self) -> PyResult<u16> {
        Ok(self.session()?.pool().member().host)
    }

    /// "coherent", "software" or "hdm-db".
    #[getter]
    fn coherence(&self) -> PyResult<&'static str> {
        Ok(match self.session()?.pool().memory().coherence() {
            Coherence::Coherent => "coherent",
            Coherence::Software => "software",
            Coherence::HdmDb => "hdm-db",
        })
    }

    /// What tells this pool from others.
    #[getter]
    fn uuid(&self) -> PyResult<String> {
        Ok(self.session()?.pool().superblock().uuid.to_string())
    }

    /// Bytes that the pool uses of its region.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.session()?.pool().superblock().bytes)
    }

    /// Destroys the object `name`, which any host may have created. Its bytes stay until the last process closes it.
    fn destroy(&self, py: Python<'_>, name: Text) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| session.pool().destroy(&name)).map_err(errors::raise)
    }

    /// The live objects whose names begin with `prefix`, in the order of names.
    #[pyo3(signature = (prefix=Text::default()), text_signature = "($self, prefix='')")]
    fn list(&self, py: Python<'_>, prefix: Text) -> PyResult<Vec<Entry>> {
        let session = self.session()?;
        let mut listed = py.detach(|| session.pool().list(&prefix)).map_err(errors::raise)?;
        listed.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(listed.into_iter().map(Entry::from).collect())
    }

    /// What is in the pool, as the counters of `polder pool stat --json` without `gone`.
    fn stat<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let session = self.session()?;
        let seen = py.detach(|| inspect(session.pool().memory())).map_err(errors::raise)?;
        let words = serde_json::to_string(&seen.stat).expect("counters have a form in JSON");
        py.import("json")?.call_method1("loads", (words,))
    }

    /// What is damaged in the pool, a line each; nothing is changed.
    fn check(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let session = self.session()?;
        let seen = py.detach(|| inspect(session.pool().memory())).map_err(errors::raise)?;
        Ok(seen.problems.iter().map(ToString::to_string).collect())
    }

    /// Detaches, once the objects and groups that were made with it are closed too. Closing twice is harmless.
    fn close(&self, py: Python<'_>) {
        let session = self.session.take();
        py.detach(|| drop(session));
    }
}

/// Who keeps the caches in step, as Python says it.
fn choice(said: &str) -> PyResult<CoherenceChoice> {
    said.parse().map_err(|expected| argument(format!("coherence is {said:?}; {expected}")))
}

pub(crate) fn session_error(error: SessionError) -> PyErr {
    match error {
        SessionError::Pool { path, source } => errors::raise_at(&path, source),
        SessionError::TooShort { .. } => errors::plain("NotAPoolError", error.to_string()),
        SessionError::OtherSize { .. } => argument(error.to_string()),
        SessionError::NoPool
        | SessionError::NoHostId { .. }
        | SessionError::Coherence { .. }
        | SessionError::SecondKernel { .. } => errors::plain("SettingsError", error.to_string()),
        SessionError::Host(polder_mem::HostError::NoSlot { .. }) => {
            errors::plain("NoSlotError", error.to_string())
        }
        SessionError::Host(polder_mem::HostError::NoHost { .. }) | SessionError::Apart { .. } => {
            errors::plain("MembershipError", error.to_string())
        }
        other => errors::plain("RegionError", other.to_string()),
    }
}

/// Makes a pool of `size` bytes in a new file at `path`, which every attach keeps coherent as is said here.
#[pyfunction]
#[pyo3(signature = (path, size, *, hosts=None, processes=None, coherence=None))]
pub(crate) fn format(
    py: Python<'_>,
    path: PathBuf,
    size: Bytes,
    hosts: Option<Number>,
    processes: Option<Number>,
    coherence: Option<&str>,
) -> PyResult<String> {
    let bytes = size.of("size")?;
    let coherence = coherence.map(choice).transpose()?.unwrap_or_default();
    let mut geometry = Geometry::for_region(bytes);
    geometry.hosts = hosts.map_or(Ok(geometry.hosts), |hosts| hosts.of("hosts"))?;
    geometry.processes = processes.map_or(Ok(geometry.processes), |processes| processes.of("processes"))?;
    let made = py.detach(|| session::create_as(&path, bytes, &geometry, coherence)).map_err(session_error)?;
    Ok(made.uuid.to_string())
}

/// What the environment and the config file say, without any argument; `None` where they say nothing.
#[pyfunction]
pub(crate) fn settings(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let settings = Settings::load(Settings::default()).map_err(|error| errors::settings(&error))?;
    let fields = PyDict::new(py);
    fields.set_item("pool", settings.pool.map(|path| path.to_string_lossy().into_owned()))?;
    fields.set_item("host", settings.host)?;
    fields.set_item("coherence", settings.coherence.map(|coherence| coherence.to_string()))?;
    fields.set_item("job", settings.job)?;
    fields.set_item("quota", settings.quota.map(|quota| quota.0))?;
    fields.set_item("timeout", settings.timeout.map(|timeout| timeout.0.as_secs_f64()))?;
    Ok(fields)
}
