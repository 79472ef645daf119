//! What a schedule moves, counted in chunks.

use crate::{Schedule, Source};

/// What one rank reads and writes, in chunks of the schedule's length.
///
/// With `n` ranks on `h` hosts of `l` ranks each, and `B` the bytes of a vector, or of one rank's part where the collective
/// has parts, a rank reads from its peers at most:
///
/// | schedule | on its host | of other hosts |
/// |---|---|---|
/// | all-reduce, direct | `(l-1) B` | `(n-l) B` |
/// | all-reduce, sharded | `2 (l-1)/n B` | `2 (n-l)/n B` |
/// | all-reduce, two levels, `h = 2` | `2 (l-1)/l B` | `1/l B` |
/// | all-reduce, two levels, `h > 2` | `2 (l-1)/l B` | `2 (h-1)/(h l) B` |
/// | broadcast, direct; two levels | `B` | `B`; `1/l B` |
/// | reduce at the root, direct; two levels | `(l-1) B`; `(l-1)(1/l + 1/l) B` | `(n-l) B`; `(h-1) B` |
/// | reduce-scatter, direct; two levels | `(l-1) B`; `(l-1) h B` | `(n-l) B`; `(h-1) B` |
/// | all-gather, direct; two levels | `(l-1) B`; `(l-1) h B` | `(n-l) B`; `(h-1) B` |
/// | gather, scatter, all-to-all | `(l-1) B` | `(n-l) B` |
///
/// The sharded all-reduce reads `2 (n-1)/n B` in all, and its two-level form `2 (h-1)/h B` for each host: less is not
/// possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Chunks written into blocks of its own.
    pub shown: usize,
    /// Chunks read from blocks of ranks on its host.
    pub near: usize,
    /// Chunks read from blocks of ranks on other hosts.
    pub far: usize,
    /// Chunks read from its input or from blocks of its own.
    pub own: usize,
    /// Chunks combined with another.
    pub combined: usize,
    /// Chunks written to its output.
    pub output: usize,
}

impl Schedule {
    /// What `rank` moves when ranks live on `hosts`.
    ///
    /// # Panics
    /// When `hosts` does not name a host for each rank.
    #[must_use]
    pub fn traffic(&self, hosts: &[u16], rank: usize) -> Traffic {
        assert_eq!(hosts.len(), self.ranks, "a host for each rank");
        let mut traffic = Traffic::default();
        for action in self.phases.iter().flat_map(|phase| &phase.actions[rank]) {
            for source in &action.sources {
                *match *source {
                    Source::Block { rank: peer, .. } if hosts[peer] != hosts[rank] => &mut traffic.far,
                    Source::Block { rank: peer, .. } if peer != rank => &mut traffic.near,
                    _ => &mut traffic.own,
                } += 1;
            }
            traffic.combined += action.sources.len() - 1;
            traffic.shown += usize::from(action.block.is_some());
            traffic.output += usize::from(action.output.is_some());
        }
        traffic
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collective, DIRECT_BYTES, Variant};

    /// `hosts` hosts of `each` ranks, dealt out in turn.
    fn even(hosts: usize, each: usize) -> Vec<u16> {
        (0..hosts * each).map(|rank| (rank % hosts) as u16).collect()
    }

    /// What a rank reads near and far, in chunks.
    fn reads(schedule: &Schedule, hosts: &[u16], rank: usize) -> (usize, usize) {
        let traffic = schedule.traffic(hosts, rank);
        (traffic.near, traffic.far)
    }

    #[test]
    fn every_schedule_reads_what_its_formula_says() {
        for (h, l) in [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 4), (5, 3)] {
            let (n, hosts) = (h * l, even(h, l));
            let direct = |collective| Schedule::direct(collective, n, 0);
            for rank in 0..n {
                let of = |collective| reads(&direct(collective), &hosts, rank);
                let all = (l - 1, n - l);
                assert_eq!(of(Collective::AllReduce), all);
                assert_eq!(of(Collective::ReduceScatter), all);
                assert_eq!(of(Collective::AllGather), all);
                assert_eq!(of(Collective::AllToAll), all);
                let at_root = if rank == 0 { all } else { (0, 0) };
                assert_eq!(of(Collective::Reduce), at_root);
                assert_eq!(of(Collective::Gather), at_root);
                let is_near = hosts[rank] == hosts[0];
                let from_root = (usize::from(rank > 0 && is_near), usize::from(!is_near));
                assert_eq!(of(Collective::Broadcast), from_root);
                assert_eq!(of(Collective::Scatter), from_root);
                let sharded = Schedule::sharded(Collective::AllReduce, n, 0);
                assert_eq!(sharded.input_chunks, n);
                assert_eq!(reads(&sharded, &hosts, rank), (2 * (l - 1), 2 * (n - l)));
            }
        }
    }

    #[test]
    fn two_levels_cross_between_hosts_as_rarely_as_their_formula_says() {
        for (h, l) in [(2, 2), (2, 3), (3, 2), (4, 4), (5, 3)] {
            let (n, hosts) = (h * l, even(h, l));
            let two = |collective| Schedule::two_level(collective, &hosts, 0).unwrap();
            for rank in 0..n {
                let of = |collective| reads(&two(collective), &hosts, rank);
                let all_reduce = two(Collective::AllReduce);
                let expected = if h == 2 { (2 * (l - 1), h - 1) } else { (2 * (l - 1) * h, 2 * (h - 1)) };
                assert_eq!(all_reduce.input_chunks, if h == 2 { l } else { h * l });
                assert_eq!(of(Collective::AllReduce), expected);
                assert_eq!(of(Collective::ReduceScatter), ((l - 1) * h, h - 1));
                assert_eq!(of(Collective::AllGather), ((l - 1) * h, h - 1));
                let at_root = if rank == 0 { (2 * (l - 1), (h - 1) * l) } else { (l - 1, 0) };
                assert_eq!(of(Collective::Reduce), at_root);
                let from_root = match (rank, hosts[rank] == hosts[0]) {
                    (0, _) => (0, 0),
                    (_, true) => (l, 0),
                    (_, false) => (l - 1, 1),
                };
                assert_eq!(of(Collective::Broadcast), from_root);
            }
        }
    }

    /// Lines of 64 bytes that all ranks of host 0 read of other hosts, and that they write into blocks, for a message of so many bytes.
    fn lines_of_a_host(schedule: &Schedule, hosts: &[u16], bytes: u64) -> [u64; 2] {
        let cut = crate::Cut::new(&crate::Plan::new(schedule, hosts, 0), bytes, u64::MAX);
        let chunk = cut.chunk.div_ceil(64);
        let ranks = (0..hosts.len()).filter(|&rank| hosts[rank] == 0);
        let all: Vec<Traffic> = ranks.map(|rank| schedule.traffic(hosts, rank)).collect();
        [all.iter().map(|one| one.far).sum(), all.iter().map(|one| one.shown).sum()]
            .map(|chunks: usize| chunks as u64 * chunk)
    }

    /// The table of docs/architecture.md: 16 KiB, of a vector or of each rank's part, between hosts of so many ranks each.
    #[test]
    fn a_host_of_many_ranks_reads_once_what_others_have() {
        use Collective::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
        let bytes = 16 << 10;
        for (h, l, collective, direct, chosen) in [
            (2, 1, AllReduce, [256, 256], [256, 256]),
            (2, 4, AllReduce, [4096, 1024], [256, 1280]),
            (2, 4, ReduceScatter, [4096, 7168], [1024, 8192]),
            (2, 4, AllGather, [4096, 1024], [1024, 2048]),
            (4, 1, AllReduce, [768, 256], [768, 256]),
            (4, 4, AllReduce, [12288, 1024], [384, 1280]),
            (4, 4, AllGather, [12288, 1024], [3072, 4096]),
            (16, 1, AllReduce, [3840, 256], [480, 256]),
            (16, 1, AllGather, [3840, 256], [3840, 256]),
            (16, 4, AllReduce, [61440, 1024], [480, 1280]),
            (16, 4, ReduceScatter, [61440, 64512], [15360, 65536]),
            (16, 4, AllGather, [61440, 1024], [15360, 16384]),
            (16, 4, AllToAll, [61440, 64512], [61440, 64512]),
            (16, 4, Broadcast, [0, 256], [0, 256]),
        ] {
            let hosts = even(h, l);
            let variant = Variant::staged(collective, bytes, DIRECT_BYTES, h * l, || hosts.clone());
            let schedules = [Schedule::direct(collective, h * l, 0), variant.schedule(collective, &hosts, 0)];
            let lines = schedules.map(|schedule| lines_of_a_host(&schedule, &hosts, bytes));
            assert_eq!(lines, [direct, chosen], "{collective} of {h} hosts of {l} ranks");
        }
    }

    #[test]
    fn a_sharded_all_reduce_writes_as_much_as_it_has_and_combines_each_byte_once() {
        for n in 1..=9 {
            let traffic = Schedule::sharded(Collective::AllReduce, n, 0).traffic(&vec![0; n], n - 1);
            let shown = if n == 1 { 1 } else { n };
            assert_eq!((traffic.shown, traffic.combined, traffic.output), (shown, n - 1, n));
        }
    }
}
