//! `polder plan`: predicts training steps and accesses to memory on machines that are described in files, and shows how far off it is.
//!
//! The `polder` command links this library; `polder-plan` is the same commands alone, on any CPU.
#![forbid(unsafe_code)]

#[macro_use(println, print)]
extern crate polder_front;

mod chakra;
mod coherence;
mod fabric;
mod fidelity;
mod inference;
pub mod memory;
mod mpi;
mod offload;
mod option;
mod page;
mod pays;
mod search;
mod show;
mod sync;
pub mod table;
mod tier;
mod train;
mod validate;
mod written;

use std::path::Path;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use polder_front::Failure;
use polder_platform::{Folder, names};

/// Predicts what a step takes before anything is bought or run.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Predict a training step, with the layout that you give or the fastest that fits by --fidelity L0.
    Train(train::Arguments),
    /// Predict every layout, and print those that no other beats in time, memory and money.
    Search(search::Arguments),
    /// Predict from which bandwidths on one fabric between racks pays against another.
    Pays(pays::Arguments),
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
    /// Predict published steps, fabrics and memory, and print the errors.
    Validate(validate::Arguments),
    /// Print a platform as a file for `--platform`, with the source of each number, or list the platforms, models and prices that there are.
    Show(show::Arguments),
}

impl Command {
    /// The files that it is to write.
    fn outputs(&self) -> Vec<Option<&Path>> {
        match self {
            Self::Train(it) => vec![it.trace.as_deref(), it.html.as_deref()],
            Self::Search(it) => it.outputs.files().into(),
            Self::Pays(it) => it.outputs.files().into(),
            Self::Memory(it) => it.outputs.files().into(),
            Self::Fabric(it) => [&it.outputs.files()[..], &[it.trace.as_deref()]].concat(),
            Self::Offload(it) => it.outputs.files().into(),
            Self::Tier(it) => it.outputs.files().into(),
            // One at most.
            Self::Chakra(_)
            | Self::Coherence(_)
            | Self::Inference(_)
            | Self::Mpi(_)
            | Self::Sync(_)
            | Self::Validate(_)
            | Self::Show(_) => vec![],
        }
    }
}

/// The command with the names that Polder brings of platforms, models and prices, which shells then complete.
#[must_use]
pub fn with_names(command: clap::Command) -> clap::Command {
    let named = |argument: clap::Arg| {
        let value = argument.get_value_names().and_then(|names| names.first()).map(|name| name.to_string());
        let folder = match value.as_deref() {
            Some("PLATFORM") => Folder::Platforms,
            Some("MODEL") => Folder::Models,
            Some("PRICES") => Folder::Prices,
            _ => return argument,
        };
        argument.value_parser(PossibleValuesParser::new(names(folder)))
    };
    command.mut_subcommands(with_names).mut_args(named)
}

/// Runs a command of the plan front.
///
/// # Errors
/// What was wrong with its input, or that an output could not be written.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    // Before the work, which may take minutes.
    written::expect_own_files(&arguments.command.outputs())?;
    match &arguments.command {
        Command::Train(arguments) => train::train(arguments)?,
        Command::Search(arguments) => search::search(arguments)?,
        Command::Pays(arguments) => pays::run(arguments)?,
        Command::Memory(arguments) => memory::run(arguments)?,
        Command::Chakra(arguments) => chakra::run(arguments)?,
        Command::Coherence(arguments) => coherence::run(arguments)?,
        Command::Inference(arguments) => inference::run(arguments)?,
        Command::Fabric(arguments) => fabric::run(arguments)?,
        Command::Mpi(arguments) => mpi::run(arguments)?,
        Command::Offload(arguments) => offload::run(arguments)?,
        Command::Sync(arguments) => sync::run(arguments)?,
        Command::Tier(arguments) => tier::run(arguments)?,
        Command::Validate(arguments) => validate::run(arguments)?,
        Command::Show(arguments) => show::show(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}
