//! Ranks that run plans on bytes, in an order that a seed draws; whatever a rank may not do yet is an error.
//!
//! The rules between operations are those of the pool's groups: a rank enters operation `k` once it has seen every peer
//! in `k - 1`, and stages it in half `k % 2`.

use std::collections::BTreeSet;
use std::ops::Range;

use polder_schedule::{
    Block, Chunk, Collective, Cut, GRAIN, Plan, RankAction, ResolvedSource, Schedule, Source,
};

/// A small generator, so that a failure is repeated by its seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.word() % limit as u64) as usize
    }

    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// What elements are and how they are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elements {
    /// Bytes, added and wrapped.
    Bytes,
    /// f32, added: the order shows in the bits.
    Floats,
}

impl Elements {
    pub(crate) fn bytes(self) -> u64 {
        if self == Self::Bytes { 1 } else { 4 }
    }

    fn add(self, sum: &mut [u8], part: &[u8]) {
        match self {
            Self::Bytes => sum.iter_mut().zip(part).for_each(|(a, b)| *a = a.wrapping_add(*b)),
            Self::Floats => {
                for (a, b) in sum.as_chunks_mut::<4>().0.iter_mut().zip(part.as_chunks::<4>().0) {
                    *a = (f32::from_le_bytes(*a) + f32::from_le_bytes(*b)).to_le_bytes();
                }
            }
        }
    }

    /// Stands for the division of an average: it shows where it was forgotten, or done twice.
    fn complete(self, sum: &mut [u8]) {
        match self {
            Self::Bytes => sum.iter_mut().for_each(|byte| *byte = byte.wrapping_add(7)),
            Self::Floats => sum.as_chunks_mut::<4>().0.iter_mut().for_each(|bits| {
                *bits = (f32::from_le_bytes(*bits) * 0.5).to_le_bytes();
            }),
        }
    }
}

/// One collective of one message.
pub(crate) struct Operation {
    pub(crate) schedule: Schedule,
    pub(crate) plans: Vec<Plan>,
    pub(crate) cut: Cut,
    pub(crate) elements: Elements,
    /// Whether input and output share a buffer.
    pub(crate) in_place: bool,
    pub(crate) inputs: Vec<Vec<u8>>,
}

impl Operation {
    /// Draws inputs for `bytes` bytes, staged in `half` bytes of each rank.
    pub(crate) fn new(
        schedule: Schedule,
        hosts: &[u16],
        (elements, bytes): (Elements, u64),
        half: u64,
        in_place: bool,
        random: &mut Random,
    ) -> Self {
        let plans: Vec<Plan> = (0..hosts.len()).map(|rank| Plan::new(&schedule, hosts, rank)).collect();
        let cut = Cut::staged(&plans[0], bytes, half, u64::MAX)
            .expect("the half has room for a line of each block");
        let inputs = (0..hosts.len()).map(|_| draw(elements, cut.input, random)).collect();
        Self { schedule, plans, cut, elements, in_place, inputs }
    }

    /// The buffer of `rank`, and where input and output begin in it.
    fn buffer(&self, rank: usize) -> Buffer {
        let (input, output) = (self.cut.input as usize, self.cut.output as usize);
        let part = self.cut.chunk as usize * rank;
        let (length, input_at, output_at) = match (self.in_place, self.schedule.collective) {
            (true, Collective::AllReduce | Collective::Reduce | Collective::Broadcast) => (input, 0, 0),
            (true, Collective::ReduceScatter) => (input, 0, part),
            (true, Collective::AllGather) => (output, part, 0),
            _ => (input + output, 0, input),
        };
        let mut bytes = vec![0xee; length];
        bytes[input_at..input_at + input].copy_from_slice(&self.inputs[rank]);
        Buffer { bytes, input_at, output_at, written: vec![0; output] }
    }

    /// What the output of `rank` must be, but for the order in which floats are added: that is only near.
    pub(crate) fn expected(&self, rank: usize) -> Vec<u8> {
        let (ranks, root) = (self.schedule.ranks, self.schedule.root);
        let part = self.cut.output as usize;
        let chunk = |peer: usize, chunk: usize, of: usize| {
            let bytes = self.cut.input as usize / of;
            &self.inputs[peer][chunk * bytes..(chunk + 1) * bytes]
        };
        let sum = |which: usize, of: usize| {
            let mut sum = chunk(0, which, of).to_vec();
            (1..ranks).for_each(|peer| self.elements.add(&mut sum, chunk(peer, which, of)));
            self.elements.complete(&mut sum);
            sum
        };
        match self.schedule.collective {
            Collective::Barrier => vec![],
            Collective::Broadcast => self.inputs[root].clone(),
            Collective::Reduce | Collective::AllReduce => sum(0, 1),
            Collective::ReduceScatter => sum(rank, ranks),
            Collective::AllGather | Collective::Gather => self.inputs.concat(),
            Collective::Scatter => chunk(root, rank, ranks).to_vec(),
            Collective::AllToAll => {
                (0..ranks).flat_map(|peer| chunk(peer, rank, ranks)[..part / ranks].to_vec()).collect()
            }
        }
    }
}

fn draw(elements: Elements, bytes: u64, random: &mut Random) -> Vec<u8> {
    match elements {
        Elements::Bytes => (0..bytes).map(|_| random.word() as u8).collect(),
        Elements::Floats => {
            (0..bytes / 4).flat_map(|_| (random.word() as i32 as f32 / 1e6).to_le_bytes()).collect()
        }
    }
}

/// A rank's own memory in one operation.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    input_at: usize,
    output_at: usize,
    /// How often each byte of the output was written.
    written: Vec<u8>,
}

impl Buffer {
    fn input(&self, part: &Range<u64>) -> &[u8] {
        &self.bytes[self.input_at + part.start as usize..self.input_at + part.end as usize]
    }

    fn set_output(&mut self, part: &Range<u64>, bytes: &[u8]) {
        let part = part.start as usize..part.end as usize;
        self.bytes[self.output_at + part.start..self.output_at + part.end].copy_from_slice(bytes);
        self.written[part].iter_mut().for_each(|times| *times += 1);
    }

    pub(crate) fn output(&self) -> &[u8] {
        &self.bytes[self.output_at..self.output_at + self.written.len()]
    }
}

/// What a rank has published: the operation and the number in it.
type Progress = (usize, u64);

/// Which block a line of staging shows: of which operation, in which round.
type Tag = (usize, u64, usize);

/// One thing that a rank does at once.
enum Move {
    Await(Vec<(usize, Progress)>),
    /// A piece of an action: operation, round, phase, action, and which of [`PIECES`].
    Act(usize, u64, usize, usize, u64),
    Finish(usize, u64, usize),
    Post(Progress),
    Reach(Progress),
}

/// Pieces of an action between which other ranks may run.
const PIECES: u64 = 2;

struct Rank {
    moves: Vec<Move>,
    at: usize,
    owed: Option<Progress>,
    /// What it has seen of each peer.
    seen: Vec<Progress>,
    finished: BTreeSet<(usize, u64, usize)>,
    buffers: Vec<Buffer>,
}

/// Bytes that crossed, by rank: staged, read on the same host, read from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) shown: u64,
    pub(crate) near: u64,
    pub(crate) far: u64,
}

/// Everything while it runs.
pub(crate) struct World<'a> {
    hosts: &'a [u16],
    operations: &'a [Operation],
    half: u64,
    ranks: Vec<Rank>,
    published: Vec<Progress>,
    staging: Vec<Vec<u8>>,
    tags: Vec<Vec<Option<Tag>>>,
    pub(crate) moved: Vec<Moved>,
}

impl<'a> World<'a> {
    /// Ranks on `hosts` that will run `operations`, with two halves of staging each.
    pub(crate) fn new(hosts: &'a [u16], operations: &'a [Operation], half: u64) -> Self {
        let ranks = hosts.len();
        let rank = |rank| Rank {
            moves: moves(rank, operations),
            at: 0,
            owed: None,
            seen: vec![(0, 0); ranks],
            finished: BTreeSet::new(),
            buffers: operations.iter().map(|operation| operation.buffer(rank)).collect(),
        };
        Self {
            hosts,
            operations,
            half,
            ranks: (0..ranks).map(rank).collect(),
            published: vec![(0, 0); ranks],
            staging: vec![vec![0; 2 * half as usize]; ranks],
            tags: vec![vec![None; (2 * half / GRAIN) as usize]; ranks],
            moved: vec![Moved::default(); ranks],
        }
    }

    /// Runs until all are through, slow ranks and fast ones mixed as `random` says.
    pub(crate) fn run(&mut self, random: &mut Random) -> Result<(), String> {
        let slowness: Vec<usize> = self.ranks.iter().map(|_| random.one_of(&[1, 1, 3, 40])).collect();
        let mut idle = 0;
        while self.ranks.iter().any(|rank| rank.at < rank.moves.len()) {
            let rank = random.below(self.ranks.len());
            if random.below(slowness[rank]) > 0 {
                continue;
            }
            let mut moved = false;
            for _ in 0..=random.below(12) {
                moved |= self.step(rank)?;
            }
            idle = if moved { 0 } else { idle + 1 };
            if idle > 5000 * self.ranks.len() {
                return Err(format!("nobody moves any more: {:?}", self.published));
            }
        }
        self.check()
    }

    /// Does the next thing of `rank`; says whether anything changed.
    fn step(&mut self, rank: usize) -> Result<bool, String> {
        let this = &mut self.ranks[rank];
        match this.moves.get(this.at) {
            None => return Ok(false),
            Some(Move::Await(wanted)) => {
                for &(peer, want) in wanted {
                    this.seen[peer] = self.published[peer];
                    if this.seen[peer] < want {
                        let owed = this.owed.take();
                        owed.into_iter().for_each(|owed| self.published[rank] = owed);
                        return Ok(owed.is_some());
                    }
                }
            }
            Some(&Move::Act(operation, round, phase, action, piece)) => {
                let whole = self.operations;
                let act = &whole[operation].plans[rank].steps[phase].actions[action];
                self.act(rank, operation, round, phase, (act, action), piece)?;
            }
            Some(&Move::Finish(operation, round, phase)) => {
                this.finished.insert((operation, round, phase));
            }
            Some(&Move::Post(progress)) => {
                assert!(progress >= self.published[rank], "progress only grows");
                self.published[rank] = progress;
                this.owed = None;
            }
            Some(&Move::Reach(progress)) => this.owed = Some(progress),
        }
        self.ranks[rank].at += 1;
        Ok(true)
    }

    fn act(
        &mut self,
        rank: usize,
        operation: usize,
        round: u64,
        phase: usize,
        (act, action): (&RankAction, usize),
        piece: u64,
    ) -> Result<(), String> {
        let whole = &self.operations[operation];
        let part = whole.cut.part(act.length, round);
        let piece = cut_piece(part.end - part.start, piece, whole.elements.bytes());
        let name = &whole.schedule.phases[phase].actions[rank][action];
        let mut sum: Option<Vec<u8>> = None;
        for source in &act.sources {
            let bytes = self.read(rank, operation, round, source, &piece)?;
            match &mut sum {
                None => sum = Some(bytes),
                Some(sum) => whole.elements.add(sum, &bytes),
            }
        }
        let mut sum = sum.ok_or("an action without a source")?;
        if act.complete {
            whole.elements.complete(&mut sum);
        }
        if let Some(output) = act.output {
            let to = whole.cut.part(Chunk::Output(output), round);
            let to = to.start + piece.start..to.start + piece.end;
            self.ranks[rank].buffers[operation].set_output(&to, &sum);
        }
        match (&act.block, name.block) {
            (Some(block), Some(name)) => self.fill(rank, operation, round, (block, name), &piece, &sum),
            (None, None) => Ok(()),
            _ => Err("the plan's action is not the schedule's".into()),
        }
    }

    fn read(
        &mut self,
        rank: usize,
        operation: usize,
        round: u64,
        source: &ResolvedSource,
        piece: &Range<u64>,
    ) -> Result<Vec<u8>, String> {
        let whole = &self.operations[operation];
        match source {
            ResolvedSource::Input(chunk) => {
                let from = whole.cut.part(Chunk::Input(*chunk), round);
                let from = from.start + piece.start..from.start + piece.end;
                Ok(self.ranks[rank].buffers[operation].input(&from).to_vec())
            }
            ResolvedSource::Block(block) => {
                let (name, phase) = maker(whole, block);
                let made = (operation + 1, whole.plans[block.rank].number(round, phase));
                if block.rank != rank && self.ranks[rank].seen[block.rank] < made {
                    return Err(format!(
                        "rank {rank} reads block {name} of {} before it has seen it",
                        block.rank
                    ));
                }
                let at = self.block_at(operation, round, block);
                let (from, to) = (at + piece.start, at + piece.end);
                let shows = &self.tags[block.rank][lines(from, to)];
                if let Some(other) = shows.iter().find(|&&tag| tag != Some((operation, round, name))) {
                    return Err(format!(
                        "rank {rank} looks for block {name} of round {round} of rank {} in operation {operation}, and \
                         finds {other:?}",
                        block.rank
                    ));
                }
                let is_far = self.hosts[rank] != self.hosts[block.rank];
                assert_eq!(is_far, block.far, "the plan knows who lives where");
                let moved = &mut self.moved[rank];
                match (block.rank == rank, is_far) {
                    (true, _) => {}
                    (_, true) => moved.far += to - from,
                    (_, false) => moved.near += to - from,
                }
                Ok(self.staging[block.rank][from as usize..to as usize].to_vec())
            }
        }
    }

    /// Fills a block, once everybody has read what its lines showed before.
    fn fill(
        &mut self,
        rank: usize,
        operation: usize,
        round: u64,
        (block, name): (&Block, usize),
        piece: &Range<u64>,
        bytes: &[u8],
    ) -> Result<(), String> {
        let at = self.block_at(operation, round, block);
        let (from, to) = (at + piece.start, at + piece.end);
        for line in lines(from, to) {
            if let Some(tag) = self.tags[rank][line].filter(|&tag| tag != (operation, round, name)) {
                self.is_read(rank, tag)?;
            }
            self.tags[rank][line] = Some((operation, round, name));
        }
        self.staging[rank][from as usize..to as usize].copy_from_slice(bytes);
        self.moved[rank].shown += to - from;
        Ok(())
    }

    /// Whether all who were to read a block have done so.
    fn is_read(&self, rank: usize, (operation, round, name): Tag) -> Result<(), String> {
        let wanted = Source::Block { rank, block: name };
        for (phase, all) in self.operations[operation].schedule.phases.iter().enumerate() {
            for (reader, actions) in all.actions.iter().enumerate() {
                let reads = actions.iter().any(|action| action.sources.contains(&wanted));
                if reads && !self.ranks[reader].finished.contains(&(operation, round, phase)) {
                    return Err(format!(
                        "rank {rank} fills block {name} of round {round} again before {reader} has read it"
                    ));
                }
            }
        }
        Ok(())
    }

    fn block_at(&self, operation: usize, round: u64, block: &Block) -> u64 {
        let whole = &self.operations[operation];
        // Operations are numbered from 1 in a group.
        let half = (operation as u64 + 1) % 2 * self.half;
        let at = whole.cut.block_at(&whole.plans[0], block.index, round);
        assert!(at + whole.cut.segment <= self.half, "staging has room for every block");
        half + at
    }

    /// Whether everybody has what the collectives promise, written once.
    fn check(&self) -> Result<(), String> {
        for (number, operation) in self.operations.iter().enumerate() {
            let holders = (0..self.hosts.len()).filter(|&rank| operation.schedule.has_output(rank));
            for rank in holders.clone() {
                let buffer = &self.ranks[rank].buffers[number];
                if let Some(byte) = buffer.written.iter().position(|&times| times != 1) {
                    return Err(format!(
                        "byte {byte} of rank {rank} was written {} times",
                        buffer.written[byte]
                    ));
                }
                let expected = operation.expected(rank);
                if !is_near(operation.elements, buffer.output(), &expected) {
                    return Err(format!("rank {rank} has {:x?}, not {expected:x?}", buffer.output()));
                }
            }
            let outputs = holders.map(|rank| self.ranks[rank].buffers[number].output());
            let alike = operation.schedule.collective == Collective::AllReduce;
            if alike && outputs.collect::<BTreeSet<_>>().len() > 1 {
                return Err("ranks have different bits".into());
            }
        }
        Ok(())
    }
}

/// Everything that `rank` does, in order.
fn moves(rank: usize, operations: &[Operation]) -> Vec<Move> {
    let mut moves = Vec::new();
    for (index, operation) in operations.iter().enumerate() {
        let (plan, number) = (&operation.plans[rank], index + 1);
        let peers = (0..operation.schedule.ranks).filter(|&peer| peer != rank);
        moves.push(Move::Await(peers.map(|peer| (peer, (number - 1, 0))).collect()));
        if !plan.steps[0].fills {
            moves.push(Move::Post((number, 0)));
        }
        for (round, phase) in plan.walk(operation.cut.rounds) {
            let step = &plan.steps[phase];
            if step.actions.is_empty() {
                continue;
            }
            let turns = |(peer, want)| (peer, (number, want));
            moves.push(Move::Await(plan.before_reading(round, phase).map(turns).collect()));
            moves.push(Move::Await(plan.before_filling(round, phase).map(turns).collect()));
            let pieces =
                (0..step.actions.len()).flat_map(|action| (0..PIECES).map(move |piece| (action, piece)));
            moves.extend(pieces.map(|(action, piece)| Move::Act(index, round, phase, action, piece)));
            moves.push(Move::Finish(index, round, phase));
            let progress = (number, plan.number(round, phase));
            let posts = step.fills || plan.frees(operation.cut.rounds, round, phase);
            moves.push(if posts { Move::Post(progress) } else { Move::Reach(progress) });
        }
    }
    moves
}

/// The schedule's name of a block, and the phase in which it is filled.
fn maker(operation: &Operation, block: &Block) -> (usize, usize) {
    let phases = operation.schedule.phases.iter().enumerate();
    let made = phases.flat_map(|(phase, all)| {
        all.actions[block.rank].iter().filter_map(move |action| Some((action.block?, phase)))
    });
    made.into_iter().nth(block.index).expect("the plan found its maker")
}

fn cut_piece(bytes: u64, piece: u64, element: u64) -> Range<u64> {
    let middle = bytes / element / 2 * element;
    if piece == 0 { 0..middle } else { middle..bytes }
}

fn lines(from: u64, to: u64) -> Range<usize> {
    (from / GRAIN) as usize..to.div_ceil(GRAIN).max(from / GRAIN) as usize
}

fn is_near(elements: Elements, actual: &[u8], expected: &[u8]) -> bool {
    match elements {
        Elements::Bytes => actual == expected,
        Elements::Floats => {
            let near = |(a, b): (&[u8; 4], &[u8; 4])| {
                (f32::from_le_bytes(*a) - f32::from_le_bytes(*b)).abs() <= 0.01
            };
            actual.len() == expected.len()
                && actual.as_chunks().0.iter().zip(expected.as_chunks().0).all(near)
        }
    }
}
