//! A hostile peer of an endpoint, driven by bytes: whatever it says on its ring, the victim's operations end with what was sent
//! or an error.
//!
//! What it can do to the ring itself is in [`crate::ring::hostile`]; here every message is whole, and its kind, its tag and its
//! bytes are almost right.

use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Heap, Memory, Offset, ProcessSlot};

use super::inlet::{Alive, link};
use super::place::{create_ring, encode_sender, ring_name};
use super::wire::{OFFSET_BITS, bytes_of};
use super::{CompleteWhen, Completion, Endpoint, EndpointOptions, Filter, Label};
use crate::format::Geometry;
use crate::ring::{Producer, RingShape};
use crate::script::Script;
use crate::testing::formatted;
use crate::{Member, Pool, PoolError};

const GEOMETRY: Geometry =
    Geometry { hosts: 2, processes: 1, names: 31, levels: 3, chunk_bytes: 4096, opens: 16, keepers: 1 };
const BYTES: u64 = 64 << 10;
/// Bytes of a buffer that the victim lends.
const ROOM: usize = 200;

type Victim = Endpoint<Heap, Vec<u8>, u64>;

fn options() -> EndpointOptions {
    let ring = RingShape::new(2, 64).expect("a shape in range");
    EndpointOptions {
        ring,
        small_ring: ring,
        first_blocks: 1,
        short_talk: 2,
        send_buffers: 1,
        memory_bytes: u64::MAX,
        idle: Duration::from_secs(1),
        eager_bytes: 48,
        window_bytes: 256,
        in_place_bytes: 50,
        timeout: Duration::ZERO,
        calls_a_look: 4,
        calls_a_search: 8,
        rings_bells: false,
    }
}

/// A send buffer of the peer: the slot and generation of its object, and where it lies.
struct SendBuffer {
    entry: (u32, u64),
    place: Offset,
}

/// Runs the script `bytes`.
///
/// # Panics
/// When the victim does, or returns a buffer that it was not lent.
pub fn drive(bytes: &[u8]) {
    let heap = formatted(&GEOMETRY, BYTES);
    let attach = |host: u16, memory| {
        Arc::new(Pool::attach(memory, Member::new(host, 1)).expect("nobody is there yet"))
    };
    let pools = [attach(0, heap.clone()), attach(1, heap.process(1, ProcessSlot(0)))];
    let mut victim = Victim::open(Arc::clone(&pools[0]), options()).expect("a port is free");
    let mut peer = Victim::open(Arc::clone(&pools[1]), options()).expect("a port is free");
    let number = victim.connect(peer.address());
    let name = ring_name(0, peer.address(), victim.address());
    let (ring, _) = create_ring(&pools[1], &name, options().ring).expect("there is room");
    let map = victim.stock.map();
    let (to, credits) = (victim.address(), map.credits(1, 0));
    let (_, place) = peer.stock.take_block(&pools[1], &options(), to, credits).expect("there is room");
    let producer =
        Producer::new(pools[1].memory().clone(), options().small_ring, place, link(&pools[1], 0, None));
    let news = map.news_byte(1, 0);
    let entry =
        peer.stock.make_buffers(&pools[1], &options()).expect("there is room").expect("there are some");
    let (_, place) = peer.stock.take_buffer(&options()).expect("one is free");
    let buffer = SendBuffer { entry, place };
    victim.progress().expect("the peer has said nothing yet");
    pools[1].memory().store(map.sender_word(1, 0), encode_sender(peer.address().generation));
    let mut script = Script(bytes);
    converse(&mut victim, number, &mut producer.with_summary(news, 0), &buffer, &mut script);
    pools[1].close(ring);
}

fn converse(
    victim: &mut Victim,
    peer: u32,
    hostile: &mut Producer<Heap, Alive>,
    buffer: &SendBuffer,
    script: &mut Script<'_>,
) {
    let (mut lent, mut context) = (0, 0);
    while !script.0.is_empty() {
        context += 1;
        match script.byte() % 8 {
            0..3 => say(hostile, buffer, script),
            3 => {
                let from = script.byte().is_multiple_of(2).then_some(peer);
                let filter = Filter { from, kind: script.byte() % 2, tag: 0, ignore: script.near(u64::MAX) };
                victim.receive(filter, vec![0; ROOM], context);
                lent += 1;
            }
            4 => {
                let data = script.byte().is_multiple_of(2).then_some(7);
                let label = Label { kind: 1, tag: script.word(), data };
                let until = [CompleteWhen::Out, CompleteWhen::LongReceived, CompleteWhen::Received]
                    [usize::from(script.byte() % 3)];
                victim.send_until(until, peer, label, vec![1; ROOM], context).expect("the peer is known");
                lent += 1;
            }
            5 => lent -= usize::from(victim.cancel(|one| *one == context / 2).is_some()),
            _ => match victim.progress() {
                Ok(()) | Err(PoolError::Evicted { .. }) => {}
                Err(error) => panic!("not an error of a hostile peer: {error}"),
            },
        }
        while let Some(done) = victim.completion() {
            let (Completion::Sent { buffer, .. }
            | Completion::Received { buffer, .. }
            | Completion::Failed { buffer, .. }) = done
            else {
                // Nothing was injected: it is an answer to a peer whose conversation has ended.
                continue;
            };
            lent -= 1;
            assert_eq!(buffer.len(), ROOM, "a buffer of somebody else");
        }
    }
    assert!(lent < 1 << 20, "more came back than was lent");
}

/// Says something that is almost what an endpoint says.
fn say(hostile: &mut Producer<Heap, Alive>, buffer: &SendBuffer, script: &mut Script<'_>) {
    let what = u64::from(script.byte() % 15);
    let label = u64::from(script.byte() & 0x81) << 7 | u64::from(script.byte() % 4) << 16;
    let (number, part) = (script.near(0), u64::from(script.byte() % 4));
    let label = if what < 8 { label } else { 0 };
    let tag = if what == 4 || what == 8 { number << OFFSET_BITS | script.near(part * 64) } else { number };
    let words = match what {
        6 => bytes_of(script.near(ROOM as u64) << (64 - OFFSET_BITS) | number, script.near(BYTES / 2)),
        8 => bytes_of(script.near(buffer.place.0), script.near(part) << 32 | script.near(64)),
        14 => bytes_of(script.near(buffer.entry.0.into()), script.near(buffer.entry.1)),
        _ => bytes_of(script.near(0), script.near(ROOM as u64)),
    };
    let other = [3; 64];
    let bytes = match script.byte() % 8 {
        0..4 => &words[..],
        _ => &other[..usize::from(script.byte() % 65)],
    };
    // A ring that is full or has ended takes no more.
    drop(hostile.try_push(what | label, tag, bytes));
}
