//! The `polder-dev` command: proves the protocols, measures Polder beside its peers, and makes published figures again.
#![forbid(unsafe_code)]

#[macro_use(println, eprintln)]
extern crate polder_front;

mod bench;
mod held_out;
mod reproduce;
mod soak;
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use polder_attach::log::{LevelFilter, LogFilter};
use polder_attach::settings::Settings;
use polder_cli::PoolOptions;
use polder_front::Failure;
use polder_measure::ring;

/// What develops Polder: the model and its suites, kills, benchmarks, and published figures made again.
#[derive(Parser)]
#[command(name = "polder-dev", version)]
struct Cli {
    /// What to log: error, warn, info, debug, trace, or filters such as polder_pool=debug.
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<LogFilter>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Explore the protocols in a model of incoherent caches, with their mutants and canaries.
    Verify(verify::Arguments),
    /// Kill and stop processes at any memory operation, and check that the others go on.
    Soak {
        #[command(flatten)]
        pool: PoolOptions,
        #[command(flatten)]
        arguments: soak::Arguments,
    },
    /// Measure Polder beside other libraries, in one run.
    Bench(bench::Arguments),
    /// Compute a published figure again, and print it beside the paper's.
    Reproduce(reproduce::Arguments),
    /// Measure all-reduces on this machine, predict most from a few, and print the errors of those that were held out.
    HeldOut(held_out::Arguments),
    /// The other process of a measurement.
    #[command(subcommand, hide = true)]
    Second(Second),
}

#[derive(Subcommand)]
enum Second {
    Ring(ring::Second),
    Objects(bench::ObjectsSecond),
    Ranks(bench::RanksSecond),
    Enter(bench::Enter),
}

fn main() -> ExitCode {
    polder_front::main(Cli::command(), std::env::args_os(), run)
}

fn run(Cli { log, command }: Cli) -> Result<ExitCode, Failure> {
    let PoolOptions { pool, coherence, host, timeout } = match &command {
        Command::Soak { pool, .. } => pool.clone(),
        _ => PoolOptions::default(),
    };
    let is_given = pool.is_some() || coherence.is_some() || host.is_some() || timeout.is_some();
    if matches!(&command, Command::Soak { arguments, .. } if is_given && !arguments.opens_a_pool()) {
        let idle = "it makes pools of its own in /dev/shm, unless --listen or --join names another machine";
        return Err(Failure(format!("--pool, --coherence, --host and --timeout do not apply here: {idle}")));
    }
    let settings = Settings::load(Settings { pool, coherence, host, timeout, log, ..Settings::default() })?;
    // Schedules that crash on purpose leave much to be warned of.
    let usual = if matches!(command, Command::Verify(_)) { LevelFilter::ERROR } else { LevelFilter::WARN };
    settings.log.clone().unwrap_or(LogFilter::level(usual)).start();
    let done = |done: Result<(), Failure>| done.map(|()| ExitCode::SUCCESS);
    match command {
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Soak { arguments, .. } => soak::run(&arguments, &settings),
        Command::Bench(arguments) => done(bench::run(&arguments)),
        Command::Reproduce(arguments) => done(reproduce::run(&arguments)),
        Command::HeldOut(arguments) => done(held_out::run(&arguments)),
        Command::Second(Second::Ring(second)) => done(ring::second(&second)),
        Command::Second(Second::Objects(second)) => done(bench::second_of_objects(&second)),
        Command::Second(Second::Ranks(second)) => done(bench::second_of_ranks(&second)),
        Command::Second(Second::Enter(arguments)) => bench::enter(&arguments),
    }
}
