//! How much of a peak is reached, by size.

use serde::{Deserialize, Serialize};

use crate::unit::{ByteUnit, OperationUnit};
use crate::{Quantity, Unit};

/// Efficiency by size, as it was measured: it takes the place of fitted constants.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Efficiency {
    /// Of matrix products, by their operations; in place of `matrix` and `depth`.
    pub matrix: Option<Curve<OperationUnit>>,
    /// Of kernels that move data, by their bytes; in place of `stream`.
    pub memory: Option<Curve<ByteUnit>>,
    /// Whether a product computes and moves data in turn, not at once.
    pub in_turn: bool,
}

/// The part of a peak that is reached at a size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "U: Unit")]
pub struct Reached<U: Unit> {
    /// Of one kernel.
    pub size: Quantity<U>,
    /// From 0 to 1.
    pub reached: f64,
}

/// Points by size, the smallest first. Between two of them efficiency is straight over the logarithm of the size, before the
/// first and after the last it is level. Two points of one size are a step: the second counts from there on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Reached<U>>", into = "Vec<Reached<U>>", bound = "U: Unit + Clone")]
pub struct Curve<U: Unit>(Vec<Reached<U>>);

impl<U: Unit> Curve<U> {
    /// What is reached at so many of the base unit.
    #[must_use]
    pub fn at(&self, size: f64) -> f64 {
        let next = self.0.partition_point(|point| point.size.value() <= size);
        let (Some(before), Some(after)) = (next.checked_sub(1).map(|it| &self.0[it]), self.0.get(next))
        else {
            return self.0[next.min(self.0.len() - 1)].reached;
        };
        let way = |size: f64| (size / before.size.value()).ln();
        before.reached + (after.reached - before.reached) * way(size) / way(after.size.value())
    }

    /// The most that is reached.
    #[must_use]
    pub fn most(&self) -> f64 {
        self.0.iter().fold(0.0, |most, point| point.reached.max(most))
    }
}

impl<U: Unit> TryFrom<Vec<Reached<U>>> for Curve<U> {
    type Error = String;

    fn try_from(points: Vec<Reached<U>>) -> Result<Self, String> {
        if points.is_empty() {
            return Err("expected at least one point, found none".into());
        }
        if let Some(point) = points.iter().find(|it| !(it.reached > 0.0 && it.reached <= 1.0)) {
            return Err(format!("expected a part from 0 to 1 at {}, found {}", point.size, point.reached));
        }
        match points.windows(2).find(|pair| pair[1].size < pair[0].size) {
            Some(pair) => Err(format!(
                "expected the smallest size first, found {} after {}",
                pair[1].size, pair[0].size
            )),
            None => Ok(Self(points)),
        }
    }
}

impl<U: Unit> From<Curve<U>> for Vec<Reached<U>> {
    fn from(curve: Curve<U>) -> Self {
        curve.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;

    fn curve(points: &[(f64, f64)]) -> Result<Curve<ByteUnit>, String> {
        let point = |&(size, reached)| Reached { size: Bytes::new(size), reached };
        points.iter().map(point).collect::<Vec<_>>().try_into()
    }

    #[test]
    fn between_points_efficiency_is_straight_over_the_logarithm() {
        let curve = curve(&[(1e3, 0.2), (1e5, 0.6)]).unwrap();
        assert!((curve.at(1e4) - 0.4).abs() < 1e-12);
        assert_eq!([0.0, 1e3, 1e5, 1e9].map(|size| curve.at(size)), [0.2, 0.2, 0.6, 0.6]);
    }

    #[test]
    fn two_points_of_one_size_are_a_step() {
        let curve = curve(&[(1e3, 0.1), (1e3, 0.5), (1e6, 0.5), (1e6, 0.9)]).unwrap();
        assert_eq!([999.0, 1e3, 5e5, 999_999.0, 1e6].map(|size| curve.at(size)), [0.1, 0.5, 0.5, 0.5, 0.9]);
        assert_eq!(curve.most(), 0.9);
    }

    #[test]
    fn what_is_no_curve_says_what_was_expected() {
        for (points, expected) in [
            (&[][..], "at least one point"),
            (&[(1.0, 0.0)], "expected a part from 0 to 1 at 1 B, found 0"),
            (&[(2e3, 0.5), (1e3, 0.6)], "expected the smallest size first, found 1 kB after 2 kB"),
        ] {
            let said = curve(points).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
    }
}
