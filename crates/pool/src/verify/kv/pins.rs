//! Blocks are read where they lie while their owner evicts, gives up its slab, or dies in the middle of either.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use polder_mem::Memory;
use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, World};

use super::super::group::Dice;
use super::{BLOCK, HOSTS, NAME, Witness, attach, block, closed_at_the_end, judge, key, names};
use crate::kv::{Cache, Key, Pin};

/// Blocks that are there at first, which others pin.
const FIRST: [u8; 2] = [0, 1];

/// One host puts, another process pins what was there; each of them may die or stop.
pub(super) fn pins(mut world: World, kernels: Kernels, crash: Option<Crash>, dice: &mut Dice) -> Outcome {
    let witness = Rc::new(Witness {
        put: RefCell::default(),
        evicts: true,
        slabs: 1 + dice.roll(2),
        log_lines: [2, 8][dice.roll(2) as usize],
        crash,
        kernels,
        boots: Default::default(),
    });
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    let owner = world.setup_as(hosts[0], 0, |memory| attach(memory, hosts[0], 100, &witness));
    world.setup_as(hosts[0], 0, |_| witness.put(&owner, &FIRST));
    let reader = world.setup_as(hosts[1], 2, |memory| attach(memory, hosts[1], 200, &witness));
    if dice.roll(2) == 0 {
        world.setup_as(hosts[1], 2, |memory| pin(&reader, &memory));
    }
    let calls: Vec<_> = (0..1 + dice.roll(3)).map(|_| names(dice, 6)).collect();
    let (known, gives_up) = (Rc::clone(&witness), dice.roll(3) == 0);
    let writer = world.spawn(hosts[0], 0, move |_| {
        calls.iter().for_each(|names| _ = known.put(&owner, names));
        if gives_up {
            Cache::give_up_part(owner.pool(), NAME).expect("nobody keeps a lock");
            known.put(&owner, &[5]);
        }
    });
    let pins = 1 + dice.roll(3);
    let holder = world.spawn(hosts[1], 2, move |memory| {
        (0..pins).for_each(|_| pin(&reader, &memory));
    });
    if let Some(crash) = crash {
        let (thread, host, slot) = [(writer, hosts[0], 0), (holder, hosts[1], 2)][dice.roll(2) as usize];
        world.crash_within(thread, crash, 400);
        let (known, names) = (Rc::clone(&witness), names(dice, 6));
        // A process that stops keeps its slot.
        let slot = if crash == Crash::Pause { 4 } else { slot };
        world.spawn_after_crash(thread, host, slot, move |memory| {
            if known.crash == Some(Crash::Host) {
                known.boots[usize::from(host)].set(1);
            }
            let cache = attach(memory.clone(), host, 300, &known);
            known.put(&cache, &names);
            pin(&cache, &memory);
        });
    }
    judge(&mut world, &witness);
    world.run()
}

/// The moment of a pin alone: two blocks are pinned while their owner evicts them or gives up their slab.
pub(super) fn held(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, true, 8);
    let hosts = [dice.roll(HOSTS.into()) as u16, dice.roll(HOSTS.into()) as u16];
    let owner = world.setup_as(hosts[0], 0, |memory| attach(memory, hosts[0], 100, &witness));
    let reader = world.setup_as(hosts[1], 2, |memory| attach(memory, hosts[1], 200, &witness));
    // Else the reader's caches have what lay in these slots before.
    let is_there = dice.roll(2) == 0;
    world.setup_as(hosts[0], 0, |_| witness.put(&owner, if is_there { &FIRST } else { &[4, 5] }));
    let keys: Vec<Key> = FIRST[..1 + dice.roll(2) as usize].iter().map(|name| key(*name)).collect();
    // Else its host has not said yet that it pins.
    let reserved = (is_there && dice.roll(3) > 0)
        .then(|| world.setup_as(hosts[1], 2, |_| reader.reserve(&keys).expect("the model has no faults")));
    let (known, what) = (Rc::clone(&witness), dice.roll(3));
    world.spawn(hosts[0], 0, move |_| {
        if !is_there {
            known.put(&owner, &FIRST);
        }
        match what {
            0 => _ = Cache::give_up_part(owner.pool(), NAME).expect("nobody keeps a lock"),
            1 => _ = known.put(&owner, &[2, 3]),
            _ => [2, 3].iter().for_each(|name| _ = known.put(&owner, &[*name])),
        }
    });
    let (waits, looks) = (dice.roll(12), 1 + dice.roll(30));
    let known = Rc::clone(&witness);
    world.spawn(hosts[1], 2, move |memory| {
        if !is_there {
            known.get(&reader, &[4, 5]);
        }
        (0..waits).for_each(|_| memory.pause());
        let pinned = match reserved {
            Some(reserved) => reader.announce(reserved, &keys),
            None => reader.pin(&keys),
        };
        hold(&pinned.expect("the model has no faults"), &memory, looks);
    });
    judge(&mut world, &witness);
    world.run()
}

/// Blocks are pinned while their owner wants their room. Once it has put back what stood in their lines, whoever comes anew finds them.
pub(super) fn kept(mut world: World, kernels: Kernels, dice: &mut Dice) -> Outcome {
    let witness = Witness::of_a_slab(kernels, true, 8);
    let owners = dice.roll(HOSTS.into()) as u16;
    let others = HOSTS - 1 - owners;
    let owner = world.setup_as(owners, 0, |memory| attach(memory, owners, 100, &witness));
    world.setup_as(owners, 0, |_| witness.put(&owner, &FIRST));
    let reader = world.setup_as(others, 2, |memory| attach(memory, others, 200, &witness));
    let pin = world.setup_as(others, 2, |_| reader.pin(&FIRST.map(key)).expect("nobody keeps a lock"));
    let (is_done, left) = (Rc::new(Cell::new(false)), closed_at_the_end(&mut world));
    let (known, gives_up, done) = (Rc::clone(&witness), dice.roll(2) == 0, Rc::clone(&is_done));
    world.spawn(owners, 0, move |_| {
        match gives_up {
            true => _ = Cache::give_up_part(owner.pool(), NAME).expect("nobody keeps a lock"),
            false => assert_eq!(known.put(&owner, &[2, 3]), 2, "what is pinned made room"),
        }
        done.set(true);
        // What it has in its caches goes to memory when the adversary likes.
        left.set(Some(owner));
    });
    world.spawn(others, 2, move |memory| {
        while !is_done.get() {
            memory.pause();
        }
        reader.forget_all();
        assert_eq!(witness.get(&reader, &FIRST), 2, "what is pinned is not found");
        drop(pin);
    });
    world.run()
}

fn pin(cache: &Cache<ModelMemory>, memory: &ModelMemory) {
    let pin = cache.pin(&FIRST.map(key)).expect("nobody keeps a lock, and the model has no faults");
    hold(&pin, memory, 3);
}

/// Reads the blocks that are pinned where they lie, more than once.
fn hold(pin: &Pin<ModelMemory>, memory: &ModelMemory, looks: u64) {
    for _ in 0..looks {
        for (index, name) in FIRST.into_iter().enumerate() {
            let Some(at) = pin.block(index) else { continue };
            let mut bytes = [0; BLOCK as usize];
            memory.copy_out(at, &mut bytes).expect("the model has no faults");
            assert_eq!(bytes[..], block(name), "block {name} is pinned, and has another's bytes");
        }
        memory.pause();
    }
    assert!(pin.is_kept(), "a slab was given up with a block that is pinned");
}
