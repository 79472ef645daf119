//! Puts traps in place of instructions, and does at each what its instruction does.

use std::arch::x86_64::__cpuid_count;
use std::ffi::{c_int, c_void};
use std::io;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::HOST;
use crate::code::{Action, Address, Site, objects};
use crate::host::{Host, LINE, Move, Text};
use crate::signals::unblock_trap;

/// `int3`.
const TRAP: u8 = 0xcc;

/// All sites, sorted by address: replaced as a whole, and never freed, because another thread may be in the handler.
static SITES: AtomicPtr<Vec<&'static Site>> = AtomicPtr::new(null_mut());
/// The text of each loaded file that has its traps.
static SCANNED: Mutex<Scanned> = Mutex::new(vec![]);
/// Each by its name and by what is added to its addresses.
pub(crate) type Scanned = Vec<(&'static str, u64)>;

/// What the dynamic linker calls whenever it has loaded a file, for debuggers.
static LINKER_HOOK: AtomicU64 = AtomicU64::new(0);
/// What the program had in place of our handler.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Puts traps into all that is loaded, now and later.
pub(crate) fn install() -> io::Result<()> {
    unblock_trap();
    // SAFETY: all zeros is a value of this type.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_trap as *const () as usize;
    // Not on a thread's own stack for signals, which may be small.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the set is the action's own. Another handler, with a trap in it, must not run while this one holds a line's lock.
    let done = unsafe {
        libc::sigfillset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGTRAP, &raw const action, &raw mut before)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let _ = BEFORE.set(before);
    scan()?;
    hook_linker()
}

/// The files that have their traps. No other thread adds one before the guard is dropped.
pub(crate) fn scanned() -> MutexGuard<'static, Scanned> {
    SCANNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts traps into what was loaded since the last call. The linker calls it after what it has unloaded, too.
fn scan() -> io::Result<()> {
    let mut scanned = scanned();
    // SAFETY: what was stored there is never freed.
    let known = unsafe { SITES.load(SeqCst).as_ref() };
    let mut sites = known.cloned().unwrap_or_default();
    let mut ranges = vec![];
    let objects = objects();
    // What was unloaded has no traps where it is loaded again.
    scanned.retain(|file| objects.iter().any(|object| (object.name, object.bias) == *file));
    for object in objects {
        if scanned.contains(&(object.name, object.bias)) {
            continue;
        }
        scanned.push((object.name, object.bias));
        let skipped = std::env::var("POLDER_REHEARSE_SKIP").unwrap_or_default();
        let (left_out, kept): (Vec<_>, Vec<_>) =
            object.sites().into_iter().partition(|site| name(site) == skipped);
        if !left_out.is_empty() {
            // For `polder rehearse`, which refuses a site that no host has.
            std::fs::write(
                Path::new(&std::env::var("POLDER_REHEARSE").unwrap_or_default()).join("skipped"),
                "",
            )?;
        }
        let before = sites.len();
        sites.extend(kept.into_iter().map(|site| &*Box::leak(Box::new(site))));
        if sites.len() > before {
            ranges.push((object.texts, sites[before..].to_vec()));
        }
    }
    // An unloaded file's address may be another's now: the newest counts.
    sites.reverse();
    sites.sort_by_key(|site| site.at);
    sites.dedup_by_key(|site| site.at);
    SITES.store(Box::leak(Box::new(sites)), SeqCst);
    // Only now, because another thread may run into a trap at once.
    for (texts, sites) in ranges {
        for (begin, end) in texts {
            let within = sites.iter().filter(|site| (begin..end).contains(&site.at));
            write_traps(begin, end, within.map(|site| site.at))?;
        }
    }
    Ok(())
}

/// The name of a site, by which a user can leave it out.
fn name(site: &Site) -> String {
    format!("{}+{:#x}", site.file, site.offset)
}

/// Writes traps into code. Other threads may run it meanwhile: one byte changes at once.
fn write_traps(begin: u64, end: u64, places: impl Iterator<Item = u64>) -> io::Result<()> {
    let page = 4096;
    let (from, to) = (begin / page * page, end.next_multiple_of(page));
    let protect = |access| {
        // SAFETY: the pages hold code of a loaded file, which stays as it was but for the traps.
        match unsafe { libc::mprotect(from as *mut c_void, (to - from) as usize, access) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    protect(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    for place in places {
        // SAFETY: the first byte of an instruction, whose page may be written.
        unsafe { (place as *mut u8).write_volatile(TRAP) };
    }
    protect(libc::PROT_READ | libc::PROT_EXEC)
}

/// Has the handler called whenever the dynamic linker has loaded a file: it then calls a function of its own that does nothing.
fn hook_linker() -> io::Result<()> {
    // SAFETY: a symbol that the dynamic linker exports, of the C library's `struct r_debug`: its hook is the third word.
    let hook = unsafe {
        match libc::dlsym(libc::RTLD_DEFAULT, c"_r_debug".as_ptr()) {
            debug if debug.is_null() => None,
            debug => Some(debug.cast::<u64>().add(2).read()),
        }
    };
    const RETURN: u8 = 0xc3;
    const BRANCH_TARGET: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    let is_empty = |hook: &u64| {
        // SAFETY: at least a return stands there, and code behind it.
        let code = unsafe { std::slice::from_raw_parts(*hook as *const u8, 5) };
        code[0] == RETURN || code == [&BRANCH_TARGET[..], &[RETURN]].concat()
    };
    let Some(hook) = hook.filter(is_empty) else {
        return Err(io::Error::other("this C library does not tell debuggers of loaded files as glibc does"));
    };
    LINKER_HOOK.store(hook, SeqCst);
    write_traps(hook, hook + 1, [hook].into_iter())
}

/// Handles SIGTRAP.
extern "C" fn on_trap(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: errno is the thread's own, and the kernel passes the registers of the trap.
    let (errno, machine) =
        unsafe { (*libc::__errno_location(), &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext) };
    let program_counter = libc::REG_RIP as usize;
    let at = machine.gregs[program_counter] as u64 - 1;
    if at == LINKER_HOOK.load(SeqCst) {
        if let Err(error) = scan() {
            crate::refuse(&error.to_string());
        }
        // It returns: the address stands on the stack.
        let stack = libc::REG_RSP as usize;
        // SAFETY: the function was called just now.
        machine.gregs[program_counter] = unsafe { (machine.gregs[stack] as *const i64).read() };
        machine.gregs[stack] += 8;
    } else if let (Some(host), Some(site)) = (HOST.get(), site_at(at)) {
        act(host, site, machine);
        machine.gregs[program_counter] = at as i64 + i64::from(site.length);
    } else {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn site_at(at: u64) -> Option<&'static Site> {
    // SAFETY: what was stored there is never freed.
    let sites = unsafe { SITES.load(SeqCst).as_ref()? };
    Some(sites[sites.binary_search_by_key(&at, |site| site.at).ok()?])
}

/// What is no trap of ours is the program's.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    match BEFORE.get() {
        Some(before) if before.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            // SAFETY: a handler with this flag takes three arguments.
            let handler: Handler = unsafe { std::mem::transmute(before.sa_sigaction) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: the process ends as it would have without us.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal)
            };
        }
    }
}

/// Does what the instruction at a site does.
fn act(host: &Host, site: &Site, machine: &libc::mcontext_t) {
    let what = match site.action {
        Action::Flush => "flush",
        Action::WriteBack => "write-back",
        _ => "store",
    };
    host.count(&site.record, || Text::new(format_args!("{what} {}+{:#x}", site.file, site.offset)));
    let operand = address(&site.operand, machine);
    match site.action {
        Action::Flush | Action::WriteBack => {
            let Some(offset) = host.offset_of(operand, true) else { return };
            let line = offset / LINE;
            let is_flush = site.action == Action::Flush;
            host.move_line(line, if is_flush { Move::Flush } else { Move::WriteBack });
            host.note(line);
            disturb(host);
        }
        Action::Store { register, bytes } => {
            let value = general(machine, register).to_le_bytes();
            store(host, operand, &value[..bytes.into()]);
        }
        Action::StoreVector { register, bytes } => {
            let value = vector(machine, register.into());
            store(host, operand, &value[..bytes.into()]);
        }
        Action::StoreLine { register } => {
            // SAFETY: the program reads these 64 bytes there.
            let value = unsafe { (operand as *const [u8; 64]).read_unaligned() };
            store(host, general(machine, register), &value);
        }
    }
}

/// The adversary moves a line from within the program, between two of its instructions, which a process beside it hardly meets.
fn disturb(host: &Host) {
    if host.random().is_multiple_of(16)
        && let Some(line) = host.likely_line()
    {
        host.move_line(line, if host.random().is_multiple_of(2) { Move::Prefetch } else { Move::WriteBack });
    }
}

/// Stores around the caches, or outside of the file as any store.
fn store(host: &Host, address: u64, bytes: &[u8]) {
    match host.offset_of(address, false) {
        Some(offset) => host.store(offset, bytes),
        // SAFETY: the program stores these bytes there.
        None => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) },
    }
}

fn address(operand: &Address, machine: &libc::mcontext_t) -> u64 {
    let base = operand.base.map_or(0, |base| general(machine, base));
    let index = operand.index.map_or(0, |(index, scale)| general(machine, index).wrapping_mul(scale));
    base.wrapping_add(index).wrapping_add(operand.displacement)
}

/// A general register, by its number in instructions.
fn general(machine: &libc::mcontext_t, register: u8) -> u64 {
    const IN_ORDER: [c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    machine.gregs[IN_ORDER[usize::from(register)] as usize] as u64
}

/// A vector register, from the frame that XSAVE wrote: 16 bytes of the first sixteen are in its old part, and CPUID says where
/// the upper halves of those and the other sixteen registers lie.
fn vector(machine: &libc::mcontext_t, register: usize) -> [u8; 64] {
    let mut value = [0; 64];
    let mut read = |offset: usize, to: std::ops::Range<usize>| {
        let from = machine.fpregs.cast::<u8>().wrapping_add(offset);
        // SAFETY: the frame is as long as CPUID says, because the CPU has the register.
        unsafe { std::ptr::copy_nonoverlapping(from, value[to.clone()].as_mut_ptr(), to.len()) };
    };
    let part = |leaf| __cpuid_count(0xd, leaf).ebx as usize;
    if register < 16 {
        read(160 + 16 * register, 0..16);
        for (leaf, bytes) in [(2, 16..32), (6, 32..64)] {
            if part(leaf) != 0 {
                read(part(leaf) + bytes.len() * register, bytes);
            }
        }
    } else {
        read(part(7) + 64 * (register - 16), 0..64);
    }
    value
}
