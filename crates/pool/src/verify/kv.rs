//! A cache of blocks: processes of two hosts put blocks and get them while others evict them, and one dies or stops at any memory
//! operation.
//!
//! Half of the scenes are of the moments that matter alone: one process puts what another gets, two hosts ask for the last room.
//!
//! The oracle is beside the pool. A block's bytes follow from its key, so whoever gets one knows whether it is right. In scenes
//! where nothing need be evicted, what a put has returned for is found by every look-up that begins after.

mod adoption;
mod pins;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use polder_mem::model::{Change, Crash, Harmless, Kernels, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Coherence, Memory, Offset};

use super::group::{Dice, harmless};
use super::stage::{attached, expect_all_clean, pool_of, shape_of, small};
use crate::deviation::Deviation;
use crate::format::{Geometry, Layout, Superblock};
use crate::kv::wire::Root;
use crate::kv::{Cache, Identity, Key, Options};
use crate::{Member, Pool, PoolError};

pub(super) fn suites() -> Vec<Suite> {
    let about = "blocks are put, found, read and evicted while processes and hosts die: none is wrong, none that is there is missed";
    // A host that boots again did die here: its scene leaves out that it is fenced.
    let kv = |seed| Deviation::SilenceIsEnough.during(|| kv(seed, true));
    let files =
        &["src/kv.rs", "kv/part.rs", "kv/slabs.rs", "kv/replica.rs", "kv/get.rs", "kv/take.rs", "kv/uses.rs"];
    let pins_about =
        "a block that is pinned stays where it is while its owner evicts, gives up its slab, dies or stops";
    let gone_about =
        "the room of a host that is gone goes to one that wants some, whenever the keeper that gives it dies";
    let put_about = "a block that is put is whole where its line or its record is read, and what a put gives back is another's";
    let pins = |seed| Deviation::SilenceIsEnough.during(|| kv_pins(seed, true));
    vec![
        Suite::new("kv", about, kv).mutates(files).harmless(HARMLESS),
        Suite::new("kv-put", put_about, |seed| Deviation::SilenceIsEnough.during(|| kv_put(seed)))
            .mutates(&["kv/put.rs"]),
        Suite::new("kv-pins", pins_about, pins).mutates(&["kv/pin.rs"]),
        Suite::new("kv-gone", gone_about, |seed| Deviation::SilenceIsEnough.during(|| kv_gone(seed)))
            .mutates(&["kv/gone.rs"]),
    ]
}

/// Changes that a cache bears in the model, each argued at its site.
const HARMLESS: &[Harmless; 17] = &[
    harmless("kv/get.rs", "loads are done in order", Change::Drop),
    harmless("kv/get.rs", "loads are done in order", Change::Weaken),
    harmless("kv/part.rs", "control line of its own", Change::Drop),
    harmless("kv/part.rs", "control line of its own", Change::Weaken),
    harmless("kv/part.rs", "log of its own", Change::Drop),
    harmless("kv/part.rs", "log of its own", Change::Weaken),
    harmless("kv/part.rs", "slabs of its own", Change::Drop),
    harmless("kv/part.rs", "slabs of its own", Change::Weaken),
    harmless("kv/part.rs", "all of its own", Change::Drop),
    harmless("kv/part.rs", "all of its own", Change::Weaken),
    harmless("kv/part.rs", "where a host goes on", Change::Drop),
    harmless("kv/uses.rs", "a hit that its owner does not see", Change::Drop),
    harmless("kv/uses.rs", "totals that no protocol", Change::Drop),
    harmless("kv/uses.rs", "with older counts", Change::Drop),
    harmless("kv/uses.rs", "with older counts", Change::Weaken),
    harmless("kv/uses.rs", "counts of any age", Change::Drop),
    harmless("kv/uses.rs", "counts of any age", Change::Weaken),
];

/// Protocols that are known to be wrong. The suite is their control.
pub(super) fn canaries() -> Vec<Suite> {
    vec![
        Suite::new("kv-looks-once", "a reader of a block does not look at its line again", |seed| {
            Deviation::LooksOnce.during(|| kv(seed, false))
        }),
        Suite::new("kv-ignores-pins", "an owner does not look for pins before it evicts", |seed| {
            Deviation::IgnoresPins.during(|| kv_pins(seed, false))
        }),
        Suite::new("kv-takes-in-silence", "a slot is written before its line says so", |seed| {
            Deviation::TakesInSilence.during(|| kv(seed, false))
        }),
    ]
}

const NAME: &str = "c";
const HOSTS: u16 = 2;
/// Processes of a host: two that put, two that get, one that comes beside one that stopped, and the judge.
const PROCESSES: u16 = 6;
const SPARE: u16 = 5;
/// Bytes of a block: more than a line, and no whole number of them.
const BLOCK: u32 = 72;
/// Slots of a slab.
const SLOTS: u64 = 2;
/// Memory operations in which a cache is removed.
const REMOVAL: u64 = 1500;
/// The process id of the one that looks at the end.
const JUDGE: u32 = 500;

static POOL: LazyLock<(Superblock, Layout)> = LazyLock::new(|| {
    let geometry =
        Geometry { names: 19, chunk_bytes: 2048, opens: 12, keepers: 4, ..small(HOSTS, PROCESSES) };
    pool_of(geometry, 15)
});

/// What is known outside the memory.
struct Witness {
    /// What calls that have returned have put.
    put: RefCell<BTreeSet<u8>>,
    /// Whether something may be evicted.
    evicts: bool,
    /// Slabs that the budget allows.
    slabs: u64,
    log_lines: u64,
    crash: Option<Crash>,
    kernels: Kernels,
    boots: [Cell<u64>; HOSTS as usize],
}

impl Witness {
    /// Of a scene in which nobody dies and the budget has room for one slab.
    fn of_a_slab(kernels: Kernels, evicts: bool, log_lines: u64) -> Rc<Self> {
        let (put, crash, boots) = Default::default();
        Rc::new(Self { put, evicts, slabs: 1, log_lines, crash, kernels, boots })
    }

    fn budget(&self) -> u64 {
        self.slabs * (64 * (1 + SLOTS) + SLOTS * 128)
    }

    fn put(&self, cache: &Cache<ModelMemory>, names: &[u8]) -> u64 {
        let keys: Vec<Key> = names.iter().map(|name| key(*name)).collect();
        let blocks: Vec<Vec<u8>> = names.iter().map(|name| block(*name)).collect();
        let blocks: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
        let put = cache.put(&keys, &blocks).expect("nobody keeps a lock, and the model has no faults");
        assert_eq!(put.stored + put.present + put.refused, names.len() as u64);
        assert!(self.evicts || put.refused == 0, "{put:?} where there is room");
        // What is present may be on its way: another process of this host has put it, and its call has not returned.
        if put.stored == names.len() as u64 {
            self.put.borrow_mut().extend(names);
        }
        put.refused
    }

    /// Looks blocks up and reads them; how many were there.
    fn get(&self, cache: &Cache<ModelMemory>, names: &[u8]) -> u64 {
        let known: Vec<_> = names.iter().filter(|name| self.put.borrow().contains(name)).copied().collect();
        let keys: Vec<Key> = names.iter().map(|name| key(*name)).collect();
        let there = cache.lookup(&keys).expect("the model has no faults");
        let mut buffers = vec![vec![0; BLOCK as usize]; names.len()];
        let mut into: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let found = cache.get(&keys, &mut into).expect("the model has no faults");
        for ((name, found), (there, bytes)) in names.iter().zip(&found).zip(there.iter().zip(&buffers)) {
            assert!(!found || *bytes == block(*name), "block {name} has another's bytes: {bytes:?}");
            let is_due = !self.evicts && known.contains(name);
            assert!(
                !is_due || (*there && *found),
                "block {name} was put: looked up {there}, read {found}, crash {:?}, {:?}",
                self.crash,
                self.kernels
            );
        }
        found.iter().filter(|found| **found).count() as u64
    }
}

fn key(name: u8) -> Key {
    [name; 16]
}

fn block(name: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| name * 16 + at as u8 % 16).collect()
}

/// One or two different names.
fn names(dice: &mut Dice, of: u64) -> Vec<u8> {
    let first = dice.roll(of) as u8;
    let second = dice.roll(of) as u8;
    let mut names = vec![first];
    names.extend(Some(second).filter(|second| *second != first && dice.roll(2) == 0));
    names
}

/// The moments of a put.
fn kv_put(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 37);
    let kernels = dice.kernels();
    let world = world(seed, kernels, dice.roll(8) == 0);
    match dice.roll(8) {
        0 => adoption::withdrawal(world, kernels, &mut dice),
        _ => publication(world, kernels, &mut dice),
    }
}

/// Blocks that are pinned, and their owner.
fn kv_pins(seed: u64, boots: bool) -> Outcome {
    let mut dice = Dice::new(seed, 23);
    let (crash, kernels) = fate(&mut dice, boots);
    // One that pins and one that evicts need a fence of both kinds of hosts.
    let world = world(seed, kernels, dice.roll(3) > 0);
    match dice.roll(24) {
        0 => pins::kept(world, kernels, &mut dice),
        1..7 => pins::pins(world, kernels, crash, &mut dice),
        _ => pins::held(world, kernels, &mut dice),
    }
}

/// A host that is fenced, and a keeper that gives away its room.
fn kv_gone(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 29);
    let dies = [None, Some(Crash::Host), Some(Crash::Process), Some(Crash::Process)][dice.roll(4) as usize];
    // Whoever stands in for a host knows that it is off, and watches for no heartbeats.
    let kernels = dice.kernels();
    adoption::given(world(seed, kernels, dice.roll(8) == 0), dies, &mut dice)
}

/// Who may die, and under which kernels hosts run.
fn fate(dice: &mut Dice, boots: bool) -> (Option<Crash>, Kernels) {
    let crashes = [None, Some(Crash::Pause), Some(Crash::Host), Some(Crash::Process)];
    let crash = crashes[dice.roll(4) as usize].filter(|crash| boots || *crash != Crash::Host);
    let kernels = dice.kernels_beside(crash);
    (crash, kernels)
}

/// A world with a machine more than there are hosts, for one that is gone.
fn world(seed: u64, kernels: Kernels, is_coherent: bool) -> World {
    let coherence = if is_coherent { Coherence::Coherent } else { Coherence::Software };
    let shape = shape_of(&POOL.1, kernels, coherence);
    World::new(seed, Shape { hosts: HOSTS + 1, ..shape })
}

/// Two that put and one or two that get; `boots` says whether a host may die and boot again.
fn kv(seed: u64, boots: bool) -> Outcome {
    let mut dice = Dice::new(seed, 19);
    let (crash, kernels) = fate(&mut dice, boots);
    let scene = dice.roll(18);
    // Two that ask for the last room need a fence of both kinds of hosts.
    let mut world = world(seed, kernels, dice.roll(if scene == 4 { 2 } else { 8 }) == 0);
    match scene {
        0..4 => return moment(world, kernels, &mut dice),
        4 => return last_room(world, kernels, &mut dice),
        5..8 => return slab(world, kernels, &mut dice),
        8 => return adoption::adoption(world, kernels, crash, &mut dice),
        9 => return removal(world, kernels, &mut dice),
        _ => {}
    }
    let evicts = dice.roll(2) == 0;
    let witness = Rc::new(Witness {
        put: RefCell::default(),
        evicts,
        // Where nothing is evicted each host can hold every block twice: a dead process's slots included.
        slabs: if evicts { 1 + dice.roll(2) } else { 12 },
        log_lines: [2, 8][dice.roll(2) as usize],
        crash,
        kernels,
        boots: Default::default(),
    });
    let blocks = if evicts { 6 } else { 3 };
    let host = dice.roll(HOSTS.into()) as u16;
    let mut writers = vec![];
    for slot in 0..2 {
        // Most often both put on one host, where they meet; else on two.
        let host = if slot == 1 && dice.roll(3) == 0 { 1 - host } else { host };
        let cache =
            world.setup_as(host, slot, |memory| attach(memory, host, 100 + u32::from(slot), &witness));
        for _ in 0..dice.roll(2) {
            let names = names(&mut dice, blocks);
            world.setup_as(host, slot, |_| witness.put(&cache, &names));
        }
        let calls: Vec<_> = (0..1 + dice.roll(2)).map(|_| names(&mut dice, blocks)).collect();
        let known = Rc::clone(&witness);
        let thread =
            world.spawn(host, slot, move |_| calls.iter().for_each(|names| _ = known.put(&cache, names)));
        writers.push((thread, host, slot));
    }
    let mut victim = writers[0];
    for reader in 0..1 + dice.roll(2) as u16 {
        let at = dice.roll(HOSTS.into()) as u16;
        let slot = 2 + reader;
        let cache = world.setup_as(at, slot, |memory| attach(memory, at, 200 + u32::from(reader), &witness));
        let calls: Vec<_> = (0..1 + dice.roll(3)).map(|_| names(&mut dice, blocks)).collect();
        let known = Rc::clone(&witness);
        let thread =
            world.spawn(at, slot, move |_| calls.iter().for_each(|names| _ = known.get(&cache, names)));
        if reader == 0 && crash != Some(Crash::Host) && dice.roll(3) == 0 {
            victim = (thread, at, slot);
        }
    }
    if let Some(crash) = crash {
        let (thread, host, slot) = victim;
        world.crash_within(thread, crash, 600);
        let (known, names) = (Rc::clone(&witness), names(&mut dice, blocks));
        // A process that stops keeps its slot.
        let slot = if crash == Crash::Pause { 4 } else { slot };
        world.spawn_after_crash(thread, host, slot, move |memory| {
            if known.crash == Some(Crash::Host) {
                known.boots[usize::from(host)].set(1);
            }
            let cache = attach(memory, host, 300, &known);
            known.put(&cache, &names);
            known.get(&cache, &names);
        });
    }
    judge(&mut world, &witness);
    world.run()
}

/// One process puts a block or two, and another gets what is there before, meanwhile and after. A cache of the same name may have been
/// there before, with other bytes where this one's blocks come to lie.
fn moment(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let before = dice.roll(SLOTS + 1) as u8;
    let puts = 1 + dice.roll(2) as u8;
    let witness =
        Witness::of_a_slab(kernels, u64::from(before + puts) > SLOTS, [1, 2, 16, 16][dice.roll(4) as usize]);
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    let names: Vec<u8> = (0..before + puts).collect();
    if dice.roll(2) == 0 {
        world.setup_as(hosts[0], 0, |memory| {
            let cache = attach(memory.clone(), hosts[0], 99, &witness);
            names.iter().for_each(|name| _ = witness.put(&cache, &[*name]));
            let slab = cache.pool().open(&format!("/kv/{NAME}/slab/{}/0", hosts[0])).expect("it has blocks");
            let garbage = vec![0xee; (SLOTS * 128) as usize];
            slab.write_at(&memory, 64 * (1 + SLOTS), &garbage).expect("it is as large");
            cache.pool().close(slab);
            remove(cache);
            witness.put.borrow_mut().clear();
        });
    }
    let is_new = before == 0 && dice.roll(2) == 0;
    // The writer's host may be new to the reader.
    let writer =
        (!is_new).then(|| world.setup_as(hosts[0], 0, |memory| attach(memory, hosts[0], 100, &witness)));
    let reader = world.setup_as(hosts[1], 1, |memory| attach(memory, hosts[1], 200, &witness));
    if dice.roll(2) == 0 {
        world.setup_as(hosts[1], 1, |_| witness.get(&reader, &names));
    }
    for name in &names[..usize::from(before)] {
        let writer = writer.as_ref().expect("something is put before");
        world.setup_as(hosts[0], 0, |_| witness.put(writer, &[*name]));
        if dice.roll(3) == 0 {
            world.setup_as(hosts[1], 1, |_| witness.get(&reader, &names));
        }
    }
    let (known, new) = (Rc::clone(&witness), names[usize::from(before)..].to_vec());
    let together = dice.roll(2) == 0;
    let is_done = Rc::new(Cell::new(false));
    let done = Rc::clone(&is_done);
    world.spawn(hosts[0], 0, move |memory| {
        let cache = writer.unwrap_or_else(|| attach(memory, hosts[0], 100, &known));
        match together {
            true => _ = known.put(&cache, &new),
            false => new.iter().for_each(|name| _ = known.put(&cache, &[*name])),
        }
        done.set(true);
    });
    let (known, looks) = (Rc::clone(&witness), 2 + dice.roll(10));
    let looked = if dice.roll(2) == 0 { names.clone() } else { names[usize::from(before)..].to_vec() };
    world.spawn(hosts[1], 1, move |memory| {
        (0..looks).for_each(|_| _ = known.get(&reader, &looked));
        while !is_done.get() {
            memory.pause();
        }
        known.get(&reader, &names);
    });
    judge(&mut world, &witness);
    world.run()
}

/// Removes a cache that one process has open.
fn remove(cache: Cache<ModelMemory>) {
    let pool = Arc::clone(cache.pool());
    drop(cache);
    Cache::remove(&pool, NAME).expect("nobody keeps a lock");
    pool.maintain().expect("nobody keeps a lock");
}

/// A process that removes a cache dies. The next removes what is left, or makes another of the name before, whose log may be longer.
fn removal(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, true, 2);
    for host in 0..HOSTS {
        world.setup_as(host, 0, |memory| witness.put(&attach(memory, host, 100, &witness), &[0, 1]));
    }
    let (host, known) = (dice.roll(HOSTS.into()) as u16, Rc::clone(&witness));
    let remover = world.spawn(host, 1, move |memory| {
        let pool = pool_as(memory, host, 200, &known);
        Cache::remove(&pool, NAME).expect("nobody keeps a lock");
    });
    world.crash_within(remover, Crash::Process, REMOVAL);
    let comes_back = dice.roll(2) == 0;
    let memories: Vec<_> = (0..HOSTS).map(|host| world.memory(host, SPARE)).collect();
    let next = Witness::of_a_slab(kernels, true, [2, 8][dice.roll(2) as usize]);
    world.check(0, move |_| {
        let attach = |(host, memory)| pool_as(memory, host, JUDGE, &next);
        let pools: Vec<_> = (0..).zip(memories).map(attach).collect();
        if comes_back {
            let caches: Vec<_> = pools.iter().map(|pool| open(Arc::clone(pool), &next)).collect();
            caches.iter().for_each(|cache| _ = next.get(cache, &[0, 1]));
            assert_eq!(next.put(&caches[0], &[2, 3]), 0, "there is no room");
            caches.iter().for_each(|cache| assert_eq!(next.get(cache, &[2, 3]), 2, "what was just put"));
        }
        match Cache::remove(&pools[0], NAME) {
            Err(PoolError::NotFound { .. }) if !comes_back => {}
            removed => removed.expect("nobody keeps a lock"),
        }
        assert_eq!(pools[0].list(""), Ok(vec![]));
        expect_all_clean(&pools);
    });
    world.run()
}

/// The moment of publication alone: slots are taken before, and a reader goes by the log or by the lines of the slots.
fn publication(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, false, 8);
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    let writer = world.setup_as(hosts[0], 0, |memory| attach(memory, hosts[0], 100, &witness));
    world.setup_as(hosts[0], 0, |_| witness.put(&writer, &[1]));
    let begun = world.setup_as(hosts[0], 0, |_| writer.begin(&[key(0)]).expect("there is room"));
    let lines = world.setup_as(hosts[0], 0, |_| slab_of(&writer, hosts[0])).0.lines(1);
    let reader = world.setup_as(hosts[1], 1, |memory| attach(memory, hosts[1], 200, &witness));
    // From then on it knows where the slab is.
    world.setup_as(hosts[1], 1, |_| witness.get(&reader, &[0, 1]));
    let is_done = Rc::new(Cell::new(false));
    let (known, done, left) = (Rc::clone(&witness), Rc::clone(&is_done), closed_at_the_end(&mut world));
    let thread = world.spawn(hosts[0], 0, move |_| {
        let put = writer.finish(begun, &[&block(0)]).expect("the model has no faults");
        assert_eq!(put.stored, 1);
        known.put.borrow_mut().insert(0);
        done.set(true);
        left.set(Some(writer));
    });
    // What it has on its way goes on its way while it stands still, most often where a slot's line says that a block is there.
    match dice.roll(4) {
        0 => {}
        1 => world.crash_within(thread, Crash::Pause, 90),
        // Before its line is known to be in memory, or before its record is.
        near => {
            let operations = dice.roll(if near == 2 { 3 } else { 24 });
            world.crash_past_store(thread, Crash::Pause, (lines.lines(dice.roll(SLOTS)), 0), operations);
        }
    }
    let (comes_anew, reader) = (dice.roll(2) == 0, Rc::new(reader));
    let late = Rc::clone(&reader);
    world.spawn(hosts[1], 1, move |_| {
        for _ in 0..20 {
            if comes_anew {
                reader.forget_all();
            }
            let mut block = [0; BLOCK as usize];
            let found = reader.get(&[key(0)], &mut [&mut block]).expect("the model has no faults");
            assert!(!found[0] || block[..] == self::block(0), "{block:?}");
            if is_done.get() {
                break;
            }
        }
    });
    // What the reader has forgotten too soon it misses for ever.
    world.check(0, move |_| _ = witness.get(&late, &[0]));
    world.run()
}

/// A slab is made where one of an earlier cache was, and another host sees none of the blocks that were there.
fn slab(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, true, 2);
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    let mut earlier = None;
    world.setup_as(hosts[0], 0, |memory| {
        let cache = attach(memory, hosts[0], 99, &witness);
        witness.put(&cache, &[1, 2]);
        earlier = Some(cache);
    });
    // The other host has their lines in its caches.
    world.setup_as(hosts[1], 1, |memory| witness.get(&attach(memory, hosts[1], 199, &witness), &[1, 2]));
    world.setup_as(hosts[0], 0, |_| earlier.take().map(remove));
    let writer = world.setup_as(hosts[0], 0, |memory| attach(memory, hosts[0], 100, &witness));
    let reader = world.setup_as(hosts[1], 1, |memory| attach(memory, hosts[1], 200, &witness));
    let is_done = Rc::new(Cell::new(false));
    let done = Rc::clone(&is_done);
    world.spawn(hosts[0], 0, move |_| {
        writer.make_slab().expect("there is room");
        done.set(true);
    });
    world.spawn(hosts[1], 1, move |memory| {
        let pool = reader.pool();
        while !is_done.get() {
            let found = pool.open_if_there(&format!("/kv/{NAME}/slab/{}/0", hosts[0]));
            if let Some(object) = found.expect("the model has no faults") {
                while !is_done.get() {
                    let has_blocks = reader.has_blocks(&object).expect("the model has no faults");
                    assert!(!has_blocks, "a new slab has blocks of an earlier cache");
                }
                pool.close(object);
            }
            memory.pause();
        }
    });
    world.run()
}

/// Where a process leaves a cache that it does not close, so that what it has on its way is not hurried.
fn closed_at_the_end(world: &mut World) -> Rc<Cell<Option<Cache<ModelMemory>>>> {
    let left = Rc::new(Cell::new(None));
    let found = Rc::clone(&left);
    world.check(0, move |_| drop(found.take()));
    left
}

/// Where the first slab of a host lies, and its bytes.
fn slab_of(cache: &Cache<ModelMemory>, host: u16) -> (Offset, u64) {
    let slab = cache.pool().open(&format!("/kv/{NAME}/slab/{host}/0")).expect("it has blocks");
    let place = (slab.at(), slab.bytes());
    cache.pool().close(slab);
    place
}

/// Two hosts put at once where the budget has room for one slab.
fn last_room(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, true, 2);
    for host in 0..HOSTS {
        let cache = world.setup_as(host, 0, |memory| attach(memory, host, 100, &witness));
        let (known, name) = (Rc::clone(&witness), dice.roll(4) as u8);
        world.spawn(host, 0, move |_| _ = known.put(&cache, &[name]));
    }
    judge(&mut world, &witness);
    world.run()
}

/// At the end each block that is there is right, there is room for others, and all can be removed.
fn judge(world: &mut World, witness: &Rc<Witness>) {
    let memories: Vec<_> = (0..HOSTS).map(|host| world.memory(host, SPARE)).collect();
    let witness = Rc::clone(witness);
    world.check(0, move |_| {
        let attach = |(host, memory)| attach(memory, host, JUDGE, &witness);
        let caches: Vec<_> = (0..).zip(memories).map(attach).collect();
        for cache in &caches {
            witness.get(cache, &[0, 1, 2, 3, 4, 5]);
            let stat = cache.stat().expect("the model has no faults");
            assert!(stat.claimed <= stat.budget, "{stat:?}");
        }
        // A host that has a slab always has room, whatever the dead have left.
        let stat = caches[0].stat().expect("the model has no faults");
        let putter = stat.hosts.iter().find(|part| part.claimed > 0).map_or(0, |part| usize::from(part.host));
        assert_eq!(witness.put(&caches[putter], &[8, 9]), 0, "there is no room: {stat:?}");
        for cache in &caches {
            let found = witness.get(cache, &[8, 9]);
            assert_eq!(found, 2, "what was just put is not there");
        }
        let pools: Vec<_> = caches.iter().map(|cache| Arc::clone(cache.pool())).collect();
        drop(caches);
        Cache::remove(&pools[0], NAME).expect("nobody keeps a lock");
        assert_eq!(pools[0].list(""), Ok(vec![]));
        expect_all_clean(&pools);
    });
}

fn pool_as(memory: ModelMemory, host: u16, pid: u32, witness: &Witness) -> Arc<Pool<ModelMemory>> {
    // Under one kernel nobody goes by heartbeats; between two nobody who lives is silent for so long. When the judge comes, all
    // have ended: a host line that a dead process left torn has it watch for heartbeats.
    let is_known = witness.kernels == Kernels::Shared || pid == JUDGE;
    let boot = 7 + witness.boots[usize::from(host)].get();
    attached(&POOL, memory, is_known, Member { pid, ..Member::new(host, boot) })
}

fn attach(memory: ModelMemory, host: u16, pid: u32, witness: &Witness) -> Cache<ModelMemory> {
    open(pool_as(memory, host, pid, witness), witness)
}

fn open(pool: Arc<Pool<ModelMemory>>, witness: &Witness) -> Cache<ModelMemory> {
    let identity = Identity { hash: [5; 32], text: "model".to_owned(), block: BLOCK };
    let options = Options { budget: Some(witness.budget()), verify: false };
    let slab_bytes = 512 + 64 + SLOTS * (64 + 128);
    let root = Root { slab_bytes, log_lines: witness.log_lines, budget: witness.budget(), hosts: HOSTS };
    Cache::open_with(pool, NAME, identity, options, root).expect("there is room")
}
