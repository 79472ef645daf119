//! NUMA nodes by the kernel's word: binds pages to one, and asks which node each page lies on.

use std::fs;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;

use crate::buffer::PAGE;
use crate::error::TierError;

/// What `mbind` does with pages that lie elsewhere (linux/mempolicy.h): fails if one cannot be moved.
const MPOL_MF_STRICT: libc::c_uint = 1;
/// Moves them.
const MPOL_MF_MOVE: libc::c_uint = 2;
/// Has `get_mempolicy` name the nodes that this process may use.
const MPOL_F_MEMS_ALLOWED: libc::c_ulong = 4;

/// Words of a set of nodes; `MAX_NUMNODES` of x86-64 is 1024.
const WORDS: usize = 16;

/// The kernel keeps about this part of a node for itself, and kills processes before it gives that away.
const KEPT: u64 = 50;

/// How often a page is asked for again that NUMA balancing may have unmapped, which it does once a second at most.
const TRIES: usize = 3;

/// Has pages that are touched from now on come from one node, and moves those that were touched before.
///
/// # Safety
/// `[at, at + bytes)` is a mapping of whole pages that the caller owns.
pub(crate) unsafe fn bind(at: NonNull<u8>, bytes: usize, node: usize) -> Result<(), TierError> {
    let mut nodes = [0_u64; WORDS];
    let word = nodes.get_mut(node / 64).ok_or(TierError::NoNode { node })?;
    *word |= 1 << (node % 64);
    // SAFETY: the pages are the caller's; `nodes` is a live set of as many bits as are given.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            at.as_ptr(),
            bytes,
            libc::MPOL_BIND,
            nodes.as_ptr(),
            WORDS * 64,
            MPOL_MF_MOVE | MPOL_MF_STRICT,
        )
    };
    if rc == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    Err(match (source.raw_os_error(), allowed()) {
        (Some(libc::EINVAL), _) if room(node).is_none() => TierError::NoNode { node },
        (Some(libc::EINVAL), Ok(allowed)) if !allowed.contains(&node) => {
            TierError::NotAllowed { node, allowed }
        }
        _ => TierError::Node { node, source },
    })
}

/// The node of each page, as the kernel says; `None` for a page that was never written.
///
/// NUMA balancing unmaps pages for a moment, to see which processes use them. Kernels from 6.1 to 6.5 then say of such a page what they say of an
/// untouched one. So a page that /proc/self/pagemap has in memory is read, which maps it again, and asked for once more. A page that was
/// only ever read is in memory too, as the kernel's page of zeros, and keeps its `None`.
///
/// # Safety
/// `[at, at + bytes)` is a readable mapping of whole pages.
pub(crate) unsafe fn nodes(at: NonNull<u8>, bytes: usize) -> io::Result<Vec<Option<usize>>> {
    let page = |index: usize| at.as_ptr().wrapping_add(index * PAGE);
    let mut nodes = status(&(0..bytes / PAGE).map(page).collect::<Vec<_>>())?;
    for _ in 0..TRIES {
        let lacking = (0..nodes.len()).filter(|&index| nodes[index] < 0).collect::<Vec<_>>();
        let lacking = in_memory(at, &lacking)?;
        if lacking.is_empty() {
            break;
        }
        for &index in &lacking {
            // SAFETY: a page of the caller's readable mapping.
            unsafe { page(index).read_volatile() };
        }
        let again = status(&lacking.iter().map(|&index| page(index)).collect::<Vec<_>>())?;
        for (index, node) in lacking.into_iter().zip(again) {
            nodes[index] = node;
        }
    }
    Ok(nodes.into_iter().map(|node| usize::try_from(node).ok()).collect())
}

/// What the kernel says of each page: its node, or a negative error.
fn status(pages: &[*mut u8]) -> io::Result<Vec<i32>> {
    ask_or_move(0, &pages.iter().map(|page| page.addr()).collect::<Vec<_>>(), None)
}

/// Moves those of the pages of another process to `node` that no second process maps, and says where each page lies then: its node, or a
/// negative error number. With [`None`] nothing moves. `pages` are addresses in that process.
///
/// # Errors
/// As the kernel refuses: ESRCH where the process is gone, EPERM without `CAP_SYS_PTRACE`, EACCES where its cpuset leaves the node out.
pub fn move_pages(pid: NonZero<u32>, pages: &[usize], node: Option<u32>) -> io::Result<Vec<i32>> {
    if let Some(node) = node {
        match ask_or_move(pid.get(), pages, Some(node)) {
            // No page is there that could move.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            other => drop(other?),
        }
    }
    ask_or_move(pid.get(), pages, None)
}

/// The call itself. With a node the answer is about the move, and a page that could not move may have any value.
fn ask_or_move(pid: u32, pages: &[usize], node: Option<u32>) -> io::Result<Vec<i32>> {
    let node = node.map(i32::try_from).transpose().map_err(io::Error::other)?;
    let targets = node.map(|node| vec![node; pages.len()]);
    let mut nodes = vec![-1_i32; pages.len()];
    // SAFETY: the arrays are live and have `pages.len()` entries, or are null as allowed. Pages keep their bytes and their addresses.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid,
            pages.len(),
            pages.as_ptr(),
            targets.as_ref().map_or(std::ptr::null(), |targets| targets.as_ptr()),
            nodes.as_mut_ptr(),
            if node.is_some() { MPOL_MF_MOVE } else { 0 },
        )
    };
    if rc >= 0 { Ok(nodes) } else { Err(io::Error::last_os_error()) }
}

/// Those of the pages at `at` that are in memory, by the word of /proc/self/pagemap.
fn in_memory(at: NonNull<u8>, pages: &[usize]) -> io::Result<Vec<usize>> {
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Ok(vec![]) };
    let mut entries = vec![0; (last - first + 1) * 8];
    let begin = at.as_ptr().addr() / PAGE + first;
    fs::File::open("/proc/self/pagemap")?.read_exact_at(&mut entries, begin as u64 * 8)?;
    let is_there = |index: &usize| entries[(index - first) * 8 + 7] >> 7 == 1;
    Ok(pages.iter().copied().filter(is_there).collect())
}

/// The nodes that this process may use.
fn allowed() -> io::Result<Vec<usize>> {
    let mut nodes = [0_u64; WORDS];
    // SAFETY: `nodes` is a live set of as many bits as are given; neither a mode nor an address is asked for.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            std::ptr::null_mut::<libc::c_int>(),
            nodes.as_mut_ptr(),
            WORDS * 64,
            std::ptr::null_mut::<u8>(),
            MPOL_F_MEMS_ALLOWED,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((0..WORDS * 64).filter(|node| nodes[node / 64] >> (node % 64) & 1 == 1).collect())
}

/// Bytes that a node can still give, free or page cache of files; `None` if there is no such node.
pub(crate) fn room(node: usize) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).ok()?;
    let kilobytes = |name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.split_ascii_whitespace().nth(2) == Some(name))?;
        line.split_ascii_whitespace().nth(3)?.parse().ok()
    };
    let total = kilobytes("MemTotal:").filter(|total| *total > 0)?;
    let cached = ["Active(file):", "Inactive(file):"].into_iter().filter_map(kilobytes).sum::<u64>();
    Some((kilobytes("MemFree:")? + cached).saturating_sub(total / KEPT) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_process_are_asked_for_by_its_pid() {
        let pages = vec![1_u8; 4 * PAGE];
        let first = pages.as_ptr().addr().next_multiple_of(PAGE);
        let own = NonZero::new(std::process::id()).unwrap();
        let (asked, mapped) = (move_pages(own, &[first, first + PAGE], None).unwrap(), &pages);
        assert!(asked.iter().all(|node| *node >= 0), "{asked:?}");
        let node = asked[0].unsigned_abs();
        assert_eq!(move_pages(own, &[first], Some(node)).unwrap(), [asked[0]], "it lies there already");
        assert_eq!(move_pages(own, &[0], Some(node)).unwrap().len(), 1, "no page is there");
        assert_eq!(mapped[0], 1);
        let none = NonZero::new(u32::MAX >> 1).unwrap();
        assert_eq!(move_pages(none, &[first], None).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
