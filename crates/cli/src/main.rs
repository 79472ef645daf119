//! The `polder` command: makes and mends pools, proves the protocols, and measures them beside their peers.
#![forbid(unsafe_code)]

/// As the standard macro, which panics where stdout cannot be written to.
macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($words:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($words)*))) };
}

/// As [`println`], without the end of the line.
macro_rules! print {
    ($($words:tt)*) => { $crate::output::print(format_args!($($words)*)) };
}

/// As the standard macro, which panics where stderr cannot be written to.
macro_rules! eprintln {
    ($($words:tt)*) => { $crate::output::complain(format_args!("{}\n", format_args!($($words)*))) };
}

mod agent;
mod bench;
mod doctor;
mod keeper;
mod mpi;
mod offload;
mod output;
mod plan;
mod pool;
mod probe;
mod scratch;
mod soak;
mod top;
mod verify;

use std::fmt;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use polder_attach::settings::{CoherenceChoice, Settings, TimeSpan};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(
    name = "polder",
    version,
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
    log: Option<String>,
    #[command(subcommand)]
    command: Command,
}

/// What every command that opens a pool takes, before its name or after it.
#[derive(clap::Args, Clone, Default)]
struct PoolOptions {
    /// The pool: a dax device such as /dev/dax0.0, or a file, best in /dev/shm.
    #[arg(long, short, global = true, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pool: Option<std::path::PathBuf>,
    /// How caches are kept coherent: by the hardware (coherent), by Polder (software), or as the pool was formatted (auto).
    #[arg(long, global = true, value_name = "MODE")]
    coherence: Option<CoherenceChoice>,
    /// This host's id in the pool.
    #[arg(long, global = true, value_name = "ID")]
    host: Option<u16>,
    /// How long to wait for another process at most, such as 30s.
    #[arg(long, global = true, value_name = "TIME")]
    timeout: Option<TimeSpan>,
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
            Command::Bench(_) | Command::Probe(_) => "it makes pools of its own in /dev/shm",
            Command::Soak(soak) if !soak.arguments.opens_a_pool() => {
                "it makes pools of its own in /dev/shm, unless --listen or --join names another machine"
            }
            Command::Plan(_) | Command::Agent(_) | Command::Doctor(_) | Command::Offload(_) => {
                "it opens no pool"
            }
            Command::Top(top) if !top.arguments.opens_a_pool() => "only `polder top sync` opens one",
            Command::Verify(verify) if !verify.arguments.opens_a_pool() => "only --litmus opens one",
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
    /// Run MPI programs over a pool.
    Mpi(Pooled<mpi::Command>),
    /// Predict the time of a training step on a machine that a file describes.
    #[command(subcommand)]
    Plan(Box<plan::Command>),
    /// Measure this machine, and write the file that `polder plan verify` needs.
    Probe(probe::Arguments),
    /// Keep the services of this host on the memory tiers that a policy file gives them.
    #[command(subcommand)]
    Agent(agent::Command),
    /// See what a training script keeps in memory, and what would place it.
    #[command(subcommand)]
    Offload(offload::Command),
    /// Show the bytes of each service on each memory tier.
    Top(PooledOne<top::Arguments>),
    /// Say what this kernel offers to memory tiers, and what is set up wrongly.
    Doctor(doctor::Arguments),
    /// Hand out host ids and evict hosts, until stopped.
    Keeper(PooledOne<keeper::Arguments>),
    /// Test the protocols in a model of incoherent caches, or test real memory between two hosts (--litmus).
    Verify(PooledOne<verify::Arguments>),
    /// Kill and stop processes at any memory operation, and check that the others go on.
    Soak(PooledOne<soak::Arguments>),
    /// Measure Polder beside other libraries, in one run.
    Bench(bench::Arguments),
    /// Print a completion script: `polder completion bash > /etc/bash_completion.d/polder`.
    Completion {
        /// The shell to complete for.
        shell: clap_complete::Shell,
    },
}

/// Why a command failed: one line, for people.
#[derive(Debug)]
struct Failure(String);

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names of files may hold what a terminal takes as a command.
        for (index, line) in self.0.split('\n').enumerate() {
            let end = if index > 0 { "\n" } else { "" };
            write!(f, "{end}{}", polder_platform::printable(line))?;
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    // `polder ... | head` ends quietly.
    sigpipe::reset();
    let parsed = command()
        .try_get_matches_from(mpi::with_np(std::env::args_os().collect()))
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let ended = output::caught(|| match parsed {
        Ok(cli) => run(cli),
        // Help as well.
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
            match error.print() {
                Err(failed) if !error.use_stderr() => Err(output::unwritten(&failed)),
                _ => Ok(code),
            }
        }
    });
    match ended {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("polder: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// The command line: what a pool takes is propagated below the commands that open one, and not below all.
fn command() -> clap::Command {
    Cli::command().mut_args(|argument| {
        let is_global = argument.get_id() == "log";
        argument.global(is_global)
    })
}

fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let Cli { pool: before, log, command } = cli;
    let after = match &command {
        Command::Pool(it) => it.pool.clone(),
        Command::Mpi(it) => it.pool.clone(),
        Command::Keeper(it) => it.pool.clone(),
        Command::Verify(it) => it.pool.clone(),
        Command::Soak(it) => it.pool.clone(),
        Command::Top(it) => it.pool.clone(),
        _ => PoolOptions::default(),
    };
    let options = after.or(before);
    options.expect_used(&command)?;
    let PoolOptions { pool, coherence, host, timeout } = options;
    let settings = Settings::load(Settings { pool, coherence, host, timeout, log, ..Settings::default() })?;
    // Schedules that crash on purpose leave much to be warned of.
    let usual = if matches!(command, Command::Verify(_)) { "error" } else { "warn" };
    start_logging(settings.log.as_deref().unwrap_or(usual))?;
    match command {
        Command::Pool(it) => pool::run(it.command, &settings),
        Command::Agent(command) => agent::run(&command),
        Command::Top(it) => top::run(&it.arguments, &settings),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Offload(command) => offload::run(&command),
        Command::Keeper(it) => keeper::run(&it.arguments, &settings),
        Command::Mpi(it) => mpi::run(it.command, &settings),
        Command::Plan(command) => plan::run(&command),
        Command::Probe(arguments) => {
            probe::run(&arguments)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Verify(it) => verify::run(&it.arguments, &settings),
        Command::Soak(it) => soak::run(&it.arguments, &settings),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Completion { shell } => {
            let mut script = vec![];
            clap_complete::generate(shell, &mut self::command(), "polder", &mut script);
            print!("{}", String::from_utf8_lossy(&script));
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn start_logging(filter: &str) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Failure(format!("{filter:?} is no log filter ({error}); write a level, or polder_pool=debug"))
    })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    logs.with_ansi(polder_attach::settings::is_colour_wanted()).init();
    Ok(())
}
