//! A made-up host to try the agent on: files of `/proc` and `/sys` below a folder, with the text that Linux 6.12 gave in a guest of the lab.
//!
//! Nothing moves there. A dry run, `check`, `top` and `doctor` say what they would of such a host.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

const GIB: u64 = 1 << 30;
const NODES: &str = "/sys/devices/system/node";

/// Bytes of a service on the fast and on the slow tier, and its cgroup.
pub type ExampleService<'a> = (&'a str, [u64; 2]);

/// The policy of the example.
const POLICY: &str = "\
# A policy for the made-up host of this folder.
[service.cache]
unit = \"cache.service\"
tier = \"opt-in\"
local_low = 0.60     # below this share of fast memory its neighbours give way, and its pages come up
local_high = 0.70    # above this share the service gives way

[service.web]
unit = \"web.service\"
tier = \"opt-out\"

[service.batch]
unit = \"batch.service\"
tier = \"background\"
";

/// Services of the example: one over its bound, one that is opted out and kept to the fast node, and one on the wrong tier.
const SERVICES: [ExampleService<'static>; 3] = [
    ("/system.slice/cache.service", [36 * GIB, 4 * GIB]),
    ("/system.slice/web.service", [12 * GIB, 0]),
    ("/system.slice/batch.service", [6 * GIB, 2 * GIB]),
];

/// Writes the example: a host of 64 + 128 GiB with three services below `root`, and `policy.toml` there.
///
/// # Errors
/// As writing fails, with an empty folder; also where `root` is there and is no empty folder.
pub fn write_example(root: &Path) -> io::Result<()> {
    match fs::create_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && root.is_dir() => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let why = "it is no folder; name a folder that is not there";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        made => made?,
    }
    if fs::read_dir(root)?.next().is_some() {
        let why = "it is not empty; name a folder that is not there";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    let written = write_files(root);
    if written.is_err() {
        // It is tried again, perhaps, and then the folder has to be empty.
        let left = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
        left.for_each(|path| drop(fs::remove_dir_all(&path).or_else(|_| fs::remove_file(path))));
    }
    written
}

fn write_files(root: &Path) -> io::Result<()> {
    write_host(root, [64 * GIB, 128 * GIB], &SERVICES)?;
    keep_to_fast(root, SERVICES[1].0)?;
    // HMAT: the pace follows from it.
    for (node, ns, mbps) in [(0, 80, 200_000), (1, 250, 40_000)] {
        let folder = format!("{NODES}/node{node}/access0/initiators");
        for (name, value) in [("latency", ns), ("bandwidth", mbps)] {
            put(root, &format!("{folder}/read_{name}"), &format!("{value}\n"))?;
            put(root, &format!("{folder}/write_{name}"), &format!("{value}\n"))?;
        }
    }
    put(root, "policy.toml", POLICY)
}

/// Writes a host without HMAT and with pages of 4 KiB, with a fast node 0 and a slow node 1 of so many bytes, and with these services.
///
/// # Errors
/// As writing fails.
pub fn write_host(root: &Path, tiers: [u64; 2], services: &[ExampleService<'_>]) -> io::Result<()> {
    write_host_with_pages(root, tiers, services, 4096)
}

/// The same with pages of so many bytes, such as the 64 KiB of some hosts with Arm's CPUs.
///
/// # Errors
/// As writing fails.
pub fn write_host_with_pages(
    root: &Path,
    tiers: [u64; 2],
    services: &[ExampleService<'_>],
    page: u64,
) -> io::Result<()> {
    const TIERS: &str = "/sys/devices/virtual/memory_tiering";
    let controllers = "cpuset cpu io memory hugetlb pids\n";
    for (path, text) in [
        (&*format!("{NODES}/online"), "0-1\n"),
        (&format!("{NODES}/has_memory"), "0-1\n"),
        (&format!("{NODES}/has_cpu"), "0\n"),
        (&format!("{NODES}/node0/distance"), "10 20\n"),
        (&format!("{NODES}/node1/distance"), "20 10\n"),
        (&format!("{TIERS}/memory_tier4/nodelist"), "0\n"),
        (&format!("{TIERS}/memory_tier90/nodelist"), "1\n"),
        ("/sys/kernel/mm/numa/demotion_enabled", "false\n"),
        ("/sys/devices/system/memory/auto_online_blocks", "offline\n"),
        ("/proc/sys/kernel/osrelease", "6.12.0\n"),
        ("/proc/sys/kernel/numa_balancing", "1\n"),
        ("/proc/sys/kernel/numa_balancing_promote_rate_limit_MBps", "65536\n"),
        ("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n"),
        ("/proc/pressure/memory", include_str!("../share/recorded/memory.pressure")),
        ("/proc/vmstat", include_str!("../share/recorded/vmstat")),
        ("/sys/fs/cgroup/cgroup.controllers", controllers),
        ("/sys/fs/cgroup/cgroup.subtree_control", controllers),
        ("/sys/fs/cgroup/cpuset.mems.effective", "0-1\n"),
    ] {
        put(root, path, text)?;
    }
    let used = [0, 1].map(|node| services.iter().map(|(_, bytes)| bytes[node]).sum::<u64>());
    let mut zones = String::new();
    for (node, (all, used)) in tiers.into_iter().zip(used).enumerate() {
        let free = all.saturating_sub(used);
        let mut text = String::new();
        for line in include_str!("../share/recorded/meminfo").lines() {
            let name = line.split_whitespace().nth(2).unwrap_or_default();
            let bytes = match name {
                "MemTotal:" => all,
                "MemFree:" => free,
                "MemUsed:" => all - free,
                _ => 0,
            };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "Node {node} {name} {} kB", bytes >> 10);
        }
        put(root, &format!("{NODES}/node{node}/meminfo"), &text)?;
        let (zone, pages) = (["Normal", "Movable"][node], all / page);
        let _ = writeln!(
            zones,
            "Node {node}, zone {zone:>8}\n  pages free     {}\n        spanned  {pages}\n        present  {pages}\n        managed  {pages}",
            free / page
        );
    }
    put(root, "/proc/zoneinfo", &zones)?;
    services.iter().try_for_each(|service| write_service(root, *service))
}

fn write_service(root: &Path, (cgroup, [fast, slow]): ExampleService<'_>) -> io::Result<()> {
    let recorded = include_str!("../share/recorded/memory.numa_stat");
    let (_, rest) = recorded.split_once('\n').unwrap_or_default();
    for (name, text) in [
        ("memory.numa_stat", &*format!("anon N0={fast} N1={slow}\n{rest}")),
        ("memory.stat", include_str!("../share/recorded/memory.stat")),
        ("memory.pressure", include_str!("../share/recorded/memory.pressure")),
        ("memory.events", include_str!("../share/recorded/memory.events")),
        ("memory.reclaim", ""),
        ("cpuset.mems", "\n"),
        ("cpuset.mems.effective", "0-1\n"),
    ] {
        put(root, &format!("/sys/fs/cgroup{cgroup}/{name}"), text)?;
    }
    Ok(())
}

/// The cgroup may use the fast node alone.
///
/// # Errors
/// As writing fails.
pub fn keep_to_fast(root: &Path, cgroup: &str) -> io::Result<()> {
    ["cpuset.mems", "cpuset.mems.effective"]
        .into_iter()
        .try_for_each(|name| put(root, &format!("/sys/fs/cgroup{cgroup}/{name}"), "0\n"))
}

fn put(root: &Path, path: &str, text: &str) -> io::Result<()> {
    let path = root.join(path.trim_start_matches('/'));
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, text)
}
