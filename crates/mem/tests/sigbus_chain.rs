//! A SIGBUS that is none of ours reaches the handler that was installed before. One test, in a process of its own,
//! because handlers belong to the process.

use std::fs::OpenOptions;
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{c_int, c_void, siginfo_t};
use polder_mem::{Mapped, Memory, Offset, Region};

static CALLED: AtomicUsize = AtomicUsize::new(0);

/// Stands for another library's handler: it puts a page of zeros where the fault was, so that the access can go on.
extern "C" fn another_librarys(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    CALLED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the kernel passes a live siginfo with the address of the fault; the page there is part of a mapping
    // that the test made for this.
    unsafe {
        let page = (*info).si_addr().map_addr(|address| address & !4095);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(page, 4096, access, flags, -1, 0);
    }
}

#[test]
fn a_fault_outside_our_accesses_is_passed_on_and_one_inside_is_not() {
    // SAFETY: an all-zero sigaction is valid, and the handler has the signature that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = another_librarys as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
    let path = format!("/dev/shm/polder-chain-{}", std::process::id());
    let memory = Mapped::coherent(Region::create(&path, 8192).expect("a region"));
    let file = OpenOptions::new().read(true).write(true).open(&path).expect("the file");
    std::fs::remove_file(&path).expect("removed");
    // SAFETY: a new mapping at an address that the kernel picks.
    let foreign = unsafe {
        use std::os::fd::AsRawFd;
        libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    file.set_len(4096).expect("truncated");

    assert!(memory.load(Offset(4096)).is_err());
    assert_eq!(CALLED.load(Ordering::SeqCst), 0, "our own fault is not passed on");

    // SAFETY: the handler above makes this page readable when the access faults.
    let byte = unsafe { foreign.cast::<u8>().add(4096).read_volatile() };
    assert_eq!((byte, CALLED.load(Ordering::SeqCst)), (0, 1), "a foreign fault is passed on");
}
