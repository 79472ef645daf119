//! Threads of Polder's own beside those of a program.

use std::io;
use std::thread::{Builder, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Signals of an instruction that went wrong: the kernel ends a process if its thread blocks them.
const FAULTS: [Signal; 6] =
    [Signal::SIGBUS, Signal::SIGSEGV, Signal::SIGILL, Signal::SIGFPE, Signal::SIGTRAP, Signal::SIGSYS];

/// Starts a thread that runs no code of the program, and takes none of its signals. A program that blocks a signal in its own threads
/// waits for it there; a thread that does not block it would take it, and the process may end.
///
/// # Errors
/// When the system starts no thread.
pub fn start<T: Send + 'static>(
    thread: Builder,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let mut signals = SigSet::all();
    FAULTS.into_iter().for_each(|fault| signals.remove(fault));
    // The thread takes over what its maker blocks, so that no signal finds it before it blocks any.
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let started = thread.spawn(run);
    before.thread_set_mask()?;
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_blocks_all_signals_but_faults_and_its_maker_none_more() {
        let before = SigSet::thread_get_mask().unwrap();
        let blocked = start(Builder::new(), || SigSet::thread_get_mask().unwrap()).unwrap().join().unwrap();
        for signal in Signal::iterator().filter(|it| ![Signal::SIGKILL, Signal::SIGSTOP].contains(it)) {
            assert_eq!(blocked.contains(signal), !FAULTS.contains(&signal), "{signal}");
        }
        assert_eq!(SigSet::thread_get_mask().unwrap(), before);
    }
}
