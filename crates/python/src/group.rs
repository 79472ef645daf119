//! `Group` and `Ticket`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use polder_attach::lane::{self, Lane, Member};
use polder_attach::session::Session;
use polder_kernels::Dtype;
use polder_pool::{Operation, PoolError};
use polder_schedule::Collective;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::buffer::{self, Elements, Span};
use crate::errors::{self, argument};
use crate::lane::{Buffers, Call, Job, Verdict};
use crate::number::{Number, Seconds};
use crate::object::{Extent, Object};
use crate::pool::{Owned, Pool};
use crate::pool_memory::PoolMemory;
use crate::signals::{self, Detached, SIGNALS};
use crate::tensor;
use crate::text::Text;

/// Ranks that call the same operations in the same order.
#[pyclass(module = "polder._core", subclass, frozen, weakref)]
pub(crate) struct Group {
    lane: Owned<Arc<Detached<Lane>>>,
    /// Through which it was joined.
    session: Weak<Session>,
    rank: usize,
    size: usize,
}

impl Group {
    fn lane(&self) -> PyResult<Arc<Detached<Lane>>> {
        self.lane.with(Arc::clone)
    }

    /// A collective on an Object where it lies, or on an array in place.
    fn in_place(
        &self,
        collective: Collective,
        array: &Bound<'_, PyAny>,
        (op, root): (&str, usize),
        times: u32,
    ) -> PyResult<()> {
        let operation = |elements| operation(collective, elements, op, root);
        let held = match self.in_pool(array)? {
            Some(extent) => {
                let operation = operation(extent.elements)?;
                let buffers = Buffers::Pool(extent);
                return self.run(array.py(), Call::Collective { operation, buffers, times });
            }
            None => buffer::writable(array)?,
        };
        let (operation, buffers) = (operation(held.span.elements)?, Buffers::InPlace(held.span));
        self.run(array.py(), Call::Collective { operation, buffers, times })
    }

    /// A collective from one array into another; a side that this rank has no use for is missing.
    fn apart(
        &self,
        py: Python<'_>,
        (collective, op, root): (Collective, &str, usize),
        from: Option<&buffer::Held>,
        into: Option<&buffer::Held>,
    ) -> PyResult<()> {
        let elements = from.or(into).map_or(Elements::BYTES, |held| held.span.elements);
        let operation = operation(collective, elements, op, root)?;
        let [from, into] = [from, into].map(|held| held.map_or(Span::EMPTY, |held| held.span));
        self.run(py, Call::Collective { operation, buffers: Buffers::Apart { from, into }, times: 1 })
    }

    /// The array of an object that a collective works on in place, when it got one instead of an array.
    fn in_pool(&self, array: &Bound<'_, PyAny>) -> PyResult<Option<Extent>> {
        array.cast::<Object>().ok().map(|object| object.get().extent(&self.session)).transpose()
    }

    /// A collective on an Object where it lies, of a call that got no array for the result.
    fn in_object(&self, collective: Collective, array: &Bound<'_, PyAny>, op: &str) -> PyResult<()> {
        if !array.is_instance_of::<Object>() {
            return Err(missing_out());
        }
        self.in_place(collective, array, (op, 0), 1)
    }

    /// Runs a call over held buffers.
    fn run(&self, py: Python<'_>, call: Call) -> PyResult<()> {
        // SAFETY: the caller holds the buffers of the call until it returns.
        let job = unsafe { Job::new(call, None, vec![]) };
        run(py, &*self.lane()?, &job, None)
    }

    /// This process's rank.
    pub(crate) const fn own_rank(&self) -> usize {
        self.rank
    }

    /// The records of all ranks, of equal length, in the order of ranks.
    pub(crate) fn gather_records(&self, py: Python<'_>, record: &[u8]) -> PyResult<Vec<u8>> {
        let mut whole = vec![0; record.len() * self.size];
        // SAFETY: both live until the call is over, and are this function's alone.
        let (from, into) = unsafe {
            let into = Span::raw((whole.as_mut_ptr() as usize, whole.len()), Elements::BYTES)?;
            (Span::raw((record.as_ptr() as usize, record.len()), Elements::BYTES)?, into)
        };
        let operation = Operation::moving(Collective::AllGather, Dtype::U8);
        self.run(py, Call::Collective { operation, buffers: Buffers::Apart { from, into }, times: 1 })?;
        Ok(whole)
    }

    /// Queues a call when `is_async` is set, and runs it now otherwise.
    fn launch(
        &self,
        py: Python<'_>,
        job: Job,
        timeout: Option<Seconds>,
        is_async: bool,
    ) -> PyResult<Option<Ticket>> {
        let timeout = timeout.map(Seconds::span).transpose()?.map(|span| span.0);
        let lane = self.lane()?;
        if !is_async {
            run(py, &lane, &job, timeout)?;
            return Ok(None);
        }
        lane.start().map_err(|error| {
            errors::plain("PolderError", format!("cannot start the group's thread: {error}"))
        })?;
        let ticket = lane.submit(Box::new(job), timeout).map_err(errors::raise)?;
        Ok(Some(Ticket::new(ticket, Box::new(lane::Ticket::outcome_within))))
    }

    fn check_root(&self, root: usize) -> PyResult<()> {
        if root < self.size {
            return Ok(());
        }
        Err(argument(format!("root is {root}; the group has ranks 0 to {}", self.size - 1)))
    }

    /// The rank that a call names.
    fn root(&self, root: Number) -> PyResult<usize> {
        let root = root.of::<u32>("root")? as usize;
        self.check_root(root).map(|()| root)
    }

    /// That both have the same whole number of elements for each rank.
    fn check_chunks(&self, from: &Span, into: &Span) -> PyResult<()> {
        if from.dtype() != into.dtype() {
            return Err(argument(format!(
                "array has elements of {} and out of {}; both need the same",
                from.dtype(),
                into.dtype()
            )));
        }
        let (sent, received) = (from.len(), into.len());
        if sent != received || !sent.is_multiple_of(self.size * from.dtype().bytes()) {
            return Err(argument(format!(
                "array has {sent} bytes and out {received}; both need the same whole number of elements for each of {} ranks",
                self.size
            )));
        }
        Ok(())
    }

    fn check_each(&self, whole: &Span, part: &Span, what: &str) -> PyResult<()> {
        if Some(whole.len()) == part.len().checked_mul(self.size) && whole.dtype() == part.dtype() {
            return Ok(());
        }
        Err(argument(format!(
            "{what} has {} bytes of {}; {} ranks need {} bytes of {} each",
            whole.len(),
            whole.dtype(),
            self.size,
            part.len(),
            part.dtype()
        )))
    }
}

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (pool, name, rank, size, *, timeout=None, given_up=None))]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, Pool>,
        name: Text,
        rank: Number,
        size: Number,
        timeout: Option<Seconds>,
        given_up: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (rank, size) = (rank.of::<u32>("rank")? as usize, size.of::<u32>("size")? as usize);
        let timeout = timeout.map(Seconds::span).transpose()?.map(|span| span.0);
        let session = pool.get().session()?;
        let lane = signals::watched_asking(py, given_up, || {
            Lane::join(&session, &name, (rank, size), timeout, signals::interrupt())
        })?;
        Ok(Self {
            lane: Owned::new("group", Arc::new(Detached::new(lane))),
            session: Arc::downgrade(&session),
            rank,
            size,
        })
    }

    /// This process's rank.
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// Returns once every rank has called it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let operation = Operation::moving(Collective::Barrier, Dtype::U8);
        self.run(py, Call::Collective { operation, buffers: Buffers::InPlace(Span::EMPTY), times: 1 })
    }

    /// Combines the arrays of all ranks; every rank gets the result, in place. An Object is combined where it lies.
    #[pyo3(signature = (array, op="sum"))]
    fn all_reduce(&self, array: &Bound<'_, PyAny>, op: &str) -> PyResult<()> {
        self.in_place(Collective::AllReduce, array, (op, 0), 1)
    }

    /// Sums the arrays of all ranks `times` times, with no Python between: the row of a benchmark that shows what a call
    /// from Python adds.
    fn repeat_all_reduce(&self, array: &Bound<'_, PyAny>, times: u32) -> PyResult<()> {
        self.in_place(Collective::AllReduce, array, ("sum", 0), times)
    }

    /// Combines the arrays of all ranks; the root gets the result, in place.
    #[pyo3(signature = (array, op="sum", root=Number::default()))]
    fn reduce(&self, array: &Bound<'_, PyAny>, op: &str, root: Number) -> PyResult<()> {
        let root = self.root(root)?;
        // It takes no Object, as `writable` says.
        let held = buffer::writable(array)?;
        let operation = operation(Collective::Reduce, held.span.elements, op, root)?;
        let buffers = Buffers::InPlace(held.span);
        self.run(array.py(), Call::Collective { operation, buffers, times: 1 })
    }

    /// Copies the root's array to every rank's. Objects are copied where they lie.
    #[pyo3(signature = (array, root=Number::default()))]
    fn broadcast(&self, array: &Bound<'_, PyAny>, root: Number) -> PyResult<()> {
        self.in_place(Collective::Broadcast, array, ("sum", self.root(root)?), 1)
    }

    /// Copies the arrays of all ranks to every rank's `out`, in the order of ranks. An Object without `out` is gathered
    /// where it lies: chunk r from rank r.
    #[pyo3(signature = (array, out=None))]
    fn all_gather(&self, array: &Bound<'_, PyAny>, out: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(out) = out else { return self.in_object(Collective::AllGather, array, "sum") };
        let (from, into) = (buffer::readable(array)?, buffer::writable(out)?);
        self.check_each(&into.span, &from.span, "out")?;
        self.apart(array.py(), (Collective::AllGather, "sum", 0), Some(&from), Some(&into))
    }

    /// Combines chunk r of all ranks' arrays into rank r's `out`. An Object without `out` is combined where it lies, into
    /// chunk r of rank r's.
    #[pyo3(signature = (array, out=None, op="sum"))]
    fn reduce_scatter(
        &self,
        array: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        op: &str,
    ) -> PyResult<()> {
        let Some(out) = out else { return self.in_object(Collective::ReduceScatter, array, op) };
        let (from, into) = (buffer::readable(array)?, buffer::writable(out)?);
        self.check_each(&from.span, &into.span, "array")?;
        self.apart(array.py(), (Collective::ReduceScatter, op, 0), Some(&from), Some(&into))
    }

    /// Copies the arrays of all ranks to the root's `out`, in the order of ranks.
    #[pyo3(signature = (array, out=None, root=Number::default()))]
    fn gather(&self, array: &Bound<'_, PyAny>, out: Option<&Bound<'_, PyAny>>, root: Number) -> PyResult<()> {
        let root = self.root(root)?;
        let from = buffer::readable(array)?;
        let into = match out {
            Some(out) if self.rank == root => Some(buffer::writable(out)?),
            None if self.rank == root => return Err(missing_out()),
            _ => None,
        };
        if let Some(into) = &into {
            self.check_each(&into.span, &from.span, "out")?;
        }
        self.apart(array.py(), (Collective::Gather, "sum", root), Some(&from), into.as_ref())
    }

    /// Copies chunk r of the root's array to rank r's `out`.
    #[pyo3(signature = (array, out, root=Number::default()))]
    fn scatter(
        &self,
        array: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
        root: Number,
    ) -> PyResult<()> {
        let root = self.root(root)?;
        let into = buffer::writable(out)?;
        let from = match array {
            Some(array) if self.rank == root => Some(buffer::readable(array)?),
            None if self.rank == root => {
                return Err(argument(
                    "array is missing; the root sends every rank its part of it".to_owned(),
                ));
            }
            _ => None,
        };
        if let Some(from) = &from {
            self.check_each(&from.span, &into.span, "array")?;
        }
        self.apart(out.py(), (Collective::Scatter, "sum", root), from.as_ref(), Some(&into))
    }

    /// Copies chunk r of rank s's array to chunk s of rank r's `out`.
    fn all_to_all(&self, array: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let (from, into) = (buffer::readable(array)?, buffer::writable(out)?);
        self.check_chunks(&from.span, &into.span)?;
        self.apart(out.py(), (Collective::AllToAll, "sum", 0), Some(&from), Some(&into))
    }

    /// Starts a collective on torch's tensors: at once unless `is_async` is set, once all before it is over, and then returns `None`; else
    /// on the group's thread, once `ready` has returned, if it is given. `NotImplemented` if the bytes of a tensor are not
    /// its values in order, in memory of the host: then nothing was started.
    ///
    /// `sources` and `targets` are lists of one tensor, or of one for each chunk. The same list means in place where a rank has one chunk alone, and a side that this
    /// rank has no use for is empty.
    ///
    /// A `piece` of a message, one tensor, has besides: what the ranks have agreed on, this rank's memory of the pool, where the
    /// piece begins in it, and the bytes of a whole chunk of the message. If all have agreed, the piece is worked on there.
    #[pyo3(signature = (operation, sources, targets, timeout, is_async, ready=None, piece=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for every collective of one private caller")]
    fn start<'py>(
        &self,
        py: Python<'py>,
        operation: &Bound<'_, AnyOperation>,
        sources: &Bound<'_, PyList>,
        targets: &Bound<'_, PyList>,
        timeout: Option<Seconds>,
        is_async: bool,
        ready: Option<Py<PyAny>>,
        piece: Option<Piece<'_>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let AnyOperation { operation, elements, call, .. } = operation.get();
        self.check_root(operation.root)?;
        let mut kept = Vec::with_capacity(sources.len() + targets.len());
        let mut spans = |tensors: &Bound<'_, PyList>| {
            let span = |tensor: Bound<'_, PyAny>| {
                let place = tensor::place(&tensor, call)?;
                kept.push(tensor.unbind());
                // SAFETY: the lane keeps the tensor, and so its memory.
                place.map(|place| unsafe { Span::raw(place, *elements) }).transpose()
            };
            tensors.iter().map(span).collect::<PyResult<Option<Vec<_>>>>()
        };
        let is_in_place = sources.is(targets) && !operation.collective.has_chunks();
        let from = if is_in_place { Some(vec![]) } else { spans(sources)? };
        let (Some(from), Some(into)) = (from, spans(targets)?) else {
            return Ok(py.NotImplemented().into_bound(py));
        };
        let call = match (piece, &into[..]) {
            (None, _) => {
                let buffers = buffers(operation.collective, call, from, into)?;
                Call::Collective { operation: *operation, buffers, times: 1 }
            }
            (Some((agreed, pooled, begin, message)), &[private]) => {
                let extent = |it: &Bound<'_, PoolMemory>| {
                    it.get().extent(&self.session, (begin, private.len()), *elements)
                };
                let in_pool = pooled.as_ref().map(extent).transpose()?;
                let verdict = Arc::clone(&agreed.get().0);
                Call::Piece { message, verdict, operation: *operation, in_pool, private }
            }
            _ => return Err(argument("a piece is one tensor".to_owned())),
        };
        if !targets.is_empty() {
            tensor::increment_versions(targets)?;
        }
        // SAFETY: `kept` has the tensors; no two of the spans that are written overlap.
        let job = unsafe { Job::new(call, ready, kept) };
        self.launch(py, job, timeout, is_async)?.into_bound_py_any(py)
    }

    /// Finds out whether all ranks say `yes`, for the pieces that follow; `message` bytes are what ranks compare. As `start`.
    fn agree(
        &self,
        py: Python<'_>,
        agreed: &Bound<'_, Agreed>,
        yes: bool,
        message: u64,
        timeout: Option<Seconds>,
        is_async: bool,
    ) -> PyResult<Option<Ticket>> {
        let call = Call::Agree { yes, message, verdict: Arc::clone(&agreed.get().0) };
        // SAFETY: the call has no spans.
        let job = unsafe { Job::new(call, None, vec![]) };
        self.launch(py, job, timeout, is_async)
    }

    /// The operation that a rank has called and this one has not, for errors.
    fn called_ahead(&self, rank: usize) -> PyResult<Option<String>> {
        Ok(self.lane()?.called_ahead(rank))
    }

    /// Host and process id of each rank, and whether the process lives; also once the group is broken.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<Member>> {
        let lane = self.lane()?;
        py.detach(|| lane.members()).map_err(errors::raise)
    }

    /// Ends the group for this rank and tells the others, which fail when they wait for it. `members` goes on.
    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        let lane = self.lane()?;
        py.detach(|| lane.give_up());
        Ok(())
    }

    /// Waits for the operations on their way and leaves the group. Closing twice is harmless.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.lane.take().map_or(Ok(()), |lane| py.detach(|| lane.close()).map_err(errors::raise))
    }
}

/// What all ranks name alike in a call of `Group.start`: the pool's names of a collective, of elements and of a reduction, which
/// counts where the collective combines them.
#[pyclass(module = "polder._core", name = "Operation", frozen)]
pub(crate) struct AnyOperation {
    operation: Operation,
    elements: Elements,
    #[pyo3(get)]
    reduction: String,
    /// Torch's name of the call, for errors.
    #[pyo3(get)]
    call: String,
}

#[pymethods]
impl AnyOperation {
    #[new]
    #[pyo3(signature = (call, collective, dtype, reduction="sum", root=0))]
    fn new(call: &str, collective: &str, dtype: &str, reduction: &str, root: usize) -> PyResult<Self> {
        let named = Collective::named(collective)
            .ok_or_else(|| argument(format!("there is no collective {collective:?}")))?;
        let elements = Elements::named(dtype)?;
        let operation = operation(named, elements, reduction, root)?;
        Ok(Self { operation, elements, reduction: reduction.to_owned(), call: call.to_owned() })
    }

    /// The collective's name.
    #[getter]
    fn collective(&self) -> &'static str {
        self.operation.collective.name()
    }

    /// The rank that alone gives or gets; 0 where no rank does.
    #[getter]
    fn root(&self) -> usize {
        self.operation.root
    }
}

/// What `Group.start` gets of a piece of a message.
type Piece<'py> = (Bound<'py, Agreed>, Option<Bound<'py, PoolMemory>>, usize, u64);

fn operation(collective: Collective, elements: Elements, op: &str, root: usize) -> PyResult<Operation> {
    let reduction = collective.combines().then(|| elements.op(op)).transpose()?;
    Ok(Operation { collective, root, dtype: elements.dtype, reduction })
}

/// Where the spans of a collective are. One whose input is as long as its output may have one span for both.
fn buffers(
    collective: Collective,
    call: &str,
    mut from: Vec<Span>,
    mut into: Vec<Span>,
) -> PyResult<Buffers> {
    let has_chunks = collective.has_chunks();
    if !has_chunks && from.len().max(into.len()) > 1 {
        let tensors = from.len().max(into.len());
        return Err(argument(format!("{call} got {tensors} tensors; give one for each process")));
    }
    if from.len() > 1 || into.len() > 1 {
        buffer::expect_apart(call, &into)?;
        return Ok(Buffers::Lists { from, into });
    }
    Ok(match (from.pop(), into.pop()) {
        (Some(data), None) | (None, Some(data)) if !has_chunks => Buffers::InPlace(data),
        (from, into) => {
            Buffers::Apart { from: from.unwrap_or(Span::EMPTY), into: into.unwrap_or(Span::EMPTY) }
        }
    })
}

/// What the ranks of a group have agreed on, once they have.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Agreed(Verdict);

#[pymethods]
impl Agreed {
    #[new]
    fn new() -> Self {
        Self(Verdict::default())
    }
}

/// Runs a job after everything that was submitted before, once its arrays are ready, and returns when it is done.
fn run(py: Python<'_>, lane: &Lane, job: &Job, timeout: Option<Duration>) -> PyResult<()> {
    while !lane.is_idle() {
        py.detach(|| lane.is_idle_within(SIGNALS));
        py.check_signals()?;
    }
    if let Some(ready) = job.ready() {
        py.detach(|| lane.expect_whole()).map_err(errors::raise)?;
        // The others wait for this call.
        ready.call0(py).inspect_err(|_| py.detach(|| lane.give_up()))?;
    }
    signals::watched(py, move || lane.run(job, timeout))
}

fn missing_out() -> PyErr {
    argument("out is missing; give an array that receives every rank's part".to_owned())
}

/// How a caller waits for an operation, so long at most.
type Wait = Box<dyn Fn(&lane::Ticket, Duration) -> Option<Result<(), PoolError>> + Send + Sync>;

/// One operation on its way.
#[pyclass(module = "polder._core", frozen, subclass)]
pub(crate) struct Ticket {
    ticket: Arc<lane::Ticket>,
    wait: Wait,
}

impl Ticket {
    /// An operation for which callers wait by `wait`.
    pub(crate) const fn new(ticket: Arc<lane::Ticket>, wait: Wait) -> Self {
        Self { ticket, wait }
    }
}

#[pymethods]
impl Ticket {
    /// Waits for the operation's end. False if `timeout` seconds pass before it.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<bool> {
        let timeout = timeout.map(Seconds::span).transpose()?.map(|span| span.0);
        signals::outcome(py, &self.ticket, timeout, &self.wait)
    }

    fn done(&self) -> bool {
        self.ticket.outcome().is_some()
    }

    /// What went wrong, once it is over.
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error = self.ticket.outcome()?.err()?;
        Some(errors::raise(error).into_value(py).into_any())
    }

    /// Calls `then` with `None` or the exception when the operation is over, now or on a thread that tells so.
    fn when_done(&self, py: Python<'_>, then: Py<PyAny>) {
        let told = move |outcome: Result<(), PoolError>| {
            Python::attach(|py| {
                let error = outcome.err().map(|error| errors::raise(error).into_value(py));
                if let Err(failure) = then.call1(py, (error,)) {
                    failure.write_unraisable(py, Some(then.bind(py)));
                }
                drop(then);
            });
        };
        py.detach(|| self.ticket.when_done(Box::new(told)));
    }
}
