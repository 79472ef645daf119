//! `polder plan show`: a platform as it is predicted on, with its sources, the file of a model or of prices, or all that Polder brings.

use clap::Args;
use polder_platform::{DataError, Fabric, Folder, Platform, Prices, extended, names, text};
use polder_sim::Model;
use serde_json::{Value, json};

use crate::Failure;
use crate::written::Json;

/// Prints a platform, a model or prices, or lists what there is.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The machine: a name, or the path of a file or of a system of Calculon; or the name of a model or of prices. Without it, all are listed.
    platform: Option<String>,
    #[command(flatten)]
    json: Json,
}

/// Prints a whole file that `--platform` takes: what the named one extends is merged in, and what follows from it stands in comments.
pub(super) fn show(arguments: &Arguments) -> Result<(), Failure> {
    let Some(name) = &arguments.platform else { return list(arguments.json.json) };
    for folder in [Folder::Models, Folder::Prices] {
        if names(folder).contains(&name.as_str()) {
            let text = text(folder, name)?;
            let value =
                toml::from_str::<Value>(&text).map_err(|error| Failure(format!("{name}: {error}")))?;
            if arguments.json.json {
                println!("{value}")
            } else {
                print!("{text}")
            }
            return Ok(());
        }
    }
    let platform = Platform::load(name)?;
    if arguments.json.json {
        println!("{}", json!({ "name": name, "platform": platform, "derived": derived_lines(&platform) }));
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
    for line in derived_lines(&platform) {
        println!("# {line}");
    }
    println!();
    print!("{}", toml::to_string(&platform)?);
    Ok(())
}

/// Lists what Polder brings.
fn list(json: bool) -> Result<(), Failure> {
    if json {
        let platform = |name: &str| -> Result<Value, DataError> {
            Ok(json!({ "name": name, "title": Platform::load(name)?.title }))
        };
        let model = |name: &str| -> Result<Value, DataError> {
            let model = Model::load(name)?;
            Ok(json!({ "name": name, "title": model.title, "parameters": model.parameters() }))
        };
        let prices = |name: &str| -> Result<Value, DataError> {
            Ok(json!({ "name": name, "title": Prices::load(name)?.title }))
        };
        let all = json!({
            "platforms": names(Folder::Platforms).into_iter().map(platform).collect::<Result<Vec<_>, _>>()?,
            "models": names(Folder::Models).into_iter().map(model).collect::<Result<Vec<_>, _>>()?,
            "prices": names(Folder::Prices).into_iter().map(prices).collect::<Result<Vec<_>, _>>()?,
        });
        println!("{all}");
        return Ok(());
    }
    println!("platforms");
    for name in names(Folder::Platforms) {
        println!("  {name:24} {}", Platform::load(name)?.title);
    }
    println!("models");
    for name in names(Folder::Models) {
        let model = Model::load(name)?;
        println!("  {name:24} {:6.0} billion parameters, {}", model.parameters() / 1e9, model.title);
    }
    println!("prices");
    for name in names(Folder::Prices) {
        println!("  {name:24} {}", Prices::load(name)?.title);
    }
    Ok(())
}

/// What follows from the platform's numbers.
fn derived_lines(platform: &Platform) -> Vec<String> {
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
