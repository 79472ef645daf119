//! `polder_window`: memory of every rank that all ranks put into and get from.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use polder_attach::session::Session;
use polder_attach::settings::TimeSpan;
use polder_mem::AnyMemory;
use polder_pool::PoolError;
use polder_pool::window::Window as PoolWindow;
use polder_pool::window::{Access, LockPlace};

use crate::failure::{Failure, Status};
use crate::guard::{self, exported};
use crate::pool::Pool;

/// Between two looks at what other ranks do.
const NAP: Duration = Duration::from_micros(100);

/// A window, as one of its ranks has it.
pub(crate) struct Window {
    held: Mutex<PoolWindow<AnyMemory>>,
    /// The window lies in its pool.
    _session: Arc<Session>,
}

impl Window {
    fn held(&self) -> MutexGuard<'_, PoolWindow<AnyMemory>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks until `step` has come, and lets other threads at the window meanwhile.
    fn until(
        &self,
        timeout_ms: u64,
        what: &str,
        mut step: impl FnMut(&mut PoolWindow<AnyMemory>) -> Result<bool, PoolError>,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        for look in 0_u64.. {
            if step(&mut self.held())? {
                return Ok(());
            }
            if began.elapsed() >= TimeSpan::of_millis(timeout_ms).0 {
                let why = format!("{what} within {timeout_ms} ms; look at the other ranks, or wait longer");
                return Err(Failure::new(Status::Timeout, why));
            }
            match look < 1000 {
                true => _ = polder_mem::give_up(),
                false => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }
}

exported! {
    /// Makes this rank's segment, and waits for those of the others.
    extern "C" fn polder_window_create(
        pool: *mut Pool,
        name: *const c_char,
        rank: u32,
        ranks: u32,
        bytes: usize,
        timeout_ms: u64,
        window: *mut *mut Window,
    ) -> c_int {
        let create = || {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            let made = PoolWindow::create(Arc::clone(session.pool()), name, rank, ranks, bytes as u64);
            let held = Mutex::new(made.map_err(|error| refused(name, rank, error))?);
            let window = Window { held, _session: Arc::clone(session) };
            let missing = format!("a rank has not come to window {name}");
            window.until(timeout_ms, &missing, |held| match held.join() {
                Err(PoolError::NotFound { .. }) => Ok(false),
                joined => joined.map(|()| true),
            })?;
            Ok(window)
        };
        guard::made(window, create)
    }

    /// Lets go of a window.
    extern "C" fn polder_window_close(window: *mut Window) -> c_int {
        guard::close(window)
    }

    /// Where a rank's segment is mapped; null where it is not, and of null.
    extern "C" fn polder_window_address(window: *mut Window, rank: u32) -> *mut c_void {
        guard::value(ptr::null_mut(), || {
            let address = guard::given(window, "window")?.held().address(rank)?;
            let refused = || Failure::argument("the window lies in a shadow, which has no address; put and get");
            Ok(address.ok_or_else(refused)?.cast())
        })
    }

    /// Stores bytes in a rank's segment.
    extern "C" fn polder_window_put(
        window: *mut Window,
        rank: u32,
        offset: usize,
        from: *const c_void,
        bytes: usize,
    ) -> c_int {
        guard::status(|| {
            let (window, from) = (guard::given(window, "window")?, guard::source(from.cast(), bytes)?);
            let mut held = window.held();
            held.put(rank, offset as u64, from)?;
            // Not for the meaning: giving a lock back waits three times as long for part of a line that is on its way past the
            // caches as a fence does.
            held.flush();
            Ok(())
        })
    }

    /// Copies bytes out of a rank's segment.
    extern "C" fn polder_window_get(
        window: *mut Window,
        rank: u32,
        offset: usize,
        into: *mut c_void,
        bytes: usize,
    ) -> c_int {
        guard::status(|| {
            let (window, into) = (guard::given(window, "window")?, guard::target(into.cast(), bytes)?);
            Ok(window.held().get(rank, offset as u64, into)?)
        })
    }

    /// Makes all that this rank has put visible.
    extern "C" fn polder_window_flush(window: *mut Window) -> c_int {
        guard::status(|| {
            let window = guard::given(window, "window")?;
            window.held().flush();
            Ok(())
        })
    }

    /// Adds to a number of a rank's segment, and gives what it was.
    extern "C" fn polder_window_add(
        window: *mut Window,
        rank: u32,
        offset: usize,
        number: u64,
        before: *mut u64,
    ) -> c_int {
        let add = |was: u64| Some(was.wrapping_add(number));
        change(window, (rank, offset), before, add)
    }

    /// Replaces a number of a rank's segment if it is as expected, and gives what it was.
    extern "C" fn polder_window_swap(
        window: *mut Window,
        rank: u32,
        offset: usize,
        expected: u64,
        number: u64,
        before: *mut u64,
    ) -> c_int {
        let swap = |was: u64| (was == expected).then_some(number);
        change(window, (rank, offset), before, swap)
    }

    /// Waits for the lock of a rank.
    extern "C" fn polder_window_lock(
        window: *mut Window,
        rank: u32,
        shared: c_int,
        timeout_ms: u64,
    ) -> c_int {
        guard::status(|| {
            let window = guard::given(window, "window")?;
            let access = if shared == 0 { Access::Exclusive } else { Access::Shared };
            let taken = format!("the lock of rank {rank} was not free");
            let mut place = LockPlace::default();
            let locked = window.until(timeout_ms, &taken, |held| held.try_lock(rank, access, &mut place));
            window.held().leave(rank, place);
            locked
        })
    }

    /// Gives the lock of a rank back.
    extern "C" fn polder_window_unlock(window: *mut Window, rank: u32) -> c_int {
        guard::status(|| {
            let window = guard::given(window, "window")?;
            match window.held().unlock(rank) {
                true => Ok(()),
                false => Err(Failure::argument(format!("this window does not have the lock of rank {rank}"))),
            }
        })
    }

    /// Publishes what this host stored in a rank's segment.
    extern "C" fn polder_window_publish(
        window: *mut Window,
        rank: u32,
        offset: usize,
        bytes: usize,
    ) -> c_int {
        guard::status(|| {
            let window = guard::given(window, "window")?;
            Ok(window.held().expose(rank, offset as u64, bytes as u64)?)
        })
    }

    /// Forgets what this host's caches hold of a rank's segment.
    extern "C" fn polder_window_refresh(
        window: *mut Window,
        rank: u32,
        offset: usize,
        bytes: usize,
    ) -> c_int {
        guard::status(|| {
            let window = guard::given(window, "window")?;
            Ok(window.held().renew(rank, offset as u64, bytes as u64)?)
        })
    }
}

/// Why a window cannot be made. What exists already is an object of the window's, which the caller has not named.
fn refused(window: &str, rank: u32, error: PoolError) -> Failure {
    match error {
        PoolError::Exists { .. } => Failure::new(
            Status::Exists,
            format!(
                "rank {rank} of the window {window} is taken, by a process that lives or by one that died (`polder pool sweep` removes what it left)"
            ),
        ),
        other => other.into(),
    }
}

/// # Safety
/// As [`polder_window_add`].
unsafe fn change(
    window: *mut Window,
    (rank, offset): (u32, usize),
    before: *mut u64,
    next: impl Fn(u64) -> Option<u64>,
) -> c_int {
    guard::status(|| {
        // SAFETY: by this function's contract.
        let window = unsafe { guard::given(window, "window") }?;
        let mut was = 0;
        let mut change = |bytes: &mut [u8]| {
            let Ok(word) = <[u8; 8]>::try_from(&*bytes) else { return false };
            was = u64::from_le_bytes(word);
            let Some(next) = next(was) else { return false };
            bytes.copy_from_slice(&next.to_le_bytes());
            true
        };
        window.held().update(rank, offset as u64, 8, &mut change)?;
        // SAFETY: by this function's contract.
        if let Some(before) = unsafe { before.as_mut() } {
            *before = was;
        }
        Ok(())
    })
}
