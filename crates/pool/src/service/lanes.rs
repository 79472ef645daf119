//! Emulated links: what the bytes of shards would take on the way to a device and back.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use polder_mem::Nanos;

/// The link of a proxy's device, in each direction, as a token bucket emulates it. All clients share it, and both directions
/// are used at once. Whatever is timed with it is an emulated figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatedLink {
    /// Nanoseconds that each shard keeps the link busy besides its bytes, as setting up a transfer does.
    pub latency_ns: u64,
    /// Bytes a second; at least 1.
    pub bytes_per_second: u64,
}

impl EmulatedLink {
    fn nanos(self, bytes: u64) -> u64 {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.max(1));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }
}

/// One direction of a link: what waits goes through one after the other, the lowest rank first. Without a link it goes at once.
pub(super) struct Lane<T> {
    link: Option<EmulatedLink>,
    waiting: BinaryHeap<Reverse<Waiting<T>>>,
    /// What is on the link, and when it arrives.
    under_way: VecDeque<(Nanos, T)>,
    free: Nanos,
    came: u64,
}

/// What waits: its rank, its turn among equals, since when, its bytes.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Waiting<T> {
    rank: u32,
    turn: u64,
    since: Nanos,
    bytes: u64,
    what: T,
}

impl<T: Copy + Ord> Lane<T> {
    pub(super) const fn new(link: Option<EmulatedLink>) -> Self {
        Self { link, waiting: BinaryHeap::new(), under_way: VecDeque::new(), free: Nanos(0), came: 0 }
    }

    pub(super) const fn is_emulated(&self) -> bool {
        self.link.is_some()
    }

    pub(super) fn put(&mut self, rank: u32, what: T, bytes: u64, now: Nanos) {
        self.waiting.push(Reverse(Waiting { rank, turn: self.came, since: now, bytes, what }));
        self.came += 1;
    }

    /// The next that has come through by `now`.
    pub(super) fn next(&mut self, now: Nanos) -> Option<T> {
        let Some(link) = self.link else {
            return self.waiting.pop().map(|Reverse(waiting)| waiting.what);
        };
        while self.free <= now
            && let Some(Reverse(Waiting { since, bytes, what, .. })) = self.waiting.pop()
        {
            let begins = self.free.max(since).0;
            self.free = Nanos(begins.saturating_add(link.latency_ns).saturating_add(link.nanos(bytes)));
            self.under_way.push_back((self.free, what));
        }
        let has_come = self.under_way.front().is_some_and(|(at, _)| *at <= now);
        if has_come { self.under_way.pop_front().map(|(_, what)| what) } else { None }
    }

    /// When to look again, if something is on the way.
    pub(super) fn due(&self) -> Option<Nanos> {
        let arrives = self.under_way.front().map(|(at, _)| *at);
        let begins = (!self.waiting.is_empty()).then_some(self.free);
        arrives.into_iter().chain(begins).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: EmulatedLink = EmulatedLink { latency_ns: 5, bytes_per_second: 1_000_000_000 };

    #[test]
    fn a_link_carries_one_after_the_other_and_the_lowest_rank_of_what_waits_first() {
        let mut lane = Lane::new(Some(LINK));
        lane.put(9, 'a', 100, Nanos(1000));
        assert_eq!((lane.next(Nanos(1000)), lane.due()), (None, Some(Nanos(1105))));
        lane.put(9, 'b', 10, Nanos(1010));
        lane.put(3, 'c', 20, Nanos(1020));
        assert_eq!(lane.next(Nanos(1104)), None);
        assert_eq!(lane.due(), Some(Nanos(1105)), "when the link is free");
        assert_eq!(lane.next(Nanos(1105)), Some('a'));
        assert_eq!(lane.next(Nanos(1129)), None);
        assert_eq!(lane.next(Nanos(1130)), Some('c'), "it came later and goes first");
        assert_eq!(lane.next(Nanos(1145)), Some('b'), "each shard takes the link for 5 ns more");
        assert_eq!((lane.next(Nanos(5000)), lane.due()), (None, None));
    }

    #[test]
    fn without_a_link_everything_goes_at_once_in_the_order_of_ranks_and_turns() {
        let mut lane = Lane::new(None);
        for (rank, what) in [(2, 'a'), (1, 'b'), (2, 'c'), (1, 'd')] {
            lane.put(rank, what, 1 << 40, Nanos(0));
        }
        let order: Vec<_> = std::iter::from_fn(|| lane.next(Nanos(0))).collect();
        assert_eq!(order, ['b', 'd', 'a', 'c']);
        assert!(!lane.is_emulated() && lane.due().is_none());
    }
}
