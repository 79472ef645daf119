//! Runs one rank's plan: in rounds, so that a message of any size goes through a little staging, and with the phases of
//! successive rounds overlapping, so that a rank seldom waits.

use std::num::NonZeroU32;
use std::ops::Range;

use polder_kernels::{Dtype, Op, divide, reduce, reduce_into};
use polder_mem::{Fault, Memory, Offset};
use polder_schedule::{Block, Chunk, Cut, Plan, RankAction, ResolvedSource, Step};

use super::data::{Data, Scratch, fill, length, pieces, place, range, write};
use super::pace::Stores;
use crate::group::{Failure, Group};

/// How sources are combined: checked to be defined, so that the kernels cannot refuse.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) op: Op,
    pub(crate) dtype: Dtype,
    pub(crate) ranks: NonZeroU32,
}

impl Reduction {
    fn combine(self, sum: &mut [u8], part: &[u8]) {
        reduce(self.op, self.dtype, sum, part).expect("a checked reduction");
    }

    fn combine_into(self, output: &mut [u8], sum: &[u8], part: &[u8]) {
        reduce_into(self.op, self.dtype, output, sum, part).expect("a checked reduction");
    }

    fn complete(self, sum: &mut [u8]) {
        if self.op == Op::Average {
            divide(self.dtype, sum, self.ranks).expect("a checked reduction");
        }
    }
}

/// An operation while it runs.
pub(crate) struct Run<'a, M: Memory> {
    pub(crate) group: &'a Group<M>,
    pub(crate) plan: &'a Plan,
    pub(crate) cut: Cut,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) data: Data<'a>,
    /// The first byte of this operation's half of the staging, in a rank's extent.
    pub(crate) half: u64,
    /// How to store what no reader needs in memory.
    pub(crate) stores: Stores,
}

impl<M: Memory> Run<'_, M> {
    /// Runs it. Afterwards nobody reads what is in the pool of the caller's.
    pub(crate) fn run(&mut self, scratch: &mut Scratch) -> Result<(), Failure> {
        for (round, phase) in self.plan.walk(self.cut.rounds) {
            self.step(round, phase, scratch)?;
        }
        if let Data::Pool { .. } = self.data {
            let last = self.number(self.cut.rounds, self.plan.steps.len());
            self.group.publish_step(last);
            self.group.await_steps(last)?;
        }
        Ok(())
    }

    /// What this rank publishes after a phase of a round.
    fn number(&self, round: u64, phase: usize) -> u32 {
        as_step(self.plan.number(round, phase))
    }

    fn step(&mut self, round: u64, phase: usize, scratch: &mut Scratch) -> Result<(), Failure> {
        let step = &self.plan.steps[phase];
        if step.actions.is_empty() {
            return Ok(());
        }
        let group = self.group;
        let turns = |(rank, number)| (rank, as_step(number));
        group.await_turns(self.plan.before_reading(round, phase).map(turns))?;
        if self.is_staged() {
            group.await_turns(self.plan.before_filling(round, phase).map(turns))?;
        }
        self.invalidate(step, round);
        for act in &step.actions {
            self.act(act, round, scratch)?;
        }
        if step.fills_far || self.stores == Stores::Streaming || !self.is_staged() {
            // SYNC: what this step stored past the caches is in memory before `publish_step`; pairs with `invalidate` of the peers.
            group.memory().sfence();
        }
        if step.fills || self.is_staged() && self.plan.frees(self.cut.rounds, round, phase) {
            group.publish_step(self.number(round, phase));
        } else {
            group.enter_step(self.number(round, phase));
        }
        Ok(())
    }

    /// Whether a block is written past the caches: it has to be for readers of other hosts that share no cache with us,
    /// and may be for others.
    fn streams(&self, far: bool) -> bool {
        let flushes = self.group.memory().coherence().needs_write_back();
        far && flushes || self.stores == Stores::Streaming
    }

    /// Whether outputs in the pool are written past the caches.
    fn output_streams(&self) -> bool {
        self.streams(!self.group.is_local())
    }

    fn is_staged(&self) -> bool {
        !matches!(self.data, Data::Pool { .. })
    }

    /// Drops from our caches whatever the step reads that other hosts wrote.
    fn invalidate(&self, step: &Step, round: u64) {
        let sources = step.actions.iter().flat_map(|act| act.sources.iter().map(move |source| (act, source)));
        let mut any = false;
        for (act, source) in sources {
            if let ResolvedSource::Block(block) = source
                && block.far
            {
                let bytes = self.bytes(act, round);
                self.group.memory().invalidate(self.place(block, round), bytes);
                any = true;
            }
        }
        if any {
            // SYNC: pairs with the fence in a peer's `step`: its progress was seen, so what it staged before is in memory.
            self.group.memory().fence_invalidations();
        }
    }

    /// How many bytes an action moves in a round.
    fn bytes(&self, act: &RankAction, round: u64) -> u64 {
        let part = self.chunk(act.length, round);
        part.end - part.start
    }

    fn chunk(&self, chunk: Chunk, round: u64) -> Range<u64> {
        self.cut.part(chunk, round)
    }

    /// Where a block lies in the pool in a round.
    fn place(&self, block: &Block, round: u64) -> Offset {
        if let Data::Pool { at, input_stride, output_stride } = self.data {
            let chunk = block.chunk.expect("checked before data in the pool is used");
            let stride = if matches!(chunk, Chunk::Input(_)) { input_stride } else { output_stride };
            return at[block.rank] + (block.rank as u64 * stride + self.chunk(chunk, round).start);
        }
        self.group.staging(block.rank) + (self.half + self.cut.block_at(self.plan, block.index, round))
    }

    fn act(&mut self, act: &RankAction, round: u64, scratch: &mut Scratch) -> Result<(), Fault> {
        match (act.sources.as_slice(), &self.data) {
            ([ResolvedSource::Input(_)], Data::Pool { .. }) => {
                self.stage_in_pool(act, round);
                Ok(())
            }
            ([ResolvedSource::Block(block)], Data::Pool { .. }) => {
                self.fetch_in_pool(act, block, round, scratch)
            }
            ([ResolvedSource::Input(chunk)], _) => self.stage(act, *chunk, round),
            ([ResolvedSource::Block(block)], _) => self.fetch_block(act, block, round),
            _ => {
                pieces(self.bytes(act, round)).try_for_each(|piece| self.combine(act, round, &piece, scratch))
            }
        }
    }

    /// The caller's input stands where peers will read it; other hosts need it written back.
    fn stage_in_pool(&self, act: &RankAction, round: u64) {
        if let Some(block) = act.block.filter(|block| block.far) {
            self.group.memory().write_back(self.place(&block, round), self.bytes(act, round));
        }
    }

    fn fetch_in_pool(
        &self,
        act: &RankAction,
        block: &Block,
        round: u64,
        scratch: &mut Scratch,
    ) -> Result<(), Fault> {
        let memory = self.group.memory();
        let (from, to) = (self.place(block, round), self.output_in_pool(act, round));
        pieces(self.bytes(act, round)).try_for_each(|piece| {
            let part = &mut scratch.part[..length(&piece)];
            memory.copy_out(from + piece.start, part)?;
            write(memory, to + piece.start, part, self.output_streams())
        })
    }

    /// Where an action's output lies in this rank's extent of the pool.
    fn output_in_pool(&self, act: &RankAction, round: u64) -> Offset {
        let chunk = Chunk::Output(act.output.expect("an action on data in the pool has an output"));
        self.place(&Block { rank: self.group.rank(), index: 0, chunk: Some(chunk), far: false }, round)
    }

    fn stage(&mut self, act: &RankAction, chunk: usize, round: u64) -> Result<(), Fault> {
        let from = self.chunk(Chunk::Input(chunk), round);
        if let Some(chunk) = act.output {
            let to = self.chunk(Chunk::Output(chunk), round);
            self.data.keep(&from, &to);
        }
        let shown = act.block.map(|block| (self.place(&block, round), self.streams(block.far)));
        shown.map_or(Ok(()), |(at, streams)| fill(self.group.memory(), at, self.data.input(&from), streams))
    }

    fn fetch_block(&mut self, act: &RankAction, block: &Block, round: u64) -> Result<(), Fault> {
        let memory = self.group.memory();
        let (from, to) = (self.place(block, round), self.chunk(act.length, round));
        let relayed = act.block.map(|block| (self.place(&block, round), self.streams(block.far)));
        let output = self.data.output(&to);
        memory.copy_out(from, output)?;
        relayed.map_or(Ok(()), |(at, streams)| fill(memory, at, output, streams))
    }

    /// Combines a piece of all sources, the last of them straight into the caller's output if it takes one.
    fn combine(
        &mut self,
        act: &RankAction,
        round: u64,
        piece: &Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<(), Fault> {
        let memory = self.group.memory();
        let reduction = self.reduction.expect("only reductions combine");
        let (sum, part) = scratch.halves(length(piece));
        let [first, middle @ .., last] = act.sources.as_slice() else { unreachable!("at least two sources") };
        let shown = act.block.map(|block| (self.place(&block, round) + piece.start, self.streams(block.far)));
        let streams = self.output_streams();
        let in_pool = (!self.is_staged()).then(|| self.output_in_pool(act, round) + piece.start);
        let output = act.output.map(|chunk| within(&self.chunk(Chunk::Output(chunk), round), piece));
        self.fetch(first, round, piece, sum)?;
        for source in middle {
            self.fetch(source, round, piece, part)?;
            reduction.combine(sum, part);
        }
        let combined = self.combine_last(last, round, piece, output, (sum, part))?;
        if act.complete {
            reduction.complete(combined);
        }
        match (in_pool, shown) {
            (Some(at), _) => write(memory, at, combined, streams),
            (None, Some((at, streams))) => fill(memory, at, combined, streams),
            (None, None) => Ok(()),
        }
    }

    /// Combines the last source with `sum`, into the output where the caller has one, else into `sum`.
    fn combine_last<'b>(
        &'b mut self,
        last: &ResolvedSource,
        round: u64,
        piece: &Range<u64>,
        output: Option<Range<u64>>,
        (sum, part): (&'b mut [u8], &mut [u8]),
    ) -> Result<&'b mut [u8], Fault> {
        let reduction = self.reduction.expect("only reductions combine");
        let Some(to) = output.filter(|_| self.is_staged()) else {
            self.fetch(last, round, piece, part)?;
            reduction.combine(sum, part);
            return Ok(sum);
        };
        let from = match last {
            ResolvedSource::Block(_) => {
                self.fetch(last, round, piece, part)?;
                None
            }
            ResolvedSource::Input(chunk) => Some(within(&self.chunk(Chunk::Input(*chunk), round), piece)),
        };
        match (&mut self.data, from) {
            (Data::Apart { input, output }, Some(from)) => {
                let output = &mut output[range(&to, 0)];
                reduction.combine_into(output, sum, &input[range(&from, 0)]);
                Ok(output)
            }
            (Data::Lists { input, output, chunk }, Some(from)) => {
                let (target, into) = place(output.len(), &to, *chunk);
                let (source, at) = place(input.len(), &from, *chunk);
                let output = &mut output[target][into];
                reduction.combine_into(output, sum, &input[source][at]);
                Ok(output)
            }
            (Data::Same { data, output_at, .. }, Some(_)) => {
                // In one buffer the input of a combination is where its output belongs.
                let output = &mut data[range(&to, *output_at)];
                reduction.combine(output, sum);
                Ok(output)
            }
            (data, _) => {
                let output = data.output(&to);
                reduction.combine_into(output, sum, part);
                Ok(output)
            }
        }
    }

    /// Copies a piece of a source into `into`.
    fn fetch(
        &self,
        source: &ResolvedSource,
        round: u64,
        piece: &Range<u64>,
        into: &mut [u8],
    ) -> Result<(), Fault> {
        let memory = self.group.memory();
        match (source, &self.data) {
            (ResolvedSource::Block(block), _) => {
                memory.copy_out(self.place(block, round) + piece.start, into)
            }
            (ResolvedSource::Input(chunk), Data::Pool { .. }) => {
                let own = Block {
                    rank: self.group.rank(),
                    index: 0,
                    chunk: Some(Chunk::Input(*chunk)),
                    far: false,
                };
                memory.copy_out(self.place(&own, round) + piece.start, into)
            }
            (ResolvedSource::Input(chunk), data) => {
                into.copy_from_slice(data.input(&within(&self.chunk(Chunk::Input(*chunk), round), piece)));
                Ok(())
            }
        }
    }
}

/// A piece of a part, as a range of the whole.
fn within(part: &Range<u64>, piece: &Range<u64>) -> Range<u64> {
    part.start + piece.start..part.start + piece.end
}

/// A plan's number as a step: the rounds of an operation were bounded before.
fn as_step(number: u64) -> u32 {
    u32::try_from(number).expect("the rounds of an operation are bounded")
}
