//! The litmus tests between two real hosts, and what a run of them proves.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::{Litmus, Place, Step, TESTS};
use crate::random::Random;
use crate::{Coherence, Fault, LINE, Memory, Nanos, Offset};

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
    /// Of a control, how often it showed what it is there to show; none where the test is a rule's right form.
    pub relaxed: Option<u64>,
}

impl Tally {
    /// Counts the outcomes of `test` on memory of this kind.
    #[must_use]
    pub fn new(test: &'static Litmus, coherence: Coherence, outcomes: BTreeMap<Vec<u64>, u64>) -> Self {
        let count = |counts: &dyn Fn(&[u64]) -> bool| {
            outcomes.iter().filter(|(outcome, _)| counts(outcome)).map(|(_, times)| times).sum()
        };
        let forbidden = count(&|outcome| !test.allowed(coherence).contains(&outcome));
        let relaxed =
            test.is_control(coherence).then(|| count(&|outcome| test.is_relaxed(outcome, coherence)));
        Self { test, outcomes, forbidden, relaxed }
    }

    /// How often the test ran.
    #[must_use]
    pub fn rounds(&self) -> u64 {
        self.outcomes.values().sum()
    }
}

/// What a run of the litmus tests proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Nothing forbidden was seen, and the controls show that the run would have seen it.
    Pass,
    /// Nothing forbidden was seen, but a control was not seen either: the run could not have seen a mistake.
    Inconclusive,
    /// A forbidden outcome was seen.
    Fail,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pass => "PASS",
            Self::Inconclusive => "INCONCLUSIVE",
            Self::Fail => "FAIL",
        })
    }
}

/// A rule's right forms beside its controls: the same programs without one of its flushes or fences.
#[derive(Clone, Debug)]
pub struct Family {
    /// The name of its first test.
    pub name: &'static str,
    /// Tests that are right, and their rounds.
    pub right: (u64, u64),
    /// Tests that are controls, and their rounds.
    pub controls: (u64, u64),
    /// Controls that were seen, and how often in all.
    pub seen: (u64, u64),
    /// Forbidden outcomes.
    pub forbidden: u64,
}

/// The families without whose controls a run proves nothing. Torn lines and a store after a write-back hang on timing that
/// few machines show.
const NEEDED: [&str; 3] =
    ["message passing", "store buffering: announce, mfence, scan", "false sharing: two hosts write one line"];

impl Family {
    /// The families of a run, in order.
    #[must_use]
    pub fn of(tallies: &[Tally]) -> Vec<Self> {
        let mut families: Vec<Self> = Vec::new();
        for tally in tallies {
            let name = tally.test.name;
            if families.is_empty() || !name.starts_with('…') {
                families.push(Self { name, right: (0, 0), controls: (0, 0), seen: (0, 0), forbidden: 0 });
            }
            let family = families.last_mut().expect("one was just pushed");
            let tests = if tally.relaxed.is_some() { &mut family.controls } else { &mut family.right };
            *tests = (tests.0 + 1, tests.1 + tally.rounds());
            let times = tally.relaxed.unwrap_or(0);
            family.seen = (family.seen.0 + u64::from(times > 0), family.seen.1 + times);
            family.forbidden += tally.forbidden;
        }
        families
    }

    /// Whether a run proves nothing unless it shows one of these controls.
    #[must_use]
    pub fn needs_controls(&self) -> bool {
        NEEDED.contains(&self.name) && self.controls.0 > 0
    }

    /// What the run proves of this rule.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match (self.forbidden, self.seen.0) {
            (1.., _) => Verdict::Fail,
            (_, 0) if self.needs_controls() => Verdict::Inconclusive,
            _ => Verdict::Pass,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, right, controls, seen, forbidden } = self;
        let proves = self.needs_controls() || seen.0 > 0 || *forbidden > 0;
        let verdict = if proves { self.verdict().to_string() } else { "no verdict".to_owned() };
        write!(
            f,
            "{verdict}: {name}: {} right in {} rounds, {forbidden} forbidden outcomes",
            right.0, right.1
        )?;
        match controls.0 {
            0 => f.write_str("; no controls"),
            all => {
                write!(f, "; {} of {all} controls seen, {} times in {} rounds", seen.0, seen.1, controls.1)
            }
        }
    }
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
/// host. Uses [`LITMUS_BYTES`] from `base`, a line; both roles return the same tallies. Calls `progress` with the number of tests that are
/// done and that of all, first when the other role has come.
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
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<Tally>, LitmusError> {
    assert!(role < 2, "role {role}: litmus tests have the roles 0 and 1");
    let mut host = Host { memory, base, role, patience, nonce: 0, theirs: 0, round: 0 };
    host.meet()?;
    let mut tallies = Vec::new();
    let mut random = Random::new(host.nonce);
    let tests: Vec<_> = TESTS.iter().filter(|test| test.runs_on_two_hosts()).collect();
    for &test in &tests {
        progress(tallies.len(), tests.len());
        let mut outcomes = BTreeMap::new();
        for _ in 0..rounds {
            let outcome = test.judge(host.play(test, &mut random)?);
            *outcomes.entry(outcome).or_default() += 1;
        }
        tallies.push(Tally::new(test, memory.coherence(), outcomes));
    }
    host.join()?;
    progress(tallies.len(), tests.len());
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
        // Sometimes together, sometimes well apart, also where the roles take turns on one core.
        if random.below(4) == 0 {
            for _ in 0..random.magnitude(4) {
                self.memory.yield_now();
            }
        }
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
pub(crate) fn execute<M: Memory>(memory: &M, steps: &[Step], at: Offset) -> Result<Vec<u64>, Fault> {
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
                    let steps = RefCell::new(Vec::new());
                    let progress = |done, all| steps.borrow_mut().push((done, all));
                    let patience = Duration::from_secs(9);
                    let tallies = run_host(&memory, Offset(64), role.into(), 3, patience, &progress).unwrap();
                    let all = tallies.len();
                    assert_eq!(steps.take(), (0..=all).map(|done| (done, all)).collect::<Vec<_>>());
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

    /// A run in which each test shows what `shows` says, once in a round of all that are allowed.
    fn run(shows: impl Fn(&Litmus, &[u64]) -> bool) -> Vec<Tally> {
        let tests = TESTS.iter().filter(|test| test.runs_on_two_hosts());
        let tally = |test: &'static Litmus| {
            let seen = test.allowed.iter().filter(|outcome| shows(test, outcome));
            Tally::new(test, Coherence::Software, seen.map(|outcome| (outcome.to_vec(), 1)).collect())
        };
        tests.map(tally).collect()
    }

    fn verdict(tallies: &[Tally]) -> Verdict {
        Family::of(tallies).iter().map(Family::verdict).max().expect("there are families")
    }

    #[test]
    fn a_run_passes_only_when_each_rule_that_needs_them_shows_a_control() {
        let all = run(|_, _| true);
        assert_eq!(verdict(&all), Verdict::Pass);
        let none = run(|test, outcome| !test.is_relaxed(outcome, Coherence::Software));
        assert_eq!(verdict(&none), Verdict::Inconclusive);
        for needed in NEEDED {
            let mut lacking = all.clone();
            let first = lacking.iter().position(|tally| tally.test.name == needed).expect("it is run");
            let is_last = |tally: &Tally| !tally.test.name.starts_with('…');
            let family = 1 + lacking[first + 1..].iter().position(is_last).expect("it is not the last");
            for tally in &mut lacking[first..first + family] {
                tally.relaxed = tally.relaxed.map(|_| 0);
            }
            assert_eq!(verdict(&lacking), Verdict::Inconclusive, "{needed}");
        }
    }

    #[test]
    fn one_forbidden_outcome_fails_a_run_whose_controls_were_seen() {
        let mut tallies = run(|_, _| true);
        let forbidden = BTreeMap::from([(vec![1, 0], 1)]);
        tallies[0] = Tally::new(&TESTS[0], Coherence::Software, forbidden);
        assert_eq!((tallies[0].forbidden, verdict(&tallies)), (1, Verdict::Fail));
    }

    #[test]
    fn a_role_whose_partner_never_starts_says_so() {
        let mut world = World::new(0, Shape::default());
        world.spawn(0, 0, |memory| {
            let progress = |_, _| panic!("it did not begin");
            let error = run_host(&memory, Offset(0), 0, 3, Duration::from_secs(9), &progress).unwrap_err();
            assert_eq!(error, LitmusError::Silent { round: 0, waited_ms: 9000 });
        });
        world.run().unwrap();
    }
}
