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
/// what it awaits is done, and takes as long as its bytes take; a core does one step at a time.
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
/// Operations that follow each other, of which the first is not counted: ranks that are done go on to the next.
const CALLS: usize = 3;

/// What each rank does in a collective, whatever that takes.
pub(crate) struct Walk {
    steps: Steps,
    /// With half of the rounds, and how often the difference comes on top.
    shorter: Option<(Steps, f64)>,
    /// Each rank has the message and, as often, what it stages or copies of it.
    footprint: f64,
}

/// The steps of each rank, in order.
type Steps = Vec<Vec<Step>>;

/// What a rank does from one look at the others to the next.
struct Step {
    /// Other ranks, and how many of its steps each must have done before.
    awaits: Vec<(usize, usize)>,
    bytes: Kinds,
}

/// Bytes that are read or written: of the message; through blocks from host to host; through blocks inside a host; and of all
/// these what is written for other hosts, and what is read of them.
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
            steps: steps(&ranks, rounds.min(ROUNDS), place),
            shorter: (more > 0.0).then(|| (steps(&ranks, ROUNDS / 2, place), more)),
            footprint: bytes as f64 * hosts.len() as f64,
        })
    }

    pub(crate) fn seconds(&self, sharing: &Sharing, exchange: &Exchange) -> f64 {
        let each = |rate: Option<Bandwidth>| rate.map_or(0.0, |rate| 1.0 / rate.value());
        let Exchange { passed, near, write, read, .. } = *exchange;
        let [passed, near, write, read] = [Some(passed), Some(near), write, read].map(each);
        let takes = [1.0 / copied(sharing, exchange, self.footprint), passed, near, write, read];
        let seconds = |steps: &Steps| seconds(steps, sharing.cores as usize, exchange, &takes);
        let walked = seconds(&self.steps);
        let again = |(shorter, times): &(Steps, f64)| (walked - seconds(shorter)) * times;
        walked + self.shorter.as_ref().map_or(0.0, again)
    }
}

/// The steps of so many rounds, as the pool runs them.
fn steps(ranks: &[(Plan, Cut)], rounds: u64, place: Place) -> Steps {
    let walk = |plan: &Plan| {
        let idle: Vec<_> = plan.steps.iter().map(|step| step.actions.is_empty()).collect();
        plan.walk(rounds).filter(move |&(_, phase)| !idle[phase])
    };
    // What each rank publishes after each of its steps; before the first it says that it has begun.
    let published = |(plan, _): &(Plan, Cut)| -> Vec<u64> {
        walk(plan).map(|(round, phase)| plan.number(round, phase)).collect()
    };
    let published: Vec<_> = ranks.iter().map(published).collect();
    let of_rank = |(rank, (plan, cut)): (usize, &(Plan, Cut))| {
        let others = || (0..ranks.len()).filter(|other| *other != rank);
        let kinds = kinds(plan, place);
        let mut steps = vec![Step { awaits: vec![], bytes: Kinds::default() }];
        // Data in the pool is announced before, and left alone until all have read it after.
        if place == Place::InPool {
            let awaits = others().map(|other| (other, 1)).collect();
            steps.push(Step { awaits, bytes: Kinds::default() });
        }
        let begun = steps.len();
        for (round, phase) in walk(plan) {
            let filling = (place == Place::Staged).then(|| plan.before_filling(round, phase));
            let turns = plan.before_reading(round, phase).chain(filling.into_iter().flatten());
            let done = |other: usize, number| begun + 1 + published[other].partition_point(|&at| at < number);
            let awaits = turns.map(|(other, number)| (other, done(other, number))).collect();
            let mut bytes = Kinds::default();
            for (act, kinds) in plan.steps[phase].actions.iter().zip(&kinds[phase]) {
                let part = cut.part(act.length, round);
                let length = (part.end - part.start) as f64;
                bytes.iter_mut().zip(kinds).for_each(|(bytes, times)| *bytes += times * length);
            }
            steps.push(Step { awaits, bytes });
        }
        if place == Place::InPool {
            let awaits = others().map(|other| (other, begun + published[other].len())).collect();
            steps.push(Step { awaits, bytes: Kinds::default() });
        }
        steps
    };
    ranks.iter().enumerate().map(of_rank).collect()
}

/// How often each action of each phase reads or writes its bytes, by kind.
fn kinds(plan: &Plan, place: Place) -> Vec<Vec<Kinds>> {
    // Chunks of the message that the rank has had in its cache.
    let mut had = BTreeSet::new();
    let mut of_act = |act: &Act| {
        let (mut inputs, mut blocks) = (vec![], vec![]);
        for source in &act.sources {
            match source {
                Read::Input(chunk) => inputs.push(*chunk),
                Read::Block(block) => blocks.push(block.far),
            }
        }
        let shown = act.block.as_ref().map(|block| block.far);
        let count = |far: &[bool]| far.iter().filter(|far| **far).count() as f64;
        let (written, read) = (f64::from(shown == Some(true)), count(&blocks));
        match place {
            // What peers are shown stands where they read it.
            Place::InPool if blocks.is_empty() && inputs.len() == 1 => [0.0, 0.0, 0.0, written, read],
            Place::InPool => [act.sources.len() as f64 + 1.0, 0.0, 0.0, written, read],
            Place::Staged => {
                blocks.extend(shown);
                inputs.extend(act.output);
                let own = inputs.iter().filter(|chunk| had.insert(**chunk)).count() as f64;
                let between = count(&blocks);
                let passed = between + inputs.len() as f64 - own;
                [own, passed, blocks.len() as f64 - between, written, read]
            }
        }
    };
    plan.steps.iter().map(|step| step.actions.iter().map(&mut of_act).collect()).collect()
}

/// Seconds of one of several operations that follow each other, with what a byte of each kind takes.
fn seconds(steps: &Steps, cores: usize, exchange: &Exchange, takes: &Kinds) -> f64 {
    let [call, turn, switch] = [exchange.call, exchange.turn, exchange.switch].map(|time| time.value());
    let switch = switch * steps.len().saturating_sub(cores) as f64;
    // When each rank had done each of its steps; which rank a core was last with.
    let mut done = vec![vec![]; steps.len()];
    let mut last: Vec<Option<(usize, f64)>> = vec![None; cores];
    let mut ends = [0.0; CALLS];
    // Which operation a rank is in, and at which of its steps.
    let place = |rank: usize, done: &[Vec<f64>]| {
        let (steps, done) = (steps[rank].len(), done[rank].len());
        (done / steps, done % steps)
    };
    let all = CALLS * steps.iter().map(Vec::len).sum::<usize>();
    for _ in 0..all {
        // The step that can begin first.
        let begin = |rank: usize| {
            let (before, own) = place(rank, &done);
            let seen = |&(other, count): &(usize, usize)| {
                let at: f64 = *done[other].get(before * steps[other].len() + count - 1)?;
                Some(if other % cores == rank % cores { at } else { at + turn })
            };
            let free = last[rank % cores].map_or(0.0, |(of, at)| if of == rank { at } else { at + switch });
            let awaits = &steps[rank][own].awaits;
            let ready = awaits.iter().try_fold(free, |ready, turn| Some(f64::max(ready, seen(turn)?)))?;
            (before < CALLS).then_some((ready, rank))
        };
        let first = (0..steps.len()).filter_map(begin).min_by(|one, other| one.0.total_cmp(&other.0));
        let (begin, rank) = first.expect("a schedule that was checked comes to its end");
        let (before, own) = place(rank, &done);
        let bytes: f64 = steps[rank][own].bytes.iter().zip(takes).map(|(bytes, takes)| bytes * takes).sum();
        let end = begin + bytes + if own == 0 { call } else { 0.0 };
        done[rank].push(end);
        last[rank % cores] = Some((rank, end));
        ends[before] = f64::max(ends[before], end);
    }
    (ends[CALLS - 1] - ends[0]) / (CALLS - 1) as f64
}

/// Bytes a second of copies over so many bytes: from a quarter of the cache to all of it the one rate passes into the other.
fn copied(sharing: &Sharing, exchange: &Exchange, footprint: f64) -> f64 {
    let over = ((footprint / sharing.cache.value()).log2() / 2.0 + 1.0).clamp(0.0, 1.0);
    exchange.cached.value().powf(1.0 - over) * exchange.copied.value().powf(over)
}

#[cfg(test)]
mod tests {
    use super::*;
    use polder_platform::{Bandwidth, Bytes, Tier, Time};

    fn sharing() -> (Sharing, Exchange) {
        let exchange = Exchange::from_values([1.0, 10.0, 100.0, 1e3, 1e3, 2e3, 4e3, 1e2, 1e1]);
        let memory = Tier {
            capacity: Bytes::new(1e9),
            read: Bandwidth::new(1e3),
            write: Bandwidth::new(1e3),
            latency: Time::new(1.0),
        };
        let sharing = Sharing { cores: 2, cache: Bytes::new(1e6), memory, exchange: [].into() };
        (sharing, exchange)
    }

    fn all_reduce(hosts: &[u16], bytes: u64, place: Place) -> f64 {
        let (sharing, exchange) = sharing();
        collective(&sharing, &exchange, Collective::AllReduce, hosts, bytes, place).unwrap()
    }

    #[test]
    fn each_kind_of_byte_takes_what_its_constant_says() {
        // In one exchange: own read and shown; the other's and own read, and their sum written. One look at the other.
        let seconds = all_reduce(&[0, 1], 64, Place::Staged);
        assert_close(seconds, 1.0 + 10.0 + 64.0 * (1.0 / 1e3 + 4.0 / 2e3 + 1.0 / 1e2 + 1.0 / 1e1));
        // On one host nothing is far.
        let seconds = all_reduce(&[0, 0], 64, Place::Staged);
        assert_close(seconds, 1.0 + 10.0 + 64.0 * (1.0 / 1e3 + 2.0 / 2e3 + 2.0 / 4e3));
        // In the pool: halves, two looks at the other, one before and one after.
        let seconds = all_reduce(&[0, 1], 128, Place::InPool);
        assert_close(seconds, 1.0 + 4.0 * 10.0 + 64.0 * (5.0 / 1e3 + 2.0 / 1e2 + 2.0 / 1e1));
    }

    #[test]
    fn ranks_without_a_core_wait_for_one() {
        // Two more sources to read, and two ranks to a core, which goes over once an operation.
        let four = all_reduce(&[0, 0, 0, 0], 64, Place::Staged);
        let bytes = 64.0 * (1.0 / 1e3 + 2.0 / 2e3 + 4.0 / 4e3);
        let looking = four - 2.0 * (1.0 + bytes) - 2.0 * 100.0;
        assert!(looking > 0.0 && looking <= 10.0, "{four}");
    }

    #[test]
    fn many_rounds_take_what_so_many_more_than_a_few_take() {
        let sizes = [8, 16, 24].map(|rounds| 2 * rounds * SEGMENT_BYTES);
        let [few, more, most] = sizes.map(|bytes| {
            let walk = Walk::new(Collective::AllReduce, &[0, 1], bytes, Place::InPool).unwrap();
            assert_eq!(walk.shorter.is_some(), bytes > sizes[0]);
            // At one rate, whatever the size.
            let (mut sharing, exchange) = sharing();
            sharing.cache = Bytes::new(f64::MAX);
            walk.seconds(&sharing, &exchange)
        });
        assert_close(most - more, more - few);
        assert!(few < more, "{few} {more}");
    }

    fn assert_close(one: f64, other: f64) {
        assert!((one / other - 1.0).abs() < 1e-9, "{one} is not {other}");
    }

    #[test]
    fn a_quarter_of_the_cache_is_copied_at_the_one_rate_and_all_of_it_at_the_other() {
        let (sharing, mut exchange) = sharing();
        exchange.copied = Bandwidth::new(10.0);
        assert_eq!(copied(&sharing, &exchange, 0.25e6), 1e3);
        assert!((copied(&sharing, &exchange, 0.5e6) / 1e2 - 1.0).abs() < 1e-9);
        assert_eq!(copied(&sharing, &exchange, 1e6), 10.0);
    }
}
