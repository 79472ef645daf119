//! Windows of two or three ranks on two hosts: puts to words and bytes that share lines, updates, locks, and epochs; in some of
//! the scenes one rank dies, or its host, or it stands still for a while.
//!
//! The oracle is outside the memory: what every byte must be once it was flushed, who is inside a lock, and how far every rank
//! has come. The ranks meet there too, so that nothing but the window itself drains a buffer.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Suite, ThreadId, World};
use polder_mem::{Bell, Coherence, Memory, Offset};

use super::group::Dice;
use super::stage::{PATIENCE, Stage, attached, pool_of, shape_of};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Superblock};
use crate::window::{Access, LockPlace, Window};
use crate::{Member, Pool, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "ranks put, get, update and lock in a window, and one may die";
    vec![Suite::new("window", about, window).mutates(&["window.rs", "lock.rs", "epoch.rs"])]
}

pub(super) fn canaries() -> Vec<Suite> {
    let about = "numbers of a lock are drawn without saying so first";
    let brief = "a wait for a lock ends though one after another has it";
    let wide = "an update stores the whole words that hold its bytes, and what it has not changed";
    vec![
        Suite::new("window-check-then-set", about, |seed| Deviation::CheckThenSet.during(|| window(seed))),
        Suite::new("window-whole-words", wide, |seed| Deviation::WholeWords.during(|| window(seed))),
        Suite::new("window-waits-once", brief, |seed| Deviation::WaitsOnce.during(|| window(seed))),
    ]
}

const HOSTS: u16 = 2;
const PROCESSES: u16 = 3;
/// The slot of the process that says that a host is fenced.
const SPARE: u16 = 2;
const CHUNKS: u32 = 10;
/// Bytes of each rank's data: one line, and a part of the next that ends in the middle of a word.
const BYTES: u64 = 92;
/// Words that the scene of the window lock keeps equal.
const PAIR: [u64; 2] = [0, 64];
/// Where the scene of updates counts, how many bytes each count has, and the byte beside them of each rank.
const COUNTERS: [(u64, u64); 3] = [(8, 8), (16, 2), (20, 3)];
const BESIDE: [u64; 3] = [18, 19, 23];
/// Where each rank stores, by plain stores, how far it is, and the others ask by updates that change nothing.
const PROGRESS: u64 = 24;
/// How often it stores it between two calls.
const STEPS: u8 = 12;
/// The scene in which a rank waits for several that have the lock one after another.
const IN_A_QUEUE: usize = 6;

static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry {
        hosts: HOSTS,
        processes: PROCESSES,
        names: 29,
        levels: 3,
        chunk_bytes: 1024,
        opens: 6,
        keepers: 1,
    };
    pool_of(geometry, CHUNKS)
});

/// What is known outside the memory.
struct Witness {
    hosts: &'static [u16],
    /// How often each rank came to where all meet.
    met: RefCell<Vec<u64>>,
    /// What each rank's data is, once everything was flushed.
    data: RefCell<Vec<Vec<u8>>>,
    /// Updates that each rank has begun, and those that it has flushed.
    begun: RefCell<Vec<u64>>,
    flushed: RefCell<Vec<u64>>,
    /// Who is inside the window lock, by rank.
    inside: RefCell<Vec<Option<Access>>>,
    /// The victim, and whether it, or its host with it, has died.
    victim: Cell<Option<(usize, Crash)>>,
    /// What was gotten where each puts and then gets what another put.
    seen: RefCell<Vec<u64>>,
    /// Ranks that did all they had to, and those that ended because another had died.
    over: Cell<usize>,
    gave_up: RefCell<Vec<bool>>,
    /// Whether survivors do all they have to, whichever process died.
    goes_on: bool,
    /// Where the data of each rank lies.
    places: RefCell<Vec<Offset>>,
    /// Whether all are targets at once.
    in_ring: bool,
}

impl Witness {
    /// Whether this rank dies with the victim.
    fn is_doomed(&self, rank: usize) -> bool {
        self.victim.get().is_some_and(|(victim, crash)| match crash {
            Crash::Process => rank == victim,
            Crash::Host => self.hosts[rank] == self.hosts[victim],
            Crash::Pause => false,
        })
    }
}

/// One rank, in its thread.
struct Rank {
    window: Window<ModelMemory>,
    memory: ModelMemory,
    me: usize,
    dice: Dice,
    witness: Rc<Witness>,
}

type Scene = fn(&mut Rank) -> Result<(), PoolError>;

fn window(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 11);
    let hosts: &[u16] = [&[0, 1][..], &[0, 1, 1], &[0, 0, 1], &[1, 0, 1]][dice.roll(4) as usize];
    // Whether somebody may die in them, and the others do all they have to then.
    let scenes: [(Scene, bool, bool); 7] = [
        (fences, false, false),
        (counters, true, true),
        (exclusion, true, true),
        (readers, false, false),
        (epochs, true, false),
        (buffers, false, false),
        (queue, true, true),
    ];
    let played = dice.roll(scenes.len() as u64) as usize;
    let (scene, mortal, goes_on) = scenes[played];
    let crashes = [None, None, Some(Crash::Process), Some(Crash::Host), Some(Crash::Pause)];
    let crash = if mortal { crashes[dice.roll(5) as usize] } else { None };
    let kernels = match crash {
        Some(Crash::Process) => Kernels::Shared,
        // Nobody gives signs of life while it has the lock.
        _ if played == IN_A_QUEUE => Kernels::Shared,
        _ => dice.kernels(),
    };
    let coherence = if dice.roll(6) == 0 { Coherence::Coherent } else { Coherence::Software };
    let shape = shape_of(&POOL.1, kernels, coherence);
    let mut world = World::new(seed, shape);
    let ranks = hosts.len();
    let witness = Rc::new(Witness {
        hosts,
        met: RefCell::new(vec![0; ranks]),
        data: RefCell::new(vec![vec![0; BYTES as usize]; ranks]),
        begun: RefCell::new(vec![0; ranks]),
        flushed: RefCell::new(vec![0; ranks]),
        inside: RefCell::new(vec![None; ranks]),
        victim: Cell::new(crash.map(|crash| (dice.roll(ranks as u64) as usize, crash))),
        seen: RefCell::new(vec![0; ranks]),
        over: Cell::new(0),
        gave_up: RefCell::new(vec![false; ranks]),
        goes_on,
        places: RefCell::new(vec![Offset(0); ranks]),
        in_ring: dice.roll(2) == 0,
    });
    let is_late = crash.is_none() && !Deviation::CheckThenSet.is_on() && dice.roll(4) == 0;
    let play = Play { kernels, scene, is_late };
    let threads = play.enter(&mut world, &witness, &mut dice);
    judge(&mut world, &witness);
    if let Some((victim, crash)) = witness.victim.get() {
        world.crash_within(threads[victim], crash, 400);
        if kernels == Kernels::OnePerHost && crash == Crash::Host {
            let (host, layout) = (hosts[victim], &POOL.1);
            world.spawn_after_crash(threads[victim], 1 - host, SPARE, move |memory| {
                Stage::fence(&memory, layout, host);
            });
        }
    }
    world.run()
}

/// How the ranks come to their window, and what they do with it.
#[derive(Clone, Copy)]
struct Play {
    kernels: Kernels,
    scene: Scene,
    /// Whether they make it themselves, among all that the adversary does.
    is_late: bool,
}

type Seats = Rc<RefCell<Vec<Option<Window<ModelMemory>>>>>;

impl Play {
    /// Makes a thread for each rank, and mostly its window.
    fn enter(self, world: &mut World, witness: &Rc<Witness>, dice: &mut Dice) -> Vec<ThreadId> {
        let hosts = witness.hosts;
        let slots = |rank: usize| hosts[..rank].iter().filter(|&&other| other == hosts[rank]).count() as u16;
        let (seats, mut threads) = (Seats::default(), vec![]);
        for (me, &host) in hosts.iter().enumerate() {
            let pool = world.setup_as(host, slots(me), |memory| self.attach(memory, host, me));
            let made = (!self.is_late).then(|| world.setup(|_| create(&pool, me, witness)));
            seats.borrow_mut().push(made);
            let (dice, witness) = (Dice::new(dice.roll(1 << 30), 12), Rc::clone(witness));
            let seats = Rc::clone(&seats);
            // Before the next process of the host comes, which takes one without a thread for dead.
            threads.push(world.spawn(host, slots(me), move |memory| {
                let seat = seats.borrow_mut()[me].take();
                let window = seat.unwrap_or_else(|| create(&pool, me, &witness));
                drop(pool);
                self.play(Rank { window, memory, me, dice, witness });
            }));
        }
        seats.borrow_mut().iter_mut().flatten().for_each(|window| window.join().expect("all are there"));
        threads
    }

    fn attach(self, memory: ModelMemory, host: u16, rank: usize) -> Arc<Pool<ModelMemory>> {
        let member = Member { pid: rank as u32, ..Member::new(host, 7) };
        attached(&POOL, memory, self.kernels == Kernels::Shared, member)
    }

    fn play(self, mut rank: Rank) {
        let (me, witness) = (rank.me, Rc::clone(&rank.witness));
        if self.is_late {
            // Whatever says in memory that it is there comes after it.
            rank.window.flush();
            rank.meet();
            rank.window.join().expect("all are there");
            // A process that has done all drops its segment, which is not found then.
            rank.meet();
        }
        match (self.scene)(&mut rank) {
            Ok(()) => witness.over.set(witness.over.get() + 1),
            Err(PoolError::PeerDead { peer, .. }) => {
                let whom = peer.pid as usize;
                let is_right = witness.is_doomed(whom) || witness.gave_up.borrow()[whom];
                assert!(is_right && !witness.goes_on, "rank {me} blames rank {whom}");
                witness.gave_up.borrow_mut()[me] = true;
            }
            Err(error) => panic!("rank {me}: {error}"),
        }
    }
}

fn create(pool: &Arc<Pool<ModelMemory>>, rank: usize, witness: &Witness) -> Window<ModelMemory> {
    let ranks = witness.hosts.len() as u32;
    let mut window = Window::create(Arc::clone(pool), "w", rank as u32, ranks, BYTES).expect("there is room");
    // So soon that what the dead stored is still on its way.
    window.asks_after = 1;
    witness.places.borrow_mut()[rank] = window.own_data().at;
    window
}

impl Rank {
    fn ranks(&self) -> usize {
        self.witness.hosts.len()
    }

    /// The next rank, in a ring.
    fn next(&self) -> usize {
        (self.me + 1) % self.ranks()
    }

    /// Waits until all ranks have come here.
    fn meet(&self) {
        self.witness.met.borrow_mut()[self.me] += 1;
        let mine = self.witness.met.borrow()[self.me];
        while self.witness.met.borrow().iter().any(|&met| met < mine) {
            self.memory.pause();
        }
    }

    fn until(
        &mut self,
        mut step: impl FnMut(&mut Window<ModelMemory>) -> Result<bool, PoolError>,
    ) -> Result<(), PoolError> {
        while !step(&mut self.window)? {
            self.memory.pause();
        }
        Ok(())
    }

    fn get_word(&self, target: usize, offset: u64) -> Result<u64, PoolError> {
        let mut word = [0; 8];
        self.window.get(target as u32, offset, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    fn put_word(&mut self, target: usize, offset: u64, word: u64) -> Result<(), PoolError> {
        self.window.put(target as u32, offset, &word.to_le_bytes())
    }

    /// Its own data, by plain loads.
    fn own(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES as usize];
        self.memory.copy_out(self.window.own_data().at, &mut bytes).expect("no fault");
        bytes
    }

    /// Stores to its own data, by plain stores.
    fn store_own(&self, offset: u64, bytes: &[u8]) {
        self.memory.copy_in(self.window.own_data().at + offset, bytes).expect("no fault");
        self.witness.data.borrow_mut()[self.me][offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn expect_own(&self, when: &str) {
        assert_eq!(self.own(), self.witness.data.borrow()[self.me], "rank {} after {when}", self.me);
    }

    /// Takes the window lock of `target` and checks that nobody is inside who may not be.
    fn lock(&mut self, target: usize, access: Access) -> Result<(), PoolError> {
        let (target, mut place) = (target as u32, LockPlace::default());
        self.until(|window| window.try_lock(target, access, &mut place))?;
        assert_eq!(self.window.try_lock(target, access, &mut place), Ok(false), "another thread has it too");
        let witness = &self.witness;
        witness.inside.borrow_mut()[self.me] = Some(access);
        let inside = witness.inside.borrow();
        let together = || (0..inside.len()).filter(|&rank| rank != self.me && !witness.is_doomed(rank));
        let is_fine = together().all(|rank| match inside[rank] {
            None => true,
            Some(other) => (access, other) == (Access::Shared, Access::Shared),
        });
        assert!(is_fine, "rank {} is inside as {access:?} with {inside:?}", self.me);
        Ok(())
    }

    /// Writes down that it counts.
    fn begin(&self) {
        self.witness.begun.borrow_mut()[self.me] += 1;
    }

    /// Flushes, and writes down that what it counted is there.
    fn finish(&self) {
        self.window.flush();
        let begun = self.witness.begun.borrow()[self.me];
        self.witness.flushed.borrow_mut()[self.me] = begun;
    }

    fn unlock(&mut self, target: usize) {
        self.witness.inside.borrow_mut()[self.me] = None;
        self.window.unlock(target as u32);
    }
}

/// Epochs between barriers: what each stores to its own data, and what all put to each other's, in pieces that share words.
fn fences(rank: &mut Rank) -> Result<(), PoolError> {
    let ranks = rank.ranks();
    for round in 0..2 {
        if rank.dice.roll(2) == 0 {
            let offset = rank.dice.roll(BYTES - 8);
            rank.store_own(offset, &[0x10 + round; 8]);
            rank.window.expose(rank.me as u32, 0, BYTES)?;
        }
        rank.meet();
        // Each byte belongs to one origin: every third, or every third run of some.
        let run = [1, 3, 4, 8, 16][rank.witness.met.borrow()[rank.me] as usize % 5];
        for target in 0..ranks {
            for start in (0..BYTES).step_by(run).skip(rank.me).step_by(ranks) {
                if rank.dice.roll(3) > 0 {
                    continue;
                }
                let length = (run as u64).min(BYTES - start) as usize;
                let bytes: Vec<u8> = (0..length).map(|_| rank.dice.roll(256) as u8).collect();
                rank.window.put(target as u32, start, &bytes)?;
                rank.witness.data.borrow_mut()[target][start as usize..][..length].copy_from_slice(&bytes);
            }
        }
        rank.window.flush();
        rank.meet();
        rank.window.renew(rank.me as u32, 0, BYTES)?;
        rank.expect_own("a fence");
        let (target, mut bytes) = (rank.next(), vec![0; BYTES as usize]);
        rank.window.get(target as u32, 0, &mut bytes)?;
        assert_eq!(bytes, rank.witness.data.borrow()[target], "rank {} gets from {target}", rank.me);
        rank.meet();
    }
    Ok(())
}

/// All count together in words and parts of words of all; the bytes beside them are put meanwhile. Where caches are coherent, the
/// ranks store bytes beside them in their own segments, too.
fn counters(rank: &mut Rank) -> Result<(), PoolError> {
    let ranks = rank.ranks() as u64;
    for round in 1..=3 {
        let target = rank.dice.roll(ranks) as usize;
        if rank.memory.coherence() == Coherence::Coherent {
            for step in 0..STEPS {
                rank.store_own(BESIDE[rank.me], &[round * STEPS + step]);
                rank.store_own(PROGRESS, &[round * STEPS + step; 8]);
            }
            rank.window.update(target as u32, PROGRESS, 8, &mut |_| false)?;
        }
        if rank.dice.roll(3) == 0 {
            rank.window.put(target as u32, BESIDE[rank.me], &[0x55])?;
            rank.witness.data.borrow_mut()[target][BESIDE[rank.me] as usize] = 0x55;
        }
        let shares = rank.dice.roll(4) == 0;
        if shares {
            let mut place = LockPlace::default();
            rank.until(|window| window.try_lock(target as u32, Access::Shared, &mut place))?;
        }
        let (offset, bytes) = COUNTERS[rank.dice.roll(3) as usize];
        rank.begin();
        rank.window.update(target as u32, offset, bytes, &mut |bytes| {
            bytes[0] += 1;
            true
        })?;
        if shares {
            rank.window.unlock(target as u32);
        }
        rank.finish();
    }
    Ok(())
}

/// Each has the update lock of one rank for the better part of the time that a call waits for one holder.
fn queue(rank: &mut Rank) -> Result<(), PoolError> {
    let memory = rank.memory.clone();
    rank.begin();
    rank.window.update(0, COUNTERS[0].0, 8, &mut |bytes| {
        let (until, seen) = (memory.now() + PATIENCE * 2 / 3, memory.announce_sleep(Bell(0)));
        memory.sleep(Bell(0), seen, until);
        bytes[0] += 1;
        true
    })?;
    rank.finish();
    Ok(())
}

/// Two words stay equal under the lock: the process that has it alone changes both by gets and puts, the process that shares it looks.
fn exclusion(rank: &mut Rank) -> Result<(), PoolError> {
    for _ in 0..2 {
        let target = 0;
        if rank.dice.roll(3) == 0 {
            rank.lock(target, Access::Shared)?;
            let pair = [rank.get_word(target, PAIR[0])?, rank.get_word(target, PAIR[1])?];
            assert!(pair[0] == pair[1] || rank.witness.victim.get().is_some(), "{pair:?} under the lock");
        } else {
            rank.lock(target, Access::Exclusive)?;
            let next = rank.get_word(target, PAIR[0])? + 1;
            rank.begin();
            for offset in PAIR {
                rank.put_word(target, offset, next)?;
            }
        }
        rank.unlock(target);
        rank.finish();
    }
    Ok(())
}

/// All share the lock at once, and one then has it alone.
fn readers(rank: &mut Rank) -> Result<(), PoolError> {
    rank.lock(1, Access::Shared)?;
    rank.meet();
    rank.unlock(1);
    rank.lock(1, Access::Exclusive)?;
    rank.unlock(1);
    Ok(())
}

/// The ranks are targets in turn, or all at once: each posts what it stored, the others, or the one before it, get that and put
/// their parts.
fn epochs(rank: &mut Rank) -> Result<(), PoolError> {
    let (ranks, me) = (rank.ranks(), rank.me);
    for round in 1..=3_u64 {
        let turn = round as usize % ranks;
        let (origins, target) = match rank.witness.in_ring {
            true => (vec![((me + ranks - 1) % ranks) as u32], Some(rank.next())),
            false if me == turn => ((0..ranks as u32).filter(|&other| other as usize != me).collect(), None),
            false => (vec![], Some(turn)),
        };
        if !origins.is_empty() {
            rank.store_own(0, &(round * 100).to_le_bytes());
            rank.window.expose(me as u32, 0, 8)?;
            rank.window.post(&origins)?;
        }
        if let Some(target) = target {
            rank.window.start(&[target as u32])?;
            rank.until(Window::try_start)?;
            assert_eq!(rank.get_word(target, 0)?, round * 100, "what {target} posted");
            rank.put_word(target, 8 + me as u64 * 8, round * 1000 + me as u64)?;
            rank.window.complete()?;
        }
        if !origins.is_empty() {
            rank.until(Window::try_wait)?;
            rank.window.renew(me as u32, 0, BYTES)?;
        }
        for origin in origins {
            let at = 8 + origin as usize * 8;
            let word = u64::from_le_bytes(rank.own()[at..at + 8].try_into().expect("8 bytes"));
            assert_eq!(word, round * 1000 + u64::from(origin), "what {origin} put in round {round}");
        }
    }
    Ok(())
}

/// Each puts, or stores, and then looks whether the next rank has: the last to do so has seen the one before.
fn buffers(rank: &mut Rank) -> Result<(), PoolError> {
    let (me, next) = (rank.me, rank.next());
    let by_loads = rank.witness.hosts.len() == 2;
    let seen = if by_loads {
        rank.store_own(0, &1_u64.to_le_bytes());
        rank.window.expose(me as u32, 0, 8)?;
        rank.window.renew(next as u32, 0, 8)?;
        rank.memory.load(rank.window.data_range(next as u32)?.at)?
    } else {
        rank.put_word(0, me as u64 * 8, 1)?;
        rank.window.flush();
        rank.get_word(0, next as u64 * 8)?
    };
    rank.witness.seen.borrow_mut()[me] = seen;
    rank.meet();
    assert_ne!(rank.witness.seen.borrow().iter().sum::<u64>(), 0, "nobody saw what another did before");
    Ok(())
}

/// At the end nobody waits, and every count is there.
fn judge(world: &mut World, witness: &Rc<Witness>) {
    let witness = Rc::clone(witness);
    world.check(0, move |memory| {
        let ranks = witness.hosts.len();
        let dead = (0..ranks).filter(|&rank| witness.is_doomed(rank)).count();
        let done = witness.over.get() + dead >= ranks;
        assert!(done || dead > 0 && !witness.goes_on, "somebody waits for ever");
        let mut count = 0;
        for (target, &at) in witness.places.borrow().iter().enumerate().filter(|_| witness.goes_on) {
            let mut bytes = [0; BYTES as usize];
            memory.copy_out(at, &mut bytes).expect("no fault");
            let places = COUNTERS.map(|(offset, _)| offset).into_iter().chain([PAIR[0]]);
            count += places.map(|offset| u64::from(bytes[offset as usize])).sum::<u64>();
            for (rank, offset) in BESIDE.into_iter().enumerate().take(ranks) {
                let put = witness.data.borrow()[target][offset as usize];
                let is_right = put == bytes[offset as usize] || witness.is_doomed(rank);
                assert!(is_right, "what {rank} put beside the counters of {target}");
            }
            let stored = &witness.data.borrow()[target][PROGRESS as usize..][..8];
            let is_right = stored == &bytes[PROGRESS as usize..][..8] || witness.is_doomed(target);
            assert!(is_right, "what {target} has stored by itself: {stored:?}");
        }
        let sum = |counts: &RefCell<Vec<u64>>| counts.borrow().iter().sum::<u64>();
        let range = sum(&witness.flushed)..=sum(&witness.begun);
        assert!(!witness.goes_on || range.contains(&count), "{count} of {range:?} are counted");
    });
}
