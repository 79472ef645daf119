//! One level: every rank reads from every other.

use crate::{Action, Collective, Schedule, Source};

/// The sources of a combination over `ranks` at `rank`: its own input, and the others' blocks, in the order of the ranks.
fn combined(ranks: usize, rank: usize, chunk: usize, block: usize) -> Vec<Source> {
    let source = |peer| if peer == rank { Source::Input(chunk) } else { Source::Block { rank: peer, block } };
    (0..ranks).map(source).collect()
}

fn others(ranks: usize, rank: usize) -> impl Iterator<Item = usize> {
    (0..ranks).filter(move |&peer| peer != rank)
}

impl Schedule {
    /// One exchange: every rank shows what its peers need, and takes what it needs. Each input is read by all who need
    /// it, so an all-reduce combines everything on every rank: for short messages.
    ///
    /// # Panics
    /// When there is no rank, or the root is none.
    #[must_use]
    pub fn direct(collective: Collective, ranks: usize, root: usize) -> Self {
        match collective {
            Collective::Barrier => Self::empty(collective, ranks, root, 0).phase(|_| Vec::new()),
            Collective::Broadcast => Self::broadcast(ranks, root),
            Collective::Reduce => Self::reduce(ranks, root),
            Collective::AllReduce => Self::all_reduce(ranks),
            Collective::ReduceScatter => Self::reduce_scatter(ranks),
            Collective::AllGather | Collective::Gather => Self::gather(collective, ranks, root),
            Collective::Scatter | Collective::AllToAll => Self::scatter(collective, ranks, root),
        }
    }

    fn broadcast(ranks: usize, root: usize) -> Self {
        let shown = |rank| {
            let show = Action { output: Some(0), ..Action::show(0, 0) };
            if rank == root { vec![show] } else { vec![] }
        };
        let taken = |rank| {
            let take = Action::take(Source::Block { rank: root, block: 0 }, 0);
            if rank == root { vec![] } else { vec![take] }
        };
        Self::empty(Collective::Broadcast, ranks, root, 1).phase(shown).phase(taken)
    }

    fn reduce(ranks: usize, root: usize) -> Self {
        let shown = |rank| if rank == root { vec![] } else { vec![Action::show(0, 0)] };
        let combine = |rank| {
            let action =
                Action { sources: combined(ranks, rank, 0, 0), output: Some(0), block: None, complete: true };
            if rank == root { vec![action] } else { vec![] }
        };
        Self::empty(Collective::Reduce, ranks, root, 1).phase(shown).phase(combine)
    }

    fn all_reduce(ranks: usize) -> Self {
        let combine = |rank| {
            vec![Action {
                sources: combined(ranks, rank, 0, 0),
                output: Some(0),
                block: None,
                complete: true,
            }]
        };
        Self::empty(Collective::AllReduce, ranks, 0, 1).phase(|_| vec![Action::show(0, 0)]).phase(combine)
    }

    fn reduce_scatter(ranks: usize) -> Self {
        let shown = |rank| others(ranks, rank).map(|peer| Action::show(peer, peer)).collect();
        let combine = |rank| {
            let sources = combined(ranks, rank, rank, rank);
            vec![Action { sources, output: Some(0), block: None, complete: true }]
        };
        Self::empty(Collective::ReduceScatter, ranks, 0, ranks).phase(shown).phase(combine)
    }

    fn gather(collective: Collective, ranks: usize, root: usize) -> Self {
        let takes = |rank| collective == Collective::AllGather || rank == root;
        let shown = |rank| {
            let output = takes(rank).then_some(rank);
            let is_read = collective == Collective::AllGather || rank != root;
            vec![Action { output, block: is_read.then_some(0), ..Action::show(0, 0) }]
        };
        let taken = |rank| {
            let take = |peer| Action::take(Source::Block { rank: peer, block: 0 }, peer);
            if takes(rank) { others(ranks, rank).map(take).collect() } else { vec![] }
        };
        Self::empty(collective, ranks, root, 1).phase(shown).phase(taken)
    }

    fn scatter(collective: Collective, ranks: usize, root: usize) -> Self {
        let every = collective == Collective::AllToAll;
        let kept = |rank| Action::take(Source::Input(rank), if every { rank } else { 0 });
        let shown = |rank| {
            let show = others(ranks, rank).map(|peer| Action::show(peer, peer));
            if every || rank == root { show.chain([kept(rank)]).collect() } else { vec![] }
        };
        let taken = |rank| {
            let take = |peer, output| Action::take(Source::Block { rank: peer, block: rank }, output);
            if every {
                others(ranks, rank).map(|peer| take(peer, peer)).collect()
            } else if rank == root {
                vec![]
            } else {
                vec![take(root, 0)]
            }
        };
        Self::empty(collective, ranks, root, ranks).phase(shown).phase(taken)
    }

    /// An all-reduce or reduce in which rank `r` combines chunk `r` and shows the outcome: every byte is combined once.
    /// For long messages.
    ///
    /// # Panics
    /// When there is no rank, the root is none, or the collective is another one.
    #[must_use]
    pub fn sharded(collective: Collective, ranks: usize, root: usize) -> Self {
        assert!(
            matches!(collective, Collective::AllReduce | Collective::Reduce),
            "{collective} is not combined in shards"
        );
        let every = collective == Collective::AllReduce;
        let shown = |rank| others(ranks, rank).map(|peer| Action::show(peer, peer)).collect();
        let combine = |rank| {
            let sources = combined(ranks, rank, rank, rank);
            let takes = every || rank == root;
            let is_read = every || rank != root;
            let (output, block) = (takes.then_some(rank), is_read.then_some(rank));
            vec![Action { sources, output, block, complete: true }]
        };
        let taken = |rank| {
            let take = |peer| Action::take(Source::Block { rank: peer, block: peer }, peer);
            if every || rank == root { others(ranks, rank).map(take).collect() } else { vec![] }
        };
        let schedule = Self::empty(collective, ranks, root, ranks).phase(shown).phase(combine).phase(taken);
        Self { input_chunks: ranks, output_chunks: ranks, ..schedule }
    }
}
