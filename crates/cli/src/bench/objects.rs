//! `polder bench objects`: a million creates and opens from four processes on two emulated hosts.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polder_mem::{LINE, Memory};
use polder_pool::group::{Group, Options};
use polder_pool::session::{self, Session};
use polder_pool::settings::CoherenceChoice;
use polder_pool::wait::Patience;
use polder_pool::{Geometry, Inspection, Pool, each, inspect};

use super::pair::{Helper, settings, timed};
use super::row::{Row, Sample};
use crate::Failure;
use crate::scratch::Scratch;

const PROCESSES: u64 = 4;
const HOSTS: u16 = 2;
const OBJECT_BYTES: u64 = 64;

/// How many objects.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Objects that the four processes create together.
    #[arg(long, default_value_t = 1_000_000)]
    objects: u64,
}

/// Another process's side, for the hidden command that starts it.
#[derive(clap::Args)]
pub(super) struct Second {
    path: PathBuf,
    coherence: CoherenceChoice,
    rank: u64,
    objects: u64,
}

/// Measures one kind of pool after the other.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for coherence in [CoherenceChoice::Coherent, CoherenceChoice::Software] {
        let bytes = 1 << 30;
        // Half full at the end: of ten levels the last is for tombstones, and the ninth is hardly used by then.
        let names = u32::try_from(arguments.objects / u64::from(HOSTS) / 5).unwrap_or(u32::MAX).max(1000);
        let geometry =
            Geometry { hosts: HOSTS, processes: 8, names, levels: 10, ..Geometry::for_region(bytes) };
        let scratch = Scratch::new()?;
        let path = scratch.path().join("pool");
        session::create(&path, bytes, &geometry)?;
        let each = arguments.objects / PROCESSES;
        let helpers: Vec<_> = (1..PROCESSES)
            .map(|rank| {
                let words = ["bench", "second", "objects"].map(OsString::from).into_iter();
                let words = words.chain([path.clone().into(), coherence.to_string().into()]);
                Helper::start(words.chain([rank.to_string().into(), each.to_string().into()]))
            })
            .collect::<Result<_, _>>()?;
        rows.extend(rank(&Second { path, coherence, rank: 0, objects: each })?);
        helpers.into_iter().try_for_each(Helper::finish)?;
    }
    Ok(rows)
}

/// Runs another process.
pub(super) fn second(second: &Second) -> Result<(), Failure> {
    rank(second).map(drop)
}

fn rank(second: &Second) -> Result<Vec<Row>, Failure> {
    let host = (second.rank % u64::from(HOSTS)) as u16;
    let session = Session::open(&settings(&second.path, second.coherence, host))?;
    each!(session.pool(), pool => measure(Arc::clone(pool), second))
}

fn measure<M: Memory>(pool: Arc<Pool<M>>, second: &Second) -> Result<Vec<Row>, Failure> {
    let Second { rank, objects, coherence, .. } = second;
    let options =
        Options { patience: Patience::SHARED, timeout: Duration::from_secs(120), ..Options::default() };
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
    let metadata = stat.objects * LINE + stat.header_bytes;
    let case = |what: &str| format!("{what} {} objects {PROCESSES} procs {coherence}", objects * PROCESSES);
    let one = |value: f64| Sample { median: value, low: value, high: value };
    Ok(vec![
        Row::measured("objects", case("create and close"), "rate", one(total / creates), "calls/s"),
        Row::measured("objects", case("open and close"), "rate", one(total / opens), "calls/s"),
        // An entry and a header each; what the directory reserves in all stands beside it.
        Row::measured(
            "objects",
            case("metadata"),
            "in use",
            one(metadata as f64 / stat.objects as f64),
            "B/object",
        ),
        Row::measured(
            "objects",
            case("metadata"),
            "reserved",
            one((stat.metadata_bytes + stat.header_bytes) as f64 / stat.objects as f64),
            "B/object",
        ),
    ])
}
