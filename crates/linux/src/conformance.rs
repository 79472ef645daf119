//! What the agent takes for granted of a kernel, as one test that runs against a kernel and against [`crate::fake`].

use std::collections::{BTreeMap, BTreeSet};

use crate::damon::{DAMON_STAT, KDAMONDS};
use crate::{
    BALANCING, Cgroup, DEMOTION, HugePages, INTERLEAVE, INTERLEAVE_AUTO, Kernel, KernelError, NodeMemory,
    Promotion, ReclaimWords, Tiers, show_nodes,
};

const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
/// How often a file is written that the kernel may be busy with.
const TRIES: u32 = 100;
const MIB: u64 = 1 << 20;

/// Checks one behaviour after the other on `cgroup`: it has processes, 32 MiB and more of anonymous memory on the fast tier, an empty
/// `cpuset.mems`, and no swap. Settings are as they were in the end. Returns what was checked.
///
/// # Errors
/// The behaviour that differs.
pub fn check(kernel: &impl Kernel, cgroup: &Cgroup) -> Result<Vec<&'static str>, String> {
    let failed = |error: KernelError| error.to_string();
    let tiers = Tiers::discover(kernel).map_err(failed)?;
    let mut bench = Bench { kernel, cgroup, tiers, checked: Vec::new() };
    let balancing = kernel.read(BALANCING).map_err(failed)?;
    let demotion = kernel.read(DEMOTION).map_err(failed)?;
    let outcome = bench
        .settings()
        .and_then(|()| bench.reclaim())
        .and_then(|()| bench.promotion())
        .and_then(|()| bench.cpuset())
        .and_then(|()| bench.kdamonds());
    for (path, was) in [(BALANCING, balancing), (DEMOTION, demotion)] {
        kernel.write(path, was.trim()).map_err(failed)?;
    }
    outcome.map(|()| bench.checked)
}

struct Bench<'k, K> {
    kernel: &'k K,
    cgroup: &'k Cgroup,
    tiers: Tiers,
    checked: Vec<&'static str>,
}

impl<K: Kernel> Bench<'_, K> {
    fn expect(&mut self, holds: bool, what: &'static str) -> Result<(), String> {
        self.checked.push(what);
        if holds { Ok(()) } else { Err(format!("it does not hold that {what}")) }
    }

    fn bytes(&self) -> Result<(u64, u64), String> {
        self.cgroup.sum_up(self.kernel);
        let memory =
            self.cgroup.memory(self.kernel, &HugePages::default()).map_err(|error| error.to_string())?;
        let sum = |nodes: &BTreeSet<u32>, memory: &BTreeMap<u32, NodeMemory>| {
            nodes.iter().filter_map(|node| memory.get(node)).map(|memory| memory.anon).sum()
        };
        Ok((sum(&self.tiers.fast, &memory), sum(&self.tiers.slow, &memory)))
    }

    fn write(&self, path: &str, line: &str) -> Result<(), Option<i32>> {
        self.kernel.write(path, line).map_err(|error| match error {
            KernelError::File { source, .. } => source.raw_os_error(),
            _ => None,
        })
    }

    fn says(&self, path: &str, value: &str) -> bool {
        self.kernel.read(path).is_ok_and(|text| text.trim() == value)
    }

    fn settings(&mut self) -> Result<(), String> {
        for mode in ["0", "2"] {
            let written = self.write(BALANCING, mode).is_ok() && self.says(BALANCING, mode);
            self.expect(written, "numa_balancing says what was written")?;
        }
        self.expect(self.write(BALANCING, "9").is_err(), "numa_balancing refuses a mode that there is not")?;
        self.expect(
            self.write(DEMOTION, "x") == Err(Some(EINVAL)),
            "demotion_enabled refuses a word with EINVAL",
        )?;
        let path = format!("{INTERLEAVE}/node{}", self.tiers.fast.first().unwrap_or(&0));
        if let Ok(was) = self.kernel.read(&path) {
            let derived = self.kernel.read(INTERLEAVE_AUTO).map(|text| text.trim().to_owned());
            let written = self.write(&path, "3").is_ok() && self.says(&path, "3");
            self.expect(written, "a weight says what was written")?;
            self.expect(self.write(&path, "256") == Err(Some(EINVAL)), "a weight above 255 is EINVAL")?;
            self.expect(
                self.write(&path, was.trim()).is_ok() && self.says(&path, was.trim()),
                "a weight is given back",
            )?;
            if derived.is_ok_and(|text| text == "true") {
                let ended = self.says(INTERLEAVE_AUTO, "false");
                self.expect(ended, "a weight that is written ends the kernel's own derivation")?;
                let begun = self.write(INTERLEAVE_AUTO, "true").is_ok() && self.says(INTERLEAVE_AUTO, "true");
                self.expect(begun && self.says(&path, was.trim()), "the derivation is given back")?;
            }
        }
        let missing = self.kernel.read(&format!("{}/no/memory.stat", self.cgroup.folder()));
        self.expect(missing.is_err_and(|error| error.is_gone()), "a file of no cgroup is gone")?;
        let (first, second) =
            (self.kernel.inode(&self.cgroup.folder()), self.kernel.inode(&self.cgroup.folder()));
        self.expect(first.is_ok() && first.ok() == second.ok(), "a cgroup keeps its inode")
    }

    fn reclaim(&mut self) -> Result<(), String> {
        let file = self.cgroup.file("memory.reclaim");
        self.expect(
            self.write(&file, "x") == Err(Some(EINVAL)),
            "memory.reclaim refuses a word with EINVAL",
        )?;
        self.write(DEMOTION, "false").map_err(|error| format!("{DEMOTION}: {error:?}"))?;
        let before = self.bytes()?;
        let moved = self
            .cgroup
            .demote(self.kernel, 8 * MIB, false, &mut ReclaimWords::default())
            .map_err(|error| error.to_string())?;
        self.expect(
            !moved && self.bytes()?.1 == before.1,
            "without demotion and swap anonymous memory stays, and the answer is EAGAIN",
        )?;
        self.write(DEMOTION, "true").map_err(|error| format!("{DEMOTION}: {error:?}"))?;
        self.expect(self.says(DEMOTION, "true"), "demotion_enabled says true")?;
        self.cgroup
            .demote(self.kernel, 8 * MIB, false, &mut ReclaimWords::default())
            .map_err(|error| error.to_string())?;
        let after = self.bytes()?;
        self.expect(
            after.1 >= before.1 + 4 * MIB && after.0 < before.0,
            "with demotion it goes to the slow tier",
        )?;
        let all = self
            .cgroup
            .demote(self.kernel, 1 << 40, false, &mut ReclaimWords::default())
            .map_err(|error| error.to_string())?;
        self.expect(!all, "more than there is answers EAGAIN")
    }

    /// After the reclaim, which leaves memory on the slow tier that nobody uses.
    fn promotion(&mut self) -> Result<(), String> {
        // Up to Linux 6.5 move_pages does not find pages that NUMA balancing watches; what came with 6.9 tells.
        if !self.kernel.promotes() || self.kernel.read(&format!("{INTERLEAVE}/node0")).is_err() {
            return Ok(());
        }
        let (before, to) = (self.bytes()?, *self.tiers.fast.first().ok_or("no fast node")?);
        let what = Promotion { from: &self.tiers.slow, to, bytes: 4 * MIB };
        let moved = self.kernel.promote(self.cgroup, what, &mut None).map_err(|error| error.to_string())?;
        let after = self.bytes()?;
        self.expect(
            moved >= 2 * MIB && after.0 >= before.0 + moved,
            "memory that nobody uses goes up on demand",
        )?;
        // A huge page goes up whole, and the kernel itself promotes what is used.
        self.expect(
            moved <= 4 * MIB && after.0 <= before.0 + 16 * MIB,
            "and not much more than was asked for",
        )
    }

    fn cpuset(&mut self) -> Result<(), String> {
        let file = self.cgroup.file("cpuset.mems");
        let fast = show_nodes(&self.tiers.fast);
        let all = show_nodes(&self.tiers.all());
        let effective = self.cgroup.effective_nodes(self.kernel).map_err(|error| error.to_string())?;
        self.expect(effective == self.tiers.all(), "an empty cpuset.mems has all nodes in effect")?;
        self.expect(self.write(&file, "77") == Err(Some(EINVAL)), "a node that is not there is EINVAL")?;
        let written = self.write(&file, &fast).is_ok() && self.says(&file, &fast);
        self.expect(written, "cpuset.mems says what was written")?;
        self.expect(self.bytes()?.1 == 0, "a set that changes migrates what lies outside of it")?;
        // Linux 7.3 takes it, and has all nodes in effect then; 6.12 does not.
        let emptied = self.write(&file, "");
        let is_known = matches!(emptied, Ok(()) | Err(Some(ENOSPC)));
        self.expect(is_known, "an empty set after another is taken, or is ENOSPC")?;
        let written = self.write(&file, &all).is_ok();
        let effective = self.cgroup.effective_nodes(self.kernel).map_err(|error| error.to_string())?;
        self.expect(written && effective == self.tiers.all(), "all nodes do what the empty set did")?;
        for line in Cgroup::migration(&self.tiers.fast, &self.tiers.slow) {
            self.write(&file, &line).map_err(|error| format!("{file}: {error:?}"))?;
        }
        self.expect(self.bytes()?.1 == 0, "widening and narrowing the set brings everything back")?;
        self.expect(self.write(&file, &all).is_ok(), "the set is given back")
    }

    /// DAMON's files, where the kernel has them and nobody uses them.
    fn kdamonds(&mut self) -> Result<(), String> {
        let count = format!("{KDAMONDS}/nr_kdamonds");
        if !self.says(&count, "0") {
            return Ok(());
        }
        let (state, context) = (format!("{KDAMONDS}/0/state"), format!("{KDAMONDS}/0/contexts/0"));
        let stat = self.says(DAMON_STAT, "Y");
        self.expect(
            self.kernel.read(&state).is_err_and(|error| error.is_gone()),
            "no kdamond has files before it is counted",
        )?;
        self.expect(
            self.write(&count, "x") == Err(Some(EINVAL)),
            "a count of kdamonds that is no number is EINVAL",
        )?;
        let made = self.write(&count, "1").is_ok() && self.says(&state, "off");
        self.expect(made, "a kdamond that is counted has files, and is off")?;
        self.expect(self.write(&state, "x") == Err(Some(EINVAL)), "a state that there is not is EINVAL")?;
        let gone = self.kernel.write(&format!("{context}/operations"), "paddr");
        self.expect(gone.is_err_and(|error| error.is_gone()), "no context has files before it is counted")?;
        let outcome = self.run_kdamond(&count, &state, &context, stat);
        // Off, and as it was found, whatever came out.
        let _ = self.write(&state, "off");
        let removed = self.write(&count, "0").is_ok() && self.kernel.read(&state).is_err();
        if stat {
            self.write(DAMON_STAT, "Y").map_err(|error| format!("{DAMON_STAT}: {error:?}"))?;
        }
        outcome?;
        self.expect(removed, "a count of 0 takes the files of kdamonds away")
    }

    fn run_kdamond(&mut self, count: &str, state: &str, context: &str, stat: bool) -> Result<(), String> {
        let set = |bench: &Self, path: &str, value: &str| {
            bench.write(path, value).map_err(|error| format!("{path}: {error:?}"))
        };
        set(self, &format!("{KDAMONDS}/0/contexts/nr_contexts"), "1")?;
        set(self, &format!("{context}/operations"), "paddr")?;
        set(self, &format!("{context}/targets/nr_targets"), "1")?;
        if stat {
            let busy = self.write(state, "on");
            self.expect(busy == Err(Some(EBUSY)), "while DAMON_STAT runs another use of DAMON is EBUSY")?;
            set(self, DAMON_STAT, "N")?;
        }
        self.turn(state, "on", "a kdamond says that it is on")?;
        self.expect(self.write(count, "2") == Err(Some(EBUSY)), "a count while a kdamond runs is EBUSY")?;
        self.turn(state, "off", "a kdamond says that it is off")
    }

    /// Writes a state of a kdamond until it says it: what holds the lock of these files for a moment makes the kernel say EBUSY to others.
    /// The agent tries again in its next round.
    ///
    /// # Errors
    /// What was seen last.
    fn turn(&mut self, state: &str, value: &str, what: &'static str) -> Result<(), String> {
        let mut is_taken = false;
        let mut seen = String::new();
        for _ in 0..TRIES {
            let written = self.write(state, value);
            is_taken |= written.is_ok();
            let says = self.kernel.read(state).map(|text| text.trim().to_owned());
            if is_taken && says.as_deref().is_ok_and(|says| says == value) {
                return self.expect(true, what);
            }
            seen = format!("{written:?}, then {says:?}");
            std::thread::yield_now();
        }
        Err(format!("it does not hold that {what}: {seen}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    #[test]
    fn the_tree_behaves_as_the_agent_takes_for_granted() {
        let tree = Tree::new(512 * MIB);
        tree.add_group("/a", [64 * MIB, 0]);
        let checked = check(&tree, &Cgroup::new("/a").unwrap()).unwrap();
        assert!(checked.len() >= 20, "{checked:?}");
        tree.add_group("/b", [64 * MIB, 0]);
        tree.derives_weights();
        let more = check(&tree, &Cgroup::new("/b").unwrap()).unwrap();
        assert_eq!(more.len(), checked.len() + 2, "{more:?}");
        tree.add_group("/c", [64 * MIB, 0]);
        tree.has_goals("6.19.0-fake");
        let before = tree.settings();
        let damon = check(&tree, &Cgroup::new("/c").unwrap()).unwrap();
        assert_eq!(damon.len(), more.len() + 10, "{damon:?}");
        assert_eq!(tree.settings(), before, "DAMON is as found");
    }
}
