//! Two levels: inside a host over its coherent memory, between hosts through the pool, so that each byte crosses between
//! two hosts once.

use crate::{Action, Collective, Schedule, Source};

/// The ranks by host.
struct Places<'a> {
    hosts: &'a [u16],
    /// Each host once, in the order of its first rank.
    distinct: Vec<u16>,
    /// For each chunk, whose turn it is in every host; beyond the end, that of the same number.
    turns: Vec<usize>,
}

impl<'a> Places<'a> {
    fn new(hosts: &'a [u16]) -> Self {
        let mut distinct = Vec::new();
        for host in hosts {
            if !distinct.contains(host) {
                distinct.push(*host);
            }
        }
        Self { hosts, distinct, turns: Vec::new() }
    }

    /// Where chunk `q` belongs to rank `q`: its turn is the place of that rank on its host, so that each rank keeps its
    /// own chunk, and those of another host are dealt out evenly however the ranks are spread.
    fn by_rank(mut self) -> Self {
        let place =
            |(rank, host): (usize, &u16)| self.hosts[..rank].iter().filter(|&other| other == host).count();
        self.turns = self.hosts.iter().enumerate().map(place).collect();
        self
    }

    fn members(&self, host: u16) -> Vec<usize> {
        (0..self.hosts.len()).filter(|&rank| self.hosts[rank] == host).collect()
    }

    /// The rank of `host` that looks after `chunk`: chunks are dealt out in turn.
    fn keeper(&self, host: u16, chunk: usize) -> usize {
        let members = self.members(host);
        let turn = self.turns.get(chunk).copied().unwrap_or(chunk);
        members[turn % members.len()]
    }

    fn is_keeper(&self, rank: usize, chunk: usize) -> bool {
        self.keeper(self.hosts[rank], chunk) == rank
    }

    /// The chunks of `0..chunks` that `rank` looks after on its host.
    fn kept(&self, rank: usize, chunks: usize) -> impl Iterator<Item = usize> {
        (0..chunks).filter(move |&chunk| self.is_keeper(rank, chunk))
    }

    /// Whether another rank lives on the host of `rank`.
    fn has_peers(&self, rank: usize) -> bool {
        self.members(self.hosts[rank]).len() > 1
    }

    /// As many chunks as the largest host has ranks, so that each of them looks after one.
    fn chunks(&self) -> usize {
        self.distinct.iter().map(|&host| self.members(host).len()).max().unwrap_or(1)
    }
}

impl Schedule {
    /// Whether a second level saves anything: some ranks share a host and some do not, and the collective has bytes that
    /// several ranks of a host read, or can combine before they cross.
    #[must_use]
    pub fn has_two_levels(collective: Collective, hosts: &[u16]) -> bool {
        let saves = matches!(
            collective,
            Collective::AllReduce
                | Collective::Reduce
                | Collective::ReduceScatter
                | Collective::Broadcast
                | Collective::AllGather
        );
        let are_spread = hosts.iter().any(|&host| host != hosts[0]);
        let are_shared = || hosts.iter().enumerate().any(|(rank, host)| hosts[..rank].contains(host));
        saves && are_spread && are_shared()
    }

    /// A schedule over ranks that live on `hosts`, or `None` unless [`Schedule::has_two_levels`].
    ///
    /// # Panics
    /// When there is no rank, or the root is none.
    #[must_use]
    pub fn two_level(collective: Collective, hosts: &[u16], root: usize) -> Option<Self> {
        assert!(root < hosts.len(), "{collective} over {} ranks has no root {root}", hosts.len());
        if !Self::has_two_levels(collective, hosts) {
            return None;
        }
        let places = Places::new(hosts);
        match collective {
            Collective::AllReduce if places.distinct.len() == 2 => Some(all_reduce(&places)),
            Collective::AllReduce => Some(all_reduce_sharded(&places)),
            Collective::Reduce => Some(reduce(&places, root)),
            Collective::ReduceScatter => Some(reduce_scatter(&places.by_rank())),
            Collective::Broadcast => Some(broadcast(&places, root)),
            Collective::AllGather => Some(all_gather(&places.by_rank())),
            _ => None,
        }
    }
}

/// Every host combines its inputs, every keeper what the hosts have: one exchange between hosts, in which each host
/// reads all of every other, which for two hosts is the least.
///
/// Blocks `0..chunks` hold inputs for the peers of the host, then `chunks` for what the host has combined, then
/// `chunks` for what all have.
fn all_reduce(places: &Places) -> Schedule {
    let (ranks, chunks) = (places.hosts.len(), places.chunks());
    let of_all = |rank: usize| {
        let combine = |chunk| {
            let block = places.has_peers(rank).then_some(2 * chunks + chunk);
            combine_hosts(places, chunk, chunks + chunk, chunk, block)
        };
        places.kept(rank, chunks).map(combine).collect()
    };
    let schedule = Schedule::empty(Collective::AllReduce, ranks, 0, 3 * chunks)
        .phase(|rank| shown(places, rank, chunks))
        .phase(|rank| partials(places, rank, chunks))
        .phase(of_all)
        .phase(|rank| taken(places, rank, chunks));
    Schedule { input_chunks: chunks, output_chunks: chunks, ..schedule }
}

/// As [`all_reduce`], but each chunk is combined by one host, and fetched once by each other: with three hosts and more,
/// fewer bytes between them for one exchange more.
///
/// There are `share` chunks for each host to combine. Blocks are those of [`all_reduce`].
fn all_reduce_sharded(places: &Places) -> Schedule {
    let (ranks, share) = (places.hosts.len(), places.chunks());
    let chunks = share * places.distinct.len();
    let combiner = |chunk: usize| places.keeper(places.distinct[chunk / share], chunk);
    let of_all = |rank: usize| {
        let own = places.kept(rank, chunks).filter(|&chunk| combiner(chunk) == rank);
        own.map(|chunk| combine_hosts(places, chunk, chunks + chunk, chunk, Some(2 * chunks + chunk)))
            .collect()
    };
    let crossed = |rank: usize| {
        let others = places.kept(rank, chunks).filter(|&chunk| combiner(chunk) != rank);
        let cross = |chunk| {
            let source = Source::Block { rank: combiner(chunk), block: 2 * chunks + chunk };
            let block = places.has_peers(rank).then_some(2 * chunks + chunk);
            Action { block, ..Action::take(source, chunk) }
        };
        others.map(cross).collect()
    };
    let schedule = Schedule::empty(Collective::AllReduce, ranks, 0, 3 * chunks)
        .phase(|rank| shown(places, rank, chunks))
        .phase(|rank| partials(places, rank, chunks))
        .phase(of_all)
        .phase(crossed)
        .phase(|rank| taken(places, rank, chunks));
    Schedule { input_chunks: chunks, output_chunks: chunks, ..schedule }
}

/// Every host combines its inputs, the root what the hosts have.
///
/// Blocks `0..chunks` hold inputs for the peers of the host, then `chunks` for what the host has combined.
fn reduce(places: &Places, root: usize) -> Schedule {
    let (ranks, chunks) = (places.hosts.len(), places.chunks());
    let combine = |chunk| combine_hosts(places, chunk, chunks + chunk, chunk, None);
    let of_all = |rank| if rank == root { (0..chunks).map(combine).collect() } else { vec![] };
    let schedule = Schedule::empty(Collective::Reduce, ranks, root, 2 * chunks)
        .phase(|rank| shown(places, rank, chunks))
        .phase(|rank| partials(places, rank, chunks))
        .phase(of_all);
    Schedule { input_chunks: chunks, output_chunks: chunks, ..schedule }
}

/// The chunks of the input of `rank` that others of its host combine, in blocks of the same numbers.
fn shown(places: &Places, rank: usize, chunks: usize) -> Vec<Action> {
    (0..chunks).filter(|&chunk| !places.is_keeper(rank, chunk)).map(|c| Action::show(c, c)).collect()
}

/// What `rank` combines of its host's inputs, from blocks `chunk` into blocks `chunks + chunk`.
fn partials(places: &Places, rank: usize, chunks: usize) -> Vec<Action> {
    let combine = |chunk| {
        let source = |&peer: &usize| {
            if peer == rank { Source::Input(chunk) } else { Source::Block { rank: peer, block: chunk } }
        };
        let sources = places.members(places.hosts[rank]).iter().map(source).collect();
        Action { sources, output: None, block: Some(chunks + chunk), complete: false }
    };
    places.kept(rank, chunks).map(combine).collect()
}

/// Combines what the keepers of `chunk` have in their blocks `part`, in the order of the hosts.
fn combine_hosts(places: &Places, chunk: usize, part: usize, output: usize, block: Option<usize>) -> Action {
    let of = |&host: &u16| Source::Block { rank: places.keeper(host, chunk), block: part };
    let sources = places.distinct.iter().map(of).collect();
    Action { sources, output: Some(output), block, complete: true }
}

/// The chunks that others of the host of `rank` keep, from their blocks `2 * chunks + chunk`.
fn taken(places: &Places, rank: usize, chunks: usize) -> Vec<Action> {
    let take = |chunk| {
        let keeper = places.keeper(places.hosts[rank], chunk);
        Action::take(Source::Block { rank: keeper, block: 2 * chunks + chunk }, chunk)
    };
    (0..chunks).filter(|&chunk| !places.is_keeper(rank, chunk)).map(take).collect()
}

/// Blocks `0..ranks` hold inputs for the peers of the host, then `ranks` for what the host has combined.
fn reduce_scatter(places: &Places) -> Schedule {
    let ranks = places.hosts.len();
    Schedule::empty(Collective::ReduceScatter, ranks, 0, 2 * ranks)
        .phase(|rank| shown(places, rank, ranks))
        .phase(|rank| partials(places, rank, ranks))
        .phase(|rank| vec![combine_hosts(places, rank, ranks + rank, 0, None)])
}

/// The root's blocks are read by its own host, and each by one rank of each other host, whose block is read by its peers.
fn broadcast(places: &Places, root: usize) -> Schedule {
    let (ranks, chunks) = (places.hosts.len(), places.chunks());
    let home = places.hosts[root];
    let take = |from, chunk| Action::take(Source::Block { rank: from, block: chunk }, chunk);
    let shown = |rank| {
        let show = |chunk| Action { output: Some(chunk), ..Action::show(chunk, chunk) };
        if rank == root { (0..chunks).map(show).collect() } else { vec![] }
    };
    let from_root = |rank: usize| {
        let block = |chunk| (places.hosts[rank] != home && places.has_peers(rank)).then_some(chunk);
        let cross = |chunk| Action { block: block(chunk), ..take(root, chunk) };
        if places.hosts[rank] != home {
            places.kept(rank, chunks).map(cross).collect()
        } else if rank != root {
            (0..chunks).map(cross).collect()
        } else {
            vec![]
        }
    };
    let from_peers = |rank: usize| {
        let keeper = |chunk| places.keeper(places.hosts[rank], chunk);
        let missing = (0..chunks).filter(|&chunk| places.hosts[rank] != home && keeper(chunk) != rank);
        missing.map(|chunk| take(keeper(chunk), chunk)).collect()
    };
    let schedule = Schedule::empty(Collective::Broadcast, ranks, root, chunks)
        .phase(shown)
        .phase(from_root)
        .phase(from_peers);
    Schedule { input_chunks: chunks, output_chunks: chunks, ..schedule }
}

/// Block `q` holds the input of rank `q`: on `q` itself, and on the rank of each other host that fetches it.
fn all_gather(places: &Places) -> Schedule {
    let ranks = places.hosts.len();
    let remote = |rank: usize, peer: usize| places.hosts[rank] != places.hosts[peer];
    let fetches = |rank: usize, peer: usize| remote(rank, peer) && places.is_keeper(rank, peer);
    let take = |from: usize, chunk: usize| Action::take(Source::Block { rank: from, block: chunk }, chunk);
    let shown = |rank| vec![Action { output: Some(rank), ..Action::show(0, rank) }];
    let crossed = |rank: usize| {
        let block = |peer| places.has_peers(rank).then_some(peer);
        let cross = |peer| Action { block: block(peer), ..take(peer, peer) };
        (0..ranks).filter(|&peer| fetches(rank, peer)).map(cross).collect()
    };
    let taken = |rank: usize| {
        let source = |peer| if remote(rank, peer) { places.keeper(places.hosts[rank], peer) } else { peer };
        let missing = (0..ranks).filter(|&peer| peer != rank && !fetches(rank, peer));
        missing.map(|peer| take(source(peer), peer)).collect()
    };
    Schedule::empty(Collective::AllGather, ranks, 0, ranks).phase(shown).phase(crossed).phase(taken)
}
