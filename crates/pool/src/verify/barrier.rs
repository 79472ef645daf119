//! The barrier: nobody leaves before all have entered, and what was written before it is seen after it.

use std::cell::RefCell;
use std::rc::Rc;

use polder_mem::model::{Change, Harmless, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Bell, LINE, Memory, Offset};

use super::group::{self, Dice, Scene, harmless, tiny};
use crate::PoolError;
use crate::deviation::Deviation;
use crate::group::Group;

pub(super) fn suites() -> Vec<Suite> {
    let about = "nobody leaves a barrier before all have entered; survivors of a crash leave or are told who died, and find it dead when they ask";
    let busy_about = "on a busy machine no rank blames one that waits and only lacks a CPU";
    vec![
        Suite::new("barrier", about, barrier).harmless(HARMLESS),
        Suite::new("busy-barrier", busy_about, busy).harmless(group::HARMLESS),
    ]
}

const HARMLESS: &[Harmless] = &[
    group::HARMLESS[0],
    group::HARMLESS[1],
    group::HARMLESS[2],
    group::HARMLESS[3],
    group::HARMLESS[4],
    group::HARMLESS[5],
    group::HARMLESS[6],
    harmless("group.rs", "one look ahead", Change::Drop),
    harmless("group.rs", "one look ahead", Change::Weaken),
    harmless("progress.rs", "an older beat", Change::Drop),
    harmless("progress.rs", "an older beat", Change::Weaken),
];

fn barrier(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 1);
    let scene = Scene::new(seed, &mut dice, 4, tiny(128), 2 * LINE);
    let scene = if dice.roll(2) == 0 { scene.with_heartbeats() } else { scene };
    some_rounds(scene, &mut dice)
}

fn busy(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 1);
    let scene = Scene::busy(seed, &mut dice, 4, tiny(128), 2 * LINE);
    some_rounds(scene, &mut dice)
}

fn some_rounds(scene: Scene, dice: &mut Dice) -> Outcome {
    let rounds = 1 + dice.roll(4);
    let lines: Vec<Offset> = (0..scene.size()).map(|rank| scene.extra(rank)).collect();
    let entered = Rc::new(RefCell::new(vec![0; scene.size()]));
    let has_left = Rc::new(RefCell::new(vec![false; scene.size()]));
    scene.run(dice, 40 * rounds, move |group| {
        let ended = (1..=rounds).try_for_each(|round| one_round(group, round, &lines, &entered));
        let ended = ended.map_err(|error| check_death_reports(group, error, &has_left));
        has_left.borrow_mut()[group.rank()] = true;
        ended
    })
}

/// Asks for the rank that `error` names until it is known to have died, and for the others. Returns the error where the answers are in
/// keeping with it; else that the dead one is late, or that a rank that is still there has died.
fn check_death_reports(
    group: &Group<ModelMemory>,
    error: PoolError,
    has_left: &RefCell<Vec<bool>>,
) -> PoolError {
    let PoolError::PeerDead { peer, what, epoch, sequence } = error else { return error };
    let (memory, timeout) = (group.memory(), group.options().timeout);
    let rank = peer.rank.expect("a rank died") as usize;
    let died = |rank| group.has_died(rank).expect("no faults");
    let (deadline, mut looks) = (memory.now() + timeout, 0);
    while !died(rank) {
        looks += 1;
        // This one may have stood still since its last look.
        if memory.now() > deadline && looks > 8 {
            return PoolError::Timeout { peer, what, epoch, sequence, waited_ms: timeout.as_millis() as u64 };
        }
        let bell = Bell(group.rank() as u32);
        let seen = memory.announce_sleep(bell);
        memory.sleep(bell, seen, memory.now() + group.options().patience.nap);
    }
    let other = (0..group.size()).find(|&other| other != rank && died(other) && !has_left.borrow()[other]);
    let peer = other.map_or(peer, |other| group.peer(other));
    PoolError::PeerDead { peer, what, epoch, sequence }
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
    if group.members()[0].heartbeat.is_some() {
        for peer in (0..lines.len()).filter(|&peer| peer != rank) {
            let ahead = group.called_ahead(peer);
            assert!(ahead.as_ref().is_none_or(|call| call == "barrier"), "rank {peer} called {ahead:?}");
        }
    }
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
    let naps = "a rank that was stopped blames a peer that still waits and got no CPU for some naps";
    let silent = "a rank that is asked for the dead after a barrier has failed says that all live";
    vec![
        Suite::new("counting-barrier", about, counted),
        Suite::new("barrier-nobody-has-died", silent, |seed| {
            Deviation::NobodyHasDied.during(|| barrier(seed))
        }),
        Suite::new("barrier-counts-naps", naps, |seed| Deviation::CountsNaps.during(|| busy(seed))),
    ]
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
