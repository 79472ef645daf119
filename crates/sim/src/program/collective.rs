//! Collective calls as the messages that MPI libraries make of them (Thakur, Rabenseifner and Gropp, 2005, as MPICH has them).

use serde::Serialize;

use super::{Operation, UNWAITED};

/// A collective call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collective {
    /// No rank goes on before all have come.
    Barrier,
    /// The bytes of one rank go to all.
    Broadcast,
    /// The sum goes to one rank.
    Reduce,
    /// The sum goes to all.
    AllReduce,
    /// The bytes of each go to one rank.
    Gather,
    /// The bytes of each go to all.
    AllGather,
    /// A piece for each comes from one rank.
    Scatter,
    /// Each has a piece for each.
    AllToAll,
    /// Each gets its piece of the sum.
    ReduceScatter,
}

/// All-reduces of more bytes than these halve what goes over the network in each step, as MPICH's do.
const HALVED: u64 = 2048;
/// The tag of all collective messages: between two ranks they are in the order of the calls.
const TAG: i64 = -1;

/// The ranks of a collective call, seen from one of them.
#[derive(Clone, Copy, Debug)]
pub struct Group<'a> {
    /// All, in the order of the communicator.
    pub members: &'a [u32],
    /// Which of them this rank is.
    pub place: usize,
}

impl Group<'_> {
    /// What this rank sends and receives. `bytes` are those that a rank has of a broadcast, a reduction or a gather, and those of one piece of
    /// a scatter, an all-to-all or a reduce-scatter; `root` is a place among the members.
    #[must_use]
    pub fn messages(self, kind: Collective, bytes: u64, root: usize) -> Vec<Operation> {
        let mut done = vec![];
        match kind {
            _ if self.members.len() < 2 => {}
            Collective::Barrier => self.barrier(&mut done),
            Collective::Broadcast => self.down(root, &mut done, |_| bytes),
            Collective::Scatter => self.down(root, &mut done, |below| bytes * below as u64),
            Collective::Reduce => self.up(root, &mut done, |_| bytes),
            Collective::Gather => self.up(root, &mut done, |below| bytes * below as u64),
            Collective::AllReduce => self.all_reduce(bytes, &mut done),
            Collective::AllGather => self.ring(bytes, &mut done),
            Collective::ReduceScatter | Collective::AllToAll => self.pairs(bytes, &mut done),
        }
        done
    }

    fn len(self) -> usize {
        self.members.len()
    }

    fn send(self, place: usize, bytes: u64, done: &mut Vec<Operation>) {
        done.push(Operation::Send { to: self.members[place], bytes, tag: TAG, request: Some(UNWAITED) });
    }

    fn receive(self, place: usize, done: &mut Vec<Operation>) {
        done.push(Operation::Receive { from: self.members[place], tag: TAG, request: None });
    }

    /// Dissemination: in each step to the rank that is twice as far.
    fn barrier(self, done: &mut Vec<Operation>) {
        let (count, place) = (self.len(), self.place);
        let mut far = 1;
        while far < count {
            self.send((place + far) % count, 0, done);
            self.receive((place + count - far) % count, done);
            far *= 2;
        }
    }

    /// Ranks from this one on that lie below it in a binomial tree, and the place above it, both counted from the root.
    fn tree(self, root: usize) -> (usize, usize) {
        let (count, own) = (self.len(), (self.place + self.len() - root) % self.len());
        let span = if own == 0 { count.next_power_of_two() } else { 1 << own.trailing_zeros() };
        (own, span)
    }

    /// From the root to all, by a binomial tree.
    fn down(self, root: usize, done: &mut Vec<Operation>, bytes: impl Fn(usize) -> u64) {
        let (count, (own, span)) = (self.len(), self.tree(root));
        let at = |place: usize| (place + root) % count;
        if own > 0 {
            self.receive(at(own - span), done);
        }
        let mut half = span / 2;
        while half > 0 {
            if own + half < count {
                self.send(at(own + half), bytes(half.min(count - own - half)), done);
            }
            half /= 2;
        }
    }

    /// From all to the root, by the same tree.
    fn up(self, root: usize, done: &mut Vec<Operation>, bytes: impl Fn(usize) -> u64) {
        let (count, (own, span)) = (self.len(), self.tree(root));
        let at = |place: usize| (place + root) % count;
        let mut half = 1;
        while half < span {
            if own + half < count {
                self.receive(at(own + half), done);
            }
            half *= 2;
        }
        if own > 0 {
            self.send(at(own - span), bytes(span.min(count - own)), done);
        }
    }

    /// By doubling; ranks beyond a power of two hand theirs over before, and get the sum after.
    fn all_reduce(self, bytes: u64, done: &mut Vec<Operation>) {
        let (count, place) = (self.len(), self.place);
        let even = 1 << count.ilog2();
        let beyond = count - even;
        if place >= even {
            self.send(place - even, bytes, done);
            self.receive(place - even, done);
            return;
        }
        if place < beyond {
            self.receive(place + even, done);
        }
        let steps = even.ilog2();
        match bytes > HALVED {
            false => {
                for step in 0..steps {
                    self.swap(place ^ 1 << step, bytes, done);
                }
            }
            // The sums of halves, of halves of these, and so on; then back.
            true => {
                for step in 0..steps {
                    self.swap(place ^ 1 << step, bytes >> (step + 1), done);
                }
                for step in (0..steps).rev() {
                    self.swap(place ^ 1 << step, bytes >> (step + 1), done);
                }
            }
        }
        if place < beyond {
            self.send(place + even, bytes, done);
        }
    }

    fn swap(self, place: usize, bytes: u64, done: &mut Vec<Operation>) {
        self.send(place, bytes, done);
        self.receive(place, done);
    }

    /// Each step hands on what the last one brought.
    fn ring(self, bytes: u64, done: &mut Vec<Operation>) {
        let (count, place) = (self.len(), self.place);
        for _ in 1..count {
            self.send((place + 1) % count, bytes, done);
            self.receive((place + count - 1) % count, done);
        }
    }

    /// With each other rank in turn.
    fn pairs(self, bytes: u64, done: &mut Vec<Operation>) {
        let (count, place) = (self.len(), self.place);
        for far in 1..count {
            self.send((place + far) % count, bytes, done);
            self.receive((place + count - far) % count, done);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const KINDS: [Collective; 9] = [
        Collective::Barrier,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::AllReduce,
        Collective::Gather,
        Collective::AllGather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::ReduceScatter,
    ];

    #[test]
    fn each_message_of_a_collective_is_sent_and_received_once() {
        for count in 1..=17_u32 {
            let members: Vec<_> = (0..count).collect();
            for (kind, root) in KINDS.into_iter().zip((0..count as usize).cycle()) {
                let mut open: BTreeMap<(u32, u32), i64> = BTreeMap::new();
                for place in 0..members.len() {
                    for done in (Group { members: &members, place }).messages(kind, 1 << 20, root) {
                        match done {
                            Operation::Send { to, .. } => *open.entry((place as u32, to)).or_default() += 1,
                            Operation::Receive { from, .. } => {
                                *open.entry((from, place as u32)).or_default() -= 1
                            }
                            other => panic!("{kind:?} has {other:?}"),
                        }
                    }
                }
                assert!(open.values().all(|it| *it == 0), "{kind:?} of {count}, root {root}: {open:?}");
            }
        }
    }

    #[test]
    fn a_gather_brings_the_bytes_of_all_others_to_the_root() {
        for count in 2..=17_u32 {
            let members: Vec<_> = (0..count).collect();
            let into_root: u64 = (0..members.len())
                .flat_map(|place| Group { members: &members, place }.messages(Collective::Gather, 8, 0))
                .filter_map(|it| match it {
                    Operation::Send { to: 0, bytes, .. } => Some(bytes),
                    _ => None,
                })
                .sum();
            assert_eq!(into_root, 8 * u64::from(count - 1));
        }
    }
}
