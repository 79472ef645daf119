//! What the hardware may do at any moment: a process beside the program evicts and prefetches lines of the host.

use std::time::Duration;

use crate::host::{Host, Move};

/// Moves lines until this process is killed. The seed says how often: never to every 20 us.
pub(crate) fn run(host: &Host, seed: u64) -> ! {
    // SAFETY: prctl has no effect on memory. The process ends with `polder rehearse`.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let most_us = [20, 100, 500, u64::MAX / 2][(seed % 4) as usize];
    loop {
        std::thread::sleep(Duration::from_micros(1 + host.random() % most_us));
        if let Some(line) = host.likely_line() {
            let moves = [Move::WriteBack, Move::Flush, Move::Prefetch];
            host.move_line(line, moves[(host.random() % 3) as usize]);
        }
    }
}
