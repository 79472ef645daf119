//! `polder doctor`: what this kernel offers to tiering, what is set up wrongly, and which hosts want room in caches of the pool that is set.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bytesize::ByteSize;
use clap::{Args, ValueHint};
use polder_attach::settings::Settings;
use polder_linux::Host;
use polder_linux::doctor::{Drift, Finding, Report, Severity, drift, examine, nodes_of};
use polder_platform::text_of;
use serde::Serialize;

use crate::agent::{JOURNAL, JournalArguments};
use crate::{Failure, kv};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object, which --against takes.
    #[arg(long)]
    json: bool,
    /// A report of another host; show where this one differs from it.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    against: Option<PathBuf>,
    #[command(flatten)]
    journal: JournalArguments,
    /// Examine a copy of /proc and /sys below this folder.
    #[arg(long, default_value = "/", value_name = "FOLDER", value_hint = ValueHint::DirPath, value_parser = crate::agent::copy_of_files)]
    root: PathBuf,
}

#[derive(Serialize)]
struct Answer {
    #[serde(flatten)]
    report: Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    drift: Option<Vec<Drift>>,
}

impl Arguments {
    /// Whether it looks at the pool that is set: beside this machine's own files.
    pub(crate) fn opens_a_pool(&self) -> bool {
        self.root == Path::new("/")
    }
}

/// Runs `polder doctor`. A problem, and a drift, is exit status 1.
pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    let journal = std::path::absolute(&arguments.journal.journal)?;
    let host = Host::below(&arguments.root);
    let mut report = examine(&host, &journal.to_string_lossy())?;
    // A machine without an agent has none at the default path.
    if journal != Path::new(JOURNAL) && !host.had(&journal.to_string_lossy()) {
        report.findings.push(Finding {
            severity: Severity::Problem,
            subject: "journal".to_owned(),
            found: format!("{}: no agent has run with such a journal", journal.display()),
            remedy: "name the agent's with --journal, or leave it out".to_owned(),
        });
    }
    let drift = match &arguments.against {
        Some(path) => {
            let advised = |error: &dyn std::fmt::Display| {
                Failure(format!("{error}; make one with: polder doctor --json"))
            };
            let text = text_of(&path.to_string_lossy()).map_err(|error| advised(&error))?;
            let reference: Report = serde_json::from_str(&text).map_err(|error| {
                advised(&format_args!("{} is no report of a doctor ({error})", path.display()))
            })?;
            Some(drift(&report, &reference))
        }
        None => None,
    };
    if arguments.opens_a_pool() {
        report.findings.extend(kv::findings(settings));
    }
    report.findings.sort_by_key(|finding| finding.severity);
    let is_ill = report.findings.iter().any(|finding| finding.severity == Severity::Problem)
        || drift.as_ref().is_some_and(|drift| !drift.is_empty());
    let answer = Answer { report, drift };
    match arguments.json {
        true => println!("{}", serde_json::to_string(&answer)?),
        false => print_report(&answer),
    }
    Ok(if is_ill { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print_report(Answer { report, drift }: &Answer) {
    println!("Linux {}", report.kernel);
    for finding in &report.findings {
        let severity = match finding.severity {
            Severity::Problem => "PROBLEM",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        println!("{severity}: {}: {}", finding.subject, finding.found);
        println!("  do: {}", finding.remedy);
    }
    if report.findings.is_empty() {
        println!("nothing is wrong");
    }
    match nodes_of(report, "") {
        nodes if nodes.is_empty() => {
            let [fast, slow] = ["fast", "slow"].map(|tier| nodes_of(report, tier));
            println!("fast tier: nodes {fast}; slow tier: nodes {slow}");
        }
        nodes => println!("one tier: nodes {nodes}"),
    }
    println!(
        "  {:<5} {:>5} {:>11} {:>13} {:>12} {:>9} {:>12}",
        "node", "tier", "bytes", "not movable", "kernel's own", "latency", "bandwidth"
    );
    for node in &report.nodes {
        let size = |bytes| ByteSize(bytes).display().iec().to_string();
        let of =
            |value: Option<u64>, unit: &str| value.map_or("-".to_owned(), |value| format!("{value} {unit}"));
        println!(
            "  {:<5} {:>5} {:>11} {:>13} {:>12} {:>9} {:>12}",
            node.node,
            node.tier,
            size(node.bytes),
            size(node.unmovable_bytes),
            size(node.kernel_bytes),
            of(node.latency_ns, "ns"),
            of(node.bandwidth_mbps, "MB/s")
        );
    }
    for interface in &report.interfaces {
        let by = if interface.by_version { ", by the version" } else { "" };
        match interface.present {
            true => println!("has    {} (Linux {}{by})", interface.name, interface.since),
            false => println!(
                "lacks  {} (Linux {}{by}); lost: {}",
                interface.name, interface.since, interface.lost_without
            ),
        }
    }
    for (path, value) in &report.settings {
        println!("  {path} = {value}");
    }
    for Drift { what, here, reference } in drift.iter().flatten() {
        println!("drift: {what}: {here} here, {reference} in the reference");
    }
    if drift.as_ref().is_some_and(Vec::is_empty) {
        println!("no drift from the reference");
    }
}
