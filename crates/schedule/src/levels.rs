//! Two levels: inside a host over its coherent memory, between hosts through the pool, so that each byte crosses between
//! two hosts once.

use crate::{Action, Collective, Schedule, Source};

/// The ranks by host.
struct Places<'a> {
    hosts: &'a [u16],
    /// Each host once, in the order of its first rank.
    distinct: Vec<u16>,
}

impl<'a> Places<'a> {
    fn new(hosts: &'a [u16]) -> Self {
        let mut distinct = Vec::new();
        for host in hosts {
            if !distinct.contains(host) {
                distinct.push(*host);
            }
        }
        Self { hosts, distinct }
    }

    fn members(&self, host: u16) -> Vec<usize> {
        (0..self.hosts.len()).filter(|&rank| self.hosts[rank] == host).collect()
    }

    /// The rank of `host` that looks after `chunk`: chunks are dealt out in turn.
    fn keeper(&self, host: u16, chunk: usize) -> usize {
        let members = self.members(host);
        members[chunk % members.len()]
    }

    fn is_keeper(&self, rank: usize, chunk: usize) -> bool {
        self.keeper(self.hosts[rank], chunk) == rank
    }

    fn peers(&self, rank: usize) -> Vec<usize> {
        self.members(self.hosts[rank]).into_iter().filter(|&peer| peer != rank).collect()
    }

    /// As many chunks as the largest host has ranks.
    fn chunks(&self) -> usize {
        self.distinct.iter().map(|&host| self.members(host).len()).max().unwrap_or(1)
    }
}

impl Schedule {
    /// A schedule over ranks that live on `hosts`, or `None` where a second level would not save anything: all ranks on
    /// one host, each on its own, or a collective whose every byte has one reader.
    ///
    /// # Panics
    /// When there is no rank, or the root is none.
    #[must_use]
    pub fn two_level(collective: Collective, hosts: &[u16], root: usize) -> Option<Self> {
        assert!(root < hosts.len(), "{collective} over {} ranks has no root {root}", hosts.len());
        let places = Places::new(hosts);
        if places.distinct.len() == 1 || places.distinct.len() == hosts.len() {
            return None;
        }
        match collective {
            Collective::AllReduce => Some(all_reduce(&places)),
            Collective::ReduceScatter => Some(reduce_scatter(&places)),
            Collective::Broadcast => Some(broadcast(&places, root)),
            Collective::AllGather => Some(all_gather(&places)),
            _ => None,
        }
    }
}

/// Blocks `0..chunks` hold inputs for the peers of the host, then `chunks` for what the host has combined, then
/// `chunks` for what all have.
fn all_reduce(places: &Places) -> Schedule {
    let (ranks, chunks) = (places.hosts.len(), places.chunks());
    let shown = |rank: usize| {
        (0..chunks).filter(|&chunk| !places.is_keeper(rank, chunk)).map(|c| Action::show(c, c)).collect()
    };
    let of_host = |rank: usize| partials(places, rank, chunks, chunks);
    let of_all = |rank: usize| {
        let combine = |chunk| {
            let part =
                |&host: &u16| Source::Block { rank: places.keeper(host, chunk), block: chunks + chunk };
            let sources = places.distinct.iter().map(part).collect();
            let is_read = !places.peers(rank).is_empty();
            let block = is_read.then_some(2 * chunks + chunk);
            Action { sources, output: Some(chunk), block, complete: true }
        };
        (0..chunks).filter(|&chunk| places.is_keeper(rank, chunk)).map(combine).collect()
    };
    let taken = |rank: usize| {
        let take = |chunk| {
            let keeper = places.keeper(places.hosts[rank], chunk);
            Action::take(Source::Block { rank: keeper, block: 2 * chunks + chunk }, chunk)
        };
        (0..chunks).filter(|&chunk| !places.is_keeper(rank, chunk)).map(take).collect()
    };
    let schedule = Schedule::empty(Collective::AllReduce, ranks, 0, 3 * chunks)
        .phase(shown)
        .phase(of_host)
        .phase(of_all)
        .phase(taken);
    Schedule { input_chunks: chunks, output_chunks: chunks, ..schedule }
}

/// What `rank` combines of its host's inputs, from blocks `chunk` into blocks `shift + chunk`.
fn partials(places: &Places, rank: usize, chunks: usize, shift: usize) -> Vec<Action> {
    let combine = |chunk| {
        let source = |&peer: &usize| {
            if peer == rank { Source::Input(chunk) } else { Source::Block { rank: peer, block: chunk } }
        };
        let sources = places.members(places.hosts[rank]).iter().map(source).collect();
        Action { sources, output: None, block: Some(shift + chunk), complete: false }
    };
    (0..chunks).filter(|&chunk| places.is_keeper(rank, chunk)).map(combine).collect()
}

/// Blocks `0..ranks` hold inputs for the peers of the host, then `ranks` for what the host has combined.
fn reduce_scatter(places: &Places) -> Schedule {
    let ranks = places.hosts.len();
    let shown = |rank: usize| {
        (0..ranks).filter(|&chunk| !places.is_keeper(rank, chunk)).map(|c| Action::show(c, c)).collect()
    };
    let of_host = |rank: usize| partials(places, rank, ranks, ranks);
    let of_all = |rank: usize| {
        let part = |&host: &u16| Source::Block { rank: places.keeper(host, rank), block: ranks + rank };
        let sources = places.distinct.iter().map(part).collect();
        vec![Action { sources, output: Some(0), block: None, complete: true }]
    };
    Schedule::empty(Collective::ReduceScatter, ranks, 0, 2 * ranks).phase(shown).phase(of_host).phase(of_all)
}

/// The root's block is read by one rank of each other host, whose block is read by its peers.
fn broadcast(places: &Places, root: usize) -> Schedule {
    let ranks = places.hosts.len();
    let home = places.hosts[root];
    let leads = |rank: usize| places.hosts[rank] != home && places.is_keeper(rank, 0);
    let from = |source| Action::take(Source::Block { rank: source, block: 0 }, 0);
    let shown = |rank| {
        let show = Action { output: Some(0), ..Action::show(0, 0) };
        if rank == root { vec![show] } else { vec![] }
    };
    let crossed = |rank: usize| {
        let is_read = !places.peers(rank).is_empty();
        let cross = Action { block: is_read.then_some(0), ..from(root) };
        if leads(rank) { vec![cross] } else { vec![] }
    };
    let taken = |rank: usize| {
        let leader = if places.hosts[rank] == home { root } else { places.keeper(places.hosts[rank], 0) };
        if rank == root || leads(rank) { vec![] } else { vec![from(leader)] }
    };
    Schedule::empty(Collective::Broadcast, ranks, root, 1).phase(shown).phase(crossed).phase(taken)
}

/// Block `q` holds the input of rank `q`: on `q` itself, and on the rank of each other host that fetches it.
fn all_gather(places: &Places) -> Schedule {
    let ranks = places.hosts.len();
    let remote = |rank: usize, peer: usize| places.hosts[rank] != places.hosts[peer];
    let fetches = |rank: usize, peer: usize| remote(rank, peer) && places.is_keeper(rank, peer);
    let take = |from: usize, chunk: usize| Action::take(Source::Block { rank: from, block: chunk }, chunk);
    let shown = |rank| vec![Action { output: Some(rank), ..Action::show(0, rank) }];
    let crossed = |rank: usize| {
        let is_read = !places.peers(rank).is_empty();
        let cross = |peer| Action { block: is_read.then_some(peer), ..take(peer, peer) };
        (0..ranks).filter(|&peer| fetches(rank, peer)).map(cross).collect()
    };
    let taken = |rank: usize| {
        let source = |peer| if remote(rank, peer) { places.keeper(places.hosts[rank], peer) } else { peer };
        let missing = (0..ranks).filter(|&peer| peer != rank && !fetches(rank, peer));
        missing.map(|peer| take(source(peer), peer)).collect()
    };
    Schedule::empty(Collective::AllGather, ranks, 0, ranks).phase(shown).phase(crossed).phase(taken)
}
