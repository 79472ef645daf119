//! How long pages of a service lie idle.

use polder_platform::quoted;
use serde::{Deserialize, Serialize};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_give_the_seconds_between_them_and_have_to_rise() {
        let idle = Idle::try_from(vec![[0.25, 22.5], [0.5, 1698.0], [0.75, 4680.0], [0.99, 6840.0]]).unwrap();
        assert!((idle.seconds(0.5) - 1698.0).abs() < 1e-9 && idle.seconds(0.9) > 4680.0);
        assert!(Idle::try_from(vec![[0.5, 3.0], [0.4, 5.0]]).is_err());
    }
}
