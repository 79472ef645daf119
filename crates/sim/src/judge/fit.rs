//! Fits an accelerator's constants to published steps.

use polder_platform::{Fitted, Platform, Time};

use crate::judge::published::{Table, predicted};

/// What the constants are taken to be before any step is seen, and how far from it each is plausible, as a factor.
const PRIOR: [(f64, f64); 8] = [
    (0.80, 1.15), // matrix: what libraries reach on products of 8,192 and more
    (150.0, 2.0), // depth: a tile's start and end, in steps of the inner dimension
    (0.40, 1.25), // attention: FlashAttention-2 reaches a third (H100) to two thirds (A100) of the peak
    (0.80, 1.12), // stream: what copies reach
    (5e-6, 1.6),  // launch: gaps between kernels and their tails
    (0.75, 1.15), // inside: bus bandwidth of collectives over that of the links
    (0.75, 1.2),  // between: the same, on a network that others use too
    (0.004, 2.0), // straggle
];
/// How far a prediction is plausibly off: what the prior is weighed against.
const NOISE: f64 = 0.03;
/// How far a publication's software is plausibly faster or slower than another's.
pub(crate) const SOFTWARE: f64 = 0.15;

/// The most plausible constants given the tables: least squares of the logarithms, each table with its scalar, each
/// constant near its prior. The same input gives the same constants.
#[must_use]
pub fn fit(tables: &[(&Table, &Platform)]) -> Fitted {
    constants(&descend(|at| cost(at, tables)))
}

/// Where a cost is the least, from the origin on: a pattern search.
pub fn descend<const N: usize>(cost: impl Fn(&[f64; N]) -> f64) -> [f64; N] {
    let mut at = [0.0; N];
    let mut best = cost(&at);
    let mut stride = 1.0;
    while stride > 1e-3 {
        let mut moved = false;
        for axis in 0..N {
            for sign in [1.0, -1.0] {
                let mut next = at;
                next[axis] += sign * stride;
                let cost = cost(&next);
                if cost < best {
                    (at, best, moved) = (next, cost, true);
                    break;
                }
            }
        }
        if !moved {
            stride *= 0.5;
        }
    }
    at
}

/// The constants that lie so many plausible factors from the prior.
fn constants(at: &[f64; 8]) -> Fitted {
    let mut values = [0.0; 8];
    for (index, (prior, factor)) in PRIOR.into_iter().enumerate() {
        let value = prior * f64::powf(factor, at[index]);
        let is_part = matches!(index, 0 | 2 | 3 | 5 | 6);
        values[index] = if is_part { value.min(1.0) } else { value };
    }
    Fitted { launch: Time::new(values[4]), ..Fitted::from_values(values) }
}

fn cost(at: &[f64; 8], tables: &[(&Table, &Platform)]) -> f64 {
    let fitted = constants(at);
    let prior: f64 = at.iter().map(|it| it * it).sum();
    prior + tables.iter().map(|(table, platform)| misfit(table, platform, &fitted)).sum::<f64>()
}

fn misfit(table: &Table, platform: &Platform, fitted: &Fitted) -> f64 {
    let predicted = predicted(&table.row, platform, fitted);
    let logs: Vec<_> =
        table.row.iter().zip(predicted).map(|(row, step)| (step.total_s / row.seconds()).ln()).collect();
    let weight = table.counts_as.map_or(1.0, |rows| f64::from(rows) / logs.len() as f64);
    // The scalar that is the most plausible for these rows.
    let sum: f64 = logs.iter().sum();
    let scalar = weight * sum / (weight * logs.len() as f64 + (NOISE / SOFTWARE).powi(2));
    let rows: f64 = logs.iter().map(|log| (log - scalar).powi(2)).sum();
    weight * rows / NOISE.powi(2) + (scalar / SOFTWARE).powi(2)
}
