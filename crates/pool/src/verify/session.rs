//! A service from its beginning to its end: two clients and a proxy meet by name, agree once or twice on what they exchange, do a step of
//! each exchange, and part. One of them, the victim, dies, stops or gives up at any memory operation; while one gives up, another may stop.
//!
//! The oracle knows what befalls whom. A process pulls the right sums, or its error names one that died, stopped or gave up. No process
//! reports that something is missing or damaged, and at the end nothing is left but what the dead have left.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use polder_kernels::Dtype;
use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Bell, Coherence, Memory};
use polder_schedule::{Exchange, Shard};

use super::group::Dice;
use super::stage::{PATIENCE, expect_all_clean, pool_of, shape_of, small};
use crate::deviation::Deviation;
use crate::format::{Layout, Superblock};
use crate::group::Interrupt;
use crate::pool::locked;
use crate::service::{Agreement, Client, ClientSession, ProxySession, ServiceOptions};
use crate::wait::Patience;
use crate::{Member, Pool, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "clients and a proxy meet, exchange twice and part; survivors are told who died, stopped or gave up, however early";
    vec![Suite::new("session", about, session).mutates(&["service/session.rs"])]
}

/// Protocols that are known to be wrong.
pub(super) fn canaries() -> Vec<Suite> {
    let missing = "a process that finds no part of another, which gave up, says that the part is missing";
    let silent = "a process that fails the last barrier before an exchange says so where the others do not look any more";
    let missed = "the death of a proxy of which nothing is awaited fails those that leave";
    vec![
        Suite::new("session-idle-proxy", missed, |seed| {
            Deviation::IdleProxyIsMissed.during(|| session(seed))
        }),
        Suite::new("session-missing-part", missing, |seed| {
            Deviation::MissingPartIsTheError.during(|| session(seed))
        }),
        Suite::new("session-silent-end", silent, |seed| Deviation::GivesUpInSilence.during(|| session(seed))),
    ]
}

const NAME: &str = "/sums";
const CLIENTS: usize = 2;
/// Clients and proxies.
const ALL: usize = CLIENTS + 1;
const HOSTS: u16 = 3;
/// Processes of a host.
const PROCESSES: u16 = ALL as u16;
/// Of the pool.
const BELLS: u32 = (HOSTS * PROCESSES) as u32;
/// Enough for the extents of the group and the parts of two exchanges, with one that each host keeps.
const CHUNKS: u32 = 12;
/// Bytes of staging: two lines, each for what client 0 tells of two shards.
const STAGING: u64 = 128;
/// How long a process waits for the others: shorter than the longest pauses, longer than anything that goes on.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The same where one of them may never join, because those that join look every millisecond.
const TIMEOUT_OF_JOIN: Duration = Duration::from_millis(30);
/// Process ids: of the first process of the service, and of the judge.
const FIRST: u32 = 100;
const JUDGE: u32 = 200;
const BOOT: u64 = 7;

/// The pool, with no byte to spare.
static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| pool_of(small(HOSTS, PROCESSES), CHUNKS));

/// What befalls the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Crash(Crash),
    /// It does not want to wait any longer.
    GivesUp,
}

/// What a process is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Join,
    Begin(usize),
    Step(usize),
    Leave,
}

impl Act {
    /// One of the memory operations that it takes if no wait is long.
    fn operation(self, dice: &mut Dice) -> u64 {
        match self {
            Self::Join => dice.roll(900),
            // Half of them fall between the two barriers, where all look for the parts of the others, or near it.
            Self::Begin(_) if dice.roll(2) == 0 => 200 + dice.roll(250),
            Self::Begin(_) => dice.roll(600),
            Self::Step(_) => dice.roll(60),
            Self::Leave => dice.roll(300),
        }
    }
}

/// One schedule, outside the memory.
struct Script {
    /// The host of each process.
    hosts: &'static [u16; ALL],
    kernels: Kernels,
    /// What is exchanged, one agreement after the other.
    exchanges: Vec<Agreement>,
    fate: Option<Fate>,
    victim: usize,
    /// The act in which the fate comes, or soon after it.
    near: Act,
    /// Memory operations of this act, or questions whether to give up, after which the fate comes.
    after: u64,
    /// Another that stops for a while in the same act, and after how many memory operations.
    slow: Option<(usize, u64)>,
    /// Whether the process of a session that has ended stays in the pool.
    stays: bool,
    /// How often the victim is asked in vain whether to give up.
    left: Arc<Mutex<u64>>,
    /// The processes that did all they were to do, and those that did not.
    finished: RefCell<Vec<usize>>,
    failed: RefCell<Vec<(usize, PoolError)>>,
    /// What keeps processes in the pool whose sessions have ended.
    pools: RefCell<Vec<Arc<Pool<ModelMemory>>>>,
}

fn session(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 17);
    let script = Rc::new(Script::new(&mut dice));
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    // Besides each process's own, one for each that gives signs of life.
    let shape = Shape { bells: 2 * BELLS, ..shape_of(&POOL.1, script.kernels, coherence) };
    let mut world = World::new(seed, shape);
    for rank in 0..ALL {
        play(&mut world, &script, rank);
    }
    judge(&mut world, &script);
    world.run()
}

impl Script {
    fn new(dice: &mut Dice) -> Self {
        const HOSTS: [[u16; ALL]; 5] = [[0, 1, 2], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]];
        let fates = [
            None,
            Some(Fate::Crash(Crash::Process)),
            Some(Fate::Crash(Crash::Host)),
            Some(Fate::Crash(Crash::Pause)),
            Some(Fate::Crash(Crash::Pause)),
            Some(Fate::GivesUp),
            Some(Fate::GivesUp),
            Some(Fate::GivesUp),
        ];
        let fate = fates[dice.roll(8) as usize];
        let count = 1 + dice.roll(2) as usize;
        let mut agreed = || {
            let shard = |tensor| Shard { tensor, start: 0, bytes: 8, proxy: 0 };
            let shards = (0..1 + dice.roll(2) as u32).map(shard).collect();
            Agreement::new(Exchange::new(shards, 1).expect("one proxy"), Dtype::F64)
        };
        let exchanges = (0..count).map(|_| agreed()).collect();
        let index = dice.roll(count as u64) as usize;
        let acts = [Act::Begin(index), Act::Begin(index), Act::Step(index), Act::Leave, Act::Join];
        // A process that stops while it joins is what the suite `join` is about.
        let near = acts[dice.roll(if fate == Some(Fate::Crash(Crash::Pause)) { 4 } else { 5 }) as usize];
        let victim = dice.roll(ALL as u64) as usize;
        let slow = (fate == Some(Fate::GivesUp) && near != Act::Join && dice.roll(4) > 0)
            .then(|| ((victim + 1 + dice.roll(2) as usize) % ALL, near.operation(dice)));
        Self {
            hosts: &HOSTS[dice.roll(5) as usize],
            kernels: dice.kernels(),
            exchanges,
            fate,
            victim,
            near,
            after: if fate == Some(Fate::GivesUp) { dice.roll(8) } else { near.operation(dice) },
            slow,
            stays: dice.roll(2) == 0,
            left: Arc::new(Mutex::new(u64::MAX)),
            finished: RefCell::default(),
            failed: RefCell::default(),
            pools: RefCell::default(),
        }
    }

    fn slot(&self, rank: usize) -> u16 {
        self.hosts[..rank].iter().filter(|&&host| host == self.hosts[rank]).count() as u16
    }

    fn timeout(&self) -> Duration {
        if self.near == Act::Join { TIMEOUT_OF_JOIN } else { TIMEOUT }
    }

    /// A process that gives no sign of life for so long is dead.
    fn silence(&self) -> Duration {
        // Under one kernel signs of life are not asked for.
        if self.kernels == Kernels::Shared { Duration::from_micros(2) } else { self.timeout() / 4 }
    }

    /// How long a call of the pool waits.
    fn patience(&self) -> Duration {
        // A process waits so long for a claim that a dead one has begun on another host, and then looks for other room.
        if self.kills() { self.timeout() / 6 } else { PATIENCE }
    }

    fn options(&self) -> (ServiceOptions, u64) {
        let patience = Patience { spins: 1, yields: 1, nap: self.timeout() / 60 };
        (ServiceOptions { timeout: self.timeout(), patience, ..ServiceOptions::default() }, STAGING)
    }

    /// `rank` comes to an act.
    fn reach(&self, memory: &ModelMemory, rank: usize, act: Act) {
        memory.note(|| format!("process {rank} comes to {act:?}"));
        if act != self.near {
            return;
        }
        if let Some((_, after)) = self.slow.filter(|(slow, _)| *slow == rank) {
            memory.crash_after(Crash::Pause, after);
        }
        match self.fate.filter(|_| rank == self.victim) {
            Some(Fate::Crash(crash)) => memory.crash_after(crash, self.after),
            Some(Fate::GivesUp) => *locked(&self.left) = self.after,
            None => {}
        }
    }

    /// What the waits of `rank` ask.
    fn interrupt(&self, rank: usize) -> Option<Interrupt> {
        let left = Arc::clone(&self.left);
        let asked = move || {
            let mut left = locked(&left);
            let is_over = *left == 0;
            *left = left.saturating_sub(1);
            is_over
        };
        (rank == self.victim).then(|| Box::new(asked) as Interrupt)
    }

    /// Whether the victim dies.
    fn kills(&self) -> bool {
        matches!(self.fate, Some(Fate::Crash(Crash::Process | Crash::Host)))
    }

    /// Whether `rank` is the victim, or dies with it.
    fn is_victim(&self, rank: usize) -> bool {
        match self.fate {
            None => false,
            Some(Fate::Crash(Crash::Host)) => self.hosts[rank] == self.hosts[self.victim],
            Some(_) => rank == self.victim,
        }
    }

    /// The process that stops for a while.
    fn stops(&self) -> Option<usize> {
        match self.fate {
            Some(Fate::Crash(Crash::Pause)) => Some(self.victim),
            _ => self.slow.map(|(slow, _)| slow),
        }
    }

    /// Whether `rank` may end with `error`: it names the victim, or one that cannot go on because of it.
    fn allows(&self, rank: usize, error: &PoolError) -> bool {
        let rank_of = |pid: u32| (pid - FIRST) as usize;
        let is_victim = self.is_victim(rank);
        if self.near == Act::Join && self.fate.is_some() {
            // A process that does not find all others leaves. To those that have found it, it is late, or has died.
            let gone = |rank: usize| self.is_victim(rank) || self.has_failed(rank);
            match error {
                PoolError::Absent { rank, .. } => return gone(*rank),
                PoolError::PeerDead { peer, .. } | PoolError::Timeout { peer, .. } => {
                    return gone(rank_of(peer.pid));
                }
                _ => {}
            }
        }
        // A client looks first whether a proxy is there, and then what it has said of its end.
        let is_proxy_that_left = |rank| !self.stays && rank >= CLIENTS && self.has_failed(rank);
        match (error, self.fate) {
            (PoolError::PeerDead { peer, .. }, Some(_)) => {
                let rank = rank_of(peer.pid);
                self.kills() && self.is_victim(rank) || is_proxy_that_left(rank)
            }
            // Another process of its host holds the lock, and waits for a claim of the victim's.
            (PoolError::Timeout { what: "a host-local lock", .. }, _) if self.kills() => true,
            (PoolError::Timeout { peer, .. }, Some(_)) => self.stops().is_some_and(|stops| {
                // A process that stops may hold a lock of its host.
                stops == rank || self.hosts[rank_of(peer.pid)] == self.hosts[stops]
            }),
            // It left the group when it found in the parts what had befallen another.
            (PoolError::GaveUp { peer, .. }, Some(_)) => self.has_failed(rank_of(peer.pid)),
            (PoolError::Interrupted { .. }, Some(Fate::GivesUp)) => is_victim,
            _ => false,
        }
    }

    /// `rank` has come to its end.
    fn end(&self, rank: usize, result: Result<(), PoolError>) {
        match result {
            Ok(()) => self.finished.borrow_mut().push(rank),
            Err(error) => self.failed.borrow_mut().push((rank, error)),
        }
    }

    fn has_failed(&self, rank: usize) -> bool {
        self.failed.borrow().iter().any(|(failed, _)| *failed == rank)
    }

    fn has_ended(&self, rank: usize) -> bool {
        self.finished.borrow().contains(&rank) || self.has_failed(rank)
    }

    /// Whether all have ended that go on.
    fn is_over(&self) -> bool {
        let goes_on = |rank| self.stops() != Some(rank) && !(self.kills() && self.is_victim(rank));
        (0..ALL).all(|rank| self.has_ended(rank) || !goes_on(rank))
    }
}

/// Adds a process, and its signs of life where others go by them.
fn play(world: &mut World, script: &Rc<Script>, rank: usize) {
    let (host, slot) = (script.hosts[rank], script.slot(rank));
    let (silence, timeout) = (script.silence(), script.patience());
    let member = Member { pid: FIRST + rank as u32, timeout, silence, ..Member::new(host, BOOT) };
    let pool = world.setup_as(host, slot, |memory| attach(memory, member));
    if script.kernels == Kernels::OnePerHost {
        let (script, pool) = (Rc::clone(script), Arc::clone(&pool));
        world.spawn(host, slot, move |memory| {
            let bell = Bell(BELLS + u32::from(host * PROCESSES + slot));
            while !script.is_over() && (script.stays || !script.has_ended(rank)) {
                pool.beat().expect("the host is ours");
                let seen = memory.announce_sleep(bell);
                memory.sleep(bell, seen, memory.now() + silence / 8);
            }
        });
    }
    let script = Rc::clone(script);
    world.spawn(host, slot, move |memory| {
        let done = match rank {
            CLIENTS.. => sum(&script, &memory, &pool, rank),
            _ => train(&script, &memory, &pool, rank),
        };
        script.end(rank, done);
        if script.stays {
            script.pools.borrow_mut().push(pool);
        }
    });
}

fn train(
    script: &Script,
    memory: &ModelMemory,
    pool: &Arc<Pool<ModelMemory>>,
    rank: usize,
) -> Result<(), PoolError> {
    let interrupt = || script.interrupt(rank);
    script.reach(memory, rank, Act::Join);
    let pool = Arc::clone(pool);
    let mut session =
        ClientSession::join_staging(pool, NAME, rank, (CLIENTS, 1), script.options(), interrupt())?;
    for (index, agreed) in script.exchanges.iter().enumerate() {
        script.reach(memory, rank, Act::Begin(index));
        let client = session.begin(agreed, interrupt())?;
        script.reach(memory, rank, Act::Step(index));
        exchange(client, rank, index)?;
    }
    script.reach(memory, rank, Act::Leave);
    let left = session.leave();
    let only_proxies_die = script.kills() && (0..CLIENTS).all(|client| !script.is_victim(client));
    // The proxy may die with a sum that only this client has seen, from the same caches: then the other client ends.
    let is_right = matches!(left, Ok(()) | Err(PoolError::GaveUp { .. }));
    assert!(is_right || !only_proxies_die, "nothing is awaited of a proxy any more: {left:?}");
    left
}

/// One step: the sums are those of this exchange.
fn exchange(client: &mut Client<ModelMemory>, rank: usize, index: usize) -> Result<(), PoolError> {
    let shards = client.agreed().exchange.shards().len();
    let value = |client: usize, shard: usize| (100 * index + 10 * shard + 2 * client + 1) as f64;
    for shard in 0..shards {
        client.push(shard as u32, &value(rank, shard).to_le_bytes())?;
    }
    let mut pulled = 0;
    while let Some(shard) = client.wait()? {
        let mut bytes = [0; 8];
        client.pull(shard, &mut bytes)?;
        let mean = (0..CLIENTS).map(|client| value(client, shard as usize)).sum::<f64>() / CLIENTS as f64;
        assert_eq!(f64::from_le_bytes(bytes), mean, "shard {shard} of exchange {index}");
        pulled += 1;
    }
    assert_eq!(pulled, shards, "each shard is handed out once");
    Ok(())
}

fn sum(
    script: &Script,
    memory: &ModelMemory,
    pool: &Arc<Pool<ModelMemory>>,
    rank: usize,
) -> Result<(), PoolError> {
    script.reach(memory, rank, Act::Join);
    let proxy = (rank - CLIENTS) as u16;
    let (pool, interrupt) = (Arc::clone(pool), script.interrupt(rank));
    let session = ProxySession::join_staging(pool, NAME, proxy, (CLIENTS, 1), script.options(), interrupt)?;
    script.reach(memory, rank, Act::Begin(0));
    let steps = Cell::new(0);
    session.serve(|| {
        let step = steps.replace(steps.get() + 1);
        script.reach(memory, rank, Act::Step(step));
        // It is not asked again before the act that follows, so that what is to come there may come a little earlier.
        let is_last = step + 1 == script.exchanges.len();
        script.reach(memory, rank, if is_last { Act::Leave } else { Act::Begin(step + 1) });
        script.interrupt(rank)
    })
}

/// At the end nothing is left, but what the dead have left; once that is destroyed, all chunks are free.
fn judge(world: &mut World, script: &Rc<Script>) {
    let memories: Vec<_> = (0..HOSTS).map(|host| world.memory(host, 0)).collect();
    let script = Rc::clone(script);
    world.check(0, move |_| {
        let finished = script.finished.borrow().len();
        assert!(script.fate.is_some() || finished == ALL, "only {finished} finished");
        for (rank, error) in &*script.failed.borrow() {
            let Script { fate, victim, near, .. } = &*script;
            let is_allowed = script.allows(*rank, error);
            assert!(
                is_allowed,
                "process {rank} ends with {error:?}, and {fate:?} of {victim} near {near:?} is no reason"
            );
        }
        script.pools.borrow_mut().clear();
        if script.fate == Some(Fate::Crash(Crash::Host)) {
            // What a host that boots again puts right is what the suites `join` and `adoption` are about.
            return;
        }
        let (timeout, silence) = (PATIENCE, Duration::from_micros(2));
        let attach = |(host, memory)| {
            attach(memory, Member { pid: JUDGE, timeout, silence, ..Member::new(host, BOOT) })
        };
        let pools: Vec<_> = (0..).zip(memories).map(attach).collect();
        for left in pools[0].list("").expect("the model has no faults") {
            let of = left.name.rsplit_once('/').and_then(|(_, rank)| rank.parse().ok());
            assert!(script.kills() && of == Some(script.victim), "{} is left", left.name);
            pools[0].destroy(&left.name).expect("it is there");
        }
        expect_all_clean(&pools);
    });
}

#[expect(
    clippy::arc_with_non_send_sync,
    reason = "a session shares its pool; all threads of a world run on one"
)]
fn attach(memory: ModelMemory, member: Member) -> Arc<Pool<ModelMemory>> {
    let (superblock, layout) = &*POOL;
    Arc::new(Pool::attach_in(memory, *superblock, layout.clone(), member).expect("the host is ours"))
}
