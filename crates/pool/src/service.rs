//! A parameter service: clients push gradients, proxies sum them in the pool, and clients pull the sums (the COARSE paper,
//! sections III-D to III-F).
//!
//! Each client and each proxy owns one *part*: queues of words, and a buffer for shards. A client copies a shard of its gradients
//! into its own buffer and says so in its queue for the shard's proxy. The proxy sums the clients' copies, in the order of the
//! clients, into its own buffer, and says so in its queue. Three invariants carry everything:
//!
//! 1. **One writer.** A process writes its own part only, so every line has one writer for ever.
//! 2. **A shard once a step.** A client pushes each shard once in a step, in any order, and begins the next step when it has pulled
//!    all. So a queue has a word for each shard and never overflows. A client that has pushed a shard has pulled its sum of
//!    the step before. When all have pushed it, no client reads that sum any more, and the proxy may write the next there.
//! 3. **A window's bytes one after another.** Shards may have the same bytes of a window in a step, in an order that all know. A client
//!    pushes the next of them when it has pulled the sum of the one before. When all clients have pushed it, none reads the sum before
//!    it, so that proxies' windows follow the same rule. Where sums stay, because they are an optimizer's parameters, only the
//!    clients' buffers are windows, and it is enough that the sum before is there.
//! 4. **One queue a client.** A proxy takes what has come from every queue, and sums a shard when all clients have pushed it. A proxy
//!    that stays at the first entry of one queue until the others have the same waits for ever, once clients push in other
//!    orders (section III-F, Figure 10).
//!
//! A proxy may keep the parameters and an optimizer's state, in its part. Then client 0 says before its first push what the step does,
//! and clients pull parameters in place of means. A step may average alone, so that clients read the means and see by how much they
//! are clipped. The next one steps with them from where they stand.
//!
//! A shard's step is done whole or not at all, for those that come after a proxy that dies. Before it changes the moments it copies
//! them to its log, and says so; after it, it says that the shard is done. Until then the clients have the parameters that were pulled
//! in the step before, and in their windows the gradients. A client that recovers a shard looks at both words again behind its copy. So a
//! proxy that was taken for dead may go on meanwhile.
//!
//! After an error a part is broken for good: it says on its own line whom it gave up on, so that the others fail at once and name
//! the same process.

mod client;
#[cfg(feature = "hostile")]
pub mod hostile;
mod lanes;
mod order;
mod place;
mod proxy;
mod session;
mod stat;

use std::sync::Arc;
use std::time::Duration;

use polder_kernels::{Dtype, Op};
use polder_mem::{Bell, Fault, LINE, Memory, Nanos, Offset};
use polder_schedule::Exchange;

use crate::group::{Interrupt, Mark, Pulse, RankPlace};
use crate::line;
use crate::wait::Patience;
use crate::{Peer, PoolError};

pub use client::{Client, ClientReport};
pub use lanes::EmulatedLink;
pub use order::{FACTORS, MOMENTS, Optimizer, Order, Slot};
pub use proxy::Proxy;
pub use session::{ClientSession, ProxySession, ProxyStat};
pub use stat::{ServiceStat, SumStat, WorkerStat, services};

use self::place::{Places, Queue, state_line};

/// How the processes of a service wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceOptions {
    /// How long a client may wait for one sum.
    pub timeout: Duration,
    /// A process under another kernel whose heartbeat stands still for so long is dead.
    pub silence: Duration,
    /// How to wait.
    pub patience: Patience,
    /// The epoch of the view, for errors.
    pub epoch: u64,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            silence: Duration::from_secs(5),
            patience: Patience::SHARED,
            epoch: 0,
        }
    }
}

/// What clients and proxies agree on: the shards of a step, and what their elements are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The shards, their proxies and their order.
    pub exchange: Exchange,
    /// The type of each shard's elements. Sums are divided by the number of clients.
    pub dtypes: Vec<Dtype>,
    /// The emulated link of each proxy; none of them emulates one.
    pub links: Vec<EmulatedLink>,
    /// Where the proxies keep an optimizer's state: the group of settings of each shard, counted from 0. Else nothing.
    pub groups: Vec<u16>,
    /// How many moments of each parameter they keep.
    pub moments: u16,
}

impl Agreement {
    /// An exchange of elements of `dtype`, over the links that are there.
    #[must_use]
    pub fn new(exchange: Exchange, dtype: Dtype) -> Self {
        let dtypes = vec![dtype; exchange.shards().len()];
        Self { exchange, dtypes, links: vec![], groups: vec![], moments: 0 }
    }

    /// The type of a shard's elements.
    #[must_use]
    pub fn dtype(&self, shard: u32) -> Dtype {
        self.dtypes[shard as usize]
    }

    /// Whether proxies keep an optimizer's state, so that the sums of a step stay until the next.
    fn keeps_state(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Where the sum of a shard begins in its proxy's buffer.
    fn sum_place(&self, shard: u32) -> u64 {
        if self.keeps_state() { self.exchange.place(shard) } else { self.exchange.window(shard) }
    }

    /// Where all lies.
    fn places(&self) -> Places {
        Places::new(&self.exchange, self.settings(), self.moments)
    }

    /// Where a proxy, whose part is at `part`, says of its log and of its step with a shard.
    #[cfg(feature = "model")]
    pub(crate) fn step_words(&self, part: Offset, proxy: u16, shard: u32) -> [Offset; 2] {
        self.places().step_words(part, proxy, shard)
    }

    /// How many groups of settings there are.
    fn settings(&self) -> usize {
        self.groups.iter().max().map_or(0, |last| usize::from(*last) + 1)
    }
}

/// Why a step ended without its end.
#[derive(Debug)]
enum Failure {
    /// The process of this number is gone.
    Dead(usize),
    /// It lives, and has not done its part for so long.
    Late(usize, Duration),
    /// It gave up, and says why.
    Told(usize, Mark),
    /// It wrote what no correct process writes.
    Corrupt(Offset, &'static str),
    /// The caller does not want to wait any longer.
    Interrupted,
    /// The memory failed.
    Memory(Fault),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Memory(fault)
    }
}

/// All parts, as the process of one sees them: the clients' in their order, then the proxies'.
struct Parts<M: Memory> {
    memory: M,
    /// The number of this process among all.
    own: usize,
    clients: usize,
    members: Vec<RankPlace>,
    pulses: Vec<Pulse>,
    places: Places,
    agreed: Arc<Agreement>,
    options: ServiceOptions,
    interrupt: Option<Interrupt>,
    /// The current step, from 1.
    step: u32,
    /// What this process says besides.
    counters: [u64; 5],
    /// How it came to its end, once it has. It never takes that back.
    end: Option<Mark>,
    broken: Option<PoolError>,
}

impl<M: Memory> Parts<M> {
    /// # Errors
    /// [`PoolError::Argument`] for a part that does not lie in the memory, or does not fit what is agreed on.
    fn over(
        memory: M,
        members: Vec<RankPlace>,
        clients: usize,
        own: usize,
        agreed: Arc<Agreement>,
        options: ServiceOptions,
    ) -> Result<Self, PoolError> {
        let places = agreed.places();
        let bad = |what, value, expected| Err(PoolError::Argument { what, value, expected });
        if clients == 0
            || members.len() != clients + usize::from(agreed.exchange.proxies())
            || own >= members.len()
        {
            let value = format!("process {own} of {}, {clients} of them clients", members.len());
            return bad("the service", value, "at least one client, and as many proxies as are agreed on");
        }
        for (number, member) in members.iter().enumerate() {
            let bytes = places.bytes((number >= clients).then(|| (number - clients) as u16));
            let is_inside = member.at.0.checked_add(bytes).is_some_and(|end| end <= memory.bytes());
            if !is_inside || member.at.line() != member.at || member.bytes < bytes {
                let value = format!("[{}, +{})", member.at, member.bytes);
                return bad(
                    "part",
                    value,
                    "line-aligned, inside the region, and as large as its shards need",
                );
            }
        }
        let shards = agreed.exchange.shards();
        if agreed.dtypes.len() != shards.len() {
            let value = format!("{} types of {} shards", agreed.dtypes.len(), shards.len());
            return bad("types", value, "one of each shard");
        }
        for (shard, dtype) in shards.iter().zip(&agreed.dtypes) {
            if shard.bytes % dtype.bytes() as u64 != 0 {
                let value = format!("{} bytes of {dtype}", shard.bytes);
                return bad("shard", value, "a whole number of elements");
            }
            if Op::Average.check(*dtype).is_err() {
                return bad("type", dtype.to_string(), "floats, which have a mean");
            }
        }
        let proxies = usize::from(agreed.exchange.proxies());
        if !agreed.links.is_empty() && agreed.links.len() != proxies {
            let value = format!("{} for {proxies} proxies", agreed.links.len());
            return bad("emulated links", value, "none, or one for each proxy");
        }
        if usize::from(agreed.moments) > MOMENTS || agreed.moments > 0 && !agreed.keeps_state() {
            return bad("moments", agreed.moments.to_string(), "at most 2, of an optimizer's state");
        }
        if agreed.keeps_state() {
            let grain = (polder_kernels::PIECE * Dtype::F32.bytes()) as u64;
            let is_cut = shards.iter().all(|shard| shard.start.is_multiple_of(grain));
            let is_single = agreed.dtypes.iter().all(|dtype| *dtype == Dtype::F32);
            if agreed.groups.len() != shards.len() || !is_single || !is_cut {
                let value = format!(
                    "{} groups for {} shards of {:?}",
                    agreed.groups.len(),
                    shards.len(),
                    agreed.dtypes.iter().find(|dtype| **dtype != Dtype::F32)
                );
                return bad(
                    "an optimizer on the proxy",
                    value,
                    "a group for each shard, f32, and shards that begin at multiples of 256 bytes",
                );
            }
        }
        let pulses = members.iter().map(|_| Pulse::default()).collect();
        Ok(Self {
            memory,
            own,
            clients,
            members,
            pulses,
            places,
            agreed,
            options,
            interrupt: None,
            step: 1,
            counters: [0; 5],
            end: None,
            broken: None,
        })
    }

    fn exchange(&self) -> &Exchange {
        &self.agreed.exchange
    }

    /// The number of a proxy among all.
    fn number_of(&self, proxy: u16) -> usize {
        self.clients + usize::from(proxy)
    }

    fn bell(&self) -> Bell {
        self.members[self.own].bell.unwrap_or(Bell(0))
    }

    fn is_far(&self, number: usize) -> bool {
        self.members[number].host != self.members[self.own].host
    }

    /// Whether bytes for these readers have to go past the caches.
    fn streams(&self, mut readers: impl Iterator<Item = usize>) -> bool {
        self.memory.coherence().needs_write_back() && readers.any(|reader| self.is_far(reader))
    }

    fn wake(&self, number: usize) {
        if let Some(bell) = self.members[number].bell {
            self.memory.wake(bell);
        }
    }

    fn expect_whole(&self) -> Result<(), PoolError> {
        match &self.broken {
            Some(cause) => Err(PoolError::Broken { what: "service", cause: Box::new(cause.clone()) }),
            None => Ok(()),
        }
    }

    /// Looks afresh at queues of others, with one fence for all, and takes from each what has come: `take` gets the queue's
    /// index and a shard, and leaves it there by `false`. Returns whether anything had come.
    // SYNC: pairs with `publish`.
    fn look<'q>(
        &self,
        queues: impl Iterator<Item = &'q mut Queue>,
        mut take: impl FnMut(usize, u32) -> Result<bool, &'static str>,
    ) -> Result<bool, Failure> {
        let mut queues: Vec<_> = queues.enumerate().filter(|(_, queue)| queue.is_open()).collect();
        for (_, queue) in queues.iter().filter(|(_, queue)| self.is_far(queue.of)) {
            self.memory.invalidate(queue.next().line(), LINE);
        }
        // HARMLESS(fence_invalidations -> sfence -> drop), one look at the queues: an older word means another look.
        self.memory.fence_invalidations();
        let mut any = false;
        for (index, queue) in &mut queues {
            // What follows in the next line has not been invalidated.
            let line = queue.next().line();
            while queue.is_open() && queue.next().line() == line {
                let at = queue.next();
                let corrupt = |what| Failure::Corrupt(at, what);
                let word = self.memory.load(at)?;
                let Some(shard) = place::decode(word, self.step, self.memory.coherence()).map_err(corrupt)?
                else {
                    break;
                };
                if !take(*index, shard).map_err(corrupt)? {
                    break;
                }
                queue.taken += 1;
                any = true;
            }
        }
        Ok(any)
    }

    /// Publishes an entry of a queue of this process. What it stands for was stored before.
    // SYNC: pairs with `look`; what is published before it can be read once it is taken.
    fn publish(&self, at: Offset, shard: u32) {
        // The shard's bytes reach memory before the entry that says so.
        self.memory.sfence();
        self.memory.store(at, place::encode(self.step, shard));
        // Readers on other hosts look at memory.
        self.memory.write_back(at, 8);
    }

    /// Says in a word of a step that this shard is there: after all that this process has stored, and before all that it will.
    // SYNC: pairs with `says`, in `Client::recover`.
    fn say_in_order(&self, at: Offset, shard: u32) {
        // The log, or the moments and parameters, reach memory before the word that says so.
        self.memory.sfence();
        self.memory.store(at, place::encode(self.step, shard));
        self.memory.write_back(at, 8);
        // SYNC: pairs with `Client::recover`. Moments change once the word that names their log is in memory, and a log once its shard's
        // step word is.
        self.memory.sfence();
    }

    /// Whether a word of a step says that this shard is there in the current one.
    fn says(&self, number: usize, at: Offset, shard: u32) -> Result<bool, Failure> {
        self.refresh(self.is_far(number).then_some(at).into_iter(), 8);
        Ok(self.memory.load(at)? == place::encode(self.step, shard))
    }

    /// Copies bytes of another process's part.
    fn copy_out(&self, number: usize, at: Offset, into: &mut [u8]) -> Result<(), Failure> {
        self.refresh(self.is_far(number).then_some(at).into_iter(), into.len() as u64);
        Ok(self.memory.copy_out(at, into)?)
    }

    /// Drops bytes that others wrote from this host's caches, before they are read. What a process of this host has stored there
    /// reaches memory.
    fn refresh(&self, of: impl Iterator<Item = Offset>, bytes: u64) {
        for at in of {
            // What the last step left.
            self.memory.invalidate(at, bytes);
        }
        // Before the bytes are loaded.
        // SYNC: pairs with `publish`: the entry that stands for these bytes was taken before.
        self.memory.fence_invalidations();
    }

    /// Asked before each further sleep: are all clients still there? A proxy that died is the business of its shards alone: every
    /// client finds out by itself, because what that proxy published before counts.
    fn clients_are_there(&self) -> Result<(), Failure> {
        if self.interrupt.as_ref().is_some_and(|asked| asked()) {
            return Err(Failure::Interrupted);
        }
        for number in (0..self.clients).filter(|&number| number != self.own) {
            if let Some(mark) = self.gave_up(number)?.filter(|mark| !self.is_no_failure(*mark)) {
                return Err(Failure::Told(number, mark));
            }
        }
        self.dead_client()?.map_or(Ok(()), Err)
    }

    /// Whether a client that ended so leaves the service to the others: it expects nothing more, or lost a proxy.
    fn is_no_failure(&self, mark: Mark) -> bool {
        mark.is_left() || mark.is_dead() && mark.rank() >= self.clients
    }

    /// The first client that died; if it had given up before, what it gave up with.
    fn dead_client(&self) -> Result<Option<Failure>, Fault> {
        for number in (0..self.clients).filter(|&number| number != self.own) {
            if self.is_dead(number)? {
                // Looked at afresh: it may have said so just before its process ended.
                match self.gave_up(number)? {
                    None => return Ok(Some(Failure::Dead(number))),
                    Some(mark) if self.is_no_failure(mark) => {}
                    Some(mark) => return Ok(Some(Failure::Told(number, mark))),
                }
            }
        }
        Ok(None)
    }

    fn is_dead(&self, number: usize) -> Result<bool, Fault> {
        self.members[number].is_dead(&self.memory, &self.pulses[number], self.options.silence)
    }

    /// What `number` says of its end, if it has come to it.
    // SYNC: pairs with `say`.
    fn gave_up(&self, number: usize) -> Result<Option<Mark>, Fault> {
        let at = state_line(self.members[number].at);
        if self.is_far(number) {
            // What it said before.
            self.memory.invalidate(at, LINE);
            // A load before the fence would find the line as it was.
            self.memory.fence_invalidations();
        }
        Ok(line::load(&self.memory, at)?.and_then(|[mark, ..]| Mark::parse(mark)))
    }

    /// Says what this process has done, and how it has come to its end if it has.
    // SYNC: pairs with `gave_up`.
    fn say(&self) {
        let [steps, second, third, fourth, fifth] = self.counters;
        let words = [self.end.map_or(0, Mark::word), steps, second, third, fourth, fifth, 0];
        line::publish(&self.memory, state_line(self.members[self.own].at), &words);
    }

    /// Says that this process expects nothing more.
    fn leave(&mut self) {
        if self.broken.is_none() {
            self.end = Some(Mark::left(self.own));
            self.say();
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        (0..self.members.len()).filter(|&number| number != self.own).for_each(|number| self.wake(number));
    }

    /// Breaks the service and says so to the others.
    fn fail(&mut self, failure: Failure) -> PoolError {
        let mark = match failure {
            Failure::Dead(number) => Mark::dead(number),
            Failure::Late(number, _) => Mark::late(number),
            Failure::Told(_, mark) => mark,
            Failure::Corrupt(..) | Failure::Memory(_) | Failure::Interrupted => Mark::own(self.own),
        };
        let error = self.explain(failure);
        self.end = Some(mark);
        self.say();
        self.wake_all();
        self.broken = Some(error.clone());
        error
    }

    fn explain(&self, failure: Failure) -> PoolError {
        let (epoch, sequence) = (self.options.epoch, u64::from(self.step));
        let what =
            |number| if number < self.clients { "parameter step" } else { "the proxy in parameter step" };
        let dead =
            |number| PoolError::PeerDead { peer: self.peer(number), what: what(number), epoch, sequence };
        let late = |number, waited: Duration| {
            let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            PoolError::Timeout { peer: self.peer(number), what: what(number), epoch, sequence, waited_ms }
        };
        match failure {
            Failure::Dead(number) => dead(number),
            Failure::Late(number, waited) => late(number, waited),
            Failure::Corrupt(offset, what) => PoolError::Corrupt { offset, what },
            Failure::Memory(fault) => PoolError::Memory(fault),
            Failure::Interrupted => PoolError::Interrupted { what: "parameter step", sequence },
            Failure::Told(by, mark) => {
                let number = if mark.rank() < self.members.len() { mark.rank() } else { by };
                if mark.is_dead() && number != self.own {
                    dead(number)
                } else if mark.is_late() && number != self.own {
                    late(number, self.options.timeout)
                } else {
                    PoolError::GaveUp { peer: self.peer(by), what: what(by), epoch, sequence }
                }
            }
        }
    }

    fn peer(&self, number: usize) -> Peer {
        let RankPlace { host, pid, .. } = self.members[number];
        let peer = Peer::new(host, pid);
        if number < self.clients { peer.ranked(number) } else { peer }
    }
}

/// A moment that never comes.
const NEVER: Nanos = Nanos(u64::MAX);
