//! The `polder` command: makes and mends pools, runs programs over them, keeps services on their tiers, and plans.
//!
//! A library, because `polder-dev` measures what some of its commands do.
#![forbid(unsafe_code)]

#[macro_use(println, print, eprintln)]
extern crate polder_front;

mod agent;
mod doctor;
mod keeper;
mod kv;
mod mpi;
mod offload;
#[cfg(test)]
mod options;
mod pool;
mod probe;
mod rehearse;
mod top;
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use polder_attach::log::{LevelFilter, LogFilter};
use polder_attach::settings::{CoherenceChoice, Settings, TimeSpan, in_terms_of};
use polder_front::Failure;
use polder_measure::ring;

pub use agent::{Asked, signals};
pub use mpi::{Guard, Install, Library, Section, provider, shim};
pub use top::state_of;

#[derive(Parser)]
#[command(
    name = "polder",
    about = "One pool of shared memory for many hosts",
    after_help = "A setting is taken from the argument, else from the environment (POLDER_POOL, POLDER_COHERENCE, \
                  POLDER_HOST, POLDER_TIMEOUT, POLDER_LOG, ...), else from a config file ($POLDER_CONFIG, ./polder.toml, \
                  ~/.config/polder/config.toml, /etc/polder/config.toml)."
)]
struct Cli {
    #[command(flatten)]
    pool: PoolOptions,
    /// What to log: error, warn, info, debug, trace, or filters such as polder_pool=debug.
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<LogFilter>,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What every command that opens a pool takes, before its name or after it.
#[derive(clap::Args, Clone, Default)]
pub struct PoolOptions {
    /// The pool: a dax device such as /dev/dax0.0, or a file, best in /dev/shm.
    #[arg(long, short, global = true, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pub pool: Option<std::path::PathBuf>,
    /// How caches are kept coherent: by Polder (software), which is right on every device; by the device, with back-invalidation (hdm-db); by
    /// the one kernel that runs all hosts (coherent); or as the pool was formatted (auto).
    #[arg(long, global = true, value_name = "MODE")]
    pub coherence: Option<CoherenceChoice>,
    /// This host's id in the pool, where a command attaches it.
    #[arg(long, global = true, value_name = "ID")]
    pub host: Option<u16>,
    /// How long to wait for another process at most, such as 30s.
    #[arg(long, global = true, value_name = "TIME")]
    pub timeout: Option<TimeSpan>,
}

/// Commands that open a pool, with what they take for that.
#[derive(clap::Args)]
struct Pooled<C: Subcommand> {
    #[command(flatten)]
    pool: PoolOptions,
    #[command(subcommand)]
    command: C,
}

/// A command that opens a pool, with what it takes for that.
#[derive(clap::Args)]
struct PooledOne<A: clap::Args> {
    #[command(flatten)]
    pool: PoolOptions,
    #[command(flatten)]
    arguments: A,
}

impl PoolOptions {
    /// What is given here, and where nothing is, there.
    fn or(self, other: Self) -> Self {
        Self {
            pool: self.pool.or(other.pool),
            coherence: self.coherence.or(other.coherence),
            host: self.host.or(other.host),
            timeout: self.timeout.or(other.timeout),
        }
    }

    /// Refuses what would be passed over in silence by a command that opens no pool of the user's.
    fn expect_used(&self, command: &Command) -> Result<(), Failure> {
        if matches!(command, Command::Mpi(_)) && self.host.is_some() {
            let instead = "give hosts to ranks with --emulate, --hosts, or POLDER_HOST on each host";
            return Err(Failure(format!("--host does not apply here: {instead}")));
        }
        let idle = match command {
            Command::Probe(_) => "it makes pools of its own in /dev/shm",
            Command::Rehearse(_) => "the program opens what it needs, with the variables of its environment",
            Command::Plan(_) | Command::Agent(_) | Command::Offload(_) => "it opens no pool",
            Command::Doctor(doctor) if !doctor.arguments.opens_a_pool() => {
                "a copy of a host's files below --root has no pool"
            }
            Command::Top(top) if !top.arguments.opens_a_pool() => "only `polder top sync` opens one",
            _ => return Ok(()),
        };
        match self.pool.is_some() || self.coherence.is_some() || self.host.is_some() || self.timeout.is_some()
        {
            true => {
                Err(Failure(format!("--pool, --coherence, --host and --timeout do not apply here: {idle}")))
            }
            false => Ok(()),
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Make, inspect, clean up and remove pools.
    Pool(Pooled<pool::Command>),
    /// Show and remove caches of keys and values that serving engines share.
    Kv(Pooled<kv::Command>),
    /// Run MPI programs over a pool.
    Mpi(Pooled<mpi::Command>),
    /// Predict the time of a training step on a machine that a file describes.
    Plan(Box<polder_plan::Arguments>),
    /// Measure this machine, and write it as a file for `polder plan --platform`.
    Probe(probe::Arguments),
    /// Keep the services of this host on the memory tiers that a policy file gives them.
    #[command(subcommand)]
    Agent(agent::Command),
    /// See what a training script keeps in memory, and what would place it.
    #[command(subcommand)]
    Offload(offload::Command),
    /// Show the bytes of each service on each memory tier.
    Top(PooledOne<top::Arguments>),
    /// Say what this kernel offers to memory tiers, what is set up wrongly, and which hosts want room in the caches of a pool.
    Doctor(PooledOne<doctor::Arguments>),
    /// Hand out host ids and evict hosts, until stopped.
    Keeper(PooledOne<keeper::Arguments>),
    /// Test whether memory that two hosts share keeps Polder's rules, by litmus tests between them.
    Verify(PooledOne<verify::Arguments>),
    /// Run a program on hosts of this machine whose caches are not coherent.
    ///
    /// Each host runs the program once, with its number in POLDER_HOST, and in place of {host} in the program and its arguments. Flush
    /// instructions and non-temporal stores move lines between the host's caches and the shared file; a store that is never flushed reaches
    /// no other host.
    Rehearse(rehearse::Arguments),
    /// Print a completion script: `polder completion bash > /etc/bash_completion.d/polder`.
    Completion {
        /// The shell to complete for.
        shell: clap_complete::Shell,
    },
    /// The other process of a measurement.
    #[command(subcommand, hide = true)]
    Second(Second),
}

/// The other process of a measurement.
#[derive(Subcommand)]
enum Second {
    Ring(ring::Second),
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let run = |cli| run(cli).map_err(|failure| in_terms_of_options(&failure));
    polder_front::main(command(), mpi::with_np(std::env::args_os().collect()), run)
}

/// A failure as a user of the command can act on it.
fn in_terms_of_options(failure: &Failure) -> Failure {
    Failure(in_terms_of("--timeout or POLDER_TIMEOUT", failure))
}

/// What a bare `polder` says.
const FIRST_SCREEN: &str = "\
Polder: one pool of shared memory for many hosts, slower memory beside a host's own, and a plan of both.

share    polder mpi run -n 4 -- ./program       an MPI program over the pool, unchanged
         polder pool format --pool /dev/shm/it  a pool; Python and C programs open it
         polder kv stat --pool /dev/shm/it      caches of keys and values that serving engines share
place    polder offload check train.py          what would place a training step over DRAM, a disk or another node
         polder agent run --policy FILE         services of this host on the memory tiers of a policy
plan     polder plan train --model llama3-8b --platform dgx-h100 --gpus 8
         polder probe                           this machine, as a file for --platform
operate  polder doctor                          what this kernel offers to memory tiers
         polder top                             bytes of each service on each tier
         polder keeper --pool PATH              host ids and evictions, until stopped
         polder verify --litmus 0 --pool PATH   whether memory that two hosts share keeps the rules

polder --help lists all commands; polder COMMAND --help explains one.
";

/// The command line: what a pool takes is propagated below the commands that open one, and not below all.
fn command() -> clap::Command {
    let (version, format) = (env!("CARGO_PKG_VERSION"), polder_pool::FORMAT_VERSION);
    let version = format!("{version} (commit {}, pool format {format})", env!("POLDER_COMMIT"));
    Cli::command().version(&*version.leak()).mut_args(|argument| {
        let is_global = argument.get_id() == "log";
        argument.global(is_global)
    })
}

fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let Cli { pool: before, log, command } = cli;
    let Some(command) = command else {
        print!("{FIRST_SCREEN}");
        return Ok(ExitCode::SUCCESS);
    };
    let after = match &command {
        Command::Pool(parsed) => parsed.pool.clone(),
        Command::Kv(parsed) => parsed.pool.clone(),
        Command::Mpi(parsed) => parsed.pool.clone(),
        Command::Keeper(parsed) => parsed.pool.clone(),
        Command::Verify(parsed) => parsed.pool.clone(),
        Command::Top(parsed) => parsed.pool.clone(),
        Command::Doctor(parsed) => parsed.pool.clone(),
        _ => PoolOptions::default(),
    };
    let options = after.or(before);
    options.expect_used(&command)?;
    let PoolOptions { pool, coherence, host, timeout } = options;
    let settings = Settings::load(Settings { pool, coherence, host, timeout, log, ..Settings::default() })?;
    settings.log.clone().unwrap_or(LogFilter::level(LevelFilter::WARN)).start();
    match command {
        Command::Pool(parsed) => pool::run(parsed.command, &settings),
        Command::Kv(parsed) => kv::run(&parsed.command, &settings),
        Command::Agent(command) => agent::run(&command),
        Command::Top(parsed) => top::run(&parsed.arguments, &settings),
        Command::Doctor(parsed) => doctor::run(&parsed.arguments, &settings),
        Command::Offload(command) => offload::run(&command),
        Command::Keeper(parsed) => keeper::run(&parsed.arguments, &settings),
        Command::Mpi(parsed) => mpi::run(parsed.command, &settings),
        Command::Plan(arguments) => polder_plan::run(&arguments),
        Command::Probe(arguments) => {
            probe::run(&arguments)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Verify(parsed) => verify::run(&parsed.arguments, &settings),
        Command::Rehearse(arguments) => rehearse::run(&arguments),
        Command::Completion { shell } => {
            let mut script = vec![];
            clap_complete::generate(
                shell,
                &mut polder_plan::with_names(self::command()),
                "polder",
                &mut script,
            );
            print!("{}", String::from_utf8_lossy(&script));
            Ok(ExitCode::SUCCESS)
        }
        Command::Second(Second::Ring(second)) => ring::second(&second).map(|()| ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_option_that_waits_longer() {
        let peer = polder_pool::Peer::new(1, 7);
        let late = polder_pool::PoolError::Timeout {
            peer,
            what: "the lock of a shard",
            epoch: 1,
            sequence: 0,
            waited_ms: 3,
        };
        let said = in_terms_of_options(&late.into()).to_string();
        assert!(said.contains("raise --timeout or POLDER_TIMEOUT, or look at"), "{said}");
    }
}
