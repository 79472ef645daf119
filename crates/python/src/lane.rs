//! What a group runs: a call, and what keeps its arrays alive.

use std::slice;
use std::sync::{Arc, OnceLock};

use polder_attach::lane::LaneCall;
use polder_kernels::{Dtype, Op};
use polder_mem::AnyMemory;
use polder_pool::group::Group;
use polder_pool::{Operation, PoolError};
use polder_schedule::Collective;
use pyo3::prelude::*;

use crate::buffer::Span;
use crate::object::Extent;

/// Where the arrays of a collective are.
pub(crate) enum Buffers {
    /// In one span, as input and output.
    InPlace(Span),
    /// In two, of which one is empty where this rank has no use for it.
    Apart {
        from: Span,
        into: Span,
    },
    /// In a span for each chunk.
    Lists {
        from: Vec<Span>,
        into: Vec<Span>,
    },
    Pool(Extent),
}

/// What a group runs.
pub(crate) enum Call {
    /// A collective, so many times in a row.
    Collective { operation: Operation, buffers: Buffers, times: u32 },
    /// Finds out whether all ranks say yes; the call is the first of a message of so many bytes.
    Agree { yes: bool, message: u64, verdict: Verdict },
    /// One piece of a message of so many bytes: where all ranks have said yes in the pool, otherwise private from it.
    Piece { message: u64, verdict: Verdict, operation: Operation, in_pool: Option<Extent>, private: Span },
}

/// What ranks have agreed on, once they have.
pub(crate) type Verdict = Arc<OnceLock<bool>>;

/// A call with what keeps its arrays alive, and what returns once they hold what is sent: a GPU may still copy it there.
pub(crate) struct Job {
    call: Call,
    ready: Option<Py<PyAny>>,
    _kept: Vec<Py<PyAny>>,
}

impl Job {
    /// # Safety
    /// `kept`, or who calls this, keeps the memory of the call's spans alive. From when `ready` has returned until the call is over,
    /// those that it reads stay unwritten, and those that it writes untouched by others.
    pub(crate) const unsafe fn new(call: Call, ready: Option<Py<PyAny>>, kept: Vec<Py<PyAny>>) -> Self {
        Self { call, ready, _kept: kept }
    }

    /// What returns once the arrays hold what is sent.
    pub(crate) const fn ready(&self) -> Option<&Py<PyAny>> {
        self.ready.as_ref()
    }
}

impl LaneCall for Job {
    fn ready(&self) -> Result<(), PoolError> {
        let Some(ready) = &self.ready else { return Ok(()) };
        let value = Python::attach(|py| ready.call0(py).map_err(|error| error.to_string()));
        let of = |value| PoolError::Argument {
            what: "the copy of a tensor",
            value,
            expected: "one that succeeds before the call",
        };
        value.map(drop).map_err(of)
    }

    fn run(&self, group: &mut Group<AnyMemory>) -> Result<(), PoolError> {
        // SAFETY: what was promised when the job was made.
        unsafe { perform(group, &self.call) }
    }
}

/// # Safety
/// As [`Job::new`].
unsafe fn perform(group: &mut Group<AnyMemory>, call: &Call) -> Result<(), PoolError> {
    match call {
        Call::Collective { operation, buffers, times } => {
            // SAFETY: the same contract.
            let all = (0..*times).try_for_each(|_| unsafe { collective(group, operation, buffers) });
            all.map_err(|error| in_words_of(operation.collective, error))
        }
        Call::Agree { yes, message, verdict } => {
            let mut all = [u8::from(*yes)];
            of_message(group, *message, |group| group.all_reduce(Op::Min, Dtype::U8, &mut all))?;
            verdict.get_or_init(|| all[0] == 1);
            Ok(())
        }
        Call::Piece { message, verdict, operation, in_pool, private } => {
            let agreed = in_pool.as_ref().filter(|_| verdict.get() == Some(&true));
            let buffers = match agreed {
                Some(extent) => polder_pool::Buffers::Pool { at: extent.at, bytes: extent.bytes },
                // SAFETY: the same contract.
                None => polder_pool::Buffers::InPlace(unsafe { private.bytes_mut() }),
            };
            of_message(group, *message, |group| group.run(operation, buffers))
        }
    }
}

/// An error of a collective with the name that its caller knows: where chunks have several lengths, each goes by itself, as an operation
/// of another name.
fn in_words_of(collective: Collective, error: PoolError) -> PoolError {
    let (part, whole) = match collective {
        Collective::AllGather => (Collective::Broadcast, "an all-gather of several lengths"),
        Collective::ReduceScatter => (Collective::Reduce, "a reduce-scatter of several lengths"),
        _ => return error,
    };
    let PoolError::Mismatch { peer, mut theirs, mut ours, sequence } = error else { return error };
    let is_part = |said: &str| said.starts_with(&format!("{} of ", part.name()));
    if is_part(&ours) {
        ours = format!("{whole}, by {ours}");
    }
    if is_part(&theirs) {
        theirs = format!("{theirs}, which may be a part of {whole}");
    }
    PoolError::Mismatch { peer, theirs, ours, sequence }
}

/// # Safety
/// As [`Job::new`].
unsafe fn collective(
    group: &mut Group<AnyMemory>,
    operation: &Operation,
    buffers: &Buffers,
) -> Result<(), PoolError> {
    let is_own_chunk = |from: &Span, into: &Span| {
        operation.collective == Collective::AllGather && from.is_chunk(into, group.rank())
    };
    // SAFETY: the contract of this function is that of the slices; spans of one call that overlap become one slice, or
    // the source is copied first. No two of those that are written overlap.
    unsafe {
        match buffers {
            Buffers::InPlace(data) => group.run(operation, polder_pool::Buffers::InPlace(data.bytes_mut())),
            Buffers::Apart { from, into } if is_own_chunk(from, into) => {
                group.run(operation, polder_pool::Buffers::InPlace(into.bytes_mut()))
            }
            Buffers::Apart { from, into } => {
                let input = from.bytes_beside(slice::from_ref(into));
                let output = into.bytes_mut();
                group.run(operation, polder_pool::Buffers::Apart { input: &input, output })
            }
            Buffers::Lists { from, into } => {
                let input: Vec<_> = from.iter().map(|from| from.bytes_beside(into)).collect();
                let input: Vec<&[u8]> = input.iter().map(|input| &**input).collect();
                let mut output: Vec<&mut [u8]> = into.iter().map(|into| into.bytes_mut()).collect();
                group.run(operation, polder_pool::Buffers::Lists { input: &input, output: &mut output })
            }
            Buffers::Pool(extent) => {
                group.run(operation, polder_pool::Buffers::Pool { at: extent.at, bytes: extent.bytes })
            }
        }
    }
}

/// Runs an operation that is a piece of a message of so many bytes.
fn of_message(
    group: &mut Group<AnyMemory>,
    message: u64,
    run: impl FnOnce(&mut Group<AnyMemory>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    group.set_message(Some(message))?;
    let outcome = run(group);
    group.set_message(None)?;
    outcome
}
