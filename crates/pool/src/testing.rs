//! Pools in ordinary memory, for tests and for hostile peers.

use polder_mem::{Heap, HeapShape};

use crate::format::{Geometry, Layout, Overwrite, Uuid, format};
use crate::local::LocalLayout;

/// A new pool, as the first process of its first host has it; others have [`Heap::process`] of it.
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
