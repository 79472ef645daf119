//! What the whole host counts: pages that move between tiers, and what moving them costs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Kernel;
use crate::kernel::number;

/// Counts since the machine started; what this kernel does not count is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCounts {
    /// Pages that were promoted.
    pub promoted_pages: u64,
    /// Pages that were demoted, by whatever cause. What DAMON moves is not among them.
    pub demoted_pages: u64,
    /// Faults that NUMA balancing provoked to see what is hot.
    pub hint_faults: u64,
    /// Processor time of the kernel's reclaiming threads, in ms.
    pub kswapd_ms: u64,
    /// Processor time of DAMON's threads, in ms.
    pub kdamond_ms: u64,
}

/// A thread of the kernel, known by its name and its start, because a number alone may be another's by now.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Thread {
    name: String,
    start: String,
}

/// Reads [`HostCounts`].
#[derive(Clone, Debug, Default)]
pub struct HostCounters {
    threads: BTreeMap<u32, Thread>,
    reads: u64,
}

impl HostCounters {
    /// The counts now. Threads of the kernel are looked for in the first read, and in every hundredth.
    pub fn read(&mut self, kernel: &impl Kernel) -> HostCounts {
        if self.reads.is_multiple_of(100) {
            self.find_threads(kernel);
        }
        self.reads += 1;
        let mut counts = HostCounts::default();
        for line in kernel.read("/proc/vmstat").unwrap_or_default().lines() {
            let Some((name, value)) = line.split_once(' ') else { continue };
            let value = || number(value).unwrap_or(0);
            match name {
                "pgpromote_success" => counts.promoted_pages += value(),
                "numa_hint_faults" => counts.hint_faults += value(),
                _ if name.starts_with("pgdemote_") => counts.demoted_pages += value(),
                _ => {}
            }
        }
        self.threads.retain(|pid, thread| {
            let Some((now, ms)) = thread_time(kernel, *pid).filter(|(now, _)| now == thread) else {
                return false;
            };
            match now.name.starts_with("kswapd") {
                true => counts.kswapd_ms += ms,
                false => counts.kdamond_ms += ms,
            }
            true
        });
        counts
    }

    fn find_threads(&mut self, kernel: &impl Kernel) {
        for pid in kernel.list("/proc").unwrap_or_default().iter().filter_map(|name| name.parse().ok()) {
            let name = kernel.read(&format!("/proc/{pid}/comm")).unwrap_or_default();
            if name.starts_with("kswapd") || name.starts_with("kdamond") {
                self.threads.extend(thread_time(kernel, pid).map(|(thread, _)| (pid, thread)));
            }
        }
    }
}

/// A thread whose parent is kthreadd, with its processor time in ms.
fn thread_time(kernel: &impl Kernel, pid: u32) -> Option<(Thread, u64)> {
    /// Of a tick of /proc, on every Linux.
    const TICK_MS: u64 = 10;
    const KTHREADD: &str = "2";
    let text = kernel.read(&format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = text.rsplit_once(')')?;
    let name = before.split_once('(')?.1.to_owned();
    // proc(5): the fields from the third on; the parent is the fourth.
    let fields: Vec<&str> = after.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    if *fields.get(1)? != KTHREADD {
        return None;
    }
    let start = (*fields.get(22 - 3)?).to_owned();
    Some((Thread { name, start }, (number(14)? + number(15)?) * TICK_MS))
}

#[cfg(all(test, feature = "fake"))]
mod tests {
    use super::*;
    use crate::fake::Tree;

    fn stat(tree: &Tree, name: &str, parent: u32, ticks: u64, start: u64) {
        tree.put("/proc/40/comm", &format!("{name}\n"));
        let fields = format!("S {parent} 0 0 0 -1 0 0 0 0 0 {ticks} 1 0 0 20 0 1 0 {start} 0 0");
        tree.put("/proc/40/stat", &format!("40 ({name}) {fields}\n"));
    }

    #[test]
    fn the_time_of_a_thread_is_counted_until_its_number_is_another_s() {
        let tree = Tree::new(1 << 20);
        tree.put(
            "/proc/vmstat",
            "pgpromote_success 5\npgdemote_kswapd 2\npgdemote_direct 3\nnuma_hint_faults 9\n",
        );
        stat(&tree, "kswapd0", 2, 41, 7);
        let mut counters = HostCounters::default();
        let counts = counters.read(&tree);
        assert_eq!((counts.promoted_pages, counts.demoted_pages, counts.hint_faults), (5, 5, 9));
        assert_eq!(counts.kswapd_ms, 420);
        stat(&tree, "kswapd0", 2, 500, 8);
        assert_eq!(counters.read(&tree).kswapd_ms, 0, "a later thread of the same number");
        stat(&tree, "kswapd0", 1, 500, 7);
        assert_eq!(HostCounters::default().read(&tree).kswapd_ms, 0, "a program of a user with that name");
    }
}
