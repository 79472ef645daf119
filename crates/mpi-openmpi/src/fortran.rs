//! The entry points of Fortran (`mpif.h` and `use mpi`), which Open MPI does not bring to those of C: they take everything by
//! address, handles as numbers, and answer in one more argument.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use polder_mpi::abi::{Aint, Fint};
use polder_mpi::library::{real, symbol_at};

use super::*;

type Number = *const Fint;
type Bytes = *const Aint;
type Buffer = *mut c_void;
type Answer = *mut Fint;

/// A handle of C's that Fortran knows by its number.
macro_rules! handle {
    ($name:ident, $symbol:literal) => {
        /// The handle with this number.
        ///
        /// # Safety
        /// The number is one that Fortran has from the library.
        unsafe fn $name(number: Number) -> Handle {
            static CONVERT: OnceLock<unsafe extern "C" fn(Fint) -> Handle> = OnceLock::new();
            // SAFETY: the library's own conversion, and a place that the program passes.
            unsafe { CONVERT.get_or_init(|| real($symbol))(number.read()) }
        }
    };
}

handle!(comm, "PMPI_Comm_f2c");
handle!(info, "PMPI_Info_f2c");
handle!(kind, "PMPI_Type_f2c");
handle!(operation, "PMPI_Op_f2c");
handle!(group, "PMPI_Group_f2c");
handle!(window, "PMPI_Win_f2c");

/// The number by which Fortran knows a window.
fn window_number(handle: Handle) -> Fint {
    static CONVERT: OnceLock<unsafe extern "C" fn(Handle) -> Fint> = OnceLock::new();
    // SAFETY: the library's own conversion.
    unsafe { CONVERT.get_or_init(|| real("PMPI_Win_c2f"))(handle) }
}

/// The number by which Fortran knows a request.
fn request_number(handle: Handle) -> Fint {
    static CONVERT: OnceLock<unsafe extern "C" fn(Handle) -> Fint> = OnceLock::new();
    // SAFETY: the library's own conversion.
    unsafe { CONVERT.get_or_init(|| real("PMPI_Request_c2f"))(handle) }
}

/// A buffer, which is MPI_BOTTOM where it is Fortran's variable of that name.
fn buffer(at: Buffer) -> Buffer {
    let bottoms =
        [c"mpi_fortran_bottom_", c"mpi_fortran_bottom", c"mpi_fortran_bottom__", c"MPI_FORTRAN_BOTTOM"];
    match bottoms.into_iter().any(|name| symbol_at(name) == Some(at)) {
        true => ptr::null_mut(),
        false => at,
    }
}

/// Gives Fortran the window that a call of C's makes.
///
/// # Safety
/// `win` may be written.
unsafe fn made(win: Answer, call: impl FnOnce(*mut Handle) -> c_int) -> c_int {
    let mut handle = Handle::default();
    let code = call(&raw mut handle);
    if code == 0 {
        // SAFETY: by this function's contract.
        unsafe { win.write(window_number(handle)) };
    }
    code
}

/// Gives Fortran the request that a call of C's makes.
///
/// # Safety
/// `request` may be written.
unsafe fn requested(request: Answer, call: impl FnOnce(*mut Handle) -> c_int) -> c_int {
    let mut handle = Handle::default();
    let code = call(&raw mut handle);
    if code == 0 {
        // SAFETY: by this function's contract.
        unsafe { request.write(request_number(handle)) };
    }
    code
}

macro_rules! fortran {
    ($($call:ident($($argument:ident: $kind:ty),*) = $body:expr;)*) => {$(
        /// The call of C's, with everything by address.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $call($($argument: $kind,)* error: Answer) {
            // SAFETY: by the binding of Fortran every address holds what MPI says of it.
            unsafe {
                let code = $body;
                error.write(code);
            }
        }
    )*};
}

fortran! {
    mpi_put_(from: Buffer, count: Number, of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, win: Number) = MPI_Put(buffer(from), *count, kind(of), *target, *disp, *target_count, kind(target_of), window(win));
    mpi_get_(into: Buffer, count: Number, of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, win: Number) = MPI_Get(buffer(into), *count, kind(of), *target, *disp, *target_count, kind(target_of), window(win));
    mpi_accumulate_(from: Buffer, count: Number, of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, op: Number, win: Number) = MPI_Accumulate(buffer(from), *count, kind(of), *target, *disp, *target_count, kind(target_of), operation(op), window(win));
    mpi_get_accumulate_(from: Buffer, count: Number, of: Number, into: Buffer, into_count: Number, into_of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, op: Number, win: Number) = MPI_Get_accumulate(buffer(from), *count, kind(of), buffer(into), *into_count, kind(into_of), *target, *disp, *target_count, kind(target_of), operation(op), window(win));
    mpi_rput_(from: Buffer, count: Number, of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, win: Number, request: Answer) = requested(request, |request| MPI_Rput(buffer(from), *count, kind(of), *target, *disp, *target_count, kind(target_of), window(win), request));
    mpi_rget_(into: Buffer, count: Number, of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, win: Number, request: Answer) = requested(request, |request| MPI_Rget(buffer(into), *count, kind(of), *target, *disp, *target_count, kind(target_of), window(win), request));
    mpi_raccumulate_(from: Buffer, count: Number, of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, op: Number, win: Number, request: Answer) = requested(request, |request| MPI_Raccumulate(buffer(from), *count, kind(of), *target, *disp, *target_count, kind(target_of), operation(op), window(win), request));
    mpi_rget_accumulate_(from: Buffer, count: Number, of: Number, into: Buffer, into_count: Number, into_of: Number, target: Number, disp: Bytes, target_count: Number, target_of: Number, op: Number, win: Number, request: Answer) = requested(request, |request| MPI_Rget_accumulate(buffer(from), *count, kind(of), buffer(into), *into_count, kind(into_of), *target, *disp, *target_count, kind(target_of), operation(op), window(win), request));
    mpi_fetch_and_op_(from: Buffer, into: Buffer, of: Number, target: Number, disp: Bytes, op: Number, win: Number) = MPI_Fetch_and_op(buffer(from), buffer(into), kind(of), *target, *disp, operation(op), window(win));
    mpi_compare_and_swap_(from: Buffer, compare: Buffer, into: Buffer, of: Number, target: Number, disp: Bytes, win: Number) = MPI_Compare_and_swap(buffer(from), buffer(compare), buffer(into), kind(of), *target, *disp, window(win));
    mpi_win_allocate_(bytes: Bytes, unit: Number, hints: Number, ranks: Number, base: Buffer, win: Answer) = made(win, |win| MPI_Win_allocate(*bytes, *unit, info(hints), comm(ranks), base, win));
    mpi_win_allocate_cptr_(bytes: Bytes, unit: Number, hints: Number, ranks: Number, base: Buffer, win: Answer) = made(win, |win| MPI_Win_allocate(*bytes, *unit, info(hints), comm(ranks), base, win));
    mpi_win_allocate_shared_(bytes: Bytes, unit: Number, hints: Number, ranks: Number, base: Buffer, win: Answer) = made(win, |win| MPI_Win_allocate_shared(*bytes, *unit, info(hints), comm(ranks), base, win));
    mpi_win_allocate_shared_cptr_(bytes: Bytes, unit: Number, hints: Number, ranks: Number, base: Buffer, win: Answer) = made(win, |win| MPI_Win_allocate_shared(*bytes, *unit, info(hints), comm(ranks), base, win));
    mpi_win_shared_query_(win: Number, rank: Number, bytes: *mut Aint, unit: Answer, base: Buffer) = MPI_Win_shared_query(window(win), *rank, bytes, unit, base);
    mpi_win_shared_query_cptr_(win: Number, rank: Number, bytes: *mut Aint, unit: Answer, base: Buffer) = MPI_Win_shared_query(window(win), *rank, bytes, unit, base);
    mpi_win_fence_(assert: Number, win: Number) = MPI_Win_fence(*assert, window(win));
    mpi_win_post_(ranks: Number, assert: Number, win: Number) = MPI_Win_post(group(ranks), *assert, window(win));
    mpi_win_start_(ranks: Number, assert: Number, win: Number) = MPI_Win_start(group(ranks), *assert, window(win));
    mpi_win_complete_(win: Number) = MPI_Win_complete(window(win));
    mpi_win_wait_(win: Number) = MPI_Win_wait(window(win));
    mpi_win_unlock_all_(win: Number) = MPI_Win_unlock_all(window(win));
    mpi_win_flush_all_(win: Number) = MPI_Win_flush_all(window(win));
    mpi_win_flush_local_all_(win: Number) = MPI_Win_flush_local_all(window(win));
    mpi_win_sync_(win: Number) = MPI_Win_sync(window(win));
    mpi_win_test_(win: Number, flag: Answer) = MPI_Win_test(window(win), flag);
    mpi_win_lock_(of: Number, rank: Number, assert: Number, win: Number) = MPI_Win_lock(*of, *rank, *assert, window(win));
    mpi_win_unlock_(rank: Number, win: Number) = MPI_Win_unlock(*rank, window(win));
    mpi_win_flush_(rank: Number, win: Number) = MPI_Win_flush(*rank, window(win));
    mpi_win_flush_local_(rank: Number, win: Number) = MPI_Win_flush_local(*rank, window(win));
    mpi_win_lock_all_(assert: Number, win: Number) = MPI_Win_lock_all(*assert, window(win));
    mpi_win_free_(win: Answer) = { let mut handle = window(win); let code = MPI_Win_free(&raw mut handle); win.write(window_number(handle)); code };
    mpi_alloc_mem_(bytes: Bytes, hints: Number, base: Buffer) = MPI_Alloc_mem(*bytes, info(hints), base);
    mpi_alloc_mem_cptr_(bytes: Bytes, hints: Number, base: Buffer) = MPI_Alloc_mem(*bytes, info(hints), base);
    mpi_free_mem_(base: Buffer) = MPI_Free_mem(base);
    mpi_finalize_() = MPI_Finalize();
}

/// An attribute of a window. The shim says two of them as numbers, as Fortran has them; the library says the others.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mpi_win_get_attr_(
    win: Number,
    key: Number,
    value: *mut Aint,
    flag: Answer,
    error: Answer,
) {
    // SAFETY: by the binding of Fortran every address holds what MPI says of it; the library's own has this type.
    unsafe {
        if [OpenMpi::NUMBERS.win_create_flavor, OpenMpi::NUMBERS.win_model].contains(&*key) {
            let mut number: *const c_int = ptr::null();
            error.write(MPI_Win_get_attr(window(win), *key, (&raw mut number).cast(), flag));
            value.write(*number as Aint);
        } else {
            let library: unsafe extern "C" fn(Number, Number, *mut Aint, Answer, Answer) =
                real("pmpi_win_get_attr_");
            library(win, key, value, flag, error);
        }
    }
}
