//! `polder bench plan`: layouts predicted in a second, and how far predictions are from published steps.

use std::time::Instant;

use polder_platform::{Platform, Topology};
use polder_sim::{FarTier, Job, Model, Offload, Overlap, Pooled, Precision, Space, search, validate};

use super::row::{Better, Kind, Row, Sample};
use crate::Failure;

const RUNS: usize = 3;

/// Measures the search on one thread and on all, and counts the error.
pub(super) fn run() -> Result<Vec<Row>, Failure> {
    let mut platform = Platform::load("nvl72-ndr")?;
    if let Some(between) = &mut platform.between {
        // Three levels of 64 ports end at 65,536.
        between.topology = Topology::Clos { levels: 4 };
    }
    let model = Model::load("llama3-405b")?;
    let (job, space) = (Job::new(&platform), space(&model));
    let mut rows = vec![];
    for threads in [1, std::thread::available_parallelism().map_or(1, usize::from)] {
        let rate = |_| {
            let begin = Instant::now();
            let outcome = search(&job, &model, &space, threads, &|_, _| ());
            outcome.points as f64 / begin.elapsed().as_secs_f64() / 1e6
        };
        let sample = Sample::of((0..RUNS).map(rate).collect()).ok_or_else(|| Failure("no run".into()))?;
        let case = format!("search 98,304 accelerators, {threads} threads");
        rows.push(Row::measured("plan", case, "rate", sample, "M/s"));
    }
    rows.dedup_by(|a, b| a.case == b.case);
    let pooled = Pooled::of(&validate()?);
    for (metric, ours, constant) in [
        ("mean error", pooled.mean, pooled.constant_mean),
        ("worst error", pooled.worst, pooled.constant_worst),
    ] {
        let sample = Sample { median: ours * 100.0, low: ours * 100.0, high: ours * 100.0 };
        let row = Row::measured("plan", "published training steps", metric, sample, "%");
        rows.push(Row { kind: Kind::Simulated, ..row }.beside(
            "constant rate",
            constant * 100.0,
            Better::Less,
        ));
    }
    Ok(rows)
}

/// Every layout, with everything that can be chosen chosen both ways.
fn space(model: &Model) -> Space {
    Space {
        flash: vec![true, false],
        precision: vec![Precision::Bf16, Precision::Fp8],
        wide_gradients: vec![true, false],
        overlap: Overlap::all().collect(),
        offload: Offload::all(FarTier::Host).collect(),
        ..Space::usual(model, 98_304, 6_144)
    }
}
