//! Rules 2 and 3 on memory that its device keeps coherent: a host publishes payloads and then their sequence, and may die alone at any
//! operation. Lines that were dirty in its caches are lost, or fail. A reader that sees a sequence must get the payload, whole.

use std::cell::Cell;
use std::rc::Rc;

use polder_mem::model::{Crash, ModelMemory, Outcome, Shape, Suite, World};
use polder_mem::{Coherence, Fault, LocalWord, Memory, Offset};

use crate::line;

pub(super) fn suites() -> Vec<Suite> {
    let about = "on hdm-db, a host that dies alone has written a payload back before its sequence is seen";
    vec![Suite::new("publish-hdm-db", about, |seed| publish(seed, line::publish))]
}

/// Protocols that are known to be wrong, where it is right on coherent memory.
pub(super) fn canaries() -> Vec<Suite> {
    let about = "on hdm-db, stores alone, which are enough under one kernel";
    let store = |memory: &ModelMemory, at: Offset, words: &line::Words| {
        line::store(memory, at, words);
        memory.sfence();
    };
    vec![Suite::new("publish-hdm-db-stores-alone", about, move |seed| publish(seed, store))]
}

const MESSAGES: u64 = 4;
const SEQUENCE: Offset = Offset(0);

fn payload(message: u64) -> Offset {
    SEQUENCE.lines(message)
}

fn publish(seed: u64, publish: fn(&ModelMemory, Offset, &line::Words)) -> Outcome {
    let bytes = payload(MESSAGES + 1).0;
    let shape = Shape { bytes, local_words: 1, coherence: Coherence::HdmDb, ..Shape::default() };
    let mut world = World::new(seed, shape);
    if seed.is_multiple_of(4) {
        world.poison_lost_lines();
    }
    let over = Rc::new(Cell::new(false));
    let writer = world.spawn(0, 0, move |memory| {
        for message in 1..=MESSAGES {
            publish(&memory, payload(message), &[message; line::WORDS]);
            publish(&memory, SEQUENCE, &[message; line::WORDS]);
        }
    });
    let victim = if seed.is_multiple_of(2) { world.spawn(0, 2, bystander) } else { writer };
    world.crash(victim, Crash::Host);
    let ended = Rc::clone(&over);
    world.spawn_after(writer, 1, 1, move |_| ended.set(true));
    world.spawn(1, 0, move |memory| {
        // One look after the end, at what is left.
        while !over.get() && look(&memory).is_ok() {
            memory.pause();
        }
        let _ = look(&memory);
    });
    world.run()
}

/// A process that the host dies with, at any step of the others: also while they wait in a fence.
pub(super) fn bystander(memory: ModelMemory) {
    (0..1 << 11).for_each(|_| _ = memory.local_load(LocalWord(0)));
}

/// Reads the sequence, and the payload that it announces.
fn look(memory: &ModelMemory) -> Result<(), Fault> {
    let Some([message, ..]) = line::read(memory, SEQUENCE)? else { return Ok(()) };
    if message > 0 {
        let words = line::read(memory, payload(message))?;
        assert_eq!(words, Some([message; line::WORDS]), "the payload of sequence {message}");
    }
    Ok(())
}
