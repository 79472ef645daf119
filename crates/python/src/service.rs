//! What `polder.torch.ParameterService` and `polder.proxy` are made of: a client, a proxy, and the plan of both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polder_attach::session::Session;
use polder_kernels::{Adam, Dtype, PIECE, Sgd};
use polder_mem::AnyMemory;
use polder_place::sync::{Link, Pace, Routing, Timeline, full_from, pieces, proxied_tensors, routes, split};
use polder_platform::Bandwidth;
use polder_pool::group::Interrupt;
use polder_pool::service::{
    Agreement, ClientReport, ClientSession, EmulatedLink, Optimizer, Order, ProxySession, ServiceOptions,
    Slot,
};
use polder_pool::{PoolError, wait::Patience};
use polder_schedule::{Exchange, Shard, ShardOrder};
use pyo3::prelude::*;

use crate::buffer::{Elements, Span};
use crate::errors::argument;
use crate::number::Seconds;
use crate::pool::{Owned, Pool};
use crate::signals;
use crate::text::Text;

/// A shard as Python has it: tensor, first byte, bytes, proxy.
type Row = (u32, u64, u64, u16);

/// What a proxy has done, as Python has it: host, process id, steps, shards, bytes of sums, and whether it lives.
type Count = (u16, u32, u64, u64, u64, bool);

/// Shards begin at multiples of so many bytes of a tensor, so that an optimizer rounds as in one piece.
const GRAIN: u64 = 4 * PIECE as u64;

/// A client, until it is closed.
type Shared = Arc<Mutex<Option<Client>>>;

/// A client, and the session whose heartbeat says that this process lives.
struct Client {
    service: ClientSession<AnyMemory>,
    /// The shards of each tensor.
    tensors: BTreeMap<u32, Vec<u32>>,
    /// Of each tensor of this step its gradients, and where their sums come to; none for those that stay in the pool.
    given: BTreeMap<u32, (Span, Option<Span>)>,
    /// For each proxy the shards of this step that wait for their place in a window, in the order of gradients.
    waiting: Vec<BTreeSet<u32>>,
    /// How many shards of each tensor that was pushed have not been pulled.
    missing: BTreeMap<u32, usize>,
    _session: Arc<Session>,
}

/// Where the sums of a tensor come to.
enum Target {
    /// To where its gradients are; those that have come are pulled at once.
    Same,
    /// To there, and not before `wait` is called.
    Later(Span),
    /// They stay in the pool.
    Pool,
}

impl Client {
    /// # Safety
    /// As [`Client::push`].
    unsafe fn pull(&mut self, shard: u32) -> Result<(), PoolError> {
        let client = self.service.client()?;
        let Shard { tensor, start, bytes, .. } = client.agreed().exchange.shards()[shard as usize];
        if let Some(missing) = self.missing.get_mut(&tensor) {
            *missing -= 1;
        }
        let (_, Some(span)) = self.given.get(&tensor).expect("only what was pushed is handed out") else {
            return client.leave_sum(shard);
        };
        // SAFETY: the caller's promise.
        let whole = unsafe { span.bytes_mut() };
        client.pull(shard, &mut whole[start as usize..(start + bytes) as usize])
    }

    fn begin(&mut self, agreed: &Agreement, interrupt: Interrupt) -> Result<(), PoolError> {
        self.service.begin(agreed, Some(interrupt))?;
        self.given.clear();
        self.missing.clear();
        self.tensors.clear();
        self.waiting = vec![BTreeSet::new(); agreed.exchange.proxies().into()];
        for (shard, of) in (0..).zip(agreed.exchange.shards()) {
            self.tensors.entry(of.tensor).or_default().push(shard);
        }
        Ok(())
    }

    /// The shards of a tensor, as large as each of `spans`.
    fn parts(&mut self, tensor: u32, spans: &[&Span]) -> Result<Vec<(u32, Shard)>, PoolError> {
        let bad = |value, expected| Err(PoolError::Argument { what: "the tensor", value, expected });
        let client = self.service.client()?;
        let Some(shards) = self.tensors.get(&tensor) else {
            return bad(tensor.to_string(), "one that the proxies sum");
        };
        let agreed = client.agreed();
        let of = |shard: &u32| agreed.exchange.shards()[*shard as usize];
        let bytes = shards.iter().map(of).map(|shard| shard.start + shard.bytes).max();
        let is_wrong = |span: &&&Span| {
            bytes != Some(span.len() as u64)
                || shards.iter().any(|shard| agreed.dtype(*shard) != span.dtype())
        };
        if let Some(wrong) = spans.iter().find(is_wrong) {
            let value = format!("{tensor} of {} bytes of {}", wrong.len(), wrong.dtype());
            return bad(value, "as many elements of the type that was agreed on");
        }
        Ok(shards.iter().map(|shard| (*shard, of(shard))).collect())
    }

    /// Pushes the shards of the tensor at `gradients`, those whose windows are taken as soon as these are free. Returns how many shards
    /// of this step wait for that.
    ///
    /// # Safety
    /// The spans to which sums of this step come stay alive and untouched by others until these have been pulled, and gradients until no
    /// shard waits.
    unsafe fn push(&mut self, tensor: u32, gradients: Span, target: Target) -> Result<usize, PoolError> {
        let parts = match &target {
            Target::Later(into) => self.parts(tensor, &[&gradients, into])?,
            Target::Same | Target::Pool => self.parts(tensor, &[&gradients])?,
        };
        self.missing.insert(tensor, parts.len());
        let pulls_now = matches!(target, Target::Same);
        let target = match target {
            Target::Same => Some(gradients),
            Target::Later(into) => Some(into),
            Target::Pool => None,
        };
        self.given.insert(tensor, (gradients, target));
        for (shard, Shard { proxy, .. }) in parts {
            self.waiting[usize::from(proxy)].insert(shard);
        }
        // SAFETY: the caller's promise.
        unsafe { self.push_waiting()? };
        while pulls_now && let Some(shard) = self.service.client()?.ready()? {
            // SAFETY: the caller's promise.
            unsafe {
                self.pull(shard)?;
                self.push_waiting()?;
            }
        }
        if !pulls_now && self.waiting.iter().any(|shards| !shards.is_empty()) {
            self.service.client()?.note()?;
            // SAFETY: the caller's promise.
            unsafe { self.push_waiting()? };
        }
        Ok(self.waiting.iter().map(BTreeSet::len).sum())
    }

    /// Pushes what waits, as long as the next of a proxy finds its window free. All clients push to a window in one order, so that none
    /// waits for a sum which needs what another holds back.
    ///
    /// # Safety
    /// As [`Client::push`].
    unsafe fn push_waiting(&mut self) -> Result<(), PoolError> {
        for proxy in 0..self.waiting.len() {
            while let Some(shard) = self.waiting[proxy].first().copied() {
                let client = self.service.client()?;
                if !client.may_push(shard) {
                    break;
                }
                self.waiting[proxy].pop_first();
                let Shard { tensor, start, bytes, .. } = client.agreed().exchange.shards()[shard as usize];
                // SAFETY: the caller's promise.
                let whole = unsafe { self.given[&tensor].0.bytes() };
                client.push(shard, &whole[start as usize..(start + bytes) as usize])?;
            }
        }
        Ok(())
    }

    /// Pulls the next sum that comes; false where all that was pushed is pulled.
    ///
    /// # Safety
    /// As [`Client::push`].
    unsafe fn pull_next(&mut self) -> Result<bool, PoolError> {
        // SAFETY: the caller's promise.
        unsafe { self.push_waiting()? };
        let Some(shard) = self.service.client()?.wait()? else { return Ok(false) };
        // SAFETY: the caller's promise.
        unsafe { self.pull(shard)? };
        Ok(true)
    }

    /// The error of a shard that waits for one which was not given in this step.
    fn expect_none_waits(&self) -> Result<(), PoolError> {
        let Some(shard) = self.waiting.iter().find_map(BTreeSet::first) else { return Ok(()) };
        Err(PoolError::Argument {
            what: "the shard",
            value: format!("{shard}, whose window waits for gradients that were not given"),
            expected: "gradients in the order of the plan",
        })
    }

    /// As `push` with a later target, in a step in which what is pushed counts for nothing.
    ///
    /// # Safety
    /// As [`Client::push`].
    unsafe fn push_nothing(&mut self, tensor: u32, into: Span) -> Result<(), PoolError> {
        let parts = self.parts(tensor, &[&into])?;
        self.missing.insert(tensor, parts.len());
        let client = self.service.client()?;
        parts.into_iter().try_for_each(|(shard, _)| client.push_nothing(shard))?;
        self.given.insert(tensor, (into, Some(into)));
        Ok(())
    }

    /// Copies the sums of a tensor that stayed in the pool.
    ///
    /// # Safety
    /// The span stays alive and untouched by others for the length of this call.
    unsafe fn read(&mut self, tensor: u32, into: &Span) -> Result<(), PoolError> {
        let parts = self.parts(tensor, &[into])?;
        let client = self.service.client()?;
        // SAFETY: the caller's promise.
        let whole = unsafe { into.bytes_mut() };
        parts.into_iter().try_for_each(|(shard, Shard { start, bytes, .. })| {
            client.read(shard, &mut whole[start as usize..(start + bytes) as usize])
        })
    }

    /// Pulls what has come, until all sums of a tensor have, if it was pushed in this step.
    ///
    /// # Safety
    /// As [`Client::push`].
    unsafe fn wait_for(&mut self, tensor: u32) -> Result<(), PoolError> {
        while self.missing.get(&tensor).is_some_and(|missing| *missing > 0) {
            // SAFETY: the caller's promise.
            if unsafe { !self.pull_next()? } {
                return self.expect_none_waits();
            }
        }
        Ok(())
    }

    /// Pulls the sums of all tensors that were pushed in this step.
    ///
    /// # Safety
    /// As [`Client::push`].
    unsafe fn wait(&mut self) -> Result<(), PoolError> {
        // SAFETY: the caller's promise.
        while unsafe { self.pull_next()? } {}
        self.expect_none_waits()?;
        self.given.clear();
        Ok(())
    }

    /// Copies this worker's gradients of a shard whose sum has not come: from the pool, or from where they wait.
    ///
    /// # Safety
    /// As [`Client::push`].
    unsafe fn gradients(&mut self, shard: u32, into: &mut [u8]) -> Result<(), PoolError> {
        let client = self.service.client()?;
        if !self.waiting.iter().any(|shards| shards.contains(&shard)) {
            return client.pushed(shard, into);
        }
        let Shard { tensor, start, bytes, .. } = client.agreed().exchange.shards()[shard as usize];
        if bytes != into.len() as u64 {
            let value = format!("{shard} into {} bytes", into.len());
            return Err(PoolError::Argument { what: "the shard", value, expected: "its bytes" });
        }
        // SAFETY: the caller's promise.
        let whole = unsafe { self.given[&tensor].0.bytes() };
        into.copy_from_slice(&whole[start as usize..(start + bytes) as usize]);
        Ok(())
    }

    /// The shards of this step whose sums have not come, in one order on all clients.
    fn unsummed(&mut self) -> Result<Vec<(u32, Shard)>, PoolError> {
        let client = self.service.client()?;
        let waiting = self.waiting.iter().flatten().copied();
        let missing: BTreeSet<u32> = client.unsummed().into_iter().chain(waiting).collect();
        let shards = client.agreed().exchange.shards();
        Ok(missing.into_iter().map(|shard| (shard, shards[shard as usize])).collect())
    }
}

fn options(timeout: Option<Duration>, usual: Duration) -> ServiceOptions {
    let timeout = timeout.unwrap_or(usual);
    ServiceOptions { timeout, patience: Patience::SHARED, ..ServiceOptions::default() }
}

fn join(
    session: &Arc<Session>,
    name: &str,
    client: usize,
    sizes: (usize, u16),
    timeout: Option<Duration>,
) -> Result<Client, PoolError> {
    let pool = session.pool();
    let options = options(timeout, pool.member().timeout);
    let interrupt = Some(signals::interrupt());
    let service = ClientSession::join(Arc::clone(pool), name, client, sizes, options, interrupt)?;
    let (tensors, given, missing) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    Ok(Client { service, tensors, given, waiting: vec![], missing, _session: Arc::clone(session) })
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
        call: impl FnOnce(&mut Client) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        let service = self.service.with(Arc::clone)?;
        signals::watched(py, move || {
            let closed = || PoolError::Argument {
                what: "the service",
                value: "closed".to_owned(),
                expected: "join it again",
            };
            service.lock().unwrap_or_else(PoisonError::into_inner).as_mut().ok_or_else(closed).and_then(call)
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
        name: Text,
        client: usize,
        clients: usize,
        proxies: u16,
        timeout: Option<Seconds>,
        given_up: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let timeout = timeout.map(Seconds::span).transpose()?.map(|span| span.0);
        let session = pool.get().session()?;
        let joined = signals::watched_asking(py, given_up, || {
            join(&session, &name, client, (clients, proxies), timeout)
        })?;
        Ok(Self { service: Owned::new("service", Arc::new(Mutex::new(Some(joined)))) })
    }

    /// Exchanges these shards from now on, in elements of `dtypes`, one of each tensor: those of the first layers first, or as they come.
    /// `links` emulates one for each proxy: seconds of a shard besides its bytes, and bytes a second. With `groups`, that of each shard,
    /// the proxies keep an optimizer's state, and `moments` of each parameter. Shards of a proxy take turns in windows of `window_bytes`, or of the largest of them; 0
    /// gives each a place of its own.
    #[pyo3(signature = (shards, proxies, dtypes, first_layers_first=true, links=vec![], groups=vec![], window_bytes=0, moments=0))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python method")]
    fn begin(
        &self,
        py: Python<'_>,
        shards: Vec<Row>,
        proxies: u16,
        dtypes: Vec<String>,
        first_layers_first: bool,
        links: Vec<(f64, f64)>,
        groups: Vec<u16>,
        window_bytes: u64,
        moments: u16,
    ) -> PyResult<()> {
        let shard = |(tensor, start, bytes, proxy)| Shard { tensor, start, bytes, proxy };
        let exchange = Exchange::new(shards.into_iter().map(shard).collect(), proxies);
        let exchange = exchange.map_err(|error| argument(error.to_string()))?;
        let order =
            if first_layers_first { ShardOrder::FirstLayersFirst } else { ShardOrder::FirstInFirstOut };
        let dtype = |shard: &Shard| {
            let name = dtypes.get(shard.tensor as usize).map_or("none", String::as_str);
            Dtype::named(name).ok_or_else(|| argument(format!("elements of type {name} have no mean")))
        };
        let dtypes = exchange.shards().iter().map(dtype).collect::<PyResult<_>>()?;
        let link = |(latency_s, rate): (f64, f64)| EmulatedLink {
            latency_ns: (latency_s * 1e9) as u64,
            bytes_per_second: rate as u64,
        };
        let links = links.into_iter().map(link).collect();
        let exchange = exchange.ordered(order).windowed(window_bytes);
        let agreed = Agreement { exchange, dtypes, links, groups, moments };
        self.run(py, |service| service.begin(&agreed, signals::interrupt()))
    }

    /// Says that this step is the optimizer's step `number`, with these settings of each group, where proxies keep its state. With
    /// `factors`, it takes the averages of the step before times each of these.
    #[pyo3(signature = (number, groups, factors=None))]
    fn order_step(
        &self,
        py: Python<'_>,
        number: u64,
        groups: Vec<Settings>,
        factors: Option<Vec<f32>>,
    ) -> PyResult<()> {
        let groups = groups.iter().map(optimizer_of).collect::<PyResult<_>>()?;
        let order = match factors {
            Some(factors) => Order::StepWithMeans { number, groups, factors },
            None => Order::Step { number, groups },
        };
        self.run(py, move |service| service.service.client()?.order(&order))
    }

    /// Says that this step averages gradients, and that the optimizer does nothing yet.
    fn order_mean(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |service| service.service.client()?.order(&Order::Mean))
    }

    /// Says that this step brings the proxies what client 0 pushes, or brings all clients what they keep: 0 parameters, 1 and 2 moments.
    fn order_move(&self, py: Python<'_>, slot: u8, is_load: bool) -> PyResult<()> {
        let slots = [Slot::Parameters, Slot::Mean, Slot::Square];
        let slot =
            slots.get(usize::from(slot)).ok_or_else(|| argument(format!("slot {slot}; give 0 to 2")))?;
        let order = if is_load { Order::Load(*slot) } else { Order::Save(*slot) };
        self.run(py, move |service| service.service.client()?.order(&order))
    }

    /// Pushes the gradients of a tensor. Without `into`, sums that have come are pulled into the tensors that were pushed before, and all
    /// of them must stay where they are until `wait` returns. With it, what comes back goes to that place. With `stays`, it stays in the
    /// pool. Returns how many shards wait for others in their windows: until there are none, gradients must stay as they are.
    #[pyo3(signature = (tensor, gradients, dtype, into=None, stays=false))]
    fn push(
        &self,
        py: Python<'_>,
        tensor: u32,
        gradients: (usize, usize),
        dtype: &str,
        into: Option<(usize, usize)>,
        stays: bool,
    ) -> PyResult<usize> {
        let gradients = span_of(gradients, dtype)?;
        let target = match into {
            Some(into) => Target::Later(span_of(into, dtype)?),
            None if stays => Target::Pool,
            None => Target::Same,
        };
        // SAFETY: the front holds what sums come to until `wait` has returned, and the gradients for the length of this call.
        self.run(py, move |service| unsafe { service.push(tensor, gradients, target) })
    }

    /// As `push`, in a step in which what is pushed counts for nothing.
    fn push_nothing(&self, py: Python<'_>, tensor: u32, into: (usize, usize), dtype: &str) -> PyResult<()> {
        let into = span_of(into, dtype)?;
        // SAFETY: as above.
        self.run(py, move |service| unsafe { service.push_nothing(tensor, into) })
    }

    /// Copies the averages of a tensor that stayed in the pool, before the next step.
    fn read(&self, py: Python<'_>, tensor: u32, into: (usize, usize), dtype: &str) -> PyResult<()> {
        let into = span_of(into, dtype)?;
        // SAFETY: the front holds it for the length of this call.
        self.run(py, move |service| unsafe { service.read(tensor, &into) })
    }

    /// Pulls what has come, until all of a tensor has that was pushed in this step.
    fn wait_for(&self, py: Python<'_>, tensor: u32) -> PyResult<()> {
        // SAFETY: as above.
        self.run(py, move |service| unsafe { service.wait_for(tensor) })
    }

    /// Pulls the sums of all tensors that were pushed in this step.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        // SAFETY: as above.
        self.run(py, |service| unsafe { service.wait() })
    }

    /// The shards of this step that were pushed and whose sums have not come, by number: tensor, first byte, bytes, proxy.
    fn unsummed(&self, py: Python<'_>) -> PyResult<BTreeMap<u32, Row>> {
        let shards = self.run(py, |service| service.unsummed())?;
        Ok(shards.into_iter().map(|(shard, it)| (shard, (it.tensor, it.start, it.bytes, it.proxy))).collect())
    }

    /// Copies what a shard's proxy keeps of it, dead or alive: its moments, and its parameters if the proxy has done the optimizer's step of
    /// this step with it. Returns whether it has; if not, the moments are those before that step.
    fn recover(
        &self,
        py: Python<'_>,
        shard: u32,
        parameters: (usize, usize),
        moments: Vec<(usize, usize)>,
    ) -> PyResult<bool> {
        let parameters = span_of(parameters, "float32")?;
        let moments = moments.into_iter().map(|of| span_of(of, "float32")).collect::<PyResult<Vec<_>>>()?;
        self.run(py, move |service| {
            // SAFETY: the front holds them for the length of this call, and no two overlap.
            let mut moments: Vec<_> = moments.iter().map(|of| unsafe { of.bytes_mut() }).collect();
            // SAFETY: as above.
            service.service.client()?.recover(shard, unsafe { parameters.bytes_mut() }, &mut moments)
        })
    }

    /// Copies this worker's gradients of a shard whose sum does not come in this step.
    fn unsummed_gradients(&self, py: Python<'_>, shard: u32, into: (usize, usize)) -> PyResult<()> {
        let into = span_of(into, "float32")?;
        // SAFETY: the front holds it for the length of this call, and the gradients of this step.
        self.run(py, move |service| unsafe { service.gradients(shard, into.bytes_mut()) })
    }

    /// What each proxy says that it has done in this exchange: host, process id, steps, shards, bytes of sums, whether it lives.
    fn stat(&self, py: Python<'_>) -> PyResult<Vec<Count>> {
        let stat = self.run(py, |service| service.service.stat())?;
        Ok(stat.into_iter().map(|it| (it.host, it.pid, it.steps, it.shards, it.bytes, it.alive)).collect())
    }

    /// Says to those that look from outside: steps, seconds that the last one was blocked, bytes a step for the proxies and in all, and the
    /// size from which shards go to the proxies of higher bandwidth.
    fn report(
        &self,
        py: Python<'_>,
        steps: u64,
        blocked_s: f64,
        proxied_bytes: u64,
        total_bytes: u64,
        threshold_bytes: f64,
    ) -> PyResult<()> {
        let (blocked_ns, threshold_bytes) = ((blocked_s * 1e9) as u64, threshold_bytes as u64);
        let report = ClientReport { steps, blocked_ns, proxied_bytes, total_bytes, threshold_bytes };
        self.run(py, |service| {
            service.service.client()?.report(&report);
            Ok(())
        })
    }

    /// Leaves the service without the others: they and the proxies are told.
    fn abandon(&self, py: Python<'_>) {
        let service = self.service.take();
        py.detach(|| drop(service));
    }

    /// Ends the service, which all clients do; harmless when it was closed before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(service) = self.service.take() else { return Ok(()) };
        signals::watched(py, move || {
            service
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take()
                .map_or(Ok(()), |service| service.service.leave())
        })
    }
}

/// So many elements at an address.
fn span_of((at, count): (usize, usize), dtype: &str) -> PyResult<Span> {
    let elements = Elements::named(dtype)?;
    // SAFETY: the callers hold it as long as it is used.
    unsafe { Span::raw((at, count.saturating_mul(elements.dtype.bytes())), elements) }
}

/// A group of an optimizer's settings: the rule, the learning rate, momentum or first beta, dampening or second beta, epsilon, weight
/// decay, and whether SGD's momentum is Nesterov's.
type Settings = (String, f64, f64, f64, f64, f64, bool);

fn optimizer_of(of: &Settings) -> PyResult<Optimizer> {
    let (rule, lr, first, second, eps, weight_decay, is_nesterov) = of;
    let (lr, first, second, eps, weight_decay) = (*lr, *first, *second, *eps, *weight_decay);
    let adam = |is_decoupled| Adam { lr, beta1: first, beta2: second, eps, weight_decay, is_decoupled };
    match rule.as_str() {
        "sgd" => Ok(Optimizer::Sgd(Sgd {
            lr,
            momentum: first,
            dampening: second,
            weight_decay,
            is_nesterov: *is_nesterov,
        })),
        "adam" => Ok(Optimizer::Adam(adam(false))),
        "adamw" => Ok(Optimizer::Adam(adam(true))),
        _ => Err(argument(format!("{rule:?} is no rule of a proxy; there are sgd, adam and adamw"))),
    }
}

/// Joins a service as a proxy and sums until its clients end it. `given_up` is asked now and then whether to give up.
#[pyfunction]
#[pyo3(signature = (pool, name, proxy, clients, proxies, *, timeout=None, given_up=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of a Python function")]
pub(crate) fn service_proxy(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    name: Text,
    proxy: u16,
    clients: usize,
    proxies: u16,
    timeout: Option<Seconds>,
    given_up: Option<Py<PyAny>>,
) -> PyResult<()> {
    let timeout = timeout.map(Seconds::span).transpose()?.map(|span| span.0);
    let session = pool.get().session()?;
    let sizes = (clients, proxies);
    signals::watched_asking(py, given_up, || {
        let pool = session.pool();
        let options = options(timeout, pool.member().timeout);
        let joined =
            ProxySession::join(Arc::clone(pool), &name, proxy, sizes, options, Some(signals::interrupt()))?;
        joined.serve(|| Some(signals::interrupt()))
    })
}

/// The least size of a shard that reaches full bandwidth, of sizes and bytes a second.
#[pyfunction]
pub(crate) fn service_shard_bytes(measured: Vec<(u64, f64)>, slack: f64) -> PyResult<u64> {
    let rates: Vec<_> = measured.into_iter().map(|(bytes, rate)| (bytes, Bandwidth::new(rate))).collect();
    full_from(&rates, slack).ok_or_else(|| argument("no size was measured".to_owned()))
}

/// What the proxies take of tensors of these bytes, in the order of gradients: the paper's m, and how many tensors that are. Instead of
/// m they may take `part` of all bytes.
#[pyfunction]
#[pyo3(signature = (tensors, workers, forward_s, backward_s, proxy_rate, worker_rate, part=None))]
pub(crate) fn service_split(
    tensors: Vec<u64>,
    workers: u32,
    forward_s: f64,
    backward_s: f64,
    proxy_rate: f64,
    worker_rate: f64,
    part: Option<f64>,
) -> PyResult<(f64, usize)> {
    expect_rates(&[proxy_rate, worker_rate])?;
    let [proxy, worker] = [proxy_rate, worker_rate].map(Bandwidth::new);
    let pace = Pace { forward_s, backward_s, proxy, worker };
    let all = tensors.iter().sum::<u64>() as f64;
    let proxied = part.map_or_else(|| split(all, workers, &pace), |part| part * all);
    Ok((proxied, proxied_tensors(&tensors, proxied)))
}

/// Seconds from the begin of a backward pass to the last average, if the proxies take none, the first, the first two, … of these tensors; and
/// with how many it is shortest. Of each tensor there are its bytes, and when its gradient is there. `rates` are those of copies into the
/// pool and of the workers' all-reduce.
#[pyfunction]
pub(crate) fn service_predict(
    gradients: Vec<(u64, f64)>,
    workers: u32,
    backward_s: f64,
    rates: (f64, f64),
    shard_bytes: u64,
    links: Vec<(f64, f64)>,
    slack: f64,
) -> PyResult<(usize, Vec<f64>)> {
    let (copy, worker) = rates;
    expect_rates(&links.iter().map(|(_, rate)| *rate).chain([copy, worker]).collect::<Vec<_>>())?;
    let proxies: Vec<_> = links.into_iter().map(link_of).collect();
    let timeline = Timeline {
        gradients: &gradients,
        workers,
        backward_s,
        copy: Bandwidth::new(copy),
        proxies: &proxies,
        worker: Bandwidth::new(worker),
        shard_bytes,
        grain: GRAIN,
        slack,
    };
    Ok((timeline.best(), (0..=gradients.len()).map(|taken| timeline.seconds(taken)).collect()))
}

fn link_of((latency_s, rate): (f64, f64)) -> Link {
    Link { latency_s, bandwidth: Bandwidth::new(rate) }
}

fn expect_rates(rates: &[f64]) -> PyResult<()> {
    if rates.is_empty() || !rates.iter().all(|rate| rate.is_finite() && *rate > 0.0) {
        return Err(argument(format!("bandwidths {rates:?}; give positive ones")));
    }
    Ok(())
}

/// The shards of tensors of these bytes with their proxies, and the size from which shards go to the proxies of higher latency and
/// bandwidth; 0 where there is none.
#[pyfunction]
pub(crate) fn service_shards(
    tensors: Vec<u64>,
    shard_bytes: u64,
    links: Vec<(f64, f64)>,
    slack: f64,
) -> PyResult<(f64, Vec<Row>)> {
    let rates: Vec<f64> = links.iter().map(|(_, rate)| *rate).collect();
    expect_rates(&rates)?;
    let cut =
        |(tensor, bytes): (u32, &u64)| pieces(*bytes, shard_bytes, GRAIN).map(move |piece| (tensor, piece));
    let shards: Vec<_> = (0..).zip(&tensors).flat_map(cut).collect();
    let bytes: Vec<u64> = shards.iter().map(|(_, piece)| piece.end - piece.start).collect();
    let links: Vec<_> = links.into_iter().map(link_of).collect();
    let threshold = Routing::over(&links, slack).map_or(0.0, |routing| routing.threshold_bytes);
    let row = |((tensor, piece), proxy): ((u32, std::ops::Range<u64>), usize)| {
        (tensor, piece.start, piece.end - piece.start, proxy as u16)
    };
    Ok((threshold, shards.into_iter().zip(routes(&bytes, &links, slack)).map(row).collect()))
}
