//! A hostile peer at each end of a ring, driven by bytes: whatever it writes, the victim gets messages or errors.
//!
//! Of two rings the peer owns the producer's extent of the one and the consumer's line of the other. A
//! script of bytes says what it stores there, down to single words, and what the victims do between.

use std::time::Duration;

use polder_mem::{Bell, Heap, HeapShape, LINE, Memory, Offset, ProcessSlot};

use super::header::{Form, Header, WORDS};
use super::{Consumer, INLINE, PAIR, Producer, RingLink, RingPlace, RingShape};
use crate::script::Script;
use crate::wait::Patience;
use crate::{Peer, PoolError, line};

const LONGEST: u64 = 700;
/// The hostile consumer's credit line; then the victim's.
const CREDITS: [Offset; 2] = [Offset(0), Offset(64)];
/// The victim's producer extent; then the hostile one.
const LINES: [Offset; 2] = [Offset(1024), Offset(2560)];

const PATIENCE: Patience = Patience { spins: 1, yields: 0, nap: Duration::ZERO };

type Alive = fn() -> Result<(), PoolError>;

/// Runs the script `bytes`.
///
/// # Panics
/// When a victim returns what no ring may return, or writes a line of the peer's.
pub fn drive(bytes: &[u8]) {
    let mut script = Script(bytes);
    let (cells, more) = (1 + u32::from(script.byte() % 3), u32::from(script.byte() % 3));
    let shape = RingShape::new(cells, 64 * (1 + u32::from(script.byte() % 3)))
        .and_then(|shape| shape.with_slots(cells + more))
        .expect("a shape in range");
    let heap = Heap::new(HeapShape { bytes: 4096, hosts: 2, processes: 1, local_words: 0, bells: 2 });
    let peer = heap.process(1, ProcessSlot(0));
    let mut victim = Victim::new(&heap, shape, 1);
    while !script.0.is_empty() {
        match script.byte() % 9 {
            0 => store_word(&peer, shape, &mut script),
            1 | 2 => store_header(&peer, shape, &mut victim, &mut script),
            3 => store_credit(&peer, &victim, &mut script),
            op => {
                let before = theirs(&peer, shape);
                if victim.act(op, &mut script) {
                    victim = Victim::new(&heap, shape, victim.generation + 1);
                }
                assert_eq!(theirs(&peer, shape), before, "a victim wrote in the peer's lines");
            }
        }
    }
}

/// The ends that must bear it.
struct Victim {
    generation: u32,
    memory: Heap,
    producer: Producer<Heap, Alive>,
    consumer: Consumer<Heap, Alive>,
    into: Vec<u8>,
}

impl Victim {
    fn new(memory: &Heap, shape: RingShape, generation: u32) -> Self {
        let link = || {
            let (peer, patience, alive) = (Peer::new(1, 0), PATIENCE, (|| Ok(())) as Alive);
            RingLink { peer, epoch: 1, bell: Bell(0), wakes: Some(Bell(1)), patience, alive }
        };
        let place = |ring: usize| RingPlace { lines: LINES[ring], credits: CREDITS[ring], generation };
        let consumer = Consumer::new(memory.clone(), shape, place(1), link());
        let consumer = consumer.with_longest(LONGEST);
        Self {
            generation,
            memory: memory.clone(),
            producer: Producer::new(memory.clone(), shape, place(0), link()),
            consumer,
            into: Vec::new(),
        }
    }

    /// Does one thing; whether a ring has ended.
    fn act(&mut self, op: u8, script: &mut Script<'_>) -> bool {
        let now = self.memory.now();
        let outcome = match op {
            4 => {
                let popped = self.consumer.try_pop_into(&mut self.into);
                popped.map(|popped| popped.map(|envelope| envelope.bytes))
            }
            5 => self.consumer.pop_into(&mut self.into, now).map(|envelope| Some(envelope.bytes)),
            6 => self.consumer.peek().map(|_| None),
            7 => {
                self.into.resize(script.byte().into(), 0);
                let popped = self.consumer.pop_slice(&mut self.into, now);
                popped.map(|envelope| Some(envelope.bytes.max(self.into.len() as u64)))
            }
            _ => {
                let message = vec![7; usize::from(script.byte()) * 4];
                self.producer.push(1, 2, &message, now).map(|()| None)
            }
        };
        match outcome {
            Ok(None) => false,
            Ok(Some(bytes)) => {
                assert!(self.into.len() as u64 == bytes && bytes <= LONGEST, "{bytes} bytes were received");
                false
            }
            Err(PoolError::Argument { .. }) => false,
            Err(PoolError::Timeout { .. }) => op == 8,
            Err(PoolError::Corrupt { .. } | PoolError::PeerDead { .. } | PoolError::Broken { .. }) => true,
            Err(error) => panic!("not an error of a hostile peer: {error}"),
        }
    }
}

/// Any word of the lines that the peer owns.
fn store_word(peer: &Heap, shape: RingShape, script: &mut Script<'_>) {
    let words = WORDS as u64 + shape.producer_bytes() / 8;
    let index = u64::from(script.byte()) % words;
    let at = if index < WORDS as u64 { CREDITS[0].word(index) } else { LINES[1].word(index - WORDS as u64) };
    peer.store(at, script.word());
}

/// A header whose checksum is right and whose fields are almost so.
fn store_header(peer: &Heap, shape: RingShape, victim: &mut Victim, script: &mut Script<'_>) {
    let expected = victim.consumer.sequence();
    let about = match victim.consumer.come() {
        Some(come) => come,
        None => script.byte().into(),
    };
    let header = Header {
        sequence: script.near(expected),
        generation: script.near(victim.generation.into()) as u32,
        kind: 1,
        tag: 2,
        form: Form::ALL[usize::from(script.byte()) % Form::ALL.len()],
        bytes: script.near(INLINE as u64) as u32,
        about: script.near(about).into(),
    };
    let at = LINES[1] + (expected - 1) % shape.slots() * PAIR;
    header.store(peer, at);
}

/// A credit line whose checksum is right and whose words are almost so.
fn store_credit(peer: &Heap, victim: &Victim, script: &mut Script<'_>) {
    let slots = script.near(victim.producer.sequence() - 1);
    let some = u64::from(script.byte());
    let cells = script.near(slots.min(some));
    line::publish(peer, CREDITS[0], &[slots, script.near(victim.generation.into()), cells, 0, 0, 0, 0]);
}

/// Everything in the lines that only the peer may write.
fn theirs(peer: &Heap, shape: RingShape) -> (Vec<u8>, [u8; LINE as usize]) {
    let (mut lines, mut credits) = (vec![0; shape.producer_bytes() as usize], [0; LINE as usize]);
    peer.copy_out(LINES[1], &mut lines)
        .and_then(|()| peer.copy_out(CREDITS[0], &mut credits))
        .expect("ordinary memory");
    (lines, credits)
}
