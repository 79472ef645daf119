//! Collectives of ranks that copy bytes, priced step by step along the schedules that the pool runs.

use std::collections::BTreeSet;

use polder_platform::{Bandwidth, Exchange, Sharing};
use polder_schedule::{
    Collective, Cut, DIRECT_BYTES, Plan, RankAction, ResolvedSource, SEGMENT_BYTES, STAGING_BYTES, Variant,
};

use super::cores::Cores;

/// Where a message lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagePlace {
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
/// looks [`LOOKS`](super::LOOKS) times for what it awaits, then gives the core up. Of two cores with more than the cache holds the later takes
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
    place: MessagePlace,
) -> Option<f64> {
    Some(Walk::new(collective, hosts, bytes, place)?.seconds(sharing, exchange))
}

/// Rounds that are walked through; more go on as the second half of these does.
const ROUNDS: u64 = 8;
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
    place: MessagePlace,
}

/// The steps of each rank, in order.
pub(super) type Steps = Vec<Vec<WalkStep>>;

/// What a rank does from one look at the others to the next.
pub(super) struct WalkStep {
    /// In this order.
    pub(super) awaits: Vec<Await>,
    pub(super) bytes: Kinds,
}

/// Another rank, how many of its steps it must have done before, and whether it is on another host.
pub(super) struct Await {
    pub(super) rank: usize,
    pub(super) steps: usize,
    pub(super) is_far: bool,
}

/// Bytes that are read or written: of the message; what ranks of other hosts have last written or read; through blocks inside a
/// host; and what is written for other hosts, and what is read of them.
pub(super) type Kinds = [f64; 5];

impl Walk {
    pub(crate) fn new(
        collective: Collective,
        hosts: &[u16],
        bytes: u64,
        place: MessagePlace,
    ) -> Option<Self> {
        let variant = match place {
            MessagePlace::InPool => Variant::in_pool(collective),
            MessagePlace::Staged => {
                Variant::staged(collective, bytes, DIRECT_BYTES, hosts.len(), || hosts.to_vec())
            }
        };
        let schedule = variant.schedule(collective, hosts, 0);
        let cut = |plan: &Plan| match place {
            MessagePlace::InPool => Some(Cut::new(plan, bytes, SEGMENT_BYTES)),
            MessagePlace::Staged => Cut::staged(plan, bytes, STAGING_BYTES / 2, SEGMENT_BYTES),
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
            MessagePlace::Staged => self.bytes.min((STAGING_BYTES / 2) as f64),
            MessagePlace::InPool => 0.0,
        };
        let beyond = (self.ranks * (self.bytes + staged) / sharing.cache.value()).log2() / 2.0 + 1.0;
        let beyond = beyond.clamp(0.0, 1.0);
        let message = between(cached, copied, beyond);
        // What another core wrote is in that core's cache, from where it takes longer than from the one that all share. From
        // half of it to twice as much, of messages and of what is staged of them, it is no longer there.
        let (times, shared) = match self.place {
            MessagePlace::Staged => (2.0, cached),
            MessagePlace::InPool => (IN_PLACE, message),
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
fn steps(ranks: &[(Plan, Cut)], hosts: &[u16], rounds: u64, place: MessagePlace) -> Steps {
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
        let mut steps = vec![WalkStep { awaits: vec![], bytes: Kinds::default() }];
        // Data in the pool is announced before, and left alone until all have read it after.
        if place == MessagePlace::InPool {
            let awaits = others().map(|other| awaited((other, 1))).collect();
            steps.push(WalkStep { awaits, bytes: Kinds::default() });
        }
        let begun = steps.len();
        for (round, phase) in walk(plan) {
            let filling = (place == MessagePlace::Staged).then(|| plan.before_filling(round, phase));
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
            steps.push(WalkStep { awaits, bytes });
        }
        if place == MessagePlace::InPool {
            let awaits = others().map(|other| awaited((other, begun + published[other].len()))).collect();
            steps.push(WalkStep { awaits, bytes: Kinds::default() });
        }
        steps
    };
    ranks.iter().enumerate().map(of_rank).collect()
}

/// How often each action of each phase reads or writes its bytes, by kind.
fn kinds(plan: &Plan, place: MessagePlace, streamed: &BTreeSet<(usize, usize)>) -> Vec<Vec<Kinds>> {
    // Chunks of the message that the rank has had in its cache.
    let mut had = BTreeSet::new();
    let mut of_act = |act: &RankAction| {
        let (mut inputs, mut blocks, mut fetched) = (vec![], vec![], 0.0);
        for source in &act.sources {
            match source {
                ResolvedSource::Input(chunk) => inputs.push(*chunk),
                ResolvedSource::Block(block) => {
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
            MessagePlace::InPool if blocks.is_empty() && inputs.len() == 1 => [0.0, 0.0, 0.0, written, read],
            // It is changed where they have read it.
            MessagePlace::InPool => [act.sources.len() as f64 - read, read + 1.0, 0.0, written, read],
            // Blocks are filled in a stream that fetches nothing before, in half the time. What the core has had is there.
            MessagePlace::Staged => {
                let near = blocks.len() as f64 - read + f64::from(shown == Some(false));
                inputs.extend(act.output);
                let own = inputs.iter().filter(|chunk| had.insert(**chunk)).count() as f64;
                [own, read + 0.5 * written, near, 0.5 * written, fetched]
            }
        }
    };
    plan.steps.iter().map(|step| step.actions.iter().map(&mut of_act).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::cores::{LOOK, LOOKS};
    use super::*;
    use polder_platform::{Bytes, MemoryTier, Time};

    fn sharing() -> (Sharing, Exchange) {
        let exchange = Exchange::from_values([1.0, 10.0, 100.0, 1e3, 1e3, 2e3, 4e3, 1e2, 1e1]);
        let memory = MemoryTier {
            capacity: Bytes::new(1e9),
            read: Bandwidth::new(1e3),
            write: Bandwidth::new(1e3),
            latency: Time::new(1.0),
        };
        let [cache, core_cache] = [1e6, 1e5].map(Bytes::new);
        let sharing = Sharing { cores: 2, cache, core_cache, memory, exchange: [].into() };
        (sharing, exchange)
    }

    fn all_reduce_with(exchange: &Exchange, hosts: &[u16], bytes: u64, place: MessagePlace) -> f64 {
        collective(&sharing().0, exchange, Collective::AllReduce, hosts, bytes, place).unwrap()
    }

    fn all_reduce(hosts: &[u16], bytes: u64, place: MessagePlace) -> f64 {
        all_reduce_with(&sharing().1, hosts, bytes, place)
    }

    #[test]
    fn each_kind_of_byte_takes_what_its_constant_says() {
        // In one exchange: own read and shown; the other's read; the rest is in the core's cache. One look at the other.
        let seconds = all_reduce(&[0, 1], 64, MessagePlace::Staged);
        let bytes = 64.0 * (1.0 + START);
        assert_close(seconds, 1.0 + 10.0 + bytes * (1.0 / 1e3 + 1.5 / 2e3 + 0.5 / 1e2 + 1.0 / 1e1));
        // On one host nothing is far.
        let seconds = all_reduce(&[0, 0], 64, MessagePlace::Staged);
        assert_close(seconds, 1.0 + 10.0 + bytes * (1.0 / 1e3 + 2.0 / 4e3));
        // In the pool: halves, of each the other's read, own read once, and changed twice where the other has read it; two looks at
        // the other, one before and one after.
        let seconds = all_reduce(&[0, 1], 128, MessagePlace::InPool);
        assert_close(seconds, 1.0 + 4.0 * 10.0 + bytes * (1.0 / 1e3 + 4.0 / 2e3 + 2.0 / 1e2 + 2.0 / 1e1));
    }

    #[test]
    fn ranks_without_a_core_wait_for_one() {
        // Two more sources to read, and two ranks to a core, which goes over once an operation.
        let exchange = Exchange { turn: Time::new(1e-7), ..sharing().1 };
        let four = all_reduce_with(&exchange, &[0, 0, 0, 0], 64, MessagePlace::Staged);
        assert!((100.0..104.0).contains(&four), "{four}");
        // Where others are seen later than a rank looks for them, it has gone over once more.
        let late = all_reduce(&[0, 0, 0, 0], 64, MessagePlace::Staged) - four;
        assert!((99.0..101.0).contains(&late), "{late}");
    }

    #[test]
    fn a_rank_looks_longer_for_one_of_another_host_before_it_gives_up_its_core() {
        let (_, exchange) = sharing();
        let near = Exchange { switch: Time::new(1.0), turn: Time::new(0.1), ..exchange };
        let without = Exchange { read: None, ..near };
        let two_hosts = [0, 1, 0, 1];
        let [looking, glancing] =
            [near, without].map(|exchange| all_reduce_with(&exchange, &two_hosts, 64, MessagePlace::Staged));
        // Three blocks for each of two ranks: that of the same host is streamed past the caches too.
        let read = 2.0 * 3.0 * 64.0 * (1.0 + START) / 1e1;
        let looks = f64::from(LOOKS) * LOOK * 0.1;
        let more = looking - glancing - read;
        assert!((0.5 * looks..4.0 * looks).contains(&more), "{looking} {glancing}");
        // With a core for each nobody gives one up.
        let [looking, glancing] =
            [near, without].map(|exchange| all_reduce_with(&exchange, &[0, 1], 64, MessagePlace::Staged));
        assert_close(looking, glancing + 64.0 * (1.0 + START) / 1e1);
    }

    #[test]
    fn many_rounds_take_what_so_many_more_than_a_few_take() {
        let sizes = [8, 16, 24].map(|rounds| 2 * rounds * SEGMENT_BYTES);
        let [few, more, most] = sizes.map(|bytes| {
            let walk = Walk::new(Collective::AllReduce, &[0, 1], bytes, MessagePlace::InPool).unwrap();
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
        let takes = |bytes: u64, place: MessagePlace| {
            Walk::new(Collective::AllReduce, &[0, 1], bytes, place).unwrap().takes(&sharing, &exchange)[0]
        };
        // A quarter of the last cache is copied at the one rate and all of it at the other: of two ranks' messages.
        for (bytes, rate) in [(125_000, 1e3), (250_000, 1e2), (500_000, 10.0)] {
            assert_close(takes(bytes, MessagePlace::InPool)[0], 1.0 / rate);
        }
        // Half of what is staged is in the cache too.
        for (bytes, rate) in [(62_500, 1e3), (125_000, 1e2), (250_000, 10.0)] {
            assert_close(takes(bytes, MessagePlace::Staged)[0], 1.0 / rate);
        }
        // What another core wrote: from its cache, and from the one that all share.
        let far = |bytes, place| takes(bytes, place)[1];
        assert_close(far(25_000, MessagePlace::InPool), 1.0 / 2e3);
        assert_close(far(12_500, MessagePlace::Staged), 1.0 / 2e3);
        let evicted = IN_PLACE.log2() / 2.0 + 0.5;
        assert_close(
            far(100_000, MessagePlace::InPool),
            1.0 / (2e3_f64.powf(1.0 - evicted) * 1e3_f64.powf(evicted)),
        );
        assert_close(far(50_000, MessagePlace::Staged), 1.0 / f64::sqrt(2e3 * 1e3));
        assert_close(far(500_000, MessagePlace::InPool), 1.0 / 10.0);
        assert_close(far(500_000, MessagePlace::Staged), 1.0 / 1e3);
    }

    #[test]
    fn two_cores_that_go_to_memory_at_the_same_time_take_longer() {
        // All at one rate, and so long that the times of steps do not count.
        let exchange = Exchange { cached: Bandwidth::new(1e3), write: None, read: None, ..sharing().1 };
        let exchange = Exchange { passed: exchange.cached, near: exchange.cached, ..exchange };
        let seconds = |cores: u32, cache: f64| {
            let [cache, core_cache] = [cache, f64::MAX].map(Bytes::new);
            let sharing = Sharing { cores, cache, core_cache, ..sharing().0 };
            collective(&sharing, &exchange, Collective::AllReduce, &[0, 1], 4 << 20, MessagePlace::Staged)
                .unwrap()
        };
        let crowded = seconds(2, 1e3) / seconds(2, f64::MAX);
        assert!((1.05..1.0 + CROWD).contains(&crowded), "{crowded}");
        // A core alone is crowded by nobody.
        assert_close(seconds(1, 1e3), seconds(1, f64::MAX));
    }
}
