//! A host is gone for good. Its blocks stay readable, and a process that stands in for it gives their room back.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use polder_mem::Memory;
use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, World};

use super::super::group::Dice;
use super::super::stage::expect_all_clean;
use super::{JUDGE, NAME, POOL, SLOTS, SPARE, Witness, attach, key, names, pool_as, slab_of};
use crate::format::{Overwrite, Superblock, format_as};
use crate::keeper::{Keeper, KeeperTask, Owner, ReplaceKeeper, next_incarnation};
use crate::kv::{Cache, inspect, wanted_parts};

/// The host that goes.
const GONE: u16 = 1;
/// The machine that stands in for it, and had no host's id before. It has read the pool from outside.
const STANDS_IN: u16 = 2;

/// Host 1 puts and goes; host 0 reads and puts meanwhile and after. The process that stands in may die as well.
pub(super) fn adoption(mut world: World, kernels: Kernels, crash: Option<Crash>, dice: &mut Dice) -> Outcome {
    let witness = Rc::new(Witness {
        put: RefCell::default(),
        evicts: true,
        slabs: 2,
        log_lines: [2, 8][dice.roll(2) as usize],
        crash,
        kernels,
        boots: Default::default(),
    });
    world.setup(|memory| write_superblock(&memory));
    let goes = world.setup_as(GONE, 0, |memory| attach(memory, GONE, 100, &witness));
    world.setup_as(GONE, 0, |_| witness.put(&goes, &[0, 1]));
    let stays = world.setup_as(0, 1, |memory| attach(memory, 0, 200, &witness));
    let looks = dice.roll(3);
    world.spawn(STANDS_IN, 0, move |memory| {
        // What changes meanwhile may be missing, or look damaged.
        (0..looks).for_each(|_| drop(inspect(&memory)));
    });
    let (known, calls) = (Rc::clone(&witness), [names(dice, 4), names(dice, 4)]);
    let writer = world.spawn(GONE, 0, move |_| {
        calls.iter().for_each(|names| _ = known.put(&goes, names));
    });
    if crash == Some(Crash::Host) {
        world.crash_within(writer, Crash::Host, 300);
    }
    let known = Rc::clone(&witness);
    let stand_in = world.spawn_after(writer, STANDS_IN, 1, move |memory| stand_in(memory, &known, 1));
    if let Some(dies @ (Crash::Host | Crash::Process)) = crash {
        world.crash_within(stand_in, dies, 500);
        let (known, boot) = (Rc::clone(&witness), 1 + u64::from(dies == Crash::Host));
        // In the same slot: the model knows of no process of one host on another's machine that it is dead.
        world.spawn_after_crash(stand_in, STANDS_IN, 1, move |memory| self::stand_in(memory, &known, boot));
    }
    let (known, calls) = (Rc::clone(&witness), [names(dice, 6), names(dice, 6)]);
    world.spawn(0, 1, move |_| {
        for names in calls {
            known.get(&stays, &[0, 1, 2, 3]);
            known.put(&stays, &names);
        }
        known.get(&stays, &[0, 1, 2, 3]);
    });
    let [ours, theirs] = [(0, SPARE), (STANDS_IN, SPARE)].map(|(host, slot)| world.memory(host, slot));
    world.check(0, move |_| {
        let cache = attach(ours, 0, JUDGE, &witness);
        witness.get(&cache, &[0, 1, 2, 3, 4, 5]);
        let refused = witness.put(&cache, &[10, 11, 12, 13]);
        assert_eq!(refused, 0, "the room of the host that is gone is lost: {:?}", cache.stat());
        assert_eq!(witness.get(&cache, &[10, 11, 12, 13]), 4);
        let stat = cache.stat().expect("the model has no faults");
        assert!(stat.claimed <= stat.budget, "{stat:?}");
        expect_removed_whole(cache, theirs, &witness);
    });
    world.run()
}

/// Host 1 takes slots and gives them back, as a put does that cannot have a lock, and goes. The machine that stands in for it has an
/// object of its own where the slab was: nothing that host 1 has written comes to lie in it.
pub(super) fn withdrawal(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, true, 8);
    let goes = world.setup_as(GONE, 0, |memory| attach(memory, GONE, 100, &witness));
    world.setup_as(GONE, 0, |_| witness.put(&goes, &[0, 1]));
    let (at, bytes) = world.setup_as(GONE, 0, |_| slab_of(&goes, GONE));
    let (known, blocks) = (Rc::clone(&witness), 1 + dice.roll(2) as usize);
    let writer = world.spawn(GONE, 0, move |_| {
        let withdraw = |names: &[u8]| {
            let keys: Vec<_> = names.iter().map(|name| key(*name)).collect();
            goes.give_up(goes.begin(&keys).expect("nobody keeps a lock"));
        };
        withdraw(&[2, 3][..blocks]);
        assert_eq!(known.put(&goes, &[4, 5]), 0, "what was given back is not free");
        withdraw(&[6, 7][..blocks]);
    });
    let looks = 1 + dice.roll(20);
    world.spawn_after(writer, STANDS_IN, 1, move |memory| {
        stand_in(memory.clone(), &witness, 1);
        let pool = pool_as(memory.clone(), GONE, 300, &witness);
        let object = pool.create("/x", bytes).expect("there is room");
        assert_eq!(object.at(), at, "it lies elsewhere");
        let (written, mut read) = (vec![0xee; bytes as usize], vec![0; bytes as usize]);
        object.write_at(&memory, 0, &written).expect("it is as large");
        memory.mfence();
        for _ in 0..looks {
            object.read_at(&memory, 0, &mut read).expect("it is as large");
            assert!(read == written, "another host's line lies in an object: {read:?}");
            memory.pause();
        }
        pool.close(object);
    });
    world.run()
}

/// Removes the cache, after which nothing of it is left to either host.
fn expect_removed_whole(cache: Cache<ModelMemory>, theirs: ModelMemory, witness: &Witness) {
    let pools = [Arc::clone(cache.pool()), pool_as(theirs, GONE, JUDGE, witness)];
    drop(cache);
    Cache::remove(&pools[0], NAME).expect("nobody keeps a lock");
    assert_eq!(pools[0].list(""), Ok(vec![]));
    expect_all_clean(&pools);
}

/// A look from outside reads it.
fn write_superblock(memory: &ModelMemory) {
    let (superblock, _) = &*POOL;
    let Superblock { uuid, geometry, .. } = superblock;
    let written = format_as(memory, geometry, *uuid, Overwrite::Zeros, None);
    assert_eq!(written.as_ref(), Ok(superblock));
}

/// Stands in for the host that is gone.
fn stand_in(memory: ModelMemory, witness: &Witness, boot: u64) {
    witness.boots[usize::from(GONE)].set(boot);
    memory.pause();
    let pool = pool_as(memory, GONE, 300, witness);
    let given = Cache::give_up_part(&pool, NAME).expect("nobody keeps a lock");
    assert_eq!(given.kept, 0, "nobody writes there, and nobody pins");
}

/// Memory operations of a visit, and of a look and a visit.
const VISIT: u64 = 5000;
const LOOK: u64 = 8000;

/// Host 1 is off while it puts, and is fenced. A keeper gives its room to host 0 while that wants some, and may die anywhere; the next one
/// goes on. So it does on the machine of one that was killed, where nothing need be fenced again.
pub(super) fn given(mut world: World, dies: Option<Crash>, dice: &mut Dice) -> Outcome {
    let slabs = 2 + dice.roll(2);
    let witness = Rc::new(Witness {
        put: RefCell::default(),
        evicts: true,
        slabs,
        log_lines: [2, 8][dice.roll(2) as usize],
        crash: dies,
        kernels: Kernels::Shared,
        boots: Default::default(),
    });
    world.setup(|memory| write_superblock(&memory));
    let goes = world.setup_as(GONE, 0, |memory| attach(memory, GONE, 100, &witness));
    world.setup_as(GONE, 0, |_| witness.put(&goes, &[0, 1]));
    // It stays until the judge comes: nobody wants room for a host that has left.
    let stays = Rc::new(world.setup_as(0, 1, |memory| attach(memory, 0, 200, &witness)));
    if dice.roll(4) > 0 {
        // It has the rest of the budget, and wants more.
        let names = [[2, 3], [4, 5], [6, 7]];
        world.setup_as(0, 1, |_| {
            names[..slabs as usize].iter().for_each(|names| _ = witness.put(&stays, names))
        });
    }
    let (known, calls) = (Rc::clone(&witness), [names(dice, 6), names(dice, 6)]);
    let writer = world.spawn(GONE, 0, move |_| {
        calls.iter().for_each(|names| _ = known.put(&goes, names));
        // Until it is switched off.
        loop {
            known.get(&goes, &[0, 1]);
        }
    });
    world.crash_within(writer, Crash::Host, 300);
    let fenced = world.spawn_after(writer, STANDS_IN, 0, |memory| fence(&memory));
    let in_visit = dies.filter(|_| dice.roll(4) > 0).map(|dies| (dies, dice.roll(VISIT)));
    let (known, looks) = (Rc::clone(&witness), 1 + dice.roll(2));
    let first =
        world.spawn_after(fenced, STANDS_IN, 1, move |memory| give(&memory, &known, 1, looks, in_visit));
    if let Some(dies) = dies {
        if in_visit.is_none() {
            world.crash_within(first, dies, LOOK);
        }
        let is_new = dies == Crash::Host;
        let (known, fences) = (Rc::clone(&witness), is_new || dice.roll(2) == 0);
        // In the same slot, as above; so does the judge, which would wait for the lock of one that died in another.
        world.spawn_after_crash(first, STANDS_IN, 1, move |memory| {
            if fences {
                fence(&memory);
            }
            expect_gone(&memory);
            give(&memory, &known, 1 + u64::from(is_new), looks, None);
        });
    }
    let (known, calls, living) = (Rc::clone(&witness), [names(dice, 6), names(dice, 6)], Rc::clone(&stays));
    world.spawn(0, 1, move |_| {
        for names in calls {
            known.get(&living, &[0, 1, 2, 3]);
            known.put(&living, &names);
        }
        known.get(&living, &[0, 1, 2, 3]);
    });
    let [ours, theirs] = [(0, SPARE), (STANDS_IN, 1)].map(|(host, slot)| world.memory(host, slot));
    world.check(0, move |_| {
        drop(stays);
        let cache = attach(ours, 0, JUDGE, &witness);
        witness.get(&cache, &[0, 1, 2, 3, 4, 5]);
        let wanted: Vec<u8> = (8..8 + (slabs * SLOTS) as u8).collect();
        for _ in 0..slabs {
            witness.put(&cache, &wanted);
            fence(&theirs);
            give(&theirs, &witness, 9, 1, None);
            let stat = cache.stat().expect("the model has no faults");
            assert!(stat.claimed <= stat.budget, "{stat:?}");
        }
        witness.put(&cache, &wanted);
        let found = witness.get(&cache, &wanted);
        assert_eq!(found, slabs * SLOTS, "the room of the host that is gone is lost: {:?}", cache.stat());
        assert_eq!(wanted_parts(&theirs), Ok(vec![]), "it has none left");
        expect_removed_whole(cache, theirs, &witness);
    });
    world.run()
}

/// Evicts and fences the host that is gone, as the next keeper.
fn fence(memory: &ModelMemory) {
    let incarnation = next_incarnation(memory, ReplaceKeeper::Unseen).expect("a place is free");
    let task = KeeperTask { incarnation, id_source: None, evict_after: None };
    let (layout, owner) = (POOL.1.clone(), Owner::default());
    let keeper = Keeper::start_in(memory.clone(), layout, task, owner, ReplaceKeeper::Unseen);
    let mut keeper = keeper.expect("no other keeper runs");
    keeper.evict(GONE).and_then(|()| keeper.fence(GONE)).expect("no other keeper runs");
    keeper.end();
}

/// The part of the host that is gone is known to be, whenever its keeper died.
fn expect_gone(memory: &ModelMemory) {
    // What changes meanwhile may look damaged.
    let caches = inspect(memory).unwrap_or_default();
    let part = caches.iter().flat_map(|cache| &cache.hosts).find(|part| part.host == GONE);
    assert!(part.is_none_or(|part| part.gone), "the keeper's death is taken for a return: {part:?}");
}

/// Gives the room of the host that is gone, `looks` times, as a keeper's machine that is `boot` of it; it may die in its first visit.
fn give(memory: &ModelMemory, witness: &Witness, boot: u64, looks: u64, mut dies: Option<(Crash, u64)>) {
    witness.boots[usize::from(GONE)].set(boot);
    for _ in 0..looks {
        for part in wanted_parts(memory).expect("the model has no faults") {
            if let Some((crash, operations)) = dies.take() {
                memory.crash_after(crash, operations);
            }
            let pool = pool_as(memory.clone(), GONE, 300, witness);
            let given = Cache::give_to_living(&pool, &part).expect("nobody keeps a lock");
            assert_eq!((part.host, given.kept), (GONE, 0), "nobody writes there, and nobody pins");
        }
    }
}
