//! Collectives of ranks that copy bytes, priced step by step along the schedules that the pool runs.

use polder_platform::{Exchange, Sharing};
use polder_schedule::{Collective, Cut, DIRECT_BYTES, Plan, Read, SEGMENT_BYTES, STAGING_BYTES, Variant};

/// Where a message lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In memory of each rank, and goes through staging in the pool.
    Staged,
    /// In the pool, where peers read it.
    InPool,
}

/// Seconds of a collective of `bytes` among ranks on `hosts`: those of the vector of an all-reduce, reduce or broadcast, and
/// those of one rank's part of the others. `None` when no schedule can cut it.
///
/// A rank's work is the bytes that it moves, by kind, over what they take; ranks that share a core work one after the other;
/// between two iterations of the rounds lies a turn.
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
    Some(Moves::new(collective, hosts, bytes, place)?.seconds(sharing, exchange))
}

/// What a collective moves, whatever that takes.
pub(crate) struct Moves {
    /// Of each rank: bytes of a chunk, and its [`chunks`].
    ranks: Vec<(f64, [f64; 3])>,
    turns: f64,
    /// Each rank has the message and, as often, what it stages or copies of it.
    footprint: f64,
}

impl Moves {
    pub(crate) fn new(collective: Collective, hosts: &[u16], bytes: u64, place: Place) -> Option<Self> {
        let variant = match place {
            Place::InPool => Variant::in_pool(collective),
            Place::Staged => Variant::staged(collective, bytes, DIRECT_BYTES, || hosts.to_vec()),
        };
        let schedule = variant.schedule(collective, hosts, 0);
        let (mut ranks, mut turns) = (vec![], 0);
        for rank in 0..hosts.len() {
            let plan = Plan::new(&schedule, hosts, rank);
            let cut = match place {
                Place::InPool => Cut::new(&plan, bytes, SEGMENT_BYTES),
                Place::Staged => Cut::staged(&plan, bytes, STAGING_BYTES / 2, SEGMENT_BYTES)?,
            };
            turns = cut.rounds + plan.steps.len() as u64 - 2;
            ranks.push((cut.chunk as f64, chunks(&plan, place).map(|chunks| chunks as f64)));
        }
        // Data in the pool is announced before, and left alone until all have read it after.
        let turns = turns as f64 + if place == Place::InPool { 2.0 } else { 0.0 };
        Some(Self { ranks, turns, footprint: bytes as f64 * hosts.len() as f64 })
    }

    pub(crate) fn seconds(&self, sharing: &Sharing, exchange: &Exchange) -> f64 {
        let ranks = self.ranks.len();
        let on_a_core = (ranks as f64 / f64::from(sharing.cores)).ceil();
        let without_core = ranks.saturating_sub(sharing.cores as usize) as f64;
        let turn = exchange.turn.value() + exchange.switch.value() * without_core;
        let copied = 1.0 / copied(sharing, exchange, self.footprint);
        let [write, read] =
            [exchange.write, exchange.read].map(|rate| rate.map_or(0.0, |rate| 1.0 / rate.value()));
        let work = self
            .ranks
            .iter()
            .map(|(chunk, [all, written, far])| chunk * (all * copied + written * write + far * read));
        exchange.call.value() + self.turns * turn + work.fold(0.0, f64::max) * on_a_core
    }
}

/// Chunks that a rank reads or writes, and of these those that it writes for other hosts and that it reads of them.
fn chunks(plan: &Plan, place: Place) -> [usize; 3] {
    let mut chunks = [0; 3];
    for act in plan.steps.iter().flat_map(|step| &step.actions) {
        let far = |read: &&Read| matches!(read, Read::Block(block) if block.far);
        let kept = match place {
            // What peers are shown stands where they read it.
            Place::InPool if matches!(act.sources[..], [Read::Input(_)]) => 0,
            Place::InPool => act.sources.len() + 1,
            Place::Staged => {
                act.sources.len() + usize::from(act.output.is_some()) + usize::from(act.block.is_some())
            }
        };
        chunks[0] += kept;
        chunks[1] += usize::from(act.block.is_some_and(|block| block.far));
        chunks[2] += act.sources.iter().filter(far).count();
    }
    chunks
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
        let exchange = Exchange::from_values([1.0, 10.0, 100.0, 1e3, 1e3, 1e2, 1e1]);
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
        // In one exchange: own read and shown; own and the other's read and their sum written. Two phases, one turn between.
        let seconds = all_reduce(&[0, 1], 64, Place::Staged);
        assert_eq!(seconds, 1.0 + 10.0 + 64.0 * (5.0 / 1e3 + 1.0 / 1e2 + 1.0 / 1e1));
        // On one host nothing is far.
        let seconds = all_reduce(&[0, 0], 64, Place::Staged);
        assert_eq!(seconds, 1.0 + 10.0 + 64.0 * 5.0 / 1e3);
        // In the pool: halves, three phases, two turns more.
        let seconds = all_reduce(&[0, 1], 128, Place::InPool);
        let half = 64.0 * (5.0 / 1e3 + 2.0 / 1e2 + 2.0 / 1e1);
        assert!((seconds - (1.0 + 4.0 * 10.0 + half)).abs() < 1e-9, "{seconds}");
    }

    #[test]
    fn ranks_without_a_core_wait_for_one() {
        let two = all_reduce(&[0, 0], 64, Place::Staged);
        let four = all_reduce(&[0, 0, 0, 0], 64, Place::Staged);
        // Two more sources to read; twice the work on a core; two ranks wait at the turn.
        assert_eq!(two, 1.0 + 10.0 + 64.0 * 5.0 / 1e3);
        assert_eq!(four, 1.0 + 10.0 + 2.0 * 100.0 + 2.0 * 64.0 * 7.0 / 1e3);
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
