//! `polder plan chakra`: a traced step of PyTorch, by its operators, beside what it took.

use std::path::PathBuf;

use clap::Args;
use polder_platform::{Bandwidth, FlopRate, Time};
use polder_sim::program::{OperatorRates, StepCommunication, StepFabric, StepTrace, TracedStep};
use polder_sim::{counted, grouped};
use serde_json::json;

use super::fidelity::{Closeness, followed};
use super::option::wrong;
use super::table::{self, print_wrapped, size, time};
use super::written::Json;
use crate::Failure;

/// Predicts a traced step.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The folder with what PyTorch's ExecutionTraceObserver wrote: a JSON file of each rank, for one step.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
    /// Operations a second that matrix products reach.
    #[arg(long, value_name = "RATE", value_parser = FlopRate::parse)]
    compute: FlopRate,
    /// Bytes a second that other operators read and write.
    #[arg(long, value_name = "RATE", value_parser = Bandwidth::parse)]
    memory: Bandwidth,
    /// What an operator with nothing to do takes.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    launch: Time,
    /// What the step took, without an observer.
    #[arg(long, value_name = "TIME", value_parser = Time::parse)]
    measured: Option<Time>,
    /// The machine that collective calls run on: a name, or the path of a file. Without it they are left out.
    #[arg(long, value_name = "PLATFORM")]
    platform: Option<String>,
    /// Kind of rack, if the platform has several [default: the first by name].
    #[arg(long, value_name = "NAME", requires = "platform")]
    rack: Option<String>,
    #[command(flatten)]
    closeness: Closeness,
    #[command(flatten)]
    json: Json,
}

/// Operators that are listed.
const LISTED: usize = 12;

/// Prints the step, and its operators.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let rates = OperatorRates {
        flops_per_s: arguments.compute.value(),
        bytes_per_s: arguments.memory.value(),
        launch_s: arguments.launch.value(),
    };
    rates.check().map_err(|error| wrong(&error))?;
    if arguments.measured.is_some_and(|measured| measured.value() <= 0.0) {
        return Err(Failure("--measured: expected a time above 0".into()));
    }
    let on = arguments.fabric()?;
    let traces = StepTrace::load(&arguments.folder)?;
    let calls: Vec<_> = match &on {
        Some(on) => {
            let ranks: Vec<_> = traces.iter().map(|(_, trace)| trace).collect();
            StepTrace::communication(&ranks, on)?.into_iter().map(Some).collect()
        }
        None => vec![None; traces.len()],
    };
    let answers: Vec<_> = traces
        .into_iter()
        .zip(calls)
        .map(|((name, trace), communication)| Rank {
            name,
            collectives: trace.collectives,
            step: trace.step(rates),
            communication,
        })
        .collect();
    let slowest = answers.iter().max_by(|one, other| one.total_s().total_cmp(&other.total_s()));
    let Some(rank) = slowest else { return Ok(()) };
    let measured_s = arguments.measured.map(Time::value);
    let off = measured_s.map(|measured_s| rank.total_s() / measured_s - 1.0);
    if arguments.json.json {
        let ranks = answers.iter().map(|answer| {
            json!({"file": answer.name, "step": answer.step, "communication": answer.communication, "predicted_s": answer.total_s()})
        });
        let fidelity = on.as_ref().map(|on| on.fidelity);
        println!(
            "{}",
            json!({
                "rates": rates, "ranks": ranks.collect::<Vec<_>>(), "predicted_s": rank.total_s(), "measured_s": measured_s,
                "off": off, "collectives": answers.iter().map(|answer| answer.collectives).sum::<u64>(),
                "platform": arguments.platform, "fidelity": fidelity,
            })
        );
        return Ok(());
    }
    println!("{}: a step of {}", arguments.folder.display(), counted(answers.len() as u64, "rank"));
    let total_s = rank.total_s();
    match measured_s.zip(off) {
        Some((measured_s, off)) => {
            println!("predicted {}, measured {}: {:+.1}%", time(total_s), time(measured_s), 100.0 * off)
        }
        None => {
            println!("predicted {}; give --measured to compare it with what the step took", time(total_s))
        }
    }
    table::print(&rows(rank));
    println!(
        "predicted: each operator takes its launch, {}, and the longer of its operations at {} and its bytes at {}",
        arguments.launch, arguments.compute, arguments.memory
    );
    let foreign: Vec<_> = rank.step.operators.iter().map(|it| it.name.as_str()).filter(is_foreign).collect();
    if !foreign.is_empty() {
        print_wrapped(&format!(
            "by their bytes alone, because their operations are not known: {}",
            foreign.join(", ")
        ));
    }
    match on.as_ref().zip(rank.communication.as_ref()) {
        Some((on, StepCommunication { total_s, left_out, flits, .. })) => {
            println!(
                "collective calls take {} on {} (--fidelity {}), one after another, with nothing beside them; {left_out} of {} are left out",
                time(*total_s),
                on.platform,
                on.fidelity.name(),
                rank.collectives
            );
            if let Some(flits) = flits {
                println!("calls of all ranks, equal ones once: {}", followed(*flits));
            }
        }
        None if rank.collectives > 0 => println!(
            "of a rank {} left out; --platform names what they run on",
            counted(rank.collectives, "collective call")
        ),
        None => {}
    }
    Ok(())
}

impl Arguments {
    /// What collective calls run on.
    fn fabric(&self) -> Result<Option<StepFabric>, Failure> {
        let Some(platform) = &self.platform else {
            let why = "plan chakra leaves collective calls out if no --platform says what they run on";
            return self.closeness.expect_closed(why).map(|()| None);
        };
        let (platform, rack) = (platform.clone(), self.rack.clone());
        let (fidelity, flits) = (self.closeness.level(), self.closeness.flits()?);
        Ok(Some(StepFabric { platform, rack, fidelity, flits }))
    }
}

/// Whether an operator is none of PyTorch's own.
fn is_foreign(name: &&str) -> bool {
    name.split_once("::").is_some_and(|(library, _)| !["aten", "prim", "prims"].contains(&library))
}

/// What a rank takes.
struct Rank {
    name: String,
    collectives: u64,
    step: TracedStep,
    communication: Option<StepCommunication>,
}

impl Rank {
    fn total_s(&self) -> f64 {
        self.step.total_s + self.communication.as_ref().map_or(0.0, |it| it.total_s)
    }
}

/// Operators, then collective calls.
fn rows(rank: &Rank) -> Vec<Vec<String>> {
    let mut rows = operators(&rank.step, rank.total_s());
    for call in rank.communication.iter().flat_map(|communication| &communication.calls) {
        rows.push(vec![
            format!("{} of {}", call.name, counted(call.ranks.into(), "rank")),
            grouped(call.count),
            String::new(),
            size(call.count as f64 * call.bytes as f64),
            time(call.seconds),
            format!("{:.0}%", 100.0 * call.seconds / rank.total_s()),
        ]);
    }
    rows
}

fn operators(step: &TracedStep, total_s: f64) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("operator | count | GFLOP | bytes | predicted |")];
    for operator in step.operators.iter().take(LISTED) {
        rows.push(vec![
            operator.name.clone(),
            grouped(operator.count),
            format!("{:.3}", operator.flops / 1e9),
            size(operator.bytes),
            time(operator.seconds),
            format!("{:.0}%", 100.0 * operator.seconds / total_s),
        ]);
    }
    let rest = step.operators.iter().skip(LISTED);
    let (count, seconds) =
        rest.fold((0, 0.0), |(count, sum), operator| (count + operator.count, sum + operator.seconds));
    if count > 0 {
        let share = format!("{:.0}%", 100.0 * seconds / total_s);
        rows.push(vec!["others".into(), grouped(count), String::new(), String::new(), time(seconds), share]);
    }
    rows
}
