//! The calls of MPI that the shim takes, as functions that C calls. They are made in the library of each ABI.

/// Makes them all for an ABI.
#[macro_export]
macro_rules! shim {
    ($abi:ty) => {
        use std::sync::OnceLock;

        use $crate::abi::Aint;

        type Handle = <$abi as $crate::abi::Abi>::Handle;
        type Source = *const std::ffi::c_void;
        type Sink = *mut std::ffi::c_void;

        $crate::data!($abi; c_int;
            MPI_Put MPI_Get MPI_Accumulate MPI_Get_accumulate
            MPI_Rput MPI_Rget MPI_Raccumulate MPI_Rget_accumulate);
        $crate::making!($abi; c_int; MPI_Win_allocate MPI_Win_allocate_shared MPI_Win_shared_query);
        $crate::traced_calls!($abi);

        $crate::calls! { $abi; Some(target); window, win;
            MPI_Fetch_and_op(from: Source, into: Sink, kind: Handle, target: c_int, disp: Aint, op: Handle, win: Handle)
                // SAFETY: by MPI's contract the program's buffers hold what it says.
                = unsafe { window.get_accumulate((from, 1, kind), (into, 1, kind), (target, disp, 1, kind), op) };
            MPI_Compare_and_swap(
                from: Source, compare: Source, into: Sink, kind: Handle, target: c_int, disp: Aint, win: Handle
            )
                // SAFETY: as above.
                = unsafe { window.compare_and_swap([from, compare], into, kind, target, disp) };
        }

        $crate::calls! { $abi; None; window, win;
            MPI_Win_fence(assert: c_int, win: Handle) = window.fence(assert);
            MPI_Win_post(group: Handle, assert: c_int, win: Handle) = window.post(group, assert);
            MPI_Win_start(group: Handle, assert: c_int, win: Handle) = { let _ = assert; window.start(group) };
            MPI_Win_complete(win: Handle) = window.complete();
            MPI_Win_wait(win: Handle) = window.wait();
            // SAFETY: as above.
            MPI_Win_test(win: Handle, flag: *mut c_int) = unsafe { window.test(flag) };
            MPI_Win_lock(kind: c_int, rank: c_int, assert: c_int, win: Handle) = window.lock(kind, rank, assert);
            MPI_Win_unlock(rank: c_int, win: Handle) = window.unlock(rank);
            MPI_Win_lock_all(assert: c_int, win: Handle) = window.lock_all(assert);
            MPI_Win_unlock_all(win: Handle) = window.unlock_all();
            MPI_Win_flush(rank: c_int, win: Handle) = window.flush(Some(rank));
            MPI_Win_flush_all(win: Handle) = window.flush(None);
            MPI_Win_flush_local(rank: c_int, win: Handle) = window.flush(Some(rank));
            MPI_Win_flush_local_all(win: Handle) = window.flush(None);
            MPI_Win_sync(win: Handle) = window.sync();
        }

        /// Said by the shim where the library would say something else.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn MPI_Win_get_attr(win: Handle, key: c_int, value: Sink, flag: *mut c_int) -> c_int {
            let mut answered = false;
            let real = $crate::real!(MPI_Win_get_attr(win: Handle, key: c_int, value: Sink, flag: *mut c_int));
            let look = |window: &$crate::window::Window<$abi>| {
                // SAFETY: by MPI's contract there is room for the answers.
                answered = unsafe { window.attribute(key, value, flag) };
                Ok(())
            };
            let code = $crate::shim::on::<$abi>("MPI_Win_get_attr", win, None, look, || 0);
            if answered { code } else { real() }
        }

        /// Frees the library's window, and then what lies in the pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn MPI_Win_free(win: *mut Handle) -> c_int {
            // SAFETY: by MPI's contract.
            unsafe { $crate::shim::free::<$abi>(win, $crate::real!(MPI_Win_free(win: *mut Handle))) }
        }

        /// Splits by the hosts of the pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn MPI_Comm_split_type(
            comm: Handle, split_type: c_int, key: c_int, info: Handle, new: *mut Handle
        ) -> c_int {
            let real = $crate::real!(MPI_Comm_split_type(
                comm: Handle, split_type: c_int, key: c_int, info: Handle, new: *mut Handle));
            // SAFETY: by MPI's contract there is room for the answer, and all ranks call this.
            unsafe { $crate::shim::split_type::<$abi>(comm, split_type, key, new, real) }
        }

        /// Takes from the pool what is not short.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn MPI_Alloc_mem(bytes: Aint, info: Handle, base: Sink) -> c_int {
            let real = $crate::real!(MPI_Alloc_mem(bytes: Aint, info: Handle, base: Sink));
            // SAFETY: by MPI's contract there is room for the answer.
            unsafe { $crate::shim::take::<$abi>(bytes, info, base, real) }
        }

        /// Gives back what was taken from the pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn MPI_Free_mem(base: Sink) -> c_int {
            $crate::shim::give_back::<$abi>(base, $crate::real!(MPI_Free_mem(base: Sink)))
        }

        /// Tells the libfabric provider of this process where in the pool with this uuid the bytes of a send lie: all ones
        /// when they do not.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn polder_place(at: Source, bytes: usize, uuid: *const u128) -> u64 {
            // SAFETY: the provider passes a uuid, and bytes that it has been lent.
            let place = unsafe { <$abi as $crate::shim::Preload>::shim().place(at.cast(), bytes, uuid.read_unaligned()) };
            place.unwrap_or(u64::MAX)
        }

        /// Ends the library, and then lets go of the pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn MPI_Finalize() -> c_int {
            $crate::shim::end::<$abi>($crate::real!(MPI_Finalize()))
        }
    };
}

/// Makes those that make a window over memory of the program's own, for a library whose locks and flushes wait for the target's calls.
#[macro_export]
macro_rules! windows_of_own_memory {
    ($abi:ty) => {
        $crate::ordering! { $abi;
            MPI_Win_create(
                base: Sink, bytes: Aint, unit: c_int, info: Handle, comm: Handle, win: *mut Handle
            );
            MPI_Win_create_c(
                base: Sink, bytes: Aint, unit: Aint, info: Handle, comm: Handle, win: *mut Handle
            );
            MPI_Win_create_dynamic(info: Handle, comm: Handle, win: *mut Handle);
        }
    };
}

/// Calls that make a window whose order alone is here.
#[doc(hidden)]
#[macro_export]
macro_rules! ordering {
    ($abi:ty; $($call:ident($($before:ident: $kind:ty),*);)*) => {$(
        /// Made by the library, and ordered here where all ranks have a pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $call($($before: $kind),*) -> c_int {
            let real = $crate::real!($call($($before: $kind),*));
            // SAFETY: by MPI's contract there is room for the answer, and all ranks call this.
            unsafe { $crate::ordered!($abi; stringify!($call), real; $($before)*) }
        }
    )*};
}

/// Picks the hints, the communicator and the place of the answer, which are the last arguments of each.
#[doc(hidden)]
#[macro_export]
macro_rules! ordered {
    ($abi:ty; $call:expr, $real:ident; $info:ident $comm:ident $win:ident) => {
        $crate::shim::order::<$abi>($call, $info, $comm, $win, $real)
    };
    ($abi:ty; $call:expr, $real:ident; $base:ident $bytes:ident $unit:ident $($last:ident)*) => {
        $crate::ordered!($abi; $call, $real; $($last)*)
    };
}

/// Makes those with large counts, for a library that has them too: programs look whether they are there.
#[macro_export]
macro_rules! large_counts {
    ($abi:ty) => {
        use $crate::abi::Count;

        $crate::data!($abi; Count;
            MPI_Put_c MPI_Get_c MPI_Accumulate_c MPI_Get_accumulate_c
            MPI_Rput_c MPI_Rget_c MPI_Raccumulate_c MPI_Rget_accumulate_c);
        $crate::traced_large_counts!($abi);
        $crate::making!($abi; Aint; MPI_Win_allocate_c MPI_Win_allocate_shared_c MPI_Win_shared_query_c);
    };
}

/// The library's own call, as a closure.
#[doc(hidden)]
#[macro_export]
macro_rules! real {
    ($call:ident($($argument:ident: $kind:ty),*)) => {
        || {
            static REAL: OnceLock<unsafe extern "C" fn($($kind),*) -> c_int> = OnceLock::new();
            // SAFETY: the type and the arguments are those that the program has called with.
            unsafe {
                REAL.get_or_init(|| $crate::library::real(concat!("P", stringify!($call))))($($argument),*)
            }
        }
    };
}

/// Calls on a window; the rank whose bytes they move.
#[doc(hidden)]
#[macro_export]
macro_rules! calls {
    ($abi:ty; $target:expr; $window:ident, $win:ident; $($call:ident($($argument:ident: $kind:ty),* $(,)?) = $body:expr;)*) => {$(
        /// Done here on a window in the pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $call($($argument: $kind),*) -> c_int {
            let real = $crate::real!($call($($argument: $kind),*));
            $crate::shim::on::<$abi>(stringify!($call), $win, $target, |$window| $body, real)
        }
    )*};
}

/// The calls that move bytes, with counts of a type.
#[doc(hidden)]
#[macro_export]
macro_rules! data {
    ($abi:ty; $count:ty;
        $put:ident $get:ident $accumulate:ident $get_accumulate:ident
        $rput:ident $rget:ident $raccumulate:ident $rget_accumulate:ident) => {
        $crate::calls! { $abi; Some(target); window, win;
            $put(
                from: Source, count: $count, kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, win: Handle
            )
                // SAFETY: by MPI's contract the program's buffers hold what it says.
                = unsafe { window.put((from, count.into(), kind), (target, disp, target_count.into(), target_kind)) };
            $get(
                into: Sink, count: $count, kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, win: Handle
            )
                // SAFETY: as above.
                = unsafe { window.get((into, count.into(), kind), (target, disp, target_count.into(), target_kind)) };
            $accumulate(
                from: Source, count: $count, kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, op: Handle, win: Handle
            )
                // SAFETY: as above.
                = unsafe {
                    window.accumulate(
                        (from, count.into(), kind), (target, disp, target_count.into(), target_kind), op)
                };
            $get_accumulate(
                from: Source, count: $count, kind: Handle, into: Sink, into_count: $count, into_kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, op: Handle, win: Handle
            )
                // SAFETY: as above.
                = unsafe {
                    window.get_accumulate(
                        (from, count.into(), kind), (into, into_count.into(), into_kind),
                        (target, disp, target_count.into(), target_kind), op)
                };
            $rput(
                from: Source, count: $count, kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, win: Handle,
                request: *mut Handle
            )
                // SAFETY: as above.
                = unsafe {
                    window.put((from, count.into(), kind), (target, disp, target_count.into(), target_kind))
                        .and_then(|()| window.done(request))
                };
            $rget(
                into: Sink, count: $count, kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, win: Handle,
                request: *mut Handle
            )
                // SAFETY: as above.
                = unsafe {
                    window.get((into, count.into(), kind), (target, disp, target_count.into(), target_kind))
                        .and_then(|()| window.done(request))
                };
            $raccumulate(
                from: Source, count: $count, kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, op: Handle, win: Handle,
                request: *mut Handle
            )
                // SAFETY: as above.
                = unsafe {
                    window.accumulate(
                        (from, count.into(), kind), (target, disp, target_count.into(), target_kind), op)
                        .and_then(|()| window.done(request))
                };
            $rget_accumulate(
                from: Source, count: $count, kind: Handle, into: Sink, into_count: $count, into_kind: Handle,
                target: c_int, disp: Aint, target_count: $count, target_kind: Handle, op: Handle, win: Handle,
                request: *mut Handle
            )
                // SAFETY: as above.
                = unsafe {
                    window.get_accumulate(
                        (from, count.into(), kind), (into, into_count.into(), into_kind),
                        (target, disp, target_count.into(), target_kind), op)
                        .and_then(|()| window.done(request))
                };
        }
    };
}

/// The calls that make a window, and say where its parts are, with units of a type.
#[doc(hidden)]
#[macro_export]
macro_rules! making {
    ($abi:ty; $unit:ty; $allocate:ident $allocate_shared:ident $shared_query:ident) => {
        $crate::making!($abi; $unit; $allocate false);
        $crate::making!($abi; $unit; $allocate_shared true);

        /// Said by the shim of a window in the pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $shared_query(
            win: Handle, rank: c_int, bytes: *mut Aint, unit: *mut $unit, base: Sink
        ) -> c_int {
            let mut said = false;
            let real = $crate::real!($shared_query(
                win: Handle, rank: c_int, bytes: *mut Aint, unit: *mut $unit, base: Sink));
            let look = |window: &$crate::window::Window<$abi>| {
                let mut wide = 0;
                // SAFETY: by MPI's contract there is room for the answers.
                said = unsafe { window.shared_query(rank, bytes, &raw mut wide, base) }?;
                if said {
                    // SAFETY: as above; it was of this type when the window was made.
                    unsafe { unit.write(wide as $unit) };
                }
                Ok(())
            };
            let code = $crate::shim::on::<$abi>(stringify!($shared_query), win, None, look, || 0);
            if said || code != 0 { code } else { real() }
        }
    };
    ($abi:ty; $unit:ty; $call:ident $is_shared:literal) => {
        /// Made here where all ranks have a pool.
        #[unsafe(no_mangle)]
        #[expect(non_snake_case, reason = "MPI's own name")]
        pub(crate) unsafe extern "C" fn $call(
            bytes: Aint, unit: $unit, info: Handle, comm: Handle, base: Sink, win: *mut Handle
        ) -> c_int {
            let real = $crate::real!($call(
                bytes: Aint, unit: $unit, info: Handle, comm: Handle, base: Sink, win: *mut Handle));
            let request = $crate::window::WindowRequest { bytes, disp_unit: unit as i64, info, comm, is_shared: $is_shared };
            // SAFETY: by MPI's contract there is room for the answers, and all ranks call this.
            unsafe { $crate::shim::allocate::<$abi>(stringify!($call), &request, base, win, real) }
        }
    };
}
