//! Who belongs to the pool: grants and evictions, keepers that follow each other, races of one host id, hosts that
//! arrive, and the processes of one host.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use polder_mem::model::{Change, Crash, Harmless, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Bell, Coherence, Memory, ProcessSlot};

use crate::claim::{Claimant, GrantedId, IdClaim};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Superblock, Uuid};
use crate::keeper::{Keeper, KeeperTask, Owner, ReplaceKeeper};
use crate::line;
use crate::local::LocalLayout;
use crate::membership::{Heartbeat, HostLine, HostState, Process};
use crate::pool::{arrive, enter_shard, hosts_present};
use crate::view::{Grant, IdSource, View, Views};
use crate::{Member, Pool, PoolError, ProcessState};

const BYTES: u64 = 16 << 10;
/// Shorter than the longest pause, so that deadlines come too.
const PATIENCE: Duration = Duration::from_secs(20);
const SILENCE: Duration = Duration::from_micros(2);

pub(super) fn suites() -> Vec<Suite> {
    vec![
        Suite::new(
            "grants",
            "a host id is held by one incarnation in an epoch, and no view goes backwards",
            grants,
        )
        .harmless(HARMLESS_IN_GRANTS),
        Suite::new(
            "succession",
            "a keeper takes over whatever anybody accepted from the one before, which may go on",
            |seed| if seed >> 6 & 3 != 0 { succession(seed) } else { places(seed, ReplaceKeeper::Gone) },
        ),
        Suite::new("id-race", "of several claimants of a host id one wins, and the others are told", id_race)
            .harmless(HARMLESS_IN_ID_RACE),
        Suite::new("arrival", "of two hosts that arrive at once at least one sees the other", arrival),
        Suite::new("eviction", "an evicted host is out for good while its next incarnation is in", |seed| {
            Deviation::WithoutObjects.during(|| eviction(seed))
        })
            .harmless(HARMLESS_IN_EVICTION),
        Suite::new(
            "adoption",
            "another boot has a host's id once that has left or is fenced, and sees what the keeper put right",
            |seed| {
                Deviation::WithoutObjects
                    .during(|| if seed & 16 == 0 { adoption(seed) } else { takeover(seed) })
            },
        )
        .harmless(HARMLESS_IN_ADOPTION),
        Suite::new(
            "processes",
            "the lines of a host say who is there, through crashes and restarts of its processes",
            |seed| Deviation::WithoutObjects.during(|| processes(seed)),
        )
        .sharing_caches()
        .harmless(HARMLESS_IN_PROCESSES),
        Suite::new(
            "run-directories",
            "a process that does not share its host's words is let in only once nobody else lives as that host",
            |seed| Deviation::WithoutObjects.during(|| run_directories(seed)),
        )
        .sharing_caches()
        .harmless(HARMLESS_IN_PROCESSES),
    ]
}

pub(super) fn canaries() -> Vec<Suite> {
    let about = "another boot takes the id of a host that stands still";
    let place = "a keeper takes the place of one that has not ended";
    let trusting = "a process takes what its host's file does not know for dead";
    let hasty = "a process comes while the last one of its host is about to say that the host has left";
    vec![
        Suite::new("takeover-silence-is-enough", about, |seed| {
            Deviation::SilenceIsEnough.during(|| takeover(seed))
        }),
        Suite::new("succession-place-in-use", place, |seed| places(seed, ReplaceKeeper::Unseen)),
        Suite::new("run-directories-file-knows-all", trusting, |seed| {
            Deviation::FileKnowsAll.during(|| run_directories(seed))
        }),
        Suite::new("run-directories-left-is-gone", hasty, |seed| {
            Deviation::LeftIsGone.during(|| run_directories(seed))
        }),
    ]
}

const fn dropped(file: &'static str, snippet: &'static str) -> Harmless {
    Harmless { file, snippet, change: Change::Drop }
}

const fn weakened(file: &'static str, snippet: &'static str) -> Harmless {
    Harmless { file, snippet, change: Change::Weaken }
}

const HOST_LINES: &str = "memory.invalidate(layout.host_line(0)";
const BEFORE_HOST_LINES: &str = "// Before all host lines.";
const BEFORE_HIGHER_KEEPERS: &str = "// Before the first words of all higher keepers.";
const BEFORE_VIEW: &str = "// Before both lines of the view.";
const PUBLISHED: &str = "// What is published leaves the cache.";
const SHARD: &str = "memory.invalidate(shard, bytes)";
const BEFORE_SHARD: &str = "// Before anything of the shard is loaded.";

const HARMLESS_IN_GRANTS: &[Harmless] = &[
    // Host lines are asked only before the keeper runs, and by that view nobody holds the id.
    dropped("view.rs", HOST_LINES),
    weakened("view.rs", HOST_LINES),
    dropped("view.rs", BEFORE_HOST_LINES),
    weakened("view.rs", BEFORE_HOST_LINES),
];

const HARMLESS_IN_ID_RACE: &[Harmless] = &[
    dropped("view.rs", HOST_LINES),
    weakened("view.rs", HOST_LINES),
    dropped("view.rs", BEFORE_HOST_LINES),
    weakened("view.rs", BEFORE_HOST_LINES),
    // Claimants and keeper look again until they see: a look that comes too early costs one round.
    dropped("view.rs", BEFORE_HIGHER_KEEPERS),
    weakened("view.rs", BEFORE_HIGHER_KEEPERS),
    dropped("view.rs", BEFORE_VIEW),
    weakened("view.rs", BEFORE_VIEW),
    dropped("line.rs", "memory.fence_invalidations()"),
    weakened("line.rs", "memory.fence_invalidations()"),
    // Only one grant is ever given, and the process that sees the view before it finds no nonce; a claim or heartbeat that is
    // out later is answered later.
    dropped("line.rs", "memory.mfence()"),
    weakened("line.rs", "memory.mfence()"),
    dropped("line.rs", "memory.sfence()"),
];

const HARMLESS_IN_EVICTION: &[Harmless] = &[
    // Only heartbeats and process lines are published; nobody reads them here.
    dropped("line.rs", PUBLISHED),
    dropped("line.rs", "memory.sfence()"),
    // Both incarnations run on one host, whose caches are right, and the keeper writes nothing in its shard.
    dropped("pool.rs", SHARD),
    weakened("pool.rs", SHARD),
    dropped("pool.rs", BEFORE_SHARD),
    weakened("pool.rs", BEFORE_SHARD),
];

const HARMLESS_IN_ADOPTION: &[Harmless] = &[
    // A keeper knows the host line before it begins, or reads it by itself; another boot looks again at the view after it is in.
    dropped("view.rs", BEFORE_HIGHER_KEEPERS),
    weakened("view.rs", BEFORE_HIGHER_KEEPERS),
    dropped("view.rs", BEFORE_VIEW),
    weakened("view.rs", BEFORE_VIEW),
    dropped("view.rs", HOST_LINES),
    weakened("view.rs", HOST_LINES),
    dropped("view.rs", BEFORE_HOST_LINES),
    weakened("view.rs", BEFORE_HOST_LINES),
    // The host line that is announced last brings a fence for all of them.
    dropped("keeper.rs", "// HARMLESS(sfence -> drop)"),
    dropped("line.rs", "memory.sfence()"),
];

const HARMLESS_IN_PROCESSES: &[Harmless] = &[
    // Nobody arrives and looks around here.
    dropped("line.rs", "memory.mfence()"),
    weakened("line.rs", "memory.mfence()"),
    // Stores of one process are seen in their order.
    dropped("line.rs", "memory.sfence()"),
];

fn superblock(hosts: u16, processes: u16, keepers: u16) -> (Superblock, Layout) {
    let geometry = Geometry { hosts, processes, names: 2, levels: 1, chunk_bytes: 64, opens: 1, keepers };
    let superblock = Superblock { uuid: Uuid(1), bytes: BYTES, geometry, coherence: None };
    (superblock, superblock.layout().expect("16 KiB hold a pool of this geometry"))
}

/// As `superblock`, of two hosts that can create some objects each.
fn with_names() -> (Superblock, Layout) {
    let geometry =
        Geometry { hosts: 2, processes: 1, names: 3, levels: 2, chunk_bytes: 256, opens: 3, keepers: 2 };
    let superblock = Superblock { uuid: Uuid(1), bytes: BYTES, geometry, coherence: None };
    (superblock, superblock.layout().expect("16 KiB hold a pool of this geometry"))
}

fn world(seed: u64, hosts: u16, layout: &Layout) -> World {
    // Where the hardware keeps coherence only the store buffers are left, and `fence_invalidations` does nothing.
    let coherence = if seed % 4 > 1 { Coherence::Coherent } else { Coherence::Software };
    World::new(seed, shape(hosts, layout, coherence))
}

fn shape(hosts: u16, layout: &Layout, coherence: Coherence) -> Shape {
    let local_words = LocalLayout::new(layout).words();
    Shape { hosts, bytes: BYTES, local_words, bells: 8, coherence, ..Shape::default() }
}

fn keep(
    memory: ModelMemory,
    layout: &Layout,
    incarnation: u16,
    id_source: Option<IdSource>,
) -> Keeper<ModelMemory> {
    let charge = KeeperTask { incarnation, id_source, evict_after: None };
    let owner = Owner::default();
    Keeper::start_in(memory, layout.clone(), charge, owner, ReplaceKeeper::Gone)
        .expect("no higher keeper runs")
}

/// Holds the id in an epoch in which nobody does.
const NOBODY: u64 = 0;

/// What everyone believes and did, outside the memory.
#[derive(Default)]
struct Witness {
    /// Who holds the id 0 in an epoch, by what its keeper set out to say or by its own belief.
    by_epoch: RefCell<BTreeMap<u64, u64>>,
    /// Whose an incarnation was.
    by_incarnation: RefCell<BTreeMap<u64, u64>>,
    /// The highest incarnation that a keeper set out to evict.
    evicted_through: Cell<u64>,
    /// The highest epoch that was published.
    published: Cell<u64>,
    wins: Cell<u64>,
    ended: Cell<u64>,
}

impl Witness {
    fn believe(&self, nonce: u64, granted: GrantedId) {
        let GrantedId { incarnation, epoch, .. } = granted;
        let holder = *self.by_epoch.borrow_mut().entry(epoch).or_insert(nonce);
        assert_eq!(holder, nonce, "two claimants hold the id in epoch {epoch}");
        let mut holders = self.by_incarnation.borrow_mut();
        let holder = *holders.entry(incarnation).or_insert(nonce);
        assert_eq!(holder, nonce, "two claimants hold the id as incarnation {incarnation}");
        let newest = *holders.keys().next_back().expect("one was just noted");
        let kept = holders.keys().find(|&&old| old > self.evicted_through.get() && old < newest);
        assert_eq!(kept, None, "incarnation {newest} holds the id while an older one was never evicted");
    }

    fn publish(&self, view: &View) {
        self.published.set(view.epoch);
    }
}

/// The claimant `nonce` of the id 0 looks some times whether it has it; nobody looks for nobody.
fn hold(memory: &ModelMemory, layout: &Layout, nonce: u64, looks: u32, witness: &Witness) {
    let mut views = Views::new(PATIENCE);
    let mut last = 0;
    for _ in 0..looks {
        let published = witness.published.get();
        match views.read(memory, layout, |view| Grant::read(memory, layout, view.keeper, 0, PATIENCE)) {
            Ok((view, grant)) => {
                let View { epoch, .. } = view;
                assert!(epoch >= last, "epoch {epoch} was seen after {last}");
                assert!(epoch >= published, "epoch {epoch} was seen while {published} was published");
                last = epoch;
                if view.id_source == IdSource::Keeper && grant.stands_in(&view, 0) && grant.nonce == nonce {
                    witness.believe(nonce, GrantedId { host: 0, incarnation: grant.incarnation, epoch });
                }
            }
            Err(PoolError::Corrupt { .. }) => {}
            Err(error) => panic!("a view cannot be read: {error}"),
        }
        memory.pause();
    }
}

/// Host 0 keeps; hosts 1 and 2 are given the id in turn.
fn grants(seed: u64) -> Outcome {
    let (_, layout) = superblock(1, 1, 2);
    let mut world = world(seed, 3, &layout);
    let witness = Rc::new(Witness::default());
    let (its_layout, seen) = (layout.clone(), Rc::clone(&witness));
    let thread = world.spawn(0, 0, move |memory| {
        let mut keeper = keep(memory, &its_layout, 1, Some(IdSource::Keeper));
        seen.publish(keeper.view());
        for nonce in [1, 2, 1] {
            let epoch = keeper.view().epoch;
            seen.by_epoch.borrow_mut().extend([(epoch + 1, nonce), (epoch + 2, NOBODY)]);
            keeper.admit(0, nonce, 100 + nonce).expect("no other keeper runs");
            seen.publish(keeper.view());
            seen.evicted_through.set(keeper.holder(0).expect("no host line is needed"));
            keeper.evict(0).expect("no other keeper runs");
            seen.publish(keeper.view());
        }
    });
    if seed & 4 == 0 {
        world.crash_within(thread, Crash::Pause, 400);
    }
    for host in 1..3 {
        let (layout, witness) = (layout.clone(), Rc::clone(&witness));
        world.spawn(host, 0, move |memory| hold(&memory, &layout, host.into(), 8, &witness));
    }
    world.run()
}

/// A keeper of nobody, whose next change goes to either line of its view.
fn first_keeper(memory: ModelMemory, layout: &Layout, seed: u64) -> Keeper<ModelMemory> {
    let mut keeper = keep(memory, layout, 1, Some(IdSource::Keeper));
    if seed & 256 == 0 {
        keeper
            .admit(0, 9, 109)
            .and_then(|()| keeper.evict(0))
            .and_then(|()| keeper.fence(0))
            .expect("none is newer");
    }
    keeper
}

/// The keeper on host 0 gives the id to host 2 while its successor on host 1 starts, who gives it to somebody else
/// unless it sees that somebody has it.
fn succession(seed: u64) -> Outcome {
    let (_, layout) = superblock(1, 1, 2);
    let mut world = world(seed, 3, &layout);
    let witness = Rc::new(Witness::default());
    let mut old = world.setup(|memory| first_keeper(memory, &layout, seed));
    let thread = world.spawn(0, 0, move |_| match old.admit(0, 2, 102) {
        Ok(()) | Err(PoolError::Superseded { .. }) => {}
        Err(error) => panic!("the old keeper failed: {error}"),
    });
    match seed >> 2 & 3 {
        0 => world.crash_within(thread, Crash::Pause, 60),
        1 => world.crash_within(thread, Crash::Host, 60),
        _ => {}
    }
    let (its_layout, seen) = (layout.clone(), Rc::clone(&witness));
    let thread = world.spawn(1, 0, move |memory| {
        let mut new = keep(memory, &its_layout, 2, None);
        if new.view().has(0) {
            seen.evicted_through.set(new.holder(0).expect("no host line is needed"));
            new.evict(0).expect("no newer keeper runs");
        }
        new.admit(0, 3, 103).expect("no newer keeper runs");
        let incarnation = new.holder(0).expect("no host line is needed");
        seen.believe(3, GrantedId { host: 0, incarnation, epoch: new.view().epoch });
    });
    // About when it has looked at what the old one said, with its announcement perhaps still in its buffer.
    if seed >> 4 & 3 != 0 {
        world.crash_within(thread, Crash::Pause, 90);
    }
    world.spawn(2, 0, move |memory| hold(&memory, &layout, 2, 8, &witness));
    world.run()
}

/// As [`succession`], and the successor is followed by a third keeper, which takes the place of the first once `replace` allows.
fn places(seed: u64, replace: ReplaceKeeper) -> Outcome {
    let (_, layout) = superblock(1, 1, 2);
    let mut world = world(seed, 3, &layout);
    let witness = Rc::new(Witness::default());
    let mut old = world.setup(|memory| first_keeper(memory, &layout, seed));
    let thread = world.spawn(0, 0, move |_| {
        match old.admit(0, 2, 102) {
            Ok(()) | Err(PoolError::Superseded { .. }) => {}
            Err(error) => panic!("the old keeper failed: {error}"),
        }
        old.end();
    });
    if seed >> 2 & 1 == 0 {
        world.crash_within(thread, Crash::Pause, 60);
    }
    let (its_layout, seen) = (layout.clone(), Rc::clone(&witness));
    let thread = world.spawn(1, 0, move |memory| {
        // Nobody keeps a place, and the process that sees that it has one waits.
        let evict = |keeper: &mut Keeper<ModelMemory>| {
            if keeper.view().has(0) {
                seen.evicted_through.set(keeper.holder(0).expect("no host line is needed"));
                keeper.evict(0).expect("no newer keeper runs");
            }
        };
        let give = |keeper: &mut Keeper<ModelMemory>, nonce| {
            keeper.admit(0, nonce, 100 + nonce).expect("no newer keeper runs");
            let incarnation = keeper.holder(0).expect("no host line is needed");
            seen.believe(nonce, GrantedId { host: 0, incarnation, epoch: keeper.view().epoch });
        };
        let mut second = keep(memory.clone(), &its_layout, 2, None);
        evict(&mut second);
        give(&mut second, 3);
        drop(second);
        let charge = KeeperTask { incarnation: 3, id_source: None, evict_after: None };
        let mut third = loop {
            let start =
                || Keeper::start_in(memory.clone(), its_layout.clone(), charge, Owner::default(), replace);
            match start() {
                Err(PoolError::KeeperPlace { held: 1, .. }) => memory.pause(),
                started => break started.expect("no higher keeper runs"),
            }
        };
        assert_eq!(
            third.holder(0),
            Ok(seen.by_incarnation.borrow().keys().next_back().copied().unwrap_or(0))
        );
        evict(&mut third);
        give(&mut third, 4);
    });
    if seed >> 4 & 3 != 0 {
        world.crash_within(thread, Crash::Pause, 200);
    }
    world.spawn(2, 0, move |memory| hold(&memory, &layout, 2, 12, &witness));
    world.run()
}

/// Two or three claimants of one id, and a keeper that answers until all have ended.
fn id_race(seed: u64) -> Outcome {
    let claimants = 2 + seed % 2;
    let (_, layout) = superblock(1, 1, 1);
    let mut world = world(seed, 1 + claimants as u16, &layout);
    let witness = Rc::new(Witness::default());
    let (its_layout, seen) = (layout.clone(), Rc::clone(&witness));
    world.spawn(0, 0, move |memory| {
        let mut keeper = keep(memory.clone(), &its_layout, 1, Some(IdSource::Keeper));
        while seen.ended.get() < claimants {
            keeper.tick().expect("no other keeper runs");
            memory.pause();
        }
    });
    for nonce in 1..=claimants {
        let (layout, witness) = (layout.clone(), Rc::clone(&witness));
        world.spawn(nonce as u16, 0, move |memory| race(&memory, &layout, nonce, claimants, &witness));
    }
    world.run()
}

fn race(memory: &ModelMemory, layout: &Layout, nonce: u64, claimants: u64, witness: &Witness) {
    // Several times as long as a heartbeat may take to be seen, as in every sound configuration.
    let silence = 20 * SILENCE;
    let claim = IdClaim { host: Some(0), boot: 100 + nonce, nonce, timeout: PATIENCE, silence };
    match Claimant::new(memory, layout, &claim).claim_one(0) {
        Ok(granted) => {
            witness.believe(nonce, granted);
            witness.wins.set(witness.wins.get() + 1);
            let at = layout.heartbeat_line(0, ProcessSlot(0));
            for count in 1.. {
                if witness.ended.get() + 1 == claimants {
                    break;
                }
                Heartbeat { count, incarnation: nonce }.publish(memory, at);
                memory.pause();
            }
        }
        Err(PoolError::HostLive { .. }) => {}
        Err(error) => panic!("a claim failed: {error}"),
    }
    witness.ended.set(witness.ended.get() + 1);
    if witness.ended.get() == claimants {
        assert_eq!(witness.wins.get(), 1, "one of {claimants} claimants has the id");
    }
}

/// Two hosts arrive, and look who is there.
fn arrival(seed: u64) -> Outcome {
    let (_, layout) = superblock(2, 1, 1);
    let mut world = world(seed, 2, &layout);
    let seen = Rc::new(Cell::new([None; 2]));
    for host in 0..2 {
        let (seen, layout) = (Rc::clone(&seen), layout.clone());
        world.spawn(host, 0, move |memory| {
            let line = HostLine { state: HostState::Live, boot: 7, incarnation: 1, epoch: 0 };
            arrive(&memory, &layout, host, &line);
            let mut both = seen.get();
            let hosts = hosts_present(&memory, &layout).expect("the model has no faults");
            both[usize::from(host)] = Some(hosts);
            both[1 - usize::from(host)] = seen.get()[1 - usize::from(host)];
            seen.set(both);
            if let [Some(first), Some(second)] = both {
                assert_ne!((first, second), (0b01, 0b10), "neither host saw the other");
            }
        });
    }
    world.run()
}

fn member(host: u16, boot: u64) -> Member {
    Member { pid: 1, timeout: PATIENCE, silence: SILENCE, ..Member::new(host, boot) }
}

fn attach(
    memory: ModelMemory,
    superblock: Superblock,
    layout: &Layout,
    member: Member,
) -> Result<Pool<ModelMemory>, PoolError> {
    Pool::attach_in(memory, superblock, layout.clone(), member)
}

/// How far a process of host 1 and its evictor have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Away,
    Attached,
    Leaving,
    /// By the keeper; a host that left before stays what it was.
    Evicted(bool),
}

/// A process of host 1 is evicted, and goes on or is stopped; another joins as the next incarnation of the host.
fn eviction(seed: u64) -> Outcome {
    let (superblock, layout) = superblock(2, 2, 1);
    let mut world = world(seed, 3, &layout);
    let beliefs = Rc::new(RefCell::new(BTreeMap::new()));
    let stage = Rc::new(Cell::new(Stage::Away));
    let (noted, told, its_layout) = (Rc::clone(&beliefs), Rc::clone(&stage), layout.clone());
    let thread = world.spawn(1, 0, move |memory| {
        let old = attach(memory, superblock, &its_layout, member(1, 7)).expect("nobody else is there");
        told.set(Stage::Attached);
        for _ in 0..5 {
            stand(&old, &noted, &told);
            let _ = old.beat();
        }
        if told.get() == Stage::Attached {
            told.set(Stage::Leaving);
        }
    });
    if seed & 4 == 0 {
        world.crash_within(thread, Crash::Pause, 500);
    }
    let (noted, told, its_layout) = (Rc::clone(&beliefs), Rc::clone(&stage), layout.clone());
    world.spawn(1, 1, move |memory| {
        let incarnation = loop {
            match told.get() {
                Stage::Evicted(out) => break 1 + u64::from(out),
                _ => memory.pause(),
            }
        };
        match attach(memory, superblock, &its_layout, member(1, 7)) {
            Ok(next) => {
                assert_eq!(next.this_process().host_incarnation, incarnation);
                stand(&next, &noted, &told);
                stand(&next, &noted, &told);
            }
            // The old process was stopped while it held the lock.
            Err(PoolError::Timeout { .. }) => {}
            Err(error) => panic!("the next incarnation cannot join: {error}"),
        }
    });
    let witness = Rc::new(Witness::default());
    let (published, its_layout) = (Rc::clone(&witness), layout.clone());
    world.spawn(2, 0, move |memory| hold(&memory, &its_layout, NOBODY, 4, &witness));
    world.spawn(0, 0, move |memory| {
        let mut keeper = keep(memory.clone(), &layout, 1, None);
        while stage.get() == Stage::Away {
            memory.pause();
        }
        if stage.get() == Stage::Attached {
            beliefs.borrow_mut().insert(keeper.view().epoch + 1, 2);
        }
        keeper.evict(1).expect("no other keeper runs");
        published.publish(keeper.view());
        let out = keeper.view().evicted != 0;
        assert!(out || stage.get() == Stage::Leaving, "a host that had attached was not seen");
        stage.set(Stage::Evicted(out));
    });
    world.run()
}

/// Host 1 has announced an object that it opens when it is switched off, and the keeper adopts its shard; its next
/// boot, which in this world has the caches of the first, must not go by what they hold.
fn adoption(seed: u64) -> Outcome {
    let (_, layout) = superblock(2, 1, 1);
    let mut world = world(seed, 2, &layout);
    let announced = layout.announcement(1, ProcessSlot(0), 0);
    let process = Process {
        host: 1,
        slot: ProcessSlot(0),
        state: ProcessState::Live,
        incarnation: 1,
        pid: 0,
        host_incarnation: 0,
        job: 0,
        quota: 0,
    };
    let mut keeper = world.setup(|memory| {
        let host = HostLine { state: HostState::Live, boot: 7, incarnation: 1, epoch: 0 };
        line::publish(&memory, layout.host_line(1), &host.encode());
        line::publish(&memory, layout.process_line(1, ProcessSlot(0)), &process.encode());
        memory.store(announced, 1);
        let mut keeper = keep(memory, &layout, 1, None);
        keeper.evict(1).expect("no other keeper runs");
        keeper
    });
    let (off, adopted) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    let (is_off, is_adopted) = (Rc::clone(&off), Rc::clone(&adopted));
    world.spawn(1, 0, move |memory| {
        assert_eq!(memory.load(announced), Ok(1));
        off.set(true);
        while !adopted.get() {
            memory.pause();
        }
        enter_shard(&memory, &layout, 1);
        assert_eq!(memory.load(announced), Ok(0), "an announcement of the old boot is still seen");
        let found = Process::read_own(&memory, &layout, 1, ProcessSlot(0)).expect("the model has no faults");
        assert_eq!(found.map(|process| process.state), Some(ProcessState::Dead));
        let host = HostLine::read(&memory, &layout, 1, PATIENCE).expect("a whole host line");
        assert_eq!(host.state, HostState::Left);
    });
    world.spawn(0, 0, move |memory| {
        while !is_off.get() {
            memory.pause();
        }
        keeper.fence(1).expect("the host was evicted");
        is_adopted.set(true);
    });
    world.run()
}

/// A boot of host 1 works, and leaves, stands still or dies at any operation; the launcher gives the id again to another
/// boot, which has caches and locks of its own. It is let in when the old one has left, or is dead and the keeper was told.
fn takeover(seed: u64) -> Outcome {
    let without_objects = Deviation::WithoutObjects.is_on();
    let (superblock, layout) = if without_objects { superblock(2, 1, 2) } else { with_names() };
    let mut world = world(seed, 3, &layout);
    let its_layout = layout.clone();
    let join = move |memory, host, boot, pid| {
        let member = Member { pid, ..member(host, boot) };
        Pool::attach_in(memory, superblock, its_layout.clone(), member)
    };
    let (made, over) = (Made::default(), Rc::new(Cell::new(None)));
    let old = world.setup_as(1, 0, |memory| join(memory, 1, 7, 1)).expect("nobody else is there");
    let keeper = world.setup(|memory| keep(memory, &layout, 1, None));
    let (given, ended) = (Rc::clone(&made), Rc::clone(&over));
    let old = world.spawn(1, 0, move |_| {
        work(&old, ["/a", "/b"], &given);
        old.detach().expect("no other process of the host is there");
        ended.set(Some(0));
    });
    match seed >> 2 & 3 {
        0 => world.crash_within(old, Crash::Host, 300),
        1 | 2 => world.crash_within(old, Crash::Pause, 300),
        _ => {}
    }
    let ended = Rc::clone(&over);
    let first = world.spawn_after_crash(old, 0, 0, move |_| fence_off(keeper, &ended));
    if seed >> 5 & 1 == 0 {
        world.crash_within(first, Crash::Host, 200);
    }
    let ended = Rc::clone(&over);
    world.spawn_after_crash(first, 0, 0, move |memory| fence_off(keep(memory, &layout, 2, None), &ended));
    let (given, join_anew) = (Rc::clone(&made), join.clone());
    world.spawn(2, 0, move |memory| {
        let mut tries = 1 + (seed >> 7 & 7);
        let new = loop {
            let published = over.get();
            match join_anew(memory.clone(), 1, 8, 2) {
                Ok(new) => {
                    assert!(new.epoch().expect("a whole view") >= published.unwrap_or(0));
                    break new;
                }
                Err(PoolError::IdTaken { .. } | PoolError::HostLive { boot: 7, .. }) => memory.pause(),
                Err(error) => panic!("the id is neither free nor the old boot's: {error}"),
            }
            tries = tries.saturating_sub(1);
            while tries == 0 && over.get().is_none() {
                memory.pause();
            }
        };
        work(&new, ["/c", "/d"], &given);
        new.check_membership().expect("nobody has evicted this boot");
        let process = new.process(1, ProcessSlot(0)).expect("a whole process line");
        assert_eq!(process, new.this_process());
    });
    world.check(0, move |memory| {
        let pool = join(memory, 0, 9, 3).expect("nobody else is there");
        for name in made.take() {
            pool.close(pool.open(name).expect("it was created and not destroyed"));
        }
    });
    world.run()
}

/// Evicts and fences host 1, of which the keeper knows that it is off, and notes the epoch. A keeper that died may have come
/// so far with it that another boot is in.
fn fence_off(mut keeper: Keeper<ModelMemory>, over: &Cell<Option<u64>>) {
    if !keeper.view().had_evicted(1) {
        keeper.evict(1).expect("no newer keeper runs");
    }
    match keeper.fence(1) {
        Ok(()) | Err(PoolError::NotEvicted { .. }) => over.set(Some(keeper.view().epoch)),
        Err(error) => panic!("the host cannot be fenced: {error}"),
    }
}

/// The names of objects that are surely there.
type Made = Rc<RefCell<Vec<&'static str>>>;

/// Gives signs of life, and if the pool has objects, creates two, opens them and destroys the first.
fn work(pool: &Pool<ModelMemory>, names: [&'static str; 2], made: &Made) {
    for name in names {
        // A process that has lost the id is told here, perhaps too late.
        let _ = pool.beat();
        if Deviation::WithoutObjects.is_on() {
            continue;
        }
        match pool.create(name, 8) {
            Ok(object) => pool.close(object),
            Err(PoolError::DirectoryFull { .. }) => continue,
            Err(error) => panic!("{name} cannot be created: {error}"),
        }
        pool.close(pool.open(name).expect("it was created"));
        if name == names[0] {
            pool.destroy(name).expect("it was created");
        } else {
            made.borrow_mut().push(name);
        }
    }
}

/// Notes which incarnation believes to belong to the pool, and in which epoch.
fn stand(pool: &Pool<ModelMemory>, beliefs: &RefCell<BTreeMap<u64, u64>>, stage: &Cell<Stage>) {
    let incarnation = pool.this_process().host_incarnation;
    let out = stage.get() == Stage::Evicted(true) && incarnation == 1;
    if let Ok(epoch) = pool.check_membership() {
        assert!(!out, "incarnation 1 still believes in epoch {epoch} that it belongs to the pool");
        let holder = *beliefs.borrow_mut().entry(epoch).or_insert(incarnation);
        assert_eq!(holder, incarnation, "two incarnations of host 1 belong to the pool in epoch {epoch}");
    }
}

/// Two processes of one host, with caches that the hardware keeps in step, but with words of their own each. The first has
/// made objects, if the pool has any, and gives signs of life until the second was refused; then it leaves, or it dies before.
/// The one that leaves is stopped for a while in some schedules, and the second comes then; in others the second is stopped.
fn run_directories(seed: u64) -> Outcome {
    let (superblock, layout) = with_names();
    let mut world = World::new(seed, shape(2, &layout, Coherence::Coherent));
    let (dies, leaves_slowly, comes_slowly) = (seed & 3 == 0, seed & 3 == 1, seed & 3 == 2);
    // Many times as long as a heartbeat may take to be seen, as in every sound configuration. Who leaves is stopped for a shorter time,
    // and who comes may be stopped for a longer one.
    let [silence, nap] = match seed & 3 {
        1 => [Duration::from_secs(600), Duration::ZERO],
        2 => [Duration::from_secs(60), Duration::from_secs(1)],
        _ => [100 * SILENCE, Duration::ZERO],
    };
    let its_layout = layout.clone();
    let join = move |memory, pid| {
        let member = Member { pid, silence, ..member(0, 7) };
        Pool::attach_in(memory, superblock, its_layout.clone(), member)
    };
    let (made, lives, refused) = (Made::default(), Rc::new(Cell::new(true)), Rc::new(Cell::new(0)));
    let old = world.setup_as(0, 0, |memory| join(memory, 1)).expect("nobody else is there");
    work(&old, ["/a", "/b"], &made);
    let (its_life, its_refusals) = (Rc::clone(&lives), Rc::clone(&refused));
    let old = world.spawn(0, 0, move |memory| {
        while its_refusals.get() == 0 {
            old.beat().expect("nobody else is this host");
            match nap {
                Duration::ZERO => memory.pause(),
                nap => {
                    let seen = memory.announce_sleep(Bell(0));
                    memory.sleep(Bell(0), seen, memory.now() + nap);
                }
            }
        }
        its_life.set(false);
        if leaves_slowly {
            memory.crash_after(Crash::Pause, seed >> 2 & 127);
        }
        old.detach().expect("no other process shares its words");
    });
    if dies {
        world.crash_within(old, Crash::Process, 500);
        let its_life = Rc::clone(&lives);
        world.spawn_after_crash(old, 0, 0, move |_| its_life.set(false));
    }
    let is_there = move |memory: &ModelMemory| {
        let line = Process::read_own(memory, &layout, 0, ProcessSlot(0)).expect("memory that is there");
        line.is_none_or(|line| line.state == ProcessState::Live)
    };
    let (given, join_anew) = (Rc::clone(&made), join.clone());
    let new = world.spawn(1, 0, move |memory| {
        let new = loop {
            while leaves_slowly && refused.get() > 0 && is_there(&memory) {
                memory.pause();
            }
            match join_anew(memory.clone(), 2) {
                Ok(new) => break new,
                Err(PoolError::Apart { host: 0, slot: 0, pid: 0 | 1 }) => refused.set(refused.get() + 1),
                Err(error) => panic!("the host is neither shared nor left: {error}"),
            }
            assert!(refused.get() < 100, "the other is long gone");
        };
        assert!(!lives.get(), "it was let in beside a process that lives");
        work(&new, ["/c", "/d"], &given);
        let line = HostLine::read(&memory, new.layout(), 0, PATIENCE).expect("a whole host line");
        assert_eq!((line.state, line.boot), (HostState::Live, 7), "what its host says while it is in");
    });
    if comes_slowly {
        world.crash_within(new, Crash::Pause, 500);
    }
    world.check(1, move |memory| {
        let pool = join(memory, 3).expect("nobody else is there");
        for name in made.take() {
            pool.close(pool.open(name).expect("it was created and not destroyed"));
        }
    });
    world.run()
}

type AnnouncedStates = Cell<[Option<(u64, ProcessState)>; 2]>;

/// Processes of host 0 come, crash, come again and leave; host 1 watches. What this shows is among processes that share
/// their caches; what another host sees of them is the other suites' subject.
fn processes(seed: u64) -> Outcome {
    let (superblock, layout) = superblock(2, 2, 1);
    let mut world = World::new(seed, shape(2, &layout, Coherence::Coherent));
    let announced = Rc::new(AnnouncedStates::default());
    for slot in 0..2 {
        let process = || {
            let (announced, layout) = (Rc::clone(&announced), layout.clone());
            move |memory| come_and_leave(memory, slot, superblock, &layout, &announced)
        };
        let first = world.spawn(0, slot, process());
        if seed >> 2 >> slot & 1 == 0 {
            world.crash_within(first, Crash::Process, 300);
            world.spawn_after_crash(first, 0, slot, process());
        }
    }
    let watcher = world
        .setup_as(1, 0, |memory| attach(memory, superblock, &layout, member(1, 8)))
        .expect("nobody else is there");
    world.spawn(1, 0, move |memory| {
        for _ in 0..4 {
            observe(&watcher, &announced);
            memory.pause();
        }
    });
    world.check(0, move |memory| {
        let line = HostLine::read(&memory, &layout, 0, PATIENCE).expect("a whole host line");
        assert_eq!((line.state, line.boot), (HostState::Left, 7));
    });
    world.run()
}

fn come_and_leave(
    memory: ModelMemory,
    slot: u16,
    superblock: Superblock,
    layout: &Layout,
    announced: &AnnouncedStates,
) {
    let pool = attach(memory, superblock, layout, member(0, 7)).expect("the host is ours");
    let incarnation = pool.this_process().incarnation;
    let say = |state| {
        let mut all = announced.get();
        all[usize::from(slot)] = Some((incarnation, state));
        announced.set(all);
    };
    say(ProcessState::Live);
    assert!(pool.peer_alive(0, ProcessSlot(slot)).expect("whole lines"));
    pool.detach().expect("no process of the host stays away for long");
    say(ProcessState::Left);
}

/// What a process has returned from, another host sees.
fn observe(watcher: &Pool<ModelMemory>, announced: &AnnouncedStates) {
    for slot in 0..2 {
        let before = announced.get()[usize::from(slot)];
        let Ok(seen) = watcher.process(0, ProcessSlot(slot)) else { continue };
        let Some((incarnation, state)) = before else { continue };
        assert!(seen.incarnation >= incarnation, "slot {slot} is {seen:?}, and was {incarnation} before");
        if seen.incarnation == incarnation && state == ProcessState::Left {
            assert_eq!(seen.state, ProcessState::Left, "slot {slot}");
        }
    }
}
