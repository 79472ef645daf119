//! `polder-dev bench objects`: a million creates and opens from four processes on two emulated hosts.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polder_attach::session::{self, Session};
use polder_attach::settings::CoherenceChoice;
use polder_mem::{LINE, Memory};
use polder_pool::group::{Group, GroupOptions};
use polder_pool::wait::Patience;
use polder_pool::{Geometry, Inspection, Pool, inspect};

use crate::Failure;
use polder_measure::Scratch;
use polder_measure::pair::{Helper, settings, timed};
use polder_measure::{Row, Sample};

const PROCESSES: u64 = 4;
const HOSTS: u16 = 2;
const OBJECT_BYTES: u64 = 64;

/// How many objects.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Objects that the four processes create together.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(4..))]
    objects: u64,
}

/// Another process's side, for the hidden command that starts it.
#[derive(clap::Args)]
pub(crate) struct Second {
    path: PathBuf,
    /// Under a name of its own: `coherence` is what the user may give to every command.
    kind: CoherenceChoice,
    rank: u64,
    objects: u64,
}

/// What the figures of a round are, with their units: an entry and a header for each object in use, and all that the
/// directory reserves.
const FIGURES: [(&str, &str, &str); 4] = [
    ("create and close", "rate", "calls/s"),
    ("open and close", "rate", "calls/s"),
    ("metadata", "in use", "B/object"),
    ("metadata", "reserved", "B/object"),
];
/// Rounds, each with a pool of its own.
const ROUNDS: usize = 3;

type Figures = [f64; FIGURES.len()];

/// Measures one kind of pool after the other.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let each = arguments.objects / PROCESSES;
    let mut rows = Vec::new();
    for coherence in [CoherenceChoice::Coherent, CoherenceChoice::Software] {
        let rounds = (0..ROUNDS).map(|_| round(coherence, each)).collect::<Result<Vec<_>, _>>()?;
        for (index, (what, metric, unit)) in FIGURES.into_iter().enumerate() {
            let case = format!("{what} {} objects {PROCESSES} procs {coherence}", each * PROCESSES);
            let sample = Sample::of(rounds.iter().map(|figures| figures[index]).collect());
            rows.extend(sample.map(|sample| Row::measured("objects", case, metric, sample, unit)));
        }
    }
    Ok(rows)
}

fn round(coherence: CoherenceChoice, each: u64) -> Result<Figures, Failure> {
    let bytes = 1 << 30;
    // Half full at the end: of ten levels the last is for tombstones, and the ninth is hardly used by then.
    let names = u32::try_from(each * PROCESSES / u64::from(HOSTS) / 5).unwrap_or(u32::MAX).max(1000);
    let geometry = Geometry { hosts: HOSTS, processes: 8, names, levels: 10, ..Geometry::for_region(bytes) };
    let scratch = Scratch::new()?;
    let path = scratch.path().join("pool");
    session::create(&path, bytes, &geometry)?;
    let helpers: Vec<_> = (1..PROCESSES)
        .map(|rank| {
            let words = ["second", "objects"].map(OsString::from).into_iter();
            let words = words.chain([path.clone().into(), coherence.to_string().into()]);
            Helper::start(words.chain([rank.to_string().into(), each.to_string().into()]))
        })
        .collect::<Result<_, _>>()?;
    let figures = rank(&Second { path, kind: coherence, rank: 0, objects: each })?;
    helpers.into_iter().try_for_each(Helper::finish)?;
    Ok(figures)
}

/// Runs another process.
pub(crate) fn second(second: &Second) -> Result<(), Failure> {
    rank(second).map(drop)
}

fn rank(second: &Second) -> Result<Figures, Failure> {
    let host = (second.rank % u64::from(HOSTS)) as u16;
    let session = Session::open(&settings(&second.path, second.kind, host))?;
    measure(Arc::clone(session.pool()), second)
}

fn measure<M: Memory>(pool: Arc<Pool<M>>, second: &Second) -> Result<Figures, Failure> {
    let Second { rank, objects, .. } = second;
    let options = GroupOptions {
        patience: Patience::SHARED,
        timeout: Duration::from_secs(120),
        ..GroupOptions::default()
    };
    let mut group =
        Group::join(Arc::clone(&pool), "/bench/group", *rank as usize, PROCESSES as usize, options, None)?;
    let name = |rank: u64, number: u64| format!("/bench/{rank}/{number}");
    group.barrier()?;
    let creates = timed(|| {
        (0..*objects).try_for_each(|number| {
            pool.create(&name(*rank, number), OBJECT_BYTES).map(|object| pool.close(object))
        })?;
        group.barrier()
    })?;
    // Each opens what another created.
    let other = (rank + 1) % PROCESSES;
    let opens = timed(|| {
        (0..*objects)
            .try_for_each(|number| pool.open(&name(other, number)).map(|object| pool.close(object)))?;
        group.barrier()
    })?;
    let total = (objects * PROCESSES) as f64;
    let Inspection { stat, .. } = inspect(pool.memory())?;
    let an_object = |bytes: u64| bytes as f64 / stat.objects as f64;
    let (in_use, reserved) =
        (stat.objects * LINE + stat.header_bytes, stat.metadata_bytes + stat.header_bytes);
    Ok([total / creates, total / opens, an_object(in_use), an_object(reserved)])
}
