//! Locks among the processes of one host, whose holders die at any operation.

use std::cell::Cell;
use std::rc::Rc;

use polder_mem::model::{Crash, Kernels, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Memory, Offset};

use super::stage::PATIENCE;
use crate::format::{Geometry, Layout};
use crate::local::{Local, LocalLayout, LocalLock};
use crate::state::LockName;

const ROUNDS: u64 = 3;
/// What the lock guards: two words that are equal whenever it is free and nobody died.
const FIRST: Offset = Offset(0);
const SECOND: Offset = Offset(8);

pub(super) fn suites() -> Vec<Suite> {
    vec![Suite::new(
        "local-lock",
        "one process at a time holds a host-local lock, and what a dead holder left half done is repaired",
        local_lock,
    )]
}

fn local_layout() -> LocalLayout {
    let geometry =
        Geometry { hosts: 1, processes: 3, names: 2, levels: 1, chunk_bytes: 64, opens: 1, keepers: 1 };
    LocalLayout::new(&Layout::new(&geometry, 16 << 10).expect("16 KiB hold a pool of this geometry"))
}

/// What all threads of a schedule see without going through memory.
#[derive(Default)]
struct Witness {
    inside: Cell<Option<u16>>,
    done: Cell<u64>,
    crashed: Cell<u64>,
}

fn local_lock(seed: u64) -> Outcome {
    let layout = local_layout();
    let shape = Shape { hosts: 1, bytes: 64, local_words: layout.words(), bells: 1, ..Shape::default() };
    let mut world = World::new(seed, Shape { kernels: Kernels::Shared, ..shape });
    let witness = Rc::new(Witness::default());
    let live = |slot: u16| {
        let witness = Rc::clone(&witness);
        move |memory: ModelMemory| process(&memory, layout, slot, &witness)
    };
    for slot in 0..3 {
        let thread = world.spawn(0, slot, live(slot));
        let crash = match seed >> (2 * slot) & 3 {
            0 => Crash::Process,
            1 => Crash::Pause,
            _ => continue,
        };
        world.crash_within(thread, crash, 80);
        let (again, witness) = (live(slot), Rc::clone(&witness));
        world.spawn_after_crash(thread, 0, slot, move |memory| {
            witness.crashed.set(witness.crashed.get() + 1);
            again(memory);
        });
    }
    world.check(0, move |memory| {
        let count = memory.load(FIRST).expect("the model has no faults");
        let (done, crashed) = (witness.done.get(), witness.crashed.get());
        assert!(
            (done..=done + crashed).contains(&count),
            "{count} rounds counted, {done} ended, {crashed} crashes"
        );
    });
    world.run()
}

fn process(memory: &ModelMemory, layout: LocalLayout, slot: u16, witness: &Witness) {
    let me = Local::enter(memory, layout, 0, 0, 0);
    for _ in 0..ROUNDS {
        round(memory, &me, LocalLock::at(layout.state().lock(LockName::Allocator)), slot, witness);
    }
}

fn round(memory: &ModelMemory, me: &Local, lock: LocalLock, slot: u16, witness: &Witness) {
    let mut guard = lock.lock(memory, me, PATIENCE).expect("every holder lets go or dies");
    let load = |at| memory.load(at).expect("the model has no faults");
    if guard.recovered() {
        memory.store(SECOND, load(FIRST));
        guard.repaired();
    } else {
        assert_eq!(witness.inside.get(), None, "slot {slot} came in beside another");
    }
    witness.inside.set(Some(slot));
    let count = load(FIRST);
    assert_eq!(count, load(SECOND), "slot {slot} found half a round");
    memory.store(FIRST, count + 1);
    memory.pause();
    memory.store(SECOND, count + 1);
    assert_eq!(witness.inside.get(), Some(slot), "another came in beside slot {slot}");
    witness.inside.set(None);
    drop(guard);
    witness.done.set(witness.done.get() + 1);
}

#[cfg(test)]
mod tests {
    use polder_mem::LocalWord;
    use polder_mem::model::explore;

    use super::*;

    #[test]
    fn a_lock_that_looks_and_then_takes_is_caught() {
        let report = explore("look, then take", 10_000, 0, |seed| {
            let mut world = World::new(seed, Shape { hosts: 1, bytes: 64, ..Shape::default() });
            let inside = Rc::new(Cell::new(0));
            for slot in 0..2 {
                let inside = Rc::clone(&inside);
                world.spawn(0, slot, move |memory| {
                    while memory.local_load(LocalWord(0)) != 0 {
                        memory.pause();
                    }
                    memory.local_store(LocalWord(0), 1);
                    inside.set(inside.get() + 1);
                    memory.pause();
                    assert_eq!(inside.get(), 1);
                    inside.set(inside.get() - 1);
                    memory.local_store(LocalWord(0), 0);
                });
            }
            world.run()
        });
        let _ = report.expect_failure();
    }
}
