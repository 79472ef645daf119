//! What two hosts do with one pool, each in a process of its own that holds what the other wrote against what it must be. They
//! are processes of one kernel in `tests/shadow.rs`, and of two kernels in the rack.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_kernels::{Dtype, Op};
use polder_mem::{Memory, Offset};
use polder_pool::endpoint::{Address, Completion, Endpoint, EndpointOptions, Filter, Label, MessageBuffer};
use polder_pool::group::{Group, GroupOptions, JoinedGroup};
use polder_pool::ring::{Consumer, Producer, RingLink, RingPlace, RingShape};
use polder_pool::wait::Patience;
use polder_pool::window::{Access, LockPlace, Window};
use polder_pool::{
    Buffers, Collective, InitialContents, Object, Operation, Pool, PoolError, PrivateMemory, Process,
};

/// A part of the pool, as hosts 0 and 1 use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Each host creates what the other opens, reads, lists and destroys.
    Objects,
    /// Host 0 sends messages of all forms to host 1, and gets them back.
    Rings,
    /// Each host reads in place what the other sends from private memory.
    Offers,
    /// Both put into segments of the other, count together, and take turns under a lock.
    Windows,
    /// Both compute together, through the staging and on objects of their own.
    Collectives,
}

impl Part {
    /// Every part.
    pub const ALL: [Self; 5] = [Self::Objects, Self::Rings, Self::Offers, Self::Windows, Self::Collectives];

    /// As a command names it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Objects => "objects",
            Self::Rings => "rings",
            Self::Offers => "offers",
            Self::Windows => "windows",
            Self::Collectives => "collectives",
        }
    }

    /// Plays `host`, while another process plays the other.
    ///
    /// # Panics
    /// When something is not as it must be, or does not come within the pool's timeout.
    pub fn play<M: Memory>(self, pool: &Arc<Pool<M>>, host: u16) {
        match self {
            Self::Objects => objects(pool, host),
            Self::Rings => rings(pool, host),
            Self::Offers => offers(pool, host),
            Self::Windows => windows(pool, host),
            Self::Collectives => collectives(pool, host),
        }
    }
}

/// A flush: the file that it is in, words on a line before it, and words on its own line.
#[derive(Clone, Copy, Debug)]
pub struct Flush {
    file: &'static str,
    after: &'static str,
    line: &'static str,
}

impl Flush {
    /// Where it stands in the source, so that lines may move.
    ///
    /// # Panics
    /// When it is not there.
    #[must_use]
    pub fn site(&self) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/pool/src").join(self.file);
        let source = std::fs::read_to_string(path).unwrap();
        let mut lines = (1..).zip(source.lines());
        lines.find(|(_, line)| line.contains(self.after)).expect(self.after);
        let found = lines.find(|(_, line)| line.contains(self.line));
        let (number, _) = found.unwrap_or_else(|| panic!("no {:?} in {}", self.line, self.file));
        format!("pool/src/{}:{number}", self.file)
    }
}

const fn flush(file: &'static str, after: &'static str, line: &'static str) -> Flush {
    Flush { file, after, line }
}

/// Flushes that a part cannot do without.
pub const FLUSHES: [(Flush, Part); 15] = [
    (flush("layout/line.rs", "pub fn publish_and_fence<", "memory.write_back(at, LINE)"), Part::Objects),
    (flush("directory.rs", "fn scan(", "memory.invalidate("), Part::Objects),
    (flush("ring/producer.rs", "fn publish<", "memory.write_back(at, LINE)"), Part::Rings),
    (flush("ring/consumer.rs", "fn copy_out<", "memory.invalidate(cell"), Part::Rings),
    (flush("layout/line.rs", "pub fn read<", "memory.invalidate(at, LINE)"), Part::Rings),
    (flush("endpoint.rs", "pub fn send(", "memory.write_back("), Part::Offers),
    (flush("endpoint.rs", "fn read_in_place(", "memory.invalidate("), Part::Offers),
    (flush("layout/line.rs", "pub fn publish<", "memory.write_back(at, LINE)"), Part::Collectives),
    (flush("window.rs", "pub fn get(", "memory.invalidate("), Part::Windows),
    (flush("window.rs", "pub fn expose(", "memory.write_back("), Part::Windows),
    (flush("window.rs", "pub fn renew(", "memory.invalidate("), Part::Windows),
    (flush("window.rs", "fn change(", "memory.invalidate("), Part::Windows),
    (flush("window/lock.rs", "fn announce(", "memory.write_back("), Part::Windows),
    (flush("window/epoch.rs", "fn count(", "memory.write_back("), Part::Windows),
    (flush("collectives/run.rs", "fn invalidate(", ".invalidate("), Part::Collectives),
];

/// Opens an object as soon as it is there.
fn open<M: Memory>(pool: &Arc<Pool<M>>, name: &str) -> Object {
    let start = Instant::now();
    loop {
        match pool.open(name) {
            Err(PoolError::NotFound { .. }) if start.elapsed() < pool.member().timeout => {
                std::thread::yield_now();
            }
            opened => return opened.unwrap(),
        }
    }
}

/// Bytes that nobody else sends.
fn bytes(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (seed * 31 + index * 7 + index / 251) as u8).collect()
}

fn read<M: Memory>(pool: &Arc<Pool<M>>, object: &Object) -> Vec<u8> {
    let mut read = vec![0; object.bytes() as usize];
    object.read_at(pool.memory(), 0, &mut read).unwrap();
    read
}

/// Each host creates what the other opens, reads, lists and destroys.
fn objects<M: Memory>(pool: &Arc<Pool<M>>, host: u16) {
    for round in 0..30 {
        let name = |host: u16| format!("/{round}/{host}");
        // Of the same places as in the round before.
        let object = pool.create(&name(host), 700).unwrap();
        object.write_at(pool.memory(), 0, &bytes(round + usize::from(host), 700)).unwrap();
        pool.close(
            pool.create_filled(&format!("{}/written", name(host)), 0, InitialContents::Nothing).unwrap(),
        );
        let other = 1 - host;
        pool.close(open(pool, &format!("{}/written", name(other))));
        let theirs = open(pool, &name(other));
        assert_eq!(read(pool, &theirs), bytes(round + usize::from(other), 700), "{}", theirs.name());
        assert!(pool.list("").unwrap().iter().any(|listed| listed.name == theirs.name()));
        pool.close(theirs);
        pool.destroy(&name(other)).unwrap();
        pool.destroy(&format!("{}/written", name(other))).unwrap();
        assert!(matches!(pool.open(&name(other)), Err(PoolError::NotFound { .. })));
        pool.close(object);
        let start = Instant::now();
        while pool.open(&name(host)).map(|object| pool.close(object)).is_ok() {
            assert!(start.elapsed() < pool.member().timeout, "{} is still there", name(host));
        }
        pool.maintain().unwrap();
    }
}

/// Host 0 sends messages of all forms to host 1, and gets them back.
fn rings<M: Memory>(pool: &Arc<Pool<M>>, host: u16) {
    let shape = RingShape::new(3, 1024).unwrap();
    let extents = [("lines", shape.producer_bytes()), ("credits", shape.consumer_bytes())];
    let own = extents.map(|(what, bytes)| {
        pool.create_filled(&format!("/{what}/{host}"), bytes, InitialContents::Nothing).unwrap()
    });
    let other = 1 - host;
    let [their_lines, their_credits] = extents.map(|(what, _)| open(pool, &format!("/{what}/{other}")));
    let peer = pool.process(other, pool.this_process().slot).unwrap();
    let out = RingPlace { lines: own[0].at(), credits: their_credits.at(), generation: 1 };
    let back = RingPlace { lines: their_lines.at(), credits: own[1].at(), generation: 1 };
    let mut producer = Producer::new(pool.memory().clone(), shape, out, link(pool, peer));
    let mut consumer = Consumer::new(pool.memory().clone(), shape, back, link(pool, peer));
    for number in 0..300 {
        let sent = bytes(number, [8, 100, 700, 1024, 2500][number % 5]);
        let deadline = pool.memory().now() + pool.member().timeout;
        if host == 0 {
            producer.push(1, number as u64, &sent, deadline).unwrap();
        }
        let (envelope, received) = consumer.pop(deadline).unwrap();
        assert_eq!((envelope.tag, received == sent), (number as u64, true), "message {number}");
        if host == 1 {
            producer.push(1, number as u64, &received, deadline).unwrap();
        }
    }
}

/// What one host sends and the other receives: bytes in the pool, and room for some elsewhere.
struct Lent(Vec<u8>, Option<Offset>);

impl MessageBuffer for Lent {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn place(&self) -> Option<Offset> {
        self.1
    }
}

/// Each host reads in place what the other sends from one piece of private memory, again and again.
fn offers<M: Memory>(pool: &Arc<Pool<M>>, host: u16) {
    const BYTES: usize = 3001;
    let ring = RingShape::new(3, 1024).unwrap();
    let options = EndpointOptions {
        ring,
        eager_bytes: 512,
        window_bytes: 4096,
        in_place_bytes: 513,
        ..Default::default()
    };
    let memory = PrivateMemory::take(Arc::clone(pool), 0, BYTES as u64).unwrap();
    let mut end = Endpoint::open(Arc::clone(pool), options).unwrap();
    let own = pool.create(&format!("/address/{host}"), 16).unwrap();
    own.write_at(pool.memory(), 0, &end.address().encode()).unwrap();
    pool.close(pool.create(&format!("/address/{host}/written"), 0).unwrap());
    pool.close(open(pool, &format!("/address/{}/written", 1 - host)));
    let theirs = read(pool, &open(pool, &format!("/address/{}", 1 - host)));
    let peer = end.connect(Address::decode(theirs.try_into().unwrap()).unwrap());
    let label = Label { kind: 1, tag: 0, data: None };
    let filter = Filter { from: Some(peer), kind: 1, tag: 0, ignore: 0 };
    for round in 0..40 {
        let sent = bytes(round + usize::from(host), BYTES);
        pool.memory().copy_in(memory.at(), &sent).unwrap();
        end.send(peer, label, Lent(sent, Some(memory.at())), ()).unwrap();
        end.receive(filter, Lent(vec![0; BYTES], None), ());
        let mut open = 2;
        until(pool, || {
            end.progress()?;
            if let Some(done) = end.completion() {
                open -= 1;
                if let Completion::Received { buffer, .. } = done {
                    assert_eq!(buffer.0, bytes(round + usize::from(1 - host), BYTES), "message {round}");
                }
            }
            Ok(open == 0)
        });
    }
    end.close().unwrap();
}

fn link<M: Memory>(
    pool: &Arc<Pool<M>>,
    other: Process,
) -> RingLink<impl Fn() -> Result<(), PoolError> + use<M>> {
    let (pool, me) = (Arc::clone(pool), pool.this_process());
    RingLink {
        peer: other.peer(),
        epoch: 0,
        bell: pool.layout().bell(me.host, me.slot),
        wakes: Some(pool.layout().bell(other.host, other.slot)),
        patience: Patience::SHARED,
        alive: move || pool.expect_alive(&other, "message", 0),
    }
}

/// Both hosts store to their own segments and read what the other put there, count together, and take turns under a lock.
fn windows<M: Memory>(pool: &Arc<Pool<M>>, host: u16) {
    let (me, other) = (u32::from(host), 1 - u32::from(host));
    let mut window = Window::create(Arc::clone(pool), "w", me, 2, 256).unwrap();
    pool.close(open(pool, &format!("/window/0/w/{other}")));
    window.join().unwrap();
    for round in 1..=40_u8 {
        pool.memory().store(window.own_data().at, round.into());
        window.expose(me, 0, 8).unwrap();
        window.post(&[other]).unwrap();
        window.start(&[other]).unwrap();
        until(pool, || window.try_start());
        let mut word = [0; 8];
        window.get(other, 0, &mut word).unwrap();
        assert_eq!(word, u64::from(round).to_le_bytes(), "what {other} exposed");
        window.put(other, 67, &[round; 30]).unwrap();
        window
            .update(0, 128, 4, &mut |bytes| {
                bytes[0] += 1;
                true
            })
            .unwrap();
        let mut place = LockPlace::default();
        until(pool, || window.try_lock(0, Access::Exclusive, &mut place));
        window.get(0, 192, &mut word).unwrap();
        word[0] += 1;
        // Long enough for the other to come.
        std::thread::sleep(Duration::from_micros(200));
        window.put(0, 192, &word).unwrap();
        window.unlock(0);
        window.complete().unwrap();
        until(pool, || window.try_wait());
        window.renew(me, 0, 128).unwrap();
        let mut put = [0; 32];
        pool.memory().copy_out(window.own_data().at + 66, &mut put).unwrap();
        assert_eq!(
            put,
            std::array::from_fn(|byte| if byte % 31 == 0 { 0 } else { round }),
            "what {other} put"
        );
        let mut counts = [0; 72];
        window.get(0, 128, &mut counts).unwrap();
        assert!(counts[0] >= 2 * round && counts[64] >= 2 * round, "{counts:?} in round {round}");
    }
}

fn until<M: Memory>(pool: &Arc<Pool<M>>, mut step: impl FnMut() -> Result<bool, PoolError>) {
    let start = Instant::now();
    while !step().unwrap() {
        assert!(start.elapsed() < pool.member().timeout, "it does not come");
        std::thread::yield_now();
    }
}

/// Both hosts compute together, through the staging and on objects of their own.
fn collectives<M: Memory>(pool: &Arc<Pool<M>>, host: u16) {
    let options = GroupOptions {
        staging_bytes: 4096,
        segment_bytes: 512,
        direct_bytes: 512,
        timeout: pool.member().timeout,
        patience: Patience::SHARED,
        ..GroupOptions::default()
    };
    let mut group = Group::join(Arc::clone(pool), "/group", host.into(), 2, options, None).unwrap();
    let object = pool.create(&format!("/data/{host}"), 4096).unwrap();
    for round in 0..40 {
        for elements in [5, 700] {
            reduce(&mut group, round, elements);
        }
        let mut all = vec![0; 2 * 300];
        let mine = bytes(round + group.rank(), 300);
        let gather = Operation::moving(Collective::AllGather, Dtype::U8);
        group.run(&gather, Buffers::Apart { input: &mine, output: &mut all }).unwrap();
        assert_eq!(all, [bytes(round, 300), bytes(round + 1, 300)].concat(), "all-gather {round}");
        let root = round % 2;
        let mut data = if group.rank() == root { bytes(round, 3000) } else { vec![0; 3000] };
        group.broadcast(root, Dtype::U8, &mut data).unwrap();
        assert_eq!(data, bytes(round, 3000), "broadcast {round}");
        object.write_at(pool.memory(), 0, &elements(round, group.rank(), 512)).unwrap();
        let add = Operation::reducing(Collective::AllReduce, Op::Sum, Dtype::U64);
        group.run(&add, Buffers::Pool { at: object.at(), bytes: 4096 }).unwrap();
        assert_eq!(read(pool, &object), sum(round, 512), "all-reduce in the pool {round}");
    }
    // So that nobody finds the other gone too early.
    group.barrier().unwrap();
}

fn reduce<M: Memory>(group: &mut JoinedGroup<M>, round: usize, count: usize) {
    let mut data = elements(round, group.rank(), count);
    group.all_reduce(Op::Sum, Dtype::U64, &mut data).unwrap();
    assert_eq!(data, sum(round, count), "all-reduce {round} of {count} elements");
}

fn element(round: usize, rank: usize, index: usize) -> u64 {
    (round * 1000 + rank * 500_000 + index * index) as u64
}

fn elements(round: usize, rank: usize, count: usize) -> Vec<u8> {
    (0..count).flat_map(|index| element(round, rank, index).to_le_bytes()).collect()
}

fn sum(round: usize, count: usize) -> Vec<u8> {
    let sum = |index| element(round, 0, index) + element(round, 1, index);
    (0..count).flat_map(|index| sum(index).to_le_bytes()).collect()
}
