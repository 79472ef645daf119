//! `polder-dev bench plan`: layouts predicted in a second, and how far predictions are from published steps.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use polder_platform::{Platform, TierId, Topology};
use polder_sim::{Job, Model, Offload, Overlap, Pooled, Precision, Space, search, validate};

use crate::Failure;
use polder_measure::machine::{kib, line_of};
use polder_measure::{Better, Kind, Row, Sample};

const RUNS: usize = 3;
/// A run lasts as long, for the usual search takes a few milliseconds.
const LEAST: Duration = Duration::from_millis(200);
const ACCELERATORS: u32 = 98_304;
const BATCH: u32 = 6_144;

/// How much is searched.
#[derive(Args)]
pub(super) struct Arguments {
    /// Predict a billion layouts on all cores too, which takes a minute or two.
    #[arg(long)]
    billion: bool,
}

/// Measures the search on one thread and on all, and counts the error.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let mut platform = Platform::load("nvl72-ndr")?;
    if let Some(between) = &mut platform.between {
        // Three levels of 64 ports end at 65,536.
        between.topology = Topology::Clos { levels: 4 };
    }
    let model = Model::load("llama3-405b")?;
    let job = Job::new(&platform);
    let mut rows = vec![];
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let usual = Space::default_for(&model, ACCELERATORS, BATCH);
    for (name, space) in [("search", space(usual.clone())), ("usual search", usual)] {
        for threads in [1, cores] {
            let rate = |_| {
                let (begin, mut points) = (Instant::now(), 0);
                while begin.elapsed() < LEAST {
                    points += search(&job, &model, &space, threads, &|_, _| ()).points;
                }
                points as f64 / begin.elapsed().as_secs_f64() / 1e6
            };
            let sample = Sample::of((0..RUNS).map(rate).collect()).ok_or_else(|| Failure("no run".into()))?;
            let case = format!("{name} 98,304 accelerators, {threads} threads");
            rows.push(Row::measured("plan", case, "rate", sample, "M/s"));
        }
    }
    rows.dedup_by(|a, b| a.case == b.case);
    if arguments.billion {
        rows.extend(billion(&job, &model, cores)?);
    }
    let tables = validate()?;
    for (case, blind) in [("blind training steps", true), ("published training steps", false)] {
        let pooled = Pooled::of(tables.iter().filter(|table| table.blind == blind));
        for (metric, ours, constant) in [
            ("mean error", pooled.mean, pooled.constant_mean),
            ("worst error", pooled.worst, pooled.constant_worst),
        ] {
            let row = Row::measured("plan", case, metric, Sample::one(ours * 100.0), "%");
            rows.push(Row { kind: Kind::Simulated, ..row }.beside(
                "constant rate",
                constant * 100.0,
                Better::Less,
            ));
        }
    }
    Ok(rows)
}

/// Every layout of larger and larger batches, until there are a billion, and the most memory that this process ever had.
fn billion(job: &Job<'_>, model: &Model, threads: usize) -> Result<[Row; 2], Failure> {
    let begin = Instant::now();
    let mut points = 0;
    for batch in (1..).map(|times| times * BATCH).take_while(|batch| *batch <= 1 << 24) {
        if points >= 1_000_000_000 {
            break;
        }
        let space = space(Space::default_for(model, ACCELERATORS, batch));
        points += search(job, model, &space, threads, &|_, _| ()).points;
    }
    let seconds = begin.elapsed().as_secs_f64();
    let case = format!("search {:.3} billion layouts, {threads} threads", points as f64 / 1e9);
    let row = |metric, value, unit| Row::measured("plan", case.clone(), metric, Sample::one(value), unit);
    Ok([row("time", seconds, "s"), row("peak memory", peak_bytes()? / 1e6, "MB")])
}

/// The most memory that this process had at once.
fn peak_bytes() -> Result<f64, Failure> {
    let most = line_of(Path::new("/proc/self/status"), "VmHWM").and_then(|figure| kib(&figure));
    most.ok_or_else(|| Failure("/proc/self/status: expected VmHWM in kB".into()))
}

/// Every layout, with everything that can be chosen chosen both ways.
fn space(usual: Space) -> Space {
    Space {
        flash: vec![true, false],
        precision: vec![Precision::Bf16, Precision::Fp8],
        wide_gradients: vec![true, false],
        // A model without experts has nothing to hide for them.
        overlap: Overlap::all().filter(|it| it.context && !it.expert).collect(),
        offload: Offload::all(TierId::Host).collect(),
        ..usual
    }
}
