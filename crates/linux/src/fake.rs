//! A tree of files in memory that behaves like the kernel's where an agent would notice.
//!
//! - `memory.reclaim` demotes while demotion is on, answers EAGAIN when it moved less, and ignores `cpuset.mems`, as
//!   kernels before 6.16 do. With `swappiness=0` it moves page cache alone, and a kernel before 6.9 answers EINVAL. One that knows
//!   `demote=1` moves nothing without it.
//! - `cpuset.mems` migrates pages when its set changes, refuses nodes that are not there with EINVAL and an empty set
//!   after another with ENOSPC (every cgroup has processes here). What a parent leaves out is not in effect, and a set
//!   that has nothing of the parent's is answered by the parent's own.
//! - No time passes but while pages move, at the rate that [`Tree::moves_at`] gives.
//! - Nothing goes up by itself, but by [`Tree::promotes_of`]. Anonymous memory of the slow node is moved up on demand, but for what is shared.
//! - A setting says EBUSY once in a while; values that a kernel refuses are EINVAL.
//! - kdamonds appear as they are counted, are busy while they run or DAMON_STAT does, and reach the goals of their schemes in steps.
//! - A CXL device tells its poison list to a tracing instance whose events are on, when it is asked to.
//! - Files of a cgroup that was removed are gone, and one that is made anew has another inode.
//! - [`Tree::kill_after`] ends the process at a write: that write and everything after it fails, and a record that
//!   was being appended is cut short.
//!
//! [`crate::conformance`] holds it to the kernel.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind};
use std::time::Duration;

use crate::damon::{DAMON_STAT, KDAMONDS};
use crate::nodes::NODES;
use crate::{
    BALANCING, CGROUPS, Cgroup, CxlWatch, DEMOTION, INTERLEAVE, INTERLEAVE_AUTO, Kernel, KernelError,
    PROMOTION_LIMIT, Promotion, Resume, parse_nodes, show_nodes,
};

const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const SLOW_BYTES: u64 = 1 << 40;
const SLOW_TIER: &str = "/sys/devices/virtual/memory_tiering/memory_tier90/nodelist";
const FAST_TIER: &str = "/sys/devices/virtual/memory_tiering/memory_tier4/nodelist";

/// Files of a cgroup.
const GROUP_FILES: [&str; 8] = [
    "cpu.stat",
    "cpuset.mems",
    "cpuset.mems.effective",
    "memory.events",
    "memory.numa_stat",
    "memory.pressure",
    "memory.reclaim",
    "memory.stat",
];

#[derive(Clone, Debug, Default)]
struct Group {
    inode: u64,
    mems: String,
    /// What its parent leaves it; empty for all.
    parent: String,
    bytes: [u64; 2],
    /// What of `bytes` is page cache.
    cache: [u64; 2],
    /// What of the slow bytes is shared with others.
    shared: u64,
    /// What of the fast bytes is locked, and never goes down.
    locked: u64,
    /// What of the bytes that come up is counted as slow until `cpu.stat` is read, and what is now.
    counts_late: u64,
    late: u64,
    pressure: f64,
    refaults: u64,
    /// Bytes that the kernel moved up, and down.
    promoted: u64,
    demoted: u64,
    kills: u64,
    /// Names of files that it lacks.
    lacks: BTreeSet<String>,
}

impl Group {
    /// The nodes that its processes may use.
    fn effective(&self) -> String {
        let nodes = |text: &str| parse_nodes(text).filter(|nodes| !nodes.is_empty());
        let parent = nodes(&self.parent).unwrap_or_else(|| BTreeSet::from([0, 1]));
        let own = nodes(&self.mems).unwrap_or_else(|| parent.clone());
        let both: BTreeSet<u32> = own.intersection(&parent).copied().collect();
        show_nodes(if both.is_empty() { &parent } else { &both })
    }

    fn reclaim(
        &mut self,
        line: &str,
        demotes: bool,
        knows_swappiness: bool,
        knows_demote: bool,
    ) -> Result<(), Error> {
        let invalid = || Error::from_raw_os_error(EINVAL);
        let mut words = line.split(' ');
        let amount = words.next().unwrap_or_default();
        let (mut cache_alone, mut demotes) = (false, demotes && !knows_demote);
        for word in words {
            match word {
                "swappiness=0" if knows_swappiness => cache_alone = true,
                "demote=1" if knows_demote => demotes = true,
                _ => return Err(invalid()),
            }
        }
        let wanted: u64 = amount.parse().map_err(|_| invalid())?;
        let there = if cache_alone { self.cache[0] } else { self.bytes[0] }.saturating_sub(self.locked);
        let moved = if demotes { wanted.min(there) } else { 0 };
        let of_cache = if cache_alone { moved } else { moved.saturating_sub(self.bytes[0] - self.cache[0]) };
        self.bytes = [self.bytes[0] - moved, self.bytes[1] + moved];
        self.demoted += moved;
        self.cache = [self.cache[0] - of_cache, self.cache[1] + of_cache];
        if moved < wanted { Err(ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn set_nodes(&mut self, line: &str, online: &BTreeSet<u32>) -> Result<(), Error> {
        let invalid = || Error::from_raw_os_error(EINVAL);
        let nodes = parse_nodes(line).filter(|nodes| nodes.is_subset(online)).ok_or_else(invalid)?;
        if nodes.is_empty() && !self.mems.is_empty() {
            return Err(Error::from_raw_os_error(ENOSPC));
        }
        let before = self.effective();
        self.mems = show_nodes(&nodes);
        let after = self.effective();
        if before != after && after == "0" {
            self.late = self.counts_late.min(self.bytes[1]);
            self.bytes = [self.bytes[0] + self.bytes[1], 0];
            self.cache = [self.cache[0] + self.cache[1], 0];
        }
        Ok(())
    }
}

/// What goes at some call.
#[derive(Clone, Debug)]
enum Going {
    Group(String),
    Node(u32),
}

/// A machine with a fast node 0 and a slow node 1.
#[derive(Debug)]
pub struct Tree {
    files: RefCell<BTreeMap<String, String>>,
    disk: RefCell<BTreeMap<String, String>>,
    groups: RefCell<BTreeMap<String, Group>>,
    next_inode: Cell<u64>,
    /// Inodes of the cgroups when the kdamond was started: its filters are bound to these.
    bound: RefCell<BTreeMap<String, u64>>,
    writes_left: Cell<u64>,
    busy_in: Cell<u64>,
    /// A cgroup that is removed before the call after so many more.
    goes: RefCell<Option<(u64, Going)>>,
    /// Bytes after which a signal interrupts the next reclaim.
    interrupts: Cell<Option<u64>>,
    knows_swappiness: Cell<bool>,
    knows_demote: Cell<bool>,
    /// Names of files of DAMON that the kernel lacks.
    damon_lacks: RefCell<BTreeSet<&'static str>>,
    promotes: Cell<bool>,
    calls: Cell<u64>,
    fast_bytes: u64,
    slow_bytes: Cell<u64>,
    now: Cell<Duration>,
    /// Bytes a second; infinite where it takes no time.
    moves_at: Cell<f64>,
    /// Of a CXL device, addresses on it and on the host.
    poison: RefCell<BTreeMap<String, BTreeMap<u64, u64>>>,
    /// The cgroup of a page frame.
    pages: RefCell<BTreeMap<u64, String>>,
    /// Nodes that pages went up to, one after the other.
    targets: RefCell<Vec<u32>>,
    /// What servers of the host answer.
    answers: RefCell<BTreeMap<String, String>>,
}

impl Tree {
    /// A machine with `fast_bytes` on node 0, demotion off and NUMA balancing at 1, as a stock kernel starts.
    #[must_use]
    pub fn new(fast_bytes: u64) -> Self {
        let mut files = BTreeMap::new();
        for (path, text) in [
            ("/sys/devices/system/node/online", "0-1\n"),
            ("/sys/devices/system/node/has_memory", "0-1\n"),
            ("/sys/devices/system/node/has_cpu", "0\n"),
            (FAST_TIER, "0\n"),
            (SLOW_TIER, "1\n"),
            ("/proc/sys/kernel/osrelease", "6.12.0-fake\n"),
            (DEMOTION, "false\n"),
            (BALANCING, "1\n"),
            (PROMOTION_LIMIT, "65536\n"),
            (&format!("{INTERLEAVE}/node0"), "1\n"),
            (&format!("{INTERLEAVE}/node1"), "1\n"),
        ] {
            files.insert(path.to_owned(), text.to_owned());
        }
        Self {
            files: RefCell::new(files),
            disk: RefCell::default(),
            groups: RefCell::default(),
            next_inode: Cell::new(1),
            bound: RefCell::default(),
            writes_left: Cell::new(u64::MAX),
            busy_in: Cell::new(u64::MAX),
            goes: RefCell::default(),
            interrupts: Cell::new(None),
            knows_swappiness: Cell::new(true),
            knows_demote: Cell::new(false),
            damon_lacks: RefCell::new(BTreeSet::from(["goal_tuner", "fail_charge_num"])),
            promotes: Cell::new(true),
            calls: Cell::new(0),
            fast_bytes,
            slow_bytes: Cell::new(SLOW_BYTES),
            now: Cell::default(),
            moves_at: Cell::new(f64::INFINITY),
            poison: RefCell::default(),
            pages: RefCell::default(),
            targets: RefCell::default(),
            answers: RefCell::default(),
        }
    }

    /// Gives the slow node so many bytes, in place of a TiB.
    pub fn set_slow(&self, bytes: u64) {
        self.slow_bytes.set(bytes);
    }

    /// The slow node reads and writes so many MB/s, as HMAT says it.
    pub fn set_bandwidth(&self, mbps: u64) {
        for access in ["read", "write"] {
            let path = format!("/sys/devices/system/node/node1/access0/initiators/{access}_bandwidth");
            self.put(&path, &format!("{mbps}\n"));
        }
    }

    /// Pages move at so many bytes a second.
    pub fn moves_at(&self, bytes_per_s: f64) {
        self.moves_at.set(bytes_per_s);
    }

    /// Passes the time in which so many bytes move.
    fn take_time(&self, bytes: u64) {
        let took = Duration::from_secs_f64(bytes as f64 / self.moves_at.get());
        self.now.set(self.now.get() + took);
    }

    /// Makes the file `path`, or gives it another text.
    pub fn put(&self, path: &str, text: &str) {
        self.files.borrow_mut().insert(path.to_owned(), text.to_owned());
    }

    /// Takes the file `path` away, as a kernel that lacks it; also a cgroup's.
    pub fn take(&self, path: &str) {
        self.files.borrow_mut().remove(path);
        if let Some((folder, name)) = self.split(path) {
            self.change(&folder, |group| group.lacks.extend([name.to_owned()]));
        }
    }

    /// Puts both nodes into one memory tier, as Linux 6.1 does unless dax_kmem brings the slow one.
    pub fn merge_tiers(&self) {
        self.take(SLOW_TIER);
        self.put(FAST_TIER, "0-1\n");
    }

    /// The kernel derives the weights of nodes until one is written, as from Linux 6.16 on.
    pub fn derives_weights(&self) {
        self.put(INTERLEAVE_AUTO, "true\n");
        self.put(&format!("{INTERLEAVE}/node0"), "25\n");
    }

    /// DAMON has goals by cgroup, as Linux 6.19 has and others may that call themselves older, and DAMON_STAT runs.
    pub fn has_goals(&self, release: &str) {
        self.put("/proc/sys/kernel/osrelease", &format!("{release}\n"));
        self.put(&format!("{KDAMONDS}/nr_kdamonds"), "0\n");
        self.put(DAMON_STAT, "Y\n");
        self.put("/proc/iomem", "00100000-1fffffff : System RAM\n");
    }

    /// The host has a CXL memory device, such as `mem0`, and a kernel that traces what it reports.
    pub fn add_cxl(&self, device: &str) {
        self.put(&format!("/sys/bus/cxl/devices/{device}/trigger_poison_list"), "");
        self.put("/sys/kernel/tracing/events/cxl/enable", "0\n");
    }

    /// A place of a device is poisoned, and lies at `hpa` on the host.
    pub fn poison(&self, device: &str, dpa: u64, hpa: u64) {
        self.poison.borrow_mut().entry(device.to_owned()).or_default().insert(dpa, hpa);
    }

    /// Poison of a device is cleared.
    pub fn clear_poison(&self, device: &str) {
        self.poison.borrow_mut().remove(device);
    }

    /// A device reports an event, as a line of the trace.
    pub fn trace(&self, line: &str) {
        let pipe = format!("{}/trace_pipe", CxlWatch::path());
        let mut files = self.files.borrow_mut();
        let is_on =
            files.get(&format!("{}/events/cxl/enable", CxlWatch::path())).is_some_and(|on| on == "1\n");
        if let Some(text) = files.get_mut(&pipe).filter(|_| is_on) {
            text.push_str(line);
            text.push('\n');
        }
    }

    /// The page at `hpa` belongs to the cgroup `path`.
    pub fn put_page(&self, hpa: u64, path: &str) {
        self.pages.borrow_mut().insert(hpa / 4096, path.to_owned());
    }

    /// A server of this host answers `text` at an address; with [`None`] it cannot be reached.
    pub fn answer(&self, address: &str, text: Option<&str>) {
        let mut answers = self.answers.borrow_mut();
        match text {
            Some(text) => drop(answers.insert(address.to_owned(), text.to_owned())),
            None => drop(answers.remove(address)),
        }
    }

    /// `memory.reclaim` takes no swappiness, as before Linux 6.9.
    pub fn lacks_swappiness(&self) {
        self.knows_swappiness.set(false);
    }

    /// `memory.reclaim` demotes only where it is told to by `demote=1`, as patches of 2026 propose.
    pub fn wants_demote(&self) {
        self.knows_demote.set(true);
    }

    /// DAMON has no file or folder of this name, such as `dests` before Linux 6.17.
    pub fn lacks_of_damon(&self, name: &'static str) {
        self.damon_lacks.borrow_mut().insert(name);
    }

    /// Pages of processes cannot be moved, as in a copy of a kernel's files.
    pub fn lacks_promotion(&self) {
        self.promotes.set(false);
    }

    /// The nodes that pages went up to so far.
    #[must_use]
    pub fn targets(&self) -> Vec<u32> {
        self.targets.borrow().clone()
    }

    /// So many slow bytes of the cgroup `path` are shared with others, and stay.
    pub fn share(&self, path: &str, bytes: u64) {
        self.change(path, |group| group.shared = bytes);
    }

    /// So many bytes of the cgroup `path` have just come up, and are counted as slow until its `cpu.stat` is read. As many of what its
    /// `cpuset.mems` brings up from now on are counted late too.
    pub fn count_late(&self, path: &str, bytes: u64) {
        self.change(path, |group| (group.counts_late, group.late) = (bytes, bytes));
    }

    /// So many fast bytes of the cgroup `path` are locked, and stay.
    pub fn lock(&self, path: &str, bytes: u64) {
        self.change(path, |group| group.locked = bytes);
    }

    /// Makes the cgroup `path` with so many bytes on each node.
    pub fn add_group(&self, path: &str, bytes: [u64; 2]) {
        let inode = self.next_inode.replace(self.next_inode.get() + 1);
        self.groups.borrow_mut().insert(path.to_owned(), Group { inode, bytes, ..Group::default() });
    }

    fn change(&self, path: &str, change: impl FnOnce(&mut Group)) {
        if let Some(group) = self.groups.borrow_mut().get_mut(path) {
            change(group);
        }
    }

    /// Sets `cpuset.mems` of the cgroup `path`, as an operator may have.
    pub fn set_nodes(&self, path: &str, nodes: &str) {
        self.change(path, |group| nodes.clone_into(&mut group.mems));
    }

    /// A signal interrupts the next reclaim once it has moved so many bytes.
    pub fn interrupt_reclaim(&self, bytes: u64) {
        self.interrupts.set(Some(bytes));
    }

    /// Sets the nodes that the parent of the cgroup `path` leaves it.
    pub fn set_parent_nodes(&self, path: &str, nodes: &str) {
        self.change(path, |group| nodes.clone_into(&mut group.parent));
    }

    /// Gives the cgroup `path` other bytes on each node.
    pub fn put_bytes(&self, path: &str, bytes: [u64; 2]) {
        self.change(path, |group| group.bytes = bytes);
    }

    /// The kernel promotes so many bytes of the cgroup `path`, or all that lie on the slow node.
    pub fn promotes_of(&self, path: &str, bytes: u64) {
        self.change(path, |group| {
            let moved = bytes.min(group.bytes[1]);
            group.bytes = [group.bytes[0] + moved, group.bytes[1] - moved];
            group.promoted += moved;
        });
    }

    /// Says what of the bytes of the cgroup `path` is page cache.
    pub fn set_cache(&self, path: &str, cache: [u64; 2]) {
        self.change(path, |group| group.cache = cache);
    }

    /// The cgroup `path` waits for memory for a percentage of time, has read so many pages again, and lost so many processes.
    pub fn suffer(&self, path: &str, pressure: f64, refaults: u64, kills: u64) {
        self.change(path, |group| {
            group.pressure = pressure;
            group.refaults += refaults;
            group.kills += kills;
        });
    }

    /// Removes the cgroup `path`.
    pub fn remove_group(&self, path: &str) {
        self.groups.borrow_mut().remove(path);
    }

    /// Removes the cgroup `path` before the call after `calls` more that reads, writes, lists or looks at an inode.
    pub fn remove_after(&self, calls: u64, path: &str) {
        self.goes.replace(Some((calls, Going::Group(path.to_owned()))));
    }

    /// Takes the memory of the node `node` away before the call after `calls` more.
    pub fn unplug_after(&self, calls: u64, node: u32) {
        self.goes.replace(Some((calls, Going::Node(node))));
    }

    /// Takes the memory of a node away, which is then in no list and has no files.
    fn unplug(&self, node: u32) {
        let folder = format!("{NODES}/node{node}/");
        let mut files = self.files.borrow_mut();
        files.retain(|path, _| !path.starts_with(&folder));
        let lists =
            files.iter_mut().filter(|(path, _)| path.ends_with("/has_memory") || path.ends_with("/nodelist"));
        for (_, list) in lists {
            let mut nodes = parse_nodes(list).unwrap_or_default();
            nodes.remove(&node);
            *list = show_nodes(&nodes) + "\n";
        }
    }

    /// How often it was read, written, listed or looked at so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    /// Counts a call, and removes the cgroup that is due.
    fn pass(&self) {
        self.calls.set(self.calls.get() + 1);
        let mut goes = self.goes.borrow_mut();
        match goes.take() {
            Some((0, Going::Group(path))) => self.remove_group(&path),
            Some((0, Going::Node(node))) => self.unplug(node),
            Some((calls, going)) => *goes = Some((calls - 1, going)),
            None => {}
        }
    }

    /// Makes the cgroup `path` anew as `to`, with its processes: cgroups cannot be renamed.
    pub fn rename_group(&self, path: &str, to: &str) {
        let moved = self.groups.borrow_mut().remove(path);
        if let Some(group) = moved {
            self.add_group(to, group.bytes);
        }
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

    /// The setting after `writes` more is refused with EBUSY, once.
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
            settings.insert(format!("{CGROUPS}{path}/cpuset.mems"), group.effective());
        }
        settings
    }

    /// Files on disk, such as a journal that was left.
    #[must_use]
    pub fn disk(&self) -> BTreeMap<String, String> {
        self.disk.borrow().clone()
    }

    /// Counts a write; an error when the process died before it.
    fn live(&self) -> Result<(), Error> {
        let left = self.writes_left.get();
        if left != u64::MAX {
            self.writes_left.set(left.saturating_sub(1));
        }
        // No kernel says this.
        if left > 1 { Ok(()) } else { Err(ErrorKind::NotConnected.into()) }
    }

    /// Says EBUSY once, when it is due.
    fn be_busy(&self) -> Result<(), Error> {
        let left = self.busy_in.get();
        if left == 0 {
            self.busy_in.set(u64::MAX);
            return Err(Error::from_raw_os_error(EBUSY));
        }
        if left != u64::MAX {
            self.busy_in.set(left - 1);
        }
        Ok(())
    }

    fn used(&self, node: usize) -> u64 {
        self.groups.borrow().values().map(|group| group.bytes[node]).sum()
    }

    fn split<'p>(&self, path: &'p str) -> Option<(String, &'p str)> {
        let (folder, name) = path.strip_prefix(CGROUPS)?.rsplit_once('/')?;
        self.groups.borrow().contains_key(folder).then(|| (folder.to_owned(), name))
    }

    fn read_group(&self, folder: &str, name: &str) -> Option<String> {
        let mut groups = self.groups.borrow_mut();
        let group = groups.get_mut(folder).filter(|group| !group.lacks.contains(name))?;
        if name == "cpu.stat" {
            group.late = 0;
            return Some("usage_usec 0\nuser_usec 0\nsystem_usec 0\n".to_owned());
        }
        let Group { bytes, cache, late, .. } = group;
        Some(match name {
            "cpuset.mems" => format!("{}\n", group.mems),
            "cpuset.mems.effective" => format!("{}\n", group.effective()),
            "memory.numa_stat" => format!(
                "anon N0={} N1={}\nfile N0={} N1={}\nkernel_stack N0=16384 N1=0\nshmem N0=0 N1=0\n",
                bytes[0] - cache[0] - *late,
                bytes[1] - cache[1] + *late,
                cache[0],
                cache[1]
            ),
            "memory.stat" => {
                let [up, down] = [group.promoted, group.demoted].map(|bytes| bytes / 4096);
                format!(
                    "anon 1\nworkingset_refault_anon 0\nworkingset_refault_file {}\npgdemote_proactive {down}\npgpromote_success {up}\n",
                    group.refaults
                )
            }
            "memory.events" => format!("low 0\nhigh 0\nmax 0\noom 0\noom_kill {}\n", group.kills),
            "memory.pressure" => format!("some avg10={:.2} avg60=0.00 avg300=0.00 total=0\n", group.pressure),
            _ => return None,
        })
    }

    fn write_group(&self, folder: &str, name: &str, line: &str) -> Result<(), Error> {
        let demotes = self.files.borrow().get(DEMOTION).is_some_and(|text| text.trim() == "true");
        let online = self.files.borrow().get("/sys/devices/system/node/has_memory").cloned();
        // A node that went away is possible still.
        let mut online = online.and_then(|text| parse_nodes(&text)).unwrap_or_default();
        online.extend([0, 1]);
        let mut groups = self.groups.borrow_mut();
        let group =
            groups.get_mut(folder).filter(|group| !group.lacks.contains(name)).ok_or(ErrorKind::NotFound)?;
        match name {
            "memory.reclaim" => {
                let before = group.bytes[0];
                let interrupted = self.interrupts.take().map(|bytes| bytes.to_string());
                let line = interrupted.as_deref().unwrap_or(line);
                let mut outcome =
                    group.reclaim(line, demotes, self.knows_swappiness.get(), self.knows_demote.get());
                if interrupted.is_some() {
                    outcome = Err(ErrorKind::Interrupted.into());
                }
                self.take_time(before - group.bytes[0]);
                outcome
            }
            "cpuset.mems" => {
                self.be_busy()?;
                group.set_nodes(line, &online)
            }
            _ => Err(ErrorKind::NotFound.into()),
        }
    }

    /// What is below `kdamonds`.
    fn write_damon(&self, path: &str, line: &str) -> Result<(), Error> {
        self.be_busy()?;
        let mut files = self.files.borrow_mut();
        let (folder, name) = path.rsplit_once('/').ok_or(ErrorKind::NotFound)?;
        let (state, invalid) = (format!("{KDAMONDS}/0/state"), || Error::from_raw_os_error(EINVAL));
        let is_lacked = path.split('/').any(|part| self.damon_lacks.borrow().contains(part));
        let is_there = is_counted(&files, path) && !is_lacked;
        let is_on = files.get(&state).is_some_and(|text| text == "on\n");
        let is_busy = match (name, line) {
            ("nr_kdamonds", _) => is_on,
            ("state", "on") => is_on || files.get(DAMON_STAT).is_some_and(|text| text == "Y\n"),
            _ => false,
        };
        match (name, line) {
            _ if !is_there => return Err(ErrorKind::NotFound.into()),
            _ if is_busy => return Err(Error::from_raw_os_error(EBUSY)),
            ("state", "on" | "off") if (line == "off") == is_on => {}
            ("state", "commit_schemes_quota_goals") if is_on => {}
            ("state", _) => return Err(invalid()),
            _ => {}
        }
        if name.starts_with("nr_") {
            let count: u64 = line.parse().map_err(|_| invalid())?;
            let above = format!("{folder}/");
            files.retain(|file, _| file.strip_prefix(&above).is_none_or(|rest| !rest.contains('/')));
            if name == "nr_kdamonds" && count > 0 {
                files.insert(state.clone(), "off\n".to_owned());
            }
        }
        if !line.starts_with("commit") {
            files.insert(path.to_owned(), format!("{line}\n"));
        }
        if path == state && line == "on" {
            let inodes =
                self.groups.borrow().iter().map(|(path, group)| (path.clone(), group.inode)).collect();
            self.bound.replace(inodes);
        }
        if path == state && line != "off" {
            self.reach_goals(&files);
        }
        Ok(())
    }

    /// Each scheme moves what its goal wants, up to its quota.
    fn reach_goals(&self, files: &BTreeMap<String, String>) {
        let schemes = format!("{KDAMONDS}/0/contexts/0/schemes");
        let text = |path: String| files.get(&path).map_or("", |text| text.trim());
        let number = |path: String| text(path).parse::<u64>().unwrap_or(0);
        for scheme in 0..number(format!("{schemes}/nr_schemes")) {
            let quotas = format!("{schemes}/{scheme}/quotas");
            let (quota, goal) = (number(format!("{quotas}/bytes")), format!("{quotas}/goals/0"));
            let target = self.fast_bytes / 10_000 * number(format!("{goal}/target_value"));
            let is_cold = text(format!("{schemes}/{scheme}/action")) == "migrate_cold";
            let path = text(format!("{goal}/path"));
            self.change(path, |group| {
                if self.bound.borrow().get(path) != Some(&group.inode) {
                    return;
                }
                let used = group.bytes[0];
                let wanted = if is_cold {
                    used.saturating_sub(self.fast_bytes - target)
                } else {
                    target.saturating_sub(used)
                };
                let (from, to) = if is_cold { (0, 1) } else { (1, 0) };
                let moved = wanted.min(quota).min(group.bytes[from]);
                let of_cache = moved.saturating_sub(group.bytes[from] - group.cache[from]);
                for (bytes, moved) in [(&mut group.bytes, moved), (&mut group.cache, of_cache)] {
                    bytes[from] -= moved;
                    bytes[to] += moved;
                }
            });
        }
    }

    /// Tells the poison list of a device to the tracing instance.
    fn list_poison(&self, device: &str) {
        for (dpa, hpa) in self.poison.borrow().get(device).into_iter().flatten() {
            self.trace(&format!(
                "cxl_poison: memdev={device} host=0000:0d:00.0 serial=1 trace_type=List region=region0 region_uuid=0 \
                 hpa=0x{hpa:x} dpa=0x{dpa:x} dpa_length=0x40 source=Injected flags= overflow_time=0"
            ));
        }
    }

    fn write_file(&self, path: &str, line: &str) -> Result<(), Error> {
        if let Some(device) = path.strip_suffix("/trigger_poison_list") {
            if !self.files.borrow().contains_key(path) {
                return Err(ErrorKind::NotFound.into());
            }
            self.list_poison(device.rsplit('/').next().unwrap_or_default());
            return Ok(());
        }
        if path.starts_with(KDAMONDS) {
            return self.write_damon(path, line);
        }
        let mut files = self.files.borrow_mut();
        let text = files.get_mut(path).ok_or(ErrorKind::NotFound)?;
        self.be_busy()?;
        let number = line.parse::<u64>().ok();
        let value = match path {
            DEMOTION | INTERLEAVE_AUTO => ["true", "false"].contains(&line).then(|| line.to_owned()),
            BALANCING => number.filter(|mode| *mode < 4).map(|mode| mode.to_string()),
            _ if path.starts_with(INTERLEAVE) => {
                // 0 gives back the kernel's own weight.
                number.filter(|weight| *weight < 256).map(|weight| weight.max(1).to_string())
            }
            _ => Some(line.to_owned()),
        };
        *text = value.ok_or_else(|| Error::from_raw_os_error(EINVAL))? + "\n";
        if path.starts_with(INTERLEAVE) && path != INTERLEAVE_AUTO && files.contains_key(INTERLEAVE_AUTO) {
            files.insert(INTERLEAVE_AUTO.to_owned(), "false\n".to_owned());
        }
        Ok(())
    }

    fn meminfo(&self, path: &str) -> Option<String> {
        let (node, bytes) = match path {
            "/sys/devices/system/node/node0/meminfo" => (0, self.fast_bytes),
            "/sys/devices/system/node/node1/meminfo" => (1, self.slow_bytes.get()),
            _ => return None,
        };
        let (all, free) = (bytes >> 10, bytes.saturating_sub(self.used(node)) >> 10);
        Some(format!("Node {node} MemTotal:       {all} kB\nNode {node} MemFree:   {free} kB\n"))
    }
}

/// Whether each folder of `path` with a number is below the count beside it.
fn is_counted(files: &BTreeMap<String, String>, path: &str) -> bool {
    let count = |parent: &str| -> Option<u64> {
        let name = parent.rsplit_once('/')?.1;
        files.get(&format!("{parent}/nr_{name}"))?.trim().parse().ok()
    };
    let mut at = KDAMONDS.to_owned();
    files.contains_key(&format!("{KDAMONDS}/nr_kdamonds"))
        && path[KDAMONDS.len()..].split('/').skip(1).all(|part| {
            let is_there = part.parse::<u64>().is_err() || count(&at) > part.parse().ok();
            at = format!("{at}/{part}");
            is_there
        })
}

impl Kernel for Tree {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn copied(&self) -> Option<String> {
        None
    }

    fn read(&self, path: &str) -> Result<String, KernelError> {
        self.pass();
        let group = self.split(path).and_then(|(folder, name)| self.read_group(&folder, name));
        let text = group.or_else(|| self.files.borrow().get(path).cloned()).or_else(|| self.meminfo(path));
        text.ok_or_else(|| KernelError::gone(path))
    }

    fn write(&self, path: &str, line: &str) -> Result<(), KernelError> {
        self.pass();
        let write = || {
            self.live()?;
            match self.split(path) {
                Some((folder, name)) => self.write_group(&folder, name, line),
                None => self.write_file(path, line),
            }
        };
        write().map_err(KernelError::file(path))
    }

    fn list(&self, path: &str) -> Result<Vec<String>, KernelError> {
        self.pass();
        let inside = format!("{path}/");
        let (files, groups) = (self.files.borrow(), self.groups.borrow());
        let own = path.strip_prefix(CGROUPS).and_then(|folder| groups.get(folder));
        let groups: Vec<String> = groups.keys().map(|group| format!("{CGROUPS}{group}")).collect();
        let paths = files.keys().chain(&groups);
        let names = paths.filter_map(|file| file.strip_prefix(&inside)?.split('/').next());
        let mut names: BTreeSet<String> = names.map(str::to_owned).collect();
        let has = |name: &&str| own.is_some_and(|group| !group.lacks.contains(*name));
        names.extend(GROUP_FILES.into_iter().filter(has).map(str::to_owned));
        if names.is_empty() && path != CGROUPS && !groups.iter().any(|group| group == path) {
            return Err(KernelError::gone(path));
        }
        Ok(names.into_iter().collect())
    }

    fn inode(&self, path: &str) -> Result<u64, KernelError> {
        self.pass();
        let folder =
            path.strip_prefix(CGROUPS).and_then(|folder| Some(self.groups.borrow().get(folder)?.inode));
        let file = self.split(path).and_then(|(folder, name)| {
            let groups = self.groups.borrow();
            let group = groups.get(&folder).filter(|group| !group.lacks.contains(name))?;
            GROUP_FILES.contains(&name).then_some(group.inode)
        });
        folder.or(file).ok_or_else(|| KernelError::gone(path))
    }

    fn drain(&self, path: &str) -> Result<String, KernelError> {
        let mut files = self.files.borrow_mut();
        files.get_mut(path).map(std::mem::take).ok_or_else(|| KernelError::gone(path))
    }

    fn words(&self, _: &str, first: u64, count: u64) -> Result<Vec<u64>, KernelError> {
        let (pages, groups) = (self.pages.borrow(), self.groups.borrow());
        let inode =
            |frame: u64| pages.get(&frame).and_then(|path| Some(groups.get(path)?.inode)).unwrap_or(0);
        Ok((first..first + count).map(inode).collect())
    }

    fn fetch(&self, address: &str) -> Result<String, KernelError> {
        let answer = self.answers.borrow().get(address).cloned();
        answer.ok_or_else(|| KernelError::file(address)(ErrorKind::ConnectionRefused.into()))
    }

    fn make_folder(&self, path: &str) -> Result<(), KernelError> {
        let make = || {
            self.live()?;
            self.be_busy()?;
            let mut files = self.files.borrow_mut();
            if !files.contains_key("/sys/kernel/tracing/events/cxl/enable") {
                return Err(ErrorKind::NotFound.into());
            }
            let entries = [
                ("events/cxl/enable", "0\n"),
                ("options/context-info", "1\n"),
                ("buffer_size_kb", "7\n"),
                ("trace_pipe", ""),
            ];
            if files.contains_key(&format!("{path}/trace_pipe")) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            files.extend(entries.map(|(name, text)| (format!("{path}/{name}"), text.to_owned())));
            Ok(())
        };
        make().map_err(KernelError::file(path))
    }

    fn remove_folder(&self, path: &str) -> Result<(), KernelError> {
        self.live().map_err(KernelError::file(path))?;
        let inside = format!("{path}/");
        let mut files = self.files.borrow_mut();
        let before = files.len();
        files.retain(|file, _| !file.starts_with(&inside));
        if files.len() == before { Err(KernelError::gone(path)) } else { Ok(()) }
    }

    fn promotes(&self) -> bool {
        self.promotes.get()
    }

    fn promote(&self, cgroup: &Cgroup, what: Promotion<'_>, resume: &mut Resume) -> Result<u64, KernelError> {
        self.pass();
        let path = cgroup.file("cgroup.procs");
        self.live().map_err(KernelError::file(&path))?;
        let room = self.fast_bytes.saturating_sub(self.used(0));
        let mut groups = self.groups.borrow_mut();
        let group = groups.get_mut(cgroup.path()).ok_or_else(|| KernelError::gone(&path))?;
        let there = group.bytes[1].saturating_sub(group.cache[1]).saturating_sub(group.shared);
        let moved = what.bytes.min(there).min(room);
        group.bytes = [group.bytes[0] + moved, group.bytes[1] - moved];
        self.take_time(moved);
        self.targets.borrow_mut().push(what.to);
        *resume = (moved == what.bytes).then_some((1, 0));
        Ok(moved)
    }

    fn read_own(&self, path: &str) -> Result<String, KernelError> {
        let text = self.disk.borrow().get(path).cloned();
        text.ok_or_else(|| KernelError::gone(path))
    }

    fn append(&self, path: &str, line: &str) -> Result<(), KernelError> {
        let lives = self.live();
        let mut disk = self.disk.borrow_mut();
        let text = disk.entry(path.to_owned()).or_default();
        if lives.is_err() {
            text.push_str(&line[..line.len() / 2]);
            return lives.map_err(KernelError::file(path));
        }
        text.push_str(line);
        text.push('\n');
        Ok(())
    }

    fn replace(&self, path: &str, text: &str) -> Result<(), KernelError> {
        self.live().map_err(KernelError::file(path))?;
        self.disk.borrow_mut().insert(path.to_owned(), text.to_owned());
        Ok(())
    }

    fn remove(&self, path: &str) -> Result<(), KernelError> {
        self.live().map_err(KernelError::file(path))?;
        self.disk.borrow_mut().remove(path).map(drop).ok_or_else(|| KernelError::gone(path))
    }
}
