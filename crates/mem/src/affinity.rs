//! Which CPU a thread runs on, and whose memory it takes: measured figures need both to stay where they are.

use std::io;

/// The CPUs that this thread may run on.
#[must_use]
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a live set of the size that is given.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if rc != 0 {
        return vec![0];
    }
    // SAFETY: the index is below the number of bits in the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// Keeps this thread on one CPU from now on.
///
/// # Errors
/// What the kernel said: no such CPU, or not allowed.
pub fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the index was checked; `set` is a live set of the size that is given.
    let rc = unsafe {
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has what this thread, and each that it starts, touches first come from the memory of one NUMA node from now on.
///
/// # Errors
/// What the kernel said: no such node, or none with memory.
pub fn bind_memory(node: usize) -> io::Result<()> {
    const WORDS: usize = 16;
    let mut nodes = [0_u64; WORDS];
    *nodes.get_mut(node / 64).ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % 64);
    // SAFETY: `nodes` is a live set of as many bits as are given, of which the kernel reads all but the last.
    let rc = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, nodes.as_ptr(), WORDS * 64) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(target_arch = "aarch64", ignore = "qemu-user has no set_mempolicy")]
    fn memory_is_bound_to_a_node_that_there_is() {
        std::thread::spawn(|| {
            bind_memory(0).expect("every machine has node 0");
            assert_eq!(vec![7_u8; 1 << 20][1 << 19], 7);
            assert!(bind_memory(1000).is_err());
            assert!(bind_memory(usize::MAX).is_err());
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn a_pinned_thread_may_run_on_one_cpu() {
        std::thread::spawn(|| {
            let last = *allowed_cpus().last().expect("at least one");
            pin_to_cpu(last).expect("it was allowed");
            assert_eq!(allowed_cpus(), [last]);
            assert!(pin_to_cpu(usize::MAX).is_err());
        })
        .join()
        .expect("no panic");
    }
}
