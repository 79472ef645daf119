//! One rank's part of a schedule, with everything worked out that does not depend on sizes.

use polder_schedule::{Action, Schedule, Source};

/// One rank's part of a schedule.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Its part of each phase.
    pub(crate) steps: Vec<Step>,
    /// Chunks that the longer of input and output is cut into, at least 1.
    pub(crate) chunks: usize,
    /// Blocks of the rank that has most: the blocks of a slot.
    pub(crate) blocks: usize,
}

/// One rank's part of a phase.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) actions: Vec<Act>,
    /// Ranks and the phase that each must have finished, in the same round, before their blocks are read here.
    pub(crate) awaits: Vec<Turn>,
    /// Ranks and the phase in which each last reads a block that is filled here: before the slot is filled again.
    pub(crate) readers: Vec<Turn>,
    /// Whether a block is filled here that any peer reads.
    pub(crate) fills: bool,
    /// Whether one of another host reads it.
    pub(crate) fills_far: bool,
}

/// A phase of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) rank: usize,
    pub(crate) phase: usize,
}

/// An action with its blocks found.
#[derive(Debug)]
pub(crate) struct Act {
    pub(crate) sources: Vec<From>,
    pub(crate) output: Option<usize>,
    pub(crate) block: Option<Block>,
    /// A chunk that is as long as what the action moves.
    pub(crate) length: Chunk,
    pub(crate) complete: bool,
}

/// Where an action reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// A chunk of the input.
    Input(usize),
    /// A block of a rank.
    Block(Block),
}

/// A block of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Whose.
    pub(crate) rank: usize,
    /// Its place among the rank's blocks.
    pub(crate) index: usize,
    /// The chunk that it shows, where the block of data that lives in the pool is that chunk itself.
    pub(crate) chunk: Option<Chunk>,
    /// Whether it crosses between hosts: on its way to us, or, for our own, to any reader.
    pub(crate) far: bool,
}

/// A chunk of a rank's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// Of its input.
    Input(usize),
    /// Of its output.
    Output(usize),
}

impl Plan {
    /// The part of `rank` among ranks that live on `hosts`.
    pub(crate) fn new(schedule: &Schedule, hosts: &[u16], rank: usize) -> Self {
        let work = Work { schedule, hosts, rank };
        let steps = (0..schedule.phases.len()).map(|phase| work.step(phase)).collect();
        let blocks = (0..schedule.ranks).map(|rank| work.blocks_of(rank).len()).max().unwrap_or(0).max(1);
        Self { steps, chunks: schedule.input_chunks.max(schedule.output_chunks).max(1), blocks }
    }

    /// Whether blocks can be the chunks of data in the pool themselves.
    pub(crate) fn shows_only_chunks(&self) -> bool {
        let blocks = self.steps.iter().flat_map(|step| &step.actions).filter_map(|act| act.block.as_ref());
        blocks.into_iter().all(|block| block.chunk.is_some())
    }
}

struct Work<'a> {
    schedule: &'a Schedule,
    hosts: &'a [u16],
    rank: usize,
}

impl Work<'_> {
    fn actions(&self, rank: usize) -> impl Iterator<Item = (usize, &Action)> {
        let phases = self.schedule.phases.iter().enumerate();
        phases.flat_map(move |(phase, all)| all.actions[rank].iter().map(move |action| (phase, action)))
    }

    /// The blocks that `rank` fills, in order of their first use.
    fn blocks_of(&self, rank: usize) -> Vec<usize> {
        self.actions(rank).filter_map(|(_, action)| action.block).collect()
    }

    /// Who reads `block` of this rank, and when.
    fn readers(&self, block: usize) -> Vec<Turn> {
        let wanted = Source::Block { rank: self.rank, block };
        let peers = (0..self.schedule.ranks).filter(|&rank| rank != self.rank);
        peers
            .flat_map(|rank| {
                let reads = self.actions(rank).filter(move |(_, action)| action.sources.contains(&wanted));
                reads.map(move |(phase, _)| Turn { rank, phase })
            })
            .collect()
    }

    /// The phase in which `rank` fills `block`, and with what.
    fn maker(&self, rank: usize, block: usize) -> (usize, &Action) {
        let mut makers = self.actions(rank).filter(|(_, action)| action.block == Some(block));
        makers.next().expect("a checked schedule reads only what was made")
    }

    fn block(&self, rank: usize, block: usize, far: bool) -> Block {
        let index = self.blocks_of(rank).iter().position(|&one| one == block);
        let (_, maker) = self.maker(rank, block);
        let chunk = match (maker.output, maker.sources.as_slice()) {
            (Some(output), _) => Some(Chunk::Output(output)),
            (None, [Source::Input(chunk)]) => Some(Chunk::Input(*chunk)),
            _ => None,
        };
        Block { rank, index: index.expect("its maker was found"), chunk, far }
    }

    fn is_far(&self, rank: usize) -> bool {
        self.hosts[rank] != self.hosts[self.rank]
    }

    fn step(&self, phase: usize) -> Step {
        let mut step = Step::default();
        for action in &self.schedule.phases[phase].actions[self.rank] {
            let mut sources: Vec<From> = action.sources.iter().map(|source| self.from(source)).collect();
            // The kernels commute bit for bit. With a block in front the sum is begun by the copy out of the pool.
            if sources.len() > 1 && matches!(sources[0], From::Input(_)) {
                sources.swap(0, 1);
            }
            for source in &action.sources {
                self.await_source(source, &mut step.awaits);
            }
            let block = action.block.map(|block| {
                let readers = self.readers(block);
                let far = readers.iter().any(|turn| self.is_far(turn.rank));
                step.fills |= !readers.is_empty();
                step.fills_far |= far;
                readers.into_iter().for_each(|turn| latest(&mut step.readers, turn));
                self.block(self.rank, block, far)
            });
            let length = length(action);
            step.actions.push(Act {
                sources,
                output: action.output,
                block,
                length,
                complete: action.complete,
            });
        }
        step
    }

    fn from(&self, source: &Source) -> From {
        match *source {
            Source::Input(chunk) => From::Input(chunk),
            Source::Block { rank, block } => From::Block(self.block(rank, block, self.is_far(rank))),
        }
    }

    fn await_source(&self, source: &Source, awaits: &mut Vec<Turn>) {
        if let Source::Block { rank, block } = *source
            && rank != self.rank
        {
            latest(awaits, Turn { rank, phase: self.maker(rank, block).0 });
        }
    }
}

/// A chunk that is as long as what the action moves.
fn length(action: &Action) -> Chunk {
    let input = action.sources.iter().find_map(|source| match source {
        Source::Input(chunk) => Some(Chunk::Input(*chunk)),
        Source::Block { .. } => None,
    });
    action
        .output
        .map(Chunk::Output)
        .or(input)
        .expect("an action has an output, or combines an input of its own")
}

/// Adds a turn, or moves the rank's turn to the later phase: whoever has finished that has finished the earlier.
fn latest(turns: &mut Vec<Turn>, turn: Turn) {
    match turns.iter_mut().find(|other| other.rank == turn.rank) {
        Some(other) => other.phase = other.phase.max(turn.phase),
        None => turns.push(turn),
    }
}

#[cfg(test)]
mod tests {
    use polder_schedule::Collective;

    use super::*;

    #[test]
    fn a_sharded_all_reduce_awaits_its_peer_once_a_phase() {
        let plan = Plan::new(&Schedule::sharded(Collective::AllReduce, 2, 0), &[0, 1], 1);
        assert_eq!((plan.chunks, plan.blocks), (2, 2));
        let awaits: Vec<_> = plan.steps.iter().map(|step| step.awaits.as_slice()).collect();
        assert_eq!(awaits, [&[][..], &[Turn { rank: 0, phase: 0 }], &[Turn { rank: 0, phase: 1 }]]);
        let readers: Vec<_> = plan.steps.iter().map(|step| step.readers.as_slice()).collect();
        assert_eq!(readers, [&[Turn { rank: 0, phase: 1 }][..], &[Turn { rank: 0, phase: 2 }], &[]]);
        assert!(plan.steps[0].fills_far && plan.shows_only_chunks());
    }

    #[test]
    fn inside_a_host_nothing_is_far() {
        let hosts = [0, 0, 1, 1];
        let schedule = Schedule::two_level(Collective::AllReduce, &hosts, 0).unwrap();
        let plan = Plan::new(&schedule, &hosts, 2);
        assert_eq!(
            plan.steps.iter().map(|step| step.fills_far).collect::<Vec<_>>(),
            [false, true, false, false]
        );
        assert!(!plan.shows_only_chunks());
    }
}
