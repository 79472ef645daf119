//! What the shim of a process knows: the library, the pool, and the windows and the memory in it.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError, RwLock};

use polder_attach::session::{ProcessSession, Session};
use polder_border::Uncancelled;
use polder_mem::Serial;

use crate::abi::{Abi, Aint};
use crate::failure::{Failure, say};
use crate::hosts;
use crate::library::Library;
use crate::memory::{Pieces, is_fit};
use crate::trace::{Traced, Tracer};
use crate::window::{Made, Window, WindowRequest, is_hinted};

/// Boxed, so that each stands still; the one that was used last comes first.
type Windows<A> = Vec<(<A as Abi>::Handle, Box<Window<A>>)>;

/// What the shim of a process knows.
pub struct Shim<A: Abi> {
    library: OnceLock<Option<Library<A>>>,
    session: ProcessSession,
    windows: OnceLock<Serial<Windows<A>>>,
    /// Windows that this process was the first rank of.
    named: Mutex<u64>,
    pieces: RwLock<Pieces>,
    tracer: Tracer<A>,
}

/// An ABI whose calls this library takes.
pub trait Preload: Abi {
    /// What the shim of this process knows.
    fn shim() -> &'static Shim<Self>;
}

impl<A: Preload> Traced for A {
    fn tracer() -> &'static Tracer<Self> {
        &A::shim().tracer
    }

    fn begin() {
        let shim = A::shim();
        if let Some(library) = shim.library() {
            shim.tracer.begin(library);
        }
    }
}

impl<A: Abi> Default for Shim<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Abi> Shim<A> {
    /// One that knows nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            library: OnceLock::new(),
            session: ProcessSession::new(),
            windows: OnceLock::new(),
            named: Mutex::new(0),
            pieces: RwLock::new(Pieces::new()),
            tracer: Tracer::new(),
        }
    }

    /// The window of a handle, if it lies in the pool.
    #[inline(always)]
    fn window(&self, handle: A::Handle) -> Option<&Window<A>> {
        let mut windows = self.windows.get()?.take_turn();
        let window = match &windows[..] {
            [(known, window), ..] if *known == handle => &raw const **window,
            _ => find::<A>(&mut windows, handle)?,
        };
        // SAFETY: it stands still until the program frees it, or ends MPI, which it does once it uses it no more.
        Some(unsafe { &*window })
    }

    fn library(&self) -> Option<&Library<A>> {
        self.library.get_or_init(Library::find).as_ref()
    }

    /// The pool that the environment or a config file names.
    fn session(&self) -> Result<Arc<Session>, String> {
        self.session.get(|settings| {
            if let Some(filter) = &settings.log {
                filter.start();
            }
        })
    }

    /// Lets go of the pool, once MPI has ended.
    fn end(&self) {
        drop(self.windows.get().map(|windows| std::mem::take(&mut *windows.take_turn())));
        let pieces = std::mem::take(&mut *self.pieces.write().unwrap_or_else(PoisonError::into_inner));
        match self.session.take() {
            Some(session) => drop((pieces, session)),
            // They are the parent's too, or there are none.
            None => std::mem::forget(pieces),
        }
    }

    /// Takes memory from the pool; nothing where the library shall give it.
    fn take(&self, bytes: Aint, info: A::Handle) -> Option<*mut u8> {
        self.library().filter(|library| is_fit(library, bytes, info))?;
        let mut pieces = self.pieces.write().unwrap_or_else(PoisonError::into_inner);
        let taken = self.session().and_then(|session| pieces.take(session, bytes as u64));
        taken.inspect_err(|why| tracing::info!("{bytes} bytes are the MPI library's: {why}")).ok()
    }

    /// Where in the pool with this uuid the bytes of a send lie; nothing when they do not.
    ///
    /// # Safety
    /// The bytes may be read.
    pub unsafe fn place(&self, at: *const u8, bytes: usize, uuid: u128) -> Option<u64> {
        // SAFETY: by this function's contract.
        unsafe { self.pieces.read().unwrap_or_else(PoisonError::into_inner).place(at, bytes, uuid) }
    }

    /// Makes a window; nothing where the library shall.
    fn allocate(
        &'static self,
        library: &'static Library<A>,
        request: &WindowRequest<A>,
    ) -> Result<Option<(*mut u8, A::Handle)>, Failure> {
        let Some((session, name)) = self.window_name(library, request.comm)? else { return Ok(None) };
        let Some(Made { window, base, handle }) = Window::allocate(library, session, request, &name)? else {
            return Ok(None);
        };
        self.keep(library, handle, window);
        Ok(Some((base, handle)))
    }

    /// Makes the order of a window of the library's; nothing where that is the library's too.
    fn order(
        &'static self,
        library: &'static Library<A>,
        info: A::Handle,
        comm: A::Handle,
    ) -> Result<Option<Window<A>>, Failure> {
        // The program takes no locks, and some libraries allow none then.
        if is_hinted(library, info, c"no_locks") {
            return Ok(None);
        }
        let Some((session, name)) = self.window_name(library, comm)? else { return Ok(None) };
        Window::order(library, session, comm, &name)
    }

    fn keep(&self, library: &Library<A>, handle: A::Handle, window: Window<A>) {
        let windows = self.windows.get_or_init(|| library.serial(vec![]));
        windows.take_turn().push((handle, Box::new(window)));
    }

    /// The pool, and a name that no other window of the job has; nothing unless all ranks are in one pool.
    fn window_name(
        &self,
        library: &Library<A>,
        comm: A::Handle,
    ) -> Result<Option<(Arc<Session>, String)>, Failure> {
        if library.is_between_groups(comm)? {
            return Ok(None);
        }
        let session = self.session();
        if let Err(why) = &session {
            static SAID: Once = Once::new();
            SAID.call_once(|| say(&format!("windows stay with the MPI library: {why}")));
        }
        if !library.all(comm, session.is_ok())? {
            return Ok(None);
        }
        let Ok(session) = session else { return Ok(None) };
        Ok(self.name(library, &session, comm)?.map(|name| (session, name)))
    }

    /// A name that no other window of the job has, if all ranks are in one pool.
    fn name(
        &self,
        library: &Library<A>,
        session: &Session,
        comm: A::Handle,
    ) -> Result<Option<String>, Failure> {
        let uuid = session.pool().superblock().uuid.0;
        let pool = [uuid as u64, (uuid >> 64) as u64];
        let (host, pid) = (session.pool().member().host, session.pool().member().pid);
        let number = {
            let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
            *named += 1;
            *named
        };
        let mut words = [pool[0], pool[1], u64::from(host), u64::from(pid), number];
        let bytes = size_of_val(&words) as c_int;
        // SAFETY: a collective call of all ranks, with a place for so many bytes.
        let code = unsafe { (library.bcast)((&raw mut words).cast(), bytes, library.handles.byte, 0, comm) };
        Library::<A>::check("MPI_Bcast", code)?;
        let [first, second, host, pid, number] = words;
        let all = library.all(comm, [first, second] == pool)?;
        Ok(all.then(|| format!("{host}.{pid}.{number}")))
    }
}

/// The window of a handle, which comes first from here on.
#[cold]
fn find<A: Abi>(windows: &mut Windows<A>, handle: A::Handle) -> Option<*const Window<A>> {
    let at = windows.iter().position(|(known, _)| *known == handle)?;
    windows.swap(0, at);
    Some(&raw const *windows[0].1)
}

/// Says on stderr what failed, and gives the number that the program is told.
fn report(call: &str, rank: u32, failure: &Failure) -> c_int {
    let _uncancelled = Uncancelled::begin();
    say(&format!("{call} of rank {rank}: {}", failure.why));
    failure.code
}

/// A panic as a failure, of a call whose thread is not cancelled meanwhile.
fn guarded<A: Abi, T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let _uncancelled = Uncancelled::begin();
    caught::<A, T>(body)
}

/// A panic as a failure.
#[inline]
fn caught<A: Abi, T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        let why = "the shim panicked; the message stands above, please report it";
        Err(Failure::new(A::NUMBERS.error.other, why))
    })
}

/// A call on a window: done here when that lies in the pool, else by the library. One that moves bytes has a target. Where the order of a
/// window alone is here, the library does what moves bytes.
#[inline(always)]
pub fn on<A: Preload>(
    call: &str,
    win: A::Handle,
    target: Option<c_int>,
    body: impl FnOnce(&Window<A>) -> Result<(), Failure>,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let shim = A::shim();
    let mut rank = 0;
    // What waits, and what calls the library, keeps cancellations out: a put takes as long as that does.
    let done = caught::<A, _>(|| {
        let Some(window) = shim.window(win) else { return Ok(false) };
        rank = window.rank();
        if let Some(target) = target {
            window.begin_access(target)?;
            if !window.moves_bytes() {
                return Ok(false);
            }
        }
        body(window).map(|()| true)
    });
    match done {
        Ok(true) => 0,
        Ok(false) => real(),
        Err(failure) => failed::<A>(call, rank, win, &failure),
    }
}

/// A call on a window has failed.
#[cold]
fn failed<A: Preload>(call: &str, rank: u32, win: A::Handle, failure: &Failure) -> c_int {
    let code = report(call, rank, failure);
    // SAFETY: the library's own window.
    A::shim().library().map_or(code, |library| unsafe { library.handle_of_window(win, code) })
}

/// A call that makes a window: in the pool, where all ranks have one, else by the library.
///
/// # Safety
/// There is room for an address at `base`, and for a handle at `win`; all ranks of the communicator make this call.
pub unsafe fn allocate<A: Preload>(
    call: &str,
    request: &WindowRequest<A>,
    base: *mut c_void,
    win: *mut A::Handle,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let shim = A::shim();
    let Some(library) = shim.library() else {
        static SAID: Once = Once::new();
        SAID.call_once(|| say(&format!("this shim is for {}, and does nothing for this program", A::NAME)));
        return real();
    };
    match guarded::<A, _>(|| shim.allocate(library, request)) {
        Ok(Some((address, handle))) => {
            // SAFETY: by this function's contract.
            unsafe {
                base.cast::<*mut u8>().write(address);
                win.write(handle);
            }
            0
        }
        Ok(None) => real(),
        Err(failure) => {
            let code = report(call, 0, &failure);
            // SAFETY: the program's communicator.
            unsafe { library.handle_of_comm(request.comm, code) }
        }
    }
}

/// A call that makes a window over memory of the program's own, which the library does; the order of accesses is kept here where all
/// ranks have a pool.
///
/// # Safety
/// There is room for a handle at `win`; all ranks of the communicator make this call.
pub unsafe fn order<A: Preload>(
    call: &str,
    info: A::Handle,
    comm: A::Handle,
    win: *mut A::Handle,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let shim = A::shim();
    let Some(library) = shim.library() else { return real() };
    let ordered = guarded::<A, _>(|| shim.order(library, info, comm));
    let code = real();
    let made = match ordered {
        Ok(Some(mut window)) if code == 0 => guarded::<A, _>(|| {
            // SAFETY: the library has written it there.
            let handle = unsafe { win.read() };
            window.take_over(handle)?;
            shim.keep(library, handle, window);
            Ok(())
        }),
        ordered => ordered.map(drop),
    };
    if let Err(failure) = made {
        let code = report(call, 0, &failure);
        // SAFETY: the program's communicator.
        return unsafe { library.handle_of_comm(comm, code) };
    }
    code
}

/// MPI_Comm_split_type: by the hosts of the pool where the program asks for ranks that share memory.
///
/// # Safety
/// There is room for a handle at `new`; all ranks of the communicator make this call.
pub unsafe fn split_type<A: Preload>(
    comm: A::Handle,
    split_type: c_int,
    key: c_int,
    new: *mut A::Handle,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let Some(library) = A::shim().library() else { return real() };
    match guarded::<A, _>(|| hosts::color(library, comm, split_type)) {
        // SAFETY: by this function's contract.
        Ok(Some(color)) => unsafe { (library.comm_split)(comm, color, key, new) },
        Ok(None) => real(),
        Err(failure) => {
            let code = report("MPI_Comm_split_type", 0, &failure);
            // SAFETY: the program's communicator.
            unsafe { library.handle_of_comm(comm, code) }
        }
    }
}

/// MPI_Alloc_mem.
///
/// # Safety
/// There is room for an address at `base`.
pub unsafe fn take<A: Preload>(
    bytes: Aint,
    info: A::Handle,
    base: *mut c_void,
    real: impl FnOnce() -> c_int,
) -> c_int {
    match guarded::<A, _>(|| Ok(A::shim().take(bytes, info))) {
        Ok(Some(address)) => {
            // SAFETY: by this function's contract.
            unsafe { base.cast::<*mut u8>().write(address) };
            0
        }
        Ok(None) | Err(_) => real(),
    }
}

/// MPI_Free_mem.
pub fn give_back<A: Preload>(base: *mut c_void, real: impl FnOnce() -> c_int) -> c_int {
    let free = || Ok(A::shim().pieces.write().unwrap_or_else(PoisonError::into_inner).free(base.addr()));
    if guarded::<A, _>(free).unwrap_or(true) { 0 } else { real() }
}

/// MPI_Finalize. The program's functions that delete attributes of MPI_COMM_SELF run in it: until it returns, windows and memory are used
/// and freed.
pub fn end<A: Preload>(real: impl FnOnce() -> c_int) -> c_int {
    let _uncancelled = Uncancelled::begin();
    A::shim().tracer.end();
    let code = real();
    A::shim().end();
    code
}

/// MPI_Win_free.
///
/// # Safety
/// `win` is the program's handle; all ranks make this call.
pub unsafe fn free<A: Preload>(win: *mut A::Handle, real: impl FnOnce() -> c_int) -> c_int {
    let shim = A::shim();
    // SAFETY: by this function's contract.
    let handle = unsafe { win.read() };
    match guarded::<A, _>(|| Ok(shim.window(handle).is_some())) {
        Ok(true) => {}
        Ok(false) => return real(),
        Err(failure) => return report("MPI_Win_free", 0, &failure),
    }
    let code = on::<A>("MPI_Win_free", handle, None, Window::end, || 0);
    if code != 0 {
        return code;
    }
    // The memory is there until nobody has a window over it. Functions that delete attributes may use the window yet: where the library
    // moves the bytes, its own epochs allow that from here on.
    let take = || {
        let mut windows = shim.windows.get()?.take_turn();
        let at = windows.iter().position(|(known, _)| *known == handle)?;
        Some(windows.swap_remove(at).1)
    };
    let in_library = shim.window(handle).is_some_and(|window| !window.moves_bytes());
    let taken = if in_library { take() } else { None };
    let code = real();
    let Some(mut window) = (if in_library || code != 0 { taken } else { take() }) else { return code };
    let rank = window.rank();
    let ended = guarded::<A, _>(|| {
        if code == 0 {
            return window.free();
        }
        window.take_over(handle)?;
        if let Some(windows) = shim.windows.get() {
            windows.take_turn().push((handle, window));
        }
        Ok(())
    });
    if let Err(failure) = ended {
        report("MPI_Win_free", rank, &failure);
    }
    code
}
