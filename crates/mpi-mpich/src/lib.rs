//! `libpolder-mpich.so`: windows in the pool for MPICH, Intel MPI and whatever else shares their ABI. It is loaded before a program
//! by LD_PRELOAD. Their Fortran bindings call those of C, and so come here too.

use std::ffi::{CStr, c_int, c_void};

use polder_mpi::abi::{Abi, Combiners, Distribution, Errors, Handles, Numbers, Status};
use polder_mpi::shim::{Preload, Shim};

struct Mpich;

impl Abi for Mpich {
    type Handle = c_int;

    const NAME: &'static str = "MPICH or Intel MPI";

    const NUMBERS: Numbers = Numbers {
        proc_null: -1,
        any_source: -2,
        any_tag: -1,
        status_ignore: 1,
        thread_serialized: 2,
        undefined: -32766,
        comm_type_shared: 1,
        win_create_flavor: 0x6600_0007,
        win_model: 0x6600_0009,
        win_flavor_allocate: 2,
        win_flavor_shared: 4,
        win_separate: 1,
        win_unified: 2,
        lock_exclusive: 234,
        lock_shared: 235,
        mode_nocheck: 1024,
        mode_nostore: 2048,
        mode_nosucceed: 16384,
        order_c: 56,
        distribute: Distribution { cyclic: 122, default: -49767 },
        combiner: Combiners {
            named: 1,
            dup: 2,
            contiguous: 3,
            vector: 4,
            hvector: 6,
            indexed: 7,
            hindexed: 9,
            indexed_block: 10,
            hindexed_block: 19,
            structure: 12,
            subarray: 13,
            darray: 14,
            resized: 18,
            f90_real: 15,
            f90_complex: 16,
            f90_integer: 17,
        },
        error: Errors {
            count: 2,
            kind: 3,
            rank: 6,
            op: 9,
            arg: 12,
            other: 15,
            locktype: 47,
            rma_range: 55,
            rma_sync: 50,
        },
    };

    const STATUS: Status = Status { integers: 5, source: 2 };

    fn handles(find: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Handles<c_int>> {
        // Open MPI's handles are the addresses of such symbols.
        match find(c"ompi_mpi_comm_world") {
            Some(_) => None,
            None => Some(Handles {
                comm_world: 0x4400_0000,
                comm_self: 0x4400_0001,
                win_null: 0x2000_0000,
                info_null: 0x1c00_0000,
                errors_return: 0x5400_0001,
                byte: 0x4c00_010d,
                int: 0x4c00_0405,
                min: 0x5800_0002,
                replace: 0x5800_000d,
                no_op: 0x5800_000e,
            }),
        }
    }
}

impl Preload for Mpich {
    fn shim() -> &'static Shim<Self> {
        static SHIM: Shim<Mpich> = Shim::new();
        &SHIM
    }
}

polder_mpi::shim!(Mpich);
polder_mpi::large_counts!(Mpich);
polder_mpi::windows_of_own_memory!(Mpich);
