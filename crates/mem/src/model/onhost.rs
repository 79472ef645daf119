//! The litmus tests between two real hosts.

use std::collections::BTreeMap;
use std::time::Duration;

use super::litmus::{Litmus, Place, Step, TESTS};
use super::random::Random;
use crate::{Fault, LINE, Memory, Nanos, Offset};

/// Bytes that the tests need in the region, from a line on.
pub const LITMUS_BYTES: u64 = 8 * LINE;

/// Each role's line of round numbers, then each role's line of results, then the lines of the test.
const ROUND: u64 = 0;
const RESULT: u64 = 2;
const TEST: u64 = 4;
const TEST_LINES: u64 = 3;
/// Looks in a tight loop before the CPU is offered to others.
const SPINS: u32 = 200;

/// What two hosts saw of one test.
#[derive(Clone, Debug)]
pub struct Tally {
    /// The test.
    pub test: &'static Litmus,
    /// How often each outcome was seen.
    pub outcomes: BTreeMap<Vec<u64>, u64>,
    /// Outcomes that the model forbids, seen nonetheless: the machine is weaker than the model, and no protocol here is
    /// proved for it.
    pub forbidden: u64,
}

/// Why the tests could not be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LitmusError {
    /// The other host does not answer.
    #[error(
        "the other role did not answer within {waited_ms} ms at round {round}; start it with the same --rounds on the other host"
    )]
    Silent {
        /// The round that this host waits in.
        round: u64,
        /// How long it waited, in milliseconds.
        waited_ms: u64,
    },
    /// The memory itself failed.
    #[error(transparent)]
    Memory(#[from] Fault),
}

/// Runs all tests for two hosts, `rounds` times each, with another process that calls this for the other role on another
/// host. Uses [`LITMUS_BYTES`] from `base`, a line; both roles return the same tallies.
///
/// # Errors
/// [`LitmusError`] when the other role is silent for `patience`, or the memory fails.
///
/// # Panics
/// When `role` is neither 0 nor 1.
pub fn run_host<M: Memory>(
    memory: &M,
    base: Offset,
    role: u64,
    rounds: u64,
    patience: Duration,
) -> Result<Vec<Tally>, LitmusError> {
    assert!(role < 2, "role {role}: litmus tests have the roles 0 and 1");
    let mut host = Host { memory, base, role, patience, nonce: 0, theirs: 0, round: 0 };
    host.meet()?;
    let mut tallies = Vec::new();
    let mut random = Random::new(host.nonce);
    for test in TESTS.iter().filter(|test| test.runs_on_two_hosts()) {
        let mut tally = Tally { test, outcomes: BTreeMap::new(), forbidden: 0 };
        for _ in 0..rounds {
            let outcome = test.judge(host.play(test, &mut random)?);
            let allowed = test.allowed(memory.coherence()).contains(&&outcome[..]);
            tally.forbidden += u64::from(!allowed);
            *tally.outcomes.entry(outcome).or_default() += 1;
        }
        tallies.push(tally);
    }
    host.join()?;
    Ok(tallies)
}

struct Host<'a, M> {
    memory: &'a M,
    base: Offset,
    role: u64,
    patience: Duration,
    /// Tell this run's round numbers from those that an earlier run left behind.
    nonce: u64,
    theirs: u64,
    round: u64,
}

impl<M: Memory> Host<'_, M> {
    fn line(&self, kind: u64, role: u64) -> Offset {
        self.base.lines(kind + role)
    }

    fn publish(&self, at: Offset, words: &[u64]) {
        for (index, word) in (0..).zip(words) {
            self.memory.store(at.word(index), *word);
        }
        self.memory.write_back(at, LINE);
        self.memory.mfence();
    }

    fn fresh(&self, at: Offset) {
        self.memory.invalidate(at, LINE);
        self.memory.fence_invalidations();
    }

    /// Finds the other role: each shows a nonce and repeats the other's.
    fn meet(&mut self) -> Result<(), LitmusError> {
        let (mine, peer) = (self.line(ROUND, self.role), self.line(ROUND, 1 - self.role));
        self.fresh(mine);
        // Differs from what an earlier run left, so that its echo cannot be taken for an answer.
        let left = self.memory.load(mine)?;
        self.nonce = Random::new(self.memory.now().0 ^ left).next() | 1;
        if self.nonce == left {
            self.nonce = self.nonce.wrapping_add(2);
        }
        self.publish(mine, &[self.nonce, 0, 0]);
        let (until, mut looks) = (self.memory.now() + self.patience, 0);
        loop {
            self.fresh(peer);
            let (theirs, echo) = (self.memory.load(peer)?, self.memory.load(peer.word(1))?);
            if theirs != self.theirs {
                self.theirs = theirs;
                self.publish(mine, &[self.nonce, theirs, 0]);
            }
            if echo == self.nonce {
                // The echo was published after the nonce beside it, which this look may have missed.
                self.fresh(peer);
                self.theirs = self.memory.load(peer)?;
                return self.join();
            }
            self.wait(until, &mut looks)?;
        }
    }

    /// Waits a little between two looks: the other role may need this CPU.
    fn wait(&self, until: Nanos, looks: &mut u32) -> Result<(), LitmusError> {
        if self.memory.now() > until {
            let waited_ms = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
            return Err(LitmusError::Silent { round: self.round, waited_ms });
        }
        *looks += 1;
        if *looks < SPINS {
            self.memory.pause()
        } else {
            self.memory.yield_now()
        }
        Ok(())
    }

    /// Both roles have come as far.
    fn join(&mut self) -> Result<(), LitmusError> {
        self.round += 1;
        let count = |nonce: u64, round: u64| nonce << 32 | round & 0xffff_ffff;
        let peer = self.line(ROUND, 1 - self.role);
        let mine = self.line(ROUND, self.role);
        self.publish(mine, &[self.nonce, self.theirs, count(self.nonce, self.round)]);
        // The other may be one round further on, and no more.
        let expected = [count(self.theirs, self.round), count(self.theirs, self.round + 1)];
        let (until, mut looks) = (self.memory.now() + self.patience, 0);
        loop {
            self.fresh(peer);
            if expected.contains(&self.memory.load(peer.word(2))?) {
                return Ok(());
            }
            self.wait(until, &mut looks)?;
        }
    }

    fn play(&mut self, test: &Litmus, random: &mut Random) -> Result<Vec<u64>, LitmusError> {
        let at = self.base.lines(TEST);
        let lines = TEST_LINES * LINE;
        // Nobody holds a line of the last round any more; then one role clears them; then the other forgets again what
        // its prefetcher may have found in between.
        self.memory.invalidate(at, lines);
        self.memory.mfence();
        self.join()?;
        if self.role == 0 {
            for word in 0..lines / 8 {
                self.memory.store(at.word(word), 0);
            }
            self.memory.invalidate(at, lines);
            self.memory.mfence();
        }
        self.join()?;
        self.memory.invalidate(at, lines);
        self.memory.mfence();
        if random.below(2) == 0 {
            // A warm cache shows what a missing invalidation does.
            for line in 0..TEST_LINES {
                self.memory.load(at.lines(line))?;
            }
        }
        self.join()?;
        // Sometimes together, sometimes well apart.
        for _ in 0..random.magnitude(12) {
            std::hint::spin_loop();
        }
        let seen = execute(self.memory, test.threads[self.role as usize].steps, at)?;
        self.finish(test, at, seen)
    }

    /// Exchanges what was seen, and looks at memory once nobody holds a line of the test.
    fn finish(&mut self, test: &Litmus, at: Offset, mine: Vec<u64>) -> Result<Vec<u64>, LitmusError> {
        // What a program leaves in its cache stays there until the other has looked.
        self.join()?;
        self.memory.invalidate(at, TEST_LINES * LINE);
        self.memory.mfence();
        self.publish(self.line(RESULT, self.role), &mine);
        self.join()?;
        let peer = self.line(RESULT, 1 - self.role);
        self.fresh(peer);
        let count = |thread: u64| {
            let steps = test.threads[thread as usize].steps;
            steps.iter().filter(|step| matches!(step, Step::Load(_))).count() as u64
        };
        let mut theirs = Vec::new();
        for word in 0..count(1 - self.role) {
            theirs.push(self.memory.load(peer.word(word))?);
        }
        let mut outcome = if self.role == 0 { [mine, theirs].concat() } else { [theirs, mine].concat() };
        self.memory.invalidate(at, TEST_LINES * LINE);
        self.memory.fence_invalidations();
        for place in test.last {
            outcome.push(self.memory.load(place.offset(at))?);
        }
        self.join()?;
        Ok(outcome)
    }
}

/// Runs one thread's program on the words from `at` on, and says what its loads saw.
pub(super) fn execute<M: Memory>(memory: &M, steps: &[Step], at: Offset) -> Result<Vec<u64>, Fault> {
    let line = |place: Place| place.offset(at).line();
    let mut seen = Vec::new();
    for step in steps {
        match *step {
            Step::Store(place, value) => memory.store(place.offset(at), value),
            Step::StoreNt(place, value) => memory.store_nt(place.offset(at), value),
            Step::Load(place) => seen.push(memory.load(place.offset(at))?),
            Step::WriteBack(place) => memory.write_back(line(place), LINE),
            // `runs_on_two_hosts` leaves out the tests that need `clflush` itself.
            Step::Invalidate(place) | Step::Flush(place) => memory.invalidate(line(place), LINE),
            Step::Sfence => memory.sfence(),
            Step::Mfence => memory.mfence(),
            Step::FenceInvalidations => memory.fence_invalidations(),
        }
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::Coherence;
    use crate::model::{Outcome, Shape, World, explore};

    fn two_hosts(coherence: Coherence) -> impl Fn(u64) -> Outcome + Sync {
        move |seed| {
            let mut world = World::new(seed, Shape { coherence, ..Shape::default() });
            world.budget(10_000_000);
            let results = Rc::new(RefCell::new(Vec::new()));
            for role in 0..2 {
                let results = Rc::clone(&results);
                world.spawn(role, 0, move |memory| {
                    let tallies =
                        run_host(&memory, Offset(64), role.into(), 3, Duration::from_secs(9)).unwrap();
                    results.borrow_mut().push(tallies);
                });
            }
            world.run()?;
            let results = results.take();
            for (tally, other) in results[0].iter().zip(&results[1]) {
                assert_eq!(tally.forbidden, 0, "{}: {:?}", tally.test.name, tally.outcomes);
                assert_eq!(tally.outcomes, other.outcomes, "{}: both roles count the same", tally.test.name);
            }
            Ok(())
        }
    }

    #[test]
    fn two_hosts_of_the_model_see_only_what_is_allowed() {
        explore("litmus", 100, 0, two_hosts(Coherence::Software)).expect_none();
        explore("litmus", 100, 0, two_hosts(Coherence::Coherent)).expect_none();
    }

    #[test]
    fn a_role_whose_partner_never_starts_says_so() {
        let mut world = World::new(0, Shape::default());
        world.spawn(0, 0, |memory| {
            let error = run_host(&memory, Offset(0), 0, 3, Duration::from_secs(9)).unwrap_err();
            assert_eq!(error, LitmusError::Silent { round: 0, waited_ms: 9000 });
        });
        world.run().unwrap();
    }
}
