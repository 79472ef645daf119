//! Synthetic accesses: by zipf, and by how long pages of a service lie idle, drawn from a seed; and what a full cache draws.

use polder_platform::quoted;
use serde::{Deserialize, Serialize};

use crate::random::Random;

/// Ranks from 0 on, rank `k` as often as 1 / (k + 1)^exponent (rejection by inversion: Hörmann and Derflinger, 1996).
#[derive(Clone, Debug)]
pub struct Zipf {
    ranks: f64,
    exponent: f64,
    first: f64,
    last: f64,
    skip: f64,
}

impl Zipf {
    /// Draws among so many ranks, which are 1 or more, with an exponent above 0.
    #[must_use]
    pub fn new(ranks: u32, exponent: f64) -> Self {
        let mut zipf = Self { ranks: f64::from(ranks), exponent, first: 0.0, last: 0.0, skip: 0.0 };
        zipf.first = zipf.integral(1.5) - 1.0;
        zipf.last = zipf.integral(zipf.ranks + 0.5);
        zipf.skip = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    fn weight(&self, rank: f64) -> f64 {
        rank.powf(-self.exponent)
    }

    /// The integral of the weight.
    fn integral(&self, rank: f64) -> f64 {
        let less = 1.0 - self.exponent;
        if less.abs() < 1e-9 { rank.ln() } else { rank.powf(less) / less }
    }

    fn inverse(&self, area: f64) -> f64 {
        let less = 1.0 - self.exponent;
        if less.abs() < 1e-9 { area.exp() } else { (area * less).powf(1.0 / less) }
    }

    /// The next rank.
    pub fn draw(&self, random: &mut Random) -> u32 {
        loop {
            let area = self.last + random.unit() * (self.first - self.last);
            let at = self.inverse(area);
            let rank = (at + 0.5).floor().clamp(1.0, self.ranks);
            if rank - at <= self.skip || area >= self.integral(rank + 0.5) - self.weight(rank) {
                return rank as u32 - 1;
            }
        }
    }
}

/// How long the pages of a service lie idle: shares of its memory with the seconds since the last access, both rising, as
/// in Table I of the Vistara paper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<[f64; 2]>", into = "Vec<[f64; 2]>")]
pub struct Idle(Vec<[f64; 2]>);

/// Why numbers are no idle times.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "idle times {}: expected shares that rise from above 0 to below 1, each with seconds above 0 that rise too",
    quoted(&format!("{found:?}"))
)]
pub struct IdleError {
    found: Vec<[f64; 2]>,
}

impl TryFrom<Vec<[f64; 2]>> for Idle {
    type Error = IdleError;

    fn try_from(points: Vec<[f64; 2]>) -> Result<Self, IdleError> {
        let is_inside = |[share, seconds]: &[f64; 2]| {
            (0.0..1.0).contains(share) && *share > 0.0 && *seconds > 0.0 && seconds.is_finite()
        };
        let rises = points.windows(2).all(|pair| pair[0][0] < pair[1][0] && pair[0][1] < pair[1][1]);
        match points.len() >= 2 && rises && points.iter().all(is_inside) {
            true => Ok(Self(points)),
            false => Err(IdleError { found: points }),
        }
    }
}

impl From<Idle> for Vec<[f64; 2]> {
    fn from(idle: Idle) -> Self {
        idle.0
    }
}

impl Idle {
    /// Seconds since the last access of the page at this share of the memory, the most recently accessed first. Between two
    /// points by the logarithm; beyond them along the nearest two.
    #[must_use]
    pub fn seconds(&self, share: f64) -> f64 {
        let points = &self.0;
        let above = points.partition_point(|point| point[0] < share).clamp(1, points.len() - 1);
        let ([before, low], [after, high]) = (points[above - 1], points[above]);
        (low.ln() + (high / low).ln() * (share - before) / (after - before)).exp()
    }

    /// Accesses a second of the coldest part of the memory, for each page of the whole: pages that are accessed at random
    /// moments are as long idle as their mean interval.
    #[must_use]
    pub fn touches_per_s(&self, coldest: f64) -> f64 {
        const STEPS: u32 = 1000;
        let at = |step: u32| 1.0 - coldest * (f64::from(step) + 0.5) / f64::from(STEPS);
        let sum: f64 = (0..STEPS).map(|step| 1.0 / self.seconds(at(step))).sum();
        sum * coldest / f64::from(STEPS)
    }
}

/// A cache that is full: an object stays for a time, and all that stay are read alike. No tier can hold the hot ones, because none is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turnover {
    /// Seconds that an object stays.
    pub stays_s: f64,
    /// The part of requests that find their object, below 1.
    pub hits: f64,
}

impl Turnover {
    /// Bytes a second that so many bytes of it draw, on whichever tier. A request that finds no object brings one, so that an object
    /// answers `hits / (1 - hits)` requests while it stays; with the write that brings it, it is accessed `1 / (1 - hits)` times.
    #[must_use]
    pub fn bytes_per_s(&self, bytes: f64) -> f64 {
        bytes / (self.stays_s * (1.0 - self.hits))
    }
}

/// Accesses of a service whose pages lie idle as given: each page at an interval of its own, begun at a random moment of it, so
/// that half of the interval is its mean idle time.
#[derive(Clone, Debug)]
pub struct Touches {
    /// Of each page, the generations between two accesses, and the time of the next one in generations.
    pages: Vec<[f64; 2]>,
    now: f64,
}

impl Touches {
    /// Accesses of so many pages in generations of so many seconds. Ranks of coldness are strewn over the pages.
    #[must_use]
    pub fn new(idle: &Idle, pages: u32, generation_s: f64, random: &mut Random) -> Self {
        let mut found: Vec<_> = (0..pages)
            .map(|page| 2.0 * idle.seconds((f64::from(page) + 0.5) / f64::from(pages)) / generation_s)
            .map(|interval| [interval, interval * random.unit()])
            .collect();
        for last in (1..found.len()).rev() {
            found.swap(last, random.below(last as u32 + 1) as usize);
        }
        Self { pages: found, now: 0.0 }
    }

    /// Adds the pages that are accessed in the next generation, each once, in the order of their numbers from `first` on.
    pub fn generation(&mut self, first: u32, trace: &mut Vec<u32>) {
        self.now += 1.0;
        for (page, [interval, next]) in (first..).zip(&mut self.pages) {
            if *next < self.now {
                *next += *interval * ((self.now - *next) / *interval).ceil();
                trace.push(page);
            }
        }
    }
}
