//! The barrier: nobody leaves before all have entered, and what was written before it is seen after it.

use std::cell::RefCell;
use std::rc::Rc;

use polder_mem::model::{Change, Harmless, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{LINE, Memory, Offset};

use super::group::{self, Dice, Scene, harmless, tiny};
use crate::PoolError;
use crate::group::Group;

pub(super) fn suites() -> Vec<Suite> {
    vec![Suite::new(
        "barrier",
        "nobody leaves a barrier before all have entered; survivors of a crash leave or are told who died",
        barrier,
    )
    .harmless(HARMLESS)]
}

const HARMLESS: &[Harmless] = &[
    group::HARMLESS[0],
    group::HARMLESS[1],
    group::HARMLESS[2],
    group::HARMLESS[3],
    group::HARMLESS[4],
    group::HARMLESS[5],
    group::HARMLESS[6],
    harmless("progress.rs", "an older beat", Change::Drop),
    harmless("progress.rs", "an older beat", Change::Weaken),
];

fn barrier(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 1);
    let scene = Scene::new(seed, &mut dice, 4, tiny(128), 2 * LINE);
    let scene = if dice.roll(2) == 0 { scene.with_heartbeats() } else { scene };
    let rounds = 1 + dice.roll(4);
    let lines: Vec<Offset> = (0..scene.size()).map(|rank| scene.extra(rank)).collect();
    let entered = Rc::new(RefCell::new(vec![0; scene.size()]));
    scene.run(&mut dice, 40 * rounds, move |group| {
        (1..=rounds).try_for_each(|round| one_round(group, round, &lines, &entered))
    })
}

fn one_round(
    group: &mut Group<ModelMemory>,
    round: u64,
    lines: &[Offset],
    entered: &RefCell<Vec<u64>>,
) -> Result<(), PoolError> {
    let (memory, rank) = (group.memory().clone(), group.rank());
    memory.store(lines[rank], round);
    memory.write_back(lines[rank], LINE);
    memory.sfence();
    entered.borrow_mut()[rank] = round;
    group.barrier()?;
    let late = entered.borrow().iter().position(|&entered| entered < round);
    assert_eq!(late, None, "rank {rank} left round {round} before it entered");
    for (peer, &line) in lines.iter().enumerate() {
        memory.invalidate(line, LINE);
        memory.fence_invalidations();
        let seen = memory.load(line)?;
        assert!(seen >= round, "rank {rank} left round {round} and finds {seen} of rank {peer}");
    }
    Ok(())
}

/// Protocols that are known to be wrong.
pub(super) fn canaries() -> Vec<Suite> {
    let about =
        "ranks of two hosts count themselves in one shared word, as with an atomic increment that is none";
    vec![Suite::new("counting-barrier", about, counted)]
}

fn counted(seed: u64) -> Outcome {
    const COUNT: Offset = Offset(0);
    let mut world = World::new(seed, Shape { hosts: 2, bytes: LINE, ..Shape::default() });
    world.budget(2000);
    for host in 0..2 {
        world.spawn(host, 0, |memory| {
            let fresh = || {
                memory.invalidate(COUNT, LINE);
                memory.fence_invalidations();
                memory.load(COUNT).expect("no faults")
            };
            memory.store(COUNT, fresh() + 1);
            memory.write_back(COUNT, LINE);
            memory.mfence();
            while fresh() < 2 {
                memory.pause();
            }
        });
    }
    world.run()
}
