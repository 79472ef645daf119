//! Endpoints between threads that are processes of two hosts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_mem::{Heap, HeapShape, ProcessSlot};
use polder_pool::endpoint::{
    self, Address, Arrival, CompleteWhen, Completion, Endpoint, EndpointOptions, Filter, Label,
};
use polder_pool::format::{Geometry, Layout, Overwrite, Uuid, format};
use polder_pool::local::LocalLayout;
use polder_pool::ring::RingShape;
use polder_pool::testing::formatted;
use polder_pool::{Member, Pool, PoolError, inspect};

const BYTES: u64 = 16 << 20;

type End = Endpoint<Heap, Vec<u8>, u64>;

fn options() -> EndpointOptions {
    let ring = RingShape::new(4, 1024).unwrap();
    EndpointOptions {
        ring,
        eager_bytes: 512,
        window_bytes: 4096,
        first_blocks: 1,
        ..EndpointOptions::default()
    }
}

/// Pools of two processes on each of two hosts.
fn pools() -> Vec<Arc<Pool<Heap>>> {
    pools_of(BYTES)
}

fn geometry(bytes: u64) -> Geometry {
    Geometry { hosts: 2, processes: 2, ..Geometry::for_region(bytes) }
}

fn pools_of(bytes: u64) -> Vec<Arc<Pool<Heap>>> {
    pools_in(bytes, Uuid(1), |host| Member::new(host, 1))
}

fn pools_in(bytes: u64, uuid: Uuid, member: impl Fn(u16) -> Member) -> Vec<Arc<Pool<Heap>>> {
    let geometry = geometry(bytes);
    let layout = Layout::new(&geometry, bytes).unwrap();
    let local_words = LocalLayout::new(&layout).words();
    let heap = Heap::new(HeapShape { bytes, hosts: 2, processes: 2, local_words, bells: 4 });
    format(&heap, &geometry, uuid, Overwrite::Refuse).unwrap();
    let places = [(0, 0), (1, 0), (0, 1), (1, 1)];
    let attach = |(host, slot)| {
        let memory =
            if (host, slot) == (0, 0) { heap.clone() } else { heap.process(host, ProcessSlot(slot)) };
        Arc::new(Pool::attach(memory, member(host)).unwrap())
    };
    places.map(attach).into()
}

fn open(pool: &Arc<Pool<Heap>>) -> End {
    Endpoint::open(Arc::clone(pool), options()).unwrap()
}

fn ends(pools: &[Arc<Pool<Heap>>]) -> [End; 2] {
    [open(&pools[0]), open(&pools[1])]
}

/// Two endpoints, and what the second is to the first.
fn pair(pools: &[Arc<Pool<Heap>>], options: EndpointOptions) -> ([End; 2], u32) {
    let mut ends = [0, 1].map(|index: usize| Endpoint::open(Arc::clone(&pools[index]), options).unwrap());
    let to = ends[1].address();
    let peer = ends[0].connect(to);
    (ends, peer)
}

fn label(tag: u64) -> Label {
    Label { kind: 1, tag, data: None }
}

fn exactly(from: Option<u32>, tag: u64) -> Filter {
    Filter { from, kind: 1, tag, ignore: 0 }
}

fn bytes(count: usize, salt: u8) -> Vec<u8> {
    (0..count).map(|index| (index as u8).wrapping_mul(31).wrapping_add(salt)).collect()
}

/// Goes on until it completes something alone.
fn next_of(end: &mut End) -> Completion<Vec<u8>, u64> {
    loop {
        end.progress().unwrap();
        if let Some(done) = end.completion() {
            return done;
        }
    }
}

/// Goes on until the one at `index` completes something.
fn next(ends: &mut [End; 2], index: usize) -> Completion<Vec<u8>, u64> {
    for _ in 0..1 << 20 {
        ends.iter_mut().for_each(|end| end.progress().unwrap());
        if let Some(done) = ends[index].completion() {
            return done;
        }
    }
    panic!("nothing completes");
}

fn received(done: Completion<Vec<u8>, u64>) -> (Vec<u8>, u64, Arrival) {
    match done {
        Completion::Received { buffer, context, arrival } => (buffer, context, arrival),
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_of_every_size_arrive_whole_and_in_order() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    let sizes = [0, 1, 8, 16, 17, 512, 513, 1024, 1025, 100_000];
    for (number, &size) in (0..).zip(&sizes) {
        ends[0].send(peer, label(7), bytes(size, number as u8), number).unwrap();
    }
    for (number, &size) in (0..).zip(&sizes) {
        ends[1].receive(exactly(None, 7), vec![0; size + 1], number);
        let (buffer, context, arrival) = received(next(&mut ends, 1));
        assert_eq!((context, arrival.bytes, arrival.label), (number, size as u64, label(7)));
        assert_eq!(&buffer[..size], bytes(size, number as u8), "message of {size} bytes");
    }
    for _ in &sizes {
        assert!(matches!(next(&mut ends, 0), Completion::Sent { .. }));
    }
}

#[test]
fn a_receive_takes_what_its_tag_mask_and_sender_say() {
    let pools = pools();
    let mut ends = ends(&pools);
    let addresses = [ends[0].address(), ends[1].address()];
    let there = ends[0].connect(addresses[1]);
    let here = ends[1].connect(addresses[0]);
    for tag in [0x11, 0x12, 0x21] {
        ends[0].inject(there, label(tag), &bytes(4, tag as u8)).unwrap();
    }
    ends[0].inject(there, Label { kind: 2, tag: 0x33, data: Some(99) }, b"with data").unwrap();
    ends[1].receive(Filter { ignore: 0xf0, ..exactly(Some(here), 0x01) }, vec![0; 4], 1);
    ends[1].receive(Filter { ignore: 0xf0, ..exactly(None, 0x01) }, vec![0; 4], 2);
    ends[1].receive(exactly(Some(here), 0x12), vec![0; 2], 3);
    ends[1].receive(Filter { from: None, kind: 2, tag: 0, ignore: u64::MAX }, vec![0; 20], 4);
    let mut got: Vec<_> = (0..4).map(|_| received(next(&mut ends, 1))).collect();
    got.sort_by_key(|(_, context, _)| *context);
    let tags: Vec<u64> = got.iter().map(|(_, _, arrival)| arrival.label.tag).collect();
    assert_eq!(tags, [0x11, 0x21, 0x12, 0x33]);
    assert_eq!((got[2].0.len(), got[2].2.bytes), (2, 4), "a message that is longer than its buffer is cut");
    assert_eq!((got[3].2.label.data, &got[3].0[..9]), (Some(99), &b"with data"[..]));
}

#[test]
fn a_message_that_nobody_receives_stands_in_no_other_ones_way() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    for number in 0..100 {
        ends[0].send(peer, label(1), bytes(500, 1), number).unwrap();
        ends[0].send(peer, label(2), bytes(5000, 2), 1000 + number).unwrap();
    }
    ends[0].send(peer, label(3), bytes(2000, 3), 5000).unwrap();
    ends[1].receive(exactly(None, 3), vec![0; 2000], 0);
    assert_eq!(received(next(&mut ends, 1)).0, bytes(2000, 3));
    let filter = exactly(None, 2);
    assert_eq!(ends[1].peek(filter).map(|arrival| arrival.bytes), Some(5000));
    for number in 0..100 {
        for (tag, size) in [(1, 500), (2, 5000)] {
            ends[1].receive(exactly(None, tag), vec![0; size], number);
            assert_eq!(received(next(&mut ends, 1)).0, bytes(size, tag as u8));
        }
    }
}

#[test]
fn an_endpoint_sends_to_itself_and_to_others_of_its_host() {
    let pools = pools();
    let mut ends: [End; 2] = [open(&pools[0]), open(&pools[2])];
    let addresses = [ends[0].address(), ends[1].address()];
    assert_eq!(addresses.map(|address| (address.host, address.port)), [(0, 0), (0, 1)]);
    for to in addresses {
        let peer = ends[0].connect(to);
        ends[0].send(peer, label(5), bytes(3000, 5), 1).unwrap();
    }
    for index in [0, 1] {
        ends[index].receive(exactly(None, 5), vec![0; 3000], 2);
    }
    let mut own: Vec<_> = (0..3).map(|_| next(&mut ends, 0)).collect();
    own.retain(|done| matches!(done, Completion::Received { .. }));
    assert_eq!(received(own.remove(0)).0, bytes(3000, 5));
    assert_eq!(received(next(&mut ends, 1)).0, bytes(3000, 5));
}

#[test]
fn what_was_sent_before_its_sender_left_is_received() {
    let pools = pools();
    let [mut first, mut second] = ends(&pools);
    let peer = first.connect(second.address());
    first.inject(peer, label(1), b"last words").unwrap();
    let closing = std::thread::spawn(move || first.close());
    second.receive(exactly(None, 1), vec![0; 10], 1);
    let done = next_of(&mut second);
    assert_eq!(received(done).0, b"last words");
    closing.join().unwrap().unwrap();
    drop(second);
    assert_eq!(pools[0].list("").unwrap(), []);
}

#[test]
fn a_first_message_is_out_before_its_receiver_has_come_for_it() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    ends[0].send(peer, label(1), bytes(10, 1), 1).unwrap();
    assert!(matches!(ends[0].completion(), Some(Completion::Sent { context: 1, .. })));
    ends[1].receive(exactly(None, 1), vec![0; 10], 2);
    assert_eq!(received(next(&mut ends, 1)).0, bytes(10, 1));
}

#[test]
fn a_send_that_is_complete_when_it_is_received_is_not_so_before() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    let sends = [
        (0, CompleteWhen::Received),
        (8, CompleteWhen::Received),
        (600, CompleteWhen::LongReceived),
        (9000, CompleteWhen::Received),
    ];
    for (number, (size, until)) in (0..).zip(sends) {
        ends[0].send_until(until, peer, label(1), bytes(size, 3), number).unwrap();
        for _ in 0..200 {
            ends.iter_mut().for_each(|end| end.progress().unwrap());
        }
        assert!(ends[0].completion().is_none(), "{size} bytes");
        ends[1].receive(exactly(None, 1), vec![0; 8000], number);
        let (buffer, _, arrival) = received(next(&mut ends, 1));
        assert_eq!(
            (arrival.bytes, &buffer[..size.min(8000)]),
            (size as u64, &bytes(size, 3)[..size.min(8000)])
        );
        assert!(matches!(next(&mut ends, 0), Completion::Sent { context, .. } if context == number));
    }
    ends[0].send_until(CompleteWhen::LongReceived, peer, label(1), bytes(100, 3), 9).unwrap();
    assert!(matches!(ends[0].completion(), Some(Completion::Sent { context: 9, .. })), "it is eager");
    ends[0].send_until(CompleteWhen::Received, peer, label(1), bytes(100, 3), 10).unwrap();
    let [mut first, second] = ends;
    drop(second);
    let done = next_of(&mut first);
    let is_told = matches!(done, Completion::Failed { context: 10, error: PoolError::PeerDead { .. }, .. });
    assert!(is_told, "{done:?}");
}

#[test]
fn an_address_of_another_job_or_pool_is_refused_by_that_word() {
    let here = pools();
    let others = [
        pools_in(BYTES, Uuid(1), |host| Member { job: 7, ..Member::new(host, 1) }),
        // Its uuid is another.
        pools_in(BYTES, Uuid(2), |host| Member::new(host, 1)),
    ];
    let mut first = open(&here[0]);
    let ours = open(&here[1]).address();
    for other in others {
        let address = open(&other[1]).address();
        assert_eq!(Address::decode(address.encode()), Some(address));
        assert_ne!(address, ours);
        let peer = first.connect(address);
        first.send(peer, label(1), bytes(8, 0), 1).unwrap();
        let done = next_of(&mut first);
        let Completion::Failed { context: 1, error, .. } = done else { panic!("{done:?}") };
        assert_eq!(error, PoolError::OtherJob { job: 0 });
        assert!(error.to_string().contains("is of another job or in another pool than job 0"), "{error}");
    }
}

#[test]
fn a_send_that_is_complete_when_it_is_matched_is_not_so_before() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    for size in [0, 8, 600, 9000] {
        ends[0].send_until(CompleteWhen::Matched, peer, label(1), bytes(size, 1), 1).unwrap();
        for _ in 0..1000 {
            ends.iter_mut().for_each(|end| end.progress().unwrap());
        }
        assert!(ends[0].completion().is_none(), "{size} bytes are complete, and nobody receives them");
        ends[1].receive(exactly(None, 1), vec![0; size], 2);
        assert!(matches!(next(&mut ends, 0), Completion::Sent { context: 1, .. }));
        assert_eq!(received(next(&mut ends, 1)).0, bytes(size, 1));
    }
}

/// Takes all that is free, in pieces that leave no room for a ring; returns their names.
fn fill(pool: &Pool<Heap>) -> Vec<String> {
    let mut taken = vec![];
    for size in [1 << 20, 4096, 256] {
        while let Ok(object) = pool.create(&format!("/taken/{}", taken.len()), size) {
            taken.push(object.name().to_owned());
            pool.close(object);
        }
    }
    taken
}

/// Takes what room there is for objects of this size.
fn fill_with(pool: &Pool<Heap>, size: u64, what: &str) -> Vec<String> {
    let made = (0..).map_while(|number| {
        let object = pool.create(&format!("/{what}/{number}"), size).ok()?;
        let name = object.name().to_owned();
        pool.close(object);
        Some(name)
    });
    made.collect()
}

/// Opens another endpoint, and takes the only block for it that lies in the object of this one.
fn take_first_block(pools: &[Arc<Pool<Heap>>], end: &mut End) -> End {
    let other = open(&pools[2]);
    let peer = end.connect(other.address());
    end.inject(peer, label(9), b"first").unwrap();
    other
}

#[test]
fn a_copy_is_refused_when_the_pool_has_no_room_for_a_ring_and_the_next_goes_out_when_it_has() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    let _other = take_first_block(&pools, &mut ends[0]);
    let taken = fill(&pools[0]);
    let refused = ends[0].inject(peer, label(1), b"refused");
    assert!(matches!(refused, Err(PoolError::Full { .. })), "{refused:?}");
    assert!(ends[0].completion().is_none(), "the call said it");
    taken.iter().for_each(|name| pools[0].destroy(name).unwrap());
    ends[0].inject(peer, label(1), b"sent").unwrap();
    ends[1].receive(exactly(None, 1), vec![0; 4], 3);
    assert_eq!(received(next(&mut ends, 1)).0, b"sent");
}

#[test]
fn rings_take_no_more_chunks_than_were_reckoned() {
    for bytes in [5 << 20, 9 << 20, 24 << 20, 256 << 20] {
        let (pools, geometry) = (pools_of(bytes), geometry(bytes));
        let chunks = u64::from(Layout::new(&geometry, bytes).unwrap().chunks());
        let reckoned =
            (0..).take_while(|&rings| endpoint::chunks(&geometry, 1, rings) <= chunks).last().unwrap();
        let _end = End::open(Arc::clone(&pools[0]), EndpointOptions::default()).unwrap();
        let ring = 3 * 128 + RingShape::default().producer_bytes();
        let make = |number: &u64| {
            let ring = pools[0].create(&format!("/ring/{number}"), ring);
            ring.map(|ring| pools[0].close(ring)).is_ok()
        };
        let made = (0..).take_while(make).count() as u64;
        // What was reckoned for small rings has room for as many others.
        let others = 1 + (reckoned.next_power_of_two() * 2048).div_ceil(ring);
        let found = reckoned..=reckoned + others;
        assert!(found.contains(&made), "{bytes}: {made} rings, {reckoned} reckoned");
    }
}

#[test]
fn an_answer_that_finds_no_room_for_its_ring_is_told_as_lost() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    let _other = take_first_block(&pools, &mut ends[1]);
    ends[0].send_until(CompleteWhen::Received, peer, label(1), vec![], 1).unwrap();
    fill(&pools[1]);
    ends[1].receive(exactly(None, 1), vec![], 2);
    assert!(matches!(next(&mut ends, 1), Completion::Received { context: 2, .. }));
    let lost = next(&mut ends, 1);
    assert!(matches!(lost, Completion::Lost { error: PoolError::Full { .. } }), "{lost:?}");
}

#[test]
fn a_send_fails_when_the_pool_has_no_room_for_a_ring_and_the_next_goes_out_when_it_has() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    let _other = take_first_block(&pools, &mut ends[0]);
    let taken = fill(&pools[0]);
    ends[0].send(peer, label(1), bytes(10, 1), 1).unwrap();
    let failed = ends[0].completion();
    assert!(
        matches!(failed, Some(Completion::Failed { context: 1, error: PoolError::Full { .. }, .. })),
        "{failed:?}"
    );
    for name in taken {
        pools[0].destroy(&name).unwrap();
    }
    ends[0].send(peer, label(1), bytes(10, 2), 2).unwrap();
    ends[1].receive(exactly(None, 1), vec![0; 10], 3);
    assert_eq!(received(next(&mut ends, 1)).0, bytes(10, 2));
}

#[test]
fn whoever_stays_hears_a_sender_at_the_place_of_one_that_has_left_and_is_told_of_that() {
    let pools = pools();
    let mut ends = ends(&pools);
    let to = ends[1].address();
    let before = ends[0].address();
    let peer = ends[0].connect(to);
    ends[0].inject(peer, label(1), &bytes(10, 1)).unwrap();
    ends[1].receive(exactly(None, 1), vec![0; 10], 1);
    assert_eq!(received(next(&mut ends, 1)).0, bytes(10, 1));
    let left = ends[1].connect(before);
    ends[1].receive(exactly(Some(left), 1), vec![0; 10], 2);
    let [first, second] = ends;
    drop(first);
    let again = open(&pools[0]);
    assert_eq!(again.address().port, before.port);
    let mut ends = [again, second];
    let peer = ends[0].connect(to);
    ends[0].inject(peer, label(2), &bytes(10, 2)).unwrap();
    ends[1].receive(exactly(None, 2), vec![0; 10], 3);
    assert_eq!(received(next(&mut ends, 1)).0, bytes(10, 2));
    let failed = next(&mut ends, 1);
    assert!(
        matches!(failed, Completion::Failed { context: 2, error: PoolError::PeerDead { .. }, .. }),
        "{failed:?}"
    );
}

#[test]
fn whoever_stays_talks_to_more_that_come_and_go_at_one_place_than_their_name_has_room_for() {
    let pools = pools();
    let mut stays = open(&pools[1]);
    for round in 0..u64::from(pools[0].layout().geometry().levels) * 2 {
        let comes = open(&pools[0]);
        let (here, there) = (stays.address(), comes.address());
        let mut ends = [comes, stays];
        let peers = [ends[0].connect(here), ends[1].connect(there)];
        for (index, peer) in peers.into_iter().enumerate() {
            ends[index].inject(peer, label(round), &bytes(10, 1)).unwrap();
        }
        for index in 0..2 {
            ends[index].receive(exactly(None, round), vec![0; 10], round);
            assert_eq!(received(next(&mut ends, index)).0, bytes(10, 1));
        }
        [_, stays] = ends;
    }
}

#[test]
fn whoever_calls_seldom_learns_of_a_peer_that_is_gone_as_soon() {
    let pools = pools();
    let [mut first, second] = ends(&pools);
    let peer = first.connect(second.address());
    first.receive(exactly(Some(peer), 1), vec![0; 10], 1);
    drop(second);
    let start = Instant::now();
    while first.completion().is_none() {
        assert!(start.elapsed() < Duration::from_secs(5), "nothing fails");
        first.progress().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn operations_with_a_peer_that_is_gone_fail_and_name_it() {
    let pools = pools();
    let [mut first, second] = ends(&pools);
    let peer = first.connect(second.address());
    first.receive(exactly(Some(peer), 1), vec![0; 10], 1);
    drop(second);
    first.send(peer, label(1), bytes(10, 1), 2).unwrap();
    let failed: Vec<_> = std::iter::from_fn(|| first.completion()).collect();
    assert_eq!(failed.len(), 2);
    for done in failed {
        let Completion::Failed { error: PoolError::PeerDead { peer, .. }, .. } = done else {
            panic!("{done:?}")
        };
        assert_eq!(peer.host, 1);
    }
}

#[test]
fn a_copy_that_was_injected_for_a_peer_that_is_gone_is_told_as_lost() {
    let pools = pools();
    let [mut first, second] = ends(&pools);
    let peer = first.connect(second.address());
    drop(second);
    first.inject(peer, label(1), b"to nobody").unwrap();
    let done = first.completion();
    assert!(matches!(done, Some(Completion::Lost { error: PoolError::PeerDead { .. } })), "{done:?}");
}

#[test]
fn what_is_received_first_comes_before_what_was_posted_earlier() {
    let pools = pools();
    let (mut ends, peer) = pair(&pools, options());
    ends[1].receive(exactly(None, 1), vec![0; 10], 1);
    ends[1].receive_first(exactly(None, 1), vec![0; 10], 2);
    for context in [2, 1] {
        ends[0].inject(peer, label(1), b"in turn").unwrap();
        assert_eq!(received(next(&mut ends, 1)).1, context);
    }
}

#[test]
fn a_receive_that_nothing_matched_is_taken_back_and_ports_are_given_again() {
    let pools = pools();
    let [mut first, second] = ends(&pools);
    first.receive(exactly(None, 1), vec![0; 10], 1);
    assert!(first.cancel(|context| *context == 2).is_none());
    assert_eq!(first.cancel(|context| *context == 1).map(|(buffer, _)| buffer.len()), Some(10));
    let before = second.address();
    drop(second);
    let again: End = open(&pools[1]);
    assert_eq!((again.address().port, before.port), (0, 0));
    assert_ne!(again.address(), before);
    assert_eq!(Address::decode(before.encode()), Some(before));
    assert_eq!(Address::decode([0; 16]), None);
    let more: End = open(&pools[1]);
    assert_eq!(more.address().port, 1);
    let full = Endpoint::<Heap, Vec<u8>, u64>::open(Arc::clone(&pools[3]), options()).err();
    assert!(matches!(full, Some(PoolError::NoSlot { host: 1, slots: 2 })), "{full:?}");
}

#[test]
fn a_hostile_peer_causes_errors_and_never_a_panic() {
    for seed in 0..2_000_u64 {
        let mut state = seed;
        let mut byte = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 56) as u8
        };
        let script: Vec<u8> = (0..400).map(|_| byte()).collect();
        let run = std::panic::catch_unwind(|| polder_pool::endpoint::hostile::drive(&script));
        assert!(run.is_ok(), "seed {seed}");
    }
}

/// Endpoints of `hosts` hosts, `each` on a host, in a pool of `bytes`.
fn job(hosts: u16, each: u16, bytes: u64, options: EndpointOptions) -> (Heap, Vec<End>) {
    // Each process holds all endpoints open, with their blocks and send buffers.
    let geometry = Geometry { hosts, processes: each, opens: 1024, ..Geometry::for_region(bytes) };
    let heap = formatted(&geometry, bytes);
    let ends = (0..hosts).flat_map(|host| {
        let memory = if host == 0 { heap.clone() } else { heap.process(host, ProcessSlot(0)) };
        let pool = Arc::new(Pool::attach(memory, Member::new(host, 1)).unwrap());
        (0..each).map(move |_| Endpoint::open(Arc::clone(&pool), options).unwrap())
    });
    let ends = ends.collect();
    (heap, ends)
}

/// Sends a message from each endpoint to each other, and holds every byte against what was sent.
fn exchange(ends: &mut [End], size: usize) {
    let all = ends.len();
    let addresses: Vec<_> = ends.iter().map(Endpoint::address).collect();
    let salt = |from: usize, to: usize| (from * 7 + to * 3) as u8;
    let mut peers = vec![];
    for (rank, end) in ends.iter_mut().enumerate() {
        let numbers: Vec<_> = addresses.iter().map(|&address| end.connect(address)).collect();
        for other in (0..all).filter(|&other| other != rank) {
            let filter = exactly(Some(numbers[other]), size as u64);
            end.receive(filter, vec![0; size], other as u64);
            end.send(numbers[other], label(size as u64), bytes(size, salt(rank, other)), 0).unwrap();
        }
        peers.push(numbers);
    }
    let (mut left, mut rounds) = (2 * all * (all - 1), 0);
    while left > 0 {
        rounds += 1;
        assert!(rounds < 1 << 20, "{left} operations never end");
        for (rank, end) in ends.iter_mut().enumerate() {
            end.progress().unwrap();
            while let Some(done) = end.completion() {
                left -= 1;
                match done {
                    Completion::Sent { .. } => {}
                    Completion::Received { buffer, context, arrival } => {
                        assert_eq!(arrival.from, peers[rank][context as usize]);
                        assert!(buffer == bytes(size, salt(context as usize, rank)), "{context} to {rank}");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "64 endpoints take too long")]
fn sixty_four_endpoints_exchange_short_and_long_messages_in_4_kib_a_pair() {
    let (ranks, pairs) = (64, 64 * 63 / 2);
    let ring = RingShape::new(8, 4096).unwrap();
    let options = EndpointOptions { ring, memory_bytes: 0, ..EndpointOptions::default() };
    let (heap, mut ends) = job(4, 16, 64 << 20, options);
    let taken = || inspect(&heap).unwrap().stat.object_bytes;
    let before = taken();
    exchange(&mut ends, 64);
    let short = taken();
    assert!((short - before) / pairs <= 4096, "{} bytes a pair", (short - before) / pairs);
    let own: u64 = ends.iter().map(Endpoint::pool_bytes).sum();
    assert_eq!(own, short, "what endpoints say that they have is what the pool holds");
    // Parts go through the send buffers, of which there are fewer than peers, and no pair gets more than it has.
    exchange(&mut ends, 10_000);
    let buffers = 256 + 4 * 4096;
    assert_eq!(taken(), short + ranks * buffers);
    assert!(short / ranks < 256 << 10, "{} bytes a rank", short / ranks);
}

#[test]
#[cfg_attr(miri, ignore = "16 endpoints of the usual options take too long")]
fn pairs_that_talk_much_leave_room_for_the_small_rings_that_others_make_later() {
    let (hosts, each) = (4, 4);
    let fits = |size: u64| {
        let geometry = Geometry { hosts, processes: each, ..Geometry::for_region(size) };
        let needed = u64::from(hosts) * endpoint::least_chunks(&geometry, each.into(), u64::from(each) * 15);
        needed <= Layout::new(&geometry, size).unwrap().chunks().into()
    };
    let least = (22..30).map(|power| 1 << power).find(|&size| fits(size)).unwrap();
    for (pool_bytes, gets_one) in [(least, false), (64 << 20, true)] {
        let (_heap, mut ends) = job(hosts, each, pool_bytes, EndpointOptions::default());
        let addresses: Vec<_> = ends.iter().map(Endpoint::address).collect();
        let before = ends[0].pool_bytes();
        for (rank, end) in ends.iter_mut().enumerate() {
            end.expect_endpoints(addresses.len() as u64);
            let peer = end.connect(addresses[(rank + 1) % 16]);
            for number in 0..40 {
                end.send(peer, label(1), bytes(8, 1), number).unwrap();
                end.receive(exactly(None, 1), vec![0; 8], number);
            }
        }
        for _ in 0..1000 {
            ends.iter_mut().for_each(|end| end.progress().unwrap());
        }
        while ends.iter_mut().any(|end| end.completion().is_some()) {}
        assert_eq!(
            ends[0].pool_bytes() > before + 10_000,
            gets_one,
            "a ring of its own in {pool_bytes} bytes"
        );
        exchange(&mut ends, 64);
        exchange(&mut ends, 10_000);
    }
}

#[test]
fn long_messages_go_out_without_any_send_buffer() {
    let options = EndpointOptions { memory_bytes: 0, send_buffers: 0, ..options() };
    let (_heap, mut ends) = job(2, 2, 16 << 20, options);
    exchange(&mut ends, 10_000);
}

#[test]
fn a_pair_that_talks_much_gets_a_ring_of_its_own_and_others_keep_to_their_budget() {
    let ring = 3 * 128 + options().ring.producer_bytes();
    let fixed = {
        let (_heap, ends) = job(2, 2, 16 << 20, options());
        ends[0].pool_bytes()
    };
    // Room for one ring of a pair beside the blocks for all peers.
    let options = EndpointOptions { memory_bytes: fixed + 10_000 + ring, first_blocks: 4, ..options() };
    let (_heap, mut ends) = job(2, 2, 16 << 20, options);
    let before = ends[0].pool_bytes();
    let peer = ends[1].address();
    let peer = ends[0].connect(peer);
    for number in 0..40 {
        ends[0].send(peer, label(1), bytes(8, 1), number).unwrap();
        ends[1].receive(exactly(None, 1), vec![0; 8], number);
        for _ in 0..100 {
            ends.iter_mut().for_each(|end| end.progress().unwrap());
        }
    }
    assert_eq!(ends[0].pool_bytes(), before + ring, "one ring of a pair");
    while ends.iter_mut().any(|end| end.completion().is_some()) {}
    exchange(&mut ends, 3000);
    assert!(ends[0].pool_bytes() < before + 2 * ring, "no second one, but send buffers");
}

#[test]
fn sends_that_count_on_being_buffered_end_without_a_receive_where_there_is_no_room_for_rings_of_pairs() {
    let options = EndpointOptions {
        memory_bytes: 0,
        send_buffers: 0,
        eager_bytes: 10_000,
        window_bytes: 64 << 10,
        ..options()
    };
    let (_heap, mut ends) = job(2, 2, 16 << 20, options);
    let addresses: Vec<_> = ends.iter().map(Endpoint::address).collect();
    let ring: Vec<_> = (0..4).map(|rank| ends[rank].connect(addresses[(rank + 1) % 4])).collect();
    for (rank, end) in ends.iter_mut().enumerate() {
        end.send(ring[rank], label(1), bytes(10_000, rank as u8), 0).unwrap();
        end.send(ring[rank], label(2), bytes(8, rank as u8), 1).unwrap();
    }
    let mut sent = 0;
    for _ in 0..1 << 16 {
        for end in &mut ends {
            end.progress().unwrap();
            sent += std::iter::from_fn(|| end.completion()).count();
        }
    }
    assert_eq!(sent, 8, "every send is over, and nobody has posted a receive");
    for (rank, end) in ends.iter_mut().enumerate() {
        let from = ((rank + 3) % 4) as u8;
        for (tag, count) in [(2, 8), (1, 10_000)] {
            end.receive(exactly(None, tag), vec![0; count], tag);
            let (buffer, ..) = received(end.completion().expect("it has come"));
            assert_eq!(buffer, bytes(count, from));
        }
    }
}

/// Holds so much open that a process can open no more than `left` objects.
fn hoard(pool: &Pool<Heap>, left: u32) {
    pool.close(pool.create("/hoard", 8).unwrap());
    for _ in left..pool.layout().geometry().opens {
        std::mem::forget(pool.open("/hoard").unwrap());
    }
}

#[test]
fn long_messages_reach_a_process_that_can_open_neither_send_buffers_nor_rings() {
    for (reader, memory_bytes) in [(1, 0), (1, u64::MAX), (0, u64::MAX)] {
        let pools = pools();
        let options = EndpointOptions { memory_bytes, ..options() };
        hoard(&pools[reader], 3);
        let (mut ends, peer) = pair(&pools, options);
        for number in 0..100 {
            let count = if number % 10 == 0 { 20_000 } else { 300 };
            ends[0].send(peer, label(number), bytes(count, number as u8), number).unwrap();
            ends[1].receive(exactly(None, number), vec![0; count], number);
            assert_eq!(received(next(&mut ends, 1)).0, bytes(count, number as u8));
        }
    }
}

#[test]
fn a_ring_that_is_idle_is_given_back_and_made_again_when_the_pair_talks() {
    let pools = pools();
    let options = EndpointOptions { idle: Duration::ZERO, calls_a_look: 64, ..options() };
    let (mut ends, peer) = pair(&pools, options);
    let listed = |pool: &Pool<Heap>| {
        let rings = pool.list("").unwrap().into_iter().filter(|object| object.name.contains("/from/"));
        rings.count()
    };
    for round in 0..5 {
        let mut most = 0;
        for number in 0..40 {
            ends[0].send(peer, label(number), bytes(700, number as u8), number).unwrap();
            ends[1].receive(exactly(None, number), vec![0; 700], number);
            assert_eq!(received(next(&mut ends, 1)).0, bytes(700, number as u8));
            most = most.max(listed(&pools[0]));
        }
        for _ in 0..500 {
            ends.iter_mut().for_each(|end| end.progress().unwrap());
        }
        // One in each direction, where the answers are as many.
        assert!((1..=2).contains(&most), "{most} rings in round {round}");
        assert_eq!(listed(&pools[0]), 0, "round {round}");
    }
}

/// Free bytes make no ring: it lies in one piece.
#[test]
fn a_pair_that_finds_no_run_for_its_ring_has_the_ring_of_one_that_is_idle_given_back() {
    let pools = pools();
    let options = EndpointOptions {
        ring: RingShape::new(4, 1 << 16).unwrap(),
        idle: Duration::from_secs(3600),
        calls_a_look: 64,
        short_talk: 100,
        send_buffers: 0,
        first_blocks: 2,
        ..options()
    };
    let [here, mut quiet, other] =
        [0, 1, 2].map(|index: usize| Endpoint::open(Arc::clone(&pools[index]), options).unwrap());
    let mut ends: [End; 2] = [here, other];
    let [to_quiet, to_other] = [quiet.address(), ends[1].address()].map(|address| ends[0].connect(address));
    let talk = |ends: &mut [End; 2], length: usize| {
        ends[0].send(to_other, label(1), bytes(length, 1), 1).unwrap();
        ends[1].receive(exactly(None, 1), vec![0; length], 1);
        assert_eq!(received(next(ends, 1)).0, bytes(length, 1));
    };
    talk(&mut ends, 10);
    // Longer than goes out unasked: the pair asks for a ring at once.
    ends[0].send(to_quiet, label(1), bytes(700, 1), 1).unwrap();
    quiet.receive(exactly(None, 1), vec![0; 700], 1);
    let mut ring = None;
    while !matches!(quiet.completion(), Some(Completion::Received { .. })) {
        ends[0].progress().unwrap();
        quiet.progress().unwrap();
        let listed = pools[0].list("").unwrap().into_iter().find(|object| object.name.contains("/from/"));
        ring = ring.or(listed);
    }
    let ring = ring.expect("the pair has a ring").name;
    // Every second of many objects goes: more is free than small rings may need, in pieces that are shorter than a ring.
    let taken = fill_with(&pools[0], 1 << 17, "taken");
    fill_with(&pools[0], 1 << 13, "rest");
    taken.iter().step_by(2).for_each(|name| pools[0].destroy(name).unwrap());
    let full = pools[0].create("/probe", 1 << 20).unwrap_err();
    let PoolError::Full { free, largest, .. } = full else { panic!("{full}") };
    let needed = 3 * 128 + options.ring.producer_bytes();
    assert!(
        largest < needed && free > needed + BYTES / 8,
        "{largest} of {free} in a piece, a ring takes {needed}"
    );
    let start = Instant::now();
    while pools[0].open(&ring).map(|ring| pools[0].close(ring)).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(60), "the ring of the idle pair stays");
        talk(&mut ends, 10);
        quiet.progress().unwrap();
    }
}

#[test]
fn an_endpoint_that_stays_takes_no_more_blocks_than_peers_that_are_there_at_once() {
    let bytes = 16 << 20;
    let heap = formatted(&geometry(bytes), bytes);
    let pool = Arc::new(Pool::attach(heap.clone(), Member::new(0, 1)).unwrap());
    let mut stays = Endpoint::open(Arc::clone(&pool), options()).unwrap();
    let mut taken = vec![];
    for round in 0..20 {
        let pool = Arc::new(Pool::attach(heap.process(1, ProcessSlot(0)), Member::new(1, 1)).unwrap());
        let comes = Endpoint::open(pool, options()).unwrap();
        let (here, there) = (stays.address(), comes.address());
        let mut ends = [comes, stays];
        let peers = [ends[0].connect(here), ends[1].connect(there)];
        for (index, peer) in peers.into_iter().enumerate() {
            // As many as slots, so that the next finds all headers of the one before.
            for number in 0..6 {
                ends[index].inject(peer, label(round), &[number; 10]).unwrap();
            }
        }
        for index in 0..2 {
            for number in 0..6 {
                ends[index].receive(exactly(None, round), vec![0; 10], round);
                assert_eq!(received(next(&mut ends, index)).0, [number; 10]);
            }
        }
        taken.push(ends[1].pool_bytes());
        [_, stays] = ends;
    }
    assert_eq!(taken[2], taken[19], "{taken:?}");
}
