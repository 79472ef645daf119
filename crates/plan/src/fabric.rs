//! `polder plan fabric`: when the messages of a pattern of traffic end that share the links of a fabric.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use polder_platform::Bytes;
use polder_sim::contention::{FabricAnswer, FabricQuestion, LinkUse, Routing, TrafficPattern, answer};
use polder_sim::{Fidelity, accelerators, counted, grouped};
use serde_json::{Value, json};

use super::fidelity::{Closeness, short_window_note};
use super::option::{Machine, accelerator_count, choice, failed_links, quantity};
use super::page::filled;
use super::table::{self, size, time};
use super::written::{Outputs, escaped_csv, write};
use crate::Failure;

/// Links that are listed.
const LISTED: usize = 8;

/// Predicts messages that share links.
#[derive(Args)]
#[command(mut_arg("fidelity", |it| it.default_value("L1")))]
pub(crate) struct Arguments {
    #[command(flatten)]
    machine: Machine,
    /// Number of accelerators: one rack's use its own fabric, more use the one between racks.
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    gpus: String,
    /// Which accelerators send to which.
    #[arg(long, value_name = "PATTERN", value_parser = patterns(), default_value = "permutation")]
    pattern: TrafficPattern,
    /// Bytes of each message, such as "1 MiB"; of an all-reduce, what each accelerator has.
    #[arg(long, value_name = "SIZE", default_value = "64 MiB")]
    message: String,
    /// Which of the shortest ways a message takes: the one that its destination selects, or the one with the fewest messages so far.
    #[arg(long, value_name = "HOW", value_parser = choice::<Routing>(["minimal", "adaptive"]), default_value = "minimal")]
    routing: Routing,
    /// Links between two switches that have failed, such as "3-520,4-520". `--json` lists the links by their switches.
    #[arg(long, value_name = "SWITCH-SWITCH", value_delimiter = ',')]
    failed: Vec<String>,
    /// What a permutation is drawn from, and damage to flits.
    #[arg(long, value_name = "NUMBER", default_value_t = FabricQuestion::SEED)]
    seed: u64,
    #[command(flatten)]
    closeness: Closeness,
    #[command(flatten)]
    pub(super) outputs: Outputs,
    /// Write the messages for Perfetto and chrome://tracing.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(super) trace: Option<PathBuf>,
}

/// The patterns as clap reads them.
fn patterns() -> impl TypedValueParser<Value = TrafficPattern> {
    let pattern = |name: String| {
        TrafficPattern::ALL.into_iter().find(|it| it.name() == name).expect("a pattern that was listed")
    };
    let listed = TrafficPattern::ALL.map(|it| PossibleValue::new(it.name()).help(it.about()));
    PossibleValuesParser::new(listed).map(pattern)
}

impl Arguments {
    fn question(&self) -> Result<FabricQuestion, Failure> {
        let message: Bytes = quantity("--message", &self.message)?;
        Ok(FabricQuestion {
            platform: self.machine.platform.clone(),
            rack: self.machine.rack.clone(),
            accelerators: accelerator_count(&self.gpus)?,
            pattern: self.pattern,
            message_bytes: message.value(),
            routing: self.routing,
            failed: failed_links(&self.failed)?,
            seed: self.seed,
            fidelity: self.closeness.level(),
            flits: self.closeness.flits()?,
        })
    }
}

/// Prints when messages end.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let answer = answer(&arguments.question()?)?;
    arguments.outputs.json.print(&answer, || print(&answer))?;
    arguments.outputs.table(|| csv(&answer))?;
    arguments.outputs.page(|| page(&answer))?;
    if let Some(path) = &arguments.trace {
        write(path, &trace(&answer))?;
    }
    Ok(())
}

fn title(found: &FabricAnswer) -> String {
    let FabricQuestion { accelerators: count, pattern, message_bytes, .. } = &found.question;
    let (pattern, message, count) = (pattern.name(), size(*message_bytes), accelerators(*count));
    format!("{pattern} of {message} on {}, {count}", found.platform)
}

fn print(answer: &FabricAnswer) {
    println!("{}, fabric {} racks, simulated {}", title(answer), answer.fabric, fidelity_words(answer));
    println!("ends after {}", time(answer.total_s));
    if answer.steps > 1 {
        println!(
            "{} steps of {} each, of which these are the messages:",
            answer.steps,
            size(answer.step_bytes)
        );
    }
    let of = &answer.seconds;
    let row = |cells: [&str; 5]| cells.map(String::from).to_vec();
    let cells = [of.p50_s, of.p90_s, of.p99_s, of.max_s].map(time);
    table::print(&[
        row(["messages end after", "p50", "p90", "p99", "last"]),
        row([&counted(answer.messages.len() as u64, "message"), &cells[0], &cells[1], &cells[2], &cells[3]]),
    ]);
    if let Some(slowest) = answer.messages.iter().max_by(|one, other| one.slowdown.total_cmp(&other.slowdown))
    {
        println!(
            "slowest for its way: {} to {}, {:.2} times what it takes alone",
            slowest.from, slowest.to, slowest.slowdown
        );
    }
    if let Some(rate) = answer.bytes_per_s {
        println!(
            "each accelerator that receives gets {}/s on average until the last message has ended, {:.0}% of its links' {}/s",
            size(rate),
            100.0 * rate / answer.payload_bytes_per_s,
            size(answer.payload_bytes_per_s)
        );
        print_links(answer);
    }
    println!("{}", assumed(answer));
}

/// The links that carry most of what they could.
fn print_links(answer: &FabricAnswer) {
    println!();
    let mut rows = vec![table::head("most used links | flows | used")];
    for link in answer.links.iter().take(LISTED) {
        let LinkUse { from, to, flows, used } = link;
        let used = used.map_or_else(String::new, |used| format!("{:.0}%", 100.0 * used));
        rows.push(vec![format!("{from} to {to}"), flows.to_string(), used]);
    }
    table::print(&rows);
    if let Some(mean) = answer.mean_used_between_switches {
        println!(
            "links between switches that are used carry {:.1}% of what they could, on average",
            100.0 * mean
        );
    }
}

/// How closely messages were looked at.
const fn fidelity_words(found: &FabricAnswer) -> &'static str {
    match found.question.fidelity {
        Fidelity::L0 => "in closed form, each message alone (--fidelity L0)",
        Fidelity::L1 => "by flows (--fidelity L1)",
        Fidelity::L2 => "flit by flit (--fidelity L2)",
    }
}

/// What the figures rest on.
fn assumed(answer: &FabricAnswer) -> String {
    let routing = match answer.question.routing {
        Routing::Minimal => "minimal routes by destination",
        Routing::Adaptive => "minimal routes by load",
    };
    let failed = match answer.question.failed.len() {
        0 => String::new(),
        count => format!(", {}", counted(count as u64, "failed link")),
    };
    let shared = match (answer.question.fidelity, &answer.flits) {
        (_, Some(flits)) => {
            let window = match flits.window_bytes < answer.step_bytes {
                true => format!(
                    " of the first {} of each message{}, the rest at the rate of their second half",
                    size(flits.window_bytes),
                    short_window_note(flits.window_bytes, flits.steady_window_bytes)
                ),
                false => String::new(),
            };
            format!(
                "{} steps of flits{window}, {} sent again; {} of {} (--virtual-channels, --buffer)",
                grouped(flits.flit_hops),
                grouped(flits.replays),
                counted(flits.channels.into(), "virtual channel"),
                counted(flits.buffer.into(), "flit")
            )
        }
        (Fidelity::L0, _) => "nothing shares a link".into(),
        _ => "links are shared max-min fairly".into(),
    };
    format!("{routing} (--routing){failed}; {shared}; all messages begin together")
}

fn csv(found: &FabricAnswer) -> Result<String, Failure> {
    let mut writer = ::csv::Writer::from_writer(vec![]);
    for message in &found.messages {
        writer.serialize(message)?;
    }
    escaped_csv(writer)
}

/// One page that needs nothing else.
fn page(answer: &FabricAnswer) -> Result<String, Failure> {
    // In closed form no use of a link is known, and none is drawn.
    let links: Vec<Value> = answer
        .links
        .iter()
        .filter_map(|link| link.used.map(|used| json!([link.from, link.to, link.flows, used])))
        .collect();
    let data = json!({
        "about": format!("{}. Simulated {}: {}.", title(answer), fidelity_words(answer), assumed(answer)),
        "ends": answer.messages.iter().map(|message| message.end_s).collect::<Vec<_>>(),
        "links": links,
    });
    filled(include_str!("fabric.html"), &title(answer), &data)
}

/// A Chrome trace: a track for each sender, a slice for each message.
fn trace(answer: &FabricAnswer) -> String {
    let events = answer.messages.iter().map(|message| {
        json!({
            "name": format!("to {}", message.to), "cat": "message", "ph": "X", "pid": 0, "tid": message.from, "ts": 0.0,
            "dur": message.end_s * 1e6, "args": {"slowdown": message.slowdown},
        })
        .to_string()
    });
    let events = events.collect::<Vec<_>>().join(",");
    let title = json!(title(answer));
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"title\":{title}}},\"traceEvents\":[{events}]}}")
}
