//! `polder plan`: predicts training steps and accesses to memory on machines that are described in files, and shows how far off it is.

mod chakra;
mod coherence;
mod fabric;
mod fidelity;
mod inference;
mod memory;
mod mixed;
mod mpi;
mod offload;
mod option;
mod page;
mod reproduce;
mod search;
mod show;
mod sync;
mod table;
mod tier;
mod trace;
mod train;
mod validate;
mod verify;
mod written;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use polder_platform::{DataError, Folder, Platform, Prices, names};
use polder_sim::Model;
use serde_json::{Value, json};

use crate::Failure;

/// Predicts what a step takes before anything is bought or run.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Predict a training step, with the layout that you give or the fastest that fits by --fidelity L0.
    Train(train::Arguments),
    /// Predict a training step on racks of two kinds, such as NVLink and UALink, which CXL joins.
    Mixed(mixed::Arguments),
    /// Predict every layout, and print those that no other beats in time, memory and money.
    Search(search::Arguments),
    /// Predict the time of a memory access, by the size of the working set.
    Memory(memory::Arguments),
    /// Predict hits, snoop-filter misses and back-invalidations of a region that a rack keeps coherent.
    Coherence(coherence::Arguments),
    /// Predict steps of inference whose KV cache, tables or index outgrow an accelerator.
    Inference(inference::Arguments),
    /// Predict when the messages of a pattern end that share the links of a fabric.
    Fabric(fabric::Arguments),
    /// Predict a traced step of PyTorch (MLCommons Chakra) by its operators, beside what it took.
    Chakra(chakra::Arguments),
    /// Predict a traced MPI program over another network, beside what it took.
    Mpi(mpi::Arguments),
    /// Predict a step whose tensors lie in host memory: bytes by object and tier, and seconds by phase.
    Offload(offload::Arguments),
    /// Predict a data-parallel step with all-reduces and with a parameter service.
    Sync(sync::Arguments),
    /// Predict what a server holds with slow memory beside its own, and by how much services are slower.
    Tier(tier::Arguments),
    /// Compute a published figure again, and print it beside the paper's.
    Reproduce(reproduce::Arguments),
    /// Predict published steps, fabrics and memory, and print the errors.
    Validate(validate::Arguments),
    /// Measure all-reduces on this machine, predict most from a few, and print the errors.
    Verify(verify::Arguments),
    /// List the platforms, models and prices that Polder brings.
    List(ListArguments),
    /// Print a platform as a file for `--platform`, with the source of each number.
    Show(show::Arguments),
}

/// Runs `polder plan`.
pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Train(arguments) => train::train(arguments)?,
        Command::Mixed(arguments) => mixed::run(arguments)?,
        Command::Search(arguments) => search::search(arguments)?,
        Command::Memory(arguments) => memory::run(arguments)?,
        Command::Chakra(arguments) => chakra::run(arguments)?,
        Command::Coherence(arguments) => coherence::run(arguments)?,
        Command::Inference(arguments) => inference::run(arguments)?,
        Command::Fabric(arguments) => fabric::run(arguments)?,
        Command::Mpi(arguments) => mpi::run(arguments)?,
        Command::Offload(arguments) => offload::run(arguments)?,
        Command::Sync(arguments) => sync::run(arguments)?,
        Command::Tier(arguments) => tier::run(arguments)?,
        Command::Reproduce(arguments) => reproduce::run(arguments)?,
        Command::Validate(arguments) => validate::run(arguments)?,
        Command::Verify(arguments) => verify::run(arguments)?,
        Command::List(arguments) => list(arguments)?,
        Command::Show(arguments) => show::show(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists what Polder brings.
#[derive(Args)]
pub(crate) struct ListArguments {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn list(arguments: &ListArguments) -> Result<(), Failure> {
    if arguments.json {
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
