//! Pools for tests and for hostile peers.

use std::path::Path;

use polder_mem::{Heap, HeapShape, HostPlan};

use crate::format::{Geometry, Layout, Overwrite, Uuid, format};
use crate::local::LocalLayout;

/// How a process of `host` attaches the file of a pool, whose host has its own files in `directory`.
///
/// # Panics
/// When the geometry does not fit.
#[must_use]
pub fn plan_of(geometry: &Geometry, bytes: u64, host: u16, directory: &Path) -> HostPlan {
    let Geometry { hosts, processes, .. } = *geometry;
    let layout = Layout::new(geometry, bytes).expect("a geometry that fits");
    HostPlan {
        pool: 1,
        host,
        hosts,
        processes,
        local_words: LocalLayout::new(&layout).words(),
        bells: u32::from(hosts) * u32::from(processes),
        directory: directory.into(),
        kept: 0..0,
        patience: HostPlan::PATIENCE,
    }
}

/// A new pool in ordinary memory, as the first process of its first host has it; others have [`Heap::process`] of it.
///
/// # Panics
/// When the geometry does not fit.
pub fn formatted(geometry: &Geometry, bytes: u64) -> Heap {
    let Geometry { hosts, processes, .. } = *geometry;
    let layout = Layout::new(geometry, bytes).expect("a geometry that fits");
    let local_words = LocalLayout::new(&layout).words();
    let bells = u32::from(hosts) * u32::from(processes);
    let heap = Heap::new(HeapShape { bytes, hosts, processes, local_words, bells });
    format(&heap, geometry, Uuid(1), Overwrite::Refuse).expect("a new pool");
    heap
}
