//! Rings between threads that play two hosts in ordinary memory, beside a queue as their oracle.

use std::collections::VecDeque;
use std::time::Duration;

use polder_mem::{Bell, Heap, HeapShape, Liveness, Memory, Nanos, Offset, ProcessSlot};
use polder_pool::ring::{
    Consumer, Envelope, Producer, RingLink, RingPlace, RingShape, write_back_for_the_dead,
};
use polder_pool::wait::Patience;
use polder_pool::{Peer, PoolError};

const CREDITS: Offset = Offset(0);
const LINES: Offset = Offset(4096);
const QUICK: Patience = Patience { spins: 20, yields: 20, nap: Duration::from_millis(1) };

type Alive = Box<dyn Fn() -> Result<(), PoolError> + Send>;

/// A region for `hosts` hosts of one process; the handles of hosts 0, 1, ….
fn hosts(hosts: u16) -> Vec<Heap> {
    let shape = HeapShape { bytes: 1 << 20, hosts, processes: 1, local_words: 1, bells: hosts.into() };
    let first = Heap::new(shape);
    let mut all = vec![first.clone()];
    all.extend((1..hosts).map(|host| first.process(host, ProcessSlot(0))));
    all
}

/// What a process of `host` knows of a process of host `peer`.
fn link(memory: &Heap, host: u16, peer: u16) -> RingLink<Alive> {
    let watcher = memory.clone();
    let alive = move || match watcher.liveness(peer, ProcessSlot(0)) {
        Liveness::Dead => {
            Err(PoolError::PeerDead { peer: Peer::new(peer, 7), what: "", epoch: 3, sequence: 0 })
        }
        _ => Ok(()),
    };
    let (bell, wakes) = (Bell(host.into()), Some(Bell(peer.into())));
    RingLink { peer: Peer::new(peer, 7), epoch: 3, bell, wakes, patience: QUICK, alive: Box::new(alive) }
}

fn place(generation: u32) -> RingPlace {
    RingPlace { lines: LINES, credits: CREDITS, generation }
}

type Ends = (Producer<Heap, Alive>, Consumer<Heap, Alive>);

fn shape(cells: u32, slots: u32, cell_bytes: u32) -> RingShape {
    RingShape::new(cells, cell_bytes).unwrap().with_slots(slots).unwrap()
}

fn ring(slots: u32, cell_bytes: u32) -> Ends {
    ring_of(shape(slots, slots, cell_bytes))
}

/// Both ends of a ring from host 0 to host 1.
fn ring_of(shape: RingShape) -> Ends {
    let memories = hosts(2);
    (sender(&memories, shape, 1), receiver(&memories, shape, 1))
}

fn sender(memories: &[Heap], shape: RingShape, generation: u32) -> Producer<Heap, Alive> {
    Producer::new(memories[0].clone(), shape, place(generation), link(&memories[0], 0, 1))
}

fn receiver(memories: &[Heap], shape: RingShape, generation: u32) -> Consumer<Heap, Alive> {
    Consumer::new(memories[1].clone(), shape, place(generation), link(&memories[1], 1, 0))
}

fn message(number: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (number.wrapping_mul(151) + at.wrapping_mul(7) + 1) as u8).collect()
}

fn soon(memory: &Heap) -> Nanos {
    memory.now() + Duration::from_secs(20)
}

fn at_once(memory: &Heap) -> Nanos {
    memory.now() + Duration::from_millis(5)
}

/// Splitmix64: seeded, and printed by the tests that use it.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % below
    }
}

#[test]
fn every_form_arrives_whole_and_in_order_through_one_two_and_three_slots() {
    for slots in 1..=3 {
        let (mut producer, mut consumer) = ring(slots, 128);
        let mut into = Vec::new();
        for (number, bytes) in [0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 256, 1000, 5].into_iter().enumerate()
        {
            let sent = message(number as u64, bytes);
            let envelope = Envelope {
                kind: number as u64,
                tag: 0xffff_ffff_ffff_0000 + number as u64,
                bytes: bytes as u64,
            };
            let popped = loop {
                let pushed = producer.try_push(envelope.kind, envelope.tag, &sent).unwrap();
                match consumer.try_pop_into(&mut into).unwrap() {
                    Some(popped) if pushed => break popped,
                    popped => assert_eq!((popped, pushed), (None, false), "{bytes} bytes in {slots} slots"),
                }
            };
            assert_eq!((popped, &into), (envelope, &sent), "{bytes} bytes in {slots} slots");
        }
    }
}

#[test]
fn a_ring_behaves_like_a_queue_of_as_many_messages_as_it_has_slots() {
    for seed in 0..200 {
        let mut dice = Dice(seed);
        let slots = 1 + dice.roll(5);
        let (mut producer, mut consumer) = ring(slots as u32, 64);
        let (mut queue, mut into) = (VecDeque::new(), Vec::new());
        for number in 0..300 {
            if dice.roll(2) == 0 {
                let sent = message(number, dice.roll(65) as usize);
                let pushed = producer.try_push(1, number, &sent).unwrap();
                assert!(pushed || !queue.is_empty(), "no room in an empty ring, seed {seed}");
                assert!(!pushed || queue.len() < slots as usize, "seed {seed}");
                queue.extend(pushed.then_some((number, sent)));
            } else {
                let ahead = consumer.peek().unwrap();
                let popped = consumer.try_pop_into(&mut into).unwrap();
                assert_eq!(ahead, popped, "seed {seed}");
                let popped = popped.map(|envelope| (envelope.tag, into.clone()));
                assert_eq!(popped, queue.pop_front(), "seed {seed}");
            }
        }
    }
}

#[test]
fn two_threads_exchange_messages_of_all_sizes_through_few_slots() {
    for (cells, slots, cell_bytes) in
        [(1, 1, 64), (2, 2, 64), (3, 3, 128), (1, 3, 64), (2, 16, 64), (8, 64, 256)]
    {
        let (mut producer, mut consumer) = ring_of(shape(cells, slots, cell_bytes));
        let memory = &hosts(1).remove(0);
        let size = |number: u64| (Dice(number).roll(6) * Dice(number ^ 99).roll(200)) as usize;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..3000 {
                    producer.push(2, number, &message(number, size(number)), soon(memory)).unwrap();
                }
            });
            for number in 0..3000 {
                let (envelope, bytes) = consumer.pop(soon(memory)).unwrap();
                assert_eq!((envelope.tag, bytes), (number, message(number, size(number))));
            }
        });
    }
}

#[test]
fn a_message_is_received_into_a_slice_and_stays_when_the_slice_is_too_short() {
    let (mut producer, mut consumer) = ring(4, 64);
    let sent = message(1, 200);
    assert!(producer.try_push(1, 2, &sent).unwrap());
    assert_eq!(consumer.peek().unwrap().unwrap().bytes, 200);
    assert!(matches!(consumer.pop_slice(&mut [0; 199], Nanos(0)), Err(PoolError::Argument { .. })));
    let mut into = [9; 201];
    assert_eq!(consumer.pop_slice(&mut into, Nanos(0)).unwrap().bytes, 200);
    assert_eq!((&into[..200], into[200]), (&sent[..], 9));
}

#[test]
fn a_full_ring_times_out_without_damage_and_goes_on_when_there_is_room() {
    let memories = hosts(2);
    let shape = RingShape::new(2, 64).unwrap();
    let (mut producer, mut consumer) = (sender(&memories, shape, 1), receiver(&memories, shape, 1));
    assert!(producer.try_push(1, 0, b"a").unwrap() && producer.try_push(1, 1, b"b").unwrap());
    let late = producer.push(1, 2, b"c", at_once(&memories[0])).unwrap_err();
    assert!(matches!(late, PoolError::Timeout { sequence: 3, epoch: 3, .. }), "{late}");
    assert_eq!(consumer.pop(soon(&memories[1])).unwrap().1, b"a");
    producer.push(1, 2, b"c", soon(&memories[0])).unwrap();
    assert_eq!(consumer.pop(soon(&memories[1])).unwrap().1, b"b");
    assert_eq!(consumer.pop(soon(&memories[1])).unwrap().1, b"c");
    let late = consumer.pop(at_once(&memories[1])).unwrap_err();
    assert!(matches!(late, PoolError::Timeout { sequence: 4, .. }), "{late}");
}

#[test]
fn short_messages_need_no_cell_and_long_ones_wait_for_one() {
    let (mut producer, mut consumer) = ring_of(shape(1, 4, 64));
    let mut into = Vec::new();
    assert!(producer.try_push(1, 0, &[7; 17]).unwrap());
    assert!(!producer.try_push(1, 1, &[8; 17]).unwrap(), "the only cell is taken");
    assert!(producer.try_push(1, 1, b"short").unwrap() && producer.try_push(1, 2, b"").unwrap());
    assert_eq!(consumer.try_pop_into(&mut into).unwrap().unwrap().tag, 0);
    assert!(producer.try_push(1, 3, &[9; 64]).unwrap());
    assert!(producer.try_push(1, 4, b"fourth").unwrap() && !producer.try_push(1, 5, b"fifth").unwrap());
    for (tag, bytes) in [(1, 5), (2, 0), (3, 64), (4, 6)] {
        let envelope = consumer.try_pop_into(&mut into).unwrap().unwrap();
        assert_eq!((envelope.tag, envelope.bytes, into.len()), (tag, bytes, bytes as usize));
    }
}

#[test]
fn a_shape_out_of_range_names_the_parameter() {
    for (shape, what) in [
        (RingShape::new(0, 64), "ring cells"),
        (RingShape::new(1, 0), "ring cell bytes"),
        (RingShape::new(4, 64).and_then(|shape| shape.with_slots(3)), "ring slots"),
    ] {
        assert!(
            matches!(shape, Err(PoolError::Geometry { what: named, .. }) if named == what),
            "{what}: {shape:?}"
        );
    }
    let uneven = RingShape::new(1, 100).unwrap_err().to_string();
    assert_eq!(uneven, "ring cell bytes is 100; give a multiple of 64");
    let default = RingShape::default();
    assert_eq!((default.cells(), default.slots(), default.cell_bytes()), (8, 64, 65536));
    assert_eq!((default.producer_bytes(), default.consumer_bytes()), (8 * 65536 + 64 * 128, 128));
}

#[test]
fn an_idle_consumer_returns_credits_that_make_no_batch() {
    let (mut producer, mut consumer) = ring(16, 64);
    let mut into = Vec::new();
    for number in 0..16 {
        assert!(producer.try_push(1, number, b"x").unwrap());
    }
    consumer.try_pop_into(&mut into).unwrap();
    assert!(!producer.try_push(1, 16, b"x").unwrap(), "one credit is no batch of four");
    consumer.return_credits();
    assert!(producer.try_push(1, 16, b"x").unwrap());
    while consumer.try_pop_into(&mut into).unwrap().is_some() {}
    for _ in 0..8 {
        assert_eq!(consumer.try_pop_into(&mut into).unwrap(), None);
    }
    for number in 0..16 {
        assert!(producer.try_push(1, number, b"x").unwrap(), "credit {number}");
    }
}

#[test]
fn the_survivor_reads_an_exact_prefix_and_then_the_name_of_the_dead() {
    let mut memories = hosts(2);
    let shape = RingShape::new(4, 64).unwrap();
    let (mut producer, mut consumer) = (sender(&memories, shape, 1), receiver(&memories, shape, 1));
    assert!(producer.try_push(1, 0, b"whole").unwrap());
    assert!(!producer.try_push(1, 1, &message(1, 1000)).unwrap(), "only parts of it fit");
    let deadline = soon(&memories[1]);
    drop((producer, memories.remove(0)));
    assert_eq!(write_back_for_the_dead(&memories[0], shape, &place(1)), Ok(4));
    assert_eq!(consumer.pop(deadline).unwrap().1, b"whole");
    let dead = consumer.pop(deadline).unwrap_err();
    let peer = Peer::new(0, 7);
    assert_eq!(dead, PoolError::PeerDead { peer, what: "message slot", epoch: 3, sequence: 5 });
    let broken = PoolError::Broken { what: "ring", cause: Box::new(dead) };
    assert_eq!(consumer.pop(deadline).unwrap_err(), broken);
    assert_eq!(consumer.try_pop_into(&mut Vec::new()).unwrap_err(), broken);
}

#[test]
fn a_producer_learns_that_the_consumer_died_when_there_is_no_room() {
    let mut memories = hosts(2);
    let shape = RingShape::new(1, 64).unwrap();
    let (mut producer, consumer) = (sender(&memories, shape, 1), receiver(&memories, shape, 1));
    let deadline = soon(&memories[0]);
    drop((consumer, memories.remove(1)));
    producer.push(1, 0, b"fits", deadline).unwrap();
    let dead = producer.push(1, 1, b"does not", deadline).unwrap_err();
    assert!(matches!(dead, PoolError::PeerDead { sequence: 2, epoch: 3, .. }), "{dead}");
    assert!(matches!(producer.try_push(1, 1, b"x"), Err(PoolError::Broken { .. })));
}

#[test]
fn a_timeout_within_a_streamed_message_ends_the_ring_of_its_producer() {
    let memories = hosts(2);
    let shape = RingShape::new(2, 64).unwrap();
    let (mut producer, _consumer) = (sender(&memories, shape, 1), receiver(&memories, shape, 1));
    let late = producer.push(1, 0, &[1; 500], at_once(&memories[0])).unwrap_err();
    assert!(matches!(late, PoolError::Timeout { .. }), "{late}");
    assert!(matches!(producer.try_push(1, 0, b"x"), Err(PoolError::Broken { .. })));
}

#[test]
fn a_restarted_producer_waits_for_the_consumer_and_what_came_before_is_not_seen_again() {
    let memories = hosts(2);
    let shape = RingShape::new(2, 64).unwrap();
    let (mut producer, mut consumer) = (sender(&memories, shape, 1), receiver(&memories, shape, 1));
    assert!(producer.try_push(1, 0, b"old").unwrap() && producer.try_push(1, 1, b"older").unwrap());
    let mut restarted = sender(&memories, shape, 2);
    assert!(!restarted.try_push(1, 2, b"new").unwrap(), "the old messages are still to be read");
    assert_eq!(consumer.pop(soon(&memories[1])).unwrap().1, b"old");
    let mut renewed = receiver(&memories, shape, 2);
    assert_eq!(renewed.try_pop_into(&mut Vec::new()).unwrap(), None);
    assert!(restarted.try_push(1, 2, b"new").unwrap());
    assert_eq!(renewed.pop(soon(&memories[1])).unwrap().1, b"new");
    let gone = producer.try_push(1, 3, b"late").unwrap_err();
    assert!(matches!(gone, PoolError::PeerDead { sequence: 3, .. }), "{gone}");
}

#[test]
fn a_header_that_stays_torn_names_its_producer_at_the_deadline_and_counts_once_it_is_whole() {
    let memories = hosts(2);
    let shape = RingShape::new(2, 64).unwrap();
    let (mut producer, mut consumer) = (sender(&memories, shape, 1), receiver(&memories, shape, 1));
    assert!(producer.try_push(1, 0, b"x").unwrap());
    let whole = memories[0].load(LINES.word(3)).unwrap();
    memories[0].store(LINES.word(3), !whole);
    assert_eq!(consumer.try_pop_into(&mut Vec::new()).unwrap(), None);
    let torn = consumer.pop(at_once(&memories[1])).unwrap_err();
    assert!(
        torn.to_string().contains("half-written or damaged header of message slot 1 in epoch 3"),
        "{torn}"
    );
    memories[0].store(LINES.word(3), whole);
    assert_eq!(consumer.pop(at_once(&memories[1])).unwrap().1, b"x");
}

#[test]
fn credits_that_were_never_sent_are_corrupt() {
    let memories = hosts(2);
    let shape = RingShape::new(1, 64).unwrap();
    let mut producer = sender(&memories, shape, 1);
    polder_pool::line::publish(&memories[1], CREDITS, &[1, 1, 0, 0, 0, 0, 0]);
    let jump = producer.try_push(1, 0, b"x").unwrap_err();
    assert_eq!(jump, PoolError::Corrupt { offset: CREDITS, what: "ring credit" });
    let mut producer = sender(&memories, shape, 1);
    memories[1].store(CREDITS, 0);
    let torn = producer.push(1, 0, b"x", at_once(&memories[0])).unwrap_err();
    assert!(torn.to_string().contains("half-written or damaged credit line for slot 1 in epoch 3"), "{torn}");
}

#[test]
fn a_message_longer_than_the_consumer_takes_is_corrupt() {
    let (mut producer, consumer) = ring(4, 64);
    let mut consumer = consumer.with_longest(199);
    assert!(producer.try_push(1, 0, &[7; 200]).unwrap());
    let long = consumer.try_pop_into(&mut Vec::new()).unwrap_err();
    assert_eq!(long, PoolError::Corrupt { offset: LINES, what: "ring message length" });
}

#[test]
fn a_hostile_peer_causes_errors_and_never_a_panic() {
    for seed in 0..20_000 {
        let mut dice = Dice(seed);
        let script: Vec<u8> = (0..dice.roll(400)).map(|_| dice.roll(256) as u8).collect();
        let run = std::panic::catch_unwind(|| polder_pool::ring::hostile::drive(&script));
        assert!(run.is_ok(), "seed {seed}");
    }
}
