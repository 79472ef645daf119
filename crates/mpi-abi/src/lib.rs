//! `libpolder-mpi-abi.so`: windows in the pool for programs of the standard ABI of MPI 5, whichever library implements it. It is loaded
//! before a program by LD_PRELOAD.

use std::ffi::{CStr, c_int, c_void};

use polder_mpi::abi::{Abi, Combiners, Distribution, Errors, Handles, Numbers, Status};
use polder_mpi::shim::{Preload, Shim};

struct Standard;

impl Abi for Standard {
    /// A pointer to what no program looks into.
    type Handle = usize;

    const NAME: &'static str = "the standard ABI of MPI";
    const IS_STANDARD: bool = true;

    const NUMBERS: Numbers = Numbers {
        proc_null: -3,
        any_source: -1,
        any_tag: -2,
        status_ignore: 0,
        thread_serialized: 2048,
        undefined: -32766,
        comm_type_shared: 221,
        win_create_flavor: 604,
        win_model: 605,
        win_flavor_allocate: 312,
        win_flavor_shared: 314,
        win_separate: 322,
        win_unified: 321,
        lock_exclusive: 301,
        lock_shared: 302,
        mode_nocheck: 1024,
        mode_nostore: 8192,
        mode_nosucceed: 16384,
        order_c: 12,
        distribute: Distribution { cyclic: 18, default: 19 },
        combiner: Combiners {
            named: 101,
            dup: 102,
            contiguous: 103,
            vector: 104,
            hvector: 105,
            indexed: 106,
            hindexed: 107,
            indexed_block: 108,
            hindexed_block: 109,
            structure: 110,
            subarray: 111,
            darray: 112,
            resized: 116,
            f90_real: 113,
            f90_complex: 114,
            f90_integer: 115,
        },
        error: Errors {
            count: 2,
            kind: 3,
            rank: 6,
            op: 10,
            arg: 13,
            other: 16,
            locktype: 37,
            rma_range: 48,
            rma_sync: 50,
        },
    };

    const STATUS: Status = Status { integers: 8, source: 0 };

    fn handles(_find: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Handles<usize>> {
        Some(Handles {
            comm_world: 0x101,
            comm_self: 0x102,
            win_null: 0x110,
            info_null: 0x130,
            errors_return: 0x143,
            byte: 0x247,
            int: 0x209,
            min: 0x22,
            replace: 0x3c,
            no_op: 0x3d,
        })
    }
}

impl Preload for Standard {
    fn shim() -> &'static Shim<Self> {
        static SHIM: Shim<Standard> = Shim::new();
        &SHIM
    }
}

polder_mpi::shim!(Standard);
polder_mpi::large_counts!(Standard);
polder_mpi::windows_of_own_memory!(Standard);
