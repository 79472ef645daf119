//! One rank's part of a schedule, and all that does not depend on sizes: which peers it waits for, and when.
//!
//! A long message goes through the phases in *rounds*, each with a part of every chunk (see [`Cut`](crate::Cut)). Iteration
//! `i` does phase `p` of round `i - p`. So a rank stages one round while its peers read the one before.
//!
//! After phase `p` of round `j` a rank publishes the number `(j + p) * phases + p + 1`. It is the same on every rank, and grows
//! in the order in which the phases are done. So a rank knows which number of a peer to wait for.
//!
//! A rank's blocks of round `j` lie in slot `j % SLOTS`. It fills a slot again once each reader has published that it has
//! finished the phase in which it reads the blocks of round `j - SLOTS`.

use crate::{Action, Collective, Schedule, Source};

/// Rounds whose blocks stand in the pool at once.
pub const SLOTS: u64 = 3;

/// One rank's part of a schedule: what the pool runs, and a simulator prices.
#[derive(Debug)]
pub struct Plan {
    /// What it achieves.
    pub collective: Collective,
    /// How many ranks take part.
    pub ranks: usize,
    /// Its part of each phase.
    pub steps: Vec<Step>,
    /// Chunks that the longer of input and output is cut into, at least 1.
    pub chunks: usize,
    /// Blocks of the rank that has most: the blocks of a slot.
    pub blocks: usize,
}

/// One rank's part of a phase.
#[derive(Debug, Default)]
pub struct Step {
    /// What it does, in order.
    pub actions: Vec<RankAction>,
    /// Ranks and the phase that each must have finished, in the same round, before their blocks are read here.
    pub awaits: Vec<Turn>,
    /// Ranks and the phase in which each last reads a block that is filled here: before the slot is filled again.
    pub readers: Vec<Turn>,
    /// Whether a block is filled here that any peer reads.
    pub fills: bool,
    /// Whether one of another host reads it.
    pub fills_far: bool,
}

/// A phase of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Whose.
    pub rank: usize,
    /// Which.
    pub phase: usize,
}

/// An action with its blocks found.
#[derive(Debug)]
pub struct RankAction {
    /// What is combined, in this order but for the first two, whose order makes no difference to the bits.
    pub sources: Vec<ResolvedSource>,
    /// The chunk of the output that receives it.
    pub output: Option<usize>,
    /// The block of this rank that receives it.
    pub block: Option<Block>,
    /// A chunk that is as long as what the action moves.
    pub length: Chunk,
    /// Whether nothing will be combined with the outcome any more.
    pub complete: bool,
}

/// Where an action reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolvedSource {
    /// A chunk of the input.
    Input(usize),
    /// A block of a rank.
    Block(Block),
}

/// A block of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Whose.
    pub rank: usize,
    /// Its place among the rank's blocks.
    pub index: usize,
    /// The chunk that it shows, where the block of data that lives in the pool is that chunk itself.
    pub chunk: Option<Chunk>,
    /// Whether it crosses between hosts: on its way to us, or, for our own, to any reader.
    pub far: bool,
}

/// A chunk of a rank's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Of its input.
    Input(usize),
    /// Of its output.
    Output(usize),
}

impl Plan {
    /// The part of `rank` among ranks that live on `hosts`, of a schedule that passes [`Schedule::check`].
    ///
    /// # Panics
    /// When the schedule does not pass it.
    #[must_use]
    pub fn new(schedule: &Schedule, hosts: &[u16], rank: usize) -> Self {
        let work = Work { schedule, hosts, rank };
        let steps = (0..schedule.phases.len()).map(|phase| work.step(phase)).collect();
        let blocks = (0..schedule.ranks).map(|rank| work.blocks_of(rank).len()).max().unwrap_or(0).max(1);
        let (collective, ranks) = (schedule.collective, schedule.ranks);
        Self {
            collective,
            ranks,
            steps,
            chunks: schedule.input_chunks.max(schedule.output_chunks).max(1),
            blocks,
        }
    }

    /// The phases of `rounds` rounds in the order in which they are done: (round, phase).
    pub fn walk(&self, rounds: u64) -> impl Iterator<Item = (u64, usize)> + use<> {
        let phases = self.steps.len();
        (0..rounds + phases as u64).flat_map(move |iteration| {
            let of = move |phase| Some((iteration.checked_sub(phase as u64)?, phase));
            (0..phases).filter_map(of).filter(move |&(round, _)| round < rounds)
        })
    }

    /// What a rank publishes after a phase of a round. More than this by one comes after the last phase of the last.
    #[must_use]
    pub fn number(&self, round: u64, phase: usize) -> u64 {
        (round + phase as u64) * self.steps.len() as u64 + phase as u64 + 1
    }

    /// Whom to await before a phase of a round reads: ranks, and the number that each must have published.
    pub fn before_reading(&self, round: u64, phase: usize) -> impl Iterator<Item = (usize, u64)> + Clone {
        self.steps[phase].awaits.iter().map(move |turn| (turn.rank, self.number(round, turn.phase)))
    }

    /// Whom to await before a phase of a round fills its slot again.
    pub fn before_filling(&self, round: u64, phase: usize) -> impl Iterator<Item = (usize, u64)> + Clone {
        let filled = round.checked_sub(SLOTS);
        let readers = filled.map(|before| (before, &self.steps[phase].readers));
        readers.into_iter().flat_map(move |(before, readers)| {
            readers.iter().map(move |turn| (turn.rank, self.number(before, turn.phase)))
        })
    }

    /// Whether a peer may be waiting for this rank to finish a phase of a round so that it can fill a slot again, with no
    /// later step that is published soon. (A step is published when it fills something, when this holds, or when the
    /// rank has to wait.)
    #[must_use]
    pub fn frees(&self, rounds: u64, round: u64, phase: usize) -> bool {
        let phases = self.steps.len();
        let filled_again = round + SLOTS < rounds;
        let fills_next = self.steps[0].fills && round + (phases as u64) < rounds;
        filled_again && !self.steps[phase].awaits.is_empty() && !(phase + 1 == phases && fills_next)
    }

    /// Whether blocks can be the chunks of data in the pool themselves.
    #[must_use]
    pub fn shows_only_chunks(&self) -> bool {
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
            let mut sources: Vec<ResolvedSource> =
                action.sources.iter().map(|source| self.from(source)).collect();
            // The kernels commute bit for bit. With a block in front the sum is begun by the copy out of the pool.
            if sources.len() > 1 && matches!(sources[0], ResolvedSource::Input(_)) {
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
            step.actions.push(RankAction {
                sources,
                output: action.output,
                block,
                length,
                complete: action.complete,
            });
        }
        step
    }

    fn from(&self, source: &Source) -> ResolvedSource {
        match *source {
            Source::Input(chunk) => ResolvedSource::Input(chunk),
            Source::Block { rank, block } => {
                ResolvedSource::Block(self.block(rank, block, self.is_far(rank)))
            }
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

/// Adds a turn, or moves the rank's turn to the later phase: a rank that has finished the later has finished the earlier.
fn latest(turns: &mut Vec<Turn>, turn: Turn) {
    match turns.iter_mut().find(|other| other.rank == turn.rank) {
        Some(other) => other.phase = other.phase.max(turn.phase),
        None => turns.push(turn),
    }
}

#[cfg(test)]
mod tests {
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
