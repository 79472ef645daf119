//! NUMA nodes by the kernel's word: binds pages to one, and asks which node each page lies on.

use std::fs;
use std::io;
use std::ptr::NonNull;

use crate::buffer::PAGE;
use crate::tier::TierError;

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

/// The node of each page, as the kernel says; `None` for a page that was never touched.
pub(crate) fn nodes(at: NonNull<u8>, bytes: usize) -> io::Result<Vec<Option<usize>>> {
    let pages: Vec<_> = (0..bytes).step_by(PAGE).map(|offset| at.as_ptr().wrapping_add(offset)).collect();
    let mut nodes = vec![0_i32; pages.len()];
    // SAFETY: both arrays are live and have `pages.len()` entries; without target nodes nothing is moved.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<i32>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    match rc {
        0 => Ok(nodes.into_iter().map(|node| usize::try_from(node).ok()).collect()),
        _ => Err(io::Error::last_os_error()),
    }
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
