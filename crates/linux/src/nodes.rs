//! NUMA nodes and the tiers that they form.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::KernelError;
use crate::kernel::{Kernel, number};

pub(crate) const NODES: &str = "/sys/devices/system/node";
pub(crate) const TIERS: &str = "/sys/devices/virtual/memory_tiering";

/// The memory nodes of a machine, by tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Nodes of the fast tier.
    pub fast: BTreeSet<u32>,
    /// Nodes of all slower tiers.
    pub slow: BTreeSet<u32>,
    /// How many tiers the kernel makes of them. With fewer than two it demotes nothing.
    pub kernel_tiers: usize,
}

impl Tiers {
    /// Asks the kernel. Nodes of its first memory tier are fast; a kernel that makes one tier of all has those with CPUs fast, on-line or not.
    /// Memory of a device, such as a GPU's, is in no tier.
    ///
    /// # Errors
    /// [`KernelError::Missing`] where no node is slow; otherwise as reading fails.
    pub fn discover(kernel: &impl Kernel) -> Result<Self, KernelError> {
        let memory = nodes_in(kernel, &format!("{NODES}/has_memory"))?;
        let with_cpus = nodes_with_cpus(kernel, &memory)?;
        let devices = device_nodes(kernel, &(&memory - &with_cpus))?;
        let memory = &memory - &devices;
        let mut tiers = kernel_tiers(kernel)?;
        tiers.retain(|_, nodes| !nodes.is_disjoint(&memory));
        let fast: BTreeSet<u32> = match tiers.values().next() {
            Some(first) if tiers.len() > 1 => memory.intersection(first).copied().collect(),
            _ => memory.intersection(&with_cpus).copied().collect(),
        };
        let slow: BTreeSet<u32> = memory.difference(&fast).copied().collect();
        if fast.is_empty() || slow.is_empty() {
            let online = show_nodes(&memory);
            let of_devices = match devices.is_empty() {
                true => String::new(),
                false => format!("; nodes {} are memory of a device, such as a GPU's", show_nodes(&devices)),
            };
            return Err(KernelError::Missing(format!(
                "this machine has one tier of memory (nodes {online}{of_devices}); tiering needs a second, such as CXL \
                 memory that is online as system RAM (daxctl reconfigure-device --mode=system-ram)"
            )));
        }
        Ok(Self { fast, slow, kernel_tiers: tiers.len() })
    }

    /// Checks that the kernel demotes from the fast nodes to the slow ones. One that has them in one tier would answer
    /// `memory.reclaim` by evicting pages.
    ///
    /// # Errors
    /// [`KernelError::Missing`] with the reason and the remedy.
    pub fn check_demotion(&self, kernel: &impl Kernel) -> Result<(), KernelError> {
        if self.kernel_tiers > 1 {
            return Ok(());
        }
        let release = release(kernel)?;
        let nodes = show_nodes(&self.all());
        let found = match self.kernel_tiers {
            0 => format!("Linux {release} has no memory tiers ({TIERS})"),
            _ => format!("Linux {release} puts nodes {nodes} into one memory tier"),
        };
        Err(KernelError::Missing(format!(
            "{found}: it demotes nothing, and memory.reclaim would evict pages; run Linux 6.12 or later, or bring the \
             slow memory by dax_kmem (daxctl reconfigure-device --mode=system-ram), which makes a tier of its own"
        )))
    }

    /// All nodes.
    #[must_use]
    pub fn all(&self) -> BTreeSet<u32> {
        self.fast.union(&self.slow).copied().collect()
    }

    /// Memory of the fast tier.
    ///
    /// # Errors
    /// As reading fails.
    pub fn fast_memory(&self, kernel: &impl Kernel) -> Result<TierMemory, KernelError> {
        memory_of(kernel, &self.fast)
    }

    /// Memory of the slow tier.
    ///
    /// # Errors
    /// As reading fails.
    pub fn slow_memory(&self, kernel: &impl Kernel) -> Result<TierMemory, KernelError> {
        memory_of(kernel, &self.slow)
    }

    /// The fast node of `allowed` that pages of a service go up to, and its memory: of those with room the one that most of its `threads` ran
    /// on, and of several such the one with most free memory; [`None`] where there is none.
    ///
    /// # Errors
    /// As reading fails.
    pub fn nearest(
        &self,
        kernel: &impl Kernel,
        allowed: &BTreeSet<u32>,
        threads: &BTreeMap<u32, usize>,
    ) -> Result<Option<(u32, TierMemory)>, KernelError> {
        let memory = |node: &u32| Ok((*node, memory_of(kernel, &BTreeSet::from([*node]))?));
        let nodes = self.fast.intersection(allowed).map(memory).collect::<Result<Vec<_>, KernelError>>()?;
        let threads_on = |node: &u32| threads.get(node).copied().unwrap_or(0);
        Ok(nodes.into_iter().max_by_key(|(node, memory)| {
            (memory.free > memory.kept_by_kernel(), threads_on(node), memory.free)
        }))
    }

    /// Bandwidth of each node to its best initiator by HMAT, in MB/s.
    ///
    /// # Errors
    /// [`KernelError::Missing`] where HMAT does not give it for each node.
    pub fn bandwidths(&self, kernel: &impl Kernel) -> Result<BTreeMap<u32, u64>, KernelError> {
        let mut bandwidths = BTreeMap::new();
        for node in self.all() {
            let path = format!("{NODES}/node{node}/access0/initiators/read_bandwidth");
            let rate = kernel.read(&path).ok().and_then(|text| text.trim().parse::<u64>().ok());
            let Some(rate) = rate.filter(|rate| *rate > 0) else {
                return Err(KernelError::Missing(format!(
                    "HMAT gives no bandwidth of node {node} ({path}); give the weights as numbers"
                )));
            };
            bandwidths.insert(node, rate);
        }
        Ok(bandwidths)
    }

    /// Bytes a second that the slow nodes carry together, by HMAT or by what their devices say: of reads and writes the fewer. [`None`] where
    /// that of a node is not known.
    pub fn slow_bandwidth(&self, kernel: &impl Kernel) -> Option<f64> {
        let mbps = |node: &u32, access: &str| {
            let text =
                kernel.read(&format!("{NODES}/node{node}/access0/initiators/{access}_bandwidth")).ok()?;
            text.trim().parse::<u64>().ok().filter(|rate| *rate > 0)
        };
        let of_node = |node| Some(mbps(node, "read")?.min(mbps(node, "write")?) as f64 * 1e6);
        self.slow.iter().map(of_node).sum()
    }
}

/// The kernel's release, such as `6.12.0-amd64`.
pub(crate) fn release(kernel: &impl Kernel) -> Result<String, KernelError> {
    Ok(kernel.read("/proc/sys/kernel/osrelease")?.trim().to_owned())
}

/// Major and minor number of a release such as `6.12.0-amd64`.
pub(crate) fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(['.', '-', '+']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Memory of a tier, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierMemory {
    /// All of it.
    pub bytes: u64,
    /// What is free.
    pub free: u64,
}

impl TierMemory {
    /// What the kernel keeps free of it is about this much.
    #[must_use]
    pub const fn kept_by_kernel(self) -> u64 {
        self.bytes / 64
    }
}

fn memory_of(kernel: &impl Kernel, nodes: &BTreeSet<u32>) -> Result<TierMemory, KernelError> {
    let mut memory = TierMemory::default();
    for node in nodes {
        let path = format!("{NODES}/node{node}/meminfo");
        let text = kernel.read(&path)?;
        let field = |name: &str| {
            let value = text.lines().find_map(|line| Some(line.split_once(name)?.1))?;
            number(value.trim().strip_suffix("kB")?)?.checked_mul(1 << 10)
        };
        let (Some(bytes), Some(free)) = (field("MemTotal:"), field("MemFree:")) else {
            let expected = "lines such as Node 0 MemFree: 123 kB";
            return Err(KernelError::Format { path, text, expected });
        };
        memory.bytes += bytes;
        memory.free += free;
    }
    Ok(memory)
}

/// Nodes with CPUs, and those of `memory` whose CPUs are off-line: a node's folder has a link to each CPU.
pub(crate) fn nodes_with_cpus(
    kernel: &impl Kernel,
    memory: &BTreeSet<u32>,
) -> Result<BTreeSet<u32>, KernelError> {
    let mut nodes = nodes_in(kernel, &format!("{NODES}/has_cpu"))?;
    let is_cpu = |name: &String| name.strip_prefix("cpu").is_some_and(|id| id.parse::<u32>().is_ok());
    for node in memory {
        let names = kernel.list(&format!("{NODES}/node{node}")).unwrap_or_default();
        if names.iter().any(is_cpu) {
            nodes.insert(*node);
        }
    }
    Ok(nodes)
}

/// Those of `nodes`, which have memory and no CPUs, that are memory of a device such as a GPU. Services do not live there, and no tier has
/// them. NVIDIA's driver names its own. Of others ACPI says that the node starts accesses itself, or that some node cannot reach it (SLIT, 255).
pub(crate) fn device_nodes(
    kernel: &impl Kernel,
    nodes: &BTreeSet<u32>,
) -> Result<BTreeSet<u32>, KernelError> {
    const GPUS: &str = "/proc/driver/nvidia/gpus";
    const UNREACHABLE: &str = "255";
    let mut devices = match nodes_in(kernel, &format!("{NODES}/has_generic_initiator")) {
        Err(error) if error.is_gone() => BTreeSet::new(),
        other => other?,
    };
    for gpu in kernel.list(GPUS).unwrap_or_default() {
        let status = kernel.read(&format!("{GPUS}/{gpu}/numa_status")).unwrap_or_default();
        let node = status.lines().find_map(|line| line.strip_prefix("Node:")?.trim().parse::<u32>().ok());
        devices.extend(node);
    }
    for node in nodes {
        let row = kernel.read(&format!("{NODES}/node{node}/distance")).unwrap_or_default();
        if row.split_ascii_whitespace().any(|distance| distance == UNREACHABLE) {
            devices.insert(*node);
        }
    }
    Ok(&devices & nodes)
}

/// Pages that the allocator manages in each zone of each node.
pub(crate) fn managed_pages(kernel: &impl Kernel) -> BTreeMap<(u32, String), u64> {
    let mut managed = BTreeMap::new();
    let mut zone = None;
    for line in kernel.read("/proc/zoneinfo").unwrap_or_default().lines() {
        if let Some((node, name)) = line.strip_prefix("Node ").and_then(|line| line.split_once(", zone")) {
            zone = node.parse::<u32>().ok().map(|node| (node, name.trim().to_owned()));
        } else if let (Some(pages), Some(zone)) = (line.trim().strip_prefix("managed"), &zone) {
            managed.insert(zone.clone(), pages.trim().parse::<u64>().unwrap_or(0));
        }
    }
    managed
}

/// Bytes of a page, also of a recorded tree: `/proc/zoneinfo` counts the memory of a node in pages, and its `meminfo` in bytes. 4,096 where
/// they do not tell.
#[must_use]
pub fn page_bytes(kernel: &impl Kernel) -> u64 {
    let mut pages: BTreeMap<u32, u64> = BTreeMap::new();
    for ((node, _), managed) in managed_pages(kernel) {
        *pages.entry(node).or_default() += managed;
    }
    let bytes_a_page = pages.iter().filter(|(_, pages)| **pages > 0).find_map(|(node, pages)| {
        Some(memory_of(kernel, &BTreeSet::from([*node])).ok()?.bytes / pages).filter(|bytes| *bytes > 0)
    });
    match bytes_a_page {
        Some(32_769..) => 64 << 10,
        Some(8_193..) => 16 << 10,
        _ => 4 << 10,
    }
}

/// The kernel's memory tiers, the fastest first; none where it has none.
fn kernel_tiers(kernel: &impl Kernel) -> Result<BTreeMap<u32, BTreeSet<u32>>, KernelError> {
    let names = match kernel.list(TIERS) {
        Ok(names) => names,
        Err(error) if error.is_gone() => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut tiers = BTreeMap::new();
    for name in names {
        let Some(rank) = name.strip_prefix("memory_tier").and_then(|rank| rank.parse().ok()) else {
            continue;
        };
        tiers.insert(rank, nodes_in(kernel, &format!("{TIERS}/{name}/nodelist"))?);
    }
    Ok(tiers)
}

pub(crate) fn nodes_in(kernel: &impl Kernel, path: &str) -> Result<BTreeSet<u32>, KernelError> {
    let text = kernel.read(path)?;
    parse_nodes(&text).ok_or_else(|| KernelError::Format {
        path: path.to_owned(),
        text: text.clone(),
        expected: "a list of nodes such as 0-1,3",
    })
}

/// Nodes of a list such as `0-1,3`; empty for an empty list.
///
/// ```
/// use polder_linux::{parse_nodes, show_nodes};
/// assert_eq!(show_nodes(&parse_nodes("0-1,3\n").unwrap()), "0-1,3");
/// assert!(parse_nodes("1-").is_none());
/// ```
#[must_use]
pub fn parse_nodes(text: &str) -> Option<BTreeSet<u32>> {
    // Linux has 1,024 nodes at most.
    parse_list(text, 1 << 10)
}

/// Numbers below `most` of such a list.
pub(crate) fn parse_list(text: &str, most: u32) -> Option<BTreeSet<u32>> {
    let mut nodes = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last >= most {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes)
}

/// The list that [`parse_nodes`] reads.
#[must_use]
pub fn show_nodes(nodes: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for node in nodes {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *node => *last = *node,
            _ => runs.push((*node, *node)),
        }
    }
    let show = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}
