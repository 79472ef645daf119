//! What CG of the NAS Parallel Benchmarks and miniAMR send and compute, without their arithmetic.

use polder_sim::program::{Collective, Group, Network, Operation, ReplayError, UNWAITED, replay};
use serde::{Deserialize, Serialize};

/// What ranks do again and again, beginning together.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Of each rank.
    pub ranks: Vec<Vec<Operation>>,
    /// How often.
    pub times: f64,
}

/// Why a program cannot run so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SkeletonError {
    /// CG divides its matrix by halves.
    #[error("{program} runs on a power of two of ranks, found {ranks}")]
    NoPowerOfTwo {
        /// Which.
        program: &'static str,
        /// How many.
        ranks: u32,
    },
    /// It waits for ever.
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// Seconds of a program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ProgramSeconds {
    /// Until the last rank has ended.
    pub total_s: f64,
    /// Computing, the mean of the ranks.
    pub compute_s: f64,
    /// The rest: sending and waiting.
    pub communication_s: f64,
}

/// What a program takes over a network.
///
/// # Errors
/// When it waits for what never comes.
pub fn program_time(parts: &[Part], network: &Network) -> Result<ProgramSeconds, SkeletonError> {
    let mut sum = ProgramSeconds { total_s: 0.0, compute_s: 0.0, communication_s: 0.0 };
    for part in parts {
        let found = replay(&part.ranks, network)?;
        let mean = found.ranks.iter().map(|it| it.compute_s).sum::<f64>() / found.ranks.len() as f64;
        sum.total_s += part.times * found.total_s;
        sum.compute_s += part.times * mean;
    }
    sum.communication_s = sum.total_s - sum.compute_s;
    Ok(sum)
}

const DOUBLE: u64 = 8;

fn send(to: u32, bytes: u64, tag: i64) -> Operation {
    Operation::Send { to, bytes, tag, request: Some(UNWAITED) }
}

const fn receive(from: u32, tag: i64) -> Operation {
    Operation::Receive { from, tag, request: None }
}

/// CG: the largest eigenvalue of a sparse matrix by conjugate gradients (NPB 3.4, MPI/CG).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cg {
    /// Rows of the matrix.
    pub rows: u64,
    /// Nonzeros of a row: `nonzer * (nonzer + 1)`, as NPB counts its operations.
    pub nonzeros: u64,
    /// Outer iterations.
    pub outer: u32,
    /// Conjugate-gradient iterations of each.
    pub inner: u32,
}

/// How ranks divide the matrix: as many columns as rows of ranks, or twice as many.
#[derive(Clone, Copy)]
struct Halves {
    rows: u32,
    columns: u32,
}

impl Halves {
    /// Where a rank sends its part of the product: its mirror image across the diagonal.
    const fn mirror(self, rank: u32) -> u32 {
        let Self { rows, columns } = self;
        if rows == columns {
            rank % rows * rows + rank / rows
        } else {
            2 * (rank / 2 % rows * rows + rank / 2 / rows) + rank % 2
        }
    }

    /// The ranks of its row with which a rank sums up, in turn.
    fn partners(self, rank: u32) -> impl Iterator<Item = u32> {
        let (row, column) = (rank / self.columns, rank % self.columns);
        let steps = self.columns.ilog2();
        (0..steps).rev().map(move |step| row * self.columns + (column ^ 1 << step))
    }
}

impl Cg {
    /// What `ranks` do, where each reads `bytes_per_s` of its matrix and vectors from memory.
    ///
    /// # Errors
    /// When these are no power of two.
    pub fn parts(&self, ranks: u32, bytes_per_s: f64) -> Result<Vec<Part>, SkeletonError> {
        if !ranks.is_power_of_two() {
            return Err(SkeletonError::NoPowerOfTwo { program: "CG", ranks });
        }
        let steps = ranks.ilog2();
        let halves = Halves { rows: 1 << (steps / 2), columns: 1 << steps.div_ceil(2) };
        let vector = self.rows.div_ceil(u64::from(halves.columns)) * DOUBLE;
        // A value of 8 bytes and a column of 4 for each nonzero; the five vector operations read or write 12 vectors.
        let matrix = (self.rows * self.nonzeros * 12) as f64 / f64::from(ranks);
        let product = Operation::Compute { seconds: matrix / bytes_per_s };
        let vectors = Operation::Compute { seconds: 12.0 * vector as f64 / bytes_per_s };
        let sum = |rank: u32, bytes: u64, done: &mut Vec<Operation>| {
            for partner in halves.partners(rank) {
                done.extend([send(partner, bytes, 0), receive(partner, 0)]);
            }
        };
        // A product of the matrix: sums along rows, and the mirror image.
        let multiply = |rank: u32, done: &mut Vec<Operation>| {
            done.push(product);
            sum(rank, vector, done);
            let mirror = halves.mirror(rank);
            if mirror != rank {
                done.extend([send(mirror, vector, 1), receive(mirror, 1)]);
            }
        };
        let inner = |rank: u32| {
            let mut done = vec![];
            multiply(rank, &mut done);
            sum(rank, DOUBLE, &mut done);
            done.push(vectors);
            sum(rank, DOUBLE, &mut done);
            done
        };
        // rho before, and after: the residual, its norm, and two norms of the outer iteration.
        let outer = |rank: u32| {
            let mut done = vec![];
            sum(rank, DOUBLE, &mut done);
            multiply(rank, &mut done);
            sum(rank, DOUBLE, &mut done);
            sum(rank, 2 * DOUBLE, &mut done);
            done
        };
        let all = |of: &dyn Fn(u32) -> Vec<Operation>| (0..ranks).map(of).collect();
        Ok(vec![
            Part { ranks: all(&inner), times: f64::from(self.outer) * f64::from(self.inner) },
            Part { ranks: all(&outer), times: f64::from(self.outer) },
        ])
    }
}

/// miniAMR: a stencil on blocks, one of each rank (Mantevo, `ref/`, with the numbers of `param.h` where nothing else is said).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MiniAmr {
    /// Cells along an edge of a block.
    pub edge: u64,
    /// Variables of a cell.
    pub variables: u64,
    /// Time steps.
    pub steps: u32,
    /// Stages of a time step: halos and a stencil.
    pub stages: u32,
    /// Stages from one checksum to the next; each variable has one.
    pub checksum: u32,
    /// Time steps from one look at the refinement to the next.
    pub refine: u32,
    /// Levels of refinement, for each of which ranks agree three times.
    pub levels: u32,
    /// Operations of a stencil on a cell.
    pub operations: u64,
}

impl MiniAmr {
    /// What `ranks` do, where each does so many operations a second.
    ///
    /// # Errors
    /// When these are no power of two.
    pub fn parts(&self, ranks: u32, operations_per_s: f64) -> Result<Vec<Part>, SkeletonError> {
        if !ranks.is_power_of_two() {
            return Err(SkeletonError::NoPowerOfTwo { program: "miniAMR", ranks });
        }
        // Near a cube, x first.
        let steps = ranks.ilog2();
        let grid = [steps.div_ceil(3), (steps + 1) / 3, steps / 3].map(|it| 1_u32 << it);
        let strides = [1, grid[0], grid[0] * grid[1]];
        let face = self.edge * self.edge * self.variables * DOUBLE;
        let cells = self.edge.pow(3) * self.variables;
        let stencil = Operation::Compute { seconds: (cells * self.operations) as f64 / operations_per_s };
        let summed = Operation::Compute { seconds: self.edge.pow(3) as f64 / operations_per_s };
        let members: Vec<_> = (0..ranks).collect();
        let agree = |rank: u32, bytes: u64, done: &mut Vec<Operation>| {
            let group = Group { members: &members, place: rank as usize };
            done.extend(group.messages(Collective::AllReduce, bytes, 0));
        };
        let stage = |rank: u32| {
            let mut done = vec![];
            // One direction after another; both neighbours at once.
            for (stride, along) in strides.into_iter().zip(grid) {
                let place = rank / stride % along;
                let neighbours = || {
                    let before = (place > 0).then(|| rank - stride);
                    before.into_iter().chain((place + 1 < along).then(|| rank + stride))
                };
                done.extend(neighbours().map(|other| send(other, face, 0)));
                done.extend(neighbours().map(|other| receive(other, 0)));
            }
            done.push(stencil);
            done
        };
        // Of one variable.
        let checksum = |rank: u32| {
            let mut done = vec![summed];
            agree(rank, DOUBLE, &mut done);
            done
        };
        let refine = |rank: u32| {
            let mut done = vec![];
            let numbers = DOUBLE * u64::from(self.levels + 1);
            agree(rank, numbers, &mut done);
            for _ in 0..self.levels {
                for bytes in [4, 4, numbers] {
                    agree(rank, bytes, &mut done);
                }
            }
            done
        };
        let all = |of: &dyn Fn(u32) -> Vec<Operation>| (0..ranks).map(of).collect();
        let stages = f64::from(self.steps * self.stages);
        let sums = f64::from(self.steps * self.stages.div_ceil(self.checksum)) * self.variables as f64;
        Ok(vec![
            Part { ranks: all(&stage), times: stages },
            Part { ranks: all(&checksum), times: sums },
            Part { ranks: all(&refine), times: f64::from(1 + self.steps / self.refine) },
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polder_sim::program::Way;

    const CLASS_D: Cg = Cg { rows: 1_500_000, nonzeros: 462, outer: 100, inner: 25 };
    const BLOCKS: MiniAmr = MiniAmr {
        edge: 4,
        variables: 40,
        steps: 20,
        stages: 20,
        checksum: 5,
        refine: 5,
        levels: 5,
        operations: 7,
    };

    fn network(ranks: u32) -> Network {
        let way = Way::new(2e-6, 10e9);
        let hosts = (0..ranks).map(|rank| rank / 8).collect();
        Network { hosts, inside: way, between: way, factors: vec![] }
    }

    #[test]
    fn every_message_of_both_programs_is_received() {
        for steps in 0..9 {
            let ranks = 1 << steps;
            for parts in [CLASS_D.parts(ranks, 16e9).unwrap(), BLOCKS.parts(ranks, 2e9).unwrap()] {
                let of = |is: fn(&Operation) -> bool| {
                    parts.iter().flat_map(|it| &it.ranks).flatten().filter(|it| is(it)).count()
                };
                let sent = of(|it| matches!(it, Operation::Send { .. }));
                assert_eq!(sent, of(|it| matches!(it, Operation::Receive { .. })));
                program_time(&parts, &network(ranks)).unwrap();
            }
        }
    }

    #[test]
    fn mirror_images_are_each_others() {
        for halves in [Halves { rows: 4, columns: 4 }, Halves { rows: 4, columns: 8 }] {
            for rank in 0..halves.rows * halves.columns {
                assert_eq!(halves.mirror(halves.mirror(rank)), rank);
            }
        }
    }

    #[test]
    fn inner_ranks_of_the_grid_have_six_neighbours() {
        let parts = BLOCKS.parts(64, 2e9).unwrap();
        let sent = |rank: usize| {
            parts[0].ranks[rank].iter().filter(|it| matches!(it, Operation::Send { .. })).count()
        };
        assert_eq!((sent(0), sent(1 + 4 + 16)), (3, 6));
    }

    #[test]
    fn nine_ranks_are_refused() {
        let error = CLASS_D.parts(9, 1e9).unwrap_err();
        assert_eq!(error.to_string(), "CG runs on a power of two of ranks, found 9");
    }
}
