//! Surviving SIGBUS: poison, a lost link, a file truncated below its mapping.
//!
//! Every instruction that touches a mapped region stands in a table (linker section `polder_fault`): its address, and its
//! landing, where to go on if it faults. The handler sends a thread that faulted there to the landing, with a register set to 1.
//! It passes any other SIGBUS on to the handler that was installed before.
//!
//! Ordinary atomics touch the files that a host's processes share; they have no landing. If such a file was cut, the handler
//! maps an empty private page in place of the lost one. The next call finds that noted, and fails.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

use libc::{c_int, c_void, siginfo_t, ucontext_t};

use crate::{Offset, cpu};

/// One row of the table; each field is the distance from itself to the place it names.
#[repr(C)]
struct Row {
    start: i32,
    end: i32,
    landing: i32,
}

const _: () = assert!(size_of::<Row>() == 12);

/// The handler that was there before ours; null until ours is about to be installed, and never freed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Installs the handler, once in a process. Threads that come first at once do the same thing twice; no `Once`, which
/// would keep a child waiting that was forked meanwhile.
pub(crate) fn install() {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.load(Ordering::Acquire) {
        return;
    }
    // SAFETY: an all-zero sigaction is a valid value of the C struct: default handler, empty mask, no flags.
    let mut previous: Box<libc::sigaction> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: a null new action only reads the present one into a live struct.
    unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut *previous) };
    let previous = Box::into_raw(previous);
    // A thread that sees ours installed comes after one that has noted what was there before.
    if PREVIOUS.compare_exchange(std::ptr::null_mut(), previous, Ordering::SeqCst, Ordering::SeqCst).is_err()
    {
        // SAFETY: made above from a box, and known to nobody else.
        drop(unsafe { Box::from_raw(previous) });
    }
    // SAFETY: as above; the zeroed mask blocks nothing.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = on_sigbus as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for, and touches nothing but the saved registers,
    // atomics and the previous handler.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) };
    INSTALLED.store(true, Ordering::Release);
}

/// Sends a fault in one of our instructions to its landing; anything else to the previous handler.
extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a siginfo and a ucontext that live until this handler returns.
    let (code, interrupted) = unsafe { ((*info).si_code, &mut *context.cast::<ucontext_t>()) };
    // A signal sent by a program (code 0 or less) or about some other memory (AO) only happens to meet us here.
    let ours = code > 0 && code != libc::BUS_MCEERR_AO;
    let landing = if ours { landing(cpu::interrupted(interrupted)) } else { None };
    // SAFETY: a SIGBUS that the kernel sends for an access has an address.
    if ours && landing.is_none() && replaced(unsafe { (*info).si_addr() }.addr()) {
        return;
    }
    match landing {
        Some(landing) => cpu::land(interrupted, landing),
        None => pass_on(signal, code, info, context),
    }
}

/// A mapping of a file of the host's: where it begins, and how long it is; 0 for none.
struct Watched {
    base: AtomicUsize,
    bytes: AtomicUsize,
}

static WATCHED: [Watched; 1024] =
    [const { Watched { base: AtomicUsize::new(0), bytes: AtomicUsize::new(0) } }; 1024];

static LOST: AtomicBool = AtomicBool::new(false);

/// Whether a file that the processes of a host share was cut while this process had it mapped: what this process has seen
/// there since is its own.
#[inline(always)]
#[must_use]
pub fn host_file_lost() -> bool {
    LOST.load(Ordering::Relaxed)
}

/// Has the mapping at `base` survive that its file is cut.
pub(crate) fn watch(base: usize, bytes: usize) -> io::Result<()> {
    let is_free =
        |place: &&Watched| place.base.compare_exchange(0, base, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    let place = WATCHED.iter().find(is_free);
    let place =
        place.ok_or_else(|| io::Error::other("this process has 1024 of them; detach from some pools"))?;
    place.bytes.store(bytes, Ordering::SeqCst);
    Ok(())
}

/// Before the mapping at `base` is gone.
pub(crate) fn unwatch(base: usize) {
    if let Some(place) = WATCHED.iter().find(|place| place.base.load(Ordering::SeqCst) == base) {
        place.bytes.store(0, Ordering::SeqCst);
        place.base.store(0, Ordering::SeqCst);
    }
}

/// Puts an empty page where a watched mapping has lost the one of `address`.
fn replaced(address: usize) -> bool {
    let holds = |place: &Watched| {
        let base = place.base.load(Ordering::SeqCst);
        base != 0 && (base..base + place.bytes.load(Ordering::SeqCst)).contains(&address)
    };
    if !WATCHED.iter().any(holds) {
        return false;
    }
    LOST.store(true, Ordering::SeqCst);
    // SAFETY: replaces a page of a mapping that `Shm` has, whose users all treat any bytes as atomics.
    let page = unsafe {
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(address & !4095),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    page != libc::MAP_FAILED
}

/// Where an access at `instruction` goes on, when the table knows it.
fn landing(instruction: usize) -> Option<usize> {
    let (start, stop) = cpu::fault_rows();
    // SAFETY: the section holds nothing but rows, one after another and aligned to 4, and is never written.
    let rows = unsafe { std::slice::from_raw_parts(start as *const Row, (stop - start) / size_of::<Row>()) };
    let place = |field: &i32| (&raw const *field as usize).wrapping_add_signed(*field as isize);
    let row = rows.iter().find(|row| (place(&row.start)..place(&row.end)).contains(&instruction))?;
    Some(place(&row.landing))
}

/// Does what would have happened without us.
fn pass_on(signal: c_int, code: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: null, or a box that is never freed and that nobody writes.
    let previous = unsafe { PREVIOUS.load(Ordering::SeqCst).as_ref() };
    let action = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    let with_info = previous.is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0);
    match action {
        libc::SIG_IGN if code <= 0 => {}
        // A fault cannot be ignored: the instruction would fault for ever.
        libc::SIG_DFL | libc::SIG_IGN => die_by(signal, code),
        handler if with_info => {
            // SAFETY: the previous owner registered this address with SA_SIGINFO, so it has this signature.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: the previous owner registered this address without SA_SIGINFO, so it has this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Restores the default action, so that the return from the handler ends the process by this signal.
fn die_by(signal: c_int, code: c_int) {
    // SAFETY: an all-zero sigaction is SIG_DFL with an empty mask; both calls are async-signal-safe. A fault comes
    // again when its instruction is retried; a signal that was sent is raised once more.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, std::ptr::null_mut());
        if code <= 0 {
            libc::raise(signal);
        }
    }
}

/// How many stores were skipped and not yet reported, in all regions: what every load looks at.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Which stores these were.
static STORES: Mutex<Vec<Skipped>> = Mutex::new(Vec::new());

struct Skipped {
    base: usize,
    thread: ThreadId,
    at: Offset,
}

/// Whether some thread must still be told of a skipped store.
#[inline(always)]
pub(crate) fn any_skipped() -> bool {
    SKIPPED.load(Ordering::Relaxed) != 0
}

/// Remembers that this thread's store or write-back at `at` of the region at `base` was skipped.
#[cold]
#[inline(never)]
pub(crate) fn skipped(base: usize, at: Offset) {
    let thread = std::thread::current().id();
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    // One report says it all; a long flush of a lost range must not fill the memory.
    if !stores.iter().any(|known| known.base == base && known.thread == thread) {
        stores.push(Skipped { base, thread, at });
        SKIPPED.store(stores.len(), Ordering::Relaxed);
    }
}

/// The first store of this thread that was skipped in the region at `base` since it last asked.
#[cold]
#[inline(never)]
pub(crate) fn take_skipped(base: usize) -> Option<Offset> {
    let thread = std::thread::current().id();
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let index = stores.iter().position(|known| known.base == base && known.thread == thread)?;
    let store = stores.swap_remove(index);
    SKIPPED.store(stores.len(), Ordering::Relaxed);
    Some(store.at)
}

/// Forgets what was skipped in the region at `base`, which is about to be unmapped.
pub(crate) fn forget(base: usize) {
    if !any_skipped() {
        return;
    }
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    stores.retain(|known| known.base != base);
    SKIPPED.store(stores.len(), Ordering::Relaxed);
}
