//! Which schedule a collective takes, and how its message is cut.

use crate::{Collective, Schedule};

/// Staging of each rank in bytes, both halves together, unless a group says otherwise.
pub const STAGING_BYTES: u64 = 4 << 20;
/// Bytes of a chunk that one round of a long operation moves, unless a group says otherwise.
pub const SEGMENT_BYTES: u64 = 256 << 10;
/// Messages up to so many bytes go in one exchange, unless a group says otherwise.
pub const DIRECT_BYTES: u64 = 32 << 10;
/// The ranks of the largest group in which they do.
const DIRECT_RANKS: usize = 4;

/// How a collective is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// In one exchange.
    Direct,
    /// Every chunk is combined by one rank.
    Sharded,
    /// Inside hosts, then between them.
    TwoLevel,
}

impl Variant {
    /// What a message of `bytes` takes that is staged. Up to `direct` bytes go in one exchange, or fewer among many `ranks`. For
    /// longer ones it is asked on which hosts the ranks live.
    pub fn staged(
        collective: Collective,
        bytes: u64,
        direct: u64,
        ranks: usize,
        hosts: impl FnOnce() -> Vec<u16>,
    ) -> Self {
        match collective {
            _ if bytes <= longest_direct(collective, direct, ranks) => Self::Direct,
            collective if Schedule::has_two_levels(collective, &hosts()) => Self::TwoLevel,
            Collective::AllReduce | Collective::Reduce => Self::Sharded,
            _ => Self::Direct,
        }
    }

    /// What data takes that lies in the pool and is read there.
    #[must_use]
    pub const fn in_pool(collective: Collective) -> Self {
        match collective {
            Collective::AllReduce => Self::Sharded,
            _ => Self::Direct,
        }
    }

    /// The schedule.
    ///
    /// # Panics
    /// When it is to have two levels and [`Schedule::has_two_levels`] says no.
    #[must_use]
    pub fn schedule(self, collective: Collective, hosts: &[u16], root: usize) -> Schedule {
        match self {
            Self::Direct => Schedule::direct(collective, hosts.len(), root),
            Self::Sharded => Schedule::sharded(collective, hosts.len(), root),
            Self::TwoLevel => Schedule::two_level(collective, hosts, root).expect("two levels"),
        }
    }
}

/// The bytes of the longest message that goes in one exchange. Where a rank then reads what every other has, it reads in all no more
/// than one of a small group does.
const fn longest_direct(collective: Collective, direct: u64, ranks: usize) -> u64 {
    match collective {
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter | Collective::AllGather
            if ranks > DIRECT_RANKS =>
        {
            direct / (ranks as u64 - 1) * (DIRECT_RANKS as u64 - 1)
        }
        _ => direct,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn among_many_ranks_shorter_messages_cross_between_hosts_as_rarely_as_they_can() {
        let limit = |collective, ranks| longest_direct(collective, DIRECT_BYTES, ranks);
        for ranks in 1..=DIRECT_RANKS {
            assert_eq!(limit(Collective::AllGather, ranks), DIRECT_BYTES);
        }
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            let read = |ranks: usize| limit(collective, ranks) * (ranks as u64 - 1);
            assert!((5..=1024).all(|ranks| read(ranks) <= read(DIRECT_RANKS)));
            assert_eq!(limit(collective, 64), 1560);
        }
        // Nobody reads there what it does not need.
        for collective in [Collective::Broadcast, Collective::Scatter, Collective::AllToAll] {
            assert_eq!(limit(collective, 64), DIRECT_BYTES);
        }
    }

    #[test]
    fn short_messages_go_at_once_and_long_ones_cross_between_hosts_as_rarely_as_they_can() {
        let staged = |collective, hosts: &[u16], bytes| {
            Variant::staged(collective, bytes, DIRECT_BYTES, hosts.len(), || hosts.to_vec())
        };
        assert_eq!(staged(Collective::AllReduce, &[0, 1, 0], DIRECT_BYTES), Variant::Direct);
        assert_eq!(staged(Collective::AllReduce, &[0, 1, 0], DIRECT_BYTES + 1), Variant::TwoLevel);
        assert_eq!(staged(Collective::AllReduce, &[0, 1], DIRECT_BYTES + 1), Variant::Sharded);
        assert_eq!(staged(Collective::AllToAll, &[0, 1, 0], u64::MAX), Variant::Direct);
        assert_eq!(Variant::in_pool(Collective::AllReduce), Variant::Sharded);
        for variant in [Variant::Direct, Variant::Sharded, Variant::TwoLevel] {
            assert_eq!(variant.schedule(Collective::AllReduce, &[0, 1, 0], 0).check(), Ok(()));
        }
    }
}
