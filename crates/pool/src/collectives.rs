//! Collectives: schedules, run by every rank of a group on buffers of its own or on data that lives in the pool.
//!
//! Ranks must name the same collective, root, element type, operator and bytes. If they differ, all ranks get an error, at
//! the latest in the next operation.
//!
//! All reductions give the same bits on every rank, because a chunk is combined in the same order wherever it is combined. A
//! call returns what the collective promises, or the group's error. After an error, do not use the output; of an operation in
//! place, that is the whole buffer.

mod data;
mod pace;
mod run;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use polder_kernels::{Dtype, Op};
use polder_mem::{Coherence, Memory, Nanos, Offset};
use polder_platform::sized;
use polder_schedule::{Collective, Cut, Plan, Variant};

use crate::PoolError;
use crate::group::{Failure, Group, GroupOptions, MAX_BYTES, MAX_STEP, Signature};

use data::Data;
pub(crate) use data::{Scratch, fill, length, pieces};
use pace::{Paces, Size, Stores};
use run::{Reduction, Run};

/// What plans are kept by.
type Key = (Collective, usize, Variant);

/// What a group keeps between operations.
#[derive(Default)]
pub(crate) struct Workshop {
    plans: Vec<(Key, Arc<Plan>)>,
    scratch: Option<Scratch>,
    paces: Paces,
}

/// A collective with its sizes.
struct Call {
    collective: Collective,
    root: usize,
    dtype: Dtype,
    reduction: Option<Reduction>,
    /// Bytes of the message that all ranks must agree on.
    bytes: u64,
}

/// An operation that is being timed, if it is.
#[derive(Clone, Copy)]
struct Timed {
    stores: Stores,
    begun: Option<(Size, Nanos)>,
}

impl<M: Memory> Group<M> {
    /// Combines the `data` of all ranks; every rank gets the result, in place.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_reduce(&mut self, op: Op, dtype: Dtype, data: &mut [u8]) -> Result<(), PoolError> {
        let call = self.reducing(Collective::AllReduce, 0, op, dtype, data.len())?;
        self.perform(&call, Data::Same { data, input_at: 0, output_at: 0 })
    }

    /// Combines the `input` of all ranks into `output`, of the same length, on every rank.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_reduce_into(
        &mut self,
        op: Op,
        dtype: Dtype,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), PoolError> {
        same_length("output", output.len(), input.len())?;
        let call = self.reducing(Collective::AllReduce, 0, op, dtype, input.len())?;
        self.perform(&call, Data::Apart { input, output })
    }

    /// Combines the `data` of all ranks; the root gets the result, in place, and the others' data stays.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn reduce(&mut self, root: usize, op: Op, dtype: Dtype, data: &mut [u8]) -> Result<(), PoolError> {
        let call = self.reducing(Collective::Reduce, root, op, dtype, data.len())?;
        self.perform(&call, Data::Same { data, input_at: 0, output_at: 0 })
    }

    /// Combines the chunks `r` of the `input` of all ranks, of which each has as many as there are ranks, into the
    /// `output` of rank `r`.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn reduce_scatter(
        &mut self,
        op: Op,
        dtype: Dtype,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), PoolError> {
        let chunk = output.len();
        same_length("input", input.len(), chunk * self.size())?;
        let call = self.reducing(Collective::ReduceScatter, 0, op, dtype, chunk)?;
        self.perform(&call, Data::Apart { input, output })
    }

    /// As [`Group::reduce_scatter`], with the result in chunk `r` of rank `r`'s `data`; the other chunks stay.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn reduce_scatter_in_place(
        &mut self,
        op: Op,
        dtype: Dtype,
        data: &mut [u8],
    ) -> Result<(), PoolError> {
        let chunk = self.chunk_of(data.len())?;
        let call = self.reducing(Collective::ReduceScatter, 0, op, dtype, chunk)?;
        let output_at = (self.rank() * chunk) as u64;
        self.perform(&call, Data::Same { data, input_at: 0, output_at })
    }

    /// Copies the root's `data` to every rank.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn broadcast(&mut self, root: usize, dtype: Dtype, data: &mut [u8]) -> Result<(), PoolError> {
        let call = self.moving(Collective::Broadcast, root, dtype, data.len())?;
        self.perform(&call, Data::Same { data, input_at: 0, output_at: 0 })
    }

    /// Copies the `input` of all ranks to the `output` of every rank, in the order of the ranks.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_gather(&mut self, dtype: Dtype, input: &[u8], output: &mut [u8]) -> Result<(), PoolError> {
        same_length("output", output.len(), input.len() * self.size())?;
        let call = self.moving(Collective::AllGather, 0, dtype, input.len())?;
        self.perform(&call, Data::Apart { input, output })
    }

    /// As [`Group::all_gather`], with the input in chunk `r` of rank `r`'s `data`.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_gather_in_place(&mut self, dtype: Dtype, data: &mut [u8]) -> Result<(), PoolError> {
        let chunk = self.chunk_of(data.len())?;
        let call = self.moving(Collective::AllGather, 0, dtype, chunk)?;
        let input_at = (self.rank() * chunk) as u64;
        self.perform(&call, Data::Same { data, input_at, output_at: 0 })
    }

    /// Copies the `input` of all ranks to the root's `output`, in the order of the ranks. Elsewhere `output` is left alone.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn gather(
        &mut self,
        root: usize,
        dtype: Dtype,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), PoolError> {
        if self.rank() == root {
            same_length("output", output.len(), input.len() * self.size())?;
        }
        let call = self.moving(Collective::Gather, root, dtype, input.len())?;
        self.perform(&call, Data::Apart { input, output })
    }

    /// Copies chunk `r` of the root's `input` to the `output` of rank `r`. Elsewhere `input` is not read.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn scatter(
        &mut self,
        root: usize,
        dtype: Dtype,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), PoolError> {
        let (chunk, all) = (output.len(), output.len() * self.size());
        if self.rank() == root {
            same_length("input", input.len(), all)?;
        }
        let call = self.moving(Collective::Scatter, root, dtype, chunk)?;
        self.perform(&call, Data::Apart { input, output })
    }

    /// Copies chunk `r` of rank `s`'s `input` to chunk `s` of rank `r`'s `output`.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_to_all(&mut self, dtype: Dtype, input: &[u8], output: &mut [u8]) -> Result<(), PoolError> {
        same_length("output", output.len(), input.len())?;
        let chunk = self.chunk_of(input.len())?;
        let call = self.moving(Collective::AllToAll, 0, dtype, chunk)?;
        self.perform(&call, Data::Apart { input, output })
    }

    /// As the collective of that name, which may be all-gather, gather, scatter, reduce-scatter or all-to-all, with a buffer
    /// for each chunk where the other call has one for all. A side that is one chunk is a list of one. What this rank does not
    /// read or write may be empty. `op` combines.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn over_lists(
        &mut self,
        (collective, root): (Collective, usize),
        op: Option<Op>,
        dtype: Dtype,
        input: &[&[u8]],
        output: &mut [&mut [u8]],
    ) -> Result<(), PoolError> {
        let (size, is_root) = (self.size(), self.rank() == root);
        let (inputs, outputs) = match collective {
            Collective::AllGather => (1, size),
            Collective::Gather => (1, if is_root { size } else { 0 }),
            Collective::Scatter => (if is_root { size } else { 0 }, 1),
            Collective::ReduceScatter => (size, 1),
            Collective::AllToAll => (size, size),
            other => {
                let expected = "all-gather, gather, scatter, reduce-scatter and all-to-all have";
                return Err(PoolError::Argument {
                    what: "lists of",
                    value: other.name().to_owned(),
                    expected,
                });
            }
        };
        let chunk = input.first().map(|part| part.len()).or(output.first().map(|part| part.len()));
        let chunk = chunk.unwrap_or_default();
        let lengths = || input.iter().map(|part| part.len()).chain(output.iter().map(|part| part.len()));
        if (input.len(), output.len()) != (inputs, outputs) || lengths().any(|length| length != chunk) {
            let value = format!(
                "{} buffers to {}, of {:?} bytes",
                input.len(),
                output.len(),
                lengths().collect::<Vec<_>>()
            );
            let expected = "one buffer for each chunk, all of one length";
            return Err(PoolError::Argument { what: "the list", value, expected });
        }
        let call = match op {
            Some(op) => self.reducing(collective, root, op, dtype, chunk)?,
            None => self.moving(collective, root, dtype, chunk)?,
        };
        let output = output.iter_mut().map(|part| &mut **part).collect();
        self.perform(&call, Data::Lists { input: input.to_vec(), output, chunk: chunk as u64 })
    }

    /// Combines the `bytes` bytes that each rank has at its own `at` in the pool; every rank gets the result there. The
    /// peers read it in place: nothing is staged. When it returns they have read what they need.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_reduce_in_pool(
        &mut self,
        op: Op,
        dtype: Dtype,
        at: Offset,
        bytes: u64,
    ) -> Result<(), PoolError> {
        let length = self.extent_length(at, bytes)?;
        let call = self.reducing(Collective::AllReduce, 0, op, dtype, length)?;
        self.perform_in_pool(&call, at, bytes, (0, 0))
    }

    /// Combines the chunks `r` of all ranks' `bytes` bytes in the pool into chunk `r` of rank `r`'s, in place.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn reduce_scatter_in_pool(
        &mut self,
        op: Op,
        dtype: Dtype,
        at: Offset,
        bytes: u64,
    ) -> Result<(), PoolError> {
        let length = self.extent_length(at, bytes)?;
        let chunk = self.chunk_of(length)?;
        let call = self.reducing(Collective::ReduceScatter, 0, op, dtype, chunk)?;
        self.perform_in_pool(&call, at, bytes, (0, chunk as u64))
    }

    /// Copies chunk `r` of rank `r`'s `bytes` bytes in the pool to chunk `r` of everybody's.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn all_gather_in_pool(&mut self, dtype: Dtype, at: Offset, bytes: u64) -> Result<(), PoolError> {
        let length = self.extent_length(at, bytes)?;
        let chunk = self.chunk_of(length)?;
        let call = self.moving(Collective::AllGather, 0, dtype, chunk)?;
        self.perform_in_pool(&call, at, bytes, (chunk as u64, 0))
    }

    /// Copies the root's `bytes` bytes in the pool to everybody's.
    ///
    /// # Errors
    /// The group's error, or an argument that does not fit.
    pub fn broadcast_in_pool(
        &mut self,
        root: usize,
        dtype: Dtype,
        at: Offset,
        bytes: u64,
    ) -> Result<(), PoolError> {
        let length = self.extent_length(at, bytes)?;
        let call = self.moving(Collective::Broadcast, root, dtype, length)?;
        self.perform_in_pool(&call, at, bytes, (0, 0))
    }

    fn moving(
        &self,
        collective: Collective,
        root: usize,
        dtype: Dtype,
        bytes: usize,
    ) -> Result<Call, PoolError> {
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
        Ok(Call { collective, root, dtype, reduction: None, bytes })
    }

    fn reducing(
        &self,
        collective: Collective,
        root: usize,
        op: Op,
        dtype: Dtype,
        bytes: usize,
    ) -> Result<Call, PoolError> {
        if op.check(dtype).is_err() {
            let value = format!("{op} of {dtype}");
            let expected = "floats have sum, product, min, max and average";
            return Err(PoolError::Argument { what: "reduction", value, expected });
        }
        let ranks = u32::try_from(self.size()).ok().and_then(NonZeroU32::new).expect("a group has ranks");
        let call = self.moving(collective, root, dtype, bytes)?;
        Ok(Call { reduction: Some(Reduction { op, dtype, ranks }), ..call })
    }

    fn chunk_of(&self, length: usize) -> Result<usize, PoolError> {
        let chunk = length / self.size();
        same_length("data", length, chunk * self.size())?;
        Ok(chunk)
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
        let mut scratch = self.workshop.scratch.take().unwrap_or_default();
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
        self.record_time(timed);
        self.workshop.scratch = Some(scratch);
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
        let cut = bounded(&plan, Some(Cut::new(&plan, call.bytes, segment)), "segment", segment)?;
        let mut scratch = self.workshop.scratch.take().unwrap_or_default();
        let timed = self.timed(call, true);
        let stores = timed.stores;
        let outcome = self.operation(self.signature(call).in_pool(), |group| {
            let at = group.exchange_extents(at, bytes)?;
            let data = Data::Pool { at: &at, input_stride, output_stride };
            Run { group, plan: &plan, cut, reduction: call.reduction, data, half: 0, stores }
                .run(&mut scratch)
        });
        self.record_time(timed);
        self.workshop.scratch = Some(scratch);
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
        let all_far = self.memory().coherence() == Coherence::Software && !self.has_neighbours();
        if call.bytes < self.options().stream_bytes || all_far || self.size() == 1 {
            return Timed { stores: Stores::Ordinary, begun: None };
        }
        let size = Size { in_pool, bytes_log2: call.bytes.ilog2() };
        let stores = self.workshop.paces.next(size);
        Timed { stores, begun: Some((size, self.memory().now())) }
    }

    fn record_time(&mut self, timed: Timed) {
        if let Some((size, begun)) = timed.begun {
            let time = Duration::from_nanos(self.memory().now().0.saturating_sub(begun.0));
            self.workshop.paces.record_time(size, timed.stores, time);
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
        Variant::staged(call.collective, call.bytes, self.options().direct_bytes, || self.hosts().collect())
    }

    fn plan(&mut self, call: &Call, variant: Variant) -> Arc<Plan> {
        let key = (call.collective, call.root, variant);
        if let Some((_, plan)) = self.workshop.plans.iter().find(|(other, _)| *other == key) {
            return Arc::clone(plan);
        }
        let hosts: Vec<u16> = self.hosts().collect();
        let schedule = variant.schedule(call.collective, &hosts, call.root);
        let plan = Arc::new(Plan::new(&schedule, &hosts, self.rank()));
        self.workshop.plans.push((key, Arc::clone(&plan)));
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
        bounded(plan, staged(bytes), "staging", bytes).map_err(|error| self.refusal().unwrap_or(error))
    }
}

/// The cut, when there is one whose rounds can be counted; else it is `what`, of so many bytes, that is too small.
fn bounded(plan: &Plan, cut: Option<Cut>, what: &'static str, bytes: u64) -> Result<Cut, PoolError> {
    let steps = |cut: &Cut| plan.number(cut.rounds, plan.steps.len());
    cut.filter(|cut| steps(cut) <= u64::from(MAX_STEP)).ok_or_else(|| {
        let expected = "more, for so many ranks and such a message";
        PoolError::Argument { what, value: format!("{} a rank", sized(bytes)), expected }
    })
}

impl Call {
    fn signature(&self) -> Signature {
        let signature = Signature::new(self.collective, self.root, self.bytes).of(self.dtype);
        self.reduction.map_or(signature, |reduction| signature.reducing(reduction.op))
    }
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
