//! What a ring costs between two processes, beside the least line operations that must be done, for whoever changes it:
//! `cargo bench -p polder-pool --bench ring [FILTER]`. Users run `polder-dev bench ring`.
//!
//! Turns of 500 ns lock into step with each other: where the other's store meets a look, both go to memory. A change of
//! 20 ns can cost 200, in the bare operations as well, so compare several runs, on cores that nothing else uses.

use std::hint::black_box;
use std::time::{Duration, Instant};

use polder_mem::testing::{Child, Scratch};
use polder_mem::{AnyMemory, Bell, Coherence, HostPlan, LINE, Mapped, Memory, Nanos, Offset, Region};
use polder_pool::ring::{Consumer, Producer, RingLink, RingPlace, RingShape};
use polder_pool::wait::Patience;
use polder_pool::{Peer, PoolError};

const BYTES: u64 = 16 << 20;
/// Where the floors signal: host 0's line, host 1's line, and the bulk between them.
const SIGNALS: [Offset; 2] = [Offset(0), Offset(4096)];
const BULK: Offset = Offset(12 << 20);
/// The two directions of rings.
const CREDITS: [Offset; 2] = [Offset(8192), Offset(12288)];
const LINES: [Offset; 2] = [Offset(16384), Offset(6 << 20)];
const BATCHES: usize = 20;

type Alive = fn() -> Result<(), PoolError>;

fn main() {
    // In turn: what the edges hold, which is told at run time, beside a type of its own for each.
    let kinds = [Coherence::Software, Coherence::Coherent];
    for (coherence, is_any) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        println!("{coherence:?}{}", if is_any { ", told at run time" } else { "" });
        let scratch = Scratch::new();
        let path = scratch.path().join("region");
        Region::create(&path, BYTES).expect("a region on tmpfs");
        let plan = |host| HostPlan {
            pool: 1,
            host,
            hosts: 2,
            processes: 1,
            local_words: 1,
            bells: 2,
            directory: scratch.path().into(),
            kept: 0..0,
            patience: HostPlan::PATIENCE,
        };
        let run = |host: u16| {
            let region = Region::open(&path).expect("the region that was just made");
            match coherence {
                Coherence::Software if !is_any => {
                    side(&Mapped::new(region).attach(&plan(host)).expect("a free slot"), host)
                }
                Coherence::Coherent if !is_any => {
                    side(&Mapped::coherent(region).attach(&plan(host)).expect("a free slot"), host)
                }
                _ => {
                    let memory = AnyMemory::new(region).with_coherence(coherence);
                    side(&memory.attach(&plan(host)).expect("a free slot"), host)
                }
            }
        };
        let mut child = Child::fork(|| run(1));
        run(0);
        child.wait();
    }
}

/// One process of the pair: both run the same experiments in the same order.
fn side<M: Memory>(memory: &M, host: u16) {
    let mut turn = 0;
    let floor = Floor { memory, host };
    let small = RingShape::new(4, 4096).and_then(|ring| ring.with_slots(64)).expect("a shape in range");
    report(host, "8-byte round trip, floor", 2000, 0, |n| floor.round_trips(n));
    let mut ends = Ends::new(memory, host, small, &mut turn);
    report(host, "8-byte round trip, ring", 2000, 0, |n| ends.round_trips(n, 8, 8));
    if host == 0 {
        alone(memory);
    }
    for bytes in [24, 48, 64, 128, 256, 1024, 4096] {
        for (name, from) in [("stored", usize::MAX), ("past the caches", 0)] {
            let mut ends = Ends::new(memory, host, small, &mut turn);
            ends.producer = ends.producer.with_streaming_from(from);
            report(host, &format!("{bytes} bytes there, 8 back, {name}"), 500, 0, |n| {
                ends.round_trips(n, bytes, 8)
            });
        }
    }
    for kib in [16, 64, 256, 1024, 4096] {
        let bytes = kib << 10;
        let batch = (4 << 20) / bytes;
        report(host, &format!("{kib} KiB there, 8 bytes back, floor"), batch, bytes, |n| {
            floor.copies(n, bytes)
        });
        for cell in [16, 32, 64, 128] {
            let shape = RingShape::new(8, cell << 10).and_then(|ring| ring.with_slots(64));
            let shape = shape.expect("a shape in range");
            let mut ends = Ends::new(memory, host, shape, &mut turn);
            let name = format!("{kib} KiB there, 8 bytes back, cells of {cell} KiB");
            report(host, &name, batch, bytes, |n| ends.round_trips(n, bytes, 8));
        }
    }
}

/// What both ends cost when one thread does them in turn, with no other process near.
fn alone<M: Memory>(memory: &M) {
    let shape = RingShape::default();
    let place = RingPlace { lines: LINES[0] + (1 << 20), credits: CREDITS[0] + 64, generation: 99 };
    let link = || Ends::<M>::link(0);
    let mut producer = Producer::new(memory.clone(), shape, place, link());
    let mut consumer = Consumer::new(memory.clone(), shape, place, link());
    let (mut buffer, mut value, deadline) = ([0; 8], 0, memory.now() + Duration::from_secs(600));
    report(0, "alone: one store, write-back, fence, flush, fence, load", 2000, 0, |n| {
        for _ in 0..n {
            value += 1;
            memory.store(BULK, value);
            memory.write_back(BULK, LINE);
            memory.sfence();
            memory.invalidate(BULK, LINE);
            memory.fence_invalidations();
            assert_eq!(memory.load(BULK), Ok(value));
        }
    });
    report(0, "alone: push and pop of 8 bytes", 2000, 0, |n| {
        for _ in 0..n {
            producer.push(1, 1, &buffer, deadline).expect("room");
            consumer.pop_slice(&mut buffer, deadline).expect("a message");
        }
    });
}

/// Times batches of `run` and prints what one costs: the least and the median.
fn report(host: u16, name: &str, batch: usize, bytes: usize, mut run: impl FnMut(usize)) {
    // Both hosts skip alike.
    if std::env::args().skip(1).any(|filter| !filter.starts_with('-') && !name.contains(&filter)) {
        return;
    }
    run(batch);
    let mut times: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let begin = Instant::now();
            run(batch);
            begin.elapsed().as_nanos() as f64 / batch as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    if host == 0 {
        let (least, median) = (times[0], times[BATCHES / 2]);
        let rate =
            if bytes > 0 { format!(", {:5.2} GB/s at best", bytes as f64 / least) } else { String::new() };
        println!("  {name:<55} least {least:9.0} ns, median {median:9.0} ns{rate}");
    }
}

/// The same traffic with the bare line operations.
struct Floor<'a, M> {
    memory: &'a M,
    host: u16,
}

impl<M: Memory> Floor<'_, M> {
    fn signal(&self, value: u64) {
        let at = SIGNALS[usize::from(self.host)];
        self.memory.store(at, value);
        self.memory.write_back(at, LINE);
        self.memory.sfence();
    }

    fn await_signal(&self, value: u64) {
        let at = SIGNALS[usize::from(1 - self.host)];
        loop {
            self.memory.invalidate(at, LINE);
            self.memory.fence_invalidations();
            if self.memory.load(at) == Ok(value) {
                return;
            }
            self.memory.pause();
        }
    }

    fn round_trips(&self, count: usize) {
        self.copies(count, 0);
    }

    /// Host 0 copies in and says so, host 1 copies out and says so.
    fn copies(&self, count: usize, bytes: usize) {
        let mut buffer = vec![1; bytes];
        // A value that was not the last of an earlier run: both hosts count alike.
        for value in (1..=count as u64).chain([0]) {
            if self.host == 0 {
                if bytes > 0 {
                    self.memory.copy_in_nt(BULK, &buffer).expect("good memory");
                    self.memory.sfence();
                }
                self.signal(value);
                self.await_signal(value);
            } else {
                self.await_signal(value);
                if bytes > 0 {
                    self.memory.invalidate(BULK, bytes as u64);
                    self.memory.fence_invalidations();
                    self.memory.copy_out(BULK, black_box(&mut buffer)).expect("good memory");
                }
                self.signal(value);
            }
        }
    }
}

/// A process's ends of a ring there and a ring back.
struct Ends<M> {
    memory: M,
    host: u16,
    producer: Producer<M, Alive>,
    consumer: Consumer<M, Alive>,
    buffer: Vec<u8>,
}

impl<M: Memory> Ends<M> {
    fn new(memory: &M, host: u16, shape: RingShape, turn: &mut u32) -> Self {
        *turn += 1;
        let link = || Self::link(host);
        let place = |from: u16| {
            let from = usize::from(from);
            RingPlace { lines: LINES[from], credits: CREDITS[1 - from], generation: *turn }
        };
        Self {
            memory: memory.clone(),
            host,
            producer: Producer::new(memory.clone(), shape, place(host), link()),
            consumer: Consumer::new(memory.clone(), shape, place(1 - host), link()),
            buffer: vec![1; 8 << 20],
        }
    }

    fn link(host: u16) -> RingLink<Alive> {
        let alive: Alive = || Ok(());
        let (bell, wakes) = (Bell(host.into()), Some(Bell((1 - host).into())));
        let patience = Patience { spins: 100_000, yields: 200, nap: Duration::from_micros(500) };
        RingLink { peer: Peer::new(1 - host, 0), epoch: 1, bell, wakes, patience, alive }
    }

    fn deadline(&self) -> Nanos {
        self.memory.now() + Duration::from_secs(60)
    }

    fn round_trips(&mut self, count: usize, there: usize, back: usize) {
        let deadline = self.deadline();
        for _ in 0..count {
            if self.host == 0 {
                self.producer.push(1, 1, &self.buffer[..there], deadline).expect("room");
                self.consumer.pop_slice(&mut self.buffer, deadline).expect("an answer");
            } else {
                self.consumer.pop_slice(&mut self.buffer, deadline).expect("a message");
                self.producer.push(1, 1, &self.buffer[..back], deadline).expect("room");
            }
        }
    }
}
