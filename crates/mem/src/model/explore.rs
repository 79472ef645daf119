//! Many schedules of one suite.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use super::mutants::SiteKind;
use super::state::{Crash, Mutation};
use super::world::held_worlds;
use crate::Coherence;

/// A schedule that went wrong, and how to see it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed that replays the schedule.
    pub seed: u64,
    /// What the thread said, or that nobody could go on.
    pub message: String,
    /// The last operations; empty unless the schedule ran with tracing, as [`explore`] and [`replay`] see to.
    pub trace: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}", self.seed, self.message)?;
        if !self.trace.is_empty() {
            write!(
                f,
                "\nthe last operations (thread, host.slot, operation, offset, value, site):\n{}",
                self.trace
            )?;
        }
        Ok(())
    }
}

/// How one schedule ended.
pub type Outcome = Result<(), Failure>;

/// What schedules went through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Worlds on memory that software keeps coherent.
    pub software: u64,
    /// Worlds on coherent memory.
    pub coherent: u64,
    /// Worlds on memory that its device keeps coherent.
    pub hdm_db: u64,
    /// Memory operations of all threads.
    pub operations: u64,
    /// Deaths of processes that fell.
    pub process_deaths: u64,
    /// Deaths of hosts that fell.
    pub host_deaths: u64,
    /// Pauses that fell.
    pub pauses: u64,
    /// What scenes came to, as they name it with [`reached`], and how often.
    pub reached: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// Counts a world that has run, with its memory operations.
    pub(super) fn count_world(&mut self, coherence: Coherence, operations: u64) {
        *match coherence {
            Coherence::Software => &mut self.software,
            Coherence::Coherent => &mut self.coherent,
            Coherence::HdmDb => &mut self.hdm_db,
        } += 1;
        self.operations += operations;
    }

    /// Counts a crash.
    pub(super) fn count(&mut self, crash: Crash) {
        *match crash {
            Crash::Process => &mut self.process_deaths,
            Crash::Host => &mut self.host_deaths,
            Crash::Pause => &mut self.pauses,
        } += 1;
    }

    fn add(&mut self, other: Self) {
        self.software += other.software;
        self.coherent += other.coherent;
        self.hdm_db += other.hdm_db;
        self.operations += other.operations;
        self.process_deaths += other.process_deaths;
        self.host_deaths += other.host_deaths;
        self.pauses += other.pauses;
        for (what, count) in other.reached {
            *self.reached.entry(what).or_default() += count;
        }
    }
}

/// How many schedules ended.
#[derive(Clone, Debug)]
pub struct Report {
    /// The suite.
    pub name: String,
    /// The seeds began here.
    pub first_seed: u64,
    /// Schedules that were run.
    pub schedules: u64,
    /// Schedules that failed.
    pub failed: u64,
    /// What they went through.
    pub tally: Tally,
    /// Wall-clock time.
    pub elapsed: Duration,
    /// The first failures, with traces, by seed.
    pub failures: Vec<Failure>,
}

impl Report {
    /// Schedules a second, all OS threads together.
    #[must_use]
    pub fn per_second(&self) -> f64 {
        self.schedules as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Ends the test with the first failure, if there is one.
    ///
    /// # Panics
    /// When a schedule failed.
    pub fn expect_none(&self) {
        if let Some(failure) = self.failures.first() {
            panic!("{}: {failure}", self.name);
        }
    }

    /// The first failure, for a canary that must have one.
    ///
    /// # Panics
    /// When no schedule failed.
    #[must_use]
    pub fn expect_failure(&self) -> &Failure {
        let Some(failure) = self.failures.first() else {
            panic!("{}: known to be wrong, but none of {} schedules failed", self.name, self.schedules);
        };
        failure
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} schedules, {} failed, {:.0} a second",
            self.name,
            self.schedules,
            self.failed,
            self.per_second()
        )?;
        for (index, (what, count)) in self.tally.reached.iter().enumerate() {
            write!(f, "{} {what} {count}", if index == 0 { "; reached:" } else { "," })?;
        }
        Ok(())
    }
}

/// Explores one suite: how many schedules, on how many OS threads, until how many failures.
pub struct Explorer<'a> {
    pub(super) name: String,
    pub(super) schedules: u64,
    pub(super) listed: u64,
    pub(super) first_seed: u64,
    pub(super) threads: usize,
    stop_after: u64,
    progress: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl<'a> Explorer<'a> {
    /// `schedules` schedules, from seed 0, on one OS thread, until the first failure.
    #[must_use]
    pub fn new(name: &str, schedules: u64) -> Self {
        Self {
            name: name.into(),
            schedules,
            listed: schedules,
            first_seed: 0,
            threads: 1,
            stop_after: 1,
            progress: None,
        }
    }

    /// Begins at another seed.
    #[must_use]
    pub fn first_seed(mut self, seed: u64) -> Self {
        self.first_seed = seed;
        self
    }

    /// Runs a mutant that is listed as harmless through so many schedules, instead of as many as the others.
    #[must_use]
    pub fn listed(mut self, schedules: u64) -> Self {
        self.listed = schedules;
        self
    }

    /// Splits the seeds among `threads` OS threads.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Goes on until `failures` schedules have failed; 0 for all schedules.
    #[must_use]
    pub fn stop_after(mut self, failures: u64) -> Self {
        self.stop_after = failures;
        self
    }

    /// Calls `progress` now and then with the number of schedules that are done.
    #[must_use]
    pub fn progress(mut self, progress: &'a (dyn Fn(u64) + Sync)) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Runs the schedules.
    pub fn run(self, suite: impl Fn(u64) -> Outcome + Sync) -> Report {
        let begin = Instant::now();
        let race = Race {
            next: AtomicU64::new(0),
            ran: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failures: Mutex::default(),
            tally: Mutex::default(),
        };
        if self.threads == 1 {
            self.work(&race, &suite);
        } else {
            std::thread::scope(|scope| {
                for _ in 0..self.threads {
                    scope.spawn(|| self.work(&race, &suite));
                }
            });
        }
        let mut seeds = race.failures.into_inner().expect("no thread panics while it holds the list");
        seeds.sort_unstable();
        let failures = seeds.iter().take(3).map(|seed| see_again(*seed, &suite)).collect();
        Report {
            name: self.name,
            first_seed: self.first_seed,
            schedules: race.ran.into_inner(),
            failed: seeds.len() as u64,
            tally: race.tally.into_inner().expect("no thread panics while it holds the tally"),
            elapsed: begin.elapsed(),
            failures,
        }
    }

    pub(super) fn tell(&self, done: u64) {
        if let Some(progress) = self.progress {
            progress(done);
        }
    }

    fn work(&self, race: &Race, suite: &(impl Fn(u64) -> Outcome + Sync)) {
        with_session(|session| session.tally = Tally::default());
        self.take(race, suite);
        let own = with_session(|session| std::mem::take(&mut session.tally));
        race.tally.lock().expect("no thread panics while it holds the tally").add(own);
    }

    fn take(&self, race: &Race, suite: &(impl Fn(u64) -> Outcome + Sync)) {
        const BATCH: u64 = 64;
        loop {
            let begin = race.next.fetch_add(BATCH, Ordering::Relaxed);
            if begin >= self.schedules {
                return;
            }
            for index in begin..(begin + BATCH).min(self.schedules) {
                if race.stop.load(Ordering::Relaxed) {
                    return;
                }
                let seed = self.first_seed.wrapping_add(index);
                race.ran.fetch_add(1, Ordering::Relaxed);
                if once(seed, suite).is_err() {
                    let mut failures =
                        race.failures.lock().expect("no thread panics while it holds the list");
                    failures.push(seed);
                    if failures.len() as u64 == self.stop_after {
                        race.stop.store(true, Ordering::Relaxed);
                    }
                }
            }
            self.tell(race.ran.load(Ordering::Relaxed));
        }
    }
}

/// What the OS threads of one exploration share.
struct Race {
    next: AtomicU64,
    ran: AtomicU64,
    stop: AtomicBool,
    failures: Mutex<Vec<u64>>,
    tally: Mutex<Tally>,
}

/// Counts that a scene came to something of which a report says how often.
pub fn reached(what: &'static str) {
    with_session(|session| *session.tally.reached.entry(what).or_default() += 1);
}

/// Runs `schedules` schedules of `suite`, from `first_seed`, on one OS thread, until the first failure.
pub fn explore(name: &str, schedules: u64, first_seed: u64, suite: impl Fn(u64) -> Outcome + Sync) -> Report {
    Explorer::new(name, schedules).first_seed(first_seed).run(suite)
}

/// Runs one schedule with tracing.
///
/// # Errors
/// Its failure.
pub fn replay(seed: u64, suite: impl Fn(u64) -> Outcome) -> Outcome {
    SESSION.with_borrow_mut(|session| session.tracing = true);
    let outcome = once(seed, &suite);
    SESSION.with_borrow_mut(|session| session.tracing = false);
    outcome
}

/// A failure that is known, with its trace.
fn see_again(seed: u64, suite: &impl Fn(u64) -> Outcome) -> Failure {
    replay(seed, suite).err().unwrap_or_else(|| Failure {
        seed,
        message: "failed, but not when it was replayed: the suite depends on something beside its seed"
            .into(),
        trace: String::new(),
    })
}

/// Runs one schedule; a panic outside its threads fails it as well. The seed is the suite's, which may make its worlds with
/// others.
pub(super) fn once(seed: u64, suite: &impl Fn(u64) -> Outcome) -> Outcome {
    let held = held_worlds();
    let fails = |message| Err(Failure { seed, message, trace: String::new() });
    let mut outcome = quietly(|| catch_unwind(AssertUnwindSafe(|| suite(seed))))
        .unwrap_or_else(|payload| fails(panic_message(&*payload)));
    if outcome.is_ok() && held_worlds() > held {
        outcome = fails("a handle of the world is never dropped, and keeps its memory".to_owned());
    }
    outcome.map_err(|failure| Failure { seed, ..failure })
}

pub(super) type Sites = Vec<(&'static Location<'static>, SiteKind)>;

/// What the worlds of this OS thread are made with.
#[derive(Default)]
pub(super) struct Session {
    pub(super) tracing: bool,
    pub(super) recording: bool,
    pub(super) mutation: Option<Mutation>,
    /// The kind of memory of every world, whatever its shape says.
    coherence: Option<Coherence>,
    pub(super) sites: Sites,
    pub(super) tally: Tally,
}

thread_local! {
    static SESSION: RefCell<Session> = RefCell::default();
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The parts of the session that a new world copies.
pub(super) struct Orders {
    pub(super) tracing: bool,
    pub(super) recording: bool,
    pub(super) mutation: Option<Mutation>,
    pub(super) coherence: Option<Coherence>,
}

pub(super) fn session() -> Orders {
    SESSION.with_borrow(|s| Orders {
        tracing: s.tracing,
        recording: s.recording,
        mutation: s.mutation,
        coherence: s.coherence,
    })
}

/// Runs `work` with all worlds on this kind of memory.
pub(super) fn on<R>(coherence: Coherence, work: impl FnOnce() -> R) -> R {
    struct Back(Option<Coherence>);
    impl Drop for Back {
        fn drop(&mut self) {
            SESSION.with_borrow_mut(|session| session.coherence = self.0);
        }
    }
    let _back = Back(SESSION.with_borrow_mut(|session| session.coherence.replace(coherence)));
    work()
}

pub(super) fn with_session<R>(change: impl FnOnce(&mut Session) -> R) -> R {
    SESSION.with_borrow_mut(change)
}

pub(super) fn keep_sites(sites: Sites) {
    if !sites.is_empty() {
        SESSION.with_borrow_mut(|session| {
            for site in sites {
                if !session.sites.contains(&site) {
                    session.sites.push(site);
                }
            }
        });
    }
}

/// Runs `work` with panics kept for [`panic_message`] instead of printed.
pub(super) fn quietly<R>(work: impl FnOnce() -> R) -> R {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if QUIET.get() {
                LAST_PANIC.set(Some(info.to_string()));
            } else {
                print(info);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = work();
    QUIET.set(before);
    result
}

/// What a panic said, and where.
pub(super) fn panic_message(payload: &(dyn Any + Send)) -> String {
    LAST_PANIC.take().unwrap_or_else(|| {
        let text = payload.downcast_ref::<&str>().map(ToString::to_string);
        text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
    })
}
