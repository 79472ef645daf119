//! The `polder` command: makes and mends pools, proves the protocols, and measures them beside their peers.
#![forbid(unsafe_code)]

mod bench;
mod keeper;
mod mpi;
mod plan;
mod pool;
mod probe;
mod scratch;
mod soak;
mod verify;

use std::fmt;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use polder_pool::settings::{CoherenceChoice, Settings, Span};
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
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// What every command that opens a pool takes.
#[derive(clap::Args, Clone)]
struct Common {
    /// The pool: a dax device such as /dev/dax0.0, or a file, best in /dev/shm.
    #[arg(long, short, global = true, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    pool: Option<std::path::PathBuf>,
    /// Who keeps caches in step: auto, coherent or software.
    #[arg(long, global = true, value_name = "WHO")]
    coherence: Option<CoherenceChoice>,
    /// This host's id in the pool.
    #[arg(long, global = true, value_name = "ID")]
    host: Option<u16>,
    /// How long to wait for another process, such as 30s.
    #[arg(long, global = true, value_name = "TIME")]
    timeout: Option<Span>,
    /// What to log: error, warn, info, debug, trace, or filters such as polder_pool=debug.
    #[arg(long, global = true, value_name = "FILTER")]
    log: Option<String>,
}

impl Common {
    /// Refuses what would be passed over in silence by a command that opens no pool of the user's.
    fn expect_used(&self, command: &Command) -> Result<(), Failure> {
        if matches!(command, Command::Mpi(_)) && self.host.is_some() {
            let instead =
                "which host a rank is on is said by --emulate, --hosts, or POLDER_HOST on each host";
            return Err(Failure(format!("--host does not apply here: {instead}")));
        }
        let idle = match command {
            Command::Soak(_) | Command::Bench(_) | Command::Probe(_) => {
                "it makes pools of its own in /dev/shm"
            }
            Command::Plan(_) => "it opens no pool",
            Command::Verify(arguments) if !arguments.opens_a_pool() => "only --litmus opens one",
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
    /// Make, look into, mend and remove pools.
    #[command(subcommand)]
    Pool(pool::Command),
    /// Run programs of an MPI library over a pool.
    #[command(subcommand)]
    Mpi(mpi::Command),
    /// Predict what a training step takes on a machine that is described in a file.
    #[command(subcommand)]
    Plan(Box<plan::Command>),
    /// Measure this machine, and write it as a file that `polder plan verify` predicts from.
    Probe(probe::Arguments),
    /// Say who is a member: hands out host ids and evicts hosts, until stopped.
    Keeper(keeper::Arguments),
    /// Explore the protocols in the incoherent model, or run its litmus tests between two hosts.
    Verify(verify::Arguments),
    /// Kill and stop processes at any memory operation, and see that the others go on.
    Soak(soak::Arguments),
    /// Measure Polder and its peers in turn, in one run.
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
        f.write_str(&self.0)
    }
}

fn main() -> ExitCode {
    // `polder ... | head` ends quietly.
    sigpipe::reset();
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("polder: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode, Failure> {
    cli.common.expect_used(&cli.command)?;
    let Common { pool, coherence, host, timeout, log } = cli.common;
    let settings = Settings::load(Settings { pool, coherence, host, timeout, log, ..Settings::default() })?;
    // Schedules that crash on purpose leave much to be warned of.
    let usual = if matches!(cli.command, Command::Verify(_)) { "error" } else { "warn" };
    start_logging(settings.log.as_deref().unwrap_or(usual))?;
    match cli.command {
        Command::Pool(command) => pool::run(command, &settings),
        Command::Keeper(arguments) => keeper::run(&arguments, &settings),
        Command::Mpi(command) => mpi::run(command, &settings),
        Command::Plan(command) => plan::run(&command),
        Command::Probe(arguments) => {
            probe::run(&arguments)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Verify(arguments) => verify::run(&arguments, &settings),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "polder", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn start_logging(filter: &str) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Failure(format!("{filter:?} is no log filter ({error}); write a level, or polder_pool=debug"))
    })?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    Ok(())
}
