//! `polder plan coherence`: a region of a rack's memory that hardware keeps coherent, beside software that copies it.

use clap::Args;
use polder_platform::{Bytes, Platform};
use polder_sim::memory::{Inside, LINE, Question, RegionLoad, Tier, Ways, configurations, job};
use serde_json::json;

use super::memory::{size, time};
use super::table;
use crate::Failure;

/// Predicts accesses to a coherent region.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The machine, whose racks have a coherent fabric: a name (`polder plan list`), or the path of a file.
    #[arg(long, value_name = "PLATFORM")]
    platform: String,
    /// Kind of rack, if the platform has several [default: the first by name].
    #[arg(long, value_name = "NAME")]
    rack: Option<String>,
    /// Regions, such as "64 MB,1 GB".
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = Bytes::parse, default_value = "16 MB,256 MB,4 GB")]
    region: Vec<Bytes>,
    /// What each accelerator caches of it.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse, default_value = "64 MB")]
    cache: Bytes,
    /// Lines that the snoop filter has entries for, in bytes of these lines.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse, default_value = "256 MB")]
    snoop_filter: Bytes,
    /// The part of the accesses that write.
    #[arg(long, value_name = "PART", default_value_t = 0.05)]
    writes: f64,
    /// The exponent of Zipf's law: 0 if all lines are alike.
    #[arg(long, value_name = "EXPONENT", default_value_t = 0.8)]
    skew: f64,
    /// What accesses are drawn from.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The memory of the rack, as a configuration has it.
fn rack<'a>(found: &'a [polder_sim::memory::Configuration], name: &str) -> Option<&'a Tier> {
    found.iter().find(|on| on.name == name)?.tiers.iter().find(|tier| tier.name == "rack")
}

/// Prints rates and access times by region.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let platform = Platform::load(&arguments.platform)?;
    let job = job(&arguments.platform, &platform, arguments.rack.as_deref())?;
    let name = job.rack_name();
    if job.rack().coherent.is_none() {
        return Err(Failure(format!(
            "{}: rack.{name}.coherent: expected CXL inside the rack, which keeps regions coherent; take nvl72-cxl, or add it",
            arguments.platform
        )));
    }
    let question = Question {
        platform: arguments.platform.clone(),
        against: None,
        rack: arguments.rack.clone(),
        accelerators: None,
        ways: Ways { inside: Inside::Copy, ..Ways::default() },
    };
    let (_, found) = configurations(&question)?;
    let (Some(load), Some(copy)) = (rack(&found, "tiered"), rack(&found, "clusters")) else {
        return Err(Failure(format!("{}: a rack of one accelerator shares nothing", arguments.platform)));
    };
    let own_s = found[0].tiers[0].access.seconds(LINE);
    let (load_s, copy_s) = (load.access.seconds(LINE), copy.access.seconds(LINE));
    // A copy is taken from where it lies: a request and its answer, without memory.
    let snoop_s = load.access.idle() - load.access.memory_s;
    let mut rows = vec![
        [
            "region",
            "hits",
            "filter misses",
            "back-invalidations",
            "invalidations",
            "coherent",
            "copies",
            "over copies",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let mut all = vec![];
    for region in &arguments.region {
        let asked = RegionLoad {
            accelerators: job.rack().accelerators,
            lines: region.value() / LINE,
            cached: arguments.cache.value() / LINE,
            filter: arguments.snoop_filter.value() / LINE,
            writes: arguments.writes,
            skew: arguments.skew,
            seed: arguments.seed,
        };
        let rates = asked.rates().map_err(|(key, problem)| Failure(format!("--{key}: {problem}")))?;
        // Copies of a write go at once; that of a filter's victim goes before the entry is free.
        let is_invalidated = rates.invalidations.min(arguments.writes);
        let seconds =
            rates.hits * own_s + (1.0 - rates.hits) * load_s + (is_invalidated + rates.waited) * snoop_s;
        let percent = |part: f64| format!("{:.1}%", 100.0 * part);
        rows.push(vec![
            size(region.value()),
            percent(rates.hits),
            percent(rates.filter_misses),
            format!("{:.3}", rates.back_invalidations),
            format!("{:.3}", rates.invalidations),
            time(seconds),
            time(copy_s),
            format!("{:.2}", copy_s / seconds),
        ]);
        all.push(json!({
            "region_bytes": region.value(), "load": asked, "rates": rates, "coherent_s": seconds, "copies_s": copy_s,
        }));
    }
    if arguments.json {
        println!(
            "{}",
            json!({
                "platform": arguments.platform, "rack": name, "own_s": own_s, "load_s": load_s, "snoop_s": snoop_s, "regions": all,
            })
        );
        return Ok(());
    }
    println!(
        "a region that the {} accelerators of a rack {name} on {} access, simulated",
        job.rack().accelerators,
        arguments.platform
    );
    table::print(&rows);
    println!(
        "of the accesses, and copies an access that are invalidated; a hit takes {}, a load over CXL {}, a copy that is invalidated {}",
        time(own_s),
        time(load_s),
        time(snoop_s)
    );
    println!(
        "each caches {} of it, the filter knows {} of lines, {:.0}% write, skew {}; copies: software copies each line anew, as it keeps nothing coherent",
        size(arguments.cache.value()),
        size(arguments.snoop_filter.value()),
        100.0 * arguments.writes,
        arguments.skew
    );
    println!("no run over CXL validates this");
    Ok(())
}
