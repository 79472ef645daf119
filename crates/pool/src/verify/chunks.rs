//! Chunks in the incoherent model: hosts claim rows of them at once, give them back, and die in the middle.
//!
//! The oracle is a list of holders beside the pool.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use polder_mem::model::{Change, Crash, Harmless, Outcome, Suite};
use polder_mem::{Memory, Nanos, ProcessSlot};

use super::group::{Dice, harmless};
use super::stage::{PROCESSES, Process, SPARE, Stage, expect_clean};
use crate::PoolError;
use crate::chunks::Chunks;
use crate::deviation::Deviation;
use crate::extents::{Extent, Extents, Room};

/// Lines of a chunk.
const LINES: u64 = 4;

pub(super) fn suites() -> Vec<Suite> {
    let about = "hosts claim rows of chunks and give them back, and die in the middle";
    vec![Suite::new("chunks", about, chunks).harmless(HARMLESS)]
}

const HARMLESS: &[Harmless] = &[
    // Nobody stores into a chunk or opens anything here, so that nothing of it is to be put right.
    harmless("recover.rs", "site.memory.write_back(site.layout.chunk", Change::Drop),
    harmless("recover.rs", "// Before the claim words say so.", Change::Drop),
    harmless("recover.rs", "// Before the announcements are gone.", Change::Drop),
    harmless("opens.rs", "// What a dead process announced leaves the cache.", Change::Drop),
    // Nobody is ever fenced here: whatever the view says, all claims are minded.
    harmless("view.rs", "memory.invalidate(layout.view_line(keeper, 0), LINE)", Change::Drop),
    harmless("view.rs", "memory.invalidate(layout.view_line(keeper, 0), LINE)", Change::Weaken),
    harmless("view.rs", "// Before the first words of all higher keepers.", Change::Drop),
    harmless("view.rs", "// Before the first words of all higher keepers.", Change::Weaken),
    harmless("view.rs", "memory.invalidate(layout.host_line(0)", Change::Drop),
    harmless("view.rs", "memory.invalidate(layout.host_line(0)", Change::Weaken),
    harmless("view.rs", "// Before all host lines.", Change::Drop),
    harmless("view.rs", "// Before all host lines.", Change::Weaken),
];

pub(super) fn canaries() -> Vec<Suite> {
    vec![
        Suite::new("chunks-lower-does-not-wait", "a claim goes on past that of a higher host", |seed| {
            Deviation::LowerDoesNotWait.during(|| chunks(seed))
        }),
        Suite::new("chunks-check-then-set", "chunks are taken when nobody was seen to have them", |seed| {
            Deviation::CheckThenSet.during(|| chunks(seed))
        }),
    ]
}

/// Who holds each line, by what the holders know.
type Holders = Rc<RefCell<Vec<Option<Holder>>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    host: u16,
    slot: ProcessSlot,
    since: Nanos,
}

/// Two to four processes on two or three hosts; one of them may die.
fn chunks(seed: u64) -> Outcome {
    let hosts = 2 + (seed % 2) as u16;
    let count = 3 + seed / 2 % 3;
    let is_canary = Deviation::LowerDoesNotWait.is_on() || Deviation::CheckThenSet.is_on();
    let mut stage = Stage::empty(seed, hosts, count);
    let holders: Holders = Rc::new(RefCell::new(vec![None; (count * LINES) as usize]));
    // The hosts whose lines a process has announced; the others of the host need not.
    let arrivals = Rc::new(Cell::new(0));
    let cast = (0..hosts).map(|host| (host, 0)).chain([((seed / 6 % 2) as u16, 1)]);
    for (index, (host, slot)) in cast.enumerate() {
        let (layout, holders) = (Rc::clone(&stage.layout), Rc::clone(&holders));
        let arrived = Rc::clone(&arrivals);
        let lost = Rc::clone(&holders);
        let thread = stage.world.spawn(host, slot, move |memory| {
            let process = Process::enter(memory, &layout, host);
            let mut dice = Dice::new(seed, u64::from(PROCESSES * host + slot));
            if slot == 0 {
                process.arrive();
                arrived.set(arrived.get() | 1 << host);
            }
            while arrived.get() >> host & 1 == 0 {
                process.memory.pause();
            }
            process.directory().prepare().expect("nobody keeps a lock");
            for _ in 0..3 {
                claim(&process, &holders, &mut dice);
            }
        });
        if index == 0 && !is_canary {
            strike(&mut stage, seed, thread, (host, slot), (lost, Rc::clone(&arrivals)));
        }
    }
    judge(&mut stage);
    stage.world.run()
}

/// Takes one to nine lines, one after the other chunks in a row, for a while.
fn claim(process: &Process, holders: &Holders, dice: &mut Dice) {
    let directory = process.directory();
    let (site, extents) = (directory.site, Extents(directory.site));
    look_around(process, holders, dice);
    // Each process has a stripe of its own, whose lock it need not take.
    let stripe = u32::from(site.me.slot.0);
    let extent = match take(process, stripe, [1, 2, 4, 5, 9][dice.roll(5) as usize]) {
        Ok(extent) => extent,
        Err(PoolError::Full { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    hold(holders, extent, Holder { host: site.host(), slot: site.me.slot, since: site.memory.now() });
    process.memory.yield_now();
    extents.intend(stripe, extent, 0);
    release(holders, extent);
    extents.free(stripe).expect("nobody keeps a lock");
    if dice.roll(2) == 0 {
        Chunks(site).try_give_back(extents.chunks(extent));
    } else {
        Chunks(site).give_back(0..site.layout.chunks()).expect("nobody keeps a lock");
    }
}

fn take(process: &Process, stripe: u32, units: u64) -> Result<Extent, PoolError> {
    let directory = process.directory();
    let (site, account) = (directory.site, directory.account);
    loop {
        let room = match Extents(site).fits_a_chunk(units) {
            true => Extents(site).allocate(stripe, units, account)?,
            false => Room::None,
        };
        if let Room::Taken(extent) = room {
            return Ok(extent);
        }
        if let Room::Taken(extent) = Chunks(site).grow(stripe, units, account)? {
            return Ok(extent);
        }
    }
}

fn hold(holders: &Holders, extent: Extent, mine: Holder) {
    for line in extent.start..extent.start + extent.units {
        let before = holders.borrow_mut()[line as usize].replace(mine);
        assert_eq!(before, None, "line {line} of {extent:?} is {mine:?}'s and another's");
    }
}

fn release(holders: &Holders, extent: Extent) {
    for line in extent.start..extent.start + extent.units {
        holders.borrow_mut()[line as usize] = None;
    }
}

/// Whatever another host holds, its claim words show, for as long as it holds it.
fn look_around(process: &Process, holders: &Holders, dice: &mut Dice) {
    let site = process.directory().site;
    let line = dice.roll(holders.borrow().len() as u64) as usize;
    let noted = holders.borrow()[line];
    let Some(owner) = noted.map(|holder| holder.host).filter(|&owner| owner != site.host()) else {
        return;
    };
    let chunk = (line as u64 / LINES) as u32;
    Chunks(site).invalidate(owner, &(chunk..chunk + 1));
    site.memory.fence_invalidations();
    let is_held = Chunks(site).are_held(owner, chunk..chunk + 1).expect("the model has no faults");
    assert!(
        is_held || holders.borrow()[line] != noted,
        "chunk {chunk} is in use and not held by host {owner}"
    );
}

/// Lets the process die, or its host, and somebody put it right.
fn strike(
    stage: &mut Stage,
    seed: u64,
    thread: polder_mem::model::ThreadId,
    (host, slot): (u16, u16),
    (holders, arrived): (Holders, Rc<Cell<u64>>),
) {
    let layout = Rc::clone(&stage.layout);
    match seed / 12 % 5 {
        // Most often while it claims for the first time.
        0 => {
            let mut dice = Dice::new(seed, 99);
            let at = if dice.roll(3) == 0 { dice.roll(600) } else { 300 + dice.roll(30) };
            stage.world.crash_at(thread, Crash::Pause, at);
        }
        // When it has just arrived.
        4 => stage.world.crash_at(thread, Crash::Pause, 8 + seed / 60 % 16),
        1 => {
            stage.world.crash_within(thread, Crash::Process, 300);
            stage.world.spawn_after_crash(thread, host, SPARE, move |memory| {
                let process = Process::enter(memory, &layout, host);
                process.arrive();
                arrived.set(arrived.get() | 1 << host);
                process.directory().prepare().expect("nobody keeps a lock");
                bury(&process, &holders, ProcessSlot(slot));
            });
        }
        2 => {
            stage.world.crash_within(thread, Crash::Host, 300);
            stage.world.spawn_after_crash(thread, host, slot, move |memory| {
                let process = Process::enter(memory, &layout, host);
                // Whatever a process of this host held died with it.
                holders.borrow_mut().iter_mut().for_each(|holder| {
                    *holder = holder.filter(|holder| holder.host != host);
                });
                process.join();
                arrived.set(arrived.get() | 1 << host);
                claim(&process, &holders, &mut Dice::new(seed, !0));
            });
        }
        _ => {}
    }
}

/// Puts right what the dead process left, and frees what it held, as the repair of its directory lock would.
fn bury(process: &Process, holders: &Holders, slot: ProcessSlot) {
    let directory = process.directory();
    let (site, stripe) = (directory.site, u32::from(slot.0));
    directory.repair_process(slot).expect("nobody keeps a lock");
    holders.borrow_mut().iter_mut().for_each(|holder| {
        *holder = holder.filter(|holder| (holder.host, holder.slot) != (site.host(), slot))
    });
    if Extents(site).intended(stripe).is_some() {
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
            let process = Process::enter(memory, &layout, host);
            process.directory().prepare().expect("nobody else is there");
            for slot in 0..PROCESSES {
                process.directory().repair_process(ProcessSlot(slot)).expect("nobody else is there");
                process.directory().maintain().expect("nobody else is there");
            }
            processes.push(process);
        }
        processes.iter().for_each(|process| expect_clean(&process.directory()));
        let lines = u64::from(layout.chunks()) * LINES;
        let all = take(&processes[1], 0, lines).expect("nobody holds anything");
        assert_eq!(all, Extent { start: 0, units: lines });
    });
}
