//! A client: pushes its gradients, and pulls their sums.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use polder_mem::Memory;

use super::order::FACTORS;
use super::place::{self, Places, Queue, order_lines, state_line};
use super::{Agreement, Failure, Order, Parts, ServiceOptions};
use crate::collectives::fill;
use crate::deviation::Deviation;
use crate::group::{Interrupt, RankPlace};
use crate::{PoolError, line, wait};

/// Looks at a shard while its proxy logs and steps: before, between and after.
const LOOKS: usize = 3;

/// A worker's end of a service.
pub struct Client<M: Memory> {
    parts: Parts<M>,
    /// How many entries of this step stand in each of its queues.
    queued: Vec<usize>,
    /// The queues of the proxies.
    sums: Vec<Queue>,
    /// What has become of each shard in this step.
    states: Vec<State>,
    /// Shards whose sums have come, and that were not handed out.
    come: VecDeque<u32>,
    pulled: usize,
}

/// What a client says of itself, for those that look from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientReport {
    /// Steps that it has done.
    pub steps: u64,
    /// Nanoseconds that its training thread waited in the last step.
    pub blocked_ns: u64,
    /// Bytes a step that the proxies sum: the paper's m.
    pub proxied_bytes: u64,
    /// Bytes of all gradients in a step.
    pub total_bytes: u64,
    /// The size from which shards go to the proxies of higher latency and bandwidth.
    pub threshold_bytes: u64,
}

/// What has become of a shard in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Idle,
    Pushed,
    Summed,
    Pulled,
}

impl<M: Memory> Client<M> {
    /// The client of number `own` of a service over `members`: the parts of the `clients` clients, then those of the proxies.
    /// The first lines of all parts up to the buffers were zeroed before any process came here.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for parts that cannot be.
    pub fn over(
        memory: M,
        members: Vec<RankPlace>,
        clients: usize,
        own: usize,
        agreed: Arc<Agreement>,
        options: ServiceOptions,
    ) -> Result<Self, PoolError> {
        let parts = Parts::over(memory, members, clients, own, agreed, options)?;
        if own >= clients {
            let value = format!("{own} of {clients} clients");
            return Err(PoolError::Argument { what: "the client", value, expected: "clients count from 0" });
        }
        let proxies = 0..parts.exchange().proxies();
        let queue = |proxy| {
            let number = parts.number_of(proxy);
            Queue::new(
                number,
                Places::queue_of(parts.members[number].at),
                parts.exchange().of_proxy(proxy).len(),
            )
        };
        let sums = proxies.clone().map(queue).collect();
        let states = vec![State::Idle; parts.exchange().shards().len()];
        Ok(Self { queued: vec![0; proxies.len()], sums, states, come: VecDeque::new(), pulled: 0, parts })
    }

    /// Lets `asked` end waits, say when the user presses Ctrl-C.
    pub fn on_wait(&mut self, asked: Interrupt) {
        self.parts.interrupt = Some(asked);
    }

    /// What all agreed on.
    #[must_use]
    pub fn agreed(&self) -> &Agreement {
        &self.parts.agreed
    }

    /// Its number among the clients.
    #[must_use]
    pub fn number(&self) -> usize {
        self.parts.own
    }

    /// The current step, from 1. It ends when the sums of all shards have been pulled.
    #[must_use]
    pub fn step(&self) -> u32 {
        self.parts.step
    }

    /// Says what the proxies do in this step, before anything is pushed. That of client 0 counts. It is for a service whose proxies keep an
    /// optimizer's state, in each of its steps.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the proxies keep no state, something was pushed, there are other groups or more moments than were agreed on, or more
    /// than [`FACTORS`] factors; [`PoolError::Broken`] after an error.
    // SYNC: the proxy reads it after it has seen a push; pairs with `Order::load`.
    pub fn order(&mut self, order: &Order) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        let settings = self.parts.agreed.settings();
        let given = match order {
            Order::Step { groups, .. } | Order::StepWithMeans { groups, .. } => groups.len(),
            Order::Load(_) | Order::Save(_) | Order::Mean => settings,
        };
        if let Order::StepWithMeans { factors, .. } = order
            && factors.len() > FACTORS
        {
            let value = format!("{} factors of gradients", factors.len());
            return Err(PoolError::Argument { what: "the order", value, expected: "at most 3" });
        }
        let needed = match order {
            Order::Step { groups, .. } | Order::StepWithMeans { groups, .. } => {
                groups.iter().map(|of| u64::from(of.moments())).max().unwrap_or(0)
            }
            Order::Load(slot) | Order::Save(slot) => slot.moment().map_or(0, |moment| moment + 1),
            Order::Mean => 0,
        };
        let has_pushed = self.states.iter().any(|state| *state != State::Idle);
        if settings == 0 || given != settings || has_pushed {
            let value = format!("{given} groups of settings");
            let expected = "as many as were agreed on, before the first push of a step";
            return Err(PoolError::Argument { what: "the order", value, expected });
        }
        if needed > self.parts.agreed.moments.into() {
            let value = format!("{needed} moments of each parameter");
            return Err(PoolError::Argument {
                what: "the order",
                value,
                expected: "as many as were agreed on",
            });
        }
        let at = order_lines(self.parts.members[self.parts.own].at);
        for (index, words) in (0..).zip(order.lines(self.parts.step)) {
            // The push that follows fences it.
            line::publish_unfenced(&self.parts.memory, at.lines(index), &words);
        }
        Ok(())
    }

    /// Whether a shard's bytes of its window are free in this step: the sums of those that had them before were pulled, or are there
    /// if they stay with their proxy.
    #[must_use]
    pub fn may_push(&self, shard: u32) -> bool {
        let least = if self.parts.agreed.keeps_state() { State::Summed } else { State::Pulled };
        let has_ended = |before: &u32| self.states[*before as usize] >= least;
        self.parts.exchange().before(shard).iter().all(has_ended) || Deviation::WindowIsTaken.is_on()
    }

    /// Pushes the gradients of a shard, once a step. They may change when this returns. It never waits.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when the shard was pushed in this step, may not be pushed yet, or has another size; [`PoolError::Memory`];
    /// [`PoolError::Broken`] after an error.
    pub fn push(&mut self, shard: u32, gradients: &[u8]) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        let known = self.parts.exchange().shards().get(shard as usize).copied();
        let bad = |value, expected| Err(PoolError::Argument { what: "the shard", value, expected });
        let Some(known) = known.filter(|known| known.bytes == gradients.len() as u64) else {
            return bad(
                format!("{shard} of {} bytes", gradients.len()),
                "one of the exchange, and its bytes",
            );
        };
        if self.states[shard as usize] != State::Idle {
            return bad(format!("{shard}, pushed in this step before"), "push each shard once a step");
        }
        if !self.may_push(shard) {
            return bad(
                format!("{shard}, whose window is taken"),
                "pull the sums of this step that come first",
            );
        }
        let (own, proxy) = (self.parts.members[self.parts.own].at, known.proxy);
        let at = self.parts.places.buffer_for(own, proxy) + self.parts.exchange().window(shard);
        let streams = self.parts.streams(std::iter::once(self.parts.number_of(proxy)));
        if let Err(fault) = fill(&self.parts.memory, at, gradients, streams) {
            return Err(self.parts.fail(fault.into()));
        }
        self.queue(shard, proxy);
        Ok(())
    }

    /// As [`Client::push`], in a step in which what this client pushes counts for nothing: no byte moves, and no window is taken.
    ///
    /// # Errors
    /// Those of [`Client::push`].
    pub fn push_nothing(&mut self, shard: u32) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        let proxy = self.parts.exchange().shards().get(shard as usize).map(|known| known.proxy);
        let is_idle = self.states.get(shard as usize) == Some(&State::Idle);
        let Some(proxy) = proxy.filter(|_| is_idle) else {
            let (value, expected) =
                (shard.to_string(), "one of the exchange that was not pushed in this step");
            return Err(PoolError::Argument { what: "the shard", value, expected });
        };
        self.queue(shard, proxy);
        Ok(())
    }

    /// Says to a proxy that a shard was pushed.
    fn queue(&mut self, shard: u32, proxy: u16) {
        let (own, number) = (self.parts.members[self.parts.own].at, self.parts.number_of(proxy));
        let queued = &mut self.queued[usize::from(proxy)];
        let entry = self.parts.places.queue_for(own, proxy).word(*queued as u64);
        *queued += 1;
        self.states[shard as usize] = State::Pushed;
        self.parts.publish(entry, shard);
        self.parts.wake(number);
    }

    /// A shard whose sum has come and was not handed out in this step; nothing when none has. It never waits.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`], [`PoolError::Memory`]; [`PoolError::Broken`] after an error.
    pub fn ready(&mut self) -> Result<Option<u32>, PoolError> {
        self.parts.expect_whole()?;
        if self.come.is_empty()
            && let Err(failure) = self.look()
        {
            return Err(self.parts.fail(failure));
        }
        Ok(self.come.pop_front())
    }

    /// Notes which sums have come, for [`Client::may_push`], and hands none out. It never waits.
    ///
    /// # Errors
    /// Those of [`Client::ready`].
    pub fn note(&mut self) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        self.look().map(drop).map_err(|failure| self.parts.fail(failure))
    }

    /// As [`Client::ready`], and waits for one; nothing once all shards that were pushed in this step have been handed out.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when a client or a proxy died, [`PoolError::Timeout`] when one does not do its part,
    /// [`PoolError::GaveUp`] when one left; those of [`Client::ready`].
    pub fn wait(&mut self) -> Result<Option<u32>, PoolError> {
        self.parts.expect_whole()?;
        if self.come.is_empty() && self.states.contains(&State::Pushed) {
            self.await_sum().map_err(|failure| self.parts.fail(failure))?;
        }
        Ok(self.come.pop_front())
    }

    /// Copies the sum of a shard that was handed out to `into`: the mean of what the clients pushed. With the last shard of the step
    /// the next step begins.
    ///
    /// # Errors
    /// [`PoolError::Argument`] when its sum has not come, was pulled in this step, or has another size; [`PoolError::Memory`];
    /// [`PoolError::Broken`] after an error.
    pub fn pull(&mut self, shard: u32, into: &mut [u8]) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        let known = self.parts.exchange().shards().get(shard as usize).copied();
        let known = known
            .filter(|known| known.bytes == into.len() as u64 && self.states[shard as usize] == State::Summed);
        let Some(known) = known else {
            let value = format!("{shard} into {} bytes", into.len());
            let expected = "one whose sum has come and was not pulled in this step, and its bytes";
            return Err(PoolError::Argument { what: "the shard", value, expected });
        };
        self.copy_out(shard, known.proxy, into)?;
        self.has_pulled(shard);
        Ok(())
    }

    /// As [`Client::pull`], of a sum that stays where it is. Where proxies keep an optimizer's state, [`Client::read`] copies it in the
    /// next step, before the shard is pushed there.
    ///
    /// # Errors
    /// Those of [`Client::pull`].
    pub fn leave_sum(&mut self, shard: u32) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        if self.states.get(shard as usize) != Some(&State::Summed) {
            let (value, expected) =
                (shard.to_string(), "one whose sum has come and was not pulled in this step");
            return Err(PoolError::Argument { what: "the shard", value, expected });
        }
        self.has_pulled(shard);
        Ok(())
    }

    /// Copies the sum of a shard of the step before to `into`, as long as the shard was not pushed in this one: till then no proxy
    /// writes there.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for a shard that was pushed, whose sum does not stay, in the first step, or of another size;
    /// [`PoolError::Memory`]; [`PoolError::Broken`] after an error.
    pub fn read(&mut self, shard: u32, into: &mut [u8]) -> Result<(), PoolError> {
        self.parts.expect_whole()?;
        let known = self.parts.exchange().shards().get(shard as usize).copied();
        let stays = self.parts.agreed.keeps_state() || self.parts.exchange().asked_window_bytes() == 0;
        let is_idle = stays && self.parts.step > 1 && self.states.get(shard as usize) == Some(&State::Idle);
        let Some(known) = known.filter(|known| is_idle && known.bytes == into.len() as u64) else {
            let value = format!("{shard} into {} bytes", into.len());
            let expected = "one of the step before that was not pushed since, and its bytes";
            return Err(PoolError::Argument { what: "the shard", value, expected });
        };
        self.copy_out(shard, known.proxy, into)
    }

    /// Copies what a shard's proxy keeps of it, also when that has died in this step: its moments, and its parameters if the proxy has done
    /// the optimizer's step of the current step with it. Returns whether it has; if not, the moments are those before that step. A proxy that
    /// was taken for dead may go on meanwhile.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for a shard that is none, other sizes, or another number of moments; [`PoolError::Corrupt`],
    /// [`PoolError::Memory`].
    // SYNC: pairs with `Parts::say_in_order`: what the proxy wrote before a word can be read, and nothing that it wrote after the next one.
    pub fn recover(
        &mut self,
        shard: u32,
        parameters: &mut [u8],
        moments: &mut [&mut [u8]],
    ) -> Result<bool, PoolError> {
        let kept = usize::from(self.parts.agreed.moments);
        let known =
            self.parts.exchange().shards().get(shard as usize).filter(|_| kept > 0 && moments.len() == kept);
        let mut bytes = moments.iter().map(|of| of.len()).chain([parameters.len()]);
        let Some(proxy) = known.filter(|of| bytes.all(|it| it as u64 == of.bytes)).map(|of| of.proxy) else {
            let value = format!("{} moments of {shard} in {} bytes", moments.len(), parameters.len());
            return Err(PoolError::Argument {
                what: "the shard",
                value,
                expected: "what its proxy keeps of it",
            });
        };
        self.copy_kept(shard, proxy, parameters, moments).map_err(|failure| self.parts.fail(failure))
    }

    fn copy_kept(
        &self,
        shard: u32,
        proxy: u16,
        parameters: &mut [u8],
        moments: &mut [&mut [u8]],
    ) -> Result<bool, Failure> {
        let (number, Parts { places, members, .. }) = (self.parts.number_of(proxy), &self.parts);
        let (part, place) = (members[number].at, self.parts.exchange().place(shard));
        let words = places.step_words(part, proxy, shard);
        // The proxy logs, then steps: what it does meanwhile, it does once.
        for _ in 0..LOOKS {
            let has_stepped = self.parts.says(number, words[1], shard)?;
            let is_logged = !has_stepped && self.parts.says(number, words[0], shard)?;
            for (moment, into) in (0..).zip(&mut *moments) {
                let from = match is_logged {
                    true => places.log_of(part, proxy, moment),
                    false => places.moment_of(part, proxy, moment) + place,
                };
                self.parts.copy_out(number, from, into)?;
            }
            if has_stepped {
                self.parts.copy_out(number, places.buffer_of(part, proxy) + place, parameters)?;
                return Ok(true);
            }
            // In this order: the log may be of another shard once this one's step is done.
            let is_whole = is_logged || !self.parts.says(number, words[0], shard)?;
            if Deviation::RecoversAtALook.is_on() || is_whole && !self.parts.says(number, words[1], shard)? {
                return Ok(false);
            }
        }
        Err(Failure::Corrupt(words[0], "words of a service's step"))
    }

    /// Copies the gradients of a shard that this client has pushed in this step, and whose sum has not come. After
    /// [`Client::push_nothing`] they are what the window held before.
    ///
    /// # Errors
    /// [`PoolError::Argument`] for any other, or another size; [`PoolError::Memory`].
    pub fn pushed(&mut self, shard: u32, into: &mut [u8]) -> Result<(), PoolError> {
        let known = self.parts.exchange().shards().get(shard as usize).copied();
        let is_there = self.states.get(shard as usize) == Some(&State::Pushed);
        let Some(of) = known.filter(|of| is_there && of.bytes == into.len() as u64) else {
            let (value, expected) = (shard.to_string(), "one that was pushed and not summed, and its bytes");
            return Err(PoolError::Argument { what: "the shard", value, expected });
        };
        let own = self.parts.members[self.parts.own].at;
        let at = self.parts.places.buffer_for(own, of.proxy) + self.parts.exchange().window(shard);
        self.parts.memory.copy_out(at, into).map_err(|fault| self.parts.fail(fault.into()))
    }

    /// Copies what a proxy has written of a shard.
    fn copy_out(&mut self, shard: u32, proxy: u16, into: &mut [u8]) -> Result<(), PoolError> {
        let number = self.parts.number_of(proxy);
        let at = self.parts.places.buffer_of(self.parts.members[number].at, proxy)
            + self.parts.agreed.sum_place(shard);
        self.parts.copy_out(number, at, into).map_err(|failure| self.parts.fail(failure))
    }

    fn has_pulled(&mut self, shard: u32) {
        self.states[shard as usize] = State::Pulled;
        self.pulled += 1;
        if self.pulled == self.states.len() {
            self.begin_step();
        }
    }

    /// What a proxy says that it has summed, and whether it lives: steps, shards, and bytes of sums.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub fn summed_by(&self, proxy: u16) -> Result<([u64; 3], bool), PoolError> {
        let number = self.parts.number_of(proxy);
        let at = state_line(self.parts.members[number].at);
        let said = line::read(&self.parts.memory, at)?.unwrap_or_default();
        Ok(([said[1], said[2], said[3]], !self.parts.is_dead(number)?))
    }

    /// The shards of this step that were pushed and whose sums have not come. Once a proxy has died, every client has the same ones
    /// when its wait ends: what the living proxies had to sum has come, and the dead one publishes nothing more.
    #[must_use]
    pub fn unsummed(&self) -> Vec<u32> {
        (0..)
            .zip(&self.states)
            .filter(|(_, state)| **state == State::Pushed)
            .map(|(shard, _)| shard)
            .collect()
    }

    /// Says something of this client to those that look from outside. Nothing follows from it. After the end of this client it says
    /// nothing: another store might tear the line that the proxies look at.
    pub fn report(&mut self, said: &ClientReport) {
        let ClientReport { steps, blocked_ns, proxied_bytes, total_bytes, threshold_bytes } = *said;
        self.parts.counters = [steps, blocked_ns, proxied_bytes, total_bytes, threshold_bytes];
        if self.parts.end.is_none() {
            self.parts.say();
        }
    }

    /// Says that this client expects nothing more: the proxies end when all clients have.
    pub fn leave(&mut self) {
        self.parts.leave();
    }

    fn begin_step(&mut self) {
        self.pulled = 0;
        self.states.fill(State::Idle);
        self.queued.fill(0);
        self.sums.iter_mut().for_each(|queue| queue.taken = 0);
        self.parts.step += 1;
    }

    fn look(&mut self) -> Result<bool, Failure> {
        let Self { parts, sums, states, come, .. } = self;
        let exchange = parts.exchange();
        parts.look(sums.iter_mut(), |proxy, shard| {
            let known = exchange.shards().get(shard as usize);
            let is_its = known.is_some_and(|known| usize::from(known.proxy) == proxy);
            if !is_its || states[shard as usize] != State::Pushed {
                return Err("sum of a service's queue");
            }
            states[shard as usize] = State::Summed;
            come.push_back(shard);
            Ok(true)
        })
    }

    fn await_sum(&mut self) -> Result<(), Failure> {
        let (memory, bell) = (self.parts.memory.clone(), self.parts.bell());
        let ServiceOptions { timeout, patience, .. } = self.parts.options;
        // The two closures of a wait take turns.
        let this = RefCell::new(self);
        // A push of this host that only our caches had is in memory since the first deadline: its proxy gets as long again.
        for _ in 0..2 {
            let deadline = memory.now() + timeout;
            let look = || Ok(this.borrow_mut().look()?.then_some(()));
            let peer = || this.borrow().still_hoped_for();
            // This process may have been stopped since it last looked.
            if wait::until(&memory, bell, patience, deadline, look, peer)?.is_some()
                || this.borrow_mut().look()?
            {
                return Ok(());
            }
            let this = this.borrow();
            this.still_hoped_for()?;
            let (shard, proxy) = this.missing()?.unwrap_or_else(|| this.first_missing());
            if let Some(late) = this.client_without(shard, proxy)? {
                return Err(Failure::Late(late, timeout));
            }
        }
        let this = this.into_inner();
        let (_, proxy) = this.missing()?.unwrap_or_else(|| this.first_missing());
        Err(Failure::Late(this.parts.number_of(proxy), timeout))
    }

    /// Asked before each further sleep: whether a sum that is missing can still come. A proxy that died ends the wait when
    /// all that is missing is its own.
    fn still_hoped_for(&self) -> Result<(), Failure> {
        self.parts.clients_are_there()?;
        let Some((shard, proxy)) = self.missing()? else {
            let (_, proxy) = self.first_missing();
            let number = self.parts.number_of(proxy);
            // A client that died since it was looked at may have taken the proxy with it, or the proxy has said so and ended.
            return Err(match (self.parts.dead_client()?, self.parts.gave_up(number)?) {
                (Some(client), _) => client,
                (None, Some(mark)) => Failure::Told(number, mark),
                (None, None) => Failure::Dead(number),
            });
        };
        let number = self.parts.number_of(proxy);
        if let Some(mark) = self.parts.gave_up(number)? {
            return Err(Failure::Told(number, mark));
        }
        if let Some(client) = self.client_without(shard, proxy)?
            && let Some(mark) = self.parts.gave_up(client)?
        {
            return Err(Failure::Told(client, mark));
        }
        Ok(())
    }

    /// The first shard that was pushed, whose sum has not come, and whose proxy lives; with that proxy.
    fn missing(&self) -> Result<Option<(u32, u16)>, Failure> {
        let mut dead = vec![];
        for shard in self.unsummed() {
            let proxy = self.parts.exchange().shards()[shard as usize].proxy;
            if dead.contains(&proxy) {
                continue;
            }
            if !self.parts.is_dead(self.parts.number_of(proxy))? {
                return Ok(Some((shard, proxy)));
            }
            dead.push(proxy);
        }
        Ok(None)
    }

    /// The first shard that was pushed and whose sum has not come, and its proxy.
    fn first_missing(&self) -> (u32, u16) {
        let missing = self.states.iter().position(|state| *state == State::Pushed).unwrap_or_default();
        (missing as u32, self.parts.exchange().shards()[missing].proxy)
    }

    /// The first client that has not pushed a shard in this step, so that the proxy can see it.
    fn client_without(&self, shard: u32, proxy: u16) -> Result<Option<usize>, Failure> {
        let Parts { memory, members, places, step, clients, own, .. } = &self.parts;
        for client in (0..*clients).filter(|client| client != own) {
            let entries = self.parts.exchange().of_proxy(proxy).len() as u64;
            let queue = places.queue_for(members[client].at, proxy);
            self.parts.refresh(std::iter::once(queue), entries * 8);
            let mut pushed = false;
            for entry in 0..entries {
                let word = memory.load(queue.word(entry))?;
                pushed |= place::decode(word, *step, memory.coherence()) == Ok(Some(shard));
            }
            if !pushed {
                return Ok(Some(client));
            }
        }
        Ok(None)
    }
}
