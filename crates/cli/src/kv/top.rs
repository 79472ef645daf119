//! `polder kv top`: caches each second, on a terminal as a screen and elsewhere as lines.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use polder_attach::settings::Settings;
use polder_platform::printable;
use polder_pool::kv::CacheStat;
use ratatui::Frame;
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::{Block, List};

use super::{caches, table};
use crate::Failure;
use crate::agent::{Asked, signals, wrapped};
use crate::pool::shown;
use crate::top::is_ended;

const PERIOD: Duration = Duration::from_secs(1);

/// What a look saw, and when.
struct Look {
    at: Instant,
    caches: Vec<CacheStat>,
}

impl Look {
    fn new(settings: &Settings, name: Option<&str>) -> Result<Self, Failure> {
        let (_, caches) = caches(settings, name)?;
        Ok(Self { at: Instant::now(), caches })
    }

    /// Each cache as `polder kv stat` has it, with rates since the look before.
    fn lines(&self, before: Option<&Self>) -> Vec<String> {
        let mut lines = vec![];
        for cache in &self.caches {
            lines.extend(table(cache).lines().map(str::to_owned));
            let old = before.and_then(|before| before.caches.iter().find(|old| old.name == cache.name));
            if let Some((old, before)) = old.zip(before) {
                lines.push(rates(cache, old, self.at - before.at));
            }
        }
        lines
    }
}

/// What all hosts have put, evicted and read since, in a second.
fn rates(now: &CacheStat, then: &CacheStat, passed: Duration) -> String {
    let sums = |cache: &CacheStat| {
        cache.hosts.iter().fold([0_u64; 3], |[puts, evictions, hits], part| {
            [
                puts.saturating_add(part.puts),
                evictions.saturating_add(part.evictions),
                hits.saturating_add(part.hits),
            ]
        })
    };
    let (now, then) = (sums(now), sums(then));
    let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / passed.as_secs_f64().max(1e-3);
    let [puts, evictions, hits] = std::array::from_fn(|at| rate(now[at], then[at]));
    format!("  {puts:.0} put/s, {evictions:.0} evicted/s, {hits:.0} hits/s")
}

/// Runs `polder kv top`.
pub(super) fn run(settings: &Settings, name: Option<&str>) -> Result<ExitCode, Failure> {
    let path = settings.pool.as_deref().unwrap_or(Path::new(""));
    let stop = signals()?;
    if std::io::stdout().is_terminal() {
        let mut terminal = ratatui::init();
        let outcome = show(&mut terminal, settings, path, name, &stop);
        ratatui::restore();
        return outcome.map(|()| ExitCode::SUCCESS);
    }
    let mut before = None;
    loop {
        let look = Look::new(settings, name)?;
        match look.lines(before.as_ref()) {
            lines if lines.is_empty() => println!("{}: no caches", shown(path)),
            lines => println!("{}", lines.join("\n")),
        }
        std::io::stdout().flush()?;
        if stop.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
            return Ok(ExitCode::SUCCESS);
        }
        before = Some(look);
    }
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    settings: &Settings,
    path: &Path,
    name: Option<&str>,
    stop: &Receiver<Asked>,
) -> Result<(), Failure> {
    let mut before = None;
    loop {
        let look = Look::new(settings, name)?;
        let lines = look.lines(before.as_ref());
        terminal.draw(|frame| draw(frame, path, lines))?;
        if is_ended(stop, PERIOD)? {
            return Ok(());
        }
        before = Some(look);
    }
}

fn draw(frame: &mut Frame<'_>, path: &Path, lines: Vec<String>) {
    let title = format!(" polder kv top {}: q ends ", printable(&shown(path)));
    let columns = usize::from(frame.area().width).saturating_sub(2);
    let within = |line: &String| {
        let indent = if line.starts_with(' ') { "  " } else { "" };
        wrapped(line.trim_start(), columns, indent)
    };
    let styled = |line: String| if line.starts_with(' ') { Line::from(line) } else { line.bold().into() };
    let lines = match lines.is_empty() {
        true => vec![Line::from("no caches")],
        false => lines.iter().flat_map(within).map(styled).collect(),
    };
    frame.render_widget(List::new(lines).block(Block::bordered().title(title.bold())), frame.area());
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn look(after_ms: u64, puts: u64, begin: Instant) -> Look {
        let json = format!(
            r#"{{"name":"llm","budget":1048576,"claimed":65536,"blocks":2,"bytes":8192,"identities":[],
            "hosts":[{{"host":0,"blocks":2,"claimed":65536,"puts":{puts},"evictions":4,"hits":{puts},"misses":0}}]}}"#
        );
        let caches = vec![serde_json::from_str(&json).unwrap()];
        Look { at: begin + Duration::from_millis(after_ms), caches }
    }

    #[test]
    fn the_screen_shows_caches_with_rates_from_the_second_look_on() {
        let begin = Instant::now();
        let (first, second) = (look(0, 10, begin), look(2000, 30, begin));
        assert!(!first.lines(None).join("\n").contains("put/s"));
        let mut terminal = Terminal::new(TestBackend::new(100, 10)).unwrap();
        let lines = second.lines(Some(&first));
        terminal.draw(|frame| draw(frame, Path::new("/dev/shm/kv"), lines)).unwrap();
        let screen = terminal.backend().to_string();
        for words in [
            "/dev/shm/kv: q ends",
            "cache llm: 2 blocks of 8.0 KiB",
            "30 put, 4 evicted",
            "10 put/s, 0 evicted/s, 10 hits/s",
        ] {
            assert!(screen.contains(words), "{words}:\n{screen}");
        }
        // A narrow one breaks lines, and loses nothing of them.
        let mut terminal = Terminal::new(TestBackend::new(24, 16)).unwrap();
        let lines = second.lines(Some(&first));
        terminal.draw(|frame| draw(frame, Path::new("/dev/shm/kv"), lines.clone())).unwrap();
        let screen = terminal.backend().to_string();
        let squeezed =
            |text: &str| text.chars().filter(|letter| !"\"│ \n".contains(*letter)).collect::<String>();
        assert!(squeezed(&screen).contains(&squeezed(&lines.concat())), "{screen}");
        terminal.draw(|frame| draw(frame, Path::new("/dev/shm/kv"), vec![])).unwrap();
        assert!(terminal.backend().to_string().contains("no caches"));
    }
}
