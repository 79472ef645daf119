//! A tree of files in memory that behaves like the kernel's where an agent would notice.
//!
//! - `memory.reclaim` demotes while demotion is on, answers EAGAIN when it moved less, and ignores `cpuset.mems`, as
//!   kernels before 6.16 do.
//! - `cpuset.mems` migrates pages when its set changes, refuses nodes that are not there with EINVAL and an empty set
//!   after another with ENOSPC (every cgroup has processes here), and says EBUSY once in a while.
//! - Files of a cgroup that was removed are gone.
//! - [`Tree::kill_after`] ends the process at a write: that write and everything after it fails, and a record that
//!   was being appended is cut short.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind};

use crate::{BALANCING, CGROUPS, DEMOTION, Kernel, KernelError, parse_nodes, show_nodes};

const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

#[derive(Clone, Debug, Default)]
struct Group {
    inode: u64,
    mems: String,
    bytes: [u64; 2],
    pressure: f64,
}

impl Group {
    /// The nodes that its processes may use: all where the set is empty.
    fn effective(&self) -> &str {
        if self.mems.is_empty() { "0-1" } else { &self.mems }
    }
}

/// A machine with a fast node 0 and a slow node 1.
#[derive(Debug)]
pub struct Tree {
    files: RefCell<BTreeMap<String, String>>,
    disk: RefCell<BTreeMap<String, String>>,
    groups: RefCell<BTreeMap<String, Group>>,
    next_inode: Cell<u64>,
    writes_left: Cell<u64>,
    busy_in: Cell<u64>,
    fast_bytes: u64,
}

impl Tree {
    /// A machine with `fast_bytes` on node 0, demotion off and NUMA balancing at 1, as a stock kernel starts.
    #[must_use]
    pub fn new(fast_bytes: u64) -> Self {
        let mut files = BTreeMap::new();
        for (path, text) in [
            ("/sys/devices/system/node/has_memory", "0-1\n"),
            ("/sys/devices/system/node/has_cpu", "0\n"),
            ("/sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0\n"),
            ("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist", "1\n"),
            ("/proc/sys/kernel/osrelease", "6.12.0-fake\n"),
            (DEMOTION, "false\n"),
            (BALANCING, "1\n"),
        ] {
            files.insert(path.to_owned(), text.to_owned());
        }
        Self {
            files: RefCell::new(files),
            disk: RefCell::default(),
            groups: RefCell::default(),
            next_inode: Cell::new(1),
            writes_left: Cell::new(u64::MAX),
            busy_in: Cell::new(u64::MAX),
            fast_bytes,
        }
    }

    /// Makes the file `path`, or gives it another text.
    pub fn put(&self, path: &str, text: &str) {
        self.files.borrow_mut().insert(path.to_owned(), text.to_owned());
    }

    /// Takes the file `path` away, as a kernel that lacks it.
    pub fn take(&self, path: &str) {
        self.files.borrow_mut().remove(path);
    }

    /// Puts both nodes into one memory tier, as Linux 6.1 does unless dax_kmem brings the slow one.
    pub fn merge_tiers(&self) {
        let mut files = self.files.borrow_mut();
        files.remove("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist");
        files.insert(
            "/sys/devices/virtual/memory_tiering/memory_tier4/nodelist".to_owned(),
            "0-1\n".to_owned(),
        );
    }

    /// Makes the cgroup `path` with so many bytes on each node.
    pub fn add_group(&self, path: &str, bytes: [u64; 2]) {
        let inode = self.next_inode.replace(self.next_inode.get() + 1);
        self.groups.borrow_mut().insert(path.to_owned(), Group { inode, bytes, ..Group::default() });
    }

    /// Sets `cpuset.mems` of the cgroup `path`, as an operator may have.
    pub fn set_nodes(&self, path: &str, nodes: &str) {
        if let Some(group) = self.groups.borrow_mut().get_mut(path) {
            group.mems = nodes.to_owned();
        }
    }

    /// Removes the cgroup `path`.
    pub fn remove_group(&self, path: &str) {
        self.groups.borrow_mut().remove(path);
    }

    /// Bytes of `path` on each node; zeros where it is gone.
    #[must_use]
    pub fn bytes(&self, path: &str) -> [u64; 2] {
        self.groups.borrow().get(path).map_or([0, 0], |group| group.bytes)
    }

    /// The process dies at the write after `writes` more.
    pub fn kill_after(&self, writes: u64) {
        self.writes_left.set(writes);
    }

    /// The setting after `writes` more to `cpuset.mems` is refused with EBUSY, once.
    pub fn busy_after(&self, writes: u64) {
        self.busy_in.set(writes);
    }

    /// Whether the process died.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.writes_left.get() == 0
    }

    /// A new process: writes work again.
    pub fn revive(&self) {
        self.writes_left.set(u64::MAX);
        self.busy_in.set(u64::MAX);
    }

    /// Every setting with its value, to be compared before and after: of `cpuset.mems` the effective nodes.
    #[must_use]
    pub fn settings(&self) -> BTreeMap<String, String> {
        let mut settings = self.files.borrow().clone();
        for (path, group) in self.groups.borrow().iter() {
            settings.insert(format!("{CGROUPS}{path}/cpuset.mems"), group.effective().to_owned());
        }
        settings
    }

    /// Files on disk, such as a journal that was left.
    #[must_use]
    pub fn disk(&self) -> BTreeMap<String, String> {
        self.disk.borrow().clone()
    }

    /// Counts a write; false when the process died before it.
    fn lives(&self) -> bool {
        let left = self.writes_left.get();
        self.writes_left.set(left.saturating_sub(1));
        left > 1 || left == u64::MAX
    }

    fn fast_used(&self) -> u64 {
        self.groups.borrow().values().map(|group| group.bytes[0]).sum()
    }

    fn split<'p>(&self, path: &'p str) -> Option<(String, &'p str)> {
        let (folder, name) = path.strip_prefix(CGROUPS)?.rsplit_once('/')?;
        self.groups.borrow().contains_key(folder).then(|| (folder.to_owned(), name))
    }

    fn read_group(&self, folder: &str, name: &str) -> Option<String> {
        let groups = self.groups.borrow();
        let group = groups.get(folder)?;
        let nodes = group.effective();
        Some(match name {
            "cpuset.mems" => format!("{}\n", group.mems),
            "cpuset.mems.effective" => format!("{nodes}\n"),
            "memory.numa_stat" => format!(
                "anon N0={} N1={}\nfile N0=0 N1=0\nkernel_stack N0=16384 N1=0\n",
                group.bytes[0], group.bytes[1]
            ),
            "memory.pressure" => format!("some avg10={:.2} avg60=0.00 avg300=0.00 total=0\n", group.pressure),
            _ => return None,
        })
    }

    fn write_group(&self, folder: &str, name: &str, line: &str) -> Result<(), Error> {
        let demotes = self.files.borrow()[DEMOTION].trim() == "true";
        let busy = self.busy_in.get();
        let mut groups = self.groups.borrow_mut();
        let group = groups.get_mut(folder).ok_or(ErrorKind::NotFound)?;
        match name {
            "memory.reclaim" => {
                let wanted: u64 = line.parse().map_err(|_| Error::from_raw_os_error(EINVAL))?;
                let moved = if demotes { wanted.min(group.bytes[0]) } else { 0 };
                group.bytes[0] -= moved;
                group.bytes[1] += moved;
                if moved < wanted { Err(ErrorKind::WouldBlock.into()) } else { Ok(()) }
            }
            "cpuset.mems" => {
                self.busy_in.set(busy.saturating_sub(1));
                if busy == 0 {
                    self.busy_in.set(u64::MAX);
                    return Err(Error::from_raw_os_error(EBUSY));
                }
                let nodes = parse_nodes(line).ok_or_else(|| Error::from_raw_os_error(EINVAL))?;
                if nodes.iter().any(|node| *node > 1) {
                    return Err(Error::from_raw_os_error(EINVAL));
                }
                if nodes.is_empty() && !group.mems.is_empty() {
                    return Err(Error::from_raw_os_error(ENOSPC));
                }
                let changes = parse_nodes(&group.mems) != Some(nodes.clone());
                group.mems = show_nodes(&nodes);
                if changes && nodes == BTreeSet::from([0]) {
                    group.bytes = [group.bytes[0] + group.bytes[1], 0];
                }
                Ok(())
            }
            _ => Err(ErrorKind::NotFound.into()),
        }
    }
}

impl Kernel for Tree {
    fn read(&self, path: &str) -> Result<String, KernelError> {
        let group = self.split(path).and_then(|(folder, name)| self.read_group(&folder, name));
        let text = group.or_else(|| self.files.borrow().get(path).cloned()).or_else(|| {
            let free = self.fast_bytes.saturating_sub(self.fast_used()) >> 10;
            path.ends_with("/node0/meminfo").then(|| format!("Node 0 MemFree:   {free} kB\n"))
        });
        text.ok_or_else(|| KernelError::file(path)(ErrorKind::NotFound.into()))
    }

    fn write(&self, path: &str, line: &str) -> Result<(), KernelError> {
        if !self.lives() {
            return Err(KernelError::file(path)(ErrorKind::Interrupted.into()));
        }
        if let Some((folder, name)) = self.split(path) {
            return self.write_group(&folder, name, line).map_err(KernelError::file(path));
        }
        match self.files.borrow_mut().get_mut(path) {
            Some(text) => {
                *text = format!("{line}\n");
                Ok(())
            }
            None => Err(KernelError::file(path)(ErrorKind::NotFound.into())),
        }
    }

    fn list(&self, path: &str) -> Result<Vec<String>, KernelError> {
        let inside = format!("{path}/");
        let files = self.files.borrow();
        let names = files.keys().filter_map(|file| file.strip_prefix(&inside)?.split('/').next());
        let names: BTreeSet<String> = names.map(str::to_owned).collect();
        if names.is_empty() {
            return Err(KernelError::file(path)(ErrorKind::NotFound.into()));
        }
        Ok(names.into_iter().collect())
    }

    fn inode(&self, path: &str) -> Result<u64, KernelError> {
        let group =
            path.strip_prefix(CGROUPS).and_then(|folder| Some(self.groups.borrow().get(folder)?.inode));
        group.ok_or_else(|| KernelError::file(path)(ErrorKind::NotFound.into()))
    }

    fn read_own(&self, path: &str) -> Result<String, KernelError> {
        let text = self.disk.borrow().get(path).cloned();
        text.ok_or_else(|| KernelError::file(path)(ErrorKind::NotFound.into()))
    }

    fn replace(&self, path: &str, text: &str) -> Result<(), KernelError> {
        if !self.lives() {
            return Err(KernelError::file(path)(ErrorKind::Interrupted.into()));
        }
        self.disk.borrow_mut().insert(path.to_owned(), text.to_owned());
        Ok(())
    }

    fn append(&self, path: &str, line: &str) -> Result<(), KernelError> {
        let lives = self.lives();
        let mut disk = self.disk.borrow_mut();
        let text = disk.entry(path.to_owned()).or_default();
        if !lives {
            text.push_str(&line[..line.len() / 2]);
            return Err(KernelError::file(path)(ErrorKind::Interrupted.into()));
        }
        text.push_str(line);
        text.push('\n');
        Ok(())
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        if !self.lives() {
            return Err(KernelError::file(path)(ErrorKind::Interrupted.into()));
        }
        let removed = self.disk.borrow_mut().remove(path);
        removed.map(drop).ok_or_else(|| KernelError::file(path)(ErrorKind::NotFound.into()))
    }
}
