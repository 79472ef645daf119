//! `polder verify`: the protocols in the incoherent model.

use std::ffi::OsStr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Args};
use indicatif::{ProgressBar, ProgressStyle};
use polder_mem::Memory;
use polder_mem::model::{Explorer, LITMUS_BYTES, Suite, Tally, canaries, replay, run_host};
use polder_pool::session::Session;
use polder_pool::settings::Settings;
use polder_pool::verify::suites;
use polder_pool::{Object, Pool, PoolError, each};

use crate::Failure;

/// Explores the protocols in the incoherent model.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Suites to run, by name or by the beginning of it; all when none is named.
    #[arg(value_parser = Beginning, hide_possible_values = true)]
    suites: Vec<String>,
    /// List the suites and what each shows.
    #[arg(long)]
    list: bool,
    /// Schedules of each suite.
    #[arg(long, short = 'n', default_value_t = 10_000)]
    schedules: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Run one schedule, that of --seed, and print its last operations when it fails.
    #[arg(long, conflicts_with_all = ["mutants", "list"], requires = "suites")]
    replay: bool,
    /// Drop or weaken each flush and fence in turn: every mutant must be caught, or be listed as harmless.
    #[arg(long)]
    mutants: bool,
    /// Run the protocols that are known to be wrong: each must be caught.
    #[arg(long, conflicts_with_all = ["mutants", "replay", "list"])]
    canaries: bool,
    /// Run the litmus tests on the pool itself, with another host that gives the other role.
    #[arg(long, value_name = "ROLE", value_parser = clap::value_parser!(u64).range(0..2))]
    litmus: Option<u64>,
    /// Rounds of each litmus test.
    #[arg(long, default_value_t = 10_000)]
    rounds: u64,
    /// OS threads.
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
        Some(Box::new(suites().into_iter().map(|suite| PossibleValue::new(suite.name))))
    }
}

impl Arguments {
    /// Whether it works on a pool, and not in the model.
    pub(crate) const fn opens_a_pool(&self) -> bool {
        self.litmus.is_some()
    }
}

/// Runs what was asked for.
pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    if let Some(role) = arguments.litmus {
        return litmus(settings, role, arguments.rounds);
    }
    if arguments.canaries {
        return Ok(sing(arguments.seed));
    }
    let chosen = choose(&arguments.suites)?;
    if arguments.list {
        for suite in &chosen {
            println!("{:<28} {}", suite.name, suite.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut failed = 0;
    for suite in &chosen {
        let good = match (arguments.replay, arguments.mutants) {
            (true, _) => replay_one(suite, arguments.seed),
            (_, true) => mutate(suite, arguments),
            _ => explore(suite, arguments),
        };
        failed += u32::from(!good);
    }
    println!("{} passed, {failed} failed", chosen.len() as u32 - failed);
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs every protocol that is known to be wrong until it is caught.
fn sing(seed: u64) -> ExitCode {
    let mut failed = 0;
    let canaries = canaries();
    for canary in &canaries {
        let Suite { name, about, .. } = &canary.wrong;
        let report = Explorer::new(name, canary.within).first_seed(seed).run(|seed| canary.wrong.run(seed));
        match report.failures.first() {
            Some(_) => println!("{name}: caught in schedule {} ({about})", report.schedules),
            None => println!("{name}: NOT caught in {} schedules ({about})", report.schedules),
        }
        failed += usize::from(report.failed == 0);
    }
    println!("{} passed, {failed} failed", canaries.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the litmus tests in an object that role 0 makes and role 1 opens.
fn litmus(settings: &Settings, role: u64, rounds: u64) -> Result<ExitCode, Failure> {
    const NAME: &str = "/polder/litmus";
    let session = Session::open(settings)?;
    let tallies = each!(session.pool(), pool => {
        let patience = pool.member().timeout;
        let object = match role {
            0 => make_or_take(pool, NAME)?,
            _ => open_soon(pool, NAME).map_err(|error| Failure(format!("{error}; has role 0 been started?")))?,
        };
        let tallies = run_host(pool.memory(), object.at(), role, rounds, patience);
        pool.close(object);
        if role == 0 {
            pool.destroy(NAME)?;
        }
        tallies?
    });
    let mut forbidden = 0;
    for Tally { test, outcomes, forbidden: bad } in &tallies {
        let feared = outcomes.get(test.feared).copied().unwrap_or(0);
        println!("{:<60} {rounds} rounds, feared outcome seen {feared}, forbidden {bad}", test.name);
        forbidden += bad;
    }
    if forbidden == 0 {
        println!("nothing forbidden was seen");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{forbidden} forbidden outcomes: this memory is weaker than docs/memory-model.md says; do not use it"
    );
    Ok(ExitCode::FAILURE)
}

/// Makes the object, or takes what a run that was killed has left: the two roles find each other anew in it.
fn make_or_take<M: Memory>(pool: &Pool<M>, name: &str) -> Result<Object, PoolError> {
    match pool.create(name, LITMUS_BYTES) {
        Err(PoolError::Exists { .. }) => pool.open(name),
        made => made,
    }
}

/// Opens what the other role is about to make.
fn open_soon<M: Memory>(pool: &Pool<M>, name: &str) -> Result<Object, PoolError> {
    let deadline = Instant::now() + pool.member().timeout;
    loop {
        match pool.open(name) {
            Err(PoolError::NotFound { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10))
            }
            opened => return opened,
        }
    }
}

fn choose(names: &[String]) -> Result<Vec<Suite>, Failure> {
    let all = suites();
    if names.is_empty() {
        return Ok(all);
    }
    let mut chosen = Vec::new();
    for name in names {
        let found: Vec<_> =
            all.iter().filter(|suite| suite.name.starts_with(name.as_str())).cloned().collect();
        if found.is_empty() {
            let known: Vec<_> = all.iter().map(|suite| suite.name).collect();
            return Err(Failure(format!("no suite begins with {name:?}; there are {}", known.join(", "))));
        }
        chosen.extend(found);
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
    println!("{report}");
    for failure in &report.failures {
        println!("{failure}\nsee it again: polder verify {} --replay --seed {}", suite.name, failure.seed);
    }
    report.failed == 0
}

fn mutate(suite: &Suite, arguments: &Arguments) -> bool {
    let bar = bar(suite.name, 0);
    bar.enable_steady_tick(Duration::from_millis(200));
    let explorer =
        Explorer::new(suite.name, arguments.schedules).first_seed(arguments.seed).threads(arguments.threads);
    let judged = suite.mutants(&explorer);
    bar.finish_and_clear();
    match judged {
        Ok(found) => {
            let caught = found.iter().filter(|mutant| mutant.caught_at.is_some()).count();
            println!(
                "{}: {} mutants, {caught} caught, {} argued harmless",
                suite.name,
                found.len(),
                found.len() - caught
            );
            for mutant in &found {
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
