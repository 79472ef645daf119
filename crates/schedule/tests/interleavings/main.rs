//! Plans run on bytes under many orders of the ranks: every collective, topology, size and algorithm against the plainest
//! thing that computes the same, and with every rule about who may read or write when.

mod world;

use polder_schedule::{Collective, GRAIN, Plan, SLOTS, Schedule};
use world::{Elements, Moved, Operation, Random, World};

/// Every schedule of a collective for ranks on `hosts`.
fn schedules(collective: Collective, hosts: &[u16], root: usize) -> Vec<Schedule> {
    let reduces = matches!(collective, Collective::AllReduce | Collective::Reduce);
    let sharded = reduces.then(|| Schedule::sharded(collective, hosts.len(), root));
    let two_level = Schedule::two_level(collective, hosts, root);
    [Some(Schedule::direct(collective, hosts.len(), root)), sharded, two_level]
        .into_iter()
        .flatten()
        .collect()
}

/// Hosts for `ranks` ranks: one, one each, pairs, in turn, and one rank that is alone.
fn places(ranks: usize) -> Vec<Vec<u16>> {
    let of = |host: fn(usize, usize) -> usize| (0..ranks).map(|rank| host(rank, ranks) as u16).collect();
    let mut all: Vec<Vec<u16>> = vec![
        of(|_, _| 0),
        of(|rank, _| rank),
        of(|rank, _| rank / 2),
        of(|rank, _| 3 - rank % 3),
        of(|rank, ranks| usize::from(rank + 1 == ranks)),
    ];
    all.sort();
    all.dedup();
    all
}

/// Bytes of a half of staging in which every one of `schedules` has room for `lines` lines of each block.
fn half(schedules: &[Schedule], hosts: &[u16], lines: u64) -> u64 {
    let blocks = schedules.iter().map(|schedule| Plan::new(schedule, hosts, 0).blocks);
    blocks.max().unwrap_or(1) as u64 * SLOTS * lines * GRAIN
}

/// Runs `operations`; a failure says its seed.
fn run(hosts: &[u16], operations: &[Operation], half: u64, seed: u64) -> Vec<Moved> {
    let mut world = World::new(hosts, operations, half);
    if let Err(error) = world.run(&mut Random(seed)) {
        let what: Vec<_> = operations.iter().map(|one| (one.schedule.collective, one.cut)).collect();
        panic!("seed {seed}, hosts {hosts:?}, {what:?}: {error}");
    }
    world.moved
}

#[test]
fn every_collective_keeps_its_promise_for_all_ranks_places_sizes_and_algorithms() {
    let mut seed = 0;
    for ranks in 1..=9 {
        for hosts in places(ranks) {
            for collective in Collective::ALL {
                let all = schedules(collective, &hosts, (seed as usize) % ranks);
                let half = half(&all, &hosts, 2);
                for schedule in all {
                    for bytes in [0, 1, 63, 1001] {
                        seed += 1;
                        let mut random = Random(seed);
                        let sizes = (Elements::Bytes, bytes);
                        let operation =
                            Operation::new(schedule.clone(), &hosts, sizes, half, seed % 2 == 0, &mut random);
                        run(&hosts, &[operation], half, seed);
                    }
                }
            }
        }
    }
}

/// A sequence of operations that `seed` draws.
fn sequence(seed: u64) -> (Vec<u16>, Vec<Operation>, u64) {
    let mut random = Random(seed);
    let ranks = 1 + random.below(6);
    let hosts: Vec<u16> = (0..ranks).map(|_| random.below(3) as u16).collect();
    let drawn: Vec<Schedule> = (0..3 + random.below(5))
        .map(|_| {
            let collective = random.one_of(&Collective::ALL);
            let all = schedules(collective, &hosts, random.below(ranks));
            all[random.below(all.len())].clone()
        })
        .collect();
    let half = half(&drawn, &hosts, 1 + random.below(3) as u64);
    let operations = drawn
        .into_iter()
        .map(|schedule| {
            let elements = random.one_of(&[Elements::Bytes, Elements::Floats]);
            let bytes = random.below(random_limit(seed)) as u64 / 4 * elements.bytes();
            let in_place = random.below(2) == 0;
            Operation::new(schedule, &hosts, (elements, bytes), half, in_place, &mut random)
        })
        .collect();
    (hosts, operations, half)
}

/// Sizes of a few lines, or of many rounds.
fn random_limit(seed: u64) -> usize {
    if seed.is_multiple_of(4) { 20_000 } else { 2000 }
}

#[test]
fn operations_follow_each_other_in_any_order_of_the_ranks() {
    for seed in 0..2000 {
        let (hosts, operations, half) = sequence(seed);
        run(&hosts, &operations, half, seed);
    }
}

#[test]
fn bytes_that_move_are_those_of_the_formulas() {
    for hosts in [&[0, 0, 0, 0][..], &[0, 1, 2], &[0, 0, 1, 1], &[0, 1, 2, 0, 1, 2], &[0, 0, 0, 1]] {
        for collective in Collective::ALL {
            for schedule in schedules(collective, hosts, 0) {
                let half = half(std::slice::from_ref(&schedule), hosts, 4);
                // Whole lines in every chunk, so that all are of one length.
                let bytes = 2 * GRAIN * 3 * 4 * 6;
                let mut random = Random(bytes);
                let operation = Operation::new(
                    schedule.clone(),
                    hosts,
                    (Elements::Bytes, bytes),
                    half,
                    false,
                    &mut random,
                );
                let chunk = operation.cut.chunk;
                let moved = run(hosts, &[operation], half, bytes);
                for (rank, moved) in moved.into_iter().enumerate() {
                    let traffic = schedule.traffic(hosts, rank);
                    let of = |chunks: usize| chunks as u64 * chunk;
                    let expected =
                        Moved { shown: of(traffic.shown), near: of(traffic.near), far: of(traffic.far) };
                    assert_eq!(moved, expected, "{collective} of rank {rank} on {hosts:?}");
                }
            }
        }
    }
}

/// How many of the first `seeds` sequences notice what `change` does to every plan.
fn caught(seeds: u64, change: impl Fn(&mut Plan)) -> usize {
    let fails = |seed| {
        let (hosts, mut operations, half) = sequence(seed);
        operations.iter_mut().flat_map(|operation| &mut operation.plans).for_each(&change);
        World::new(&hosts, &operations, half).run(&mut Random(seed)).is_err()
    };
    (0..seeds).filter(|&seed| fails(seed)).count()
}

#[test]
fn a_plan_that_does_not_wait_for_its_sources_is_caught() {
    let forget = |plan: &mut Plan| plan.steps.iter_mut().for_each(|step| step.awaits.clear());
    assert!(caught(100, forget) > 50);
}

#[test]
fn a_plan_that_does_not_wait_for_its_readers_is_caught() {
    let forget = |plan: &mut Plan| plan.steps.iter_mut().for_each(|step| step.readers.clear());
    assert!(caught(400, forget) > 10);
}

#[test]
fn a_plan_that_does_not_say_what_it_filled_is_caught() {
    // Whatever is owed goes out before a wait, so only a rank that never waits keeps the others.
    let forget = |plan: &mut Plan| plan.steps.iter_mut().for_each(|step| step.fills = false);
    assert!(caught(400, forget) > 10);
}
