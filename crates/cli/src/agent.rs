//! `polder agent`: page tiers for the services of this host.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use bytesize::ByteSize;
use clap::{Args, Subcommand, ValueHint};
use polder_agent::{
    Agent, Alarm, DeviceHealth, FairShare, Link, Metrics, Past, Policy, RecordedRound, Round, ServiceRound,
    State, Text, contradictions, forecast, listen, read_record, replay, write_example,
};
use polder_front::{Teller, unwritten};
use polder_linux::doctor::{Interface, examine};
use polder_linux::{
    Host, Kernel, KernelError, Lock, Restored, Settings as KernelSettings, Tiers, drop_capabilities,
    show_nodes,
};
use polder_platform::{recorded_text_of, shell_word};
use ratatui::crossterm::terminal;
use ratatui::text::Span;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Carry out a policy until stopped. Settings are restored at the end; after a kill, by the next start.
    Run(Box<RunArguments>),
    /// Check a policy file, and show what it would do on this machine if that has tiers.
    Check(CheckArguments),
    /// Say why a service is as it is, since when, and by which line of the policy.
    Explain(ExplainArguments),
    /// Decide the rounds of a record again, and compare.
    Replay {
        /// What `polder agent run --record` wrote.
        #[arg(value_hint = ValueHint::FilePath)]
        record: PathBuf,
    },
    /// Restore the settings that a killed agent left changed.
    Restore {
        #[command(flatten)]
        journal: JournalArguments,
        /// Restore those of a copy of /proc and /sys below this folder, where the journal lies too.
        #[arg(long, default_value = "/", value_name = "FOLDER", value_hint = ValueHint::DirPath, value_parser = copy_of_files)]
        root: PathBuf,
    },
    /// Write a made-up host with three services, and a policy for it: --root FOLDER tries the agent there.
    Example {
        /// A folder that is not there, or is empty.
        #[arg(value_hint = ValueHint::DirPath)]
        folder: PathBuf,
    },
    /// Print a unit for systemd; its place is /etc/systemd/system/polder-agent.service.
    Unit,
    /// Print a dashboard for Grafana.
    Dashboard,
    /// Print a policy and a DaemonSet for Kubernetes: `polder agent daemonset | kubectl apply -f -`.
    Daemonset,
}

/// Where the policy is if nothing else is said.
pub(crate) const POLICY: &str = "/etc/polder/agent.toml";

#[derive(Args)]
pub(crate) struct PolicyArguments {
    /// The policy: the services, by cgroup or unit, and the tier of each.
    #[arg(long, default_value = POLICY, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) policy: PathBuf,
}

#[derive(Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    policy: PolicyArguments,
    /// Check it against a copy of /proc and /sys below this folder.
    #[arg(long, default_value = "/", value_name = "FOLDER", value_hint = ValueHint::DirPath, value_parser = copy_of_files)]
    root: PathBuf,
}

/// Where an agent has its journal if nothing else is said.
pub(crate) const JOURNAL: &str = "/var/lib/polder/agent.journal";

#[derive(Args)]
pub(crate) struct JournalArguments {
    /// Where settings are noted before they are changed.
    #[arg(long, default_value = JOURNAL, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) journal: PathBuf,
}

/// Where an agent says what it sees if nothing else is said.
pub(crate) const STATE: &str = "/run/polder/agent.state";

#[derive(Args)]
pub(crate) struct StateArguments {
    /// Where the running agent says what it sees.
    #[arg(long, default_value = STATE, value_name = "FILE", value_hint = ValueHint::FilePath)]
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
    /// Decide, and print what would be written, but write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print each round as one JSON object, in place of what changes.
    #[arg(long)]
    json: bool,
    /// Work on a copy of /proc and /sys below this folder.
    #[arg(long, default_value = "/", value_name = "FOLDER", value_hint = ValueHint::DirPath, value_parser = copy_of_files)]
    root: PathBuf,
}

/// Runs a command of `polder agent`.
pub(crate) fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Run(arguments) => carry_out(arguments),
        Command::Check(arguments) => check(arguments),
        Command::Explain(arguments) => explain(arguments),
        Command::Replay { record } => decide_anew(record),
        Command::Restore { journal: JournalArguments { journal: path }, root } => {
            drop_capabilities()?;
            let (host, journal) = (Host::below(root), text(path)?);
            let nothing = format!("nothing to restore: no agent was killed with {journal}");
            // An agent that fails before it has a journal is followed by this too.
            if path == Path::new(JOURNAL) && !host.had(&journal) {
                println!("{nothing}");
                return Ok(ExitCode::SUCCESS);
            }
            let _lock = held(host.lock_again(&journal).map_err(for_root)?, &journal)?;
            let _all = host.lock_to_restore().map_err(for_root)?;
            let (_, restored) = KernelSettings::start(host, &journal).map_err(for_root)?;
            if restored.is_empty() {
                println!("{nothing}");
            }
            print!("{}", restored_lines(&restored));
            Ok(ExitCode::SUCCESS)
        }
        Command::Example { folder } => {
            let wrong = |error: std::io::Error| Failure(format!("{}: {error}", folder.display()));
            write_example(folder).map_err(wrong)?;
            let word = |path: &Path| shell_word(&path.to_string_lossy());
            let (policy, folder) = (word(&folder.join("policy.toml")), word(folder));
            println!(
                "a host of 64 + 128 GiB with three services, and policy.toml; nothing moves there. Try:"
            );
            for command in ["agent check", "agent run --dry-run --rounds 2", "top --once"] {
                println!("  polder {command} --root {folder} --policy {policy}");
            }
            println!("  polder doctor --root {folder}");
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

/// A folder with a copy of a kernel's files, or `/`.
pub(crate) fn copy_of_files(text: &str) -> Result<PathBuf, String> {
    let root = PathBuf::from(text);
    match root.join("proc").is_dir() && root.join("sys").is_dir() {
        true => Ok(root),
        false => Err("the folder has no copy of /proc and /sys".to_owned()),
    }
}

/// The files below `root`; where they are this machine's own, pages of its processes can be moved too.
pub(crate) fn host(root: &Path) -> Host {
    match root == Path::new("/") {
        true => Host::new().moving_pages_by(polder_offload::move_pages),
        false => Host::below(root),
    }
}

/// The right to write a journal, which one process has at a time.
fn held(lock: Option<Lock>, journal: &str) -> Result<Lock, Failure> {
    lock.ok_or_else(|| {
        Failure(format!(
            "another agent runs with the journal {journal}; stop it, or name another with --journal"
        ))
    })
}

/// Why a process may not be an agent, with what to do where it has no right.
fn for_root(error: KernelError) -> Failure {
    match error.kind() {
        Some(ErrorKind::PermissionDenied) => Failure(format!(
            "{error}; settings of a host are root's: run this as root (polder agent run --dry-run changes none)"
        )),
        _ => error.into(),
    }
}

/// What a signal asks for, or a reader that went away.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// To end.
    Stop,
    /// To read the policy again.
    Reload,
    /// To end because nobody can read what is printed.
    Unread,
}

fn carry_out(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let path = std::path::absolute(&arguments.policy.policy)?;
    let mut watched = Watched::new(&path);
    let policy = load_aloud(&path)?;
    // Before the first thread is started: capabilities are of a thread.
    drop_capabilities()?;
    // Signals are caught before the first setting is changed.
    let (sender, asked) = channel();
    tell_signals(sender.clone())?;
    // A reader that went away is an error, and not this process's end.
    let _caught = Signals::new([SIGPIPE])?;
    tell_unread(sender)?;
    let (host, journal) = (host(&arguments.root), text(&arguments.journal.journal)?);
    // Also of the host: a second agent would move as much again, and take what this one sets for what was found.
    let _locks = match arguments.dry_run {
        true => None,
        false => {
            let all = host.lock_all(&journal).map_err(for_root)?;
            Some((all, held(host.lock(&journal).map_err(for_root)?, &journal)?))
        }
    };
    let metrics = arguments.listen.map(|address| {
        let metrics = Arc::new(Metrics::new());
        let told = Arc::clone(&metrics);
        serve(address, Box::new(move || told.text())).map(|()| metrics)
    });
    let metrics = metrics.transpose()?;
    let record = match &arguments.record {
        Some(record) => Some(Record::of(&host, text(record)?)?),
        None => None,
    };
    let reserve = (0..RESERVE).map(|_| File::open("/dev/null")).collect::<Result<_, _>>()?;
    let (agent, restored) = Agent::start(host.clone(), policy, &journal, arguments.dry_run)?;
    let mut running = Running { agent, reserve };
    let mut out = Output {
        arguments,
        host,
        path,
        metrics,
        state: Written::new("the state", text(&arguments.state.state)?),
        record,
        warned: None,
        shown: BTreeMap::new(),
        unsaid: restored_lines(&restored),
        stdout: Teller::start(File::from(std::io::stdout().as_fd().try_clone_to_owned()?))?,
        stderr: Teller::start(File::from(std::io::stderr().as_fd().try_clone_to_owned()?))?,
    };
    if arguments.dry_run && !arguments.json {
        out.unsaid += "dry run: no setting is written; this is what a first round would do\n";
        for line in share_lines(running.agent.policy(), &arguments.root)? {
            out.unsaid += &(line + "\n");
        }
    }
    let outcome = rounds(&mut running.agent, &mut out, &asked, &mut watched);
    let restored = running.stop()?;
    if outcome.is_ok() {
        out.stdout.say(restored_lines(&restored))?;
    }
    drop(out.stderr.end(GRACE));
    let ended = out.stdout.end(GRACE);
    // First why it ended: what it restored may find no reader either.
    outcome.and(ended)?;
    Ok(ExitCode::SUCCESS)
}

/// How long a reader of what was printed may take at the end, once settings are restored.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// Files that are held open until settings are restored, because the process may have no room for others then: a path is opened folder by
/// folder.
const RESERVE: usize = 8;

/// Restores settings also where what is printed cannot be written, which unwinds.
struct Running {
    agent: Agent<Host>,
    reserve: Vec<File>,
}

impl Running {
    fn stop(&mut self) -> Result<Vec<Restored>, Failure> {
        self.reserve.clear();
        Ok(self.agent.stop()?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
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
        let began = Instant::now();
        let (round, recorded) = agent.round(now_ms())?;
        out.take(agent, &round, &recorded)?;
        if out.arguments.rounds.is_some_and(|rounds| round.round >= rounds) {
            return Ok(());
        }
        let mut is_due = false;
        while !is_due {
            // Pages that the kernel moves take their time of the period.
            let rest = agent.policy().period.saturating_sub(began.elapsed());
            let reloads = match asked.recv_timeout(rest) {
                // It brings no round forward: many of them would have more moved than a period may.
                Ok(Asked::Reload) => {
                    watched.is_read();
                    true
                }
                Ok(Asked::Stop) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(Asked::Unread) => return Err(unwritten(&Errno::PIPE.into())),
                Err(RecvTimeoutError::Timeout) => {
                    is_due = true;
                    watched.has_changed()
                }
            };
            if reloads {
                out.complain(reload(agent, &watched.path).unwrap_or_else(|complaint| vec![complaint]));
            }
        }
    }
}

/// Takes over the policy file as it is now, and says so, or what went wrong. With a mistake in it the policy before goes on.
fn reload<K: Kernel>(agent: &mut Agent<K>, path: &Path) -> Result<Vec<String>, String> {
    let policy = load(path).map_err(|error| format!("{error}; the policy before goes on"))?;
    let mut lines = warnings(&policy, path);
    let change = agent.change(policy);
    change.map_err(|error| format!("{error}; the next round goes on with what could be set"))?;
    lines.push(format!("{}: read again, and the next round goes by it", path.display()));
    Ok(lines)
}

/// What tells a file from what it was before.
type Stamp = (u64, i64, i64, u64);

/// A file that may change.
struct Watched {
    path: PathBuf,
    /// As it was read.
    read: Option<Stamp>,
    /// As the last look found it.
    seen: Option<Stamp>,
}

impl Watched {
    fn new(path: &Path) -> Self {
        let mut watched = Self { path: path.to_owned(), read: None, seen: None };
        watched.is_read();
        watched
    }

    fn stamp(&self) -> Option<Stamp> {
        let now = std::fs::metadata(&self.path).ok()?;
        Some((now.ino(), now.mtime(), now.mtime_nsec(), now.len()))
    }

    /// That it is read as it is now.
    fn is_read(&mut self) {
        self.seen = self.stamp();
        self.read = self.seen;
    }

    /// Whether it is another than was read, and the same as at the last look: one that is being written has not all of its text, and a part
    /// of a policy is a policy too. One that is away counts as unchanged: an editor may be replacing it.
    fn has_changed(&mut self) -> bool {
        let Some(now) = self.stamp() else { return false };
        let is_settled = self.seen.replace(now) == Some(now);
        is_settled && self.read.replace(now) != Some(now)
    }
}

/// Where rounds go.
struct Output<'a> {
    arguments: &'a RunArguments,
    host: Host,
    path: PathBuf,
    metrics: Option<Arc<Metrics>>,
    state: Written,
    record: Option<Record>,
    /// Changes of the policy when it was last said which goals cannot all hold.
    warned: Option<u64>,
    /// What was last printed of each service, and of each alarm.
    shown: BTreeMap<String, String>,
    /// Lines that the next text begins with.
    unsaid: String,
    /// A reader that reads nothing holds no round up.
    stdout: Teller,
    stderr: Teller,
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
                period_ms: agent.policy().period.as_millis() as u64,
                round: round.clone(),
                causes: agent.causes(),
            };
            let outcome = self.host.publish(&self.state.path, &serde_json::to_string(&state)?);
            let said = self.state.after(outcome)?;
            self.complain(said);
        }
        if let Some(record) = &mut self.record {
            let outcome = record.add(&self.host, recorded, agent.past());
            let said = record.written.after(outcome)?;
            self.complain(said);
        }
        if self.warned.replace(round.changes) != Some(round.changes) {
            self.complain(goals_lines(agent.policy(), &self.path, round));
        }
        match self.arguments.json {
            // The number of a round shows which were refused.
            true => self.stdout.say(std::mem::take(&mut self.unsaid) + &json(round) + "\n").map(drop),
            false => self.print_changes(round),
        }
    }

    /// Says lines on stderr. Of one that cannot be written to nobody can be told.
    fn complain(&self, lines: impl IntoIterator<Item = String>) {
        for line in lines {
            drop(self.stderr.say(format!("polder: {line}\n")));
        }
    }

    /// A line for each setting that was changed, for each service that is now as it is for another reason, and for each new alarm.
    /// What the reader is too far behind for comes later.
    fn print_changes(&mut self, round: &Round) -> Result<(), Failure> {
        let mut out = std::mem::take(&mut self.unsaid).into_bytes();
        print_settings(&mut out, round, self.arguments.dry_run)?;
        let settings = String::from_utf8(out)?;
        let mut text = settings.clone();
        let mut lines = BTreeMap::new();
        for row in &round.services {
            let local = format!(" ({:.1}% local)", 100.0 * row.local);
            lines.insert(row.service.clone(), (format!("{}: {}", row.service, row.cause.what), local));
        }
        for alarm in &round.alarms {
            let key = format!("alarm {} {}", alarm.kind(), subject(alarm));
            lines.insert(key, (format!("alarm: {}", said(alarm, self.arguments.dry_run)), String::new()));
        }
        let is_new = |key: &String, what: &String| self.shown.get(key) != Some(what);
        for (what, local) in lines.iter().filter(|(key, (what, _))| is_new(key, what)).map(|(_, line)| line) {
            text += &format!("round {}: {what}{local}\n", round.round);
        }
        match text.is_empty() || self.stdout.say(text)? {
            true => self.shown = lines.into_iter().map(|(key, (what, _))| (key, what)).collect(),
            false if settings.len() <= MOST_UNSAID => self.unsaid = settings,
            false => self.unsaid = "settings were written that nobody read of; see the journal\n".to_owned(),
        }
        Ok(())
    }
}

/// A file that each round writes. Services are not to wait for a disk that is full: what cannot be written is said once, and once more when it
/// can be.
struct Written {
    what: &'static str,
    path: String,
    /// Whether a round was to be written before.
    is_begun: bool,
    /// Rounds that could not be written, one after the other.
    missed: u64,
}

impl Written {
    fn new(what: &'static str, path: String) -> Self {
        Self { what, path, is_begun: false, missed: 0 }
    }

    /// What is to be said after a round.
    ///
    /// # Errors
    /// The first round cannot be written, and not because the disk is full: it is the wrong file.
    fn after(&mut self, outcome: Result<(), KernelError>) -> Result<Option<String>, KernelError> {
        const FULL: [Option<ErrorKind>; 2] = [Some(ErrorKind::StorageFull), Some(ErrorKind::QuotaExceeded)];
        let Self { what, path, is_begun, missed } = self;
        let is_first = !std::mem::replace(is_begun, true);
        match outcome {
            Ok(()) if *missed == 0 => Ok(None),
            Ok(()) => {
                let rounds = std::mem::take(missed);
                Ok(Some(format!("{path}: {what} is written again; {rounds} rounds were not")))
            }
            Err(error) if is_first && !FULL.contains(&error.kind()) => Err(error),
            Err(error) => {
                *missed += 1;
                let said = || format!("{error}; the agent goes on, and tries to write {what} in each round");
                Ok((*missed == 1).then(said))
            }
        }
    }
}

/// A record of what rounds saw and decided.
struct Record {
    written: Written,
    /// What the rounds before the next one left: it goes into the record where these rounds do not.
    past: Past,
}

impl Record {
    fn of(host: &Host, path: String) -> Result<Self, Failure> {
        host.check_record(&path)?;
        Ok(Self { written: Written::new("the record", path), past: Past::default() })
    }

    /// Adds a round, which leaves `past` to the next.
    fn add(&mut self, host: &Host, round: &RecordedRound, past: &Past) -> Result<(), KernelError> {
        let before = std::mem::replace(&mut self.past, past.clone());
        let is_missed = self.written.missed > 0;
        host.record(&self.written.path, |is_first| {
            // One that was moved away, as logs are, is made anew.
            match is_missed || is_first && round.round > 1 {
                true => json(&RecordedRound { past: Some(before), ..round.clone() }),
                false => json(round),
            }
        })
    }
}

/// Which goals of a policy cannot all hold.
fn goals_lines(policy: &Policy, path: &Path, round: &Round) -> Vec<String> {
    let goals = contradictions(policy, round).into_iter();
    goals.map(|goals| format!("warning: {}: {goals}", path.display())).collect()
}

/// Bytes of lines about settings that are kept for a reader that reads nothing.
const MOST_UNSAID: usize = 1 << 20;

fn print_settings(out: &mut impl Write, round: &Round, dry_run: bool) -> Result<(), Failure> {
    let written = if dry_run { "would write" } else { "wrote" };
    Ok(round.settings.iter().try_for_each(|change| writeln!(out, "{written} {change}"))?)
}

/// What an alarm is of: a host has several of one kind.
fn subject(alarm: &Alarm) -> String {
    match alarm {
        Alarm::HostSetting { key, error } => format!("{key} {error}"),
        Alarm::CxlMemory { device, service, .. } => {
            format!("{device} {}", service.as_deref().unwrap_or_default())
        }
        _ => alarm.service().unwrap_or_default().to_owned(),
    }
}

/// An alarm in words; that of a dry run says nothing of a repair that was not tried.
pub(crate) fn said(alarm: &Alarm, dry_run: bool) -> String {
    match alarm {
        Alarm::OptOutBroken { service, found, .. } if dry_run => {
            format!("{service} is opted out, and has {} on the slow tier", size(*found))
        }
        _ => alarm.to_string(),
    }
}

/// Answers Prometheus, in a thread that ends with the process.
pub(crate) fn serve(address: SocketAddr, text: Text) -> Result<(), Failure> {
    if !address.ip().is_loopback() {
        return Err(Failure(format!(
            "--listen {address} is reached from other machines; give an address such as 127.0.0.1:{}, and a proxy that \
             asks for a password",
            address.port()
        )));
    }
    let address = listen(address, text).map_err(|error| Failure(format!("--listen {address}: {error}")))?;
    eprintln!("polder: metrics at http://{address}/metrics");
    Ok(())
}

fn check(arguments: &CheckArguments) -> Result<ExitCode, Failure> {
    let path = &arguments.policy.policy;
    let policy = load_aloud(path)?;
    println!("{}: {} services", path.display(), policy.services.len());
    if policy.default.is_some() {
        println!("default: for every other unit of the system");
    }
    let host = host(&arguments.root);
    let tiers = Tiers::discover(&host).and_then(|tiers| tiers.check_demotion(&host).map(|()| tiers));
    let tiers = match tiers {
        Ok(tiers) => tiers,
        Err(error @ KernelError::Missing(_)) => {
            println!("note: the policy is good, and was not tried here: {error}");
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    println!("fast tier: nodes {}; slow tier: nodes {}", show_nodes(&tiers.fast), show_nodes(&tiers.slow));
    let (mut agent, _) = Agent::start(host, policy, "", true)?;
    let (round, recorded) = agent.round(now_ms())?;
    print_settings(&mut std::io::stdout().lock(), &round, true)?;
    print_table(&round, true)?;
    goals_lines(agent.policy(), path, &round).iter().for_each(|line| eprintln!("polder: {line}"));
    share_lines(agent.policy(), &arguments.root)?.iter().for_each(|line| println!("{line}"));
    pace_lines(&agent, &round, &recorded).iter().for_each(|line| println!("{line}"));
    Ok(ExitCode::SUCCESS)
}

/// What this kernel has of what holds shares, if the policy asks the kernel to.
fn share_lines(policy: &Policy, root: &Path) -> Result<Vec<String>, Failure> {
    if policy.fair_share == FairShare::Agent {
        return Ok(Vec::new());
    }
    let interfaces = examine(&Host::below(root), "")?.interfaces;
    let line = |it: &Interface| {
        let (has, by) =
            (if it.present { "has" } else { "lacks" }, if it.by_version { "version" } else { "files" });
        format!("  {has} {}, by its {by}", it.name)
    };
    Ok(interfaces.iter().filter(|it| it.name.starts_with("DAMON")).map(line).collect())
}

/// What rounds may move, and how long each service will take.
fn pace_lines<K: Kernel>(agent: &Agent<K>, round: &Round, recorded: &RecordedRound) -> Vec<String> {
    let (policy, link) = (agent.policy(), agent.link());
    let seconds = |time: Duration| format!("{:.0} s", time.as_secs_f64());
    let rate = |bytes: f64| format!("{}/s", size(bytes as u64));
    let first = size(Link::FIRST);
    let period = format!("{} s", policy.period.as_secs_f64());
    let step = policy.step_bytes.map(|step| step.max(round.page_bytes));
    let (step, what) = match (step, link.bandwidth) {
        (Some(step), _) => {
            (Some(step), format!("at most {} a round of {period}, each way, by step", size(step)))
        }
        (None, Some(bandwidth)) => {
            let step = link.steady_step(policy.period.as_secs_f64());
            let part = format!(
                "{} a round of {period}, each way: {:.0}% of the slow tier's {}",
                size(step),
                100.0 * Link::PART,
                rate(bandwidth)
            );
            (
                Some(step),
                format!(
                    "at most {part}, or what the kernel moves in that time; the first round moves {first} at most, and measures"
                ),
            )
        }
        (None, None) => (
            None,
            format!(
                "the slow tier's bandwidth is not known (HMAT): the first round moves {first} at most, and measures; then at most {:.0}% of the rate at which pages moved",
                100.0 * Link::PART
            ),
        ),
    };
    let mut lines = vec![what];
    let Some(step) = step else { return lines };
    let mut told = forecast(recorded, step, policy.period);
    // Of one whose pages cannot go down it is said above.
    let refused = |alarm: &Alarm| match alarm {
        Alarm::Refused { service, .. } => Some(service.clone()),
        _ => None,
    };
    let refused: Vec<String> = round.alarms.iter().filter_map(refused).collect();
    told.retain(|service, _| !refused.contains(service));
    lines.extend(told.iter().map(|(service, told)| match told.time {
        Some(time) => format!(
            "  {service}: {} to move, done in {}, at {}",
            size(told.bytes),
            seconds(time),
            rate(told.bytes as f64 / time.as_secs_f64())
        ),
        None => format!(
            "  {service}: {} to move in the first 10,000 rounds, and more after them",
            size(told.bytes)
        ),
    }));
    lines
}

fn explain(arguments: &ExplainArguments) -> Result<ExitCode, Failure> {
    let state = read_state(&arguments.state.state)?;
    let Some(answer) = state.explain(&arguments.service) else {
        let known: Vec<&str> = state.causes.keys().map(String::as_str).collect();
        let (service, policy) = (&arguments.service, &state.policy);
        return Err(Failure(format!("{policy} has no service {service:?}; it has {}", known.join(", "))));
    };
    print!("{answer}");
    if !state.is_fresh(now_ms()) {
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
    serde_json::from_str(&said).map_err(|error| {
        Failure(format!(
            "{path} is no state of an agent ({error}); name the file that polder agent run --state writes"
        ))
    })
}

fn decide_anew(record: &Path) -> Result<ExitCode, Failure> {
    let advised = |error: &dyn std::fmt::Display| {
        Failure(format!("{error}; make one with: polder agent run --record FILE"))
    };
    let text = recorded_text_of(&record.to_string_lossy()).map_err(|error| advised(&error))?;
    let rounds = read_record(&text)
        .map_err(|error| advised(&format_args!("{} is no record of an agent ({error})", record.display())))?;
    if rounds.is_empty() {
        return Err(advised(&format_args!("{}: there is no round in it", record.display())));
    }
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
fn load(path: &Path) -> Result<Policy, Failure> {
    let named = text(path)?;
    let read = Host::new().read_own(&named).map_err(|error| match error.kind() {
        Some(_) => Failure(format!("{error}; name a policy with --policy FILE")),
        None => Failure(error.to_string()),
    })?;
    Policy::parse(&read).map_err(|error| Failure(format!("{}: {error}", path.display())))
}

/// What the file of a policy says and hardly means.
fn warnings(policy: &Policy, path: &Path) -> Vec<String> {
    let warnings = policy.warnings.iter();
    warnings.map(|warning| format!("warning: {}: {warning}", path.display())).collect()
}

/// As [`load`], and says on stderr what the file hardly means.
pub(crate) fn load_aloud(path: &Path) -> Result<Policy, Failure> {
    let policy = load(path)?;
    warnings(&policy, path).iter().for_each(|line| eprintln!("polder: {line}"));
    Ok(policy)
}

/// A path from the root.
fn text(path: &Path) -> Result<String, Failure> {
    Ok(std::path::absolute(path)?.to_string_lossy().into_owned())
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// A message for each signal that asks for something: SIGHUP to reload, and those that would end the process to stop.
///
/// # Errors
/// When signals cannot be caught.
pub fn signals() -> Result<Receiver<Asked>, Failure> {
    let (sender, receiver) = channel();
    tell_signals(sender)?;
    Ok(receiver)
}

fn tell_signals(sender: Sender<Asked>) -> Result<(), Failure> {
    let stops = [SIGINT, SIGTERM, SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2];
    let mut signals = Signals::new(stops.into_iter().chain([SIGHUP]))?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let asked = if signal == SIGHUP { Asked::Reload } else { Asked::Stop };
            if sender.send(asked).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Sends a message once stdout has lost its reader, at once: rounds that print nothing would not notice.
pub(crate) fn tell_unread(sender: Sender<Asked>) -> Result<(), Failure> {
    let stdout = std::io::stdout().as_fd().try_clone_to_owned()?;
    std::thread::spawn(move || {
        // No event is asked for: the kernel tells of an error and of a hang-up all the same, and a file has neither.
        let mut files = [PollFd::new(&stdout, PollFlags::empty())];
        if retry_on_intr(|| poll(&mut files, None)).is_ok() {
            // The rounds may have ended.
            let _ = sender.send(Asked::Unread);
        }
    });
    Ok(())
}

/// One line. A round has names and numbers alone.
pub(crate) fn json(round: &impl serde::Serialize) -> String {
    serde_json::to_string(round).expect("names and numbers are JSON")
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

/// Prints a round, within the width of the terminal if it goes to one.
pub(crate) fn print_table(round: &Round, dry_run: bool) -> Result<(), Failure> {
    let is_terminal = std::io::stdout().is_terminal();
    let columns =
        terminal::size().ok().filter(|_| is_terminal).map_or(usize::MAX, |(columns, _)| columns.into());
    let tiers = format!(
        "round {}: fast tier {} free of {}; slow tier {} free of {}",
        round.round,
        size(round.fast.free),
        size(round.fast.bytes),
        size(round.slow.free),
        size(round.slow.bytes)
    );
    let mut lines = wrapped(&tiers, columns, "");
    lines.extend(round.devices.iter().flat_map(|device| wrapped(&device_line(device), columns, "  ")));
    lines.extend(service_lines(round, columns));
    let alarms = round.alarms.iter().map(|alarm| format!("alarm: {}", said(alarm, dry_run)));
    lines.extend(alarms.flat_map(|alarm| wrapped(&alarm, columns, "  ")));
    let mut out = std::io::stdout().lock();
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    Ok(out.flush()?)
}

/// A head, and a row for each service. Its reason stands beside the numbers, or below them where that leaves few columns.
pub(crate) fn service_lines(round: &Round, columns: usize) -> Vec<String> {
    const FEWEST: usize = 30;
    let row = |name: &str, cells: [&str; 6]| {
        let [fast, slow, local, pressure, demoted, health] = cells;
        // A longer name has a line of its own.
        let name =
            if Span::raw(name).width() > 20 { format!("{name}\n  {:20}", "") } else { format!("{name:<20}") };
        format!("  {name} {fast:>10} {slow:>10} {local:>6} {pressure:>8} {demoted:>10} {health:>7}")
    };
    let mut head = row("service", ["fast", "slow", "local", "pressure", "demoted", "health"]);
    let beside = head.len() + 2;
    let is_beside = columns.saturating_sub(beside) >= FEWEST;
    head += if is_beside { "  why" } else { "" };
    let mut lines = vec![head];
    for service in &round.services {
        let percent = |percent: f64| format!("{percent:.1}%");
        let cells = [
            size(service.fast),
            size(service.slow),
            percent(100.0 * service.local),
            percent(service.pressure),
            size(service.demoted),
            health(round, service),
        ];
        let numbers = row(&service.service, cells.each_ref().map(String::as_str));
        lines.extend(numbers.lines().map(str::to_owned));
        let indent = " ".repeat(if is_beside { beside } else { 4 });
        let mut why = wrapped(&service.cause.what, columns, &indent);
        if let (true, Some(last)) = (is_beside, lines.last_mut()) {
            *last = format!("{last:<beside$}{}", why.remove(0).trim_start());
        }
        lines.extend(why);
    }
    lines
}

/// Lines of so many columns at most, each behind an indent. A word that is longer than a line is broken.
pub(crate) fn wrapped(text: &str, columns: usize, indent: &str) -> Vec<String> {
    let room = columns.saturating_sub(indent.len()).max(1);
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split(' ') {
        if !line.is_empty() && Span::raw(&line).width() + 1 + Span::raw(word).width() > room {
            lines.push(std::mem::take(&mut line));
        }
        line += if line.is_empty() { "" } else { " " };
        for letter in word.chars() {
            if Span::raw(&line).width() >= room {
                lines.push(std::mem::take(&mut line));
            }
            line.push(letter);
        }
    }
    lines.push(line);
    lines.iter().map(|line| format!("{indent}{line}")).collect()
}

fn restored_lines(restored: &[Restored]) -> String {
    let line = |setting: &Restored| match setting {
        Restored::AsFound { path, value } => format!("restored {path} to {value:?}\n"),
        Restored::InEffect { path, value, found } => format!(
            "restored {path} to {value:?}, which does the same as {found:?}, which the kernel refuses now\n"
        ),
        Restored::Removed { path } => format!("removed {path}, which was made\n"),
        Restored::Gone { path } => format!("{path} is gone, and was not restored\n"),
    };
    restored.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_once_it_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.toml");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("a");
        let mut watched = Watched::new(&path);
        assert!(!watched.has_changed() && !watched.has_changed());
        // Emptied first, and then written in two parts.
        for part in ["", "bb", "bbb"] {
            write(part);
            assert!(!watched.has_changed(), "{part:?}");
        }
        assert_eq!([0; 3].map(|_| watched.has_changed()), [true, false, false]);
        std::fs::remove_file(&path).unwrap();
        assert!(!watched.has_changed() && !watched.has_changed());
        write("cccc");
        assert_eq!([0; 3].map(|_| watched.has_changed()), [false, true, false]);
        // What was read on request is not read again.
        write("ddddd");
        watched.is_read();
        assert!(!watched.has_changed() && !watched.has_changed());
    }
}
