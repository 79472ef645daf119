//! Who sends which bytes to whom in which step; pure data.
//!
//! A [`Schedule`] is what one collective does on all ranks. A [`Plan`] is one rank's part of it, with the peers that it waits
//! for. A [`Cut`] says how a message of some size goes through it. An [`Exchange`] is what a parameter service does in a step.
//! The pool runs them, and a simulator can: nothing here knows what a byte costs or where it lies.
//!
//! ```
//! use polder_schedule::{Collective, Schedule, Source};
//!
//! let schedule = Schedule::direct(Collective::AllReduce, 2, 0);
//! // Each rank shows its input, then combines both in the order of the ranks.
//! assert_eq!(schedule.phases.len(), 2);
//! let combine = &schedule.phases[1].actions[0][0];
//! assert_eq!(combine.sources, [Source::Input(0), Source::Block { rank: 1, block: 0 }]);
//! ```
#![forbid(unsafe_code)]

mod cut;
mod exchange;
mod flat;
mod levels;
mod meaning;
mod plan;
mod traffic;
mod variant;

use std::fmt;

pub use cut::{Cut, GRAIN};
pub use exchange::{Exchange, ExchangeError, Shard, ShardOrder};
pub use meaning::ScheduleError;
pub use plan::{Block, Chunk, Plan, RankAction, ResolvedSource, SLOTS, Step, Turn};
pub use traffic::Traffic;
pub use variant::{DIRECT_BYTES, SEGMENT_BYTES, STAGING_BYTES, Variant};

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    /// Nobody leaves before all have entered.
    Barrier,
    /// Every rank gets the root's input.
    Broadcast,
    /// The root gets the combination of all inputs.
    Reduce,
    /// Every rank gets the combination of all inputs.
    AllReduce,
    /// Rank `r` gets the combination of all chunks `r`.
    ReduceScatter,
    /// Every rank gets all inputs, side by side.
    AllGather,
    /// The root gets all inputs, side by side.
    Gather,
    /// Rank `r` gets chunk `r` of the root's input.
    Scatter,
    /// Rank `r` gets the chunks `r` of all inputs, side by side.
    AllToAll,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Barrier,
        Self::Broadcast,
        Self::Reduce,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
    ];

    /// Its name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all-to-all",
        }
    }

    /// Whether it combines elements.
    #[must_use]
    pub const fn combines(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// Whether every rank's output depends on every rank's input: then a rank that has its output knows that all have begun.
    #[must_use]
    pub const fn hears_all(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::AllGather | Self::AllToAll)
    }

    /// Whether one side of it, or both, has a chunk for each rank.
    #[must_use]
    pub const fn has_chunks(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllGather | Self::Gather | Self::Scatter | Self::AllToAll)
    }

    /// The collective of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| collective.name() == name)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one collective does on all ranks.
///
/// A rank's input and output are each cut into chunks of equal length, and each rank has *blocks* of that length which
/// its peers can read. A long message goes through the phases in several rounds, each with a part of every chunk; the
/// phases of successive rounds may overlap. So a phase may read only what an earlier phase of its own round made.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// What it achieves.
    pub collective: Collective,
    /// How many ranks take part.
    pub ranks: usize,
    /// The root of a broadcast, reduce, gather or scatter, otherwise 0.
    pub root: usize,
    /// Chunks of an input.
    pub input_chunks: usize,
    /// Chunks of an output.
    pub output_chunks: usize,
    /// Blocks of each rank.
    pub blocks: usize,
    /// The steps, in order.
    pub phases: Vec<Phase>,
}

/// One step of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Phase {
    /// What each rank does in it, in order.
    pub actions: Vec<Vec<Action>>,
}

/// Combines chunks of one length, or copies a single one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// What is combined, in this order, which is the same wherever the same chunk is combined: floating point
    /// additions do not commute with regrouping.
    pub sources: Vec<Source>,
    /// The chunk of the output that receives it.
    pub output: Option<usize>,
    /// The block of this rank that receives it, for peers to read in later phases.
    pub block: Option<usize>,
    /// Whether nothing will be combined with the outcome any more: an average is divided here.
    pub complete: bool,
}

/// Where an action reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A chunk of this rank's input.
    Input(usize),
    /// A block of a rank, as an earlier phase left it.
    Block {
        /// Whose.
        rank: usize,
        /// Which.
        block: usize,
    },
}

impl Action {
    /// Shows a chunk of the input to the peers.
    fn show(chunk: usize, block: usize) -> Self {
        Self { sources: vec![Source::Input(chunk)], output: None, block: Some(block), complete: false }
    }

    /// Takes a single source into the output.
    fn take(source: Source, output: usize) -> Self {
        Self { sources: vec![source], output: Some(output), block: None, complete: false }
    }
}

impl Schedule {
    /// The chunks of the input and of the output of a collective that is cut no finer than it must be.
    fn natural_chunks(collective: Collective, ranks: usize) -> (usize, usize) {
        match collective {
            Collective::Barrier => (0, 0),
            Collective::Broadcast | Collective::Reduce | Collective::AllReduce => (1, 1),
            Collective::ReduceScatter | Collective::Scatter => (ranks, 1),
            Collective::AllGather | Collective::Gather => (1, ranks),
            Collective::AllToAll => (ranks, ranks),
        }
    }

    fn empty(collective: Collective, ranks: usize, root: usize, blocks: usize) -> Self {
        assert!(ranks > 0 && root < ranks, "{collective} over {ranks} ranks has no root {root}");
        let (input_chunks, output_chunks) = Self::natural_chunks(collective, ranks);
        Self { collective, ranks, root, input_chunks, output_chunks, blocks, phases: Vec::new() }
    }

    /// Adds a phase in which rank `r` does `actions(r)`.
    fn phase(mut self, actions: impl Fn(usize) -> Vec<Action>) -> Self {
        self.phases.push(Phase { actions: (0..self.ranks).map(actions).collect() });
        self
    }

    /// Whether `rank` has an input in this collective.
    #[must_use]
    pub fn has_input(&self, rank: usize) -> bool {
        match self.collective {
            Collective::Barrier => false,
            Collective::Broadcast | Collective::Scatter => rank == self.root,
            _ => true,
        }
    }

    /// Whether `rank` gets an output in this collective.
    #[must_use]
    pub fn has_output(&self, rank: usize) -> bool {
        match self.collective {
            Collective::Barrier => false,
            Collective::Reduce | Collective::Gather => rank == self.root,
            _ => true,
        }
    }
}
