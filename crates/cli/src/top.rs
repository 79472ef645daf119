//! `polder top`: what lies where on this host, and what moving it costs; and what parameter services wait for.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueHint};
use polder_agent::{Agent, Round};
use polder_attach::session::{self, SessionError};
use polder_attach::settings::Settings;
use polder_linux::Host;
use polder_platform::printable;
use polder_pool::inspect;
use polder_pool::service::{ServiceStat, SumStat, services};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::{Block, List};

use crate::Failure;
use crate::agent::{
    Asked, POLICY, PolicyArguments, STATE, StateArguments, copy_of_files, device_line, host, json,
    load_aloud, now_ms, print_table, read_state, said, service_lines, signals, size, wrapped,
};
use crate::pool::shown;

/// Shows tiers, services, flows and alarms: of the running agent, or as a look of its own where none runs.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    state: StateArguments,
    /// Look at a copy of /proc and /sys below this folder, and not at what an agent does.
    #[arg(long, default_value = "/", value_name = "FOLDER", value_hint = ValueHint::DirPath, value_parser = copy_of_files)]
    root: PathBuf,
    /// Print once, in place of every period.
    #[arg(long, global = true)]
    once: bool,
    /// Print each round as one JSON object.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    view: Option<View>,
}

#[derive(Subcommand, Clone, Copy)]
enum View {
    /// Show the parameter services of a pool: blocked milliseconds, m, threshold, proxies.
    Sync,
}

impl Arguments {
    /// An option about an agent that was given beside a view into a pool.
    fn idle_beside_a_view(&self) -> Option<&'static str> {
        let given = [
            ("--root", self.root != Path::new("/")),
            ("--state", self.state.state != Path::new(STATE)),
            ("--policy", self.policy.policy != Path::new(POLICY)),
        ];
        given.into_iter().find_map(|(name, is_given)| is_given.then_some(name))
    }

    /// Whether it looks into a pool.
    pub(crate) const fn opens_a_pool(&self) -> bool {
        self.view.is_some()
    }
}

/// Where rounds come from.
enum Source {
    Running,
    Own(Box<Agent<Host>>),
}

impl Source {
    fn new(arguments: &Arguments) -> Result<Self, Failure> {
        let is_here = arguments.root == Path::new("/");
        let state = &arguments.state.state;
        match is_here.then(|| read_state(state)) {
            Some(Ok(state)) if state.is_fresh(now_ms()) => return Ok(Self::Running),
            // No agent need run, but one that was named must have.
            Some(Err(failure)) if state != Path::new(STATE) => return Err(failure),
            _ => {}
        }
        let policy = load_aloud(&arguments.policy.policy)?;
        Ok(Self::Own(Box::new(Agent::start(host(&arguments.root), policy, "", true)?.0)))
    }

    fn round(&mut self, arguments: &Arguments) -> Result<Round, Failure> {
        match self {
            Self::Running => {
                let path = &arguments.state.state;
                let state = read_state(path)?;
                match state.is_fresh(now_ms()) {
                    true => Ok(state.round),
                    false => Err(Failure(format!(
                        "{}: the agent has written nothing since round {}; it may have stopped",
                        path.display(),
                        state.round.round
                    ))),
                }
            }
            Self::Own(agent) => Ok(agent.round(now_ms())?.0),
        }
    }

    /// Whether nothing that is decided is done.
    const fn is_dry(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    fn period(&self) -> Duration {
        match self {
            Self::Running => Duration::from_secs(1),
            Self::Own(agent) => agent.policy().period,
        }
    }
}

/// Runs `polder top`.
pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    if let Some(View::Sync) = arguments.view {
        if let Some(idle) = arguments.idle_beside_a_view() {
            return Err(Failure(format!("{idle} does not apply here: polder top sync looks into a pool")));
        }
        return sync(arguments, settings);
    }
    let mut source = Source::new(arguments)?;
    let stop = signals()?;
    if !arguments.once && !arguments.json && std::io::stdout().is_terminal() {
        let mut terminal = ratatui::init();
        let outcome = show(&mut terminal, &mut source, arguments, &stop);
        ratatui::restore();
        return outcome.map(|()| ExitCode::SUCCESS);
    }
    loop {
        let round = source.round(arguments)?;
        if arguments.json {
            println!("{}", json(&round));
        } else {
            print_table(&round, source.is_dry())?
        }
        if arguments.once || stop.recv_timeout(source.period()) != Err(RecvTimeoutError::Timeout) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Prints the parameter services of a pool, once or each second.
fn sync(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().ok_or(SessionError::NoPool)?;
    let stop = signals()?;
    let boot = session::boot()?;
    loop {
        let memory = session::open_memory(path, settings.coherence.unwrap_or_default())?;
        let inspection = inspect(&memory)?;
        let running = services(&memory, &inspection.objects)?;
        let is_here =
            |host: u16| inspection.stat.hosts.iter().any(|stat| stat.host == host && stat.boot == boot);
        match arguments.json {
            true => println!("{}", serde_json::to_string(&running)?),
            false => print!("{}", services_table(path, &running, is_here)),
        }
        std::io::stdout().flush()?;
        if arguments.once || stop.recv_timeout(Duration::from_secs(1)) != Err(RecvTimeoutError::Timeout) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn services_table(path: &Path, services: &[ServiceStat], is_here: impl Fn(u16) -> bool) -> String {
    let mut lines = vec![];
    if services.is_empty() {
        lines.push(format!("{}: no parameter service", shown(path)));
    }
    for service in services {
        let lives = |member: &&SumStat| member.takes_part && (!is_here(member.host) || runs(member.pid));
        let living = service.proxies.iter().filter(lives).count();
        lines.push(format!(
            "{}: plan {}, {} of {} proxies alive",
            printable(&service.name),
            service.exchange,
            living,
            service.proxies.len()
        ));
        for member in &service.workers {
            let share = 100.0 * member.proxied_bytes as f64 / member.total_bytes.max(1) as f64;
            let threshold =
                if member.threshold_bytes == 0 { "none".to_owned() } else { size(member.threshold_bytes) };
            lines.push(format!(
                "  worker {} host {} pid {}: {} steps, blocked {:.2} ms, m {} ({share:.0}%), threshold {threshold}",
                member.rank,
                member.host,
                member.pid,
                member.steps,
                member.blocked_ns as f64 / 1e6,
                size(member.proxied_bytes)
            ));
        }
        for member in &service.proxies {
            let state = if lives(&member) { "alive" } else { "gone" };
            lines.push(format!(
                "  proxy {} host {} pid {}: {state}, {} steps, {} shards, {} of sums",
                member.proxy,
                member.host,
                member.pid,
                member.steps,
                member.shards,
                size(member.bytes)
            ));
        }
    }
    lines.join("\n") + "\n"
}

/// Whether a process of this kernel runs, and is no zombie.
fn runs(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| state != 'Z')
}

/// The letter for the state of a process of this kernel, while there is one.
#[must_use]
pub fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state stands behind the name, which is in parentheses.
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    source: &mut Source,
    arguments: &Arguments,
    stop: &Receiver<Asked>,
) -> Result<(), Failure> {
    let mut before = None;
    loop {
        let round = source.round(arguments)?;
        terminal.draw(|frame| draw(frame, &round, before.as_ref(), source.is_dry()))?;
        if is_ended(stop, source.period())? {
            return Ok(());
        }
        if before.as_ref().is_none_or(|before: &Round| before.round != round.round) {
            before = Some(round);
        }
    }
}

/// Waits until the next look is due, or something happens: whether a key or a signal ends the display, so that the terminal is given back.
pub(crate) fn is_ended(stop: &Receiver<Asked>, period: Duration) -> Result<bool, Failure> {
    /// Between two looks for a signal.
    const SLICE: Duration = Duration::from_millis(100);
    let begun = Instant::now();
    loop {
        if stop.try_recv().is_ok() {
            return Ok(true);
        }
        let rest = period.saturating_sub(begun.elapsed());
        if event::poll(rest.min(SLICE))? {
            return Ok(ends(&event::read()?));
        }
        if rest.is_zero() {
            return Ok(false);
        }
    }
}

/// Whether a key ends the display.
fn ends(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
        || (key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL))
}

fn draw(frame: &mut Frame<'_>, round: &Round, before: Option<&Round>, dry_run: bool) {
    let columns = usize::from(frame.area().width);
    let boxed = |lines: &[String]| u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_add(2).min(12);
    let within = |text: String| wrapped(&text, columns.saturating_sub(2), "");
    let head: Vec<String> = head_lines(round, before).into_iter().flat_map(within).collect();
    let alarms: Vec<String> = round.alarms.iter().flat_map(|alarm| within(said(alarm, dry_run))).collect();
    let heights = [Constraint::Length(boxed(&head)), Constraint::Min(3), Constraint::Length(boxed(&alarms))];
    let [top, middle, bottom] = Layout::vertical(heights).areas(frame.area());
    let list = |lines: Vec<String>| List::new(lines.into_iter().map(Line::from));
    frame.render_widget(list(head).block(Block::bordered().title(" polder top: q ends ".bold())), top);
    let services = service_lines(round, columns).into_iter().enumerate();
    let services =
        services.map(|(index, line)| if index == 0 { line.bold().into() } else { Line::from(line) });
    frame.render_widget(List::new(services), middle);
    frame.render_widget(list(alarms).red().block(Block::bordered().title(" alarms ")), bottom);
}

/// Tiers, flows since the round before, what tiering costs, and the health of CXL devices.
fn head_lines(round: &Round, before: Option<&Round>) -> Vec<String> {
    let mut lines = flow_lines(round, before).to_vec();
    lines.extend(round.devices.iter().map(device_line));
    lines
}

fn flow_lines(round: &Round, before: Option<&Round>) -> [String; 3] {
    let tiers = format!(
        "round {}   fast {} free of {}   slow {} free of {}",
        round.round,
        size(round.fast.free),
        size(round.fast.bytes),
        size(round.slow.free),
        size(round.slow.bytes)
    );
    let Some(before) = before.filter(|before| before.time_ms < round.time_ms) else {
        return [tiers, "flows: from the second round on".to_owned(), String::new()];
    };
    let seconds = (round.time_ms - before.time_ms) as f64 / 1e3;
    let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
    let bytes = |now: u64, then: u64| size((rate(now, then) * round.page_bytes as f64) as u64);
    let (now, then) = (&round.host, &before.host);
    let flows = format!(
        "promoted {}/s   demoted {}/s",
        bytes(now.promoted_pages, then.promoted_pages),
        bytes(now.demoted_pages, then.demoted_pages)
    );
    let returned = |round: &Round| round.services.iter().map(|row| row.returned).sum::<u64>();
    let back = size(rate(returned(round), returned(before)) as u64);
    let held = round.kernel_promotes.map_or(String::new(), |rate| format!(" (held to {}/s)", size(rate)));
    let flows = format!("{flows}   came back {back}/s{held}");
    let costs = format!(
        "costs: kswapd {:.2} cores   kdamond {:.2} cores   hint faults {:.0}/s",
        rate(now.kswapd_ms, then.kswapd_ms) / 1e3,
        rate(now.kdamond_ms, then.kdamond_ms) / 1e3,
        rate(now.hint_faults, then.hint_faults)
    );
    [tiers, flows, costs]
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use polder_agent::{Alarm, Cause, DeviceHealth, ServiceRound, TierRule};
    use polder_linux::{HostCounts, TierMemory};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn a_signal_ends_the_display_before_the_next_look_is_due() {
        let (sender, stop) = channel();
        for asked in [Asked::Stop, Asked::Reload] {
            sender.send(asked).unwrap();
            assert!(is_ended(&stop, Duration::from_secs(3600)).unwrap());
        }
    }

    #[test]
    fn the_screen_shows_tiers_flows_and_what_they_cost() {
        let fast = TierMemory { bytes: 1 << 30, free: 1 << 29 };
        let before = Round { round: 1, time_ms: 1000, fast, ..Round::default() };
        let host =
            HostCounts { promoted_pages: 512, kswapd_ms: 500, hint_faults: 8, ..HostCounts::default() };
        let device = DeviceHealth {
            device: "mem0".to_owned(),
            bad_places: 2,
            events: 3,
            said: vec!["poison (Injected)".to_owned()],
        };
        let devices = vec![device];
        let kernel_promotes = Some(64 << 20);
        let round = Round {
            round: 2,
            time_ms: 3000,
            fast,
            host,
            devices,
            kernel_promotes,
            page_bytes: 4096,
            ..Round::default()
        };
        let mut terminal = Terminal::new(TestBackend::new(100, 20)).unwrap();
        terminal.draw(|frame| draw(frame, &round, Some(&before), false)).unwrap();
        let screen = terminal.backend().to_string();
        for words in [
            "fast 512.0 MiB free of 1.0 GiB",
            "promoted 1.0 MiB/s",
            "came back 0 B/s (held to 64.0 MiB/s)",
            "kswapd 0.25 cores",
            "hint faults 4/s",
            "mem0: poison (Injected), 2 bad places, 3 events",
            "health",
        ] {
            assert!(screen.contains(words), "{words}:\n{screen}");
        }
    }

    #[test]
    fn what_is_long_is_wrapped_at_the_width_of_the_terminal_and_nothing_is_lost() {
        let what =
            "it would give pages and is left alone: its tasks wait for memory longer than pressure_limit";
        let path = "/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/cpuset.mems.effective";
        let service = |name: &str| ServiceRound {
            service: name.to_owned(),
            cgroup: "/a".to_owned(),
            tier: TierRule::OptIn,
            fast: (1 << 40) - (1 << 30),
            slow: 1023 << 30,
            fast_cache: 0,
            local: 1.0,
            pressure: 100.0,
            refaults: 0,
            demoted: 0,
            promoted: 0,
            promoted_pages: 0,
            demoted_pages: 0,
            returned: 0,
            oom_kills: 0,
            bad_memory: 0,
            cause: Cause { what: what.to_owned(), line: None, since_round: 1, since_ms: 0 },
        };
        let alarm =
            Alarm::Refused { service: "übung".to_owned(), error: format!("{path}: Permission denied") };
        let services = vec![service("übung"), service("web/web-6d4cf56db6-7xk2p")];
        let round = Round { services, alarms: vec![alarm], ..Round::default() };
        let squeezed = |text: &str| text.split_ascii_whitespace().collect::<String>();
        for columns in [1, 20, 79, 80, 81, 112, 113, 120, 200, usize::MAX] {
            let lines = service_lines(&round, columns);
            // Numbers take 79 columns, and a name may take more.
            let widest = lines.iter().map(|line| Line::from(line.as_str()).width()).max().unwrap();
            assert!(widest <= columns.max(79), "{columns}:\n{}", lines.join("\n"));
            let text = squeezed(&lines.concat());
            assert_eq!(text.matches(&squeezed(what)).count(), 2, "{columns}:\n{}", lines.join("\n"));
            assert_eq!(text.matches("1023.0GiB1023.0GiB100.0%100.0%0B-").count(), 2, "{columns}: {text}");
        }
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, &round, None, false)).unwrap();
        let screen = terminal.backend().to_string();
        let text: String = squeezed(&screen).chars().filter(|letter| !"\"│".contains(*letter)).collect();
        for words in ["health", "pressure_limit", path, "Permissiondenied", "web/web-6d4cf56db6-7xk2p"] {
            assert!(text.contains(words), "{words}:\n{screen}");
        }
    }
}
