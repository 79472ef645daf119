//! Collectives: schedules, run by every rank of a group on buffers of its own or on data that lives in the pool.
//!
//! Ranks must name the same collective, root, element type, operator and bytes. If they differ, all ranks get an error, at
//! the latest in the next operation.
//!
//! All reductions give the same bits on every rank, because a chunk is combined in the same order wherever it is combined. A
//! call returns what the collective promises, or the group's error. After an error, do not use the output; of an operation in
//! place, that is the whole buffer.

mod data;
mod lists;
mod pace;
mod run;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use polder_kernels::{Dtype, Op};
use polder_mem::{Memory, Nanos, Offset};
use polder_platform::sized;
use polder_schedule::{Collective, Cut, Plan, Variant};

use crate::PoolError;
use crate::deviation::Deviation;
use crate::group::{Failure, Group, GroupOptions, MAX_BYTES, MAX_STEP, Signature};

use data::Data;
pub(crate) use data::{Scratch, fill, length, pieces};
use pace::{Paces, Size, Stores};
use run::{Reduction, Run};

/// What plans are kept by.
type Key = (Collective, usize, Variant);

/// What a group keeps between operations.
#[derive(Default)]
pub(crate) struct CollectiveCache {
    plans: Vec<(Key, Arc<Plan>)>,
    scratch: Option<Scratch>,
    paces: Paces,
}

/// What every rank of a group names alike in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// What the ranks do together.
    pub collective: Collective,
    /// The rank that alone gives the input or gets the output; 0 where a collective has no root.
    pub root: usize,
    /// The elements.
    pub dtype: Dtype,
    /// How inputs are combined, in a collective that combines them.
    pub reduction: Option<Op>,
}

impl Operation {
    /// A collective that only moves elements, with root 0.
    #[must_use]
    pub const fn moving(collective: Collective, dtype: Dtype) -> Self {
        Self { collective, root: 0, dtype, reduction: None }
    }

    /// A collective that combines elements by `op`, with root 0.
    #[must_use]
    pub const fn reducing(collective: Collective, op: Op, dtype: Dtype) -> Self {
        Self { collective, root: 0, dtype, reduction: Some(op) }
    }

    /// The same with this root.
    #[must_use]
    pub const fn with_root(self, root: usize) -> Self {
        Self { root, ..self }
    }
}

/// Where a rank has the input and the output of an operation. A side that has all ranks' chunks has them in the order of the
/// ranks. What a rank does not read or write may be empty: the input of a scatter and the output of a gather away from the root.
pub enum Buffers<'a> {
    /// In one buffer, in whole, or as chunk `r` of rank `r` of all chunks: not for gather, scatter and all-to-all.
    InPlace(&'a mut [u8]),
    /// In two.
    Apart {
        /// What this rank gives.
        input: &'a [u8],
        /// What it gets.
        output: &'a mut [u8],
    },
    /// With a buffer for each chunk, of all-gather, gather, scatter, reduce-scatter or all-to-all. A side that is one chunk is
    /// a list of one. Chunks may differ in length in an all-to-all, where only the two ranks of a chunk have to know it, and in an
    /// all-gather or reduce-scatter, where all ranks do.
    Lists {
        /// What this rank gives.
        input: &'a [&'a [u8]],
        /// What it gets.
        output: &'a mut [&'a mut [u8]],
    },
    /// In place in the pool, where each rank has its own extent and peers read it: nothing is staged. For all-reduce,
    /// reduce-scatter, all-gather and broadcast. When the call returns, peers have read what they need.
    Pool {
        /// The first byte, aligned to a line.
        at: Offset,
        /// How many bytes there are.
        bytes: u64,
    },
}

/// An operation with its sizes.
struct Call {
    collective: Collective,
    root: usize,
    dtype: Dtype,
    reduction: Option<Reduction>,
    /// Bytes of the message that all ranks must agree on.
    bytes: u64,
    /// Whether ranks tell each other the lengths of their parts.
    tells_lengths: bool,
}

/// An operation that is being timed, if it is.
#[derive(Clone, Copy)]
struct Timed {
    stores: Stores,
    begun: Option<(Size, Nanos)>,
}

impl<M: Memory> Group<M> {
    /// Runs one operation.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit. [`PoolError::Mismatch`] where a chunk of an all-to-all of lists is
    /// not as long as this rank expects; the group is whole then, and the other chunks have come.
    pub fn run(&mut self, operation: &Operation, buffers: Buffers<'_>) -> Result<(), PoolError> {
        let (rank, size) = (self.rank(), self.size());
        match buffers {
            _ if operation.collective == Collective::Barrier => self.barrier(),
            Buffers::InPlace(data) => {
                let chunk = self.chunk_in_place(operation, data.len(), "one buffer")?;
                let own = (rank * chunk) as u64;
                let [input_at, output_at] = match operation.collective {
                    Collective::AllGather => [own, 0],
                    Collective::ReduceScatter => [0, own],
                    _ => [0, 0],
                };
                self.perform(&self.call(operation, chunk)?, Data::Same { data, input_at, output_at })
            }
            Buffers::Apart { input, output } => {
                let (inputs, outputs) = self.chunks(operation);
                let chunk = match (inputs, outputs) {
                    (1, _) => input.len(),
                    (_, 1) => output.len(),
                    _ => input.len() / size,
                };
                if inputs > 0 {
                    same_length("input", input.len(), inputs * chunk)?;
                }
                if outputs > 0 {
                    same_length("output", output.len(), outputs * chunk)?;
                }
                self.perform(&self.call(operation, chunk)?, Data::Apart { input, output })
            }
            Buffers::Lists { input, output } => self.run_lists(operation, input, output),
            Buffers::Pool { at, bytes } => {
                let length = self.extent_length(at, bytes)?;
                let chunk = self.chunk_in_place(operation, length, "the pool")?;
                let strides = match operation.collective {
                    Collective::AllGather => (chunk as u64, 0),
                    Collective::ReduceScatter => (0, chunk as u64),
                    Collective::Reduce => return Err(unplaced(operation.collective, "the pool")),
                    _ => (0, 0),
                };
                self.perform_in_pool(&self.call(operation, chunk)?, at, bytes, strides)
            }
        }
    }

    /// [`Group::run`] of an all-reduce in place.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_reduce(&mut self, op: Op, dtype: Dtype, data: &mut [u8]) -> Result<(), PoolError> {
        self.run(&Operation::reducing(Collective::AllReduce, op, dtype), Buffers::InPlace(data))
    }

    /// [`Group::run`] of a broadcast.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn broadcast(&mut self, root: usize, dtype: Dtype, data: &mut [u8]) -> Result<(), PoolError> {
        let operation = Operation::moving(Collective::Broadcast, dtype).with_root(root);
        self.run(&operation, Buffers::InPlace(data))
    }

    /// How many chunks this rank gives and gets.
    fn chunks(&self, operation: &Operation) -> (usize, usize) {
        let (size, at_root) = (self.size(), if self.rank() == operation.root { self.size() } else { 0 });
        match operation.collective {
            Collective::Barrier => (0, 0),
            Collective::Broadcast | Collective::Reduce | Collective::AllReduce => (1, 1),
            Collective::ReduceScatter => (size, 1),
            Collective::AllGather => (1, size),
            Collective::Gather => (1, at_root),
            Collective::Scatter => (at_root, 1),
            Collective::AllToAll => (size, size),
        }
    }

    /// The bytes of a chunk of data of `length` bytes that is input and output.
    fn chunk_in_place(
        &self,
        operation: &Operation,
        length: usize,
        place: &'static str,
    ) -> Result<usize, PoolError> {
        let chunks = match operation.collective {
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast => 1,
            Collective::AllGather | Collective::ReduceScatter => self.size(),
            other => return Err(unplaced(other, place)),
        };
        same_length("data", length, length / chunks * chunks)?;
        Ok(length / chunks)
    }

    /// The operation on chunks of `bytes` bytes, when it can be one.
    fn call(&self, operation: &Operation, bytes: usize) -> Result<Call, PoolError> {
        let Operation { collective, root, dtype, reduction } = *operation;
        if root >= self.size() {
            let value = format!("{root} of {} ranks", self.size());
            return Err(PoolError::Argument { what: "root", value, expected: "a rank below the size" });
        }
        if !bytes.is_multiple_of(dtype.bytes()) {
            let value = format!("{bytes} bytes of {dtype}");
            return Err(PoolError::Argument {
                what: "message",
                value,
                expected: "a whole number of elements",
            });
        }
        let bytes = bytes as u64;
        if bytes > MAX_BYTES {
            return Err(too_long(bytes));
        }
        if let Some(op) = reduction.filter(|op| op.check(dtype).is_err()) {
            let value = format!("{op} of {dtype}");
            let expected = "floats have sum, product, min, max and average";
            return Err(PoolError::Argument { what: "reduction", value, expected });
        }
        if collective.combines() != reduction.is_some() {
            let value = format!("{reduction:?} in {collective}");
            let expected = "one where elements are combined, and none elsewhere";
            return Err(PoolError::Argument { what: "reduction", value, expected });
        }
        let ranks = u32::try_from(self.size()).ok().and_then(NonZeroU32::new).expect("a group has ranks");
        let reduction = reduction.map(|op| Reduction { op, dtype, ranks });
        Ok(Call { collective, root, dtype, reduction, bytes, tells_lengths: false })
    }

    /// The length of this rank's extent of `bytes` bytes at `at`, when it can be one.
    fn extent_length(&self, at: Offset, bytes: u64) -> Result<usize, PoolError> {
        match usize::try_from(bytes) {
            Ok(length) if self.is_extent(at, bytes) => Ok(length),
            _ => {
                let value = format!("[{at}, +{bytes})");
                let expected = "line-aligned and inside the region";
                Err(PoolError::Argument { what: "extent", value, expected })
            }
        }
    }

    fn is_extent(&self, at: Offset, bytes: u64) -> bool {
        at == at.line() && at.0.checked_add(bytes).is_some_and(|end| end <= self.memory().bytes())
    }

    fn perform(&mut self, call: &Call, data: Data) -> Result<(), PoolError> {
        let variant = self.variant(call);
        let plan = self.plan(call, variant);
        let cut = self.cut(call, &plan)?;
        let mut scratch = self.collective_cache.scratch.take().unwrap_or_default();
        let timed = self.timed(call, false);
        let stores = timed.stores;
        let outcome = self.operation(self.signature(call), |group| {
            group.pass_window()?;
            if !plan.steps[0].fills {
                // Nothing of ours is awaited soon: say what we are in, so that others can move on, or find a mismatch.
                group.publish_step(0);
            }
            let half = group.staging_half();
            Run { group, plan: &plan, cut, reduction: call.reduction, data, half, stores }.run(&mut scratch)
        });
        if outcome.is_ok() && (call.collective.hears_all() || Deviation::EveryEndIsHeard.is_on()) {
            self.has_heard_all();
        }
        self.record_time(timed);
        self.collective_cache.scratch = Some(scratch);
        outcome
    }

    fn perform_in_pool(
        &mut self,
        call: &Call,
        at: Offset,
        bytes: u64,
        (input_stride, output_stride): (u64, u64),
    ) -> Result<(), PoolError> {
        let variant = Variant::in_pool(call.collective);
        let plan = self.plan(call, variant);
        assert!(plan.shows_only_chunks(), "{} in the pool has a block that is no chunk", call.collective);
        let segment = self.options().segment_bytes;
        let cut = checked_cut(&plan, Some(Cut::new(&plan, call.bytes, segment)), "segment", segment)?;
        let mut scratch = self.collective_cache.scratch.take().unwrap_or_default();
        let timed = self.timed(call, true);
        let stores = timed.stores;
        let outcome = self.operation(self.signature(call).in_pool(), |group| {
            let at = group.exchange_extents(at, bytes)?;
            let data = Data::Pool { at: &at, input_stride, output_stride };
            Run { group, plan: &plan, cut, reduction: call.reduction, data, half: 0, stores }
                .run(&mut scratch)
        });
        self.record_time(timed);
        self.collective_cache.scratch = Some(scratch);
        outcome
    }

    /// What ranks compare of an operation. Pieces of a message go through the pool, or through memory in its place.
    fn signature(&self, call: &Call) -> Signature {
        match self.message() {
            None => call.signature(),
            Some(bytes) => Call { bytes, ..*call }.signature().in_pool(),
        }
    }

    /// Begins to time an operation, where the kind of stores is ours to choose: not for short messages, and not where all
    /// readers need them in memory.
    fn timed(&mut self, call: &Call, in_pool: bool) -> Timed {
        let all_far = self.memory().coherence().needs_write_back() && !self.has_local_peers();
        if call.bytes < self.options().stream_bytes || all_far || self.size() == 1 {
            return Timed { stores: Stores::Ordinary, begun: None };
        }
        let size = Size { in_pool, bytes_log2: call.bytes.ilog2() };
        let stores = self.collective_cache.paces.next(size);
        Timed { stores, begun: Some((size, self.memory().now())) }
    }

    fn record_time(&mut self, timed: Timed) {
        if let Some((size, begun)) = timed.begun {
            let time = Duration::from_nanos(self.memory().now().0.saturating_sub(begun.0));
            self.collective_cache.paces.record_time(size, timed.stores, time);
        }
    }

    /// Tells every peer where this rank's data lies, and learns where theirs does.
    fn exchange_extents(&self, at: Offset, bytes: u64) -> Result<Vec<Offset>, Failure> {
        self.pass_window()?;
        self.set_own_words([at.0, 0]);
        self.publish_step(0);
        self.await_steps(0)?;
        let of = |rank| {
            let extent = if rank == self.rank() { at } else { Offset(self.peer_words(rank)[0]) };
            if self.is_extent(extent, bytes) { Ok(extent) } else { Err(self.corrupt(rank)) }
        };
        (0..self.size()).map(of).collect()
    }

    fn variant(&self, call: &Call) -> Variant {
        let (direct, ranks) = (self.options().direct_bytes, self.size());
        Variant::staged(call.collective, call.bytes, direct, ranks, || self.hosts().collect())
    }

    fn plan(&mut self, call: &Call, variant: Variant) -> Arc<Plan> {
        let key = (call.collective, call.root, variant);
        if let Some((_, plan)) = self.collective_cache.plans.iter().find(|(other, _)| *other == key) {
            return Arc::clone(plan);
        }
        let hosts: Vec<u16> = self.hosts().collect();
        let schedule = variant.schedule(call.collective, &hosts, call.root);
        let plan = Arc::new(Plan::new(&schedule, &hosts, self.rank()));
        self.collective_cache.plans.push((key, Arc::clone(&plan)));
        plan
    }

    /// Cuts a message so that its blocks fit one half of the staging, which grows first where the message gains by it.
    fn cut(&mut self, call: &Call, plan: &Plan) -> Result<Cut, PoolError> {
        let GroupOptions { staging_bytes: all, segment_bytes, .. } = *self.options();
        let staged = |bytes: u64| Cut::staged(plan, call.bytes, bytes / 2, segment_bytes);
        if !self.has_all_staging() && staged(self.staging_bytes()) != staged(all) {
            self.grow_staging(self.signature(call))?;
        }
        let bytes = self.staging_bytes();
        checked_cut(plan, staged(bytes), "staging", bytes).map_err(|error| self.refusal().unwrap_or(error))
    }
}

/// The cut, when there is one whose rounds can be counted; else it is `what`, of so many bytes, that is too small.
fn checked_cut(plan: &Plan, cut: Option<Cut>, what: &'static str, bytes: u64) -> Result<Cut, PoolError> {
    let steps = |cut: &Cut| plan.number(cut.rounds, plan.steps.len());
    cut.filter(|cut| steps(cut) <= u64::from(MAX_STEP)).ok_or_else(|| {
        let expected = "more, for so many ranks and such a message";
        PoolError::Argument { what, value: format!("{} a rank", sized(bytes)), expected }
    })
}

impl Call {
    fn signature(&self) -> Signature {
        let signature = Signature::new(self.collective, self.root, self.bytes).of(self.dtype);
        let signature = if self.tells_lengths { signature.of_parts() } else { signature };
        self.reduction.map_or(signature, |reduction| signature.reducing(reduction.op))
    }
}

fn unplaced(collective: Collective, place: &'static str) -> PoolError {
    let expected = "all-reduce, reduce-scatter, all-gather and broadcast can be, and reduce outside the pool";
    PoolError::Argument { what: "a collective in", value: format!("{place}: {collective}"), expected }
}

/// The error of a message that no operation may move.
pub(crate) fn too_long(bytes: u64) -> PoolError {
    let expected = "at most 256 GiB in one operation: cut it";
    PoolError::Argument { what: "message", value: format!("{bytes} bytes"), expected }
}

fn same_length(what: &'static str, bytes: usize, expected: usize) -> Result<(), PoolError> {
    if bytes == expected {
        return Ok(());
    }
    let value = format!("{bytes} bytes, for {expected}");
    Err(PoolError::Argument {
        what,
        value,
        expected: "one chunk for each rank, or as much as the other buffer",
    })
}
