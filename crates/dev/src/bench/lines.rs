//! `polder-dev bench lines`: writing and flushing with each instruction (cMPI, Figure 11), and the rows of its Table 1
//! that a machine without a network card or CXL memory has.

use polder_mem::lines::{
    Sampling, Timing, WriteMethod, memory_bandwidth, memory_latency, memset, memset_bandwidth, memset_sizes,
};
use polder_mem::{Mapped, Region};

use crate::Failure;
use polder_measure::Row;
use polder_measure::Scratch;
use polder_measure::size;

/// Larger than any cache.
const MEMORY: usize = 256 << 20;

/// Measures on a file in /dev/shm.
pub(super) fn run() -> Result<Vec<Row>, Failure> {
    let scratch = Scratch::new()?;
    let memory = Mapped::new(Region::create(scratch.path().join("region"), 256 << 20)?);
    let effort = Sampling::default();
    let mut rows = Vec::new();
    for bytes in memset_sizes() {
        for way in WriteMethod::all() {
            if let Some(timing) = memset(&memory, way, bytes, effort)? {
                let case = format!("memset and flush {} {}", size(bytes as usize), way.name());
                rows.push(row(case, "latency", timing, "ns"));
            }
        }
    }
    table_1(&memory, effort, &mut rows)?;
    Ok(rows)
}

fn table_1(memory: &Mapped, effort: Sampling, rows: &mut Vec<Row>) -> Result<(), Failure> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    rows.push(row("main memory 8 B".into(), "latency", memory_latency(MEMORY, effort), "ns"));
    let few = Sampling { samples: 15, ..effort };
    let case = format!("main memory {threads} threads");
    rows.push(row(case, "bandwidth", memory_bandwidth(threads, MEMORY / threads, few), "GB/s"));
    for way in WriteMethod::all() {
        if let Some(timing) = memset(memory, way, 8, effort)? {
            rows.push(row(format!("memset 8 B {}", way.name()), "latency", timing, "ns"));
        }
        if let Some(timing) = memset_bandwidth(memory, way, threads, few)? {
            rows.push(row(
                format!("memset 512 B {threads} threads {}", way.name()),
                "bandwidth",
                timing,
                "GB/s",
            ));
        }
    }
    Ok(())
}

fn row(case: String, metric: &str, timing: Timing, unit: &str) -> Row {
    Row::measured("lines", case, metric, timing.into(), unit)
}
