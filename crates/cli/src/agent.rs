//! `polder agent`: page tiers for the services of this host; `polder top`: what lies where.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use bytesize::ByteSize;
use clap::{Args, Subcommand, ValueHint};
use polder_agent::{Agent, Alarm, Policy, Round};
use polder_linux::{Host, Kernel, Lock, Restored, Settings as KernelSettings, drop_capabilities, show_nodes};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Carry out a policy until stopped. Settings are restored at the end; after a kill, by the next start.
    Run(RunArguments),
    /// Check a policy file, also against this machine if it has tiers.
    Check(PolicyArguments),
    /// Restore the settings that a killed agent left changed.
    Restore(JournalArguments),
    /// Print a unit for systemd; its place is /etc/systemd/system/polder-agent.service.
    Unit,
}

#[derive(Args)]
pub(crate) struct PolicyArguments {
    /// The policy: the services, by cgroup, and the tier of each.
    #[arg(long, default_value = "/etc/polder/agent.toml", value_name = "FILE", value_hint = ValueHint::FilePath)]
    policy: PathBuf,
}

#[derive(Args)]
pub(crate) struct JournalArguments {
    /// Where settings are noted before they are changed.
    #[arg(long, default_value = "/var/lib/polder/agent.journal", value_name = "FILE", value_hint = ValueHint::FilePath)]
    journal: PathBuf,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    journal: JournalArguments,
    /// Stop after this many control rounds.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    rounds: Option<u64>,
    /// Decide and print, but change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print each round as one JSON object.
    #[arg(long)]
    json: bool,
}

/// Shows the bytes of each service on each tier.
#[derive(Args)]
pub(crate) struct TopArguments {
    #[command(flatten)]
    policy: PolicyArguments,
    /// Print once, instead of every period.
    #[arg(long)]
    once: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs a command of `polder agent`.
pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Run(arguments) => carry_out(arguments),
        Command::Check(arguments) => check(arguments),
        Command::Restore(arguments) => {
            drop_capabilities()?;
            let journal = text(&arguments.journal);
            let _lock = lock(&journal)?;
            let (_, restored) = KernelSettings::start(Host::new(), &journal)?;
            if restored.is_empty() {
                println!("nothing to restore: no agent was killed with {}", arguments.journal.display());
            }
            print_restored(&restored);
            Ok(ExitCode::SUCCESS)
        }
        Command::Unit => {
            print!("{}", polder_agent::UNIT);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The right to change settings, which one process has at a time.
fn lock(journal: &str) -> Result<Lock, Failure> {
    Host::new().lock(journal)?.ok_or_else(|| {
        Failure(format!(
            "another agent runs with the journal {journal}; stop it, or name another with --journal"
        ))
    })
}

/// Runs `polder top`.
pub(crate) fn top(arguments: &TopArguments) -> Result<ExitCode, Failure> {
    let policy = load(&arguments.policy.policy)?;
    let period = policy.period;
    let stop = stop_signals()?;
    let (mut agent, _) = Agent::start(Host::new(), policy, "", true)?;
    loop {
        let round = agent.round()?;
        print_round(&round, arguments.json)?;
        if arguments.once || stop.recv_timeout(period) != Err(RecvTimeoutError::Timeout) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn carry_out(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let policy = load(&arguments.policy.policy)?;
    let period = policy.period;
    // Before the first thread is started: capabilities are of a thread.
    drop_capabilities()?;
    // Signals are caught before the first setting is changed.
    let stop = stop_signals()?;
    let journal = text(&arguments.journal.journal);
    let _lock = if arguments.dry_run { None } else { Some(lock(&journal)?) };
    let (mut agent, restored) = Agent::start(Host::new(), policy, &journal, arguments.dry_run)?;
    print_restored(&restored);
    let outcome = rounds(&mut agent, arguments, &stop, period);
    print_restored(&agent.stop()?);
    outcome.map(|()| ExitCode::SUCCESS)
}

fn rounds<K: Kernel>(
    agent: &mut Agent<K>,
    arguments: &RunArguments,
    stop: &Receiver<()>,
    period: std::time::Duration,
) -> Result<(), Failure> {
    loop {
        let round = agent.round()?;
        print_round(&round, arguments.json)?;
        let is_last = arguments.rounds.is_some_and(|rounds| round.round >= rounds);
        if is_last || stop.recv_timeout(period) != Err(RecvTimeoutError::Timeout) {
            return Ok(());
        }
    }
}

fn check(arguments: &PolicyArguments) -> Result<ExitCode, Failure> {
    let policy = load(&arguments.policy)?;
    println!("{}: {} services", arguments.policy.display(), policy.services.len());
    let (mut agent, _) = Agent::start(Host::new(), policy, "", true)?;
    let tiers = agent.tiers();
    println!("fast tier: nodes {}; slow tier: nodes {}", show_nodes(&tiers.fast), show_nodes(&tiers.slow));
    print_round(&agent.round()?, false)?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a policy. No other user may lead its path elsewhere, because the agent does what it says.
fn load(path: &Path) -> Result<Policy, Failure> {
    let text = Host::new().read_own(&std::path::absolute(path)?.to_string_lossy()).map_err(|error| {
        match error.kind() {
            Some(_) => Failure(format!("{error}; name a policy with --policy FILE")),
            None => Failure(error.to_string()),
        }
    })?;
    Policy::parse(&text).map_err(|error| Failure(format!("{}: {error}", path.display())))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A message for each signal that asks for the end.
fn stop_signals() -> Result<Receiver<()>, Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if sender.send(()).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

fn print_round(round: &Round, json: bool) -> Result<(), Failure> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, round)?;
        writeln!(out)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "round {}", round.round)?;
    writeln!(out, "  {:<20} {:>11} {:>11} {:>6} {:>11}", "service", "fast", "slow", "local", "demoted")?;
    for service in &round.services {
        let size = |bytes| ByteSize(bytes).display().iec().to_string();
        let reason = service.reason.as_deref().unwrap_or_default();
        writeln!(
            out,
            "  {:<20} {:>11} {:>11} {:>5.1}% {:>11}  {reason}",
            service.service,
            size(service.fast),
            size(service.slow),
            100.0 * service.local,
            size(service.demoted)
        )?;
    }
    for alarm in &round.alarms {
        writeln!(out, "  alarm: {}", in_words(alarm))?;
    }
    Ok(out.flush()?)
}

fn in_words(alarm: &Alarm) -> String {
    let size = |bytes: u64| ByteSize(bytes).display().iec();
    match alarm {
        Alarm::OptOutBroken { service, found, left: 0 } => {
            format!(
                "{service} is opted out and had {} on the slow tier; all of it was brought back",
                size(*found)
            )
        }
        Alarm::OptOutBroken { service, found, left } => format!(
            "{service} is opted out and had {} on the slow tier; {} are there still, such as shared pages",
            size(*found),
            size(*left)
        ),
        Alarm::NoSuchCgroup { service, cgroup } => format!("{service} has no cgroup {cgroup}"),
        Alarm::Refused { service, error } => format!("{service}: {error}"),
    }
}

fn print_restored(restored: &[Restored]) {
    for setting in restored {
        match setting {
            Restored::AsFound { path, value } => println!("restored {path} to {value:?}"),
            Restored::InEffect { path, value, found } => {
                println!(
                    "restored {path} to {value:?}, which does the same as {found:?}, which the kernel refuses now"
                );
            }
            Restored::Gone { path } => println!("{path} is gone, and was not restored"),
        }
    }
}
