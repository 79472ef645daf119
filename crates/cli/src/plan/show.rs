//! `polder plan show`: a platform as it is predicted on, with its sources.

use clap::Args;
use polder_platform::{Fabric, Folder, Platform, extended};
use serde_json::json;

use crate::Failure;

/// Prints a platform.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The machine: a name (`polder plan list`), or the path of a file or of a system of Calculon.
    platform: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Prints a whole file that `--platform` takes: what the named one extends is merged in, and what follows from it stands in comments.
pub(super) fn show(arguments: &Arguments) -> Result<(), Failure> {
    let name = &arguments.platform;
    let platform = Platform::load(name)?;
    if arguments.json {
        println!("{}", json!({ "name": name, "platform": platform, "derived": derived(&platform) }));
        return Ok(());
    }
    println!("# {name}: {}", platform.title);
    println!("# source: {}", platform.source);
    if !name.ends_with(".json") {
        for (base, source) in extended(Folder::Platforms, name)? {
            println!("# extends {base}, source: {source}");
        }
    }
    println!("# which single numbers are assumed or fitted, comments in the files of data/platforms say");
    for line in derived(&platform) {
        println!("# {line}");
    }
    println!();
    print!("{}", toml::to_string(&platform)?);
    Ok(())
}

/// What follows from the platform's numbers.
fn derived(platform: &Platform) -> Vec<String> {
    let racks =
        platform.rack.iter().map(|(name, rack)| (format!("inside a rack {name}"), rack.fabric.as_ref()));
    let between = std::iter::once(("between racks".to_owned(), platform.between.as_ref()));
    racks.chain(between).filter_map(|(place, fabric)| Some(format!("{place}: {}", rates(fabric?)))).collect()
}

fn rates(fabric: &Fabric) -> String {
    format!(
        "{} of payload an accelerator, {} an empty message, {} ports",
        fabric.payload(),
        fabric.latency(),
        fabric.ports()
    )
}
