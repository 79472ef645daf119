//! The rows that every benchmark prints: one figure each, beside its peer's.

use polder_mem::lines::Timing;
use serde::{Deserialize, Serialize};

/// How a figure was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// On this machine, in this run.
    Measured,
    /// On memory that stands in for other memory.
    Emulated,
    /// By a model of a machine.
    Simulated,
    /// By others, elsewhere.
    Published,
}

/// Whether less or more of a metric is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Times, bytes.
    Less,
    /// Bandwidths, rates.
    More,
}

/// The median of a few runs, with the least and the greatest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The median.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The greatest.
    pub high: f64,
}

impl From<Timing> for Sample {
    fn from(Timing { median, low, high }: Timing) -> Self {
        Self { median, low, high }
    }
}

impl Sample {
    /// A figure without a spread.
    pub const fn one(value: f64) -> Self {
        Self { median: value, low: value, high: value }
    }

    /// The median, least and greatest of `values`; `None` when there are none.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            0 => f64::midpoint(values[middle - 1], values[middle]),
            _ => values[middle],
        };
        Some(Self { median, low, high })
    }
}

/// One figure. `ratio` says how many times better Polder is than the peer: above 1 is better.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Row {
    /// Which benchmark.
    pub bench: String,
    /// Operation, size, processes, pool, `staged` or `in-pool`, library, in plain words.
    pub case: String,
    /// What was measured.
    pub metric: String,
    /// The median.
    pub value: f64,
    /// The least.
    pub low: f64,
    /// The greatest.
    pub high: f64,
    /// The unit of the three.
    pub unit: String,
    /// How it was obtained.
    pub kind: Kind,
    /// What it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The peer's median, of the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_value: Option<f64>,
    /// How many times better than the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

impl Row {
    /// A measured figure without a peer.
    pub fn measured(bench: &str, case: impl Into<String>, metric: &str, sample: Sample, unit: &str) -> Self {
        Self {
            bench: bench.to_owned(),
            case: case.into(),
            metric: metric.to_owned(),
            value: sample.median,
            low: sample.low,
            high: sample.high,
            unit: unit.to_owned(),
            kind: Kind::Measured,
            peer: None,
            peer_value: None,
            ratio: None,
        }
    }

    /// A figure that others say.
    pub fn published(bench: &str, case: impl Into<String>, metric: &str, value: f64, unit: &str) -> Self {
        Self { kind: Kind::Published, ..Self::measured(bench, case, metric, Sample::one(value), unit) }
    }

    /// The same figure beside that of `peer`.
    #[must_use]
    pub fn beside(mut self, peer: &str, value: f64, better: Better) -> Self {
        self.ratio = Some(match better {
            Better::Less => value / self.value,
            Better::More => self.value / value,
        });
        self.peer = Some(peer.to_owned());
        self.peer_value = Some(value);
        self
    }

    /// The row as a line of a table for people.
    pub fn line(&self) -> String {
        let Self { case, metric, value, low, high, unit, kind, .. } = self;
        let spread = match kind {
            Kind::Published => "published".to_owned(),
            Kind::Simulated => "simulated".to_owned(),
            Kind::Measured | Kind::Emulated => format!("[{} .. {}]", short(*low), short(*high)),
        };
        let figure = format!("{case:<58} {metric:<10} {:>10} {unit:<5} {spread}", short(*value));
        match (&self.peer, self.peer_value, self.ratio) {
            (Some(peer), Some(other), Some(ratio)) => {
                format!("{figure:<112} {peer} {}, {}", short(other), times(ratio))
            }
            _ => figure,
        }
    }
}

/// A ratio beyond which the peer was not slow but away: it lost its core to another process and waited for the scheduler.
const ABSURD: f64 = 1000.0;

/// A ratio in words, with what it is where it says nothing of either's speed.
pub fn times(ratio: f64) -> String {
    match ratio {
        _ if ratio >= ABSURD => format!("{ratio:.0}x: the peer lost its core, no speed of its own"),
        _ => format!("{ratio:.2}x"),
    }
}

/// Three significant digits.
pub fn short(value: f64) -> String {
    let magnitude = value.abs();
    match magnitude {
        _ if magnitude >= 100.0 => format!("{value:.0}"),
        _ if magnitude >= 10.0 => format!("{value:.1}"),
        _ if magnitude >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_above_one_means_better_for_times_and_for_bandwidths() {
        let sample = Sample::of(vec![2.0, 1.0, 3.0]).unwrap();
        let time = Row::measured("ring", "round trip 8 B", "latency", sample, "us").beside(
            "floor",
            4.0,
            Better::Less,
        );
        assert_eq!(time.ratio, Some(2.0));
        let bandwidth = Row::measured("ring", "stream 1 MiB", "bandwidth", sample, "GB/s").beside(
            "floor",
            4.0,
            Better::More,
        );
        assert_eq!(bandwidth.ratio, Some(0.5));
    }

    #[test]
    fn a_ratio_of_thousands_is_marked_as_what_it_is() {
        assert_eq!(times(999.9), "999.90x");
        assert_eq!(times(15432.1), "15432x: the peer lost its core, no speed of its own");
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(Sample::of(vec![4.0, 1.0, 2.0, 3.0]), Some(Sample { median: 2.5, low: 1.0, high: 4.0 }));
        assert_eq!(Sample::of(Vec::new()), None);
    }
}
