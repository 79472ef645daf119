//! Moves memory of a cgroup up to a fast node, by the processes that have it.
//!
//! The kernel itself promotes pages that are used. What nobody touches stays where it is, so it is moved by `move_pages`, a system call of
//! another crate ([`MovePages`]). Only anonymous memory that one process alone maps is moved. The rest may belong to other cgroups too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::num::NonZero;

use crate::error::KernelError;
use crate::kernel::{Cgroup, Kernel, Promotion, Resume};
use crate::nodes::{NODES, page_bytes, parse_list};

/// Moves pages of a process to a node, and says where each lies then, or a negative error number: `polder_offload::move_pages`.
pub type MovePages = fn(NonZero<u32>, &[usize], Option<u32>) -> io::Result<Vec<i32>>;

/// Pages of one system call.
const BATCH: usize = 1024;
/// Pages that one call looks at; the next goes on behind them.
const MOST_LOOKED: usize = 1 << 19;
/// Cgroups that are searched for processes, at most.
const MOST_CGROUPS: usize = 1000;

/// Carries out a promotion of `cgroup` and those below it. Returns the bytes that went up; `resume` is [`None`] once the last process was looked at.
///
/// # Errors
/// [`KernelError::Missing`] where this process sees none of the cgroup's, or lacks `CAP_SYS_PTRACE`. [`KernelError::File`] as reading fails.
pub(crate) fn promote(
    kernel: &impl Kernel,
    move_pages: MovePages,
    cgroup: &Cgroup,
    promotion: Promotion<'_>,
    resume: &mut Resume,
) -> Result<u64, KernelError> {
    let (first, address) = resume.take().unwrap_or((0, 0));
    let page = page_bytes(kernel) as usize;
    let mut sweep = Sweep { move_pages, promotion, page, moved: 0, looked: 0 };
    let pids = processes(kernel, cgroup)?;
    let mut refused = None;
    let mut seen = 0;
    for &pid in pids.range(first..) {
        let Some(pid) = NonZero::new(pid) else { continue };
        let begin = if pid.get() == first { address } else { 0 };
        match sweep.process(kernel, cgroup, pid, begin) {
            Ok(Some(next)) => {
                *resume = Some((pid.get(), next));
                return Ok(sweep.moved);
            }
            Ok(None) => seen += 1,
            // It ended meanwhile.
            Err(error) if error.is_gone() || error.raw() == Some(ESRCH) => {}
            Err(error) => refused = Some(error),
        }
    }
    let path = cgroup.path();
    match refused {
        Some(error) if seen == 0 => Err(KernelError::Missing(format!(
            "{path}: its pages cannot be moved up: {error}; the agent needs CAP_SYS_PTRACE"
        ))),
        _ if pids.iter().eq(&[0]) => Err(KernelError::Missing(format!(
            "{path}: its pages cannot be moved up: its processes are of another PID namespace; a pod needs hostPID"
        ))),
        _ => Ok(sweep.moved),
    }
}

const ESRCH: i32 = 3;

impl Cgroup {
    /// How many of its threads ran last on a CPU of each of `nodes`. Of very many, some are looked at.
    ///
    /// # Errors
    /// As reading `cgroup.procs` fails.
    pub fn threads_by_node(
        &self,
        kernel: &impl Kernel,
        nodes: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, usize>, KernelError> {
        const MOST_THREADS: usize = 256;
        /// Linux has 8,192 CPUs at most.
        const MOST_CPUS: u32 = 1 << 13;
        let cpus = |node: &u32| {
            let list = kernel.read(&format!("{NODES}/node{node}/cpulist")).ok()?;
            Some((*node, parse_list(&list, MOST_CPUS)?))
        };
        let cpus: Vec<(u32, BTreeSet<u32>)> = nodes.iter().filter_map(cpus).collect();
        let pids = processes(kernel, self)?;
        let threads = pids.iter().flat_map(|pid| {
            let folder = format!("/proc/{pid}/task");
            let names = kernel.list(&folder).unwrap_or_default();
            names.into_iter().map(move |name| format!("{folder}/{name}/stat"))
        });
        let mut counts = BTreeMap::new();
        for path in threads.take(MOST_THREADS) {
            // proc(5): the 39th field, as in `start_of`. A thread may have ended.
            let text = kernel.read(&path).unwrap_or_default();
            let field =
                text.rsplit_once(')').and_then(|(_, after)| after.split_ascii_whitespace().nth(39 - 3));
            let Some(cpu) = field.and_then(|field| field.parse().ok()) else { continue };
            if let Some((node, _)) = cpus.iter().find(|(_, cpus)| cpus.contains(&cpu)) {
                *counts.entry(*node).or_default() += 1;
            }
        }
        Ok(counts)
    }
}

/// Processes of a cgroup and of those below it; 0 stands for those that this process cannot see.
fn processes(kernel: &impl Kernel, cgroup: &Cgroup) -> Result<BTreeSet<u32>, KernelError> {
    let numbers =
        |text: String| text.lines().filter_map(|line| line.trim().parse::<u32>().ok()).collect::<Vec<_>>();
    let mut pids = BTreeSet::from_iter(numbers(kernel.read(&cgroup.file("cgroup.procs"))?));
    let mut folders = VecDeque::from([cgroup.folder()]);
    let mut looked = 0;
    while let Some(folder) = folders.pop_front().filter(|_| looked < MOST_CGROUPS) {
        looked += 1;
        for name in kernel.list(&folder).unwrap_or_default() {
            // What is no cgroup has no such file; one of threads refuses.
            let below = format!("{folder}/{name}");
            if let Ok(text) = kernel.read(&format!("{below}/cgroup.procs")) {
                pids.extend(numbers(text));
                folders.push_back(below);
            }
        }
    }
    Ok(pids)
}

/// One call of [`promote`].
struct Sweep<'a> {
    move_pages: MovePages,
    promotion: Promotion<'a>,
    /// Bytes of a page.
    page: usize,
    moved: u64,
    /// Pages that were looked at.
    looked: usize,
}

impl Sweep<'_> {
    /// Goes through a process from `begin` on. Returns the address where the next call goes on, or [`None`] at its end.
    fn process(
        &mut self,
        kernel: &impl Kernel,
        cgroup: &Cgroup,
        pid: NonZero<u32>,
        begin: usize,
    ) -> Result<Option<usize>, KernelError> {
        let Some((start, ranges)) = memory_of(kernel, cgroup, pid)? else { return Ok(None) };
        for (from, to) in ranges {
            let mut at = from.max(begin);
            while at < to {
                let left = self.promotion.bytes.saturating_sub(self.moved) as usize / self.page;
                if left == 0 || self.looked >= MOST_LOOKED {
                    return Ok(Some(at));
                }
                let end = to.min(at + BATCH * self.page);
                let pages: Vec<usize> = (at..end).step_by(self.page).collect();
                // The number may be another's by now.
                if start_of(kernel, pid)? != start {
                    return Ok(None);
                }
                at = self.batch(pid, &pages, left)?;
            }
        }
        Ok(None)
    }

    /// Moves `left` pages of these at most. Returns the address behind the last that was looked at.
    fn batch(&mut self, pid: NonZero<u32>, pages: &[usize], left: usize) -> Result<usize, KernelError> {
        let call = |pages: &[usize], node| {
            let nodes = (self.move_pages)(pid, pages, node).map_err(KernelError::file("move_pages"))?;
            Ok::<_, KernelError>(nodes.into_iter().map(|node| u32::try_from(node).ok()).collect::<Vec<_>>())
        };
        let nodes = call(pages, None)?;
        let is_slow = |node: &Option<u32>| node.is_some_and(|node| self.promotion.from.contains(&node));
        let slow = pages.iter().zip(&nodes).filter(|(_, node)| is_slow(node)).map(|(page, _)| *page);
        let slow: Vec<usize> = slow.take(left).collect();
        let all = nodes.iter().filter(|node| is_slow(node)).count();
        let next = if slow.len() < all { slow.last() } else { pages.last() };
        if !slow.is_empty() {
            let to = Some(self.promotion.to);
            let moved = call(&slow, to)?.iter().filter(|node| **node == to).count();
            self.moved += (moved * self.page) as u64;
        }
        self.looked += pages.len();
        Ok(next.map_or(0, |page| page + self.page))
    }
}

/// When a process was started, by which it is told from a later one of its number.
fn start_of(kernel: &impl Kernel, pid: NonZero<u32>) -> Result<String, KernelError> {
    let path = format!("/proc/{pid}/stat");
    let text = kernel.read(&path)?;
    // proc(5): the 22nd field; the second may have blanks, and ends with a bracket.
    let field = text.rsplit_once(')').and_then(|(_, after)| after.split_ascii_whitespace().nth(22 - 3));
    field.map(str::to_owned).ok_or(KernelError::Format {
        path,
        text: text.clone(),
        expected: "a line of proc(5)",
    })
}

/// Addresses, each range from its first to before its last.
type Ranges = Vec<(usize, usize)>;

/// The start of a process, and its ranges of anonymous memory; [`None`] where it is not of the cgroup any more.
fn memory_of(
    kernel: &impl Kernel,
    cgroup: &Cgroup,
    pid: NonZero<u32>,
) -> Result<Option<(String, Ranges)>, KernelError> {
    let start = start_of(kernel, pid)?;
    let of = kernel.read(&format!("/proc/{pid}/cgroup"))?;
    let is_inside = |path: &str| {
        path.strip_prefix(cgroup.path()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let is_its = of.lines().filter_map(|line| line.strip_prefix("0::")).any(is_inside);
    let maps = kernel.read(&format!("/proc/{pid}/maps"))?;
    // All of this is of one process.
    let is_one = start_of(kernel, pid)? == start;
    Ok((is_its && is_one).then(|| (start, maps.lines().filter_map(anonymous).collect())))
}

/// The range of a line of `/proc/PID/maps` that is of no file, and that the process may read.
fn anonymous(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let (rights, inode) = (fields.next()?, fields.nth(2)?);
    // Names in brackets that begin with v are pages of the kernel.
    let is_kernels = fields.next().is_some_and(|name| name.starts_with("[v"));
    let address = |text| usize::from_str_radix(text, 16).ok();
    (rights.starts_with('r') && inode == "0" && !is_kernels).then_some((address(from)?, address(to)?))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::Host;

    const PAGE: usize = 4096;

    thread_local! {
        /// The node of each page of a process, for [`moves`].
        static NODES: RefCell<BTreeMap<(u32, usize), i32>> = const { RefCell::new(BTreeMap::new()) };
        /// A file that has another text after the next call of [`moves`].
        static THEN: RefCell<Option<(PathBuf, String)>> = const { RefCell::new(None) };
    }

    /// Moves pages of [`NODES`]; a process without any is gone, and one with a page at 1 refuses.
    fn moves(pid: NonZero<u32>, pages: &[usize], node: Option<u32>) -> io::Result<Vec<i32>> {
        if let Some((path, text)) = THEN.take() {
            fs::write(path, text).unwrap();
        }
        NODES.with_borrow_mut(|nodes| {
            let pid = pid.get();
            if nodes.range((pid, 0)..=(pid, usize::MAX)).next().is_none() {
                return Err(io::Error::from_raw_os_error(ESRCH));
            }
            if nodes.contains_key(&(pid, 1)) {
                return Err(io::Error::from_raw_os_error(1));
            }
            let mut at = |page: &usize| match (nodes.get_mut(&(pid, *page)), node) {
                (None, _) => -2,
                (Some(at), Some(node)) => {
                    *at = node as i32;
                    *at
                }
                (Some(at), None) => *at,
            };
            Ok(pages.iter().map(&mut at).collect())
        })
    }

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A process of the cgroup `of` with memory from page 16 to 32 and from 96 to 100 without a file, and from 64 to 80 of a file, all on
    /// node 1.
    fn process(root: &Path, pid: u32, of: &str) {
        let folder = format!("/proc/{pid}");
        let fields = "S 1 0 0 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 77 0 0";
        put(root, &format!("{folder}/stat"), &format!("{pid} (a b) c) {fields}\n"));
        put(root, &format!("{folder}/cgroup"), &format!("0::{of}\n"));
        let maps = "00010000-00020000 rw-p 00000000 00:00 0 [heap]\n\
                    00020000-00030000 ---p 00000000 00:00 0 \n\
                    00040000-00050000 r--p 00000000 08:01 42 /usr/lib/a b.so\n\
                    00060000-00064000 rw-p 00000000 00:00 0 \n\
                    7ffff0000000-7ffff0001000 r-xp 00000000 00:00 0 [vdso]\n";
        put(root, &format!("{folder}/maps"), maps);
        let pages = (16..32).chain(64..80).chain(96..100).map(|page| ((pid, page * PAGE), 1));
        NODES.with_borrow_mut(|nodes| nodes.extend(pages));
    }

    /// A cgroup with processes 5 and 6, the second in a cgroup below.
    fn host() -> (tempfile::TempDir, Host, Cgroup) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        put(root, "/sys/fs/cgroup/web/cgroup.procs", "5\n");
        put(root, "/sys/fs/cgroup/web/memory.stat", "");
        put(root, "/sys/fs/cgroup/web/below.scope/cgroup.procs", "6\n");
        NODES.with_borrow_mut(BTreeMap::clear);
        process(root, 5, "/web");
        process(root, 6, "/web/below.scope");
        let host = Host::below(root).moving_pages_by(moves);
        (folder, host, Cgroup::new("/web").unwrap())
    }

    fn up(host: &Host, cgroup: &Cgroup, pages: u64, resume: &mut Resume) -> Result<u64, KernelError> {
        let from = BTreeSet::from([1]);
        let what = Promotion { from: &from, to: 0, bytes: pages * PAGE as u64 };
        host.promote(cgroup, what, resume).map(|bytes| bytes / PAGE as u64)
    }

    /// Pages of a process that went up.
    fn gone_up(pid: u32) -> Vec<usize> {
        NODES.with_borrow(|nodes| {
            let of = nodes.range((pid, 0)..=(pid, usize::MAX));
            of.filter(|(_, node)| **node == 0).map(|((_, page), _)| page / PAGE).collect()
        })
    }

    #[test]
    fn anonymous_memory_goes_up_as_far_as_asked_and_the_next_call_goes_on() {
        let (_folder, host, web) = host();
        let mut resume = None;
        assert_eq!(up(&host, &web, 10, &mut resume).unwrap(), 10);
        assert_eq!((gone_up(5), gone_up(6)), ((16..26).collect(), vec![]));
        assert_eq!(up(&host, &web, 14, &mut resume).unwrap(), 14);
        assert_eq!((gone_up(5), gone_up(6)), ((16..32).chain(96..100).collect(), (16..20).collect()));
        assert!(resume.is_some());
        let rest = up(&host, &web, 100, &mut resume).unwrap();
        assert_eq!(rest, 16, "files, and what no process may read, stay");
        assert_eq!((resume, gone_up(6)), (None, (16..32).chain(96..100).collect()));
    }

    #[test]
    fn a_process_that_left_ended_or_gave_its_number_away_is_left_alone() {
        let (folder, host, web) = host();
        let all = |expected: u64| assert_eq!(up(&host, &web, 100, &mut None).unwrap(), expected);
        put(folder.path(), "/proc/5/cgroup", "0::/webber\n");
        NODES.with_borrow_mut(|nodes| nodes.retain(|(pid, _), _| *pid == 5));
        all(0);
        assert!(gone_up(5).is_empty());
        process(folder.path(), 6, "/web/below.scope");
        put(folder.path(), "/sys/fs/cgroup/web/cgroup.procs", "5\n7\n");
        // Another process has the number after the first batch.
        let path = folder.path().join("proc/6/stat");
        let stat = fs::read_to_string(&path).unwrap().replace(" 77 ", " 78 ");
        THEN.set(Some((path, stat)));
        all(16);
        assert_eq!(gone_up(6), (16..32).collect::<Vec<_>>());
        fs::remove_dir_all(folder.path().join("sys/fs/cgroup/web")).unwrap();
        assert!(up(&host, &web, 100, &mut None).unwrap_err().is_gone());
    }

    #[test]
    fn memory_of_a_process_whose_name_is_no_text_goes_up() {
        let (folder, host, web) = host();
        for file in ["stat", "maps"] {
            let path = folder.path().join("proc/5").join(file);
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.iter().position(|byte| matches!(byte, b'a' | b'[')).unwrap() + 1;
            bytes.insert(at, 0xff);
            fs::write(&path, bytes).unwrap();
        }
        NODES.with_borrow_mut(|nodes| nodes.retain(|(pid, _), _| *pid == 5));
        assert_eq!(up(&host, &web, 100, &mut None).unwrap(), 20);
    }

    #[test]
    fn what_is_lacking_is_said() {
        let (folder, host, web) = host();
        NODES.with_borrow_mut(|nodes| nodes.extend([((5, 1), 1), ((6, 1), 1)]));
        let said = |host: &Host| up(host, &web, 9, &mut None).unwrap_err().to_string();
        assert!(said(&host).contains("the agent needs CAP_SYS_PTRACE"), "{}", said(&host));
        put(folder.path(), "/sys/fs/cgroup/web/cgroup.procs", "0\n");
        put(folder.path(), "/sys/fs/cgroup/web/below.scope/cgroup.procs", "0\n");
        assert!(said(&host).contains("a pod needs hostPID"), "{}", said(&host));
        let copy = Host::below(folder.path());
        assert!(!copy.promotes() && said(&copy).contains("move_pages"), "a copy of files moves nothing");
    }
}
