//! A cgroup of version 2: the bytes that it has on each node, and how pages of it are moved.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;

use crate::{CGROUPS, Kernel, KernelError, parse_nodes, show_nodes};

/// A cgroup, by its path below the mount of cgroup version 2, such as `/system.slice/web.service`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cgroup {
    path: String,
}

impl Cgroup {
    /// The cgroup at `path`; [`None`] when the path is not absolute, is the root, or steps upwards.
    #[must_use]
    pub fn new(path: &str) -> Option<Self> {
        let inside = path.strip_prefix('/')?;
        let is_plain = inside.split('/').all(|part| !matches!(part, "" | "." | ".."));
        is_plain.then(|| Self { path: path.to_owned() })
    }

    /// Its path below the mount.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The file of the setting `name`.
    #[must_use]
    pub fn file(&self, name: &str) -> String {
        format!("{CGROUPS}{}/{name}", self.path)
    }

    /// Bytes of user memory (anonymous and page cache, tmpfs included) on each node.
    ///
    /// # Errors
    /// As reading `memory.numa_stat` fails.
    pub fn bytes_by_node(&self, kernel: &impl Kernel) -> Result<BTreeMap<u32, u64>, KernelError> {
        let path = self.file("memory.numa_stat");
        let text = kernel.read(&path)?;
        let mut bytes = BTreeMap::new();
        for line in text.lines() {
            let mut fields = line.split_ascii_whitespace();
            if !matches!(fields.next(), Some("anon" | "file")) {
                continue;
            }
            for field in fields {
                let pair = field.strip_prefix('N').and_then(|field| field.split_once('='));
                let parsed =
                    pair.and_then(|(node, count)| Some((node.parse().ok()?, count.parse::<u64>().ok()?)));
                let Some((node, count)) = parsed else {
                    let expected = "fields such as N0=4096";
                    return Err(KernelError::Format { path, text: field.to_owned(), expected });
                };
                *bytes.entry(node).or_insert(0) += count;
            }
        }
        Ok(bytes)
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
        average.ok_or(KernelError::Format { path, text, expected: "a line such as some avg10=0.00" })
    }

    /// The nodes that its tasks may use.
    ///
    /// # Errors
    /// As reading `cpuset.mems.effective` fails; [`KernelError::Missing`] without the cpuset controller.
    pub fn effective_nodes(&self, kernel: &impl Kernel) -> Result<BTreeSet<u32>, KernelError> {
        let path = self.file("cpuset.mems.effective");
        let text = match kernel.read(&path) {
            Err(error) if error.is_gone() && kernel.read(&self.file("memory.numa_stat")).is_ok() => {
                let parent = self.path.rsplit_once('/').map_or("", |(parent, _)| parent);
                return Err(KernelError::Missing(format!(
                    "{}: no cpuset controller; enable it with: echo +cpuset > {CGROUPS}{parent}/cgroup.subtree_control",
                    self.path
                )));
            }
            other => other?,
        };
        parse_nodes(&text).ok_or(KernelError::Format {
            path,
            text,
            expected: "a list of nodes such as 0-1,3",
        })
    }

    /// Asks the kernel to demote `bytes` of the coldest pages. It may move less; whether it moved all is returned.
    ///
    /// # Errors
    /// As writing `memory.reclaim` fails, but for EAGAIN, by which the kernel says that it moved less.
    pub fn demote(&self, kernel: &impl Kernel, bytes: u64) -> Result<bool, KernelError> {
        match kernel.write(&self.file("memory.reclaim"), &bytes.to_string()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == Some(ErrorKind::WouldBlock) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Lines that bring its pages back to `nodes` when they are written to `cpuset.mems` one after the other: the
    /// kernel migrates when the set changes, so it is widened to `all` first.
    #[must_use]
    pub fn migration(nodes: &BTreeSet<u32>, all: &BTreeSet<u32>) -> [String; 2] {
        [show_nodes(all), show_nodes(nodes)]
    }
}
