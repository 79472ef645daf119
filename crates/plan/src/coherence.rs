//! `polder plan coherence`: a region of a rack's memory that hardware keeps coherent, beside software that copies it.

use clap::Args;
use polder_platform::Bytes;
use polder_sim::memory::{CoherentRack, RegionQuestion, RegionTimes};
use serde_json::json;

use super::fidelity::ClosedForm;
use super::option::{Machine, of_memory};
use super::table::{self, size, time};
use super::written::Json;
use crate::Failure;

/// Predicts accesses to a coherent region.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    machine: Machine,
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
    /// The exponent of Zipf's law: 0 if all lines are equally likely.
    #[arg(long, value_name = "EXPONENT", default_value_t = 0.8)]
    skew: f64,
    #[command(flatten)]
    fidelity: ClosedForm,
    #[command(flatten)]
    json: Json,
}

/// Prints rates and access times by region.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.fidelity.check(
        "coherence",
        "an access is taken alone; plan fabric has what messages that share links take",
    )?;
    let rack = CoherentRack::new(&arguments.machine.platform, arguments.machine.rack.as_deref())
        .map_err(of_memory)?;
    let mut rows = vec![table::head(
        "region | hits | filter misses | back-invalidations | invalidations | coherent | copies | over copies",
    )];
    let mut all = vec![];
    for region in &arguments.region {
        let asked = RegionQuestion {
            region_bytes: region.value(),
            cache_bytes: arguments.cache.value(),
            snoop_filter_bytes: arguments.snoop_filter.value(),
            writes: arguments.writes,
            skew: arguments.skew,
        };
        let RegionTimes { load, rates, coherent_s, copies_s } = rack.region(&asked).map_err(of_memory)?;
        let percent = |part: f64| format!("{:.1}%", 100.0 * part);
        rows.push(vec![
            size(region.value()),
            percent(rates.hits),
            percent(rates.filter_misses),
            format!("{:.3}", rates.back_invalidations),
            format!("{:.3}", rates.invalidations),
            time(coherent_s),
            time(copies_s),
            format!("{:.2}", copies_s / coherent_s),
        ]);
        all.push(json!({
            "region_bytes": region.value(), "load": load, "rates": rates, "coherent_s": coherent_s, "copies_s": copies_s,
        }));
    }
    if arguments.json.json {
        println!(
            "{}",
            json!({
                "platform": arguments.machine.platform, "rack": rack.rack, "own_s": rack.own_s, "load_s": rack.load_s,
                "snoop_s": rack.snoop_s, "regions": all,
            })
        );
        return Ok(());
    }
    println!(
        "a region that the {} accelerators of a rack {} on {} access, simulated",
        rack.accelerators, rack.rack, arguments.machine.platform
    );
    table::print(&rows);
    println!(
        "of the accesses, and copies an access that are invalidated; a hit takes {}, a load over CXL {}, a copy that is invalidated {}",
        time(rack.own_s),
        time(rack.load_s),
        time(rack.snoop_s)
    );
    println!(
        "each caches {} of it, the filter knows {} of lines, {:.0}% write, skew {}; copies: software copies each line again, because nothing keeps it coherent",
        size(arguments.cache.value()),
        size(arguments.snoop_filter.value()),
        100.0 * arguments.writes,
        arguments.skew
    );
    println!("no run over CXL validates this");
    Ok(())
}
