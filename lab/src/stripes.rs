//! Scenario: ranges that are bound to real nodes, striped over them and asked for, and what the kernel refuses.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use polder_lab::check::{Checks, Failed};
use polder_offload::{Location, PAGE, Range, TierError};

use crate::machine::{read, write};

const MIB: usize = 1 << 20;
/// Bytes of each stripe, in MiB, with its node: what an odd placement comes to.
const STRIPES: [(usize, usize); 4] = [(16, 0), (24, 1), (8, 0), (3, 1)];
const CGROUP: &str = "/sys/fs/cgroup/ranges";

/// Runs the scenario, and returns how many checks held.
pub(crate) fn run() -> Result<u32, Failed> {
    let mut checks = Checks::default();
    println!("ranges:");
    striped(&mut checks)?;
    moved(&mut checks)?;
    refused(&mut checks)?;
    Ok(checks.0)
}

fn striped(checks: &mut Checks) -> Result<(), Failed> {
    let all = STRIPES.iter().map(|(mib, _)| mib * MIB).sum();
    let mut range = Range::new(all).map_err(text)?;
    checks.check(
        range.locate().map_err(text)? == [(Location::Untouched, all)].into(),
        "a range begins nowhere",
    )?;
    let mut begin = 0;
    for (mib, node) in STRIPES {
        range.bind(begin, mib * MIB, node).map_err(text)?;
        begin += mib * MIB;
    }
    for at in (0..all).step_by(PAGE) {
        range.copy_in(at, &at.to_le_bytes());
    }
    let on_node = |node| STRIPES.iter().filter(|it| it.1 == node).map(|it| it.0 * MIB).sum::<usize>();
    let expected = [(Location::Node(0), on_node(0)), (Location::Node(1), on_node(1))];
    show(&range)?;
    checks.check(range.locate().map_err(text)? == expected.into(), "move_pages names each stripe's node")?;
    let maps = numa_maps(&range)?;
    checks.check(
        maps == [(0, on_node(0)), (1, on_node(1))].into(),
        "numa_maps counts the same bytes on each node",
    )?;
    let (start, bytes) = (range.address().addr(), range.bytes());
    drop(range);
    checks.check(numa_maps_of(start, bytes)?.is_empty(), "a range that is dropped has no byte on any node")
}

/// Pages move with what they hold, and without a policy they come from the node of the CPU. NUMA balancing unmaps such pages for a
/// moment, to see which threads use them. They were touched all the same.
fn moved(checks: &mut Checks) -> Result<(), Failed> {
    let all = 20 * MIB;
    let mut range = Range::new(all).map_err(text)?;
    let before = unmapped()?;
    for at in (0..all).step_by(PAGE) {
        range.copy_in(at, &at.to_le_bytes());
    }
    // From 6.19 on the kernel leaves out huge pages of the node on which a process runs that has one thread (folio_can_map_prot_numa
    // in change_huge_pmd).
    let (ends, end) = mpsc::channel::<()>();
    let second = std::thread::spawn(move || end.recv());
    // It scans a process by the CPU time that it has used, first after a second.
    let begin = Instant::now();
    while unmapped()? == before && begin.elapsed() < Duration::from_secs(60) {}
    drop(ends);
    drop(second.join());
    println!("  NUMA balancing unmapped {} pages", unmapped()? - before);
    checks.check(unmapped()? > before, "NUMA balancing has looked at the process")?;
    show(&range)?;
    checks.check(
        range.locate().map_err(text)? == [(Location::Node(0), all)].into(),
        "what is bound nowhere lies on node 0 (the control of the next)",
    )?;
    range.bind(0, all, 1).map_err(text)?;
    checks.check(
        range.locate().map_err(text)? == [(Location::Node(1), all)].into(),
        "a bind moves what was touched before to node 1",
    )?;
    let mut word = [0; 8];
    let kept = (0..all).step_by(PAGE).all(|at| {
        range.copy_out(at, &mut word);
        usize::from_le_bytes(word) == at
    });
    checks.check(kept, "pages that moved hold what they held")
}

fn refused(checks: &mut Checks) -> Result<(), Failed> {
    let mut range = Range::new(512 * MIB).map_err(text)?;
    let refusal = range.bind(0, MIB, 2);
    checks.check(
        matches!(refusal, Err(TierError::NoNode { node: 2 })),
        "a node that is not there is refused",
    )?;
    let refusal = range.bind(0, 512 * MIB, 1);
    println!("  {}", refusal.as_ref().err().map(ToString::to_string).unwrap_or_default());
    checks.check(
        matches!(refusal, Err(TierError::TooSmall { node: 1, .. })) && numa_maps(&range)?.is_empty(),
        "twice the slow node is refused before a page is touched, and the process lives",
    )?;
    std::fs::create_dir_all(CGROUP).map_err(|error| format!("{CGROUP}: {error}"))?;
    write(&format!("{CGROUP}/cpuset.mems"), "0")?;
    write(&format!("{CGROUP}/cgroup.procs"), "0")?;
    let refusal = range.bind(0, MIB, 1);
    write("/sys/fs/cgroup/cgroup.procs", "0")?;
    println!("  {}", refusal.as_ref().err().map(ToString::to_string).unwrap_or_default());
    let is_named = matches!(&refusal, Err(TierError::NotAllowed { node: 1, allowed }) if allowed == &[0]);
    checks.check(is_named, "a node that the cpuset leaves out is refused by that name")?;
    range.bind(0, MIB, 1).map_err(text)?;
    checks.check(
        numa_maps(&range)? == [(1, MIB)].into(),
        "outside that cpuset the same bind works (the control of the last)",
    )
}

/// Pages that NUMA balancing has unmapped so far, of the whole machine.
fn unmapped() -> Result<u64, Failed> {
    let all = read("/proc/vmstat")?;
    let count = all.lines().find_map(|line| line.strip_prefix("numa_pte_updates "));
    count.and_then(|it| it.parse().ok()).ok_or_else(|| "/proc/vmstat counts no numa_pte_updates".into())
}

fn show(range: &Range) -> Result<(), Failed> {
    for (place, bytes) in range.locate().map_err(text)? {
        println!("  {place}: {} MiB", bytes / MIB);
    }
    Ok(())
}

/// Bytes of a range on each node, as /proc/self/numa_maps counts them.
fn numa_maps(range: &Range) -> Result<BTreeMap<usize, usize>, Failed> {
    numa_maps_of(range.address().addr(), range.bytes())
}

fn numa_maps_of(start: usize, length: usize) -> Result<BTreeMap<usize, usize>, Failed> {
    let mut bytes = BTreeMap::new();
    for line in read("/proc/self/numa_maps")?.lines() {
        let mut fields = line.split_ascii_whitespace();
        let at = fields.next().and_then(|at| usize::from_str_radix(at, 16).ok());
        if !at.is_some_and(|at| (start..start + length).contains(&at)) {
            continue;
        }
        for field in fields {
            let count = field.strip_prefix('N').and_then(|it| it.split_once('='));
            if let Some((node, pages)) = count
                && let (Ok(node), Ok(pages)) = (node.parse::<usize>(), pages.parse::<usize>())
            {
                *bytes.entry(node).or_insert(0) += pages * PAGE;
            }
        }
    }
    Ok(bytes)
}

fn text(error: TierError) -> Failed {
    error.to_string()
}
