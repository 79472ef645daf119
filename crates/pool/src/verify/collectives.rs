//! Collectives, several in a row, so that staging is used again: every rank gets what it should, or is told who died.

use std::cell::Cell;
use std::rc::Rc;

use polder_kernels::{Dtype, Op};
use polder_mem::model::{ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{LINE, Memory, Offset};
use polder_schedule::Collective;

use super::group::{Dice, HARMLESS, Scene, tiny};
use crate::deviation::Deviation;
use crate::group::Group;
use crate::{Buffers, Operation, PoolError, line};

pub(super) fn suites() -> Vec<Suite> {
    let reduce =
        "short and long all-reduces in a row give every rank the sum; survivors of a crash are told who died";
    let pooled = "the same on data that lives in the pool and is written anew between operations";
    let any = "any collectives in a row keep their promises; survivors of a crash are told who died, and nobody gets past a mismatch";
    vec![
        Suite::new("all-reduce", reduce, all_reduce).harmless(HARMLESS),
        Suite::new("all-reduce-in-pool", pooled, in_pool).harmless(HARMLESS),
        Suite::new("collectives", any, mixed).harmless(HARMLESS),
    ]
}

/// Element `index` of rank `rank`'s input of operation `salt`: no two are equal.
fn element(rank: usize, salt: u64, index: usize) -> u64 {
    ((salt + 1) * 0x1_0000 + (index as u64 + 1) * 16 + rank as u64 + 1) * 0x1_0000_0001
}

fn input(rank: usize, salt: u64, count: usize) -> Vec<u8> {
    (0..count).flat_map(|index| element(rank, salt, index).to_le_bytes()).collect()
}

fn sum(ranks: usize, salt: u64, count: usize) -> Vec<u8> {
    let sum = |index| (0..ranks).map(|rank| element(rank, salt, index)).fold(0, u64::wrapping_add);
    (0..count).flat_map(|index| sum(index).to_le_bytes()).collect()
}

fn xor(ranks: usize, salt: u64, count: usize) -> Vec<u8> {
    let xor = |index| (0..ranks).map(|rank| element(rank, salt, index)).fold(0, |a, b| a ^ b);
    (0..count).flat_map(|index| xor(index).to_le_bytes()).collect()
}

fn expect(group: &Group<ModelMemory>, what: &str, salt: u64, found: &[u8], expected: &[u8]) {
    let differs = found.chunks(8).zip(expected.chunks(8)).position(|(a, b)| a != b);
    assert_eq!(differs, None, "rank {}, {what} {salt}: an element is wrong", group.rank());
}

/// Elements of a message that goes in one exchange, in several rounds, or uses slots of staging again.
fn count(dice: &mut Dice) -> usize {
    [1, 2, 20, 70][dice.roll(4) as usize]
}

fn all_reduce(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 2);
    let scene = Scene::new(seed, &mut dice, 4, tiny(6144), 0);
    let counts: Vec<usize> = (0..1 + dice.roll(3)).map(|_| count(&mut dice)).collect();
    scene.run(&mut dice, 400, move |group| {
        for (salt, &count) in (0..).zip(&counts) {
            reduced(group, salt, count)?;
        }
        Ok(())
    })
}

fn reduced(group: &mut Group<ModelMemory>, salt: u64, count: usize) -> Result<(), PoolError> {
    let mut data = input(group.rank(), salt, count);
    group.all_reduce(Op::Sum, Dtype::U64, &mut data)?;
    expect(group, "all-reduce", salt, &data, &sum(group.size(), salt, count));
    Ok(())
}

/// Bytes of each rank's data in the pool.
const EXTENT: u64 = 512;

fn in_pool(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 3);
    let scene = Scene::new(seed, &mut dice, 3, tiny(128), EXTENT);
    let counts: Vec<usize> = (0..1 + dice.roll(3)).map(|_| [1, 9, 30, 64][dice.roll(4) as usize]).collect();
    let extents: Vec<Offset> = (0..scene.size()).map(|rank| scene.extra(rank)).collect();
    scene.run(&mut dice, 400, move |group| {
        let memory = group.memory().clone();
        for (salt, &count) in (0..).zip(&counts) {
            let at = extents[group.rank()];
            // Bytes of any number: the last word is written in part, and the byte behind stays.
            let bytes = count * 8 - 3 * (count % 2);
            memory.copy_in(at, &input(group.rank(), salt, count))?;
            let operation = Operation::reducing(Collective::AllReduce, Op::BitXor, Dtype::U8);
            group.run(&operation, Buffers::Pool { at, bytes: bytes as u64 })?;
            let mut data = vec![0; count * 8];
            memory.copy_out(at, &mut data)?;
            let mut expected = input(group.rank(), salt, count);
            expected[..bytes].copy_from_slice(&xor(group.size(), salt, count)[..bytes]);
            expect(group, "in pool", salt, &data, &expected);
        }
        Ok(())
    })
}

fn mixed(seed: u64) -> Outcome {
    if Dice::new(seed, 29).roll(8) == 0 {
        return left(seed);
    }
    let mut dice = Dice::new(seed, 4);
    let scene = Scene::new(seed, &mut dice, 4, tiny(6144), 0);
    let ranks = scene.size() as u64;
    let operation =
        |dice: &mut Dice| (dice.roll(7), dice.roll(ranks) as usize, [1, 3, 12, 40][dice.roll(4) as usize]);
    let operations: Vec<_> = (0..2 + dice.roll(4)).map(|_| operation(&mut dice)).collect();
    let odd = (dice.roll(2) == 0).then(|| (dice.roll(ranks) as usize, dice.roll(5)));
    scene.run(&mut dice, 400, move |group| {
        let done = (0..).zip(&operations).try_for_each(|(salt, &(which, root, count))| match which {
            0 => reduced(group, salt, count),
            1 => broadcast(group, salt, root, count),
            2 => reduce(group, salt, root, count),
            3 => all_gather(group, salt, count),
            4 => all_to_all(group, salt, count),
            5 => all_to_all_of_lists(group, salt, count),
            _ => group.barrier(),
        });
        match (done, odd) {
            (Ok(()), Some((odd, which))) => mismatched(group, group.rank() == odd, which),
            // Others may have gone on to the mismatch, and have given up there.
            (Err(PoolError::GaveUp { .. }), Some(_)) => Ok(()),
            (done, _) => done,
        }
    })
}

/// Two ranks call different operations that wait for nobody, and leave: one of them at least is told. It may be stopped meanwhile.
fn left(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 4);
    // Whoever wakes the other, or looks at another host on software, fences anyhow.
    let mut scene = match dice.roll(3) {
        0 => Scene::new(seed, &mut dice, 2, tiny(128), 0),
        _ => Scene::apart(seed, tiny(128)),
    };
    let (ended, told) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let (all, some) = (Rc::clone(&ended), Rc::clone(&told));
    // A rank that dies tells nobody.
    scene.world.check(0, move |_| assert!(all.get() < 2 || some.get() > 0, "nobody is told of a mismatch"));
    scene.run(&mut dice, 60, move |group| {
        let called = group.broadcast(group.rank(), Dtype::U64, &mut [7; 8]);
        group.leave();
        let left = called.and_then(|()| group.compare_last());
        told.set(told.get() + u32::from(left.is_err()));
        ended.set(ended.get() + 1);
        match left {
            Err(PoolError::Mismatch { .. } | PoolError::GaveUp { .. }) => Ok(()),
            left => left,
        }
    })
}

/// One rank names another root or type than the others: nobody gets past the next operation, with whatever data it has.
fn mismatched(group: &mut Group<ModelMemory>, is_odd: bool, which: u64) -> Result<(), PoolError> {
    let (root, mut data) = (usize::from(is_odd), [7; 8]);
    let all = data.repeat(group.size());
    let moving = |collective| Operation::moving(collective, Dtype::U64).with_root(root);
    let called = match which {
        0 => group.broadcast(root, Dtype::U64, &mut data),
        1 => group.broadcast(0, if is_odd { Dtype::F64 } else { Dtype::U64 }, &mut data),
        2 => group.run(&moving(Collective::Scatter), Buffers::Apart { input: &all, output: &mut data }),
        3 => {
            group.run(&moving(Collective::Gather), Buffers::Apart { input: &data, output: &mut all.clone() })
        }
        _ => group.run(
            &Operation { reduction: Some(Op::Sum), ..moving(Collective::Reduce) },
            Buffers::InPlace(&mut data),
        ),
    };
    match called.and_then(|()| group.barrier()) {
        Ok(()) => panic!("rank {} went past a mismatch", group.rank()),
        Err(PoolError::Mismatch { .. } | PoolError::GaveUp { .. }) => Ok(()),
        error => error,
    }
}

fn broadcast(group: &mut Group<ModelMemory>, salt: u64, root: usize, count: usize) -> Result<(), PoolError> {
    let mut data = input(group.rank(), salt, count);
    group.broadcast(root, Dtype::U64, &mut data)?;
    expect(group, "broadcast", salt, &data, &input(root, salt, count));
    Ok(())
}

fn reduce(group: &mut Group<ModelMemory>, salt: u64, root: usize, count: usize) -> Result<(), PoolError> {
    let mut data = input(group.rank(), salt, count);
    let operation = Operation::reducing(Collective::Reduce, Op::Sum, Dtype::U64).with_root(root);
    group.run(&operation, Buffers::InPlace(&mut data))?;
    if group.rank() == root {
        expect(group, "reduce", salt, &data, &sum(group.size(), salt, count));
    }
    Ok(())
}

fn all_gather(group: &mut Group<ModelMemory>, salt: u64, count: usize) -> Result<(), PoolError> {
    let own = input(group.rank(), salt, count);
    let mut output = vec![0; own.len() * group.size()];
    let gather = Operation::moving(Collective::AllGather, Dtype::U64);
    group.run(&gather, Buffers::Apart { input: &own, output: &mut output })?;
    let all: Vec<u8> = (0..group.size()).flat_map(|peer| input(peer, salt, count)).collect();
    expect(group, "all-gather", salt, &output, &all);
    Ok(())
}

fn all_to_all(group: &mut Group<ModelMemory>, salt: u64, count: usize) -> Result<(), PoolError> {
    let (rank, ranks) = (group.rank(), group.size());
    let own = input(rank, salt, count * ranks);
    let mut output = vec![0; own.len()];
    let exchange = Operation::moving(Collective::AllToAll, Dtype::U64);
    group.run(&exchange, Buffers::Apart { input: &own, output: &mut output })?;
    let chunk = |peer| input(peer, salt, count * ranks)[rank * count * 8..(rank + 1) * count * 8].to_vec();
    expect(group, "all-to-all", salt, &output, &(0..ranks).flat_map(chunk).collect::<Vec<_>>());
    Ok(())
}

/// Parts of several lengths, of which each is known to its two ranks alone.
fn all_to_all_of_lists(group: &mut Group<ModelMemory>, salt: u64, count: usize) -> Result<(), PoolError> {
    let (rank, ranks) = (group.rank(), group.size());
    let part = |from: usize, to: usize| {
        let elements = count * ((from + 2 * to + salt as usize) % 3);
        input(from, salt + to as u64 * 64, elements)
    };
    let given: Vec<Vec<u8>> = (0..ranks).map(|to| part(rank, to)).collect();
    let given: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
    let expected: Vec<Vec<u8>> = (0..ranks).map(|from| part(from, rank)).collect();
    let mut taken: Vec<Vec<u8>> = expected.iter().map(|part| vec![0; part.len()]).collect();
    let mut output: Vec<&mut [u8]> = taken.iter_mut().map(Vec::as_mut_slice).collect();
    let exchange = Operation::moving(Collective::AllToAll, Dtype::U64);
    group.run(&exchange, Buffers::Lists { input: &given, output: &mut output })?;
    expect(group, "all-to-all of lists", salt, &taken.concat(), &expected.concat());
    Ok(())
}

/// Protocols that are known to be wrong.
pub(super) fn canaries() -> Vec<Suite> {
    let about = "two ranks exchange words through one staging line each, written again without waiting for its reader";
    let roots = "two ranks name different roots of a short broadcast, and hold only what is published of the operation that they are in against their own";
    let unheard = "a rank takes the end of any collective, also of one that it heard nobody in, for news that all ranks are in it";
    vec![
        Suite::new("every-end-is-heard", unheard, |seed| Deviation::EveryEndIsHeard.during(|| mixed(seed))),
        Suite::new("staging-reused-too-early", about, reused_too_early),
        Suite::new("mismatch-of-the-operation-before", roots, compared_too_late),
    ]
}

/// Each rank is the root of its own broadcast, which waits for nobody, and then in a barrier, which is the same for both. A line
/// holds the operation's number, its signature and that of the one before, which is not looked at.
fn compared_too_late(seed: u64) -> Outcome {
    let mut world = World::new(seed, Shape { hosts: 2, bytes: 256, ..Shape::default() });
    let differences = Rc::new(Cell::new(0));
    for host in 0..2 {
        let differences = Rc::clone(&differences);
        world.spawn(host, 0, move |memory| {
            let line_of = |rank: u16| Offset(u64::from(rank) * 128);
            let calls = [u64::from(host), 9];
            for (number, call) in (1..).zip(calls) {
                line::publish(&memory, line_of(host), &[number, call, calls[0], 0, 0, 0, 0]);
            }
            let theirs = loop {
                let seen = line::read(&memory, line_of(1 - host)).expect("no faults");
                match seen.filter(|words| words[0] > 0) {
                    Some(words) => break words,
                    None => memory.pause(),
                }
            };
            let ours = calls[theirs[0] as usize - 1];
            differences.set(differences.get() + u32::from(theirs[1] != ours));
        });
    }
    world.check(0, move |_| assert!(differences.get() > 0, "the ranks kept different values"));
    world.run()
}

/// Each rank stages a word, publishes the number of its operation, waits for the other's and reads its word. Nothing
/// keeps the faster one from staging its next word before the slower has read this one.
fn reused_too_early(seed: u64) -> Outcome {
    let mut world = World::new(seed, Shape { hosts: 2, bytes: 256, ..Shape::default() });
    for host in 0..2 {
        world.spawn(host, 0, move |memory| {
            let line = |rank: u16, index| Offset(u64::from(rank) * 128).lines(index);
            for operation in 1..=3 {
                memory.store(line(host, 1), operation * 10);
                memory.write_back(line(host, 1), LINE);
                memory.sfence();
                line::publish(&memory, line(host, 0), &[operation, 0, 0, 0, 0, 0, 0]);
                let came = || line::read(&memory, line(1 - host, 0)).expect("no faults");
                while came().is_none_or(|words| words[0] < operation) {
                    memory.pause();
                }
                memory.invalidate(line(1 - host, 1), LINE);
                memory.fence_invalidations();
                assert_eq!(memory.load(line(1 - host, 1)), Ok(operation * 10));
            }
        });
    }
    world.run()
}
