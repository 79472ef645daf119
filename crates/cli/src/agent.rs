//! `polder agent`: page tiers for the services of this host.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::SystemTime;

use bytesize::ByteSize;
use clap::{Args, Subcommand, ValueHint};
use polder_agent::{Agent, DeviceHealth, Metrics, Policy, RecordedRound, Round, ServiceRound, State, replay};
use polder_linux::{Host, Kernel, Lock, Restored, Settings as KernelSettings, drop_capabilities, show_nodes};
use polder_platform::recorded_text_of;
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};
use signal_hook::iterator::Signals;

use crate::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Carry out a policy until stopped. Settings are restored at the end; after a kill, by the next start.
    Run(Box<RunArguments>),
    /// Check a policy file, also against this machine if it has tiers.
    Check(PolicyArguments),
    /// Say why a service is as it is, since when, and by which line of the policy.
    Explain(ExplainArguments),
    /// Decide the rounds of a record anew, and compare.
    Replay {
        /// What `polder agent run --record` wrote.
        #[arg(value_hint = ValueHint::FilePath)]
        record: PathBuf,
    },
    /// Restore the settings that a killed agent left changed.
    Restore(JournalArguments),
    /// Print a unit for systemd; its place is /etc/systemd/system/polder-agent.service.
    Unit,
    /// Print a dashboard for Grafana.
    Dashboard,
    /// Print a policy and a DaemonSet for Kubernetes: `polder agent daemonset | kubectl apply -f -`.
    Daemonset,
}

#[derive(Args)]
pub(crate) struct PolicyArguments {
    /// The policy: the services, by cgroup or unit, and the tier of each.
    #[arg(long, default_value = "/etc/polder/agent.toml", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) policy: PathBuf,
}

#[derive(Args)]
pub(crate) struct JournalArguments {
    /// Where settings are noted before they are changed.
    #[arg(long, default_value = "/var/lib/polder/agent.journal", value_name = "FILE", value_hint = ValueHint::FilePath)]
    journal: PathBuf,
}

#[derive(Args)]
pub(crate) struct StateArguments {
    /// Where the running agent says what it sees.
    #[arg(long, default_value = "/run/polder/agent.state", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) state: PathBuf,
}

#[derive(Args)]
pub(crate) struct ExplainArguments {
    /// The service, as the policy names it.
    service: String,
    #[command(flatten)]
    state: StateArguments,
}

#[derive(Args)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    journal: JournalArguments,
    #[command(flatten)]
    state: StateArguments,
    /// Add what each round saw and decided to this file, for `polder agent replay`.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    record: Option<PathBuf>,
    /// Answer Prometheus at this address of this machine alone, such as 127.0.0.1:9586; port 0 takes any.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Stop after this many control rounds.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    rounds: Option<u64>,
    /// Decide and print, but change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print each round as one JSON object, in place of what changes.
    #[arg(long)]
    json: bool,
    /// Work on a copy of /proc and /sys below this folder.
    #[arg(long, default_value = "/", value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    root: PathBuf,
}

/// Runs a command of `polder agent`.
pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Run(arguments) => carry_out(arguments),
        Command::Check(arguments) => check(arguments),
        Command::Explain(arguments) => explain(arguments),
        Command::Replay { record } => decide_anew(record),
        Command::Restore(arguments) => {
            drop_capabilities()?;
            let (host, journal) = (Host::new(), text(&arguments.journal)?);
            let _lock = lock(&host, &journal, "journal")?;
            let (_, restored) = KernelSettings::start(host, &journal)?;
            if restored.is_empty() {
                println!("nothing to restore: no agent was killed with {journal}");
            }
            print_restored(&restored);
            Ok(ExitCode::SUCCESS)
        }
        Command::Unit => {
            print!("{}", polder_agent::UNIT);
            Ok(ExitCode::SUCCESS)
        }
        Command::Dashboard => {
            print!("{}", polder_agent::DASHBOARD);
            Ok(ExitCode::SUCCESS)
        }
        Command::Daemonset => {
            print!("{}", polder_agent::DAEMONSET);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The files below `root`; where they are this machine's own, pages of its processes can be moved too.
pub(crate) fn host(root: &Path) -> Host {
    match root == Path::new("/") {
        true => Host::new().moving_pages_by(polder_mem::move_pages),
        false => Host::below(root),
    }
}

/// The right to write a journal or a state, which one process has at a time.
fn lock(host: &Host, path: &str, what: &str) -> Result<Lock, Failure> {
    host.lock(path)?.ok_or_else(|| {
        Failure(format!("another agent runs with the {what} {path}; stop it, or name another with --{what}"))
    })
}

/// What a signal asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Stop,
    Reload,
}

fn carry_out(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let path = std::path::absolute(&arguments.policy.policy)?;
    let mut watched = Watched::new(&path);
    let policy = load(&path)?;
    // Before the first thread is started: capabilities are of a thread.
    drop_capabilities()?;
    // Signals are caught before the first setting is changed.
    let asked = signals()?;
    // A reader that went away is an error of the next write, and not this process's end.
    let _caught = Signals::new([SIGPIPE])?;
    let metrics = arguments.listen.map(serve).transpose()?;
    let (host, journal) = (host(&arguments.root), text(&arguments.journal.journal)?);
    let state = text(&arguments.state.state)?;
    // Also of the state: two agents with a journal each would take each other's settings for what was found.
    let _locks = match arguments.dry_run {
        true => None,
        false => Some((lock(&host, &journal, "journal")?, lock(&host, &state, "state")?)),
    };
    let (agent, restored) = Agent::start(host.clone(), policy, &journal, arguments.dry_run)?;
    let mut running = Running(agent);
    print_restored(&restored);
    let mut out = Output { arguments, host, path, metrics, shown: BTreeMap::new() };
    let outcome = rounds(&mut running.0, &mut out, &asked, &mut watched);
    let restored = running.0.stop()?;
    // First why it ended: what it restored may find no reader either.
    outcome?;
    print_restored(&restored);
    Ok(ExitCode::SUCCESS)
}

/// Restores settings also where what is printed cannot be written, which unwinds.
struct Running(Agent<Host>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.0.stop() {
            eprintln!("polder: {error}; polder agent restore tries again");
        }
    }
}

fn rounds<K: Kernel>(
    agent: &mut Agent<K>,
    out: &mut Output<'_>,
    asked: &Receiver<Asked>,
    watched: &mut Watched,
) -> Result<(), Failure> {
    loop {
        let (round, recorded) = agent.round(now_ms())?;
        out.take(agent, &round, &recorded)?;
        if out.arguments.rounds.is_some_and(|rounds| round.round >= rounds) {
            return Ok(());
        }
        let reloads = match asked.recv_timeout(agent.policy().period) {
            Ok(Asked::Reload) => true,
            Ok(Asked::Stop) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => watched.has_changed(),
        };
        if reloads {
            reload(agent, &watched.path);
        }
    }
}

/// Takes over the policy file as it is now. With a mistake in it the policy before goes on.
fn reload<K: Kernel>(agent: &mut Agent<K>, path: &Path) {
    match load(path) {
        Ok(policy) => {
            if let Err(error) = agent.change(policy) {
                eprintln!("polder: {error}; the next round goes on with what could be set");
            }
        }
        Err(error) => eprintln!("polder: {error}; the policy before goes on"),
    }
}

/// A file that may change.
struct Watched {
    path: PathBuf,
    seen: Option<(u64, i64, i64, u64)>,
}

impl Watched {
    fn new(path: &Path) -> Self {
        let mut watched = Self { path: path.to_owned(), seen: None };
        watched.has_changed();
        watched
    }

    /// Whether it is another than at the last call. A file that is away counts as unchanged: an editor may be replacing it.
    fn has_changed(&mut self) -> bool {
        let Ok(now) = std::fs::metadata(&self.path) else { return false };
        let now = Some((now.ino(), now.mtime(), now.mtime_nsec(), now.len()));
        std::mem::replace(&mut self.seen, now) != now
    }
}

/// Where rounds go.
struct Output<'a> {
    arguments: &'a RunArguments,
    host: Host,
    path: PathBuf,
    metrics: Option<Arc<Metrics>>,
    /// What was last printed of each service, and of each alarm.
    shown: BTreeMap<String, String>,
}

impl Output<'_> {
    fn take<K: Kernel>(
        &mut self,
        agent: &Agent<K>,
        round: &Round,
        recorded: &RecordedRound,
    ) -> Result<(), Failure> {
        if let Some(metrics) = &self.metrics {
            metrics.observe(round);
        }
        if !self.arguments.dry_run {
            let state = State {
                policy: text(&self.path)?,
                fast_nodes: show_nodes(&agent.tiers().fast),
                slow_nodes: show_nodes(&agent.tiers().slow),
                round: round.clone(),
                causes: agent.causes(),
            };
            self.host.publish(&text(&self.arguments.state.state)?, &serde_json::to_string(&state)?)?;
        }
        if let Some(record) = &self.arguments.record {
            self.host.record(&text(record)?, &serde_json::to_string(recorded)?)?;
        }
        match self.arguments.json {
            true => print_json(round),
            false => self.print_changes(round),
        }
    }

    /// A line for each service that is now as it is for another reason, and for each new alarm.
    fn print_changes(&mut self, round: &Round) -> Result<(), Failure> {
        let mut lines = BTreeMap::new();
        for row in &round.services {
            lines.insert(row.service.clone(), row.cause.what.clone());
        }
        for alarm in &round.alarms {
            lines.insert(
                format!("alarm {} {}", alarm.kind(), alarm.service().unwrap_or("")),
                format!("alarm: {alarm}"),
            );
        }
        let mut out = std::io::stdout().lock();
        for (key, line) in lines.iter().filter(|(key, line)| self.shown.get(*key) != Some(*line)) {
            match round.services.iter().find(|row| row.service == *key) {
                Some(row) => {
                    writeln!(out, "round {}: {key}: {line} ({:.1}% local)", round.round, 100.0 * row.local)?
                }
                None => writeln!(out, "round {}: {line}", round.round)?,
            }
        }
        self.shown = lines;
        Ok(out.flush()?)
    }
}

/// Answers Prometheus, in a thread that ends with the process.
fn serve(address: SocketAddr) -> Result<Arc<Metrics>, Failure> {
    if !address.ip().is_loopback() {
        return Err(Failure(format!(
            "--listen {address} is reached from other machines; give an address such as 127.0.0.1:{}, and a proxy that \
             asks for a password",
            address.port()
        )));
    }
    let server =
        tiny_http::Server::http(address).map_err(|error| Failure(format!("--listen {address}: {error}")))?;
    eprintln!("polder: metrics at http://{}/metrics", server.server_addr());
    let metrics = Arc::new(Metrics::new());
    let shared = Arc::clone(&metrics);
    std::thread::spawn(move || {
        let header = |value: &str| {
            tiny_http::Header::from_bytes(b"Content-Type", value.as_bytes()).expect("it is ASCII")
        };
        for request in server.incoming_requests() {
            let is_asked = *request.method() == tiny_http::Method::Get && request.url() == "/metrics";
            let answer = match is_asked {
                true => tiny_http::Response::from_string(shared.text())
                    .with_header(header("application/openmetrics-text; version=1.0.0; charset=utf-8")),
                false => {
                    tiny_http::Response::from_string("the metrics are at /metrics\n").with_status_code(404)
                }
            };
            // A client that went away is no error of ours.
            drop(request.respond(answer));
        }
    });
    Ok(metrics)
}

fn check(arguments: &PolicyArguments) -> Result<ExitCode, Failure> {
    let policy = load(&arguments.policy)?;
    println!("{}: {} services", arguments.policy.display(), policy.services.len());
    let (mut agent, _) = Agent::start(host(Path::new("/")), policy, "", true)?;
    let tiers = agent.tiers();
    println!("fast tier: nodes {}; slow tier: nodes {}", show_nodes(&tiers.fast), show_nodes(&tiers.slow));
    print_table(&agent.round(now_ms())?.0)?;
    Ok(ExitCode::SUCCESS)
}

fn explain(arguments: &ExplainArguments) -> Result<ExitCode, Failure> {
    let state = read_state(&arguments.state.state)?;
    let Some(answer) = state.explain(&arguments.service) else {
        let known: Vec<&str> = state.causes.keys().map(String::as_str).collect();
        let (service, policy) = (&arguments.service, &state.policy);
        return Err(Failure(format!("{policy} has no service {service:?}; it has {}", known.join(", "))));
    };
    print!("{answer}");
    if !is_fresh(&state) {
        println!("  no agent has written since; it may have stopped");
    }
    Ok(ExitCode::SUCCESS)
}

/// What the running agent last said.
pub(crate) fn read_state(path: &Path) -> Result<State, Failure> {
    let path = text(path)?;
    let said = Host::new().read_own(&path).map_err(|error| {
        Failure(format!(
            "{error}; start an agent with: polder agent run, or name its state with --state FILE"
        ))
    })?;
    serde_json::from_str(&said).map_err(|error| Failure(format!("{path}: {error}")))
}

/// Whether a state is of an agent that runs.
pub(crate) fn is_fresh(state: &State) -> bool {
    const LONGEST_PERIOD_MS: u64 = 10_000;
    now_ms().saturating_sub(state.round.time_ms) < LONGEST_PERIOD_MS
}

fn decide_anew(record: &Path) -> Result<ExitCode, Failure> {
    let advised = |error: &dyn std::fmt::Display| {
        Failure(format!("{error}; make one with: polder agent run --record FILE"))
    };
    let text = recorded_text_of(&record.to_string_lossy()).map_err(|error| advised(&error))?;
    let rounds = text.lines().map(serde_json::from_str).collect::<Result<Vec<RecordedRound>, _>>();
    let rounds = rounds.map_err(|error| advised(&format_args!("{}: {error}", record.display())))?;
    let (moves, otherwise) = replay(&rounds);
    match otherwise {
        None => {
            println!("{} rounds with {moves} moves: decided as recorded", rounds.len());
            Ok(ExitCode::SUCCESS)
        }
        Some((round, decision)) => {
            println!("round {round} is decided otherwise: {}", serde_json::to_string(&decision)?);
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Reads a policy. No other user may lead its path elsewhere, because the agent does what it says.
pub(crate) fn load(path: &Path) -> Result<Policy, Failure> {
    let named = text(path)?;
    let read = Host::new().read_own(&named).map_err(|error| match error.kind() {
        Some(_) => Failure(format!("{error}; name a policy with --policy FILE")),
        None => Failure(error.to_string()),
    })?;
    Policy::parse(&read).map_err(|error| Failure(format!("{}: {error}", path.display())))
}

/// A path from the root.
fn text(path: &Path) -> Result<String, Failure> {
    Ok(std::path::absolute(path)?.to_string_lossy().into_owned())
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// A message for each signal that asks for something.
pub(crate) fn signals() -> Result<Receiver<Asked>, Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let asked = if signal == SIGHUP { Asked::Reload } else { Asked::Stop };
            if sender.send(asked).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

pub(crate) fn print_json(round: &Round) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, round)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

pub(crate) fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// What a CXL memory device reported.
pub(crate) fn device_line(device: &DeviceHealth) -> String {
    let DeviceHealth { device, bad_places, events, said } = device;
    let said = if said.is_empty() { "sound".to_owned() } else { said.join("; ") };
    format!("{device}: {said}, {bad_places} bad places, {events} events")
}

/// The health of a service: bad places and faults of CXL memory that hit it, where these are watched.
pub(crate) fn health(round: &Round, row: &ServiceRound) -> String {
    match (round.devices.is_empty(), row.bad_memory) {
        (true, _) => "-".to_owned(),
        (false, 0) => "sound".to_owned(),
        (false, count) => format!("{count} bad"),
    }
}

pub(crate) fn print_table(round: &Round) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "round {}: fast tier {} free of {}; slow tier {} free of {}",
        round.round,
        size(round.fast.free),
        size(round.fast.bytes),
        size(round.slow.free),
        size(round.slow.bytes)
    )?;
    for device in &round.devices {
        writeln!(out, "  {}", device_line(device))?;
    }
    writeln!(
        out,
        "  {:<20} {:>11} {:>11} {:>6} {:>11} {:>7}  why",
        "service", "fast", "slow", "local", "demoted", "health"
    )?;
    for row in &round.services {
        writeln!(
            out,
            "  {:<20} {:>11} {:>11} {:>5.1}% {:>11} {:>7}  {}",
            row.service,
            size(row.fast),
            size(row.slow),
            100.0 * row.local,
            size(row.demoted),
            health(round, row),
            row.cause.what
        )?;
    }
    for alarm in &round.alarms {
        writeln!(out, "  alarm: {alarm}")?;
    }
    Ok(out.flush()?)
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
            Restored::Removed { path } => println!("removed {path}, which was made"),
            Restored::Gone { path } => println!("{path} is gone, and was not restored"),
        }
    }
}
