//! What `polder.torch.ParameterService` and `polder.proxy` are made of: a client, a proxy, and the plan of both.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use polder_attach::each;
use polder_attach::session::Session;
use polder_kernels::Dtype;
use polder_mem::Memory;
use polder_place::sync::{Link, Pace, full_from, pieces, proxied_tensors, routes, split};
use polder_platform::Bandwidth;
use polder_pool::service::{Agreement, ClientSession, ProxySession, ProxyStat, ServiceOptions};
use polder_pool::{PoolError, wait::Patience};
use polder_schedule::{Exchange, Shard};
use pyo3::prelude::*;

use crate::buffer::Span;
use crate::errors::argument;
use crate::lane::{self, Interrupt, lock};
use crate::pool::{self, Owned, Pool};

/// A shard as Python has it: tensor, first byte, bytes, proxy.
type Row = (u32, u64, u64, u16);

/// What a proxy has done, as Python has it: host, process id, steps, shards, bytes of sums.
type Count = (u16, u32, u64, u64, u64);

/// A client, until it is closed.
type Shared = Arc<Mutex<Option<Box<dyn Service>>>>;

/// A client of whichever memory.
trait Service: Send {
    fn begin(&mut self, agreed: &Agreement, interrupt: Interrupt) -> Result<(), PoolError>;

    /// Pushes the shards of the tensor at `gradients`, and pulls the sums that have come.
    ///
    /// # Safety
    /// The spans of all tensors of this step stay alive and untouched by others until the step's sums have been pulled.
    unsafe fn push(&mut self, tensor: u32, gradients: Span) -> Result<(), PoolError>;

    /// Pulls the sums of all tensors that were pushed in this step.
    ///
    /// # Safety
    /// As [`Service::push`].
    unsafe fn wait(&mut self) -> Result<(), PoolError>;

    fn stat(&mut self) -> Result<Vec<ProxyStat>, PoolError>;

    fn leave(self: Box<Self>) -> Result<(), PoolError>;
}

struct Runner<M: Memory> {
    service: ClientSession<M>,
    /// The shards of each tensor, and where its gradients of this step are.
    tensors: BTreeMap<u32, Vec<u32>>,
    gradients: BTreeMap<u32, Span>,
    _session: Arc<Session>,
}

impl<M: Memory> Runner<M> {
    /// # Safety
    /// As [`Service::push`].
    unsafe fn pull(&mut self, shard: u32) -> Result<(), PoolError> {
        let client = self.service.client()?;
        let Shard { tensor, start, bytes, .. } = client.agreed().exchange.shards()[shard as usize];
        let span = self.gradients.get(&tensor).expect("only what was pushed is handed out");
        // SAFETY: the caller's promise.
        let whole = unsafe { span.bytes_mut() };
        client.pull(shard, &mut whole[start as usize..(start + bytes) as usize])
    }
}

impl<M: Memory + Send + Sync> Service for Runner<M> {
    fn begin(&mut self, agreed: &Agreement, interrupt: Interrupt) -> Result<(), PoolError> {
        self.service.begin(agreed, Some(interrupt))?;
        self.gradients.clear();
        self.tensors.clear();
        for (shard, of) in (0..).zip(agreed.exchange.shards()) {
            self.tensors.entry(of.tensor).or_default().push(shard);
        }
        Ok(())
    }

    unsafe fn push(&mut self, tensor: u32, gradients: Span) -> Result<(), PoolError> {
        let bad = |value, expected| Err(PoolError::Argument { what: "the tensor", value, expected });
        let client = self.service.client()?;
        let Some(shards) = self.tensors.get(&tensor) else {
            return bad(tensor.to_string(), "one that the proxies sum");
        };
        let Agreement { exchange, dtype } = client.agreed();
        let of = |shard: &u32| exchange.shards()[*shard as usize];
        let bytes = shards.iter().map(of).map(|shard| shard.start + shard.bytes).max();
        if bytes != Some(gradients.len() as u64) || *dtype != gradients.dtype() {
            let value = format!("{tensor} of {} bytes of {}", gradients.len(), gradients.dtype());
            return bad(value, "as many elements of the type that was agreed on");
        }
        let parts: Vec<_> = shards.iter().map(|shard| (*shard, of(shard))).collect();
        // SAFETY: the caller's promise.
        let whole = unsafe { gradients.bytes() };
        for (shard, Shard { start, bytes, .. }) in parts {
            client.push(shard, &whole[start as usize..(start + bytes) as usize])?;
        }
        self.gradients.insert(tensor, gradients);
        while let Some(shard) = self.service.client()?.ready()? {
            // SAFETY: the caller's promise.
            unsafe { self.pull(shard)? };
        }
        Ok(())
    }

    unsafe fn wait(&mut self) -> Result<(), PoolError> {
        while let Some(shard) = self.service.client()?.wait()? {
            // SAFETY: the caller's promise.
            unsafe { self.pull(shard)? };
        }
        self.gradients.clear();
        Ok(())
    }

    fn stat(&mut self) -> Result<Vec<ProxyStat>, PoolError> {
        self.service.stat()
    }

    fn leave(self: Box<Self>) -> Result<(), PoolError> {
        self.service.leave()
    }
}

fn options(timeout: Option<Duration>, usual: Duration) -> ServiceOptions {
    let timeout = timeout.unwrap_or(usual);
    ServiceOptions { timeout, patience: Patience::SHARED, ..ServiceOptions::default() }
}

fn join<M: Memory + Send + Sync + 'static>(
    session: &Arc<Session>,
    pool: &Arc<polder_pool::Pool<M>>,
    name: &str,
    client: usize,
    sizes: (usize, u16),
    timeout: Option<Duration>,
) -> Result<Box<dyn Service>, PoolError> {
    let options = options(timeout, pool.member().timeout);
    let interrupt = Some(lane::interrupt());
    let service = ClientSession::join(Arc::clone(pool), name, client, sizes, options, interrupt)?;
    let (tensors, gradients) = (BTreeMap::new(), BTreeMap::new());
    Ok(Box::new(Runner { service, tensors, gradients, _session: Arc::clone(session) }))
}

/// A worker's end of a parameter service.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct ServiceClient {
    service: Owned<Shared>,
}

impl ServiceClient {
    /// Runs `call` without the GIL.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut dyn Service) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        let service = self.service.with(Arc::clone)?;
        lane::watched(py, move || {
            let closed = || PoolError::Argument {
                what: "the service",
                value: "closed".to_owned(),
                expected: "join it anew",
            };
            lock(&service).as_mut().ok_or_else(closed).and_then(|service| call(service.as_mut()))
        })
    }
}

#[pymethods]
impl ServiceClient {
    #[new]
    #[pyo3(signature = (pool, name, client, clients, proxies, *, timeout=None, given_up=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python class")]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        name: &str,
        client: usize,
        clients: usize,
        proxies: u16,
        timeout: Option<f64>,
        given_up: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let timeout = timeout.map(pool::span).transpose()?.map(|span| span.0);
        let session = pool.get().session()?;
        let joined = lane::watched_asking(
            py,
            given_up,
            || each!(session.pool(), pool => join(&session, pool, name, client, (clients, proxies), timeout)),
        )?;
        Ok(Self { service: Owned::new("service", Arc::new(Mutex::new(Some(joined)))) })
    }

    /// Exchanges these shards from now on, in elements of `dtype`.
    fn begin(&self, py: Python<'_>, shards: Vec<Row>, proxies: u16, dtype: &str) -> PyResult<()> {
        let shard = |(tensor, start, bytes, proxy)| Shard { tensor, start, bytes, proxy };
        let exchange = Exchange::new(shards.into_iter().map(shard).collect(), proxies);
        let exchange = exchange.map_err(|error| argument(error.to_string()))?;
        let dtype =
            Dtype::named(dtype).ok_or_else(|| argument(format!("elements of type {dtype} have no mean")))?;
        let agreed = Agreement { exchange, dtype };
        self.run(py, |service| service.begin(&agreed, lane::interrupt()))
    }

    /// Pushes the gradients of a tensor, and pulls sums that have come into the tensors that were pushed before. All of them
    /// must stay where they are until `wait` returns.
    fn push(&self, py: Python<'_>, tensor: u32, gradients: (usize, usize), dtype: &str) -> PyResult<()> {
        // SAFETY: the front holds the tensors until `wait` has returned.
        let span = unsafe { Span::raw(gradients, dtype)? };
        // SAFETY: as above.
        self.run(py, move |service| unsafe { service.push(tensor, span) })
    }

    /// Pulls the sums of all tensors that were pushed in this step.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        // SAFETY: as above.
        self.run(py, |service| unsafe { service.wait() })
    }

    /// What each proxy says that it has done in this exchange: host, process id, steps, shards, bytes of sums.
    fn stat(&self, py: Python<'_>) -> PyResult<Vec<Count>> {
        let stat = self.run(py, |service| service.stat())?;
        Ok(stat.into_iter().map(|it| (it.host, it.pid, it.steps, it.shards, it.bytes)).collect())
    }

    /// Leaves the service without the others: they and the proxies are told.
    fn abandon(&self, py: Python<'_>) {
        let service = self.service.take();
        py.detach(|| drop(service));
    }

    /// Ends the service, which all clients do; harmless when it was closed before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(service) = self.service.take() else { return Ok(()) };
        lane::watched(py, move || lock(&service).take().map_or(Ok(()), Service::leave))
    }
}

/// Joins a service as a proxy and sums until its clients end it. `given_up` is asked now and then whether to give up.
#[pyfunction]
#[pyo3(signature = (pool, name, proxy, clients, proxies, *, timeout=None, given_up=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of a Python function")]
pub(crate) fn service_proxy(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    name: &str,
    proxy: u16,
    clients: usize,
    proxies: u16,
    timeout: Option<f64>,
    given_up: Option<Py<PyAny>>,
) -> PyResult<()> {
    let timeout = timeout.map(pool::span).transpose()?.map(|span| span.0);
    let session = pool.get().session()?;
    let sizes = (clients, proxies);
    lane::watched_asking(py, given_up, || {
        each!(session.pool(), pool => {
            let options = options(timeout, pool.member().timeout);
            let joined =
                ProxySession::join(Arc::clone(pool), name, proxy, sizes, options, Some(lane::interrupt()))?;
            joined.serve(|| Some(lane::interrupt()))
        })
    })
}

/// The least size of a shard that reaches full bandwidth, of sizes and bytes a second.
#[pyfunction]
pub(crate) fn service_shard_bytes(measured: Vec<(u64, f64)>, slack: f64) -> PyResult<u64> {
    let rates: Vec<_> = measured.into_iter().map(|(bytes, rate)| (bytes, Bandwidth::new(rate))).collect();
    full_from(&rates, slack).ok_or_else(|| argument("no size was measured".to_owned()))
}

/// What the proxies take of tensors of these bytes, in the order of gradients: the paper's m, how many tensors that are, and
/// their shards with routes.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "what a profile measures")]
pub(crate) fn service_plan(
    tensors: Vec<u64>,
    workers: u32,
    forward_s: f64,
    backward_s: f64,
    proxy_rate: f64,
    worker_rate: f64,
    shard_bytes: u64,
    links: Vec<(f64, f64)>,
    slack: f64,
) -> PyResult<(f64, usize, Vec<Row>)> {
    let is_rate = |rate: &f64| rate.is_finite() && *rate > 0.0;
    let rates = [proxy_rate, worker_rate];
    if links.is_empty() || !rates.iter().chain(links.iter().map(|(_, rate)| rate)).all(is_rate) {
        return Err(argument(format!("bandwidths {rates:?} and links {links:?}; give positive ones")));
    }
    let [proxy, worker] = rates.map(Bandwidth::new);
    let all: u64 = tensors.iter().sum();
    let proxied = split(all as f64, workers, &Pace { forward_s, backward_s, proxy, worker });
    let taken = proxied_tensors(&tensors, proxied);
    let cut = |(tensor, bytes): (u32, &u64)| {
        pieces(*bytes, shard_bytes, Exchange::GRAIN).map(move |piece| (tensor, piece))
    };
    let shards: Vec<_> = (0..).zip(&tensors[..taken]).flat_map(cut).collect();
    let bytes: Vec<u64> = shards.iter().map(|(_, piece)| piece.end - piece.start).collect();
    let link = |(latency_s, rate)| Link { latency_s, bandwidth: Bandwidth::new(rate) };
    let links: Vec<_> = links.into_iter().map(link).collect();
    let rows = shards
        .into_iter()
        .zip(routes(&bytes, &links, slack))
        .map(|((tensor, piece), proxy)| (tensor, piece.start, piece.end - piece.start, proxy as u16));
    Ok((proxied, taken, rows.collect()))
}
