//! Protocols that are known to be wrong, and their right twins, on raw operations.
//!
//! A model that does not fail a canary cannot be believed when it passes a protocol.

use super::{ModelMemory, Outcome, Shape, World, explore, mutants};
use crate::{LINE, Memory, Offset};

/// Schedules that a right twin must survive.
const RIGHT: u64 = 10_000;

/// What one ring gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// The payload stays in the producer's cache.
    NoWriteBack,
    /// The tail may become visible before the payload.
    NoFenceBeforeTail,
    /// Both ends write one line.
    SharedLine,
    /// The consumer marks the producer's slot as read.
    WritesIntoSlot,
}

const TAIL: Offset = Offset(0);
const HEAD: Offset = Offset(64);
const SLOTS: [Offset; 2] = [Offset(128), Offset(192)];
const MESSAGES: u64 = 6;

fn fresh(memory: &ModelMemory, at: Offset) -> u64 {
    memory.invalidate(at, LINE);
    memory.fence_invalidations();
    memory.load(at).unwrap()
}

fn publish(memory: &ModelMemory, at: Offset, value: u64) {
    memory.store(at, value);
    memory.write_back(at, LINE);
    memory.sfence();
}

fn produce(memory: &ModelMemory, flaw: Flaw) {
    let head = if flaw == Flaw::SharedLine { TAIL.word(1) } else { HEAD };
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

fn consume(memory: &ModelMemory, flaw: Flaw) {
    let head = if flaw == Flaw::SharedLine { TAIL.word(1) } else { HEAD };
    for message in 0..MESSAGES {
        while fresh(memory, TAIL) == message {
            memory.pause();
        }
        let slot = SLOTS[message as usize % 2];
        memory.invalidate(slot, LINE);
        memory.fence_invalidations();
        let seen = [memory.load(slot).unwrap(), memory.load(slot.word(1)).unwrap()];
        assert_eq!(seen, [message * 3 + 1, message * 5 + 2], "message {message}");
        if flaw == Flaw::WritesIntoSlot {
            publish(memory, slot.word(7), 1);
        }
        publish(memory, head, message + 1);
    }
}

fn ring(flaw: Flaw) -> impl Fn(u64) -> Outcome + Sync {
    move |seed| {
        let mut world = World::new(seed, Shape { bytes: 256, ..Shape::default() });
        world.spawn(0, 0, move |memory| produce(&memory, flaw));
        world.spawn(1, 0, move |memory| consume(&memory, flaw));
        world.run()
    }
}

#[test]
fn a_right_ring_never_fails() {
    explore("ring", RIGHT, 0, ring(Flaw::None)).expect_none();
}

#[test]
fn a_ring_that_leaves_its_payload_in_the_cache_is_caught() {
    let failure = explore("ring", 1000, 0, ring(Flaw::NoWriteBack)).expect_failure().clone();
    assert!(failure.trace.contains("canaries.rs"), "{failure}");
}

#[test]
fn a_ring_without_a_fence_before_its_tail_is_caught() {
    let _ = explore("ring", 1000, 0, ring(Flaw::NoFenceBeforeTail)).expect_failure();
}

#[test]
fn a_ring_with_head_and_tail_on_one_line_is_caught() {
    let _ = explore("ring", 2000, 0, ring(Flaw::SharedLine)).expect_failure();
}

#[test]
fn a_consumer_that_writes_into_the_producers_slot_line_is_caught() {
    let _ = explore("ring", 50_000, 0, ring(Flaw::WritesIntoSlot)).expect_failure();
}

#[test]
fn the_mutants_of_the_right_ring_are_listed() {
    for mutant in mutants("ring", 20_000, ring(Flaw::None)) {
        println!("{mutant}");
    }
}
