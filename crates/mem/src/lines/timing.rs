//! Repeating and summing up.

use std::time::Instant;

use super::on_threads;

/// What a figure came out as over many samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The middle sample.
    pub median: f64,
    /// The sample that a tenth of all are below.
    pub low: f64,
    /// The sample that a tenth of all are above.
    pub high: f64,
}

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// How many samples to take.
    pub samples: usize,
    /// How long one sample lasts at least, in nanoseconds; shorter operations are repeated within it.
    pub sample_ns: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { samples: 101, sample_ns: 200_000 }
    }
}

impl Timing {
    /// Sums up samples.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn of(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "a median needs a sample");
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize];
        Self { median: at(0.5), low: at(0.1), high: at(0.9) }
    }

    /// The same figures in another unit, where `convert` may also turn small into large.
    #[must_use]
    pub fn map(self, convert: impl Fn(f64) -> f64) -> Self {
        let (low, high) = (convert(self.low), convert(self.high));
        Self { median: convert(self.median), low: low.min(high), high: low.max(high) }
    }
}

impl Sampling {
    /// Nanoseconds that one call takes.
    pub fn time(self, mut call: impl FnMut()) -> Timing {
        let mut repeat = |count: u64| {
            let start = Instant::now();
            for _ in 0..count {
                call();
            }
            start.elapsed().as_nanos() as f64
        };
        let mut count = 1;
        // Also warms up.
        while repeat(count) < self.sample_ns as f64 {
            count *= 2;
        }
        Timing::of((0..self.samples).map(|_| repeat(count) / count as f64).collect())
    }

    /// GB/s of `threads` threads that move `bytes` bytes each in a call of `pass`, together.
    pub(super) fn bandwidth(self, threads: usize, bytes: u64, pass: impl Fn(usize) + Sync) -> Timing {
        // The first pass maps pages and warms up.
        on_threads(threads, &pass);
        let sample = || {
            let times = on_threads(threads, |thread| {
                let start = Instant::now();
                let mut passes = 0_u64;
                while start.elapsed().as_nanos() < u128::from(self.sample_ns) {
                    pass(thread);
                    passes += 1;
                }
                (passes * bytes) as f64 / start.elapsed().as_nanos() as f64
            });
            times.into_iter().sum()
        };
        Timing::of((0..self.samples).map(|_| sample()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_tenths_are_taken() {
        let timing = Timing::of((0..=100).rev().map(f64::from).collect());
        assert_eq!(timing, Timing { median: 50.0, low: 10.0, high: 90.0 });
        assert_eq!(Timing::of(vec![3.0]), Timing { median: 3.0, low: 3.0, high: 3.0 });
        let inverted = timing.map(|ns| 1000.0 / ns);
        assert_eq!(inverted, Timing { median: 20.0, low: 1000.0 / 90.0, high: 100.0 });
    }

    #[test]
    fn a_call_of_known_length_is_timed() {
        let wait = || {
            let start = Instant::now();
            while start.elapsed().as_nanos() < 20_000 {}
        };
        let timing = Sampling { samples: 9, sample_ns: 100_000 }.time(wait);
        assert!(timing.low >= 20_000.0, "{timing:?}");
    }
}
