//! `Group` and `Ticket`.

use std::slice;
use std::sync::{Arc, Weak};
use std::time::Duration;

use polder_attach::session::Session;
use polder_kernels::{Dtype, Op};
use polder_mem::Memory;
use polder_pool::wait::Patience;
use polder_pool::{PoolError, group};
use polder_schedule::Collective;
use pyo3::prelude::*;

use crate::buffer::{self, Elements, Span};
use crate::errors::{self, argument};
use crate::lane::{self, Arrays, Call, Collectives, Interrupt, Lane, Member};
use crate::number::Number;
use crate::object::{Extent, Object};
use crate::pool::{self, Owned, Pool};
use crate::pool_memory::PoolMemory;

/// Ranks that call the same operations in the same order.
#[pyclass(module = "polder._core", subclass, frozen, weakref)]
pub(crate) struct Group {
    lane: Owned<Arc<Lane>>,
    /// Through which it was joined.
    session: Weak<Session>,
    rank: usize,
    size: usize,
}

impl Group {
    fn lane(&self) -> PyResult<Arc<Lane>> {
        self.lane.with(Arc::clone)
    }

    fn all_reduce_times(&self, array: &Bound<'_, PyAny>, op: &str, times: u32) -> PyResult<()> {
        if let Some(extent) = self.in_pool(array)? {
            return self.run(array.py(), Call::AllReduceInPool { op: extent.op(op)?, extent, times });
        }
        let held = buffer::writable(array)?;
        self.run(array.py(), Call::AllReduce { data: held.span, op: held.span.elements.op(op)?, times })
    }

    /// The array of an object that a collective works on in place, when it got one instead of an array.
    fn in_pool(&self, array: &Bound<'_, PyAny>) -> PyResult<Option<Extent>> {
        array.cast::<Object>().ok().map(|object| object.get().extent(&self.session)).transpose()
    }

    /// Runs a call over held buffers.
    fn run(&self, py: Python<'_>, call: Call) -> PyResult<()> {
        // SAFETY: whoever calls this holds the buffers of the call until it returns.
        unsafe { self.lane()?.run(py, call, None, None) }
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
            let into = Span::raw((whole.as_mut_ptr() as usize, whole.len()), "uint8")?;
            (Span::raw((record.as_ptr() as usize, record.len()), "uint8")?, into)
        };
        self.run(py, Call::AllGather { from, into })?;
        Ok(whole)
    }

    /// Runs a call now when `wait` is set, and queues it otherwise.
    ///
    /// # Safety
    /// `arrays` keep the memory of the call's spans alive, and nobody else touches it until the call is over.
    unsafe fn launch(
        &self,
        py: Python<'_>,
        call: Call,
        timeout: Option<f64>,
        wait: bool,
        arrays: Arrays,
    ) -> PyResult<Option<Ticket>> {
        let timeout = timeout.map(pool::span).transpose()?.map(|span| span.0);
        let lane = self.lane()?;
        if wait {
            // SAFETY: `arrays` live until this returns.
            unsafe { lane.run(py, call, timeout, Some(&arrays))? };
            return Ok(None);
        }
        // SAFETY: the lane keeps `arrays`, and waits until they are ready.
        unsafe { lane.submit(call, timeout, arrays) }
            .map(|ticket| Some(Ticket::new(ticket, Box::new(lane::Ticket::wait_briefly))))
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
        name: &str,
        rank: Number,
        size: Number,
        timeout: Option<f64>,
        given_up: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let (rank, size) = (rank.of::<u32>("rank")? as usize, size.of::<u32>("size")? as usize);
        let timeout = timeout.map(pool::span).transpose()?.map(|span| span.0);
        let session = pool.get().session()?;
        let lane = Lane::new(py, given_up, |interrupt| {
            join(&session, session.pool(), name, (rank, size), timeout, interrupt)
        })?;
        Ok(Self { lane: Owned::new("group", Arc::new(lane)), session: Arc::downgrade(&session), rank, size })
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
        self.run(py, Call::Barrier)
    }

    /// Combines the arrays of all ranks; every rank gets the result, in place. An Object is combined where it lies.
    #[pyo3(signature = (array, op="sum"))]
    fn all_reduce(&self, array: &Bound<'_, PyAny>, op: &str) -> PyResult<()> {
        self.all_reduce_times(array, op, 1)
    }

    /// Sums the arrays of all ranks `times` times, with no Python between: the row of a benchmark that shows what a call
    /// from Python adds.
    fn repeat_all_reduce(&self, array: &Bound<'_, PyAny>, times: u32) -> PyResult<()> {
        self.all_reduce_times(array, "sum", times)
    }

    /// Combines the arrays of all ranks; the root gets the result, in place.
    #[pyo3(signature = (array, op="sum", root=Number::default()))]
    fn reduce(&self, array: &Bound<'_, PyAny>, op: &str, root: Number) -> PyResult<()> {
        let root = self.root(root)?;
        let held = buffer::writable(array)?;
        self.run(array.py(), Call::Reduce { data: held.span, op: held.span.elements.op(op)?, root })
    }

    /// Copies the root's array to every rank's. Objects are copied where they lie.
    #[pyo3(signature = (array, root=Number::default()))]
    fn broadcast(&self, array: &Bound<'_, PyAny>, root: Number) -> PyResult<()> {
        let root = self.root(root)?;
        if let Some(extent) = self.in_pool(array)? {
            return self.run(array.py(), Call::BroadcastInPool { extent, root });
        }
        let held = buffer::writable(array)?;
        self.run(array.py(), Call::Broadcast { data: held.span, root })
    }

    /// Copies the arrays of all ranks to every rank's `out`, in the order of ranks. An Object without `out` is gathered
    /// where it lies: chunk r from rank r.
    #[pyo3(signature = (array, out=None))]
    fn all_gather(&self, array: &Bound<'_, PyAny>, out: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(out) = out else {
            let extent = self.in_pool(array)?.ok_or_else(missing_out)?;
            return self.run(array.py(), Call::AllGatherInPool { extent });
        };
        let (from, into) = (buffer::readable(array)?, buffer::writable(out)?);
        self.check_each(&into.span, &from.span, "out")?;
        self.run(array.py(), Call::AllGather { from: from.span, into: into.span })
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
        let Some(out) = out else {
            let extent = self.in_pool(array)?.ok_or_else(missing_out)?;
            return self.run(array.py(), Call::ReduceScatterInPool { op: extent.op(op)?, extent });
        };
        let (from, into) = (buffer::readable(array)?, buffer::writable(out)?);
        self.check_each(&from.span, &into.span, "array")?;
        let op = from.span.elements.op(op)?;
        self.run(array.py(), Call::ReduceScatter { from: from.span, into: into.span, op })
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
        self.run(
            array.py(),
            Call::Gather { from: from.span, into: into.as_ref().map(|held| held.span), root },
        )
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
        self.run(out.py(), Call::Scatter { from: from.as_ref().map(|held| held.span), into: into.span, root })
    }

    /// Copies chunk r of rank s's array to chunk s of rank r's `out`.
    fn all_to_all(&self, array: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let (from, into) = (buffer::readable(array)?, buffer::writable(out)?);
        self.check_chunks(&from.span, &into.span)?;
        self.run(out.py(), Call::AllToAll { from: from.span, into: into.span })
    }

    /// Starts a collective on bare memory, for torch: at once when `wait` is set and nothing is before it, and then
    /// returns `None`; on the group's thread otherwise, once `ready` has returned, if it is given. `arrays` is kept until it is
    /// done.
    ///
    /// The addresses must be those of tensors in `arrays`, contiguous and as long as the counts say.
    #[pyo3(signature = (collective, source, target, dtype, op, root, timeout, wait, arrays, ready=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for every collective of one private caller")]
    fn start(
        &self,
        py: Python<'_>,
        collective: &str,
        source: (usize, usize),
        target: (usize, usize),
        dtype: &str,
        op: &str,
        root: usize,
        timeout: Option<f64>,
        wait: bool,
        arrays: Py<PyAny>,
        ready: Option<Py<PyAny>>,
    ) -> PyResult<Option<Ticket>> {
        // SAFETY: the caller promises that `arrays` keeps this memory alive, and the lane keeps `arrays`.
        let (from, into) = unsafe { (Span::raw(source, dtype)?, Span::raw(target, dtype)?) };
        self.check_root(root)?;
        let call = match Collective::named(collective) {
            Some(Collective::Barrier) => Call::Barrier,
            Some(Collective::AllReduce) => {
                Call::AllReduce { data: into, op: into.elements.op(op)?, times: 1 }
            }
            Some(Collective::Broadcast) => Call::Broadcast { data: into, root },
            Some(Collective::Reduce) => Call::Reduce { data: into, op: into.elements.op(op)?, root },
            Some(Collective::Gather) => {
                let into = (self.rank == root).then_some(into);
                into.map_or(Ok(()), |into| self.check_each(&into, &from, "the output"))?;
                Call::Gather { from, into, root }
            }
            Some(Collective::Scatter) => {
                let from = (self.rank == root).then_some(from);
                from.map_or(Ok(()), |from| self.check_each(&from, &into, "the input"))?;
                Call::Scatter { from, into, root }
            }
            Some(Collective::AllToAll) => {
                self.check_chunks(&from, &into)?;
                Call::AllToAll { from, into }
            }
            Some(Collective::AllGather) => {
                self.check_each(&into, &from, "the output")?;
                Call::AllGather { from, into }
            }
            Some(Collective::ReduceScatter) => {
                self.check_each(&from, &into, "the input")?;
                Call::ReduceScatter { from, into, op: into.elements.op(op)? }
            }
            None => return Err(argument(format!("torch starts no collective {collective:?}"))),
        };
        // SAFETY: as above.
        unsafe { self.launch(py, call, timeout, wait, Arrays { ready, _kept: arrays }) }
    }

    /// As `start`, with a list of address and count for each chunk of a source or target that is in several tensors.
    #[pyo3(signature = (collective, sources, targets, dtype, op, root, timeout, wait, arrays, ready=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for every collective of one private caller")]
    fn start_lists(
        &self,
        py: Python<'_>,
        collective: &str,
        sources: Vec<(usize, usize)>,
        targets: Vec<(usize, usize)>,
        dtype: &str,
        op: &str,
        root: usize,
        timeout: Option<f64>,
        wait: bool,
        arrays: Py<PyAny>,
        ready: Option<Py<PyAny>>,
    ) -> PyResult<Option<Ticket>> {
        self.check_root(root)?;
        let named = Collective::named(collective);
        let collective = named.ok_or_else(|| argument(format!("there is no collective {collective:?}")))?;
        let spans = |at: Vec<(usize, usize)>| {
            // SAFETY: as in `start`.
            at.into_iter().map(|at| unsafe { Span::raw(at, dtype) }).collect::<PyResult<Vec<_>>>()
        };
        let (from, into) = (spans(sources)?, spans(targets)?);
        buffer::expect_apart(collective.name(), &into)?;
        let op = match collective {
            Collective::ReduceScatter => Some(Elements::named(dtype)?.op(op)?),
            _ => None,
        };
        let call = Call::Lists { collective, root, op, from, into };
        // SAFETY: as in `start`; no two of the spans that are written overlap.
        unsafe { self.launch(py, call, timeout, wait, Arrays { ready, _kept: arrays }) }
    }

    /// Finds out whether all ranks say `yes`, for the pieces that follow; `message` bytes are what ranks compare. As `start`.
    #[expect(clippy::too_many_arguments, reason = "one private caller")]
    fn agree(
        &self,
        py: Python<'_>,
        agreed: &Bound<'_, Agreed>,
        yes: bool,
        message: u64,
        timeout: Option<f64>,
        wait: bool,
        arrays: Py<PyAny>,
    ) -> PyResult<Option<Ticket>> {
        let call = Call::Agree { yes, message, verdict: Arc::clone(&agreed.get().0) };
        // SAFETY: the call has no spans.
        unsafe { self.launch(py, call, timeout, wait, Arrays { ready: None, _kept: arrays }) }
    }

    /// As `start`, for `nbytes` from `begin` on of memory at `address`: one piece of a message of `message` bytes a chunk. If all
    /// have said yes in `agreed`, the memory is `pooled` on each rank, and the piece is worked on there. `ready` is called before.
    /// Each rank has its part of what is gathered or scattered at its own place.
    #[expect(clippy::too_many_arguments, reason = "one call for every collective of one private caller")]
    fn start_piece(
        &self,
        py: Python<'_>,
        collective: &str,
        agreed: &Bound<'_, Agreed>,
        pooled: Option<&Bound<'_, PoolMemory>>,
        address: usize,
        begin: usize,
        nbytes: usize,
        message: u64,
        dtype: &str,
        op: &str,
        root: usize,
        timeout: Option<f64>,
        wait: bool,
        arrays: Py<PyAny>,
        ready: Py<PyAny>,
    ) -> PyResult<Option<Ticket>> {
        self.check_root(root)?;
        let elements = Elements::named(dtype)?;
        let spanning = |begin, bytes| {
            // SAFETY: the caller promises that `arrays` keeps this memory alive, and the lane keeps `arrays`.
            unsafe { Span::raw((address + begin, bytes / elements.dtype.bytes()), dtype) }
        };
        let (whole, chunk) = (spanning(begin, nbytes)?, nbytes / self.size);
        let own = spanning(begin + self.rank * chunk, chunk)?;
        let extent = || pooled.map(|it| it.get().extent(&self.session, (begin, nbytes), dtype)).transpose();
        let (in_pool, private) = match Collective::named(collective) {
            Some(Collective::AllReduce) => {
                let op = elements.op(op)?;
                let in_pool = extent()?.map(|extent| Call::AllReduceInPool { op, extent, times: 1 });
                (in_pool, Call::AllReduce { data: whole, op, times: 1 })
            }
            Some(Collective::Broadcast) => {
                let in_pool = extent()?.map(|extent| Call::BroadcastInPool { extent, root });
                (in_pool, Call::Broadcast { data: whole, root })
            }
            Some(Collective::AllGather) => {
                let in_pool = extent()?.map(|extent| Call::AllGatherInPool { extent });
                (in_pool, Call::AllGather { from: own, into: whole })
            }
            Some(Collective::ReduceScatter) => {
                let op = elements.op(op)?;
                let in_pool = extent()?.map(|extent| Call::ReduceScatterInPool { op, extent });
                (in_pool, Call::ReduceScatter { from: whole, into: own, op })
            }
            _ => return Err(argument(format!("{collective:?} is not worked on in pieces"))),
        };
        let verdict = Arc::clone(&agreed.get().0);
        let call =
            Call::Piece { message, verdict, in_pool: in_pool.map(Box::new), private: Box::new(private) };
        // SAFETY: as above.
        unsafe { self.launch(py, call, timeout, wait, Arrays { ready: Some(ready), _kept: arrays }) }
    }

    /// The operation that a rank has called and this one has not, for errors.
    fn called_ahead(&self, rank: usize) -> PyResult<Option<String>> {
        Ok(self.lane()?.called_ahead(rank))
    }

    /// Host and process id of each rank, and whether the process lives; also once the group is broken.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<Member>> {
        self.lane()?.members(py)
    }

    /// Ends the group for this rank and tells the others, which fail when they wait for it. `members` goes on.
    fn give_up(&self, py: Python<'_>) -> PyResult<()> {
        self.lane()?.give_up(py);
        Ok(())
    }

    /// Waits for the operations on their way and leaves the group. Closing twice is harmless.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.lane.take().map_or(Ok(()), |lane| lane.close(py))
    }
}

/// What the ranks of a group have agreed on, once they have.
#[pyclass(module = "polder._core", frozen)]
pub(crate) struct Agreed(lane::Verdict);

#[pymethods]
impl Agreed {
    #[new]
    fn new() -> Self {
        Self(lane::Verdict::default())
    }
}

/// A group, and the session whose heartbeat says that this process lives; the group leaves first.
struct Runner<M: Memory> {
    group: group::JoinedGroup<M>,
    _session: Arc<Session>,
}

impl<M: Memory + Send + Sync> Collectives for Runner<M> {
    unsafe fn run(&mut self, call: &Call, timeout: Option<Duration>, beside: bool) -> Result<(), PoolError> {
        let group = &mut self.group;
        let group::GroupOptions { timeout: usual, patience, .. } = *group.options();
        group.set_timeout(timeout.unwrap_or(usual));
        group.set_patience(if beside { Patience::SHARED } else { patience });
        // SAFETY: the same contract.
        let outcome = unsafe { perform(group, call) };
        group.set_timeout(usual);
        group.set_patience(patience);
        outcome
    }

    fn expect_whole(&self) -> Result<(), PoolError> {
        self.group.expect_whole()
    }

    fn called_ahead(&self, rank: usize) -> Option<String> {
        self.group.called_ahead(rank)
    }

    fn members(&self) -> Result<Vec<Member>, PoolError> {
        let ranks = self.group.members().iter().enumerate();
        ranks.map(|(rank, at)| Ok((at.host, at.pid, !self.group.has_died(rank)?))).collect()
    }

    fn give_up(&mut self) {
        self.group.give_up();
    }

    fn leave(self: Box<Self>) -> Result<(), PoolError> {
        self.group.leave()
    }
}

/// # Safety
/// As [`Collectives::run`].
unsafe fn perform<M: Memory>(group: &mut group::Group<M>, call: &Call) -> Result<(), PoolError> {
    // SAFETY: the contract of this function is that of the slices; spans of one call that overlap become one slice, or
    // the source is copied first. No two of those that are written overlap.
    unsafe {
        match call {
            Call::Barrier => group.barrier(),
            Call::AllReduce { data, op, times } => {
                (0..*times).try_for_each(|_| group.all_reduce(*op, data.dtype(), data.bytes_mut()))
            }
            Call::Reduce { data, op, root } => group.reduce(*root, *op, data.dtype(), data.bytes_mut()),
            Call::Broadcast { data, root } => group.broadcast(*root, data.dtype(), data.bytes_mut()),
            Call::AllGather { from, into } if from.is_chunk(into, group.rank()) => {
                group.all_gather_in_place(into.dtype(), into.bytes_mut())
            }
            Call::AllGather { from, into } => {
                let input = from.bytes_beside(slice::from_ref(into));
                group.all_gather(into.dtype(), &input, into.bytes_mut())
            }
            Call::ReduceScatter { from, into, op } => {
                let input = from.bytes_beside(slice::from_ref(into));
                group.reduce_scatter(*op, into.dtype(), &input, into.bytes_mut())
            }
            Call::Gather { from, into, root } => {
                let input = from.bytes_beside(into.as_slice());
                let output: &mut [u8] = match into {
                    Some(into) => into.bytes_mut(),
                    None => &mut [],
                };
                group.gather(*root, from.dtype(), &input, output)
            }
            Call::Scatter { from, into, root } => {
                let input = from.as_ref().map(|from| from.bytes_beside(slice::from_ref(into)));
                group.scatter(*root, into.dtype(), input.as_deref().unwrap_or(&[]), into.bytes_mut())
            }
            Call::AllToAll { from, into } => {
                let input = from.bytes_beside(slice::from_ref(into));
                group.all_to_all(into.dtype(), &input, into.bytes_mut())
            }
            Call::Lists { collective, root, op, from, into } => {
                let input: Vec<_> = from.iter().map(|from| from.bytes_beside(into)).collect();
                let input: Vec<&[u8]> = input.iter().map(|input| &**input).collect();
                let mut output: Vec<&mut [u8]> = into.iter().map(|into| into.bytes_mut()).collect();
                let dtype = from.iter().chain(into).map(Span::dtype).next().unwrap_or(Dtype::U8);
                match (collective, op) {
                    (Collective::AllGather, _) if are_uneven(into) => {
                        gather_uneven(group, dtype, input[0], &mut output)
                    }
                    (Collective::ReduceScatter, Some(op)) if are_uneven(from) => {
                        scatter_uneven(group, *op, dtype, &input, output[0])
                    }
                    _ => group.over_lists((*collective, *root), *op, dtype, &input, &mut output),
                }
            }
            Call::AllReduceInPool { extent, op, times } => (0..*times)
                .try_for_each(|_| group.all_reduce_in_pool(*op, extent.dtype(), extent.at, extent.bytes)),
            Call::ReduceScatterInPool { extent, op } => {
                group.reduce_scatter_in_pool(*op, extent.dtype(), extent.at, extent.bytes)
            }
            Call::AllGatherInPool { extent } => {
                group.all_gather_in_pool(extent.dtype(), extent.at, extent.bytes)
            }
            Call::BroadcastInPool { extent, root } => {
                group.broadcast_in_pool(*root, extent.dtype(), extent.at, extent.bytes)
            }
            Call::Agree { yes, message, verdict } => {
                let mut all = [u8::from(*yes)];
                of_message(group, *message, |group| group.all_reduce(Op::Min, Dtype::U8, &mut all))?;
                verdict.get_or_init(|| all[0] == 1);
                Ok(())
            }
            Call::Piece { message, verdict, in_pool, private } => {
                let agreed = in_pool.as_deref().filter(|_| verdict.get() == Some(&true));
                of_message(group, *message, |group| perform(group, agreed.unwrap_or(private)))
            }
        }
    }
}

/// Whether a list has chunks of several lengths, which all ranks see alike.
fn are_uneven(chunks: &[Span]) -> bool {
    chunks.iter().any(|chunk| chunk.len() != chunks[0].len())
}

/// An all-gather of chunks of several lengths: each rank's goes to all others by itself.
fn gather_uneven<M: Memory>(
    group: &mut group::Group<M>,
    dtype: Dtype,
    input: &[u8],
    output: &mut [&mut [u8]],
) -> Result<(), PoolError> {
    expect_length(output[group.rank()].len(), input.len())?;
    output[group.rank()].copy_from_slice(input);
    output.iter_mut().enumerate().try_for_each(|(root, chunk)| group.broadcast(root, dtype, chunk))
}

/// A reduce-scatter of chunks of several lengths: each is reduced to its rank by itself.
fn scatter_uneven<M: Memory>(
    group: &mut group::Group<M>,
    op: Op,
    dtype: Dtype,
    input: &[&[u8]],
    output: &mut [u8],
) -> Result<(), PoolError> {
    expect_length(input[group.rank()].len(), output.len())?;
    output.copy_from_slice(input[group.rank()]);
    input.iter().enumerate().try_for_each(|(root, chunk)| match root == group.rank() {
        true => group.reduce(root, op, dtype, output),
        false => group.reduce(root, op, dtype, &mut chunk.to_vec()),
    })
}

/// That a rank's own chunk and the other side of the call are of one length.
fn expect_length(chunk: usize, other: usize) -> Result<(), PoolError> {
    match chunk == other {
        true => Ok(()),
        false => Err(PoolError::Argument {
            what: "the chunk of this rank",
            value: format!("{chunk} bytes for {other}"),
            expected: "both of one length",
        }),
    }
}

/// Runs an operation that is a piece of a message of so many bytes.
fn of_message<M: Memory>(
    group: &mut group::Group<M>,
    message: u64,
    run: impl FnOnce(&mut group::Group<M>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    group.set_message(Some(message))?;
    let outcome = run(group);
    group.set_message(None)?;
    outcome
}

fn join<M: Memory + Send + Sync + 'static>(
    session: &Arc<Session>,
    pool: &Arc<polder_pool::Pool<M>>,
    name: &str,
    (rank, size): (usize, usize),
    timeout: Option<Duration>,
    interrupt: Interrupt,
) -> Result<Box<dyn Collectives>, PoolError> {
    let timeout = timeout.unwrap_or(pool.member().timeout);
    let options = group::GroupOptions {
        timeout,
        patience: Patience::for_ranks(size),
        ..group::GroupOptions::default()
    };
    let group = group::Group::join(Arc::clone(pool), name, rank, size, options, Some(interrupt))?;
    Ok(Box::new(Runner { group, _session: Arc::clone(session) }))
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
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.map(pool::span).transpose()?.map(|span| span.0);
        self.ticket.wait(py, timeout, &self.wait)
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
        self.ticket.when_done(py, then);
    }
}
