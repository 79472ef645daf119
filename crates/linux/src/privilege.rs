//! Rights that the agent gives up once it has read its policy.

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::KernelError;

/// What the agent needs: `kernel.numa_balancing` takes CAP_SYS_ADMIN, and cgroups that were delegated to a user are files of that user, so that root needs CAP_DAC_OVERRIDE to write them. Pages of
/// another user's process are moved with CAP_SYS_PTRACE alone.
const NEEDED: CapabilitySet =
    CapabilitySet::SYS_ADMIN.union(CapabilitySet::DAC_OVERRIDE).union(CapabilitySet::SYS_PTRACE);

/// Gives up every capability of the calling thread, and of those that it starts, but for `CAP_SYS_ADMIN`,
/// `CAP_DAC_OVERRIDE` and `CAP_SYS_PTRACE`. No program that it runs can gain any.
///
/// # Errors
/// As the kernel refuses.
pub fn drop_capabilities() -> Result<(), KernelError> {
    let failed = |what: &'static str| {
        move |error: rustix::io::Errno| KernelError::file(what)(std::io::Error::from(error))
    };
    rustix::thread::set_no_new_privs(true).map_err(failed("no_new_privs"))?;
    let held = rustix::thread::capabilities(None).map_err(failed("capget"))?;
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for bit in 0..u64::BITS {
            let one = CapabilitySet::from_bits_retain(1 << bit);
            // A number past the kernel's last capability is EINVAL.
            if !NEEDED.contains(one) && rustix::thread::capability_is_in_bounding_set(one) == Ok(true) {
                rustix::thread::remove_capability_from_bounding_set(one).map_err(failed("bounding set"))?;
            }
        }
    }
    let sets = CapabilitySets {
        effective: held.effective & NEEDED,
        permitted: held.permitted & NEEDED,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets).map_err(failed("capset"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_three_capabilities_at_most() {
        // Capabilities are of a thread: that of the tests keeps its own.
        let after = std::thread::spawn(|| {
            drop_capabilities().unwrap();
            let chowns = rustix::thread::capability_is_in_bounding_set(CapabilitySet::CHOWN).unwrap();
            (rustix::thread::capabilities(None).unwrap(), chowns, rustix::thread::no_new_privs().unwrap())
        });
        let (after, chowns, no_new) = after.join().unwrap();
        let before = rustix::thread::capabilities(None).unwrap();
        assert_eq!(after.permitted, before.permitted & NEEDED);
        assert_eq!(after.effective, before.effective & NEEDED);
        assert!(no_new);
        if before.effective.contains(CapabilitySet::SETPCAP) {
            assert!(!chowns, "the bounding set is cut down too");
        }
    }
}
