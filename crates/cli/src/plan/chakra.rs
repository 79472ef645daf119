//! `polder plan chakra`: a traced step of PyTorch, by its operators, beside what it took.

use std::path::PathBuf;

use clap::Args;
use polder_platform::{Bandwidth, FlopRate, Time};
use polder_sim::grouped;
use polder_sim::program::{OperatorRates, StepTrace, TracedStep};
use serde_json::json;

use super::fidelity::ClosedForm;
use super::memory::{size, time};
use super::option::wrong;
use super::table;
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
    #[command(flatten)]
    fidelity: ClosedForm,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Operators that are listed.
const LISTED: usize = 12;

/// Prints the step, and its operators.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.fidelity.check(
        "chakra",
        "its seconds are of operators, and collective calls are left out; plan fabric --pattern all-reduce has one",
    )?;
    let rates = OperatorRates {
        flops_per_s: arguments.compute.value(),
        bytes_per_s: arguments.memory.value(),
        launch_s: arguments.launch.value(),
    };
    rates.check().map_err(|error| wrong(&error))?;
    let found: Vec<_> = StepTrace::load(&arguments.folder)?
        .into_iter()
        .map(|(name, trace)| (name, trace.collectives, trace.step(rates)))
        .collect();
    let slowest = found.iter().max_by(|one, other| one.2.total_s.total_cmp(&other.2.total_s));
    let Some((_, _, step)) = slowest else { return Ok(()) };
    let measured_s = arguments.measured.map(Time::value);
    let off = measured_s.map(|it| step.total_s / it - 1.0);
    let collectives: u64 = found.iter().map(|(_, collectives, _)| collectives).sum();
    if arguments.json {
        let ranks: Vec<_> = found.iter().map(|(name, _, step)| json!({"file": name, "step": step})).collect();
        println!(
            "{}",
            json!({
                "rates": rates, "ranks": ranks, "predicted_s": step.total_s, "measured_s": measured_s, "off": off,
                "collectives": collectives,
            })
        );
        return Ok(());
    }
    println!("{}: a step of {} ranks", arguments.folder.display(), found.len());
    match measured_s.zip(off) {
        Some((measured_s, off)) => {
            println!("predicted {}, measured {}: {:+.1}%", time(step.total_s), time(measured_s), 100.0 * off)
        }
        None => println!("predicted {}; --measured sets what it took beside", time(step.total_s)),
    }
    table::print(&operators(step));
    println!(
        "predicted: each operator takes its launch, {}, and the longer of its operations at {} and its bytes at {}",
        arguments.launch, arguments.compute, arguments.memory
    );
    if collectives > 0 {
        println!(
            "{collectives} collective calls are left out: a trace of one rank does not say how long they wait"
        );
    }
    Ok(())
}

fn operators(step: &TracedStep) -> Vec<Vec<String>> {
    let mut rows = vec![["operator", "count", "GFLOP", "bytes", "predicted", ""].map(String::from).to_vec()];
    for it in step.operators.iter().take(LISTED) {
        rows.push(vec![
            it.name.clone(),
            grouped(it.count),
            format!("{:.3}", it.flops / 1e9),
            size(it.bytes),
            time(it.seconds),
            format!("{:.0}%", 100.0 * it.seconds / step.total_s),
        ]);
    }
    let rest = step.operators.iter().skip(LISTED);
    let (count, seconds) = rest.fold((0, 0.0), |(count, sum), it| (count + it.count, sum + it.seconds));
    if count > 0 {
        let share = format!("{:.0}%", 100.0 * seconds / step.total_s);
        rows.push(vec!["others".into(), grouped(count), String::new(), String::new(), time(seconds), share]);
    }
    rows
}
