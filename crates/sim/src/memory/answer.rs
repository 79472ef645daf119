//! Access times at many working sets.

use serde::Serialize;

use super::{Configuration, MemoryError, Question, Ways, configurations, pays_from};

/// Access times of each configuration, with the working sets from which memories pay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curves {
    /// That they are simulated.
    pub kind: &'static str,
    /// The machine.
    pub platform: String,
    /// What it is compared with.
    pub against: Option<String>,
    /// Accelerators that there are.
    pub accelerators: u32,
    /// What platforms leave open.
    #[serde(flatten)]
    pub ways: Ways,
    /// The memories of each configuration.
    pub configurations: Vec<Configuration>,
    /// From where on those of the last one pay.
    pub pays: Vec<Pays>,
    /// The access times.
    pub points: Vec<Point>,
}

/// From where on a memory pays.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pays {
    /// The memory.
    pub tier: &'static str,
    /// Beside those of which configuration.
    pub over: &'static str,
    /// Bytes of an access.
    pub access_bytes: f64,
    /// The working set; `None` where it never does.
    pub from_bytes: Option<f64>,
}

/// Access times at a working set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Bytes of an access.
    pub access_bytes: f64,
    /// Bytes of the working set.
    pub working_set_bytes: f64,
    /// Seconds, in the order of the configurations; `None` where one holds less.
    pub seconds: Vec<Option<f64>>,
    /// The part of the accesses that caches answer, in the same order.
    pub hits: Vec<Option<f64>>,
}

/// Access times of accesses of these sizes, to these working sets; where none are given, to as many as a picture takes.
///
/// # Errors
/// As [`configurations`].
pub fn curves(question: &Question, access: &[f64], sets: &[f64]) -> Result<Curves, MemoryError> {
    let (accelerators, configurations) = configurations(question)?;
    let sets = if sets.is_empty() { drawn(&configurations) } else { sets.to_vec() };
    let point = |access_bytes: f64, working_set_bytes: f64| {
        let seconds = configurations.iter().map(|it| it.seconds(access_bytes, working_set_bytes)).collect();
        let hits = configurations.iter().map(|it| it.hits(access_bytes, working_set_bytes)).collect();
        Point { access_bytes, working_set_bytes, seconds, hits }
    };
    let points = access.iter().flat_map(|bytes| sets.iter().map(|set| point(*bytes, *set))).collect();
    let pays = access.iter().flat_map(|bytes| pays(&configurations, *bytes)).collect();
    Ok(Curves {
        kind: "simulated",
        platform: question.platform.clone(),
        against: question.against.clone(),
        accelerators,
        ways: question.ways,
        pays,
        points,
        configurations,
    })
}

/// From where on each memory of the last configuration but the first pays, beside each other configuration.
fn pays(configurations: &[Configuration], access_bytes: f64) -> Vec<Pays> {
    let Some((last, others)) = configurations.split_last() else { return vec![] };
    let each = last.tiers.iter().enumerate().skip(1).flat_map(|(index, tier)| {
        others.iter().map(move |other| Pays {
            tier: tier.name,
            over: other.name,
            access_bytes,
            from_bytes: pays_from(last, index, other, access_bytes),
        })
    });
    each.collect()
}

/// An accelerator's own memory, that of a rack, and the most that any configuration holds.
fn ends(configurations: &[Configuration]) -> [f64; 3] {
    let first = configurations.last().map_or(&[][..], |it| &it.tiers);
    let own = first.first().map_or(0.0, |it| it.capacity_bytes);
    let rack = first.iter().filter(|it| it.name == "rack").map(|it| it.capacity_bytes).sum::<f64>();
    [own, own + rack, configurations.iter().map(Configuration::capacity).fold(0.0, f64::max)]
}

/// Working sets that a table shows: around the end of an accelerator's memory, and around that of a rack.
#[must_use]
pub fn landmarks(configurations: &[Configuration]) -> Vec<f64> {
    let [own, rack, most] = ends(configurations);
    let inside = [0.5, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0].map(|part| part * own);
    let outside = [1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0].map(|part| part * rack);
    let inside = inside.into_iter().filter(|set| *set <= own || *set < rack);
    let mut sets: Vec<_> = inside.chain(outside).filter(|set| *set <= most).collect();
    sets.sort_by(f64::total_cmp);
    sets.dedup();
    sets
}

/// Working sets that a picture takes: eight to each doubling, and the ends of memories.
fn drawn(configurations: &[Configuration]) -> Vec<f64> {
    let [own, _, most] = ends(configurations);
    let doubled = (0..).map(|step| own / 4.0 * (f64::from(step) / 8.0).exp2()).take_while(|set| *set <= most);
    let mut sets: Vec<_> = doubled
        .chain(configurations.iter().flat_map(Configuration::ends))
        .chain(landmarks(configurations))
        .collect();
    sets.sort_by(f64::total_cmp);
    sets.dedup();
    sets
}
