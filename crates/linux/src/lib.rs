//! Reads and writes /proc, /sys and cgroups, and restores what was changed.
//!
//! Everything goes through [`Kernel`], which a [`Host`] answers from the real files. With the feature `fake`,
//! `fake::Tree` answers from memory and behaves like the files it stands for.
#![forbid(unsafe_code)]

mod cgroup;
#[cfg(feature = "fake")]
pub mod conformance;
mod counters;
mod cxl;
mod damon;
pub mod doctor;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod host;
mod journal;
mod kernel;
mod limit;
mod nodes;
mod own;
mod privilege;
mod promote;

pub use cgroup::{Counts, HugePages, NodeMemory, ReclaimWords};
pub use counters::{HostCounters, HostCounts};
pub use cxl::{
    CxlEvent, CxlKind, CxlNews, CxlPlace, CxlWatch, devices as cxl_devices, moves_poison, page_owners,
};
pub use damon::{HeldShare, KernelShares, share_settings};
pub use error::{Holder, KernelError};
pub use host::Host;
pub use journal::{Change, Restored, Settings, check_journal};
pub use kernel::{Cgroup, Kernel, Promotion, Resume};
pub use limit::{available_memory, memory_limit};
pub use nodes::{TierMemory, Tiers, page_bytes, parse_nodes, show_nodes};
pub use own::Lock;
pub use privilege::drop_capabilities;
pub use promote::MovePages;

/// The switch for demotion to the slow tier.
pub const DEMOTION: &str = "/sys/kernel/mm/numa/demotion_enabled";
/// The mode of NUMA balancing; 2 promotes hot pages of the slow tier.
pub const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// Where the cgroups of version 2 are mounted.
pub const CGROUPS: &str = "/sys/fs/cgroup";
/// Weights of the nodes for memory that is interleaved by weight.
pub const INTERLEAVE: &str = "/sys/kernel/mm/mempolicy/weighted_interleave";
/// Whether the kernel itself derives the weights, from Linux 6.16 on: a weight that is written ends it.
pub const INTERLEAVE_AUTO: &str = "/sys/kernel/mm/mempolicy/weighted_interleave/auto";
/// MB/s that promotion may take, for each node.
pub const PROMOTION_LIMIT: &str = "/proc/sys/kernel/numa_balancing_promote_rate_limit_MBps";
