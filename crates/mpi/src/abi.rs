//! What differs between MPI libraries: how handles look, and which number means what.
//!
//! Nothing of theirs is needed to build: the numbers stand here, and a test compiles a C program that holds them against each
//! library's own header.

use std::ffi::{CStr, c_int, c_void};
use std::fmt::Debug;

/// An address, or a number of bytes between two.
pub type Aint = isize;
/// A large number of elements.
pub type Count = i64;
/// An INTEGER of Fortran, which is also how it has handles.
pub type Fint = c_int;

/// One MPI library's ABI.
pub trait Abi: Sized + 'static {
    /// Communicators, windows, datatypes and all the rest look alike.
    type Handle: Copy + Ord + Debug + Send + Sync + 'static;
    /// What the library is called.
    const NAME: &'static str;
    /// Whether it is the standard one, whose library has a name of its own.
    const IS_STANDARD: bool = false;
    /// Its numbers.
    const NUMBERS: Numbers;
    /// How its statuses look.
    const STATUS: Status;
    /// Handles that every program knows; `find` gives the address of one of the library's symbols.
    fn handles(find: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Handles<Self::Handle>>;
}

/// Handles that every program knows.
#[expect(missing_docs, reason = "they are MPI's own names")]
#[derive(Clone, Copy, Debug)]
pub struct Handles<H> {
    pub comm_world: H,
    pub comm_self: H,
    pub win_null: H,
    pub info_null: H,
    pub errors_return: H,
    pub byte: H,
    pub int: H,
    pub min: H,
    pub replace: H,
    pub no_op: H,
}

/// How an `MPI_Status` looks.
#[derive(Clone, Copy, Debug)]
pub struct Status {
    /// Its size, in numbers of the type `int`.
    pub integers: usize,
    /// Which of them is `MPI_SOURCE`; `MPI_TAG` is the next.
    pub source: usize,
}

/// Numbers of MPI's standard that every library chooses for itself.
#[expect(missing_docs, reason = "they are MPI's own names")]
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    pub proc_null: c_int,
    pub any_source: c_int,
    pub any_tag: c_int,
    pub status_ignore: usize,
    /// The level from which on several threads may call.
    pub thread_serialized: c_int,
    pub undefined: c_int,
    pub comm_type_shared: c_int,
    pub win_create_flavor: c_int,
    pub win_model: c_int,
    pub win_flavor_allocate: c_int,
    pub win_flavor_shared: c_int,
    pub win_separate: c_int,
    pub win_unified: c_int,
    pub lock_exclusive: c_int,
    pub lock_shared: c_int,
    pub mode_nocheck: c_int,
    pub mode_nostore: c_int,
    pub mode_nosucceed: c_int,
    pub order_c: c_int,
    pub distribute: Distribution,
    pub combiner: Combiners,
    pub error: Errors,
}

/// How a dimension of an array is dealt out.
#[expect(missing_docs, reason = "they are MPI's own names")]
#[derive(Clone, Copy, Debug)]
pub struct Distribution {
    pub cyclic: c_int,
    pub default: c_int,
}

/// How a datatype was made.
#[expect(missing_docs, reason = "they are MPI's own names")]
#[derive(Clone, Copy, Debug)]
pub struct Combiners {
    pub named: c_int,
    pub dup: c_int,
    pub contiguous: c_int,
    pub vector: c_int,
    pub hvector: c_int,
    pub indexed: c_int,
    pub hindexed: c_int,
    pub indexed_block: c_int,
    pub hindexed_block: c_int,
    pub structure: c_int,
    pub subarray: c_int,
    pub darray: c_int,
    pub resized: c_int,
    pub f90_real: c_int,
    pub f90_complex: c_int,
    pub f90_integer: c_int,
}

/// Classes of errors.
#[expect(missing_docs, reason = "they are MPI's own names")]
#[derive(Clone, Copy, Debug)]
pub struct Errors {
    pub count: c_int,
    pub kind: c_int,
    pub rank: c_int,
    pub op: c_int,
    pub arg: c_int,
    pub other: c_int,
    pub locktype: c_int,
    pub rma_range: c_int,
    pub rma_sync: c_int,
}
