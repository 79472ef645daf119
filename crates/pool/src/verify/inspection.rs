//! A region becomes a pool, and what is in it is told from outside: by an inspection, by a check of caches of blocks, and by who asks for the
//! holders of an object.
//!
//! All hosts had the region in their caches before. The oracle is the process that uses the pool: once it says so, its objects, its blocks
//! and what it holds are told as they are, and nothing is called damaged.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use polder_mem::model::{Change, Crash, Harmless, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Coherence, LINE, Memory, Offset};

use super::group::{Dice, harmless};
use super::stage::{attached, pool_of, shape_of, small};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Overwrite, Superblock, format_as, read_superblock};
use crate::kv::wire::Root;
use crate::kv::{Cache, Identity, Key, Options, check, inspect as inspect_caches};
use crate::{Member, Pool, PoolError, inspect};

pub(super) fn suites() -> Vec<Suite> {
    let about = "a region is formatted, whatever was there; from outside all that a pool holds is told, and none of it is called damaged";
    let files = &[
        "src/inspect.rs",
        "opens/look.rs",
        "kv/stat.rs",
        "layout/contents.rs",
        "layout/format.rs",
        "kv/check.rs",
    ];
    vec![Suite::new("inspection", about, inspection).mutates(files).harmless(HARMLESS)]
}

/// Changes that a look bears in the model, argued at their site.
const HARMLESS: &[Harmless; 2] = &[
    harmless("kv/check.rs", "loads are done in order", Change::Drop),
    harmless("kv/check.rs", "loads are done in order", Change::Weaken),
];

/// Looks that are known to be wrong. The suite is their control.
pub(super) fn canaries() -> Vec<Suite> {
    vec![
        Suite::new(
            "inspection-looks-once",
            "a check of a cache does not look at a slot's line again",
            |seed| Deviation::LooksOnce.during(|| inspection(seed)),
        ),
        Suite::new(
            "inspection-judges-once",
            "an inspection does not look whether an object is still there",
            |seed| Deviation::JudgesOnce.during(|| inspection(seed)),
        ),
        Suite::new(
            "inspection-counts-once",
            "an inspection does not look again which chunks hosts hold",
            |seed| Deviation::CountsOnce.during(|| inspection(seed)),
        ),
    ]
}

/// The host that uses the pool, the one that formats it, and the one that looks from outside.
const USER: u16 = 0;
const FORMATTER: u16 = 1;
const INSPECTOR: u16 = 2;
const HOSTS: u16 = 3;
const NAME: &str = "/x";
/// Bytes of a block.
const BLOCK: u32 = 72;
/// Blocks that a scene puts at most.
const MOST_PUTS: u8 = 40;
/// Slots of the only slab of the cache.
const SLOTS: u64 = 2;
/// Memory operations of a look.
const LOOK: u64 = 1200;

static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry { names: 11, chunk_bytes: 2048, opens: 12, ..small(HOSTS, 2) };
    pool_of(geometry, 6)
});

/// A pool of two chunks and a few names, and the memory operations of a look at it.
static SMALL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry = Geometry { names: 3, levels: 2, chunk_bytes: CHUNK, opens: 3, ..small(HOSTS - 1, 1) };
    pool_of(geometry, 2)
});
const CHUNK: u64 = 512;
const SMALL_LOOK: u64 = 400;
/// Objects that a host makes beside such looks at most.
const MOST_TURNS: u8 = 40;

/// How far the scene has come, as its players tell each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Begun,
    Seen,
    Wiped,
    Formatted,
    /// The cache has no free slot, and blocks are evicted until the looks that may meet that are done.
    Filled,
    Looked,
    Used,
    Told,
}

#[derive(Clone)]
struct Cue {
    stage: Rc<Cell<Stage>>,
    /// Hosts that have seen or told.
    hosts: Rc<Cell<u16>>,
    /// Blocks that were put, in all and since the slab gave way last.
    puts: Rc<Cell<u8>>,
    kept: Rc<Cell<u8>>,
}

impl Cue {
    fn give(&self, stage: Stage) {
        self.stage.set(stage);
    }

    fn await_(&self, memory: &ModelMemory, stage: Stage) {
        while self.stage.get() < stage {
            memory.pause();
        }
    }

    /// One of the hosts has seen, or told.
    fn count(&self, all: u16, stage: Stage) {
        self.hosts.set(self.hosts.get() + 1);
        if self.hosts.get() == all {
            self.hosts.set(0);
            self.give(stage);
        }
    }
}

/// What was in the region before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Zeros,
    /// Something that is lost.
    Garbage,
    /// Something that another host wipes.
    Wiped,
}

fn inspection(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 31);
    if seed % 8 == 7 {
        return turns(seed, &mut dice);
    }
    let (superblock, layout) = &*POOL;
    let kernels = dice.kernels();
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let mut world = World::new(seed, shape_of(layout, kernels, coherence));
    // A look reads a line that stays torn a thousand times before it calls it damaged.
    world.budget(4_000_000);
    let before = [Before::Zeros, Before::Garbage, Before::Wiped][dice.roll(3) as usize];
    if before != Before::Zeros {
        let bytes = superblock.bytes as usize;
        world.setup(|memory| memory.copy_in(Offset(0), &vec![0xa5; bytes]).expect("the model has no faults"));
    }
    let cue = Cue {
        stage: Rc::new(Cell::new(Stage::Begun)),
        hosts: Rc::default(),
        puts: Rc::default(),
        kept: Rc::default(),
    };
    let (puts, looks) = (1 + dice.roll(3) as u8, [dice.roll(3), dice.roll(3)]);
    // A look that stops in the middle meets blocks that are evicted meanwhile.
    let stops = [(); 3].map(|()| dice.roll(LOOK));
    let in_use = u64::from(puts) >= SLOTS && dice.roll(2) == 0;
    let turns_over = dice.roll(2) == 0;
    let given = cue.clone();
    world.spawn(USER, 0, move |memory| {
        given.await_(&memory, Stage::Seen);
        if before == Before::Wiped {
            wipe(&memory);
        }
        given.give(Stage::Wiped);
        given.await_(&memory, Stage::Formatted);
        use_pool(memory, &given, puts, in_use, turns_over);
    });
    let given = cue.clone();
    world.spawn(FORMATTER, 0, move |memory| {
        see_all(&memory);
        given.count(HOSTS - 1, Stage::Seen);
        given.await_(&memory, Stage::Wiped);
        let overwrite = if before == Before::Garbage { Overwrite::Force } else { Overwrite::Refuse };
        format_as(&memory, &superblock.geometry, superblock.uuid, overwrite, None)
            .expect("nothing is lost that is to stay");
        given.give(Stage::Formatted);
        tell_holders(memory, &given, looks[0]);
        given.count(HOSTS - 1, Stage::Told);
    });
    world.spawn(INSPECTOR, 0, move |memory| {
        see_all(&memory);
        cue.count(HOSTS - 1, Stage::Seen);
        cue.await_(&memory, Stage::Formatted);
        if in_use {
            cue.await_(&memory, Stage::Filled);
        }
        look(&memory, &stops[..looks[1] as usize]);
        if in_use {
            cue.give(Stage::Looked);
        }
        tell_all(&memory, &cue);
        cue.count(HOSTS - 1, Stage::Told);
    });
    world.run()
}

/// Two hosts have the chunks of a pool in turn, for objects of several sizes. A look that stops in the middle then meets other objects
/// than those of which it has read.
fn turns(seed: u64, dice: &mut Dice) -> Outcome {
    let (superblock, layout) = &*SMALL;
    let kernels = dice.kernels();
    let coherence = if dice.roll(8) == 0 { Coherence::Coherent } else { Coherence::Software };
    let mut world = World::new(seed, Shape { hosts: HOSTS, ..shape_of(layout, kernels, coherence) });
    world.budget(4_000_000);
    world.setup(|memory| {
        format_as(&memory, &superblock.geometry, superblock.uuid, Overwrite::Refuse, None).expect("zeros")
    });
    let is_over = Rc::new(Cell::new(false));
    for host in [USER, FORMATTER] {
        let member = Member { pid: pid(host), ..Member::new(host, 7) };
        let pool = world.setup_as(host, 0, |memory| attached(&SMALL, memory, false, member));
        let sizes = [(); 3].map(|()| [60, 300, 2 * CHUNK - LINE][dice.roll(3) as usize]);
        let over = Rc::clone(&is_over);
        world.spawn(host, 0, move |_| {
            let turns = sizes.into_iter().cycle().take(MOST_TURNS.into());
            turns.take_while(|_| !over.get()).for_each(|bytes| take_turn(&pool, bytes));
        });
    }
    let stops = [(); 2].map(|()| dice.roll(SMALL_LOOK));
    world.spawn(INSPECTOR, 0, move |memory| {
        for stop in stops {
            memory.crash_after(Crash::Pause, stop);
            let problems = inspect(&memory).expect("the model has no faults").problems;
            assert_eq!(problems, [], "of a pool in use");
        }
        is_over.set(true);
    });
    world.run()
}

/// Makes an object where there is room, and gives its chunks back.
fn take_turn(pool: &Pool<ModelMemory>, bytes: u64) {
    let name = format!("/{}", pool.member().host);
    match pool.create(&name, bytes) {
        Ok(object) => {
            pool.close(object);
            pool.destroy(&name).expect("nobody else does");
        }
        Err(PoolError::Full { .. } | PoolError::DirectoryFull { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    pool.maintain().expect("nobody keeps a lock");
    pool.directory().give_back_all().expect("nobody keeps a lock");
}

/// Has the whole region in this host's caches.
fn see_all(memory: &ModelMemory) {
    memory.copy_out(Offset(0), &mut vec![0; memory.bytes() as usize]).expect("the model has no faults");
}

fn wipe(memory: &ModelMemory) {
    let bytes = memory.bytes();
    memory.copy_in(Offset(0), &vec![0; bytes as usize]).expect("the model has no faults");
    memory.write_back(Offset(0), bytes);
    memory.mfence();
}

fn attach(memory: ModelMemory, host: u16) -> Arc<Pool<ModelMemory>> {
    let superblock = read_superblock(&memory).expect("it was formatted");
    let layout = superblock.layout().expect("as it was made");
    attached(&(superblock, layout), memory, false, Member { pid: pid(host), ..Member::new(host, 7) })
}

const fn pid(host: u16) -> u32 {
    100 + host as u32
}

fn key(name: u8) -> Key {
    [name; 16]
}

/// Has an object open, puts blocks where there is room for two, and pins the last, until all have been told. Blocks are put as long as
/// somebody looks that wants to see some evicted, and before some of them the slab gives way to something else.
fn use_pool(memory: ModelMemory, cue: &Cue, puts: u8, in_use: bool, turns_over: bool) {
    let pool = attach(memory.clone(), USER);
    let object = pool.create(NAME, 100).expect("there is room");
    let identity = Identity { hash: [5; 32], text: "model".to_owned(), block: BLOCK };
    let budget = LINE * (1 + SLOTS) + SLOTS * 128;
    let root = Root { slab_bytes: 512 + LINE + SLOTS * (LINE + 128), log_lines: 4, budget, hosts: HOSTS };
    let options = Options { budget: Some(budget), verify: true };
    let cache = Cache::open_with(Arc::clone(&pool), "c", identity, options, root).expect("there is room");
    let put = |name| {
        let put = cache.put(&[key(name)], &[&[name; BLOCK as usize]]).expect("nobody keeps a lock");
        assert_eq!(put.stored, 1, "there is no room");
        cue.puts.set(name + 1);
        cue.kept.set(cue.kept.get() + 1);
    };
    (0..puts).for_each(put);
    if in_use {
        cue.give(Stage::Filled);
        (puts..MOST_PUTS).take_while(|_| cue.stage.get() < Stage::Looked).for_each(|name| {
            if turns_over && name % 4 == 0 {
                turn_over(&pool, root.slab_bytes);
                cue.kept.set(0);
            }
            put(name);
        });
        cue.await_(&memory, Stage::Looked);
    }
    let pin = cache.pin(&[key(cue.puts.get() - 1)]).expect("nobody keeps a lock");
    // What it has written back is in memory before it says so.
    memory.mfence();
    cue.give(Stage::Used);
    cue.await_(&memory, Stage::Told);
    drop(pin);
    pool.close(object);
}

/// Something else lies where the slab was, for a while.
fn turn_over(pool: &Arc<Pool<ModelMemory>>, bytes: u64) {
    Cache::give_up_part(pool, "c").expect("nobody keeps a lock");
    let other = pool.create("/other", bytes).expect("there is room");
    other.write_at(pool.memory(), 0, &vec![0xee; bytes as usize]).expect("it is as large");
    pool.close(other);
    pool.destroy("/other").expect("it is there");
}

/// Asks who has the object open, before and once it is.
fn tell_holders(memory: ModelMemory, cue: &Cue, looks: u64) {
    let pool = attach(memory.clone(), FORMATTER);
    (0..looks).for_each(|_| drop(pool.holders(NAME)));
    cue.await_(&memory, Stage::Used);
    let holders = pool.holders(NAME).expect("it is there");
    assert_eq!(holders.iter().map(|peer| peer.pid).collect::<Vec<_>>(), [pid(USER)]);
}

/// Looks from outside while the pool is used, with a stop in each look.
fn look(memory: &ModelMemory, stops: &[u64]) {
    for stop in stops {
        memory.crash_after(Crash::Pause, *stop);
        drop(inspect_caches(memory));
        assert_eq!(inspect(memory).expect("the model has no faults").problems, [], "of a pool in use");
        // A block that is evicted meanwhile is passed over, and a slab that goes.
        let caches = check(memory).expect("the model has no faults");
        assert!(caches.iter().all(|cache| cache.damaged.is_empty()), "{caches:?}");
    }
}

/// Looks from outside once the pool is used.
fn tell_all(memory: &ModelMemory, cue: &Cue) {
    cue.await_(memory, Stage::Used);
    let inspection = inspect(memory).expect("the model has no faults");
    assert_eq!(inspection.problems, []);
    let names: Vec<_> = inspection.objects.iter().map(|object| object.name.as_str()).collect();
    assert!(names.contains(&NAME) && names.contains(&"/kv/c"), "{names:?}");
    let user = inspection.stat.hosts.iter().find(|host| host.host == USER).expect("it is there");
    assert_eq!((user.processes.as_slice(), user.objects), (&[pid(USER)][..], names.len() as u64));
    let puts = cue.puts.get();
    let blocks = u64::from(cue.kept.get()).min(SLOTS);
    let caches = inspect_caches(memory).expect("the model has no faults");
    let [cache] = &caches[..] else { panic!("{caches:?}") };
    let part = cache.hosts.iter().find(|part| part.host == USER).expect("its control line is whole");
    assert_eq!((part.blocks, part.pinned, part.puts), (blocks, Some(1), puts.into()));
    assert_eq!(cache.blocks, blocks);
    let checked = &check(memory).expect("the model has no faults")[0];
    assert_eq!((checked.blocks, checked.read, checked.damaged.as_slice()), (blocks, blocks, &[][..]));
}
