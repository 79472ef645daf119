//! Chunks in the incoherent model: hosts claim rows of them at once, give them back, and die in the middle.
//!
//! The oracle is a list of holders beside the pool, and a stamp in each line of what is held: nobody else's stamp ever stands
//! there.

use std::cell::RefCell;
use std::rc::Rc;

use polder_mem::model::{Crash, Outcome, Suite};
use polder_mem::{LINE, Memory, ProcessSlot};

use super::stage::{PROCESSES, Process, SPARE, Stage};
use crate::PoolError;
use crate::chunks::Chunks;
use crate::extents::{Extent, Extents, Room};
use crate::site::Flaw;

/// Lines of a chunk.
const LINES: u64 = 4;

pub(super) fn suites() -> Vec<Suite> {
    let about = "hosts claim rows of chunks and give them back, and die in the middle";
    vec![Suite::new("chunks", about, |seed| chunks(seed, Flaw::None))]
}

pub(super) fn canaries() -> Vec<Suite> {
    vec![
        Suite::new("chunks-lower-does-not-wait", "a claim goes on past that of a higher host", |seed| {
            chunks(seed, Flaw::LowerDoesNotWait)
        }),
        Suite::new("chunks-check-then-set", "chunks are taken when nobody was seen to have them", |seed| {
            chunks(seed, Flaw::CheckThenSet)
        }),
    ]
}

/// Who holds each line, by what the holders know.
type Holders = Rc<RefCell<Vec<Option<u64>>>>;

/// Two to four processes on two or three hosts; one of them may die.
fn chunks(seed: u64, flaw: Flaw) -> Outcome {
    let hosts = 2 + (seed % 2) as u16;
    let count = 3 + seed / 2 % 3;
    let mut stage = Stage::new(seed, hosts, count, flaw);
    let holders: Holders = Rc::new(RefCell::new(vec![None; (count * LINES) as usize]));
    let cast = (0..hosts).map(|host| (host, 0)).chain([((seed / 6 % 2) as u16, 1)]);
    for (index, (host, slot)) in cast.enumerate() {
        let (layout, holders) = (Rc::clone(&stage.layout), Rc::clone(&holders));
        let mine = u64::from(host) << 8 | (u64::from(slot) + 1);
        let lost = Rc::clone(&holders);
        let thread = stage.world.spawn(host, slot, move |memory| {
            let process = Process::enter(memory, &layout, host, flaw);
            for round in 0..3 {
                claim(&process, &holders, mine, seed.rotate_right(7 * round + u32::from(host)));
            }
        });
        if index == 0 && flaw == Flaw::None {
            strike(&mut stage, seed, thread, (host, slot), lost, mine);
        }
    }
    judge(&mut stage);
    stage.world.run()
}

/// Takes one to nine lines, one after the other chunks in a row, for a while.
fn claim(process: &Process, holders: &Holders, mine: u64, draw: u64) {
    let directory = process.directory();
    let (site, extents) = (directory.site, Extents(directory.site));
    // Each process has a stripe of its own, whose lock it need not take.
    let stripe = u32::from(site.me.slot.0);
    let extent = match take(process, stripe, [1, 2, 4, 5, 9][(draw % 5) as usize]) {
        Ok(extent) => extent,
        Err(PoolError::Full { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    hold(holders, extent, mine);
    stamp(process, extent, mine);
    process.memory.yield_now();
    expect_stamp(process, extent, mine);
    extents.intend(stripe, extent, 0);
    release(holders, extent);
    extents.free(stripe).expect("nobody keeps a lock");
    if draw & 64 == 0 {
        Chunks(site).give_back_soon(extents.chunks(extent));
    } else {
        Chunks(site).give_back(0..site.layout.chunks()).expect("nobody keeps a lock");
    }
}

fn take(process: &Process, stripe: u32, units: u64) -> Result<Extent, PoolError> {
    let directory = process.directory();
    let (site, account) = (directory.site, directory.account);
    loop {
        let room = match Extents(site).is_large(units) {
            true => Room::None,
            false => Extents(site).allocate(stripe, units, account)?,
        };
        if let Room::Taken(extent) = room {
            return Ok(extent);
        }
        if let Room::Taken(extent) = Chunks(site).grow(stripe, units, account)? {
            return Ok(extent);
        }
    }
}

fn hold(holders: &Holders, extent: Extent, mine: u64) {
    for line in extent.start..extent.start + extent.units {
        let before = holders.borrow_mut()[line as usize].replace(mine);
        assert_eq!(before, None, "line {line} of {extent:?} is {mine:#x}'s and another's");
    }
}

fn release(holders: &Holders, extent: Extent) {
    for line in extent.start..extent.start + extent.units {
        holders.borrow_mut()[line as usize] = None;
    }
}

/// Writes to all lines, as whoever fills an object does.
fn stamp(process: &Process, extent: Extent, mine: u64) {
    let at = Extents(process.directory().site).offset(extent);
    for line in 0..extent.units {
        process.memory.store(at.lines(line), mine);
    }
    process.memory.write_back(at, extent.units * LINE);
    process.memory.mfence();
}

fn expect_stamp(process: &Process, extent: Extent, mine: u64) {
    let at = Extents(process.directory().site).offset(extent);
    process.memory.invalidate(at, extent.units * LINE);
    process.memory.fence_invalidations();
    for line in 0..extent.units {
        let seen = process.memory.load(at.lines(line)).expect("the model has no faults");
        assert_eq!(seen, mine, "line {line} of {extent:?} was written by another");
    }
}

/// Lets the process die, or its host, and somebody put it right.
fn strike(
    stage: &mut Stage,
    seed: u64,
    thread: polder_mem::model::ThreadId,
    (host, slot): (u16, u16),
    holders: Holders,
    mine: u64,
) {
    let layout = Rc::clone(&stage.layout);
    match seed / 12 % 4 {
        0 => stage.world.crash_within(thread, Crash::Pause, 300),
        1 => {
            stage.world.crash_within(thread, Crash::Process, 300);
            stage.world.spawn_after_crash(thread, host, SPARE, move |memory| {
                let process = Process::enter(memory, &layout, host, Flaw::None);
                bury(&process, &holders, ProcessSlot(slot), mine);
            });
        }
        2 => {
            stage.world.crash_within(thread, Crash::Host, 300);
            stage.world.spawn_after_crash(thread, host, slot, move |memory| {
                let process = Process::enter(memory, &layout, host, Flaw::None);
                // Whatever a process of this host held died with it.
                holders.borrow_mut().iter_mut().for_each(|holder| {
                    *holder = holder.filter(|mine| mine >> 8 != u64::from(host));
                });
                process.directory().prepare().expect("nobody else is there");
                claim(&process, &holders, mine, seed >> 20);
            });
        }
        _ => {}
    }
}

/// Puts right what the dead process left, and frees what it held, as the repair of its directory lock would.
fn bury(process: &Process, holders: &Holders, slot: ProcessSlot, mine: u64) {
    let directory = process.directory();
    let (site, stripe) = (directory.site, u32::from(slot.0));
    directory.repair_process(slot).expect("nobody keeps a lock");
    holders.borrow_mut().iter_mut().for_each(|holder| *holder = holder.filter(|other| *other != mine));
    if let Some(extent) = Extents(site).intended(stripe) {
        site.memory.invalidate(Extents(site).offset(extent), extent.units * LINE);
        site.memory.mfence();
        Extents(site).free(stripe).expect("nobody keeps a lock");
    }
    Chunks(site).give_back(0..site.layout.chunks()).expect("nobody keeps a lock");
}

/// When all is given back, no chunk is anybody's, and one row of all of them can be had.
fn judge(stage: &mut Stage) {
    let layout = Rc::clone(&stage.layout);
    let hosts = layout.geometry().hosts;
    let memories: Vec<_> = (0..hosts).map(|host| stage.world.memory(host, SPARE)).collect();
    stage.world.check(0, move |_| {
        let mut processes = vec![];
        for (host, memory) in (0..).zip(memories) {
            let process = Process::enter(memory, &layout, host, Flaw::None);
            process.directory().prepare().expect("nobody else is there");
            for slot in 0..PROCESSES {
                process.directory().repair_process(ProcessSlot(slot)).expect("nobody else is there");
                process.directory().maintain().expect("nobody else is there");
            }
            processes.push(process);
        }
        processes.iter().for_each(Process::expect_clean);
        let lines = u64::from(layout.chunks()) * LINES;
        let all = take(&processes[1], 0, lines).expect("nobody holds anything");
        assert_eq!(all, Extent { start: 0, units: lines });
    });
}
