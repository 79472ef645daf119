//! The last operations of a schedule, for the reader of its failure.

use std::collections::VecDeque;
use std::fmt::Write;
use std::panic::Location;

/// Operations that a failure shows.
const SHOWN: usize = 60;
/// Steps of the adversary that are kept beside them.
const KEPT: usize = 400;

#[derive(Debug)]
enum Event {
    Operation {
        thread: usize,
        place: (u16, u16),
        what: &'static str,
        at: Option<u64>,
        value: u64,
        site: Site,
    },
    Adversary {
        host: usize,
        what: &'static str,
        line: Option<u32>,
    },
    Note(usize, String),
}

type Site = Option<&'static Location<'static>>;

/// A window on the end of a schedule.
#[derive(Debug, Default)]
pub(super) struct Trace {
    events: VecDeque<Event>,
    operations: usize,
}

impl Trace {
    pub(super) fn operation(
        &mut self,
        (thread, place): (usize, (u16, u16)),
        what: &'static str,
        at: Option<u64>,
        value: u64,
        site: Site,
    ) {
        self.operations += 1;
        self.push(Event::Operation { thread, place, what, at, value, site });
    }

    pub(super) fn adversary(&mut self, host: usize, what: &'static str, line: Option<u32>) {
        self.push(Event::Adversary { host, what, line });
    }

    pub(super) fn note(&mut self, thread: usize, text: String) {
        self.push(Event::Note(thread, text));
    }

    fn push(&mut self, event: Event) {
        self.events.push_back(event);
        while self.operations > SHOWN || self.events.len() > KEPT {
            if let Some(Event::Operation { .. }) = self.events.pop_front() {
                self.operations -= 1;
            }
        }
    }

    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for event in &self.events {
            // Writing to a String cannot fail.
            let _ = match event {
                Event::Operation { thread, place: (host, slot), what, at, value, site } => {
                    let at = at.map_or(String::new(), |at| format!("{at:#x}"));
                    let site = site.map_or(String::new(), |site| format!("{}:{}", site.file(), site.line()));
                    writeln!(text, "  t{thread} h{host}.{slot}  {what:<20} {at:>8}  {value:#18x}  {site}")
                }
                Event::Adversary { host, what, line } => {
                    let line =
                        line.map_or(String::new(), |line| format!(" line {:#x}", u64::from(line) * 64));
                    writeln!(text, "      host {host}: {what}{line}")
                }
                Event::Note(thread, note) => writeln!(text, "  t{thread}  -- {note}"),
            };
        }
        text
    }
}
