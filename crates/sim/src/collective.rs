//! Collectives of ranks that copy bytes, priced step by step along the schedules that the pool runs.

use std::collections::BTreeSet;

use polder_platform::{Bandwidth, Exchange, Sharing};
use polder_schedule::{
    Act, Collective, Cut, DIRECT_BYTES, Plan, Read, SEGMENT_BYTES, STAGING_BYTES, Variant,
};

/// Where a message lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In memory of each rank, and goes through staging in the pool.
    Staged,
    /// In the pool, where peers read it.
    InPool,
}

/// Seconds of a collective of `bytes` among ranks on `hosts`, one of many that follow each other: those of the vector of an
/// all-reduce, reduce or broadcast, and those of one rank's part of the others. `None` when no schedule can cut it.
///
/// Ranks are dealt out to the cores in turn. Each does its steps in the order in which the pool does them. A step begins when
/// what it awaits is done, and takes as long as its bytes take; a core does one step at a time. A rank that shares its core
/// looks [`LOOKS`] times for what it awaits, then gives the core up. Of two cores with more than the cache holds the later takes
/// longer.
///
/// # Panics
/// When there is no rank.
#[must_use]
pub fn collective(
    sharing: &Sharing,
    exchange: &Exchange,
    collective: Collective,
    hosts: &[u16],
    bytes: u64,
    place: Place,
) -> Option<f64> {
    Some(Walk::new(collective, hosts, bytes, place)?.seconds(sharing, exchange))
}

/// Rounds that are walked through; more go on as the second half of these does.
const ROUNDS: u64 = 8;
/// Operations that follow each other, of which the first few are not counted: ranks that are done go on to the next.
const CALLS: usize = 20;
const UNCOUNTED: usize = 4;
/// Looks for what a rank awaits until it gives up a core that it shares: those of the pool's `Patience::SHARED`.
pub const LOOKS: u32 = 50;
/// Seconds of a look at a line that the core has in its own cache: assumed, a pause and a load.
const GLANCE: f64 = 20e-9;
/// A look at a line of another host, which is fetched each time, in turns: assumed.
const LOOK: f64 = 0.5;
/// Bytes until a copy or a sum is at its pace, and the part that each of them takes longer: found from times of messages of 1 to
/// 64 KiB.
const START_BYTES: f64 = 16384.0;
const START: f64 = 0.3;
/// The part of a message in the pool that takes room in a core's cache beside what others wrote: found from times of 1 and 4 MiB.
const IN_PLACE: f64 = 0.7;
/// The part that steps on messages beyond the cache take longer while another core has one too, or waits: found from times of long
/// messages. More than one other core is not more.
const CROWD: f64 = 0.5;

/// What each rank does in a collective, whatever that takes.
pub(crate) struct Walk {
    steps: Steps,
    /// With half of the rounds, and how often the difference comes on top.
    shorter: Option<(Steps, f64)>,
    ranks: f64,
    bytes: f64,
    place: Place,
}

/// The steps of each rank, in order.
type Steps = Vec<Vec<Step>>;

/// What a rank does from one look at the others to the next.
struct Step {
    /// In this order.
    awaits: Vec<Await>,
    bytes: Kinds,
}

/// Another rank, how many of its steps it must have done before, and whether it is on another host.
struct Await {
    rank: usize,
    steps: usize,
    is_far: bool,
}

/// Bytes that are read or written: of the message; what ranks of other hosts have last written or read; through blocks inside a
/// host; and what is written for other hosts, and what is read of them.
type Kinds = [f64; 5];

impl Walk {
    pub(crate) fn new(collective: Collective, hosts: &[u16], bytes: u64, place: Place) -> Option<Self> {
        let variant = match place {
            Place::InPool => Variant::in_pool(collective),
            Place::Staged => Variant::staged(collective, bytes, DIRECT_BYTES, || hosts.to_vec()),
        };
        let schedule = variant.schedule(collective, hosts, 0);
        let cut = |plan: &Plan| match place {
            Place::InPool => Some(Cut::new(plan, bytes, SEGMENT_BYTES)),
            Place::Staged => Cut::staged(plan, bytes, STAGING_BYTES / 2, SEGMENT_BYTES),
        };
        let of_rank = |rank| {
            let plan = Plan::new(&schedule, hosts, rank);
            cut(&plan).map(|cut| (plan, cut))
        };
        let ranks = (0..hosts.len()).map(of_rank).collect::<Option<Vec<_>>>()?;
        let rounds = ranks.iter().map(|(_, cut)| cut.rounds).max()?;
        let more = (rounds as f64 - ROUNDS as f64) / (ROUNDS / 2) as f64;
        Some(Self {
            steps: steps(&ranks, hosts, rounds.min(ROUNDS), place),
            shorter: (more > 0.0).then(|| (steps(&ranks, hosts, ROUNDS / 2, place), more)),
            ranks: hosts.len() as f64,
            bytes: bytes as f64,
            place,
        })
    }

    pub(crate) fn seconds(&self, sharing: &Sharing, exchange: &Exchange) -> f64 {
        let takes = self.takes(sharing, exchange);
        let seconds = |steps: &Steps| Cores::new(steps, sharing.cores as usize, exchange, takes).seconds();
        let walked = seconds(&self.steps);
        let again = |(shorter, times): &(Steps, f64)| (walked - seconds(shorter)) * times;
        walked + self.shorter.as_ref().map_or(0.0, again)
    }

    /// Seconds of a byte of each kind, and how many more while another core is busy.
    fn takes(&self, sharing: &Sharing, exchange: &Exchange) -> [Kinds; 2] {
        let each = |rate: Option<Bandwidth>| rate.map_or(0.0, |rate| 1.0 / rate.value());
        let Exchange { cached, copied, passed, near, write, read, .. } = *exchange;
        let [cached, copied, passed, near] = [cached, copied, passed, near].map(|rate| each(Some(rate)));
        // From a quarter of the cache to all of it the one rate passes into the other: of messages, and the half of their staging
        // that is in use.
        let staged = match self.place {
            Place::Staged => self.bytes.min((STAGING_BYTES / 2) as f64),
            Place::InPool => 0.0,
        };
        let beyond = (self.ranks * (self.bytes + staged) / sharing.cache.value()).log2() / 2.0 + 1.0;
        let beyond = beyond.clamp(0.0, 1.0);
        let message = between(cached, copied, beyond);
        // What another core wrote is in that core's cache, from where it takes longer than from the one that all share. From
        // half of it to twice as much, of messages and of what is staged of them, it is no longer there.
        let (times, shared) = match self.place {
            Place::Staged => (2.0, cached),
            Place::InPool => (IN_PLACE, message),
        };
        let of_core = times * (self.ranks / f64::from(sharing.cores)).ceil() * self.bytes;
        let evicted = (of_core / sharing.core_cache.value()).log2() / 2.0 + 0.5;
        let alone =
            [message, between(passed, shared, evicted.clamp(0.0, 1.0)), near, each(write), each(read)];
        let [message, .., write, read] = alone.map(|takes| takes * CROWD * beyond);
        [alone, [message, 0.0, 0.0, write, read]]
    }
}

/// From `one` to `other` as `part` goes from 0 to 1.
fn between(one: f64, other: f64, part: f64) -> f64 {
    one.powf(1.0 - part) * other.powf(part)
}

/// The steps of so many rounds, as the pool runs them.
fn steps(ranks: &[(Plan, Cut)], hosts: &[u16], rounds: u64, place: Place) -> Steps {
    let walk = |plan: &Plan| {
        let idle: Vec<_> = plan.steps.iter().map(|step| step.actions.is_empty()).collect();
        plan.walk(rounds).filter(move |&(_, phase)| !idle[phase])
    };
    // What each rank publishes after each of its steps; before the first it says that it has begun.
    let published = |(plan, _): &(Plan, Cut)| -> Vec<u64> {
        walk(plan).map(|(round, phase)| plan.number(round, phase)).collect()
    };
    let published: Vec<_> = ranks.iter().map(published).collect();
    // What is staged for other hosts is written past the caches, and fetched from behind them on the same host too.
    let shown = |(rank, (plan, _)): (usize, &(Plan, Cut))| {
        let blocks = plan.steps.iter().flat_map(|step| &step.actions).filter_map(|act| act.block);
        blocks.filter(|block| block.far).map(|block| (rank, block.index)).collect::<Vec<_>>()
    };
    let streamed: BTreeSet<_> = ranks.iter().enumerate().flat_map(shown).collect();
    let of_rank = |(rank, (plan, cut)): (usize, &(Plan, Cut))| {
        let awaited = |(other, steps): (usize, usize)| Await {
            rank: other,
            steps,
            is_far: hosts[other] != hosts[rank],
        };
        let others = || (0..ranks.len()).filter(|other| *other != rank);
        let kinds = kinds(plan, place, &streamed);
        let mut steps = vec![Step { awaits: vec![], bytes: Kinds::default() }];
        // Data in the pool is announced before, and left alone until all have read it after.
        if place == Place::InPool {
            let awaits = others().map(|other| awaited((other, 1))).collect();
            steps.push(Step { awaits, bytes: Kinds::default() });
        }
        let begun = steps.len();
        for (round, phase) in walk(plan) {
            let filling = (place == Place::Staged).then(|| plan.before_filling(round, phase));
            let turns = plan.before_reading(round, phase).chain(filling.into_iter().flatten());
            let done = |other: usize, number| begun + 1 + published[other].partition_point(|&at| at < number);
            let awaits = turns.map(|(other, number)| awaited((other, done(other, number)))).collect();
            let mut bytes = Kinds::default();
            for (act, kinds) in plan.steps[phase].actions.iter().zip(&kinds[phase]) {
                let part = cut.part(act.length, round);
                let length = (part.end - part.start) as f64;
                let length = length + START * length.min(START_BYTES);
                bytes.iter_mut().zip(kinds).for_each(|(bytes, times)| *bytes += times * length);
            }
            steps.push(Step { awaits, bytes });
        }
        if place == Place::InPool {
            let awaits = others().map(|other| awaited((other, begun + published[other].len()))).collect();
            steps.push(Step { awaits, bytes: Kinds::default() });
        }
        steps
    };
    ranks.iter().enumerate().map(of_rank).collect()
}

/// How often each action of each phase reads or writes its bytes, by kind.
fn kinds(plan: &Plan, place: Place, streamed: &BTreeSet<(usize, usize)>) -> Vec<Vec<Kinds>> {
    // Chunks of the message that the rank has had in its cache.
    let mut had = BTreeSet::new();
    let mut of_act = |act: &Act| {
        let (mut inputs, mut blocks, mut fetched) = (vec![], vec![], 0.0);
        for source in &act.sources {
            match source {
                Read::Input(chunk) => inputs.push(*chunk),
                Read::Block(block) => {
                    fetched += f64::from(streamed.contains(&(block.rank, block.index)));
                    blocks.push(block.far);
                }
            }
        }
        let shown = act.block.as_ref().map(|block| block.far);
        let written = f64::from(shown == Some(true));
        let read = blocks.iter().filter(|far| **far).count() as f64;
        match place {
            // What peers are shown stands where they read it.
            Place::InPool if blocks.is_empty() && inputs.len() == 1 => [0.0, 0.0, 0.0, written, read],
            // It is changed where they have read it.
            Place::InPool => [act.sources.len() as f64 - read, read + 1.0, 0.0, written, read],
            // Blocks are filled in a stream that fetches nothing before, in half the time. What the core has had is there.
            Place::Staged => {
                let near = blocks.len() as f64 - read + f64::from(shown == Some(false));
                inputs.extend(act.output);
                let own = inputs.iter().filter(|chunk| had.insert(**chunk)).count() as f64;
                [own, read + 0.5 * written, near, 0.5 * written, fetched]
            }
        }
    };
    plan.steps.iter().map(|step| step.actions.iter().map(&mut of_act).collect()).collect()
}

/// Ranks on their cores, as they go through operations that follow each other.
struct Cores<'a> {
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
    fn new(steps: &'a Steps, cores: usize, exchange: &Exchange, takes: [Kinds; 2]) -> Self {
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
    fn seconds(mut self) -> f64 {
        while let Some(core) = self.first() {
            self.go_on(core);
        }
        let end = |calls: usize| {
            let end = |(rank, steps): (&Rank, &Vec<Step>)| {
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

    fn go_on(&mut self, core: usize) {
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
                    _ => self.give_up(core, now.max(until)),
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
    fn give_up(&mut self, core: usize, now: f64) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use polder_platform::{Bytes, Tier, Time};

    fn sharing() -> (Sharing, Exchange) {
        let exchange = Exchange::from_values([1.0, 10.0, 100.0, 1e3, 1e3, 2e3, 4e3, 1e2, 1e1]);
        let memory = Tier {
            capacity: Bytes::new(1e9),
            read: Bandwidth::new(1e3),
            write: Bandwidth::new(1e3),
            latency: Time::new(1.0),
        };
        let [cache, core_cache] = [1e6, 1e5].map(Bytes::new);
        let sharing = Sharing { cores: 2, cache, core_cache, memory, exchange: [].into() };
        (sharing, exchange)
    }

    fn all_reduce_with(exchange: &Exchange, hosts: &[u16], bytes: u64, place: Place) -> f64 {
        collective(&sharing().0, exchange, Collective::AllReduce, hosts, bytes, place).unwrap()
    }

    fn all_reduce(hosts: &[u16], bytes: u64, place: Place) -> f64 {
        all_reduce_with(&sharing().1, hosts, bytes, place)
    }

    #[test]
    fn each_kind_of_byte_takes_what_its_constant_says() {
        // In one exchange: own read and shown; the other's read; the rest is in the core's cache. One look at the other.
        let seconds = all_reduce(&[0, 1], 64, Place::Staged);
        let bytes = 64.0 * (1.0 + START);
        assert_close(seconds, 1.0 + 10.0 + bytes * (1.0 / 1e3 + 1.5 / 2e3 + 0.5 / 1e2 + 1.0 / 1e1));
        // On one host nothing is far.
        let seconds = all_reduce(&[0, 0], 64, Place::Staged);
        assert_close(seconds, 1.0 + 10.0 + bytes * (1.0 / 1e3 + 2.0 / 4e3));
        // In the pool: halves, of each the other's read, own read once, and changed twice where the other has read it; two looks at
        // the other, one before and one after.
        let seconds = all_reduce(&[0, 1], 128, Place::InPool);
        assert_close(seconds, 1.0 + 4.0 * 10.0 + bytes * (1.0 / 1e3 + 4.0 / 2e3 + 2.0 / 1e2 + 2.0 / 1e1));
    }

    #[test]
    fn ranks_without_a_core_wait_for_one() {
        // Two more sources to read, and two ranks to a core, which goes over once an operation.
        let exchange = Exchange { turn: Time::new(1e-7), ..sharing().1 };
        let four = all_reduce_with(&exchange, &[0, 0, 0, 0], 64, Place::Staged);
        assert!((100.0..104.0).contains(&four), "{four}");
        // Where others are seen later than a rank looks for them, it has gone over once more.
        let late = all_reduce(&[0, 0, 0, 0], 64, Place::Staged) - four;
        assert!((99.0..101.0).contains(&late), "{late}");
    }

    #[test]
    fn a_rank_looks_longer_for_one_of_another_host_before_it_gives_up_its_core() {
        let (_, exchange) = sharing();
        let near = Exchange { switch: Time::new(1.0), turn: Time::new(0.1), ..exchange };
        let without = Exchange { read: None, ..near };
        let two_hosts = [0, 1, 0, 1];
        let [looking, glancing] =
            [near, without].map(|exchange| all_reduce_with(&exchange, &two_hosts, 64, Place::Staged));
        // Three blocks for each of two ranks: that of the same host is streamed past the caches too.
        let read = 2.0 * 3.0 * 64.0 * (1.0 + START) / 1e1;
        let looks = f64::from(LOOKS) * LOOK * 0.1;
        let more = looking - glancing - read;
        assert!((0.5 * looks..4.0 * looks).contains(&more), "{looking} {glancing}");
        // With a core for each nobody gives one up.
        let [looking, glancing] =
            [near, without].map(|exchange| all_reduce_with(&exchange, &[0, 1], 64, Place::Staged));
        assert_close(looking, glancing + 64.0 * (1.0 + START) / 1e1);
    }

    #[test]
    fn many_rounds_take_what_so_many_more_than_a_few_take() {
        let sizes = [8, 16, 24].map(|rounds| 2 * rounds * SEGMENT_BYTES);
        let [few, more, most] = sizes.map(|bytes| {
            let walk = Walk::new(Collective::AllReduce, &[0, 1], bytes, Place::InPool).unwrap();
            assert_eq!(walk.shorter.is_some(), bytes > sizes[0]);
            // At one rate, whatever the size.
            let (mut sharing, exchange) = sharing();
            (sharing.cache, sharing.core_cache) = (Bytes::new(f64::MAX), Bytes::new(f64::MAX));
            walk.seconds(&sharing, &exchange)
        });
        assert_close(most - more, more - few);
        assert!(few < more, "{few} {more}");
    }

    fn assert_close(one: f64, other: f64) {
        assert!((one / other - 1.0).abs() < 1e-9, "{one} is not {other}");
    }

    #[test]
    fn messages_pass_from_the_rate_of_one_cache_to_that_of_the_next() {
        let (sharing, mut exchange) = sharing();
        (exchange.cached, exchange.copied) = (Bandwidth::new(1e3), Bandwidth::new(10.0));
        let takes = |bytes: u64, place: Place| {
            Walk::new(Collective::AllReduce, &[0, 1], bytes, place).unwrap().takes(&sharing, &exchange)[0]
        };
        // A quarter of the last cache is copied at the one rate and all of it at the other: of two ranks' messages.
        for (bytes, rate) in [(125_000, 1e3), (250_000, 1e2), (500_000, 10.0)] {
            assert_close(takes(bytes, Place::InPool)[0], 1.0 / rate);
        }
        // Half of what is staged is in the cache too.
        for (bytes, rate) in [(62_500, 1e3), (125_000, 1e2), (250_000, 10.0)] {
            assert_close(takes(bytes, Place::Staged)[0], 1.0 / rate);
        }
        // What another core wrote: from its cache, and from the one that all share.
        let far = |bytes, place| takes(bytes, place)[1];
        assert_close(far(25_000, Place::InPool), 1.0 / 2e3);
        assert_close(far(12_500, Place::Staged), 1.0 / 2e3);
        let evicted = IN_PLACE.log2() / 2.0 + 0.5;
        assert_close(
            far(100_000, Place::InPool),
            1.0 / (2e3_f64.powf(1.0 - evicted) * 1e3_f64.powf(evicted)),
        );
        assert_close(far(50_000, Place::Staged), 1.0 / f64::sqrt(2e3 * 1e3));
        assert_close(far(500_000, Place::InPool), 1.0 / 10.0);
        assert_close(far(500_000, Place::Staged), 1.0 / 1e3);
    }

    #[test]
    fn two_cores_that_go_to_memory_at_the_same_time_take_longer() {
        // All at one rate, and so long that the times of steps do not count.
        let exchange = Exchange { cached: Bandwidth::new(1e3), write: None, read: None, ..sharing().1 };
        let exchange = Exchange { passed: exchange.cached, near: exchange.cached, ..exchange };
        let seconds = |cores: u32, cache: f64| {
            let [cache, core_cache] = [cache, f64::MAX].map(Bytes::new);
            let sharing = Sharing { cores, cache, core_cache, ..sharing().0 };
            collective(&sharing, &exchange, Collective::AllReduce, &[0, 1], 4 << 20, Place::Staged).unwrap()
        };
        let crowded = seconds(2, 1e3) / seconds(2, f64::MAX);
        assert!((1.05..1.0 + CROWD).contains(&crowded), "{crowded}");
        // A core alone is crowded by nobody.
        assert_close(seconds(1, 1e3), seconds(1, f64::MAX));
    }
}
