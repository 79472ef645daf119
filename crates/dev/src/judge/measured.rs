//! The loop from measurement to prediction: what a machine was seen to take for some collectives gives the constants, and these
//! predict the others.

use std::collections::BTreeSet;

use polder_platform::{Exchange, Platform, Sharing};
use polder_schedule::Collective;
use polder_sim::{Job, Layout, Model, Refusal, descend};
use serde::Serialize;

use crate::walk::{MessagePlace, Walk, collective};

/// How far a constant is plausibly from what was measured of it alone, as a factor.
const PLAUSIBLE: f64 = 3.0;
/// How far a prediction is plausibly off: what the former is weighed against.
const NOISE: f64 = 0.05;
/// Octaves of bytes and of ranks over which what the walk misses is alike, and how much speaks for its missing nothing, where a
/// fitted row of the same size and number speaks with 1: found from rows of one machine.
const ALIKE: [f64; 2] = [2.0, 0.5];
const NOTHING: f64 = 0.3;

/// An all-reduce that was timed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// What it was called.
    pub case: String,
    /// Through what it went: a name of [`Sharing::exchange`].
    pub exchange: String,
    /// Where its messages lay.
    #[serde(skip)]
    pub place: MessagePlace,
    /// The host of each rank.
    #[serde(skip)]
    pub hosts: Vec<u16>,
    /// Bytes of its vector.
    pub bytes: u64,
    /// The median of its runs.
    pub seconds: f64,
    /// The least and the greatest.
    pub spread_s: [f64; 2],
    /// How far the medians of two halves of its runs are apart, as a part of the lesser; `None` for one run.
    pub halves: Option<f64>,
}

/// A measured all-reduce beside its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What was measured.
    #[serde(flatten)]
    pub measured: Measured,
    /// What is predicted: the walk, and what it missed of fitted rows that are like this one.
    pub predicted_s: f64,
    /// What the walk alone says.
    pub walked_s: f64,
    /// Plain interpolation of the fitted rows of the same exchange and place, straight in the logarithms of bytes, ranks and seconds,
    /// beyond them as between the last two: the baseline. `None` where they are too few.
    pub interpolated_s: Option<f64>,
    /// A latency and a bandwidth, fitted to the fitted rows of the same exchange and place and of as many ranks. `None` where there
    /// are not two sizes of them.
    pub linear_s: Option<f64>,
    /// Whether the constants were fitted to it: it is not judged then.
    pub fitted: bool,
}

impl Comparison {
    /// Predicted over measured, less 1.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measured.seconds - 1.0
    }
}

/// All rows beside their predictions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verified {
    /// The machine, with the constants that the fitted rows gave.
    pub sharing: Sharing,
    /// The rows, in their order.
    pub rows: Vec<Comparison>,
}

impl Verified {
    /// The rows that were predicted and not fitted, of one exchange or of all.
    pub fn judged<'a>(&'a self, exchange: Option<&'a str>) -> impl Iterator<Item = &'a Comparison> {
        self.rows
            .iter()
            .filter(move |row| !row.fitted && exchange.is_none_or(|name| row.measured.exchange == name))
    }

    /// Seconds of an all-reduce that was perhaps not measured: the walk, and what it missed of fitted rows that are like it: of the
    /// exchange and place, by bytes and by how many ranks there are, wherever they are. `None` without constants of the exchange, or for messages that it cannot cut.
    ///
    /// # Panics
    /// When there is no rank.
    #[must_use]
    pub fn all_reduce(&self, exchange: &str, hosts: &[u16], bytes: u64, place: MessagePlace) -> Option<f64> {
        let constants = self.sharing.exchange.get(exchange)?;
        let walked = collective(&self.sharing, constants, Collective::AllReduce, hosts, bytes, place)?;
        Some(walked * self.correction(exchange, hosts.len(), bytes, place))
    }

    /// How many times longer than walked an all-reduce takes, by the fitted rows that are like it.
    fn correction(&self, exchange: &str, ranks: usize, bytes: u64, place: MessagePlace) -> f64 {
        let (mut sum, mut weights) = (0.0, NOTHING);
        for row in self.rows.iter().filter(|row| row.fitted) {
            let other = &row.measured;
            if other.exchange == exchange && other.place == place {
                let octaves = |one: f64, other: f64, alike: f64| (one / other).log2() / alike;
                let [sizes, numbers] = [
                    octaves(bytes as f64, other.bytes as f64, ALIKE[0]),
                    octaves(ranks as f64, other.hosts.len() as f64, ALIKE[1]),
                ];
                let weight = (-0.5 * (sizes * sizes + numbers * numbers)).exp();
                sum += weight * (other.seconds / row.walked_s).ln();
                weights += weight;
            }
        }
        (sum / weights).exp()
    }
}

/// Fits the constants of each exchange to the rows that are both of every other size, from the smallest on, and of every other
/// number of ranks, from the least on. Each constant is near what `sharing` says of it. Predicts all rows; all that are not fitted
/// are judged. Those through what `sharing` has no constants for are left out.
#[must_use]
pub fn verify(sharing: &Sharing, rows: &[Measured]) -> Verified {
    let every_other = |values: BTreeSet<u64>| values.into_iter().step_by(2).collect::<BTreeSet<_>>();
    let sizes = every_other(rows.iter().map(|row| row.bytes).collect());
    let counts = every_other(rows.iter().map(|row| row.hosts.len() as u64).collect());
    let is_fitted = |row: &Measured| sizes.contains(&row.bytes) && counts.contains(&(row.hosts.len() as u64));
    let of = |row: &Measured| Walk::new(Collective::AllReduce, &row.hosts, row.bytes, row.place);
    let walk: Vec<_> = rows.iter().filter_map(|row| Some((row, of(row)?))).collect();
    let mut refitted = sharing.clone();
    for (name, constants) in &mut refitted.exchange {
        let seen = walk.iter().filter(|(row, _)| row.exchange == *name && is_fitted(row));
        *constants = exchange(sharing, constants, &seen.collect::<Vec<_>>());
    }
    let beside = walk.iter().filter_map(|(row, walk)| {
        let walked_s = walk.seconds(&refitted, refitted.exchange.get(&row.exchange)?);
        let like = |other: &&Measured| {
            is_fitted(other) && other.exchange == row.exchange && other.place == row.place
        };
        let like: Vec<_> = rows.iter().filter(like).collect();
        let interpolated_s = interpolated(row, &like);
        let linear_s = linear(row.bytes, like.into_iter().filter(|other| other.hosts == row.hosts));
        let (measured, fitted) = ((*row).clone(), is_fitted(row));
        Some(Comparison { measured, predicted_s: walked_s, walked_s, interpolated_s, linear_s, fitted })
    });
    let rows = beside.collect();
    let mut verified = Verified { sharing: refitted, rows };
    let missed = |row: &Comparison| {
        let Measured { exchange, place, hosts, bytes, .. } = &row.measured;
        verified.correction(exchange, hosts.len(), *bytes, *place)
    };
    let missed: Vec<_> = verified.rows.iter().map(missed).collect();
    verified.rows.iter_mut().zip(missed).for_each(|(row, missed)| row.predicted_s *= missed);
    verified
}

/// What `rows` say of `row`: of each number of ranks by its sizes, then by those numbers.
fn interpolated(row: &Measured, rows: &[&Measured]) -> Option<f64> {
    let counts: BTreeSet<_> = rows.iter().map(|other| other.hosts.len()).collect();
    let by_count = counts.into_iter().filter_map(|count| {
        let sizes = rows.iter().filter(|other| other.hosts.len() == count);
        let seconds = straight(row.bytes as f64, sizes.map(|other| (other.bytes as f64, other.seconds)))?;
        Some((count as f64, seconds))
    });
    straight(row.hosts.len() as f64, by_count)
}

/// The value at `at` of the line through the two points around it, or the two nearest beyond the last, in the logarithms of both; of
/// a point that is there its own. `None` where that takes two points and there are not.
fn straight(at: f64, points: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let mut points: Vec<_> = points.collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    if let Some((_, value)) = points.iter().find(|point| point.0 == at) {
        return Some(*value);
    }
    let above = points.partition_point(|point| point.0 < at);
    let first = above.clamp(1, points.len().saturating_sub(1).max(1)) - 1;
    let &[low, high] = points.get(first..first + 2)? else { return None };
    let part = (at / low.0).ln() / (high.0 / low.0).ln();
    Some(low.1 * (high.1 / low.1).powf(part))
}

/// Seconds of so many bytes at the latency and the bandwidth, neither negative, that are the least off in the squares of relative
/// errors; `None` without two sizes.
fn linear<'a>(bytes: u64, rows: impl Iterator<Item = &'a Measured>) -> Option<f64> {
    // Sums of products of 1 and bytes over seconds.
    let [mut one, mut both, mut many, mut ones, mut bytes_s] = [0.0; 5];
    let mut sizes = BTreeSet::new();
    for row in rows {
        sizes.insert(row.bytes);
        let [latency, rest] = [1.0, row.bytes as f64].map(|part| part / row.seconds);
        one += latency * latency;
        both += latency * rest;
        many += rest * rest;
        ones += latency;
        bytes_s += rest;
    }
    let determinant = one * many - both * both;
    let latency = (ones * many - bytes_s * both) / determinant;
    let rate = (bytes_s * one - ones * both) / determinant;
    let bytes = bytes as f64;
    let seconds = if rate < 0.0 {
        ones / one
    } else if latency < 0.0 {
        bytes_s / many * bytes
    } else {
        latency + rate * bytes
    };
    (sizes.len() > 1).then_some(seconds)
}

/// The most plausible constants given the rows: the least errors of the logarithms, each constant near what it was before.
fn exchange(sharing: &Sharing, before: &Exchange, rows: &[&(&Measured, Walk)]) -> Exchange {
    let values = before.values();
    let at = |steps: &[f64; 9]| {
        let mut moved = values;
        for (value, step) in moved.iter_mut().zip(steps) {
            *value *= f64::powf(PLAUSIBLE, *step);
        }
        Exchange::from_values(moved)
    };
    let cost = |steps: &[f64; 9]| {
        let constants = at(steps);
        // Squares of small errors, but no more than the size of large ones: a busy machine gives a few of those.
        let misfit = |(row, walk): &&(&Measured, Walk)| {
            let deviation = (walk.seconds(sharing, &constants) / row.seconds).ln() / NOISE;
            // Not `hypot`, whose newest version asks for a C library of 2022 (2.35); nothing here overflows.
            deviation.mul_add(deviation, 1.0).sqrt() - 1.0
        };
        steps.iter().map(|step| step * step).sum::<f64>() + rows.iter().map(misfit).sum::<f64>()
    };
    at(&descend(cost))
}

/// Seconds of a step of copies of a model on the machine's cores, with gradients that are combined through the pool as
/// [`Verified::all_reduce`] has it, from buckets of each rank: as PyTorch does where a hook combines them, they are copied into
/// those, divided by the ranks there and copied out again, at what copies were probed to take: what is fitted is of messages. They
/// hide nothing: no core is left to run them beside computation.
///
/// # Errors
/// Why it cannot run.
///
/// # Panics
/// When there is no accelerator, or a rank to no host.
pub fn step_through(
    platform: &Platform,
    (verified, exchange): (&Verified, &str),
    (model, layout): (&Model, &Layout),
    hosts: &[u16],
) -> Result<f64, Refusal> {
    let step = Job::chosen(platform, None, None, None)?.predict(model, layout)?.step;
    let gradients = step.memory.accelerator().gradients_bytes as u64;
    let combined =
        verified.all_reduce(exchange, hosts, gradients, MessagePlace::Staged).unwrap_or(f64::INFINITY);
    let copies = platform.sharing.iter().filter_map(|it| it.exchange.get(exchange));
    let copied: f64 = copies.map(|it| 3.0 * gradients as f64 / it.copied.value()).sum();
    Ok(step.total_s - step.communication.data.exposed_s() + combined + copied)
}

#[cfg(test)]
mod tests {
    use super::*;
    use polder_platform::{Bandwidth, Bytes, MemoryTier, Time};

    const BEFORE: [f64; 9] = [1e-6, 1e-6, 1e-5, 1e10, 5e9, 1e10, 1e10, 5e9, 5e9];

    fn sharing() -> Sharing {
        let exchange = [("software".into(), Exchange::from_values(BEFORE))].into();
        let memory = MemoryTier {
            capacity: Bytes::new(1e9),
            read: Bandwidth::new(1e10),
            write: Bandwidth::new(1e10),
            latency: Time::new(1e-7),
        };
        let [cache, core_cache] = [32e6, 1e6].map(Bytes::new);
        Sharing { cores: 2, cache, core_cache, memory, exchange }
    }

    /// Rows that a machine with these constants would give.
    fn rows(truth: [f64; 9]) -> Vec<Measured> {
        let sharing = sharing();
        let truth = Exchange::from_values(truth);
        let cases =
            [2_u16, 3, 4].into_iter().flat_map(|ranks| (12..27).step_by(2).map(move |log| (ranks, 1 << log)));
        let timed = cases.flat_map(|(ranks, bytes)| {
            [MessagePlace::Staged, MessagePlace::InPool].map(|place| Measured {
                case: format!("{bytes} {ranks}"),
                exchange: "software".into(),
                place,
                hosts: (0..ranks).map(|rank| rank % 2).collect(),
                bytes,
                seconds: 0.0,
                spread_s: [0.0; 2],
                halves: None,
            })
        });
        let seconds = |row: &Measured| {
            collective(&sharing, &truth, Collective::AllReduce, &row.hosts, row.bytes, row.place).unwrap()
        };
        timed.map(|row| Measured { seconds: seconds(&row), ..row }).collect()
    }

    #[test]
    fn every_other_size_and_number_of_ranks_gives_the_others() {
        let rows = rows([3e-6, 0.4e-6, 3e-5, 2e10, 3e9, 2e10, 5e9, 8e9, 3e9]);
        let verified = verify(&sharing(), &rows);
        assert_eq!(verified.rows.len(), rows.len());
        let fitted = verified.rows.iter().filter(|row| row.fitted).count();
        assert_eq!(fitted, 4 * 2 * 2, "4 of 8 sizes, 2 of 3 numbers of ranks, 2 places");
        assert!(verified.rows.iter().all(|row| !row.fitted || row.measured.hosts.len() != 3));
        for row in verified.judged(None) {
            assert!(row.error().abs() < 0.15, "{row:?}");
        }
    }

    #[test]
    fn a_machine_that_does_what_no_constants_say_is_seen_to() {
        let mut rows = rows(BEFORE);
        rows.iter_mut().filter(|row| row.hosts.len() == 3).for_each(|row| row.seconds *= 2.0);
        let verified = verify(&sharing(), &rows);
        let off: Vec<_> = verified.judged(Some("software")).filter(|row| row.error() < -0.4).collect();
        assert_eq!(off.len(), 8 * 2, "8 sizes, 2 places");
        assert!(off.iter().all(|row| row.measured.hosts.len() == 3));
    }

    #[test]
    fn what_the_walk_misses_of_a_row_it_is_taken_to_miss_of_rows_like_it() {
        let mut rows = rows(BEFORE);
        // Four ranks take longer, by what none of the constants says.
        rows.iter_mut().filter(|row| row.hosts.len() == 4).for_each(|row| row.seconds *= 1.3);
        let verified = verify(&sharing(), &rows);
        let (mut walked, mut predicted) = (0.0, 0.0);
        for row in verified.judged(None).filter(|row| row.measured.hosts.len() == 4) {
            walked += (row.walked_s / row.measured.seconds - 1.0).abs();
            predicted += row.error().abs();
            let Measured { hosts, bytes, place, .. } = &row.measured;
            assert_eq!(verified.all_reduce("software", hosts, *bytes, *place), Some(row.predicted_s));
        }
        assert!(predicted < 0.8 * walked, "{predicted} {walked}");
        // Of what is like no row the walk is all that is known.
        let far = verified.all_reduce("software", &[0; 64], 1, MessagePlace::Staged).unwrap();
        let constants = &verified.sharing.exchange["software"];
        let walked = collective(
            &verified.sharing,
            constants,
            Collective::AllReduce,
            &[0; 64],
            1,
            MessagePlace::Staged,
        );
        assert!((far / walked.unwrap() - 1.0).abs() < 1e-3);
        assert_eq!(verified.all_reduce("loopback", &[0, 1], 1, MessagePlace::Staged), None);
    }

    #[test]
    fn the_baseline_is_straight_in_logarithms_of_bytes_and_of_ranks() {
        let row = |ranks: u16, bytes: u64, seconds: f64| {
            let hosts = (0..ranks).map(|rank| rank % 2).collect();
            Measured { hosts, bytes, seconds, ..rows(BEFORE)[0].clone() }
        };
        let close = |found: Option<f64>, expected: f64| {
            assert!((found.unwrap() / expected - 1.0).abs() < 1e-9, "{found:?}");
        };
        // 3 sqrt(bytes) ranks.
        let fitted = [row(2, 4, 12.0), row(2, 64, 48.0), row(4, 4, 24.0), row(4, 64, 96.0)];
        let fitted: Vec<_> = fitted.iter().collect();
        close(interpolated(&row(2, 16, 0.0), &fitted), 24.0);
        close(interpolated(&row(3, 16, 0.0), &fitted), 36.0);
        close(interpolated(&row(3, 64, 0.0), &fitted), 72.0);
        close(interpolated(&row(4, 1024, 0.0), &fitted), 384.0);
        close(interpolated(&row(8, 1, 0.0), &fitted), 24.0);
        assert_eq!(interpolated(&row(2, 16, 0.0), &fitted[..1]), None);
        assert_eq!(interpolated(&row(3, 16, 0.0), &fitted[..2]), None);
        close(interpolated(&row(2, 16, 0.0), &fitted[..2]), 24.0);
    }

    #[test]
    fn a_line_is_a_latency_and_a_bandwidth_of_the_rows() {
        let row = |(bytes, seconds): (u64, f64)| Measured { bytes, seconds, ..rows(BEFORE)[0].clone() };
        let line = |points: &[(u64, f64)], bytes| {
            let rows: Vec<_> = points.iter().copied().map(row).collect();
            linear(bytes, rows.iter()).unwrap()
        };
        let close = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9, "{found}");
        close(line(&[(10, 3.0), (20, 4.0), (40, 6.0)], 100), 12.0);
        // Neither is negative.
        close(line(&[(10, 1.0), (20, 4.0)], 0) + 1.0, 1.0);
        close(line(&[(10, 4.0), (20, 1.0)], 1 << 20), line(&[(10, 4.0), (20, 1.0)], 0));
        assert_eq!(linear(1, [row((5, 3.0)), row((5, 2.0))].iter()), None);
    }

    #[test]
    fn the_same_rows_give_the_same_constants_and_none_give_what_was_there() {
        let rows = rows([2e-6, 2e-6, 2e-5, 2e10, 4e9, 8e9, 9e9, 4e9, 4e9]);
        assert_eq!(verify(&sharing(), &rows), verify(&sharing(), &rows));
        assert_eq!(verify(&sharing(), &[]).sharing, sharing());
    }
}
