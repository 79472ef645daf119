//! Keeps SIGTRAP deliverable: a trap ends a thread that blocks it. A program blocks it where it blocks all signals.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use libc::{sigaction as Action, sigset_t as Signals};

/// What glibc keeps for itself, and lets nobody block.
const OF_GLIBC: [c_int; 2] = [32, 33];
/// Bytes of a set of signals in the kernel.
const SET: usize = 8;

/// The program's `pthread_sigmask`.
///
/// # Safety
/// As pthread_sigmask of the C library.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pthread_sigmask(how: c_int, set: *const Signals, old: *mut Signals) -> c_int {
    // SAFETY: by this function's contract.
    let own =
        unsafe { set.as_ref() }.map(|set| if how == libc::SIG_UNBLOCK { *set } else { without_trap(*set) });
    let set = own.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the caller's arguments, but for what is taken out of the set; errno is the thread's own.
    unsafe {
        match libc::syscall(libc::SYS_rt_sigprocmask, how, set, old, SET) {
            0 => 0,
            _ => *libc::__errno_location(),
        }
    }
}

/// The program's `sigprocmask`, which says in errno what went wrong.
///
/// # Safety
/// As sigprocmask of the C library.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigprocmask(how: c_int, set: *const Signals, old: *mut Signals) -> c_int {
    // SAFETY: the caller's arguments.
    if unsafe { pthread_sigmask(how, set, old) } == 0 { 0 } else { -1 }
}

/// The program's `sigaction`: its handlers may flush too.
///
/// # Safety
/// As sigaction of the C library.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sigaction(signal: c_int, action: *const Action, old: *mut Action) -> c_int {
    type Call = unsafe extern "C" fn(c_int, *const Action, *mut Action) -> c_int;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    const NAME: *const c_char = c"sigaction".as_ptr();
    if NEXT.load(SeqCst) == 0 {
        // SAFETY: the C library's own, which comes behind this library's.
        NEXT.store(unsafe { libc::dlsym(libc::RTLD_NEXT, NAME) } as usize, SeqCst);
    }
    // SAFETY: that function, which every C library has.
    let next: Call = unsafe { std::mem::transmute(NEXT.load(SeqCst)) };
    // SAFETY: by this function's contract.
    let own =
        unsafe { action.as_ref() }.map(|action| Action { sa_mask: without_trap(action.sa_mask), ..*action });
    let action = own.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the caller's arguments, but for what is taken out of the set.
    unsafe { next(signal, action, old) }
}

/// Lets this thread take SIGTRAP, which it may have inherited as blocked.
pub(crate) fn unblock_trap() {
    // SAFETY: all zeros is a value of this type, and the set lives as long as the calls.
    unsafe {
        let mut trap: Signals = std::mem::zeroed();
        libc::sigaddset(&raw mut trap, libc::SIGTRAP);
        pthread_sigmask(libc::SIG_UNBLOCK, &raw const trap, std::ptr::null_mut());
    }
}

fn without_trap(mut set: Signals) -> Signals {
    // SAFETY: words of the set, which is this function's own.
    let words = unsafe { &mut *(&raw mut set).cast::<u64>() };
    for signal in OF_GLIBC.into_iter().chain([libc::SIGTRAP]) {
        *words &= !(1 << (signal - 1));
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_blocks_all_signals_and_a_handler_leave_traps_alone() {
        // SAFETY: all zeros are values of these types, which outlive the calls.
        let (blocked, action) = unsafe {
            let (mut all, mut blocked): (Signals, Signals) = std::mem::zeroed();
            let (mut action, mut installed): (Action, Action) = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            assert_eq!(sigprocmask(libc::SIG_SETMASK, &raw const all, &raw mut blocked), 0);
            assert_eq!(pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, &raw mut blocked), 0);
            assert_eq!(sigprocmask(99, &raw const all, std::ptr::null_mut()), -1);
            action.sa_mask = all;
            assert_eq!(sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
            assert_eq!(sigaction(libc::SIGUSR2, std::ptr::null(), &raw mut installed), 0);
            (blocked, installed)
        };
        for set in [blocked, action.sa_mask] {
            let has = |signal| {
                // SAFETY: a set of this test.
                unsafe { libc::sigismember(&raw const set, signal) == 1 }
            };
            assert_eq!([libc::SIGUSR1, libc::SIGTRAP].map(has), [true, false]);
        }
    }
}
