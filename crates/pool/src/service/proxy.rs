//! A proxy: sums what the clients push, in the pool.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;

use polder_kernels::{Op, divide, reduce};
use polder_mem::{Memory, Offset};

use super::place::{Places, Queue};
use super::{Agreement, Failure, NEVER, Parts, ServiceOptions};
use crate::collectives::{Scratch, fill, length, pieces};
use crate::deviation::Deviation;
use crate::group::{Interrupt, RankPlace};
use crate::{PoolError, wait};

/// A proxy's end of a service.
pub struct Proxy<M: Memory> {
    parts: Parts<M>,
    proxy: u16,
    /// One for each client.
    queues: Vec<Queue>,
    /// Which clients have pushed each shard in this step.
    pushed: Vec<Vec<bool>>,
    /// Shards that all clients have pushed, in the order in which the last did.
    ready: VecDeque<u32>,
    /// The shard that came first, for a proxy that stays at it.
    first: Option<u32>,
    /// How many shards of this step are summed.
    summed: usize,
    scratch: Scratch,
}

impl<M: Memory> Proxy<M> {
    /// The proxy of number `proxy` of a service over `members`: the parts of the `clients` clients, then those of the proxies. The first lines
    /// of all parts up to the buffers were zeroed before any process came here.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for parts that cannot be.
    pub fn over(
        memory: M,
        members: Vec<RankPlace>,
        clients: usize,
        proxy: u16,
        agreed: Arc<Agreement>,
        options: ServiceOptions,
    ) -> Result<Self, PoolError> {
        let parts = Parts::over(memory, members, clients, clients + usize::from(proxy), agreed, options)?;
        let entries = parts.exchange().of_proxy(proxy).len();
        let queue = |client: usize| {
            Queue::new(client, parts.places.queue_for(parts.members[client].at, proxy), entries)
        };
        let queues = (0..clients).map(queue).collect();
        let pushed = parts.exchange().shards().iter().map(|_| vec![false; clients]).collect();
        Ok(Self {
            proxy,
            queues,
            pushed,
            ready: VecDeque::new(),
            first: None,
            summed: 0,
            scratch: Scratch::default(),
            parts,
        })
    }

    /// Lets `asked` end waits, say when the process that started this one is gone.
    pub fn on_wait(&mut self, asked: Interrupt) {
        self.parts.interrupt = Some(asked);
    }

    /// Sums until all clients have left. It waits for pushes as long as all processes live: a client waits for sums no longer than
    /// its timeout, and says so when it gives up.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when a client or a proxy died, and what another gave up with; [`PoolError::Corrupt`],
    /// [`PoolError::Memory`], [`PoolError::Interrupted`].
    pub fn serve(&mut self) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        match self.sum_all() {
            Ok(()) => {
                self.parts.leave();
                Ok(())
            }
            Err(failure) => Err(self.parts.fail(failure)),
        }
    }

    fn sum_all(&mut self) -> Result<(), Failure> {
        while self.await_pushes()? {
            while let Some(shard) = self.ready.pop_front() {
                self.sum(shard)?;
            }
        }
        Ok(())
    }

    /// Waits for pushes; false once all clients have left.
    fn await_pushes(&mut self) -> Result<bool, Failure> {
        let (memory, bell) = (self.parts.memory.clone(), self.parts.bell());
        let ServiceOptions { patience, .. } = self.parts.options;
        let all_left = Cell::new(false);
        // The two closures of a wait take turns.
        let this = RefCell::new(self);
        let look = || {
            let came = this.borrow_mut().look()?;
            Ok((came || all_left.get()).then_some(came))
        };
        let peer = || {
            let this = this.borrow();
            all_left.set(this.have_all_left()?);
            if all_left.get() { Ok(()) } else { this.parts.still_there() }
        };
        let came = wait::until(&memory, bell, patience, NEVER, look, peer)?;
        Ok(came.unwrap_or(false))
    }

    fn have_all_left(&self) -> Result<bool, Failure> {
        for client in 0..self.parts.clients {
            if !self.parts.has_left(client)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes what has come from every client's queue.
    fn look(&mut self) -> Result<bool, Failure> {
        let Self { parts, proxy, queues, pushed, ready, first, .. } = self;
        let exchange = parts.exchange();
        parts.look(queues.iter_mut(), |client, shard| {
            let known = exchange.shards().get(shard as usize);
            let is_ours = known.is_some_and(|known| known.proxy == *proxy);
            if !is_ours || pushed[shard as usize][client] {
                return Err("push of a service's queue");
            }
            if Deviation::FirstComeFirstServed.is_on() && *first.get_or_insert(shard) != shard {
                return Ok(false);
            }
            let by = &mut pushed[shard as usize];
            by[client] = true;
            if by.iter().all(|pushed| *pushed) {
                ready.push_back(shard);
                *first = None;
            }
            Ok(true)
        })
    }

    /// Sums a shard that all clients have pushed, in the order of the clients, and says so.
    fn sum(&mut self, shard: u32) -> Result<(), Failure> {
        let Self { parts, proxy, scratch, .. } = self;
        let Agreement { exchange, dtype } = &*parts.agreed;
        let (place, bytes) = (exchange.place(shard), exchange.shards()[shard as usize].bytes);
        let from: Vec<(usize, Offset)> = (0..parts.clients)
            .map(|client| (client, parts.places.buffer_for(parts.members[client].at, *proxy) + place))
            .collect();
        let own = parts.members[parts.own].at;
        let into = parts.places.buffer_of(own, *proxy) + place;
        let streams = parts.streams(0..parts.clients);
        let clients = u32::try_from(parts.clients).ok().and_then(NonZeroU32::new).expect("there are clients");
        let far = from.iter().filter(|(client, _)| parts.is_far(*client));
        parts.refresh(far.map(|(_, at)| *at), bytes);
        for piece in pieces(bytes) {
            let (sum, part) = scratch.halves(length(&piece));
            parts.memory.copy_out(from[0].1 + piece.start, sum)?;
            for (_, at) in &from[1..] {
                parts.memory.copy_out(*at + piece.start, part)?;
                reduce(Op::Sum, *dtype, sum, part).expect("a checked reduction");
            }
            divide(*dtype, sum, clients).expect("a checked reduction");
            fill(&parts.memory, into + piece.start, sum, streams)?;
        }
        parts.publish(Places::queue_of(own).word(self.summed as u64), shard);
        let [_, shards, summed_bytes] = &mut parts.counters;
        (*shards, *summed_bytes) = (*shards + 1, *summed_bytes + bytes);
        self.summed += 1;
        if self.summed == parts.exchange().of_proxy(*proxy).len() {
            self.begin_step();
        }
        (0..self.parts.clients).for_each(|client| self.parts.wake(client));
        Ok(())
    }

    fn begin_step(&mut self) {
        self.summed = 0;
        self.pushed.iter_mut().for_each(|by| by.fill(false));
        self.queues.iter_mut().for_each(|queue| queue.taken = 0);
        self.parts.counters[0] += 1;
        self.parts.say(None);
        self.parts.step += 1;
    }
}
