//! `polder plan memory`: access time by working set, with the memories of a cluster that it takes.

use clap::Args;
use polder_platform::{Bytes, Platform};
use polder_sim::accelerators;
use polder_sim::memory::{
    Caching, Configuration, Curves, How, Inside, NodeLatency, Nodes, PAYS, Pays, Point, Question, Tier, Ways,
    curves, landmarks,
};
use serde_json::json;

use super::fidelity::ClosedForm;
use super::option::{Machine, accelerator_count, choice, of_memory, quantity};
use super::page::filled;
use super::table::{self, access_size, size, time};
use super::written::{Outputs, escaped_csv};
use crate::Failure;

/// Predicts access times.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    machines: MachineArguments,
    /// Sizes of an access, such as "64 B,4 KiB".
    #[arg(
        long,
        value_name = "SIZE",
        value_delimiter = ',',
        default_value = "64 B",
        allow_negative_numbers = true
    )]
    access: Vec<String>,
    /// Working sets, such as "200 GB,20 TB" [default: some around the ends of memories].
    #[arg(long, value_name = "SIZE", value_delimiter = ',', allow_negative_numbers = true)]
    working_set: Vec<String>,
    #[command(flatten)]
    ways: WayArguments,
    #[command(flatten)]
    fidelity: ClosedForm,
    #[command(flatten)]
    pub(super) outputs: Outputs,
}

/// Machines that are compared.
#[derive(Args)]
pub(super) struct MachineArguments {
    #[command(flatten)]
    pub(super) machine: Machine,
    /// Another machine. Its accelerators alone are the baseline: software manages what they do not hold.
    #[arg(long, value_name = "PLATFORM")]
    pub(super) against: Option<String>,
    /// Number of accelerators of the machine [default: those of 16 racks].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    gpus: Option<String>,
}

impl MachineArguments {
    pub(super) fn question(&self, ways: &WayArguments) -> Result<Question, Failure> {
        Ok(Question {
            platform: self.machine.platform.clone(),
            against: self.against.clone(),
            rack: self.machine.rack.clone(),
            accelerators: self.gpus.as_deref().map(accelerator_count).transpose()?,
            ways: ways.ways(),
        })
    }
}

/// What a platform leaves open.
#[derive(Args)]
pub(super) struct WayArguments {
    /// Where memory nodes are: on the accelerator's own switch, or as far as ports of the fabric are from each other.
    #[arg(long, value_name = "WHERE", value_parser = choice::<Nodes>(["near", "far"]), default_value = "far")]
    nodes: Nodes,
    /// How accelerators of a rack reach each other's memory if it is not coherent: software copies it, or they load it.
    #[arg(long, value_name = "HOW", value_parser = choice::<Inside>(["copy", "load"]), default_value = "copy")]
    inside: Inside,
    /// Time of a load of a memory node before switches: as the platform gives it, or what that adds to a CPU's own memory, added
    /// to an accelerator's own.
    #[arg(long, value_name = "WHICH", value_parser = choice::<NodeLatency>(["given", "added"]), default_value = "given")]
    node_latency: NodeLatency,
    /// Data that accelerators of a rack load of each other come over the rack's own fabric, and coherence alone over CXL.
    #[arg(long)]
    bulk: bool,
    /// The CPU's memory too: loaded where CPUs attach by c2c or ucie, copied by software where they attach by PCIe.
    #[arg(long)]
    host: bool,
    /// What each accelerator caches of the memory that it loads over CXL, such as "64 MB" [default: nothing].
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    cache: Option<Bytes>,
    /// Lines that snoop filters have entries for, in bytes of these lines [default: 256 MB].
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse, requires = "cache")]
    snoop_filter: Option<Bytes>,
    /// The exponent of Zipf's law, by which bytes are popular: 0 if all are equally likely [default: 0.8].
    #[arg(long, value_name = "EXPONENT", requires = "cache")]
    skew: Option<f64>,
}

/// Bytes of the lines that a snoop filter has entries for, where none are given, and the exponent of Zipf's law.
const SNOOP_FILTER: f64 = 256e6;
const SKEW: f64 = 0.8;

impl WayArguments {
    pub(super) fn ways(&self) -> Ways {
        let caching = self.cache.map(|cache| Caching {
            cache_bytes: cache.value(),
            snoop_filter_bytes: self.snoop_filter.map_or(SNOOP_FILTER, Bytes::value),
            skew: self.skew.unwrap_or(SKEW),
        });
        let Self { nodes, inside, node_latency, bulk, host, .. } = *self;
        Ways { nodes, inside, node_latency, bulk, host, caching }
    }
}

/// The sizes of an option.
fn sizes(option: &str, texts: &[String]) -> Result<Vec<f64>, Failure> {
    texts.iter().map(|text| quantity(option, text).map(Bytes::value)).collect()
}

/// Prints access times.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments
        .fidelity
        .check("memory", "an access is taken alone; plan fabric has what messages that share links take")?;
    let question = arguments.machines.question(&arguments.ways)?;
    let access = sizes("--access", &arguments.access)?;
    let sets = sizes("--working-set", &arguments.working_set)?;
    let curves = curves(&question, &access, &sets).map_err(of_memory)?;
    expect_held(&curves)?;
    let title = |configuration: &Configuration| {
        Ok(format!("{}: {}", titled(configuration), Platform::load(&configuration.platform)?.title))
    };
    let titles = curves.configurations.iter().map(title).collect::<Result<Vec<_>, Failure>>()?;
    arguments.outputs.json.print(&curves, || print(&curves, &titles, &access, &sets))?;
    arguments.outputs.table(|| csv(&curves))?;
    arguments.outputs.page(|| page(&curves))
}

/// Whether some configuration holds each working set.
fn expect_held(curves: &Curves) -> Result<(), Failure> {
    let none = |point: &&Point| point.seconds.iter().all(Option::is_none);
    let most = curves.configurations.iter().map(Configuration::capacity).fold(0.0, f64::max);
    match curves.points.iter().find(none) {
        Some(Point { working_set_bytes, .. }) => {
            let [set, most] = [*working_set_bytes, most].map(size);
            let count = accelerators(curves.accelerators);
            let problem = format!("{count} and their memory nodes hold {most} at most, found {set}");
            Err(Failure(format!("--working-set: {problem}; give a smaller one, or more --gpus")))
        }
        None => Ok(()),
    }
}

fn print(curves: &Curves, titles: &[String], access: &[f64], sets: &[f64]) {
    println!("access time by working set, {}, simulated", accelerators(curves.accelerators));
    titles.iter().for_each(|title| println!("  {title}"));
    let rows = if sets.is_empty() { landmarks(&curves.configurations) } else { sets.to_vec() };
    for bytes in access {
        println!("\naccess of {}: its parts, there and back, in each memory", access_size(*bytes));
        table::print(&parts(&curves.configurations, *bytes));
        println!();
        table::print(&times(&curves.configurations, *bytes, &rows, curves.ways));
        let likely = match curves.ways.caching {
            Some(_) => "whatever is popular: no memory has more of that than of bytes",
            None => "and each byte of it is as likely",
        };
        println!("  (a working set takes the nearest memory first, {likely}; empty: more than it holds)");
        for pays in curves.pays.iter().filter(|it| it.access_bytes == *bytes) {
            println!("{}", pays_line(pays, &curves.configurations));
        }
        out_of_order(&curves.configurations, *bytes).iter().for_each(|line| println!("{line}"));
    }
    println!("\n{}", ways_line(curves.ways));
    println!(
        "reads, one at a time, while all accelerators do the same; no other accelerator writes what is read"
    );
    println!(
        "no run over CXL validates this; in a clone, `make reproduce NAME=scalepool-fig7` puts published ratios beside it"
    );
}

/// What was taken of what platforms leave open.
pub fn ways_line(ways: Ways) -> String {
    let nodes = match ways.nodes {
        Nodes::Near => "one switch away",
        Nodes::Far => "as far as ports of the fabric are",
    };
    let inside = match ways.inside {
        Inside::Copy => "copied by software",
        Inside::Load => "loaded",
    };
    let latency = match ways.node_latency {
        NodeLatency::Given => "as the platform gives it",
        NodeLatency::Added => "added to an accelerator's own memory",
    };
    let bulk = if ways.bulk { "; data of coherent loads in a rack over its own fabric (--bulk)" } else { "" };
    let host = if ways.host { "; the CPU's memory too (--host)" } else { "" };
    let caches = ways.caching.map_or_else(String::new, |it| {
        let [cache, filter] = [it.cache_bytes, it.snoop_filter_bytes].map(size);
        format!("; each accelerator caches {cache} of what it loads over CXL (--cache), filters know {filter} of lines, skew {}", it.skew)
    });
    format!(
        "memory nodes: {nodes} (--nodes), latency {latency} (--node-latency); what is not coherent in a rack: {inside} (--inside){bulk}{host}{caches}"
    )
}

/// A configuration with the machine that it is of.
fn titled(it: &Configuration) -> String {
    let how = match it.name {
        "baseline" | "clusters" => "accelerators alone",
        _ => "with what it has of coherent racks and memory nodes",
    };
    format!("{}: {}, {how}", it.name, it.platform)
}

/// How a memory is reached.
fn how(how: How) -> &'static str {
    match how {
        How::Own => "own",
        How::Load => "load",
        How::Copy => "copy",
    }
}

/// The parts of an access in each memory.
fn parts(configurations: &[Configuration], bytes: f64) -> Vec<Vec<String>> {
    let mut rows = vec![table::head(
        "| by | holds | access | software | controllers | switches | wires | memory | data",
    )];
    for configuration in configurations {
        for Tier { name, capacity_bytes, access, .. } in &configuration.tiers {
            let data = access.seconds(bytes) - access.idle();
            let mut row = vec![
                format!("{}, {name}", configuration.name),
                how(access.how).into(),
                size(*capacity_bytes),
            ];
            let parts = [
                access.seconds(bytes),
                access.software_s,
                access.controllers_s,
                access.switches_s,
                access.wires_s,
                access.memory_s,
                data,
            ];
            row.extend(parts.map(time));
            rows.push(row);
        }
    }
    rows
}

/// The access times of each configuration, and how many times faster the last is.
fn times(configurations: &[Configuration], bytes: f64, sets: &[f64], ways: Ways) -> Vec<Vec<String>> {
    let Some((last, others)) = configurations.split_last() else { return vec![] };
    let mut head = vec!["working set".to_owned()];
    head.extend(configurations.iter().map(|configuration| configuration.name.to_owned()));
    head.extend(others.iter().map(|configuration| format!("over {}", configuration.name)));
    // Which of them loads over CXL, and how much of all is then cached.
    let cached: Vec<_> = configurations
        .iter()
        .filter(|it| ways.caching.is_some() && it.tiers.iter().any(|tier| tier.is_cached))
        .collect();
    head.extend(cached.iter().map(|configuration| format!("hits, {}", configuration.name)));
    let mut rows = vec![head];
    for set in sets {
        let mut row = vec![size(*set)];
        row.extend(
            configurations
                .iter()
                .map(|configuration| configuration.seconds(bytes, *set).map_or_else(String::new, time)),
        );
        let ratio = |other| polder_sim::memory::ratio(last, other, bytes, *set);
        row.extend(others.iter().map(|configuration| {
            ratio(configuration).map_or_else(String::new, |times| format!("{times:.2}"))
        }));
        row.extend(cached.iter().map(|configuration| {
            configuration.hits(bytes, *set).map_or_else(String::new, |part| format!("{:.1}%", 100.0 * part))
        }));
        rows.push(row);
    }
    rows
}

fn pays_line(pays: &Pays, configurations: &[Configuration]) -> String {
    let Pays { tier, over, from_bytes, .. } = pays;
    let last = configurations.last().map_or("", |it| it.name);
    let percent = (PAYS - 1.0) * 100.0;
    match from_bytes {
        Some(bytes) => format!(
            "{last}, {tier}: pays from {} on: there an access is {percent:.0}% faster than with what {over} has for the same bytes",
            size(*bytes)
        ),
        None => format!(
            "{last}, {tier}: never pays: no access is {percent:.0}% faster than with what {over} has for the same bytes"
        ),
    }
}

/// Memories that are taken after slower ones.
fn out_of_order(configurations: &[Configuration], bytes: f64) -> Vec<String> {
    let faster = |configuration: &Configuration| {
        let pairs = configuration.tiers.windows(2).map(|pair| [&pair[0], &pair[1]]);
        let out = pairs.filter(|[before, after]| after.access.seconds(bytes) < before.access.seconds(bytes));
        out.map(|[before, after]| {
            format!(
                "{}: {} is faster than {}, which a working set takes first: what lies there would be read sooner here",
                configuration.name, after.name, before.name
            )
        })
        .collect::<Vec<_>>()
    };
    configurations.iter().flat_map(faster).collect()
}

/// A line for each access and working set: seconds of each configuration, empty where it holds less.
fn csv(curves: &Curves) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    let names = curves.configurations.iter().map(|configuration| format!("{}_s", configuration.name));
    writer.write_record(["access_bytes", "working_set_bytes"].map(String::from).into_iter().chain(names))?;
    for Point { access_bytes, working_set_bytes, seconds, .. } in &curves.points {
        let seconds = seconds.iter().map(|cell| cell.map_or_else(String::new, |seconds| seconds.to_string()));
        writer
            .write_record([access_bytes, working_set_bytes].map(f64::to_string).into_iter().chain(seconds))?;
    }
    escaped_csv(writer)
}

/// One page that needs nothing else.
fn page(curves: &Curves) -> Result<String, Failure> {
    let others: String = curves.against.iter().map(|platform| format!(" and {platform}")).collect();
    let count = accelerators(curves.accelerators);
    let title = format!("Access time by working set on {}{others}, {count}", curves.platform);
    let data = json!({
        "curves": curves,
        "titles": curves.configurations.iter().map(titled).collect::<Vec<_>>(),
        "ways": ways_line(curves.ways),
        "pays": curves.pays.iter().map(|pays| json!([pays.access_bytes, pays_line(pays, &curves.configurations)])).collect::<Vec<_>>(),
    });
    filled(include_str!("memory.html"), &title, &data)
}
