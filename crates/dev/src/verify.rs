//! `polder-dev verify`: the protocols in the incoherent model.

mod sites;

use std::ffi::OsStr;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Args};
use indicatif::{ProgressBar, ProgressStyle};
use polder_mem::Coherence;
use polder_mem::model::{Explorer, Mutant, Report, Suite, replay};
use polder_pool::verify::suites;
use serde_json::json;

use crate::Failure;

/// Explores the protocols in the incoherent model.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Suites to run, or canaries with --canaries, by the beginning of their names [default: all].
    #[arg(value_parser = Beginning, hide_possible_values = true)]
    suites: Vec<String>,
    /// List the suites, and what each one shows.
    #[arg(long)]
    list: bool,
    /// Random schedules of each suite.
    #[arg(long, short = 'n', default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    schedules: u64,
    /// Seed of the first schedule.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Run only the schedule of --seed, and print its last operations if it fails.
    #[arg(long, conflicts_with_all = ["mutants", "list"], requires = "suites")]
    replay: bool,
    /// Drop or weaken each flush and fence in turn. The suite must fail each time, unless the change is listed as harmless.
    #[arg(long)]
    mutants: bool,
    /// Random schedules of each change that is listed as harmless [default: as many as of each other change].
    #[arg(long, value_name = "SCHEDULES", requires = "mutants", value_parser = clap::value_parser!(u64).range(1..))]
    harmless: Option<u64>,
    /// Run protocols that are known to be wrong: each must fail. With --replay, print how one fails.
    #[arg(long, conflicts_with = "mutants")]
    canaries: bool,
    /// List the flushes and fences of the pool that no suite reaches. There must be none.
    #[arg(long, conflicts_with_all = ["mutants", "canaries", "replay", "list", "json", "suites"])]
    sites: bool,
    /// Print a JSON object for each suite, canary or mutant.
    #[arg(long, conflicts_with = "replay")]
    json: bool,
    /// Run every schedule on this kind of memory: coherent, software or hdm-db [default: as the seed draws].
    #[arg(long, value_name = "MODE", conflicts_with_all = ["mutants", "canaries", "list"])]
    coherence: Option<Coherence>,
    /// Threads.
    #[arg(long, short = 'j', default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    threads: usize,
}

/// The beginning of a suite's name: any word, and shells complete it to a name.
#[derive(Clone)]
struct Beginning;

impl TypedValueParser for Beginning {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&Arg>,
        word: &OsStr,
    ) -> clap::error::Result<String> {
        StringValueParser::new().parse_ref(command, argument, word)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(names().into_iter().map(PossibleValue::new)))
    }
}

/// Runs what was asked for.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    if arguments.sites {
        return sites::run(arguments.schedules, arguments.seed, arguments.threads);
    }
    let (all, kind) = match arguments.canaries {
        true => (canaries().into_iter().map(|(canary, _)| canary).collect(), "canary"),
        false => (suites(), "suite"),
    };
    let mut chosen = choose(all, kind, &arguments.suites)?;
    if let Some(coherence) = arguments.coherence {
        let (on, not): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|suite| suite.can_be_on(coherence));
        for Suite { name, .. } in not {
            eprintln!("{name}: not on {coherence}, because its processes share their caches");
        }
        chosen = on.into_iter().map(|suite| suite.on(coherence)).collect();
    }
    if arguments.list {
        for Suite { name, about, .. } in &chosen {
            match arguments.json {
                true => println!("{}", json!({ "name": name, "about": about })),
                false => println!("{name:<28} {about}"),
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut failed = 0;
    for suite in &chosen {
        let good = match arguments {
            Arguments { replay: true, seed, canaries, .. } => replay_one(suite, *seed) != *canaries,
            Arguments { canaries: true, .. } => is_caught(suite, arguments),
            Arguments { mutants: true, .. } => mutate(suite, arguments),
            _ => explore(suite, arguments),
        };
        failed += u32::from(!good);
    }
    if !arguments.json {
        println!("{} passed, {failed} failed", chosen.len() as u32 - failed);
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Schedules within which the wrong protocols of the pool are caught.
const WITHIN: u64 = 50_000;

/// Every protocol that is known to be wrong, with the schedules within which it is caught.
fn canaries() -> Vec<(Suite, u64)> {
    let raw = polder_mem::model::canaries().into_iter().map(|canary| (canary.wrong, canary.within));
    raw.chain(polder_pool::verify::canaries().into_iter().map(|canary| (canary, WITHIN))).collect()
}

/// The names of all suites and canaries.
fn names() -> Vec<&'static str> {
    suites().iter().map(|suite| suite.name).chain(canaries().iter().map(|(canary, _)| canary.name)).collect()
}

/// Runs a protocol that is known to be wrong until it is caught.
fn is_caught(canary: &Suite, arguments: &Arguments) -> bool {
    let Suite { name, about, .. } = canary;
    let known = canaries().into_iter().find(|(other, _)| other.name == *name);
    let within = known.map_or(WITHIN, |(_, within)| within);
    let report = Explorer::new(name, within).first_seed(arguments.seed).run(|seed| canary.run(seed));
    if arguments.json {
        let caught_at = report.failures.first().map(|failure| failure.seed);
        println!("{}", json!({ "canary": name, "schedules": report.schedules, "caught_at": caught_at }));
        return report.failed > 0;
    }
    match report.failures.first() {
        Some(failure) => {
            println!("{name}: caught in schedule {} ({about})", report.schedules);
            println!("  see it again: polder-dev verify --canaries {name} --replay --seed {}", failure.seed);
        }
        None => println!("{name}: NOT caught in {} schedules ({about})", report.schedules),
    }
    report.failed > 0
}

/// Those of `all` whose names begin with one of `names`.
fn choose(all: Vec<Suite>, kind: &str, names: &[String]) -> Result<Vec<Suite>, Failure> {
    if names.is_empty() {
        return Ok(all);
    }
    let mut chosen = Vec::new();
    for name in names {
        let matching: Vec<_> =
            all.iter().filter(|suite| suite.name.starts_with(name.as_str())).cloned().collect();
        if matching.is_empty() {
            let known: Vec<_> = all.iter().map(|suite| suite.name).collect();
            return Err(Failure(format!("no {kind} begins with {name:?}; there are {}", known.join(", "))));
        }
        chosen.extend(matching);
    }
    Ok(chosen)
}

fn explore(suite: &Suite, arguments: &Arguments) -> bool {
    let bar = bar(suite.name, arguments.schedules);
    let progress = |done| bar.set_position(done);
    let explorer = Explorer::new(suite.name, arguments.schedules)
        .first_seed(arguments.seed)
        .threads(arguments.threads)
        .progress(&progress);
    let report = explorer.run(|seed| suite.run(seed));
    bar.finish_and_clear();
    if arguments.json {
        let seeds: Vec<_> = report.failures.iter().map(|failure| failure.seed).collect();
        let Report { first_seed, schedules, failed, elapsed, tally, .. } = &report;
        let line = json!({
            "suite": suite.name, "first_seed": first_seed, "schedules": schedules, "failed": failed, "failing_seeds": seeds,
            "software": tally.software, "coherent": tally.coherent, "hdm-db": tally.hdm_db, "operations": tally.operations, "process_deaths": tally.process_deaths, "host_deaths": tally.host_deaths,
            "pauses": tally.pauses, "reached": tally.reached, "seconds": elapsed.as_secs_f64(),
        });
        println!("{line}");
        return report.failed == 0;
    }
    println!("{report}");
    let kind = arguments.coherence.map_or_else(String::new, |kind| format!(" --coherence {kind}"));
    for failure in &report.failures {
        println!(
            "{failure}\nsee it again: polder-dev verify {}{kind} --replay --seed {}",
            suite.name, failure.seed
        );
    }
    report.failed == 0
}

fn mutate(suite: &Suite, arguments: &Arguments) -> bool {
    let bar = bar(suite.name, 0);
    bar.enable_steady_tick(Duration::from_millis(200));
    let explorer = Explorer::new(suite.name, arguments.schedules)
        .listed(arguments.harmless.unwrap_or(arguments.schedules))
        .first_seed(arguments.seed)
        .threads(arguments.threads);
    let judged = suite.mutants(&explorer);
    bar.finish_and_clear();
    match judged {
        Ok(mutants) if arguments.json => {
            for mutant @ Mutant { schedules, caught_at, .. } in &mutants {
                println!(
                    "{}",
                    json!({ "suite": suite.name, "mutant": mutant.to_string(), "schedules": schedules, "caught_at": caught_at })
                );
            }
            true
        }
        Err(table) if arguments.json => {
            println!("{}", json!({ "suite": suite.name, "survived": table.to_string() }));
            false
        }
        Ok(mutants) => {
            let caught = mutants.iter().filter(|mutant| mutant.caught_at.is_some()).count();
            println!(
                "{}: {} mutants, {caught} caught, {} argued harmless",
                suite.name,
                mutants.len(),
                mutants.len() - caught
            );
            for mutant in &mutants {
                println!("  {mutant}");
            }
            true
        }
        Err(table) => {
            println!("{table}");
            false
        }
    }
}

fn replay_one(suite: &Suite, seed: u64) -> bool {
    match replay(seed, |seed| suite.run(seed)) {
        Ok(()) => {
            println!("{}: seed {seed} does not fail", suite.name);
            true
        }
        Err(failure) => {
            println!("{}: {failure}", suite.name);
            false
        }
    }
}

/// A bar on a terminal, nothing elsewhere.
fn bar(name: &'static str, schedules: u64) -> ProgressBar {
    let bar = ProgressBar::new(schedules);
    if let Ok(style) =
        ProgressStyle::with_template("{msg} {wide_bar} {human_pos}/{human_len} {per_sec} {eta}")
    {
        bar.set_style(style);
    }
    bar.set_message(name);
    bar
}
