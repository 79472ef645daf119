//! The locks of a window: bakery among ranks, shared or exclusive.
//!
//! To take a lock, a rank goes through these steps:
//!
//! 1. It announces that it is choosing a number.
//! 2. It takes a number above all that it sees, and announces it.
//! 3. It waits for every rank with a lower number, and for every lower rank with the same number. A rank that is choosing has
//!    the number 0, so it is waited for too.
//!
//! A rank that wants to share the lock waits only for ranks that do not share it. An announcement is one word, a ticket, which
//! is seen whole. So one word can say that the number is being chosen, or what it is.
//!
//! A process that will never go on counts as one without a ticket. Its word stays, because no other process may write it.

use polder_mem::{Memory, Nanos, Offset};

use super::Window;
use super::place::Word;
use crate::deviation::Deviation;
use crate::{PoolError, word};

/// Bits of a number.
const NUMBER_BITS: u32 = word::BITS - 2;
/// Looks in vain before the CPU is offered to others between them.
const SPINS: u32 = 50;

/// Who may hold a lock together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All that share it.
    Shared,
    /// One alone.
    Exclusive,
}

/// Which lock of which rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lock {
    pub(super) word: Word,
    pub(super) target: u32,
}

/// What a lock's word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticket {
    access: Access,
    /// From 1; 0 while it is being chosen.
    number: u64,
}

/// A wait for a lock, or the lock itself when nobody is left to wait for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    ticket: Ticket,
    turn: Turn,
    is_held: bool,
}

/// Whether a caller of [`Window::try_lock`] waits for a lock, which one thread of its window does at a time.
#[derive(Debug, Default)]
pub struct LockPlace {
    waits: bool,
}

/// How far a wait has come that looks at one peer after another.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    /// The peers that need not be looked at any more.
    passed: usize,
    /// Looks in vain at the next.
    looks: u32,
}

impl Turn {
    /// How many peers need not be looked at any more.
    pub(super) const fn passed(&self) -> usize {
        self.passed
    }

    /// Whether it is time to ask whether the peer that is waited for still lives, which is not asked before so many looks.
    const fn asks(&self, first: u32) -> bool {
        self.looks >= first && (self.looks.is_power_of_two() || self.looks.is_multiple_of(1024))
    }
}

impl Ticket {
    fn encode(self) -> u64 {
        word::seal(1 | u64::from(self.access == Access::Exclusive) << 1 | self.number << 2)
    }

    /// What a word says; the error is that no rank writes it.
    fn decode(word: u64) -> Result<Option<Self>, ()> {
        let payload = word::open(word).ok_or(())?;
        let access = if payload & 2 == 0 { Access::Shared } else { Access::Exclusive };
        match payload {
            0 => Ok(None),
            _ if payload & 1 == 0 => Err(()),
            _ => Ok(Some(Self { access, number: payload >> 2 })),
        }
    }

    /// Whether `rank`, who has this ticket, goes before `other` of rank `after`, or may.
    fn has_priority_over(self, rank: u32, other: Self, after: u32) -> bool {
        let excludes = [self.access, other.access].contains(&Access::Exclusive);
        excludes && (self.number, rank) < (other.number, after)
    }
}

impl<M: Memory> Window<M> {
    /// Takes the window lock of `target`, or a place in the queue for it: call it with one `place` until it returns true, or give the
    /// place back with [`Window::leave`]. Then [`Window::get`] gets what the holders before have put. While one caller waits or has the
    /// lock, it returns false to all others of this window.
    ///
    /// # Errors
    /// [`PoolError::PeerDead`] when somebody in front gives no sign of life and may yet go on: nobody passes it before the view
    /// says that its host is fenced. [`PoolError::Evicted`], [`PoolError::Corrupt`], [`PoolError::Memory`]. The place in the
    /// queue is given back then.
    pub fn try_lock(
        &mut self,
        target: u32,
        access: Access,
        place: &mut LockPlace,
    ) -> Result<bool, PoolError> {
        self.segment(target)?;
        let lock = Lock { word: Word::WindowLock, target };
        let is_own = std::mem::take(&mut place.waits);
        let mut claim = match self.claims.get(&target) {
            Some(claim) if is_own && !claim.is_held => *claim,
            Some(_) => return Ok(false),
            None => self.draw(lock, access)?,
        };
        let came = self.advance(lock, &mut claim);
        claim.is_held = came == Ok(true);
        place.waits = came == Ok(false);
        self.claims.insert(target, claim);
        if came.is_err() {
            self.withdraw(target, false);
        }
        came
    }

    /// Gives the window lock of `target` back, unless no caller has it; whether one had. All that was put is there before.
    pub fn unlock(&mut self, target: u32) -> bool {
        self.withdraw(target, true)
    }

    /// Gives the place in the queue for the window lock of `target` back, if the caller has it.
    pub fn leave(&mut self, target: u32, place: LockPlace) {
        if place.waits {
            self.withdraw(target, false);
        }
    }

    /// Gives back what this window has of a lock, where that is the lock itself or a place in the queue; whether it is.
    fn withdraw(&mut self, target: u32, is_held: bool) -> bool {
        let is_it = self.claims.get(&target).is_some_and(|claim| claim.is_held == is_held);
        if is_it {
            self.claims.remove(&target);
            self.release(Lock { word: Word::WindowLock, target });
        }
        is_it
    }

    /// Takes a lock for this process alone, or waits for it as long as a call may while the same rank has it.
    pub(super) fn take(&mut self, lock: Lock) -> Result<(), PoolError> {
        let mut claim = self.draw(lock, Access::Exclusive)?;
        let mut patience = None;
        loop {
            // Who was stopped beyond its deadline looks once more.
            let is_late = patience.is_some_and(|(_, deadline)| self.pool.memory().now() >= deadline);
            let came = self.advance(lock, &mut claim);
            let waits = came.and_then(|came| match came {
                true => Ok(false),
                false => self.rest(lock, &claim, &mut patience, is_late).map(|()| true),
            });
            match waits {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    self.release(lock);
                    return Err(error);
                }
            }
        }
    }

    /// Lets others go on. `patience` is the number and the rank of the one that is next, or has the lock, and until when it may keep it.
    fn rest(
        &mut self,
        lock: Lock,
        claim: &Claim,
        patience: &mut Option<((u64, u32), Nanos)>,
        is_late: bool,
    ) -> Result<(), PoolError> {
        if claim.turn.looks < SPINS {
            self.pool.memory().pause();
            return Ok(());
        }
        if patience.is_none() || is_late {
            let first = self.first(lock, claim)?;
            let is_same = patience.is_some_and(|(same, _)| same == first);
            if is_same {
                // Others may have passed it, where it will never go on.
                self.check_liveness(first.1)?;
            }
            if is_same && !self.segments[first.1 as usize].gone || is_late && Deviation::WaitsOnce.is_on() {
                return Err(self.late(first.1));
            }
            *patience = Some((first, self.pool.memory().now() + self.pool.member().timeout));
        }
        self.pool.memory().yield_now();
        Ok(())
    }

    fn late(&self, rank: u32) -> PoolError {
        let timeout = self.pool.member().timeout;
        PoolError::Timeout {
            peer: self.segments[rank as usize].process.peer(),
            what: "the update lock of a window, which is with rank",
            epoch: self.pool.epoch().unwrap_or(0),
            sequence: rank.into(),
            waited_ms: timeout.as_millis().try_into().unwrap_or(u64::MAX),
        }
    }

    /// Draws a number above all that are seen.
    // SYNC: rule 4, twice. Of two who choose at once, one sees that the other does, or its number.
    fn draw(&mut self, lock: Lock, access: Access) -> Result<Claim, PoolError> {
        if !Deviation::CheckThenSet.is_on() {
            self.announce(lock, Ticket { access, number: 0 });
        }
        let number = match self.highest(lock) {
            Ok(highest) => highest + 1,
            Err(error) => {
                self.release(lock);
                return Err(error);
            }
        };
        let ticket = Ticket { access, number };
        self.announce(lock, ticket);
        Ok(Claim { ticket, turn: Turn::default(), is_held: false })
    }

    fn announce(&self, lock: Lock, ticket: Ticket) {
        let (memory, at) = (self.pool.memory(), self.own_word(lock));
        memory.store(at, ticket.encode());
        // What is announced leaves the cache.
        memory.write_back(at, 8);
        // SYNC: pairs with `highest` and `pass` of the others, as at `draw`.
        memory.mfence();
    }

    /// The highest number that anybody has.
    fn highest(&self, lock: Lock) -> Result<u64, PoolError> {
        let mut highest = 0;
        self.numbers(lock, |_, number| highest = highest.max(number))?;
        Ok(highest)
    }

    /// Who comes first of those that live and go before this rank: its number and the rank. Where nobody does, the rank that is waited
    /// for is choosing its number.
    fn first(&self, lock: Lock, claim: &Claim) -> Result<(u64, u32), PoolError> {
        let ours = (claim.ticket.number, self.rank);
        let mut first = ours;
        self.numbers(lock, |rank, number| {
            if number > 0 && !self.segments[rank as usize].gone {
                first = first.min((number, rank));
            }
        })?;
        Ok(if first == ours { (0, self.other(claim.turn.passed)) } else { first })
    }

    /// Gives `each` the number of every other rank, 0 where it has none.
    fn numbers(&self, lock: Lock, mut each: impl FnMut(u32, u64)) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        let words = || {
            (0..self.segments.len() - 1)
                .map(|index| self.other(index))
                .map(|rank| (rank, self.lock_word(lock, rank)))
        };
        words().for_each(|(_, at)| memory.invalidate(at, 8));
        // SYNC: pairs with `announce`.
        memory.fence_invalidations();
        for (rank, at) in words() {
            let number = self.ticket(at, memory.load(at)?)?.map_or(0, |ticket| ticket.number);
            // No rank comes so far in centuries.
            if (number + 1) >> NUMBER_BITS != 0 {
                return Err(corrupt(at));
            }
            each(rank, number);
        }
        Ok(())
    }

    fn ticket(&self, at: Offset, word: u64) -> Result<Option<Ticket>, PoolError> {
        Ticket::decode(word).map_err(|()| corrupt(at))
    }

    /// Looks at those who may go before; whether nobody does any more.
    fn advance(&mut self, lock: Lock, claim: &mut Claim) -> Result<bool, PoolError> {
        let Claim { ticket: ours, turn, .. } = claim;
        let (count, me) = (self.segments.len() - 1, self.rank);
        self.pass(
            turn,
            count,
            |window, index| {
                let rank = window.other(index);
                (rank, window.lock_word(lock, rank))
            },
            |window, rank, at, word| {
                let theirs = window.ticket(at, word)?;
                let is_there = !window.segments[rank as usize].gone;
                Ok(is_there && theirs.is_some_and(|theirs| theirs.has_priority_over(rank, *ours, me)))
            },
        )
    }

    /// Gives a lock back.
    pub(super) fn release(&self, lock: Lock) {
        let (memory, at) = (self.pool.memory(), self.own_word(lock));
        // What was written under the lock is there first.
        // SYNC: pairs with `pass` of the next that holds it, which then reads what was written under it.
        memory.sfence();
        memory.store(at, 0);
        memory.write_back(at, 8);
    }

    /// Looks afresh at a word of each of `count` peers, in turn, until one `stands` in the way; whether none does. Who has
    /// passed is not looked at again.
    pub(super) fn pass(
        &mut self,
        turn: &mut Turn,
        count: usize,
        place: impl Fn(&Self, usize) -> (u32, Offset),
        stands: impl Fn(&Self, u32, Offset, u64) -> Result<bool, PoolError>,
    ) -> Result<bool, PoolError> {
        while turn.passed < count {
            // A process that stood in the way is looked at alone.
            let end = if turn.looks > 0 { turn.passed + 1 } else { count };
            let memory = self.pool.memory();
            (turn.passed..end).for_each(|index| memory.invalidate(place(self, index).1, 8));
            // SYNC: pairs with `announce` and `release` of the others.
            memory.fence_invalidations();
            while turn.passed < end {
                let (rank, at) = place(self, turn.passed);
                if stands(self, rank, at, self.pool.memory().load(at)?)? {
                    turn.looks += 1;
                    if turn.asks(self.asks_after) {
                        self.check_liveness(rank)?;
                    }
                    return Ok(false);
                }
                *turn = Turn { passed: turn.passed + 1, looks: 0 };
            }
        }
        Ok(true)
    }

    /// Asks whether the process of `rank` lives, and remembers it when it will never go on.
    fn check_liveness(&mut self, rank: u32) -> Result<(), PoolError> {
        let process = self.segments[rank as usize].process;
        let asked = self.pool.expect_alive(&process, "rank of a window", rank.into());
        let is_gone = match &asked {
            Err(PoolError::PeerDead { .. } | PoolError::Corrupt { .. }) => self.pool.is_gone(&process),
            _ => Ok(false),
        };
        match (is_gone, asked) {
            (Ok(true), _) => {
                // What it had stored is in memory before anybody goes on in its place.
                self.pool.await_writes();
                self.segments[rank as usize].gone = true;
                Ok(())
            }
            // It may be writing its line: the caller's deadline decides.
            (_, Err(PoolError::Corrupt { .. })) => Ok(()),
            (_, asked) => asked,
        }
    }

    /// The rank at `index` of those that are not this one.
    fn other(&self, index: usize) -> u32 {
        index as u32 + u32::from(index as u32 >= self.rank)
    }

    fn lock_word(&self, lock: Lock, rank: u32) -> Offset {
        self.segments[rank as usize].word(lock.word, lock.target)
    }

    fn own_word(&self, lock: Lock) -> Offset {
        self.lock_word(lock, self.rank)
    }
}

fn corrupt(offset: Offset) -> PoolError {
    PoolError::Corrupt { offset, what: "lock of a window" }
}
