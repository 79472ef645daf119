//! The loop from measurement to prediction, on this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use polder_platform::{DataError, Platform, Sharing};
use polder_sim::{Beside, Measured, Model, Place, Verified, step_through, verify};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::table;
use crate::Failure;
use crate::bench::{Row, collectives};

/// The benchmark deals its ranks out to so many hosts in turn.
const HOSTS: u16 = 2;
/// Rounds of a run: few, for a machine that others share is fast in some minutes and slow in others, and each size is to meet
/// as many of both.
const ROUNDS: u32 = 3;
/// One run in so many is below what counts. The least of a run's rounds is taken, for what disturbs a machine only adds; and not
/// the least of all runs, which is a matter of luck.
const BELOW: usize = 10;
/// What a prediction may be off.
const TOLERANCE: f64 = 0.15;

/// Predicts half of what this machine takes from the other half, measured beside predicted.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The machine, as `polder probe` wrote it.
    #[arg(long, default_value = "platform.toml")]
    platform: String,
    /// Rows of `polder bench collectives --json` to take instead of measuring; several times for several runs.
    #[arg(long, value_name = "FILE")]
    rows: Vec<PathBuf>,
    /// How often to measure everything, each rank kept on one processor: what a tenth of the runs stay below counts.
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// How many processes.
    #[arg(long, num_args = 1.., default_values_t = [2, 3, 4], value_parser = clap::value_parser!(u16).range(2..=64))]
    procs: Vec<u16>,
    /// Sizes in bytes, powers of two from 1024 on.
    #[arg(long, num_args = 1.., default_values_t = (12..=26).step_by(2).map(|log| 1_u64 << log), value_parser = size)]
    sizes: Vec<u64>,
    /// What `make demo` measured, to predict its step; out/train.json where that is there.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    demo: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A size that the name of a row tells exactly.
fn size(value: &str) -> Result<u64, String> {
    let size = value.parse().ok().filter(|size: &u64| size.is_power_of_two() && *size >= 1 << 10);
    size.ok_or_else(|| "expected a power of two from 1024 on".into())
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let platform = Platform::load(&arguments.platform)?;
    let sharing = platform.sharing.clone().ok_or_else(|| {
        let expected = "expected what ranks pay that exchange bytes: `polder probe` writes it";
        DataError::new(&arguments.platform, "sharing", expected)
    })?;
    let demo = demo(arguments)?;
    let verified = verify(&sharing, &measured(arguments)?);
    if verified.rows.is_empty() {
        let files = arguments.rows.iter().map(|file| format!("{}: ", file.display()));
        let known = sharing.exchange.keys().cloned().collect::<Vec<_>>().join(", ");
        return Err(Failure(format!(
            "{}expected all-reduces of `polder bench collectives --json` through {known}, found none",
            files.collect::<String>()
        )));
    }
    let (demo, left_out) = match demo.map(|demo| demo.predicted(&platform, &verified)).transpose() {
        Ok(demo) => (demo, None),
        Err(why) => (None, Some(why.to_string())),
    };
    let report = Report { verified: &verified, demo, left_out };
    if arguments.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&sharing, &report);
    }
    match (&arguments.demo, report.left_out) {
        // Who asked for it by name learns that it failed by the exit status too.
        (Some(file), Some(why)) => Err(Failure(format!("{}: not predicted: {why}", file.display()))),
        _ => Ok(()),
    }
}

/// Where `make demo` writes what it measured.
const DEMO: &str = "out/train.json";

/// What the demo measured.
#[derive(Deserialize)]
struct Demo {
    model: Model,
    ranks: u16,
    batch: u32,
    /// Seconds of a step by backend: a quarter is below the first, half below the second, three quarters below the third.
    steps: BTreeMap<String, [f64; 3]>,
}

/// The demo's step.
#[derive(Serialize)]
struct Stepped {
    measured_s: [f64; 3],
    predicted_s: f64,
    error: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    verified: &'a Verified,
    demo: Option<Stepped>,
    /// Why the demo's step was measured and is not predicted.
    left_out: Option<String>,
}

fn demo(arguments: &Arguments) -> Result<Option<Demo>, Failure> {
    let path = match &arguments.demo {
        Some(path) => path.as_path(),
        None if Path::new(DEMO).exists() => Path::new(DEMO),
        None => return Ok(None),
    };
    let wrong = |why: String| Failure(format!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot read it: {error}")))?;
    let demo: Demo = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("expected what `make demo` measured: {error}")))?;
    demo.model.check().map_err(|(key, problem)| wrong(format!("model.{key}: {problem}")))?;
    Ok(Some(demo))
}

impl Demo {
    /// Beside the prediction: copies of the model on two emulated hosts, in 32 bits, through a software-coherent pool.
    fn predicted(&self, platform: &Platform, verified: &Verified) -> Result<Stepped, Failure> {
        let missing = |what: &str| Failure(format!("expected {what}"));
        let measured_s =
            *self.steps.get("polder").ok_or_else(|| missing("steps of polder in what it measured"))?;
        let exchange = "software";
        if !verified.sharing.exchange.contains_key(exchange) {
            return Err(missing("an exchange software in the platform"));
        }
        let micro_batch = self.batch / u32::from(self.ranks.max(1));
        let layout = json!({ "tp": 1, "dp": self.ranks, "batch": self.batch, "micro_batch": micro_batch, "flash": true,
            "precision": "fp32" });
        let layout = serde_json::from_value(layout)?;
        let hosts: Vec<u16> = (0..self.ranks).map(|rank| rank % HOSTS).collect();
        let predicted_s = step_through(platform, (verified, exchange), (&self.model, &layout), &hosts)?;
        Ok(Stepped { measured_s, predicted_s, error: predicted_s / measured_s[1] - 1.0 })
    }
}

/// Each case over all runs.
fn measured(arguments: &Arguments) -> Result<Vec<Measured>, Failure> {
    let mut runs = arguments.rows.iter().map(|file| read(file)).collect::<Result<Vec<_>, _>>()?;
    if runs.is_empty() {
        let what = collectives::Arguments {
            procs: arguments.procs.clone(),
            sizes: arguments.sizes.clone(),
            rounds: ROUNDS,
            alone: true,
            pin: true,
            without_rust: true,
        };
        for run in 1..=arguments.runs {
            eprintln!("polder: measuring all-reduces, run {run} of {}", arguments.runs);
            let mut rows = Vec::new();
            collectives::run(&what, |row| {
                rows.push(row.clone());
                Ok(())
            })?;
            runs.push(rows);
        }
    }
    // A row stands there once for each peer that it is beside.
    runs.iter_mut().for_each(|rows| rows.dedup_by(|row, before| row.case == before.case));
    let (mut seen, mut order) = (BTreeMap::<&str, Vec<&Row>>::new(), Vec::new());
    for row in runs.iter().flatten() {
        let rows = seen.entry(&row.case).or_default();
        if rows.is_empty() {
            order.push(&row.case);
        }
        rows.push(row);
    }
    let rows = order.iter().filter_map(|case| {
        let rows = &seen[case.as_str()];
        let least: Vec<_> = rows.iter().map(|row| row.low).collect();
        let low = least.iter().copied().fold(f64::INFINITY, f64::min);
        let high = rows.iter().map(|row| row.high).fold(0.0, f64::max);
        let [even, odd] = [0, 1].map(|from| undisturbed(least.iter().skip(from).step_by(2)));
        let halves = even.zip(odd).map(|(even, odd)| even.max(odd) / even.min(odd) - 1.0);
        Some(Measured { halves, ..parsed(case, undisturbed(&least)?, [low, high])? })
    });
    Ok(rows.collect())
}

/// The rows of a file.
fn read(file: &Path) -> Result<Vec<Row>, Failure> {
    let wrong = |why: String| Failure(format!("{}: {why}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(format!("cannot read it: {error}")))?;
    let row = |(line, number): (&str, usize)| {
        let row: Row = serde_json::from_str(line)
            .map_err(|error| wrong(format!("line {number}: expected a row of a benchmark: {error}")))?;
        match row.low > 0.0 {
            true => Ok(row),
            false => Err(wrong(format!("line {number}: low: expected more than 0, found {}", row.low))),
        }
    };
    text.lines().zip(1..).map(row).collect()
}

/// What it took in the best tenth of the runs, or in the best run where they are few; `None` of no run.
fn undisturbed<'a>(least: impl IntoIterator<Item = &'a f64>) -> Option<f64> {
    let mut least: Vec<_> = least.into_iter().copied().collect();
    least.sort_by(f64::total_cmp);
    least.get(least.len().saturating_sub(1) / BELOW).copied()
}

/// What a row says, in microseconds; `None` for one of another collective or of a library that is not predicted.
fn parsed(case: &str, us: f64, spread: [f64; 2]) -> Option<Measured> {
    let words: Vec<_> = case.split(' ').collect();
    let ["all-reduce", size, unit, procs, "procs", exchange, ref place @ ..] = words[..] else { return None };
    let place = match place {
        ["staged"] => Place::Staged,
        ["in-pool"] => Place::InPool,
        _ => return None,
    };
    let unit = match unit {
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return None,
    };
    let procs: u16 = procs.parse().ok()?;
    let bytes = size.parse::<u64>().ok().filter(|size| *size > 0)? * unit;
    Some(Measured {
        case: case.into(),
        exchange: exchange.into(),
        place,
        hosts: (0..procs).map(|rank| rank % HOSTS).collect(),
        bytes,
        seconds: us / 1e6,
        spread_s: spread.map(|us| us / 1e6),
        halves: None,
    })
}

/// `NaN` of nothing.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count)
}

fn print(before: &Sharing, Report { verified, demo, left_out }: &Report) {
    println!("measured: on this machine, in the best tenth of the runs, or in the best where they are few.");
    println!(
        "simulated: along the schedules that ran, with constants fitted to the rows that say so, and with what that missed of \
         fitted rows like each."
    );
    let mut rows =
        vec![["", "measured us", "least", "greatest", "simulated us", "error"].map(String::from).to_vec()];
    for row in &verified.rows {
        let [low, high] = row.measured.spread_s;
        let error = format!("{:+.0}%", row.error() * 100.0);
        let us = |seconds: f64| format!("{:.1}", seconds * 1e6);
        rows.push(vec![
            format!("  {}", row.measured.case),
            us(row.measured.seconds),
            us(low),
            us(high),
            us(row.predicted_s),
            if row.fitted { "fitted".into() } else { error },
        ]);
    }
    table::print(&rows);
    println!();
    for (name, found) in &verified.sharing.exchange {
        if verified.judged(Some(name)).next().is_none() {
            continue;
        }
        println!("{name}: {found}");
        println!("  before: {}", before.exchange[name]);
        println!("  {}", summary(verified, Some(name)));
    }
    println!("all: {}", summary(verified, None));
    match (demo, left_out) {
        (Some(Stepped { measured_s: [low, median, high], predicted_s, error }), _) => println!(
            "the demo's step: measured {:.1} ms ({:.1} to {:.1}), simulated {:.1} ms, {:+.0}%",
            median * 1e3,
            low * 1e3,
            high * 1e3,
            predicted_s * 1e3,
            error * 100.0
        ),
        (None, Some(why)) => println!("the demo's step: not predicted: {why}"),
        (None, None) => println!("the demo's step: not measured; `make demo` does, into {DEMO}"),
    }
}

/// How far the judged rows are off, by what each way of predicting them says.
fn summary(verified: &Verified, exchange: Option<&str>) -> String {
    let off = |says: fn(&Beside) -> Option<f64>| {
        let error = |row: &Beside| Some((says(row)? / row.measured.seconds - 1.0).abs());
        let errors: Vec<_> = verified.judged(exchange).filter_map(error).collect();
        let near = errors.iter().filter(|error| **error <= TOLERANCE).count();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        let [mean, worst] = [mean(errors.iter().copied()), worst].map(|error| error * 100.0);
        let tolerance = TOLERANCE * 100.0;
        format!(
            "{} judged rows: mean {mean:.1}%, worst {worst:.1}%; {near} within {tolerance:.0}%",
            errors.len()
        )
    };
    if verified.judged(exchange).next().is_none() {
        return "no row is judged: take more sizes, or more numbers of processes".into();
    }
    let halves: Option<Vec<_>> = verified.judged(exchange).map(|row| row.measured.halves).collect();
    let repeated = match halves {
        Some(halves) => {
            format!("halves of the runs are {:.1}% from each other", mean(halves.into_iter()) * 100.0)
        }
        None => "one run, which says nothing of how it repeats".into(),
    };
    let mut lines = vec![
        format!("{}; {repeated}", off(|row| Some(row.predicted_s))),
        format!("without what fitted rows say of rows like them: {}", off(|row| Some(row.walked_s))),
    ];
    if verified.judged(exchange).any(|row| row.linear_s.is_some()) {
        lines.push(format!(
            "a latency and a bandwidth for each pool, place and number of processes: {}",
            off(|row| row.linear_s)
        ));
    }
    lines.join("\n    ")
}

#[cfg(test)]
mod tests {
    use polder_pool::wait::Patience;

    #[test]
    fn a_rank_is_walked_with_the_patience_that_the_pool_has() {
        assert_eq!(polder_sim::LOOKS, Patience::SHARED.spins);
    }
}
