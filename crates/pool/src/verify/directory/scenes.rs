//! Short scenes, each of which comes down to one decision of the protocol. What one process tells another here without the
//! pool, it tells only when its call has returned.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::Duration;

use polder_mem::model::{Crash, ModelMemory, Outcome, ThreadId};
use polder_mem::{Memory, Offset, ProcessSlot};

use super::super::group::Dice;
use super::super::stage::{LAUNCHED, Process, SPARE, Stage, expect_clean};
use crate::chunks::Chunks;
use crate::directory::Key;
use crate::membership::{HostLine, HostState};
use crate::name::Name;
use crate::object::{InitialContents, Object};
use crate::view::{Grant, IdSource, View};
use crate::watch::Watch;
use crate::{PoolError, line};

/// One object of this size fills a chunk with its header, so that the next gets the same lines.
const BYTES: u64 = 192;

pub(super) fn other(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 0);
    let scenes = [
        bury,
        bury_many,
        hand_over,
        hand_over,
        join,
        undo,
        undo,
        undo,
        |seed, _| leave_unwritten(seed),
        repair,
        fence,
        |seed, _| unattended(seed),
        come_back,
        come_back,
        boot_again,
        boot_again,
        quarantine,
        orphan,
        one_chunk,
        open_late,
        open_in_threads,
        stop_while_condemning,
        stop_while_condemning,
        stop_while_condemning,
        stop_while_condemning,
        stop_while_opening,
        share_a_chunk,
        share_a_chunk,
        short_together,
        free_together,
        free_together,
        tell,
        tell,
        list_together,
        |seed, _| outlive(seed),
    ];
    scenes[dice.roll(scenes.len() as u64) as usize](seed, dice)
}

fn name() -> Name<'static> {
    Name::parse("/scene").expect("a good name")
}

fn create(process: &Process) -> Result<Object, PoolError> {
    process.directory().create(&name(), BYTES, InitialContents::Zeros)
}

fn words(process: &Process, object: &Object) -> Vec<u64> {
    let mut bytes = [0; BYTES as usize];
    object.read_at(&process.memory, 0, &mut bytes).expect("inside");
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
}

/// One of the first two hosts, and the other.
fn pick_two_hosts(dice: &mut Dice) -> (u16, u16) {
    let first = dice.roll(2) as u16;
    (first, 1 - first)
}

/// About the memory operation of a call that creates, or destroys, at which it writes back what makes it so, as they count
/// when nothing is in its way.
fn announces_at(is_own: bool, destroys: bool, dice: &mut Dice) -> u64 {
    static CREATES: LazyLock<u64> = LazyLock::new(|| first_final_operation(true, false));
    static DESTROYS: LazyLock<u64> = LazyLock::new(|| first_final_operation(true, true));
    static BURIES: LazyLock<u64> = LazyLock::new(|| first_final_operation(false, true));
    let written_back = match (destroys, is_own) {
        (false, _) => *CREATES,
        (true, true) => *DESTROYS,
        (true, false) => *BURIES,
    };
    written_back - 4 + dice.roll(8)
}

/// The first operation of such a call at which a death of its process comes too late to undo it.
fn first_final_operation(is_own: bool, destroys: bool) -> u64 {
    let (mut before, mut after) = (0, 1 << 12);
    while after - before > 1 {
        let at = u64::midpoint(before, after);
        if is_final_after(at, is_own, destroys) { after = at } else { before = at }
    }
    after
}

/// Whether the call has created, or destroyed, if its process dies at its memory operation `at`.
fn is_final_after(at: u64, is_own: bool, destroys: bool) -> bool {
    let mut stage = Stage::new(0, 2, 2);
    stage.world.calm();
    if destroys {
        stage.setup(if is_own { 0 } else { 1 }, SPARE, create_and_close);
    }
    let caller = play(&mut stage, 0, 0, move |process| match destroys {
        true => process.directory().destroy(&name()).expect("nobody else destroys it"),
        false => drop(create(&process).expect("room")),
    });
    stage.world.crash_at(caller, Crash::Process, at);
    let (seen, layout) = (Rc::new(Cell::new(None)), Rc::clone(&stage.layout));
    let found = Rc::clone(&seen);
    stage.world.spawn_after(caller, 1, 0, move |memory| {
        found.set(is_there(&Process::enter(memory, &layout, 1)));
    });
    stage.world.run().expect("nobody judges it");
    seen.get() == Some(!destroys)
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

/// Waits until all that is on its way has arrived: time passes only then.
fn settle(process: &Process) {
    let start = process.memory.now();
    while process.memory.now() < start + Duration::from_secs(1) {
        process.memory.pause();
    }
}

/// A player on a host, in a thread of its own.
fn play(stage: &mut Stage, host: u16, slot: u16, part: impl FnOnce(Process) + 'static) -> ThreadId {
    let layout = Rc::clone(&stage.layout);
    stage.world.spawn(host, slot, move |memory| part(Process::enter(memory, &layout, host)))
}

/// A player on a host, which comes when the victim has died.
fn play_after_crash(
    stage: &mut Stage,
    victim: ThreadId,
    host: u16,
    slot: u16,
    part: impl FnOnce(Process) + 'static,
) -> ThreadId {
    let layout = Rc::clone(&stage.layout);
    let enter = move |memory| part(Process::enter(memory, &layout, host));
    stage.world.spawn_after_crash(victim, host, slot, enter)
}

/// Does nothing any more.
fn stand_still(process: &Process) -> ! {
    loop {
        process.memory.pause();
    }
}

fn create_and_close(process: &Process) {
    let object = create(process).expect("room");
    process.directory().close(&object);
}

/// A player in one of the threads of a process.
fn play_in(stage: &mut Stage, process: &Rc<Process>, part: impl FnOnce(&Process) + 'static) -> ThreadId {
    let (process, slot) = (Rc::clone(process), process.directory().site.me.slot);
    stage.world.spawn(process.host(), slot.0, move |_| part(&process))
}

/// The owner creates and destroys in one place, again and again, while a reader opens, reads and writes: as long as it holds
/// an object open, the place is that object's. The owner has one process or two, the reader one thread or two.
pub(super) fn reuse(seed: u64) -> Outcome {
    let owner = (seed % 2) as u16;
    let reader = 1 - owner;
    let mut stage = Stage::new(seed, 2, 1);
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
    let process = stage.enter(reader, 0);
    for _ in 0..1 + (seed >> 2 & 1) {
        play_in(&mut stage, &process, |process| {
            for _ in 0..3 {
                read_and_write(process);
            }
        });
    }
    stage.world.run()
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
    let then = words(process, &object)[0];
    assert!(then == first || first == 0, "an open object held {first}, and then {then}");
    expect_own(process, &object);
    let mine = object.at().lines(1);
    process.memory.store(mine, object.generation());
    process.memory.write_back(mine, 8);
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
fn bury(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 3, 2);
    let cue = Cue::default();
    let (owner, destroyer) = pick_two_hosts(&mut dice);
    let (given, layout) = (cue.clone(), Rc::clone(&stage.layout));
    play(&mut stage, owner, 0, move |process| {
        create_and_close(&process);
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
    stage.world.run()
}

/// A host destroys more than one line can list; the owner finds the last of it too.
fn bury_many(seed: u64, mut dice: Dice) -> Outcome {
    const LISTED_IN_A_LINE: usize = 7;
    let names: [String; LISTED_IN_A_LINE + 2] = std::array::from_fn(|index| format!("/{index}"));
    let mut stage = Stage::with_names(seed, 2, 5, 29);
    let (owner, destroyer) = pick_two_hosts(&mut dice);
    stage.setup(owner, SPARE, |process| {
        for name in &names {
            let name = Name::parse(name).expect("a good name");
            let object = process.directory().create(&name, 8, InitialContents::Zeros).expect("room");
            process.directory().close(&object);
        }
    });
    let [most @ .., last] = names;
    stage.setup(destroyer, SPARE, |process| {
        for name in &most {
            process.directory().destroy(&Name::parse(name).expect("a good name")).expect("it is there");
        }
    });
    let (cue, layout) = (Cue::default(), Rc::clone(&stage.layout));
    let given = cue.clone();
    play(&mut stage, owner, 0, move |process| {
        for (round, left) in [(1, 1), (3, 0)] {
            process.directory().maintain().expect("nobody keeps a lock");
            let taken = (0..layout.slots()).filter(|&slot| process.directory().site.tag(slot) != 0).count();
            assert_eq!(taken, left, "slots that are taken in round {round}");
            given.give(round);
            given.await_(&process.memory, round + 1);
        }
    });
    play(&mut stage, destroyer, 0, move |process| {
        cue.await_(&process.memory, 1);
        process.directory().destroy(&Name::parse(&last).expect("a good name")).expect("it is there");
        cue.give(2);
        cue.await_(&process.memory, 3);
        cue.give(4);
    });
    stage.world.run()
}

/// A host lists what it destroys while another of its threads, or another process, destroys as well or lists anew: the owner
/// finds all of it at its next look.
fn list_together(seed: u64, mut dice: Dice) -> Outcome {
    let names = ["/scene", "/two"].map(|name| Name::parse(name).expect("a good name"));
    let mut stage = Stage::new(seed, 2, 2);
    let (owner, destroyer) = pick_two_hosts(&mut dice);
    stage.setup(owner, SPARE, move |process| {
        for name in &names {
            let object = process.directory().create(name, 8, InitialContents::Zeros).expect("room");
            process.directory().close(&object);
        }
    });
    let first = stage.enter(destroyer, 0);
    let second = if dice.roll(2) == 0 { Rc::clone(&first) } else { stage.enter(destroyer, 1) };
    let (lists, delay) = (dice.roll(2) == 0, dice.roll(64));
    let ended = Rc::new(Cell::new(0));
    let count = Rc::clone(&ended);
    let destroy =
        |process: &Process, name: &Name<'_>| process.directory().destroy(name).expect("it is there");
    play_in(&mut stage, &first, move |process| {
        destroy(process, &names[0]);
        count.set(count.get() + 1);
    });
    let count = Rc::clone(&ended);
    play_in(&mut stage, &second, move |process| {
        idle(process, delay);
        if lists {
            maintain(process)
        } else {
            destroy(process, &names[1])
        }
        count.set(count.get() + 1);
    });
    let layout = Rc::clone(&stage.layout);
    play(&mut stage, owner, 0, move |process| {
        while ended.get() < 2 {
            process.memory.pause();
        }
        maintain(&process);
        let taken = (0..layout.slots()).filter(|&slot| process.directory().site.tag(slot) != 0).count();
        assert_eq!(taken, usize::from(lists), "slots that are taken");
    });
    stage.world.run()
}

/// Two hosts write to the same lines by turns, some words each time, and each sees what the other published, also when it
/// has not looked for a while.
fn hand_over(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 2);
    let (cue, expected) = (Cue::default(), Rc::new(RefCell::new(vec![0; BYTES as usize / 8])));
    // Whether it looks first, and which words it writes.
    let draws: [_; 7] = std::array::from_fn(|_| {
        let first = dice.roll(16) as usize;
        (dice.roll(4), first..first + [1, 2, 4, 9][dice.roll(4) as usize])
    });
    for host in 0..2 {
        let (cue, expected, draws) = (cue.clone(), Rc::clone(&expected), draws.clone());
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
                if draws[turn as usize].0 == 0 || turn > 4 {
                    assert_eq!(words(&process, &object), *expected.borrow(), "host {host} in turn {turn}");
                }
                let range = draws[turn as usize].1.clone();
                expected.borrow_mut()[range.clone()].fill(turn);
                let bytes = turn.to_le_bytes().repeat(range.len());
                object.write_at(&process.memory, 8 * range.start as u64, &bytes).expect("inside");
                cue.give(turn + 1);
            }
            process.directory().close(&object);
        });
    }
    stage.world.run()
}

/// What a host creates that has just joined, everybody finds.
fn join(seed: u64, _: Dice) -> Outcome {
    let mut stage = Stage::empty(seed, 2, 2);
    let cue = Cue::default();
    let (layout, given) = (Rc::clone(&stage.layout), cue.clone());
    stage.world.spawn(1, 0, move |memory| {
        given.await_(&memory, 1);
        let process = Process::enter(memory, &layout, 1);
        process.join();
        let object = create(&process).expect("room");
        given.give(2);
        process.directory().close(&object);
    });
    play(&mut stage, 0, 0, move |process| {
        process.join();
        let missing = process.directory().open(&name()).expect_err("nobody is there");
        assert!(matches!(missing, PoolError::NotFound { .. }), "{missing}");
        cue.give(1);
        cue.await_(&process.memory, 2);
        let object = process.directory().open(&name()).expect("it was created");
        process.directory().close(&object);
    });
    stage.world.run()
}

/// A process dies while it creates. What it left in its host's cache never reaches what another host puts in the same place,
/// whether another process repairs, or the host's words were lost and are built anew.
fn undo(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 1);
    let cue = Cue::default();
    // Three lines of header.
    let long = format!("/{}", "n".repeat(130));
    let again = long.clone();
    let victim = play(&mut stage, 0, 0, move |process| {
        let _ =
            process.directory().create(&Name::parse(&long).expect("a good name"), 8, InitialContents::Zeros);
        stand_still(&process)
    });
    // Most often while it writes the header and zeros.
    let at = if dice.roll(4) == 0 { dice.roll(200) } else { 95 + dice.roll(50) };
    stage.world.crash_at(victim, Crash::Process, at);
    let given = cue.clone();
    let is_lost = dice.roll(2) == 0;
    let repairer = play_after_crash(&mut stage, victim, 0, SPARE, move |process| {
        if is_lost {
            process.directory().forget();
            process.directory().prepare().expect("nobody else is there");
        }
        process.directory().repair_process(ProcessSlot(0)).expect("nobody keeps a lock");
        let _ = process.directory().destroy(&Name::parse(&again).expect("a good name"));
        process.directory().maintain().expect("nobody keeps a lock");
        given.give(1);
    });
    let waits = dice.roll(3) == 0;
    if !waits {
        // About where it gives the place back.
        let at = if is_lost { 275 } else { 75 } + dice.roll(25);
        stage.world.crash_at(repairer, Crash::Pause, at);
    }
    let placed = Rc::new(Cell::new(false));
    let is_placed = Rc::clone(&placed);
    play(&mut stage, 1, 0, move |process| {
        if waits {
            cue.await_(&process.memory, 1);
            use_the_place(&process);
            return is_placed.set(true);
        }
        for _ in 0..30 {
            process.memory.pause();
            if let Ok(object) = create(&process) {
                process.directory().close(&object);
                return is_placed.set(true);
            }
        }
    });
    expect_new_at_the_end(&mut stage, 1, placed);
    stage.world.run()
}

/// Processes of a host store to an object of theirs and write nothing back, because they see it all the same. Once it is
/// destroyed, nothing of it reaches what another host puts in the same place.
pub(super) fn leave_unwritten(seed: u64) -> Outcome {
    let mut stage = Stage::new(seed, 2, 1);
    let cue = Cue::default();
    for slot in 0..2 {
        let cue = cue.clone();
        play(&mut stage, 0, slot, move |process| {
            let object = match slot {
                0 => create(&process).expect("room"),
                _ => {
                    cue.await_(&process.memory, 1);
                    process.directory().open(&name()).expect("it was created")
                }
            };
            cue.give(1);
            process.memory.store(object.at().lines(u64::from(slot)), 7);
            process.directory().close(&object);
            cue.give(u64::from(slot) * 2);
            if slot == 0 {
                cue.await_(&process.memory, 2);
                process.directory().destroy(&name()).expect("it is there");
                process.directory().maintain().expect("nobody keeps a lock");
            }
        });
    }
    let placed = Rc::new(Cell::new(false));
    let is_placed = Rc::clone(&placed);
    play(&mut stage, 1, 0, move |process| {
        cue.await_(&process.memory, 2);
        loop {
            match create(&process) {
                Ok(object) => {
                    process.directory().close(&object);
                    return is_placed.set(true);
                }
                Err(PoolError::Exists { .. } | PoolError::Full { .. }) => process.memory.pause(),
                Err(error) => panic!("{error}"),
            }
        }
    });
    expect_new_at_the_end(&mut stage, 1, placed);
    stage.world.run()
}

/// A process dies while it creates, and another of its host repairs: the name is in nobody's way then. Once that has
/// returned, no host sees a claim any more.
fn repair(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 2);
    let (host, other) = pick_two_hosts(&mut dice);
    let victim = play(&mut stage, host, 0, |process| {
        drop(create(&process));
        stand_still(&process)
    });
    let at = if dice.roll(2) == 0 { dice.roll(180) } else { announces_at(true, false, &mut dice) };
    stage.world.crash_at(victim, Crash::Process, at);
    let (cue, waits) = (Cue::default(), dice.roll(2) == 0);
    let given = cue.clone();
    play_after_crash(&mut stage, victim, host, SPARE, move |process| {
        process.directory().repair_process(ProcessSlot(0)).expect("nobody keeps a lock");
        given.give(1);
    });
    play(&mut stage, other, 0, move |process| {
        if waits {
            cue.await_(&process.memory, 1);
            let key = Key::new(&process.directory().site, name().hash());
            let scan = process.directory().scan(&key).expect("no fault");
            assert_eq!(scan.claimants().next(), None, "a claim is left after the repair");
        }
        match create(&process) {
            Ok(object) => process.directory().close(&object),
            Err(error) => assert!(matches!(error, PoolError::Exists { .. }), "{error}"),
        }
    });
    stage.world.run()
}

/// A process is stopped, or dies, while it creates or destroys. Once another process of its host has seen what came of it,
/// every host sees the same. The one that creates a large object is told by a fence for stores alone, and so it tells by a store.
fn tell(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 2);
    let (host, other) = pick_two_hosts(&mut dice);
    let (owner, destroys) = (pick_two_hosts(&mut dice).0, dice.roll(3) > 0);
    if destroys {
        stage.setup(owner, SPARE, create_and_close);
    }
    let victim = play(&mut stage, host, 0, move |process| {
        if destroys {
            process.directory().destroy(&name()).expect("nobody else destroys it");
        } else {
            drop(create(&process).map(|object| process.directory().close(&object)));
        }
        stand_still(&process)
    });
    stage.world.crash_at(victim, Crash::Process, announces_at(host == owner, destroys, &mut dice));
    let (cue, layout) = (Cue::default(), Rc::clone(&stage.layout));
    let given = cue.clone();
    let creates = !destroys && dice.roll(3) > 0;
    // Nobody gives signs of life here.
    let told = layout.heartbeat_line(host, ProcessSlot(1));
    play_after_crash(&mut stage, victim, host, 1, move |process| {
        let is_there = if creates { is_in_the_way(&process) } else { is_there(&process) };
        let seen = if is_there == Some(!destroys) { 2 } else { 1 };
        match creates {
            true => tell_by_store(&process.memory, told, seen),
            false => given.give(seen),
        }
    });
    play(&mut stage, other, 0, move |process| {
        let seen = match creates {
            true => await_store(&process.memory, told),
            false => {
                cue.await_(&process.memory, 1);
                cue.0.get()
            }
        };
        if seen == 2 {
            assert_eq!(is_there(&process), Some(!destroys), "hosts see different things");
        }
    });
    stage.world.run()
}

/// Tells another host by a store, as programs do, which what the call before has fenced comes before.
fn tell_by_store(memory: &ModelMemory, at: Offset, found: u64) {
    line::publish_unfenced(memory, at, &[found, 0, 0, 0, 0, 0, 0]);
}

/// What another host tells by a store.
fn await_store(memory: &ModelMemory, at: Offset) -> u64 {
    loop {
        match line::read(memory, at).expect("the model has no faults") {
            None | Some([0, ..]) => memory.pause(),
            Some([found, ..]) => return found,
        }
    }
}

/// A host creates an object whose header takes two lines, says so, and dies alone. The object is there for the other host, and whole, and its
/// chunk is nobody else's; and so it is when the host boots again.
pub(super) fn outlive(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 32);
    let mut stage = Stage::new(seed, 2, 2);
    let (owner, other) = pick_two_hosts(&mut dice);
    let name = Name::parse("/an-object-whose-header-takes-two-lines").expect("a good name");
    let cue = Cue::default();
    let given = cue.clone();
    let victim = play(&mut stage, owner, 0, move |process| {
        let object = process.directory().create(&name, 8, InitialContents::Zeros).expect("room");
        process.directory().close(&object);
        given.give(1);
        stand_still(&process)
    });
    stage.world.crash_at(victim, Crash::Host, announces_at(true, false, &mut dice) + dice.roll(64));
    let told = cue.clone();
    play_after_crash(&mut stage, victim, other, 0, move |process| {
        let is_due = told.0.get() == 1;
        match process.directory().open(&name) {
            Ok(object) => process.directory().close(&object),
            Err(error) => assert!(!is_due && matches!(error, PoolError::NotFound { .. }), "{error}"),
        }
        if is_due {
            let one_of = |name| {
                let name = Name::parse(name).expect("a good name");
                process.directory().create(&name, BYTES, InitialContents::Zeros)
            };
            let object = one_of("/one").expect("the other chunk is free");
            let refused = one_of("/two").expect_err("there are two chunks");
            assert!(matches!(refused, PoolError::Full { .. }), "{refused}");
            process.directory().close(&object);
        }
    });
    let (memory, layout) = (stage.world.memory(owner, SPARE), Rc::clone(&stage.layout));
    stage.world.check(owner, move |_| {
        let process = Process::enter(memory, &layout, owner);
        process.directory().prepare().expect("nobody else is there");
        if cue.0.get() == 1 {
            let object = process.directory().open(&name).expect("it was created");
            process.directory().close(&object);
        }
    });
    stage.world.run()
}

/// Whether the object is there, as one who creates it larger than the pool is told; nothing while its line is half written.
fn is_in_the_way(process: &Process) -> Option<bool> {
    match process.directory().create(&name(), 1 << 20, InitialContents::Zeros) {
        Err(PoolError::Exists { .. }) => Some(true),
        Err(PoolError::Full { .. }) => Some(false),
        Err(PoolError::Corrupt { .. }) => None,
        created => panic!("{created:?}"),
    }
}

/// Whether the object is there; nothing while its line is half written.
fn is_there(process: &Process) -> Option<bool> {
    match process.directory().open(&name()) {
        Ok(object) => {
            process.directory().close(&object);
            Some(true)
        }
        Err(PoolError::NotFound { .. }) => Some(false),
        Err(PoolError::Corrupt { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// A process dies that holds another host's object open, and has written to it and not written back. Once its host has
/// cleaned up, the owner gets the place back, and nothing reaches it any more.
fn orphan(seed: u64, mut dice: Dice) -> Outcome {
    let settles = dice.roll(2) == 0;
    let mut stage = Stage::new(seed, 2, 1);
    let cue = Cue::default();
    let given = cue.clone();
    play(&mut stage, 0, 0, move |process| {
        create_and_close(&process);
        given.give(1);
        given.await_(&process.memory, 3);
        if settles {
            settle(&process);
        }
        process.directory().destroy(&name()).expect("it is there");
        assert!(!settles || has_room(&process), "what was given back is not free");
        use_the_place(&process);
    });
    let given = cue.clone();
    let victim = play(&mut stage, 1, 0, move |process| {
        given.await_(&process.memory, 1);
        let object = process.directory().open(&name()).expect("it was created");
        process.memory.store(object.at(), 7);
        process.memory.store(object.at().lines(2), 7);
        given.give(2);
        stand_still(&process)
    });
    // Long after it has opened the object.
    stage.world.crash_at(victim, Crash::Process, 2000);
    play_after_crash(&mut stage, victim, 1, SPARE, move |process| {
        process.directory().repair_process(ProcessSlot(0)).expect("nobody keeps a lock");
        cue.give(3);
    });
    expect_new_at_the_end(&mut stage, 0, Rc::new(Cell::new(true)));
    stage.world.run()
}

/// Creates in a place that will be free, and sees nothing of who was there before.
fn use_the_place(process: &Process) {
    let object = loop {
        match create(process) {
            Ok(object) => break object,
            // That it is free may still be on its way.
            Err(PoolError::Full { .. }) => process.memory.pause(),
            Err(error) => panic!("{error}"),
        }
    };
    for _ in 0..4 {
        expect_zeros(process, &object);
        process.memory.yield_now();
    }
    process.directory().close(&object);
}

/// Whether the host has freed every entry.
fn has_room(process: &Process) -> bool {
    let site = process.directory().site;
    process.directory().maintain().expect("nobody keeps a lock");
    (0..site.layout.slots()).all(|slot| site.tag(slot) == 0)
}

fn expect_zeros(process: &Process, object: &Object) {
    assert!(words(process, object).iter().all(|&word| word == 0), "something reached a new object");
}

/// When everything has reached memory, the object is still as it was created.
fn expect_new_at_the_end(stage: &mut Stage, host: u16, placed: Rc<Cell<bool>>) {
    let process = stage.enter(host, SPARE);
    stage.world.check(host, move |_| {
        if !placed.get() {
            return;
        }
        let object = process.directory().open(&name()).expect("its header is whole");
        expect_zeros(&process, &object);
        process.directory().close(&object);
    });
}

/// A host dies while it creates or destroys. Once the view says that it is off, its claim is in nobody's way; and when it
/// boots again, the name is one object's.
fn fence(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 3, 4);
    let ((dead, other), destroys) = (pick_two_hosts(&mut dice), dice.roll(2) == 0);
    if destroys {
        stage.setup(dead, SPARE, create_and_close);
    }
    let victim = play(&mut stage, dead, 0, move |process| {
        if destroys {
            let _ = process.directory().destroy(&name());
        } else if let Ok(object) = create(&process) {
            process.directory().close(&object);
        }
    });
    if destroys {
        stage.world.crash_at(victim, Crash::Host, announces_at(true, true, &mut dice));
    } else {
        stage.world.crash_within(victim, Crash::Host, 250);
    }
    let layout = Rc::clone(&stage.layout);
    stage.world.spawn_after_crash(victim, 2, SPARE, move |memory| {
        for _ in 0..200 {
            memory.pause();
        }
        Stage::fence(&memory, &layout, dead);
    });
    play(&mut stage, other, 0, |process| match create(&process) {
        Ok(object) => process.directory().close(&object),
        Err(error) => assert!(matches!(error, PoolError::Exists { .. }), "{error}"),
    });
    let (memory, layout) = (stage.world.memory(dead, SPARE), Rc::clone(&stage.layout));
    stage.world.check(dead, move |_| {
        let process = Process::enter(memory, &layout, dead);
        process.directory().prepare().expect("nobody else is there");
        let live = process.directory().inventory().expect("no fault").live;
        assert!(live.len() <= 1, "the name is that of each of {live:?}");
    });
    stage.world.run()
}

/// The only process of a host dies, or the host itself, while it creates, destroys or frees, and nobody repairs: what it left
/// half written is in no look-up's way. A creator comes past it too, unless it is a claim. What a look-up found destroyed is not
/// live when the host is put right.
pub(super) fn unattended(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 8);
    let mut stage = Stage::new(seed, 2, 2);
    let (dead, other) = pick_two_hosts(&mut dice);
    let (destroys, frees) = (dice.roll(4) > 0, dice.roll(2) == 0);
    if destroys {
        stage.setup(dead, SPARE, create_and_close);
    }
    let victim = play(&mut stage, dead, 0, move |process| {
        if destroys {
            process.directory().destroy(&name()).expect("nobody else destroys it");
        } else {
            drop(create(&process).map(|object| process.directory().close(&object)));
        }
        if frees {
            maintain(&process);
        }
        stand_still(&process)
    });
    let more = if frees { dice.roll(120) } else { 0 };
    let crash = if dice.roll(3) == 0 { Crash::Host } else { Crash::Process };
    stage.world.crash_at(victim, crash, announces_at(true, destroys, &mut dice) + more);
    let act = dice.roll(3);
    let left = Rc::new(Cell::new(None));
    let reported = Rc::clone(&left);
    play_after_crash(&mut stage, victim, other, 0, move |process| {
        let is_left = usize::from(is_there(&process).expect("nobody has to be waited for"));
        // What has begun may still be on its way to memory.
        let (mut least, mut most) = if destroys { (0, is_left) } else { (is_left, 1) };
        match act {
            0 => {}
            1 => match process.directory().destroy(&name()) {
                Ok(()) => (least, most) = (0, 0),
                Err(error) => assert!(matches!(error, PoolError::NotFound { .. }), "{error}"),
            },
            // A dead host's claim is in its way.
            _ if !destroys => {}
            _ => match create(&process) {
                Ok(object) => {
                    process.directory().close(&object);
                    (least, most) = (1, 1);
                }
                Err(error) => assert!(matches!(error, PoolError::Exists { .. }), "{error}"),
            },
        }
        reported.set(Some((least, most)));
    });
    let (memory, layout) = (stage.world.memory(dead, SPARE), Rc::clone(&stage.layout));
    stage.world.check(dead, move |_| {
        let process = Process::enter(memory, &layout, dead);
        process.directory().prepare().expect("nobody else is there");
        process.directory().repair_process(ProcessSlot(0)).expect("nobody keeps a lock");
        let live = process.directory().inventory().expect("no fault").live;
        let (least, most) = left.get().expect("somebody has looked");
        assert!((least..=most).contains(&live.len()), "of {least} to {most} objects there are {live:?}");
    });
    stage.world.run()
}

/// Two processes of a host create in one chunk, and another host opens both as soon as they are there. The one that claims
/// the chunk may be stopped: what the other creates in it is there all the same.
fn share_a_chunk(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 2);
    let (owner, opener) = pick_two_hosts(&mut dice);
    let stops = dice.roll(2) == 0;
    let names = ["/one", "/two"].map(|name| Name::parse(name).expect("a good name"));
    let cues = [Cue::default(), Cue::default()];
    for ((slot, name), cue) in (0..).zip(names).zip(cues.clone()) {
        let delay = if slot == 1 { dice.roll(64) } else { 0 };
        let creator = play(&mut stage, owner, slot, move |process| {
            (0..delay).for_each(|_| process.memory.pause());
            let object = process.directory().create(&name, 8, InitialContents::Zeros).expect("room");
            cue.give(1);
            process.directory().close(&object);
        });
        if stops && slot == 0 {
            // Most often when the chunk has just become the host's.
            let at = if dice.roll(3) == 0 { dice.roll(200) } else { 80 + dice.roll(40) };
            stage.world.crash_at(creator, Crash::Pause, at);
        }
    }
    play(&mut stage, opener, 0, move |process| {
        for (name, cue) in names.iter().zip(cues).rev() {
            if stops {
                // Whoever looks all the time lets no time pass.
                cue.await_(&process.memory, 1);
            }
            loop {
                match process.directory().open(name) {
                    Ok(object) => break process.directory().close(&object),
                    Err(PoolError::NotFound { .. }) if !stops => process.memory.pause(),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
    stage.world.run()
}

/// Two processes of a host find no room at once, and what one of them frees is enough for both.
fn short_together(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 1);
    let (host, _) = pick_two_hosts(&mut dice);
    let names = ["/one", "/two"].map(|name| Name::parse(name).expect("a good name"));
    let make = |process: &Process, name: &Name<'_>| {
        process
            .directory()
            .create(name, 8, InitialContents::Zeros)
            .expect("there is room, or will be once it is freed")
    };
    let cue = Cue::default();
    let given = cue.clone();
    play(&mut stage, host, 0, move |process| {
        let held = names.each_ref().map(|name| make(&process, name));
        names.iter().for_each(|name| process.directory().destroy(name).expect("it is there"));
        // Condemned while it was open, so that it is still there.
        held.iter().for_each(|object| process.directory().close(object));
        given.give(1);
        process.directory().close(&make(&process, &names[0]));
    });
    play(&mut stage, host, 1, move |process| {
        cue.await_(&process.memory, 1);
        let object = make(&process, &Name::parse("/two").expect("a good name"));
        process.directory().close(&object);
    });
    stage.world.run()
}

fn maintain(process: &Process) {
    process.directory().maintain().expect("nobody keeps a lock");
}

/// Two processes of a host, or two threads of one, free what was destroyed at once. When a call returns, what the other was
/// in the middle of is done as well: nothing is left of it, and there is room for an object that had none.
fn free_together(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 1);
    let (owner, other) = pick_two_hosts(&mut dice);
    let object = stage.setup(owner, SPARE, |process| create(process).expect("room"));
    let close = |process: &Process| process.directory().close(&object);
    let destroy = |process: &Process| process.directory().destroy(&name()).expect("it is there");
    let left = dice.roll(4);
    match left {
        // A condemned entry: it is open when it is destroyed.
        0 => {
            stage.setup(owner, SPARE, destroy);
            stage.setup(owner, SPARE, close);
        }
        // An entry that another host has buried, and then the tombstone alone.
        1 | 2 => {
            stage.setup(owner, SPARE, close);
            stage.setup(other, SPARE, destroy);
        }
        // An empty chunk: somebody has the lock when it could be given back.
        _ => stage.setup(owner, SPARE, |process| {
            close(process);
            let _guard = Chunks(process.directory().site).lock().expect("nobody keeps a lock");
            destroy(process);
        }),
    }
    if left == 2 {
        stage.setup(owner, SPARE, maintain);
    }
    let host = if left == 2 { other } else { owner };
    let first = stage.enter(host, 0);
    let second = if dice.roll(2) == 0 { Rc::clone(&first) } else { stage.enter(host, 1) };
    let stopped = play_in(&mut stage, &first, maintain);
    if dice.roll(2) == 0 {
        stage.world.crash_within(stopped, Crash::Pause, 200);
    }
    let (delay, creates) = (dice.roll(128), left != 2 && dice.roll(2) == 0);
    play_in(&mut stage, &second, move |process| {
        idle(process, delay);
        if creates {
            let two = Name::parse("/two").expect("a good name");
            let made = process
                .directory()
                .create(&two, BYTES, InitialContents::Zeros)
                .expect("what was freed is room");
            process.directory().close(&made);
        } else {
            maintain(process);
            expect_clean(&process.directory());
        }
    });
    stage.world.run()
}

/// Two hosts want the only chunk at once: one of them at most gets it.
fn one_chunk(seed: u64, mut dice: Dice) -> Outcome {
    // What orders a claim and a look is never the same fence on coherent hosts.
    let seed = if dice.roll(2) == 0 { seed | 7 << 3 } else { seed };
    let mut stage = Stage::new(seed, 2, 1);
    let holders = Rc::new(Cell::new(0));
    for (host, name) in [(0, "/one"), (1, "/two")] {
        let holders = Rc::clone(&holders);
        play(&mut stage, host, 0, move |process| {
            match process.directory().create(
                &Name::parse(name).expect("a good name"),
                BYTES,
                InitialContents::Zeros,
            ) {
                Ok(object) => {
                    holders.set(holders.get() + 1);
                    assert_eq!(holders.get(), 1, "two objects lie in one place");
                    process.directory().close(&object);
                }
                Err(error) => assert!(matches!(error, PoolError::Full { .. }), "{error}"),
            }
        });
    }
    stage.world.run()
}

/// What is open counts as soon as it is, however old all is that the owner knows of announcements: from before the reader
/// opened anything, or from when it had closed what it had opened.
fn open_late(seed: u64, mut dice: Dice) -> Outcome {
    let (settles, opens_before) = (dice.roll(2) == 0, dice.roll(3) > 0);
    let mut stage = Stage::new(seed, 2, 1);
    let (owner, reader) = pick_two_hosts(&mut dice);
    let cue = Cue::default();
    let given = cue.clone();
    play(&mut stage, owner, 0, move |process| {
        create_and_close(&process);
        given.give(1);
        given.await_(&process.memory, 2);
        if settles {
            settle(&process);
        }
        process.directory().destroy(&name()).expect("it is there");
        assert!(!settles || has_room(&process), "what was closed is still held");
        use_the_place(&process);
        given.give(3);
        given.await_(&process.memory, 4);
        process.directory().destroy(&name()).expect("it is there");
        let refused = create(&process).expect_err("somebody holds the place");
        assert!(matches!(refused, PoolError::Full { .. }), "{refused}");
        given.give(5);
    });
    play(&mut stage, reader, 0, move |process| {
        cue.await_(&process.memory, 1);
        if opens_before {
            let object = process.directory().open(&name()).expect("it was created");
            let mine = object.at().lines(1);
            process.memory.store(mine, 7);
            process.memory.write_back(mine, 8);
            process.directory().close(&object);
        }
        cue.give(2);
        cue.await_(&process.memory, 3);
        let object = process.directory().open(&name()).expect("it was created");
        cue.give(4);
        cue.await_(&process.memory, 5);
        process.directory().close(&object);
    });
    stage.world.run()
}

/// Two threads open the first objects that their process ever opened, and one of them may be stopped in the middle: what the
/// other holds open counts.
fn open_in_threads(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 2, 1);
    let (owner, reader) = pick_two_hosts(&mut dice);
    stage.setup(owner, SPARE, create_and_close);
    let process = stage.enter(reader, 0);
    let other = play_in(&mut stage, &process, |process| {
        let missing = process.directory().open(&Name::parse("/other").expect("a good name"));
        assert!(matches!(missing, Err(PoolError::NotFound { .. })), "{missing:?}");
    });
    if dice.roll(4) > 0 {
        stage.world.crash_within(other, Crash::Pause, 32);
    }
    let cue = Cue::default();
    let given = cue.clone();
    play_in(&mut stage, &process, move |process| {
        let object = process.directory().open(&name()).expect("it was created");
        given.give(1);
        given.await_(&process.memory, 2);
        process.directory().close(&object);
    });
    play(&mut stage, owner, 0, move |process| {
        cue.await_(&process.memory, 1);
        process.directory().destroy(&name()).expect("it is there");
        let refused = create(&process).expect_err("somebody holds the place");
        assert!(matches!(refused, PoolError::Full { .. }), "{refused}");
        cue.give(2);
    });
    stage.world.run()
}

/// A process is stopped, or dies, while it destroys, and another of its host frees what it finds condemned. What somebody has
/// opened meanwhile stays what it was.
fn stop_while_condemning(seed: u64, mut dice: Dice) -> Outcome {
    let (mut stage, owner, reader) = with_an_object(seed, &mut dice);
    let destroyer = play(&mut stage, owner, 0, |process| {
        process.directory().destroy(&name()).expect("nobody else destroys it");
    });
    let (dies, delays) = (dice.roll(2) == 0, [dice.roll(64), dice.roll(64)]);
    let at = announces_at(true, true, &mut dice);
    // As who has destroyed a large object does, which waits for nobody.
    let reclaims = dice.roll(2) == 0;
    stage.world.crash_at(destroyer, if dies { Crash::Process } else { Crash::Pause }, at);
    let (layout, again) = (Rc::clone(&stage.layout), Rc::clone(&stage.layout));
    let free = move |memory: ModelMemory| {
        let process = Process::enter(memory, &layout, owner);
        idle(&process, delays[0]);
        if reclaims {
            process.directory().reclaim().expect("nobody keeps a lock");
        }
        use_again(&process);
    };
    let look = move |memory: ModelMemory| {
        let process = Process::enter(memory, &again, reader);
        idle(&process, delays[1]);
        open_and_look(&process);
    };
    if dies {
        stage.world.spawn_after_crash(destroyer, owner, 1, free);
        stage.world.spawn_after_crash(destroyer, reader, 0, look);
    } else {
        stage.world.spawn(owner, 1, free);
        stage.world.spawn(reader, 0, look);
    }
    stage.world.run()
}

/// Does nothing for so many operations.
fn idle(process: &Process, operations: u64) {
    for _ in 0..operations {
        let _ = process.memory.now();
    }
}

/// A host frees an object, uses its place again, and dies, while memory may still say that the first is condemned. When it
/// boots again, what it created last is there; or, when that was destroyed as well, the place is of whoever holds it open.
fn boot_again(seed: u64, mut dice: Dice) -> Outcome {
    let (mut stage, owner, reader) = with_an_object(seed, &mut dice);
    // Another slot each, before or behind that of the first.
    let text = format!("/{}", dice.roll(8));
    let (destroys, cue) = (dice.roll(2) == 0, Cue::default());
    let given = cue.clone();
    play(&mut stage, owner, 0, move |process| {
        process.directory().destroy(&name()).expect("it is there");
        given.give(1);
        stand_still(&process)
    });
    let (given, second) = (cue.clone(), text.clone());
    let victim = play(&mut stage, owner, 1, move |process| {
        given.await_(&process.memory, 1);
        let name = Name::parse(&second).expect("a good name");
        let object =
            process.directory().create(&name, BYTES, InitialContents::Zeros).expect("the place is free");
        object.write_at(&process.memory, 0, &200_u64.to_le_bytes()).expect("inside");
        process.directory().close(&object);
        given.give(2);
        if destroys {
            given.await_(&process.memory, 3);
            process.directory().destroy(&name).expect("it is there");
            given.give(4);
        }
        stand_still(&process)
    });
    // Most often when it has just created, or destroyed, the second.
    stage.world.crash_at(victim, Crash::Host, 150 + dice.roll(200));
    let (given, second) = (cue.clone(), text.clone());
    play(&mut stage, reader, 0, move |process| {
        // When its host dies first, the second is never there.
        for _ in 0..2000 {
            if given.0.get() >= 2 {
                break;
            }
            process.memory.pause();
        }
        let Ok(object) = process.directory().open(&Name::parse(&second).expect("a good name")) else {
            return;
        };
        given.give(3);
        given.await_(&process.memory, 5);
        process.directory().close(&object);
    });
    play_after_crash(&mut stage, victim, owner, SPARE, move |process| {
        process.directory().prepare().expect("nobody else is there");
        process.directory().maintain().expect("nobody keeps a lock");
        let name = Name::parse(&text).expect("a good name");
        if cue.0.get() >= 2 && !destroys {
            let object = process.directory().open(&name).expect("it was created");
            assert_eq!(words(&process, &object)[0], 200, "what was created is another");
            process.directory().close(&object);
        }
        if cue.0.get() >= 3 {
            let refused = create(&process).expect_err("somebody holds the place");
            assert!(matches!(refused, PoolError::Full { .. }), "{refused}");
        }
        cue.give(5);
    });
    stage.world.run()
}

/// A process is stopped while it opens what is destroyed meanwhile, and something else made in its place.
fn stop_while_opening(seed: u64, mut dice: Dice) -> Outcome {
    let (mut stage, owner, reader) = with_an_object(seed, &mut dice);
    let opener = play(&mut stage, reader, 0, |process| open_and_look(&process));
    // Most often about where it announces what it opens.
    let at = if dice.roll(4) == 0 { dice.roll(120) } else { 36 + dice.roll(12) };
    stage.world.crash_at(opener, Crash::Pause, at);
    let delay = dice.roll(32);
    play(&mut stage, owner, 0, move |process| {
        (0..delay).for_each(|_| process.memory.pause());
        process.directory().destroy(&name()).expect("nobody else destroys it");
        use_again(&process);
    });
    stage.world.run()
}

/// A stage of two hosts and one chunk, the owner of an object that fills it, and the other host.
fn with_an_object(seed: u64, dice: &mut Dice) -> (Stage, u16, u16) {
    let mut stage = Stage::new(seed, 2, 1);
    let (owner, other) = pick_two_hosts(dice);
    stage.setup(owner, SPARE, |process| {
        let object = create(process).expect("room");
        object.write_at(&process.memory, 0, &100_u64.to_le_bytes()).expect("inside");
        process.directory().close(&object);
    });
    (stage, owner, other)
}

/// Creates in the place of what is destroyed, if it comes free soon.
fn use_again(process: &Process) {
    for _ in 0..6 {
        process.directory().maintain().expect("nobody keeps a lock");
        match create(process) {
            Ok(object) => return process.directory().close(&object),
            Err(PoolError::Exists { .. } | PoolError::Full { .. }) => process.memory.pause(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// What is there and can be opened is the same for as long as it is open.
fn open_and_look(process: &Process) {
    match process.directory().open(&name()) {
        Ok(object) => {
            let first = words(process, &object)[0];
            for _ in 0..3 {
                assert_eq!(words(process, &object)[0], first, "an open object was used again");
                process.memory.pause();
            }
            process.directory().close(&object);
        }
        Err(error) => assert!(matches!(error, PoolError::NotFound { .. }), "{error}"),
    }
}

/// A host that holds an object open stands still and is evicted. It may go on: what it holds is nobody else's until it is
/// confirmed to be off.
fn quarantine(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 3, 1);
    let (owner, reader) = pick_two_hosts(&mut dice);
    let cue = Cue::default();
    let given = cue.clone();
    play(&mut stage, owner, 0, move |process| {
        let object = create(&process).expect("room");
        object.write_at(&process.memory, 0, &100_u64.to_le_bytes()).expect("inside");
        process.directory().close(&object);
        given.give(1);
        given.await_(&process.memory, 3);
        process.directory().destroy(&name()).expect("it is there");
        for _ in 0..2 {
            let refused = create(&process).expect_err("an evicted host holds the place");
            assert!(matches!(refused, PoolError::Full { .. }), "{refused}");
        }
        given.give(4);
        given.await_(&process.memory, 5);
        assert!(has_room(&process), "a host that is off holds the place");
        use_the_place(&process);
    });
    let given = cue.clone();
    let evicted = play(&mut stage, reader, 0, move |process| {
        given.await_(&process.memory, 1);
        let object = process.directory().open(&name()).expect("it was created");
        given.give(2);
        loop {
            assert_eq!(words(&process, &object)[0], 100, "what is held open was used again");
            process.memory.store(object.at().lines(1), 7);
            process.memory.pause();
        }
    });
    // Long after it has opened the object.
    stage.world.crash_at(evicted, Crash::Host, 2000);
    let (given, layout) = (cue.clone(), Rc::clone(&stage.layout));
    let out = View { epoch: 1_000_002, evicted: 1 << reader, ..LAUNCHED };
    stage.world.spawn(2, 0, move |memory| {
        given.await_(&memory, 2);
        let grant = Grant { boot: 1, incarnation: 1, evicted_through: 1, ..Grant::default() };
        line::publish_and_fence(&memory, layout.grant_line(1, reader), &grant.encode());
        Stage::publish_view(&memory, &layout, &out);
        given.give(3);
    });
    let layout = Rc::clone(&stage.layout);
    stage.world.spawn_after_crash(evicted, 2, SPARE, move |memory| {
        cue.await_(&memory, 4);
        Stage::publish_view(&memory, &layout, &View { epoch: 1_000_003, fenced: 1 << reader, ..out });
        cue.give(5);
    });
    stage.world.run()
}

/// A host was fenced, and comes back: by its host line, by the keeper's word, or by that of the keeper's successor. Whoever
/// passed over what it had left waits for what it begins now.
fn come_back(seed: u64, mut dice: Dice) -> Outcome {
    let mut stage = Stage::new(seed, 3, 2);
    let ((host, other), how) = (pick_two_hosts(&mut dice), dice.roll(4));
    let layout = Rc::clone(&stage.layout);
    let bit = 1 << host;
    let fenced = View { epoch: 1_000_002, fenced: bit, evicted: bit, ..LAUNCHED };
    let id_source = if how == 0 { IdSource::Launcher } else { IdSource::Keeper };
    stage.world.setup(|memory| {
        let grant = Grant { boot: 1, incarnation: 1, evicted_through: 1, ..Grant::default() };
        line::publish_and_fence(&memory, layout.grant_line(1, host), &grant.encode());
        Stage::publish_view(&memory, &layout, &View { id_source, ..fenced });
    });
    let cue = Cue::default();
    let (given, layout) = (cue.clone(), Rc::clone(&stage.layout));
    stage.world.spawn(2, 0, move |memory| {
        given.await_(&memory, 1);
        let back = View { members: bit, id_source, ..fenced };
        match how {
            0 => {}
            1 | 2 => Stage::publish_view(&memory, &layout, &View { epoch: 1_000_003, ..back }),
            _ => {
                line::publish_and_fence(&memory, layout.view_line(2, 0), &View::starting(2));
                let grant = Grant { boot: 2, incarnation: 2, evicted_through: 1, ..Grant::default() };
                line::publish_and_fence(&memory, layout.grant_line(2, host), &grant.encode());
                Stage::publish_view(&memory, &layout, &View { epoch: 2_000_001, keeper: 2, ..back });
            }
        }
        given.give(2);
    });
    let (given, layout) = (cue.clone(), Rc::clone(&stage.layout));
    stage.world.spawn(host, 0, move |memory| {
        given.await_(&memory, 2);
        let line = HostLine { state: HostState::Live, boot: 2, incarnation: 2, epoch: fenced.epoch };
        line::publish_and_fence(&memory, layout.host_line(host), &line.encode());
        let process = Process::enter(memory, &layout, host);
        let object = create(&process).expect("nobody else creates anything");
        process.directory().close(&object);
    });
    play(&mut stage, other, 0, move |process| {
        let site = process.directory().site;
        let (key, mut watch) = (Key::new(&site, name().hash()), Watch::new(&site));
        while watch.must_wait_for(&site, host) {
            assert!(watch.wait(&site), "the view has said so from the start");
        }
        cue.give(1);
        while process.directory().scan(&key).expect("no fault").is_empty() {
            process.memory.pause();
        }
        assert!(watch.must_wait_for(&site, host), "host {host} is back and has begun something");
    });
    stage.world.run()
}
