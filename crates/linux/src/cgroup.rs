//! A cgroup of version 2: the bytes that it has on each node, and how pages of it are moved.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;

use crate::CGROUPS;
use crate::error::KernelError;
use crate::kernel::{Cgroup, Kernel, number};
use crate::nodes::{parse_nodes, show_nodes};

/// User memory of a cgroup on one node, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Memory of no file.
    pub anon: u64,
    /// Page cache, shared memory included.
    pub file: u64,
    /// Shared memory, such as files of tmpfs.
    pub shmem: u64,
    /// Reserved huge pages (HugeTLB), which the kernel never reclaims.
    pub huge: u64,
}

impl NodeMemory {
    /// All of it.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.anon + self.file + self.huge
    }

    /// Page cache that could be read again from a file.
    #[must_use]
    pub const fn cache(&self) -> u64 {
        self.file.saturating_sub(self.shmem)
    }
}

/// The sizes of reserved huge pages (HugeTLB) that a machine has, as names of files of a cgroup have them, such as `2MB`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HugePages {
    sizes: Vec<String>,
}

impl HugePages {
    /// Asks the kernel which sizes have any pages.
    pub fn discover(kernel: &impl Kernel) -> Self {
        const POOLS: &str = "/sys/kernel/mm/hugepages";
        let pools = kernel.list(POOLS).unwrap_or_default();
        let size = |pool: String| {
            let pages = kernel.read(&format!("{POOLS}/{pool}/nr_hugepages")).ok()?;
            let kib: u64 = pool.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let name = match kib {
                1_048_576.. => format!("{}GB", kib >> 20),
                1_024.. => format!("{}MB", kib >> 10),
                _ => format!("{kib}KB"),
            };
            (pages.trim() != "0").then_some(name)
        };
        Self { sizes: pools.into_iter().filter_map(size).collect() }
    }

    /// Whether the machine has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }
}

/// Words that this kernel's `memory.reclaim` needs beside a number of bytes, asked for once.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReclaimWords {
    demote: Option<bool>,
}

/// Pages that the kernel has counted for a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages that were read again after they had been taken.
    pub refaults: u64,
    /// Pages that were promoted.
    pub promoted: u64,
    /// Pages that were demoted.
    pub demoted: u64,
    /// Bytes in huge pages that the kernel made by itself; [`None`] where it does not count them.
    pub huge: Option<u64>,
}

impl Cgroup {
    /// The cgroup of the systemd unit `unit`, such as `web.service`: it is looked for in slices of the system. Slices of users,
    /// and cgroups below a unit, are left out, because a user can make one of any name there.
    ///
    /// # Errors
    /// As listing the root's cgroups fails.
    pub fn of_unit(kernel: &impl Kernel, unit: &str) -> Result<Option<Self>, KernelError> {
        in_slices(kernel, |folder, names| {
            names.iter().any(|name| name == unit).then(|| Self::new(&format!("{folder}/{unit}")))
        })
        .map(Option::flatten)
    }

    /// The cgroups of all services and scopes of systemd in slices of the system, as [`Cgroup::of_unit`] looks for them.
    ///
    /// # Errors
    /// As listing the root's cgroups fails.
    pub fn units(kernel: &impl Kernel) -> Result<Vec<Self>, KernelError> {
        let mut units = Vec::new();
        in_slices::<()>(kernel, |folder, names| {
            let names = names.iter().filter(|name| name.ends_with(".service") || name.ends_with(".scope"));
            units.extend(names.filter_map(|name| Self::new(&format!("{folder}/{name}"))));
            None
        })?;
        Ok(units)
    }

    /// What is wrong where a file of a controller is gone and the cgroup is not.
    fn without_controller(&self, kernel: &impl Kernel, controller: &str, error: KernelError) -> KernelError {
        if !error.is_gone() || kernel.inode(&self.folder()).is_err() {
            return error;
        }
        let parent = self.path().rsplit_once('/').map_or("", |(parent, _)| parent);
        KernelError::Missing(format!(
            "{}: no {controller} controller; enable it with: echo +{controller} > {CGROUPS}{parent}/cgroup.subtree_control",
            self.path()
        ))
    }

    /// User memory on each node. Huge pages of `huge` are counted where the cgroup has the hugetlb controller.
    ///
    /// # Errors
    /// As reading `memory.numa_stat` fails; [`KernelError::Format`] where it does not tell both kinds of memory, which is not the same as none;
    /// [`KernelError::Missing`] without the memory controller.
    pub fn memory(
        &self,
        kernel: &impl Kernel,
        huge: &HugePages,
    ) -> Result<BTreeMap<u32, NodeMemory>, KernelError> {
        let path = self.file("memory.numa_stat");
        let text = kernel.read(&path).map_err(|error| self.without_controller(kernel, "memory", error))?;
        let mut memory: BTreeMap<u32, NodeMemory> = BTreeMap::new();
        let mut told = BTreeSet::new();
        for line in text.lines() {
            let name = line.split_ascii_whitespace().next();
            if !matches!(name, Some("anon" | "file" | "shmem")) {
                continue;
            }
            told.extend(name);
            for (node, count) in by_node(line, &path)? {
                let of_node = memory.entry(node).or_default();
                match name {
                    Some("anon") => of_node.anon = count,
                    Some("file") => of_node.file = count,
                    _ => of_node.shmem = count,
                }
            }
        }
        if !["anon", "file"].iter().all(|name| told.contains(name)) {
            return Err(cut_short(path, &text, "a line of anon and one of file"));
        }
        for size in &huge.sizes {
            let path = self.file(&format!("hugetlb.{size}.numa_stat"));
            match kernel.read(&path) {
                Err(error) if error.is_gone() => {}
                text => {
                    for (node, count) in by_node(&text?, &path)? {
                        memory.entry(node).or_default().huge += count;
                    }
                }
            }
        }
        Ok(memory)
    }

    /// Has the kernel sum up what each CPU has counted of the cgroup. Without that [`Cgroup::memory`] may lack what last happened to some pages
    /// for 2 s, or more on a busy host. Linux 6.12 sums up where `cpu.stat` is read; 7.3 does not. Returns whether there is such a file.
    pub fn sum_up(&self, kernel: &impl Kernel) -> bool {
        kernel.read(&self.file("cpu.stat")).is_ok()
    }

    /// Checks that the kernel can take pages of the cgroup to the nodes `slow`.
    ///
    /// # Errors
    /// [`KernelError::Missing`] where it has no `memory.reclaim`, or where its `cpuset.mems` leaves out all of these nodes: from Linux 6.16 on
    /// `memory.reclaim` would evict pages then.
    pub fn check_demotion(&self, kernel: &impl Kernel, slow: &BTreeSet<u32>) -> Result<(), KernelError> {
        let path = self.path();
        // It can be written alone.
        let gone = kernel.inode(&self.file("memory.reclaim")).err().filter(KernelError::is_gone);
        if gone.is_some() && kernel.inode(&self.folder()).is_ok() {
            return Err(KernelError::Missing(format!(
                "{path}: the kernel has no memory.reclaim before Linux 5.19, so none of its pages can be demoted"
            )));
        }
        let nodes = match self.effective_nodes(kernel) {
            // Without the controller every node may be used.
            Err(KernelError::Missing(_)) => return Ok(()),
            nodes => nodes?,
        };
        match nodes.is_disjoint(slow) {
            false => Ok(()),
            true => Err(KernelError::Missing(format!(
                "{path}: its cpuset.mems ({}) leaves out the slow nodes {}, so none of its pages can be demoted; widen it, or opt the \
                 service out",
                show_nodes(&nodes),
                show_nodes(slow)
            ))),
        }
    }

    /// What the kernel has counted since the cgroup was made; what this kernel does not count is 0.
    ///
    /// # Errors
    /// As reading `memory.stat` fails; [`KernelError::Format`] where it has no counts at all, or one is no number.
    pub fn counts(&self, kernel: &impl Kernel) -> Result<Counts, KernelError> {
        let path = self.file("memory.stat");
        let text = kernel.read(&path)?;
        let (mut counts, mut is_told) = (Counts::default(), false);
        for line in text.lines() {
            let Some((name, value)) = line.split_once(' ') else { continue };
            let count = match name {
                "workingset_refault_anon" | "workingset_refault_file" => &mut counts.refaults,
                "pgpromote_success" => &mut counts.promoted,
                "anon_thp" | "file_thp" | "shmem_thp" => counts.huge.get_or_insert(0),
                _ if name.starts_with("pgdemote_") => &mut counts.demoted,
                _ => {
                    is_told |= name == "anon";
                    continue;
                }
            };
            *count += number(value).ok_or_else(|| cut_short(path.clone(), line, "a count of pages"))?;
        }
        match is_told {
            true => Ok(counts),
            false => Err(cut_short(path, &text, "a line of anon, and other counts")),
        }
    }

    /// How many of its processes the kernel has killed because memory ran out; 0 where there is no such file.
    ///
    /// # Errors
    /// As reading `memory.events` fails; [`KernelError::Format`] where it has no such count, which is not the same as none.
    pub fn oom_kills(&self, kernel: &impl Kernel) -> Result<u64, KernelError> {
        let path = self.file("memory.events");
        let text = match kernel.read(&path) {
            Err(error) if error.is_gone() => return Ok(0),
            other => other?,
        };
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills.and_then(number).ok_or_else(|| cut_short(path, &text, "counts such as oom_kill 0"))
    }

    /// Percent of the last ten seconds in which some task waited for memory; 0 where the kernel does not count it.
    ///
    /// # Errors
    /// As reading `memory.pressure` fails.
    pub fn pressure(&self, kernel: &impl Kernel) -> Result<f64, KernelError> {
        let path = self.file("memory.pressure");
        let text = match kernel.read(&path) {
            Ok(text) => text,
            // Without psi=1 the file is there and answers EOPNOTSUPP, or is not there.
            Err(error) if error.is_gone() || error.kind() == Some(ErrorKind::Unsupported) => return Ok(0.0),
            Err(error) => return Err(error),
        };
        let average = text.lines().find_map(|line| {
            let fields = line.strip_prefix("some ")?;
            fields.split_ascii_whitespace().find_map(|field| field.strip_prefix("avg10=")?.parse().ok())
        });
        // One that is no percentage would pass every limit, or none.
        let average = average.filter(|average| (0.0..=100.0).contains(average));
        average.ok_or(KernelError::Format { path, text, expected: "a line such as some avg10=0.00" })
    }

    /// The nodes that its tasks may use.
    ///
    /// # Errors
    /// As reading `cpuset.mems.effective` fails; [`KernelError::Missing`] without the cpuset controller.
    pub fn effective_nodes(&self, kernel: &impl Kernel) -> Result<BTreeSet<u32>, KernelError> {
        let path = self.file("cpuset.mems.effective");
        let text = kernel.read(&path).map_err(|error| self.without_controller(kernel, "cpuset", error))?;
        // A cgroup always has some: an empty list would be within every tier.
        let nodes = parse_nodes(&text).filter(|nodes| !nodes.is_empty());
        nodes.ok_or(KernelError::Format { path, text, expected: "a list of nodes such as 0-1,3" })
    }

    /// Asks the kernel to demote `bytes` of the coldest pages, or of the coldest page cache alone. It may move less; whether it moved all is
    /// returned.
    ///
    /// # Errors
    /// As writing `memory.reclaim` fails, but for EAGAIN and EINTR, by which the kernel says that it moved less.
    /// [`KernelError::Missing`] where the kernel cannot tell page cache from the rest.
    pub fn demote(
        &self,
        kernel: &impl Kernel,
        bytes: u64,
        cache_alone: bool,
        words: &mut ReclaimWords,
    ) -> Result<bool, KernelError> {
        let demote = self.takes_demote(kernel, words)?;
        let line = match (cache_alone, demote) {
            (true, false) => format!("{bytes} swappiness=0"),
            (true, true) => format!("{bytes} swappiness=0 demote=1"),
            (false, true) => format!("{bytes} demote=1"),
            (false, false) => bytes.to_string(),
        };
        match kernel.write(&self.file("memory.reclaim"), &line) {
            Ok(()) => Ok(true),
            // A signal ends it early.
            Err(error) if matches!(error.kind(), Some(ErrorKind::WouldBlock | ErrorKind::Interrupted)) => {
                Ok(false)
            }
            Err(error) if cache_alone && error.kind() == Some(ErrorKind::InvalidInput) => {
                Err(KernelError::Missing(format!(
                    "{}: memory.reclaim takes no swappiness before Linux 6.9, so page cache stays; leave page_cache out",
                    self.path()
                )))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether `memory.reclaim` knows `demote=`. Such a kernel evicts pages where that word is left out; others refuse it. To reclaim no bytes
    /// asks for this alone.
    fn takes_demote(&self, kernel: &impl Kernel, words: &mut ReclaimWords) -> Result<bool, KernelError> {
        if let Some(known) = words.demote {
            return Ok(known);
        }
        let takes = match kernel.write(&self.file("memory.reclaim"), "0 demote=1") {
            Ok(()) => true,
            Err(error) if error.kind() == Some(ErrorKind::WouldBlock) => true,
            Err(error) if error.kind() == Some(ErrorKind::InvalidInput) => false,
            Err(error) => return Err(error),
        };
        words.demote = Some(takes);
        Ok(takes)
    }

    /// Lines that bring its pages back to `nodes` when they are written to `cpuset.mems` one after the other: the
    /// kernel migrates when the set changes, so it is widened by `others` first.
    #[must_use]
    pub fn migration(nodes: &BTreeSet<u32>, others: &BTreeSet<u32>) -> [String; 2] {
        [show_nodes(&nodes.union(others).copied().collect()), show_nodes(nodes)]
    }
}

/// Looks at the names in the root of the cgroups and in each slice of the system, until `look` has what it looks for.
fn in_slices<T>(
    kernel: &impl Kernel,
    mut look: impl FnMut(&str, &[String]) -> Option<T>,
) -> Result<Option<T>, KernelError> {
    const DEEPEST: usize = 8;
    let mut folders = vec![String::new()];
    for _ in 0..DEEPEST {
        let mut below = Vec::new();
        for folder in &folders {
            let names = match kernel.list(&format!("{CGROUPS}{folder}")) {
                Err(error) if error.is_gone() && !folder.is_empty() => continue,
                names => names?,
            };
            if let Some(found) = look(folder, &names) {
                return Ok(Some(found));
            }
            let slices = names.into_iter().filter(|name| name.ends_with(".slice") && name != "user.slice");
            below.extend(slices.map(|name| format!("{folder}/{name}")));
        }
        folders = below;
    }
    Ok(None)
}

/// That `path` does not say what it must: its first line is shown.
fn cut_short(path: String, text: &str, expected: &'static str) -> KernelError {
    KernelError::Format { path, text: text.lines().next().unwrap_or_default().to_owned(), expected }
}

/// Numbers of a line such as `anon N0=4096 N1=0`, by node.
fn by_node(line: &str, path: &str) -> Result<Vec<(u32, u64)>, KernelError> {
    let of_node = |field: &str| {
        let pair = field.strip_prefix('N').and_then(|field| field.split_once('='));
        pair.and_then(|(node, count)| Some((node.parse().ok()?, number(count)?))).ok_or_else(|| {
            let expected = "fields such as N0=4096";
            KernelError::Format { path: path.to_owned(), text: field.to_owned(), expected }
        })
    };
    line.split_ascii_whitespace().skip(1).map(of_node).collect()
}
