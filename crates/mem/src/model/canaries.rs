//! Protocols that are known to be wrong, each beside its right twin, on raw operations.
//!
//! A model that does not fail a canary cannot be believed when it passes a protocol: [`canaries`] must all fail, and
//! their twins never.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::{Crash, ModelMemory, Outcome, Shape, Suite, ThreadId, World};
use crate::{LINE, LocalWord, Memory, Offset};

/// A protocol that is wrong, and the same without its mistake.
#[derive(Clone, Debug)]
pub struct Canary {
    /// The wrong one.
    pub wrong: Suite,
    /// The right one.
    pub right: Suite,
    /// Schedules within which the wrong one is caught, whatever the first seed: some ten times the mean.
    pub within: u64,
}

/// Every canary.
#[must_use]
pub fn canaries() -> Vec<Canary> {
    let canary = |wrong, right, within| Canary { wrong, right, within };
    let wrong_ring = |name, about, flaw, within| {
        let right =
            Suite::new("ring", "messages of two words through two slots", |seed| ring(seed, Flaw::None));
        canary(Suite::new(name, about, move |seed| ring(seed, flaw)), right, within)
    };
    let wrong_lock = |name, about, enter: Enter, within| {
        let about_right = "Lamport's bakery, each word on a line of its own host";
        let right = Suite::new("lock-bakery", about_right, |seed| lock(seed, bakery));
        canary(Suite::new(name, about, move |seed| lock(seed, enter)), right, within)
    };
    let wrong_claim = |name, about, claim: Claim, within| {
        let about_right = "a claim on one's own line, a scan, and the higher id is waited for";
        let waits: Claim = |memory, hosts| announce_and_scan(memory, hosts, true);
        let right = Suite::new("claim-announce-scan-wait", about_right, move |seed| claims(seed, waits));
        canary(Suite::new(name, about, move |seed| claims(seed, claim)), right, within)
    };
    vec![
        wrong_ring("ring-no-write-back", "the payload stays in the producer's cache", Flaw::NoWriteBack, 20),
        wrong_ring("ring-no-fence", "no sfence between payload and tail", Flaw::NoFenceBeforeTail, 100),
        wrong_ring(
            "ring-flush-late",
            "the consumer fences and then flushes, as in the cMPI paper",
            Flaw::FlushAfterFence,
            50,
        ),
        wrong_ring(
            "ring-flush-early",
            "the payload is invalidated before the tail is read",
            Flaw::FlushBeforeTail,
            500,
        ),
        wrong_ring("ring-shared-line", "head and tail lie on one line", Flaw::SharedLine, 150),
        wrong_ring(
            "ring-writes-slot",
            "the consumer marks the producer's slot as read",
            Flaw::WritesIntoSlot,
            20,
        ),
        canary(
            Suite::new("message-two-sequences", "a line with its sequence at both ends", |seed| {
                message(seed, false)
            }),
            Suite::new("message-checksum", "a line with a checksum", |seed| message(seed, true)),
            100,
        ),
        wrong_lock("lock-cas", "a compare-and-swap of one host as a lock between hosts", cas_lock, 50),
        wrong_lock(
            "bakery-one-publication",
            "the bakery with number and choosing published at once",
            hasty_bakery,
            4000,
        ),
        wrong_claim("claim-check-then-set", "a slot is taken when it looks free", check_then_set, 150),
        wrong_claim(
            "claim-without-wait",
            "the lower id does not wait for the higher",
            |memory, hosts| announce_and_scan(memory, hosts, false),
            50,
        ),
        canary(
            Suite::new("reuse-blind", "an extent is reused without a look at who has it open", |seed| {
                reuse(seed, false)
            }),
            Suite::new("reuse-after-scan", "an extent is reused when no announcement names it", |seed| {
                reuse(seed, true)
            }),
            100,
        ),
        canary(
            Suite::new("repair-from-afar", "another host repairs a dead process's lines in place", |seed| {
                repair(seed, 1)
            }),
            Suite::new("repair-at-home", "another process of the same host repairs them", |seed| {
                repair(seed, 0)
            }),
            20,
        ),
    ]
}

fn fresh(memory: &ModelMemory, at: Offset) -> u64 {
    memory.invalidate(at, LINE);
    // HARMLESS(fence_invalidations -> drop, weaken) in the ring: whoever looks too early looks again.
    memory.fence_invalidations();
    memory.load(at).expect("the model's memory does not fail")
}

fn load(memory: &ModelMemory, at: Offset) -> u64 {
    memory.load(at).expect("the model's memory does not fail")
}

fn publish(memory: &ModelMemory, at: Offset, value: u64) {
    memory.store(at, value);
    memory.write_back(at, LINE);
    // HARMLESS(sfence -> drop) in the ring: nothing that follows may not be seen before.
    memory.sfence();
}

fn announce(memory: &ModelMemory, at: Offset, value: u64) {
    memory.store(at, value);
    memory.write_back(at, LINE);
    memory.mfence();
}

// Rings.

/// What a ring gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    NoWriteBack,
    NoFenceBeforeTail,
    FlushAfterFence,
    FlushBeforeTail,
    SharedLine,
    WritesIntoSlot,
}

const TAIL: Offset = Offset(0);
const HEAD: Offset = Offset(64);
const SLOTS: [Offset; 2] = [Offset(128), Offset(192)];
const MESSAGES: u64 = 6;

fn ring(seed: u64, flaw: Flaw) -> Outcome {
    let mut world = World::new(seed, Shape { bytes: 256, ..Shape::default() });
    let head = if flaw == Flaw::SharedLine { TAIL.word(1) } else { HEAD };
    world.spawn(0, 0, move |memory| produce(&memory, head, flaw));
    world.spawn(1, 0, move |memory| consume(&memory, head, flaw));
    world.run()
}

fn produce(memory: &ModelMemory, head: Offset, flaw: Flaw) {
    for message in 0..MESSAGES {
        while message - fresh(memory, head) == 2 {
            memory.pause();
        }
        let slot = SLOTS[message as usize % 2];
        memory.store(slot, message * 3 + 1);
        memory.store(slot.word(1), message * 5 + 2);
        if flaw != Flaw::NoWriteBack {
            memory.write_back(slot, LINE);
        }
        if flaw != Flaw::NoFenceBeforeTail {
            memory.sfence();
        }
        publish(memory, TAIL, message + 1);
    }
}

fn consume(memory: &ModelMemory, head: Offset, flaw: Flaw) {
    for message in 0..MESSAGES {
        let slot = SLOTS[message as usize % 2];
        while tail(memory, slot, flaw) == message {
            memory.pause();
        }
        match flaw {
            Flaw::FlushAfterFence => {
                memory.mfence();
                memory.invalidate(slot, LINE);
            }
            Flaw::FlushBeforeTail => {}
            _ => {
                memory.invalidate(slot, LINE);
                memory.fence_invalidations();
            }
        }
        let seen = [load(memory, slot), load(memory, slot.word(1))];
        assert_eq!(seen, [message * 3 + 1, message * 5 + 2], "message {message}");
        if flaw == Flaw::WritesIntoSlot {
            publish(memory, slot.word(7), 1);
        }
        publish(memory, head, message + 1);
    }
}

fn tail(memory: &ModelMemory, slot: Offset, flaw: Flaw) -> u64 {
    match flaw {
        Flaw::FlushAfterFence => {
            memory.mfence();
            memory.invalidate(TAIL, LINE);
            load(memory, TAIL)
        }
        Flaw::FlushBeforeTail => {
            memory.invalidate(slot, LINE);
            fresh(memory, TAIL)
        }
        _ => fresh(memory, TAIL),
    }
}

// Messages of one line.

const LAST: Offset = Offset(56);

/// A line that is rewritten: the reader takes it when its two ends agree, by sequence or by checksum.
fn message(seed: u64, checksum: bool) -> Outcome {
    let seal = move |words: [u64; 7]| {
        if !checksum {
            return words[0];
        }
        words
            .iter()
            .fold(0, |sum: u64, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
    };
    let mut world = World::new(seed, Shape { bytes: 64, ..Shape::default() });
    let last = Rc::new(Cell::new(0));
    let read = Rc::clone(&last);
    world.spawn(0, 0, move |memory| {
        for sequence in 1..=4 {
            let words = [sequence; 7];
            for (index, word) in (0..).zip(words) {
                memory.store(Offset(0).word(index), word);
            }
            memory.store(LAST, seal(words));
            memory.write_back(Offset(0), LINE);
            memory.sfence();
        }
    });
    world.spawn(1, 0, move |memory| {
        while read.get() < 4 {
            memory.invalidate(Offset(0), LINE);
            memory.fence_invalidations();
            let mut words = [0; 7];
            for (index, word) in (0..).zip(&mut words) {
                *word = load(&memory, Offset(0).word(index));
            }
            if load(&memory, LAST) == seal(words) {
                assert_eq!(words, [words[0]; 7], "a torn message was taken");
                read.set(words[0]);
            }
            memory.pause();
        }
    });
    world.run()
}

// Locks between hosts.

const ROUNDS: u64 = 2;

type Critical = Rc<Cell<u64>>;
type Enter = fn(&ModelMemory, u16) -> Offset;

/// Hosts that enter by `enter` and leave by clearing their own line must never be inside together.
fn lock(seed: u64, enter: Enter) -> Outcome {
    let hosts = 2 + (seed % 3) as u16;
    let mut world = World::new(seed, Shape { hosts, bytes: 64 * 8, ..Shape::default() });
    let inside: Critical = Rc::default();
    for host in 0..hosts {
        let inside = Rc::clone(&inside);
        world.spawn(host, 0, move |memory| {
            for _ in 0..ROUNDS {
                let mine = enter(&memory, hosts);
                assert_eq!(inside.replace(1), 0, "two hosts are inside");
                memory.yield_now();
                inside.set(0);
                publish(&memory, mine, 0);
            }
        });
    }
    world.run()
}

/// Atomic among the processes of this host: its cache decides, and no other host is asked.
fn cas_lock(memory: &ModelMemory, _hosts: u16) -> Offset {
    loop {
        let taken = memory.local_cas(LocalWord(0), 0, 1).is_ok();
        if taken && fresh(memory, Offset(0)) == 0 {
            announce(memory, Offset(0), 1);
            memory.local_store(LocalWord(0), 0);
            return Offset(0);
        }
        if taken {
            memory.local_store(LocalWord(0), 0);
        }
        memory.pause();
    }
}

const fn number(host: u16) -> Offset {
    Offset(host as u64 * 2 * LINE)
}

const fn choosing(host: u16) -> Offset {
    Offset((host as u64 * 2 + 1) * LINE)
}

fn bakery(memory: &ModelMemory, hosts: u16) -> Offset {
    draw_ticket(memory, hosts, announce)
}

fn hasty_bakery(memory: &ModelMemory, hosts: u16) -> Offset {
    draw_ticket(memory, hosts, |memory, at, value| {
        memory.store(at, value);
        memory.write_back(at, LINE);
    })
}

fn draw_ticket(memory: &ModelMemory, hosts: u16, show: fn(&ModelMemory, Offset, u64)) -> Offset {
    let me = memory.host();
    announce(memory, choosing(me), 1);
    let ticket = 1 + (0..hosts).map(|host| fresh(memory, number(host))).max().unwrap_or(0);
    show(memory, number(me), ticket);
    announce(memory, choosing(me), 0);
    await_turn(memory, hosts, ticket)
}

fn await_turn(memory: &ModelMemory, hosts: u16, ticket: u64) -> Offset {
    let me = memory.host();
    for other in (0..hosts).filter(|other| *other != me) {
        while fresh(memory, choosing(other)) != 0 {
            memory.pause();
        }
        loop {
            let theirs = fresh(memory, number(other));
            if theirs == 0 || (theirs, other) > (ticket, me) {
                break;
            }
            memory.pause();
        }
    }
    number(me)
}

// Claims of one name.

type Claim = fn(&ModelMemory, u16) -> bool;

/// Hosts that all want one name: exactly one gets it.
fn claims(seed: u64, claim: Claim) -> Outcome {
    let hosts = 2 + (seed % 3) as u16;
    let mut world = World::new(seed, Shape { hosts, bytes: 64 * 4, ..Shape::default() });
    let winners: Rc<RefCell<Vec<u16>>> = Rc::default();
    for host in 0..hosts {
        let winners = Rc::clone(&winners);
        world.spawn(host, 0, move |memory| {
            if claim(&memory, hosts) {
                winners.borrow_mut().push(host);
            }
        });
    }
    world.run()?;
    assert_eq!(winners.borrow().len(), 1, "the name went to {:?}", winners.borrow());
    Ok(())
}

/// One slot for all: looks free, is set, and is looked at again.
fn check_then_set(memory: &ModelMemory, _hosts: u16) -> bool {
    let mine = u64::from(memory.host()) + 1;
    if fresh(memory, Offset(0)) != 0 {
        return false;
    }
    announce(memory, Offset(0), mine);
    fresh(memory, Offset(0)) == mine
}

const CLAIMED: u64 = 1;
const LIVE: u64 = 2;

/// A claim on one's own line, and a scan of the others': a lower claim wins, a higher one is waited for.
fn announce_and_scan(memory: &ModelMemory, hosts: u16, waits: bool) -> bool {
    let me = memory.host();
    let line = |host: u16| Offset(u64::from(host) * LINE);
    'look: loop {
        announce(memory, line(me), CLAIMED);
        for other in (0..hosts).filter(|other| *other != me) {
            loop {
                match fresh(memory, line(other)) {
                    LIVE => {
                        publish(memory, line(me), 0);
                        return false;
                    }
                    CLAIMED if other < me => {
                        publish(memory, line(me), 0);
                        memory.pause();
                        continue 'look;
                    }
                    CLAIMED if waits => memory.pause(),
                    _ => break,
                }
            }
        }
        publish(memory, line(me), LIVE);
        return true;
    }
}

// Reuse of an extent.

/// The owner's entry and the extent behind it; the opener's announcement.
const ENTRY: Offset = Offset(0);
const EXTENT: Offset = Offset(64);
const OPENED: Offset = Offset(128);

/// Host 0 destroys an object and uses its extent for the next one, while host 1 opens what there is: whoever has a
/// generation open reads its bytes.
fn reuse(seed: u64, scans: bool) -> Outcome {
    let mut world = World::new(seed, Shape { bytes: 256, ..Shape::default() });
    world.setup(|memory| {
        memory.store(ENTRY, 1);
        memory.store(EXTENT, 100);
    });
    world.spawn(0, 0, move |memory| {
        for generation in 2..5 {
            announce(&memory, ENTRY, 0);
            while scans && fresh(&memory, OPENED) != 0 {
                memory.pause();
            }
            publish(&memory, EXTENT, generation * 100);
            publish(&memory, ENTRY, generation);
        }
    });
    world.spawn(1, 0, |memory| {
        for _ in 0..5 {
            let generation = fresh(&memory, ENTRY);
            if generation != 0 {
                announce(&memory, OPENED, generation);
                if fresh(&memory, ENTRY) == generation {
                    let bytes = fresh(&memory, EXTENT);
                    assert_eq!(bytes, generation * 100, "the extent of an open object was used again");
                }
                publish(&memory, OPENED, 0);
            }
        }
    });
    world.run()
}

// Repair.

const RECORD: [Offset; 2] = [Offset(0), Offset(64)];

/// A process of host 0 dies while it changes a record of two lines from 1 to 2; a process of host `repairer` makes it 3,
/// and 3 it stays.
fn repair(seed: u64, repairer: u16) -> Outcome {
    let mut world = World::new(seed, Shape { bytes: 256, ..Shape::default() });
    let victim: ThreadId = world.spawn(0, 1, |memory| {
        for line in RECORD {
            memory.store(line, 1);
        }
        for line in RECORD {
            publish(&memory, line, 2);
        }
        while fresh(&memory, Offset(128)) == 0 {
            memory.pause();
        }
    });
    world.crash_within(victim, Crash::Process, 9);
    world.spawn_after_crash(victim, repairer, 2, |memory| {
        for line in RECORD {
            fresh(&memory, line);
            announce(&memory, line, 3);
        }
    });
    world.check(1, |memory| {
        assert_eq!(RECORD.map(|line| load(&memory, line)), [3; 2], "the repair was undone")
    });
    world.run()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Change, Explorer, Harmless, judge};

    #[test]
    fn every_canary_fails_and_is_caught_in_time() {
        for Canary { wrong, within, .. } in canaries() {
            for first_seed in [0, 1 << 20, 2 << 20] {
                let report =
                    Explorer::new(wrong.name, within).first_seed(first_seed).run(|seed| wrong.run(seed));
                println!("{:<28} caught by schedule {} of {within}", wrong.name, report.schedules);
                let _ = report.expect_failure();
            }
        }
    }

    #[test]
    fn their_right_twins_never_fail() {
        let mut done = Vec::new();
        for Canary { right, .. } in canaries() {
            if !done.contains(&right.name) {
                right.explore(10_000).expect_none();
                done.push(right.name);
            }
        }
    }

    const HARMLESS: &[Harmless] = &[
        Harmless {
            file: "canaries.rs",
            snippet: "whoever looks too early looks again",
            change: Change::Drop,
        },
        Harmless {
            file: "canaries.rs",
            snippet: "whoever looks too early looks again",
            change: Change::Weaken,
        },
        Harmless {
            file: "canaries.rs",
            snippet: "nothing that follows may not be seen before",
            change: Change::Drop,
        },
    ];

    #[test]
    fn every_mutant_of_the_ring_is_caught_or_argued_harmless() {
        let suite = Suite::new("ring", "", |seed| ring(seed, Flaw::None)).harmless(HARMLESS);
        let found = suite.mutants(&Explorer::new("ring", 3000).listed(1000)).unwrap();
        let survived: Vec<u64> =
            found.iter().filter(|m| m.caught_at.is_none()).map(|m| m.schedules).collect();
        assert_eq!(survived, vec![1000; HARMLESS.len()]);
        assert!(found.len() > HARMLESS.len());
    }

    #[test]
    fn a_survivor_that_is_not_listed_and_an_entry_that_is_stale_are_complaints() {
        let mutants = Explorer::new("ring", 300).mutants(|seed| ring(seed, Flaw::None));
        assert!(judge(&mutants, &HARMLESS[1..]).unwrap_err().contains("add a test that fails, or argue"));
        let caught =
            Harmless { file: "canaries.rs", snippet: "memory.write_back(slot", change: Change::Drop };
        let complaint = judge(&mutants, &[HARMLESS, &[caught]].concat()).unwrap_err();
        assert!(complaint.contains("listed as harmless, and is not"), "{complaint}");
        let gone = Harmless { file: "canaries.rs", snippet: "a line that went away", change: Change::Drop };
        let complaint = judge(&mutants, &[HARMLESS, &[gone]].concat()).unwrap_err();
        assert!(complaint.contains("names 0 survivors"), "{complaint}");
    }
}
