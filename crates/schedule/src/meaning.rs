//! What a schedule computes: it is run on symbols instead of bytes, and held against what its collective promises.

use std::collections::BTreeMap;

use crate::{Action, Collective, Schedule, Source};

/// Why a schedule does not do what its collective promises.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A source that no earlier phase has made.
    #[error("{collective}: rank {rank} reads {source_text} in phase {phase}, which no rank has made before")]
    Unmade {
        /// What it should achieve.
        collective: Collective,
        /// Who reads.
        rank: usize,
        /// When.
        phase: usize,
        /// What.
        source_text: String,
    },
    /// A rank that does not get what it should.
    #[error("{collective}: chunk {chunk} of rank {rank}'s output is {found}, not {expected}")]
    Wrong {
        /// What it should achieve.
        collective: Collective,
        /// Whose output.
        rank: usize,
        /// Which chunk.
        chunk: usize,
        /// What it gets.
        found: String,
        /// What it should get.
        expected: String,
    },
    /// A block that a phase overwrites although an earlier one of the same round has filled it.
    #[error("{collective}: rank {rank} fills block {block} again in phase {phase}")]
    Refilled {
        /// What it should achieve.
        collective: Collective,
        /// Whose block.
        rank: usize,
        /// Which.
        block: usize,
        /// When.
        phase: usize,
    },
}

/// The inputs that went into a chunk: (rank, chunk of its input), with how often.
type Value = BTreeMap<(usize, usize), usize>;

/// What stands where while a schedule runs.
struct Run<'a> {
    schedule: &'a Schedule,
    blocks: BTreeMap<(usize, usize), Value>,
    outputs: BTreeMap<(usize, usize), Value>,
}

impl Schedule {
    /// Runs the schedule on symbols: every rank must get what the collective promises, each input exactly once.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let mut run = Run { schedule: self, blocks: BTreeMap::new(), outputs: BTreeMap::new() };
        for phase in 0..self.phases.len() {
            run.phase(phase)?;
        }
        let outputs =
            (0..self.ranks).flat_map(|rank| (0..self.output_chunks).map(move |chunk| (rank, chunk)));
        outputs.filter(|&(rank, _)| self.has_output(rank)).try_for_each(|(rank, chunk)| run.hold(rank, chunk))
    }

    /// What chunk `chunk` of rank `rank`'s output must be.
    fn promise(&self, rank: usize, chunk: usize) -> Value {
        let all = |chunk| (0..self.ranks).map(|peer| ((peer, chunk), 1)).collect();
        match self.collective {
            Collective::Barrier => Value::new(),
            Collective::Broadcast => Value::from([((self.root, chunk), 1)]),
            Collective::Reduce | Collective::AllReduce => all(chunk),
            Collective::ReduceScatter => all(rank),
            Collective::AllGather | Collective::Gather => Value::from([((chunk, 0), 1)]),
            Collective::Scatter => Value::from([((self.root, rank), 1)]),
            Collective::AllToAll => Value::from([((chunk, rank), 1)]),
        }
    }
}

impl Run<'_> {
    /// Everything in a phase reads what stood there before the phase.
    fn phase(&mut self, phase: usize) -> Result<(), ScheduleError> {
        let before = self.blocks.clone();
        for (rank, actions) in self.schedule.phases[phase].actions.iter().enumerate() {
            for action in actions {
                let value = self.combine(&before, rank, phase, action)?;
                if let Some(chunk) = action.output {
                    self.outputs.insert((rank, chunk), value.clone());
                }
                self.fill(rank, phase, action, value)?;
            }
        }
        Ok(())
    }

    fn fill(
        &mut self,
        rank: usize,
        phase: usize,
        action: &Action,
        value: Value,
    ) -> Result<(), ScheduleError> {
        let collective = self.schedule.collective;
        match action.block {
            Some(block) if self.blocks.insert((rank, block), value).is_some() => {
                Err(ScheduleError::Refilled { collective, rank, block, phase })
            }
            _ => Ok(()),
        }
    }

    fn combine(
        &self,
        blocks: &BTreeMap<(usize, usize), Value>,
        rank: usize,
        phase: usize,
        action: &Action,
    ) -> Result<Value, ScheduleError> {
        let mut sum = Value::new();
        for source in &action.sources {
            let part = match *source {
                Source::Input(chunk)
                    if self.schedule.has_input(rank) && chunk < self.schedule.input_chunks =>
                {
                    Some(Value::from([((rank, chunk), 1)]))
                }
                Source::Input(_) => None,
                Source::Block { rank, block } => blocks.get(&(rank, block)).cloned(),
            };
            let part = part.ok_or_else(|| ScheduleError::Unmade {
                collective: self.schedule.collective,
                rank,
                phase,
                source_text: format!("{source:?}"),
            })?;
            for (input, times) in part {
                *sum.entry(input).or_default() += times;
            }
        }
        Ok(sum)
    }

    fn hold(&self, rank: usize, chunk: usize) -> Result<(), ScheduleError> {
        let output = self.outputs.get(&(rank, chunk)).cloned().unwrap_or_default();
        let expected = self.schedule.promise(rank, chunk);
        if output == expected {
            return Ok(());
        }
        let collective = self.schedule.collective;
        let (found, expected) = (format!("{output:?}"), format!("{expected:?}"));
        Err(ScheduleError::Wrong { collective, rank, chunk, found, expected })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(ranks: usize, root: usize) -> Vec<Schedule> {
        let direct = Collective::ALL.map(|collective| Schedule::direct(collective, ranks, root));
        let sharded = [Collective::AllReduce, Collective::Reduce].map(|c| Schedule::sharded(c, ranks, root));
        direct.into_iter().chain(sharded).collect()
    }

    #[test]
    fn every_flat_schedule_keeps_its_promise() {
        for ranks in 1..=9 {
            for root in 0..ranks {
                for schedule in all(ranks, root) {
                    schedule.check().unwrap_or_else(|error| panic!("{ranks} ranks, root {root}: {error}"));
                }
            }
        }
    }

    #[test]
    fn every_two_level_schedule_keeps_its_promise_on_even_and_uneven_hosts() {
        let places: [&[u16]; 6] = [
            &[0, 0, 1, 1],
            &[0, 1, 0, 1],
            &[5, 5, 5, 2],
            &[0, 1, 1, 1, 2],
            &[3, 3, 3, 1, 1, 1, 2, 2, 2],
            &[1, 0, 0],
        ];
        for hosts in places {
            for root in 0..hosts.len() {
                let schedules =
                    Collective::ALL.map(|collective| Schedule::two_level(collective, hosts, root));
                assert_eq!(schedules.iter().flatten().count(), 5);
                for schedule in schedules.iter().flatten() {
                    schedule.check().unwrap_or_else(|error| panic!("{hosts:?}, root {root}: {error}"));
                }
            }
        }
    }

    #[test]
    fn there_is_no_second_level_where_it_saves_nothing() {
        for hosts in [&[0, 0, 0][..], &[0, 1, 2], &[4]] {
            assert_eq!(Schedule::two_level(Collective::AllReduce, hosts, 0), None);
        }
    }

    #[test]
    fn a_schedule_that_misses_a_rank_is_wrong() {
        let mut schedule = Schedule::direct(Collective::AllReduce, 3, 0);
        schedule.phases[1].actions[2][0].sources.pop();
        assert!(matches!(schedule.check(), Err(ScheduleError::Wrong { rank: 2, chunk: 0, .. })));
    }

    #[test]
    fn a_schedule_that_reads_too_early_is_wrong() {
        let mut schedule = Schedule::direct(Collective::Broadcast, 2, 0);
        schedule.phases.swap(0, 1);
        assert!(matches!(schedule.check(), Err(ScheduleError::Unmade { rank: 1, phase: 0, .. })));
    }
}
