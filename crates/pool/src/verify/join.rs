//! Ranks that find each other by name: they come at any time, compute, leave, and meet again under the same name; processes
//! and hosts die or stop at any memory operation, and come back.
//!
//! The oracle is beside the pool. Each meeting of a rank has a number, and what the ranks sum up holds the numbers of all of
//! them, each in bits of its own: the process that has a sum knows whose it is.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use polder_kernels::{Dtype, Op};
use polder_mem::model::{Change, Crash, Harmless, Kernels, ModelMemory, Outcome, Suite, ThreadId, World};
use polder_mem::{Coherence, Memory};

use super::group::{Dice, harmless, tiny};
use super::stage::{attached, expect_all_clean, pool_of, shape_of};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Superblock};
use crate::group::{Group, GroupOptions};
use crate::wait::Patience;
use crate::{Member, Pool, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "ranks meet by name, take more staging, compute and part, twice; who dies comes back and is met again";
    // A host that boots again did die here: its scene leaves out that it is fenced.
    let join = |seed| Deviation::SilenceIsEnough.during(|| join(seed));
    vec![
        Suite::new("join", about, join)
            .mutates(&["group/join.rs", "group/staging.rs", "object.rs"])
            .harmless(HARMLESS),
    ]
}

const HARMLESS: &[Harmless] = &[
    harmless("group/join.rs", "one look at an acknowledgement", Change::Drop),
    harmless("group/join.rs", "one look at an acknowledgement", Change::Weaken),
    harmless("object.rs", "bytes that nobody fills", Change::Drop),
    harmless("object.rs", "bytes that nobody fills", Change::Weaken),
];

const NAME: &str = "/ranks";
const HOSTS: u16 = 2;
/// Processes of a host: two ranks or a rank and its rival, and the process that comes in the place of either.
const PROCESSES: u16 = 4;
/// Enough for what all ranks hold, held before, and left when they died; too few for a host to keep an empty one.
const CHUNKS: u32 = 15;
/// Meetings in which every rank takes part from the beginning to the end.
const MEETINGS: usize = 2;
/// How long a rank waits for the others: many looks, and few enough for a schedule.
const TIMEOUT: Duration = Duration::from_millis(30);
/// Process ids: of the ranks, of those that come in their places, of another that wants to be one of them, of anybody else.
const FIRST: u32 = 100;
const SECOND: u32 = 200;
const RIVAL: u32 = 300;
const HELPER: u32 = 400;
/// Bits of a word in which one rank's number and its index stand.
const FIELD: u32 = 20;
const INDICES: u64 = 256;
/// An object that takes more than half of all chunks, so that the first are among them.
const SUCCESSOR: &str = "/successor";
const SUCCESSOR_BYTES: u64 = 16 << 10;

/// The pool, with no byte to spare.
static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry {
        hosts: HOSTS,
        processes: PROCESSES,
        names: 61,
        levels: 6,
        chunk_bytes: 2048,
        // Too few for three ranks with all the staging.
        opens: 5,
        keepers: 1,
    };
    pool_of(geometry, CHUNKS)
});

fn options() -> GroupOptions {
    let patience = Patience { spins: 1, yields: 1, nap: TIMEOUT / 8 };
    GroupOptions { direct_bytes: 64, segment_bytes: 512, timeout: TIMEOUT, patience, ..tiny(2048) }
}

/// One schedule.
struct Scene {
    world: World,
    kernels: Kernels,
    witness: Rc<Witness>,
    /// Who may die.
    victim: Option<ThreadId>,
}

/// What everybody did, outside the memory.
#[derive(Default)]
struct Witness {
    /// The host of each rank.
    hosts: &'static [u16],
    /// Words that are summed up.
    count: u64,
    /// What befalls one of them, and which.
    crash: Option<Crash>,
    victim: usize,
    /// The rank that another process wants to be as well, and its host.
    rival: Option<(usize, u16)>,
    /// The boot of each host.
    boots: [Cell<u64>; HOSTS as usize],
    /// Whose each number is.
    numbers: RefCell<Vec<usize>>,
    /// The extents of the group that an extent belongs to.
    extents: RefCell<BTreeMap<u64, BTreeSet<u64>>>,
    /// How many ranks have come to the end of a meeting, by the numbers of the meeting.
    meetings: RefCell<BTreeMap<Vec<u64>, usize>>,
    /// The ranks, one bit each, of which the process lines say that they died.
    known: Cell<u64>,
    /// Whether a rank was told that somebody is gone.
    told: Cell<bool>,
    /// Whether another host has put an object where both ranks staged.
    placed: Cell<bool>,
    /// How often a rank died or gave up.
    losses: Cell<u64>,
}

impl Witness {
    /// A number for the next meeting of `rank`.
    fn number(&self, rank: usize) -> u64 {
        let mut numbers = self.numbers.borrow_mut();
        numbers.push(rank);
        numbers.len() as u64
    }

    /// An extent belongs to one group.
    fn join(&self, marks: &BTreeSet<u64>) {
        assert_eq!(marks.len(), self.hosts.len(), "an extent of each rank");
        let mut extents = self.extents.borrow_mut();
        for &mark in marks {
            let group = extents.entry(mark).or_insert_with(|| marks.clone());
            assert_eq!(group, marks, "extent {mark:#x} is in two groups");
        }
    }

    /// A rank has all sums of the meeting of these numbers. A number is of one meeting.
    fn finish(&self, rank: usize, number: u64, numbers: &[u64]) {
        assert_eq!(numbers[rank], number, "rank {rank} did not meet itself");
        let known = self.numbers.borrow();
        for (rank, &number) in numbers.iter().enumerate() {
            let whose = (number as usize).checked_sub(1).and_then(|index| known.get(index));
            assert_eq!(whose, Some(&rank), "{numbers:?}: {number} is not of rank {rank}");
        }
        let mut meetings = self.meetings.borrow_mut();
        for met in meetings.keys() {
            let differs = met != numbers && met.iter().any(|number| numbers.contains(number));
            assert!(!differs, "one rank met {met:?}, another {numbers:?}");
        }
        *meetings.entry(numbers.to_vec()).or_default() += 1;
    }

    /// What a rank may be told: that another process is this rank, where there is one; or who is gone, while somebody is.
    fn expect(&self, rank: usize, error: PoolError) {
        if self.rival.is_some_and(|(rival, _)| rival == rank) {
            match error {
                // Where both are of one host, the name may take all its slots.
                PoolError::RankTaken { .. }
                | PoolError::Exists { .. }
                | PoolError::DirectoryFull { .. }
                | PoolError::Absent { .. }
                | PoolError::Timeout { .. } => return,
                _ => {}
            }
        }
        let is_fine = match &error {
            PoolError::PeerDead { peer, .. } => self.kills(peer.pid) || self.has_lost(),
            PoolError::Absent { .. } => true,
            PoolError::Timeout { peer, .. } => self.kills(peer.pid) || !self.comes_back(),
            // Only a third is told by another than the process that stopped.
            PoolError::GaveUp { .. } => self.hosts.len() > 2 || !self.comes_back(),
            _ => false,
        };
        assert!(is_fine && self.crash.is_some(), "rank {rank}: {error}");
        self.told.set(true);
    }

    /// Whether the crash kills this process.
    fn kills(&self, pid: u32) -> bool {
        let host = match pid {
            FIRST..SECOND => self.hosts.get((pid - FIRST) as usize).copied(),
            _ => self.rival.filter(|_| pid == RIVAL).map(|(_, host)| host),
        };
        match self.crash {
            Some(Crash::Process) => pid == FIRST + self.victim as u32,
            Some(Crash::Host) => host == Some(self.hosts[self.victim]),
            _ => false,
        }
    }

    fn is_complete(&self, numbers: &[u64]) -> bool {
        self.meetings.borrow()[numbers] == self.hosts.len()
    }

    fn is_over(&self) -> bool {
        let meetings = self.meetings.borrow();
        meetings.values().filter(|&&ranks| ranks == self.hosts.len()).count() >= MEETINGS
    }

    /// Whether the process that is gone comes back, so that a rank which was told so tries again.
    fn comes_back(&self) -> bool {
        self.crash != Some(Crash::Pause)
    }

    /// Whether a rank gave up and left, which looks as if it had died.
    fn has_lost(&self) -> bool {
        !self.comes_back() && self.losses.get() > 0
    }

    /// A rank has given up, or somebody comes because a process of `host` died.
    fn lose(&self, host: u16) {
        self.losses.set(self.losses.get() + 1);
        if self.crash == Some(Crash::Host) {
            self.boots[usize::from(host)].set(1);
        }
    }
}

/// Two or three ranks on one or two hosts.
fn join(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 7);
    let mut scene = Scene::new(seed, &mut dice);
    for rank in 0..scene.witness.hosts.len() {
        scene.play(rank, &mut dice);
    }
    if let Some((rank, host)) = scene.witness.rival {
        scene.compete(rank, host);
    }
    if scene.witness.hosts == [0, 0] && scene.witness.crash.is_none() {
        scene.succeed();
    }
    scene.judge();
    let outcome = scene.world.run();
    let died = scene.victim.is_some_and(|victim| scene.world.crashed(victim));
    assert!(
        outcome.is_err() || died || !scene.witness.comes_back() || !scene.witness.told.get(),
        "nobody died"
    );
    outcome
}

impl Scene {
    fn new(seed: u64, dice: &mut Dice) -> Self {
        let layout = &POOL.1;
        let hosts: &[u16] = [&[0, 1][..], &[0, 1], &[0, 0], &[0, 1, 1]][dice.roll(4) as usize];
        let crashes = [None, None, Some(Crash::Pause), Some(Crash::Host)];
        let crash = crashes.get(dice.roll(8) as usize).copied().unwrap_or(Some(Crash::Process));
        let kernels = dice.kernels_beside(crash);
        let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
        let shape = shape_of(layout, kernels, coherence);
        let witness = Witness {
            hosts,
            count: [1, 3, 8, 128][dice.roll(4) as usize],
            crash,
            victim: dice.roll(hosts.len() as u64) as usize,
            rival: (hosts == [0, 1] && dice.roll(3) == 0)
                .then(|| (dice.roll(2) as usize, dice.roll(2) as u16)),
            ..Witness::default()
        };
        Self { world: World::new(seed, shape), kernels, witness: Rc::new(witness), victim: None }
    }

    /// Adds a rank, and the process that comes in its place when it dies.
    fn play(&mut self, rank: usize, dice: &mut Dice) {
        let (host, kernels) = (self.witness.hosts[rank], self.kernels);
        let slot = self.witness.hosts[..rank].iter().filter(|&&other| other == host).count() as u16;
        let (pid, witness) = (FIRST + rank as u32, Rc::clone(&self.witness));
        // Who died in the middle of its first words would be waited for as long as nobody may be silent.
        let is_early = kernels == Kernels::OnePerHost || dice.roll(4) != 0;
        let early = is_early
            .then(|| self.world.setup_as(host, slot, |memory| attach(memory, kernels, host, pid, &witness)));
        let thread = self.world.spawn(host, slot, move |memory| {
            let pool = early.unwrap_or_else(|| attach(memory, kernels, host, pid, &witness));
            meet(&pool, rank, &witness);
        });
        if let Some(crash) = self.witness.crash.filter(|_| self.witness.victim == rank) {
            self.world.crash_within(thread, crash, 2000);
            self.victim = Some(thread);
        }
        self.come_back(thread, rank, (host, slot), dice);
    }

    /// When `thread` dies, its rank is another process: at its slot, at another, or on the other host while a process of its
    /// own host puts right what it left.
    fn come_back(&mut self, thread: ThreadId, rank: usize, (host, slot): (u16, u16), dice: &mut Dice) {
        let (kernels, moves) = (self.kernels, dice.roll(3) == 0);
        let witness = Rc::clone(&self.witness);
        let (now, spare) = match moves {
            true => (1 - host, slot + 2),
            false => (host, slot + 2 * dice.roll(2) as u16),
        };
        self.world.spawn_after_crash(thread, now, spare, move |memory| {
            witness.lose(host);
            while moves && witness.known.get() >> rank & 1 == 0 {
                memory.pause();
            }
            let pool = attach(memory, kernels, now, SECOND + rank as u32, &witness);
            meet(&pool, rank, &witness);
        });
        let witness = Rc::clone(&self.witness);
        if moves {
            self.world.spawn_after_crash(thread, host, slot, move |memory| {
                witness.lose(host);
                let pool = attach(memory, kernels, host, HELPER, &witness);
                witness.known.set(witness.known.get() | 1 << rank);
                while !witness.is_over() {
                    pool.memory().pause();
                }
            });
        }
    }

    /// Another process that wants to be `rank`.
    fn compete(&mut self, rank: usize, host: u16) {
        let (kernels, witness) = (self.kernels, Rc::clone(&self.witness));
        let pool = self.world.setup_as(host, 1, |memory| attach(memory, kernels, host, RIVAL, &witness));
        self.world.spawn(host, 1, move |_| meet(&pool, rank, &witness));
    }

    /// The host without ranks puts an object in the place of both ranks, once they have left.
    fn succeed(&mut self) {
        let (kernels, witness) = (self.kernels, Rc::clone(&self.witness));
        let pool = self.world.setup_as(1, 0, |memory| attach(memory, kernels, 1, HELPER, &witness));
        self.world.spawn(1, 0, move |_| {
            while !witness.is_over() {
                pool.memory().pause();
            }
            for _ in 0..20 {
                match pool.create(SUCCESSOR, SUCCESSOR_BYTES) {
                    Ok(object) => {
                        pool.close(object);
                        return witness.placed.set(true);
                    }
                    Err(PoolError::Full { .. }) => nap(&pool),
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }

    /// At the end the process that comes can have any rank, nothing is left, and all chunks are free.
    fn judge(&mut self) {
        let (kernels, witness) = (self.kernels, Rc::clone(&self.witness));
        let memories: Vec<_> = (0..HOSTS).map(|host| self.world.memory(host, 0)).collect();
        self.world.check(0, move |_| {
            let attach = |(host, memory)| attach(memory, kernels, host, HELPER, &witness);
            let pools: Vec<_> = (0..).zip(memories).map(attach).collect();
            if witness.placed.get() {
                let object = pools[1].open(SUCCESSOR).expect("its header is whole");
                let mut bytes = vec![0; SUCCESSOR_BYTES as usize];
                object.read_at(pools[1].memory(), 0, &mut bytes).expect("inside");
                assert!(
                    bytes.iter().all(|&byte| byte == 0),
                    "what a rank staged reached another host's object"
                );
                pools[1].discard(object).expect("it is there");
            }
            for rank in 0..witness.hosts.len() {
                let pool = Arc::clone(&pools[rank % 2]);
                let options = GroupOptions { timeout: Duration::ZERO, ..options() };
                let alone = Group::join(pool, NAME, rank, witness.hosts.len(), options, None).err();
                // The others do not come, or have not come again since they died.
                let is_free = matches!(alone, Some(PoolError::Absent { .. } | PoolError::PeerDead { .. }));
                assert!(is_free, "rank {rank} is taken: {alone:?}");
            }
            assert_eq!(pools[0].list(""), Ok(vec![]));
            expect_all_clean(&pools);
        });
    }
}

fn attach(
    memory: ModelMemory,
    kernels: Kernels,
    host: u16,
    pid: u32,
    witness: &Witness,
) -> Arc<Pool<ModelMemory>> {
    let boot = 7 + witness.boots[usize::from(host)].get();
    attached(&POOL, memory, kernels == Kernels::Shared, Member { pid, ..Member::new(host, boot) })
}

/// Meets the other ranks until all have met twice.
fn meet(pool: &Arc<Pool<ModelMemory>>, rank: usize, witness: &Witness) {
    while !witness.is_over() {
        let losses = witness.losses.get();
        match compute(pool, rank, witness) {
            Ok(numbers) => {
                while !witness.is_complete(&numbers) && witness.losses.get() == losses {
                    pool.memory().pause();
                }
            }
            Err(error) => {
                witness.expect(rank, error);
                if !witness.comes_back() {
                    break;
                }
                nap(pool);
            }
        }
    }
    if !witness.comes_back() {
        witness.lose(pool.member().host);
    }
}

/// Lets others have what this rank was refused.
fn nap(pool: &Pool<ModelMemory>) {
    let memory = pool.memory();
    let bell = pool.layout().bell(pool.member().host, memory.slot());
    let seen = memory.announce_sleep(bell);
    memory.sleep(bell, seen, memory.now() + TIMEOUT / 4);
}

/// Joins, sums up twice, and leaves. Returns the numbers of everybody's meeting.
fn compute(pool: &Arc<Pool<ModelMemory>>, rank: usize, witness: &Witness) -> Result<Vec<u64>, PoolError> {
    let mut group = Group::join(Arc::clone(pool), NAME, rank, witness.hosts.len(), options(), None)?;
    let marks = group.marks();
    witness.join(&marks);
    let number = witness.number(rank);
    let first = sum(&mut group, number, witness.count, 0)?;
    let second = sum(&mut group, number, witness.count, 1)?;
    assert_eq!(first, second, "rank {rank} met others in the same group");
    if witness.rival.is_some() {
        let own = pool.open(&format!("{NAME}/{rank}")).expect("the rank is there");
        let mark = u64::from(own.owner()) << 56 | own.generation();
        pool.close(own);
        assert!(marks.contains(&mark), "another process has taken rank {rank} away");
    }
    witness.finish(rank, number, &first);
    Ok(first)
}

/// Sums up as many words as all agreed on. Returns whose numbers each of them holds.
fn sum(
    group: &mut Group<ModelMemory>,
    number: u64,
    count: u64,
    operation: u64,
) -> Result<Vec<u64>, PoolError> {
    let (rank, ranks) = (group.rank() as u32, group.size() as u32);
    let indices = operation * count..(operation + 1) * count;
    let field = |rank: u32, number: u64, index: u64| (number * INDICES + index) << (FIELD * rank);
    let mut data: Vec<u8> =
        indices.clone().flat_map(|index| field(rank, number, index).to_le_bytes()).collect();
    group.all_reduce(Op::Sum, Dtype::U64, &mut data)?;
    let words: Vec<u64> =
        data.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
    let number_of = |rank| (words[0] >> (FIELD * rank) & ((1 << FIELD) - 1)) / INDICES;
    let numbers: Vec<u64> = (0..ranks).map(number_of).collect();
    for (index, word) in indices.zip(words) {
        let whole: u64 = (0..ranks).map(|rank| field(rank, numbers[rank as usize], index)).sum();
        assert_eq!(word, whole, "rank {rank}, word {index}: not the sum of {numbers:?}");
    }
    Ok(numbers)
}
