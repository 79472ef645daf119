//! `libpolder-openmpi.so`: windows in the pool for Open MPI. It is loaded before a program by LD_PRELOAD.

mod fortran;

use std::ffi::{CStr, c_int, c_void};

use polder_mpi::abi::{Abi, Combiners, Distribution, Errors, Handles, Numbers, Status};
use polder_mpi::shim::{Preload, Shim};

struct OpenMpi;

impl Abi for OpenMpi {
    /// The address of a structure of the library's.
    type Handle = usize;

    const NAME: &'static str = "Open MPI";

    const NUMBERS: Numbers = Numbers {
        proc_null: -2,
        any_source: -1,
        any_tag: -1,
        status_ignore: 0,
        thread_serialized: 2,
        undefined: -32766,
        comm_type_shared: 0,
        win_create_flavor: 10,
        win_model: 11,
        win_flavor_allocate: 2,
        win_flavor_shared: 4,
        win_separate: 1,
        win_unified: 0,
        lock_exclusive: 1,
        lock_shared: 2,
        mode_nocheck: 1,
        mode_nostore: 8,
        mode_nosucceed: 16,
        order_c: 0,
        distribute: Distribution { cyclic: 1, default: -1 },
        combiner: Combiners {
            named: 0,
            dup: 1,
            contiguous: 2,
            vector: 3,
            hvector: 5,
            indexed: 6,
            hindexed: 8,
            indexed_block: 9,
            hindexed_block: 18,
            structure: 11,
            subarray: 12,
            darray: 13,
            resized: 17,
            f90_real: 14,
            f90_complex: 15,
            f90_integer: 16,
        },
        error: Errors {
            count: 2,
            kind: 3,
            rank: 6,
            op: 10,
            arg: 13,
            other: 16,
            locktype: 37,
            rma_range: 68,
            rma_sync: 47,
        },
    };

    const STATUS: Status = Status { integers: 6, source: 0 };

    fn handles(find: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Handles<usize>> {
        let handle = |name| Some(find(name)? as usize);
        Some(Handles {
            comm_world: handle(c"ompi_mpi_comm_world")?,
            comm_self: handle(c"ompi_mpi_comm_self")?,
            win_null: handle(c"ompi_mpi_win_null")?,
            info_null: handle(c"ompi_mpi_info_null")?,
            errors_return: handle(c"ompi_mpi_errors_return")?,
            byte: handle(c"ompi_mpi_byte")?,
            int: handle(c"ompi_mpi_int")?,
            min: handle(c"ompi_mpi_op_min")?,
            replace: handle(c"ompi_mpi_op_replace")?,
            no_op: handle(c"ompi_mpi_op_no_op")?,
        })
    }
}

impl Preload for OpenMpi {
    fn shim() -> &'static Shim<Self> {
        static SHIM: Shim<OpenMpi> = Shim::new();
        &SHIM
    }
}

polder_mpi::shim!(OpenMpi);
