//! Short scenes, each of which comes down to one decision of the protocol. What one process tells another here without the
//! pool, it tells only when its call has returned.

use std::cell::Cell;
use std::rc::Rc;

use polder_mem::model::{Crash, ModelMemory, Outcome, World};
use polder_mem::{Memory, ProcessSlot};

use super::super::stage::{Process, SPARE, Stage};
use crate::PoolError;
use crate::directory::Key;
use crate::name::Name;
use crate::object::{Fill, Object};
use crate::site::Flaw;

/// One object of this size fills a chunk with its header, so that the next gets the same lines.
const BYTES: u64 = 192;

pub(super) fn other(seed: u64) -> Outcome {
    match seed % 6 {
        0 => bury(seed),
        1 => hand_over(seed),
        2 => join(seed),
        3 => undo(seed),
        4 => fence(seed),
        _ => share_a_chunk(seed),
    }
}

fn name() -> Name<'static> {
    Name::parse("/scene").expect("a good name")
}

fn create(process: &Process) -> Result<Object, PoolError> {
    process.directory().create(&name(), BYTES, Fill::Zeros)
}

fn words(process: &Process, object: &Object) -> Vec<u64> {
    let mut bytes = [0; BYTES as usize];
    object.read_at(&process.memory, 0, &mut bytes).expect("inside");
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
}

/// How far the scene has come, as its players tell each other.
#[derive(Clone, Default)]
struct Cue(Rc<Cell<u64>>);

impl Cue {
    fn give(&self, cue: u64) {
        self.0.set(self.0.get().max(cue));
    }

    fn await_(&self, memory: &ModelMemory, cue: u64) {
        while self.0.get() < cue {
            memory.pause();
        }
    }
}

/// A player on a host, in a thread of its own.
fn play(
    stage: &mut Stage,
    host: u16,
    slot: u16,
    part: impl FnOnce(Process) + 'static,
) -> polder_mem::model::ThreadId {
    let (layout, flaw) = (Rc::clone(&stage.layout), stage.flaw);
    stage.world.spawn(host, slot, move |memory| part(Process::enter(memory, &layout, host, flaw)))
}

fn run(world: &mut World) -> Outcome {
    world.run()
}

/// The owner creates and destroys in one place, again and again, while a reader opens, reads and writes: as long as it holds
/// an object open, the place is that object's. The owner has one process or two, the reader one thread or two.
pub(super) fn reuse(seed: u64, flaw: Flaw) -> Outcome {
    let owner = (seed % 2) as u16;
    let reader = 1 - owner;
    let mut stage = Stage::new(seed, 2, 1, flaw);
    play(&mut stage, owner, 0, |process| {
        for round in 1..=3 {
            // The other process may not have freed the place yet.
            if let Ok(object) = create(&process) {
                let stamp = round * 100;
                expect_own(&process, &object);
                assert_eq!(words(&process, &object)[0], 0, "a new object is not zero");
                object.write_at(&process.memory, 0, &u64::to_le_bytes(stamp)).expect("inside");
                process.directory().close(&object);
            }
            let _ = process.directory().destroy(&name());
            process.directory().maintain().expect("nobody keeps a lock");
        }
    });
    if seed & 2 == 2 {
        play(&mut stage, owner, 1, |process| {
            for _ in 0..2 {
                let _ = process.directory().destroy(&name());
                process.directory().maintain().expect("nobody keeps a lock");
            }
        });
    }
    for _ in 0..1 + (seed >> 2 & 1) {
        play(&mut stage, reader, 0, |process| {
            for _ in 0..3 {
                read_and_write(&process);
            }
        });
    }
    run(&mut stage.world)
}

/// Opens, if there is something; sees the same stamp for as long as it is open; and writes to a line of its own, which it
/// writes back without a fence.
fn read_and_write(process: &Process) {
    let object = match process.directory().open(&name()) {
        Ok(object) => object,
        Err(PoolError::NotFound { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    let first = words(process, &object)[0];
    expect_own(process, &object);
    let mine = object.at().lines(1);
    process.memory.store(mine, object.generation());
    process.memory.write_back(mine, 8);
    let then = words(process, &object)[0];
    assert!(then == first || first == 0, "an open object held {first}, and then {then}");
    expect_own(process, &object);
    process.directory().close(&object);
}

/// Behind the creator's stamp, an object holds zeros, and what a reader of this very object wrote.
fn expect_own(process: &Process, object: &Object) {
    for (index, word) in words(process, object).into_iter().enumerate().skip(1) {
        let own = index == 8 && word == object.generation();
        assert!(word == 0 || own, "word {index} of generation {} is {word}", object.generation());
    }
}

/// A destroy by another host is final when it returns: the owner can free the object, the destroyer forget it, and a third
/// create it anew, all at once.
fn bury(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 3, 2, Flaw::None);
    let cue = Cue::default();
    let (owner, destroyer) = ((seed % 2) as u16, 1 - (seed % 2) as u16);
    let (given, layout) = (cue.clone(), Rc::clone(&stage.layout));
    play(&mut stage, owner, 0, move |process| {
        let object = create(&process).expect("room");
        process.directory().close(&object);
        // What it has seen of the others' burials is old from here on.
        process.directory().maintain().expect("nobody keeps a lock");
        given.give(1);
        given.await_(&process.memory, 2);
        process.directory().maintain().expect("nobody keeps a lock");
        let key = Key::new(&process.directory().site, name().hash());
        for &slot in key.slots() {
            let entry = process.directory().load_entry(process.host(), slot).expect("no fault");
            assert_eq!(entry, Some(crate::entry::Entry::Free), "what was buried is still there");
        }
        given.give(3);
    });
    let given = cue.clone();
    play(&mut stage, destroyer, 0, move |process| {
        given.await_(&process.memory, 1);
        process.directory().destroy(&name()).expect("it is there");
        given.give(2);
        given.await_(&process.memory, 3);
        // What is gone may still be on its way to memory, but not for ever.
        while (0..layout.slots()).any(|slot| process.directory().site.tag(slot) != 0) {
            process.memory.pause();
            process.directory().maintain().expect("nobody keeps a lock");
        }
    });
    play(&mut stage, 2, 0, move |process| {
        // It knows the entry from before.
        let _ = process.directory().find(&Key::new(&process.directory().site, name().hash()));
        cue.await_(&process.memory, 2);
        let missing = process.directory().open(&name()).expect_err("it was destroyed");
        assert!(matches!(missing, PoolError::NotFound { .. }), "{missing}");
        let object = create(&process).expect("the name is free, and there is room");
        process.directory().close(&object);
    });
    run(&mut stage.world)
}

/// Two hosts write to one line by turns, and each sees what the other published.
fn hand_over(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 2, 2, Flaw::None);
    let cue = Cue::default();
    for host in 0..2 {
        let cue = cue.clone();
        play(&mut stage, host, 0, move |process| {
            let object = if host == 0 {
                create(&process).expect("room")
            } else {
                cue.await_(&process.memory, 1);
                process.directory().open(&name()).expect("it was created")
            };
            cue.give(1);
            for turn in (1..7).filter(|turn| turn % 2 == u64::from(host)) {
                cue.await_(&process.memory, turn);
                let seen = words(&process, &object);
                let expected: Vec<_> =
                    (0..seen.len() as u64).map(|word| if word < turn - 1 { word + 1 } else { 0 }).collect();
                assert_eq!(seen, expected, "host {host} in turn {turn}");
                object.write_at(&process.memory, 8 * (turn - 1), &turn.to_le_bytes()).expect("inside");
                cue.give(turn + 1);
            }
            process.directory().close(&object);
        });
    }
    run(&mut stage.world)
}

/// What a host creates that has just joined, everybody finds.
fn join(seed: u64) -> Outcome {
    let mut stage = Stage::empty(seed, 2, 2, Flaw::None);
    let cue = Cue::default();
    let (layout, given) = (Rc::clone(&stage.layout), cue.clone());
    stage.world.spawn(1, 0, move |memory| {
        given.await_(&memory, 1);
        let process = Stage::join(memory, &layout, 1);
        let object = create(&process).expect("room");
        given.give(2);
        process.directory().close(&object);
    });
    let layout = Rc::clone(&stage.layout);
    stage.world.spawn(0, 0, move |memory| {
        let process = Stage::join(memory, &layout, 0);
        let missing = process.directory().open(&name()).expect_err("nobody is there");
        assert!(matches!(missing, PoolError::NotFound { .. }), "{missing}");
        cue.give(1);
        cue.await_(&process.memory, 2);
        let object = process.directory().open(&name()).expect("it was created");
        process.directory().close(&object);
    });
    run(&mut stage.world)
}

/// A process dies while it creates, or holds an object open that it has written to. What it left in its host's cache never
/// reaches what another host puts in the same place.
fn undo(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 2, 1, Flaw::None);
    let cue = Cue::default();
    let given = cue.clone();
    let writes = seed & 8 == 8;
    let victim = play(&mut stage, 0, 0, move |process| {
        let object = create(&process).expect("room");
        if writes {
            process.memory.store(object.at(), 7);
            process.memory.store(object.at().lines(2), 7);
        }
        given.give(1);
        loop {
            process.memory.pause();
        }
    });
    if writes {
        stage.world.crash_at(victim, Crash::Process, 400);
    } else {
        stage.world.crash_within(victim, Crash::Process, 150);
    }
    let (layout, given) = (Rc::clone(&stage.layout), cue.clone());
    stage.world.spawn_after_crash(victim, 0, SPARE, move |memory| {
        let process = Process::enter(memory, &layout, 0, Flaw::None);
        process.directory().repair_process(ProcessSlot(0)).expect("nobody keeps a lock");
        let _ = process.directory().destroy(&name());
        process.directory().maintain().expect("nobody keeps a lock");
        given.give(2);
    });
    play(&mut stage, 1, 0, move |process| {
        cue.await_(&process.memory, 2);
        let object = loop {
            match create(&process) {
                Ok(object) => break object,
                // That it was given back may still be on its way.
                Err(PoolError::Full { .. }) => process.memory.pause(),
                Err(error) => panic!("{error}"),
            }
        };
        for _ in 0..4 {
            assert!(words(&process, &object).iter().all(|&word| word == 0), "something reached a new object");
            process.memory.yield_now();
        }
        process.directory().close(&object);
        let object = process.directory().open(&name()).expect("its header is whole");
        process.directory().close(&object);
    });
    run(&mut stage.world)
}

/// A host dies while it creates. Once the view says that it is off, its claim is in nobody's way.
fn fence(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 3, 4, Flaw::None);
    let dead = (seed / 6 % 2) as u16;
    let victim = play(&mut stage, dead, 0, |process| {
        let object = create(&process);
        if let Ok(object) = object {
            process.directory().close(&object);
        }
    });
    stage.world.crash_within(victim, Crash::Host, 250);
    let layout = Rc::clone(&stage.layout);
    stage.world.spawn_after_crash(victim, 2, SPARE, move |memory| {
        for _ in 0..200 {
            memory.pause();
        }
        Stage::fence(&memory, &layout, dead);
    });
    play(&mut stage, 1 - dead, 0, |process| match create(&process) {
        Ok(object) => process.directory().close(&object),
        Err(error) => assert!(matches!(error, PoolError::Exists { .. }), "{error}"),
    });
    run(&mut stage.world)
}

/// Two processes of a host create in one chunk, and another host opens both as soon as they are there.
fn share_a_chunk(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 2, 2, Flaw::None);
    let owner = (seed / 6 % 2) as u16;
    let names = ["/one", "/two"].map(|name| Name::parse(name).expect("a good name"));
    for (slot, name) in (0..).zip(names) {
        play(&mut stage, owner, slot, move |process| {
            let object = process.directory().create(&name, 8, Fill::Zeros).expect("room");
            process.directory().close(&object);
        });
    }
    play(&mut stage, 1 - owner, 0, move |process| {
        for name in names {
            loop {
                match process.directory().open(&name) {
                    Ok(object) => break process.directory().close(&object),
                    Err(PoolError::NotFound { .. }) => process.memory.pause(),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
    run(&mut stage.world)
}
