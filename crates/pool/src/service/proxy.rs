//! A proxy: sums what the clients push, in the pool.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use polder_kernels::{Block, BlockMean, MeanVisitor, Op, divide, reduce, with_mean};
use polder_mem::{Fault, Fold, LINE, Memory, Nanos, Offset};

use super::lanes::Lane;
use super::order::{Held, MOMENTS, Slot};
use super::place::{Places, Queue, order_lines};
use super::{Agreement, Failure, NEVER, Order, Parts, ServiceOptions};
use crate::PoolError;
use crate::collectives::{Scratch, fill, length, pieces};
use crate::deviation::Deviation;
use crate::group::{Interrupt, RankPlace};
use crate::wait::{self, Patience};

/// From this size on, sums go past the caches for readers of the same host too. A store into a cache reads the line from memory first;
/// of a sum that is larger than a second-level cache, little is left there for the client.
const STREAMED: u64 = 512 << 10;

/// A proxy's end of a service.
pub struct Proxy<M: Memory> {
    parts: Parts<M>,
    proxy: u16,
    /// One for each client.
    queues: Vec<Queue>,
    /// Which clients have pushed each shard in this step.
    pushed: Vec<Vec<bool>>,
    /// How many clients' pushes of each shard have come through.
    here: Vec<usize>,
    /// What clients have pushed, on its way: the client and the shard.
    inward: Lane<(usize, u32)>,
    /// Shards that all clients have pushed.
    ready: Lane<u32>,
    /// Sums on their way to the clients.
    outward: Lane<u32>,
    /// The shard that came first, for a proxy that stays at it.
    first: Option<u32>,
    /// How many shards of this step are published.
    published: usize,
    scratch: Scratch,
    /// A piece of each moment.
    moments: [Vec<u8>; MOMENTS],
    /// What the step does, once it is known.
    order: Option<Order>,
    /// The parameters of each shard that has any.
    held: BTreeMap<u32, Held>,
    /// Of each shard, whether its mean stands in the pool alone, for a step that takes it from there.
    has_mean: Vec<bool>,
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
        let link = parts.agreed.links.get(usize::from(proxy)).copied();
        Ok(Self {
            proxy,
            queues,
            here: vec![0; parts.exchange().shards().len()],
            has_mean: vec![false; parts.exchange().shards().len()],
            pushed,
            inward: Lane::new(link),
            ready: Lane::new(None),
            outward: Lane::new(link),
            first: None,
            published: 0,
            scratch: Scratch::default(),
            moments: Default::default(),
            order: None,
            held: BTreeMap::new(),
            parts,
        })
    }

    /// Lets `asked` end waits, say when the process that started this one is gone.
    pub fn on_wait(&mut self, asked: Interrupt) {
        self.parts.interrupt = Some(asked);
    }

    /// Sums until no client expects anything more. It waits for pushes as long as all clients live: a client waits for sums no longer
    /// than its timeout, and says so when it gives up. When another proxy has died, this one sums what is left of the step.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when a client died, or all have given up another proxy that did; what a client gave up with;
    /// [`PoolError::Corrupt`], [`PoolError::Memory`], [`PoolError::Interrupted`].
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
            while let Some(shard) = self.ready.next(Nanos(0)) {
                self.sum(shard)?;
            }
            self.publish();
        }
        Ok(())
    }

    /// The time, where a link is emulated.
    fn now(&self) -> Nanos {
        if self.inward.is_emulated() { self.parts.memory.now() } else { Nanos(0) }
    }

    /// Waits for pushes, or for what is on an emulated link; false once all clients have left.
    fn await_pushes(&mut self) -> Result<bool, Failure> {
        let (memory, bell) = (self.parts.memory.clone(), self.parts.bell());
        let ServiceOptions { mut patience, .. } = self.parts.options;
        if self.inward.is_emulated() {
            // A spinning proxy would take a core from the workers, which a device does not.
            patience = Patience { spins: patience.spins.min(2), yields: patience.yields.min(2), ..patience };
        }
        let due = [self.inward.due(), self.outward.due()].into_iter().flatten().min();
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
            if all_left.get() { Ok(()) } else { this.parts.clients_are_there() }
        };
        // What is due on a link is looked at by the next round.
        let came = wait::until(&memory, bell, patience, due.unwrap_or(NEVER), look, peer)?;
        Ok(came.unwrap_or(true))
    }

    /// Whether no client expects anything more. Where one lost a proxy, that is a failure of this one too.
    fn have_all_left(&self) -> Result<bool, Failure> {
        let mut lost = None;
        for client in 0..self.parts.clients {
            match self.parts.gave_up(client)? {
                Some(mark) if mark.is_left() => {}
                Some(mark) if self.parts.is_no_failure(mark) => lost = Some(Failure::Told(client, mark)),
                _ => return Ok(false),
            }
        }
        lost.map_or(Ok(true), Err)
    }

    /// Takes what has come from every client's queue, and what has come through the link.
    fn look(&mut self) -> Result<bool, Failure> {
        let now = self.now();
        let Self { parts, proxy, queues, pushed, inward, first, .. } = self;
        let exchange = parts.exchange();
        let mut any = parts.look(queues.iter_mut(), |client, shard| {
            let known = exchange.shards().get(shard as usize);
            let Some(known) = known.filter(|known| known.proxy == *proxy) else {
                return Err("push of a service's queue");
            };
            let by = &mut pushed[shard as usize];
            if by[client] {
                return Err("push of a service's queue");
            }
            if Deviation::FirstComeFirstServed.is_on() && *first.get_or_insert(shard) != shard {
                return Ok(false);
            }
            by[client] = true;
            if by.iter().all(|pushed| *pushed) {
                *first = None;
            }
            inward.put(exchange.rank(shard), (client, shard), known.bytes, now);
            Ok(true)
        })?;
        while let Some((_, shard)) = self.inward.next(now) {
            any = true;
            let here = &mut self.here[shard as usize];
            *here += 1;
            if *here == self.parts.clients {
                self.ready.put(self.parts.exchange().rank(shard), shard, 0, now);
            }
        }
        Ok(any)
    }

    /// Reads what client 0 says that this step does. It has pushed something.
    fn read_order(&mut self) -> Result<(), Failure> {
        let settings = self.parts.agreed.settings();
        if self.order.is_some() || settings == 0 {
            return Ok(());
        }
        let at = order_lines(self.parts.members[0].at);
        self.parts.refresh(self.parts.is_far(0).then_some(at).into_iter(), (1 + settings as u64) * LINE);
        let order = Order::load(&self.parts.memory, at, settings, self.parts.step)?;
        self.order = Some(order.ok_or(Failure::Corrupt(at, "order of a service"))?);
        Ok(())
    }

    /// Sums a shard that all clients have pushed, in the order of the clients, or does with it what the step does.
    fn sum(&mut self, shard: u32) -> Result<(), Failure> {
        self.read_order()?;
        let now = self.now();
        let bytes = self.parts.exchange().shards()[shard as usize].bytes;
        self.work_on(shard, bytes)?;
        self.has_summed(shard, bytes, now);
        Ok(())
    }

    fn work_on(&mut self, shard: u32, bytes: u64) -> Result<(), Failure> {
        let Self { parts, proxy, scratch, moments, order, held, has_mean, .. } = self;
        let Agreement { exchange, .. } = &*parts.agreed;
        let dtype = &parts.agreed.dtype(shard);
        let place = exchange.window(shard);
        let from: Vec<Offset> = (0..parts.clients)
            .map(|client| parts.places.buffer_for(parts.members[client].at, *proxy) + place)
            .collect();
        let own = parts.members[parts.own].at;
        let into = parts.places.buffer_of(own, *proxy) + parts.agreed.sum_place(shard);
        let streams = parts.streams(0..parts.clients);
        let clients = u32::try_from(parts.clients).ok().and_then(NonZeroU32::new).expect("there are clients");
        let far = (0..).zip(&from).filter(|(client, _)| parts.is_far(*client));
        parts.refresh(far.map(|(_, at)| *at), bytes);
        let streams = streams || bytes >= STREAMED;
        let elements = (bytes / 4) as usize;
        let had_mean = std::mem::replace(&mut has_mean[shard as usize], matches!(order, Some(Order::Mean)));
        if let Some((order, held)) = order.as_ref().zip(held.get_mut(&shard))
            && held.is_in_the_way(order)
        {
            held.hold(elements);
            held.is_out = false;
            for piece in pieces(bytes) {
                let (kept, _) = scratch.halves(length(&piece));
                // This process alone has written there.
                parts.memory.copy_out(into + piece.start, kept)?;
                held.load((piece.start / 4) as usize, kept);
            }
        }
        let Some(order) = order.as_ref().filter(|order| **order != Order::Mean) else {
            let of = Shards { memory: &parts.memory, from: &from, into, bytes, streams };
            return Ok(with_mean(*dtype, clients, of).expect("floats, which have a mean")?);
        };
        let held = held.entry(shard).or_default();
        let corrupt = |what| Failure::Corrupt(from[0], what);
        let mut update = None;
        match order {
            Order::Step { number, groups } | Order::StepWithMeans { number, groups, .. } => {
                let of = groups[usize::from(parts.agreed.groups[shard as usize])];
                if !held.has_parameters(elements) {
                    return Err(corrupt("step of an optimizer before its parameters"));
                }
                if of.moments() > parts.agreed.moments {
                    return Err(corrupt("step of an optimizer with more moments than are kept"));
                }
                update = Some((of.update(*number), usize::from(of.moments())));
            }
            // Those that stand in the pool stay there.
            Order::Save(Slot::Parameters) if held.is_out => {}
            Order::Load(slot) | Order::Save(slot) => match slot.moment() {
                None => held.hold(elements),
                Some(moment) if moment >= parts.agreed.moments.into() => {
                    return Err(corrupt("moment that is not kept"));
                }
                Some(_) => {}
            },
            Order::Mean => {}
        }
        if matches!(order, Order::StepWithMeans { .. }) && !had_mean {
            return Err(corrupt("step of an optimizer before its gradients"));
        }
        // Of each moment, where it stands, and where it is logged.
        let kept = [0, 1].map(|moment| {
            let at = parts.places.moment_of(own, *proxy, moment) + exchange.place(shard);
            (at, parts.places.log_of(own, *proxy, moment))
        });
        let words = parts.places.step_words(own, *proxy, shard);
        if let Some((_, count)) = update
            && !Deviation::StepsUnlogged.is_on()
        {
            for (at, log) in kept.iter().take(count) {
                for piece in pieces(bytes) {
                    let (old, _) = scratch.halves(length(&piece));
                    parts.memory.copy_out(*at + piece.start, old)?;
                    fill(&parts.memory, *log + piece.start, old, streams)?;
                }
            }
            parts.say_in_order(words[0], shard);
        }
        for piece in pieces(bytes) {
            let (sum, part) = scratch.halves(length(&piece));
            let first = (piece.start / 4) as usize;
            let mut factors: &[f32] = &[];
            match order {
                Order::Save(Slot::Parameters) if held.is_out => {
                    parts.memory.copy_out(into + piece.start, sum)?;
                }
                Order::Save(slot) => match slot.moment() {
                    None => held.save(first, sum),
                    Some(moment) => parts.memory.copy_out(kept[moment as usize].0 + piece.start, sum)?,
                },
                Order::Load(slot) => {
                    parts.memory.copy_out(from[0] + piece.start, sum)?;
                    match slot.moment() {
                        None => held.load(first, sum),
                        Some(moment) => {
                            fill(&parts.memory, kept[moment as usize].0 + piece.start, sum, streams)?;
                        }
                    }
                }
                Order::StepWithMeans { factors: by, .. } => {
                    // This process alone has written there.
                    parts.memory.copy_out(into + piece.start, sum)?;
                    factors = by;
                }
                Order::Step { .. } | Order::Mean => {
                    parts.memory.copy_out(from[0] + piece.start, sum)?;
                    for at in &from[1..] {
                        parts.memory.copy_out(*at + piece.start, part)?;
                        reduce(Op::Sum, *dtype, sum, part).expect("a checked reduction");
                    }
                    divide(*dtype, sum, clients).expect("a checked reduction");
                }
            }
            if let Some((update, count)) = update {
                let old = match held.is_out {
                    true => {
                        parts.memory.copy_out(into + piece.start, part)?;
                        Some(&*part)
                    }
                    false => None,
                };
                moments[count..].iter_mut().for_each(Vec::clear);
                for (bytes, (at, _)) in moments[..count].iter_mut().zip(kept) {
                    bytes.resize(length(&piece), 0);
                    parts.memory.copy_out(at + piece.start, bytes)?;
                }
                let [mean, square] = moments;
                held.step(update, factors, first, old, [&mut *mean, &mut *square], sum)
                    .expect("arrays of one length");
                for (bytes, (at, _)) in moments[..count].iter().zip(kept) {
                    fill(&parts.memory, at + piece.start, bytes, streams)?;
                }
            }
            fill(&parts.memory, into + piece.start, sum, streams)?;
        }
        if update.is_some() {
            parts.say_in_order(words[1], shard);
        }
        if update.is_some() || matches!(order, Order::Load(Slot::Parameters) | Order::Save(Slot::Parameters))
        {
            held.put_out();
        }
        Ok(())
    }

    /// A sum stands in the pool: it goes to the clients.
    fn has_summed(&mut self, shard: u32, bytes: u64, now: Nanos) {
        let [_, shards, summed_bytes, ..] = &mut self.parts.counters;
        (*shards, *summed_bytes) = (*shards + 1, *summed_bytes + bytes);
        let rank = self.parts.exchange().rank(shard);
        self.outward.put(rank, shard, bytes * self.parts.clients as u64, now);
        self.publish();
    }

    /// Says of each sum that has come through the link that it is there; before that, what this proxy has done.
    fn publish(&mut self) {
        let (now, mut any) = (self.now(), false);
        while let Some(shard) = self.outward.next(now) {
            let entry = Places::queue_of(self.parts.members[self.parts.own].at).word(self.published as u64);
            self.published += 1;
            let is_last = self.published == self.parts.exchange().of_proxy(self.proxy).len();
            self.parts.counters[0] += u64::from(is_last);
            self.parts.say();
            self.parts.publish(entry, shard);
            if is_last {
                self.begin_step();
            }
            any = true;
        }
        if any {
            (0..self.parts.clients).for_each(|client| self.parts.wake(client));
        }
    }

    fn begin_step(&mut self) {
        self.published = 0;
        self.order = None;
        self.here.fill(0);
        self.pushed.iter_mut().for_each(|by| by.fill(false));
        self.queues.iter_mut().for_each(|queue| queue.taken = 0);
        self.parts.step += 1;
    }
}

/// The shards of all clients, and where their mean goes.
struct Shards<'a, M> {
    memory: &'a M,
    from: &'a [Offset],
    into: Offset,
    bytes: u64,
    streams: bool,
}

impl<M: Memory> MeanVisitor for Shards<'_, M> {
    type Output = Result<(), Fault>;

    fn visit(self, mean: impl BlockMean) -> Self::Output {
        self.memory.fold(self.into, self.from, self.bytes, self.streams, Mean(mean))
    }
}

#[derive(Clone, Copy)]
struct Mean<B>(B);

impl<B: BlockMean> Fold for Mean<B> {
    #[inline(always)]
    fn combine(self, so_far: Block, block: Block) -> Block {
        self.0.sum(so_far, block)
    }

    #[inline(always)]
    fn finish(self, combined: Block) -> Block {
        self.0.finish(combined)
    }
}

#[cfg(test)]
mod tests {
    use polder_kernels::Dtype;
    use polder_mem::testing::Scratch as Folder;
    use polder_mem::{Cpu, Mapped, Region};

    use super::*;

    const BYTES: u64 = 64 << 10;

    /// Bytes of which many are infinities, NaNs, zeros and denormals of every type.
    fn gradients(seed: u64) -> Vec<u8> {
        let words = [0x7fc1_ffc1, 0x7f80_ff80, 0x7c01_fc00, 0x8000_0001, 0x7f7f_7bff, 0x0000_8000_u32];
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as u32
        };
        let mut word = || [draw(), words[draw() as usize % words.len()]][draw() as usize % 2];
        (0..BYTES / 16).flat_map(|_| word().to_le_bytes()).collect()
    }

    fn sums_of_any_place_and_length_have_the_bits_of_the_kernels(memory: &Mapped) {
        let arrays = [3, 5, 7].map(gradients);
        let starts = [16 << 10, (32 << 10) + 2, (48 << 10) - 6].map(Offset);
        for (at, array) in starts.into_iter().zip(&arrays) {
            memory.copy_in(at, &array[..10_000]).unwrap();
        }
        for dtype in [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::F16] {
            for (elements, clients) in
                [(0, 2), (1, 2), (7, 3), (8, 1), (33, 2), (100, 3), (511, 2), (1100, 3)]
            {
                let bytes = elements * dtype.bytes();
                let mut expected = arrays[0][..bytes].to_vec();
                for other in &arrays[1..clients] {
                    reduce(Op::Sum, dtype, &mut expected, &other[..bytes]).unwrap();
                }
                let by = NonZeroU32::new(clients as u32).unwrap();
                divide(dtype, &mut expected, by).unwrap();
                for (into, streams) in [(64, false), (64, true), (72, false), (72, true)] {
                    let (into, from) = (Offset(into), &starts[..clients]);
                    let of = Shards { memory, from, into, bytes: bytes as u64, streams };
                    with_mean(dtype, by, of).expect("floats").unwrap();
                    memory.mfence();
                    let mut found = vec![0; bytes];
                    memory.copy_out(into, &mut found).unwrap();
                    assert_eq!(found, expected, "{elements} of {dtype} by {clients} at {into}, {streams}");
                }
            }
        }
    }

    #[test]
    fn a_sum_in_the_pool_has_the_bits_of_the_kernels() {
        let folder = Folder::new();
        let region = |name| Region::create(folder.path().join(name), BYTES).unwrap();
        sums_of_any_place_and_length_have_the_bits_of_the_kernels(&Mapped::coherent(region("coherent")));
        let software = Mapped::new(region("software"));
        sums_of_any_place_and_length_have_the_bits_of_the_kernels(&software);
        sums_of_any_place_and_length_have_the_bits_of_the_kernels(&software.using(Cpu::baseline()));
    }
}
