//! Ranks that share cores, as they go through the steps of a collective.

use polder_platform::Exchange;

use super::steps::{Await, Kinds, Steps, WalkStep};

/// Operations that follow each other, of which the first few are not counted: ranks that are done go on to the next.
pub(super) const CALLS: usize = 20;
pub(super) const UNCOUNTED: usize = 4;
/// Looks for what a rank awaits until it gives up a core that it shares: those of the pool's `Patience::SHARED`.
pub const LOOKS: u32 = 50;
/// Seconds of a look at a line that the core has in its own cache: assumed, a pause and a load.
pub(super) const GLANCE: f64 = 20e-9;
/// A look at a line of another host, which is fetched each time, in turns: assumed.
pub(super) const LOOK: f64 = 0.5;

/// Ranks on their cores, as they go through operations that follow each other.
pub(super) struct Cores<'a> {
    steps: &'a Steps,
    takes: [Kinds; 2],
    call: f64,
    turn: f64,
    switch: f64,
    /// How long a rank looks for one of its own host, and for one of another.
    patience: [f64; 2],
    ranks: Vec<Rank>,
    cores: Vec<Core>,
}

#[derive(Clone, Default)]
struct Rank {
    /// When it had done each of its steps.
    done: Vec<f64>,
    /// Of what its next step awaits so many have come.
    came: usize,
    /// Until when it looks for the next before it gives up its core.
    until: Option<f64>,
}

struct Core {
    /// The rank that has it.
    rank: usize,
    now: f64,
    /// Until when it waits, unless somebody does a step before: nobody knows yet when what it awaits will be done, or sooner.
    waits: Option<f64>,
}

impl<'a> Cores<'a> {
    pub(super) fn new(steps: &'a Steps, cores: usize, exchange: &Exchange, takes: [Kinds; 2]) -> Self {
        let [call, turn, switch] = [exchange.call, exchange.turn, exchange.switch].map(|time| time.value());
        let glances = f64::from(LOOKS) * GLANCE;
        let looks = if exchange.read.is_some() { f64::from(LOOKS) * LOOK * turn } else { 0.0 };
        let core = |rank| Core { rank, now: 0.0, waits: None };
        Self {
            steps,
            takes,
            call,
            turn,
            switch,
            patience: [glances, glances + looks],
            ranks: vec![Rank::default(); steps.len()],
            cores: (0..cores.min(steps.len())).map(core).collect(),
        }
    }

    /// Seconds of an operation.
    pub(super) fn seconds(mut self) -> f64 {
        while let Some(core) = self.first() {
            self.resume(core);
        }
        let end = |calls: usize| {
            let end = |(rank, steps): (&Rank, &Vec<WalkStep>)| {
                *rank.done.get(calls * steps.len() - 1).expect("a schedule that was checked comes to its end")
            };
            self.ranks.iter().zip(self.steps).map(end).fold(0.0, f64::max)
        };
        (end(CALLS) - end(UNCOUNTED)) / (CALLS - UNCOUNTED) as f64
    }

    fn is_through(&self, rank: usize) -> bool {
        self.ranks[rank].done.len() == CALLS * self.steps[rank].len()
    }

    /// The ranks after this one that share its core and are not through.
    fn others(&self, rank: usize) -> impl Iterator<Item = usize> {
        let (cores, ranks) = (self.cores.len(), self.ranks.len());
        let after = (rank + cores..ranks).step_by(cores).chain((rank % cores..rank).step_by(cores));
        after.filter(|rank| !self.is_through(*rank))
    }

    /// The core on which something happens first.
    fn first(&self) -> Option<usize> {
        let next = (0..self.cores.len()).map(|core| (self.next(core), core));
        let first = next.min_by(|one, other| one.0.total_cmp(&other.0));
        first.filter(|(at, _)| at.is_finite()).map(|(_, core)| core)
    }

    /// When something happens on a core.
    fn next(&self, core: usize) -> f64 {
        let Core { rank, now, waits } = self.cores[core];
        match self.is_through(rank) && self.others(rank).next().is_none() {
            true => f64::INFINITY,
            false => waits.unwrap_or(now),
        }
    }

    /// What a rank awaits next before its step.
    fn awaited(&self, rank: usize) -> Option<&Await> {
        let (steps, own) = (&self.steps[rank], &self.ranks[rank]);
        steps[own.done.len() % steps.len()].awaits.get(own.came)
    }

    /// When a rank sees what it awaits next, if that is known; `None` when it awaits nothing.
    fn sees(&self, rank: usize) -> Option<Option<f64>> {
        let Await { rank: other, steps: count, .. } = *self.awaited(rank)?;
        let before = self.ranks[rank].done.len() / self.steps[rank].len() * self.steps[other].len();
        let turn = if other % self.cores.len() == rank % self.cores.len() { 0.0 } else { self.turn };
        Some(self.ranks[other].done.get(before + count - 1).map(|at| at + turn))
    }

    fn resume(&mut self, core: usize) {
        if let Some(at) = self.cores[core].waits.take() {
            self.cores[core].now = at;
        }
        let Core { rank, now, .. } = self.cores[core];
        let other = self.others(rank).next();
        if let (true, Some(other)) = (self.is_through(rank), other) {
            self.give(core, other, now);
            return;
        }
        let Some(seen) = self.sees(rank) else {
            self.step(core);
            return;
        };
        match (seen, other) {
            (Some(seen), _) if seen <= now || other.is_none() => {
                self.cores[core].now = now.max(seen);
                self.ranks[rank].came += 1;
                self.ranks[rank].until = None;
            }
            (_, None) => self.cores[core].waits = Some(f64::INFINITY),
            (seen, Some(_)) => {
                let patience = self.patience[usize::from(self.awaited(rank).is_some_and(|it| it.is_far))];
                let until = *self.ranks[rank].until.get_or_insert(now + patience);
                match seen {
                    Some(seen) if seen <= until => self.cores[core].now = seen,
                    None if now < until => self.cores[core].waits = Some(until),
                    _ => self.hand_over(core, now.max(until)),
                }
            }
        }
    }

    /// Does the next step of the rank that has a core.
    fn step(&mut self, core: usize) {
        let others = self.cores.iter().enumerate().filter(|(other, _)| *other != core);
        let busy = others.map(|(_, other)| other.now).fold(0.0, f64::max);
        let Core { rank, now, .. } = &mut self.cores[core];
        let (steps, own) = (&self.steps[*rank], &mut self.ranks[*rank]);
        let at = own.done.len() % steps.len();
        let sum =
            |takes: Kinds| steps[at].bytes.iter().zip(takes).map(|(bytes, takes)| bytes * takes).sum::<f64>();
        let [alone, more] = self.takes.map(sum);
        // Of two steps at the same time the later is the slower.
        let beside = if alone > 0.0 { (busy - *now).clamp(0.0, alone) / alone } else { 0.0 };
        *now += alone + more * beside + if at == 0 { self.call } else { 0.0 };
        own.done.push(*now);
        (own.came, own.until) = (0, None);
        self.cores.iter_mut().for_each(|core| core.waits = None);
    }

    /// Gives a core to a rank that has not looked in vain yet, else to the one that sees first what it awaits.
    fn hand_over(&mut self, core: usize, now: f64) {
        let rank = self.cores[core].rank;
        let looks = |it: &usize| self.ranks[*it].until.is_none() || self.sees(*it).is_none();
        let fresh = self.others(rank).find(looks);
        let all = self.others(rank).chain([rank]);
        let known = all.filter_map(|it| Some((self.sees(it)??, it)));
        let first = known.min_by(|one, other| one.0.total_cmp(&other.0));
        match (fresh, first) {
            (Some(fresh), _) => self.give(core, fresh, now),
            (None, Some((seen, first))) if seen <= now && first == rank => self.cores[core].now = now,
            (None, Some((seen, first))) if seen <= now => self.give(core, first, now),
            // Until then, or until somebody does a step on another core: that may be seen sooner.
            (None, first) => {
                let until = first.map_or(f64::INFINITY, |(seen, _)| seen);
                self.cores[core] = Core { rank, now, waits: Some(until) };
            }
        }
    }

    fn give(&mut self, core: usize, rank: usize, now: f64) {
        self.cores[core] = Core { rank, now: now + self.switch, waits: None };
    }
}
