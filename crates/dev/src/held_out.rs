//! The loop from measurement to prediction, on this machine.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use polder_dev::judge::measured::{Comparison, Measured, Verified, step_through, verify};
use polder_dev::walk::MessagePlace;
use polder_platform::{DataError, Platform, Sharing, text_of};
use polder_sim::Model;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::Failure;
use polder_measure::{Row, Sample};
use polder_plan::table;

use crate::bench::python::{Collectives, Rounds, Runs};

/// The benchmark deals its ranks out to so many hosts in turn.
const HOSTS: u16 = 2;
/// Rounds of a run: few, because a machine that others share is fast in some minutes and slow in others, and each size is to meet
/// as many of both.
const ROUNDS: u32 = 3;
/// What is further off is printed as short.
const TOLERANCE: f64 = 0.15;

/// Predicts all-reduces of this machine from others that it was measured to take, measured beside predicted.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The machine, as `polder probe` wrote it.
    #[arg(long, default_value = "platform.toml")]
    platform: String,
    /// Use these rows of `polder-dev bench collectives --json` instead of measuring. Give it once for each run.
    #[arg(long, value_name = "FILE")]
    rows: Vec<PathBuf>,
    /// How often to measure everything. The median of the runs counts; each rank is kept on one processor.
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Numbers of processes.
    #[arg(long, num_args = 1.., default_values_t = [2, 3, 4], value_parser = clap::value_parser!(u16).range(2..=64))]
    procs: Vec<u16>,
    /// Sizes in bytes, powers of two from 1024 on.
    #[arg(long, num_args = 1.., default_values_t = (12..=26).step_by(2).map(|log| 1_u64 << log), value_parser = size)]
    sizes: Vec<u64>,
    /// Predict the step of `make demo` too, from this file of its measurements [default: out/train.json, if it exists].
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
            "{}expected all-reduces of `polder-dev bench collectives --json` through {known}, found none",
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
    // The status says whether it could be judged, not how well it came out.
    if verified.judged(None).next().is_none() {
        return Err(Failure(NONE_JUDGED.into()));
    }
    match (&arguments.demo, report.left_out) {
        // A demo that was named and cannot be predicted is an error.
        (Some(file), Some(why)) => Err(Failure(format!("{}: not predicted: {why}", file.display()))),
        _ => Ok(()),
    }
}

const NONE_JUDGED: &str =
    "no row is judged: all are fitted; take more than one size, or more than one number of processes";

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
    let text = text_of(&path.to_string_lossy())?;
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
        let (procs, sizes) = (arguments.procs.clone(), arguments.sizes.clone());
        let of = Runs { procs, sizes, rounds: Rounds { rounds: ROUNDS } };
        let what = Collectives { runs: of, alone: true, pin: true, without_rust: true };
        for run in 1..=arguments.runs {
            eprintln!("polder: measuring all-reduces, run {run} of {}", arguments.runs);
            let mut rows = Vec::new();
            what.run(|row| {
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
        let low = rows.iter().map(|row| row.low).fold(f64::INFINITY, f64::min);
        let high = rows.iter().map(|row| row.high).fold(0.0, f64::max);
        let [all, even, odd] = [(0, 1), (0, 2), (1, 2)].map(|(from, step)| {
            let runs = rows.iter().skip(from).step_by(step).map(|row| row.value);
            Sample::of(runs.collect()).map(|sample| sample.median)
        });
        let halves = even.zip(odd).map(|(even, odd)| even.max(odd) / even.min(odd) - 1.0);
        Some(Measured { halves, ..parsed(case, all?, [low, high])? })
    });
    Ok(rows.collect())
}

/// The rows of a file.
fn read(file: &Path) -> Result<Vec<Row>, Failure> {
    let wrong = |why: String| Failure(format!("{}: {why}", file.display()));
    let text = text_of(&file.to_string_lossy())?;
    let row = |(line, number): (&str, usize)| {
        let row: Row = serde_json::from_str(line)
            .map_err(|error| wrong(format!("line {number}: expected a row of a benchmark: {error}")))?;
        match [("low", row.low), ("value", row.value)].into_iter().find(|(_, us)| *us <= 0.0) {
            None => Ok(row),
            Some((key, us)) => Err(wrong(format!("line {number}: {key}: expected more than 0, found {us}"))),
        }
    };
    text.lines().zip(1..).map(row).collect()
}

/// What a row says, in microseconds; `None` for one of another collective or of a library that is not predicted.
fn parsed(case: &str, us: f64, spread: [f64; 2]) -> Option<Measured> {
    let words: Vec<_> = case.split(' ').collect();
    let ["all-reduce", size, unit, procs, "procs", exchange, ref place @ ..] = words[..] else { return None };
    let place = match place {
        ["staged"] => MessagePlace::Staged,
        ["in-pool"] => MessagePlace::InPool,
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
    println!("measured: on this machine, the median of the runs.");
    println!(
        "simulated: along the schedules that ran. Rows of every other size and of every other number of processes are fitted: they"
    );
    println!(
        "give the constants, and what the walk missed of rows like each. All other rows are judged. short: off by more than {}.",
        percent(TOLERANCE)
    );
    println!(
        "interpolation: plain, of the fitted rows, straight in the logarithms of bytes, processes and time."
    );
    let mut rows = vec![table::head(
        "| measured us | least | greatest | simulated us | error | interpolation | its error",
    )];
    for row in &verified.rows {
        let [low, high] = row.measured.spread_s;
        let us = |seconds: f64| format!("{:.1}", seconds * 1e6);
        let mut cells = vec![format!("  {}", row.measured.case)];
        cells.extend([row.measured.seconds, low, high, row.predicted_s].map(us));
        if row.fitted {
            cells.push("fitted".into());
        } else {
            cells.push(marked(row.error()));
            if let Some(seconds) = row.interpolated_s {
                cells.extend([us(seconds), marked(seconds / row.measured.seconds - 1.0)]);
            }
        }
        rows.push(cells);
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
            "the demo's step: measured {:.1} ms ({:.1} to {:.1}), simulated {:.1} ms, {}",
            median * 1e3,
            low * 1e3,
            high * 1e3,
            predicted_s * 1e3,
            marked(*error)
        ),
        (None, Some(why)) => println!("the demo's step: not predicted: {why}"),
        (None, None) => println!("the demo's step: not measured; `make demo` does, into {DEMO}"),
    }
}

fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

/// An error as it is printed.
fn marked(error: f64) -> String {
    let short = if error.abs() > TOLERANCE { " short" } else { "" };
    format!("{:+.0}%{short}", error * 100.0)
}

/// How far the judged rows are off, by one way of predicting them.
struct Off {
    rows: usize,
    mean: f64,
    worst: f64,
    near: usize,
}

impl Off {
    fn of<'a>(judged: impl Iterator<Item = &'a Comparison>, says: fn(&Comparison) -> Option<f64>) -> Self {
        let errors: Vec<_> =
            judged.filter_map(|row| Some((says(row)? / row.measured.seconds - 1.0).abs())).collect();
        Self {
            rows: errors.len(),
            mean: mean(errors.iter().copied()),
            worst: errors.iter().copied().fold(0.0, f64::max),
            near: errors.iter().filter(|error| **error <= TOLERANCE).count(),
        }
    }
}

impl fmt::Display for Off {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, mean, worst, near } = self;
        let [mean, worst] = [mean, worst].map(|error| error * 100.0);
        write!(
            f,
            "{rows} judged rows: mean {mean:.1}%, worst {worst:.1}%; {near} within {}",
            percent(TOLERANCE)
        )
    }
}

/// How far the judged rows are off, by each way of predicting them, and what falls short.
fn summary(verified: &Verified, exchange: Option<&str>) -> String {
    let off = |says| Off::of(verified.judged(exchange), says);
    let predicted = off(|row| Some(row.predicted_s));
    if predicted.rows == 0 {
        return NONE_JUDGED.into();
    }
    let halves: Option<Vec<_>> = verified.judged(exchange).map(|row| row.measured.halves).collect();
    let repeated = match halves {
        Some(halves) => {
            format!("halves of the runs are {:.1}% from each other", mean(halves.into_iter()) * 100.0)
        }
        None => "one run, which says nothing of how it repeats".into(),
    };
    let interpolated = off(|row| row.interpolated_s);
    let linear = off(|row| row.linear_s);
    let mut lines = vec![format!("{predicted}; {repeated}")];
    let short = predicted.rows - predicted.near;
    if short > 0 {
        lines.push(format!("short: {short} rows are off by more than {}", percent(TOLERANCE)));
    }
    if interpolated.rows == predicted.rows && interpolated.mean <= predicted.mean {
        lines.push("short: plain interpolation is as near in the mean, or nearer".into());
    }
    for (name, off) in [
        ("plain interpolation of the fitted rows in log-log", interpolated),
        ("without what fitted rows say of rows like them", off(|row| Some(row.walked_s))),
        ("a latency and a bandwidth for each pool, place and fitted number of processes", linear),
    ] {
        if off.rows > 0 {
            lines.push(format!("{name}: {off}"));
        }
    }
    lines.join("\n    ")
}

#[cfg(test)]
mod tests {
    use polder_pool::wait::Patience;

    #[test]
    fn a_rank_is_walked_with_the_patience_that_the_pool_has() {
        assert_eq!(polder_dev::walk::LOOKS, Patience::SHARED.spins);
    }
}
