//! What this kernel offers to tiering, what is lost where it offers less, and what is set up wrongly.
//!
//! [`examine`] reads files alone, so it answers for a recorded tree as for this machine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use crate::damon::{self, KDAMONDS, Told};
use crate::nodes::{
    NODES, device_nodes, managed_pages, nodes_in, nodes_with_cpus, page_bytes, release, version,
};
use crate::{
    BALANCING, CGROUPS, DEMOTION, HugePages, INTERLEAVE, INTERLEAVE_AUTO, Kernel, KernelError,
    PROMOTION_LIMIT, Tiers, check_journal, parse_nodes, show_nodes,
};

const DAX: &str = "/sys/bus/dax/devices";
const AUTO_ONLINE: &str = "/sys/devices/system/memory/auto_online_blocks";
const PRESSURE: &str = "/proc/pressure/memory";

/// What was found on a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The kernel's release.
    pub kernel: String,
    /// Its memory nodes.
    pub nodes: Vec<Node>,
    /// Interfaces that tiering uses, present or absent.
    pub interfaces: Vec<Interface>,
    /// Settings with their values, as far as they are there.
    pub settings: BTreeMap<String, String>,
    /// What is wrong, the worst first.
    pub findings: Vec<Finding>,
}

/// A memory node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub node: u32,
    /// Whether it has CPUs.
    pub cpus: bool,
    /// `fast` or `slow`; `device` for memory of a device such as a GPU, which is in no tier; empty where the machine has one tier.
    pub tier: String,
    /// Bytes of memory.
    pub bytes: u64,
    /// Bytes outside `ZONE_MOVABLE`.
    pub unmovable_bytes: u64,
    /// Bytes of kernel pages: slab, stacks and page tables.
    pub kernel_bytes: u64,
    /// Nanoseconds from its best initiator, by HMAT.
    pub latency_ns: Option<u64>,
    /// MB/s to its best initiator, by HMAT.
    pub bandwidth_mbps: Option<u64>,
}

/// One interface of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// What it is.
    pub name: String,
    /// Its file, or that from which its presence is told.
    pub path: String,
    /// The first Linux that has it.
    pub since: String,
    /// Whether this kernel has it.
    pub present: bool,
    /// Whether its version alone says so: a kernel of a distribution may have it all the same.
    #[serde(default)]
    pub by_version: bool,
    /// What is lost without it.
    pub lost_without: String,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Tiering does not work, or memory is in danger.
    Problem,
    /// Tiering works worse than it could.
    Warning,
    /// Worth knowing.
    Note,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is about, such as `node1` or `region0`.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do.
    pub remedy: String,
}

/// One difference from a reference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// What differs.
    pub what: String,
    /// Its value here.
    pub here: String,
    /// Its value in the reference.
    pub reference: String,
}

/// Examines a machine, or a recorded tree of its files, and the agent's journal there.
///
/// # Errors
/// [`KernelError`] where its release or its nodes cannot be read; other files may be absent.
pub fn examine(kernel: &impl Kernel, journal: &str) -> Result<Report, KernelError> {
    let machine = Machine { kernel };
    let release = release(kernel)?;
    let nodes = machine.nodes()?;
    let mut findings = Vec::new();
    machine.examine_tiers(&release, &mut findings);
    machine.examine_nodes(&nodes, &mut findings);
    machine.examine_tables(&nodes, &mut findings);
    machine.examine_devices(&mut findings);
    machine.examine_damon(&mut findings);
    machine.examine_cgroups(&mut findings);
    machine.examine_huge_pages(&mut findings);
    match check_journal(kernel, journal) {
        Err(error) if error.kind() == Some(ErrorKind::PermissionDenied) => {
            findings.push(finding(Severity::Note, "journal", error.to_string(), "run polder doctor as root"));
        }
        Err(error) => {
            let remedy = "run polder agent restore, which restores what the other lines say; no agent starts before that";
            findings.push(problem("journal", error.to_string(), remedy));
        }
        Ok(()) => {}
    }
    findings.sort_by_key(|finding| finding.severity);
    let interfaces = machine.interfaces(version(&release), &nodes);
    Ok(Report { kernel: release, nodes, interfaces, settings: machine.settings(), findings })
}

/// Where `report` differs from `reference`, such as that of another host of a fleet.
#[must_use]
pub fn drift(report: &Report, reference: &Report) -> Vec<Drift> {
    let (here, there) = (facts(report), facts(reference));
    let names: BTreeSet<&String> = here.keys().chain(there.keys()).collect();
    let value =
        |of: &BTreeMap<String, String>, name: &str| of.get(name).map_or("absent", |value| value).to_owned();
    let differing = names.into_iter().filter(|name| here.get(*name) != there.get(*name));
    let drift = |name: &String| Drift {
        what: name.clone(),
        here: value(&here, name),
        reference: value(&there, name),
    };
    differing.map(drift).collect()
}

/// What a fleet should have alike, by name. Kernel pages change by the minute and are left out.
fn facts(report: &Report) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([("kernel".to_owned(), report.kernel.clone())]);
    for node in &report.nodes {
        let mut fact = |name: &str, value: String| facts.insert(format!("node{} {name}", node.node), value);
        fact("tier", node.tier.clone());
        fact("bytes", node.bytes.to_string());
        fact("unmovable bytes", node.unmovable_bytes.to_string());
        if let Some(ns) = node.latency_ns {
            fact("latency", format!("{ns} ns"));
        }
        if let Some(rate) = node.bandwidth_mbps {
            fact("bandwidth", format!("{rate} MB/s"));
        }
    }
    for interface in &report.interfaces {
        let value = if interface.present { "present" } else { "absent" };
        facts.insert(format!("interface {}", interface.name), value.to_owned());
    }
    facts.extend(report.settings.iter().map(|(path, value)| (path.clone(), value.clone())));
    for finding in report.findings.iter().filter(|finding| finding.severity != Severity::Note) {
        facts.insert(format!("finding about {}: {}", finding.subject, finding.remedy), "yes".to_owned());
    }
    facts
}

/// Name, path, the first Linux that has it, presence, and what is lost without it.
type InterfaceRow<'r> = (&'r str, &'r str, (u32, u32), Told, &'r str);

struct Machine<'k, K> {
    kernel: &'k K,
}

impl<K: Kernel> Machine<'_, K> {
    fn text(&self, path: &str) -> Option<String> {
        self.kernel.read(path).ok().map(|text| text.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        let text = self.text(path)?;
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    }

    /// Names of a folder that begin with `prefix` and go on with a digit.
    fn named(&self, folder: &str, prefix: &str) -> Vec<String> {
        let names = self.kernel.list(folder).unwrap_or_default().into_iter();
        let is_numbered = |name: &String| {
            name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        names.filter(is_numbered).collect()
    }

    fn nodes(&self) -> Result<Vec<Node>, KernelError> {
        let memory = nodes_in(self.kernel, &format!("{NODES}/has_memory"))?;
        let with_cpus = nodes_with_cpus(self.kernel, &memory)?;
        let (tiers, devices) =
            (Tiers::discover(self.kernel).ok(), device_nodes(self.kernel, &(&memory - &with_cpus))?);
        let (managed, page) = (managed_pages(self.kernel), page_bytes(self.kernel));
        let node = |node: u32| {
            let meminfo = self.text(&format!("{NODES}/node{node}/meminfo")).unwrap_or_default();
            let bytes = |name: &str| meminfo_bytes(&meminfo, name);
            let access = |name: &str| self.number(&format!("{NODES}/node{node}/access0/initiators/{name}"));
            let tier = match &tiers {
                _ if devices.contains(&node) => "device",
                None => "",
                Some(tiers) if tiers.fast.contains(&node) => "fast",
                Some(_) => "slow",
            };
            let outside = managed.iter().filter(|((of, zone), _)| *of == node && zone != "Movable");
            Node {
                node,
                cpus: with_cpus.contains(&node),
                tier: tier.to_owned(),
                bytes: bytes("MemTotal"),
                unmovable_bytes: outside.map(|(_, pages)| pages * page).sum(),
                kernel_bytes: bytes("Slab") + bytes("KernelStack") + bytes("PageTables"),
                latency_ns: access("read_latency").filter(|ns| *ns > 0),
                bandwidth_mbps: access("read_bandwidth").filter(|rate| *rate > 0),
            }
        };
        Ok(memory.into_iter().map(node).collect())
    }

    fn examine_tiers(&self, release: &str, findings: &mut Vec<Finding>) {
        match Tiers::discover(self.kernel) {
            Ok(tiers) => {
                if let Err(error) = tiers.check_demotion(self.kernel) {
                    let remedy = "run Linux 6.12 or later, or bring the slow memory online through dax_kmem";
                    findings.push(problem("tiers", error.to_string(), remedy));
                }
            }
            Err(error) => {
                findings.push(problem("tiers", error.to_string(), "add slow memory, or leave this host out"))
            }
        }
        if self.kernel.read(DEMOTION).is_err() {
            let symptom = format!("Linux {release} has no {DEMOTION}");
            findings.push(problem(
                "demotion",
                symptom,
                "build the kernel with CONFIG_NUMA and CONFIG_MIGRATION",
            ));
        }
        if self.text("/proc/swaps").is_some_and(|text| text.lines().count() > 1) {
            let symptom =
                "swap is on: where the slow tier is full, memory.reclaim swaps in place of demoting";
            let remedy = "set memory.swap.max of services that must not swap";
            findings.push(finding(Severity::Note, "swap", symptom.to_owned(), remedy));
        }
    }

    fn examine_nodes(&self, nodes: &[Node], findings: &mut Vec<Finding>) {
        for node in nodes.iter().filter(|node| node.tier == "device") {
            let found = "memory of a device, such as a GPU: it is in no tier, and the agent leaves it alone"
                .to_owned();
            findings.push(finding(Severity::Note, &format!("node{}", node.node), found, "none"));
        }
        // DRAM beside HBM is the kernel's own memory.
        for node in nodes.iter().filter(|node| node.tier == "slow" && !node.cpus) {
            let subject = format!("node{}", node.node);
            if node.unmovable_bytes > 0 {
                let symptom = format!(
                    "{} of {} bytes of the slow node are outside ZONE_MOVABLE: the kernel may put its own pages there, \
                     and the memory cannot be taken away again",
                    node.unmovable_bytes, node.bytes
                );
                let remedy =
                    "online it as movable: daxctl reconfigure-device --mode=system-ram (not --no-movable)";
                findings.push(finding(Severity::Warning, &subject, symptom, remedy));
                if node.kernel_bytes > 0 {
                    let bytes = node.kernel_bytes;
                    let symptom = format!(
                        "{bytes} bytes of kernel pages lie on the slow node, and slow the whole host"
                    );
                    findings.push(finding(Severity::Warning, &subject, symptom, remedy));
                }
            }
        }
    }

    /// HMAT and SLIT, and whether they agree.
    fn examine_tables(&self, nodes: &[Node], findings: &mut Vec<Finding>) {
        let of_tiers = || nodes.iter().filter(|node| node.tier != "device");
        let (fast, slow): (Vec<&Node>, Vec<&Node>) = of_tiers().partition(|node| node.tier == "fast");
        for node in of_tiers().filter(|node| node.latency_ns.is_none() || node.bandwidth_mbps.is_none()) {
            let symptom = "HMAT gives no latency and bandwidth of the node".to_owned();
            let remedy = "ask for a firmware with HMAT; meanwhile give interleave weights as numbers";
            findings.push(finding(Severity::Warning, &format!("node{}", node.node), symptom, remedy));
        }
        for (near, far) in fast.iter().flat_map(|near| slow.iter().map(move |far| (near, far))) {
            // HBM of CPUs is the faster tier by its bandwidth, and its latency is more than that of DRAM.
            let is_wider = near.bandwidth_mbps.zip(far.bandwidth_mbps).is_some_and(|(near, far)| near > far);
            let is_faster = far.latency_ns.zip(near.latency_ns).is_some_and(|(far, near)| far <= near);
            if is_faster && (near.cpus || !is_wider) {
                let symptom = format!(
                    "HMAT says that slow node {} has {} ns, and fast node {} has {} ns",
                    far.node,
                    far.latency_ns.unwrap_or(0),
                    near.node,
                    near.latency_ns.unwrap_or(0)
                );
                let remedy = "the ACPI tables contradict the tiers; ask for another firmware";
                findings.push(problem(&format!("node{}", far.node), symptom, remedy));
            }
        }
        // A column for each node that is online, with memory or without.
        let online =
            self.text(&format!("{NODES}/online")).and_then(|text| parse_nodes(&text)).unwrap_or_default();
        for node in nodes {
            let row = self.text(&format!("{NODES}/node{}/distance", node.node)).unwrap_or_default();
            let distances: Vec<u64> =
                row.split_ascii_whitespace().filter_map(|text| text.parse().ok()).collect();
            let itself = online.iter().position(|other| *other == node.node).and_then(|at| distances.get(at));
            let nearer = distances.iter().filter(|distance| Some(*distance) == itself).count();
            if distances.len() > 1 && nearer > 1 {
                let symptom =
                    format!("SLIT says that another node is as near as node {} itself: {row}", node.node);
                let remedy = "the ACPI tables contradict themselves; ask for another firmware";
                findings.push(problem(&format!("node{}", node.node), symptom, remedy));
            }
        }
    }

    /// CXL regions and dax devices.
    fn examine_devices(&self, findings: &mut Vec<Finding>) {
        const CXL: &str = "/sys/bus/cxl/devices";
        let devices = self.named(CXL, "mem");
        let regions = self.named(CXL, "region");
        let ways = |region: &String| self.number(&format!("{CXL}/{region}/interleave_ways")).unwrap_or(0);
        let used: u64 = regions.iter().map(ways).sum();
        if !regions.is_empty() && used < devices.len() as u64 {
            let symptom =
                format!("{} memory devices, and regions that interleave over {used}", devices.len());
            let remedy = "create the regions again over all devices (cxl create-region -w WAYS); otherwise their bandwidth is lost";
            findings.push(finding(Severity::Warning, "cxl", symptom, remedy));
        }
        for region in regions.iter().filter(|region| ways(region) > 1) {
            let (ways, bytes) =
                (ways(region), self.number(&format!("{CXL}/{region}/interleave_granularity")).unwrap_or(0));
            let symptom = format!(
                "it interleaves over {ways} devices by {bytes} bytes: they are one node, and fail together"
            );
            findings.push(finding(Severity::Note, region, symptom, "nothing, if bandwidth is what you want"));
        }
        let online = self.text(AUTO_ONLINE).unwrap_or_else(|| "offline".to_owned());
        let shared = self.named("/sys/bus/dax/drivers/device_dax", "dax");
        if online != "offline" {
            for device in &shared {
                let symptom = format!(
                    "{AUTO_ONLINE} is {online:?}: a change of mode makes {device} system RAM, although another host may share it"
                );
                findings.push(problem(device, symptom, &format!("echo offline > {AUTO_ONLINE}")));
            }
            let others = !devices.is_empty() || !self.named(DAX, "dax").is_empty();
            if shared.is_empty() && others {
                let symptom =
                    format!("{AUTO_ONLINE} is {online:?}: a region that appears becomes system RAM at once");
                let remedy =
                    format!("echo offline > {AUTO_ONLINE}, if a pool may be shared with other hosts");
                findings.push(finding(Severity::Warning, "auto-onlining", symptom, &remedy));
            }
        }
    }

    fn examine_damon(&self, findings: &mut Vec<Finding>) {
        for module in ["damon_stat", "damon_reclaim", "damon_lru_sort"] {
            let path = format!("/sys/module/{module}/parameters/enabled");
            if matches!(self.text(&path).as_deref(), Some("Y" | "1")) {
                let problem = format!("{module} runs, and DAMON's modules exclude each other (EBUSY)");
                let remedy = format!("echo N > {path}, before another use of DAMON");
                findings.push(finding(Severity::Warning, "damon", problem, &remedy));
            }
        }
        let count = self.number(&format!("{KDAMONDS}/nr_kdamonds")).unwrap_or(0);
        if count > 0 {
            let problem =
                format!("{count} kdamonds are set up, by the agent or another program such as damo");
            findings.push(finding(Severity::Note, "damon", problem, "none, if you know of it"));
        }
    }

    fn examine_cgroups(&self, findings: &mut Vec<Finding>) {
        let words = |name: &str| {
            let text = self.text(&format!("{CGROUPS}/{name}"));
            text.map(|text| text.split_ascii_whitespace().map(str::to_owned).collect::<BTreeSet<_>>())
        };
        let Some(there) = words("cgroup.controllers") else {
            let symptom = format!("no cgroup version 2 is mounted at {CGROUPS}");
            let remedy = "boot with systemd.unified_cgroup_hierarchy=1";
            return findings.push(problem("cgroups", symptom, remedy));
        };
        let enabled = words("cgroup.subtree_control").unwrap_or_default();
        for controller in ["cpuset", "memory"] {
            if !there.contains(controller) {
                let symptom = format!("the controller {controller} is not in {CGROUPS}/cgroup.controllers");
                findings.push(problem(
                    "cgroups",
                    symptom,
                    "boot without cgroup_disable, and with version 2 alone",
                ));
            } else if !enabled.contains(controller) {
                let symptom = format!("the controller {controller} is not enabled below {CGROUPS}");
                let remedy =
                    format!("echo +{controller} > {CGROUPS}/cgroup.subtree_control, or in the unit's slice");
                findings.push(problem("cgroups", symptom, &remedy));
            }
        }
        // Patches of 2026, by a mount option: no version tells.
        if self
            .files_of_a_cgroup()
            .is_some_and(|names| names.iter().any(|name| name == "memory.toptier_high"))
        {
            let found = "cgroups have memory.toptier_high: this kernel bounds the fast memory of each by its memory.high".to_owned();
            let remedy = "keep local_high at or below its share, or leave the service to the kernel";
            findings.push(finding(Severity::Note, "limits by tier", found, remedy));
        }
    }

    /// Reserved huge pages lie where they were reserved, and only the hugetlb controller says which cgroup has them.
    fn examine_huge_pages(&self, findings: &mut Vec<Finding>) {
        let enabled = self.text(&format!("{CGROUPS}/cgroup.subtree_control")).unwrap_or_default();
        if !HugePages::discover(self.kernel).is_empty()
            && !enabled.split_ascii_whitespace().any(|name| name == "hugetlb")
        {
            let found = "huge pages (HugeTLB) are reserved, and no cgroup counts its own: the agent cannot say which service has them";
            let remedy = format!("echo +hugetlb > {CGROUPS}/cgroup.subtree_control, or in the unit's slice");
            findings.push(finding(Severity::Warning, "hugetlb", found.to_owned(), &remedy));
        }
    }

    fn has_memory_controller(&self) -> bool {
        let controllers = self.text(&format!("{CGROUPS}/cgroup.controllers")).unwrap_or_default();
        controllers.split_ascii_whitespace().any(|name| name == "memory")
    }

    /// Names of the files of a cgroup with the memory controller; [`None`] where there is none. Kernels of distributions have some before the
    /// version that these came with.
    fn files_of_a_cgroup(&self) -> Option<Vec<String>> {
        /// Cgroups that are looked at.
        const MOST: usize = 1000;
        if !self.has_memory_controller() {
            return None;
        }
        let mut folders = VecDeque::from([CGROUPS.to_owned()]);
        for _ in 0..MOST {
            let Some(folder) = folders.pop_front() else { break };
            let names = self.kernel.list(&folder).unwrap_or_default();
            // The root has the controller, and never `memory.reclaim`.
            if folder != CGROUPS && names.iter().any(|it| it == "memory.numa_stat") {
                return Some(names);
            }
            folders.extend(names.iter().map(|name| format!("{folder}/{name}")));
        }
        None
    }

    fn interfaces(&self, version: (u32, u32), nodes: &[Node]) -> Vec<Interface> {
        let is_there = |path: &str| self.kernel.read(path).is_ok() || self.kernel.list(path).is_ok();
        let (has_damon, slow) = (is_there(KDAMONDS), nodes.iter().find(|node| node.tier == "slow"));
        let reclaim = format!("{CGROUPS}/*/memory.reclaim");
        // It can be written alone, so that its name is looked for; without a cgroup the version has to do.
        let reclaims = match self.files_of_a_cgroup() {
            Some(names) => names.iter().any(|name| name == "memory.reclaim"),
            None => self.has_memory_controller() && version >= (5, 19),
        };
        let rows: [InterfaceRow<'_>; 21] = [
            (
                "memory tiers",
                crate::nodes::TIERS,
                (6, 1),
                Told::File(is_there(crate::nodes::TIERS)),
                "everything: nothing is demoted",
            ),
            ("demotion", DEMOTION, (5, 15), Told::File(is_there(DEMOTION)), "everything: nothing is demoted"),
            ("reclaim of a cgroup", &reclaim, (5, 19), Told::File(reclaims), "fair share and background"),
            (
                "reclaim with swappiness",
                &reclaim,
                (6, 9),
                Told::Version(reclaims && version >= (6, 9)),
                "page cache to the slow tier",
            ),
            (
                "promotion of hot pages",
                BALANCING,
                (5, 18),
                Told::File(is_there(BALANCING) && (version >= (5, 18) || is_there(PROMOTION_LIMIT))),
                "pages stay where they were demoted to",
            ),
            (
                "limit of promotion",
                PROMOTION_LIMIT,
                (6, 1),
                Told::File(is_there(PROMOTION_LIMIT)),
                "promotion takes what bandwidth it likes",
            ),
            (
                "demotion within cpusets",
                "",
                (6, 16),
                Told::Version(version >= (6, 16)),
                "an opt-out is broken by demotion, and repaired by the agent",
            ),
            (
                "weighted interleave",
                INTERLEAVE,
                (6, 9),
                Told::File(is_there(INTERLEAVE)),
                "interleave weights",
            ),
            (
                "pressure (PSI)",
                PRESSURE,
                (4, 20),
                Told::File(is_there(PRESSURE)),
                "the agent does not see that a service waits; boot with psi=1",
            ),
            (
                "HMAT",
                &format!("{NODES}/node*/access0/initiators/read_bandwidth"),
                (5, 2),
                Told::File(slow.is_some_and(|node| node.bandwidth_mbps.is_some())),
                "interleave weights by auto",
            ),
            ("DAMON", KDAMONDS, (5, 18), Told::File(has_damon), "access patterns"),
            (
                "DAMON migrates cold pages",
                KDAMONDS,
                damon::MIGRATION.since,
                damon::MIGRATION.look(self.kernel, version),
                "demotion by measured coldness",
            ),
            (
                "DAMON sets its own intervals",
                KDAMONDS,
                damon::OWN_INTERVALS.since,
                damon::OWN_INTERVALS.look(self.kernel, version),
                "intervals that fit the machine: those of 5 and 100 ms tell little of a TB",
            ),
            (
                "DAMON targets with weights",
                KDAMONDS,
                damon::TARGETS.since,
                damon::TARGETS.look(self.kernel, version),
                "fair share that the kernel holds on several slow nodes; the agent holds it by reclaim",
            ),
            (
                "DAMON goals by cgroup",
                KDAMONDS,
                damon::CGROUP_GOALS.since,
                damon::CGROUP_GOALS.look(self.kernel, version),
                "fair share that the kernel holds; the agent holds it by reclaim",
            ),
            (
                "interleave weights by the kernel",
                INTERLEAVE_AUTO,
                (6, 16),
                Told::File(is_there(INTERLEAVE_AUTO)),
                "weights follow the bandwidths only where the policy gives them",
            ),
            (
                "DAMON_STAT",
                "/sys/module/damon_stat",
                (6, 17),
                Told::File(is_there("/sys/module/damon_stat/parameters")),
                "idle-time percentiles",
            ),
            (
                "reclaim of a node",
                &format!("{NODES}/node*/reclaim"),
                (6, 17),
                Told::File(nodes.iter().any(|node| is_there_write_only(self.kernel, node.node))),
                "proactive reclaim of a node; the agent reclaims by cgroup",
            ),
            (
                "poison lists of CXL devices",
                &format!("{}/mem*/trigger_poison_list", crate::cxl::DEVICES),
                (6, 4),
                Told::File(crate::cxl_devices(self.kernel).iter().any(|device| {
                    let names = self.kernel.list(&format!("{}/{device}", crate::cxl::DEVICES));
                    // It can be written alone.
                    names.is_ok_and(|names| names.iter().any(|name| name == "trigger_poison_list"))
                })),
                "poison is seen only once a device reports it; there may be no CXL device",
            ),
            (
                "events of CXL devices",
                crate::cxl::EVENTS,
                (6, 3),
                Told::File(is_there(crate::cxl::EVENTS)),
                "the agent does not see poison; mount tracefs at /sys/kernel/tracing",
            ),
            (
                "cgroups of pages",
                crate::cxl::PAGE_CGROUPS,
                (4, 3),
                Told::File(self.kernel.words(crate::cxl::PAGE_CGROUPS, 0, 1).is_ok()),
                "poison is reported without the services that it affects; finding them takes root",
            ),
        ];
        rows.into_iter()
            .map(|(name, path, (major, minor), told, lost)| Interface {
                name: name.to_owned(),
                path: path.to_owned(),
                since: format!("{major}.{minor}"),
                present: told.is_there(),
                by_version: matches!(told, Told::Version(_)),
                lost_without: lost.to_owned(),
            })
            .collect()
    }

    fn settings(&self) -> BTreeMap<String, String> {
        let mut paths: Vec<String> = [
            DEMOTION,
            BALANCING,
            PROMOTION_LIMIT,
            AUTO_ONLINE,
            "/proc/sys/vm/zone_reclaim_mode",
            "/proc/sys/vm/swappiness",
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "/sys/kernel/mm/lru_gen/enabled",
        ]
        .map(str::to_owned)
        .to_vec();
        paths.extend(self.named(INTERLEAVE, "node").into_iter().map(|name| format!("{INTERLEAVE}/{name}")));
        paths.into_iter().filter_map(|path| self.text(&path).map(|text| (path, text))).collect()
    }
}

/// Whether a node has a file to reclaim from it, which can be written alone: its folder lists it.
fn is_there_write_only(kernel: &impl Kernel, node: u32) -> bool {
    kernel.list(&format!("{NODES}/node{node}")).is_ok_and(|names| names.iter().any(|name| name == "reclaim"))
}

fn meminfo_bytes(meminfo: &str, name: &str) -> u64 {
    let value = meminfo.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(2);
        (words.next()?.trim_end_matches(':') == name).then(|| words.next()?.parse::<u64>().ok())?
    });
    value.unwrap_or(0) << 10
}

fn finding(severity: Severity, subject: &str, found: String, remedy: &str) -> Finding {
    Finding { severity, subject: subject.to_owned(), found, remedy: remedy.to_owned() }
}

fn problem(subject: &str, found: String, remedy: &str) -> Finding {
    finding(Severity::Problem, subject, found, remedy)
}

/// Nodes of a report by tier, for people.
#[must_use]
pub fn nodes_of(report: &Report, tier: &str) -> String {
    show_nodes(&report.nodes.iter().filter(|node| node.tier == tier).map(|node| node.node).collect())
}

#[cfg(all(test, feature = "fake"))]
mod tests {
    use super::*;
    use crate::fake::Tree;

    const JOURNAL: &str = "/var/lib/polder/agent.journal";

    /// A host that has nothing wrong.
    fn sound() -> Tree {
        let tree = Tree::new(512 << 20);
        for (node, ns, rate) in [(0, 80, 200_000), (1, 250, 40_000)] {
            let folder = format!("{NODES}/node{node}");
            tree.put(&format!("{folder}/access0/initiators/read_latency"), &ns.to_string());
            tree.put(&format!("{folder}/access0/initiators/read_bandwidth"), &rate.to_string());
            tree.put(&format!("{folder}/distance"), if node == 0 { "10 20" } else { "20 10" });
            tree.put(
                &format!("{folder}/meminfo"),
                &format!(
                    "Node {node} MemTotal: 262144 kB\nNode {node} MemFree: 1024 kB\nNode {node} Slab: 64 kB\n"
                ),
            );
        }
        tree.put("/proc/zoneinfo", &zones("Movable"));
        tree.put("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n");
        tree.put(AUTO_ONLINE, "offline\n");
        tree.put(PRESSURE, "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
        tree.put(&format!("{CGROUPS}/cgroup.controllers"), "cpuset cpu io memory pids\n");
        tree.put(&format!("{CGROUPS}/cgroup.subtree_control"), "cpuset memory\n");
        tree
    }

    fn zones(slow: &str) -> String {
        format!(
            "Node 0, zone   Normal\n  pages free     9\n        managed  65536\nNode 1, zone   {slow}\n  pages free     9\n        managed  65536\n"
        )
    }

    fn found(tree: &Tree) -> Vec<(Severity, String)> {
        let findings = examine(tree, JOURNAL).unwrap().findings;
        findings
            .into_iter()
            .map(|finding| (finding.severity, format!("{}: {}", finding.subject, finding.found)))
            .collect()
    }

    #[test]
    fn limits_by_tier_are_told_by_their_files_and_not_by_the_version() {
        let tree = sound();
        tree.add_group("/web", [1 << 20, 0]);
        assert_eq!(found(&tree), []);
        tree.put(&format!("{CGROUPS}/web/memory.toptier_high"), "max\n");
        let told = found(&tree);
        assert!(
            matches!(&told[..], [(Severity::Note, what)] if what.contains("memory.toptier_high")),
            "{told:?}"
        );
    }

    /// One thing that is wrong with a host, and what is said of it.
    fn only(break_it: impl FnOnce(&Tree), severity: Severity, expected: &str) {
        let tree = sound();
        break_it(&tree);
        let found = found(&tree);
        assert!(
            found.iter().any(|(of, text)| *of == severity && text.contains(expected)),
            "{expected}: {found:?}"
        );
    }

    #[test]
    fn a_sound_host_has_no_findings_and_two_tiers() {
        let tree = sound();
        assert_eq!(found(&tree), []);
        let report = examine(&tree, JOURNAL).unwrap();
        assert_eq!((nodes_of(&report, "fast"), nodes_of(&report, "slow")), ("0".to_owned(), "1".to_owned()));
        assert_eq!(report.nodes[1].latency_ns, Some(250));
    }

    /// A GH200: node 1 is the GPU's memory, which no node but that of the CPUs reaches.
    fn with_gpu(tree: &Tree) {
        tree.put(&format!("{NODES}/has_memory"), "0-2\n");
        tree.put(&format!("{NODES}/online"), "0-3\n");
        tree.put(&format!("{NODES}/node1/distance"), "20 10 40 80\n");
        tree.put(&format!("{NODES}/node2/distance"), "80 40 10 255\n");
        tree.put(&format!("{NODES}/node2/meminfo"), "Node 2 MemTotal: 100663296 kB\nNode 2 MemFree: 9 kB\n");
    }

    #[test]
    fn memory_of_a_gpu_is_in_no_tier_by_what_acpi_or_its_driver_says() {
        let by_driver = |tree: &Tree| {
            with_gpu(tree);
            tree.put(&format!("{NODES}/node2/distance"), "80 40 10 80\n");
            tree.put("/proc/driver/nvidia/gpus/0009:01:00.0/numa_status", "Node:  2\nStatus: online\n");
        };
        let by_initiator = |tree: &Tree| {
            with_gpu(tree);
            tree.put(&format!("{NODES}/node2/distance"), "80 40 10 80\n");
            tree.put(&format!("{NODES}/has_generic_initiator"), "2-3\n");
        };
        for gpu in [&with_gpu as &dyn Fn(&Tree), &by_driver, &by_initiator] {
            let tree = sound();
            gpu(&tree);
            let report = examine(&tree, JOURNAL).unwrap();
            let of = |tier: &str| nodes_of(&report, tier);
            assert_eq!((of("fast"), of("slow"), of("device")), ("0".into(), "1".into(), "2".into()));
            let said = found(&tree);
            assert!(
                matches!(&said[..], [(Severity::Note, text)] if text.contains("such as a GPU")),
                "{said:?}"
            );
        }
        // One that the kernel puts into a tier of its own makes no second tier.
        let tree = sound();
        with_gpu(&tree);
        tree.put(&format!("{NODES}/has_memory"), "0,2\n");
        tree.put("/sys/devices/virtual/memory_tiering/memory_tier2/nodelist", "2\n");
        let error = Tiers::discover(&tree).unwrap_err().to_string();
        assert!(error.contains("one tier of memory (nodes 0; nodes 2 are memory of a device"), "{error}");
    }

    #[test]
    fn hbm_of_cpus_is_the_faster_tier_although_its_latency_is_more() {
        let tree = sound();
        let files =
            [("access0/initiators/read_latency", "130"), ("access0/initiators/read_bandwidth", "400000")];
        for (name, text) in files {
            tree.put(&format!("{NODES}/node2/{name}"), text);
        }
        tree.put(&format!("{NODES}/node2/meminfo"), "Node 2 MemTotal: 65536 kB\nNode 2 MemFree: 9 kB\n");
        tree.put(&format!("{NODES}/has_memory"), "0-2\n");
        tree.put("/sys/devices/virtual/memory_tiering/memory_tier2/nodelist", "2\n");
        assert_eq!(found(&tree), []);
        assert_eq!(nodes_of(&examine(&tree, JOURNAL).unwrap(), "fast"), "2");
    }

    #[test]
    fn a_node_whose_cpus_are_off_line_is_no_slow_one() {
        let tree = sound();
        tree.merge_tiers();
        tree.put(&format!("{NODES}/has_memory"), "0-2\n");
        tree.put(&format!("{NODES}/node2/meminfo"), "Node 2 MemTotal: 65536 kB\nNode 2 MemFree: 9 kB\n");
        tree.put(&format!("{NODES}/node2/cpu17/topology/core_id"), "3\n");
        let report = examine(&tree, JOURNAL).unwrap();
        assert_eq!(
            (nodes_of(&report, "fast"), nodes_of(&report, "slow")),
            ("0,2".to_owned(), "1".to_owned())
        );
    }

    #[test]
    fn pages_of_64_kib_are_counted_as_such() {
        for (pages, bytes) in [(65_536, 256 << 20), (16_384, 256 << 20), (4_096, 256 << 20)] {
            let tree = sound();
            let zones = zones("Normal").replace("65536", &pages.to_string());
            tree.put("/proc/zoneinfo", &zones);
            assert_eq!(examine(&tree, JOURNAL).unwrap().nodes[1].unmovable_bytes, bytes, "{pages} pages");
        }
    }

    #[test]
    fn each_thing_that_is_wrong_is_found() {
        use Severity::{Note, Problem, Warning};
        only(Tree::merge_tiers, Problem, "into one memory tier");
        only(|tree| tree.put("/proc/zoneinfo", &zones("Normal")), Warning, "outside ZONE_MOVABLE");
        only(|tree| tree.put("/proc/zoneinfo", &zones("Normal")), Warning, "65536 bytes of kernel pages");
        only(
            |tree| tree.take(&format!("{NODES}/node1/access0/initiators/read_bandwidth")),
            Warning,
            "HMAT gives no",
        );
        only(
            |tree| tree.put(&format!("{NODES}/node1/access0/initiators/read_latency"), "70"),
            Problem,
            "slow node 1 has 70 ns",
        );
        only(
            |tree| tree.put(&format!("{NODES}/node1/distance"), "10 10"),
            Problem,
            "another node is as near as node 1",
        );
        only(
            |tree| tree.put("/sys/module/damon_stat/parameters/enabled", "Y\n"),
            Warning,
            "exclude each other",
        );
        only(|tree| tree.put(&format!("{KDAMONDS}/nr_kdamonds"), "1\n"), Note, "1 kdamonds");
        only(|tree| tree.put("/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2\n"), Note, "swap is on");
        only(|tree| tree.take(&format!("{CGROUPS}/cgroup.controllers")), Problem, "no cgroup version 2");
        only(
            |tree| tree.put(&format!("{CGROUPS}/cgroup.subtree_control"), "memory\n"),
            Problem,
            "cpuset is not enabled",
        );
        only(
            |tree| tree.put(&format!("{CGROUPS}/cgroup.controllers"), "cpuset\n"),
            Problem,
            "memory is not in",
        );
        only(
            |tree| tree.put("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "4\n"),
            Warning,
            "no cgroup counts its own",
        );
        only(|tree| tree.take(DEMOTION), Problem, "has no /sys/kernel/mm/numa/demotion_enabled");
        only(
            |tree| tree.append(JOURNAL, "{}").unwrap(),
            Problem,
            "agent.journal: line 1 is damaged: missing field `path`",
        );
        let devices = |tree: &Tree, ways: &str| {
            for device in ["mem0", "mem1"] {
                tree.put(&format!("/sys/bus/cxl/devices/{device}/serial"), "0x1\n");
            }
            tree.put("/sys/bus/cxl/devices/region0/interleave_ways", ways);
            tree.put("/sys/bus/cxl/devices/region0/interleave_granularity", "256\n");
        };
        only(|tree| devices(tree, "1\n"), Warning, "2 memory devices, and regions that interleave over 1");
        only(|tree| devices(tree, "2\n"), Note, "over 2 devices by 256 bytes");
        only(
            |tree| {
                tree.put("/sys/bus/dax/drivers/device_dax/dax0.0/size", "1\n");
                tree.put(AUTO_ONLINE, "online\n");
            },
            Problem,
            "makes dax0.0 system RAM",
        );
        only(
            |tree| {
                tree.put(&format!("{DAX}/dax0.0/size"), "1\n");
                tree.put(AUTO_ONLINE, "online_movable\n");
            },
            Warning,
            "becomes system RAM at once",
        );
    }

    #[test]
    fn a_row_of_distances_has_a_column_for_each_node_that_is_online() {
        let tree = sound();
        for (path, text) in [
            ("online", "0-2\n"),
            ("has_memory", "0,2\n"),
            ("node0/distance", "10 20 20"),
            ("node1/distance", "20 10 20"),
            ("node2/distance", "20 20 10"),
            ("node2/access0/initiators/read_latency", "250"),
            ("node2/access0/initiators/read_bandwidth", "40000"),
        ] {
            tree.put(&format!("{NODES}/{path}"), text);
        }
        tree.put("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist", "2\n");
        assert_eq!(found(&tree), [], "node 1 has CPUs and no memory");
        tree.put(&format!("{NODES}/node2/distance"), "20 10 10");
        assert_eq!(found(&tree).len(), 1, "the control");
    }

    #[test]
    fn what_a_kernel_has_is_read_from_its_files_and_not_from_its_version() {
        let has = |tree: &Tree| {
            let interfaces = examine(tree, JOURNAL).unwrap().interfaces;
            let of = |name: &str| interfaces.iter().find(|it| it.name == name).unwrap().present;
            [of("reclaim of a cgroup"), of("promotion of hot pages"), of("reclaim with swappiness")]
        };
        let tree = sound();
        assert_eq!(has(&tree), [true; 3], "6.12 without a cgroup to look at");
        tree.add_group("/system.slice", [0, 0]);
        for file in ["memory.numa_stat", "memory.reclaim"] {
            tree.take(&format!("{CGROUPS}/system.slice/{file}"));
        }
        tree.add_group("/system.slice/web.service", [0, 0]);
        let release = |text: &str| tree.put("/proc/sys/kernel/osrelease", text);
        release("5.14.0-570.12.1.el9_6.x86_64\n");
        assert_eq!(has(&tree), [true, true, false], "RHEL 9 has both from later kernels");
        tree.take(PROMOTION_LIMIT);
        tree.take(&format!("{CGROUPS}/system.slice/web.service/memory.reclaim"));
        assert_eq!(has(&tree), [false; 3], "5.14");
        release("6.12.0\n");
        assert_eq!(has(&tree), [false, true, false], "no reclaim");
        let tree = sound();
        tree.take(&format!("{CGROUPS}/cgroup.controllers"));
        tree.put(&format!("{CGROUPS}/unified/cgroup.controllers"), "\n");
        assert_eq!(has(&tree), [false, true, false], "hybrid cgroups");
    }

    #[test]
    fn what_of_damon_a_kernel_has_is_read_from_the_files_of_a_scheme_if_there_is_one() {
        let parts = ["DAMON migrates cold pages", "DAMON sets its own intervals"];
        let later = ["DAMON targets with weights", "DAMON goals by cgroup"];
        let has = |tree: &Tree| {
            let interfaces = examine(tree, JOURNAL).unwrap().interfaces;
            let of = |name: &&str| interfaces.iter().find(|it| it.name == **name).unwrap().clone();
            parts.iter().chain(&later).map(of).map(|it| (it.present, it.by_version)).collect::<Vec<_>>()
        };
        let tree = sound();
        tree.put("/proc/sys/kernel/osrelease", "5.14.0-570.12.1.el9_6.x86_64\n");
        assert_eq!(has(&tree), [(false, true); 4], "without DAMON");
        tree.put(&format!("{KDAMONDS}/nr_kdamonds"), "0\n");
        assert_eq!(has(&tree), [(false, true); 4], "no scheme tells");
        let context = format!("{KDAMONDS}/0/contexts/0");
        for (file, text) in [
            ("monitoring_attrs/intervals/intervals_goal/access_bp", "0\n"),
            ("schemes/0/target_nid", "0\n"),
            // Goals of a whole node are none of a cgroup.
            ("schemes/0/quotas/goals/0/nid", "0\n"),
        ] {
            tree.put(&format!("{context}/{file}"), text);
        }
        let backported = [(true, false), (true, false), (false, false), (false, false)];
        assert_eq!(has(&tree), backported, "a backport of 6.16");
        tree.put("/proc/sys/kernel/osrelease", "7.3.4\n");
        assert_eq!(has(&tree), backported, "files count before the version");
        tree.put(&format!("{context}/schemes/0/dests/nr_dests"), "0\n");
        tree.put(&format!("{context}/schemes/0/quotas/goals/0/path"), "\n");
        assert_eq!(has(&tree), [(true, false); 4]);
    }

    #[test]
    fn an_absent_interface_says_what_is_lost() {
        let tree = sound();
        let absent = |tree: &Tree| {
            let interfaces = examine(tree, JOURNAL).unwrap().interfaces;
            interfaces.into_iter().filter(|of| !of.present).map(|of| of.name).collect::<Vec<_>>()
        };
        assert!(absent(&tree).contains(&"demotion within cpusets".to_owned()), "the tree is a 6.12");
        let before = absent(&tree).len();
        tree.take(PRESSURE);
        assert_eq!(absent(&tree).len(), before + 1);
        tree.put("/proc/sys/kernel/osrelease", "7.3.4\n");
        assert!(!absent(&tree).contains(&"demotion within cpusets".to_owned()));
    }

    #[test]
    fn drift_names_each_difference_and_nothing_that_is_alike() {
        let reference = examine(&sound(), JOURNAL).unwrap();
        assert_eq!(drift(&examine(&sound(), JOURNAL).unwrap(), &reference), []);
        let tree = sound();
        tree.put(DEMOTION, "true\n");
        tree.put(&format!("{NODES}/node1/access0/initiators/read_latency"), "300");
        let json = serde_json::to_string(&reference).unwrap();
        let differences = drift(&examine(&tree, JOURNAL).unwrap(), &serde_json::from_str(&json).unwrap());
        let rows: Vec<_> = differences
            .iter()
            .map(|difference| {
                (difference.what.as_str(), difference.here.as_str(), difference.reference.as_str())
            })
            .collect();
        assert_eq!(rows, [(DEMOTION, "true", "false"), ("node1 latency", "300 ns", "250 ns")]);
    }
}
