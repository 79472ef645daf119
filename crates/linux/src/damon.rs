//! Fair share that the kernel holds: DAMON's goals by cgroup and node, from Linux 6.19 on.
//!
//! One kdamond watches all memory. Each held cgroup has two schemes. Its cold pages go down until enough of the fast node is free of it
//! (`node_memcg_free_bp`), and its hot pages go up until enough of the fast node is its own (`node_memcg_used_bp`). What the kernel
//! moves in an interval is bounded. Goals are shares of the node in parts of 10,000, so they are written anew as a cgroup grows.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use crate::{CGROUPS, Kernel, KernelError, Settings, Tiers, nodes};

/// Where kdamonds are set up.
pub(crate) const KDAMONDS: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// Monitoring of the whole system, which excludes other uses of DAMON.
pub(crate) const DAMON_STAT: &str = "/sys/module/damon_stat/parameters/enabled";
const IOMEM: &str = "/proc/iomem";
/// Parts of a whole, as DAMON's goals count.
const WHOLE: u64 = 10_000;
/// What DAMON takes as no limit.
const ANY: u64 = u32::MAX as u64;

/// What of DAMON came later than DAMON. The files of a scheme are there once one is set up.
pub(crate) struct Part {
    /// A folder of the first scheme, below [`KDAMONDS`], and the name in it by which the part is known.
    folder: &'static str,
    file: &'static str,
    /// The first Linux that has it; kernels of distributions may have it before.
    pub(crate) since: (u32, u32),
}

pub(crate) const MIGRATION: Part =
    Part { folder: "0/contexts/0/schemes/0", file: "target_nid", since: (6, 11) };
pub(crate) const OWN_INTERVALS: Part =
    Part { folder: "0/contexts/0/monitoring_attrs/intervals", file: "intervals_goal", since: (6, 15) };
pub(crate) const TARGETS: Part = Part { folder: "0/contexts/0/schemes/0", file: "dests", since: (6, 17) };
pub(crate) const CGROUP_GOALS: Part =
    Part { folder: "0/contexts/0/schemes/0/quotas/goals/0", file: "path", since: (6, 19) };

/// Whether a part is there, and how that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// By its file.
    File(bool),
    /// By the version, because no file tells.
    Version(bool),
}

impl Told {
    pub(crate) const fn is_there(self) -> bool {
        match self {
            Self::File(is_there) | Self::Version(is_there) => is_there,
        }
    }
}

impl Part {
    /// Asks the files of the first scheme, and without one the version.
    pub(crate) fn look(&self, kernel: &impl Kernel, version: (u32, u32)) -> Told {
        match kernel.list(&format!("{KDAMONDS}/{}", self.folder)) {
            Ok(names) => Told::File(names.iter().any(|name| name == self.file)),
            Err(_) => {
                let has_damon = kernel.read(&format!("{KDAMONDS}/nr_kdamonds")).is_ok();
                Told::Version(has_damon && version >= self.since)
            }
        }
    }
}

/// A cgroup, and the bytes that it may have on the fast tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldShare {
    /// Its path below the mount.
    pub cgroup: String,
    /// Below so many its hot pages go up.
    pub low: u64,
    /// Above so many its cold pages go down.
    pub high: u64,
}

/// The files of the settings that [`KernelShares::hold`] changes.
#[must_use]
pub fn share_settings() -> [String; 3] {
    [DAMON_STAT.to_owned(), format!("{KDAMONDS}/nr_kdamonds"), state()]
}

/// What the kernel was asked to hold.
#[derive(Debug, Default)]
pub struct KernelShares {
    /// [`None`] where nothing is set up.
    held: Option<Held>,
    /// Whether the kdamond is that of this agent.
    is_ours: bool,
    /// What this kernel lacks, as a set-up found. It is not tried again.
    lacks: Option<String>,
}

/// Schemes that are set up.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    /// Cgroups and their inodes, in the order of their schemes.
    cgroups: Vec<(String, u64)>,
    /// Bytes that each scheme moves in an interval at most.
    step: u64,
    interval_ms: u64,
}

impl KernelShares {
    /// Has the kernel hold these shares, and no others. `step` is the bytes that each scheme moves in `interval_ms` at most.
    ///
    /// # Errors
    /// [`KernelError::Missing`] where this kernel has no such goals, or another program uses DAMON. [`KernelError::File`] as the kernel
    /// refuses.
    pub fn hold<K: Kernel>(
        &mut self,
        settings: &mut Settings<K>,
        tiers: &Tiers,
        shares: &[HeldShare],
        step: u64,
        interval_ms: u64,
    ) -> Result<(), KernelError> {
        if !self.is_ours && shares.is_empty() {
            return Ok(());
        }
        if let Some(lacks) = &self.lacks {
            return Err(KernelError::Missing(lacks.clone()));
        }
        // Where anything fails, nothing is held, and the next call sets it up anew.
        let held = self.held.take();
        let kernel = settings.kernel();
        let fast = tiers.fast_memory(kernel)?.bytes;
        // A filter is bound to the cgroup that was there when it was set up, not to a later one of its path.
        let inode = |cgroup: &str| kernel.inode(&format!("{CGROUPS}{cgroup}"));
        let cgroups = shares.iter().map(|share| Ok((share.cgroup.clone(), inode(&share.cgroup)?)));
        let cgroups = cgroups.collect::<Result<_, KernelError>>()?;
        let wanted = Some(Held { cgroups, step, interval_ms });
        let is_on = kernel.read(&state()).is_ok_and(|text| text.trim() == "on");
        if held == wanted && is_on {
            set_goals(kernel, shares, fast)?;
            kernel.write(&state(), "commit_schemes_quota_goals")?;
        } else {
            let outcome = self.set_up(settings, tiers, shares, fast, (step, interval_ms));
            if let (Err(KernelError::Missing(lacks)), true) = (&outcome, self.is_ours) {
                // What is half set up would go on beside the agent.
                let ours = share_settings();
                settings.restore_all_but(|path| ours.iter().all(|it| it != path))?;
                *self = Self { lacks: Some(lacks.clone()), ..Self::default() };
            }
            outcome?;
        }
        self.held = wanted;
        Ok(())
    }

    fn set_up<K: Kernel>(
        &mut self,
        settings: &mut Settings<K>,
        tiers: &Tiers,
        shares: &[HeldShare],
        fast: u64,
        (step, interval_ms): (u64, u64),
    ) -> Result<(), KernelError> {
        let kernel = settings.kernel();
        let plan = Plan::new(kernel, tiers, step, interval_ms, settings.is_dry())?;
        if !settings.is_dry() {
            self.expect_ours(kernel)?;
        }
        self.is_ours = true;
        plan.set_up(settings, shares, fast)
    }

    /// That the settings were restored: nothing is held any more.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// That the policy changed, or nodes came or went: the next call sets it up anew, also where the kernel lacked something.
    pub fn renew(&mut self) {
        (self.held, self.lacks) = (None, None);
    }

    /// The cgroups whose shares the kernel holds.
    #[must_use]
    pub fn held(&self) -> BTreeSet<&str> {
        self.held.iter().flat_map(|held| &held.cgroups).map(|(path, _)| path.as_str()).collect()
    }

    fn expect_ours(&self, kernel: &impl Kernel) -> Result<(), KernelError> {
        let count = kernel.read(&format!("{KDAMONDS}/nr_kdamonds"))?;
        match count.trim() == "0" || self.is_ours {
            true => Ok(()),
            false => Err(KernelError::Missing(format!(
                "{KDAMONDS} has {} kdamonds of another program, such as damo; stop it, or write fair_share = \"agent\"",
                count.trim()
            ))),
        }
    }
}

fn no_goals(release: &str) -> KernelError {
    KernelError::Missing(format!(
        "Linux {release} has no goals of DAMON by cgroup, which come with 6.19 and CONFIG_DAMON_SYSFS; the agent holds shares by reclaim"
    ))
}

fn state() -> String {
    format!("{KDAMONDS}/0/state")
}

fn scheme(index: usize) -> String {
    format!("{KDAMONDS}/0/contexts/0/schemes/{index}")
}

/// The goals of each share: bytes of it on the fast node, as parts of the node.
fn set_goals(kernel: &impl Kernel, shares: &[HeldShare], fast: u64) -> Result<(), KernelError> {
    let parts = |bytes: u64| (bytes.min(fast) * WHOLE).div_ceil(fast.max(1));
    for (index, share) in shares.iter().enumerate() {
        for (number, target) in
            [(2 * index, parts(fast.saturating_sub(share.high))), (2 * index + 1, parts(share.low))]
        {
            // A goal of 0 is refused; one part is reached by any cgroup that is there.
            kernel.write(
                &format!("{}/quotas/goals/0/target_value", scheme(number)),
                &target.max(1).to_string(),
            )?;
        }
    }
    Ok(())
}

/// How schemes are set up on this machine.
struct Plan {
    release: String,
    fast: u32,
    /// Slow nodes, with the weight that each has as a target of cold pages: MB/s where HMAT tells them.
    slow: Vec<(u32, u64)>,
    /// Physical memory, from and to.
    ranges: Vec<(u64, u64)>,
    step: u64,
    interval_ms: u64,
}

impl Plan {
    /// A dry run believes the version where no file tells; else it is seen as schemes are set up.
    fn new(
        kernel: &impl Kernel,
        tiers: &Tiers,
        step: u64,
        interval_ms: u64,
        is_dry: bool,
    ) -> Result<Self, KernelError> {
        let release = nodes::release(kernel)?;
        let lacks_goals = is_dry && !CGROUP_GOALS.look(kernel, nodes::version(&release)).is_there();
        if lacks_goals || kernel.read(&format!("{KDAMONDS}/nr_kdamonds")).is_err() {
            return Err(no_goals(&release));
        }
        let (1, Some(&fast)) = (tiers.fast.len(), tiers.fast.first()) else {
            return Err(KernelError::Missing(
                "goals of DAMON are of one node each, and the fast tier here has several; the agent holds shares by reclaim".to_owned(),
            ));
        };
        let bandwidths = tiers.bandwidths(kernel).unwrap_or_default();
        let weight = |node: &u32| (*node, bandwidths.get(node).copied().unwrap_or(1));
        let slow = tiers.slow.iter().map(weight).collect();
        let ranges = memory_ranges(&kernel.read(IOMEM)?);
        if ranges.is_empty() {
            return Err(KernelError::Missing(format!("{IOMEM} shows no memory; CAP_SYS_ADMIN is needed")));
        }
        Ok(Self { release, fast, slow, ranges, step, interval_ms })
    }

    /// Sets up a kdamond that holds the shares, and turns it on.
    fn set_up<K: Kernel>(
        &self,
        settings: &mut Settings<K>,
        shares: &[HeldShare],
        fast: u64,
    ) -> Result<(), KernelError> {
        if !settings.is_dry() && settings.kernel().read(&state()).is_ok_and(|text| text.trim() == "on") {
            settings.kernel().write(&state(), "off")?;
        }
        settings.set(&format!("{KDAMONDS}/nr_kdamonds"), "1")?;
        if !settings.is_dry() {
            // The files of a kdamond are there once it is.
            self.set_schemes(settings.kernel(), shares, fast)?;
        }
        if settings.kernel().read(DAMON_STAT).is_ok_and(|text| text.trim() == "Y") {
            settings.set(DAMON_STAT, "N")?;
        }
        match settings.is_dry() {
            true => Ok(()),
            false => settings.set(&state(), "on").map(drop),
        }
    }

    fn set_schemes(&self, kernel: &impl Kernel, shares: &[HeldShare], fast: u64) -> Result<(), KernelError> {
        let context = format!("{KDAMONDS}/0/contexts/0");
        let write = |path: &str, value: &str| kernel.write(&format!("{context}/{path}"), value);
        kernel.write(&format!("{KDAMONDS}/0/contexts/nr_contexts"), "1")?;
        write("operations", "paddr")?;
        for (name, us) in [("sample_us", 5_000), ("aggr_us", 100_000), ("update_us", 1_000_000)] {
            write(&format!("monitoring_attrs/intervals/{name}"), &us.to_string())?;
        }
        // From 6.15 on the kernel sets the intervals within these bounds, so that 4% of the samples see an access: on a server with a TB a
        // region is a GB, of which samples each 5 ms say little. The values are those of the kernel's documentation.
        let goal =
            [("access_bp", "400"), ("aggrs", "3"), ("min_sample_us", "5000"), ("max_sample_us", "10000000")];
        for (name, value) in goal {
            if_there(write(&format!("monitoring_attrs/intervals/intervals_goal/{name}"), value))?;
        }
        write("monitoring_attrs/nr_regions/max", "1000")?;
        write("monitoring_attrs/nr_regions/min", "100")?;
        write("targets/nr_targets", "1")?;
        write("targets/0/regions/nr_regions", &self.ranges.len().to_string())?;
        for (index, (start, end)) in self.ranges.iter().enumerate() {
            write(&format!("targets/0/regions/{index}/start"), &start.to_string())?;
            write(&format!("targets/0/regions/{index}/end"), &end.to_string())?;
        }
        write("schemes/nr_schemes", &(2 * shares.len()).to_string())?;
        for (index, share) in shares.iter().enumerate() {
            let fast = [(self.fast, 1)];
            let (down, up) = (
                ("migrate_cold", &*self.slow, "node_memcg_free_bp"),
                ("migrate_hot", &fast[..], "node_memcg_used_bp"),
            );
            for (scheme, (action, targets, metric)) in [(2 * index, down), (2 * index + 1, up)] {
                self.set_scheme(kernel, scheme, &share.cgroup, action, targets, metric)?;
            }
        }
        set_goals(kernel, shares, fast)
    }

    fn set_scheme(
        &self,
        kernel: &impl Kernel,
        index: usize,
        cgroup: &str,
        action: &str,
        targets: &[(u32, u64)],
        metric: &str,
    ) -> Result<(), KernelError> {
        let scheme = scheme(index);
        let write = |path: &str, value: &str| kernel.write(&format!("{scheme}/{path}"), value);
        // A file or a word that came with later kernels.
        let later = |path: &str, value: &str| {
            write(path, value).map_err(|error| match error.kind() {
                Some(ErrorKind::NotFound | ErrorKind::InvalidInput) => no_goals(&self.release),
                _ => error,
            })
        };
        later("action", action)?;
        match *targets {
            [(target, _)] => later("target_nid", &target.to_string())?,
            // Of several the kernel chooses by their weights, from 6.17 on.
            _ => {
                write("dests/nr_dests", &targets.len().to_string()).map_err(|error| match error.is_gone() {
                    true => KernelError::Missing(
                        "this kernel's DAMON has no targets with weights (dests), which come with 6.17, and the slow tier here has \
                         several nodes; the agent holds shares by reclaim"
                            .to_owned(),
                    ),
                    false => error,
                })?;
                for (number, (target, weight)) in targets.iter().enumerate() {
                    write(&format!("dests/{number}/id"), &target.to_string())?;
                    write(&format!("dests/{number}/weight"), &weight.to_string())?;
                }
            }
        }
        for name in ["sz", "nr_accesses", "age"] {
            write(
                &format!("access_pattern/{name}/max"),
                &if name == "sz" { u64::MAX } else { ANY }.to_string(),
            )?;
        }
        write("quotas/bytes", &self.step.to_string())?;
        write("quotas/reset_interval_ms", &self.interval_ms.to_string())?;
        for name in ["nr_accesses_permil", "age_permil"] {
            write(&format!("quotas/weights/{name}"), "500")?;
        }
        write("quotas/goals/nr_goals", "1")?;
        later("quotas/goals/0/target_metric", metric)?;
        later("quotas/goals/0/nid", &self.fast.to_string())?;
        later("quotas/goals/0/path", cgroup)?;
        // From 7.1 on: all of the quota until the goal is reached, and none then. Before, the quota grows and shrinks by the distance.
        let tuner = write("quotas/goal_tuner", "temporal");
        // As late: pages of other cgroups are passed over at little cost of the quota.
        let charge =
            write("quotas/fail_charge_num", "1").and_then(|()| write("quotas/fail_charge_denom", "1000"));
        if_there(tuner)?;
        if_there(charge)?;
        write("filters/nr_filters", "1")?;
        write("filters/0/type", "memcg")?;
        write("filters/0/memcg_path", cgroup)?;
        // What does not match is left out.
        write("filters/0/matching", "N")
    }
}

/// What a kernel without the file answers is no error.
fn if_there(outcome: Result<(), KernelError>) -> Result<(), KernelError> {
    outcome.or_else(|error| if error.is_gone() { Ok(()) } else { Err(error) })
}

/// Memory in the text of `/proc/iomem`, from and to; also that of dax devices, which is listed below them.
fn memory_ranges(text: &str) -> Vec<(u64, u64)> {
    let range = |line: &str| {
        let (range, name) = line.trim().split_once(" : ")?;
        let (start, end) = range.split_once('-')?;
        let is_memory = name == "System RAM" || name.starts_with("System RAM (");
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        // Without the capability all addresses are 0.
        (is_memory && end > start).then_some((start, end + 1))
    };
    text.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_from_what_else_is_mapped() {
        let text = "00001000-0009fbff : System RAM\n000a0000-000bffff : PCI Bus\n  00100000-1fffffff : System RAM (kmem)\n\
                    00000000-00000000 : System RAM\n";
        assert_eq!(memory_ranges(text), [(0x1000, 0x9fc00), (0x10_0000, 0x2000_0000)]);
    }
}
