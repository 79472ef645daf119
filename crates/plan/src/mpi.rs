//! `polder plan mpi`: what a traced MPI program takes over another network, beside what it took.

use std::path::PathBuf;

use clap::Args;
use polder_platform::{Bandwidth, Time, quoted};
use polder_sim::program::{Network, PredictedProgram, ProgramError, ProgramQuestion, ProgramTrace, Replayed};
use polder_sim::{Fidelity, counted, grouped};
use serde_json::json;

use super::fidelity::Closeness;
use super::option::wrong;
use super::table::{self, time};
use super::written::Json;
use crate::Failure;

/// Predicts a traced MPI program over a network.
#[derive(Args)]
#[command(mut_arg("fidelity", |it| it.default_value("L1")
    .help("How closely to look at messages: L0, each as if it were alone; L1, in turn at the ports of hosts; L2, between hosts flit by flit")))]
// Refused with the reason, because no message of a program takes them.
#[command(mut_arg("window", |it| it.hide(true)), mut_arg("virtual_channels", |it| it.hide(true)))]
pub(crate) struct Arguments {
    /// The folder that POLDER_MPI_TRACE named: a file of each rank.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    trace: PathBuf,
    /// What an empty message between ranks of a host takes.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    latency: Time,
    /// What messages between ranks of a host reach.
    #[arg(long, value_name = "RATE", value_parser = Bandwidth::parse)]
    bandwidth: Bandwidth,
    /// The machine that hosts are joined as; without it all ranks must run on one host.
    #[arg(long, value_name = "NAME", requires = "path")]
    platform: Option<String>,
    /// The platform's path between two hosts.
    #[arg(long, value_name = "NAME", requires = "platform")]
    path: Option<String>,
    /// Hosts that ranks run on, each with some that follow one another, as many as another or one more [default: those of the trace].
    #[arg(long, value_name = "COUNT")]
    hosts: Option<u32>,
    /// How many times as long computing takes as in the trace.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0, value_parser = times)]
    computing: f64,
    #[command(flatten)]
    closeness: Closeness,
    #[command(flatten)]
    json: Json,
}

fn times(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("expected a number, found \"{}\"", quoted(text)))?;
    match number.is_finite() && number >= 0.0 {
        true => Ok(number),
        false => Err(format!("expected a number from 0 on, found {number}")),
    }
}

impl Arguments {
    fn question(&self) -> Result<ProgramQuestion, Failure> {
        Ok(ProgramQuestion {
            latency_s: self.latency.value(),
            bytes_per_s: self.bandwidth.value(),
            platform: self.platform.clone(),
            path: self.path.clone(),
            hosts: self.hosts,
            computing: self.computing,
            fidelity: self.closeness.level(),
            flits: self.closeness.flits()?,
        })
    }
}

/// Prints what the program took, and what it takes.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let trace = ProgramTrace::load(&arguments.trace)?;
    let predicted = trace.predict(&arguments.question()?).map_err(|error| match error {
        ProgramError::Given(error) => wrong(&error),
        ProgramError::Replay(error) => Failure(format!("{}: {error}", arguments.trace.display())),
        other => other.into(),
    })?;
    let PredictedProgram { network, replayed } = predicted;
    match arguments.json.json {
        true => {
            let measured_s = trace.measured_s().0;
            let off = replayed.total_s / measured_s - 1.0;
            let report = json!({
                "measured": trace.measured, "calls": trace.calls, "hosts": network.hosts, "predicted": replayed,
                "between": network.between, "inside": network.inside, "measured_s": measured_s, "off": off,
                "fidelity": arguments.closeness.level(),
            });
            println!("{report}");
        }
        false => print(arguments, &trace, &network, &replayed),
    }
    Ok(())
}

/// How closely messages were looked at.
fn fidelity_line(fidelity: Fidelity, replayed: &Replayed) -> String {
    let how = match fidelity {
        Fidelity::L0 => "each as if it were alone".into(),
        Fidelity::L1 => "in turn at the ports of hosts".into(),
        Fidelity::L2 => {
            format!("between hosts flit by flit, {} flit-hops", grouped(replayed.flit_hops.unwrap_or(0)))
        }
    };
    format!("messages {how} (--fidelity {})", fidelity.name())
}

fn print(arguments: &Arguments, trace: &ProgramTrace, network: &Network, replayed: &Replayed) {
    let hosts = network.hosts.iter().max().map_or(1, |last| last + 1);
    let ranks = trace.ranks.len();
    println!(
        "{}: {} on {}, {} of {:.1} MB between hosts",
        arguments.trace.display(),
        counted(ranks as u64, "rank"),
        counted(hosts.into(), "host"),
        counted(replayed.messages, "message"),
        replayed.bytes as f64 / 1e6
    );
    let (measured_s, in_calls_s) = trace.measured_s();
    let waits_s = replayed.ranks.iter().map(|rank| rank.total_s - rank.compute_s).sum::<f64>() / ranks as f64;
    let row = |name: &str, measured: f64, predicted: f64| {
        let off = match measured > 0.0 {
            true => format!("{:+.1}%", 100.0 * (predicted / measured - 1.0)),
            false => "-".into(),
        };
        vec![name.into(), time(measured), time(predicted), off]
    };
    table::print(&[
        table::head("| measured | predicted | off"),
        row("the program", measured_s, replayed.total_s),
        row("in calls of MPI, mean of the ranks", in_calls_s, waits_s),
    ]);
    println!();
    let mut rows = vec![table::head("calls | count | measured, all ranks")];
    for (name, call) in &trace.calls {
        rows.push(vec![name.clone(), grouped(call.count), time(call.seconds)]);
    }
    table::print(&rows);
    let times = match arguments.computing {
        1.0 => "computing is taken as it was traced".into(),
        times => format!("computing takes {times} times as long as traced"),
    };
    let between = match &arguments.path {
        Some(path) => format!(", between hosts by {path}"),
        None => String::new(),
    };
    println!(
        "predicted: messages inside a host take {} and go at {}{between}; {times}",
        arguments.latency, arguments.bandwidth
    );
    println!("{}", fidelity_line(arguments.closeness.level(), replayed));
    if arguments.platform.is_some() || arguments.hosts.is_some() {
        println!("measured: where the trace was made, which may be another network");
    }
}
