//! The linear program: fractions that minimise the sum over phases of the slowest link's seconds, under capacities.
//!
//! Variables are the fraction x of each object in each tier, and the seconds t of each phase. Minimise the sum of t where
//! - the fractions of an object add up to 1;
//! - the bytes in a tier are at most its capacity;
//! - each link's seconds in a phase are at most t, and t is at least what the phase takes anyway;
//! - with computation of c seconds, of which a part o runs beside transfers, t is at least c + (1 - o) link and link + (1 - o) c,
//!   where link has the seconds in which devices send each other what it carries, in turn.

use std::collections::BTreeSet;

use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem as Program, Variable};
use polder_platform::Bytes;

use crate::problem::{Computing, Object, Phase, PlaceError, Placement, Problem, whole};

/// What a whole object counts in the program. The solver keeps to each constraint within 1e-7, whatever its size: against this
/// it is what rounding leaves, where against 1 a full tier would hold thousands of bytes too many.
const WHOLE: f64 = 1e4;

pub(crate) fn place(problem: &Problem) -> Result<Placement, PlaceError> {
    for set in confining(problem) {
        let stays =
            |object: &&Object| !object.only.is_empty() && object.only.iter().all(|tier| set.contains(tier));
        let bytes: f64 = problem.objects.iter().filter(stays).map(|object| object.bytes.value()).sum();
        let tiers = set.iter().map(|tier| &problem.tiers[*tier]);
        let capacity: f64 = tiers.clone().map(|tier| tier.capacity.value()).sum();
        if bytes > capacity {
            let tier = tiers.map(|tier| tier.name.as_str()).collect::<Vec<_>>().join(" and ");
            let (capacity, bytes) = (Bytes::new(capacity), Bytes::new(bytes));
            return Err(PlaceError::TooSmall { tier, capacity, bytes });
        }
    }
    let best = solve(problem, None)?;
    // Of equally good placements the one whose links carry least: the first program says nothing of links that wait.
    let sum = problem.seconds(&best).iter().sum();
    Ok(solve(problem, Some(sum)).unwrap_or(best))
}

/// Sets of tiers that objects cannot leave, and all unions of such sets.
fn confining(problem: &Problem) -> Vec<BTreeSet<usize>> {
    let mut sets: Vec<BTreeSet<usize>> = vec![];
    for object in problem.objects.iter().filter(|it| !it.only.is_empty()) {
        let only: BTreeSet<usize> = object.only.iter().copied().collect();
        let unions: Vec<_> = sets.iter().map(|set| set | &only).chain([only.clone()]).collect();
        for set in unions {
            if !sets.contains(&set) {
                sets.push(set);
            }
        }
    }
    sets
}

/// Solves for the least sum of the phases' seconds, or for the least sum of all links' seconds with the phases' at most `most`.
fn solve(problem: &Problem, most: Option<f64>) -> Result<Placement, PlaceError> {
    let (objects, tiers) = (problem.objects.len(), problem.tiers.len());
    let unsolved = |problem: String| PlaceError::Unsolved { objects, tiers, problem };
    // Units in which coefficients are near 1, where the solver is exact.
    let bytes = problem.objects.iter().map(|object| object.bytes.value()).fold(1.0, f64::max);
    let seconds = time_unit(problem);
    let mut program = Program::new(OptimizationDirection::Minimize);
    let fraction = |object: usize, tier: usize| match &problem.objects[object] {
        object if object.only == [tier] => (WHOLE, WHOLE),
        object => (0.0, if object.can_lie_in(tier) { WHOLE } else { 0.0 }),
    };
    let cost = |object: usize, tier: usize| match most {
        Some(_) => problem.passes_of(object, tier) / seconds,
        None => 0.0,
    };
    let fractions: Vec<Vec<Variable>> = (0..objects)
        .map(|object| {
            (0..tiers).map(|tier| program.add_var(cost(object, tier), fraction(object, tier))).collect()
        })
        .collect();
    for row in &fractions {
        program.add_constraint(sum(row.iter().map(|variable| (*variable, 1.0))), ComparisonOp::Eq, WHOLE);
    }
    for (index, tier) in problem.tiers.iter().enumerate() {
        let held = fractions
            .iter()
            .zip(&problem.objects)
            .map(|(row, object)| (row[index], object.bytes.value() / bytes));
        program.add_constraint(sum(held), ComparisonOp::Le, WHOLE * tier.capacity.value() / bytes);
    }
    let mut phases = vec![];
    for phase in &problem.phases {
        let cost = if most.is_none() { 1.0 } else { 0.0 };
        let whole = program.add_var(cost, (WHOLE * least(phase) / seconds, f64::INFINITY));
        phases.push((whole, 1.0));
        let Computing { seconds: computing, overlap } = phase.computing;
        let (computing, alone) = (WHOLE * computing / seconds, 1.0 - overlap);
        for turn in phase.turns() {
            let mut links = vec![vec![(whole, -1.0)]; tiers];
            for moved in turn.moved {
                for (tier, fraction) in fractions[moved.object].iter().enumerate() {
                    for (link, all) in problem.passes(phase, moved, tier) {
                        links[link].push((*fraction, all / seconds));
                    }
                }
            }
            let exchanged = WHOLE * turn.exchanged_s / seconds;
            for link in links {
                if computing > 0.0 && alone > 0.0 {
                    let part = link.iter().map(|(variable, all)| {
                        (*variable, if *variable == whole { *all } else { alone * all })
                    });
                    program.add_constraint(sum(part), ComparisonOp::Le, -computing - alone * exchanged);
                }
                program.add_constraint(
                    sum(link.into_iter()),
                    ComparisonOp::Le,
                    -alone * computing - exchanged,
                );
            }
        }
    }
    if let Some(most) = most {
        program.add_constraint(
            sum(phases.into_iter()),
            ComparisonOp::Le,
            WHOLE * most / seconds * (1.0 + 1e-9),
        );
    }
    let outcome = program.solve().map_err(|error| unsolved(error.to_string()))?;
    let solution = outcome.into_solution().map_err(|_| unsolved("it was interrupted".into()))?;
    let row = |row: &Vec<Variable>| {
        whole(&row.iter().map(|variable| solution.var_value(*variable)).collect::<Vec<_>>())
    };
    Ok(Placement { fractions: fractions.iter().map(row).collect() })
}

/// The seconds that a phase takes wherever the bytes lie.
fn least(phase: &Phase) -> f64 {
    let turns = phase.turns().map(|turn| turn.least_s + turn.exchanged_s);
    phase.computing.beside(turns.fold(0.0, f64::max))
}

/// The seconds that a step takes with everything in its fastest tier.
fn time_unit(problem: &Problem) -> f64 {
    let fastest = problem.phases.iter().flat_map(|phase| {
        phase.moved.iter().map(move |moved| {
            let tiers = (0..problem.tiers.len())
                .flat_map(|tier| problem.passes(phase, moved, tier).map(|(_, all)| all));
            tiers.fold(f64::INFINITY, f64::min)
        })
    });
    let least: f64 = problem.phases.iter().map(least).sum();
    let whole = fastest.sum::<f64>() + least;
    if whole > 0.0 { whole } else { 1.0 }
}

/// A sum in which every variable stands once.
fn sum(terms: impl Iterator<Item = (Variable, f64)>) -> LinearExpr {
    let mut all: Vec<(Variable, f64)> = vec![];
    for (variable, coefficient) in terms.filter(|(_, coefficient)| *coefficient != 0.0) {
        match all.iter_mut().find(|(it, _)| *it == variable) {
            Some((_, sum)) => *sum += coefficient,
            None => all.push((variable, coefficient)),
        }
    }
    all.into_iter().collect()
}
