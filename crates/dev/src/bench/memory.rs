//! `polder-dev bench memory`: each node's memory under load (the Vistara paper's Tables III and IV, Figures 2 and 5), and
//! `polder-dev bench knee`: a footprint over two tiers of which a growing part is hot (Table X).

use std::fs;

use clap::Args;
use polder_linux::parse_nodes;
use polder_mem::allowed_cpus;
use polder_mem::lines::{Mix, Sampling, hot_latency, latencies, loaded_latency, mixed_bandwidth};
use polder_offload::{Location, Range};

use crate::Failure;
use polder_measure::machine::processor;
use polder_measure::{Kind, Row, Sample};

/// Shares of the time in which threads load the memory whose latency is measured.
const SHARES: [f64; 5] = [0.0, 0.1, 0.3, 0.6, 1.0];
/// Percentiles of Figure 5.
const PERCENTILES: [f64; 4] = [50.0, 90.0, 99.0, 99.9];

/// Which memory is measured.
#[derive(Args)]
pub(super) struct MemoryArguments {
    /// A node to measure; all with memory when none is named. May be repeated.
    #[arg(long, value_name = "NODE")]
    node: Vec<u32>,
    #[command(flatten)]
    effort: Effort,
}

/// Which memory the footprint takes.
#[derive(Args)]
pub(super) struct KneeArguments {
    /// The node that the footprint's first part lies on.
    #[arg(long, default_value_t = 0, value_name = "NODE")]
    fast: u32,
    /// The node that the rest of it lies on.
    #[arg(long, default_value_t = 1, value_name = "NODE")]
    slow: u32,
    /// Percent of the footprint that lies on the fast node.
    #[arg(long, default_value_t = 75, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    local: u8,
    /// Percents of the footprint that are hot.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 20, 40, 60, 70, 75, 80, 100], value_name = "PERCENT",
          value_parser = clap::value_parser!(u8).range(1..=100))]
    hot: Vec<u8>,
    /// Start with the hot part on the slow node, and leave it to the kernel to promote it.
    #[arg(long)]
    hot_below: bool,
    #[command(flatten)]
    effort: Effort,
}

/// How much is measured.
#[derive(Args)]
struct Effort {
    /// MiB that are read and written; more than the caches hold.
    #[arg(long, default_value_t = 256, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=65536))]
    mib: u32,
    /// Samples of each figure.
    #[arg(long, default_value_t = 15, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1000))]
    samples: u16,
}

impl Effort {
    const fn bytes(&self) -> usize {
        (self.mib as usize) << 20
    }

    fn sampling(&self) -> Sampling {
        Sampling { samples: self.samples.into(), sample_ns: 1_000_000 }
    }
}

/// Measures each node under load.
pub(super) fn run(arguments: &MemoryArguments) -> Result<Vec<Row>, Failure> {
    let nodes = match arguments.node.is_empty() {
        true => nodes_with_memory()?,
        false => arguments.node.clone(),
    };
    let mut rows = Vec::new();
    for node in nodes {
        let mut range = Range::new(arguments.effort.bytes())?;
        let bytes = range.bytes();
        range.bind(0, bytes, node as usize)?;
        of_node(&mut range, node, arguments.effort.sampling(), &mut rows);
    }
    Ok(rows)
}

fn of_node(range: &mut Range, node: u32, effort: Sampling, rows: &mut Vec<Row>) {
    let cpus = allowed_cpus().len();
    for mix in Mix::ALL {
        let rate = mixed_bandwidth(range.words(), cpus, mix, effort);
        rows.push(row(
            "memory",
            format!("node {node} {} {cpus} threads", mix.name()),
            "bandwidth",
            rate,
            "GB/s",
        ));
        if let Some(gigabytes) = node_gigabytes(node).filter(|_| mix == Mix::READS) {
            let per = rate.map(|rate| rate / gigabytes);
            rows.push(row(
                "memory",
                format!("node {node} all reads a GB of capacity"),
                "bandwidth",
                per,
                "GB/s",
            ));
        }
    }
    // A core is left to the thread whose loads are timed.
    let readers = (cpus - 1).max(1);
    for share in SHARES {
        let measured = loaded_latency(range.words(), readers, share, effort);
        let case = match share {
            0.0 => format!("node {node} idle"),
            share => format!("node {node} {readers} readers {:.0}% of the time", 100.0 * share),
        };
        rows.push(row("memory", case.clone(), "latency", measured.latency, "ns"));
        if share > 0.0 {
            rows.push(row("memory", case, "load", Sample::one(measured.load), "GB/s"));
        }
    }
    let mut counts = vec![1, cpus];
    counts.dedup();
    for threads in counts {
        let times = latencies(range.words(), threads, effort);
        for percentile in PERCENTILES {
            let at = ((times.len() - 1) as f64 * percentile / 100.0).round() as usize;
            let case = format!("node {node} p{percentile} {threads} latency threads");
            rows.push(row("memory", case, "latency", Sample::one(times[at]), "ns"));
        }
    }
}

/// Measures a footprint over two nodes by the part of it that is hot.
pub(super) fn knee(arguments: &KneeArguments) -> Result<Vec<Row>, Failure> {
    let KneeArguments { fast, slow, local, .. } = *arguments;
    let nodes = nodes_with_memory()?;
    if let Some(node) = [fast, slow].into_iter().find(|node| !nodes.contains(node)) {
        let has = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        return Err(Failure(format!(
            "this machine has no memory on node {node}, but on {has}; name two nodes with --fast and --slow"
        )));
    }
    let mut range = Range::new(arguments.effort.bytes())?;
    let bytes = range.bytes();
    let mut parts = [(fast, pages(bytes, local)), (slow, bytes - pages(bytes, local))];
    if arguments.hot_below {
        parts.reverse();
    }
    let mut begin = 0;
    for (node, bytes) in parts {
        range.place(begin, bytes, node as usize)?;
        begin += bytes;
    }
    let readers = (allowed_cpus().len() - 1).max(1);
    let mut rows = Vec::new();
    for &hot in &arguments.hot {
        let bytes = pages(bytes, hot);
        if bytes < readers * polder_offload::PAGE {
            let needs = format!("--hot {hot}: expected a page or more for each of {readers} readers");
            return Err(Failure(format!("{needs}; give more --mib")));
        }
        let measured = hot_latency(range.words(), bytes, readers, arguments.effort.sampling());
        let case = format!("{hot}% hot, {local}% local");
        rows.push(row("knee", case.clone(), "latency", measured.latency, "ns"));
        // Every hot byte is read equally often, so a node's part of the traffic is its part of the hot bytes.
        let located = range.locate_piece(0, bytes)?;
        for node in [fast, slow] {
            let on = located.get(&Location::Node(node as usize)).copied().unwrap_or(0);
            let share = on as f64 / bytes as f64;
            rows.push(row(
                "knee",
                format!("{case}, node {node}"),
                "bandwidth",
                Sample::one(measured.load * share),
                "GB/s",
            ));
        }
    }
    Ok(rows)
}

/// Whole pages of a percentage of `bytes`.
const fn pages(bytes: usize, percent: u8) -> usize {
    bytes * percent as usize / 100 / polder_offload::PAGE * polder_offload::PAGE
}

/// The nodes with memory; 0 on a kernel without NUMA.
fn nodes_with_memory() -> Result<Vec<u32>, Failure> {
    let path = "/sys/devices/system/node/has_memory";
    let Ok(text) = fs::read_to_string(path) else { return Ok(vec![0]) };
    let nodes = parse_nodes(&text).ok_or_else(|| Failure(format!("{path}: {text:?} is no list of nodes")))?;
    Ok(nodes.into_iter().collect())
}

/// GB of a node.
fn node_gigabytes(node: u32) -> Option<f64> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let line = polder_measure::machine::line_of(path.as_ref(), &format!("Node {node} MemTotal"))?;
    Some(polder_measure::machine::kib(&line)? / 1e9)
}

/// A row of this machine.
fn row(bench: &str, case: String, metric: &str, sample: impl Into<Sample>, unit: &str) -> Row {
    Row { kind: kind(), ..Row::measured(bench, case, metric, sample.into(), unit) }
}

/// How figures of this machine are obtained. QEMU without KVM gives every node the same memory, and its CPU has none of the costs of
/// hardware.
pub(super) fn kind() -> Kind {
    let is_emulated = processor().is_some_and(|name| name.starts_with("QEMU TCG"));
    if is_emulated { Kind::Emulated } else { Kind::Measured }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effort() -> Effort {
        Effort { mib: 4, samples: 3 }
    }

    #[test]
    fn a_node_has_a_row_for_each_mix_each_load_and_each_percentile() {
        let rows = run(&MemoryArguments { node: vec![0], effort: effort() }).unwrap();
        let count = |metric: &str| rows.iter().filter(|row| row.metric == metric).count();
        let counts = if allowed_cpus().len() > 1 { 2 } else { 1 };
        assert_eq!(count("bandwidth"), Mix::ALL.len() + 1);
        assert_eq!(count("latency"), SHARES.len() + counts * PERCENTILES.len());
        assert_eq!(count("load"), SHARES.len() - 1);
        assert!(
            rows.iter().all(|row| row.value > 0.0 && row.low <= row.value && row.value <= row.high),
            "{rows:?}"
        );
    }

    #[test]
    fn a_footprint_on_one_node_has_all_its_traffic_there() {
        let two = KneeArguments {
            fast: 0,
            slow: 0,
            local: 50,
            hot: vec![10, 100],
            hot_below: true,
            effort: effort(),
        };
        let rows = knee(&two).unwrap();
        let latencies = rows.iter().filter(|row| row.metric == "latency").count();
        assert_eq!((latencies, rows.len()), (2, 6));
        assert!(rows.iter().all(|row| row.value > 0.0), "{rows:?}");
        let refused = knee(&KneeArguments { slow: 1000, ..two }).unwrap_err();
        assert!(refused.0.starts_with("this machine has no memory on node 1000, but on 0"), "{refused}");
    }

    #[test]
    fn a_percentage_is_whole_pages_within_the_footprint() {
        assert_eq!(pages(1 << 20, 75) % polder_offload::PAGE, 0);
        assert!(pages(1 << 20, 100) <= 1 << 20 && pages(1 << 20, 1) > 0);
    }
}
