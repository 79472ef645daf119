//! `polder verify`: litmus tests of the memory that two hosts share.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressFinish};
use polder_attach::session::Session;
use polder_attach::settings::Settings;
use polder_mem::Memory;
use polder_mem::litmus::{Family, LITMUS_BYTES, Tally, Verdict, run_host};
use polder_pool::{Object, Pool, PoolError};

use crate::Failure;

/// Tests the memory of a pool.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Run the litmus tests on the pool itself. One host gives role 0, another host role 1, at the same time.
    #[arg(long, value_name = "ROLE", required = true, value_parser = clap::value_parser!(u64).range(0..2))]
    litmus: u64,
    /// Rounds of each litmus test.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
}

/// Runs the litmus tests in an object that role 0 makes and role 1 opens.
pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> Result<ExitCode, Failure> {
    let Arguments { litmus: role, rounds } = *arguments;
    const NAME: &str = "/polder/litmus";
    let begin = Instant::now();
    let session = Session::open(settings)?;
    let pool = session.pool();
    let patience = pool.member().timeout;
    // Where stderr is a terminal.
    let shown = ProgressBar::new_spinner().with_finish(ProgressFinish::AndClear);
    shown.set_message("waiting for the other role");
    let object = match role {
        0 => make_or_take(pool, NAME)?,
        _ => open_soon(pool, NAME).map_err(|error| Failure(format!("{error}; has role 0 been started?")))?,
    };
    let progress = |done: usize, all: usize| {
        shown.set_message(format!("litmus tests: {done} of {all} done"));
    };
    let tallies = run_host(pool.memory(), object.at(), role, rounds, patience, &progress);
    shown.finish_and_clear();
    pool.close(object);
    if role == 0 {
        pool.destroy(NAME)?;
    }
    let tallies = tallies?;
    for tally @ Tally { test, forbidden, relaxed, .. } in &tallies {
        let kind = relaxed.map_or("right".to_owned(), |times| format!("control, seen {times} times"));
        println!("{:<66} {} rounds, {kind}, forbidden {forbidden}", test.name, tally.rounds());
    }
    Ok(conclude(&Family::of(&tallies), begin.elapsed()))
}

/// Prints what the run proves of each rule and in all, and returns the exit status that says so.
fn conclude(families: &[Family], elapsed: Duration) -> ExitCode {
    println!();
    families.iter().for_each(|family| println!("{family}"));
    let verdict = families.iter().map(Family::verdict).max().unwrap_or(Verdict::Inconclusive);
    let rounds: u64 = families.iter().map(|family| family.right.1 + family.controls.1).sum();
    let (meaning, code) = match verdict {
        Verdict::Pass => ("the controls were seen, and nothing forbidden", ExitCode::SUCCESS),
        Verdict::Inconclusive => (
            "nothing forbidden was seen, but controls were not seen either, so that a mistake could have passed; give more \
             --rounds on idle cores. Hosts of one kernel share coherent caches, whose controls never show",
            ExitCode::from(3),
        ),
        Verdict::Fail => (
            "forbidden outcomes were seen: this memory is weaker than docs/memory-model.md says; do not use it",
            ExitCode::FAILURE,
        ),
    };
    println!("{verdict}: {meaning} ({rounds} rounds, {:.1} s)", elapsed.as_secs_f64());
    code
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
