//! `polder plan mpi`: what a traced MPI program takes over another network, beside what it took.

use std::path::{Path, PathBuf};

use clap::Args;
use polder_platform::{Bandwidth, Platform, Time, files_of, recorded_text_of};
use polder_sim::program::{Network, ProgramTrace, Replayed, Way, read_trace, replay};
use polder_sim::{Fidelity, grouped};
use serde_json::json;

use super::memory::{digits, time as short_time};
use super::table;
use super::train::FidelityKind;
use crate::Failure;

/// Predicts a traced MPI program over a network.
#[derive(Args)]
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
    /// Hosts that ranks run on, each with as many that follow one another [default: those of the trace].
    #[arg(long, value_name = "COUNT")]
    hosts: Option<u32>,
    /// How many times as long computing takes as in the trace.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0, value_parser = times)]
    computing: f64,
    /// How closely messages are looked at: L0, each as if it were alone, or L1, with those that take the same ports.
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "L1")]
    fidelity: FidelityKind,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Three digits of a time, also of a long one.
pub(super) fn time(seconds: f64) -> String {
    if seconds < 1.0 { short_time(seconds) } else { format!("{} s", digits(seconds)) }
}

fn times(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("expected a number, found {text:?}"))?;
    match number.is_finite() && number >= 0.0 {
        true => Ok(number),
        false => Err(format!("expected a number from 0 on, found {number}")),
    }
}

/// The files of a trace with their texts.
fn texts(folder: &Path) -> Result<Vec<(String, String)>, Failure> {
    let remedy = "no file rank-0: run the program with POLDER_MPI_TRACE and the window shim, see docs/plan-programs.md";
    let text = |name: String| {
        let text = recorded_text_of(&name)?;
        Ok((name, text))
    };
    files_of(folder, |name| name.starts_with("rank-"), remedy)?.into_iter().map(text).collect()
}

impl Arguments {
    fn hosts(&self, trace: &ProgramTrace) -> Result<Vec<u32>, Failure> {
        let ranks = trace.ranks.len() as u32;
        match self.hosts {
            None => Ok(trace.hosts.clone()),
            Some(hosts) if hosts > 0 && hosts <= ranks => {
                let each = ranks.div_ceil(hosts);
                Ok((0..ranks).map(|rank| rank / each).collect())
            }
            Some(hosts) => {
                Err(Failure(format!("--hosts: expected 1 to {ranks}, the ranks of the trace, found {hosts}")))
            }
        }
    }

    fn network(&self, trace: &ProgramTrace) -> Result<Network, Failure> {
        let hosts = self.hosts(trace)?;
        let inside = Way::new(self.latency.value(), self.bandwidth.value());
        let (Some(name), Some(wanted)) = (&self.platform, &self.path) else {
            return match hosts.iter().any(|host| *host > 0) {
                false => Ok(Network { hosts, inside, between: inside }),
                true => Err(Failure(
                    "--platform: ranks run on several hosts; give a platform with servers, and --path".into(),
                )),
            };
        };
        let platform = Platform::load(name)?;
        let found = platform.server.values().find_map(|server| Some((server, server.path.get(wanted)?)));
        let Some((server, path)) = found else {
            let known: Vec<_> =
                platform.server.values().flat_map(|server| server.path.keys()).map(String::as_str).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(Failure(format!(
                "--path: expected one of {name}, which has {known}; found {wanted:?}"
            )));
        };
        Ok(Network { hosts, inside, between: Way::of(server, path) })
    }
}

/// Prints what the program took, and what it takes.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut trace = read_trace(&texts(&arguments.trace)?)?;
    let mut network = arguments.network(&trace)?;
    match Fidelity::from(arguments.fidelity) {
        Fidelity::L0 => {
            network.inside.port_bytes_per_s = f64::INFINITY;
            network.between.port_bytes_per_s = f64::INFINITY;
        }
        Fidelity::L1 => {}
        Fidelity::L2 => {
            let why = "--fidelity L2: the flits of a whole program are too many; plan fabric follows those of a pattern";
            return Err(Failure(why.into()));
        }
    }
    for done in trace.ranks.iter_mut().flatten() {
        if let polder_sim::program::Operation::Compute { seconds } = done {
            *seconds *= arguments.computing;
        }
    }
    let found = replay(&trace.ranks, &network)
        .map_err(|error| Failure(format!("{}: {error}", arguments.trace.display())))?;
    match arguments.json {
        true => {
            let measured_s = measured(&trace).0;
            let off = found.total_s / measured_s - 1.0;
            let it = json!({
                "measured": trace.measured, "calls": trace.calls, "hosts": network.hosts, "predicted": found,
                "between": network.between, "inside": network.inside, "measured_s": measured_s, "off": off,
            });
            println!("{it}");
        }
        false => print(arguments, &trace, &network, &found),
    }
    Ok(())
}

/// Seconds of the slowest rank, and the mean in calls.
fn measured(trace: &ProgramTrace) -> (f64, f64) {
    let total_s = trace.measured.iter().map(|it| it.total_s).fold(0.0, f64::max);
    let mean = trace.measured.iter().map(|it| it.communication_s).sum::<f64>() / trace.measured.len() as f64;
    (total_s, mean)
}

fn print(arguments: &Arguments, trace: &ProgramTrace, network: &Network, found: &Replayed) {
    let hosts = network.hosts.iter().max().map_or(1, |last| last + 1);
    let ranks = trace.ranks.len();
    println!(
        "{}: {ranks} ranks on {hosts} {}, {} messages of {:.1} MB between hosts",
        arguments.trace.display(),
        if hosts == 1 { "host" } else { "hosts" },
        grouped(found.messages),
        found.bytes as f64 / 1e6
    );
    let (measured_s, in_calls_s) = measured(trace);
    let waits_s = found.ranks.iter().map(|it| it.total_s - it.compute_s).sum::<f64>() / ranks as f64;
    let row = |name: &str, measured: f64, predicted: f64| {
        let off = format!("{:+.1}%", 100.0 * (predicted / measured - 1.0));
        vec![name.into(), time(measured), time(predicted), off]
    };
    table::print(&[
        ["", "measured", "predicted", "off"].map(String::from).to_vec(),
        row("the program", measured_s, found.total_s),
        row("in calls of MPI, mean of the ranks", in_calls_s, waits_s),
    ]);
    println!();
    let mut rows = vec![["calls", "count", "measured, all ranks"].map(String::from).to_vec()];
    for (name, it) in &trace.calls {
        rows.push(vec![name.clone(), grouped(it.count), time(it.seconds)]);
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
    if arguments.platform.is_some() || arguments.hosts.is_some() {
        println!("measured: where the trace was made, which may be another network");
    }
}
